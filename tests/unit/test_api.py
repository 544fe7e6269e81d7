"""What `import recmill` offers: every name is listed and typed, and none costs anything before it is used."""

import ast
import inspect
import json
import pickle
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_type

import numpy as np
import pytest

import recmill
from recmill import errors
from recmill.commands import keywords
from recmill.config import load_config
from recmill.errors import ConfigError

if TYPE_CHECKING:  # this part is checked by mypy and never run
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.commands.recommend import Recommendation
    from recmill.metrics.own import Metrics

    def a_users_script() -> None:
        assert_type(recmill.recommend("r", [1]), list[Recommendation])
        assert_type(recmill.recommend("r", users="7", k=3)[0]["score"], float)
        assert_type(recmill.recommend("r", "1,2", frame="polars"), pl.DataFrame)
        assert_type(recmill.recommend("r", "1,2", frame="pandas"), pd.DataFrame)
        assert_type(recmill.evaluate("r", procs=2), Metrics)
        assert_type(recmill.evaluate("r")["auroc"] - 0.5, float)
        assert_type(recmill.evaluate("r")["rows"] + recmill.evaluate("r")["step"], int)
        assert_type(recmill.evaluate("r")["checkpoint"], str)
        assert_type(recmill.train("c.toml", "r")["test"]["full/hr@10"] > 0.1, bool)
        assert_type(recmill.evaluate("r", per_user=True), pl.DataFrame)
        assert_type(recmill.evaluate("r", per_user=True, frame="arrow"), pa.Table)
        assert_type(recmill.results("r", "s"), pl.DataFrame)
        assert_type(recmill.results(["r", Path("s")]), pl.DataFrame)
        assert_type(recmill.results("r", frame="pandas"), pd.DataFrame)
        assert_type(recmill.history("r"), pl.DataFrame)
        run = recmill.open_run("r")
        assert_type(run.recommend([1, 2]), pl.DataFrame)
        assert_type(run.recommend(users=[1], frame="arrow"), pa.Table)
        assert_type(run.predict(pl.DataFrame()), pl.DataFrame)
        assert_type(run.predict(pd.DataFrame(), keep=["a"], on_bad_value="missing", frame="pandas"), pd.DataFrame)
        assert_type(run.predict(pa.table({}), frame="arrow"), pa.Table)
        assert_type(run.evaluate(), Metrics)
        assert_type(run.evaluate(per_user=True), pl.DataFrame)
        assert_type(run.history(frame="pandas"), pd.DataFrame)
        recmill.prepare("histories", "d", input="plays.csv", user_column="user", item_column="item", k_core=5)
        recmill.prepare("histories", "d", user_colum="user")  # type: ignore[call-arg]
        recmill.evaluate("r", split="validation")  # type: ignore[call-overload]
        recmill.trian("c.toml", "r")  # type: ignore[attr-defined]


def test_every_name_is_listed_declared_for_type_checkers_and_annotated() -> None:
    tree = ast.parse(Path(recmill.__file__).read_text())
    declared = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*recmill.__all__} == declared - {"TYPE_CHECKING", "Any"}
    assert {*recmill.__all__, "__version__"} == {*dir(recmill)}
    assert (Path(recmill.__file__).parent / "py.typed").is_file()
    for name in recmill.__all__:
        value = getattr(recmill, name)
        functions = (
            [value] if inspect.isfunction(value) else [f for _, f in inspect.getmembers(value, inspect.isfunction)]
        )
        for function in functions:
            signature = inspect.signature(function)
            assert function.__doc__ or function.__name__.startswith("__"), function
            assert signature.return_annotation is not inspect.Signature.empty, function
            parameters = [p for p in signature.parameters.values() if p.name != "self"]
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters), function


def test_help_lists_the_options_of_every_function() -> None:
    for name in {*recmill.__all__} - {"Run", "prepare"}:
        assert "options" not in inspect.signature(getattr(recmill, name)).parameters, name
    for function in (recmill.evaluate, recmill.Run.evaluate):
        assert "bootstrap: int = 0, procs: int = 1" in pydoc.plain(pydoc.render_doc(function))
    assert "skip_lines: int | None = None" in pydoc.plain(pydoc.render_doc(recmill.predict))
    shown = pydoc.plain(pydoc.render_doc(recmill.prepare))
    assert "overwrite: bool = False, **options:" in shown and "Ellipsis" not in shown


