import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.commands import audit as audit_module
from recmill.commands.adopt import adopt
from recmill.commands.audit import AuditReport, audit
from recmill.errors import ConfigError, DataError
from recmill.files.digests import digest
from recmill.schema import ClicksDescription, FileInfo, RowRange, SparseFeature, to_json

from ..conftest import RunCli, flip_bit
from ..criteo_raw import write_rows

SIZES = [3, 40, 500]
HOT = [1, 3, 2]
FORMS = ["npy", "multi-hot", "parquet"]


@dataclass
class Day:
    """counts [n, 2] as in a raw log, ids [n, 3], labels [n]. Half of the counts are 0, or missing."""

    counts: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    offset: int = 3

    @property
    def dense(self) -> np.ndarray:
        return np.log(self.counts + self.offset).astype(np.float32)

    def copy_rows(self, rows: slice, source: "Day", source_rows: slice) -> None:
        for own, other in ((self.counts, source.counts), (self.ids, source.ids), (self.labels, source.labels)):
            own[rows] = other[source_rows]


def made_days(rows: int = 300, sizes: list[int] = SIZES) -> list[Day]:
    """Three days; `adopt` makes val and test of the last one."""
    days = []
    for day in range(3):
        random = np.random.default_rng(day)
        counts = np.where(random.random((rows, 2)) < 0.5, 0, random.integers(-2, 10**6, size=(rows, 2)))
        days.append(Day(counts, random.integers(0, sizes, size=(rows, len(sizes))), random.integers(0, 2, size=rows)))
    return days


def many(ids: np.ndarray, table: int) -> np.ndarray:
    """As in MLPerf's multi-hot logs: to each id belong others of the same table."""
    return (ids[:, [table]] + np.arange(HOT[table]) * 7) % SIZES[table]


def write(path: Path, days: list[Day], form: str = "npy", sizes: list[int] = SIZES) -> Path:
    path.mkdir()
    if form == "parquet":
        return write_parquet(path, days, sizes)
    for number, day in enumerate(days):
        np.save(path / f"day_{number}_dense.npy", day.dense)
        np.save(path / f"day_{number}_labels.npy", day.labels[:, None].astype(np.int32))
        if form == "npy":
            np.save(path / f"day_{number}_sparse.npy", day.ids)
        else:
            arrays: dict[str, Any] = {str(table): many(day.ids, table).astype(np.int32) for table in range(3)}
            np.savez(path / f"day_{number}_sparse_multi_hot.npz", **arrays)
    adopt(path, table_size=sizes)
    return path


def write_parquet(path: Path, days: list[Day], sizes: list[int]) -> Path:
    half = (len(days[-1].labels) + 1) // 2
    last = len(days) - 1
    parts = [("train", d, slice(None)) for d in range(last)]
    parts += [("val", last, slice(0, half)), ("test", last, slice(half, None))]
    files: dict[str, FileInfo] = {}
    splits: dict[str, list[RowRange]] = {}
    for number, (split, day, rows) in enumerate(parts):
        dense = {f"I{i + 1}": column for i, column in enumerate(days[day].dense[rows].T)}
        sparse = {f"C{i + 1}": column for i, column in enumerate(days[day].ids[rows].T)}
        frame = pl.DataFrame({"label": days[day].labels[rows].astype(np.int32), **dense, **sparse})
        file = path / f"{split}-{number:05}.parquet"
        frame.write_parquet(file)
        files[file.name] = FileInfo(bytes=file.stat().st_size, rows=len(frame), xxh3=digest(file))
        splits[split] = [*splits.get(split, []), RowRange(day=file.stem, start=0, stop=len(frame))]
    description = ClicksDescription(
        name="by hand",
        made_by="a test",
        recipe={},
        files=files,
        layout="parquet",
        dense=["I1", "I2"],
        sparse=[SparseFeature(name=f"C{i + 1}", rows=rows) for i, rows in enumerate(sizes)],
        splits=splits,
    )
    (path / "dataset.json").write_text(to_json(description), encoding="utf-8")
    return path


