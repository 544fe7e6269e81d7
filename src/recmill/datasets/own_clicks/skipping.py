"""Leave out rows of an own click log that are bad: cut short, or with a value that cannot be used."""

from collections.abc import Iterator

import numpy as np

from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.delimited import BadRows
from recmill.datasets.inputs.reading import frames
from recmill.datasets.own_clicks.schema import BucketFeature, ClicksSchema, NumericFeature
from recmill.datasets.own_clicks.values import RawRows, labels, numbers, times, weights
from recmill.errors import DataError


def good_blocks(file: InputFile, log: ClicksSchema, bad_rows: BadRows) -> Iterator[RawRows]:
    """Yield the good rows of a file, in order, with their numbers in it; count the others in `bad_rows`."""
    last = 0  # number of the last row that was read
    for frame in frames(file, log.input, log.columns(), bad_rows=bad_rows):
        if not frame.height:
            continue
        skipped = [number for number in bad_rows.numbers if number > last]
        found = np.arange(last + 1, last + 1 + frame.height + len(skipped))
        found = found[~np.isin(found, skipped)][: frame.height]
        last = int(found[-1])
        rows = _good(RawRows(frame, file.name, found), log, bad_rows)
        if len(rows):
            yield rows


def _good(rows: RawRows, log: ClicksSchema, bad_rows: BadRows) -> RawRows:
    problems: dict[int, str] = {}
    is_good = np.ones(len(rows), bool)
    while len(problems) + bad_rows.count <= bad_rows.allowed:
        try:
            _check(rows.where(is_good), log)
            break
        except DataError as error:
            if error.bad_row is None:
                raise
            place, fact = error.bad_row
            row = int(np.flatnonzero(is_good)[place])
            problems[row], is_good[row] = fact, False
    for row in sorted(problems):
        bad_rows.skip(problems[row], int(rows.numbers[row]))
    return rows.where(is_good)


def _check(rows: RawRows, log: ClicksSchema) -> None:
    """Raise an error for a row with a value that cannot be used."""
    labels(rows, log)
    if log.time:
        times(rows, log)
    if log.keep.weight:
        weights(rows, log)
    for feature in log.feature:
        if isinstance(feature, NumericFeature | BucketFeature):
            numbers(rows, feature.column, log.missing_texts(feature), log.input)
