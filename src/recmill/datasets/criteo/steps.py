"""Criteo click logs: the 1TB logs (day_0, day_1, ...) or Kaggle's train.txt, .gz and .zst too.

Rows are 40 fields: a label, 13 whole numbers, 26 hexadecimal ids. Text is read once into whole numbers, then ids are
counted, then mapped; memory stays under --memory-budget whatever the number of rows. Killed and run again, it goes on.
By default ids are contiguous: 0 is missing, 1 is rare or not in the training rows, then the most frequent first.
"""

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from recmill import rng
from recmill.data.click_rows import ClickRows
from recmill.datasets.clicks import PARTS, write_day, write_parquet_parts
from recmill.datasets.compressed import forecast_rows
from recmill.datasets.criteo.ids import (
    FIRST_ID,
    MISSING,
    LogRows,
    LookupRound,
    Vocabularies,
    hash64,
    is_missing,
    modulo,
    modulo_as_oneflow,
    modulo_as_torchrec,
    write_vocabulary,
)
from recmill.datasets.criteo.input import RawLog
from recmill.datasets.criteo.log import (
    BYTES_PER_ROW,
    NUM_DENSE,
    NUM_SPARSE,
    LogBlock,
    ParsedLog,
    parse_log,
)
from recmill.datasets.criteo.plan import Plan, Segment, describer, features, plan, ranges_by_split, segments
from recmill.datasets.criteo.rules import Options
from recmill.datasets.multi_hot import companion_paths, write_companions, write_multi_hot
from recmill.datasets.parallel import ordered
from recmill.datasets.shuffle import Buckets
from recmill.datasets.writing import Work, check_disk, seal
from recmill.errors import ResourceError
from recmill.hardware.cpu import num_cores
from recmill.observe.progress import Progress
from recmill.schema import SPLITS, Description, SparseFeature

__all__ = ["Options", "Plan", "plan", "write"]

log = logging.getLogger(__name__)


def write(work: Work, plan: Plan) -> Description:
    if plan.engine == "spark":
        from recmill.datasets.criteo import spark as criteo_spark

        return criteo_spark.write(work, plan)
    needed = _check_disk(work, plan)
    try:
        with ThreadPoolExecutor(num_cores()) as pool:
            try:
                return _Preparation(work, plan, pool).run()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(work.directory).free
        raise ResourceError(
            f"{work.directory}: the disk is full. {needed:,} bytes are needed in all, {free:,} are free. Free some "
            "space, then run the same command again: it goes on from what is finished."
        ) from error


