"""What the driver keeps of a sample."""

from __future__ import annotations

import numpy as np

from megarl.types import Sample, SampleInfo


def test_the_scalars_of_a_sample() -> None:
    """Three prompt tokens, four response tokens of which a tool wrote one; two weight versions wrote the rest."""
    sample = Sample(
        uid="0-1/2",
        group="0-1",
        prompt_ids=np.array([5, 6, 7]),
        response_ids=np.array([8, 9, 1, 2]),
        rollout_logprobs=np.zeros(4, np.float32),
        loss_mask=np.array([True, False, True, True]),
        weight_versions=np.array([4, 4, 3, 5]),
        score=0.5,
        finish_reason="length",
        data_source="s",
        reward_error="why",
    )
    expected = SampleInfo("0-1/2", "0-1", 3, 4, 3, 0.5, "length", "s", 3, "why")
    assert SampleInfo.of(sample) == expected
    assert (sample.length, expected.length) == (7, 7)
