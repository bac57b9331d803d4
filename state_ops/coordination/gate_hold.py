"""The hold: a note in `coordinator/held.json` that says which error ended the pipeline's last run, where every next run
would meet it again.

A quality gate, bad input and damage hold a pipeline. Sensors read the note before they start a run, and `weir status`
shows it. It is only
advice and gives no right: whoever runs the pipeline again plans the same slice, asks the same gates and reads the same
objects.

- If a run is killed before it writes the note, the next run writes it.
- If a run is killed before it removes the note, readers ignore it as soon as the newest checkpoint is past the epoch
that is held.

No failure to read, write or remove it ends a run. Whether its cause still stands is
`weir.ownership.hold_causes`'s to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from state_ops.errors import plainly
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.storage.storage import Storage

PATH = "coordinator/held.json"
GATE = "GateError"
_SHOWN = 3  # files

log = Logger("weir.run")


@dataclass(frozen=True, slots=True)
class GateHold:
    """The reason why the pipeline is held.

    Attributes:
        when: ISO 8601, UTC.
        run_id: Of the run that ended.
        epoch: The id of the epoch that was declined; where none had begun, of the newest checkpoint, 0 if there is
            none.
        stage: The stage of the gate; empty if no gate holds.
        message: What people are told, on several lines.
        verdicts: The failed verdicts, as in a checkpoint's row.
        files: By source, the names of the files that the epoch had read, or of the one that it could not read.
        error: The name of the error's type. Notes of earlier releases have none: they are all of gates.
        where: The file or object, or what else the error names.
        generation: The generation of the coordinator that wrote the note; None in notes of earlier releases.
        read: By source and name, size in bytes and time of change in ns of those files as the epoch saw them.
        objects: By path in storage, the stamp (`Storage.stamp`) of what is damaged; None where nothing was there.
    """

    when: str
    run_id: str | None
    epoch: int
    stage: str
    message: str
    verdicts: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    error: str = GATE
    where: str = ""
    generation: int | None = None
    read: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    objects: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def by_gate(self) -> bool:
        """True if a gate holds the pipeline."""
        return self.error == GATE

    @property
    def subject(self) -> str:
        """The error and what it names, with the files that were being read where that names none of them."""
        names = [name for several in self.files.values() for name in several]
        unnamed = names and not any(name in self.where for name in names)
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        return ", ".join(filter(None, [self.error, self.where, f"reading {shown}" if unnamed else ""]))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "verdicts": [dict(verdict) for verdict in self.verdicts],
            "files": {source: list(names) for source, names in self.files.items()},
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GateHold:
        """Return the hold that `to_dict` gave, in this release or another. Unknown entries are left out."""
        fields = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        files = {source: tuple(names) for source, names in fields.pop("files", {}).items()}
        return cls(**{**fields, "verdicts": tuple(fields.get("verdicts", ()))}, files=files)


def read(storage: Storage, head: CheckpointId | None) -> GateHold | None:
    """Return the note of what holds the pipeline; None if nothing does, or the note cannot be read.

    Args:
        head: The id of the newest checkpoint. Where it is above the epoch's, a run has gone on, and was ended before it
            could remove the note.
    """
    try:
        data = storage.read_bytes(PATH)
        if data is None:
            return None
        held = GateHold.from_dict(json.loads(data))
        return None if head is not None and head > held.epoch else held
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("nobody can tell whether the pipeline is held", where=storage.full(PATH), error=plainly(error))
        return None


def write(storage: Storage, held: GateHold) -> None:
    try:
        storage.put_bytes(PATH, json.dumps(held.to_dict(), indent=1).encode())
    except OSError as error:
        log.warning("that the pipeline is held could not be written down", why=held.message, error=plainly(error))


def clear(storage: Storage) -> bool:
    """Say that nothing holds the pipeline any more; False if that could not be written."""
    try:
        storage.delete(PATH)
    except OSError as error:
        log.warning("an outdated note that the pipeline is held stays", error=plainly(error))
        return False
    return True


def is_there(storage: Storage) -> bool:
    """Return whether there may be a note to clear."""
    try:
        return storage.size(PATH) is not None
    except OSError:
        return True
