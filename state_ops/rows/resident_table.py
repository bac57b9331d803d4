"""Resident tables: all rows of a keyed state as one file beside its local snapshot, for states that fit a budget.

Spark gives a subtask to any idle worker, so what one process keeps in memory is warm only by luck. A file that is
mapped serves whichever process comes next, on this host; elsewhere, and after a restore, there is none, and nothing
depends on it.

Why it is safe: it lies in the attempt's own directory, which `snapshot.working_copy` opens only if the checkpoint's row
names that very attempt; it is written before the attempt's manifest, renamed into place whole, never changed, and
carries a digest of its bytes, which is checked whenever it is mapped.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import xxhash

from state_ops.rows.hash_table import HashedTable

SCAN_PER_GET = 4  # entries that a scan passes in the time of one get, a table for the epochs to come included
_FORMAT = 1
_HASH = "__weir_hash"
_WORTH = (
    16  # a table pays if an epoch touches at least one row in so many: saving a row takes so much less than getting one
)


@dataclass(frozen=True, slots=True)
class Residence:
    """The places that resident tables come from and go to.

    Attributes:
        source: The base's local directory, None if it has none here.
        target: This attempt's.
        most_bytes: Above it no table is kept.
        groups: The subtask's key groups.
        fresh: The state is empty, so that an empty table is all of it.
    """

    source: Path | None
    target: Path
    most_bytes: int
    groups: range
    fresh: bool = False

    def load(self, name: str, shape: str, like: pl.DataFrame, keys: tuple[str, ...]) -> HashedTable | None:
        """Return the table that was saved under `name`, None if there is none to be trusted.

        Args:
            shape: What must not have changed since (the ids of its schema).
            like: Its columns.
        """
        if self.fresh:
            return HashedTable.empty(like, keys) if self.most_bytes else None
        if self.source is None:
            return None
        try:
            note = json.loads(_note(self.source, name).read_bytes())
            if note["format"] != _FORMAT or note["shape"] != shape:
                return None
            with pa.memory_map(str(_table(self.source, name))) as file:
                if xxhash.xxh3_128_hexdigest(memoryview(file.read_buffer())) != note["digest"]:
                    return None
                file.seek(0)
                table = pa.ipc.open_file(file).read_all()
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None
        rows: pl.DataFrame = pl.from_arrow(table)  # type: ignore[assignment]
        if rows.drop(_HASH).schema != like.schema:  # another release of Polars may name types differently
            return None
        return HashedTable(rows[_HASH].to_numpy(), rows.drop(_HASH), keys)

    def save(self, name: str, shape: str, table: HashedTable, touched: int) -> None:
        """Leave the table for the next epoch, unless it is too large or this epoch touched too little of it."""
        if touched * _WORTH < len(table) or table.rows.estimated_size() > self.most_bytes:
            return
        path = _table(self.target, name)
        try:
            rows = table.rows.with_columns(pl.Series(_HASH, table.hashes))
            rows.rechunk().write_ipc(path, compression="uncompressed")
            with pa.memory_map(str(path)) as file:
                digest = xxhash.xxh3_128_hexdigest(memoryview(file.read_buffer()))
            staging = path.with_suffix(".tmp")
            staging.write_text(json.dumps({"format": _FORMAT, "shape": shape, "digest": digest}))
            staging.rename(_note(self.target, name))
        except OSError:  # a full disk, say: the next epoch does without, and the snapshot needs the room
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _table(directory: Path, name: str) -> Path:
    return directory / f"resident-{name}.arrow"


def _note(directory: Path, name: str) -> Path:
    return directory / f"resident-{name}.json"
