"""Interactions (user, item, perhaps a rating and a time) -> histories, whatever their number.

Steps: rows are read, filtered and put aside; users and items are numbered in the order of their original ids; rows
go to buckets of consecutive users, each small enough to be sorted in memory; users and items are counted and filtered;
what is left is written. Only the distinct ids, their counts and one bucket are in memory.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from pydantic import Field, NonNegativeInt

from recmill.config.sections import Section
from recmill.datasets.compressed import forecast_rows, sample_digest
from recmill.datasets.histories.writing import MIN_HISTORY, seal_written
from recmill.datasets.writing import NpyWriter, Work, check_disk, write_parquet
from recmill.errors import DataError
from recmill.schema import Description

log = logging.getLogger(__name__)

_PART_ROWS = 1 << 21
_BUCKET_ROWS = 1 << 22
_MOST_BUCKETS = 256  # each is an open file while rows are dealt out
_MOST_IDS = 2**31 - 2
_PATHS = {"input", "titles", "book_ids"}  # options that are files: what is in them counts, not where they are


class Filters(Section):
    """The options that every source of interactions has."""

    input: str = Field(description="The raw data.")
    min_rating: float | None = Field(None, description="Only interactions rated at least so.")
    min_item_count: NonNegativeInt = Field(5, description="Only items with so many interactions.")
    k_core: NonNegativeInt = Field(
        0, description="Drop users and items again and again, until each has so many. 0: once is enough."
    )
    repeats: Literal["first", "last", "keep"] = Field(
        "first", description="An item that a user meets again: keep the first meeting, the last, or all."
    )


@dataclass(frozen=True)
class Plan:
    """All that is decided before any work. `batches` gives columns user, item, time (or none) and what `only` asks."""

    name: str
    options: Filters
    files: list[Path]
    batches: Callable[[], Iterator[pl.DataFrame]]
    min_user_count: int
    max_user_count: int | None = None
    only: dict[str, pl.Expr] = field(default_factory=dict)  # what a row must be, by the option that says so
    titles: Callable[[], pl.DataFrame] | None = None  # original_id, title
    has_time: bool = True

    @property
    def recipe(self) -> dict[str, Any]:
        """Same recipe, same bytes: cores and paths are no part of it."""
        files = {path.name: f"{path.stat().st_size} bytes, sample {sample_digest(path)}" for path in self.files}
        return json.loads(json.dumps({**self.options.model_dump(exclude=_PATHS), "files": files}))

    @property
    def inputs(self) -> dict[str, Any]:
        return {str(path.absolute()): [path.stat().st_size, path.stat().st_mtime_ns] for path in self.files}


def at_least_rated(options: Filters) -> dict[str, pl.Expr]:
    return {} if options.min_rating is None else {"--min-rating": pl.col("rating") >= options.min_rating}


def write(work: Work, plan: Plan) -> Description:
    _check_disk(work, plan)
    titles = plan.titles() if plan.titles else pl.DataFrame(schema={"original_id": pl.String, "title": pl.String})
    read = work.part("rows", lambda: _put_aside(plan, work.scratch))
    parts = sorted(work.scratch.glob("rows-*.parquet"))
    users, items = (_numbered(parts, column) for column in ("user", "item"))
    sort = work.part("sorted", lambda: _deal_and_sort(parts, users, items, work.scratch, plan.options.repeats))
    buckets = sorted(work.scratch.glob("sorted-*.parquet"))
    notes = [f"{option}: {count:,} interactions dropped" for option, count in read["dropped"].items() if count]
    if sort["repeats"]:
        notes.append(f"--repeats {plan.options.repeats}: {sort['repeats']:,} interactions dropped")
    left = _Left(buckets, users.height, items.height)
    notes += left.filter(plan)
    if not left.interactions:
        steps = "".join(f"\n  {note}" for note in notes)
        raise DataError(f"{plan.files[0]}: of {read['rows']:,} interactions none is left:{steps}\nAsk for less.")
    _write_arrays(work.data, buckets, left, "time" in read["columns"])
    item_names = _kept(items, left.items, first_id=1)
    titles = titles.unique("original_id", keep="last")
    item_names = item_names.join(titles, on="original_id", how="left", maintain_order="left")
    if plan.titles and (untitled := item_names["title"].null_count()):
        notes.append(f"{untitled:,} of {item_names.height:,} items have no title: their original id stands for it")
    return seal_written(
        work.data,
        plan.name,
        plan.recipe,
        left.users[left.users > 0],
        _kept(users, left.users, first_id=0),
        item_names.select("id", "original_id", pl.col("title").fill_null(pl.col("original_id")), "count"),
        "time" in read["columns"],
        {},
        notes,
    )


def _check_disk(work: Work, plan: Plan) -> None:
    """Rows as they were read (8 bytes a value), sorted (4 an id, 8 a time) and as they are written."""
    rows = _forecast_rows(plan.files[0])
    check_disk(work, rows * (52 if plan.has_time else 28), rows)


def _forecast_rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return forecast_rows(path)
    try:
        return pl.scan_parquet(path).select(pl.len()).collect().item()
    except pl.exceptions.PolarsError:
        return 0  # damaged: reading it will tell


def _put_aside(plan: Plan, scratch: Path) -> dict[str, Any]:
    """Rows that are what `only` says, as rows-*.parquet in the order of the source."""
    for left in scratch.glob("rows-*.parquet"):  # of a run that was killed
        left.unlink()
    rows, parts, held, held_rows = 0, 0, list[pl.DataFrame](), 0
    dropped = dict.fromkeys(plan.only, 0)
    columns: list[str] = []
    for batch in plan.batches():
        rows += batch.height
        for option, condition in plan.only.items():
            before, batch = batch.height, batch.filter(condition)
            dropped[option] += before - batch.height
        columns = [name for name in ("user", "item", "time") if name in batch.columns]
        held.append(batch.select(columns))
        held_rows += batch.height
        if held_rows >= _PART_ROWS:
            write_parquet(scratch / f"rows-{parts:05d}.parquet", pl.concat(held), compression="uncompressed")
            held, held_rows, parts = [], 0, parts + 1
    if held:
        write_parquet(scratch / f"rows-{parts:05d}.parquet", pl.concat(held), compression="uncompressed")
    log.info("%s interactions read", f"{rows:,}")
    return {"rows": rows, "dropped": dropped, "columns": columns}


def _numbered(parts: list[Path], column: str) -> pl.DataFrame:
    """original_id, count; in the order of the original ids, which is that of our numbers."""
    counted = pl.scan_parquet(parts).group_by(original_id=column).agg(count=pl.len()).collect(engine="streaming")
    if counted.height > _MOST_IDS:
        raise DataError(f"{counted.height:,} different values of '{column}': {_MOST_IDS:,} is the most.")
    return counted.sort("original_id")


def _deal_and_sort(
    parts: list[Path], users: pl.DataFrame, items: pl.DataFrame, scratch: Path, repeats: str
) -> dict[str, Any]:
    """Rows by (user, time, place in the source), as sorted-*.parquet: each a run of users, with numbers for ids."""
    counts = users["count"].to_numpy().astype(np.int64)
    total = int(counts.sum())
    bucket_of_user = (np.cumsum(counts) - counts) // max(_BUCKET_ROWS, -(-total // _MOST_BUCKETS))
    used = np.unique(bucket_of_user).tolist()
    for left in scratch.glob("sorted-*.parquet"):
        left.unlink()
    paths = {bucket: scratch / f"dealt-{bucket:05d}" for bucket in used}
    with ExitStack() as stack:
        files = {bucket: stack.enter_context(path.open("wb")) for bucket, path in paths.items()}
        for part in parts:
            rows = _with_numbers(pl.read_parquet(part), users, items)
            bucket_of_row = bucket_of_user[rows["user"]]
            order = np.argsort(bucket_of_row, kind="stable")
            found, starts = np.unique(bucket_of_row[order], return_index=True)
            for bucket, piece in zip(found.tolist(), np.split(rows[order], starts[1:]), strict=False):
                files[bucket].write(piece.tobytes())
            dtype = rows.dtype
    dropped = 0
    for bucket, path in paths.items():
        dealt = np.fromfile(path, dtype)
        frame = pl.DataFrame({name: np.ascontiguousarray(dealt[name]) for name in dtype.fields or {}})
        frame = frame.sort([name for name in ("user", "time") if name in frame.columns], maintain_order=True)
        if repeats != "keep":
            frame = frame.filter(pl.Series(_is_only(frame, repeats)))
        dropped += len(dealt) - frame.height
        write_parquet(scratch / f"sorted-{bucket:05d}.parquet", frame, compression="uncompressed")
        path.unlink()
    return {"repeats": dropped}


def _is_only(frame: pl.DataFrame, repeats: str) -> np.ndarray:
    """Whether a row is the first (or last) of its user and item."""
    pairs = frame["user"].to_numpy().astype(np.int64) << 32 | frame["item"].to_numpy()
    is_only = np.zeros(len(pairs), dtype=bool)
    seen_from = slice(None) if repeats == "first" else slice(None, None, -1)
    is_only[seen_from][np.unique(pairs[seen_from], return_index=True)[1]] = True
    return is_only


def _with_numbers(rows: pl.DataFrame, users: pl.DataFrame, items: pl.DataFrame) -> np.ndarray:
    """Records (user, item, time or none) with our numbers, from 0, for ids; in the same order."""
    for column, names in (("user", users), ("item", items)):
        numbers = names.select(pl.col("original_id").alias(column), pl.int_range(pl.len(), dtype=pl.Int32).alias("n"))
        rows = rows.join(numbers, on=column, how="left", maintain_order="left").drop(column).rename({"n": column})
    types = {"user": np.int32, "item": np.int32, "time": np.int64}
    records = np.empty(rows.height, [(name, types[name]) for name in types if name in rows.columns])
    for name in rows.columns:
        records[name] = rows[name].to_numpy()
    return records


class _Left:
    """What the filters have left: interactions of each user and of each item, 0 for those that are out."""

    def __init__(self, buckets: list[Path], num_users: int, num_items: int) -> None:
        self._buckets = buckets
        self.users, self.items = np.ones(num_users, np.int64), np.ones(num_items, np.int64)
        self._count()

    @property
    def interactions(self) -> int:
        return int(self.users.sum())

    def rows(self, frame: pl.DataFrame) -> np.ndarray:
        """Which rows of `frame` are left."""
        return (self.users[frame["user"].to_numpy()] > 0) & (self.items[frame["item"].to_numpy()] > 0)

    def filter(self, plan: Plan) -> list[str]:
        """Items, then users, then both until nothing changes if --k-core says so. Returns notes on what was dropped."""
        options = plan.options
        before = self._sizes()
        self._keep(self.items >= options.min_item_count, self.users > 0)
        notes = [self._note(f"--min-item-count {options.min_item_count}", before)]

        before, least = self._sizes(), max(plan.min_user_count, MIN_HISTORY)
        most = plan.max_user_count or np.iinfo(np.int64).max
        self._keep(self.items > 0, (self.users >= least) & (self.users <= most))
        span = f"fewer than {least}" + (f" or more than {most}" if plan.max_user_count else "")
        notes.append(self._note(f"users of {span} interactions", before))

        before, k = self._sizes(), options.k_core
        changed = k > 0
        while changed:
            sizes = self._sizes()
            self._keep(self.items >= k, self.users >= max(k, MIN_HISTORY))
            changed = sizes != self._sizes()
        notes.append(self._note(f"--k-core {k}", before))
        return [note for note in notes if note]

    def _keep(self, items: np.ndarray, users: np.ndarray) -> None:
        if items[self.items > 0].all() and users[self.users > 0].all():
            return  # counting again would read everything
        self.items, self.users = items * self.items, users * self.users
        self._count()

    def _sizes(self) -> tuple[int, int, int]:
        return self.interactions, int(np.count_nonzero(self.users)), int(np.count_nonzero(self.items))

    def _note(self, rule: str, before: tuple[int, int, int]) -> str:
        rows, users, items = (old - new for old, new in zip(before, self._sizes(), strict=True))
        return f"{rule}: {rows:,} interactions dropped ({users:,} users, {items:,} items)" if rows else ""

    def _count(self) -> None:
        users, items = np.zeros_like(self.users), np.zeros_like(self.items)
        for bucket in self._buckets:
            frame = pl.read_parquet(bucket, columns=["user", "item"])
            frame = frame.filter(pl.Series(self.rows(frame)))
            users += np.bincount(frame["user"].to_numpy(), minlength=len(users))
            items += np.bincount(frame["item"].to_numpy(), minlength=len(items))
        self.users, self.items = users, items


def _write_arrays(directory: Path, buckets: list[Path], left: _Left, has_time: bool) -> None:
    number_of_item = np.cumsum(left.items > 0)  # the first is 1
    shape = (left.interactions,)
    with ExitStack() as stack:
        items = stack.enter_context(NpyWriter(directory / "items.npy", np.int32, shape))
        times = stack.enter_context(NpyWriter(directory / "timestamps.npy", np.int64, shape)) if has_time else None
        for bucket in buckets:
            frame = pl.read_parquet(bucket)
            frame = frame.filter(pl.Series(left.rows(frame)))
            items.append(number_of_item[frame["item"].to_numpy()])
            if times:
                times.append(frame["time"].to_numpy())


def _kept(names: pl.DataFrame, counts: np.ndarray, first_id: int) -> pl.DataFrame:
    """id, original_id, count of what is left."""
    kept = names.with_columns(count=pl.Series(counts)).filter(pl.col("count") > 0)
    return kept.select(
        pl.int_range(first_id, pl.len() + first_id, dtype=pl.Int64).alias("id"),
        pl.col("original_id").cast(pl.String),
        "count",
    )
