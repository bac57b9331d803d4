"""The committed checkpoints that sinks have not taken, with the reasons: a note in `coordinator/unpublished.json`.

The registry says what is committed and not published; this note adds the reason for people, as the last try to publish
left it. It gives no right, decides nothing, and no failure to read or write it ends a run. It has no values of rows:
only what the error says first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from state_ops.errors import WeirError, first_line, plainly
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.storage.storage import Storage

PATH = "coordinator/unpublished.json"

log = Logger("weir.sink")


@dataclass(frozen=True, slots=True)
class RefusedPublication:
    """The reason why a sink has not taken a checkpoint.

    Attributes:
        checkpoint: The oldest one that it lacked then.
        why: What its error says.
        when: ISO 8601, UTC.
    """

    checkpoint: int
    why: str
    when: str


def note(storage: Storage, refused: Mapping[str, tuple[CheckpointId, Exception]]) -> None:
    """Write the note of a try to publish that failed.

    Args:
        refused: By sink, the checkpoint that it has not taken and the error.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {
        sink: asdict(
            RefusedPublication(int(id), error.what if isinstance(error, WeirError) else first_line(error), now)
        )
        for sink, (id, error) in refused.items()
    }
    try:
        storage.put_bytes(PATH, json.dumps(facts).encode())
    except Exception as error:
        log.warning("why a sink takes no rows is not noted", error=plainly(error))


def clear(storage: Storage) -> None:
    """Remove the note: all is published, or taken back."""
    try:
        storage.delete(PATH)
    except Exception as error:
        log.warning("why a sink took no rows is still noted", error=plainly(error))


def read(storage: Storage) -> dict[str, RefusedPublication]:
    """Return by sink the reason why the last try to publish failed. The caller asks the registry whether it still
    stands.
    """
    try:
        raw = storage.read_bytes(PATH)
        return {sink: RefusedPublication(**facts) for sink, facts in json.loads(raw).items()} if raw is not None else {}
    except Exception as error:
        log.warning("why a sink takes no rows cannot be read", error=plainly(error))
        return {}
