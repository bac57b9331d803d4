"""The columns of a `select` without Spark: the same part of its SQL as of a `where`, in Spark's types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
from polars.exceptions import PanicException, PolarsError

from weir.where import expressions
from weir.where.expressions import (
    BOOLEAN,
    DATE,
    DOUBLE,
    FLOAT,
    INTEGER,
    STRING,
    TIMESTAMP,
    TOO_DEEP,
    Expression,
    Refused,
    Type,
)
from weir.where.grammar import Parser

_INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_TYPES: dict[str, Callable[[Type], pa.DataType]] = {
    BOOLEAN: lambda _: pa.bool_(),
    INTEGER: lambda kind: _INTEGERS[kind.size],
    FLOAT: lambda _: pa.float32(),
    DOUBLE: lambda _: pa.float64(),
    STRING: lambda _: pa.string(),
    DATE: lambda _: pa.date32(),
    TIMESTAMP: lambda _: pa.timestamp("us", "UTC"),
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that is made.

    Attributes:
        paths: Of the columns that it is made of.
        value: None for one that is there as it is.
        everywhere: What Spark may fail over wherever it stands, as in `Parser`.
    """

    field: pa.Field
    paths: tuple[tuple[str, ...], ...]
    value: Expression | None = None
    everywhere: tuple[Expression, ...] = ()

    def of(self, rows: pa.Table) -> pa.ChunkedArray:
        if self.value is None:
            return rows.column(self.paths[0][0])
        held = [expressions.column(rows, path).alias(str(at)) for at, path in enumerate(self.paths)]
        frame = pl.DataFrame(held or [pl.Series("", [None] * rows.num_rows)])
        for part in self.everywhere:
            part.of(frame)
        values = expressions.repeated(self.value.of(frame), frame)
        if pa.types.is_date(self.field.type):
            values = values.cast(pl.Int32)
        return pa.chunked_array([values.to_arrow()]).cast(self.field.type)


@dataclass(frozen=True, slots=True)
class Projection:
    """The expressions of a `select`, for rows of one schema.

    Attributes:
        columns: Those of the rows that it looks at.
    """

    columns: tuple[str, ...]
    _columns: tuple[_Column, ...]

    def of(self, rows: pa.Table) -> pa.Table:
        """Return the columns that are made of rows.

        Raises:
            Fails: Spark fails over a row.
            Refused: What Spark does with a row is not known here.
        """
        schema = pa.schema([column.field for column in self._columns])
        if not rows.num_rows:
            return schema.empty_table()
        try:
            arrays = [column.of(rows) for column in self._columns]
        except RecursionError as error:
            raise Refused(TOO_DEEP) from error
        except (PolarsError, PanicException, pa.ArrowException) as error:  # whatever it is, Spark can be asked
            raise Refused(f"it cannot be evaluated by columns: {type(error).__name__}: {error}") from error
        return pa.Table.from_arrays(arrays, schema=schema)


@functools.lru_cache(maxsize=64)
def projected(columns: tuple[str, ...], schema: pa.Schema) -> Projection:
    """Read the columns of a select.

    Args:
        columns: Spark SQL, each an expression with AS and a name, a column, or `*`.
        schema: The rows' columns.

    Raises:
        Refused: Spark might understand one otherwise, or refuses it; the message says which part of it.
    """
    projection: list[_Column] = []
    try:
        for sql in columns:
            if sql.strip() == "*":
                projection += [_Column(field, ((field.name,),)) for field in schema]
                continue
            parser = Parser(sql, schema)
            value, name, column = parser.named_value()
            if column is not None:
                projection.append(_Column(schema.field(column).with_name(name), ((column,),)))
            elif value.type.kind not in _TYPES:
                raise Refused(f"{value.text} is {value.type}, which is Spark's to make a column of")
            else:
                field = pa.field(name, _TYPES[value.type.kind](value.type))
                projection.append(_Column(field, tuple(parser.columns), value, tuple(parser.everywhere)))
    except RecursionError as error:
        raise Refused(TOO_DEEP) from error
    if len({column.field.name.lower() for column in projection}) < len(projection):
        raise Refused("two columns have one name")
    return Projection(
        tuple(dict.fromkeys(path[0] for column in projection for path in column.paths)), tuple(projection)
    )
