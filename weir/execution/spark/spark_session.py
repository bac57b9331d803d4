"""One Spark session per process, warm for all epochs. Only DataFrames are used, and RDDs on a classic master."""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from state_ops.errors import ConfigurationError, TransientError, WeirError, first_line, plainly
from state_ops.logs import FORMAT, JSON, Logger
from state_ops.redaction import redacted
from state_ops.storage.s3 import hadoop_properties, is_s3, jvm_environment
from state_ops.storage.temp_dirs import make_private, scratch
from weir.execution.spark import class_archive, code_archive, environment
from weir.execution.spark.imports import load_connect, load_pyspark, name_main_module
from weir.execution.spark.java import java_home
from weir.execution.spark.spark_jars import delta_jars, s3_jars
from weir.settings.configuration import PROJECT, S3Settings, Settings

log = Logger("weir.spark")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J, _LOG4J_JSON = (Path(__file__).with_name(name) for name in ("log4j2.properties", "log4j2-json.properties"))
_CONNECT_PORT, _CONNECT_SECONDS, _SAID_SECONDS = 15002, 10.0, 5.0
_SMALL_MACHINE = 4  # processors
_BRIEF_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"  # Spark asks one for the command line that starts the other
_SECRET = re.compile(r"access\.key|secret|session\.token|password", re.IGNORECASE)
_VALUE = "a-value-0123"  # that nothing but its name makes a secret


