"""`recmill.history`: the learning curve of a run as a frame."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from recmill.commands.assemble import open_directory
from recmill.commands.keywords import checked_keywords
from recmill.config.options import given_path
from recmill.data.frames import Kind, converted
from recmill.errors import CheckpointError
from recmill.observe.run_dir import RunDirectory

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.data.frames import AnyFrame

_INTEGERS = ("step", "epoch")


@overload
def history(run: str | Path, frame: Literal["polars"] = "polars") -> "pl.DataFrame": ...
@overload
def history(run: str | Path, frame: Literal["pandas"]) -> "pd.DataFrame": ...
@overload
def history(run: str | Path, frame: Literal["arrow"]) -> "pa.Table": ...
@checked_keywords
def history(run: str | Path, frame: Kind = "polars") -> "AnyFrame":
    """Return what a run has reported so far, also while it trains: one row per line of its metrics.jsonl.

    Columns: step, epoch (finished epochs), epochs_done (the same with the fraction of the current one), split ("train",
    "val" or "test"), time (seconds since 1970), the loss, speed and learning rates of training, and the metrics of each
    split. Values that a row does not have are null. `frame`: "polars",
    "pandas" or "arrow".
    """
    import polars as pl

    directory = RunDirectory(given_path(run, "RUN"))
    lines = directory.read_metrics()
    if not lines:
        if not directory.path.is_dir():
            open_directory(run)  # it says what is wrong
        raise CheckpointError(
            f"{directory.metrics_file}: no metrics yet. Train first: recmill train CONFIG --run {run}."
        )
    names = dict.fromkeys(["step", "epoch", "split", "time", *(name for line in lines for name in line)])
    columns = {}
    for name in names:
        if name not in ("split", "headline"):
            kind = pl.Int64 if name in _INTEGERS else pl.Float64
            columns[name] = pl.Series([number(line.get(name)) for line in lines], dtype=kind, strict=False)
    split = pl.Series("split", [line.get("split") for line in lines], dtype=pl.String)
    return converted(pl.DataFrame(columns).insert_column(len(_INTEGERS), split), frame)


def number(value: Any) -> float | int | None:
    """Return a number as it is, and None for anything else, like an undefined metric."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and float(value) == float(value):
            return value
    return None
