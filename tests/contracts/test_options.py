"""The flags of a command are the keyword arguments of its Python function, with the same defaults."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recmill import cli, registry
from recmill.commands import adopt, audit, download, evaluate, jobs, launch, open_run, prepare, recommend, split, train
from recmill.commands.options import dataset_checks
from recmill.config import Section
from recmill.datasets.inputs.flags import NewRows, NewRowsFlags, Reading, ReadingFlags
from recmill.jobs.place import Place

PLACE_FLAGS = {"nodes", "procs", "time", "account", "queue", "chain", "image", "mounts"}  # launch's **place_options


@pytest.mark.parametrize(
    ("options", "functions", "extra"),
    [
        (train.Options, [train.train], set[str]()),
        (recommend.Options, [recommend.recommend, recommend.recommend_all], {"is_for_all"}),  # chooses the function
        (launch.Options, [launch.launch], PLACE_FLAGS),
    ],
    ids=["train", "recommend", "launch"],
)
def test_options_have_the_names_and_defaults_of_the_keyword_arguments(
    options: type[Section], functions: list[Callable[..., Any]], extra: set[str]
) -> None:
    positional = {"config", "dataset", "frame"}  # arguments of the command line, or of Python alone
    expected: dict[str, Any] = {}
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name not in positional:
                expected[name] = parameter.default
    if "run" not in options.model_fields:
        del expected["run"]
    found = {name: field.default for name, field in options.model_fields.items()}
    assert found.keys() - expected.keys() == extra
    assert expected.keys() <= found.keys()
    for name, default in expected.items():
        if default is not inspect.Parameter.empty:
            assert found[name] == (list(default) if isinstance(default, tuple) else default), name
    assert all(field.description for field in options.model_fields.values())


def test_the_flags_of_a_place_are_keys_of_a_profile() -> None:
    assert Place.model_fields.keys() >= PLACE_FLAGS


@pytest.mark.parametrize("name", ["status", "logs", "cancel"])
def test_commands_about_jobs_take_what_their_functions_take(name: str) -> None:
    expected = {
        parameter.name: None if parameter.default is parameter.empty else parameter.default
        for parameter in inspect.signature(getattr(jobs, name)).parameters.values()
    }
    found = {option.name: option.to_info_dict()["default"] for option in cli.commands.commands[name].params}
    found.pop("as_json", None)  # how to print
    assert found == expected


@pytest.mark.parametrize(
    ("declared", "options"),
    [
        (adopt.AdoptOptions, adopt.Options),
        (audit.AuditOptions, audit.Options),
        (download.DownloadOptions, download.Options),
        (evaluate.EvaluateOptions, evaluate.Options),
        (split.SplitOptions, split.Options),
        (Reading, ReadingFlags),
        (NewRows, NewRowsFlags),
    ],
    ids=lambda value: value.__name__,
)
def test_type_checkers_know_the_options_of_a_command(declared: type, options: type[Section]) -> None:
    expected = {name: _values(field.annotation) for name, field in options.model_fields.items()}
    if "ks" in expected:
        expected["ks"].add(int)  # a single number, from Python
    assert {name: _values(kind) for name, kind in typing.get_type_hints(declared).items()} == expected


def test_type_checkers_know_the_options_of_all_datasets() -> None:
    expected: dict[str, set[Any]] = {}
    for dataset in registry.DATASETS:
        fields = registry.load(registry.DATASETS, dataset, "dataset").Options.model_fields
        for name, field in fields.items():
            expected.setdefault(field.alias or name, set()).update(_values(field.annotation))
    found = {name: _values(kind) for name, kind in typing.get_type_hints(prepare.PrepareOptions).items()}
    for name in ("input", "titles"):  # or a frame of one of several libraries
        assert str in expected.pop(name) and found.pop(name) == {Any}
    assert found.pop("schema") - expected.pop("schema") == {Path, Any}, "or what `guess_schema` returns"
    assert found == expected


def _values(annotation: Any) -> set[Any]:
    """Return the types and literals of an annotation, without limits of numbers."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _values(arguments[0])
    if origin is list:
        return {("list", *_values(arguments[0]))}
    if origin is typing.Literal:
        return {*arguments}
    return set().union(*map(_values, arguments)) if arguments else {annotation}


@pytest.mark.parametrize(
    ("declared", "function"),
    [(recommend.LoadingOptions, recommend.recommend), (recommend.RecommendOptions, open_run.Run.recommend)],
    ids=["recommend", "Run.recommend"],
)
def test_type_checkers_know_the_keyword_arguments_of(declared: type, function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    keyword_only = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "frame"}
    assert {
        name: getattr(kind, "__forward_arg__", kind) for name, kind in declared.__annotations__.items()
    } == keyword_only


def test_only_rank_0_reads_the_files_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [dataset_checks(verify) for verify in (None, True, False)] == ["once", "digests", "sizes"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [dataset_checks(verify) for verify in (None, True, False)] == ["sizes"] * 3
