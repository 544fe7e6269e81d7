"""Write raw click logs of Criteo's shape: label, 13 integers, 26 eight-digit hex ids, separated by tabs.

Ids are log-uniform over the cardinalities of Criteo 1TB (Zipf's law, so new ids keep coming), a share of each column is
missing, and a quarter of the rows are clicks. Columns are independent of each other: the rows measure speed and memory,
and there is nothing to learn. The seed determines the rows; the ids are the same for every seed, as in days of a log.
"""

import argparse
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLICK_RATE = 0.256

# Missing share and largest value of each integer column. The shares follow the Kaggle set, limited to 40 %.
DENSE_MISSING = (0.40, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.01, 0.04, 0.40, 0.04, 0.40, 0.22)
DENSE_LARGEST = (600, 20_000, 60_000, 900, 60_000, 40_000, 9_000, 4_000, 30_000, 10, 200, 3_000, 7_000)

# Distinct ids of each column of Criteo 1TB, limited to 40 million as in MLPerf, and the missing share.
ID_CARDINALITIES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
ID_MISSING = (
    *(0.03, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.03, 0.0, 0.03, 0.0),
    *(0.0, 0.0, 0.03, 0.0, 0.0, 0.30, 0.03, 0.03, 0.40, 0.0, 0.03, 0.12, 0.12),
)

# Small enough that a block's columns stay in the cache; its text is 23 MB before the unused bytes are dropped.
BLOCK_ROWS = 1 << 16
WRITERS = 2

# A row before its unused bytes (NULs) are dropped: a number takes at most 5 of its 8 bytes, and a tab.
ROW = np.dtype([("numbers", "<u8", (1 + len(DENSE_LARGEST),)), ("ids", [("hex", "<u8"), ("end", "u1")], (26,))])


def _words(texts: Sequence[str], width: int) -> NDArray[np.unsignedinteger]:
    """Return texts of at most `width` characters as one little-endian integer each, padded with NULs."""
    return np.array(texts, dtype=f"S{width}").view(f"<u{width}")


NUMBERS_FROM = -1
NUMBERS = _words([f"{value}\t" for value in range(NUMBERS_FROM, max(DENSE_LARGEST) + 1)], 8)
FOUR_HEX_DIGITS = _words([f"{value:04x}" for value in range(1 << 16)], 4).astype("<u8")


def _mixed(ranks: NDArray[np.uint32], column: int) -> NDArray[np.uint32]:
    """Return the ids of the ranks, by a bijection of 32 bits (MurmurHash3's finaliser) that differs by column."""
    x = ranks ^ np.uint32(column * 0x9E3779B1 % (1 << 32))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _log_uniform(uniform: NDArray[np.float64], largest: int) -> NDArray[np.float64]:
    """Map uniform [0, 1) to [1, largest + 1), uniform in the logarithm: the integer parts follow Zipf's law."""
    return np.exp(uniform * np.log(largest + 1))


def _block(seed: Sequence[int], rows: int) -> bytes:
    """Return the text of one block of rows. Each field takes one draw: it is missing below the missing share."""
    random = np.random.Generator(np.random.SFC64(list(seed)))
    block = np.zeros(rows, ROW)
    numbers, hexes, ends = block["numbers"], block["ids"]["hex"], block["ids"]["end"]
    numbers[:, 0] = NUMBERS[(random.random(rows) < CLICK_RATE) - NUMBERS_FROM]
    for column, (missing, largest) in enumerate(zip(DENSE_MISSING, DENSE_LARGEST, strict=True), start=1):
        draws = (random.random(rows) - missing) / (1 - missing)
        slots = _log_uniform(draws, largest - NUMBERS_FROM + 1).astype(np.int64) - 1
        texts = NUMBERS[np.clip(slots, 0, largest - NUMBERS_FROM)]
        numbers[:, column] = np.where(draws < 0, ord("\t"), texts)
    for column, (missing, cardinality) in enumerate(zip(ID_MISSING, ID_CARDINALITIES, strict=True)):
        draws = (random.random(rows) - missing) / (1 - missing)
        ids = _mixed(_log_uniform(draws, cardinality).astype(np.uint32), column)
        texts = FOUR_HEX_DIGITS[ids >> np.uint32(16)] | FOUR_HEX_DIGITS[ids & np.uint32(0xFFFF)] << np.uint64(32)
        hexes[:, column] = np.where(draws < 0, np.uint64(0), texts)
    ends[:] = ord("\t")
    ends[:, -1] = ord("\n")
    return block.tobytes().translate(None, b"\0")


def write_rows(path: Path | str, rows: int, seed: int | Sequence[int] = 0) -> None:
    """Write a raw file of `rows` rows. Each block has its own seed, so threads can make them; memory is bounded."""
    path, seeds = Path(path), [seed] if isinstance(seed, int) else list(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as threads:
        ahead: deque[Future[bytes]] = deque()
        for number, start in enumerate(range(0, rows, BLOCK_ROWS)):
            ahead.append(threads.submit(_block, [*seeds, number], min(BLOCK_ROWS, rows - start)))
            if len(ahead) > WRITERS:
                file.write(ahead.popleft().result())
        for block in ahead:
            file.write(block.result())


def write_days(folder: Path | str, rows: int, days: int, seed: int = 0) -> None:
    """Write `rows` rows in total as day_0, day_1, ... of `folder`; the first days take the remainder."""
    for day in range(days):
        write_rows(Path(folder) / f"day_{day}", rows // days + (day < rows % days), [seed, day])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="total number of rows")
    parser.add_argument("--output", type=Path, required=True, help="the file or, with --days, the folder of the days")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.rows < arguments.days or arguments.days < 1:
        parser.error(
            f"--rows {arguments.rows} --days {arguments.days}: at least one day, and one row per day, are needed."
        )
    started = time.monotonic()
    if arguments.days > 1:
        write_days(arguments.output, arguments.rows, arguments.days, arguments.seed)
    else:
        write_rows(arguments.output, arguments.rows, arguments.seed)
    seconds = time.monotonic() - started
    print(f"{arguments.output}: {arguments.rows:,} rows in {seconds:.1f} s, {arguments.rows / seconds:,.0f} rows/s")


if __name__ == "__main__":
    main()
