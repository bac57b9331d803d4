"""Promotion: a branch's state and rows become the pipeline's, instead of what the pipeline made of the same input since
the fork.

    1 2 3 4 5            the pipeline; a branch was forked from 3, and has read what 4 and 5 have read
    1 2 3 4 5 6          6 = its promotion: positions of 5, state and rows of the branch. 4 and 5 are abandoned, as by a
                         rewind to 3
    1 2 3 4 5 6 7        7 continues 6

The pipeline's owner does it between two epochs, after the branch has read all that the pipeline has. Like a rewind's,
the row of the promotion is an intent: its commit decides, and then each table follows by one commit of its own. If the
owner dies in between, the next owner finishes that. Before the row's commit nothing is changed. A rewind to 5 takes the
promotion back.

A backfill may replace less: the rows of a range of event time alone. Then state and positions stay as they are in 5,
and nothing is abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from deltalake.exceptions import TableNotFoundError

from state_ops.coordination import gate_hold, lease, requests, suspension
from state_ops.coordination.requests import STOP, Request
from state_ops.counts import agrees, counted
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.errors import BusyError, DamageError, FencedError, WeirError
from state_ops.facts import FLAT, HIDDEN, By, Facts, Named, fact
from state_ops.ids import AttemptId, CheckpointId, epoch_dir, new_attempt_id, parse_epoch_dir
from state_ops.logs import Logger
from state_ops.records.checkpoint import EDIT, EDITED, FORKED, PROMOTION, WITH_PROMOTION, Checkpoint, abandoned
from state_ops.records.pins import BRANCH, Pin
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta import append, replace_where, restore_version
from weir.connectors.delta.changes import Changes, check_columns, columns_of
from weir.connectors.delta.replace_where import Range
from weir.connectors.delta.restore_version import Promoted, RowsBack, TableRewind
from weir.connectors.delta.sink import recorded_table
from weir.connectors.delta.table_commit import file_path, table_path
from weir.connectors.delta.upsert import spilled
from weir.definition import Pipeline, Stage, column_lineage
from weir.definition.sink import Capabilities, Sink
from weir.epoch.step_runner import StepRunner
from weir.execution.executor import Executor
from weir.operations import promoted_rows
from weir.operations.forks import behind, branched, range_of
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import begin, commit, copied, copy, lasting, pointed, unchanged
from weir.ownership.ownership import Ownership, claimed
from weir.ownership.pipeline_storage import open_storage, readers, storage_errors
from weir.ownership.prune import prune
from weir.ownership.publish import publish_missing
from weir.restore import rows_back
from weir.restore.recovery import owning
from weir.restore.rewind import given, has_table, hindrances, marker_moves
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings.configuration import Settings
from weir.sinks import recorded_sink
from weir.sources.positions import Arrivals, in_words
from weir.sources.reader import SourceReader

log = Logger("weir.promotion")


@dataclass(frozen=True, slots=True)
class TablePromotion(Facts):
    """The changes that a promotion makes to one table.

    Attributes:
        back: Which of the pipeline's rows since the fork go; None if the pipeline has no such table.
        comes: The files of the branch, by their path in its own table.
        schema: The schema of the branch's table.
        column: The event time by which a range of rows is replaced.
        ranged: How many rows the replacement of a range takes away and brings.
    """

    table: Annotated[str, HIDDEN]
    back: Annotated[TableRewind | None, HIDDEN]
    comes: Annotated[tuple[DataFile, ...], HIDDEN]
    schema: Annotated[pa.Schema | None, HIDDEN]
    column: Annotated[str | None, HIDDEN] = None
    ranged: Annotated[tuple[int, int] | None, HIDDEN] = None

    @property
    @fact
    def becomes(self) -> Annotated[RowsBack | None, FLAT]:
        """The rows of the table that change when those since the fork go; null: nobody has looked."""
        return self.back.becomes if self.back is not None else None

    @property
    @fact
    def files_added(self) -> int:
        """The number of files of the branch that come."""
        return len(self.comes)

    @property
    @fact
    def unknown_commits(self) -> tuple[tuple[int, str], ...]:
        """Commits of others that are taken back, as version and operation."""
        return self.back.unknown if self.back is not None else ()

    @property
    @fact
    def rows_removed(self) -> int:
        """The number of rows that go."""
        if self.ranged is not None:
            return self.ranged[0]
        return self.back.rows_removed if self.back is not None else 0

    @property
    def in_words(self) -> str:
        """The changes of the table's rows, for people."""
        goes = f"{counted(self.rows_removed, 'row', 'goes', 'go')}"
        if self.ranged is None and self.back is not None:
            goes = self.back.in_words
        return f"{goes}, {self.comes_in_words}"

    @property
    def comes_in_words(self) -> str:
        """Which rows of the branch come, for people."""
        return f"{counted(self.rows_added, 'row')} of the branch {agrees(self.rows_added, 'comes', 'come')}"

    @property
    @fact
    def rows_added(self) -> int:
        """The number of rows of the branch that come."""
        return self.ranged[1] if self.ranged is not None else sum(file.rows for file in self.comes)


