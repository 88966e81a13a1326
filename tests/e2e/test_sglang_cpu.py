"""The real SGLang on the CPU: generates as transformers does, and takes weights from another process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import re
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from megarl import config as megarl_config
from megarl.config import RewardConfig
from megarl.driver.sync import WeightSync
from megarl.engines.sglang import EngineDied, SGLangEngine
from megarl.environments import Step
from megarl.reshard.channel import UNVERIFIED, Channel, ChannelDelivery
from megarl.reshard.transports import BucketRegion
from megarl.rewards.pool import Done
from megarl.types import Prompt, SamplingParams
from megarl.workers import generation
from megarl.workers.generation import Generation, Job, Scorer, Surroundings
from tests.e2e.sglang_replica import (
    CPU,
    MAX_LENGTH,
    SIZES,
    Trainers,
    assert_greedy_as,
    logprobs_of,
    make_requests,
    running_engine,
    save_model,
    target_layout,
)
from tests.processes import parties

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
CONFIG = megarl_config.build(
    {"model": {"create": {}, "precision": "fp32"}, "data": {"create": {}}, "rollout": {"engine": "sglang"}}
)
# On the CPU SGLang pads the experts' width to a multiple of 32 x tensor.
EXPERTS = Qwen3MoeConfig(
    **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)


@dataclasses.dataclass
class Replica:
    engine: SGLangEngine
    folder: str
    model: torch.nn.Module
    other_folder: str
    other_model: torch.nn.Module
    trainers: Trainers


@contextlib.contextmanager
def start(kind, tensor, folder, load_weights=True, **options):
    config = EXPERTS if kind == "qwen3_moe" else CONFIGS[kind]
    model = save_model(config, 0, folder / "model")
    other = save_model(config, 1, folder / "other")
    with running_engine(folder / "model", tensor, folder / "sglang.log", load_weights, **options) as engine:
        trainers = Trainers(config, folder, tensor)
        with parties(*trainers.parties):
            yield Replica(engine, str(folder / "model"), model, str(folder / "other"), other, trainers)


@pytest.fixture(scope="module", params=list(CONFIGS))
def replica(request, tmp_path_factory):
    with start(request.param, 1, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def load_and_verify(replica, trainers, folder, model, version, verify="checksum"):
    """Take weights from the trainers, then compare answers with transformers, and checksums."""
    trainers.load_into(replica.engine, folder, version, verify)
    requests = make_requests(temperature=0.0)
    results = replica.engine.generate(requests)
    assert_greedy_as(model, requests, results)
    assert {r.weight_version for r in results} == {version} == {replica.engine.weight_version}


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


class Echo:
    """An environment that says as many tokens as the state counts, and is done in the fourth turn."""

    def reset(self, prompt):
        return Done(({"turn": 1}, None))

    def step(self, state, answer):
        turn = state["turn"]
        return Done((Step({"turn": turn + 1}, "x" * turn, reward=turn / 4, done=turn == 4), None))

    def close(self):
        pass


class Letters:
    """As many tokens 7 as the text has letters."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join("x" for _ in tokens)

    def __call__(self, role, text, max_tokens):
        return np.full(len(text), 7)


def generation_of(replica, max_turns=8):
    own = Surroundings(Echo(), Letters(), max_turns, 16)
    return Generation(replica.engine, Scorer(Letters(), RewardConfig("exact")), own)


@pytest.fixture
def _put(monkeypatch):
    """The object store is not there: a reference is the thing itself."""
    monkeypatch.setattr(generation.ray, "put", lambda value: value)


def assert_logprobs_of_all_turns(model, sample, temperature):
    """The engine's log-probs of what the policy wrote are those of one pass over the whole conversation."""
    whole = dataclasses.replace(make_requests(1)[0], prompt_ids=sample.prompt_ids)
    expected = logprobs_of(model, whole, sample, temperature)
    mask = sample.loss_mask
    np.testing.assert_allclose(sample.rollout_logprobs[mask], expected[mask], atol=1e-4)
    assert not sample.rollout_logprobs[~mask].any()


