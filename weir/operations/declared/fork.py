"""`weir fork`."""

from __future__ import annotations

from typing import Annotated

from state_ops.errors import ConfigurationError
from weir.inspection.state_reader import moment
from weir.operations import forks
from weir.operations.forks import Fork
from weir.operations.operation import Done, Here, Option, Steps, operation
from weir.ownership.pipeline_storage import open_storage
from weir.sources.positions import in_words


@operation(Fork)
def fork(
    here: Here,
    name: Annotated[str | None, Option("Make a branch of this name.")] = None,
    origin: Annotated[
        str | None,
        Option(
            "The checkpoint, by number or a savepoint's name; by default the newest.", ("--from",), complete="moments"
        ),
    ] = None,
    drop: Annotated[
        str | None, Option("Remove the branch of this name with all that it has.", complete="branches")
    ] = None,
    reason: Annotated[str, Option("A note that `weir forks` shows.")] = "",
) -> Steps:
    """Make a branch of a pipeline from one of its checkpoints: its state, without copying it, in tables of its own.

    The branch is PIPELINE@NAME in every command: `weir run flights@fix --until-caught-up` lets it read what the
    pipeline has read, with the code of this checkout. The pipeline goes on, and is not touched before `weir promote`.
    `weir forks` lists branches.
    """
    pipeline, settings = here.pipeline, here.settings
    if (name is None) == (drop is None):
        raise ConfigurationError(
            "Say what to do.",
            next=f"`weir fork {here.name} --name NAME [--from N]` or `--drop NAME`; `weir forks {here.name}` lists.",
        )
    with here.waiting("waiting for the coordinator's next barrier"):
        if drop is not None:
            branch = forks.drop(pipeline, settings, drop)
            gone = f"The branch {branch.branch.name} is gone, and what only it kept of {here.name}."
            yield Done(branch, [gone])
            return
        assert name is not None
        at = None if origin is None else moment(origin, open_storage(pipeline, settings)[1])
        branch = forks.fork(pipeline, settings, name, at, reason)
    title, size = f"{here.name}@{branch.branch.name}", branch.head.bytes_total if branch.head is not None else 0
    yield Done(
        branch,
        [
            f"{title} is forked from checkpoint {branch.base}: {size:,} bytes of state, none of them copied.",
            f"Read since: {in_words(branch.behind.values())}. Next: weir run {title} --until-caught-up",
        ],
    )
