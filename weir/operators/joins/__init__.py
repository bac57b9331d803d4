"""Joins of two inputs: the definitions. `join` and `as_of` have what works on rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from state_ops.durations import shown
from state_ops.records.operator_stats import OperatorStats
from state_ops.schema.descriptors import Collection
from weir.definition import LATE, Finding, Operator, OperatorKind, Shapes, Stage, Subtask, Verdict
from weir.definition.findings import refused
from weir.definition.sink import Sink
from weir.operators import sides
from weir.operators.forgotten import rows_forgotten_otherwise

INNER, LEFT, RIGHT, FULL, SEMI, ANTI = "inner", "left", "right", "full", "semi", "anti"
JOINS = (INNER, LEFT, RIGHT, FULL, SEMI, ANTI)
LATE_TIME = "event_time"  # of a late row of either side
LATE_SIDE = "side"  # of a late row: "left" or "right"


@dataclass(frozen=True, slots=True)
class Join(OperatorKind):
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

    kind: ClassVar[str] = "join"
    rules: ClassVar[str] = "rules of what is joined"
    slot: ClassVar[str] = "join"

    how: str
    lower: int | None
    upper: int | None
    ttl: int | None
    times: tuple[str, str] | None
    lateness: int = field()
    suffix: str = field()
    late: Sink | None = None

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.joins.join import join_shapes

        return join_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.joins.join import JoinOperator

        return JoinOperator(self, subtask)

    def given_to_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        return tuple(rows.names)

    @property
    def forgets(self) -> int | None:
        return self.ttl

    @property
    def is_arrival_in_state(self) -> bool:
        return True  # rows have numbers

    def meaning(self) -> dict[str, Any]:  # a row says itself when it goes: another ttl holds for new ones
        return {"how": self.how, "lower": self.lower, "upper": self.upper, "times": self.times and list(self.times)}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "lower" in meaning

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        if meaning["lower"] is None:
            return f"{meaning['how']}, at any time"
        return f"{meaning['how']}, from {shown(meaning['lower'])} to {shown(meaning['upper'])} later"

    def changed(self, stage: Stage, recorded: OperatorStats, shapes: Shapes) -> Iterator[Finding]:
        yield from rows_forgotten_otherwise(stage, recorded)
        yield from _sides_swapped(stage, recorded)
        if self.how not in (SEMI, ANTI):
            yield from self._columns_renamed(stage, recorded, shapes)

    def _columns_renamed(self, stage: Stage, recorded: OperatorStats, shapes: Shapes) -> Iterator[Finding]:
        """Yield a column of the right side that would be handed out under another name.

        A column that comes on the left side takes its name from the right side's, as another suffix does, and what
        tables have under it would be of both.
        """
        from weir.operators.joins.join import row_columns

        suffix_before = self.suffix if recorded.suffix is None else recorded.suffix
        was, now = [
            dict(zip(("left", "right"), map(row_columns, collections), strict=False))
            for collections in (
                (Collection.from_json(*item) for item in recorded.collections.items()),
                shapes.collections,
            )
        ]
        for name in was.get("right", ()):
            before = name + suffix_before if name in {*was["left"], *shapes.keys.names} else name
            after = name + self.suffix if name in {*now["left"], *shapes.keys.names} else name
            if name in now["right"] and before != after:
                what = f"the right side's column {name} was handed out as {before}, and would now be as {after}"
                next = (
                    f"Rename {name} in the transform of one side, or put suffix= back, so that the right side's is"
                    f" {before} again; or give the stage a new uid: it then starts with empty state."
                )
                yield Finding("stage", stage.uid, "columns", Verdict.REFUSED, what, next)

    @property
    def behind(self) -> int:
        return 0 if self.lower is None or self.upper is None else max(self.upper, -self.lower, 0)

    @property
    def goes_by_watermark(self) -> bool:
        return True

    def times_in(self, output: str) -> tuple[str, ...] | None:
        """Return the columns of an output in which each row has an event time, the best first; none: there is no such
        column.

        A row that found no partner has nulls for the other side.
        """
        if self.times is None:
            return None
        if output == LATE:
            return (LATE_TIME,)
        if self.how == FULL:
            return ()
        left, right = self.times
        return (right + self.suffix, right) if self.how == RIGHT else (left,)

    @property
    def tells_inputs_apart(self) -> bool:
        return True

    def clocked_state(self, stage: Stage) -> tuple[str, ...]:
        from weir.operators.joins.join import KEPT_UNTIL, names_in_state

        if self.times is not None:
            return ()
        return tuple(f"{name}.{KEPT_UNTIL}" for name in names_in_state(stage.key))

    def as_it_came(self, stage: Stage, late: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        side = int(late[LATE_SIDE] == "right")
        row = {name: value for name, value in late.items() if name not in (*stage.key, LATE_SIDE, LATE_TIME)}
        if side:
            row |= {name.removesuffix(self.suffix): row[name] for name in row if name.endswith(self.suffix)}
        keys = {theirs: late[name] for name, theirs in zip(stage.key, stage.inputs[side].key, strict=True)}
        return side, {**row, **keys}

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        keys = [dict(zip(stage.key, input.key, strict=True)) for input in stage.inputs]
        origins: dict[str, list[tuple[int, str]]] = {}
        for name in columns:
            if name in stage.key:
                origins[name] = [(side, of[name]) for side, of in enumerate(keys) if of[name] in inputs[side]]
            elif name in inputs[0]:
                origins[name] = [(0, name)]
            else:
                origin = name if name in inputs[1] else name.removesuffix(self.suffix)
                origins[name] = [(1, origin)] if origin in inputs[1] else []
        return {name: read for name, read in origins.items() if read}


@dataclass(frozen=True, slots=True)
class AsOf(Join):
    """Each row of the left side with the newest one of the right side that is not later than it.

    Attributes:
        tolerance: How much older it may be, in microseconds. None: as old as it is.
        wait: A row waits until the watermark says that no other one can come for it.
    """

    kind: ClassVar[str] = "as_of"

    tolerance: int | None = None
    wait: bool = True

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.joins.as_of import AsOfOperator

        return AsOfOperator(self, subtask)

    def meaning(self) -> dict[str, Any]:
        return {"how": self.how, "tolerance": self.tolerance, "times": self.times and list(self.times)}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "tolerance" in meaning

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        tolerance = meaning["tolerance"]
        return f"{meaning['how']}, as of" + (f", at most {shown(tolerance)} before" if tolerance is not None else "")

    @property
    def goes_by_epochs(self) -> bool:
        return not self.wait

    @property
    def inputs_handed_out(self) -> int | None:
        return 1


def _sides_swapped(stage: Stage, recorded: OperatorStats) -> Iterator[Finding]:
    """Yield an input that was the other side: also where both have the same columns, so that nothing else tells."""
    now, before = sides.inputs_of(stage), sides.places_before(stage, recorded)
    for place, (left, right) in enumerate((("left", "right"), ("right", "left"))):
        if before[place] == 1 - place:
            sql = sides.sql_of(stage.inputs[place]) if now[0] == now[1] else {}
            with_sql = ", ".join(f"{name}={value!r}" for name, value in sql.items() if value)
            named = f"{now[place]} ({with_sql})" if with_sql else now[place]
            what = f"{named} was the {right} side, and is the {left} one, while state has rows of each side"
            yield refused(stage.uid, "inputs", what)
