"""A Kafka broker for tests: one for each process, a topic of its own for each test."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stamina
from confluent_kafka import Consumer, IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from state_ops.errors import TransientError
from tests.tools.servers import missing
from weir.execution.spark.spark_jars import fetch, locked_jars
from weir.local.kafka_broker import KafkaBroker
from weir.settings.configuration import PROJECT

CACHE = PROJECT / ".weir" / "cache"
_numbers = itertools.count(1)


@contextmanager
def broker_of_tests() -> Iterator[KafkaBroker]:
    """A broker in a temporary directory. Where its jars cannot be had, tests are skipped with the reason; a broker that
    has its jars and does not come up is a failure."""
    try:
        fetch(locked_jars("kafka"), CACHE)
    except TransientError as error:
        missing(str(error))
    with tempfile.TemporaryDirectory(prefix="weir-kafka-", ignore_cleanup_errors=True) as directory:
        soon = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}  # and not ten seconds late
        broker = KafkaBroker(Path(directory) / "broker", CACHE, properties=soon)
        broker.start()
        try:
            yield broker
        finally:
            broker.remove()


class KafkaTopics:
    """What tests do to a broker, past Weir."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker = broker
        self._options = {"bootstrap.servers": broker.servers, "log_level": 0}
        self.admin = AdminClient(dict(self._options))

    @property
    def servers(self) -> str:
        return self.broker.servers

    def create(self, partitions: int = 1, name: str | None = None, **options: str) -> str:
        """A new topic; its name."""
        name = name or f"topic-{os.getpid()}-{next(_numbers)}"
        config = {option.replace("_", "."): value for option, value in options.items()}
        self.admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(30)
        self.until(lambda: len(self._partitions(name)) == partitions)
        return name

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(30)
        self.until(lambda: not self._partitions(topic))

    def make_anew(self, topic: str, partitions: int = 1) -> None:
        self.delete(topic)
        self.create(partitions, topic)

    def producer(self, **options: Any) -> Producer:
        return Producer({**self._options, "linger.ms": 1} | {k.replace("_", "."): v for k, v in options.items()})

    def transactional(self, id: str) -> Producer:
        producer = self.producer(transactional_id=id)
        producer.init_transactions(30)
        return producer

    def send(
        self, topic: str, values: Sequence[bytes | None], partition: int = 0, producer: Any = None, **more: Any
    ) -> None:
        """Messages, in this order. producer: one with a transaction; None: one without."""
        sender = producer or self.producer()
        for value in values:
            sender.produce(topic, value, partition=partition, **more)
        assert sender.flush(30) == 0

    def expire(self, topic: str, below: int, partition: int = 0) -> None:
        """Delete messages, as time does."""
        place = TopicPartition(topic, partition, below)
        self.admin.delete_records([place])[place].result(30)

    def end(self, topic: str, partition: int = 0) -> int:
        """The offset behind the last message of a partition."""
        consumer = Consumer(self._options | {"group.id": "tests"})
        try:
            return consumer.get_watermark_offsets(TopicPartition(topic, partition), 30)[1]
        finally:
            consumer.close()

    def is_open(self, topic: str, partition: int = 0) -> bool:
        """Whether somebody's transaction is open in a partition."""
        place = TopicPartition(topic, partition)
        levels = (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        stable, end = (
            self.admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=level)[place].result(30).offset
            for level in levels
        )
        return stable < end

    def forget_group(self, group: str) -> None:
        """Delete a group's offsets. Each try has a client of its own: one may wait for ever for a coordinator that a
        restart has ended."""
        for attempt in stamina.retry_context((KafkaException, TimeoutError), attempts=10, wait_initial=0.05):
            with attempt:
                admin = AdminClient(dict(self._options))
                admin.delete_consumer_groups([group], request_timeout=2)[group].result(3)

    def committed(self, topic: str) -> list[Any]:
        """All messages of a topic that a consumer of committed messages sees."""
        consumer = Consumer(
            self._options
            | {
                "group.id": "tests",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        messages, waiting = [], self._partitions(topic)
        try:
            consumer.assign([TopicPartition(topic, number, 0) for number in waiting])
            deadline = time.monotonic() + 60
            while waiting:
                assert time.monotonic() < deadline, "the topic does not end"
                message = consumer.poll(1)
                if message is None:
                    continue
                if message.error() is None:
                    messages.append(message)
                else:
                    assert message.error().name() == "_PARTITION_EOF", message.error()
                    waiting.discard(message.partition())
        finally:
            consumer.close()
        return messages

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.02)

    def _partitions(self, topic: str) -> set[int]:
        listed = self.admin.list_topics(timeout=30).topics.get(topic)
        return set(listed.partitions) if listed is not None else set()
