"""`recmill schema`: what it takes columns for, on logs whose columns are known."""

import json
import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import recmill
from recmill.datasets.own_clicks.schema import load_schema
from recmill.errors import ConfigError, DataError
from recmill.observe.printed import print_schema

ROWS = 2000


def guessed(frame: pl.DataFrame, tmp_path: Path, separator: str = ",", label: str | None = "click") -> dict[str, str]:
    """Return the guess of each column of a CSV; the schema that is written can be loaded."""
    source = tmp_path / f"log{len(list(tmp_path.iterdir()))}.csv"
    frame.write_csv(source, separator=separator)
    output = source.with_suffix(".toml")
    found = recmill.guess_schema(source, label, output)
    schema = load_schema(output)
    assert schema.input.separator == separator
    recmill.prepare("clicks", source.with_suffix(""), input=str(source), schema=str(output))
    return {row["column"]: row["guess"] for row in found["columns"]}


def drawn(seed: int = 1) -> pl.DataFrame:
    """Return a log shaped like Avazu's: a row id, hex ids, whole numbers, `hour` as YYMMDDHH."""
    draw = random.Random(seed)
    sites, devices = ([f"{draw.getrandbits(32):08x}" for _ in range(count)] for count in (40, 300))
    rows = range(ROWS)
    columns = {
        "id": [str(10**18 + draw.getrandbits(50)) for _ in rows],
        "click": [int(draw.random() < 0.2) for _ in rows],
        "hour": [f"1410{21 + row * 10 // ROWS}{row * 240 // ROWS % 24:02d}" for row in rows],
        "C1": [draw.choice([1005, 1002, 1010]) for _ in rows],
        "banner_pos": [draw.choice([0, 1, 7]) for _ in rows],
    }
    for name in ("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"):
        columns[name] = [draw.choice(sites) for _ in rows]
    for name in ("device_id", "device_ip", "device_model"):
        columns[name] = [draw.choice(devices) for _ in rows]
    columns |= {f"C{number}": [draw.choice([-1, 320, 50, 1722, number]) for _ in rows] for number in range(14, 22)}
    return pl.DataFrame(columns)


def test_a_log_like_avazus_needs_nothing_but_its_label(tmp_path: Path) -> None:
    found = guessed(drawn(), tmp_path)
    assert {name for name, guess in found.items() if guess == "left out"} == {"id"}
    assert (found["click"], found["hour"]) == ("label", "time")
    others = found.keys() - {"id", "click", "hour"}
    assert {found[name] for name in others} == {"categorical"}
    schema = load_schema(next(tmp_path.glob("*.toml")))
    assert (schema.time and schema.time.format, schema.split.by) == ("%y%m%d%H", "time")


def test_numbers_several_values_and_epochs_are_recognized_with_any_separator(tmp_path: Path) -> None:
    draw = random.Random(2)
    frame = pl.DataFrame(
        {
            "click": [draw.choice(["yes", "no"]) == "yes" for _ in range(ROWS)],
            "price": [round(draw.lognormvariate(1, 2), 2) for _ in range(ROWS)],
            "age": [draw.randint(18, 80) for _ in range(ROWS)],
            "zip_code": [f"{draw.randint(0, 300):05d}" for _ in range(ROWS)],
            "genres": ["|".join(draw.sample(["Drama", "War", "Crime"], draw.randint(1, 3))) for _ in range(ROWS)],
            "words": [" ".join(draw.choices(["the", "a", "of", "in", "and", "by"], k=6)) for _ in range(ROWS)],
            "country": ["NL"] * ROWS,
            "time": [1_700_000_000 + row for row in range(ROWS)],
        }
    )  # fmt: skip
    expected = {
        "click": "label",
        "price": "numeric",
        "age": "numeric",
        "zip_code": "categorical",
        "genres": "categorical",
        "words": "categorical",
        "country": "left out",
        "time": "time",
    }
    assert guessed(frame, tmp_path, ";") == expected
    assert guessed(frame, tmp_path, "\t") == expected
    schema = load_schema(sorted(tmp_path.glob("*.toml"))[0])
    features = {feature.name: feature for feature in schema.feature}
    assert features["price"].transform == "log1p", "skewed"  # type: ignore[union-attr]
    assert features["age"].transform == "standard"  # type: ignore[union-attr]
    assert features["genres"].separator == "|"  # type: ignore[union-attr]
    assert features["words"].separator == " "  # type: ignore[union-attr]


