"""Rows that are changes: which operators take them, and which refuse them."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pyarrow as pa
import pytest

from pipelines.api import (
    Epoch,
    Stage,
    State,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    join,
    stage,
    window,
)
from pipelines.runtime.operators import shapes
from state_ops.errors import PipelineError

CHANGES = delta.table("x/users", name="users", event_time="at", changes=True)
OTHERS = files("x/*.parquet", event_time="at")
ROWS = pa.schema(
    [("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("_change_type", pa.string())]
)


class Nothing(State):
    """Of nobody."""

    rows: int = 0


def function(source, **arguments) -> Stage:
    @stage("it", source=source, key="k", state=Nothing, **arguments)
    def it(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows

    return it


REFUSED: dict[str, tuple[Callable[..., Stage], str]] = {
    "function": (function, "its function may not look at that column"),
    "aggregate": (
        lambda source, **more: aggregate("it", source, key="k", n=agg.count(), **more),
        "cannot be taken back",
    ),
    "window": (
        lambda source, **more: window("it", source, key="k", on="at", every="1h", n=agg.count(), **more),
        "what it made of a row cannot be taken back",
    ),
    "session": (
        lambda source, **more: window("it", source, key="k", on="at", gap="1h", n=agg.count(), **more),
        "what it made of a row cannot be taken back",
    ),
    "deduplicate": (lambda source, **more: deduplicate("it", source, key="k", **more), "cannot be taken back"),
}


@pytest.mark.parametrize("of", REFUSED)
def test_what_cannot_take_rows_back_refuses_changes_where_it_is_defined(of):
    made, why = REFUSED[of]
    with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes") as refused:
        made(CHANGES)
    assert why in refused.value.what and "transform=" in refused.value.next
    assert ("accepts_changes=True" in refused.value.next) == (of == "function")


@pytest.mark.parametrize("of", REFUSED)
def test_what_a_transform_leaves_is_judged_by_its_columns(of):
    made, _ = REFUSED[of]
    plain = made(CHANGES, transform=lambda rows: rows)
    assert shapes(plain, pa.schema([field for field in ROWS if field.name != "_change_type"]))
    with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes"):
        shapes(plain, ROWS)


def test_a_join_refuses_changes_on_either_side():
    for left, right in ((CHANGES, OTHERS), (OTHERS, CHANGES)):
        with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes"):
            join("it", left, right, on="k", within=("0s", "1h"))


def test_a_function_that_looks_at_the_column_takes_changes():
    accepting = function(CHANGES, accepts_changes=True)
    assert not accepting.hands_out_changes and shapes(accepting, ROWS).outputs["main"] == ROWS
    with pytest.raises(PipelineError, match="after cannot read it, whose rows are changes"):
        shapes(deduplicate("after", accepting, key="k"), ROWS)
