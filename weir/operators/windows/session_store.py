"""The sessions of a subtask that are open: a frame with one row for each, and where they are kept.

    resident   all of them, where they fit and pay: a file beside the local snapshot (`state_ops.rows.resident_table`)
    backend    the truth: a value row per key, the list of its open sessions, a struct of bounds and fields each; and an
               index of keys by the end of their first session

Frames are sorted by the hash of the key, then by start, so that sessions of one key lie together. The hash only sorts
and says which keys may be alike: that they are is seen by the keys themselves (`sorted_by_key`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.columns import contiguous
from state_ops.backends.base import Backend, SortedRun
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE, scan_values
from state_ops.rows import key_order, time_index
from state_ops.rows.hash_table import HashedTable
from state_ops.rows.resident_table import SCAN_PER_GET, Residence
from state_ops.schema.key_groups import xxhash64
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema
from weir.operators.windows import END, START

SESSIONS = "sessions"  # the one field of a value row
HASH = "__weir_hash"
_MOST_ENTRIES = 4  # that are counted for a session: its value and its place in the index, each twice at most
_WRITE_KEYS = 400_000  # at a time: as entries, sessions take several times as much memory


class OpenSessions:
    """The open sessions of one subtask in one epoch. `residence` loads and keeps a resident table; None keeps none."""

    def __init__(
        self, backend: Backend, state: StateSchema, keys: pa.Schema, groups: range, residence: Residence | None
    ) -> None:
        self._backend, self._state, self._keys, self._groups = backend, state, keys, groups
        self._key = (GROUP, *keys.names)
        self._session: pa.StructType = state.arrow.field(SESSIONS).type.value_type
        self.types: dict[str, pl.DataType] = {GROUP: pl.UInt16(), **dict(no_sessions(keys, state).schema)}
        self.empty = pl.DataFrame(schema={HASH: pl.UInt64(), **self.types})
        self._residence = residence
        self._table: pl.DataFrame | None = None
        self._begun = self._scan_tried = False
        self._touched = 0

    def table(self, asked: pl.DataFrame) -> pl.DataFrame | None:
        """Return all open sessions, if they are resident, or if reading all costs about as much as a get for each that
        is asked for."""
        residence = self._residence
        if residence is None or not residence.most_bytes:
            return None
        if not self._begun:
            self._begun = True
            stored = residence.load(str(VALUE_STATE), self._shape, self.empty.drop(HASH), self._key)
            self._table = None if stored is None else hashed(stored.rows, stored.hashes)
        if self._table is None and not self._scan_tried:
            entries = self._backend.approximate_entries()
            may_fit = asked.estimated_size() * entries <= residence.most_bytes * _MOST_ENTRIES * len(asked)
            if may_fit and len(asked) * SCAN_PER_GET >= entries:
                self._scan_tried = True
                self._table = self._scanned(residence.most_bytes)
        return self._table

    def ends(self) -> pl.Series | None:
        """Return int64[n], the ends of the open sessions; None if they are not resident."""
        return None if self._table is None else self._table[END]

    def of(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the open sessions of keys, which are distinct and have their hashes, from the backend."""
        order, names = key_order.encoded(self._arrays(keys), keys[GROUP].to_numpy(), VALUE_STATE)
        values = self._backend.multi_get(names)
        present = np.fromiter((value is not None for value in values), bool, len(values))
        rows = frames.from_arrow(decode_rows(self._state, [value for value in values if value is not None]))
        sessions = opened(pl.concat([keys[order[present]], rows], how="horizontal"))
        return sorted_by_key(sessions.select(self.empty.columns), self._key, START)

    def due(self, upto: int | None, most: int) -> Iterator[pl.DataFrame]:
        """Yield the open sessions of keys of which one ends by then; None: of all keys. At most so many keys at a time,
        whose sessions that have ended must be gone before the next are asked for."""
        for entries in time_index.due(self._backend, self._groups, upto, most):
            groups, owners = time_index.owners(entries, self._keys)
            keys = frames.from_arrow(owners).with_columns(pl.Series(GROUP, groups))
            yield self.of(hashed(keys, self._hashes(keys)))

    def replace(self, before: pl.DataFrame, after: pl.DataFrame, changed: np.ndarray) -> None:
        """Store what is open now.

        Args:
            before: All sessions of some keys, as they are stored.
            after: All open sessions of these keys, and of others of which none are stored.
            changed: Ascending hashes of the keys whose sessions may differ.
        """
        for at in range(0, len(changed), _WRITE_KEYS):
            some = changed[at : at + _WRITE_KEYS]
            self._write(before.filter(among(hashes(before), some)), after.filter(among(hashes(after), some)))
        self._touched += len(changed)
        if self._table is not None and self._residence is not None:
            self._table = after if after.estimated_size() <= self._residence.most_bytes else None

    def barrier(self) -> None:
        """Leave the resident table to the next epoch where that pays."""
        if self._table is not None and self._touched and self._residence is not None:
            table = HashedTable(hashes(self._table), self._table.drop(HASH), self._key)
            self._residence.save(str(VALUE_STATE), self._shape, table, self._touched)

    # -- how

    @property
    def _shape(self) -> str:
        # A table of other key groups, from before a rescale, has sessions that are not this subtask's to close.
        return f"sessions {self._groups} {self._state.schema_id.hex()} {self._keys}"

    def _scanned(self, most_bytes: int) -> pl.DataFrame | None:
        """Return all sessions that are stored; None if they are larger than that."""
        tables = [self.empty]
        size = 0
        for group in self._groups:
            for stored in scan_values(self._backend, self._state, self._keys, range(group, group + 1)):
                rows = opened(frames.from_arrow(stored)).with_columns(pl.lit(group, pl.UInt16).alias(GROUP))
                tables.append(hashed(rows, self._hashes(rows)).select(self.empty.columns))
                size += int(tables[-1].estimated_size())
                if size > most_bytes:
                    return None
        return sorted_by_key(pl.concat(tables), self._key, START)

    def _write(self, before: pl.DataFrame, after: pl.DataFrame) -> None:
        """Store sessions of keys in place of those that are stored."""
        old, new = before.filter(~repeats(before, self._key)), after.filter(~repeats(after, self._key))
        at = _places(hashes(old), hashes(new))  # of each old key, where it is among the new ones
        kept = at >= 0
        stays = kept.copy()  # in the index, where the first session ends when it did
        stays[kept] = old[END].to_numpy()[kept] == new[END].to_numpy()[at[kept]]
        indexed = np.ones(len(new), bool)
        indexed[at[stays]] = False
        index = self._index(new.filter(indexed))
        run = key_order.merged(self._values(after, new), SortedRun(index, [b""] * len(index)))
        gone = old.filter(~kept)
        deletes = key_order.ascending(self._arrays(gone), gone[GROUP].to_numpy(), VALUE_STATE)[1]
        self._backend.write(run, sorted(deletes + self._index(old.filter(~stays))))

    def _values(self, sessions: pl.DataFrame, keys: pl.DataFrame) -> SortedRun:
        """Keys and values of the rows of some keys. keys: the first session of each."""
        order, names = key_order.ascending(self._arrays(keys), keys[GROUP].to_numpy(), VALUE_STATE)
        first = np.flatnonzero(~repeats(sessions, self._key))
        number = np.diff(first, append=len(sessions))[order]
        ends = np.cumsum(number)
        rows = np.repeat(first[order] - ends + number, number) + np.arange(len(sessions))
        fields = frames.stored(sessions[rows].select(self._session.names), pa.schema(list(self._session)))
        structs = pa.StructArray.from_arrays(
            [contiguous(field) for field in fields.columns], fields=list(self._session)
        )
        offsets = pa.array(np.append(0, ends).astype(np.int32))
        lists = pa.ListArray.from_arrays(offsets, structs, type=self._state.arrow.field(SESSIONS).type)
        table = pa.table([lists], schema=self._state.arrow)
        return SortedRun(names, encode_rows(self._state, table))

    def _index(self, keys: pl.DataFrame) -> list[bytes]:
        """Entries of keys in the index, ascending. keys: the first session of each."""
        groups, ends = keys[GROUP].to_numpy(), pa.array(keys[END].to_numpy(), pa.int64())
        return key_order.ascending([ends, *self._arrays(keys)], groups, time_index.MOMENTS)[1]

    def _hashes(self, rows: pl.DataFrame) -> np.ndarray:
        return xxhash64(self._arrays(rows))

    def _arrays(self, rows: pl.DataFrame) -> list[pa.Array]:
        return [contiguous(column) for column in frames.arrow(rows.select(self._keys.names)).cast(self._keys).columns]