@pytest.mark.usefixtures("_put")
def test_turns_with_an_environment_are_one_conversation_of_tokens(replica):
    """Every turn of one token: any token stops it. Between turns the environment says 1, 2 and 3 tokens."""
    any_token = tuple(range(replica.model.config.vocab_size))
    sampling = SamplingParams(32, 0.8, stop_token_ids=any_token)
    prompts = [Prompt(f"0-{i}", request.prompt_ids, "s", "") for i, request in enumerate(make_requests(3))]
    own = generation_of(replica)
    own.submit({i: Job(prompt, 2, sampling, 1, "exact") for i, prompt in enumerate(prompts)})
    groups = own.take(3, 60.0).groups
    assert sorted(groups) == [0, 1, 2]
    for group in groups.values():
        for sample in group.samples:
            mask = [int(own) for own in sample.loss_mask]
            assert mask == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]
            assert sample.response_ids[~sample.loss_mask].tolist() == [7] * 6
            assert sample.score == (1 + 2 + 3 + 4) / 4
            assert_logprobs_of_all_turns(replica.model, sample, 0.8)


@pytest.mark.usefixtures("_put")
def test_what_is_stopped_goes_on_elsewhere_under_other_weights(replica):
    """An answer is stopped a few times, each time taken up by another `Generation`, under another version."""
    sampling = SamplingParams(MAX_LENGTH - 10, 1.0)
    prompt = Prompt("0-0", make_requests(1)[0].prompt_ids, "s", "")
    jobs, groups, lengths = {5: Job(prompt, 2, sampling, 1, "exact")}, {}, []
    for version in (31, 32, 33):
        replica.engine.set_version(version)
        own = generation_of(replica)
        own.submit(jobs)
        groups |= own.take(1, 0.02).groups
        stopped = own.stop(30.0)
        jobs, groups = stopped.jobs, groups | stopped.groups
        if groups:
            break
        lengths.append([trajectory.length for trajectory in jobs[5].begun])
    assert lengths, "it was never stopped"
    replica.engine.set_version(34)
    own = generation_of(replica)
    own.submit(jobs)
    groups |= own.take(len(jobs), 120.0).groups
    versions = list(range(31, 32 + len(lengths)))
    for k, sample in enumerate(groups[5].samples):
        assert len(sample.response_ids) == MAX_LENGTH - 10
        assert sample.finish_reason == "length"
        bounds = [0, *(own[k] for own in lengths), MAX_LENGTH - 10]
        expected = [v for v, n in zip([*versions[:-1], 34], np.diff(bounds), strict=True) for _ in range(n)]
        if jobs:
            assert sample.weight_versions.tolist() == expected
        assert_logprobs_of_all_turns(replica.model, sample, 1.0)


def test_a_refused_request_raises_with_sglangs_reason(replica):
    (request,) = make_requests(1, top_p=7.0)
    with pytest.raises(RuntimeError, match="request 0: top_p must be in"):
        replica.engine.generate([request])


def test_weights_of_the_trainers_are_taken_in_place(replica):
    """They change between the syncs; the engine is what a folder of the trainers' weights is under transformers."""
    load_and_verify(replica, replica.trainers, replica.other_folder, replica.other_model, version=7)
    load_and_verify(replica, replica.trainers, replica.folder, replica.model, version=8, verify="bitwise")


