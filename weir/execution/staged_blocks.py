"""A second hop of the exchange: blocks lie in storage as objects, and the subtask that has the state reads its own.

    map task: blocks -> objects, in each the blocks of a subtask side by side -> extents
    subtask:  extents -> ranges of objects, each proven by its digest -> blocks -> rows

So the subtask may be started on the host of its state, which a reducer of Spark's shuffle cannot.
docs/adr/0088-blocks-on-storage.md says when that pays, and who removes the objects.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import pyarrow as pa
import xxhash

from state_ops.errors import TransientError, plainly
from state_ops.ids import CheckpointId, Generation, epoch_dir, new_attempt_id
from state_ops.logs import Logger
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.definition import Stage
from weir.execution import exchange
from weir.execution.executor import InputRows
from weir.task.run_task import KeyedTask

log = Logger("weir.spark")

SCHEMA = "staged string"
"""What a map task hands to Spark: its extents and requests, as JSON; null as a null block of the exchange is."""

AUTO, ON, OFF = "auto", "on", "off"  # of the setting

MOST_BYTES = 32 << 20  # of an object, about: what a map task holds of its blocks
_AT_ONCE_BYTES = 32 << 20  # what a subtask reads ahead
_HEAD = struct.Struct("<ii")  # before each block: the number of its input, and its bytes
# Bytes of state that a request has to spare. It takes as long as their fetch does, about, where storage is far.
_BYTES_A_REQUEST = 128 << 10


@dataclass(frozen=True, slots=True)
class Extent:
    """All blocks that an object has for one subtask.

    Attributes:
        start: Its first byte in the object.
        digest: Its xxh3-128, in hex.
    """

    path: str
    subtask: int
    start: int
    bytes: int
    digest: str


def pays(task: KeyedTask, rows: InputRows, hosts: int) -> bool:
    """Return whether the state that would move costs more to fetch than the rows' blocks cost to put and get.

    Half of the state moves between two hosts, and two thirds between three. Each map task puts an object, and each
    subtask asks for its part of each.
    """
    files = {
        file.path if isinstance(file, StateFile) else f"{base.attempt}/{file.name}": file.bytes
        for base in task.bases.values()
        for file in base.files
    }
    parts = [part for _, part in rows.parts]
    stored = sum(exchange.stored_bytes(file) for part in parts for file in part.files)
    requests = task.parallelism * (task.parallelism + 1)
    return sum(files.values()) * (hosts - 1) // hosts > 2 * stored + requests * _BYTES_A_REQUEST


def directory(stage: Stage, generation: Generation, epoch: CheckpointId) -> str:
    """Return the directory to which the map tasks of a stage put their objects in one epoch."""
    return f"exchange/{stage.uid}/{epoch_dir(generation, epoch)}"


def put(storage: Storage, place: str, map_task: int, blocks: Iterable[pa.RecordBatch]) -> str | None:
    """Put what one map task has cut into objects of its own, and return what `SCHEMA` says.

    Args:
        place: The stage's `directory`.
        blocks: As `exchange.SCHEMA` has them.

    Raises:
        TransientError: Storage does not take them.
    """
    home = f"{place}/{map_task}-{new_attempt_id()}"
    waiting: dict[int, list[tuple[int, pa.Buffer]]] = {}
    extents: list[Extent] = []
    objects = size = 0
    for batch in blocks:
        columns = (batch.column(name) for name in ("subtask", "side", "block"))
        for subtask, side, block in zip(*columns, strict=True):
            if not block.is_valid:
                return None
            waiting.setdefault(subtask.as_py(), []).append((side.as_py(), block.as_buffer()))
            size += block.as_buffer().size
        if size >= MOST_BYTES:
            extents += _put_object(storage, f"{home}/{objects}.blocks", waiting)
            objects, size, waiting = objects + 1, 0, {}
    if waiting:
        extents += _put_object(storage, f"{home}/{objects}.blocks", waiting)
    return json.dumps(
        {"extents": [astuple(extent) for extent in extents], "request_counts": storage.request_counts.take()}
    )


def _put_object(storage: Storage, path: str, waiting: Mapping[int, Sequence[tuple[int, pa.Buffer]]]) -> list[Extent]:
    stream, extents = pa.BufferOutputStream(), []
    for subtask in sorted(waiting):
        start, hashed = stream.tell(), xxhash.xxh3_128()
        for side, block in waiting[subtask]:
            for piece in (_HEAD.pack(side, block.size), block):
                hashed.update(memoryview(piece))
                stream.write(piece)
        extents.append(Extent(path, subtask, start, stream.tell() - start, hashed.hexdigest()))
    try:
        storage.put_bytes(path, stream.getvalue())
    except OSError as error:
        raise TransientError(
            f"Blocks of rows could not be put into storage: {plainly(error)}",
            where=storage.full(path),
            next="The epoch was declined and is replayed. Look at the storage if it happens again.",
        ) from error
    return extents


def collected(storage: Storage, staged: Iterable[str | None]) -> dict[int, list[Extent]] | None:
    """Return the extents of each subtask, in the order of the map tasks whose answers these are; None if a block is
    null.

    What the map tasks have requested is counted as the coordinator's.
    """
    by_subtask: dict[int, list[Extent]] = {}
    for answer in staged:
        if answer is None:
            return None
        fields = json.loads(answer)
        storage.request_counts.add(fields["request_counts"])
        for extent in (Extent(*values) for values in fields["extents"]):
            by_subtask.setdefault(extent.subtask, []).append(extent)
    return by_subtask


def opened(
    storage: Storage, extents: Sequence[Extent], columns: Sequence[pa.Schema], seconds: float | None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of one subtask as `exchange.opened` does.

    Args:
        columns: By input, as there.
        seconds: Counted from the first row that is asked for, when the state is there: no range is awaited longer.

    Raises:
        TransientError: A range is gone, is not what was put, or does not come in time.
    """
    schemas = exchange.block_schemas(columns)
    deadline = None if seconds is None else time.monotonic() + seconds
    for some in _at_once(extents, storage.transfers):
        for data in together(lambda extent, _: _read(storage, extent), some, at_once=len(some), deadline=deadline):
            at, whole = 0, pa.py_buffer(data)
            while at < whole.size:
                side, size = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                yield side, exchange.opened_block(whole.slice(at, size), schemas[side])
                at += size


