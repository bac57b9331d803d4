"""The keys of the rows that a stage's function is called with: all handles number them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.casts import cast
from state_ops.errors import StageError
from state_ops.schema.descriptors import GROUP
from state_ops.schema.key_codec import encode_keys

_ROW = "__weir_row"


class KeyBatch:
    """The distinct keys of a batch, in the order of their first row; a key's `code` is its number here.

    Args:
        rows: The key columns and the key group of every row.
        where: For errors, the stage.
    """

    def __init__(self, rows: pl.DataFrame, keys: pa.Schema, where: str) -> None:
        self.names, self.where = keys.names, where
        distinct = rows.select([*keys.names, GROUP]).unique(keys.names, maintain_order=True)
        self._frame = distinct.with_row_index(_ROW)
        self.grouped = distinct
        self.keys = distinct.select(keys.names)
        self._types = keys

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def columns(self) -> list[pa.Array]:
        """The key columns, which only what encodes keys needs."""
        return [column.combine_chunks() for column in frames.arrow(self.keys).cast(self._types).columns]

    @cached_property
    def groups(self) -> np.ndarray:
        """uint16[n]: the key groups."""
        return self.grouped[GROUP].to_numpy().astype(np.uint16)

    def encoded(
        self, kind: int, codes: np.ndarray | None = None, before: Sequence[Any] = (), after: Sequence[pa.Array] = ()
    ) -> list[bytes]:
        """Backend keys of a kind of state, for all keys or for those of `codes`, one each.

        Args:
            before: Columns, or a number for all rows, ahead of the key columns, e.g. a tag.
            after: Columns behind them.
        """
        groups, columns = self.groups, self.columns
        if codes is not None:
            groups = groups[codes]
            columns = [column.take(pa.array(codes)) for column in columns]
        ahead = [_repeated(column, len(groups)) if isinstance(column, int) else column for column in before]
        return encode_keys([*ahead, *columns, *after], groups, kind)

    def codes(self, frame: pl.DataFrame, method: str) -> np.ndarray:
        """Return the code of the key of each row.

        StageError is raised for a key that is not of this batch, or cannot be one.
        """
        missing = [name for name in self.names if name not in frame.columns]
        if missing:
            raise StageError(
                f"{method} needs the key column{'s' if len(missing) > 1 else ''} {', '.join(missing)}.",
                where=self.where,
                next="Keep the key columns in the frame that you give to state methods.",
            )
        types = {name: self._frame.schema[name] for name in self.names}
        what = f"{method}: the key column {{!r}} does not fit the stage's, which is {{}}"
        keys = pl.DataFrame(
            [cast(frame[name], type, what.format(name, type), self.where) for name, type in types.items()]
        )
        codes = keys.join(self._frame, on=self.names, how="left", maintain_order="left")[_ROW]
        if codes.null_count():
            strange = _shown(frame.filter(codes.is_null()).select(self.names).head(3))
            raise StageError(
                f"{method} was asked for keys that are not in this batch: {strange}.",
                where=self.where,
                next="A stage reads and writes the state of the keys it is given; key another stage by the other "
                "column.",
            )
        return codes.to_numpy().astype(np.int64)

    def of(self, codes: np.ndarray) -> pl.DataFrame:
        """Return the key columns of some codes."""
        return self.keys[codes]

    def sample(self, codes: np.ndarray) -> str:
        """Return the first keys of some codes, for errors."""
        return str(_shown(self.keys[codes[:3]]))

    def misuse(self, what: str, codes: np.ndarray, next: str) -> StageError:
        """Return an error about the keys of some codes."""
        return StageError(f"{what} (keys: {self.sample(codes)}).", where=self.where, next=next)


def given_columns(
    frame: pl.DataFrame, wanted: Mapping[str, Any], named: Mapping[str, str], method: str, where: str
) -> dict[str, pl.Series]:
    """Return the columns for some fields, in their Polars types: `named[field]` or the column of the field's own name.

    Fields that have neither are left out. StageError for a name that is no field, a missing column, or a value that
    misfits."""
    for name, column in named.items():
        if name not in wanted:
            raise StageError(f"{method} knows no {name!r}.", where=where, next=f"Its columns are: {', '.join(wanted)}.")
        if column not in frame.columns:
            raise StageError(
                f"{method}: {name}={column!r}, but the frame has no column {column!r}.",
                where=where,
                next=f"Its columns are: {', '.join(frame.columns)}.",
            )
    by_field = {}
    for name, type in wanted.items():
        column = named.get(name, name)
        if column in frame.columns:
            what = f"{method}: the column {column!r} does not fit {name!r}, which is {type}"
            by_field[name] = cast(frame[column], type, what, where).alias(name)
    return by_field


def _shown(keys: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Keys for people, also those that are times which no datetime of Python's can be."""
    return [tuple(row.values()) for row in frames.python_rows(frames.arrow(keys))]


def _repeated(number: int, times: int) -> pa.Array:
    return pa.array(np.full(times, number, np.int32))


Convert = Callable[[pa.Table], Any]
"""A function that turns an Arrow table into the frame that the stage's function asked for."""
