"""Prepare an own click log on Spark: a task is one file of the log, and the result has the bytes of one machine's.

Tasks run the code of the other engine on the blocks of their file. Small results are notes in JSON; all others go
through files in the scratch directory: Spark adds up counts and orders times there, and the rows of the dataset are
put together from there.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.data.click_rows import ClickRows
from recmill.datasets.compressed import InputFile
from recmill.datasets.own_clicks.encoding import Encoder, Recipe
from recmill.datasets.own_clicks.learning import Found, Learner
from recmill.datasets.own_clicks.schema import FIRST_VALUE, CategoricalFeature, ClicksSchema
from recmill.datasets.own_clicks.splitting import Splits
from recmill.datasets.own_clicks.steps import (
    Blocks,
    Encoded,
    Keeper,
    Kept,
    KeptBlock,
    Plan,
    all_skipped,
    block_encoder,
    counted,
    found,
    prepared,
)
from recmill.datasets.own_clicks.values import times
from recmill.datasets.own_clicks.writing import read_arrow, replaced, write_arrow
from recmill.datasets.spark import part_number, shared_paths, spark_session, uri
from recmill.datasets.writing import MADE_BY, Work, write_npy, write_parquet
from recmill.errors import KINDS, ConfigError, ResourceError, UserError, as_user_error
from recmill.hardware.memory import available_memory_bytes
from recmill.schema import SPLITS, Description

log = logging.getLogger(__name__)

_TRAIN = SPLITS.index("train")


def write(plan: Plan, work: Work) -> Description:
    with spark_session("clicks", plan.spark_master, work, plan.files, available_memory_bytes() // 4) as spark:
        return prepared(plan, work, _Cluster(plan, work, spark))


@dataclass(frozen=True)
class _File:
    """A file of the log, the blocks that were kept of it, and how many rows and training rows are before it."""

    index: int
    path: InputFile
    state: list[int | str]
    kept: tuple[KeptBlock, ...] = ()
    before: int = 0
    seen: int = 0

    def blocks(self, work: Work) -> Blocks:
        return Blocks(work.scratch, [(str(self.path), [*self.kept])], self.before)


class _Cluster:
    """The engine that uses the executors of Spark."""

    def __init__(self, plan: Plan, work: Work, spark: Any) -> None:
        self._log, self._work, self._spark = plan.log, work, spark
        self._files = [
            _File(i, file.absolute(), [*plan.inputs[str(file.absolute())]]) for i, file in enumerate(plan.files)
        ]
        before = 0
        read = partial(_read, self._log, plan.max_bad_rows)
        found = work.part("read", lambda: self._by_file("read", read))
        self.skipped = all_skipped(plan.max_bad_rows, found)
        for index, kept in enumerate(found):
            self._files[index] = replace(self._files[index], kept=tuple(map(tuple, kept["blocks"])), before=before)
            before += self._files[index].blocks(work).rows
        self.blocks = Blocks(work.scratch, [(str(file.path), [*file.kept]) for file in self._files])
        log.info("read %s rows of %s files", f"{self.blocks.rows:,}", f"{len(self._files):,}")

    def _by_file(self, step: str, run: Callable[[Work, _File], Any]) -> list[Any]:
        """Return what `run` returns for each file, or raise the error of the first file that has one.

        A file for which it was done before is not done again.
        """
        _failed(self._work, step).unlink(missing_ok=True)
        task = partial(_task, self._work.directory, MADE_BY, step, run)
        results = self._spark.sparkContext.parallelize(self._files, len(self._files)).map(task).collect()
        for error, message in results:
            if error:
                raise KINDS[error](message)
        return [result for _, result in results]

    def times_at(self, places: list[int]) -> list[int]:
        unordered = self._directory("times")
        self._by_file("times", partial(_times, self._log))
        ordered = self._saved(self._spark.read.parquet(uri(unordered)).orderBy("time"), "ordered-times")
        return [int(ordered.slice(place, 1).collect().item()) for place in places]

    def counted(self, splits: Splits) -> dict[str, list[int]]:
        of_files = self._by_file("count", partial(_counted, splits))
        return {kind: np.sum([counts[kind] for counts in of_files], axis=0).tolist() for kind in of_files[0]}

    def found(self, splits: Splits, training_rows: int) -> Found:
        seen = 0
        for index, counts in enumerate(self._by_file("count", partial(_counted, splits))):
            self._files[index] = replace(self._files[index], seen=seen)
            seen += counts["rows"][_TRAIN]
        for feature in self._log.tables:
            self._directory(f"counts-{feature.name}")
        parts = self._by_file("learn", partial(_learned, self._log, splits, training_rows))
        totals = _merged(parts, "totals", sum)
        return Found(
            _merged(parts, "longest", max),
            _merged(parts, "times", lambda seen_times: sorted(set().union(*seen_times))),
            _merged(parts, "numbers", lambda names: np.concatenate([np.load(self._work.scratch / n) for n in names])),
            {name: self._frequent(name) for name in totals},
            totals,
        )

    def _frequent(self, name: str) -> pl.DataFrame:
        """Return the values that a vocabulary may have, with their counts in all files."""
        feature = next(feature for feature in self._log.tables if feature.name == name)
        assert isinstance(feature, CategoricalFeature)
        counts = self._spark.read.parquet(uri(self._directory(f"counts-{name}")))
        added_up = counts.groupBy("value").agg({"count": "sum"}).withColumnRenamed("sum(count)", "count")
        frequent = added_up.filter(f"count >= {feature.min_frequency}")
        if feature.table_size:
            by_frequency = frequent.orderBy("count", "value", ascending=[False, True])
            frequent = by_frequency.limit(feature.table_size - FIRST_VALUE)
        return self._saved(frequent, f"frequent-{name}").collect()

    def encoded(self, encoder: Encoder, splits: Splits) -> Iterator[Encoded]:
        notes = self._by_file("encode", partial(_encoded, encoder.recipe, splits))
        for note in notes:
            for name, counts in note["tally"].items():
                encoder.tally.counts.setdefault(name, Counter()).update(counts)
        for index, note in enumerate(notes):
            for number, split in enumerate(note["splits"]):
                yield _part(self._work, index, number, split)

    def _directory(self, name: str) -> Path:
        path = self._work.scratch / name
        path.mkdir(exist_ok=True)
        return path

    def _saved(self, frame: Any, name: str) -> pl.LazyFrame:
        """Write a frame of Spark, and return its rows in their order."""
        target = self._work.scratch / name
        frame.write.mode("overwrite").parquet(f"file://{target}")
        files = sorted(target.glob("part-*"), key=lambda path: part_number(path.name))
        return pl.scan_parquet(files, glob=False)


def _merged(parts: list[dict[str, Any]], kind: str, merge: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Merge what the files hold of this kind, feature by feature."""
    names = dict.fromkeys(name for part in parts for name in part[kind])
    return {name: merge([part[kind][name] for part in parts if name in part[kind]]) for name in names}


