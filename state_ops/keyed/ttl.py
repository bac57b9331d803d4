"""Time to live: state that was not touched for a while is never seen again, and swept away bit by bit.

Every value, list element and map entry carries the processing time (`epoch.now`) at which it was last touched, in a
hidden field of its schema. It is expired when that is `ttl` or longer ago. Expiry is judged when something is read, by
the epoch's fixed clock, so a replay sees what the first try saw; when an expired entry is deleted does not matter to
anybody.

That holds for a TTL that changes too, because a checkpoint records what its stage has forgotten (`Forgotten`). What one
TTL has
let expire stays expired when the next one is longer, or when there is none any more: such a stage keeps the hidden
field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.records.operator_stats import OperatorStats
from state_ops.rows.row_store import defaults
from state_ops.schema.descriptors import LIST_ENDS, LIST_STATE, MAP_STATE, VALUE_STATE
from state_ops.schema.key_codec import group_prefix
from state_ops.schema.row_codec import decode_rows, encode_rows, stored_numbers
from state_ops.schema.state_schema import TOUCHED, Field, StateSchema

WRITE, READ_AND_WRITE = "write", "read_and_write"


@dataclass(frozen=True, slots=True)
class Ttl:
    """The time to live of a stage's state.

    Attributes:
        micros: How long state lives after it was touched, in microseconds.
        on_read: Whether reading it touches it too.
    """

    micros: int
    on_read: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The state that a stage has forgotten for good through its TTL, past or present. A checkpoint records it for each
    stage.

    Attributes:
        upto: State that was last touched at this moment or before it is expired, whatever the TTL is now. Microseconds
            since 1970 UTC; None: nothing is.
        unstamped: When state without a stamp, which is older than the first TTL, counts as touched: at the first epoch
            that had one. Microseconds since 1970 UTC; None: no epoch has had one yet.
    """

    upto: int | None = None
    unstamped: int | None = None


def forgotten_after(before: Forgotten | None, ttl: Ttl | None, now: int) -> Forgotten | None:
    """Return the record of state that a stage has forgotten once it has applied an epoch.

    It only grows, as processing time does.

    Args:
        before: The record before that epoch; None: the stage never had a TTL.
        ttl: Its TTL in that epoch; None: it has none.
        now: The epoch's processing time, in microseconds since 1970 UTC.

    Returns:
        None for a stage that has never had a TTL.
    """
    if ttl is None:
        return before
    record = before or Forgotten()
    oldest = now - ttl.micros
    upto = oldest if record.upto is None else max(record.upto, oldest)
    return Forgotten(upto, now if record.unstamped is None else record.unstamped)


def forgotten_in(stats: OperatorStats, epoch_now: int) -> Forgotten | None:
    """Return the record of state that a stage had forgotten by a checkpoint.

    Args:
        stats: The checkpoint's record of the stage.
        epoch_now: The checkpoint's processing time, in microseconds since 1970 UTC: rows of earlier releases say what
            is forgotten by their TTL alone.
    """
    if "forgotten" in stats.names:
        return Forgotten(**stats.forgotten) if stats.forgotten else None
    if not stats.ttl:
        return None
    applied = stats.waiting[0]["now"] if stats.waiting else epoch_now  # what waits is applied by its own epoch's clock
    return Forgotten(applied - Ttl(**stats.ttl).micros)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The expiry of state at one moment of processing time.

    Attributes:
        ttl: The TTL of that moment; None: there is none any more.
        now: The moment, in microseconds since 1970 UTC.
        before: The record of state that was forgotten before it.
    """

    ttl: Ttl | None
    now: int
    before: Forgotten | None = None

    def alive(self, touched: pl.Series) -> np.ndarray:
        """Return bool[n] of stamps: the entries that live."""
        forgotten = forgotten_after(self.before, self.ttl, self.now) or Forgotten()
        if forgotten.upto is None:
            return np.ones(len(touched), bool)
        unstamped = self.now if forgotten.unstamped is None else forgotten.unstamped
        return np.asarray(touched.fill_null(unstamped).to_numpy() > forgotten.upto)

    def touched_by_reading(self, touched: pl.Series) -> np.ndarray:
        """Return bool[n] of the stamps of entries that the author has read: those that get a new stamp for that."""
        if self.ttl is None or not self.ttl.on_read:
            return np.zeros(len(touched), bool)
        return np.asarray(touched.ne_missing(self.now).to_numpy())


def expiry_of(schema: StateSchema, ttl: Ttl | None, now: int, before: Forgotten | None) -> Expiry | None:
    """Return the expiry of rows of a schema; None if rows have no stamp, so that nothing ever expires."""
    return Expiry(ttl, now, before) if TOUCHED in schema.arrow.names else None


def stamped(schema: StateSchema) -> StateSchema:
    """Return the schema with the hidden field, where it has none yet."""
    if TOUCHED in schema.arrow.names:
        return schema
    return replace(schema, fields=(*schema.fields, Field(TOUCHED, pa.int64(), True, None)))


def visible(schema: StateSchema) -> tuple[Field, ...]:
    """Return the fields that an author declared."""
    return tuple(field for field in schema.fields if field.name != TOUCHED)


def decoded(schema: StateSchema, values: Sequence[bytes], expiry: Expiry | None) -> tuple[pl.DataFrame, np.ndarray]:
    """Return rows of values with the hidden field, and bool[n]: which of them live."""
    rows = decode_rows(schema, values)
    return frames.from_arrow(rows), _alive(rows, expiry)


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
    """Return rows of values without the hidden field, and bool[n]: which of them live."""
    rows = decode_rows(schema, values)
    return rows.select([field.name for field in visible(schema)]), _alive(rows, expiry)


def _alive(rows: pa.Table, expiry: Expiry | None) -> np.ndarray:
    if expiry is None or TOUCHED not in rows.column_names:
        return np.ones(rows.num_rows, bool)
    return expiry.alive(pl.Series(pl.from_arrow(rows.column(TOUCHED))))


def encoded(schema: StateSchema, rows: pl.DataFrame, expiry: Expiry | None) -> list[bytes]:
    """Values of rows, touched now; without an expiry, when the first epoch with one sees them."""
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
    """Look at the next entries from `position`, at most `most`, and delete those that are expired.

    Returns where to go on in the next epoch; None: at the beginning. Whoever starts elsewhere looks at some entries
    earlier and at some later, nothing else.

    Args:
        schemas: By what stands between key group and key: kind, or kind and tag.
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
    deletes: list[bytes] = []
    for sort, numbers in sorts.items():
        schema = schemas.get(sort)
        if schema is None:
            continue
        touched = _stamps(schema, [entries[number][1] for number in numbers])
        deletes += [entries[numbers[i]][0] for i in np.flatnonzero(~expiry.alive(touched)).tolist()]
    if deletes:
        backend.write([], deletes)
    return entries[-1][0] + b"\0" if len(entries) == most else None


def _stamps(schema: StateSchema, values: Sequence[bytes]) -> pl.Series:
    """Return the stamps of rows. Those that were written with this very schema are not decoded for that."""
    numbers = stored_numbers(schema, values, TOUCHED)
    if numbers is None:
        return pl.Series(pl.from_arrow(decode_rows(schema, values).column(TOUCHED)))
    stamps, nulls = numbers
    return pl.Series(np.where(nulls, 0, stamps)).zip_with(pl.Series(~nulls), pl.Series([None], dtype=pl.Int64))
