"""Prepare Criteo click logs on Spark: the same ids and rows as on one machine, without Python code per row.

Dense values may differ from the other engine's in the last bit of a float32: Java's logarithm is not numpy's.
Rows have no order in Spark, so they are numbered: a row's number is its index in its Parquet file plus the rows of the
files before it.
"""

import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.datasets.click_log import ParsedLog, parse_log
from recmill.datasets.clicks import dense_names, sparse_names
from recmill.datasets.compressed import InputFile, is_compressed
from recmill.datasets.criteo.options import CRITEO
from recmill.datasets.criteo.plan import Plan, RawLog, Segment, Written, log_read, seal_written, vocabulary_file
from recmill.datasets.spark import part_number, spark_session, uri
from recmill.datasets.vocabularies import FIRST_ID, MISSING, RARE
from recmill.datasets.writing import NpyWriter, Work
from recmill.hardware.cpu import num_cores
from recmill.schema import Description

log = logging.getLogger(__name__)

_DENSE = dense_names(CRITEO.num_dense)
_SPARSE = sparse_names(CRITEO.num_sparse)


def write(plan: Plan, work: Work) -> Description:
    logs: list[InputFile] = [raw.path for raw in plan.logs]
    with spark_session("criteo", plan.spark_master, work, logs, plan.limits.memory) as spark:
        return _Preparation(plan, work, spark).run()


