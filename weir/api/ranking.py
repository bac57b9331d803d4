"""`top_n`: the first rows of each key, as they are now or once they are final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from state_ops.errors import PipelineError
from weir.api.arguments import check_event_time, columns_of, gates_of, names_of, not_negative, only_input, positive
from weir.definition import Gate, Readable, Source, Stage
from weir.definition.change_feed import CHANGE_TYPE
from weir.definition.column_lineage import before
from weir.definition.sink import Sink
from weir.operators.top_n import TopN


@dataclass(frozen=True, slots=True)
class Descending:
    """A column of which the largest values come first; `desc` makes it."""

    column: str


def desc(column: str) -> Descending:
    """Name a column in `by=` of `top_n` whose largest values come first.

    Example:
        >>> from weir import desc, files, testing, top_n
        >>> best = top_n("best", files("{landing}/*.parquet"), key="game", by=desc("points"), n=1)
        >>> run = testing.run(best)
        >>> run.epoch([{"game": "go", "points": 3}, {"game": "go", "points": 9}])["points"].to_list()
        [9]
    """
    return Descending(column)


def top_n(  # as long as what is said of its arguments
    uid: str,
    source: Readable,
    *,
    key: str | Sequence[str],
    by: str | Descending | Sequence[str | Descending],
    n: int,
    ties: bool = False,
    rank: str | None = "rank_number",
    until: str | None = None,
    ttl: str | timedelta | None = None,
    lateness: str | timedelta = "0s",
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    sink: Sink | None = None,
    late: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Return the first n rows of each key by some columns, with all their columns and their rank.

    Without `until`, each barrier hands out how the ranks have changed since the barrier before. The column
    `_change_type` is as in Delta's change data feed, and rows of a key come in this order:

    - `delete`: A row that is no longer among the first.
    - `update_preimage`, `update_postimage`: A row whose rank has changed, before and after.
    - `insert`: A row that is new among the first.

    `delta.upsert` makes a table of them.

    With `until`, ranks come out once, as plain rows, when the watermark has reached that column. Then they are
    forgotten. Rows of one key that differ in that column are ranked apart. A row is late if the watermark had reached
    its `until` before its epoch.

    Args:
        by: Columns; the smallest values come first, of `desc("column")` the largest. Null is smaller than all else.
            Rows that are equal in them are in the order of their other columns.
        n: The number of ranks of a key, at least 1.
        ties: Rows that are equal in `by` share a rank, and all rows with a rank up to n come out (as SQL's RANK).
            False: each row has a rank of its own (as ROW_NUMBER).
        rank: The column with the rank, from 1. None: there is no such column.
        until: A timestamp column with the first moment that does not count any more, such as `window_end`. It cannot be
            the event time of a source.
        ttl: Without `until`: a key is forgotten after this much processing time without a row. Rows that have come out
            stay, and the key's ranks begin anew. None: keys are never forgotten.
        lateness: With `until`, how far behind the newest event time rows may come.
        late: The table that gets late rows. They are counted without it, too. All other arguments: as in `stage`.

    Raises:
        PipelineError: Arguments do not go together, or the source has no event time where `until` needs it.

    Example:
        >>> from weir import delta, desc, files, testing, top_n
        >>> bids = files("{landing}/*.parquet")
        >>> to = delta.upsert("highest", key=["auction", "rank_number"])
        >>> highest = top_n("highest", bids, key="auction", by=[desc("price"), "seq"], n=2, sink=to)
        >>> run = testing.run(highest)
        >>> rows = run.epoch([{"auction": 7, "price": 10, "seq": 1}, {"auction": 7, "price": 30, "seq": 2}])
        >>> rows.select("price", "rank_number", "_change_type").rows()
        [(30, 1, 'insert'), (10, 2, 'insert')]
    """
    place = f"top_n {uid}"
    columns, order = names_of(key), _order(by, place)
    names = [name for name, _ in order]
    for name in names:
        if name in (*columns, until) or names.count(name) > 1:
            raise PipelineError(
                f"All rows of a key of {uid} have one {name!r}."
                if names.count(name) < 2
                else f"{name!r} stands twice in by= of {uid}.",
                where=place,
                next="Leave it out of by=.",
            )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise PipelineError(f"n={n!r} is no number of rows.", where=place, next="Say n=10, say.")
    if rank is not None and rank in (*columns, *names, until, CHANGE_TYPE):
        raise PipelineError(
            f"{rank!r} is a column of {uid} already.", where=place, next='Say rank="another name", or rank=None.'
        )
    selected = columns_of(uid, select)
    if until is None:
        _check_current(uid, columns, sink, rank if ties else None, late, lateness)
    else:
        _check_final(uid, source, until, ttl, None if transform else before(selected, until))
    kept = None if ttl is None else positive(ttl, place, "ttl")
    what = f"The first {n} by {', '.join(f'{name} descending' if down else name for name, down in order)}"
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, columns, where, selected, transform),
        operator=TopN(order, n, ties, rank, until, kept, not_negative(lateness, place, "lateness"), late),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"{what} of each {', '.join(columns)}" + (f", final at {until}." if until else "."),
    )


def _order(by: str | Descending | Sequence[str | Descending], place: str) -> tuple[tuple[str, bool], ...]:
    """Return the columns of `by`, and of each whether its largest values come first."""
    given = [by] if isinstance(by, str | Descending) else list(by)
    for column in given:
        if not isinstance(column, str | Descending):
            raise PipelineError(
                f"{column!r} in by= is no column.", where=place, next='Say e.g. by=[desc("price"), "seq"].'
            )
    if not given:
        raise PipelineError(
            "by= names no column, so no row comes before another.",
            where=place,
            next='Say e.g. by=[desc("price"), "seq"].',
        )
    return tuple((column, False) if isinstance(column, str) else (column.column, True) for column in given)


def _check_final(uid: str, source: Readable, until: str, ttl: object, column: str | None) -> None:
    """Check that keys are forgotten by one rule, when no row can come any more.

    column: The name of `until` in the input; None if the stage makes it.
    """
    place = f"top_n {uid}"
    if ttl is not None:
        raise PipelineError(
            f"{uid} says until=, by which keys are forgotten, and ttl=.", where=place, next="Say one of the two."
        )
    check_event_time(source, f"No ranks of {uid} would ever be final")
    if isinstance(source, Source) and column == source.event_time:
        raise PipelineError(
            f"{uid} would lose rows: until={until!r} is the time of its events, and when the watermark has reached"
            " it, other events of that very time may still come.",
            where=place,
            next="Say the first moment that does not count any more: the end of a window, or a column that"
            f" select=[...] makes of {until!r}.",
        )


def _check_current(
    uid: str,
    key: tuple[str, ...],
    sink: Sink | None,
    shared: str | None,
    late: Sink | None,
    lateness: str | timedelta,
) -> None:
    """Check that arguments fit ranks that are never final.

    shared: The column with ranks that several rows may have.
    """
    place = f"top_n {uid}"
    if late is not None or not_negative(lateness, place, "lateness"):
        raise PipelineError(
            f"No row of {uid} is late, since its ranks are never final.",
            where=place,
            next='Leave lateness= and late= out, or say until="window_end", say.',
        )
    newest_of = sink.capabilities.newest_of if sink is not None else ()
    if sink is not None and shared is not None and newest_of and set(newest_of) <= {*key, shared}:
        raise PipelineError(
            f"Several rows of {uid} may have one {shared!r}, and the table {sink.name} would keep one of them.",
            where=place,
            next=f"Give the table a key that tells them apart, or say ties=False: its key is {', '.join(newest_of)}.",
        )
