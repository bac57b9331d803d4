"""Windows of time: the definitions. `sized` has what works on windows of one size and of the calendar, `sessions` on
sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.durations import shown
from state_ops.rows.aggregates import Agg
from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, Operator, OperatorKind, Shapes, Stage, Subtask
from weir.definition.names import END as END
from weir.definition.names import START as START
from weir.definition.sink import Sink
from weir.operators import aggregate_columns
from weir.operators.windows.calendars import Calendar

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class AnyWindow(OperatorKind):
    """Windows of every kind.

    Attributes:
        on: The timestamp column. None: all rows of an epoch are of its processing time.
    """

    kind: ClassVar[str] = "window"
    rules: ClassVar[str] = "windows"
    slot: ClassVar[str] = "window"
    sooner: ClassVar[str] = "open windows close that much sooner, and rows for them are late from then on"
    longer: ClassVar[str] = "open windows stay open that much longer, and rows for those that have closed stay late"

    on: str | None

    def _opened(self, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pl.DataFrame]:
        """Yield open windows: key columns, their bounds in microseconds, the fields of the aggregates."""
        raise NotImplementedError

    def _none(self, keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
        """Return the columns of `_opened`."""
        raise NotImplementedError

    @property
    def end_before(self) -> int:
        """The microseconds by which the end that is handed out is before that in state."""
        return 0

    @property
    def closes(self) -> bool:
        return True

    def opened(
        self, stage: Stage, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
    ) -> Iterator[pa.Table]:
        from weir.operators.windows.rows import as_people_see

        return (as_people_see(stage, self, windows) for windows in self._opened(keys, state, backend, groups))

    def opened_schema(self, stage: Stage, keys: pa.Schema, state: StateSchema) -> pa.Schema:
        from weir.operators.windows.rows import as_people_see

        return as_people_see(stage, self, self._none(keys, state)).schema

    @property
    def identity(self) -> tuple[str, ...]:
        return (START, END)

    @property
    def is_opened_as_output(self) -> bool:
        return True

    @property
    def time_column(self) -> str | None:
        return self.on

    @property
    def by_clock(self) -> bool:
        return self.on is None

    def mixes_rows(self) -> str:
        return "hands out aggregates, which come from many rows"

    def reads(self, stage: Stage) -> frozenset[str] | None:
        if self.late is not None:
            return None
        own = () if self.on is None else (self.on,)
        return frozenset({*stage.key, *stage.order_by, *aggregate_columns.columns_read(self.aggregates), *own})

    def clocked_state(self, stage: Stage) -> tuple[str, ...]:
        return (START, END) if self.by_clock else ()

    def clocked_output(self, stage: Stage) -> tuple[str, ...]:
        return (START, END) if self.by_clock else ()

    def span(self, row: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        if self.on is None or row.get(START) is None or row.get(END) is None:
            return None
        return self.on, row[START], row[END]

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        if output != MAIN:
            return OperatorKind.lineage(self, stage, columns, inputs, output)
        bounds = {} if self.on is None else dict.fromkeys((START, END), self.on)
        return aggregate_columns.lineage(stage.key, self.aggregates, inputs[0], bounds)

    def texts(self) -> dict[str, str]:
        return {
            **aggregate_columns.texts(self.aggregates),
            START: "When the window begins.",
            END: "When it ends; rows of that moment are not in it.",
        }

    def _meaning(self) -> dict[str, Any]:
        return {"on": self.on, "aggregates": aggregate_columns.recorded(self.aggregates)}


@dataclass(frozen=True, slots=True)
class Window(AnyWindow):
    """Windows of one size, which tumble if `every` is their size, and hop if it is less.

    Attributes:
        size: In microseconds, like all times here.
        every: Between the starts of two windows.
        offset: By which the starts are shifted from 1970-01-01 UTC.
        lateness: How far behind the newest event time rows may come.
        aggregates: By output column.
        late: The sink that gets late rows.
    """

    size: int
    every: int
    offset: int
    lateness: int = field()
    aggregates: tuple[tuple[str, Agg], ...] = field()
    late: Sink | None = field()

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.windows.sized import window_shapes

        return window_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.windows.sized import WindowOperator

        return WindowOperator(self, subtask)

    def meaning(self) -> dict[str, Any]:
        shape = {"every": self.every, "offset": self.offset}
        usual = {"every": self.size, "offset": 0}
        return {**self._meaning(), "size": self.size, **(shape if shape != usual else {})}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "size" in meaning

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> Self:
        every, offset = meaning.get("every", meaning["size"]), meaning.get("offset", 0)
        aggregates = aggregate_columns.of_record(meaning["aggregates"])
        return cls(meaning["on"], meaning["size"], every, offset, 0, aggregates, None)

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        every = f" every {shown(meaning['every'])}" if meaning.get("every", meaning["size"]) != meaning["size"] else ""
        offset = f" shifted by {shown(meaning['offset'])}" if meaning.get("offset") else ""
        return f"{shown(meaning['size'])}{every}{offset} {_on_and_aggregates(meaning)}"

    def _opened(self, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pl.DataFrame]:
        from weir.operators.windows.sized import open_windows

        return open_windows(self, keys, state, backend, groups)

    def _none(self, keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
        from weir.operators.windows.sized import no_windows

        return no_windows(self, keys, state)


@dataclass(frozen=True, slots=True)
class CalendarWindow(Window):
    """Windows that tumble by the calendar. Their length differs, so `size` and `every` say nothing but that they do not
    overlap.

    Attributes:
        calendar: When they begin.
    """

    calendar: Calendar

    def meaning(self) -> dict[str, Any]:
        return {**self._meaning(), "calendar": asdict(self.calendar)}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "calendar" in meaning

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> CalendarWindow:
        aggregates = aggregate_columns.of_record(meaning["aggregates"])
        return cls(meaning["on"], 1, 1, 0, 0, aggregates, None, Calendar(**meaning["calendar"]))

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        return f"{Calendar(**meaning['calendar'])} {_on_and_aggregates(meaning)}"


@dataclass(frozen=True, slots=True)
class SessionWindow(AnyWindow):
    """Sessions: rows of a key that are closer than `gap`, in microseconds. All else is like in `Window`.

    Attributes:
        included: Rows exactly a gap apart are one session.
    """

    gap: int
    lateness: int = field()
    aggregates: tuple[tuple[str, Agg], ...] = field()
    late: Sink | None = field()
    included: bool = False

    @property
    def length(self) -> int:
        """The microseconds for which the session of a single row is open. Sessions that overlap by it become one."""
        return self.gap + self.included

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregates", tuple((name, agg.mergeable) for name, agg in self.aggregates))

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.windows.sessions import session_shapes

        return session_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.windows.sessions import SessionOperator

        return SessionOperator(self, subtask)

    def meaning(self) -> dict[str, Any]:
        return {**self._meaning(), "gap": self.gap, **({"included": True} if self.included else {})}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "gap" in meaning

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> SessionWindow:
        aggregates = aggregate_columns.of_record(meaning["aggregates"])
        return cls(meaning["on"], meaning["gap"], 0, aggregates, None, meaning.get("included", False))

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        included = " included" if meaning.get("included") else ""
        return f"sessions with a gap of {shown(meaning['gap'])}{included} {_on_and_aggregates(meaning)}"

    @property
    def identity(self) -> tuple[str, ...]:
        return (START,)  # a session that grows keeps it, unless rows came that are older than it

    @property
    def end_before(self) -> int:
        return int(self.included)

    def _opened(self, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pl.DataFrame]:
        from weir.operators.windows.sessions import open_sessions

        return open_sessions(keys, state, backend, groups)

    def _none(self, keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
        from weir.operators.windows.session_store import no_sessions

        return no_sessions(keys, state)


def _on_and_aggregates(meaning: Mapping[str, Any]) -> str:
    return f"by {meaning['on'] or 'processing time'} with {aggregate_columns.shown(meaning['aggregates'])}"
