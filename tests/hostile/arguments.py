"""Bad arguments: paths, numbers, contradictory flags and configs."""

import datetime
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import tomli_w

from .sandbox import SECONDS, Sandbox
from .verdict import Finding, judge, shown
from .worlds import PREPARED, Worlds, config

# A command line in a world; {} is the path in question.
PATHS = [
    ("clicks", ("train", "{}", "--run", "new")),
    ("clicks", ("train", "config.toml", "--run", "{}")),
    ("clicks", ("train", "config.toml", "--run", "new", "--init-from", "{}")),
    ("clicks", ("train", "config.toml", "--run", "new", "--set", "data.path={}")),
    ("clicks", ("evaluate", "{}")),
    ("clicks", ("checkpoint", "list", "{}", "--json")),
    ("clicks", ("checkpoint", "list", "{}")),
    ("clicks", ("checkpoint", "verify", "{}")),
    ("clicks", ("checkpoint", "inspect", "{}")),
    ("clicks", ("checkpoint", "rows", "run", "table_C1", "--output", "{}")),
    ("clicks", ("checkpoint", "write-rows", "run", "table_C1", "--input", "{}", "--output", "new")),
    ("clicks", ("results", "{}")),
    ("clicks", ("results", "run", "{}")),
    ("clicks", ("export-metrics", "{}", "--to", "csv")),
    ("clicks", ("export-metrics", "run", "--to", "csv", "--output", "{}")),
    ("clicks", ("plot", "{}")),
    ("clicks", ("plot", "run", "--output", "{}")),
    ("clicks", ("plan", "{}")),
    ("clicks", ("plan", "config.toml", "--rows", "{}")),
    ("clicks", ("plan", "config.toml", "--device", "{}.toml")),
    ("clicks", ("plan", "config.toml", "--plot", "{}")),
    ("clicks", ("plan", "--calibrate", "{}")),
    ("clicks", ("report", "{}")),
    ("clicks", ("compare", "run", "{}")),
    ("clicks", ("report", "run", "--output", "{}")),
    ("clicks", ("audit", "{}")),
    ("clicks", ("launch", "{}", "--run", "new", "--on", "slurm", "--dry-run")),
    ("clicks", ("launch", "config.toml", "--run", "{}", "--on", "pbs", "--dry-run")),
    ("clicks", ("launch", "config.toml", "--run", "new", "--on", "{}", "--dry-run")),
    ("clicks", ("launch", "config.toml", "--run", "new", "--on", "{}.toml", "--dry-run")),
    ("clicks", ("status", "{}")),
    ("clicks", ("logs", "{}")),
    ("clicks", ("cancel", "{}")),
    ("histories", ("recommend", "{}", "--history", "film 4")),
    ("histories", ("recommend", "run", "--all", "--output", "{}")),
    ("raw", ("adopt", "{}")),
    ("raw", ("adopt", "npys", "--output", "{}")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--in_memory_binary_criteo_path={}")),
    ("raw", ("run-like", "npy_preproc_criteo.py", "--", "--input_dir=logs", "--output_dir={}")),
    ("raw", ("split", "--input", "{}", "--output", "out", "--days", "2", "--lines", "20")),
    ("raw", ("split", "--input", "logs/day_0", "--output", "{}", "--days", "2", "--lines", "20")),
    ("raw", ("prepare", "criteo", "--input", "{}", "--output", "out")),
    ("raw", ("prepare", "criteo", "--input", "logs", "--output", "{}")),
    ("raw", ("prepare", "criteo", "--input", "npys", "--sparse-input", "{}", "--output", "out")),
    (
        "raw",
        ("prepare", "histories", "--input", "{}", "--user-column", "user", "--item-column", "film", "--output", "o"),
    ),
    ("raw", ("prepare", "movielens", "--input", "{}", "--output", "out")),
    ("raw", ("prepare", "goodreads", "--input", "{}", "--output", "out")),
    ("raw", (*PREPARED["clicks"], "--output", "{}")),
    ("raw", (*PREPARED["clicks"], "--output", "{}", "--overwrite")),
]
PATH_FLAGS = ("input", "sparse_input", "output", "run", "init_from")
BAD_PATHS = [
    *["", " ", ".", "..", "nowhere", "nowhere/at/all", "~", "-", "--", "/dev/null", "/dev/full", "/dev/null/x"],
    *["/proc/x", "file", "file/below", "empty", "empty/", "loop", "loop/below", "fifo", "dangling", "*", "%s"],
    *[
        "a\nb",
        "'\"",
        "a" * 300,
        "a/" * 3000,
        "../" * 500 + "dev/null/nowhere",
        "\x01\x1b[31mred",
        "\udcff\udcfe",
        "é" * 120,
    ],
]
INTEGERS = [
    *["0", "-1", str(2**63), str(10**30), "", "1.5", "nan", "0x10", "1e3", "٣", "9" * 5000, "-0", "1,1", ",", "1,,2"],
]
FLOATS = ["nan", "inf", "-inf", "-1", "0", "1", "1e308", "1e-320", "", "abc", "1e999"]
TEXTS = ["", " ", "0", "-1GB", "1e400GB", "nan", "10" * 200 + "GB", "GB", "a,b", ",", "\udcff", "é"]
CONTRADICTIONS = [
    ("clicks", ("train", "config.toml", "--run", "new", "--allow-partial")),
    ("clicks", ("train", "config.toml", "--run", "new", "--init-from", "new")),
    ("clicks", ("train", "config.toml", "--run", "data")),
    ("clicks", ("train", "config.toml", "--run", "run", "--set", "train.seed=5")),
    ("clicks", ("train", "config.toml", "--run", "run/checkpoints")),
    ("clicks", ("train", "config.toml")),
    *(
        ("clicks", ("launch", "config.toml", "--run", "new", "--dry-run", *arguments))
        for arguments in [
            (),
            ("--on", "slum"),
            ("--on", "config.toml"),  # no profile
            ("--on", "slurm", "--image", "x"),
            ("--on", "slurm", "--chain", "2"),
            ("--on", "slurm", "--time", "00:00:10"),
            ("--on", "slurm", "--queue", "a\n#SBATCH --uid=0"),
            ("--on", "slurm", "--account", "--uid=0"),
            ("--on", "mpi", "--nodes", "2"),
            ("--on", "kubernetes"),
            ("--on", "kubernetes", "--image", "i", "--mount", "disk:/elsewhere"),
            ("--on", "slurm", "--nodes", "1000000"),
            ("--on", "local", "--init-from", "nowhere"),
            ("--on", "local", "--allow-partial"),
        ]
    ),
    ("clicks", ("launch", "config.toml", "--run", "run", "--on", "local", "--dry-run")),  # finished
    ("clicks", ("logs", "data")),
    ("clicks", ("evaluate", "run", "--k", "5")),
    ("clicks", ("evaluate", "run", "--split", "train")),
    ("clicks", ("recommend", "run", "--history", "1")),
    ("clicks", ("checkpoint", "inspect", "run", "--step", "4")),
    ("histories", ("recommend", "run", "--history", "film 4", "--users", "user 1")),
    ("histories", ("recommend", "run", "--all")),
    ("histories", ("recommend", "run", "--output", "x")),
    ("histories", ("recommend", "run", "--history", "")),
    ("histories", ("recommend", "run", "--history", ",")),
    ("histories", ("recommend", "run", "--users", "\udcff")),
    ("histories", ("recommend", "run", "--users", "no\nsuch\x1b[31m user")),
    ("histories", ("recommend", "run", "--history", ",".join(f"film {i}" for i in range(50_000)))),
    ("histories", ("evaluate", "run", "--k", "0")),
    ("histories", ("evaluate", "run", "--protocol", ",")),
    ("histories", ("audit", "data")),
    (
        "raw",
        ("prepare", "histories", "--input", "films.csv", "--user-column", "x", "--item-column", "y", "--output", "o"),
    ),
    ("raw", ("prepare", "nothing", "--output", "o")),
    ("raw", ("download", "nothing", "--output", "o")),
    ("raw", ("nothing",)),
    ("raw", ("run-like", "nothing")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--nothing")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--seed", "-1")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--batch_size", "0")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--num_embeddings", "-5")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--num_embeddings_per_feature", "3,4")),
    ("raw", ("run-like", "dlrm_main.py", "--", "--over_arch_layer_sizes", ",")),
    ("raw", ("run-like", "2_preprocess_dataset.sh")),
]
# Errors with exit code 1: an extreme value that is valid, and a run that has not ended
NEITHER_KIND = ("no longer a finite number", "values that are not finite numbers", "no results yet")
PROCS = ["0", "-1", "17", "100000", str(2**63), "9" * 5000, "x"]
GARBAGE: dict[str, bytes] = {
    "BOM": b"\xef\xbb\xbf[model]\nname = 'dlrm'\n",
    "UTF-16": "[model]\nname = 'dlrm'\n".encode("utf-16"),
    "binary": bytes(range(256)) * 50,
    "empty": b"",
    "zeros": bytes(100_000),
    "nested lists": b"a = " + b"[" * 100_000,
    "nested tables": b"a = " + b"{a = " * 50_000,
    "closed nesting": b"a = " + b"[" * 5_000 + b"]" * 5_000,
    "deep key": b"a" + b".a" * 50_000 + b" = 1",
    "deep table": b"[a" + b".a" * 5_000 + b"]\nb = 1",
    "long integer": b"[train]\nseed = " + b"9" * 5_000,
    "many keys": b"[train]\n" + b"".join(b"k%d = 1\n" % number for number in range(20_000)),
    "many problems": b"".join(b"k%d = 1\n" % number for number in range(2_000)),
    "model is a number": b"model = 1\n",
    "model is a list": b"[[model]]\nname = 'dlrm'\n",
    "name is a list": b"[model]\nname = ['dlrm']\n",
    "sections are numbers": b"data = 1\ntrain = 2\neval = 3\n[model]\nname = 'dlrm'\n",
    "escapes": b'[model]\nname = "\\u0000\\u001b[31m"\n',
    "lone surrogate": b'[model]\nname = "\\ud800"\n',
    "date": b"[model]\nname = 1979-05-27T07:32:00Z\n",
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.",
}
LINKED = ["/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem", "/proc/self/environ", "empty", "loop"]
VALUES: list[Any] = [
    *("text", "", -1, 0, 1, 2**31, 2**63, 10**30, 1.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e308, 1e-320),
    *(True, [], [1, -1], [10**30], [2**31], ["a"], {"a": 1}, datetime.date(1979, 5, 27), "\x1b[31m", "é"),
]


