"""The differences of two sides' rows, as multisets. Both sides are loaded into a database and compared there.

If a row of one side has a counterpart of the same key on the other side, it counts as changed. Floats count as equal as
`floats` says. Columns that say when a row was
processed are left out and named, because one of the sides has read everything later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.facts import HIDDEN, Facts, Flat
from weir.definition import Pipeline
from weir.definition.names import START
from weir.inspection.comparison.floats import are_compared_as_floats, is_number, nine_digits
from weir.inspection.comparison.states import ADDED, CHANGED, REMOVED, SHOWN, columns_differ
from weir.inspection.database import asked, quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

OURS, THEIRS = "ours", "theirs"  # the names of the two sides in the database
KINDS = (ADDED, REMOVED, CHANGED)


@dataclass(frozen=True, slots=True)
class TableDiff(Facts):
    """The difference of one table.

    Attributes:
        rows: How many rows the pipeline and the branch have made since the fork, those included that a promotion would
            bring back.
        counts: How many rows a promotion of the branch adds, removes and changes.
        days: The same counts by day of the event time, for days in which something differs; under "" if the table has
            no event time.
        sample: Some of the rows that differ. Their column `change` says added, removed, was or is.
        columns: Columns that only one side has, in words.
        left_out: Columns that are not compared, since they say when a row was processed.
    """

    table: Annotated[str, HIDDEN]
    rows: Annotated[tuple[int, int], Flat(("rows", "rows_branch"))]
    counts: Annotated[dict[str, int], Flat(KINDS)]
    days: dict[str, dict[str, int]]
    sample: list[dict[str, Any]]
    columns: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not any(self.counts.values())


def compared_rows(
    connection: Connection,
    pipeline: Pipeline,
    table: str,
    first: pa.Schema | None,
    second: pa.Schema | None,
    *,
    sample: int = SHOWN,
    without: Iterable[str] = (),
) -> TableDiff:
    """Compare the rows of a sink that are loaded as `OURS` and `THEIRS`.

    Args:
        first, second: The columns of either side; None: it has no rows, and nothing is loaded.
        sample: How many rows that differ are shown at most.
        without: Further columns that are not compared.
    """
    schemas = [schema for schema in (first, second) if schema is not None]
    rows = (_count(connection, OURS, first), _count(connection, THEIRS, second))
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    if not schemas:
        return TableDiff(table, rows, counts, {}, [])
    stage = next((stage for stage in pipeline.stages if table in [sink.name for sink in stage.sinks]), None)
    is_main = stage is not None and stage.sink is not None and stage.sink.name == table
    clocked = {*(stage.operator.clocked_output(stage) if stage is not None and is_main else ()), *without}
    shared = [name for name in schemas[0].names if all(name in schema.names for schema in schemas)]
    columns = [name for name in shared if name not in clocked]
    sides = ("the pipeline", "the branch")
    alone = columns_differ(first, second, sides) if first is not None and second is not None else ""
    left_out = tuple(name for name in shared if name in clocked)
    if not columns:  # the code calls all of them otherwise now
        return TableDiff(table, rows, {**counts, REMOVED: rows[0], ADDED: rows[1]}, {}, [], alone, left_out)
    types = {name: [schema.field(name).type for schema in schemas] for name in columns}
    event = pipeline.event_time_of(table, schemas[-1])
    event = event if len(set(types.get(event or "", ()))) == 1 else None
    sink = pipeline.sink(table)
    newest_of = sink.capabilities.newest_of if sink is not None else ()
    of_table = newest_of or (stage.key if stage is not None else ())
    wanted = dict.fromkeys([*of_table, START, *([event] if event is not None else [])])
    key = [name for name in wanted if name in columns]
    _compare(connection, types, key, event, first is not None, second is not None)
    days: dict[str, dict[str, int]] = {}
    for day, kind, count in connection.execute(
        "SELECT day, change, count(*) FROM differing WHERE change <> 'changed' OR turn = 1 GROUP BY ALL ORDER BY ALL"
    ).fetchall():
        counts[kind] += count
        days.setdefault(day, dict.fromkeys(KINDS, 0))[kind] += count
    inside = _names_inside(types)
    query = (
        "SELECT CASE WHEN change <> 'changed' THEN change WHEN turn = 0 THEN 'was' ELSE 'is' END AS change, "
        f"{', '.join(f'{_as_shown(inside[name], types[name])} AS {_title(name)}' for name in columns)} FROM differing "
        f"ORDER BY day, {', '.join(f'differing.{inside[name]}' for name in key) or 'differing.change'}, place, turn "
        f"LIMIT {sample}"
    )
    with asked(connection, query) as (_, differing):
        shown = [row for part in differing for row in frames.python_rows(part)]
    return TableDiff(table, rows, counts, days, shown, alone, left_out)


def _names_inside(names: Iterable[str]) -> dict[str, str]:
    """Return the names of a table's columns in `differing`, whose own columns may have any of their names."""
    return {name: f"column_{number}" for number, name in enumerate(names)}


