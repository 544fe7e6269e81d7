"""Measure `recmill prepare goodreads` beside plain Polars with everything in memory: interactions per second, memory.

Both turn the same generated file of Goodreads' shape (no times; rows grouped by user) into items.npy and offsets.npy,
each in its own process. Polars checks no row and drops no repeats, which is in its favour.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIN_INTERACTIONS, MAX_INTERACTIONS = 20, 400


def write_rows(path: Path, rows: int) -> None:
    """Write interactions: 260 per user on average; a few books are popular, most are not."""
    import numpy as np
    import polars as pl

    with path.open("wb") as file:
        for start in range(0, rows, 5_000_000):
            count = min(5_000_000, rows - start)
            generator = np.random.default_rng(start)
            columns = {
                "user_id": (start + np.sort(generator.integers(0, count, count))) // 260,
                "book_id": (2_360_000 * generator.random(count) ** 3).astype(np.int64),
                "is_read": generator.integers(0, 2, count),
                "rating": generator.integers(0, 6, count),
                "is_reviewed": generator.integers(0, 2, count),
            }
            pl.DataFrame(columns).write_csv(file, include_header=start == 0)


def plain_polars(raw: Path, output: Path) -> None:
    import numpy as np
    import polars as pl

    count = pl.len().over("user_id")
    frame = pl.read_csv(raw, columns=["user_id", "book_id"]).filter(
        count.is_between(MIN_INTERACTIONS, MAX_INTERACTIONS)
    )
    frame = frame.sort("user_id", maintain_order=True).select("user_id", item=pl.col("book_id").rank("dense"))
    lengths = frame.group_by("user_id", maintain_order=True).len()["len"].to_numpy()
    output.mkdir()
    np.save(output / "items.npy", frame["item"].to_numpy().astype(np.int32))
    np.save(output / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))


def measured(command: list[str], rows: int) -> dict[str, float]:
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    assert status == 0, command
    peak = usage.ru_maxrss / 1e3
    return {"seconds": round(seconds, 2), "rows_per_second": round(rows / seconds), "peak_mb": round(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--plain-polars", nargs=2, type=Path, metavar=("RAW", "OUTPUT"), help="run as this contender")
    options = parser.parse_args()
    if options.plain_polars:
        plain_polars(*options.plain_polars)
        return
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "goodreads_interactions.csv"
        write_rows(raw, options.rows)
        limits = ["--min-interactions", str(MIN_INTERACTIONS), "--max-interactions", str(MAX_INTERACTIONS)]
        prepare = [sys.executable, "-m", "recmill", "prepare", "goodreads", "--input", str(raw), *limits]
        ours = measured([*prepare, "--output", f"{directory}/ours"], options.rows)
        peer = measured([sys.executable, __file__, "--plain-polars", str(raw), f"{directory}/polars"], options.rows)
        print(f"ours:         {ours}\nplain polars: {peer}")
        print(json.dumps({"rows": options.rows, "bytes": raw.stat().st_size, "ours": ours, "plain_polars": peer}))


if __name__ == "__main__":
    main()
