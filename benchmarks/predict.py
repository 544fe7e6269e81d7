"""Measure `recmill predict` from Parquet, beside plain torch that scores rows which are encoded already.

    python benchmarks/predict.py [--rows 400000] [--procs 1] [--folder DIRECTORY]

The rows have Criteo's shape, and the model is a DLRM with 26 tables of width 16. Plain torch runs the same network on
the same encoded rows, held in memory, with all cores: the floor. Both are measured in turns, twice; the better counts.
The peak memory is that of one more process, which only scores. The last line is JSON. Its CPU times are those of all
threads and processes: they mean something on a busy machine, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import torch

import recmill
from recmill.commands.predict import Predictor
from recmill.data.click_rows import concatenate, split_blocks
from recmill.data.opening import open_dataset

NAMES = ["label", *(f"I{i + 1}" for i in range(13)), *(f"C{c + 1}" for c in range(26))]
SETTINGS = ["train.num_epochs=1", "train.max_steps=20", "model.embedding_dim=16", "model.bottom_mlp=[512, 256, 64, 16]"]
SETTINGS += ["model.top_mlp=[512, 256]"]
ROWS_AT_ONCE = 8192


def write_rows(folder: Path, rows: int) -> None:
    """Write a log with ids of a few thousand values per column, as text for `prepare` and as Parquet for `predict`."""
    draw = np.random.default_rng(1)
    columns = {"label": draw.integers(0, 2, rows).astype(str)}
    columns |= {f"I{i + 1}": draw.integers(0, 1000, rows).astype(str) for i in range(13)}
    known = [f"{value:08x}" for value in draw.integers(0, 2**32, 20_000)]
    ids = {f"C{c + 1}": np.array(known)[np.minimum(draw.zipf(1.2, rows) - 1, 19_999)] for c in range(26)}
    frame = pl.DataFrame({**columns, **ids}).select(NAMES)
    frame.write_csv(folder / "train.txt", include_header=False, separator="\t")
    frame.drop("label").write_parquet(folder / "rows.parquet")


def plain_torch(predictor: Predictor, rows: int, dataset: Path) -> float:
    """Return the seconds that the network alone takes for rows that are encoded already."""
    blocks = [block.rows for block in split_blocks(open_dataset(dataset), ("train", "val", "test"))]
    encoded = concatenate(blocks)[:rows]
    network = predictor.network
    began = time.perf_counter()
    with torch.no_grad():
        for start in range(0, rows, ROWS_AT_ONCE):
            part = encoded[start : start + ROWS_AT_ONCE]
            batch = predictor.maker.batch(part, len(part), np.ones(len(part), np.float32))
            network(*batch.inputs())
    return time.perf_counter() - began


def peak_gb(run: Path, rows: Path, output: Path) -> float:
    """Return the peak memory of a process that only scores the rows."""
    code = (
        "import sys, recmill; from recmill.observe.counters import peak_bytes\n"
        "recmill.predict(*sys.argv[1:])\n"
        "print(peak_bytes())"
    )
    words = [sys.executable, "-c", code, str(run), str(rows), str(output)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return round(int(done.stdout.split()[-1]) / 1e9, 2)


def measure(folder: Path, rows: int, procs: int) -> dict[str, float]:
    write_rows(folder, rows)
    recmill.prepare("criteo", folder / "data", input=str(folder / "train.txt"))
    recmill.train("own/dlrm", folder / "run", overrides=[f"data.path={folder / 'data'}", *SETTINGS])
    predictor = Predictor(folder / "run")
    assert predictor.network
    seconds: dict[str, list[float]] = {"predict": [], "torch": []}
    cpu_seconds: dict[str, list[float]] = {"predict": [], "torch": []}
    for turn in range(2):
        before = sum(os.times()[:4])
        began = time.perf_counter()
        recmill.predict(folder / "run", folder / "rows.parquet", folder / f"{turn}.parquet", procs=procs)
        seconds["predict"].append(time.perf_counter() - began)
        middle = sum(os.times()[:4])
        seconds["torch"].append(plain_torch(predictor, rows, folder / "data"))
        cpu_seconds["predict"].append(middle - before)
        cpu_seconds["torch"].append(sum(os.times()[:4]) - middle)
    rates = {f"{name}_rows_per_s": round(rows / min(found)) for name, found in seconds.items()}
    memory = {"predict_peak_gb": peak_gb(folder / "run", folder / "rows.parquet", folder / "again.parquet")}
    cpu = {f"{name}_cpu_us_per_row": round(1e6 * min(found) / rows, 2) for name, found in cpu_seconds.items()}
    return {"rows": rows, "procs": procs, **rates, **cpu, **memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(arguments.folder or Path(temporary), arguments.rows, arguments.procs)
    found["share_of_torch"] = round(found["predict_rows_per_s"] / found["torch_rows_per_s"], 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
