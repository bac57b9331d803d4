"""Several outputs of a stage: what its functions may return, what others read of it, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import PipelineError, StageError
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import (
    Epoch,
    KeyState,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    join,
    lookup,
    select,
    stage,
    testing,
    top_n,
    union,
    window,
)
from weir.settings.configuration import PROJECT

START = datetime(2026, 1, 1, tzinfo=UTC)
TRIPS = files("trips/*.parquet", name="trips", event_time="at")
SCHEMA = pa.schema([("car", pa.string()), ("at", pa.timestamp("us", "UTC")), ("km", pa.int64())])
LIMIT = 100


class Driven(State):
    """Of one car."""

    trips: int = 0
    km: int = 0


OUTPUTS = {"alerts": delta.append("alerts"), "audit": None}


@stage("cars", source=TRIPS, key="car", order_by="at", state=Driven, sink=delta.append("trips"), outputs=OUTPUTS)
def cars(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
    """Every trip with what its car has driven by then; long ones beside it, and each batch's cars."""
    state.fold(rows, trips=agg.count(), km=agg.sum("km"))
    counted = rows.group_by("car", maintain_order=True).agg(rows=pl.len().cast(pl.Int64))
    return {"main": rows, "alerts": rows.filter(pl.col("km") > LIMIT).select("car", "km"), "audit": counted}


alerted = aggregate("alerted", cars.output("alerts"), key="car", sink=delta.append("alerted"), km=agg.sum("km"))
audited = aggregate("audited", cars.output("audit"), key="car", sink=delta.append("audited"), rows=agg.sum("rows"))
driven = aggregate("driven", cars, key="car", sink=delta.append("driven"), km=agg.sum("km"), trips=agg.count())
pipeline = Pipeline("fleet", (cars, alerted, audited, driven), max_parallelism=8)


def trips(number: int, seed: int = 0) -> pl.DataFrame:
    numbers = pl.int_range(number, eager=True)
    return pl.DataFrame(
        {
            "car": "car " + ((numbers * 7 + seed) % 13).cast(pl.String),
            "at": [START + timedelta(seconds=int(second)) for second in numbers],
            "km": (numbers * 31 + seed) % 150,
        }
    )


@pytest.mark.parametrize("trials", sampled([2, 6]))
def test_each_output_goes_where_it_is_declared_and_is_read_by_stages(trials):
    rows = trips(400)
    run = testing.run_pipeline(pipeline, (), schema=SCHEMA, parallelism=3, batch_rows=50)
    handed = [run.epoch(rows[start : start + 100]) for start in range(0, 400, 100)]
    together = {name: pl.concat([some[name] for some in handed]) for name in ("trips", "alerts")}
    long = rows.filter(pl.col("km") > LIMIT)
    assert together["trips"].sort("at").equals(rows)
    assert together["alerts"].sort("car", "km").equals(long.select("car", "km").sort("car", "km"))
    for name, column, expected in (
        ("alerted", "km", long.group_by("car").agg(pl.col("km").sum())),
        ("audited", "rows", rows.group_by("car").agg(rows=pl.len().cast(pl.Int64))),
        ("driven", "km", rows.group_by("car").agg(pl.col("km").sum())),
    ):
        newest = pl.concat([some[name] for some in handed]).sort("epoch").unique("car", keep="last")
        assert newest.select("car", column).sort("car").equals(expected.sort("car")), name
    testing.assert_slicing_does_not_matter(
        replace(pipeline, stages=(cars, alerted)), rows[:150], schema=SCHEMA, trials=trials
    )


def test_a_test_of_a_stage_sees_the_rows_of_each_output():
    run = testing.run(cars, schema=SCHEMA)
    assert run.epoch(trips(10)).height == 10
    assert run.rows("alerts").columns == ["car", "km"]
    assert run.rows("audit")["rows"].sum() == 10
    assert run.acks[0].rows_out == 10
    alone = testing.run(alerted, schema={"car": pa.string(), "km": pa.int64()})
    assert alone.epoch([{"car": "a", "km": 3}, {"car": "a", "km": 4}])["km"].to_list() == [7]
    with pytest.raises(AssertionError, match="output audit"):  # it counts the rows of a batch
        testing.assert_slicing_does_not_matter(cars, trips(40), schema=SCHEMA)


def test_two_outputs_of_one_stage_are_joined():
    both = join("both", cars, cars.output("alerts"), on="car", ttl=None, sink=delta.append("both"))
    rows = trips(200)
    run = testing.run_pipeline(Pipeline("fleet", (cars, both)), (), schema=SCHEMA, parallelism=2, batch_rows=30)
    out = pl.concat([run.epoch(rows[:90])["both"], run.epoch(rows[90:])["both"]])
    expected = rows.join(rows.filter(pl.col("km") > LIMIT).select("car", "km"), on="car", suffix="_right")
    assert (
        out.select(sorted(out.columns)).sort(out.columns).equals(expected.select(sorted(out.columns)).sort(out.columns))
    )


