"""What a program of another system is: its flags, and the commands and config that mean the same here."""

import argparse
import copy
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from recmill.errors import ConfigError
from recmill.registry import nearest

Values = dict[str, Any]
BOTH_RATES = "optim.dense.lr, optim.tables.lr"
BOTH_DECAYS = "optim.dense.weight_decay, optim.tables.weight_decay"


def ints(text: str) -> list[int]:
    """Parse integers separated by commas."""
    return [int(part) for part in text.split(",")]


@dataclass(frozen=True)
class Flag:
    """A flag (--name), a positional argument (name), or a variable or key of a file (name) of another program.

    `kind` converts its text; bool: a flag without a value. `keys` are the config keys, separated by commas, that get
    its value, times the number of processes if `is_per_process`. If it `is_refused`, `ours` is the reason and the
    alternative. The table in docs/ shows `ours`, or else the keys, and `note`.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any = None
    keys: str = ""
    note: str = ""
    ours: str = ""
    choices: tuple[str, ...] = ()
    is_per_process: bool = False
    is_required: bool = False
    is_refused: bool = False

    @property
    def dest(self) -> str:
        return self.name.lstrip("-")


@dataclass(frozen=True)
class Step:
    """A call of a function of Recmill, which is also a command: `recmill COMMAND ...`."""

    command: str
    arguments: Values

    @property
    def words(self) -> list[str]:
        """The command line. The config of `train` is the file `config_file`."""
        words = ["recmill", self.command]
        for name, value in self.arguments.items():
            flag = f"--{name.replace('_', '-')}"
            if name in ("name", "path") or self.command == "trace":
                words.append(str(value))
            elif name == "config":
                words.append(self.config_file)
            elif value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        return words

    @property
    def config_file(self) -> str:
        return f"{Path(self.arguments['run']).name}.toml"


@dataclass(frozen=True)
class Plan:
    """The steps that do what the other program would do. `notes`: where their results will differ, and why."""

    steps: list[Step]
    notes: list[str] = field(default_factory=list)

    def as_script(self) -> str:
        """Return the steps as a shell script."""
        lines = []
        for step in self.steps:
            if "config" in step.arguments:
                toml = tomli_w.dumps(step.arguments["config"])
                lines.append(f"cat > {shlex.quote(step.config_file)} <<'END'\n{toml}END")
            lines.append(shlex.join(step.words))
        return "\n".join([*lines, *(f"# {note}" for note in self.notes)])


@dataclass(frozen=True)
class Given:
    """A command line of a program, and the number of processes that run it. given[name] is the value of any flag."""

    program: "Program"
    values: Values  # of the flags that were given, and of all variables
    procs: int
    is_launched: bool  # by torchrun, mpiexec, ...: otherwise training starts `procs` processes
    run: str | None  # run directory, if the user has named one

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        flag = {flag.dest: flag for flag in self.program.flags}[name]
        return False if flag.kind is bool else flag.default

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the config keys that flags name, with the values of the flags that have one."""
        config: dict[str, Any] = {}
        for flag in self.program.flags:
            value = copy.deepcopy(self[flag.dest])
            for key in filter(None, flag.keys.split(", ")) if value is not None else ():
                put(config, key, value * self.procs if flag.is_per_process else value)
        return config

    def new_directory(self, kind: str, *facts: Any) -> str:
        """Return the directory for a run or a dataset that is determined by these facts: repeating a command finds it.

        All processes of a job must arrive at the same name.
        """
        if kind == "run" and self.run:
            return self.run
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
        parent = Path(self.run).parent if self.run else Path("runs")
        return str(parent / f"{self.program.stem}{'-data' if kind == 'data' else ''}-{digest}")

    def train(self, config: dict[str, Any], **options: Any) -> Step:
        """Return the step that trains with this config, and other options of `recmill train`."""
        facts = [config, options] if options else [config]
        arguments: Values = {"config": config, "run": self.new_directory("run", *facts), **options}
        return Step("train", arguments if self.is_launched else {**arguments, "procs": self.procs})


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key like train.seed."""
    *sections, last = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. Its flags are listed in docs/coming-from.md.")


@dataclass(frozen=True)
class Program:
    """`variables`: those of its environment that it reads. `plan` says what to do for the values of all its flags."""

    name: str
    flags: tuple[Flag, ...]
    plan: Callable[[Given], Plan]
    variables: tuple[Flag, ...] = ()

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Values:
        """Return the value of each flag that is given and of each variable; raise ConfigError for unknown ones."""
        parser = _Parser(prog=self.name, add_help=False, argument_default=argparse.SUPPRESS)
        for flag in self.flags:
            if flag.kind is bool:
                parser.add_argument(flag.name, action="store_true")
                continue
            options: dict[str, Any] = {"type": flag.kind, "choices": flag.choices or None}
            if flag.name.startswith("-"):
                options["required"] = flag.is_required
            elif not flag.is_required:
                options |= {"nargs": "?", "default": flag.default}  # argparse would convert the text of SUPPRESS
            parser.add_argument(flag.name, **options)
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise self._unknown(unknown[0].partition("=")[0])
        given = vars(parsed)
        for flag in self.flags:
            if given.get(flag.dest) == []:  # argparse makes this of '--'
                parser.error(f"argument {flag.name}: expected a value")
            if flag.is_refused and given.get(flag.dest, flag.default) != flag.default:
                raise ConfigError(f"{self.name}: {flag.name} is {flag.ours}.")
        return {**given, **{flag.dest: self.variable(flag, environment) for flag in self.variables}}

    def variable(self, flag: Flag, environment: Mapping[str, str]) -> Any:
        """Return the value of a variable; one that is empty counts as not set, as in a shell's ${NAME:-default}."""
        text = environment.get(flag.name)
        if not text:
            if flag.is_required:
                raise ConfigError(f"{self.name}: the variable {flag.name} is not set. Set it: {flag.note}.")
            return flag.default
        try:
            return flag.kind(text)
        except ValueError:
            raise ConfigError(f"{self.name}: {flag.name}={text} is not a number. Correct it.") from None

    def _unknown(self, word: str) -> ConfigError:
        near = nearest(word, [flag.name for flag in self.flags])
        remedy = f"Did you mean '{near[0]}'?" if near else "docs/coming-from.md lists its flags."
        return ConfigError(f"{self.name} has no flag '{word}'. {remedy}")
