"""The header that each message of a sink has: which row of which checkpoint of which sink it is.

From these the marker is made again where brokers have forgotten it: a partition has the rows of a sink in their order,
so its newest message of a sink tells how far it has got there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from state_ops.errors import DamageError, TransientError
from weir.connectors.kafka import reading
from weir.connectors.kafka.client import Client
from weir.connectors.kafka.cluster import Cluster, Key, keys_of, title

HEADER = "weir-checkpoint"
_LOOK_BACK = 1000  # messages of a partition that are read first; then twice as many, and so on
_CLOCKS_DIFFER = timedelta(days=1)

Headers = list[tuple[str, str | bytes | None]]


@dataclass(frozen=True, order=True, slots=True)
class Sent:
    """A row that is in the topic.

    Attributes:
        row: From 0.
        count: How many its checkpoint has. Earlier releases, which had a checkpoint in one transaction, wrote neither:
            row 0 of 1.
    """

    checkpoint: int
    row: int
    count: int

    @property
    def is_last(self) -> bool:
        """True if the topic has the whole of its checkpoint."""
        return self.row + 1 == self.count


def of(checkpoint: int, app_id: str, count: int) -> Callable[[int], Headers]:
    """Return the headers of a row's message, by the row's number."""
    begin, end = f"{checkpoint} {app_id} ", f"/{count}"
    return lambda row: [(HEADER, f"{begin}{row}{end}".encode())]


def newest(client: Client, topic: str, app_id: str, since: datetime | None = None) -> Sent | None:
    """Return the newest row of a sink that a topic has; None if it has none. Reads each partition backwards to the
    sink's last message.

    Args:
        since: No row was sent before.

    Raises:
        DamageError: What else it had has expired, so that nobody knows.
        TransientError: What else it has is hidden by an open transaction.
    """
    from confluent_kafka.admin import OffsetSpec

    cluster = Cluster(client, (topic,), None)
    keys = keys_of(cluster.described())
    lows = cluster.listed_whole(keys, OffsetSpec.earliest())
    highs = cluster.listed(keys, OffsetSpec.latest(), is_stable=False)
    ends = cluster.listed_whole(keys, OffsetSpec.latest())
    firsts = dict(lows)
    if since is not None:
        after = cluster.listed_whole(keys, OffsetSpec.for_timestamp(int((since - _CLOCKS_DIFFER).timestamp() * 1000)))
        firsts = {key: offset if offset >= 0 else ends[key] for key, offset in after.items()}
    rows, is_unsure = [], False
    with ExitStack() as reads:
        consumer: Any = None
        for key in keys:
            row = None
            if ends[key] > firsts[key]:  # else there is nothing to read, as in a new topic
                if consumer is None:
                    consumer = reading.consumer(client, app_id)
                    reads.callback(consumer.close)
                row = _newest_of(client, consumer, key, firsts[key], ends[key], app_id)
            rows += [row] if row is not None else []
            is_unsure = is_unsure or (row is None and lows[key] > 0)
    last = max(rows, default=None)
    for key in keys:
        if highs.get(key, 0) > ends[key]:
            _check_open(client, key, ends[key], highs[key], app_id, last)
    if last is not None and not last.is_last and is_unsure:
        raise DamageError(
            f"The topic {topic} has {last.row + 1} of the {last.count} rows of checkpoint {last.checkpoint}, or "
            "had more: brokers have forgotten the marker, and messages have expired.",
            where=f"{client.where}, consumer group {app_id}",
            next="See what consumers have got, and set the marker by hand: docs/playbooks/kafka.md.",
        )
    return last


def _newest_of(client: Client, consumer: Any, key: Key, first: int, end: int, app_id: str) -> Sent | None:
    """Return the newest row among the messages of a partition from one offset to below another."""
    size = _LOOK_BACK
    while end > first:
        begin = max(first, end - size)
        rows = [
            row
            for bunch in reading.messages(client, consumer, *key, begin, end, waits=False)
            for message in bunch
            for name, value in reading.headers_of(message)
            if name == HEADER and (row := _parsed(value or b"", app_id)) is not None
        ]
        if rows:
            return max(rows)
        end, size = begin, size * 2
    return None


def _check_open(client: Client, key: Key, stable: int, high: int, app_id: str, newest: Sent | None) -> None:
    """Raise unless an open transaction of somebody else hides no newer row of the sink.

    Committed rows behind it cannot be seen.

    Raises:
        TransientError: Newer rows of the sink may be hidden there.
    """
    consumer = reading.consumer(client, app_id, "read_uncommitted")
    try:
        row = _newest_of(client, consumer, key, stable, high, app_id)
    finally:
        consumer.close()
    if row is not None and (newest is None or row > newest):
        raise TransientError(
            f"Rows of checkpoint {row.checkpoint} lie behind an open transaction in {title(key)}, so it cannot be seen "
            "whether they are committed, and brokers have forgotten the marker.",
            where=f"{client.where}, consumer group {app_id}",
            next="Run again when the transaction has ended; of one that hangs: docs/playbooks/kafka.md.",
        )


def _parsed(header: bytes, app_id: str) -> Sent | None:
    checkpoint, _, rest = header.partition(b" ")
    owner, _, place = rest.partition(b" ")
    row, _, count = (place or b"0/1").partition(b"/")
    is_own = owner == app_id.encode() and all(number.isdigit() for number in (checkpoint, row, count))
    return Sent(int(checkpoint), int(row), int(count)) if is_own else None