def _check_disk(work: Work, plan: Plan) -> int:
    """Bytes needed at the worst moment, by a forecast from the size and the first rows of each file."""
    rules = plan.rules
    rows = [forecast_rows(raw.path) for raw in plan.logs]
    ids_bytes = NUM_SPARSE * (8 if rules.wide_ids else 4)
    out_bytes = 4 + 4 * NUM_DENSE + (4 * sum(rules.multi_hot) or ids_bytes)
    largest = BYTES_PER_ROW + (ids_bytes if _may_need_rounds(plan, sum(rows)) else 0)
    scratch = 0
    if rules.shuffle != "none":
        scratch = min(plan.memory // 4, sum(rows) * (out_bytes + 4))  # a bucket stays until all of it is written
    if rules.multi_hot:
        tables = [min(size, max(rows) + FIRST_ID) if rules.ids == "contiguous" else size for size in rules.table_size]
        scratch += max(rows) * ids_bytes + 4 * sum(a * b for a, b in zip(tables, rules.multi_hot, strict=False))
    # A log's parsed rows are removed once they stand in the dataset: only the largest has both.
    needed = sum(rows) * max(largest, out_bytes) + max(rows) * min(largest, out_bytes) + scratch
    check_disk(work, needed, sum(rows))
    return needed


def _may_need_rounds(plan: Plan, rows: int) -> bool:
    """Hash tables take 8 to 16 bytes per id, and there are at most as many as rows."""
    return plan.rules.ids == "contiguous" and NUM_SPARSE * 16 * rows > plan.memory // 2


class _Preparation:
    """The steps, in order: read, count, map (with or without a new order), seal."""

    def __init__(self, work: Work, plan: Plan, pool: Executor) -> None:
        self.work, self.plan, self.rules, self.pool = work, plan, plan.rules, pool
        self.rounded = 0  # ids that --compat changed

    def run(self) -> Description:
        self.parsed = self._read()
        self.segments = segments(self.rules, self.plan.logs, [parsed.rows for parsed in self.parsed])
        if self.rules.ids == "contiguous":
            self._count()
            self._map_in_rounds()
        if self.rules.shuffle != "none":
            self._scatter()
        rows = self._write_parquet() if self.rules.format == "parquet" else self._write_npy()
        return self._seal(rows)

    # Read

    def _read(self) -> list[ParsedLog]:
        rules, parsed, bad_rows = self.rules, [], 0
        with Progress("reading", total=sum(forecast_rows(raw.path) for raw in self.plan.logs), unit="rows") as progress:
            for raw in self.plan.logs:
                allowed = None if rules.on_bad_row == "fail" else rules.max_bad_rows - bad_rows
                path = self.work.scratch / f"{raw.name}.rows"
                saved = self.work.part(f"read-{raw.name}", partial(self._read_log, raw, path, allowed, progress))
                parsed.append(ParsedLog(path, **saved))
                bad_rows += parsed[-1].bad_rows
                log.info("read %s: %s rows%s", raw.path, f"{parsed[-1].rows:,}", _skipped(parsed[-1].bad_rows))
        return parsed

    def _read_log(self, raw: RawLog, target: Path, bad_rows_allowed: int | None, progress: Progress) -> dict[str, Any]:
        parsed = parse_log(
            raw.path,
            target,
            has_labels=raw.has_labels,
            smallest=self.rules.smallest_dense,
            bad_rows_allowed=bad_rows_allowed,
            pool=self.pool,
            chunk_bytes=min(max(self.plan.memory // (40 * num_cores()), 1 << 20), 1 << 24),
            progress=lambda text, rows: progress.advance(rows),
        )
        return parsed.saved()

    # Count

    def _vocabulary(self, column: int) -> Path:
        return self.work.data / f"vocabulary_C{column + 1}.npy"

    def _count(self) -> None:
        """A vocabulary per column, from the training rows (`compat`: from all)."""
        rules, number, counted = self.rules, 0, []
        for part in self.segments:
            if part.split == "train" or rules.fit_on == "all":
                counted.append(LogRows(self.parsed[part.index], part.start, part.stop, number))
                number += part.rows

        def count(column: int) -> int:
            return write_vocabulary(
                self._vocabulary(column),
                counted,
                column,
                order=rules.id_order,
                min_frequency=rules.min_frequency,
                max_ids=(rules.table_size[column] if rules.table_size and not rules.compat else 2**32) - FIRST_ID,
                missing_is_zero=rules.missing_is_zero,
                memory=self.plan.memory * 7 // 10 // num_cores(),
                scratch=self.work.scratch,
            )

        with Progress("counting ids", total=NUM_SPARSE, unit="columns") as progress:
            for _ in ordered(
                self.pool, lambda c: self.work.part(f"count-C{c + 1}", lambda: count(c)), range(NUM_SPARSE), ahead=0
            ):
                progress.advance(1)

    # Map

    @cached_property
    def _vocabularies(self) -> Vocabularies:
        return Vocabularies([self._vocabulary(c) for c in range(NUM_SPARSE)], self.rules.missing_is_zero)

    @cached_property
    def _rounds(self) -> list[LookupRound]:
        """A round builds its hash tables when it is used. Once begun, several rounds stay as they are."""
        rounds = self._vocabularies.rounds(self.plan.memory // 2)
        if len(rounds) == 1 and not self.work.is_done("memory-of-rounds"):
            return rounds
        return self._vocabularies.rounds(self.work.part("memory-of-rounds", lambda: self.plan.memory // 2))

    def _map_in_rounds(self) -> None:
        """If the vocabularies do not fit in memory together: all rows with the first tables, then with the next."""
        if len(self._rounds) == 1:
            return
        log.info("the vocabularies are mapped in %d rounds, for want of memory", len(self._rounds))
        total = sum(parsed.rows for parsed in self.parsed) * len(self._rounds)
        with Progress("mapping ids", total=total, unit="rows") as progress:
            for number, lookup in enumerate(self._rounds):
                for parsed in (parsed for parsed in self.parsed if parsed.path.exists()):  # the others are written
                    name = f"map-{number}-{parsed.path.stem}"
                    self.work.part(name, partial(self._map_log, parsed, lookup, progress))
                lookup.forget()

    def _mapped(self, parsed: ParsedLog) -> Path:
        return parsed.path.with_suffix(".ids")

    def _map_log(self, parsed: ParsedLog, lookup: LookupRound, progress: Progress) -> None:
        """Doing it twice does no harm: each round writes its own ids only."""
        row_bytes, dtype = NUM_SPARSE * self.id_type().itemsize, self.id_type()
        self._mapped(parsed).touch()
        with self._mapped(parsed).open("r+b") as file:
            file.truncate(parsed.rows * row_bytes)

            def mapped(place: tuple[int, int]) -> tuple[int, np.ndarray]:
                first, rows = place
                ids = np.fromfile(self._mapped(parsed), dtype, rows * NUM_SPARSE, offset=first * row_bytes)
                lookup.map(parsed.read_block(first, rows), ids := ids.reshape(rows, NUM_SPARSE))
                return first, ids

            for first, ids in ordered(self.pool, mapped, parsed.blocks(), ahead=4):
                file.seek(first * row_bytes)
                file.write(ids.data)
                progress.advance(len(ids))

    def id_type(self) -> np.dtype:
        is_wide = self.rules.wide_ids or max(feature.rows for feature in self._features()) > 2**31
        return np.dtype(np.int64 if is_wide else np.int32)

    def _ids(self, parsed: ParsedLog, first: int, block: LogBlock) -> np.ndarray:
        rules, rows = self.rules, len(block)
        if rules.ids == "contiguous" and len(self._rounds) > 1:
            offset = first * NUM_SPARSE * self.id_type().itemsize
            found = np.fromfile(self._mapped(parsed), self.id_type(), rows * NUM_SPARSE, offset=offset)
            return found.reshape(rows, NUM_SPARSE)
        if rules.ids == "contiguous":
            ids = np.empty((rows, NUM_SPARSE), self.id_type())
            self._rounds[0].map(block, ids)
            return ids
        sizes = np.array(rules.table_size)
        if rules.ids == "hash64":
            hashed = hash64(block)
            if not rules.table_size:
                return hashed
            buckets = (hashed.view(np.uint64) % (sizes - 1).astype(np.uint64)).astype(np.int64) + 1
            return np.where(is_missing(block).T, MISSING, buckets)
        if rules.compat == "oneflow":
            return modulo_as_oneflow(block, rules.table_size[0])
        if rules.compat:
            return modulo_as_torchrec(block, sizes if rules.table_size else np.full(NUM_SPARSE, 2**32))
        return modulo(block, sizes)

    def _rows(self, part: Segment) -> Iterator[ClickRows]:
        """The finished rows of a segment, in the log's order."""
        parsed, dense_rule = self.parsed[part.index], self.rules.dense_rule(self.parsed, part.index)

        def finished(place: tuple[int, int]) -> ClickRows:
            first, rows = place
            block = parsed.read_block(first, rows)
            done = ClickRows(dense_rule(block.dense), self._ids(parsed, first, block), block.labels)
            return done[max(part.start - first, 0) : part.stop - first]

        places = [(first, rows) for first, rows in parsed.blocks() if first < part.stop and first + rows > part.start]
        return ordered(self.pool, finished, places, ahead=4)

    # A new order

    @cached_property
    def _buckets(self) -> Buckets:
        total = sum(part.rows for part in self.segments if part.split == "train")
        id_type = np.int32 if self.rules.is_rounded else self.id_type().type
        memory = self.work.part("memory-of-buckets", lambda: self.plan.memory // 4)  # once begun, they stay as they are
        return Buckets(self.work.scratch / "buckets", total, NUM_DENSE, NUM_SPARSE, id_type, memory)

    def _positions(self) -> Callable[[Segment, int, int], np.ndarray]:
        """New positions of training rows number .. number + n."""
        rules, seed = self.rules, self.rules.seed
        train = [part for part in self.segments if part.split == "train"]
        total = sum(part.rows for part in train)
        if rules.shuffle == "day":

            def within_the_day(part: Segment, number: int, rows: int) -> np.ndarray:
                permutation = rng.Permutation(part.rows, rng.stream_key(seed, "criteo shuffle", part.index))
                return permutation(np.arange(rows) + (number - part.number)) + part.number

            return within_the_day
        if rules.is_rounded:
            order = _numpys_order(total, seed, self.plan.memory)
            return lambda part, number, rows: order[number : number + rows]
        permutation = rng.Permutation(total, rng.stream_key(seed, "criteo shuffle"))
        return lambda part, number, rows: permutation(np.arange(rows) + number)

    def _scatter(self) -> None:
        train = [part for part in self.segments if part.split == "train"]
        positions = self._positions()
        sizes: dict[str, int] = {}
        with Progress("shuffling", total=sum(part.rows for part in train), unit="rows") as progress:
            for part in train:
                name = f"scatter-{self.plan.logs[part.index].name}"
                if not self.work.is_done(name):
                    self._buckets.cut_back(sizes)
                scattered = self.work.part(name, partial(self._scatter_segment, part, positions, progress))
                sizes = scattered["sizes"]
                self.rounded += scattered["rounded"]
                self._drop_parsed(part.index, after=part)

    def _scatter_segment(self, part: Segment, positions: Any, progress: Progress) -> dict[str, Any]:
        rounded, number = 0, part.number

        def numbered() -> Iterator[tuple[int, ClickRows]]:
            at = number
            for rows in self._rows(part):
                yield at, rows
                at += len(rows)

        def packed(item: tuple[int, ClickRows]) -> tuple[np.ndarray, np.ndarray, int]:
            at, rows = item
            changed = 0
            if self.rules.is_rounded:
                ids = rows.ids.astype(np.float32).astype(np.int64)
                changed = int((ids != rows.ids).sum())
                rows = replace(rows, ids=ids)
            return *self._buckets.packed(rows, positions(part, at, len(rows))), changed

        for records, buckets, changed in ordered(self.pool, packed, numbered(), ahead=2):
            self._buckets.add(records, buckets)
            rounded += changed
            progress.advance(len(records))
        return {"sizes": self._buckets.sizes(), "rounded": rounded}

    def _drop_parsed(self, index: int, after: Segment) -> None:
        """The parsed rows of a log that nobody needs any more."""
        if after == [part for part in self.segments if part.index == index][-1]:
            self.parsed[index].path.unlink(missing_ok=True)
            self._mapped(self.parsed[index]).unlink(missing_ok=True)

    # Write

    def _rows_to_write(self, part: Segment) -> Iterator[ClickRows]:
        if part.split == "train" and self.rules.shuffle != "none":
            return self._buckets.rows(part.number, part.number + part.rows)
        return self._rows(part)

    def _written(self, part: Segment, progress: Progress) -> Iterator[ClickRows]:
        for rows in self._rows_to_write(part):
            yield rows
            progress.advance(len(rows))

    def _forget(self, part: Segment) -> None:
        """What was written is not needed as scratch."""
        if part.split == "train" and self.rules.shuffle != "none":
            self._buckets.forget_before(part.number + part.rows)
        else:
            self._drop_parsed(part.index, after=part)

    def _write_npy(self) -> dict[str, int]:
        """A day's three files hold all its segments, one after the other."""
        rows_of: dict[str, int] = {}
        with Progress("writing", total=sum(part.rows for part in self.segments), unit="rows") as progress:
            for index, raw in enumerate(self.plan.logs):
                parts = [part for part in self.segments if part.index == index]
                is_rounded = self.rules.is_rounded and any(part.split == "train" for part in parts)
                id_type = np.int32 if is_rounded else self.id_type().type
                rows = sum(part.rows for part in parts)
                blocks = chain.from_iterable(self._written(part, progress) for part in parts)
                self.work.part(f"write-{raw.name}", partial(write_day, self.work.data, raw.name, rows, blocks, id_type))
                for part in parts:
                    self._forget(part)
                rows_of |= {f"{raw.name}_{name}.npy": rows for name in PARTS}
        return self._to_multi_hot(rows_of) if self.rules.multi_hot else rows_of

    def _to_multi_hot(self, rows_of: dict[str, int]) -> dict[str, int]:
        self.work.part("companions", self._write_companions)
        tables = companion_paths(self.work.scratch, NUM_SPARSE)
        with Progress("multi-hot", total=len(self.plan.logs), unit="days") as progress:
            for raw in self.plan.logs:
                one_hot, many = f"{raw.name}_sparse.npy", f"{raw.name}_sparse_multi_hot.npz"

                self.work.part(f"multi-hot-{raw.name}", partial(self._write_multi_hot, one_hot, many, tables))
                (self.work.data / one_hot).unlink(missing_ok=True)
                rows_of[many] = rows_of.pop(one_hot)
                progress.advance(1)
        return rows_of

    def _write_multi_hot(self, one_hot: str, many: str, tables: list[Path]) -> None:
        write_multi_hot(self.work.data / many, np.load(self.work.data / one_hot, mmap_mode="r"), tables)

    def _write_companions(self) -> None:
        rules = self.rules
        sizes = [feature.rows for feature in self._features()]
        write_companions(self.work.scratch, sizes, list(rules.multi_hot), rules.multi_hot_distribution, rules.seed)

    def _write_parquet(self) -> dict[str, int]:
        rows_of: dict[str, int] = {}
        with Progress("writing", total=sum(part.rows for part in self.segments), unit="rows") as progress:
            for part in self.segments:
                stem = f"{part.split}-{self.plan.logs[part.index].name}"
                rows_of |= self.work.part(
                    f"write-{stem}",
                    partial(
                        write_parquet_parts,
                        self.work.data,
                        stem,
                        self._written(part, progress),
                        label_type=np.float32 if self.rules.compat == "oneflow" else np.int32,
                        id_type=self.id_type().type,
                    ),
                )
                self._forget(part)
        return rows_of

    # Seal

    def _features(self) -> list[SparseFeature]:
        sizes = self._vocabularies.sizes if self.rules.ids == "contiguous" else []
        return features(self.rules, sizes)

    def _seal(self, rows_of: dict[str, int]) -> Description:
        rules = self.rules
        if rules.ids == "contiguous":
            rows_of |= {f"vocabulary_C{c + 1}.npy": size for c, size in enumerate(self._vocabularies.sizes)}
        notes = list(rules.notes)
        for parsed in self.parsed:
            notes += [f"skipped: {bad}" for bad in parsed.first_bad]
        if self.rounded:
            notes.append(
                f"--compat {rules.compat}: {self.rounded:,} training ids above 2^24 were rounded to float32, "
                "as the original's shuffle does; those of the last day were not"
            )
        absent = [split for split in SPLITS if not any(part.split == split for part in self.segments)]
        if absent:
            notes.append(f"no rows for {' and '.join(absent)}: this dataset cannot be trained on as it is")
        counts = [(parsed.rows, parsed.bad_rows) for parsed in self.parsed]
        ranges = ranges_by_split(rules, self.plan.logs, self.segments, rows_of)
        return seal(self.work.data, describer(self.plan, self._features(), ranges, counts, notes), rows_of)


def _numpys_order(total: int, seed: int, memory: int) -> np.ndarray:
    """Where numpy's legacy shuffle of all rows puts each row: it cannot be had without an array of all rows."""
    if total * 16 > memory:
        raise ResourceError(
            f"--compat with --shuffle global needs {total * 16:,} bytes for the original's order of {total:,} rows: "
            "raise --memory-budget by as much, or leave out --compat."
        )
    order = np.arange(total)
    np.random.RandomState(seed).shuffle(order)
    positions = np.empty(total, np.int64)
    positions[order] = np.arange(total)
    return positions


def _skipped(bad_rows: int) -> str:
    return f", {bad_rows:,} bad rows skipped" if bad_rows else ""
