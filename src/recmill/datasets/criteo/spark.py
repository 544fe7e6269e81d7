"""Criteo click logs on Spark: ids and rows as on one machine, by Spark's own expressions, with no Python per row.

Dense values may differ from the other engine's in the last bit of a float32: Java's logarithm is not numpy's.
Rows have no order in Spark, so they are numbered: by the place in their Parquet file, plus the rows of files before.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from recmill.data.click_rows import BLOCK_ROWS
from recmill.datasets.clicks import PARQUET_ROWS
from recmill.datasets.compressed import SUFFIXES
from recmill.datasets.criteo.ids import FIRST_ID, MISSING, RARE
from recmill.datasets.criteo.input import RawLog
from recmill.datasets.criteo.log import NUM_DENSE, NUM_SPARSE, ParsedLog, parse_log
from recmill.datasets.criteo.plan import Plan, Segment, describer, features, ranges_by_split, segments
from recmill.datasets.writing import NpyWriter, Work, seal
from recmill.errors import ConfigError, ResourceError
from recmill.hardware.cpu import num_cores
from recmill.schema import Description

log = logging.getLogger(__name__)

_DENSE, _SPARSE = [f"I{i + 1}" for i in range(NUM_DENSE)], [f"C{c + 1}" for c in range(NUM_SPARSE)]
_SHUFFLED_BYTES = 1 << 26  # of raw text, per partition of a shuffle


def write(work: Work, plan: Plan) -> Description:
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError:
        raise ConfigError("--engine spark needs PySpark, in the version of your Spark: pip install pyspark") from None
    try:
        with _session(work, plan) as spark:
            return _Preparation(work, plan, spark).run()
    except (PySparkException, Py4JError, ConnectionError) as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            raise ResourceError(
                "Spark does not start without Java 17 or newer. Install it (openjdk-17-jre-headless), or set JAVA_HOME "
                "to where it is; --engine polars needs none."
            ) from error
        raise ResourceError(
            f"Spark failed: {_cause(error)}. On a cluster every executor must be able to read {plan.logs[0].path} and "
            f"to write to {work.directory}, by these names. The same command again goes on from what is finished."
        ) from error


def _cause(error: BaseException) -> str:
    """The innermost, in one line: Spark's errors come with Java's stack traces."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (causes[-1] if causes else " ".join(lines[:2]))[:500].rstrip(". ")


@contextmanager
def _session(work: Work, plan: Plan) -> Iterator[Any]:
    """On a Spark of our own, which ends with the block; or on one that this process has already, which goes on."""
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    master = existing.sparkContext.master if existing else plan.spark_master or "local[*]"
    if plan.spark_master not in (None, master):
        raise ConfigError(f"--spark-master {plan.spark_master}: this process has a Spark already, on {master}.")
    # A vocabulary that is sent to all executors takes a page of memory at least: of Spark's 64 MB, 26 are too much.
    settings = {"spark.ui.showConsoleProgress": "false", "spark.buffer.pageSize": "2m"}
    if master.startswith("local"):  # one JVM, which no other machine needs to reach
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.driver.memory": f"{plan.memory >> 20}m", "spark.local.dir": str(work.scratch / "spark")}
        settings |= {"spark.ui.enabled": "false"}
    builder = SparkSession.builder.appName("recmill prepare criteo").master(master).config(map=settings)
    running = existing or builder.getOrCreate()
    try:
        spark = running.newSession()  # whose settings are its own
        if not existing:
            spark.sparkContext.setLogLevel("ERROR")
        if not spark.sparkContext.getConf().contains("spark.sql.shuffle.partitions"):
            num_partitions = sum(raw.bytes for raw in plan.logs) // _SHUFFLED_BYTES
            spark.conf.set("spark.sql.shuffle.partitions", max(num_partitions, spark.sparkContext.defaultParallelism))
        spark.conf.set("spark.sql.files.maxRecordsPerFile", 0)  # one file per task
        log.info("Spark %s on %s", spark.version, master)
        yield spark
    finally:
        if not existing:
            running.stop()


