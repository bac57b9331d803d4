"""A Kafka topic as a sink: the rows of a checkpoint and the marker in one transaction, or in several if they take long.

    prove -> init_transactions -> read the marker -> send rows and marker -> commit

Where a checkpoint takes more than a quarter of a transaction's time to send, what was sent is committed with a marker
that says how many rows it has, and the next transaction goes on. Whoever comes after a crash goes on behind that.

Brokers forget group offsets after a week (`offsets.retention.minutes`) in which nothing was published. So each message
has a header that says which row of which checkpoint it is, from which the marker is made again, and each run writes it
again (docs/adr/0061-a-marker-in-every-sink.md).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from state_ops.errors import ConfigurationError, DamageError, PipelineError, TransientError
from weir.connectors.kafka import encoding, headers, topics, values
from weir.connectors.kafka.client import Client
from weir.connectors.kafka.headers import Sent
from weir.connectors.kafka.marker import Marker, stored
from weir.connectors.kafka.transactions import EndedError, Message, Transactions
from weir.definition.sink import Published, Publisher, Rows, Sink, SinkOpening

_ATTEMPTS = 5
_SENDS = 0.25  # of a transaction's time; what is queued then, and the commit, have the rest
_PAGE = "docs/playbooks/kafka.md"
_NOTHING = Marker(None)


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

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:
        return {
            "topic": resolve(self.topic),
            "key": self.key,
            "values": self.values,
            "schema": self.schema,
            "schema_id": self.schema_id,
        }

    def open(self, opening: SinkOpening) -> Publisher:
        return KafkaPublisher(self, opening)


class KafkaPublisher:
    """One topic, for the pipeline that `opening` names."""

    def __init__(self, sink: KafkaSink, opening: SinkOpening) -> None:
        self._sink, self._opening = sink, opening
        self._topic = opening.resolve(sink.topic)
        servers = opening.resolve(sink.servers)
        self._client = Client(f"sink {sink.name}", servers, opening.options, opening.patience)
        self._kafka, self._id = self._client.kafka, opening.app_id
        self._encode = encoding.encoder(sink.values, sink.schema, sink.schema_id, sink.key)
        self._transactions: Transactions | None = None
        self._marker: Marker | None = None  # as long as the producer lives
        self._is_written = False
        self._topic_id: str | None = None  # of the topic that the producer has begun with

    def check(self, schema: pa.Schema) -> None:
        encoding.check(schema, self._sink.values, self._sink.schema, self._sink.key, self._where)
        topics.check_right(topics.described(self._client, self._topic, rights=True), self._topic, self._where)
        if not self._sink.key and self._settings().is_compacted:
            raise PipelineError(
                f"The topic {self._topic} is compacted (cleanup.policy), and takes no message without a key.",
                where=self._where,
                next="Say key=... for this sink, or write to another topic.",
            )

    def rules(self, schema: pa.Schema) -> values.MessageRules:  # noqa: ARG002
        sink, headers_like = self._sink, headers.of(sys.maxsize, self._id, sys.maxsize)(sys.maxsize)
        longest = sum(len(name) + len(value or b"") for name, value in headers_like)
        options = self._client.configuration()
        return values.rules(sink.key, sink.values, sink.schema, sink.schema_id, self._settings(), options, longest)

    def _settings(self) -> values.TopicSettings:
        return values.settings_of(self._client, self._topic, dict(self._sink.topic_options))

    def prepare(self, schema: pa.Schema | None = None) -> None:  # noqa: ARG002
        there = topics.described(self._client, self._topic, rights=True)
        if there is not None:
            topics.check_right(there, self._topic, self._where)
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
        newest = stored(self._client, self._topic, self._id)
        return newest.checkpoint if newest is not None else None

    def begun(self) -> int | None:
        newest = stored(self._client, self._topic, self._id)
        return newest.next if newest is not None else None

    def recalled(self, published: int) -> int | None:
        newest = stored(self._client, self._topic, self._id)
        return (newest if newest is not None else self._recalled(published)).checkpoint

    def renew(self, published: int) -> None:
        def write() -> Published:
            transactions = self._begun(published)
            if self._marker is None:
                self._marker = self._recalled(published)
            self._write_again(transactions)
            return Published(0)

        self._tried(write, f"The marker at checkpoint {published} could not be written to")

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        return self._tried(
            lambda: self._publish(previous, checkpoint, rows), f"Checkpoint {checkpoint} could not be published to"
        )

    def close(self) -> None:
        self._discard()

    @property
    def _where(self) -> str:
        return f"{self._client.where}, topic {self._topic}"

    def _tried(self, action: Callable[[], Published], failing: str) -> Published:
        """Do something that begins anew where the producer has ended."""
        ended: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                return action()
            except EndedError as error:
                before, ended = ended, error.__cause__
                self._discard()
                # A process that was suspended was late once. One that is late again needs more time.
                if isinstance(before, ConfigurationError) and isinstance(ended, ConfigurationError):
                    raise ended from error
            except BaseException:
                self._discard()
                raise
        raise TransientError(
            f"{failing} the topic {self._topic}: {self._client.hidden(str(ended))}",
            where=self._where,
            next=f"It is tried again, with nothing twice: {_PAGE}.",
        )

    def _publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        transactions = self._begun(previous)
        if self._marker is None:
            self._marker = self._from_messages(previous, checkpoint, rows)
            if self._marker is None:
                return Published(0)
        marker = self._marker
        if (marker.checkpoint or 0) >= checkpoint:
            self._write_again(transactions)
            return Published(0)
        is_begun = marker.next == checkpoint
        if marker.checkpoint != previous or (is_begun and marker.count != rows.count):
            part = f" and {marker.rows} of {marker.count} rows of {marker.next}" if is_begun else ""
            raise DamageError(
                f"The topic {self._topic} has checkpoint {marker.checkpoint}{part} of this pipeline, and the registry "
                f"says that {'none' if previous is None else previous} was published last"
                + (f" and that {checkpoint} has {rows.count} rows." if part else "."),
                where=f"{self._where}, consumer group {self._id}",
                next=f"Find out who has written there, and follow {_PAGE}.",
            )
        first = marker.rows if is_begun else 0
        self._send(transactions, replace(marker, next=checkpoint, rows=first, count=rows.count), rows)
        return Published(rows.count - first)

    def _begun(self, previous: int | None) -> Transactions:
        """Return the producer of this process, which no other one has fenced so far as it knows."""
        if self._transactions is None:
            self._opening.prove()
            self._topic_id = self._found()
            if self._topic_id is None:
                if previous is not None:
                    raise DamageError(
                        f"The topic {self._topic} is gone, to which checkpoint {previous} was published.",
                        where=self._where,
                        next=f"Bring it back; or accept that its messages are lost: {_PAGE}.",
                    )
                self.prepare()
                self._topic_id = self._found()
            timeout_s, largest = self._sink.transaction_timeout, self._settings().largest
            self._transactions = Transactions(self._client, self._topic, self._id, timeout_s, largest)
            self._marker, self._is_written = stored(self._client, self._topic, self._id), False
        else:
            self._check_topic()  # the library waits for one that was deleted for as long as a transaction may last
        return self._transactions

    def _write_again(self, transactions: Transactions) -> None:
        """Let brokers remember the marker for another week."""
        marker = self._marker
        if marker is not None and marker != _NOTHING and not self._is_written:
            transactions.run(lambda _: marker, iter(()), lambda _: [], 0)
            self._is_written = True

    def _send(self, transactions: Transactions, begun: Marker, rows: Rows) -> None:
        """Send what is missing of a checkpoint's rows, in as many transactions as it takes."""
        checkpoint, count = begun.next or 0, begun.count
        messages = self._messages(rows, begun.rows)
        header = headers.of(checkpoint, self._id, count)
        marker = begun
        while marker.checkpoint != checkpoint:
            part = marker

            def with_part(sent: int, part: Marker = part) -> Marker:
                there = part.rows + sent
                if there > count or (there < count and not sent):
                    raise DamageError(
                        f"Checkpoint {checkpoint} has {'more' if there > count else 'fewer'} rows than the {count} "
                        "that were committed.",
                        where=self._where,
                    )
                self._check_topic()
                return Marker(checkpoint) if there == count else replace(part, rows=there)

            try:
                marker, _ = transactions.run(with_part, messages, header, self._sink.transaction_timeout * _SENDS)
            except EndedError as error:
                if transactions.is_out_of_time:
                    error.__cause__ = ConfigurationError(
                        f"Publishing a part of checkpoint {checkpoint} took longer than the "
                        f"{self._sink.transaction_timeout} s after which brokers abort a transaction.",
                        where=self._where,
                        next="Raise transaction_timeout; the brokers' transaction.max.timeout.ms bounds it.",
                    )
                raise
            self._marker, self._is_written = marker, True

    def _messages(self, rows: Rows, first: int) -> Iterator[Message]:
        """Yield the rows' messages, from one of them on."""
        number = 0
        for batch in rows.batches():
            skipped = min(max(first - number, 0), batch.num_rows)
            begin, number = number + skipped, number + batch.num_rows
            for row, (key, value) in enumerate(self._encode(batch.slice(skipped)), begin):
                yield row, key, value

    def _discard(self) -> None:
        transactions, self._transactions, self._marker = self._transactions, None, None
        if transactions is not None:
            transactions.close()
        self._client.close()  # it may wait for ever for a coordinator that it remembers

    def _check_topic(self) -> None:
        """Raise EndedError if the topic is another one than the producer has begun with: what was sent before is not in
        it. Asked before each commit."""
        try:
            there = self._found()
        except TransientError as error:
            raise EndedError from error
        if there != self._topic_id:
            raise EndedError from DamageError(f"The topic {self._topic} was deleted or made anew meanwhile.")

    def _exists(self) -> bool:
        return self._found() is not None

    def _found(self) -> str | None:
        """Return the id of the topic, which is this one's alone; None if there is none."""
        there = topics.described(self._client, self._topic)
        return str(there.topic_id) if there is not None else None

    def _from_messages(self, previous: int | None, checkpoint: int, rows: Rows) -> Marker | None:
        """Return the marker, which brokers have forgotten or never had, as messages say it; None: `checkpoint` is
        there.

        The newest message may be older than the marker was, if checkpoints without rows came after it. One that is not
        above `previous` therefore proves that `checkpoint` has no rows there, and that is all that counts.
        """
        sent = headers.newest(self._client, self._topic, self._id, rows.since if previous is None else None)
        if sent is None:
            return self._lost(previous) if previous is not None else _NOTHING
        if sent.checkpoint == checkpoint and not sent.is_last:
            return Marker(previous, checkpoint, sent.row + 1, sent.count)
        if sent.checkpoint >= checkpoint:
            return Marker(sent.checkpoint) if sent.is_last else None
        return self._behind(sent, previous or 0)

    def _recalled(self, published: int) -> Marker:
        """Return the marker, which brokers have forgotten, as messages say it beside the registry."""
        if not self._exists():
            return _NOTHING
        sent = headers.newest(self._client, self._topic, self._id)
        return self._behind(sent, published) if sent is not None else self._lost(published)

    def _behind(self, sent: Sent, published: int) -> Marker:
        if sent.is_last:
            return Marker(max(sent.checkpoint, published))
        if sent.checkpoint < published or not self._opening.exact:  # a part of an epoch that failed, or was lost
            return Marker(published or None)
        raise DamageError(
            f"The topic {self._topic} has {sent.row + 1} of {sent.count} rows of checkpoint {sent.checkpoint}, and the "
            f"registry says that {published or 'none'} was published last.",
            where=f"{self._where}, consumer group {self._id}",
            next=f"Find out who has written there, and follow {_PAGE}.",
        )

    def _lost(self, published: int) -> Marker:
        if self._opening.lossy:
            return _NOTHING
        raise DamageError(
            f"The topic {self._topic} has neither the marker nor any message of this pipeline, which has published "
            f"checkpoint {published} there.",
            where=f"{self._where}, consumer group {self._id}",
            next=f"If the topic was made anew or emptied, set the marker by hand: {_PAGE}.",
        )
