"""The configuration: what is wrong is said all at once, what is right survives a round trip."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import config

CREATED: dict[str, Any] = {"model": {"create": {}}, "data": {"create": {}}}
"""The least that a configuration must say."""


def build(**sections: Any) -> config.Config:
    return config.build({**CREATED, **sections})


def violations(**sections: Any) -> list[str]:
    with pytest.raises(config.ConfigError) as caught:
        build(**sections)
    return caught.value.violations


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text("model: {create: {}}\ndata: {create: {}}\n" + text)
    return str(path)


# ------------------------------------------------------------------------------------------------ the door


def test_every_violation_is_reported_at_once(tmp_path: Path) -> None:
    """One of each kind: an unknown key, verl's key, a wrong type, sizes that do not divide, a missing file, a range."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: /nowhere}\n"
        "data: {train: [/nowhere/train.parquet], prompts_per_step: 10, train_batch_size: 8}\n"
        "actor: {optimiser: {lr: 1}, clip_low: high, parallel: {tensor: 3}, batch: {mini_batch_prompts: 4}}\n"
        "critic: {batch: {mini_batch_prompts: 5}}\n"
        "cluster: {gpus_per_node: 4}\n"
    )
    with pytest.raises(config.ConfigError) as caught:
        config.load(str(path), ["algorithm.gamma=1.5"])
    assert caught.value.violations == [
        "data.train_batch_size: this is verl's name; here it is data.prompts_per_step",
        "actor.optimiser.lr: unknown key; did you mean actor.optimizer.lr?",
        "actor.clip_low: is 'high' (str), but must be a number or null",
        "actor.parallel: tensor 3 x pipeline 1 x context 1 = 3 does not divide the 4 ranks (cluster.num_nodes x "
        "cluster.gpus_per_node); change one of them",
        "actor.batch.mini_batch_prompts: 4 does not divide data.prompts_per_step = 10",
        "model.path: no config.json in /nowhere",
        "data.train: no file /nowhere/train.parquet",
        "algorithm.gamma: is 1.5, must be in [0, 1]",
    ]
    text = str(caught.value)
    assert text.startswith("8 problems in the configuration:\n  * data.train_batch_size")
    assert text.count("\n  * ") == 8


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"runn": 1}, "runn: unknown key; did you mean run.name?"),
        ({"run": {"totl_steps": 1}}, "run.totl_steps: unknown key; did you mean run.total_steps?"),
        ({"trainer": {"xyz": {"lr": 1}}}, "trainer.xyz.lr: unknown key; did you mean actor.optimizer.lr?"),
        ({"zzzzzzzz": {"qqqq": 1}}, "zzzzzzzz.qqqq: unknown key; `megarl keys` lists all"),
        ({"zzzzzzzz": {}}, "zzzzzzzz: unknown key; `megarl keys` lists all"),
        (
            {"actor_rollout_ref": {"actor": {"clip_ratio": 0.2}}},
            "actor_rollout_ref.actor.clip_ratio: this is verl's name; here it is actor.clip_low and actor.clip_high",
        ),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_known_one(sections: dict[str, Any], said: str) -> None:
    found = violations(**sections)
    assert found == [said] or (said.startswith("runn") and found[0].startswith("runn: unknown key; "))


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("run", "seed", 1.5, "run.seed: is 1.5 (float), but must be a whole number"),
        ("run", "seed", True, "run.seed: is True (bool), but must be a whole number"),
        ("run", "seed", None, "run.seed: is None (NoneType), but must be a whole number"),
        ("run", "total_steps", "ten", "run.total_steps: is 'ten' (str), but must be a whole number or null"),
        ("run", "save_model", 1, "run.save_model: is 1 (int), but must be true or false"),
        ("run", "name", True, "run.name: is True (bool), but must be a text"),
        ("data", "train", 3, "data.train: is 3 (int), but must be a list"),
        ("actor", "clip_low", True, "actor.clip_low: is True (bool), but must be a number or null"),
        (
            "actor",
            "kl_loss_kind",
            "k4",
            "actor.kl_loss_kind: is 'k4' (str), but must be k1 or abs or k2 or k3 or k1+ or k3+",
        ),
        (
            "algorithm",
            "kl_in_reward_kind",
            "k3+",  # differs from k3 by its gradient, which a reward has not
            "algorithm.kl_in_reward_kind: is 'k3+' (str), but must be k1 or abs or k2 or k3",
        ),
        (
            "rollout",
            "routing",
            "round_robin",
            "rollout.routing: is 'round_robin' (str), but must be least_loaded or prefix",
        ),
        ("rollout", "keep_groups", "some", "rollout.keep_groups: is 'some' (str), but must be all or mixed"),
        (
            "sync",
            "verify",
            False,  # what YAML makes of a bare `off`
            "sync.verify: is False (bool), but must be checksum or bitwise or off",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named(section: str, name: str, value: Any, said: str) -> None:
    assert violations(**{section: {**CREATED.get(section, {}), name: value}}) == [said]


def test_a_section_is_no_value() -> None:
    assert violations(sync=3) == ["sync: is 3, but it is a section with keys of its own: bucket_mb, verify"]
    assert violations(sync=None) == ["sync: is None, but it is a section with keys of its own: bucket_mb, verify"]


def test_whole_numbers_serve_as_numbers_and_a_text_as_a_list_of_one() -> None:
    found = build(actor={"clip_low": 1}, run={"name": 7})
    assert (found.actor.clip_low, type(found.actor.clip_low)) == (1.0, float)
    assert found.run.name == "7"
    assert config._convert(list[str], "train.parquet") == ["train.parquet"]


def test_a_section_keeps_the_defaults_that_its_parent_gave_it() -> None:
    """The critic's learning rate is 1e-5, also when another key of its optimizer is set; the actor's is 1e-6."""
    found = build(critic={"optimizer": {"warmup_steps": 3}}, actor={"optimizer": {"warmup_steps": 3}})
    assert (found.critic.optimizer.lr, found.critic.optimizer.warmup_steps) == (1e-5, 3)
    assert (found.actor.optimizer.lr, found.actor.optimizer.warmup_steps) == (1e-6, 3)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {seed: 5, total_steps: 7}\nactor: {optimizer: {lr: 3e-6}}\n")
    found = config.load(path, ["run.seed=9", "critic.optimizer.lr=2e-5", "run.name=a=b", "run.total_steps=null"])
    assert (found.run.seed, found.run.total_steps, found.run.name) == (9, None, "a=b")
    assert (found.actor.optimizer.lr, found.critic.optimizer.lr) == (3e-6, 2e-5)
    assert config.load(path).run.seed == 5


def test_what_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(config.ConfigError, match="no configuration file"):
        config.load(str(tmp_path / "none.yaml"))
    with pytest.raises(config.ConfigError, match=r"'run.seed': an override is written key=value") as caught:
        config.load(path, ["run.seed", "=3", "run.seed=3"])
    assert len(caught.value.violations) == 2
    for text in ("run: [", "- a\n- b\n", "3", "run: {name: '${nothing}'}"):
        broken = tmp_path / "broken.yaml"
        broken.write_text(text)
        with pytest.raises(config.ConfigError, match=r"broken\.yaml: "):
            config.load(str(broken))


def test_files_are_laid_over_each_other_and_the_command_line_over_all(tmp_path: Path) -> None:
    base = write(tmp_path, "run: {seed: 5, total_steps: 7}\nactor: {clip_low: 0.1, clip_high: 0.1}\n")
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("run: {seed: 6}\nactor: {clip_high: 0.3}\nrollout: {n: 2}\n")
    second.write_text("run: {seed: 7}\n")
    found = config.load([base, str(first), str(second)], ["rollout.n=4"])
    assert (found.run.seed, found.run.total_steps, found.rollout.n) == (7, 7, 4)
    assert (found.actor.clip_low, found.actor.clip_high) == (0.1, 0.3)
    assert config.load([base, str(second), str(first)]).run.seed == 6


def test_with_several_files_a_violation_names_the_one_that_set_its_key(tmp_path: Path) -> None:
    base = write(tmp_path, "actor: {clip_low: 2, clip_high: -1, parallel: {tensor: 3}}\ncluster: {gpus_per_node: 4}\n")
    over = tmp_path / "over.yaml"
    over.write_text("algorithm: {advantage: rloo, gama: 1}\nactor: {clip_high: -2}\n")
    with pytest.raises(config.ConfigError) as caught:
        config.load([base, str(over)], ["run.seed=-1"])
    assert caught.value.violations == [
        f"algorithm.gama: unknown key; did you mean algorithm.gamma? ({over})",
        "actor.parallel: tensor 3 x pipeline 1 x context 1 = 3 does not divide the 4 ranks (cluster.num_nodes x "
        f"cluster.gpus_per_node); change one of them ({base})",
        # Nobody set it.
        "rollout.n: is 1, but rloo compares the answers to one prompt; set it to 2 or more",
        f"actor.clip_high: is -2.0, must be 0 or more ({over})",
        f"actor.clip_low: is 2.0, must be at most 1 (0.2 is usual) ({base})",
        "run.seed: is -1, must be 0 or more (the command line)",
    ]
    with pytest.raises(config.ConfigError, match=r"no configuration file none\.yaml"):
        config.load([base, "none.yaml"])
    over.write_text("- a\n")
    with pytest.raises(config.ConfigError, match=r"over\.yaml: is a list"):
        config.load([base, str(over)])


NAMES = ["1e3", "null", "true", "0123", "a: b", "~", "no", "2024-01-01", "'q'", "é", "two\nlines", ".5", "0x10", "1:30"]


@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_back_is_the_identity(tmp_path: Path, name: str) -> None:
    made = build(
        run={"name": name, "total_steps": 3, "deadline": 1e-5},
        actor={"dual_clip": None, "optimizer": {"lr": 1e-7, "eps": 1e-30}},
        rollout={"sglang": {"options": {"a": [1, None, {"b": name}]}}},
        data={"create": {"modulus": 7}},
    )
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml(made))
    assert config.load(str(path)) == made


