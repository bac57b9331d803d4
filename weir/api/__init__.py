"""All names that a pipeline's author imports.

from weir import Pipeline, State, Timestamp, agg, aggregate, deduplicate, delta, expect, files, stage, window
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.durations import micros
from state_ops.keyed.keyed_state import KeyedState, ValueState
from state_ops.keyed.per_key.key_state import KeyState
from state_ops.keyed.ttl import READ_AND_WRITE, WRITE, Ttl
from state_ops.rows import aggregates as agg
from state_ops.schema.annotations import meaning_of, renamed_from
from state_ops.schema.descriptors import ListOf, MapOf
from state_ops.schema.state_class import State, Timestamp
from weir.api.arguments import columns_of, gates_of, names_of, side
from weir.api.as_of import as_of
from weir.api.connectors import (
    Batch,
    Capabilities,
    ConfigurationError,
    Connector,
    DamageError,
    Expiring,
    FencedError,
    InputError,
    Lag,
    Limits,
    Lost,
    LostError,
    Opening,
    Part,
    PipelineError,
    Planned,
    Position,
    Published,
    Publisher,
    Rejected,
    Rows,
    Sink,
    SinkOpening,
    Source,
    TakingBack,
    TransientError,
    WeirError,
    chain,
    no_rows,
    sink,
    source,
)
from weir.api.kafka_topics import kafka
from weir.api.lookups import lookup
from weir.api.operators import aggregate, deduplicate, join, operator, window
from weir.api.stateless import select, union
from weir.api.systems import foreach, generator, postgres
from weir.api.top_n import desc, top_n
from weir.connectors.delta.sink import DeltaSink, ReplaceSink, UpsertSink
from weir.connectors.delta_table.source import DeltaTableSource
from weir.connectors.sink import default_sink_name
from weir.connectors.source import default_name
from weir.definition import (
    MAIN,
    Epoch,
    Expected,
    FileSource,
    Gate,
    Input,
    Operator,
    OperatorKind,
    Pipeline,
    Shapes,
    Stage,
    Subtask,
    reading,
)
from weir.operators.functions import Function
from weir.operators.functions.per_key import Fired, check_parameters, slicer_of

__all__ = [
    "Batch",
    "Capabilities",
    "ConfigurationError",
    "Connector",
    "DamageError",
    "Epoch",
    "Expiring",
    "FencedError",
    "Fired",
    "InputError",
    "KeyState",
    "KeyedState",
    "Lag",
    "Limits",
    "ListOf",
    "Lost",
    "LostError",
    "MapOf",
    "Opening",
    "Operator",
    "OperatorKind",
    "Part",
    "Pipeline",
    "PipelineError",
    "Planned",
    "Position",
    "Published",
    "Publisher",
    "Rejected",
    "Rows",
    "Shapes",
    "Sink",
    "SinkOpening",
    "Source",
    "Stage",
    "State",
    "Subtask",
    "TakingBack",
    "Timestamp",
    "TransientError",
    "ValueState",
    "WeirError",
    "agg",
    "aggregate",
    "as_of",
    "chain",
    "deduplicate",
    "delta",
    "desc",
    "expect",
    "files",
    "foreach",
    "generator",
    "join",
    "kafka",
    "lookup",
    "no_rows",
    "on_state",
    "on_table",
    "operator",
    "postgres",
    "renamed_from",
    "select",
    "side",
    "sink",
    "source",
    "stage",
    "top_n",
    "union",
    "window",
]


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


class delta:
    """Delta tables, as sinks and as a source.

    Example:
        >>> from weir import delta
        >>> delta.table("{landing}/orders", event_time="at").name
        'orders'
        >>> delta.append("orders").name, delta.upsert("newest", key="id").key, delta.replace("days", by="day").name
        ('orders', ('id',), 'days')
    """

    @staticmethod
    def table(
        path: str,
        *,
        name: str | None = None,
        event_time: str | None = None,
        changes: bool = False,
        start: str | datetime | Mapping[str, int] = "earliest",
        on_bad: str = "fail",
        on_lost: str = "fail",
        idle_after: str | timedelta | None = "5m",
        max_ahead: str | timedelta | None = None,
        max_future: str | timedelta | None = None,
        evolve: str = "fix",
        archive: bool = False,
    ) -> DeltaTableSource:
        """Read the rows that a Delta table gains, each exactly once, whoever writes it.

        See docs/how-to/source-delta.md.

        Args:
            path: The table's directory or URI, e.g. `{landing}/orders`. A {placeholder} is a param of the pipeline in
                the configuration.
            name: The name under which checkpoints record how far the source has been read; by default the last part of
                the path, or the name of a {placeholder}.
            event_time: The timestamp column that drives the watermark.
            changes: Read rows that are updated and deleted too, as in the table's change data feed, with the columns
                `_change_type`, `_commit_version` and `_commit_timestamp`. False: a version that removes rows holds the
                pipeline.
            start: Where a pipeline begins: "earliest", with all rows that the table has then; "latest"; a time, with
                the first version that was committed then or later; or {"version": n}.
            on_bad: What happens to a row whose event time lies beyond `max_future`: "fail" or "quarantine".
            on_lost: What happens if versions or files are cleaned away before they were read: "fail", or "skip", which
                goes on and records what is missing.
            idle_after: The time after which a table that is read to its end and stays quiet no longer holds event time
                back. None: it always does.
            max_ahead: How much event time the source may be read ahead of the slowest of a stage's inputs.
            max_future: How far an event time may lie ahead of processing time.
            evolve: Columns that the table gains are counted and reported ("fix"), or read from then on ("add").
            archive: Rows that were read are kept in the pipeline's storage as long as a checkpoint needs them.

        Example:
            >>> from weir import delta
            >>> orders = delta.table("{landing}/orders", event_time="at", start={"version": 7})
            >>> orders.name, orders.event_time
            ('orders', 'at')
        """
        return DeltaTableSource(
            name=name or default_name(path),
            path=path,
            event_time=event_time,
            changes=changes,
            start=tuple(start.items()) if isinstance(start, Mapping) else start,
            on_bad=on_bad,
            on_lost=on_lost,
            idle_after=idle_after,
            max_ahead=max_ahead,
            max_future=max_future,
            evolve=evolve,
            archive=archive,
        )

    @staticmethod
    def append(
        table: str,
        event_time: str | None = None,
        *,
        partition_by: str | Sequence[str] = (),
        evolve: str = "fix",
        describe: Mapping[str, str] | None = None,
    ) -> DeltaSink:
        """Append rows, each exactly once, to the Delta table of this name, which only Weir writes.

        Args:
            table: The table's name, or its path or URI. The last part of a path is the name here, in small letters,
                digits and underscores. {Placeholders} are params of the pipeline in the configuration.
            event_time: The timestamp or date column by which a row belongs to a day, for backfills that replace days.
                By default `window_start`, or the source's event time, if the table has it.
            partition_by: The table's partition columns: texts, integers, booleans or dates with few values an epoch,
                since each subtask writes a file for each value.
            evolve: What happens to rows with columns that the table does not have: they are refused ("fix"), or the
                table gets the columns ("add"), null in older rows. A column whose type changes is refused either way.
            describe: Descriptions of columns: {"delay": "Minutes, negative if early."}. Dagster shows them, and a table
                that Weir creates has them as comments.

        Example:
            >>> from weir import delta, files, select
            >>> totals = delta.append("totals", partition_by="day", describe={"delay": "Minutes, negative if early."})
            >>> stage = select("days", files("{landing}/*.parquet"), "day", "delay", sink=totals)
            >>> [sink.name for sink in stage.sinks]
            ['totals']
            >>> delta.append("{warehouse}/Daily Totals").name
            'daily_totals'
        """
        return DeltaSink(
            **_table(table, describe), event_time=event_time, partition_by=names_of(partition_by), evolve=evolve
        )

    @staticmethod
    def upsert(
        table: str,
        key: str | Sequence[str],
        *,
        order_by: str | Sequence[str] = (),
        event_time: str | None = None,
        evolve: str = "fix",
        describe: Mapping[str, str] | None = None,
    ) -> UpsertSink:
        """Keep one row per key in the Delta table of this name: the newest that the stage has handed out.

        If rows have the column `_change_type`, `delete` and `update_preimage` remove the key's row, and `insert` and
        `update_postimage` become the key's row. The table has no such column.

        Args:
            table: As for `append`.
            key: The table's key columns. A row in which one of them is null holds the pipeline.
            order_by: The columns by which the newest row of a key within an epoch is found; by default the row that
                came out last is the newest. It is required if `key` does not contain the stage's key.
            event_time: As for `append`.
            evolve: As for `append`.
            describe: As for `append`.

        Example:
            >>> from weir import agg, aggregate, delta, files
            >>> flights = files("{landing}/*.parquet")
            >>> newest = delta.upsert("delays", key="carrier")
            >>> delays = aggregate("delays", flights, key="carrier", delay=agg.sum("delay"), sink=newest)
            >>> delays.sink.key
            ('carrier',)
        """
        return UpsertSink(
            **_table(table, describe),
            key=names_of(key),
            order_by=names_of(order_by),
            event_time=event_time,
            evolve=evolve,
        )

    @staticmethod
    def replace(
        table: str,
        by: str | Sequence[str] = (),
        *,
        where: str | None = None,
        partition_by: str | Sequence[str] = (),
        event_time: str | None = None,
        describe: Mapping[str, str] | None = None,
    ) -> ReplaceSink:
        """Replace partitions of the Delta table of this name, or all rows that satisfy a condition.

        The rows that an epoch hands out replace the partitions that they have values of.

        Args:
            table: As for `append`.
            by: The table's partition columns, as for `append`. The partitions of an epoch's values are replaced.
            where: Instead of `by`: a condition in Spark's SQL, as a stage's `where`. The rows that satisfy it are
                replaced. A row of an epoch that does not satisfy it holds the pipeline.
            partition_by: With `where`: as for `append`.
            event_time: As for `append`.
            describe: As for `append`.

        Raises:
            PipelineError: Neither `by` nor `where` is said, or both are.

        Example:
            >>> from weir import delta
            >>> delta.replace("days", by="day").partition_by
            ('day',)
            >>> delta.replace("days", where="day >= '2026-01-01'").where
            "day >= '2026-01-01'"
        """
        if bool(by) == (where is not None) or (by and partition_by):
            raise PipelineError(
                f"It is not clear what rows for the table {table} replace.",
                where=f"table {table}",
                next="Say by= (columns, by which the table is partitioned) or where= (a condition).",
            )
        return ReplaceSink(
            **_table(table, describe), partition_by=names_of(by or partition_by), where=where, event_time=event_time
        )


def _table(table: str, describe: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the name of a table, where it is, if that is a path or a URI, or a param with one, and what its columns
    are."""
    texts = describe or {}
    if not isinstance(texts, Mapping) or not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise PipelineError(
            f"describe= of the table {table} is no mapping of columns to texts.",
            where=f"table {table}",
            next='Say e.g. describe={"delay": "Minutes, negative if early."}.',
        )
    place = {"name": default_sink_name(table), "at": table} if "/" in table or "{" in table else {"name": table}
    return {**place, "descriptions": tuple(texts.items())}


