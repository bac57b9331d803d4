"""Messages between two offsets of a partition, and the rows that they become."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO, unfit
from state_ops.errors import LostError, first_line
from weir.connectors.kafka import avro
from weir.connectors.kafka.client import Client
from weir.definition.source import Batch, Rejected

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

JSON, AVRO, BYTES = "json", "avro", "bytes"
SKIP, REJECT, KEEP = "skip", "reject", "keep"
STRING = "string"
_NO_TIME = 0  # TIMESTAMP_NOT_AVAILABLE of librdkafka

Decoder = Callable[[Sequence[bytes]], tuple[pa.Table, dict[int, str]]]
"""Values to rows. Of values that cannot be decoded there are no rows, and by their place the reasons."""

_AT_ONCE = 10_000  # messages
_PEEKED = 1_000  # offsets
_BATCH_BYTES = 16 << 20
_WAIT_S = 0.1
_RAW = 4096  # characters of a bad value that are kept
_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
_UTC = pa.timestamp("us", "UTC")


def consumer(client: Client, group: str, level: str = "read_committed") -> Consumer:
    """Return a consumer that joins no group and reads what is committed.

    Args:
        group: By which brokers know it.
        level: The isolation level, if it is to read more.
    """
    from confluent_kafka import Consumer

    return client.opened(
        Consumer,
        group_id=group,
        enable_auto_commit=False,
        enable_auto_offset_store=False,
        enable_partition_eof=True,
        isolation_level=level,
        auto_offset_reset="error",
        fetch_queue_backoff_ms=10,
    )


def messages(
    client: Client, consumer: Consumer, topic: str, partition: int, begin: int, end: int, waits: bool = True
) -> Iterator[list[Message]]:
    """Yield the committed messages with offsets from `begin` to below `end`, in bunches.

    Offsets have gaps: aborted and compacted messages, and the marks that end transactions. So the end is reached with a
    message at or behind it, or where the partition itself ends.

    Args:
        waits: If the partition ends before `end`, as it may for a moment after a broker's start, wait for the rest.

    Raises:
        LostError: Messages at `begin` are there no more.
        WeirError: As `Client.failure` says.
    """
    from confluent_kafka import TopicPartition

    codes = client.kafka.KafkaError
    doing = f"the topic {topic} cannot be read"
    lost = (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE, codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_PARTITION)
    consumer.assign([TopicPartition(topic, partition, begin)])
    try:
        next_, deadline = begin, time.monotonic() + client.timeout_s
        while next_ < end:
            bunch: list[Message] = []
            is_end = False
            for message in consumer.consume(min(_AT_ONCE, end - next_), _WAIT_S):
                error = message.error()
                if error is None:
                    next_ = int(message.offset() or 0) + 1
                    if next_ > end:
                        is_end = True
                        break
                    bunch.append(message)
                elif error.code() == codes._PARTITION_EOF:
                    is_end = is_end or not waits or int(message.offset() or 0) >= end
                elif error.code() in lost:
                    raise LostError(
                        f"The topic {topic} has the messages no more that were to be read from offset {next_:,} on.",
                        where=f"{client.where}, partition {partition}",
                        next='Restore them, or say on_lost="skip"; a longer retention keeps them: '
                        "docs/playbooks/kafka.md.",
                    )
                elif not error.retriable() and error.code() != codes._TRANSPORT:
                    raise client.failure(error, doing)
            if bunch:
                yield bunch
            if bunch or is_end:
                deadline = time.monotonic() + client.timeout_s
            if is_end:
                return
            client.check(doing)
            if time.monotonic() > deadline:
                raise client.failure(codes(codes._TIMED_OUT), doing)
    finally:
        consumer.unassign()


def is_empty(client: Client, consumer: Consumer, place: Mapping[str, Any]) -> bool:
    """Return whether a part's offsets are known to have no committed message: marks of transactions, and aborted ones.

    It is not known of many offsets.
    """
    begin, end = place["begin"], place["end"]
    if end - begin > _PEEKED:
        return False
    try:
        return not any(messages(client, consumer, place["topic"], place["partition"], begin, end, waits=False))
    except LostError:  # whoever reads it says so
        return False


class RowDecoder:
    """Messages to rows.

    Args:
        decode: Values to rows.
        columns: The columns of values, in canonical types.
        extra: By what a message has beside its value ("key", "headers", "timestamp", "partition", "offset", "topic"),
            the column for it.
        keys: "string" or "bytes".
        tombstones: What becomes of messages without a value: "reject", "skip" or "keep", with null in all columns.
    """

    def __init__(
        self, decode: Decoder, columns: pa.Schema, extra: Mapping[str, str], keys: str, tombstones: str
    ) -> None:
        self._decode, self._columns, self._extra = decode, columns, dict(extra)
        self._keys, self._tombstones = keys, tombstones
        self.schema = row_columns(columns, extra, keys)

    def rows(self, bunch: Sequence[Message]) -> Batch:
        """Return the rows of some messages, in their order."""
        values = [message.value() for message in bunch]
        reasons = self._bad_keys(bunch) if "key" in self._extra and self._keys == STRING else {}
        if self._tombstones == REJECT:
            reasons |= {at: "it has no value (a tombstone)" for at, value in enumerate(values) if value is None}
        valued = [at for at, value in enumerate(values) if value is not None and at not in reasons]
        timeless = self._bad_times(bunch) if "timestamp" in self._extra else {}
        reasons |= {at: reason for at, reason in timeless.items() if at not in reasons}
        valued = [at for at in valued if at not in reasons]
        table, unread = _fit(*self._decode([values[at] for at in valued]))  # type: ignore[misc]
        reasons |= {valued[at]: reason for at, reason in unread.items()}
        decoded = [at for at in valued if at not in reasons] if unread else valued
        kept = decoded
        if self._tombstones == KEEP and len(valued) < len(values):
            kept = [at for at in range(len(values)) if at not in reasons]
            places = {at: place for place, at in enumerate(decoded)}
            table = table.take(pa.array([places.get(at) for at in kept], pa.int64()))
        chosen = bunch if len(kept) == len(bunch) else [bunch[at] for at in kept]
        columns: list[Any] = [*table.columns, *(self._extra_column(what, chosen) for what in self._extra)]
        rejected = tuple(
            Rejected(int(bunch[at].offset() or 0), reasons[at], _raw(values[at])) for at in sorted(reasons)
        )
        return Batch(
            pa.table(columns, schema=self.schema), rejected, lambda: [int(message.offset() or 0) for message in chosen]
        )

    def _extra_column(self, what: str, bunch: Sequence[Message]) -> pa.Array:
        type = _types(self._keys)[what]
        if what == "key":
            return pa.array([_bytes(message.key()) for message in bunch], pa.binary()).cast(type)
        if what == "headers":
            pairs = [[{"name": name, "value": value} for name, value in headers_of(message)] for message in bunch]
            return pa.array(pairs, type)
        if what == "timestamp":
            moments = [_moment(message) for message in bunch]
            return pa.array([None if moment is None else moment * 1000 for moment in moments], type)
        of_message = {"partition": "partition", "offset": "offset", "topic": "topic"}[what]
        return pa.array([getattr(message, of_message)() for message in bunch], type)

    def _bad_times(self, bunch: Sequence[Message]) -> dict[int, str]:
        """Return by place why a message's timestamp is none.

        Some producers give microseconds or nanoseconds instead of milliseconds.
        """
        return {
            at: f"its timestamp is {moment} milliseconds since 1970, outside of the years 1 to 9999"
            for at, message in enumerate(bunch)
            if (moment := _moment(message)) is not None and not FIRST_MICRO <= moment * 1000 <= LAST_MICRO
        }

    def _bad_keys(self, bunch: Sequence[Message]) -> dict[int, str]:
        reasons = {}
        for at, message in enumerate(bunch):
            key = _bytes(message.key())
            if key is not None and not key.isascii():
                try:
                    key.decode()
                except UnicodeDecodeError:
                    reasons[at] = "its key is no UTF-8"
        return reasons


def _moment(message: Message) -> int | None:
    """Return a message's timestamp in milliseconds since 1970; None: it has none, which clients also write as -1."""
    kind, moment = message.timestamp()
    return None if kind == _NO_TIME or moment == -1 else moment