# ------------------------------------------------------------------------------------------------ sizes and batches


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"cluster": {"gpus_per_node": 4}, "critic": {"parallel": {"expert": 3}}},
            "critic.parallel: expert_tensor 1 x expert 3 x pipeline 1 = 3 does not divide the 4 ranks "
            "(cluster.num_nodes x cluster.gpus_per_node); change one of them",
        ),
        ({"critic": {"parallel": {"tensor": 0}}}, "critic.parallel.tensor: is 0, must be at least 1"),
        (
            {"actor": {"parallel": {"sequence": True}}},
            "actor.parallel.sequence: needs tensor > 1, but tensor is 1; set it to false",
        ),
        (
            {"actor": {"parallel": {"virtual_pipeline": 2}}},
            "actor.parallel.virtual_pipeline: is 2, but pipeline is 1; set it to 1 or pipeline to 2 or more",
        ),
        (
            {"cluster": {"gpus_per_node": 4}, "rollout": {"tensor": 3}},
            "rollout.tensor: 3 does not divide cluster.gpus_per_node = 4; a replica lies within one node",
        ),
        (
            {"cluster": {"gpus_per_node": 2}, "rollout": {"tensor": 2, "engine": "hf"}},
            "rollout.tensor: is 2, but the hf engine has no tensor parallel; set it to 1 or rollout.engine to sglang",
        ),
        (
            {"cluster": {"gpus_per_node": 4}, "rollout": {"tensor": 2, "num_gpus": 3}},
            "rollout.num_gpus: 3 is no multiple of rollout.tensor = 2; change one of them",
        ),
        ({"rollout": {"num_gpus": -1}}, "rollout.num_gpus: is -1, must be at least 0"),
        (
            {"rollout": {"sglang": {"expert": 2}, "tensor": 1}},
            "rollout.sglang.expert: 2 does not divide rollout.tensor = 1; change one of them",
        ),
        (
            {"rollout": {"sglang": {"expert": 2}, "engine": "hf"}},
            "rollout.sglang.expert: is 2, but rollout.engine is hf; set it to 1",
        ),
        (
            {"rollout": {"sglang": {"chunked_prefill_size": 0}}},
            "rollout.sglang.chunked_prefill_size: is 0, must be at least 1, or -1 for whole prompts",
        ),
        (
            {"rollout": {"sglang": {"options": {"tp_size": 2}}}},
            "rollout.sglang.options.tp_size: here it is rollout.tensor",
        ),
        (
            {"rollout": {"sglang": {"options": {"dp_size": 2}}}},
            "rollout.sglang.options.dp_size: here it is rollout.sglang.data_parallel",
        ),
        (
            {"rollout": {"sglang": {"options": {"enable_dp_attention": True}}}},
            "rollout.sglang.options.enable_dp_attention: here it is rollout.sglang.data_parallel",
        ),
        (
            {"rollout": {"sglang": {"options": {"enable_dp_lm_head": True}}}},
            "rollout.sglang.options.enable_dp_lm_head: here it is rollout.sglang.data_parallel_head",
        ),
        (
            {"cluster": {"gpus_per_node": 4}, "rollout": {"sglang": {"data_parallel": 3}, "tensor": 4}},
            "rollout.sglang.data_parallel: 3 does not divide rollout.tensor = 4; change one of them",
        ),
        ({"rollout": {"sglang": {"data_parallel": 0}}}, "rollout.sglang.data_parallel: is 0, must be at least 1"),
        (
            {"rollout": {"sglang": {"data_parallel": 2}, "engine": "hf"}},
            "rollout.sglang.data_parallel: is 2, but rollout.engine is hf; set it to 1",
        ),
        (
            {"rollout": {"sglang": {"data_parallel_head": True}}},
            "rollout.sglang.data_parallel_head: is true, but rollout.sglang.data_parallel is 1; set it to false",
        ),
        (
            {
                "cluster": {"gpus_per_node": 4},
                "rollout": {"tensor": 4, "sglang": {"data_parallel": 4, "max_running_requests": 3}},
            },
            "rollout.sglang.max_running_requests: 3 is less than rollout.sglang.data_parallel = 4, whose groups share "
            "them out; raise it to 4 or more",
        ),
        (
            {"rollout": {"sglang": {"options": {"pp_size": 2}}}},
            "rollout.sglang.options.pp_size: is 2, but the layout that weights are synced by knows only tensor and "
            "expert parallel and data-parallel attention; leave it out",
        ),
        (
            {"rollout": {"sglang": {"options": {"moe_runner_backend": "flashinfer_trtllm"}}}},
            "rollout.sglang.options.moe_runner_backend: flashinfer_trtllm reorders the experts' weights after loading, "
            "so that no sync could write them; use triton",
        ),
        (
            {"rollout": {"sglang": {"kv_cache_dtype": "fp8"}}},
            "rollout.sglang.kv_cache_dtype: is 'fp8' (str), but must be auto or bf16 or fp8_e5m2 or fp8_e4m3",
        ),
        (
            {"rollout": {"num_gpus": 1, "engine": "hf"}},
            "rollout.num_gpus: is 1, but the hf engine lives in the trainer's processes; set it to 0 or rollout.engine "
            "to sglang",
        ),
        ({"rollout": {"n": 0}}, "rollout.n: is 0, must be at least 1"),
        (
            {"algorithm": {"advantage": "rloo"}},
            "rollout.n: is 1, but rloo compares the answers to one prompt; set it to 2 or more",
        ),
        # 8 ranks, 2 prompts x 3 answers: 6 samples; 3 prompts give 9.
        (
            {
                "cluster": {"gpus_per_node": 8},
                "algorithm": {"advantage": "grpo"},
                "rollout": {"n": 3},
                "actor": {"batch": {"mini_batch_prompts": 2}},
            },
            "actor.batch.mini_batch_prompts: 2 prompts x 3 answers = 6 samples for 8 data-parallel ranks; each rank "
            "needs at least one: raise it to 3 or more",
        ),
        # 512 + 255 = 767 tokens, padded to a multiple of tensor 3 (sequence) x 2 x context 2 = 12: 768, 384 a rank.
        (
            {
                "cluster": {"gpus_per_node": 6},
                "data": {"create": {}, "max_response_length": 255},
                "actor": {
                    "parallel": {"tensor": 3, "context": 2, "sequence": True},
                    "batch": {"max_tokens_per_gpu": 383, "forward_max_tokens_per_gpu": 384},
                },
            },
            "actor.batch.max_tokens_per_gpu: 383 x context 2 is less than the longest sample, 768 tokens "
            "(data.max_prompt_length 512 + data.max_response_length 255); raise it to 384 or more",
        ),
        (
            {"actor": {"kl_loss_coef": 0.1}, "reference": {"forward_max_tokens_per_gpu": 767}},
            "reference.forward_max_tokens_per_gpu: 767 x context 1 is less than the longest sample, 768 tokens "
            "(data.max_prompt_length 512 + data.max_response_length 256); raise it to 768 or more",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_said_with_their_numbers(sections: dict[str, Any], said: str) -> None:
    assert violations(**sections) == [said]


def test_limits_of_parts_that_a_run_does_not_have_are_not_looked_at() -> None:
    """Static micro-batches have no token limit, GRPO no critic, and no KL no reference."""
    batch = {"dynamic": False, "max_tokens_per_gpu": 1, "forward_max_tokens_per_gpu": 1}
    build(
        actor={"batch": batch},
        critic={"batch": {"mini_batch_prompts": 7}},
        reference={"forward_max_tokens_per_gpu": 1},
        algorithm={"advantage": "grpo"},
        rollout={"n": 2},
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"total_steps": 0}}, "run.total_steps: is 0, must be at least 1"),
        ({"run": {"save_every": -1}}, "run.save_every: is -1, must be 0 or more"),
        ({"run": {"deadline": 0}}, "run.deadline: is 0.0, must be above 0"),
        ({"reward": {"time_limit": 0}}, "reward.time_limit: is 0.0, must be above 0"),
        ({"reward": {"num_workers": 0}}, "reward.num_workers: is 0, must be at least 1"),
        ({"reward": {"memory_mb": 0}}, "reward.memory_mb: is 0, must be at least 1"),
        ({"environment": {"max_turns": 0}}, "environment.max_turns: is 0, must be at least 1"),
        (
            {"environment": {"max_observation_tokens": 0}},
            "environment.max_observation_tokens: is 0, must be at least 1",
        ),
        ({"environment": {"num_workers": 0}}, "environment.num_workers: is 0, must be at least 1"),
        ({"environment": {"memory_mb": 0}}, "environment.memory_mb: is 0, must be at least 1"),
        ({"environment": {"time_limit": 0}}, "environment.time_limit: is 0.0, must be above 0"),
        ({"run": {"deadline": float("nan")}}, "run.deadline: is nan, must be above 0"),
        ({"actor": {"optimizer": {"lr": -1e-6}}}, "actor.optimizer.lr: is -1e-06, must be 0 or more"),
        (
            {"critic": {"optimizer": {"schedule": "cosine", "min_lr": 1e-4}}},
            "critic.optimizer.min_lr: is 0.0001, above critic.optimizer.lr 1e-05; lower it",
        ),
        (
            {"actor": {"optimizer": {"kind": "sgd", "overlap_param_gather": True}}},
            "actor.optimizer.overlap_param_gather: is true, but sgd leaves all parameters on every rank; set it to "
            "false",
        ),
        (
            {"critic": {"optimizer": {"overlap_grad_reduce": False, "overlap_param_gather": True}}},
            "critic.optimizer.overlap_param_gather: needs critic.optimizer.overlap_grad_reduce, which is false; change "
            "one of them",
        ),
        (
            {
                "actor": {"optimizer": {"kind": "sgd", "state_precision": "bf16"}},
                "model": {"create": {}, "precision": "fp32"},
                "cluster": {"device": "cpu"},
            },
            "actor.optimizer.state_precision: bf16 is for adam, model.precision bf16 and GPUs, but "
            "actor.optimizer.kind is sgd, model.precision is fp32, cluster.device is cpu; set it to fp32",
        ),
        (
            {"actor": {"recompute": {"kind": "selective", "modules": ["mlp", "attention"]}}},
            "actor.recompute.modules: has attention, but there are core_attn, mlp, layernorm, moe",
        ),
        (
            {"critic": {"recompute": {"kind": "selective", "modules": []}}},
            "critic.recompute.modules: is empty; name some of core_attn, mlp, layernorm, moe, or set "
            "critic.recompute.kind to none",
        ),
        (
            {"actor": {"recompute": {"kind": "block", "modules": ["mlp"]}}},
            "actor.recompute.modules: is set, but actor.recompute.kind is block; set it to selective, or leave modules "
            "out",
        ),
        (
            {"actor": {"recompute": {"kind": "selective", "num_layers": 2}}},
            "actor.recompute.num_layers: is 2, but actor.recompute.kind is selective; set it to block or full, or "
            "leave num_layers out",
        ),
        (
            {"actor": {"offload": {"activations": ["core_attn", "mlp"]}}},
            "actor.offload.activations: has mlp, but there are qkv_linear, core_attn, attn_proj",
        ),
        (
            {"critic": {"offload": {"activations": ["attn_proj"]}}},
            "critic.offload.activations: attn_proj needs core_attn, whose output and its input are one; add core_attn",
        ),
        (
            {"actor": {"offload": {"activations": ["core_attn"]}}, "cluster": {"device": "cpu"}},
            "actor.offload.activations: is for model.precision bf16 and GPUs, but model.precision is bf16 and "
            "cluster.device is cpu; leave it out",
        ),
        (
            {"actor": {"offload": {"activations": ["qkv_linear"]}, "recompute": {"kind": "full"}}},
            "actor.offload.activations: actor.recompute.kind is full, which keeps none of them; leave one of the two "
            "out",
        ),
        (
            {"actor": {"offload": {"activations": ["core_attn"]}, "recompute": {"kind": "selective"}}},
            "actor.offload.activations: core_attn is in actor.recompute.modules too; remove one of them",
        ),
        (
            {"reference": {"offload": {"activations": ["core_attn"]}}},
            "reference.offload.activations: the reference has no backward; leave it out",
        ),
        ({"actor": {"clip_low": 1.5}}, "actor.clip_low: is 1.5, must be at most 1 (0.2 is usual)"),
        (
            {"actor": {"policy_loss": "gspo", "clip_low": 2}},
            "actor.clip_low: is 2.0, must be at most 1 (0.0003 is usual)",
        ),
        (
            {"actor": {"policy_loss": "gpg", "clip_high": 0.2}},
            "actor.clip_high: is 0.2, but actor.policy_loss gpg does not clip; leave it out",
        ),
        (
            {"actor": {"policy_loss": "gspo", "dual_clip": 2}},
            "actor.dual_clip: is 2.0, but actor.policy_loss gspo has none; leave it out",
        ),
        (
            {"actor": {"sapo_tau_negative": 2}},
            "actor.sapo_tau_negative: is 2.0, but actor.policy_loss is ppo; leave it out",
        ),
        (
            {"actor": {"policy_loss": "sapo", "sapo_tau_positive": 0}},
            "actor.sapo_tau_positive: is 0.0, must be above 0",
        ),
        (
            {"algorithm": {"correction": {"max_weight": 3}}},
            "algorithm.correction.max_weight: is 3.0, but algorithm.correction.weights is none; set that, or leave it "
            "out",
        ),
        (
            {"algorithm": {"correction": {"weights": "token", "min_weight": 2}}},
            "algorithm.correction.min_weight: is 2.0, must be below algorithm.correction.max_weight 2.0",
        ),
        (
            {"algorithm": {"correction": {"weights": "token", "max_weight": 0}}},
            "algorithm.correction.max_weight: is 0.0, must be above 0",
        ),
        (
            {"algorithm": {"correction": {"reject": "token"}}},
            "algorithm.correction.reject_above: is not set; algorithm.correction.reject token needs a bound",
        ),
        (
            {"algorithm": {"correction": {"reject_above": 2}}},
            "algorithm.correction.reject_above: is 2.0, but algorithm.correction.reject is none; set that, or leave it "
            "out",
        ),
        (
            {"algorithm": {"correction": {"reject": "token", "reject_above": 0.5}}},
            "algorithm.correction.reject_above: is 0.5, but k1 bounds a ratio, which is 1 where both agree; set it "
            "above 1, or algorithm.correction.reject_below too",
        ),
        (
            {"algorithm": {"correction": {"reject": "token", "reject_above": 2, "reject_below": 2}}},
            "algorithm.correction.reject_below: is 2.0, must be below algorithm.correction.reject_above 2.0",
        ),
        (
            {
                "algorithm": {
                    "correction": {"reject": "seq_max", "reject_kind": "k3", "reject_above": 1, "reject_below": 0.1}
                }
            },
            "algorithm.correction.reject_below: is 0.1, but k3 is never negative and has no lower bound; leave it out",
        ),
        (
            {"actor": {"dual_clip": 1.0}},
            "actor.dual_clip: is 1.0, must be above 1 (3.0 is usual), or null to turn it off",
        ),
        ({"critic": {"value_clip": 0.0}}, "critic.value_clip: is 0.0, must be above 0"),
        (
            {"actor": {"aggregation": "constant", "aggregation_constant": 0}},
            "actor.aggregation_constant: is 0.0, must be above 0",
        ),
        (
            {"algorithm": {"advantage": "opo", "kl_in_reward_coef": 0.1}, "rollout": {"n": 2}},
            "algorithm.kl_in_reward_coef: is 0.1, but opo compares scores without the penalty; use actor.kl_loss_coef",
        ),
        (
            {"algorithm": {"advantage": "grpo", "gamma": 0.9}, "rollout": {"n": 2}},
            "algorithm.gamma: is 0.9, but algorithm.advantage grpo does not look at it, only gae, reinforce_pp; leave "
            "it out",
        ),
        (
            {"algorithm": {"advantage": "reinforce_pp", "lam": 0.9}},
            "algorithm.lam: is 0.9, but algorithm.advantage reinforce_pp does not look at it, only gae; leave it out",
        ),
        (
            {"algorithm": {"advantage": "rloo", "whiten_advantages": False}, "rollout": {"n": 2}},
            "algorithm.whiten_advantages: is false, but algorithm.advantage rloo does not look at it, only gae, "
            "reinforce_pp, reinforce_pp_baseline; leave it out",
        ),
        (
            {"algorithm": {"normalise_by_std": False}},
            "algorithm.normalise_by_std: is false, but algorithm.advantage gae does not look at it, only grpo, "
            "grpo_passk; leave it out",
        ),
        (
            {"critic": {"aggregation": "constant"}},
            "critic.aggregation: constant is for the policy loss; use token-mean",
        ),
        (
            {"algorithm": {"kl_target": 6.0}},
            "algorithm.kl_target: needs algorithm.kl_in_reward_coef above 0 to adapt",
        ),
        (
            {"run": {"critic_warmup": 2}, "algorithm": {"advantage": "rloo"}, "rollout": {"n": 2}},
            "run.critic_warmup: is 2, but algorithm.advantage rloo has no critic; set it to 0",
        ),
        (
            {"rollout": {"temperature": 0}},
            "rollout.temperature: is 0.0; training needs samples, so it must be above 0 (validation has its own)",
        ),
        ({"rollout": {"top_p": 0}}, "rollout.top_p: is 0.0, must be in (0, 1]"),
        ({"rollout": {"oversample": 0.9}}, "rollout.oversample: is 0.9, must be at least 1"),
        ({"rollout": {"max_refills": -1}}, "rollout.max_refills: is -1, must be 0 or more"),
        ({"rollout": {"warn_probs_diff": -0.1}}, "rollout.warn_probs_diff: is -0.1, must be 0 or more"),
        (
            {"rollout": {"keep_groups": "mixed"}},
            "rollout.keep_groups: is mixed, but with rollout.n = 1 no prompt has answers that differ; set it to all, "
            "or rollout.n to 2 or more",
        ),
        ({"rollout": {"top_k": 0}}, "rollout.top_k: is 0, must be at least 1, or -1 for all tokens"),
        (
            {"rollout": {"sglang": {"memory_fraction": 1}}},
            "rollout.sglang.memory_fraction: is 1.0, must be between 0 and 1",
        ),
    ],
)
def test_values_out_of_range_and_contradictions(sections: dict[str, Any], said: str) -> None:
    assert violations(**sections) == [said]


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_pp_baseline"])
def test_what_compares_answers_needs_two_of_them_and_no_critic(advantage: str) -> None:
    assert violations(algorithm={"advantage": advantage}) == [
        f"rollout.n: is 1, but {advantage} compares the answers to one prompt; set it to 2 or more"
    ]
    assert list(build(algorithm={"advantage": advantage}, rollout={"n": 2}).roles()) == ["actor"]


