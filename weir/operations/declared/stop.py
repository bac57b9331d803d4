"""`weir stop` and the stop job."""

from __future__ import annotations

from typing import Annotated

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.requests import Request
from state_ops.coordination.suspension import Suspension
from state_ops.errors import WeirError
from state_ops.records.triggers import Trigger
from weir.operations.operation import COMMAND, Done, Here, Option, Steps, operation
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.savepoints import check_free
from weir.run import maintenance
from weir.run.run import RunOptions
from weir.run.stopping import end


@operation(
    None,
    job="Ends the running coordinator at its next barrier; sensors begin none until a person does. Nothing is lost.",
)
def stop(
    here: Here,
    drain: Annotated[
        bool,
        Option(
            "First apply all rows that have arrived and close every window. Later rows for these windows are late.",
            in_job="First apply all rows that have arrived and close every window.",
        ),
    ] = False,
    savepoint: Annotated[str | None, Option("At the end, make the newest checkpoint a savepoint of this name.")] = None,
) -> Steps:
    """Ask the running coordinator to end at its next barrier, and wait for it.

    Sensors begin nothing until a person does (`weir run`, `weir resume`, Materialize), also where no coordinator ran.
    """
    pipeline, settings = here.pipeline, here.settings
    storage, _ = open_storage(pipeline, settings)
    reason = f"{here.by} --drain" if drain and here.face == COMMAND else here.by
    if savepoint is not None:
        check_free(pipeline, settings, savepoint)
    if drain and here.run is None and not lease.watch(storage):
        raise WeirError(
            f"No coordinator of {here.name} is running, so nobody drains.",
            next=f"Materialize first, or `weir stop {here.name} --drain`, which drains by itself.",
        )
    goes_on = f"Sensors begin nothing until `weir resume {here.name}`, `weir run {here.name}` or Materialize."
    request = Request(requests.STOP, reason=reason, drain=drain, savepoint=savepoint or "")
    if end(pipeline, settings, request, waiting=here.waiting):
        yield Done(None, [f"{here.name} {'drained' if drain else 'stopped'} and ended at a barrier.", goes_on])
        return
    none = f"No coordinator of {here.name} is running"
    if drain and here.run is not None:
        yield Done(None, [f"{none}: this command works off what has arrived and drains."])
        here.run(RunOptions(trigger=Trigger.MANUAL, reason=reason, drain=True))
        suspension.write(storage, Suspension("drained", reason))
    else:
        yield Done(None, [f"{none}."])
    if savepoint is not None:
        pin = maintenance.savepoint(pipeline, settings, savepoint, reason, settings.checkpoints.timeout_seconds)
        yield Done(None, [f"Savepoint {pin.name} is checkpoint {pin.checkpoint_id}. It stays until it is dropped."])
    yield Done(None, [goes_on])
