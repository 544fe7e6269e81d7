"""Kill training runs at random moments, and see that no checkpoint is torn, no step lost, no number different.

It knows the command and the files of a run directory, nothing else. A run that was never broken says what losses and
tensors must come out; then the same command is started and killed, again and again, until it is done.
"""

import argparse
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from recmill.checkpoints.safe_reader import SafeReader

GONE_SECONDS = 60.0  # after a kill no process of the job may be there any longer
STUCK_SECONDS = 180.0  # without a step, a save or an end
PREEMPTED_EXIT_CODE = 75  # after SIGTERM while training
TOLERANCE = 2e-5  # where the number of processes changed: of a loss, and of a tensor's largest value
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
        # A bias of attention's keys changes no result, so its gradient is rounding alone, other for other numbers of
        # processes; with the usual eps Adam would make steps of full length out of it.
        "optim": {"dense": {"eps": 1e-3}, "tables": {"eps": 1e-3}},
    },
}


@dataclass
class Tally:
    """What happened. `wrong` counts by kind; `left`: processes, files or a run that did not go on by itself."""

    kills: int = 0
    runs: int = 0
    resumed: int = 0  # starts that went on from a checkpoint
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, message: str) -> None:
        self.wrong[kind] += 1
        print(f"  WRONG ({kind}): {message}", flush=True)


# What a run directory says


def steps_on_disk(run: Path) -> list[int]:
    """Of everything that says it is a whole checkpoint, oldest first."""
    return sorted(int(path.parent.name[5:]) for path in (run / "checkpoints").glob("step-*/MANIFEST.json"))