def test_importing_and_listing_names_imports_nothing_else() -> None:
    code = "import sys, recmill; dir(recmill); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "polars", "numpy", "pydantic", "recmill.commands"} & {*done.stdout.split()}


@pytest.mark.parametrize("name", sorted({*recmill.__all__} - {"Run"}))
def test_an_unknown_keyword_argument_is_an_error_that_names_the_known_ones(name: str) -> None:
    arguments = ["synthetic-clicks", "d"] if name == "prepare" else []
    with pytest.raises(ConfigError, match=r"^unknown (argument|option) of \S+ 'no_such_name'\. Known: \w+"):
        getattr(recmill, name)(*arguments, no_such_name=1)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: recmill.train("quickstart/dlrm", "r", procs="2"), "procs: expected int, got '2'."),  # type: ignore[arg-type]
        (lambda: recmill.recommend("r", [1], k=2.5), "k: expected int, got 2.5."),  # type: ignore[call-overload]
        (lambda: recmill.open_run(5), "path: expected str or Path, got 5."),  # type: ignore[arg-type]
        (lambda: recmill.results([5]), "RUN: expected str or Path, got 5."),  # type: ignore[list-item]
        (lambda: recmill.report(5), "RUN: expected str or Path, got 5."),  # type: ignore[arg-type]
        (lambda: recmill.export_rows("r", "t", "o", step="1"), "step: expected int, got '1'."),  # type: ignore[arg-type]
        (lambda: recmill.plan("quickstart/dlrm", ids_per_row=3), "give a list, like [3]"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_a_wrong_type_is_an_error_that_names_the_argument(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        call()


def test_errors_name_arguments_and_commands_have_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "names_flags", False)
    (tmp_path / "l.csv").write_text('y,a\n1,"b\n')
    for call, expected in (
        (lambda: recmill.prepare("clicks", tmp_path / "d", input="l.csv"), "Neither `schema` nor `label` is given"),
        (lambda: recmill.evaluate("r", split="tset"), "`split`: should be 'val' or 'test', got 'tset'."),  # type: ignore[call-overload]
        (lambda: recmill.recommend(tmp_path, [1], keep=["a"]), "`keep` names columns of `input`. Give both."),
        (lambda: recmill.evaluate("r", per_user_file=""), "`per_user_file` is empty."),
        (lambda: recmill.recommend(tmp_path / "r", [1]), "`recmill train` was given as `run`."),
        (lambda: recmill.guess_schema(tmp_path / "l.csv", "y"), "ignore quotes (`quotes=False`)."),
    ):
        with pytest.raises(errors.UserError) as found:
            call()
        assert expected in str(found.value)
    text = "--k 3 in --keep. Run: recmill prepare x --input y.csv --k 1. Or --input; or: recmill run --k 5"

    @keywords.named_arguments
    def fails(k: int, input: str) -> None:
        raise ConfigError(text)

    with pytest.raises(ConfigError) as shown:
        fails(1, "")
    expected = "`k=3` in --keep. Run: recmill prepare x --input y.csv --k 1. Or `input`; or: recmill run --k 5"
    assert str(shown.value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Use --separator ';'.", "Use `separator=';'`."),
        ("--schema my.toml: no such file.", "`schema='my.toml'`: no such file."),
        ("--schema is missing: name it.", "`schema` is missing: name it."),
        ("--rows 1000: give 2.5 or more.", "`rows=1000`: give 2.5 or more."),
        ("--rows -1: give more.", "`rows=-1`: give more."),
        ("Give --schema FILE to read.", "Give `schema='FILE'` to read."),
        ("--rows 1st is no number", "`rows` 1st is no number"),
        ("--format csv needs --no-quotes", "`format='csv'` needs `quotes=False`"),
        ("--format csvs, --quotes", "`format` csvs, `quotes=True`"),
        ("--keep a,b: 'b' occurs twice.", "`keep=['a', 'b']`: 'b' occurs twice."),
        ("--keep 'a': give two.", "`keep=['a']`: give two."),
        (
            "Give --set train.seed=1, or --set data.path=d.",
            "Give `overrides={'train.seed': 1}`, or `overrides={'data.path': 'd'}`.",
        ),
        ("--no-user needs --unknown 'x'.", "`no_user=True` needs --unknown 'x'."),
    ],
)
def test_flags_with_values_are_written_as_arguments(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "names_flags", False)

    @keywords.named_arguments
    def fails(
        separator: str, schema: "str | Path", rows: int, format: Literal["csv", "jsonl"] | None, quotes: bool | None,
        keep: list[str] | None, overrides: Any, no_user: bool,
    ) -> None:  # fmt: skip
        raise ConfigError(text)

    with pytest.raises(ConfigError) as shown:
        fails("", "", 1, None, None, None, (), no_user=False)
    assert str(shown.value) == expected


