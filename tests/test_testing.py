from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from pipelines.flights import Aircraft, aircraft_rotation, airport_hourly, pipeline
from state_ops.errors import InputError, PipelineError, StageError
from state_ops.moments import to_micros
from tests.tools.reading import state_at, table_at
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, files, stage, testing, window
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import Settings

MORNING = datetime(2013, 1, 1, tzinfo=UTC)


def leg(tailnum: str, at: str, **other: object) -> dict:
    """A flown leg of UA 1 from EWR to BOS, on time."""
    hour, minute = map(int, at.split(":"))
    scheduled = MORNING + timedelta(hours=hour, minutes=minute)
    row = {"tailnum": tailnum, "carrier": "UA", "flight": 1, "origin": "EWR", "dest": "BOS", "scheduled": scheduled}
    return {**row, "dep_time": 517.0, "dep_delay": 0.0, "arr_delay": 0.0, **other}


def legs(number: int, seed: int = 0) -> list[dict]:
    """Legs of nine aircraft, seven minutes apart, some cancelled, diverted or without a tail number."""
    chance = random.Random(seed)
    rows = []
    for flight in range(number):
        row = leg(f"N{chance.randrange(9)}", "00:00", flight=flight, origin=chance.choice(["EWR", "JFK", "LGA"]))
        row["scheduled"] += timedelta(minutes=7 * flight)
        row["dep_delay"] = float(chance.randrange(-10, 90))
        row["arr_delay"] = chance.choice([None, 0.0, 14.0, 15.0, 80.0])
        row["dest"] = chance.choice(["BOS", "SFO", "Zürich"])
        if chance.random() < 0.1:
            row["dep_time"] = None
        if chance.random() < 0.05:
            row["tailnum"] = None
        rows.append(row)
    return rows


# -- the unit test of a stage


def test_a_delay_is_inherited_across_epochs():
    run = testing.run(aircraft_rotation)
    first = run.epoch([leg("N1", "06:00", arr_delay=40.0), leg("N2", "06:10")])
    assert first["inherited"].to_list() == [False, False]
    then = run.epoch([leg("N1", "11:00", dest="SFO"), leg("N2", "11:00")])
    assert dict(zip(then["tailnum"], then["inherited"], strict=True)) == {"N1": True, "N2": False}
    assert then.filter(tailnum="N1")["previous_dest"].to_list() == ["BOS"]
    assert run.state["N1"] == Aircraft(
        legs=2,
        arr_delay_min=40.0,
        last_dest="SFO",
        last_departure=MORNING + timedelta(hours=11),
        last_arr_delay=0.0,
    )


def test_a_delay_of_yesterday_is_not_inherited():
    before = Aircraft(legs=1, last_arr_delay=40.0, last_departure=MORNING)
    run = testing.run(aircraft_rotation, state={"N1": before, "N2": before})
    out = run.epoch([leg("N1", "12:00"), leg("N2", "12:01")])
    assert dict(zip(out["tailnum"], out["inherited"], strict=True)) == {"N1": True, "N2": False}
    assert sorted(out["minutes_since_previous"]) == [720.0, 721.0]


def test_a_diverted_leg_adds_nothing_to_the_delay_on_arrival():
    run = testing.run(aircraft_rotation)
    run.epoch([leg("N1", "06:00", arr_delay=40.0)])
    run.epoch([leg("N1", "08:00", dep_delay=5.0, arr_delay=None)])
    assert (run.state["N1"].legs, run.state["N1"].dep_delay_min, run.state["N1"].arr_delay_min) == (2, 5.0, 40.0)
    out = run.epoch([leg("N1", "10:00")])
    assert (out["previous_arr_delay"].to_list(), out["inherited"].to_list()) == ([None], [False])


def test_cancelled_and_unknown_flights_are_dropped_and_counted():
    run = testing.run(aircraft_rotation)
    out = run.epoch([leg("N1", "06:00"), leg("N2", "06:00", dep_time=None), {**leg("", "07:00"), "tailnum": None}])
    assert out["tailnum"].to_list() == ["N1"]
    assert (run.dropped, list(run.state)) == (2, ["N1"])


