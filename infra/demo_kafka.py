"""`make demo-kafka`: a Kafka broker, clicks, and the clickstream pipeline on Spark; then what its tables have.

    broker started -> clicks produced -> epochs -> broker killed and started -> more clicks -> epochs -> tables

Everything is below `.weir/demo-kafka` and made anew each time. The broker ends with the demo.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence

import polars as pl
from rich.console import Console
from rich.markup import escape

from infra.clickstream_input import Click, clicks
from pipelines.clickstream import pipeline
from weir.local.kafka_broker import KafkaBroker, create_topics
from weir.run import progress
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT, load

DEMO = PROJECT / ".weir" / "demo-kafka"
CLICKS, PARTITIONS, TOPIC = 40_000, 3, "clicks"

out = Console(highlight=False, emoji=False, soft_wrap=True)


def main() -> None:
    """Run the demo. Needs no arguments."""
    started = time.monotonic()
    shutil.rmtree(DEMO, ignore_errors=True)
    with KafkaBroker(DEMO / "broker", PROJECT / ".weir" / "cache") as broker:
        out.print(f"A broker is up at {broker.servers}.")
        create_topics(broker.servers, TOPIC, partitions=PARTITIONS)
        settings = load(
            {
                "WEIR_STORAGE__ROOT": str(DEMO / "storage"),
                "WEIR_LOCAL__WORK_DIR": str(DEMO / "work"),
                "WEIR_PIPELINES__CLICKSTREAM__OBJECT": "pipelines.clickstream:pipeline",
                "WEIR_PIPELINES__CLICKSTREAM__PARAMS": json.dumps({"topic": TOPIC, "servers": broker.servers}),
                "WEIR_EPOCH__MAX_ROWS": "10000",
            }
        )
        rows = list(clicks(CLICKS, partitions=PARTITIONS))
        for part, drain in ((rows[: len(rows) // 2], False), (rows[len(rows) // 2 :], True)):
            _produce(broker.servers, part)
            out.print(f"{len(part):,} clicks are in the topic {TOPIC}. Epochs:")
            for report in run(pipeline, settings, RunOptions(until_caught_up=True, drain=drain)):
                out.print("  " + escape(progress.line(report.checkpoint, None, 6)))
            if not drain:
                broker.kill()
                broker.start()
                out.print("The broker was killed and is up again.")
        _show(rows)
    out.print(f"The broker is stopped. {time.monotonic() - started:.0f} s, all below {DEMO.relative_to(PROJECT)}.")


def _produce(servers: str, rows: Sequence[Click]) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers})
    for click in rows:
        producer.produce(TOPIC, click.value, partition=click.partition)
        producer.poll(0)
    producer.produce(TOPIC, b"this is no click", partition=0)
    if producer.flush(30):
        raise SystemExit("Messages could not be produced within 30 s.")


def _show(rows: Sequence[Click]) -> None:
    tables = DEMO / "storage" / "clickstream" / "tables"
    sessions, visitors, bad = (
        pl.read_delta(str(tables / name)) for name in ("sessions", "visitors", "sessions_quarantine")
    )
    out.print(f"{len(sessions):,} sessions of {len(visitors):,} visitors; {len(bad)} messages set aside.")
    out.print(visitors.sort("spent", descending=True).select("visitor", "clicks", "spent", "last_seen").head(5))
    counted = sessions["clicks"].sum(), visitors["clicks"].sum(), len(rows)
    if len(set(counted)) > 1:
        raise SystemExit(f"Clicks were lost or counted twice: {counted}.")
    out.print(f"Each of {len(rows):,} clicks was counted once in both tables.")


if __name__ == "__main__":
    main()
