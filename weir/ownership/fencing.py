"""Acting as the owner of a pipeline: every change of shared storage fails once another run has claimed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from state_ops import errors
from state_ops.errors import RunEndedError, plainly
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.logs import Logger
from weir.ownership.context import RunContext
from weir.ownership.leftovers import delete_staged

log = Logger("weir.epoch")
Done = TypeVar("Done")


def as_owner(context: RunContext, act: Callable[[], Done]) -> Done:
    """Return the result of `act`, carried out under the run's generation.

    If the run has renewed its claim in another thread meanwhile, `act` is carried out again.
    """
    while True:
        generation = context.generation
        try:
            return act()
        except errors.FencedError:
            with context.claiming:
                if context.generation == generation:
                    raise


def discard(context: RunContext, generation: Generation, epoch: CheckpointId) -> None:
    """Delete what a declined epoch staged. Its id is never used again and was not committed, so nothing can name this.

    A failure is logged, not raised: it must not replace the error that declined the epoch, and the next take-over
    cleans up."""
    name = epoch_dir(generation, epoch)
    try:
        delete_staged(context, name)
    except OSError as error:
        log.warning("what a declined epoch staged could not be deleted", epoch=epoch, error=plainly(error))
    context.discarded.append(name)


def raise_if_fenced(context: RunContext, error: BaseException) -> None:
    """Raise FencedError in place of an error that a zombie meets, for example because its successor has removed what it
    had staged.

    A RunEndedError stays: the generation may be one that this very coordinator has claimed in part, and nobody runs the
    pipeline."""
    if isinstance(error, errors.FencedError | RunEndedError):
        return
    try:
        context.registry.prove(context.generation)
    except errors.FencedError as fenced:
        raise fenced from error
    except Exception as unknown:  # the storage is away: then the error at hand is what there is to say
        log.warning("nobody can tell who owns the pipeline", error=plainly(unknown))
