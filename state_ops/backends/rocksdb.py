"""State in RocksDB through rocksdict in raw mode: bytes in, bytes out, no pickle.

The write-ahead log is off: durability is the checkpoint, as in Flink. Compaction is universal (few, large merges late):
what a compaction rewrites must be uploaded again, and universal compaction rewrites least per changed byte. So that no
epoch
rewrites everything, a state above a size is cut into shards, column families that hold a range of keys each: `shards`
decides when each is merged, this module does it.
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from rocksdict import (
    Checkpoint,
    ColumnFamily,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from state_ops.backends import compaction
from state_ops.backends import memory_budget as memory
from state_ops.backends.base import BEYOND, BackendOptions, Compression, SortedRun
from state_ops.backends.key_ranges import by_range, slices
from state_ops.backends.run_files import RunFiles
from state_ops.errors import DamageError, TransientError, WeirError
from state_ops.storage import disks

SHARD_MB = 64

_COMPACTION_WAIT_SECONDS = 30.0
_QUIET_POLLS = 5
_COPY_BYTES = 4 << 20
_FILE_ENTRIES = 10_000  # of a run and a shard, from which on a file written here costs less than memtable and flush
_FILE_BYTES = 4 << 20  # likewise, of values
# Not part of the state: RocksDB's own logs, its empty write-ahead log, options (`budget` gives them), rocksdict's
# notes.
_STATE_FILES = ("MANIFEST-", "CURRENT")


class RocksDBBackend:
    """One subtask's open database in `path` (created if empty).

    Args:
        memory_mb: Budget of this process, shared by all its databases.
        shard_mb: A state larger than this is cut into shards when it is written.
        compression: "lz4" or "zstd", of the files that it writes.
    """

    def __init__(
        self, path: Path, memory_mb: int, shard_mb: float = SHARD_MB, compression: Compression = "lz4"
    ) -> None:
        self.path = path
        self._compression = compression
        self.written = False
        self._budget = memory.budget(memory_mb)
        self._files = memory.lease_files(self._budget)
        self._threshold = int(shard_mb * (1 << 20))
        self._unchecked = 0
        self._in_memtables = False  # whether this epoch's changes, or some of them, went there
        # The epoch's only changes, if nothing follows: puts, and deletes in their order.
        self._held: tuple[SortedRun, Sequence[bytes]] | None = None
        self._clipped = False
        self._run: RunFiles | None = None  # what runs that follow each other have brought
        try:
            self._db, self._starts = _open(self.path, self._options)
        except BaseException:
            memory.return_files(self._budget, self._files)
            raise
        self._no_log = WriteOptions()
        self._no_log.disable_wal = True  # type: ignore[method-assign, assignment]  # a property that the stubs call a method
        self._db.set_write_options(self._no_log)
        self._handed_over = IngestExternalFileOptions()
        self._handed_over.set_move_files(disks.has_links(self.path))  # RocksDB moves a file by a link
        self._shards: list[Rdict] = []
        self._handles: list[ColumnFamily] = []
        for start in self._starts:
            name = compaction.name_of(start)
            self._adopt(len(self._shards), name, self._db.get_column_family(name) if start else self._db)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        # Gets in key order take about half as long, which is more than the sort costs; and they come shard by shard.
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ordered = [keys[index] for index in order]
        if self._run is None or ordered[0] <= self._run.last:
            self._release()
        in_order: list[bytes | None] = []
        try:
            for shard, part in zip(self._shards, slices(ordered, self._starts), strict=True):
                if part.start < part.stop:
                    in_order += shard.get(ordered[part])  # type: ignore[arg-type]  # a list gives a list
        except Exception as error:
            raise _unreadable(self.path, "read its state", error) from error
        values: list[bytes | None] = [None] * len(keys)
        for index, value in zip(order, in_order, strict=True):
            values[index] = value
        return values

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        if self._run is not None and isinstance(puts, SortedRun) and self._run.ends_below(puts, deletes):
            self._add_to_run(puts, deletes)
            return
        self._release()
        if not isinstance(puts, SortedRun) or self._in_memtables or not _is_large(puts, deletes, self._starts):
            self._put(puts, deletes)
        elif puts.more:
            self._run = RunFiles(self.path, lambda index: self._options(index, len(self._shards)))
            self._add_to_run(puts, deletes)
        else:
            self._held = puts, deletes
            self.written = True

    def _add_to_run(self, puts: SortedRun, deletes: Sequence[bytes]) -> None:
        assert self._run is not None
        try:
            self._run.add(puts, deletes, self._starts)
        except Exception as error:
            raise _failed(self.path, "write", error) from error
        self.written = True

    def _release(self) -> None:
        """Write a run that was not the last of the epoch with what follows, so that the epoch adds one file, not two.

        Data that is in files already stays there.
        """
        if self._held is not None:
            held, self._held = self._held, None
            self._put(*held)
        if self._run is not None:
            try:
                self._ingest()
            except Exception as error:
                raise _failed(self.path, "write", error) from error
            self._in_memtables = True

    def _put(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        batch = WriteBatch(raw_mode=True)
        for handle, keys in zip(self._handles, by_range([(key,) for key in deletes], self._starts), strict=True):
            batch.set_default_column_family(handle)
            deque(starmap(batch.delete, keys), maxlen=0)
        for handle, entries in zip(self._handles, by_range(puts, self._starts), strict=True):
            batch.set_default_column_family(handle)
            deque(starmap(batch.put, entries), maxlen=0)  # a loop that is not Python's own: a third of the time
        if batch.is_empty():
            return
        self._unchecked += batch.size_in_bytes()
        self._in_memtables = True
        try:
            self._db.write(batch)
            if self._budget.memtables.get_usage() > self._budget.memtable_bytes:
                self._make_room()
            if self._unchecked >= self._threshold:  # in time: cutting a state that has become large takes long
                self._unchecked = 0
                self._split()
        except WeirError:
            raise
        except Exception as error:
            raise _failed(self.path, "write", error) from error
        self.written = True

    def _ingest(self) -> None:
        """Hand over the files of the run, one a shard: half of what the way through a memtable costs."""
        assert self._run is not None
        run, self._run = self._run, None
        for index, path in run.finished():
            self._shards[index].ingest_external_file([path], self._handed_over)

    def _make_room(self) -> None:
        """Flush, and wait for it: several databases together hold more in memtables than they may, or flushes are
        slow."""
        held = sum(shard.property_int_value("rocksdb.cur-size-all-mem-tables") or 0 for shard in self._shards)
        if (
            held > self._budget.memtable_bytes // 16
        ):  # else it is others that hold it, and this one would write tiny files
            self._flush()

    def _flush(self) -> None:
        for wait in (False, True):  # several at once, as far as there are threads; the second round waits for them
            for shard in self._shards:
                shard.flush(wait=wait)

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._release()
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        for shard in self._shards[first:last]:
            yield from _scan(self.path, shard, start, end)

    def scan_back(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._release()
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        for shard in reversed(self._shards[first:last]):
            yield from _scan_back(self.path, shard, start, end)

    def approximate_entries(self) -> int:
        # Counts a key once for each sorted run that has it, the held one too; at most about twice as many as there are.
        held = (0 if self._held is None else len(self._held[0])) + (0 if self._run is None else self._run.entries)
        return held + sum(shard.property_int_value("rocksdb.estimate-num-keys") or 0 for shard in self._shards)

    def keep_only(self, start: bytes, end: bytes) -> None:
        """Drop shards outside, and delete ranges. Merges wait for the next epoch: in this one no value is read or
        written again."""
        self._release()
        uppers = [*self._starts[1:], BEYOND]
        try:
            for index in reversed(range(len(self._starts))):
                low, high = self._starts[index], uppers[index]
                if index and (high <= start or end <= low):
                    self._drop(index)
                    continue
                outside = [(low, min(high, start)), (max(low, end), high)]
                if any(first < last for first, last in outside):
                    self._shards[index].set_options({"disable_auto_compactions": "true"})
                for first, last in outside:
                    if first < last:
                        self._shards[index].delete_range(first, last)
        except Exception as error:
            raise _failed(self.path, "clip its key groups", error) from error
        self.written = self._in_memtables = self._clipped = True

    def has_traces(self, start: bytes, end: bytes) -> bool:
        """Look at the first and last key of each file.

        Deleted and clipped entries stay in a file until it is merged.
        """
        return any(file["start_key"] < end and start <= file["end_key"] for file in self._db.live_files())

    def _drop(self, index: int) -> None:
        name = compaction.name_of(self._starts[index])
        del self._starts[index], self._handles[index]
        self._shards.pop(index).close()
        self._db.drop_column_family(name)

    def snapshot(self, target: Path) -> list[Path]:
        """Flush, or write a file, merge what is due, and hard-link the live files into `target` (which must not
        exist)."""
        try:
            if self._held is not None:
                self._run = RunFiles(self.path, lambda index: self._options(index, len(self._shards)))
                self._run.add(*self._held, self._starts)
                self._held = None
            if self._run is not None:
                self._ingest()
            self._flush()
            if not self._clipped:  # files look larger than what is left of them, and whoever rescales waits
                self._merge()
            _bring_files(self._db, self._shards, target)
        except WeirError:
            raise
        except Exception as error:
            raise _failed(self.path, "take its snapshot", error) from error
        return [file for file in target.iterdir() if is_table(file.name) or file.name.startswith(_STATE_FILES)]

    def _merge(self) -> None:
        self._settle()
        split = self._split()
        merges = compaction.due(self._sizes())
        for index in merges:
            self._shards[index].compact_range(None, None)
        if split or merges:
            self._settle()

    def _settle(self) -> None:
        # A compaction that closing the database cuts off is work thrown away, and would be due again next epoch.
        # RocksDB also calls a compaction pending for which it finds nothing to merge: then none is running for a while.
        deadline = time.monotonic() + _COMPACTION_WAIT_SECONDS
        quiet = 0
        while quiet < _QUIET_POLLS and time.monotonic() < deadline:
            if self._db.property_int_value("rocksdb.num-running-compactions"):
                quiet = 0
            elif any(shard.property_int_value("rocksdb.compaction-pending") for shard in self._shards):
                quiet += 1
            else:
                return
            time.sleep(0.001)

    def _sizes(self) -> list[compaction.Shard]:
        return compaction.sizes(self._db.live_files(), self._starts)

    def _split(self) -> bool:
        """Cut what has outgrown the others into pieces of its own; whether there was any."""
        sizes = self._sizes()
        for index in reversed(range(len(sizes))):  # from the end: a split moves the indices behind it
            number = compaction.pieces(sizes, index, self._threshold)
            if number > 1 and (new := compaction.borders(self._all(index), sizes[index].bytes // 1024, number)):
                self._move_out(index, new)
                return True
        return False

    def _all(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        return _scan(self.path, self._shards[index], self._starts[index], None)

    def _move_out(self, index: int, new: list[bytes]) -> None:
        """Give what a shard has from new[0] on to new shards. Nobody sees the state in between: this is one attempt's
        copy."""
        number = len(self._starts) + len(new)
        for offset, start in enumerate(new, index + 1):
            name = compaction.name_of(start)
            self._starts.insert(offset, start)
            self._adopt(offset, name, self._db.create_column_family(name, self._options(offset, number)))
        old = self._shards[index]
        batch, key = WriteBatch(raw_mode=True), new[0]
        for key, value in _scan(self.path, old, new[0], None):
            batch.put(key, value, self._handles[bisect_right(self._starts, key) - 1])
            if batch.size_in_bytes() >= _COPY_BYTES:
                self._db.write(batch)
                batch = WriteBatch(raw_mode=True)
        if not batch.is_empty():
            self._db.write(batch)
        for shard in self._shards[index + 1 : index + 1 + len(new)]:
            shard.flush(wait=True)
        old.delete_range(new[0], key + b"\0")
        old.compact_range(None, None)

    def _adopt(self, index: int, name: str, shard: Rdict) -> None:
        shard.set_write_options(self._no_log)
        self._shards.insert(index, shard)
        self._handles.insert(index, self._db.get_column_family_handle(name))

    def close(self) -> None:
        """Close the database.

        Raises TransientError on a full disk, with the database closed: its files must not hold on to the space.
        """
        opened = [*reversed(self._shards)]  # the default family last
        self._shards, self._handles, self._held, self._run = [], [], None, None
        del self._db
        failed: Exception | None = None
        while opened:
            shard = opened.pop(0)
            try:
                shard.close()
            except Exception as error:
                failed = failed or error
            del shard
        memory.return_files(self._budget, self._files)
        self._files = 0
        if failed is not None:
            raise TransientError(f"RocksDB could not close: {failed}", where=str(self.path)) from failed

    def _options(self, index: int, number: int) -> Options:
        options = memory.options(self._budget, number, self._files, self._compression)
        options.set_level_zero_file_num_compaction_trigger(compaction.trigger(index))
        return options


def _bring_files(db: Rdict, shards: Sequence[Rdict], target: Path) -> None:
    """Link the files that count into a new directory; without hard links, copy them while no compaction can begin."""
    if disks.has_links(db.path()):
        Checkpoint(db).create_checkpoint(str(target))
        return
    for shard in shards:
        shard.set_options({"disable_auto_compactions": "true"})
    path, deadline = Path(db.path()), time.monotonic() + _COMPACTION_WAIT_SECONDS
    while any(db.property_int_value(f"rocksdb.num-running-{kind}") for kind in ("compactions", "flushes")):
        if time.monotonic() > deadline:
            raise TransientError(
                f"A merge of files takes longer than {_COMPACTION_WAIT_SECONDS:.0f} s, and the disk has no hard links.",
                where=str(path),
                next="The epoch is declined and played again. Set local.work_dir to a disk that has hard links.",
            )
        time.sleep(0.001)
    target.mkdir()
    tables = [Path(file["name"].lstrip("/")).name for file in db.live_files()]
    for name in ("CURRENT", (path / "CURRENT").read_text("utf-8").strip(), *tables):
        disks.copy(path / name, target / name)


def _scan(path: Path, shard: Rdict, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    # Without a bound an iterator looks for the entry after the last one of the range, past all that has been deleted:
    # in a state that an epoch has emptied, each of many scans would pass over everything.
    within = ReadOptions()
    if end is not None:
        within.set_iterate_upper_bound(end)
    last = start
    # One call for each entry takes less than half of what the four of `RdictIter` do.
    entries_of_shard: Iterator[tuple[bytes, bytes]] = shard.items(from_key=start, read_opt=within)  # type: ignore[assignment]  # raw mode
    for entry in entries_of_shard:
        last = entry[0]
        yield entry
    entries = shard.iter(within)
    entries.seek(last)  # entries also end before a block that cannot be read, and only this one tells
    if entries.valid():
        entries.next()
    _check_read(path, entries)


def _scan_back(path: Path, shard: Rdict, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield entries as `_scan` does, from the end, without a bound.

    `set_iterate_lower_bound` of rocksdict 0.3.29 sets the upper bound.
    """
    last = end
    entries_of_shard: Iterator[tuple[bytes, bytes]] = shard.items(True, end)  # type: ignore[assignment]  # raw mode
    for entry in entries_of_shard:
        if entry[0] < start:
            return
        last = entry[0]
        if last < end:
            yield entry
    entries = shard.iter(ReadOptions())
    entries.seek_for_prev(last)
    if entries.valid():
        entries.prev()
    _check_read(path, entries)


