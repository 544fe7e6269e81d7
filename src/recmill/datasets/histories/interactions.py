"""Interactions (user, item, perhaps a time and a rating) -> histories, however many there are.

1. Read the rows, filter them by their values, and store them in parts.
2. Number users and items in the order of their original ids.
3. Distribute the rows to buckets of consecutive users, each small enough to be sorted in memory, and sort those.
4. Count users and items, filter them, and write what remains.

Memory holds only the distinct ids, their counts and one bucket.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from pydantic import NonNegativeInt

from recmill.config.sections import Section, key
from recmill.datasets.compressed import InputFile, file_state, sample_digest
from recmill.datasets.histories.writing import MIN_HISTORY, id_table, seal_histories
from recmill.datasets.inputs.delimited import BadRows
from recmill.datasets.inputs.files import distinct_names
from recmill.datasets.writing import NpyWriter, Work, check_disk, write_parquet
from recmill.errors import ConfigError, DataError
from recmill.schema import Description

log = logging.getLogger(__name__)

_PART_ROWS = 1 << 21
_BUCKET_ROWS = 1 << 22
_MAX_BUCKETS = 256  # each is an open file while rows are distributed
_MAX_IDS = 2**31 - 2
_NO_LIMIT = 2**63 - 1
_PATH_OPTIONS = {"input", "titles", "book_ids"}  # the recipe has the content of these files, not their location
_LATER_OPTIONS = {
    "layout", "columns", "separator", "quotes", "escape", "encoding", "skip_lines", "no_user", "only",
    "title_columns", "title_separator", "title_encoding", "time_format",
}  # fmt: skip


class Filters(Section):
    """Options that every source of interactions has."""

    input: str = key(..., "The raw data.")
    min_rating: float | None = key(None, "Keep only interactions with at least this rating.")
    min_item_count: NonNegativeInt = key(5, "Keep only items with at least this many interactions.")
    k_core: NonNegativeInt = key(0, "Filter until all users and items have at least this many interactions; 0: once.")
    repeats: Literal["first", "last", "keep"] = key(
        "first", "If a user has an item several times, keep the first interaction, the last, or all."
    )


@dataclass(frozen=True)
class InteractionsPlan:
    """Where interactions come from and how they are filtered.

    `batches` yields frames in file order, with columns user, item, time (if `has_time`), rating (for --min-rating) and
    those that `conditions` uses, which maps other options to what they demand of a row. `titles` returns columns
    original_id, title.
    """

    name: str
    options: Filters
    files: Sequence[InputFile]
    forecast_rows: int
    batches: Callable[[], Iterator[pl.DataFrame]]
    min_user_count: int
    max_user_count: int | None = None
    conditions: dict[str, pl.Expr] = field(default_factory=dict)
    titles: Callable[[], pl.DataFrame] | None = None
    has_time: bool = True
    frame_digest: str | None = None  # of a frame that is read instead of files
    bad_rows: BadRows | None = None  # that are skipped; None: one is an error

    @cached_property
    def recipe(self) -> dict[str, Any]:
        files = {
            name: f"{path.stat().st_size} bytes, sample {sample_digest(path)}"
            for name, path in zip(distinct_names(self.files), self.files, strict=True)
        }
        options = self.options.model_dump(exclude=_PATH_OPTIONS)
        if options.get("title_id_column", "") is None:
            del options["title_id_column"]  # as in datasets that were made before it was an option
        if options.get("on_bad_row") == "fail":
            del options["on_bad_row"], options["max_bad_rows"]  # likewise
        for name in _LATER_OPTIONS & options.keys() - self.options.model_dump(exclude_defaults=True).keys():
            del options[name]  # likewise
        return {**options, "files": files, **self._frame}

    @property
    def inputs(self) -> dict[str, Any]:
        files = {str(path.absolute()): file_state(path) for path in self.files}
        return {**files, **self._frame}

    @property
    def _frame(self) -> dict[str, str]:
        return {"frame": self.frame_digest} if self.frame_digest else {}


def write(plan: InteractionsPlan, work: Work) -> Description:
    # Rows are on disk as read (8 bytes per value), as sorted (4 per id, 8 per time) and as written.
    check_disk(work, plan.forecast_rows * (52 if plan.has_time else 28), plan.forecast_rows)
    titles = plan.titles() if plan.titles else pl.DataFrame(schema={"original_id": pl.String, "title": pl.String})
    read = work.part("rows", lambda: _store_rows(plan, work.scratch))
    parts = [work.scratch / name for name in read["parts"]]
    users = _count_ids(parts, "user")
    items = _count_ids(parts, "item")
    sorting = work.part("sorted", lambda: _sort_rows(parts, users, items, work.scratch, plan.options.repeats))
    buckets = [work.scratch / name for name in sorting["buckets"]]
    notes = [*read.get("skipped", [])]
    notes += [f"{option}: {count:,} interactions dropped" for option, count in read["dropped"].items() if count]
    if sorting["repeats"]:
        dropped = f"--repeats {plan.options.repeats}: {sorting['repeats']:,} interactions dropped"
        notes.append(f"{dropped}; --repeats keep keeps them")
    kept = _Kept(buckets, users.height, items.height)
    notes += kept.filter(plan)
    if not kept.interactions:
        steps = "".join(f"\n  {note}" for note in notes)
        source = "input" if plan.frame_digest else plan.files[0]
        text = f"{source}: none of {read['rows']:,} interactions is left:{steps}\nRelax the filters."
        changed = plan.options.model_dump(exclude_defaults=True)
        has_filters = any(name.startswith(("min_", "max_", "k_core", "only_")) for name in changed)
        work.give_up()
        raise ConfigError(text) if has_filters else DataError(text)
    _write_arrays(work.data, buckets, kept, plan.has_time)
    user_table = _kept_ids(users, kept.users, first_id=0)
    item_table = _kept_ids(items, kept.items, first_id=1)
    titles = titles.unique("original_id", keep="last")
    item_table = item_table.join(titles, on="original_id", how="left", maintain_order="left")
    if plan.titles and (untitled := item_table["title"].null_count()):
        notes.append(f"{untitled:,} of {item_table.height:,} items have no title: their original id stands for it")
    item_table = item_table.with_columns(pl.col("title").fill_null(pl.col("original_id")))
    return seal_histories(work.data, plan.name, plan.recipe, user_table, item_table, notes=notes)


def _store_rows(plan: InteractionsPlan, scratch: Path) -> dict[str, Any]:
    """Write the rows that meet the conditions, in file order, to files of _PART_ROWS rows or a few more."""
    columns = ["user", "item", "time"] if plan.has_time else ["user", "item"]
    conditions = dict(plan.conditions)
    if plan.options.min_rating is not None:
        conditions["--min-rating"] = pl.col("rating") >= plan.options.min_rating
    dropped = dict.fromkeys(conditions, 0)
    rows = 0
    parts: list[str] = []
    pending: list[pl.DataFrame] = []

    def store_pending() -> None:
        parts.append(f"rows-{len(parts):05d}.parquet")
        write_parquet(scratch / parts[-1], pl.concat(pending), compression="uncompressed")
        pending.clear()

    for batch in plan.batches():
        rows += batch.height
        for option, condition in conditions.items():
            before = batch.height
            batch = batch.filter(condition)
            dropped[option] += before - batch.height
        pending.append(batch.select(columns))
        if sum(frame.height for frame in pending) >= _PART_ROWS:
            store_pending()
    if pending:
        store_pending()
    skipped = plan.bad_rows.notes() if plan.bad_rows else []
    log.info("%s interactions read%s", f"{rows:,}", f", {skipped[0]}" if skipped else "")
    return {"rows": rows, "dropped": dropped, "parts": parts, "skipped": skipped}


def _count_ids(parts: list[Path], column: str) -> pl.DataFrame:
    """Return original_id, count, sorted by original id; an id's number is its row in this frame."""
    counted = (
        pl.scan_parquet(parts, glob=False).group_by(original_id=column).agg(count=pl.len()).collect(engine="streaming")
    )
    if counted.height > _MAX_IDS:
        raise DataError(f"{counted.height:,} different values of '{column}': the limit is {_MAX_IDS:,}.")
    return counted.sort("original_id")