def test_a_stage_without_a_key_has_outputs_and_reads_them():
    @stage("sorted_out", source=TRIPS, key=None, outputs={"long": delta.append("long"), "short": None})
    def sorted_out(rows: pl.DataFrame, epoch: Epoch) -> dict[str, pl.DataFrame]:
        return {"long": rows.filter(pl.col("km") > LIMIT), "short": rows.filter(pl.col("km") <= LIMIT)}

    both = union("both", sorted_out.output("long"), sorted_out.output("short"), sink=delta.append("both"))
    cars_only = select("cars_only", sorted_out.output("short"), "car", sink=delta.append("cars_only"))
    run = testing.run_pipeline(
        Pipeline("fleet", (sorted_out, both, cars_only)), (), schema=SCHEMA, parallelism=3, batch_rows=20
    )
    rows = trips(150)
    out = run.epoch(rows)
    assert out["both"].sort("at").equals(rows)
    assert out["long"].sort("at").equals(rows.filter(pl.col("km") > LIMIT))
    assert out["cars_only"]["car"].sort().equals(rows.filter(pl.col("km") <= LIMIT)["car"].sort())


def test_whatever_reads_a_stage_reads_one_of_its_outputs():
    of = {
        "aggregate": lambda given: aggregate("r", given, key="car", n=agg.count()),
        "window": lambda given: window("r", given, key="car", on="at", every="1h", n=agg.count()),
        "deduplicate": lambda given: deduplicate("r", given, key="car"),
        "join": lambda given: join("r", given, cars, on="car", ttl=None),
        "join, right": lambda given: join("r", cars, given, on="car", ttl=None),
        "top_n": lambda given: top_n("r", given, key="car", by="km", n=1),
        "lookup": lambda given: lookup("r", given, table="cars", on="car"),
        "select": lambda given: select("r", given, "km"),
        "union": lambda given: union("r", cars, given),
        "stage": lambda given: stage("r", source=given, key="car", state=Driven)(plain),
    }
    for name, reading in of.items():
        reader = reading(cars.output("alerts"))
        assert (cars, "alerts") in reader.outputs_before, name
        assert Pipeline("fleet", (cars, reader)).outputs_read(cars) >= {"alerts"}, name


# -- functions that yield, and those that are called key by key


