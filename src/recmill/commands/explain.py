"""`recmill explain`: what the model of a run relies on. Changes nothing in the run directory."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np
from pydantic import PositiveInt

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Verify, Which, dataset_checks, flag
from recmill.commands.predict import Predictor
from recmill.commands.recommend import Named, Recommender
from recmill.config.options import checked_options
from recmill.config.sections import Section
from recmill.data.click_rows import ClickRows
from recmill.data.frames import Kind, converted
from recmill.errors import ConfigError, DataError
from recmill.hardware.cpu import num_cores
from recmill.metrics.auc import auroc
from recmill.observe.progress import Progress
from recmill.registry import unknown
from recmill.schema import ClicksDescription, Dataset

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.data.frames import AnyFrame

_UNSEEN = 1  # the id of rare and unseen values, in tables with a vocabulary


class Options(Section):
    rows: PositiveInt = flag(200_000, "Use at most this many rows of the validation split, spread over it.")
    repeats: PositiveInt = flag(5, "How often each feature is shuffled.")
    seed: int = flag(1, "Seed of the shuffles.")
    group: list[str] = flag([], "Shuffle several features together, too, like user=age,city.", metavar="NAME=FEATURES")
    history: str | None = flag(None, "Sequence models: ids or titles of items, oldest first, separated by commas.")
    checkpoint: Which = None
    fallback: Fallback = False
    verify: Verify = None


class ExplainOptions(TypedDict, total=False):
    """The fields of `Options`, for type checkers."""

    rows: int
    repeats: int
    seed: int
    group: list[str]
    history: Named | None
    checkpoint: Literal["newest", "best"] | None
    fallback: bool
    verify: bool | None


@overload
def explain(
    run: str | Path, *, frame: Literal["polars"] = "polars", **options: Unpack[ExplainOptions]
) -> "pl.DataFrame": ...
@overload
def explain(run: str | Path, *, frame: Literal["pandas"], **options: Unpack[ExplainOptions]) -> "pd.DataFrame": ...
@overload
def explain(run: str | Path, *, frame: Literal["arrow"], **options: Unpack[ExplainOptions]) -> "pa.Table": ...
@checked_keywords
def explain(run: str | Path, *, frame: Kind = "polars", **options: Unpack[ExplainOptions]) -> "AnyFrame":
    """Return a frame that says what the model of a run relies on, the most important first.

    Click models: one row per feature, with the mean by which the AUROC of the validation split drops if the values of
    the feature are shuffled among the rows ("drop"), the standard deviation over the repeats ("spread"), and the share
    of rows whose value is rare or not in the training rows ("unseen", null without a vocabulary). `group`:
    ["user=age,city"] adds a row for features that are shuffled together.

    Sequence models need `history`: one row per item, with its "effect": how far the score of the top recommendation
    drops without it.
    """
    import polars as pl

    found = explanation(run, **options)
    return converted(pl.DataFrame(found["features" if "features" in found else "items"]), frame)


def explanation(run: str | Path, **options: Unpack[ExplainOptions]) -> dict[str, Any]:
    """Return {"auroc": ..., "rows": ..., "features": [...]}, or {"target": ..., "items": [...]} for a history."""
    history = options.get("history")
    if history is not None and not isinstance(history, str):
        options["history"] = ",".join(map(str, history))
    checked = checked_options("explain", Options, dict(options))
    _, config = assemble.open_trained_run(run)
    if assemble.model_module(config).KIND == "histories":
        return _of_history(run, checked)
    if checked.history is not None:
        raise ConfigError(f"--history is for sequence models, and '{config.model_name}' is none. Leave it out.")
    dataset = assemble.open_matching_dataset(config, dataset_checks(checked.verify))
    columns = _columns(dataset.clicks)
    for name, members in _groups(checked.group, columns).items():
        columns[name] = tuple(np.concatenate([columns[m][part] for m in members]) for part in (0, 1))  # type: ignore[assignment]
    predictor = Predictor(run, checked.checkpoint, checked.fallback, dataset=dataset)
    return _importance(predictor, *_sampled(dataset, checked.rows), columns, checked, dataset.clicks)


_Columns = tuple[np.ndarray, np.ndarray]  # of a feature: its columns of dense values, and of ids


def _columns(description: ClicksDescription) -> dict[str, _Columns]:
    """Return the columns of every feature. A number and its flag for missing values are one feature."""
    none = np.empty(0, np.int64)
    found: dict[str, _Columns] = {}
    for index, name in enumerate(description.dense):
        owner = name.removesuffix(" is missing")
        owner = owner if owner in found else name
        found[owner] = np.append(found.get(owner, (none, none))[0], index), none
    ends = np.cumsum(description.ids_per_row)
    for feature, end, size in zip(description.sparse, ends, description.ids_per_row, strict=True):
        found[feature.name] = none, np.arange(end - size, end)
    return found


def _groups(given: list[str], columns: dict[str, _Columns]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in given:
        name, _, listed = text.partition("=")
        members = [member.strip() for member in listed.split(",") if member.strip()]
        if not name or not members:
            raise ConfigError(f"--group '{text}': give a name and features, like user=age,city.")
        if name in columns:
            raise ConfigError(f"--group '{text}': '{name}' is a feature. Choose another name.")
        if name in groups:
            raise ConfigError(f"--group '{text}': another group is called '{name}'. Choose another name.")
        for member in members:
            if member not in columns:
                raise ConfigError(f"--group '{text}': {unknown('feature', member, columns)}")
        groups[name] = members
    return groups


def _sampled(dataset: Dataset, most: int) -> tuple[ClickRows, np.ndarray | None]:
    """Return at most this many rows of the validation split, evenly spread over it, and their weights, if any."""
    from recmill.data.clicks import SplitRows

    rows = SplitRows(dataset, "val")
    chosen = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)
    return rows.take(chosen), None if rows.weights is None else rows.weights[chosen]


def _importance(
    predictor: Predictor,
    rows: ClickRows,
    weights: np.ndarray | None,
    columns: dict[str, _Columns],
    options: Options,
    description: ClicksDescription,
) -> dict[str, Any]:
    with predictor.one_thread():  # for each of several shuffles at the same time
        base = auroc(predictor.logits(rows), rows.labels, weights)
        if base is None:
            raise DataError(
                f"the {len(rows):,} rows of the validation split that were used have one class. Raise --rows."
            )

        def drop(job: tuple[int, int]) -> float:
            feature, repeat = job
            order = np.random.default_rng([options.seed, feature, repeat]).permutation(len(rows))
            dense, ids = [*columns.values()][feature]
            shuffled = replace(rows, dense=rows.dense.copy(), ids=rows.ids.copy())
            shuffled.dense[:, dense] = rows.dense[np.ix_(order, dense)]
            shuffled.ids[:, ids] = rows.ids[np.ix_(order, ids)]
            return base - (auroc(predictor.logits(shuffled), rows.labels, weights) or 0.0)

        jobs = [(feature, repeat) for feature in range(len(columns)) for repeat in range(options.repeats)]
        drops = []
        with ThreadPoolExecutor(num_cores()) as pool, Progress("shuffling", len(jobs), "times") as progress:
            for found in pool.map(drop, jobs):
                drops.append(found)
                progress.advance(1)
    unseen = _unseen(rows, columns, description)
    features = [
        {
            "feature": name,
            "drop": float(np.mean(own)),
            "spread": float(np.std(own, ddof=1)) if len(own) > 1 else 0.0,
            "unseen": unseen.get(name),
        }
        for name, own in zip(columns, np.reshape(drops, (-1, options.repeats)), strict=True)
    ]
    return {"auroc": base, "rows": len(rows), "features": sorted(features, key=lambda found: -found["drop"])}


def _unseen(rows: ClickRows, columns: dict[str, _Columns], description: ClicksDescription) -> dict[str, float]:
    """Return the share of rows with a rare or unseen value, of the features that have a vocabulary."""
    learned = {Path(file).stem.removeprefix("vocabulary_") for file in description.files if "vocabulary_" in file}
    return {
        feature.name: float((rows.ids[:, columns[feature.name][1]] == _UNSEEN).any(axis=1).mean())
        for feature in description.sparse
        if (feature.share_table or feature.name) in learned
    }


def _of_history(run: str | Path, options: Options) -> dict[str, Any]:
    """Return how each item of a history changes the score of the top recommendation."""
    if options.history is None:
        raise ConfigError(f"{run}: its model is a sequence model. Say what to explain: --history ITEMS.")
    if of_clicks := [name for name in ("rows", "repeats", "seed", "group") if name in options.changed_keys()]:
        raise ConfigError(f"{run}: its model is a sequence model, and --{of_clicks[0]} is for click models. Remove it.")
    recommender = Recommender(run, options.checkpoint, options.fallback, options.verify)
    items = np.array(recommender.items.find(options.history, "--history")) + 1
    if len(items) < 2:
        raise ConfigError("--history: one item is left out at a time, so give at least two.")
    first = recommender.after([options.history], 1, include_seen=False)
    target = first["item"][0]
    column = recommender.items.find([target], "--history")[0]
    shortened = [np.delete(items, index) for index in range(len(items))]
    scores = recommender.scores([items, *shortened])[:, column]
    names, titles = recommender.items.originals, recommender.items.titles
    found = [
        {"position": at + 1, "item": str(names[item - 1]), "title": str(titles[item - 1]), "effect": float(effect)}
        for at, (item, effect) in enumerate(zip(items.tolist(), scores[0] - scores[1:], strict=True))
    ]
    target_facts = {"item": str(target), "title": first["title"][0], "score": float(scores[0])}
    return {"target": target_facts, "items": sorted(found, key=lambda row: -row["effect"])}
