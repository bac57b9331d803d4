"""State for functions that are called once per key: Python objects, one key at a time.

    state.get(), state.update(total), state.clear()             the key's typed row
    state.recent.append(ride), state.spent["food"] = 3.5         its lists and maps
    state.timers.set(at=moment), state.timers.set(after="15m")   its timers

All of it stands on the handles for whole batches. The keys of a batch are known before the first call, so their rows
are read at once; what the calls change is collected, made columns, checked and written at once. Only the calls are per
key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import StageError
from state_ops.keyed.keyed_state import KeyedState
from state_ops.keyed.per_key.key_collections import KeyList, KeyMap, KeyTimers
from state_ops.keyed.per_key.state_cache import StateCache, ValueStore
from state_ops.keyed.ttl import Expiry, decoded_table, encoded, visible
from state_ops.schema.descriptors import LIST, VALUE_STATE, collections_of
from state_ops.schema.python_rows import Row, RowReader, as_stored, beside, columns, copied, tuples, typed
from state_ops.schema.row_codec import encode_rows
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema

OpenCache = Callable[[ValueStore[Row], StateSchema], "StateCache[Row] | None"]
"""Gives the cache above a store of rows of a schema, or none."""


def no_cache(store: ValueStore[Row], schema: StateSchema) -> None:
    """Open no cache: the `OpenCache` for a pipeline that configures none."""


def row_store(backend: Any, schema: StateSchema, where: str, expiry: Expiry | None = None) -> ValueStore[Row]:
    """Return the store of a schema's rows in a backend.

    Rows are tuples of the fields that an author declared; a row that has expired is None.
    """
    fields = visible(schema)

    def encode(rows: Sequence[Row]) -> list[bytes]:
        table = columns(fields, rows, lambda number: f"row {number}", where)
        return encode_rows(schema, table) if expiry is None else encoded(schema, frames.from_arrow(table), expiry)

    def decode(values: Sequence[bytes]) -> list[Row | None]:
        rows, alive = decoded_table(schema, values, expiry)
        return [row if lives else None for row, lives in zip(tuples(rows), alive.tolist(), strict=True)]

    return ValueStore(backend, encode, decode)


class KeyState:
    """The state of one key, which a per-key function gets.

    `get`, `update` and `clear` are about the typed row. Lists and maps are attributes of their names, and `timers` has
    the timers.

    Example:
        >>> from weir import Epoch, KeyState, MapOf, State, files, stage, testing
        >>> class Customer(State):
        ...     orders: int = 0
        ...     spent: MapOf[str, float]
        >>> @stage(
        ...     "customers",
        ...     source=files("{landing}/*.parquet"),
        ...     key="customer",
        ...     state=Customer,
        ...     per_key=True,
        ...     output={"customer": str, "orders": int},
        ... )
        ... def customers(customer: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict] | None:
        ...     total = state.get()
        ...     total.orders += len(rows)
        ...     state.update(total)
        ...     for row in rows:
        ...         state.spent[row["shop"]] = row["price"]
        ...     return [{"customer": customer, "orders": total.orders}]
        >>> run = testing.run(customers)
        >>> run.epoch([{"customer": "ann", "shop": "food", "price": 3.5}]).to_dicts()
        [{'customer': 'ann', 'orders': 1}]
        >>> run.state["ann"]
        Customer(orders=1, spent={'food': 3.5})
    """

    timers: KeyTimers

    def __init__(self, states: KeyStates) -> None:
        self._states = states
        self.timers = states.timers
        # As attributes they cost a tenth of a call to __getattr__. What the class has comes first, as it does there.
        taken = dir(self)
        self.__dict__.update({name: part for name, part in states.collections.items() if name not in taken})

    def get(self) -> State:
        """Return the key's row, an instance of the stage's State class; with the class's defaults where the key has
        none.

        The instance is the caller's own: only `update` keeps changes to it. Its lists and maps are empty; they are
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

    Args:
        schema: Of the rows in the backend.
        cache: Above the rows, if there is one; it does not go with a TTL.
    """

    def __init__(self, state: type[State], schema: StateSchema, where: str, cache: StateCache[Row] | None) -> None:
        self._state, self._where, self._cache = state, where, cache
        self._fields = visible(schema)
        self._names = [field.name for field in self._fields]
        self._reader = RowReader(self._fields, where)
        self._plain = not any(pa.types.is_nested(field.type) for field in self._fields)
        self._empty = [(declared.name, list if declared.kind == LIST else dict) for declared in collections_of(state)]
        self.collections: dict[str, KeyList | KeyMap] = {
            declared.name: (KeyList if declared.kind == LIST else KeyMap)(declared, where)
            for declared in collections_of(state)
        }
        self.timers = KeyTimers(where)
        self._at = 0

    def begin(self, handle: KeyedState, keys: Sequence[Any]) -> None:
        """Start a batch.

        Args:
            handle: Of its keys, in the order of `keys`, which are these keys as people read them.
        """
        self._handle, self._keys = handle, keys
        self._frame = handle.batch.keys
        self._rows: list[Row | None] | None = None
        self._changed: dict[int, Row | None] = {}
        for collection in self.collections.values():
            collection.begin(handle, self._frame, keys)
        self.timers.begin(handle, self._frame, keys)

    def at(self, index: int) -> None:
        """Make the batch's key of this number the current one."""
        self._at = index
        for handle in (*self.collections.values(), self.timers):
            handle.index = index

    def end(self) -> None:
        """Hand what the calls changed to the cache and the handle, which writes it."""
        changed = {index: row for index, row in self._changed.items() if row is not None}
        kept, rows = list(changed), list(changed.values())
        gone = [index for index, row in self._changed.items() if row is None]
        table = columns(self._fields, rows, lambda number: f"the key {self._keys[kept[number]]!r}", self._where)
        if self._cache is not None:
            # A hit gives the very value that a miss would: 1.0 in an int field becomes 1.
            names = self._encoded(kept + gone)
            self._cache.update_many(
                dict(zip(names, [*as_stored(table, self._fields, rows), *[None] * len(gone)], strict=True))
            )
        else:
            if kept:
                self._handle.put(beside(self._frame, kept, table))
            if gone:
                self._handle.delete(self._frame[gone])
        for handle in (*self.collections.values(), self.timers):
            handle.end()

    # -- for the current key

    def get(self) -> State:
        if not self._fields:
            return self._state()
        row = self._changed[self._at] if self._at in self._changed else self._loaded()[self._at]
        if row is None:
            return self._state()
        if self._at in self._changed:
            row = self._reader.read(row, lambda: f"the key {self._keys[self._at]!r}")
        if not self._plain:
            return self._state(**{name: copied(value) for name, value in zip(self._names, row, strict=True)})
        instance = self._state.__new__(self._state)
        instance.__dict__.update(zip(self._names, row, strict=True))
        for name, empty in self._empty:
            instance.__dict__[name] = empty()
        return instance

    def set(self, value: State) -> None:
        if type(value) is not self._state:
            raise StageError(
                f"state.update was given {value!r:.200} for the key {self._keys[self._at]!r}.",
                where=self._where,
                next=f"Give an instance of {self._state.__name__}.",
            )
        for name in self.collections:
            if getattr(value, name):
                raise StageError(
                    f"state.update was given something in {name!r} for the key {self._keys[self._at]!r}.",
                    where=self._where,
                    next=f"Lists and maps are changed where they are: state.{name}.",
                )
        if not self._fields:
            return
        row = tuple([getattr(value, name) for name in self._names])
        self._changed[self._at] = row if self._plain else tuple(map(copied, row))

    def forget(self) -> None:
        self._changed[self._at] = None

    def collection(self, name: str) -> KeyList | KeyMap:
        if name not in self.collections:
            raise StageError(
                f"The state has no list or map {name!r}.",
                where=self._where,
                next=f"Its lists and maps are: {', '.join(self.collections) or 'none'}. Fields are those of "
                "state.get().",
            )
        return self.collections[name]

    # -- how

    def _loaded(self) -> list[Row | None]:
        """Return the rows of all keys of the batch, read when the first of them is asked for."""
        if self._rows is None:
            if self._cache is not None:
                self._rows = self._cache.get_many(self._encoded(None))
            else:
                self._rows = list(tuples(typed(self._handle.get(self._frame), self._fields)))
        return self._rows

    def _encoded(self, indices: list[int] | None) -> list[bytes]:
        return self._handle.batch.encoded(VALUE_STATE, None if indices is None else np.array(indices, np.int64))
