"""Write the archive of Spark's classes with which each later JVM starts in half the time: `python -m
weir.local.class_archive`.

A pipeline of one stage runs in a process of its own, on the two paths that rows take, and its JVM writes what it has
loaded as it ends. `make venv` does so, since an archive fits one Java and one set of jars. Nothing depends on it: where
it fails, the reason is shown and Spark starts as slowly as without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from state_ops.errors import ConfigurationError, WeirError
from weir.api import Pipeline, agg, aggregate, delta, files
from weir.execution.spark import class_archive
from weir.execution.spark.imports import load_pyspark
from weir.execution.spark.java import java_home
from weir.execution.spark.spark_executor import SparkExecutor
from weir.execution.spark.spark_session import light_jvm
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings

TIMEOUT_S = 300

sums = aggregate(
    "sums",
    files("{landing}/*.parquet", name="landing"),
    key="key",
    where="length(text) > 0",
    sink=delta.append("sums"),
    total=agg.sum("value"),
)
pipeline = Pipeline("archived", (sums,))


def main() -> int:
    """Make the archive; the exit code is 0 where it was made."""
    cache = settings.load(os.environ).cache_dir
    try:
        home = java_home(cache)
        class_archive.directory(cache).mkdir(parents=True, exist_ok=True)
        archive = make(cache, home)
    except subprocess.CalledProcessError as error:
        print(f"Spark's classes are not archived: {(error.stderr or error.stdout).strip()[-500:]}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired:
        print(
            f"Spark's classes are not archived: that took more than {TIMEOUT_S} s. Spark starts without, in twice "
            "the time; `python -m weir.local.class_archive` tries again.",
            file=sys.stderr,
        )
        return 1
    except (WeirError, OSError) as error:
        print(f"Spark's classes are not archived: {error}", file=sys.stderr)
        return 1
    print(f"Spark's classes are in {archive}")
    return 0


def make(cache: Path, home: Path) -> Path:
    """Write the archive of a Java below a cache directory.

    Raises:
        subprocess.SubprocessError: A JVM failed, took minutes, or does not take what it has written. From Java 21 on it
            takes no class path that names a jar twice, as Spark's does.
        OSError: It could not be written.
        ConfigurationError: The Java has no archive to build on.
    """
    if subprocess.run([home / "bin/java", "-Xshare:on", "-version"], capture_output=True, check=False).returncode:
        raise ConfigurationError(
            "This Java came without the archive of its own classes, which another one builds on.",
            where=str(home),
            next="Set JAVA_HOME to a Java 17 of the system, and run this again; or leave it: Spark starts without.",
        )
    with tempfile.TemporaryDirectory(prefix=".classes-", dir=class_archive.directory(cache)) as work:
        partial = Path(work) / "archive.jsa"
        light = light_jvm("local[2]", {})
        options = f"{light} {class_archive.QUIET} {class_archive.option('ArchiveClassesAtExit', partial)}"
        env = os.environ | {
            "WEIR_STORAGE__ROOT": f"{work}/storage",
            "WEIR_LOCAL__WORK_DIR": f"{work}/work",
            "WEIR_LOCAL__CACHE_DIR": str(cache),
            "WEIR_PIPELINES__ARCHIVED__OBJECT": "weir.local.class_archive:pipeline",
            "WEIR_PIPELINES__ARCHIVED__PARAMS": json.dumps({"landing": f"{work}/landing"}),
            "WEIR_SPARK__MASTER": "local[2]",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_SPARK__CONF": json.dumps({"spark.driver.defaultJavaOptions": options}),
        }
        _run([sys.executable, "-m", "weir.local.class_archive", f"{work}/landing"], env)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        options = f"{light} -Xshare:on {class_archive.option('SharedArchiveFile', partial)}"
        strict = {"JAVA_HOME": str(home), "SPARK_SUBMIT_OPTS": options}
        _run([str(class_archive.spark_home() / "bin" / "spark-submit"), "--version"], os.environ | strict)
        return class_archive.keep(partial, cache, home)


def _run(command: list[str], env: dict[str, str]) -> None:
    subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)


def run_and_end(landing: Path) -> None:
    """Run two epochs, one that reads by itself and one whose rows go through Spark's shuffle, and end the JVM."""
    for number, direct_read_mb in enumerate((64, 0)):
        landing.mkdir(exist_ok=True)
        rows = pl.DataFrame({"key": range(100), "value": range(100), "text": ["a"] * 100})
        rows.write_parquet(landing / f"{number}.parquet")
        loaded = settings.load(os.environ | {"WEIR_SPARK__DIRECT_READ_MB": str(direct_read_mb)})
        executor = SparkExecutor(loaded, "archived")
        for _ in run(pipeline, loaded, RunOptions(until_caught_up=True), executor):
            pass
    executor.session.stop()
    end_jvm()


def end_jvm() -> None:
    """Close the JVM's standard input, at which it ends, and wait until it has."""
    load_pyspark()
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    run_and_end(Path(sys.argv[1]))
    os._exit(0)
