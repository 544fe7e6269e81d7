"""`prepare criteo --engine spark`: the result equals that of the other engine on the same logs."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.data.click_rows import ClickRows, StoredDay
from recmill.data.opening import open_dataset
from recmill.datasets.criteo import spark as criteo_spark
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.schema import ClicksDescription

from ..conftest import RunCli
from ..criteo_raw import random_rows, set_limits, to_text, write_days, write_text
from ..spark_session import ON_LOOPBACK, needs_spark, spark, standalone_master, stop_spark_at_the_end

needs_spark()
__all__ = ["spark", "standalone_master", "stop_spark_at_the_end"]  # fixtures
DAYS = [300, 201]
ONE_LOG: dict[str, Any] = {"last_day": "none", "val_fraction": 0.2}  # training rows of both days
MOD: dict[str, Any] = {"ids": "mod", "table_size": [50]}
WITH_BOM_AND_RETURNS = b"\xef\xbb\xbf" + to_text(random_rows(40, seed=3)).replace(b"\n", b"\r\n")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs") / "raw [1] *"  # a name that is no pattern
    write_days(directory, DAYS, smallest=-1)
    return directory


def both(raw: Path, output: Path, **options: Any) -> tuple[Path, Path]:
    """The same by Spark and by one machine."""
    for engine in ("spark", "polars"):
        prepare("criteo", output / engine, input=str(raw), engine=engine, format="parquet", **options)
    return output / "spark", output / "polars"


def both_errors(raw: Path, output: Path, **options: Any) -> tuple[str, str]:
    texts = []
    for engine in ("spark", "polars"):
        with pytest.raises(DataError) as caught:
            prepare("criteo", output / engine, input=str(raw), engine=engine, format="parquet", **options)
        texts.append(str(caught.value))
    return texts[0], texts[1]


def description(path: Path) -> ClicksDescription:
    found = open_dataset(path, verify="digests").description
    assert isinstance(found, ClicksDescription)
    return found


def rows_of(path: Path, split: str) -> ClickRows:
    dataset = open_dataset(path, verify="digests")
    parts = [
        StoredDay(dataset, part.day).take(slice(part.start, part.stop)) for part in description(path).splits[split]
    ]
    return ClickRows(
        np.concatenate([p.dense for p in parts]),
        np.concatenate([p.ids for p in parts]),
        np.concatenate([p.labels for p in parts]),
    )


def in_one_order(rows: ClickRows) -> ClickRows:
    return rows[np.lexsort([*rows.dense.T, *rows.ids.T, rows.labels])]


def assert_equal(found: ClickRows, expected: ClickRows) -> None:
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.ids.dtype == expected.ids.dtype
    np.testing.assert_array_max_ulp(found.dense, expected.dense, maxulp=1)


def test_contiguous_ids_and_their_vocabularies(logs: Path, tmp_path: Path) -> None:
    ours, expected = both(logs, tmp_path, min_frequency=3, table_size=[25], shuffle="global", **ONE_LOG)
    for split in ("train", "val", "test"):
        assert_equal(in_one_order(rows_of(ours, split)), in_one_order(rows_of(expected, split)))
    assert description(ours).sparse == description(expected).sparse
    for column in range(26):
        name = f"vocabulary_C{column + 1}.npy"
        assert (ours / name).read_bytes() == (expected / name).read_bytes()
    assert max(feature.rows for feature in description(ours).sparse) == 25
    assert {"vocabulary_C1.npy", "vocabulary_C26.npy"} <= set(description(ours).files)


@pytest.mark.parametrize(
    "options",
    [
        {**MOD, "dense": "log1-clip"},
        {"ids": "hash64", "dense": "log-min", **ONE_LOG},
        {"ids": "hash64", "table_size": [1000], "dense": "log2"},
    ],
    ids=["mod", "hash64", "hash64 in tables"],
)
def test_rows_in_the_order_of_the_logs(options: dict[str, Any], logs: Path, tmp_path: Path) -> None:
    ours, expected = both(logs, tmp_path, **options)
    for split in ("train", "val", "test"):
        assert_equal(rows_of(ours, split), rows_of(expected, split))
    assert description(ours).splits == description(expected).splits
    assert description(ours).source == description(expected).source


def test_oneflows_rows(logs: Path, tmp_path: Path) -> None:
    ours, expected = both(logs, tmp_path, compat="oneflow")
    frames = [
        [pl.read_parquet(str(path / f"{split}-*.parquet"), glob=True) for split in ("train", "val", "test")]
        for path in (ours, expected)
    ]
    assert frames[0][0].schema == frames[1][0].schema
    assert frames[0][0].sort(pl.all()).equals(frames[1][0].sort(pl.all()))
    assert frames[0][1].equals(frames[1][1]) and frames[0][2].equals(frames[1][2])
    assert description(ours).notes == description(expected).notes


def test_the_new_order_depends_on_the_seed_and_not_on_how_the_logs_are_read(logs: Path, tmp_path: Path) -> None:
    compressed = tmp_path / "raw"  # each is read in one block
    for day, suffix in enumerate((".gz", ".zst")):
        write_text(compressed / f"day_{day}{suffix}", (logs / f"day_{day}").read_bytes())
    shuffled = {}
    for name, raw, seed in (("plain", logs, 1), ("compressed", compressed, 1), ("another", logs, 2)):
        output = tmp_path / name
        prepare("criteo", output, input=str(raw), engine="spark", shuffle="global", seed=seed, **MOD, **ONE_LOG)
        shuffled[name] = rows_of(output, "train")
    in_file_order = tmp_path / "in_file_order"
    prepare("criteo", in_file_order, input=str(logs), format="parquet", **MOD, **ONE_LOG)
    expected = rows_of(in_file_order, "train")
    assert_equal(shuffled["plain"], shuffled["compressed"])
    for name in ("plain", "another"):
        assert_equal(in_one_order(shuffled[name]), in_one_order(expected))
        is_same_row = (shuffled[name].ids == expected.ids).all(axis=1)
        assert is_same_row.mean() < 0.05
    assert (shuffled["plain"].ids == shuffled["another"].ids).all(axis=1).mean() < 0.05
    assert_equal(rows_of(tmp_path / "plain", "val"), rows_of(in_file_order, "val"))


def test_files_and_row_groups_have_the_sizes_that_the_loader_wants(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    set_limits(monkeypatch, rows_per_file=128, rows_per_group=50)
    ours, expected = both(logs, tmp_path, **MOD)
    files = {name: info.rows for name, info in description(ours).files.items() if name.startswith("train-day_0-")}
    assert files == {f"train-day_0-{k:05d}.parquet": rows for k, rows in enumerate((128, 128, 44))}
    metadata = pyarrow.ParquetFile(ours / "train-day_0-00000.parquet").metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [50, 50, 28]
    assert_equal(rows_of(ours, "train"), rows_of(expected, "train"))


def test_kaggles_unlabelled_rows(tmp_path: Path) -> None:
    rows = random_rows(80, seed=5)
    write_text(tmp_path / "raw" / "train.txt", to_text(rows))
    write_text(tmp_path / "raw" / "test.txt", to_text([row[1:] for row in rows[:30]]))
    ours, expected = both(tmp_path / "raw", tmp_path, **MOD)
    assert_equal(rows_of(ours, "unlabelled"), rows_of(expected, "unlabelled"))
    assert_equal(rows_of(ours, "train"), rows_of(expected, "train"))
    assert set(rows_of(ours, "unlabelled").labels) == {-1}


def with_field(column: int, value: str) -> bytes:
    row = random_rows(1, seed=4, missing=0)[0]
    row[column] = value
    return "\t".join(row).encode()


ODD_BUT_GOOD = [
    b"\t".join([b"1", *[b""] * 39]),
    b"\t".join(b'"%s"' % field for field in with_field(1, "7").split(b"\t")),
    with_field(3, "-0"),
    with_field(3, "000000000000000007"),
    with_field(13, "2147483647"),
    with_field(14, "F"),
    with_field(20, "ABCDEF01"),
    with_field(39, '""'),
    with_field(39, "1a\r"),
]
BAD = [
    b"",
    b"\t".join([b"1", *[b"5"] * 38]),
    b"\t".join([b"1", *[b"5"] * 40]),
    with_field(0, "2"),
    with_field(0, ""),
    with_field(0, "01"),
    with_field(2, "-"),
    with_field(2, "+1"),
    with_field(2, "1.5"),
    with_field(2, " 1"),
    with_field(2, "\u0661"),  # a digit, but an Arabic one
    with_field(2, "-3"),  # no logarithm of 0
    with_field(2, "2147483648"),
    with_field(2, "-2147483648"),
    with_field(2, "0000000000000000001"),
    with_field(2, "99999999999999999999"),
    with_field(14, "123456789"),
    with_field(14, "g"),
    with_field(14, '"1'),
    with_field(14, '1"'),
    with_field(14, '1""2'),
    with_field(20, "1\r"),
    with_field(39, "1\r\r"),
    with_field(39, "\xff".encode("latin-1").decode("latin-1") + "\x00"),
    b"\xff\xfe" + with_field(2, "1"),
]


def test_bad_rows_are_left_out_and_odd_ones_kept(tmp_path: Path) -> None:
    good = to_text(random_rows(60, seed=6, smallest=-2)).splitlines()
    lines = [line for pair in zip([*ODD_BUT_GOOD, *BAD], good, strict=False) for line in pair] + good[-20:]
    write_text(tmp_path / "raw" / "day_0", b"\n".join(lines) + b"\n")
    write_text(tmp_path / "raw" / "day_1", WITH_BOM_AND_RETURNS)
    ours, expected = both(tmp_path / "raw", tmp_path, on_bad_row="skip", **MOD)
    assert description(expected).source[0].bad_rows == len(BAD)
    assert description(ours).source == description(expected).source
    assert description(ours).notes == description(expected).notes
    assert_equal(rows_of(ours, "train"), rows_of(expected, "train"))
    assert_equal(rows_of(ours, "val"), rows_of(expected, "val"))


def test_the_first_bad_row_is_reported_as_on_one_machine(tmp_path: Path) -> None:
    lines = to_text(random_rows(300, seed=7)).splitlines()
    lines[250], lines[270] = with_field(5, "seven"), b"1\t2"
    write_text(tmp_path / "raw" / "day_0", b"\n".join(lines) + b"\n")
    write_text(tmp_path / "raw" / "day_1", b"no row\n")
    ours, expected = both_errors(tmp_path / "raw", tmp_path, **MOD)
    assert ours == expected
    assert "day_0: row 251, column I5: 'seven' is not a whole number." in ours


def test_the_smallest_integer_is_good_if_the_logarithm_takes_it(tmp_path: Path) -> None:
    write_text(tmp_path / "raw" / "day_0", with_field(2, "-2147483648") + b"\n" + to_text(random_rows(30, seed=9)))
    ours, expected = both(tmp_path / "raw", tmp_path, dense="log-min", last_day="none", **MOD)
    assert_equal(rows_of(ours, "train"), rows_of(expected, "train"))
    assert description(ours).source[0].bad_rows == 0
    assert description(ours).notes == description(expected).notes  # also that there are no rows for val and test


def test_bad_rows_are_counted_over_all_logs(tmp_path: Path) -> None:
    good = to_text(random_rows(20, seed=8))
    for day, bad in enumerate((2, 3)):
        write_text(tmp_path / "raw" / f"day_{day}", good + b"no row\n" * bad)
    ours, expected = both_errors(tmp_path / "raw", tmp_path, on_bad_row="skip", max_bad_rows=3, **MOD)
    assert ours == expected
    assert "day_1: row 22: expected 40 fields" in ours


@pytest.mark.parametrize(
    "damage", ["cut in a row", "cut in a row, compressed", "cut in a frame", "cut in gzip", "empty"]
)
def test_corrupt_files_are_reported_as_on_one_machine(damage: str, tmp_path: Path) -> None:
    good = to_text([*random_rows(50, seed=9), random_rows(1, seed=4, missing=0)[0]])
    file = {"cut in a row, compressed": "day_0.gz", "cut in a frame": "day_0.zst", "cut in gzip": "day_0.gz"}
    text = good[:-3] if "in a row" in damage else b"" if damage == "empty" else good
    path = write_text(tmp_path / "raw" / file.get(damage, "day_0"), text)
    if damage in ("cut in a frame", "cut in gzip"):
        path.write_bytes(path.read_bytes()[:-20])
    ours, expected = both_errors(tmp_path / "raw", tmp_path, **MOD)
    assert ours == expected
    assert not (tmp_path / ".spark.unfinished").exists()


def test_a_last_row_without_its_line_break_may_be_complete(tmp_path: Path) -> None:
    write_text(tmp_path / "raw" / "day_0", to_text(random_rows(30, seed=9)) + with_field(39, "0000000a"))
    ours, expected = both(tmp_path / "raw", tmp_path, **MOD)
    assert_equal(rows_of(ours, "test"), rows_of(expected, "test"))


def test_after_a_failure_it_continues_from_what_is_finished(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import PySparkRuntimeError

    def fail(*_: object) -> None:
        raise PySparkRuntimeError("Job aborted.\nCaused by: java.io.IOException: No space left on device\n\tat x.y")

    def prepared() -> None:
        prepare("criteo", tmp_path / "out", input=str(logs), engine="spark", **MOD)

    with monkeypatch.context() as broken, pytest.raises(ResourceError) as caught:
        broken.setattr(criteo_spark._Preparation, "_finished", fail)
        prepared()
    assert "Spark failed: java.io.IOException: No space left on device. On a cluster every executor" in str(
        caught.value
    )
    monkeypatch.setattr(criteo_spark._Preparation, "_parse", fail)
    prepared()
    assert sum(part.stop for part in description(tmp_path / "out").splits["train"]) == sum(DAYS[:-1])


def test_another_master_than_that_of_the_running_spark_is_refused(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--spark-master spark://far:7077: this process already has a Spark, on local"
    ):
        prepare("criteo", tmp_path / "o", input=str(logs), engine="spark", spark_master="spark://far:7077", **MOD)


def test_without_pyspark_the_error_says_what_to_install(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="pip install pyspark"):
        prepare("criteo", tmp_path / "out", input=str(logs), engine="spark", **MOD)


def test_without_java_the_error_says_what_to_install(logs: Path, tmp_path: Path, run_cli: RunCli) -> None:
    arguments = ("prepare", "criteo", "--input", logs, "--output", tmp_path / "out", "--engine", "spark")
    done = run_cli(*arguments, env={**os.environ, "JAVA_HOME": str(tmp_path)})
    assert done.returncode == 5
    assert "Spark does not start without Java 17 or newer." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_spark_of_its_own_is_stopped_after_errors_and_at_the_end(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    spark.stop()
    raw = write_text(tmp_path / "day_0", to_text(random_rows(50, seed=9)) + b"no row\n")
    for on_bad_row, error in (("fail", pytest.raises(DataError)), ("skip", nullcontext())):
        with error:
            prepare("criteo", tmp_path / "out", input=str(raw), engine="spark", on_bad_row=on_bad_row, **MOD)  # type: ignore[arg-type]
        assert SparkSession.getActiveSession() is None
    assert description(tmp_path / "out").source[0].bad_rows == 1


def test_a_cluster_of_two_workers_gives_the_rows_of_one_machine(
    standalone_master: str, logs: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    common = ["prepare", "criteo", "--input", logs, "--format", "parquet", "--ids", "mod", "--table-size", "50"]
    prepare("criteo", tmp_path / "polars", input=str(logs), format="parquet", **MOD)
    many = run_cli(
        *(*common, "--output", tmp_path / "spark", "--engine", "spark", "--spark-master", standalone_master),
        env={**os.environ, **ON_LOOPBACK},
    )
    assert many.returncode == 0, many.stderr
    assert f"on {standalone_master}" in many.stderr
    assert all(any((tmp_path / f"worker-{number}").iterdir()) for number in range(2))  # both have run executors
    for split in ("train", "val", "test"):
        ours, theirs = rows_of(tmp_path / "spark", split), rows_of(tmp_path / "polars", split)
        assert_equal(in_one_order(ours), in_one_order(theirs))
