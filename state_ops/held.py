"""`coordinator/held.json`: that a gate holds the pipeline, for who would start it again and for who looks.

It is advice and gives no right: whoever runs the pipeline again plans the same slice and asks the same gates. A run that is killed before it
has written it leaves none, which the next run mends; one that is killed before it has removed it leaves one too many, which the newest
checkpoint belies. No failure to read, write or remove it ends a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from state_ops.checkpoint import Checkpoint
from state_ops.storage import Storage

PATH = "coordinator/held.json"

log = structlog.get_logger("weir.run")


@dataclass(frozen=True, slots=True)
class Held:
    """A gate has declined an epoch, and the run has ended over it.

    when: ISO 8601, UTC. stage: whose gate; epoch: the id of the epoch that was declined. verdicts: those that failed, as in a checkpoint's
    row. message: for people. files: by source, the names of the files that the epoch had read.
    """

    when: str
    run_id: str | None
    epoch: int
    stage: str
    message: str
    verdicts: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "verdicts": [dict(verdict) for verdict in self.verdicts],
            "files": {source: list(names) for source, names in self.files.items()},
        }


def read(storage: Storage, head: Checkpoint | None) -> Held | None:
    """What holds the pipeline, as far as can be told; None if nothing does, or nobody can tell.

    head: the newest checkpoint. Where its id is above the epoch's, a run has gone on, and was ended before it could remove the note.
    """
    try:
        data = storage.read_bytes(PATH)
        if data is None:
            return None
        raw = json.loads(data)
        known = {name: raw[name] for name in Held.__dataclass_fields__ if name in raw}
        files = {source: tuple(names) for source, names in known.pop("files", {}).items()}
        held = Held(**{**known, "verdicts": tuple(known.get("verdicts", ()))}, files=files)
        return None if head is not None and head.id > held.epoch else held
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("nobody can tell whether a gate holds the pipeline", where=storage.full(PATH), error=str(error))
        return None


def write(storage: Storage, held: Held) -> None:
    try:
        storage.put_bytes(PATH, json.dumps(held.to_dict(), indent=1).encode())
    except OSError as error:
        log.warning("that a gate holds the pipeline could not be written down", stage=held.stage, error=str(error))


def clear(storage: Storage) -> bool:
    """Say that nothing holds the pipeline any more; False if that could not be written."""
    try:
        storage.delete(PATH)
    except OSError as error:
        log.warning("an outdated note that a gate holds the pipeline stays", error=str(error))
        return False
    return True


def is_there(storage: Storage) -> bool:
    """Whether there may be something to clear."""
    try:
        return storage.size(PATH) is not None
    except OSError:
        return True
