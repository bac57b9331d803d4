"""State for functions that are called once per key: Python objects, one key at a time.

    state.get(), state.update(total), state.clear()             the key's typed row
    state.recent.append(ride), state.spent["food"] = 3.5         its lists and maps
    state.timers.set(at=moment), state.timers.set(after="15m")   its timers

All of it stands on the handles for whole batches. The keys of a batch are known before the first call, so their rows are
read at once; what the calls change is collected, made columns, checked and written at once. Only the calls are per key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops import frames
from state_ops.cache import StateCache, ValueStore
from state_ops.codec import decode_rows, encode_rows
from state_ops.errors import StageError
from state_ops.kinds import LIST, VALUE_STATE, Collection, collections_of
from state_ops.python_rows import Row, columns, own, tuples
from state_ops.schema import Field, StateSchema
from state_ops.state import KeyedState
from state_ops.state_class import State
from state_ops.ttl import visible
from state_ops.value_types import without_nullability

OpenCache = Callable[[ValueStore[Row], StateSchema], "StateCache[Row] | None"]
"""Gives the cache above a store of rows of a schema, or none."""


def no_cache(store: ValueStore[Row], schema: StateSchema) -> None:
    """What `OpenCache` is where none is configured."""


def row_store(backend: Any, schema: StateSchema, where: str) -> ValueStore[Row]:
    """Rows of a schema in a backend, as tuples."""

    def encode(rows: Sequence[Row]) -> list[bytes]:
        return encode_rows(schema, columns(schema.fields, rows, lambda number: f"row {number}", where))

    return ValueStore(backend, encode, lambda values: tuples(decode_rows(schema, values)))


class KeyState:
    """What a per-key function gets as `state`: all that is kept for the key that it is called for."""

    timers: KeyTimers

    def __init__(self, states: KeyStates) -> None:
        self._states = states
        self.timers = states.timers

    def get(self) -> State:
        """The key's row, an instance of the stage's State class; with the class's defaults where the key has none.

        It is the caller's own: what is changed in it is kept only by `update`. Its lists and maps are empty; they are
        attributes of the handle.
        """
        return self._states.get()

    def update(self, value: State) -> None:
        """Keep this as the key's row."""
        self._states.set(value)

    def clear(self) -> None:
        """Forget the key's row; lists, maps and timers have a `clear` of their own."""
        self._states.forget()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._states.collection(name)


class KeyStates:
    """The runtime's half: the state of a batch's keys, of which one is the current one.

    schema: of the rows in the backend. cache: above the rows, if there is one; it does not go with a TTL.
    """

    def __init__(self, state: type[State], schema: StateSchema, where: str, cache: StateCache[Row] | None) -> None:
        self._state, self._where, self._cache = state, where, cache
        self._fields = visible(schema)
        self._names = [field.name for field in self._fields]
        self._plain = not collections_of(state) and not any(pa.types.is_nested(field.type) for field in self._fields)
        self._collections: dict[str, KeyList | KeyMap] = {
            one.name: (KeyList if one.kind == LIST else KeyMap)(one, where) for one in collections_of(state)
        }
        self.timers = KeyTimers()
        self._at = 0

    def begin(self, handle: KeyedState, keys: Sequence[Any]) -> None:
        """Start a batch. handle: of its keys, in the order of `keys`, which are these keys as people read them."""
        self._handle, self._keys = handle, keys
        self._frame = handle.batch.keys
        self._rows: list[Row | None] | None = None
        self._changed: dict[int, Row | None] = {}
        for one in self._collections.values():
            one.begin(handle, self._frame, keys)
        self.timers.begin(handle, self._frame)

    def at(self, index: int) -> None:
        """Make the batch's key of this number the current one."""
        self._at = index
        for one in (*self._collections.values(), self.timers):
            one.index = index

    def end(self) -> None:
        """Hand what the calls changed to the cache and the handle, which writes it."""
        kept = [index for index, row in self._changed.items() if row is not None]
        gone = [index for index, row in self._changed.items() if row is None]
        rows = [self._changed[index] for index in kept]
        table = columns(self._fields, rows, lambda number: f"the key {self._keys[kept[number]]!r}", self._where)  # type: ignore[arg-type]
        if self._cache is not None:
            # Through Arrow and back, so that a hit gives the very value that a miss would: 1.0 in an int field becomes 1.
            names = self._encoded(kept + gone)
            self._cache.update_many(dict(zip(names, [*tuples(table), *[None] * len(gone)], strict=True)))
        else:
            if kept:
                self._handle.put(_beside(self._frame, kept, table))
            if gone:
                self._handle.delete(self._frame[gone])
        for one in (*self._collections.values(), self.timers):
            one.end()

    # -- for the current key

    def get(self) -> State:
        row = self._changed[self._at] if self._at in self._changed else self._loaded()[self._at]
        if row is None:
            return self._state()
        if not self._plain:
            return self._state(**{name: own(value) for name, value in zip(self._names, row, strict=True)})
        made = self._state.__new__(self._state)
        made.__dict__.update(zip(self._names, row, strict=True))
        return made

    def set(self, value: State) -> None:
        if type(value) is not self._state:
            raise StageError(
                f"state.update was given {value!r:.200} for the key {self._keys[self._at]!r}.",
                where=self._where,
                next=f"Give an instance of {self._state.__name__}.",
            )
        for name in self._collections:
            if getattr(value, name):
                raise StageError(
                    f"state.update was given something in {name!r} for the key {self._keys[self._at]!r}.",
                    where=self._where,
                    next=f"Lists and maps are changed where they are: state.{name}.",
                )
        row = tuple([getattr(value, name) for name in self._names])
        self._changed[self._at] = row if self._plain else tuple(map(own, row))

    def forget(self) -> None:
        self._changed[self._at] = None

    def collection(self, name: str) -> KeyList | KeyMap:
        if name not in self._collections:
            raise StageError(
                f"The state has no list or map {name!r}.",
                where=self._where,
                next=f"Its lists and maps are: {', '.join(self._collections) or 'none'}. Fields are those of state.get().",
            )
        return self._collections[name]

    # -- how

    def _loaded(self) -> list[Row | None]:
        """The rows of all keys of the batch, read when the first of them is asked for."""
        if self._rows is None:
            if self._cache is not None:
                self._rows = self._cache.get_many(self._encoded(None))
            else:
                self._rows = list(tuples(_typed(self._handle.get(self._frame), self._fields)))
        return self._rows

    def _encoded(self, indices: list[int] | None) -> list[bytes]:
        return self._handle.batch.encoded(VALUE_STATE, None if indices is None else np.array(indices, np.int64))