def _at_once(extents: Sequence[Extent], most: int) -> Iterator[list[Extent]]:
    """Yield extents in groups that may be in memory together."""
    some: list[Extent] = []
    for extent in extents:
        if some and (len(some) == most or sum(each.bytes for each in some) + extent.bytes > _AT_ONCE_BYTES):
            yield some
            some = []
        some.append(extent)
    if some:
        yield some


def _read(storage: Storage, extent: Extent) -> bytes:
    try:
        data = storage.read_part(extent.path, extent.start, extent.bytes)
        problem = None if xxhash.xxh3_128_hexdigest(data) == extent.digest else "their xxh3 is not the recorded one"
    except FileNotFoundError:
        problem = "the object is gone"
    except OSError as error:
        problem = plainly(error)
    if problem is None:
        return data
    raise TransientError(
        f"Blocks of rows that a map task has put into storage cannot be read: {problem}.",
        where=f"{storage.full(extent.path)}, bytes {extent.start} to {extent.start + extent.bytes - 1}",
        next="The epoch was declined and is replayed, which puts them anew. Look at the storage if it happens again.",
    )


def remove(storage: Storage, place: str) -> None:
    """Delete what a job's map tasks have put, once it is over.

    Raises nothing: what stays is removed by the next owner, as what a task puts that Spark has given up.
    """
    try:
        storage.delete_tree(place)
    except Exception as error:
        log.warning("blocks of the exchange could not be deleted", path=place, error=plainly(error))
