"""The contract of operators, for each of Weir's and for one of somebody else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from tests.weir.operators.outside import installed as installed
from weir import (
    Epoch,
    Stage,
    State,
    ValueState,
    agg,
    aggregate,
    as_of,
    deduplicate,
    delta,
    desc,
    files,
    join,
    operator,
    select,
    side,
    stage,
    top_n,
    union,
    window,
)
from weir.testing import OperatorContract, OperatorSystem
from weir.testing.rows import Rows

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SOURCE = files("{landing}/*.parquet", event_time="at")
OTHERS = files("{landing}/others/*.parquet", name="others", event_time="since")


class Seen(State):
    rows: int = 0


def _counted(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """The rows, of which each key has a count."""
    state.fold(rows, rows=agg.count())
    return rows


def _doubled(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows.with_columns(twice=pl.col("v") * 2)


STAGES = {
    "function": lambda: stage("f", source=SOURCE, key="k", state=Seen, order_by=["at", "n"])(_counted),
    "function without a key": lambda: stage("f", source=SOURCE, key=None)(_doubled),
    "aggregate": lambda: aggregate("a", SOURCE, key="k", n=agg.count(), v=agg.sum("v"), last=agg.last("v"), order_by=["at", "n"]),
    "changes": lambda: aggregate("a", SOURCE, key="k", n=agg.count(), changes=True),
    "window": lambda: window("w", SOURCE, key="k", on="at", every="10m", lateness="1d", n=agg.count()),
    "calendar": lambda: window("w", SOURCE, key="k", on="at", every="1mo", lateness="1d", n=agg.count()),
    "sessions": lambda: window("w", SOURCE, key="k", on="at", gap="3m", lateness="1d", v=agg.sum("v")),
    "deduplicate": lambda: deduplicate("d", SOURCE, key="k", order_by=["at", "n"]),
    "top_n": lambda: top_n("t", SOURCE, key="k", by=[desc("v"), "n"], n=2),
    "select": lambda: select("s", SOURCE, "k", "v + 1 AS more", where="v > 3"),
    "join": lambda: join("j", SOURCE, OTHERS, on={"k": "key"}, within=("-1m", "1m"), lateness="1d", how="left", late=delta.append("late"), sink=delta.append("pairs")),
    "join for ever": lambda: join("j", SOURCE, side(OTHERS, where="w > 20"), on={"k": "key"}, ttl=None, sink=delta.append("pairs")),
    "as_of": lambda: as_of("o", SOURCE, OTHERS, on={"k": "key"}, lateness="1d", tolerance="5m", sink=delta.append("found")),
    "union": lambda: union("u", side(SOURCE, select=["k", "v"]), side(OTHERS, select=["key AS k", "w AS v"]), sink=delta.append("all")),
    "of others": lambda: operator("threshold", "o", SOURCE, key="k", order_by=["at", "n"], column="v", limit=60),
}  # fmt: skip


class Given(OperatorSystem):
    _of = tuple({"k": n % 5, "n": n, "v": n * 37 % 100, "at": NOON + timedelta(minutes=n)} for n in range(60))
    _others = tuple({"key": n % 7, "w": n * 11 % 50, "since": NOON + timedelta(minutes=2 * n)} for n in range(30))

    def __init__(self, made: Stage) -> None:
        self._made = made

    @property
    def rows(self) -> Rows:
        return {SOURCE.name: self._of, "others": self._others} if self._made.is_of_several else self._of

    @property
    def stage(self) -> Stage:
        return self._made


class TestEveryOperator(OperatorContract):
    @pytest.fixture(params=STAGES)
    def system(self, request: pytest.FixtureRequest) -> OperatorSystem:
        return Given(STAGES[request.param]())
