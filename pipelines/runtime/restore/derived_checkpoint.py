"""Checkpoints that read no input: a start, a fork, a rewind, a promotion. Each is made of a checkpoint that there
is."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.sources.slices import nothing_read
from state_ops.checkpoints.checkpoint import STATE, Checkpoint, StateFile, began, spans_with
from state_ops.ids import CheckpointId


def made_of(
    context: RunContext,
    like: Checkpoint,
    id: CheckpointId,
    files: Sequence[StateFile],
    *,
    after: Checkpoint | None,
    parent: CheckpointId | None,
    kind: str,
    trigger: str,
    reason: str,
    beginning: Mapping[str, int] | None = None,
    **more: Any,
) -> Checkpoint:
    """A row with the state, positions and watermarks of `like`, whose listing is `files`; nothing is committed.

    after: the newest checkpoint here, which it follows; None: it is the first one, and `beginning` says how the chain
    begins. more: fields in which it differs from `like`.
    """
    now = datetime.now(UTC)
    sums = {name: value for name, value in like.totals.items() if name not in began(like)}
    return replace(
        like,
        id=id,
        parent_id=parent,
        kind=kind,
        generation=context.generation,
        commit_id=uuid.uuid4().hex,
        triggered_at=now,
        completed_at=now,
        epoch_now=max(like.epoch_now, after.epoch_now) if after is not None else like.epoch_now,
        trigger=trigger,
        reason=reason,
        slice={name: nothing_read() for name in like.slice},
        ms={},
        totals={**sums, **(beginning or began(after)), **context.requested()},
        files=len(files),
        bytes_new=sum(file.bytes for file in files if file.kind == STATE and file.new),
        run_id=context.run_id,
        lineage=spans_with(after, context.generation, id),
        **more,
    )


def lasting(files: Iterable[StateFile], operators: Mapping[str, Any]) -> list[StateFile]:
    """Of a listing what a later checkpoint goes on from: state, and rows that wait for stages. operators: as
    `waiting_paths` takes them."""
    waiting = waiting_paths(operators)
    return [file for file in files if file.kind == STATE or file.path in waiting]


def waiting_paths(operators: Mapping[str, Any]) -> set[str]:
    """The paths of rows that wait for stages. operators: figures by stage, as a checkpoint has them."""
    waiting = [one for figures in operators.values() for one in figures.get("waiting") or ()]
    return {path for one in waiting for layer in one["layers"] for path in layer}


def pointed(operators: Mapping[str, Any], named: Iterable[tuple[StateFile, StateFile]]) -> dict[str, Any]:
    """Stages' figures with the rows that wait for them where they are now. named: each file as it was named before, and
    is here."""
    moved = {old.path: new.path for old, new in named}
    return {uid: _pointed(figures, moved) for uid, figures in operators.items()}


def _pointed(figures: dict[str, Any], moved: Mapping[str, str]) -> dict[str, Any]:
    waiting = [
        {**one, "layers": [[moved[path] for path in layer] for layer in one["layers"]]}
        for one in figures.get("waiting") or ()
    ]
    return {**figures, "waiting": waiting}
