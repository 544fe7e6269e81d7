"""`evaluate` and `recommend` on a few films, with the names that people have for them."""

import json
import logging
import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w
from polars.testing import assert_frame_equal

import recmill
from recmill import prepare, recommend, recommend_all
from recmill.commands import recommend as command
from recmill.commands import scored_files
from recmill.commands.assemble import build_source, model_module, open_matching_dataset, open_trained_run
from recmill.errors import CheckpointError, ConfigError, DataError

from ..checkpoints import flip_a_bit
from ..conftest import RunCli, flip_bit
from ..group import evaluate, train
from ..histories_raw import histories_of
from .test_command_line import assert_one_clear_error

# Original ids are ten times the numbers; 5 and 6 share a title.
TITLES = {
    10: "Heat (1995)",
    20: "Casino (1995)",
    30: "City of Lost Children, The (1995)",
    40: "I, Robot, and Others (2004)",
    50: "Aladdin (1992)",
    60: "Aladdin (1992)",
} | {10 * n: f"Film {n} (19{n})" for n in range(7, 31)}
NUM_USERS = 23


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users 100, 103, ... with 3 to 30 of 30 films: the last has seen them all."""
    raw = tmp_path_factory.mktemp("raw")
    draw, rows = np.random.default_rng(5), []
    for n in range(NUM_USERS):
        length = 30 if n == NUM_USERS - 1 else 3 + n
        rows += [f"{100 + 3 * n}::{10 * (item + 1)}::5::{t}\n" for t, item in enumerate(draw.permutation(30)[:length])]
    (raw / "ratings.dat").write_text("".join(rows))
    (raw / "movies.dat").write_text("".join(f"{i}::{title}::Drama\n" for i, title in TITLES.items()))
    prepare("movielens", raw / "data", input=str(raw), min_item_count=0, min_user_count=0)
    return raw / "data"


def trained(name: str, movies: Path, directory: Path) -> Path:
    config = {
        "data": {"path": str(movies)},
        "model": {"name": name, "embedding_dim": 16, "num_layers": 1, "max_length": 10},
        "train": {"device": "cpu", "global_batch_size": 8, "max_steps": 4},
        "eval": {"protocols": ["full"], "ks": [1, 5]},
        "checkpoint": {"every_steps": 2},
    }
    train(config, directory / name)
    return directory / name


@pytest.fixture(scope="module")
def run(movies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("bert4rec", movies, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", params=["bert4rec", "sasrec"])
def each_run(request: pytest.FixtureRequest, movies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bert4rec":
        return Path(request.getfixturevalue("run"))
    return trained("sasrec", movies, tmp_path_factory.mktemp("run"))


def items_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["item"] for row in rows]


def scores_of_the_network(run: Path, user: int) -> dict[str, float]:
    """As in evaluation: for the test item of a user, by original id."""
    import torch

    from recmill.checkpoints import loading as checkpoint
    from recmill.checkpoints.choosing import choose

    directory, config = open_trained_run(run)
    dataset = open_matching_dataset(config)
    network = model_module(config).build(config.model, dataset.description, torch.device("cpu")).eval()
    found = choose(directory.checkpoints, "newest")
    assert found
    checkpoint.load(found, network)
    batch = next(build_source(config, dataset, 0, 1).eval_batches("test"))
    with torch.no_grad():
        logits = network(*batch.inputs())[user].tolist()
    return {str(10 * (item + 1)): score for item, score in enumerate(logits)}


def test_the_best_items_are_those_that_evaluation_scores_highest(each_run: Path, movies: Path) -> None:
    user = 18  # 21 items: more than the network sees
    history = list(histories_of(movies).values())[user][:-1]
    scores = scores_of_the_network(each_run, user)
    unseen = sorted(scores.keys() - set(history), key=lambda item: -scores[item])
    found = recommend(each_run, history, k=10)
    assert items_of(found) == unseen  # ten are left
    assert [row["score"] for row in found] == pytest.approx([scores[item] for item in unseen], rel=1e-5)
    assert [row["title"] for row in found] == [TITLES[int(item)] for item in unseen]
    everything = recommend(each_run, history, k=30, include_seen=True)
    assert items_of(everything) == sorted(scores, key=lambda item: -scores[item])


def test_the_effect_of_an_item_is_what_the_first_recommendation_loses_without_it(each_run: Path) -> None:
    history = ["20", "30", "70", "90"]
    best = recommend(each_run, history, k=1)[0]

    def score_after(items: list[str]) -> float:
        everything = recommend(each_run, items, k=30, include_seen=True)
        return next(row["score"] for row in everything if row["item"] == best["item"])

    found = recmill.explain(each_run, history=history).to_dicts()
    left_out = {item: [other for other in history if other != item] for item in history}
    expected = {item: best["score"] - score_after(others) for item, others in left_out.items()}
    assert {row["item"]: row["effect"] for row in found} == pytest.approx(expected, abs=1e-5)
    effects = [row["effect"] for row in found]
    assert effects == sorted(effects, reverse=True)
    assert recmill.explain(each_run, history=",".join(history)).to_dicts() == found


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_network_sees_the_same_history_in_recommend_and_in_evaluation(
    split: str, each_run: Path, movies: Path
) -> None:
    """Bit for bit, for histories of 1 to 29 items before the target; the network sees 10 at most."""
    import torch

    _, config = open_trained_run(each_run)
    (batch,) = build_source(config, open_matching_dataset(config), 0, 1).eval_batches(split)
    held_out = {"val": 2, "test": 1}[split]
    model = command.Recommender(each_run, "newest", False)
    histories = [model.history(user)[:-held_out] for user in range(NUM_USERS)]
    assert {len(history) < 10 for history in histories} == {True, False}
    for ours, theirs in zip(model.network_inputs(histories), batch.inputs(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_checkpoints_of_another_config_and_scores_that_are_no_numbers_are_refused(run: Path, tmp_path: Path) -> None:
    import torch

    model = command.Recommender(run, "newest", False)
    with torch.no_grad():
        next(model.network.parameters()).fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"step-00000004: its model gives scores that are not finite numbers"):
        model.after([[10, 20]], 1, False)
    other = shutil.copytree(run, tmp_path / "other")
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace("seed = 1\n", "seed = 2\n", 1))
    with pytest.raises(CheckpointError, match=r"was made with another config than this run's \(seed 1, "):
        recommend(other, [10])


def test_titles_ids_and_commas_name_the_same_history(run: Path) -> None:
    by_id = recommend(run, [20, 30, "40", 10], k=5)
    text = "Casino (1995),City of Lost Children, The (1995), I, Robot, and Others (2004) ,10"
    assert recommend(run, text, k=5) == by_id
    assert recommend(run, list(map(TITLES.__getitem__, [20, 30, 40, 10])), k=5) == by_id


def test_candidates_in_a_file_get_the_scores_and_ranks_of_evaluation(
    each_run: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the format, the names of items and the number of processes."""
    monkeypatch.setattr(scored_files, "_PART_ROWS", 5)
    ratings = histories_of(movies)
    unseen = [sorted({*map(str, TITLES)} - {*items[:-1]}, key=int) for items in ratings.values()]
    columns: dict[str, Any] = {
        "user": [*ratings],
        "history": [items[:-1] for items in ratings.values()],
        "candidates": unseen,
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "new.parquet")
    pl.DataFrame(columns).write_ndjson(tmp_path / "new.jsonl")
    by_title = {str(item): title if title != "Aladdin (1992)" else str(item) for item, title in TITLES.items()}
    text = {
        name: [",".join(by_title[item] for item in items) for items in columns[name]]
        for name in ("history", "candidates")
    }
    pl.DataFrame(columns | text).write_csv(tmp_path / "new.csv")
    done = recmill.predict(each_run, tmp_path / "new.parquet", tmp_path / "scores.parquet", keep=["user"])
    assert (done["rows"], done["written"]) == (NUM_USERS, sum(map(len, unseen)))
    scores = pl.read_parquet(tmp_path / "scores.parquet")
    assert scores.select("user", "item").rows() == [
        (u, item) for u, row in zip(ratings, unseen, strict=True) for item in row
    ]
    expected = scores_of_the_network(each_run, 18)
    of_one = scores.filter(pl.col("user") == [*ratings][18])
    assert of_one["score"].to_list() == pytest.approx([expected[item] for item in of_one["item"]], rel=1e-6, abs=1e-6)
    ranks = recmill.evaluate(each_run, per_user=True)
    for (user, items), rank in zip(ratings.items(), ranks["full/rank"], strict=True):
        own = dict(scores.filter(pl.col("user") == user).select("item", "score").rows())
        assert rank == 1 + sum(score > own[items[-1]] for score in own.values())
    for name, procs in (("new.jsonl", 1), ("new.csv", 2)):
        output = tmp_path / f"{procs}.parquet"
        recmill.predict(each_run, tmp_path / name, output, keep=["user"], procs=procs)
        assert pl.read_parquet(output).drop("item").equals(scores.drop("item"))


