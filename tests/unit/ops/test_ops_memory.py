"""What each role and the engine hold, by hand for shapes that people know and for small ones with every parallel size,
and against what a real engine under gloo has allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from megarl import config
from megarl.config import OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.model.role_layout import engine_layout, role_layout
from megarl.ops.memory import EngineMemory, RoleMemory, engine_memory, optimizer_bytes, role_memory, usage
from tests.processes import Party, parties

QWEN = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    tie_word_embeddings=True,
)
# Embedding 151,936 x 896; in a layer queries 896 x 897, keys and values 2 x 128 x 897, output 896 x 896, feed-forward
# 3 x 4,864 x 896, norms 2 x 896; the last norm 896. 151,936 is a multiple of 128: no padding.
QWEN_ELEMENTS = 494_032_768

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    tie_word_embeddings=False,
)

SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    tie_word_embeddings=False,
)

EXPERTS = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=32,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)


def held(
    hf_config: Any,
    num_ranks: int = 1,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    role: str = "actor",
) -> tuple[RoleMemory, ...]:
    sizes = parallel or ParallelConfig()
    return role_memory(role_layout(role, hf_config, sizes, num_ranks, fused_norms=False), sizes, "bf16", optimizer)


# ------------------------------------------------------------------------------------------------ roles


def test_one_gpu_has_2_bytes_of_parameters_4_of_gradients_and_12_of_adam() -> None:
    """988 MB, 1,976 MB and 5,928 MB, of which 1,976 MB of main parameters are there before the first step."""
    (found,) = held(QWEN, optimizer=OptimizerConfig())
    assert found == RoleMemory(988_065_536, 1_976_131_072, 5_928_393_216, 1_976_131_072)
    assert found.total == 8_892_589_824


def test_a_role_without_an_optimizer_has_parameters_only() -> None:
    assert held(QWEN, role="reference") == (RoleMemory(988_065_536),)


def test_a_critic_has_a_value_head_of_one_row() -> None:
    (found,) = held(QWEN, role="critic")
    assert found.parameters == 988_065_536 + 2 * 896


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        (OptimizerConfig(), "bf16", (4 + 4 + 4, 4)),
        (OptimizerConfig(state_precision="bf16"), "bf16", (4 + 2 + 2, 0)),
        (OptimizerConfig(), "fp32", (4 + 4, 0)),
        (OptimizerConfig(kind="sgd"), "bf16", (4, 4)),
        (OptimizerConfig(kind="sgd"), "fp32", (0, 0)),
    ],
)
def test_bytes_of_optimizer_states_an_element(
    optimizer: OptimizerConfig, precision: str, expected: tuple[int, int]
) -> None:
    assert optimizer_bytes(optimizer, precision) == expected


def test_the_last_stage_is_the_fullest_and_context_ranks_share_adams_states() -> None:
    """Tensor 2: of 256 padded rows 128 a rank, x 16 = 2,048. A layer: norms 32, and half of 768 + 1,536: 1,184. First
    stage 2,048 + 1,184 = 3,232; last stage 16 more for the last norm. Data parallel 1 x context 2 share states."""
    parallel = ParallelConfig(tensor=2, pipeline=2, context=2)
    first = RoleMemory(2 * 3232, 4 * 3232, 12 * 1616, 4 * 1616)
    last = RoleMemory(2 * 3248, 4 * 3248, 12 * 1624, 4 * 1624)
    assert held(SMALL, 8, parallel, OptimizerConfig()) == (first,) * 4 + (last,) * 4


def test_sgd_is_replicated() -> None:
    """Two data-parallel ranks, each with all: 2 x 128 x 16 of vocabulary, 2 x 2,336 of layers, 16."""
    elements = 4096 + 4672 + 16
    assert (
        held(SMALL, 2, None, OptimizerConfig(kind="sgd"))
        == (RoleMemory(2 * elements, 4 * elements, 4 * elements, 4 * elements),) * 2
    )


def test_experts_are_shared_by_fewer_ranks_than_dense_layers() -> None:
    """Dense: vocabulary 2 x 128 x 16, norms 3 x 16 and 2 x 4, attention 768, router 64: 4,984 over 4 ranks. Two of four
    experts, 2 x 3 x 8 x 16 = 768, over the 2 ranks that have the same."""
    (found, *_) = held(EXPERTS, 4, ParallelConfig(expert=2), OptimizerConfig())
    own = 4984 // 4 + 768 // 2
    assert found == RoleMemory(2 * (4984 + 768), 4 * (4984 + 768), 12 * own, 4 * own)


class Member:
    """A rank of a gloo job that builds engines."""

    def __init__(self, rank: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def allocated(
        self, hf_config: Any, parallel: ParallelConfig, precision: Any, kind: Any
    ) -> tuple[list[int], RoleMemory]:
        """Bytes of the storages of each kind, of the optimizer also before the first step; and what is expected."""
        from megarl.engines.megatron import MegatronEngine
        from megarl.engines.optimizer import make_states

        optimizer = OptimizerConfig(kind=kind)
        engine = MegatronEngine("actor", hf_config, parallel, precision=precision, optimizer=optimizer)
        layout = role_layout("actor", hf_config, parallel, 2, engine.uses_fused_norms)
        expected = role_memory(layout, parallel, precision, optimizer)[dist.get_rank()]
        at_start = self._bytes(engine)[2]
        make_states(engine.optimizer)
        return [*self._bytes(engine), at_start], expected

    def _bytes(self, engine: Any) -> list[int]:
        seen: dict[int, int] = {}
        found = []
        for kind in ("parameters", "gradients", "optimizer"):
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage() for t in engine.residency.tensors_of[kind]()
            }
            found.append(sum(s.nbytes() for address, s in storages.items() if address not in seen))
            seen |= {address: s.nbytes() for address, s in storages.items()}
        return found


def wider(hf_config: Any) -> Any:
    """Large enough that the padding of Megatron's buffers, 64 elements a parameter and 256 a buffer, counts little."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    more = {"moe_intermediate_size": 128} if hf_config.model_type == "qwen3_moe" else {}
    return type(hf_config).from_dict({**hf_config.to_dict(), **sizes, **more})


