import os
import signal

import pytest

from recmill.errors import Interrupted, Preempted
from recmill.launch import signals


def test_the_first_signal_requests_a_stop_and_the_handlers_before_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with signals.stop_on(["SIGUSR1"]) as stop:
        assert stop.received_by(1) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)  # at the same time: the same request
        received = stop.received_by(1)
        assert received is not None
        assert (received.rank, received.name, received.state) == (1, "SIGUSR1", "preempted")
    assert signal.getsignal(signal.SIGUSR1) is before
    with signals.stop_on([]) as another:
        assert not another.is_set


def test_a_second_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", -1.0)
    with signals.stop_on(["SIGTERM"]):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_group_stops_for_the_earliest_signal() -> None:
    received = [signals.ReceivedSignal(2.0, 0, "SIGTERM"), signals.ReceivedSignal(1.0, 1, "SIGINT")]
    assert min(received).state == "interrupted"


def test_stopped_runs_have_their_exit_codes() -> None:
    preempted = signals.stop_error("SIGUSR2", "Fact.")
    interrupted = signals.stop_error("SIGINT", "Fact.")
    assert isinstance(preempted, Preempted)
    assert isinstance(interrupted, Interrupted)
    assert (preempted.exit_code, interrupted.exit_code) == (75, 130)
    assert str(preempted) == "Fact. Run the same command to resume."


def test_the_time_limit_of_a_job_requests_a_stop_as_a_scheduler_s_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, is_over in ((2**39, False), (1, True)):
        monkeypatch.setenv("RECMILL_DEADLINE", str(seconds))
        with signals.stop_on([]) as stop:
            assert stop.is_set == is_over
    received = stop.received_by(0)
    assert received is not None
    assert (received.name, received.state) == ("the time limit", "preempted")