def session(settings: Settings, *, app: str, delta: bool = False) -> SparkSession:
    """Start Spark, or return the session that this process has.

    Args:
        delta: Load Delta's jars, which the control plane does without; needed to read tables through delta-spark.
    """
    load_pyspark()
    from pyspark.sql import SparkSession

    name_main_module()
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    remote = settings.spark.master.startswith("sc://")
    if not remote:
        environment.check(settings.spark.master)
        os.environ["JAVA_HOME"] = str(java_home(settings.cache_dir))
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    # Local workers import what the driver imports from the project's folder.
    paths = [str(PROJECT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    builder = SparkSession.builder.appName(app)
    builder = builder.remote(settings.spark.master) if remote else builder.master(settings.spark.master)
    for key, value in _properties(settings).items():
        builder = builder.config(key, value)
    jars: list[Path] = []
    if delta:
        jars += delta_jars(settings.cache_dir)
        builder = (
            builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
            .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
            .config("spark.databricks.delta.snapshotPartitions", "2")
        )
    s3 = reads_s3(settings) and not remote
    if s3:
        jars += s3_jars(settings.cache_dir)
    if jars:
        builder = builder.config("spark.jars", ",".join(str(jar) for jar in jars))
    variables: dict[str, str | None] = {} if remote else environment.variables(settings.spark.master)
    variables |= worker_python(settings) | (jvm_environment(settings.storage.s3) if s3 else {})
    variables["SPARK_LAUNCHER_OPTS"] = os.environ.get("SPARK_LAUNCHER_OPTS", _BRIEF_JVM)
    with _stderr_to(log_file(settings)), environment.environment(variables):
        try:
            if remote:
                reach(settings.spark.master)
            spark = builder.getOrCreate()
        except Exception as error:  # PySpark raises many kinds here; its log says why
            raise not_started(settings, error) from error
    if remote:
        _with_patience(spark)
    if not settings.spark.master.startswith("local"):
        code_archive.ship(spark, settings)
    return spark


def not_started(settings: Settings, error: Exception) -> WeirError:
    why = first_line(error)
    if not settings.spark.master.startswith("sc://"):
        return TransientError(
            f"Spark did not start: {why}",
            where=str(log_file(settings)),
            next="Read the end of that file; check spark.master, spark.driver_memory and the Java that is used.",
        )
    where = f"spark.master = {settings.spark.master}"
    if isinstance(error, ImportError):
        return ConfigurationError(
            f"Spark Connect needs packages that are not installed here: {why}",
            where=where,
            next="pip install 'pyspark[connect]' beside this process: docs/how-to/clusters.md. Nothing was started.",
        )
    return TransientError(
        f"There is no session on the Spark Connect server: {why}",
        where=where,
        next="See whether the server runs there and what its own log says last, then run again.",
    )


def reach(master: str) -> None:
    """Raise ImportError where Spark Connect's client lacks packages, and OSError where nothing listens at the address:
    the client would try for ten minutes without a word."""
    name_main_module()  # pyspark would end a process without one, and say that it skips doctests
    load_connect()
    address = urlsplit(master)
    with socket.create_connection((address.hostname or "localhost", address.port or _CONNECT_PORT), _CONNECT_SECONDS):
        pass


def _with_patience(spark: SparkSession) -> None:
    """Let a Spark Connect client that gets no answer say so, and give up after half a minute instead of ten."""
    load_connect()
    from pyspark.sql.connect.client.retries import DefaultPolicy

    class Patience(DefaultPolicy):
        last_said = -_SAID_SECONDS

        def can_retry(self, e: BaseException) -> bool:
            retried = super().can_retry(e)
            if retried and time.monotonic() - self.last_said >= _SAID_SECONDS:
                self.last_said = time.monotonic()
                log.warning("the Spark Connect server does not answer, trying again", error=plainly(e)[:200])
            return retried

    spark.client.set_retry_policies(
        [Patience(max_retries=9, backoff_multiplier=2.0, initial_backoff=100, max_backoff=8000)]
    )


def worker_python(settings: Settings) -> dict[str, str]:
    """Return the variables that tell PySpark which Python runs the workers.

    On other hosts this process's own path may not exist. There it is `python3` unless a setting names another one.
    """
    named = settings.spark.python or settings.spark.conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if named is None and settings.spark.master.startswith("local"):
        named = sys.executable
    return {"PYSPARK_PYTHON": named} if named else {}


def _unix_sockets() -> dict[str, str]:
    """Let the JVM and the Python workers of one host talk by Unix sockets, in a directory that only this user can
    enter; by TCP as ever where its name is too long for that, or its disk has no sockets.

    By TCP each task that gets few bytes waits 40 ms, since the JVM holds back a second small packet until the first one
    is acknowledged, and the worker acknowledges late (Nagle's algorithm against delayed acknowledgements).
    """
    kept = ExitStack()
    directory = kept.enter_context(scratch(Path(tempfile.gettempdir()), "weir-spark-"))
    directory.chmod(0o700)
    probe = directory / f".{uuid.uuid4()}.sock"  # as Spark names them
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.bind(str(probe))
        probe.unlink()
    except OSError:
        kept.close()
        return {}
    atexit.register(kept.close)
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": str(directory)}


def reads_s3(settings: Settings) -> bool:
    """Return whether storage or a source may be on S3: by its root, a pipeline's parameter, or a storage.s3 block."""
    values = [value for pipeline in settings.pipelines.values() for value in pipeline.params.values()]
    return any(map(is_s3, [settings.storage.root, *values])) or settings.storage.s3 != S3Settings()


def log_file(settings: Settings) -> Path:
    """Return the file to which the JVM and the Python workers of local runs write their logs."""
    return settings.work_dir / "spark.log"


@contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Let a child that starts meanwhile inherit `file` as its stderr: the JVM's chatter is not the operator's
    business."""
    make_private(file.parent)
    sys.stderr.flush()
    kept = os.dup(2)
    with file.open("ab") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def light_jvm(master: str, conf: Mapping[str, str]) -> str:
    """Return options for a JVM that leaves a small machine's processors to Python: one compiler, one collector's
    thread.

    On up to four processors the full compiler takes a third of them while it starts. The options stand before all
    others, so that `spark.conf` can change each; a collector that is chosen there, or by JAVA_TOOL_OPTIONS, is kept.
    """
    cores = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", master)
    if cores is None:
        return ""
    threads = (os.cpu_count() or 1) if cores[1] == "*" else int(cores[1] or 1)
    if threads > _SMALL_MACHINE:
        return ""
    chosen = " ".join([*conf.values(), os.environ.get("JAVA_TOOL_OPTIONS", "")])
    collector = "" if re.search(r"-XX:\+Use\w+GC\b", chosen) else "-XX:+UseSerialGC "
    return f"{collector}-XX:TieredStopAtLevel=1"


def _java_options(settings: Settings) -> dict[str, str]:
    """Return what the JVMs of the driver and of executors are started with before all other options. Where an executor
    has no such archive, it goes on without."""
    chosen = " ".join([*settings.spark.conf.values(), os.environ.get("JAVA_TOOL_OPTIONS", "")])
    archive = ""
    if not re.search(r"-Xshare|-XX:(SharedArchiveFile|ArchiveClassesAtExit)", chosen):
        archive = class_archive.java_options(settings.cache_dir, java_home(settings.cache_dir))
    driver = f"{light_jvm(settings.spark.master, settings.spark.conf)} {archive}".strip()
    options = {"spark.driver.defaultJavaOptions": driver, "spark.executor.defaultJavaOptions": archive}
    return {name: value for name, value in options.items() if value}


def _properties(settings: Settings) -> dict[str, str]:
    spark, log4j = settings.spark, _LOG4J_JSON if settings.logging.format == JSON else _LOG4J
    properties = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(spark.parallelism),
        # A partition's number is that of its subtask; an adaptive plan may join partitions, or drop them all.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(spark.batch_rows),
        "spark.sql.execution.pythonUDF.arrow.enabled": "true",
        "spark.python.worker.reuse": "true",
        "spark.driver.memory": spark.driver_memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # Files of old Sparks do not say in which time zone they were written: the same on every host then.
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()} -Duser.timezone=UTC",
        "spark.executor.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.sql.files.ignoreMissingFiles": "false",
        "spark.sql.files.ignoreCorruptFiles": "false",
        # Off by default: a flipped bit would come out as another value, although the file says that it is damaged.
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
        "spark.sql.parquet.filterPushdown": "true",
        # Of files that do not say by which calendar they were written.
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
        "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
        "spark.sql.caseSensitive": "true",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
        "spark.sql.ansi.enabled": "true",
    }
    if reads_s3(settings):
        properties |= hadoop_properties(settings.storage.s3)
    if spark.master.startswith("local"):
        properties |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Jobs of RDDs and of DataFrames share workers where their variables are the same, and those have this one.
        properties["spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK"] = "1"
        properties["spark.python.daemon.module"] = "weir.execution.spark.worker_daemon"
        properties |= _unix_sockets()
    if not spark.master.startswith("sc://"):
        properties |= _java_options(settings)
        properties[f"spark.executorEnv.{FORMAT}"] = settings.logging.format  # workers read no settings
    _check_no_secret(spark.conf)
    return properties | spark.conf


def _check_no_secret(conf: Mapping[str, str]) -> None:
    """Refuse properties that are secrets by their name, or have one in their value: all of them stand on the JVM's
    command line, which every user of the host can read."""
    for key, value in conf.items():
        by_name = _SECRET.search(key) is not None or _VALUE not in redacted(f'{key}="{_VALUE}"')
        if by_name or redacted(str(value)) != str(value):
            has = "is" if by_name else "has"
            raise ConfigurationError(
                f"The Spark property {key} {has} a secret, which would stand on a command line and in Spark's UI.",
                where="spark.conf",
                next="Take it out. Of S3, storage.s3 says by reference where the keys are; others go into a"
                " core-site.xml on Hadoop's path, or into files that only this user can read.",
            )
