"""A topic's rules for messages. Rows are judged by them before they are committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from polars.exceptions import PanicException

from state_ops.arrow.unfit_values import UnfitValue
from state_ops.errors import ConfigurationError, InputError, PipelineError
from weir.connectors.kafka import encoding
from weir.connectors.kafka.client import Client

_CLIENTS_LIMIT = 1_000_000  # bytes of a message, where message.max.bytes of the client says nothing else
_OVERHEAD = 200  # bytes that a message takes beside key, value and header, as a batch of its own
_ESCAPED = 6  # characters that JSON may need for one
_BATCH_ROWS = 10_000
_AS_IT_COMES, _NONE = "producer", "none"
_MARGIN = 1.1  # of compressed sizes: libraries and levels differ


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The settings of a topic for its messages, or those that it will have once it is created.

    Attributes:
        is_compacted: It takes no message without a key.
        largest: Bytes that a message has at most, as it is stored, and a batch of them; None: that is not known.
        compression: How the brokers compress what they store; "producer": as it comes.
    """

    is_compacted: bool = False
    largest: int | None = None
    compression: str = _AS_IT_COMES


def settings_of(client: Client, topic: str, options: dict[str, str]) -> TopicSettings:
    """Return the settings of a topic, as far as its user may read them.

    Args:
        options: With which the topic is created if it is not there.
    """
    from confluent_kafka.admin import ConfigResource, ResourceType

    doing = f"the settings of the topic {topic} cannot be read"

    def asked(kind: Any, name: str) -> dict[str, Any]:
        (future,) = client.admin.describe_configs(
            [ConfigResource(kind, name)], request_timeout=client.timeout_s
        ).values()
        return {name: entry.value for name, entry in client.result(future, doing).items()}

    told: dict[str, Any] = {}
    with suppress(ConfigurationError):  # the user may not read them, and has to know
        try:
            told = asked(ResourceType.TOPIC, topic)
        except InputError:  # it is not there: the brokers say what it will be like
            cluster = client.result(client.admin.describe_cluster(request_timeout=client.timeout_s), doing)
            ours = asked(ResourceType.BROKER, str(cluster.nodes[0].id))
            told = {"cleanup.policy": ours["log.cleanup.policy"], "max.message.bytes": ours["message.max.bytes"]}
            told |= {"compression.type": ours["compression.type"]} | options
    policy, largest = told.get("cleanup.policy") or "", told.get("max.message.bytes")
    compression = told.get("compression.type") or _AS_IT_COMES
    return TopicSettings("compact" in policy, int(largest) if largest is not None else None, compression)


