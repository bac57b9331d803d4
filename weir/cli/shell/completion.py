"""Completion in a shell: names of the configuration, and names in the pipeline's registry.

Each function is asked at a press of the TAB key, so it imports what it needs when it is called and reads neither the
pipeline's code nor its state. Where something fails there is nothing to complete: a line that somebody is typing is no
place for an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from state_ops.checkpoints.registry import Registry

Completion = tuple[str, str]  # what may stand there, and what it is


def _completing(
    candidates: Callable[[typer.Context, str], Iterable[Completion]],
) -> Callable[[typer.Context, str], list[Completion]]:
    """Return the candidates that begin with what is typed already."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Completion]:
        with suppress(Exception):
            return [(name, what) for name, what in candidates(ctx, incomplete) if name.startswith(incomplete)]
        return []

    return complete


@contextmanager
def whole_words(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Complete in bash behind the @ of PIPELINE@BRANCH, which bash takes for a word between two others.

    Its words are put together again, and of what is offered bash gets what stands behind the @, since it replaces that
    alone.

    Args:
        environment: The process's. Bash's words are in it, a line each, and which of them is being typed.
    """
    words = environment.get("COMP_WORDS", "").split("\n")
    if environment.get("_WEIR_COMPLETE") != "complete_bash" or "@" not in words:
        yield
        return
    typed, joined, at, before = int(environment["COMP_CWORD"]), list[str](), 0, ""
    for number, word in enumerate(words):
        if joined and "@" in (word, words[number - 1]):
            joined[-1] += word
        else:
            joined.append(word)
        if number == typed:
            at = len(joined) - 1
            before = joined[-1].rpartition("@")[0]
    environment.update({"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(at)})
    offered = io.StringIO()
    try:
        with redirect_stdout(offered):
            yield
    finally:  # it ends the process
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(f"{before}@") if before else line)


@_completing
def pipelines(_: typer.Context, incomplete: str) -> Iterable[Completion]:
    """Complete pipelines of the configuration, and behind a name and @ the branches of that pipeline."""
    from weir.settings.configuration import load

    name, at, _branch = incomplete.partition("@")
    if at:
        return [(f"{name}@{branch}", what) for branch, what in _pins(_registry_of(name), "branch")]
    return [(name, pipeline.object) for name, pipeline in sorted(load().pipelines.items())]


@_completing
def stages(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Complete stages whose state the newest checkpoint has."""
    head = _registry(ctx).head()
    return [(uid, "a stage with state") for uid in head.stages_with_state] if head is not None else []


@_completing
def tables(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Complete sinks that the newest checkpoint has given rows to."""
    head = _registry(ctx).head()
    return [(name, "a table") for name in sorted(head.sinks)] if head is not None else []


@_completing
def checkpoints(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Complete numbers of retained checkpoints, the newest first."""
    return _checkpoints(_registry(ctx))


@_completing
def savepoints(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Complete names of savepoints."""
    return _pins(_registry(ctx), "savepoint")


@_completing
def moments(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Checkpoints as people name them: savepoints by name, and numbers."""
    registry = _registry(ctx)
    return [*_pins(registry, "savepoint"), *_checkpoints(registry)]


@_completing
def branches(ctx: typer.Context, _: str) -> Iterable[Completion]:
    """Complete names of a pipeline's branches."""
    return _pins(_registry(ctx), "branch")


def _registry(ctx: typer.Context) -> Registry:
    """Return the registry of the pipeline or branch that is typed already."""
    # Where an option lacks its value still, the parser has not told arguments from each other.
    return _registry_of(ctx.params.get("pipeline") or ctx.args[0])


def _registry_of(title: str) -> Registry:
    from state_ops.checkpoints.registry import Registry
    from state_ops.records.pins import BRANCH
    from state_ops.storage.branches import BRANCHES, pinned
    from state_ops.storage.storage import Storage
    from weir.settings.configuration import load

    settings = load()
    name, _, branch = title.partition("@")
    root = settings.storage_uri(name)
    registry = Registry(Storage(root, settings.storage.s3), "completion")
    if not branch:
        return registry
    pin = registry.pinned(BRANCH, branch)
    assert pin is not None
    return Registry(Storage(f"{root}/{BRANCHES}/{pinned(branch, pin.reason).id}", settings.storage.s3), "completion")


def _checkpoints(registry: Registry) -> list[Completion]:
    return [(str(row.id), f"{row.completed_at:%Y-%m-%d %H:%M} UTC") for row in reversed(registry.checkpoints())]


def _pins(registry: Registry, kind: str) -> list[Completion]:
    return [(pin.name, f"checkpoint {pin.checkpoint_id}") for pin in registry.pins() if pin.kind == kind]