@dataclass(frozen=True, slots=True)
class TakenBack(Facts):
    """A promotion or edit of the pipeline since a branch was forked, which the branch's promotion would take back.

    Attributes:
        checkpoint: The id of the promotion or edit.
        what: What was promoted or edited, in words.
        tables: The tables whose rows would be again what they were before it; empty for an edit of state.
    """

    checkpoint: int
    what: str
    tables: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {', '.join(self.tables)}" if self.tables else ""
        return (
            f"checkpoint {self.checkpoint} has taken over {self.what} since the branch was forked, "
            f"and that would be taken back{where}"
        )


@dataclass(frozen=True, slots=True)
class KeptSink(Facts):
    """A sink that is no table: a promotion neither takes from it nor gives to it, unless rows can be taken back.

    Attributes:
        name: The sink's.
        kind: What it is.
        lacks: The branch has made rows for it, which it does not get.
        keeps: It was given rows since the fork that the promotion abandons.
        moves: Its marker moves to the promotion, unless the code has it no more.
        brings: What happens to its rows, if they can be taken back: those since the fork go, the branch's come.
        lost: What it would have to have again and has not, in words; None: nothing.
    """

    name: Annotated[str, HIDDEN]
    kind: str
    lacks: bool
    keeps: bool
    moves: Annotated[bool, HIDDEN]
    brings: Annotated[TablePromotion | None, HIDDEN] = None
    lost: Annotated[str | None, HIDDEN] = None

    @property
    @fact
    def rows_added(self) -> int:
        """The number of rows of the branch that come."""
        return self.brings.rows_added if self.brings is not None else 0

    @property
    def obstacles(self) -> list[str]:
        """The obstacles that have to be accepted, in words."""
        if self.brings is not None:
            return [self.lost] if self.lost is not None else []
        return [str(self)]

    def __str__(self) -> str:
        ways = ["keeps what it was given since the fork"] if self.keeps else []
        ways += ["does not get the branch's rows"] if self.lacks else []
        return f"the sink {self.name} ({self.kind}) {' and '.join(ways)}"


@dataclass(frozen=True, slots=True)
class PromotionPlan(Facts):
    """The changes that a promotion would make.

    Attributes:
        head: The pipeline's newest checkpoint.
        base: The checkpoint from which the branch was forked.
        tip: The branch's newest checkpoint.
        behind: By source, what the branch has still to read.
        obstacles: Why the promotion is refused unless they are accepted, in words.
        only: The range whose rows alone are replaced.
        taken_back: Those obstacles that the pipeline has promoted or edited since the fork, oldest first.
        corrected: Those obstacles that say which input of a backfill has changed since.
        elsewhere: The sinks that are no tables.
        checkpoint: The promotion's own; None: a dry run.
    """

    branch: str
    head: Checkpoint
    base: Checkpoint
    tip: Annotated[Checkpoint, Named("branch_head")]
    behind: Annotated[Mapping[str, Arrivals], Named("files_behind")]
    tables: Annotated[tuple[TablePromotion, ...], By("table")]
    obstacles: tuple[str, ...]
    only: Annotated[Range | None, Named("range")] = None
    taken_back: tuple[TakenBack, ...] = ()
    corrected: Annotated[tuple[str, ...], HIDDEN] = ()
    elsewhere: Annotated[tuple[KeptSink, ...], By("name", "sinks")] = ()
    checkpoint: CheckpointId | None = None


Planner = Callable[[Pipeline, Settings, str], PromotionPlan]


