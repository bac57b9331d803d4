"""`where` without Spark: a part of Spark SQL that is evaluated as Spark evaluates it, and the rest of it refused by
name.

    rows          compiled(where, schema).kept(table): the rows that Spark would keep
    columns       projected(columns, schema).of(table): those that Spark would make of them
    taken         comparisons, AND, OR, NOT, IS, IN, BETWEEN, LIKE, RLIKE, arithmetic, CAST and a few functions, on
                  booleans, numbers, texts, dates and timestamps, and on fields of structs
    refused       everything else, with the expression and the reason; so is what Spark itself would refuse

Spark's rules that differ from what is usual elsewhere: nulls by three-valued logic; NaN equals NaN and is the largest
number; whole numbers divide to a double, DIV and CAST cut towards zero, % has the dividend's sign; what overflows or
divides by zero fails the epoch (ANSI mode, which Weir sets, as it sets that capitals count in names), unless AND or OR
has decided before; `\\\\` escapes in texts and in LIKE.

`grammar` reads the SQL, `conditions` and `values` give each part its type and its meaning, column by column."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from polars.exceptions import PanicException, PolarsError

from weir.where import expressions
from weir.where.expressions import TOO_DEEP, Fails, NoColumn, Refused
from weir.where.grammar import Parser
from weir.where.projection import projected

__all__ = ["Fails", "NoColumn", "Refused", "Where", "compiled", "projected"]


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on the rows of one schema.

    Attributes:
        columns: Those that it names.
        may_fail: Whether a row may be such that Spark fails over it.
    """

    columns: tuple[str, ...]
    may_fail: bool
    _paths: tuple[tuple[str, ...], ...]
    _condition: expressions.Values
    _everywhere: tuple[expressions.Values, ...]
    _before: tuple[expressions.Values, ...]

    def mask(self, rows: pa.Table | pa.RecordBatch) -> np.ndarray:
        """Return which rows it keeps: bool[n].

        Raises:
            Fails: Spark fails over a row.
            Refused: What Spark does with a row is not known here.
        """
        if not rows.num_rows:
            return np.zeros(0, bool)
        try:
            held = [expressions.column(rows, path).alias(str(at)) for at, path in enumerate(self._paths)]
            frame = pl.DataFrame(held or [pl.Series("", [None])])
            if self._everywhere:
                self._evaluate_everywhere(frame)
            kept: np.ndarray = self._condition(frame).fill_null(False).to_numpy()
        except RecursionError as error:
            raise Refused(TOO_DEEP) from error
        except (PolarsError, PanicException, pa.ArrowException) as error:  # whatever it is, Spark can be asked
            raise Refused(f"it cannot be evaluated by columns: {type(error).__name__}: {error}") from error
        return np.repeat(kept, rows.num_rows) if len(kept) == 1 else kept

    def _evaluate_everywhere(self, frame: pl.DataFrame) -> None:
        """Fail where Spark does, which filters by other parts of the condition before."""
        for keeps in self._before:
            frame = frame.filter(expressions.repeated(keeps(frame), frame).fill_null(False))
        for values in self._everywhere:
            if frame.height:
                values(frame)

    def kept(self, rows: pa.Table) -> pa.Table:
        """Return the rows that it keeps, in their order. Raises as `mask`."""
        mask = self.mask(rows)
        return rows if mask.all() else rows.filter(pa.array(mask))


@functools.lru_cache(maxsize=64)
def compiled(where: str, schema: pa.Schema) -> Where:
    """Read a condition.

    Args:
        where: Spark SQL.
        schema: The rows' columns; those of other types than the table in `expressions` has can only be asked for null.

    Raises:
        Refused: Spark might understand it otherwise, or refuses it; the message says which part of it.
    """
    try:
        parser = Parser(where, schema)
        condition = parser.whole()
    except RecursionError as error:
        raise Refused(TOO_DEEP) from error
    paths, everywhere = tuple(parser.columns), tuple(expression.of for expression in parser.everywhere)
    columns = tuple(dict.fromkeys(path[0] for path in paths))
    before = tuple(part.of for part in condition.conjuncts if not part.may_fail)
    return Where(columns, condition.may_fail, paths, condition.of, everywhere, before)
