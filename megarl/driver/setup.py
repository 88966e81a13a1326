"""Builds a session from a configuration: data, processes, roles, rollout engine, sync; each with its progress line."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from megarl.config import Config, CreateDataConfig, CreateModelConfig, ModelConfig
from megarl.data.arithmetic import write_arithmetic
from megarl.data.prompts import PromptSet, PromptStream, load_rows
from megarl.data.tiny import write_tiny_model, write_tiny_tokenizer
from megarl.driver.checkpoint import CheckpointStore, DriverState, read_state
from megarl.driver.loop import Session
from megarl.driver.progress import Progress
from megarl.driver.rollout import Rollout
from megarl.driver.step import Learning, role_offload
from megarl.driver.step_metrics import Flops
from megarl.driver.stop import StopRequest
from megarl.driver.sync import WeightSync
from megarl.engines.flops import peak_flops
from megarl.metrics import MetricsWriter
from megarl.rewards import load_reward
from megarl.workers import placement
from megarl.workers.calls import Callee, gather
from megarl.workers.group import TrainerGroup
from megarl.workers.rollout import RolloutWorker


def create_inputs(config: Config) -> Config:
    """Make the model and the data that the configuration wants made; returns it with their paths in place."""
    folder = os.path.abspath(os.path.join(config.run.folder, "created"))
    if config.model.create is not None:
        config = replace(
            config,
            model=_create_model(config.model, config.model.create, os.path.join(folder, "model"), config.run.seed),
        )
    if config.data.create is not None:
        train, validation = _create_data(config.data.create, os.path.join(folder, "data"), config.run.seed)
        config = replace(config, data=replace(config.data, train=[train], validation=[validation], create=None))
    return config


def _create_model(model: ModelConfig, create: CreateModelConfig, folder: str, seed: int) -> ModelConfig:
    transformers_logging.disable_progress_bar()
    write_tiny_tokenizer(folder, create.alphabet)
    write_tiny_model(
        folder,
        create.kind,
        hidden_size=create.hidden_size,
        num_layers=create.num_layers,
        num_heads=create.num_heads,
        num_kv_heads=create.num_kv_heads,
        ffn_size=create.ffn_size,
        tie_embeddings=create.tie_embeddings,
        init_std=create.init_std,
        seed=seed,
    )
    return replace(model, path=folder, create=None)


def _create_data(create: CreateDataConfig, folder: str, seed: int) -> tuple[str, str]:
    train, validation = write_arithmetic(
        folder,
        create.task,
        max_operand=create.max_operand,
        modulus=create.modulus,
        num_train=create.num_train,
        num_validation=create.num_validation,
        seed=seed,
        held_out=create.held_out,
    )
    return str(train), str(validation)


def load_prompts(config: Config, tokenizer: Any) -> tuple[PromptStream, PromptSet, PromptSet | None]:
    """The training stream, its prompts, and the validation prompts (None without files)."""
    data = config.data
    train = PromptSet.build(
        load_rows(data.train), tokenizer, data.max_prompt_length, data.overlong_prompts, data.apply_chat_template
    )
    validation = None
    if data.validation:
        rows = load_rows(data.validation)[: data.max_validation_prompts]
        validation = PromptSet.build(
            rows, tokenizer, data.max_prompt_length, data.overlong_prompts, data.apply_chat_template, uid_prefix="v-"
        )
    return PromptStream(train, data.prompts_per_step, config.run.seed, data.shuffle), train, validation


def total_steps(config: Config, prompts: PromptStream) -> int:
    return config.run.total_steps or config.run.total_epochs * prompts.steps_per_epoch


def stop_tokens(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's and those of the model's generation config."""
    found = {tokenizer.eos_token_id}
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        own = GenerationConfig.from_pretrained(folder).eos_token_id
        found |= set(own) if isinstance(own, list) else {own}
    return tuple(sorted(token for token in found if token is not None))


