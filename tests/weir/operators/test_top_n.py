"""Ranks against DuckDB, however the input is sliced: current ones as changes, and those that become final."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_ops.backends.base import BEYOND
from state_ops.backends.memory import MemoryBackend
from state_ops.errors import InputError, PipelineError
from state_ops.keyed.forget import ForgottenKey, copy_without
from state_ops.rows import row_store
from state_ops.rows.resident_table import Residence
from tests.properties.events import CUTS, SCHEMA, database, events, watermarks
from tests.properties.test_operators_sql import quicker
from tests.recovery.harness import Site
from tests.tools.sampling import rounds, sampled
from tests.tools.stages import altered
from weir import Pipeline, Stage, agg, deduplicate, delta, desc, expect, files, testing, top_n, window
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations.plan import plan
from weir.operations.state_import import import_rows
from weir.operators.shapes import shapes
from weir.operators.top_n import running as operator
from weir.operators.watermarks import handed_on
from weir.run.run import RunOptions, run

EVENTS = files("{landing}/*.parquet", event_time="ts", name="landing")
HOUR = timedelta(hours=1)
TIMED = pa.schema([*SCHEMA, ("until", pa.timestamp("us", tz="UTC"))])
BY = {
    "plain": (["i"], "i ASC NULLS FIRST"),
    "down": ([desc("f"), "s"], "f DESC NULLS LAST, s ASC NULLS FIRST"),
    "flags": (["b", desc("d")], "b ASC NULLS FIRST, d DESC NULLS LAST"),
    "few": (desc("s"), "s DESC NULLS LAST"),
    "unique": ([desc("ts"), "seq"], "ts DESC NULLS LAST, seq ASC NULLS FIRST"),
}


def cramped(few: bool) -> ExitStack:
    """With `few`, an operator that keeps next to nothing in memory."""
    stack = ExitStack()
    if few:
        for name, value in (("_GATHERED_BYTES", 300), ("_PART_KEYS", 2), ("_FIRE_KEYS", 2), ("_SWEPT", 128)):
            stack.enter_context(mock.patch.object(operator, name, value))
        stack.enter_context(mock.patch.object(row_store, "_PENDING_BYTES", 1))
        stack.enter_context(mock.patch.object(Residence, "load", lambda *_: None))
        stack.enter_context(mock.patch.object(row_store.RowStore, "_worth_a_scan", lambda *_: False))
    return stack


def ranked(by: str, n: int, ties: bool, key: str, columns: list[str]) -> str:
    """SQL for the first rows of each key. columns: of a row, which order what is equal."""
    order = BY[by][1]
    rank = f"rank() OVER (PARTITION BY {key} ORDER BY {order})"
    if not ties:
        rest = ", ".join(f"{name} ASC NULLS FIRST" for name in columns)
        rank = f"row_number() OVER (PARTITION BY {key} ORDER BY {order}, {rest})"
    return f"SELECT {', '.join(columns)}, {rank} AS place FROM events WHERE {{where}} QUALIFY place <= {n}"


class Followed:
    """A table that follows changes, each of which has to fit what is there."""

    def __init__(self) -> None:
        self.rows: Counter[tuple] = Counter()

    def apply(self, changes: pl.DataFrame) -> None:
        """The changes of an epoch: what goes comes first, and nothing comes that goes."""
        if not changes.width:
            return
        back = changes.filter(pl.col("_change_type").is_in(["delete", "update_preimage"])).drop("_change_type")
        new = changes.filter(pl.col("_change_type").is_in(["insert", "update_postimage"])).drop("_change_type")
        assert len(back) + len(new) == len(changes)
        assert not Counter(back.rows()) & Counter(new.rows()), "an epoch's changes are netted"
        for row in back.rows():
            assert self.rows[row], row
            self.rows[row] -= 1
        self.rows.update(new.rows())
        before, after = ("update_preimage", "update_postimage")
        without = [name for name in changes.columns if name not in ("rank_number", "_change_type")]
        moved = [changes.filter(pl.col("_change_type") == kind).select(without) for kind in (before, after)]
        assert Counter(moved[0].rows()) == Counter(moved[1].rows()), "an update is of one row"


@rounds(3)
@given(by=st.sampled_from(sorted(BY)), n=st.integers(1, 4), ties=st.booleans(), few=st.booleans(), **CUTS)
@quicker
def test_changes_lead_to_what_sql_says_after_each_epoch(round_, by, n, ties, few, sizes, seed, parallelism, batch_rows):
    cut = events(sizes, seed)
    stage = top_n("first", EVENTS, key="k", by=BY[by][0], n=n, ties=ties)
    played = testing.run(stage, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    connection, table = database(cut), Followed()
    for number, rows in enumerate(cut, 1):
        with cramped(few):
            table.apply(played.epoch(rows))
        expected = connection.sql(ranked(by, n, ties, "k", SCHEMA.names).format(where=f"slice <= {number}"))
        assert +table.rows == Counter(expected.fetchall())
    if not ties:
        assert all(len(state.rows) <= n for state in played.state.values())
    played.close()


def with_until(cut: list[list[dict]]) -> list[list[dict]]:
    """Events with the end of the hour after theirs."""
    return [[{**row, "until": row["ts"].replace(minute=0) + 2 * HOUR} for row in rows] for rows in cut]


@rounds(3)
@given(
    by=st.sampled_from(sorted(BY)), n=st.integers(1, 4), ties=st.booleans(), few=st.booleans(),
    lateness=st.integers(0, 120), **CUTS,
)  # fmt: skip
@quicker
def test_ranks_that_become_final_are_sqls_of_the_rows_that_are_not_late(
    round_, by, n, ties, few, lateness, sizes, seed, parallelism, batch_rows
):
    cut, behind = with_until(events(sizes, seed)), timedelta(minutes=lateness)
    stage = top_n(
        "first", EVENTS, key="k", by=BY[by][0], n=n, ties=ties, until="until", lateness=behind, late=delta.append("late")
    )  # fmt: skip
    played = testing.run(stage, parallelism=parallelism, batch_rows=batch_rows, schema=TIMED)
    connection, marks = database(cut, behind), watermarks(cut, behind)
    connection.execute("ALTER TABLE events ADD COLUMN until TIMESTAMPTZ")
    connection.execute("UPDATE events SET until = date_trunc('hour', ts) + INTERVAL 2 HOUR")
    final, late = [], []
    for number, rows in enumerate([*cut, []], 1):
        with cramped(few):
            out = played.epoch(rows, drain=number > len(cut))
        final += out.rows()
        late += played.late["seq"].to_list() if played.late.width else []
        if number <= len(cut) and marks[number] is not None:
            assert all(row["until"] <= marks[number] for row in out.to_dicts()), "nothing comes before it is final"
            assert all(end > marks[number] for end in played.open_windows["until"]), "what is final is forgotten"
    in_time = "before IS NULL OR until > before"
    expected = connection.sql(ranked(by, n, ties, "k, until", TIMED.names).format(where=in_time))
    assert Counter(final) == Counter(expected.fetchall())
    expected_late = connection.sql(f"SELECT seq FROM events WHERE NOT coalesce({in_time}, true)").fetchall()
    assert sorted(late) == sorted(seq for (seq,) in expected_late)
    assert played.open_windows.is_empty()
    played.close()


@pytest.mark.parametrize("trials", sampled([2, 4]))
def test_slicing_does_not_matter(trials):
    (rows,) = events([60], 5, most_behind=1)
    for ties in (False, True):
        current = top_n("first", EVENTS, key="k", by=desc("s"), n=3, ties=ties)
        testing.assert_slicing_does_not_matter(current, rows, schema=SCHEMA, trials=trials)
    final = top_n("first", EVENTS, key=["k", "b"], by=[desc("f")], n=2, until="until", null_keys="drop", rank=None)
    testing.assert_slicing_does_not_matter(final, with_until([rows])[0], schema=TIMED, trials=trials)


def test_wholly_equal_rows_are_told_apart_by_their_ranks_alone():
    played = testing.run(top_n("first", EVENTS, key="k", by="v", n=2), schema={"k": pa.string(), "v": pa.int64()})
    row = {"k": "a", "v": 1}
    assert played.epoch([row])["rank_number"].to_list() == [1]
    assert played.epoch([row, row]).drop("k", "v").rows() == [(2, "insert")]
    assert played.epoch([row]).is_empty()


def test_columns_of_any_type_come_back_as_they_were():
    nested = pa.struct([("x", pa.list_(pa.int32())), ("y", pa.string())])
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("n", nested), ("raw", pa.binary()), ("on", pa.date32())])
    rows = [
        {"k": 1, "v": 1, "n": {"x": [2, None], "y": None}, "raw": b"\0b", "on": datetime(2024, 5, 1).date()},
        {"k": 1, "v": 1, "n": {"x": [], "y": "z"}, "raw": None, "on": None},
        {"k": 1, "v": 1, "n": None, "raw": b"", "on": None},
    ]
    stage = top_n("first", EVENTS, key="k", by="v", n=2)
    testing.assert_slicing_does_not_matter(stage, rows, schema=schema, trials=3)
    played = testing.run(stage, schema=schema)
    table = Followed()
    for row in rows:
        played.epoch([row])
    out = played.epoch([{**rows[1], "v": 0}])
    assert out.filter(pl.col("_change_type") == "insert").drop("rank_number", "_change_type").to_dicts() == [
        {**rows[1], "v": 0}
    ]
    assert table.rows == Counter()


NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


def test_a_key_of_which_no_row_comes_is_forgotten_and_its_ranks_begin_anew():
    stage = top_n("first", EVENTS, key="k", by=desc("v"), n=2, ttl="10m")
    played = testing.run(stage, schema={"k": pa.string(), "v": pa.int64()})
    played.epoch([{"k": "a", "v": 5}, {"k": "b", "v": 7}], now=at(0))
    assert played.epoch([{"k": "a", "v": 1}], now=at(9))["rank_number"].to_list() == [2]
    assert played.epoch([{"k": "b", "v": 1}], now=at(10)).rows() == [("b", 1, 1, "insert")], "7 was ten minutes ago"
    assert set(played.state) == {"a", "b"}
    played.epoch([{"k": "b", "v": 1}], now=at(12))
    assert played.epoch([{"k": "b", "v": 0}], now=at(19)).is_empty()
    played.epoch([], now=at(25))
    assert set(played.state) == {"b"}, "a row that is not among the first keeps its key too"
    played.epoch([], now=at(29))
    assert not played.state
    assert all(not list(backend.scan(b"", BEYOND)) for _, backend in played.backends())


@pytest.mark.long
def test_state_stays_as_large_as_what_is_not_final_however_long_the_input_is():
    stage = top_n("first", EVENTS, key="k", by="seq", n=3, until="until", lateness="1h")
    played, sizes = testing.run(stage, schema=TIMED, parallelism=2), []
    (rows,) = with_until(events([1000], 3, most_behind=1))
    for start in range(0, 1000, 50):
        played.epoch(rows[start : start + 50])
        sizes.append(sum(len(list(backend.scan(b"", BEYOND))) for _, backend in played.backends()))
    assert 0 < max(sizes) <= 2 * max(sizes[:10])


@pytest.mark.parametrize(("until", "entries"), [(None, 2), ("until", 2)])
def test_all_that_is_kept_of_a_key_is_found_when_the_key_is_forgotten(until, entries):
    more = {"ttl": "1d"} if until is None else {"until": until}
    played = testing.run(top_n("first", EVENTS, key="k", by="seq", n=3, **more), schema=TIMED)
    rows = [{"k": key, "ts": at(0), "seq": 1, "until": at(end)} for key in ("a", "ab") for end in (60, 120)]
    played.epoch(rows)
    for _, backend in played.backends():
        key = ForgottenKey.of([pa.array(["a"])], 128)
        left = MemoryBackend()
        assert copy_without(backend, left, key) == entries == len(list(left.scan(b"", BEYOND)))


@pytest.mark.parametrize("trials", sampled([1, 4]))
def test_rows_that_come_behind_ranks_are_never_late_there(trials):
    source = files("bids/*.parquet", event_time="at", name="bids")
    counts = window("counts", source, key="auction", on="at", every="2s", size="10s", n=agg.count())
    hot = top_n("hot", counts, key="window_start", by=desc("n"), n=1, ties=True, until="window_end")
    again = window("again", hot, key="n", on="window_end", every="10s", rows=agg.count(), sink=delta.append("again"))
    chance = random.Random(2)
    rows = [{"auction": chance.randrange(5), "at": NOON + timedelta(seconds=number / 4)} for number in range(400)]
    pipeline = Pipeline("auctions", (counts, hot, again))
    testing.assert_slicing_does_not_matter(pipeline, rows, trials=trials)
    played = testing.run_pipeline(pipeline, ())
    for start in range(0, 400, 40):
        played.epoch(rows[start : start + 40])
        assert not any(ack.rows_late for stage in ("hot", "again") for ack in played.stages[stage].acks)
    # The window that ends at the watermark closes, is ranked and is counted in one epoch.
    assert played.tables["again"]["window_end"].max() == NOON + timedelta(seconds=90)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": []}, "first has no key"),
        ({"by": []}, "names no column"),
        ({"by": [3]}, "3 in by= is no column"),
        ({"by": "k"}, "All rows of a key of first have one 'k'"),
        ({"by": ["seq", desc("seq")]}, "'seq' stands twice"),
        ({"n": 0}, "n=0 is no number of rows"),
        ({"n": True}, "n=True is no number of rows"),
        ({"rank": "seq"}, "'seq' is a column of first already"),
        ({"late": delta.append("late")}, "No row of first is late"),
        ({"lateness": "1h"}, "No row of first is late"),
        ({"until": "until", "ttl": "1h"}, "says until=, by which keys are forgotten, and ttl="),
        ({"until": "seq"}, "All rows of a key of first have one 'seq'"),
        ({"source": files("x/*"), "until": "until"}, "No ranks of first would ever be final"),
        ({"until": "ts"}, "first would lose rows: until='ts' is the time of its events"),
        ({"ties": True, "sink": delta.upsert("t", key=["k", "rank_number"])}, "Several rows of first may have one"),
        ({"gate": expect("ExpectColumnToExist", column="k", on_failure="quarantine")}, "hands out rows of earlier"),
        ({"sink": delta.upsert("t", key="seq")}, "does not contain that of first"),
    ],
)
def test_what_makes_no_ranks_is_refused_where_it_is_defined(change, message):
    arguments = {"source": EVENTS, "key": "k", "by": "seq", "n": 3, **change}
    with pytest.raises(PipelineError, match=message):
        top_n("first", **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "none"}, "no column 'none', by which its rows are to be ranked"),
        ({"by": "list"}, "which has no order"),
        ({"by": "seq", "rank": "i"}, "has a column 'i' already"),
        ({"by": "seq", "until": "i"}, "is int32, not a timestamp"),
        ({"by": "seq", "until": "none"}, "has no column 'none'"),
        ({"by": "seq", "key": "rows"}, "a field of its state"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_the_first_row(change, message):
    columns = pa.schema([*TIMED, ("list", pa.list_(pa.int64())), ("rows", pa.int64())])
    with pytest.raises(PipelineError, match=message):
        shapes(top_n("first", **{"source": EVENTS, "key": "k", "n": 1, **change}), columns)


def test_current_ranks_are_changes_and_final_ones_are_rows():
    current = top_n("first", EVENTS, key="k", by="seq", n=3)
    with pytest.raises(PipelineError, match="unique cannot read first, whose rows are changes"):
        deduplicate("unique", current, key="k")
    with pytest.raises(PipelineError, match="cannot read landing, whose rows are changes"):
        top_n("first", delta.table("x", name="landing", changes=True), key="k", by="seq", n=3)
    final = top_n("first", EVENTS, key="k", by="seq", n=3, until="until")
    assert deduplicate("unique", final, key="k") and not final.hands_out_changes


def test_ranks_hand_on_the_watermark_up_to_which_they_are_final():
    final = top_n("first", EVENTS, key="k", by="seq", n=1, until="until")
    assert [handed_on(final, 5, 9, drain) for drain in (False, True)] == [5, 9]
    assert handed_on(altered(final, until=None), 5, 9, False) == 9


def test_a_row_without_the_moment_at_which_it_is_final_fails_the_epoch():
    played = testing.run(top_n("first", EVENTS, key="k", by="seq", n=3, until="until"), schema=TIMED)
    with pytest.raises(InputError, match="1 row has no event time in 'until'"):
        played.epoch([{"k": "a", "ts": at(0), "seq": 1}])


# -- whole runs


HOURLY = window("hourly", EVENTS, key=["k", "s"], on="ts", every="1h", lateness="60m", null_keys="drop", n=agg.count())
STAGES: tuple[Stage, ...] = (
    top_n("highest", EVENTS, key="k", by=[desc("f"), "seq"], n=3, sink=delta.upsert("highest", ["k", "rank_number"])),
    top_n("newest", EVENTS, key="k", by=desc("seq"), n=2, sink=delta.upsert("newest", ["k", "seq"]), ttl="30d"),
    top_n(
        "final", EVENTS, key="k", by=desc("s"), n=2, ties=True, until="until", lateness="60m",
        sink=delta.append("final"), late=delta.append("final_late"),
    ),
    HOURLY,
    top_n("busiest", HOURLY, key="window_start", by=desc("n"), n=1, ties=True, rank=None, until="window_end",
          sink=delta.append("busiest")),
)  # fmt: skip
PIPELINE = Pipeline("ranks", STAGES, max_parallelism=16)


def site_of(root: Path, cut: list[list[dict]], pipeline: Pipeline = PIPELINE, **options: str) -> Site:
    site = Site(
        root,
        {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__PARALLELISM": "2", "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"}
        | options,
        pipeline,
        __name__,
    )
    site.landing.mkdir(parents=True)
    for number, rows in enumerate(cut):
        pq.write_table(pa.Table.from_pylist(rows, TIMED), site.landing / f"{number}.parquet")
    return site


def frame(site: Site, table: str) -> pl.DataFrame:
    return pl.read_delta(str(site.storage / "tables" / table))


def test_ranks_can_be_looked_up(tmp_path):
    cut = with_until(events([40], seed=4, most_behind=20))
    site = site_of(tmp_path, cut)
    list(run(PIPELINE, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    (hot,) = state_reader.get(PIPELINE, site.settings, "highest", ["hot"])
    best = frame(site, "highest").filter(pl.col("k") == "hot").sort("rank_number")
    assert [row["seq"] for row in hot["rows"]] == best["seq"].to_list()
    open_ranks = [row for table in state_reader.scan(PIPELINE, site.settings, "final") for row in table.to_pylist()]
    mark = watermarks(cut, HOUR)[-1]
    ends = {(row["k"], row["until"]) for row in cut[0] if row["until"] > mark}
    assert {(row["k"], row["until"]) for row in open_ranks} == ends and len(open_ranks) == len(ends)


def test_other_rules_than_those_in_state_are_refused_and_times_may_change(tmp_path):
    site = site_of(tmp_path, with_until(events([10], seed=4)))
    list(run(PIPELINE, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    pq.write_table(pa.Table.from_pylist([], TIMED), site.landing / "9.parquet")
    highest, newest, final = STAGES[:3]

    def changed(stage: Stage, **rules) -> Pipeline:
        other = altered(stage, **rules)
        return replace(PIPELINE, stages=tuple(other if each is stage else each for each in STAGES))

    for pipeline in (
        changed(highest, n=4),
        changed(highest, by=(("f", False), ("seq", False))),
        changed(final, ties=False),
        changed(final, until=None, lateness=0, late=None),
    ):
        with pytest.raises(
            PipelineError, match=r"its rules of what comes first were the first .* by .*, are the first"
        ):
            list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    for pipeline, what in (
        (changed(newest, ttl=None), "keys were forgotten after 30 d, are after no time"),
        (changed(final, lateness=0), "the lateness was 1 h, is 0 s"),
    ):
        findings = plan(pipeline, site.settings).findings
        assert any(what in finding.what for finding in findings), [finding.what for finding in findings]
        assert not any(finding.verdict.stops for finding in findings)


def test_a_column_that_comes_is_null_in_rows_from_before(tmp_path):
    source = files("{landing}/*.parquet", event_time="ts", name="landing", evolve="add")
    stage = top_n("first", source, key="k", by="seq", n=2, sink=delta.upsert("t", ["k", "seq"], evolve="add"))
    pipeline = Pipeline("ranks", (stage,))
    site = site_of(tmp_path, [], pipeline)
    time = pa.timestamp("us", "UTC")
    before = pa.schema([("k", pa.string()), ("seq", pa.int64()), ("ts", time)])
    after = pa.schema([*before, ("more", pa.string())])
    for number, schema in enumerate((before, after)):
        rows = [{"k": "a", "seq": 5 - number, "ts": at(number), "more": "new"}]
        pq.write_table(pa.Table.from_pylist(rows, schema), site.landing / f"{number}.parquet")
        list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    rows = frame(site, "t").sort("seq")
    assert rows.select("seq", "more", "rank_number").rows() == [(4, "new", 1), (5, None, 2)]


def test_imported_ranks_are_gone_by_and_end_when_they_say(tmp_path):
    pipeline = Pipeline("ranks", (replace(STAGES[1], sink=delta.append("newest")),), max_parallelism=4)
    site = site_of(tmp_path, with_until(events([10], seed=4)), pipeline)
    list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    (table,) = [rows for rows in state_reader.scan(pipeline, site.settings, "newest") if rows.num_rows][:1]
    (row, *_) = table.slice(0, 1).to_pylist()
    first = {**row["rows"][0], "seq": 1_000}
    kept = {**row, "k": "kept", "rows": [first, {**first, "seq": 999}]}
    over = {**kept, "k": "over", "expires": row["expires"] - timedelta(days=31)}
    rows = pa.Table.from_pylist([kept, over], table.schema)
    import_rows(pipeline, site.settings, "newest", rows, replaces=True, executor=InMemoryExecutor())
    event = {**first, "ts": at(0), "until": at(60)}
    come = [{**event, "k": key, "seq": seq} for key, seq in (("kept", 998), ("kept", 1_001), ("over", 3))]
    pq.write_table(pa.Table.from_pylist(come, TIMED), site.landing / "9.parquet")
    list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    changes = frame(site, "newest").filter(pl.col("k").is_in(["kept", "over"]))
    assert sorted(changes.select("k", "seq", "rank_number", "_change_type").rows()) == [
        ("kept", 999, 2, "delete"),
        ("kept", 1_000, 1, "update_preimage"),
        ("kept", 1_000, 2, "update_postimage"),
        ("kept", 1_001, 1, "insert"),
        ("over", 3, 1, "insert"),
    ]
