"""Map state: the entries of a key's map, each an entry of its own in the backend.

    group | MAP_STATE | tag | key | map key  ->  the value's row

Changing one entry touches no other. Given map keys are found by one multi-get; all entries of a key are one range.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.errors import StageError
from state_ops.keyed import ttl
from state_ops.keyed.handle import CollectionState, RowHandle
from state_ops.keyed.key_batch import given_columns
from state_ops.keyed.ttl import Expiry
from state_ops.keyed.value_state import check_foldable
from state_ops.rows import key_aggregation
from state_ops.rows.aggregates import Agg
from state_ops.rows.entry_buffer import of_tag
from state_ops.rows.row_store import rows_of
from state_ops.schema.descriptors import MAP_STATE, Collection
from state_ops.schema.key_codec import decode_floats, decode_keys, stored_key
from state_ops.schema.state_schema import TOUCHED

_CODE = "__weir_code"
_ENTRY = "__weir_entry"
_FEW, _MORE = 256, 32  # entries that are read whole: of one key, and for each key beside it
_SMALL, _LARGER = 256 << 10, 8 << 10  # bytes, likewise
_MOST_ENTRIES, _MOST_BYTES = 32_768, 4 << 20  # of all of them


class MapState(CollectionState):
    """The map `name` of each key: `state.<name>`. Where a method is about single entries, the column `<name>_key`, or
    `<name>_key="column"`, has their map keys."""

    def __init__(self, row: RowHandle, declared: Collection) -> None:
        super().__init__(row, declared)
        assert declared.key is not None
        self._key_type = declared.key
        self._map_key = {declared.key_column: frames.polars_type(declared.key)}

    # -- the author's half

    def put(self, frame: Any, **columns: str) -> None:
        """Set each row's entry. A value's fields are the columns of their names, or `field="column"`; fields without a
        column stay as they are, and are the defaults in a new entry. One row an entry."""
        method = f"{self._name}.put"
        given, codes, keys = self._addressed(frame, columns, method)
        of_fields = {name: column for name, column in columns.items() if name not in self._map_key}
        fields = self._fields(given, of_fields, method, "a value")
        encoded = self._encoded(codes, keys)
        if len(set(encoded)) < len(encoded):
            twice = pl.Series(encoded, dtype=pl.Binary).is_duplicated().to_numpy()
            raise self.batch.misuse(
                f"{method} got several rows for one entry",
                codes[twice],
                f"Reduce the frame to one row per key and map key first, or use {self._name}.fold.",
            )
        self._check_values({self._declared.key_column: keys, **fields}, codes, method)
        if len(fields) == len(self._types):
            rows = pl.DataFrame([fields[name] for name in self._types])
        else:
            rows = self._rows(encoded)[0].with_columns(**fields)
        self._put(encoded, rows)

    def get(self, frame: Any, **columns: str) -> Any:
        """Return the value of each row's entry, row by row; the fields' defaults where there is none."""
        rows, _ = self._looked_up(frame, columns, "get")
        return self._out(rows.select(list(self._types)))

    def contains(self, frame: Any, **columns: str) -> Any:
        """Return a column of booleans that says for each row whether its entry is there."""
        _, present = self._looked_up(frame, columns, "contains")
        return self._convert(pa.table({self._declared.name: pa.array(present)}))[self._declared.name]

    def all(self, frame: Any) -> Any:
        """Return all entries of the frame's keys: key columns, `<name>_key` and the values' fields; keys in the order
        of their first row, entries in that of their map keys."""
        codes = self._distinct(frame, f"{self._name}.all")
        encoded, values = self._below(codes)
        _, columns = decode_keys(encoded, [pa.int32(), *self._keys.types, self._key_type])
        rows, alive = ttl.decoded(self._schema, values, self._expiry)
        keyed = frames.from_arrow(pa.table(columns[1:], names=[*self._keys.names, *self._map_key]))
        keyed = pl.concat([keyed, rows], how="horizontal")
        self._touch(encoded, keyed, alive)
        place = np.full(len(self.batch), -1, np.int64)
        place[codes] = np.arange(len(codes))
        owners = place[self.batch.codes(keyed, f"{self._name}.all")]
        order = np.argsort(owners[alive], kind="stable")
        entries = keyed.filter(pl.Series(alive))[order]
        return self._out(entries.select([*self._keys.names, *self._map_key, *self._types]))

    def fold(self, frame: Any, **arguments: Agg | str) -> Any:
        """Merge aggregates of this frame's rows into their entries.

        Args:
            arguments: By field, the aggregate that is merged into it; and `<name>_key="column"`, where the keys of
                entries are not in a column of that name.

        Returns:
            One row for each entry: the key columns, `<name>_key` and the new values.
        """
        method = f"{self._name}.fold"
        aggregates = {name: agg for name, agg in arguments.items() if isinstance(agg, Agg)}
        columns = {name: column for name, column in arguments.items() if isinstance(column, str)}
        given, codes, keys = self._addressed(frame, columns, method, only_keys=True)
        check_foldable(aggregates, self._nullable, given, method, self._where)
        if not aggregates:
            raise StageError(f"{method} got no aggregate.", where=self._where, next="Add e.g. total=agg.sum(...).")
        by = [_CODE, _ENTRY]
        wanted, given = key_aggregation.fitting(aggregates, given, self._types, method, self._where)
        coded = given.with_columns(pl.Series(_CODE, codes), keys.alias(_ENTRY))
        fresh = key_aggregation.partials(wanted, coded, by, self._where).sort(by)
        owners = fresh[_CODE].to_numpy()
        encoded = self._encoded(owners, fresh[_ENTRY])
        rows = self._rows(encoded)[0]
        merged = key_aggregation.merged(wanted, rows, fresh, self._where)
        entries = {self._declared.key_column: fresh[_ENTRY]}
        self._check_values(entries | {name: merged[name] for name in aggregates}, owners, method)
        self._put(encoded, rows.with_columns([merged[name] for name in aggregates]))
        keyed = self.batch.of(owners).with_columns(fresh[_ENTRY].alias(self._declared.key_column))
        return self._out(pl.concat([keyed, merged], how="horizontal"))

    def delete(self, frame: Any, **columns: str) -> None:
        """Forget each row's entry."""
        _, codes, keys = self._addressed(frame, columns, f"{self._name}.delete", only_keys=True)
        self._entries.delete(self._encoded(codes, keys))

    def clear(self, frame: Any) -> None:
        """Forget the maps of the frame's keys."""
        codes = np.unique(self.batch.codes(frames.polars(frame), f"{self._name}.clear"))
        self._entries.delete(self._below(codes)[0])

    # -- for functions that see one key at a time

    def whole(self, codes: range) -> tuple[list[int], list[Any], pa.Table] | None:
        """Read the maps of some keys of the batch at once.

        Returns:
            Of each entry, the code of its key, its map key, and its value as a row of fields. None where there are too
            many for the number of keys, or where reading an entry keeps it from expiring: then each is asked for alone.
        """
        if self._expiry is not None and self._expiry.ttl is not None and self._expiry.ttl.on_read:
            return None
        prefixes = self.batch.encoded(MAP_STATE, np.arange(codes.start, codes.stop), [self._declared.tag])
        code_of = dict(zip(prefixes, codes, strict=True))
        entries_left = min(_FEW + _MORE * len(codes), _MOST_ENTRIES)
        bytes_left = min(_SMALL + _LARGER * len(codes), _MOST_BYTES)
        owners: list[int] = []
        encoded: list[bytes] = []
        values: list[bytes] = []
        ordered = sorted(prefixes)
        position = 0
        for key, value in self._entries.below(ordered):
            while not key.startswith(ordered[position]):
                position += 1
            bytes_left -= len(value)
            if len(owners) == entries_left or bytes_left < 0:
                return None
            owners.append(code_of[ordered[position]])
            encoded.append(key)
            values.append(value)
        _, columns = decode_keys(encoded, [pa.int32(), *self._keys.types, self._key_type])
        rows, alive = ttl.decoded_table(self._schema, values, self._expiry)
        if alive.all():
            return owners, columns[-1].to_pylist(), rows
        living = pa.array(alive)
        return np.array(owners)[alive].tolist(), columns[-1].filter(living).to_pylist(), rows.filter(living)

    def entry(self, code: int, key: pa.Array) -> pa.Table | None:
        """Return the value of one entry of one key of the batch, as a row of fields; None where there is none."""
        encoded = self.batch.encoded(MAP_STATE, np.array([code]), [self._declared.tag], [key])
        rows, present = self._rows(encoded)
        if not present[0]:
            return None
        self._touch(encoded, rows, present)
        return frames.arrow(rows.select(list(self._types)))

    # -- how

    def _addressed(
        self, frame: Any, columns: dict[str, str], method: str, only_keys: bool = False
    ) -> tuple[pl.DataFrame, np.ndarray, pl.Series]:
        """Return the frame, the code of each row's key, and each row's map key."""
        given = frames.polars(frame)
        codes = self.batch.codes(given, method)
        allowed = self._map_key if only_keys else {**self._map_key, **self._types}
        for name in columns:
            if name not in allowed:
                raise StageError(
                    f"{method} knows no {name!r}.", where=self._where, next=f"Its columns are: {', '.join(allowed)}."
                )
        name = self._declared.key_column
        of_keys = {name: columns[name]} if name in columns else {}
        keys = given_columns(given, self._map_key, of_keys, method, self._where).get(name)
        if keys is None:
            raise StageError(
                f"{method} needs the map keys: the frame has no column {name!r}.",
                where=self._where,
                next=f'Say which it is: {method}(frame, {name}="column").',
            )
        if keys.null_count():
            raise self.batch.misuse(
                f"{method} got {keys.null_count()} null(s) for map keys",
                codes[keys.is_null().to_numpy()],
                "A null is no key: leave the rows out, or fill the column.",
            )
        return given, codes, keys

    def _looked_up(self, frame: Any, columns: dict[str, str], method: str) -> tuple[pl.DataFrame, np.ndarray]:
        """Return the row of each row's entry, which is touched by that, and whether there is one."""
        _, codes, keys = self._addressed(frame, columns, f"{self._name}.{method}", only_keys=True)
        encoded = self._encoded(codes, keys)
        rows, present = self._rows(encoded)
        self._touch(encoded, rows, present)
        return rows, present

    def _encoded(self, codes: np.ndarray, keys: pl.Series) -> list[bytes]:
        column = frames.arrow(keys.to_frame("key")).column(0).cast(self._key_type)
        return self.batch.encoded(MAP_STATE, codes, [self._declared.tag], [column])

    def _below(self, codes: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Return the entries of some keys, in key order."""
        entries = list(self._entries.below(self.batch.encoded(MAP_STATE, codes, [self._declared.tag])))
        return [key for key, _ in entries], [value for _, value in entries]

    def _rows(self, encoded: list[bytes]) -> tuple[pl.DataFrame, np.ndarray]:
        """Return the rows of entries, the defaults where there is none; and where there is one."""
        rows, present = rows_of(self._schema, self._entries.get(encoded))
        return ttl.unexpired(self._schema, rows, present, self._expiry)

    def _touch(self, encoded: list[bytes], rows: pl.DataFrame, present: np.ndarray) -> None:
        """Stamp entries that the author has read, if the TTL counts reads."""
        if self._expiry is not None:
            touched = np.flatnonzero(self._expiry.touched_by_reading(rows[TOUCHED]) & present)
            self._put([encoded[index] for index in touched.tolist()], rows[touched])


def scan_map(
    backend: Backend, declared: Collection, keys: pa.Schema, groups: range, expiry: Expiry | None = None
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the maps in some key groups, in key order: key columns, and `<name>_key` and the values' fields beside
    them, which may have the same names; two tables a key group."""
    assert declared.key is not None
    for group in groups:
        entries = of_tag(backend, group, MAP_STATE, declared.tag)
        if entries:
            types = [pa.int32(), *keys.types, stored_key(declared.key)]
            _, columns = decode_keys([key for key, _ in entries], types)
            if types[-1] != declared.key:
                columns[-1] = pa.array(decode_floats(columns[-1].to_numpy()))
            rows, alive = ttl.decoded_table(declared.schema, [value for _, value in entries], expiry)
            values = pa.table([columns[-1], *rows.columns], names=[declared.key_column, *rows.column_names])
            kept = pa.array(alive)
            yield pa.table(columns[1:-1], names=keys.names).filter(kept), values.filter(kept)
