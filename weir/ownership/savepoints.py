"""Names that keep checkpoints: savepoints, and the bases of branches."""

from __future__ import annotations

from datetime import UTC, datetime

from state_ops.coordination.requests import Request
from state_ops.errors import ConfigurationError, WeirError, plainly
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.pins import BRANCH, SAVEPOINT, Pin
from weir.definition import Pipeline
from weir.ownership.context import RunContext
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.prune import prune
from weir.settings.configuration import Settings

log = Logger("weir.upkeep")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check_name(name: str, kind: str = "savepoint") -> str:
    """Refuse a name that a savepoint or a branch may not have: letters, digits, dot, dash and underscore are allowed,
    at most 100, and no number, which names a checkpoint."""
    if not 0 < len(name) <= 100 or not _NAME_CHARACTERS.issuperset(name) or name.startswith("-"):
        raise ConfigurationError(
            f"{name!r} cannot name a {kind}.", next="Use letters, digits, dots, dashes and underscores, at most 100."
        )
    if name.isdecimal():
        raise ConfigurationError(
            f"{name!r} cannot name a {kind}: a number names a checkpoint.",
            next=f"Choose a name with a letter, e.g. at-{name}.",
        )
    return name


def save(context: RunContext, checkpoint: Checkpoint, name: str, reason: str) -> Pin:
    """Name a checkpoint, so that retention never touches it. Raises WeirError when the name is taken."""
    pin = Pin(SAVEPOINT, name, checkpoint.id, checkpoint.commit_id, datetime.now(UTC), reason)
    context.registry.pin(context.generation, pin)
    return pin


def unname(context: RunContext, kind: str, name: str) -> None:
    """Take a savepoint's or a branch's name away, and prune what only it kept."""
    context.registry.unpin(context.generation, kind, name)
    prune(context)


def pin_branch(context: RunContext, request: Request) -> None:
    """Keep a checkpoint for a branch, unless it is gone or the name was taken meanwhile: then who asked finds none."""
    base = next((row for row in context.registry.checkpoints(as_owner=True) if row.id == request.checkpoint), None)
    if base is None:
        log.warning("no branch was forked: the checkpoint is gone", checkpoint=request.checkpoint)
        return
    pin = Pin(BRANCH, request.savepoint, base.id, base.commit_id, datetime.now(UTC), request.reason)
    try:
        context.registry.pin(context.generation, pin)
    except WeirError as error:
        log.warning("no branch was forked", name=request.savepoint, error=plainly(error))


def check_free(pipeline: Pipeline, settings: Settings, name: str) -> None:
    """Raise ConfigurationError or WeirError unless a savepoint may get this name."""
    check_name(name)
    _, registry = open_storage(pipeline, settings)
    if registry.pinned(SAVEPOINT, name) is not None:
        raise WeirError(
            f"{pipeline.title} has a savepoint {name!r} already.",
            next=f"Choose another name, or drop it: weir savepoint {pipeline.title} --drop {name}",
        )