def test_reinforce_pp_needs_neither_groups_nor_a_critic_and_may_have_the_kl_in_its_reward() -> None:
    found = build(algorithm={"advantage": "reinforce_pp", "gamma": 0.9, "kl_in_reward_coef": 0.1, "kl_target": 6.0})
    assert list(found.roles()) == ["actor", "reference"]


def test_the_constant_of_aggregation_is_that_of_dr_grpo_unless_given() -> None:
    """Two prompts a mini-batch x 3 answers x 256 tokens = 1536."""
    batch = {"batch": {"mini_batch_prompts": 2}, "aggregation": "constant"}
    found = build(actor=batch, rollout={"n": 3}, critic={"batch": {"mini_batch_prompts": 2}})
    assert found.aggregation_constant == 1536.0
    assert build(actor={**batch, "aggregation_constant": 10}).aggregation_constant == 10.0


@pytest.mark.parametrize("key", [*config.AT_LEAST_1, *config.AT_LEAST_0, *config.ABOVE_0])
def test_every_key_with_a_range_exists(key: str) -> None:
    assert key in config.config_keys()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_validation_finds_faults_and_never_has_one(data: st.DataObject) -> None:
    """Whatever whole numbers the sizes are, `validate` reports and does not raise; without a report, sizes divide."""
    numbers = st.integers(-1, 4)

    def draw(section: Any) -> Any:
        changes = {}
        for item in dataclasses.fields(section):
            value = getattr(section, item.name)
            if dataclasses.is_dataclass(value):
                changes[item.name] = draw(value)
            elif type(value) is int:
                changes[item.name] = data.draw(numbers)
        return dataclasses.replace(section, **changes)

    base = build()
    made = dataclasses.replace(
        base, actor=draw(base.actor), critic=draw(base.critic), rollout=draw(base.rollout), cluster=draw(base.cluster)
    )
    if not config.validate(made):
        for parallel in made.roles().values():
            assert made.cluster.num_ranks % parallel.model_size == 0
        assert made.num_replicas * made.rollout.tensor == (made.rollout.num_gpus or made.cluster.num_ranks)


