"""A checkpoint's rows for a sink: the files in which they were staged, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage

_BATCH_ROWS = 50_000


class StagedRows:
    """They are what was committed: digests are checked as files are fetched.

    Args:
        files: Staged rows as the checkpoint lists them. Rows of one key are in one file, in the order in which its
            stage handed them out.
        scratch: A directory for the files that are being read, one at a time.
        checkpoint: Whose rows they are; None: of several.
        footers: Of files, by path, as far as they are known.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[StateFile],
        scratch: Path,
        checkpoint: Checkpoint | None = None,
        footers: Mapping[str, pq.FileMetaData] = MappingProxyType({}),
    ) -> None:
        self._storage, self._scratch, self.files = storage, scratch, files
        self.checkpoint, self.footers = checkpoint, footers
        self.since: datetime | None = checkpoint.triggered_at if checkpoint is not None else None
        self._files = sorted(files, key=lambda file: (file.operator, file.subtask, file.path))

    @property
    def count(self) -> int:
        return sum(file.rows or 0 for file in self._files)

    @cached_property
    def schema(self) -> pa.Schema | None:
        if not self._files:
            return None
        footer = self._storage.parquet_footer(self._files[0].path)
        return frames.canonical_schema(footer.schema.to_arrow_schema())

    def batches(self) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            with (
                self._storage.fetched(file.path, self._scratch, digest=file.digest or None) as local,
                pq.ParquetFile(local) as staged,
            ):
                for batch in staged.iter_batches(_BATCH_ROWS, use_threads=False):
                    yield from frames.canonical(pa.Table.from_batches([batch])).to_batches()
