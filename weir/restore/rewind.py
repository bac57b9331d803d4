"""Rewind: state, source positions and every sink table together, back to one checkpoint; then the input is read again
from there.

    1 2 3 4 5            5 is the newest; 4 and 5 are bad
    1 2 3 4 5 6          6 = rewind to 3: state and positions of 3, tables as 3 left them. The commit of its row decides
    1 2 3 4 5 6 7 8      7 continues 6 and reads what 4 had read

Back to 0 is back to before the first checkpoint: no state, all that was read is read again, tables as they were before
their first rows. So a first checkpoint that a sink refuses can be taken back as well.

The row is an intent: from its commit on the head is the rewind, whatever becomes of this process. Tables are taken back
after it, like rows that are published after their checkpoint, by whoever comes next if need be. Before it nothing is
changed.

Rows of 4 and 5 that a sink has not got yet are not published first: a sink may refuse them for ever. The rewind moves
the sink's marker from wherever it stands in the chain, so that nobody publishes them any more, and its link records
that the sink never got them (docs/adr/0120-a-rewind-publishes-nothing-that-it-takes-back.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Annotated

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import publishing_refused
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.facts import HIDDEN, By, Facts, Named, fact
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import FORKED, REWIND, WITH_PARTS, Checkpoint, began, stats_of
from state_ops.records.publications import before_first, lacks, never_published
from state_ops.records.sink_link import SinkLink
from state_ops.storage.storage import Storage
from weir.connectors.delta import restore_version
from weir.connectors.delta.restore_version import TableRewind
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline
from weir.inspection.state_reader import At, chosen, whole
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import begin, commit, nothing_before, publish, unchanged
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import open_storage, readers
from weir.ownership.publish import lacking_by_sink
from weir.restore import rows_back
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks, kind_in
from weir.sources.positions import Arrivals

log = Logger("weir.rewind")

BEGINNING = 0  # no checkpoint's id: before the first one
_SHOWN = 3
_MOST_TAKEN = 20  # ranges of rows that are recorded as taken back; then two count as one, with what lies between


@dataclass(frozen=True, slots=True)
class StateBytes(Facts):
    """The bytes of a stage's state before and after a rewind."""

    now: int
    then: int


@dataclass(frozen=True, slots=True)
class SourceRewind(Facts):
    """The consequences of a rewind for one source.

    Attributes:
        again: How many files, or parts, are read again.
        gone: Names of files or parts that would have to be, and are not there as they were.
        piece: "file" or "part".
    """

    source: Annotated[str, HIDDEN]
    again: Arrivals
    gone: tuple[str, ...]
    piece: Annotated[str, HIDDEN]

    def __str__(self) -> str:
        again = f"{self.again} {agrees(self.again.waiting, 'is', 'are')} read again"
        return again + (f", {counted(len(self.gone), self.piece, 'is', 'are')} gone" if self.gone else "")