# -- what a run gives


def test_state_is_a_mapping_that_follows_the_epochs():
    run = testing.run(aircraft_rotation, state={"N1": Aircraft(legs=3)}, parallelism=3)
    state = run.state
    assert (state["N1"].legs, len(state)) == (3, 1)
    run.epoch([leg("N1", "06:00"), leg("N2", "06:00")])
    assert (state["N1"].legs, len(state), sorted(state)) == (4, 2, ["N1", "N2"])
    with pytest.raises(KeyError):
        state["N3"]


class Total(State):
    rows: int = 0


def test_a_composite_key_is_a_tuple():
    @stage("pairs", source=files("x/*.parquet"), key=["a", "b"], state=Total)
    def pairs(rows: pl.DataFrame, state: ValueState, epoch: Epoch):
        state.fold(rows, rows=agg.count())

    run = testing.run(pairs, state={("x", 1): Total(rows=5)}, parallelism=4)
    run.epoch([{"a": "x", "b": 1}, {"a": "x", "b": 2}])
    assert {key: total.rows for key, total in run.state.items()} == {("x", 1): 6, ("x", 2): 1}
    run.epoch(pd.DataFrame({"a": ["x"], "b": [2]}))
    run.epoch(pl.DataFrame({"a": ["x"], "b": [2]}))
    run.epoch(pa.table({"b": [2], "a": ["x"]}))
    assert run.state["x", 2].rows == 4


def test_an_empty_epoch_hands_out_no_rows_but_their_columns():
    run = testing.run(aircraft_rotation, parallelism=2)
    assert run.epoch([]).shape == (0, 0)  # no row ever came, so that nobody knows the columns
    assert run.acks == ()
    columns = run.epoch([leg("N1", "06:00")]).schema
    assert run.epoch([]).schema == columns
    assert [ack.rows_in for ack in run.acks] == [0, 0]
    assert run.state["N1"].legs == 1


def test_windows_fire_late_rows_are_kept_and_open_windows_can_be_seen():
    run = testing.run(airport_hourly, parallelism=2)
    row = {"origin": "JFK", "dep_delay": 4.0, "inherited": True}
    assert run.epoch([{**row, "scheduled": MORNING + timedelta(minutes=m)} for m in (5, 59, 61)]).is_empty()
    assert run.open_windows["departures"].sort().to_list() == [1, 2]
    fired = run.epoch([{**row, "scheduled": MORNING + timedelta(hours=2)}])
    assert fired["departures"].to_list() == [2]
    assert fired["window_end"].to_list() == [MORNING + timedelta(hours=1)]
    assert run.watermark == MORNING + timedelta(hours=1)
    assert run.epoch([{**row, "scheduled": MORNING + timedelta(minutes=30)}]).is_empty()
    assert run.late.select("origin", "scheduled").rows() == [("JFK", MORNING + timedelta(minutes=30))]
    assert run.epoch([], watermark=MORNING + timedelta(hours=2))["departures"].to_list() == [1]
    assert run.epoch([], drain=True)["departures"].to_list() == [1]
    assert run.open_windows.is_empty()


def test_a_declined_epoch_raises_its_error_and_changes_nothing():
    @stage("picky", source=files("x/*.parquet"), key="k", state=Total)
    def picky(rows: pl.DataFrame, state: ValueState, epoch: Epoch):
        state.fold(rows, rows=agg.count())
        if rows["v"].max() == 13:
            raise ValueError("thirteen")

    run = testing.run(picky, parallelism=2, batch_rows=1)
    run.epoch([{"k": key, "v": 1} for key in range(6)])
    before = dict(run.state)
    with pytest.raises(StageError, match="ValueError: thirteen") as raised:
        run.epoch([{"k": key, "v": 13 if key == 5 else 2} for key in range(6)])
    assert "picky" in raised.value.traceback
    assert dict(run.state) == before
    run.epoch([{"k": key, "v": 2} for key in range(6)])
    assert {total.rows for total in run.state.values()} == {2}


