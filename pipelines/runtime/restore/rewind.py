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

import structlog

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.inspection.state_reader import chosen
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.ownership import Ownership
from pipelines.runtime.ownership.pipeline_storage import open_storage, readers
from pipelines.runtime.ownership.prune import prune
from pipelines.runtime.ownership.publish import publish_missing
from pipelines.runtime.restore.derived_checkpoint import lasting, made_of
from pipelines.runtime.sinks import delta, restore_version
from pipelines.runtime.sinks.restore_version import TableRewind
from state_ops.checkpoints.checkpoint import REWIND, WITH_PARTS, Checkpoint, StateFile
from state_ops.checkpoints.registry import Registry
from state_ops.errors import ConfigurationError, WeirError
from state_ops.ids import CheckpointId
from state_ops.storage.storage import Storage

log = structlog.get_logger("weir.rewind")

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class SourceRewind:
    """again: names of files that are read again. gone: of files that would have to be, and are not there as they
    were."""

    source: str
    again: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """What a rewind would do. head: the newest checkpoint now; to: the one that it goes back to.

    abandoned: completed checkpoints in between; stages: bytes of state now and then, by uid. Tables that have nothing
    to give back are in `tables` as well. obstacles: why it is refused unless they are accepted, in words.
    """

    head: Checkpoint
    to: Checkpoint
    abandoned: tuple[CheckpointId, ...]
    stages: dict[str, tuple[int, int]]
    sources: tuple[SourceRewind, ...]
    tables: tuple[TableRewind, ...]
    obstacles: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "head": self.head.id,
            "to": self.to.id,
            "to_completed_at": self.to.completed_at.isoformat(),
            "abandoned": list(self.abandoned),
            "state_bytes": {uid: {"now": now, "then": then} for uid, (now, then) in self.stages.items()},
            "sources": {one.source: {"again": len(one.again), "gone": list(one.gone)} for one in self.sources},
            "tables": {
                one.table: {
                    "version": one.version,
                    "as_of_version": one.then,
                    "rows_removed": one.rows,
                    "files_removed": len(one.goes),
                    "files_restored": len(one.comes),
                    "unknown_commits": [list(entry) for entry in one.unknown],
                    "vacuumed_files": list(one.vacuumed),
                }
                for one in self.tables
            },
            "obstacles": list(self.obstacles),
        }


def plan(pipeline: Pipeline, settings: Settings, to: int) -> RewindPlan:
    """What a rewind to checkpoint `to` would do, by reading alone. Raises WeirError when there is no such
    checkpoint."""
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    target = chosen(pipeline, registry, to)
    assert head is not None, "there is a checkpoint, so there is a newest one"
    return planned(pipeline, settings, storage, registry, head, target)


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
        sources.append(SourceRewind(name, tuple(file.name for file in again), tuple(gone)))
    tables, obstacles = [], []
    for name in dict.fromkeys(
        [*(sink.table for sink in pipeline.sinks), *head.sinks]
    ):  # also those that the code has no more
        found = restore_version.planned(storage, name, (to.sinks.get(name) or {}).get("id"))
        if found is not None:
            tables.append(found)
        elif name in head.sinks:
            raise WeirError(
                f"The table {name} is gone.",
                where=storage.full(restore_version.table_path(name)),
                next=f"Nothing was changed. `weir fsck {pipeline.title}` says what else is missing; put the table back first.",
            )
    for one in sources:
        if one.gone:
            obstacles.append(
                f"{one.source} has lost what would be read again ({listed(one.gone)}): those rows would be missing"
            )
    obstacles += hindrances(tables)
    uids = {*head.operators, *to.operators}
    sizes = {uid: (_bytes(head, uid), _bytes(to, uid)) for uid in sorted(uids)}
    return RewindPlan(head, to, between, sizes, tuple(sources), tuple(tables), tuple(obstacles))


def hindrances(tables: Sequence[TableRewind]) -> list[str]:
    """What would be lost by taking tables back, in words."""
    found = []
    for table in tables:
        if table.unknown:
            commits = listed([f"version {version}: {operation}" for version, operation in table.unknown])
            found.append(f"others have committed to the table {table.table} ({commits}), which would be taken back too")
        if table.vacuumed:
            found.append(
                f"{len(table.vacuumed)} files of the table {table.table} are vacuumed ({listed(table.vacuumed)}): "
                "their rows would be missing"
            )
    return found


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


def _bytes(checkpoint: Checkpoint, uid: str) -> int:
    return int((checkpoint.operators.get(uid) or {}).get("bytes_total", 0))


def check(decided: RewindPlan, pipeline: str, accepted: Collection[str]) -> None:
    """Raises WeirError when a rewind has obstacles that nobody has accepted. accepted: obstacles of a plan that
    somebody was shown."""
    refused = [one for one in decided.obstacles if one not in accepted]
    if refused:
        raise WeirError(
            f"{pipeline} cannot be rewound to checkpoint {decided.to.id} without loss: {'; '.join(refused)}.",
            next="Nothing was changed. Put back what is missing, or accept that: "
            f"weir rewind {pipeline} --to {decided.to.id} --force; in the rewind job, `accept` takes what a dry run has shown",
        )


def carry_out(owner: Ownership, decided: RewindPlan, reason: str = "") -> Checkpoint:
    """Rewind as planned by the owner, to a checkpoint that is proven whole; returns the rewind's own checkpoint."""
    context = owner.context
    for table in decided.tables:  # before the row: nobody could take back a table that is elsewhere
        delta.check_chain(context.storage, context.pipeline.app_id, table.table, decided.head)
    id = owner.begin(decided.head)
    row, files = _row(context, decided, id, reason)
    context.registry.commit(row, files, newest=decided.head.id)
    context.head = row
    log.info(
        "rewound",
        pipeline=context.pipeline.title,
        to=int(decided.to.id),
        checkpoint=int(id),
        abandoned=[int(one) for one in decided.abandoned],
    )
    publish_missing(context, [row])
    prune(context)
    return row


def _row(
    context: RunContext, decided: RewindPlan, id: CheckpointId, reason: str
) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    to, head = decided.to, decided.head
    sinks = dict(head.sinks)
    for table in decided.tables:
        before = (head.sinks.get(table.table) or {}).get("id")
        then = (to.sinks.get(table.table) or {}).get("id")
        if before is not None:
            sinks[table.table] = {"id": int(id), "before": before, "to": then, "at": table.version}
    files = tuple(replace(file, new=False) for file in lasting(context.registry.files(to), to.operators))
    row = made_of(
        context,
        to,
        id,
        files,
        after=head,
        parent=to.id,
        kind=REWIND,
        trigger="rewind",
        reason=f"to checkpoint {to.id}" + (f": {reason}" if reason else ""),
        sinks=sinks,
        format_version=max(to.format_version, WITH_PARTS),
    )
    return row, files
