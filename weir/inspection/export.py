"""Rows on their way out: JSON lines, Parquet, Arrow, a Delta table. Written in a stream, and whole or not at all."""

from __future__ import annotations

import io
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.delta.fenced_table import Table, is_table, was_busy
from state_ops.errors import ConfigurationError, WeirError, plainly
from state_ops.redaction import scrubbing
from state_ops.storage.storage import Storage
from state_ops.value_text import as_json
from weir.inspection.database import WHOLE, streamed
from weir.inspection.view import View
from weir.settings.configuration import Settings

_GROUP_ROWS = 65_536  # of a Parquet row group or an Arrow batch: key groups may be small
_WRITES = 5  # of a table, while the store is busy with one of its objects
STDOUT = "-"


class Format(StrEnum):
    """The format in which rows are written."""

    TABLE = "table"
    JSON = "json"
    PARQUET = "parquet"
    ARROW = "arrow"


def write(
    schema: pa.Schema, tables: Iterable[pa.Table], format: Format, output: str | None, force: bool = False
) -> int:
    """Write rows as JSON (an object a line), Parquet or Arrow (IPC file; a stream on stdout); returns how many.

    Args:
        output: A file, or `-`, or None for stdout, which Parquet cannot go to. The file appears when it is whole; one
            that is there is only replaced with `force`.

    Raises:
        ConfigurationError: For a column that the format has no type for, before anything is read.
    """
    check_output(format, output, force)
    if format is Format.PARQUET:
        _check_parquet(schema)
    if output is None or output == STDOUT:
        sys.stdout.flush()
        written = _WRITERS[format](schema, tables, sys.stdout.buffer, True)
        sys.stdout.buffer.flush()
        return written
    with _whole(Path(output), force) as sink:
        return _WRITERS[format](schema, tables, sink, False)


def check_output(format: Format, output: str | None, force: bool) -> None:
    """Raise ConfigurationError if rows cannot be written there. Call it before the work begins."""
    if format is Format.PARQUET and output in (None, STDOUT):
        raise ConfigurationError("A Parquet file cannot be written to stdout.", next="Say --output FILE.")
    if format is Format.ARROW and output is None:
        raise ConfigurationError(
            "Arrow is not for terminals.", next="Say --output FILE, or --output - for a stream on stdout."
        )
    if format is Format.TABLE and output not in (None, STDOUT):
        raise ConfigurationError(
            "A table is for people, not for files.", next="Say --format json, parquet or arrow with --output."
        )
    if output is None or output == STDOUT:
        return
    if not Path(output).parent.is_dir():
        raise ConfigurationError(f"There is no directory {Path(output).parent}.", where=output, next="Make it first.")
    if Path(output).is_dir():
        raise ConfigurationError("That is a directory.", where=output, next="Name a file.")
    if Path(output).exists() and not force:
        raise _taken(output)


def _taken(output: str) -> ConfigurationError:
    return ConfigurationError(f"{output} is there already.", next="Choose another name, or say --force to replace it.")


