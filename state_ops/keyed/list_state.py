"""List state: the elements of a key, each an entry of its own, in the order in which they were appended.

    group | LIST_STATE | tag | key | number (int64)  ->  the element's row
    group | LIST_ENDS  | tag | key                   ->  first, next: the numbers that are taken

An append writes its elements and the two ends; what the list has already is not touched. Since the ends say which
numbers there are, elements are found by one multi-get for all keys of a batch, without a scan. An element beyond the
ends is none: it is what a TTL has forgotten and the sweep has not reached yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.errors import DamageError, StageError
from state_ops.keyed import ttl
from state_ops.keyed.handle import CollectionState, RowHandle
from state_ops.keyed.key_batch import KeyBatch
from state_ops.keyed.ttl import Expiry
from state_ops.rows.entry_buffer import Entries, of_tag
from state_ops.schema.descriptors import LIST_ENDS, LIST_STATE, Collection
from state_ops.schema.key_codec import decode_keys, last_int64
from state_ops.schema.state_schema import TOUCHED, StateSchema

_CODE, _FIRST, _NEXT = "__weir_code", "__weir_first", "__weir_next"
_MANY = 64  # numbers that are cheaper to ask for than a scan, which takes 15-20 us
_PLAIN_ENDS = StateSchema.build([("first", pa.int64(), False, 0), ("next", pa.int64(), False, 0)])
_STAMPED_ENDS = ttl.stamped(_PLAIN_ENDS)


class ListState(CollectionState):
    """The list `name` of each key: `state.<name>`."""

    def __init__(self, row: RowHandle, declared: Collection) -> None:
        super().__init__(row, declared)
        self._ends_schema, self._ends = ends_schema(declared.schema), Entries(self._backend)
        # Where there is or was a TTL, the sweep has deleted elements that the ends still know of.
        self._swept = any(TOUCHED in schema.arrow.names for schema in (declared.schema, *declared.schema.older))
        self._first: np.ndarray | None = None

    # -- the runtime's half

    def begin(self, batch: KeyBatch) -> None:
        self._batch, self._first = batch, None

    def changes(self) -> list[Entries]:
        """Return the changes of the batch that are not written yet."""
        if self._first is not None and self._moved.any():
            codes = np.flatnonzero(self._moved)
            empty = self._first[codes] >= self._next[codes]
            keys = self.batch.encoded(LIST_ENDS, codes[~empty], [self._declared.tag])
            ends = pl.DataFrame({"first": self._first[codes[~empty]], "next": self._next[codes[~empty]]})
            self._ends.put(keys, ttl.encoded(self._ends_schema, ends, self._expiry))
            self._ends.delete(self.batch.encoded(LIST_ENDS, codes[empty], [self._declared.tag]))
            self._moved[:] = False
        return [self._entries, self._ends]

    # -- the author's half

    def append(self, frame: Any, **columns: str) -> None:
        """Append each row to its key's list, in the order of the rows.

        An element's fields are the columns of their names, or `field="column"`; a field without a column has its
        default."""
        method = f"{self._name}.append"
        given = frames.polars(frame)
        codes = self.batch.codes(given, method)
        fields = self._fields(given, columns, method, "an element")
        self._check_values(fields, codes, method)
        if not len(codes):
            return
        self._load()
        rows = pl.DataFrame(
            [
                fields.get(f.name, _constant(f.name, f.default, self._types[f.name], len(given)))
                for f in self._declared.fields
            ]
        )
        self._put(self._entry_keys(codes, self._next[codes] + position_in_key(codes)), rows)
        self._next += np.bincount(codes, minlength=len(self.batch))
        self._moved[codes] = True

    def get(self, frame: Any) -> Any:
        """Return all elements of the frame's keys: key columns and the elements' fields, a row an element; keys in the
        order of their first row, elements in that of the list."""
        return self._read(self._distinct(frame, f"{self._name}.get"), None)

    def last(self, frame: Any, n: int = 1) -> Any:
        """Return the same columns as `get`, but only the last n elements of each key, or as many as there are."""
        if n < 1:
            raise StageError(
                f"{self._name}.last(frame, {n}) asks for nothing.", where=self._where, next="Say n=1 or more."
            )
        return self._read(self._distinct(frame, f"{self._name}.last"), n)

    def trim(self, frame: Any, keep: int) -> None:
        """Drop all but the last `keep` elements of each of the frame's keys."""
        if keep < 0:
            raise StageError(f"{self._name}.trim(frame, {keep}) cannot be.", where=self._where, next="Keep 0 or more.")
        codes = self._distinct(frame, f"{self._name}.trim")
        self._load()
        self._advance(codes, None)
        first = np.maximum(self._first[codes], self._next[codes] - keep)  # type: ignore[index]
        self._entries.delete(self._entry_keys(*expanded(codes, self._first[codes], first)))  # type: ignore[index]
        moved = first > self._first[codes]  # type: ignore[index]
        self._first[codes] = first  # type: ignore[index]
        self._moved[codes[moved]] = True

    def clear(self, frame: Any) -> None:
        """Forget the lists of the frame's keys."""
        self.trim(frame, keep=0)

    # -- how

    def _load(self) -> None:
        """Read the ends of the lists of all keys of the batch."""
        if self._first is not None:
            return
        number = len(self.batch)
        self._first, self._next, self._moved = (
            np.zeros(number, np.int64),
            np.zeros(number, np.int64),
            np.zeros(number, bool),
        )
        values = self._ends.get(self.batch.encoded(LIST_ENDS, None, [self._declared.tag]))
        here = np.flatnonzero(np.fromiter((value is not None for value in values), bool, len(values)))
        # Ends carry a stamp for the sweep alone: which elements live is for these to say.
        rows, _ = ttl.decoded(self._ends_schema, [value for value in values if value is not None], None)
        self._first[here], self._next[here] = rows["first"].to_numpy(), rows["next"].to_numpy()

    def _advance(self, codes: np.ndarray, n: int | None) -> None:
        """Move `first` to the first element that is stored, where many numbers, or many of the last n, would be asked
        for: the sweep takes elements away without the ends, and appends alone never read what is before them."""
        assert self._first is not None
        sizes = self._next[codes] - self._first[codes]
        if not self._swept or not (many := (sizes if n is None else np.minimum(sizes, n)) > _MANY).any():
            return
        codes = codes[many]
        starts, ends = self._entry_keys(codes, self._first[codes]), self._entry_keys(codes, self._next[codes])
        for code, start, end in zip(codes.tolist(), starts, ends, strict=True):
            oldest = self._entries.first(start, end)
            number = int(self._next[code]) if oldest is None else last_int64(oldest)
            self._moved[code] |= number > self._first[code]
            self._first[code] = number

    def _read(self, codes: np.ndarray, n: int | None) -> Any:
        self._load()
        self._advance(codes, n)
        assert self._first is not None
        first, after = self._first[codes], self._next[codes]
        if n is not None:
            first = np.maximum(first, after - n)
        owners, numbers = expanded(codes, first, after)
        values = self._entries.get(self._entry_keys(owners, numbers))
        here = np.fromiter((value is not None for value in values), bool, len(values))
        if not here.all() and not self._swept:
            raise DamageError(
                f"{int((~here).sum())} elements of the list {self._declared.name!r} are missing (keys: "
                f"{self.batch.sample(owners[~here])}).",
                where=self._where,
                next="Restore from the last checkpoint; weir fsck finds what else is damaged.",
            )
        rows, alive = ttl.decoded(self._schema, [value for value in values if value is not None], self._expiry)
        owners, numbers = owners[here][alive], numbers[here][alive]
        rows = rows.filter(pl.Series(alive))
        if self._expiry is not None:
            # Elements expire in order: what is before a living one need never be asked for again.
            oldest = self._next.copy()
            np.minimum.at(oldest, owners, numbers)
            gone = codes[oldest[codes] > first]
            self._first[gone] = oldest[gone]
            self._moved[gone] = True
            touched = self._expiry.touched_by_reading(rows[TOUCHED])
            self._put(self._entry_keys(owners[touched], numbers[touched]), rows.filter(pl.Series(touched)))
            self._moved[owners[touched]] = True
        return self._out(pl.concat([self.batch.of(owners), rows.select(list(self._types))], how="horizontal"))

    def _entry_keys(self, codes: np.ndarray, numbers: np.ndarray) -> list[bytes]:
        return self.batch.encoded(LIST_STATE, codes, [self._declared.tag], [pa.array(numbers, pa.int64())])


