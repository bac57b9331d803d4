"""What a pipeline's definition takes and refuses, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.api import Pipeline, PipelineError, agg, aggregate, delta, files


def defined(name: str = "orders", **given: Any) -> Pipeline:
    counts = aggregate("counts", files("{landing}/*.parquet"), key="id", rows=agg.count())
    return Pipeline(name, (counts,), **given)


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
