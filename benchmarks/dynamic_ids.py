"""Measure what ids without a vocabulary cost and save: `prepare criteo --ids hash64`, and steps with dynamic tables.

`prepare` turns the same two generated days into a dataset, with a vocabulary (ids by frequency) and with 64-bit hashes.
Then DLRM is trained on the first dataset, with its fixed tables and with dynamic ones, which get the same ids: each run
is a process with as many steps, and its time per step is the median of its reports. Contenders take turns.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

COMMAND = (sys.executable, "-m", "recmill")
BATCH, REPORT = 2048, 20
MODEL = {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [512, 256, 16], "top_mlp": [512, 256]}


def run(*arguments: str | Path) -> float:
    """Run the command and return its seconds."""
    started = time.monotonic()
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, capture_output=True)
    return time.monotonic() - started


def prepare_seconds(folder: Path, ids: str) -> float:
    shutil.rmtree(folder / ids, ignore_errors=True)
    return run("prepare", "criteo", "--input", folder / "raw", "--output", folder / ids, "--ids", ids)


def step_ms(folder: Path, store: str, steps: int) -> float:
    data = folder / "contiguous"
    features = json.loads((data / "dataset.json").read_text())["sparse"]
    dynamic = {feature["name"]: {"max_rows": feature["rows"]} for feature in features}
    config = {
        "data": {"path": str(data)},
        "model": MODEL,
        "optim": {"tables": {"name": "rowwise_adagrad"}},
        "tables": {"dynamic": dynamic} if store == "dynamic" else {},
        "train": {"device": "cpu", "global_batch_size": BATCH, "max_steps": steps, "num_epochs": 100}
        | {"log_every_steps": REPORT},
        "eval": {"every_steps": 10 * steps},
        "checkpoint": {"every_steps": 10 * steps},
        "observe": {"record": False},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    shutil.rmtree(folder / "run", ignore_errors=True)
    run("train", folder / "config.toml", "--run", folder / "run")
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return statistics.median([line["step_ms_p50"] for line in lines if line["split"] == "train"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"contiguous": [], "hash64": [], "fixed": [], "dynamic": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "raw").mkdir()
        rows = str(Path(__file__).with_name("criteo_rows.py"))
        log = ("--rows", str(options.rows), "--days", "2", "--output", str(folder / "raw"))
        subprocess.run([sys.executable, rows, *log], check=True, capture_output=True)
        for _ in range(options.rounds):
            for ids in ("contiguous", "hash64"):
                found[ids].append(prepare_seconds(folder, ids))
            for store in ("fixed", "dynamic"):
                found[store].append(step_ms(folder, store, options.steps))
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"prepare: {medians['contiguous']:.1f} s with a vocabulary, {medians['hash64']:.1f} s with hashes")
    print(f"train: {medians['fixed']:.1f} ms a step with fixed tables, {medians['dynamic']:.1f} ms with dynamic ones")
    ratios = {
        "prepare": round(medians["contiguous"] / medians["hash64"], 2),
        "step": round(medians["dynamic"] / medians["fixed"], 2),
    }
    print(json.dumps({"benchmark": "dynamic_ids", "rounds": found, "ratios": ratios}))


if __name__ == "__main__":
    main()
