"""A trainer process's share of a step."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.types import Sample
from megarl.workers.step_store import StepStore


def store() -> StepStore:
    made = StepStore()
    for index, (prompt, response) in {3: ([5, 9], [7, 2]), 8: ([4], [6])}.items():
        length = len(response)
        made.samples[index] = Sample(
            uid=f"u{index}",
            group="g",
            prompt_ids=np.array(prompt),
            response_ids=np.array(response),
            rollout_logprobs=np.zeros(length, np.float32),
            loss_mask=np.arange(length) == 0,  # the first response token counts
            weight_versions=np.zeros(length, np.int64),
            score=1.0,
            finish_reason="stop",
            data_source="s",
        )
    return made


def test_values_are_kept_by_name_and_sample() -> None:
    made = store()
    made.put("values", {3: np.array([1.0, 2.0])})
    made.put("values", {8: np.array([3.0])})
    assert [v.tolist() for v in made.get("values", [8, 3])] == [[3.0], [1.0, 2.0]]
    assert made.all("values").keys() == {3, 8}
    assert made.all("returns") == {}


def test_what_is_missing_is_named() -> None:
    made = store()
    made.put("values", {3: np.zeros(2)})
    with pytest.raises(KeyError, match=r"values of samples \[8\] is not on this rank \(1 of 2 missing\)"):
        made.get("values", [3, 8])
    with pytest.raises(KeyError, match=r"returns of samples \[0, 1, 2, 3, 4\] is not on this rank \(9 of 9 missing\)"):
        made.get("returns", range(9))


def test_micro_batches_are_packed_with_their_values() -> None:
    """(5 9 | 7 2) and (4 | 6), each padded to 4; an answer's values lie from its prompt's last token on."""
    made = store()
    made.put("old", {3: np.array([0.5, 0.25]), 8: np.array([2.0])})
    both, none, one = made.batches([[8, 3], [], [3]], 4, {"old_logprobs": "old"}, {"weight": {3: 0.1, 8: 0.2}})
    assert both.tokens.tolist() == [4, 6, 0, 0, 5, 9, 7, 2]
    assert both.mask.tolist() == [True, False, False, False, False, True, False, False]
    assert both.per_token["old_logprobs"].tolist() == [2.0, 0, 0, 0, 0, 0.5, 0.25, 0]
    np.testing.assert_allclose(both.per_token["weight"], [0.2, 0, 0, 0, 0, 0.1, 0.1, 0])
    assert none.is_dummy
    assert (none.num_tokens, none.per_token["weight"].tolist()) == (4, [0.0] * 4)
    assert one.tokens.tolist() == [5, 9, 7, 2]