class _Preparation:
    """The steps, in order: parse, number the rows, number the ids, write, seal."""

    def __init__(self, work: Work, plan: Plan, spark: Any) -> None:
        self.work, self.plan, self.rules, self.spark = work, plan, plan.rules, spark
        self.vocabularies = work.scratch / "vocabularies"

    def run(self) -> Description:
        rules, logs = self.rules, self.plan.logs
        self.read = self._read()
        self.segments = segments(rules, logs, [read["rows"] for read in self.read])
        self.sizes = self.work.part("vocabularies", self._write_vocabularies) if rules.ids == "contiguous" else []
        self.features = features(rules, self.sizes)
        rows_of: dict[str, int] = {}
        together = {"all": logs} if rules.shuffle == "global" else {raw.name: [raw] for raw in logs}
        for name, some_logs in together.items():
            rows_of |= self.work.part(f"write-{name}", partial(self._write, some_logs))
            for raw in some_logs:
                shutil.rmtree(self._parsed(raw), ignore_errors=True)
            log.info("wrote %s rows", f"{sum(rows_of.values()):,}")
        ranges = ranges_by_split(rules, logs, self.segments, rows_of)
        rows_of |= {f"vocabulary_{name}.npy": size for name, size in zip(_SPARSE, self.sizes, strict=False)}
        counts = [(read["rows"], read["bad_rows"]) for read in self.read]
        notes = [*rules.notes, *(f"skipped: {bad}" for read in self.read for bad in read["first_bad"])]
        return seal(self.work.data, describer(self.plan, self.features, ranges, counts, notes), rows_of)

    # Parse, and number the rows

    def _parsed(self, raw: RawLog) -> Path:
        return self.work.scratch / f"{raw.name}.rows"

    def _read(self) -> list[dict[str, Any]]:
        """All logs at once, since a compressed one takes a single task; bad rows are told of in order."""
        rules, found, bad_rows = self.rules, [], 0
        pool = ThreadPoolExecutor(len(self.plan.logs))
        try:
            parsing = [pool.submit(self.work.part, f"parse-{r.name}", partial(self._parse, r)) for r in self.plan.logs]
            for raw, seen in zip(self.plan.logs, parsing, strict=True):
                allowed = None if rules.on_bad_row == "fail" else rules.max_bad_rows - bad_rows
                found.append(self.work.part(f"read-{raw.name}", partial(self._number_rows, raw, seen, allowed)))
                bad_rows += found[-1]["bad_rows"]
                skipped = f", {found[-1]['bad_rows']:,} bad rows skipped" if found[-1]["bad_rows"] else ""
                log.info("read %s: %s rows%s", raw.path, f"{found[-1]['rows']:,}", skipped)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error, what runs ends with Spark
        return found

    def _parse(self, raw: RawLog) -> dict[str, Any]:
        """Good rows to Parquet, with the `block` of the file that they are from. Returns what was seen on the way."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        first = 1 if raw.has_labels else 0
        field = {name: f"get(fields, {first + at})" for at, name in enumerate([*_DENSE, *_SPARSE])}
        whole = {name: f"try_cast({field[name]} AS int)" for name in _DENSE}  # none or too large: null
        low = max(self.rules.smallest_dense, 1 - 2**31)
        in_range = [f"({field[name]} = '' OR coalesce({whole[name]} >= {low}, false))" for name in _DENSE]
        lines = self.spark.read.text(_uri(raw.path), lineSep="\n").select(
            F.split(F.translate("value", '"\r', ""), "\t").alias("fields"),
            F.col("value").rlike(_row_pattern(raw.has_labels)).alias("has_shape"),
            F.col("_metadata.file_block_start").alias("block"),
            F.monotonically_increasing_id().alias("line"),
        )
        seen = Observation()
        counts = ["count(*) AS lines", "count_if(NOT is_good) AS bad_rows"]
        last = "max_by(length(element_at(fields, -1)), line) AS last_digits"
        judged = lines.withColumn("is_good", F.expr(" AND ".join(["has_shape", *in_range])))
        good = judged.observe(seen, *map(F.expr, [*counts, last])).filter("is_good")
        label = "int(get(fields, 0))" if raw.has_labels else "-1"
        dense = [f"coalesce({whole[name]}, 0) AS {name}" for name in _DENSE]
        ids = [f"bigint(conv({field[name]}, 16, 10)) AS {name}" for name in _SPARSE]  # none: null
        self._save(good.selectExpr("block", f"{label} AS label", *dense, *ids), self._parsed(raw))
        return dict(seen.get)

    def _number_rows(self, raw: RawLog, parsing: "Future[Any]", bad_rows_allowed: int | None) -> dict[str, Any]:
        """What may be wrong with the file is looked at by the reader of the other engine, for the same errors."""
        if parsing.exception() and raw.path.suffix in SUFFIXES[1:]:
            self._read_here(raw, bad_rows_allowed)  # perhaps it is damaged
        seen, here = parsing.result(), ParsedLog(raw.path)
        if seen["bad_rows"] or not seen["lines"] or (seen["last_digits"] != 8 and _may_end_in_a_row(raw)):
            here = self._read_here(raw, bad_rows_allowed)
        assert here.bad_rows == seen["bad_rows"], f"{raw.path}: {here.bad_rows} bad rows, for Spark {seen['bad_rows']}"
        rows, number, shifts = self._saved(self._parsed(raw)), 0, []
        for group in self._groups(rows, "block"):
            shifts.append((group.file, group.block, number - group.first))
            number += group.rows
        is_needed = self.rules.dense == "log-min"
        smallest = rows.selectExpr(f"min(least({', '.join(_DENSE)}))").first()[0] if is_needed else 0
        counted = {"rows": number, "bad_rows": here.bad_rows, "first_bad": here.first_bad}
        return {**counted, "smallest": smallest, "shifts": shifts}

    def _read_here(self, raw: RawLog, bad_rows_allowed: int | None) -> ParsedLog:
        log.info("looking through %s on this machine", raw.path)
        with ThreadPoolExecutor(num_cores()) as pool:
            return parse_log(
                raw.path,
                Path(os.devnull),
                has_labels=raw.has_labels,
                smallest=self.rules.smallest_dense,
                bad_rows_allowed=bad_rows_allowed,
                pool=pool,
                chunk_bytes=1 << 24,
                progress=lambda text, rows: None,
            )

    def _rows(self, raw: RawLog) -> Any:
        index = self.plan.logs.index(raw)
        rows = self._numbered(self._saved(self._parsed(raw)), "block", self.read[index]["shifts"])
        return rows.selectExpr(f"{index} AS log", "number", "label", *_DENSE, *_SPARSE)

    # Saved frames, and numbers for their rows

    def _save(self, frame: Any, target: Path, partition_by: tuple[str, ...] = ()) -> None:
        writer = frame.write.mode("overwrite").partitionBy(*partition_by).option("compression", "zstd")
        writer.option("parquet.block.row.count.limit", BLOCK_ROWS).parquet(f"file://{target}")

    def _saved(self, target: Path) -> Any:
        place = ("_metadata.file_name AS file", "_metadata.row_index AS place")
        return self.spark.read.parquet(_uri(target)).selectExpr("*", *place)

    def _groups(self, frame: Any, key: str) -> list[Any]:
        """(file, key, rows, first): the run of rows that a file has of each key, in the order of keys and files."""
        query = f"SELECT file, {key}, count(*) AS rows, min(place) AS first FROM {{frame}} GROUP BY file, {key}"
        return sorted(self.spark.sql(query, frame=frame).collect(), key=lambda group: (group[key], _part(group.file)))

    def _numbered(self, frame: Any, key: str, shifts: list[Any]) -> Any:
        """With a `number`: the place in the file plus the shift in (file, key, shift)."""
        schema = f"file string, {key} {'bigint' if key == 'block' else 'string'}, shift bigint"
        shift = self.spark.createDataFrame([tuple(row) for row in shifts], schema)
        return frame.join(shift.hint("broadcast"), ["file", key]).selectExpr("*", "place + shift AS number")

    # Number the ids

    def _write_vocabularies(self) -> list[int]:
        """Returns the size of each."""
        counted = self.work.scratch / "counted"
        self.work.part("count", partial(self._count, counted))
        counts, shifts, number = self._saved(counted), [], dict.fromkeys(_SPARSE, FIRST_ID)
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
        """The ids of training rows, most frequent first, ties by value, in files of that order: all columns at once."""
        train = [part for part in self.segments if part.split == "train"]
        rows = (self._rows(self.plan.logs[part.index]).filter(_is_in(part)).select(*_SPARSE) for part in train)
        pairs = reduce(lambda a, b: a.union(b), rows).unpivot([], _SPARSE, "column", "raw").filter("raw IS NOT NULL")
        counts = pairs.groupBy("column", "raw").count().filter(f"count >= {self.rules.min_frequency}")
        by_frequency = counts.orderBy("column", "count", "raw", ascending=[True, False, True])
        self._save(by_frequency.select("column", "raw"), target)
        log.info("counted the ids of %s rows", f"{sum(part.rows for part in train):,}")

    def _write_vocabulary(self, name: str) -> int:
        """As the other engine: (raw id, our id) uint32 [n, 2], in rising order of raw ids. Returns n."""
        import polars as pl

        files = sorted((self.vocabularies / f"column={name}").glob("part-*"), key=lambda path: _part(path.name))
        size, last = sum(_num_rows(file) for file in files), -1
        with NpyWriter(self.work.data / f"vocabulary_{name}.npy", np.uint32, (size, 2)) as target:
            for file in files:
                pairs = pl.read_parquet(file, columns=["raw", "id"]).to_numpy()
                assert (np.diff(pairs[:, 0], prepend=last) > 0).all(), f"{file}: raw ids do not rise"
                target.append(pairs)
                last = pairs[-1, 0]
        return size

    # Write

    def _write(self, logs: list[RawLog]) -> dict[str, int]:
        """The rows of these logs into files, each in its order. Returns the rows of each file."""
        parts = [part for part in self.segments if self.plan.logs[part.index] in logs]
        stems = {part: f"{part.split}-{self.plan.logs[part.index].name}" for part in parts}
        names = [f"{stem}-{k:05d}.parquet" for part, stem in stems.items() for k in range(_num_files(part))]
        rows = reduce(lambda a, b: a.union(b), map(self._rows, logs)).selectExpr("*", *self._places(parts))
        by_file = self._finished(rows).repartition(len(names), "file")
        in_order = by_file.sortWithinPartitions("file", "order", "log", "number").drop("order", "log", "number")
        target = self.work.scratch / "written"
        self._save(in_order, target, partition_by=("file",))
        rows_of = {}
        for at, name in enumerate(names):
            for file in (target / f"file={at}").glob("part-*"):  # one; or none, by chance, of few shuffled rows
                assert name not in rows_of
                os.replace(file, self.work.data / name)
                rows_of[name] = _num_rows(self.work.data / name)
        assert sum(rows_of.values()) == sum(part.rows for part in parts), f"{logs}: rows were lost"
        return rows_of

    def _places(self, parts: list[Segment]) -> list[str]:
        """`file` counts through the files of all parts; `order` is within one.

        Shuffled rows go by a hash of where they were, so their order does not depend on Spark's partitions.
        """
        shuffled = [part for part in parts if part.split == "train" and self.rules.shuffle == "global"]
        key = f"xxhash64({self.rules.seed}L, log, number)"
        files, orders, first_file = [], [], 0
        for part in parts:
            when = f"WHEN log = {part.index} AND {_is_in(part)} THEN"
            in_order = f"{first_file} + (number - {part.start}) DIV {PARQUET_ROWS}"
            files.append(f"{when} {f'pmod({key}, {sum(map(_num_files, shuffled))})' if part in shuffled else in_order}")
            orders.append(f"{when} {key if part in shuffled else 'number'}")
            first_file += _num_files(part)
        return [f"CASE {' '.join(files)} END AS file", f"CASE {' '.join(orders)} END AS order"]

    def _finished(self, rows: Any) -> Any:
        """Labels, dense values and ids as they are stored."""
        if self.rules.ids == "contiguous":
            rows = self._with_contiguous_ids(rows)
        is_wide = self.rules.wide_ids or max(feature.rows for feature in self.features) > 2**31
        label = "float(label) AS label" if self.rules.compat == "oneflow" else "label"
        dense = [f"float({self._dense(f'bigint({name})')}) AS {name}" for name in _DENSE]
        ids = [f"{'bigint' if is_wide else 'int'}({self._id(c)}) AS {name}" for c, name in enumerate(_SPARSE)]
        return rows.selectExpr("file", "order", "log", "number", label, *dense, *ids)

    def _with_contiguous_ids(self, rows: Any) -> Any:
        """C1_id beside C1 and so on: null for what is not in the vocabulary."""
        known = [name for name, size in zip(_SPARSE, self.sizes, strict=True) if size]
        pairs = {name: self.spark.read.parquet(_uri(self.vocabularies / f"column={name}")) for name in known}
        ids = (f"{f'of_{name}.id' if name in pairs else 'NULL'} AS {name}_id" for name in _SPARSE)
        joins = (f"LEFT JOIN {{{name}}} AS of_{name} ON rows.{name} = of_{name}.raw" for name in known)
        query = f"SELECT rows.*, {', '.join(ids)} FROM {{rows}} AS rows {' '.join(joins)}"
        return self.spark.sql(query, rows=rows, **pairs)

    def _id(self, column: int) -> str:
        rules, raw, missing = self.rules, _SPARSE[column], MISSING
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
            found, missing = f"{raw} % {size} + {size * column}", size * (column + 1)
        else:
            found = f"{raw} % {size - 1} + 1"
        return f"CASE WHEN {raw} IS NULL THEN {missing} ELSE {found} END"

    def _dense(self, value: str) -> str:
        if self.rules.compat == "oneflow":
            return f"{value} + 1"
        if self.rules.dense == "log1-clip":
            return f"ln(float(greatest({value}, 0) + 1))"
        smallest = min(read["smallest"] for read in self.read)
        offset = {"log3": 3, "log2": 2, "log-min": 2 - smallest}[self.rules.dense]
        return f"ln(float({value} + {offset}))"


def _row_pattern(has_labels: bool) -> str:
    """Of a whole row. Any field may be in quotes; dense values are checked for their size apart."""
    label, whole, code = (f'(?:{f}|"{f}")' for f in ("[01]", "(?:-?[0-9]{1,18})?", "[0-9a-fA-F]{0,8}"))
    fields = [*([label] if has_labels else []), *([whole] * NUM_DENSE), *([code] * NUM_SPARSE)]
    return r"\A" + r"\t".join(fields) + r"\r?\z"


def _may_end_in_a_row(raw: RawLog) -> bool:
    """The end of a compressed file is not known before all of it is read."""
    with raw.path.open("rb") as file:
        file.seek(raw.bytes - 1)
        return raw.path.suffix in SUFFIXES[1:] or file.read() != b"\n"


def _uri(path: Path) -> str:
    """Not in the cluster's default file system, and no pattern: Spark would see one in brackets and stars."""
    return "file://" + re.sub(r"([\\{}\[\]*?])", r"\\\1", str(path))


def _is_in(part: Segment) -> str:
    return f"number >= {part.start} AND number < {part.stop}"


def _num_files(part: Segment) -> int:
    return -(-part.rows // PARQUET_ROWS)


def _num_rows(file: Path) -> int:
    import polars as pl

    return int(pl.scan_parquet(file).select(pl.len()).collect().item())


def _part(file: str) -> int:
    """12 of part-00012-...: Spark counts the files of an output in the order of its partitions."""
    return int(file.split("-")[1])
