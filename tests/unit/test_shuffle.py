"""Shuffling moves training rows and nothing else, and no row is lost when the disk is full."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recmill import prepare
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset

from ..criteo_raw import PARTS, contents, stored, write_days


def day_records(path: Path, day: int) -> list[bytes]:
    """A row's label, dense values and ids, as bytes that compare well."""
    parts = [stored(path, f"day_{day}_{part}") for part in PARTS]
    return [b"".join(part[row].tobytes() for part in parts) for row in range(len(parts[0]))]


@pytest.mark.parametrize("how", ["day", "global"])
def test_shuffling_moves_training_rows_and_nothing_else(how: Any, logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "none", input=logs)
    for name, seed in (("one", 4), ("again", 4), ("other", 5)):
        prepare("criteo", tmp_path / name, input=logs, shuffle=how, seed=seed)
    before, one, other = ([day_records(tmp_path / n, day) for day in range(3)] for n in ("none", "one", "other"))
    assert contents(tmp_path / "one") == contents(tmp_path / "again")
    assert one[2] == before[2]
    assert one[0] != before[0] != other[0] != one[0]
    assert Counter(one[0] + one[1]) == Counter(before[0] + before[1])
    stays = [Counter(one[day]) == Counter(before[day]) for day in (0, 1)]
    assert stays == [how == "day"] * 2
    moved = sum(a != b for a, b in zip(one[0], before[0], strict=True))
    assert moved > 280  # of 300: no long stretches are left as they were


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_shuffling_one_log_leaves_its_val_and_test_rows(format: Any, tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [200])
    for how in ("none", "global"):
        prepare("criteo", tmp_path / how, input=tmp_path / "raw", shuffle=how, val_fraction=0.2, format=format)
    rows = {}
    for how in ("none", "global"):
        dataset = open_dataset(tmp_path / how, verify="digests")
        assert dataset.description.kind == "clicks"
        for split, ranges in dataset.description.splits.items():
            found = [StoredDay(dataset, r.day).take(slice(r.start, r.stop)).ids.tolist() for r in ranges]
            rows[how, split] = [tuple(row) for part in found for row in part]
    assert rows["none", "val"] == rows["global", "val"]
    assert rows["none", "test"] == rows["global", "test"]
    assert len(rows["none", "train"]) == 120
    assert rows["none", "train"] != rows["global", "train"]
    assert sorted(rows["none", "train"]) == sorted(rows["global", "train"])


def test_a_bucket_that_the_disk_took_only_half_of_is_an_error(tmp_path: Path) -> None:
    """A nearly full disk takes a part of a write and says so by its length alone: here a limit on the file's size."""
    script = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from recmill.datasets.shuffle import Buckets
from recmill.data.click_rows import ClickRows
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
buckets = Buckets(Path(sys.argv[1]), 100, 13, 26, np.int32, 10**6)
rows = ClickRows(np.zeros((100, 13), np.float32), np.zeros((100, 26), np.int32), np.zeros(100, np.int32))
records = buckets.packed(rows, np.arange(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    buckets.add(*records)
except OSError:
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "buckets")], check=False)
    assert done.returncode == 7
