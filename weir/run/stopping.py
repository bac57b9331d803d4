"""Ending a pipeline: asking a running coordinator to end, waiting until it has, and keeping sensors from beginning
again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.lease import Lease
from state_ops.coordination.requests import Request
from state_ops.coordination.suspension import Suspension
from state_ops.errors import WeirError
from state_ops.logs import Logger
from weir.definition import Pipeline
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

Waiting = Callable[[str], AbstractContextManager[Any]]

log = Logger("weir.run")


def end(
    pipeline: Pipeline, settings: Settings, request: Request, how: str = "stopped", waiting: Waiting = nullcontext
) -> bool:
    """Have a pipeline end as the stop request says, and stay ended until a person begins again.

    Args:
        request: What a living coordinator is asked for; its `reason` is what sensors and `weir status` say.
        how: "stopped" or "cancelled", for those where no coordinator lives.
        waiting: Shows somebody, while its block lasts, what is waited for.

    Returns:
        Whether a coordinator lived and did what was asked. If not, `drain`, `delete` and `savepoint` are for the caller
        to do.

    Raises:
        WeirError: As `ask_to_stop`; then nothing keeps sensors from beginning.
    """
    storage, _ = open_storage(pipeline, settings)
    before = lease.read(storage)
    if lease.watch(storage) and ask_to_stop(pipeline, settings, request, waiting):
        return True
    suspension.write(storage, Suspension(how, request.reason))
    # A run that began meanwhile may have looked for the suspension before it was there. A run writes its lease, then
    # looks for it; here the
    # suspension is written first: one of the two sees the other.
    now = lease.read(storage)
    began = now is not None and (before is None or now.generation != before.generation)
    return began and lease.watch(storage) and ask_to_stop(pipeline, settings, request, waiting)


def ask_to_stop(pipeline: Pipeline, settings: Settings, request: Request, waiting: Waiting = nullcontext) -> bool:
    """Have the living coordinator do what the stop request says. False if it ended by itself before it saw it.

    Raises:
        WeirError: It failed, died, was replaced or fell silent before it came to its barrier; the request is withdrawn
            then.
    """
    storage, _ = open_storage(pipeline, settings)
    holder = lease.read(storage)
    if holder is None:
        return False
    sent = requests.send(storage, request)
    beat, heard = holder.counter, time.monotonic()
    with waiting(f"waiting for process {holder.pid} to reach its barrier"):
        while (now := lease.read(storage)) is not None and now.process == holder.process and lease.watch(storage):
            if now.counter != beat:
                beat, heard = now.counter, time.monotonic()
            elif time.monotonic() - heard > lease.DEAD_AFTER_HEARTBEATS * now.heartbeat_seconds:
                requests.take(storage, sent)
                raise _hangs(pipeline, now, time.monotonic() - heard)
            time.sleep(settings.run.poll_seconds)
        now = lease.read(storage)  # it may have ended between the two looks
    outcome = now.outcome if now is not None and now.process == holder.process else None
    # A request that is still there came after the barrier at which others ended the run: nobody did what it asks for.
    if outcome in ("drained", *(() if request.drain else ("stopped",))) and storage.read_bytes(sent.name) is None:
        return True
    requests.take(storage, sent)
    if outcome in ("ended", "stopped", "drained"):  # it had nothing more to do before it saw the request
        log.info("the coordinator had ended by itself", pipeline=pipeline.title)
        return False
    how = {"failed": "failed", "interrupted": "was interrupted"}.get(outcome or "", "died")
    where = "before it had deleted all checkpoints" if request.delete else "before it reached its barrier"
    if now is not None and now.process != holder.process:
        how = "was replaced by another"
    raise WeirError(
        f"The coordinator of {pipeline.title} {how} {where}" + (", and nothing was drained." if request.drain else "."),
        next=(
            f"`weir checkpoints {pipeline.title}` shows whether some were deleted before that; its log says what"
            " happened."
            if request.delete
            else (
                f"Nothing is lost: `weir run {pipeline.title}` resumes from the last completed checkpoint, or shows the"
                " error again."
            )
        ),
    )


def _hangs(pipeline: Pipeline, holder: Lease, seconds: float) -> WeirError:
    """Return whether a coordinator hangs: on its own host a process that exists counts as alive, so nobody takes over
    before it is ended."""
    return WeirError(
        f"The coordinator of {pipeline.title} hangs: its process exists, and its heart has not beaten for"
        f" {seconds:.0f} s.",
        where=f"process {holder.pid} on {holder.host}, generation {holder.generation}",
        next=(
            f"Once more, in case that it was only busy; then on {holder.host}: kill -9 {holder.pid}, and weir run "
            f"{pipeline.title}. Nothing is lost: docs/playbooks/coordinator-hung.md."
        ),
    )
