"""Reads the state of the keys of some key groups as tables: rows with their lists and maps beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.list_state import scan_list
from state_ops.keyed.map_state import scan_map
from state_ops.keyed.ttl import Expiry, visible
from state_ops.keyed.value_state import scan_values
from state_ops.schema.descriptors import LIST, Collection
from state_ops.schema.state_schema import StateSchema


def scan_state(
    backend: Backend,
    schema: StateSchema,
    collections: Sequence[Collection],
    keys: pa.Schema,
    groups: range,
    expiry: Expiry | None = None,
) -> Iterator[pa.Table]:
    """Yield a table a key group, in key order: key columns, fields, then a column for each list and map.

    A list is a list of its elements, a map a list of structs with the map's key first. A key with elements but no row
    has nulls for its fields.
    """
    if not collections:
        yield from scan_values(backend, schema, keys, groups, expiry)
        return
    for group in groups:
        only = range(group, group + 1)
        rows = list(scan_values(backend, schema, keys, only, expiry))
        empty = pa.schema([*keys, *[(field.name, field.type) for field in visible(schema)]]).empty_table()
        whole = frames.from_arrow(pa.concat_tables(rows) if rows else empty)
        for declared in collections:
            scan = scan_list if declared.kind == LIST else scan_map
            for owners, elements in scan(backend, declared, keys, only, expiry):
                gathered = _gathered(declared, frames.from_arrow(owners), frames.from_arrow(elements))
                whole = whole.join(gathered, on=keys.names, how="full", coalesce=True)
            if declared.name not in whole.columns:
                whole = whole.with_columns(pl.lit(None).alias(declared.name))
        if len(whole):
            yield frames.arrow(whole.sort(keys.names))


def _gathered(declared: Collection, owners: pl.DataFrame, elements: pl.DataFrame) -> pl.DataFrame:
    """Return a row a key, with its elements as a list. owners: the key of each element."""
    plain = declared.kind == LIST and declared.row is None and declared.columns == (declared.name,)
    element = elements[declared.name] if plain else elements.select(declared.columns).to_struct(declared.name)
    return owners.with_columns(element).group_by(owners.columns, maintain_order=True).agg(declared.name)
