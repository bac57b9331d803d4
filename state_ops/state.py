"""Value state: one typed row per key, read and written by whole batches.

The runtime hands a batch to a stage's function together with this handle. The batch's distinct keys are read with one
multi-get when the function first touches state, changed in columns, and written with one WriteBatch after the function
returned. Nothing here loops over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops import folding, frames
from state_ops.aggregates import Agg
from state_ops.backends.base import Backend
from state_ops.codec import decode_rows, encode_rows
from state_ops.errors import StageError
from state_ops.folding import defaults, rows_of
from state_ops.keys import decode_keys, encode_keys, group_prefix
from state_ops.schema import StateSchema

GROUP = "__weir_group"
VALUE_STATE, WINDOW_STATE = 1, 2
_ROW, _CODE = "__weir_row", "__weir_code"


class ValueState:
    """A stage's state handle. Every method takes a frame with the key columns, whose keys are keys of the batch.

    Frames come in as pyarrow, pandas or Polars and go out as what the stage's function is annotated with.
    """

    def __init__(
        self,
        backend: Backend,
        schema: StateSchema,
        keys: pa.Schema,
        where: str,
        convert: Callable[[pa.Table], Any] = frames.from_arrow,
    ) -> None:
        self._backend, self._schema, self._keys, self._where, self._convert = backend, schema, keys, where, convert
        self._key_names = keys.names
        self._empty = frames.from_arrow(schema.arrow.empty_table())
        self._types: dict[str, Any] = dict(self._empty.schema)
        self._nullable = {field.name: field.nullable for field in schema.fields}
        self._batch: pl.DataFrame | None = None
        self._rows: pl.DataFrame | None = None

    # -- the runtime's half

    def begin(self, batch: pl.DataFrame) -> None:
        """Start a batch: key columns and the key group of every row."""
        self._batch = batch.select([*self._key_names, GROUP]).unique(self._key_names, maintain_order=True)
        self._batch = self._batch.with_row_index(_ROW)
        self._rows = None

    def flush(self) -> None:
        """Write what the batch changed."""
        if self._rows is None or self._batch is None or not self._touched.any():
            return
        encoded = self._encoded
        gone = np.flatnonzero(self._touched & ~self._present)
        kept = np.flatnonzero(self._touched & self._present)
        table = frames.arrow(self._rows[kept]).select(self._schema.arrow.names).cast(self._schema.arrow)
        values = encode_rows(self._schema, table)
        self._backend.write(
            [(encoded[index], value) for index, value in zip(kept.tolist(), values, strict=True)],
            [encoded[index] for index in gone.tolist()],
        )
        self._touched[:] = False

    # -- the author's half

    def get(self, frame: Any) -> Any:
        """The state of each row's key, row by row; a key without state has the fields' defaults."""
        codes = self._codes(frames.polars(frame))
        return self._out(self._loaded()[codes].select(list(self._types)))

    def put(self, frame: Any) -> None:
        """Set the state of each row's key from the columns named like fields; other fields stay. One row a key."""
        given = frames.polars(frame)
        codes = self._codes(given)
        if len(np.unique(codes)) != len(codes):
            raise StageError(
                "state.put got several rows for one key.",
                where=self._where,
                next="Reduce the frame to one row per key first, or use state.fold.",
            )
        columns = {name: given[name] for name in self._types if name in given.columns}
        if not columns:
            raise StageError(
                f"state.put got no column named like a field of the state: {', '.join(self._types)}.", where=self._where
            )
        self._store(codes, columns)

    def delete(self, frame: Any) -> None:
        """Forget the state of each row's key."""
        codes = np.unique(self._codes(frames.polars(frame)))
        fresh = frames.from_arrow(defaults(self._schema, len(codes)))
        self._store(codes, {name: fresh[name] for name in self._types})
        self._present[codes] = False

    def lag(self, frame: Any, **fields: str) -> Any:
        """For each row, the key's previous row: `field="column"` gives the column of the row before, from this frame or,
        for a key's first row here, from the state; and keeps the key's last row in those fields for the next time.

        Rows of a key must be in order, which `order_by` on the stage gives. A key seen for the first time has the
        fields' defaults.
        """
        given = frames.polars(frame)
        self._check(given, fields)
        codes = pl.Series(_CODE, self._codes(given))
        rows = self._loaded()
        first = codes.is_first_distinct()
        work = pl.DataFrame(
            {_CODE: codes, **{name: given[column].cast(self._types[name]) for name, column in fields.items()}}
        )
        before = work.select([pl.col(name).shift(1).over(_CODE) for name in fields])
        result = pl.DataFrame({name: rows[name].gather(codes).zip_with(first, before[name]) for name in fields})
        last = work.group_by(_CODE, maintain_order=True).last()
        self._store(last[_CODE].to_numpy(), {name: last[name] for name in fields})
        return self._out(result)

    def fold(self, frame: Any, **aggregates: Agg) -> Any:
        """Merge aggregates of this frame into fields of the same name; returns key columns and the new values, a row a key.

        count, sum, min, max, first and last can be folded; a mean is a sum and a count.
        """
        given = frames.polars(frame)
        self._check(given, {name: agg.column for name, agg in aggregates.items() if agg.column is not None})
        for name, agg in aggregates.items():
            if name not in self._types:
                raise self._no_field(name)
            if agg.kind == "mean":
                raise StageError(
                    f"state.fold cannot keep {name} = mean(...) in one field.",
                    where=self._where,
                    next="Fold a sum and a count, and divide.",
                )
            if agg.kind in ("min", "max", "first") and not self._nullable[name]:
                raise StageError(
                    f"state.fold keeps {name} = {agg.kind}(...) in a field that cannot be null: nothing tells its default from a value.",
                    where=self._where,
                    next=f"Declare the field as `{name}: ... | None = None`.",
                )
        rows = self._loaded()
        wanted = list(aggregates.items())
        coded = given.with_columns(pl.Series(_CODE, self._codes(given)))
        fresh = folding.partials(wanted, coded, [_CODE], self._where).sort(_CODE)
        codes = fresh[_CODE].to_numpy()
        merged = folding.merged(wanted, rows[codes], fresh, self._where)
        self._store(codes, {name: merged[name] for name in aggregates})
        assert self._batch is not None
        return self._out(pl.concat([self._batch[codes].select(self._key_names), merged], how="horizontal"))

    # -- how

    def _loaded(self) -> pl.DataFrame:
        if self._rows is not None:
            return self._rows
        assert self._batch is not None, "state is used outside a batch"
        columns = frames.arrow(self._batch.select(self._key_names)).cast(self._keys).columns
        self._encoded = encode_keys(columns, self._batch[GROUP].to_numpy().astype(np.uint16), VALUE_STATE)
        self._rows, self._present = rows_of(self._backend, self._schema, self._encoded)
        self._touched = np.zeros(len(self._encoded), bool)
        return self._rows

    def _store(self, codes: np.ndarray, columns: dict[str, pl.Series]) -> None:
        rows = self._loaded()
        if not len(codes):
            return
        for name, column in columns.items():
            if column.null_count() and not self._nullable[name]:
                raise StageError(
                    f"The state field {name!r} is not nullable but was given {column.null_count()} null(s).",
                    where=self._where,
                    next="Fill the column before it is stored, or declare the field `| None`.",
                )
        at = np.full(len(rows), -1, np.int64)
        at[codes] = np.arange(len(codes))
        mine = pl.Series(at >= 0)
        taken = np.maximum(at, 0)
        self._rows = rows.with_columns(
            [
                column.cast(self._types[name]).gather(taken).zip_with(mine, rows[name]).alias(name)
                for name, column in columns.items()
            ]
        )
        self._touched[codes] = True
        self._present[codes] = True

    def _codes(self, frame: pl.DataFrame) -> np.ndarray:
        """For each row of the frame, the row of its key in the batch's state."""
        assert self._batch is not None, "state is used outside a batch"
        missing = [name for name in self._key_names if name not in frame.columns]
        if missing:
            raise StageError(
                f"A state handle needs the key column{'s' if len(missing) > 1 else ''} {', '.join(missing)}.",
                where=self._where,
                next="Keep the key columns in the frame that you give to state methods.",
            )
        keys = frame.select([pl.col(name).cast(self._batch.schema[name]) for name in self._key_names])
        codes = keys.join(self._batch, on=self._key_names, how="left", maintain_order="left")[_ROW]
        if codes.null_count():
            strange = frame.filter(codes.is_null()).select(self._key_names).head(3).rows()
            raise StageError(
                f"State was asked for keys that are not in this batch: {strange}.",
                where=self._where,
                next="A stage reads and writes the state of the keys it is given; key another stage by the other column.",
            )
        return codes.to_numpy().astype(np.int64)

    def _check(self, frame: pl.DataFrame, fields: dict[str, str]) -> None:
        for name, column in fields.items():
            if name not in self._types:
                raise self._no_field(name)
            if column not in frame.columns:
                raise StageError(
                    f"{name}={column!r}, but the frame has no column {column!r}.",
                    where=self._where,
                    next=f"Its columns are: {', '.join(frame.columns)}.",
                )

    def _no_field(self, name: str) -> StageError:
        return StageError(
            f"The state has no field {name!r}.", where=self._where, next=f"Its fields are: {', '.join(self._types)}."
        )

    def _out(self, frame: pl.DataFrame) -> Any:
        return self._convert(frames.arrow(frame))


def scan_values(backend: Backend, schema: StateSchema, keys: pa.Schema, groups: range) -> Iterator[pa.Table]:
    """All rows of value state in some key groups, in key order: key columns, then fields; in tables of bounded size."""
    for group in groups:
        entries = list(backend.scan(group_prefix(group, VALUE_STATE), group_prefix(group, VALUE_STATE + 1)))
        if entries:
            _, columns = decode_keys([key for key, _ in entries], keys.types)
            rows = decode_rows(schema, [value for _, value in entries])
            yield pa.table([*columns, *rows.columns], names=[*keys.names, *rows.column_names])
