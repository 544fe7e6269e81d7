"""`recmill checkpoint write-rows`: rows of a Parquet file -> a new run with a checkpoint that has them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.checkpoints.format import WrittenRows, held, step_of, verify
from recmill.commands.assemble import open_trained_directory
from recmill.commands.checkpoint import Facts, chosen_checkpoint
from recmill.commands.keywords import checked_keywords
from recmill.config.options import given_path
from recmill.data.parquet_files import reading
from recmill.errors import ConfigError, DataError
from recmill.files.atomic import new_directory, sync_directory, write_text
from recmill.files.digests import digest
from recmill.files.timestamps import utc_now
from recmill.launch import early
from recmill.observe.run_dir import RunDirectory
from recmill.tables.libraries import import_libraries

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

    from recmill.checkpoints.row_writing import NewKeys, NewRows, TableLayout

_BLOCK_BYTES = 1 << 25
_REMEDY = "`recmill checkpoint rows` writes such files."
_MAX_COUNT = 2**32 - 1


@checked_keywords
def import_rows(run: str | Path, table: str, file: str | Path, output: str | Path, *, step: int | None = None) -> Facts:
    """Create the run directory `output`: a checkpoint of `run`, the newest by default, with the rows of a Parquet file.

    The file has the columns of `export_rows`: `id`, `row`, and optionally `state` of the optimizer (default: 0) and,
    of a dynamic table, `count` and `steps_ago`. Rows of other ids and other tables are kept, and `run` is not changed.
    To continue training, use the new run's config.toml: train("new/config.toml", run="new"); or `init_from`.
    """
    source_file, target = given_path(file, "--input"), given_path(output, "--output")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output {target} exists already. Name a new run directory: nothing is overwritten.")
    path = chosen_checkpoint(run, step)
    source = open_trained_directory(run)
    import_libraries(in_own_process=early.is_command)
    from recmill.checkpoints.row_writing import table_layout, write_copy

    with held(path):
        checkpoint = verify(path)
        layout = table_layout(checkpoint, table)
        keys = _checked_keys(source_file, layout)
        facts = {"table": table, "rows": len(keys.ids), "file": str(source_file), "step": step_of(path)}
        written = WrittenRows(
            table, len(keys.ids), str(source_file.absolute()), digest(source_file), str(path.absolute())
        )
        with new_directory(target) as partial:
            new = RunDirectory(partial)
            write_copy(checkpoint, layout, _blocks(source_file, layout, keys.ids), keys, new.checkpoints, written)
            write_text(new.config_file, source.config_file.read_text(encoding="utf-8"))
            reason = f"{len(keys.ids):,} rows of table {table} were written from {source_file.absolute()}"
            write_text(partial / "log.txt", f"{utc_now()} {reason} into a copy of {path.absolute()}\n")
            new.write_status("interrupted", step=step_of(path), reason=reason)
        sync_directory(target.absolute().parent)
    return facts | {"run": str(run), "path": str(target)}


def _checked_keys(file: Path, layout: "TableLayout") -> "NewKeys":
    """Return the ids of a file and what it says about them, or raise DataError for the first problem."""
    import numpy as np
    import polars as pl

    from recmill.checkpoints.row_writing import NewKeys

    limits = {"id": (0, layout.table.rows - 1)}
    if layout.clock is not None:
        limits = {"id": (0, 2**62 - 1), "count": (1, _MAX_COUNT), "steps_ago": (1, layout.clock)}
    with reading(file, _REMEDY):
        scanned = pl.scan_parquet(file, glob=False)
        types = scanned.collect_schema()
    _check_types(file, types, layout)
    with reading(file, _REMEDY):
        columns = scanned.select(name for name in limits if name in types).collect()
    if not len(columns):
        raise DataError(f"{file}: no rows. {_REMEDY}")
    numbers = {column.name: _numbers(file, column, *limits[column.name]) for column in columns}
    ordered = np.sort(numbers["id"])
    if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
        raise DataError(f"{file}: id {twice[0]} occurs more than once. Keep one row of each id.")
    return NewKeys(numbers["id"], numbers.get("count"), numbers.get("steps_ago"))


def _blocks(file: Path, layout: "TableLayout", ids: "np.ndarray") -> "Iterator[NewRows]":
    """Yield the rows of a file, a few megabytes at a time. DataError names the first that cannot be written."""
    import polars as pl

    from recmill.checkpoints.row_writing import NewRows

    step = max(1, _BLOCK_BYTES // layout.record_bytes)
    scanned = pl.scan_parquet(file, glob=False).select(pl.col("^(row|state)$"))
    for first in range(0, len(ids), step):
        with reading(file, _REMEDY):
            block = scanned.slice(first, step).collect()
        widths = _widths(layout)
        values = {column.name: _values(file, first, column, widths[column.name]) for column in block}
        yield NewRows(ids[first : first + step], values["row"], values.get("state"))


def _widths(layout: "TableLayout") -> dict[str, int]:
    return {"row": layout.dim, "state": layout.state_columns}


def _check_types(file: Path, types: "pl.Schema", layout: "TableLayout") -> None:
    import polars as pl

    widths = _widths(layout)
    known = ["id", "row", *(["state"] if layout.state_columns else [])]
    known += ["count", "steps_ago"] if layout.clock is not None else []
    table = f"table {layout.table.name}"
    for name in ("id", "row"):
        if name not in types:
            raise DataError(f"{file}: no column '{name}'; it has {', '.join(types)}. {_REMEDY}")
    for name, kind in types.items():
        if name not in known:
            raise DataError(f"{file}: column '{name}' is unknown; {table} has {', '.join(known)}. Remove it.")
        if name not in widths:
            if not kind.is_integer():
                raise DataError(f"{file}: column '{name}' is {kind}, expected Int64. Cast it.")
            continue
        width = kind.shape[0] if isinstance(kind, pl.Array) else widths[name]
        if getattr(kind, "inner", None) != pl.Float32 or width != widths[name]:
            expected = f"{widths[name]} values of Float32"
            raise DataError(f"{file}: column '{name}' is {kind}, expected a list or array of {expected}. {_REMEDY}")


def _numbers(file: Path, column: "pl.Series", lowest: int, highest: int) -> "np.ndarray":
    """Return a column of integers that are all within limits, as int64."""
    import polars as pl

    numbers = column.cast(pl.Int64, strict=False)  # null: too large
    is_wrong = ~numbers.is_between(lowest, highest).fill_null(False).to_numpy()
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise DataError(
            f"{file}: row {at}: {column.name} {column[at]} is not in {lowest}..{highest}. Correct or remove it."
        )
    return numbers.to_numpy()


def _values(file: Path, first: int, column: "pl.Series", width: int) -> "np.ndarray":
    """Return a column of lists or arrays of finite numbers, as float32 [n, width]."""
    import numpy as np

    as_lists = column.arr.to_list() if hasattr(column.dtype, "shape") else column
    is_wrong = (as_lists.list.len().fill_null(0) != width).to_numpy()
    problem = f"does not have {width} values"
    if not is_wrong.any():
        values = as_lists.explode().fill_null(np.nan).to_numpy().reshape(-1, width)
        is_wrong = ~np.isfinite(values).all(axis=1)
        problem = "has a value that is not a finite number"
    if is_wrong.any():
        raise DataError(f"{file}: row {first + int(is_wrong.argmax())}: {column.name} {problem}. Correct or remove it.")
    return values