def test_methods_of_a_run_name_what_was_meant() -> None:
    for method, wrong, meant in (
        ("recommend", "user", "users"),
        ("evaluate", "proc", "procs"),
        ("history", "fram", "frame"),
    ):
        with pytest.raises(ConfigError, match=rf"unknown argument of {method} '{wrong}'\. Did you mean '{meant}'\?"):
            getattr(recmill.Run, method)(None, **{wrong: 1})


def test_a_key_of_the_config_given_to_train_is_named_as_an_override() -> None:
    with pytest.raises(ConfigError, match=r'unknown argument of train \'epochs\'.*overrides={"train.num_epochs": 3}'):
        recmill.train("c.toml", "r", epochs=3)  # type: ignore[call-arg]
    both = r'overrides={"optim.dense.lr": 3} or overrides={"optim.tables.lr": 3}\.'
    with pytest.raises(ConfigError, match=both):
        recmill.train("c.toml", "r", lr=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'proc'\. Did you mean 'procs'\?"):
        recmill.train("c.toml", "r", proc=3)  # type: ignore[call-arg]


def test_overrides_may_be_a_dictionary_flat_or_nested() -> None:
    flat = {"optim.dense.lr": 0.5, "train.precision": "bfloat16", "eval.ks": [1, 7], "sharding.tables.a": "row_wise"}
    nested = {"optim": {"dense": {"lr": np.float64(0.5)}}, "train": {"precision": "bfloat16"}, "eval.ks": (1, 7)}
    texts = ["optim.dense.lr=0.5", "train.precision=bfloat16", "eval.ks=[1, 7]", "sharding.tables.a=row_wise"]
    expected = load_config("quickstart/dlrm", texts)
    assert load_config("quickstart/dlrm", flat) == expected
    assert load_config("quickstart/dlrm", nested | {"sharding": {"tables": {"a": "row_wise"}}}) == expected
    assert (expected.settings.optim.dense.lr, expected.settings.eval.ks) == (0.5, [1, 7])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"train": {"presicion": "bfloat16"}}, "unknown key 'train.presicion'. Did you mean 'train.precision'?"),
        ({"train.precision": "bfloat"}, "unknown value 'bfloat'. Did you mean 'bfloat16'?"),
        ({"train.max_steps": None}, "'train.max_steps' is None. Leave it out to keep the config's value."),
        (7, "overrides: expected a dictionary or a list of texts"),
        ([("train.seed", 1)], "overrides: expected a dictionary or a list of texts"),
    ],
)
def test_wrong_overrides_are_errors_that_name_what_was_meant(overrides: Any, expected: str, tmp_path: Path) -> None:
    for function, arguments in ((recmill.train, [tmp_path / "r"]), (recmill.plan, [])):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            function("quickstart/dlrm", *arguments, overrides=overrides)
    assert not (tmp_path / "r").exists()


def test_in_a_notebook_a_guess_and_a_dataset_look_like_what_the_command_prints(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("click,site\n" + "1,a\n0,b\n0,a\n1,b\n" * 30)
    guessed = recmill.guess_schema(log, "click")
    header, _, *rows = (re.split("  +", line) for line in repr(guessed).splitlines())
    assert header == ["column", "guess", "why"]
    assert rows == [["click", "label", "clicks: 1, true"], ["site", "categorical", "text, 2 different values"]]
    about = recmill.prepare("clicks", tmp_path / "d", input=log, schema=guessed)
    assert repr(about).startswith("clicks: rows train 96, val 12, test 12; 0 numeric, 1 categorical features")
    for found in (guessed, about):
        assert isinstance(found, dict)
        assert json.loads(json.dumps(found)) == found == pickle.loads(pickle.dumps(found))