@contextmanager
def _whole(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Yield a file that appears under its name only when it is whole. After any failure nothing is left."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with unfinished.open("xb") as sink:
            yield sink
        if path.exists() and not force:
            raise _taken(str(path))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# -- formats


def _write_json(schema: pa.Schema, tables: Iterable[pa.Table], sink: BinaryIO, _stream: bool) -> int:
    written, whole = 0, [field.name for field in schema if WHOLE in (field.metadata or {})]
    for table in tables:
        rows = [row | {name: _number(row[name]) for name in whole} for row in frames.python_rows(table)]
        sink.write("".join(json_line(row) + "\n" for row in rows).encode())
        written += table.num_rows
    return written


def _number(value: Any) -> Any:
    """Return a whole number that DuckDB has in 128 bits, as `sum` gives it, as a number where 64 bits hold it."""
    return int(value) if value is not None and -(1 << 63) <= value < 1 << 63 else value


def json_line(row: Any) -> str:
    """Return a row as JSON: bytes in hex, moments in ISO 8601, decimals and what JSON has no number for as text, maps
    as pairs."""
    return as_json(row, ensure_ascii=False)


def _write_columns(format: Format, schema: pa.Schema, tables: Iterable[pa.Table], sink: BinaryIO, stream: bool) -> int:
    opened = pq.ParquetWriter if format is Format.PARQUET else pa.ipc.new_stream if stream else pa.ipc.new_file
    written = 0
    with opened(sink, schema) as writer:
        for table in gathered(tables, _GROUP_ROWS):
            writer.write_table(table)
            written += table.num_rows
    return written


def gathered(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of at least so many, but for the last."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(part.num_rows for part in waiting) >= rows:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def limited(tables: Iterable[pa.Table], most: int | None) -> Iterator[pa.Table]:
    """Yield the first rows; the rest is not read."""
    left = most
    for table in tables:
        if left is None:
            yield table
            continue
        if left > 0:
            yield table.slice(0, left)
            left -= table.num_rows
        if left <= 0:
            return


def _check_parquet(schema: pa.Schema) -> None:
    for field in schema:
        try:
            pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigurationError(
                f"Parquet has no type for the column {field.name!r}, which is {field.type}.",
                next="Write Arrow or JSON; weir state sql can cast it.",
            ) from error


_WRITERS: Mapping[Format, Callable[[pa.Schema, Iterable[pa.Table], BinaryIO, bool], int]] = {
    Format.JSON: _write_json,
    Format.PARQUET: partial(_write_columns, Format.PARQUET),
    Format.ARROW: partial(_write_columns, Format.ARROW),
}


# -- Delta


def to_delta(view: View, settings: Settings, target: str, force: bool = False) -> tuple[str, int]:
    """Write a stage's state as one version of the Delta table at a directory or URI; returns the table's URI and the
    version.

    The commit's metadata name pipeline storage, stage and checkpoint. A table that is there is only replaced with
    `force`, by a new version. What a failure leaves is in no version; a directory that was not there before is removed.
    """
    from deltalake import CommitProperties, write_deltalake
    from deltalake.exceptions import DeltaError

    place = Storage(target, settings.storage.s3)
    root, uri = view.storage.uri.rstrip("/") + "/", place.uri.rstrip("/") + "/"
    if uri.startswith(root) or root.startswith(uri):
        raise ConfigurationError(
            "That lies in the pipeline's own storage.", where=place.uri, next="Export to a directory of its own."
        )
    if place.is_local and set("[]") & set(place.uri):
        raise ConfigurationError(
            "delta-rs writes no table below a path with brackets.", where=place.uri, next="Export to another directory."
        )
    replaces = is_table(place.uri, place.delta_options)
    local = Path(place.uri.removeprefix("file://")) if place.is_local else None
    before = local is not None and local.exists()
    if not force and (replaces or (local is not None and local.is_dir() and any(local.iterdir()))):
        raise ConfigurationError(f"{target} is there already.", next="Choose another place, or say --force.")
    schema = storable(view)
    metadata = {"weir.checkpoint": str(view.checkpoint), "weir.stage": view.uid, "weir.storage": view.storage.uri}

    def write_table() -> None:
        tables = (table.cast(schema) for table in gathered(view.tables(), _GROUP_ROWS))
        with streamed(tables, schema) as reader, scrubbing():
            write_deltalake(
                place.uri,
                reader,
                mode="overwrite" if replaces else "error",
                schema_mode="overwrite" if replaces else None,
                commit_properties=CommitProperties(custom_metadata=metadata),
                storage_options=place.delta_options,
            )

    try:
        for left in reversed(range(_WRITES)):
            try:
                write_table()
                break
            except DeltaError as error:
                if not left or not was_busy(error):
                    raise
    except BaseException as error:
        if local is not None and not before:
            shutil.rmtree(local, ignore_errors=True)
        if isinstance(error, DeltaError | OSError):
            raise WeirError(
                f"The state was not exported: {plainly(error)}", where=place.uri, next="Look at the storage."
            ) from error
        raise
    return place.uri, Table(place.uri, storage_options=place.delta_options).version()


def storable(view: View) -> pa.Schema:
    """Return the columns as a Delta table, and Spark, can have them. Raises ConfigurationError for one that they
    cannot."""
    schema = frames.canonical_schema(view.schema)
    for field in schema:
        if frames.unstorable(field.type) is not None:
            raise ConfigurationError(
                f"The column {field.name!r} of {view.uid} is {field.type}; neither a Delta table nor Spark can have "
                "that.",
                where=f"stage {view.uid}, checkpoint {view.checkpoint}",
                next="Write it with `weir state scan --format arrow`.",
            )
    return schema
