"""A source behind a connector: its parts are read and written as Parquet files before an epoch reads them.

    position -> connector.plan -> parts -> connector.read, in threads -> landed files -> Slice

A position is a dict, as the checkpoint's row has it: `at`, which the connector alone understands; `partitions`, where
the event time of each stands; and how much has been read so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.errors import ConfigurationError, InputError, TransientError, WeirError
from state_ops.logs import Logger
from state_ops.storage.transfers import together
from weir.definition.source import (
    Batch,
    Lag,
    Limits,
    Opening,
    Part,
    Planned,
    Position,
    Source,
    changed_kind,
)
from weir.sources import archive
from weir.sources.archive import ArchivedSlice, ArchivedSlices, Archives
from weir.sources.connector_errors import GuardedConnector, asking
from weir.sources.file_check import FileCheck
from weir.sources.landed_files import LandedFiles, LandingAttempt
from weir.sources.partition_times import PartitionTimes, merged, quiet
from weir.sources.positions import Arrivals
from weir.sources.reader import SourceReader, accepted, times_from_dict, times_to_dict
from weir.sources.slice_files import Gathered
from weir.sources.slices import ArchivedFile, BadRow, PartitionTime, Slice, SourceFile, left_out_again

if TYPE_CHECKING:
    from weir.settings.configuration import EpochSettings

log = Logger("weir.source")

_THREADS = 4
_PASSED = 3_600_000_000  # microseconds
_EVERYTHING = Limits(1 << 31, 1 << 62, 1 << 62)
_IN_SIGHT = Limits(256, 1 << 62, 1 << 62)  # a look need not count what has no end
_ONE = Limits(1, 1, 1)
_PREVIEWED = Limits(4, 1_000, 16 << 20)


class ConnectorReader(SourceReader):
    """One source with the connector that its definition opens; long because it answers all that a reader is asked.

    Args:
        opening: What the definition is opened with; elsewhere, where landed files alone are read, None.
        upto: Asked at each plan for the position that must not be passed; None: there is none.
        archives: Asked once for what is archived.
    """

    landed: LandedFiles
    unit, piece = "row", "part"

    def __init__(
        self,
        source: Source,
        opening: Callable[[], Opening] | None,
        landed: LandedFiles,
        upto: Callable[[], Position | None] | None = None,
        archives: Archives | None = None,
    ) -> None:
        super().__init__(source, landed)
        self._opening, self._upto = opening, upto
        self._times = PartitionTimes.of(source)
        self._archived = ArchivedSlices(source.name, archives if source.archive else None, landed.storage)
        self._connector: GuardedConnector | None = None
        self._opens = threading.Lock()
        self._begin: Position | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without secrets: elsewhere it reads files that were landed here.
        return ConnectorReader, (self.source, None, self.landed)

    @property
    def connector(self) -> GuardedConnector:
        """Opened by the first who asks, in whatever thread."""
        with self._opens:
            if self._connector is None:
                assert self._opening is not None, "it is opened where slices are planned"
                with asking(self.location):
                    self._connector = GuardedConnector(self.source.open(self._opening()), self.location)
            return self._connector

    @property
    def location(self) -> str:
        return f"{self.source.kind} {self.source.name}"

    def exists(self) -> bool:
        return True

    def uri(self, file: SourceFile) -> str:
        if self._opening is None or file.part is None:
            return f"{self.location}: {file.name}"
        return self.connector.where(file.part)

    def title(self, file: SourceFile) -> str:
        if self._opening is None or file.part is None:
            return file.name
        return self.connector.title(file.part)

    def places(self, file: SourceFile) -> Sequence[str | None]:
        if self._opening is None or file.part is None:
            return ()
        return self.connector.places(file.part, file.rows)

    def _at(self, position: Position | None) -> Position:
        """Return the position at which the connector goes on.

        The answer of `start` is found once, since "latest" must not move on.
        """
        position = self._checked(position)
        if position is not None:
            at: Position = position["at"]
            return at
        if self._begin is None:
            start = self.source.start
            self._begin = self.connector.begin(dict(start) if isinstance(start, tuple) else start)
        return self._begin

    def _bound(self) -> Position | None:
        """Return the position that must not be passed; None: there is none."""
        upto = self._checked(self._upto()) if self._upto is not None else None
        return None if upto is None else upto["at"]

    def look(self, position: Position | None) -> Arrivals:
        return self._looked(position, peeks=not self._was_long_ago(position))

    def check(self, position: Position | None) -> Arrivals:
        return self._looked(position, peeks=False)

    def _looked(self, position: Position | None, *, peeks: bool) -> Arrivals:
        """Return the arrivals. `peeks` leaves out parts that turn out to have no row; a run reads them too."""
        at, upto = self._at(position), self._bound()
        if upto is None or self._archived.lead(at, upto):
            parts, planned = self._ahead(at, upto, _IN_SIGHT)
        else:
            planned = self.connector.plan(at, _IN_SIGHT, upto)
            parts = list(planned.parts)
        is_empty = peeks and bool(parts) and all(map(self.connector.is_empty, parts))
        fresh = [] if is_empty else [_waiting(part) for part in parts]
        if not fresh and position is not None and self._would_move(position):
            fresh = [SourceFile("an idle partition lets event time go on", 0, 0)]
        elif not fresh and planned.passes:
            fresh = [SourceFile("what was passed without a row is recorded", 0, 0)]
        return Arrivals(tuple(fresh), unit=self.unit)

    def _was_long_ago(self, position: Position | None) -> bool:
        """Return whether the source's end was reached so long ago that the position is to be recorded again.

        Parts without a row may be passed. If the input behind an old position expired, nobody could tell any more that
        it was empty.
        """
        if position is None:
            return False
        since = [of.quiet_since for of in _times(position).values() if of.quiet_since is not None]
        return not since or time.time_ns() // 1000 - max(since) > _PASSED

    def lag(self, position: Position | None) -> Lag:
        return self.connector.lag(self._at(position))

    def plan(
        self, position: Position | None, limits: EpochSettings, expected: pa.Schema | None, now: int | None = None
    ) -> Slice:
        now = time.time_ns() // 1000 if now is None else now
        bounds = Limits(limits.max_files, limits.max_rows, limits.max_bytes)
        return self._slice(position, bounds, expected, now)

    def preview(self, position: Position | None, _: EpochSettings, expected: pa.Schema | None) -> Slice:
        if not self.source.replayable:  # reading them would take them from the next epoch
            return Slice((), False, None, expected)
        with self.landed.elsewhere() as landed:
            reader = ConnectorReader(self.source, self._opening, landed, self._upto)
            reader._connector = self.connector
            return reader._slice(position, _PREVIEWED, expected, time.time_ns() // 1000)

    def _slice(self, position: Position | None, limits: Limits, expected: pa.Schema | None, now: int) -> Slice:
        with self.landed.attempt() as attempt:
            planned = self._planned(attempt, position, limits, expected, now)
            attempt.kept.update(attempt.written)
            return planned

    def _planned(
        self, attempt: LandingAttempt, position: Position | None, limits: Limits, expected: pa.Schema | None, now: int
    ) -> Slice:
        upto = self._bound()
        before = _times(position)
        begin = self._at(position)
        kept = self._slice_before(begin, upto)
        if kept is not None:
            planned = kept.planned
            landed, archived = self._taken(attempt, kept)
            gathered = self._gathered(landed, expected)
        else:
            planned = self.connector.plan(begin, limits, upto, self._times.too_far_ahead(before, now))
            for lost in planned.lost:
                log.warning("a part of the source is lost", source=self.source.name, where=lost.where, what=lost.what)
            gathered, archived = self._landed(attempt, planned.parts, expected, now)
            if self.source.archive and planned.position != begin:  # else there is nothing to go on from under it
                archived = (_noted(attempt, planned, gathered.files, gathered.bad_rows), *archived)
        return self._with_times(
            Slice(
                tuple(gathered.files),
                planned.limited,
                None,
                gathered.schema,
                unread=tuple(gathered.unread),
                bad_rows=tuple(gathered.bad_rows),
                position=planned.position,
                partitions=quiet(before, planned, now),
                now=now,
                lost=planned.lost,
                begin=begin,
                archived=archived,
            ),
            gathered.newest,
        )

    def plan_again(
        self, recorded: Mapping[str, Any], expected: pa.Schema | None, position: Position | None = None
    ) -> Slice:
        parts = [
            Part(file["name"], file["part"]["partition"], file["part"]["place"], file["rows"])
            for file in recorded["files"]
        ]
        with self.landed.attempt() as attempt:
            kept = self._archived.at(self._at(position)) if position is not None else None
            if kept is not None and [part.name for part in kept.planned.parts] == [part.name for part in parts]:
                gathered = self._gathered(self._taken(attempt, kept)[0], expected)
            elif self.source.replayable or not parts:
                gathered, _ = self._landed(attempt, parts, expected, recorded.get("now"))
            else:
                raise InputError(
                    "What was read cannot be read again: the source gives each row once.",
                    where=self.location,
                    next="archive=True of the source keeps what it gives.",
                )
            attempt.kept.update(attempt.written)
        for file, was in zip(gathered.files, recorded["files"], strict=True):
            if file.rows != was["rows"]:
                raise InputError(
                    f"{file.name} had {was['rows']} rows when it was read, and has {file.rows} now.",
                    where=self.uri(file),
                    next="What was read cannot be read again as it was; a source that changes needs archive=True.",
                )
        return Slice(
            tuple(gathered.files), recorded.get("limited", False), recorded.get("newest"), gathered.schema,
            left_out_again(recorded), bad_rows=tuple(gathered.bad_rows),
        )  # fmt: skip

    def _landed(
        self, attempt: LandingAttempt, parts: Sequence[Part], expected: pa.Schema | None, now: int | None
    ) -> tuple[Gathered, tuple[ArchivedFile, ...]]:
        """Parts as Parquet files, and these as a checkpoint of an archived source names them. now: by which event times
        are too far ahead."""
        future = self.source.length("max_future")
        latest = now + future if future is not None and now is not None else None
        landed = together(partial(self._land, attempt, latest), parts, at_once=_THREADS)
        gathered = self._gathered([(file, bad_rows) for file, bad_rows, _ in landed], expected)
        if not self.source.archive:
            return gathered, ()
        return gathered, tuple(
            ArchivedFile(attempt.files.path(file.stored), file.size, digest, gathered.opened[number].rows)
            for number, (file, _, digest) in enumerate(landed)
        )

    def _gathered(self, landed: Sequence[tuple[SourceFile, list[BadRow]]], expected: pa.Schema | None) -> Gathered:
        gathered = Gathered(self.source, expected)
        for file, bad_rows in landed:
            with self._about(file):
                kept = accepted(self, bad_rows, file)
                opened = FileCheck.opened(self.source, self.directory_of(file), file, self.uri(file))
                gathered.add(opened, file.size, kept)
        return gathered

    def _land(
        self, attempt: LandingAttempt, latest: int | None, part: Part, cancelled: Event
    ) -> tuple[SourceFile, list[BadRow], str]:
        connector, where = self.connector, self.connector.where(part)
        batches = _until(cancelled, connector.read(part), where)
        landed = attempt.land(batches, self.source.event_time, latest, where)
        bad_rows = [BadRow(part.name, row.number, row.reason, row.raw) for row in landed.rejected]
        file = SourceFile(part.name, landed.size, 0, landed=landed.stored, landed_bytes=landed.size, part=part)
        return file, bad_rows, landed.digest

    # -- what is archived

    def _slice_before(self, begin: Position, upto: Position | None) -> ArchivedSlice | None:
        """Return the archived slice that begins at a position, unless it might pass one that must not be passed: of
        that an archive knows only whether its slices lead there."""
        if upto is not None and (begin == upto or not self._archived.lead(begin, upto)):
            return None
        return self._archived.at(begin)

    def _ahead(self, at: Position, end: Position | None, limits: Limits) -> tuple[list[Part], Planned]:
        """Return the parts behind a position, archived ones first, and the connector's plan behind those. end: not
        beyond."""
        parts: list[Part] = []
        while at != end and (kept := self._archived.at(at)) is not None:
            parts += kept.planned.parts
            at = kept.planned.position
        planned = self.connector.plan(at, limits, end) if at != end else Planned((), at)
        return [*parts, *planned.parts], planned

    def _taken(
        self, attempt: LandingAttempt, kept: ArchivedSlice
    ) -> tuple[list[tuple[SourceFile, list[BadRow]]], tuple[ArchivedFile, ...]]:
        """Return an archived slice's files in this storage, and as the checkpoint is to name them. A branch copies
        those of its pipeline."""
        if kept.is_here:
            return kept.landed, tuple(
                ArchivedFile(file.path, file.bytes, file.digest, file.rows, new=False) for file in kept.files
            )
        landed, named = [], []
        for (file, bad_rows), stored in zip(kept.landed, kept.files[1:], strict=True):
            name, digest = attempt.put(archive.read(kept.storage, stored), "parquet")
            landed.append((replace(file, landed=name), bad_rows))
            named.append(ArchivedFile(attempt.files.path(name), stored.bytes, digest, stored.rows))
        bad = [row for _, bad_rows in landed for row in bad_rows]
        return landed, (_noted(attempt, kept.planned, [file for file, _ in landed], bad), *named)

    def release(self, planned: Slice) -> None:
        if not self.source.archive:  # else the checkpoint names them
            super().release(planned)

    def _written(self, planned: Slice) -> set[str]:
        if self.source.archive:  # what was archived before is named by another checkpoint
            return {file.path for file in planned.archived if file.new}
        return super()._written(planned)

    def advance(self, position: Position | None, planned: Slice) -> dict[str, Any]:
        old: Position = position or {"rows": 0, "parts": 0}
        lost = old.get("lost", 0) + len(planned.lost)
        began = planned.begin if position is None else old.get("began")
        return {
            "kind": self.source.kind,
            "at": planned.position if planned.position is not None else old.get("at"),
            "newest": max([time for time in (old.get("newest"), planned.newest) if time is not None], default=None),
            "partitions": times_to_dict(merged(planned.partitions, planned.seen)) or old.get("partitions", {}),
            "rows": old["rows"] + planned.rows,
            "parts": old["parts"] + len(planned.files),
            **({"began": began} if began is not None else {}),
            **({"lost": lost} if lost else {}),
        }

    def beginning(self, position: Position | None) -> dict[str, Any] | None:
        if position is None:
            return None
        at = position.get("began")
        if at is None or changed_kind(self.source, position) is not None:
            raise ConfigurationError(
                f"Nobody knows any more where {self.location} began to be read.",
                where=f"source {self.source.name}",
                next="It was read by an earlier release first, or by another kind of source, or sought before it was "
                "read. Go back to a checkpoint, or begin anew under another name.",
            )
        nothing: dict[str, Any] = {"newest": None, "partitions": {}, "rows": 0, "parts": 0}
        return {"kind": self.source.kind, "at": at, "began": at, **nothing}

    def verify(self, planned: Slice) -> None:
        if self.source.archive or not self.source.replayable:  # what was read is kept; or is there no more anyway
            return
        self.connector.verify([file.part for file in planned.files if file.part is not None])

    def again(self, then: Position | None, now: Position | None) -> tuple[list[SourceFile], list[str]]:
        if now is None:
            return [], []
        at, end, waiting, lost = self._at(then), self._at(now), list[SourceFile](), list[str]()
        if not (self.source.replayable or self.source.archive) and at != end:
            return [], [f"{self.location} cannot be read again"]
        try:
            while at != end:
                parts, planned = self._ahead(at, end, _EVERYTHING)
                waiting += map(_waiting, parts)
                lost += [f"{of.where}: {of.what}" for of in planned.lost]
                at = planned.position
                if not planned.limited:
                    break
        except InputError as error:  # lost, or no more what it was
            lost.append(error.what.rstrip("."))
        return waiting, lost

    def changed(self, then: Position | None, now: Position | None) -> dict[str, SourceFile | None]:
        return dict.fromkeys(self.again(then, now)[1])

    def beyond(self, position: Position | None, other: Position | None) -> str | None:
        return next((file.name for file in self.again(position, other)[0]), None)

    def described(self, position: Position) -> dict[str, Any]:
        lost = {"losses": position["lost"]} if "lost" in position else {}
        return {"rows read": position["rows"], "partitions": len(position.get("partitions", {})), **lost}

    def close(self) -> None:
        connector, self._connector = self._connector, None
        try:
            if connector is not None:
                connector.close()
        except WeirError as error:
            log.warning("a source's connections were not closed", source=self.source.name, error=error.what)

    def sought(self, position: Position | None, to: str | datetime | Position) -> dict[str, Any]:
        old: Position = {"kind": self.source.kind, "newest": None, "rows": 0, "parts": 0}
        if position is not None:  # event time goes on, also from another kind of source
            old = position if changed_kind(self.source, position) is None else {**old, "newest": position.get("newest")}
        at = self.connector.begin(to)
        self.connector.plan(at, _ONE)  # nothing is committed that cannot be read on from
        return {**old, "at": at, "partitions": {}}

    def committed(self, position: Position) -> None:
        try:
            self.connector.committed(position["at"])
        except WeirError as error:  # the checkpoint stands, and nothing is read back
            log.warning("a source was not told of a checkpoint", source=self.source.name, error=error.what)

    # -- event time by partition

    def _with_times(self, planned: Slice, newest: Mapping[str, int]) -> Slice:
        """Return the slice with the event time of the source: the least of its partitions that are not idle."""
        if self.source.event_time is None or planned.now is None:
            return planned
        partitions = merged(planned.partitions, newest)
        return replace(planned, seen=newest, newest=self._times.newest(partitions, planned.now))

    def _would_move(self, position: Position) -> bool:
        """Return whether event time goes on without a row, since a partition has become idle."""
        if self.source.event_time is None:
            return False
        past, newest = position.get("newest"), self._times.newest(_times(position), time.time_ns() // 1000)
        return newest is not None and (past is None or newest > past)


def _noted(
    attempt: LandingAttempt, planned: Planned, files: Sequence[SourceFile], bad_rows: Sequence[BadRow]
) -> ArchivedFile:
    """Return the note of what an archived slice is."""
    data = archive.note(planned, files, bad_rows)
    stored, digest = attempt.put(data, "json")
    return ArchivedFile(attempt.files.path(stored), len(data), digest, None)


def _until(cancelled: Event, batches: Iterator[Batch], where: str) -> Iterator[Batch]:
    """Batches as long as no other part of the slice has failed."""
    for batch in batches:
        yield batch
        if cancelled.is_set():
            raise TransientError("Another part of the slice could not be read.", where=where, next="Run again.")


def _waiting(part: Part) -> SourceFile:
    return SourceFile(part.name, part.bytes or 0, 0, part.rows or 0)


def _times(position: Position | None) -> dict[str, PartitionTime]:
    return times_from_dict((position or {}).get("partitions", {}))
