"""The best items of new requests, by a small two-tower run on a log of one's own."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import recmill
from recmill.commands import retriever
from recmill.errors import ConfigError, DataError
from recmill.tasks import retrieval

SCHEMA = """
[label]
column = "click"

[sample]
negatives = 0.5

[split]
by = "files"
val = ["2.csv"]
test = ["3.csv"]

[[feature]]
column = "user"
type = "categorical"
role = "user"

[[feature]]
column = "age"
type = "numeric"
role = "user"

[[feature]]
column = "film"
type = "categorical"
role = "item"

[[feature]]
column = "price"
type = "numeric"
role = "item"
flag_missing = true

[[feature]]
column = "genres"
type = "categorical"
separator = "|"
role = "item"
"""
K = 4


def write_log(path: Path, rows: int, seed: int) -> None:
    """Write a log of 30 films, all of which occur."""
    draw = random.Random(seed)
    lines = ["user,age,film,price,genres,click"]
    for row in range(rows):
        film = row if row < 30 else min(int(draw.expovariate(0.1)), 29)
        click = int(row < 30 or draw.random() < 0.5)
        genres = "|".join(f"g{film % n}" for n in (3, 4))
        lines.append(f"u{draw.randint(1, 20)},{draw.randint(18, 70)},f{film},{film / 2},{genres},{click}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with logs 1.csv to 3.csv, requests.csv without columns of items, and the run 'run'."""
    folder = tmp_path_factory.mktemp("towers")
    for number in (1, 2, 3):
        write_log(folder / f"{number}.csv", 600, number)
    (folder / "clicks.toml").write_text(SCHEMA)
    recmill.prepare("clicks", folder / "data", input=f"{folder}/?.csv", schema=str(folder / "clicks.toml"))
    model = {"name": "two_tower", "item_id": "film", "embedding_dim": 8, "request_mlp": [8], "item_mlp": [8]}
    train = {"global_batch_size": 64, "num_epochs": 2, "device": "cpu"}
    values = {"data": {"path": str(folder / "data")}, "model": model, "train": train, "eval": {"ks": [1, K]}}
    recmill.train(values, folder / "run")
    rows = pl.read_csv(folder / "3.csv").filter(pl.col("click") == 1)
    rows.select("user", "age").with_row_index("request").write_csv(folder / "requests.csv")
    return folder


def by_brute_force(folder: Path, tmp_path: Path) -> tuple[list[str], np.ndarray]:
    """Return the names of all items, and the score of every request with each, from the written vectors alone."""
    run, vectors = folder / "run", tmp_path / "vectors.parquet"
    recmill.write_items(run, vectors, requests=folder / "requests.csv", keep=["request"])
    recmill.write_items(run, tmp_path / "items.parquet")
    items = pl.read_parquet(tmp_path / "items.parquet").filter(pl.col("item").is_not_null())
    requests = np.array(pl.read_parquet(vectors)["vector"].to_list(), np.float64)
    return items["item"].to_list(), requests @ np.array(items["vector"].to_list(), np.float64).T / 0.05


