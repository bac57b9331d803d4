"""Lists, maps and timers of one key, for functions that are called once per key.

Each stands on the handle for whole batches: what the calls change is collected here, by the key's number in the batch,
and handed over at once by `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import StageError
from state_ops.keyed.keyed_state import KeyedState
from state_ops.keyed.timers import MOMENT
from state_ops.schema.descriptors import Collection
from state_ops.schema.python_rows import Row, RowReader, beside, columns, copied, tuples, typed, widened
from state_ops.schema.state_schema import Field

_GONE: Any = object()
_MOMENT = "__weir_moment"
_AHEAD, _MOST_AHEAD = 8, 4096  # keys whose maps are read at once: at first, and at most


class KeyList:
    """A list of the current key: `state.<name>`."""

    def __init__(self, declared: Collection, where: str) -> None:
        self._declared, self._where = declared, where
        self._reader = RowReader(declared.fields, where)

    def begin(self, handle: KeyedState, frame: pl.DataFrame, keys: Sequence[Any]) -> None:
        self._handle, self._frame, self._keys = getattr(handle, self._declared.name), frame, keys
        self._batch = handle.batch
        self._loaded: list[list[Any]] | None = None
        self._appended: dict[int, list[Any]] = {}
        self._read: dict[int, list[Any]] = {}  # of what is appended, as far as it was read
        self._cleared: set[int] = set()
        self.index = 0

    def append(self, value: Any) -> None:
        """Append an element: a value, or an instance of the list's State class."""
        self._appended.setdefault(self.index, []).append(_kept(value, self._declared, self._where))

    def get(self) -> list[Any]:
        """Return all elements, in the order in which they were appended; a list of the caller's own."""
        stored = [] if self.index in self._cleared else self._stored()[self.index]
        read = self._read.setdefault(self.index, [])
        for value in self._appended.get(self.index, ())[len(read) :]:
            read.append(_as_read(value, self._declared, self._reader, self._owner))
        return [_given(value, self._declared) for value in (*stored, *read)]

    def clear(self) -> None:
        """Forget all elements."""
        self._cleared.add(self.index)
        self._appended.pop(self.index, None)
        self._read.pop(self.index, None)

    def __len__(self) -> int:
        return len(self.get())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def end(self) -> None:
        if self._cleared:
            self._handle.clear(self._frame[sorted(self._cleared)])
        owners = [index for index, values in self._appended.items() for _ in values]
        if owners:
            rows = [_row(value, self._declared) for values in self._appended.values() for value in values]
            table = columns(
                self._declared.fields, rows, lambda number: _of(self._keys[owners[number]], self._declared), self._where
            )
            self._handle.append(beside(self._frame, owners, table))

    def _owner(self) -> str:
        """Name the key whose list it is, for errors."""
        return _of(self._keys[self.index], self._declared)

    def _stored(self) -> list[list[Any]]:
        """Return the lists of all keys of the batch, read when the first of them is asked for."""
        if self._loaded is None:
            self._loaded = [[] for _ in self._keys]
            table = self._handle.get(self._frame)
            keys = frames.from_arrow(table.select(self._frame.columns))
            owners = self._batch.codes(keys, f"state.{self._declared.name}")
            for owner, value in zip(owners.tolist(), _values(table, self._declared), strict=True):
                self._loaded[owner].append(value)
        return self._loaded