def damage(path: Path, file: str, place: tuple[int, int], value: float) -> None:
    array = np.load(path / file, mmap_mode="r+")
    array[place] = value
    array.flush()


def change_description(path: Path, **changes: Any) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")


def failures(report: AuditReport) -> list[str]:
    return [finding.text for finding in report.findings if finding.kind == "failure"]


def remarks(report: AuditReport) -> list[str]:
    return [finding.text for finding in report.findings if finding.kind == "remark"]


@pytest.mark.parametrize("form", FORMS)
def test_a_clean_log_has_no_findings_and_is_counted_exactly(form: str, tmp_path: Path) -> None:
    days = made_days()
    report = audit(write(tmp_path / "d", days, form))
    assert report.findings == []
    assert report.rows == {"train": 600, "val": 150, "test": 150}
    assert report.shared_rows == {"val": 0, "test": 0}
    assert [(part.split, part.rows) for part in report.parts] == [
        ("train", 300),
        ("train", 300),
        ("val", 150),
        ("test", 150),
    ]
    assert [part.clicks for part in report.parts[:2]] == [day.labels.sum() for day in days[:2]]
    assert {part.dense for part in report.parts} == {"log(x+3)"}
    for number, table in enumerate(report.tables):
        ids = [many(day.ids, number) if form == "multi-hot" else day.ids[:, number] for day in days]
        in_train = np.unique(np.concatenate(ids[:2]))
        assert (table.name, table.rows, table.ids_in_train) == (f"C{number + 1}", SIZES[number], len(in_train))
        assert table.unseen["val"] == np.mean(~np.isin(ids[2][:150], in_train))
        assert table.unseen["test"] == np.mean(~np.isin(ids[2][150:], in_train))
    assert report.tables[2].unseen["val"] > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_split_that_overlaps_with_train_is_a_failure(form: str, tmp_path: Path) -> None:
    days = made_days()
    days[2].copy_rows(slice(0, 30), days[0], slice(100, 130))
    report = audit(write(tmp_path / "d", days, form))
    assert report.shared_rows == {"val": 30, "test": 0}
    assert failures(report) == ["val: 30 of 150 rows (20.00%) are in train too"]


def test_a_coincidence_is_a_remark(tmp_path: Path) -> None:
    days = made_days()
    days[2].copy_rows(slice(299, 300), days[1], slice(299, 300))
    report = audit(write(tmp_path / "d", days))
    assert failures(report) == []
    assert remarks(report) == ["test: 1 of 150 rows (0.67%) are in train too"]