def plan(pipeline: Pipeline, settings: Settings, name: str) -> PromotionPlan:
    """Return the plan of promoting a branch now. It only reads.

    Raises:
        WeirError: The branch cannot be promoted at all.
    """
    here = branched(pipeline, settings, name)
    storage, registry = open_storage(pipeline, settings)
    source, theirs = open_storage(here, settings)
    pin = registry.pinned(BRANCH, name)
    head, tip, completed = registry.head(), theirs.head(), registry.checkpoints()
    base = next((row for row in completed if pin is not None and row.commit_id == pin.commit_id), None)
    if head is None or tip is None or base is None:
        raise WeirError(
            f"The branch {here.title} is not whole: "
            + ("it has no checkpoint." if tip is None else "the checkpoint that it was forked from is gone."),
            next=f"Fork it anew: weir fork {pipeline.title} --drop {name}, then --name {name}",
        )
    if (by := abandoned(completed).get(base.id)) is not None:
        raise WeirError(
            f"{here.title} was forked from checkpoint {base.id}, which checkpoint {by} has abandoned: it shares no "
            "input with what the "
            "pipeline is now.",
            next=f"Fork it anew from a checkpoint since then: weir fork {pipeline.title} --name NAME",
        )
    assert pin is not None, "the base is what it names"
    tables = tuple(_tables(pipeline, storage, source, head, base, tip))
    only, waiting = range_of(source, tip), behind(here, settings, tip)
    if only is not None:
        if not any(arrived.waiting for arrived in waiting.values()):  # else it catches up first, and is looked at again
            _check_range(here, head, tip, readers(pipeline, settings))
        written = {sink.name for sink in pipeline.tables}
        with_sink = [table for table in tables if table.table in written]
        tables = tuple(_ranged(pipeline, storage, source, tip, table, only, settings.work_dir) for table in with_sink)
        obstacles = []
    else:
        obstacles = hindrances([table.back for table in tables if table.back is not None])
    elsewhere = _elsewhere(pipeline, source, head, base, tip, only)
    obstacles += [obstacle for sink in elsewhere for obstacle in sink.obstacles]
    taken_back = _taken_back(here, storage, completed, pin, tip, tables, only, settings.work_dir)
    obstacles += [str(taken) for taken in taken_back]
    return PromotionPlan(
        name, head, base, tip, waiting, tables, tuple(obstacles), only, taken_back, elsewhere=tuple(elsewhere)
    )


def with_rows(decided: PromotionPlan, pipeline: Pipeline, settings: Settings) -> PromotionPlan:
    """Return the plan together with the rows of tables that it changes, as people are shown it."""
    storage, _ = open_storage(pipeline, settings)

    def looked_at(back: TableRewind | None) -> TableRewind | None:
        return back and rows_back.looked_at(pipeline, storage, back, settings.work_dir)

    if decided.only is not None:  # it says that already
        return decided
    return replace(decided, tables=tuple(replace(table, back=looked_at(table.back)) for table in decided.tables))


def _elsewhere(
    pipeline: Pipeline, source: Storage, head: Checkpoint, base: Checkpoint, tip: Checkpoint, only: Range | None
) -> list[KeptSink]:
    """Return the sinks that are no tables and differ by what a promotion replaces, or by what the branch has handed
    out."""
    gave = {sink.name: sink for sink in given(pipeline, head, base)} if only is None else {}
    names = [sink.name for sink in pipeline.sinks if not pipeline.capabilities(sink).has_versions]
    sinks = []
    for name in dict.fromkeys([*names, *gave]):
        sink, old = pipeline.sink(name), gave.get(name)
        if old is not None or tip.published(name) is not None:
            kind = sink.kind if sink is not None else old.kind if old is not None else ""
            brings = None
            if only is None and sink is not None and sink.stays is None:
                comes, schema = rows_of(source, name)
                _check_whole(name, comes)
                brings = TablePromotion(name, None, comes, schema)
            gave_rows, lost = tip.published(name) is not None, old.lost if old is not None else None
            lacks, keeps = gave_rows and brings is None, old is not None and brings is None
            sinks.append(KeptSink(name, kind, lacks, keeps, sink is not None, brings, lost))
    return sinks