def _task(directory: Path, made_by: str, step: str, run: Callable[[Work, _File], Any], file: _File) -> tuple[str, Any]:
    """Return ("", what `run` returns), or the name of an error that a user can cause and its message.

    After an error in a file, those that follow are left out: the first error is what will be reported.
    """
    try:
        if made_by != MADE_BY:
            raise ConfigError(
                f"Spark's executors have {MADE_BY}, this machine has {made_by}. Install the same version."
            )
        for path in (directory, file.path):
            if isinstance(path, Path) and not path.exists():
                fact = f"{path}: not found on {socket.gethostname()}, by a task of Spark."
                raise ResourceError(f"{fact} {shared_paths(file.path, directory)}")
        work = Work(directory)
        if _failed(work, step).exists():
            return "", None
        return "", work.part(f"{step}-{file.index}", lambda: run(work, file))
    except (UserError, OSError, MemoryError, pl.exceptions.PolarsError) as error:
        known = as_user_error(error)
        if known is None:
            raise
        if directory.exists():
            _failed(Work(directory), step).touch()
        return type(known).__name__, str(known)


def _failed(work: Work, step: str) -> Path:
    """Return the file that says that a step has failed for a file of the log."""
    return work.scratch / f"failed-{step}"


def _read(log: ClicksSchema, max_bad_rows: int | None, work: Work, file: _File) -> Kept:
    with ThreadPoolExecutor(1) as pool:
        return Keeper(work.scratch, file.index, file.path, file.state, pool).keep(log, max_bad_rows)


def _times(log: ClicksSchema, work: Work, file: _File) -> None:
    of_rows = [times(rows, log) for _, rows in file.blocks(work)]
    _write_parquet(
        work.scratch / "times", file, pl.DataFrame({"time": np.concatenate([np.empty(0, np.int64), *of_rows])})
    )


def _counted(splits: Splits, work: Work, file: _File) -> dict[str, list[int]]:
    return counted(splits, file.blocks(work))


def _learned(log: ClicksSchema, splits: Splits, training_rows: int, work: Work, file: _File) -> dict[str, Any]:
    """Write the counts and the sample of numbers of a file, and return what else it holds."""
    held = found(Learner(log, training_rows, file.seen), splits, file.blocks(work))
    for name, counts in held.counts.items():
        _write_parquet(work.scratch / f"counts-{name}", file, counts)
    numbers = {name: f"numbers-{file.index}-{name}.npy" for name in held.numbers}
    for name, values in held.numbers.items():
        with replaced(work.scratch / numbers[name]) as path:
            write_npy(path, values, np.float64)
    return {"longest": held.longest, "times": held.times, "totals": held.totals, "numbers": numbers}


def _encoded(recipe: Recipe, splits: Splits, work: Work, file: _File) -> dict[str, Any]:
    """Write the encoded rows of a file, block by block, and return the split of each part and what was counted."""
    encoder = Encoder(recipe, work.data)
    encode = block_encoder(encoder, Encoder(recipe, work.data), splits)
    of_parts: list[int] = []
    for block in file.blocks(work):
        for part in encode(block):
            arrays: dict[str, Any] = {"dense": part.rows.dense, "ids": part.rows.ids, "labels": part.rows.labels}
            arrays |= {} if part.weights is None else {"weights": part.weights}
            stem = _stem(work, file.index, len(of_parts))
            with replaced(stem.with_suffix(".npz")) as path, path.open("wb") as target:
                np.savez(target, **arrays)
            if part.kept is not None:
                write_arrow(stem.with_suffix(".arrow"), part.kept)
            of_parts.append(part.split)
    return {"splits": of_parts, "tally": encoder.tally.counts}


def _part(work: Work, index: int, number: int, split: int) -> Encoded:
    stem = _stem(work, index, number)
    with np.load(stem.with_suffix(".npz")) as arrays:
        rows = ClickRows(arrays["dense"], arrays["ids"], arrays["labels"])
        weights = arrays.get("weights")
    kept = stem.with_suffix(".arrow")
    return Encoded(split, rows, weights, read_arrow(kept) if kept.exists() else None)


def _stem(work: Work, index: int, number: int) -> Path:
    return work.scratch / f"encoded-{index}-{number}"


def _write_parquet(directory: Path, file: _File, frame: pl.DataFrame) -> None:
    with replaced(directory / f"{file.index}.parquet") as path:
        write_parquet(path, frame)