def area_of(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of pairs in the right order, pair by pair."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


@pytest.mark.parametrize(("noise", "kind"), [(0.0, "failure"), (0.04, "remark"), (0.3, "")])
def test_a_feature_that_gives_the_label_away_is_reported(noise: float, kind: str, tmp_path: Path) -> None:
    days = made_days()
    for number, day in enumerate(days):
        is_noise = np.random.default_rng(10 + number).random(len(day.labels)) < noise
        day.counts[:, 1] = np.where(day.labels ^ is_noise, 0, 7)  # fewer for clicks: the order does not matter
        day.ids[:, 1] = (day.labels ^ is_noise) + 2 * (np.arange(len(day.labels)) // 2 % 10)
    report = audit(write(tmp_path / "d", days))
    measured = slice(1, None, 2)
    area = area_of(-days[0].counts[measured, 1], days[0].labels[measured])
    about = [(f.kind, f.text.partition(". ")[0]) for f in report.findings if "AUROC" in f.text]
    if not kind:
        assert about == []
        return
    assert about[0] == (kind, f"I2: alone it reaches an AUROC of {area:.3f} in train")
    assert [(kind, text[:2]) for kind, text in about] == [(kind, "I2"), (kind, "C2")]


@pytest.mark.parametrize("part", ["counts", "ids", "labels"])
def test_rows_are_the_same_only_if_all_of_them_is(part: str, tmp_path: Path) -> None:
    days = made_days()
    days[2].copy_rows(slice(0, 30), days[0], slice(0, 30))
    getattr(days[2], part)[:30] ^= 1
    days[2].ids[:, 0] %= SIZES[0]
    assert audit(write(tmp_path / "d", days)).shared_rows == {"val": 0, "test": 0}


@pytest.mark.parametrize("bytes_per_row", [20, 20_000, 100_000])
def test_equal_rows_are_counted_each_in_any_number_of_readings(
    bytes_per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "_BYTES_PER_HELD_OUT_ROW", bytes_per_row)  # 1, 12 and 60 readings
    days = made_days()
    days[2].copy_rows(slice(140, 160), days[1], slice(7, 8))
    days[2].copy_rows(slice(200, 240), days[0], slice(0, 40))
    report = audit(write(tmp_path / "d", days), memory_budget="1MB")
    assert report.shared_rows == {"val": 10, "test": 50}
    assert [part.rows for part in report.parts] == [300, 300, 150, 150]
    assert [part.clicks for part in report.parts[:2]] == [day.labels.sum() for day in days[:2]]


def test_tables_that_do_not_fit_together_are_counted_in_turn(tmp_path: Path) -> None:
    sizes = [3_000_000, 3_000_000, 5_000_000]  # 0.4 MB of bits each for the first two, 0.6 MB for the last
    days = made_days(sizes=sizes)
    report = audit(write(tmp_path / "d", days, sizes=sizes), memory_budget="1MB")
    for table in (0, 1):
        in_train = np.unique(np.concatenate([day.ids[:, table] for day in days[:2]]))
        assert report.tables[table].ids_in_train == len(in_train)
    assert report.tables[2].ids_in_train is None
    assert report.tables[2].unseen == {}
    assert "C3: a table of 5,000,000 rows does not fit in the memory budget" in "\n".join(remarks(report))


def test_ids_that_train_never_saw_are_a_remark(tmp_path: Path) -> None:
    days = made_days()
    days[2].ids[:, 2] = 499 - days[2].ids[:, 2] % 100
    for day in days[:2]:
        day.ids[:, 2] %= 400
    report = audit(write(tmp_path / "d", days))
    assert report.tables[2].unseen == {"val": 1.0, "test": 1.0}
    assert "C3: 100.0% of the ids in val do not occur in train" in remarks(report)
    assert failures(report) == []


def criteo_days(path: Path) -> Path:
    """Raw logs of three days. C1 of train: a six times, b once, missing once. C2: x in all of train."""
    codes = {"a": "a", "b": "b", "c": "c", "d": "d", "x": "f0", "y": "f1", " ": ""}
    for number, (letters, others) in enumerate([("aaab", "xxxx"), ("aaa ", "xxxx"), ("abcdaaac", "xxyyxxxx")]):
        ids = [[codes[letter], codes[other]] for letter, other in zip(letters, others, strict=True)]
        rows = [[str(row % 2), *["1"] * 13, *both, *["f"] * 24] for row, both in enumerate(ids)]
        write_rows(path / f"day_{number}", rows)
    return path


def test_unseen_ids_count_also_when_they_share_a_row_with_rare_ones(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = criteo_days(tmp_path / "raw")
    prepare("criteo", tmp_path / "rare", input=raw, min_frequency=2)
    c1, c2, *_ = audit(tmp_path / "rare").tables
    assert (c1.unseen, c2.unseen) == ({"val": 0.0, "test": 0.0}, {"val": 0.5, "test": 0.0})
    assert c1.unseen_or_rare == {"val": 0.75, "test": 0.25}, "b is rare; c and d are not in train"
    assert c2.unseen_or_rare == {}, "no rare id of train is in the row of y"
    assert (c1.rare_in_train, c2.rare_in_train) == (0.125, 0.0), "b, one of 8 rows"
    assert "C1: 75.0% of the ids in val are rare or do not occur in train" in remarks(audit(tmp_path / "rare"))
    printed = run_cli("audit", tmp_path / "rare").stdout.splitlines()
    assert "table  rows  ids in train  rare in train  rare, new in val  rare, new in test" in printed
    assert [line.split() for line in printed if line.startswith(("C1 ", "C2 "))] == [
        ["C1", "3", "3", "12.50%", "75.00%", "25.00%"],
        ["C2", "3", "1", "0.00%", "50.00%", "0.00%"],
    ]
    monkeypatch.setenv("COLUMNS", "60")  # the last column is below the others
    printed = run_cli("audit", tmp_path / "rare").stdout.splitlines()
    assert [line.split() for line in printed if line.startswith("C2 ")] == [
        ["C2", "3", "1", "0.00%", "50.00%"],
        ["C2", "0.00%"],
    ]


def test_a_table_whose_ids_are_nearly_all_rare_is_remarked(tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=criteo_days(tmp_path / "raw"), min_frequency=7)
    report = audit(tmp_path / "d")
    assert report.tables[0].rare_in_train == 0.875, "a, six times, and b; the missing one has a row of its own"
    assert "C1: 87.5% of the ids in train are rare and share one row: lower --min-frequency" in remarks(report)


def test_unseen_ids_in_a_row_of_their_own_are_unseen(tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "all", input=criteo_days(tmp_path / "raw"))
    c1, c2, *_ = audit(tmp_path / "all").tables
    assert (c1.unseen, c2.unseen) == ({"val": 0.5, "test": 0.25}, {"val": 0.5, "test": 0.0})
    assert (c1.unseen_or_rare, c2.unseen_or_rare) == ({}, {})
    assert (c1.rare_in_train, c2.rare_in_train) == (0.0, 0.0)


@pytest.mark.parametrize(("value", "column"), [(40, 1), (-1, 2), (10**9, 1)])
def test_ids_outside_their_tables_are_counted_with_the_first_place(value: int, column: int, tmp_path: Path) -> None:
    path = write(tmp_path / "d", made_days())
    damage(path, "day_1_sparse.npy", (17, column), value)
    damage(path, "day_1_sparse.npy", (99, column), value)
    report = audit(path, verify=False)
    in_train = np.concatenate([np.load(path / f"day_{day}_sparse.npy")[:, column] for day in range(2)])
    assert report.tables[column].ids_in_train == len(np.setdiff1d(in_train, [value]))
    (text,) = failures(report)
    assert text.startswith("day_1_sparse.npy: 2 ids outside their tables, the first in ")
    assert f"row 17, column C{column + 1}: id {value} is not in 0..{SIZES[column] - 1}" in text


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_dense_values_that_are_no_numbers_are_found(value: float, tmp_path: Path) -> None:
    path = write(tmp_path / "d", made_days())
    damage(path, "day_2_dense.npy", (200, 1), value)
    assert failures(audit(path, verify=False)) == [
        "day_2_dense.npy: 1 dense values that are not finite, "
        f"the first in row 200, column I2: {value} is not a finite number"
    ]


def test_wrong_labels_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "d", made_days())
    damage(path, "day_0_labels.npy", (5, 0), 2)
    assert failures(audit(path, verify=False)) == [
        "day_0_labels.npy: 1 wrong labels, the first in row 5: label 2 is neither 0 nor 1"
    ]


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_constant_labels_are_a_failure(form: str, label: int, tmp_path: Path) -> None:
    days = made_days()
    days[2].labels[150:] = label
    (text,) = failures(audit(write(tmp_path / "d", days, form)))
    assert text.startswith(f"test: {'every' if label else 'no'} label is 1")


def test_rows_without_labels_are_no_failure(tmp_path: Path) -> None:
    days = made_days()
    path = write(tmp_path / "d", days[:2])
    for part in ("dense", "sparse", "labels"):
        for day, name in enumerate(("train", "test")):
            (path / f"day_{day}_{part}.npy").rename(path / f"{name}_{part}.npy")
    np.save(path / "test_labels.npy", np.full((300, 1), -1, dtype=np.int32))
    (path / "dataset.json").unlink()
    adopt(path, table_size=SIZES)
    report = audit(path)
    assert failures(report) == []
    assert report.rows == {"train": 240, "val": 30, "test": 30, "unlabelled": 300}


@pytest.mark.parametrize("form", FORMS)
def test_days_with_different_transforms_are_a_failure(form: str, tmp_path: Path) -> None:
    """As TorchRec's log(x - min + 2) makes them, if the files have different minima."""
    days = made_days()
    days[1].offset = 5
    (text,) = failures(audit(write(tmp_path / "d", days, form)))
    assert "log(x+3) in " in text
    assert "log(x+5) in " in text
    assert ("train-00001" if form == "parquet" else "day_1") in text.partition("log(x+5)")[2]


def test_a_day_without_logarithms_among_others_is_a_failure(tmp_path: Path) -> None:
    path = write(tmp_path / "d", made_days())
    np.save(path / "day_0_dense.npy", made_days()[0].counts.astype(np.float32))
    (text,) = failures(audit(path, verify=False))
    assert "no logarithm of whole numbers in day_0; log(x+3) in day_1, day_2" in text


def test_dense_values_of_another_kind_are_not_judged(clicks: Path) -> None:
    report = audit(clicks)
    assert failures(report) == []
    assert "dense values are not logarithms of whole numbers: transform not checked" in remarks(report)


def test_counts_without_a_frequent_one_are_not_judged(tmp_path: Path) -> None:
    days = made_days()
    for day in days:
        day.counts[:] = np.random.default_rng(0).integers(0, 50, size=day.counts.shape)
    assert remarks(audit(write(tmp_path / "d", days))) == ["no dense value is frequent: transform not checked"]


def test_dense_values_stored_as_counts_are_judged_as_the_model_gets_them(tmp_path: Path) -> None:
    days = made_days()
    path = write(tmp_path / "d", days)
    for number, day in enumerate(days):
        np.save(path / f"day_{number}_dense.npy", (np.maximum(day.counts, -1) + 1).astype(np.float32))
    change_description(path, dense_stored="plus-one")
    report = audit(path, verify=False)
    assert failures(report) == []
    assert {part.dense for part in report.parts} == {"log(x+2)"}


def rounded(ids: np.ndarray) -> np.ndarray:
    """As TorchRec's shuffle leaves them: it keeps all columns in one float32 matrix."""
    return ids.astype(np.float32).astype(np.int64)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[np.ndarray], np.ndarray], Path, str], AuditReport]:
    """The report on a log whose second table has 60 million rows, `change` having been done to its ids in train."""

    def report(change: Callable[[np.ndarray], np.ndarray], path: Path, form: str) -> AuditReport:
        sizes = [3, 60_000_000, 500]
        monkeypatch.setattr("tests.unit.test_audit.SIZES", sizes)
        days = made_days(sizes=sizes)
        for day in days[:2]:
            day.ids[:, 1] = change(day.ids[:, 1])
        return audit(write(path, days, form, sizes))

    return report


