"""Operators that need no function of the author: `aggregate`, `window`, `deduplicate` and `join`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import EllipsisType
from typing import Any

from state_ops.errors import PipelineError
from state_ops.rows.aggregates import Agg
from weir.api.arguments import (
    check_event_time,
    check_times_are_no_keys,
    gates_of,
    inputs_of,
    names_of,
    not_negative,
    only_input,
    pairs_of,
    positive,
    sides_of,
    time_of,
)
from weir.api.calendars import UTC, calendar_of, signed
from weir.api.connectors import definition_of
from weir.definition import Gate, OperatorKind, Readable, Stage
from weir.definition.change_feed import CHANGE_TYPE
from weir.definition.sink import Sink
from weir.operators.aggregation import Aggregation
from weir.operators.deduplication import Deduplication
from weir.operators.joins import INNER, JOINS, SEMI, Join
from weir.operators.windows import CalendarWindow, SessionWindow, Window


def aggregate(
    uid: str,
    source: Readable,
    *,
    key: str | Sequence[str],
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
    changes: bool = False,
    **aggregates: Agg,
) -> Stage:
    """Return the running aggregates of each key.

    Each barrier hands out one row for each key that the epoch touched, with the values so far. A row has the key
    columns, the aggregates and `epoch`, the checkpoint's id as int64. Of a key's rows in a table, the one with the
    highest epoch is the newest.

    With `changes=True` the column `_change_type` says what became of a key:

    - `insert`: The key's first row.
    - `update_preimage`, `update_postimage`: The values before and after, if they differ.
    - `delete`: The values before, when all of the key's input has been taken back.

    If the input itself is such changes, count, and sum and mean of integers and decimals, take rows back. Other
    aggregates are refused.

    Args:
        order_by: Columns that decide which row `agg.first` and `agg.last` take: the row where they are smallest or
            largest, of all rows that ever came.
        changes: Hand out changes.
        **aggregates: By output column, e.g. `departures=agg.count()`. All other arguments: as in `stage`.

    Raises:
        PipelineError: Arguments do not go together, or an aggregate needs an order and `order_by` is not said.

    Example:
        >>> from weir import agg, aggregate, files, testing
        >>> flights = files("{landing}/*.parquet")
        >>> totals = aggregate("totals", flights, key="carrier", flights=agg.count(), delay=agg.sum("delay"))
        >>> run = testing.run(totals)
        >>> run.epoch([{"carrier": "AA", "delay": 5}, {"carrier": "AA", "delay": 7}]).to_dicts()
        [{'carrier': 'AA', 'flights': 2, 'delay': 12, 'epoch': 1}]
        >>> run.epoch([{"carrier": "AA", "delay": 1}]).to_dicts()
        [{'carrier': 'AA', 'flights': 3, 'delay': 13, 'epoch': 2}]
    """
    place = f"aggregate {uid}"
    columns, by = names_of(key), names_of(order_by)
    if not isinstance(changes, bool):
        raise PipelineError(
            f"changes={changes!r} does not say whether changes are handed out.",
            where=place,
            next="Say True or False; no aggregate can be named like an argument.",
        )
    _check_aggregates(place, aggregates, {*columns, "epoch", CHANGE_TYPE})
    _check_order(place, aggregates, by)
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, columns, where, select, transform),
        operator=Aggregation(tuple((name, aggregate.ordered(by)) for name, aggregate in aggregates.items()), changes),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"Running {', '.join(aggregates)} by {', '.join(columns)}{', as changes' if changes else ''}.",
    )


def window(  # as long as what is said of its arguments
    uid: str,
    source: Readable,
    *,
    key: str | Sequence[str],
    on: str | None,
    every: str | timedelta | None = None,
    size: str | timedelta | None = None,
    offset: str | timedelta = "0s",
    zone: str = UTC,
    week_begins: str | None = None,
    gap: str | timedelta | None = None,
    gap_included: bool = False,
    lateness: str | timedelta = "0s",
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: Sink | None = None,
    late: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
    **aggregates: Agg,
) -> Stage:
    """Aggregate rows by key and window of time.

    A row has the key columns, `window_start`, `window_end` and the aggregates. It comes out once, when its window has
    closed.

    - `every="1h"`: Tumbling windows, [12:00, 13:00), [13:00, 14:00), ...
    - `every="1h", size="3h"`: Hopping windows. One begins every hour and lasts three; a row is in each that spans it.
    - `every="1mo"`: Windows of the calendar. "3mo" are quarters, "1y" years, "1w" weeks that begin on Monday.
    - `every="1d", zone="Europe/Berlin"`: Days of a time zone, also those of 23 and 25 hours.
    - `gap="30m"`: Sessions. Rows of a key that are closer than the gap, from the first one to the last one + gap.

    A window closes at the first barrier whose watermark (newest event time less lateness) has reached its end. A row is
    late if all its windows closed in an earlier epoch. In sessions a row is late if its session had ended by then.

    With `on=None` time is processing time. All rows of an epoch have the time `epoch.now`, and no row is late. A window
    closes at the first barrier whose `epoch.now` has reached its end; a run begins an epoch for that if no row comes.
    A stage that reads such windows goes by `window_start` and `window_end`, in processing time.

    Args:
        on: The timestamp column; None: processing time.
        offset: Shifts tumbling and hopping windows from 1970-01-01 UTC; "-1h" to earlier. Months and years shift by
            months: every="1y", offset="3mo" begins in April.
        zone: The time zone by whose clocks windows begin. `every` is whole months, weeks or days, or a part of a day.
        week_begins: The day on which weeks, every="1w", begin: "sunday".
        gap_included: Rows exactly a gap apart are one session, not two.
        lateness: How far behind the newest event time rows may come.
        order_by: Columns that decide which row `agg.first` and `agg.last` take; by default `on`.
        late: The table that gets late rows. They are counted without it, too.
        **aggregates: By output column, e.g. `departures=agg.count()`. All other arguments: as in `stage`.

    Raises:
        PipelineError: Arguments do not go together, or the source has no event time.

    Example:
        >>> from datetime import datetime
        >>> from weir import agg, files, testing, window
        >>> readings = files("{landing}/*.parquet", event_time="at")
        >>> hourly = window("hourly", readings, key="device", on="at", every="1h", readings=agg.count())
        >>> run = testing.run(hourly)
        >>> rows = run.epoch([{"device": "a", "at": datetime(2026, 1, 1, 9, minute)} for minute in (5, 40)])
        >>> len(rows), len(run.open_windows)
        (0, 1)
        >>> run.epoch([{"device": "a", "at": datetime(2026, 1, 1, 10, 2)}]).select("device", "readings").to_dicts()
        [{'device': 'a', 'readings': 2}]
    """
    place = f"window {uid}"
    columns = names_of(key)
    _check_aggregates(place, aggregates, {*columns, "window_start", "window_end"})
    by = names_of(order_by) or (() if on is None else (on,))
    if on is None:
        _check_by_clock(place, lateness, late)
        _check_order(place, aggregates, by)
    else:
        check_event_time(source, f"Nothing would ever close the windows of {uid}")
    of_time = on or "processing time"
    ordered = tuple((name, aggregate.ordered(by)) for name, aggregate in aggregates.items())
    behind = not_negative(lateness, place, "lateness")
    kind: Window | SessionWindow
    if gap_included and gap is None:
        raise PipelineError(f"{uid} has no gap.", where=place, next='Say gap="30m", or leave gap_included= out.')
    if gap is not None:
        if (every, size, offset, zone, week_begins) != (None, None, "0s", UTC, None):
            raise PipelineError(
                f"{uid} has a gap, which makes sessions, and a size of its own.",
                where=place,
                next="Say either gap=..., or every=... (with size=, offset=, zone= or week_begins= if you like).",
            )
        kind = SessionWindow(on, positive(gap, place, "gap"), behind, ordered, late, gap_included)
        description = f"Sessions on {of_time} that a gap of {gap} ends"
    elif every is None:
        raise PipelineError(
            f"{uid} does not say which windows.",
            where=place,
            next='Say every="1h", every="1h" and size="3h", every="1mo", or gap="30m".',
        )
    elif calendar := calendar_of(place, every, size, offset, zone, week_begins):
        kind = CalendarWindow(on, 1, 1, 0, behind, ordered, late, calendar)
        description = f"Windows of {calendar} on {of_time}"
    else:
        slide = positive(every, place, "every")
        kind = _sized(uid, on, slide, size, offset, behind, ordered, late)
        description = f"Windows of {size or every} on {of_time}" + (f", every {every}" if kind.size != slide else "")
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, columns, where, select, transform),
        operator=kind,
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"{description}, by {', '.join(columns)}.",
    )


def _sized(
    uid: str,
    on: str | None,
    every: int,
    size: str | timedelta | None,
    offset: str | timedelta,
    lateness: int,
    aggregates: tuple[tuple[str, Agg], ...],
    late: Sink | None,
) -> Window:
    place = f"window {uid}"
    length = every if size is None else positive(size, place, "size")
    shift = signed(offset, place, "offset")
    if length < every:
        raise PipelineError(
            f"The windows of {uid} are smaller than the time between them: rows in between would be in none.",
            where=place,
            next="Make size at least every.",
        )
    if length > every * _MOST_WINDOWS:
        raise PipelineError(
            f"Each row of {uid} would be in {length // every} windows.",
            where=place,
            next=f"Make every larger: at most {_MOST_WINDOWS} windows may overlap.",
        )
    if abs(shift) >= every:
        raise PipelineError(
            f"The offset of {uid} is {offset}, at least the time between windows.",
            where=place,
            next="Make offset smaller than every.",
        )
    return Window(on, length, every, shift % every, lateness, aggregates, late)


def deduplicate(  # as long as what is said of its arguments
    uid: str,
    source: Readable,
    *,
    key: str | Sequence[str],
    ttl: str | timedelta | None = None,
    on: str | None = None,
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: Sink | None = None,
    late: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Return the first row of each key, with all its columns.

    Later rows of the key are dropped, and counted as `rows_duplicate`. Of a key's rows in one epoch the first by
    `order_by` comes out, by default the first by `on`. Without either it is any one of them, but exactly one.

    With `on`, time is event time. A key is remembered until the watermark (newest event time so far) has reached the
    `on` of the row that came out, plus `ttl`. A row is late if the watermark had reached its own `on` plus `ttl` before
    its epoch: nothing tells any more whether it is a duplicate. Late rows are counted and do not come out.

    Without `on`, time is processing time: `epoch.now`, from the epoch in which the row came out. No row is late.

    Args:
        ttl: For how long a key is remembered, e.g. "7d". Without it, for ever.
        on: A timestamp column.
        late: The table that gets late rows. All other arguments: as in `stage`.

    Raises:
        PipelineError: `on` is said without `ttl`, or the source has no event time.

    Example:
        >>> from weir import deduplicate, files, testing
        >>> unique = deduplicate("unique", files("{landing}/*.parquet"), key="order_id", ttl="7d")
        >>> run = testing.run(unique)
        >>> run.epoch([{"order_id": 1}, {"order_id": 2}]).to_dicts()
        [{'order_id': 1}, {'order_id': 2}]
        >>> run.epoch([{"order_id": 2}, {"order_id": 3}]).to_dicts()
        [{'order_id': 3}]
    """
    place = f"deduplicate {uid}"
    if on is not None and ttl is None:
        raise PipelineError(
            f"{uid} says on={on!r}, by which keys are forgotten, but not when.", where=place, next='Add ttl="7d", say.'
        )
    if late is not None and on is None:
        raise PipelineError(
            f"{uid} has a table for late rows, but no event time.", where=place, next='Add on="at" and ttl="7d", say.'
        )
    if on is not None:
        check_event_time(source, f"Nothing would ever be forgotten by {uid}")
    columns = names_of(key)
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, columns, where, select, transform),
        operator=Deduplication(None if ttl is None else positive(ttl, place, "ttl"), on, late),
        order_by=names_of(order_by) or (() if on is None else (on,)),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"The first row by {', '.join(columns)}" + (f", within {ttl}." if ttl else "."),
    )


