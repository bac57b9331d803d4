"""The common arguments of the operators' constructors, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from state_ops.durations import micros
from state_ops.errors import PipelineError
from weir.definition import Gate, Input, Readable, is_clocked, is_timed, origin_of, sources_of


def side(
    source: Readable,
    *,
    select: str | Sequence[str] = (),
    where: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    time: str | None = None,
) -> Input:
    """Return one of several inputs of an operator, with a condition and columns of its own.

    Args:
        source: A source, a stage, or one of its outputs.
        select: As in `stage`, of this input's rows. Columns that it leaves out are neither exchanged nor kept in state.
        where: As in `stage`, of this input's rows.
        transform: As in `stage`, of this input's rows.
        time: The timestamp column of this input; by default the `event_time` of its source.

    Example:
        >>> from weir import files, join, side
        >>> orders = files("{landing}/orders/*.parquet", name="orders", event_time="at")
        >>> payments = files("{landing}/payments/*.parquet", name="payments", event_time="at")
        >>> good = side(payments, where="status = 'ok'", select=["order_id", "at", "amount"])
        >>> paid = join("paid", orders, good, on="order_id", within=("0s", "1h"))
        >>> print(paid.sql_written)
        'order_id', 'at', 'amount', where="status = 'ok'"
    """
    return Input(*origin_of(source), where=where, columns=_texts(select), transform=transform, time=time)


def time_of(given: Input, place: str) -> str:
    """Return the column of an input's event time."""
    named = {source.event_time for source in sources_of(given)}
    if given.time is None and is_clocked(given):
        raise PipelineError(
            "The time of an input is processing time, which no source says.",
            where=place,
            next='Say which column of the input it is: side(..., time="window_end").',
        )
    if given.time is None and len(named) > 1:
        raise PipelineError(
            f"The event time of an input has several names: {', '.join(sorted(map(str, named)))}.",
            where=place,
            next="Say which column of the input it is: side(..., time=...).",
        )
    name = given.time or next(iter(named))
    assert name is not None, "such an input is timed"
    return name


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def columns_of(uid: str, select: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a stage makes of its input's, in SQL."""
    given = _texts(select)
    for column in given:
        if not isinstance(column, str) or not column.strip():
            raise PipelineError(
                f"{column!r} is no column of {uid}.", where=f"stage {uid}", next='Say it in SQL: "price * 2 AS twice".'
            )
    return given


def _texts(select: str | Sequence[str]) -> tuple[str, ...]:
    return (select,) if isinstance(select, str) or not isinstance(select, Iterable) else tuple(select)


def gates_of(gate: Gate | Sequence[Gate]) -> tuple[Gate, ...]:
    """Return one gate, or several, as a tuple."""
    given: tuple[Any, ...] = tuple(gate) if isinstance(gate, Iterable) and not isinstance(gate, str) else (gate,)
    for each in given:
        if not isinstance(each, Gate):
            raise PipelineError(
                f"{each!r} is no gate.",
                next='Say gate=expect("ExpectColumnValuesToNotBeNull", column="id"), say, or several in a list.',
            )
    return given


def check_event_time(source: Readable, consequence: str) -> None:
    """Raise PipelineError with the consequence unless rows of an input come with a watermark."""
    if not is_timed(source):
        raise PipelineError(
            f"{consequence}: its source has no event time.",
            next='Name the column at the source: files(..., event_time="...").',
        )


def positive(duration: str | timedelta, where: str, name: str) -> int:
    """Return a duration in microseconds, which is more than none. name: of the argument."""
    value = not_negative(duration, where, name)
    if not value:
        raise PipelineError(f"{name}={duration!r} is no time at all.", where=where, next='Write it like "90s" or "1h".')
    return value


def not_negative(duration: str | timedelta, where: str, name: str) -> int:
    """Return a duration in microseconds, which may be none. name: of the argument."""
    value = micros(duration, where, name)
    if value < 0:
        raise PipelineError(f"{name}={duration!r} is negative.", where=where, next='Write it like "90s" or "1h".')
    return value


def only_input(
    uid: str,
    source: Readable,
    key: tuple[str, ...],
    where: str | None,
    select: str | Sequence[str],
    transform: Callable[[Any], Any] | None = None,
) -> tuple[Input]:
    """Return the inputs of a stage that has one. The arguments are those of `stage`."""
    return (Input(*origin_of(source), key, where, columns_of(uid, select), transform),)


def sides_of(*given: Readable) -> tuple[Input, ...]:
    """Return the inputs of an operator that has several."""
    return tuple(input if isinstance(input, Input) else side(input) for input in given)


def pairs_of(on: str | Sequence[str] | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the key columns with their names on the other side."""
    return tuple(on.items()) if isinstance(on, Mapping) else tuple((name, name) for name in names_of(on))


def inputs_of(uid: str, sides: Sequence[Input], keys: Sequence[tuple[str, ...]]) -> tuple[Input, ...]:
    """Return the inputs of a stage with their key columns. Raises PipelineError for a column that is no text."""
    return tuple(
        replace(given, key=key, columns=columns_of(uid, given.columns)) for given, key in zip(sides, keys, strict=True)
    )


def check_times_are_no_keys(uid: str, place: str, keys: Sequence[tuple[str, ...]], times: Sequence[str | None]) -> None:
    """Raise PipelineError if a side's event time is one of its key columns."""
    for key, time in zip(keys, times, strict=True):
        if time in key:
            raise PipelineError(
                f"{time!r} is a key of {uid} and the event time of one side.", where=place, next="Leave it out of on=."
            )
