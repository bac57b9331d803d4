"""What a pipeline's author imports, and all of it.

from pipelines.api import Pipeline, State, Timestamp, agg, aggregate, delta, expect, files, stage, window
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.runtime.definition import (
    Aggregation,
    DeltaSink,
    Epoch,
    FileSource,
    Gate,
    Pipeline,
    Stage,
    Window,
    source_of,
)
from state_ops import aggregates as agg
from state_ops import frames
from state_ops.aggregates import Agg
from state_ops.errors import PipelineError
from state_ops.state import ValueState
from state_ops.state_class import State, Timestamp

__all__ = [
    "Epoch",
    "Pipeline",
    "Stage",
    "State",
    "Timestamp",
    "ValueState",
    "agg",
    "aggregate",
    "delta",
    "expect",
    "files",
    "stage",
    "window",
]

_UNITS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}


def files(pattern: str, *, event_time: str | None = None, name: str = "files", below_floor: str = "fail") -> FileSource:
    """Parquet files that arrive in a directory, taken in name order, each exactly once.

    pattern: directory and file name pattern, e.g. `{landing}/*.parquet`; a {placeholder} is a param of the pipeline in
    the configuration. event_time: timestamp column that drives the watermark. Files must appear whole (write elsewhere,
    then rename) and must not change afterwards; names that start with `.` or `_` are left alone.
    """
    if below_floor not in ("fail", "warn"):
        raise PipelineError(f"below_floor={below_floor!r} is no policy.", where=pattern, next='Say "fail" or "warn".')
    return FileSource(pattern, event_time, name, below_floor)


class delta:
    """Delta sinks."""

    @staticmethod
    def append(table: str) -> DeltaSink:
        """Rows are appended exactly once to the Delta table of this name, which only Weir writes."""
        return DeltaSink(table)


def expect(expectation: str, **arguments: Any) -> Gate:
    """A Great Expectations expectation by class name, e.g. `expect("ExpectColumnValuesToNotBeNull", column="dest")`.

    It is checked on the rows that a stage hands out in one epoch, before the commit. If it fails, the epoch is declined:
    state, offsets and tables stay as they were.
    """
    if not re.fullmatch(r"Expect[A-Za-z]+", expectation):
        raise PipelineError(
            f"{expectation!r} is no expectation of Great Expectations.",
            next='Give a class name such as "ExpectColumnValuesToNotBeNull".',
        )
    return Gate(expectation, tuple(sorted(arguments.items())))


def stage(
    uid: str,
    *,
    source: FileSource | Stage,
    key: str | Sequence[str],
    state: type[State],
    order_by: Sequence[str] = (),
    where: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: DeltaSink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Callable[[Callable[..., Any]], Stage]:
    """Make a keyed stage of a function `(rows, state, epoch) -> rows`.

    uid: the stable name by which its state is found. source: a source or another stage. key: column or columns.
    state: one typed row per key. order_by: rows reach the function sorted by key, then by these, across batches; without
    it the order is undefined and the function must not depend on it. where: Spark SQL; the rows that it drops are counted.
    transform: stateless, deterministic part on a Spark DataFrame. null_keys: "fail", or "drop" (counted).
    gate: expectations on the output.

    The function is called with bounded batches, possibly several an epoch; a key may span batches. It must be
    deterministic: the same rows, state and epoch give the same rows and state. Its first parameter's annotation says which
    frame it gets (pl.DataFrame, pd.DataFrame, pa.Table); it may return any of them.
    """

    def made(function: Callable[..., Any]) -> Stage:
        frames.converter(function)
        return Stage(
            uid=uid,
            input=source,
            key=(key,) if isinstance(key, str) else tuple(key),
            function=function,
            state=state,
            order_by=tuple(order_by),
            where=where,
            transform=transform,
            null_keys=null_keys,
            sink=sink,
            gates=(gate,) if isinstance(gate, Gate) else tuple(gate),
            description=(function.__doc__ or "").strip(),
        )

    return made


def window(
    uid: str,
    source: FileSource | Stage,
    *,
    key: str | Sequence[str],
    every: str,
    on: str,
    lateness: str = "0s",
    where: str | None = None,
    sink: DeltaSink | None = None,
    late: DeltaSink | None = None,
    gate: Gate | Sequence[Gate] = (),
    **aggregates: Agg,
) -> Stage:
    """Event-time tumbling windows: one row per key and closed window, with `window_start`, `window_end` and the aggregates.

    every: the windows' size, e.g. "1h"; on: the timestamp column; lateness: how far behind the newest event time rows may
    come. A window closes at the first barrier whose watermark (newest event time less lateness) has reached its end; rows
    for a window that closed in an earlier epoch are late: counted, and kept in the table `late` if there is one.
    """
    columns = (key,) if isinstance(key, str) else tuple(key)
    _check_aggregates(f"window {uid}", aggregates, {*columns, "window_start", "window_end"})
    ordered = sorted(name for name, aggregate in aggregates.items() if aggregate.kind in ("first", "last"))
    if ordered:
        raise PipelineError(
            f"The window {uid} asks for the {aggregates[ordered[0]].kind} row in {ordered[0]!r}, but rows of a window have no order.",
            next="Use min or max of a timestamp, or a stage with order_by and state.fold.",
        )
    if source_of(source).event_time is None:
        raise PipelineError(
            f"Nothing would ever close the windows of {uid}: its source has no event time.",
            next='Name the column at the source: files(..., event_time="...").',
        )
    return Stage(
        uid=uid,
        input=source,
        key=columns,
        window=Window(on, _micros(every, uid), _micros(lateness, uid), tuple(aggregates.items()), late),
        where=where,
        sink=sink,
        gates=(gate,) if isinstance(gate, Gate) else tuple(gate),
        description=f"Windows of {every} on {on}, by {', '.join(columns)}.",
    )


def aggregate(
    uid: str,
    source: FileSource | Stage,
    *,
    key: str | Sequence[str],
    order_by: Sequence[str] = (),
    where: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: DeltaSink | None = None,
    gate: Gate | Sequence[Gate] = (),
    **aggregates: Agg,
) -> Stage:
    """Running aggregates: at every barrier, one row with the values so far for each key that the epoch touched.

    A row has the key columns, the aggregates and `epoch`, the checkpoint's id as int64: of a key's rows in a table, the one
    with the highest epoch is the newest. order_by: what `agg.first` and `agg.last` are by: the values of the rows where
    these columns are smallest and largest of all rows that ever came. where, transform, null_keys, gate: as in `stage`.
    """
    place = f"aggregate {uid}"
    columns = (key,) if isinstance(key, str) else tuple(key)
    _check_aggregates(place, aggregates, {*columns, "epoch"})
    ordered = sorted(name for name, aggregate in aggregates.items() if aggregate.kind in ("first", "last"))
    if ordered and not order_by:
        raise PipelineError(
            f"{ordered[0]} = {aggregates[ordered[0]].kind}(...) needs an order that is the same however the input is sliced.",
            where=place,
            next='Say by what: order_by=["at"], or take min or max of a column.',
        )
    by = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    return Stage(
        uid=uid,
        input=source,
        key=columns,
        aggregation=Aggregation(tuple((name, aggregate.ordered(by)) for name, aggregate in aggregates.items())),
        where=where,
        transform=transform,
        null_keys=null_keys,
        sink=sink,
        gates=(gate,) if isinstance(gate, Gate) else tuple(gate),
        description=f"Running {', '.join(aggregates)} by {', '.join(columns)}.",
    )


def _check_aggregates(where: str, aggregates: dict[str, Agg], taken: set[str]) -> None:
    if not aggregates:
        raise PipelineError(f"The {where} aggregates nothing.", where=where, next="Add e.g. departures=agg.count().")
    clash = sorted(taken & set(aggregates))
    if clash:
        raise PipelineError(f"The {where} names an aggregate {clash[0]!r}, which is taken.", next="Rename it.")
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Agg):
            raise PipelineError(
                f"{name}={aggregate!r} is no aggregate.", where=where, next=f'Say e.g. {name}=agg.sum("column").'
            )


def _micros(duration: str, uid: str) -> int:
    found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration)
    if not found:
        raise PipelineError(
            f"{duration!r} is no duration.", where=f"window {uid}", next='Write it like "90s", "15m", "1h" or "1d".'
        )
    return int(found[1]) * _UNITS[found[2]]
