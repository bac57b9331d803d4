"""Facts and versions, both as they come: `as_of` joins each row with what held at its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from state_ops.errors import PipelineError
from weir.api.arguments import (
    Side,
    check_event_time,
    check_times_are_no_keys,
    gates_of,
    lanes_of,
    not_negative,
    pairs_of,
    sides_of,
    time_of,
)
from weir.connectors.sink import Sink
from weir.definition import INNER, LEFT, AsOf, Gate, Input, Stage, reading


def as_of(
    uid: str,
    facts: Input | Side,
    versions: Input | Side,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    tolerance: str | timedelta | None = None,
    wait: bool = True,
    how: str = LEFT,
    lateness: str | timedelta = "0s",
    suffix: str = "_right",
    null_keys: str = "fail",
    sink: Sink | None = None,
    late: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Join each fact with the newest version of its key that is not later than the fact, by event time.

        as_of("in_euros", payments, rates, on="currency", tolerance="1d")

    finds for each payment the rate that held then. A fact is handed out once the watermark, that of the slower input
    less lateness, has passed its time, since until then a version for it may come: so it does not matter in which
    epochs rows come. It has the key columns, its other columns, then those of its version.

    A fact that is older than the watermark before its epoch is late: it is counted, and not handed out. A version that
    is older is counted too; it holds for the facts that are handed out from then on, if no newer one does.

    Args:
        facts: A source, a stage, or `side(...)` of one.
        versions: Likewise.
        on: The key columns; {"fact's": "version's"} where their names differ.
        tolerance: How much older than the fact its version may be; by default as old as it is.
        wait: False: facts are handed out in their own epoch, with what has come by then. Which version that is depends
            on how the input is cut into epochs.
        how: "left": a fact without a version comes with nulls; "inner": it does not come.
        lateness: How far behind the newest event time rows may come.
        suffix: Follows the names of the versions' columns that facts have too.
        late: The table that gets late rows of both, as that of `join`. All other arguments: as in `stage`.
    """
    place = f"as_of {uid}"
    of, names = sides_of(facts, versions), dict(pairs_of(on))
    if how not in (LEFT, INNER):
        raise PipelineError(
            f"how={how!r} is no way to find a version.", where=place, next=f"Say {LEFT!r} or {INNER!r}; or `join`."
        )
    if not names:
        raise PipelineError(f"{uid} has no key.", where=place, next='Say on="column".')
    for given in of:
        check_event_time(given.source, f"Nothing would ever say which version holds in {uid}")
    times = (time_of(of[0], place), time_of(of[1], place))
    keys = (tuple(names), tuple(names.values()))
    check_times_are_no_keys(uid, place, keys, times)
    older = None if tolerance is None else not_negative(tolerance, place, "tolerance")
    return Stage(
        uid=uid,
        **reading(of[0].source),
        key=keys[0],
        join=AsOf(
            how, 0, 0, None, times, not_negative(lateness, place, "lateness"), suffix, late, tolerance=older, wait=wait
        ),
        sides=lanes_of(uid, of, keys, null_keys),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"As of, by {', '.join(names)}" + (f", at most {tolerance} before." if older is not None else "."),
    )