# ------------------------------------------------------------------------------------------------ files


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    text = tmp_path / "data.txt"
    text.write_text("")
    found = violations(
        model={}, data={"train": [str(text)], "validation": "none.jsonl"}, critic={"path": str(tmp_path)}
    )
    assert found == [
        "model.path: is not set; give a Hugging Face folder, or model.create for a tiny random model",
        f"critic.path: no config.json in {tmp_path}",
        f"data.train: {text} is not .parquet, .json or .jsonl",
        "data.validation: no file none.jsonl",
    ]
    assert violations(data={}) == [
        "data.train: is empty; give parquet, json or jsonl files, or data.create for a generated task"
    ]


def test_two_sources_of_one_thing_contradict_each_other(tmp_path: Path) -> None:
    found = violations(model={"create": {}, "path": str(tmp_path)}, data={"create": {}, "train": ["a.json"]})
    assert found == [
        "model.create: model.path is set too; remove one of them",
        "data.create: data.train or data.validation is set too; remove one of them",
    ]


def test_resume_is_a_word_or_a_folder(tmp_path: Path) -> None:
    build(run={"resume": str(tmp_path)})
    assert violations(run={"resume": "newest"}) == [
        "run.resume: is 'newest': neither auto nor never, and no such folder"
    ]


# ------------------------------------------------------------------------------------------------ derived values


