"""Removing checkpoints and the objects that only they need, within what retention promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldRecord
from state_ops.checkpoints.registry import Registry
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros
from state_ops.records.checkpoint import Checkpoint, abandoned, before, event_time, to_begin_from
from weir.definition import Pipeline
from weir.ownership.context import RunContext
from weir.ownership.publish import unpublished
from weir.settings.configuration import Settings

HOUR = 3_600_000_000  # microseconds
DAY = 24 * HOUR


def needed(
    registry: Registry, holds: Mapping[str, HoldRecord], *, as_owner: bool = False
) -> dict[CheckpointId, list[str]]:
    """Return the further reasons to keep checkpoints, in words: sinks lack their rows, or restores read them.

    Args:
        as_owner: Read the registry as the owner of the pipeline, without asking storage for a newer version.
    """
    reasons: dict[CheckpointId, list[str]] = {}
    lacking = unpublished(registry, as_owner=as_owner)
    for row in lacking:
        reasons.setdefault(row.id, []).append("a sink lacks its rows")
    if lacking and (before := lacking[0].parent_id) is not None:
        reasons.setdefault(before, []).append(
            f"checkpoint {lacking[0].id}, which a sink lacks, can be taken back to it"
        )
    for path, hold in holds.items():
        if hold.commit_id:
            reasons.setdefault(hold.checkpoint_id, []).append(f"{hold.purpose} (process {hold.pid} on {hold.host})")
            continue
        for row in registry.checkpoints(as_owner=as_owner):  # any of them may be what it holds
            reasons.setdefault(row.id, []).append(f"{hold.purpose} ({path})")
    return reasons


def kept_for_backfills(
    pipeline: Pipeline, settings: Settings, completed: Sequence[Checkpoint]
) -> dict[CheckpointId, str]:
    """Return the checkpoints from which the newest days, or hours, may be backfilled, in words.

    Args:
        completed: Oldest first.
    """
    configured = settings.pipelines.get(pipeline.name)
    if configured is None or configured.backfill is None or pipeline.branch is not None:
        return {}
    left = abandoned(completed)
    line = [row for row in completed if row.id not in left]
    by = pipeline.days
    reached = event_time(line[-1], by) if line else None
    reasons: dict[CheckpointId, str] = {}
    for back in range(configured.backfill.keep if reached is not None else 0):
        assert reached is not None
        step = DAY if configured.backfill.every == "day" else HOUR
        begins = (reached // step - back) * step
        earlier = before(line, begins, by)
        for row in to_begin_from(earlier, by) if earlier else ():
            reasons.setdefault(row.id, f"the newest before {from_micros(begins):%Y-%m-%d %H:%M}, to backfill from")
    return reasons


def prune(
    context: RunContext, keep: int | None = None, also: Mapping[CheckpointId, Sequence[str]] | None = None
) -> tuple[CheckpointId, ...]:
    """Drop the checkpoints beyond the retained number, rows first, then the objects that only they named.

    Args:
        keep: How many without a name stay, by default as the settings say.
        also: What epochs in flight need, in words.
    """
    keep = context.settings.checkpoints.num_retained if keep is None else keep
    # The owner plans from what it knows: rows go by a commit right after the very version that it knows, objects after
    # `prove`.
    completed = context.registry.checkpoints(as_owner=True)
    listings = {row.id: context.registry.files(row) for row in completed}
    live, dead = context.watcher.sorted_out(context.storage)
    why = needed(context.registry, live, as_owner=True)
    for id, reason in kept_for_backfills(context.pipeline, context.settings, completed).items() if keep else ():
        why.setdefault(id, []).append(reason)
    for id, reasons in (also or {}).items():
        why.setdefault(id, []).extend(reasons)
    decided = retention.plan(completed, listings, keep, context.registry.pins(as_owner=True), why)
    retention.apply(context.registry, context.storage, context.generation, decided, context.watcher)
    context.storage.delete_files(dead)
    return decided.drop
