"""State as instances of its State class, by key: for tests of stages, which are small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.operators import Shapes
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, KeyedState, scan_values
from state_ops.keyed.list_state import scan_list
from state_ops.keyed.map_state import scan_map
from state_ops.keyed.ttl import Expiry, visible
from state_ops.schema.descriptors import LIST, Collection
from state_ops.schema.state_class import State


def write(
    backend: Backend, fixed: Shapes, keys: Sequence[pa.Array], groups: np.ndarray, instances: Sequence[State]
) -> None:
    """Keep instances for their keys. keys: a column for each key column; groups: uint16[n]."""
    keyed = frames.from_arrow(pa.table(list(keys), schema=fixed.keys))
    state = KeyedState(backend, fixed.state, fixed.keys, "testing.run", collections=fixed.collections)
    state.begin(keyed.with_columns(pl.Series(GROUP, groups.astype(np.int32))))
    fields = pa.schema([(field.name, field.type) for field in visible(fixed.state)])
    if len(fields):
        rows = pa.Table.from_pylist([instance.as_dict() for instance in instances], fields)
        state.put(pl.concat([keyed, frames.from_arrow(rows)], how="horizontal"))
    for declared in fixed.collections:
        kept = [getattr(instance, declared.name) for instance in instances]
        owners = [number for number, elements in enumerate(kept) for _ in elements]
        columns = [(field.name, field.type) for field in declared.fields]
        handle = getattr(state, declared.name)
        if declared.kind == LIST:
            rows = pa.Table.from_pylist(
                [_row(declared, one) for elements in kept for one in elements], pa.schema(columns)
            )
            handle.append(pl.concat([keyed[owners], frames.from_arrow(rows)], how="horizontal"))
            continue
        entries = [
            {declared.key_column: key, **_row(declared, one)} for elements in kept for key, one in elements.items()
        ]
        rows = pa.Table.from_pylist(entries, pa.schema([(declared.key_column, declared.key), *columns]))
        handle.put(pl.concat([keyed[owners], frames.from_arrow(rows)], how="horizontal"))
    state.flush()
    state.barrier()


def read(backend: Backend, fixed: Shapes, groups: range, made: Any, expiry: Expiry | None) -> Mapping[Any, State]:
    """The instances by key, a tuple where the key has several columns, as `made`, their class."""
    found: dict[Any, State] = {}
    for table in scan_values(backend, fixed.state, fixed.keys, groups, expiry):
        for key, row in _by_key(table, fixed.keys.names):
            found[key] = made(**row)
    for declared in fixed.collections:
        scan = scan_list if declared.kind == LIST else scan_map
        for table in scan(backend, declared, fixed.keys, groups, expiry):
            for key, row in _by_key(table, fixed.keys.names):
                kept = getattr(found.setdefault(key, made()), declared.name)
                if declared.kind == LIST:
                    kept.append(_element(declared, row))
                else:
                    entry = row.pop(declared.key_column)
                    kept[entry] = _element(declared, row)
    return found


def _by_key(table: pa.Table, names: Sequence[str]) -> list[tuple[Any, dict[str, Any]]]:
    rows = table.to_pylist()
    keys = [tuple(row.pop(name) for name in names) for row in rows]
    return [(key if len(key) > 1 else key[0], row) for key, row in zip(keys, rows, strict=True)]


def _row(declared: Collection, element: Any) -> dict[str, Any]:
    return element.as_dict() if declared.row is not None else {declared.name: element}


def _element(declared: Collection, row: dict[str, Any]) -> Any:
    return declared.row(**row) if declared.row is not None else row[declared.name]
