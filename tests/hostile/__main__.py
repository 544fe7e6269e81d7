"""Make seeded trials of every kind, two at a time, and print what is not OK; the last line is JSON."""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from . import arguments, environments, limits, mutations, races
from .sandbox import load_everything
from .verdict import Finding
from .worlds import Worlds

RunTrial = Callable[[Worlds, str, int, random.Random, random.Random], tuple[str, list[Finding]]]
KINDS: dict[str, tuple[RunTrial, float]] = {  # and its share of all trials
    "mutations": (mutations.run_trial, 0.6),
    "arguments": (arguments.run_trial, 0.24),
    "environment": (environments.run_environment, 0.06),
    "descriptors": (environments.run_descriptors, 0.04),
    "limits": (limits.run_limits, 0.04),
    "races": (races.run_trial, 0.02),
}
LANES = 2  # trials at a time


@dataclass(frozen=True)
class Result:
    kind: str
    index: int
    what: str
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        severities = {finding.severity for finding in self.findings}
        return "bug" if "bug" in severities else "weak" if severities else "ok"


def run_one(folder: Path, seed: int, kind: str, index: int, keeps: bool) -> Result:
    name = f"{kind}-{index:05d}"
    choice, order = random.Random(f"{seed}/{kind}/{index}"), random.Random(f"{seed}/{kind}")
    try:
        what, findings = KINDS[kind][0](Worlds(folder), name, index, choice, order)
    except Exception:  # noqa: BLE001 - one trial must not end all
        what, findings = "the tester itself failed", [Finding("bug", traceback.format_exc())]
    result = Result(kind, index, what, findings)
    if not keeps:
        for path in folder.glob(f"{name}*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
    return result


def results(folder: Path, seed: int, trials: list[tuple[str, int]], minutes: float, keeps: bool) -> Iterator[Result]:
    """Run trials in processes that are forks of this one, until all are done or the time is over."""
    deadline = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(LANES, context) as lanes:
        waiting = iter(trials)
        running = {lanes.submit(run_one, folder, seed, *trial, keeps) for trial in islice(waiting, LANES)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                yield future.result()
            if time.monotonic() < deadline:
                following = islice(waiting, len(done))
                running |= {lanes.submit(run_one, folder, seed, *trial, keeps) for trial in following}


def planned(total: int, kinds: list[str]) -> list[tuple[str, int]]:
    """Return (kind, index) of all trials; kinds take turns, so that a short time covers all of them."""
    shares = {kind: KINDS[kind][1] for kind in kinds}
    counts = {kind: max(1, round(total * share / sum(shares.values()))) for kind, share in shares.items()}
    places = [((index + 0.5) / count, kind, index) for kind, count in counts.items() for index in range(count)]
    return [(kind, index) for _, kind, index in sorted(places)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="number of trials of all kinds (default 1000)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no trial after this time (default: no limit)")
    parser.add_argument("--seed", type=int, help="of all trials, up to the machine's speed (default: random)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", metavar="KIND/NUMBER", help="repeat one trial of a seed, and keep its files")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    load_everything()
    folder = Path(tempfile.mkdtemp(prefix="recmill-hostile-"))
    Worlds(folder).make()
    trials = planned(options.trials, options.kinds)
    if options.only:
        kind, number = options.only.split("/")
        trials = [(kind, int(number))]
    counts: dict[str, Counter[str]] = {kind: Counter(ok=0, weak=0, bug=0) for kind, _ in trials}
    for result in results(folder, seed, trials, options.minutes, keeps=bool(options.only)):
        counts[result.kind][result.verdict] += 1
        if result.findings:
            texts = "; ".join(" / ".join(finding.text.split("\n")) for finding in result.findings)
            print(f"{result.verdict.upper()} {result.kind}/{result.index} {result.what}: {texts}", flush=True)
    if any(count["bug"] + count["weak"] for count in counts.values()):
        print(f"repeat one: make hostile SEED={seed} ONLY=KIND/NUMBER")
    if options.only:
        print(f"its files are kept in {folder}")
    else:
        shutil.rmtree(folder)
    total = sum(counts.values(), Counter[str]())
    report = {"seed": seed, **{verdict: total[verdict] for verdict in ("ok", "weak", "bug")}, "kinds": counts}
    print(json.dumps({**report, "seconds": round(time.monotonic() - started, 1)}))
    return int(bool(total["bug"] or total["weak"]))


if __name__ == "__main__":
    sys.exit(main())
