"""`weir cancel`."""

from __future__ import annotations

from typing import Annotated

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.counts import counted
from weir.operations.operation import Done, Here, Option, Steps, operation
from weir.ownership.pipeline_storage import open_storage
from weir.restore.recovery import owning
from weir.run import maintenance
from weir.run.stopping import end


@operation(None)
def cancel(
    here: Here,
    delete: Annotated[
        bool | None,
        Option("Delete or retain the checkpoints; default: checkpoints.on_cancel.", ("--delete/--retain",)),
    ] = None,
) -> Steps:
    """End a pipeline: stop its coordinator at the next barrier, and retain or delete its checkpoints.

    Savepoints and tables stay as they are. Sensors begin nothing until a person does (`weir run`, `weir resume`,
    Materialize). After --delete the pipeline goes on only where its newest savepoint is the last that was published.
    """
    pipeline, settings = here.pipeline, here.settings
    deletes = settings.checkpoints.on_cancel == "delete" if delete is None else delete
    request = Request(requests.STOP, reason=here.by, delete=deletes)
    stopped = end(pipeline, settings, request, "cancelled", here.waiting)
    if deletes and not stopped:
        with owning(pipeline, settings, epochs=False) as owner:
            maintenance.end(owner.context)
    left = open_storage(pipeline, settings)[1].checkpoints()
    kept = (
        f"{counted(len(left), 'checkpoint', 'is', 'are')} retained."
        if left
        else "No checkpoint is left; its tables are as they were."
    )
    yield Done(None, [f"{here.name} is cancelled. {kept}"])
