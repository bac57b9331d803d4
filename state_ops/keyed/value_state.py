"""Value state: one typed row per key, read and written by whole batches.

The runtime hands a batch to a stage's function together with this handle. The rows of the batch's distinct keys are
found at once when the function first touches state, and changed in columns; what changed is kept by `rows` after the
function returned, and written at the barrier. Nothing here loops over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.errors import StageError
from state_ops.keyed import ttl
from state_ops.keyed.handle import RowHandle
from state_ops.keyed.key_batch import Convert, KeyBatch, given_columns
from state_ops.keyed.ttl import Expiry
from state_ops.rows import key_aggregation
from state_ops.rows.aggregates import Agg
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import RowStore, defaults
from state_ops.schema.descriptors import VALUE_STATE
from state_ops.schema.key_codec import decode_keys, group_prefix
from state_ops.schema.state_schema import TOUCHED, StateSchema

_CODE = "__weir_code"
_SCANNED = 50_000  # entries of a table


class ValueState(RowHandle):
    """The typed row of each key.

    Every method takes a frame with the key columns, whose keys are keys of the batch. Frames may be pyarrow, pandas or
    Polars. Returned frames are of the kind that the first parameter of the stage's function is annotated with.

    Args:
        schema: The row's fields, with the hidden field of `ttl.stamped` if there is an expiry.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, State, ValueState, files, stage, testing
        >>> class Meter(State):
        ...     last: int | None = None
        >>> @stage("usage", source=files("{landing}/*.parquet"), key="meter", state=Meter, order_by="day")
        ... def usage(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        ...     before = state.lag(rows, last="total")["last"]
        ...     return rows.select("meter", "day", used=pl.col("total") - before)
        >>> run = testing.run(usage, state={"a": Meter(last=90)})
        >>> run.epoch([{"meter": "a", "day": 1, "total": 100}, {"meter": "a", "day": 2, "total": 130}]).to_dicts()
        [{'meter': 'a', 'day': 1, 'used': 10}, {'meter': 'a', 'day': 2, 'used': 30}]
        >>> run.state["a"]
        Meter(last=130)
    """

    def __init__(
        self,
        backend: Backend,
        schema: StateSchema,
        keys: pa.Schema,
        where: str,
        convert: Convert = frames.from_arrow,
        expiry: Expiry | None = None,
        residence: Residence | None = None,
    ) -> None:
        super().__init__(backend, schema, keys, where, convert, expiry)
        # With a TTL no table is kept: the sweep deletes and stamps rows behind its back.
        self._kept = RowStore(backend, schema, keys, VALUE_STATE, residence if expiry is None else None)
        self._rows: pl.DataFrame | None = None

    # -- the runtime's half

    def begin(self, batch: pl.DataFrame) -> None:
        """Start a batch: key columns and the key group of every row."""
        self._batch = KeyBatch(batch, self._keys, self._where)
        self._rows = None

    def flush(self) -> None:
        """Keep what the batch changed."""
        if self._rows is None or not self._touched.any():
            return
        keys, rows, present = self.batch.grouped, self._rows, self._present
        if not self._touched.all():  # else they are put as they were asked for, which `RowStore` remembers
            touched = np.flatnonzero(self._touched)
            keys, rows, present = keys[touched], rows[touched], present[touched]
        if TOUCHED in self._schema.arrow.names:  # without an expiry: as of the first epoch with one
            rows = rows.with_columns(pl.lit(self._expiry.now if self._expiry else None, pl.Int64).alias(TOUCHED))
        self._kept.put(keys, rows, present)
        self._touched[:] = False

    def barrier(self) -> None:
        """Write what the epoch changed."""
        self._kept.barrier()

    # -- the author's half

    def get(self, frame: Any) -> Any:
        """Return the state of each row's key, row by row; a key without state has the fields' defaults."""
        codes = self.batch.codes(frames.polars(frame), "state.get")
        return self._out(self._seen(codes)[codes].select(list(self._types)))

    def join(self, frame: Any, *fields: str) -> Any:
        """Return the frame with the state of each row's key beside it: these fields, or all. A key without state has
        the defaults."""
        table = frames.arrow(frame, self._where)
        keys = table.select([name for name in self._keys.names if name in table.column_names])
        codes = self.batch.codes(frames.from_arrow(keys), "state.join")
        wanted = list(fields) or list(self._types)
        for name in wanted:
            if name not in self._types:
                raise no_field(name, self._types, self._where)
            if name in table.column_names:
                raise StageError(
                    f"state.join adds a column {name!r}, but the frame has one already.",
                    where=self._where,
                    next='Rename that, or name the fields that you need: state.join(frame, "...") of '
                    f"{', '.join(self._types)}.",
                )
        rows = frames.arrow(self._seen(codes)[codes].select(wanted))
        for name in wanted:
            table = table.append_column(rows.schema.field(name), rows.column(name))
        return self._convert(table)

    def put(self, frame: Any) -> None:
        """Set the state of each row's key from the columns named like fields; other fields stay. One row a key."""
        given = frames.polars(frame)
        codes = self.batch.codes(given, "state.put")
        twice = np.flatnonzero(np.bincount(codes, minlength=len(self.batch)) > 1)
        if len(twice):
            raise self.batch.misuse(
                "state.put got several rows for one key",
                twice,
                "Reduce the frame to one row per key first, or use state.fold.",
            )
        columns = given_columns(given, self._types, {}, "state.put", self._where)
        if not columns:
            self._check_fields()
            raise StageError(
                f"state.put got no column named like a field of the state: {', '.join(self._types)}.", where=self._where
            )
        self._store(codes, columns, "state.put")

    def delete(self, frame: Any) -> None:
        """Forget the row of each row's key. Lists, maps and timers stay; `clear` forgets all of it."""
        codes = np.unique(self.batch.codes(frames.polars(frame), "state.delete"))
        if not self._types:
            return
        fresh = frames.from_arrow(defaults(self._schema, len(codes)))
        self._store(codes, {name: fresh[name] for name in self._types}, "state.delete")
        self._present[codes] = False

    def lag(self, frame: Any, **fields: str) -> Any:
        """Return for each row the key's previous row: `field="column"` gives the column of the row before.

        The row before is from this frame or, for a key's first row here, from the state. The key's last row is kept in
        those fields for the next time.

        Rows of a key must be in order, which `order_by` on the stage gives. A key seen for the first time has the
        fields' defaults.
        """
        given = frames.polars(frame)
        columns = self._named(given, fields, "state.lag")
        codes = pl.Series(_CODE, self.batch.codes(given, "state.lag"))
        rows = self._loaded()
        first = codes.is_first_distinct()
        work = pl.DataFrame({_CODE: codes, **columns})
        before = work.select([pl.col(name).shift(1).over(_CODE) for name in fields])
        result = pl.DataFrame({name: rows[name].gather(codes).zip_with(first, before[name]) for name in fields})
        last = work.group_by(_CODE, maintain_order=True).last()
        self._store(last[_CODE].to_numpy(), {name: last[name] for name in fields}, "state.lag")
        return self._out(result)

    def fold(self, frame: Any, **aggregates: Agg) -> Any:
        """Merge aggregates of this frame into fields of the same name; returns key columns and the new values, a row a
        key.

        count, sum, min, max, first and last can be folded; a mean is a sum and a count.
        """
        given = frames.polars(frame)
        check_foldable(aggregates, self._nullable, given, "state.fold", self._where)
        codes = self.batch.codes(given, "state.fold")
        wanted, given = key_aggregation.fitting(aggregates, given, self._types, "state.fold", self._where)
        coded = given.with_columns(pl.Series(_CODE, codes))
        rows = self._loaded()
        fresh = key_aggregation.partials(wanted, coded, [_CODE], self._where).sort(_CODE)
        codes = fresh[_CODE].to_numpy()
        merged = key_aggregation.merged(wanted, rows[codes], fresh, self._where)
        self._store(codes, {name: merged[name] for name in aggregates}, "state.fold")
        return self._out(pl.concat([self.batch.of(codes), merged], how="horizontal"))

    # -- how

    def _check_fields(self) -> None:
        if not self._types:
            raise StageError(
                "The state has no fields, only lists, maps or timers: there are no rows to read or write.",
                where=self._where,
                next="Use its lists and maps, or add a field to the state class.",
            )

    def _loaded(self) -> pl.DataFrame:
        if self._rows is not None:
            return self._rows
        self._check_fields()
        rows, present = self._kept.get(self.batch.grouped)
        self._rows, self._present = ttl.unexpired(self._schema, rows, present, self._expiry)
        self._touched = np.zeros(len(rows), bool)
        return self._rows

    def _seen(self, codes: np.ndarray) -> pl.DataFrame:
        """Return the rows of the batch, of which the author sees those of some codes; that may count as touching
        them."""
        rows = self._loaded()
        if self._expiry is not None:
            read = np.zeros(len(rows), bool)
            read[codes] = True
            self._touched |= self._expiry.touched_by_reading(rows[TOUCHED]) & self._present & read
        return rows

    def _store(self, codes: np.ndarray, columns: dict[str, pl.Series], method: str) -> None:
        rows = self._loaded()
        if not len(codes):
            return
        self._check_values(columns, codes, method)
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

    def _named(self, frame: pl.DataFrame, fields: dict[str, str], method: str) -> dict[str, pl.Series]:
        for name in fields:
            if name not in self._types:
                raise no_field(name, self._types, self._where)
        types = {name: self._types[name] for name in fields}
        return given_columns(frame, types, fields, method, self._where)


def no_field(name: str, fields: Sequence[str] | dict[str, Any], where: str) -> StageError:
    return StageError(
        f"The state has no field {name!r}.", where=where, next=f"Its fields are: {', '.join(fields) or 'none'}."
    )


def check_foldable(
    aggregates: dict[str, Agg], nullable: dict[str, bool], frame: pl.DataFrame, method: str, where: str
) -> None:
    """Raise StageError unless these aggregates of the frame can be kept in fields of these names."""
    for name, agg in aggregates.items():
        if name not in nullable:
            raise no_field(name, nullable, where)
        if agg.where is not None:
            raise StageError(
                f"{method}: {name}={agg}, but a fold takes the rows of its frame, all of them.",
                where=where,
                next=f"Filter the frame, and call {method} with what is left.",
            )
        for column in agg.columns:
            if column not in frame.columns:
                raise StageError(
                    f"{method}: {name}={agg.kind}({column!r}), but the frame has no column {column!r}.",
                    where=where,
                    next=f"Its columns are: {', '.join(frame.columns)}.",
                )
            _check_kind(name, agg, column, frame.schema[column], method, where)
        if agg.kind in ("count_distinct", "approx_distinct", "approx_quantile"):
            raise StageError(
                f"{method} cannot keep {name} = {agg} in a field.",
                where=where,
                next="Put the values into a MapOf, and count those that it did not contain.",
            )
        if agg.kind == "mean":
            raise StageError(
                f"{method} cannot keep {name} = mean(...) in one field.",
                where=where,
                next="Fold a sum and a count, and divide.",
            )
        if agg.kind in ("min", "max", "first") and not nullable[name]:
            raise StageError(
                f"{method} keeps {name} = {agg.kind}(...) in a field that cannot be null: nothing tells its default "
                "from a value.",
                where=where,
                next=f"Declare the field as `{name}: ... | None = None`.",
            )


def _check_kind(name: str, agg: Agg, column: str, kind: pl.DataType, method: str, where: str) -> None:
    if agg.kind == "sum" and not (kind.is_numeric() or kind in (pl.Boolean, pl.Null)):
        why = "which is no number"
        instead = "Make a number of it first, of a duration e.g. by pl.col(...).dt.total_microseconds()."
    elif agg.kind in ("min", "max") and kind.is_nested():
        why, instead = "which has no order", "Fold first or last of it, or a column of what is in it."
    else:
        return
    raise StageError(
        f"{method}: {name}={agg.kind}({column!r}), but that column is {kind}, {why}.",
        where=where,
        next=instead,
    )


def scan_values(
    backend: Backend, schema: StateSchema, keys: pa.Schema, groups: range, expiry: Expiry | None = None
) -> Iterator[pa.Table]:
    """Yield all rows of value state in some key groups, in key order: key columns, then fields; in tables of bounded
    size."""
    for group in groups:
        stored = iter(backend.scan(group_prefix(group, VALUE_STATE), group_prefix(group, VALUE_STATE + 1)))
        while entries := list(islice(stored, _SCANNED)):  # a group may have any number of them
            _, columns = decode_keys([key for key, _ in entries], keys.types)
            rows, alive = ttl.decoded_table(schema, [value for _, value in entries], expiry)
            table = pa.table([*columns, *rows.columns], names=[*keys.names, *rows.column_names])
            yield table.filter(pa.array(alive)) if not alive.all() else table
