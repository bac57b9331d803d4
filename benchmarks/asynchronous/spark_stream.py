"""Spark Structured Streaming's own aggregation into a Delta table, exactly once, until it is killed.

python -m benchmarks.asynchronous.spark_stream '{"landing": ..., "table": ..., "checkpoint": ..., "interval": 1.0, ...}'

Set up as in benchmarks/state/spark_native.py. Delta's own streaming sink takes no updates, so each micro-batch is
appended by `foreachBatch`, which Delta makes idempotent by its transaction's version, as its documentation says to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.state import spark_native
from benchmarks.state.engine import Task
from weir.execution.spark.spark_jars import delta_jars

_APP = "bench"


def _task(given: dict[str, Any]) -> Task:
    conf = {
        "spark.jars": ",".join(map(str, delta_jars(Path(given["cache"])))),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.driver.memory": "2g",
        # Else more than 32 files are listed by a Spark job of as many tasks, for every micro-batch.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
        "spark.ui.showConsoleProgress": "false",
    }
    options = {"changelog": True, "sink": "delta", "conf": conf}
    return Task("spark", [given["landing"]], 100, 0, 0, 0, given["checkpoint"], given["local"], "", False, options)


def main(given: dict[str, Any]) -> None:
    from pyspark.sql import functions as F

    task = _task(given)
    Path(task.local).mkdir(parents=True)
    spark = spark_native.session(task)

    def append(batch: Any, number: int) -> None:
        writer = batch.write.format("delta").mode("append").option("txnAppId", _APP).option("txnVersion", number)
        writer.save(given["table"])

    source = spark.readStream.schema("key long, value double").option("maxFilesPerTrigger", task.files)
    # The directory itself: of a pattern, every file would be a path of its own to list.
    totals = (
        source.parquet(given["landing"])
        .groupBy("key")
        .agg(F.count("*").alias("n"), F.sum("value").alias("total"), F.max("value").alias("top"))
    )
    writer = totals.writeStream.outputMode("update").option("checkpointLocation", task.durable).foreachBatch(append)
    writer.trigger(processingTime=f"{given['interval']:g} seconds").start().awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
