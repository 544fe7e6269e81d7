"""`prepare criteo` on one machine: dense values, and the same bytes whatever the memory, the threads and the chunks."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.batch import CtrBatch
from recmill.data.clicks import ClickSource
from recmill.data.opening import open_dataset
from recmill.data.share import Batching
from recmill.datasets import shuffle, vocabularies
from recmill.datasets.criteo import steps
from recmill.datasets.criteo.plan import Plan

from ..criteo_raw import (
    COLUMNS,
    contents,
    dense_of,
    random_rows,
    set_limits,
    sparse,
    split_ranges,
    stored,
    write_days,
    write_rows,
    write_text,
)


@pytest.mark.parametrize(
    ("rule", "smallest", "formula"),
    [
        ("log3", -2, lambda x, least: math.log(x + 3)),
        ("log2", -1, lambda x, least: math.log(x + 2)),
        ("log-min", -700, lambda x, least: math.log(x - least + 2)),
        ("log1-clip", -700, lambda x, least: math.log(1 + max(x, 0))),
    ],
)
def test_dense_rules(rule: Any, smallest: int, formula: Callable[[int, int], float], tmp_path: Path) -> None:
    """With log-min, all days share the smallest number of all: here it is in day 1."""
    days = [random_rows(40, 1, smallest=-1), random_rows(40, 2, smallest=smallest), random_rows(40, 3, smallest=-1)]
    days[0][0][1], days[1][0][1] = str(2**31 - 1), str(smallest)
    for day, rows in enumerate(days):
        write_rows(tmp_path / "raw" / f"day_{day}", rows)
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", dense=rule)
    for day, rows in enumerate(days):
        found = stored(tmp_path / "d", f"day_{day}_dense")
        expected = [[formula(x, smallest) for x in row] for row in dense_of(rows).tolist()]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=3e-7, atol=1e-7)


def test_in_parquet_the_splits_hold_the_same_rows_as_in_npy(logs: Path, tmp_path: Path) -> None:
    description = prepare("criteo", tmp_path / "p", input=logs, format="parquet", last_day="test-first")
    prepare("criteo", tmp_path / "n", input=logs, last_day="test-first")
    assert split_ranges(description) == {
        "train": [("train-day_0-00000", 0, 300), ("train-day_1-00000", 0, 257)],
        "test": [("test-day_2-00000", 0, 101)],
        "val": [("val-day_2-00000", 0, 100)],
    }
    for split, rows in (("test", slice(0, 101)), ("val", slice(101, 201))):
        frame = pl.read_parquet(tmp_path / "p" / f"{split}-day_2-00000.parquet")
        assert frame.select(COLUMNS).to_numpy().tolist() == stored(tmp_path / "n", "day_2_sparse")[rows].tolist()
        assert frame["label"].to_list() == stored(tmp_path / "n", "day_2_labels")[rows, 0].tolist()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_logs_give_the_same_bytes(suffix: str, logs: Path, tmp_path: Path) -> None:
    for day in range(3):
        write_text(tmp_path / "raw" / f"day_{day}{suffix if day else ''}", (logs / f"day_{day}").read_bytes())
    prepare("criteo", tmp_path / "plain", input=logs)
    prepare("criteo", tmp_path / "packed", input=tmp_path / "raw")
    plain, packed = contents(tmp_path / "plain"), contents(tmp_path / "packed")
    assert plain.pop("dataset.json") != packed.pop("dataset.json")  # it names the raw files
    assert plain == packed


# The same bytes whatever the memory, the threads and the chunks

MANY_ROWS = [6000, 5200, 1501]
WAYS: dict[str, dict[str, Any]] = {
    "frequency": {"min_frequency": 2},
    "first-seen": {"id_order": "first-seen"},
    "torchrec": {"compat": "torchrec", "shuffle": "global"},
    "global": {"shuffle": "global", "seed": 3},
    "day": {"shuffle": "day", "format": "parquet"},
    "capped": {"table_size": [700], "shuffle": "global"},
    "multi-hot": {"multi_hot": [2]},
}


@pytest.fixture(scope="module")
def long_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 8,192 training rows, up to thousands of ids in a column."""
    directory = tmp_path_factory.mktemp("long") / "raw"
    write_days(directory, MANY_ROWS, missing=0.05, distinct=30_000)
    return directory


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Allow 200 kB and chunks of 64 kB; return how often counts were spilled, and how many blocks there were."""
    seen = {"spilled": 0, "rounds": 0, "slices": 0, "buckets": 0, "blocks": 0}
    set_limits(monkeypatch, memory=200_000, chunk_bytes=1 << 16, block_rows=70)
    parse, rounds, add = steps.parse_log, steps.lookup_rounds, shuffle.Buckets.add
    spill, slices = vocabularies._spilled, vocabularies._slices

    def counted_blocks(*args: Any, **options: Any) -> Any:
        parsed = parse(*args, **options)
        seen["blocks"] += len(parsed.block_rows)
        return parsed

    def spilled(*args: Any) -> Any:
        seen["spilled"] += 1
        return spill(*args)

    def counted_rounds(*args: Any) -> Any:
        found = rounds(*args)
        seen["rounds"] = max(seen["rounds"], len(found))
        return found

    def counted_slices(*args: Any) -> Any:
        found = slices(*args)
        seen["slices"] = max(seen["slices"], sum(1 for _ in found()))
        return found

    def counted_buckets(self: Any, records: np.ndarray, buckets: np.ndarray) -> None:
        seen["buckets"] = max(seen["buckets"], int(buckets.max()) + 1)
        add(self, records, buckets)

    monkeypatch.setattr(steps, "parse_log", counted_blocks)
    monkeypatch.setattr(vocabularies, "_spilled", spilled)
    monkeypatch.setattr(steps, "lookup_rounds", counted_rounds)
    monkeypatch.setattr(vocabularies, "_slices", counted_slices)
    monkeypatch.setattr(shuffle.Buckets, "add", counted_buckets)
    return seen


@pytest.fixture(scope="module")
def with_plenty(long_logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plenty")
    for name, options in WAYS.items():
        prepare("criteo", directory / name, input=long_logs, **options)
    return directory


@pytest.mark.parametrize("way", WAYS)
def test_little_memory_gives_the_same_bytes(
    way: str, long_logs: Path, with_plenty: Path, little_memory: dict[str, int], tmp_path: Path
) -> None:
    if way == "torchrec":
        # numpy's order of all rows needs an array of all rows: 16 bytes each
        assert sum(MANY_ROWS[:2]) * 16 < 200_000
    prepare("criteo", tmp_path / "d", input=long_logs, **WAYS[way])
    assert contents(tmp_path / "d") == contents(with_plenty / way)
    assert little_memory["blocks"] > 40
    assert little_memory["spilled"] >= 2
    assert little_memory["slices"] >= 2
    assert little_memory["rounds"] >= 2
    assert (little_memory["buckets"] >= 20) == ("shuffle" in WAYS[way])


@pytest.mark.parametrize(
    "options",
    [
        {"ids": "hash64"},
        {"ids": "hash64", "table_size": [50], "multi_hot": [3]},
        {"ids": "mod", "table_size": [2**32], "dense": "log1-clip", "on_bad_row": "skip"},
    ],
    ids=str,
)
def test_ids_without_a_vocabulary_are_written_in_one_pass_with_the_bytes_of_two(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(tmp_path / "raw", [150, 120, 33])
    with (tmp_path / "raw" / "day_1").open("ab") as file:
        file.write(b"no row\n" if "on_bad_row" in options else b"")
    set_limits(monkeypatch, chunk_bytes=1 << 13)
    prepare("criteo", tmp_path / "one", input=tmp_path / "raw", **options)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "is_one_pass", False)
        prepare("criteo", tmp_path / "two", input=tmp_path / "raw", **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    phases = [json.loads((tmp_path / name / "preparation.json").read_text())["phases"] for name in ("one", "two")]
    assert "convert" in phases[0] and "read" in phases[1]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", ["frequency", "torchrec", "day"])
def test_any_number_of_threads_gives_the_same_bytes(
    threads: int, way: str, long_logs: Path, with_plenty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(threads)))
    prepare("criteo", tmp_path / "d", input=long_logs, **WAYS[way])
    assert contents(tmp_path / "d") == contents(with_plenty / way)


@pytest.mark.parametrize("budget", ["512MB", "1GiB", "8 gb"])
def test_the_memory_budget_does_not_change_the_result(budget: str, logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "default", input=logs, shuffle="global")
    prepare("criteo", tmp_path / "d", input=logs, shuffle="global", memory_budget=budget)
    assert contents(tmp_path / "d") == contents(tmp_path / "default")


# Parquet


@pytest.fixture(scope="module")
def parquet(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "d"
    prepare("criteo", path, input=logs, format="parquet")
    return path


@pytest.fixture(scope="module")
def npy(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("npy") / "d"
    prepare("criteo", path, input=logs)
    return path


def train_table(npy: Path) -> list[tuple[float, ...]]:
    days = [np.hstack([stored(npy, f"day_{day}_{part}") for part in ("labels", "dense", "sparse")]) for day in (0, 1)]
    return [tuple(row) for row in np.concatenate(days).tolist()]


def test_polars_and_pyarrow_read_it(parquet: Path, npy: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    files = [parquet / f"train-day_{day}-00000.parquet" for day in (0, 1)]
    assert pl.read_parquet(files).rows() == train_table(npy)
    table = dataset.dataset([str(file) for file in files], format="parquet").to_table()
    assert [tuple(row.values()) for row in table.to_pylist()] == train_table(npy)
    assert {str(table.schema.field(name).type) for name in COLUMNS} == {"int32"}


def test_hugging_face_datasets_reads_it_split_by_split(
    parquet: Path, npy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("parquet", data_dir=str(parquet), cache_dir=str(tmp_path / "cache"))
    assert {str(split): len(rows) for split, rows in found.items()} == {"train": 557, "validation": 101, "test": 100}
    assert [tuple(row.values()) for row in found["train"]] == train_table(npy)


@pytest.mark.parametrize("order", ["stored", "shuffled"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["npy", "parquet"])
def test_our_loader_gives_every_row_once_an_epoch(
    order: str, ranks: int, layout: str, npy: Path, parquet: Path
) -> None:
    dataset = open_dataset(npy if layout == "npy" else parquet)
    rows: list[tuple[float, ...]] = []
    ids_of_batch: dict[int, list[list[int]]] = defaultdict(list)
    for rank in range(ranks):
        batching = Batching(order, seed=2, train_batch_size=100, eval_batch_size=64, rank=rank, size=ranks)
        source = ClickSource(dataset, batching)
        for number, batch in enumerate(source.train_batches(epoch=0, first=0)):
            assert isinstance(batch, CtrBatch)
            real = batch.weights_B > 0
            ids = batch.sparse.values().reshape(26, -1).T[real]
            labels, dense = batch.labels_B[real].tolist(), batch.dense_BF[real].tolist()
            rows += [(y, *d, *i) for y, d, i in zip(labels, dense, ids.tolist(), strict=True)]
            ids_of_batch[number] += ids.tolist()
    for number, expected in ids_of_batch.items():  # what is read ahead
        assert np.stack([*source.global_ids(0, number).values()], axis=1).tolist() == expected
    assert len(rows) == 557
    assert sorted(rows) == sorted(train_table(npy))
    if ranks == 1:
        assert (rows == train_table(npy)) == (order == "stored")


def test_a_long_split_is_written_to_several_parquet_files(
    long_logs: Path, with_plenty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, rows_per_file=1000)
    description = prepare("criteo", tmp_path / "d", input=long_logs, format="parquet", min_frequency=2)
    assert [day for day, _, _ in split_ranges(description)["train"]][:7] == [
        *(f"train-day_0-{part:05d}" for part in range(6)),
        "train-day_1-00000",
    ]
    assert [stop for _, _, stop in split_ranges(description)["train"]] == [1000] * 6 + [1000] * 5 + [200]
    found = pl.read_parquet([tmp_path / "d" / f"{day}.parquet" for day, _, _ in split_ranges(description)["train"]])
    assert found.select(COLUMNS).to_numpy().tolist() == sparse(with_plenty / "frequency", 2).tolist()
