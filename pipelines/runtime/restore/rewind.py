"""Rewind: state, source positions and every sink table together, back to one checkpoint; then the input is read again
from there.

    1 2 3 4 5            5 is the newest; 4 and 5 are bad
    1 2 3 4 5 6          6 = rewind to 3: state and positions of 3, tables as 3 left them. The commit of its row decides
    1 2 3 4 5 6 7 8      7 continues 6 and reads what 4 had read

The row is an intent: from its commit on the head is the rewind, whatever becomes of this process. Tables are taken back
after it, like rows that are published after their checkpoint, by whoever comes next if need be. Before it nothing is
changed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.inspection.state_reader import whole
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.derived_checkpoint import begin, commit, publish, unchanged
from pipelines.runtime.ownership.ownership import Ownership
from pipelines.runtime.ownership.pipeline_storage import open_storage, readers
from pipelines.runtime.restore import rows_back
from pipelines.runtime.sinks import restore_version
from pipelines.runtime.sinks.opening import kind_in
from pipelines.runtime.sinks.restore_version import TableRewind
from pipelines.runtime.sinks.table_commit import table_path
from pipelines.runtime.sources.positions import Arrivals
from state_ops.checkpoints.checkpoint import REWIND, WITH_PARTS, Checkpoint, stats_of
from state_ops.checkpoints.registry import Registry
from state_ops.checkpoints.sink_link import SinkLink
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.storage.storage import Storage

log = Logger("weir.rewind")

_SHOWN = 3
_MOST_TAKEN = 20  # ranges of rows that are recorded as taken back; then two count as one, with what lies between


@dataclass(frozen=True, slots=True)
class SourceRewind:
    """What a rewind means for one source.

    Attributes:
        again: What is read again.
        gone: Names of files or parts that would have to be, and are not there as they were.
        piece: "file" or "part".
    """

    source: str
    again: Arrivals
    gone: tuple[str, ...]
    piece: str

    def __str__(self) -> str:
        again = f"{self.again} {agrees(self.again.waiting, 'is', 'are')} read again"
        return again + (f", {counted(len(self.gone), self.piece, 'is', 'are')} gone" if self.gone else "")


@dataclass(frozen=True, slots=True)
class SinkRewind:
    """A sink that is no table, and has been given rows of checkpoints that are abandoned.

    Attributes:
        name: The sink's.
        kind: What it is.
        published: The newest checkpoint that it was given.
        then: The newest one of those that stay.
        stays: Why the rows in between stay in it, as a clause; None: they are taken back.
        lost: What it would have to have again and has not, in words; None: nothing.
        moves: Its marker moves to the rewind, so that none of those checkpoints can be published any more. It cannot
            where the code has the sink no more.
    """

    name: str
    kind: str
    published: CheckpointId | None
    then: CheckpointId | None
    stays: str | None
    lost: str | None
    moves: bool

    @property
    def obstacles(self) -> list[str]:
        """What has to be accepted, in words."""
        since = self.then or "the beginning"
        stays = f"rows of checkpoints after {since} stay in the sink {self.name}: {self.stays}"
        return ([stays] if self.stays is not None else []) + ([self.lost] if self.lost is not None else [])


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """What a rewind would do.

    Attributes:
        head: The newest checkpoint now.
        to: The one that it goes back to.
        abandoned: Completed checkpoints in between.
        stages: Bytes of state now and then, by uid.
        tables: Those of the pipeline, also where nothing is given back.
        obstacles: Why it is refused unless they are accepted, in words.
        sinks: Those that are no tables.
    """

    head: Checkpoint
    to: Checkpoint
    abandoned: tuple[CheckpointId, ...]
    stages: dict[str, tuple[int, int]]
    sources: tuple[SourceRewind, ...]
    tables: tuple[TableRewind, ...]
    obstacles: tuple[str, ...]
    sinks: tuple[SinkRewind, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "head": self.head.id,
            "to": self.to.id,
            "to_completed_at": self.to.completed_at.isoformat(),
            "abandoned": list(self.abandoned),
            "state_bytes": {uid: {"now": now, "then": then} for uid, (now, then) in self.stages.items()},
            "sources": {
                source.source: {"again": source.again.waiting, "gone": list(source.gone)} for source in self.sources
            },
            "tables": {
                table.table: {
                    "version": table.version,
                    "as_of_version": table.then,
                    "rows_removed": table.rows,
                    **table.facts,
                    "files_removed": len(table.goes),
                    "files_restored": len(table.comes),
                    "unknown_commits": [list(entry) for entry in table.unknown],
                    "vacuumed_files": list(table.vacuumed),
                }
                for table in self.tables
            },
            "sinks": {
                sink.name: {"kind": sink.kind, "published": sink.published, "then": sink.then, "stays": sink.stays}
                for sink in self.sinks
            },
            "obstacles": list(self.obstacles),
        }


def plan(pipeline: Pipeline, settings: Settings, to: int) -> RewindPlan:
    """What a rewind to checkpoint `to` would do, by reading alone, with what becomes of tables' rows. Raises WeirError
    when there is no such checkpoint."""
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    target = whole(pipeline, registry, to)
    assert head is not None, "there is a checkpoint, so there is a newest one"
    decided = planned(pipeline, settings, storage, registry, head, target)
    tables = [rows_back.looked_at(pipeline, storage, table, settings.work_dir) for table in decided.tables]
    return replace(decided, tables=tuple(tables))


def planned(
    pipeline: Pipeline, settings: Settings, storage: Storage, registry: Registry, head: Checkpoint, to: Checkpoint
) -> RewindPlan:
    """What a rewind from the newest checkpoint to another one would do."""
    if to.id == head.id:
        raise ConfigurationError(
            f"{pipeline.title} is at checkpoint {to.id} already.",
            next=f"`weir run {pipeline.title}` goes on from there.",
        )
    between = tuple(row.id for row in registry.checkpoints() if to.id < row.id <= head.id)
    sources = []
    for name, reader in readers(pipeline, settings).items():
        again, gone = reader.again(to.offsets.get(name), head.offsets.get(name))
        sources.append(SourceRewind(name, Arrivals(tuple(again), unit=reader.unit), tuple(gone), reader.piece))
    tables, obstacles = [], []
    elsewhere = given(pipeline, head, to)
    for name in dict.fromkeys([*(sink.name for sink in pipeline.sinks), *head.sinks]):  # also those that the code lacks
        if not has_table(pipeline, head, name):
            continue
        table = restore_version.planned(storage, name, to.published(name))
        if table is not None:
            tables.append(table)
        elif name in head.sinks:
            raise WeirError(
                f"The table {name} is gone.",
                where=storage.full(table_path(name)),
                next=f"Nothing was changed. `weir fsck {pipeline.title}` says what else is missing; put the table "
                "back first.",
            )
    for source in sources:
        if source.gone:
            obstacles.append(
                f"{source.source} has lost what would be read again ({listed(source.gone)}): those rows would be "
                "missing"
            )
    obstacles += hindrances(tables)
    obstacles += [obstacle for sink in elsewhere for obstacle in sink.obstacles]
    uids = {*head.operators, *to.operators}
    sizes = {uid: (stats_of(head, uid).bytes_total, stats_of(to, uid).bytes_total) for uid in sorted(uids)}
    return RewindPlan(head, to, between, sizes, tuple(sources), tuple(tables), tuple(obstacles), elsewhere)


def has_table(pipeline: Pipeline, head: Checkpoint, name: str) -> bool:
    """Whether a sink is a table, by the code, else by what the newest checkpoint knows of it."""
    sink = pipeline.sink(name)
    return pipeline.is_table(sink) if sink is not None else kind_in(head, name) is None


def given(pipeline: Pipeline, head: Checkpoint, to: Checkpoint) -> tuple[SinkRewind, ...]:
    """The sinks that are no tables and have been given rows since an earlier checkpoint."""
    sinks = []
    for name in head.sinks:
        published, then, sink = head.published(name), to.published(name), pipeline.sink(name)
        if has_table(pipeline, head, name) or published == then:
            continue
        if sink is None:
            why: str | None = "the code has it no more, so that it cannot even be told"
        else:
            why = sink.stays
        kind = sink.kind if sink is not None else kind_in(head, name) or ""
        gone = [ids for ids in head.sinks[name].taken if ids[0] < (then or 0) < ids[1]]
        lost = (
            f"checkpoint {gone[0][1]} has taken rows back from the sink {name} that do not come again" if gone else None
        )
        sinks.append(SinkRewind(name, kind, published, then, why, lost, sink is not None))
    return tuple(sinks)


def hindrances(tables: Sequence[TableRewind]) -> list[str]:
    """What would be lost by taking tables back, in words."""
    obstacles = []
    for table in tables:
        if table.unknown:
            commits = listed([f"version {version}: {operation}" for version, operation in table.unknown])
            obstacles.append(
                f"others have committed to the table {table.table} ({commits}), which would be taken back too"
            )
        if table.vacuumed:
            obstacles.append(
                f"{counted(len(table.vacuumed), 'file')} of the table {table.table} "
                f"{agrees(len(table.vacuumed), 'is', 'are')} vacuumed ({listed(table.vacuumed)}): "
                "their rows would be missing"
            )
    return obstacles


def listed(names: Sequence[str], versions: Sequence[object] = ()) -> str:
    """The first of some names, with a digest of what is not shown: who accepts the text accepts this very list.

    Args:
        versions: What else belongs to the list and is not shown, as the files' sizes and times of change.
    """
    more = len(names) - _SHOWN
    text = ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if more <= 0 and not versions:
        return text
    digest = hashlib.sha256(repr((list(names), list(versions))).encode()).hexdigest()
    return f"{text}, digest {digest[:12]}"


def check(decided: RewindPlan, pipeline: str, accepted: Collection[str]) -> None:
    """Raises WeirError when a rewind has obstacles that nobody has accepted.

    Args:
        accepted: Obstacles of a plan that somebody was shown.
    """
    refused = [obstacle for obstacle in decided.obstacles if obstacle not in accepted]
    if refused:
        raise WeirError(
            f"{pipeline} cannot be rewound to checkpoint {decided.to.id} without loss: {'; '.join(refused)}.",
            next="Nothing was changed. Put back what is missing, or accept that: "
            f"weir rewind {pipeline} --to {decided.to.id} --force; in the rewind job, `accept` takes what a dry run "
            "has shown",
        )


def marker_moves(context: RunContext, head: Checkpoint, name: str, id: CheckpointId, to: Checkpoint) -> SinkLink:
    """What the `sinks` of a checkpoint that abandons others say of a sink whose marker it moves.

    Args:
        to: The newest checkpoint whose rows stay.
    """
    link = context.sinks.link(name, id, head.published(name), head.sinks.get(name))
    sink, then = context.pipeline.sink(name), to.published(name)
    if sink is None or sink.stays is not None:
        return link
    earlier = [ids for ids in link.taken if ids[0] < (then or 0)]
    if len(earlier) == _MOST_TAKEN:
        earlier[:2] = [[earlier[0][0], earlier[1][1]]]
    return link.updated(to=then, taken=[*earlier, [then or 0, id]])


def carry_out(owner: Ownership, decided: RewindPlan, reason: str = "") -> Checkpoint:
    """Rewind as planned by the owner, to a checkpoint that is proven whole; returns the rewind's own checkpoint."""
    context, head, to = owner.context, decided.head, decided.to
    moved = [sink.name for sink in decided.sinks if sink.moves]
    id = begin(owner, head, [*(table.table for table in decided.tables), *moved])
    taken_back = {
        table.table: SinkLink(id, head.published(table.table)).updated(to=to.published(table.table), at=table.version)
        for table in decided.tables
        if head.published(table.table) is not None
    }
    markers = {name: marker_moves(owner.context, head, name, id, to) for name in moved}
    base = replace(to, sinks=head.sinks | taken_back | markers, format_version=max(to.format_version, WITH_PARTS))
    files, what = unchanged(context, to), f"to checkpoint {to.id}"
    row = commit(context, base, id, files, kind=REWIND, what=what, reason=reason, head=head, parent=to.id)
    log.info(
        "rewound",
        pipeline=context.pipeline.title,
        to=int(to.id),
        checkpoint=int(id),
        abandoned=[int(checkpoint) for checkpoint in decided.abandoned],
    )
    publish(context, row)
    return row