def test_columns_that_know_the_label_are_left_out_whether_numbers_or_names(tmp_path: Path) -> None:
    frame = drawn().with_columns(
        dwell_seconds=pl.when(pl.col("click") == 1).then(pl.int_range(ROWS) / 7 + 1).otherwise(0.0),
        outcome=pl.when(pl.col("click") == 1).then(pl.lit("seen")).otherwise(pl.lit("skipped")),
        hint=pl.when(pl.int_range(ROWS) % 3 == 0).then(pl.lit("x")).otherwise(pl.col("click").cast(pl.String)),
    )
    found = guessed(frame, tmp_path)
    assert (found["dwell_seconds"], found["outcome"]) == ("left out", "left out")
    assert found["hint"] == "categorical", "it only helps"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([f"201410{day:02d}{hour:02d}" for day in range(1, 21) for hour in range(24)], "%Y%m%d%H"),
        ([f"201201{day:02d}" for day in range(1, 21)] * 24, "%Y%m%d"),
        ([str(874_000_000 + 1000 * i) for i in range(480)], "s"),
        ([f"2024-01-{1 + i % 28:02d} 0{i % 9}:00" for i in range(480)], "iso"),
        ([f"{1 + i % 28:02d}/03/2024 0{i % 9}:00:00" for i in range(480)], "%d/%m/%Y %H:%M:%S"),
        ([f"03/{1 + i % 28:02d}/2024" for i in range(480)], "%m/%d/%Y"),
        ([f"2024/03/{1 + i % 28:02d}" for i in range(480)], "%Y/%m/%d"),
    ],
)
def test_formats_of_times_are_told_apart(tmp_path: Path, values: list[str], expected: str) -> None:
    pl.DataFrame({"click": [0, 1] * 240, "site": ["a", "b", "b"] * 160, "time": values}).write_csv(tmp_path / "log.csv")
    recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "clicks.toml")
    schema = load_schema(tmp_path / "clicks.toml")
    assert schema.time is not None
    assert schema.time.format == expected


def test_dates_whose_day_may_be_the_month_say_so_and_mixed_dates_are_no_times(tmp_path: Path) -> None:
    days = [f"0{1 + i % 8}/03/2024" for i in range(480)]
    mixed = [f"2024-03-0{1 + i % 8}" if i % 2 else f"0{1 + i % 8}.03.2024" for i in range(480)]
    frame = pl.DataFrame({"click": [0, 1] * 240, "site": ["a", "b", "b"] * 160, "day": days, "mixed": mixed})
    frame.write_csv(tmp_path / "log.csv")
    recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "clicks.toml")
    text = (tmp_path / "clicks.toml").read_text()
    assert "# day: times (%d/%m/%Y), 8 days in the sample; " in text
    assert "it fits with the month first, too" in text
    assert "# mixed: text, 8 different values" in text


