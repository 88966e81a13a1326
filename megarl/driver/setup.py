"""Builds a session from a configuration: data, processes, roles, rollout engine, sync; each with its progress line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from megarl.config import Config, CreateDataConfig, CreateModelConfig, ModelConfig
from megarl.data.arithmetic import write_arithmetic
from megarl.data.prompts import PromptSet, PromptStream, Row, load_rows
from megarl.data.tiny import write_tiny_model, write_tiny_tokenizer
from megarl.driver.checkpoint import CheckpointStore, DriverState, read_state
from megarl.driver.loop import Session
from megarl.driver.progress import Progress
from megarl.driver.rollout import Rollout, Starter
from megarl.driver.step import Learning, Timer, role_offload
from megarl.driver.step_metrics import Flops
from megarl.driver.stop import StopRequest
from megarl.driver.sync import WeightSync
from megarl.engines.flops import peak_flops
from megarl.environments import Environment, ObservationTokens, load_environment, prompt_messages
from megarl.metrics import MetricsWriter
from megarl.model.families import VALUE_HEAD, declare, declare_role
from megarl.model.role_layout import engine_keys, engine_layout, naming, role_layouts
from megarl.reshard.hf_files import check_tensors
from megarl.rewards import load_reward
from megarl.rewards.code import check_isolation
from megarl.rewards.loading import import_named
from megarl.workers import placement
from megarl.workers.calls import Callee, gather
from megarl.workers.group import TrainerGroup
from megarl.workers.receiver import Receivers
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


def load_prompts(
    config: Config, tokenizer: Any, environment: Environment | None = None
) -> tuple[PromptStream, PromptSet, PromptSet | None]:
    """The training stream, its prompts, and the validation prompts (None without files); as the environment wants the
    model to be told them."""
    data = config.data
    train = PromptSet.build(
        _told(config, environment, load_rows(data.train)),
        tokenizer,
        data.max_prompt_length,
        data.overlong_prompts,
        data.apply_chat_template,
        keeps_content=config.needs_reward_model,
    )
    validation = None
    if data.validation:
        rows = _told(config, environment, load_rows(data.validation)[: data.max_validation_prompts])
        validation = PromptSet.build(
            rows, tokenizer, data.max_prompt_length, data.overlong_prompts, data.apply_chat_template, uid_prefix="v-"
        )
    curriculum = import_named(data.curriculum, "curriculum", (), "package.module:function") if data.curriculum else None
    stream = PromptStream(train, data.prompts_per_step, config.run.seed, data.shuffle, curriculum)
    return stream, train, validation


def _told(config: Config, environment: Environment | None, rows: Sequence[Row]) -> Sequence[Row]:
    if environment is None:
        return rows
    name = config.environment.function or ""
    return [replace(row, prompt=prompt_messages(name, environment, row.prompt)) for row in rows]


def total_steps(config: Config, prompts: PromptStream) -> int:
    return config.run.total_steps or config.run.total_epochs * prompts.steps_per_epoch


def stop_tokens(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's and those of the model's generation config."""
    found = {tokenizer.eos_token_id}
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        own = GenerationConfig.from_pretrained(folder).eos_token_id
        found |= set(own) if isinstance(own, list) else {own}
    return tuple(sorted(token for token in found if token is not None))


@dataclass(frozen=True)
class Inputs:
    """What a run starts from, read and checked without Ray and without a GPU."""

    folder: str
    """The model's Hugging Face folder."""
    hf_config: Any
    critic_config: Any
    tokenizer: Any
    prompts: PromptStream
    validation: PromptSet | None
    checkpoints: CheckpointStore
    checkpoint: str | None
    """The checkpoint to resume from."""
    state: DriverState


def prepare(config: Config) -> Inputs:
    """Read and check what needs neither Ray nor a GPU: rewards, environment, model, layouts, data, checkpoint.

    Raises:
        ValueError: a reward function or environment that cannot be had, a model's code that cannot be isolated, a model
            that is not supported or that the layouts do not divide, data that cannot be read or is too little, a
            checkpoint that is none.
    """
    folder = config.model.path
    assert folder is not None, "create_inputs comes first"
    for function in (config.reward.function, config.reward.validation_function):
        load_reward(function)
        if function == "code":
            check_isolation(config.reward.allow_unsandboxed_code)
    environment = load_environment(config.environment.function) if config.environment.function else None
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    critic_config = hf_config
    if config.needs_critic and config.critic.path is not None:
        trust = config.model.trust_remote_code
        critic_config = AutoConfig.from_pretrained(config.critic.path, trust_remote_code=trust)
        if critic_config.vocab_size < hf_config.vocab_size:
            raise ValueError(
                f"critic.path: its vocabulary of {critic_config.vocab_size} is smaller than the actor's "
                f"{hf_config.vocab_size}; the critic reads the actor's tokens and needs the same tokenizer"
            )
    reward_config = check_reward_model(config) if config.needs_reward_model else None
    check_layouts(config, hf_config, critic_config, reward_config)
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.tokenizer_path or folder, trust_remote_code=config.model.trust_remote_code
    )
    if environment is not None:
        observation = ObservationTokens(tokenizer, config.data.apply_chat_template, stop_tokens(folder, tokenizer))
        observation.check_limit(config.environment.max_observation_tokens, "environment.max_observation_tokens")
    prompts, train, validation = load_prompts(config, tokenizer, environment)
    Progress(0).say(
        f"data: {len(train)} training prompts ({train.num_dropped} dropped, {train.num_truncated} truncated), "
        f"{len(validation or ())} for validation"
    )
    checkpoints = CheckpointStore(config.run.folder, config.run.keep_checkpoints)
    checkpoint = checkpoints.find(config.run.resume)
    state = read_state(checkpoint) if checkpoint else _first_state(config, prompts)
    prompts.load_state_dict(state.data_cursor)
    return Inputs(folder, hf_config, critic_config, tokenizer, prompts, validation, checkpoints, checkpoint, state)


