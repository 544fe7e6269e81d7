"""Sum up what the ranks of a run recorded. The size of the result does not depend on the length of the run."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recmill.observe.figures import Curve
from recmill.observe.recorder import PARTS, PAUSES, SPAN, STEP, WARM_UP_STEPS, rank_files
from recmill.observe.timeline import Clock, clocks_by_start, json_lines, placed, rates, records

BINS = 60  # stretches of the steps of a run
SHOWN_RANKS = 8  # whose spans and counters are kept: the lowest
_COLUMNS = 1000  # of the timeline of the run
_ZOOM_STEPS = 20
_ZOOM_WINDOWS = 20  # from which one is taken
_SLOWEST = 10
_EDGES = 10.0 ** np.arange(-6, 5.001, 0.02)  # of step times in seconds; 5 % wide
_OF_RUN = ("start-up", "save", "validate", "test")
_HIDDEN = ("step", "start-up", "profile")  # not shown among the parts of steps
_MAX_STEP = 1 << 40
_MAX_SECONDS = 1e8  # longer ones are not what a rank writes


@dataclass
class Start:
    """What is known about one start of the run. Times between starts are left out: `offset` is in seconds of work."""

    offset: float
    seconds: float
    first_step: int | None = None


@dataclass
class Rank:
    """What one rank did after all starts."""

    host: str
    parts: np.ndarray = field(default_factory=lambda: np.zeros((BINS, len(PARTS))))  # seconds; pauses: of all steps
    steps: np.ndarray = field(default_factory=lambda: np.zeros(BINS))  # without the warm-up, like the other parts
    curves: dict[str, Curve] = field(default_factory=dict)  # by time: memory, cores used, disk
    totals: dict[str, float] = field(default_factory=dict)  # cpu_s, read_bytes, write_bytes, peak_rss

    @property
    def seconds_by_part(self) -> dict[str, float]:
        return dict(zip(PARTS, self.parts.sum(axis=0).tolist(), strict=True))


@dataclass
class Recordings:
    starts: list[Start] = field(default_factory=list)
    ranks: dict[int, Rank] = field(default_factory=dict)
    step_times: np.ndarray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1))  # of the first rank, a histogram
    slowest: list[tuple[float, int, str]] = field(default_factory=list)  # seconds, step and its longest part
    run: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # what the first rank did when, as shares
    zoom: dict[tuple[int, str], dict[str, list[tuple[float, float]]]] = field(default_factory=dict)  # (rank, track)
    zoom_steps: tuple[int, int] = (0, 0)
    zoom_seconds: float = 0.0
    saves: dict[int, float] = field(default_factory=dict)  # by step: seconds that training waited
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(start.seconds for start in self.starts)

    def step_seconds(self, quantile: float) -> float | None:
        """Return a quantile of the step times, accurate to 5 %."""
        counts = np.cumsum(self.step_times)
        if not counts[-1]:
            return None
        place = int(np.searchsorted(counts, quantile * counts[-1]))
        return float(_EDGES[min(max(place, 1), len(_EDGES)) - 1])


def read_recordings(trace: Path, last_step: int) -> Recordings | None:
    """Sum up RUN/trace of a run that got to `last_step`; None if it has no recordings."""
    found = Recordings()
    by_start = clocks_by_start(trace, found.notes) if trace.is_dir() else []
    for clocks in by_start:
        begin = min(clock.unix(clock.pairs[0][1]) for clock in clocks)
        seconds = max(0.0, (max(map(_end, clocks)) - begin) / 1e9)
        start = Start(found.seconds, seconds if seconds < _MAX_SECONDS else 0.0)
        found.starts.append(start)
        for clock in sorted(clocks, key=lambda clock: clock.facts["rank"]):
            rank = clock.facts["rank"]
            own = found.ranks.setdefault(rank, Rank(str(clock.facts["host"])))
            _add_steps(found, own, clock, min(max(last_step, 1), _MAX_STEP), rank == min(found.ranks))
            _add_counters(found, own, clock, begin, start.offset, keep=rank < SHOWN_RANKS)
    for start, clocks in zip(found.starts, by_start, strict=True):
        _add_run(found, start, min(clocks, key=lambda clock: clock.facts["rank"]))
    if by_start:
        _zoom_in(found, by_start[-1])
    return found if by_start else None


def _end(clock: Clock) -> int:
    """Return when a rank recorded last; one that was killed did not write when it ended."""
    last = clock.pairs[-1][1]
    for steps in _steps(clock):
        last = max(last, int(steps["start"][-1] + 1e9 * steps["parts"][-1].sum()))
    return clock.unix(last)


def _steps(clock: Clock) -> Iterator[np.ndarray]:
    """Yield the records of steps that a rank can have written."""
    for steps in records(rank_files(clock.folder, clock.facts["rank"])["steps"], STEP):
        parts = steps["parts"]
        is_valid = (np.isfinite(parts) & (parts >= 0) & (parts < _MAX_SECONDS)).all(axis=1)
        is_valid &= np.abs(steps["start"] - clock.pairs[0][1]) < 1e9 * _MAX_SECONDS
        if is_valid.any():
            yield steps[is_valid]


def _add_steps(found: Recordings, own: Rank, clock: Clock, last_step: int, is_first: bool) -> None:
    seen = 0
    for steps in _steps(clock):
        bins = np.minimum(steps["step"].astype(np.int64) * BINS // (last_step + 1), BINS - 1)
        parts = steps["parts"].astype(np.float64)
        is_warm = np.arange(seen, seen + len(steps)) >= WARM_UP_STEPS
        if is_first and not seen:
            found.starts[-1].first_step = int(steps["step"][0] - steps["steps"][0])
        seen += len(steps)
        if is_first:
            for saved in steps[parts[:, PARTS.index("save")] > 0]:
                found.saves[int(saved["step"])] = float(saved["parts"][PARTS.index("save")])
        for pause in PAUSES:
            np.add.at(own.parts[:, pause], bins, parts[:, pause])
        parts[:, PAUSES] = 0
        np.add.at(own.parts, bins[is_warm], parts[is_warm])
        np.add.at(own.steps, bins[is_warm], steps["steps"][is_warm])
        if is_first and is_warm.any():
            _add_times(found, steps[is_warm], parts[is_warm])


def _add_times(found: Recordings, steps: np.ndarray, parts: np.ndarray) -> None:
    seconds = parts.sum(axis=1) / np.maximum(steps["steps"], 1)
    np.add.at(found.step_times, np.searchsorted(_EDGES, seconds), steps["steps"])
    for place in np.argsort(seconds)[-_SLOWEST:].tolist():
        if steps["steps"][place] == 1:
            part = PARTS[int(parts[place].argmax())]
            found.slowest.append((float(seconds[place]), int(steps["step"][place]), part))
    found.slowest = heapq.nlargest(_SLOWEST, found.slowest)


def _add_counters(found: Recordings, own: Rank, clock: Clock, begin: int, offset: float, keep: bool) -> None:
    """Add memory as it is, and CPU time and bytes of the disk as rates between two lines."""
    first: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for read in json_lines(rank_files(clock.folder, clock.facts["rank"])["counters"], found.notes):
        line: dict[str, Any] = {name: value for name, value in read.items() if isinstance(value, int | float)}
        if not isinstance(line.get("clock_ns"), int) or line["clock_ns"] <= before.get("clock_ns", -1):
            continue
        first = first or line
        values = ({"memory": line["rss"] / 1e9} if "rss" in line else {}) | rates(line, before)
        if gpus := read.get("gpus"):
            values["GPU use"] = sum(gpu["percent"] for gpu in gpus) / len(gpus)
        for name, value in values.items() if keep else ():
            at = offset + (clock.unix(line["clock_ns"]) - begin) / 1e9
            own.curves.setdefault(name, Curve()).add(at, value)
        before = line
    for key in ("cpu_s", "read_bytes", "write_bytes"):
        if key in first and key in before:
            own.totals[key] = own.totals.get(key, 0) + before[key] - first[key]
    if "peak_rss" in before:
        own.totals["peak_rss"] = max(own.totals.get("peak_rss", 0), before["peak_rss"])


def _spans(clock: Clock, names: tuple[str, ...] | None = None) -> Iterator[np.ndarray]:
    """Yield the spans of a rank, only those of `names` if given."""
    known = list(clock.facts["spans"])
    wanted = [number for number, name in enumerate(known) if names is None or name in names]
    for spans in records(rank_files(clock.folder, clock.facts["rank"])["spans"], SPAN):
        is_valid = np.isin(spans["name"], wanted) & (spans["track"] < len(clock.facts["tracks"]))
        is_valid &= (spans["duration"] >= 0) & (spans["duration"] < 1e9 * _MAX_SECONDS)
        if is_valid.any():
            yield spans[is_valid]


def _add_run(found: Recordings, start: Start, clock: Clock) -> None:
    """Add when the first rank started up, trained, validated, saved and tested, merged where a screen shows no more."""
    origin = clock.unix(clock.pairs[0][1])
    total = max(found.seconds, 1e-9)

    def add(name: str, starts_ns: np.ndarray, durations_ns: np.ndarray) -> None:
        begins, lengths = placed(clock, starts_ns, durations_ns, origin)
        left = (start.offset + begins / 1e6) / total
        right = (start.offset + (begins + lengths) / 1e6) / total
        columns = np.stack([np.floor(left * _COLUMNS), np.ceil(right * _COLUMNS)], axis=1).clip(0, _COLUMNS)
        boxes = set(map(tuple, (np.unique(columns, axis=0) / _COLUMNS).tolist()))
        found.run[name] = sorted({*found.run.get(name, []), *boxes})

    first, last = None, 0
    for steps in _steps(clock):
        first = int(steps["start"][0]) if first is None else first
        last = int(steps["start"][-1] + 1e9 * steps["parts"][-1].sum())
    if first is not None:
        add("training", np.array([first]), np.array([last - first]))
    for spans in _spans(clock, _OF_RUN):
        for name in _OF_RUN:
            own = spans[spans["name"] == clock.facts["spans"].index(name)]
            if len(own):
                add(name, own["start"], own["duration"])


def _zoom_in(found: Recordings, clocks: list[Clock]) -> None:
    """Add the spans of a few typical steps, of the lowest ranks, on the clock of rank 0."""
    first = min(clocks, key=lambda clock: clock.facts["rank"])
    steps = {}
    for spans in _spans(first, ("step",)):
        for span in spans[: _ZOOM_STEPS * (_ZOOM_WINDOWS + 1)]:
            steps[int(span["step"])] = (int(span["start"]), int(span["start"] + span["duration"]))
        break
    numbers = sorted(steps)[min(WARM_UP_STEPS, len(steps) // 2) :]
    windows = [numbers[at : at + _ZOOM_STEPS] for at in range(0, len(numbers), _ZOOM_STEPS)]
    windows = [window for window in windows if len(window) == _ZOOM_STEPS] or windows
    windows = [window for window in windows if window[-1] - window[0] == len(window) - 1]  # without gaps
    if not windows:
        return
    by_length = sorted(windows, key=lambda window: steps[window[-1]][1] - steps[window[0]][0])
    window = by_length[(len(by_length) - 1) // 4]  # the longer ones may hold a validation
    low, high = steps[window[0]][0], steps[window[-1]][1]
    origin = first.unix(low)
    length = max(first.unix(high) - origin, 1) / 1e3
    found.zoom_steps, found.zoom_seconds = (window[0] + 1, window[-1] + 1), length / 1e6
    for clock in sorted(clocks, key=lambda clock: clock.facts["rank"]):
        if clock.facts["rank"] < SHOWN_RANKS:
            _add_zoom(found, clock, origin, length)


def _add_zoom(found: Recordings, clock: Clock, origin: int, length: float) -> None:
    names, tracks = clock.facts["spans"], clock.facts["tracks"]
    for spans in _spans(clock):
        starts, durations = placed(clock, spans["start"], spans["duration"], origin)
        left, right = (starts / length).clip(0, 1), ((starts + durations) / length).clip(0, 1)
        inside = np.flatnonzero(right > left)[:5000]
        for place in inside.tolist():
            name, track = names[spans["name"][place]], tracks[spans["track"][place]]
            if name not in _HIDDEN:
                lane = found.zoom.setdefault((clock.facts["rank"], track), {})
                lane.setdefault(name, []).append((float(left[place]), float(right[place])))
