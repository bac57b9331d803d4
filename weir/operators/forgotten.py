"""The rule by which an operator forgets keys or rows, where it is another than a checkpoint recorded."""

from __future__ import annotations

from collections.abc import Iterator

from state_ops.durations import shown
from state_ops.records.operator_stats import OperatorStats
from weir.definition import Finding, Stage, Verdict

EXPIRES = "expires"
"""The field of a key's state that says when the key is forgotten."""


def keys_forgotten_otherwise(stage: Stage, recorded: OperatorStats, later: str) -> Iterator[Finding]:
    """Yield a finding if keys are forgotten after another time than before.

    Args:
        later: What becomes of the keys that have been seen, in words.
    """
    was, now = recorded.forgets, stage.operator.forgets
    if "forgets" in recorded.names and was != now:
        what = (
            f"keys were forgotten after {_or_never(was)}, are after {_or_never(now)}: those that have been seen keep"
            f" the time that they had{later}"
        )
        yield Finding("stage", stage.uid, "ttl", Verdict.COMPATIBLE, what)


def rows_forgotten_otherwise(stage: Stage, recorded: OperatorStats) -> Iterator[Finding]:
    """Yield a finding if rows are kept for another time than before."""
    was, now = recorded.forgets, stage.operator.forgets
    if was != now and recorded.sql is not None:  # earlier releases recorded none
        kept = f"rows were kept for {_or_ever(was)}, are for {_or_ever(now)}"
        what = f"{kept}: those that are there keep the time that they had"
        yield Finding("stage", stage.uid, "ttl", Verdict.COMPATIBLE, what)


def _or_ever(micros: int | None) -> str:
    return "ever" if micros is None else shown(micros)


def _or_never(micros: int | None) -> str:
    return "no time" if micros is None else shown(micros)
