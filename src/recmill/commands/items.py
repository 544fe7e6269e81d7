"""`recmill items`: the vectors of all items or of new requests, by the two-tower model of a run."""

from pathlib import Path
from typing import Any, Literal, Unpack

from recmill.commands.keywords import checked_keywords
from recmill.commands.options import STREAM, Fallback, Which, flag, new_parquet, new_path
from recmill.commands.retriever import RequestOptions, RequestVectors, Retriever
from recmill.config.options import checked_options
from recmill.datasets.inputs.flags import NewRows, NewRowsFlags
from recmill.errors import ConfigError
from recmill.files.atomic import new_file


class Options(NewRowsFlags):
    output: str = flag(..., "Parquet file to write: id, item (as in the log, if it is known) and vector.")
    requests: str | None = flag(None, "Instead of items: write the vectors of the requests in this file.")
    keep: list[str] | None = flag(None, "Columns of --requests to copy, separated by commas.")
    checkpoint: Which = None
    fallback: Fallback = False


@checked_keywords
def write_items(
    run: str | Path,
    output: str | Path,
    *,
    requests: str | Path | None = None,
    keep: list[str] | None = None,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
    **new_rows: Unpack[NewRows],
) -> dict[str, Any]:
    """Write the vectors of all items of the run's dataset to a Parquet file; return {"items", "dim", "output"}.

    The dot product of an item's vector with that of a request, divided by `model.temperature`, is the score of
    `recmill predict`. An item has the features of the first row in which it occurs.

    With `requests`, a file: write the vectors of its rows instead, to .parquet or .jsonl, with the columns in `keep`;
    return {"requests", "dim", "output"}. `columns`, `separator`, `quotes`, `escape`, `encoding`,
    `skip_lines`, `decimal`, `thousands`, `time_format`, `on_bad_value`: as for `predict`.
    """
    given = {"output": output, "requests": requests, "keep": keep, "checkpoint": checkpoint, "fallback": fallback}
    options = checked_options("items", Options, {**given, **new_rows})
    if options.requests is None and options.keep:
        raise ConfigError("--keep names columns of --requests. Give both.")
    if options.requests is not None:
        return _write_requests(RequestVectors(run, options.checkpoint, options.fallback), options)
    path = new_parquet(options.output, "--output")
    retriever = Retriever(run, options.checkpoint, options.fallback)
    import polars as pl

    vectors = retriever.item_vectors_CD
    frame = retriever.items.with_columns(pl.Series("vector", vectors).cast(pl.List(pl.Float32)))
    with new_file(path) as partial:
        frame.write_parquet(partial)
    return {"items": frame.height, "dim": vectors.shape[1], "output": str(path)}


def _write_requests(vectors: RequestVectors, options: Options) -> dict[str, Any]:
    from recmill.commands.scored_files import score_files

    if Path(options.output).suffix == ".csv":
        raise ConfigError(f"--output {options.output}: .csv cannot hold vectors. Use .parquet or .jsonl.")
    if options.output != STREAM:
        new_path(options.output, "--output")
    given = options.model_dump(exclude={"requests"}) | {"input": options.requests}
    written = score_files(vectors, vectors.made, RequestOptions(**given))
    return {"requests": written["rows"], "dim": vectors.dim, "output": written["output"]}
