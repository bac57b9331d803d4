"""The causes that hold a pipeline: note one when a run ends, and see whether it still stands.

See `state_ops.coordination.gate_hold` for the note.

A hold ends with the next checkpoint, whatever made that. It ends for sensors, too, once what it is about has changed:
an input file was repaired or moved away, a damaged object or table was put back, the landing directory is there again.
That is seen by sizes and times, with no content read, at each tick. What only a correction of the code can mend waits
for a person.

Damage and bad input hold nobody where nothing that can be looked at from here would ever change: a file of one host's
disk, a staged file that has vanished, an object that executors alone do not see. Sensors then ask again, ever more
rarely.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa

from state_ops.coordination import gate_hold
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.lease import Lease
from state_ops.errors import DamageError, GateError, HoldingError, InputError, MissingError, VanishedError, plainly
from state_ops.ids import CheckpointId, Generation, parse_epoch_dir
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.storage import Storage
from weir.definition import Stage
from weir.sources.reader import SourceReader
from weir.sources.slices import EpochPlan

log = Logger("weir.run")

_AFTER_A_PATH = re.compile(
    r": |, | \("
)  # what a message's `where` may say behind the path; no path in storage has that


def note(
    storage: Storage, head: Checkpoint | None, generation: Generation | None, run_id: str | None, error: HoldingError
) -> None:
    """Leave word of what ended a run, for whoever would start the next one.

    Args:
        head: The newest checkpoint.
        generation: The coordinator that met the error, or that died before somebody else did.
        error: With what it says of the epoch and its files.
    """
    vanished = isinstance(
        error, VanishedError
    )  # the next run plans without it, or an executor does not see what is here
    failed = (
        tuple(verdict for verdict in error.verdicts if not verdict["passed"]) if isinstance(error, GateError) else ()
    )
    newest = int(head.id) if head is not None else 0
    try:
        objects = _damaged(storage, newest, error) if isinstance(error, DamageError) else {}
    except OSError as unreachable:  # what ended the run is the news, and it must reach whoever looks
        log.warning("that the pipeline is held could not be written down", error=plainly(unreachable))
        return
    gate_hold.write(
        storage,
        GateHold(
            when=datetime.now(UTC).isoformat(),
            run_id=run_id,
            epoch=newest if error.epoch is None else error.epoch,
            stage=str(failed[0]["stage"]) if failed else "",
            message=str(error),
            verdicts=failed,
            files={source: tuple(files) for source, files in error.files.items()},
            error=next(kind.__name__ for kind in type(error).__mro__ if HoldingError in kind.__bases__),
            where=error.where or "",
            generation=generation,
            read={source: dict(files) for source, files in error.files.items() if files and not vanished},
            objects=objects,
        ),
    )


def note_slice(error: HoldingError, epoch: CheckpointId, plan: EpochPlan) -> None:
    """Note in an error which epoch it ended; and all files that the epoch had read, where nobody can tell which of them
    is bad."""
    error.epoch = int(epoch)
    if not isinstance(error, DamageError):
        error.files = error.files or {
            source: {file.name: (file.size, file.mtime_ns) for file in planned.files}
            for source, planned in plan.slices.items()
        }


def without_bad_input(
    readers: Mapping[str, SourceReader],
    plan: EpochPlan,
    error: HoldingError,
    expected: Mapping[str, pa.Schema],
    stages: Iterable[Stage],
) -> EpochPlan | None:
    """Return the plan to take instead of an epoch's in which one file, or rows of it, could not be read, if its source
    sets such input aside; else None.

    Args:
        readers: Of the pipeline's sources, by name.
        error: What ended the epoch. Only who has read a file can say that it is the bad one: what is wrong with a row
            is no reason.
        expected: By source, the schema of what was read before.
        stages: Those of the pipeline.
    """
    from weir.execution import direct_read  # `weir status` does without what executes
    from weir.execution.executor import Landed

    if not isinstance(error, InputError) or isinstance(error, VanishedError):
        return None
    blamed = [(source, name) for source, names in error.files.items() for name in names]
    if len(blamed) != 1:
        return None
    ((source, name),) = blamed
    reader, planned = readers[source], plan.slices.get(source)
    file = next((file for file in planned.files if file.name == name), None) if planned is not None else None
    if planned is None or file is None or not reader.sets_aside(file):
        return None
    assert planned.schema is not None, "it has a file"
    read = direct_read.read_by(stages, Landed(planned.schema, reader, planned.files))
    left = reader.without_bad(planned, file, error, expected.get(source), read)
    return replace(plan, slices={**plan.slices, source: left})


def standing(storage: Storage, head: Checkpoint | None, readers: Mapping[str, SourceReader]) -> GateHold | None:
    """Return the note of the pipeline's hold if its cause has not changed since.

    Only the few files that the note names are listed or asked for.

    Args:
        head: The newest checkpoint.
        readers: Of the pipeline's sources, by name.
    """
    noted = gate_hold.read(storage, head.id if head else None)
    if noted is None or not _stands(storage, head, readers, noted):
        return None
    return noted


def is_since(noted: GateHold, holder: Lease | None) -> bool:
    """Return whether a hold was noted by the lease's holder or after that holder died.

    The pipeline then has nothing to recover first.
    """
    return noted.generation is not None and holder is not None and noted.generation >= holder.generation


def _stands(storage: Storage, head: Checkpoint | None, readers: Mapping[str, SourceReader], noted: GateHold) -> bool:
    for source, files in noted.read.items():
        if source not in readers or not readers[source].are_as_read(files):
            return False
    if noted.error == InputError.__name__ and not noted.read:  # it is about the source as a whole
        return not _can_be_read(head, readers)
    if noted.error == DamageError.__name__ and not noted.objects:
        return False
    return all(_stamp(storage, path) == stamp for path, stamp in noted.objects.items())


def _can_be_read(head: Checkpoint | None, readers: Mapping[str, SourceReader]) -> bool:
    """Return whether all sources can be read on from the positions of the newest checkpoint."""
    try:
        for name, reader in readers.items():
            reader.check(head.offsets.get(name) if head is not None else None)
    except InputError:
        return False
    return True


def _damaged(storage: Storage, newest: int, error: DamageError) -> dict[str, str | None]:
    """Return the object that an error names, with its stamp; nothing where that would never change, whatever is
    repaired.

    newest: the id of the newest checkpoint. What later epochs have staged is staged anew, under other names.
    """
    path = storage.path_of(_AFTER_A_PATH.split(error.where or "")[0])
    if path is None:
        return {}
    staged_by = next(filter(None, map(parse_epoch_dir, path.split("/"))), None)
    if staged_by is not None and staged_by[1] > newest:
        return {}
    stamp = _stamp(storage, path)
    if isinstance(error, MissingError) and stamp is not None:  # it is here: whoever missed it does not see this storage
        return {}
    return {path: stamp}


def _stamp(storage: Storage, path: str) -> str | None:
    """Return the stamp of an object, or of all that lies in a directory: a table that was put back."""
    stamp = storage.stamp(path)
    if stamp is not None:
        return stamp
    inside = sorted((file.path, file.bytes) for file in storage.list(path))
    return hashlib.sha256(repr(inside).encode()).hexdigest() if inside else None