def check_reward_model(config: Config) -> Any:
    """The reward model's configuration, if its checkpoint and tokenizer are what the configuration takes them for.

    Raises:
        ValueError: a family that is not known, tensors other than those of a model with one score, texts longer than
            the model reads, a tokenizer of another vocabulary or without the chat template that is to be applied.
    """
    own, trust = config.reward_model, config.model.trust_remote_code
    folder = own.path
    assert folder is not None, "there is a reward model"
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    try:
        check_tensors(folder, declare_role("reward_model", hf_config).tensors())
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"reward_model.path: {error}. It must be a sequence-classification model with one label, whose head is "
            f"{VALUE_HEAD} [1, {hf_config.hidden_size}]"
        ) from error
    if own.max_length > hf_config.max_position_embeddings:
        raise ValueError(
            f"reward_model.max_length: is {own.max_length}, but the model reads {hf_config.max_position_embeddings} "
            f"tokens (max_position_embeddings in {folder}); lower it"
        )
    tokenizer = AutoTokenizer.from_pretrained(own.tokenizer_path or folder, trust_remote_code=trust)
    if len(tokenizer) > hf_config.vocab_size:
        raise ValueError(
            f"reward_model.tokenizer_path: the tokenizer has {len(tokenizer)} tokens, the model a vocabulary of "
            f"{hf_config.vocab_size}; give the tokenizer that it was trained with"
        )
    if own.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"reward_model.apply_chat_template: is true, but the tokenizer in {own.tokenizer_path or folder} has no "
            f"chat template; set it to false, or reward_model.tokenizer_path to one that has"
        )
    return hf_config


def check_layouts(config: Config, hf_config: Any, critic_config: Any, reward_config: Any = None) -> None:
    """Every role's layout, and the engine's, can be made of the model.

    Raises:
        ValueError: a family that is not known, or sizes that do not divide the model's, naming the role.
    """
    hf_configs = {"actor": hf_config, "reference": hf_config, "critic": critic_config, "reward_model": reward_config}
    role_layouts(config, hf_configs)
    if config.rollout.engine == "sglang":
        sglang, on_gpus = config.rollout.sglang, placement.uses_gpus(config.cluster)
        with naming(engine_keys(config)):
            if sglang.expert > 1 and not declare(hf_config).num_experts:
                raise ValueError(f"{sglang.expert} groups of ranks, but the model has no experts; set it to 1")
            if sglang.expert > 1 and not on_gpus:
                raise ValueError(
                    "without a GPU SGLang (0.5.21) fails in answers of experts that are spread; set it to 1"
                )
        engine_layout(config, hf_config, num_replicas=1)
        with naming(engine_keys(config)):
            if sglang.data_parallel > 1 and not on_gpus:
                raise ValueError("without a GPU SGLang (0.5.21) fails in data-parallel attention; set it to 1")


def build(config: Config, inputs: Inputs, stop: StopRequest) -> Session:
    """Start the processes, build the roles, start the engine and plan the sync. Ray must be up."""
    folder, hf_config, state = inputs.folder, inputs.hf_config, inputs.state
    steps = total_steps(config, inputs.prompts)
    progress = Progress(steps, state.step)
    say, timer = progress.say, Timer()
    with timer("processes"):
        placed = placement.place(config)
        group = TrainerGroup.start(config, placed)
        receivers = Receivers.start(config, placed) if placed.engine else None
        stops = stop_tokens(folder, inputs.tokenizer)
        replicas = None
        if config.rollout.engine == "sglang":  # they import SGLang while the roles are built
            replicas = _Replicas.start(config, receivers.seats if receivers else group.seats, placed, folder, stops)
    with timer("roles"):
        _build_roles(config, inputs, group, say)
    with timer("engine"):
        rollout = _start_rollout(config, group, replicas, folder, stops)
    with timer("sync plan"):
        sync = WeightSync(config, group, rollout, hf_config, receivers)
        sync.prepare()
    say(f"weight sync: {sync.summary}")
    gpu = group.call("reading the device", "device_name")[0]
    peak = config.cluster.peak_tflops * 1e12 if config.cluster.peak_tflops else peak_flops(gpu)
    launched = time.time() - psutil.Process().create_time()
    shares = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in timer.seconds.items())
    say(f"ready {launched:.0f} s after launch ({shares})")
    progress.start_clock()
    return Session(
        config=config,
        group=group,
        rollout=rollout,
        sync=sync,
        prompts=inputs.prompts,
        validation=inputs.validation,
        stop_token_ids=stops,
        learning=Learning(config, group, hf_config.hidden_size, steps),
        flops=Flops(hf_config, inputs.critic_config, peak),
        checkpoints=inputs.checkpoints,
        writer=MetricsWriter(config.run.folder, state.step),
        progress=progress,
        stop=stop,
    )


