"""Transactions of one producer, and what their errors mean.

`init_transactions` ends whatever an earlier process with the same transactional.id has left open, and locks that
process out. So what is read afterwards stays true until our commit, or our commit fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from state_ops.errors import InputError, TransientError
from weir.connectors.kafka.client import Client
from weir.connectors.kafka.headers import Headers
from weir.connectors.kafka.marker import Marker

if TYPE_CHECKING:
    from confluent_kafka import Producer

Message = tuple[int, bytes | None, bytes]
"""A row's number, its key and its value."""

_BATCH_BYTES = 1_000_000  # of a batch, where options do not say batch.size
_BATCH_HEADER = 200
_REPORTS_S = 2.0
_QUEUE_MB = 64  # what waits to be sent when a transaction is to end has to be sent before its time is up


class EndedError(Exception):
    """The producer is of no use any more: it was fenced, or nobody knows whether its transaction was committed."""


class Transactions:
    """One producer, begun; it is used until an `EndedError`.

    Args:
        id: The transactional.id, and the group whose offset is the marker.
        timeout_s: After how long brokers abort a transaction.
        largest: Bytes of a batch of messages that the topic takes at most; None: that is not known. A single message
            may be as large as that.
    """

    def __init__(self, client: Client, topic: str, id: str, timeout_s: int, largest: int | None = None) -> None:
        from confluent_kafka import Producer

        self._client, self._topic, self._timeout_s = client, topic, timeout_s
        batches = int(client.configuration().get("batch.size", _BATCH_BYTES))
        self._producer: Producer = client.opened(
            Producer,
            transactional_id=id,
            enable_idempotence=True,
            transaction_timeout_ms=timeout_s * 1000,
            partitioner="murmur2_random",  # as clients in Java place a key
            linger_ms=20,
            queue_buffering_max_messages=200_000,
            queue_buffering_max_kbytes=_QUEUE_MB * 1024,
            batch_size=batches if largest is None else max(1, min(batches, largest - _BATCH_HEADER)),
        )
        self._group = _group(id)
        self._sent_since: float | None = None
        try:
            self._call(lambda: self._producer.init_transactions(1))
        except BaseException:
            self.close()
            raise

    @property
    def is_out_of_time(self) -> bool:
        """True if brokers may have aborted the transaction that was begun last, since it took too long."""
        return self._sent_since is not None and time.monotonic() - self._sent_since > self._timeout_s

    def run(self, marker: Callable[[int], Marker], messages: Iterator[Message], headers: Callable[[int], Headers],
            sends_s: float) -> tuple[Marker, int]:  # fmt: skip
        """Send one transaction: messages, until there are no more or they have been sent for so many seconds, and a
        marker.

        Args:
            marker: By the number of messages that went in.

        Returns:
            The marker, and how many messages went in.

        Raises:
            EndedError: Another producer has to begin anew, and to look what is there.
            WeirError: Trying again is of no use.
        """
        self._sent_since = None
        try:
            self._call(lambda: self._producer.begin_transaction())  # no frame of an error keeps the producer
            sent = self._send(messages, headers, sends_s)
            marked = marker(sent)
            self._call(lambda: self._send_marker(marked))
            self._call(lambda: self._producer.commit_transaction(1))
        except EndedError:
            raise
        except BaseException:
            with suppress(self._client.kafka.KafkaException):
                self._producer.purge()
                self._producer.abort_transaction(self._client.timeout_s)
            raise
        return marked, sent

    def close(self) -> None:
        """Give the producer's threads back. Where a call does not return (`_send_marker`), that call's thread does it.

        The library's own `close` waits for brokers that are away, to abort a transaction that the next producer aborts.
        """
        with suppress(self._client.kafka.KafkaException):
            self._producer.purge()
            self._producer.poll(0)  # reports of what was purged are kept alive until they are handed out
        del self._producer

    def _send(self, messages: Iterator[Message], headers: Callable[[int], Headers], sends_s: float) -> int:
        failed: list[Any] = []
        sent = 0

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        doing = f"a message cannot be written to the topic {self._topic}"
        for row, key, value in messages:
            self._sent_since = self._sent_since or time.monotonic()  # brokers count from the first message
            while True:
                try:
                    self._producer.produce(self._topic, value, key, headers=headers(row), on_delivery=delivered)
                    break
                except BufferError:
                    self._poll(0.1, doing)
                except self._client.kafka.KafkaException as error:
                    self._raise(self._reason(failed, error), doing)
            sent += 1
            if not sent % 1000:
                self._poll(0, doing)
            if failed or time.monotonic() - self._sent_since > sends_s:
                break
        while len(self._producer) and not failed and not self.is_out_of_time:
            self._poll(0.05, doing)
        if failed:
            self._raise(self._reason(failed, self._client.kafka.KafkaException(failed[0])), doing)
        return sent

    def _reason(self, failed: list[Any], error: Any) -> Any:
        """Return the error of the message that made a transaction fail, behind which all others are only purged.

        Args:
            failed: Gets what reports say of messages, from within `poll`.
            error: What to return if no report says more.
        """
        codes = self._client.kafka.KafkaError
        until = time.monotonic() + _REPORTS_S
        while True:
            with suppress(self._client.kafka.KafkaException):
                self._producer.poll(0.05)
            said = [one for one in failed if one.code() not in (codes._PURGE_QUEUE, codes._PURGE_INFLIGHT)]
            if said:
                return self._client.kafka.KafkaException(said[0])
            if not len(self._producer) or time.monotonic() > until:
                return self._state(error) if failed else error

    def _state(self, otherwise: Any) -> Any:
        """Return the error that a transaction has failed with before any of its messages was sent, as where the user
        may not write to the topic.

        Every later call says it. This one changes nothing, because a failed transaction is aborted.

        Args:
            otherwise: What to return if the transaction has not failed.
        """
        from confluent_kafka import TopicPartition

        try:
            self._producer.send_offsets_to_transaction([TopicPartition(self._topic, 0, 0)], self._group, _REPORTS_S)
        except self._client.kafka.KafkaException as error:
            return error
        return otherwise

    def _send_marker(self, marker: Marker) -> None:
        # The client may never return from this call where a broker was restarted (librdkafka issue 5456).
        outcome: Future[None] = Future()

        def send() -> None:
            try:
                places = [marker.place(self._topic)]
                self._producer.send_offsets_to_transaction(places, self._group, self._client.timeout_s)
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=send, daemon=True, name="weir-kafka-marker").start()
        try:
            outcome.result(self._client.timeout_s + 1)
        except FutureTimeoutError as error:
            raise EndedError from error

    def _call(self, step: Callable[[], object]) -> None:
        """Take one step of a transaction, again for as long as the client says that it may be repeated."""
        deadline = time.monotonic() + self._client.timeout_s
        doing = f"a transaction with the topic {self._topic} fails"
        while True:
            try:
                step()
                return
            except self._client.kafka.KafkaException as error:
                self._poll(0, doing)
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    self._raise(error, doing)

    def _poll(self, seconds: float, doing: str) -> None:
        try:
            self._producer.poll(seconds)
        except self._client.kafka.KafkaException as error:
            self._raise(error, doing)
        self._client.check(doing)

    def _raise(self, error: Any, doing: str) -> None:
        """Raise what a failed step means."""
        failure = self._client.failure(error.args[0], doing)
        if isinstance(failure, TransientError | InputError):
            raise EndedError from error
        raise failure from error


def _group(id: str) -> Any:
    """Return the group of a transaction's marker, as it names it.

    Only a consumer makes that; this one knows no brokers.
    """
    from confluent_kafka import Consumer

    consumer = Consumer({"group.id": id, "log_level": 0})
    try:
        return consumer.consumer_group_metadata()
    finally:
        consumer.close()
