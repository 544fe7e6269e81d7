"""Which raw files `prepare criteo` finds, and which rows each split gets."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from recmill import prepare
from recmill.errors import DataError

from ..criteo_raw import PARTS, random_rows, split_ranges, write_days, write_rows

ROWS = random_rows(30, 7)


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        (
            [10, 7],
            {},
            {"train": [("day_0", 0, 10)], "val": [("day_1", 0, 4)], "test": [("day_1", 4, 7)]},
        ),
        (
            [10, 7],
            {"last_day": "test-first"},
            {"train": [("day_0", 0, 10)], "test": [("day_1", 0, 4)], "val": [("day_1", 4, 7)]},
        ),
        ([10, 7], {"last_day": "none"}, {"train": [("day_0", 0, 10), ("day_1", 0, 7)], "val": [], "test": []}),
        (
            [10, 7],
            {"last_day": "none", "val_fraction": 0.25},
            {"train": [("day_0", 0, 9)], "val": [("day_0", 9, 10), ("day_1", 0, 3)], "test": [("day_1", 3, 7)]},
        ),
        ([25], {}, {"train": [("day_0", 0, 21)], "val": [("day_0", 21, 23)], "test": [("day_0", 23, 25)]}),
        (
            [25],
            {"val_fraction": 0.2},
            {"train": [("day_0", 0, 15)], "val": [("day_0", 15, 20)], "test": [("day_0", 20, 25)]},
        ),
        ([25], {"last_day": "none"}, {"train": [("day_0", 0, 25)], "val": [], "test": []}),
    ],
)
def test_splits(
    counts: list[int], options: dict[str, Any], expected: dict[str, list[tuple[str, int, int]]], tmp_path: Path
) -> None:
    write_days(tmp_path / "raw", counts)
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", **options)
    assert split_ranges(description) == expected
    assert [(source["name"], source["rows"]) for source in description["source"]] == [
        (f"day_{day}", count) for day, count in enumerate(counts)
    ]
    assert {name: file["rows"] for name, file in description["files"].items() if "vocabulary" not in name} == {
        f"day_{day}_{part}.npy": count for day, count in enumerate(counts) for part in PARTS
    }


def assert_refused(raw: Path, *facts: str) -> None:
    output = raw.parent / "d"
    with pytest.raises(DataError) as caught:
        prepare("criteo", output, input=raw)
    for fact in facts:
        assert fact in str(caught.value)
    assert not output.exists()


def test_missing_and_duplicate_days_are_named(tmp_path: Path) -> None:
    for day in (0, 2, 5):
        write_rows(tmp_path / "gap" / f"day_{day}", ROWS)
    assert_refused(tmp_path / "gap", "day_1, day_3, day_4 missing, though day_5 exists")
    for name in ("day_0", "day_0.gz", "day_1"):
        write_rows(tmp_path / "twice" / name, ROWS)
    assert_refused(tmp_path / "twice", "day_0 exists twice, as day_0 and day_0.gz")
    for name in ("day_0", "day_00"):
        write_rows(tmp_path / "zeros" / name, ROWS)
    assert_refused(tmp_path / "zeros", "day_0 exists twice, as day_0 and day_00")
    for name in ("train.txt", "train.txt.zst"):
        write_rows(tmp_path / "kaggle" / name, ROWS)
    assert_refused(tmp_path / "kaggle", "train exists twice, as train.txt and train.txt.zst")


def test_a_directory_without_logs_or_of_both_kinds_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere: no such file or directory")
    write_rows(tmp_path / "other" / "clicks.csv", ROWS)
    assert_refused(tmp_path / "other", "no day_0, day_1, ... (nor with .gz or .zst); it holds clicks.csv")
    for name in ("train.txt", "day_0"):
        write_rows(tmp_path / "both" / name, ROWS)
    assert_refused(tmp_path / "both", "holds both day_0 and train.txt. Choose one with --source")
    assert prepare("criteo", tmp_path / "k", input=tmp_path / "both", source="kaggle")["recipe"]["files"].keys() == {
        "train"
    }
    write_rows(tmp_path / "unlabelled" / "test.txt", [row[1:] for row in ROWS])
    assert_refused(tmp_path / "unlabelled", "test.txt without train.txt")


@pytest.mark.parametrize("how", ["hard link", "symbolic link", "copy"])
def test_a_log_that_occurs_twice_is_refused(how: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, [10, 12])
    if how == "hard link":
        (raw / "day_2").hardlink_to(raw / "day_0")
    elif how == "symbolic link":
        (raw / "day_2").symlink_to(raw / "day_0")
    else:
        shutil.copy(raw / "day_0", raw / "day_2")
    assert_refused(raw, f"{raw / 'day_2'} has the same content as {raw / 'day_0'}")