def _check_read(path: Path, entries: RdictIter) -> None:
    """Raise DamageError if an iterator has met data that it cannot read."""
    try:
        entries.status()
    except Exception as error:
        raise _unreadable(path, "read its state", error) from error


def _is_large(run: SortedRun, deletes: Sequence[bytes], starts: Sequence[bytes]) -> bool:
    """Return whether writing files here costs less than memtables and flushes. starts: The first key of each shard."""
    if len(run) + len(deletes) >= _FILE_ENTRIES * len(starts):
        return True
    touched = sum(part.start < part.stop for part in slices(run.ascending, starts))
    return bool(touched) and sum(map(len, run.values)) >= _FILE_BYTES * touched


def _open(path: Path, options: Callable[[int, int], Options]) -> tuple[Rdict, list[bytes]]:
    """Open a database, or make one; returns its shards' first keys too.

    options: Gives the options of a shard, by its number and the number of all shards.
    """
    if not (path / "CURRENT").exists() and any(path.glob("*.sst")):
        raise DamageError(
            "The state has tables, but nothing says which of them count: CURRENT is missing.", where=str(path)
        )
    try:
        names = Rdict.list_cf(str(path), Options(raw_mode=True)) if (path / "CURRENT").exists() else []
        starts = compaction.starts_of(names, str(path))
        number = len(starts)
        families = {compaction.name_of(start): options(index, number) for index, start in enumerate(starts) if start}
        return Rdict(str(path), options=options(0, number), column_families=families or None), starts
    except WeirError:
        raise
    except Exception as error:  # rocksdict raises bare Exception for everything
        if _lacks_room(error):
            raise TransientError(f"RocksDB cannot open this state: {error}", where=str(path)) from error
        raise _unreadable(path, "open this state", error) from error


