"""Reads timelines as Perfetto would."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def assert_valid(events: list[dict[str, Any]]) -> None:
    """Perfetto draws only tracks whose events are nested; all processes and threads have names."""
    named = {(e["pid"], e.get("tid", -1)) for e in events if e["ph"] == "M"}
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            by_track[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for track, spans in by_track.items():
        assert track in named, track
        ends: list[float] = []
        for start, negative, name in sorted(spans):
            while ends and ends[-1] <= start + 0.001:  # times have three digits
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 0.001, (track, start, name)
            ends.append(start - negative)
