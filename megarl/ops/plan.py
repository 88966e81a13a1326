"""`megarl plan`: what a configuration comes to, without GPU, Ray or torch.distributed: the arithmetic from prompts to
micro-batches, memory a GPU, what the engine has room for, what each weight sync moves, and the rank grid of each role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megarl.config import BatchConfig, Config, CreateModelConfig, OffloadConfig
from megarl.data.tiny import SPECIAL_TOKENS
from megarl.model.role_layout import engine_layout, role_layouts
from megarl.ops import capacity
from megarl.ops.memory import PARAMETER_BYTES, EngineMemory, RoleMemory, engine_memory, role_memory, usage
from megarl.ops.weight_sync import plan_sync
from megarl.parallel.topology import RankGrid
from megarl.reshard.layout import Layout
from megarl.reshard.plan import Summary

ON_TOP = "activations, CUDA contexts, NCCL's buffers and CUDA graphs come on top"


def describe(config: Config) -> str:
    """The plan as text.

    Raises:
        ValueError: the model's config.json cannot be read, the model is not supported, or sizes do not divide it.
    """
    hf_config, critic_config = model_configs(config)
    hf_configs = dict.fromkeys(config.roles(), hf_config) | {"critic": critic_config}
    if config.reward_model.path is not None:
        hf_configs["reward_model"] = _read_config(config.reward_model.path)
    layouts = role_layouts(config, hf_configs)
    target = engine_layout(config, hf_config)
    roles = _role_memory(config, layouts)
    engine = engine_memory(config, hf_config, target)
    summary = plan_sync(
        layouts["actor"],
        target,
        PARAMETER_BYTES[config.model.precision],
        config.cluster.gpus_per_node,
        config.sync.bucket_mb * 2**20,
        config.rollout.num_gpus > 0,
    ).summary()
    sections = [
        _batches(config),
        _rollout(config),
        _memory(config, roles),
        *_gpus(config, engine, roles, summary),
        _sync(config, summary),
        _grids(config),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


# ------------------------------------------------------------------------------------------------ the model


def model_configs(config: Config) -> tuple[Any, Any]:
    """The Hugging Face configurations of the actor and of the critic; of a model that the run will make, the one that
    it will have.

    Raises:
        ValueError: one that cannot be read, or a model that is not supported.
    """
    if config.model.create is not None:
        hf_config = _created_config(config.model.create)
    else:
        assert config.model.path is not None, "a valid configuration has a model"
        hf_config = _read_config(config.model.path)
    if config.needs_critic and config.critic.path is not None:
        return hf_config, _read_config(config.critic.path)
    return hf_config, hf_config


def _read_config(folder: str) -> Any:
    from megarl.ops.folders import read_config  # and with it transformers and torch, which take seconds

    return read_config(folder)


def _created_config(create: CreateModelConfig) -> Any:
    """What data/tiny.py writes of it, as far as layouts depend on it."""
    return SimpleNamespace(
        model_type=create.kind,
        vocab_size=len(SPECIAL_TOKENS) + len(create.alphabet),
        hidden_size=create.hidden_size,
        intermediate_size=create.ffn_size,
        num_hidden_layers=create.num_layers,
        num_attention_heads=create.num_heads,
        num_key_value_heads=create.num_kv_heads,
        tie_word_embeddings=create.tie_embeddings,
    )


def _role_memory(config: Config, layouts: Mapping[str, Layout]) -> dict[str, tuple[RoleMemory, ...]]:
    optimizers = {"actor": config.actor.optimizer, "critic": config.critic.optimizer}
    sizes = config.roles()
    return {
        role: role_memory(layout, sizes[role], config.model.precision, optimizers.get(role))
        for role, layout in layouts.items()
    }


# ------------------------------------------------------------------------------------------------ memory


def _memory(config: Config, roles: Mapping[str, Sequence[RoleMemory]]) -> list[str]:
    unit = "process" if _is_cpu(config) else "GPU"
    lines = [
        f"memory of the roles, GB a {unit}, on the rank that holds most",
        "  role         rank  parameters  gradients  optimizer    total  leaves while idle",
    ]
    offload = _offload(config)
    for role, ranks in roles.items():
        rank, most = max(enumerate(ranks), key=lambda found: found[1].total)
        kinds = [k for k in ("parameters", "gradients", "optimizer") if getattr(offload[role], k) and getattr(most, k)]
        lines.append(
            f"  {role:<12} {rank:>4} {_gb(most.parameters):>11} {_gb(most.gradients):>10} {_gb(most.optimizer):>10} "
            f"{_gb(most.total):>8}  {', '.join(kinds) or 'nothing'}"
        )
    return lines


def _offload(config: Config) -> dict[str, OffloadConfig]:
    """By role; without GPUs nothing leaves."""
    return {role: OffloadConfig() if _is_cpu(config) else getattr(config, role).offload for role in config.roles()}


def _gpus(
    config: Config, engine: EngineMemory, roles: Mapping[str, Sequence[RoleMemory]], summary: Summary
) -> list[list[str]]:
    """The sections on the engine's room and on the peaks."""
    if _is_cpu(config):
        return []
    held, is_split = usage(roles, _offload(config)), config.rollout.num_gpus > 0
    if config.rollout.engine == "hf":
        peaks = capacity.trainer_peaks(config, held, engine.weights, engine.weights, summary.peak_buffer)
        return [_peaks(dict.fromkeys(capacity.GPU_SIZES, peaks), f"{ON_TOP}, and the KV cache of a batch")]
    rooms = [capacity.room(config, engine, None if is_split else held, gpu) for gpu in capacity.GPU_SIZES]
    found: dict[int, dict[str, int]] = {}
    for room in rooms:
        weights, share = (0, 0) if is_split else (engine.weights, max(room.share, engine.weights))
        found[room.gpu] = capacity.trainer_peaks(config, held, weights, share, summary.peak_buffer)
        if is_split:
            own = max(room.share, engine.weights) + capacity.NUM_BUCKETS_HELD * summary.peak_buffer
            found[room.gpu]["the engine's own GPUs"] = own
    return [_room(config, engine, rooms), _peaks(found, ON_TOP)]


