"""The configuration: frozen dataclasses own every default, YAML holds overrides, the command line takes key=value.

Loading order: dataclass -> file -> command line, then one validation that reports every violation at once. OmegaConf
is used at this door only; everything behind it sees plain frozen dataclasses. Derived values are properties.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types as python_types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


class ConfigError(ValueError):
    """Every violation of a configuration, one a line, each with its key, the numbers, and what to change."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = list(violations)
        count = len(self.violations)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''} in the configuration:\n"
            + "\n".join(f"  * {v}" for v in self.violations)
        )


# ------------------------------------------------------------------------------------------------ sections


@dataclass(frozen=True)
class RunConfig:
    """What run this is, how long it goes, and what it leaves behind."""

    name: str = "megarl"
    dir: str = ""
    """Folder of the run: logs, checkpoints, the trained model. Empty: runs/<name>."""
    seed: int = 1
    total_steps: int | None = None
    """PPO steps; overrides total_epochs."""
    total_epochs: int = 1
    critic_warmup: int = 0
    """For this many steps only the critic learns."""
    resume: str = "auto"
    """auto: from the newest checkpoint of the run folder, or from the start; never; or a checkpoint's folder."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and when stopped."""
    save_at_end: bool = True
    """After the last step too; a run that is stopped saves in any case."""
    async_save: bool = True
    """Only the copy to host memory holds training up; files are written while it goes on, one checkpoint at a time, and
    the checkpoint is there when its manifest is. false: training waits for the files."""
    keep_checkpoints: int = 3
    """The newest so many are kept; 0: all."""
    validate_every: int = 0
    """Steps between validations; 0: only before the first and after the last step."""
    validate_before_training: bool = True
    save_model: bool = True
    """Write the trained actor as a Hugging Face folder at the end."""
    log_samples: int = 4
    """Answers shown in TensorBoard at every validation."""
    max_skipped_updates: int = 5
    """A non-finite gradient skips its update; this many in a row stop the run."""
    deadline: float = 1800.0
    """Seconds that any one stage of a step may take before the run stops with the name of the stage."""
    startup_deadline: float = 600.0
    max_replica_restarts: int = 3
    """SGLang replicas that have died are replaced, and their prompts run again, so many times in a run; then it stops
    with the reasons."""

    @property
    def folder(self) -> str:
        return self.dir or os.path.join("runs", self.name)


@dataclass(frozen=True)
class CreateModelConfig:
    """A model with random weights and a character tokenizer, made on the spot."""

    kind: Literal["llama", "qwen2"] = "llama"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_size: int = 128
    tie_embeddings: bool = False
    init_std: float = 0.02
    alphabet: str = "0123456789+-*="


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = None
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps fp32 main weights in the optimizer."""
    compile: bool = True
    """On GPUs, compiled kernels for the arithmetic over the vocabulary in place of torch's operations."""
    create: CreateModelConfig | None = None
    """Make a model with random weights instead of reading `path`."""


@dataclass(frozen=True)
class CreateDataConfig:
    """A generated arithmetic task with a verifiable reward."""

    task: str = "addition"
    max_operand: int = 9
    modulus: int | None = None
    num_train: int = 1000
    num_validation: int = 20
    held_out: bool = True


@dataclass(frozen=True)
class DataConfig:
    train: list[str] = field(default_factory=list)
    """parquet, json or jsonl files."""
    validation: list[str] = field(default_factory=list)
    prompts_per_step: int = 256
    max_prompt_length: int = 512
    max_response_length: int = 256
    """Tokens of an answer: with an environment, of all its turns and observations together."""
    overlong_prompts: Literal["drop", "truncate_left", "truncate_right", "error"] = "drop"
    apply_chat_template: bool = True
    shuffle: bool = True
    curriculum: str | None = None
    """Which prompts each epoch has, and in which order, in place of shuffling: package.module:function, called with the
    epoch's number and all prompts (with their extra_info), gives the numbers of those to be asked."""
    max_validation_prompts: int | None = None
    create: CreateDataConfig | None = None
    """Generate the data instead of reading `train` and `validation`."""


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of one role's layout. Data parallel follows: number of ranks / (tensor x pipeline x context)."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    """Sequence parallel: activations split over the tensor ranks between the matrix products."""
    first_stage_layers: int = 0
    """Layers on the first pipeline stage, over all its virtual stages; the stages that have no number of their own
    share the rest evenly. 0: as many as they."""
    last_stage_layers: int = 0
    """The same of the last pipeline stage."""

    @property
    def model_size(self) -> int:
        """Ranks that one copy of the model takes (context ranks counted)."""
        return self.tensor * self.pipeline * self.context

    def data_parallel(self, num_ranks: int) -> int:
        return num_ranks // self.model_size

    @property
    def sequence_multiple(self) -> int:
        """Each packed sequence is padded to a multiple of this."""
        return (self.tensor if self.sequence else 1) * (2 * self.context if self.context > 1 else 1)


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps, not PPO steps."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled from the gradient for adam; norms and biases are left out."""
    clip_grad: float = 1.0
    """Global L2 norm that gradients are scaled down to; 0: never."""
    state_precision: Literal["fp32", "bf16"] = "fp32"
    """Of adam's two moments: bf16 takes 4 bytes less a parameter. Needs GPUs and Transformer Engine's Adam."""
    overlap_grad_reduce: bool = True
    """Sum gradients over the data-parallel ranks while backward still runs."""
    overlap_param_gather: bool = False
    """adam: collect the new parameters from the data-parallel ranks when the next forward pass needs them, not at the
    end of the step."""


@dataclass(frozen=True)
class BatchConfig:
    """How a step's samples become optimizer steps and micro-batches. Prompts count globally, tokens per GPU."""

    mini_batch_prompts: int = 64
    """Prompts (with all their answers) per optimizer step, over all ranks."""
    epochs: int = 1
    dynamic: bool = True
    """Pack micro-batches to max_tokens_per_gpu; otherwise micro_batch_size sequences each."""
    max_tokens_per_gpu: int = 16384
    forward_max_tokens_per_gpu: int = 32768
    """The limit of forward-only passes (log-probs, values)."""
    micro_batch_size: int = 8


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the GPU: parameters, gradients and optimizer states while the role is idle."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    activations: list[str] = field(default_factory=list)
    """While it trains: what these modules of each layer save for backward waits in host memory; any of qkv_linear,
    core_attn, and with it attn_proj. Needs GPUs, bf16 and Transformer Engine."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that backward computes again instead of keeping them."""

    kind: Literal["none", "selective", "block", "full"] = "none"
    """selective: the `modules` of every layer. block: the first `num_layers` whole layers of each (virtual) pipeline
    stage. full: all layers; of each `num_layers` only the input of the first is kept."""
    modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """selective: any of core_attn, mlp (of dense layers), moe (of layers of experts), layernorm."""
    num_layers: int = 1
    swiglu: bool = True
    """With any kind: the product of gate and up in dense layers too, a fifth of the activations for about 2 % of the
    time."""


CLIP_RANGES = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.2)}
"""How far below and above 1 each policy loss clips, where actor.clip_low and actor.clip_high are empty: verl's for ppo,
the paper's for gspo, for cispo no lower bound (the paper's) and verl's above."""