def _unreadable(path: Path, action: str, error: Exception) -> DamageError:
    return DamageError(
        f"RocksDB cannot {action}: {error}",
        where=str(path),
        next="Delete the local work directory: the state is fetched again from storage and verified.",
    )


def _failed(path: Path, action: str, error: Exception) -> WeirError:
    """Return the error of a compaction that failed.

    A compaction reads the state too. If it finds damage, it would find it again in every replay.
    """
    if str(error).startswith("Corruption"):
        return _unreadable(path, "read its state", error)
    return TransientError(f"RocksDB could not {action}: {error}", where=str(path))


def _lacks_room(error: Exception) -> bool:
    """Return whether this machine is short of space, file handles or memory; the state itself may be sound."""
    scarce = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return any(os.strerror(code) in str(error) for code in scarce)


def is_table(name: str) -> bool:
    """Return whether a file is an SST: never changed once it is written, with a checksum on each block."""
    return name.endswith(".sst")


@dataclass(frozen=True, slots=True)
class RocksDBFactory:
    """State of any size: epochs cost what they change."""

    format: str = "rocksdb"

    def is_immutable(self, name: str) -> bool:
        return is_table(name)

    def open(self, directory: Path, options: BackendOptions) -> RocksDBBackend:
        return RocksDBBackend(directory, options.memory_mb, compression=options.compression)


ROCKSDB = RocksDBFactory()
