"""Rows to messages: values in JSON or Avro, keys from columns."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from state_ops.errors import PipelineError
from weir.connectors.kafka import avro

Message = tuple[bytes | None, bytes]
"""Key and value."""

Encoder = Callable[[pa.RecordBatch], Iterator[Message]]

JSON, AVRO = "json", "avro"


def encoder(values: str, schema: str | None, schema_id: int | None, key: Sequence[str]) -> Encoder:
    """Return the function that makes messages of rows.

    Args:
        values: "json" or "avro".
        schema: Of Avro, as text.
        schema_id: In a schema registry; None: values do not begin with one.
        key: The columns that make the key.
    """
    of_values = _json if values == JSON else _avro(str(schema), schema_id)

    def encode(rows: pa.RecordBatch) -> Iterator[Message]:
        return zip(_keys(rows, key), of_values(rows), strict=True)

    return encode


def check(columns: pa.Schema, values: str, schema: str | None, key: Sequence[str], where: str) -> None:
    """Raise PipelineError for columns that a message cannot hold, by name."""
    absent = [name for name in key if name not in columns.names]
    if absent:
        raise PipelineError(
            f"The key's columns {', '.join(map(repr, absent))} are not among the rows' columns.",
            where=where,
            next=f"Take some of: {', '.join(columns.names)}.",
        )
    unfit = [
        f"{field.name!r} ({field.type})"
        for field in columns
        if field.name in key and not _fits(field.type, is_key=True)
    ]
    if unfit:
        raise PipelineError(
            f"A message's key cannot hold {', '.join(unfit)}.",
            where=where,
            next="Make the key of texts, numbers, dates and times.",
        )
    if values == JSON:
        unfit = [f"{field.name!r} ({field.type})" for field in columns if not _fits(field.type)]
        if unfit:
            raise PipelineError(
                f"JSON cannot hold the column {', '.join(unfit)}.",
                where=where,
                next="Convert or leave out the column before the sink.",
            )
    else:
        avro.check(columns, str(schema), where)


def _fits(type: pa.DataType, is_key: bool = False, is_nested: bool = False) -> bool:
    if pa.types.is_struct(type) or pa.types.is_list(type):
        return not is_key and all(_fits(type.field(at).type, False, True) for at in range(type.num_fields))
    return (
        pa.types.is_boolean(type)
        or pa.types.is_integer(type)
        or pa.types.is_floating(type)
        or pa.types.is_string(type)
        or pa.types.is_decimal(type)
        or pa.types.is_date(type)
        or pa.types.is_timestamp(type)
        or (pa.types.is_binary(type) and not is_nested)
    )


def _json(rows: pa.RecordBatch) -> Sequence[bytes]:
    """Encode rows as JSON, an object a row: decimals, dates and times as text, bytes as base64, and null where a number
    is not finite."""
    return _lines(rows)


def _lines(rows: pa.RecordBatch) -> Sequence[bytes]:
    import polars as pl

    if not rows.num_rows:
        return []
    frame = pl.from_arrow(pa.Table.from_batches([rows]))
    assert isinstance(frame, pl.DataFrame)
    binary = [name for name, type in frame.schema.items() if type == pl.Binary]
    text = frame.with_columns(pl.col(name).bin.encode("base64") for name in binary).write_ndjson()
    return text.encode().split(b"\n")[: rows.num_rows]


def _keys(rows: pa.RecordBatch, key: Sequence[str]) -> Sequence[bytes | None]:
    """Return the key of each row: of one column its value as text, or its bytes; of several a JSON object."""
    if not key:
        return [None] * rows.num_rows
    if len(key) > 1:
        return _lines(rows.select(list(key)))
    column = rows.column(key[0])
    if pa.types.is_binary(column.type):
        return list(column.to_pylist())
    if pa.types.is_string(column.type):
        return [text if text is None else text.encode() for text in column.to_pylist()]
    # Each line is `{"name":value}`.
    begin = len(_lines(pa.record_batch([pa.array([True])], names=[key[0]]))[0]) - len("true}")
    values = [line[begin:-1].strip(b'"') for line in _lines(rows.select(list(key)))]
    valid = column.is_valid().to_pylist()
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]


def _avro(schema: str, schema_id: int | None) -> Callable[[pa.RecordBatch], Iterator[bytes]]:
    import fastavro

    parsed: Any = avro.parsed(schema)
    header = b"" if schema_id is None else struct.pack(">bI", 0, schema_id)

    def values(rows: pa.RecordBatch) -> Iterator[bytes]:
        for row in rows.to_pylist():
            buffer = io.BytesIO()
            buffer.write(header)
            fastavro.schemaless_writer(buffer, parsed, row)
            yield buffer.getvalue()

    return values
