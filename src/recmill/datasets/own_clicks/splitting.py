"""Which rows are for training, validation and test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from recmill import rng
from recmill.datasets.own_clicks.schema import ClicksSchema, SplitSection
from recmill.datasets.own_clicks.values import DROPPED, RawRows, iso_time, labels, single_texts, times
from recmill.errors import ConfigError, DataError, did_you_mean
from recmill.schema import SPLITS

_TRAIN, _VAL, _TEST = range(len(SPLITS))
DROPPED_ROWS, NOT_SAMPLED = len(SPLITS), len(SPLITS) + 1  # rows of no split
NUM_KINDS = len(SPLITS) + 2


def check_split(split: SplitSection, files: list[str]) -> None:
    """Raise an error if the section gives times that cannot be read, or files that are not among `files`."""
    if split.val_from:
        _given_starts(split)
    for key in ("val", "test") if split.by == "files" else ():
        for name in getattr(split, key):
            if name not in files:
                fact = f"split.{key}: no file of the log has the name '{name}'"
                raise ConfigError(f"{fact}. {did_you_mean(name, files) or 'Correct it, or --input.'}".rstrip())


def _given_starts(split: SplitSection) -> list[int]:
    """Return when validation and test begin, by val_from and test_from."""
    starts = [iso_time(split.val_from, "split.val_from"), iso_time(split.test_from, "split.test_from")]
    if starts[0] >= starts[1]:
        raise ConfigError(f"split.val_from {split.val_from} is not before split.test_from {split.test_from}.")
    return starts


def split_rules(log: ClicksSchema, num_rows: int, times_at: Callable[[list[int]], list[int]]) -> dict[str, Any]:
    """Return what has to be known of all rows before they can be split: where validation and test begin.

    `times_at` returns the times at these places of all times in ascending order.
    """
    split = log.split
    if split.by == "time" and split.val_from:
        return {"starts": _given_starts(split)}
    if split.by not in ("time", "rows"):
        return {}
    assert isinstance(split.val, float) and isinstance(split.test, float)
    places = [int(num_rows * (1 - split.val - split.test)), int(num_rows * (1 - split.test))]
    if split.by == "rows":
        return {"starts": places}
    first, *starts = times_at([0, *places])
    if not first < starts[0] < starts[1]:
        assert log.time
        fact = f"column {log.time.column}: too many rows have the same time for split.by = 'time'"
        raise DataError(f"{fact}. Use finer times, larger shares, or another split.by.")
    return {"starts": starts}


class Splits:
    """The split of each row. It depends on the schema and the row alone, not on blocks."""

    def __init__(self, log: ClicksSchema, rules: dict[str, Any]) -> None:
        self._log = log
        self._starts: list[int] = rules.get("starts", [])

    def of(self, before: int, rows: RawRows) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each row's split, or DROPPED_ROWS or NOT_SAMPLED, and whether it is a click.

        `before`: how many rows are before these in all files together.
        """
        found = labels(rows, self._log)
        which = np.where(found == DROPPED, DROPPED_ROWS, self._split(before, rows))
        sample = self._log.sample
        if sample.negatives < 1:
            drawn = rng.uniform(rng.stream_key(sample.seed, "negatives"), before + np.arange(len(rows)))
            is_left_out = (which == _TRAIN) & (found == 0) & (drawn >= sample.negatives)
            which = np.where(is_left_out, NOT_SAMPLED, which)
        return which, found == 1

    def _split(self, before: int, rows: RawRows) -> np.ndarray:
        split = self._log.split
        numbers = before + np.arange(len(rows))
        match split.by:
            case "rows":
                return np.searchsorted(self._starts, numbers, side="right")
            case "time":
                assert self._log.time
                return rows.per_value(self._log.time.column, "split", self._by_time)
            case "files":
                return np.full(len(rows), self._named(Path(rows.file).name))
            case "column":
                return rows.per_value(split.column, "split", self._by_column)
        drawn = rng.uniform(rng.stream_key(split.seed, "split"), self._counters(rows, numbers))
        assert isinstance(split.val, float) and isinstance(split.test, float)
        return np.searchsorted([1 - split.val - split.test, 1 - split.test], drawn, side="right")

    def _counters(self, rows: RawRows, numbers: np.ndarray) -> np.ndarray:
        """Return what chance depends on: the number of a row, or its group."""
        if not self._log.split.group:
            return numbers
        return rows.per_value(self._log.split.group, "group", self._group_hashes)

    def _by_time(self, rows: RawRows) -> np.ndarray:
        return np.searchsorted(self._starts, times(rows, self._log), side="right")

    def _by_column(self, rows: RawRows) -> np.ndarray:
        values = single_texts(rows, self._log.split.column, self._log.input.missing).fill_null("").to_list()
        return np.array([self._named(value) for value in values])

    def _group_hashes(self, rows: RawRows) -> np.ndarray:
        groups = single_texts(rows, self._log.split.group, self._log.input.missing)
        known = {value: xxhash.xxh3_64_intdigest((value or "").encode()) for value in groups.unique().to_list()}
        return np.array([known[value] for value in groups.to_list()], np.uint64)

    def _named(self, name: str) -> int:
        split = self._log.split
        assert isinstance(split.val, list) and isinstance(split.test, list)
        return _VAL if name in split.val else _TEST if name in split.test else _TRAIN