class _Preparation:
    """The steps in order: parse, number the rows, number the ids, write, seal."""

    def __init__(self, plan: Plan, work: Work, spark: Any) -> None:
        self.plan = plan
        self.rules = plan.rules
        self.work = work
        self.spark = spark
        self.vocabularies = work.scratch / "vocabularies"
        self.parsed: list[ParsedLog] = []
        self.shifts: list[list[tuple[str, int, int]]] = []  # per log: (file, block, shift)

    def run(self) -> Description:
        rules = self.rules
        logs = self.plan.logs
        self._read()
        self.segments = self.plan.segments(self.parsed)
        self.sizes = self.work.part("vocabularies", self._write_vocabularies) if rules.ids == "contiguous" else []
        file_rows: dict[str, int] = {}
        together = {"all": logs} if rules.shuffle == "global" else {raw.name: [raw] for raw in logs}
        for name, some_logs in together.items():
            file_rows |= self.work.part(f"write-{name}", partial(self._write, some_logs))
            for raw in some_logs:
                shutil.rmtree(self._parsed_path(raw), ignore_errors=True)
            log.info("wrote %s rows", f"{sum(file_rows.values()):,}")
        return seal_written(self.plan, Written(file_rows, self.parsed, self.sizes, notes=[]), self.work)

    def _parsed_path(self, raw: RawLog) -> Path:
        return self.work.scratch / f"{raw.name}.rows"

    def _read(self) -> None:
        """Parse all logs at once, since a compressed log is a single task. Bad rows are reported in order."""
        pool = ThreadPoolExecutor(len(self.plan.logs))
        try:
            parsing = [pool.submit(self.work.part, f"parse-{r.name}", partial(self._parse, r)) for r in self.plan.logs]
            for raw, seen in zip(self.plan.logs, parsing, strict=True):
                allowed = self.rules.bad_rows_allowed(sum(parsed.bad_rows for parsed in self.parsed))
                note = self.work.part(f"read-{raw.name}", partial(self._number_rows, raw, seen, allowed))
                self.shifts.append(note.pop("shifts"))
                self.parsed.append(ParsedLog(self._parsed_path(raw), self.rules.log_format(raw.has_labels), **note))
                log_read(raw, self.parsed[-1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error, running tasks end with Spark

    def _parse(self, raw: RawLog) -> dict[str, Any]:
        """Write good rows to Parquet, with the `block` of the log that they come from. Return counts of all rows."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        log_format = self.rules.log_format(raw.has_labels)
        field = {name: f"get(fields, {index})" for index, name in enumerate(log_format.fields)}
        integer = {name: f"try_cast({field[name]} AS int)" for name in _DENSE}  # empty or too large: null
        is_large_enough = f">= {log_format.smallest_dense}"
        in_range = [f"({field[name]} = '' OR coalesce({integer[name]} {is_large_enough}, false))" for name in _DENSE]
        lines = self.spark.read.text(uri(raw.path), lineSep="\n").select(
            F.split(F.translate("value", '"\r', ""), "\t").alias("fields"),
            F.col("value").rlike(_row_pattern(raw.has_labels)).alias("has_shape"),
            F.col("_metadata.file_block_start").alias("block"),
            F.monotonically_increasing_id().alias("line"),
        )
        seen = Observation()
        counts = ["count(*) AS lines", "count_if(NOT is_good) AS bad_rows"]
        last = "max_by(length(element_at(fields, -1)), line) AS last_digits"
        checked = lines.withColumn("is_good", F.expr(" AND ".join(["has_shape", *in_range])))
        good = checked.observe(seen, *map(F.expr, [*counts, last])).filter("is_good")
        label = f"int({field['label']})" if raw.has_labels else "-1"
        dense = [f"coalesce({integer[name]}, 0) AS {name}" for name in _DENSE]
        ids = [f"bigint(conv({field[name]}, 16, 10)) AS {name}" for name in _SPARSE]  # missing: null
        self._save(good.selectExpr("block", f"{label} AS label", *dense, *ids), self._parsed_path(raw))
        return dict(seen.get)

    def _number_rows(self, raw: RawLog, parsing: "Future[Any]", bad_rows_allowed: int | None) -> dict[str, Any]:
        """Number the rows of a log. If it may have a problem, parse it here too, to raise the other engine's errors."""
        if parsing.exception() and is_compressed(raw.path):
            self._parse_here(raw, bad_rows_allowed)  # it may be corrupt
        seen = parsing.result()
        parsed = ParsedLog(self._parsed_path(raw), self.rules.log_format(raw.has_labels))
        if seen["bad_rows"] or not seen["lines"] or (seen["last_digits"] != 8 and _may_lack_line_break(raw)):
            parsed = self._parse_here(raw, bad_rows_allowed)
        assert parsed.bad_rows == seen["bad_rows"], f"{raw.path}: {parsed.bad_rows} and {seen['bad_rows']} bad rows"
        rows = self._saved(self._parsed_path(raw))
        shifts = []
        parsed.block_rows = []
        for group in self._groups(rows, "block"):
            shifts.append((group.file, group.block, parsed.rows - group.first))
            parsed.block_rows.append(group.rows)
        if self.rules.dense == "log-min":
            parsed.smallest_dense = rows.selectExpr(f"min(least({', '.join(_DENSE)}))").first()[0]
        return {**parsed.to_json(), "shifts": shifts}

    def _parse_here(self, raw: RawLog, bad_rows_allowed: int | None) -> ParsedLog:
        log.info("checking %s on this machine", raw.path)
        log_format = self.rules.log_format(raw.has_labels)
        chunk_bytes = self.plan.limits.chunk_bytes
        nowhere = Path(os.devnull)
        with ThreadPoolExecutor(num_cores()) as pool:
            return parse_log(raw.path, nowhere, log_format, bad_rows_allowed, pool, chunk_bytes, lambda rows: None)

    def _rows(self, raw: RawLog) -> Any:
        index = self.plan.logs.index(raw)
        rows = self._numbered(self._saved(self._parsed_path(raw)), "block", self.shifts[index])
        return rows.selectExpr(f"{index} AS log", "number", "label", *_DENSE, *_SPARSE)

    def _save(self, frame: Any, target: Path, partition_by: tuple[str, ...] = ()) -> None:
        writer = frame.write.mode("overwrite").partitionBy(*partition_by).option("compression", "zstd")
        writer.option("parquet.block.row.count.limit", self.plan.limits.rows_per_group).parquet(f"file://{target}")

    def _saved(self, target: Path) -> Any:
        """Read a saved frame, with the `file` of each row and its `row_index` there."""
        metadata = ("_metadata.file_name AS file", "_metadata.row_index AS row_index")
        return self.spark.read.parquet(uri(target)).selectExpr("*", *metadata)

    def _groups(self, frame: Any, key: str) -> list[Any]:
        """Return (file, key, rows, first row index) of each key in each file, sorted by key, then file.

        The rows of a key are consecutive in a file.
        """
        query = f"SELECT file, {key}, count(*) AS rows, min(row_index) AS first FROM {{frame}} GROUP BY file, {key}"
        groups = self.spark.sql(query, frame=frame).collect()
        return sorted(groups, key=lambda group: (group[key], part_number(group.file)))

    def _numbered(self, frame: Any, key: str, shifts: list[Any]) -> Any:
        """Add the column `number`: the row index plus the shift in (file, key, shift)."""
        schema = f"file string, {key} {'bigint' if key == 'block' else 'string'}, shift bigint"
        shift = self.spark.createDataFrame([tuple(row) for row in shifts], schema)
        return frame.join(shift.hint("broadcast"), ["file", key]).selectExpr("*", "row_index + shift AS number")

    def _write_vocabularies(self) -> list[int]:
        """Number the ids of all columns and return the size of each vocabulary."""
        counted = self.work.scratch / "counted"
        self.work.part("count", partial(self._count, counted))
        counts = self._saved(counted)
        shifts = []
        number = dict.fromkeys(_SPARSE, FIRST_ID)
        for group in self._groups(counts, "column"):
            shifts.append((group.file, group.column, number[group.column] - group.first))
            number[group.column] += group.rows
        numbered = self._numbered(counts, "column", shifts)
        if self.rules.table_size:
            fits = (f"(column = '{c}' AND number < {s})" for c, s in zip(_SPARSE, self.rules.table_size, strict=True))
            numbered = numbered.filter(" OR ".join(fits))
        pairs = numbered.selectExpr("column", "raw", "number AS id").orderBy("column", "raw")
        self._save(pairs, self.vocabularies, partition_by=("column",))
        sizes = [self._write_vocabulary(name) for name in _SPARSE]
        shutil.rmtree(counted)
        log.info("numbered %s ids", f"{sum(sizes):,}")
        return sizes

    def _count(self, target: Path) -> None:
        """Write the ids of the training rows of all columns, the most frequent first, ties by value."""
        train = [segment for segment in self.segments if segment.split == "train"]
        rows = (self._rows(self.plan.logs[s.log_index]).filter(_is_in(s)).select(*_SPARSE) for s in train)
        pairs = reduce(lambda a, b: a.union(b), rows).unpivot([], _SPARSE, "column", "raw").filter("raw IS NOT NULL")
        counts = pairs.groupBy("column", "raw").count().filter(f"count >= {self.rules.min_frequency}")
        by_frequency = counts.orderBy("column", "count", "raw", ascending=[True, False, True])
        self._save(by_frequency.select("column", "raw"), target)
        log.info("counted the ids of %s rows", f"{sum(segment.rows for segment in train):,}")

    def _write_vocabulary(self, name: str) -> int:
        """Write the vocabulary of a column as `vocabularies.write_vocabulary` does, and return its size."""
        files = sorted((self.vocabularies / f"column={name}").glob("part-*"), key=lambda path: part_number(path.name))
        size = sum(_num_rows(file) for file in files)
        last = -1
        with NpyWriter(self.work.data / vocabulary_file(name), np.uint32, (size, 2)) as target:
            for file in files:
                pairs = pl.read_parquet(file, columns=["raw", "id"], glob=False).to_numpy()
                assert (np.diff(pairs[:, 0], prepend=last) > 0).all(), f"{file}: raw ids are not ascending"
                target.append(pairs)
                last = pairs[-1, 0]
        return size

    def _write(self, logs: list[RawLog]) -> dict[str, int]:
        """Write the rows of these logs to files and return the rows of each file."""
        segments = [segment for segment in self.segments if self.plan.logs[segment.log_index] in logs]
        names = []
        for segment in segments:
            stem = f"{segment.split}-{self.plan.logs[segment.log_index].name}"
            names += [f"{stem}-{k:05d}.parquet" for k in range(self._num_files(segment))]
        rows = reduce(lambda a, b: a.union(b), map(self._rows, logs)).selectExpr("*", *self._targets(segments))
        by_file = self._finished(rows).repartition(len(names), "file")
        in_order = by_file.sortWithinPartitions("file", "order", "log", "number").drop("order", "log", "number")
        target = self.work.scratch / "written"
        self._save(in_order, target, partition_by=("file",))
        file_rows = {}
        for index, name in enumerate(names):
            for file in (target / f"file={index}").glob("part-*"):  # one, or none if there are few shuffled rows
                assert name not in file_rows
                os.replace(file, self.work.data / name)
                file_rows[name] = _num_rows(self.work.data / name)
        assert sum(file_rows.values()) == sum(segment.rows for segment in segments), f"{logs}: rows were lost"
        return file_rows

    def _num_files(self, segment: Segment) -> int:
        return -(-segment.rows // self.plan.limits.rows_per_file)

    def _targets(self, segments: list[Segment]) -> list[str]:
        """Return expressions for the `file` of a row, an index into the files of all segments, and its `order` there.

        Shuffled rows are ordered by a hash of log and row number, so the order does not depend on Spark's partitions.
        """
        shuffled = [segment for segment in segments if segment.split == "train" and self.rules.shuffle == "global"]
        key = f"xxhash64({self.rules.seed}L, log, number)"
        shuffled_files = sum(map(self._num_files, shuffled))
        files = []
        orders = []
        first_file = 0
        for segment in segments:
            when = f"WHEN log = {segment.log_index} AND {_is_in(segment)} THEN"
            in_order = f"{first_file} + (number - {segment.start}) DIV {self.plan.limits.rows_per_file}"
            files.append(f"{when} {f'pmod({key}, {shuffled_files})' if segment in shuffled else in_order}")
            orders.append(f"{when} {key if segment in shuffled else 'number'}")
            first_file += self._num_files(segment)
        return [f"CASE {' '.join(files)} END AS file", f"CASE {' '.join(orders)} END AS order"]

    def _finished(self, rows: Any) -> Any:
        """Return labels, dense values and ids as they are stored."""
        if self.rules.ids == "contiguous":
            rows = self._with_contiguous_ids(rows)
        sql_type = "bigint" if self.plan.id_type(self.sizes).itemsize == 8 else "int"
        label = "float(label) AS label" if self.rules.label_type is np.float32 else "label"
        dense = [f"float({self._dense(f'bigint({name})')}) AS {name}" for name in _DENSE]
        ids = [f"{sql_type}({self._id(c)}) AS {name}" for c, name in enumerate(_SPARSE)]
        return rows.selectExpr("file", "order", "log", "number", label, *dense, *ids)

    def _with_contiguous_ids(self, rows: Any) -> Any:
        """Add C1_id, C2_id, ...: null for an id outside of the vocabulary."""
        known = [name for name, size in zip(_SPARSE, self.sizes, strict=True) if size]
        pairs = {name: self.spark.read.parquet(uri(self.vocabularies / f"column={name}")) for name in known}
        ids = (f"{f'of_{name}.id' if name in pairs else 'NULL'} AS {name}_id" for name in _SPARSE)
        joins = (f"LEFT JOIN {{{name}}} AS of_{name} ON rows.{name} = of_{name}.raw" for name in known)
        query = f"SELECT rows.*, {', '.join(ids)} FROM {{rows}} AS rows {' '.join(joins)}"
        return self.spark.sql(query, rows=rows, **pairs)

    def _id(self, column: int) -> str:
        rules = self.rules
        raw = _SPARSE[column]
        missing = MISSING
        size = rules.table_size[column] if rules.table_size else 0
        if rules.ids == "contiguous":
            found = f"coalesce({raw}_id, {RARE})"
        elif rules.ids == "hash64":
            hashed = f"xxhash64(lower(lpad(hex({raw}), 8, '0')), {column})"
            if not size:
                return hashed
            halved = f"shiftrightunsigned({hashed}, 1) % {size - 1}"  # the hash is unsigned, Spark's % is not
            found = f"(({halved}) * 2 + ({hashed} & 1)) % {size - 1} + 1"
        elif rules.compat == "oneflow":
            found = f"{raw} % {size} + {size * column}"
            missing = size * (column + 1)
        else:
            found = f"{raw} % {size - 1} + 1"
        return f"CASE WHEN {raw} IS NULL THEN {missing} ELSE {found} END"

    def _dense(self, value: str) -> str:
        if self.rules.compat == "oneflow":
            return f"{value} + 1"
        if self.rules.dense == "log1-clip":
            return f"ln(float(greatest({value}, 0) + 1))"
        offset = self.rules.dense_offset(min(parsed.smallest_dense for parsed in self.parsed))
        return f"ln(float({value} + {offset}))"


def _row_pattern(has_labels: bool) -> str:
    """Return the pattern of a complete row. Any field may be quoted; the size of dense values is checked elsewhere."""
    label, integer, code = (f'(?:{f}|"{f}")' for f in ("[01]", "(?:-?[0-9]{1,18})?", "[0-9a-fA-F]{0,8}"))
    fields = [*([label] if has_labels else []), *([integer] * len(_DENSE)), *([code] * len(_SPARSE))]
    return r"\A" + r"\t".join(fields) + r"\r?\z"


def _may_lack_line_break(raw: RawLog) -> bool:
    """Return whether the last line may lack its line break: of a compressed file only reading it would show that."""
    with raw.path.open("rb") as file:
        file.seek(raw.bytes - 1)
        return is_compressed(raw.path) or file.read() != b"\n"


def _is_in(segment: Segment) -> str:
    return f"number >= {segment.start} AND number < {segment.stop}"


def _num_rows(file: Path) -> int:
    return int(pl.scan_parquet(file, glob=False).select(pl.len()).collect().item())
