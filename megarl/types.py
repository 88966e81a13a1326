"""The values that travel between the parts of megarl. Nothing here computes; everything is frozen.

Lengths: P prompt tokens, R response tokens. Token arrays are numpy, so that they pass through Ray's object store
without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]
PromptContent = str | Sequence[Mapping[str, str]]
"""A plain string, or chat messages: [{"role": "user", "content": "3+5="}]."""


def plain_text(content: PromptContent) -> str:
    """What a model without chat template is given."""
    return content if isinstance(content, str) else "\n".join(message["content"] for message in content)


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised.

    Prompt(uid="0-17", token_ids=[5, 9, 2], data_source="openai/gsm8k", ground_truth="72", extra_info={"index": 17})
    """

    uid: str
    """Unique over the whole run: "<epoch>-<row>"; validation prompts are "v-<row>"."""
    token_ids: IntArray  # [P]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    content: PromptContent = ""
    """The row's prompt before it was tokenised; empty where nobody reads it."""


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn. temperature 0 is greedy; top_p 1 and top_k -1 leave the distribution as it is."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Answers go on to max_new_tokens whatever they say; for benchmarks. stop_token_ids must be empty."""


@dataclass(frozen=True)
class GenerationRequest:
    """Ask an engine for one answer to one prompt. `seed` makes the seeded engines reproducible whatever shares their
    batch."""

    uid: str
    """Unique over the run: "<prompt uid>/<answer number>"."""
    prompt_ids: IntArray  # [P]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """What an engine sampled: tokens in, tokens out. The stop token, where there is one, is the last token."""

    uid: str
    response_ids: IntArray  # [R]
    logprobs: FloatArray  # [R], of the distribution at the sampling temperature, before top-p and top-k
    finish_reason: FinishReason
    weight_version: int
    cached_tokens: int = 0
    """Of the prompt, those that the engine's KV cache held already."""


@dataclass(frozen=True)
class Activity:
    """What an engine did since it was last asked, from looks at it at equal intervals."""

    num_looks: int = 0
    num_running: float = 0.0
    """Answers that are generated together, a mean; and the most."""
    max_running: float = 0.0
    num_waiting: float = 0.0
    max_waiting: float = 0.0
    max_cache_use: float = 0.0
    """Share of the KV cache."""

    def __add__(self, other: Activity) -> Activity:
        """Of two stretches, or of two engines."""
        looks = self.num_looks + other.num_looks

        def mean(own: float, others: float) -> float:
            return (own * self.num_looks + others * other.num_looks) / max(looks, 1)

        return Activity(
            looks,
            mean(self.num_running, other.num_running),
            max(self.max_running, other.max_running),
            mean(self.num_waiting, other.num_waiting),
            max(self.max_waiting, other.max_waiting),
            max(self.max_cache_use, other.max_cache_use),
        )


@dataclass(frozen=True)
class Segment:
    """A stretch of an answer: one turn of the policy under one weight version, or what an environment said.

    Segment(token_ids=[31, 8], logprobs=[-0.1, -2.3], by_policy=True, weight_version=4)
    """

    token_ids: IntArray  # [R of it]
    logprobs: FloatArray  # [R of it]; 0 where the policy did not write
    by_policy: bool
    weight_version: int
    """Of an observation: that of the turn before it."""


@dataclass(frozen=True)
class Sample:
    """One answer with its reward: what the trainer learns from. It may hold tokens that several weight versions
    wrote."""

    uid: str
    group: str
    """The uid of its prompt: the answers to one prompt form a group."""
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [R]
    rollout_logprobs: FloatArray  # [R]
    loss_mask: BoolArray  # [R]; False on tokens that the policy did not write (a tool's observation)
    weight_versions: IntArray  # [R]
    score: float
    """The verifiable reward, given at the last response token."""
    finish_reason: FinishReason
    data_source: str
    reward_error: str | None = None
    """Why the reward function failed, if it did; the score is then 0."""
    penalty: float = 0.0
    """What is in the score beside the reward: 0, or less for an answer near the length limit."""
    prompt_content: PromptContent = ""
    """`Prompt.content`."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class SampleInfo:
    """The scalars of a sample that the driver holds; the tokens stay in the object store."""

    uid: str
    group: str
    prompt_length: int
    response_length: int
    num_loss_tokens: int
    score: float
    finish_reason: FinishReason
    data_source: str
    min_weight_version: int
    reward_error: str | None = None
    baseline: float | None = None
    """remax: the score of the greedy answer to the same prompt."""
    penalty: float = 0.0

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def rule_score(self) -> float:
        """What the reward function or the environment gave."""
        return self.score - self.penalty

    @classmethod
    def of(cls, sample: Sample) -> SampleInfo:
        return cls(
            uid=sample.uid,
            group=sample.group,
            prompt_length=len(sample.prompt_ids),
            response_length=len(sample.response_ids),
            num_loss_tokens=int(sample.loss_mask.sum()),
            score=sample.score,
            finish_reason=sample.finish_reason,
            data_source=sample.data_source,
            min_weight_version=int(sample.weight_versions.min()) if len(sample.weight_versions) else 0,
            reward_error=sample.reward_error,
            penalty=sample.penalty,
        )
