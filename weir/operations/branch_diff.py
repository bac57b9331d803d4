"""The differences of a branch and its pipeline, in state and in rows of the same input since the fork.

Rows are compared as `comparison.tables` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile
from state_ops.facts import By, Facts, Named, fact
from state_ops.storage.storage import Storage
from state_ops.value_text import text_of
from weir.connectors.delta.changes import ROW, Changes
from weir.connectors.delta.predicates import predicate
from weir.connectors.delta.replace_partitions import outside, replaced_by
from weir.connectors.delta.replace_where import Range
from weir.connectors.delta.restore_version import files_at
from weir.connectors.delta.table_commit import file_path, table_path, with_partition
from weir.connectors.formats.stored_rows import stored_rows
from weir.definition import Pipeline
from weir.definition.sink import Sink
from weir.inspection.comparison.states import StateDiff, both, by_field, states_differ
from weir.inspection.comparison.tables import KINDS, OURS, THEIRS, TableDiff, compared_rows
from weir.inspection.database import database, load, quoted
from weir.markdown import as_text
from weir.operations import promotion
from weir.operations.forks import branched
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings
from weir.sources.positions import Arrivals

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

_DAYS_SHOWN = 31


@dataclass(frozen=True, slots=True)
class BranchDiff(Facts):
    """The difference of a branch and its pipeline. If the branch is to replace a range alone, it has rows and no state.

    Attributes:
        taken_back: What the pipeline has promoted or edited since the fork, and a promotion of the branch would take
            back.
        head: The pipeline's newest checkpoint.
        base: The checkpoint that was forked.
        tip: The branch's newest checkpoint.
        behind: By source, what the branch has still to read. Until then it also differs by that.
    """

    pipeline: str
    branch: str
    head: int
    base: int
    tip: Annotated[int, Named("branch_head")]
    behind: Annotated[Mapping[str, Arrivals], Named("files_behind")]
    tables: Annotated[tuple[TableDiff, ...], By("table")]
    states: Annotated[tuple[StateDiff, ...], By("stage", "state")]
    taken_back: tuple[promotion.TakenBack, ...] = ()

    @property
    @fact
    def same(self) -> bool:
        """True if neither rows, nor state, nor the columns of either differ."""
        rows = all(table.same and not table.columns for table in self.tables)
        return rows and all(state.same and not state.why for state in self.states)

    def left_out(self) -> Iterator[str]:
        """Yield the columns that were not compared, in sentences."""
        of_tables = [(f"the table {table.table}", table.left_out) for table in self.tables]
        of_states = [(f"the state of {state.stage}", state.left_out) for state in self.states]
        for of, names in (*of_tables, *of_states):
            if names:
                verb = "says" if len(names) == 1 else "say"
                yield f"Left out of {of}: {', '.join(names)}, which {verb} when a row was processed."

    def to_markdown(self) -> str:
        """Return a report for people: what differs by table and day, then by stage, with samples."""
        return "\n\n".join(_report(self))


def diff(pipeline: Pipeline, settings: Settings, name: str, states: bool = True) -> BranchDiff:
    """Compare a branch with its pipeline, by reading alone.

    Args:
        states: Whether to compare the stages' state too, which reads all of it.

    Raises:
        WeirError: There is no such branch, or it was forked from another history.
    """
    decided, here = promotion.plan(pipeline, settings, name), branched(pipeline, settings, name)
    storage, _ = open_storage(pipeline, settings)
    source, _ = open_storage(here, settings)
    tables = []
    for table in decided.tables:
        sink = pipeline.sink(table.table)
        if sink is not None and sink.capabilities.newest_of:
            tables.append(_keyed(pipeline, sink, table, storage, source, settings.work_dir))
            continue
        goes = table.back.goes if table.back is not None else ()
        returns = (
            table.back.comes if table.back is not None else ()
        )  # rows that a promotion since the fork has taken out
        within: Kept | None = None
        left: Kept | None = None
        if sink is not None and sink.capabilities.replaces:
            then = files_at(storage, table.table, table.back.then) if table.back is not None else []
            replaced = replaced_by(source, table.table, table.comes)
            stays = {file.path for file in outside(then, replaced.partitions)} if not replaced.conditions else set()
            now = promotion.rows_of(storage, table.table)[0]
            goes = tuple(file for file in now if file.path not in stays)
            returns = tuple(outside(then if replaced.conditions else returns, replaced.partitions))
            if returns and table.back is not None:
                left = _left(storage, table.table, table.back.then, replaced.conditions)
        if decided.only is not None and table.column is not None:
            # The pipeline's rows of a range may have come before the fork.
            goes, returns = promotion.rows_of(storage, table.table)[0], ()
            within = partial(_in_range, decided.only, table.column)
        theirs = [(source, table.comes), (storage, returns)]
        ours = [(storage, goes)]
        tables.append(_table(pipeline, table.table, ours, theirs, within, settings.work_dir, left=left))
    differing = states_differ(
        pipeline,
        decided.head,
        decided.tip,
        lambda uid: both(pipeline, settings, uid, int(decided.head.id), int(decided.tip.id), here),
        ("the pipeline", "the branch"),
    )
    return BranchDiff(
        pipeline.title,
        name,
        int(decided.head.id),
        int(decided.base.id),
        int(decided.tip.id),
        decided.behind,
        tuple(tables),
        tuple(differing) if states and decided.only is None else (),
        decided.taken_back,
    )


Kept = Callable[[Storage, pa.Table, DataFile], pa.Array]
"""Which rows of a file, which lies in a storage, are compared."""


def _in_range(wanted: Range, column: str, _: Storage, rows: pa.Table, __: DataFile) -> pa.Array:
    return wanted.of(rows, column)


def _left(storage: Storage, table: str, version: int | None, conditions: Sequence[str]) -> Kept:
    """Return the rows of the table at the fork that the branch's rows do not replace; all rows of the branch."""
    handle = fenced_table.open_table(storage, table_path(table), version)
    replaced = [predicate(table, condition, handle) for condition in conditions]

    def kept(place: Storage, rows: pa.Table, file: DataFile) -> pa.Array:
        goes = np.zeros(rows.num_rows, bool)
        for rows_that_go in replaced if place is storage else ():
            goes |= rows_that_go.keeps(rows, file)
        return pa.array(~goes)

    return kept