@dataclass(frozen=True, slots=True)
class SinkRewind(Facts):
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
        has: The newest checkpoint that it has, or may have, rows of.
    """

    name: Annotated[str, HIDDEN]
    kind: str
    published: CheckpointId | None
    then: CheckpointId | None
    stays: str | None
    lost: Annotated[str | None, HIDDEN]
    moves: Annotated[bool, HIDDEN]
    has: Annotated[CheckpointId | None, HIDDEN]

    @property
    def obstacles(self) -> list[str]:
        """The obstacles that have to be accepted, in words."""
        since = self.then or "the beginning"
        stays = f"rows of checkpoints after {since} stay in the sink {self.name}: {self.stays}"
        keeps = self.stays is not None and self.has != self.then
        return ([stays] if keeps else []) + ([self.lost] if self.lost is not None else [])


@dataclass(frozen=True, slots=True)
class RewindPlan(Facts):
    """The consequences of a rewind.

    Attributes:
        head: The newest checkpoint now.
        to: The one that it goes back to; with id 0, before the first one.
        abandoned: Completed checkpoints in between.
        stages: Bytes of state, by the stage's uid.
        tables: Those of the pipeline, also where nothing is given back.
        obstacles: Why it is refused unless they are accepted, in words.
        sinks: Those that are no tables.
        lacking: By sink that lacks committed rows which are taken back: the checkpoint that it has for certain, and
            then those that it lacks, as far as the registry knows.
        never: By sink, the checkpoints that it lacks as it says itself. They are taken back before their rows came
            into it.
        checkpoint: The rewind's own, or the newest one where nothing was to be taken back; None: a dry run.
    """

    head: Checkpoint
    to: Checkpoint
    abandoned: tuple[CheckpointId, ...]
    stages: Annotated[dict[str, StateBytes], Named("state_bytes")]
    sources: Annotated[tuple[SourceRewind, ...], By("source")]
    tables: Annotated[tuple[TableRewind, ...], By("table")]
    obstacles: tuple[str, ...]
    sinks: Annotated[tuple[SinkRewind, ...], By("name")] = ()
    lacking: Annotated[Mapping[str, tuple[CheckpointId | None, ...]], HIDDEN] = field(default_factory=dict)
    never: Annotated[Mapping[str, tuple[CheckpointId, ...]], Named("unpublished")] = field(default_factory=dict)
    checkpoint: CheckpointId | None = None

    @property
    @fact
    def to_completed_at(self) -> datetime | None:
        """The moment at which that was completed; null: it is before the first checkpoint."""
        return self.to.completed_at if self.to.id else None

    @property
    def takes_back(self) -> bool:
        """True unless the newest checkpoint is the one to go back to, so that nothing is taken back."""
        return self.to.id != self.head.id


def plan(pipeline: Pipeline, settings: Settings, to: int) -> RewindPlan:
    """Return the plan of a rewind to checkpoint `to`, with the changes of tables' rows. It only reads.

    Raises WeirError if there is no such checkpoint.
    """
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    target = goal(pipeline, settings, registry, to)
    assert head is not None, "there is a checkpoint, so there is a newest one"
    with Sinks(pipeline, settings, storage) as sinks:
        decided = planned(pipeline, settings, sinks, storage, registry, head, target)
    tables = [rows_back.looked_at(pipeline, storage, table, settings.work_dir) for table in decided.tables]
    return replace(decided, tables=tuple(tables))


def goal(pipeline: Pipeline, settings: Settings, registry: Registry, to: At) -> Checkpoint:
    """Return the checkpoint that a rewind goes back to: a retained one, or for 0 the state of affairs before the first.

    Raises:
        WeirError: There is no such checkpoint. Or the pipeline has not begun with an epoch, so that there is nothing
            before its first checkpoint.
    """
    if to != BEGINNING:
        return whole(pipeline, registry, to)
    head = chosen(pipeline, registry, None)
    if began(head):
        what = "a branch, which begins with a copy" if FORKED in head.totals else "begun from another one's savepoint"
        raise ConfigurationError(
            f"There is nothing before the first checkpoint of {pipeline.title}: it is {what}.",
            next=f"Go back to its first checkpoint, if that is retained: weir checkpoints {pipeline.title}. Or begin "
            "anew, under another name.",
        )
    offsets = {
        name: position
        for name, reader in readers(pipeline, settings).items()
        if (position := reader.beginning(head.offsets.get(name))) is not None
    }
    nothing = nothing_before(head.generation, CheckpointId(BEGINNING), head.epoch_now)
    return replace(nothing, offsets=offsets)


def planned(
    pipeline: Pipeline,
    settings: Settings,
    open_sinks: Sinks,
    storage: Storage,
    registry: Registry,
    head: Checkpoint,
    to: Checkpoint,
) -> RewindPlan:
    """Return the plan of a rewind from the newest checkpoint to another one, or to itself.

    Args:
        open_sinks: They are asked for their markers, where the registry does not say what they have.
    """
    if to.id == head.id:
        return RewindPlan(head, to, (), {}, (), (), ())
    between = tuple(row.id for row in registry.checkpoints() if to.id < row.id <= head.id)
    sources = []
    for name, reader in readers(pipeline, settings).items():
        again, gone = reader.again(to.offsets.get(name), head.offsets.get(name))
        sources.append(SourceRewind(name, Arrivals(tuple(again), unit=reader.unit), tuple(gone), reader.piece))
    tables, obstacles = [], []
    lacking = _lacking(registry, to)
    set_back = _set_back(open_sinks, pipeline, registry, head, to, lacking)
    lacking |= set_back
    never = {name: _never(open_sinks, pipeline, name, head, ids) for name, ids in lacking.items()}
    elsewhere = given(pipeline, head, to, {name: _newest_there(ids, never[name]) for name, ids in lacking.items()})
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
    obstacles += [
        f"the sink {name} has {f'checkpoint {certain}' if certain else 'none of its checkpoints'} by its marker, where "
        f"{head.published(name)} was published: it counts as restored, without the rows that came since"
        for name, (certain, *_) in set_back.items()
    ]
    obstacles += [
        f"rows of checkpoint {id} never came into the sink {name}, or went with a restore of it, and a rewind took "
        "them back: they would be missing"
        for name, id in never_published(head, to).items()
    ]
    uids = {*head.operators, *to.operators}
    sizes = {uid: StateBytes(stats_of(head, uid).bytes_total, stats_of(to, uid).bytes_total) for uid in sorted(uids)}
    return RewindPlan(
        head, to, between, sizes, tuple(sources), tuple(tables), tuple(obstacles), elsewhere, lacking,
        {name: ids for name, ids in never.items() if ids},
    )  # fmt: skip


def _lacking(registry: Registry, to: Checkpoint) -> dict[str, tuple[CheckpointId | None, ...]]:
    """Return for each sink that lacks rows of checkpoints after `to` the one that it has for certain, and those."""
    rows = registry.checkpoints()
    ids = {name: tuple(id for id in ids if id > to.id) for name, ids in lacking_by_sink(registry).items()}
    return {name: (before_first(rows, name, some), *some) for name, some in ids.items() if some}


def _set_back(
    sinks: Sinks,
    pipeline: Pipeline,
    registry: Registry,
    head: Checkpoint,
    to: Checkpoint,
    lacking: Mapping[str, Sequence[CheckpointId | None]],
) -> dict[str, tuple[CheckpointId | None, ...]]:
    """Return the sinks that are no tables and are by their markers where `to` left them, although more was published:
    their system was restored to that moment.

    Args:
        lacking: As `_lacking` returns it: what the registry knows to be missing counts for nothing here.

    Returns:
        By sink, as `_lacking`: the checkpoint that it has, and then those that it has no more.
    """
    rows, found = registry.checkpoints(), {}
    for name in head.sinks:
        sink, then = pipeline.sink(name), to.published(name)
        certain = lacking[name][0] if name in lacking else head.published(name)
        if has_table(pipeline, head, name) or sink is None or not sink.exactly_once or certain == then:
            continue
        try:
            marker = sinks.marker(name, head, certain)
        except WeirError as error:
            log.warning("a sink does not say what it has", sink=name, error=error.what)
            continue
        if marker == then:
            since = {row.published(name) for row in rows if row.id > to.id} - {then}
            found[name] = (then, *sorted(id for id in since if id is not None))
    return found


def _never(
    sinks: Sinks, pipeline: Pipeline, name: str, head: Checkpoint, lacking: Sequence[CheckpointId | None]
) -> tuple[CheckpointId, ...]:
    """Return which checkpoints a sink lacks, as it says itself; none where it cannot tell, or has a part of one."""
    certain, *ids = lacking
    sink = pipeline.sink(name)
    if sink is not None and not pipeline.capabilities(sink).has_versions and not sink.exactly_once:
        return ()
    try:
        marker = sinks.marker(name, head, certain)
        begun = sinks.begun(name)
    except WeirError as error:
        log.warning("a sink does not say what it has", sink=name, error=error.what)
        return ()
    has = max(marker or 0, begun or 0)
    return tuple(id for id in ids if id is not None and id > has)


def _newest_there(lacking: Sequence[CheckpointId | None], never: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the newest checkpoint that a sink has, or may have, rows of."""
    return [id for id in lacking if id not in never][-1]