def _room(config: Config, engine: EngineMemory, rooms: Sequence[capacity.Room]) -> list[str]:
    own, where = config.rollout.sglang, "its own GPUs" if config.rollout.num_gpus else "the trainers' GPUs"
    rows: list[tuple[str, list[str]]] = [
        ("free while it starts, GB", [_gb(room.free) for room in rooms]),
        (f"its share: memory_fraction {own.memory_fraction:g}, GB", [_gb(room.share) for room in rooms]),
        ("weights, GB", [_gb(engine.weights)] * len(rooms)),
        ("KV cache, GB", [_gb(room.kv_cache) for room in rooms]),
        (f"tokens in it, of {engine.kv_token:,} bytes each", [f"{room.tokens:,}" for room in rooms]),
        (f"answers of {config.max_length:,} tokens that fit", [f"{room.answers:,}" for room in rooms]),
        (
            f"of {capacity.answers_a_replica(config):,} a replica, run together",
            [f"{capacity.together(config, room):,}" for room in rooms],
        ),
    ]
    lines = [_heading(f"SGLang on one of {where}"), *(_row(label, cells) for label, cells in rows)]
    if own.options:
        lines.append(f"  (without rollout.sglang.options: {', '.join(own.options)})")
    return lines + [f"  ! {said}" for said in capacity.decode_limits(config, engine, rooms)]


def _peaks(peaks: Mapping[int, Mapping[str, int]], on_top: str) -> list[str]:
    phases = next(iter(peaks.values()))
    return [
        _heading("GB of a GPU in use while"),
        *(_row(phase, [_gb(own[phase]) for own in peaks.values()]) for phase in phases),
        f"  ({on_top})",
        *(f"  ! {said}" for said in capacity.overfull(peaks)),
    ]


def _heading(title: str) -> str:
    return f"{title:<44}" + "".join(f"{f'{gpu} GB GPU':>13}" for gpu in capacity.GPU_SIZES)


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<42}" + "".join(f"{cell:>13}" for cell in cells)


def _is_cpu(config: Config) -> bool:
    return config.cluster.device == "cpu"


def _gb(num_bytes: int) -> str:
    """In 1e9 bytes; of less than 0.01 there are more digits."""
    return f"{num_bytes / 1e9:.4f}" if 0 < abs(num_bytes) < 1e7 else f"{num_bytes / 1e9:,.2f}"


