"""Files of histories: scores of given candidates, or the best items, by a run's sequence model."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.commands.options import STREAM, new_path
from recmill.commands.predict import Scorer
from recmill.commands.recommend import Recommender
from recmill.commands.retriever import RequestOptions
from recmill.config.options import checked_options
from recmill.data.names import Names
from recmill.data.recipes import Tally
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.own_clicks.values import RawRows, texts
from recmill.errors import DataError

if TYPE_CHECKING:
    import polars as pl
    from torch import nn

log = logging.getLogger(__name__)

HISTORY, CANDIDATES = "history", "candidates"


@dataclass(frozen=True)
class Histories:
    """Items of each row, numbered from 0: those of its history that are known, oldest first, and its candidates."""

    items: list[np.ndarray]
    candidates: list[np.ndarray]  # -1 is unknown
    names: list[list[str]]  # of the candidates


class HistoryEncoder:
    """Turns names of items into their numbers, and counts those that the dataset does not have."""

    trained_rows, label_column = 0, ""

    def __init__(self, items: Names, columns: list[str]) -> None:
        self._items = items
        self.trained_tally: dict[str, dict[str, int]] = {}
        self.feature_columns = columns
        self.tally = Tally()

    def input_section(self, count_fields: Callable[[], int]) -> InputSection:
        """Return how to read text: with tabs, if they make several fields of its first row."""
        return InputSection(separator="\t" if count_fields() > 1 else ",")

    def adapt(self, new_rows: NewRowsFlags) -> None:
        new_rows.check_not_for_values()

    def encode(self, rows: RawRows, with_labels: bool = True, may_be_missing: bool = False) -> Histories:
        self.tally.rows += len(rows)
        found = {column: self._found(rows, column) for column in self.feature_columns}
        names, candidates = found.get(CANDIDATES, ([], []))
        return Histories([items[items >= 0] for items in found[HISTORY][1]], candidates, names)

    def _found(self, rows: RawRows, column: str) -> tuple[list[list[str]], list[np.ndarray]]:
        """Return the names in each row of a column and the items that they name."""
        given = texts(rows, column, InputSection().missing).to_list()
        try:
            names = [self._items.split(value) if isinstance(value, str) else value or [] for value in given]
            items = [np.array([self._items.row_of(name) for name in row], np.int64) for row in names]
        except DataError as error:
            raise DataError(f"{rows.file}: column {column}: {error}") from None
        is_unknown = [row < 0 for row in items]
        self.tally.add(
            column,
            missing=np.array([row.all() for row in is_unknown]),
            unseen=np.array([row.any() and not row.all() for row in is_unknown]),
        )
        return names, items


class Ranker(Scorer):
    """Scores candidates after histories; or, if `k` is given, finds the K best items."""

    def __init__(self, recommender: Recommender, k: int = 0, include_seen: bool = False) -> None:
        self._recommender, self._k, self._include_seen = recommender, k, include_seen
        self.run = recommender.run
        self.rows_per_row = max(k, 1)

    @property
    def made(self) -> list[str]:
        return ["rank", "item", "title", "score"] if self._k else ["item", "score"]

    @cached_property
    def encoder(self) -> HistoryEncoder:  # type: ignore[override]
        return HistoryEncoder(self._recommender.items, [HISTORY] if self._k else [HISTORY, CANDIDATES])

    @cached_property
    def network(self) -> "nn.Module":
        return self._recommender.network

    def scored(self, kept: "pl.DataFrame", encoded: Histories) -> "pl.DataFrame":  # type: ignore[override]
        """Return the columns to keep and `made`. A row whose history has no known item gets null, or no items."""
        if self._k:
            histories = [items + 1 for items in encoded.items]
            made = self._recommender.best_of_all(histories, self._k, self._include_seen)
        else:
            made = self._of_candidates(encoded)
        rows = made["row"]
        return made.select([*(column.gather(rows) for column in kept), *self.made])

    def _of_candidates(self, encoded: Histories) -> "pl.DataFrame":
        import polars as pl

        found = [np.full(len(row), np.nan, np.float32) for row in encoded.candidates]
        for rows in self._recommender.batches(encoded.items):
            scores_BV = self._recommender.scores([encoded.items[row] + 1 for row in rows])
            for row, scores_V in zip(rows, scores_BV, strict=True):
                is_known = encoded.candidates[row] >= 0
                found[row][is_known] = scores_V[encoded.candidates[row][is_known]]
        lengths = [len(row) for row in found]
        names = pl.Series([name for row in encoded.names for name in row], dtype=pl.String)
        scores = pl.Series(np.concatenate([np.empty(0, np.float32), *found]), dtype=pl.Float32).fill_nan(None)
        return pl.DataFrame({"row": np.repeat(np.arange(len(found)), lengths), "item": names, "score": scores})

    def shares(self, tally: Tally) -> list[dict[str, Any]]:
        result = "recommended" if self._k else "scored"
        texts = {
            (HISTORY, "missing"): f"have no item of the dataset: nothing is {result} for them",
            (CANDIDATES, "missing"): "have no item of the dataset: they get no score",
            (HISTORY, "unseen"): "have some items that the dataset does not have, which are left out",
            (CANDIDATES, "unseen"): "have some items that the dataset does not have, which get no score",
        }
        for (column, kind), text in texts.items():
            if count := tally.counts.get(column, Counter())[kind]:
                log.warning("%s: %s of %s rows %s", column, f"{count:,}", f"{tally.rows:,}", text)
        return super().shares(tally)

    def write_best(self, options: dict[str, Any]) -> dict[str, Any]:
        """Write the K best items for the rows of a file."""
        from recmill.commands.scored_files import score_files

        checked = checked_options("recommend", RequestOptions, options)
        if checked.output != STREAM:
            new_path(checked.output, "--output")
        written = score_files(self, self.made, checked)
        return written | {"requests": written["rows"], "rows": written["written"]}