def test_histories_in_a_file_get_the_items_of_recommend(
    run: Path, movies: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    ratings = histories_of(movies)
    pl.DataFrame({"user": [*ratings], "history": [*ratings.values()]}).write_parquet(tmp_path / "new.parquet")
    output = tmp_path / "best.parquet"
    words = ["recommend", run, "--input", tmp_path / "new.parquet", "--output", output, "--keep", "user", "--k", "7"]
    assert "for 23 requests" in run_cli(*map(str, words)).stdout
    recommend_all(run, tmp_path / "all.parquet", k=7)
    for name, read in (("all.csv", partial(pl.read_csv, infer_schema=False)), ("all.jsonl", pl.read_ndjson)):
        recommend_all(run, tmp_path / name, k=7)
        same = read(tmp_path / name).cast(pl.read_parquet(tmp_path / "all.parquet").schema)
        assert_frame_equal(same, pl.read_parquet(tmp_path / "all.parquet"))
    assert pl.read_parquet(output).equals(pl.read_parquet(tmp_path / "all.parquet")), "fewer if fewer are left"
    assert (
        recommend(run, input=tmp_path / "new.parquet", k=30, include_seen=True, frame="polars").height == 30 * NUM_USERS
    )


def test_unknown_items_in_a_file_are_reported_and_get_no_score(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = {"history": ["10,9999", None, "9999"], "candidates": ["20,5000", "30", "40"]}
    pl.DataFrame(new).write_csv(tmp_path / "new.tsv", separator="\t")
    found = recmill.predict(run, tmp_path / "new.tsv", tmp_path / "scores.csv")
    scores = pl.read_csv(tmp_path / "scores.csv")
    best = {row["item"]: row["score"] for row in recommend(run, [10], k=29)}
    assert scores["item"].to_list() == [20, 5000, 30, 40]
    assert scores["score"].to_list() == [pytest.approx(best["20"], rel=1e-5), None, None, None]
    shares = {(row["feature"], row["kind"]): row["here"] for row in found["features"]}
    assert shares == pytest.approx(
        {
            ("history", "missing"): 2 / 3,
            ("history", "unseen"): 1 / 3,
            ("candidates", "missing"): 0,
            ("candidates", "unseen"): 1 / 3,
        }
    )
    some = "of 3 rows have some items that the dataset does not have, which"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "history: 2 of 3 rows have no item of the dataset: nothing is scored for them",
        f"history: 1 {some} are left out",
        f"candidates: 1 {some} get no score",
    ]
    caplog.clear()
    written = recommend_all(run, tmp_path / "best.jsonl", input=tmp_path / "new.tsv", k=3)
    assert "history: 2 of 3 rows have no item of the dataset: nothing is recommended for them" in caplog.messages
    assert (written["requests"], written["rows"]) == (3, 3), "none after a history without a known item"


@pytest.mark.parametrize(
    ("columns", "options", "kind", "text"),
    [
        ({"history": [[10]]}, {}, DataError, "no column 'candidates'; it has history"),
        ({"history": [[1.5]], "candidates": ["10"]}, {}, DataError, "column history holds List"),
        (
            {"history": ["10"], "candidates": ["Aladdin (1992)"]},
            {},
            DataError,
            "new.parquet: column candidates: 'Aladdin .*' is the title of 2",
        ),
        (
            {"history": ["10"], "candidates": ["20"]},
            {"on_bad_value": "missing"},
            ConfigError,
            "sequence model, and --on-bad-value is for click models",
        ),
    ],
)
def test_files_of_histories_that_cannot_be_scored_are_refused(
    columns: dict[str, Any], options: dict[str, Any], kind: type[Exception], text: str, run: Path, tmp_path: Path
) -> None:
    pl.DataFrame(columns).write_parquet(tmp_path / "new.parquet")
    with pytest.raises(kind, match=text):
        recmill.predict(run, tmp_path / "new.parquet", tmp_path / "scores.csv", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]


def test_a_corrupt_dataset_is_reported_by_its_file(run: Path, movies: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(movies, tmp_path / "data"))
    own = Path(shutil.copytree(run, tmp_path / "run"))
    config = own / "config.toml"
    config.write_text(config.read_text().replace(str(movies), str(copy)))
    flip_bit(copy / "items.parquet")
    for call in (recmill.evaluate, partial(recommend, history="10")):
        with pytest.raises(DataError, match=r"items\.parquet: its content changed"):
            call(own)
    (copy / "items.parquet").write_bytes(bytes((copy / "items.parquet").stat().st_size))
    with pytest.raises(DataError, match=r"items\.parquet: not a Parquet file that can be read"):
        recommend(own, "10", verify=False)


def test_fallback_uses_the_checkpoint_before_a_corrupt_one(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shard = flip_a_bit(copy / "checkpoints" / "step-00000004")
    with pytest.raises(CheckpointError, match="its content changed since it was saved"):
        recommend(copy, [10, 20])
    before = recommend(copy, [10, 20], fallback=True)
    shutil.rmtree(shard.parent)
    (copy / "status.json").write_text("{}")  # it names the step that is gone now
    assert before == recommend(copy, [10, 20]) != recommend(run, [10, 20])


def test_users_get_what_their_full_history_gets(
    each_run: Path, movies: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One, some, or all of them; batches of any size."""
    histories = histories_of(movies)
    expected = {user: recommend(each_run, history, k=4) for user, history in histories.items() if len(history) < 27}
    two = recommend(each_run, users="106,100, 106", k=4, checkpoint="best")
    assert [(row["user"], row["rank"]) for row in two] == [(user, n) for user in ("106", "100") for n in (1, 2, 3, 4)]
    assert items_of(two) == items_of(expected["106"]) + items_of(expected["100"])
    monkeypatch.setattr(command, "_HISTORIES_AT_ONCE", 5)
    done = recommend_all(each_run, tmp_path / "new" / "all.parquet", k=4)
    written = pl.read_parquet(tmp_path / "new" / "all.parquet")
    assert done == {"output": str(tmp_path / "new" / "all.parquet"), "users": NUM_USERS, "rows": written.height}
    assert written.schema == {
        "user": pl.String, "rank": pl.Int32, "item": pl.String, "title": pl.String, "score": pl.Float32
    }  # fmt: skip
    assert list(dict.fromkeys(written["user"])) == [user for user in histories if len(histories[user]) < 30]
    for user, history in histories.items():
        rows = written.filter(user=user).drop("user")
        assert rows["rank"].to_list() == list(range(1, 1 + min(4, 30 - len(history))))
        if user in expected:
            assert items_of(rows.to_dicts()) == items_of(expected[user])
            assert rows["score"].to_list() == pytest.approx([row["score"] for row in expected[user]], rel=1e-5)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["all.parquet"]


def test_recommendations_are_not_written_to_a_path_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*: this path is not valid UTF-8"):
        recommend_all(tmp_path, os.fsdecode(bytes(tmp_path) + b"/\xff"))


def test_everyone_s_items_through_the_command(run: Path, run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("recommend", run, "--all", "--output", "all.parquet", "--k", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"44 rows for 23 users: {tmp_path / 'all.parquet'}\n"
    assert "1 users have fewer than 2 unseen items left" in done.stderr
    before = (tmp_path / "all.parquet").read_bytes()
    again = run_cli("recommend", run, "--all", "--output", "all.parquet")
    assert_one_clear_error(again, 3, "all.parquet exists", "Choose another --output")
    assert (tmp_path / "all.parquet").read_bytes() == before


def test_a_disk_without_room_leaves_nothing_behind(run: Path, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / ".all.parquet.partial-999999999").touch()  # of a process that was killed

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    done = run_cli("recommend", run, "--all", "--output", "all.parquet", "--k", "2", preexec_fn=small_files_only)
    assert_one_clear_error(done, 5, "all.parquet: could not be written")
    assert list(tmp_path.iterdir()) == []


def test_the_table_shows_users_ranks_and_titles(run: Path, run_cli: RunCli) -> None:
    shown = run_cli("recommend", run, "--users", "100", "--k", "2").stdout.splitlines()
    rows = recommend(run, users=[100], k=2)
    assert shown[0].split() == ["user", "rank", "item", "title", "score"]
    assert shown[2].split()[:3] == ["100", "1", rows[0]["item"]]
    assert rows[0]["title"] in shown[2]


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["--users", "101,100,999"], 3, ["2 user(s) are not in", "users.parquet", "'101', '999'. Known ids: 100,"]),
        (["--users", "0100,1"], 3, ["'0100' (did you mean '100'?), '1'. Known ids"]),
        (["--history", "FILM 030 (1930)"], 3, ["did you mean 'Film 30 (1930)'?"]),
        (["--history", "Film 3"], 3, ["'Film 3'. Known ids: 10"]),
        (["--history", "30 (1930"], 3, ["did you mean 'Film 30 (1930)'?"]),
        (["--users", " , "], 3, ["--users is empty"]),
        (["--history", "Heat"], 3, ["'Heat' (did you mean 'Heat (1995)'?)", "items.parquet"]),
        (["--history", "heat (1996),20"], 3, ["1 item(s)", "did you mean 'Heat (1995)'"]),
        (["--history", "qqq"], 3, ["1 item(s) are not in", "'qqq'. Known ids: 10, 20, 30 and more."]),
        (["--history", "Aladdin (1992)"], 3, ["is the title of 2 items. Use the id of one: 50, 60."]),
        (["--history", "10", "--k", "0"], 2, ["--k 0: there are 30 items; ask for 1 to 30"]),
        (["--history", "10", "--k", "31", "--include-seen"], 2, ["--k 31: there are 30 items"]),
        (["--history", "10,20,10", "--k", "29"], 2, ["--k 29: 28 items are left outside this history"]),
        (["--users", "100,166", "--k", "1"], 2, ["--k 1: 0 items are left that user 166 has not seen"]),
        (["--users", "100", "--history", "10"], 2, ["exactly one of --history, --users, --all and --input"]),
        ([], 2, ["exactly one of --history, --users, --all and --input"]),
        (["--all"], 2, ["--all and --input write to a file"]),
        (["--users", "100", "--output", "x.parquet"], 2, ["--all and --input write to a file"]),
        (["--all", "--output", "x.txt"], 2, ["--output x.txt: end it with .parquet, .csv or .jsonl"]),
        (["--all", "--output", "x.parquet", "--k", "31"], 2, ["--k 31: there are 30 items"]),
    ],
)
def test_what_cannot_be_recommended_is_one_clear_error(
    arguments: list[str], code: int, facts: list[str], run: Path, run_here: RunCli, tmp_path: Path
) -> None:
    assert_one_clear_error(run_here("recommend", run, *arguments), code, *facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["--protocol", "full,pop100"], 3, ["'pop100' needs 100 items", "100 has seen 3 of 30", "--protocol full"]),
        (["--protocol", "uni100"], 3, ["'uni100' needs 100 items", "user 100 has seen 3 of 30", "--protocol full"]),
        (["--protocol", "pop28"], 3, ["'pop28' needs 28 items", "100 has seen 3 of 30"]),
        (["--protocol", "pop0"], 2, ["--protocol 'pop0': give 'full', or pop<N> or uni<N>"]),
        (["--protocol", "full,"], 2, ["--protocol '': give 'full'"]),
        (["--k", "0"], 2, ["--k 0: give cut-offs of 1 to 30"]),
        (["--k", "5,31"], 2, ["--k 31: give cut-offs of 1 to 30"]),
        (["--k", "ten"], 2, ["integers separated by commas"]),
        (["--bootstrap", "-1"], 2, ["--bootstrap -1"]),
        (["--bootstrap", "10000000"], 2, ["--bootstrap 10000000", "give 1 to 100,000 resamples"]),
    ],
)
def test_what_cannot_be_evaluated_is_one_clear_error(
    arguments: list[str], code: int, facts: list[str], run: Path, run_here: RunCli
) -> None:
    assert_one_clear_error(run_here("evaluate", run, *arguments), code, *facts)


def test_evaluation_shows_popularity_and_intervals_beside_the_model(run: Path, movies: Path, run_cli: RunCli) -> None:
    arguments = ["--k", "3,10", "--bootstrap", "100", "--split", "val"]
    values = evaluate(run, ks=[3, 10], bootstrap=100, split="val")
    assert recmill.evaluate(run, ks=3, split="val")["full/hr@3"] == values["full/hr@3"]
    histories = list(histories_of(movies).values())
    counts = dict.fromkeys(map(str, TITLES), 0)
    for item in (item for history in histories for item in history[:-2]):
        counts[item] += 1
    hits = []
    for *history, target, _ in histories:
        rivals = counts.keys() - set(history) - {target}
        hits.append(sum(counts[item] >= counts[target] for item in rivals) < 3)
    assert values["popularity/full/hr@3"] == pytest.approx(np.mean(hits))
    assert 0 <= values["low/full/hr@3"] <= values["full/hr@3"] <= values["high/full/hr@3"] <= 1
    shown = run_cli("evaluate", run, *arguments).stdout.splitlines()
    assert [cell.strip() for cell in shown[0].split("  ") if cell] == ["val", "model", "95 % interval", "popularity"]
    assert shown[2].split() == [
        "full/hr@3",
        f"{values['full/hr@3']:.4f}",
        f"{values['low/full/hr@3']:.4f}",
        "to",
        f"{values['high/full/hr@3']:.4f}",
        f"{values['popularity/full/hr@3']:.4f}",
    ]
    assert shown[-2].split() == ["users", "23"]
    assert shown[-1] == "step 4: checkpoints/step-00000004"


@pytest.mark.parametrize("arguments", [["--protocol", "full"], ["--k", "5"]], ids=lambda arguments: arguments[0])
def test_click_models_have_no_ranking(
    arguments: list[str], dlrm: dict[str, Any], run_here: RunCli, tmp_path: Path
) -> None:
    """Told before the checkpoint is read: an empty one will do."""
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "MANIFEST.json").write_text("{}")
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(dlrm))
    fact = f"{arguments[0]} is for sequence models, and 'dlrm' is none"
    assert_one_clear_error(run_here("evaluate", "run", *arguments), 2, fact)
    assert_one_clear_error(run_here("recommend", "run", "--users", "1"), 2, "'dlrm' is no sequence model")


def test_python_takes_one_of_history_and_users(tmp_path: Path) -> None:
    for both in ({}, {"history": [10], "users": [100]}):
        with pytest.raises(ConfigError, match="exactly one"):
            recommend(tmp_path, **both)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="--checkpoint: should be 'newest' or 'best', got 'oldest'"):
        evaluate(tmp_path, checkpoint="oldest")


@pytest.mark.parametrize("procs", [1, 2])
def test_ranks_by_user_give_the_metrics_of_the_split(
    run: Path, movies: Path, tmp_path: Path, run_cli: RunCli, procs: int
) -> None:
    file = tmp_path / "ranks.parquet"
    command_line = ("evaluate", run, "--per-user", file, "--procs", procs, "--json")
    values = json.loads(run_cli(*map(str, command_line)).stdout)
    ranks = pl.read_parquet(file)
    assert ranks["user"].to_list() == [str(100 + 3 * n) for n in range(NUM_USERS)]
    assert dict(ranks.select("user", "item").iter_rows()) == {u: items[-1] for u, items in histories_of(movies).items()}
    rank = ranks["full/rank"].to_numpy()
    assert rank.min() >= 1
    assert np.mean(rank <= 5) == pytest.approx(values["full/hr@5"])
    assert np.mean((rank <= 5) / np.log2(rank + 1)) == pytest.approx(values["full/ndcg@5"])
    if procs == 1:
        assert_one_clear_error(run_cli(*map(str, command_line)), 3, "ranks.parquet exists")
        with pytest.raises(ConfigError, match=r"--per-user .*: File name too long. Choose a shorter path"):
            evaluate(run, per_user_file="10" * 201)
        frame = recmill.evaluate(run, per_user=True, frame="pandas", split="val")
        assert list(frame.columns) == ["user", "item", "full/rank"] and len(frame) == NUM_USERS
        assert frame["item"].tolist() == [items[-2] for items in histories_of(movies).values()]


def test_an_open_run_keeps_its_model_and_returns_frames(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    opened = recmill.open_run(copy)
    shutil.rmtree(copy / "checkpoints")  # the model is in memory
    alone = recommend(run, [10, 20], k=3)
    frame = opened.recommend([10, 20], k=3)
    assert frame.drop("history", "rank").to_dicts() == alone == recommend(run, [10, 20], k=3, frame="polars").to_dicts()
    both = opened.recommend(["Casino (1995)"], k=2), opened.recommend([[20], (10, 20)], k=3, frame="pandas")
    assert both[0]["item"].to_list() == both[1][both[1]["history"] == 0]["item"].tolist()[:2]
    assert both[1][both[1]["history"] == 1]["item"].tolist() == frame["item"].to_list()
    users = opened.recommend(users=[100, 103], k=2, frame="arrow")
    assert users.to_pylist() == recommend(run, users=[100, 103], k=2)
    assert opened.results()["run"].to_list() == [str(copy)]
    assert opened.history(frame="pandas")["step"].max() == 4
    with pytest.raises(ConfigError, match="use 'polars', 'pandas' or 'arrow'"):
        opened.recommend([10], frame="numpy")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="exactly one of them"):
        opened.recommend()
    with pytest.raises(DataError, match="--history: 1 item"):
        opened.recommend([[10], [11]])
    number: Any = np.int64(2)
    assert opened.recommend([10], k=number).equals(opened.recommend([10], k=2))
    with pytest.raises(ConfigError, match="--history: expected a list or a text, got 5"):
        opened.recommend(5)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="--users: expected a list or a text, got 5"):
        opened.recommend(users=5)  # type: ignore[call-overload]
    skipped = opened.recommend([["11", "10"], ["11"], [], ["20", "Heat (1996)"]], k=2, unknown="skip")
    assert skipped["history"].to_list() == [0, 0, 3, 3]
    assert items_of(skipped.to_dicts()) == items_of(opened.recommend([[10], [20]], k=2).to_dicts())
    assert opened.recommend([11], unknown="skip").columns == skipped.columns
    with pytest.raises(ConfigError, match="unknown='ignore': use 'error' or 'skip'"):
        opened.recommend([11], unknown="ignore")  # type: ignore[call-overload]


def test_frames_of_histories_give_what_files_give(
    run: Path, movies: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    histories = [*([int(item) for item in items] for items in histories_of(movies).values()), [10, 9999], [9999]]
    rows = pl.DataFrame(
        {"id": range(len(histories)), "history": histories, "candidates": [[30, 9999]] * len(histories)}
    )
    rows.write_parquet(tmp_path / "new.parquet")
    fact = "have some items that the dataset does not have"
    opened = recmill.open_run(run)
    best = recommend(run, input=tmp_path / "new.parquet", keep=["id"], k=7, frame="polars")
    assert best["id"].unique().to_list() == [*range(NUM_USERS - 1), NUM_USERS], "none if none is left or known"
    caplog.clear()
    assert opened.recommend(input=rows, keep=["id"], k=7).equals(best)
    assert f"history: 1 of {len(histories)} rows {fact}, which are left out" in caplog.messages
    assert recommend(run, input=rows.to_pandas(), k=7) == best.drop("id").to_dicts()
    recmill.predict(run, tmp_path / "new.parquet", tmp_path / "scores.parquet", keep=["id"])
    scores = opened.predict(rows, keep=["id"], frame="pandas")
    assert pl.from_pandas(scores).equals(pl.read_parquet(tmp_path / "scores.parquet"))
    for options, text in (
        ({"input": rows, "history": [10]}, "exactly one"),
        ({"input": rows, "k": 31}, "--k 31: there are 30 items"),
        ({"input": rows, "k": 0}, "--k 0: there are 30 items"),
        ({"input": rows.with_columns(rank=1), "keep": ["rank"]}, "--keep rank: a column of the output has this name"),
        ({"history": [10], "keep": ["id"]}, "--keep names columns of --input"),
    ):
        with pytest.raises(ConfigError, match=text):
            recommend(run, **options)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=text):
            opened.recommend(options.pop("history", None), **options)  # type: ignore[call-overload]
    with pytest.raises(
        ConfigError, match=r"`rows` is a path, not a frame. For files: recmill.predict\('.*', 'n.csv', output\)"
    ):
        opened.predict("n.csv")
    with pytest.raises(ConfigError, match=r"For files: recmill.recommend\('.*', input='n.csv'\)"):
        opened.recommend(input=Path("n.csv"))
    with pytest.raises(DataError, match="--keep: the frame has no column 'user'; it has id, history, candidates"):
        opened.recommend(input=rows, keep=["user"])
    with pytest.raises(ConfigError, match=r"--keep id,id: 'id' occurs twice\. Name it once\."):
        opened.recommend(input=rows, keep=["id", "id"])
    with pytest.raises(ConfigError, match=r"--separator says how to read a file, and `input` is a frame\. Remove it\."):
        recommend(run, input=rows, separator=";")
    assert opened.recommend(input=rows.clear(), keep=["id"]).columns == ["id", "rank", "item", "title", "score"]
    assert opened.predict(rows.clear(), keep=["id"]).columns == ["id", "item", "score"]
    with pytest.raises(DataError, match="the model needs history, candidates: the frame has no column 'candidates'"):
        opened.predict(rows.drop("candidates"))
