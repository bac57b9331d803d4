"""The `state` that a stage's function gets: everything that is kept for the keys of the batch.

    state.get(rows), state.put(rows), state.lag(rows, ...), state.fold(rows, ...)    the key's typed row: see `value`
    state.recent.append(rows), state.spent.all(rows)                               lists and maps: see `lists`, `maps`
    state.timers.set(rows, after="15m")                                            see `timers`

Reads see what the batch wrote. All changes of a batch are written as one after its function returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.errors import PipelineError, StageError
from state_ops.keyed.key_batch import Convert
from state_ops.keyed.list_state import ListState, ends_schema
from state_ops.keyed.map_state import MapState
from state_ops.keyed.timers import TimerState
from state_ops.keyed.ttl import Expiry
from state_ops.keyed.value_state import ValueState, scan_values
from state_ops.rows.entry_buffer import write
from state_ops.rows.resident_table import Residence
from state_ops.schema.descriptors import (
    GROUP,
    LIST,
    LIST_ENDS,
    LIST_STATE,
    MAP_STATE,
    VALUE_STATE,
    WINDOW_STATE,
    Collection,
)
from state_ops.schema.state_schema import StateSchema

__all__ = [
    "GROUP",
    "VALUE_STATE",
    "WINDOW_STATE",
    "KeyedState",
    "ValueState",
    "check_names",
    "scan_values",
    "sorts",
]


class KeyedState(ValueState):
    """The typed row of each key, with its lists and maps as attributes of their names, and its `timers`.

    `get`, `join`, `put`, `lag`, `fold` and `delete` are about the row, as in `ValueState`.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, KeyedState, ListOf, State, agg, files, stage, testing
        >>> class Rider(State):
        ...     rides: int = 0
        ...     recent: ListOf[str]
        >>> @stage("rides", source=files("{landing}/*.parquet"), key="rider", state=Rider)
        ... def rides(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        ...     state.recent.append(rows.select("rider", recent="to"))
        ...     return state.fold(rows, rides=agg.count())
        >>> run = testing.run(rides)
        >>> run.epoch([{"rider": "ann", "to": "home"}, {"rider": "ann", "to": "work"}]).to_dicts()
        [{'rider': 'ann', 'rides': 2}]
        >>> run.state["ann"]
        Rider(rides=2, recent=['home', 'work'])
    """

    timers: TimerState

    def __init__(
        self,
        backend: Backend,
        schema: StateSchema,
        keys: pa.Schema,
        where: str,
        convert: Convert = frames.from_arrow,
        expiry: Expiry | None = None,
        *,
        collections: Sequence[Collection] = (),
        timers: TimerState | None = None,
        residence: Residence | None = None,
    ) -> None:
        """Open the state of a subtask's keys.

        Args:
            schema: The row's fields, with the hidden field of `ttl.stamped` if there is an expiry.
            collections: The lists and maps, with that field likewise.
        """
        super().__init__(backend, schema, keys, where, convert, expiry, residence)
        self._timers = timers or TimerState(backend, keys, where, now=0, epoch=0, allowed=False)
        self.timers = self._timers
        self._collections = {
            declared.name: (ListState if declared.kind == LIST else MapState)(self, declared)
            for declared in collections
        }

    def __getattr__(self, name: str) -> Any:
        collections = self.__dict__.get("_collections", {})
        if name in collections:
            return collections[name]
        if name.startswith("_"):
            raise AttributeError(name)
        raise StageError(
            f"The state has no list or map {name!r}.",
            where=self._where,
            next=f"Its lists and maps are: {', '.join(collections) or 'none'}. Fields are read with state.get and "
            "state.join.",
        )

    def begin(self, batch: pl.DataFrame) -> None:
        super().begin(batch)
        for handle in (*self._collections.values(), self._timers):
            handle.begin(self.batch)

    def flush(self) -> None:
        super().flush()
        handles = (*self._collections.values(), self._timers)
        write(self._backend, [entries for handle in handles for entries in handle.changes()])

    def clear(self, frame: Any) -> None:
        """Forget all that is kept for each row's key: its row, lists, maps and timers."""
        self.delete(frame)
        for collection in self._collections.values():
            collection.clear(frame)
        if self._timers.allowed:
            self._timers.clear(frame)


def check_names(collections: Sequence[Collection], keys: Sequence[str], where: str) -> None:
    """Raise PipelineError for a list or map whose name is taken by the handle, or whose columns are key columns."""
    for declared in collections:
        if declared.name in _TAKEN:
            raise PipelineError(
                f"The {declared.kind} {declared.name!r} would hide state.{declared.name}.",
                where=where,
                next="Rename it in the State class.",
            )
        for name in (declared.name, *declared.columns):
            if name in keys:
                raise PipelineError(
                    f"{name!r} is a key column and a column of the {declared.kind} {declared.name!r}.",
                    where=where,
                    next="Rename one of the two: rows of keys and elements have both.",
                )


_TAKEN = frozenset(name for name in dir(KeyedState) if not name.startswith("_")) | {"timers"}


def sorts(schema: StateSchema, collections: Sequence[Collection]) -> dict[bytes, StateSchema]:
    """Return the schema of every sort of entry that has rows, by what stands between its key group and its key."""
    schemas = {bytes([VALUE_STATE]): schema}
    for declared in collections:
        tag = (declared.tag + (1 << 31)).to_bytes(4, "big")
        schemas[bytes([LIST_STATE if declared.kind == LIST else MAP_STATE]) + tag] = declared.schema
        if declared.kind == LIST:
            schemas[bytes([LIST_ENDS]) + tag] = ends_schema(declared.schema)
    return schemas
