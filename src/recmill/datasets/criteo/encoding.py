"""From raw rows of Criteo's logs to what a network reads, by the rules of a prepared dataset."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import polars as pl

from recmill.data.click_rows import ClickRows, Conversion
from recmill.data.multi_hot import MultiHot
from recmill.data.recipes import NO_LABEL, Tally
from recmill.datasets.click_log import LogBlock, parse_text
from recmill.datasets.criteo.ids import ids_of
from recmill.datasets.criteo.options import CRITEO, LOG_MIN, rules_in
from recmill.datasets.criteo.plan import vocabulary_file
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.own_clicks.values import RawRows
from recmill.datasets.vocabularies import RARE, LookupRound, lookup_rounds
from recmill.errors import DataError
from recmill.schema import Dataset

_ALL_OF_MEMORY = 1 << 62


class CriteoEncoder:
    """Turns raw rows into dense values and ids, and counts what it met."""

    label_column = CRITEO.fields[0]
    feature_columns = CRITEO.fields[1:]
    trained_rows = 0  # how many of them lacked a value is not known

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._rules = rules_in(dataset.clicks.recipe)
        self._smallest = self._smallest_dense()
        self._convert = Conversion(dataset.clicks)
        self.tally = Tally()
        self.trained_tally: dict[str, dict[str, int]] = {}

    def input_section(self, count_fields: Callable[[], int]) -> InputSection:
        """Return how to read text with this many fields per row: Kaggle's test.txt has no labels."""
        columns = CRITEO.fields if count_fields() == len(CRITEO.fields) else self.feature_columns
        return InputSection(separator="\t", columns=columns, quotes=False)

    def adapt(self, new_rows: NewRowsFlags) -> None:
        new_rows.check_not_for_values()

    def encode(self, rows: RawRows, with_labels: bool = True, may_be_missing: bool = False) -> ClickRows:
        """Return the rows in their order, with NO_LABEL where there is no label."""
        block, is_labelled = self._parsed(rows, with_labels)
        if with_labels and not may_be_missing and not is_labelled.all():
            raise rows.error(int(np.argmin(is_labelled)), self.label_column, "no label", "Remove such rows.")
        ids = ids_of(block, self._rules, self._lookup)
        self._count(block, ids)
        if self._multi_hot:
            ids = np.concatenate([self._multi_hot.of(c, ids[:, c]) for c in range(CRITEO.num_sparse)], axis=1)
        labels = np.where(is_labelled, block.labels, NO_LABEL).astype(np.int32)
        return self._convert(ClickRows(self._rules.dense_values(block.dense, self._smallest), ids, labels))

    def _parsed(self, rows: RawRows, with_labels: bool) -> tuple[LogBlock, np.ndarray]:
        """Return the rows as `prepare criteo` parses them, and which have a label: they are written as text again."""
        columns = [self._text(rows, name) for name in self.feature_columns]
        label = pl.Series([None] * len(rows), dtype=pl.String)
        if with_labels:
            label = self._text(rows, self.label_column)
            label = label.set(label == "", None)
        frame = pl.DataFrame([label.fill_null("0").alias(self.label_column), *columns])
        text = frame.write_csv(include_header=False, separator="\t", quote_style="never", null_value="")
        block, bad = parse_text(text.encode(), self._rules.log_format(has_labels=True))
        if bad:
            line, problem = bad[0]
            raise DataError(f"{rows.file}: row {int(rows.numbers[line - 1]):,}{problem}. Correct it.")
        return block, label.is_not_null().to_numpy()

    def _text(self, rows: RawRows, name: str) -> pl.Series:
        values = rows.frame[name]
        if values.dtype.is_float():  # whole numbers of pandas with gaps
            whole = values.fill_nan(None).cast(pl.Int64, strict=False)
            values = whole if (whole.cast(values.dtype) == values.fill_nan(None)).all() else values
        is_id = name in self.feature_columns[CRITEO.num_dense :]
        if not (values.dtype == pl.String or values.dtype == pl.Null or (values.dtype.is_integer() and not is_id)):
            wanted = "hexadecimal text" if is_id else "whole numbers"
            raise DataError(f"{rows.file}: column {name} holds {values.dtype}, not {wanted}. Convert it.")
        text = values.cast(pl.String)
        if (is_bad := text.str.contains('[\t\r\n"]').fill_null(False)).any():
            row = int(is_bad.arg_true()[0])
            raise rows.error(row, name, f"{text[row][:80]!r} is no value of Criteo's logs", "Correct it.")
        return text.alias(name)

    def _count(self, block: LogBlock, ids: np.ndarray) -> None:
        self.tally.rows += len(block)
        is_missing = block.is_missing
        for column, name in enumerate(self.feature_columns[CRITEO.num_dense :]):
            found = {"missing": is_missing[column]}
            if self._rules.ids == "contiguous":
                found["unseen"] = ids[:, column] == RARE
            self.tally.add(name, **found)

    def _smallest_dense(self) -> int:
        """Return the smallest integer of the prepared logs, if the transform of dense values depends on it."""
        if self._rules.dense != LOG_MIN:
            return 0
        known = [source.smallest_dense for source in self._dataset.clicks.source]
        found = [value for value in known if value is not None]
        if self._rules.compat == "torchrec" or not found:
            fact = "each of its files has another transform of dense values" if found else "it does not say its minimum"
            raise DataError(
                f"{self._dataset.path}: {fact}, so new rows cannot be encoded. Prepare it again, with --overwrite"
                f"{' and --compat torchrec-fixed' if found else ''}, and train on that."
            )
        return min(found)

    @cached_property
    def _lookup(self) -> LookupRound | None:
        if self._rules.ids != "contiguous":
            return None
        names = self.feature_columns[CRITEO.num_dense :]
        paths = [self._dataset.path / vocabulary_file(name) for name in names]
        return lookup_rounds(paths, self._rules.is_torchrec, _ALL_OF_MEMORY)[0]

    @cached_property
    def _multi_hot(self) -> MultiHot | None:
        rules = self._rules
        rows = [feature.rows for feature in self._dataset.clicks.sparse]
        sizes, distribution = list(rules.multi_hot), rules.multi_hot_distribution
        return MultiHot(rows, sizes, distribution, rules.seed) if sizes else None
