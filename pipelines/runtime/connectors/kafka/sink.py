"""A Kafka topic as a sink: the rows of a checkpoint and the marker in one transaction.

    prove -> init_transactions -> read the marker -> send rows and marker -> commit

The marker is an offset of a consumer group that has no consumers: group = the sink's app_id, partition 0 of the topic,
offset = the checkpoint. `init_transactions` ends whatever an earlier process with the same transactional.id has left
open, and locks that process out. So what the marker says afterwards stays true until our commit, or our commit fails.

Brokers forget group offsets after a week (`offsets.retention.minutes`) in which nothing was published. So each message
has a header `weir-checkpoint` with the app_id and the checkpoint, from which the marker is made again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipelines.runtime.connectors.kafka import encoding, headers
from pipelines.runtime.connectors.kafka.client import Client
from pipelines.runtime.connectors.sink import Published, Publisher, Rows, Sink, SinkOpening
from state_ops.errors import ConfigurationError, DamageError, InputError, PipelineError, TransientError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

_ATTEMPTS = 5
_PAGE = "docs/playbooks/kafka.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSink(Sink):
    """A topic that gets each row as a message, exactly once for consumers that read committed messages.

    Attributes:
        topic: Its name. One that is not there is created before the first commit with rows.
        servers: Addresses of brokers, with commas between them.
        key: Columns that make the message's key; none: messages have no key.
        values: "json", or "avro" with a schema.
        schema: The Avro schema of a record, as text.
        schema_id: Its number in a schema registry, with which values then begin.
        partitions: Of a topic that is created.
        replication: Of a topic that is created; -1: as the brokers say.
        topic_options: Of a topic that is created, e.g. (("retention.ms", "604800000"),).
        transaction_timeout: Seconds after which brokers abort a transaction that nobody ends. Consumers wait so long
            for one that a killed process has left, unless the pipeline runs again before.
    """

    topic: str
    servers: str
    key: tuple[str, ...] = ()
    values: str = encoding.JSON
    schema: str | None = None
    schema_id: int | None = None
    partitions: int = 1
    replication: int = -1
    topic_options: tuple[tuple[str, str], ...] = ()
    transaction_timeout: int = 300

    def __post_init__(self) -> None:
        for argument, holds, range_ in (
            ("values", self.values in (encoding.JSON, encoding.AVRO), '"json" or "avro"'),
            ("schema", (self.schema is not None) == (self.values == encoding.AVRO), 'given with values="avro" alone'),
            ("schema_id", self.schema_id is None or self.values == encoding.AVRO, 'given with values="avro" alone'),
            ("partitions", self.partitions >= 1, "at least 1"),
            ("transaction_timeout", 1 <= self.transaction_timeout <= 900, "from 1 to 900 seconds"),
        ):
            if not holds:
                raise PipelineError(
                    f"{argument}={getattr(self, argument)!r} does not fit a Kafka sink.",
                    where=f"sink {self.name}",
                    next=f"It must be {range_}.",
                )

    @property
    def stays(self) -> str | None:
        return "messages that a topic has been given cannot be taken back"

    def open(self, opening: SinkOpening) -> Publisher:
        return KafkaPublisher(self, opening)


class _EndedError(Exception):
    """The producer is of no use any more: it was fenced, or nobody knows whether its transaction was committed."""


class KafkaPublisher:
    """One topic, for the pipeline that `opening` names."""

    def __init__(self, sink: KafkaSink, opening: SinkOpening) -> None:
        self._sink, self._opening = sink, opening
        self._topic = opening.resolve(sink.topic)
        servers = opening.resolve(sink.servers)
        self._client = Client(f"sink {sink.name}", servers, opening.options, opening.patience)
        self._kafka = self._client.kafka
        self._id = f"weir/{opening.app_id}"
        self._encode = encoding.encoder(sink.values, sink.schema, sink.schema_id, sink.key)
        self._producer: Producer | None = None
        self._newest: int | None = None  # what the marker says, as long as the producer lives
        self._is_written = False

    def check(self, schema: pa.Schema) -> None:
        encoding.check(schema, self._sink.values, self._sink.schema, self._sink.key, self._where)

    def prepare(self, schema: pa.Schema | None = None) -> None:  # noqa: ARG002
        if self._exists():
            return
        from confluent_kafka.admin import NewTopic

        sink = self._sink
        topic = NewTopic(self._topic, sink.partitions, sink.replication, config=dict(sink.topic_options))
        doing = f"the topic {self._topic} cannot be created"
        future = self._client.admin.create_topics([topic], request_timeout=self._client.timeout_s)[self._topic]
        try:
            self._client.result(future, doing)
        except TransientError as error:
            cause = error.__cause__
            if not (
                isinstance(cause, self._kafka.KafkaException)
                and cause.args[0].code() == self._kafka.KafkaError.TOPIC_ALREADY_EXISTS
            ):
                raise
        deadline = time.monotonic() + self._client.timeout_s
        while not self._exists():  # a broker hears of it a little later
            if time.monotonic() > deadline:
                raise TransientError(
                    f"The topic {self._topic} was created and does not appear.", where=self._where, next="Run again."
                )
            time.sleep(0.05)

    def marker(self) -> int | None:
        codes = self._kafka.KafkaError
        # A transaction that has been committed may not be written everywhere yet; a broker may just have started.
        passing = (codes.UNSTABLE_OFFSET_COMMIT, codes.COORDINATOR_LOAD_IN_PROGRESS, codes.NOT_COORDINATOR)
        deadline = time.monotonic() + self._client.timeout_s
        while True:
            offset, error = self._stored_marker()
            if error is None:
                return offset if offset >= 0 else None
            if error.code() == codes.UNKNOWN_TOPIC_OR_PART:
                return None
            if error.code() not in passing or time.monotonic() > deadline:
                raise self._client.failure(error, f"the marker of the topic {self._topic} cannot be read")
            time.sleep(0.02)

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        ended: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._publish(previous, checkpoint, rows)
            except _EndedError as error:
                ended = error.__cause__
                self._discard()
            except TransientError:
                self._discard()
                raise
        raise TransientError(
            f"Checkpoint {checkpoint} could not be published to the topic {self._topic}: "
            f"{self._client.hidden(str(ended))}",
            where=self._where,
            next=f"It is tried again, with nothing twice: {_PAGE}.",
        )

    def close(self) -> None:
        self._discard()

    @property
    def _where(self) -> str:
        return f"{self._client.where}, topic {self._topic}"

    def _stored_marker(self) -> tuple[int, KafkaError | None]:
        """The offset of the group, below 0 if it has none; or why it cannot be told."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        asked = ConsumerGroupTopicPartitions(self._id, [TopicPartition(self._topic, 0)])
        futures = self._client.admin.list_consumer_group_offsets(
            [asked], require_stable=True, request_timeout=self._client.timeout_s
        )
        doing = f"the marker of the topic {self._topic} cannot be read"
        try:
            (partition,) = self._client.result(futures[self._id], doing).topic_partitions
        except TransientError as error:
            if isinstance(error.__cause__, self._kafka.KafkaException):
                return -1, error.__cause__.args[0]
            raise
        return partition.offset, partition.error

    def _publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        producer = self._begun(previous)
        if self._newest is not None and self._newest >= checkpoint:
            if not self._is_written:  # so that brokers remember it for another week
                self._commit(producer, self._newest, None)
            return Published(0)
        if self._newest is None and previous is not None:
            self._newest = self._from_headers(previous, checkpoint)
            if self._newest >= checkpoint:
                self._commit(producer, self._newest, None)
                return Published(0)
        if self._newest != previous:
            raise DamageError(
                f"The topic {self._topic} has checkpoint {self._newest} of this pipeline, and the registry says that "
                f"{'none' if previous is None else previous} was published last.",
                where=f"{self._where}, consumer group {self._id}",
                next=f"Find out who has written there, and follow {_PAGE}.",
            )
        self._commit(producer, checkpoint, rows)
        return Published(rows.count)

    def _begun(self, previous: int | None) -> Producer:
        """The producer of this process, which no other one has fenced so far as it knows."""
        if self._producer is None:
            self._opening.prove()
            if not self._exists():
                if previous is not None:
                    raise DamageError(
                        f"The topic {self._topic} is gone, to which checkpoint {previous} was published.",
                        where=self._where,
                        next=f"Bring it back; or accept that its messages are lost: {_PAGE}.",
                    )
                self.prepare()
            from confluent_kafka import Producer

            producer = self._client.opened(
                Producer,
                transactional_id=self._id,
                enable_idempotence=True,
                transaction_timeout_ms=self._sink.transaction_timeout * 1000,
                partitioner="murmur2_random",  # as clients in Java place a key
                linger_ms=20,
                queue_buffering_max_messages=200_000,
            )
            self._call(producer, lambda: producer.init_transactions(1))
            self._producer, self._newest, self._is_written = producer, self.marker(), False
        return self._producer

    def _commit(self, producer: Producer, checkpoint: int, rows: Rows | None) -> None:
        """One transaction: the rows, and the marker at `checkpoint`."""
        started = time.monotonic()
        try:
            self._call(producer, producer.begin_transaction)
            if rows is not None:
                self._send(producer, checkpoint, rows)
            self._call(producer, lambda: self._send_marker(producer, checkpoint))
            self._call(producer, lambda: producer.commit_transaction(1))
        except BaseException as error:
            if isinstance(error, _EndedError):
                if time.monotonic() - started > self._sink.transaction_timeout:
                    raise ConfigurationError(
                        f"Publishing checkpoint {checkpoint} took longer than the {self._sink.transaction_timeout} s "
                        "after which brokers abort a transaction.",
                        where=self._where,
                        next="Raise transaction_timeout (the brokers' transaction.max.timeout.ms bounds it), or make "
                        "epochs smaller.",
                    ) from error
            else:
                with suppress(self._kafka.KafkaException):
                    producer.purge()
                    producer.abort_transaction(self._client.timeout_s)
                self._discard()
            raise
        self._newest, self._is_written = checkpoint, True

    def _send(self, producer: Producer, checkpoint: int, rows: Rows) -> None:
        failed: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        header = dict(headers.of(checkpoint, self._opening.app_id))
        doing = f"a message cannot be written to the topic {self._topic}"
        for batch in rows.batches():
            for key, value in self._encode(batch):
                while True:
                    try:
                        producer.produce(self._topic, value, key, headers=header, on_delivery=delivered)
                        break
                    except BufferError:
                        self._poll(producer, 0.1, doing)
                    except self._kafka.KafkaException as error:
                        self._raise(error, doing)
            self._poll(producer, 0, doing)
            if failed:
                break
        deadline = time.monotonic() + self._sink.transaction_timeout
        while len(producer) and not failed and time.monotonic() < deadline:
            self._poll(producer, 0.05, doing)
        if failed:
            self._raise(self._kafka.KafkaException(failed[0]), doing)

    def _send_marker(self, producer: Producer, checkpoint: int) -> None:
        from confluent_kafka import Consumer, TopicPartition

        consumer = self._client.opened(Consumer, group_id=self._id, enable_auto_commit=False)
        try:
            group = consumer.consumer_group_metadata()
        finally:
            consumer.close()
        marker = TopicPartition(self._topic, 0, checkpoint, metadata=f"weir checkpoint {checkpoint}")
        # The client may never return from this call where a broker was restarted (librdkafka issue 5456).
        outcome: Future[None] = Future()

        def send() -> None:
            try:
                producer.send_offsets_to_transaction([marker], group, self._client.timeout_s)
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=send, daemon=True, name="weir-kafka-marker").start()
        try:
            outcome.result(self._client.timeout_s + 1)
        except FutureTimeoutError as error:
            raise _EndedError from error

    def _call(self, producer: Producer, step: Any) -> None:
        """One step of a transaction, repeated for as long as the client says that it may be.

        Raises:
            _EndedError: A new producer has to begin anew.
            WeirError: Trying again is of no use.
        """
        deadline = time.monotonic() + self._client.timeout_s
        doing = f"a transaction with the topic {self._topic} fails"
        while True:
            try:
                step()
                return
            except self._kafka.KafkaException as error:
                self._poll(producer, 0, doing)
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    self._raise(error, doing)

    def _poll(self, producer: Producer, seconds: float, doing: str) -> None:
        try:
            producer.poll(seconds)
        except self._kafka.KafkaException as error:
            self._raise(error, doing)
        self._client.check(doing)

    def _raise(self, error: Any, doing: str) -> None:
        """Raise what a failed step means."""
        failure = self._client.failure(error.args[0], doing)
        if isinstance(failure, TransientError | InputError):
            raise _EndedError from error
        raise failure from error

    def _discard(self) -> None:
        producer, self._producer, self._newest = self._producer, None, None
        if producer is not None:
            producer.purge()
        self._client.close()  # it may wait for ever for a coordinator that it remembers

    def _exists(self) -> bool:
        from confluent_kafka import TopicCollection

        future = self._client.admin.describe_topics(
            TopicCollection([self._topic]), request_timeout=self._client.timeout_s
        )[self._topic]
        try:
            self._client.result(future, f"the topic {self._topic} cannot be looked at")
        except InputError:
            return False
        return True

    def _from_headers(self, previous: int, checkpoint: int) -> int:
        """The marker, which brokers have forgotten, as the headers of messages say it.

        The newest header may be older than the marker was, if checkpoints without rows came after it. One that is not
        above `previous` therefore proves that `checkpoint` has no rows there, and that is all that counts.

        Raises:
            DamageError: No message of this pipeline is there, so nobody knows.
        """
        newest = headers.last(self._client, self._topic, self._id, self._opening.app_id, checkpoint)
        if newest is None:
            raise DamageError(
                f"The topic {self._topic} has neither the marker nor any message of this pipeline, which has published "
                f"checkpoint {previous} there.",
                where=f"{self._where}, consumer group {self._id}",
                next=f"If the topic was made anew or emptied, set the marker by hand: {_PAGE}.",
            )
        return previous if newest <= previous else newest
