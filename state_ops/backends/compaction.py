"""Decides which part of a subtask's state is compacted when: shards are ranges of keys, each with sorted runs of its
own.

Pure functions over sizes; `rocksdb` carries out what they decide. docs/adr/0006-compaction.md has the reasons and
figures.

A shard is a column family that is named by its first key, so where a key lives is read from the database, never guessed
from settings. The default family holds what lies before all others; a database without others is one shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from state_ops.errors import DamageError

DEFAULT = "default"
MOST_SHARDS = 32

_PREFIX = "from-"
_PIECES = 8  # of a state that is split: more would be more objects per epoch, fewer would make one merge dearer
_BORDER_BYTES = 128  # of a key are enough for a border
_TRIGGER = 8
_DUE_FROM, _DUE_TO = 0.5, 0.8  # bytes of a shard's younger runs, per byte of its oldest, at which it is merged


@dataclass(frozen=True, slots=True)
class Shard:
    """Sizes of one shard in bytes: its largest sorted run (the base), all others (what was written since), and how
    many."""

    base: int
    delta: int
    runs: int

    @property
    def bytes(self) -> int:
        return self.base + self.delta


def name_of(start: bytes) -> str:
    """Return the column family of the shard that begins at `start`."""
    return f"{_PREFIX}{start.hex()}" if start else DEFAULT


def starts_of(names: Iterable[str], where: str) -> list[bytes]:
    """Return the first keys of a database's shards in order, b"" for the default family; from its column families'
    names."""
    starts = [b""]
    for name in names:
        if name == DEFAULT:
            continue
        try:
            starts.append(bytes.fromhex(name.removeprefix(_PREFIX)))
        except ValueError:
            starts.append(b"")
        if not name.startswith(_PREFIX) or not starts[-1]:
            raise DamageError(f"The state has a column family {name!r}, which Weir never makes.", where=where)
    return sorted(starts)


def trigger(index: int) -> int:
    """Return the number of sorted runs that shard `index` may have before RocksDB merges small ones.

    Eight neighbouring shards have eight different numbers.

    With one number for all, all would merge in the same epoch, and upload what they merged in the same epoch.
    """
    return _TRIGGER + index % _PIECES


def sizes(files: Iterable[Mapping[str, Any]], starts: Sequence[bytes]) -> list[Shard]:
    """Return the shards' sizes from RocksDB's list of live files: each file of level 0 is a sorted run, so is each
    other level."""
    runs: list[dict[object, int]] = [{} for _ in starts]
    for file in files:
        run = file["name"] if file["level"] == 0 else file["level"]
        mine = runs[bisect_right(starts, file["start_key"]) - 1]
        mine[run] = mine.get(run, 0) + file["size"]
    return [Shard(base := max(run.values(), default=0), sum(run.values()) - base, len(run)) for run in runs]


def due(shards: Sequence[Shard]) -> list[int]:
    """Return the shards to merge whole at this barrier, most overdue first.

    A shard is due when what was written since its last merge outweighs half to four fifths of the base, each shard at
    another share, so that shards of one age come due one after the other. One is merged even if it is large; further
    ones only while all together rewrite at most an eighth of the state. What waits is more overdue next time.
    RocksDB by itself would merge a shard whole at about 100 %, and all shards of one age in one epoch.
    A state of one shard is left to RocksDB: there is nothing to take turns with.
    """
    if len(shards) == 1:
        return []
    overdue = []
    for index, shard in enumerate(shards):
        limit = _DUE_FROM + (_DUE_TO - _DUE_FROM) * (index * 3 % _PIECES) / _PIECES
        if shard.runs > 1 and shard.delta > limit * shard.base:
            overdue.append((shard.delta / shard.base - limit, index))
    chosen: list[int] = []
    left = sum(shard.bytes for shard in shards) // _PIECES
    for _, index in sorted(overdue, reverse=True):
        if not chosen or shards[index].bytes <= left:
            chosen.append(index)
            left -= shards[index].bytes
    return chosen


def pieces(shards: Sequence[Shard], index: int, threshold: int) -> int:
    """Into how many shards to split one: 1 leaves it alone. Splits what is above `threshold` bytes and a quarter of
    all.

    Keys are spread evenly by their key group, so this usually happens once in the life of a state. Where they are not
    (few key groups, keys that grow), a shard that has outgrown the others is split again.
    """
    total = sum(shard.bytes for shard in shards)
    if shards[index].bytes <= max(threshold, total // 4):
        return 1
    wanted = -(-shards[index].bytes * _PIECES // total)
    return min(wanted, MOST_SHARDS - len(shards) + 1)


def borders(entries: Iterable[tuple[bytes, bytes]], step: int, number: int) -> list[bytes]:
    """Return up to `number` - 1 keys that cut sorted entries (key, value) into pieces of like bytes.

    The borders are the first keys of all pieces but the first.

    A key is looked at every `step` bytes. Fewer borders come back where keys do not differ early enough to be cut
    there.
    """
    sample: list[bytes] = []
    first: bytes | None = None
    seen = 0
    for key, value in entries:
        first = key if first is None else first
        seen += len(key) + len(value)
        if seen >= step and key[:_BORDER_BYTES] > first:
            sample.append(key[:_BORDER_BYTES])
            seen = 0
    return sorted({sample[len(sample) * piece // number] for piece in range(1, number)}) if sample else []