def _taken_back(
    here: Pipeline,
    storage: Storage,
    completed: Sequence[Checkpoint],
    pin: Pin,
    tip: Checkpoint,
    tables: Sequence[TablePromotion],
    only: Range | None,
    scratch: Path,
) -> tuple[TakenBack, ...]:
    """Return the changes in the pipeline since the fork that the promotion would take back.

    Other branches or people have made them. Promotions are found in the logs of the tables, which reach back to the
    base, since rows of the registry may be pruned. The branch's own changes do not count, because the branch has them.
    Nor do changes between its base and the fork: a person who forks from an older checkpoint wants all since then made
    anew.

    Args:
        here: The branch.
        completed: The pipeline's retained checkpoints, oldest first.
        only: The branch replaces rows of this range alone, so that only changes of those rows count.
    """
    assert here.branch is not None
    rows, left = {int(row.id): row for row in completed}, abandoned(completed)
    earlier = [
        row.id for row in completed if row.completed_at <= pin.created_at
    ]  # the fork was made by an earlier release
    forked = int(tip.totals.get(FORKED, max(earlier, default=pin.checkpoint_id)))
    touched: dict[int, list[str]] = {}
    texts: dict[int, str] = {}
    for table in tables:
        for promoted in table.back.promoted if table.back is not None else ():
            row = rows.get(promoted.checkpoint)
            if promoted.checkpoint <= forked or (row is None and promoted.branch is None and promoted.range is None):
                continue
            if (row is not None and row.kind != PROMOTION) or _is_of(here, promoted.branch, row):
                continue
            if only is not None and not _changed(storage, table, promoted, only, scratch):
                continue
            touched.setdefault(promoted.checkpoint, []).append(table.table)
            texts[promoted.checkpoint] = f"the rows of {promoted.range}" if promoted.range is not None else "a branch"
    if only is None:
        for row in completed:  # also those that changed no table
            if row.kind == PROMOTION and row.id > forked and row.id not in left and not _is_of(here, None, row):
                touched.setdefault(int(row.id), [])
                texts.setdefault(int(row.id), "a branch")
        edits = [row.id for row in completed if row.kind == EDIT and row.id not in left]
        edited = max([completed[-1].totals.get(EDITED, 0), *edits])
        if edited > forked:
            touched[edited], texts[edited] = [], "imported rows of state"
    return tuple(TakenBack(id, _said(texts[id], rows.get(id)), tuple(touched[id])) for id in sorted(touched))


def _said(what: str, row: Checkpoint | None) -> str:
    return what if row is None else f"{what} ({row.reason})"


def _is_of(here: Pipeline, branch: str | None, row: Checkpoint | None) -> bool:
    """Return whether a promotion is of this very branch.

    Earlier releases recorded only the branch's name, in the reason.
    """
    assert here.branch is not None
    branches = (
        {branch}
        if branch is not None
        else {link.branch for link in (row.sinks.values() if row else ()) if link.branch is not None}
    )
    if branches:
        return here.branch.id in branches
    return row is not None and f"of {here.title}:" in f"{row.reason}:"


def _changed(storage: Storage, table: TablePromotion, promoted: Promoted, only: Range, scratch: Path) -> bool:
    """Return whether a promotion has brought or taken away rows of a range.

    True also if this cannot be seen any more.
    """
    if promoted.range is not None:
        return replace_where.overlaps(promoted.range, only)
    assert table.column is not None, "the plan has found one, or refused"
    try:
        before = restore_version.files_at(storage, table.table, promoted.version - 1)
        after = restore_version.files_at(storage, table.table, promoted.version)
        both = {file.path for file in before} & {file.path for file in after}
        moved = [file for file in (*before, *after) if file.path not in both]
        return replace_where.touched(storage, table.table, moved, table.column, only, scratch) > 0
    except (DamageError, OSError):
        return True


def _check_range(here: Pipeline, head: Checkpoint, tip: Checkpoint, sources: Mapping[str, SourceReader]) -> None:
    """Check that rows of a range may be exchanged while state and positions stay: both sides must have applied the very
    same rows.
    """
    why = None
    if head.watermarks != tip.watermarks:
        why = "windows are closed in one and open in the other: the pipeline was drained, or the newest rows differ"
    if any(stats.waiting for row in (head, tip) for stats in row.operators.values()):
        why = "rows wait in front of a stage (unaligned checkpoints); `weir savepoint` lets stages apply them"
    for name, position in tip.offsets.items():
        more = sources[name].beyond(head.offsets.get(name), position) if name in sources else None
        if more is not None:
            why = f"it has read files that the pipeline has not, e.g. {more} of {name}; perhaps that was rewound"
    if why is not None:
        raise WeirError(
            f"{here.title} cannot replace rows of a range alone: {why}.",
            next="Nothing was changed. Replace state and all rows since the range began (backfill.replaces: since), "
            "or drop the branch and "
            "ask again.",
        )