def test_a_function_may_yield_rows_piece_by_piece():
    @stage("pieces", source=TRIPS, key="car", state=Driven, outputs={"alerts": None})
    def pieces(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> Iterator[pl.DataFrame | dict]:
        state.fold(rows, trips=agg.count())
        for some in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            yield some
            yield {"alerts": some.select("car")}

    run = testing.run(pieces, schema=SCHEMA)
    rows = trips(31)
    assert run.epoch(rows).sort("at").equals(rows)
    assert run.rows("alerts")["car"].sort().equals(rows["car"].sort())
    assert sum(state.trips for state in run.state.values()) == 31


@pytest.mark.parametrize("per_key", [False, True])
def test_what_a_function_raises_after_it_has_yielded_is_shown_by_its_own_lines_alone(per_key):
    def batches(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> Iterator[pl.DataFrame]:
        yield rows
        if len(rows):
            raise ValueError("no more")

    def keys(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> Iterator[pl.DataFrame]:
        yield from batches(rows, state, epoch)

    failing = stage("s", source=TRIPS, key="car", state=Driven, per_key=per_key)(keys if per_key else batches)
    with pytest.raises(StageError, match="ValueError: no more") as raised:
        testing.run(failing, schema=SCHEMA).epoch(trips(3))
    assert "test_outputs.py" in raised.value.traceback and str(PROJECT / "weir") not in raised.value.traceback


COLUMNS = {"main": {"car": pa.string(), "trips": pa.int64()}, "alerts": {"car": pa.string(), "km": pa.int64()}}


@pytest.mark.parametrize("yields", [False, True])
def test_a_function_per_key_hands_out_several_outputs(yields):
    def returns(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> dict:
        driven = state.get()
        state.update(Driven(trips=driven.trips + len(rows)))
        alerts = [{"car": key, "km": row["km"]} for row in rows if row["km"] > LIMIT]
        return {"main": [{"car": key, "trips": driven.trips + len(rows)}], "alerts": alerts or None}

    def generates(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> Iterator:
        handed = returns(key, rows, state, epoch)
        yield handed.pop("main")
        yield handed

    declare = stage(
        "each", source=TRIPS, key="car", state=Driven, per_key=True, output=COLUMNS, outputs={"alerts": None}
    )
    run = testing.run(declare(generates if yields else returns), schema=SCHEMA)
    rows = trips(60)
    assert run.epoch(rows).sort("car").equals(rows.group_by("car").agg(trips=pl.len().cast(pl.Int64)).sort("car"))
    expected = rows.filter(pl.col("km") > LIMIT).select("car", "km").sort("car", "km")
    assert run.rows("alerts").sort("car", "km").equals(expected)


def test_a_function_per_key_that_returns_frames_tells_the_columns_of_each_output():
    @stage("each", source=TRIPS, key="car", state=Driven, per_key=True, outputs={"alerts": None})
    def each(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> dict[str, pl.DataFrame]:
        return {"main": rows.select("car"), "alerts": rows.filter(pl.col("km") > LIMIT)}

    run = testing.run(each, schema=SCHEMA)
    rows = trips(60)
    assert run.epoch(rows).height == 60
    assert run.rows("alerts").sort("at").equals(rows.filter(pl.col("km") > LIMIT))


def test_each_output_says_for_itself_whether_its_rows_are_changes():
    def each(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> dict:
        return {}

    plain_columns = {"car": pa.string(), "at": pa.timestamp("us", "UTC")}
    changes = {**plain_columns, "_change_type": pa.string()}
    for main, beside in ((changes, plain_columns), (plain_columns, changes)):
        of_changes = stage(
            "s",
            source=TRIPS,
            key="car",
            state=Driven,
            per_key=True,
            output={"main": main, "beside": beside},
            outputs={"beside": None},
        )(each)
        is_main = main is changes
        assert of_changes.hands_out_changes == select("x", of_changes, "*").hands_out_changes == is_main
        assert select("x", of_changes.output("beside"), "*").hands_out_changes != is_main
        deduplicate("d", of_changes.output("beside") if is_main else of_changes, key="car")
        with pytest.raises(PipelineError, match="rows are changes"):
            deduplicate("d", of_changes if is_main else of_changes.output("beside"), key="car")


def test_timers_hand_out_to_outputs_too():
    def overdue(fired: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
        return {"alerts": fired.select("car", why=pl.lit("not back"))}

    @stage("back", source=TRIPS, key="car", state=Driven, on_timer=overdue, outputs={"alerts": None})
    def back(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(minutes=1)), at="due")
        return rows

    run = testing.run(back, schema=SCHEMA)
    run.epoch(trips(3))
    assert run.rows("alerts").is_empty()
    run.epoch(trips(1).with_columns(pl.col("at") + pl.duration(hours=1)), drain=True)
    assert set(run.rows("alerts")["why"]) == {"not back"} and run.rows("alerts").height >= 3


# -- what is refused


def declared(function, **more):
    return stage("s", source=TRIPS, key="car", state=Driven, **{"outputs": {"alerts": None}, **more})(function)


def plain(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows


def unknown(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict:
    return {"alarms": rows}


def now_and_then(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict:
    return {"alerts": rows if len(rows) else rows.select("car")}


def test_an_output_that_is_not_declared_is_an_error_that_says_which_are():
    with pytest.raises(StageError, match=r"an output 'alarms', which .* its outputs are: main, alerts"):
        testing.run(declared(unknown), schema=SCHEMA).epoch(trips(1))
    with pytest.raises(PipelineError, match=r"columns of the output 'alerts' of s cannot be told"):
        testing.run(declared(plain), schema=SCHEMA).epoch(trips(1))
    with pytest.raises(StageError, match=r"other columns of its output alerts .*: at is new; km is new"):
        testing.run(declared(now_and_then), schema=SCHEMA).epoch(trips(1))
    with pytest.raises(PipelineError, match="no output 'alarms'"):
        testing.run(cars, schema=SCHEMA).rows("alarms")
    with pytest.raises(PipelineError, match="no output 'late'") as refused:
        cars.output("late")
    assert "main, alerts, audit; say where late rows go" in refused.value.next


@pytest.mark.parametrize("name", ["main", "late", "rest", "positions", "quarantine", "a_parts", "Alerts", "a-b"])
def test_names_that_have_another_meaning_are_refused(name):
    with pytest.raises(PipelineError, match=rf"{name!r}"):
        declared(plain, outputs={name: None})


def test_definitions_that_make_no_sense_are_refused():
    with pytest.raises(PipelineError, match="no function that could hand out 'more'"):
        replace(deduplicate("d", TRIPS, key="car"), outputs=(("more", None),))
    with pytest.raises(PipelineError, match="sink"):
        Pipeline("fleet", (declared(plain, sink=delta.append("x"), outputs={"alerts": delta.append("x")}),))
    with pytest.raises(PipelineError, match="no sink that s could write to"):
        declared(plain, outputs={"alerts": "alerts"})
    with pytest.raises(PipelineError, match="in no order"):
        declared(plain, outputs={"alerts": delta.upsert("x", key="km")})
    with pytest.raises(PipelineError, match="reads the output 'alerts' of driven"):
        with_input(alerted, origin=driven)
    with pytest.raises(PipelineError, match="reads from cars, which is not in the pipeline"):
        Pipeline("fleet", (alerted,))
    with pytest.raises(PipelineError, match="does not say the columns of alerts"):
        declared(plain, per_key=True, output={"main": {"car": pa.string()}})
    assert with_input(alerted, cars.output("main")).inputs[0].output == "main"
    assert with_input(driven, cars.output("audit")).inputs[0].output == "audit"
