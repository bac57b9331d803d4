"""`weir resume` and the resume job."""

from __future__ import annotations

from state_ops.coordination import suspension
from weir.operations.operation import Done, Here, Steps, operation
from weir.ownership.pipeline_storage import open_storage


@operation(None, job="Lets sensors begin runs again after the stop job, `weir stop` or a run that was cancelled.")
def resume(here: Here) -> Steps:
    """Let sensors start runs again after `weir stop` or a cancelled run; `weir run` and Materialize do so too."""
    cleared = suspension.clear(open_storage(here.pipeline, here.settings)[0])
    outcome = "goes on as soon as files wait." if cleared else "was not stopped by a person."
    yield Done(None, [f"{here.name} {outcome}"])
