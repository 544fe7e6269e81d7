"""MovieLens' editions: a few rows worked out by hand, and the real files where they are available."""

import gzip
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.errors import ConfigError, DataError

from ..conftest import REPO
from ..histories_raw import KEEP_ALL, histories_of

REAL = REPO.parent / "shared" / "data"

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
    prepare("movielens", tmp_path / "d", input=write_edition(tmp_path / "raw", edition), **KEEP_ALL)
    assert histories_of(tmp_path / "d") == HISTORIES
    items = pl.read_parquet(tmp_path / "d" / "items.parquet")
    assert items["original_id"].to_list() == ["3", "4", "10"]
    assert items["title"].to_list() == list(TITLES.values())
    assert items["count"].to_list() == [2, 2, 2]
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [8, 9, 10, 40, 50, 50]


def test_ratings_are_filtered_first(tmp_path: Path) -> None:
    raw = write_edition(tmp_path / "raw", "ml-1m")
    with pytest.raises(ConfigError, match=r"(?s)--min-rating: 1 interactions dropped.*users of fewer than 3.*: 4 in"):
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
def test_a_bad_rating_is_an_error_with_file_row_and_value(tmp_path: Path, row: str, message: str) -> None:
    raw = write_edition(tmp_path / "raw", "ml-1m")
    with (raw / "ratings.dat").open("a") as file:
        file.write(f"{row}\n")
    with pytest.raises(DataError) as caught:
        prepare("movielens", tmp_path / "d", input=raw, **KEEP_ALL)
    assert message in str(caught.value)


def test_files_that_are_missing_or_of_two_editions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        prepare("movielens", tmp_path / "d", input=tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "")
    with pytest.raises(DataError, match=r"ml-1m\.zip: a file, where .* Unpack it \(unzip\), and give the directory"):
        prepare("movielens", tmp_path / "d", input=tmp_path / "ml-1m.zip")
    raw = write_edition(tmp_path / "raw", "ml-1m")
    (raw / "movies.dat").rename(raw / "films.dat")
    with pytest.raises(DataError, match=r"ratings\.dat is there, but not movies\.dat"):
        prepare("movielens", tmp_path / "d", input=raw)
    with pytest.raises(DataError, match=r"ratings\.dat: a file, where .* Give its directory"):
        prepare("movielens", tmp_path / "d", input=raw / "ratings.dat")
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
    description = prepare("movielens", tmp_path / "d", input=raw, **KEEP_ALL)
    assert pl.read_parquet(tmp_path / "d" / "items.parquet")["title"].to_list() == ["3", "4", "GoldenEye (1995)"]
    assert description["notes"] == ["2 of 3 items have no title: their original id stands for it"]


def unpacked(name: str, directory: Path) -> Path:
    if not (REAL / f"{name}.zip").is_file():
        pytest.skip(f"no real MovieLens ratings: {name}.zip is not there")
    zipfile.ZipFile(REAL / f"{name}.zip").extractall(directory)
    return directory / name


def counts(description: dict[str, Any]) -> list[int]:
    return [description[f"num_{what}"] for what in ("users", "items", "interactions")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ml-1m", [6_040, 3_706, 1_000_209]),
        ("ml-100k", [943, 1_682, 100_000]),
        ("ml-latest-small", [610, 9_724, 100_836]),
    ],
)
def test_the_real_editions_have_the_published_counts(tmp_path: Path, name: str, expected: list[int]) -> None:
    assert counts(prepare("movielens", tmp_path / "d", input=unpacked(name, tmp_path), min_item_count=0)) == expected


def test_the_defaults_give_the_sequences_of_the_papers_on_ml_1m(tmp_path: Path) -> None:
    """Their file has other numbers for users and items: items are identified by how often they occur."""
    description = prepare("movielens", tmp_path / "d", input=unpacked("ml-1m", tmp_path))
    assert counts(description) == [6_040, 3_416, 999_611]
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