@dataclass(frozen=True, slots=True)
class MessageRules:
    """The rules of a topic's messages, as `definition.sink.ValueRules`.

    Attributes:
        key: The columns that make the key.
        values: "json" or "avro", the latter with a schema and, if values begin with it, its number in a registry.
        is_compacted: Of the topic.
        largest: Bytes that key and value have at most together.
        stored: Bytes that they have at most once they are compressed; None: they are not.
        codecs: How they are compressed, on the way and as the brokers store them.
    """

    key: tuple[str, ...]
    values: str
    schema: str | None
    schema_id: int | None
    is_compacted: bool
    largest: int
    stored: int | None = None
    codecs: tuple[str, ...] = ()

    def refused(self, rows: pa.Table) -> Iterator[UnfitValue]:
        """Yield what the topic does not take."""
        if self.is_compacted and len(self.key) == 1:
            missing = pc.indices_nonzero(pc.is_null(rows.column(self.key[0]))).to_pylist()
            for row in missing:
                yield UnfitValue(row, self.key[0], "is null, and a compacted topic takes no message without a key")
        if self.values == encoding.JSON and self._surely_small(rows):
            return
        encode = encoding.encoder(self.values, self.schema, self.schema_id, self.key)
        before = 0
        for batch in rows.to_batches(max_chunksize=_BATCH_ROWS):
            for row, problem in self._problems(batch, encode):
                yield UnfitValue(before + row, *problem)
            before += batch.num_rows

    def _surely_small(self, rows: pa.Table) -> bool:
        """Return whether all rows together are no larger than a single message may be, however they are written.

        It is not known of lists and structs, as each part is written with its field's name.
        """
        if any(pa.types.is_nested(type) for type in rows.schema.types):
            return False
        names = sum(len(name) + 4 for name in rows.column_names)
        widest = 64 * rows.num_columns  # numbers and times as text
        return bool(2 * (_ESCAPED * rows.nbytes + (names + widest) * rows.num_rows) <= self._smallest)

    def _problems(self, rows: pa.RecordBatch, encode: encoding.Encoder) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield rows that make no message, or one that is too large, with a column and the problem. Parts without one
        cost one try."""
        try:
            sizes = [self._sizes(key or b"", value) for key, value in encode(rows)]
        except (Exception, PanicException) as error:  # of any type: libraries take values for what they are not
            if rows.num_rows == 1:
                yield 0, self._misfit(rows, error)
                return
            half = rows.num_rows // 2
            yield from self._problems(rows.slice(0, half), encode)
            for row, problem in self._problems(rows.slice(half), encode):
                yield half + row, problem
            return
        for row, (size, stored) in enumerate(sizes):
            if size > self.largest or stored > self._smallest:
                too_large = f"makes a message of {size:,} bytes, and the topic and its client take {self.largest:,}"
                if size <= self.largest:
                    too_large = (
                        f"makes a message of some {stored:,} bytes compressed, and the topic takes {self.stored:,}"
                    )
                yield row, (_largest_column(rows.slice(row, 1)), too_large)

    @property
    def _smallest(self) -> int:
        return self.largest if self.stored is None else min(self.stored, self.largest)

    def _sizes(self, key: bytes, value: bytes) -> tuple[int, int]:
        """Bytes of a message, and how many it has at most where it is stored."""
        size = len(key) + len(value)
        if size <= self._smallest or not self.codecs:
            return size, size
        compressed = max(len(pa.compress(key + value, codec, asbytes=True)) for codec in self.codecs)
        return size, min(size, int(compressed * _MARGIN))

    def _misfit(self, row: pa.RecordBatch, error: BaseException) -> tuple[str, str]:
        """Return the column of a row that cannot be written, and why."""
        said = f"does not fit the schema of the topic's messages: {' '.join(str(error).split())[:200]}"
        for name in row.schema.names if self.schema is not None else ():
            try:
                alone = encoding.encoder(self.values, _of_column(str(self.schema), name), None, ())
                list(alone(row.select([name])))
            except PipelineError:  # a type of another column
                continue
            except Exception:
                return name, said
        return row.schema.names[0], said


def _of_column(schema: str, name: str) -> str:
    """Return the Avro schema of a record with a single one of its fields."""
    record = json.loads(schema)
    return json.dumps({**record, "fields": [field for field in record["fields"] if field["name"] == name]})


def rules(key: tuple[str, ...], values: str, schema: str | None, schema_id: int | None, topic: TopicSettings,
          clients: dict[str, Any], headers: int) -> MessageRules:  # fmt: skip
    """Return the rules of a topic.

    Args:
        clients: Options of the client.
        headers: Bytes of a message's headers.
    """
    largest = int(clients.get("message.max.bytes", _CLIENTS_LIMIT))
    names = [clients.get(name, _NONE) for name in ("compression.type", "compression.codec")]
    codecs = {name for name in names if name != _NONE}
    more, stored = headers + _OVERHEAD, topic.largest
    if topic.largest is not None and (not codecs or topic.compression == "uncompressed"):
        largest, stored, codecs = min(largest, topic.largest), None, set()
    if codecs and topic.compression != _AS_IT_COMES:  # brokers judge what comes, and what they make of it
        codecs.add(topic.compression)
    compressed = stored - more if codecs and stored is not None else None
    return MessageRules(
        key, values, schema, schema_id, topic.is_compacted, largest - more, compressed, tuple(sorted(codecs))
    )


def _largest_column(row: pa.RecordBatch) -> str:
    names: list[str] = row.schema.names
    return max(names, key=lambda name: int(row.column(name).nbytes))
