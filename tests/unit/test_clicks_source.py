from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recmill import rng
from recmill.batch import CtrBatch
from recmill.data.clicks import ClickSource, SplitRows
from recmill.data.multi_hot import MultiHot
from recmill.data.opening import open_dataset
from recmill.data.share import Batching
from recmill.schema import ClicksDescription, Dataset, RowRange, SparseFeature

Row = tuple[Any, ...]


def click_source(path: Path, rank: int = 0, size: int = 1, **options: Any) -> ClickSource:
    chosen: dict[str, Any] = {"order": "shuffled", "seed": 1, "train_batch_size": 125, "eval_batch_size": 300} | options
    return ClickSource(open_dataset(path), Batching(rank=rank, size=size, **chosen))


def click_rows(batch: CtrBatch) -> list[Row]:
    """(dense values, ids, label) of the rows that count."""
    ids_NB = batch.sparse.values().view(len(batch.sparse.keys()), -1).numpy()
    rows = zip(batch.dense_BF.tolist(), ids_NB.T.tolist(), batch.labels_B.tolist(), batch.weights_B, strict=True)
    return [(*dense, *ids, label) for dense, ids, label, weight in rows if weight]


def click_epoch(path: Path, size: int = 1, epoch: int = 0, first: int = 0, **options: Any) -> list[list[Row]]:
    """Rows of each global batch, rank after rank."""
    ranks = [click_source(path, rank, size, **options).train_batches(epoch, first) for rank in range(size)]
    return [[row for part in parts for row in click_rows(part)] for parts in zip(*ranks, strict=True)]


def click_file_rows(path: Path, *days: int) -> list[Row]:
    rows: list[Row] = []
    for day in days:
        dense, ids, labels = (np.load(path / f"day_{day}_{part}.npy") for part in ("dense", "sparse", "labels"))
        rows += [(*d, *i, float(y[0])) for d, i, y in zip(dense.tolist(), ids.tolist(), labels, strict=True)]
    return rows


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_epoch_holds_every_training_row_exactly_once(clicks: Path, size: int) -> None:
    """The last of 13 batches has fewer rows than the largest world has ranks."""
    rows = click_file_rows(clicks, 0, 1, 2)
    batches = click_epoch(clicks, size)
    assert [len(batch) for batch in batches] == [125] * 12 + [len(rows) - 12 * 125]
    assert sorted(row for batch in batches for row in batch) == sorted(rows)
    assert click_source(clicks, size=size).batches_per_epoch == 13


def test_a_global_batch_is_the_same_for_any_world_size(clicks: Path) -> None:
    assert click_epoch(clicks, size=1) == click_epoch(clicks, size=2) == click_epoch(clicks, size=3)


def test_ids_of_dynamic_tables_are_keys_and_fillers_have_none(clicks: Path) -> None:
    dataset = open_dataset(clicks)
    first, *others = [feature.name for feature in dataset.clicks.sparse]
    plain: list[int] = []
    keys: list[int] = []
    for rank in range(3):
        batching = Batching(order="file", seed=1, train_batch_size=125, eval_batch_size=300, rank=rank, size=3)
        expected = next(ClickSource(dataset, batching).train_batches(0, 0))
        batch = next(ClickSource(dataset, batching, dynamic={first}).train_batches(0, 0))
        num_real = int(expected.weight())
        assert batch.sparse[first].lengths().tolist() == [1] * num_real + [0] * (42 - num_real)
        assert batch.sparse[first].offsets().tolist()[-1] == batch.sparse.length_per_key()[0] == num_real
        keys += rng.ids_of_keys(batch.sparse[first].values().numpy()).tolist()
        plain += expected.sparse[first].values()[:num_real].tolist()
        for name in others:  # in other tables, fillers are looked up
            assert batch.sparse[name].values().tolist() == expected.sparse[name].values().tolist()
    assert keys == plain and len(keys) == 125


@pytest.mark.parametrize("order", ["shuffled", "file", "batch"])
def test_ids_read_ahead_are_those_of_all_ranks_in_a_batch(clicks: Path, order: str) -> None:
    source = click_source(clicks, rank=1, size=3, order=order)
    for batch, rows in enumerate(click_epoch(clicks, size=3, epoch=1, order=order)):
        ids = source.global_ids(1, batch)
        num_dense = len(rows[0]) - len(ids) - 1
        assert list(zip(*ids.values(), strict=True)) == [row[num_dense:-1] for row in rows]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1, 2, 1]])
def test_padding_ids_are_left_out_of_batches(clicks: Path, sizes: list[int]) -> None:
    """C1 has 5 rows: a fifth of its ids are padding, and rows without any other id have an empty bag."""
    dataset, padding = open_dataset(clicks), {"C1": 2, "C4": 0}
    multi_hot = MultiHot([5, 50, 300, 2000], sizes, "uniform", 1)
    batching = Batching(order="shuffled", seed=1, train_batch_size=125, eval_batch_size=300, rank=1, size=2)
    plain, padded = (ClickSource(dataset, batching, multi_hot, padding=left_out) for left_out in ({}, padding))
    for one, other in zip(plain.train_batches(0, 0), padded.train_batches(0, 0), strict=True):
        counts = []
        for feature in ("C1", "C2", "C3", "C4"):
            bags = [[i for i in bag.tolist() if i != padding.get(feature)] for bag in one.sparse[feature].to_dense()]
            assert [bag.tolist() for bag in other.sparse[feature].to_dense()] == bags
            counts.append(sum(map(len, bags)))
        assert other.sparse.length_per_key() == counts
        assert other.sparse.offsets().tolist() == [0, *other.sparse.lengths().cumsum(0).tolist()]
        assert torch.equal(one.labels_B, other.labels_B)
    ids, expected = padded.global_ids(0, 3), plain.global_ids(0, 3)
    assert ids and expected
    for feature in ids:
        assert ids[feature].tolist() == [i for i in expected[feature].tolist() if i != padding.get(feature)]


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 2}])
def test_the_shuffled_order_depends_on_epoch_and_seed(clicks: Path, change: dict[str, int]) -> None:
    one, other = click_epoch(clicks), click_epoch(clicks, **change)
    assert len(set(one[0]) & set(other[0])) < 40  # 10 by chance
    assert one == click_epoch(clicks)