def _fit(table: pa.Table, reasons: Mapping[int, str]) -> tuple[pa.Table, dict[int, str]]:
    """Return the decoded rows that can be handed on, and by the place of each other value the reasons.

    Args:
        reasons: Of the values that have no row in the table.
    """
    lost = {value.row: f"{value.column} {value.problem}" for value in reversed([*unfit(table)])}
    if not lost:
        return table, dict(reasons)
    places = [at for at in range(len(table) + len(reasons)) if at not in reasons]
    kept = pa.array([row not in lost for row in range(len(table))])
    return table.filter(kept), {**reasons, **{places[row]: reason for row, reason in lost.items()}}


def _types(keys: str) -> dict[str, pa.DataType]:
    return {
        "key": pa.string() if keys == STRING else pa.binary(),
        "headers": _HEADERS,
        "timestamp": _UTC,
        "partition": pa.int32(),
        "offset": pa.int64(),
        "topic": pa.string(),
    }


def bunches(batches: Iterator[list[Message]], most: int = _AT_ONCE) -> Iterator[list[Message]]:
    """Bunches as large as a batch may be, by messages and bytes; an empty one where there is no message."""
    held: list[Message] = []
    size, is_first = 0, True
    for bunch in batches:
        for message in bunch:
            held.append(message)
            size += len(message)
            if len(held) >= most or size >= _BATCH_BYTES:
                yield held
                held, size, is_first = [], 0, False
    if held or is_first:
        yield held