@dataclass(frozen=True)
class Case:
    world: str
    arguments: tuple[str, ...]
    names: tuple[str, ...] = ()  # an error must contain one of them
    config: Any = None  # content of config.toml: bytes, a mapping, or the target of a link
    codes: tuple[int, ...] = (0, 2, 3, 4, 5)  # exit codes that are right
    seconds: float = SECONDS  # after which it hangs
    is_launched: bool = True  # as torchrun would do; otherwise the command starts its own processes


def _path_case(world: str, arguments: tuple[str, ...], path: str) -> Case:
    name = Path(path).name
    is_plain = name.isascii() and name.isprintable() and 3 < len(path) < 100 and "'" not in path
    return Case(world, tuple(argument.replace("{}", path) for argument in arguments), (name,) if is_plain else ())


def _flag_cases() -> Iterator[Case]:
    """Yield odd values for every flag that takes a number or a text."""
    import recmill.cli

    top = recmill.cli.commands
    films = ("--input", "films.csv", "--user-column", "user", "--item-column", "film")
    bases = [
        ("clicks", ("train", "config.toml", "--run", "new")),
        ("clicks", ("launch", "config.toml", "--run", "new", "--on", "slurm", "--dry-run")),
        ("clicks", ("logs", "run")),
        ("histories", ("evaluate", "run")),
        ("histories", ("recommend", "run", "--history", "film 4")),
        ("clicks", ("audit", "data")),
        ("clicks", ("checkpoint", "inspect", "run")),
        ("raw", ("adopt", "npys")),
        ("raw", ("split", "--input", "logs/day_0", "--output", "out")),
        ("raw", ("prepare", "criteo", "--input", "logs", "--output", "out")),
        ("raw", ("prepare", "histories", *films, "--output", "out")),
        *(("raw", ("prepare", name, "--output", "out")) for name in ("synthetic-clicks", "synthetic-histories")),
        *(("raw", ("prepare", name, "--output", "out")) for name in ("random-clicks", "random-histories")),
    ]
    for world, arguments in bases:
        command: click.Command = top
        context = click.Context(top)
        for name in arguments:
            if not isinstance(command, click.Group):
                break
            command = command.get_command(context, name) or command
        for option in command.get_params(click.Context(command)):
            if isinstance(option, click.Option) and not option.is_flag and "path" not in str(option.type).lower():
                flag = option.opts[-1]
                for value in _odd_values(option):
                    names = (flag.lstrip("-").split("-")[0], flag, value or flag)
                    asks_data = flag.endswith(("-column", "--history", "--users", *_OF_FILES))  # for what is not in it
                    own = (3,) if asks_data else (4,) if flag == "--step" else ()
                    yield Case(world, (*arguments, flag, value), names, codes=(0, 2, 5, *own))


