"""What limits a micro-batch."""

from __future__ import annotations

from megarl.config import BatchConfig
from megarl.workers.messages import limits


def test_dynamic_limits_grow_with_context_and_static_ones_do_not() -> None:
    """A micro-batch is split over the context ranks, so that its tokens may be so many times more."""
    dynamic = BatchConfig(max_tokens_per_gpu=100, forward_max_tokens_per_gpu=300)
    assert limits(dynamic, 2, forward=False) == {"max_tokens": 200}
    assert limits(dynamic, 2, forward=True) == {"max_tokens": 600}
    assert limits(BatchConfig(dynamic=False, micro_batch_size=7), 2, forward=True) == {"micro_batch_size": 7}
