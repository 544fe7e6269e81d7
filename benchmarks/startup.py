"""How long `recmill train`, `evaluate` and `recommend` take until they compute, on data that takes no time.

Also how long the first and the second `recommend` of a run take that `recmill.open_run` has opened.

`--baseline DIR` measures the `src` of another checkout in the same run, in turns. CPU seconds depend less on what else
the machine does than seconds do. All modules are compiled to bytecode before, as pip does it.
"imports" is what plain Python takes to import torch, FBGEMM and TorchRec.
"""

import argparse
import compileall
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
[data]
path = "data"
[model]
name = "sasrec"
embedding_dim = 8
num_layers = 1
num_heads = 1
max_length = 10
[optim.dense]
name = "adam"
[train]
global_batch_size = 64
max_steps = 1
log_every_steps = 1
"""

OPENED = """
import json, sys, time
import recmill
def seconds(call):
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value
opening, run = seconds(lambda: recmill.open_run(sys.argv[1]))
calls = [seconds(lambda: run.recommend([1, 2, 3]))[0] for _ in range(2)]
print(json.dumps([opening, *calls]))
"""


def opened(folder: Path, trained: str) -> list[float]:
    """Return the seconds that opening a run, the first and the second recommendation take."""
    done = subprocess.run([sys.executable, "-P", "-c", OPENED, trained], cwd=folder, check=True, capture_output=True)
    return json.loads(done.stdout)


def run(folder: Path, source: Path | None, *arguments: str) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a command."""
    environment = {**os.environ, **({"PYTHONPATH": str(source / "src")} if source else {})}
    return measured(folder, environment, "-P", "-m", "recmill", *arguments)


def measured(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path, help="Another checkout of Recmill.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    contenders = {"ours": None} | ({"baseline": options.baseline.absolute()} if options.baseline else {})
    took: dict[str, list[tuple[float, float]]] = {}
    openings = []
    for source in (Path(__file__).parent.parent, *(path for path in contenders.values() if path)):
        compileall.compile_dir(source / "src", quiet=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(CONFIG)
        histories = ("--users", "200", "--items", "300", "--interactions", "2000")
        run(folder, None, "prepare", "synthetic-histories", "--output", "data", *histories)
        for number in range(options.rounds):
            for contender, source in contenders.items():
                trained = f"{contender}-{number}"
                for command in (
                    ["train", "config.toml", "--run", trained],
                    ["evaluate", trained, "--protocol", "full"],
                    ["recommend", trained, "--history", "1,2,3"],
                ):
                    took.setdefault(f"{command[0]}_{contender}", []).append(run(folder, source, *command))
            imports = measured(folder, dict(os.environ), "-c", "import torch, fbgemm_gpu, torchrec")
            took.setdefault("imports", []).append(imports)
            openings.append(opened(folder, f"ours-{number}"))
            print(
                f"round {number + 1:2} ", *(f"{key} {values[-1][0]:.2f} s" for key, values in took.items()), flush=True
            )
    report: dict[str, float] = {}
    for key, values in took.items():
        seconds, cpu_seconds = zip(*values, strict=True)
        report |= {key: round(min(seconds), 2), f"{key}_cpu": round(statistics.median(cpu_seconds), 2)}
    opening, first, second = (min(values) for values in zip(*openings, strict=True))
    report |= {"open_run": round(opening, 2), "first_ms": round(1e3 * first, 1), "second_ms": round(1e3 * second, 1)}
    report["recommend_over_first"] = round(report["recommend_ours"] / first)
    for name in ("train", "evaluate", "recommend") if options.baseline else ():
        for unit in ("", "_cpu"):
            saved = 1 - report[f"{name}_ours{unit}"] / report[f"{name}_baseline{unit}"]
            report[f"{name}_saved{unit}"] = round(saved, 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
