"""Say what limits the speed of a run, from the time that each rank spent in each part of its steps."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

BOUND = 0.2  # of the time; less is "partly"
PARTLY = 0.05
LATE = 0.1
_SHORT_RUN = 30.0  # seconds: how often it saves and validates is not worth a change
_FEW_STEPS = 10  # after the warm-up
_EXPLAINS = 0.8  # of the time that the others wait for a late rank
_PRESSED = 0.5  # of the time in which some thread of the machine waited for a core
_COMPUTE = ("forward", "backward", "update")


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: seconds by part of its `steps`, without the warm-up; pauses in all of the training."""

    rank: int
    host: str
    steps: int
    parts: dict[str, float]
    counted: dict[str, float]  # counters of all of the training, and its "seconds"

    @property
    def step_seconds(self) -> float:
        return sum(spent for part, spent in self.parts.items() if part not in ("save", "validate"))


@dataclass(frozen=True)
class Hints:
    """Settings on which advice depends."""

    prefetch: int
    saves_in_background: bool


@dataclass(frozen=True)
class Verdict:
    text: str
    kind: str  # input, exchange, sync, late, save, validate, other, compute or unknown
    steps: int  # on which it is based
    shares: dict[str, float]  # of a step: input, sync, exchange, compute, other
    seconds: dict[str, float]  # of the run: in steps, save, validate
    ranks: list[dict[str, Any]]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.text, **{key: value for key, value in asdict(self).items() if key != "text"}}


