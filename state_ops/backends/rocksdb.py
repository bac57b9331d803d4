"""State in RocksDB through rocksdict in raw mode: bytes in, bytes out, no pickle.

The write-ahead log is off: durability is the checkpoint, as in Flink. Compaction is universal (few, large merges late):
what a compaction rewrites must be uploaded again, and universal compaction rewrites least per changed byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rocksdict import (
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from state_ops.errors import DamageError, TransientError

_COMPACTION_WAIT_SECONDS = 30.0
_caches: dict[int, Cache] = {}


class RocksDBBackend:
    """One subtask's open database in `path` (created if empty).

    write_buffer_mb: memtable size; block_cache_mb: block cache, one for all databases of this process.
    """

    def __init__(self, path: Path, write_buffer_mb: int, block_cache_mb: int) -> None:
        self.path = path
        self.written = False
        try:
            self._db = Rdict(str(path), options=_options(write_buffer_mb, block_cache_mb))
        except Exception as error:  # rocksdict raises bare Exception for everything
            raise DamageError(
                f"RocksDB cannot open this state: {error}",
                where=str(path),
                next="Delete the local work directory: the state is fetched again from storage and verified.",
            ) from error
        write = WriteOptions()
        write.disable_wal = True  # type: ignore[method-assign, assignment]  # a property that the stubs call a method
        self._db.set_write_options(write)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            return self._db.get(list(keys))  # type: ignore[return-value]  # a list gives a list
        except Exception as error:
            raise self._unreadable(error) from error

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        batch = WriteBatch(raw_mode=True)
        for key in deletes:
            batch.delete(key)
        for key, value in puts:
            batch.put(key, value)
        if not batch.is_empty():
            try:
                self._db.write(batch)
            except Exception as error:
                raise TransientError(f"RocksDB could not write: {error}", where=str(self.path)) from error
            self.written = True

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        # A seek and a comparison per entry is cheaper for short ranges than fresh ReadOptions with an upper bound.
        entries = self._db.iter(ReadOptions())
        entries.seek(start)
        while entries.valid():
            key = entries.key()
            if key >= end:
                return
            yield key, entries.value()
            entries.next()
        try:
            entries.status()  # an iterator also becomes invalid at a block that it cannot read
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DamageError:
        return DamageError(
            f"RocksDB cannot read its state: {error}",
            where=str(self.path),
            next="Delete the local work directory: the state is fetched again from storage and verified.",
        )

    def snapshot(self, target: Path) -> None:
        """Flush, let due compactions finish, and hard-link the live files into `target` (which must not exist)."""
        try:
            self._db.flush(wait=True)
            self._settle()
            Checkpoint(self._db).create_checkpoint(str(target))
        except Exception as error:
            raise TransientError(f"RocksDB could not take its snapshot: {error}", where=str(self.path)) from error

    def _settle(self) -> None:
        # A compaction that closing the database cuts off is work thrown away, and would be due again next epoch.
        deadline = time.monotonic() + _COMPACTION_WAIT_SECONDS
        while time.monotonic() < deadline:
            due = self._db.property_int_value("rocksdb.compaction-pending") or 0
            running = self._db.property_int_value("rocksdb.num-running-compactions") or 0
            if not due and not running:
                return
            time.sleep(0.002)

    def close(self) -> None:
        self._db.close()


def _options(write_buffer_mb: int, block_cache_mb: int) -> Options:
    if block_cache_mb not in _caches:
        _caches[block_cache_mb] = Cache(block_cache_mb << 20)
    blocks = BlockBasedOptions()
    blocks.set_block_cache(_caches[block_cache_mb])
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(write_buffer_mb << 20)
    options.set_max_write_buffer_number(2)
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(8)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    options.set_max_open_files(256)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_paranoid_checks(True)
    return options
