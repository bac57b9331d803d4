"""What a shell completes in a command: names of the configuration, and what the pipeline's registry names.

Each function is asked at a press of the TAB key, so it imports what it needs when it is called and reads neither the
pipeline's code nor its state. Where something fails there is nothing to complete: a line that somebody is typing is no
place for an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from state_ops.checkpoints.registry import Registry

Completion = tuple[str, str]  # what may stand there, and what it is


def _completing(
    candidates: Callable[[typer.Context], Iterable[Completion]],
) -> Callable[[typer.Context, str], list[Completion]]:
    """Those of the candidates that begin with what stands there."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Completion]:
        with suppress(Exception):
            return [(name, what) for name, what in candidates(ctx) if name.startswith(incomplete)]
        return []

    return complete


@_completing
def pipelines(_: typer.Context) -> Iterable[Completion]:
    """The pipelines of the configuration."""
    from configs.settings import load

    return [(name, pipeline.object) for name, pipeline in sorted(load().pipelines.items())]


@_completing
def stages(ctx: typer.Context) -> Iterable[Completion]:
    """The stages that the newest checkpoint has state of."""
    head = _registry(ctx).head()
    return [(uid, "a stage with state") for uid in head.stages_with_state] if head is not None else []


@_completing
def tables(ctx: typer.Context) -> Iterable[Completion]:
    """What the newest checkpoint has given rows to."""
    head = _registry(ctx).head()
    return [(name, "a table") for name in sorted(head.sinks)] if head is not None else []


@_completing
def checkpoints(ctx: typer.Context) -> Iterable[Completion]:
    """The numbers of retained checkpoints, the newest first."""
    return _checkpoints(_registry(ctx))


@_completing
def savepoints(ctx: typer.Context) -> Iterable[Completion]:
    """The names of savepoints."""
    return _pins(_registry(ctx), "savepoint")


@_completing
def moments(ctx: typer.Context) -> Iterable[Completion]:
    """Checkpoints as people name them: savepoints by name, and numbers."""
    registry = _registry(ctx)
    return [*_pins(registry, "savepoint"), *_checkpoints(registry)]


@_completing
def branches(ctx: typer.Context) -> Iterable[Completion]:
    """The names of a pipeline's branches."""
    return _pins(_registry(ctx), "branch")


def _registry(ctx: typer.Context) -> Registry:
    """The registry of the pipeline that stands in the line already; a branch of one has nothing that completes."""
    from configs.settings import load
    from state_ops.checkpoints.registry import Registry
    from state_ops.storage.storage import Storage

    settings = load()
    # Where an option lacks its value still, the parser has not told arguments from each other.
    pipeline = ctx.params.get("pipeline") or ctx.args[0]
    return Registry(Storage(settings.storage_uri(pipeline), settings.storage.s3), "completion")


def _checkpoints(registry: Registry) -> list[Completion]:
    return [(str(row.id), f"{row.completed_at:%Y-%m-%d %H:%M} UTC") for row in reversed(registry.checkpoints())]


def _pins(registry: Registry, kind: str) -> list[Completion]:
    return [(pin.name, f"checkpoint {pin.checkpoint_id}") for pin in registry.pins() if pin.kind == kind]
