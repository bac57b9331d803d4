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
from weir.definition.sink import default_sink_name
from weir.definition.source import start_of


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
    """Generate rows, the same ones each time.

    The columns are `seq` (int64), `key` (int64), the event time (timestamp) and `value` (float64). See
    docs/how-to/source-generator.md.

    Args:
        name: The name under which checkpoints record how far the source has been read.
        rate: Rows in a second of event time.
        keys: The number of keys.
        skew: 0: all keys come equally often. Above 0: key k comes in proportion to (k + 1) ** -skew.
        late: The share of rows that come late, 0 to 1.
        lateness: The most by which such a row is late.
        end: The number of rows; None: without end.
        first: The event time of row 0.
        paced: A row arrives when the clock reaches its event time. False: all rows are there at once.
        seed: Another seed gives other keys, values and late rows.
        event_time: The name of the column with the event time.
        start: Where a pipeline begins: "earliest", "latest", a time, or a row: {"next": 1000}.
        idle_after: The time without rows after which the source no longer holds back the other inputs of a stage. None:
            it always does.
        max_ahead: How much event time the source may be read ahead of the slowest of a stage's inputs.

    Example:
        >>> from weir import Limits, Opening, generator
        >>> source = generator(end=1000, keys=10, rate=100)
        >>> connector = source.open(Opening("docs", str, {}))
        >>> planned = connector.plan(connector.begin("earliest"), Limits(parts=1, rows=3, bytes=1 << 20))
        >>> [batch.rows.column_names for batch in connector.read(planned.parts[0])]
        [['seq', 'key', 'event_time', 'value']]
        >>> planned.position
        {'next': 3}
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
    """Queries and tables of Postgres, to read and to write."""

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
        """Read the rows of a query over tables to which rows are only added, each exactly once.

        Rows that are read are archived. See docs/how-to/source-postgres.md.

        Args:
            query: A SELECT without ORDER BY and LIMIT.
            cursor: The query's column that only rises, of type xid8 (`DEFAULT pg_current_xact_id()`).
            name: The name under which checkpoints record how far the source has been read.
            event_time: The timestamp column that drives the watermark.
            may_miss: Accept a cursor of another type. A row that is committed with a cursor below those that were read
                is then never read.
            start: Where a pipeline begins: "earliest", "latest", a time of a cursor that is one, or a position as
                `weir checkpoints` shows it.
            on_bad: What becomes of a row with a value that Arrow does not have: "fail" or "quarantine".
            idle_after: The time without rows after which the source no longer holds back the other inputs of a stage.
                None: it always does.
            max_ahead: How much event time the source may be read ahead of the slowest of a stage's inputs.
            max_future: How far an event time may lie ahead of processing time.
            connection: The name below `connections` of the configuration that has libpq's options.

        Example:
            >>> from weir import postgres
            >>> orders = postgres("SELECT id, tx, at FROM orders", cursor="tx", name="orders", event_time="at")
            >>> orders.name, orders.kind
            ('orders', 'postgres')
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
        """Write each row to a table of Postgres exactly once.

        See docs/how-to/sink-postgres.md.

        Args:
            table: The table's name, or schema.name, exactly as it is spelled. It is created if it is absent.
            key: The columns by which rows replace each other: the last row of a key stays. Without a key all rows are
                added.
            name: The sink's name; by default that of the table, `shop_revenue` for Shop.Revenue.
            connection: The name below `connections` of the configuration that has libpq's options.

        Example:
            >>> from weir import postgres
            >>> sink = postgres.sink("shop.revenue", key="day")
            >>> sink.name, sink.key
            ('shop_revenue', ('day',))
        """
        columns = (key,) if isinstance(key, str) else tuple(key)
        return PostgresSink(name=name or default_sink_name(table), table=table, key=columns, connection=connection)


postgres = _Postgres()


def foreach(function: Function, *, name: str | None = None) -> ForeachSink:
    """Call a function with the rows of each checkpoint, in order.

    A function has no transactions, so the pipeline cannot deliver exactly once to it. With `delivery="at_least_once"`
    the function is called again after a crash: it must then do the same, or go by the checkpoint's id. With
    "at_most_once" it is never called again, and the rows of an epoch that failed are lost.

    Args:
        function: Called as `function(rows, checkpoint)` in the coordinator's process, with a `pyarrow.Table` and the
            checkpoint's id. It is not called for epochs without rows.
        name: The sink's name; by default that of the function.

    Raises:
        PipelineError: `function` cannot be called.

    Example:
        >>> from weir import Pipeline, files, foreach, select
        >>> def send(rows, checkpoint):
        ...     print(f"{rows.num_rows} rows of checkpoint {checkpoint}")
        >>> sent = select("sent", files("{landing}/*.parquet"), "id", sink=foreach(send))
        >>> Pipeline("sending", (sent,), delivery="at_least_once").sinks[0].name
        'send'
    """
    if not callable(function):
        raise PipelineError(
            f"{function!r} is no function.", next="Say foreach(send), where send takes rows and a checkpoint."
        )
    return ForeachSink(name=name or getattr(function, "__name__", "foreach").strip("_<>"), function=function)