def _keyed(
    pipeline: Pipeline,
    sink: Sink,
    table: promotion.TablePromotion,
    storage: Storage,
    source: Storage,
    scratch: Path,
) -> TableDiff:
    """Return a table with keys: all that it has now, beside what the branch's changes make of what it had at the
    fork."""
    back = table.back
    now = promotion.rows_of(storage, sink.name)[0]
    then = files_at(storage, sink.name, back.then) if back is not None else []
    with promotion.changes_of(source, sink, table.comes, scratch) as changes:
        return _table(pipeline, sink.name, [(storage, now)], [(storage, then)], None, scratch, changes)


def _changed(connection: Connection, schema: pa.Schema | None, changes: Changes) -> pa.Schema | None:
    """Make changes to the loaded rows of the branch's side; returns their columns."""
    if not changes.count:
        return schema
    columns, key = _with_more(schema or changes.schema, changes.schema), list(changes.key)
    comes = (frames.aligned(changes.rows(keys[ROW].drop_nulls().to_numpy()), columns) for keys in changes.ranges())
    load(connection, "comes", comes, columns)
    if schema is None:
        connection.execute("CREATE TABLE theirs AS SELECT * FROM comes")
        return columns
    key_columns = pa.schema([changes.schema.field(name) for name in key])
    keys = (frames.aligned(keys.select(key).to_arrow(), key_columns) for keys in changes.ranges())
    load(connection, "changed_keys", keys, key_columns)
    names = ", ".join(map(quoted, key))
    connection.execute(f"DELETE FROM theirs WHERE ({names}) IN (SELECT ({names}) FROM changed_keys)")
    connection.execute("CREATE OR REPLACE TABLE theirs AS SELECT * FROM theirs UNION ALL BY NAME SELECT * FROM comes")
    return columns


