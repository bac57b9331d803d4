"""The part of a stage that Spark evaluates: what is refused before it runs, and what is said when it fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError, StageError
from state_ops.keyed.keyed_state import GROUP
from state_ops.schema.key_groups import key_groups, subtask_of
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Stage, State, files, stage
from weir.execution.spark import spark_plan

COLUMNS = "a int, s string, scheduled timestamp, xs array<int>, `now (utc)` int, current_date_local int"


class Nothing(State):
    rows: int = 0


def prepared(stage: Stage, rows: Any) -> Any:
    return spark_plan.prepared(stage, stage.inputs[0], rows)


def _stage(**arguments: Any) -> Stage:
    def silent(rows: pa.Table, state: Any, epoch: Any) -> None:
        return None

    return stage("checked", source=files("x/*.parquet"), state=Nothing, **({"key": "a"} | arguments))(silent)


@pytest.fixture(scope="module")
def rows(spark):
    return spark.createDataFrame([(n, str(n) if n else "zero", None, [n], n, n) for n in range(4)], COLUMNS)


# -- chance and clock

CHANCE = {
    "scheduled < current_timestamp": "current_timestamp",
    "scheduled < current_timestamp()": "current_timestamp",
    "scheduled < NOW()": "now",
    "scheduled < localtimestamp()": "localtimestamp",
    "date(scheduled) = current_date": "current_date",
    "date(scheduled) < date_add(curdate(), 1)": "current_date",
    "a < unix_timestamp()": "current_timestamp",
    "scheduled < timestamp'now'": "timestamp 'now'",
    "scheduled < cast('now' as timestamp)": "timestamp 'now'",
    "a < uniform(0, 10)": "uniform",
    "s = randstr(3)": "randstr",
    "rand(7) < 0.5": "rand",
    "random() < 0.5": "random",
    "s = uuid()": "uuid",
    "shuffle(xs)[0] = 1": "shuffle",
    "exists(xs, x -> x > rand())": "rand",
    "a in (select max(id) from range(3) where rand() < 0.5)": "rand",
    "a = monotonically_increasing_id()": "monotonically_increasing_id",
    "a = spark_partition_id()": "spark_partition_id",
    "s = input_file_name()": "input_file_name",
    "s = reflect('java.util.UUID', 'randomUUID')": "reflect",
}


@pytest.mark.parametrize("where", CHANCE)
def test_an_expression_of_chance_or_of_the_clock_is_refused_by_name(rows, where):
    with pytest.raises(PipelineError, match=f"^{CHANCE[where]}.* gives another result") as raised:
        prepared(_stage(where=where), rows)
    assert where in raised.value.where
    if "'now'" not in where:  # a typed literal is a constant in the plan, a special text a cast
        chance = spark_plan.chance_in_text(rows.where(where)._jdf.queryExecution().toString())
        assert chance == f"{CHANCE[where]}()"


@pytest.mark.parametrize("column", ["timestamp'now'", "cast(date 'today' as string)", "current_timestamp()", "rand()"])
def test_columns_of_a_select_depend_on_neither(rows, column):
    stage = altered(_stage(where="a > 0"), columns=("a", f"{column} AS x"))
    with pytest.raises(PipelineError, match="gives another result when a task runs again") as raised:
        prepared(stage, rows)
    assert column in raised.value.where
    assert "where='a > 0'" in raised.value.where


@pytest.mark.parametrize(
    "where",
    [
        "unix_timestamp(scheduled) > 3",
        "`now (utc)` = 3",
        "current_date_local = 3",
        "s <> 'rand(' or s <> 'now()' or s <> 'current_date'",
        "scheduled < timestamp'2024-05-01 12:00:00'",
        "aggregate(xs, 0, (sum, x) -> sum + x) > 1",
        "s = cast('now' as string)",
        "a in (select id from range(3))",
    ],
)
def test_what_only_looks_like_chance_is_accepted(rows, where):
    prepared(_stage(where=where), rows)
    if "'rand('" not in where:
        assert spark_plan.chance_in_text(rows.where(where)._jdf.queryExecution().toString()) is None


def test_a_column_of_that_name_is_a_column(rows):
    prepared(_stage(where="current_timestamp > 1"), rows.withColumnRenamed("a", "current_timestamp"))


def _udf(rows):
    from pyspark.sql import functions as F

    def lottery(value: int) -> int:
        return value

    return rows.withColumn("z", F.udf(lottery, "int").asNondeterministic()("a"))


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda rows: rows.selectExpr("*", "1 + rand() as z"), "rand"),
        (lambda rows: rows.selectExpr("a", "now() as z").select("a"), "now"),
        (lambda rows: rows.sample(0.5, seed=1), "sample"),
        (_udf, "lottery"),
    ],
)
def test_a_transform_is_looked_through_too(rows, transform, name):
    with pytest.raises(PipelineError, match=rf"^{name}\(\) gives another result"):
        prepared(_stage(transform=transform), rows)


def test_a_stage_is_looked_through_once_if_it_passes(rows, monkeypatch):
    looked = []
    refuse = spark_plan._refuse_chance
    monkeypatch.setattr(spark_plan, "_refuse_chance", lambda *given: (looked.append(given[0]), refuse(*given)))
    good, bad = _stage(where="a > 1"), _stage(where="a > rand()")
    for _ in range(3):
        prepared(good, rows)
        with pytest.raises(PipelineError, match="rand"):
            prepared(bad, rows)
    assert [plan is good for plan in looked] == [True, False, False, False]


# -- transforms that fail


def test_a_transform_that_raises_shows_the_authors_own_traceback(rows):
    def looked_up(rows):
        return rows.where({"C": 1}["K"])

    with pytest.raises(StageError, match="The transform of the stage checked raised KeyError: 'K'") as raised:
        prepared(_stage(transform=looked_up), rows)
    assert "in looked_up" in raised.value.traceback
    assert "/spark_plan.py" not in raised.value.traceback


def test_a_transform_that_returns_no_rows_or_unknown_names_is_told(rows):
    with pytest.raises(StageError, match="returned NoneType, not a Spark DataFrame"):
        prepared(_stage(transform=lambda _: None), rows)
    with pytest.raises(PipelineError, match=r"cannot resolve the stateless part of checked.*nothing"):
        prepared(_stage(transform=lambda rows: rows.select("nothing")), rows)


# -- the shuffle


@pytest.mark.parametrize("name", ["tail.num", "tail num", "ta`il", "`", "a.b.c d"])
def test_keys_and_order_may_have_any_name(spark, name):
    order = f"{name} at"
    data = spark.createDataFrame([(f"k{n % 3}", -n) for n in range(12)], ["k", "n"]).toDF(name, order)
    keyed = _stage(key=name, order_by=[order])
    sent = spark_plan.exchanged(keyed, data, 2, 128)
    rows = sent.selectExpr("*", "spark_partition_id() as subtask").toArrow().to_pylist()
    groups = key_groups([pa.array([row[name] for row in rows])], 128)
    assert [row[GROUP] for row in rows] == groups.tolist()
    assert [row["subtask"] for row in rows] == [subtask_of(group, 2, 128) for group in groups.tolist()]
    for key in ("k0", "k1", "k2"):
        ordered = [row[order] for row in rows if row[name] == key]
        assert len(ordered) == 4 and ordered == sorted(ordered)


# -- types


@pytest.mark.parametrize(
    ("value", "type"),
    [("interval 2 months", "interval month"), ("array()", "array<void>"), ("map()", "map<void,void>")],
)
def test_an_input_column_that_arrow_does_not_have_is_named(spark, value, type):
    data = spark.sql(f"select 1 as a, {value} as odd")
    with pytest.raises(PipelineError, match=f"'odd' is {type}") as raised:
        spark_plan.schema_of(data, _stage())
    assert raised.value.where == "stage checked"
    assert "transform=" in raised.value.next


@pytest.mark.parametrize(
    "type", [pa.float16(), pa.time32("s"), pa.month_day_nano_interval(), pa.list_(pa.float16()), pa.decimal256(50, 2)]
)
def test_an_input_column_that_spark_does_not_have_is_named(type):
    with pytest.raises(PipelineError, match="'odd' is ") as raised:
        spark_plan.spark_schema(pa.schema([("a", pa.int32()), ("odd", type)]), "source files")
    assert raised.value.where == "source files"


def test_a_schema_for_spark():
    schema = spark_plan.spark_schema(pa.schema([("a", pa.int32()), ("m", pa.map_(pa.string(), pa.int64()))]), "x")
    assert schema.simpleString() == "struct<a:int,m:map<string,bigint>>"


TYPES = [
    pa.int8(), pa.uint8(), pa.uint64(), pa.float32(), pa.bool_(), pa.large_string(), pa.binary(4), pa.date64(),
    pa.timestamp("ns"), pa.timestamp("ms", "Asia/Tokyo"), pa.decimal128(38, 5), pa.dictionary(pa.int8(), pa.string()),
    pa.list_(pa.uint16(), 3), pa.large_list(pa.map_(pa.string(), pa.large_string())),
    pa.map_(pa.large_string(), pa.timestamp("ns")), pa.struct([("x", pa.map_(pa.int8(), pa.uint8()))]),
    pa.timestamp("us"), pa.list_(pa.timestamp("us")), pa.map_(pa.string(), pa.timestamp("us", "UTC")),
    pa.float16(), pa.duration("us"), pa.time32("ms"), pa.time64("us"), pa.decimal256(50, 3), pa.decimal128(5, -2),
    pa.decimal128(3, 5), pa.month_day_nano_interval(), pa.struct([("x", pa.duration("us"))]),
    pa.run_end_encoded(pa.int32(), pa.string()),
]  # fmt: skip


@pytest.mark.parametrize("type", TYPES, ids=str)
def test_what_can_be_stored_is_what_a_delta_table_takes_and_gives_back(type):
    kept = frames.canonical_type(type)
    with tempfile.TemporaryDirectory() as directory:
        try:
            DeltaTable.create(directory, schema=pa.schema([("x", kept)]))
            back = pa.schema(DeltaTable(directory).schema().to_arrow()).field("x").type
            taken = frames.canonical_type(back) == kept
        except Exception:  # delta-rs raises bare ones
            taken = False
    assert (frames.unstorable(kept) is None) == taken


def test_maps_and_fixed_sizes_are_made_canonical():
    odd = pa.table(
        {
            "m": pa.array([[("a", 1)], None], pa.map_(pa.large_string(), pa.uint8())),
            "f": pa.array([[1, 2], None], pa.list_(pa.uint8(), 2)),
            "b": pa.array([b"abcd", None], pa.binary(4)),
        }
    )
    table = frames.canonical(odd)
    assert table.schema.types == [pa.map_(pa.string(), pa.int16()), pa.list_(pa.int16()), pa.binary()]
    assert table.to_pylist() == odd.to_pylist()


# -- rows that an expression cannot take


def _failed(rows) -> Exception:
    """What the stage's own kind of job raises."""

    def counted(batches):
        yield pa.RecordBatch.from_pydict({"n": [sum(batch.num_rows for batch in batches)]})

    with pytest.raises(Exception) as raised:
        rows.mapInArrow(counted, "n long").collect()
    return raised.value


