"""Kafka topics as a source: bounded ranges of offsets, each partition's up to its last stable offset.

A read behind the last stable offset would wait for a transaction that nobody may ever end, so a plan never goes there.
A position has the id of each topic beside its name: a topic that is deleted and made anew begins at offset 0 again, and
its messages must not be taken for those that have been read.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.errors import ConfigurationError, LostError, PipelineError, TransientError, WeirError
from state_ops.logs import Logger
from weir.connectors.kafka import reading
from weir.connectors.kafka.client import Client
from weir.connectors.kafka.cluster import Cluster, Key, Offsets, Topic, keys_of, title
from weir.definition.source import (
    EARLIEST,
    LATEST,
    SKIP,
    Batch,
    Connector,
    Lag,
    Limits,
    Lost,
    Opening,
    Part,
    Planned,
    Position,
    Source,
    no_position,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer

log = Logger("weir.source")

_EXTRA = ("key", "headers", "timestamp", "partition", "offset", "topic")
_PLACE = "__weir_offset"
_MESSAGE_BYTES = 1000  # of a message, as long as none has been read
_LAST_COMMIT_S = 5.0  # how long the end of a run waits for the group's offsets
_LIKE = '{"topics": {"clicks": {"id": "...", "offsets": {"0": 17}}}}'
_RETENTION = "docs/playbooks/kafka.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSource(Source):
    """The committed messages of topics.

    Attributes:
        topics: Their names.
        pattern: A regular expression that the whole name of a topic matches, instead of `topics`. New topics are read
            from their beginning.
        servers: Addresses of brokers, with commas between them.
        values: What messages hold: "json", "avro" or "bytes", which become one column `value`.
        schema: The columns of JSON as an Arrow schema; or the Avro schema of a record, as text.
        registry: Avro values begin with the number of their schema in a schema registry.
        written: By that number, the schemas with which values were written; empty: all with `schema`.
        key: The column for the message's key.
        headers: The column for its headers, a list of names and values.
        timestamp: The column for its timestamp.
        partition: The column for its partition.
        offset: The column for its offset.
        topic: The column for its topic.
        keys: What keys hold: "string" or "bytes".
        tombstones: What becomes of messages without a value: bad rows ("reject"), nothing ("skip"), or rows with null
            in all columns of the value ("keep").
        group: The consumer group whose offsets are committed for people's lag tools; they are never read. None:
            "weir.<pipeline>.<source>"; "": none.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    servers: str
    values: str = reading.JSON
    schema: pa.Schema | str | None = None
    registry: bool = False
    written: tuple[tuple[int, str], ...] = ()
    key: str | None = None
    headers: str | None = None
    timestamp: str | None = None
    partition: str | None = None
    offset: str | None = None
    topic: str | None = None
    keys: str = reading.STRING
    tombstones: str = reading.REJECT
    group: str | None = None

    def __post_init__(self) -> None:
        schemas = {reading.JSON: pa.Schema, reading.AVRO: str, reading.BYTES: type(None)}
        is_known = self.values in schemas
        for argument, holds, range_ in (
            ("topics", bool(self.topics) != (self.pattern is not None), "given, or a pattern, and not both"),
            ("pattern", self.pattern is None or _compiles(self.pattern), "a regular expression"),
            ("values", is_known, f"one of {', '.join(schemas)}"),
            ("schema", not is_known or isinstance(self.schema, schemas[self.values]),
             "an Arrow schema for JSON, an Avro schema as text for Avro, and none for bytes"),
            ("registry", not self.registry or self.values == reading.AVRO, "said of Avro alone"),
            ("written", not self.written or self.registry, "given with registry=True alone"),
            ("keys", self.keys in (reading.STRING, reading.BYTES), '"string" or "bytes"'),
            ("tombstones", self.tombstones in (reading.REJECT, reading.SKIP, reading.KEEP),
             '"reject", "skip" or "keep"'),
        ):  # fmt: skip
            if not holds:
                raise PipelineError(
                    f"{argument}={getattr(self, argument)!r} does not fit a Kafka source.",
                    where=f"source {self.name}",
                    next=f"It must be {range_}.",
                )
        names = [*reading.columns_of(self.values, self.schema).names, *self.extra.values()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PipelineError(
                f"The column {twice[0]!r} is there twice.", where=f"source {self.name}", next="Name it otherwise."
            )
        if self.event_time is not None and self.event_time not in names:
            raise PipelineError(
                f"The event time {self.event_time!r} is not among the columns.",
                where=f"source {self.name}",
                next=f"Take one of: {', '.join(names)}.",
            )

    @property
    def extra(self) -> dict[str, str]:
        """The columns for the parts of a message beside its value, by part."""
        return {what: getattr(self, what) for what in _EXTRA if getattr(self, what) is not None}

    @property
    def declared_columns(self) -> pa.Schema:
        return reading.row_columns(reading.columns_of(self.values, self.schema), self.extra, self.keys)

    def open(self, opening: Opening) -> Connector:
        return KafkaConnector(self, opening)


class KafkaConnector:
    """Topics of one cluster."""

    def __init__(self, source: KafkaSource, opening: Opening) -> None:
        self._source = source
        self._client = Client(
            f"source {source.name}", opening.resolve(source.servers), opening.options, opening.patience
        )
        self._names = tuple(map(opening.resolve, source.topics))
        self._cluster = Cluster(self._client, self._names, source.pattern)
        default = f"weir.{opening.pipeline}.{source.name}"
        self._group = default if source.group is None else opening.resolve(source.group)
        self._rows = _decoder(source, source.extra)
        self._is_stale = False
        self._committing: Future[Any] | None = None
        self._idle: list[Consumer] = []
        self._lock = threading.Lock()
        self._message_bytes = float(_MESSAGE_BYTES)

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping):
            return self._checked(start)
        from confluent_kafka.admin import OffsetSpec

        topics = self._cluster.described()
        if isinstance(start, datetime):
            start = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
            spec = OffsetSpec.for_timestamp(max(0, int(start.timestamp() * 1000)))
        elif start in (EARLIEST, LATEST):
            spec = OffsetSpec.earliest() if start == EARLIEST else OffsetSpec.latest()
        else:
            raise PipelineError(
                f"start={start!r} is no place to begin.",
                where=self._client.where,
                next='Say "earliest", "latest", a time, or a position.',
            )
        offsets = self._cluster.listed_whole(keys_of(topics), spec)
        if isinstance(start, datetime):
            ends = self._cluster.listed_whole(keys_of(topics), OffsetSpec.latest())
            # Below 0: nothing is that new.
            offsets = {key: min(offset, ends[key]) if offset >= 0 else ends[key] for key, offset in offsets.items()}
        return _position({name: topic.id for name, topic in topics.items()}, offsets)

    def _checked(self, position: Position) -> Position:
        """Return a position that a person has written. Raises ConfigurationError for what is none, and for topics,
        partitions and offsets that the cluster does not have."""
        if not _is_position(position):
            raise no_position(position, _LIKE, self._client.where)
        topics = self._cluster.described()
        wrong = [name for name, of in position["topics"].items() if name not in topics or topics[name].id != of["id"]]
        begins = _begins(position, {name: topic.id for name, topic in topics.items()})
        there = self._cluster.offsets(keys_of(topics))
        partitions = set(keys_of(topics))
        wrong += [title(key) for key in begins if key not in partitions]
        wrong += [
            f"{title(key)}, which ends at {there[key].high:,}"
            for key, offset in begins.items()
            if key in there and offset > there[key].high
        ]
        if wrong:
            raise ConfigurationError(
                f"The position names what is not there: {'; '.join(wrong)}.",
                where=self._client.where,
                next="Name topics with their ids, partitions and offsets as `weir checkpoints` shows them.",
            )
        return position

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        if "topics" not in position:  # of a chain, or of another kind of source
            raise no_position(position, _LIKE, self._client.where)
        topics = self._cluster.described()
        if not self._source.archive:
            self._cluster.check_compaction(topics)
        begins, lost = self._continued(position, topics)
        there = self._cluster.offsets(keys_of(topics))
        starts: dict[Key, int] = {}
        ends: dict[Key, int] = {}
        for key in keys_of(topics):
            offsets = there.get(key)
            begin = begins.get(key)
            if offsets is None:
                if begin is not None:
                    starts[key] = ends[key] = begin
                continue
            begin = offsets.low if begin is None else self._still_there(key, begin, offsets, lost)
            bound = _bound(upto, key, topics[key[0]].id)
            end = offsets.stable if bound is None else min(offsets.stable, bound)
            if bound is not None and key not in begins and end <= begin:
                continue  # not there for the pipeline that must not be passed
            starts[key] = begin
            ends[key] = begin if title(key) in hold else max(begin, end)
        chosen, turn = self._shared_out(starts, ends, limits, position.get("turn"))
        parts = tuple(
            self._part(key, topics[key[0]].id, starts[key], end) for key, end in chosen.items() if end > starts[key]
        )
        reached = starts | chosen
        return Planned(
            parts,
            _position({name: topic.id for name, topic in topics.items()}, reached, turn),
            limited=any(reached[key] < end for key, end in ends.items()),
            ends={
                title(key): key in there and key in reached
                and reached[key] == there[key].stable == there[key].high
                for key in {*keys_of(topics), *begins}
            },
            lost=tuple(lost),
        )  # fmt: skip

    def read(self, part: Part) -> Iterator[Batch]:
        yield from self._read(part, self._rows)

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        place = part.place
        offsets: Sequence[int | None] = range(place["begin"], place["end"])
        if len(offsets) != rows:  # there are gaps: marks of transactions, bad rows, what compaction has removed
            offsets = self._offsets(part)
        return _places(place["topic"], place["partition"], offsets if len(offsets) == rows else [None] * rows)

    def _offsets(self, part: Part) -> list[int]:
        """Return the offset of each row of a part; none: its messages cannot be read any more."""
        with suppress(WeirError):
            batches = self._read(part, _decoder(self._source, {**self._source.extra, "offset": _PLACE}))
            return [offset for batch in batches for offset in batch.rows.column(_PLACE).to_pylist()]
        return []

    def _read(self, part: Part, decoder: reading.RowDecoder) -> Iterator[Batch]:
        place, topic = part.place, part.place["topic"]
        _check_id(self._client.where, topic, place["id"], self._cluster.described([topic]))
        with self._consumer() as consumer:
            messages = reading.messages(self._client, consumer, topic, place["partition"], place["begin"], place["end"])
            for bunch in reading.bunches(messages):
                self._message_bytes = sum(map(len, bunch)) / len(bunch) if bunch else self._message_bytes
                yield decoder.rows(bunch)

    def is_empty(self, part: Part) -> bool:
        with self._consumer() as consumer:
            return reading.is_empty(self._client, consumer, part.place)

    def verify(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        topics = self._cluster.described(sorted({part.place["topic"] for part in parts}))
        there = self._cluster.offsets([(part.place["topic"], part.place["partition"]) for part in parts])
        for part in parts:
            key = (part.place["topic"], part.place["partition"])
            _check_id(self._client.where, key[0], part.place["id"], topics)
            offsets = there.get(key)
            if offsets is None:
                raise TransientError(
                    f"The partition {title(key)} cannot be reached.", where=self._client.where, next="Run again."
                )
            lost: list[Lost] = []
            if not self._source.archive:
                self._still_there(key, part.place["begin"], offsets, lost)
            if lost:
                raise LostError(lost[0].what, where=self._client.where, next=_NEXT_AFTER_LOSS)

    def lag(self, position: Position) -> Lag:
        from confluent_kafka.admin import OffsetSpec

        topics = self._cluster.described()
        begins = _begins(position, {name: topic.id for name, topic in topics.items()})
        there = self._cluster.offsets(keys_of(topics))
        rows = sum(
            max(0, offsets.high - max(offsets.low, begins.get(key, offsets.low))) for key, offsets in there.items()
        )
        if not rows:
            return Lag(0, 0, None, is_estimate=True)
        newest = self._cluster.listed(list(there), OffsetSpec.max_timestamp(), is_stable=False, what="timestamp")
        moment = max(newest.values(), default=-1)
        return Lag(rows, int(rows * self._message_bytes), moment * 1000 if moment >= 0 else None, is_estimate=True)

    def where(self, part: Part) -> str:
        place = part.place
        return (
            f"source {self._source.name}, topic {place['topic']}, partition {place['partition']}, offsets "
            f"{place['begin']:,} to {place['end'] - 1:,}"
        )

    def committed(self, position: Position) -> None:
        if not self._group:
            return
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        offsets = [
            TopicPartition(name, int(number), offset)
            for name, topic in position.get("topics", {}).items()
            for number, offset in topic["offsets"].items()
        ]
        if not offsets:
            return
        if self._is_stale:
            self._client.close()  # it may wait for ever for a coordinator that it remembers
            self._is_stale = False
        try:
            futures = self._client.admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(self._group, offsets)], request_timeout=self._client.timeout_s
            )
            self._committing = futures[self._group]
            self._committing.add_done_callback(self._say)
        except (WeirError, self._client.kafka.KafkaException, ValueError) as error:
            log.debug("group offsets were not committed", error=self._client.hidden(str(error)))

    def close(self) -> None:
        with self._lock:
            consumers, self._idle = self._idle, []
        for consumer in consumers:
            consumer.close()
        if self._committing is not None:  # closing the client would give it up
            wait([self._committing], min(_LAST_COMMIT_S, self._client.timeout_s))
        self._client.close()

    def _say(self, future: Any) -> None:
        if (error := future.exception()) is not None:
            self._is_stale = True
            log.debug("group offsets were not committed", error=self._client.hidden(str(error)))

    @contextmanager
    def _consumer(self) -> Iterator[Consumer]:
        with self._lock:
            consumer = self._idle.pop() if self._idle else reading.consumer(self._client, self._group or "weir")
        try:
            yield consumer
        finally:
            with self._lock:
                self._idle.append(consumer)

    def _continued(self, position: Position, topics: Mapping[str, Topic]) -> tuple[dict[Key, int], list[Lost]]:
        """Return where each partition is read on, and the losses of whole topics."""
        lost: list[Lost] = []
        for name, recorded in position.get("topics", {}).items():
            if name in topics and topics[name].id == recorded["id"]:
                continue
            if name not in topics and self._source.pattern is None and name not in self._names:
                continue  # the source has been told to read other topics
            what = "was made anew" if name in topics else "is gone"
            message = f"The topic {name} {what} since it was read; messages of the old one may have been lost."
            if self._source.on_lost != SKIP:
                raise LostError(message, where=self._client.where, next=_NEXT_AFTER_LOSS)
            lost.append(Lost(name, message))
        return _begins(position, {name: topic.id for name, topic in topics.items()}), lost

    def _still_there(self, key: Key, begin: int, offsets: Offsets, lost: list[Lost]) -> int:
        """Return the first offset from `begin` on that can be read. Raises LostError, or adds to `lost`, if that is
        another."""
        if offsets.low <= begin <= offsets.high:
            return begin
        if begin < offsets.low:
            reached = offsets.low
            what = f"The messages with offsets {begin:,} to {offsets.low - 1:,} of {title(key)} are gone"
            why = f"{what}: they expired or were deleted."
        else:
            reached = offsets.stable
            why = f"The partition {title(key)} ends at offset {offsets.high:,}, and was read up to {begin:,}: its "
            why += "brokers have lost messages."
        if self._source.on_lost != SKIP:
            raise LostError(why, where=self._client.where, next=_NEXT_AFTER_LOSS)
        lost.append(Lost(title(key), why))
        return reached

    def _shared_out(
        self, starts: Mapping[Key, int], ends: Mapping[Key, int], limits: Limits, turn: str | None
    ) -> tuple[dict[Key, int], str | None]:
        """Return how far each partition is read: as much of each as of the others, as far as they have it. If there
        may not be as many parts as partitions, the next ones are read in turn.

        Returns:
            The new offsets by partition, in the order of their parts, and the last partition that got its turn.
        """
        waiting = sorted(key for key, end in ends.items() if end > starts[key])
        if len(waiting) > max(1, limits.parts):
            behind = [key for key in waiting if turn is not None and title(key) > turn]
            in_turn = [*behind, *(key for key in waiting if key not in behind)][: max(1, limits.parts)]
        else:
            in_turn = waiting
        left = max(1, min(limits.rows, int(limits.bytes / self._message_bytes)))
        if len(in_turn) > left:
            behind = [key for key in in_turn if turn is not None and title(key) > turn]
            in_turn = [*behind, *(key for key in in_turn if key not in behind)][:left]
        reached: dict[Key, int] = {}
        for number, key in enumerate(sorted(in_turn, key=lambda key: ends[key] - starts[key])):
            share = min(ends[key] - starts[key], left // (len(in_turn) - number))
            reached[key] = starts[key] + share
            left -= share
        last = title(in_turn[-1]) if len(in_turn) < len(waiting) else None
        return {key: reached[key] for key in sorted(reached)}, last

    def _part(self, key: Key, id: str, begin: int, end: int) -> Part:
        topic, partition = key
        place = {"topic": topic, "id": id, "partition": partition, "begin": begin, "end": end}
        # A topic's name may be longer than a file's; its id is its own.
        return Part(
            f"{topic[:80]}-{id}-{partition}-{begin}-{end}",
            title(key),
            place,
            end - begin,
            int((end - begin) * self._message_bytes),
        )


_NEXT_AFTER_LOSS = (
    f'Bring the messages back; or say on_lost="skip", which goes on with what is there and records it: {_RETENTION}.'
)


def _decoder(source: KafkaSource, extra: Mapping[str, str]) -> reading.RowDecoder:
    decode = reading.decoder(source.values, source.schema, source.registry, dict(source.written))
    columns = reading.columns_of(source.values, source.schema)
    return reading.RowDecoder(decode, columns, extra, source.keys, source.tombstones)


def _places(topic: str, partition: int, offsets: Sequence[int | None]) -> list[str | None]:
    of = f"topic {topic}, partition {partition}"
    return [of if offset is None else f"{of}, offset {offset}" for offset in offsets]


def _check_id(where: str, topic: str, id: str, topics: Mapping[str, Topic]) -> None:
    if topic not in topics or topics[topic].id != id:
        raise LostError(
            f"The topic {topic} {'was made anew' if topic in topics else 'is gone'} since its messages were planned.",
            where=where,
            next=_NEXT_AFTER_LOSS,
        )


def _is_position(position: Position) -> bool:
    topics = position.get("topics")
    return (
        set(position) <= {"topics", "turn"}
        and isinstance(position.get("turn", ""), str)
        and isinstance(topics, Mapping)
        and all(isinstance(of, Mapping) and set(of) == {"id", "offsets"} for of in topics.values())
        and all(isinstance(of["id"], str) and isinstance(of["offsets"], Mapping) for of in topics.values())
        and all(
            number.isdecimal() and type(offset) is int and offset >= 0
            for of in topics.values()
            for number, offset in of["offsets"].items()
        )
    )


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _position(ids: Mapping[str, str], offsets: Mapping[Key, int], turn: str | None = None) -> dict[str, Any]:
    topics: dict[str, Any] = {name: {"id": id, "offsets": {}} for name, id in sorted(ids.items())}
    for (name, partition), offset in sorted(offsets.items()):
        topics[name]["offsets"][str(partition)] = offset
    return {"topics": topics} | ({"turn": turn} if turn is not None else {})


def _begins(position: Position, ids: Mapping[str, str]) -> dict[Key, int]:
    """Return the offsets of a position, of those topics that are still the same."""
    return {
        (name, int(number)): offset
        for name, topic in position.get("topics", {}).items()
        if ids.get(name) == topic["id"]
        for number, offset in topic["offsets"].items()
    }


def _bound(upto: Position | None, key: Key, id: str) -> int | None:
    """Return the offset that must not be passed; None: any may be."""
    if upto is None:
        return None
    return _begins(upto, {key[0]: id}).get(key, 0)