def test_a_real_engine_holds_what_is_said(tmp_path: Path) -> None:
    """On two ranks: bf16 and fp32, adam and sgd, dense and with experts spread."""
    members = [Party(Member, rank, str(tmp_path / "store"), start="spawn") for rank in range(2)]
    dense, experts = wider(SMALL), wider(EXPERTS)
    cases = [
        (dense, ParallelConfig(), "bf16", "adam"),
        (dense, ParallelConfig(), "bf16", "sgd"),
        (dense, ParallelConfig(pipeline=2), "fp32", "adam"),
        (dense, ParallelConfig(), "fp32", "sgd"),
        (experts, ParallelConfig(expert=2), "bf16", "adam"),
    ]
    with parties(*members):
        for case in cases:
            for member in members:
                member.start("allocated", *case)
            for member in members:
                actual, expected = cast(tuple[list[int], RoleMemory], member.result())
                wanted = [expected.parameters, expected.gradients, expected.optimizer, expected.optimizer_at_start]
                assert actual == pytest.approx(wanted, rel=0.002), case[1:]


# ------------------------------------------------------------------------------------------------ phases


def test_what_is_offloaded_is_not_there_while_a_role_is_idle() -> None:
    whole = RoleMemory(10, 20, 60, 20)
    assert whole.idle(OffloadConfig()) == whole
    assert whole.idle(OffloadConfig(parameters=True)) == RoleMemory(0, 20, 60, 20)
    assert whole.idle(OffloadConfig(gradients=True, optimizer=True)) == RoleMemory(10, 0, 0, 0)


def test_the_fullest_gpu_of_each_phase() -> None:
    """Actor: all offloaded but gradients. Critic: nothing. The fullest rank of one role is not that of the other: sums
    are of one rank."""
    roles = {
        "actor": (RoleMemory(10, 20, 60, 25), RoleMemory(1, 2, 6, 2)),
        "critic": (RoleMemory(3, 6, 18, 6), RoleMemory(5, 10, 30, 10)),
        "reference": (RoleMemory(10), RoleMemory(1)),
    }
    offload = {
        "actor": OffloadConfig(parameters=True, optimizer=True),
        "critic": OffloadConfig(),
        "reference": OffloadConfig(parameters=True),
    }
    found = usage(roles, offload)
    assert found.training == {
        "actor": 90 + 27,  # rank 0
        "critic": 20 + 27,  # rank 0; rank 1 has 2 + 45: as much
        "reference": 20 + 27 + 10,
    }
    assert found.start == 20 + 3 + 6 + 6
    assert found.sync == 10 + 20 + 27
    assert found.generation == 2 + 45


# ------------------------------------------------------------------------------------------------ engine


def engine(hf_config: Any, tensor: int, precision: str = "bf16", **sglang: Any) -> EngineMemory:
    loaded = config.build(
        {
            "model": {"create": {}, "precision": precision},
            "data": {"create": {}},
            "cluster": {"gpus_per_node": tensor},
            "rollout": {"tensor": tensor, "sglang": sglang},
        }
    )
    return engine_memory(loaded, hf_config, engine_layout(loaded, hf_config))


@pytest.mark.parametrize(
    ("hf_config", "tensor", "options", "kv_token"),
    [
        (QWEN, 1, {}, 12_288),  # 2 x 24 layers x 2 heads x 64 x 2 bytes
        (QWEN, 2, {}, 6_144),  # one of the two heads
        (QWEN, 1, {"kv_cache_dtype": "fp8_e4m3"}, 6_144),
        (QWEN, 1, {"precision": "fp32"}, 24_576),
        (QWEN, 1, {"precision": "fp32", "kv_cache_dtype": "bf16"}, 12_288),
        (LLAMA_8B, 1, {}, 131_072),  # 2 x 32 x 8 x 128 x 2
        (LLAMA_8B, 8, {}, 16_384),
        (LLAMA_8B, 16, {}, 16_384),  # 16 ranks, 8 heads: each has one all the same
    ],
)
def test_kv_cache_of_a_token(hf_config: Any, tensor: int, options: dict[str, Any], kv_token: int) -> None:
    assert engine(hf_config, tensor, **options).kv_token == kv_token


def test_weights_of_the_engine() -> None:
    """Tensor 2 of Qwen: half of all but the 49 norms of 896, and the output projection has no bias."""
    assert engine(QWEN, 1).weights == 2 * QWEN_ELEMENTS
    assert engine(QWEN, 2).weights == (QWEN_ELEMENTS - 49 * 896) + 2 * 49 * 896
