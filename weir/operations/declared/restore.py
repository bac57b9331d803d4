"""`weir restore`. Dagster's restore job does more: it proves the newest checkpoint, then runs (`weir.dagster.jobs`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from state_ops.counts import counted
from weir.inspection.state_reader import chosen, one_of
from weir.operations.operation import AtCheckpoint, AtSavepoint, Done, Here, Option, Plan, Rows, Steps, operation
from weir.ownership.pipeline_storage import open_storage
from weir.restore import restore as restoring
from weir.restore.restore import RestorePlan

_NUMBERS = ("subtasks", "files", "bytes", "on this host")


@operation(RestorePlan, plans=True)
def restore(
    here: Here,
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    storage: Annotated[bool, Option("Read every object in storage, also if this host has copies of it.")] = False,
) -> Steps:
    """Fetch a checkpoint to this host and prove it: every digest is right, and every key is where it belongs.

    Then a run starts from these files. Of files that this host has already, only the sizes in storage are compared,
    unless --storage is given. Storage gets a row in registry/restores and does not change otherwise. A coordinator may
    run. To go on from an older checkpoint: weir rewind. Exit code 1 if the checkpoint is damaged.
    """
    pipeline, settings = here.pipeline, here.settings
    at = one_of(checkpoint, savepoint)
    durable, registry = open_storage(pipeline, settings)
    meant = chosen(pipeline, registry, at)
    with here.waiting("comparing this host's copies with storage"):
        plan = restoring.plan_restore(pipeline, settings, durable, registry, meant)
    stages = [
        (uid, str(stage.subtasks), str(stage.files), f"{stage.bytes:,}", f"{stage.bytes_local:,}")
        for uid, stage in plan.stages.items()
    ]
    yield Plan(
        plan,
        [
            f"Checkpoint {meant.id} of {plan.completed_at.isoformat()}: {plan.bytes:,} bytes of state.",
            Rows(stages, ("stage", *_NUMBERS), _NUMBERS),
            f"To fetch: {plan.to_fetch:,} bytes; {plan.cached:,} are among this host's objects.",
        ],
    )
    with here.waiting("fetching and checking"):
        done = restoring.restore(pipeline, settings, durable, registry, meant, stored=storage)
    took = f"{counted(done.files, 'file')} checked in {done.fetch_ms / 1000:.1f} s."
    if registry.head() == meant:
        words = [
            f"Checkpoint {meant.id} is valid: {done.bytes_fetched:,} bytes fetched,"
            f" {done.bytes_cached + done.bytes_local:,} were here, {took}"
            f" `weir run {here.name}` starts from local files now."
        ]
    else:
        onward = f"To go on from it: weir rewind {here.name} --to {meant.id}"
        words = [f"Checkpoint {meant.id} is valid, {took} {onward}"]
    if done.bytes_unread:
        words.append(
            f"{done.bytes_unread:,} bytes were not read in storage, where only their sizes were compared: "
            f"weir restore {here.name} --storage"
        )
    yield Done(replace(plan, restored=done), words)
