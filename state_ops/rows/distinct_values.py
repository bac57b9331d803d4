"""The values that `count_distinct` has counted, an entry for each key and value: never a set in memory or in one value.

    running aggregates    group | MAP_STATE | tag | key | value  ->  seen    the map `<name>__values` of each key
    windows               group | WINDOW_VALUES | window end | tag | key | value  ->  seen    they go with the window

What an epoch has of values are lists in its partials, each value once. On their way into state they become the number
of those that are new, which is added to the count, so that a count is read without its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.rows.aggregates import Agg
from state_ops.rows.row_store import RowStore
from state_ops.rows.sketches import DISTINCT, QUANTILE, sketched
from state_ops.schema.descriptors import GROUP, MAP, MAP_STATE, WINDOW_VALUES, Collection, checked, collection
from state_ops.schema.key_codec import encode_int64, group_prefix
from state_ops.schema.state_schema import Field

_TAG, _VALUE, _ROW = "__weir_tag", "__weir_value", "__weir_row"
_PAIRS = 500_000  # at a time
_DELETED = 50_000


def collections(
    aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema, fields: Sequence[str]
) -> tuple[Collection, ...]:
    """Return the values as maps of a key, from each value to true.

    Args:
        aggregates: Of which those that count distinct values have one.
        rows: The columns of the input.
        fields: Names that are taken in the state.

    Raises:
        PipelineError: Names clash.
    """
    maps = []
    for name, agg in aggregates:
        if agg.kind == "count_distinct":
            value = Field(f"{name}__values", pa.bool_(), False, True)
            maps.append(collection(value.name, MAP, agg.value_type(rows), value, None))
    return checked(tuple(maps), tuple(fields))


class DistinctValues:
    """The values of one stage's aggregates in one subtask and epoch."""

    def __init__(
        self,
        aggregates: Sequence[tuple[str, Agg]],
        kept: Sequence[Collection],
        backend: Backend,
        keys: pa.Schema,
        window: str | None = None,
    ) -> None:
        """Begin an epoch.

        Args:
            kept: The maps of `collections`, with the types that are stored.
            keys: The key columns.
            window: The column with the end of a row's window, if each window counts for itself.
        """
        self._backend = backend
        ends = [] if window is None else [(window, pa.int64())]
        self._by = [*([] if window is None else [window]), GROUP, *keys.names]
        state = MAP_STATE if window is None else WINDOW_VALUES
        self._sketches = [(name, agg.kind) for name, agg in aggregates if agg.kind in (DISTINCT, QUANTILE)]
        names = [name for name, agg in aggregates if agg.kind == "count_distinct"]
        self._stores = {
            name: (
                declared.tag,
                RowStore(
                    backend,
                    declared.schema,
                    pa.schema([*ends, (_TAG, pa.int32()), *keys, (_VALUE, declared.key)]),
                    state,
                ),
            )
            for name, declared in zip(names, kept, strict=True)
        }

    def __len__(self) -> int:
        """Return the number of aggregates that keep values."""
        return len(self._stores) + len(self._sketches)

    def counted(self, partials: pl.DataFrame, *, look: bool = True, keep: bool = True) -> pl.DataFrame:
        """Return partials with the number of values that are new to their keys, or with their sketch, in place of the
        values.

        Args:
            partials: One row a key, or a key and window.
            look: State may have values of these keys.
            keep: From now on they are no longer new.
        """
        for name, (tag, store) in self._stores.items():
            numbers = np.zeros(len(partials), np.int64)
            pairs = partials.select(*self._by, pl.col(name).alias(_VALUE)).with_row_index(_ROW)
            pairs = pairs.explode(_VALUE).drop_nulls(_VALUE).with_columns(pl.lit(tag, pl.Int32).alias(_TAG))
            for values in pairs.iter_slices(_PAIRS):
                fresh = values.filter(~pl.Series(store.get(values)[1])) if look else values
                numbers += np.bincount(fresh[_ROW].to_numpy(), minlength=len(partials))
                if keep:
                    true = np.ones(len(fresh), bool)
                    store.put(fresh, pl.DataFrame({f"{name}__values": true}), true)
            partials = partials.with_columns(pl.Series(name, numbers))
        return partials.with_columns(sketched(kind, partials[name]) for name, kind in self._sketches)

    def flush(self) -> None:
        """Write what is pending to the backend."""
        for _, store in self._stores.values():
            store.flush()

    def barrier(self) -> None:
        """Write the epoch's values, which are complete."""
        for _, store in self._stores.values():
            store.barrier()

    def forget(self, groups: range, before: int | None, upto: int | None) -> None:
        """Delete the values of windows that have closed, as far as they are in the backend.

        Args:
            groups: Key groups.
            before: Of windows that end by then there are none left. None: there may be some of any.
            upto: They end by then. None: all windows.
        """
        for group in groups if self._stores else ():
            start, end = group_prefix(group, WINDOW_VALUES), group_prefix(group, WINDOW_VALUES + 1)
            if upto is not None:
                end = start + encode_int64(upto + 1)
            if before is not None:
                start += encode_int64(before + 1)
            while gone := _first(self._backend.scan(start, end)):
                self._backend.write([], gone)
                start = gone[-1]  # what has been deleted is slow to pass over


def _first(entries: Iterator[tuple[bytes, bytes]]) -> list[bytes]:
    return [key for key, _ in islice(entries, _DELETED)]