class KeyList:
    """A list of the current key: `state.<name>`."""

    def __init__(self, declared: Collection, where: str) -> None:
        self._declared, self._where = declared, where

    def begin(self, handle: KeyedState, frame: pl.DataFrame, keys: Sequence[Any]) -> None:
        self._handle, self._frame, self._keys = getattr(handle, self._declared.name), frame, keys
        self._batch = handle.batch
        self._loaded: list[list[Any]] | None = None
        self._appended: dict[int, list[Any]] = {}
        self._cleared: set[int] = set()
        self.index = 0

    def append(self, value: Any) -> None:
        """Append an element: a value, or an instance of the list's State class."""
        self._appended.setdefault(self.index, []).append(_kept(value, self._declared, self._where))

    def get(self) -> list[Any]:
        """All elements, in the order in which they were appended; a list of the caller's own."""
        stored = [] if self.index in self._cleared else self._stored()[self.index]
        return [_given(value, self._declared) for value in (*stored, *self._appended.get(self.index, ()))]

    def clear(self) -> None:
        """Forget all elements."""
        self._cleared.add(self.index)
        self._appended.pop(self.index, None)

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
            self._handle.append(_beside(self._frame, owners, table))

    def _stored(self) -> list[list[Any]]:
        """The lists of all keys of the batch, read when the first of them is asked for."""
        if self._loaded is None:
            self._loaded = [[] for _ in self._keys]
            found = self._handle.get(self._frame)
            owners = self._batch.codes(
                frames.from_arrow(found.select(self._frame.columns)), f"state.{self._declared.name}"
            )
            for owner, row in zip(owners.tolist(), tuples(_typed(found, self._declared.fields)), strict=True):
                self._loaded[owner].append(_value(row, self._declared))
        return self._loaded


