"""A warning when trainer and engine disagree, with what the configuration says of the cause."""

from __future__ import annotations

from typing import Any

from megarl import config
from megarl.driver.drift import drift_warning, likely_causes


def build(**sections: Any) -> config.Config:
    return config.build({"model": {"create": {}}, "data": {"create": {}}, **sections})


def metrics(mean: float) -> dict[str, float]:
    return {"training/rollout_probs_diff_mean": mean, "training/rollout_probs_diff_max": 0.5}


def test_it_warns_from_the_threshold_on_and_again_at_twice_that() -> None:
    own, warned_at, said = build(rollout={"warn_probs_diff": 0.1}), 0.0, []
    for mean in (0.09, 0.1, 0.15, 0.19, 0.2, 0.3, 0.05, 0.4):
        warning, warned_at = drift_warning(own, metrics(mean), warned_at)
        said.append(warning is not None)
    assert said == [False, True, False, False, True, False, False, True]


def test_it_gives_the_numbers_and_the_key() -> None:
    warning, _ = drift_warning(build(rollout={"warn_probs_diff": 0.1}), metrics(0.1234), 0.0)
    assert warning is not None
    assert "differ by 0.1234 in the mean, at most 0.500 (rollout.warn_probs_diff = 0.1)" in warning


def test_nothing_is_said_where_it_is_off_or_was_not_measured() -> None:
    assert drift_warning(build(rollout={"warn_probs_diff": 0.0}), metrics(0.9), 0.0) == (None, 0.0)
    assert drift_warning(build(), {}, 0.0) == (None, 0.0)


def test_causes_come_from_the_configuration() -> None:
    odd = build(
        model={"create": {}, "precision": "fp32"},
        rollout={"sglang": {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton"}},
        sync={"verify": "off"},
    )
    found = "; ".join(likely_causes(odd))
    for words in ("kv_cache_dtype fp8_e4m3", "sync.verify is off", "attention_backend is triton"):
        assert words in found
    assert "bf16" not in found
    plain = build(rollout={"engine": "hf"}, algorithm={"correction": {"weights": "token"}})
    assert likely_causes(plain) == ["algorithm.correction makes up for it: watch what it weighs and rejects"]
