"""Factors for tokens whose probabilities rollout and trainer do not agree on, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.correction import (
    CorrectionFigures,
    at_tokens,
    divergence_figures,
    importance_weights,
    kept,
    sequence_sums,
    step_correction,
)
from megarl.config import CorrectionConfig
from megarl.types import FloatArray, Sample

RATIO = (4.0, 0.5, 9.0, 1.0, 0.1, 2.0)
"""Trainer / rollout, of two sequences; the third token (9) has no loss. Products 4 * 0.5 * 1 = 2 and 0.1 * 2 = 0.2."""
LENGTHS = [4, 2]
MASK = torch.tensor([True, True, False, True, True, True])


def log_ratio() -> Tensor:
    return torch.tensor(RATIO, dtype=torch.float64).log()


def weights(level: str, max_weight: float, min_weight: float | None = None) -> list[float]:
    return [float(w) for w in importance_weights(log_ratio(), MASK, LENGTHS, level, max_weight, min_weight)]


def test_sums_and_values_of_sequences() -> None:
    values = torch.tensor([1.0, 2.0, 4.0])
    assert sequence_sums(values, [2, 0, 1]).tolist() == [3.0, 0.0, 4.0]
    assert at_tokens(torch.tensor([3.0, 9.0, 4.0]), [2, 0, 1]).tolist() == [3.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="lengths add up to 4, but there are 3 tokens"):
        sequence_sums(values, [2, 2])


class TestImportanceWeights:
    def test_of_tokens(self) -> None:
        assert weights("token", 2.0) == pytest.approx([2.0, 0.5, 0.0, 1.0, 0.1, 2.0])
        assert weights("token", 5.0) == pytest.approx([4.0, 0.5, 0.0, 1.0, 0.1, 2.0])

    def test_of_sequences_the_product_of_their_loss_tokens(self) -> None:
        assert weights("sequence", 3.0) == pytest.approx([2.0, 2.0, 0.0, 2.0, 0.2, 0.2])
        assert weights("sequence", 1.5) == pytest.approx([1.5, 1.5, 0.0, 1.5, 0.2, 0.2])

    def test_icepop_drops_what_lies_outside_and_leaves_the_rest(self) -> None:
        assert weights("token", 3.0, 0.25) == pytest.approx([0.0, 0.5, 0.0, 1.0, 0.0, 2.0])
        assert weights("sequence", 3.0, 0.25) == pytest.approx([2.0, 2.0, 0.0, 2.0, 0.0, 0.0])

    def test_the_bounds_themselves_are_inside(self) -> None:
        exact = torch.tensor([0.0, 0.0])
        assert importance_weights(exact, exact == 0, [2], "token", 1.0, 0.5).tolist() == [1.0, 1.0]
        assert importance_weights(exact, exact == 0, [2], "token", 2.0, 1.0).tolist() == [1.0, 1.0]

    def test_far_away_all_stays_finite(self) -> None:
        far = torch.tensor([1000.0, -1000.0, math.inf, math.nan])
        mask = torch.tensor([True, True, False, False])
        assert importance_weights(far, mask, [4], "token", 2.0).tolist() == pytest.approx(
            [2.0, math.exp(-20.0), 0.0, 0.0]
        )
        assert importance_weights(far, mask, [4], "sequence", 2.0).tolist() == [1.0, 1.0, 0.0, 0.0]

    def test_an_unknown_level_is_refused(self) -> None:
        with pytest.raises(ValueError, match="level of importance weights 'seq'"):
            weights("seq", 2.0)


class TestKept:
    @pytest.mark.parametrize(
        ("level", "kind", "above", "below", "expected"),
        [
            # Ratios 4, 0.5, -, 1 and 0.1, 2 in 1/2.5 .. 2.5
            ("token", "k1", 2.5, None, [False, True, False, True, False, True]),
            ("token", "k1", 2.5, 0.6, [False, False, False, True, False, True]),
            # Products 2 and 0.2
            ("seq_sum", "k1", 2.5, None, [True, True, False, True, False, False]),
            ("seq_sum", "k1", 1.5, 0.1, [False, False, False, False, True, True]),
            # Geometric means 2^(1/3) = 1.26 and 0.2^(1/2) = 0.447: the token without a loss does not count
            ("seq_mean", "k1", 1.27, 0.45, [True, True, False, True, False, False]),
            ("seq_mean", "k1", 1.25, 0.44, [False, False, False, False, True, True]),
            # Worst tokens: 4 and 0.1
            ("seq_max", "k1", 4.5, None, [True, True, False, True, False, False]),
            ("seq_max", "k1", 3.5, 0.09, [False, False, False, False, True, True]),
            # (log r)^2 / 2: 0.961, 0.240, -, 0 and 2.651, 0.240
            ("token", "k2", 0.95, None, [False, True, False, True, False, True]),
            ("seq_sum", "k2", 1.21, None, [True, True, False, True, False, False]),
            ("seq_sum", "k2", 1.20, None, [False, False, False, False, False, False]),
            ("seq_mean", "k2", 0.41, None, [True, True, False, True, False, False]),
            ("seq_max", "k2", 0.97, None, [True, True, False, True, False, False]),
            # r - 1 - log r: 1.614, 0.193, -, 0 and 1.403, 0.307
            ("token", "k3", 1.5, None, [False, True, False, True, True, True]),
            ("seq_sum", "k3", 1.80, None, [False, False, False, False, True, True]),
            ("seq_mean", "k3", 0.61, None, [True, True, False, True, False, False]),
            ("seq_max", "k3", 1.5, None, [False, False, False, False, True, True]),
        ],
    )
    def test_by_hand(self, level: str, kind: str, above: float, below: float | None, expected: list[bool]) -> None:
        assert kept(log_ratio(), MASK, LENGTHS, level, kind, above, below).tolist() == expected

    @given(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=8), st.floats(1.01, 10.0))
    def test_a_sequence_stays_by_its_worst_token_if_every_token_does(self, ratios: list[float], above: float) -> None:
        own = torch.tensor(ratios, dtype=torch.float64)
        mask = torch.ones(len(ratios), dtype=torch.bool)
        by_token = kept(own, mask, [len(ratios)], "token", "k1", above)
        assert bool(kept(own, mask, [len(ratios)], "seq_max", "k1", above).all()) == bool(by_token.all())

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(ValueError, match="divergence 'k4'"):
            kept(log_ratio(), MASK, LENGTHS, "token", "k4", 2.0)
        with pytest.raises(ValueError, match="level of rejection 'sequence'"):
            kept(log_ratio(), MASK, LENGTHS, "sequence", "k1", 2.0)


def figures(log_ratio: list[float], rollout: list[float], mask: list[bool], lengths: list[int]) -> dict[str, float]:
    own = torch.tensor(rollout) + torch.tensor(log_ratio)
    found = divergence_figures(own, torch.tensor(rollout), torch.tensor(mask), lengths)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.metrics().items()}


class TestDivergenceFigures:
    def test_by_hand(self) -> None:
        """Two sequences: log ratios 0.2 and -0.4 (of log-probs -1 and -2), and 0.6 (of -0.5). One token without a loss.

        kl = -(0.2 - 0.4 + 0.6) / 3. Mean log-probs of the rollout -1.5 and -0.5, of the trainer -1.6 and 0.1.
        """
        found = figures([0.2, 9.0, -0.4, 0.6], [-1.0, -1.0, -2.0, -0.5], [True, False, True, True], [3, 1])
        exp = math.exp
        assert found == pytest.approx(
            {
                "kl": -0.4 / 3,
                "k3_kl": (exp(0.2) - 1.2 + exp(-0.4) - 0.6 + exp(0.6) - 1.6) / 3,
                "chi2_token": (exp(0.4) + exp(-0.8) + exp(1.2)) / 3 - 1,
                "chi2_seq": (exp(2 * -0.2) + exp(1.2)) / 2 - 1,
                "training_ppl": (exp(1.6) + exp(-0.1)) / 2,
                "rollout_ppl": (exp(1.5) + exp(0.5)) / 2,
                "ppl_ratio": (exp(0.1) + exp(-0.6)) / 2,
                "log_ppl_diff": (0.1 - 0.6) / 2,
                "log_ppl_abs_diff": (0.1 + 0.6) / 2,
                "log_ppl_diff_max": 0.1,
                "log_ppl_diff_min": -0.6,
            },
            abs=1e-6,
        )

    def test_where_both_agree_all_divergences_are_0(self) -> None:
        found = figures([0.0, 0.0], [-1.0, -3.0], [True, True], [2])
        names = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff")
        assert {name: found[name] for name in names} == dict.fromkeys(names, 0.0)
        assert (found["ppl_ratio"], found["training_ppl"]) == (1.0, pytest.approx(math.exp(2.0)))

    def test_sequences_without_a_loss_token_do_not_count(self) -> None:
        with_silent = figures([0.2, 5.0, 5.0], [-1.0, -9.0, -9.0], [True, False, False], [1, 2])
        assert with_silent == figures([0.2], [-1.0], [True], [1])


def sample(ratio: list[float], mask: list[bool]) -> tuple[Sample, FloatArray]:
    rollout = np.linspace(-2.0, -1.0, len(ratio), dtype=np.float32)
    made = Sample(
        uid="u",
        group="g",
        prompt_ids=np.array([1, 2]),
        response_ids=np.zeros(len(ratio), np.int64),
        rollout_logprobs=rollout,
        loss_mask=np.array(mask, np.bool_),
        weight_versions=np.zeros(len(ratio), np.int64),
        score=0.0,
        finish_reason="stop",
        data_source="s",
    )
    return made, rollout + np.log(np.array(ratio, np.float32))


PAIRS = [sample([4.0, 0.5, 9.0, 1.0], [True, True, False, True]), sample([0.1, 2.0], [True, True])]
SILENT = sample([5.0], [False])


def run(config: CorrectionConfig, pairs: list[Any]) -> tuple[list[list[float]], CorrectionFigures]:
    found, watched = step_correction(config, [s for s, _ in pairs], [logprobs for _, logprobs in pairs])
    return [[round(float(w), 5) for w in of_sample] for of_sample in found], watched


class TestStepCorrection:
    def test_weights_and_rejection_multiply(self) -> None:
        """Tokens outside 1/2.5 .. 2.5 go (4 and 0.1); the others keep their ratios, truncated to 1.5."""
        config = CorrectionConfig(weights="token", max_weight=1.5, reject="token", reject_above=2.5)
        factors, watched = run(config, PAIRS)
        assert factors == [[0.0, 0.5, 0.0, 1.0], [0.0, 1.5]]
        metrics = watched.metrics()
        wanted = {
            "rollout_rs_masked_fraction": 2 / 5,
            "rollout_rs_seq_masked_fraction": 1.0,  # both sequences lose a token
            # Before rejection: 1.5, 0.5, 1, 0.1, 1.5.
            "rollout_is_mean": 4.6 / 5,
            "rollout_is_eff_sample_size": (4.6 / 5) ** 2 / ((2.25 + 0.25 + 1.0 + 0.01 + 2.25) / 5),
            "rollout_is_ratio_fraction_high": 2 / 5,  # 4 and 2
            "rollout_is_ratio_fraction_low": 2 / 5,  # 0.5 and 0.1 are below 1 / 1.5
            "rollout_is_max": 4.0,  # before they were truncated
            "rollout_is_min": 0.1,
        }
        assert {name: metrics[f"rollout_corr/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)

    def test_rejection_alone_leaves_weights_of_1(self) -> None:
        factors, watched = run(CorrectionConfig(reject="seq_sum", reject_above=2.5), PAIRS)
        assert factors == [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0]]
        metrics = watched.metrics()
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
        assert not any("rollout_is" in name for name in metrics)

    def test_icepop_bounds_come_from_the_config(self) -> None:
        factors, watched = run(CorrectionConfig(weights="sequence", max_weight=3.0, min_weight=0.25), PAIRS)
        assert factors == [[2.0, 2.0, 0.0, 2.0], [0.0, 0.0]]
        assert watched.metrics()["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(2 / 5)
        _, watched = run(CorrectionConfig(weights="sequence", max_weight=3.0, min_weight=0.1), PAIRS)
        assert watched.metrics()["rollout_corr/rollout_is_ratio_fraction_low"] == 0.0  # not 1 / max_weight

    @pytest.mark.parametrize("reject", ["token", "seq_sum", "seq_mean", "seq_max"])
    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_one_batch_and_its_split_are_the_same(self, level: Any, reject: Any) -> None:
        """Ranks without samples, or without loss tokens, among them."""
        config = CorrectionConfig(weights=level, reject=reject, reject_above=2.5)
        whole, watched = run(config, [*PAIRS, SILENT])
        parts = [run(config, part) for part in ([PAIRS[0]], [], [SILENT], [PAIRS[1]])]
        assert [*parts[0][0], *parts[3][0], *parts[2][0]] == whole
        assert reduce(add, [w for _, w in parts]).metrics() == pytest.approx(watched.metrics())

    def test_where_both_agree_nothing_changes(self) -> None:
        for config in (
            CorrectionConfig(weights="token"),
            CorrectionConfig(weights="sequence", min_weight=0.5),
            CorrectionConfig(reject="seq_mean", reject_above=1.001),
            CorrectionConfig(reject="seq_max", reject_kind="k3", reject_above=1e-6),
        ):
            pairs = [(s, s.rollout_logprobs) for s, _ in PAIRS]
            assert run(config, pairs)[0] == [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0]]

    def test_it_is_off_unless_asked_for(self) -> None:
        assert not CorrectionConfig().is_on
        assert replace(CorrectionConfig(), weights="token").is_on
        assert replace(CorrectionConfig(), reject="token").is_on
