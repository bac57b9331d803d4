"""aggregate, window and deduplicate in whole runs: failing and resuming without Spark, and once on Spark."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError, TransientError
from tests.properties.events import DISTINCT_COUNTS, SCHEMA, aggregates, database, events, watermarks
from tests.properties.test_operators_sql import DISTINCT, WANTED, alike, placed_in_sessions, remembered
from tests.recovery.harness import Site
from tests.tools.reading import table_at
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, deduplicate, delta, files, stage, window
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operators.watermarks import handed_on
from weir.run.run import RunOptions, run

EVENTS = files("{landing}/*.parquet", event_time="ts", name="landing")
GAP, LATENESS, TTL = timedelta(minutes=40), timedelta(minutes=60), timedelta(minutes=300)

unique = deduplicate(
    "unique", EVENTS, key="seq", ttl="300m", on="ts", sink=delta.append("unique"), late=delta.append("unique_late")
)
totals = aggregate("totals", unique, key="k", order_by=["ts", "seq"], sink=delta.append("totals"), **WANTED, **DISTINCT)
visits = window(
    "visits", EVENTS, key="k", on="ts", gap="40m", lateness="60m", order_by=["ts", "seq"], sink=delta.append("visits"),
    late=delta.append("visits_late"), **WANTED,
)  # fmt: skip
rolling = window(
    "rolling", EVENTS, key="k", on="ts", every="30m", size="75m", lateness="60m", sink=delta.append("rolling"),
    late=delta.append("rolling_late"), n=agg.count(), total=agg.sum("i"),
    texts=agg.count_distinct("s"), numbers=agg.count_distinct("i", where="b"),
)  # fmt: skip
pipeline = Pipeline("measures", (unique, totals, visits, rolling), max_parallelism=16)


def _site(root: Path, cut: list[list[dict]]) -> Site:
    options = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_SPARK__PARALLELISM": "2",
        "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0",  # a failed epoch ends the run
    }
    site = Site(root, options, pipeline, __name__)
    site.landing.mkdir(parents=True)
    for number, rows in enumerate(cut):
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), site.landing / f"{number}.parquet")
    return site


def _check(site: Site, cut: list[list[dict]]) -> None:
    """The tables after a drain, against SQL."""
    tables = {name: [*site.table(name).itertuples(index=False, name=None)] for name in ("unique", "unique_late")}
    out, late, _ = remembered(cut, TTL, "seq")
    number = SCHEMA.names.index("seq")
    assert sorted(row[number] for row in tables["unique"]) == sorted(out)
    assert sorted(row[number] for row in tables["unique_late"]) == sorted(late)
    session, _ = placed_in_sessions(cut, GAP, LATENESS)
    rows = [row["seq"] for slice_ in cut for row in slice_]
    connection = database(
        cut, LATENESS, session=[session.get(seq) for seq in rows], kept=[int(seq in set(out)) for seq in rows]
    )
    newest = _frame(site, "totals").sort("epoch").unique("k", keep="last").drop("epoch")
    assert alike(newest.rows()) == alike(
        connection.sql(
            f"SELECT k, {aggregates('ts', 'seq')}, {DISTINCT_COUNTS} FROM events WHERE kept GROUP BY k"
        ).fetchall()
    )
    assert alike(_frame(site, "visits").rows()) == alike(
        connection.sql(
            f"SELECT k, min(ts), max(ts) + INTERVAL 40 MINUTE, {aggregates('ts', 'seq')} FROM events "
            "WHERE session IS NOT NULL GROUP BY k, session"
        ).fetchall()
    )
    assert Counter(_frame(site, "visits_late")["seq"]) == Counter(seq for seq in rows if seq not in session)
    expected = connection.sql("""
        SELECT k, ending - INTERVAL 75 MINUTE, ending, count(*), coalesce(sum(i), 0)::BIGINT, count(DISTINCT s),
               count(DISTINCT i) FILTER (b)
        FROM (SELECT *, unnest(generate_series(time_bucket(INTERVAL 30 MINUTE, ts), ts - INTERVAL 75 MINUTE,
                        -INTERVAL 30 MINUTE)) + INTERVAL 75 MINUTE AS ending FROM events)
        WHERE ending > ts AND (before IS NULL OR ending > before) GROUP BY k, ending
    """)
    assert alike(_frame(site, "rolling").rows()) == alike(expected.fetchall())


def _frame(site: Site, table: str):
    return table_at(state_reader.open_storage(pipeline, site.settings)[0], table)


class Failing(InMemoryExecutor):
    """Loses a job now and then, with all that it has done."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(batch_rows=5)
        self._chance = chance

    def run(self, task, rows, columns, deadline):
        acks = super().run(task, rows, columns, deadline)
        if self._chance.random() < 0.12:
            raise TransientError("the cluster was away")
        return acks


def test_runs_that_fail_and_resume_give_what_sql_gives(tmp_path):
    cut = events([30, 0, 25, 30], seed=11)
    site = _site(tmp_path, cut)
    chance, tries = random.Random(3), 0
    options = RunOptions(until_caught_up=True, drain=True)
    while True:
        tries += 1
        site.options["WEIR_SPARK__PARALLELISM"] = str(1 + tries % 3)
        try:
            for _ in run(pipeline, site.settings, options, Failing(chance)):
                pass
            break
        except TransientError:
            assert tries < 50
    assert tries > 2
    _check(site, cut)
    site.assert_no_orphans()
    totals_ = {
        row["k"]: row["n"]
        for table in state_reader.scan(pipeline, site.settings, "totals")
        for row in table.to_pylist()
    }
    assert totals_ == {row[0]: row[1] for row in _frame(site, "totals").sort("epoch").unique("k", keep="last").rows()}
    assert state_reader.get(pipeline, site.settings, "visits", ["hot"]) == []
    (hot,) = state_reader.get(pipeline, site.settings, "totals", ["hot"])
    assert len(hot["moments__values"]) == hot["moments"] > 20
    assert [entry["texts__values_key"] for entry in hot["texts__values"]] == ["", "a", "zz", "é"]


