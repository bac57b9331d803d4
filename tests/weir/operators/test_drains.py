"""What a drain closes, and what it leaves alone."""

from __future__ import annotations

import pytest

from state_ops.errors import PipelineError
from tests.weir.bed import at
from weir import Pipeline, agg, aggregate, as_of, delta, files, join, side, testing, top_n, window
from weir.operators.joins import as_of as operator

FACTS, VERSIONS = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at") for name in ("facts", "versions"))


def rows(*minutes: int) -> list[dict]:
    return [{"k": "x", "m": minute, "at": at(minute)} for minute in minutes]


def rated(**more) -> Pipeline:
    return Pipeline("p", (as_of("o", FACTS, VERSIONS, on="k", sink=delta.append("o"), **more),))


@pytest.mark.parametrize("tolerance", [None, "1d", "1s", "0s"])
@pytest.mark.parametrize("pieces", [2, 50_000])
@pytest.mark.parametrize("wait", [True, False])
def test_a_drain_of_as_of_hands_out_the_facts_and_neither_forgets_versions_nor_makes_facts_late(
    tolerance, pieces, wait, monkeypatch
):
    monkeypatch.setattr(operator, "EVICTED", pieces)
    run = testing.run_pipeline(rated(tolerance=tolerance, wait=wait))
    for hour in range(4):
        some = {"facts": rows(60 * hour + 1, 60 * hour + 2, 60 * hour + 2), "versions": rows(60 * hour, 60 * hour + 30)}
        run.epoch(some, drain=True)
        assert run.stages["o"].late.is_empty()
    out = [(minute, None if tolerance in ("1s", "0s") else 60 * (minute // 60)) for minute in run.tables["o"]["m"]]
    assert run.tables["o"].select("m", "m_right").rows() == out and len(out) == 12


def test_a_drain_of_as_of_is_followed_by_the_newest_fact_alone():
    run = testing.run_pipeline(rated(tolerance="1d"))
    run.epoch({"facts": rows(10), "versions": rows(5, 90)}, drain=True)
    assert run.stages["o"].watermark == at(10).replace(microsecond=1)
    run.epoch({"facts": rows(10), "versions": []}, drain=True)
    assert run.stages["o"].late["m"].to_list() == [10]
    out = run.epoch({"facts": rows(91), "versions": []}, drain=True)["o"]
    assert out.select("m", "m_right").rows() == [(91, 90)]


def test_late_rows_of_every_operator_can_be_seen_without_a_table_for_them():
    def after(pipeline: Pipeline, *sources: str) -> int:
        run = testing.run_pipeline(pipeline)
        (stage,) = (run.stages[stage.uid] for stage in pipeline.stages)
        run.epoch({name: rows(0, 100) for name in sources})
        run.epoch({name: rows(0) for name in sources})
        assert len(stage.late) == sum(ack.rows_late for ack in stage.acks) == len(stage.rows("late"))
        return len(stage.late)

    assert after(Pipeline("p", (join("j", FACTS, VERSIONS, on="k", within=("0s", "1s")),)), "facts", "versions") == 2
    assert after(Pipeline("p", (join("j", FACTS, VERSIONS, on="k", ttl=None),)), "facts", "versions") == 0
    assert after(rated(), "facts", "versions") == 2
    assert after(Pipeline("p", (window("w", FACTS, key="k", on="at", every="1s", n=agg.count()),)), "facts") == 1
    assert after(Pipeline("p", (window("w", FACTS, key="k", on="at", gap="1s", n=agg.count()),)), "facts") == 1
    assert after(Pipeline("p", (aggregate("a", FACTS, key="k", n=agg.count()),)), "facts") == 0
    windows = window("w", FACTS, key="k", on="at", every="1s", n=agg.count())
    ranks = top_n("t", windows, key="window_end", by="n", n=1, until="window_end")
    run = testing.run_pipeline(Pipeline("p", (windows, ranks)))
    run.epoch({"facts": rows(0, 100)})
    assert run.stages["t"].late.is_empty()


def test_late_rows_that_could_have_no_columns_are_no_empty_table():
    named = {"select": ["k", "m AS side", "at"]}
    joined = join("j", side(FACTS, **named), VERSIONS, on="k", within=("0s", "1s"))
    run = testing.run_pipeline(Pipeline("p", (joined,)))
    run.epoch({"facts": rows(0, 100), "versions": rows(100)})
    assert run.stages["j"].late.is_empty()
    run.epoch({"facts": rows(0), "versions": []})
    with pytest.raises(PipelineError, match="1 row of j was late"):
        _ = run.stages["j"].late
