"""`recmill split`: one raw log -> slices of equal size, named like the days that `recmill prepare criteo` reads."""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack

import numpy as np
from pydantic import PositiveInt

from recmill.commands.keywords import checked_keywords
from recmill.config.options import checked_options, given_path
from recmill.config.sections import Section, key
from recmill.datasets.compressed import read_blocks
from recmill.errors import ConfigError, DataError, UserError, did_you_mean_path
from recmill.files.atomic import new_directory
from recmill.observe.progress import Progress

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache while it is read, searched and written


class Options(Section):
    lines: PositiveInt = key(5_000_000, "Lines of each slice.")
    days: PositiveInt = key(24, "Number of slices: day_0, day_1, ...; the rest of the log is left out.")


class SplitOptions(TypedDict, total=False):
    lines: int
    days: int


@checked_keywords
def split(input: str | Path, output: str | Path, **options: Unpack[SplitOptions]) -> dict[str, Any]:
    """Write the first `days` slices of `lines` lines each to output/day_0, output/day_1, ...; the last may be shorter.

    Returns input, days, the total number of lines, and whether the rest of the log was left out.
    """
    checked = checked_options("split", Options, dict(options))
    input = given_path(input, "--input")
    output = given_path(output, "--output").absolute()
    if not input.is_file():
        raise DataError(f"{input}: no such file. {did_you_mean_path(input)}--input is one raw log: plain, .gz or .zst.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty directory. Choose another --output, or move it away.")
    title = f"splitting {input.name}"
    with new_directory(output) as partial, Progress(title, checked.lines * checked.days, "lines") as progress:
        written, has_rest = _write_days(read_blocks(input, _BLOCK_BYTES), partial, checked, progress)
        if written <= checked.lines * (checked.days - 1):
            raise _too_few(input, written, checked)
    rest = "the rest was left out" if has_rest else "nothing was left out"
    log.info("%s: %s lines written to %s/day_0 to day_%d; %s", input, f"{written:,}", output, checked.days - 1, rest)
    return {"input": str(input), "days": checked.days, "lines": written, "has_rest": has_rest}


def _write_days(blocks: Iterator[bytes], directory: Path, options: Options, progress: Progress) -> tuple[int, bool]:
    """Return the number of lines written, and whether anything follows them."""
    written = 0
    rest = b""
    for day in range(options.days):
        with (directory / f"day_{day}").open("wb") as file:
            copied, rest = _copy_lines(chain([rest], blocks), file, options.lines, progress)
        written += copied
        if copied < options.lines:
            return written, False
    return written, bool(rest or next(blocks, b""))


def _copy_lines(blocks: Iterable[bytes], file: BinaryIO, lines: int, progress: Progress) -> tuple[int, bytes]:
    """Return the number of lines copied (also a last one without a newline), and the rest of the last block."""
    missing = lines
    is_line_open = False
    for block in blocks:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))[:missing]
        missing -= len(ends)
        stop = len(block) if missing else int(ends[-1]) + 1
        file.write(block[:stop])
        progress.advance(len(ends))
        if not missing:
            return lines, block[stop:]
        is_line_open = bool(block) and not block.endswith(b"\n")
    return lines - missing + is_line_open, b""


def _too_few(input: Path, found: int, options: Options) -> UserError:
    remedy = f"Use --lines {found // options.days} or --days {-(-found // options.lines)}."
    if found < options.days:
        remedy = f"Use --lines 1 --days {found}, or a longer log." if found else "Use a longer log."
    fact = f"{input} has {found:,} lines: slices of {options.lines:,} do not fill {options.days} days"
    return (ConfigError if found else DataError)(f"{fact}. {remedy}")