def _are_taken_back(stage: Stage, column: str) -> bool:
    """Return whether a stage hands out changes of state that has rows of several days, by a column with their day."""
    if stage.key or not stage.hands_out_changes:
        return stage.hands_out_changes and column not in stage.key
    return any(
        _are_taken_back(input.origin, column_lineage.before(input.columns, column) or column)
        for input in stage.inputs
        if isinstance(input.origin, Stage)
    )


def check_keeps_ranges(name: str, sink: Sink | None) -> None:
    """Refuse to replace rows of a range alone in a table whose sink keeps only the newest rows.

    Raises:
        WeirError: The table is one of those.
    """
    if sink is not None and (sink.capabilities.newest_of or sink.capabilities.replaces):
        raise WeirError(
            f"Rows of a range alone cannot be replaced in the table {name}: it has only the newest rows.",
            next="Replace all since the range began (backfill.replaces: since): that makes its changes anew.",
        )


def _ranged(
    pipeline: Pipeline,
    storage: Storage,
    source: Storage,
    tip: Checkpoint,
    table: TablePromotion,
    only: Range,
    scratch: Path,
) -> TablePromotion:
    """Return the changes of one table by a promotion of a range alone, with the rows it takes away and brings."""
    name = table.table
    check_keeps_ranges(name, as_handed_out(pipeline, tip, name))
    schema = table.schema if table.schema is not None else rows_of(storage, name)[1]
    column = pipeline.event_time_of(name, schema) if schema is not None else None
    if column is None:
        raise WeirError(
            f"Nothing says to which day rows of the table {name} belong.",
            next=f'Say delta.append("{name}", event_time="COLUMN"), or promote as a whole (backfill.replaces: since).',
        )
    if any(sink.name == name and _are_taken_back(stage, column) for stage in pipeline.stages if (sink := stage.sink)):
        raise WeirError(
            f"Rows of a range alone cannot be replaced in the table {name}: its rows are changes, and rows of other "
            "days take theirs back.",
            next="Replace all since the range began (backfill.replaces: since): that makes its changes anew.",
        )
    replace_where.check_bounds(name, schema, column, only)
    before = restore_version.files_at(storage, name, table.back.then) if table.back is not None else []
    lost = replace_where.touched(storage, name, before, column, only, scratch)
    if lost:
        raise WeirError(
            f"{counted(lost, 'row')} of {only} {agrees(lost, 'was', 'were')} in the table {name} before "
            f"the branch was forked: they would go and not "
            "come back.",
            next="Nothing was changed. Backfill a range that begins later, or replace all since then "
            "(backfill.replaces: since).",
        )
    goes = replace_where.touched(storage, name, rows_of(storage, name)[0], column, only, scratch)
    comes = replace_where.touched(source, name, table.comes, column, only, scratch)
    return replace(table, column=column, ranged=(goes, comes))


def _tables(
    pipeline: Pipeline, storage: Storage, source: Storage, head: Checkpoint, base: Checkpoint, tip: Checkpoint
) -> Iterator[TablePromotion]:
    for name in dict.fromkeys([*(sink.name for sink in pipeline.sinks), *head.sinks, *tip.sinks]):
        if not has_table(pipeline, head, name):
            continue
        back = restore_version.planned(storage, name, base.published(name))
        if back is None and name in head.sinks:
            raise WeirError(
                f"The table {name} is gone.",
                where=storage.full(table_path(name)),
                next=f"Nothing was changed. `weir fsck {pipeline.title}` says what else is missing; put the table "
                "back first.",
            )
        comes, schema = rows_of(source, name)
        sink = as_handed_out(pipeline, tip, name)
        can = sink.capabilities if sink is not None else Capabilities()
        if sink is not None and can.newest_of and schema is not None:
            _check_whole(name, comes)
            check_columns(sink, schema)
            schema = columns_of(schema)
        if schema is not None:
            by = can.partition_by if sink is not None else None
            append.check_table(storage, name, schema, keyed=bool(can.newest_of), partition_by=by, evolves=can.evolves)
        if back is not None or comes:
            yield TablePromotion(name, back, comes, schema)