def test_derived_values() -> None:
    found = build(
        cluster={"num_nodes": 2, "gpus_per_node": 8},
        actor={"parallel": {"tensor": 2, "context": 2, "sequence": True}},
        rollout={"n": 3, "tensor": 4},
        algorithm={"kl_in_reward_coef": 0.1},
        run={"name": "x"},
        reward={"function": "exact"},
    )
    assert found.cluster.num_ranks == 16
    assert found.actor.parallel.data_parallel(16) == 4
    assert (found.actor.parallel.sequence_multiple, found.critic.parallel.sequence_multiple) == (8, 1)
    assert (found.samples_per_step, found.max_length, found.num_replicas) == (768, 768, 4)
    assert list(found.roles()) == ["actor", "critic", "reference"]
    assert list(build(algorithm={"advantage": "grpo"}, rollout={"n": 2}).roles()) == ["actor"]
    assert found.run.folder == "runs/x"
    assert (found.reward.validation_function, build(run={"dir": "d"}).run.folder) == ("exact", "d")


def test_an_engine_on_gpus_of_its_own_has_its_own_replicas_and_never_sleeps() -> None:
    """Its tensor-parallel size need not fit the trainers' GPUs."""
    own = {"cluster": {"gpus_per_node": 3}, "rollout": {"tensor": 4, "num_gpus": 8}}
    found = build(**own)
    assert (found.num_replicas, found.cluster.num_ranks, found.rollout.sleeps) == (2, 3, False)
    assert build().rollout.sleeps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.2, 0.2)),
        ({"clip_high": 0.28}, (0.2, 0.28)),
        ({"policy_loss": "gspo"}, (3e-4, 4e-4)),
        ({"policy_loss": "gspo", "clip_low": 0.0}, (0.0, 4e-4)),
        ({"policy_loss": "cispo", "clip_high": 4}, (1.0, 4.0)),
    ],
)
def test_each_policy_loss_clips_at_its_own_range_unless_told_otherwise(
    options: dict[str, Any], expected: tuple[float, float]
) -> None:
    assert build(actor=options).actor.clip_range == expected