@pytest.mark.parametrize(
    ("where", "message"),
    sampled(
        [
            ("cast(s as int) >= 0", "[CAST_INVALID_INPUT] The value 'zero' of the type"),
            ("1 / a > 0.5", "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`"),
            ("assert_true(a < 3) is null", "[USER_RAISED_EXCEPTION] '(a < 3)' is not true!"),
            ("a + 2147483647 > 0", "[ARITHMETIC_OVERFLOW]"),
            ("date(s) > date'2024-05-01'", "[CAST_INVALID_INPUT]"),
            ("to_timestamp(s, 'yyyy') > timestamp'2024-05-01'", "[CANNOT_PARSE_TIMESTAMP]"),
            ("xs[a] > 1", "[INVALID_ARRAY_INDEX]"),
            ("from_json(s, 'x int', map('mode', 'FAILFAST')).x > 1", "[MALFORMED_RECORD_IN_PARSING"),
        ],
        3,
    ),
)
def test_a_value_that_an_expression_cannot_take_is_an_error_of_the_input(rows, where, message):
    filtered = _stage(where=where)
    error = spark_plan.data_error(filtered, _failed(prepared(filtered, rows)))
    assert isinstance(error, InputError)
    assert message.replace("'", "").replace('"', "") in error.what.replace("'", "").replace('"', "")
    assert where in error.where
    assert not any(noise in error.what for noise in ("\n", "SQLSTATE", "java", "org.apache", "ansi.enabled"))


def test_a_function_of_the_transform_that_raises_is_an_error_of_the_stage(rows):
    transformed = _stage(transform=_with(lambda _: {}["K"]))
    error = spark_plan.data_error(transformed, _failed(prepared(transformed, rows)))
    assert isinstance(error, StageError)
    assert "A function in the transform of the stage checked raised KeyError: 'K'" in error.what
    assert error.traceback.startswith("Traceback") and Path(__file__).name in error.traceback
    assert "org.apache.spark" not in error.traceback


def _with(function: Callable[[int], int]) -> Callable:
    def transform(rows):
        from pyspark.sql import functions as F

        return rows.withColumn("z", F.udf(function, "int")("a"))

    return transform


@pytest.mark.long
def test_what_may_pass_is_not_blamed_on_the_input(rows):
    def full(batches):
        raise OSError("No space left on device")
        yield

    def die(value):
        import os

        os._exit(3)

    filtered = _stage(where="a > 0")
    with pytest.raises(Exception) as raised:
        rows.mapInArrow(full, "n long").collect()
    assert spark_plan.data_error(filtered, raised.value) is None
    assert spark_plan.data_error(filtered, _failed(_with(die)(rows))) is None
    assert spark_plan.data_error(filtered, ConnectionError("gone")) is None
