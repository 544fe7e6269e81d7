"""The recorder with a clock that the test sets, and the files that it writes."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from recmill.observe import recorder as module
from recmill.observe.recorder import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INPUT,
    OTHER,
    PARTS,
    SAVE,
    SPAN,
    SPANS,
    STEP,
    SYNC,
    UPDATE,
    Recorder,
    Thinning,
    rank_files,
)

MS = 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Advance the time by milliseconds, and return it in ns."""
    now = [0]

    def advance(milliseconds: int) -> int:
        now[0] += milliseconds * MS
        return now[0]

    monkeypatch.setattr(module, "_now", lambda: now[0])
    return advance


def take_step(recorder: Recorder, clock: Callable[[int], int]) -> None:
    """Take a step of 30 ms, of which 7 are exchange, and save for 50 ms after it."""
    clock(1)
    recorder.lap(INPUT)
    recorder.exchanged(clock(0), clock(2))
    recorder.lap(SYNC)
    recorder.exchanged(clock(3), clock(4))
    clock(5)
    recorder.lap(FORWARD)
    recorder.exchanged(clock(0), clock(3))
    clock(2)
    recorder.lap(BACKWARD)
    clock(6)
    recorder.lap(UPDATE)
    clock(4)
    recorder.lap(OTHER)
    clock(50)
    recorder.lap(SAVE)
    recorder.end_step()


EXPECTED_MS = [1, 2, 7, 8, 2, 6, 50, 0, 4]  # in the order of PARTS


def test_the_parts_of_a_step_are_disjoint_and_an_exchange_is_no_part_of_forward(clock: Callable[[int], int]) -> None:
    recorder = Recorder()
    recorder.begin(7)
    take_step(recorder, clock)
    assert recorder.latency()["step_ms_p50"] == 30
    spans, steps = recorder.drain()
    assert steps["parts"].tolist() == [pytest.approx([ms / 1000 for ms in EXPECTED_MS])]
    assert (steps["step"].tolist(), steps["steps"].tolist()) == ([8], [1])
    step = spans[spans["name"] == SPANS.index("step")]
    assert (step["duration"].tolist(), step["step"].tolist()) == ([80 * MS], [7])
    assert sum(spans[spans["name"] == EXCHANGE]["duration"]) == 9 * MS, "and that of sync"


def test_the_first_ten_steps_do_not_count_but_their_pauses_do(clock: Callable[[int], int]) -> None:
    recorder = Recorder()
    recorder.begin(0)
    for _ in range(14):
        take_step(recorder, clock)
    clock(9)
    recorder.lap(SAVE)
    recorder.finish()
    assert recorder.steps == 4
    times = [4] * len(PARTS)
    times[SAVE] = 14
    expected = [count * ms for count, ms in zip(times, EXPECTED_MS, strict=True)]
    expected[SAVE] += 9
    assert [ns / MS for ns in recorder.sums] == expected
    assert recorder.counted["seconds"] == pytest.approx((14 * 80 + 9) / 1000)


def test_latencies_are_of_the_steps_since_the_last_report_without_pauses(clock: Callable[[int], int]) -> None:
    recorder = Recorder()
    recorder.begin(0)
    for milliseconds in range(1, 101):
        clock(milliseconds)
        recorder.lap(FORWARD)
        if milliseconds == 100:
            assert recorder.latency() == {"step_ms_p50": 51, "step_ms_p95": 96}
        clock(1000)
        recorder.lap(SAVE)
        recorder.end_step()
    clock(3)
    assert recorder.latency() == {"step_ms_p50": 3, "step_ms_p95": 3}, "the step of the last report counts once"


def test_waits_of_other_threads_are_no_exchange(clock: Callable[[int], int]) -> None:
    recorder = Recorder()
    recorder.begin(0)
    thread = threading.Thread(target=recorder.exchanged, args=(0, clock(5)))
    thread.start()
    thread.join()
    recorder.lap(FORWARD)
    recorder.end_step()
    recorder.count()
    assert recorder.drain()[1]["parts"][0].tolist() == pytest.approx([0, 0, 0, 0.005, 0, 0, 0, 0, 0])


