"""How commands declare flags as fields of their Options, and the flags that several of them have."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from recmill.config.options import given_path
from recmill.data.opening import Checks
from recmill.environment import process_environment
from recmill.errors import ConfigError, DataError, ResourceError

Runs = str | Path | Iterable[str | Path]  # what each argument of a function of several runs may be
STREAM = "-"  # stdin or stdout, where a path is given

Procs = Annotated[PositiveInt, Field(description="Processes on this machine: up to 4 per core, or RECMILL_MAX_PROCS.")]
Verify = Annotated[
    bool | None,
    Field(
        description="Read every byte of the dataset first, or none.  [default: files not yet known to be correct]",
        json_schema_extra={"flags": ["--verify/--no-verify"]},
    ),
]
Which = Annotated[
    Literal["newest", "best"] | None,
    Field(description="Checkpoint to use.  [default: best if checkpoint.keep_best was set, otherwise newest]"),
]
Overwrite = Annotated[bool, Field(description="Replace an existing file.")]
Fallback = Annotated[bool, Field(description="If the newest checkpoint is corrupt, use the newest that is not.")]


def dataset_checks(verify: bool | None) -> Checks:
    """Return what to verify when a dataset is opened. If a launcher started several processes, rank 0 does it."""
    if verify is False or process_environment().rank:
        return "sizes"
    return "digests" if verify else "once"


def listed(runs: Iterable[Runs]) -> list[str | Path]:
    """Return the runs one by one."""
    groups = (given if isinstance(given, Iterable) and not isinstance(given, str) else [given] for given in runs)
    return [run for group in groups for run in group]


def new_path(path: str | Path, flag: str, overwrite: bool | None = None) -> Path:
    """Return the absolute path of a file to write; raise if it exists or Polars could not write there.

    `overwrite`: whether an existing file is replaced; None if the command has no such flag.
    """
    output = given_path(path, flag).absolute()
    if output.is_dir() or (output.exists() and not overwrite):
        other = "move it away" if overwrite is None or output.is_dir() else "replace it with --overwrite"
        raise DataError(f"{output} exists. Choose another {flag}, or {other}.")
    if any("\udc80" <= letter <= "\udcff" for letter in str(output)):  # bytes that are no text: Polars needs text
        raise ConfigError(f"{flag} {output}: this path is not valid UTF-8. Choose another one.")
    return output


def new_table(path: str | Path, flag: str, overwrite: bool | None = None) -> Path:
    """Return `new_path` of a file whose name says which format to write."""
    output = new_path(path, flag, overwrite)
    if output.suffix not in (".parquet", ".csv", ".jsonl", ".ndjson"):
        raise ConfigError(f"{flag} {output.name}: end it with .parquet, .csv or .jsonl, the format to write.")
    return output


def new_parquet(path: str | Path, flag: str) -> Path:
    """Return `new_path` of a file that can only be Parquet."""
    output = new_path(path, flag)
    if output.suffix != ".parquet":
        raise ConfigError(f"{flag} {output.name}: it is written as Parquet. End its name with .parquet.")
    return output


def imported(module: str, needs: str, extra: str) -> Any:
    """Import a module of an optional package. `needs`: what needs which one, like "Plots need matplotlib"."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ResourceError(f"{needs}. Install it: pip install 'recmill[{extra}]'.") from None


def flag(default: Any, help: str, *names: str, metavar: str | None = None) -> Any:
    """Declare a flag with its default (... if it is required) and, if the field's name is not its own, its names."""
    extra: dict[str, Any] = {"metavar": metavar, **({"flags": [*names]} if names else {})}
    return Field(default, description=help, json_schema_extra=extra)
