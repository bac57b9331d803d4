"""`weir rewind` and the rewind job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.requests import Request
from state_ops.errors import ConfigurationError
from weir.inspection.state_reader import chosen, moment
from weir.operations.operation import COMMAND, JOB, Done, Here, Labelled, Option, Plan, Reason, Rows, Steps, operation
from weir.ownership.ownership import raise_if_busy
from weir.ownership.pipeline_storage import open_storage
from weir.restore import rewind as rewinding
from weir.restore.rewind import RewindPlan
from weir.run import maintenance
from weir.run.stopping import ask_to_stop

_To = Annotated[
    str | None,
    Option(
        "The checkpoint to go back to, by its number, or by the name of a savepoint. 0: before the first one.",
        complete="moments",
        only=COMMAND,
    ),
]
_Savepoint = Annotated[
    str | None,
    Option(
        "The earlier name of --to NAME.",
        in_job="Required, or a checkpoint: the savepoint's name. Empty: not said.",
        hidden=True,
    ),
]
# The Launchpad writes down what has a default but null, so that nobody has to look for these.
_Checkpoint = Annotated[
    int | None, Option("Required, or a savepoint: the checkpoint to go back to. 0: not said.", only=JOB)
]
_Beginning = Annotated[bool, Option("Instead of both: go back to before the first checkpoint.", only=JOB)]
_Stop = Annotated[
    bool, Option("End the running coordinator at its barrier first, and let sensors go on afterwards.", only=JOB)
]


@operation(
    RewindPlan,
    job="Takes state, source positions and all tables back to one checkpoint. Only shows what would change unless"
    " dry_run is false.",
    plans=True,
    asks=True,
    accepts=True,
)
def rewind(
    here: Here,
    to: _To = None,
    checkpoint: _Checkpoint = 0,
    savepoint: _Savepoint = "",
    beginning: _Beginning = False,
    stop: _Stop = False,
    reason: Reason = "",
) -> Steps:
    """Take state, source positions and all sink tables back to one checkpoint, together.

    The next run reads the input again from there. Checkpoints that are abandoned stay in the registry until they are
    pruned, and are never published again. No coordinator may be running.
    """
    pipeline, settings = here.pipeline, here.settings
    if [bool(to), bool(checkpoint), bool(savepoint), beginning].count(True) != 1:
        raise _which(here)
    storage, registry = open_storage(pipeline, settings)
    at = moment(to, registry) if to else savepoint or checkpoint
    back_to = rewinding.BEGINNING
    if not beginning and at != rewinding.BEGINNING:
        back_to = int(chosen(pipeline, registry, at).id)
    with here.waiting("comparing the tables' rows"):
        plan = rewinding.plan(pipeline, settings, back_to)
    lives = here.face == JOB and not here.dry_run and lease.watch(storage)
    if not plan.takes_back and not lives:
        if not here.dry_run:
            with here.waiting("looking for a coordinator"):
                raise_if_busy(pipeline, storage)
            plan = replace(plan, checkpoint=plan.head.id)
        yield Done(plan, [f"{rewinding.nothing_to_take_back(plan, here.name)}."])
        return
    accepted = yield Plan(
        plan,
        [*_words(plan), *(Labelled("obstacle", obstacle) for obstacle in plan.obstacles)],
        "rewind",
        plan.obstacles,
        partial(rewinding.check, plan, here.name),
    )
    with here.waiting("checking the checkpoint, then rewinding"), suspension.during(storage, here.by):
        if stop and lives:
            ask_to_stop(pipeline, settings, Request(requests.STOP, trigger="job", reason=reason))
        done = maintenance.rewind(pipeline, settings, back_to, accepted=accepted, reason=reason)
    if done.id == plan.to.id:
        said = f"{rewinding.nothing_to_take_back(plan, here.name)}."
    else:
        said = f"{here.name} is at checkpoint {done.id}, back {done.reason}. `weir run {here.name}` goes on from there."
    yield Done(replace(plan, checkpoint=done.id), [said])


def _which(here: Here) -> ConfigurationError:
    """Return the error that not one checkpoint is named."""
    if here.face == JOB:
        where = "the rewind job's configuration"
        say = "Set checkpoint, savepoint or beginning; `weir checkpoints` and the checkpoint's history list them."
    else:
        where = None
        say = f"`weir rewind {here.name} --to N` or `--to NAME`; `weir checkpoints {here.name}` lists them."
    return ConfigurationError("Say which checkpoint to go back to.", where=where, next=say)


def _words(plan: RewindPlan) -> Iterator[str | Rows]:
    retained = ", ".join(map(str, plan.abandoned)) or "nothing"
    verb = "is" if len(plan.abandoned) < 2 else "are"
    to = f"{plan.to.id} ({plan.to.completed_at:%Y-%m-%d %H:%M:%S})" if plan.to.id else "before the first one"
    undone = f"everything after {plan.to.id}; of it" if plan.to.id else "everything; of it"
    yield (
        f"From checkpoint {plan.head.id} back to {to}. Undone: {undone} {retained} {verb} still retained and can be"
        " taken back to."
    )
    states = [("state", uid, f"{of.now:,} bytes, then {of.then:,}") for uid, of in plan.stages.items()]
    sources = [("source", source.source, str(source)) for source in plan.sources]
    tables = [
        (
            "table",
            table.table,
            (
                f"version {table.version}, then {'empty' if table.then is None else f'as of version {table.then}'}: "
                f"{table.in_words}"
            ),
        )
        for table in plan.tables
    ]
    sinks = [
        (
            "sink",
            sink.name,
            (
                f"{'gives back' if sink.stays is None else 'keeps'} what {sink.kind} was given since checkpoint "
                f"{sink.then or 'the beginning'}"
            )
            if sink.has != sink.then
            else "has no rows that are taken back",
        )
        for sink in plan.sinks
    ]
    never = [
        ("not published", name, f"{', '.join(map(str, ids))}: taken back before their rows came into it")
        for name, ids in plan.never.items()
    ]
    yield Rows([*states, *sources, *tables, *sinks, *never])