def test_a_correction_with_bounds_is_taken() -> None:
    own = {"weights": "token", "min_weight": 0.5, "max_weight": 5, "reject": "seq_mean", "reject_above": 1.01}
    found = build(algorithm={"correction": own}).algorithm.correction
    assert (found.is_on, found.min_weight, found.max_weight, found.reject_below) == (True, 0.5, 5.0, None)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"target_kl": 0}}, "actor.target_kl: is 0.0, must be above 0"),
        (
            {"actor": {"target_kl": 0.01, "batch": {"mini_batch_prompts": 256}}},
            "actor.target_kl: is 0.01, but a step has one optimizer step, so there is none to leave out; lower "
            "actor.batch.mini_batch_prompts, raise actor.batch.epochs, or leave it out",
        ),
        ({"actor": {"entropy_target": -0.1}}, "actor.entropy_target: is -0.1, must be 0 or more"),
        (
            {"actor": {"entropy_target": 0.2, "entropy_coef_step": 0}},
            "actor.entropy_coef_step: is 0.0, must be above 0",
        ),
        (
            {"actor": {"entropy_coef_step": 0.1}},
            "actor.entropy_coef_step: is 0.1, but actor.entropy_target is not set; set it too",
        ),
        (
            {"actor": {"entropy_target": 0.2, "entropy_coef": -0.1}},
            "actor.entropy_coef: is -0.1, must be 0 or more with actor.entropy_target",
        ),
        (
            {"actor": {"entropy_target": 0.2}, "algorithm": {"correction": {"bypass": True}}},
            "actor.entropy_target: is 0.2, but algorithm.correction.bypass leaves out the pass that measures the "
            "entropy; leave one of them out",
        ),
        (
            {"algorithm": {"correction": {"bypass": True, "weights": "token"}}},
            "algorithm.correction.bypass: is true, but algorithm.correction.weights is token, which looks at the "
            "trainer's log-probs before the update; turn one of them off",
        ),
        (
            {"algorithm": {"correction": {"bypass": True, "reject": "token", "reject_above": 2}}},
            "algorithm.correction.bypass: is true, but algorithm.correction.reject is token, which looks at the "
            "trainer's log-probs before the update; turn one of them off",
        ),
        (
            {"algorithm": {"advantage": "remax", "kl_in_reward_coef": 0.1}},
            "algorithm.kl_in_reward_coef: is 0.1, but remax compares scores without the penalty; use "
            "actor.kl_loss_coef",
        ),
        ({"reward": {"overlong_buffer": -1}}, "reward.overlong_buffer: is -1, must be 0 or more"),
        (
            {"reward": {"overlong_buffer": 256}},
            "reward.overlong_buffer: is 256, must be below data.max_response_length 256, of which it is the end",
        ),
        (
            {"reward": {"overlong_buffer": 64, "overlong_factor": -1}},
            "reward.overlong_factor: is -1.0, must be 0 or more",
        ),
        (
            {"reward": {"overlong_factor": 0.5}},
            "reward.overlong_factor: is 0.5, but reward.overlong_buffer is 0; set that too",
        ),
        (
            {"reward": {"mask_truncated": True}, "rollout": {"ignore_eos": True}},
            "reward.mask_truncated: is true, but with rollout.ignore_eos every answer is cut at the limit, so that "
            "nothing would be learned; turn one of them off",
        ),
    ],
)
def test_keys_that_steer_an_update_must_have_something_to_steer(sections: dict[str, Any], said: str) -> None:
    assert violations(**sections) == [said]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"environment": {"function": "calculator"}, "rollout": {"ignore_eos": True}},
            "rollout.ignore_eos: is true, but then no turn ends, so that environment.function calculator is never "
            "asked; turn one of them off",
        ),
        (
            {"environment": {"function": "calculator", "max_observation_tokens": 256}},
            "environment.max_observation_tokens: is 256, must be below data.max_response_length 256, which holds the "
            "model's turns too; lower it, or raise that",
        ),
        (
            {"rollout": {"sglang": {"release_cuda_graphs": True, "eager": True}}},
            "rollout.sglang.release_cuda_graphs: is true, but rollout.sglang.eager captures none; set it to false",
        ),
        (
            {"rollout": {"sglang": {"release_cuda_graphs": True, "sleep": False}}},
            "rollout.sglang.release_cuda_graphs: is true, but rollout.sglang.sleep is false, so that nothing is "
            "released; set it to false",
        ),
        (
            {"rollout": {"num_gpus": 1, "sglang": {"release_cuda_graphs": True}}},
            "rollout.sglang.release_cuda_graphs: is true, but with rollout.num_gpus = 1 the engine's GPUs are its own, "
            "so that nothing is released; set it to false",
        ),
    ],
)
def test_what_could_do_nothing_is_refused(sections: dict[str, Any], said: str) -> None:
    assert violations(**sections) == [said]


