"""Spark Structured Streaming's own aggregation, windows, sessions and deduplication, on its RocksDB state store."""

from __future__ import annotations

import os
import platform
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.state.engine import Result, Task, serve

_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def options(task: Task) -> dict[str, str]:
    """Every property that differs from Spark's defaults."""
    return {
        "spark.master": "local[2]",
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": f"{task.local}/spark",
        "spark.sql.warehouse.dir": f"{task.local}/warehouse",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.stateStore.providerClass": _PROVIDER,
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": "256",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": str(task.options["changelog"]).lower(),
        **task.options.get("conf", {}),
    }


def session(task: Task) -> Any:
    from pyspark.sql import SparkSession

    from weir.execution.spark.java import java_home

    os.environ["JAVA_HOME"] = str(java_home(Path(task.local) / "cache"))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(task.row)
    for key, value in options(task).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def follow(query: Any, result: Result, done: int) -> int:
    """Wait for the query's end; note every micro-batch with its phases. Returns the events done."""
    query.awaitTermination()
    for progress in query.recentProgress:
        if not progress["numInputRows"]:
            continue
        done += progress["numInputRows"]
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
        result.progress.append((began + progress["durationMs"]["triggerExecution"] / 1e3, done))
        state = {
            f"state:{key}": float(value)
            for operator in progress["stateOperators"]
            for key, value in operator.items()
            if key.endswith("Ms")
        }
        result.phases.append({**{k: float(v) for k, v in progress["durationMs"].items()}, **state})
    return done


def describe(task: Task, result: Result, spark: Any) -> None:
    shown = {key: value for key, value in options(task).items() if task.local not in value}
    result.settings = {**shown, "sink": task.options["sink"]}
    result.versions = {"pyspark": spark.version, "python": platform.python_version()}
    result.versions["java"] = spark.sparkContext._jvm.java.lang.System.getProperty("java.version")


def source(spark: Any, task: Task, directory: str) -> Any:
    text = ", payload string" if task.payload else ""
    return (
        spark.readStream.schema(
            f"key long, value double{text}{'' if task.operator == 'aggregate' else ', at timestamp'}"
        )
        .option("maxFilesPerTrigger", task.files)
        .option("latestFirst", "false")
        .parquet(f"{directory}/*.parquet")
    )


def answered(rows: Any, task: Task, columns: list[Any]) -> Any:
    """The task's operator over its rows."""
    from pyspark.sql import functions as F

    from benchmarks.state.workload import LATENESS_SECONDS, WINDOW_SECONDS

    if task.operator == "aggregate":
        return rows.groupBy("key").agg(*columns)
    if task.operator == "deduplicate":
        return rows.withWatermark("at", f"{WINDOW_SECONDS} seconds").dropDuplicatesWithinWatermark(["key"])
    cut = {"window": F.window, "session": F.session_window}[task.operator]("at", f"{WINDOW_SECONDS} seconds").alias("w")
    windows = rows.withWatermark("at", f"{LATENESS_SECONDS} seconds").groupBy("key", cut).agg(*columns)
    return (
        windows.select("*", "w.start", "w.end")
        .drop("w")
        .withColumnsRenamed({"start": "window_start", "end": "window_end"})
    )


def run(task: Task, result: Result) -> None:
    from pyspark.sql import functions as F

    spark = session(task)
    result.ready = time.time()
    done = 0
    for directory in task.inputs:
        columns = [F.count("*").alias("n"), F.sum("value").alias("total"), F.max("value").alias("top")]
        if task.payload:
            columns.append(F.max("payload").alias("payload"))
        rows = answered(source(spark, task, directory), task, columns)
        mode = "update" if task.operator == "aggregate" else "append"
        writer = rows.writeStream.outputMode(mode).option("checkpointLocation", f"{task.durable}/checkpoint")
        if task.options["sink"] == "noop":
            writer = writer.format("noop")
        else:
            writer = writer.foreachBatch(lambda batch, _: batch.write.mode("append").parquet(f"{task.durable}/output"))
        done = follow(writer.trigger(availableNow=True).start(), result, done)
    describe(task, result, spark)
    if task.options["sink"] == "noop":
        state = spark.read.format("statestore").load(f"{task.durable}/checkpoint")
        names = ["n", "total", "top", "payload"][: len(columns)]
        fields = [
            f"value.`{field.name}` AS {name}"
            for field, name in zip(state.schema["value"].dataType, names, strict=False)
        ]
        state.selectExpr("key.key AS key", *fields).write.parquet(f"{task.local}/state")
        result.output = [f"{task.local}/state/*.parquet"]
    else:
        result.output = [f"{task.durable}/output/*.parquet"]


if __name__ == "__main__":
    serve(run)