def join(  # as long as what is said of its arguments
    uid: str,
    left: Readable,
    right: Readable,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    within: tuple[str | timedelta, str | timedelta] | None = None,
    ttl: str | timedelta | EllipsisType | None = ...,
    how: str = INNER,
    lateness: str | timedelta = "0s",
    suffix: str = "_right",
    null_keys: str = "fail",
    sink: Sink | None = None,
    late: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Join rows of two inputs that have the same key and event times near each other.

    Each pair gives one row: the key columns, the other columns of the left side, then those of the right side. A pair
    comes out in the epoch that brings the later of its two rows.

    The watermark is that of the slower input, less lateness. A row that is older than the watermark before its epoch is
    late: it is counted, and finds no partner. State keeps a row until the watermark says that no partner can come.

    Without `within` all rows of a key are partners, and state keeps them for `ttl`, which has to be said.

    Args:
        left: A source, a stage, or `side(...)` of one.
        right: Likewise.
        on: The key columns; {"left's": "right's"} where their names differ. They are handed out by the left side's.
        within: From when to when a partner of a left row is, seen from that row: ("-1h", "0s") are the right rows of
            the hour before it. Both ends are included.
        ttl: Without `within`, for how long a row waits for partners, by processing time; None: for ever.
        how: "inner"; "left", "right", "full": also rows of that side that found no partner, with nulls, as soon as the
            watermark says that none comes; "semi": each left row that has a partner, once, alone; "anti": each that has
            none. All but "inner" and "semi" need `within`.
        lateness: With `within`, how far behind the newest event time rows may come.
        suffix: Follows the names of right columns that the left side has too.
        late: The table that gets late rows of either side: the key, `side` ("left" or "right"), `event_time`, then the
            columns of both, of which those of the other side are null. All other arguments: as in `stage`.

    Raises:
        PipelineError: Neither `within` nor `ttl` is said, arguments do not go together, or an input has no event time.

    Example:
        >>> from datetime import datetime
        >>> from weir import Pipeline, delta, files, join, testing
        >>> orders = files("{landing}/orders/*.parquet", name="orders", event_time="ordered")
        >>> payments = files("{landing}/payments/*.parquet", name="payments", event_time="paid")
        >>> paid = join("paid", orders, payments, on="order_id", within=("0s", "1h"), sink=delta.append("paid"))
        >>> run = testing.run_pipeline(Pipeline("shop", (paid,)))
        >>> ordered = [{"order_id": number, "ordered": datetime(2026, 1, 1, 9)} for number in (1, 2)]
        >>> received = [{"order_id": 1, "paid": datetime(2026, 1, 1, 9, 20), "amount": 30}]
        >>> tables = run.epoch({"orders": ordered, "payments": received})
        >>> tables["paid"].select("order_id", "amount").to_dicts()
        [{'order_id': 1, 'amount': 30}]
    """
    place = f"join {uid}"
    of, names = sides_of(left, right), dict(pairs_of(on))
    if how not in JOINS:
        raise PipelineError(f"how={how!r} is no way to join.", where=place, next=f"Say one of: {', '.join(JOINS)}.")
    bounds, times, kept = None, None, None
    if within is not None:
        if ttl is not ...:
            raise PipelineError(
                f"{uid} says within=, by which rows are forgotten, and ttl=.", where=place, next="Say one of the two."
            )
        is_pair = isinstance(within, tuple | list) and len(within) == 2
        bounds = tuple(signed(bound, place, "within") for bound in within) if is_pair else (0, -1)
        if bounds[0] > bounds[1]:
            raise PipelineError(
                f"within={within!r} is no stretch of time.",
                where=place,
                next='Say from when to when a right row comes, seen from the left one, e.g. within=("-1h", "0s").',
            )
        for given in of:
            check_event_time(given, f"Nothing would ever be forgotten by {uid}")
        times = (time_of(of[0], place), time_of(of[1], place))
    elif ttl is ...:
        raise PipelineError(
            f"{uid} does not say for how long its rows wait for partners.",
            where=place,
            next='Say within=("-1h", "0s") by event time, ttl="1d" by processing time, or ttl=None for ever.',
        )
    elif how not in (INNER, SEMI):
        raise PipelineError(
            f"how={how!r} hands out rows that have no partner, and without within= one may always come.",
            where=place,
            next=f"Say within=..., or how={INNER!r} or {SEMI!r}.",
        )
    else:
        kept = None if ttl is None else positive(ttl, place, "ttl")
    behind = not_negative(lateness, place, "lateness")
    if within is None and (late is not None or behind):
        raise PipelineError(
            f"{uid} says what becomes of late rows, but no row of it is late, since times do not matter.",
            where=place,
            next="Say within=..., or leave lateness= and late= out.",
        )
    keys = (tuple(names), tuple(names.values()))
    check_times_are_no_keys(uid, place, keys, times or (None, None))
    lower, upper = bounds if bounds is not None else (None, None)
    near = "" if within is None else f", from {within[0]} to {within[1]} later"
    return Stage(
        uid=uid,
        operator=Join(how, lower, upper, kept, times, behind, suffix, late),
        inputs=inputs_of(uid, of, keys),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"{how.capitalize()} join by {', '.join(names)}{near}.",
    )


_MOST_WINDOWS = 1000


def _check_aggregates(where: str, aggregates: dict[str, Agg], taken: set[str]) -> None:
    if not aggregates:
        raise PipelineError("It aggregates nothing.", where=where, next="Add e.g. departures=agg.count().")
    clash = sorted(taken & set(aggregates))
    if clash:
        raise PipelineError(f"An aggregate is named {clash[0]!r}, which is taken.", where=where, next="Rename it.")
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Agg):
            raise PipelineError(
                f"{name}={aggregate!r} is no aggregate.", where=where, next=f'Say e.g. {name}=agg.sum("column").'
            )


def _check_order(place: str, aggregates: Mapping[str, Agg], by: Sequence[str]) -> None:
    ordered = sorted(name for name, aggregate in aggregates.items() if aggregate.kind in ("first", "last"))
    if ordered and not by:
        raise PipelineError(
            f"{ordered[0]} = {aggregates[ordered[0]].kind}(...) needs an order that is the same however the input is "
            f"sliced.",
            where=place,
            next='Say by what: order_by=["at"], or take min or max of a column.',
        )


def _check_by_clock(place: str, lateness: str | timedelta, late: Sink | None) -> None:
    if late is not None or not_negative(lateness, place, "lateness"):
        raise PipelineError(
            "on=None means processing time, by which no row is late.",
            where=place,
            next='Leave lateness= and late= out, or say on="column" for event time.',
        )


def operator(
    kind: str,
    uid: str,
    source: Readable,
    *,
    key: str | Sequence[str] = (),
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
    **arguments: Any,
) -> Stage:
    """Return a stage whose operator an installed package brings. docs/how-to/operators.md shows how to write one.

    Args:
        kind: The name of the operator's entry point in the group `weir.operators`: a class that derives from
            `OperatorKind`.
        uid: The stable name by which the stage's state is found.
        source: A source, another stage, or one of its outputs.
        key: Column or columns; none: the stage is stateless.
        order_by: As in `stage`, like all other arguments up to `gate`.
        where: As in `stage`.
        select: As in `stage`.
        transform: As in `stage`.
        null_keys: As in `stage`.
        sink: The sink of the rows that it hands out.
        gate: As in `stage`.
        **arguments: The operator's own.

    Raises:
        ConfigurationError: No installed package brings it, or it cannot be imported.
        PipelineError: It does not take these arguments.

    Example:
        >>> from weir import ConfigurationError, files, operator
        >>> try:
        ...     operator("threshold", "alerts", files("{landing}/*.parquet"), key="sensor", limit=90)
        ... except ConfigurationError as error:
        ...     error.what
        "No installed package brings 'threshold'."
    """
    columns = names_of(key)
    by = f" by {', '.join(columns)}" if columns else ""
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, columns, where, select, transform),
        operator=definition_of("weir.operators", kind, arguments, OperatorKind),
        order_by=names_of(order_by),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"{kind}{by}.",
    )
