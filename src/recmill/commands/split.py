"""`recmill split`: one raw log -> slices of equal size, named like the days that `recmill prepare criteo` reads."""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import Field, PositiveInt

from recmill.config.options import checked_options
from recmill.config.sections import Section
from recmill.datasets.compressed import read_blocks
from recmill.errors import DataError
from recmill.files.atomic import new_directory
from recmill.observe.progress import Progress

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache while it is read, searched and written


class Options(Section):
    lines: PositiveInt = Field(5_000_000, description="Lines of each slice.")
    days: PositiveInt = Field(24, description="Number of slices: day_0, day_1, ...; the rest of the log is left out.")


def split(input: str | Path, output: str | Path, **options: Any) -> dict[str, Any]:
    """Write the first `days` slices of `lines` lines each to output/day_0, output/day_1, ...; the last may be shorter.

    Returns input, days, the total number of lines, and whether the rest of the log was left out.
    """
    checked = checked_options("split", Options, options)
    lines, days = checked.lines, checked.days
    input = Path(input)
    output = Path(output).absolute()
    if not input.is_file():
        raise DataError(f"{input}: no such file. --input is one raw log: plain, .gz or .zst.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty directory. Choose another --output, or move it away.")
    blocks = read_blocks(input, _BLOCK_BYTES)
    with new_directory(output) as partial, Progress(f"splitting {input.name}", lines * days, "lines") as progress:
        written, has_rest = _write_days(blocks, partial, checked, progress)
        if written <= lines * (days - 1):
            raise DataError(_too_few(input, written, lines, days))
    rest = "the rest was left out" if has_rest else "nothing was left out"
    log.info("%s: %s lines written to %s/day_0 to day_%d; %s", input, f"{written:,}", output, days - 1, rest)
    return {"input": str(input), "days": days, "lines": written, "has_rest": has_rest}


def _write_days(blocks: Iterator[bytes], directory: Path, options: Options, progress: Progress) -> tuple[int, bool]:
    """Return the number of lines written, and whether anything follows them."""
    written, rest = 0, b""
    for day in range(options.days):
        with (directory / f"day_{day}").open("wb") as file:
            copied, rest = _copy_lines(chain([rest], blocks), file, options.lines, progress)
        written += copied
        if copied < options.lines:
            return written, False
    return written, bool(rest or next(blocks, b""))


def _copy_lines(blocks: Iterable[bytes], file: BinaryIO, lines: int, progress: Progress) -> tuple[int, bytes]:
    """Return the number of lines copied, and what is left of the last block.

    A last line without a newline, at the end of the log, counts too.
    """
    missing, ends_open = lines, False
    for block in blocks:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))[:missing]
        missing -= len(ends)
        stop = len(block) if missing else int(ends[-1]) + 1
        file.write(block[:stop])
        progress.advance(len(ends))
        if not missing:
            return lines, block[stop:]
        ends_open = bool(block) and not block.endswith(b"\n")
    return lines - missing + ends_open, b""


def _too_few(input: Path, found: int, lines: int, days: int) -> str:
    fact = f"{input} has {found:,} lines: slices of {lines:,} do not fill {days} days."
    if found < days:
        return f"{fact} Use a longer log." if not found else f"{fact} Use --lines 1 --days {found}, or a longer log."
    return f"{fact} Use --lines {found // days} or --days {-(-found // lines)}."