def _build_roles(config: Config, inputs: Inputs, group: TrainerGroup, say: Callable[[str], None]) -> None:
    """Build the roles, load the checkpoint, and move off the GPU what the configuration offloads."""
    folder, checkpoint, state = inputs.folder, inputs.checkpoint, inputs.state
    for role in config.roles():
        source = {"critic": config.critic.path, "reward_model": config.reward_model.path}.get(role) or folder
        facts = group.call(f"building the {role}", "build_role", role, source, deadline=config.run.startup_deadline)[0]
        say(f"{role}: {facts['parameters'] / 1e6:,.2f} M parameters, {facts['layout']}")
    for later in inputs.checkpoints.set_aside_after(state.step):
        say(f"a later checkpoint is set aside as {later}")
    if checkpoint:
        group.call("loading the checkpoint", "load_checkpoint", checkpoint, deadline=config.run.startup_deadline)
        say(f"resumed from {checkpoint} after step {state.step}")
    for role in config.roles():
        offload = role_offload(config, role)
        kinds = [k for k in ("parameters", "gradients", "optimizer") if getattr(offload, k)]
        group.call(f"moving the {role} to the host", "release", role, kinds)


def _first_state(config: Config, prompts: PromptStream) -> DriverState:
    return DriverState(
        step=0,
        data_cursor=prompts.state_dict(),
        optimizer_steps={"actor": 0, "critic": 0},
        kl_coef=config.algorithm.kl_in_reward_coef,
    )


@dataclass(frozen=True)
class _Replicas:
    """SGLang's processes, started and not set up yet."""

    starter: Starter
    workers: list[Any]
    seats: list[placement.Seat]
    """Of each replica's first rank."""
    gpus: list[str]
    """For errors, which GPUs each has."""

    @classmethod
    def start(
        cls,
        config: Config,
        all_seats: Sequence[placement.Seat],
        placed: placement.Placement,
        folder: str,
        stop_token_ids: tuple[int, ...],
    ) -> _Replicas:
        size = config.rollout.tensor
        replicas = [all_seats[replica * size : (replica + 1) * size] for replica in range(config.num_replicas)]
        for own in replicas:
            _check_replica(own)
        remote = ray.remote(RolloutWorker)
        seats = [own[0] for own in replicas]
        options = [
            placement.actor_options(placed.bundles, seat.bundle, placement.ENGINE_SHARE, placed.variables)
            for seat in seats
        ]
        logs = os.path.abspath(os.path.join(config.run.folder, "logs"))
        os.makedirs(logs, exist_ok=True)
        files = [os.path.join(logs, f"sglang_{replica}.log") for replica in range(len(seats))]
        starter = Starter(
            lambda replica: remote.options(**options[replica]).remote(),
            lambda replica, worker: worker.setup.remote(
                config, folder, replica, seats[replica].gpu, files[replica], stop_token_ids
            ),
            files,
        )
        workers = [starter.create(replica) for replica in range(len(seats))]
        for worker in workers:
            worker.import_engine.remote()
        return cls(starter, workers, seats, [placement.on_gpus(own) for own in replicas])


def _start_rollout(
    config: Config, group: TrainerGroup, replicas: _Replicas | None, folder: str, stop_token_ids: tuple[int, ...]
) -> Rollout:
    deadline = config.run.startup_deadline
    if replicas is None:
        group.call("starting the rollout engine", "build_embedded", folder, stop_token_ids, deadline=deadline)
        return Rollout(config, group.actors, [s.host for s in group.seats], embedded=True)
    hosts, gpus = [seat.host for seat in replicas.seats], replicas.gpus
    refs = [replicas.starter.set_up(replica, worker) for replica, worker in enumerate(replicas.workers)]
    callees = [Callee(f"SGLang replica {i}{gpus[i]}", host) for i, host in enumerate(hosts)]
    gather(refs, callees, "starting SGLang", deadline)
    return Rollout(config, replicas.workers, hosts, embedded=False, gpus=gpus, starter=replicas.starter)


def _check_replica(seats: Sequence[placement.Seat]) -> None:
    """A replica's tensor-parallel ranks are neighbours: SGLang takes GPUs that follow its first one."""
    gpus = [seat.gpu for seat in seats]
    first = gpus[0]
    if len({seat.node for seat in seats}) > 1 or (first is not None and gpus != list(range(first, first + len(gpus)))):
        places = ", ".join(f"GPU {seat.gpu} on {seat.host}" for seat in seats)
        raise ValueError(
            f"a replica of rollout.tensor = {len(seats)} needs neighbouring GPUs of one node, got {places}"
        )
