"""Parquet files that arrive in a directory: plan a slice, watch that nobody changes it, report what arrives too late.

landing      the directory: what is there
positions    how far it has been read, and what has arrived since
file_check   whether a file can be read as the next one
directory_watch  what is amiss with the directory
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.arrow.frames import wider_type
from state_ops.counts import counted
from state_ops.errors import InputError, VanishedError
from state_ops.logs import Logger
from weir.connectors.formats import looks
from weir.definition import Source
from weir.definition.source import ADD, Lag
from weir.sources import positions
from weir.sources.directory_watch import DirectoryWatch
from weir.sources.file_check import FileCheck
from weir.sources.landed_files import MOST_REJECTED_BYTES, LandedFiles, LandingAttempt, size_of
from weir.sources.parquet import unfit_rows
from weir.sources.positions import Arrivals, Position
from weir.sources.reader import SourceReader, accepted
from weir.sources.slice_files import Gathered
from weir.sources.slices import BadRow, SetAside, Slice, SourceFile, left_out_again
from weir.sources.source_directory import LandingDirectory

if TYPE_CHECKING:
    from weir.settings.configuration import EpochSettings, S3Settings

log = Logger("weir.source")


def _stored_columns(schema: pa.Schema | None, file: SourceFile) -> pa.Schema | None:
    """Return the columns of a slice without those that stand in the file's directories."""
    partitions = dict(file.partitions)
    return schema and pa.schema([field for field in schema if field.name not in partitions])


@dataclass(frozen=True, slots=True)
class _Left:
    """A file that was landed, and for which the slice had no room. bad_rows: those of it that could not be decoded."""

    rows: SourceFile
    bad_rows: tuple[BadRow, ...]

    def is_of(self, file: SourceFile) -> bool:
        return (self.rows.name, self.rows.size, self.rows.mtime_ns) == (file.name, file.size, file.mtime_ns)