_OF_FILES = ("--input", "--titles", "--columns", "-columns", "--separator", "-separator", "--skip-lines")


def _odd_values(option: click.Option) -> list[str]:
    if isinstance(option.type, click.Choice) or option.name in PATH_FLAGS:
        return []
    if "int" in option.type.name.lower():
        return INTEGERS
    return FLOATS if "float" in option.type.name.lower() else TEXTS


def _config_cases() -> Iterator[Case]:
    """Yield odd values for every key of a config, in the file or on the command line."""
    from recmill import registry
    from recmill.config.sections import Settings, subsection

    def keys(section: Any, prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            inner = subsection(field)
            yield f"{prefix}{name}"
            if inner:
                yield from keys(inner, f"{prefix}{name}.")

    for world, model in (("clicks", "dlrm"), ("clicks", "dcnv2"), ("histories", "sasrec"), ("histories", "bert4rec")):
        own = registry.load(registry.MODELS, model, "model").Config
        for key in [*keys(Settings, ""), *keys(own, "model.")]:
            for value in VALUES:
                changed = config(world)
                changed["model"] = {**changed["model"], "name": model}
                *parents, last = key.split(".")
                section = changed
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[last] = value
                codes = (0, 2, 3, 5) if key == "data" or key.startswith("data.") else (0, 2, 5)
                yield Case(world, ("train", "config.toml", "--run", "new"), (last,), changed, codes)


@cache
def _groups() -> list[list[Case]]:
    """Return the cases by kind of argument, so that each kind gets its share of the trials."""
    flags, keys = list(_flag_cases()), list(_config_cases())
    paths = [_path_case(*command, path) for command, path in itertools.product(PATHS, BAD_PATHS)]
    paths = [case for case in paths if case.arguments[:2] != ("train", "fifo")]  # a config may come from a pipe
    contradictions = [Case(*contradiction, codes=(2, 3, 4)) for contradiction in CONTRADICTIONS]
    train = ("train", "config.toml", "--run", "new")
    garbage = [Case("clicks", train, ("config.toml",), content, (2,)) for content in [*GARBAGE.values(), *LINKED]]
    procs = [
        Case("clicks", (*train, "--procs", number), ("--procs",), codes=(2,), seconds=30, is_launched=False)
        for number in PROCS
    ]
    rest = [*contradictions, *garbage, *procs]
    return [paths, flags, keys, paths, flags, keys, keys, rest]


def run_trial(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    groups = [list(group) for group in _groups()]
    for group in groups:
        order.shuffle(group)
    group = groups[index % len(groups)]
    case = group[index // len(groups) % len(group)]
    sandbox = worlds.copy(case.world, name)
    _plant(sandbox)
    what = shown(case.arguments)
    if case.config is not None:
        what += f" with {_write_config(sandbox, case.config)}"
    if case.is_launched:
        outcome = sandbox.fork(*case.arguments, seconds=case.seconds)
    else:
        outcome = sandbox.run(*case.arguments, seconds=case.seconds)
    names = case.names if outcome.code in (2, 3, 4) else ()
    codes = set(case.codes)
    if any(fact in outcome.stderr for fact in NEITHER_KIND):
        codes.add(1)
    return what, judge(outcome, codes, names)


def _plant(sandbox: Sandbox) -> None:
    """Make what the bad paths name."""
    (sandbox.folder / "file").write_text("text", encoding="utf-8")
    (sandbox.folder / "empty").mkdir()
    (sandbox.folder / "loop").symlink_to("loop")
    (sandbox.folder / "dangling").symlink_to("nowhere/else")
    os.mkfifo(sandbox.folder / "fifo")


def _write_config(sandbox: Sandbox, content: Any) -> str:
    """Write config.toml and describe it."""
    file = sandbox.folder / "config.toml"
    if isinstance(content, str):
        file.unlink()
        file.symlink_to(content)
        return f"config.toml -> {content}"
    if isinstance(content, bytes):
        file.write_bytes(content)
        return f"config.toml: {next(title for title, garbage in GARBAGE.items() if garbage == content)}"
    file.write_text(tomli_w.dumps(content), encoding="utf-8")
    is_histories = "max_length" in content["model"]
    usual = config("histories" if is_histories else "clicks")
    return f"config.toml: {content['model']['name']}, {_difference(usual, content)}"


def _difference(usual: dict[str, Any], changed: dict[str, Any], prefix: str = "") -> str:
    for key, value in changed.items():
        if isinstance(value, dict) and isinstance(usual.get(key), dict):
            if inner := _difference(usual[key], value, f"{prefix}{key}."):
                return inner
        elif f"{prefix}{key}" != "model.name" and (key not in usual or repr(usual[key]) != repr(value)):
            return f"{prefix}{key} = {ascii(value)[:60]}"
    return ""