def test_a_null_key_declines_the_epoch_unless_it_is_to_be_dropped():
    def counting(rows: pl.DataFrame, state: ValueState, epoch: Epoch):
        state.fold(rows, rows=agg.count())

    rows = [{"k": "a"}, {"k": None}]
    strict = stage("strict", source=files("x/*.parquet"), key="k", state=Total)(counting)
    with pytest.raises(InputError, match="has no 'k'"):
        testing.run(strict).epoch(rows)
    lax = stage("lax", source=files("x/*.parquet"), key="k", state=Total, null_keys="drop")(counting)
    run = testing.run(lax)
    run.epoch(rows)
    assert (run.acks[0].rows_in, run.acks[0].rows_null_key) == (1, 1)


def test_rows_of_a_key_come_in_order_in_bounded_batches():
    seen = []

    @stage("watched", source=files("x/*.parquet"), key="k", state=Total, order_by=["at"])
    def watched(rows: pl.DataFrame, state: ValueState, epoch: Epoch):
        if epoch.id:
            seen.append((epoch.subtask, rows.rows()))

    run = testing.run(watched, batch_rows=2)
    run.epoch([{"k": k, "at": at} for k in "ba" for at in (3, 1, 2)] + [{"k": "a", "at": None}])
    assert seen == [
        (0, [("a", None), ("a", 1)]),
        (0, [("a", 2), ("a", 3)]),
        (0, [("b", 1), ("b", 2)]),
        (0, [("b", 3)]),
    ]


def test_processing_time_and_watermark_reach_the_function():
    seen = []

    @stage("clock", source=files("x/*.parquet", event_time="at"), key="k", state=Total)
    def clock(rows: pl.DataFrame, state: ValueState, epoch: Epoch):
        if len(rows):
            seen.append((epoch.now, epoch.watermark))

    run = testing.run(clock)
    later = datetime(2024, 5, 1, tzinfo=UTC)
    run.epoch([{"k": 1, "at": MORNING}])
    run.epoch([{"k": 1, "at": MORNING - timedelta(days=1)}], now=later)
    run.epoch([{"k": 1, "at": MORNING}])
    assert [watermark for _, watermark in seen] == [None, MORNING, MORNING]
    assert [now for now, _ in seen[1:]] == [later, later + timedelta(minutes=1)]
    with pytest.raises(ValueError, match="never decreases"):
        run.epoch([], now=later - timedelta(days=1))


def test_columns_of_unknown_type_and_misspelt_ones_are_refused():
    rows = [leg("N1", "06:00", arr_delay=None)]
    with pytest.raises(PipelineError, match="'arr_delay' cannot be told"):
        testing.run(aircraft_rotation).epoch(rows)
    run = testing.run(aircraft_rotation, schema={**_types(leg("N1", "06:00"))})
    assert len(run.epoch(rows)) == 1
    with pytest.raises(InputError, match="'arr_dealy'"):
        run.epoch([leg("N1", "07:00", arr_dealy=1.0)])
    with pytest.raises(InputError, match="'flight' of the rows does not fit"):
        run.epoch([leg("N1", "07:00", flight="UA 1")])


def test_a_number_that_is_too_large_is_refused_and_nothing_is_lost():
    counted = aggregate("counted", files("x/*.parquet"), key="k", n=agg.count(), most=agg.max("k"))
    run = testing.run(counted, schema={"k": pa.uint64()})
    assert run.epoch([{"k": 2**63 - 1}])["n", "most"].rows() == [(1, 2**63 - 1)]
    with pytest.raises(InputError, match="'k' of the rows does not fit"):
        run.epoch([{"k": 2**63}])
    with pytest.raises(InputError, match="A value of the rows does not fit"):
        run.epoch(pa.table({"k": pa.array([2**63], pa.uint64())}))
    assert run.epoch([{"k": 2**63 - 1}])["n", "most"].rows() == [(2, 2**63 - 1)]


