"""Generated rows, tables of Postgres, and functions as sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from state_ops.durations import micros
from state_ops.errors import PipelineError
from weir.connectors.foreach import ForeachSink, Function
from weir.connectors.generator import FIRST, GeneratorSource
from weir.connectors.postgres.sink import PostgresSink
from weir.connectors.postgres.source import PostgresSource
from weir.connectors.sink import default_sink_name
from weir.connectors.source import start_of


def generator(
    *,
    name: str = "generator",
    rate: float = 1000,
    keys: int = 1000,
    skew: float = 0,
    late: float = 0,
    lateness: str | timedelta = "1m",
    end: int | None = None,
    first: datetime = FIRST,
    paced: bool = False,
    seed: int = 0,
    event_time: str = "event_time",
    start: str | datetime | Mapping[str, Any] = "earliest",
    idle_after: str | timedelta | None = "5m",
    max_ahead: str | timedelta | None = None,
) -> GeneratorSource:
    """Generate rows, the same ones for everybody. docs/how-to/source-generator.md says more.

    Args:
        name: By which checkpoints record how far the source has been read.
        rate: Rows in a second of event time.
        keys: How many keys there are.
        skew: 0: all keys come alike often. Above, key k comes in proportion to (k + 1) ** -skew.
        late: The share of rows that come late.
        lateness: By how much such a row is late at most.
        end: How many rows there are; None: without end.
        first: The event time of row 0.
        paced: A row is there when the clock reaches its event time. Else all rows are there at once.
        seed: Other seeds give other keys, values and late rows.
        event_time: The name of the column with the event time.
        start: Where a pipeline begins: "earliest", "latest", a time, or a row: {"next": 1000}.
        idle_after: Beside other inputs of a stage: for how long it has had no rows before it holds these back no more.
            None: never.
        max_ahead: Beside other inputs of a stage: how much event time it may be read before the slowest of these.
    """
    return GeneratorSource(
        name=name,
        rate=rate,
        keys=keys,
        skew=skew,
        late=late,
        lateness=micros(lateness, f"source {name}", "lateness"),
        end=end,
        first=first,
        paced=paced,
        seed=seed,
        event_time=event_time,
        start=start_of(start),
        idle_after=idle_after,
        max_ahead=max_ahead,
    )


class _Postgres:
    def __call__(
        self,
        query: str,
        *,
        cursor: str,
        name: str = "postgres",
        event_time: str | None = None,
        may_miss: bool = False,
        start: str | datetime | Mapping[str, Any] = "earliest",
        on_bad: str = "fail",
        idle_after: str | timedelta | None = "5m",
        max_ahead: str | timedelta | None = None,
        max_future: str | timedelta | None = None,
        connection: str | None = None,
    ) -> PostgresSource:
        """Read the rows of a query over tables to which rows are only added, each exactly once. Rows that are read are
        archived.
        docs/how-to/source-postgres.md says more.

        Args:
            query: A SELECT without ORDER BY and LIMIT.
            cursor: Its column that only rises, of type xid8 (`DEFAULT pg_current_xact_id()`).
            name: By which checkpoints record how far the source has been read.
            event_time: The timestamp column that drives the watermark.
            may_miss: A cursor of another type will do; rows that are committed late, below what was read, are never
                read.
            start: Where a pipeline begins: "earliest", "latest", a time of a cursor that is one, or a position as
                `weir checkpoints` shows it.
            on_bad: What becomes of a row with a value that Arrow does not have: "fail" or "quarantine".
            idle_after: Beside other inputs of a stage: for how long it has had no rows before it holds these back no
                more. None: never.
            max_ahead: Beside other inputs of a stage: how much event time it may be read before the slowest of these.
            max_future: How far an event time may lie ahead of processing time.
            connection: The name below `connections` of the configuration that has libpq's options.
        """
        return PostgresSource(
            name=name,
            query=query,
            cursor=cursor,
            event_time=event_time,
            may_miss=may_miss,
            start=start_of(start),
            on_bad=on_bad,
            idle_after=idle_after,
            max_ahead=max_ahead,
            max_future=max_future,
            connection=connection,
        )

    @staticmethod
    def sink(
        table: str, *, key: str | Sequence[str] = (), name: str | None = None, connection: str | None = None
    ) -> PostgresSink:
        """Write each row to a table of Postgres exactly once. docs/how-to/sink-postgres.md says more.

        Args:
            table: Its name, or schema.name, exactly as it is spelled. It is created if it is absent.
            key: The columns by which rows replace each other: the last one of a key stays. Without it rows are added.
            name: The sink's name; by default that of the table, `shop_revenue` for Shop.Revenue.
            connection: The name below `connections` of the configuration that has libpq's options.
        """
        columns = (key,) if isinstance(key, str) else tuple(key)
        return PostgresSink(name=name or default_sink_name(table), table=table, key=columns, connection=connection)


postgres = _Postgres()


def foreach(function: Function, *, name: str | None = None) -> ForeachSink:
    """Call a function with the rows of each checkpoint (a pyarrow.Table) and its id, in order, at least once.

    It has no transactions, so a pipeline with it says `delivery="at_least_once"`: after a crash the function is called
    again, and what it does must then be the same, or go by the id. Or it says "at_most_once": then it is never called
    again, and the rows of an epoch that failed are lost.

    Args:
        function: Called as `function(rows, checkpoint)` in the coordinator's process; epochs without rows call nothing.
        name: The sink's name; by default that of the function.
    """
    if not callable(function):
        raise PipelineError(
            f"{function!r} is no function.", next="Say foreach(send), where send takes rows and a checkpoint."
        )
    return ForeachSink(name=name or getattr(function, "__name__", "foreach").strip("_<>"), function=function)
