"""Facts and versions, both as they come: `as_of` joins each row with what held at its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from state_ops.errors import PipelineError
from weir.api.arguments import (
    check_event_time,
    check_times_are_no_keys,
    gates_of,
    inputs_of,
    not_negative,
    pairs_of,
    sides_of,
    time_of,
)
from weir.definition import Gate, Readable, Stage
from weir.definition.sink import Sink
from weir.operators.joins import INNER, LEFT, AsOf


def as_of(
    uid: str,
    facts: Readable,
    versions: Readable,
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

    A row has the key columns, the other columns of the fact, then those of its version. It comes out once the watermark
    has passed the fact's time, since a version for it may come until then. So it does not matter in which epochs rows
    come. The watermark is that of the slower input, less lateness.

    A fact that is older than the watermark before its epoch is late: it is counted, and does not come out. A late
    version is counted too; it holds for the facts that come out from then on, unless a newer version does.

    Args:
        facts: The input whose rows come out: a source, a stage, or `side(...)` of one.
        versions: The input with the values over time, likewise.
        on: The key columns; {"fact's": "version's"} where their names differ.
        tolerance: How much older than the fact its version may be; by default as old as it is.
        wait: False: facts are handed out in their own epoch, with what has come by then. Which version that is depends
            on how the input is cut into epochs.
        how: "left": a fact without a version comes with nulls; "inner": it does not come.
        lateness: How far behind the newest event time rows may come.
        suffix: Follows the names of the versions' columns that facts have too.
        late: The table that gets late rows of both, as that of `join`. All other arguments: as in `stage`.

    Raises:
        PipelineError: An input has no event time, or arguments do not go together.

    Example:
        >>> from datetime import datetime
        >>> from weir import Pipeline, as_of, delta, files, testing
        >>> payments = files("{landing}/payments/*.parquet", name="payments", event_time="at")
        >>> rates = files("{landing}/rates/*.parquet", name="rates", event_time="since")
        >>> in_euros = as_of("in_euros", payments, rates, on="currency", tolerance="1d", sink=delta.append("in_euros"))
        >>> run = testing.run_pipeline(Pipeline("payments", (in_euros,)))
        >>> paid = [{"currency": "USD", "at": datetime(2026, 1, 1, 9), "amount": 10}]
        >>> held = [{"currency": "USD", "since": datetime(2026, 1, 1, hour), "rate": hour / 10} for hour in (8, 10)]
        >>> tables = run.epoch({"payments": paid, "rates": held}, drain=True)
        >>> tables["in_euros"].select("currency", "amount", "rate").to_dicts()
        [{'currency': 'USD', 'amount': 10, 'rate': 0.8}]
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
        check_event_time(given, f"Nothing would ever say which version holds in {uid}")
    times = (time_of(of[0], place), time_of(of[1], place))
    keys = (tuple(names), tuple(names.values()))
    check_times_are_no_keys(uid, place, keys, times)
    older = None if tolerance is None else not_negative(tolerance, place, "tolerance")
    return Stage(
        uid=uid,
        operator=AsOf(
            how, 0, 0, None, times, not_negative(lateness, place, "lateness"), suffix, late, tolerance=older, wait=wait
        ),
        inputs=inputs_of(uid, of, keys),
        null_keys=null_keys,
        sink=sink,
        gates=gates_of(gate),
        description=f"As of, by {', '.join(names)}" + (f", at most {tolerance} before." if older is not None else "."),
    )