def _types(row: dict) -> dict[str, pa.DataType]:
    schema = pa.Table.from_pylist([row]).schema
    return {field.name: field.type for field in schema}


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("k RLIKE 'x$'", "without Spark"),
        ("java_method(k) = 1", "without Spark"),
        ("count(k) > 1", "without Spark"),
        ("k > 1", "without Spark"),
        ("missing > 1", "names 'missing', which is no column"),
    ],
)
def test_a_where_that_only_spark_understands_is_refused(where, says):
    picky = stage("picky", source=files("x/*.parquet"), key="k", state=Total, where=where)(_nothing)
    with pytest.raises(PipelineError, match=says):
        testing.run(picky).epoch([{"k": "x"}])


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ('k = "x"', ["x"]),
        ("NOT (v > 1)", ["y"]),
        ("k LIKE 'a\\_c'", ["a_c"]),
        ("v / 2 = 1.5", ["x"]),
        ("v IS NOT TRUE", None),
    ],
)
def test_a_where_keeps_what_spark_keeps(where, kept):
    run = testing.run(stage("kept", source=files("x/*.parquet"), key="k", state=Total, where=where)(_nothing))
    rows = [{"k": "x", "v": 3}, {"k": "y", "v": 1}, {"k": "a_c", "v": None}, {"k": "abc", "v": None}]
    if kept is None:
        with pytest.raises(PipelineError, match="v is bigint, not a condition"):
            run.epoch(rows)
        return
    run.epoch(rows)
    assert run.dropped == 4 - len(kept)


def test_a_where_that_fails_over_a_row_in_spark_fails_here():
    run = testing.run(stage("kept", source=files("x/*.parquet"), key="k", state=Total, where="6 / v > 2")(_nothing))
    run.epoch([{"k": "x", "v": 2}])
    with pytest.raises(InputError, match="DIVIDE_BY_ZERO"):
        run.epoch([{"k": "x", "v": 0}])