def has_table(pipeline: Pipeline, head: Checkpoint, name: str) -> bool:
    """Return whether a sink is a table, by the code or else by the newest checkpoint."""
    sink = pipeline.sink(name)
    return pipeline.capabilities(sink).has_versions if sink is not None else kind_in(head, name) is None


def given(
    pipeline: Pipeline,
    head: Checkpoint,
    to: Checkpoint,
    newest: Mapping[str, CheckpointId | None] = MappingProxyType({}),
) -> tuple[SinkRewind, ...]:
    """Return the sinks that are no tables and have been given rows since an earlier checkpoint.

    Args:
        newest: By sink that lacks committed rows, the newest checkpoint that it has rows of.
    """
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
        has = newest.get(name, published)
        sinks.append(SinkRewind(name, kind, published, then, why, lost, sink is not None, has))
    return tuple(sinks)


def hindrances(tables: Sequence[TableRewind]) -> list[str]:
    """Return the losses that taking tables back would cause, in words."""
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
    """Return the first of some names, with a digest of what is not shown: who accepts the text accepts this very list.

    Args:
        versions: What else belongs to the list and is not shown, as the files' sizes and times of change.
    """
    more = len(names) - _SHOWN
    text = ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if more <= 0 and not versions:
        return text
    digest = hashlib.sha256(repr((list(names), list(versions))).encode()).hexdigest()
    return f"{text}, digest {digest[:12]}"


