"""`delta`: Delta tables, as sinks and as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from state_ops.errors import PipelineError
from weir.api.arguments import names_of
from weir.connectors.delta.sink import ReplaceSink, UpsertSink
from weir.definition.delta_sink import DeltaSink
from weir.definition.sink import default_sink_name
from weir.definition.source import default_name

if TYPE_CHECKING:
    from weir.connectors.delta_table.source import DeltaTableSource


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
        from weir.connectors.delta_table.source import DeltaTableSource

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
