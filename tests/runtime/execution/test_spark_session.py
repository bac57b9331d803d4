"""How the JVM of a session is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipelines.runtime.execution.spark.spark_session import light_jvm

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
