"""The first signal asks, the second ends."""

from __future__ import annotations

import os
import signal

import pytest

from megarl.driver.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_raises(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.asked is None
        os.kill(os.getpid(), number)
        assert stop.asked == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked == number.name


def test_the_handlers_come_back_also_after_an_error() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = {number: signal.signal(number, own) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyError), StopRequest():  # noqa: PT012
            assert signal.getsignal(signal.SIGTERM) is not own
            raise KeyError
        assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
