"""What a reward model reads of a sample, and how its scores and the rule's become one. The model itself is a role on
the trainer ranks."""

from __future__ import annotations

import filecmp
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config import Config
from megarl.types import IntArray, PromptContent, Sample, SampleInfo, plain_text

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class RewardTokens:
    """From samples to the tokens that a reward model reads."""

    tokenizer: Any
    """The reward model's."""
    policy_tokenizer: Any
    """None: the tokens of prompt and answer are passed as they are."""
    apply_chat_template: bool
    max_length: int
    pad_token_id: int | None
    """Of the reward model's config.json."""

    def __call__(self, samples: Sequence[Sample]) -> tuple[list[IntArray], int]:
        """The tokens of each sample, and how many samples lost their beginning to max_length.

        Each ends where transformers' sequence classification takes the score: at its last token that is not
        pad_token_id.

        Raises:
            ValueError: a sample without any token to read.
        """
        whole = [_without_padding(tokens, self.pad_token_id) for tokens in self._tokens(samples)]
        empty = [sample.uid for sample, tokens in zip(samples, whole, strict=True) if not len(tokens)]
        if empty:
            raise ValueError(
                f"the reward model has nothing to read of {len(empty)} of {len(samples)} answers, the first is "
                f"{empty[0]}: prompt and answer have no text; look at the data, or set "
                f"reward_model.apply_chat_template to true"
            )
        return [tokens[-self.max_length :] for tokens in whole], sum(len(t) > self.max_length for t in whole)

    def _tokens(self, samples: Sequence[Sample]) -> list[IntArray]:
        if self.policy_tokenizer is None or not samples:
            return [np.concatenate([sample.prompt_ids, sample.response_ids]) for sample in samples]
        answers = [self.policy_tokenizer.decode(sample.response_ids, skip_special_tokens=True) for sample in samples]
        contents = [sample.prompt_content for sample in samples]
        if self.apply_chat_template:
            chats = [[*_messages(c), _message("assistant", a)] for c, a in zip(contents, answers, strict=True)]
            texts = self.tokenizer.apply_chat_template(chats, tokenize=False)
        else:
            texts = [plain_text(content) + answer for content, answer in zip(contents, answers, strict=True)]
        found = self.tokenizer(texts, add_special_tokens=not self.apply_chat_template)["input_ids"]
        return [np.asarray(token_ids, np.int64) for token_ids in found]


def passes_tokens(config: Config) -> bool:
    """Whether the reward model reads the policy's tokens as they are: it has the same tokenizer and applies no chat
    template."""
    own = config.reward_model
    if own.apply_chat_template:
        return False
    policy, ours = (config.model.tokenizer_path or config.model.path), (own.tokenizer_path or own.path)
    assert policy is not None, "the policy has a folder"
    assert ours is not None, "there is a reward model"
    if os.path.realpath(policy) == os.path.realpath(ours):
        return True
    its, own_file = (os.path.join(folder, TOKENIZER_FILE) for folder in (policy, ours))
    return os.path.isfile(its) and os.path.isfile(own_file) and filecmp.cmp(its, own_file, shallow=False)


def combined_scores(
    infos: Sequence[SampleInfo], model_scores: Sequence[float], weight: float, rule_weight: float
) -> list[float]:
    """rule_weight x rule + weight x model + penalty of each answer. The rule is what the reward function or the
    environment gave; the penalty, for an answer near the length limit, is nobody's and counts whole.

    Raises:
        ValueError: a score of the model that is no finite number.
    """
    wrong = [info.uid for info, score in zip(infos, model_scores, strict=True) if not math.isfinite(score)]
    if wrong:
        raise ValueError(
            f"the reward model's score is not finite for {len(wrong)} of {len(infos)} answers, the first is "
            f"{wrong[0]}; check the checkpoint in reward_model.path, or set model.precision to fp32"
        )
    return [
        rule_weight * info.rule_score + weight * score + info.penalty
        for info, score in zip(infos, model_scores, strict=True)
    ]


def _without_padding(tokens: IntArray, pad_token_id: int | None) -> IntArray:
    """The tokens up to the last that is no padding: a policy's end token may be the reward model's pad token."""
    if pad_token_id is None:
        return tokens
    real = np.flatnonzero(tokens != pad_token_id)
    return tokens[: real[-1] + 1] if len(real) else tokens[:0]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(content: PromptContent) -> Sequence[Mapping[str, str]]:
    return [_message("user", content)] if isinstance(content, str) else content
