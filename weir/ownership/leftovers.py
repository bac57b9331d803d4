"""Deleting what ended attempts left in storage and on the local disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from state_ops.errors import plainly
from state_ops.fsck.sinks import TOP, look, mentioned
from state_ops.fsck.survey import UNREADABLE
from state_ops.ids import parse_epoch_dir
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint, is_abandoned
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.paths import data_directory, is_staged_rows
from state_ops.storage.storage import Storage
from weir.connectors.delta import append
from weir.connectors.delta.table_commit import table_path
from weir.ownership.context import RunContext
from weir.ownership.pipeline_storage import reaching
from weir.sinks.recorded_sink import places_before
from weir.sources.slices import Slice

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
        if context.pipeline.early and context.pipeline.capabilities(sink).takes_files:
            continue
        context.storage.delete_tree(f"{context.pipeline.staging(sink)}/{name}")


def unpublishable(context: RunContext, head: Checkpoint | None) -> list[tuple[Storage, str]]:
    """Return the rows in tables' directories whose epochs never completed: each file with the storage that it lies in.

    The directories are looked through, whatever sinks the code has by now: a sink that was removed, renamed or moved
    since leaves its rows too. Epochs of older generations are fenced, so nobody publishes their rows any more.

    Rows of a table that is ahead of the registry stay: they are published, though no checkpoint that is left knows of
    them. Rows that a table's log mentions stay: their epoch was delivered before its commit, which failed, while the
    pipeline delivered at least once. Rows that were begun then stay anyway, because a process that was taken for dead
    may deliver them yet.

    A table that cannot be read is logged and keeps its rows where no sink of the code writes into it: what was removed
    must not keep the pipeline from starting.
    """
    gone: list[tuple[Storage, str]] = []
    current = {sink.name for sink in context.pipeline.sinks if context.pipeline.capabilities(sink).takes_files}
    for name, storage in _tables(context, head) if not context.pipeline.early else ():
        try:
            gone += [(storage, path) for path in _dead_rows(context, storage, name, head)]
        except UNREADABLE as error:
            if storage is context.storage and name in current:
                raise
            log.warning("what may be left over stays: a table cannot be read", table=name, error=plainly(error))
    return gone


def delete_rows(context: RunContext, rows: Sequence[tuple[Storage, str]]) -> int:
    """Delete what `unpublishable` returned, and return how many files that was. A file elsewhere that cannot be deleted
    is logged and stays for the next sweep."""
    deleted = 0
    for storage, path in rows:
        try:
            deleted += storage.delete(path)
        except UNREADABLE as error:
            if storage is context.storage:
                raise
            log.warning("what is left over cannot be deleted", file=storage.full(path), error=plainly(error))
    return deleted


def _dead_rows(context: RunContext, storage: Storage, name: str, head: Checkpoint | None) -> list[str]:
    """Return the rows in one table's directory whose epochs never completed. Raises UNREADABLE."""
    base = data_directory(name, context.pipeline.app_id, storage.is_mounted(table_path(name)))
    app_id, last = context.pipeline.app_id, head.published(name) if head is not None else None
    dead = [directory for directory in storage.list_dirs(base) if _is_dead(context, head, directory)]
    if not dead or append.diverged(storage, app_id, name, last, lacks=context.pipeline.at_most_once):
        return []
    gone, perhaps_published = list[str](), list[str]()
    published = append.marker(storage, app_id, name) or 0
    for directory in dead:
        files = storage.list(f"{base}/{directory}", unfinished=True)
        staged = [file.path for file in files if is_staged_rows(file.path)]
        parsed = parse_epoch_dir(directory)
        (gone if parsed is not None and parsed[1] > published else perhaps_published).extend(staged)
    return gone + _not_in_log(context, storage, name, perhaps_published) if perhaps_published else gone


def _is_dead(context: RunContext, head: Checkpoint | None, directory: str) -> bool:
    """Return whether no checkpoint names the files of an epoch's directory, and no run publishes them."""
    parsed = parse_epoch_dir(directory)
    if parsed is None or parsed[1] <= context.early_id:
        return False
    return parsed[0] < context.generation and is_abandoned(head, *parsed)


def _tables(context: RunContext, head: Checkpoint | None) -> Iterator[tuple[str, Storage]]:
    """Yield the names of tables in whose directories the pipeline has staged rows, each with a storage that reaches
    it."""
    for name in context.storage.list_dirs(TOP):
        yield name, context.storage
    pipeline, settings = context.pipeline, context.settings
    if pipeline.elsewhere:
        own = Storage(context.storage.uri, settings.storage.s3, context.storage.request_counts)
        for name in set(own.list_dirs(TOP)) & pipeline.elsewhere.keys():
            yield name, own
    if before := places_before(pipeline, head):
        there = reaching(pipeline, settings, before, context.storage.request_counts)
        for name in before:
            if there.is_mounted(table_path(name)):
                yield name, there


def _not_in_log(context: RunContext, storage: Storage, table: str, paths: Sequence[str]) -> list[str]:
    """Return the files that the log of a table does not mention; none where it cannot be read."""
    current = look(storage, context.pipeline.app_id, table)
    rest = [path for path in paths if path not in current.files]  # mostly none, which takes no look at the whole log
    if current.problem is not None or not rest:
        return []
    try:
        named = mentioned(storage, current.path, rest)
    except UNREADABLE as error:
        log.warning("what may be left over stays: a table's log cannot be read", table=table, error=plainly(error))
        return []
    return [path for path in rest if path not in named]
