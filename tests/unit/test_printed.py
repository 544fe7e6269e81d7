import sys
from typing import Any

import pytest

from recmill.observe import printed
from recmill.observe.printed import (
    print_checkpoints,
    print_predictions,
    print_table,
    print_values,
    print_written_recommendations,
    table_lines,
    validation_text,
)


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert table_lines([["a", "bb", "c"], ["aaa", "b", ""]]) == ["a    bb  c", "aaa  b"]


def test_columns_are_aligned_where_characters_take_two_places_or_none() -> None:
    cafe = "cafe\u0301"
    assert table_lines([["\u6807\u9898", "x"], ["abcd", "y"], [cafe, "z"]]) == [
        "\u6807\u9898  x",
        "abcd  y",
        f"{cafe}  z",
    ]


def test_a_table_has_a_header_and_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["run", "metric"], [["a", "0.5"], ["long", "1"]])
    assert capsys.readouterr().out == "run   metric\n----  ------\na     0.5\nlong  1\n"


def test_very_large_numbers_are_short() -> None:
    assert [printed.shown(x) for x in (0.5, 123456.0, 5.5e32, float("inf"), 10**6)] == [
        *("0.5000", "123456.0000", "5.5e+32", "inf", "1,000,000")
    ]


def test_columns_of_metrics_without_any_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"full/ndcg@10": 0.25, "users": 1000, "popularity/full/ndcg@10": 0.125}
    print_values("test", values, {})
    header, _, ndcg, users = capsys.readouterr().out.splitlines()
    assert header.split() == ["test", "model", "popularity"]
    assert ndcg.split() == ["full/ndcg@10", "0.2500", "0.1250"]
    assert users.split() == ["users", "1,000"]


RANKING = {
    f"{protocol}/{metric}@{k}": 0.5
    for protocol in ("full", "pop100")
    for metric in ("hr", "ndcg", "mrr")
    for k in (1, 5, 10)
} | {"full/ndcg@10": 0.25, "users": 4000}


@pytest.mark.parametrize("width", [80, 120])
def test_a_validation_shows_its_headline_and_the_other_metrics_once_within_the_width(width: int) -> None:
    headline, *others = validation_text(300, RANKING, "full/ndcg@10", (200, 0.26), width).splitlines()
    assert headline == "step 300  validation  full/ndcg@10 0.2500  best 0.2600 at step 200"
    assert max(map(len, others)) <= width
    assert len(others) < 6
    words = " ".join(others).split()
    assert [words.count(word) for word in ("full", "pop100", "hr@1", "ndcg@1", "mrr@1", "ndcg@10", "users")] == [
        *(1, 1, 2, 0, 0, 1, 0)
    ]
    assert len({line.find("0.5000") for line in others}) == 1  # aligned


def test_the_best_validation_so_far_is_marked() -> None:
    assert validation_text(5, {"auroc": 0.7, "rows": 10}, "auroc", (5, 0.7), 80) == (
        "step 5  validation  auroc 0.7000  best so far"
    )
    undefined = validation_text(5, {"auroc": "undefined", "rows": 10}, "auroc", (0, None), 80)
    assert undefined == "step 5  validation  auroc undefined"


def test_a_corrupt_checkpoint_is_marked_and_its_problem_printed(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"step": 5, "epoch": 0, "batch": 5, "kind": "full", "saved_at": "2026-01-01T00:00:00Z", "health": "complete"}
    bad = {"step": 10, "health": "checkpoints/step-10: a file is missing."}
    print_checkpoints([{**facts, "bytes": 10**6, "is_best": False} for facts in (good, bad)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("complete")
    assert lines[3].endswith("CORRUPT")
    assert lines[4] == "checkpoints/step-10: a file is missing."


def test_what_a_terminal_would_act_on_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["title"], [["\x1b[2Ja\rb\n\u202ec"], ["\udcff Łódź"]])
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "-" * 20,
        r"\x1b[2Ja\rb\n\u202ec",
        r"\udcff Łódź",
    ]
    print_written_recommendations({"rows": 1, "users": 1, "output": "a\x1b[31m\n"})
    assert capsys.readouterr().out == "1 rows for 1 users: a\\x1b[31m\\n\n"


def test_a_terminal_gets_lines_that_break_at_spaces_and_a_rule_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printed.print_table(["check", "found"], [["cores", "two of them can be used"]])
    assert capsys.readouterr().out.splitlines() == [
        "check  found",
        "-----  -----------------",
        "cores  two of them can",
        "       be used",
    ]
    assert printed.fitted("one two three four five six\nseven") == "one two three four five\nsix\nseven"


def test_a_prepared_dataset_is_printed_with_the_command_that_trains_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    dense = ["price", "price is missing", "age", "age is missing", "is missing"]
    facts = {"name": "clicks", "kind": "clicks", "files": {}, "splits": {}, "truth": {}, "sparse": [{}], "dense": dense}
    printed.print_prepared(facts, "recmill train own/dlrm")
    first, second = capsys.readouterr().out.splitlines()
    assert "; 3 numeric (+ 2 missing flags), 1 categorical features; " in first
    assert second == "next: recmill train own/dlrm"


def predicted(**training: float | None) -> dict[str, Any]:
    """Return what `predict` returns for three features."""
    here = {"C1": 0.0, "C2": 0.125, "C3": 0.97}
    features = [
        {"feature": name, "kind": "unseen", "here": share, "training": training.get(name)}
        for name, share in here.items()
    ]
    return {"rows": 8, "output": "scores.csv", "features": features, "bad_values": {}}


def test_predictions_list_features_whose_training_shares_are_known_or_that_are_conspicuous(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_predictions(predicted(C1=0.0, C2=0.5, C3=0.25))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "% here / in training  unseen"
    assert [line.split(maxsplit=1) for line in lines[2:-1]] == [
        ["C1", "0.0 / 0.0"],
        ["C2", "12.5 / 50.0"],
        ["C3", "97.0 / 25.0"],
    ]
    print_predictions(predicted())
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["%", "here", "unseen"],
        ["------", "------"],
        ["C3", "97.0"],
        ["8", "rows", "scored:", "scores.csv"],
    ]
    print_predictions(predicted() | {"features": predicted()["features"][:2]})
    assert capsys.readouterr().out == "8 rows scored: scores.csv\n"


def test_titles_that_are_the_ids_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"rank": 1, "item": 7, "title": "7", "score": 0.5}, {"rank": 2, "item": 9, "title": "9", "score": 0.25}]
    printed.print_recommendations(rows)
    assert capsys.readouterr().out.splitlines()[0] == "rank  item  score"
    printed.print_recommendations([rows[0], rows[1] | {"title": "Heat"}])
    assert capsys.readouterr().out.splitlines()[0] == "rank  item  title  score"