# ------------------------------------------------------------------------------------------------ weight sync


def _sync(config: Config, summary: Summary) -> list[str]:
    count = summary.num_buckets
    lines = [
        f"weight sync, GB, in {config.model.precision}",
        *(
            f"  {label:<28} {_gb(num_bytes):>9}"
            for label, num_bytes in (
                ("within GPUs", summary.local),
                ("between GPUs of a node", summary.intra_node),
                ("between nodes", summary.inter_node),
                ("must leave a GPU at least", summary.crossing_lower_bound),
                ("written into the engine", summary.written),
                ("largest bucket of a GPU", summary.peak_buffer),
            )
        ),
    ]
    lines[-1] += f"  ({count} bucket{'s' if count != 1 else ''}, {capacity.NUM_BUCKETS_HELD} at a time)"
    if config.rollout.num_gpus:
        lines.append("  (the engine's GPUs count as other nodes; where they share the trainers', it is within a node)")
    return lines


# ------------------------------------------------------------------------------------------------ batches and ranks


def _batches(config: Config) -> list[str]:
    data, n = config.data, config.rollout.n
    lines = [
        "batches",
        f"  {data.prompts_per_step} prompts x {n} answers = {config.samples_per_step} samples a step, "
        f"at most {config.max_length} tokens each "
        f"({data.max_prompt_length} prompt + {data.max_response_length} response)",
    ]
    lines += _updates(config, "actor", config.actor.batch)
    if config.needs_critic:
        lines += _updates(config, "critic", config.critic.batch)
    return lines


def _updates(config: Config, role: str, batch: BatchConfig) -> list[str]:
    parallel = config.roles()[role]
    data_parallel = parallel.data_parallel(config.cluster.num_ranks)
    steps = config.optimizer_steps(batch)
    samples = batch.mini_batch_prompts * config.rollout.n
    if batch.dynamic:
        cut = f"packed into micro-batches of at most {batch.max_tokens_per_gpu * parallel.context} tokens"
        most = -(-samples * config.max_length // (data_parallel * batch.max_tokens_per_gpu * parallel.context))
        cut += f" (about {most} at full length)"
    else:
        cut = (
            f"in micro-batches of {batch.micro_batch_size} ({-(-samples // (data_parallel * batch.micro_batch_size))})"
        )
    return [
        f"  {role}: {steps // batch.epochs} mini-batches of {batch.mini_batch_prompts} prompts ({samples} samples) "
        f"x {batch.epochs} epochs = {steps} optimizer steps a step",
        f"    per data-parallel rank ({data_parallel}): about {samples / data_parallel:g} samples, {cut}",
    ]


def _rollout(config: Config) -> list[str]:
    own = config.rollout
    where = "in the trainer's processes" if own.engine == "hf" else f"tensor {own.tensor}"
    each = capacity.answers_a_replica(config)
    return [
        "rollout",
        f"  {own.engine}, {config.num_replicas} replicas, {where}; about {each:,} answers each, "
        f"temperature {own.temperature:g}, top_p {own.top_p:g}",
    ]


def _grids(config: Config) -> list[str]:
    lines = ["ranks"]
    ranks, per_node = config.cluster.num_ranks, config.cluster.gpus_per_node
    grids = {role: RankGrid(ranks, parallel) for role, parallel in config.roles().items()}
    for role, grid in grids.items():
        sizes = grid.parallel
        lines.append(
            f"  {role}: tensor {sizes.tensor} x pipeline {sizes.pipeline} x context {sizes.context} "
            f"x data {grid.data_parallel_size} = {ranks} ranks"
        )
    lines.append("  rank  node  gpu  " + "  ".join(f"{role + ' tp/pp/cp/dp':<22}" for role in grids))
    for rank in range(ranks):
        cells = []
        for grid in grids.values():
            at = grid.coordinates(rank)
            cells.append(f"{f'{at.tensor}/{at.pipeline}/{at.context}/{at.data}':<22}")
        lines.append(f"  {rank:>4}  {rank // per_node:>4}  {rank % per_node:>3}  " + "  ".join(cells))
    return lines
