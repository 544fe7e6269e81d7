"""MovieLens' editions and Goodreads, on a few rows worked out by hand; and on the real files where they are at hand."""

import gzip
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.datasets.histories import goodreads
from recmill.errors import ConfigError, DataError
from recmill.schema import HistoriesDescription, open_dataset

from ..conftest import REPO, RunCli
from ..histories_raw import histories_of

REAL = REPO.parent / "shared" / "data"
ALL: dict[str, Any] = {"min_user_count": 0, "min_item_count": 0}

# Two users, out of order; user 7's ratings 3 and 4 at one time, in this order.
RATINGS = [(7, 3, 4, 50), (2, 10, 5, 9), (7, 4, 1, 50), (7, 10, 3, 40), (2, 3, 2, 8), (2, 4, 5, 10)]
HISTORIES = {"2": ["3", "10", "4"], "7": ["10", "3", "4"]}
TITLES = {3: "Café :: noir (1995)", 4: "Émile (1990)", 10: "GoldenEye (1995)"}


def write_edition(directory: Path, edition: str) -> Path:
    directory.mkdir()
    if edition == "ml-1m":
        (directory / "ratings.dat").write_text("".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in RATINGS))
        lines = "".join(f"{i}::{title}::Drama|War\n" for i, title in TITLES.items())
        (directory / "movies.dat").write_bytes(lines.encode("latin-1"))
    elif edition == "ml-100k":
        (directory / "u.data").write_text("".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in RATINGS))
        lines = "".join(f"{i}|{title}|01-Jan-1995||http://x|0|1\n" for i, title in TITLES.items())
        (directory / "u.item").write_bytes(lines.encode("latin-1"))
    else:
        lines = "".join(f"{u},{i},{r}.0,{t}\n" for u, i, r, t in RATINGS)
        (directory / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n{lines}")
        lines = "".join(f'{i},"{title}",Drama\n' for i, title in TITLES.items())
        (directory / "movies.csv").write_text(f"movieId,title,genres\n{lines}", encoding="utf-8")
    return directory


@pytest.mark.parametrize("edition", ["ml-1m", "ml-100k", "ml-20m"])
def test_every_edition_gives_the_same_histories_with_ids_and_titles(edition: str, tmp_path: Path) -> None:
    prepare("movielens", tmp_path / "d", input=write_edition(tmp_path / "raw", edition), **ALL)
    assert histories_of(tmp_path / "d") == HISTORIES
    items = pl.read_parquet(tmp_path / "d" / "items.parquet")
    assert items["original_id"].to_list() == ["3", "4", "10"]
    assert items["title"].to_list() == list(TITLES.values())
    assert items["count"].to_list() == [2, 2, 2]
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [8, 9, 10, 40, 50, 50]


def test_ratings_are_filtered_first(tmp_path: Path) -> None:
    raw = write_edition(tmp_path / "raw", "ml-1m")
    with pytest.raises(DataError, match=r"(?s)--min-rating: 1 interactions dropped.*users of fewer than 3.*: 4 inter"):
        prepare("movielens", tmp_path / "d", input=raw, min_rating=2, min_user_count=0, min_item_count=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("7::3::4", "ratings.dat: row 7: expected 4 fields, got 3, the last is '4'"),
        ("7::3::good::50", "ratings.dat: row 7, column rating: 'good' is not a number"),
        ("7::3::nan::50", "column rating: 'nan' is not a number"),
        ("7::3::4::May", "column timestamp: 'May' is not a whole number"),
        ("7::::4::50", "column movieId: '' is not a whole number"),
        ("7:3::4::50", "expected 4 fields, got 3"),
    ],
)
def test_a_bad_rating_is_an_error_with_its_place(tmp_path: Path, row: str, message: str) -> None:
    raw = write_edition(tmp_path / "raw", "ml-1m")
    with (raw / "ratings.dat").open("a") as file:
        file.write(f"{row}\n")
    with pytest.raises(DataError) as caught:
        prepare("movielens", tmp_path / "d", input=raw, **ALL)
    assert message in str(caught.value)


