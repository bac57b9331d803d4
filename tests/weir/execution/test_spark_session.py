"""How the JVM of a session is started, and its workers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from weir.execution.spark import spark_session
from weir.execution.spark.spark_session import light_jvm
from weir.execution.spark.worker_daemon import ending_quietly, without_archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LIGHT = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", _LIGHT),
        ("local[2]", _LIGHT),
        ("local[4,3]", _LIGHT),
        ("local[5]", ""),
        ("local-cluster[2,1,1024]", ""),
        ("spark://127.0.0.1:7077", ""),
        ("sc://127.0.0.1", ""),
    ],
)
def test_a_small_local_spark_compiles_and_collects_with_one_thread(
    master: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_TOOL_OPTIONS", raising=False)
    assert light_jvm(master, {}) == expected


@pytest.mark.parametrize(("processors", "expected"), [(2, _LIGHT), (64, "")])
def test_all_processors_are_counted(processors: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_TOOL_OPTIONS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    assert light_jvm("local[*]", {}) == expected


def test_a_collector_that_is_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java refuses to start with two."""
    monkeypatch.delenv("JAVA_TOOL_OPTIONS", raising=False)
    compiler_alone = "-XX:TieredStopAtLevel=1"
    assert light_jvm("local", {"spark.driver.extraJavaOptions": "-XX:+UseG1GC"}) == compiler_alone
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xss2m -XX:+UseParallelGC")
    assert light_jvm("local", {}) == compiler_alone


def test_sparks_own_jvm_is_started_so(spark: SparkSession) -> None:
    arguments = spark.sparkContext._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    assert "-XX:TieredStopAtLevel=1" in set(arguments)


def test_workers_are_reached_by_sockets_that_only_this_user_can_open(spark: SparkSession) -> None:
    context = spark.sparkContext
    directory = context.getConf().get("spark.python.unix.domain.socket.dir")
    if directory is None:
        pytest.skip("the name of the temporary directory is too long for sockets")
    assert context.parallelize([1], 1).map(lambda n: n + 1).collect() == [2]
    assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
    sockets = {str(file) for file in Path(directory).iterdir() if stat.S_ISSOCK(file.stat().st_mode)}
    assert sockets - {context._accumulatorServer.server_address}, "the daemon of the workers has one"


@pytest.mark.parametrize(
    "name", ["long" * 25, "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 40], ids=["letters", "bytes"]
)
def test_workers_are_reached_by_tcp_where_the_names_of_sockets_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    long = tmp_path / name
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert spark_session._unix_sockets() == {}
    assert not [*long.iterdir()]


def test_a_directory_of_sockets_that_a_killed_process_has_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        monkeypatch.setattr(tempfile, "tempdir", home)
        code = f"""
import os, tempfile
tempfile.tempdir = {home!r}
from weir.execution.spark import spark_session
print(spark_session._unix_sockets()["spark.python.unix.domain.socket.dir"], flush=True)
os.kill(os.getpid(), 9)
"""
        killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        left = Path(killed.stdout.strip())
        assert killed.returncode == -9 and left.is_dir()
        own = Path(spark_session._unix_sockets()["spark.python.unix.domain.socket.dir"])
        assert [*Path(home).iterdir()] == [own]


def test_workers_import_what_is_unpacked_and_only_if_it_is_the_same() -> None:
    package = Path(pyspark.__file__).parent
    archives = [str(package / "python" / "lib" / name) for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip")]
    installed, authors = str(package.parent), "/code/python/lib/shipped.zip"
    assert without_archives([*archives, "/code", authors, installed]) == ["/code", authors, installed]
    for path in (
        [*archives, "/code"],
        ["/opt/spark/python/lib/pyspark.zip", "/code", installed],
        ["/code", installed],
        [authors, installed],
    ):
        assert without_archives(path) == path


def test_a_worker_whose_jvm_has_gone_ends_without_an_error() -> None:
    def serve(*given: object) -> int:
        if "gone" in given:
            raise BrokenPipeError
        return 0

    assert ending_quietly(serve)("socket", True) == 0
    assert ending_quietly(serve)("gone", True) == 1


def test_a_worker_does_without_what_reads_settings() -> None:
    code = "import json, sys, weir.execution.spark.spark_task; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    packages = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not packages & {"pydantic", "yaml", "psutil", "pandas", "structlog", "dagster", "pyspark"}
