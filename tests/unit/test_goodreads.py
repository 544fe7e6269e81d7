"""`recmill prepare goodreads` on a few rows worked out by hand."""

import gzip
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recmill import prepare
from recmill.data.opening import open_dataset
from recmill.datasets.inputs import text
from recmill.errors import ConfigError, DataError
from recmill.schema import HistoriesDescription

from ..conftest import RunCli
from ..histories_raw import histories_of

GOODREADS = "user_id,book_id,is_read,rating,is_reviewed\n" + "".join(
    f"{user},{book},{is_read},{rating},0\n"
    for user, book, is_read, rating in [
        (1, 9, 1, 5), (1, 3, 0, 0), (1, 7, 1, 4), (1, 5, 1, 2), (0, 3, 1, 5), (0, 9, 1, 5), (0, 1, 1, 5), (0, 2, 1, 5),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"0": ["3", "9", "1", "2"], "1": ["9", "3", "7", "5"]}),
        ({"only_read": True, "max_interactions": 3}, {"1": ["9", "7", "5"]}),
        ({"min_rating": 2, "min_interactions": 4}, {"0": ["3", "9", "1", "2"]}),
    ],
)
def test_goodreads_keeps_the_order_of_the_file(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    (tmp_path / "goodreads_interactions.csv").write_text(GOODREADS)
    prepare("goodreads", tmp_path / "d", input=tmp_path, **{"min_interactions": 3, **options})
    assert histories_of(tmp_path / "d") == expected
    description = open_dataset(tmp_path / "d").description
    assert isinstance(description, HistoriesDescription)
    assert not description.has_timestamps


BOOKS = [("500", "Émile"), ("30", r"The \"Wasp\" Factory"), ("77", ""), ("12", "Never met")]


def write_books(directory: Path) -> dict[str, Any]:
    """Interactions' books 9, 3, 7, 5, 1, 2 are Goodreads' 500, 30, 77, ...; of 1, 2 and 5 nothing is known."""
    lines = "".join(f'{{"isbn": "", "book_id": "{book}", "title": "{title}", "n": [1]}}\n' for book, title in BOOKS)
    (directory / "books.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (directory / "map.csv").write_text("book_id_csv,book_id\n9,500\n3,30\n7,77\n4,12\n5,1\n")
    (directory / "goodreads_interactions.csv").write_text(GOODREADS)
    return {"input": directory, "titles": directory / "books.json.gz", "book_ids": directory / "map.csv"}


@pytest.mark.parametrize("block_bytes", [1, 50, 1 << 24])
def test_goodreads_books_have_their_titles(tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    (tmp_path / "raw").mkdir()
    description = prepare("goodreads", tmp_path / "d", **write_books(tmp_path / "raw"), min_interactions=3)
    items = pl.read_parquet(tmp_path / "d" / "items.parquet")
    expected = {"1": "1", "2": "2", "3": 'The "Wasp" Factory', "5": "5", "7": "7", "9": "Émile"}
    assert dict(zip(items["original_id"], items["title"], strict=True)) == expected
    assert description["notes"] == ["4 of 6 items have no title: their original id stands for it"]
    (tmp_path / "raw").rename(tmp_path / "moved")
    assert prepare("goodreads", tmp_path / "d", **write_books(tmp_path / "moved"), min_interactions=3) == description


def test_titles_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    files = write_books(tmp_path)
    with pytest.raises(ConfigError, match="--titles needs --book-ids"):
        prepare("goodreads", tmp_path / "d", input=tmp_path, titles=files["titles"])
    (tmp_path / "books.json").write_text('{"book_id": "500", "title": "Émile"}\n{"book_id": "30", "ti')
    with pytest.raises(DataError, match=r"books\.json: row 2 is no JSON .*get the file again"):
        prepare("goodreads", tmp_path / "d", **{**files, "titles": tmp_path / "books.json"}, min_interactions=3)
    with pytest.raises(DataError, match=r"none\.json: no such file\. Get it: recmill download goodreads"):
        prepare("goodreads", tmp_path / "d", **{**files, "titles": tmp_path / "none.json"})


def test_goodreads_rows_whose_last_field_is_missing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "goodreads_interactions.csv").write_text(GOODREADS + "0,4,1,5\n")
    with pytest.raises(DataError, match="row 9: expected 5 fields, got 4"):
        prepare("goodreads", tmp_path / "d", input=tmp_path, min_interactions=3)
    with pytest.raises(ConfigError, match="--max-interactions 10: give 20 or more"):
        prepare("goodreads", tmp_path / "d", input=tmp_path, max_interactions=10)


def test_flags_of_the_command_line(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "goodreads_interactions.csv").write_text(GOODREADS)
    command = ["prepare", "goodreads", "--input", tmp_path, "--output", tmp_path / "d"]
    done = run_cli(*command, "--only-read", "--min-interactions", "3")
    assert done.returncode == 0, done.stderr
    assert "goodreads: 2 users, 6 items, 7 interactions" in done.stdout