@pytest.mark.parametrize(
    ("first", "hours", "parts", "why"),
    [
        (0, 20, [], "1 day in the sample; no hour (too few days); no weekday (one value only)"),
        (0, 36, [], "2 days in the sample; no hour (too few days)"),
        (0, 5 * 24, ["hour"], "5 days in the sample; no weekday (too few days)"),
        (0, 14 * 24, ["hour", "weekday"], "14 days in the sample"),
        (9, 1, ["weekday"], "28 days in the sample; no hour (one value only)"),
    ],
)
def test_parts_of_times_are_proposed_only_if_their_values_repeat(
    tmp_path: Path, first: int, hours: int, parts: list[str], why: str
) -> None:
    """One row for each hour of the log; or, for a single hour, one at nine o'clock of each of 28 days."""
    offsets = range(hours) if hours > 1 else range(first, 28 * 24, 24)
    times = [1_704_067_200 + 3600 * offset for offset in offsets] * 10  # from Monday, 2024-01-01
    frame = pl.DataFrame({"click": [0, 1] * (len(times) // 2), "site": ["a", "b", "b", "c"] * (len(times) // 4)})
    frame.with_columns(at=pl.Series(times)).write_csv(tmp_path / "log.csv")
    found = recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "clicks.toml")
    assert why in next(row["why"] for row in found["columns"] if row["column"] == "at")
    schema = load_schema(tmp_path / "clicks.toml")
    assert [feature.part for feature in schema.feature if feature.type == "time"] == parts
    assert schema.split.by == "time"
    assert "at is left out" not in found["schema"]


def test_texts_for_missing_numbers_are_found_and_times_with_gaps_do_not_stop_the_preparation(tmp_path: Path) -> None:
    """Price has n/a beside numbers, and country has it beside names; width has a number that cannot be parsed."""
    frame = drawn().with_columns(
        price=pl.when(pl.int_range(ROWS) % 7 > 0)
        .then((pl.int_range(ROWS) / 9).cast(pl.String))
        .otherwise(pl.lit("n/a")),
        width=pl.when(pl.int_range(ROWS) % 300 > 0).then(pl.lit("3.5")).otherwise(pl.lit("wide")),
        country=pl.when(pl.int_range(ROWS) % 3 > 0).then(pl.lit("NL")).otherwise(pl.lit("?")),
        hour=pl.when(pl.int_range(ROWS) % 500 > 0).then("hour"),
    )
    found = guessed(frame, tmp_path)
    assert (found["price"], found["width"], found["country"]) == ("numeric", "categorical", "categorical")
    schema = load_schema(next(tmp_path.glob("*.toml")))
    assert schema.input.missing[-1:] == ["n/a"]
    assert (schema.time, schema.split.by) == (None, "rows")
    text = next(tmp_path.glob("*.toml")).read_text()
    assert "4 of 2,000 rows have none" in text
    assert "most are numbers, but not 'wide'" in text


def test_a_label_of_yes_and_no_and_names_that_only_look_like_amounts(tmp_path: Path) -> None:
    frame = drawn().with_columns(
        click=pl.when(pl.col("click") == 1).then(pl.lit("Yes")).otherwise(pl.lit("No")),
        page=pl.int_range(ROWS) % 30,
        bid=pl.when(pl.int_range(ROWS) % 5 > 0).then((pl.int_range(ROWS) % 97) / 10),
    )
    found = guessed(frame, tmp_path)
    assert (found["page"], found["bid"]) == ("categorical", "numeric")
    features = {f.name: f for f in load_schema(next(tmp_path.glob("*.toml"))).numeric}
    assert features["bid"].flag_missing, "a fifth of them is missing"
    assert load_schema(next(tmp_path.glob("*.toml"))).label.positive == ["Yes"]


def test_decimal_commas_are_numbers_and_few_texts_among_numbers_have_an_alternative(tmp_path: Path) -> None:
    number = pl.int_range(ROWS)
    frame = drawn().with_columns(
        price=pl.concat_str(number % 90, pl.lit(","), 10 + number % 89),
        age=pl.when(number % 50 > 0).then((20 + number % 40).cast(pl.String)).otherwise(pl.lit("unknown")),
        tags=pl.concat_str(number % 3, pl.lit(","), number % 5, pl.lit(","), number % 7),
    )
    found = guessed(frame, tmp_path, ";")
    assert (found["price"], found["age"], found["tags"]) == ("numeric", "categorical", "categorical")
    path = next(tmp_path.glob("*.toml"))
    schema = load_schema(path)
    assert schema.input.decimal == ","
    assert ", with decimal commas" in path.read_text()
    head, _, alternative = path.read_text().partition("# or, instead of it:\n")
    assert "# age: text, 41 different values; most are numbers, but not 'unknown'" in head
    lines = [line.removeprefix("# ") for line in alternative.splitlines() if line.startswith("# ")]
    feature = tomllib.loads("\n".join(lines[: lines.index("]") + 1]))["feature"][0]
    assert feature == {"column": "age", "type": "numeric", "missing_values": ["unknown"]}


@pytest.mark.parametrize(
    ("price", "size", "keys"),
    [
        ("1.234,56", "1.024", {"decimal": ",", "thousands": "."}),
        ("1.234.567", "2,5", {"decimal": ",", "thousands": "."}),
        ("1,234.56", "3.5", {"thousands": ","}),
    ],
)
def test_separated_thousands_are_found(tmp_path: Path, price: str, size: str, keys: dict[str, str]) -> None:
    number = pl.int_range(ROWS)
    drawn().with_columns(
        price=pl.when(number % 3 > 0).then(pl.lit(price)).otherwise((number % 90).cast(pl.String)),
        size=pl.when(number % 3 > 0).then(pl.lit(size)).otherwise((number % 90).cast(pl.String)),
    ).write_csv(tmp_path / "log.csv", separator=";")
    found = recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "clicks.toml")
    why = {row["column"]: row["why"] for row in found["columns"]}
    schema = load_schema(tmp_path / "clicks.toml")
    assert {name: getattr(schema.input, name) for name in keys} == keys
    assert f"{keys['thousands']!r} for thousands" in why["price"]
    recmill.prepare("clicks", tmp_path / "d", input=f"{tmp_path}/log.csv", schema=str(tmp_path / "clicks.toml"))
    greatest = json.loads((tmp_path / "d" / "recipe.json").read_text())["learned"]["price"]
    assert greatest["shift"] > 89 or greatest["scale"] > 89, "the large numbers are large"


@pytest.mark.parametrize("price", ["12,50 €", "$12.50", "7 EUR"])
def test_numbers_with_a_unit_are_a_text_with_a_remark_and_no_list(tmp_path: Path, price: str) -> None:
    rows = "".join(f"{n % 2};{price.replace('1', str(n % 9 + 1)).replace('7', str(n % 9 + 1))}\n" for n in range(200))
    (tmp_path / "log.csv").write_text(f"click;price\n{rows}")
    found = recmill.guess_schema(tmp_path / "log.csv", "click")
    assert found["columns"][1]["guess"] == "categorical"
    assert "which look like numbers with a unit" in found["columns"][1]["why"]
    assert "separator" not in tomllib.loads(found["schema"])["feature"][0]


def test_the_next_command_names_the_schema_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn().write_csv("log.csv")
    print_schema(recmill.guess_schema("log.csv", "click", "clicks.toml"))
    command = "recmill prepare clicks --schema clicks.toml --input log.csv --output data/mine\n"
    assert capsys.readouterr().out.endswith(f"check clicks.toml, then:\n{command}")


def test_labels_that_are_not_understood_are_named_with_the_key_to_set(tmp_path: Path) -> None:
    rows = "".join(f"{'nein' if n % 5 else 'ja'},{n % 7}\n" for n in range(200))
    (tmp_path / "log.csv").write_text(f"bought,site\n{rows}")
    found = recmill.guess_schema(tmp_path / "log.csv", "bought", tmp_path / "clicks.toml")
    assert found["columns"][0]["why"] == "values 'ja', 'nein': set label.positive to those that mean a click"
    text = (tmp_path / "clicks.toml").read_text()
    assert '# positive = ["ja"]\n' in text, "the rarer one"
    (tmp_path / "clicks.toml").write_text(text.replace("# positive", "positive"))
    assert load_schema(tmp_path / "clicks.toml").label.positive == ["ja"]


def test_a_label_with_many_values_is_refused_and_a_condition_is_named(tmp_path: Path) -> None:
    pl.DataFrame({"price": [i / 7 for i in range(60)], "site": ["a", "b"] * 30}).write_csv(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"column price has 60 different values, .*\n?.*positive = \"> 3\""):
        recmill.guess_schema(tmp_path / "log.csv", "price")


def test_the_label_is_never_guessed_but_likely_ones_are_named(tmp_path: Path) -> None:
    drawn().write_csv(tmp_path / "log.csv")
    with pytest.raises(ConfigError, match=r"--label is missing: .* Likely: click\."):
        recmill.guess_schema(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\nc\n", "no column 'click' in its first row, which has 1 field; with ' ' it would be 2 (--separator ' ')"),
        ("1,2,3\n4,5,6\n", "its first row is '1,2,3', which looks like data"),
        ("x,y\n1,2\n", "no column 'click'; it has x, y. Correct --label."),
        ("click,y\n", "no rows"),
    ],
)
def test_what_cannot_be_guessed_is_an_error_and_no_file(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataError, match=re.escape(expected)):
        recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "out.toml")
    assert not (tmp_path / "out.toml").exists()


