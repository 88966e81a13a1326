"""The embedded engine: transformers generates in the calling process. For laptops; same surface as SGLangEngine.

Sampling is seeded per request: the uniform number for the answer's token t is the t-th draw of a Philox stream keyed
by the request's seed, so that an answer depends on its own request only, not on what shares its batch, its order or
the batch size (up to the rounding of matrix products of different shapes: it decides only between tokens that are
tied to 1e-6; the same list of requests gives the same bits).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicCache

from megarl.types import Activity, GenerationRequest, GenerationResult

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share of its rows is unfinished."""


class HFEngine:
    """One transformers model that answers batches of requests and whose parameters a plan may write in place."""

    answers_at_once = True

    def __init__(
        self,
        model: str | PretrainedConfig,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        max_batch: int = 256,
        device: str = "cpu",
        trust_remote_code: bool = False,
        load_weights: bool = True,
    ) -> None:
        """Build the model.

        Args:
            model: a Hugging Face folder, or a configuration: the weights are then random and are expected by sync.
            max_batch: sequences generated together.
            load_weights: False with a folder reads its configuration only; the weights are expected by sync.

        Raises:
            ValueError: max_batch below 1, or an unknown precision.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}, must be at least 1 (rollout.max_batch)")
        if precision not in DTYPES:
            raise ValueError(f"precision is {precision!r}, must be one of {', '.join(DTYPES)} (model.precision)")
        self.model = _build_model(model, DTYPES[precision], trust_remote_code, load_weights).to(device)
        self.model.eval().requires_grad_(False)
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.weight_version = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One answer a request, in the order of the requests.

        Raises:
            ValueError: an empty prompt, max_new_tokens below 1, or a negative temperature; names the request.
        """
        for request in requests:
            _check_request(request)
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        results: dict[int, GenerationResult] = {}
        for start in range(0, len(by_length), self.max_batch):
            indices = by_length[start : start + self.max_batch]
            results.update(zip(indices, self._generate_batch([requests[i] for i in indices]), strict=True))
        return [results[i] for i in range(len(requests))]

    def start(self, requests: Sequence[GenerationRequest], put: Callable[[GenerationResult | Exception], None]) -> None:
        """Answer all requests, then give each result to `put`.

        Raises:
            ValueError: as `generate`.
        """
        for result in self.generate(requests):
            put(result)

    def parameters(self) -> dict[str, Tensor]:
        """The parameters under their names on disk, to be written in place. A tied output layer is the embedding only.

        {"model.embed_tokens.weight": [V, H], ..., "model.norm.weight": [H], "lm_head.weight": [V, H] unless tied}
        """
        views = (views_on_disk(name, parameter.detach()) for name, parameter in self.model.named_parameters())
        return {name: view for pair in views for name, view in pair}

    def set_version(self, version: int) -> None:
        """Stamp the weights that were written into `parameters()`; every later answer carries it."""
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing to release: the weights are small and there is no KV cache between calls."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Nothing was released."""

    def flush_cache(self) -> None:
        """No cache outlives a call."""

    def abort_all(self) -> None:
        """Calls are synchronous: nothing is in flight."""

    def check(self) -> None:
        """There is no process that could have died."""

    def activity(self) -> Activity:
        """Calls are synchronous: nothing to look at."""
        return Activity()

    def shutdown(self) -> None:
        """No process to end."""

    @torch.inference_mode()
    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        batch = len(requests)
        limits = torch.tensor([r.sampling.max_new_tokens for r in requests])
        rows = _SamplingRows.of(requests, self.device)
        answers = torch.zeros(batch, int(limits.max()), dtype=torch.long)
        logprobs = torch.zeros(answers.shape, dtype=torch.float32)
        lengths = torch.zeros(batch, dtype=torch.long)
        stopped = torch.zeros(batch, dtype=torch.bool)

        inputs, mask = (t.to(self.device) for t in left_pad([r.prompt_ids for r in requests]))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        live = torch.arange(batch)  # the request of each row that is in the batch still
        for step in range(answers.shape[1]):
            output = self.model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens, token_logprobs = sample_tokens(
                output.logits[:, -1].float(), rows.temperature, rows.top_p, rows.top_k, rows.uniforms[:, step]
            )
            hit_stop = (tokens[:, None] == rows.stop_tokens).any(1).cpu()
            unfinished = ~stopped[live] & (lengths[live] < limits[live])
            answers[live, step] = tokens.cpu()
            logprobs[live, step] = token_logprobs.cpu()
            lengths[live] += unfinished
            stopped[live] |= hit_stop & unfinished
            unfinished = ~stopped[live] & (lengths[live] < limits[live])
            num_unfinished = int(unfinished.sum())
            if num_unfinished == 0:
                break
            inputs, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            if num_unfinished < COMPACT_BELOW * len(live):
                kept = unfinished.nonzero()[:, 0]
                live = live[kept]
                kept = kept.to(self.device)
                inputs, positions, mask = inputs[kept], positions[kept], mask[kept]
                rows = rows.select(kept)
                cache.batch_select_indices(kept)
        return [
            GenerationResult(
                uid=request.uid,
                response_ids=answers[row, : lengths[row]].numpy().copy(),
                logprobs=logprobs[row, : lengths[row]].numpy().copy(),
                finish_reason="stop" if stopped[row] else "length",
                weight_version=self.weight_version,
            )
            for row, request in enumerate(requests)
        ]


