"""Rows that must not be staged: no table could hold them, their sink would refuse them, or they break what it promises.

Whatever depends on a value is judged here, before the ack. After the commit nothing may fail because of a value: the
rows could go nowhere, and all later ones would wait behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.unfit_values import UnfitValue, unfit
from state_ops.counts import agrees, counted
from state_ops.errors import InputError
from weir import where
from weir.definition.change_feed import CHANGE_TYPE, SAY_A_CHANGE, unknown_changes, without_change
from weir.definition.sink import ValueRules

_CORRECT = (
    'Correct the value where it is made; or leave the row out in the stage, or by on_bad="quarantine" on the source.'
)


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """The destination of an output.

    Attributes:
        sink: The sink's name.
        directory: In which its rows are staged, in the pipeline's storage.
        key: Columns that are null in no row; none: any may be.
        partition_by: Columns of which each file has one value.
        where: A condition that all rows satisfy.
        rules: What the sink asks of values beyond what every table does.
    """

    sink: str
    directory: str
    key: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    where: str | None = None
    rules: ValueRules | None = None


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Rows that are refused for one reason.

    Attributes:
        rows: Their numbers in the table.
        what: A sentence about all of them.
        next: What to do about it.
    """

    rows: Sequence[int]
    what: str
    next: str


def refusals(target: OutputTarget | None, rows: pa.Table) -> Iterator[RefusedRows]:
    """Yield the reasons why rows cannot be staged; none if they all can.

    Args:
        target: Where they go; None: to other stages alone.

    Raises:
        InputError: It cannot be told whether a row satisfies the target's condition.
    """
    of_sink = "" if target is None else f" for the sink {target.sink}"
    is_fit = True
    for value in unfit(rows):
        is_fit = False
        yield _of_value(value, of_sink)
    if target is None or not is_fit:  # what comes now reads values
        return
    yield from _without_key(target, rows)
    yield from _beside_condition(target, rows)
    for value in target.rules.refused(rows) if target.rules is not None else ():
        yield _of_value(value, of_sink)


def _of_value(value: UnfitValue, of_sink: str) -> RefusedRows:
    what = f"A row{of_sink} cannot be stored: its column {value.column!r} {value.problem}."
    return RefusedRows((value.row,), what, _CORRECT)


def _without_key(target: OutputTarget, rows: pa.Table) -> Iterator[RefusedRows]:
    """Yield rows that do not say which key they are of, or what becomes of it."""
    for name in target.key:
        if missing := rows.column(name).null_count:
            yield RefusedRows(
                _numbers(pc.is_null(rows.column(name))),
                f"{counted(missing, 'row')} for the table {target.sink} {agrees(missing, 'has', 'have')} no "
                f"{name!r}, which is its key.",
                "Leave them out in the stage's function, or give them a key: rows without one would be inserted "
                "again each time.",
            )
    if target.key and CHANGE_TYPE in rows.column_names:
        unknown = unknown_changes(rows)
        if numbers := _numbers(unknown):
            yield RefusedRows(
                numbers, f"A row for the table {target.sink} {without_change(rows, unknown)}.", SAY_A_CHANGE
            )


def _beside_condition(target: OutputTarget, rows: pa.Table) -> Iterator[RefusedRows]:
    """Yield rows that are not among those that they replace."""
    condition = target.where
    if condition is None:
        return
    try:
        holds = where.compiled(condition, rows.schema).mask(rows)
    except (where.Refused, where.Fails) as error:
        raise InputError(
            f"It cannot be told which rows for the table {target.sink} satisfy {condition}: {error}.",
            next="Write the condition so that it holds or not of each row; docs/how-to/sink-delta.md.",
        ) from error
    if others := int(rows.num_rows - holds.sum()):
        yield RefusedRows(
            np.flatnonzero(~np.asarray(holds, bool)).tolist(),
            f"{counted(others, 'row')} for the table {target.sink} {agrees(others, 'does', 'do')} not satisfy "
            f"{condition}, whose rows are to be replaced.",
            "Leave them out in the stage's function, or widen the condition: they would stay in the table for ever.",
        )


def _numbers(mask: pa.ChunkedArray) -> list[int]:
    """Return the numbers of rows of which a mask holds."""
    return list(np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist())
