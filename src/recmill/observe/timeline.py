"""Merge what all ranks of a run recorded into one file that Perfetto and chrome://tracing open.

Sources: our spans, steps and counters; windows of torch's profiler (Kineto); file operations recorded by DFTracer.
Events are written as they are read, so memory does not depend on their number.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from recmill.errors import DataError
from recmill.files.reading import read_json
from recmill.observe.recorder import SPAN, STEP, rank_files

_LEVEL = 1  # of compression: half as large again as the best, in a fifth of the time
_CHUNK = 1 << 20
_EVENTS_PER_WRITE = 5000
_MANY_EVENTS = 2_000_000
_SET_NS = 1_000_000  # a clock that moved by more than this against the monotonic one was set
_STEPS_TRACK = 9
_FILES_TRACK = 20
_PROFILER_TRACK = 100
_START = re.compile(r'"traceEvents"\s*:\s*\[')
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
_RATES = {"cores used": ("cpu_s", 1.0), "disk read": ("read_bytes", 1e6), "disk written": ("write_bytes", 1e6)}
_BROKEN = (EOFError, OSError, zlib.error, ValueError)
Times = TypeVar("Times", int, np.ndarray)


@dataclass
class Merged:
    output: str
    events: int = 0
    ranks: int = 0
    starts: int = 0  # of the run: 2 if it was resumed once
    clock_error_us: float | None = None  # how far apart events of different ranks may be; None: not measured
    clocks_apart_us: float | None = None  # how far they were before the alignment
    notes: list[str] = field(default_factory=list)


def merge_run(trace: Path, output: Path, partial: Path) -> Merged:
    """Merge the recordings in RUN/trace. `partial`: the file to write instead of `output`, which replaces it later."""
    merged = Merged(str(output))
    starts = clocks_by_start(trace, merged.notes)
    merged.starts = len(starts)
    clocks = [clock for found in starts for clock in found]
    if not clocks:
        raise DataError(f"{trace}: no recordings. Train with observe.record = true, Recmill's default.")
    merged.ranks = len({clock.facts["rank"] for clock in clocks})
    errors = [clock.error_ns for clock in clocks]
    if None not in errors:
        merged.clock_error_us = max(filter(None, errors), default=0) / 1e3
        offsets = [clock.offset(clock.pairs[0][0]) for clock in clocks]
        merged.clocks_apart_us = (max(offsets) - min(offsets)) / 1e3
    else:
        merged.notes.append("the clocks of the ranks were not compared: events of different hosts may be shifted")
    begin = min(clock.unix(clock.pairs[0][1]) for clock in clocks)
    metadata = {"start_unix_ns": begin, "clock_error_us": merged.clock_error_us}
    with _File(partial, metadata, merged) as file:
        for clock in clocks:
            _write_rank(clock, begin, file, merged)
    if merged.events > _MANY_EVENTS:
        merged.notes.append(f"{merged.events:,} events: a browser may need several GB of memory to show them")
    return merged


def clocks_by_start(trace: Path, notes: list[str]) -> "list[list[Clock]]":
    """Return the clocks of the ranks after each start that was recorded, and add to `notes` what is missing."""
    by_start = []
    numbered = sorted((path for path in trace.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    for start in numbered:
        found = [clock for path in sorted(start.glob("rank-*.json")) if (clock := _clock_of(path, notes))]
        sizes = {clock.facts["world_size"] for clock in found}
        missing = sorted(set(range(max(sizes, default=0))) - {clock.facts["rank"] for clock in found})
        if missing:
            notes.append(f"{start}: nothing of rank {', '.join(map(str, missing))}: it is left out")
        by_start += [found] if found else []
    return by_start


def merge_dftracer(folder: Path, output: Path, partial: Path) -> Merged:
    """Merge the .pfw and .pfw.gz files in `folder`, each of one process, as DFTracer wrote them."""
    merged = Merged(str(output))
    files = sorted(path for path in folder.rglob("*.pfw*") if path.name.endswith((".pfw", ".pfw.gz")))
    if not files:
        raise DataError(f"{folder}: no .pfw or .pfw.gz file of DFTracer. Name the directory that holds them.")
    begin = min((ts for file in files if (ts := _first_time(file)) is not None), default=0)
    with _File(partial, {"start_unix_ns": begin * 1000}, merged) as writer:
        for number, file in enumerate(files):
            names = _Tracks(number, 1, writer)
            host = ""
            for event in _pfw_events(file, merged):
                if event["name"] == "HH":
                    host = host or str(event["args"].get("name", ""))
                    writer.name_process(number, f"{file.name.split('.')[0]} on {host}")
                elif "ts" in event:
                    tid = names.of(event.get("tid", 0), f"thread {event.get('tid', 0)}")
                    writer.add(_complete(event["name"], event["cat"], number, tid, event["ts"] - begin, event))
    merged.ranks = len(files)
    return merged


class Clock:
    """Converts the times of one rank to ns since 1970 on rank 0's clock."""

    def __init__(self, facts: dict[str, Any], folder: Path) -> None:
        self.facts = facts
        self.folder = folder
        self.pairs: list[list[int]] = facts["clock"]
        self.offsets = [offset for offset in facts.get("offsets", []) if offset]
        (unix, clock), (unix_end, clock_end) = self.pairs[0], self.pairs[-1]
        self.set_by_ns = (unix_end - unix) - (clock_end - clock)
        if abs(self.set_by_ns) > _SET_NS:
            self.offsets = self.offsets[:1]  # the later ones are of another clock
        self.error_ns = max((offset["error_ns"] for offset in self.offsets), default=None)

    def unix(self, clock_ns: Times) -> Times:
        """Return the aligned time of a span."""
        return self.aligned(self.pairs[0][0] + clock_ns - self.pairs[0][1])

    def aligned(self, unix_ns: Times) -> Times:
        return unix_ns + self.offset(unix_ns)

    def offset(self, unix_ns: Times) -> Times:
        """Return what to add to a time of this rank; clocks drift linearly between two measurements."""
        if not self.offsets:
            return unix_ns * 0
        times, offsets = zip(*((offset["unix_ns"], offset["offset_ns"]) for offset in self.offsets), strict=True)
        found = np.rint(np.interp(unix_ns, times, offsets))
        return np.asarray(found, np.int64) if isinstance(unix_ns, np.ndarray) else int(found)


