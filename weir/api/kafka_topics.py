"""Kafka topics, to read and to write: `kafka(...)` is a source, `kafka.sink(...)` a sink."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from state_ops.durations import micros
from weir.connectors.kafka.sink import KafkaSink
from weir.connectors.kafka.source import KafkaSource
from weir.definition.sink import default_sink_name
from weir.definition.source import default_name, start_of


class _Kafka:
    """Kafka topics, to read and to write."""

    def __call__(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        *,
        servers: str,
        name: str | None = None,
        values: str = "json",
        schema: pa.Schema | Mapping[str, pa.DataType] | str | None = None,
        registry: bool = False,
        written: Mapping[int, str] | None = None,
        event_time: str | None = None,
        key: str | None = None,
        headers: str | None = None,
        timestamp: str | None = None,
        partition: str | None = None,
        offset: str | None = None,
        topic: str | None = None,
        keys: str = "string",
        tombstones: str = "reject",
        start: str | datetime | Mapping[str, Any] = "earliest",
        on_bad: str = "fail",
        on_lost: str = "fail",
        idle_after: str | timedelta | None = "5m",
        max_ahead: str | timedelta | None = None,
        max_future: str | timedelta | None = None,
        archive: bool = False,
        group: str | None = None,
        connection: str | None = None,
    ) -> KafkaSource:
        """Read the committed messages of Kafka topics, each exactly once.

        See docs/how-to/source-kafka.md.

        Args:
            topics: The name of a topic, several, or a pattern for the whole names of topics.
            servers: Addresses of brokers, with commas between them.
            name: The name under which checkpoints record how far the source has been read; by default that of the
                first topic.
            values: What messages hold: "json", "avro", or "bytes", which become one column `value`.
            schema: The columns of JSON, or the Avro schema of a record as text.
            registry: Avro values begin with the number of their schema in a schema registry.
            written: The schemas with which values were written, by their number in the registry; those that are not
                `schema`.
            event_time: The timestamp column that drives the watermark.
            key: The column for a message's key.
            headers: The column for its headers, a list of names and values.
            timestamp: The column for its timestamp.
            partition: The column for its partition.
            offset: The column for its offset.
            topic: The column for its topic.
            keys: What keys hold: "string" or "bytes".
            tombstones: Messages without a value are bad rows ("reject"), are left out ("skip"), or become rows with
                null in all columns of the value ("keep").
            start: "earliest", "latest", a time, or a position as `weir checkpoints` shows it.
            on_bad: A value that cannot be decoded fails the epoch ("fail") or goes to the table <stage>_quarantine.
            on_lost: Messages that expired before they were read fail the run ("fail") or are left out ("skip").
            idle_after: The time after which a partition that is read to its end and stays quiet no longer holds event
                time back. None: it always does.
            max_ahead: How much event time a partition may be read ahead of the slowest one.
            max_future: How far an event time may lie ahead of processing time. A row with a later one is bad.
            archive: Rows that were read are kept as long as a checkpoint may need them again. Compacted topics need it.
            group: The consumer group under which offsets are committed, for tools that show them; "": none.
            connection: The name below `connections` of the configuration that has the client's options.

        Example:
            >>> import pyarrow as pa
            >>> from weir import kafka
            >>> columns = {"user": pa.string(), "at": pa.timestamp("us", "UTC")}
            >>> clicks = kafka("clicks", servers="localhost:9092", schema=columns, event_time="at", key="id")
            >>> clicks.name, clicks.kind
            ('clicks', 'kafka')
        """
        pattern = topics.pattern if isinstance(topics, re.Pattern) else None
        named = () if isinstance(topics, re.Pattern) else (topics,) if isinstance(topics, str) else tuple(topics)
        columns = pa.schema(list(schema.items())) if isinstance(schema, Mapping) else schema
        return KafkaSource(
            name=name or default_name(next(iter(named), "kafka")),
            topics=named,
            pattern=pattern,
            servers=servers,
            values=values,
            schema=columns,
            registry=registry,
            written=tuple(sorted((written or {}).items())),
            event_time=event_time,
            key=key,
            headers=headers,
            timestamp=timestamp,
            partition=partition,
            offset=offset,
            topic=topic,
            keys=keys,
            tombstones=tombstones,
            start=start_of(start),
            on_bad=on_bad,
            on_lost=on_lost,
            idle_after=idle_after,
            max_ahead=max_ahead,
            max_future=max_future,
            archive=archive,
            group=group,
            connection=connection,
        )

    @staticmethod
    def sink(
        topic: str,
        *,
        servers: str,
        key: str | Sequence[str] = (),
        name: str | None = None,
        values: str = "json",
        schema: str | None = None,
        schema_id: int | None = None,
        partitions: int = 1,
        replication: int = -1,
        topic_options: Mapping[str, str | int] | None = None,
        transaction_timeout: str | timedelta = "5m",
        connection: str | None = None,
    ) -> KafkaSink:
        """Send each row as a message to a Kafka topic, exactly once for consumers that read committed messages.

        See docs/how-to/sink-kafka.md.

        Args:
            topic: The topic's name. A topic that does not exist is created before the first commit with rows.
            servers: Addresses of brokers, with commas between them.
            key: The columns of a message's key.
            name: The sink's name; by default that of the topic, `shop_revenue` for shop.revenue.
            values: "json" or "avro".
            schema: The Avro schema of a record, as text.
            schema_id: The schema's number in a schema registry. Values then begin with it.
            partitions: The number of partitions of a topic that is created.
            replication: The number of replicas of a topic that is created; -1: as the brokers say.
            topic_options: The options of a topic that is created, e.g. {"retention.ms": "604800000"}.
            transaction_timeout: The time after which brokers abort a transaction that nobody ends.
            connection: The name below `connections` of the configuration that has the client's options.

        Example:
            >>> from weir import kafka
            >>> sink = kafka.sink("shop.revenue", servers="localhost:9092", key="day")
            >>> sink.name, sink.topic
            ('shop_revenue', 'shop.revenue')
        """
        title = name or default_sink_name(topic)
        return KafkaSink(
            name=title,
            topic=topic,
            servers=servers,
            key=(key,) if isinstance(key, str) else tuple(key),
            values=values,
            schema=schema,
            schema_id=schema_id,
            partitions=partitions,
            replication=replication,
            topic_options=tuple(sorted((option, str(value)) for option, value in (topic_options or {}).items())),
            transaction_timeout=micros(transaction_timeout, f"sink {title}", "transaction_timeout") // 1_000_000,
            connection=connection,
        )


kafka = _Kafka()
