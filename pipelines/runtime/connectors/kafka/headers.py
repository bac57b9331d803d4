"""The header that each message of a sink has: which checkpoint of which sink it belongs to."""

from __future__ import annotations

from typing import Any

from pipelines.runtime.connectors.kafka import reading
from pipelines.runtime.connectors.kafka.client import Client

HEADER = "weir-checkpoint"
_LOOK_BACK = 1000  # messages of a partition that are read first; then twice as many, and so on


def of(checkpoint: int, app_id: str) -> list[tuple[str, str | bytes | None]]:
    """The headers of a message."""
    return [(HEADER, f"{checkpoint} {app_id}".encode())]


def last(client: Client, topic: str, group: str, app_id: str, enough: int) -> int | None:
    """The newest checkpoint of a sink that has messages in a topic; None if it has none there. Reads each partition
    backwards to the sink's last message.

    Args:
        group: By which brokers know who reads.
        enough: A checkpoint that ends the search.
    """
    consumer = reading.consumer(client, group)
    newest: int | None = None
    try:
        for partition in consumer.list_topics(topic, client.timeout_s).topics[topic].partitions:
            checkpoint = _last_of(client, consumer, topic, partition, app_id)
            if checkpoint is not None:
                newest = max(checkpoint, newest or checkpoint)
                if newest >= enough:
                    break
    except client.kafka.KafkaException as error:
        raise client.failure(error.args[0], f"the topic {topic} cannot be read") from error
    finally:
        consumer.close()
    return newest


def _last_of(client: Client, consumer: Any, topic: str, partition: int, app_id: str) -> int | None:
    from confluent_kafka import TopicPartition

    low, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), client.timeout_s)
    size = _LOOK_BACK
    while end > low:
        begin = max(low, end - size)
        checkpoints = [
            checkpoint
            for bunch in reading.messages(client, consumer, topic, partition, begin, end, waits=False)
            for message in bunch
            for name, value in reading.headers_of(message)
            if name == HEADER and (checkpoint := _own(value or b"", app_id)) is not None
        ]
        if checkpoints:
            return max(checkpoints)
        end, size = begin, size * 2
    return None


def _own(header: bytes, app_id: str) -> int | None:
    checkpoint, _, owner = header.partition(b" ")
    return int(checkpoint) if checkpoint.isdigit() and owner == app_id.encode() else None