@dataclass(frozen=True)
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo", "gpg"] = "ppo"
    """docs/algorithms.md has the formulas and papers. gspo and sapo are published with aggregation
    seq-mean-token-mean."""
    clip_low: float | None = None
    """The ratio is clipped at 1 - clip_low and 1 + clip_high; empty: 0.2 and 0.2 for ppo; 3e-4 and 4e-4 for gspo, whose
    ratio is a mean over the answer; 1 (no bound below) and 0.2 for cispo."""
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    """ppo: bounds the ratio where the advantage is negative; empty: no bound."""
    sapo_tau_positive: float = 1.0
    """sapo: how soon the gradient fades as the ratio leaves 1, where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """The same where it is negative."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with entropy_target the one that it begins at."""
    entropy_target: float | None = None
    """Adapt entropy_coef so that the entropy (nats a token) does not fall below this, as Skywork-OR1 does
    (arXiv:2505.22312; 0.2 in its scripts): the bonus is on in the steps whose entropy is at the target or below; empty:
    fixed."""
    entropy_coef_step: float = 0.005
    """entropy_target: what the coefficient grows by in a step whose entropy is below it, and sinks by in one above."""
    target_kl: float | None = None
    """A step's remaining optimizer steps are left out once one of them sees a mean actor/ppo_kl above 1.5 times this
    (OpenAI Spinning Up's PPO, where 0.01 to 0.05 is usual); empty: all are made."""
    skip_old_logprobs: Literal["never", "auto"] = "never"
    """auto: where one step has one optimizer step and nothing else looks at them, the log-probs before the update are
    those in it, and the pass that computes them is left out, with its metrics (actor/entropy,
    training/rollout_probs_diff_* and training/rollout_logprobs_abs_diff_mean)."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant"] = "token-mean"
    aggregation_constant: float | None = None
    """What aggregation `constant` divides by; empty: Dr. GRPO's, the answers of a mini-batch (mini_batch_prompts x
    rollout.n) x data.max_response_length."""
    kl_loss_coef: float = 0.0
    """KL to the reference as a term of the loss; 0: none."""
    kl_loss_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """k1+ and k3+ have the value of k1 and k3 with the gradient of k2, an unbiased estimate of the KL's."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """clip_low and clip_high, or this policy loss's own; of ppo, gspo and cispo."""
        low, high = CLIP_RANGES[self.policy_loss]
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)


@dataclass(frozen=True)
class CriticConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    batch: BatchConfig = field(default_factory=BatchConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    path: str | None = None
    """A Hugging Face folder to start from; empty: the actor's."""
    value_clip: float | None = 0.5
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant"] = "token-mean"


@dataclass(frozen=True)
class ReferenceConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    forward_max_tokens_per_gpu: int = 32768


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about the rollout engine and the trainer giving the same token other probabilities: factors on the
    policy loss, from the ratio trainer / rollout before the update."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Weigh the policy loss by the ratio: each token by its own, or all of an answer's by the product of theirs."""
    max_weight: float = 2.0
    """Larger ratios are truncated to this, or with min_weight dropped."""
    min_weight: float | None = None
    """IcePop: what lies outside min_weight .. max_weight (0.5 and 5 are usual) weighs 0; empty: it is truncated."""
    reject: Literal["none", "token", "seq_sum", "seq_mean", "seq_max"] = "none"
    """Leave tokens out of the policy loss whose reject_kind is out of bounds: token by token, or whole answers by its
    sum, mean or worst token. They still count in what the loss is divided by."""
    reject_kind: Literal["k1", "k2", "k3"] = "k1"
    """k1: the ratio (seq_sum: its product, seq_mean: its geometric mean). k2, k3: the estimates of the KL divergence,
    which are 0 where both agree."""
    reject_above: float | None = None
    """The upper bound; always needed."""
    reject_below: float | None = None
    """The lower bound of k1; empty: 1 / reject_above."""
    bypass: bool = False
    """The rollout engine's log-probs stand in for the trainer's before the update: the policy loss takes its ratio from
    them, so that nothing is left to correct, and the pass that computes the trainer's is left out, with its metrics."""

    @property
    def is_on(self) -> bool:
        return self.weights != "none" or self.reject != "none"


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Literal[
        "gae", "grpo", "rloo", "opo", "gpg", "grpo_passk", "remax", "reinforce_pp", "reinforce_pp_baseline"
    ] = "gae"
    """docs/algorithms.md has the formulas and papers. gae needs a critic, remax one greedy answer more to each prompt;
    all others but reinforce_pp compare the answers to one prompt."""
    gamma: float = 1.0
    """gae and reinforce_pp."""
    lam: float = 1.0
    """gae."""
    whiten_advantages: bool = True
    """gae, reinforce_pp and reinforce_pp_baseline: zero mean and unit variance over the global batch."""
    normalise_by_std: bool = True
    """grpo and grpo_passk: divide by the group's standard deviation."""
    kl_in_reward_coef: float = 0.0
    """KL to the reference subtracted from the reward of gae and reinforce_pp; 0: none."""
    kl_in_reward_kind: Literal["k1", "abs", "k2", "k3"] = "k1"
    kl_target: float | None = None
    """Adapt kl_in_reward_coef to keep the KL near this value (arXiv:1909.08593); empty: fixed."""
    kl_horizon: int = 10000
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    @property
    def compares_answers(self) -> bool:
        """Whether an answer's advantage depends on the other answers to its prompt."""
        return self.advantage not in ("gae", "reinforce_pp", "remax")

    @property
    def is_per_token(self) -> bool:
        """Whether each token has an advantage of its own, which a KL in the reward enters."""
        return self.advantage in ("gae", "reinforce_pp")

    @property
    def whitens(self) -> bool:
        return self.whiten_advantages and self.advantage in ADVANTAGES_WITH["whiten_advantages"]


ADVANTAGES_WITH = {
    "gamma": ("gae", "reinforce_pp"),
    "lam": ("gae",),
    "whiten_advantages": ("gae", "reinforce_pp", "reinforce_pp_baseline"),
    "normalise_by_std": ("grpo", "grpo_passk"),
}
"""Keys of `algorithm` that only these advantages look at; anywhere else they stay at their default."""


@dataclass(frozen=True)
class ValidationConfig:
    """Sampling of validation answers: greedy unless told otherwise."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class SGLangConfig:
    """SGLang's own server options, by our names for the usual ones; `options` passes any other through as it is. Where
    one may be null, null leaves it to SGLang."""

    memory_fraction: float = 0.5
    """Share of the GPU that SGLang may take for weights and KV cache. Raise it where the trainers are offloaded while
    SGLang is awake, or where the log says that requests are retracted; lower it when waking up runs out of memory."""
    max_running_requests: int = 1024
    """Answers of one replica that are generated together; the others wait. Decode is faster in larger batches, as long
    as the KV cache holds them."""
    chunked_prefill_size: int | None = None
    """Prompt tokens that one prefill step takes; longer prompts are cut, -1 never cuts. Lower it when long prompts run
    out of memory or hold up decoding."""
    max_prefill_tokens: int | None = None
    """Prompt tokens that are prefilled together, of all prompts. Raise it where many prompts come at once and the
    GPU has memory to spare; lower it when prefill runs out of memory."""
    cuda_graph_max_batch: int = 256
    """Largest decode batch that runs as a captured CUDA graph. Larger ones are slower, as in eager mode; each captured
    size costs memory and time at start. Raise it to the answers that a replica usually has in flight."""
    eager: bool = False
    """Capture no CUDA graphs at all: a quick start for debugging, and much slower decoding of small batches."""
    radix_cache: bool = True
    """Keep the KV cache of prompts that share a prefix, as the n answers to one prompt do. Turn it off when all
    prompts differ and n is 1, or to rule it out as the cause of an error."""
    kv_cache_dtype: Literal["auto", "bf16", "fp8_e5m2", "fp8_e4m3"] = "auto"
    """auto is that of the weights. fp8 holds twice the tokens, and its log-probs differ from the trainer's: watch
    training/rollout_probs_diff_mean."""
    attention_backend: str | None = None
    """Kernels of attention: triton, fa3, flashinfer, torch_native and others, as the installed SGLang knows them."""
    expert: int = 1
    """Expert-parallel size: so many groups of a replica's tensor-parallel ranks share the experts out. It divides
    rollout.tensor. 1 splits each expert over all ranks; raise it when their slices get thin."""
    data_parallel: int = 1
    """Data-parallel attention: so many groups of a replica's tensor-parallel ranks each hold the attention, the
    embedding and the KV cache of requests of their own, while experts and feed-forward layers stay split over all
    ranks. It divides rollout.tensor. Raise it where rollout.tensor is above the model's key/value heads, so that the
    KV cache would hold each several times. Qwen3 and Qwen3-MoE, on GPUs."""
    data_parallel_head: bool = False
    """With data_parallel above 1: each group holds the output layer too and computes the logits of its own requests
    only. It takes more memory and saves the exchange of all requests' hidden states and logits. Groups of several
    ranks need a vocabulary that is a multiple of 64."""
    log_stats: float = 0.0
    """Seconds between lines in the replica's log file that say what it does: requests that run and wait, KV cache in
    use, tokens a second, hits of the radix cache. 0: none."""
    sleep: bool = True
    """Colocated: release weights and KV cache while training."""
    release_cuda_graphs: bool = False
    """Colocated: release the memory of captured CUDA graphs too, about a GB; it is copied to the host and back."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any other of SGLang's server options by its own name; one that changes where weights lie is refused, for the
    sync would not find them."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["sglang", "hf"] = "sglang"
    """hf: transformers in the trainer's own processes, for laptops."""
    tensor: int = 1
    """Tensor-parallel size of one replica; replicas follow from the number of GPUs."""
    num_gpus: int = 0
    """GPUs of the engine's own, beside the trainers' (split placement); 0: it shares the trainers'. Without GPUs it
    counts processes."""
    n: int = 1
    """Answers per prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_batch: int = 256
    """hf engine: sequences generated together."""
    routing: Literal["least_loaded", "prefix"] = "least_loaded"
    """Which replica answers a prompt, always all of its answers and turns: the one that has least to do; or prompts
    that begin alike the same one, whose cache then holds the beginning once. One that runs out takes from the
    others."""
    oversample: float = 1.0
    """Ask so many times data.prompts_per_step prompts, take those that are answered first, and stop the others, which
    come again in the next step. Above 1 a step does not wait for its slowest prompts, and learns less often from long
    answers."""
    keep_groups: Literal["all", "mixed"] = "all"
    """mixed: leave prompts out whose answers all score the same, and ask others in their place."""
    max_refills: int = 10
    """mixed: other prompts are asked up to so many times those of the first question; then the step is filled up with
    what was left out."""
    warn_probs_diff: float = 0.03
    """Warn, with likely causes, when training/rollout_probs_diff_mean passes this: the mean over sampled tokens of
    |p trainer - p rollout|. 0: never."""
    ignore_eos: bool = False
    """Every answer takes all of data.max_response_length, for benchmarks; validation answers end as ever."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    @property
    def sleeps(self) -> bool:
        """Whether SGLang gives its memory back for training; on GPUs of its own it stays."""
        return self.sglang.sleep and self.num_gpus == 0