def expect(
    expectation: str,
    *,
    on_failure: str = "hold",
    of: str = "rows",
    quarantine_at_most: float | None = None,
    **arguments: Any,
) -> Gate:
    """Return a gate: an expectation of Great Expectations, evaluated in each epoch before the commit.

    See docs/how-to/gates.md.

    Args:
        expectation: The name of the expectation's class.
        on_failure: What happens if the expectation fails. "hold" declines the epoch and ends the run: state, offsets
            and tables stay as they were. "warn" lets the epoch go on: the failed verdict is in its report, its
            checkpoint's row and the log. "quarantine" replays the epoch without the source's rows that fail, and
            appends these to the table <stage>_quarantine. It is for expectations on each row, in a stage that reads a
            source.
        of: The rows that are checked. "rows": those that the stage hands out in the epoch. "state": at most 10,000 rows
            of the stage's state as it would be committed, columns as in `weir state scan`. "figures": one row with the
            stage's figures of the epoch: rows_in, rows_out, rows_late, bytes_total and so on.
        quarantine_at_most: The share of the source's rows that may be set aside, 0 to 1; 0.1 by default.
        **arguments: The expectation's own arguments.

    Example:
        >>> from weir import delta, expect, files, select
        >>> known = expect("ExpectColumnValuesToNotBeNull", column="dest", on_failure="warn")
        >>> flights = select("flights", files("{landing}/*.parquet"), sink=delta.append("flights"), gate=known)
        >>> [gate.title for gate in flights.gates]
        ['ExpectColumnValuesToNotBeNull(column="dest")']
    """
    return Gate(expectation, tuple(sorted(arguments.items())), on_failure, of, quarantine_at_most)


