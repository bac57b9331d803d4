"""Operators: one frozen value for each, and `Epoch`, which tells a stage's function about its epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from state_ops.ids import CheckpointId
from state_ops.outputs import LATE
from state_ops.outputs import MAIN as MAIN
from state_ops.rows.aggregates import Agg
from weir.connectors.lookups.lookup_table import Pinned
from weir.connectors.sink import Sink
from weir.connectors.source import Source as Source
from weir.definition.calendars import Calendar


@dataclass(frozen=True, slots=True)
class Epoch:
    """The facts about an epoch that a stage's function may use. They are the same when the epoch is replayed.

    Attributes:
        id: The checkpoint's id.
        now: Processing time in UTC, fixed by the coordinator. It never decreases.
        watermark: Event time before this epoch in UTC, by which lateness is judged; None before the first. A watermark
            beyond Python's years is `datetime.min` or `datetime.max`.
        subtask: The number of the subtask that calls the function, from 0.
        parallelism: The number of the stage's subtasks.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, files, stage, testing
        >>> @stage("stamped", source=files("{landing}/*.parquet"), key=None)
        ... def stamped(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
        ...     return rows.with_columns(epoch=pl.lit(epoch.id))
        >>> testing.run(stamped).epoch([{"order": 7}]).to_dicts()
        [{'order': 7, 'epoch': 1}]
    """

    id: CheckpointId
    now: datetime
    watermark: datetime | None
    subtask: int
    parallelism: int


@dataclass(frozen=True, slots=True)
class Window:
    """Windows of one size, which tumble if `every` is their size, and hop if it is less.

    Attributes:
        on: The timestamp column. None: all rows of an epoch are of its processing time.
        size: In microseconds, like all times here.
        every: Between the starts of two windows.
        offset: By which the starts are shifted from 1970-01-01 UTC.
        lateness: How far behind the newest event time rows may come.
        aggregates: By output column.
        late: The sink that gets late rows.
    """

    on: str | None
    size: int
    every: int
    offset: int
    lateness: int
    aggregates: tuple[tuple[str, Agg], ...]
    late: Sink | None


@dataclass(frozen=True, slots=True)
class CalendarWindow(Window):
    """Windows that tumble by the calendar. Their length differs, so `size` and `every` say nothing but that they do not
    overlap.

    Attributes:
        calendar: When they begin.
    """

    calendar: Calendar


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Sessions: rows of a key that are closer than `gap`, in microseconds. All else is like in `Window`.

    Attributes:
        included: Rows exactly a gap apart are one session.
    """

    on: str | None
    gap: int
    lateness: int
    aggregates: tuple[tuple[str, Agg], ...]
    late: Sink | None
    included: bool = False

    @property
    def length(self) -> int:
        """The microseconds for which the session of a single row is open. Sessions that overlap by it become one."""
        return self.gap + self.included

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregates", tuple((name, agg.mergeable) for name, agg in self.aggregates))


@dataclass(frozen=True, slots=True)
class Deduplication:
    """The first row of each key.

    Attributes:
        ttl: Microseconds after which a key is forgotten. None: never.
        on: The column whose event time the ttl goes by. None: by processing time.
        late: The table that gets rows that are too old to tell.
    """

    ttl: int | None
    on: str | None
    late: Sink | None


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Running aggregates per key, by output column; first and last by their `order_by`.

    Attributes:
        changes: What is handed out says by `_change_type` what became of a key's row.
    """

    aggregates: tuple[tuple[str, Agg], ...]
    changes: bool = False


INNER, LEFT, RIGHT, FULL, SEMI, ANTI = "inner", "left", "right", "full", "semi", "anti"


JOINS = (INNER, LEFT, RIGHT, FULL, SEMI, ANTI)


LATE_TIME = "event_time"  # of a late row of either side


@dataclass(frozen=True, slots=True)
class Join:
    """Rows of two inputs with one key, whose event times lie near each other where `lower` and `upper` are given.

    Attributes:
        how: One of `JOINS`.
        lower: How much later than the left row's time the right row's is at least, in microseconds; negative: earlier.
            None: times do not matter.
        upper: How much later at most.
        ttl: Without them, after how many microseconds of processing time a row is forgotten. None: never.
        times: The column of the event time on either side; None where times do not matter.
        lateness: How far behind the newest event time rows may come, in microseconds.
        suffix: Of the right side's columns whose names the left side has too.
        late: The sink that gets late rows of either side.
    """

    how: str
    lower: int | None
    upper: int | None
    ttl: int | None
    times: tuple[str, str] | None
    lateness: int
    suffix: str
    late: Sink | None = None

    @property
    def behind(self) -> int:
        """The microseconds that the event time of a row may be behind the watermark when the row is handed out."""
        return 0 if self.lower is None or self.upper is None else max(self.upper, -self.lower, 0)

    def times_in(self, output: str) -> tuple[str, ...]:
        """Return the columns of an output in which each row has an event time, the best first; none: there is no such
        column.

        A row that found no partner has nulls for the other side.
        """
        if output == LATE:
            return (LATE_TIME,)
        if self.times is None or self.how == FULL:
            return ()
        left, right = self.times
        return (right + self.suffix, right) if self.how == RIGHT else (left,)


@dataclass(frozen=True, slots=True)
class AsOf(Join):
    """Each row of the left side with the newest one of the right side that is not later than it.

    Attributes:
        tolerance: How much older it may be, in microseconds. None: as old as it is.
        wait: A row waits until the watermark says that no other one can come for it.
    """

    tolerance: int | None = None
    wait: bool = True


@dataclass(frozen=True, slots=True)
class TopN:
    """The first rows of each key, by some columns.

    Attributes:
        by: The columns, and whether the largest value comes first.
        n: How many rows.
        ties: Rows that are equal to the n-th in `by` are among them.
        rank: The column that is handed out with each row's rank, from 1. None: ranks are not handed out.
        until: The column with the event time at which the ranks of a key are final. None: they never are.
        ttl: Without it, microseconds of processing time after which a key of which no row has come is forgotten. None:
            never.
        lateness: How far behind the newest event time rows may come, in microseconds.
        late: The table that gets rows whose ranks are final already.
    """

    by: tuple[tuple[str, bool], ...]
    n: int
    ties: bool
    rank: str | None
    until: str | None
    ttl: int | None
    lateness: int
    late: Sink | None

    @property
    def on(self) -> str | None:
        return self.until


@dataclass(frozen=True, slots=True)
class Lookup:
    """Each row with the rows of a table that have its key, as of a version that the plan of its epoch has.

    Attributes:
        table: A Delta table's directory or URI, or one of a file that ends with .parquet, with {placeholders} from the
            configuration.
        on: The key columns: of each the row's name and the table's.
        how: `LEFT` or `INNER`.
        columns: The columns of the table that are handed out. None: all that it has when it is first looked at.
        suffix: Of the table's columns whose names the rows have too.
        on_lost: What to do about a version that is gone: "fail", or "newest".
        pinned: The table as of the version of the epoch at hand; None outside of epochs.
    """

    table: str
    on: tuple[tuple[str, str], ...]
    how: str
    columns: tuple[str, ...] | None
    suffix: str
    on_lost: str
    pinned: Pinned | None = field(default=None, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns of rows."""
        return tuple(name for name, _ in self.on)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """The key columns of the table."""
        return tuple(name for _, name in self.on)
