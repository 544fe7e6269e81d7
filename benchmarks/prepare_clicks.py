"""Compare `recmill prepare clicks` with Polars merely parsing the text, and with FuxiCTR's `build_dataset`.

    python benchmarks/prepare_clicks.py --rows 4000000 --fuxictr-python /tmp/fuxictr/bin/python

FuxiCTR needs an environment of its own: `pip install --no-deps fuxictr==2.3.10`, then `ray[data] pydantic 'polars<2'
pandas scikit-learn PyYAML h5py tqdm pyarrow`. The rows have Avazu's 24 columns; the label and 21 ids are used, and the
hour (FuxiCTR: as an id). All of them take turns, `--rounds` times. All modules are compiled to bytecode before, as pip
does it. The last line is JSON.
"""

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_WRITE_ROWS = Path(__file__).with_name("avazu_rows.py")
_PARSE = "import sys, polars; polars.read_csv(sys.argv[1])"
_FUXICTR = """
import sys
from fuxictr.preprocess import FeatureProcessor, build_dataset
train, valid, test, root = sys.argv[1:5]
names = open(train).readline().strip().split(",")
names = [name for name in names if name not in ("id", "click")]
columns = [{"name": names, "active": True, "dtype": "str", "type": "categorical"}]
encoder = FeatureProcessor(feature_cols=columns, label_col={"name": "click", "dtype": "float"}, dataset_id="avazu",
                           data_root=root)
build_dataset(encoder, train_data=train, valid_data=valid, test_data=test, min_categr_count=2)
"""


def measured(command: list[str], expect: Path | None = None) -> dict[str, float]:
    """Run a command and return its seconds, CPU seconds and peak memory, with those of its children.

    Linux begins the peak of a process with that of the one that started it: this one must stay small.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status or (expect and not expect.exists()):
        sys.exit(f"{' '.join(command)[:300]}\n{errors[-3000:]}")
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_gb": usage.ru_maxrss / 1e6}


def divided(log: Path, rows: int) -> list[Path]:
    """Write the first 80 %, the next and the last 10 % of the rows to files, which FuxiCTR wants."""
    paths = [log.with_name(f"{name}.csv") for name in ("train", "valid", "test")]
    ends = [rows * 8 // 10, rows * 9 // 10, rows]
    with log.open("rb") as source:
        header = source.readline()
        number = 0
        for path, end in zip(paths, ends, strict=True):
            with path.open("wb") as file:
                file.write(header)
                while number < end:
                    file.write(source.readline())
                    number += 1
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fuxictr-python", help="The Python of FuxiCTR's environment; without it, it is left out.")
    given = parser.parse_args()
    recmill = [sys.executable, "-m", "recmill"]
    found_package = find_spec("recmill")
    assert found_package and found_package.origin
    compileall.compile_dir(Path(found_package.origin).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        log, schema = Path(folder, "avazu.csv"), Path(folder, "avazu.toml")
        subprocess.run([sys.executable, _WRITE_ROWS, log, "--rows", str(given.rows)], check=True)
        subprocess.run([*recmill, "schema", "--input", log, "--label", "click", "--output", schema], check=True)
        divided_log = divided(log, given.rows)
        found: dict[str, list[dict[str, float]]] = {"parse": [], "recmill": [], "fuxictr": []}
        for turn in range(given.rounds):
            found["parse"].append(measured([sys.executable, "-c", _PARSE, str(log)]))
            out = Path(folder, f"data{turn}")
            options = ["--input", str(log), "--schema", str(schema), "--output", str(out)]
            found["recmill"].append(measured([*recmill, "prepare", "clicks", *options], out / "dataset.json"))
            if given.fuxictr_python:
                root = Path(folder, f"fuxictr{turn}")
                paths = [str(path) for path in (*divided_log, root)]
                expected = root / "avazu" / "test.parquet"
                found["fuxictr"].append(measured([given.fuxictr_python, "-c", _FUXICTR, *paths], expected))
    print(json.dumps(_summary(given.rows, found)))


def _summary(rows: int, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}
        for name, turns in found.items()
        if turns
    }
    result: dict[str, Any] = {"rows": rows, **medians}
    for name, title in (("parse", "share_of_parsing"), ("fuxictr", "times_fuxictr")):
        if name in medians:
            ratios = {key: medians[name][key] / ours for key, ours in medians["recmill"].items()}
            result[title] = {key: round(ratio, 3) for key, ratio in ratios.items()}
    return result


if __name__ == "__main__":
    main()
