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
        "actor.clip_low: is 'high' (str), but must be a number",
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
        ("actor", "clip_low", True, "actor.clip_low: is True (bool), but must be a number"),
        ("actor", "kl_loss_kind", "k4", "actor.kl_loss_kind: is 'k4' (str), but must be k1 or abs or k2 or k3"),
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
            {"actor": {"dual_clip": 1.0}},
            "actor.dual_clip: is 1.0, must be above 1 (3.0 is usual), or null to turn it off",
        ),
        ({"critic": {"value_clip": 0.0}}, "critic.value_clip: is 0.0, must be above 0"),
        (
            {"actor": {"aggregation": "constant"}},
            "actor.aggregation_constant: must be set for aggregation constant (the response limit x samples is usual)",
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
        ({"rollout": {"top_k": 0}}, "rollout.top_k: is 0, must be at least 1, or -1 for all tokens"),
        (
            {"rollout": {"sglang": {"memory_fraction": 1}}},
            "rollout.sglang.memory_fraction: is 1.0, must be between 0 and 1",
        ),
    ],
)
def test_values_out_of_range_and_contradictions(sections: dict[str, Any], said: str) -> None:
    assert violations(**sections) == [said]


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