def test_file_order_is_the_order_of_the_files(clicks: Path) -> None:
    for epoch in (0, 1):
        batches = click_epoch(clicks, size=2, epoch=epoch, order="file")
        assert [row for batch in batches for row in batch] == click_file_rows(clicks, 0, 1, 2)


def test_batch_order_mixes_rows_within_their_batches_only(clicks: Path) -> None:
    in_file = click_epoch(clicks, order="file")
    mixed = click_epoch(clicks, size=3, order="batch")
    assert [sorted(batch) for batch in mixed] == [sorted(batch) for batch in in_file]
    assert all(one != other for one, other in zip(mixed[:12], in_file[:12], strict=True))
    assert mixed == click_epoch(clicks, size=1, order="batch")
    assert mixed[0] != click_epoch(clicks, epoch=1, order="batch")[0]


def test_limits_cut_each_split_to_its_first_batches(clicks: Path) -> None:
    """1,501 rows for training in batches of 125: 12 full ones and 1 row; 251 and 250 others in batches of 100."""
    whole = click_epoch(clicks)
    assert click_epoch(clicks, size=2, max_batches={"train": 3}) == whole[:3]
    assert click_epoch(clicks, size=2, drop_last=True) == whole[:12]
    assert click_epoch(clicks, max_batches={"train": 13}, drop_last=True) == whole[:12]
    assert click_epoch(clicks, first=2, max_batches={"train": 3}) == whole[2:3]
    limits = {"train": 3, "val": 2, "test": 9}
    source = click_source(clicks, eval_batch_size=100, max_batches=limits, drop_last=True)
    assert (source.batches_per_epoch, source.samples_per_epoch) == (3, 375)
    assert (source.num_eval_batches("val"), source.num_eval_batches("test")) == (2, 3)
    rows = {split: [len(click_rows(b)) for b in source.eval_batches(split)] for split in ("val", "test")}
    assert rows == {"val": [100, 100], "test": [100, 100, 50]}


def test_more_ranks_than_rows_get_equally_many_batches_of_equal_size(clicks: Path) -> None:
    """3 rows of training on 5 ranks."""
    ranks = [
        list(click_source(clicks, rank, 5, train_batch_size=3, max_batches={"train": 1}).train_batches(0, 0))
        for rank in range(5)
    ]
    assert [[len(batch.labels_B) for batch in batches] for batches in ranks] == [[1]] * 5
    assert sum(batch.weight() for batches in ranks for batch in batches) == 3


@pytest.mark.parametrize(("first", "order"), [(1, "shuffled"), (12, "shuffled"), (13, "shuffled"), (5, "file")])
def test_click_batches_from_the_middle_are_the_tail_of_the_epoch(clicks: Path, first: int, order: str) -> None:
    options: dict[str, Any] = {"size": 2, "epoch": 3, "order": order}
    assert click_epoch(clicks, first=first, **options) == click_epoch(clicks, **options)[first:]


def test_an_epoch_interrupted_again_and_again_holds_every_row_once_in_the_same_order(clicks: Path) -> None:
    """Each time it continues with another number of processes, where the previous one stopped."""
    parts = [(0, 3, 2), (3, 4, 1), (4, 9, 5), (9, 13, 3)]  # first batch, end, processes
    found = [click_epoch(clicks, size, epoch=2, first=first)[: end - first] for first, end, size in parts]
    assert [batch for part in found for batch in part] == click_epoch(clicks, epoch=2)


@pytest.mark.parametrize("split", ["val", "test"])
def test_validation_and_test_are_the_halves_of_the_last_day_in_order(clicks: Path, split: str) -> None:
    ranks = [list(click_source(clicks, rank, 2, eval_batch_size=100).eval_batches(split)) for rank in range(2)]
    found = [row for parts in zip(*ranks, strict=True) for part in parts for row in click_rows(part)]
    last_day = click_file_rows(clicks, 3)
    assert found == (last_day[:251] if split == "val" else last_day[251:])
    assert len(last_day) in (501, 502)
    assert len(ranks[0]) == click_source(clicks, eval_batch_size=100).num_eval_batches(split) == 3


def test_rows_of_more_than_65536_ranges_come_in_the_requested_order(tmp_path: Path) -> None:
    """Every second of 140,000 rows is in the split, each in a range of its own; row n has the dense value n."""
    count = 70_000
    np.save(tmp_path / "day_0_dense.npy", np.arange(2 * count, dtype=np.float32)[:, None])
    for part in ("sparse", "labels"):
        np.save(tmp_path / f"day_0_{part}.npy", np.zeros((2 * count, 1), np.int32))
    description = ClicksDescription(
        name="by hand",
        made_by="a test",
        recipe={},
        files={},
        dense=["I1"],
        sparse=[SparseFeature(name="C1", rows=1)],
        splits={"train": [RowRange(day="day_0", start=2 * n, stop=2 * n + 1) for n in range(count)]},
    )
    rows = np.array([69_999, 0, 65_536, 1, 65_537])
    found = SplitRows(Dataset(tmp_path, description, fingerprint=""), "train").take(rows)
    assert found.dense[:, 0].tolist() == (2 * rows).tolist()
