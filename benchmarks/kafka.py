"""Kafka: messages of JSON from a topic to Parquet, by Weir's source and by Spark's own connector, in one run.

    python -m benchmarks.kafka                        200,000 and 1,000,000 messages; two minutes
    python -m benchmarks.kafka --messages 50000 --reps 2 --results /tmp/kafka

A broker of one node on the same machine, a topic of four partitions, messages of some 90 bytes. Both ways end with
Parquet files of the same rows on the local disk. Spark is warm: each way runs once before it is measured. Repetitions
alternate, medians count.

- weir: the connector is opened, plans the topic, reads its parts in two threads and decodes them.
- spark: `spark.read.format("kafka")` with `from_json`, on `local[2]`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from benchmarks.harness import cpu_seconds, seconds
from configs.settings import PROJECT
from infra.kafka_broker import KafkaBroker
from pipelines.api import kafka
from pipelines.runtime.connectors.source import Connector, Limits, Opening, Part
from pipelines.runtime.execution.spark.java import java_home
from pipelines.runtime.execution.spark.spark_jars import fetch, locked_jars

CACHE = PROJECT / ".weir" / "cache"
PARTITIONS = 4
SCHEMA = pa.schema(
    [("id", pa.int64()), ("user", pa.string()), ("amount", pa.float64()), ("at", pa.timestamp("us", "UTC"))]
)
_DDL = "id BIGINT, user STRING, amount DOUBLE, at TIMESTAMP"


def produced(servers: str, topic: str, messages: int) -> None:
    """A new topic with so many messages."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 2_000_000})
    for number in range(messages):
        row = {
            "id": number,
            "user": f"user-{number % 9973:06}",
            "amount": number % 1000 / 8,
            "at": f"2026-01-01T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z",
        }
        producer.produce(topic, json.dumps(row).encode(), partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0


def by_weir(servers: str, topic: str, target: Path) -> None:
    """The topic as Parquet, by the source's connector."""
    connector = kafka(topic, servers=servers, schema=SCHEMA).open(Opening("bench", str, {}))
    target.mkdir()
    planned = connector.plan(connector.begin("earliest"), Limits(1000, 1 << 40, 1 << 50))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: _written(connector, part, target), planned.parts))
    connector.close()


def _written(connector: Connector, part: Part, target: Path) -> None:
    batches = connector.read(part)
    first = next(batches)
    with pq.ParquetWriter(target / f"{part.name}.parquet", first.rows.schema) as writer:
        writer.write_table(first.rows)
        for batch in batches:
            writer.write_table(batch.rows)


def by_spark(spark: Any, servers: str, topic: str, target: Path) -> None:
    """The topic as Parquet, by Spark."""
    from pyspark.sql.functions import col, from_json

    rows = spark.read.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic).load()
    rows.select(from_json(col("value").cast("string"), _DDL).alias("row")).select("row.*").write.parquet(str(target))


def measured(root: Path, sizes: list[int], reps: int) -> dict[int, dict[str, float]]:
    """Medians by number of messages and way."""
    os.environ["JAVA_HOME"] = str(java_home(CACHE))
    from pyspark.sql import SparkSession

    jars = ",".join(map(str, fetch(locked_jars("spark-kafka"), CACHE)))
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    medians: dict[int, dict[str, float]] = {}
    with KafkaBroker(root / "broker", CACHE) as broker:
        for messages in sizes:
            topic = f"messages-{messages}"
            produced(broker.servers, topic, messages)
            ways = {
                "weir": lambda target, topic=topic: by_weir(broker.servers, topic, target),
                "spark": lambda target, topic=topic: by_spark(spark, broker.servers, topic, target),
            }
            figures: dict[str, list[float]] = defaultdict(list)
            for repetition in range(reps + 1):
                for way, act in ways.items():
                    target, cpu = root / f"{topic}-{way}", cpu_seconds()
                    took = seconds(lambda act=act, target=target: act(target))  # type: ignore[misc]
                    assert pq.read_table(target).num_rows == messages
                    shutil.rmtree(target)
                    if repetition:
                        figures[way].append(took)
                        figures[f"{way} cpu"].append(cpu_seconds() - cpu)
            medians[messages] = harness.medians_of(figures)
    spark.stop()
    return medians


def main(messages: str = "200000,1000000", reps: int = 5, results: Path = harness.RESULTS / "kafka") -> None:
    """Weir's source beside Spark's connector. messages: of the topics."""
    figures = {
        "machine": harness.machine(),
        "sizes": harness.in_scratch(measured, [int(number) for number in messages.split(",")], reps),
    }
    page = harness.render("kafka", **figures, reps=reps, load=os.getloadavg()[0])
    harness.publish(results, figures, page)


if __name__ == "__main__":
    typer.run(main)
