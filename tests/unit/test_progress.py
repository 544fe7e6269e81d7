import io
import sys

import pytest
from rich.console import Console

from recmill.observe import progress


def shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    monkeypatch.setattr(progress, "CONSOLE", console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with progress.Progress("training", total=10, unit="samples", per_item=1000) as bar:
        for _ in range(9):
            bar.advance(1, note="loss 0.5000")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_a_bar_with_rate_loss_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, is_terminal=True)
    for part in ("training", "9/10", "samples/s", "loss 0.5000", "0:00:0"):
        assert part in text


def test_elsewhere_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, is_terminal=False) == ""


@pytest.mark.parametrize(("value", "text"), [(950.0, "950"), (52_480.0, "52.5k"), (1_234_567.0, "1.23M")])
def test_rates_are_short(value: float, text: str) -> None:
    assert progress.human_rate(value) == text
