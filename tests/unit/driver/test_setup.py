"""What a run is made of, before any process starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from megarl import config
from megarl.config import SGLangConfig
from megarl.data.tiny import write_tiny_tokenizer
from megarl.driver.setup import check_layouts, create_inputs, prepare, stop_tokens, total_steps
from megarl.rewards import sandbox
from tests.reward_models import write_reward_model


def build(**sections: Any) -> config.Config:
    return config.build({"model": {"create": {}}, "data": {"create": {}}, **sections})


@pytest.mark.parametrize(("own", "expected"), [(None, (2,)), (5, (2, 5)), ([5, 2, 4], (2, 4, 5))])
def test_an_answer_ends_at_the_tokenizers_token_and_at_the_models(tmp_path: Path, own: Any, expected: Any) -> None:
    if own is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    assert stop_tokens(str(tmp_path), SimpleNamespace(eos_token_id=2)) == expected


def test_a_model_without_an_end_has_no_stop_token(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_tokens(str(tmp_path), SimpleNamespace(eos_token_id=None)) == ()


def test_steps_win_over_epochs() -> None:
    prompts: Any = SimpleNamespace(steps_per_epoch=7)
    assert total_steps(build(run={"total_epochs": 3}), prompts) == 21
    assert total_steps(build(run={"total_epochs": 3, "total_steps": 5}), prompts) == 5


def test_what_is_made_is_then_read_like_what_was_given(tmp_path: Path) -> None:
    made = build(
        run={"dir": str(tmp_path)},
        model={"create": {"hidden_size": 8, "num_layers": 1, "ffn_size": 8, "alphabet": "0123456789+="}},
        data={"create": {"num_train": 5, "num_validation": 3}},
    )
    found = create_inputs(made)
    assert (found.model.create, found.data.create) == (None, None)
    assert found.model.path == str(tmp_path / "created" / "model")
    assert config.validate(found) == []
    shape = json.loads((tmp_path / "created" / "model" / "config.json").read_text())
    assert (shape["hidden_size"], shape["num_hidden_layers"]) == (8, 1)
    assert create_inputs(found) == found


TINY = {"hidden_size": 8, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 8, "alphabet": "0123456789+="}


def ready(folder: Path, **sections: Any) -> config.Config:
    """Two ranks and a tiny model of three layers, its files written."""
    made = build(
        run={"dir": str(folder)},
        model={"create": TINY},
        data={"create": {"num_train": 8, "num_validation": 3}, "prompts_per_step": 4},
        cluster={"gpus_per_node": 2},
        actor={"batch": {"mini_batch_prompts": 4}, **sections.pop("actor", {})},
        critic={"batch": {"mini_batch_prompts": 4}, **sections.pop("critic", {})},
        **sections,
    )
    return create_inputs(made)


def test_all_that_needs_no_process_is_read_and_checked(tmp_path: Path) -> None:
    found = prepare(ready(tmp_path))
    assert (found.prompts.steps_per_epoch, found.checkpoint, found.state.step) == (2, None, 0)
    assert found.validation is not None
    assert len(found.validation) == 3
    assert found.hf_config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"critic": {"parallel": {"pipeline": 2}}}, "critic.parallel: 3 layers do not divide by pipeline 2"),
        ({"reward": {"function": "nowhere:score"}}, "reward function 'nowhere:score'"),
        (
            {"cluster": {"gpus_per_node": 4}, "actor": {"parallel": {"tensor": 4}}},
            "actor.parallel: .* 2 key/value heads",
        ),
        (
            {"rollout": {"tensor": 2, "sglang": {"expert": 2}}},
            "rollout.sglang.expert: 2 groups of ranks, but the model has no experts; set it to 1",
        ),
        (
            {"rollout": {"tensor": 2, "sglang": {"data_parallel": 2}}},
            "rollout.sglang.data_parallel, .* splits the attention of this model's family over all ranks; qwen3",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_said_before_any_process(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    cluster = sections.pop("cluster", None)
    made = ready(tmp_path, **sections) if cluster is None else None
    if made is None:
        made = create_inputs(
            build(
                run={"dir": str(tmp_path)},
                model={"create": TINY},
                data={"create": {"num_train": 64, "num_validation": 3}, "prompts_per_step": 64},
                cluster=cluster,
                **sections,
            )
        )
    with pytest.raises(ValueError, match=message):
        prepare(made)


TOOLS = """
from megarl.environments import SingleTurn

class Polite(SingleTurn):
    def messages(self, prompt):
        return prompt if isinstance(prompt, str) else [*prompt, {"role": "user", "content": "++"}]