class FilesReader(SourceReader):
    """One source whose rows lie in files, with their pattern resolved.

    Args:
        source: Whose capabilities say the files.
        pattern: An absolute directory or URI, then a file name pattern.
        s3: How s3:// is reached.
        only: Asked at each listing for what says which names may be read. None: all.
        landed: Where files that are no Parquet are written as such.
    """

    def __init__(
        self,
        source: Source,
        pattern: str,
        s3: S3Settings | None = None,
        only: Callable[[], Callable[[str], bool]] | None = None,
        landed: LandedFiles | None = None,
    ) -> None:
        super().__init__(source, landed)
        assert source.capabilities.files is not None, "a connector has its rows otherwise"
        self.files = source.capabilities.files
        self.pattern, self._s3, self._only = pattern, s3, only
        self._left: _Left | None = None
        self.landing = LandingDirectory(pattern, f"source {source.name}", s3)
        self.directory = self.landing.directory
        self._watch = DirectoryWatch(source, self.files.below_floor, self.landing, self._first_time)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without secrets, as S3Settings name them, and without `only`: elsewhere it reads files that were planned here.
        return FilesReader, (self.source, self.pattern, self._s3, None, self.landed)

    @property
    def location(self) -> str:
        return self.directory

    def exists(self) -> bool:
        return self.landing.exists()

    def uri(self, file: SourceFile) -> str:
        return f"{self.directory}/{file.name}"

    def directory_of(self, file: SourceFile) -> LandingDirectory:
        return self.landing if file.landed is None else super().directory_of(file)

    def check(self, position: Position | None) -> Arrivals:
        """Return the arrivals if reading may go on from `position`.

        Call it when a run begins and whenever it looks for input.

        `look` finds nothing amiss, so that one can always look. Both list the directory once.

        Raises:
            InputError: Files were read from a directory that is gone or from another one, or, by policy, files arrived
                below the floor.
        """
        self._watch.check(self._checked(position))
        arrived = self.look(position)
        if position and position["floor"] is not None:
            message = positions.arrived_below(position, arrived.below, self.directory)
            if message is not None:
                self._watch.below(position, message)
        return arrived

    def say_again(self, arrived: Arrivals) -> None:
        """Warn of the files that were delivered again and are not read, once for each delivery."""
        self._watch.again(arrived)

    def look(self, position: Position | None) -> Arrivals:
        """Return the arrivals, which are none without a directory. It takes one listing, and opens no file."""
        allowed = self._only() if self._only is not None else None
        return positions.arrivals(self._checked(position), self.landing.files(), allowed)

    def lag(self, position: Position | None) -> Lag:
        fresh = self.look(position).fresh
        newest = max((file.mtime_ns // 1000 for file in fresh), default=None)
        return Lag(bytes=sum(file.size for file in fresh), newest=newest)

    def plan(
        self, position: Position | None, limits: EpochSettings, expected: pa.Schema | None, now: int | None = None
    ) -> Slice:
        """Fresh files in name order up to a limit; opens their footers. A file beyond a limit is not opened, so it can
        do no harm to the slice before it. The rest is as of every source."""
        return self._planned(
            self.check(position).fresh, limits, expected, time.time_ns() // 1000 if now is None else now
        )

    def preview(self, position: Position | None, limits: EpochSettings, expected: pa.Schema | None) -> Slice:
        if not self.source.decodes:
            return self.plan(position, limits, expected)
        assert self.landed is not None, "files that are decoded are landed"
        with self.landed.elsewhere() as landed:
            return FilesReader(self.source, self.pattern, self._s3, self._only, landed).plan(position, limits, expected)

    def plan_again(
        self,
        recorded: Mapping[str, Any],
        expected: pa.Schema | None,
        position: Position | None = None,  # noqa: ARG002 - files are found by their names
    ) -> Slice:
        """Return the slice of an epoch that was, as `Slice.to_dict` recorded it. Of rows that gates had set aside it
        knows which, and no more why. Raises InputError if a file is not what it was."""
        files = recorded["files"]
        there = {file.name: file for file in self.landing.stat([file["name"] for file in files])}
        for file in files:
            now = there.get(file["name"])
            if now is None or (now.size, now.mtime_ns) != (file["size"], file["mtime_ns"]):
                raise InputError(
                    f"The input file {file['name']} {'is gone' if now is None else 'has changed'} since it was read.",
                    where=f"{self.directory}/{file['name']}",
                    next="Keep input for as long as an epoch may have to be replayed.",
                )
        planned = self._planned([there[file["name"]] for file in files], None, expected, recorded.get("now"))
        unfit = recorded.get("unfit", {})
        if unfit:
            bad_rows = tuple(unfit_rows.again(self.landing.parquet, planned, unfit))
            planned = self.without(replace(planned, bad_rows=bad_rows), ())
        return replace(planned, limited=recorded.get("limited", False), left_out=left_out_again(recorded))

    def _planned(
        self,
        fresh: Sequence[SourceFile],
        limits: EpochSettings | None,
        expected: pa.Schema | None,
        now: int | None = None,
    ) -> Slice:
        """Return the first of these files, up to a limit.

        Args:
            limits: None takes all.
            now: By which event times are too far ahead; None: by nothing.
        """
        if not self.source.decodes:
            return self._gathered(fresh, limits, expected, now)
        assert self.landed is not None, "files that are decoded are landed"
        left, self._left = self._left, None
        with self.landed.attempt(*([left.rows.stored] if left is not None else [])) as attempt:
            planned = self._gathered(fresh, limits, expected, now, attempt, left)
            files = [*planned.files, *([self._left.rows] if self._left is not None else [])]
            attempt.kept.update(file.stored for file in files)
            return planned

    def _gathered(
        self,
        fresh: Sequence[SourceFile],
        limits: EpochSettings | None,
        expected: pa.Schema | None,
        now: int | None,
        attempt: LandingAttempt | None = None,
        left: _Left | None = None,
    ) -> Slice:
        future = self.source.length("max_future")
        gathered = Gathered(self.source, expected, None if now is None or future is None else now + future)
        set_aside: list[SetAside] = []
        limited, bad_bytes = False, 0
        for file in fresh:
            taken = len(gathered.opened) + len(set_aside)
            is_full = limits is not None and (taken >= limits.max_files or gathered.rows >= limits.max_rows)
            if taken and limits is not None and (is_full or gathered.size + file.size > limits.max_bytes):
                limited = True
                break
            try:
                with self._about(file):
                    with self._of_its_format(file):
                        rows, bad_rows = self._as_parquet(file, gathered, attempt, left)
                    opened = FileCheck.opened(self.source, self.directory_of(rows), rows, self.uri(file))
                    is_beyond = limits is not None and gathered.rows + opened.rows > limits.max_rows
                    is_beyond |= limits is not None and bad_bytes + size_of(bad_rows) > MOST_REJECTED_BYTES
                    if gathered.opened and is_beyond:
                        self._left = _Left(rows, bad_rows) if rows.landed is not None else None
                        limited = True
                        break
                    bad_rows = self._added(gathered, opened, file, bad_rows)
                    bad_bytes += size_of(bad_rows)
            except InputError as error:
                if limits is None or not self.sets_aside(file):
                    raise
                set_aside.append(self._set_aside(file, error))
        unread = gathered.unread
        new_columns = [name for name in unread if self._first_time("unread", name)]
        if new_columns:
            log.warning(
                f"columns that the first files did not have are not read: {', '.join(new_columns)}",
                source=self.source.name,
                file=unread[new_columns[0]],
            )
        planned = Slice(
            tuple(gathered.files),
            limited,
            None,
            gathered.schema,
            unread=tuple(unread),
            set_aside=tuple(set_aside),
            bad_rows=tuple(gathered.bad_rows),
            now=now if self.source.max_future is not None else None,
        )
        return self._with_times(planned, gathered.newest)

    def _added(
        self, gathered: Gathered, opened: FileCheck, file: SourceFile, bad_rows: tuple[BadRow, ...]
    ) -> tuple[BadRow, ...]:
        """Take a file into a slice; returns its rows that nobody gets to see: of a Parquet file those whose event times
        cannot be handed on, where the source sets them aside. Raises InputError."""
        try:
            gathered.add(opened, file.size, bad_rows)
        except InputError:
            column = self.source.event_time
            if self.source.decodes or self.source.on_bad != "quarantine" or column not in opened.columns.names:
                raise
            bad_rows = tuple(unfit_rows.of_file(self.landing.parquet, file, [str(column)], unfit_rows.MOST_ROWS))
            if not bad_rows:
                raise
            gathered.add(opened, file.size, bad_rows)
        return bad_rows

    def _as_parquet(
        self, file: SourceFile, gathered: Gathered, attempt: LandingAttempt | None, left: _Left | None
    ) -> tuple[SourceFile, tuple[BadRow, ...]]:
        """Return a file with its rows as Parquet, and the rows that could not be decoded. Raises InputError, also for
        such rows where the source does not set them aside."""
        if attempt is None or file.landed is not None:
            return file, ()
        landed_files = attempt.files
        if left is not None and left.is_of(file) and landed_files.storage.size(landed_files.path(left.rows.stored)):
            return left.rows, left.bad_rows
        from weir.connectors.formats.decoding import decode, infer

        files, where, adds = self.files, self.uri(file), self.source.evolve == ADD
        options, schema = dict(files.options), files.schema or _stored_columns(gathered.schema, file)
        if schema is None or (files.schema is None and adds):
            with self.landing.opened(file) as stream:
                there = infer(files.format, options, stream, where)
            schema = there if schema is None else _with_new(schema, there, file, where)
        attempt.room = MOST_REJECTED_BYTES  # a file alone: what comes behind it goes into the next slice
        with self.landing.opened(file) as stream:
            batches = decode(files.format, options, stream, schema, where, partial=adds, keeps_digits=not files.schema)
            landed = attempt.land(batches, self.source.event_time, gathered.latest, where)
        rows = replace(file, landed=landed.stored, landed_bytes=landed.size)
        bad_rows = [BadRow(file.name, row.number, row.reason, row.raw) for row in landed.rejected]
        return rows, accepted(self, bad_rows, file)

    @contextmanager
    def _of_its_format(self, file: SourceFile) -> Iterator[None]:
        """Raise an error about a file that is decoded, and looks like one of another format, as that."""
        try:
            yield
        except InputError as error:
            parquet = self.landing.parquet
            seems = parquet.other_format(file, self.files.format)
            if seems is None:
                raise
            format = f"{looks.FORMATS[self.files.format]} ({error.what.splitlines()[0].rstrip('.')})"
            raise parquet.of_other_format(file, format, seems) from error

    def sets_aside(self, file: SourceFile) -> bool:
        """Return whether a file that cannot be read is left out.

        It is if the source wants that, and the file is as it was seen. One that is still being written, or has
        vanished, may be read yet.
        """
        return self.source.on_bad == "quarantine" and self.are_as_read({file.name: (file.size, file.mtime_ns)})

    def _set_aside(self, file: SourceFile, error: InputError) -> SetAside:
        reason = error.what.splitlines()[0]
        log.warning("an input file is set aside", source=self.source.name, file=self.uri(file), reason=reason)
        return SetAside(file, reason)

    def without_bad(
        self,
        planned: Slice,
        file: SourceFile,
        error: InputError,
        expected: pa.Schema | None,
        read: Collection[str] | None,
    ) -> Slice:
        asked = read if read is None or self.source.event_time is None else {*read, self.source.event_time}
        bad_rows = unfit_rows.of_slice(self.landing.parquet, planned, file, asked) if file.landed is None else []
        if bad_rows:
            first = bad_rows[0]
            log.warning(
                "rows of input files are set aside", source=self.source.name, rows=len(bad_rows),
                file=f"{self.directory}/{first.file}", row=first.row, reason=first.reason,
            )  # fmt: skip
            return self.without(replace(planned, bad_rows=(*planned.bad_rows, *bad_rows)), ())
        rest = self._planned([other for other in planned.files if other.name != file.name], None, expected)
        kept = replace(
            rest,
            limited=planned.limited,
            now=planned.now,
            left_out=tuple(row for row in planned.left_out if row.file != file.name),
            bad_rows=tuple(row for row in planned.bad_rows if row.file != file.name),
            set_aside=(*planned.set_aside, self._set_aside(file, error)),
        )
        return self.without(kept, ()) if kept.without else kept

    def advance(self, position: Position | None, planned: Slice) -> dict[str, Any]:
        """Return the position that `positions.advanced` does."""
        return positions.advanced(position, self.landing.place, planned.files, planned.newest, planned.set_aside)

    def beyond(self, position: Position | None, other: Position | None) -> str | None:
        read = positions.has_read(self._checked(position))
        return next((name for name in (self._checked(other) or {}).get("seen", ()) if not read(name)), None)

    def as_read_by(self, position: dict[str, Any], other: Position | None) -> dict[str, Any]:
        return positions.as_read_by(position, other)

    def described(self, position: Position) -> dict[str, Any]:
        return {"files read": position["files"], "last file": position["last"] or "none"}

    def again(self, then: Position | None, now: Position | None) -> tuple[list[SourceFile], list[str]]:
        """Return the files read between two positions that are as they were, and the names of those that are not.

        Files that the later position remembers by number alone are named as that. It takes one listing.
        """
        between = positions.compared(self._checked(then), self._checked(now), self.landing.files())
        forgotten = (now["files"] if now else 0) - (then["files"] if then else 0) - len(between.read)
        older = [f"{counted(forgotten, 'older file')}, not remembered by name"] if forgotten > 0 else []
        return between.same, [*between.others, *older]

    def changed(self, then: Position | None, now: Position | None) -> dict[str, SourceFile | None]:
        """Return by name what is there now of files that were read between two positions and have changed since.

        None: the file is gone. Only names that the later position remembers are looked at.
        """
        return positions.compared(self._checked(then), self._checked(now), self.landing.files()).others

    def verify(self, planned: Slice) -> None:
        """Raise InputError if a file of the slice is gone or is not the file that was planned."""
        now = {file.name: file for file in self.landing.stat([file.name for file in planned.files])}
        for file in planned.files:
            there = now.get(file.name)
            with self._about(file):
                if there is None:
                    raise VanishedError(
                        "A file vanished while an epoch was reading it.",
                        where=self.uri(file),
                        next="Put it back, or let its producer write under temporary names and rename; the epoch was "
                        "declined.",
                    )
                if (there.size, there.mtime_ns) != (file.size, file.mtime_ns):
                    raise self.landing.parquet.changed(file)

    def are_as_read(self, files: Mapping[str, Sequence[int]]) -> bool:
        """Return whether files are as an epoch saw them.

        Args:
            files: By name, size in bytes and time of change in ns since 1970.
        """
        now = {file.name: [file.size, file.mtime_ns] for file in self.landing.stat(list(files))}
        return now == {name: list(figures) for name, figures in files.items()}


def _with_new(schema: pa.Schema, there: pa.Schema, file: SourceFile, where: str) -> pa.Schema:
    """Return the columns of earlier files that a file has, each in the wider of its two types where one is, and those
    that it has beside them. Raises InputError for a column in other capitals, and for one within which there is a new
    field."""
    from weir.connectors.formats.spelling import check_spelling

    if not there.names:  # it has no row, and nothing else that tells
        return schema
    check_spelling(schema.names, there.names, f"The input file {file.name}", where)
    own, before = set(there.names), set(schema.names)
    earlier = [field for field in schema if field.name in own]
    for field in earlier:
        if (path := _new_within(field.type, there.field(field.name).type, field.name)) is not None:
            raise InputError(
                f"The input file {file.name} has a field {path!r}, which the column {field.name!r} of earlier files "
                'lacks, and evolve="add" adds whole columns.',
                where=where,
                next="Declare the source's columns in schema=: this one with all of its fields, with those that are "
                "wanted, or as a map; or move the file away. Nothing of this epoch was applied.",
            )
    widened = [field.with_type(wider_type(field.type, there.field(field.name).type) or field.type) for field in earlier]
    return pa.schema([*widened, *(field for field in there if field.name not in before)])


def _new_within(type: pa.DataType, there: pa.DataType, path: str) -> str | None:
    """Return the path of the first field of a nested type that an earlier one of the same shape lacks; None: there is
    none. One in other capitals is left to who reads the rows."""
    if pa.types.is_struct(type) and pa.types.is_struct(there):
        names, known = [field.name for field in type], {field.name.casefold() for field in type}
        new = (f"{path}.{field.name}" for field in there if field.name.casefold() not in known)
        within = (
            _new_within(type.field(field.name).type, field.type, f"{path}.{field.name}")
            for field in there
            if field.name in names
        )
        return next(new, None) or next(filter(None, within), None)
    if type.num_fields == there.num_fields == 1 and type.id == there.id:  # lists, and maps, which are lists of entries
        return _new_within(type.field(0).type, there.field(0).type, path)
    return None
