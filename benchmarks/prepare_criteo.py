"""Measure rows per second and memory of preparing raw Criteo logs: `recmill prepare criteo` against four peers.

Each contender turns the same generated `day_0` into files on disk, in its own process. Times are those of the complete
process, including the start of the interpreter and of the JVM; memory is the peak of the process and its children
together. The raw file is in the page cache for all contenders.

    ours        the command: npy files with contiguous ids (first seen first, ids seen less than 3 times become 1)
    torchrec    TorchRec's own functions, for the same files, in one process (its scripts are two, which is slower)
    pandas      plain pandas, for the same files
    spark       PySpark on all cores doing OneFlow's job: ids modulo 40 million, rows in random order, Parquet
    parse_only  Polars parses the fields and does nothing with them: the speed of a parser alone

`--memory` runs only ours on growing logs, to see that memory stays within the budget.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Only the standard library is imported here: contenders run this file, and should pay only for their own imports.

MIN_FREQUENCY = 3
OURS = (
    *("prepare", "criteo", "--input", "{raw}", "--output", "{output}", "--source", "1tb"),
    *("--ids", "contiguous", "--id-order", "first-seen", "--min-frequency", str(MIN_FREQUENCY)),
    *("--last-day", "none", "--compat", "torchrec"),
)
OURS_ON_A_BUDGET = (
    *("prepare", "criteo", "--input", "{raw}", "--output", "{output}", "--source", "1tb"),
    *("--memory-budget", "{budget}", "--shuffle", "global"),
)

NUM_DENSE, NUM_IDS = 13, 26
DENSE_NAMES = [f"I{i}" for i in range(1, NUM_DENSE + 1)]
ID_NAMES = [f"C{i}" for i in range(1, NUM_IDS + 1)]
ONEFLOW_MODULUS = 40_000_000

SEED = 0
WARM_UP_ROWS = 1000
MEMORY_DAYS = 4
POLL_SECONDS = 0.05


def torchrec(raw: Path, output: Path) -> None:
    from torchrec.datasets.criteo import BinaryCriteoUtils

    dense, sparse, labels = (str(output / f"day_0_{part}.npy") for part in ("dense", "sparse", "labels"))
    BinaryCriteoUtils.tsv_to_npys(str(raw / "day_0"), dense, sparse, labels)
    BinaryCriteoUtils.sparse_to_contiguous([sparse], str(output), frequency_threshold=MIN_FREQUENCY)
    os.replace(output / "day_0_sparse_contig_freq.npy", sparse)


def pandas(raw: Path, output: Path) -> None:
    import numpy as np
    import pandas as pd

    types = {"label": "int32", **dict.fromkeys(DENSE_NAMES, "float64"), **dict.fromkeys(ID_NAMES, "str")}
    frame = pd.read_csv(raw / "day_0", sep="\t", header=None, names=list(types), dtype=types)
    dense = frame[DENSE_NAMES].fillna(0).to_numpy(np.int32)
    dense -= dense.min() - 2
    np.save(output / "day_0_dense.npy", np.log(dense, dtype=np.float32))
    sparse = np.empty((len(frame), NUM_IDS), np.int64)
    for column, name in enumerate(ID_NAMES):
        first_seen, _ = pd.factorize(frame[name].fillna("00000000"))
        is_frequent = np.bincount(first_seen) >= MIN_FREQUENCY
        sparse[:, column] = np.where(is_frequent, 1 + np.cumsum(is_frequent), 1)[first_seen]
    np.save(output / "day_0_sparse.npy", sparse)
    np.save(output / "day_0_labels.npy", frame[["label"]].to_numpy())


def spark(raw: Path, output: Path) -> None:
    """Do the work of OneFlow's tools/criteo1t_parquet.py with built-in functions only: no row leaves the JVM."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    session = (
        SparkSession.builder.master("local[*]")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(output / "spark-tmp"))
        .config("spark.sql.shuffle.partitions", spark_partitions((raw / "day_0").stat().st_size))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    schema = ", ".join(["label float", *(f"{n} float" for n in DENSE_NAMES), *(f"{n} string" for n in ID_NAMES)])
    rows = session.read.csv(str(raw / "day_0"), schema=schema, sep="\t", quote="")
    dense = [F.coalesce(F.col(name) + F.lit(1.0).cast("float"), F.lit(1.0).cast("float")) for name in DENSE_NAMES]
    ids = [
        F.coalesce(
            F.conv(F.col(name), 16, 10).cast("long") % ONEFLOW_MODULUS + ONEFLOW_MODULUS * column,
            F.lit(ONEFLOW_MODULUS * (column + 1)).cast("long"),
        )
        for column, name in enumerate(ID_NAMES)
    ]
    named = [made.alias(name) for made, name in zip([*dense, *ids], [*DENSE_NAMES, *ID_NAMES], strict=True)]
    rows.select("label", *named).orderBy(F.rand(SEED)).write.parquet(str(output / "train"))
    session.stop()


