"""Validate Recmill on the GPUs of a machine, in fifteen steps, with the commands that users run.

Each step prints pass, fail or skipped, then comes a table, and the last line is JSON, which is also written to a file.
With `--device cpu` the same steps run with gloo. Nothing here imports torch: if it is broken, that is a result, too.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .processes import children, descendants, free_port, send

REPO = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TOLERANCE = 1e-3  # of losses and metrics, relative to those above 1
LOW_PRECISION_TOLERANCE = 0.05  # of losses in bfloat16, float16 and TF32
COMMAND_SECONDS = 900.0  # then a command is killed; the watchdog of a hung run ends it long before
HANG_SECONDS = {"cuda": 30, "cpu": 8}  # in the step that stops a rank
NUM_STEPS = 30
NEVER = 10**6
NUM_OUTPUT_LINES = 40  # of a failed command, in the report
PACKAGES = ("recmill", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton", "numpy")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "data_parallel")
PRECISIONS = {
    "bfloat16": "train.precision=bfloat16",
    "float16": "train.precision=float16",
    "tf32": "train.tf32=true",
}
DATA = {
    "dlrm": ["synthetic-clicks", "--rows", "20000", "--dense", "4", "--tables", "7,100,1000,20000"],
    "bert4rec": ["synthetic-histories", "--users", "2000", "--items", "300", "--interactions", "24000"],
}
# Every sharding supports Adagrad with a state per value. Where a gradient is only rounding, a small eps would let Adam
# amplify it to steps of full length.
CONFIGS = {
    "dlrm": """
model = {name = "dlrm", embedding_dim = 32, bottom_mlp = [64, 32], top_mlp = [64, 32]}
train = {global_batch_size = 500, %(train)s}
optim = {tables = {name = "adagrad"}}
""",
    "bert4rec": """
