"""Measure rows per second of our loader and TorchRec's alone: batches of a click log from files, without training.

Both read the same npy files, memory-mapped and in the page cache, in one process. TorchRec's loader has no global
shuffling from files and does not read Parquet.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from criteo_rows import write_days

from recmill import prepare
from recmill.data.clicks import ClickSource
from recmill.data.opening import open_dataset
from recmill.data.share import Batching

BATCH_SIZE = 4096


def ours(path: Path, order: str) -> Callable[[], Iterator[int]]:
    """One source for all epochs, as in training: it keeps the newest decoded Parquet blocks."""
    batching = Batching(order, seed=1, train_batch_size=BATCH_SIZE, eval_batch_size=BATCH_SIZE, rank=0, size=1)
    source = ClickSource(open_dataset(path), batching)
    return lambda: (len(batch.labels_B) for batch in source.train_batches(0, 0))


def torchrec(path: Path) -> Iterator[int]:
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    description: Any = open_dataset(path).description
    files = [[str(path / name)] for name in description.day_files("day_0")]
    rows = [feature.rows for feature in description.sparse]
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *files, BATCH_SIZE, 0, 1, mmap_mode=True, hashes=rows)
    yield from (len(batch.labels) for batch in pipe)


def rows_per_s(batches: Callable[[], Iterator[int]], repeats: int) -> float:
    best = 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        rows = sum(batches())
        best = max(best, rows / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, float] = {"rows": options.rows}
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        raw.mkdir()
        write_days(raw, options.rows, days=1)
        for layout in ("npy", "parquet"):
            path = Path(folder) / layout
            prepare("criteo", path, input=str(raw), source="1tb", format=layout, val_fraction=0.01)
            for order in ("file", "shuffled"):
                rate = rows_per_s(ours(path, order), options.repeats)
                result[f"{layout}_{order}_rows_per_s"] = rate
                print(f"{layout}, {order} order: {rate:,.0f} rows/s")
        peer = rows_per_s(lambda: torchrec(Path(folder) / "npy"), options.repeats)
        print(f"TorchRec, npy, file order: {peer:,.0f} rows/s")
        result |= {"torchrec_rows_per_s": peer, "npy_file_times_torchrec": result["npy_file_rows_per_s"] / peer}
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