def on_state(stage: str, gate: Gate) -> Expected:
    """Expect a gate to hold for a sample of a stage's state before a restore: for `Pipeline(on_restore=...)`.

    Args:
        stage: The stage's uid.
        gate: The gate, on columns as `weir state scan` shows them.

    Example:
        >>> from weir import expect, on_state
        >>> expected = on_state("totals", expect("ExpectColumnValuesToBeBetween", column="flights", min_value=0))
        >>> expected.of, expected.name
        ('state', 'totals')
    """
    return Expected("state", stage, gate)


def on_table(table: str, gate: Gate) -> Expected:
    """Expect a gate to hold for the newest rows of a table before a restore: for `Pipeline(on_restore=...)`.

    Args:
        table: The sink's name.
        gate: The gate, on the table's columns.

    Example:
        >>> from weir import Pipeline, delta, expect, files, on_table, select
        >>> flights = select("flights", files("{landing}/*.parquet"), sink=delta.append("flights"))
        >>> known = on_table("flights", expect("ExpectColumnValuesToNotBeNull", column="dest"))
        >>> Pipeline("flights", (flights,), on_restore=(known,)).on_restore[0].name
        'flights'
    """
    return Expected("table", table, gate)


def stage(  # as long as what is said of its arguments
    uid: str,
    *,
    source: Input,
    key: str | Sequence[str] | None,
    state: type[State] | None = None,
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    per_key: bool = False,
    output: Mapping[str, Any] | None = None,
    sink: Sink | None = None,
    outputs: Mapping[str, Sink | None] | None = None,
    gate: Gate | Sequence[Gate] = (),
    on_timer: Callable[..., Any] | None = None,
    ttl: str | timedelta | None = None,
    ttl_on: str = WRITE,
    accepts_changes: bool = False,
) -> Callable[[Callable[..., Any]], Stage]:
    """Make a stage of a function of the author.

    The function is `(rows, state, epoch) -> rows`, or with `key=None` `(rows, epoch) -> rows`. It is called with
    bounded batches, possibly several an epoch; a key may span batches. It must be deterministic: the same rows, state
    and epoch give the same rows and state. The annotation of its first parameter says which frame it gets
    (pl.DataFrame, pd.DataFrame, pa.Table); it may return any of them.

    Args:
        uid: The stable name by which the stage's state is found.
        source: A source, another stage, or one of its outputs, `other.output("alerts")`.
        key: Column or columns. None: the stage is stateless. Its rows are not exchanged and come in no order, and it
            takes no arguments about keys, state and time.
        state: The class of a key's state: one typed row, and its lists and maps.
        order_by: Rows reach the function sorted by key, then by these columns, across batches. Without it the order is
            undefined, and the function must not depend on it.
        where: A condition in Spark SQL. The rows that it drops are counted.
        select: The columns that all other arguments are about, in Spark SQL: ["id", "price * 2 AS twice"]. They are
            made of the rows that `where` keeps, and cost less than a `select` stage in front.
        transform: Instead of `select`: a stateless, deterministic function on a Spark DataFrame.
        null_keys: Rows with a null in the key: "fail", or "drop", which counts them.
        per_key: The function is `(key, rows, state, epoch) -> rows | None` instead. It is called once for each key of a
            batch, with that key's rows (a frame, or list[dict], by the second parameter's annotation) and that key's
            state, a `KeyState`. `on_timer` is then `(key, fired, state, epoch)`. Convenient, and much slower than
            columns.
        output: The columns that per-key functions return, with types as in a State class, {"user": str}, or Arrow's. It
            is required for a function that returns a list of dicts. With several outputs, by output:
            {"main": {...}, "alerts": {...}}.
        sink: The table that gets the rows that the function returns.
        outputs: Further outputs of the function by name, each with its sink, or None: {"alerts":
            delta.append("alerts"), "audit": None}. The function then returns, or yields, a frame or a dict of frames
            by output, in which "main" is the main one. Other stages read `this.output("alerts")`.
        gate: Expectations on the output, the state or the figures of each epoch (`expect`).
        on_timer: A function `(fired, state, epoch) -> rows` that is called at the barrier when timers are due that the
            stage set with `state.timers`. `fired` has the key columns, `at` (timestamp, UTC) and `domain` ("event" or
            "processing"). It has a key at most once: a key's timers come one a call, in order of time. The function
            returns rows like the stage's own.
        ttl: How long ("30d") state is kept after it was touched, by `epoch.now`. After that it is never seen again.
        ttl_on: "write": only a write touches state. "read_and_write": a read touches it too.
        accepts_changes: The function looks at the column `_change_type`, which says which rows take others back. False:
            rows with this column are refused.

    Returns:
        A decorator, which makes a `Stage` of the function.

    Raises:
        PipelineError: Arguments do not go together, or an argument is missing.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, KeyedState, State, agg, files, stage, testing
        >>> class Total(State):
        ...     spent: int = 0
        >>> @stage("totals", source=files("{landing}/*.parquet"), key="customer", state=Total)
        ... def totals(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        ...     return state.fold(rows, spent=agg.sum("price"))
        >>> run = testing.run(totals, state={"ann": Total(spent=100)})
        >>> run.epoch([{"customer": "ann", "price": 20}, {"customer": "ann", "price": 5}]).to_dicts()
        [{'customer': 'ann', 'spent': 125}]
        >>> run.state["ann"]
        Total(spent=125)
    """

    lifetime = _ttl(uid, ttl, ttl_on)
    if key is not None and (not key or state is None):
        raise PipelineError(
            f"The stage {uid} has no {'state' if key else 'key'}.",
            where=f"stage {uid}",
            next='Say key="column" (or several) and state=; or key=None without state for a stage that remembers'
            " nothing.",
        )
    if output is not None and not per_key:
        raise PipelineError(
            f"{uid} declares output=, but its function works on whole batches: what it returns for an empty frame "
            f"tells.",
            where=f"stage {uid}",
            next="Leave it out, or say per_key=True.",
        )
    beside = tuple((outputs or {}).items())
    declared = _declared(uid, output, [name for name, _ in beside])
    if on_timer is not None and per_key:
        check_parameters(on_timer, "fired")
    elif on_timer is not None:
        frames.converter(on_timer)

    def decorated(function: Callable[..., Any]) -> Stage:
        if per_key:
            slicer_of(function)
        else:
            frames.converter(function)
        return Stage(
            uid=uid,
            **reading(source),
            key=names_of(key or ()),
            operator=Function(function, state, on_timer, lifetime, per_key, declared, accepts_changes),
            order_by=names_of(order_by),
            where=where,
            columns=columns_of(uid, select),
            transform=transform,
            null_keys=null_keys,
            sink=sink,
            outputs=beside,
            gates=gates_of(gate),
            description=(function.__doc__ or "").strip(),
        )

    return decorated