def _nothing(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
    return None


def test_nothing_is_left_on_disk_when_a_run_is_gone():
    run = testing.run(aircraft_rotation)
    run.epoch([leg("N1", "06:00")])
    root = run.epochs.context.settings.work_dir.parent
    assert any(root.rglob("*.sst"))
    del run
    assert not root.exists()


def test_a_pipeline_that_is_declined_downstream_moves_no_stage():
    with pytest.raises(InputError, match="no event time"):
        broken = testing.run_pipeline(_counted_by_hour("no_time"), [[{"k": "a", "at": MORNING}]])
        broken.epoch([{"k": "b", "at": None}])
    assert list(broken.states["no_time"]) == ["a"]
    broken.epoch([{"k": "c", "at": MORNING}], drain=True)
    assert sorted(broken.states["no_time"]) == ["a", "c"]
    assert broken.tables["no_time_hourly"]["rows"].sum() == 2


def _counted_by_hour(uid: str) -> Pipeline:
    @stage(uid, source=files("x/*.parquet", event_time="at"), key="k", state=Total)
    def counted(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        return rows

    hourly = window(
        f"{uid}_hourly", counted, key="k", every="1h", on="at", rows=agg.count(), sink=delta.append(f"{uid}_hourly")
    )
    return Pipeline(uid, (counted, hourly))


# -- slicing


@pytest.mark.parametrize("trials", sampled([1, 4]))
def test_slicing_does_not_matter_to_the_flights(trials):
    rows = legs(60)
    testing.assert_slicing_does_not_matter(aircraft_rotation, rows, trials=trials)
    testing.assert_slicing_does_not_matter(pipeline, rows, trials=trials, seed=1)


@stage("by_batch", source=files("x/*.parquet"), key="k", state=Total, order_by=["n"])
def by_batch(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Wrong: what came before is looked for in the batch alone."""
    return rows.with_columns(before=pl.col("n").shift(1).over("k"))


@stage("by_epoch", source=files("x/*.parquet"), key="k", state=Total)
def by_epoch(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
    """Wrong: counts epochs and batches, not rows."""
    counts = state.get(rows)
    state.put(rows.select("k").with_columns(rows=counts["rows"] + 1).unique("k"))


@stage("unordered", source=files("x/*.parquet"), key="k", state=Total)
def unordered(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
    """Wrong: the last row is kept, but no order is declared."""
    state.fold(rows, rows=agg.last("n"))


@pytest.mark.parametrize(
    ("wrong", "shown"), [(by_batch, "output: the row"), (by_epoch, "state of "), (unordered, "state of ")]
)
def test_a_stage_that_depends_on_slicing_is_caught(wrong, shown):
    rows = [{"k": f"k{n % 3}", "n": n} for n in range(12)]
    with pytest.raises(AssertionError) as raised:
        testing.assert_slicing_does_not_matter(wrong, rows)
    message = str(raised.value)
    assert f"{wrong.uid} depends on how its input is sliced" in message
    assert shown in message
    assert "slicing: " in message and "subtask" in message and "trial " in message


# -- the same on Spark


@pytest.mark.usefixtures("spark")
def test_testing_equals_spark(tmp_path):
    slices = [legs(150, seed=1)[start:end] for start, end in ((0, 40), (40, 41), (41, 110), (110, 150))]
    late = [leg("N1", "00:30", flight=900), leg("N2", "01:10", flight=901)]
    slices[2] = [*late, *slices[2]]
    schema = pa.schema(_types(legs(1)[0] | {"arr_delay": 1.0, "tailnum": "N1", "dep_time": 1.0}))
    for number, rows in enumerate(slices):
        _land(tmp_path / "landing", f"{number}.parquet", pa.Table.from_pylist(rows, schema))
    settings = Settings.model_validate(
        {
            "storage": {"root": str(tmp_path / "storage")},
            "local": {"work_dir": str(tmp_path / "work")},
            "epoch": {"max_files": 1},
            "pipelines": {
                "flights": {"object": "pipelines.flights:pipeline", "params": {"landing": str(tmp_path / "landing")}}
            },
            "spark": {"batch_rows": 16},
        }
    )
    reports = list(run(pipeline, settings, RunOptions(until_caught_up=True, drain=True)))
    here = testing.run_pipeline(pipeline, slices, parallelism=2, batch_rows=16, schema=schema, drain=True)
    assert len(reports) == len(slices) + 1
    storage, registry = open_storage(pipeline, settings)
    for sink in pipeline.sinks:
        there = table_at(storage, sink.name)
        mine = here.tables[sink.name]
        assert len(mine), sink.name
        assert_frame_equal(
            mine.select(sorted(mine.columns)), there.select(sorted(there.columns)), check_row_order=False
        )
    newest = reports[-1].checkpoint
    assert state_at(storage, registry, newest, aircraft_rotation) == {
        (key,): value.as_dict() for key, value in here.states["aircraft_rotation"].items()
    }
    for uid, stage_run in here.stages.items():
        assert newest.operators[uid].rows_in == sum(ack.rows_in for ack in stage_run.acks)
        assert newest.watermarks[uid] == to_micros(stage_run.watermark)


def _land(directory: Path, name: str, table: pa.Table) -> None:
    directory.mkdir(exist_ok=True)
    pq.write_table(table, directory / f".{name}")
    (directory / f".{name}").rename(directory / name)


def test_a_pipeline_is_no_stage_and_a_mapping_is_no_rows():
    with pytest.raises(TypeError, match=r"takes a stage, not a pipeline\. testing\.run_pipeline"):
        testing.run(pipeline)
    with pytest.raises(TypeError, match=r"takes a pipeline, not a stage\. testing\.run runs"):
        testing.run_pipeline(aircraft_rotation)
    with pytest.raises(InputError, match="mapping with the keys 'flights'"):
        testing.run(aircraft_rotation).epoch({"flights": [leg("N1", "08:00")]})