@pytest.mark.parametrize("label", ["click", None])
def test_a_wrong_separator_is_named_with_the_one_that_divides_the_header(tmp_path: Path, label: str | None) -> None:
    (tmp_path / "log.csv").write_text("click;site;price\n" + "1;a;4,5\n0;b;2,5\n" * 50)
    for separator in (",", "\t"):
        with pytest.raises(DataError, match=r"has 1 field; with ';' it would be 3 \(--separator ';'\)"):
            recmill.guess_schema(tmp_path / "log.csv", label, separator=separator)


@pytest.mark.parametrize("separator", [";", "\t", "|", ","])
def test_quotes_that_the_sample_lacks_are_quotes_and_those_within_its_fields_are_not(
    tmp_path: Path, separator: str
) -> None:
    """The first quotes are behind all lines that are looked at."""
    rows = [f"{n % 2}{separator}shoes{n % 7}" for n in range(45_000)]
    rows[42_500:42_510] = [f'{n % 2}{separator}"red{separator} small"' for n in range(10)]
    (tmp_path / "log.csv").write_text("\n".join([f"click{separator}what", *rows, ""]))
    found = recmill.guess_schema(tmp_path / "log.csv", "click", separator=separator)
    assert "quotes" not in tomllib.loads(found["schema"]).get("input", {})
    (tmp_path / "few.csv").write_text(f"click{separator}what\n" + f'0{separator}5" disk\n1{separator}shoes\n' * 60)
    found = recmill.guess_schema(tmp_path / "few.csv", "click", tmp_path / "few.toml")
    assert tomllib.loads(found["schema"])["input"]["quotes"] is False
    data = recmill.prepare(
        "clicks", tmp_path / "data", input=str(tmp_path / "few.csv"), schema=str(tmp_path / "few.toml")
    )
    assert data["sparse"][0]["rows"] == 4