def _clock_of(path: Path, notes: list[str]) -> Clock | None:
    """Open what a rank recorded, unless its description is not readable."""
    try:
        clock = Clock(read_json(path), path.parent)
        known = {"rank": int, "world_size": int, "host": str, "parts": list, "spans": list, "tracks": list}
        if not all(isinstance(clock.facts[name], kind) for name, kind in known.items()):
            raise ValueError
        clock.unix(np.array(clock.pairs[0][1:], np.int64))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, OSError):
        notes.append(f"{path}: not readable, so this rank is left out")
        return None
    if abs(clock.set_by_ns) > _SET_NS:
        moved = clock.set_by_ns / 1e6
        notes.append(f"{path}: the clock was set by {moved:+,.0f} ms meanwhile; the time of the start is used")
    if len(clock.pairs) == 1:
        notes.append(f"{path}: its process was killed; the last seconds are missing")
    return clock


class _File:
    """Writes events as one gzip-compressed JSON file."""

    def __init__(self, path: Path, metadata: dict[str, Any], merged: Merged) -> None:
        self._file = gzip.open(path, "wt", _LEVEL, encoding="utf-8")  # noqa: SIM115 - closed in __exit__
        self._merged = merged
        self._buffer: list[str] = []
        self._named: set[tuple[int, int]] = set()
        self._file.write(f'{{"displayTimeUnit":"ms","metadata":{json.dumps(metadata)},"traceEvents":[\n')
        self._separator = ""

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *exception: object) -> None:
        self._flush()
        self._file.write("\n]}\n")
        self._file.close()

    def add(self, event: str) -> None:
        self._buffer.append(event)
        self._merged.events += 1
        if len(self._buffer) >= _EVENTS_PER_WRITE:
            self._flush()

    def name_process(self, pid: int, name: str) -> None:
        self._name(pid, -1, {"name": "process_name", "args": {"name": name}})
        self._name(pid, -2, {"name": "process_sort_index", "args": {"sort_index": pid}})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        self._name(pid, tid, {"name": "thread_name", "tid": tid, "args": {"name": name}})

    def _name(self, pid: int, tid: int, event: dict[str, Any]) -> None:
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._buffer.append(json.dumps({"ph": "M", "pid": pid, **event}))

    def _flush(self) -> None:
        if self._buffer:
            self._file.write(self._separator + ",\n".join(self._buffer))
            self._separator = ",\n"
            self._buffer.clear()


