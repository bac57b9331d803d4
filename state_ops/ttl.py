"""Time to live: state that was not touched for a while is never seen again, and swept away bit by bit.

Every value, list element and map entry carries the processing time (`epoch.now`) at which it was last touched, in a hidden
field of its schema. It is expired when that is `ttl` or longer ago. Expiry is judged when something is read, by the
epoch's fixed clock, so a replay sees what the first try saw; when an expired entry is deleted does not matter to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops import frames
from state_ops.backends.base import Backend
from state_ops.codec import decode_rows, encode_rows, stored_numbers
from state_ops.keys import group_prefix
from state_ops.kinds import LIST_ENDS, LIST_STATE, MAP_STATE, VALUE_STATE
from state_ops.rows import defaults
from state_ops.schema import TOUCHED, Field, StateSchema

WRITE, READ_AND_WRITE = "write", "read_and_write"


@dataclass(frozen=True, slots=True)
class Ttl:
    """micros: how long state lives after it was touched, in microseconds. on_read: whether reading it touches it too."""

    micros: int
    on_read: bool = False


@dataclass(frozen=True, slots=True)
class Expiry:
    """A TTL at one moment of processing time, `now`, in microseconds since 1970 UTC."""

    ttl: Ttl
    now: int

    def alive(self, touched: pl.Series) -> np.ndarray:
        """bool[n] of stamps. Without one, an entry is older than the TTL itself: it counts as touched now."""
        stamps = touched.fill_null(self.now).to_numpy()
        return np.asarray(stamps > self.now - self.ttl.micros)

    def stale(self, touched: pl.Series, read: bool) -> np.ndarray:
        """bool[n]: which living entries must be written again with a new stamp after they were seen (read: by the author)."""
        if read and self.ttl.on_read:
            return np.asarray((touched.is_null() | (touched != self.now)).to_numpy())
        return np.asarray(touched.is_null().to_numpy())


def stamped(schema: StateSchema, ttl: Ttl | None) -> StateSchema:
    """The schema with the hidden field, if there is a TTL."""
    if ttl is None:
        return schema
    return replace(schema, fields=(*schema.fields, Field(TOUCHED, pa.int64(), True, None)))


def visible(schema: StateSchema) -> tuple[Field, ...]:
    """The fields that an author declared."""
    return tuple(field for field in schema.fields if field.name != TOUCHED)


def decoded(schema: StateSchema, values: Sequence[bytes], expiry: Expiry | None) -> tuple[pl.DataFrame, np.ndarray]:
    """Rows of values, hidden field included, and bool[n]: which of them live."""
    rows = decode_rows(schema, values)
    return pl.from_arrow(rows), _alive(rows, expiry)  # type: ignore[return-value]


def unexpired(
    schema: StateSchema, rows: pl.DataFrame, present: np.ndarray, expiry: Expiry | None
) -> tuple[pl.DataFrame, np.ndarray]:
    """Rows, hidden field included, and where there is one, with the defaults and no row instead of what has expired."""
    if expiry is None:
        return rows, present
    gone = present & ~expiry.alive(rows[TOUCHED])
    if not gone.any():
        return rows, present
    fresh = frames.from_arrow(defaults(schema, 1))
    return pl.concat([rows, fresh])[np.where(gone, len(rows), np.arange(len(rows)))], present & ~gone


def decoded_table(schema: StateSchema, values: Sequence[bytes], expiry: Expiry | None) -> tuple[pa.Table, np.ndarray]:
    """Rows of values without the hidden field, and bool[n]: which of them live."""
    rows = decode_rows(schema, values)
    return rows.select([field.name for field in visible(schema)]), _alive(rows, expiry)


def _alive(rows: pa.Table, expiry: Expiry | None) -> np.ndarray:
    if expiry is None or TOUCHED not in rows.column_names:
        return np.ones(rows.num_rows, bool)
    return expiry.alive(pl.Series(pl.from_arrow(rows.column(TOUCHED))))


def encoded(schema: StateSchema, rows: pl.DataFrame, expiry: Expiry | None) -> list[bytes]:
    """Values of rows, touched now; without an expiry, whenever somebody with one first sees them."""
    if expiry is not None or (TOUCHED in schema.arrow.names and TOUCHED not in rows.columns):
        rows = rows.with_columns(pl.lit(expiry.now if expiry else None, pl.Int64).alias(TOUCHED))
    return encode_rows(schema, frames.stored(rows, schema.arrow))


# -- the sweep

_KINDS = (VALUE_STATE, MAP_STATE + 1)  # from, before: what a TTL applies to stands side by side in a key group
_NAMED = (LIST_STATE, LIST_ENDS, MAP_STATE)


def sweep(
    backend: Backend,
    schemas: Mapping[bytes, StateSchema],
    groups: range,
    expiry: Expiry,
    position: bytes,
    most: int,
) -> bytes | None:
    """Look at the next entries from `position`, at most `most`: delete the expired ones, stamp those without a stamp.

    schemas: by what stands between key group and key: kind, or kind and tag. Returns where to go on in the next epoch; None:
    at the beginning. Whoever starts elsewhere looks at some entries earlier and at some later, nothing else.
    """
    entries: list[tuple[bytes, bytes]] = []
    for group in groups:
        start, end = group_prefix(group, _KINDS[0]), group_prefix(group, _KINDS[1])
        if position < end:
            entries += islice(backend.scan(max(start, position), end), most - len(entries))
        if len(entries) == most:
            break
    sorts: dict[bytes, list[int]] = {}
    for number, (key, _) in enumerate(entries):
        sorts.setdefault(key[2:7] if key[2] in _NAMED else key[2:3], []).append(number)
    puts: list[tuple[bytes, bytes]] = []
    deletes: list[bytes] = []
    for sort, numbers in sorts.items():
        schema = schemas.get(sort)
        if schema is None:
            continue
        touched = _stamps(schema, [entries[number][1] for number in numbers])
        deletes += [entries[numbers[i]][0] for i in np.flatnonzero(~expiry.alive(touched)).tolist()]
        bare = [entries[numbers[i]] for i in np.flatnonzero(touched.is_null().to_numpy()).tolist()]
        if bare:
            rows, _ = decoded(schema, [value for _, value in bare], None)
            puts += list(zip([key for key, _ in bare], encoded(schema, rows, expiry), strict=True))
    if puts or deletes:
        backend.write(puts, deletes)
    return entries[-1][0] + b"\0" if len(entries) == most else None


def _stamps(schema: StateSchema, values: Sequence[bytes]) -> pl.Series:
    """The stamps of rows. Those that were written with this very schema are not decoded for that."""
    found = stored_numbers(schema, values, TOUCHED)
    if found is None:
        return pl.Series(pl.from_arrow(decode_rows(schema, values).column(TOUCHED)))
    stamps, nulls = found
    return pl.Series(np.where(nulls, 0, stamps)).zip_with(pl.Series(~nulls), pl.Series([None], dtype=pl.Int64))