def test_many_waits_in_one_step_are_counted_early_and_give_the_same_parts(
    clock: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MARKS", 2)
    recorder = Recorder()
    recorder.begin(0)
    take_step(recorder, clock)
    for _ in range(10):
        recorder.exchanged(clock(0), clock(1))
    assert len(recorder._marks) < 3
    recorder.lap(FORWARD)
    recorder.count()
    assert recorder.drain()[1]["parts"].tolist() == [pytest.approx([ms / 1000 for ms in EXPECTED_MS])]
    assert recorder._parts[EXCHANGE] == 10 * MS


def test_steps_are_counted_without_a_report_when_half_a_second_has_passed(clock: Callable[[int], int]) -> None:
    recorder = Recorder()
    recorder.begin(0)
    for _ in range(10):  # of 80 ms
        take_step(recorder, clock)
    assert recorder.drain()[1]["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_thinning_keeps_all_then_half_then_a_quarter() -> None:
    thinning = Thinning(4)
    kept = [number for number in range(40) if thinning.keeps()]
    assert kept == [0, 1, 2, 3, 5, 7, 9, 11, 15, 19, 23, 27, 35]


def test_ten_million_steps_take_less_than_50_megabytes() -> None:
    """By the rule of the test above: the records of each stride, until they cover all steps."""

    def records(count: int, events: int) -> int:
        kept, stride = 0, 1
        while events > 0:
            kept += min(count, -(-events // stride))
            events -= count * stride
            stride *= 2
        return kept

    steps = records(module._STEP_RECORDS, 10_000_000) * STEP.itemsize
    spans = records(module._STEPS_WITH_SPANS, 10_000_000) * 40 * SPAN.itemsize
    lines = records(module._COUNTER_LINES, 30 * 24 * 1800) * 600  # of 600 bytes, every 2 s for 30 days
    assert steps + spans + lines < 50e6, (steps, spans, lines)


def test_when_steps_are_thinned_each_record_has_the_sum_of_several(
    clock: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_RECORDS", 3)
    recorder = Recorder()
    recorder.begin(0)
    for _ in range(20):
        take_step(recorder, clock)
    recorder.count()
    steps = recorder.drain()[1]
    assert steps["steps"].tolist() == [1, 1, 1, 2, 2, 2, 4, 4]
    assert steps["step"].tolist() == [1, 2, 3, 5, 7, 9, 13, 17]
    assert steps["parts"][-1].tolist() == pytest.approx([4 * ms / 1000 for ms in EXPECTED_MS])
    assert np.all(np.diff(steps["start"]) == steps["steps"][:-1] * 80 * MS)


def numbers() -> Iterator[int]:
    yield from range(3)


def test_what_is_recorded_is_written_and_can_be_read_with_numpy(tmp_path: Path) -> None:
    recorder = Recorder()
    with recorder.writing(tmp_path, {"rank": 3}):
        recorder.begin(0)
        assert list(recorder.around_next(numbers(), "prepare batch", "prefetch")) == [0, 1, 2]
        with recorder.span("write checkpoint", "saving"):
            pass
        recorder.end_step()
    files = rank_files(tmp_path, 3)
    facts = json.loads(files["facts"].read_text())
    spans = np.fromfile(files["spans"], SPAN)
    assert [(facts["spans"][span["name"]], facts["tracks"][span["track"]]) for span in spans] == [
        ("start-up", "training"),
        *[("prepare batch", "prefetch")] * 3,
        ("write checkpoint", "saving"),
        ("step", "training"),
    ]
    assert np.fromfile(files["steps"], STEP)["step"].tolist() == [1]
    (unix_start, start), (unix_end, end) = facts["clock"]
    assert 0 <= unix_end - unix_start < 60e9
    assert start <= spans["start"][1] <= end
    assert "rss" in json.loads(files["counters"].read_text().splitlines()[0])


def test_a_directory_that_cannot_be_written_gives_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder().writing(tmp_path / "missing", {"rank": 0}):
        pass
    (warning,) = caplog.messages
    assert "missing" in warning
    assert "this run is not recorded any further" in warning
