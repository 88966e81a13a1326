"""What a run is made of, before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import config
from megarl.driver.setup import create_inputs, stop_tokens, total_steps


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