@dataclass(frozen=True)
class RewardConfig:
    function: str = "gsm8k"
    """gsm8k, gsm8k_flexible, math, choice, code, exact, prefix, or the user's own as package.module:function."""
    validation: str | None = None
    """What validation answers are scored by; empty: the same function."""
    num_workers: int = 4
    """Processes that score answers, for each rollout process; of the ready-made functions only math and code need
    them."""
    time_limit: float = 10.0
    """Seconds for one call of the function; past it the process is killed and the answer scores 0, with the reason."""
    memory_mb: int = 4096
    """Memory that a call may take beyond what importing the function took."""
    allow_unsandboxed_code: bool = False
    """code: run what the model wrote also where the kernel gives no namespaces to isolate it in, with limits of time,
    memory, processes and output alone: it can then read, write and connect to all that the run can."""
    overlong_buffer: int = 0
    """DAPO's soft overlong punishment (arXiv:2503.14476; 4096 of 20480 tokens there): in the last so many tokens of
    data.max_response_length a training answer's score sinks linearly by overlong_factor; 0: none."""
    overlong_factor: float = 1.0
    """overlong_buffer: what an answer of the full length loses."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: training answers that are cut at data.max_response_length are left out of the loss.
    They count among the answers to their prompt all the same."""

    @property
    def validation_function(self) -> str:
        return self.validation or self.function

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Of a ready-made function's name its keyword arguments."""
        # The tests of an answer end before the call does: those that passed may count.
        return {"code": {"allow_unsandboxed": self.allow_unsandboxed_code, "time_limit": 0.8 * self.time_limit}}


@dataclass(frozen=True)
class RewardModelConfig:
    """A model whose score of each training answer is added to the reward function's (docs/rewards.md). It is a role of
    its own on the trainer ranks, and only runs forward."""

    path: str | None = None
    """A Hugging Face folder of a sequence-classification model with one label: its head is score.weight [1, hidden].
    Empty: there is none."""
    tokenizer_path: str | None = None
    """Empty: that of `path`."""
    weight: float = 1.0
    """Of the model's score."""
    rule_weight: float = 1.0
    """Of what the reward function or the environment gave; 0: that is reported and nothing is learned from it."""
    apply_chat_template: bool = True
    """The model reads the prompt's messages, and the answer as one more, by its tokenizer's chat template; false: as
    plain text, or, where it has the policy's tokenizer, the tokens of prompt and answer themselves."""
    max_length: int = 8192
    """Tokens that the model reads of prompt and answer; longer ones lose their beginning."""
    forward_max_tokens_per_gpu: int = 32768
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class EnvironmentConfig:
    """What answers to the model between its turns, such as a tool (docs/environments.md)."""

    function: str | None = None
    """calculator, or the user's own as package.module:name; empty: one turn."""
    max_turns: int = 8
    """Of the model in an answer; the last one ends it."""
    max_observation_tokens: int = 128
    """Tokens of an observation and of what the chat template puts around it; a longer one loses its end."""
    num_workers: int = 4
    """Processes that run the environment, for each rollout process; none are started for the calculator."""
    time_limit: float = 10.0
    """Seconds for one step of it; past it the process is killed and the answer scores 0, with the reason."""
    memory_mb: int = 4096
    """Memory that a step may take beyond what importing the environment took."""


@dataclass(frozen=True)
class SyncConfig:
    """Weights from the trainer to the rollout engine."""

    bucket_mb: int = 512
    verify: Literal["checksum", "bitwise", "off"] = "checksum"
    """checksum: after every sync a position-weighted checksum of each tensor is read back from the engine and compared;
    costs one read of the weights on either side, at the same time. bitwise: also sends all weights a second time and
    compares every bit with what the engine holds, naming the parameter and the element; doubles the time of a sync and
    more."""


