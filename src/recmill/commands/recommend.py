"""`recmill recommend`: the items that a model ranks first: after a history, for users of its dataset, or for requests.

The capitals at the end of an array's name are its axes: B histories, V items, K best items.
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, Unpack, cast, overload

import numpy as np

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Verify, Which, dataset_checks, flag, new_table
from recmill.config.options import checked_options
from recmill.data.checks import checked_items
from recmill.data.frames import Kind, as_polars, converted
from recmill.data.names import Names, Unknown
from recmill.datasets.inputs.flags import NewRows, NewRowsFlags, check_no_flags, given_flag
from recmill.errors import CheckpointError, ConfigError, ResourceError
from recmill.files.atomic import new_file
from recmill.observe.log import quiet_libraries
from recmill.observe.progress import Progress

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from torch import nn

    from recmill.batch import HistoryInputs
    from recmill.commands.ranker import Ranker
    from recmill.commands.retriever import Retriever
    from recmill.data.frames import AnyFrame

log = logging.getLogger(__name__)

_HISTORIES_AT_ONCE = 1024
_SCORES_AT_ONCE = 1 << 24  # histories times items
# With fewer scores, threads cost more than they save: beside other programs, two that wait for each other took 40 ms,
# one alone took 2 ms.
_SCORES_OF_ONE_THREAD = 1 << 18


class Options(NewRowsFlags):
    history: str | None = flag(None, "Original ids or titles of items, oldest first, separated by commas.")
    users: str | None = flag(None, "Original ids of users of the dataset, separated by commas.")
    is_for_all: bool = flag(False, "Every user of the dataset; needs --output.", "--all")
    input: str | None = flag(
        None, "Requests (two towers) or histories, a row each, in any format that `predict` reads; needs --output."
    )
    keep: list[str] | None = flag(None, "Columns of --input to copy, separated by commas.")
    output: str | None = flag(
        None,
        "File to write: .parquet, .csv or .jsonl. --all: user, rank, item, title, score. --input: no user.",
    )
    k: int = flag(10, "How many items.")
    include_seen: bool = flag(False, "Include items that are in the history already.")
    checkpoint: Which = None
    fallback: Fallback = False
    verify: Verify = None


Named = str | Sequence[str | int]  # original ids or titles; in a string they are separated by commas


class Recommendation(TypedDict):
    user: NotRequired[str]  # it and the rank, from 1, if users were asked for
    rank: NotRequired[int]
    item: str  # its original id
    title: NotRequired[str]  # not for requests
    score: float


class _Options(TypedDict, total=False):
    users: Named | None
    keep: list[str] | None
    k: int
    include_seen: bool


class RecommendOptions(_Options, total=False):
    """The keyword arguments of `Run.recommend`, for type checkers."""

    unknown: Unknown
    input: "AnyFrame | None"
    on_bad_value: Literal["fail", "missing"]


class LoadingOptions(_Options, NewRows, total=False):
    """The keyword arguments of `recommend`, which also loads the model and reads files."""

    input: "str | Path | AnyFrame | None"
    checkpoint: Literal["newest", "best"] | None
    fallback: bool
    verify: bool | None


@overload
def recommend(
    run: str | Path, history: Named | None = None, *, frame: None = None, **options: Unpack[LoadingOptions]
) -> list[Recommendation]: ...
@overload
def recommend(
    run: str | Path, history: Named | None = None, *, frame: Literal["polars"], **options: Unpack[LoadingOptions]
) -> "pl.DataFrame": ...
@overload
def recommend(
    run: str | Path, history: Named | None = None, *, frame: Literal["pandas"], **options: Unpack[LoadingOptions]
) -> "pd.DataFrame": ...
@overload
def recommend(
    run: str | Path, history: Named | None = None, *, frame: Literal["arrow"], **options: Unpack[LoadingOptions]
) -> "pa.Table": ...
@checked_keywords
def recommend(
    run: str | Path,
    history: Named | None = None,
    *,
    users: Named | None = None,
    input: "str | Path | AnyFrame | None" = None,
    keep: list[str] | None = None,
    k: int = 10,
    include_seen: bool = False,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
    verify: bool | None = None,
    frame: Kind | None = None,
    **new_rows: Unpack[NewRows],
) -> "list[Recommendation] | AnyFrame":
    """Return [{"item": original id, "title": ..., "score": ...}, ...], best first, without items of the history.

    `history`: original ids or titles of items, oldest first. Or `users`: original ids of users, whose rows have "user"
    and "rank" (from 1) as well. Either may be one text with commas between the names. `checkpoint`, `fallback`,
    `verify`: as for `evaluate`. `frame`: "polars", "pandas" or "arrow" return the same rows as a frame. Who recommends
    more than once opens the run: `recmill.open_run`.

    A 'two_tower' recommends for `input`, a file or a frame with a request per row: K rows for each, in order, with the
    columns in `keep`, "rank", "item" and "score". For a sequence model, `input` has a history per row, in column
    "history": a list, or a text with commas; "title" is there, too. `columns`, `separator`, `quotes`, `escape`,
    `encoding`, `skip_lines`, `decimal`, `thousands`, `time_format`, `on_bad_value`: as for `predict`.
    """
    if (history is not None) + (users is not None) + (input is not None) != 1:
        raise ConfigError("Recommend for a history, for users or for the rows of `input`: give exactly one of them.")
    if input is not None:
        searcher = _searcher(run, k, include_seen, checkpoint, fallback, verify)
        best = _best_in_memory(searcher, input, k, keep, new_rows)
        return cast(list[Recommendation], best.to_dicts()) if frame is None else converted(best, frame)
    check_no_input_options(keep, new_rows)
    model = Recommender(run, checkpoint, fallback, verify)
    if users is not None:
        best = model.for_users(users, k, include_seen)
    else:
        assert history is not None
        best = model.after([history], k, include_seen).drop("history", "rank")
    return cast(list[Recommendation], best.to_dicts()) if frame is None else converted(best, frame)


@checked_keywords
def recommend_all(
    run: str | Path,
    output: str | Path,
    *,
    input: str | Path | None = None,
    keep: list[str] | None = None,
    k: int = 10,
    include_seen: bool = False,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
    verify: bool | None = None,
    **new_rows: Unpack[NewRows],
) -> dict[str, Any]:
    """Recommend for every user of the dataset, to .parquet, .csv or .jsonl: user, rank, item, title, score.

    Returns {"output": ..., "users": ..., "rows": ...}. With `input`, a file as for `recommend`: for each of its rows,
    with the columns in `keep`; returns "requests" instead of "users".
    `columns`, `separator`, `quotes`, `escape`, `encoding`, `skip_lines`, `decimal`, `thousands`, `time_format`,
    `on_bad_value`: as for `predict`.
    """
    if input is not None:
        options = {"input": str(input), "output": str(output), "keep": keep, "k": k, **new_rows}
        return _searcher(run, k, include_seen, checkpoint, fallback, verify).write_best(options)
    check_no_input_options(keep, new_rows)
    import polars as pl
    from polars.io.plugins import register_io_source

    output = new_table(output, "--output")
    model = Recommender(run, checkpoint, fallback, verify)
    model.check_k(k)
    names = model.users.originals
    num_rows = 0
    num_short = 0  # users with fewer than K items left

    def frames(*_: object) -> Iterator[pl.DataFrame]:
        nonlocal num_rows, num_short
        with Progress("recommending", len(names), "users") as progress:
            for count, frame in model.best_of_users(range(len(names)), k, include_seen):
                num_rows += frame.height
                num_short += count - int((frame["rank"] == k).sum())
                yield frame
                progress.advance(count)

    schema = {"user": pl.String, "rank": pl.Int32, "item": pl.String, "title": pl.String, "score": pl.Float32}
    with new_file(output) as partial:
        try:
            rows = register_io_source(frames, schema=schema)
            if output.suffix == ".parquet":
                rows.sink_parquet(partial)
            elif output.suffix == ".csv":
                rows.sink_csv(partial)
            else:
                rows.sink_ndjson(partial)
        except pl.exceptions.ComputeError as error:
            raise ResourceError(
                f"{output}: could not be written ({error}). Is the disk full? Free some space and run it again."
            ) from error
    if num_short:
        log.warning("%s users have fewer than %s unseen items left, and got those", f"{num_short:,}", k)
    return {"output": str(output), "users": len(names), "rows": num_rows}


def check_no_input_options(keep: list[str] | None, new_rows: NewRows) -> None:
    if keep:
        raise ConfigError("--keep names columns of --input. Give both.")
    if flag := given_flag(new_rows):
        raise ConfigError(f"{flag} says how to read --input. Give both.")


def _searcher(
    run: str | Path, k: int, include_seen: bool, which: str | None, fallback: bool, verify: bool | None
) -> "Retriever | Ranker":
    from recmill.commands.ranker import Ranker
    from recmill.commands.retriever import Retriever

    _, config = assemble.open_trained_run(run)
    if assemble.model_module(config).KIND == "histories":
        recommender = Recommender(run, which, fallback, verify)
        recommender.check_k(k)
        return Ranker(recommender, k, include_seen)
    check_no_include_seen(include_seen)
    return Retriever(run, which, fallback, verify)


def check_no_include_seen(include_seen: bool) -> None:
    if include_seen:
        raise ConfigError("--include-seen is for histories: the items of requests are never left out. Remove it.")


def _best_in_memory(
    searcher: "Retriever | Ranker", input: "str | Path | AnyFrame", k: int, keep: list[str] | None, new_rows: NewRows
) -> "pl.DataFrame":
    import polars as pl

    from recmill.commands.ranker import Ranker

    if not isinstance(input, str | Path):
        check_no_flags(new_rows)
        rows = as_polars(input, "input")
        flags = checked_options("recommend", NewRowsFlags, {**new_rows})
        if isinstance(searcher, Ranker):
            return searcher.of_frame(rows, keep or [], flags)
        return searcher.best_of_frame(rows, k, keep or [], flags)
    with tempfile.TemporaryDirectory(prefix="recmill-recommend-") as directory:
        output = str(Path(directory) / "best.parquet")
        searcher.write_best({"input": str(input), "output": output, "keep": keep, "k": k, **new_rows})
        return pl.read_parquet(output, glob=False)


class Recommender:
    """A run's model on CPU, unsharded. The network is loaded when it is first used, after all arguments are checked."""

    def __init__(self, run: str | Path, which: str | None, fallback: bool, verify: bool | None = None) -> None:
        assemble.check_which(which)
        self.run, self._config = assemble.open_trained_run(run)
        if assemble.model_module(self._config).TASK == "retrieval":
            raise ConfigError(
                f"{self.run.path}: '{self._config.model_name}' recommends for requests, not after histories or for "
                "users of a dataset. Use --input."
            )
        if assemble.model_module(self._config).KIND != "histories":
            raise ConfigError(
                f"{self.run.path}: '{self._config.model_name}' is no sequence model, so it has nothing to recommend. "
                "Train one: recmill train own/sasrec --set data.path=DIR --run RUN."
            )
        log.info("using the model of %s", self.run.path)
        self._dataset = assemble.open_matching_dataset(self._config, dataset_checks(verify))
        self._which = which
        self._fallback = fallback
        self._num_items = self._dataset.histories.num_items
        self._items = checked_items(self._dataset)
        self._offsets = self._dataset.array("offsets.npy")
        self.items = Names(self._dataset.path / "items.parquet", "item")
        self.batch_size = max(1, min(_HISTORIES_AT_ONCE, _SCORES_AT_ONCE // self._num_items))

    @cached_property
    def users(self) -> Names:
        return Names(self._dataset.path / "users.parquet", "user")

    def after(
        self, histories: Sequence[Named], k: int, include_seen: bool, unknown: Unknown = "error"
    ) -> "pl.DataFrame":
        """Return columns history (its number, from 0), rank, item, title and score."""
        self.check_k(k)
        found = [np.array(self.items.find(history, "--history", unknown), np.int64) + 1 for history in histories]
        for seen in found:
            self._check_enough_left(seen, "outside this history", k, include_seen)
        return self.best_of_all(found, k, include_seen).rename({"row": "history"})

    def best_of_all(self, histories: Sequence[np.ndarray], k: int, include_seen: bool) -> "pl.DataFrame":
        """Return what `best` does, batch by batch; nothing for a history without items."""
        import polars as pl

        frames = []
        for rows in self.batches(histories):
            best = self.best([histories[row] for row in rows], k, include_seen)
            frames.append(best.with_columns(row=pl.Series(rows).gather(best["row"])))
        schema = {"row": pl.Int64, "rank": pl.Int32, "item": pl.String, "title": pl.String, "score": pl.Float32}
        return pl.concat(frames) if frames else pl.DataFrame(schema=schema)

    def batches(self, histories: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Yield the numbers of the histories that have items."""
        rows = [row for row, items in enumerate(histories) if len(items)]
        yield from (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))

    def for_users(self, users: Named, k: int, include_seen: bool) -> "pl.DataFrame":
        """Return columns user, rank, item, title and score."""
        import polars as pl

        self.check_k(k)
        rows = list(dict.fromkeys(self.users.find(users, "--users")))
        for row in rows:
            where = f"that user {self.users.originals[row]} has not seen"
            self._check_enough_left(self.history(row), where, k, include_seen)
        return pl.concat([frame for _, frame in self.best_of_users(rows, k, include_seen)])

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self._num_items:
            raise ConfigError(f"--k {k}: there are {self._num_items} items; ask for 1 to {self._num_items}.")

    def history(self, user: int) -> np.ndarray:
        """Return all items of a user, including those of validation and test."""
        return np.asarray(self._items[self._offsets[user] : self._offsets[user + 1]], dtype=np.int64)

    def _check_enough_left(self, seen: np.ndarray, where: str, k: int, include_seen: bool) -> None:
        left = self._num_items - len(np.unique(seen))
        if not include_seen and k > left:
            raise ConfigError(
                f"--k {k}: {left} items are left {where}. Ask for no more, or include seen ones: --include-seen."
            )

    def best_of_users(self, rows: Sequence[int], k: int, include_seen: bool) -> "Iterator[tuple[int, pl.DataFrame]]":
        """Yield the number of users and their best items (user, rank, item, title, score), batch by batch."""
        for start in range(0, len(rows), self.batch_size):
            chosen = rows[start : start + self.batch_size]
            best = self.best([self.history(row) for row in chosen], k, include_seen)
            names = self.users.originals.gather(list(chosen)).gather(best["row"])
            yield len(chosen), best.insert_column(0, names.cast(str).alias("user")).drop("row")

    def best(self, histories: list[np.ndarray], k: int, include_seen: bool) -> "pl.DataFrame":
        """Return row, rank, item, title and score of each history's best items; fewer than K if fewer are left."""
        assert self.network  # imports torch in the fast way
        import polars as pl
        import torch

        threads = torch.get_num_threads()
        if len(histories) * self._num_items <= _SCORES_OF_ONE_THREAD:
            torch.set_num_threads(1)
        try:
            scores_BK, items_BK = self._top(histories, k, include_seen)
        finally:
            torch.set_num_threads(threads)
        rows, ranks = np.isfinite(scores_BK).nonzero()
        items = items_BK[rows, ranks]  # item ids minus 1
        return pl.DataFrame(
            {
                "row": rows,
                "rank": (ranks + 1).astype(np.int32),
                "item": self.items.originals.gather(items),
                "title": self.items.titles.gather(items),
                "score": scores_BK[rows, ranks],
            }
        )

    def _top(self, histories: list[np.ndarray], k: int, include_seen: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and the item ids minus 1 of each history's best items; seen ones have -infinity."""
        import torch

        scores_BV = torch.from_numpy(self.scores(histories))
        if not include_seen:
            seen_rows = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
            scores_BV[torch.from_numpy(seen_rows), torch.from_numpy(np.concatenate(histories) - 1)] = float("-inf")
        best = scores_BV.topk(k)
        return best.values.numpy(), best.indices.numpy()

    def scores(self, histories: list[np.ndarray]) -> np.ndarray:
        """Return the score of every item after each history, float32 [B, V]."""
        network = self.network
        import torch

        with torch.no_grad(), quiet_libraries():
            scores_BV = network(*self.network_inputs(histories))
        if not bool(torch.isfinite(scores_BV).all()):
            raise CheckpointError(
                f"{self._checkpoint}: its model gives scores that are not finite numbers. Use another checkpoint, or "
                "train again with lower learning rates."
            )
        return scores_BV.numpy()

    def network_inputs(self, histories: list[np.ndarray]) -> "HistoryInputs":
        """Return the network's arguments for these histories, as in evaluation."""
        from recmill.data.histories import ranking_inputs

        lengths = np.array([len(history) for history in histories])
        stops = np.cumsum(lengths)
        items = np.concatenate(histories)
        return ranking_inputs(items, stops - lengths, stops, assemble.window_rules(self._config), self._num_items)

    @cached_property
    def network(self) -> "nn.Module":
        network, self._checkpoint = assemble.unsharded_network(
            self.run, self._config, self._dataset, self._which, self._fallback
        )
        return network
