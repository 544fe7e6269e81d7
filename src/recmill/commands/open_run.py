"""`recmill.open_run`: a trained run that stays in memory, for programs and notebooks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

import recmill
from recmill.commands import assemble
from recmill.commands.evaluate import EvaluateOptions
from recmill.commands.keywords import checked_keywords
from recmill.commands.predict import Predictor
from recmill.commands.ranker import Ranker
from recmill.commands.recommend import (
    Named,
    Recommender,
    RecommendOptions,
    check_no_include_seen,
    check_no_input_options,
)
from recmill.commands.retriever import Retriever
from recmill.config.options import checked_options
from recmill.data.frames import Kind, as_polars, converted
from recmill.data.names import Unknown
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.errors import ConfigError
from recmill.metrics.own import Metrics

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.data.frames import AnyFrame

Histories = Named | Sequence[Sequence[str | int]]


@checked_keywords
class Run:
    """A run whose model is loaded. It stays as it was when it was opened: what is trained later needs a new one."""

    def __init__(self, path: Path, recommender: Recommender | None, predictor: Predictor | None = None) -> None:
        self.path = path
        self._recommender = recommender
        self._predictor = predictor
        self._retriever: Retriever | None = None

    @overload
    def recommend(
        self,
        histories: Histories | None = None,
        *,
        frame: Literal["polars"] = "polars",
        **options: Unpack[RecommendOptions],
    ) -> "pl.DataFrame": ...
    @overload
    def recommend(
        self, histories: Histories | None = None, *, frame: Literal["pandas"], **options: Unpack[RecommendOptions]
    ) -> "pd.DataFrame": ...
    @overload
    def recommend(
        self, histories: Histories | None = None, *, frame: Literal["arrow"], **options: Unpack[RecommendOptions]
    ) -> "pa.Table": ...
    def recommend(
        self,
        histories: Histories | None = None,
        *,
        users: Named | None = None,
        input: "AnyFrame | None" = None,
        keep: list[str] | None = None,
        k: int = 10,
        include_seen: bool = False,
        unknown: Unknown = "error",
        on_bad_value: Literal["fail", "missing"] = "fail",
        frame: Kind = "polars",
    ) -> "AnyFrame":
        """Return a frame with the K items that the model ranks first: rank (from 1), item, title and score.

        `histories`: original ids or titles of items, oldest first, or a list of several such histories; column
        "history" has its number, from 0. Or `users`: original ids of users of the dataset, in column "user".
        `unknown`: items of `histories` that the dataset does not have are an error, or left out ("skip"). A history
        of which nothing is left has no rows.

        Or `input`: a frame with a history per row, in column "history", or for a 'two_tower' a request per row. The
        result has K rows for each, in order, with the columns in `keep`, rank, item, score and, after histories, title.
        Items of these histories that the dataset does not have are left out, with a warning. The first call for a
        'two_tower' reads the items of the dataset. `on_bad_value`: as for `predict`.
        """
        if (histories is not None) + (users is not None) + (input is not None) != 1:
            raise ConfigError(
                "Recommend for histories, for users or for the rows of `input`: give exactly one of them."
            )
        if input is not None:
            rows = self._as_polars(input, "input", "recommend({!r}, input={!r})")
            return converted(self._best_of_frame(rows, keep or [], k, include_seen, on_bad_value), frame)
        check_no_input_options(keep, {})
        if self._recommender is None:
            raise ConfigError(
                f"{self.path}: its model is no sequence model, so it has nothing to recommend. "
                "Train one: recmill train own/sasrec --set data.path=DIR --run RUN. "
                "A 'two_tower' recommends for `input`."
            )
        if users is not None:
            return converted(self._recommender.for_users(users, k, include_seen), frame)
        assert histories is not None
        if unknown not in ("error", "skip"):
            raise ConfigError(f"unknown={unknown!r}: use 'error' or 'skip'.")
        is_text = isinstance(histories, str) or not isinstance(histories, Iterable)
        is_one = is_text or not any(isinstance(part, list | tuple) for part in histories)
        several: Any = [histories] if is_one else histories
        return converted(self._recommender.after(several, k, include_seen, unknown), frame)

    def _as_polars(self, given: object, what: str, for_files: str) -> "pl.DataFrame":
        """Return a frame as one of Polars; raise if it is a path."""
        if isinstance(given, str | Path):
            call = for_files.format(str(self.path), str(given))
            raise ConfigError(f"`{what}` is a path, not a frame. For files: recmill.{call}.")
        return as_polars(given, what)

    def _best_of_frame(
        self, rows: "pl.DataFrame", keep: list[str], k: int, include_seen: bool, on_bad_value: str
    ) -> "pl.DataFrame":
        """Return the K best items of each row."""
        flags = checked_options("recommend", NewRowsFlags, {"on_bad_value": on_bad_value})
        if self._recommender:
            self._recommender.check_k(k)
            return Ranker(self._recommender, k, include_seen).of_frame(rows, keep, flags)
        check_no_include_seen(include_seen)
        assert self._predictor
        self._retriever = self._retriever or Retriever.of(self._predictor)
        return self._retriever.best_of_frame(rows, k, keep, flags)

    @overload
    def predict(
        self,
        rows: "AnyFrame",
        *,
        keep: list[str] | None = None,
        on_bad_value: Literal["fail", "missing"] = "fail",
        frame: Literal["polars"] = "polars",
    ) -> "pl.DataFrame": ...
    @overload
    def predict(
        self,
        rows: "AnyFrame",
        *,
        keep: list[str] | None = None,
        on_bad_value: Literal["fail", "missing"] = "fail",
        frame: Literal["pandas"],
    ) -> "pd.DataFrame": ...
    @overload
    def predict(
        self,
        rows: "AnyFrame",
        *,
        keep: list[str] | None = None,
        on_bad_value: Literal["fail", "missing"] = "fail",
        frame: Literal["arrow"],
    ) -> "pa.Table": ...
    def predict(
        self,
        rows: "AnyFrame",
        *,
        keep: list[str] | None = None,
        on_bad_value: Literal["fail", "missing"] = "fail",
        frame: Kind = "polars",
    ) -> "AnyFrame":
        """Return a frame with the columns in `keep`, the click probability of each row, "score", and its "logit".

        `rows`: a frame of pandas, Polars or Arrow with the columns that the features are made of. With
        `frame="pandas"`, the scores of a pandas frame have its index. Values that are missing, unseen or clipped much
        more often than in training are a warning, as for `recmill predict`. `on_bad_value`: a number or time that
        cannot be used is an error, or "missing".

        With a sequence model, `rows` has columns "history" and "candidates". The result has one row per candidate, in
        order, with the columns in `keep`, "item" and "score".
        """
        new = self._as_polars(rows, "rows", "predict({!r}, {!r}, output)")
        flags = checked_options("predict", NewRowsFlags, {"on_bad_value": on_bad_value})
        scorer = self._predictor or Ranker(cast(Recommender, self._recommender))
        scores: Any = converted(scorer.of_frame(new, keep or [], flags), frame)
        if frame == "pandas" and self._predictor and hasattr(rows, "index"):
            scores.index = rows.index
        return cast("AnyFrame", scores)

    @overload
    def evaluate(self, *, per_user: Literal[False] = False, **options: Unpack[EvaluateOptions]) -> Metrics: ...
    @overload
    def evaluate(
        self, *, per_user: Literal[True], frame: Literal["polars"] = "polars", **options: Unpack[EvaluateOptions]
    ) -> "pl.DataFrame": ...
    @overload
    def evaluate(
        self, *, per_user: Literal[True], frame: Literal["pandas"], **options: Unpack[EvaluateOptions]
    ) -> "pd.DataFrame": ...
    @overload
    def evaluate(
        self, *, per_user: Literal[True], frame: Literal["arrow"], **options: Unpack[EvaluateOptions]
    ) -> "pa.Table": ...
    def evaluate(
        self, *, per_user: bool = False, frame: Kind = "polars", **options: Unpack[EvaluateOptions]
    ) -> "Metrics | AnyFrame":
        """Evaluate the run as `recmill.evaluate` does, in processes of their own."""
        if per_user:
            return recmill.evaluate(self.path, per_user=True, frame=frame, **options)
        return recmill.evaluate(self.path, **options)

    @overload
    def results(self, frame: Literal["polars"] = "polars") -> "pl.DataFrame": ...
    @overload
    def results(self, frame: Literal["pandas"]) -> "pd.DataFrame": ...
    @overload
    def results(self, frame: Literal["arrow"]) -> "pa.Table": ...
    def results(self, frame: Kind = "polars") -> "AnyFrame":
        """Return one row: state, best step, test metrics. See `recmill.results`."""
        return recmill.results(self.path, frame=frame)

    @overload
    def history(self, frame: Literal["polars"] = "polars") -> "pl.DataFrame": ...
    @overload
    def history(self, frame: Literal["pandas"]) -> "pd.DataFrame": ...
    @overload
    def history(self, frame: Literal["arrow"]) -> "pa.Table": ...
    def history(self, frame: Kind = "polars") -> "AnyFrame":
        """Return the learning curve. See `recmill.history`."""
        return recmill.history(self.path, frame=frame)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


@checked_keywords
def open_run(
    path: str | Path,
    *,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
    verify: bool | None = None,
) -> Run:
    """Load the model of a run, so that each call of `recommend` or `predict` takes milliseconds.

    `checkpoint`, `fallback` and `verify`: as for `recmill evaluate`.
    """
    run, config = assemble.open_trained_run(path)
    if assemble.model_module(config).KIND != "histories":
        predictor = Predictor(path, checkpoint, fallback)
        predictor.load()
        return Run(run.path, None, predictor)
    recommender = Recommender(path, checkpoint, fallback, verify)
    items = recommender.items.originals
    for _ in range(2):  # loads the network and what its first calls need
        recommender.after([[items[0]]], 1, include_seen=len(items) == 1)
    return Run(run.path, recommender)