@dataclass(frozen=True)
class ClusterConfig:
    num_nodes: int = 1
    gpus_per_node: int = 1
    """Trainer ranks a node: GPUs, or processes where there is no GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    address: str | None = None
    """Ray's address to join a running cluster; empty: start Ray here."""
    threads_per_rank: int = 1
    """CPU threads of a trainer rank where there is no GPU."""
    peak_tflops: float | None = None
    """Peak bf16 TFLOP/s of one GPU, for MFU; empty: known for A100, H100, H200."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_in_reward_coef > 0 or self.actor.kl_loss_coef > 0

    @property
    def needs_reward_model(self) -> bool:
        return self.reward_model.path is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt needs a greedy answer besides those that are trained on."""
        return self.algorithm.advantage == "remax"

    @property
    def skips_old_logprobs(self) -> bool:
        """Whether the actor's log-probs before the update are not computed: the rollout's stand in for them, or they
        are those in the update and nobody else looks at them."""
        own, algorithm = self.actor, self.algorithm
        if algorithm.correction.bypass:
            return True
        is_looked_at = algorithm.correction.is_on or algorithm.kl_in_reward_coef > 0 or own.entropy_target is not None
        return own.skip_old_logprobs == "auto" and self.optimizer_steps(own.batch) == 1 and not is_looked_at

    def optimizer_steps(self, batch: BatchConfig) -> int:
        """Optimizer steps that one step of the loop makes."""
        return -(-self.data.prompts_per_step // max(batch.mini_batch_prompts, 1)) * batch.epochs

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.n

    def asked_prompts(self, count: int) -> int:
        """How many prompts are asked where so many are needed."""
        return math.ceil(round(count * self.rollout.oversample, 9))

    @property
    def max_length(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def aggregation_constant(self) -> float:
        """What the actor's aggregation `constant` divides by."""
        answers = self.actor.batch.mini_batch_prompts * self.rollout.n
        return self.actor.aggregation_constant or float(answers * self.data.max_response_length)

    @property
    def num_replicas(self) -> int:
        return (self.rollout.num_gpus or self.cluster.num_ranks) // self.rollout.tensor

    def roles(self) -> dict[str, ParallelConfig]:
        """The roles that this run has, in the order in which they are built."""
        roles = {"actor": self.actor.parallel}
        if self.needs_critic:
            roles["critic"] = self.critic.parallel
        if self.needs_reference:
            roles["reference"] = self.reference.parallel
        if self.needs_reward_model:
            roles["reward_model"] = self.reward_model.parallel
        return roles


# ------------------------------------------------------------------------------------------------ typed building

VERL_KEYS = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "actor.batch.mini_batch_prompts",
    "actor_rollout_ref.actor.ppo_epochs": "actor.batch.epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor.batch.micro_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.batch.max_tokens_per_gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz": "actor.batch.dynamic",
    "actor_rollout_ref.actor.clip_ratio": "actor.clip_low and actor.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "actor.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "actor.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "actor.dual_clip",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "actor.policy_loss (vanilla is ppo)",
    "actor_rollout_ref.actor.policy_loss.tau_pos": "actor.sapo_tau_positive",
    "actor_rollout_ref.actor.policy_loss.tau_neg": "actor.sapo_tau_negative",
    "actor_rollout_ref.actor.entropy_coeff": "actor.entropy_coef",
    "algorithm.rollout_correction.bypass_mode": "algorithm.correction.bypass",
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.correction.bypass",
    "reward_model.overlong_buffer.enable": "reward.overlong_buffer (0 turns it off)",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_factor",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward.overlong_buffer (0 turns it off)",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward.overlong_factor",
    "reward_model.enable": "reward_model.path (empty turns it off)",
    "reward_model.model.path": "reward_model.path",
    "reward_model.model.input_tokenizer": "reward_model.apply_chat_template (false is verl's null)",
    "reward_model.model.trust_remote_code": "model.trust_remote_code",
    "reward_model.forward_max_token_len_per_gpu": "reward_model.forward_max_tokens_per_gpu",
    "reward_model.megatron.tensor_model_parallel_size": "reward_model.parallel.tensor",
    "reward_model.megatron.pipeline_model_parallel_size": "reward_model.parallel.pipeline",
    "reward_model.megatron.context_parallel_size": "reward_model.parallel.context",
    "reward_model.megatron.param_offload": "reward_model.offload.parameters",
    "actor_rollout_ref.actor.use_kl_loss": "actor.kl_loss_coef (0 turns it off)",
    "actor_rollout_ref.actor.kl_loss_coef": "actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type": "actor.kl_loss_kind",
    "actor_rollout_ref.actor.loss_agg_mode": "actor.aggregation",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "actor.parallel.tensor",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "actor.parallel.pipeline",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "actor.parallel.context",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "actor.parallel.expert",
    "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage": (
        "actor.parallel.first_stage_layers"
    ),
    "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage": (
        "actor.parallel.last_stage_layers"
    ),
    "actor_rollout_ref.actor.megatron.param_offload": "actor.offload.parameters",
    "actor_rollout_ref.actor.megatron.grad_offload": "actor.offload.gradients",
    "actor_rollout_ref.actor.megatron.optimizer_offload": "actor.offload.optimizer",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.recompute.kind",
    "actor_rollout_ref.model.enable_activation_offload": "actor.offload.activations",
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": "actor.recompute.kind",
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method": "actor.recompute.kind",
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules": "actor.recompute.modules",
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers": "actor.recompute.num_layers",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor",
    "actor_rollout_ref.rollout.data_parallel_size": "rollout.sglang.data_parallel (groups within rollout.tensor)",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.sglang.memory_fraction",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.sglang.max_running_requests",
    "actor_rollout_ref.rollout.multi_turn.enable": "environment.function (empty turns it off)",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "environment.max_observation_tokens (in tokens)",
    "algorithm.filter_groups.enable": "rollout.keep_groups (mixed)",
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_refills (without the first; 0 asks no others)",
    "data.gen_batch_size": "rollout.oversample (of data.prompts_per_step)",
    "critic.optim.lr": "critic.optimizer.lr",
    "critic.model.path": "critic.path",
    "critic.cliprange_value": "critic.value_clip",
    "critic.ppo_mini_batch_size": "critic.batch.mini_batch_prompts",
    "critic.ppo_epochs": "critic.batch.epochs",
    "critic.ppo_max_token_len_per_gpu": "critic.batch.max_tokens_per_gpu",
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.train_batch_size": "data.prompts_per_step",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.truncation": "data.overlong_prompts",
    "data.return_raw_chat": "data.apply_chat_template",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalise_by_std",
    "algorithm.use_kl_in_reward": "algorithm.kl_in_reward_coef (0 turns it off)",
    "algorithm.kl_penalty": "algorithm.kl_in_reward_kind",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_in_reward_coef",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction.weights",
    "algorithm.rollout_correction.rollout_is_threshold": (
        "algorithm.correction.max_weight and (for IcePop) algorithm.correction.min_weight"
    ),
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction.reject and algorithm.correction.reject_kind",
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "algorithm.correction.reject_above and algorithm.correction.reject_below (of trainer / rollout in k1)"
    ),
    "trainer.total_epochs": "run.total_epochs",
    "trainer.total_training_steps": "run.total_steps",
    "trainer.save_freq": "run.save_every",
    "trainer.test_freq": "run.validate_every",
    "trainer.val_before_train": "run.validate_before_training",
    "trainer.critic_warmup": "run.critic_warmup",
    "trainer.resume_mode": "run.resume",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.nnodes": "cluster.num_nodes",
    "trainer.n_gpus_per_node": "cluster.gpus_per_node",
    "custom_reward_function.path": "reward.function (as package.module:function)",
    "custom_reward_function.name": "reward.function (as package.module:function)",
}


def config_keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Every key of the configuration, dotted, in order: what the golden file in tests/contracts holds."""
    keys: list[str] = []
    for name, annotation in _fields(cls):
        section = _section(annotation)
        if section is None:
            keys.append(prefix + name)
        else:
            keys.extend(config_keys(section, f"{prefix}{name}."))
    return keys


def _fields(cls: type) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield item.name, hints[item.name]


def _section(annotation: Any) -> type | None:
    """The dataclass that an annotation names, also as `Section | None`."""
    for option in _options(annotation):
        if dataclasses.is_dataclass(option):
            return typing.cast(type, option)
    return None


def _options(annotation: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(annotation)
    return typing.get_args(annotation) if origin in (typing.Union, python_types.UnionType) else (annotation,)


def _describe(annotation: Any) -> str:
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_describe(o) for o in options)
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(a) for a in typing.get_args(annotation))
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is list:
        return "a list"
    if typing.get_origin(annotation) is dict:
        return "a mapping"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


_BAD = object()


def _convert(annotation: Any, value: Any) -> Any:
    """The value as the annotation's type, or _BAD."""
    options = _options(annotation)
    if len(options) > 1:
        return next((v for v in (_convert(o, value) for o in options) if v is not _BAD), _BAD)
    origin = typing.get_origin(annotation)
    if annotation is type(None):
        return None if value is None else _BAD
    if origin is Literal:
        return value if value in typing.get_args(annotation) else _BAD
    if origin is list:
        (item,) = typing.get_args(annotation)
        if isinstance(value, str):
            value = [value]
        converted = [_convert(item, v) for v in value] if isinstance(value, list) else [_BAD]
        return _BAD if any(v is _BAD for v in converted) else converted
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else _BAD
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if annotation in (int, float, str, bool):
        return value if type(value) is annotation else _BAD
    raise AssertionError(f"config.py has a field of a type it cannot read: {annotation}")


def _unknown_key(full: str) -> str:
    if full in VERL_KEYS:
        return f"{full}: this is verl's name; here it is {VERL_KEYS[full]}"
    known = config_keys()
    close = difflib.get_close_matches(full, known, n=1, cutoff=0.6)
    if not close:
        last = full.rsplit(".", 1)[-1]
        close = [k for k in known if k.rsplit(".", 1)[-1] == last][:1]
    return f"{full}: unknown key" + (f"; did you mean {close[0]}?" if close else "; `megarl keys` lists all")


