"""The base of the handles with which a stage's function works by whole batches: the batch, and its rows' fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import unfit
from state_ops.backends.base import Backend
from state_ops.errors import StageError
from state_ops.keyed import ttl
from state_ops.keyed.key_batch import Convert, KeyBatch, given_columns
from state_ops.keyed.ttl import Expiry
from state_ops.rows.entry_buffer import Entries
from state_ops.schema.descriptors import Collection
from state_ops.schema.state_schema import StateSchema


class BatchHandle:
    """State of the keys of one batch at a time."""

    _batch: KeyBatch | None = None

    @property
    def batch(self) -> KeyBatch:
        """The keys of the batch."""
        assert self._batch is not None, "state is used outside a batch"
        return self._batch

    def _distinct(self, frame: Any, method: str) -> np.ndarray:
        """Return the codes of a frame's keys, each once, in the order of their first rows."""
        codes = self.batch.codes(frames.polars(frame), method)
        return pl.Series(codes).unique(maintain_order=True).to_numpy()


class RowHandle(BatchHandle):
    """State whose rows have a schema.

    Attributes:
        _types: By the name of each field that an author declared, its Polars type.
        _nullable: By the same names, whether the field may be null.
    """

    def __init__(
        self,
        backend: Backend,
        schema: StateSchema,
        keys: pa.Schema,
        where: str,
        convert: Convert,
        expiry: Expiry | None,
    ) -> None:
        self._backend = backend
        self._schema, self._keys, self._where, self._convert, self._expiry = schema, keys, where, convert, expiry
        fields = ttl.visible(schema)
        all_types = dict(frames.from_arrow(schema.arrow.empty_table()).schema)
        self._types: dict[str, Any] = {field.name: all_types[field.name] for field in fields}
        self._nullable = {field.name: field.nullable for field in fields}

    def _out(self, frame: pl.DataFrame) -> Any:
        return self._convert(frames.arrow(frame))

    def _check_values(self, columns: dict[str, pl.Series], codes: np.ndarray, method: str) -> None:
        """Refuse a null where none may be, and a value that nobody could read again, as a date after the year 9999.

        Args:
            codes: Of the columns' rows.

        Raises:
            StageError: With the keys.
        """
        judged = {name: column for name, column in columns.items() if _may_be_unfit(column.dtype)}
        for value in unfit(frames.arrow(pl.DataFrame(judged))) if judged else ():
            raise self.batch.misuse(
                f"{method}: the state field {value.column!r} {value.problem}",
                codes[value.row : value.row + 1],
                "Correct the value where it is made, or leave its row out.",
            )
        nan = " (a NaN in a pandas frame is a null)"
        for name, column in columns.items():
            if column.null_count() and not self._nullable.get(name, False):
                raise self.batch.misuse(
                    f"{method}: the state field {name!r} is not nullable but was given {column.null_count()} null(s)",
                    codes[column.is_null().to_numpy()],
                    f"Fill the column before it is stored{nan if column.dtype.is_float() else ''}, or declare the "
                    "field `| None`.",
                )


def _may_be_unfit(type: pl.DataType) -> bool:
    """Return whether a type has values that `unfit` refuses. Polars itself makes no text that is not UTF-8."""
    return not (type.is_integer() or type.is_float() or type in (pl.String, pl.Boolean, pl.Binary, pl.Null))


class CollectionState(RowHandle):
    """A list or map of each key, `state.<name>`, whose elements are entries of their own.

    Methods take a frame with the key columns, whose keys are of the batch.
    """

    def __init__(self, row: RowHandle, declared: Collection) -> None:
        """Keep a collection beside each key's row.

        Args:
            row: The handle of the rows.
            declared: With the hidden field of `ttl.stamped` in its schema if there is an expiry.
        """
        super().__init__(row._backend, declared.schema, row._keys, row._where, row._convert, row._expiry)
        self._declared, self._name = declared, f"state.{declared.name}"
        self._entries = Entries(self._backend)

    # -- the runtime's half

    def begin(self, batch: KeyBatch) -> None:
        self._batch = batch

    def changes(self) -> list[Entries]:
        """Return the changes of the batch that are not written yet."""
        return [self._entries]

    # -- how

    def _fields(self, frame: pl.DataFrame, columns: dict[str, str], method: str, of: str) -> dict[str, pl.Series]:
        """Return the columns for the fields of elements, of which there is at least one. of: an element in words."""
        fields = given_columns(frame, self._types, columns, method, self._where)
        if not fields:
            raise StageError(
                f"{method} got no column named like a field of {of}: {', '.join(self._types)}.",
                where=self._where,
                next=f'Rename one, or say which: {method}(frame, {next(iter(self._types))}="column").',
            )
        return fields

    def _put(self, keys: list[bytes], rows: pl.DataFrame) -> None:
        self._entries.put(keys, ttl.encoded(self._schema, rows, self._expiry))