def build(config: Config, stop: StopRequest, progress_of: type[Progress] = Progress) -> tuple[Session, DriverState]:
    """Start everything. Ray must be up. What can be wrong without a GPU (data, reward, checkpoint) is looked at
    first."""
    folder = config.model.path
    assert folder is not None, "create_inputs comes first"
    say = progress_of(0).say
    for function in (config.reward.function, config.reward.validation_function):
        load_reward(function)
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.tokenizer_path or folder, trust_remote_code=config.model.trust_remote_code
    )
    prompts, train, validation = load_prompts(config, tokenizer)
    say(
        f"data: {len(train)} training prompts ({train.num_dropped} dropped, {train.num_truncated} truncated), "
        f"{len(validation or ())} for validation"
    )
    checkpoints = CheckpointStore(config.run.folder, config.run.keep_checkpoints)
    checkpoint = checkpoints.find(config.run.resume)
    state = read_state(checkpoint) if checkpoint else _first_state(config, prompts)
    prompts.load_state_dict(state.data_cursor)
    steps = total_steps(config, prompts)

    bundles = placement.reserve(config.cluster, config.run.startup_deadline)
    group = TrainerGroup.start(config, bundles)
    for role in config.roles():
        source = config.critic.path if role == "critic" and config.critic.path else folder
        facts = group.call(f"building the {role}", "build_role", role, source, deadline=config.run.startup_deadline)[0]
        say(f"{role}: {facts['parameters'] / 1e6:,.2f} M parameters, {facts['layout']}")
    if checkpoint:
        for later in checkpoints.set_aside_after(state.step):
            say(f"a later checkpoint is set aside as {later}")
        group.call("loading the checkpoint", "load_checkpoint", checkpoint, deadline=config.run.startup_deadline)
        say(f"resumed from {checkpoint} after step {state.step}")
    for role in config.roles():
        offload = role_offload(config, role)
        kinds = [k for k in ("parameters", "gradients", "optimizer") if getattr(offload, k)]
        group.call(f"moving the {role} to the host", "release", role, kinds)
    rollout = _start_rollout(config, group, bundles, folder)
    sync = WeightSync(config, group, rollout, hf_config)
    sync.prepare()
    say(f"weight sync: {sync.summary}")
    gpu = group.call("reading the device", "device_name")[0]
    peak = config.cluster.peak_tflops * 1e12 if config.cluster.peak_tflops else peak_flops(gpu)
    session = Session(
        config=config,
        group=group,
        rollout=rollout,
        sync=sync,
        prompts=prompts,
        validation=validation,
        stop_token_ids=stop_tokens(folder, tokenizer),
        learning=Learning(config, group, hf_config.hidden_size, steps),
        flops=Flops(hf_config, _critic_config(config, hf_config), peak),
        checkpoints=checkpoints,
        writer=MetricsWriter(config.run.folder, state.step),
        progress=progress_of(steps, state.step),
        stop=stop,
    )
    return session, state


def _critic_config(config: Config, actor: Any) -> Any:
    if config.critic.path is None:
        return actor
    return AutoConfig.from_pretrained(config.critic.path, trust_remote_code=config.model.trust_remote_code)


def _first_state(config: Config, prompts: PromptStream) -> DriverState:
    return DriverState(
        step=0,
        data_cursor=prompts.state_dict(),
        optimizer_steps={"actor": 0, "critic": 0},
        kl_coef=config.algorithm.kl_in_reward_coef,
        best_validation=None,
    )


def _start_rollout(config: Config, group: TrainerGroup, bundles: Any, folder: str) -> Rollout:
    deadline = config.run.startup_deadline
    if config.rollout.engine == "hf":
        group.call("starting the rollout engine", "build_embedded", folder, deadline=deadline)
        return Rollout(config, group.actors, [s.host for s in group.seats], embedded=True)
    variables = placement.environment(config.cluster)
    remote = ray.remote(RolloutWorker)
    seats = [group.seats[replica * config.rollout.tensor] for replica in range(config.num_replicas)]
    workers = [
        remote.options(**placement.actor_options(bundles, seat.bundle, placement.ENGINE_SHARE, variables)).remote()
        for seat in seats
    ]
    logs = os.path.abspath(os.path.join(config.run.folder, "logs"))
    os.makedirs(logs, exist_ok=True)
    refs = [
        worker.setup.remote(config, folder, replica, seat.gpu, os.path.join(logs, f"sglang_{replica}.log"))
        for replica, (worker, seat) in enumerate(zip(workers, seats, strict=True))
    ]
    gather(refs, [Callee(f"SGLang replica {i}", s.host) for i, s in enumerate(seats)], "starting SGLang", deadline)
    return Rollout(config, workers, [s.host for s in seats], embedded=False)