def _declared(uid: str, output: Mapping[str, Any] | None, beside: Sequence[str]) -> tuple[tuple[str, pa.Schema], ...]:
    """Return by output the columns that a stage declares.

    Args:
        beside: The names of its outputs beside the main one.
    """
    if output is None:
        return ()
    by_output = {name: columns for name, columns in output.items() if isinstance(columns, Mapping)}
    if not by_output and not beside:
        return ((MAIN, _columns_of(uid, output)),)
    missing = [name for name in beside if name not in by_output]
    unknown = [name for name in output if name not in (MAIN, *beside)]
    if missing or unknown or len(by_output) < len(output):
        raise PipelineError(
            f"{uid} has several outputs, and output= does not say the columns of "
            f"{', '.join(missing) or 'each of them and of nothing else'}.",
            where=f"stage {uid}",
            next='Say them by output: output={"main": {"column": int}, '
            + ", ".join(f'"{name}": {{...}}' for name in beside)
            + "}.",
        )
    return tuple((name, _columns_of(uid, columns)) for name, columns in by_output.items())


def _columns_of(uid: str, columns: Mapping[str, Any]) -> pa.Schema:
    """Columns with Arrow types, from such or from annotations."""
    fields = []
    for name, kind in columns.items():
        try:
            fields.append((name, kind if isinstance(kind, pa.DataType) else meaning_of(kind).type))
        except ValueError as error:
            raise PipelineError(
                f"output= says of the column {name!r} what is no type: {error}.",
                where=f"stage {uid}",
                next=f"Say e.g. {{{name!r}: int}}, or one of Arrow's types.",
            ) from error
    return pa.schema(fields)


def _ttl(uid: str, ttl: str | timedelta | None, ttl_on: str) -> Ttl | None:
    where = f"stage {uid}"
    if ttl_on not in (WRITE, READ_AND_WRITE):
        raise PipelineError(
            f"ttl_on={ttl_on!r} is no policy.", where=where, next=f'Say "{WRITE}" or "{READ_AND_WRITE}".'
        )
    if ttl is None:
        return None
    length = micros(ttl, where, "ttl")
    if length <= 0:
        raise PipelineError(
            f"ttl={ttl!r} would keep nothing.", where=where, next="Say how long, e.g. 30d, or leave it out."
        )
    return Ttl(length, on_read=ttl_on == READ_AND_WRITE)
