import numpy as np
import pytest

from recmill.data.click_rows import ClickRows
from recmill.data.seen import BitSet, SeenRows, row_hashes


def test_a_bit_set_returns_each_new_number_once() -> None:
    numbers = BitSet(20)
    assert numbers.add(np.array([7, 3, 7, 19])).tolist() == [3, 7, 19]
    assert numbers.add(np.array([0, 19, 8])).tolist() == [0, 8]
    assert np.flatnonzero(numbers.has(np.arange(20))).tolist() == [0, 3, 7, 8, 19]


def test_equal_rows_are_each_counted_as_seen() -> None:
    rows = SeenRows(np.array([9, 5, 5, 1], dtype=np.uint64))
    rows.mark(np.array([5, 6, 2**63], dtype=np.uint64))
    assert rows.num_marked(np.array([5, 9, 5], dtype=np.uint64)) == 2
    assert rows.num_marked(np.array([1], dtype=np.uint64)) == 0


def test_nothing_is_seen_among_no_rows() -> None:
    rows = SeenRows(np.empty(0, dtype=np.uint64))
    rows.mark(np.array([5], dtype=np.uint64))
    assert rows.num_marked(np.empty(0, dtype=np.uint64)) == 0


@pytest.mark.parametrize("part", ["dense", "ids", "labels"])
def test_hashes_differ_where_any_part_of_a_row_does(part: str) -> None:
    rows = ClickRows(np.ones((2, 3), np.float32), np.ones((2, 4), np.int64), np.ones(2, np.int32))
    assert len(np.unique(_hashes(rows))) == 1
    getattr(rows, part)[1] = 0
    assert len(np.unique(_hashes(rows))) == 2


def _hashes(rows: ClickRows) -> np.ndarray:
    return row_hashes(rows, np.ascontiguousarray(rows.ids.T))