@pytest.mark.parametrize("form", FORMS)
def test_ids_rounded_through_float32_are_a_failure(form: str, large: Any, tmp_path: Path) -> None:
    (text,) = failures(large(rounded, tmp_path / "d", form))
    assert text.startswith("C2: ")
    assert "ids above 2^24 in train (100.0%) are exact in float32" in text
    share = float(text.partition("in val and test: ")[2].partition("%")[0])
    assert 20 < share < 50  # 16.8 million ids, of which a half is exact, and 26.4 million, of which a quarter


@pytest.mark.parametrize("change", [lambda ids: ids, lambda ids: np.where(ids > 2**24, 2**25, ids)])
def test_large_ids_that_were_not_rounded_are_none(change: Any, large: Any, tmp_path: Path) -> None:
    """The second: a single large id, frequent, and even by chance."""
    assert failures(large(change, tmp_path / "d", "npy")) == []


def test_hashes_of_64_bits_are_not_counted(tmp_path: Path) -> None:
    days = made_days()
    path = write(tmp_path / "d", days, "parquet")
    sparse = [{"name": f"C{i + 1}", "rows": rows} for i, rows in enumerate([2**64, 40, 500])]
    change_description(path, sparse=sparse)
    report = audit(path)
    assert failures(report) == []
    assert report.tables[0].ids_in_train is None