def _title(name: str) -> str:
    """Return the name of a column in a sample, whose first column is `change`."""
    return quoted(f"{name} (of the table)" if name.casefold() == "change" else name)


def _as_shown(column: str, types: Sequence[pa.DataType]) -> str:
    """Return a column of `differing` as the table has it: floats are compared as texts of nine digits."""
    if not are_compared_as_floats(types):
        return column
    # A float32 has fewer digits than these: as its own shortest text it is 1.1, and not 1.10000002.
    is_short = all(map(pa.types.is_float32, types))
    short = f"CAST(CAST({column} AS FLOAT) AS VARCHAR)" if is_short else column
    return f"CAST({short} AS DOUBLE)"


def _count(connection: Connection, name: str, schema: pa.Schema | None) -> int:
    if schema is None:
        return 0
    ((count,),) = connection.execute(f"SELECT count(*) FROM {name}").fetchall()
    return int(count)


def _compare(
    connection: Connection,
    types: Mapping[str, Sequence[pa.DataType]],
    key: Sequence[str],
    event: str | None,
    has_ours: bool,
    has_theirs: bool,
) -> None:
    """Create the table `differing`: rows that one side has more often than the other.

    Of each key the pipeline's rows (turn 0) come before the branch's (turn 1).

    Args:
        types: By column, its types on the sides that have rows.
    """
    inside = _names_inside(types)
    same = ", ".join(f"{_comparable(name, of)} AS {inside[name]}" for name, of in types.items())
    listed = ", ".join(inside.values())
    other = THEIRS if has_theirs else OURS
    for name, loaded in ((OURS, has_ours), (THEIRS, has_theirs)):
        origin = name if loaded else f"(SELECT * FROM {other} LIMIT 0)"
        connection.execute(f"CREATE TABLE {name}_as AS SELECT {same} FROM {origin}")
    day = f"strftime({inside[event]}, '%Y-%m-%d')" if event is not None else "''"
    by = f"PARTITION BY {', '.join(inside[name] for name in key)}" if key else "PARTITION BY 1"
    connection.execute(
        f"""CREATE TABLE differing AS
        WITH removed AS (SELECT * FROM ours_as EXCEPT ALL SELECT * FROM theirs_as),
             added AS (SELECT * FROM theirs_as EXCEPT ALL SELECT * FROM ours_as),
             both_sides AS (SELECT 0 AS turn, * FROM removed UNION ALL SELECT 1 AS turn, * FROM added),
             numbered AS (SELECT *, row_number() OVER ({by}, turn ORDER BY {listed}) AS place,
                                 count(*) FILTER (turn = 0) OVER ({by}) AS less,
                                 count(*) FILTER (turn = 1) OVER ({by}) AS more
                          FROM both_sides)
        SELECT CASE WHEN {"place <= least(less, more)" if key else "false"} THEN 'changed'
                    WHEN turn = 0 THEN 'removed' ELSE 'added' END
                   AS change, turn, place, coalesce({day}, '') AS day, {listed}
        FROM numbered"""
    )


def _comparable(name: str, types: Sequence[pa.DataType]) -> str:
    """Return a column as both sides can be compared by it."""
    column = quoted(name)
    if are_compared_as_floats(types):
        return nine_digits(column)
    if len(set(types)) == 1:
        return column
    if not all(map(is_number, types)):
        return f"CAST(to_json({column}) AS VARCHAR)"
    if any(map(pa.types.is_decimal, types)):  # no decimal has room for all whole numbers and all decimals
        text = f"CAST({column} AS VARCHAR)"
        return f"CASE WHEN contains({text}, '.') THEN rtrim(rtrim({text}, '0'), '.') ELSE {text} END"
    return column
