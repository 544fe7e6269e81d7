"""Kill training runs at random moments, and check that no checkpoint is corrupt, no step lost and no number different.

It uses only the command and the files of a run directory. An unbroken run gives the expected losses and tensors; then
the same command is started and killed, again and again, until the run is done. With --store cached_ssd the unbroken run
has its tables in memory, the others have theirs in files, and processes are also killed at points of the store's work.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import xxhash

from recmill.checkpoints.format import verify

from .checkpoints import tensors_of
from .processes import born, children, descendants, send

GONE_SECONDS = 60.0  # after a kill, all processes of the job must have ended by then
STUCK_SECONDS = 180.0  # longest time without a step, a save or the end of the run
DEAD_WORKER_EXIT_CODE = 5  # a worker was killed
PREEMPTED_EXIT_CODE = 75  # after SIGTERM while training
TOLERANCE = 2e-5  # if the number of processes changed: relative to a loss, and to a tensor's largest value
VICTIMS = ("one worker", "the launcher", "everything", "SIGTERM")
MOMENTS = {"start-up": 0.2, "training": 0.4, "saving": 0.4}
SAVE_EVERY_STEPS = 20
COMMITTED = re.compile(r"checkpoint committed:? step[ =]([\d,]+) in")
PREPARED = {
    "synthetic-clicks": ["--rows", "4000", "--dense", "4", "--tables", "7,1000,100000"],
    "synthetic-histories": ["--users", "300", "--items", "3000", "--interactions", "6000"],
}
DATASETS = {"dlrm": "synthetic-clicks", "bert4rec": "synthetic-histories"}
CONFIGS: dict[str, dict[str, Any]] = {
    "dlrm": {
        "model": {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [32, 16], "top_mlp": [32]},
        "train": {"global_batch_size": 64},
    },
    "bert4rec": {
        "model": {"name": "bert4rec", "embedding_dim": 32, "num_layers": 1, "max_length": 20},
        "train": {"global_batch_size": 8},
        "eval": {"protocols": ["full"]},
        # A bias of attention's keys changes no result, so its gradient is only rounding, which depends on the number
        # of processes. With the usual eps, Adam would turn it into steps of full length.
        "optim": {"dense": {"eps": 1e-3}, "tables": {"eps": 1e-3}},
    },
}
# So wide that most of the rows that are trained do not fit in a budget of 2 MB, with any number of processes. Such a
# wide transformer amplifies rounding, which depends on the number of processes, unless steps are small.
WIDE: dict[str, dict[str, Any]] = {
    "dlrm": {
        "model": {"embedding_dim": 128, "bottom_mlp": [128]},
        "optim": {"tables": {"name": "rowwise_adagrad"}},
    },
    "bert4rec": {
        "model": {"embedding_dim": 256},
        "optim": {
            "dense": {"name": "sgd", "lr": 0.05},
            "tables": {"name": "rowwise_adagrad", "lr": 0.002, "eps": 0.01},
        },
    },
}
# Where a process kills itself, and up to which time that it gets there.
POINTS = {"store.read": 1000, "store.append": 20, "store.compact": 8, "store.snapshot": 5, "ckpt.rows": 5}
AT_A_POINT = 1 / 3  # share of the kills, with cached_ssd


@dataclass
class Tally:
    """Counts of what happened. `wrong` counts problems by kind; `left` means processes, files or a run left behind."""

    kills: int = 0
    runs: int = 0
    resumed: int = 0  # starts that resumed from a checkpoint
    points: Counter[str] = field(default_factory=Counter)  # kills by point of the store's work
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, message: str) -> None:
        self.wrong[kind] += 1
        print(f"  WRONG ({kind}): {message}", flush=True)


# Reading a run directory


def steps_on_disk(run: Path) -> list[int]:
    """Return the steps of all checkpoints that have a manifest, oldest first."""
    return sorted(int(path.parent.name[5:]) for path in (run / "checkpoints").glob("step-*/MANIFEST.json"))


def last_announced(run: Path) -> int:
    """Return the last step that the log reported as committed; 0: none."""
    log = run / "log.txt"
    announced = COMMITTED.findall(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
    return int(announced[-1].replace(",", "")) if announced else 0


def train_lines(run: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the training reports in metrics.jsonl written after `since`. The last line may be incomplete."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    parsed = (json.loads(line) for line in lines)
    return [line for line in parsed if line["split"] == "train" and line["time"] >= since]


def is_done(run: Path) -> bool:
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text(encoding="utf-8"))["state"] == "done"


def corruption(checkpoint: Path) -> str | None:
    """Return why a checkpoint does not match its own manifest; None: it does."""
    try:
        expected = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint}: {error!r}"
    found = {path.name for path in checkpoint.iterdir()} - {"MANIFEST.json"}
    if found != expected.keys():
        return f"{checkpoint}: files {sorted(found)}, the manifest names {sorted(expected)}"
    for name, facts in expected.items():
        content = (checkpoint / name).read_bytes()
        if (len(content), xxhash.xxh3_128_hexdigest(content)) != (facts["bytes"], facts["xxh3"]):
            return f"{checkpoint / name}: does not match the manifest"
    return None


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return every tensor, put together from its shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that there is no process group
        return {name: value.numpy() for name, value in tensors_of(verify(checkpoint)).items()}


def held_open(folder: Path) -> list[str]:
    """Return the files in `folder`, named or unnamed, that are there or that a process still has open."""
    found = [str(path) for path in folder.glob("*")]
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended meanwhile
            if folder in (target := link.readlink()).parents:
                found.append(f"{link} -> {target}")
    return found


# One start of the command


class Attempt:
    """One start of the command, and its processes."""

    def __init__(self, config: Path, run: Path, procs: int, fail: str = "") -> None:
        self.run = run
        self.procs = procs
        self.steps_before = steps_on_disk(run)
        self.announced_before = last_announced(run)
        self.was_killed = False
        self._members: dict[int, int] = {}  # process id -> start time
        command = [sys.executable, "-P", "-m", "recmill", "train", str(config), "--run", str(run)]
        # One thread per process; the files of a killed launcher are removed with ours.
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(run.parent), "RECMILL_FAIL": fail}
        self.started = time.time()
        with Path(f"{run}.out").open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--procs", str(procs)],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def first_step(self) -> int | None:
        return next((line["step"] for line in train_lines(self.run, self.started)), None)

    def is_saving(self) -> bool:
        """Return whether this attempt, not an earlier one, is writing a checkpoint."""
        return any(_changed_at(path) > self.started for path in self.hidden())

    def stale(self) -> list[Path]:
        return [path for path in self.hidden() if _changed_at(path) < self.started]

    def hidden(self) -> list[Path]:
        """Return incomplete checkpoints, by name or without a manifest: being saved or removed, or left by a kill."""
        folders = (self.run / "checkpoints").glob("*")
        return [path for path in folders if path.name[0] == "." or not (path / "MANIFEST.json").exists()]

    def has_saved(self) -> bool:
        return last_announced(self.run) > self.announced_before

    def wait_for(self, ready: Callable[[], Any], seconds: float = STUCK_SECONDS) -> bool:
        """Wait until `ready()` is true or the attempt has ended. Return False if the time is over first."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self, victim: str, choice: random.Random) -> str:
        """Kill a victim and return what was killed: there may be no worker yet, or no process any more."""
        launcher = self.process.pid
        if self.has_ended():
            return "nobody"
        self.was_killed = True
        os.kill(launcher, signal.SIGSTOP)  # so that it starts no process while we look
        os.waitid(os.P_PID, launcher, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        workers = children(launcher)
        self._members = {pid: start for pid in [launcher, *descendants(launcher)] if (start := born(pid))}
        if victim == "one worker" and not workers:
            victim = "the launcher"
        if victim == "everything":
            for pid in [launcher, *workers]:
                send(pid, signal.SIGKILL)
        elif victim == "one worker":
            rank = choice.randrange(len(workers))
            send(workers[rank], signal.SIGKILL)
            victim = f"worker {rank + 1} of {len(workers)}"
        else:
            send(launcher, signal.SIGTERM if victim == "SIGTERM" else signal.SIGKILL)
        send(launcher, signal.SIGCONT)
        return victim

    def left(self) -> list[int]:
        """Return the processes of this job that did not end in time, after killing them."""
        deadline = time.monotonic() + GONE_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in alive:
            send(pid, signal.SIGKILL)
        if not self.has_ended():
            self.process.wait()
        return alive

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *error: object) -> None:
        """Kill all processes, also when this test itself fails or is interrupted."""
        if self.kill("everything", random.Random()) != "nobody":
            self.left()

    def _alive(self) -> list[int]:
        self.has_ended()  # reaps a launcher that has ended
        return [pid for pid, start in self._members.items() if born(pid) == start]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# The unbroken run, and the comparison with it


