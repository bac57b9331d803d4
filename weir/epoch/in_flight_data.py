"""In-flight data: rows in front of a stage that it has not applied when a checkpoint is cut.

    aligned      a checkpoint waits until every stage has applied all rows of its epoch
    unaligned    a stage stops between two batches once its time is up; what it has not applied is part of the
                 checkpoint

What waits is a queue of epochs. A stage applies them in order, each by the clock and the watermark that it would have
had at once, and hands an epoch on when it has applied all of it. So the state is what it would have been, only later.
Values only: which stage works on what, and what that leaves. docs/adr/0021-unaligned-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from state_ops.arrow.frames import schema_from_json, schema_to_json
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros, to_micros
from state_ops.outputs import MAIN, REST
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import StagedFile, StateFile
from weir.connectors.lookups.lookup_table import Version

Rows = StagedFile | StateFile


@dataclass(frozen=True, slots=True)
class InFlightData:
    """The rows of one epoch that a stage has not applied.

    Attributes:
        upstream: Uid of the stage whose rows they are, or came from.
        output: Which output of that stage.
        now: That epoch's processing time.
        arriving: The watermark that the stage upstream handed on with it, microseconds since 1970 UTC.
        layers: Files of rows; those of one layer in any order, but before those of the next.
        schema: Their columns; None: no rows.
        begun: The stage has applied a part, and these are rows as its function sees them; else as the stage upstream
            handed them on.
        closed: The stage upstream has handed on all of them.
        lookups: By stage, the version of its table that the plan of that epoch has.
    """

    epoch: CheckpointId
    upstream: str
    now: datetime
    arriving: int | None
    layers: tuple[tuple[Rows, ...], ...]
    schema: pa.Schema | None
    begun: bool = False
    closed: bool = True
    output: str = MAIN
    lookups: Mapping[str, Version] = field(default_factory=dict)

    @property
    def files(self) -> list[Rows]:
        return [file for layer in self.layers for file in layer]

    @property
    def rows(self) -> int:
        return _rows(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the record of a checkpoint, whose listing has the files by their paths."""
        return {
            "epoch": int(self.epoch),
            "upstream": self.upstream,
            "now": to_micros(self.now),
            "arriving": self.arriving,
            "layers": [[file.path for file in layer] for layer in self.layers],
            "schema": None if self.schema is None else schema_to_json(self.schema),
            "begun": self.begun,
            "closed": self.closed,
            **({} if self.output == MAIN else {"output": self.output}),
            **({"lookups": {uid: version.to_json() for uid, version in self.lookups.items()}} if self.lookups else {}),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], file_of: Callable[[str], Rows]) -> InFlightData:
        """Return the in-flight data that a checkpoint has recorded.

        Args:
            file_of: The file of a path.
        """
        return cls(
            CheckpointId(raw["epoch"]),
            raw["upstream"],
            from_micros(raw["now"]),
            raw["arriving"],
            tuple(tuple(file_of(path) for path in layer) for layer in raw["layers"]),
            None if raw["schema"] is None else schema_from_json(raw["schema"]),
            raw["begun"],
            raw["closed"],
            raw.get("output", MAIN),
            {uid: Version.from_json(version) for uid, version in raw.get("lookups", {}).items()},
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a stage in one epoch: of `first`, the layers `taken`. `left` of its layers and `behind` wait.

    Attributes:
        first: None if what comes first has not been handed on in full yet.
    """

    first: InFlightData | None
    taken: tuple[tuple[Rows, ...], ...] = ()
    left: tuple[tuple[Rows, ...], ...] = ()
    behind: tuple[InFlightData, ...] = ()

    @property
    def files(self) -> tuple[Rows, ...]:
        return tuple(file for layer in self.taken for file in layer)

    def leaving(self, paths: Collection[str]) -> Work:
        """Return this work with other layers taken: those without a file at one of these paths."""
        layers = (*self.taken, *self.left)
        stays = [any(file.path in paths for file in layer) for layer in layers]
        taken = tuple(layer for layer, waits in zip(layers, stays, strict=True) if not waits)
        left = tuple(layer for layer, waits in zip(layers, stays, strict=True) if waits)
        return replace(self, taken=taken, left=left)


def joined(waiting: Sequence[InFlightData], more: InFlightData | None) -> tuple[InFlightData, ...]:
    """Return the queue once the stage upstream has handed on `more`, None if nothing: the rest of its newest entry, or
    another epoch.

    Of epochs without rows in a row the last one stays: its clock and its watermark do what theirs would have done.
    """
    queue = list(waiting)
    if more is None:
        return tuple(queue)
    if queue and not queue[-1].closed:
        open_one = queue.pop()
        assert open_one.epoch == more.epoch, "a stage hands its epochs on one after the other"
        more = replace(more, layers=(*open_one.layers, *more.layers), schema=more.schema or open_one.schema)
    elif queue and not queue[-1].layers and not more.layers and more.closed:
        queue.pop()
    return (*queue, more)


def work(queue: Sequence[InFlightData], pace: int | None) -> Work:
    """Return the part of the queue that the stage applies next.

    Args:
        pace: How many rows the stage applied last time, if that is known. Of what it has begun it is given a part that
            is not much larger; or all, if it applied none, because a larger part may change that.
    """
    if not queue:
        return Work(None)
    first, behind = queue[0], tuple(queue[1:])
    if not first.closed:
        return Work(None, behind=tuple(queue))
    taken: list[tuple[Rows, ...]] = []
    for layer in first.layers:
        if first.begun and taken and pace != 0 and _rows(file for layer in taken for file in layer) >= 2 * (pace or 0):
            break
        taken.append(layer)
    return Work(first, tuple(taken), first.layers[len(taken) :], behind)


def rest(done: Work, acks: Iterable[Ack], columns: pa.Schema | None) -> InFlightData | None:
    """Return the rows of its epoch that the work has left, or None.

    Args:
        columns: Those that the stage's function sees, which its subtasks leave rows with.
    """
    assert done.first is not None
    rests = [ack.staged(REST) for ack in acks]
    deepest = max(map(len, rests), default=0)
    layers = tuple(tuple(rest[depth] for rest in rests if depth < len(rest)) for depth in range(deepest))
    layers += done.left
    return replace(done.first, layers=layers, schema=columns, begun=True) if layers else None


def _rows(files: Iterable[Rows]) -> int:
    return sum(file.rows or 0 for file in files)
