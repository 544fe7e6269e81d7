"""A Spark for tests: its settings, one session for all tests of a module, and a cluster on loopback."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .processes import free_port, wait_until

SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # half the time for so little work
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.buffer.pageSize": "1m",
    "spark.sql.shuffle.partitions": "3",
    "spark.sql.files.maxPartitionBytes": "30000",  # so that a log is read in several blocks
    "spark.sql.files.openCostInBytes": "0",
}
ON_LOOPBACK = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # of the daemons, the driver and the executors
}


def needs_spark() -> None:
    """Skip the module that calls this, if Spark cannot run here."""
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    if not shutil.which("java") and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java", allow_module_level=True)


@pytest.fixture(autouse=True)
def spark() -> Any:
    """The same for all tests, unless one has stopped it."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config(map=SETTINGS).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


@pytest.fixture(scope="module", autouse=True)
def stop_spark_at_the_end() -> Iterator[None]:
    from pyspark.sql import SparkSession

    yield
    if session := SparkSession.getActiveSession():
        session.stop()


@pytest.fixture
def standalone_master(tmp_path: Path) -> Iterator[str]:
    """A master of Spark and two workers, on loopback."""
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    port = free_port()
    address = ["--host", "127.0.0.1", "--webui-port", "0"]
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> None:
        environment = {**os.environ, **ON_LOOPBACK}
        with (tmp_path / f"daemon-{len(processes)}.txt").open("wb") as log:
            processes.append(subprocess.Popen([program, *arguments, *address], env=environment, stdout=log, stderr=log))

    try:
        start("org.apache.spark.deploy.master.Master", "--port", str(port))
        for number in range(2):
            own = ["--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / f"worker-{number}")]
            start("org.apache.spark.deploy.worker.Worker", f"spark://127.0.0.1:{port}", *own)
        log = tmp_path / "daemon-0.txt"
        wait_until(lambda: log.read_text().count("Registering worker") == 2, 120)
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(100)