def as_handed_out(pipeline: Pipeline, tip: Checkpoint, table: str) -> Sink | None:
    """Return the sink of a table as the branch has handed its rows out, which today's code may have changed since.

    Raises:
        WeirError: It has handed them out for two kinds of sink.
    """
    today, link = pipeline.sink(table), tip.sinks.get(table)
    if link is None or link.how is None or (today is not None and not pipeline.capabilities(today).has_versions):
        return today
    if recorded_sink.MIXED in link.how:
        raise WeirError(
            f"The branch has handed out rows of the table {table} for two kinds of sink, or by two keys.",
            next="Nothing was changed. Fork anew, and let it read its input again with one of them.",
        )
    return recorded_table(table, link.how)


def _how(tip: Checkpoint, table: str) -> dict[str, Any]:
    """Return the promotion link's record of how the rows come into a table."""
    link = tip.sinks.get(table)
    return {"how": link.how} if link is not None and link.how is not None else {}


def rows_of(source: Storage, table: str) -> tuple[tuple[DataFile, ...], pa.Schema | None]:
    """Return the files and the schema of a branch's table; no files if it has no such table."""
    try:
        handle = fenced_table.open_table(source, table_path(table))
    except TableNotFoundError:
        return (), None
    return tuple(active_files(handle)), pa.schema(handle.schema().to_arrow())


def check(decided: PromotionPlan, pipeline: str, accepted: Collection[str]) -> None:
    """Check that all obstacles of a promotion are accepted.

    Args:
        accepted: Obstacles of a plan that a person was shown.

    Raises:
        WeirError: An obstacle is not among the accepted ones.
    """
    refused = [obstacle for obstacle in decided.obstacles if obstacle not in accepted]
    if refused:
        outdated = {*decided.corrected, *(str(taken) for taken in decided.taken_back)}
        ways = []
        if not outdated.isdisjoint(refused):
            ways.append(
                f"fork it anew, which has what the pipeline has now: weir fork {pipeline} --drop {decided.branch}, "
                "then "
                f"weir fork {pipeline} --name {decided.branch} (a backfill: ask for its range again instead)"
            )
        if not outdated.issuperset(refused):
            ways.append("put back what is missing")
        raise WeirError(
            f"{pipeline}@{decided.branch} cannot be promoted without loss: {'; '.join(refused)}.",
            next=f"Nothing was changed. Either {'; and '.join(ways)}. Or accept that: weir promote {pipeline} "
            f"{decided.branch} --force; in the promote "
            "job, `accept` takes what a dry run has shown",
        )


def catch_up(
    pipeline: Pipeline, settings: Settings, executor: Executor | None = None, runner: StepRunner | None = None
) -> int:
    """Let a branch read what its pipeline has read, with the code at hand.

    Returns:
        How many epochs that took.
    """
    options = RunOptions(until_caught_up=True, reason="to catch up with the pipeline")
    return sum(1 for _ in runtime.run(pipeline, settings, options, executor, runner))


def promote(
    pipeline: Pipeline,
    settings: Settings,
    name: str,
    *,
    executor: Executor | None = None,
    runner: StepRunner | None = None,
    accepted: Collection[str] = (),
    reason: str = "",
    planner: Planner = plan,
) -> Checkpoint:
    """Make a branch's state and rows the pipeline's.

    The branch catches up first, beside a running coordinator. Then that coordinator is stopped at its next barrier, and
    the branch reads what arrived meanwhile.

    Args:
        executor: As `run` takes it.
        runner: As `run` takes it.
        accepted: The obstacles that a person was shown and accepts.
        planner: What looks for obstacles: before the branch catches up, and once more under ownership.

    Returns:
        The promotion's own checkpoint, which the next run continues.

    Raises:
        WeirError: There are other obstacles, also such that came up meanwhile, or the branch is of another history.
            Nothing is changed.
    """
    storage, _ = open_storage(pipeline, settings)
    with storage_errors(pipeline, settings, storage):
        return _promoted(pipeline, settings, storage, name, executor, runner, accepted, reason, planner)


def _promoted(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    name: str,
    executor: Executor | None,
    runner: StepRunner | None,
    accepted: Collection[str],
    reason: str,
    planner: Planner,
) -> Checkpoint:
    here = branched(pipeline, settings, name)
    check(planner(pipeline, settings, name), pipeline.title, accepted)
    catch_up(here, settings, executor, runner)
    with suspension.during(storage, "a branch is promoted"), _owned(pipeline, settings) as owner:
        catch_up(here, settings, executor, runner)
        with claimed(here, settings):  # nobody else runs it
            decided = planner(pipeline, settings, name)
            check(decided, pipeline.title, accepted)
            if any(arrived.waiting for arrived in decided.behind.values()):
                raise WeirError(
                    f"{here.title} has not read all that {pipeline.title} has, although it was run: "
                    f"{in_words(decided.behind.values())} are left.",
                    next=f"Nothing was changed. `weir run {here.title}` says why it does not go on.",
                )
            return _carry_out(owner, here, decided, reason)


