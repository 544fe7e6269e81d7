"""How the command line makes flags from `Options` classes, and reports errors."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field, PositiveInt

import recmill
from recmill import cli
from recmill.commands.flags import Command, flags
from recmill.config import Section
from recmill.errors import DataError


class Options(Section):
    path: str = Field(description="Where to write.")
    num_rows: PositiveInt = Field(5, description="Rows.")
    sizes: list[PositiveInt] = Field([1, 20], description="Sizes.")
    order: Literal["file", "batch"] = "file"
    verify: bool = False
    protocols: list[str] | None = Field(None, json_schema_extra={"flags": ["--protocol", "--proto"]})
    overrides: list[str] = Field([], json_schema_extra={"flags": ["--set"], "metavar": "KEY=VALUE"})
    seed: int | None = None


def parsed(*arguments: str) -> Any:
    """What a command with these options receives, or what the command line answers instead."""
    received: dict[str, Any] = {}
    command = click.Command("test", callback=received.update, params=[*flags(Options)])
    result = CliRunner().invoke(command, list(arguments))
    return result.output if result.exit_code or "--help" in arguments else received


def test_flags_that_are_not_given_have_the_defaults_of_their_fields() -> None:
    assert parsed("--path", "p") == {
        "path": "p",
        "num_rows": 5,
        "sizes": [1, 20],
        "order": "file",
        "verify": False,
        "protocols": None,
        "overrides": (),
        "seed": None,
    }


def test_a_value_may_begin_with_a_dash() -> None:
    """Click would take the value of an option that it believes to be optional for the next option."""
    found = parsed("--path", "--", "--seed", "-1", "--proto", "-")
    assert (found["path"], found["seed"], found["protocols"]) == ("--", -1, ["-"])


def test_flags_set_the_fields_of_their_name_or_of_the_flags_that_the_field_declares() -> None:
    line = "--path p --num-rows 3 --sizes 4,5 --order batch --verify --proto full,uni100 --set a=1 --set b=2 --seed 0"
    assert parsed(*line.split()) == {
        "path": "p",
        "num_rows": 3,
        "sizes": [4, 5],
        "order": "batch",
        "verify": True,
        "protocols": ["full", "uni100"],
        "overrides": ("a=1", "b=2"),
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing option '--path'"),
        (["--path", "p", "--num-rows", "0"], "0 is not in the range x>=1"),
        (["--path", "p", "--sizes", "4,many"], "'4,many': expected integers separated by commas"),
        (["--path", "p", "--order", "random"], "'random' is not one of 'file', 'batch'"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(arguments: list[str], expected: str) -> None:
    assert expected in parsed(*arguments)


def test_help_lists_every_command_once_by_topic_within_80_columns() -> None:
    lines = CliRunner().invoke(cli.commands, ["--help"], terminal_width=80).output.splitlines()
    start = lines.index("Data:")
    listed = [line.split()[0] for line in lines[start:] if line.startswith("  ")]
    assert sorted(listed) == sorted(cli.commands.commands)
    assert all(line.endswith(".") and "..." not in line for line in lines[start:] if line.startswith("  "))
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line and line[0] != " "][2:] == [
        *("Data:", "Training:", "Results:", "Jobs:", "Installation:")
    ]


def test_commands_work_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "recmill", "prepare", "histories", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--user-column" in done.stdout


def test_help_shows_the_help_and_default_of_each_field() -> None:
    text = parsed("--help")
    for part in (
        "--path TEXT",
        "Where to write.  [required]",
        "[default: 5; x>=1]",
        "[default: 1,20]",
        "--set KEY=VALUE",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("command", "default"), [("predict RUN", "as in training"), ("prepare histories", "found in its first 1,000 lines")]
)
def test_flags_for_unusual_texts_come_last_in_the_help_with_the_default_of_the_command(
    command: str, default: str
) -> None:
    text = CliRunner().invoke(cli.commands, [*command.split(), "--help"]).output
    assert text.index("--input") < text.index("--columns NAMES") < text.index("--separator")
    assert "--decimal" not in text[: text.index("--input")]
    assert "--help" in text[text.index("--skip-lines") :] and "--output" not in text[text.index("--skip-lines") :]
    assert default in " ".join(text[text.index("--separator") :].split("--quotes")[0].split())
    assert "of new rows" not in text


@pytest.mark.parametrize("name", [name for name, found in cli.commands.commands.items() if isinstance(found, Command)])
def test_every_option_of_a_command_is_a_flag_with_help(name: str) -> None:
    found = cli.commands.commands[name]
    parameters = found.get_params(click.Context(found))
    assert all(parameter.help for parameter in parameters if isinstance(parameter, click.Option))
    options = sys.modules[f"recmill.commands.{name.replace('-', '_')}"].Options
    assert {parameter.name for parameter in parameters} >= set(options.model_fields)
    assert CliRunner().invoke(cli.commands, [name, "--help"]).output.startswith("Usage:")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("no such row"), 3, "recmill: data error: no such row\n"),
        (DataError("no 'a\x1b[2J'\n  \u202ex\r"), 3, "recmill: data error: no 'a\\x1b[2J'\n  \\u202ex\\r\n"),
        (KeyError("x"), 1, "recmill: internal error; please report it with --debug output: KeyError: 'x'\n"),
        (KeyboardInterrupt(), 130, "recmill: interrupted; what was committed before is complete\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli.commands, "main", fail)
    monkeypatch.setattr(sys, "argv", ["recmill"])
    assert cli._run([]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "千と千尋 Amélie"),
        ("latin-1", r"\u5343\u3068\u5343\u5c0b Amélie"),
        ("ascii", r"\u5343\u3068\u5343\u5c0b Am\xe9lie"),
    ],
)
def test_what_the_terminal_cannot_show_is_escaped_and_json_is_always_ascii(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"item": 7, "title": "千と千尋 Amélie", "score": 1.0}]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["recmill", "recommend", "run", "--history", "7"])
    monkeypatch.setattr(cli, "leave", sys.exit)  # called if another test has imported torch
    monkeypatch.setattr(recmill, "recommend", lambda *_, **__: rows, raising=False)
    monkeypatch.setattr("recmill.observe.log.set_up_console", lambda: None)  # later tests set up their own logging
    monkeypatch.setattr(cli, "leave", sys.exit)  # if another test has imported torch here
    with pytest.raises(SystemExit) as table:
        cli.main()
    assert (table.value.code, shown in written.getvalue().decode(encoding)) == (0, True)
    written.truncate(0)
    written.seek(0)
    sys.argv.append("--json")
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(written.getvalue().decode("ascii")) == rows


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("stdout", ["closed pipe", "/dev/full"])
def test_a_command_that_wrote_files_succeeds_even_if_nobody_reads_its_output(stdout: str, tmp_path: Path) -> None:
    file = closed_pipe() if stdout == "closed pipe" else os.open(stdout, os.O_WRONLY)
    command = [sys.executable, "-m", "recmill", "prepare", "random-clicks", "--rows", "100", "--output", "data"]
    done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "dataset.json").is_file()
    shown = [sys.executable, "-m", "recmill", "audit", "data"]  # nothing but output
    done = subprocess.run(shown, stdout=file, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    os.close(file)
    assert done.returncode == (141 if stdout == "closed pipe" else 5), done.stderr
    assert "Traceback" not in done.stderr


def test_a_deleted_working_directory_is_one_clear_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$0" -P -m recmill results run', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=gone)
    assert done.returncode == 5, done.stderr
    assert done.stderr == "recmill: resource error: The current directory was deleted. Change to one that exists.\n"


WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = sys.modules['torchrec'] = None; from recmill.cli import main; main()"
)


def answer(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where torch cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_version_names_the_packages_that_matter_without_importing_torch() -> None:
    from importlib import metadata

    done = answer("--version")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert found.pop("recmill") == recmill.__version__
    assert found.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "torchrec", "polars"} < found.keys()
    assert any(name.startswith("fbgemm-gpu") for name in found)
    assert found == {name: metadata.version(name) for name in found}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("recmill ev", ["plain,evaluate"]),
        ("recmill train --proc", ["plain,--procs"]),
        ("recmill prepare random-", ["plain,random-clicks", "plain,random-histories"]),
        ("recmill configs show quickstart/d", ["plain,quickstart/dlrm"]),
    ],
)
def test_a_shell_completes_commands_flags_and_names_without_importing_torch(words: str, expected: list[str]) -> None:
    position = str(len(words.split()) - 1)
    done = answer(COMP_WORDS=words, COMP_CWORD=position, _RECMILL_COMPLETE="bash_complete")
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_a_flag_that_is_a_key_of_the_config_is_named_with_set() -> None:
    def printed(flag: str, value: str = "3") -> str:
        command = [sys.executable, "-m", "recmill", "train", "c.toml", "--run", "r", flag, value, "4"]
        return subprocess.run(command, capture_output=True, text=True).stderr

    assert "No such option '--config'. Give CONFIG without a flag: recmill train CONFIG" in printed("--config")
    assert "No such option '--gpus'. Did you mean '--procs N'? It is the number of processes" in printed("--gpus")
    assert "No such option '--epochs'. Did you mean --set train.num_epochs=VALUE?" in printed("--epochs")
    assert "Did you mean --set optim.dense.lr=VALUE or --set optim.tables.lr=VALUE?" in printed("--lr")
    assert "No such option '--data'. Did you mean --set data.path=VALUE?" in printed("--data")
    assert "--procs" in printed("--proc")
    assert "No such option '--sets'. Did you mean '--set'?" in printed("--sets")
    assert printed("--set", "data.path").endswith("Error: --set takes KEY=VALUE: --set data.path=4\n")
    assert "unexpected extra argument (4)" in printed("--set", "data.path=3")
