"""Schemas, recipes and the encoding of own click logs, against values worked out by hand."""

import functools
import gzip
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recmill
from recmill import failpoints
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset
from recmill.datasets.inputs import text
from recmill.datasets.inputs.delimited import BadRows
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.times import parsed_times
from recmill.datasets.own_clicks import coding, steps
from recmill.datasets.own_clicks.coding import Coder
from recmill.datasets.own_clicks.encoding import PARTS, Encoder, hashed, load_recipe, time_parts
from recmill.datasets.own_clicks.reading import read
from recmill.datasets.own_clicks.schema import load_schema
from recmill.datasets.own_clicks.skipping import good_blocks
from recmill.datasets.own_clicks.values import RawRows, numbers, texts
from recmill.errors import ConfigError, DataError
from recmill.kernels import library
from recmill.schema import SPLITS

from .. import schema_page

Prepare = Callable[..., Path]


def rows_of(text: str) -> str:
    """Return CSV text, from lines that are indented for reading."""
    return "".join(line.strip() + "\n" for line in text.strip().splitlines())


def test_decimal_commas_are_read_if_the_schema_says_so() -> None:
    rows = RawRows(pl.DataFrame({"price": ["4,32", " -1,5", "7", "", "NA"]}), "log.csv", range(1, 6))
    np.testing.assert_array_equal(
        numbers(rows, "price", ["", "NA"], InputSection(decimal=",")), [4.32, -1.5, 7, np.nan, np.nan]
    )
    with pytest.raises(DataError, match=r"row 1, column price: '4,32' is not a number"):
        numbers(rows, "price", ["", "NA"], InputSection())


@pytest.mark.parametrize(
    ("written", "keys", "expected"),
    [
        (["1.234,5", "-12.345.678", "7", "0,25"], {"decimal": ",", "thousands": "."}, [1234.5, -12345678, 7, 0.25]),
        (["1,234.5", "12,345,678", "7.25"], {"thousands": ","}, [1234.5, 12345678, 7.25]),
        (["1 234,5", "12\u00a0345", "1\u202f000"], {"decimal": ",", "thousands": " "}, [1234.5, 12345, 1000]),
        (["1'234.5", "7"], {"thousands": "'"}, [1234.5, 7]),
        (["4.32", "1,5"], {"decimal": ","}, [4.32, 1.5]),
    ],
)
def test_thousands_may_be_separated(written: list[str], keys: dict[str, Any], expected: list[float]) -> None:
    rows = RawRows(pl.DataFrame({"price": written}), "log.csv", range(1, len(written) + 1))
    assert numbers(rows, "price", [""], InputSection(**keys)).tolist() == expected


@pytest.mark.parametrize(
    ("value", "keys", "remedy"),
    [
        ("1.234", {"decimal": ","}, "If '.' separates thousands, use input.thousands = '.'"),
        ("1.234,56", {}, "If '.' separates thousands, use input.thousands = '.' and input.decimal = ','"),
        ("1,234.56", {}, "Use input.thousands = ','"),
        ("1.23", {"decimal": ",", "thousands": "."}, "Correct it"),
    ],
)
def test_numbers_in_another_form_than_the_schema_says_are_errors(value: str, keys: dict[str, Any], remedy: str) -> None:
    rows = RawRows(pl.DataFrame({"price": ["1", value]}), "log.csv", range(1, 3))
    with pytest.raises(DataError, match=re.escape(f"row 2, column price: '{value}' is not a number. {remedy}")):
        numbers(rows, "price", [""], InputSection(**keys))


def test_numbers_may_have_signs_exponents_and_spaces_and_nan_is_no_value() -> None:
    rows = RawRows(pl.DataFrame({"price": ["NaN", "nan", " 7 ", "1e3", "+5", "-.5", "2."]}), "log.csv", range(1, 8))
    np.testing.assert_array_equal(numbers(rows, "price", [], InputSection()), [np.nan, np.nan, 7, 1000, 5, -0.5, 2])


@pytest.mark.parametrize("order", [1, -1])
def test_iso_is_checked_row_by_row_and_other_dates_are_no_times(order: int) -> None:
    good = ["2026-03-16", "2026-03-16 00:01:26.5", "2026-03-16T00:01", "2026-03-16T01:00:00Z", "2026-03-16T01:00+01:00"]
    bad = ["15.03.2026", "15/03/2026", "03/04/2026", "15-03-2026 10:00", "2026/03/15", "2026-02-30", "20260316"]
    midnight = int(datetime(2026, 3, 16, tzinfo=UTC).timestamp()) * 1_000_000
    expected = [0, 86_500_000, 60_000_000, 3_600_000_000, 0]
    values = [*bad, *good][::order]
    found = parsed_times(pl.Series(values), "iso")
    assert found.to_list()[::order] == [None] * len(bad) + [midnight + moment for moment in expected]


def test_a_date_of_another_format_is_named_although_it_is_the_first(prepared: Prepare) -> None:
    log = rows_of("""
        click,site,at
        1,a,15.03.2026 10:00:00
        0,b,2026-03-16 00:01:26
    """)
    feature = [{"column": "site", "type": "categorical"}]
    with pytest.raises(DataError, match=r"row 1, column at: '15.03.2026 10:00:00' does not have the format 'iso'"):
        prepared(log, time={"column": "at"}, split={"by": "time"}, feature=feature)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """Prepare a log by a schema, and return the directory of the dataset."""

    def prepare(log: str | pl.DataFrame, **schema: Any) -> Path:
        number = len(list(tmp_path.iterdir()))
        source = tmp_path / (f"log{number}.csv" if isinstance(log, str) else f"log{number}.parquet")
        if isinstance(log, str):
            source.write_text(log, encoding="utf-8")
        else:
            log.write_parquet(source)
        file = tmp_path / f"schema{number}.toml"
        file.write_bytes(tomli_w.dumps({"label": {"column": "click"}, **schema}).encode())
        output = tmp_path / f"data{number}"
        recmill.prepare("clicks", output, input=str(source), schema=str(file))
        return output

    return prepare


def arrays(path: Path, split: str = "train") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dense values, ids and labels of a split."""
    found = StoredDay(open_dataset(path, "digests"), split).take(slice(None))
    return found.dense, found.ids, found.labels


BY_FOLD = {"by": "column", "column": "fold", "val": ["v"], "test": ["t"]}
GOOD = "click,fold,site,price\n" + "1,,a,1\n0,,a,2\n" * 3 + "0,v,a,1\n1,v,a,1\n0,t,a,1\n1,t,a,1\n"
SITE = {"column": "site", "type": "categorical"}
PRICE = {"column": "price", "type": "numeric"}
AT_PRICE = {"time": {"column": "price", "format": "s"}}
# Two rows with both labels for val and test, whose values training must not learn from.
HELD_OUT = """
    0,v,zebra,900
    1,v,zebra,900
    0,t,zebra,900
    1,t,a,900