def verdict(ranks: Sequence[RankTimes], hints: Hints) -> Verdict:
    """Return what limits the run, what it costs and what to try."""
    steps = min(rank.steps for rank in ranks)
    seconds = {name: fmean(rank.parts[name] for rank in ranks) for name in ("save", "validate")}
    seconds = {"steps": fmean(rank.counted["seconds"] for rank in ranks) - sum(seconds.values()), **seconds}
    if steps < _FEW_STEPS:
        text, kind, shares = f"too few steps to say what limits them: {steps} after the warm-up", "unknown", {}
    else:
        shares = _shares(ranks)
        text, kind = _finding(ranks, shares, seconds, hints)
    per_rank = [{"rank": rank.rank, "host": rank.host, "parts": rank.parts, "counters": rank.counted} for rank in ranks]
    return Verdict(text, kind, steps, shares, seconds, per_rank, list(_notes(ranks)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _shares(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return the mean over ranks of each part's share of the steps; they add up to 1.

    In a collective a rank waits for the network and for ranks that arrive later. The rank that waits least arrived
    last: it waited for the network alone. What others wait beyond that is "sync".
    """
    network = min(rank.parts["exchange"] for rank in ranks)

    def mean(seconds_of: Any) -> float:
        return fmean(seconds_of(rank) / max(rank.step_seconds, 1e-9) for rank in ranks)

    return {
        "input": mean(lambda rank: rank.parts["input"]),
        "sync": mean(lambda rank: rank.parts["sync"] + rank.parts["exchange"] - network),
        "exchange": mean(lambda rank: network),
        "compute": mean(lambda rank: sum(rank.parts[part] for part in _COMPUTE)),
        "other": mean(lambda rank: rank.parts["other"]),
    }


def _finding(
    ranks: Sequence[RankTimes], shares: dict[str, float], seconds: dict[str, float], hints: Hints
) -> tuple[str, str]:
    """Return the text and kind of what costs the run most."""
    run = sum(seconds.values())
    of_run = seconds["steps"] / max(run, 1e-9)
    late, lateness = _latest(ranks)
    # Input that only one rank waits for makes that rank late.
    costs = {
        "input": min(rank.parts["input"] / max(rank.step_seconds, 1e-9) for rank in ranks) * of_run,
        "exchange": shares["exchange"] * of_run,
        "late": lateness * of_run if lateness >= LATE else 0.0,
        "sync": 0.0 if lateness >= LATE or len(ranks) == 1 else shares["sync"] * of_run,
        "other": shares["other"] * of_run,
        "save": seconds["save"] / max(run, 1e-9),
        "validate": seconds["validate"] / max(run, 1e-9),
    }
    kind = max(costs, key=lambda name: costs[name])
    if costs[kind] < PARTLY:
        return f"compute-bound, {_percent(shares['compute'])} of the step", "compute"
    if kind == "late":
        return _about_late(ranks, late, lateness), kind
    share = costs[kind] if kind in ("save", "validate") else shares[kind]
    share = min(share, 0.999)
    names = {"sync": "synchronization", "save": "checkpoint", "validate": "validation", "other": "overhead"}
    name = names.get(kind, kind)
    words = f"{name}-bound" if share >= BOUND else f"mostly compute-bound, partly {name}-bound"
    of_what = " of the run" if kind in ("save", "validate") else ""
    if of_what and run < _SHORT_RUN:
        return f"{words} {_percent(share)}{of_what}", kind
    gone = "without it" if kind in ("validate", "exchange") else "without waiting"
    gain = "" if kind == "other" else f" {gone} {1 / (1 - share):.2f}x;"  # no step has no overhead
    return f"{words} {_percent(share)}{of_what}:{gain} {_remedy(kind, hints)}", kind


def _latest(ranks: Sequence[RankTimes]) -> tuple[RankTimes, float]:
    """Return the rank that waits least for the others, and how much more of a step the others wait."""

    def wait(rank: RankTimes) -> float:
        return (rank.parts["sync"] + rank.parts["exchange"]) / max(rank.step_seconds, 1e-9)

    late = min(ranks, key=wait)
    others = [wait(rank) for rank in ranks if rank is not late]
    return late, fmean(others) - wait(late) if others else 0.0


def _about_late(ranks: Sequence[RankTimes], late: RankTimes, lateness: float) -> str:
    others = [rank for rank in ranks if rank is not late]
    behind = lateness * late.step_seconds * _EXPLAINS
    causes = [
        words
        for words, parts in (("its input", ("input",)), ("its computation", _COMPUTE))
        if sum(late.parts[part] - fmean(other.parts[part] for other in others) for part in parts) >= behind
    ]
    cause = f" for {causes[0]}" if causes else ""
    gain = 1 / (1 - min(lateness, 0.999))
    return (
        f"rank {late.rank} on {late.host} is late: the others wait {_percent(lateness)} of a step{cause}; without "
        f"waiting {gain:.2f}x; look for other programs, slow disks or a slow CPU on {late.host}"
    )


def _remedy(kind: str, hints: Hints) -> str:
    wanted = next((size for size in (2, 8) if size > hints.prefetch), None)
    in_background = hints.saves_in_background
    return {
        "input": f"try data.prefetch={wanted}" if wanted else "copy the dataset to a local disk",
        "save": "save less often (checkpoint.every_steps)" if in_background else "try checkpoint.background=true",
        "exchange": "try a larger train.global_batch_size or another sharding.default",
        "sync": "the ranks are late in turns: other programs may use their cores",
        "validate": "validate less often (eval.every_steps)",
        "other": "try a larger train.global_batch_size",
    }[kind]


def _notes(ranks: Sequence[RankTimes]) -> Any:
    """Yield costs that no part of a step shows."""
    texts = {
        "throttled_s": ("the control group was throttled", "ask for more CPUs", PARTLY),
        "cpu_pressure_s": ("threads waited for a core", "it has too few for all", _PRESSED),
    }
    for host in dict.fromkeys(rank.host for rank in ranks):
        counted = [rank.counted for rank in ranks if rank.host == host]
        for name, (fact, remedy, limit) in texts.items():
            share = max(one.get(name, 0.0) / max(one["seconds"], 1e-9) for one in counted)
            if share >= limit:
                yield f"{host}: {fact} {_percent(share)} of the time: {remedy}"
