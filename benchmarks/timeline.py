"""How long `recmill trace` takes, and how much memory, for a million events of three kinds on two ranks."""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from recmill.commands.trace import trace
from recmill.observe.recorder import PARTS, SPAN, SPANS, TRACKS

UNIX = 1_800_000_000 * 10**9


def write_rank(folder: Path, rank: int, events: int) -> None:
    """Write 6 spans to 3 events of DFTracer and one of the profiler."""
    spans = np.zeros(events * 6 // 10, SPAN)
    spans["start"] = np.arange(len(spans)) * 50_000
    spans["duration"] = 40_000
    spans["name"] = np.arange(len(spans)) % 6
    spans["step"] = np.arange(len(spans)) // 6
    spans.tofile(folder / f"rank-{rank}.spans")
    facts = {
        "rank": rank,
        "world_size": 2,
        "host": f"node{rank}",
        "pid": 1,
        "clock": [[UNIX, 0], [UNIX + 10**9, 10**9]],
    }
    facts |= {"offsets": [{"unix_ns": UNIX, "offset_ns": 7, "error_ns": 7}]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts | {"spans": SPANS, "tracks": TRACKS, "parts": PARTS}))
    with (folder / f"dft-{rank}-1-app.pfw").open("w") as file:
        for number in range(events * 3 // 10):
            times = f'"ts":{UNIX // 1000 + 100 * number},"dur":90,"ph":1'
            args = '"args":{"hhash":"6882804a826580cd","ret":4096,"fhash":"28a26355cecf7470"}'
            file.write(f'{{"id":{number},"name":"read","cat":"POSIX","pid":1,"tid":1,{times},{args}}}\n')
    profiled = [
        {
            "ph": "X",
            "name": "aten::mm",
            "cat": "cpu_op",
            "pid": 1,
            "tid": 1,
            "ts": 9.0 * number,
            "dur": 8,
            "args": {"n": 1},
        }
        for number in range(events // 10)
    ]
    text = json.dumps({"traceEvents": profiled, "baseTimeNanoseconds": UNIX}, indent=2)
    (folder / f"kineto-{rank}-50.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "trace" / "0"
        folder.mkdir(parents=True)
        for rank in (0, 1):
            write_rank(folder, rank, options.events // 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        merged = trace(name)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = Path(merged.output).stat().st_size
    megabytes = {
        "peak_mb_before": round(before / 1024),
        "peak_mb": round(peak / 1024),
        "output_mb": round(size / 1e6, 1),
    }
    print(json.dumps({"events": merged.events, "seconds": round(seconds, 2), **megabytes}))


if __name__ == "__main__":
    main()