def test_without_val_and_test_only_train_is_judged(tmp_path: Path) -> None:
    path = write(tmp_path / "d", made_days())
    (path / "dataset.json").unlink()
    adopt(path, last_day="none")
    report = audit(path)
    assert report.shared_rows == {}
    assert report.findings == []
    assert report.tables[2].unseen == {}


def test_histories_and_bad_options_are_config_errors(histories: Path, clicks: Path) -> None:
    with pytest.raises(ConfigError, match="holds histories: recmill audit is for click logs"):
        audit(histories)
    with pytest.raises(ConfigError, match="1MB is the least"):
        audit(clicks, memory_budget="10KB")


def test_the_command_prints_tables_findings_and_a_verdict(tmp_path: Path, run_cli: RunCli) -> None:
    days = made_days()
    clean = write(tmp_path / "clean", days)
    done = run_cli("audit", clean)
    assert done.returncode == 0, done.stderr
    assert "table sizes: 3,40,500\n" in done.stdout
    assert "rows: 900 in all; train 600, val 150, test 150\n" in done.stdout
    assert f"day_0  train  300   {days[0].labels.mean():.2%}" in done.stdout
    assert done.stdout.endswith("audit: no failures\n")
    assert done.stdout == f"{audit(clean)}\n"
    days[2].copy_rows(slice(0, 30), days[0], slice(100, 130))
    overlapping = write(tmp_path / "overlapping", days)
    done = run_cli("audit", overlapping)
    assert done.returncode == 3, done.stderr
    assert done.stdout.endswith("FAILURE val: 30 of 150 rows (20.00%) are in train too\naudit: 1 failure\n")
    done = run_cli("audit", overlapping, "--json")
    assert done.returncode == 3, done.stderr
    printed = json.loads(done.stdout)
    assert printed["failures"] == 1
    assert printed["shared_rows"] == {"val": 30, "test": 0}
    assert [table["rows"] for table in printed["tables"]] == SIZES


