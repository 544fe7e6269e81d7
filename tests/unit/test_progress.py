import io
import os
import pty
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from recmill.observe import progress


def shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, width: int = 120) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width)
    monkeypatch.setattr(progress, "CONSOLE", console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with progress.Progress("training", total=10, unit="samples", per_item=1000) as bar:
        for _ in range(9):
            bar.advance(1, note="loss 0.5000")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_a_bar_with_rate_loss_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, is_terminal=True)
    for part in ("training", "9/10", "samples/s", "loss 0.5000", "00:0"):
        assert part in text


def test_elsewhere_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, is_terminal=False) == ""


def test_a_bar_fits_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 120):
        lines = shown(monkeypatch, is_terminal=True, width=width).replace("\r", "\n").splitlines()
        bars = [line for line in (Text.from_ansi(line).plain for line in lines) if "9/10" in line]
        assert {len(bar.rstrip()) <= width for bar in bars} == {True}
        assert bars[-1].split()[-1] == "left"


@pytest.mark.parametrize(("width", "has_details"), [(80, False), (120, True)])
def test_a_bar_that_is_too_narrow_for_details_still_shows_steps_loss_and_time(
    width: int, has_details: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr(progress, "CONSOLE", console)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress("training", total=123_456, unit="samples", done=100_000, per_item=10_000) as bar:
        for _ in range(5):
            bar.advance(1, note="loss 0.5000  hit rate 99.1 %  28.8/37.1 ms  0.39 GB")
    assert isinstance(console.file, io.StringIO)
    last = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.strip().splitlines()[-1]
    assert "100005/123456" in last and "loss 0.5000" in last and "…" not in last
    assert ("0.39 GB" in last) == has_details


def test_bytes_are_shown_in_units_that_suit_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(progress, "CONSOLE", console)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress("verifying clicks", total=125_829_120, unit="bytes") as bar:
        for _ in range(3):
            bar.advance(41_943_040)
    assert isinstance(console.file, io.StringIO)
    last = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.strip().splitlines()[-1]
    assert "125.8 MB of 125.8 MB" in last and "B/s" in last and "bytes/s" not in last and "…" not in last
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    bar = progress.Progress("verifying clicks", total=125_829_120, unit="bytes")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0)
    bar.advance(41_943_040)
    assert caplog.messages[0].startswith("verifying clicks: 41.9 MB of about 125.8 MB, ")


def test_elsewhere_a_line_every_30_seconds_says_how_much_is_left_on_rank_0_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for is_main, reports in ((True, False), (False, False), (True, True)):
        world: Any = SimpleNamespace(is_main=is_main)
        bar = progress.Progress("evaluating val", total=10, unit="batches", world=world, reports=reports)
        for _ in range(4):
            now += 20.0
            bar.advance(1)
    assert caplog.messages == [
        "evaluating val: 2 of about 10 batches, 0.05 batches/s, 2 min 40 s left",
        "evaluating val: 4 of about 10 batches, 0.05 batches/s, 2 min 0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert progress.human_time(seconds) == text


def test_the_time_left_counts_what_an_earlier_run_had_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = progress.Progress("training", total=100, unit="samples", done=40)
    now += 30.0
    for _ in range(10):
        bar.advance(1)
    assert bar.time_left() == "2 min 30 s"  # 50 items, 3 s each


@pytest.mark.parametrize(("value", "text"), [(950.0, "950"), (52_480.0, "52.5k"), (1_234_567.0, "1.23M")])
def test_rates_are_short(value: float, text: str) -> None:
    assert progress.human_rate(value) == text


def test_a_real_terminal_sees_the_spinner_only_within_its_block() -> None:
    """The text appears while the block runs, and is erased after it; without a terminal there is nothing."""
    code = "from recmill.observe.progress import spinner\nwith spinner('importing torch'): input()\nprint('done')"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        while b"importing torch" not in seen:  # ends with an OSError if the process ends without it
            seen += os.read(ours, 4096)
        process.communicate(b"\n")
        rest = b""
        try:
            while part := os.read(ours, 4096):
                rest += part
        except OSError:  # nobody has the terminal open any more
            pass
        os.close(ours)
    assert rest.endswith((b"\x1b[2K", b"\x1b[?25h")), rest  # erases the line, shows the cursor
    done = subprocess.run([sys.executable, "-c", code], input=b"\n", capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (12_345, "12.3 kB"), (5_600_000, "5.6 MB"), (7e12, "7,000.0 GB")],
)
def test_sizes_have_a_unit_that_fits(count: int, shown: str) -> None:
    assert progress.human_bytes(count) == shown
