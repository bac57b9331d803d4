"""Deleting what ended attempts left in storage and on the local disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.sources.slices import Slice
from state_ops.errors import plainly
from state_ops.logs import Logger
from state_ops.records.snapshot_files import StateFile

log = Logger("weir.epoch")


def remove(context: RunContext, files: Sequence[StateFile]) -> None:
    """Delete what an attempt that does not count has uploaded; what stays for now is swept like everything unnamed.

    Raises nothing: the epoch whose attempt it was may be committed by now.
    """
    for file in files:
        if context.pipeline.early and file.in_table:
            continue  # the table may have it already; `weir fsck --repair` asks its log
        try:
            context.storage.delete(file.path)
        except Exception as error:
            log.warning("an object of an attempt that lost could not be deleted", path=file.path, error=plainly(error))


def discard_slices(context: RunContext, slices: Mapping[str, Slice], again: Mapping[str, Slice] | None = None) -> None:
    """Delete what was landed for slices that no checkpoint names.

    A failure is not reported, because the next take-over removes what is left.

    Args:
        again: By source, the slices that are read instead. What they name stays.
    """
    for name, planned in slices.items():
        with suppress(Exception):
            context.readers[name].discard(planned, (again or {}).get(name))


def delete_staged(context: RunContext, name: str) -> None:
    for stage in context.pipeline.stages:
        context.storage.delete_tree(f"state/{stage.uid}/{name}")
        context.storage.delete_tree(f"channels/{stage.uid}/{name}")
        context.storage.delete_tree(f"exchange/{stage.uid}/{name}")
    for sink in context.pipeline.sinks:
        if context.pipeline.early and context.pipeline.appends(sink):
            continue
        context.storage.delete_tree(f"{context.pipeline.staging(sink)}/{name}")