def nothing_to_take_back(decided: RewindPlan, pipeline: str) -> str:
    """Return what people are told of a rewind that takes nothing back."""
    return f"{pipeline} is at checkpoint {decided.to.id} already; nothing to take back"


def check(decided: RewindPlan, pipeline: str, accepted: Collection[str]) -> None:
    """Raise WeirError if a rewind has obstacles that nobody has accepted.

    Args:
        accepted: Obstacles of a plan that somebody was shown.
    """
    refused = [obstacle for obstacle in decided.obstacles if obstacle not in accepted]
    if refused:
        raise WeirError(
            f"{pipeline} cannot be rewound {named(decided.to)} without loss: {'; '.join(refused)}.",
            next="Nothing was changed. Put back what is missing, or accept that: "
            f"weir rewind {pipeline} --to {decided.to.id} --force; in the rewind job, `accept` takes what a dry run "
            "has shown",
        )


def named(to: Checkpoint) -> str:
    """Return where a rewind goes, in words that follow a verb."""
    return f"to checkpoint {to.id}" if to.id else "to before the first checkpoint"


def marker_moves(context: RunContext, head: Checkpoint, name: str, id: CheckpointId, to: Checkpoint) -> SinkLink:
    """Return the record of a sink in the `sinks` of a checkpoint that abandons others and moves the sink's marker.

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
    id = begin(owner, head, [*(table.table for table in decided.tables), *moved], lacking=decided.lacking)
    taken_back = {
        table.table: SinkLink(id, head.published(table.table))
        .following(head.sinks[table.table])
        .updated(to=to.published(table.table), at=table.version)
        for table in decided.tables
        if head.published(table.table) is not None
    }
    markers = {name: marker_moves(owner.context, head, name, id, to) for name in moved}
    changed = {name: lacks(link, decided.never.get(name, ())) for name, link in (taken_back | markers).items()}
    base = replace(to, sinks=head.sinks | changed, format_version=max(to.format_version, WITH_PARTS))
    files, parent = unchanged(context, to), to.id or None
    row = commit(context, base, id, files, kind=REWIND, what=named(to), reason=reason, head=head, parent=parent)
    log.info(
        "rewound",
        pipeline=context.pipeline.title,
        to=int(to.id),
        checkpoint=int(id),
        abandoned=[int(checkpoint) for checkpoint in decided.abandoned],
    )
    publish(context, row)
    publishing_refused.clear(context.storage)
    return row
