"""Files of records, as TorchRec's scripts for NVTabular write them: prepared, adopted, read and refused."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recmill import adopt, prepare, train
from recmill.data.click_rows import concatenate, split_blocks
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, DataError

FILES = {"train": "train_data.bin", "val": "validation_data.bin", "test": "test_data.bin"}


def as_records(dense: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> bytes:
    """As `convert_parquet_to_binary.py` makes them: columns of their types, to_records, tobytes."""
    columns: dict[str, Any] = {"label": labels.astype(np.int32)}
    columns |= {f"int_{i}": dense[:, i].astype(np.float32) for i in range(13)}
    columns |= {f"cat_{i}": ids[:, i].astype(np.int32) for i in range(26)}
    return pd.DataFrame(columns).to_records(index=False).tobytes()


def npy_rows(path: Path, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ranges = open_dataset(path).clicks.splits[split]
    dense, ids, labels = (
        np.concatenate([np.load(path / f"{part.day}_{name}.npy")[part.start : part.stop] for part in ranges])
        for name in ("dense", "sparse", "labels")
    )
    return dense, ids, labels[:, 0]


@pytest.fixture(scope="module")
def prepared(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows as npy files and as records, shuffled."""
    folder = tmp_path_factory.mktemp("records")
    for layout in ("npy", "bin"):
        prepare("criteo", folder / layout, input=str(logs), format=layout, shuffle="global", min_frequency=2)
    return {layout: folder / layout for layout in ("npy", "bin")}


@pytest.fixture
def bins(prepared: dict[str, Path], tmp_path: Path) -> Path:
    """The files alone, as another program would leave them."""
    (tmp_path / "bins").mkdir()
    for file in FILES.values():
        shutil.copy(prepared["bin"] / file, tmp_path / "bins")
    return tmp_path / "bins"


def test_records_hold_the_rows_of_the_npy_files_byte_for_byte(prepared: dict[str, Path]) -> None:
    dataset = open_dataset(prepared["bin"], verify="digests")
    for split, file in FILES.items():
        expected = npy_rows(prepared["npy"], split)
        assert (prepared["bin"] / file).read_bytes() == as_records(*expected)
        rows = concatenate([block.rows for block in split_blocks(dataset, [split])])
        for found, wanted in zip((rows.dense, rows.ids, rows.labels), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)


def test_adopted_records_are_read_and_trained_on_like_the_npy_files(
    bins: Path, prepared: dict[str, Path], dlrm: dict[str, Any], tmp_path: Path
) -> None:
    before = {file.name: file.read_bytes() for file in bins.iterdir()}
    description = adopt(bins)
    assert {file.name for file in bins.iterdir()} - before.keys() == {"dataset.json"}
    assert {name: (bins / name).read_bytes() for name in before} == before
    ids = np.concatenate([npy_rows(prepared["npy"], split)[1] for split in FILES])
    assert [feature["rows"] for feature in description["sparse"]] == (ids.max(axis=0) + 1).tolist()
    (bins / "dataset.json").unlink()
    adopt(bins, table_size=[feature.rows for feature in open_dataset(prepared["npy"]).clicks.sparse])
    results = []
    for name, path in (("bin", bins), ("npy", prepared["npy"])):
        config = dlrm | {"data": {"path": str(path)}, "train": dlrm["train"] | {"max_steps": 3}}
        results.append(train(config, tmp_path / name)["test"]["logloss"])
    assert results[0] == results[1]


def test_ids_of_records_are_taken_modulo_and_the_directory_of_the_files_is_left_alone(
    bins: Path, prepared: dict[str, Path], tmp_path: Path
) -> None:
    sizes = [*range(2, 28)]
    description = adopt(bins, table_size=sizes, modulo=True, output=str(tmp_path / "view"))
    assert {file.name for file in bins.iterdir()} == {*FILES.values()}
    assert description["modulo"] is True
    dataset = open_dataset(tmp_path / "view")
    for split in FILES:
        rows = concatenate([block.rows for block in split_blocks(dataset, [split])])
        np.testing.assert_array_equal(rows.ids, npy_rows(prepared["npy"], split)[1] % sizes)


def test_sizes_and_values_that_cannot_be_are_one_error(bins: Path) -> None:
    def problem(**options: Any) -> str:
        with pytest.raises(DataError) as caught:
            adopt(bins, **options)
        assert not (bins / "dataset.json").exists()
        return str(caught.value)

    train_file, test_file = bins / FILES["train"], bins / FILES["test"]
    content = train_file.read_bytes()
    train_file.write_bytes(content[:-1])
    test_file.write_bytes(b"")
    text = problem()
    assert f"train_data.bin: {len(content) - 1:,} bytes, expected a multiple of 160: a label, 13 dense values" in text
    assert "test_data.bin: 0 bytes" in text
    words = np.frombuffer(content, "<i4").reshape(-1, 40).copy()
    test_file.write_bytes(content[:320])
    for row, column, value, message in (
        (3, 0, 2, "train_data.bin: row 3: label 2 is neither 0 nor 1"),
        (2, 14, -5, "train_data.bin: row 2, column C1: id -5"),
        (1, 13, np.float32(np.nan).view(np.int32), "train_data.bin: row 1, column I13: nan is not a finite number"),
    ):
        bad = words.copy()
        bad[row, column] = value
        train_file.write_bytes(bad.tobytes())
        assert message in problem()
    train_file.unlink()
    assert "train_data.bin: missing" in problem()
    np.save(bins / "day_0_dense.npy", np.zeros((1, 13), np.float32))
    assert "validation_data.bin: is it this, or day_0_dense.npy? Keep one kind" in problem()


def test_a_file_that_was_cut_later_is_found_when_it_is_opened(bins: Path) -> None:
    adopt(bins)
    file = bins / FILES["val"]
    file.write_bytes(file.read_bytes()[:-160])
    with pytest.raises(DataError, match=r"validation_data\.bin: .* bytes, expected"):
        open_dataset(bins)


def test_options_that_records_do_not_have(bins: Path, logs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train, validation and test are separate files"):
        adopt(bins, last_day="none")
    with pytest.raises(ConfigError, match="--table-size: 2 sizes"):
        adopt(bins, table_size=[5, 6])
    for options, message in (
        ({"ids": "hash64"}, "--format bin has 32-bit ids: --ids hash64 needs --table-size"),
        ({"multi_hot": [2]}, "--multi-hot is written as npy, not as bin"),
        ({"engine": "spark"}, "--engine spark writes parquet, not bin"),
        ({"compat": "torchrec"}, "--compat torchrec writes npy"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare("criteo", tmp_path / "d", input=str(logs), format="bin", **options)


def test_an_interrupted_preparation_resumes_to_the_same_bytes(
    logs: Path, prepared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recmill.datasets.criteo import steps

    calls = itertools.count()
    write = steps.write_records

    def break_in_the_second_segment(path: Path, first_row: int, blocks: Any) -> None:
        if next(calls) != 1:
            return write(path, first_row, blocks)
        path.write_bytes(path.read_bytes() + b"half a record")
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "write_records", break_in_the_second_segment)
    options: Any = {"input": str(logs), "format": "bin", "shuffle": "global", "min_frequency": 2}
    with pytest.raises(KeyboardInterrupt):
        prepare("criteo", tmp_path / "d", **options)
    prepare("criteo", tmp_path / "d", **options)
    for file in FILES.values():
        assert (tmp_path / "d" / file).read_bytes() == (prepared["bin"] / file).read_bytes()