class KeyMap:
    """A map of the current key: `state.<name>`.

    Small maps are read whole, those of the next keys of the batch with them; an entry of a large one is a look-up of
    its own. An entry is the same under every spelling of its key, as it is once it is stored: a datetime without a zone
    and the one in UTC, a date and its midnight, a number of NumPy's and Python's.
    """

    def __init__(self, declared: Collection, where: str) -> None:
        assert declared.key is not None
        self._declared, self._where = declared, where
        self._key = Field(declared.key_column, declared.key, False, None)
        self._reader, self._key_reader = RowReader(declared.fields, where), RowReader([self._key], where)

    def begin(self, handle: KeyedState, frame: pl.DataFrame, keys: Sequence[Any]) -> None:
        self._handle, self._frame, self._keys = getattr(handle, self._declared.name), frame, keys
        self._changed: dict[tuple[int, Any], Any] = {}  # by keys as they are stored; _GONE: deleted
        self._cleared: set[int] = set()
        self._maps: dict[int, dict[Any, Any] | None] = {}  # as stored, of the current key and some after it
        self._seen: dict[Any, Any] = {}  # entries of the current key, where its map is large
        self._ahead = _AHEAD
        self.index = 0

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of an entry; `default` where there is none."""
        entry = self.index, key = self.index, self._spelled(key)
        if entry in self._changed:
            value = self._read(entry)
        elif self.index in self._cleared:
            return default
        else:
            entries = self._whole()
            value = self._looked_up(key) if entries is None else entries.get(key, _GONE)
        return default if value is _GONE else _given(value, self._declared)

    def items(self) -> list[tuple[Any, Any]]:
        """Return all entries, in the order of their keys."""
        entries: dict[Any, Any] = {}
        if self.index not in self._cleared:
            whole = self._whole()
            entries = self._all() if whole is None else whole
        changed = {entry[1]: self._read(entry) for entry in self._changed if entry[0] == self.index}
        entries = entries | changed
        return [(key, _given(entries[key], self._declared)) for key in sorted(entries) if entries[key] is not _GONE]

    def clear(self) -> None:
        """Forget all entries."""
        self._cleared.add(self.index)
        self._changed = {entry: value for entry, value in self._changed.items() if entry[0] != self.index}

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, _GONE)
        if value is _GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changed[self.index, self._spelled(key)] = _kept(value, self._declared, self._where)

    def __delitem__(self, key: Any) -> None:
        self._changed[self.index, self._spelled(key)] = _GONE

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _GONE) is not _GONE

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self.items()])

    def end(self) -> None:
        if self._cleared:
            self._handle.clear(self._frame[sorted(self._cleared)])
        if gone := [entry for entry, value in self._changed.items() if value is _GONE]:
            self._handle.delete(self._addressed(gone))
        if kept := [entry for entry, value in self._changed.items() if value is not _GONE]:
            rows = [_row(self._changed[entry], self._declared) for entry in kept]
            table = columns(
                self._declared.fields,
                rows,
                lambda number: _of(self._keys[kept[number][0]], self._declared),
                self._where,
            )
            self._handle.put(widened(self._addressed(kept), table))

    def _spelled(self, key: Any) -> Any:
        """Return a map's key as it is stored."""
        return self._key_reader.read_value(key, self._owner)

    def _owner(self) -> str:
        """Name the key whose map it is, for errors."""
        return _of(self._keys[self.index], self._declared)

    def _read(self, entry: tuple[int, Any]) -> Any:
        """Return a changed entry of the current key as it is read once it is stored.

        That value replaces the changed one, so that the next read costs less.
        """
        value = self._changed[entry]
        if value is not _GONE:
            self._changed[entry] = value = _as_read(value, self._declared, self._reader, self._owner)
        return value

    def _whole(self) -> dict[Any, Any] | None:
        """Return the current key's map as it is stored, read with those of the next keys; None for one that is too
        large."""
        if self.index not in self._maps:
            self._maps, self._seen = {}, {}
            while (read := self._handle.whole(codes := self._upcoming())) is None and len(codes) > 1:
                self._ahead = max(1, len(codes) // 4)
            if read is None:
                self._maps[self.index] = None
            else:
                self._ahead = min(_MOST_AHEAD, 2 * len(codes))
                maps: dict[int, dict[Any, Any]] = {code: {} for code in codes}
                owners, keys, table = read
                for owner, key, value in zip(owners, keys, _values(table, self._declared), strict=True):
                    maps[owner][key] = value
                self._maps.update(maps)
        return self._maps[self.index]

    def _upcoming(self) -> range:
        return range(self.index, min(self.index + self._ahead, len(self._keys)))

    def _looked_up(self, key: Any) -> Any:
        if key not in self._seen:
            row = self._handle.entry(self.index, self._column([(self.index, key)]).column(0).combine_chunks())
            self._seen[key] = _GONE if row is None else _values(row, self._declared)[0]
        return self._seen[key]

    def _all(self) -> dict[Any, Any]:
        table = self._handle.all(self._frame[[self.index]])
        keys = table.column(self._declared.key_column).to_pylist()
        return dict(zip(keys, _values(table, self._declared), strict=True))

    def _column(self, entries: Sequence[tuple[int, Any]]) -> pa.Table:
        """Map keys of some entries, in one column of their type."""
        return columns(
            [self._key],
            [(key,) for _, key in entries],
            lambda number: _of(self._keys[entries[number][0]], self._declared),
            self._where,
        )

    def _addressed(self, entries: Sequence[tuple[int, Any]]) -> pa.Table:
        return beside(self._frame, [index for index, _ in entries], self._column(entries))


class KeyTimers:
    """The timers of the current key: `state.timers`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def begin(self, handle: KeyedState, frame: pl.DataFrame, keys: Sequence[Any]) -> None:
        self._handle, self._frame, self._keys = handle.timers, frame, keys
        self._at: dict[int, list[datetime | int]] = {}
        self._after: dict[str | timedelta, list[int]] = {}
        self._cleared: set[int] = set()
        self.index = 0

    def set(self, at: datetime | None = None, *, after: str | timedelta | None = None) -> None:
        """Have `on_timer` called for the key: at a moment of event time, or after e.g. "15m" of processing time."""
        if (at is None) == (after is None):
            raise StageError(
                f"state.timers.set needs a moment, for the key {self._keys[self.index]!r}.",
                where=self._where,
                next='Say either at=datetime or after="15m".',
            )
        if at is not None:
            if not isinstance(at, datetime | np.datetime64) or at != at:  # NaT alone is not itself
                raise StageError(
                    f"state.timers.set was given {at!r:.200} for the key {self._keys[self.index]!r}.",
                    where=self._where,
                    next="Give a datetime; one without a time zone is in UTC.",
                )
            # Arrow takes no np.datetime64 for a column with a zone; a number of microseconds it does.
            moment = at.astype("M8[us]").astype(int).item() if isinstance(at, np.datetime64) else at
            self._at.setdefault(self.index, []).append(moment)
        else:
            self._after.setdefault(after, []).append(self.index)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Take back all timers of the key."""
        self._cleared.add(self.index)
        self._at.pop(self.index, None)
        for owners in self._after.values():
            owners[:] = [owner for owner in owners if owner != self.index]

    def end(self) -> None:
        if self._cleared:
            self._handle.clear(self._frame[sorted(self._cleared)])
        if owners := [index for index, moments in self._at.items() for _ in moments]:
            moments = pa.array([moment for moments in self._at.values() for moment in moments], MOMENT)
            self._handle.set(beside(self._frame, owners, pa.table({_MOMENT: moments})), at=_MOMENT)
        for after, owners in self._after.items():
            if owners:
                self._handle.set(self._frame[owners], after=after)


def _value(row: Row, declared: Collection) -> Any:
    """Return a row as a dict, as it is kept."""
    return dict(zip([field.name for field in declared.fields], row, strict=True))


def _values(table: pa.Table, declared: Collection) -> list[Any]:
    """Return stored elements as they are kept."""
    rows = tuples(typed(table, declared.fields))
    return [value for (value,) in rows] if declared.row is None else [_value(row, declared) for row in rows]


def _kept(value: Any, declared: Collection, where: str) -> Any:
    """Return an element as it is kept until it is written: a copy, as a dict if it is a row."""
    if declared.row is None:
        return copied(value)
    if type(value) is not declared.row:
        raise StageError(
            f"state.{declared.name} was given {value!r:.200}.",
            where=where,
            next=f"Give an instance of {declared.row.__name__}.",
        )
    return copied(value)


def _row(value: Any, declared: Collection) -> Row:
    """Return an element as its fields."""
    return (value,) if declared.row is None else tuple([value[field.name] for field in declared.fields])


def _as_read(value: Any, declared: Collection, reader: RowReader, owner: Callable[[], str]) -> Any:
    """Return an element that waits to be written, as it is read once it is. owner: says whose it is, for errors."""
    if declared.row is None:
        return reader.read_value(value, owner)
    return _value(reader.read(_row(value, declared), owner), declared)


def _given(value: Any, declared: Collection) -> Any:
    """Return an element as the author gets it: a copy, or an instance of its State class."""
    return copied(value) if declared.row is None else declared.row(**copied(value))


def _of(key: Any, declared: Collection) -> str:
    return f"state.{declared.name} of the key {key!r}"