def spark_partitions(num_bytes: int) -> int:
    """Return two per core, so that none waits long for the last one; more if they would exceed Spark's usual 128 MB."""
    return max(2 * num_cores(), num_bytes // (128 << 20))


def parse_only(raw: Path, output: Path) -> None:
    """Count nulls, which needs every field. Of eight ways none was faster; typed integers cost the same as strings."""
    import polars as pl

    names = ["label", *DENSE_NAMES, *ID_NAMES]
    rows = pl.scan_csv(
        raw / "day_0", separator="\t", has_header=False, quote_char=None, schema=dict.fromkeys(names, pl.String)
    )
    counted = rows.select(pl.len().alias("rows"), pl.all().null_count()).collect(engine="streaming")
    (output / "counted.json").write_text(json.dumps(counted.row(0)))


@dataclass(frozen=True)
class Peer:
    """A contender that is a function of this file."""

    run: Callable[[Path, Path], None]
    modules: dict[str, str]
    """The modules it imports, and what to `pip install` for each."""
    programs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Return what to install before it can run; empty if nothing is missing."""
        packages = [package for module, package in self.modules.items() if importlib.util.find_spec(module) is None]
        programs = [program for program in self.programs if shutil.which(program) is None]
        return "; ".join([*(f"pip install {package}" for package in packages), *(f"no {p} in PATH" for p in programs)])


PEERS = {
    "torchrec": Peer(torchrec, {"torchrec": "torchrec --no-deps", "iopath": "iopath"}),
    "spark": Peer(spark, {"pyspark": "pyspark"}, programs=("java",)),
    "pandas": Peer(pandas, {"pandas": "pandas"}),
    "parse_only": Peer(parse_only, {"polars": "polars"}),
}
CONTENDERS = ["ours", *PEERS]


@dataclass(frozen=True)
class Measured:
    seconds: float
    peak_mb: float


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def family(pid: int) -> list[int]:
    """Return the process and all its current descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain anything; state and parent follow it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def memory_kb(pid: int) -> tuple[int, int]:
    """Return the current and the peak resident memory of one process; zeros if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    now, most = (int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM"))
    return now, most


def measure(command: list[str], log: Path) -> Measured:
    """Run a command to its end. The peak is the largest polled sum, or the largest single process if that is more."""
    os.sync()  # so that no contender pays for what the previous one wrote
    peak_kb = 0
    started = time.monotonic()
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None:
                used = [memory_kb(pid) for pid in family(process.pid)]
                peak_kb = max(peak_kb, sum(now for now, _ in used), *(most for _, most in used))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.terminate()
            raise
        seconds = time.monotonic() - started
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        sys.exit(f"{tail}\nexit code {process.returncode} of: {' '.join(command)}")
    return Measured(seconds, peak_kb / 1024)


def ours_command(template: tuple[str, ...], raw: Path, output: Path, budget: str = "") -> list[str]:
    program = str(Path(sys.executable).with_name("recmill"))
    return [program, *(part.format(raw=raw, output=output, budget=budget) for part in template)]


def run_contender(name: str, raw: Path, output: Path) -> Measured:
    """Run a contender from `raw`/day_0 to a new `output`."""
    shutil.rmtree(output, ignore_errors=True)
    log = output.with_name(f"{output.name}.log")
    if name == "ours":
        return measure(ours_command(OURS, raw, output), log)
    output.mkdir(parents=True)
    command = [sys.executable, __file__, "--peer", name, "--raw", str(raw), "--output", str(output)]
    return measure(command, log)


def raw_days(work: Path, rows: int, days: int) -> Path:
    """Return the folder of the raw files, writing them unless an earlier run left them."""
    from criteo_rows import write_days

    folder = work / f"raw-{rows}-rows-{days}-days"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_days(partial, rows, days, SEED)
        os.replace(partial, folder)
    return folder


def first_use_seconds(work: Path) -> float:
    """Run ours once on a few rows: the first time after an installation it compiles its code."""
    done = run_contender("ours", raw_days(work, WARM_UP_ROWS, 1), work / "ours-first-use")
    print(f"ours, first use, {WARM_UP_ROWS:,} rows: {done.seconds:.1f} s")
    return done.seconds


def is_same(work: Path, one: str, other: str, part: str) -> bool:
    """Return whether the two wrote the same array: type, shape and bits."""
    import numpy as np

    left, right = (np.load(work / name / f"day_0_{part}.npy", mmap_mode="r") for name in (one, other))
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        print(f"{part}: {one} {left.dtype}{left.shape}, {other} {right.dtype}{right.shape}", file=sys.stderr)
        return False
    different = np.count_nonzero(left.view(f"u{left.itemsize}") != right.view(f"u{right.itemsize}"))
    if different:
        print(f"{part}: {different:,} of {left.size:,} values of {one} and {other} differ", file=sys.stderr)
    return not different


def checks(work: Path, ran: list[str]) -> dict[str, bool | None]:
    """Compare outputs that must be equal to TorchRec's; None if one of the two did not run."""
    pairs = [("ours", "dense"), ("ours", "sparse"), ("ours", "labels"), ("pandas", "sparse")]
    return {
        f"{name}_{part}": is_same(work, name, "torchrec", part) if {name, "torchrec"} <= set(ran) else None
        for name, part in pairs
    }


def chosen_contenders(skip: list[str]) -> list[str]:
    chosen = [name for name in CONTENDERS if name not in skip]
    for name in [name for name in chosen if name in PEERS]:
        if missing := PEERS[name].missing():
            print(f"{name} is skipped: {missing}", file=sys.stderr)
            chosen.remove(name)
    return chosen


def print_table(heads: list[str], lines: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    for line in [heads, ["-" * width for width in widths], *lines]:
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]))