@contextmanager
def _owned(pipeline: Pipeline, settings: Settings) -> Iterator[Ownership]:
    """Own a pipeline whose coordinator may be running.

    The coordinator is asked to end at its next barrier, and so is any that somebody starts meanwhile.
    """
    storage, _ = open_storage(pipeline, settings)
    deadline = time.monotonic() + settings.checkpoints.timeout_seconds
    while True:
        if lease.watch(storage):
            sent = requests.send(storage, Request(STOP, trigger="promotion", reason="a branch is promoted"))
            while lease.watch(storage) and time.monotonic() < deadline:
                time.sleep(settings.run.poll_seconds)
            requests.take(storage, sent)
        with ExitStack() as owned:
            try:
                owner = owned.enter_context(owning(pipeline, settings, epochs=False, publishes=True))
            except (BusyError, FencedError):  # also one that claimed the pipeline at the same moment, as a promotion
                if time.monotonic() > deadline:
                    raise
                continue
            yield owner
            return


def _carry_out(owner: Ownership, here: Pipeline, decided: PromotionPlan, reason: str) -> Checkpoint:
    context, head = owner.context, decided.head
    source, theirs = open_storage(here, context.settings)
    given_rows = [
        (sink, kept.brings) for kept in decided.elsewhere if kept.brings and (sink := context.pipeline.sink(kept.name))
    ]
    for sink, brings in given_rows:
        promoted_rows.judge(context, source, here.title, sink, [*brings.comes])
    moved = [sink.name for sink in decided.elsewhere if sink.moves and (sink.keeps or sink.brings is not None)]
    id = begin(owner, head, [*(table.table for table in decided.tables), *moved], decided.tip)
    if decided.only is None:
        base, files = _whole(owner, here, source, theirs.files(decided.tip), decided, id)
        parent, what = decided.base.id, f"of {here.title}"
    else:
        base, files = _range(owner, here, source, decided, decided.only, id)
        parent, what = head.id, f"{decided.only} of {here.title}"
    for table in decided.tables:
        if table.back is None and table.schema is not None:
            sink = as_handed_out(context.pipeline, decided.tip, table.table)
            by = sink.capabilities.partition_by if sink is not None else ()
            append.ensure(context.storage, table.table, table.schema, partition_by=by)
    for sink, brings in given_rows:
        files = [*files, *_brought(owner, source, decided.tip, brings, id, None)]
        promoted_rows.prepare(context, sink, brings.schema)
    markers = {name: marker_moves(context, head, name, id, decided.base) for name in moved}
    base = replace(base, sinks={**base.sinks, **markers}, format_version=WITH_PROMOTION)
    row = commit(context, base, id, files, kind=PROMOTION, what=what, reason=reason, head=head, parent=parent)
    log.info(
        "promoted",
        pipeline=context.pipeline.title,
        branch=decided.branch,
        base=int(decided.base.id),
        checkpoint=int(id),
    )
    publish_missing(context, [row])
    if decided.only is None:
        gate_hold.clear(
            context.storage
        )  # the branch's code may let the held epoch through; if not, the next run says so
    prune(context)
    return row


def _whole(
    owner: Ownership,
    here: Pipeline,
    source: Storage,
    listing: Sequence[StateFile],
    decided: PromotionPlan,
    id: CheckpointId,
) -> tuple[Checkpoint, list[StateFile]]:
    """Bring a branch's state and rows here; what it inherited is here already.

    Returns:
        The parts of the promotion's checkpoint, and its listing.
    """
    assert here.branch is not None
    tip = decided.tip
    moved = copied(owner.context, source, lasting(listing, tip.operators), id, returning=True)
    files = [new for _, new in moved]
    sinks = dict(decided.head.sinks)
    for table in decided.tables:
        files += _brought(owner, source, tip, table, id, None)
        before = decided.head.published(table.table)
        if before is not None or table.comes:
            sinks[table.table] = (
                SinkLink(id, before)
                .following(decided.head.sinks.get(table.table))
                .updated(
                    to=decided.base.published(table.table),
                    at=table.back.version if table.back is not None else 0,
                    branch=here.branch.id,
                    **_how(decided.tip, table.table),
                )
            )
    # An edit of the branch is numbered as the branch counts, and one of the pipeline's is taken back.
    totals = {name: value for name, value in tip.totals.items() if name != EDITED}
    return replace(tip, operators=pointed(tip.operators, moved), sinks=sinks, totals=totals), files