@dataclass(frozen=True)
class _SamplingRows:
    """The sampling parameters of a batch's rows."""

    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B]
    stop_tokens: Tensor  # [B, K], filled up with -1
    uniforms: Tensor  # [B, max_new_tokens] float64

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], device: torch.device) -> _SamplingRows:
        params = [r.sampling for r in requests]
        stops = np.full((len(params), max([1, *(len(p.stop_token_ids) for p in params)])), -1, dtype=np.int64)
        for row, p in enumerate(params):
            stops[row, : len(p.stop_token_ids)] = p.stop_token_ids
        uniforms = np.zeros((len(params), max(p.max_new_tokens for p in params)))
        for row, (request, p) in enumerate(zip(requests, params, strict=True)):
            if p.temperature > 0:
                uniforms[row, : p.max_new_tokens] = request_uniforms(request.seed, p.max_new_tokens)
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.long, device=device),
            stop_tokens=torch.from_numpy(stops).to(device),
            uniforms=torch.from_numpy(uniforms).to(device),
        )

    def select(self, rows: Tensor) -> _SamplingRows:
        return _SamplingRows(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


# ------------------------------------------------------------------------------------------------ sampling


def request_uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of a request's own Philox stream (Salmon et al. 2011), float64 [count]."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128)).random(count)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution; temperature 0 takes the largest logit.

    Args:
        logits: [B, V] float32.
        temperature, top_p, top_k: [B]; top_p 1 and top_k -1 leave the distribution as it is.
        uniforms: [B] float64 in [0, 1).

    Returns:
        tokens [B] int64 and their log-probs [B], of the distribution at the temperature (1 for greedy rows), before
        top_p and top_k.
    """
    greedy = temperature == 0
    all_logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    if bool(greedy.all()):
        tokens = logits.argmax(-1)
    else:
        tokens = invert_cumulative(restrict(all_logprobs.exp(), top_p, top_k), uniforms)
        if bool(greedy.any()):
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, all_logprobs.gather(1, tokens[:, None])[:, 0]


def restrict(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """`probs` [B, V] with zeros outside each row's top_k most likely tokens and outside its nucleus; not normalised.

    The nucleus (Holtzman et al. 2020) is the smallest set of most likely tokens whose probability reaches top_p. Both
    are taken from the full distribution, as in SGLang.
    """
    limited = (top_p < 1) | (top_k > 0)
    if not bool(limited.any()):
        return probs
    some, p = probs[limited], top_p[limited][:, None]
    k = torch.where(top_k > 0, top_k, probs.shape[1])[limited][:, None]
    ordered, order = some.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = (torch.arange(probs.shape[1], device=probs.device) < k) & ((before < p) | (p >= 1))
    keep[:, 0] = True
    restricted = probs.clone()
    restricted[limited] = torch.zeros_like(some).scatter(1, order, ordered * keep)
    return restricted


def invert_cumulative(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row whose cumulative probability exceeds uniform x the row's sum: [B, V], [B] -> [B].

    A token of probability zero is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1]
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]


def left_pad(prompts: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Prompts as token ids [B, P] and mask [B, P] (1 on tokens), padded with token 0 on the left."""
    longest = max(len(p) for p in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


# ------------------------------------------------------------------------------------------------ the model


def _build_model(model: str | PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool) -> Any:
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "attn_implementation": "sdpa"}
    if isinstance(model, str) and load_weights:
        return AutoModelForCausalLM.from_pretrained(model, **options)
    if isinstance(model, str):
        model = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_config(model, **options)


_FUSED_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")


def views_on_disk(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter's names on disk, each with a view.

    transformers 5 fuses experts in memory: gate_up_proj [E, 2F, H] = [gate; up], and down_proj [E, H, F].
    """
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is None:
        yield name, parameter
        return
    for expert, weight in enumerate(parameter):
        prefix = f"{fused['experts']}.{expert}"
        if fused["kind"] == "down_proj":
            yield f"{prefix}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2, dim=0)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up


def _check_request(request: GenerationRequest) -> None:
    if len(request.prompt_ids) == 0:
        raise ValueError(f"request {request.uid}: the prompt is empty")
    limit, temperature = request.sampling.max_new_tokens, request.sampling.temperature
    if limit < 1:
        raise ValueError(f"request {request.uid}: max_new_tokens is {limit}, must be at least 1")
    if temperature < 0:
        raise ValueError(f"request {request.uid}: temperature is {temperature}, must be 0 (greedy) or more")