@pytest.mark.parametrize("file", ["day_1_dense.npy", "day_1_sparse_multi_hot.npz", "train-00001.parquet"])
def test_a_flipped_bit_is_an_error_that_names_the_file(file: str, tmp_path: Path) -> None:
    form = {"npy": "npy", "npz": "multi-hot", "parquet": "parquet"}[file.rpartition(".")[2]]
    path = write(tmp_path / "d", made_days(), form)
    flip_bit(path / file)
    with pytest.raises(DataError, match=f"{re.escape(file)}: its content changed"):
        audit(path)


def test_a_log_with_a_schema_is_not_judged_by_criteos_rules(tmp_path: Path, run_cli: RunCli) -> None:
    """Of 16 training rows, sites c to l occur once and are rare. The two rows of validation have sites z and a."""
    log = {"click": [0, 1] * 10, "site": [*"abababcdefghijkl", *"za", *"ab"], "price": [0.5 + row for row in range(20)]}
    pl.DataFrame(log).write_csv(tmp_path / "log.csv")
    (tmp_path / "clicks.toml").write_text(
        'label = {column = "click"}\nsplit = {by = "rows"}\n[[feature]]\ncolumn = "site"\ntype = "categorical"\n'
        '[[feature]]\ncolumn = "price"\ntype = "numeric"\n'
    )
    prepare("clicks", tmp_path / "d", input=str(tmp_path / "log.csv"), schema=str(tmp_path / "clicks.toml"))
    report = audit(tmp_path / "d")
    (site,) = report.tables
    assert (site.rare_in_train, site.unseen_or_rare) == (10 / 16, {"val": 0.5, "test": 0.0})
    texts = [finding.text for finding in report.findings]
    assert "site: 62.5% of the ids in train are rare and share one row: lower its min_frequency in the schema" in texts
    assert not [text for text in texts if "dense" in text or "--min-frequency" in text]
    printed = run_cli("audit", tmp_path / "d").stdout
    assert "dense" not in printed
    assert "logarithm" not in printed