def ends_schema(elements: StateSchema) -> StateSchema:
    """Return the schema of a list's ends, and those that they had before: a TTL came and went for them when it did for
    elements."""
    return _of_ends(elements).reading([_of_ends(schema) for schema in elements.older])


def _of_ends(elements: StateSchema) -> StateSchema:
    return _STAMPED_ENDS if any(field.name == TOUCHED for field in elements.fields) else _PLAIN_ENDS


def position_in_key(codes: np.ndarray) -> np.ndarray:
    """Return for each row how many rows of the same code come before it."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    position = np.empty(len(codes), np.int64)
    position[order] = np.arange(len(codes)) - np.repeat(begins, np.diff(begins, append=len(codes)))
    return position


def expanded(codes: np.ndarray, first: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers first <= number < after of each code, one after the other, with their codes."""
    sizes = np.maximum(after - first, 0)
    ends = np.cumsum(sizes)
    return np.repeat(codes, sizes), np.arange(sizes.sum()) - np.repeat(ends - sizes - first, sizes)


def _constant(name: str, value: Any, type: Any, number: int) -> pl.Series:
    return pl.Series(name, [value], dtype=type).new_from_index(0, number)


def scan_list(
    backend: Backend, declared: Collection, keys: pa.Schema, groups: range, expiry: Expiry | None = None
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the lists in some key groups, in key order: key columns, and the elements' fields beside them, which may
    have the same names; two tables a key group."""
    schema, of_ends = declared.schema, ends_schema(declared.schema)
    types = [pa.int32(), *keys.types]
    for group in groups:
        ends = of_tag(backend, group, LIST_ENDS, declared.tag)
        elements = of_tag(backend, group, LIST_STATE, declared.tag)
        if not ends or not elements:
            continue
        _, columns = decode_keys([key for key, _ in ends], types)
        bounds, _ = ttl.decoded(of_ends, [value for _, value in ends], None)
        owners = pl.DataFrame(pl.from_arrow(pa.table(columns[1:], names=keys.names)))
        # Key columns may have any names, "first" and "next" too.
        owners = owners.with_columns(bounds["first"].alias(_FIRST), bounds["next"].alias(_NEXT))
        _, columns = decode_keys([key for key, _ in elements], [*types, pa.int64()])
        rows, alive = ttl.decoded_table(schema, [value for _, value in elements], expiry)
        stored = pl.DataFrame(pl.from_arrow(pa.table(columns[1:], names=[*keys.names, _CODE])))
        bounded = stored.join(owners, on=keys.names, how="left", maintain_order="left")
        within = bounded.select((pl.col(_CODE) >= pl.col(_FIRST)) & (pl.col(_CODE) < pl.col(_NEXT))).to_series()
        kept = pa.array(alive & within.fill_null(False).to_numpy())
        yield pa.table(columns[1:-1], names=keys.names).filter(kept), rows.filter(kept)
