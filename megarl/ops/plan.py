"""`megarl plan`: the rank grid of each role and the arithmetic from prompts to micro-batches, without GPU or Ray."""

from __future__ import annotations

from megarl.config import BatchConfig, Config
from megarl.parallel.topology import RankGrid


def describe(config: Config) -> str:
    """The plan as text."""
    return "\n".join([*_batches(config), "", *_rollout(config), "", *_grids(config)])


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
    mini_batches = config.data.prompts_per_step // batch.mini_batch_prompts
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
        f"  {role}: {mini_batches} mini-batches of {batch.mini_batch_prompts} prompts ({samples} samples) "
        f"x {batch.epochs} epochs = {mini_batches * batch.epochs} optimizer steps a step",
        f"    per data-parallel rank ({data_parallel}): about {samples / data_parallel:g} samples, {cut}",
    ]


def _rollout(config: Config) -> list[str]:
    own = config.rollout
    where = "in the trainer's processes" if own.engine == "hf" else f"tensor {own.tensor}"
    replicas = config.cluster.num_ranks if own.engine == "hf" else config.num_replicas
    return [
        "rollout",
        f"  {own.engine}, {replicas} replicas, {where}; about {config.samples_per_step / replicas:g} answers each, "
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