def compare(work: Path, rows: int, rounds: int, skip: list[str]) -> dict[str, object]:
    """Run all contenders in turns, print the table and return the figures."""
    raw = raw_days(work, rows, 1)
    chosen = chosen_contenders(skip)
    first_use = first_use_seconds(work) if "ours" in chosen else None
    found: dict[str, list[Measured]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name, results in found.items():
            results.append(run_contender(name, raw, work / name))
            done = results[-1]
            print(f"round {number + 1}  {name:10}  {done.seconds:7.2f} s  {done.peak_mb:7,.0f} MB", flush=True)
    speeds = {name: rows / statistics.median(r.seconds for r in results) for name, results in found.items()}
    peaks = {name: max(r.peak_mb for r in results) for name, results in found.items()}

    def ours_against(name: str) -> float | None:
        return round(speeds["ours"] / speeds[name], 3) if {"ours", name} <= speeds.keys() else None

    def cells(name: str) -> list[str]:
        ratio = ours_against(name)
        return [name, f"{speeds[name]:,.0f}", f"{peaks[name]:,.0f}", "" if ratio is None else f"{ratio:.2f} x"]

    print_table(["contender", "rows/s", "peak MB", "ours against it"], [cells(name) for name in chosen])
    return {
        "benchmark": "prepare_criteo",
        "rows": rows,
        **{name: round(speeds[name]) if name in speeds else None for name in CONTENDERS},
        "peak_mb": {name: round(peaks[name]) if name in peaks else None for name in CONTENDERS},
        **{f"ours_vs_{name}": ours_against(name) for name in PEERS},
        "ours_first_use_seconds": first_use and round(first_use, 2),
        "equal": checks(work, chosen),
        "cores": num_cores(),
    }


def memory(work: Path, sizes: list[int], budget: str, is_clean: bool) -> dict[str, object]:
    """Run only ours, with a memory budget, print the table and return the figures."""
    first_use_seconds(work)
    found: dict[int, Measured] = {}
    for rows in sizes:
        raw, output = raw_days(work, rows, MEMORY_DAYS), work / "ours"
        shutil.rmtree(output, ignore_errors=True)
        found[rows] = measure(ours_command(OURS_ON_A_BUDGET, raw, output, budget), work / "ours.log")
        shutil.rmtree(output)
        if is_clean:
            shutil.rmtree(raw)
        print(f"{rows:,} rows  {found[rows].seconds:.1f} s  {found[rows].peak_mb:,.0f} MB", flush=True)
    print_table(
        ["rows", "rows/s", "peak MB", "budget"],
        [[f"{rows:,}", f"{rows / m.seconds:,.0f}", f"{m.peak_mb:,.0f}", budget] for rows, m in found.items()],
    )
    return {
        "benchmark": "prepare_criteo_memory",
        "memory_budget": budget,
        "rows": list(found),
        "rows_per_s": [round(rows / m.seconds) for rows, m in found.items()],
        "peak_mb": [round(m.peak_mb) for m in found.values()],
        "cores": num_cores(),
    }


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="prepare-criteo-") as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path, help="keep raw files, outputs and logs here (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--skip", default="", help=f"contenders to skip, separated by commas: {', '.join(CONTENDERS)}")
    parser.add_argument("--memory", action="store_true", help="run only ours, on growing logs")
    parser.add_argument("--sizes", default="1000000,10000000,40000000", help="rows with --memory, separated by commas")
    parser.add_argument("--memory-budget", default="2GB", help="with --memory: the budget of ours")
    parser.add_argument("--clean", action="store_true", help="with --memory: remove raw files after use")
    for hidden in ("--peer", "--raw", "--output"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        PEERS[arguments.peer].run(Path(arguments.raw), Path(arguments.output))
        return
    skip = [name for name in arguments.skip.split(",") if name]
    if unknown := set(skip) - set(CONTENDERS):
        parser.error(f"--skip: unknown {', '.join(sorted(unknown))}. Known: {', '.join(CONTENDERS)}.")
    with work_folder(arguments.work) as work:
        if arguments.memory:
            sizes = [int(size) for size in arguments.sizes.split(",")]
            figures = memory(work, sizes, arguments.memory_budget, arguments.clean)
        else:
            figures = compare(work, arguments.rows, arguments.rounds, skip)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
