"""The difference of a stage's state between two checkpoints, by a full outer join on disk: both may be larger than
memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.counts import counted
from state_ops.errors import ConfigurationError
from state_ops.facts import HIDDEN, Facts, Flat, Named, fact
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import Checkpoint
from state_ops.value_text import text_of
from weir.definition import Pipeline
from weir.inspection.comparison.entries import TIMERS, kind_of, paired_views
from weir.inspection.comparison.floats import are_compared_as_floats, nine_digits, rounded_column
from weir.inspection.database import asked, database, load, quoted, seal
from weir.inspection.state_reader import At, viewed
from weir.inspection.view import View
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
SHOWN = 10
"""How many rows that differ are shown where nobody says."""


@dataclass(frozen=True, slots=True)
class StateDifference(Facts):
    """The result of a comparison. Only fields that both states have decide whether a row changed.

    Attributes:
        counts: Rows by added, removed, changed.
        gone, new: Fields that only the first state has, and those that only the second has.
        retyped: By field, its types in both.
    """

    first: Annotated[CheckpointId, Named("from")]
    second: Annotated[CheckpointId, Named("to")]
    counts: Annotated[dict[str, int], Flat((ADDED, REMOVED, CHANGED))]
    gone: Annotated[tuple[str, ...], Named("fields_only_in_from")]
    new: Annotated[tuple[str, ...], Named("fields_only_in_to")]
    retyped: Annotated[dict[str, tuple[str, str]], Named("fields_of_other_type")]
    _connection: Annotated[Any, HIDDEN]

    def rows(self, most: int | None = None) -> AbstractContextManager[tuple[pa.Schema, Iterator[pa.Table]]]:
        """Return the differences in key order: `change`, `key`, `old` and `new` as structs, and `fields`, the names of
        those that differ."""
        limit = "" if most is None else f" LIMIT {most}"
        return asked(self._connection, f"SELECT * FROM compared ORDER BY key, change{limit}")


@contextmanager
def both(
    pipeline: Pipeline,
    settings: Settings,
    uid: str,
    first: At,
    second: At,
    other: Pipeline | None = None,
    there: Settings | None = None,
    purpose: str = "weir state diff",
) -> Iterator[tuple[View, View]]:
    """Yield a stage's state in two checkpoints, which are not pruned meanwhile.

    Args:
        other, there: The pipeline, such as a branch, and the settings by which the second checkpoint is found if it
            lies in another storage.
        purpose: Why the checkpoints are kept; a person who asks sees it.
    """
    with (
        viewed(pipeline, settings, uid, first, purpose) as a,
        viewed(other or pipeline, there or settings, uid, second, purpose) as b,
    ):
        yield a, b


@contextmanager
def compared(pipeline: Pipeline, settings: Settings, uid: str, first: At, second: At) -> Iterator[StateDifference]:
    """Compare a stage's state in two checkpoints, row by row; the result may be read for as long as the `with` block
    lasts. Raises as `compared_views`."""
    with both(pipeline, settings, uid, first, second) as (a, b), compared_views(a, b) as difference:
        yield difference


@contextmanager
def compared_views(
    a: View, b: View, without: Sequence[str] = (), *, rounded: bool = False
) -> Iterator[StateDifference]:
    """Compare two states of a stage, row by row. Raises ConfigurationError where the two have other keys.

    Rows are told apart by their key, those of windows also by their bounds (of sessions: their start).

    Args:
        without: Fields that do not make a row count as changed, and parts of what lists hold, LIST.PART.
        rounded: Floats count as equal as `comparison.floats` says; otherwise they have to be the very same.
    """
    if a.keys != b.keys or a.identity != b.identity:
        raise ConfigurationError(
            f"The states of {a.uid} in checkpoints {a.checkpoint} and {b.checkpoint} have other keys: "
            f"{_said(a)}; {_said(b)}.",
            next="They cannot be compared row by row; weir state sql can ask for both with NAME_history.",
        )
    with database() as connection:
        _load_both(connection, a, b)
        columns = _Columns.of(a, b, frozenset(without), rounded=rounded)
        connection.execute(columns.join())
        seal(connection)
        rows = connection.execute("SELECT change, count(*) FROM compared GROUP BY change").fetchall()
        counts = {ADDED: 0, REMOVED: 0, CHANGED: 0} | dict(rows)
        yield StateDifference(
            a.checkpoint, b.checkpoint, counts, columns.gone, columns.new, columns.retyped, connection
        )


def _said(view: View) -> str:
    return ", ".join(f"{name} {view.schema.field(name).type}" for name in view.identity)


def _load_both(connection: Connection, a: View, b: View) -> None:
    """Both states, but for subtasks whose objects are the very same in both: those have no differences."""
    subtasks_a, subtasks_b = range(a.parallelism), range(b.parallelism)
    if _read_alike(a, b):
        changed = [subtask for subtask in subtasks_a if _objects(a, subtask) != _objects(b, subtask)]
        load(connection, "first", a.tables(changed), a.schema)
        load(connection, "second", b.tables(changed), b.schema)
        return
    load(connection, "first", a.tables(subtasks_a), a.schema)
    load(connection, "second", b.tables(subtasks_b), b.schema)


def _read_alike(a: View, b: View) -> bool:
    """Return whether the same objects give the same rows in both. With a time to live they do not: the clock went
    on."""
    if a.expiry is not None or b.expiry is not None:
        return False
    alike = replace(a, checkpoint=b.checkpoint, storage=b.storage, snapshots=b.snapshots) == b
    schemas_a, schemas_b = ([collection.schema for collection in view.collections] for view in (a, b))
    pairs = zip([a.state, *schemas_a], [b.state, *schemas_b], strict=True) if alike else ()
    return alike and all(schema_a.older == schema_b.older for schema_a, schema_b in pairs)


def _objects(view: View, subtask: int) -> set[tuple[str, str]]:
    snapshot = view.snapshots.get(subtask)
    return {(file.name, file.path) for file in snapshot.files} if snapshot else set()


@dataclass(frozen=True, slots=True)
class StateDiff(Facts):
    """The difference of one stage's state.

    Attributes:
        counts: How many keys were added, removed and changed; None if the state could not be compared.
        why: Why it could not be compared; else the fields that only one side has, or that have another type, in words.
        left_out: Fields that are not compared, since they say when a row was processed.
        timers: How many timers only one side has, in words; "" if both have the same, or they were not compared.
    """

    stage: Annotated[str, HIDDEN]
    counts: Annotated[dict[str, int] | None, Flat((ADDED, REMOVED, CHANGED))]
    sample: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    left_out: tuple[str, ...] = ()
    timers: str = ""

    @property
    @fact
    def not_compared(self) -> str:
        """Why it could not be compared; then there are no counts."""
        return self.why if self.counts is None else ""

    @property
    @fact
    def fields(self) -> str:
        """The fields that only one side has, or that have another type, in words."""
        return self.why if self.counts is not None else ""

    @property
    def same(self) -> bool:
        return self.counts is not None and not any(self.counts.values()) and not self.timers


def states_differ(
    pipeline: Pipeline,
    first: Checkpoint,
    second: Checkpoint,
    viewing: Callable[[str], AbstractContextManager[tuple[View, View]]],
    sides: tuple[str, str],
    *,
    sample: int = SHOWN,
    replayed: bool = False,
) -> Iterator[StateDiff]:
    """Yield by stage how the state of two checkpoints differs, of all stages that have state in either.

    Args:
        viewing: Yields both states of a stage, by its uid.
        sides: The names of the two, for people.
        sample: How many keys are shown at most.
        replayed: The second has read what the first has read, in the same epochs. So floats count as equal by their
            first digits, and timers that only one has are counted.
    """
    ours, theirs = first.stages_with_state, second.stages_with_state
    for uid in dict.fromkeys([*ours, *theirs]):
        stage = next((stage for stage in pipeline.stages if stage.uid == uid), None)
        if uid not in ours or uid not in theirs:
            yield StateDiff(uid, None, why=f"only {sides[uid in theirs]} has it")
            continue
        if stage is None:
            yield StateDiff(uid, None, why="it is no longer in the code")
            continue
        left_out = stage.operator.clocked_state(stage)
        try:
            with (
                viewing(uid) as (a, b),
                compared_views(a, b, left_out, rounded=replayed) as difference,
                difference.rows(sample) as (_, tables),
            ):
                rows = [row for table in tables for row in frames.python_rows(table)]
                timers = _timers_differ(a, b, sides) if replayed and stage.on_timer is not None else ""
                fields = columns_differ(a.schema, b.schema, sides)
                yield StateDiff(uid, dict(difference.counts), rows, fields, left_out, timers)
        except ConfigurationError as error:
            yield StateDiff(uid, None, why=error.what)


def _timers_differ(a: View, b: View, sides: tuple[str, str]) -> str:
    """Return in words how many timers only one side has. It is "" if both have the same."""
    alone = Counter((kind_of(key), now is not None) for key, _, now in paired_views(a, b, tuple(TIMERS)))
    counts = [(clock, side, alone[kind, bool(side)]) for (kind, clock), side in product(TIMERS.items(), (0, 1))]
    return "; ".join(
        f"only {sides[side]} has {counted(count, 'timer')} by {clock}" for clock, side, count in counts if count
    )


def columns_differ(first: pa.Schema, second: pa.Schema, sides: tuple[str, str]) -> str:
    """Return in words which columns only one of two sides has, or has in another type."""
    types = [dict(zip(schema.names, schema.types, strict=True)) for schema in (first, second)]
    both = [(name, was, types[1][name]) for name, was in types[0].items() if name in types[1]]
    return "; ".join(
        [
            *(f"only {sides[0]} has {name}" for name in first.names if name not in types[1]),
            *(f"only {sides[1]} has {name}" for name in second.names if name not in types[0]),
            *(f"{name} was {was}, is {now}" for name, was, now in both if was != now),
        ]
    )


def by_field(
    state: StateDiff, most: int | None = None, ours: str = "pipeline", theirs: str = "branch"
) -> Iterator[dict[str, Any]]:
    """Yield a state's sample with one line for each field in which a key differs. A key that only one side has gets a
    line for each of its fields.

    Args:
        most: Of how many keys; None: of all.
        ours, theirs: What the sides are called.
    """
    for row in state.sample[:most]:
        old, new = row["old"] or {}, row["new"] or {}
        fields = (
            [name for name in (old or new) if name not in state.left_out] if row["fields"] is None else row["fields"]
        )
        for name in fields or [""]:  # if all fields are left out, the key alone is shown
            key = " / ".join(map(text_of, row["key"].values()))
            yield {
                "change": row["change"],
                "key": key,
                "field": name,
                ours: old.get(name),
                theirs: new.get(name),
            }


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of two states.

    Attributes:
        keys: Those that tell rows apart.
        old, new_all: The other columns of either state.
        types: By column that both have, its types in them.
        without: Columns that are not compared, and parts of what lists hold, LIST.PART.
        rounded: Whether floats count as equal if their first nine digits are.
    """

    keys: tuple[str, ...]
    old: tuple[str, ...]
    new_all: tuple[str, ...]
    types: dict[str, tuple[pa.DataType, pa.DataType]]
    without: frozenset[str]
    rounded: bool

    @classmethod
    def of(cls, a: View, b: View, without: frozenset[str], *, rounded: bool = False) -> _Columns:
        old = tuple(name for name in a.schema.names if name not in a.identity)
        new = tuple(name for name in b.schema.names if name not in b.identity)
        types = {name: (a.schema.field(name).type, b.schema.field(name).type) for name in old if name in new}
        return cls(a.identity, old, new, types, without, rounded)

    @property
    def common(self) -> tuple[str, ...]:
        return tuple(name for name in self.types if name not in self.without)

    @property
    def retyped(self) -> dict[str, tuple[str, str]]:
        return {name: (str(was), str(now)) for name, (was, now) in self.types.items() if was != now}

    @property
    def gone(self) -> tuple[str, ...]:
        return tuple(name for name in self.old if name not in self.new_all)

    @property
    def new(self) -> tuple[str, ...]:
        return tuple(name for name in self.new_all if name not in self.old)

    def join(self) -> str:
        """Return SQL that makes the table `compared` of `first` and `second`."""
        both = "a.__weir_in AND b.__weir_in"
        differs = {name: self._differs(name) for name in self.common}
        fields = " || ".join(
            f"CASE WHEN {condition} THEN [{_text(name)}] ELSE [] END" for name, condition in differs.items()
        )
        changed = " OR ".join(f"({condition})" for condition in differs.values()) or "false"
        keys = ", ".join(f"{quoted(name)} := coalesce(a.{quoted(name)}, b.{quoted(name)})" for name in self.keys)
        return (
            "CREATE TABLE compared AS SELECT "
            f"CASE WHEN b.__weir_in IS NULL THEN '{REMOVED}' WHEN a.__weir_in IS NULL THEN '{ADDED}' ELSE '{CHANGED}' "
            "END AS change, "
            f"struct_pack({keys}) AS key, {_packed('a', self.old)} AS old, {_packed('b', self.new_all)} AS new, "
            f"CASE WHEN {both} THEN {fields or '[]'} END::VARCHAR[] AS fields "
            "FROM (SELECT *, true AS __weir_in FROM first) a FULL OUTER JOIN (SELECT *, true AS __weir_in FROM "
            "second) b ON "
            + " AND ".join(f"a.{quoted(name)} = b.{quoted(name)}" for name in self.keys)
            + f" WHERE a.__weir_in IS NULL OR b.__weir_in IS NULL OR {changed}"
        )

    def _differs(self, name: str) -> str:
        old, new = (self._compared(f"{side}.{quoted(name)}", name, at) for at, side in enumerate("ab"))
        return f"{old} IS DISTINCT FROM {new}"

    def _compared(self, column: str, name: str, at: int) -> str:
        """Return a column of one side (`at`: 0 or 1) as it is compared with the other's."""
        both = self.types[name]
        type, is_same = both[at], both[0] == both[1]
        left_out = {part.partition(".")[2] for part in self.without if part.startswith(f"{name}.")}
        if left_out and is_same:  # not all parts of what a list holds
            parts = [part for part in type.value_type if part.name not in left_out]
            packed = ", ".join(f"{quoted(part.name)} := item.{quoted(part.name)}" for part in parts)
            column, type = f"[struct_pack({packed}) FOR item IN {column}]", pa.list_(pa.struct(parts))
        if self.rounded and is_same:
            return rounded_column(column, type)
        if self.rounded and are_compared_as_floats(both):
            return nine_digits(column)
        # Types with parts are only compared by DuckDB if they have the same ones.
        return f"to_json({column})::VARCHAR" if not is_same and any(map(pa.types.is_nested, both)) else column


def _packed(side: str, names: tuple[str, ...]) -> str:
    packed = ", ".join(f"{quoted(name)} := {side}.{quoted(name)}" for name in names)
    return f"CASE WHEN {side}.__weir_in THEN struct_pack({packed}) END" if names else "NULL"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