def test_what_is_neither_a_path_nor_a_frame_is_refused() -> None:
    with pytest.raises(ConfigError, match="`input` is a dict"):
        recmill.guess_schema({"click": [0, 1]}, "click")


def test_lists_and_dates_of_parquet_are_recognized(tmp_path: Path) -> None:
    frame = drawn().select(
        "click",
        when=pl.datetime_range(pl.datetime(2024, 1, 1), pl.datetime(2024, 3, 1), eager=False, interval="1h").head(1)
        .repeat_by(ROWS).explode() + pl.duration(hours=pl.int_range(ROWS)),
        items=pl.concat_list(pl.int_range(ROWS), pl.col("C15")),
    )  # fmt: skip
    frame.write_parquet(tmp_path / "log.parquet")
    found = recmill.guess_schema(tmp_path / "log.parquet", "click")
    assert [row["guess"] for row in found["columns"]] == ["label", "time", "categorical"]


def test_how_to_read_a_text_without_a_header_in_another_encoding_goes_into_the_schema(tmp_path: Path) -> None:
    rows = "".join(f"{n % 2}||caf\xe9 {n % 5}\n" for n in range(100))
    (tmp_path / "log.txt").write_bytes(rows.encode("latin-1"))
    given: dict[str, Any] = {"label": "click", "columns": ["click", "place"], "separator": "||"}
    found = recmill.guess_schema(tmp_path / "log.txt", encoding="latin-1", **given)
    assert tomllib.loads(found["schema"])["input"] == {
        "separator": "||",
        "columns": ["click", "place"],
        "encoding": "latin-1",
    }
    with pytest.raises(DataError, match=r"row 1: byte 7 of the text .* It is probably latin-1: use --encoding"):
        recmill.guess_schema(tmp_path / "log.txt", **given)


