"""Write a click log with the columns and the numbers of different values of Avazu's: hex ids, hours, whole numbers."""

import argparse
from pathlib import Path

import numpy as np
import polars as pl

# Column -> about how many different values the 40 million rows of the published log have.
_HEX = {
    "site_id": 4737, "site_domain": 7745, "site_category": 26, "app_id": 8552, "app_domain": 559, "app_category": 36,
    "device_id": 2_686_408, "device_ip": 6_729_486, "device_model": 8251,
}  # fmt: skip
_NUMBERS = {
    "C1": 7, "banner_pos": 7, "device_type": 5, "device_conn_type": 4, "C14": 2626, "C15": 8, "C16": 9, "C17": 435,
    "C18": 4, "C19": 68, "C20": 172, "C21": 60,
}  # fmt: skip
_ORDER = [
    "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
    "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
]  # fmt: skip
_BLOCK = 1 << 20


def write(path: Path, rows: int, seed: int = 1) -> None:
    """Write `rows` rows; popular values are drawn more often, and the rate of clicks depends on some of them."""
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, rows, _BLOCK):
            frame = _frame(generator, start, min(_BLOCK, rows - start), rows)
            frame.write_csv(file, include_header=start == 0)


def _frame(generator: np.random.Generator, start: int, rows: int, total: int) -> pl.DataFrame:
    columns: dict[str, object] = {}
    score = np.full(rows, -1.6)
    for name, size in (_HEX | _NUMBERS).items():
        drawn = np.minimum(generator.random(rows) ** 4 * size, size - 1).astype(np.int64)
        if name == "device_id":  # most rows of the published log have the same one
            drawn[generator.random(rows) < 0.82] = 0
        score += 0.15 * np.sin(drawn)
        if name in _HEX:
            hexed = pl.Series([f"{v * 2654435761 & 0xFFFFFFFF:08x}" for v in range(size)] if size < 10**4 else [])
            columns[name] = hexed.gather(drawn) if size < 10**4 else _hex(drawn)
        else:
            columns[name] = 1000 + drawn
    hours = (np.arange(start, start + rows) * 240 // total).astype(np.int64)
    columns["hour"] = 14102100 + hours // 24 * 100 + hours % 24
    columns["id"] = generator.integers(10**18, 10**19, rows, dtype=np.uint64)
    columns["click"] = (generator.random(rows) < 1 / (1 + np.exp(-score))).astype(np.int64)
    return pl.DataFrame(columns).select(_ORDER)


def _hex(values: np.ndarray) -> pl.Series:
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    mixed = (values * 2654435761) & 0xFFFFFFFF
    letters = digits[(mixed[:, None] >> np.arange(28, -4, -4)) & 15]
    return pl.Series(letters.view("S8").ravel().astype(str))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    given = parser.parse_args()
    write(given.path, given.rows)
