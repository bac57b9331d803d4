"""The difference of a stage's state between two checkpoints, by a full outer join on disk: both may be larger than
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.errors import ConfigurationError
from state_ops.ids import CheckpointId
from weir.definition import Pipeline
from weir.inspection.database import asked, database, load, quoted, seal
from weir.inspection.state_reader import At, viewed
from weir.inspection.view import View
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
_PURPOSE = "weir state diff"


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The result of `compared`. Only fields that both states have decide whether a row changed.

    Attributes:
        counts: Rows by added, removed, changed.
        gone, new: Fields that only the first state has, and those that only the second has.
        retyped: By field, its types in both.
    """

    first: CheckpointId
    second: CheckpointId
    counts: dict[str, int]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    retyped: dict[str, tuple[str, str]]
    _connection: Any

    def rows(self, most: int | None = None) -> AbstractContextManager[tuple[pa.Schema, Iterator[pa.Table]]]:
        """Return the differences in key order: `change`, `key`, `old` and `new` as structs, and `fields`, the names of
        those that differ."""
        limit = "" if most is None else f" LIMIT {most}"
        return asked(self._connection, f"SELECT * FROM compared ORDER BY key, change{limit}")


@contextmanager
def compared(
    pipeline: Pipeline,
    settings: Settings,
    uid: str,
    first: At,
    second: At,
    there: Settings | None = None,
    other: Pipeline | None = None,
    without: Sequence[str] = (),
) -> Iterator[StateDifference]:
    """Compare a stage's state in two checkpoints, row by row; the result may be read for as long as the `with` block
    lasts.

    Rows are told apart by their key, those of windows also by their bounds (of sessions: their start). Raises
    ConfigurationError where the two have other keys.

    Args:
        there, other: The settings and the pipeline, such as a branch, by which the second one is found, if it lies in
            another storage.
        without: Fields that do not make a row count as changed, and parts of what lists hold, LIST.PART.
    """
    with (
        viewed(pipeline, settings, uid, first, _PURPOSE) as a,
        viewed(other or pipeline, there or settings, uid, second, _PURPOSE) as b,
        compared_views(a, b, without) as difference,
    ):
        yield difference


@contextmanager
def compared_views(
    a: View, b: View, without: Sequence[str] = (), *, rounded: bool = False
) -> Iterator[StateDifference]:
    """Compare two states of a stage, as `compared` does.

    Args:
        rounded: Floats count as equal if their first nine digits are, since sums depend on the order in which rows
            arrive.
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
class _Columns:
    """keys: those that tell rows apart. old, new: the other columns of either; common: those of both that are
    compared; rounded: those whose floats count as equal by nine digits; parts: by list, the parts of what it holds that
    are compared, where not all are."""

    keys: tuple[str, ...]
    old: tuple[str, ...]
    new_all: tuple[str, ...]
    retyped: dict[str, tuple[str, str]]
    as_text: frozenset[str]
    without: frozenset[str]
    rounded: frozenset[str] = frozenset()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, a: View, b: View, without: frozenset[str], *, rounded: bool = False) -> _Columns:
        old = tuple(name for name in a.schema.names if name not in a.identity)
        new = tuple(name for name in b.schema.names if name not in b.identity)
        types = {name: (a.schema.field(name).type, b.schema.field(name).type) for name in old if name in new}
        other = {name: both for name, both in types.items() if both[0] != both[1]}
        # Types with parts are only compared by DuckDB if they have the same ones.
        nested = frozenset(name for name, both in other.items() if any(pa.types.is_nested(type) for type in both))
        floats = [name for name, both in types.items() if all(map(_is_number, both)) and any(map(_is_float, both))]
        retyped = {name: (str(was), str(now)) for name, (was, now) in other.items()}
        lists = {name.partition(".")[0] for name in without if "." in name}
        parts = {
            name: tuple(part.name for part in both[0].value_type if f"{name}.{part.name}" not in without)
            for name, both in types.items()
            if name in lists and name not in other
        }
        return cls(a.identity, old, new, retyped, nested, without, frozenset(floats if rounded else ()), parts)

    @property
    def common(self) -> tuple[str, ...]:
        return tuple(name for name in self.old if name in self.new_all and name not in self.without)

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
        old, new = f"a.{quoted(name)}", f"b.{quoted(name)}"
        if name in self.rounded:
            old, new = nine_digits(old), nine_digits(new)
        if name in self.parts:
            old, new = (
                f"[struct_pack({', '.join(f'{quoted(part)} := item.{quoted(part)}' for part in self.parts[name])})"
                f" FOR item IN {side}]"
                for side in (old, new)
            )
        if name in self.as_text:
            old, new = f"to_json({old})::VARCHAR", f"to_json({new})::VARCHAR"
        return f"{old} IS DISTINCT FROM {new}"


def nine_digits(column: str) -> str:
    """Return SQL for a float's first nine digits, as a text in which zero and NaN have no sign.

    It is rounded to thirteen first: sums that differ in their last digits, on both sides of a half, become one.
    """
    value = f"CAST({column} AS DOUBLE)"
    digits = f"format('{{:.8e}}', CAST(format('{{:.12e}}', {value}) AS DOUBLE) + 0.0)"
    return f"CASE WHEN isnan({value}) THEN 'nan' ELSE {digits} END"


def _is_float(type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(type))


def _is_number(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type))


def _packed(side: str, names: tuple[str, ...]) -> str:
    packed = ", ".join(f"{quoted(name)} := {side}.{quoted(name)}" for name in names)
    return f"CASE WHEN {side}.__weir_in THEN struct_pack({packed}) END" if names else "NULL"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
