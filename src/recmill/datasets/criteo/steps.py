"""Criteo click logs: the 1TB logs (day_0, day_1, ...) or Kaggle's train.txt, also as .gz and .zst.

A row has 40 fields: a label, 13 integers, 26 hexadecimal ids. The text is parsed once into integers, then ids are
counted, then mapped. Memory stays below --memory-budget for any number of rows. A killed run resumes when the same
command is run again. By default ids are contiguous: 0 is missing, 1 is rare or not in the training rows, then the most
frequent id comes first.
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
from recmill.datasets.click_log import LogBlock, ParsedLog, parse_blocks, parse_log
from recmill.datasets.clicks import PARTS, sparse_names, write_day, write_parquet_parts, write_records
from recmill.datasets.criteo.ids import ids_of
from recmill.datasets.criteo.npy_logs import read_npy_log
from recmill.datasets.criteo.options import CRITEO, Options
from recmill.datasets.criteo.plan import (
    Plan,
    RawLog,
    Segment,
    Written,
    log_read,
    plan,
    record_file,
    seal_written,
    vocabulary_file,
)
from recmill.datasets.multi_hot import companion_paths, write_companions, write_multi_hot
from recmill.datasets.parallel import ordered
from recmill.datasets.shuffle import Buckets
from recmill.datasets.vocabularies import FIRST_ID, Counting, LogRows, LookupRound, lookup_rounds, write_vocabulary
from recmill.datasets.writing import Work, check_disk
from recmill.errors import ResourceError
from recmill.hardware.cpu import num_cores
from recmill.observe.progress import Progress
from recmill.schema import Description

__all__ = ["Options", "Plan", "plan", "write"]

log = logging.getLogger(__name__)

_Permutation = Callable[[Segment, np.ndarray], np.ndarray]


def write(plan: Plan, work: Work) -> Description:
    if plan.engine == "spark":
        from recmill.datasets.criteo import spark

        return spark.write(plan, work)
    needed = _check_disk(plan, work)
    try:
        with ThreadPoolExecutor(num_cores()) as pool:
            try:
                return _Preparation(plan, work, pool).run()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(work.directory).free
        raise ResourceError(
            f"{work.directory}: the disk is full. {needed:,} bytes are needed in all, {free:,} are free. Free some "
            "space, then run the same command again to resume."
        ) from error


def _check_disk(plan: Plan, work: Work, vocabulary_sizes: list[int] | None = None) -> int:
    """Raise if the disk is too small. Return the bytes needed at the peak, estimated from the logs' first rows.

    Without --table-size, companions of contiguous ids count only once `vocabulary_sizes` are known.
    """
    rules = plan.rules
    rows = [raw.forecast_rows() for raw in plan.logs]
    ids_bytes = CRITEO.num_sparse * (8 if rules.wide_ids else 4)
    # Hash tables take 8 to 16 bytes per id, and there are at most as many ids as rows.
    may_need_rounds = rules.ids == "contiguous" and CRITEO.num_sparse * 16 * sum(rows) > plan.limits.memory // 2
    parsed_bytes = 0 if plan.is_one_pass else 4 * CRITEO.words_per_row + (ids_bytes if may_need_rounds else 0)
    stored_bytes = 4 + 4 * CRITEO.num_dense + (4 * sum(rules.multi_hot) or ids_bytes)
    scratch = 0
    if rules.shuffle != "none":  # a bucket stays until all of it is written
        scratch = min(plan.limits.memory // 4, sum(rows) * (stored_bytes + 4))
    if rules.multi_hot:
        tables = [min(size, sum(rows) + FIRST_ID) if rules.ids == "contiguous" else size for size in rules.table_size]
        if vocabulary_sizes:
            tables = [feature.rows for feature in plan.features(vocabulary_sizes)]
        scratch += max(rows) * ids_bytes + 4 * sum(a * b for a, b in zip(tables, rules.multi_hot, strict=False))
    # The parsed rows of a log are removed once they are stored: only the largest log needs room for both.
    needed = sum(rows) * max(parsed_bytes, stored_bytes) + max(rows) * min(parsed_bytes, stored_bytes) + scratch
    check_disk(work, needed, sum(rows))
    return needed


class _Preparation:
    """The steps in order: read, count, map, shuffle, write, seal. A step that was completed before is skipped.

    If nothing in a row depends on others, it is written as soon as it is read.
    """

    def __init__(self, plan: Plan, work: Work, pool: Executor) -> None:
        self.plan = plan
        self.rules = plan.rules
        self.memory = plan.limits.memory
        self.work = work
        self.pool = pool
        self.num_rounded_ids = 0

    def run(self) -> Description:
        self.parsed = self._read()
        self.segments = self.plan.segments(self.parsed)
        self.train = [segment for segment in self.segments if segment.split == "train"]
        if self.rules.ids == "contiguous":
            self._count()
            if self.rules.multi_hot:
                _check_disk(self.plan, self.work, self.vocabulary_sizes)
            self._map_in_rounds()
        if self.rules.shuffle != "none":
            self._scatter()
        if self.rules.format == "npy":
            if not self.plan.is_one_pass:
                self._write_npy()
            file_rows = self._day_files()
        else:
            file_rows = self._write_segments()
        notes = []
        if self.num_rounded_ids:
            notes.append(
                f"--compat {self.rules.compat}: {self.num_rounded_ids:,} training ids above 2^24 were rounded to "
                "float32, as the original's shuffle does; those of the last day were not"
            )
        written = Written(file_rows, self.parsed, self.vocabulary_sizes, notes)
        return seal_written(self.plan, written, self.work)

    def _read(self) -> list[ParsedLog]:
        read: list[ParsedLog] = []
        with Progress("reading", total=sum(raw.forecast_rows() for raw in self.plan.logs), unit="rows") as progress:
            for raw in self.plan.logs:
                allowed = self.rules.bad_rows_allowed(sum(parsed.bad_rows for parsed in read))
                parsed = ParsedLog(self.work.scratch / f"{raw.name}.rows", self.rules.log_format(raw.has_labels))
                name, read_log = ("convert", self._convert_log) if self.plan.is_one_pass else ("read", self._read_log)
                note = self.work.part(f"{name}-{raw.name}", partial(read_log, raw, parsed, allowed, progress))
                read.append(replace(parsed, **note))
                log_read(raw, read[-1])
        return read

    def _read_log(self, raw: RawLog, target: ParsedLog, allowed: int | None, progress: Progress) -> dict[str, Any]:
        chunk_bytes = self.plan.limits.chunk_bytes
        if raw.others:
            return read_npy_log(raw.path, raw.others, target, progress.advance).to_json()
        parsed = parse_log(raw.path, target.path, target.format, allowed, self.pool, chunk_bytes, progress.advance)
        return parsed.to_json()

    def _convert_log(self, raw: RawLog, parsed: ParsedLog, allowed: int | None, progress: Progress) -> dict[str, Any]:
        """Write the three files of a day while its log is parsed."""

        def convert(block: LogBlock) -> ClickRows:
            return ClickRows(self.rules.dense_values(block.dense, 0), ids_of(block, self.rules), block.labels)

        def blocks() -> Iterator[ClickRows]:
            for rows in parse_blocks(raw.path, parsed, allowed, self.pool, self.plan.limits.chunk_bytes, convert):
                yield rows
                progress.advance(len(rows))

        write_day(self.work.data, raw.name, None, blocks(), self.id_type.type)
        return parsed.to_json()

    @cached_property
    def _vocabulary_paths(self) -> list[Path]:
        return [self.work.data / vocabulary_file(name) for name in sparse_names(CRITEO.num_sparse)]

    def _count(self) -> None:
        """Write a vocabulary per column from the training rows, or with --compat from all rows."""
        rules = self.rules
        counted = []
        offset = 0
        for segment in self.segments if rules.compat else self.train:
            counted.append(LogRows(self.parsed[segment.log_index], segment.start, segment.stop, offset))
            offset += segment.rows
        counting = Counting(
            order=rules.id_order,
            min_frequency=rules.min_frequency,
            missing_is_zero=rules.is_torchrec,
            memory=self.memory * 7 // 10 // num_cores(),
            scratch=self.work.scratch,
        )

        def count(column: int) -> None:
            table_size = rules.table_size[column] if rules.table_size and not rules.compat else 2**32
            path = self._vocabulary_paths[column]
            make = partial(write_vocabulary, path, counted, column, table_size - FIRST_ID, counting)
            self.work.part(f"count-C{column + 1}", make)

        with Progress("counting ids", total=CRITEO.num_sparse, unit="columns") as progress:
            for _ in ordered(self.pool, count, range(CRITEO.num_sparse), ahead=0):
                progress.advance(1)

    @cached_property
    def _rounds(self) -> list[LookupRound]:
        """The rounds of lookups. Once several have begun, another memory budget does not change them."""
        make_rounds = partial(lookup_rounds, self._vocabulary_paths, self.rules.is_torchrec)
        rounds = make_rounds(self.memory // 2)
        if len(rounds) == 1 and not self.work.is_done("memory-of-rounds"):
            return rounds
        return make_rounds(self.work.part("memory-of-rounds", lambda: self.memory // 2))

    def _map_in_rounds(self) -> None:
        """If the vocabularies do not fit in memory together, map all rows with some of them, then with the next."""
        if len(self._rounds) == 1:
            return
        log.info("ids are mapped in %d rounds, because the vocabularies do not fit in memory", len(self._rounds))
        total = sum(parsed.rows for parsed in self.parsed) * len(self._rounds)
        with Progress("mapping ids", total=total, unit="rows") as progress:
            for number, lookup in enumerate(self._rounds):
                for parsed in self.parsed:
                    if parsed.path.exists():  # otherwise an earlier run has stored its rows
                        name = f"map-{number}-{parsed.path.stem}"
                        self.work.part(name, partial(self._map_log, parsed, lookup, progress))
                lookup.free()

    def _mapped_path(self, parsed: ParsedLog) -> Path:
        return parsed.path.with_suffix(".ids")

    def _read_mapped(self, parsed: ParsedLog, first: int, rows: int) -> np.ndarray:
        offset = first * CRITEO.num_sparse * self.id_type.itemsize
        ids = np.fromfile(self._mapped_path(parsed), self.id_type, rows * CRITEO.num_sparse, offset=offset)
        return ids.reshape(rows, CRITEO.num_sparse)

    def _map_log(self, parsed: ParsedLog, lookup: LookupRound, progress: Progress) -> None:
        """Add the ids of one round. Repeating it is harmless: each round writes only its own ids."""
        row_bytes = CRITEO.num_sparse * self.id_type.itemsize
        self._mapped_path(parsed).touch()
        with self._mapped_path(parsed).open("r+b") as file:
            file.truncate(parsed.rows * row_bytes)

            def mapped(block: tuple[int, int]) -> tuple[int, np.ndarray]:
                ids = self._read_mapped(parsed, *block)
                lookup.map(parsed.read_block(*block), ids)
                return block[0], ids

            for first, ids in ordered(self.pool, mapped, parsed.blocks(), ahead=4):
                file.seek(first * row_bytes)
                file.write(ids.data)
                progress.advance(len(ids))

    @cached_property
    def vocabulary_sizes(self) -> list[int]:
        is_contiguous = self.rules.ids == "contiguous"
        return [len(np.load(path, mmap_mode="r")) for path in self._vocabulary_paths] if is_contiguous else []

    @cached_property
    def id_type(self) -> np.dtype:
        return self.plan.id_type(self.vocabulary_sizes)

    def _ids(self, parsed: ParsedLog, first: int, block: LogBlock) -> np.ndarray:
        if self.rules.ids != "contiguous":
            return ids_of(block, self.rules)
        if len(self._rounds) > 1:
            return self._read_mapped(parsed, first, len(block))
        return ids_of(block, self.rules, self._rounds[0], self.id_type)

    def _blocks(self, segment: Segment) -> list[tuple[int, int]]:
        """Return (first row, number of rows) of each block of the log that has rows of the segment."""
        blocks = self.parsed[segment.log_index].blocks()
        return [(first, rows) for first, rows in blocks if first < segment.stop and first + rows > segment.start]

    def _mapped_rows(self, segment: Segment, first_and_rows: tuple[int, int]) -> ClickRows:
        """Return those rows of a block that belong to the segment."""
        first, rows = first_and_rows
        parsed = self.parsed[segment.log_index]
        block = parsed.read_block(first, rows)
        # TorchRec uses the minimum of each file, we use the minimum of all.
        smallest = min(p.smallest_dense for p in ([parsed] if self.rules.compat == "torchrec" else self.parsed))
        dense = self.rules.dense_values(block.dense, smallest)
        mapped = ClickRows(dense, self._ids(parsed, first, block), block.labels)
        return mapped[max(segment.start - first, 0) : segment.stop - first]

    @cached_property
    def _buckets(self) -> Buckets:
        """The buckets. Once some are written, another memory budget does not change their size."""
        total = sum(segment.rows for segment in self.train)
        bucket_id_type = np.int32 if self.rules.is_rounded else self.id_type.type
        memory = self.work.part("memory-of-buckets", lambda: self.memory // 4)
        directory = self.work.scratch / "buckets"
        return Buckets(directory, total, CRITEO.num_dense, CRITEO.num_sparse, bucket_id_type, memory)

    def _permutation(self) -> _Permutation:
        """Return the function from (segment, positions of its rows among all training rows) to new positions."""
        seed = self.rules.seed
        total = sum(segment.rows for segment in self.train)
        if self.rules.shuffle == "day":

            def within_the_day(segment: Segment, positions: np.ndarray) -> np.ndarray:
                permutation = rng.Permutation(segment.rows, rng.stream_key(seed, "criteo shuffle", segment.log_index))
                return permutation(positions - segment.offset) + segment.offset

            return within_the_day
        if self.rules.is_rounded:
            order = _numpys_order(total, seed, self.memory)
            return lambda segment, positions: order[positions]
        permutation = rng.Permutation(total, rng.stream_key(seed, "criteo shuffle"))
        return lambda segment, positions: permutation(positions)

    def _scatter(self) -> None:
        """Write all training rows to buckets."""
        permutation = self._permutation()
        sizes: dict[str, int] = {}
        with Progress("shuffling", total=sum(segment.rows for segment in self.train), unit="rows") as progress:
            for segment in self.train:
                name = f"scatter-{self.plan.logs[segment.log_index].name}"
                make = partial(self._scatter_segment, segment, permutation, sizes, progress)
                scattered = self.work.part(name, make)
                sizes = scattered["sizes"]
                self.num_rounded_ids += scattered["rounded"]
                self._remove_parsed(segment)

    def _scatter_segment(
        self, segment: Segment, permutation: _Permutation, sizes: dict[str, int], progress: Progress
    ) -> dict[str, Any]:
        """Add the rows of a segment to the buckets, which had these sizes after the segment before it."""
        self._buckets.truncate(sizes)

        def packed(block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
            rows = self._mapped_rows(segment, block)
            num_rounded = 0
            if self.rules.is_rounded:
                ids = rows.ids.astype(np.float32).astype(np.int64)
                num_rounded = int((ids != rows.ids).sum())
                rows = replace(rows, ids=ids)
            first = segment.offset + max(block[0] - segment.start, 0)
            return *self._buckets.packed(rows, permutation(segment, first + np.arange(len(rows)))), num_rounded

        rounded = 0
        for records, buckets, num_rounded in ordered(self.pool, packed, self._blocks(segment), ahead=2):
            self._buckets.add(records, buckets)
            rounded += num_rounded
            progress.advance(len(records))
        return {"sizes": self._buckets.sizes(), "rounded": rounded}

    def _remove_parsed(self, done: Segment) -> None:
        """Remove the parsed rows of a log after its last segment."""
        parsed = self.parsed[done.log_index]
        if done.stop == parsed.rows:
            parsed.path.unlink(missing_ok=True)
            self._mapped_path(parsed).unlink(missing_ok=True)

    def _is_shuffled(self, segment: Segment) -> bool:
        return segment.split == "train" and self.rules.shuffle != "none"

    def _rows_to_write(self, segment: Segment, progress: Progress) -> Iterator[ClickRows]:
        if self._is_shuffled(segment):
            blocks = self._buckets.rows(segment.offset, segment.offset + segment.rows, self.plan.limits.block_rows)
        else:
            blocks = ordered(self.pool, partial(self._mapped_rows, segment), self._blocks(segment), ahead=4)
        for rows in blocks:
            yield rows
            progress.advance(len(rows))

    def _remove_scratch(self, segment: Segment) -> None:
        if self._is_shuffled(segment):
            self._buckets.remove_before(segment.offset + segment.rows)
        else:
            self._remove_parsed(segment)

    def _write_npy(self) -> None:
        """Write three files per day, which hold all its segments one after the other."""
        with Progress("writing", total=sum(segment.rows for segment in self.segments), unit="rows") as progress:
            for index, raw in enumerate(self.plan.logs):
                segments = [segment for segment in self.segments if segment.log_index == index]
                is_rounded = self.rules.is_rounded and any(segment.split == "train" for segment in segments)
                day_id_type = np.int32 if is_rounded else self.id_type.type
                rows = self.parsed[index].rows
                blocks = chain.from_iterable(self._rows_to_write(segment, progress) for segment in segments)
                make = partial(write_day, self.work.data, raw.name, rows, blocks, day_id_type)
                self.work.part(f"write-{raw.name}", make)
                for segment in segments:
                    self._remove_scratch(segment)

    def _day_files(self) -> dict[str, int]:
        """Return the files of the days with their rows, multi-hot if the rules say so."""
        rows_by_log = zip(self.plan.logs, self.parsed, strict=True)
        file_rows = {f"{raw.name}_{name}.npy": parsed.rows for raw, parsed in rows_by_log for name in PARTS}
        return self._to_multi_hot(file_rows) if self.rules.multi_hot else file_rows

    def _to_multi_hot(self, file_rows: dict[str, int]) -> dict[str, int]:
        """Replace the files of one-hot ids by files of multi-hot ids."""
        rules = self.rules
        table_rows = [feature.rows for feature in self.plan.features(self.vocabulary_sizes)]
        distribution = rules.multi_hot_distribution
        make = partial(write_companions, self.work.scratch, table_rows, list(rules.multi_hot), distribution, rules.seed)
        self.work.part("companions", make)
        tables = companion_paths(self.work.scratch, CRITEO.num_sparse)
        with Progress("multi-hot", total=len(self.plan.logs), unit="days") as progress:
            for raw in self.plan.logs:
                one_hot = f"{raw.name}_sparse.npy"
                multi_hot = f"{raw.name}_sparse_multi_hot.npz"
                make = partial(write_multi_hot, self.work.data / multi_hot, self.work.data / one_hot, tables)
                self.work.part(f"multi-hot-{raw.name}", make)
                (self.work.data / one_hot).unlink(missing_ok=True)
                file_rows[multi_hot] = file_rows.pop(one_hot)
                progress.advance(1)
        return file_rows

    def _write_segments(self) -> dict[str, int]:
        """Write records, one file per split, or Parquet files of each segment.

        In a file of records a segment has its own range, so that a repeated part writes it again.
        """
        file_rows: dict[str, int] = {}
        types = (self.rules.label_type, self.id_type.type)
        with Progress("writing", total=sum(segment.rows for segment in self.segments), unit="rows") as progress:
            for segment in self.segments:
                stem = f"{segment.split}-{self.plan.logs[segment.log_index].name}"
                blocks = self._rows_to_write(segment, progress)
                if self.rules.format == "bin":
                    file = record_file(segment)
                    make = partial(write_records, self.work.data / file, segment.offset, blocks)
                    self.work.part(f"write-{stem}", make)
                    file_rows[file] = max(segment.offset + segment.rows, file_rows.get(file, 0))
                else:
                    rows_per_file = self.plan.limits.rows_per_file
                    parts = partial(write_parquet_parts, self.work.data, stem, blocks, *types, rows_per_file)
                    file_rows |= self.work.part(f"write-{stem}", parts)
                self._remove_scratch(segment)
        return file_rows


def _numpys_order(total: int, seed: int, memory: int) -> np.ndarray:
    """Return the position to which numpy's legacy shuffle moves each row. It needs an array of all rows."""
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
