"""The real SGLang on the CPU: generates as transformers does, and takes weights from another process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from megarl.config import RolloutConfig, SGLangConfig
from megarl.engines.sglang import SGLangEngine
from megarl.model.families import declare
from megarl.reshard.checksum import region_checksum
from megarl.reshard.layouts import sglang_layout
from megarl.reshard.transports import BucketRegion, ChecksumRegion, serialise_bucket
from megarl.types import GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

VOCAB, PADDED_VOCAB, MAX_LENGTH = 99, 128, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
# On the CPU SGLang pads the experts' width to a multiple of 32 x tensor.
EXPERTS = Qwen3MoeConfig(
    **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)


def save_model(config, seed, folder):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@dataclasses.dataclass
class Replica:
    engine: SGLangEngine
    folder: str
    model: torch.nn.Module
    other_folder: str
    other_model: torch.nn.Module
    tensor: int


@contextlib.contextmanager
def start(kind, tensor, folder, load_weights=True):
    config = EXPERTS if kind == "qwen3_moe" else CONFIGS[kind]
    model = save_model(config, 0, folder / "model")
    other = save_model(config, 1, folder / "other")
    rollout = RolloutConfig(tensor=tensor, sglang=SGLangConfig(max_running_requests=16))
    before = set(psutil.Process().children(recursive=True))
    engine = SGLangEngine(
        str(folder / "model"),
        tensor,
        rollout,
        "fp32",
        MAX_LENGTH,
        seed=1,
        device="cpu",
        load_weights=load_weights,
        log_file=str(folder / "sglang.log"),
    )
    try:
        yield Replica(engine, str(folder / "model"), model, str(folder / "other"), other, tensor)
    finally:
        engine.shutdown()
    assert not engine.is_alive
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert [p for p in left if "sglang" in p.name() or "spawn_main" in " ".join(p.cmdline())] == []


@pytest.fixture(scope="module", params=list(CONFIGS))
def replica(request, tmp_path_factory):
    with start(request.param, 1, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def make_requests(count=8, max_new_tokens=10, **sampling):
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return [GenerationRequest(str(i), rng.integers(0, VOCAB, 3 + i), params, seed=i) for i in range(count)]


def assert_greedy_as(model, requests, results):
    for request, result in zip(requests, results, strict=True):
        prompt = torch.from_numpy(request.prompt_ids)[None]
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        assert result.uid == request.uid
        assert result.response_ids.tolist() == expected[0, prompt.shape[1] :].tolist()
        np.testing.assert_allclose(result.logprobs, logprobs_of(model, request, result), atol=1e-4)


@torch.no_grad()
def logprobs_of(model, request, result, temperature=1.0):
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, result.response_ids]))[None]
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(result.response_ids)[:, None])[:, 0].numpy()


# ---------------------------------------------------------------------------------------- a trainer, by hand


def pieces(state, rank, tensor):
    """What SGLang's rank holds: (its parameter, first row there, canonical name, rows, columns)."""
    for name, weight in state.items():
        rows = weight.shape[0]
        columns = weight.shape[1] if weight.dim() > 1 else 1
        own = slice(rank * rows // tensor, (rank + 1) * rows // tensor)
        if "embed_tokens" in name or "lm_head" in name:
            size = PADDED_VOCAB // tensor
            yield name, 0, name, slice(rank * size, min((rank + 1) * size, VOCAB)), slice(0, columns)
        elif part := next((p for p in ("q_proj", "k_proj", "v_proj") if p in name), None):
            heads = {p: state[name.replace(part, p)].shape[0] // tensor for p in ("q_proj", "k_proj", "v_proj")}
            start = {"q_proj": 0, "k_proj": heads["q_proj"], "v_proj": heads["q_proj"] + heads["k_proj"]}[part]
            yield name.replace(part, "qkv_proj"), start, name, own, slice(0, columns)
        elif "gate_proj" in name:
            yield name.replace("gate_proj", "gate_up_proj"), 0, name, own, slice(0, columns)
        elif "up_proj" in name:
            yield name.replace("up_proj", "gate_up_proj"), rows // tensor, name, own, slice(0, columns)
        elif "o_proj" in name or "down_proj" in name:
            cut = slice(rank * columns // tensor, (rank + 1) * columns // tensor)
            yield name, 0, name, slice(0, rows), cut
        else:
            yield name, 0, name, slice(0, rows), slice(0, columns)


def canonical_values(state, name, rows, columns):
    weight = state[name]
    return (weight if weight.dim() > 1 else weight[:, None])[rows, columns].contiguous()


def pack(state, rank, tensor):
    regions, values, offset = [], [], 0
    for parameter, row, name, rows, columns in pieces(state, rank, tensor):
        part = canonical_values(state, name, rows, columns)
        regions.append(BucketRegion(parameter, "float32", (row, row + len(part)), (0, part.shape[1]), offset))
        values.append(part.flatten())
        offset += part.numel() * 4
    return regions, torch.cat(values)


def train(folder, tensor, connection):
    """The trainer's process: shares a bucket a rank, and keeps it until it is told that it was copied."""
    state = load_file(os.path.join(folder, "model.safetensors"))
    packed = [pack(state, rank, tensor) for rank in range(tensor)]
    connection.send([serialise_bucket(regions, flat) for regions, flat in packed])
    connection.recv()


@contextlib.contextmanager
def trainer(folder, tensor):
    here, there = multiprocessing.Pipe()
    # Forked, for speed: it calls nothing of SGLang's.
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder, tensor, there), daemon=True)
    process.start()
    try:
        assert here.poll(60)
        yield here.recv()
    finally:
        here.send("copied")
        process.join(20)
    assert process.exitcode == 0


def load_and_verify(replica, folder, model, version):
    """Load weights from a trainer, then compare answers with transformers and checksums with the file."""
    with trainer(folder, replica.tensor) as payloads, replica.engine.update_session():
        replica.engine.load_bucket(payloads, version=version)
    replica.engine.flush_cache()
    requests = make_requests(temperature=0.0)
    results = replica.engine.generate(requests)
    assert_greedy_as(model, requests, results)
    assert {r.weight_version for r in results} == {version} == {replica.engine.weight_version}

    state = load_file(os.path.join(folder, "model.safetensors"))
    regions, expected = [], []
    for rank in range(replica.tensor):
        regions.append([])
        expected.append([])
        for parameter, row, name, rows, columns in pieces(state, rank, replica.tensor):
            part = canonical_values(state, name, rows, columns)
            width = state[name].shape[1] if state[name].dim() > 1 else 1
            place = (rows.start, columns.start, width)
            regions[rank].append(ChecksumRegion(parameter, (row, row + len(part)), (0, part.shape[1]), *place))
            expected[rank].append(region_checksum(part, *place))
    assert replica.engine.checksums(regions) == expected


# ---------------------------------------------------------------------------------------- tests


def test_greedy_answers_and_logprobs_equal_transformers(replica):
    requests = make_requests(temperature=0.0)
    assert_greedy_as(replica.model, requests, replica.engine.generate(requests))


def test_logprobs_are_at_the_sampling_temperature_before_top_p(replica):
    requests = make_requests(temperature=0.7, top_p=0.8)
    for request, result in zip(requests, replica.engine.generate(requests), strict=True):
        np.testing.assert_allclose(result.logprobs, logprobs_of(replica.model, request, result, 0.7), atol=1e-4)


def test_a_stop_token_is_the_last_token(replica):
    free = replica.engine.generate(make_requests(temperature=0.0))
    stop = int(free[0].response_ids[4])
    stopped = replica.engine.generate(make_requests(temperature=0.0, stop_token_ids=(stop,)))
    for without, result in zip(free, stopped, strict=True):
        hits = np.flatnonzero(without.response_ids == stop)
        length = hits[0] + 1 if len(hits) else 10
        assert result.response_ids.tolist() == without.response_ids[:length].tolist()
        assert result.finish_reason == ("stop" if len(hits) else "length")


def test_an_answer_may_fill_the_whole_length(replica):
    (request,) = make_requests(1, temperature=0.0, max_new_tokens=MAX_LENGTH - 3)
    (result,) = replica.engine.generate([request])
    assert len(result.response_ids) == MAX_LENGTH - 3


def test_answers_come_as_they_end_and_can_be_aborted(replica):
    requests = make_requests(4, max_new_tokens=MAX_LENGTH - 10)
    short = dataclasses.replace(requests[3], sampling=SamplingParams(max_new_tokens=1))
    answers = replica.engine.stream([*requests[:3], short])
    assert next(answers).uid == short.uid
    replica.engine.abort_all()
    assert {(a.uid, a.finish_reason) for a in answers} <= {(r.uid, f) for r in requests for f in ("abort", "length")}
    replica.engine.flush_cache()  # nothing is in flight any more


def test_a_refused_request_raises_with_sglangs_reason(replica):
    (request,) = make_requests(1, top_p=7.0)
    with pytest.raises(RuntimeError, match="request 0: top_p must be in"):
        replica.engine.generate([request])


def test_weights_of_another_process_are_taken_in_place(replica):
    load_and_verify(replica, replica.other_folder, replica.other_model, version=7)
    load_and_verify(replica, replica.folder, replica.model, version=8)


def test_parameters_are_described(replica):
    (parameters,) = replica.engine.parameter_shapes()
    assert parameters["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 64)
    assert parameters["model.norm.weight"].dtype == "float32"
    tied = replica.model.config.tie_word_embeddings
    assert ("lm_head.weight" in parameters) != tied
    state = load_file(os.path.join(replica.folder, "model.safetensors"))
    assert set(parameters) == {piece[0] for piece in pieces(state, 0, 1)}


def test_a_wrong_parameter_is_named_and_the_engine_lives(replica):
    bucket = serialise_bucket([BucketRegion("model.nrm.weight", "float32", (0, 1), (0, 1), 0)], torch.zeros(1))
    with pytest.raises(RuntimeError, match="rank 0: model.nrm.weight: .* the nearest is model.norm.weight"):
        replica.engine.load_bucket([bucket])
    requests = make_requests(2, temperature=0.0)
    assert_greedy_as(replica.model, requests, replica.engine.generate(requests))


def test_sleep_and_wake_do_nothing_without_a_gpu(replica):
    replica.engine.sleep()
    replica.engine.wake(["weights"])
    replica.engine.wake(["kv_cache"])
    requests = make_requests(2, temperature=0.0)
    assert_greedy_as(replica.model, requests, replica.engine.generate(requests))


def test_experts_arrive_by_the_layout(tmp_path):
    """What a layout says of SGLang's fused expert tensors is what SGLang computes with."""
    layout = sglang_layout(declare(EXPERTS), 2, 1, 64)
    with start("qwen3_moe", 2, tmp_path, load_weights=False) as replica:
        for rank, parameters in enumerate(replica.engine.parameter_shapes()):
            assert {n: tuple(p.shape) for n, p in parameters.items()} == dict(layout.shard(rank).parameters)
        state = load_file(os.path.join(replica.other_folder, "model.safetensors"))
        buckets = []
        for rank in range(2):
            regions, values, offset = [], [], 0
            for piece in layout.shard(rank).pieces:
                rect, local = piece.rect, piece.local
                part = canonical_values(state, piece.tensor, slice(rect.row0, rect.row1), slice(rect.col0, rect.col1))
                rows, columns = (local.row0, local.row1), (local.col0, local.col1)
                regions.append(BucketRegion(piece.parameter, "float32", rows, columns, offset))
                values.append(part.flatten())
                offset += part.numel() * 4
            flat = torch.cat(values)
            buckets.append((serialise_bucket(regions, flat), flat))
        with replica.engine.update_session():
            replica.engine.load_bucket([bucket for bucket, _ in buckets], version=1)
        replica.engine.flush_cache()
        requests = make_requests(4, temperature=0.0)
        assert_greedy_as(replica.other_model, requests, replica.engine.generate(requests))


def test_two_ranks_that_read_no_weights_and_the_end_of_one(tmp_path):
    with start("qwen2-tied", 2, tmp_path, load_weights=False) as replica:
        shapes = [p["model.layers.0.mlp.down_proj.weight"].shape for p in replica.engine.parameter_shapes()]
        assert shapes == [(64, 64), (64, 64)]
        load_and_verify(replica, replica.other_folder, replica.other_model, version=1)
        wrong = serialise_bucket([BucketRegion("model.norm.weight", "float32", (60, 65), (0, 1), 0)], torch.zeros(5))
        right = serialise_bucket([BucketRegion("model.norm.weight", "float32", (60, 64), (0, 1), 0)], torch.zeros(4))
        with pytest.raises(RuntimeError, match="rank 1: model.norm.weight: rows 60 to 65"):
            replica.engine.load_bucket([right, wrong])

        answers = replica.engine.stream(make_requests(2, max_new_tokens=MAX_LENGTH - 4))
        # The other tests' replica, with one rank, may be running too.
        scheduler = next(p for p in psutil.Process().children() if "scheduler_TP1" in p.cmdline()[0])
        scheduler.suspend()  # so that the answers cannot come before it ends
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, answers)
            scheduler.kill()
            with pytest.raises(RuntimeError, match="SGLang has died"):
                waiting.result(timeout=30)
        with pytest.raises(RuntimeError, match="SGLang has died"):
            replica.engine.generate(make_requests(1))
