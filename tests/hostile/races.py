"""Commands at the same time: readers of a run that saves and prunes, two trainings of one run, removal, and signals."""

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .sandbox import Sandbox, cpu_seconds, terminated_at_end
from .verdict import Finding, judge
from .worlds import Worlds

FOREVER = ("--set", "train.max_steps=0", "--set", "train.num_epochs=1000000", "--set", "eval.every_steps=100000")
TRAIN = ("train", "config.toml", "--run", "new", *FOREVER)
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGTERM", "SIGINT"]
SAVING_SECONDS = 6.0  # how long readers race with a run
STOP_SECONDS = 60.0
START_SECONDS = 0.1  # of CPU time: before that, Python itself starts, and nothing of ours can handle a signal


def run_trial(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    """Make one race; one in two is a signal to the launcher."""
    others = [_readers, _two_trainings, _removal]
    if index % 2:
        return others[index // 2 % len(others)](worlds, name, choice)
    number = SIGNALS[index // 2 % len(SIGNALS)]
    is_early = choice.random() < 0.5
    seconds = choice.uniform(0.1, 1.5) if is_early else choice.uniform(1.5, 9.0)
    procs = choice.choice([1, 1, 2])
    return _signal(worlds, name, number, seconds, procs, twice=choice.random() < 0.2)


def _signal(
    worlds: Worlds, name: str, signal_name: str, seconds: float, procs: int, twice: bool
) -> tuple[str, list[Finding]]:
    sandbox = worlds.copy("clicks", name)
    arguments = (*TRAIN, "--set", "checkpoint.every_steps=2", "--procs", str(procs))
    number = signal.Signals[signal_name]
    what = f"{signal_name} {'twice ' if twice else ''}after {seconds:.2f} s: train --procs {procs}"
    process = sandbox.start(*arguments, preexec_fn=_default(number))
    with terminated_at_end(process):
        time.sleep(seconds)
        is_ready = cpu_seconds(process.pid) > START_SECONDS
        process.send_signal(number)
        if twice:
            time.sleep(1.2)
            if process.poll() is None:
                process.send_signal(number)
        outcome = sandbox.end(process, arguments, seconds=STOP_SECONDS, gone_seconds=30.0)
    codes = {"SIGTERM": {75}, "SIGINT": {130}, "SIGKILL": {-9}}.get(signal_name, {-number, 128 + number, 75, 130})
    outcome = replace(outcome, left=[text for text in outcome.left if not _is_before_workers(Path(text))])
    if not is_ready and not outcome.stdout:
        codes = {*codes, -number}
        if outcome.code == -number:
            outcome = replace(outcome, stderr="")  # Python itself may print a traceback
    found = judge(outcome, codes)
    return what, [*found, *_verified(sandbox)]


def _default(number: signal.Signals) -> Callable[[], None]:
    """Return a function that undoes what nohup does to a signal; SIGKILL cannot be changed."""

    def restore() -> None:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)

    return restore


def _is_before_workers(job: Path) -> bool:
    """Return whether this is a job directory whose launcher was killed before it had workers, which remove it."""
    return job.name.startswith(("recmill-new-", "recmill-launched-")) and not (job / "out-0.txt").exists()


def _verified(sandbox: Sandbox) -> list[Finding]:
    """Check the checkpoints, if the run has any."""
    if not any((sandbox.folder / "new" / "checkpoints").glob("step-*/MANIFEST.json")):
        return []
    check = sandbox.fork("checkpoint", "verify", "new")
    return [] if check.code == 0 else [Finding("bug", f"the run is corrupt afterwards: {check.text[:300]}")]


def _readers(worlds: Worlds, name: str, choice: random.Random) -> tuple[str, list[Finding]]:
    """Read a run while it saves at every step and prunes: whatever is read must be complete."""
    world = choice.choice(["clicks", "incremental"])
    sandbox = worlds.copy(world, name)
    reader = worlds.sandbox(f"{name}.reader")
    saves = ("--set", "checkpoint.every_steps=1", "--set", "checkpoint.keep=2")
    run = str(sandbox.folder / "new")
    readers = [
        ("evaluate", run, "--json"),
        ("checkpoint", "verify", run, "--json"),
        ("checkpoint", "list", run, "--json"),
        ("checkpoint", "inspect", run, "--json"),
    ]
    found: list[Finding] = []
    process = sandbox.start(*TRAIN, *saves)
    reads = 0
    with terminated_at_end(process):
        deadline = time.monotonic() + 30
        while not any(Path(run).glob("checkpoints/step-*/MANIFEST.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + SAVING_SECONDS
        while time.monotonic() < deadline and process.poll() is None and not found:
            outcome = reader.fork(*choice.choice(readers), is_alone=False)
            reads += 1
            found = judge(outcome, {0})
            if outcome.code:
                found = [Finding("bug", f"exit code {outcome.code}: {outcome.text[:300]}")]
            if not found and any(
                word in outcome.text for word in ("missing", "corrupt", "cannot be read", "unreadable")
            ):
                found = [Finding("bug", f"a run that saves looks corrupt: {outcome.text[:300]}")]
            found = [Finding(f.severity, f"{' '.join(outcome.arguments[:2])}: {f.text}") for f in found]
        process.send_signal(signal.SIGTERM)
        ended = sandbox.end(process, TRAIN, seconds=STOP_SECONDS, gone_seconds=30.0)
    return f"{reads} readers of a run on {world} that saves at every step", [
        *found,
        *judge(ended, {75}),
        *_verified(sandbox),
    ]


def _two_trainings(worlds: Worlds, name: str, choice: random.Random) -> tuple[str, list[Finding]]:
    """Start a run twice: one trains, the other says that the directory is in use, or comes when all is done."""
    sandbox = worlds.copy("clicks", name)
    arguments = ("train", "config.toml", "--run", "new")
    delay = choice.choice([0.0, 0.2, 1.0, 3.0, 5.0])
    second = worlds.sandbox(f"{name}.second")
    second_arguments = ("train", "config.toml", "--run", "new")
    first_process = sandbox.start(*arguments)
    with terminated_at_end(first_process):
        time.sleep(delay)
        second_process = second.start(*second_arguments, cwd=sandbox.folder)
        with terminated_at_end(second_process):
            codes = [_waited(first_process), _waited(second_process)]
    outcomes = [sandbox.end(first_process, arguments), second.end(second_process, second_arguments)]
    found = [finding for outcome in outcomes for finding in judge(outcome, {0, 5}, ["new"])]
    if 0 not in codes:
        found.append(Finding("bug", f"two trainings of one run: exit codes {codes}, none succeeded"))
    return f"two trainings of one run, {delay} s apart", [*found, *_verified(sandbox)]


def _waited(process: "subprocess.Popen[bytes]", seconds: float = 90.0) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _removal(worlds: Worlds, name: str, choice: random.Random) -> tuple[str, list[Finding]]:
    """Remove a run while it trains: it must end with an error, or finish."""
    sandbox = worlds.copy("clicks", name)
    arguments = (*TRAIN, "--set", "checkpoint.every_steps=5")
    process = sandbox.start(*arguments)
    what = choice.choice(["new", "new/checkpoints", "data"])
    with terminated_at_end(process):
        deadline = time.monotonic() + 30
        while not (sandbox.folder / "new" / "checkpoints").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(choice.random())
        for _ in range(5):
            shutil.rmtree(sandbox.folder / what, ignore_errors=True)
        if _waited(process, 15) is None:  # what it needs is still in memory
            process.send_signal(signal.SIGTERM)
        outcome = sandbox.end(process, arguments, seconds=STOP_SECONDS, gone_seconds=30.0)
    names = ["new"] if outcome.code != 75 else []
    return f"{what} is removed during training", judge(outcome, {3, 4, 5, 75}, names)