def test_parameters_are_described(replica):
    (parameters,) = replica.engine.parameter_shapes()
    assert parameters["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 64)
    assert parameters["model.norm.weight"].dtype == "float32"
    config = replica.model.config
    assert ("lm_head.weight" in parameters) != config.tie_word_embeddings
    assert {n: tuple(p.shape) for n, p in parameters.items()} == dict(target_layout(config, 1).shard(0).parameters)


def test_a_parameter_that_the_plan_or_the_engine_lacks_is_an_error_before_the_first_sync(replica):
    rank = {name: (info.shape, info.dtype) for name, info in replica.engine.parameter_shapes()[0].items()}
    rollout = SimpleNamespace(embedded=False, parameters=lambda: [[rank]])
    other = copy.deepcopy(replica.model.config)
    other.tie_word_embeddings = not other.tie_word_embeddings
    sync = WeightSync(CONFIG, SimpleNamespace(), rollout, other)
    missing = "in the plan" if other.tie_word_embeddings else "in the engine"
    with pytest.raises(
        ValueError, match=f"SGLang replica 0, tensor rank 0: parameter lm_head.weight .*missing {missing}"
    ):
        sync.prepare()


def test_a_wrong_parameter_is_named_and_the_engine_lives(replica):
    """The host believes in a parameter that SGLang does not have."""
    regions = [[BucketRegion("model.nrm.weight", "float32", (0, 1), (0, 1), 0)]]
    host = Channel("SGLang tensor rank 0", "float32", regions, [], 4, CPU)

    def deliver():
        delivery = ChannelDelivery(host, 1, "off", time.monotonic() + 30)
        delivery.filled(0, comparing=False)
        delivery.finish()
        return delivery.failure

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        failure = pool.submit(deliver)
        with pytest.raises(RuntimeError, match="rank 0: model.nrm.weight: .* the nearest is model.norm.weight"):
            replica.engine.load_weights(1, [host.path], 99)
        assert "SGLang tensor rank 0: model.nrm.weight: the engine has no such parameter" in str(failure.result(30))
    assert replica.engine.weight_version == UNVERIFIED
    requests = make_requests(2, temperature=0.0)
    results = replica.engine.generate(requests)
    assert {r.weight_version for r in results} == {UNVERIFIED}
    assert_greedy_as(replica.model, requests, results)


def test_sleep_and_wake_do_nothing_without_a_gpu(replica):
    replica.engine.sleep()
    replica.engine.wake(["weights"])
    replica.engine.wake(["kv_cache"])
    requests = make_requests(2, temperature=0.0)
    assert_greedy_as(replica.model, requests, replica.engine.generate(requests))


def test_experts_arrive_by_the_layout(tmp_path):
    """What a layout says of SGLang's fused expert tensors is what SGLang computes with; and it runs with options by
    our names."""
    layout = target_layout(EXPERTS, 2)
    own = {"log_stats": 0.2, "radix_cache": False, "chunked_prefill_size": 8, "max_prefill_tokens": 32}
    with start("qwen3_moe", 2, tmp_path, load_weights=False, **own) as replica:
        for rank, parameters in enumerate(replica.engine.parameter_shapes()):
            assert {n: tuple(p.shape) for n, p in parameters.items()} == dict(layout.shard(rank).parameters)
        load_and_verify(replica, replica.trainers, replica.other_folder, replica.other_model, version=1)
        time.sleep(0.5)
        log, taken = (tmp_path / "sglang.log").read_text(), replica.engine._engine.server_args
    assert re.search(r"\] megarl: \d+ running, 0 waiting, KV cache \d+%, [\d,]+ tokens/s", log)
    assert "no statistics" not in log
    assert "chunked_prefill_size=8, max_prefill_tokens=32" in log
    assert taken.disable_radix_cache


def test_two_ranks_that_read_no_weights_and_the_end_of_one(tmp_path):
    with start("qwen2-tied", 2, tmp_path, load_weights=False) as replica:
        shapes = [p["model.layers.0.mlp.down_proj.weight"].shape for p in replica.engine.parameter_shapes()]
        assert shapes == [(64, 64), (64, 64)]
        load_and_verify(replica, replica.trainers, replica.other_folder, replica.other_model, version=1)

        # A trainer dies in a sync; the engine lives, and others take its place.
        broken = Trainers(replica.model.config, tmp_path, 2, fault=(2, "die"))
        with parties(*broken.parties):
            broken.start(replica.folder, "checksum")
            with pytest.raises(RuntimeError, match=r"rank [01]: the trainer went away in bucket \d+ of \d+"):
                replica.engine.load_weights(1, broken.sockets, 2)
            assert broken.results()[1] == "dead"
        load_and_verify(replica, replica.trainers, replica.folder, replica.model, version=3, verify="bitwise")

        # A rank of the engine dies in a sync: the trainers that do not serve it need not know.
        # The other tests' replica, with one rank, may be running too.
        scheduler = next(p for p in psutil.Process().children() if "scheduler_TP1" in p.cmdline()[0])
        scheduler.suspend()  # so that it cannot take its weights before it ends
        replica.trainers.start(replica.folder, "checksum")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sockets, number = replica.trainers.sockets, replica.trainers.number
            waiting = pool.submit(replica.engine.load_weights, number, sockets, 4)
            time.sleep(0.5)
            scheduler.kill()
            with pytest.raises(RuntimeError, match="SGLang has died"):
                waiting.result(timeout=30)
        sent = replica.trainers.results()
        assert "SGLang tensor rank 1 of replica 0: " in str(sent[1])
        assert not any(isinstance(report, RuntimeError) for report in sent[2:])
        assert "was killed by SIGKILL" in replica.engine.why_dead()
        with pytest.raises(EngineDied, match="SGLang has died"):
            replica.engine.generate(make_requests(1))