"""


def test_an_environment_changes_what_the_model_is_told_in_training_and_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "polite_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    plain = prepare(ready(tmp_path / "plain"))
    told = prepare(ready(tmp_path / "told", environment={"function": "polite_tools:Polite"}))
    plus = plain.tokenizer.convert_tokens_to_ids("+")
    for own, other in zip(told.prompts.next(), plain.prompts.next(), strict=True):
        assert own.token_ids.tolist() == [*other.token_ids, plus, plus]
        assert (own.uid, own.ground_truth, own.extra_info) == (other.uid, other.ground_truth, other.extra_info)
    assert told.validation is not None
    assert plain.validation is not None
    for own, other in zip(told.validation.prompts, plain.validation.prompts, strict=True):
        assert own.token_ids.tolist() == [*other.token_ids, plus, plus]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"function": "calculater"}, "unknown environment 'calculater'; give calculator, or"),
        (
            {"function": "calculator", "max_observation_tokens": 3},
            "environment.max_observation_tokens: is 3, but .* takes 4 tokens",
        ),
    ],
)
def test_an_environment_that_cannot_work_is_said_before_any_process(
    environment: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(ready(tmp_path, environment=environment))


@pytest.mark.parametrize("key", ["function", "validation"])
def test_a_models_code_is_not_run_without_isolation_unless_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "unshare: EPERM")
    made = ready(tmp_path, reward={key: "code"})
    with pytest.raises(ValueError, match=r"\(unshare: EPERM\).* set reward.allow_unsandboxed_code=true"):
        prepare(made)
    prepare(replace(made, reward=replace(made.reward, allow_unsandboxed_code=True)))
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: None)
    prepare(made)


def test_a_critic_that_does_not_know_the_actors_tokens_is_refused(tmp_path: Path) -> None:
    made = ready(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    shape = json.loads((tmp_path / "created" / "model" / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(shape | {"vocab_size": 3}))
    made = replace(made, critic=replace(made.critic, path=str(small)))
    with pytest.raises(ValueError, match="vocabulary of 3 is smaller than the actor's 16"):
        prepare(made)


@pytest.mark.parametrize(("device", "message"), [("cpu", "without a GPU"), ("cuda", "expert size 2 .* 3 experts")])
def test_experts_that_are_spread_need_a_gpu_and_a_size_that_divides(device: str, message: str, tmp_path: Path) -> None:
    made = ready(tmp_path)
    cluster = replace(made.cluster, device=device)
    made = replace(made, cluster=cluster, rollout=replace(made.rollout, tensor=2, sglang=SGLangConfig(expert=2)))
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    shape = Qwen3MoeConfig(**sizes, vocab_size=64, num_experts=3, moe_intermediate_size=64, num_experts_per_tok=1)
    with pytest.raises(ValueError, match=f"rollout.sglang.expert: .*{message}"):
        check_layouts(made, shape, shape)


def test_data_parallel_attention_needs_a_gpu(tmp_path: Path) -> None:
    made = ready(tmp_path)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    shape = Qwen3MoeConfig(**sizes, vocab_size=64, num_experts=2, moe_intermediate_size=64, num_experts_per_tok=1)
    for device in ("cuda", "cpu"):
        cluster = replace(made.cluster, device=device)
        own = replace(made.rollout, tensor=2, sglang=SGLangConfig(data_parallel=2))
        if device == "cuda":
            check_layouts(replace(made, cluster=cluster, rollout=own), shape, shape)
            continue
        with pytest.raises(ValueError, match="rollout.sglang.data_parallel, .* without a GPU .* set it to 1"):
            check_layouts(replace(made, cluster=cluster, rollout=own), shape, shape)


# ------------------------------------------------------------------------------------------------ the reward model


def test_a_reward_model_keeps_the_messages_of_its_prompts(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "scoring")
    found = prepare(ready(tmp_path / "with", reward_model={"path": str(path), "max_length": 64}))
    plain = prepare(ready(tmp_path / "without"))
    for own, other in zip(found.prompts.next(), plain.prompts.next(), strict=True):
        text = found.tokenizer.decode(own.token_ids)
        assert own.content == [{"role": "user", "content": text}]
        assert (own.token_ids.tolist(), other.content) == (other.token_ids.tolist(), "")


@pytest.mark.parametrize(
    ("options", "own", "message"),
    [
        ({"num_labels": 2}, {}, r"reward_model.path: .*score.weight is \[2, 32\], the model needs \[1, 32\]"),
        ({}, {"max_length": 129}, "reward_model.max_length: is 129, but the model reads 128 tokens"),
        ({}, {"parallel": {"pipeline": 4}}, "reward_model.parallel: 2 layers do not divide by pipeline 4"),
        ({}, {"tokenizer_path": "large"}, "reward_model.tokenizer_path: the tokenizer has 30 tokens, .* of 20"),
        ({}, {"tokenizer_path": "bare"}, "reward_model.apply_chat_template: is true, .* no chat template"),
    ],
)
def test_a_reward_model_that_cannot_score_is_said_before_any_process(
    tmp_path: Path, options: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    path = write_reward_model(tmp_path / "scoring", **options)
    write_tiny_tokenizer(tmp_path / "large", "abcdefghijklmnopqrstuvwxyz")
    write_tiny_tokenizer(tmp_path / "bare", "0123456789+=")
    bare = tmp_path / "bare" / "chat_template.jinja"
    bare.unlink()
    if "tokenizer_path" in own:
        own = {**own, "tokenizer_path": str(tmp_path / own["tokenizer_path"])}
    scoring = {"path": str(path), "max_length": 64, **own}
    made = create_inputs(
        build(
            run={"dir": str(tmp_path)},
            model={"create": TINY},
            data={"create": {"num_train": 64, "num_validation": 3}, "prompts_per_step": 64},
            cluster={"gpus_per_node": 4},
            reward_model=scoring,
        )
    )
    with pytest.raises(ValueError, match=message):
        prepare(made)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    made = ready(tmp_path)
    assert made.model.path is not None
    scoring = replace(made.reward_model, path=made.model.path, max_length=64, apply_chat_template=False)
    with pytest.raises(ValueError, match=r"score.weight \[1, 8\] is missing. It must be a sequence-classification"):
        prepare(replace(made, reward_model=scoring))