def last_announced(run: Path) -> int:
    """The last step that the log called committed; 0: none."""
    log = run / "log.txt"
    announced = COMMITTED.findall(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
    return int(announced[-1].replace(",", "")) if announced else 0


def train_lines(run: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Steps in metrics.jsonl that were written after `since`. The last line may be half a line."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    parsed = (json.loads(line) for line in lines)
    return [line for line in parsed if line["split"] == "train" and line["time"] >= since]


def is_done(run: Path) -> bool:
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text(encoding="utf-8"))["state"] == "done"


def torn(checkpoint: Path) -> str | None:
    """Why this is no whole checkpoint, by its own manifest; None: it is one."""
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
            return f"{checkpoint / name}: not what the manifest says"
    return None


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor, whole, however it was cut."""
    reader = SafeReader(checkpoint)
    facts = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in facts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: value.numpy() for name, value in state.items()}


# One start of the command


class Attempt:
    def __init__(self, config: Path, run: Path, procs: int) -> None:
        self.run, self.procs = run, procs
        self.steps_before = steps_on_disk(run)
        self.announced_before = last_announced(run)
        self.was_killed = False
        self._members: dict[int, int] = {}  # process id -> when it began
        command = [sys.executable, "-P", "-m", "recmill", "train", str(config), "--run", str(run)]
        # One thread a process; a killed launcher's own files go with ours.
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(run.parent)}
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
        """By now, not by an attempt before."""
        return any(_changed_at(path) > self.started for path in self.hidden())

    def stale(self) -> list[Path]:
        return [path for path in self.hidden() if _changed_at(path) < self.started]

    def hidden(self) -> list[Path]:
        """Half a checkpoint, by its name or for want of a manifest: being saved or removed, or left by a kill."""
        folders = (self.run / "checkpoints").glob("*")
        return [path for path in folders if path.name[0] == "." or not (path / "MANIFEST.json").exists()]

    def has_saved(self) -> bool:
        return last_announced(self.run) > self.announced_before

    def wait_for(self, ready: Callable[[], Any], seconds: float = STUCK_SECONDS) -> bool:
        """False if the time is over first; an attempt that ends need not wait."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self, victim: str, choice: random.Random) -> str:
        """What was done: there may be no worker yet, or nobody at all any more."""
        launcher = self.process.pid
        if self.has_ended():
            return "nobody"
        self.was_killed = True
        os.kill(launcher, signal.SIGSTOP)  # so that it starts no other while we look
        os.waitid(os.P_PID, launcher, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        workers = _children(launcher)
        self._members = {pid: born for pid in [launcher, *_descendants(launcher)] if (born := _born(pid))}
        if victim == "one worker" and not workers:
            victim = "the launcher"
        if victim == "everything":
            for pid in [launcher, *workers]:
                _send(pid, signal.SIGKILL)
        elif victim == "one worker":
            rank = choice.randrange(len(workers))
            _send(workers[rank], signal.SIGKILL)
            victim = f"worker {rank + 1} of {len(workers)}"
        else:
            _send(launcher, signal.SIGTERM if victim == "SIGTERM" else signal.SIGKILL)
        _send(launcher, signal.SIGCONT)
        return victim

    def left(self) -> list[int]:
        """Processes of this job that are there when they should not be: waited for, then ended."""
        deadline = time.monotonic() + GONE_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in alive:
            _send(pid, signal.SIGKILL)
        if not self.has_ended():
            self.process.wait()
        return alive

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing stays behind, also when this test itself fails or is interrupted."""
        if self.kill("everything", random.Random()) != "nobody":
            self.left()

    def _alive(self) -> list[int]:
        self.has_ended()  # takes leave of a launcher that is gone
        return [pid for pid, born in self._members.items() if _born(pid) == born]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    """In the order in which they were started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return sorted({int(child) for text in lists for child in text.split()}, key=_born)
    return []


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def _born(pid: int) -> int:
    """In clock ticks since the machine started; 0: it is not there, or only its exit code is."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(facts[18])


# The unbroken run, and how a broken one compares


@dataclass(frozen=True)
class Unbroken:
    config: Path
    losses: dict[int, float]
    tensors: dict[str, np.ndarray]
    start_seconds: float
    train_seconds: float
    save_seconds: float  # of one save


def unbroken(config: Path, run: Path) -> Unbroken:
    looks = []  # each: whether it was saving
    with Attempt(config, run, procs=2) as attempt:
        attempt.wait_for(lambda: looks.append(attempt.is_saving()))
    if attempt.was_killed or not is_done(run):
        raise SystemExit(f"the unbroken run failed or takes too long:\n{Path(f'{run}.out').read_text()}")
    lines = train_lines(run)
    seconds = time.time() - attempt.started
    last = run / "checkpoints" / f"step-{steps_on_disk(run)[-1]:08d}"
    return Unbroken(
        config,
        {line["step"]: line["loss"] for line in lines},
        tensors(last),
        start_seconds=lines[0]["time"] - attempt.started,
        train_seconds=lines[-1]["time"] - lines[0]["time"],
        save_seconds=seconds * sum(looks) / len(looks) / (len(lines) // SAVE_EVERY_STEPS),
    )


def differences(run: Path, expected: Unbroken, tolerance: float) -> list[str]:
    """Losses step by step, then tensor by tensor; with a tolerance of 0 to the bit."""
    lines = train_lines(run)
    if [line["step"] for line in lines] != list(expected.losses):
        return [f"{len(lines)} steps in metrics.jsonl, {len(expected.losses)} of the unbroken run, or in another order"]
    found = []
    for line in lines:
        other = expected.losses[line["step"]]
        if not abs(line["loss"] - other) <= tolerance * abs(other):
            found.append(f"step {line['step']}: loss {line['loss']!r}, unbroken {other!r}")
    ours = tensors(run / "checkpoints" / f"step-{steps_on_disk(run)[-1]:08d}")
    if ours.keys() != expected.tensors.keys():
        return [*found, f"other tensors: {sorted(ours.keys() ^ expected.tensors.keys())}"]
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
    procs: int = 2
    is_same_world: bool = True  # no step was done by another number of processes


def attempt_to_the_end(run: Broken, expected: Unbroken, tally: Tally) -> None:
    """With nobody killed."""
    with Attempt(expected.config, run.path, run.procs) as attempt:
        if not attempt.wait_for(lambda: False):
            tally.add("left", f"{run.path}: not done after {STUCK_SECONDS} s")
    check_after(attempt, run, tally)


def attempt_and_kill(run: Broken, expected: Unbroken, choice: random.Random, tally: Tally) -> None:
    moment = choice.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    victim, share = choice.choice(VICTIMS), choice.random()
    with Attempt(expected.config, run.path, run.procs) as attempt:
        if not wait_for_moment(attempt, moment, share, expected):
            tally.add("left", f"{run.path}: nothing happened for {STUCK_SECONDS} s")
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


def wait_for_moment(attempt: Attempt, moment: str, share: float, expected: Unbroken) -> bool:
    """False: it never came. `share`: how far into it, from 0 to 1."""
    if moment == "start-up":
        attempt.wait_for(attempt.first_step, share * expected.start_seconds)  # it may be quicker than the unbroken run
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
    """What must hold whenever no process is at work on a run."""
    folder, steps = run.path / "checkpoints", steps_on_disk(run.path)
    first, newest_before = attempt.first_step(), max(attempt.steps_before, default=0)
    run.is_same_world &= run.procs == 2 or first is None
    tally.resumed += first is not None and newest_before > 0
    for step in steps:
        if problem := torn(folder / f"step-{step:08d}"):
            tally.add("torn", problem)
    if (announced := last_announced(run.path)) > max(steps, default=0):
        tally.add("lost", f"{run.path}: the log says step {announced} was committed, on disk are {steps}")
    if first is not None and first != newest_before + 1:
        tally.add("lost", f"{run.path}: it went on with step {first}, the newest checkpoint was {newest_before}")
    leftovers = attempt.hidden() if is_done(run.path) else attempt.stale()
    if attempt.has_saved() and leftovers:
        tally.add("left", f"{leftovers[0]} is still there after a later save")
    if not attempt.was_killed and not is_done(run.path):
        tally.add("left", f"{run.path}: it ended by itself, with exit code {attempt.process.returncode}")


def compare(run: Broken, expected: Unbroken, tally: Tally) -> None:
    found = differences(run.path, expected, 0.0 if run.is_same_world else TOLERANCE)
    for problem in found[:5]:
        tally.add("different", f"{run.path}: {problem}")
    how = "to the bit" if run.is_same_world else f"up to {TOLERANCE}"
    print(f"{run.name} is done, {'NOT ' if found else ''}equal to the unbroken run {how}", flush=True)


def crash(folder: Path, models: list[str], rounds: int, steps: int, choice: random.Random) -> Tally:
    """So many kills; the run that is under way then is finished. Stops at the first thing that is wrong."""
    tally = Tally()
    expected = {model: unbroken(prepared(folder, model, steps), folder / f"unbroken-{model}") for model in models}
    for number in range(rounds):  # each takes a kill at least
        if tally.wrong or tally.kills >= rounds:
            break
        model = models[number % len(models)]
        run = Broken(f"{model} {number + 1}", folder / f"run-{number + 1}-{model}")
        can_change = number // len(models) % 2 == 1  # the others show equality to the bit
        while not tally.wrong and not is_done(run.path) and tally.kills < rounds:
            attempt_and_kill(run, expected[model], choice, tally)
            if can_change and choice.random() < 1 / 3:
                run.procs = choice.choice([procs for procs in (1, 2, 3) if procs != run.procs])
        if not tally.wrong and not is_done(run.path):
            attempt_to_the_end(run, expected[model], tally)
        if not tally.wrong:
            compare(run, expected[model], tally)
            tally.runs += 1
    return tally


def prepared(folder: Path, model: str, steps: int) -> Path:
    """The config of a run on data that is made for it."""
    data, file = folder / DATASETS[model], folder / f"{model}.toml"
    command = [sys.executable, "-P", "-m", "recmill", "prepare", DATASETS[model], "--output", str(data)]
    subprocess.run([*command, *PREPARED[DATASETS[model]]], check=True, capture_output=True)
    own = CONFIGS[model]
    config = own | {
        "data": {"path": str(data), "limit_val_batches": 1, "limit_test_batches": 1},
        "train": {"device": "cpu", "num_epochs": 10**6, "max_steps": steps, "log_every_steps": 1, **own["train"]},
        "eval": {"every_steps": 10**6, "global_batch_size": 64, **own.get("eval", {})},
        "checkpoint": {"every_steps": SAVE_EVERY_STEPS},
    }
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how many kills (default 20)")
    parser.add_argument("--seed", type=int, help="of what is killed when, up to the machine's speed (default: any)")
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=400, help="length of a run (default 400)")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="recmill-crashtest-"))
    tally = crash(folder, asked.models, asked.rounds, asked.steps, random.Random(seed))
    if tally.wrong:
        print(f"kept: {folder}; what each run printed: run-*.out")
    else:
        shutil.rmtree(folder)
    counts = {kind: tally.wrong[kind] for kind in ("torn", "lost", "different", "left")}
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"seed": seed, "kills": tally.kills, "runs": tally.runs, **counts, "seconds": seconds}))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
