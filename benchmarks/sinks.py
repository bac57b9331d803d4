"""Sinks: rows of a Parquet file to each kind of sink, by Weir and by Spark or the client library alone, in one run.

    python -m benchmarks.sinks                        500,000 rows; some minutes
    python -m benchmarks.sinks --rows 100000 --reps 1 --results /tmp/sinks

A row is an integer key, 64 bytes of text, a number and a day. Weir's figures have all of it from the file to the rows
that readers see: staging by two subtasks' threads, as tasks do it, and the publish. Spark is `local[2]` with 4 GB, and
each way runs once before it is measured. Kafka and Postgres (without fsync) are on the same machine. Repetitions
alternate, medians count.

- append: beside Spark's append to a Delta table. replace: all rows of a day, beside Spark's `replaceWhere`. upsert: all
  rows of a table of as many, beside Spark's MERGE.
- kafka: in a transaction with the marker, beside Spark's connector, which has none, and confluent-kafka alone.
- postgres: with marker and temporary table, beside ADBC's COPY alone. foreach: beside reading the file alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from benchmarks.harness import cpu_seconds, seconds
from benchmarks.upsert import checkpoint
from state_ops.arrow.parquet import WHERE, staged_writer
from state_ops.ids import AttemptId
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from tests.tools.postgres_server import Postgres, serving
from weir import delta as sinks
from weir import foreach, kafka, postgres
from weir.connectors.delta import append, replace_partitions, upsert
from weir.connectors.sink import Sink, SinkOpening
from weir.connectors.staged_rows import StagedRows
from weir.local.kafka_broker import KafkaBroker
from weir.settings.configuration import load

SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string()), ("n", pa.int64()), ("day", pa.date32())])
APP, DAY = "weir/bench/main", "day = DATE '2026-01-01'"
_SUBTASKS = 2


class Ways:
    """What is measured. Each call has a target of its own.

    Args:
        root: A directory for all of it.
        file: The rows.
    """

    def __init__(self, root: Path, file: Path, spark: Any, broker: KafkaBroker, server: Postgres) -> None:
        self.root, self.file, self.spark, self.broker, self.server = root, file, spark, broker, server
        self.number = 0

    # -- Weir's

    def _staged(
        self, storage: Storage, number: int, where: str | None = None, below: str = "tables/out/data"
    ) -> list[StateFile]:
        """The rows as two subtasks stage them."""
        (self.root / "scratch").mkdir(exist_ok=True)

        def stage(subtask: int) -> StateFile:
            local, rows = self.root / "scratch" / f"staged-{subtask}", 0
            with pq.ParquetFile(self.file) as source:
                groups = range(subtask, source.num_row_groups, _SUBTASKS)
                schema = source.schema_arrow.with_metadata({WHERE: where} if where else None)
                with staged_writer(local, schema) as writer:
                    for batch in source.iter_batches(row_groups=list(groups), use_threads=False):
                        writer.write_batch(batch)
                        rows += batch.num_rows
            path = f"{below}/g1-e{number}/{subtask}-a.parquet"
            size, digest = storage.put_file(local, path)
            return StateFile("", subtask, OUTPUT, "main", path, size, digest, True, AttemptId("a"), None, "out", rows)

        with ThreadPoolExecutor(_SUBTASKS) as pool:
            return list(pool.map(stage, range(_SUBTASKS)))

    def _storage(self) -> Storage:
        self.number += 1
        storage = Storage(str(self.root / f"weir-{self.number}"))
        append.ensure(storage, "out", SCHEMA)
        return storage

    def append(self) -> Callable[[], object]:
        storage = self._storage()
        return lambda: append.publish(storage, APP, "out", checkpoint(2), None, self._staged(storage, 2))

    def replace(self) -> Callable[[], object]:
        storage, scratch = self._storage(), self.root / "scratch"
        append.publish(storage, APP, "out", checkpoint(2), None, self._staged(storage, 2))
        return lambda: replace_partitions.publish(
            storage, APP, "out", checkpoint(3), 2, self._staged(storage, 3, DAY), scratch=scratch
        )

    def upsert(self) -> Callable[[], object]:
        storage, sink = self._storage(), sinks.upsert("out", "key")
        append.publish(storage, APP, "out", checkpoint(2), None, self._staged(storage, 2))
        return lambda: upsert.publish(
            storage, APP, sink, checkpoint(3), 2, self._staged(storage, 3, below="outputs/out"), self.root / "scratch"
        )

    def _handed_over(self, sink: Sink, options: dict[str, str]) -> Callable[[], object]:
        storage, opened = self._storage(), sink.open(SinkOpening(f"{APP}/{sink.name}", str, options, lambda: None))
        opened.prepare(SCHEMA)

        def publish() -> None:
            files = self._staged(storage, 2, below="outputs/out")
            opened.publish(None, 2, StagedRows(storage, files, self.root / "scratch"))
            opened.close()

        return publish

    def kafka(self) -> Callable[[], object]:
        topic = f"weir-{self.number + 1}"
        return self._handed_over(kafka.sink(topic, servers=self.broker.servers, key="key", partitions=4), {})

    def postgres(self) -> Callable[[], object]:
        return self._handed_over(postgres.sink(f"weir_{self.number + 1}", connection="rows"), self.server.options)

    def foreach(self) -> Callable[[], object]:
        return self._handed_over(foreach(lambda rows, _: rows.num_rows, name=f"f{self.number + 1}"), {})

    # -- others'

    def _frame(self) -> Any:
        return self.spark.read.parquet(str(self.file))

    def _table(self, filled: bool) -> str:
        self.number += 1
        path = str(self.root / f"spark-{self.number}")
        if filled:
            self._frame().write.format("delta").save(path)
        return path

    def spark_append(self) -> Callable[[], object]:
        path = self._table(filled=False)
        return lambda: self._frame().write.format("delta").mode("append").save(path)

    def spark_replace(self) -> Callable[[], object]:
        path = self._table(filled=True)
        writer = self._frame().write.format("delta").mode("overwrite").option("replaceWhere", DAY)
        return lambda: writer.save(path)

    def spark_upsert(self) -> Callable[[], object]:
        path = self._table(filled=True)
        self._frame().createOrReplaceTempView("changes")
        merge = f"MERGE INTO delta.`{path}` t USING changes s ON t.key = s.key"
        return lambda: self.spark.sql(f"{merge} WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *")

    def spark_kafka(self) -> Callable[[], object]:
        topic = self._topic("spark")
        messages = self._frame().selectExpr("CAST(key AS STRING) AS key", "to_json(struct(*)) AS value")
        writer = messages.write.format("kafka").option("kafka.bootstrap.servers", self.broker.servers)
        return lambda: writer.option("topic", topic).save()

    def client_kafka(self) -> Callable[[], object]:
        from confluent_kafka import Producer

        topic = self._topic("client")
        producer = Producer({"bootstrap.servers": self.broker.servers, "queue.buffering.max.messages": 2_000_000})

        def produce() -> None:
            rows = pl.read_parquet(self.file)
            values = rows.write_ndjson().encode().splitlines()
            for key, value in zip(rows["key"].cast(pl.String).to_list(), values, strict=True):
                producer.produce(topic, value, key)
            assert producer.flush(300) == 0

        return produce

    def _topic(self, whose: str) -> str:
        from confluent_kafka.admin import AdminClient, NewTopic

        self.number += 1
        topic = f"{whose}-{self.number}"
        admin = AdminClient({"bootstrap.servers": self.broker.servers})
        admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(30)
        return topic

    def client_postgres(self) -> Callable[[], object]:
        from adbc_driver_postgresql import dbapi

        self.number += 1
        table = f"client_{self.number}"
        info = " ".join(f"{name}='{value}'" for name, value in self.server.options.items())

        def ingest() -> None:
            with dbapi.connect(info) as connection, connection.cursor() as cursor:
                cursor.adbc_ingest(table, pq.read_table(self.file), mode="create")
                connection.commit()

        return ingest

    def client_foreach(self) -> Callable[[], object]:
        return lambda: pq.read_table(self.file).num_rows


WAYS = {
    "append": ("spark_append",),
    "replace": ("spark_replace",),
    "upsert": ("spark_upsert",),
    "kafka": ("spark_kafka", "client_kafka"),
    "postgres": ("client_postgres",),
    "foreach": ("client_foreach",),
}


def write(file: Path, rows: int) -> None:
    """The rows, in files' usual row groups."""
    draw = np.random.default_rng(1)
    texts = pl.Series(draw.integers(0, 1 << 60, rows)).cast(pl.String).str.pad_start(64, "x").to_arrow()
    days = pa.array([date(2026, 1, 1)] * rows, pa.date32())
    columns = [draw.permutation(rows), texts.cast(pa.string()), draw.integers(0, 1 << 40, rows), days]
    pq.write_table(pa.table(columns, schema=SCHEMA), file, row_group_size=max(rows // 8, 1), compression="zstd")


def measured(root: Path, rows: int, reps: int) -> dict[str, dict[str, float]]:
    """Medians of seconds and CPU seconds, by way."""
    file = root / "rows.parquet"
    write(file, rows)
    spark = harness.spark("delta", "spark-kafka")
    figures: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        broker = stack.enter_context(KafkaBroker(root / "broker", load({}).cache_dir))
        ways = Ways(root, file, spark, broker, stack.enter_context(serving()))
        for sink, others in WAYS.items():
            for repetition in range(reps + 1):
                for way in (sink, *others):
                    act, cpu = getattr(ways, way)(), cpu_seconds()
                    took = seconds(act)
                    if repetition:
                        figures[way].append(took)
                        figures[f"{way} cpu"].append(cpu_seconds() - cpu)
            print(sink, {way: round(figures[way][-1], 2) for way in (sink, *others)}, flush=True)
    spark.stop()
    return harness.medians_of(figures)  # type: ignore[return-value]


def main(rows: int = 500_000, reps: int = 3, results: Path = harness.RESULTS / "sinks") -> None:
    """Rows to each kind of sink, by Weir and by others."""
    load_before = os.getloadavg()[0]
    figures = harness.in_scratch(measured, rows, reps)
    mb = rows * (8 + 64 + 8 + 4) / 1e6
    values = {"machine": harness.machine(), "rows": rows, "mb": mb, "reps": reps}
    values |= {"load": [load_before, os.getloadavg()[0]], "figures": figures, "ways": WAYS}
    harness.publish(results, values, harness.render("sinks", **values))


if __name__ == "__main__":
    typer.run(main)
