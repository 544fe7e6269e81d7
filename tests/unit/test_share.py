import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.data.share import Batching, Share


def shares(samples: int, batch_size: int, first: int, rank: int, size: int) -> list[Share]:
    batching = Batching("file", 0, batch_size, batch_size, rank, size)
    return list(batching.shares("train", samples, first))


@settings(derandomize=True, deadline=None)
@given(samples=st.integers(0, 300), batch=st.integers(1, 40), size=st.integers(1, 9), first=st.integers(0, 5))
def test_shares_cover_every_position_once_in_equally_many_batches(
    samples: int, batch: int, size: int, first: int
) -> None:
    by_rank = [shares(samples, batch, first, rank, size) for rank in range(size)]
    assert {len(parts) for parts in by_rank} == {max(0, math.ceil(samples / batch) - first)}
    covered: list[int] = []
    for parts in zip(*by_rank, strict=True):
        assert len({len(part.positions) for part in parts}) == 1, "equally many rows, fillers included"
        assert len(parts[0].positions) <= -(-batch // size), "no more fillers than needed"
        covered += [int(p) for part in parts for p in part.positions[part.weights() > 0]]
    assert covered == list(range(first * batch, samples))


def test_a_rank_that_got_fewer_positions_is_filled_up_with_some_that_weigh_nothing() -> None:
    """23 samples in batches of 10, over 4 ranks: the last batch has 3."""
    by_rank = [shares(23, 10, 1, rank, 4) for rank in range(4)]
    assert [part.weights().tolist() for part, _ in by_rank] == [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert [part.weights().tolist() for _, part in by_rank] == [[0], [1], [1], [1]]
    assert all(part.positions[0] in (20, 21, 22) for _, part in by_rank), "a filler is a row that exists"


@pytest.mark.parametrize(
    ("rows", "per_rank", "world", "counts"),
    [
        # The reference's own examples, 103 rows in batches of 10 on 4 ranks and so on. It gives the ranks' last batches
        # 6, 6, 6, 5 rows as we do, but for the second: there it makes one of 11, 11, 10, 10 of the last two.
        (103, 10, 4, [[10, 10, 10, 10], [10, 10, 10, 10], [5, 6, 6, 6]]),
        (82, 10, 4, [[10, 10, 10, 10], [10, 10, 10, 10], [0, 1, 0, 1]]),
        (80, 10, 4, [[10, 10, 10, 10], [10, 10, 10, 10]]),
        (25, 10, 4, [[6, 6, 6, 7]]),
        (3, 10, 4, [[0, 1, 1, 1]]),  # the reference has no batch at all for this one
    ],
)
def test_the_last_global_batch_is_divided_evenly(rows: int, per_rank: int, world: int, counts: list[list[int]]) -> None:
    by_rank = [shares(rows, per_rank * world, 0, rank, world) for rank in range(world)]
    assert [[part.num_real for part in parts] for parts in zip(*by_rank, strict=True)] == counts


def torchrec_shares(rows: int, per_rank: int, rank: int, size: int, limit: int = 0) -> list[Share]:
    batching = Batching("file", 0, per_rank * size, 1, rank, size, {"train": limit}, remainder="torchrec")
    used = batching.num_used("train", rows)
    parts = list(batching.shares("train", used))
    assert batching.num_batches("train", used) == len(parts)
    return parts


@pytest.mark.parametrize(
    ("rows", "per_rank", "world", "full", "last"),
    [  # full batches of all ranks together, and the last batch of each: what TorchRec's own tests expect
        (103, 10, 4, 8, [6, 6, 6, 5]),
        (82, 10, 4, 4, [11, 11, 10, 10]),
        (80, 10, 4, 8, []),
        (25, 10, 4, 0, [7, 6, 6, 6]),
        (43, 10, 4, 0, [11, 11, 11, 10]),
        (61, 10, 2, 4, [11, 10]),
        (61, 10, 3, 3, [11, 10, 10]),
        (61, 10, 1, 6, [1]),
        (3, 10, 4, 0, [1, 1, 1, 0]),  # TorchRec has no batch at all for this one
    ],
)
def test_the_remainder_of_torchrec(rows: int, per_rank: int, world: int, full: int, last: list[int]) -> None:
    by_rank = [torchrec_shares(rows, per_rank, rank, world) for rank in range(world)]
    expected = [[per_rank] * world] * (full // world) + ([last] if last else [])
    assert [[part.num_real for part in parts] for parts in zip(*by_rank, strict=True)] == expected
    covered = [
        int(p) for parts in zip(*by_rank, strict=True) for part in parts for p in part.positions[: part.num_real]
    ]
    assert covered == list(range(rows))
    assert all(len({len(part.positions) for part in parts}) == 1 for parts in zip(*by_rank, strict=True))


def test_a_limit_cuts_the_remainder_only_if_there_are_more_batches() -> None:
    """82 rows over 4 ranks: two batches, of 40 and 42 rows."""
    counts = [[p.num_real for p in torchrec_shares(82, 10, 0, 4, limit)] for limit in (1, 2, 3)]
    assert counts == [[10], [10, 11], [10, 11]]


def test_rows_added_to_the_last_batch_are_permuted_with_it() -> None:
    batching = [Batching("batch", 0, 8, 1, rank, 4, remainder="torchrec") for rank in range(4)]
    last = [list(own.shares("train", 19))[-1] for own in batching]
    found = [b.permuted_within_batch(s.positions[: s.num_real], 19, 0) for b, s in zip(batching, last, strict=True)]
    assert sorted(int(p) for part in found for p in part) == list(range(8, 19))