class KeyMap:
    """A map of the current key: `state.<name>`. Reading one entry costs a look-up of its own, whatever the map's size."""

    def __init__(self, declared: Collection, where: str) -> None:
        self._declared, self._where = declared, where

    def begin(self, handle: KeyedState, frame: pl.DataFrame, keys: Sequence[Any]) -> None:
        self._handle, self._frame, self._keys = getattr(handle, self._declared.name), frame, keys
        self._changed: dict[tuple[int, Any], Any] = {}  # _GONE: deleted
        self._cleared: set[int] = set()
        self.index = 0

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of an entry; `default` where there is none."""
        if (self.index, key) in self._changed:
            value = self._changed[self.index, key]
            return default if value is _GONE else _given(value, self._declared)
        if self.index in self._cleared:
            return default
        asked = self._addressed([(self.index, key)])
        if not self._handle.contains(asked)[0].as_py():
            return default
        (row,) = tuples(_typed(self._handle.get(asked), self._declared.fields))
        return _given(_value(row, self._declared), self._declared)

    def items(self) -> list[tuple[Any, Any]]:
        """All entries, in the order of their keys."""
        found: dict[Any, Any] = {}
        if self.index not in self._cleared:
            table = self._handle.all(self._frame[[self.index]])
            keys = table.column(self._declared.key_column).to_pylist()
            values = [_value(row, self._declared) for row in tuples(_typed(table, self._declared.fields))]
            found = dict(zip(keys, values, strict=True))
        found |= {key: value for (index, key), value in self._changed.items() if index == self.index}
        return [(key, _given(found[key], self._declared)) for key in sorted(found) if found[key] is not _GONE]

    def clear(self) -> None:
        """Forget all entries."""
        self._cleared.add(self.index)
        self._changed = {one: value for one, value in self._changed.items() if one[0] != self.index}

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, _GONE)
        if value is _GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changed[self.index, key] = _kept(value, self._declared, self._where)

    def __delitem__(self, key: Any) -> None:
        self._changed[self.index, key] = _GONE

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _GONE) is not _GONE

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self.items()])

    def end(self) -> None:
        if self._cleared:
            self._handle.clear(self._frame[sorted(self._cleared)])
        if gone := [one for one, value in self._changed.items() if value is _GONE]:
            self._handle.delete(self._addressed(gone))
        if kept := [one for one, value in self._changed.items() if value is not _GONE]:
            rows = [_row(self._changed[one], self._declared) for one in kept]
            table = columns(
                self._declared.fields,
                rows,
                lambda number: _of(self._keys[kept[number][0]], self._declared),
                self._where,
            )
            entries = self._addressed(kept)
            self._handle.put(_widened(entries, table))

    def _addressed(self, entries: Sequence[tuple[int, Any]]) -> pa.Table:
        assert self._declared.key is not None
        field = Field(self._declared.key_column, self._declared.key, False, None)
        keys = columns(
            [field],
            [(key,) for _, key in entries],
            lambda number: _of(self._keys[entries[number][0]], self._declared),
            self._where,
        )
        return _beside(self._frame, [index for index, _ in entries], keys)


class KeyTimers:
    """The timers of the current key: `state.timers`."""

    def begin(self, handle: KeyedState, frame: pl.DataFrame) -> None:
        self._handle, self._frame = handle.timers, frame
        self._at: dict[int, list[datetime]] = {}
        self._after: dict[str | timedelta, list[int]] = {}
        self._cleared: set[int] = set()
        self.index = 0

    def set(self, at: datetime | None = None, *, after: str | timedelta | None = None) -> None:
        """Have `on_timer` called for the key: at a moment of event time, or after e.g. "15m" of processing time."""
        if (at is None) == (after is None):
            raise StageError("state.timers.set needs a moment.", next='Say either at=datetime or after="15m".')
        if at is not None:
            self._at.setdefault(self.index, []).append(at)
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
            moments = pa.array([one for moments in self._at.values() for one in moments], pa.timestamp("us", tz="UTC"))
            self._handle.set(_beside(self._frame, owners, pa.table({_MOMENT: moments})), at=_MOMENT)
        for after, owners in self._after.items():
            if owners:
                self._handle.set(self._frame[owners], after=after)


_GONE: Any = object()
_MOMENT = "__weir_moment"


def _beside(frame: pl.DataFrame, indices: Sequence[int], table: pa.Table) -> pa.Table:
    """The key columns of some keys of the batch, and a row of the table beside each."""
    return _widened(frames.arrow(frame[list(indices)]), table)


def _widened(left: pa.Table, right: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=pa.schema([*left.schema, *right.schema]))


def _typed(table: pa.Table, fields: Sequence[Field]) -> pa.Table:
    """Some columns in their fields' types: on the way through frames a map becomes a list."""
    types = pa.schema([(field.name, without_nullability(field.type)) for field in fields])
    return table.select(types.names).cast(types)


def _value(row: Row, declared: Collection) -> Any:
    """An element as it is kept: a plain value, or a row as a dict."""
    if declared.row is None:
        return row[0]
    return dict(zip([field.name for field in declared.fields], row, strict=True))


def _kept(value: Any, declared: Collection, where: str) -> Any:
    """An element as it is kept until it is written: a copy, as a dict if it is a row."""
    if declared.row is not None and type(value) is not declared.row:
        raise StageError(
            f"state.{declared.name} was given {value!r:.200}.",
            where=where,
            next=f"Give an instance of {declared.row.__name__}.",
        )
    return own(value)


def _row(value: Any, declared: Collection) -> Row:
    """An element as its fields."""
    return (value,) if declared.row is None else tuple([value[field.name] for field in declared.fields])


def _given(value: Any, declared: Collection) -> Any:
    """An element as the author gets it: a copy, or an instance of its State class."""
    return own(value) if declared.row is None else declared.row(**own(value))


def _of(key: Any, declared: Collection) -> str:
    return f"state.{declared.name} of the key {key!r}"
