"""How far a sink has got, as an offset of a consumer group says it that has no consumers.

The offset is the newest checkpoint that the topic has whole. If a part of the next one is there as well, the offset's
metadata say how many of its rows; 0 is the offset then if there is no whole one.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.runtime.connectors.kafka.client import Client
from state_ops.errors import TransientError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition


@dataclass(frozen=True, slots=True)
class Marker:
    """What a topic has of a sink.

    Attributes:
        checkpoint: The newest one that is there whole; None: none is.
        next: The one of which a part is there; None: there is no such one.
        rows: How many of its rows, the first ones, are there.
        count: How many it has.
    """

    checkpoint: int | None
    next: int | None = None
    rows: int = 0
    count: int = 0

    def place(self, topic: str) -> TopicPartition:
        """As an offset of a group."""
        from confluent_kafka import TopicPartition

        part = {"checkpoint": self.next, "rows": self.rows, "of": self.count}
        metadata = f"weir checkpoint {self.checkpoint}" if self.next is None else json.dumps(part)
        return TopicPartition(topic, 0, self.checkpoint or 0, metadata=metadata)

    @staticmethod
    def at(place: TopicPartition) -> Marker | None:
        """What a group's offset says; None if it has none."""
        if place.offset < 0:
            return None
        metadata = place.metadata or ""
        if not metadata.startswith("{"):
            return Marker(place.offset or None)
        part = json.loads(metadata)
        return Marker(place.offset or None, part["checkpoint"], part["rows"], part["of"])


def stored(client: Client, topic: str, group: str) -> Marker | None:
    """The marker of a group; None if brokers have none, or have forgotten it."""
    codes = client.kafka.KafkaError
    # A transaction that has been committed may not be written everywhere yet; a broker may just have started.
    passing = (codes.UNSTABLE_OFFSET_COMMIT, codes.COORDINATOR_LOAD_IN_PROGRESS, codes.NOT_COORDINATOR)
    deadline = time.monotonic() + client.timeout_s
    while True:
        place, error = _place(client, topic, group)
        if error is None:
            return Marker.at(place) if place is not None else None
        if error.code() == codes.UNKNOWN_TOPIC_OR_PART:
            return None
        if error.code() not in passing or time.monotonic() > deadline:
            raise client.failure(error, f"the marker of the topic {topic} cannot be read")
        time.sleep(0.02)


def _place(client: Client, topic: str, group: str) -> tuple[TopicPartition | None, KafkaError | None]:
    """The group's offset; or why it cannot be told."""
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    futures = client.admin.list_consumer_group_offsets([asked], require_stable=True, request_timeout=client.timeout_s)
    try:
        (place,) = client.result(futures[group], f"the marker of the topic {topic} cannot be read").topic_partitions
    except TransientError as error:
        if isinstance(error.__cause__, client.kafka.KafkaException):
            return None, error.__cause__.args[0]
        raise
    return place, place.error