def _leaves(mapping: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _build(default: Any, values: Mapping[str, Any], prefix: str, violations: list[str]) -> Any:
    """`default` with the given values in place of its own: a section keeps the defaults that its parent gave it."""
    arguments: dict[str, Any] = {}
    fields = dict(_fields(type(default)))
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            leaves = list(_leaves(value, f"{key}.")) if isinstance(value, Mapping) and value else [key]
            violations.extend(_unknown_key(leaf) for leaf in leaves)
            continue
        annotation = fields[name]
        section = _section(annotation)
        if section is not None and isinstance(value, Mapping):
            inherited = getattr(default, name)
            arguments[name] = _build(section() if inherited is None else inherited, value, f"{key}.", violations)
        elif section is not None and not (value is None and type(None) in _options(annotation)):
            own = ", ".join(n for n, _ in _fields(section))
            violations.append(f"{key}: is {value!r}, but it is a section with keys of its own: {own}")
        elif section is not None:
            arguments[name] = None
        else:
            converted = _convert(annotation, value)
            if converted is _BAD:
                violations.append(f"{key}: is {value!r} ({type(value).__name__}), but must be {_describe(annotation)}")
            else:
                arguments[name] = converted
    return dataclasses.replace(default, **arguments)


# ------------------------------------------------------------------------------------------------ validation


def validate(config: Config) -> list[str]:
    """Every violation: sizes that do not divide, missing files, settings that contradict each other."""
    found: list[str] = []
    found += _validate_sizes(config)
    found += _validate_batches(config)
    found += _validate_paths(config)
    found += _validate_values(config)
    return found


def _validate_sizes(config: Config) -> Iterator[str]:
    ranks = config.cluster.num_ranks
    for name in ("num_nodes", "gpus_per_node", "threads_per_rank"):
        if getattr(config.cluster, name) < 1:
            yield f"cluster.{name}: is {getattr(config.cluster, name)}, must be at least 1"
    for role, parallel in config.roles().items():
        for item in dataclasses.fields(parallel):
            size = getattr(parallel, item.name)
            least = 0 if item.name.endswith("_stage_layers") else 1
            if not isinstance(size, bool) and size < least:
                yield f"{role}.parallel.{item.name}: is {size}, must be at least {least}"
        if parallel.model_size >= 1 and ranks % parallel.model_size:
            yield (
                f"{role}.parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context "
                f"{parallel.context} = {parallel.model_size} does not divide the {ranks} ranks (cluster.num_nodes x "
                f"cluster.gpus_per_node); change one of them"
            )
        expert_size = parallel.expert_tensor * parallel.expert * parallel.pipeline
        has_experts = parallel.expert > 1 or parallel.expert_tensor > 1
        if has_experts and expert_size >= 1 and ranks % expert_size:
            yield (
                f"{role}.parallel: expert_tensor {parallel.expert_tensor} x expert {parallel.expert} x pipeline "
                f"{parallel.pipeline} = {expert_size} does not divide the {ranks} ranks (cluster.num_nodes x "
                f"cluster.gpus_per_node); change one of them"
            )
        if parallel.sequence and parallel.tensor == 1:
            yield f"{role}.parallel.sequence: needs tensor > 1, but tensor is 1; set it to false"
        if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
            yield (
                f"{role}.parallel.virtual_pipeline: is {parallel.virtual_pipeline}, but pipeline is 1; "
                f"set it to 1 or pipeline to 2 or more"
            )
        for name in ("first_stage_layers", "last_stage_layers"):
            layers = getattr(parallel, name)
            if layers > 0 and parallel.pipeline == 1:
                yield f"{role}.parallel.{name}: is {layers}, but pipeline is 1; set it to 0 or pipeline to 2 or more"
            elif layers > 0 and parallel.virtual_pipeline > 1 and layers % parallel.virtual_pipeline:
                yield (
                    f"{role}.parallel.{name}: {layers} is no multiple of virtual_pipeline {parallel.virtual_pipeline}, "
                    f"so the stage does not split into virtual stages; set it to one"
                )
    yield from _validate_placement(config)
    yield from _validate_sglang(config)
    if config.rollout.engine == "hf" and config.rollout.tensor != 1:
        yield (
            f"rollout.tensor: is {config.rollout.tensor}, but the hf engine has no tensor parallel; "
            f"set it to 1 or rollout.engine to sglang"
        )


def _validate_placement(config: Config) -> Iterator[str]:
    """The engine's replicas fit on its GPUs: the trainers', or its own."""
    own, per_node = config.rollout, config.cluster.gpus_per_node
    if own.num_gpus < 0:
        yield f"rollout.num_gpus: is {own.num_gpus}, must be at least 0"
    elif own.num_gpus and own.engine != "sglang":
        yield (
            f"rollout.num_gpus: is {own.num_gpus}, but the {own.engine} engine lives in the trainer's processes; "
            f"set it to 0 or rollout.engine to sglang"
        )
    elif own.num_gpus and (own.tensor < 1 or own.num_gpus % own.tensor):
        yield f"rollout.num_gpus: {own.num_gpus} is no multiple of rollout.tensor = {own.tensor}; change one of them"
    elif not own.num_gpus and (own.tensor < 1 or per_node % own.tensor):
        yield (
            f"rollout.tensor: {own.tensor} does not divide cluster.gpus_per_node = {per_node}; a replica lies within "
            f"one node"
        )


SGLANG_OPTIONS_OF_OURS = {
    "model_path": "model.path",
    "dtype": "model.precision",
    "tp_size": "rollout.tensor",
    "ep_size": "rollout.sglang.expert",
    "dp_size": "rollout.sglang.data_parallel",
    "enable_dp_attention": "rollout.sglang.data_parallel",
    "enable_dp_lm_head": "rollout.sglang.data_parallel_head",
}
SGLANG_OPTIONS_WITHOUT_A_LAYOUT = (
    *("pp_size", "nnodes", "attn_cp_size", "moe_dp_size", "moe_dense_tp_size", "moe_a2a_backend"),
    *("ep_num_redundant_experts", "enable_eplb", "quantization", "torchao_config", "cpu_offload_gb"),
)
"""They move or change SGLang's parameters: reshard.layouts.sglang_layout knows tensor and expert parallel and
data-parallel attention only."""

SGLANG_REPACKING_MOE = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_cutlass", "aiter")
"""MoE runners (of these and longer names) that reorder the experts' weights after loading: no plan describes that."""


def _validate_sglang(config: Config) -> Iterator[str]:
    """What the sync's target layout cannot express, and options that are ours under other names."""
    own, key = config.rollout.sglang, "rollout.sglang"
    if own.chunked_prefill_size is not None and own.chunked_prefill_size < 1 and own.chunked_prefill_size != -1:
        yield f"{key}.chunked_prefill_size: is {own.chunked_prefill_size}, must be at least 1, or -1 for whole prompts"
    if own.expert > 1 and config.rollout.engine != "sglang":
        yield f"{key}.expert: is {own.expert}, but rollout.engine is {config.rollout.engine}; set it to 1"
    elif own.expert > 1 and config.rollout.tensor >= 1 and config.rollout.tensor % own.expert:
        yield f"{key}.expert: {own.expert} does not divide rollout.tensor = {config.rollout.tensor}; change one of them"
    yield from _validate_data_parallel(config)
    for name, value in own.options.items():
        is_neutral = value in (None, 0, "none") or (value == 1 and value is not True)
        if name in SGLANG_OPTIONS_OF_OURS:
            yield f"{key}.options.{name}: here it is {SGLANG_OPTIONS_OF_OURS[name]}"
        elif name in SGLANG_OPTIONS_WITHOUT_A_LAYOUT and not is_neutral:
            yield (
                f"{key}.options.{name}: is {value!r}, but the layout that weights are synced by knows only tensor and "
                f"expert parallel and data-parallel attention; leave it out"
            )
        elif name == "moe_runner_backend" and str(value).startswith(SGLANG_REPACKING_MOE):
            yield (
                f"{key}.options.{name}: {value} reorders the experts' weights after loading, so that no sync could "
                f"write them; use triton"
            )


def _validate_data_parallel(config: Config) -> Iterator[str]:
    """Of SGLang's attention; whether the model's family has it is seen with the layout (driver.setup)."""
    own, tensor, key = config.rollout.sglang, config.rollout.tensor, "rollout.sglang"
    size = own.data_parallel
    if own.data_parallel_head and size == 1:
        yield f"{key}.data_parallel_head: is true, but {key}.data_parallel is 1; set it to false"
    if size <= 1:
        return
    if config.rollout.engine != "sglang":
        yield f"{key}.data_parallel: is {size}, but rollout.engine is {config.rollout.engine}; set it to 1"
    elif tensor >= 1 and tensor % size:
        yield f"{key}.data_parallel: {size} does not divide rollout.tensor = {tensor}; change one of them"
    elif own.max_running_requests < size:
        yield (
            f"{key}.max_running_requests: {own.max_running_requests} is less than {key}.data_parallel = {size}, whose "
            f"groups share them out; raise it to {size} or more"
        )


def _validate_batches(config: Config) -> Iterator[str]:
    ranks, prompts = config.cluster.num_ranks, config.data.prompts_per_step
    if prompts < 1:
        yield f"data.prompts_per_step: is {prompts}, must be at least 1"
    if config.rollout.n < 1:
        yield f"rollout.n: is {config.rollout.n}, must be at least 1"
    if config.algorithm.compares_answers and config.rollout.n < 2:
        yield (
            f"rollout.n: is {config.rollout.n}, but {config.algorithm.advantage} compares the answers to one prompt; "
            f"set it to 2 or more"
        )
    roles = {"actor": (config.actor.batch, config.actor.parallel)}
    if config.needs_critic:
        roles["critic"] = (config.critic.batch, config.critic.parallel)
    for role, (batch, parallel) in roles.items():
        mini = batch.mini_batch_prompts
        if mini < 1 or prompts % max(mini, 1):
            yield f"{role}.batch.mini_batch_prompts: {mini} does not divide data.prompts_per_step = {prompts}"
        data_parallel = max(parallel.data_parallel(ranks), 1) if parallel.model_size >= 1 else 1
        if config.rollout.n >= 1 and mini * config.rollout.n < data_parallel:
            yield (
                f"{role}.batch.mini_batch_prompts: {mini} prompts x {config.rollout.n} answers = "
                f"{mini * config.rollout.n} samples for {data_parallel} data-parallel ranks; each rank needs at least "
                f"one: raise it to {-(-data_parallel // config.rollout.n)} or more"
            )
        if batch.dynamic:
            for name in ("max_tokens_per_gpu", "forward_max_tokens_per_gpu"):
                yield from _validate_tokens(config, f"{role}.batch.{name}", getattr(batch, name), parallel)
        if batch.epochs < 1:
            yield f"{role}.batch.epochs: is {batch.epochs}, must be at least 1"
        if batch.micro_batch_size < 1:
            yield f"{role}.batch.micro_batch_size: is {batch.micro_batch_size}, must be at least 1"
    if config.needs_reference:
        own = config.reference
        key = "reference.forward_max_tokens_per_gpu"
        yield from _validate_tokens(config, key, own.forward_max_tokens_per_gpu, own.parallel)


def _validate_tokens(config: Config, key: str, tokens: int, parallel: ParallelConfig) -> Iterator[str]:
    """A micro-batch must hold the longest sample."""
    if parallel.model_size < 1 or parallel.sequence_multiple < 1:
        return  # reported with the sizes
    multiple = parallel.sequence_multiple
    longest = -(-config.max_length // multiple) * multiple
    if tokens * parallel.context < longest:
        yield (
            f"{key}: {tokens} x context {parallel.context} is less than the longest sample, {longest} tokens "
            f"(data.max_prompt_length {config.data.max_prompt_length} + data.max_response_length "
            f"{config.data.max_response_length}); raise it to {-(-longest // parallel.context)} or more"
        )


def _validate_paths(config: Config) -> Iterator[str]:
    if config.model.create is None:
        if config.model.path is None:
            yield "model.path: is not set; give a Hugging Face folder, or model.create for a tiny random model"
        elif not os.path.isfile(os.path.join(config.model.path, "config.json")):
            yield f"model.path: no config.json in {config.model.path}"
    elif config.model.path is not None:
        yield "model.create: model.path is set too; remove one of them"
    tokenizer = config.model.tokenizer_path
    if tokenizer is not None and not os.path.isfile(os.path.join(tokenizer, "tokenizer_config.json")):
        yield f"model.tokenizer_path: no tokenizer_config.json in {tokenizer}"
    if (
        config.critic.path is not None
        and config.needs_critic
        and not os.path.isfile(os.path.join(config.critic.path, "config.json"))
    ):
        yield f"critic.path: no config.json in {config.critic.path}"
    scoring = config.reward_model
    if scoring.path is not None and not os.path.isfile(os.path.join(scoring.path, "config.json")):
        yield f"reward_model.path: no config.json in {scoring.path}"
    folder = scoring.tokenizer_path or scoring.path
    if scoring.path is not None and folder and not os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        key = "tokenizer_path" if scoring.tokenizer_path else "path"
        hint = "" if scoring.tokenizer_path else "; set reward_model.tokenizer_path"
        yield f"reward_model.{key}: no tokenizer_config.json in {folder}{hint}"
    if config.data.create is None:
        if not config.data.train:
            yield "data.train: is empty; give parquet, json or jsonl files, or data.create for a generated task"
        for key, paths in (("train", config.data.train), ("validation", config.data.validation)):
            for path in paths:
                if not os.path.isfile(path):
                    yield f"data.{key}: no file {path}"
                elif Path(path).suffix not in (".parquet", ".json", ".jsonl"):
                    yield f"data.{key}: {path} is not .parquet, .json or .jsonl"
    elif config.data.train or config.data.validation:
        yield "data.create: data.train or data.validation is set too; remove one of them"
    if config.run.resume not in ("auto", "never") and not os.path.isdir(config.run.resume):
        yield f"run.resume: is {config.run.resume!r}: neither auto nor never, and no such folder"


RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe")
OFFLOAD_MODULES = ("qkv_linear", "core_attn", "attn_proj")

AT_LEAST_1 = (
    "run.total_steps",
    "run.total_epochs",
    "run.max_skipped_updates",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.max_validation_prompts",
    "actor.recompute.num_layers",
    "critic.recompute.num_layers",
    "algorithm.kl_horizon",
    "rollout.max_batch",
    "rollout.oversample",
    "rollout.validation.n",
    "reward.num_workers",
    "reward.memory_mb",
    "reward_model.max_length",
    "environment.max_turns",
    "environment.max_observation_tokens",
    "environment.num_workers",
    "environment.memory_mb",
    "rollout.sglang.max_running_requests",
    "rollout.sglang.cuda_graph_max_batch",
    "rollout.sglang.max_prefill_tokens",
    "rollout.sglang.expert",
    "rollout.sglang.data_parallel",
    "sync.bucket_mb",
)
AT_LEAST_0 = (
    "run.critic_warmup",
    "run.save_every",
    "run.keep_checkpoints",
    "run.validate_every",
    "run.log_samples",
    "run.max_replica_restarts",
    "rollout.max_refills",
    "rollout.warn_probs_diff",
    *(
        f"{role}.optimizer.{name}"
        for role in ("actor", "critic")
        for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
    ),
    "actor.clip_low",
    "actor.clip_high",
    "actor.kl_loss_coef",
    "actor.entropy_target",
    "reward.overlong_buffer",
    "reward.overlong_factor",
    "reward_model.rule_weight",
    "algorithm.kl_in_reward_coef",
    "rollout.validation.temperature",
    "rollout.sglang.log_stats",
)
ABOVE_0 = (
    "run.deadline",
    "run.startup_deadline",
    "reward.time_limit",
    "reward_model.weight",
    "environment.time_limit",
    "actor.aggregation_constant",
    "actor.entropy_coef_step",
    "actor.target_kl",
    "actor.sapo_tau_positive",
    "actor.sapo_tau_negative",
    "critic.value_clip",
    "algorithm.kl_target",
    "algorithm.correction.max_weight",
    "algorithm.correction.min_weight",
    "algorithm.correction.reject_above",
    "algorithm.correction.reject_below",
    "cluster.peak_tflops",
)


def _validate_values(config: Config) -> Iterator[str]:
    """Numbers out of range, and settings that contradict each other. What may be null is not looked at where it is."""
    ranges: list[tuple[Sequence[str], Callable[[float], bool], str]] = [
        (AT_LEAST_1, lambda value: value >= 1, "at least 1"),
        (AT_LEAST_0, lambda value: value >= 0, "0 or more"),
        (ABOVE_0, lambda value: value > 0, "above 0"),
    ]
    for keys, holds, words in ranges:
        for key in keys:
            number: float | None = functools.reduce(getattr, key.split("."), typing.cast(Any, config))
            if number is not None and not holds(number):
                yield f"{key}: is {number}, must be {words}"
    for role, trained in (("actor", config.actor), ("critic", config.critic)):
        yield from _validate_optimizer(config, f"{role}.optimizer", trained.optimizer)
        yield from _validate_recompute(f"{role}.recompute", trained.recompute)
        yield from _validate_activations(config, role, trained.offload.activations, trained.recompute)
    if config.reference.offload.activations:
        yield "reference.offload.activations: the reference has no backward; leave it out"
    yield from _validate_policy_loss(config.actor)
    yield from _validate_correction(config.algorithm.correction)
    yield from _validate_update(config)
    yield from _validate_overlong(config)
    yield from _validate_environment(config)
    yield from _validate_reward_model(config)
    for key, top_k in (
        ("rollout.top_k", config.rollout.top_k),
        ("rollout.validation.top_k", config.rollout.validation.top_k),
    ):
        if top_k < 1 and top_k != -1:
            yield f"{key}: is {top_k}, must be at least 1, or -1 for all tokens"
    yield from _validate_advantage(config.algorithm)
    if config.algorithm.kl_in_reward_coef > 0 and not config.algorithm.is_per_token:
        yield (
            f"algorithm.kl_in_reward_coef: is {config.algorithm.kl_in_reward_coef}, but {config.algorithm.advantage} "
            f"compares scores without the penalty; use actor.kl_loss_coef"
        )
    if config.run.seed < 0:
        yield f"run.seed: is {config.run.seed}, must be 0 or more"
    if config.run.total_steps is not None and config.run.critic_warmup >= config.run.total_steps > 0:
        yield (
            f"run.critic_warmup: is {config.run.critic_warmup} of run.total_steps = {config.run.total_steps}, so the "
            f"actor would never learn; lower it"
        )
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(section.optimizer, name) < 1:
                yield f"{role}.optimizer.{name}: is {getattr(section.optimizer, name)}, must be in [0, 1)"
        if not section.optimizer.eps > 0:
            yield f"{role}.optimizer.eps: is {section.optimizer.eps}, must be above 0"
    if config.run.critic_warmup > 0 and not config.needs_critic:
        yield (
            f"run.critic_warmup: is {config.run.critic_warmup}, but algorithm.advantage {config.algorithm.advantage} "
            f"has no critic; set it to 0"
        )
    if config.rollout.temperature <= 0:
        yield (
            f"rollout.temperature: is {config.rollout.temperature}; training needs samples, so it must be above 0 "
            f"(validation has its own)"
        )
    for key, top_p in (
        ("rollout.top_p", config.rollout.top_p),
        ("rollout.validation.top_p", config.rollout.validation.top_p),
    ):
        if not 0 < top_p <= 1:
            yield f"{key}: is {top_p}, must be in (0, 1]"
    for key, fraction in (("algorithm.gamma", config.algorithm.gamma), ("algorithm.lam", config.algorithm.lam)):
        if not 0 <= fraction <= 1:
            yield f"{key}: is {fraction}, must be in [0, 1]"
    if config.actor.dual_clip is not None and config.actor.dual_clip <= 1:
        yield f"actor.dual_clip: is {config.actor.dual_clip}, must be above 1 (3.0 is usual), or null to turn it off"
    if config.needs_critic and config.critic.aggregation == "constant":
        yield "critic.aggregation: constant is for the policy loss; use token-mean"
    if config.data.curriculum is not None and config.run.total_steps is None:
        yield (
            "run.total_steps: is not set, but with data.curriculum epochs may differ in length, so that "
            "run.total_epochs does not say how long to go on; set it"
        )
    if config.rollout.oversample > 1 and config.rollout.engine == "hf":
        yield (
            f"rollout.oversample: is {config.rollout.oversample}, but the hf engine cannot stop answers that are under "
            f"way; set it to 1, or rollout.engine to sglang"
        )
    if config.rollout.keep_groups == "mixed" and config.rollout.n < 2:
        yield (
            f"rollout.keep_groups: is mixed, but with rollout.n = {config.rollout.n} no prompt has answers that "
            f"differ; set it to all, or rollout.n to 2 or more"
        )
    if config.algorithm.kl_target is not None and config.algorithm.kl_in_reward_coef <= 0:
        yield "algorithm.kl_target: needs algorithm.kl_in_reward_coef above 0 to adapt"
    if config.rollout.sglang.release_cuda_graphs and (config.rollout.sglang.eager or not config.rollout.sleeps):
        why = (
            "rollout.sglang.eager captures none"
            if config.rollout.sglang.eager
            else "rollout.sglang.sleep is false, so that nothing is released"
            if not config.rollout.sglang.sleep
            else f"with rollout.num_gpus = {config.rollout.num_gpus} the engine's GPUs are its own, so that nothing is "
            f"released"
        )
        yield f"rollout.sglang.release_cuda_graphs: is true, but {why}; set it to false"
    if not 0 < config.rollout.sglang.memory_fraction < 1:
        yield f"rollout.sglang.memory_fraction: is {config.rollout.sglang.memory_fraction}, must be between 0 and 1"


def _validate_advantage(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name, advantages in ADVANTAGES_WITH.items():
        value = getattr(algorithm, name)
        if algorithm.advantage not in advantages and value != getattr(AlgorithmConfig(), name):
            shown = str(value).lower() if isinstance(value, bool) else value
            yield (
                f"algorithm.{name}: is {shown}, but algorithm.advantage {algorithm.advantage} does not look at it, "
                f"only {', '.join(advantages)}; leave it out"
            )


def _validate_policy_loss(actor: ActorConfig) -> Iterator[str]:
    """Numbers of one policy loss that another does not read, and ranges that are none."""
    name, defaults = actor.policy_loss, ActorConfig()
    for key in ("clip_low", "clip_high"):
        if name not in CLIP_RANGES and getattr(actor, key) is not None:
            yield f"actor.{key}: is {getattr(actor, key)}, but actor.policy_loss {name} does not clip; leave it out"
    if actor.clip_low is not None and actor.clip_low > 1:
        usual = CLIP_RANGES.get(name, CLIP_RANGES["ppo"])[0]
        yield f"actor.clip_low: is {actor.clip_low}, must be at most 1 ({usual} is usual)"
    if name != "ppo" and actor.dual_clip not in (None, defaults.dual_clip):
        yield f"actor.dual_clip: is {actor.dual_clip}, but actor.policy_loss {name} has none; leave it out"
    for key in ("sapo_tau_positive", "sapo_tau_negative"):
        if name != "sapo" and getattr(actor, key) != getattr(defaults, key):
            yield f"actor.{key}: is {getattr(actor, key)}, but actor.policy_loss is {name}; leave it out"


def _validate_correction(own: CorrectionConfig) -> Iterator[str]:
    """Bounds that bound nothing, or that nobody reads."""
    key, defaults = "algorithm.correction", CorrectionConfig()
    for switch, names in (
        ("weights", ("max_weight", "min_weight")),
        ("reject", ("reject_kind", "reject_above", "reject_below")),
    ):
        for name in names:
            if getattr(own, switch) == "none" and getattr(own, name) != getattr(defaults, name):
                yield f"{key}.{name}: is {getattr(own, name)}, but {key}.{switch} is none; set that, or leave it out"
    if own.bypass and own.is_on:
        switch = "weights" if own.weights != "none" else "reject"
        yield (
            f"{key}.bypass: is true, but {key}.{switch} is {getattr(own, switch)}, which looks at the trainer's "
            f"log-probs before the update; turn one of them off"
        )
    if own.weights != "none" and own.min_weight is not None and own.min_weight >= own.max_weight:
        yield f"{key}.min_weight: is {own.min_weight}, must be below {key}.max_weight {own.max_weight}"
    if own.reject == "none":
        return
    if own.reject_above is None:
        yield f"{key}.reject_above: is not set; {key}.reject {own.reject} needs a bound"
    elif own.reject_kind != "k1" and own.reject_below is not None:
        yield (
            f"{key}.reject_below: is {own.reject_below}, but {own.reject_kind} is never negative and has no lower "
            f"bound; leave it out"
        )
    elif own.reject_kind == "k1" and own.reject_below is None and own.reject_above <= 1:
        yield (
            f"{key}.reject_above: is {own.reject_above}, but k1 bounds a ratio, which is 1 where both agree; set it "
            f"above 1, or {key}.reject_below too"
        )
    elif own.reject_below is not None and own.reject_below >= own.reject_above:
        yield f"{key}.reject_below: is {own.reject_below}, must be below {key}.reject_above {own.reject_above}"


def _validate_update(config: Config) -> Iterator[str]:
    """The actor's keys that steer how a step's update goes: each must have something to steer."""
    own, defaults = config.actor, ActorConfig()
    if own.entropy_target is None and own.entropy_coef_step != defaults.entropy_coef_step:
        yield f"actor.entropy_coef_step: is {own.entropy_coef_step}, but actor.entropy_target is not set; set it too"
    if own.entropy_target is not None and own.entropy_coef < 0:
        yield f"actor.entropy_coef: is {own.entropy_coef}, must be 0 or more with actor.entropy_target"
    if own.entropy_target is not None and config.algorithm.correction.bypass:
        yield (
            f"actor.entropy_target: is {own.entropy_target}, but algorithm.correction.bypass leaves out the pass that "
            f"measures the entropy; leave one of them out"
        )
    if own.target_kl is not None and config.optimizer_steps(own.batch) == 1:
        yield (
            f"actor.target_kl: is {own.target_kl}, but a step has one optimizer step, so there is none to leave out; "
            f"lower actor.batch.mini_batch_prompts, raise actor.batch.epochs, or leave it out"
        )


def _validate_overlong(config: Config) -> Iterator[str]:
    own, longest = config.reward, config.data.max_response_length
    if own.overlong_buffer >= longest > 0:
        yield (
            f"reward.overlong_buffer: is {own.overlong_buffer}, must be below data.max_response_length {longest}, of "
            f"which it is the end"
        )
    if own.overlong_buffer == 0 and own.overlong_factor != RewardConfig().overlong_factor:
        yield f"reward.overlong_factor: is {own.overlong_factor}, but reward.overlong_buffer is 0; set that too"
    if own.mask_truncated and config.rollout.ignore_eos:
        yield (
            "reward.mask_truncated: is true, but with rollout.ignore_eos every answer is cut at the limit, so that "
            "nothing would be learned; turn one of them off"
        )


def _validate_environment(config: Config) -> Iterator[str]:
    own, longest = config.environment, config.data.max_response_length
    if own.function is None:
        return
    if config.rollout.ignore_eos:
        yield (
            f"rollout.ignore_eos: is true, but then no turn ends, so that environment.function {own.function} is never "
            f"asked; turn one of them off"
        )
    if own.max_observation_tokens >= longest > 0:
        yield (
            f"environment.max_observation_tokens: is {own.max_observation_tokens}, must be below "
            f"data.max_response_length {longest}, which holds the model's turns too; lower it, or raise that"
        )


def _validate_reward_model(config: Config) -> Iterator[str]:
    own, key = config.reward_model, "reward_model"
    if own.path is None:
        return
    multiple = own.parallel.sequence_multiple
    if own.parallel.model_size >= 1 and multiple >= 1:
        longest = -(-own.max_length // multiple) * multiple
        if own.forward_max_tokens_per_gpu * own.parallel.context < longest:
            yield (
                f"{key}.forward_max_tokens_per_gpu: {own.forward_max_tokens_per_gpu} x context {own.parallel.context} "
                f"is less than the longest text, {longest} tokens (reward_model.max_length {own.max_length}); raise it "
                f"to {-(-longest // own.parallel.context)} or more, or lower reward_model.max_length"
            )
    if own.offload.activations:
        yield f"{key}.offload.activations: the reward model has no backward; leave it out"
    if own.rule_weight == 0 and config.rollout.keep_groups == "mixed":
        yield (
            f"{key}.rule_weight: is 0, but rollout.keep_groups mixed chooses prompts by the reward function's scores, "
            f"before the reward model has seen the answers; set it above 0, or rollout.keep_groups to all"
        )
    if config.needs_greedy_baseline:
        yield (
            f"{key}.path: is set, but algorithm.advantage {config.algorithm.advantage} compares with a greedy answer, "
            f"which the reward model does not score; use another advantage, or leave it out"
        )


def _validate_optimizer(config: Config, key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        yield f"{key}.min_lr: is {optimizer.min_lr}, above {key}.lr {optimizer.lr}; lower it"
    if optimizer.overlap_param_gather and optimizer.kind != "adam":
        yield (
            f"{key}.overlap_param_gather: is true, but {optimizer.kind} leaves all parameters on every rank; set it to "
            f"false"
        )
    if optimizer.overlap_param_gather and not optimizer.overlap_grad_reduce:
        yield f"{key}.overlap_param_gather: needs {key}.overlap_grad_reduce, which is false; change one of them"
    if optimizer.state_precision == "bf16":
        wrong = [
            f"{name} is {value}"
            for name, value, needed in (
                (f"{key}.kind", optimizer.kind, "adam"),
                ("model.precision", config.model.precision, "bf16"),
                ("cluster.device", "cpu" if config.cluster.device == "cpu" else "cuda", "cuda"),
            )
            if value != needed
        ]
        if wrong:
            yield (
                f"{key}.state_precision: bf16 is for adam, model.precision bf16 and GPUs, but {', '.join(wrong)}; set "
                f"it to fp32"
            )


def _validate_recompute(key: str, recompute: RecomputeConfig) -> Iterator[str]:
    unknown = [name for name in recompute.modules if name not in RECOMPUTE_MODULES]
    if unknown:
        yield f"{key}.modules: has {', '.join(unknown)}, but there are {', '.join(RECOMPUTE_MODULES)}"
    if recompute.kind == "selective" and not recompute.modules:
        yield f"{key}.modules: is empty; name some of {', '.join(RECOMPUTE_MODULES)}, or set {key}.kind to none"
    if recompute.kind != "selective" and recompute.modules != RecomputeConfig().modules:
        yield f"{key}.modules: is set, but {key}.kind is {recompute.kind}; set it to selective, or leave modules out"
    if recompute.kind not in ("block", "full") and recompute.num_layers > 1:
        yield (
            f"{key}.num_layers: is {recompute.num_layers}, but {key}.kind is {recompute.kind}; set it to block or "
            f"full, or leave num_layers out"
        )


def _validate_activations(
    config: Config, role: str, modules: Sequence[str], recompute: RecomputeConfig
) -> Iterator[str]:
    key = f"{role}.offload.activations"
    if not modules:
        return
    unknown = [name for name in modules if name not in OFFLOAD_MODULES]
    if unknown:
        yield f"{key}: has {', '.join(unknown)}, but there are {', '.join(OFFLOAD_MODULES)}"
    if "attn_proj" in modules and "core_attn" not in modules:
        yield f"{key}: attn_proj needs core_attn, whose output and its input are one; add core_attn"
    if config.model.precision != "bf16" or config.cluster.device == "cpu":
        yield (
            f"{key}: is for model.precision bf16 and GPUs, but model.precision is {config.model.precision} and "
            f"cluster.device is {config.cluster.device}; leave it out"
        )
    if recompute.kind in ("block", "full"):
        yield f"{key}: {role}.recompute.kind is {recompute.kind}, which keeps none of them; leave one of the two out"
    if recompute.kind == "selective" and "core_attn" in modules and "core_attn" in recompute.modules:
        yield f"{key}: core_attn is in {role}.recompute.modules too; remove one of them"


# ------------------------------------------------------------------------------------------------ the door


def build(values: Mapping[str, Any]) -> Config:
    """A Config from nested plain values.

    Raises:
        ConfigError: with every violation: unknown keys, wrong types, sizes that do not divide, missing files.
    """
    violations: list[str] = []
    config: Config = _build(Config(), values, "", violations)
    violations += validate(config)
    if violations:
        raise ConfigError(violations)
    return config


def load(paths: str | Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, or several of which each is laid over those before it, apply `key=value` overrides from the
    command line, and validate the whole.

    Raises:
        ConfigError: a file does not exist or is not YAML, an override is no key=value, or anything `build` finds; with
            more than one file, each violation ends with the one that set its key.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    missing = [f"no configuration file {path}" for path in paths if not os.path.isfile(path)]
    malformed = [f"{o!r}: an override is written key=value" for o in overrides if "=" not in o or o.startswith("=")]
    if missing or malformed:
        raise ConfigError(missing or malformed)
    layers: dict[str, Any] = {}
    for path in paths:
        try:
            layers[path] = OmegaConf.load(path)
        except (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError) as error:
            raise ConfigError([f"{path}: {error}"]) from error
        if not OmegaConf.is_dict(layers[path]):
            raise ConfigError([f"{path}: is a list, but must hold sections such as run: and model:"])
    try:
        layers["the command line"] = OmegaConf.from_dotlist(list(overrides))
        values = OmegaConf.to_container(OmegaConf.merge(*layers.values()), resolve=True)
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError) as error:
        raise ConfigError([f"{', '.join(paths)}: {error}"]) from error
    try:
        return build(typing.cast(dict[str, Any], values))
    except ConfigError as error:
        if len(paths) == 1:
            raise
        plain = {name: typing.cast(Mapping[str, Any], OmegaConf.to_container(layer)) for name, layer in layers.items()}
        given = {name: list(_leaves(values, "")) for name, values in plain.items()}
        raise ConfigError([v + _source(given, v.split(":", 1)[0]) for v in error.violations]) from None


def _source(given: dict[str, list[str]], key: str) -> str:
    """Where a key has its value from: the last that gave it or, if it is a section, something in it."""
    for name, leaves in reversed(given.items()):
        if any(leaf == key or leaf.startswith(f"{key}.") for leaf in leaves):
            return f" ({name})"
    return ""


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
