import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import train
from recmill.data.opening import open_dataset
from recmill.errors import DataError
from recmill.files.digests import digest

from ..conftest import Config, flip_bit


@pytest.fixture
def broken(clicks: Path, histories: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a good dataset, for a test to damage."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree({"clicks": clicks, "histories": histories}[kind], tmp_path / kind))

    return copy


def problem(path: Path, verify: Any = "sizes") -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(path, verify)
    return str(caught.value)


def change(path: Path, **changes: Any) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")


@pytest.mark.parametrize("verify", ["sizes", "digests"])
def test_good_datasets_open(clicks: Path, histories: Path, verify: Any) -> None:
    assert open_dataset(clicks, verify).description.kind == "clicks"
    assert open_dataset(histories, verify).description.kind == "histories"


def test_a_directory_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    assert "recmill prepare" in problem(tmp_path / "nowhere")


def test_without_its_description_it_is_not_a_dataset(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    (path / "dataset.json").unlink()
    assert "no dataset.json, so this is not a complete prepared dataset" in problem(path)


def test_a_header_that_promises_more_rows_than_the_file_has_is_named(broken: Callable[..., Path]) -> None:
    """Even if its size and digest are listed."""
    path = broken("clicks")
    file = path / "day_1_labels.npy"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    files = json.loads((path / "dataset.json").read_text())["files"]
    change(path, files=files | {file.name: files[file.name] | {"bytes": size - 1, "xxh3": digest(file)}})
    assert f"day_1_labels.npy: {size - 1:,} bytes, but its header says {size:,}" in problem(path)


@pytest.mark.timeout(20)  # a pipe must not be waited for
@pytest.mark.parametrize("instead", [None, "/dev/zero", "dataset.json", "/"])
def test_a_description_that_is_no_regular_file_is_a_data_error(
    broken: Callable[..., Path], instead: str | None
) -> None:
    file = broken("clicks") / "dataset.json"
    file.unlink()
    if instead is None:
        os.mkfifo(file)
    else:
        file.symlink_to(instead)
    assert f"{file}: " in problem(file.parent)


@pytest.mark.parametrize(("kind", "file"), [("clicks", "day_1_sparse.npy"), ("histories", "items.npy")])
def test_a_truncated_file_is_named(broken: Callable[..., Path], kind: str, file: str) -> None:
    path = broken(kind)
    size = (path / file).stat().st_size
    os.truncate(path / file, size - 1)
    assert f"{file}: {size - 1:,} bytes, expected {size:,}: truncated or changed" in problem(path)


def test_all_missing_files_are_named_at_once(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    (path / "day_0_dense.npy").unlink()
    (path / "day_2_labels.npy").unlink()
    text = problem(path)
    assert "day_0_dense.npy: missing" in text
    assert "day_2_labels.npy: missing" in text


@pytest.mark.parametrize(("kind", "file"), [("clicks", "day_0_dense.npy"), ("histories", "users.parquet")])
def test_a_flipped_bit_is_found_by_verify(broken: Callable[..., Path], kind: str, file: str) -> None:
    path = broken(kind)
    flip_bit(path / file)
    open_dataset(path)  # sizes and counts still agree
    assert f"{file}: its content changed" in problem(path, "digests")


@pytest.mark.parametrize("verify", [None, True])
def test_training_finds_a_flipped_bit_before_it_starts(
    broken: Callable[..., Path], dlrm: Config, tmp_path: Path, verify: bool | None
) -> None:
    path = broken("clicks")
    flip_bit(path / "day_0_dense.npy")
    with pytest.raises(DataError, match=r"day_0_dense\.npy: its content changed"):
        train(dlrm, tmp_path / "run", overrides=[f"data.path={path}"], verify=verify)
    assert not (tmp_path / "run").exists()


def test_a_damaged_header_is_named(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    content = (path / "day_0_labels.npy").read_bytes()
    (path / "day_0_labels.npy").write_bytes(content.replace(b"(500, 1)", b"(500, 1("))
    assert "day_0_labels.npy: not a NumPy file (bad header: " in problem(path)


def test_an_array_of_another_shape_is_named(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    labels = np.load(path / "day_0_labels.npy")
    np.save(path / "day_0_labels.npy", labels.reshape(1, -1))  # the same number of bytes
    assert "day_0_labels.npy: int32 [1, 500], expected i4 [500, 1]" in problem(path)


def test_offsets_must_cover_the_items(broken: Callable[..., Path]) -> None:
    path = broken("histories")
    offsets = np.load(path / "offsets.npy", mmap_mode="r+")
    offsets[-1] -= 1
    offsets.flush()
    assert "offsets.npy: goes from 0 to 1499, expected 0 to 1500" in problem(path)


def test_a_history_too_short_for_leave_one_out_is_named(broken: Callable[..., Path]) -> None:
    path = broken("histories")
    offsets = np.load(path / "offsets.npy", mmap_mode="r+")
    offsets[5] = offsets[4] + 2
    offsets.flush()
    assert "user 4 has 2 items; leave-one-out needs 3" in problem(path)


def test_splits_beyond_the_rows_are_an_error(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    splits = json.loads((path / "dataset.json").read_text())["splits"]
    splits["train"][0]["stop"] = 501
    change(path, splits=splits)
    assert "day_0: a split ends at row 501 but there are 500" in problem(path)


@pytest.mark.parametrize(
    ("change_splits", "fact"),
    [
        (lambda s: s.update(test=s["train"]), "day_0: row 0 is in two splits, or twice in one"),
        (lambda s: s["val"][0].update(start=251), "day_3: the range of rows 251 to 251 is empty"),
        (lambda s: s.update(train=[]), "no rows for split train"),
        (lambda s: s["val"][0].update(day="day_9"), "day_9_dense.npy: not listed"),
    ],
)
def test_splits_are_checked(broken: Callable[..., Path], change_splits: Callable[[Any], None], fact: str) -> None:
    path = broken("clicks")
    splits = json.loads((path / "dataset.json").read_text())["splits"]
    change_splits(splits)
    change(path, splits=splits)
    assert fact in problem(path)


def test_files_outside_the_dataset_are_refused(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    files = json.loads((path / "dataset.json").read_text())["files"]
    change(path, files=files | {"../clicks/day_0_dense.npy": files["day_0_dense.npy"]})
    assert "'../clicks/day_0_dense.npy' is not the name of a file in this directory" in problem(path)


def test_a_file_in_the_place_of_a_dataset_says_so(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert "is a file" in problem(tmp_path / "f")
    assert "none: no such directory. data.path is the directory of a prepared dataset" in problem(tmp_path / "none")


@pytest.mark.parametrize("names", [["I1", "I1", "I3"], ["I1", "user.id", "I3"], ["I1", "C2", "I3"]])
def test_feature_names_are_checked(broken: Callable[..., Path], names: list[str]) -> None:
    path = broken("clicks")
    change(path, dense=names)
    assert "occurs twice, is empty or has a dot in it" in problem(path)


@pytest.mark.parametrize("owners", [{"C1": "C9"}, {"C1": "C2", "C2": "C3"}, {"C1": "I1"}])
def test_a_feature_shares_only_the_table_of_a_feature_that_has_one(
    broken: Callable[..., Path], owners: dict[str, str]
) -> None:
    path = broken("clicks")
    sparse = json.loads((path / "dataset.json").read_text())["sparse"]
    change(path, sparse=[f | {"share_table": owners[f["name"]]} if f["name"] in owners else f for f in sparse])
    assert f"'C1' shares the table of '{owners['C1']}', which is no feature with its own table" in problem(path)


def test_a_padding_id_is_one_of_the_table(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    sparse = json.loads((path / "dataset.json").read_text())["sparse"]
    change(path, sparse=[sparse[0] | {"padding_id": 5}, *sparse[1:]])
    assert "'C1' has the padding id 5 and 5 rows" in problem(path)


def test_an_unknown_format_or_kind_is_an_error(broken: Callable[..., Path]) -> None:
    path = broken("clicks")
    change(path, format=2)
    assert "format" in problem(path)
    change(path, format=1, kind="clicksy")
    assert "clicksy" in problem(path)


@pytest.mark.parametrize(
    ("kind", "file", "index", "value", "fact"),
    [
        ("clicks", "day_1_sparse.npy", (7, 2), 300, "row 7, column C3: id 300 is not in 0..299"),
        ("clicks", "day_1_sparse.npy", (7, 0), -1, "row 7, column C1: id -1 is not in 0..4"),
        ("clicks", "day_3_labels.npy", (9, 0), -1, "row 9: label -1 is neither 0 nor 1"),
        ("histories", "items.npy", 77, 0, "row 77: item 0 is not in 1..200"),
    ],
)
def test_verify_finds_bad_values_even_if_the_digest_agrees(
    broken: Callable[..., Path], kind: str, file: str, index: Any, value: int, fact: str
) -> None:
    """As in a dataset prepared elsewhere with wrong table sizes."""
    path = broken(kind)
    values = np.load(path / file, mmap_mode="r+")
    values[index] = value
    values.flush()
    files = json.loads((path / "dataset.json").read_text())["files"]
    files[file]["xxh3"] = digest(path / file)
    change(path, files=files)
    assert f"{file}: {fact}" in problem(path, "digests")
    assert open_dataset(path).description.kind == kind  # values are not read without verification