def test_objects_within_json_lines_are_left_out_and_lists_are_several_values(tmp_path: Path) -> None:
    lines = [{"click": n % 2, "where": {"x": n}, "tags": ["a", f"b{n % 3}"][: n % 3]} for n in range(90)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = recmill.guess_schema(tmp_path / "log.jsonl", "click", tmp_path / "clicks.toml")
    schema = str(tmp_path / "clicks.toml")
    dataset = recmill.prepare("clicks", tmp_path / "data", input=str(tmp_path / "log.jsonl"), schema=schema)
    assert [feature["name"] for feature in dataset["sparse"]] == ["tags"]
    guesses = {row["column"]: (row["guess"], row["why"]) for row in found["columns"]}
    assert guesses["tags"] == ("categorical", "lists")
    assert guesses["where"][0] == "left out" and guesses["where"][1].startswith("holds Struct")


def shaped_like_public_logs() -> dict[str, tuple[pl.DataFrame, str, dict[str, str]]]:
    """Return rows with the columns of public datasets, as their descriptions say: (rows, label, what columns are)."""
    draw = random.Random(7)

    def column(make: Callable[[], object]) -> list[object]:
        return [make() for _ in range(ROWS)]

    def skewed(size: int) -> int:
        return int(size * draw.random() ** 3)

    adult = {
        "age": (column(lambda: draw.randint(17, 90)), "numeric"),
        "workclass": (column(lambda: draw.choice(["Private", "State-gov", "?"])), "categorical"),
        "education": (column(lambda: draw.choice(["HS-grad", "Bachelors", "Masters"])), "categorical"),
        "marital-status": (column(lambda: draw.choice(["Divorced", "Never-married"])), "categorical"),
        "occupation": (column(lambda: draw.choice(["Sales", "Tech-support", "?"])), "categorical"),
        "relationship": (column(lambda: draw.choice(["Husband", "Wife", "Own-child"])), "categorical"),
        "race": (column(lambda: draw.choice(["White", "Black", "Other"])), "categorical"),
        "sex": (column(lambda: draw.choice(["Male", "Female"])), "categorical"),
        "capital-gain": (column(lambda: draw.choice([0, 0, 0, draw.randint(100, 99999)])), "numeric"),
        "capital-loss": (column(lambda: draw.choice([0, 0, 0, draw.randint(100, 4356)])), "numeric"),
        "hours-per-week": (column(lambda: draw.randint(1, 99)), "numeric"),
        "native-country": (column(lambda: draw.choice(["United-States", "Mexico"])), "categorical"),
    }
    books = {
        "User-ID": (column(lambda: skewed(900)), "categorical"),
        "ISBN": (column(lambda: f"{skewed(800):010d}"), "categorical"),
        "Location": (column(lambda: draw.choice(["lima, peru", "oslo, norway"])), "categorical"),
        "Age": (column(lambda: draw.randint(10, 90)), "numeric"),
        "Book-Author": (column(lambda: f"Author {skewed(200)}"), "categorical"),
        "Year-Of-Publication": (column(lambda: draw.randint(1950, 2004)), "numeric or categorical"),
        "Publisher": (column(lambda: f"House {skewed(60)}"), "categorical"),
    }
    frappe = {
        "user": (column(lambda: skewed(957)), "categorical"),
        "item": (column(lambda: skewed(1500)), "categorical"),
        "cnt": (column(lambda: 1 + skewed(500)), "numeric"),
        "daytime": (column(lambda: draw.choice(["morning", "night", "noon"])), "categorical"),
        "weekday": (column(lambda: draw.choice(["monday", "friday"])), "categorical"),
        "isweekend": (column(lambda: draw.choice(["weekend", "workday"])), "categorical"),
        "homework": (column(lambda: draw.choice(["home", "work", "unknown"])), "categorical"),
        "cost": (column(lambda: draw.choice(["free", "paid"])), "categorical"),
        "weather": (column(lambda: draw.choice(["sunny", "cloudy", "rainy"])), "categorical"),
        "country": (column(lambda: draw.choice(["Spain", "Italy", "Japan"])), "categorical"),
        "city": (column(lambda: skewed(200)), "categorical"),
    }
    criteo = {f"I{i}": (column(lambda: draw.choice([None, skewed(3000)])), "numeric") for i in range(1, 14)}
    criteo |= {f"C{i}": (column(lambda: f"{skewed(900) * 7919:08x}"), "categorical") for i in range(1, 27)}
    movies = {
        "user_id": (column(lambda: skewed(600)), "categorical"),
        "movie_id": (column(lambda: skewed(900)), "categorical"),
        "timestamp": (column(lambda: draw.randint(956_703_932, 1_046_454_590)), "time"),
        "gender": (column(lambda: draw.choice("FM")), "categorical"),
        "age": (column(lambda: draw.choice([1, 18, 25, 35, 45, 50, 56])), "numeric or categorical"),
        "occupation": (column(lambda: draw.randint(0, 20)), "categorical"),
        "zip": (column(lambda: f"{skewed(700):05d}"), "categorical"),
        "genres": (column(lambda: "|".join(draw.sample(["War", "Drama", "Crime"], 2))), "categorical"),
    }
    found = {}
    for name, columns in {"adult": adult, "books": books, "frappe": frappe, "criteo": criteo, "movies": movies}.items():
        rows = {"y": column(lambda: draw.randint(0, 1)), **{key: values for key, (values, _) in columns.items()}}
        found[name] = pl.DataFrame(rows), "y", {key: kind for key, (_, kind) in columns.items()}
    return found


def test_at_least_95_percent_of_the_columns_of_public_logs_are_guessed_right(tmp_path: Path) -> None:
    wrong, total = [], 0
    for log, (frame, label, kinds) in shaped_like_public_logs().items():
        frame.write_csv(tmp_path / f"{log}.csv")
        for row in recmill.guess_schema(tmp_path / f"{log}.csv", label)["columns"][1:]:
            total += 1
            if row["guess"] not in kinds[row["column"]]:
                wrong.append((log, row["column"], row["guess"], row["why"]))
    assert len(wrong) <= 0.05 * total, wrong


def small_log(rows: int) -> pl.DataFrame:
    """Return a log whose price separates the clicks and whose device is that of the row."""
    clicks = [row // 8 % 2 for row in range(rows)]
    prices = [round(row / 7 + 1000 * click, 2) for row, click in enumerate(clicks)]
    systems = ["android", "android ", "iOS", "N/A"]
    return pl.DataFrame(
        {
            "click": clicks,
            "price": prices,
            "device": [f"d{row}" for row in range(rows)],
            "system": [systems[row // 2 % 4] for row in range(rows)],
        }
    )


def test_few_rows_judge_neither_leaks_nor_ids(tmp_path: Path) -> None:
    found = {row["column"]: row for row in recmill.guess_schema(small_log(98), "click")["columns"]}
    assert [found[name]["guess"] for name in ("price", "device")] == ["numeric", "categorical"]
    assert found["price"]["why"].endswith("; 98 rows are too few to judge whether it gives the label away")
    assert found["device"]["why"].endswith("; 98 rows are too few to judge whether it is the row's own id")
    enough = {row["column"]: row["guess"] for row in recmill.guess_schema(small_log(100), "click")["columns"]}
    assert enough["price"] == enough["device"] == "left out"


def test_a_label_that_is_there_shows_that_the_first_row_has_names_and_parts_of_parquet_may_be_empty(
    tmp_path: Path,
) -> None:
    (tmp_path / "log.csv").write_text("click,1,2,3\n" + "0,a,b,c\n1,b,a,c\n" * 60)
    found = recmill.guess_schema(tmp_path / "log.csv", "click")
    assert [row["column"] for row in found["columns"]] == ["click", "1", "2", "3"]
    rows = pl.DataFrame({"click": [0, 1], "site": ["a", "b"]})
    rows.clear().write_parquet(tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet: no rows"):
        recmill.guess_schema(tmp_path / "1.parquet", "click")
    rows.write_parquet(tmp_path / "2.parquet")
    assert len(recmill.guess_schema(str(tmp_path / "?.parquet"), "click")["columns"]) == 2


def test_texts_that_may_be_missing_or_the_same_get_a_remark(tmp_path: Path) -> None:
    found = recmill.guess_schema(small_log(200), "click")
    why = (
        "text, 4 different values; 'N/A' may stand for no value; 'android' and 'android ' differ only in spaces or "
        "case (normalize makes them the same)"
    )
    assert found["columns"][-1] == {"column": "system", "guess": "categorical", "why": why}
    assert '# missing_values = [\n#     "N/A",\n# ]' in found["schema"]
    assert '# normalize = [\n#     "strip",\n#     "lower",\n# ]' in found["schema"]


def test_a_log_without_any_feature_is_an_error_that_says_why_each_column_was_left_out(tmp_path: Path) -> None:
    frame = pl.DataFrame({"click": [0, 1] * 100, "id": [f"r{row}" for row in range(200)], "site": ["a"] * 200})
    frame.write_csv(tmp_path / "log.csv")
    with pytest.raises(DataError) as caught:
        recmill.guess_schema(tmp_path / "log.csv", "click", tmp_path / "clicks.toml")
    first, *reasons, remedy = str(caught.value).splitlines()
    assert first.endswith("log.csv: no column beside the label click can be a feature:")
    assert reasons == [
        "  id: 200 different values in 200 rows: it looks like the row's own id",
        "  site: one value only in 200 rows",
    ]
    assert remedy.startswith("Add such a column")
    assert not (tmp_path / "clicks.toml").exists()