def test_an_environment_with_the_defaults_and_limits_of_none_are_taken() -> None:
    build(environment={"function": "calculator"})
    build(environment={"function": "calculator", "max_observation_tokens": 255})
    build(environment={"max_observation_tokens": 256}, rollout={"ignore_eos": True})
    build(rollout={"sglang": {"release_cuda_graphs": True}})


def test_what_steers_an_update_is_taken_where_it_can() -> None:
    found = build(
        actor={"target_kl": 0.01, "entropy_target": 0.2, "entropy_coef_step": 1e-4, "skip_old_logprobs": "auto"},
        reward={"overlong_buffer": 255, "overlong_factor": 0.5, "mask_truncated": True},
    )
    assert found.optimizer_steps(found.actor.batch) == 4  # 256 prompts in mini-batches of 64
    assert not found.skips_old_logprobs
    one = build(actor={"batch": {"mini_batch_prompts": 128, "epochs": 2}, "target_kl": 0.01})
    assert one.optimizer_steps(one.actor.batch) == 4


def test_remax_needs_a_greedy_answer_but_no_others_and_no_critic() -> None:
    found = build(algorithm={"advantage": "remax"})
    assert (found.needs_greedy_baseline, found.needs_critic, list(found.roles())) == (True, False, ["actor"])
    assert not build().needs_greedy_baseline