"""


def test_ids_are_0_for_missing_1_for_rare_or_unseen_then_by_frequency_in_training_rows_alone(prepared: Prepare) -> None:
    log = rows_of(
        "click,fold,site,price\n1,,b,1\n0,,a,2\n1,,a,3\n0,,b,4\n1,,,5\n0,,once,6\n1,,c,7\n0,,c,8\n1,,c,9" + HELD_OUT
    )
    path = prepared(log, split=BY_FOLD, feature=[{"column": "site", "type": "categorical"}])
    assert arrays(path)[1][:, 0].tolist() == [4, 3, 3, 4, 0, 1, 2, 2, 2], "c occurs most; a is before b by its bytes"
    assert arrays(path, "val")[1][:, 0].tolist() == [1, 1]
    assert arrays(path, "test")[1][:, 0].tolist() == [1, 3]
    vocabulary = pl.read_parquet(path / "vocabulary_site.parquet")
    assert vocabulary.rows() == [(None, 0, 0), (None, 1, 1), ("c", 2, 3), ("a", 3, 2), ("b", 4, 2)]
    assert open_dataset(path).clicks.sparse[0].rows == 5


def test_numbers_are_clipped_filled_and_transformed_by_what_training_rows_say(prepared: Prepare) -> None:
    log = rows_of("click,fold,site,price\n1,,a,1\n0,,a,2\n1,,a,NULL\n0,,a,6" + HELD_OUT)
    features = [
        {"column": "site", "type": "categorical", "min_frequency": 1},
        {"name": "log", "column": "price", "type": "numeric", "transform": "log1p", "flag_missing": True},
        {"name": "std", "column": "price", "type": "numeric", "transform": "standard", "missing": "mean"},
        {"name": "mm", "column": "price", "type": "numeric", "transform": "minmax", "clip": [0.0, 0.5]},
    ]
    path = prepared(log, split=BY_FOLD, feature=features)
    assert open_dataset(path).clicks.dense == ["log", "log is missing", "std", "mm"]
    deviation = math.sqrt(14 / 3)  # of 1, 2, 6, whose mean is 3 and whose median is 2
    expected = [
        [math.log(2), 0, -2 / deviation, 0],
        [math.log(3), 0, -1 / deviation, 1],
        [math.log(3), 1, 0, 1],
        [math.log(7), 0, 3 / deviation, 1],
    ]
    assert arrays(path)[0] == pytest.approx(np.array(expected))
    assert arrays(path, "val")[0][0] == pytest.approx([math.log(901), 0, 897 / deviation, 1])


def test_ranks_and_powers_are_those_of_scikit_learn(prepared: Prepare) -> None:
    from sklearn.preprocessing import PowerTransformer, QuantileTransformer

    values = np.round(np.random.default_rng(2).lognormal(0, 1, 500) - 1, 1)
    lines = [f"{i % 2},{'' if i < 400 else 'v' if i < 450 else 't'},{value}" for i, value in enumerate(values)]
    numeric = {"column": "x", "type": "numeric"}
    features = [{"name": n, **numeric, "transform": n} for n in ("rank", "power", "none")]
    features.append({"name": "b", "column": "x", "type": "bucket"})
    path = prepared("click,fold,x\n" + "\n".join(lines) + "\n", split=BY_FOLD, feature=features)
    train, val = values[:400, None], values[400:450, None]
    dense = arrays(path, "val")[0]
    expected = QuantileTransformer(n_quantiles=400).fit(train).transform(val)[:, 0]
    assert dense[:, 0] == pytest.approx(expected, abs=0.005)
    assert dense[:, 1] == pytest.approx(PowerTransformer().fit(train).transform(val)[:, 0], abs=1e-3)
    assert dense[:, 2] == pytest.approx(val[:, 0])


def test_buckets_of_squared_logarithms_and_own_texts_and_numbers_for_missing_values(prepared: Prepare) -> None:
    log = rows_of("click,fold,x\n1,,-1\n0,,0\n1,,2\n0,,3\n1,,100\n0,,none\n0,v,-9\n1,v,1e9\n0,t,4.5\n1,t,-2")
    none = {"missing_values": ["none"]}
    features: list[dict[str, Any]] = [
        {"name": "b", "column": "x", "type": "bucket", "boundaries": "log2-squared", **none},
        {"name": "c", "column": "x", "type": "categorical", "min_frequency": 1, **none},
        {"column": "x", "type": "numeric", "transform": "none", "missing": 7, **none},
    ]
    path = prepared(log, split=BY_FOLD, feature=features)
    # floor(log(3)^2) = 1, floor(log(100)^2) = 21; the smallest, -1, has id 1.
    assert arrays(path)[1][:, 0].tolist() == [1, 2, 4, 3, 23, 0]
    assert arrays(path)[1][-1, 1] == 0
    assert arrays(path)[0][:, 0].tolist() == [-1, 0, 2, 3, 100, 7]
    assert arrays(path, "val")[1][:, 0].tolist() == [1, 23], "beyond what training had: the first and the last"
    assert open_dataset(path).clicks.sparse[0].rows == 24


def test_another_schema_is_refused_with_the_keys_that_differ(prepared: Prepare, tmp_path: Path) -> None:
    output = prepared(GOOD, split=BY_FOLD, feature=[SITE, PRICE])
    changed = {"label": {"column": "click"}, "split": BY_FOLD, "feature": [SITE | {"min_frequency": 3}, PRICE]}
    (tmp_path / "other.toml").write_bytes(tomli_w.dumps(changed).encode())
    with pytest.raises(DataError) as caught:
        recmill.prepare("clicks", output, input=str(tmp_path / "log0.csv"), schema=str(tmp_path / "other.toml"))
    assert str(caught.value).splitlines()[1:-1] == ["  schema.feature.site.min_frequency: was 2, is 3"]


def test_several_values_buckets_crosses_and_times(prepared: Prepare) -> None:
    log = rows_of(
        """
        click,fold,hour,tags,price
        1,,2024-02-29 23:00:00,x|y|x|z,1
        0,,2024-03-02 00:30:00,,5
        1,,2024-03-04 05:00:00,y,20
        0,v,2024-03-04 05:00:00,q|y,4
        1,v,2024-03-04 05:00:00,|,
        0,t,2024-03-04 05:00:00,y,100
        1,t,2024-03-04 05:00:00,y,100
        """
    )
    features = [
        {"column": "tags", "type": "categorical", "separator": "|", "min_frequency": 1, "max_values": 3},
        {"name": "bucket", "column": "price", "type": "bucket", "boundaries": [5.0, 10.0]},
        {"name": "day", "type": "time", "part": "weekday"},
        {"name": "weekend", "type": "time", "part": "is_weekend"},
        {"name": "both", "type": "cross", "columns": ["price", "tags"], "table_size": 100},
    ]
    path = prepared(log, split=BY_FOLD, time={"column": "hour"}, feature=features)
    x, y = 2, 3  # both occur twice among the first three values of a row
    ids = arrays(path)[1]
    assert ids[:, :3].tolist() == [[x, y, x], [0, 0, 0], [y, 0, 0]]
    assert ids[:, 3:6].tolist() == [[1, 4, 1], [2, 6, 2], [3, 1, 1]], "Thursday, Saturday, Monday"
    assert (ids[:, 6] == 0).tolist() == [False, True, False], "a cross with a missing value is missing"
    assert arrays(path, "val")[1][:, :4].tolist() == [[1, y, 0, 1], [0, 0, 0, 0]]
    tags = open_dataset(path).clicks.sparse[0]
    assert (tags.padding_id, tags.pooling) == (0, "mean"), "what fills a row up is no id"


def test_ids_are_texts_as_they_are_and_whole_numbers_of_any_size(prepared: Prepare) -> None:
    texts_of_ids = ["-1", "007", "18446744073709551616", "7", "7 ", " 7", "A", "a", "\u00e9", "e\u0301"]
    log = "click,fold,site\n" + "".join(f"{click},,{text}\n" for text in texts_of_ids for click in (0, 1))
    path = prepared(log + "0,v,7\n1,v,7\n0,t,7\n1,t,7\n", split=BY_FOLD, feature=[SITE])
    values = pl.read_parquet(path / "vocabulary_site.parquet").filter(pl.col("id") > 1)["value"]
    assert values.to_list() == sorted(texts_of_ids, key=str.encode)
    largest = pl.DataFrame({"site": [2**63, 2**64 - 1]}, schema={"site": pl.UInt64})
    assert texts(RawRows(largest, "log", range(1, 3)), "site", []).to_list() == [str(2**63), str(2**64 - 1)]


def test_texts_are_normalized_only_if_the_schema_says_so(prepared: Prepare) -> None:
    sites = [" Red", "RED ", "red", " ", "n/a ", "\u00c4pfel", "\u00e4PFEL", "blue"]
    tags = ["B| a", "b|A |a", "|", "N/A|x", "", "", "", ""]
    rows = [f"{click},,{site},{tag}\n" for site, tag in zip(sites, tags, strict=True) for click in (0, 1)]
    log = "click,fold,site,tags\n" + "".join(rows) + "0,v,RED,x\n1,v,blue,Y\n0,t,a,\n1,t,a,\n"
    both = {"normalize": ["strip", "lower"]}
    features = [
        SITE | both | {"missing_values": ["N/A"]},
        {"name": "hash", "column": "site", "type": "categorical", "ids": "hash", "table_size": 50} | both,
        {"name": "stripped", "column": "site", "type": "categorical", "normalize": ["strip"]},
        {"column": "tags", "type": "categorical", "separator": "|", "missing_values": ["N/A"]} | both,
    ]
    path = prepared(log, split=BY_FOLD, feature=features)
    values = pl.read_parquet(path / "vocabulary_site.parquet").filter(pl.col("id") > 1)
    assert values.rows() == [("red", 2, 6), ("\u00e4pfel", 3, 4), ("blue", 4, 2)]
    stripped = pl.read_parquet(path / "vocabulary_stripped.parquet").filter(pl.col("id") > 1)["value"]
    assert stripped.to_list() == ["RED", "Red", "blue", "n/a", "red", "\u00c4pfel", "\u00e4PFEL"]
    _, ids, _ = arrays(path)
    assert ids[::2, 0].tolist() == [2, 2, 2, 0, 0, 3, 3, 4]
    (red,) = hashed(pl.Series(["red"]), "hash", 50).tolist()
    assert ids[::2, 1].tolist()[:4] == [red, red, red, 0]
    a, b, x = 2, 3, 4  # six, four and two times
    assert ids[::2, 3:].tolist()[:4] == [[b, a, 0], [b, a, a], [0, 0, 0], [x, 0, 0]]
    assert arrays(path, "val")[1][:, [0, 3]].tolist() == [[2, x], [4, 1]]


def test_a_schema_without_normalization_is_stored_as_before_there_was_any(prepared: Prepare) -> None:
    path = prepared(GOOD, split=BY_FOLD, feature=[SITE])
    (stored,) = json.loads((path / "dataset.json").read_text())["recipe"]["schema"]["feature"]
    keys = "name role missing_values type column ids min_frequency table_size separator pooling max_values share_table"
    assert [*stored] == keys.split()
    assert '"normalize"' not in (path / "recipe.json").read_text()


def test_nulls_of_a_list_are_no_values(prepared: Prepare) -> None:
    lists = [["x", None, "x"], [None], [], None, ["x"], ["x"]] + [["x"], ["x"]] * 2
    folds = ["", "", "", "", "", "", "v", "v", "t", "t"]
    path = prepared(pl.DataFrame({"click": [0, 1] * 5, "fold": folds, "site": lists}), split=BY_FOLD, feature=[SITE])
    assert arrays(path)[1].tolist() == [[2, 2], [0, 0], [0, 0], [0, 0], [2, 0], [2, 0]]


def test_a_log_may_have_a_thousand_columns(prepared: Prepare) -> None:
    names = [f"c{number}" for number in range(1000)]
    log = f"click,{','.join(names)}\n" + "".join(f"{row % 2}{',a' * len(names)}\n" for row in range(40))
    path = prepared(log, feature=[{"column": name, "type": "categorical"} for name in names])
    assert arrays(path)[1].shape == (32, 1000)


def test_a_list_may_share_the_table_of_another_feature(prepared: Prepare) -> None:
    frame = pl.DataFrame(
        {
            "click": [1, 0, 1, 0, 1, 0, 1],
            "fold": ["", "", "", "v", "v", "t", "t"],
            "item": [7, 8, 7, 7, 7, 7, 7],
            "clicked": [[8, 7], [], None, [9], [7], [8], [7]],
        }
    )
    features = [
        {"column": "item", "type": "categorical", "min_frequency": 1},
        {"column": "clicked", "type": "categorical", "share_table": "item"},
    ]
    path = prepared(frame, split=BY_FOLD, feature=features)
    seven, eight = 2, 3  # three and two times, in both columns together
    assert arrays(path)[1].tolist() == [[seven, eight, seven], [eight, 0, 0], [seven, 0, 0]]
    assert arrays(path, "val")[1].tolist() == [[seven, 1, 0], [seven, seven, 0]]
    assert [(f.rows, f.share_table) for f in open_dataset(path).clicks.sparse] == [(4, None), (4, "item")]


def test_features_share_a_table_of_hashes_and_one_value_may_be_the_limit(prepared: Prepare) -> None:
    log = GOOD.replace("1,,a,1", "1,,a b a,1")
    features = [
        {"column": "site", "type": "categorical", "ids": "hash", "table_size": 50},
        {"name": "words", "column": "site", "type": "categorical", "separator": " ", "share_table": "site"},
        {"name": "first", "column": "site", "type": "categorical", "separator": " ", "max_values": 1},
    ]
    path = prepared(log, split=BY_FOLD, feature=features)
    a, b, both = hashed(pl.Series(["a", "b", "a b a"]), "site", 50).tolist()
    assert arrays(path)[1][:2].tolist() == [[both, a, b, a, 2], [a, a, 0, 0, 2]]
    assert [f.rows for f in open_dataset(path).clicks.sparse] == [50, 50, 3]


def test_a_bad_row_is_named_by_its_number_in_the_file_whatever_its_split(prepared: Prepare) -> None:
    log = "click,price,site\n" + "".join(f"{i % 2},{'bad' if i == 70 else i},a\n" for i in range(100))
    with pytest.raises(DataError, match="row 71, column price: 'bad' is not a number"):
        prepared(log, split={"by": "random", "val": 0.3, "test": 0.3}, feature=[SITE, PRICE])


@pytest.mark.parametrize(
    ("form", "text", "hour"),
    [
        ("%y%m%d%H", "14102107", 7),
        ("%d.%m.%Y %T", "21.10.2014 07:30:00", 7),
        ("%Y%m%d", "20141021", 0),
        ("ms", "25200000", 7),
    ],
)
def test_formats_of_times_keep_the_hour(prepared: Prepare, form: str, text: str, hour: int) -> None:
    log = "click,fold,when\n" + "".join(f"{click},{fold},{text}\n" for fold in ("", "v", "t") for click in (0, 1))
    features = [{"name": "hour", "type": "time", "part": "hour"}]
    path = prepared(log, split=BY_FOLD, time={"column": "when", "format": form}, feature=features)
    assert arrays(path)[1].tolist() == [[hour + 1], [hour + 1]]


def test_bad_rows_are_skipped_and_later_errors_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    rows = [f"{n % 3 // 2},s{n % 4},{n}.5" for n in range(60)]
    rows[3:5] = ["1,s1,cheap", "1,s1"]
    rows[20] = "maybe,s1,2"
    (tmp_path / "log.csv").write_text("\n".join(["click,site,price", *rows, ""]))
    schema = (
        '[label]\ncolumn = "click"\n[[feature]]\ncolumn = "site"\ntype = "categorical"\n[[feature]]\ncolumn = "price"\n'
    )
    (tmp_path / "clicks.toml").write_text(f'{schema}type = "numeric"\n')
    given: dict[str, Any] = {"input": str(tmp_path / "log.csv"), "schema": str(tmp_path / "clicks.toml")}
    with pytest.raises(DataError, match=r"row 5: expected 3 .* To skip such rows: --on-bad-row skip"):
        recmill.prepare("clicks", tmp_path / "d", **given)
    with pytest.raises(ConfigError, match="--max-bad-rows needs --on-bad-row skip"):
        recmill.prepare("clicks", tmp_path / "d", **given, max_bad_rows=3)
    with pytest.raises(DataError, match="than --max-bad-rows allows"):
        recmill.prepare("clicks", tmp_path / "d", **given, on_bad_row="skip", max_bad_rows=2)
    made = recmill.prepare("clicks", tmp_path / "d", **given, on_bad_row="skip")
    assert made["notes"][:4] == [
        "3 bad rows skipped",
        "skipped: log.csv: row 5: expected 3 fields, got 2, the last is 's1'",
        "skipped: log.csv: row 4, column price: 'cheap' is not a number",
        "skipped: log.csv: row 21, column click: label 'maybe' is neither 0 nor 1",
    ]
    assert sum(part["stop"] for parts in made["splits"].values() for part in parts) == 57
    blocks = good_blocks(tmp_path / "log.csv", load_schema(tmp_path / "clicks.toml"), BadRows(3))
    assert np.concatenate([block.numbers for block in blocks]).tolist() == [
        n for n in range(1, 61) if n not in (4, 5, 21)
    ]


def test_fields_in_quotes_are_read_with_any_separator(prepared: Prepare) -> None:
    log = "click;fold;site\n" + "".join(f'{click};{fold};"a;""b"\n' for fold in ("", "v", "t") for click in (0, 1))
    path = prepared(log, input={"separator": ";"}, split=BY_FOLD, feature=[SITE])
    assert pl.read_parquet(path / "vocabulary_site.parquet")["value"].to_list() == [None, None, 'a;"b']


@pytest.mark.parametrize("place", ["label", "split", "cross"])
def test_a_list_where_one_value_is_needed_is_an_error(prepared: Prepare, place: str) -> None:
    frame = pl.DataFrame({"click": [1, 0] * 20, "site": ["a"] * 40, "several": [["a", "b"]] * 40})
    features = [{"column": "site", "type": "categorical"}]
    changes: dict[str, dict[str, Any]] = {
        "label": {"label": {"column": "several"}},
        "split": {"split": {"by": "column", "column": "several", "val": ["a"], "test": ["b"]}},
        "cross": {"feature": [{"name": "x", "type": "cross", "columns": ["site", "several"], "table_size": 9}]},
    }
    with pytest.raises(DataError, match="column several holds lists, where one value is needed"):
        prepared(frame, **{"feature": features, **changes[place]})


@pytest.mark.parametrize("label", [{}, {"positive": ["yes"]}, {"positive": "> 3", "drop": "== 3"}])
def test_labels_are_values_or_conditions(prepared: Prepare, label: dict[str, Any]) -> None:
    given: dict[str, list[Any]] = {
        "": ["1", "0", "TRUE", "-1", "false"],
        "yes": ["yes", "no", "yes", "?", "no"],
        ">": [5, 1, 4, 2, 3],
    }
    values = given["" if not label else "yes" if label["positive"] == ["yes"] else ">"]
    table = "click,fold,site\n" + "".join(f"{value},,a\n" for value in values)
    ends = "".join(f"{value},{fold},a\n" for fold in "vt" for value in values[:2])
    features = [{"column": "site", "type": "categorical"}]
    path = prepared(table + ends, label={"column": "click", **label}, split=BY_FOLD, feature=features)
    assert arrays(path)[2].tolist() == ([1, 0, 1, 0] if label.get("drop") else [1, 0, 1, 0, 0])


def test_rows_without_a_label_may_be_left_out(prepared: Prepare) -> None:
    log = GOOD.replace("1,,a,1", ",,a,1", 1)
    found = prepared(log, label={"column": "click", "missing": "drop"}, split=BY_FOLD, feature=[SITE, PRICE])
    assert arrays(found)[2].ravel().tolist() == [0, 1, 0, 1, 0]
    assert open_dataset(found).description.notes == ["1 rows left out by label.drop or label.missing"]


def test_kept_columns_and_weights_are_stored_beside_the_rows_of_each_split(prepared: Prepare) -> None:
    frame = pl.DataFrame(
        {
            "click": [1, 0, 1, 0, 1, 0, 1],
            "fold": ["t", "", "", "v", "v", "t", ""],
            "user": [7, None, 9, 7, 8, 7, 9],
            "tags": [["a"], [], None, ["b", "c"], ["d"], [], ["e"]],
            "w": [1.0, 0.1, 0.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    keep = {"columns": ["user", "tags"], "weight": "w"}
    path = prepared(frame, split=BY_FOLD, keep=keep, feature=[{"column": "user", "type": "categorical"}])
    dataset = open_dataset(path, "digests")
    assert (dataset.clicks.keep, dataset.clicks.weights) == (["user", "tags"], True)
    for split, fold in zip(SPLITS, ("", "v", "t"), strict=True):
        own = frame.filter(pl.col("fold") == fold)
        assert pl.read_parquet(path / dataset.clicks.keep_file(split)).equals(own.select("user", "tags"))
        stored = dataset.array(dataset.clicks.weights_file(split))
        assert stored.dtype == np.float32
        assert stored.tolist() == own["w"].cast(pl.Float32).to_list()
    for bad in ("-1", "", "inf", "1e40"):
        log = GOOD.replace("1,,a,1", f"1,,a,{bad}", 1)
        with pytest.raises(DataError, match=r"row 1, column price: .*(is missing|is not a weight|infinite|larger)"):
            prepared(log, split=BY_FOLD, keep={"weight": "price"}, feature=[SITE])


@pytest.mark.parametrize(("split", "fold"), [("train", ""), ("test", "t")])
def test_a_split_whose_weights_are_all_0_is_an_error_that_leaves_nothing(
    prepared: Prepare, tmp_path: Path, split: str, fold: str
) -> None:
    log = re.sub(rf"(?m)^([01],{fold},a,).$", r"\g<1>0", GOOD)
    assert log != GOOD
    with pytest.raises(
        DataError, match=rf"^column price: the weights of all rows for {split} are 0, so nothing can be"
    ):
        prepared(log, split=BY_FOLD, keep={"weight": "price"}, feature=[SITE])
    assert not [path.name for path in tmp_path.iterdir() if "data" in path.name]


def test_roles_of_features_are_described(prepared: Prepare) -> None:
    features = [{**SITE, "role": "item"}, {**PRICE, "role": "user", "flag_missing": True}, {**SITE, "name": "other"}]
    clicks = open_dataset(prepared(GOOD, split=BY_FOLD, feature=features)).clicks
    assert [feature.role for feature in clicks.sparse] == ["item", None]
    assert clicks.dense_roles == {"price": "user", "price is missing": "user"}


def sizes_of(path: Path) -> list[int]:
    return [open_dataset(path).clicks.splits[split][0].stop for split in SPLITS]


@pytest.mark.parametrize("ranges", [2, 7, 1 << 16])
def test_numbers_are_found_by_their_place_without_sorting_them(ranges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_RANGES", ranges)
    draw = np.random.default_rng(1)
    blocks = [draw.integers(-5, 5, 50), np.empty(0, np.int64), draw.integers(-(2**50), 2**50, 300), np.full(40, 3)]
    places = [0, 1, 70, 200, 389]
    found = steps.values_at(places, lambda: (np.unique(block, return_counts=True) for block in blocks))
    assert found == np.sort(np.concatenate(blocks))[places].tolist()


def test_splits_by_time_rows_chance_and_groups(prepared: Prepare) -> None:
    lines = [f"{i % 2},{i // 8},u{i % 40 // 2},a" for i in range(400)]
    log = "click,day,user,site\n" + "\n".join(lines) + "\n"
    features = [{"column": "user", "type": "categorical"}]

    def split(**rules: Any) -> Path:
        return prepared(log, split=rules, time={"column": "day", "format": "s"}, feature=features)

    assert sizes_of(split(by="rows", val=0.25, test=0.125)) == [250, 100, 50]
    assert sizes_of(split(by="time", val=0.25, test=0.125)) == [248, 96, 56], "rows of one time stay together"
    second = {"val_from": "1970-01-01 00:00:20", "test_from": "1970-01-01 00:00:45"}
    assert sizes_of(split(by="time", **second)) == [160, 200, 40]
    drawn = split(by="random", seed=3, val=0.2, test=0.2)
    assert sum(sizes_of(drawn)) == 400
    assert sizes_of(drawn) != sizes_of(split(by="random", seed=4, val=0.2, test=0.2))
    grouped = split(by="random", seed=3, group="user", val=0.2, test=0.2)
    users = {name: set(arrays(grouped, name)[1][:, 0].tolist()) - {1} for name in SPLITS}
    assert len(users["train"]) == sizes_of(grouped)[0] / 20
    assert not users["val"] and not users["test"], "training has learned no user of theirs"


def test_hashes_are_those_of_xxhash_and_depend_on_the_feature() -> None:
    import xxhash

    values = pl.Series(["a", None, "b", "a"])
    seed = xxhash.xxh3_64_intdigest(b"site")
    a, b = (2 + xxhash.xxh3_64_intdigest(value, seed=seed) % 98 for value in (b"a", b"b"))
    assert hashed(values, "site", 100).tolist() == [a, 0, b, a]
    assert hashed(values, "other", 100).tolist() != [a, 0, b, a]


def test_parts_of_times_are_those_of_the_calendar() -> None:
    import calendar
    import datetime

    moments = [datetime.datetime(2024, month, 28, month, tzinfo=datetime.UTC) for month in range(1, 13)]
    moments.append(datetime.datetime(1969, 7, 20, 20, tzinfo=datetime.UTC))
    microseconds = np.array([int(moment.timestamp()) * 1_000_000 for moment in moments])
    assert time_parts(microseconds, "hour").tolist() == [moment.hour for moment in moments]
    assert time_parts(microseconds, "month").tolist() == [moment.month - 1 for moment in moments]
    assert time_parts(microseconds, "day").tolist() == [moment.day - 1 for moment in moments]
    weekdays = [calendar.weekday(moment.year, moment.month, moment.day) for moment in moments]
    assert time_parts(microseconds, "weekday").tolist() == weekdays
    assert time_parts(microseconds, "is_weekend").tolist() == [day >= 5 for day in weekdays]


def test_text_and_parquet_whole_numbers_and_their_text_compressed_or_not_give_the_same_bytes(
    prepared: Prepare, tmp_path: Path
) -> None:
    numbers = np.random.default_rng(1).integers(0, 9, (300, 2))
    frame = pl.DataFrame({"click": numbers[:, 0] % 2, "site": numbers[:, 1], "price": numbers[:, 0] / 4})
    features = [{"column": "site", "type": "categorical"}, {"column": "price", "type": "numeric"}]
    as_csv, as_parquet = (prepared(log, feature=features) for log in (frame.write_csv(), frame))
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(frame.write_csv(separator=";").encode()))
    schema = tmp_path / "semicolon.toml"
    schema.write_bytes(
        tomli_w.dumps({"input": {"separator": ";"}, "label": {"column": "click"}, "feature": features}).encode()
    )
    recmill.prepare("clicks", tmp_path / "packed", input=str(packed), schema=str(schema))
    for split in SPLITS:
        for other in (as_parquet, tmp_path / "packed"):
            for one, two in zip(arrays(as_csv, split), arrays(other, split), strict=True):
                assert one.tobytes() == two.tobytes()


VALUES = st.sampled_from(
    ["", "NULL", "null ", "a", "A ", "b", "ä", "Ä", "0", "00", " a", " ", "1| A |a", "1|2", "2|1|2", "|"]
)
LOGS = st.lists(st.tuples(VALUES, st.sampled_from(["", "1", "-2.5", "1e3", " 7 "]), st.booleans()), min_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=LOGS,
    size=st.integers(1, 4),
    transform=st.sampled_from(["none", "log1p", "sqrt", "standard", "minmax", "rank", "power"]),
    boundaries=st.sampled_from(["quantiles:3", "log2-squared", [-1.0, 2.0]]),
    flag=st.booleans(),
)
def test_new_rows_are_encoded_as_prepared_ones_to_the_bit(
    prepared: Prepare, log: list[tuple[str, str, bool]], size: int, transform: str, boundaries: Any, flag: bool
) -> None:
    held_out = [("a", "1", False), ("a", "1", False), ("a", "1", True), ("a", "1", True)]
    folds = [""] * len(log) + ["v", "t", "v", "t"]
    every = zip([*log, *held_out], folds, strict=True)
    lines = [f"{int(click)},{fold},{text},{number}" for (text, number, click), fold in every]
    lines = [f"{line},{1_700_000_000 + 50_000 * row}" for row, line in enumerate([*lines, "0,,a,1", "1,,a,1"])]
    features = [
        {"column": "text", "type": "categorical", "table_size": 2 + size},
        {"name": "bag", "column": "text", "type": "categorical", "separator": "|", "max_values": size},
        {"name": "hash", "column": "text", "type": "categorical", "ids": "hash", "table_size": 50},
        {"name": "cross", "type": "cross", "columns": ["text", "number"], "table_size": 50},
        {"name": "bucket", "column": "number", "type": "bucket", "boundaries": boundaries},
        {"name": "normal", "column": "text", "type": "categorical", "normalize": ["strip", "lower"]},
        {"name": "normal bag", "column": "text", "type": "categorical", "separator": "|", "normalize": ["lower"]},
        {"name": "shared", "column": "number", "type": "categorical", "share_table": "text"},
        *({"name": part, "type": "time", "part": part} for part in PARTS),
        {"column": "number", "type": "numeric", "transform": transform, "flag_missing": flag, "clip": [0.1, 0.9]},
    ]
    text = "click,fold,text,number,when\n" + "\n".join(lines) + "\n"
    path = prepared(text, time={"column": "when", "format": "s"}, split=BY_FOLD, feature=features)
    recipe = load_recipe(path)
    source = path.parent / "again.csv"
    for split, fold in zip(SPLITS, ("", "v", "t"), strict=True):
        own = [line for line in lines if line.split(",")[1] == fold]
        source.write_text("click,fold,text,number,when\n" + "\n".join(own) + "\n", encoding="utf-8")
        encoder = Encoder(recipe, path)
        (rows,) = read(source, recipe.log.input, recipe.log.columns())
        encoded = encoder.encode(rows)
        dense, ids, labels = arrays(path, split)
        assert encoded.dense.tobytes() == np.ascontiguousarray(dense).tobytes()
        assert encoded.ids.tolist() == ids.tolist()
        assert encoded.labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("old", "new", "schema", "expected"),
    [
        ("1,,a,1", "2,,a,1", {}, "row 1, column click: label '2' is neither 0 nor 1. Name the values"),
        ("1,,a,1", ",,a,1", {}, "row 1, column click: no label. Remove such rows, or leave"),
        ("0,,a,2", "0,,a,2;3", {}, "row 2, column price: '2;3' is not a number. Correct it"),
        ("0,,a,2", '0,,a,"1,5"', {}, "row 2, column price: '1,5' is not a number. Use input.decimal = ',' in the"),
        ("0,,a,2", "0,,a,inf", {}, "row 2, column price: inf is larger than 3.4e+38. Correct it."),
        ("0,,a,2", "0,,a", {}, "row 2: expected 4 fields, got 3"),
        ("0,v", "1,v", {}, "column click: 2 of the 2 rows for val are clicks, so nothing"),
        (
            "",
            "",
            {**AT_PRICE, "split": {"by": "time", "val_from": "2027-01-01", "test_from": "2028-01-01"}},
            "no row is for val (split.val_from = 2027-01-01). Change [split] of the schema.",
        ),
        ("1,t", "1,", {"split": {**BY_FOLD, "test": ["nobody"]}}, "no row is for test (split.test = ['nobody']). Ch"),
        ("0,,a,2", "0,,a,0x10", {}, "row 2, column price: '0x10' is not a number. Correct it"),
        ("0,,a,2", "0,,a,1e400", {}, "row 2, column price: 1e400 is larger than 3.4e+38. Correct it."),
        ("", "", {**AT_PRICE, "split": {"by": "time"}}, "column price: too many rows have the same time for split.by"),
        ("0,,a,2", "0,,a,1e300", {}, "row 2, column price: 1e300 is larger than 3.4e+38. Correct it."),
        ("0,v,a,1", "0,v,a,3e38", {}, "row 7, column price: 3e+38 is too large for a 32-bit number after transform"),
        (
            "0,,a,2",
            "0,,a,-3e9",
            {"feature": [{"name": "b", "column": "price", "type": "bucket", "boundaries": "log2-squared"}]},
            "feature b: 'log2-squared' would make 3,000,000,003 buckets from -3,000,000,000 on",
        ),
        ("", "", {"label": {"column": "klick"}}, "no column 'klick'; it has click, fold, site, price"),
        ("", "", {"time": {"column": "price"}, "split": {"by": "time"}}, "'1' does not have the format 'iso'"),
        ("1,,a,1", "1,,a,\xff", {}, "cannot be read"),
    ],
)
def test_bad_rows_are_named_and_leave_nothing(
    prepared: Prepare, tmp_path: Path, old: str, new: str, schema: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(GOOD.replace(old, new, 1) if old else GOOD, **{"split": BY_FOLD, "feature": [SITE, PRICE], **schema})
    if "\xff" not in new:
        assert expected in str(caught.value)
    assert not [path.name for path in tmp_path.iterdir() if "data" in path.name]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"feature": []}, "it has no feature. Add a [[feature]]"),
        ({"feature": [PRICE]}, "all its features are numeric"),
        ({"feature": [{**SITE, "min_freqency": 3}]}, "Did you mean 'feature.site.min_frequency'"),
        ({"feature": [{"column": "site", "type": "categorial"}]}, "Did you mean 'categorical'"),
        ({"feature": [SITE, SITE]}, "feature 'site': the name occurs twice. Give"),
        (
            {"feature": [{**SITE, "name": "a.b"}]},
            "feature 'a.b': the name has a dot, a slash or a control character. Give",
        ),
        ({"feature": [{**SITE, "name": "x" * 201}]}, "the name is longer than 200 bytes. Give"),
        ({"feature": [SITE], "lable": {}}, "Known: feature, format, input"),
        ({"feature": [{**SITE, "ids": "hash"}]}, "feature.site.ids = 'hash' needs table_size"),
        (
            {"feature": [SITE, {"name": "b", **SITE, "share_table": "site", "table_size": 9}]},
            "feature.b.table_size: its table is that of 'site'. Set it there.",
        ),
        (
            {"feature": [SITE, {"name": "b", **SITE, "share_table": "site", "normalize": ["lower"]}]},
            "feature.b.normalize: its table is that of 'site'. Set it there.",
        ),
        ({"feature": [{**SITE, "share_table": "price"}]}, "'price' is no categorical feature with a table"),
        ({"feature": [{"column": "click", "type": "categorical"}]}, "'click' is the label"),
        ({"split": {"val": 0.0}}, "'split.val': should be greater than 0, got 0.0"),
        (
            {"feature": [{**SITE, "role": "usr"}]},
            "unknown value 'usr'. Did you mean 'user'? Known: context, item, user",
        ),
        ({"split": {"by": "column"}}, "split.column and split.by = 'column' go together"),
        ({"split": {"val": 0.6, "test": 0.5}}, "nothing is left to train on"),
        ({"split": {"by": "time"}}, "need [time] with a column"),
        ({"time": {"column": "price", "format": "isoo"}}, "time.format is 'isoo'. Give 'iso' "),
        ({"split": {**BY_FOLD, "test": ["t", "v"]}}, "split.val and split.test both name 'v'. Name it in one"),
        (
            {"split": {"by": "files", "val": ["log0.csv"], "test": ["log9.csv"]}},
            "name 'log9.csv'. Did you mean 'log0.c",
        ),
        ({**AT_PRICE, "split": {"by": "time", "val_from": "1.1.2027", "test_from": "2028-01-01"}}, "is no ISO date"),
        (
            {**AT_PRICE, "split": {"by": "time", "val_from": "2028-01-01", "test_from": "2027-01-01"}},
            "split.val_from 2028-01-01 is not before split.test_from 2027-01-01",
        ),
        ({"label": {"column": "click", "positive": "about 3"}}, "give a condition like '> 3'"),
        ({"input": {"separator": "a\nb"}}, "input.separator is"),
        ({"feature": [SITE, {**PRICE, "clip": [0.9, 0.1]}]}, "give two quantiles"),
        ({"feature": [SITE, {"name": "b", "column": "price", "type": "bucket", "boundaries": [2.0, 1.0]}]}, "grow"),
        ({"lable": {}}, "lable"),
    ],
)
def test_a_wrong_schema_is_one_error_that_names_the_key(
    prepared: Prepare, schema: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(GOOD, **{"feature": [SITE], **schema})
    assert expected in str(caught.value)


def test_a_log_is_prepared_in_one_go_with_any_names_of_columns(tmp_path: Path) -> None:
    names = ["label", "a.b", "a_b", "with space", 'quo"te', "a/b", "", "ü", "same", "same"]
    draw = np.random.default_rng(1)
    header = ",".join('"' + name.replace('"', '""') + '"' for name in names)
    rows = [",".join(f"v{value}" for value in draw.integers(0, 9, len(names) - 1)) for _ in range(300)]
    (tmp_path / "log.csv").write_text(header + "\n" + "".join(f"{i % 2},{row}\n" for i, row in enumerate(rows)))
    with pytest.raises(DataError, match="two columns 'same'"):
        recmill.prepare("clicks", tmp_path / "d", input=str(tmp_path / "log.csv"), label="label")
    text = (tmp_path / "log.csv").read_text().replace('"same","same"', '"one","two"')
    (tmp_path / "log.csv").write_text(text)
    recmill.prepare("clicks", tmp_path / "d", input=str(tmp_path / "log.csv"), label="label")
    clicks = open_dataset(tmp_path / "d", "digests").clicks
    expected = ["a_b", "a_b_2", "with space", 'quo"te', "a_b_3", "unnamed", "ü", "one", "two"]
    assert [feature.name for feature in clicks.sparse] == expected
    recipe = load_recipe(tmp_path / "d")
    assert [feature.columns for feature in recipe.log.feature[:2]] == [["a.b"], ["a_b"]]
    schema = load_schema(tmp_path / "d" / "schema.toml")
    assert schema == recipe.log
    with pytest.raises(ConfigError, match="Neither --schema nor --label"):
        recmill.prepare("clicks", tmp_path / "e", input=str(tmp_path / "log.csv"))


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "arrow"])
def test_a_frame_gives_what_its_parquet_file_gives(tmp_path: Path, kind: str) -> None:
    draw = np.random.default_rng(1)
    log = pl.DataFrame(
        {
            "user_id": [None if row % 9 == 0 else row % 7 for row in range(400)],  # floats in pandas
            "genres": [["a", "b"][: row % 3] for row in range(400)],
            "price": [None if row % 8 == 0 else row / 8 for row in range(400)],
            "shown_at": [datetime(2026, 3, 1 + row // 40, row % 24) for row in range(400)],
            "clicked": draw.random(400) < 0.5,
        }
    )
    frames: dict[str, Callable[[], Any]] = {
        "polars": lambda: log,
        "lazy": log.lazy,
        "pandas": log.to_pandas,
        "arrow": log.to_arrow,
    }
    log.write_parquet(tmp_path / "log.parquet")
    with pytest.raises(ConfigError, match="--separator says how to read a file, and `input` is a frame"):
        recmill.guess_schema(frames[kind](), label="clicked", separator=";")
    found = recmill.guess_schema(frames[kind](), label="clicked", output=tmp_path / "frame.toml")
    assert found["columns"] == recmill.guess_schema(tmp_path / "log.parquet", "clicked", tmp_path / "f.toml")["columns"]
    assert (found["input"], found["columns"][1]["guess"]) == ("frame", "categorical")
    schema = str(tmp_path / "f.toml")
    recmill.prepare("clicks", tmp_path / "frame", input=frames[kind](), schema=schema)
    recmill.prepare("clicks", tmp_path / "file", input=str(tmp_path / "log.parquet"), schema=schema)
    for path in sorted((tmp_path / "file").glob("*.np?")):
        assert (tmp_path / "frame" / path.name).read_bytes() == path.read_bytes(), path.name
    for same in (schema, (tmp_path / "f.toml").read_text(), found):  # again: nothing to do
        recmill.prepare("clicks", tmp_path / "frame", input=frames[kind](), schema=same)
    with pytest.raises(ConfigError, match=r"--schema: not valid TOML: .* \(at line 2, column 1\)\."):
        recmill.prepare("clicks", tmp_path / "none", input=log, schema="[label]\n?")
    with pytest.raises(ConfigError, match=r"--schema: unknown key 'label\.colum'\. Did you mean 'label.column'"):
        recmill.prepare("clicks", tmp_path / "none", input=log, schema="[label]\ncolum = 'clicked'")
    with pytest.raises(DataError, match="holds another dataset"):
        recmill.prepare("clicks", tmp_path / "frame", input=log.reverse(), schema=schema)
    with pytest.raises(DataError, match="input: no column 'price'; it has user_id"):
        recmill.prepare("clicks", tmp_path / "less", input=log.drop("price"), schema=schema)


def test_labels_without_any_click_are_listed_with_their_counts(prepared: Prepare) -> None:
    label = {"column": "click", "positive": ["yes"]}
    with pytest.raises(DataError, match=r"no row is a click\. Its values: '[01]' \(5 rows\), '[01]' \(5 rows\)"):
        prepared(GOOD, label=label, split=BY_FOLD, feature=[SITE])


def test_notes_say_what_was_cut_and_what_stays_untrained(prepared: Prepare) -> None:
    log = GOOD.replace("1,,a,1", "1,," + "|".join(map(str, range(50_000))) + ",1", 1)
    features = [
        {**SITE, "separator": "|", "max_values": 3},
        {"name": "rare", **SITE, "min_frequency": 100},
        {"name": "none", **SITE, "missing_values": ["a", "|".join(map(str, range(50_000)))]},
        {"name": "all", **SITE, "min_frequency": 1},
        {"name": "empty", **PRICE, "missing_values": ["1", "2"]},
    ]
    path = prepared(log, split=BY_FOLD, feature=features)
    assert open_dataset(path).description.notes == [
        "empty: no training row has a value",
        "site: 1 training rows have more than 3 values; the rest is cut",
        "rare: every value is rarer than min_frequency, so all of them share one row",
        "none: no training row has a value",
        "min_frequency = 1: values that training never had will meet an untrained row of all",
    ]


def test_a_constant_is_not_divided_by_the_rounding_error_of_its_mean(prepared: Prepare) -> None:
    training = "".join(f"{number % 2},,a,0.1\n" for number in range(48))
    held_out = "".join(f"{click},{fold},a,0.2\n" for fold in "vt" for click in (0, 1))
    path = prepared(f"click,fold,site,price\n{training}{held_out}", split=BY_FOLD, feature=[SITE, PRICE])
    assert arrays(path)[0].ravel() == pytest.approx(0)
    assert arrays(path, "val")[0].ravel() == pytest.approx(0.1)


def test_a_log_without_rows_is_an_error_that_leaves_nothing(prepared: Prepare, tmp_path: Path) -> None:
    log = pl.DataFrame(schema={"click": pl.Int64, "site": pl.String, "when": pl.Int64})
    for split in ({}, {"time": {"column": "when", "format": "s"}, "split": {"by": "time"}}):
        with pytest.raises(DataError, match=r"log\d\.parquet: no rows"):
            prepared(log, feature=[SITE], **split)
    assert not [path.name for path in tmp_path.iterdir() if "data" in path.name]


def test_types_that_do_not_fit_the_schema_are_reported_for_all_columns_before_rows_are_read(prepared: Prepare) -> None:
    log = pl.DataFrame({"click": [[1]], "site": [1.5], "price": ["1"], "tags": [["a"]], "at": [1.5], "ok": ["a"]})
    features = [SITE, {"column": "tags", "type": "numeric"}, PRICE, {"column": "ok", "type": "categorical"}]
    cross = {"name": "cross", "type": "cross", "columns": ["ok", "tags"], "table_size": 9}
    with pytest.raises(DataError) as caught:
        prepared(log, time={"column": "at"}, split={"by": "time"}, feature=[*features, cross])
    lines = [line.partition(".parquet: ")[2] for line in str(caught.value).splitlines()[1:-1]]
    assert [line.partition(",")[0] for line in lines] == [
        "column site holds Float64",
        "column tags holds List(String)",
        "column tags holds lists",
        "column click holds lists",
        "column at holds Float64",
    ]


def test_a_time_is_one_value_in_any_unit_and_zone() -> None:
    when = pl.Series("when", [datetime(2026, 3, 16, 1)])
    lists = pl.Series("when", [[datetime(2026, 3, 16, 1)]])
    for unit in ("ms", "us", "ns"):
        tokyo = when.cast(pl.Datetime(unit)).dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
        for values in (when.cast(pl.Datetime(unit)), tokyo, lists.cast(pl.List(pl.Datetime(unit)))):
            found = texts(RawRows(values.to_frame(), "log", range(1, 2)), "when", []).explode()
            assert found.to_list() == ["2026-03-16 01:00:00.000000"]


def test_groups_too_large_for_their_split_are_noted(prepared: Prepare) -> None:
    log = "click,site,user\n" + "".join(f"{n // 2 % 2},a,{'same' if n % 10 else n}\n" for n in range(1000))
    path = prepared(log, split={"by": "random", "group": "user", "val": 0.3, "test": 0.1, "seed": 2}, feature=[SITE])
    val, test = (len(arrays(path, split)[2]) / 10 for split in ("val", "test"))
    assert val < 15 and test < 5
    assert open_dataset(path).description.notes == [
        f"{share:.1f} % of the rows are for {name}, and split.{name} is {wanted} %: rows with the same user stay "
        "together, and some groups are large"
        for name, share, wanted in (("val", val, 30), ("test", test, 10))
    ]


def test_a_missing_schema_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(GOOD)
    command = "recmill schema --input LOG --label COLUMN --output absent.toml"
    with pytest.raises(ConfigError, match=rf"absent.toml: no such file\. Make one from the log: {command}\."):
        recmill.prepare("clicks", tmp_path / "d", input=str(tmp_path / "log.csv"), schema="absent.toml")
    with pytest.raises(
        ConfigError, match=r"'shema'\. Did you mean 'schema'\? Known: .*on_bad_row, schema, spark_master"
    ):
        recmill.prepare("clicks", tmp_path / "d", input="log.csv", shema="s.toml")  # type: ignore[call-arg]


def test_parts_of_times_that_training_never_had_count_as_unseen(prepared: Prepare) -> None:
    training = "".join(f"{click},,2024-03-0{day}\n" for day in (1, 2, 3) for click in (0, 1))
    others = "0,v,2024-03-04\n1,v,2024-03-04\n0,t,2024-03-04\n1,t,2024-03-04\n"
    log = f"click,fold,when\n{training}{others}"
    features = [{"name": "weekday", "type": "time", "part": "weekday"}]
    path = prepared(log, split=BY_FOLD, time={"column": "when"}, feature=features)
    recipe = load_recipe(path)
    assert recipe.learned["weekday"].seen == [4, 5, 6], "Friday to Sunday"
    encoder = Encoder(recipe, path)
    (rows,) = read(next(path.parent.glob("log*.csv")), recipe.log.input, recipe.log.columns())
    encoder.encode(rows)
    assert encoder.tally.counts["weekday"]["unseen"] == 4, "Monday"


def test_interrupted_work_is_resumed_and_the_bytes_are_the_same(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared(GOOD, split=BY_FOLD, feature=[SITE, PRICE])
    monkeypatch.setenv("RECMILL_FAIL", "prepare.written:nospace")
    monkeypatch.setattr(failpoints, "active_failures", functools.cache(failpoints.active_failures.__wrapped__))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match="No space left"):
        prepared(GOOD, split=BY_FOLD, feature=[SITE, PRICE])
    left = [path for path in tmp_path.iterdir() if path.name not in before and path.name.endswith(".unfinished")]
    assert left, "finished parts are kept"
    monkeypatch.delenv("RECMILL_FAIL")
    failpoints.active_failures.cache_clear()
    name = left[0].name.removeprefix(".").removesuffix(".unfinished")
    number = name.removeprefix("data")
    source, schema = str(tmp_path / f"log{number}.csv"), str(tmp_path / f"schema{number}.toml")
    recmill.prepare("clicks", tmp_path / name, input=source, schema=schema)
    described = [json.loads((path / "dataset.json").read_text())["files"] for path in (whole, tmp_path / name)]
    assert described[0] == described[1]


def test_values_are_told_apart_even_if_a_64_bit_hash_of_all_of_them_is_the_same(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_broken(values: pl.Series, seed: int) -> pl.Series:
        return pl.Series(np.zeros(len(values), np.uint64)) if seed == 0 else real(values, seed)

    real = pl.Series.hash
    log = pl.DataFrame({"click": [i % 2 for i in range(200)], "site": [f"s{i % 7}" for i in range(200)]})
    expected = prepared(log, feature=[SITE])
    monkeypatch.setattr(pl.Series, "hash", half_broken)
    found = prepared(log, feature=[SITE])
    assert arrays(found)[1].tolist() == arrays(expected)[1].tolist()
    assert open_dataset(found).clicks.sparse[0].rows == 2 + 7


def test_codes_are_those_of_first_occurrences_and_may_begin_anew(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(1)
    values = [f"v{i}" for i in draw.integers(0, 20_000, 30_000)]
    coder = Coder()
    codes = np.concatenate([coder.codes(pl.Series(values[start : start + 7000])) for start in range(0, 30_000, 7000)])
    known: dict[str, int] = {}
    assert codes.tolist() == [known.setdefault(value, len(known)) for value in values]
    assert coder.values().to_list() == list(known)
    log = "click,site\n" + "".join(f"{i % 2},{value}\n" for i, value in enumerate(values))
    expected = prepared(log, feature=[SITE])
    monkeypatch.setattr(steps, "_MAX_VALUES", 100)
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 14)
    found = prepared(log, feature=[SITE])
    same = [json.loads((path / "dataset.json").read_text())["files"] for path in (expected, found)]
    assert same[0] == same[1]


def test_without_a_compiler_the_bytes_are_the_same(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    lines = [f"{i % 2},s{draw.integers(99)},{'' if i % 7 else 'a long text ' * (i % 3)},{i / 8}" for i in range(3000)]
    log = "click,site,text,price\n" + "\n".join(lines) + "\n"
    features = [SITE, {"column": "text", "type": "categorical"}, PRICE]
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(coding, "_LINES_AT_ONCE", 100)
    expected = prepared(log, feature=features)
    monkeypatch.setattr(library, "_load_parser_or_warn", lambda: None)
    found = prepared(log, feature=features)
    same = [json.loads((path / "dataset.json").read_text())["files"] for path in (expected, found)]
    assert same[0] == same[1]


def test_a_schema_can_be_read_again_from_the_recipe(prepared: Prepare, tmp_path: Path) -> None:
    path = prepared(GOOD, split=BY_FOLD, feature=[SITE, PRICE])
    (file,) = tmp_path.glob("schema*.toml")
    assert load_recipe(path).log == load_schema(file)


def test_the_page_lists_every_key_and_its_example_is_a_schema(tmp_path: Path) -> None:
    text = schema_page.PAGE.read_text(encoding="utf-8")
    assert text == schema_page.page(text), "run python -m tests.schema_page"
    example = text.split("```toml\n")[1].split("```")[0]
    (tmp_path / "clicks.toml").write_text(example, encoding="utf-8")
    schema = load_schema(tmp_path / "clicks.toml")
    assert schema.columns() == ["click", "hour", "site_id", "genres", "price", "user_id"]


def test_wrong_keys_and_columns_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("click,site,price\n1,a,2\n")
    (tmp_path / "clicks.toml").write_text(
        "format = 1\n[label]\ncolumn = 'clik'\n[split]\nvall = 0.1\n"
        "[[feature]]\ncolumn = 'sit'\ntype = 'categorical'\nmin_freqency = 3\n"
        "[[feature]]\ncolumns = ['site', 'prize']\nname = 'both'\ntype = 'cross'\ntable_size = 100\n"
    )
    with pytest.raises(ConfigError) as caught:
        recmill.prepare(
            "clicks", tmp_path / "out", input=str(tmp_path / "log.csv"), schema=str(tmp_path / "clicks.toml")
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 problems in the config:"
    assert "'split.vall'" in lines[1]
    assert "min_freqency'" in lines[2]
    assert [line.partition("clicks.toml: ")[2] for line in lines[3:]] == [
        "the log has no column 'clik'. Did you mean 'click'?",
        "the log has no column 'sit'. Did you mean 'site'?",
        "the log has no column 'prize'. Did you mean 'price'?",
    ]