def decoder(values: str, schema: pa.Schema | str | None, registry: bool, written: Mapping[int, str]) -> Decoder:
    """Return the function that makes rows of values; see `KafkaSource` for the arguments."""
    columns = columns_of(values, schema)
    if values == BYTES:
        return lambda contents: (pa.table([pa.array(contents, pa.binary())], schema=columns), {})
    if values == AVRO:
        records, stored = avro.decoder(str(schema), registry, written), avro.stored(str(schema))

        def decode_avro(contents: Sequence[bytes]) -> tuple[pa.Table, dict[int, str]]:
            rows, reasons = records(contents)
            parts, lost = list[pa.Table](), dict[int, str]()
            _by_halves(rows, stored, 0, parts, lost)
            places = [at for at in range(len(contents)) if at not in reasons]
            table = frames.canonical(pa.concat_tables([stored.empty_table(), *parts]))
            return table, reasons | {places[row]: reason for row, reason in lost.items()}

        return decode_avro
    return lambda contents: _json(contents, columns)


def _by_halves(
    rows: Sequence[Any], columns: pa.Schema, first: int, parts: list[pa.Table], lost: dict[int, str]
) -> None:
    """Make tables of decoded values. Where Arrow refuses some of them, halves are tried, down to the values it refuses.

    Args:
        first: The number of the first of them.
        parts: Gets the tables, in order.
        lost: Gets by number why a value has no row.
    """
    try:
        parts.append(pa.Table.from_pylist(rows, columns))
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
        if len(rows) == 1:
            lost[first] = _misfit(rows[0], columns) or f"it has a value that no column can hold: {first_line(error)}"
            return
        half = len(rows) // 2
        _by_halves(rows[:half], columns, first, parts, lost)
        _by_halves(rows[half:], columns, first + half, parts, lost)


def _misfit(row: Mapping[str, Any], columns: pa.Schema) -> str | None:
    """Return which of a value's fields its column cannot hold; None: each alone can be held."""
    for field in columns:
        try:
            pa.array([row.get(field.name)], field.type)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError):
            return f"the field {field.name!r} does not fit into {field.type}"
    return None


def row_columns(columns: pa.Schema, extra: Mapping[str, str], keys: str) -> pa.Schema:
    """Return the columns of messages; see `RowDecoder` for the arguments."""
    types = _types(keys)
    return pa.schema([*columns, *(pa.field(column, types[what]) for what, column in extra.items())])


def columns_of(values: str, schema: pa.Schema | str | None) -> pa.Schema:
    """Return the columns that values become, in canonical types."""
    if values == BYTES:
        return pa.schema([("value", pa.binary())])
    return avro.columns(str(schema)) if values == AVRO else frames.canonical_schema(schema)


def _json(contents: Sequence[bytes], columns: pa.Schema) -> tuple[pa.Table, dict[int, str]]:
    """Values as lines. A value with line ends is one that people have laid out: they stand between its tokens."""
    from weir.connectors.formats.json_lines import JsonLines, JsonOptions
    from weir.connectors.formats.stream import Block

    # A mark of the byte order is none of a message's, wherever in a bunch that stands.
    values = [value.removeprefix(codecs.BOM_UTF8) for value in contents]
    reasons = {at: why for at, value in enumerate(values) if (why := _no_json(value)) is not None}
    lines = [value if at not in reasons else b"{" for at, value in enumerate(values)] if reasons else values
    text = b"\n".join(lines)
    if text.count(b"\n") >= len(lines) or b"\r" in text:
        text = b"\n".join(_on_one_line(line) for line in lines)
    batch = JsonLines(columns, JsonOptions()).decoded(Block(text, 1))
    for rejected in batch.rejected:
        reasons.setdefault(rejected.number - 1, rejected.reason)
    return batch.rows, reasons


def _no_json(value: bytes) -> str | None:
    """Why a value is no JSON, as far as its first bytes say; None: they may begin an object."""
    if not value.strip():
        return "it is empty"
    if value.startswith(codecs.BOM_UTF8):
        return "it begins with two marks of the byte order"
    number = avro.number_of(value)
    if number is not None:
        return (
            f"it begins with the number of a schema in a registry ({number}), so it is no plain JSON: of Avro say "
            'values="avro", schema=... and registry=True; JSON of a registry has to be written without that number'
        )
    return None


def _on_one_line(value: bytes) -> bytes:
    """Return this JSON without line ends.

    A line end inside a text is no JSON. It is replaced by a control character, which is none either.
    """
    return value.replace(b"\r", b"\n").replace(b"\n", b" ") if _is_json(value) else value.translate(_NO_LINE_ENDS)


def _is_json(value: bytes) -> bool:
    import json

    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


_NO_LINE_ENDS = bytes.maketrans(b"\r\n", b"\1\1")


def headers_of(message: Any) -> Sequence[tuple[str, Any]]:
    return message.headers() or ()


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _raw(value: Any) -> str | None:
    return None if value is None else bytes(value[: _RAW * 4]).decode(errors="replace")[:_RAW]