# ------------------------------------------------------------------------------------------------ the reward model


def scoring_folder(folder: Path) -> str:
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return str(folder)


def test_a_reward_model_is_a_role_of_its_own(tmp_path: Path) -> None:
    found = build(reward_model={"path": scoring_folder(tmp_path)}, algorithm={"advantage": "grpo"}, rollout={"n": 2})
    assert list(found.roles()) == ["actor", "reward_model"]
    assert (found.needs_reward_model, build().needs_reward_model) == (True, False)
    assert (found.reward_model.weight, found.reward_model.rule_weight) == (1.0, 1.0)
    # Without a path nobody reads the rest: a preset may hold it.
    assert list(build(reward_model={"max_length": 10**6}).roles()) == ["actor", "critic"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"reward_model": {"weight": 0}}, "reward_model.weight: is 0.0, must be above 0"),
        ({"reward_model": {"rule_weight": -1}}, "reward_model.rule_weight: is -1.0, must be 0 or more"),
        ({"reward_model": {"max_length": 0}}, "reward_model.max_length: is 0, must be at least 1"),
        (
            {"cluster": {"gpus_per_node": 4}, "reward_model": {"parallel": {"tensor": 3}}},
            "reward_model.parallel: tensor 3 x pipeline 1 x context 1 = 3 does not divide the 4 ranks "
            "(cluster.num_nodes x cluster.gpus_per_node); change one of them",
        ),
        (
            {
                "cluster": {"gpus_per_node": 2},
                "reward_model": {
                    "max_length": 1001,
                    "forward_max_tokens_per_gpu": 501,
                    "parallel": {"context": 2},
                },
            },
            "reward_model.forward_max_tokens_per_gpu: 501 x context 2 is less than the longest text, 1004 tokens "
            "(reward_model.max_length 1001); raise it to 502 or more, or lower reward_model.max_length",
        ),
        (
            {"reward_model": {"offload": {"activations": ["core_attn"]}}},
            "reward_model.offload.activations: the reward model has no backward; leave it out",
        ),
        (
            {"reward_model": {"rule_weight": 0}, "rollout": {"keep_groups": "mixed", "n": 2}},
            "reward_model.rule_weight: is 0, but rollout.keep_groups mixed chooses prompts by the reward function's "
            "scores, before the reward model has seen the answers; set it above 0, or rollout.keep_groups to all",
        ),
        (
            {"algorithm": {"advantage": "remax"}},
            "reward_model.path: is set, but algorithm.advantage remax compares with a greedy answer, which the reward "
            "model does not score; use another advantage, or leave it out",
        ),
        (
            {"reward_model": {"tokenizer_path": "/nowhere"}},
            "reward_model.tokenizer_path: no tokenizer_config.json in /nowhere",
        ),
    ],
)
def test_what_a_reward_model_cannot_do_is_refused(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    own = {"path": scoring_folder(tmp_path), **sections.pop("reward_model", {})}
    assert violations(reward_model=own, **sections) == [said]


def test_a_reward_model_and_its_tokenizer_must_be_there(tmp_path: Path) -> None:
    assert violations(reward_model={"path": "/nowhere", "tokenizer_path": scoring_folder(tmp_path)}) == [
        "reward_model.path: no config.json in /nowhere"
    ]
    (tmp_path / "tokenizer_config.json").unlink()
    assert violations(reward_model={"path": str(tmp_path)}) == [
        f"reward_model.path: no tokenizer_config.json in {tmp_path}; set reward_model.tokenizer_path"
    ]


def test_verls_keys_of_a_reward_model_are_known() -> None:
    found = violations(
        reward_model={
            "enable": True,
            "model": {"path": "x"},
            "megatron": {"tensor_model_parallel_size": 2},
            "overlong_buffer": {"len": 4},
        }
    )
    assert found == [
        "reward_model.enable: this is verl's name; here it is reward_model.path (empty turns it off)",
        "reward_model.model.path: this is verl's name; here it is reward_model.path",
        "reward_model.megatron.tensor_model_parallel_size: this is verl's name; here it is "
        "reward_model.parallel.tensor",
        "reward_model.overlong_buffer.len: this is verl's name; here it is reward.overlong_buffer",
    ]