def _with_more(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return a schema with the columns that another one has besides."""
    return pa.schema([*schema, *(field for field in other if field.name not in schema.names)])


def _table(
    pipeline: Pipeline,
    table: str,
    ours: Sequence[tuple[Storage, Sequence[DataFile]]],
    theirs: Sequence[tuple[Storage, Sequence[DataFile]]],
    within: Kept | None,
    scratch: Path,
    changes: Changes | None = None,
    left: Kept | None = None,
) -> TableDiff:
    """Return the comparison of a table.

    within: Rows of both sides. left: The branch's rows. changes: Changes to the former, of a table with keys.
    """
    with database() as connection:
        first = _loaded(connection, OURS, table, ours, within, scratch)
        second = _loaded(connection, THEIRS, table, theirs, left or within, scratch)
        if changes is not None:
            second = _changed(connection, second, changes)
        return compared_rows(connection, pipeline, table, first, second)


def _loaded(
    connection: Connection,
    name: str,
    table: str,
    parts: Sequence[tuple[Storage, Sequence[DataFile]]],
    within: Kept | None,
    scratch: Path,
) -> pa.Schema | None:
    """Load the rows of one side, file by file, perhaps only some of them.

    Args:
        parts: The storages, each with the files that lie there.

    Returns:
        The columns of the files; None if there are no files.
    """
    parts = [(storage, files) for storage, files in parts if files]
    if not parts:
        return None
    schema = pa.schema([])
    for storage, _ in parts:  # a file may lack columns of its table: rows of other code have had others
        schema = _with_more(schema, _columns(storage, table))
    names = set[str]()

    def read() -> Iterator[pa.Table]:
        for storage, file in ((storage, file) for storage, files in parts for file in files):
            with storage.fetched(file_path(table, file), scratch) as local, stored_rows(local) as stored:
                rows = frames.canonical(with_partition(stored.read(), file))
                names.update(rows.column_names)
                yield frames.aligned(rows if within is None else rows.filter(within(storage, rows, file)), schema)

    load(connection, name, read(), schema)
    return pa.schema([field for field in schema if field.name in names])


def _columns(storage: Storage, table: str) -> pa.Schema:
    handle = fenced_table.open_table(storage, table_path(table))
    return frames.canonical_schema(pa.schema(handle.schema().to_arrow()))


def _report(diff: BranchDiff) -> Iterator[str]:
    """Yield the paragraphs of the report."""
    yield f"# {diff.pipeline}@{diff.branch} beside {diff.pipeline}"
    yield (
        f"Forked from checkpoint {diff.base}; the pipeline is at {diff.head}, the branch at {diff.tip}. "
        + ("**Nothing differs.**" if diff.same else "Rows since the fork, and state:")
    )
    behind = [f"{arrived} of {name}" for name, arrived in diff.behind.items() if arrived.waiting]
    if behind:
        yield f"**The branch has still to read {', '.join(behind)}**; it differs by those too."
    yield from (f"**Promoting it would take back:** {taken}." for taken in diff.taken_back)
    yield "\n".join(
        [
            "| | rows or keys | of the branch | added | removed | changed |",
            "|---|---:|---:|---:|---:|---:|",
            *(
                f"| table {table.table} | {table.rows[0]:,} | {table.rows[1]:,} | {_figures(table.counts)} |"
                for table in diff.tables
            ),
            *(
                f"| state of {state.stage} | | | "
                f"{_figures(state.counts) if state.counts is not None else f'{state.why} | | '} |"
                for state in diff.states
            ),
        ]
    )
    yield from diff.left_out()
    yield from (f"State of {state.stage}: {state.why}." for state in diff.states if state.counts and state.why)
    for table in diff.tables:
        if not table.same or table.columns:
            yield f"## {table.table}" + (f" ({table.columns})" if table.columns else "")
            if any(table.days):
                yield "\n".join(_by_day(table.days))
            yield "\n".join(_rows(table.sample))
    for state in diff.states:
        if state.sample:
            yield f"## State of {state.stage}"
            yield "\n".join(_rows(list(by_field(state))))


def _figures(counts: Mapping[str, int]) -> str:
    return " | ".join(f"{counts[kind]:,}" for kind in KINDS)


def _by_day(days: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield from ("| day | added | removed | changed |", "|---|---:|---:|---:|")
    yield from (f"| {day} | {_figures(counts)} |" for day, counts in list(days.items())[:_DAYS_SHOWN])
    if len(days) > _DAYS_SHOWN:
        yield f"| ... {len(days) - _DAYS_SHOWN} more days | | | |"


def _rows(sample: Sequence[dict[str, Any]]) -> Iterator[str]:
    if sample:
        names = list(sample[0])
        yield f"| {' | '.join(map(_text, names))} |"
        yield f"|{'---|' * len(names)}"
        for row in sample:
            yield f"| {' | '.join(_text(row[name]) for name in names)} |"


def _text(value: Any) -> str:
    return as_text(text_of(value))
