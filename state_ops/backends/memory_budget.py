"""One budget of memory for all RocksDB databases that are open in a worker process.

What it is split into, of `memory_mb`; docs/adr/0011-memory-budget.md has the reasons and figures:

    3/4  one cache: blocks, and the index and filter partitions of all files, which compete for it by use;
         memtables are charged to it too, up to 2/3 of it, so what is being written pushes out what is only read
    1/8  what merges read ahead and write behind, for as many as may run at once
    1/8  handles of open files and what fragments

RocksDB's cache is not strict: blocks that a read holds at this moment may exceed it, a few at a time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rocksdict import BlockBasedIndexType, BlockBasedOptions, Cache, DBCompactionStyle, DBCompressionType, Options
from rocksdict import WriteBufferManager as MemtableLimit

from state_ops.backends.base import Compression

LEAST_MB = 16

_MIB = 1 << 20
_LEAST_MEMTABLE = 64 << 10  # bytes; RocksDB's own limit
_RUNS = 16  # that one merge reads at once: as many as the largest trigger in `shards`, and the base
_FILES_PER_MB, _MOST_FILES, _LEAST_FILES = 8, 512, 32
_PARTITION_BYTES = 4096
_WINDOW_BITS = -14  # RocksDB's own default; zlib's alone
_ZSTD_LEVEL = 1


@dataclass
class Budget:
    """The one of this process.

    Attributes:
        files: How many more files its databases may keep open between them.
    """

    memory_mb: int
    cache: Cache
    memtables: MemtableLimit
    files: int

    @property
    def memtable_bytes(self) -> int:
        return self.memory_mb * _MIB // 2

    @property
    def jobs(self) -> int:
        """Flushes and merges at a time, in all databases of the process."""
        return max(2, min(8, self.memory_mb // 16))

    @property
    def readahead(self) -> int:
        """Bytes that a merge reads ahead in each of its files."""
        return max(64 << 10, min(2 << 20, self.memory_mb * _MIB // 8 // self.jobs // _RUNS))


_current: Budget | None = None
_lock = threading.Lock()


def budget(memory_mb: int) -> Budget:
    """Return this process's budget.

    If the budget has another size, it is resized, with everything that is open.
    """
    global _current
    memory_mb = max(memory_mb, LEAST_MB)
    with _lock:
        if _current is None:
            cache = Cache(_cache_bytes(memory_mb))
            # Stalling writers at the limit could wait for ever: for a database of this very thread to flush.
            limit = MemtableLimit.new_write_buffer_manager_with_cache(memory_mb * _MIB // 2, False, cache)
            _current = Budget(memory_mb, cache, limit, _files(memory_mb))
        elif _current.memory_mb != memory_mb:
            _current.files += _files(memory_mb) - _files(_current.memory_mb)
            _current.memory_mb = memory_mb
            _current.cache.set_capacity(_cache_bytes(memory_mb))
            _current.memtables.set_buffer_size(_current.memtable_bytes)
        return _current


def lease_files(budget: Budget) -> int:
    """Return how many files one more database may keep open, and take them from the budget.

    It gets half of what is left, so that the next database finds some too.
    """
    with _lock:
        share = max(_LEAST_FILES, budget.files // 2)
        budget.files -= share
        return share


def return_files(budget: Budget, share: int) -> None:
    with _lock:
        budget.files += share


def options(budget: Budget, families: int, files: int, compression: Compression) -> Options:
    """Return a column family's options, of a database with so many families and open files.

    RocksDB holds up to two memtables of each family, so a single database stays within 7/8 of the memtables' share by
    itself, however fast it is written. The common limit only asks for flushes; where several databases together exceed
    it all the same, each makes room when it is written.

    Args:
        compression: Of the files to come, "lz4" or "zstd"; those that there are stay as they are and are read all the
            same.
    """
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(_blocks(budget))
    options.set_write_buffer_manager(budget.memtables)
    options.set_write_buffer_size(max(_LEAST_MEMTABLE, budget.memtable_bytes * 7 // 16 // families))
    options.set_max_write_buffer_number(2)
    options.set_compaction_style(DBCompactionStyle.universal())
    if compression == "zstd":
        options.set_compression_type(DBCompressionType.zstd())
        options.set_compression_options(_WINDOW_BITS, _ZSTD_LEVEL, 0, 0)
    else:
        options.set_compression_type(DBCompressionType.lz4())
    options.set_max_background_jobs(budget.jobs)  # a quarter of them flush
    options.set_compaction_readahead_size(budget.readahead)
    options.set_writable_file_max_buffer_size(256 << 10)
    options.set_max_open_files(files)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_paranoid_checks(True)
    return options


def _blocks(budget: Budget) -> BlockBasedOptions:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(budget.cache)
    # Sparse gets spend most of their time on blocks that are not cached: four times larger ones cost half as much
    # there.
    blocks.set_block_size(16 << 10)
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    # In partitions: a large file's whole filter is larger than one of the cache's own parts, so it would be read for
    # every get, and building it would take eight bytes for every key of the file.
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_metadata_block_size(_PARTITION_BYTES)
    return blocks


def _cache_bytes(memory_mb: int) -> int:
    return memory_mb * _MIB * 3 // 4


def _files(memory_mb: int) -> int:
    return min(_MOST_FILES, memory_mb * _FILES_PER_MB)