class _Tracks:
    """Small numbers for the threads of a source: those of the system repeat on other hosts."""

    def __init__(self, pid: int, first: int, file: _File) -> None:
        self._pid, self._first, self._file = pid, first, file
        self._numbers: dict[Any, int] = {}

    def of(self, thread: Any, name: str) -> int:
        if thread not in self._numbers:
            self._numbers[thread] = self._first + len(self._numbers)
            self._file.name_thread(self._pid, self._numbers[thread], name)
        return self._numbers[thread]


def _write_rank(clock: Clock, begin: int, file: _File, merged: Merged) -> None:
    rank = clock.facts["rank"]
    file.name_process(rank, f"rank {rank} on {clock.facts['host']}")
    files = rank_files(clock.folder, rank)
    _write_spans(clock, begin, files, file)
    _write_counters(clock, begin, files["counters"], file, merged)
    for path in sorted(clock.folder.glob(f"kineto-{rank}-*.json*")):
        _write_kineto(clock, begin, path, file, merged)
    prefix = Path(clock.facts.get("files_log") or clock.folder / f"dft-{rank}")
    tracks = _Tracks(rank, _FILES_TRACK, file)
    for path in sorted(prefix.parent.glob(f"{prefix.name}-*.pfw*")) if prefix.parent.is_dir() else []:
        hashes: dict[str, str] = {}
        for event in _pfw_events(path, merged):
            if event["name"] == "FH":
                hashes[str(event["args"].get("value"))] = str(event["args"].get("name"))
            elif "ts" in event and event["cat"] in ("POSIX", "STDIO"):
                event["args"]["file"] = hashes.get(str(event["args"].get("fhash")), "")
                tid = tracks.of(event.get("tid", 0), f"files {len(hashes)}")
                ts = (clock.aligned(event["ts"] * 1000) - begin) / 1000
                file.add(_complete(event["name"], event["cat"], rank, tid, ts, event))


def _write_spans(clock: Clock, begin: int, files: dict[str, Path], file: _File) -> None:
    rank, names, tracks = clock.facts["rank"], clock.facts["spans"], clock.facts["tracks"]
    for number, track in enumerate(tracks, 1):
        file.name_thread(rank, number, track)
    heads = [f'{{"ph":"X","pid":{rank},"name":{json.dumps(name)},"cat":"recmill"' for name in names]
    with_spans: set[int] = set()
    step_name = names.index("step")
    for spans in records(files["spans"], SPAN):
        starts, durations = placed(clock, spans["start"], spans["duration"], begin)
        columns = (starts, durations, spans["step"], spans["name"], spans["track"])
        for start, duration, step, name, track in zip(*(column.tolist() for column in columns), strict=True):
            args = f',"args":{{"step":{step + 1}}}' if step >= 0 else ""
            file.add(f'{heads[name]},"tid":{track + 1},"ts":{start:.3f},"dur":{duration:.3f}{args}}}')
            if name == step_name:
                with_spans.add(step + 1)
    _write_steps(clock, begin, files["steps"], with_spans, file)


def _write_steps(clock: Clock, begin: int, path: Path, with_spans: set[int], file: _File) -> None:
    """Write the steps of which no spans were kept; a record may be of several."""
    rank, parts = clock.facts["rank"], clock.facts["parts"]
    for steps in records(path, STEP):
        spent_ns = (1e9 * steps["parts"].sum(axis=1, dtype=np.float64)).astype(np.int64)
        starts, durations = placed(clock, steps["start"], spent_ns, begin)
        columns = (starts, durations, steps["step"], steps["steps"], steps["parts"])
        for start, duration, step, count, seconds in zip(*(column.tolist() for column in columns), strict=True):
            if count == 1 and step in with_spans:
                continue
            file.name_thread(rank, _STEPS_TRACK, "steps")
            args: dict[str, float] = {"step": step, "steps": count}
            args |= {f"{part}_ms": round(1e3 * spent, 3) for part, spent in zip(parts, seconds, strict=True)}
            file.add(
                f'{{"ph":"X","pid":{rank},"tid":{_STEPS_TRACK},"name":"step","cat":"recmill","ts":{start:.3f},'
                f'"dur":{duration:.3f},"args":{json.dumps(args)}}}'
            )


def placed(clock: Clock, starts_ns: np.ndarray, durations_ns: np.ndarray, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Return when spans start after `begin`, and how long they take, in us. Ends drift like starts: none overlap."""
    starts, ends = clock.unix(starts_ns), clock.unix(starts_ns + durations_ns.astype(np.int64))
    return (starts - begin) / 1000, (ends - starts) / 1000


def records(path: Path, dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    """Yield the complete records of a file in blocks."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while block := file.read(65536 * dtype.itemsize):
            yield np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype)


