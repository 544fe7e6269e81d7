"""Timelines of recordings that the test wrote. Real runs: tests/distributed/test_observing.py."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.commands.trace import trace
from recmill.errors import ConfigError, DataError
from recmill.observe.recorder import PARTS, SPAN, SPANS, STEP, TRACKS

from ..timelines import assert_valid, events_of

MS = 1_000_000
UNIX = 1_800_000_000 * 10**9


def write_rank(folder: Path, rank: int, shift_ns: int = 0, offsets: Any = None, **facts: Any) -> None:
    """Record 3 steps of 10 ms that begin 100 ms after the recording, on a clock that is ahead by `shift_ns`."""
    folder.mkdir(parents=True, exist_ok=True)
    boot = (rank + 1) * 10**12  # of the clock of spans
    spans = []
    for step in range(3):
        start = boot + (100 + 10 * step) * MS
        spans.append((start, 4 * MS, step, SPANS.index("input"), 0))
        spans.append((start + 4 * MS, 6 * MS, step, SPANS.index("forward"), 0))
        spans.append((start + 5 * MS, MS, step, SPANS.index("exchange"), 0))
        spans.append((start, 10 * MS, step, SPANS.index("step"), 0))
    spans.append((boot + 101 * MS, 20 * MS, -1, SPANS.index("prepare batch"), 1))
    np.array(spans, SPAN).tofile(folder / f"rank-{rank}.spans")
    parts: tuple[float, ...] = (0.004, 0, 0.001, 0.005, 0, 0, 0, 0, 0)
    steps = [(boot + (100 + 10 * step) * MS, step + 1, 1, parts) for step in range(3)]
    steps.append((boot + 130 * MS, 5, 2, tuple(2 * part for part in parts)))
    np.array(steps, STEP).tofile(folder / f"rank-{rank}.steps")
    lines = [{"unix_ns": UNIX, "clock_ns": boot + s * 10**9, "rss": 5e6, "cpu_s": 1.5 * s} for s in range(2)]
    (folder / f"rank-{rank}.counters.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"cut')
    begin = UNIX + shift_ns
    described = {"rank": rank, "world_size": 2, "host": f"n{rank}", "pid": 1, "parts": PARTS, "spans": SPANS}
    described |= {"tracks": TRACKS, "clock": [[begin, boot], [begin + 10**9, boot + 10**9]]}
    offset = {"unix_ns": begin, "offset_ns": -shift_ns, "error_ns": 20_000}
    described |= {"offsets": [offset] if offsets is None else offsets}
    (folder / f"rank-{rank}.json").write_text(json.dumps(described | facts))


def steps_of(events: list[dict[str, Any]], rank: int) -> list[float]:
    return [e["ts"] for e in events if e["name"] == "step" and e["pid"] == rank and e["tid"] == 1]


def test_spans_steps_and_counters_of_all_ranks_meet_on_one_clock(tmp_path: Path) -> None:
    write_rank(tmp_path / "trace/0", 0)
    write_rank(tmp_path / "trace/0", 1, shift_ns=123 * MS)
    merged = trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    assert_valid(events)
    assert steps_of(events, 0) == steps_of(events, 1) == [100_000, 110_000, 120_000]
    assert (merged.ranks, merged.clock_error_us, merged.clocks_apart_us) == (2, 20, 123_000)
    assert merged.events == len([event for event in events if event["ph"] != "M"])
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 on n0", "rank 1 on n1"]
    (block,) = [e for e in events if e["name"] == "step" and e["pid"] == 0 and e["tid"] != 1]
    assert (block["ts"], block["dur"], block["args"]["steps"], block["args"]["forward_ms"]) == (130_000, 20_000, 2, 10)
    (cores,) = [e["args"]["value"] for e in events if e["name"] == "cores used" and e["pid"] == 1]
    assert cores == 1.5


def test_a_clock_that_drifts_is_corrected_between_two_measurements(tmp_path: Path) -> None:
    drift = [
        {"unix_ns": UNIX, "offset_ns": 0, "error_ns": 1000},
        {"unix_ns": UNIX + 200 * MS, "offset_ns": 2 * MS, "error_ns": 1000},
    ]
    write_rank(tmp_path / "trace/0", 0)
    write_rank(tmp_path / "trace/0", 1, offsets=drift)
    trace(tmp_path)
    assert steps_of(events_of(tmp_path / "trace.json.gz"), 1) == pytest.approx([101_000, 111_100, 121_200])


def test_spans_of_a_clock_that_is_slowed_down_stay_nested(tmp_path: Path) -> None:
    """One that runs 1 % too fast: where only starts moved, each step would overlap the next."""
    drift = [{"unix_ns": UNIX + t * MS, "offset_ns": -t * MS // 100, "error_ns": 1000} for t in (0, 200)]
    write_rank(tmp_path / "trace/0", 0)
    write_rank(tmp_path / "trace/0", 1, offsets=drift)
    trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    assert_valid(events)
    assert steps_of(events, 1) == pytest.approx([99_000, 108_900, 118_800])


def test_what_is_missing_or_broken_is_noted_and_the_rest_is_merged(tmp_path: Path) -> None:
    write_rank(tmp_path / "trace/0", 0, clock=[[UNIX, 10**12]])  # killed
    write_rank(tmp_path / "trace/1", 0, clock=[[UNIX, 10**12], [UNIX - 3600 * 10**9, 10**12 + 10**9]])  # set back
    write_rank(tmp_path / "trace/1", 1, offsets=[None])
    (tmp_path / "trace/1/rank-1.spans").write_bytes((tmp_path / "trace/1/rank-1.spans").read_bytes()[:-5])
    (tmp_path / "trace/2").mkdir()
    (tmp_path / "trace/2/rank-0.json").write_text('{"rank": ')
    merged = trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    assert len(steps_of(events, 0)) == 6
    assert len([e for e in events if e["pid"] == 1 and e["name"] == "prepare batch"]) == 0, "it was cut"
    notes = "\n".join(merged.notes)
    for fact in (
        "trace/0/rank-0.json: its process was killed",
        "trace/0: nothing of rank 1",
        "the clock was set by -3,601,000 ms",
        "trace/2/rank-0.json: not readable",
        "the clocks of the ranks were not compared",
        "an incomplete line is left out",
    ):
        assert fact in notes
    assert merged.clock_error_us is None


def test_a_window_of_the_profiler_and_file_operations_get_tracks_of_their_own(tmp_path: Path) -> None:
    write_rank(tmp_path / "trace/0", 0, world_size=1)
    profiled = [{"ph": "X", "pid": 7, "tid": 7, "name": "aten::mm", "cat": "op", "ts": 105_000.25, "dur": 3}]
    profiled += [{"ph": "X", "pid": 7, "tid": 8, "name": "gloo:all_to_all", "cat": "op", "ts": 105_001.0, "dur": 3}]
    kineto = {"schemaVersion": 1, "traceEvents": profiled * 3000, "baseTimeNanoseconds": UNIX}
    with gzip.open(tmp_path / "trace/0/kineto-0-50.json.gz", "wt") as file:
        json.dump(kineto, file, indent=2)
    pfw = [
        {"name": "FH", "cat": "dftracer", "ph": 4, "args": {"name": "/data/x", "value": "abc"}},
        {
            "name": "read",
            "cat": "POSIX",
            "tid": 5,
            "ts": UNIX // 1000 + 106_000,
            "dur": 4,
            "ph": 1,
            "args": {"fhash": "abc"},
        },
    ]
    (tmp_path / "trace/0/dft-0-1f2e-app.pfw").write_text("\n".join(map(json.dumps, pfw)))
    trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    assert_valid(events[:100])
    products = [e for e in events if e["name"] == "aten::mm"]
    assert len(products) == 3000
    assert products[0]["ts"] == 105_000.25
    shown = ("aten::mm", "gloo:all_to_all", "step", "read")
    assert {e["tid"] for e in events if e["name"] in shown} == {1, 9, 20, 100, 101}
    (read,) = [e for e in events if e["name"] == "read"]
    assert (read["ts"], read["args"]["file"]) == (106_000, "/data/x")


def test_both_formats_of_dftracer_are_merged_compressed_or_not(tmp_path: Path) -> None:
    old = [
        "[",
        '{"id":0,"name":"HH","cat":"dftracer","pid":9,"tid":9,"ph":"M","args":{"name":"x3001","value":"1a"}}',
        '{"id":1,"name":"forward","cat":"pipeline","pid":9,"tid":9,"ts":1000500,"dur":20,"ph":"X","args":{"hhash":"1a"}}',
        '{"id":2,"name":"affinity","cat":"PR","pid":9,"tid":9,"ts":1000600,"dur":0,"ph":"X","args":{"cores":[0, 1]}}',
        '{"id":3,"name":"read","cat":"POSIX","pid":9,"tid":9,"ts":10',
    ]
    (tmp_path / "trace-old-app.pfw").write_text("\n".join(old))
    new = (
        '{"name":"HH","cat":"dftracer","type":1,"pid":8,"tid":8,"ph":4,"args":{"name":"x3002","value":"2b"}}\n'
        '{"id":2,"name":"open64","cat":"POSIX","type":3,"pid":8,"tid":8,"ts":1000400,"dur":7,"ph":1,"args":{"ret":3}}\n'
    )
    packed = gzip.compress(new.encode() * 50)
    (tmp_path / "trace-new-app.pfw.gz").write_bytes(packed[: len(packed) - 9])  # killed before the end
    merged = trace(source=str(tmp_path), output=tmp_path / "merged.json.gz")
    events = events_of(tmp_path / "merged.json.gz")
    complete = {(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert complete == {("forward", 100, 20), ("affinity", 200, 0), ("open64", 0, 7)}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "trace-old-app on x3001",
        "trace-new-app on x3002",
    }
    assert any("incomplete line" in note for note in merged.notes)
    assert any("not complete" in note for note in merged.notes)


def test_directories_without_recordings_are_errors(tmp_path: Path) -> None:
    for run, source, kind, words in (
        (tmp_path, None, DataError, "nothing was recorded here"),
        (tmp_path / "x", None, DataError, "is not a directory"),
        (None, str(tmp_path), DataError, r"no \.pfw"),
        (None, None, ConfigError, "Name a run"),
    ):
        with pytest.raises(kind, match=words):
            trace(run, source=source)
    (tmp_path / "trace/0").mkdir(parents=True)
    with pytest.raises(DataError, match="no recordings"):
        trace(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]