def test_what_sessions_and_deduplication_know_can_be_looked_up(tmp_path):
    cut = events([30, 25], seed=4, most_behind=20)
    site = _site(tmp_path, cut)
    reports = list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    figures = reports[-1].checkpoint.operators
    assert [sum(getattr(r.checkpoint.operators["unique"], name) for r in reports) for name in ("rows_out", "rows_duplicate")] == [
        55, 0
    ]  # fmt: skip
    assert figures["visits"].window["gap"] == 40 * 60 * 10**6
    opened = [row for table in state_reader.scan(pipeline, site.settings, "visits") for row in table.to_pylist()]
    mark = watermarks(cut, LATENESS)[-1]
    _, closing = placed_in_sessions(cut, GAP, LATENESS)
    assert len(opened) == sum(epoch > 2 for epoch in closing.values()) > 0
    assert all(row["window_end"] > mark for row in opened)


def test_other_windows_or_aggregates_than_those_in_state_are_refused(tmp_path):
    cut = events([10], seed=4)
    site = _site(tmp_path, cut)
    list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    pq.write_table(pa.Table.from_pylist(cut[0], SCHEMA), site.landing / "9.parquet")
    others = {
        "visits": window("visits", EVENTS, key="k", on="ts", gap="41m", lateness="60m", order_by=["ts", "seq"],
                         sink=visits.sink, late=visits.late, **WANTED),
        "rolling": window("rolling", EVENTS, key="k", on="ts", every="25m", size="75m", sink=rolling.sink,
                          late=rolling.late, n=agg.count(), total=agg.sum("i")),
        "totals": aggregate("totals", unique, key="k", order_by=["seq"], sink=totals.sink, **WANTED),
    }  # fmt: skip
    for uid, other in others.items():
        changed = replace(pipeline, stages=tuple(other if s.uid == uid else s for s in pipeline.stages))
        with pytest.raises(
            PipelineError, match=rf"{uid} does not fit its stored state: .*its (windows|aggregates) were"
        ):
            list(run(changed, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_on_spark_they_give_what_sql_gives(tmp_path):
    cut = events([60, 50], seed=29)
    site = _site(tmp_path, cut)
    for _ in run(pipeline, site.settings, RunOptions(until_caught_up=True, drain=True)):
        pass
    _check(site, cut)


@pytest.mark.parametrize("statistics", [True, False])
def test_windows_of_windows_lose_nothing_whether_files_tell_their_newest_event_time_or_not(
    tmp_path: Path, statistics: bool
) -> None:
    hourly = window("hourly", EVENTS, key="k", on="ts", every="1h", n=agg.count(), sink=delta.append("hourly"))
    again = window("again", hourly, key="k", on="window_start", every="1h", n=agg.sum("n"), sink=delta.append("again"))
    chained = Pipeline("measures", (hourly, again), max_parallelism=16)
    site = _site(tmp_path, [])
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    for number in range(6):
        rows = pa.Table.from_pylist([{"k": "a", "ts": noon + number * timedelta(minutes=40)}])
        pq.write_table(rows, site.landing / f"{number}.parquet", write_statistics=statistics)
    list(run(chained, site.settings, RunOptions(until_caught_up=True, drain=True), InMemoryExecutor()))
    assert _frame(site, "again").sort("window_start")["n"].to_list() == [2, 1, 2, 1]


def test_a_stage_hands_on_the_watermark_by_which_it_has_closed():
    """Its job may see later event times than were planned, as a transform makes them."""
    hourly = window("hourly", EVENTS, key="k", on="ts", every="1h", n=agg.count(), sink=delta.append("hourly"))
    total = aggregate("total", EVENTS, key="k", n=agg.count(), sink=delta.append("total"))
    assert handed_on(hourly, 5, 9, drain=False) == 5
    assert handed_on(hourly, 5, 9, drain=True) == handed_on(total, 5, 9, drain=False) == 9


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("spelt", source=files("{landing}/*.parquet", name="landing"), key="id", state=Seen)
def spelt(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    """Hands on a column that differs from another in capital letters alone."""
    return rows.append_column("ID", pc.utf8_upper(rows.column("id")))


counted = aggregate("counted", spelt, key="ID", sink=delta.append("counted"), rows=agg.count(), first=agg.min("id"))


@pytest.mark.parametrize("direct", sampled(["0", "32"]))
@pytest.mark.usefixtures("spark")
def test_columns_between_stages_may_differ_in_capital_letters_alone(tmp_path, direct):
    options = {"WEIR_SPARK__DIRECT_READ_MB": direct}
    site = Site(tmp_path, options, Pipeline("spelling", (spelt, counted), max_parallelism=8), __name__)
    site.landing.mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a", "A", "b"]}), site.landing / "1.parquet")
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True)))
    rows = site.table("counted")
    assert sorted(zip(rows["ID"], rows["rows"], rows["first"], strict=True)) == [("A", 2, "A"), ("B", 1, "b")]
