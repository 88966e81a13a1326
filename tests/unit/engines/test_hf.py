"""The embedded engine against transformers itself, and the promises of its seeded sampling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from megarl.engines.hf import HFEngine, invert_cumulative, request_uniforms, restrict, sample_tokens
from megarl.types import GenerationRequest, SamplingParams

VOCAB = 99
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def engine(request):
    torch.manual_seed(0)
    config = LlamaConfig(**TINY) if request.param == "llama" else Qwen2Config(**TINY, tie_word_embeddings=True)
    return HFEngine(config, max_batch=5)


def make_requests(count, *, max_new_tokens=10, seed=0, **sampling):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)) for _ in range(count)]
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return [GenerationRequest(uid=str(i), prompt_ids=p, sampling=params, seed=1000 + i) for i, p in enumerate(prompts)]


def full_forward_logprobs(engine, request, response_ids, temperature):
    """Log-probs [R] of an answer from one forward pass over prompt and answer, with no cache and no padding."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, response_ids]))[None]
    with torch.no_grad():
        logits = engine.model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(response_ids)[:, None])[:, 0].numpy()


def test_greedy_answers_equal_transformers_generate(engine):
    requests = make_requests(12, temperature=0.0)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        ids = torch.from_numpy(request.prompt_ids)[None]
        expected = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        assert result.uid == request.uid
        assert result.finish_reason == "length"
        np.testing.assert_array_equal(result.response_ids, expected[0, len(request.prompt_ids) :].numpy())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_full_forward_at_the_sampling_temperature(engine, temperature):
    requests = make_requests(9, temperature=temperature, top_p=0.8, top_k=7)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        expected = full_forward_logprobs(engine, request, result.response_ids, temperature or 1.0)
        assert result.logprobs.dtype == np.float32
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_an_answer_does_not_depend_on_what_shares_its_batch(engine):
    requests = make_requests(12)
    together = engine.generate(requests)
    reversed_order = engine.generate(requests[::-1])[::-1]
    alone = [engine.generate([r])[0] for r in requests]
    for a, b, c in zip(together, reversed_order, alone, strict=True):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)
        np.testing.assert_array_equal(a.response_ids, c.response_ids)
        np.testing.assert_allclose(a.logprobs, c.logprobs, atol=1e-4)


def test_answers_of_mixed_lengths_survive_the_dropping_of_finished_rows(engine):
    limits = [1, 2, 3, 20, 5]
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=n))
        for r, n in zip(make_requests(5), limits, strict=True)
    ]
    results = engine.generate(requests)
    assert [len(r.response_ids) for r in results] == limits
    for request, result in zip(requests, results, strict=True):
        np.testing.assert_array_equal(result.response_ids, engine.generate([request])[0].response_ids)


def test_seeds_change_the_answer_and_repeat_it(engine):
    (request,) = make_requests(1)
    first, again, other = engine.generate([request, request, dataclasses.replace(request, seed=7)])
    np.testing.assert_array_equal(first.response_ids, again.response_ids)
    assert first.response_ids.tolist() != other.response_ids.tolist()


def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine):
    requests = make_requests(8, max_new_tokens=12)
    free = engine.generate(requests)
    stop = int(free[0].response_ids[4])
    stopping = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop_token_ids=(stop,))) for r in requests
    ]
    for without, result in zip(free, engine.generate(stopping), strict=True):
        hits = np.flatnonzero(without.response_ids == stop)
        length = hits[0] + 1 if len(hits) else 12
        assert result.finish_reason == ("stop" if len(hits) else "length")
        np.testing.assert_array_equal(result.response_ids, without.response_ids[:length])


def test_top_k_and_top_p_keep_answers_among_the_likely_tokens(engine):
    (prompt,) = make_requests(1)
    with torch.no_grad():
        probs = torch.softmax(engine.model(torch.from_numpy(prompt.prompt_ids)[None]).logits[0, -1], -1)
    ordered = probs.argsort(descending=True).tolist()
    nucleus = int((probs.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
    for limit, sampling in ((3, {"top_k": 3}), (nucleus, {"top_p": 0.5})):
        params = SamplingParams(max_new_tokens=1, **sampling)
        results = engine.generate([dataclasses.replace(prompt, sampling=params, seed=s) for s in range(100)])
        seen = {int(r.response_ids[0]) for r in results}
        assert seen <= set(ordered[:limit])
        assert len(seen) > 1


def test_a_low_temperature_is_nearly_greedy(engine):
    requests = make_requests(6, temperature=1e-4)
    greedy = engine.generate(make_requests(6, temperature=0.0))
    for cold, best in zip(engine.generate(requests), greedy, strict=True):
        np.testing.assert_array_equal(cold.response_ids, best.response_ids)


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).expand(20_000, 4)
    ones = torch.ones(20_000)
    uniforms = torch.from_numpy(request_uniforms(3, 20_000))
    tokens, logprobs = sample_tokens(logits, 2 * ones, ones, -ones.long(), uniforms)
    expected = torch.softmax(logits[0] / 2, -1)
    np.testing.assert_allclose(tokens.bincount(minlength=4) / 20_000, expected, atol=0.01)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_restrict_by_hand():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).expand(4, 4)
    top_p, top_k = torch.tensor([1.0, 0.6, 1.0, 0.01]), torch.tensor([-1, -1, 1, -1])
    expected = [[0.1, 0.4, 0.3, 0.2], [0, 0.4, 0.3, 0], [0, 0.4, 0, 0], [0, 0.4, 0, 0]]
    torch.testing.assert_close(restrict(probs, top_p, top_k), torch.tensor(expected))


def test_tokens_of_probability_zero_are_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, 5)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert invert_cumulative(probs, uniforms).tolist() == [1, 1, 3, 3]


def test_parameters_have_disk_names_and_are_written_in_place(engine):
    parameters = engine.parameters()
    tied = engine.model.config.tie_word_embeddings
    assert ("lm_head.weight" in parameters) != tied
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"} <= set(
        parameters
    )
    requests = make_requests(3, temperature=0.0)
    before = engine.generate(requests)
    saved = {name: p.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.mul_(-1.3)
    engine.set_version(4)
    after = engine.generate(requests)
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    engine.set_version(0)
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(before, after, strict=True))
    assert {r.weight_version for r in after} == {4}


def test_fused_experts_are_views_under_their_names_on_disk(tmp_path):
    config = Qwen3MoeConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, head_dim=16
    )
    engine = HFEngine(config)
    engine.model.save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    parameters = engine.parameters()
    assert set(parameters) == set(on_disk)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, on_disk[name], rtol=0, atol=0)
    memory = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in parameters.values()} <= memory


def test_a_folder_can_be_built_without_reading_its_weights(tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    loaded = HFEngine(str(tmp_path)).parameters()
    empty = HFEngine(str(tmp_path), load_weights=False).parameters()
    assert {n: p.shape for n, p in loaded.items()} == {n: p.shape for n, p in empty.items()}
    assert not torch.equal(loaded["lm_head.weight"], empty["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"temperature": -1.0}, "temperature is -1.0")],
)
def test_requests_that_make_no_sense_are_named(engine, change, message):
    with pytest.raises(ValueError, match=f"request 0: {message}"):
        engine.generate(make_requests(1, **change))


def test_an_empty_prompt_is_named(engine):
    (request,) = make_requests(1)
    with pytest.raises(ValueError, match="request 0: the prompt is empty"):
        engine.generate([dataclasses.replace(request, prompt_ids=np.array([], dtype=np.int64))])