def test_the_best_items_are_those_of_a_search_by_brute_force(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_ITEMS_AT_ONCE", 7)
    monkeypatch.setattr(retriever, "_REQUESTS_AT_ONCE", 5)
    names, scores = by_brute_force(folder, tmp_path)
    output = tmp_path / "best.parquet"
    written = recmill.recommend_all(
        folder / "run", output, input=folder / "requests.csv", k=K, keep=["request", "user"]
    )
    found = pl.read_parquet(output)
    assert found.columns == ["request", "user", "rank", "item", "score"]
    assert written["requests"] == len(scores) and written["rows"] == found.height == K * len(scores)
    assert sorted(names) == sorted(f"f{film}" for film in range(30))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    assert found["item"].to_list() == [names[item] for row in order for item in row]
    assert found["rank"].to_list() == [1, 2, 3, 4] * len(scores)
    np.testing.assert_allclose(found["score"], np.take_along_axis(scores, order, 1).ravel(), rtol=1e-4, atol=1e-4)
    requests = pl.read_csv(folder / "requests.csv", schema_overrides={"request": pl.String})
    assert found["request"].to_list() == requests["request"].gather(np.repeat(np.arange(len(scores)), K)).to_list()


def test_the_hit_rate_of_the_recommended_items_is_that_of_evaluate(folder: Path, tmp_path: Path) -> None:
    tested = recmill.evaluate(folder / "run")
    rows = pl.read_csv(folder / "3.csv").filter(pl.col("click") == 1)
    rows.write_csv(tmp_path / "rows.csv")  # with labels
    found = recmill.recommend(folder / "run", input=tmp_path / "rows.csv", k=K, keep=["film"], frame="polars")
    hits = (found["film"] == found["item"]).sum()
    assert hits / len(rows) == pytest.approx(tested[f"all/hr@{K}"])
    assert hits  # else the test shows nothing


def test_the_score_is_the_logit_of_predict_which_is_no_log_odds(folder: Path) -> None:
    """So it is not corrected for the rows without a click that were left out of training."""
    rows = pl.read_csv(folder / "3.csv").head(50)
    opened: Any = recmill.open_run(folder / "run")
    best = opened.recommend(input=rows.with_row_index("row"), k=30, keep=["row", "film"])
    own = best.filter(pl.col("film") == pl.col("item")).sort("row")["score"]
    np.testing.assert_allclose(own, opened.predict(rows)["logit"], rtol=1e-4, atol=1e-4)


def test_a_file_and_a_frame_give_the_same_items_with_unknown_values_too(folder: Path, tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["u1", "stranger", None], "age": ["30", "", "41"], "film": ["?", "?", "?"]})
    frame.write_csv(tmp_path / "new.csv")
    of_file = recmill.recommend(folder / "run", input=tmp_path / "new.csv", k=2, keep=["age"], frame="polars")
    of_frame = recmill.open_run(folder / "run").recommend(input=frame, k=2, keep=["age"])
    assert of_file.drop("age").equals(of_frame.drop("age")) and of_file.height == 6
    as_lists = recmill.recommend(folder / "run", input=frame, k=2)
    assert as_lists == of_frame.drop("age").to_dicts()
    assert recmill.open_run(folder / "run").recommend(input=frame.head(0), k=2).columns == ["rank", "item", "score"]


def test_equal_scores_keep_the_order_of_the_items() -> None:
    draw = np.random.default_rng(1)
    items = torch.from_numpy(draw.integers(-2, 3, (20_000, 2)).astype(np.float32))
    requests = torch.from_numpy(draw.integers(-2, 3, (9, 2)).astype(np.float32))
    scores, found = retrieval.best_items(requests, items, 50)
    every = (requests @ items.T).numpy()
    order = np.argsort(-every, axis=1, kind="stable")[:, :50]
    assert found.tolist() == order.tolist()
    assert scores.tolist() == np.take_along_axis(every, order, 1).tolist()


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"k": 31}, ConfigError, "--k 31: there are 30 items; ask for 1 to 30"),
        ({"k": 0}, ConfigError, "--k 0: there are 30 items"),
        ({"keep": ["colour"]}, DataError, "--keep does not fit the files"),
        ({"include_seen": True}, ConfigError, "--include-seen is for histories"),
        ({"output": "there.parquet"}, DataError, "there.parquet exists"),
        ({"output": "best.txt"}, ConfigError, "end it with .parquet, .csv or .jsonl"),
        ({"input": "2.csv", "keep": ["item"]}, DataError, "does not fit the files"),
    ],
)
def test_what_cannot_be_recommended_is_reported(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], expected: str
) -> None:
    (tmp_path / "there.parquet").touch()
    given = {"input": "requests.csv", "output": "best.parquet", **options}
    given |= {"input": folder / given["input"], "output": tmp_path / given["output"]}
    with pytest.raises(error, match=expected):
        recmill.recommend_all(folder / "run", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["there.parquet"]


def test_columns_of_requests_are_needed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("user\nu1\n")
    with pytest.raises(DataError, match="no column 'age'"):
        recmill.recommend(folder / "run", input=tmp_path / "new.csv")


def test_each_kind_of_model_names_its_own_flags(folder: Path, sasrec: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'two_tower' recommends for requests.*Use --input"):
        recmill.recommend(folder / "run", users=["u1"])
    with pytest.raises(ConfigError, match=r"'two_tower' recommends for requests.*Use --input"):
        recmill.recommend_all(folder / "run", tmp_path / "all.parquet")
    recmill.train(sasrec, tmp_path / "run", overrides=["train.max_steps=1"])
    with pytest.raises(DataError, match="no column 'history'; it has request, user, age"):
        recmill.recommend(tmp_path / "run", input=folder / "requests.csv")


def test_vectors_do_not_fit_into_csv(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold vectors"):
        recmill.write_items(folder / "run", tmp_path / "vectors.csv", requests=folder / "requests.csv")
    with pytest.raises(ConfigError, match=r"items.jsonl: it is written as Parquet. End its name with .parquet"):
        recmill.write_items(folder / "run", tmp_path / "items.jsonl")