def test_files_that_are_missing_or_of_two_editions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        prepare("movielens", tmp_path / "d", input=tmp_path / "raw")
    raw = write_edition(tmp_path / "raw", "ml-1m")
    (raw / "movies.dat").rename(raw / "films.dat")
    with pytest.raises(DataError, match=r"ratings\.dat is there, but not movies\.dat"):
        prepare("movielens", tmp_path / "d", input=raw)
    (raw / "u.data").touch()
    with pytest.raises(DataError, match=r"expected one of .*; it holds ratings\.dat, u\.data"):
        prepare("movielens", tmp_path / "d", input=raw)
    (raw / "u.data").unlink()
    (raw / "movies.dat").write_text("3\n")
    with pytest.raises(DataError, match=r"movies\.dat: line 1"):
        prepare("movielens", tmp_path / "d", input=raw)


def test_items_without_a_title_are_counted(tmp_path: Path) -> None:
    raw = write_edition(tmp_path / "raw", "ml-1m")
    (raw / "movies.dat").write_text("10::GoldenEye (1995)::Action\n99::Never rated (2000)::Drama\n")
    description = prepare("movielens", tmp_path / "d", input=raw, **ALL)
    assert pl.read_parquet(tmp_path / "d" / "items.parquet")["title"].to_list() == ["3", "4", "GoldenEye (1995)"]
    assert description["notes"] == ["2 of 3 items have no title: their original id stands for it"]


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
    monkeypatch.setattr(goodreads, "_BLOCK_BYTES", block_bytes)
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
    with pytest.raises(ConfigError, match="--titles and --book-ids go together"):
        prepare("goodreads", tmp_path / "d", input=tmp_path, titles=files["titles"])
    (tmp_path / "books.json").write_text('{"book_id": "500", "title": "Émile"}\n{"book_id": "30", "ti')
    with pytest.raises(DataError, match=r"books\.json: after line 1: .*Get the file again"):
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


def unpacked(name: str, directory: Path) -> Path:
    if not (REAL / f"{name}.zip").is_file():
        pytest.skip(f"{name}.zip is not at hand in {REAL}")
    zipfile.ZipFile(REAL / f"{name}.zip").extractall(directory)
    return directory / name


@pytest.mark.parametrize(
    ("name", "options", "users", "items", "interactions"),
    [
        ("ml-1m", {"min_item_count": 0}, 6_040, 3_706, 1_000_209),
        ("ml-100k", {"min_item_count": 0}, 943, 1_682, 100_000),
        ("ml-latest-small", {"min_item_count": 0}, 610, 9_724, 100_836),
    ],
)
def test_the_real_editions_have_the_published_counts(
    tmp_path: Path, name: str, options: dict[str, Any], users: int, items: int, interactions: int
) -> None:
    description = prepare("movielens", tmp_path / "d", input=unpacked(name, tmp_path), **options)
    assert (description["num_users"], description["num_items"], description["num_interactions"]) == (
        users,
        items,
        interactions,
    )


def test_the_defaults_give_the_sequences_of_the_papers_on_ml_1m(tmp_path: Path) -> None:
    """Their file numbers users and items anew; what an item is, the numbers of its occurrences tell."""
    description = prepare("movielens", tmp_path / "d", input=unpacked("ml-1m", tmp_path))
    assert (description["num_users"], description["num_items"], description["num_interactions"]) == (
        6_040,
        3_416,
        999_611,
    )
    items, offsets = np.load(tmp_path / "d" / "items.npy"), np.load(tmp_path / "d" / "offsets.npy")
    with gzip.open(REAL / "ml-1m.bert4rec.txt.gz") as file:
        their_users, their_items = np.loadtxt(file, dtype=np.int64).T
    their_offsets = np.concatenate([[0], np.cumsum(np.bincount(their_users)[1:])])

    def by_counts(items: np.ndarray, offsets: np.ndarray) -> dict[bytes, np.ndarray]:
        counts = np.bincount(items)[items]
        spans = [slice(*span) for span in pairwise(offsets.tolist())]
        return {counts[span].tobytes(): items[span] for span in spans}

    ours, theirs = by_counts(items, offsets), by_counts(their_items, their_offsets)
    assert len(ours) == 6_040
    assert ours.keys() == theirs.keys()
    pairs = np.concatenate([np.stack([ours[key], theirs[key]], axis=1) for key in ours])
    assert len(np.unique(pairs, axis=0)) == 3_416  # each of our items is one of theirs
