"""The backlog: source files that have arrived and are not read, and rows in front of stages that are not applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from state_ops.errors import WeirError
from state_ops.moments import to_micros
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.storage.transfers import at_once
from weir.definition import Pipeline
from weir.definition.source import Position
from weir.ownership.pipeline_storage import readers
from weir.settings.configuration import Settings
from weir.sources.positions import Arrivals
from weir.sources.reader import SourceReader


def unapplied(head: Checkpoint | None) -> Mapping[str, int]:
    """Return the rows that stages have not applied yet (unaligned checkpoints), by stage; without stages that have
    applied all."""
    return {uid: stats.rows_waiting for uid, stats in (head.operators if head else {}).items() if stats.waiting}


def timers_due(pipeline: Pipeline, head: Checkpoint | None, now: datetime) -> tuple[str, ...]:
    """Return the stages that have something to do without rows at a moment: windows or timers by processing time are
    due, or an input has become idle.

    A stage that only the checkpoint has does nothing any more.
    """
    recorded = [(stage.uid, stats_of(head, stage.uid)) for stage in pipeline.stages]
    return tuple(uid for uid, stats in recorded if any(at <= to_micros(now) for at in stats.moments))


def due_in_words(stages: Sequence[str]) -> str:
    """Why stages have something to do without rows."""
    return f"windows, timers or an idle input of {', '.join(stages)} are due by processing time"


def arrivals(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> Mapping[str, Arrivals]:
    """Return, by source, the arrivals that the newest checkpoint does not have. Each source is listed once.

    A server that is away, or refuses, does not keep the other sources from being shown.
    """
    return looked_at(readers(pipeline, settings), head)


def looked_at(sources: Mapping[str, SourceReader], head: Checkpoint | None) -> Mapping[str, Arrivals]:
    """Return the arrivals as `arrivals` does, with readers that are open."""
    offsets = head.offsets if head else {}
    looks = [partial(_looked, reader, offsets.get(name)) for name, reader in sources.items()]
    return dict(zip(sources, at_once(looks), strict=True))


def _looked(reader: SourceReader, position: Position | None) -> Arrivals:
    try:
        return reader.look(position)
    except WeirError as error:
        return Arrivals(problem=error.what)


def lag(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> Mapping[str, int]:
    """Files, or rows of a connector, that wait, by source."""
    return {name: arrived.waiting for name, arrived in arrivals(pipeline, settings, head).items()}


def observed(pipeline: Pipeline, settings: Settings, head: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return, for people, what each source has beside a checkpoint: the input that waits, and how far it is read."""
    shown: dict[str, dict[str, Any]] = {}
    for name, reader in readers(pipeline, settings).items():
        position = head.offsets.get(name)
        try:
            waiting, lag = reader.look(position).waiting, reader.lag(position)
        except WeirError as error:  # what is committed is shown, whatever its source does now
            shown[name] = {"not known": error.what}
            continue
        estimate = " (estimated)" if lag.is_estimate else ""
        figures = {"rows waiting": lag.rows, "bytes waiting": lag.bytes}
        shown[name] = {
            **({"files waiting": waiting} if reader.source.capabilities.files else {}),
            **{title + estimate: number for title, number in figures.items() if number is not None},
            **(reader.described(position) if position else {}),
        }
    return shown


def missing(sources: Mapping[str, SourceReader], waiting: Mapping[str, int]) -> dict[str, str]:
    """Return the landing directories that do not exist, by source.

    Args:
        waiting: Files by source, of which a directory that is there alone has any.
    """
    return {name: reader.location for name, reader in sources.items() if not waiting.get(name) and not reader.exists()}
