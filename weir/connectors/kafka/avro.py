"""Avro in messages: a schema's columns as Arrow has them, and single values without a file around them."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from state_ops import extras
from state_ops.arrow import frames
from state_ops.errors import PipelineError
from weir.connectors.formats.avro.avro_schema import WRITABLE, AvroSchema, NoSchemaError, UnreadSchemaError

_HEADER = struct.Struct(">bI")  # of a schema registry: a zero, and the schema's number


def parsed(schema: str) -> Any:
    """Return a schema as the library has it. Raises PipelineError if it is none."""
    with extras.needed_for("Avro in messages"):
        import fastavro
    try:
        return fastavro.parse_schema(_without_uuids(json.loads(schema)))
    except Exception as error:  # whatever a text is that is no schema
        raise PipelineError(
            f"The schema is no Avro schema: {' '.join(str(error).split())[:200]}",
            next="Give a record's schema as JSON.",
        ) from error


def stored(schema: str) -> pa.Schema:
    """Return the columns of a record's schema, in the types in which their values are decoded. Raises PipelineError for
    what Arrow has no type for, by name."""
    parsed(schema)
    record = json.loads(schema)
    if not isinstance(record, dict) or record.get("type") != "record":
        raise PipelineError("The Avro schema is not that of a record.", next="Wrap it: a row is a record.")
    try:
        columns = pa.schema([(name, column.type) for name, column in AvroSchema().columns(schema).items()])
    except NoSchemaError as error:
        raise PipelineError(f"The schema is no Avro schema: {error}", next="Give a record's schema as JSON.") from error
    except UnreadSchemaError as error:
        raise PipelineError(
            f"The Avro schema has a type for which there is no column: {error}", next=WRITABLE
        ) from error
    for field in frames.canonical_schema(columns):
        if (part := frames.unreadable(field.type)) is not None:
            raise PipelineError(
                f"The Avro schema has a type for which there is no column: the field {field.name!r} is {part}.",
                next="Give the source a reader's schema in which it has up to 38 digits.",
            )
    return columns


def columns(schema: str) -> pa.Schema:
    """Return the columns of a schema in canonical types."""
    return frames.canonical_schema(stored(schema))


def check(rows: pa.Schema, schema: str, where: str) -> None:
    """Raise PipelineError unless rows of these columns can be written with a schema."""
    of_schema = {field["name"]: field for field in json.loads(schema)["fields"]}
    more = [name for name in rows.names if name not in of_schema]
    absent = [name for name, field in of_schema.items() if name not in rows.names and "default" not in field]
    for names, what in ((more, "is not in the Avro schema"), (absent, "of the Avro schema is not among the rows")):
        if names:
            raise PipelineError(
                f"The column {', '.join(map(repr, names))} {what}.",
                where=where,
                next="Make the schema and the rows fit.",
            )
    expected = columns(schema)
    unwritten = [field.name for field in stored(schema) if _is_read_alone(field.type)]
    if unwritten:
        raise PipelineError(
            f"The Avro field {', '.join(map(repr, unwritten))} is a time of day, local or in nanoseconds, which only "
            "sources take.",
            where=where,
            next="Make it a timestamp-micros.",
        )
    unfit = [
        f"{field.name!r} ({field.type}, {expected.field(field.name).type} in the schema)"
        for field in rows
        if not _same(field.type, expected.field(field.name).type)
    ]
    if unfit:
        raise PipelineError(
            f"The Avro schema does not take the column {', '.join(unfit)}.",
            where=where,
            next="Make the schema and the rows fit.",
        )


def decoder(
    schema: str, registry: bool, written: Mapping[int, str]
) -> Callable[[Sequence[bytes]], tuple[list[Any], dict[int, str]]]:
    """Return the function that makes rows of values.

    Args:
        schema: The record's schema, which says the columns.
        registry: Each value begins with a zero and the number of its schema in a registry.
        written: By that number, the schemas with which values were written. Empty: all with `schema`.

    Returns:
        A function that returns the rows, and by place of a value why it cannot be decoded.
    """
    import fastavro

    reader = parsed(schema)
    writers = {number: parsed(text) for number, text in written.items()}

    def decode(values: Sequence[bytes]) -> tuple[list[Any], dict[int, str]]:
        rows: list[Any] = []
        reasons: dict[int, str] = {}
        for at, value in enumerate(values):
            writer = reader
            if registry:
                number = number_of(value)
                if number is None:
                    reasons[at] = "it does not begin with the number of a schema"
                    continue
                if writers and number not in writers:
                    reasons[at] = f"it was written with schema {number} of the registry, which the source does not have"
                    continue
                writer = writers.get(number, reader)
            stream = io.BytesIO(value)
            stream.seek(_HEADER.size if registry else 0)
            try:
                row = fastavro.schemaless_reader(stream, writer, None if writer is reader else reader)
            except Exception as error:  # of any type: the library takes bytes for lengths and the like
                reasons[at] = f"it is no Avro of this schema ({type(error).__name__})"
                continue
            if stream.tell() < len(value):
                reasons[at] = "bytes are left over behind what the schema says"
                continue
            rows.append(row)
        return rows, reasons

    return decode


def number_of(value: bytes) -> int | None:
    """Return the number of its schema in a registry with which a value begins, behind a zero; None: it does not."""
    if len(value) < _HEADER.size or value[0]:
        return None
    number: int = _HEADER.unpack_from(value)[1]
    return number


def _without_uuids(schema: Any) -> Any:
    """Return a schema in which they are the texts as which they are written."""
    if isinstance(schema, list):
        return [_without_uuids(part) for part in schema]
    if isinstance(schema, dict):
        return {name: _without_uuids(part) for name, part in schema.items() if (name, part) != ("logicalType", "uuid")}
    return schema


def _is_read_alone(type: pa.DataType) -> bool:
    """Return whether a type is only read: rows have other values than it has, so they are not written as such."""
    if pa.types.is_nested(type):
        return any(_is_read_alone(type.field(at).type) for at in range(type.num_fields))
    return pa.types.is_time(type) or (pa.types.is_timestamp(type) and (type.tz is None or type.unit == "ns"))


def _same(type: pa.DataType, other: pa.DataType) -> bool:
    """Return whether values of one type can be written as the other.

    Names and nullability inside do not count.
    """
    if pa.types.is_nested(type) or pa.types.is_nested(other):
        return (
            type.id == other.id
            and type.num_fields == other.num_fields
            and all(_same(type.field(at).type, other.field(at).type) for at in range(type.num_fields))
        )
    widened = pa.types.is_integer(type) and pa.types.is_integer(other) and type.bit_width <= other.bit_width
    return bool(type == other or widened or (pa.types.is_floating(type) and pa.types.is_floating(other)))