model = {name = "bert4rec", embedding_dim = 32, num_layers = 2, max_length = 20}
train = {global_batch_size = 60, %(train)s}
optim = {tables = {name = "adagrad", eps = 1e-3}, dense = {eps = 1e-3}}
""",
}
TRAIN = f"num_epochs = {NEVER}, max_steps = {NUM_STEPS}, log_every_steps = 1, hang_seconds = 120.0"
EVERY_CONFIG = """
data = {path = "%(data)s"}
eval = {every_steps = %(never)d}
checkpoint = {every_steps = %(never)d}
"""
ABOUT_TORCH = """
import json, torch
count = torch.cuda.device_count()
facts = {"cuda": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in range(count)]}
if count:
    facts["memory_gb"] = [round(torch.cuda.get_device_properties(i).total_memory / 1e9, 1) for i in range(count)]
    facts["capability"] = [".".join(map(str, torch.cuda.get_device_capability(i))) for i in range(count)]
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["cudnn"] = torch.backends.cudnn.version()
print(json.dumps(facts))
"""

Figures = dict[str, Any]


class StepError(Exception):
    """A step did not do what is expected; `output` is what its command printed, if it was the command that failed."""

    def __init__(self, reason: str, output: str = "", figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.reason, self.output, self.figures = reason, output, figures or {}


class SkippedError(Exception):
    """A step makes no sense here."""


# Commands


class Command:
    """A command that was started, from `with` to the end of the block; what is left of it then is killed."""

    def __init__(self, command: Sequence[str | Path], output: Path, environment: Mapping[str, str]) -> None:
        self.words = [str(word) for word in command]
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                self.words, env=environment, cwd=output.parent, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                send(pid, signal.SIGKILL)
            self.process.wait()

    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, expected: int = 0, seconds: float = COMMAND_SECONDS) -> str:
        """Wait for the end and return the output. Any other exit code, or no end in time, is a failure."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StepError(f"no end after {seconds:g} s: {' '.join(self.words)}", self.output()) from None
        if code != expected:
            raise StepError(f"exit code {code} instead of {expected}: {' '.join(self.words)}", self.output())
        return self.output()

    def wait_for(self, is_ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + COMMAND_SECONDS
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StepError(f"it ended, or took too long, before {what}: {' '.join(self.words)}", self.output())
            time.sleep(0.01)


@dataclass
class Machine:
    """Where the steps run: the device, the number of processes (one per GPU), and a directory for data and runs."""

    device: str  # cuda, cpu
    procs: int
    folder: Path
    _num_commands: int = 0

    def run(self, name: str) -> Path:
        return self.folder / name

    def start(self, command: Sequence[str | Path], gpus: Sequence[str] | None = None) -> Command:
        """Start a command that sees these GPUs only; None: all."""
        environment = dict(os.environ)
        if self.device == "cpu":
            gpus = []
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._num_commands += 1
        return Command(command, self.folder / f"command-{self._num_commands}.txt", environment)

    def recmill(self, *arguments: str | Path, gpus: Sequence[str] | None = None, expected: int = 0) -> str:
        with self.start([BIN / "recmill", *arguments], gpus) as command:
            return command.wait(expected)

    def train_command(self, model: str, name: str, *changes: str, procs: int) -> list[str | Path]:
        changed = [word for change in changes for word in ("--set", change)]
        return ["train", self.folder / f"{model}.toml", "--run", self.run(name), "--procs", str(procs), *changed]

    def train(self, model: str, name: str, *changes: str, procs: int = 0) -> str:
        """Train with `procs` processes, by default all, and check that they used the device. Return the output."""
        output = self.recmill(*self.train_command(model, name, *changes, procs=procs or self.procs))
        self.check_device(name, output, "cpu" if "train.device=cpu" in changes else self.device)
        return output

    def check_device(self, name: str, output: str, expected: str) -> None:
        found = read_json(self.run(name) / "env.json")["device"]
        if not found.startswith(expected):
            raise StepError(f"{name} ran on {found} instead of {expected}", output)

    def explicit_device(self) -> str:
        return f"train.device={self.device}"

    def evaluate(self, name: str, *options: str, gpus: Sequence[str] | None = None) -> Figures:
        return printed_json(self.recmill("evaluate", self.run(name), "--json", *options, gpus=gpus))

    def visible_gpus(self) -> list[str]:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (named.split(",") if named else [str(number) for number in range(self.procs)])[: self.procs]


# What runs leave behind


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def printed_json(output: str) -> Any:
    """Return the JSON that a command printed. Libraries may print lines before and after it."""
    for start in re.finditer(r"^[\[{]", output, flags=re.M):
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(output, start.start())[0]
    raise StepError("no JSON in the output", output)


def train_lines(run: Path) -> list[Figures]:
    """Return the training reports so far. The last line may be incomplete."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [line for line in map(json.loads, lines) if line["split"] == "train"]


def compare_values(
    ours: Mapping[str, Any], others: Mapping[str, Any], what: str, tolerance: float = TOLERANCE
) -> float:
    """Return the largest difference of two sets of values, relative to values above 1; fail if it is too large."""
    if ours.keys() != others.keys():
        raise StepError(f"{what}: only one has {sorted(ours.keys() ^ others.keys())}")
    largest = 0.0
    for name, value in ours.items():
        other = others[name]
        if value == other and (value is None or isinstance(value, str)):
            continue  # undefined in both, or the same checkpoint
        difference = math.nan if value is None or other is None else abs(value - other) / max(1.0, abs(other))
        if not difference <= tolerance:
            raise StepError(f"{what}: {name} is {value} and {other}")
        largest = max(largest, difference)
    return float(f"{largest:.3g}")


def losses(run: Path) -> dict[str, float]:
    return {f"loss of step {line['step']}": line["loss"] for line in train_lines(run)}


def compare_losses(run: Path, other: Path, tolerance: float = TOLERANCE) -> Figures:
    """Compare the losses of two runs, step by step."""
    speed = statistics.median(line["samples_per_s"] for line in train_lines(run))
    difference = compare_values(losses(run), losses(other), f"{run.name} and {other.name}", tolerance)
    return {"loss_difference": difference, "samples_per_s": round(speed)}


def compare_runs(run: Path, other: Path) -> Figures:
    """Compare the losses of two runs, and their metrics on the test split."""
    figures = compare_losses(run, other)
    ours, others = (read_json(path / "results.json")["test"] for path in (run, other))
    return figures | {"metric_difference": compare_values(ours, others, f"{run.name} and {other.name}")}


def for_each(names: Iterable[str], action: Callable[[str], Figures]) -> Figures:
    """Return the figures of each name. All are tried, then all failures are reported."""
    figures: Figures = {}
    failures: list[StepError] = []
    for name in names:
        try:
            figures[name] = action(name)
        except StepError as failure:
            failures.append(failure)
            figures[name] = {"failed": failure.reason, **failure.figures}
    if failures:
        output = next((failure.output for failure in failures if failure.output), "")
        raise StepError("; ".join(failure.reason for failure in failures), output, figures)
    return figures


# The steps


def doctor(machine: Machine) -> Figures:
    output = machine.recmill("doctor")
    expected = ["FBGEMM", "gloo"] + (["NCCL all-to-all"] if machine.device == "cuda" else [])
    if missing := [word for word in expected if word not in output]:
        raise StepError(f"recmill doctor has no row for {', '.join(missing)}", output)
    return {"rows": [line.strip() for line in output.splitlines() if re.search(r"FBGEMM|gloo|NCCL|GPU", line)]}


def cpu_baseline(machine: Machine) -> Figures:
    def train(model: str) -> Figures:
        data = machine.folder / f"{model}-data"
        machine.recmill("prepare", DATA[model][0], "--output", data, *DATA[model][1:])
        facts = {"data": data, "train": TRAIN, "never": NEVER}
        (machine.folder / f"{model}.toml").write_text((CONFIGS[model] + EVERY_CONFIG) % facts, encoding="utf-8")
        output = machine.train(model, f"cpu-{model}", "train.device=cpu", procs=1)
        found = list(losses(machine.run(f"cpu-{model}")).values())
        if len(found) != NUM_STEPS or not found[-1] < found[0]:
            raise StepError(f"{model}: {len(found)} steps, and the loss did not fall: {found}", output)
        return {"first_loss": found[0], "last_loss": found[-1]}

    return for_each(CONFIGS, train)


def one_gpu(machine: Machine) -> Figures:
    if machine.device == "cpu":
        raise SkippedError("without a GPU it would repeat the CPU baseline")

    def train(model: str) -> Figures:
        machine.train(model, f"one-{model}", machine.explicit_device(), procs=1)
        return compare_runs(machine.run(f"one-{model}"), machine.run(f"cpu-{model}"))

    return for_each(CONFIGS, train)


def all_gpus(machine: Machine) -> Figures:
    """Leave train.device at 'auto', so that later steps can evaluate these runs on another device."""

    def train(model: str) -> Figures:
        machine.train(model, f"all-{model}", "train.check_replicas_every=10")
        return compare_runs(machine.run(f"all-{model}"), machine.run(f"cpu-{model}"))

    return for_each(CONFIGS, train)


def shardings(machine: Machine) -> Figures:
    def train(kind: str) -> Figures:
        output = machine.train("dlrm", kind, f"sharding.default={kind}", machine.explicit_device())
        if found := {placed["type"] for placed in read_json(machine.run(kind) / "sharding.json")} - {kind}:
            raise StepError(f"tables are sharded {', '.join(found)} instead of {kind}", output)
        return compare_runs(machine.run(kind), machine.run("cpu-dlrm"))

    return for_each(SHARDINGS, train)


def exchange_precisions(machine: Machine) -> Figures:
    def train(precision: str) -> Figures:
        sent = [f"sharding.{way}_precision={precision}" for way in ("forward", "backward")]
        run = f"sent-{precision}"
        machine.train("dlrm", run, "sharding.default=row_wise", *sent, machine.explicit_device())
        return compare_losses(machine.run(run), machine.run("cpu-dlrm"), LOW_PRECISION_TOLERANCE)

    return for_each(["fp16", "bf16"], train)


def precisions(machine: Machine) -> Figures:
    def train(name: str) -> Figures:
        model, precision = name.split(" in ")
        run = f"{precision}-{model}"
        output = machine.train(model, run, PRECISIONS[precision], machine.explicit_device())
        figures = compare_losses(machine.run(run), machine.run(f"cpu-{model}"), LOW_PRECISION_TOLERANCE)
        logged = [line for line in output.splitlines() if re.match(r"train\.(precision|tf32)", line)]
        return figures | {"log": logged}

    names = [name for name in PRECISIONS if name != "tf32" or machine.device == "cuda"]  # the CPU has no TF32
    return for_each([f"{model} in {name}" for model in CONFIGS for name in names], train)


def interrupt_and_resume(machine: Machine) -> Figures:
    changes = ["checkpoint.every_steps=5", "checkpoint.full_every=100", machine.explicit_device()]
    run, unbroken = machine.run("interrupted"), machine.run("uninterrupted")
    endless = machine.train_command("dlrm", "interrupted", *changes, f"train.max_steps={NEVER}", procs=machine.procs)
    with machine.start([BIN / "recmill", *endless]) as command:
        command.wait_for(lambda: any(line["step"] >= 12 for line in train_lines(run)), "step 12")
        command.process.send_signal(signal.SIGINT)
        command.wait(expected=130)
    stopped_at = read_json(run / "status.json")["step"]
    listed = machine.recmill("checkpoint", "verify", run)
    if "changes since step" not in listed:
        raise StepError("no incremental checkpoint", listed)
    max_steps = f"train.max_steps={stopped_at + 10}"
    output = machine.train("dlrm", "interrupted", *changes, max_steps)
    if f"resuming from step {stopped_at:,}" not in output:
        raise StepError(f"it did not resume from step {stopped_at}", output)
    machine.train("dlrm", "uninterrupted", machine.explicit_device(), max_steps)
    return {"stopped_at": stopped_at} | compare_runs(run, unbroken)


def foreground_saves(machine: Machine) -> Figures:
    changes = ["checkpoint.background=false", "checkpoint.every_steps=10", machine.explicit_device()]
    output = machine.train("dlrm", "foreground", *changes)
    committed = [int(step) for step in re.findall(r"saved step (\d+)", output)]
    if committed != [10, 20, 30]:
        raise StepError(f"checkpoints of steps {committed}", output)
    machine.recmill("checkpoint", "verify", machine.run("foreground"))
    return compare_runs(machine.run("foreground"), machine.run("cpu-dlrm"))


def evaluate(machine: Machine) -> Figures:
    def compare(model: str) -> Figures:
        on_all = machine.evaluate(f"all-{model}", "--procs", str(machine.procs))
        on_one = machine.evaluate(f"all-{model}", "--procs", "1")
        on_none = machine.evaluate(f"all-{model}", "--procs", "1", gpus=[]) if machine.device == "cuda" else on_one
        one = compare_values(on_one, on_none, f"{model} on one GPU and on none")
        return {"one_difference": one, "all_difference": compare_values(on_all, on_none, f"{model} on all and on none")}

    return for_each(CONFIGS, compare)


def recommend(machine: Machine) -> Figures:
    """Compare the model trained on GPUs, with GPUs and without, and the model trained on the CPU."""

    def scores(name: str, gpus: Sequence[str] | None = None) -> dict[str, float]:
        options = ["--history", "12,7,99,30", "--k", "300", "--include-seen", "--json"]
        listed = printed_json(machine.recmill("recommend", machine.run(name), *options, gpus=gpus))
        return {line["item"]: line["score"] for line in listed}

    expected = scores("all-bert4rec", gpus=[])
    same = compare_values(scores("all-bert4rec"), expected, "scores with GPUs and without")
    trained = compare_values(scores("cpu-bert4rec"), expected, "scores of runs on CPU and on GPUs")
    return {"same_run_difference": same, "cpu_run_difference": trained, "items": len(expected)}


def stopped_rank(machine: Machine) -> Figures:
    if machine.procs == 1:
        raise SkippedError("it needs two processes")
    run = machine.run("stopped")
    changes = [f"train.max_steps={NEVER}", f"train.hang_seconds={HANG_SECONDS[machine.device]}.0"]
    words = machine.train_command("dlrm", "stopped", *changes, machine.explicit_device(), procs=machine.procs)
    with machine.start([BIN / "recmill", *words]) as command:
        command.wait_for(lambda: any(line["step"] >= 5 for line in train_lines(run)), "step 5")
        workers = children(command.process.pid)
        send(workers[-1], signal.SIGSTOP)
        started = time.monotonic()
        output = command.wait(expected=5)
    stopped = machine.procs - 1
    if f"rank {stopped} does not answer" not in output:
        raise StepError(f"rank {stopped}, which was stopped, is not named", output)
    for rank in range(stopped):
        file = run / f"hang-rank-{rank}.txt"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (
            not re.search(rf"rank {rank} (made no progress|waited for the other ranks) for .* after step \d+", text)
            or "File " not in text
        ):
            raise StepError(f"{file.name} does not give rank {rank}'s step and stacks: {text[:200]!r}", output)
    return {"reported_after_seconds": round(time.monotonic() - started, 1)}


def two_agents(machine: Machine) -> Figures:
    half = machine.procs // 2
    if not half:
        raise SkippedError("it needs two processes")

    def train(kind: str) -> Figures:
        name = f"agents-{kind}"
        port = free_port()
        torchrun = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        torchrun += ["--nproc-per-node", str(half), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        words = ["-m", "recmill", "train", str(machine.folder / "dlrm.toml"), "--run-dir", str(machine.run(name))]
        words += ["--set", f"sharding.default={kind}", "--set", machine.explicit_device()]
        gpus = machine.visible_gpus()
        first = machine.start([*torchrun, "--node-rank", "0", *words], gpus[:half])
        with first, machine.start([*torchrun, "--node-rank", "1", *words], gpus[half : 2 * half]) as second:
            output = first.wait()
            second.wait()
        machine.check_device(name, output, machine.device)
        return compare_runs(machine.run(name), machine.run("cpu-dlrm"))

    return for_each(["auto", "table_row_wise", "grid"], train)


def to_cpu_and_back(machine: Machine) -> Figures:
    machine.train("dlrm", "moved", "train.max_steps=10", machine.explicit_device())
    machine.train("dlrm", "moved", "train.max_steps=20", "train.device=cpu", procs=1)
    machine.train("dlrm", "moved", f"train.max_steps={NUM_STEPS}", machine.explicit_device())
    return compare_runs(machine.run("moved"), machine.run("cpu-dlrm"))


def table_optimizers(machine: Machine) -> Figures:
    """Train with each optimizer on GPUs (by FBGEMM) and on the CPU (by our kernels); evaluate on the CPU.

    Adam's first steps have the length of the learning rate even where a gradient is only rounding, unless eps is large.
    """

    def train(optimizer: str) -> Figures:
        changes = [f"optim.tables.name={optimizer}", "optim.tables.eps=1e-3"]
        machine.train("dlrm", f"cpu-{optimizer}", *changes, "train.device=cpu", procs=1)
        machine.train("dlrm", optimizer, *changes)
        figures = compare_runs(machine.run(optimizer), machine.run(f"cpu-{optimizer}"))
        trained = read_json(machine.run(optimizer) / "results.json")["test"]
        evaluated = machine.evaluate(optimizer, gpus=[])
        difference = compare_values(evaluated, trained, f"{optimizer}, evaluated on the CPU and in training")
        return figures | {"evaluated_difference": difference}

    return for_each(["sgd", "rowwise_adagrad", "adam"], train)


def throughput(machine: Machine) -> Figures:
    if machine.device == "cuda":
        options = ["--device", "cuda", "--procs", str(machine.procs), "--shape", "mlperf", "--seconds", "10"]
        options += ["--batch", str(8192 * machine.procs), "--rounds", "3"]
    else:
        options = ["--contenders", "ours,torchrec_1", "--seconds", "2", "--rounds", "3"]
    with machine.start([sys.executable, REPO / "benchmarks" / "train_ctr.py", *options]) as command:
        output = command.wait()
    return dict(printed_json(output))


@dataclass(frozen=True)
class Step:
    name: str
    check: Callable[[Machine], Figures]
    needs: tuple[str, ...] = ()  # steps whose runs it uses


STEPS = (
    Step("doctor", doctor),
    Step("CPU baseline", cpu_baseline),
    Step("one GPU", one_gpu, ("CPU baseline",)),
    Step("all GPUs", all_gpus, ("CPU baseline",)),
    Step("every sharding", shardings, ("CPU baseline",)),
    Step("rows sent as fp16 and bf16", exchange_precisions, ("CPU baseline",)),
    Step("bfloat16, float16, TF32", precisions, ("CPU baseline",)),
    Step("incremental checkpoints, Ctrl-C, resume", interrupt_and_resume, ("CPU baseline",)),
    Step("saves in the foreground", foreground_saves, ("CPU baseline",)),
    Step("evaluate on all, one and no GPU", evaluate, ("all GPUs",)),
    Step("recommend", recommend, ("all GPUs",)),
    Step("a stopped rank", stopped_rank, ("CPU baseline",)),
    Step("two torchrun agents", two_agents, ("CPU baseline",)),
    Step("from GPU to CPU and back", to_cpu_and_back, ("CPU baseline",)),
    Step("table optimizers", table_optimizers, ("CPU baseline",)),
    Step("throughput beside TorchRec", throughput),
)


# Bookkeeping


@dataclass
class Result:
    number: int
    name: str
    outcome: str = "pass"  # pass, fail, skipped
    reason: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    output: list[str] = field(default_factory=list)  # the last lines that a failed command printed


def run_step(number: int, step: Step, machine: Machine, earlier: Sequence[Result]) -> Result:
    """Run a step and return its result, whatever happens in it."""
    result = Result(number, step.name)
    started = time.monotonic()
    try:
        if missing := [r.name for r in earlier if r.name in step.needs and r.outcome != "pass"]:
            raise SkippedError(f"it needs '{missing[0]}', which did not pass")
        result.figures = step.check(machine)
    except SkippedError as skipped:
        result.outcome, result.reason = "skipped", str(skipped)
    except StepError as failure:
        result.outcome, result.reason, result.figures = "fail", failure.reason, failure.figures
        result.output = failure.output.splitlines()[-NUM_OUTPUT_LINES:]
    except Exception as error:
        result.outcome, result.reason = "fail", f"{type(error).__name__}: {error}"
        result.output = traceback.format_exc().splitlines()[-NUM_OUTPUT_LINES:]
    result.seconds = round(time.monotonic() - started, 1)
    return result


def with_needed(chosen: Iterable[int], steps: Sequence[Step]) -> list[int]:
    """Return the numbers of the chosen steps and of those that they need, in order."""
    numbers = {step.name: number for number, step in enumerate(steps, 1)}
    found = set(chosen)
    for number in sorted(found, reverse=True):
        found.update(with_needed((numbers[name] for name in steps[number - 1].needs), steps))
    return sorted(found)


def validate(
    machine: Machine, facts: Figures, output: Path, steps: Sequence[Step], chosen: Iterable[int]
) -> list[Result]:
    """Run the chosen steps and the ones that they need; print and write the report."""
    results: list[Result] = []
    for number in with_needed(chosen, steps):
        step = steps[number - 1]
        print(f"{number:2} {step.name} ...", flush=True)
        result = run_step(number, step, machine, results)
        results.append(result)
        print("  ", *(word for word in (result.outcome, f"{result.seconds} s", result.reason) if word), flush=True)
        for line in result.output:
            print(f"     | {line}", flush=True)
        output.write_text(report(machine, facts, results) + "\n", encoding="utf-8")  # also if the next one is killed
    print(*["", *table(results), "", f"written to {output}"], sep="\n")
    print(report(machine, facts, results))
    return results


def table(results: Sequence[Result]) -> list[str]:
    width = max(len(result.name) for result in results)
    return [f"{r.number:2}  {r.name:{width}}  {r.outcome:7}  {r.seconds:7.1f} s  {r.reason}".rstrip() for r in results]


def report(machine: Machine, facts: Figures, results: Sequence[Result]) -> str:
    """Return everything as one line of JSON."""
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in ("pass", "fail", "skipped")}
    seconds = round(sum(result.seconds for result in results), 1)
    validated = "GPU" if machine.device == "cuda" else "the steps only: no GPU was used"
    line = {"validated": validated, "device": machine.device, "procs": machine.procs, **counts, "seconds": seconds}
    return json.dumps({**line, **facts, "steps": [asdict(result) for result in results]})


def about() -> Figures:
    """Describe the machine and the versions, without environment variables, which may hold secrets."""
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": printed(["git", "-C", str(REPO), "rev-parse", "HEAD"]),
        "versions": versions,
        "driver": printed(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0],
        **json.loads(printed([sys.executable, "-P", "-c", ABOUT_TORCH]) or '{"devices": []}'),
    }


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def printed(command: Sequence[str]) -> str:
    """Return what a command prints; nothing if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--procs", type=int, default=0, help="number of GPUs (default: all), or of processes on CPU")
    parser.add_argument("--steps", default="", help="numbers of steps, like 2,7 (default: all)")
    parser.add_argument("--output", type=Path, default=Path("gpu-validation.json"))
    options = parser.parse_args(arguments)
    known = range(1, len(STEPS) + 1)
    chosen = [int(number) for number in options.steps.split(",") if number] or list(known)
    if not set(chosen) <= set(known):
        parser.error(f"--steps {options.steps}: give numbers from 1 to {len(STEPS)}")
    facts = about()
    if options.device == "cuda" and len(facts["devices"]) < max(1, options.procs):
        print(f"torch sees {len(facts['devices'])} GPUs here: {facts}. Use DEVICE=cpu to run the steps without.")
        return 1
    folder = Path(tempfile.mkdtemp(prefix="recmill-gpu-validation-"))
    print(f"data, runs and output are in {folder}, until all steps have passed", flush=True)
    machine = Machine(
        options.device, options.procs or (len(facts["devices"]) if options.device == "cuda" else 2), folder
    )
    results = validate(machine, facts, options.output.absolute(), STEPS, chosen)
    has_failed = any(result.outcome == "fail" for result in results)
    if not has_failed:
        shutil.rmtree(folder)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
