"""Spark as an engine of `prepare`: its session, and its errors as errors of a user."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.datasets.compressed import InputFile
from recmill.datasets.writing import Work
from recmill.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

_SHUFFLED_BYTES = 1 << 26  # of raw text, per partition of a shuffle
_DEFAULT_PYTHON = "python3"  # of PySpark, unless PYSPARK_PYTHON names another


@contextmanager
def spark_session(
    dataset: str, master: str | None, work: Work, inputs: list[InputFile], driver_memory: int
) -> Iterator[Any]:
    """Yield a session of the Spark that this process already has, or of one that is stopped afterwards.

    `driver_memory`: bytes for Java on this machine, if Spark does not run on a cluster.
    """
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError:
        raise ConfigError("--engine spark needs PySpark, in the version of your Spark: pip install pyspark") from None
    try:
        with _session(dataset, master, work, inputs, driver_memory) as spark:
            yield spark
    except (PySparkException, Py4JError, ConnectionError) as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            raise ResourceError(
                "Spark does not start without Java 17 or newer. Install it (openjdk-17-jre-headless), or set JAVA_HOME "
                "to its directory; --engine polars needs no Java."
            ) from error
        if "No module named 'recmill'" in str(error):
            raise ConfigError(
                "Spark's executors have no Recmill. Install it on all machines, in the version of this one "
                f"({sys.executable}); PYSPARK_PYTHON names the Python that has it."
            ) from error
        remedy = shared_paths(inputs[0], work.directory)
        raise ResourceError(f"Spark failed: {_cause(error)}. {remedy} Run the same command again to resume.") from error


def shared_paths(input_file: InputFile, directory: Path) -> str:
    """Return what a cluster needs, as a remedy."""
    return (
        f"On a cluster every executor must be able to read {input_file} and to write to {directory}, under the same "
        "paths."
    )


def uri(path: Path) -> str:
    """Return a local file URI without patterns: Spark would expand brackets and stars."""
    return "file://" + re.sub(r"([\\{}\[\]*?])", r"\\\1", str(path))


def part_number(file: str) -> int:
    """Return 12 for part-00012-...: Spark numbers the files of an output in the order of its partitions."""
    return int(file.split("-")[1])


def _cause(error: BaseException) -> str:
    """Return the innermost cause in one line: Spark's errors contain Java's stack traces."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (causes[-1] if causes else " ".join(lines[:2]))[:500].rstrip(". ")


@contextmanager
def _session(
    dataset: str, given_master: str | None, work: Work, inputs: list[InputFile], driver_memory: int
) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    master = existing.sparkContext.master if existing else given_master or "local[*]"
    if given_master not in (None, master):
        raise ConfigError(f"--spark-master {given_master}: this process already has a Spark, on {master}.")
    # A vocabulary that is sent to all executors takes at least one page of memory: 26 of Spark's 64 MB are too much.
    settings = {"spark.ui.showConsoleProgress": "false", "spark.buffer.pageSize": "2m"}
    settings["spark.executorEnv.POLARS_MAX_THREADS"] = "1"  # a task has one core
    if master.startswith("local"):  # one JVM, which no other machine needs to reach
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.driver.memory": f"{driver_memory >> 20}m", "spark.ui.enabled": "false"}
        settings["spark.local.dir"] = str(work.scratch / "spark")
    builder = SparkSession.builder.appName(f"recmill prepare {dataset}").master(master).config(map=settings)
    running = existing or builder.getOrCreate()
    python = running.sparkContext.pythonExec
    try:
        spark = running.newSession()  # with settings of its own
        if not existing:
            spark.sparkContext.setLogLevel("ERROR")
        if python == _DEFAULT_PYTHON:
            spark.sparkContext.pythonExec = sys.executable  # another one may have other packages
        if not spark.sparkContext.getConf().contains("spark.sql.shuffle.partitions"):
            num_partitions = sum(file.stat().st_size for file in inputs) // _SHUFFLED_BYTES
            spark.conf.set("spark.sql.shuffle.partitions", max(num_partitions, spark.sparkContext.defaultParallelism))
        spark.conf.set("spark.sql.files.maxRecordsPerFile", 0)  # one file per task
        log.info("Spark %s on %s", spark.version, master)
        yield spark
    finally:
        running.sparkContext.pythonExec = python
        if not existing:
            running.stop()
