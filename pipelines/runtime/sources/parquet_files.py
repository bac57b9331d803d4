"""Parquet files as they lie in a directory or bucket: footers, rows, and what is wrong with a file, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipelines.runtime.sources.slices import SourceFile
from state_ops.errors import InputError, TransientError, first_line

_TAIL = 1 << 16  # bytes; as much as Arrow itself reads at first, and most footers fit


class ParquetFiles:
    """path: of the directory, as the file system knows it; directory: as people read it.

    Everywhere: InputError names a file that is gone, damaged or not what was planned, TransientError one whose storage fails.
    """

    def __init__(self, fs: pafs.FileSystem, path: str, directory: str) -> None:
        self._fs, self._path, self._directory = fs, path, directory

    def uri(self, file: SourceFile) -> str:
        return f"{self._directory}/{file.name}"

    def footer(self, file: SourceFile) -> tuple[pq.FileMetaData, pa.Schema]:
        """A file's footer, and its columns as they are stored."""
        with self._reading(file):
            end = self._end(file)
        with self._parsing(file):
            footer = pq.read_metadata(pa.BufferReader(end))
            return footer, footer.schema.to_arrow_schema()

    @contextmanager
    def decoded(self, file: SourceFile) -> Iterator[pq.ParquetFile]:
        """A file to read from; its bytes are whole in memory."""
        # Read first and parse then: Arrow raises OSError for a damaged page as well as for broken storage.
        with self._reading(file), self._fs.open_input_file(f"{self._path}/{file.name}") as stream:
            data = stream.read_buffer()
        if data.size != file.size:
            raise self.changed(file)
        with self._parsing(file):
            yield pq.ParquetFile(
                pa.BufferReader(data), page_checksum_verification=True, coerce_int96_timestamp_unit="us"
            )

    def changed(self, file: SourceFile) -> InputError:
        """What to raise if a file is not the one that was planned."""
        return InputError(
            "A file changed while an epoch was reading it.",
            where=self.uri(file),
            next="Files must not change after they arrive: deliver corrections under a new name. The epoch was declined.",
        )

    @contextmanager
    def _reading(self, file: SourceFile) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise InputError(
                f"The input file {file.name} vanished before it was read.",
                where=self.uri(file),
                next="Put it back, or run again, which plans without it; nothing of this epoch was applied.",
            ) from error
        except OSError as error:
            raise TransientError(
                f"The input file {file.name} cannot be read now: {first_line(error)}",
                where=self.uri(file),
                next="Look at the storage and at who may read the file, and run again; nothing of this epoch was applied.",
            ) from error

    @contextmanager
    def _parsing(self, file: SourceFile) -> Iterator[None]:
        try:
            yield
        except pa.ArrowMemoryError as error:
            raise TransientError(
                f"There was no memory to read the input file {file.name}: {first_line(error)}",
                where=self.uri(file),
                next="Cut smaller slices (epoch.max_rows, epoch.max_bytes), or let Spark read them (spark.direct_read_mb: 0).",
            ) from error
        except (pa.ArrowException, OSError) as error:
            problem = "is empty" if file.size == 0 else "is not a readable Parquet file"
            raise InputError(
                f"The input file {file.name} {problem}.",
                where=f"{self.uri(file)} ({first_line(error)})",
                next=f"Repair it, or move it out of {self._directory}; nothing of this epoch was applied.",
            ) from error

    def _end(self, file: SourceFile) -> bytes:
        """The file's last bytes, of which a footer is all that Parquet asks for: data, footer, its length (4 bytes), magic (4)."""
        with self._fs.open_input_file(f"{self._path}/{file.name}") as stream:
            size = stream.size()
            end = stream.read_at(min(size, _TAIL), max(size - _TAIL, 0))
            needed = int.from_bytes(end[-8:-4], "little") + 8
            if end[-4:] == b"PAR1" and len(end) < needed <= size:
                end = stream.read_at(needed, size - needed)
        return end
