"""`files`: a source of files that arrive in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from state_ops.errors import PipelineError
from state_ops.lazily import Lazily
from weir.definition.source import FileSource

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = Lazily("pyarrow")


def files(
    pattern: str,
    *,
    event_time: str | None = None,
    name: str = "files",
    format: str = "parquet",
    schema: pa.Schema | Mapping[str, pa.DataType] | None = None,
    partitions: Mapping[str, str] | None = None,
    below_floor: str = "fail",
    on_bad: str = "fail",
    idle_after: str | timedelta | None = "5m",
    max_ahead: str | timedelta | None = None,
    max_future: str | timedelta | None = None,
    evolve: str = "fix",
    **options: Any,
) -> FileSource:
    """Read files that arrive in a directory, in the order of their names, each exactly once.

    Files must appear whole (write elsewhere, then rename) and must not change afterwards. Names that start with `.` or
    `_` are ignored. See docs/how-to/source-files.md.

    Args:
        pattern: Directory and file name pattern, e.g. `{landing}/*.parquet`. A {placeholder} is a param of the pipeline
            in the configuration. Directories may have wildcards too, `**` stands for any number of them, and what they
            say as `day=2026-01-31` is a column: `{landing}/day=*/*.parquet`.
        event_time: The timestamp column that drives the watermark.
        name: The name under which checkpoints record how far the source has been read.
        format: "parquet", "csv", "json" (a value a line) or "avro". The name of a file tells its compression.
        schema: The columns of CSV, JSON and Avro files; by default those of the first file.
        partitions: The types of columns that directories say: "string", "int" or "date"; by default as the first file's
            value looks.
        below_floor: What happens if files arrive under names below those that were read long ago. "fail": the pipeline
            is held. "warn": the files are not read.
        on_bad: What happens to a file that cannot be read, and to a bad row. "fail": the pipeline is held until the
            file is repaired or moved away. "quarantine": the pipeline goes on without the file, and the checkpoint
            records the reason; a bad row goes to the table <stage>_quarantine, with file, line or number, and reason.
            A file cannot be read if it is damaged, lacks columns, has other types than earlier files, or has a colon in
            its name. A bad row cannot be decoded, or has a value that no table can hold. A row that fails in a stage is
            not a bad row: it holds the pipeline.
        idle_after: The time without rows after which the source no longer holds back the other inputs of a stage.
        max_ahead: How much event time the source may be read ahead of the slowest of a stage's inputs.
        max_future: How far an event time may lie ahead of processing time. A row with a later one is bad.
        evolve: Columns that the first files did not have are counted and reported ("fix"), or read from then on
            ("add"), null in files that lack them.
        **options: How files are written. CSV: `header`, `delimiter`, `quote`, `null`, `multiline`, `encoding`, `extra`.
            JSON: `encoding`, `extra`.

    Raises:
        PipelineError: A policy, a type or an option is not one of these.

    Example:
        >>> import pyarrow as pa
        >>> from weir import files
        >>> days = files(
        ...     "{landing}/day=*/*.csv",
        ...     format="csv",
        ...     schema={"id": pa.int64(), "at": pa.timestamp("us", "UTC")},
        ...     partitions={"day": "date"},
        ...     event_time="at",
        ... )
        >>> days.pattern, days.format, days.schema.names
        ('{landing}/day=*/*.csv', 'csv', ['id', 'at'])
    """
    if below_floor not in ("fail", "warn"):
        raise PipelineError(f"below_floor={below_floor!r} is no policy.", where=pattern, next='Say "fail" or "warn".')
    if on_bad not in ("fail", "quarantine"):
        raise PipelineError(f"on_bad={on_bad!r} is no policy.", where=pattern, next='Say "fail" or "quarantine".')
    for column, type in (partitions or {}).items():
        if type not in ("string", "int", "date"):
            raise PipelineError(
                f"A column of directories cannot be {type!r}: {column}.",
                where=pattern,
                next='Say "string", "int" or "date".',
            )
    columns = schema if schema is None or isinstance(schema, pa.Schema) else pa.schema(list(schema.items()))
    if format != "parquet":
        from weir.connectors.formats.decoding import check_schema, options_of

        options_of(format, options)
        if columns is not None:
            check_schema(format, columns)
    elif options or columns is not None:
        raise PipelineError(
            f"Parquet files say themselves how they are written, and {next(iter(options), 'schema')}= is given.",
            where=pattern,
            next='Leave it out, or say format="csv", "json" or "avro".',
        )
    return FileSource(
        pattern,
        event_time=event_time,
        name=name,
        format=format,
        options=tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in options.items()),
        schema=columns,
        partitions=tuple((partitions or {}).items()),
        below_floor=below_floor,
        on_bad=on_bad,
        idle_after=idle_after,
        max_ahead=max_ahead,
        max_future=max_future,
        evolve=evolve,
    )