def _write_counters(clock: Clock, begin: int, path: Path, file: _File, merged: Merged) -> None:
    """Write memory as it is, and CPU time and bytes of the disk as rates between two lines."""
    before: dict[str, Any] = {}
    names = {"cores used": "cores used", "disk read": "disk read MB/s", "disk written": "disk write MB/s"}
    for line in json_lines(path, merged.notes):
        ts = (clock.unix(line["clock_ns"]) - begin) / 1000
        values = {"memory MB": line["rss"] / 1e6} if "rss" in line else {}
        for name, value in (values | {names[name]: rate for name, rate in rates(line, before).items()}).items():
            facts = {"ph": "C", "pid": clock.facts["rank"], "name": name, "ts": round(ts, 3)}
            file.add(json.dumps(facts | {"args": {"value": round(value, 3)}}))
        before = line


def rates(line: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Return the rates between two lines of counters: cores, and MB/s of the disk."""
    seconds = (line["clock_ns"] - before.get("clock_ns", line["clock_ns"])) / 1e9
    return {
        name: (line[key] - before[key]) / seconds / unit
        for name, (key, unit) in _RATES.items()
        if seconds > 0 and key in line and key in before
    }


def json_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one on each line, without incomplete ones; .gz or plain."""
    if not path.is_file():
        return
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            for line in file:
                text = line.strip().rstrip(",")
                if text.startswith("{"):
                    try:
                        yield json.loads(text)
                    except ValueError:
                        notes.append(f"{path}: an incomplete line is left out")
    except (EOFError, OSError, zlib.error) as error:
        notes.append(f"{path}: not complete ({error}); what precedes is used")


def _pfw_events(path: Path, merged: Merged) -> Iterator[dict[str, Any]]:
    """Yield the events of DFTracer 2.1 (phases X and M) and 2.2 (phases 1 and 4)."""
    for event in json_lines(path, merged.notes):
        if isinstance(event.get("args", {}), dict) and "name" in event:
            yield {"cat": "", **event, "args": event.get("args", {})}


def _first_time(path: Path) -> int | None:
    """Return the earliest time among the first events of a file: threads do not write in order."""
    events = _pfw_events(path, Merged(""))
    times = [event["ts"] for _, event in zip(range(1000), events, strict=False) if "ts" in event]
    return min(times, default=None)


def _complete(name: str, category: str, pid: int, tid: int, ts: float, event: dict[str, Any]) -> str:
    facts = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": ts, "dur": event.get("dur", 0)}
    return json.dumps(facts | {"args": event["args"]})


def _write_kineto(clock: Clock, begin: int, path: Path, file: _File, merged: Merged) -> None:
    """Write the complete events of a window of torch's profiler; each of its threads is a track."""
    rank = clock.facts["rank"]
    try:
        base = next((int(found[1]) for text in _texts(path) if (found := _BASE.search(text))), 0)
        tracks = _Tracks(rank, _PROFILER_TRACK, file)
        shift: int | None = None  # one for all events, which stay nested: the window is short
        for event in _trace_events(path):
            if event.get("ph") == "X" and isinstance(event.get("ts"), int | float):
                thread = (event.get("pid"), event.get("tid"))
                tid = tracks.of(thread, f"profiler {event.get('tid')}")
                unix_ns = base + round(event["ts"] * 1000)
                shift = clock.offset(unix_ns) - begin if shift is None else shift
                ts = (unix_ns + shift) / 1000
                facts = {"args": event.get("args", {}), "dur": event.get("dur", 0)}
                file.add(_complete(event.get("name", ""), event.get("cat", ""), rank, tid, ts, facts))
    except _BROKEN as error:
        merged.notes.append(f"{path}: not complete ({error}); what precedes is used")


def _texts(path: Path) -> Iterator[str]:
    """Yield a file in chunks that overlap by 100 characters, so that no short pattern is cut."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    rest = ""
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        while text := file.read(_CHUNK):
            yield rest + text
            rest = text[-100:]


def _trace_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the elements of "traceEvents" of a JSON object without reading all of it at once."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    decoder = json.JSONDecoder()
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        text = ""
        while not (found := _START.search(text)):
            if not (more := file.read(_CHUNK)):
                raise ValueError("it holds no traceEvents")
            text += more
        text, at = text[found.end() :], 0
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if at < len(text) and text[at] == "]":
                return
            try:
                event, at = decoder.raw_decode(text, at)
            except ValueError:
                if not (more := file.read(_CHUNK)):
                    raise
                text, at = text[at:] + more, 0
                continue
            yield event
