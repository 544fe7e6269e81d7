"""Progress of long work: a bar with rate and remaining time or a spinner on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from recmill.world import World


log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0
_WITHOUT_NOTE = 62  # columns that a bar needs for all else, with a million steps


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Continue without output when the reader is gone, as with `| head -1`."""
        self.quiet = True


CONSOLE = _Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
_is_shown = True  # on a terminal


def show_progress(is_shown: bool) -> None:
    """Show bars and spinners on a terminal from now on, or none."""
    global _is_shown
    _is_shown = is_shown


class Progress:
    """Shows how much of `total` items is done, on rank 0. The rate is in units; an item has `per_item` of them.

    Without a terminal it logs lines, unless its user `reports` itself, as training does.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        world: "World | None" = None,
        done: int = 0,
        per_item: int = 1,
        reports: bool = False,
    ) -> None:
        self._bar: Bar | None = None
        self._label = label
        self._unit = unit
        self._per_item = per_item
        self._done = 0
        self._total = total - done
        is_shown = world is None or world.is_main
        self._logs_lines = is_shown and not reports
        self._started = time.monotonic()
        self._logged_at = self._started
        if sys.stderr is not None and sys.stderr.isatty() and is_shown and _is_shown:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[done]}"),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=CONSOLE,
                transient=True,
                expand=True,  # to the width of the terminal, and never beyond
            )
            self._task = self._bar.add_task(
                label, total=total, completed=done, done=self._amount(done, total), rate="", note=""
            )

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def advance(self, items: int, note: str | None = None) -> None:
        """Note that `items` more are done. The last parts of `note`, between two spaces, are left out if need be."""
        self._done += items
        if not self._bar:
            self._log_line()
            return
        self._bar.advance(self._task, items)
        task = self._bar.tasks[self._task]
        rate = self._rate(task.speed) if task.speed else ""
        self._bar.update(self._task, rate=rate, done=self._amount(int(task.completed), int(task.total or 0)))
        if note is not None:
            parts = note.split("  ")
            while len(parts) > 1 and len("  ".join(parts)) > CONSOLE.width - _WITHOUT_NOTE:
                parts.pop()
            self._bar.update(self._task, note="  ".join(parts))

    def _log_line(self) -> None:
        now = time.monotonic()
        if not self._logs_lines or now - self._logged_at < _SECONDS_BETWEEN_LINES:
            return
        self._logged_at = now
        rate = self._rate(self._done / (now - self._started))
        about = f"{self._done:,} of about {self._total:,} {self._unit}"
        if self._unit == "bytes":
            about = f"{human_bytes(self._done)} of about {human_bytes(self._total)}"
        log.info(f"{self._label}: {about}, {rate}, {self.time_left()} left")

    def _amount(self, done: int, total: int) -> str:
        return f"{human_bytes(done)} of {human_bytes(total)}" if self._unit == "bytes" else f"{done}/{total}"

    def _rate(self, items_per_s: float) -> str:
        rate = items_per_s * self._per_item
        return f"{human_bytes(round(rate))}/s" if self._unit == "bytes" else f"{human_rate(rate)} {self._unit}/s"

    def time_left(self) -> str:
        """Estimate the rest from all that was done so far, with its pauses."""
        seconds_per_item = (time.monotonic() - self._started) / max(self._done, 1)
        return human_time(max(self._total - self._done, 0) * seconds_per_item)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show within the block, on a terminal, what takes a moment."""
    with CONSOLE.status(text) if CONSOLE.is_terminal and _is_shown else nullcontext():
        yield


def human_rate(value: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def human_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def human_bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
