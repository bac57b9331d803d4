"""The files in which rows without Parquet files of their own are landed before an epoch reads them.

Each part is one file, below the pipeline's `landed/<source>/`, under a name that no other try has. Nothing but the
slice of an epoch in flight names it. The owner of the pipeline deletes it once that epoch has ended.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.errors import InputError
from state_ops.storage.instrumented_store import RequestCounts
from state_ops.storage.storage import Storage
from state_ops.value_text import literal
from weir.definition.source import MOST_REJECTED, Batch, Rejected
from weir.sources.slices import BadRow
from weir.sources.source_directory import LandingDirectory

if TYPE_CHECKING:
    from weir.settings.configuration import S3Settings

LANDED = "landed"
MOST_REJECTED_BYTES = 64 << 20  # of the bad rows of a slice, which are held in memory
_REJECTED_BYTES = 512  # of a bad row beside its texts
_ROW_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class LandedPart:
    """A part as Parquet.

    Attributes:
        stored: The name of its file.
        size: Of the file, in bytes.
        digest: Its sha256.
        rejected: The rows that are not in it.
    """

    stored: str
    size: int
    digest: str
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class LandedFiles:
    """The files of one source.

    Attributes:
        root: The pipeline's storage.
        source: The source's name.
        s3: How s3:// is reached.
        scratch: A local directory for files that are being written.
        request_counts: Where requests are counted; elsewhere nowhere.
    """

    root: str
    source: str
    s3: S3Settings | None
    scratch: Path
    request_counts: RequestCounts | None = field(default=None, repr=False, compare=False)

    @cached_property
    def directory(self) -> LandingDirectory:
        """The directory from which the files are read."""
        return LandingDirectory("*.parquet", f"source {self.source}", self.s3, f"{self.root}/{LANDED}/{self.source}")

    @cached_property
    def storage(self) -> Storage:
        return Storage(self.root, self.s3, self.request_counts)

    def __reduce__(self) -> tuple[object, ...]:
        return LandedFiles, (self.root, self.source, self.s3, self.scratch)

    def path(self, stored: str) -> str:
        """Below the pipeline's storage."""
        return f"{LANDED}/{self.source}/{stored}"

    @contextmanager
    def attempt(self, *earlier: str) -> Iterator[LandingAttempt]:
        """Yield one try to plan a slice. What is written within goes again unless it is kept in the end; all of it
        where the try fails. A failure to delete is no news: the next take-over removes what is left.

        Args:
            earlier: Names of files that an earlier try has left to this one.
        """
        attempt = LandingAttempt(self, list(earlier))
        try:
            yield attempt
        except BaseException:
            attempt.kept.clear()
            raise
        finally:
            for stored in {*attempt.written} - attempt.kept:
                with suppress(Exception):
                    self.storage.delete(self.path(stored))

    @contextmanager
    def elsewhere(self) -> Iterator[LandedFiles]:
        """Yield the source with its files in a temporary directory of this host, to look at rows that others own."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.scratch) as root:
            yield LandedFiles(root, self.source, None, self.scratch)


@dataclass(slots=True)
class LandingAttempt:
    """Files that are written for one slice; threads may share it.

    Attributes:
        written: Their names.
        kept: The names of those that stay.
        room: For how many more bytes of bad rows there is memory.
    """

    files: LandedFiles
    written: list[str]
    kept: set[str] = field(default_factory=set)
    room: int = MOST_REJECTED_BYTES
    _counting: Lock = field(default_factory=Lock, repr=False)

    def land(self, batches: Iterable[Batch], event_time: str | None, latest: int | None, where: str) -> LandedPart:
        """Write the rows of one part.

        Args:
            event_time: The source's column of that.
            latest: The latest event time in microseconds that a row may have; None: any.
            where: The part's place, for errors.

        Raises:
            InputError: Too many rows are bad, or the part has no columns.
        """
        stored, rejected = self._named("parquet"), list[Rejected]()
        self.files.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.files.scratch, suffix=".parquet") as local:
            writer: pq.ParquetWriter | None = None
            before = 0
            try:
                for batch in batches:
                    numbers = batch.numbers or partial(_counted, batch, before)
                    rows, late = _not_later(frames.canonical(batch.rows), event_time, latest, numbers)
                    before += batch.rows.num_rows + len(batch.rejected)
                    self._take_room([*batch.rejected, *late], where)
                    rejected += [*batch.rejected, *late]
                    if len(rejected) > MOST_REJECTED:
                        raise _too_many(where, rejected)
                    if writer is None:
                        writer = pq.ParquetWriter(local.name, rows.schema, compression="lz4", write_page_checksum=True)
                    writer.write_table(rows.cast(writer.schema), _ROW_GROUP)
            finally:
                if writer is not None:
                    writer.close()
            if writer is None:
                raise InputError(
                    "There is nothing in it that tells its columns.",
                    where=where,
                    next="Let it have a row or a header, or declare the source's schema=.",
                )
            size, digest = self.files.storage.put_file(Path(local.name), self.files.path(stored))
        return LandedPart(stored, size, digest, tuple(rejected))

    def put(self, data: bytes, ending: str) -> tuple[str, str]:
        """Write a file as it is; returns its name, and its sha256."""
        stored = self._named(ending)
        self.files.storage.put_bytes(self.files.path(stored), data)
        return stored, hashlib.sha256(data).hexdigest()

    def _take_room(self, rejected: Sequence[Rejected], where: str) -> None:
        with self._counting:
            self.room -= size_of(rejected)
            if self.room < 0:
                raise InputError(
                    f"So many rows of one slice cannot be decoded that they do not fit into "
                    f"{MOST_REJECTED_BYTES >> 20} MiB, the last one at {rejected[-1].number}: {rejected[-1].reason}",
                    where=where,
                    next="Correct the source's format or schema, or cut smaller slices (epoch.max_rows); nothing of "
                    "this epoch was applied.",
                )

    def _named(self, ending: str) -> str:
        self.written.append(stored := f"{uuid.uuid4().hex}.{ending}")
        return stored


def size_of(rejected: Iterable[Rejected | BadRow]) -> int:
    """Return the bytes that bad rows take in memory, about."""
    return sum(_REJECTED_BYTES + 4 * len(row.reason) + 4 * len(row.raw or "") for row in rejected)


def _not_later(
    rows: pa.Table, event_time: str | None, latest: int | None, numbers: Callable[[], Sequence[int]]
) -> tuple[pa.Table, list[Rejected]]:
    """Return the rows whose event time is not beyond the latest one, and what is said of the others. numbers: as of
    `Batch`."""
    if latest is None or event_time is None or event_time not in rows.column_names:
        return rows, []
    if not pa.types.is_timestamp(rows.schema.field(event_time).type):  # refused by name, once the file is looked at
        return rows, []
    is_later = pc.fill_null(pc.greater(rows.column(event_time).cast(pa.int64()), latest), False)
    if not pc.any(is_later).as_py():
        return rows, []
    places, given = pc.indices_nonzero(is_later).to_pylist(), numbers()
    shown = frames.python_rows(rows.filter(is_later))
    late = [
        Rejected(given[place], f"{event_time} lies too far ahead: {row[event_time]}", literal(row)[:4096])
        for place, row in zip(places, shown, strict=True)
    ]
    return rows.filter(pc.invert(is_later)), late


def _counted(batch: Batch, before: int) -> list[int]:
    """Return the numbers of a batch's rows in their part, where every row counts. before: the number of rows before
    these."""
    rejected = {row.number for row in batch.rejected}
    counted = (number for number in count(before + 1) if number not in rejected)
    return list(islice(counted, batch.rows.num_rows))


def _too_many(where: str, rejected: list[Rejected]) -> InputError:
    first = rejected[0]
    return InputError(
        f"More than {MOST_REJECTED} rows cannot be decoded, the first at {first.number}: {first.reason}",
        where=where,
        next="Correct the source's format or schema; nothing of this epoch was applied.",
    )