@dataclass(frozen=True)
class Unbroken:
    losses: dict[int, float]
    tensors: dict[str, np.ndarray]
    start_seconds: float
    train_seconds: float
    save_seconds: float  # of one save


def unbroken(config: Path, run: Path) -> Unbroken:
    looks = []  # whether it was saving, each time we looked
    with Attempt(config, run, procs=2) as attempt:
        attempt.wait_for(lambda: looks.append(attempt.is_saving()))
    if attempt.was_killed or not is_done(run):
        raise SystemExit(f"the unbroken run failed or took too long:\n{Path(f'{run}.out').read_text()}")
    lines = train_lines(run)
    seconds = time.time() - attempt.started
    last = run / "checkpoints" / f"step-{steps_on_disk(run)[-1]:08d}"
    return Unbroken(
        {line["step"]: line["loss"] for line in lines},
        tensors(last),
        start_seconds=lines[0]["time"] - attempt.started,
        train_seconds=lines[-1]["time"] - lines[0]["time"],
        save_seconds=seconds * sum(looks) / len(looks) / (len(lines) // SAVE_EVERY_STEPS),
    )


def differences(run: Path, expected: Unbroken, tolerance: float) -> list[str]:
    """Return what differs in losses and tensors; with a tolerance of 0, they are compared bit for bit."""
    lines = train_lines(run)
    if [line["step"] for line in lines] != list(expected.losses):
        return [f"{len(lines)} steps in metrics.jsonl, {len(expected.losses)} in the unbroken run, or another order"]
    found = []
    for line in lines:
        other = expected.losses[line["step"]]
        if not abs(line["loss"] - other) <= tolerance * abs(other):
            found.append(f"step {line['step']}: loss {line['loss']!r}, unbroken {other!r}")
    ours = tensors(run / "checkpoints" / f"step-{steps_on_disk(run)[-1]:08d}")
    if ours.keys() != expected.tensors.keys():
        return [*found, f"different tensors: {sorted(ours.keys() ^ expected.tensors.keys())}"]
    for name, value in expected.tensors.items():
        if _digest(ours[name]) != _digest(value):
            distance = np.abs(ours[name].astype(np.float64) - value).max() / max(np.abs(value).max(), 1e-30)
            if not tolerance or not distance <= tolerance:
                found.append(f"{name}: off by {distance:.2g} of its largest value")
    return found


def _digest(value: np.ndarray) -> tuple[Any, ...]:
    return value.dtype, value.shape, xxhash.xxh3_128_digest(value.tobytes())


# The broken runs


@dataclass
class Broken:
    name: str
    path: Path
    config: Path
    rows: Path | None  # directory of row files, with cached_ssd
    procs: int = 2
    is_same_world: bool = True  # all steps ran with the same number of processes


def attempt_to_the_end(run: Broken, tally: Tally) -> None:
    """Run the command to the end without a kill."""
    with Attempt(run.config, run.path, run.procs) as attempt:
        if not attempt.wait_for(lambda: False):
            tally.add("left", f"{run.path}: not done after {STUCK_SECONDS} s")
    check_after(attempt, run, tally)


def attempt_and_kill(run: Broken, expected: Unbroken, choice: random.Random, tally: Tally) -> None:
    moment = choice.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    victim, share = choice.choice(VICTIMS), choice.random()
    with Attempt(run.config, run.path, run.procs) as attempt:
        if not wait_for_moment(attempt, moment, share, expected):
            tally.add("left", f"{run.path}: no progress for {STUCK_SECONDS} s")
        seconds = time.time() - attempt.started
        was_training = attempt.first_step() is not None
        killed = attempt.kill(victim, choice)
        if left := attempt.left():
            tally.add("left", f"{run.path}: {len(left)} processes {GONE_SECONDS} s after a kill, {killed}, {moment}")
    tally.kills += killed != "nobody"
    code = attempt.process.returncode
    print(
        f"{tally.kills:3} {run.name}: {killed}, {moment}, after {seconds:.2f} s of {run.procs} processes: "
        f"step {max((line['step'] for line in train_lines(run.path)), default=0)}, "
        f"committed {max(steps_on_disk(run.path), default=0)}, exit code {code}",
        flush=True,
    )
    is_stopped = killed == "SIGTERM" and was_training and not is_done(run.path)
    if is_stopped and code != PREEMPTED_EXIT_CODE:
        tally.add("left", f"{run.path}: exit code {code} after SIGTERM, not {PREEMPTED_EXIT_CODE}")
    check_after(attempt, run, tally)


def attempt_to_a_point(run: Broken, choice: random.Random, tally: Tally) -> None:
    """Let a process kill itself at a point of the store's work; if it never gets there, the run ends."""
    point, most = choice.choice(list(POINTS.items()))
    entry = f"{point}@rank={choice.randrange(run.procs)}@hit={choice.randint(1, most)}:kill"
    with Attempt(run.config, run.path, run.procs, fail=entry) as attempt:
        if not attempt.wait_for(lambda: False):
            tally.add("left", f"{run.path}: neither done nor killed after {STUCK_SECONDS} s with {entry}")
    attempt.was_killed |= attempt.process.returncode == DEAD_WORKER_EXIT_CODE
    tally.kills += attempt.was_killed
    tally.points[point] += attempt.was_killed
    print(f"{tally.kills:3} {run.name}: {entry}, exit code {attempt.process.returncode}", flush=True)
    check_after(attempt, run, tally)


def wait_for_moment(attempt: Attempt, moment: str, share: float, expected: Unbroken) -> bool:
    """Wait for a moment, and `share` (0 to 1) of its length. Return False if it never came."""
    if moment == "start-up":
        attempt.wait_for(attempt.first_step, share * expected.start_seconds)  # it may be faster than the unbroken run
        return True
    if not attempt.wait_for(attempt.first_step):
        return False
    attempt.wait_for(lambda: False, share * expected.train_seconds / 3)
    if moment == "saving":
        is_in_time = attempt.wait_for(attempt.is_saving)
        attempt.wait_for(lambda: False, share * expected.save_seconds)
        return is_in_time
    return True


def check_after(attempt: Attempt, run: Broken, tally: Tally) -> None:
    """Check what must hold whenever no process works on a run."""
    folder, steps = run.path / "checkpoints", steps_on_disk(run.path)
    first, newest_before = attempt.first_step(), max(attempt.steps_before, default=0)
    run.is_same_world &= run.procs == 2 or first is None
    tally.resumed += first is not None and newest_before > 0
    for step in steps:
        if problem := corruption(folder / f"step-{step:08d}"):
            tally.add("corrupt", problem)
    if (announced := last_announced(run.path)) > max(steps, default=0):
        tally.add("lost", f"{run.path}: the log reports step {announced} as committed, on disk are {steps}")
    if first is not None and first != newest_before + 1:
        tally.add("lost", f"{run.path}: it resumed with step {first}, the newest checkpoint was {newest_before}")
    leftovers = attempt.hidden() if is_done(run.path) else attempt.stale()
    if attempt.has_saved() and leftovers:
        tally.add("left", f"{leftovers[0]} is still there after a later save")
    if run.rows and (files := held_open(run.rows)):
        tally.add("left", f"{len(files)} row files: {files[0]}")
    if not attempt.was_killed and not is_done(run.path):
        tally.add("left", f"{run.path}: it ended without a kill, with exit code {attempt.process.returncode}")


def compare(run: Broken, expected: Unbroken, tally: Tally) -> None:
    found = differences(run.path, expected, 0.0 if run.is_same_world else TOLERANCE)
    for problem in found[:5]:
        tally.add("different", f"{run.path}: {problem}")
    how = "bit for bit" if run.is_same_world else f"up to {TOLERANCE}"
    print(f"{run.name} is done, {'NOT ' if found else ''}equal to the unbroken run {how}", flush=True)


def crash(
    folder: Path, models: list[str], rounds: int, steps: int, choice: random.Random, store: str = "device_mem"
) -> Tally:
    """Kill `rounds` times, then finish the current run. Stop at the first problem."""
    tally = Tally()
    rows = folder / "rows" if store == "cached_ssd" else None
    if rows:
        rows.mkdir()
    expected, configs = {}, {}
    for model in models:
        config = prepared(folder, model, steps, is_wide=rows is not None)
        whole = folder / f"unbroken-{model}"
        expected[model] = unbroken(write_config(Path(f"{whole}.toml"), config), whole)
        if rows:
            config["tables"] = {"store": store, "cache_memory_budget_mb": 2, "path": str(rows)}
        configs[model] = write_config(folder / f"{model}.toml", config)
    for number in itertools.count():  # a run may be done before it can be killed
        if tally.wrong or tally.kills >= rounds:
            break
        model = models[number % len(models)]
        run = Broken(f"{model} {number + 1}", folder / f"run-{number + 1}-{model}", configs[model], rows)
        can_change = number // len(models) % 2 == 1  # the others must be equal bit for bit
        while not tally.wrong and not is_done(run.path) and tally.kills < rounds:
            if rows and choice.random() < AT_A_POINT:
                attempt_to_a_point(run, choice, tally)
            else:
                attempt_and_kill(run, expected[model], choice, tally)
            if can_change and choice.random() < 1 / 3:
                run.procs = choice.choice([procs for procs in (1, 2, 3) if procs != run.procs])
        if not tally.wrong and not is_done(run.path):
            attempt_to_the_end(run, tally)
        if not tally.wrong:
            compare(run, expected[model], tally)
            tally.runs += 1
    return tally


def prepared(folder: Path, model: str, steps: int, is_wide: bool) -> dict[str, Any]:
    """Prepare the data of a run and return its config."""
    data, own = folder / DATASETS[model], CONFIGS[model]
    command = [sys.executable, "-P", "-m", "recmill", "prepare", DATASETS[model], "--output", str(data)]
    subprocess.run([*command, *PREPARED[DATASETS[model]]], check=True, capture_output=True)
    config = own | {
        "data": {"path": str(data), "limit_val_batches": 1, "limit_test_batches": 1},
        "train": {"device": "cpu", "num_epochs": 10**6, "max_steps": steps, "log_every_steps": 1, **own["train"]},
        "eval": {"every_steps": 10**6, "global_batch_size": 64, **own.get("eval", {})},
        "checkpoint": {"every_steps": SAVE_EVERY_STEPS},
    }
    if is_wide:
        config["model"] = own["model"] | WIDE[model]["model"]
        config["optim"] = WIDE[model]["optim"]
        config["sharding"] = {"default": "row_wise"}
        config["checkpoint"]["full_every"] = 3
    return config


def write_config(file: Path, config: dict[str, Any]) -> Path:
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="number of kills (default 20)")
    parser.add_argument(
        "--seed",
        type=int,
        help="of what is killed when, up to the machine's speed (default: random)",
    )
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--store", choices=["device_mem", "cached_ssd"], default="device_mem", help="tables.store")
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default 400)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="recmill-crashtest-"))
    tally = crash(folder, options.models, options.rounds, options.steps, random.Random(seed), options.store)
    if tally.wrong:
        print(f"files are kept in {folder}; run-*.out holds what each run printed")
    else:
        shutil.rmtree(folder)
    counts: dict[str, float] = {kind: tally.wrong[kind] for kind in ("corrupt", "lost", "different", "left")}
    counts |= {"seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({"seed": seed, "kills": tally.kills, "runs": tally.runs, **tally.points, **counts}))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
