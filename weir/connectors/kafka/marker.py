"""The marker of a Kafka sink: an offset of a consumer group without consumers says how far the sink has got.

The offset is the newest checkpoint that the topic has whole. If a part of the next one is there as well, the offset's
metadata say how many of its rows; 0 is the offset then if there is no whole one.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weir.connectors.kafka import reading
from weir.connectors.kafka.client import Client

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition

_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Marker:
    """The rows of a sink that a topic has.

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
        """Return the place as an offset of a group."""
        from confluent_kafka import TopicPartition

        part = {"checkpoint": self.next, "rows": self.rows, "of": self.count}
        metadata = f"weir checkpoint {self.checkpoint}" if self.next is None else json.dumps(part)
        return TopicPartition(topic, 0, self.checkpoint or 0, metadata=metadata)

    @staticmethod
    def at(place: TopicPartition) -> Marker | None:
        """Return the marker that a group's offset says, or None if it has none."""
        if place.offset < 0:
            return None
        metadata = place.metadata or ""
        if not metadata.startswith("{"):
            return Marker(place.offset or None)
        part = json.loads(metadata)
        return Marker(place.offset or None, part["checkpoint"], part["rows"], part["of"])


def stored(client: Client, topic: str, group: str) -> Marker | None:
    """Return the marker of a group; None if brokers have none, or have forgotten it.

    A consumer asks, since the client for administrative calls ends the whole process where another broker answers for
    the group than before (librdkafka 2.16: its handler of OffsetFetch expects a consumer).
    """
    from confluent_kafka import TopicPartition

    codes, doing = client.kafka.KafkaError, f"the marker of the topic {topic} cannot be read"
    # A transaction that has been committed may not be written everywhere yet; a broker may just have started.
    passing = {codes.UNSTABLE_OFFSET_COMMIT, codes.COORDINATOR_LOAD_IN_PROGRESS, codes.NOT_COORDINATOR}
    passing |= {codes.COORDINATOR_NOT_AVAILABLE, codes._TIMED_OUT, codes._WAIT_COORD, codes._TRANSPORT}
    consumer = reading.consumer(client, group)
    deadline = time.monotonic() + client.timeout_s
    try:
        while True:
            try:
                (place,) = consumer.committed([TopicPartition(topic, 0)], min(_STEP_S, client.timeout_s))
                error = place.error
            except client.kafka.KafkaException as failed:
                error = failed.args[0]
            if error is None:
                return Marker.at(place)
            if error.code() == codes.UNKNOWN_TOPIC_OR_PART:
                return None
            consumer.poll(0)  # a refused password comes by a callback
            client.check(doing)
            if error.code() not in passing or time.monotonic() > deadline:
                raise client.failure(error, doing)
            time.sleep(0.02)
    finally:
        consumer.close()
