"""What a trial found: nothing, weaknesses, or bugs."""

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from .sandbox import Outcome

MAX_LINES = 15  # of an error message
MAX_CHARACTERS = 10_000
_TRACES = ("Traceback (most recent call last)", "internal error", "--- Logging error ---", "Fatal Python error")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@dataclass(frozen=True)
class Finding:
    severity: Literal["bug", "weak"]
    text: str


def judge(outcome: Outcome, codes: Collection[int], names: Iterable[str] = ()) -> list[Finding]:
    """Judge what holds for every command: how it may end, and what an error must say.

    If the exit code is not 0, the output must contain one of `names`, if there are any.
    """
    found = []
    if outcome.code is None:
        found.append(Finding("bug", f"hangs{_said(outcome)}"))
    elif outcome.code < 0 and outcome.code not in codes:
        found.append(Finding("bug", f"killed by signal {-outcome.code}{_said(outcome)}"))
    elif trace := next((text for text in _TRACES if text in outcome.text), None):
        found.append(Finding("bug", f"{trace}, exit code {outcome.code}{_said(outcome)}"))
    elif outcome.code not in codes:
        expected = ", ".join(map(str, sorted(codes)))
        found.append(Finding("weak", f"exit code {outcome.code}, expected {expected}{_said(outcome)}"))
    if outcome.left:
        found.append(Finding("bug", f"left behind: {', '.join(outcome.left)}"))
    if outcome.code and outcome.code > 0 and not found:
        found += _message_problems(outcome, list(names))
    return found


def _message_problems(outcome: Outcome, names: list[str]) -> list[Finding]:
    error = outcome.stderr[outcome.stderr.find("recmill: ") :] if "recmill: " in outcome.stderr else outcome.stderr
    lines = error.splitlines()
    if not outcome.text.strip():
        return [Finding("weak", f"exit code {outcome.code} without a message")]
    if len(lines) > MAX_LINES or len(error) > MAX_CHARACTERS:
        return [Finding("weak", f"an error of {len(lines)} lines, {len(error):,} characters{_said(outcome)}")]
    if names and not any(name in outcome.text for name in names):
        return [Finding("weak", f"exit code {outcome.code}: the message does not name {names[0]}{_said(outcome)}")]
    return []


def _said(outcome: Outcome) -> str:
    lines = [line for line in outcome.stderr.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


def shown(arguments: Iterable[str]) -> str:
    """Return a command line as a user would type it, shortened."""
    texts = (text if len(text) < 200 else f"{text[:40]}...({len(text)} characters)" for text in arguments)
    return ascii(shlex.join(["recmill", *texts]))[1:-1]


def is_close(first: str, second: str) -> bool:
    """Return whether two outputs are equal up to rounding of the numbers in them."""
    if _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return False
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    return all(abs(float(a) - float(b)) <= 1e-3 * max(abs(float(a)), 1e-3) for a, b in pairs)
