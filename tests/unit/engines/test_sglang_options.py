"""What SGLang is asked and what its answers become, without starting it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest

from megarl.config import RolloutConfig, SGLangConfig
from megarl.engines import sglang as engine
from megarl.engines.sglang import (
    CONTEXT_SLACK,
    Load,
    check_choices,
    check_requests,
    load_figures,
    option_choices,
    parse_output,
    repacking,
    sampling_options,
    server_options,
    stats_line,
    summarize,
)
from megarl.types import Activity, GenerationRequest, SamplingParams

KNOWN = [
    *("model_path", "tp_size", "dtype", "context_length", "random_seed", "trust_remote_code", "skip_tokenizer_init"),
    *("skip_server_warmup", "load_format", "custom_weight_loader", "weight_version", "log_level", "device"),
    *("base_gpu_id", "mem_fraction_static", "max_running_requests", "enable_memory_saver", "attention_backend"),
    *("disable_prefill_cuda_graph", "cuda_graph_max_bs_decode", "sampling_backend", "grammar_backend"),
    *("disable_cuda_graph", "max_total_tokens", "enable_deterministic_inference", "ep_size", "disable_radix_cache"),
    *("kv_cache_dtype", "chunked_prefill_size", "max_prefill_tokens", "dp_size", "enable_dp_attention"),
    "enable_dp_lm_head",
]


def options(device="cuda", known=KNOWN, sglang=None, num_gpus=0, **changes):
    rollout = RolloutConfig(sglang=sglang or SGLangConfig(), num_gpus=num_gpus)
    return server_options("m", 2, rollout, "bf16", 768, seed=5, device=device, known=known, **changes)


def test_tokens_go_in_and_come_out_and_weights_come_through_our_loaders():
    chosen = options()
    assert chosen["skip_tokenizer_init"] is True
    assert chosen["custom_weight_loader"] == [
        "megarl.reshard.channel.load_weights",
        "megarl.reshard.transports.describe_parameters",
    ]
    assert (chosen["tp_size"], chosen["dtype"], chosen["random_seed"]) == (2, "bfloat16", 5)
    assert chosen["context_length"] == 768 + CONTEXT_SLACK


def test_cuda_sleeps_and_captures_decode_graphs_only():
    chosen = options(base_gpu_id=3, sglang=SGLangConfig(memory_fraction=0.4, cuda_graph_max_batch=64))
    assert chosen["enable_memory_saver"] is True
    assert chosen["disable_prefill_cuda_graph"] is True
    assert chosen["cuda_graph_max_bs_decode"] == 64
    assert chosen["mem_fraction_static"] == 0.4
    assert chosen["base_gpu_id"] == 3
    assert options(sglang=SGLangConfig(sleep=False))["enable_memory_saver"] is False
    assert options(num_gpus=2)["enable_memory_saver"] is False  # of its own


def test_our_names_for_the_usual_options_reach_sglang_under_its_own():
    plain = options()
    assert (plain["disable_cuda_graph"], plain["disable_radix_cache"], plain["ep_size"]) == (False, False, 1)
    assert plain["kv_cache_dtype"] == "auto"
    assert not {"chunked_prefill_size", "max_prefill_tokens", "attention_backend"} & set(plain)  # SGLang chooses
    own = SGLangConfig(
        chunked_prefill_size=-1,
        max_prefill_tokens=4096,
        eager=True,
        radix_cache=False,
        kv_cache_dtype="fp8_e4m3",
        expert=2,
    )
    chosen = options(sglang=own)
    assert (chosen["chunked_prefill_size"], chosen["max_prefill_tokens"]) == (-1, 4096)
    assert (chosen["disable_cuda_graph"], chosen["disable_radix_cache"], chosen["ep_size"]) == (True, True, 2)
    assert chosen["kv_cache_dtype"] == "fp8_e4m3"


def test_data_parallel_attention_has_three_options_of_sglangs():
    """dp_size alone would start whole replicas."""
    names = ("dp_size", "enable_dp_attention", "enable_dp_lm_head")
    for sglang, expected in (
        (SGLangConfig(), (1, False, False)),
        (SGLangConfig(data_parallel=2), (2, True, False)),
        (SGLangConfig(data_parallel=2, data_parallel_head=True), (2, True, True)),
    ):
        chosen = options(sglang=sglang)
        assert tuple(chosen[name] for name in names) == expected


def test_a_value_that_the_installed_sglang_does_not_know_is_refused_with_those_it_does():
    @dataclass
    class ServerArgs:
        attention_backend: Annotated[str | None, SimpleNamespace(choices=["triton", "fa3"])] = None
        kv_cache_dtype: Annotated[str, "help"] = "auto"

    choices = option_choices(ServerArgs)
    assert choices == {"attention_backend": ["triton", "fa3"]}
    for known in (None, "fa3"):
        check_choices(RolloutConfig(sglang=SGLangConfig(attention_backend=known, kv_cache_dtype="bf16")), choices)
    with pytest.raises(ValueError, match="rollout.sglang.attention_backend: is 'fa9', but .* only triton, fa3"):
        check_choices(RolloutConfig(sglang=SGLangConfig(attention_backend="fa9")), choices)


@pytest.mark.parametrize("packs", [True, False])
def test_a_backend_that_packs_or_reorders_weights_is_refused(packs, monkeypatch):
    utils = SimpleNamespace(cpu_has_amx_support=lambda: packs)
    for name, module in (("sglang", SimpleNamespace()), ("sglang.srt", SimpleNamespace()), ("sglang.srt.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    assert ("AMX" in (repacking("cpu", "bf16") or "")) == packs
    assert repacking("cpu", "fp32") is None  # which SGLang does not pack
    assert repacking("cuda", "bf16") is None
    assert repacking("cuda", "bf16", "triton") is None
    assert "flashinfer_trtllm_routed reorders" in (repacking("cuda", "bf16", "flashinfer_trtllm_routed") or "")


def test_an_engine_that_would_pack_its_weights_does_not_start(monkeypatch):
    module = SimpleNamespace(ServerArgs=object)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", module)
    monkeypatch.setattr(engine.sglang_cpu, "engine_class", lambda: None)
    monkeypatch.setattr(engine, "repacking", lambda *arguments: "it packs them")
    with pytest.raises(RuntimeError, match="SGLang cannot take weights here: it packs them"):
        engine.SGLangEngine("m", 1, RolloutConfig(), "bf16", 8, seed=1, device="cpu")


LOADS = [
    SimpleNamespace(num_running_reqs=8, num_waiting_reqs=1, token_usage=0.25, gen_throughput=1500.4),
    SimpleNamespace(num_running_reqs=4, num_waiting_reqs=2, token_usage=0.41, gen_throughput=810, cache_hit_rate=0.5),
]


def test_what_a_replica_does_as_a_line_of_its_log():
    assert stats_line(load_figures(LOADS)) == (
        "megarl: 12 running, 3 waiting, KV cache 41%, 2,310 tokens/s, 50% of prompt tokens from the radix cache"
    )


def test_what_the_data_parallel_ranks_do_together():
    """Requests and tokens add up; the cache of each is its own, so the fullest counts."""
    found = load_figures(LOADS)
    assert (found.num_running, found.num_waiting, found.cache_use, found.hit_rate) == (12, 3, 0.41, 0.5)
    assert found.tokens_per_second == pytest.approx(2310.4)
    assert load_figures([]) == Load(0, 0, 0.0, 0.0, 0.0)
    assert load_figures([SimpleNamespace()]) == Load(0, 0, 0.0, 0.0, 0.0)  # an SGLang that does not say


def test_looks_at_a_replica_are_summarized():
    """Running 4 8 6, waiting 0 1 5: means 6 and 2."""
    looks = [Load(4, 0, 0.2, 0.5, 10.0), Load(8, 1, 0.7, 0.0, 20.0), Load(6, 5, 0.3, 0.0, 0.0)]
    assert summarize(looks) == Activity(3, 6.0, 8, 2.0, 5, 0.7)
    assert summarize([]) == Activity()


def test_what_the_cache_held_of_a_prompt_is_known():
    output = {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(-0.5, 7, None)]}}
    assert parse_output("a", output, 3).cached_tokens == 0
    output["meta_info"]["cached_tokens"] = 12
    assert parse_output("a", output, 3).cached_tokens == 12


def test_names_that_this_sglang_lacks_are_left_out():
    older = [n for n in KNOWN if n not in ("cuda_graph_max_bs_decode", "disable_prefill_cuda_graph")]
    chosen = options(known=[*older, "cuda_graph_max_bs"])
    assert chosen["cuda_graph_max_bs"] == 256
    assert not {"cuda_graph_max_bs_decode", "disable_prefill_cuda_graph"} & set(chosen)
    assert "cuda_graph_max_bs" not in options()


def test_cpu_uses_backends_that_need_no_kernels_and_a_bounded_cache():
    chosen = options("cpu")
    assert chosen["attention_backend"] == "torch_native"
    assert chosen["sampling_backend"] == "pytorch"
    assert chosen["disable_cuda_graph"] is True
    assert chosen["max_running_requests"] == 256
    assert 768 < chosen["max_total_tokens"] <= 1 << 18
    assert not {"enable_memory_saver", "base_gpu_id", "mem_fraction_static"} & set(chosen)


def test_weights_that_come_by_sync_are_not_read():
    assert options(load_weights=False)["load_format"] == "dummy"
    assert options(load_weights=True)["load_format"] == "auto"


def test_the_users_own_options_come_last():
    chosen = options("cpu", sglang=SGLangConfig(options={"attention_backend": "triton", "max_running_requests": 2}))
    assert chosen["attention_backend"] == "triton"
    assert chosen["max_running_requests"] == 2
    assert options(sglang=SGLangConfig(attention_backend="fa3"))["attention_backend"] == "fa3"


def test_an_unknown_option_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="options.mem_fraction_statik: .* did you mean mem_fraction_static?"):
        options(sglang=SGLangConfig(options={"mem_fraction_statik": 0.3}))


def request(uid="a", prompt=3, **sampling):
    return GenerationRequest(
        uid, np.arange(prompt), SamplingParams(**{"max_new_tokens": 4, **sampling}), seed=2**40 + 7
    )


def test_sampling_options():
    asked = sampling_options(request(temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(2, 1)))
    assert asked == {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop_token_ids": [2, 1],
        "ignore_eos": False,
        "sampling_seed": (2**40 + 7) % 2**31,
    }


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_an_answer_of_sglang(reason):
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [(-0.5, 5, None), (-1.5, 2, None)],
        "weight_version": "3",
    }
    result = parse_output("a", {"output_ids": [5, 2], "meta_info": meta}, weight_version=9)
    assert result.response_ids.tolist() == [5, 2]
    assert result.logprobs.tolist() == [-0.5, -1.5]
    assert (result.uid, result.finish_reason, result.weight_version) == ("a", reason, 3)


def test_a_request_aborted_before_it_began_has_an_empty_answer():
    meta = {"finish_reason": {"type": "abort"}, "weight_version": "default"}
    result = parse_output("a", {"text": "", "meta_info": meta}, weight_version=9)
    assert len(result.response_ids) == len(result.logprobs) == 0
    assert (result.finish_reason, result.weight_version) == ("abort", 9)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(), request()], "same uid"),
        ([request(prompt=0)], "request a: the prompt is empty"),
        ([request(prompt=7)], "request a: a prompt of 7 and an answer of 4 tokens are more than the engine's 10"),
    ],
)
def test_requests_that_sglang_would_answer_wrongly(requests, message):
    with pytest.raises(ValueError, match=message):
        check_requests(requests, max_length=10)
