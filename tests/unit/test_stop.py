import os
import signal

import pytest

from recmill.errors import Interrupted, Preempted
from recmill.launch import signals as stop


def test_the_first_signal_is_remembered_and_inner_blocks_share_it() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stop.listening(["SIGUSR1"]) as outer:
        assert outer.heard_by(1) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)  # at the same time: the same request
        with stop.listening(["SIGUSR1"]) as inner:
            assert inner is outer
        heard = outer.heard_by(1)
        assert heard is not None
        assert (heard.rank, heard.signal, heard.state) == (1, "SIGUSR1", "preempted")
    assert signal.getsignal(signal.SIGUSR1) is before
    with stop.listening([]) as another:
        assert not another.is_set


def test_a_second_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", -1.0)
    with stop.listening(["SIGTERM"]):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_group_stops_for_the_earliest_signal() -> None:
    assert min(stop.Heard(2.0, 0, "SIGTERM"), stop.Heard(1.0, 1, "SIGINT")).state == "interrupted"


def test_ends_have_their_exit_codes() -> None:
    preempted, interrupted = stop.error_for("SIGUSR2", "Fact."), stop.error_for("SIGINT", "Fact.")
    assert isinstance(preempted, Preempted)
    assert isinstance(interrupted, Interrupted)
    assert (preempted.exit_code, interrupted.exit_code) == (75, 130)
    assert str(preempted) == "Fact. Run the same command to go on."
