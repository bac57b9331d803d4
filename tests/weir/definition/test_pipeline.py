"""What a pipeline's definition takes and refuses, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from weir import (
    Pipeline,
    PipelineError,
    agg,
    aggregate,
    delta,
    expect,
    files,
    foreach,
    on_state,
    side,
    window,
)

LANDED = files("{landing}/*.parquet")
COUNTS = aggregate("counts", LANDED, key="id", rows=agg.count())
GATE = expect("ExpectColumnValuesToNotBeNull", column="id")


def defined(name: str = "orders", **given: Any) -> Pipeline:
    return Pipeline(name, (COUNTS,), **given)


@pytest.mark.parametrize("given", ["counts.note", ("counts.note",), ["counts.note"]], ids=["text", "tuple", "list"])
def test_what_is_retired_or_added_is_a_name_or_several(given):
    """A text is a single name: a stage whose uid is part of it keeps its state."""
    pipeline = defined(retired=given, added=given, owners=given)
    assert pipeline.retired == pipeline.added == pipeline.owners == ("counts.note",)
    assert "counts" not in pipeline.retired


@pytest.mark.parametrize("name", ["Orders", "my-orders", "1st", "orders\n", "", "o" * 64])
def test_a_name_that_cannot_be_part_of_a_path_is_refused(name):
    with pytest.raises(PipelineError, match="cannot name a pipeline"):
        defined(name)


def test_a_table_that_evolves_in_a_way_that_there_is_not_is_refused():
    for sink in (delta.append, lambda table, **more: delta.upsert(table, "id", **more)):
        with pytest.raises(PipelineError, match="evolve='always' is no policy"):
            sink("orders", evolve="always")


def test_one_stage_or_expectation_stands_for_itself():
    pipeline = Pipeline("orders", COUNTS, on_restore=on_state("counts", GATE))
    assert (pipeline.stages, pipeline.on_restore) == ((COUNTS,), (on_state("counts", GATE),))


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lambda: Pipeline("orders", len), "can have in stages="),
        (lambda: Pipeline("orders", (COUNTS, "counts")), "can have in stages="),
        (lambda: defined(on_restore=(GATE,)), "can have in on_restore="),
        (lambda: aggregate("all", "orders", key="id", rows=agg.count()), "nothing that a stage can read"),
        (
            lambda: aggregate("all", side(LANDED, where="id > 1"), key="id", rows=agg.count()),
            "nothing that a stage can read",
        ),
        (lambda: window("all", "orders", key="id", on="at", every="1h", rows=agg.count()), "nothing that a stage can"),
        (lambda: aggregate("all", LANDED, key="id", gate="not null", rows=agg.count()), "is no gate"),
        (lambda: aggregate("all", LANDED, key="id", gate=[GATE, None], rows=agg.count()), "is no gate"),
        (lambda: aggregate("all", LANDED, key="id", gate=None, rows=agg.count()), "is no gate"),
        (lambda: foreach("send"), "is no function"),
    ],
)
def test_what_is_no_part_of_a_definition_is_refused_by_an_error_that_says_so(define, message):
    with pytest.raises(PipelineError, match=message):
        define()