def _range(
    owner: Ownership, here: Pipeline, source: Storage, decided: PromotionPlan, only: Range, id: CheckpointId
) -> tuple[Checkpoint, list[StateFile]]:
    """Bring a branch's rows of a range here; state and positions stay the pipeline's own.

    Returns:
        The parts of the promotion's checkpoint, and its listing.
    """
    assert here.branch is not None
    head = decided.head
    files = unchanged(owner.context, head)
    sinks = dict(head.sinks)
    for table in decided.tables:
        owner.context.sinks.check_rows(table.table, head)
        files += _brought(owner, source, decided.tip, table, id, only)
        link = SinkLink(id, head.published(table.table)).following(head.sinks.get(table.table))
        sinks[table.table] = link.updated(column=table.column, start=only.start, end=only.end, branch=here.branch.id)
    offsets = dict(head.offsets)
    for name, reader in owner.context.readers.items():
        if name in offsets:
            offsets[name] = reader.as_read_by(offsets[name], decided.tip.offsets.get(name))
    return replace(head, offsets=offsets, sinks=sinks), files


def _brought(
    owner: Ownership,
    source: Storage,
    tip: Checkpoint,
    table: TablePromotion,
    id: CheckpointId,
    only: Range | None,
) -> list[StateFile]:
    """Copy a branch's rows, perhaps only those of a range, into the directory of the pipeline's table, whose log does
    not name them yet.
    """
    context = owner.context
    attempt, sink = new_attempt_id(), as_handed_out(context.pipeline, tip, table.table)
    directory = context.pipeline.staging(sink) if sink is not None else f"{table_path(table.table)}/data"
    prefix = f"{directory}/{epoch_dir(context.generation, id)}"
    by_epoch = sink is not None and not context.pipeline.capabilities(sink).takes_files

    def copy_of(numbered: tuple[int, DataFile], _: object) -> StateFile:
        number, file = numbered
        path = f"{prefix}/{number}-{attempt}.parquet"
        there = file_path(table.table, file)
        if only is None:
            size, digest, rows = copy(context, source, there, path)
        else:
            size, digest, rows = _copied_range(context, source, there, path, table, only)
        number = _epoch_of(file) if by_epoch else number  # by which their changes are ordered
        return StateFile(
            "", number, OUTPUT, table.table, path, size, digest, True, attempt, sink=table.table, rows=rows
        )

    brought = together(copy_of, list(enumerate(table.comes)), at_once=context.storage.transfers)
    return [file for file in brought if file.rows]


def _epoch_of(file: DataFile) -> int:
    """Return the epoch that staged a file of a branch's table; -1: somebody else has written it."""
    parsed = parse_epoch_dir("/".join(file.path.split("/")[1:2]))
    return int(parsed[1]) if parsed is not None else -1


def changes_of(
    source: Storage, sink: Sink, comes: Sequence[DataFile], scratch: Path
) -> AbstractContextManager[Changes]:
    """Return the changes that a branch's rows make to a table with keys, netted over all its epochs."""
    files = [
        StateFile(
            "", _epoch_of(file), OUTPUT, sink.name, file_path(sink.name, file), file.bytes, "", True, AttemptId("")
        )
        for file in comes
    ]
    return spilled(source, sink, files, scratch, by_epoch=True)


def _check_whole(table: str, comes: Sequence[DataFile]) -> None:
    """Raise WeirError unless the order is known in which a branch has made its changes to a table with keys."""
    if any(_epoch_of(file) < 0 for file in comes):
        raise WeirError(
            f"Somebody has rewritten the branch's table {table}, so the order of its changes is lost.",
            next="Nothing was changed. Fork anew, and optimise no table of a branch.",
        )


def _copied_range(
    context: RunContext, source: Storage, there: str, here: str, table: TablePromotion, only: Range
) -> tuple[int, str, int]:
    assert table.column is not None, "the plan has found one, or refused"
    with source.fetched(there, context.settings.work_dir) as local:
        kept = local.with_name("kept")
        rows = replace_where.only(local, kept, table.column, only, inside=True)
        return (*context.storage.put_file(kept, here), rows) if rows else (0, "", 0)