def hashes(sessions: pl.DataFrame) -> np.ndarray:
    """Return uint64[n], ascending: the hashes of their keys."""
    return sessions[HASH].to_numpy()


def hashed(rows: pl.DataFrame, keys: np.ndarray) -> pl.DataFrame:
    """Return rows with the hashes of their keys, uint64[n], as the first column."""
    return pl.DataFrame([pl.Series(HASH, keys), *rows.get_columns()])


def among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return bool[n], which values are among others in their order."""
    if not len(ascending):
        return np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    alike: np.ndarray = ascending[places] == values
    return alike


def sorted_by_key(rows: pl.DataFrame, key: Sequence[str], *then: str) -> pl.DataFrame:
    """Return rows sorted by the hash of their key, then by other columns.

    Rows of one key lie together even if two keys have one hash.
    """
    ordered = rows.sort(HASH, *then)
    keys = hashes(ordered)
    if np.count_nonzero(keys[1:] == keys[:-1]) == np.count_nonzero(repeats(ordered, key)):
        return ordered
    return rows.sort(HASH, *key, *then)


def repeats(rows: pl.DataFrame, key: Sequence[str]) -> np.ndarray:
    """Return bool[n], which rows have the key of the row before. rows: those of one key lie together."""
    keys = hashes(rows)
    alike = np.zeros(len(rows), bool)
    alike[1:] = keys[1:] == keys[:-1]
    at = np.flatnonzero(alike)
    for name in key if len(at) else ():
        alike[at] &= (rows[name].gather(at) == rows[name].gather(at - 1)).to_numpy()
    return alike


def _places(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return int64[n], the place of each key among others, by their ascending hashes; -1: it is not there.

    If two keys have one hash, all places are -1.
    """
    if (keys[1:] == keys[:-1]).any() or (others[1:] == others[:-1]).any():
        return np.full(len(keys), -1)
    return np.where(among(keys, others), np.searchsorted(others, keys), -1)


def opened(rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row for each session of the lists."""
    return rows.filter(pl.col(SESSIONS).is_not_null()).explode(SESSIONS).unnest(SESSIONS)


def no_sessions(keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
    """Return the columns of sessions."""
    columns = pa.schema([(field.name, field.type) for field in [*keys, *state.arrow]])
    return opened(frames.from_arrow(columns.empty_table()))
