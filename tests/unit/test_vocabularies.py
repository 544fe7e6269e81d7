"""Contiguous ids: numbered as plain Python numbers them, by frequency or by first occurrence."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from recmill import prepare
from recmill.datasets.click_log import LogFormat, parse_log
from recmill.datasets.vocabularies import Counting, LogRows, lookup_rounds, write_vocabulary

from ..criteo_raw import day_rows, ids_of, random_rows, sparse, stored, write_rows, write_text


def expected_ids(
    train: list[list[int | None]], rows: list[list[int | None]], min_frequency: int = 1, sizes: list[int] | None = None
) -> tuple[list[list[int]], list[dict[int, int]]]:
    """By dictionaries: 0 missing, 1 rare or unseen, then falling frequency, ties by raw value."""
    vocabularies = []
    for column in range(26):
        counts = Counter(row[column] for row in train if row[column] is not None)
        order = sorted((-count, raw) for raw, count in counts.items() if count >= min_frequency)
        kept = order[: sizes[column] - 2 if sizes else None]
        vocabularies.append({raw: 2 + place for place, (_, raw) in enumerate(kept)})
    found = [[0 if raw is None else vocabularies[c].get(raw, 1) for c, raw in enumerate(row)] for row in rows]
    return found, vocabularies  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "min_frequency", "sizes"),
    [
        ({}, 1, None),
        ({"min_frequency": 3}, 3, None),
        ({"table_size": [12]}, 1, [12] * 26),
        ({"table_size": [3 + c for c in range(26)], "min_frequency": 2}, 2, [3 + c for c in range(26)]),
    ],
)
def test_contiguous_ids_by_falling_frequency_in_the_training_rows(
    options: dict[str, Any], min_frequency: int, sizes: list[int] | None, logs: Path, tmp_path: Path
) -> None:
    description = prepare("criteo", tmp_path / "d", input=logs, **options)
    by_day = [ids_of(day_rows(logs, day)) for day in range(3)]
    train, everything = by_day[0] + by_day[1], by_day[0] + by_day[1] + by_day[2]
    expected, vocabularies = expected_ids(train, everything, min_frequency, sizes)
    found = sparse(tmp_path / "d")
    assert found.dtype == np.int32
    assert found.tolist() == expected
    assert (np.array(expected[-201:]) == 1).any()  # some of the last day are unseen or rare
    assert (np.array(expected) == 0).any()
    for column, vocabulary in enumerate(vocabularies):
        assert stored(tmp_path / "d", f"vocabulary_C{column + 1}").tolist() == [
            list(p) for p in sorted(vocabulary.items())
        ]
        assert description["sparse"][column]["rows"] == len(vocabulary) + 2


def test_ids_in_order_of_occurrence(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, id_order="first-seen")
    by_day = [ids_of(day_rows(logs, day)) for day in range(3)]
    seen: list[dict[int, int]] = [{} for _ in range(26)]
    for row in by_day[0] + by_day[1]:
        for column, raw in enumerate(row):
            if raw is not None:
                seen[column].setdefault(raw, 2 + len(seen[column]))
    expected = [
        [0 if raw is None else seen[c].get(raw, 1) for c, raw in enumerate(row)] for day in by_day for row in day
    ]
    assert sparse(tmp_path / "d").tolist() == expected


@pytest.mark.parametrize(
    "id_order",
    [
        "frequency",
        "first-seen",
    ],
)
def test_a_column_without_any_id_is_all_missing(id_order: Any, tmp_path: Path) -> None:
    days = [random_rows(30, seed) for seed in (1, 2)]
    for day, rows in enumerate(days):
        for row in rows:
            row[14 + 7] = ""
        write_rows(tmp_path / "raw" / f"day_{day}", rows)
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", id_order=id_order)
    assert set(sparse(tmp_path / "d", 2)[:, 7].tolist()) == {0}
    assert description["sparse"][7]["rows"] == 2
    assert stored(tmp_path / "d", "vocabulary_C8").shape == (0, 2)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("frequency", [[3, 2], [2, 0], [2, 1], [4, 1]]), ("first-seen", [[2, 2], [3, 0], [3, 1], [4, 1]])],
)
def test_logs_of_other_column_counts_are_numbered_too(
    order: Literal["frequency", "first-seen"], expected: list[list[int]], tmp_path: Path
) -> None:
    raw = write_text(tmp_path / "log", b"1\t5\taa\t01\n0\t6\t0b\t\n0\t\t0b\t02\n1\t7\tcc\t03\n")
    with ThreadPoolExecutor(1) as pool:
        parsed = parse_log(
            raw,
            tmp_path / "rows",
            LogFormat(num_dense=1, num_sparse=2),
            bad_rows_allowed=None,
            pool=pool,
            chunk_bytes=1 << 20,
            progress=lambda rows: None,
        )
    counting = Counting(order, min_frequency=1, missing_is_zero=False, memory=1 << 20, scratch=tmp_path)
    rows = [LogRows(parsed, 0, 4, 0)]
    paths = [tmp_path / f"{column}.npy" for column in range(2)]
    sizes = [write_vocabulary(path, rows, column, [10, 1][column], counting) for column, path in enumerate(paths)]
    assert sizes == [3, 1]  # of the second column, only one id is kept
    found = np.empty((4, 2), np.int32)
    for lookup in lookup_rounds(paths, missing_is_zero=False, memory=1 << 20):
        lookup.map(parsed.read_block(0, 4), found)
    assert found.tolist() == expected