def _sort_rows(
    parts: list[Path], users: pl.DataFrame, items: pl.DataFrame, scratch: Path, repeats: str
) -> dict[str, Any]:
    """Write rows, with numbers for ids, sorted by (user, time, file order) to one file per bucket; drop repeats."""
    pair = pl.col("user").cast(pl.Int64) * 2**32 + pl.col("item")
    buckets: list[str] = []
    dropped = 0
    for unsorted in _distribute(parts, users, items, scratch):
        frame = unsorted.sort([name for name in ("user", "time") if name in unsorted.columns], maintain_order=True)
        if repeats != "keep":
            frame = frame.filter(pair.is_first_distinct() if repeats == "first" else pair.is_last_distinct())
        dropped += unsorted.height - frame.height
        buckets.append(f"sorted-{len(buckets):05d}.parquet")
        write_parquet(scratch / buckets[-1], frame, compression="uncompressed")
    return {"repeats": dropped, "buckets": buckets}


def _distribute(parts: list[Path], users: pl.DataFrame, items: pl.DataFrame, scratch: Path) -> Iterator[pl.DataFrame]:
    """Yield buckets of rows of consecutive users, with numbers for ids; the rows of a bucket are in file order."""
    counts = users["count"].to_numpy().astype(np.int64)
    rows_per_bucket = max(_BUCKET_ROWS, -(-int(counts.sum()) // _MAX_BUCKETS))
    bucket_of_user = (np.cumsum(counts) - counts) // rows_per_bucket
    paths = {bucket: scratch / f"bucket-{bucket:05d}" for bucket in np.unique(bucket_of_user).tolist()}
    with ExitStack() as stack:
        files = {bucket: stack.enter_context(path.open("wb")) for bucket, path in paths.items()}
        for part in parts:
            rows = pl.read_parquet(part, glob=False)
            for column, ids in (("user", users), ("item", items)):
                numbers = ids.select(pl.col("original_id").alias(column), number=pl.int_range(pl.len(), dtype=pl.Int32))
                rows = rows.join(numbers, on=column, how="left", maintain_order="left")
                rows = rows.drop(column).rename({"number": column})
            rows = rows.with_columns(bucket=bucket_of_user[rows["user"].to_numpy()])
            for (bucket,), chosen in rows.partition_by("bucket", include_key=False, as_dict=True).items():
                records = chosen.to_numpy(structured=True)
                files[bucket].write(records.tobytes())
    for path in paths.values():
        yield pl.from_numpy(np.fromfile(path, records.dtype))
        path.unlink()


class _Kept:
    """How many interactions each user and each item still has after the filters so far; 0 if it was dropped."""

    def __init__(self, buckets: list[Path], num_users: int, num_items: int) -> None:
        self._buckets = buckets
        self.users = np.ones(num_users, np.int64)
        self.items = np.ones(num_items, np.int64)
        self._count()

    @property
    def interactions(self) -> int:
        return int(self.users.sum())

    def rows_of(self, bucket: Path, columns: list[str] | None = None) -> pl.DataFrame:
        frame = pl.read_parquet(bucket, columns=columns, glob=False)
        is_kept = (self.users[frame["user"].to_numpy()] > 0) & (self.items[frame["item"].to_numpy()] > 0)
        return frame.filter(is_kept)

    def filter(self, plan: InteractionsPlan) -> list[str]:
        """Filter items, then users, then both until nothing changes; return what was dropped."""
        min_user = max(plan.min_user_count, MIN_HISTORY)
        max_user = plan.max_user_count or _NO_LIMIT
        span = f"fewer than {min_user}" + (f" or more than {max_user}" if plan.max_user_count else "")
        min_item, k = plan.options.min_item_count, plan.options.k_core
        rules = {  # each is applied until it drops nothing; only the last can drop more the second time
            f"--min-item-count {min_item}": (min_item, 1, _NO_LIMIT),
            f"users of {span} interactions": (1, min_user, max_user),
            f"--k-core {k}": (k, max(k, MIN_HISTORY), _NO_LIMIT),
        }
        notes = []
        for rule, limits in rules.items():
            before = self._sizes()
            while self._keep(*limits):
                pass
            rows, users, items = np.subtract(before, self._sizes()).tolist()
            if rows:
                notes.append(f"{rule}: {rows:,} interactions dropped ({users:,} users, {items:,} items)")
        return notes

    def _keep(self, min_item: int, min_user: int, max_user: int) -> bool:
        """Keep users and items with these numbers of interactions; return whether any was dropped."""
        items = self.items * (self.items >= min_item)
        users = self.users * ((self.users >= min_user) & (self.users <= max_user))
        if np.array_equal(items, self.items) and np.array_equal(users, self.users):
            return False  # counting reads every row
        self.items, self.users = items, users
        self._count()
        return True

    def _sizes(self) -> tuple[int, int, int]:
        return self.interactions, int(np.count_nonzero(self.users)), int(np.count_nonzero(self.items))

    def _count(self) -> None:
        users, items = np.zeros_like(self.users), np.zeros_like(self.items)
        for bucket in self._buckets:
            frame = self.rows_of(bucket, ["user", "item"])
            users += np.bincount(frame["user"].to_numpy(), minlength=len(users))
            items += np.bincount(frame["item"].to_numpy(), minlength=len(items))
        self.users, self.items = users, items


def _write_arrays(directory: Path, buckets: list[Path], kept: _Kept, has_time: bool) -> None:
    id_of_item = np.cumsum(kept.items > 0)  # the first kept item is 1
    shape = (kept.interactions,)
    with ExitStack() as stack:
        items = stack.enter_context(NpyWriter(directory / "items.npy", np.int32, shape))
        times = stack.enter_context(NpyWriter(directory / "timestamps.npy", np.int64, shape)) if has_time else None
        for bucket in buckets:
            frame = kept.rows_of(bucket)
            items.append(id_of_item[frame["item"].to_numpy()])
            if times:
                times.append(frame["time"].to_numpy())


def _kept_ids(names: pl.DataFrame, counts: np.ndarray, first_id: int) -> pl.DataFrame:
    is_kept = counts > 0
    return id_table(names["original_id"].filter(is_kept).cast(pl.String), counts[is_kept], first_id)
