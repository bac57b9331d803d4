"""What is kept without Spark is what Spark keeps, or is refused: a list of expressions and random ones, all against one
session."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import product

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema

from state_ops.arrow import frames
from tests.tools.sampling import sampled
from weir.definition.column_lineage import made_of
from weir.where import Fails, NoColumn, Refused, compiled, projected

_MAX, _MIN, _INT = (1 << 63) - 1, -(1 << 63), (1 << 31) - 1
SCHEMA = pa.schema(
    [
        ("v", pa.int64()),
        ("i", pa.int32()),
        ("y", pa.int8()),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("m", pa.decimal128(10, 2)),
        ("s", pa.string()),
        ("t", pa.string()),
        ("b", pa.bool_()),
        ("c", pa.bool_()),
        ("ts", pa.timestamp("us", "UTC")),
        ("d", pa.date32()),
        ("xs", pa.list_(pa.int64())),
        ("Mixed Name", pa.int64()),
        ("h", pa.int16()),
        ("n", pa.decimal128(20, 6)),
        ("w", pa.decimal128(38, 0)),
        ("far", pa.date32()),
        ("local", pa.timestamp("us")),
        ("st", pa.struct([("x", pa.int64()), ("in", pa.struct([("y", pa.string())])), ("dotted.name", pa.bool_())])),
    ]
)
MIDNIGHT = datetime(2024, 1, 1, tzinfo=UTC)
VALUES = {
    "v": [None, 0, 1, -1, 2, 3, -3, 7, -7, _MAX, _MIN],
    "i": [None, 0, 1, -1, 2, 3, 5, -5, _INT, -_INT - 1],
    "y": [None, 0, 1, -1, 2, 127, -128],
    "f": [
        None,
        0.0,
        -0.0,
        1.0,
        1.5,
        -1.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        0.1,
        1e300,
        5e-324,
        2.0**31,
        -(2.0**31) - 0.5,
        2.0**53 + 2,
        -(2.0**63),
        127.9,
        -128.9,
    ],
    "g": [None, 0.0, -0.0, 1.0, 0.5, float("nan"), float("inf"), 16777216.0, 0.10000000149011612, -(2.0**31), 2.0**40],
    "m": [None, Decimal("0.00"), Decimal("1.50"), Decimal("-1.50"), Decimal("2.00"), Decimal("99999999.99")],
    "s": [
        None,
        "",
        "a",
        "A",
        "ab",
        "a_c",
        "abc",
        "a%",
        "é",
        "É",
        "e\u0301",
        "ß",
        " 3 ",
        "3",
        "+3",
        "a ",
        "a\nb",
        "😀",
        "\\",
        "\\%",
        "%",
        "_",
        "_%",
        "\x7f3",
        "\t12\n",
        "9223372036854775808",
        "1.5",
        "\uffff",
        "-0",
    ],
    "t": [None, "", "a", "b", "a_c", "it's"],
    "b": [None, True, False],
    "c": [None, True, False],
    "ts": [
        None,
        MIDNIGHT,
        datetime(2024, 1, 1, 2, 3, 4, 5, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    ],
    "d": [None, date(2024, 1, 1), date(1969, 12, 31), date(2024, 2, 29)],
    "xs": [None, [], [1]],
    "Mixed Name": [None, 1, 2],
    "h": [None, 0, 1, -1, 127, 128, -129, 32767, -32768],
    "n": [
        None,
        Decimal("0"),
        Decimal("0.1"),
        Decimal("-0.1"),
        Decimal("1.5"),
        Decimal("99999999999999.999999"),
        Decimal("12345678901234.567891"),
    ],
    "w": [None, Decimal(0), Decimal(1), Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(10) ** 18],
    "far": [None, date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31), date(2024, 1, 1)],
    "local": [None, datetime(2024, 1, 1), datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)],
    "st": [
        None,
        {"x": None, "in": None, "dotted.name": None},
        {"x": 1, "in": {"y": "a"}, "dotted.name": True},
        {"x": 2, "in": {"y": None}, "dotted.name": False},
    ],
}
TAKEN = """
b | NOT b | b AND c | b OR c | NOT (b AND c) | b = c | b <=> c | b IS TRUE | b IS NOT TRUE | b IS FALSE | b IS UNKNOWN | b IS NOT UNKNOWN
b = true | b < c | NOT v = 3 AND b | b OR NOT c AND v > 0 | v = 1 = true | (v = 1) = b | v IS NULL | v IS NOT NULL | xs IS NULL | NULL IS NULL
v = 3 | v <> 3 | v != 3 | v == 3 | v <=> 3 | v <=> NULL | v = NULL | NOT v = NULL | v > i | v = y | `v` > 0 | `Mixed Name` = 1
v IN (3, NULL) | v NOT IN (3, NULL) | v NOT IN (3) | v IN (1, 2.0) | v IN (1, 2.5, 1e0) | f IN (1.0) | f IN (0.0, 1) | b IN (true) | s IN ('a', 'A') | NULL IN (1)
v BETWEEN -3 AND 3 | v NOT BETWEEN -3 AND 3 | v BETWEEN 3 AND -3 | v BETWEEN NULL AND 3 | v NOT BETWEEN NULL AND 3 | f BETWEEN 0 AND 1.5
v % 7 BETWEEN 1 AND 3 | v IS DISTINCT FROM 3 | v IS NOT DISTINCT FROM NULL | f IS NOT DISTINCT FROM f
f = f | f > 1 | f >= 0 | f <> 1 | NOT (f > 0) | f = 0 | f < 0.1 | f = 0.1 | f > v | f = m | -f = 0.0 | g = f | g = 0.1 | g = 1 | g > 0.5 | g < f | g >= 1.5
v / 2 = 1.5 | v / 2 > 1 | i / 4 = 0 | i / 4 = 0.25 | v % 2 = 1 | v % 2 = -1 | i % -4 = 1 | y > 0 AND -y % 4 < 0 | v DIV 2 = 1 | v DIV 2 = -1 | v % 3 = 0 | y % 3 = -2 | f % 1 = 0.5 | f / 2 > 0.5
1 + 2 * 3 = 7 | v = 1 + 2 * 3 | 1 - 1 - 1 < v | (v % 10) - (1 - 1) = 1 | i DIV 2 * 2 = i | y + 1000 > 1120 | y * 2L > 0 | +v = v | f + 1 > 2 | f * 2 - 1 = 2 | - 1 = v
v = 3.0 | v = 2.5 | v < 2.5 | i > 1.5 | m = 1.5 | m > v | m + 0.5 = 2 | m * 2 = 3 | m - v > 0 | v * 0.5 = 1.5 | m <> 1.50 | -m = 1.5 | m IN (1.5, 2) | m = f
v = -9223372036854775808 | v = 9223372036854775807 | i = -2147483648 | v <> 9223372036854775807.5 | v <=> 9223372036854775808 | NOT v > 9223372036854775806.5 | NOT i > 2147483648 | v = 3L | v = 1e0 | f = 1.5D | f = .5 | f > 1. | v = 03
s = '' | s < 'a' | s >= 'a' | s = 'A' OR s = 'a' | s || 'x' = 'ax' | s || t = 'aa' | s = "a" | s = t | s <> t | s IS NULL OR s > t
s LIKE 'a_c' | s LIKE 'A%' | s LIKE 'a\\_c' | s NOT LIKE '%b%' | s LIKE '%' | s LIKE '' | s LIKE '_' | s LIKE 'a%' | s LIKE 'a\\%' | s LIKE 'a|_c' ESCAPE '|' | s LIKE 'a!%' ESCAPE '!' | s LIKE '\\\\\\\\'
s = 'a\\nb' | t = 'it\\'s' | t = 'it''s' | t = "it's" | s = '\\\\' | s = 'a\\_c' | s LIKE 'a%b' | s LIKE 'a.c' | s = 'a' AND t LIKE '_'
ts > '2024-01-01 02:00:00' | ts > TIMESTAMP '2024-01-01 02:00:00' | ts = timestamp'2024-01-01' | ts >= '2024-01-01T02:03:04.000005' | ts < DATE '1970-01-01' | ts = d | ts > d | ts BETWEEN '2024-01-01' AND '2024-01-02'
d = '2024-01-01' | d = DATE '2024-01-01' | d IN ('2024-01-01', '2024-02-29') | d < '1970-01-01' | d > ts | d <> date'2024-02-29' | ts IN (TIMESTAMP '2024-01-01 00:00:00')
year(ts) = 2024 | year(d) = 1969 | month(far) = 12 | day(d) = 29 | dayofmonth(ts) = 31 | hour(ts) = 2 | hour(ts) = 23 | minute(ts) = 3 | second(ts) = 59 | second(local) = 59 | date(ts) = d | date(far) = far | year(far) = 1 | day(far) = 10 | year(local) > 2000 AND month(local) = 12
nvl(v, 0) = 0 | ifnull(i, v) = 1 | coalesce(v, 0) = 0 | coalesce(i, v) = 1 | coalesce(s, t) = 'a' | coalesce(NULL, b) | isnull(v) | isnotnull(v) AND v > 0 | isnan(f) | NOT isnan(f) | abs(i % 10) = 1 | abs(f) = 1.5 | length(s) = 1 | length(s) > 2 | trim(s) = '3'
upper(t) = 'A' | lower(t) = 'a' | cast(v AS double) = 3 | cast(i AS bigint) + 1 > 0 | cast(b AS int) = 1 | cast(v AS string) = '3' | cast(b AS string) = 'true' | cast(i AS boolean) | cast(ts AS date) = d | cast(d AS timestamp) = ts | cast(m AS double) > 1
try_cast(v AS int) = 3 | try_cast(s AS int) = 3 | try_cast(f AS int) = 1 | try_cast(v AS tinyint) IS NULL | cast(y AS smallint) = 1 | cast(g AS double) = 0.5 | try_cast(f AS bigint) = -1
v <> 0 AND 10 / v > 1 | v <> 0 AND 10 / v BETWEEN 1 AND 2 | v = 0 OR 10 % v = 0 | v IS NULL OR v = 0 OR 1 / v > 0 | NOT (v <> 0 AND 10 / v > 1) | i > 0 AND i < 100 AND i * 2 > 3 | 1=1 | true | false | NOT true | b AND true
CASE WHEN v > 0 THEN true END | CASE WHEN v > 0 THEN b WHEN v < 0 THEN c ELSE v IS NULL END | CASE v WHEN 1 THEN 'a' WHEN i THEN 'b' ELSE s END = 'a' | CASE WHEN v <> 0 THEN 10 / v END > 1 | CASE WHEN b THEN i ELSE v END = 1 | CASE s WHEN 'a' THEN 1 END = 1 AND b
CASE WHEN b THEN 1 WHEN c THEN 2.5e0 END > 1 | CASE WHEN b THEN CASE WHEN c THEN t END ELSE s END = 'a' | CASE WHEN ts > '2024-01-01' THEN d ELSE far END < '2000-01-01' | CASE WHEN v BETWEEN -3 AND 3 THEN v END = 1 | CASE v WHEN NULL THEN true ELSE b END | CASE WHEN b THEN NULL ELSE 1 END = 1
replace(s, 'a', 'b') = 'b' | replace(s, '', 'x') = s | replace(t, '_', '') = 'ac' | replace(s, '%', '.*') = '.*' | split_part(s, 'b', 1) = 'a' | split_part(s, 'b', 2) = 'c' | split_part(t, '_', -1) = 'c' | split_part(t, '.', 3) = '' | split_part(s, '%', 2) = '' | split_part(s, '|', 1) = s
unix_micros(ts) DIV 10000000 % 6 = 1 | timestamp_micros(unix_micros(ts)) = ts | timestamp_micros(i) > d | timestamp_micros(y) < ts | date_format(ts, 'yyyy-MM-dd HH:mm:ss') > '2024' | date_format(ts, 'HH:mm') = '02:03' | date_format(d, 'yyyy/MM/dd') = '2024/02/29' | date_format(far, 'yyyy-MM-dd') = '0001-01-01' | date_format(local, 'dd.MM.yyyy') = '31.12.9999' | length(replace(s, 'a', '')) = 1
"""
FAILING = """
v / 0 > 0 | 1 / v > 0 | v % 0 = 1 | 10 % v = 1 | v DIV 0 = 1 | 1 DIV v = 1 | v + 1 > 0 | i + 1 > 0 | i * 2147483647 > 0 | v - 2 > 0 | -v > 0 | -i > 0 | -y > 0 | y + y > 0 | abs(v) > 0 | v DIV -1 > 0
f / 0 > 0 | 1 / f > 0 | f % 0 = 1 | CASE WHEN b THEN 10 / v END > 1 | CASE v WHEN 10 DIV v THEN b END | v / f > 1 | cast(v AS int) > 0 | cast(s AS int) = 3 | cast(f AS bigint) > 0 | b AND 1 / v > 0 | cast(v AS tinyint) = 1 | NOT (v <> 0 AND 10 / v BETWEEN 1 AND 2) | v + 1 BETWEEN 1 AND 2
"""
REFUSED = """
v > 9223372036854775807.5 | 9223372036854775808 >= v | v BETWEEN -9223372036854775809 AND 0 | i < 1e0 OR i <= 100000000000000000000.0 | abs(w) = 1 | -w = 1
v // 2 = 1 | s ILIKE 'a%' | s > 1 | v = '3' | s RLIKE 'a$' | s = 'a' COLLATE UNICODE_CI | 0 | 1 | NULL | v & 1 = 1 | v ^ 1 = 1 | v|1 = 1 | ~v = 1 | sum(v) > 0 | v > avg(v) | rank() over () = 1 | v = 3 -- x | v = /* x */ 3
* | max(v) > 3 | s[0] = 'a' | round(f) = 1 | extract(hour from ts) = 2 | CASE v WHEN > 0 THEN true END | CASE WHEN b THEN m END = 1 | missing > 1 | V > 0 | `mixed name` = 1 | v = 1 AS x | s LIKE t | s LIKE 'a\\\\bc' | s = 'a' 'b' | s = r'a' | d = '2024-1-1' | d = 'tomorrow' | ts > 'now'
ts = TIMESTAMP 'epoch' | d + 1 = d | m / 2 > 1 | m % 2 = 1 | g > v | g + g > 1 | s + 1 > 1 | xs = xs | xs[0] = 1 | v.x = 1 | b = 1 | b AND 1 | NOT v | v IS TRUE | v > | v = | (v = 1 | v = 1) | v NOT 1 | v BETWEEN 1 | v IN () | v IN (SELECT 1) | EXISTS (SELECT 1)
s LIKE ANY ('a', 'b') | f IN (0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) | v = 1abc | v = 1S | v = 1.5BD | v = 1e999 | cast(f AS string) = '1' | cast(s AS date) = d | v::int = 1 | upper(s) = 'A' | d = '2024-02-30' | v = :p | v IS NULL = b | hour(d) = 1 | year(s) = 1 | date(s) = d | nvl(s) = 1 | replace(s, t, 'x') = 'a' | split_part(s, '', 1) = 'a' | split_part(s, 'a', 0) = 'a' | date_format(ts, 'EEE') = 'Mon' | unix_micros(d) = 1 | timestamp_micros(f) = ts | date_format(ts, 'yy') = '24' | date_format(ts, s) = 'a' | CASE WHEN v THEN 1 END = 1 | CASE WHEN b THEN 1 | rand() > 0.5 | now() > ts
"""


PARTS = 4  # of what Spark is asked, so that `make test` asks it a part


def listed(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ") if part.strip()]


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Every value of each column beside every one of some other column, and a few hundred at random."""
    chance, rows_made = random.Random(1), []
    for first, other in [
        ("v", "i"),
        ("b", "c"),
        ("s", "t"),
        ("f", "g"),
        ("f", "v"),
        ("ts", "d"),
        ("m", "f"),
        ("y", "b"),
    ]:
        for a, b in product(VALUES[first], VALUES[other]):
            rows_made.append({name: chance.choice(values) for name, values in VALUES.items()} | {first: a, other: b})
    return pa.Table.from_pylist(rows_made, schema=SCHEMA)


@pytest.fixture(scope="module")
def frame(spark, rows):
    numbered = rows.append_column("at", pa.array(range(rows.num_rows)))
    return spark.createDataFrame(numbered).coalesce(1).cache()


def kept_by_spark(frame, expressions: list[str]) -> dict[str, list[int] | str]:
    """By expression, the rows that Spark keeps, in one job; or its error. An aggregate fails where a filter does not: it
    evaluates parts of its expressions together, whatever AND and OR decide before."""
    from pyspark.sql import functions as F

    asked = [
        F.array_agg(F.when(F.expr(expression), F.col("at"))).alias(f"e{n}") for n, expression in enumerate(expressions)
    ]
    try:
        if len(expressions) == 1:
            return {expressions[0]: sorted(row["at"] for row in frame.where(expressions[0]).select("at").collect())}
        (ids,) = frame.agg(*asked).collect()
    except PySparkException as error:
        if len(expressions) == 1:
            return {expressions[0]: str(error)}
        half = len(expressions) // 2
        return kept_by_spark(frame, expressions[:half]) | kept_by_spark(frame, expressions[half:])
    return {expression: sorted(ids[n]) for n, expression in enumerate(expressions)}


def ours(rows: pa.Table, where: str) -> list[int] | str:
    try:
        return np.flatnonzero(compiled(where, rows.schema).mask(rows)).tolist()
    except (Refused, Fails) as error:
        return "Fails" if isinstance(error, Fails) else "Refused"


def compare(frame, rows: pa.Table, results: dict[str, list[int] | str]) -> None:
    """Whatever is evaluated is compared with Spark."""
    evaluated = [expression for expression, kept in results.items() if isinstance(kept, list)]
    for start in range(0, len(evaluated), 80):
        for expression, kept in kept_by_spark(frame, evaluated[start : start + 80]).items():
            assert isinstance(kept, list), (expression, kept)
            differing = sorted(set(results[expression]) ^ set(kept))
            assert not differing, (expression, rows.slice(differing[0], 1).to_pylist())


@pytest.mark.parametrize("part", sampled(range(PARTS)))
def test_what_is_taken_keeps_what_spark_keeps(frame, rows, part):
    results = {expression: ours(rows, expression) for expression in listed(TAKEN)}
    compare(frame, rows, dict(list(results.items())[part::PARTS]))
    assert {expression: kept for expression, kept in results.items() if isinstance(kept, str)} == {}


PROJECTED = """
v | `Mixed Name` | v AS w2 | st.x | st.`in`.y AS inner | xs AS list | m AS money | v % 10 AS p | i % 7 + 1 AS p | y % 5 * 2 AS p | h % 3 AS p | v / 2 AS half | v % 10 * 0.5D AS p | cast(i AS double) * 0.1D AS p | i DIV 4 AS quarter | -(y % 5) AS p
lower(t) AS l | s || '!' AS p | trim(s) AS p | length(s) AS n2 | coalesce(s, t) AS p | coalesce(v, 0) AS p | coalesce(i, v) AS p | coalesce(f, g) AS p | f * 2 AS p | cast(g AS double) AS p | f IS NULL AS p | b AND c AS p | v > 3 AS p | s LIKE 'a%' AS p
ts AS p | local AS p | date(ts) AS p | cast(d AS timestamp) AS p | year(ts) AS p | hour(ts) AS p | 1 AS one | 3L AS three | 'x' AS x | true AS yes | 1.5D AS p | date'2024-01-01' AS p | timestamp'2024-01-01 01:02:03' AS p | cast(v AS string) AS p | try_cast(s AS int) AS p
CASE WHEN v > 0 THEN 'more' WHEN v < 0 THEN 'less' ELSE t END AS p | CASE v WHEN 1 THEN i ELSE v END AS p | CASE WHEN b THEN 1 ELSE 2.5D END AS p | CASE WHEN hour(ts) BETWEEN 2 AND 8 THEN 'day' ELSE 'night' END AS p | CASE WHEN b THEN d ELSE ts END AS p | CASE WHEN b THEN y ELSE h END AS p
i / 10 AS p | f / 3 AS p | v / 7 AS p | cast(v AS double) / 0.1D AS p
i / 10 AS p | f / 3 AS p | v / 7 AS p | cast(v AS double) / 0.1D AS p | coalesce(g, f) AS p | coalesce(g, 1) AS p | coalesce(g, 1.5) AS p | coalesce(g, NULL) AS p | nvl(g, f) AS p | CASE WHEN b THEN g ELSE f END AS p | CASE WHEN b THEN g WHEN c THEN NULL ELSE 2 END AS p | CASE WHEN b THEN g END AS p
CAST(NULL AS BIGINT) AS p | CAST(NULL AS int) AS p | cast(null as string) AS p | CAST(NULL AS double) AS p | CAST(NULL AS float) AS p | CAST(NULL AS boolean) AS p | CAST(NULL AS date) AS p | CAST(NULL AS timestamp) AS p | TRY_CAST(NULL AS smallint) AS p | CAST(CAST(NULL AS int) AS string) AS p
coalesce(CAST(NULL AS BIGINT), i) AS p | coalesce(i, CAST(NULL AS BIGINT)) AS p | coalesce(NULL, v, NULL) AS p | nvl(NULL, s) AS p | CASE WHEN v > 0 THEN NULL ELSE CAST(NULL AS BIGINT) END AS p | CASE WHEN v > 0 THEN i ELSE CAST(NULL AS BIGINT) END AS p | CASE WHEN CAST(NULL AS BOOLEAN) THEN 1 ELSE 2 END AS p | CASE v WHEN NULL THEN 1 WHEN 1 THEN 2 END AS p | CASE WHEN b THEN CAST(NULL AS STRING) ELSE s END AS p
v + NULL AS p | NULL * i AS p | i / NULL AS p | NULL % v AS p | v DIV NULL AS p | f - NULL AS p | -CAST(NULL AS BIGINT) AS p | i + CAST(NULL AS BIGINT) AS p | (v / 0) + CAST(NULL AS double) AS p | s || NULL AS p | s || CAST(NULL AS string) AS p | upper(CAST(NULL AS STRING)) AS p | abs(CAST(NULL AS int)) AS p | length(CAST(NULL AS string)) AS p | year(CAST(NULL AS timestamp)) AS p | isnull(CAST(NULL AS int)) AS p | CAST(NULL AS int) IS NULL AS p | v = CAST(NULL AS BIGINT) AS p | v <=> CAST(NULL AS BIGINT) AS p | v IN (1, CAST(NULL AS BIGINT)) AS p | b AND CAST(NULL AS boolean) AS p | NOT CAST(NULL AS boolean) AS p | v BETWEEN CAST(NULL AS bigint) AND 5 AS p | isnan(CAST(NULL AS double)) AS p
unix_micros(ts) AS p | timestamp_micros(unix_micros(ts) DIV 10000000 * 10000000) AS p | timestamp_micros(i) AS p | date_format(ts, 'yyyy-MM-dd') AS p | replace(t, 'a', 'bb') AS p | split_part(s, 'b', 2) AS p | cast(length(s) - length(replace(s, 'a', '')) AS bigint) AS p
"""


def test_columns_that_are_made_have_sparks_types_and_values(frame, rows):
    columns = listed(PROJECTED)
    names = [f"c{number}" for number in range(len(columns))]
    of_spark = frame.sort("at").selectExpr(*columns).toDF(*names)  # all in one job
    types = frames.canonical_schema(to_arrow_schema(of_spark.schema, timezone="UTC"))
    values = frames.canonical(of_spark.toArrow())
    for name, sql in zip(names, columns, strict=True):
        projection = frames.canonical(projected((sql,), rows.schema).of(rows))
        field, expected = projection.schema.field(0), types.field(name)
        assert (field.type, field.nullable) == (expected.type, expected.nullable), sql
        assert pl.Series(values[name]).equals(pl.Series(projection.column(0)), null_equal=True), sql


def test_what_the_words_of_sql_say_of_columns_is_what_the_grammar_says():
    conditions = [f"{condition} AS p" for condition in listed(TAKEN)]
    for sql in [*listed(PROJECTED), *conditions]:
        projection = projected((sql,), SCHEMA)
        (name,) = projection.of(SCHEMA.empty_table()).schema.names
        read = sorted(projection.columns)
        made = made_of((sql,), SCHEMA.names)
        assert {name: sorted(of) for name, of in made.items()} == {name: read}, sql


@pytest.mark.parametrize(
    "sql",
    [
        "v + m AS p",
        "m * 2 AS p",
        "NULL AS p",
        "v + 1",
        "+v",
        "CASE WHEN NULL THEN v END AS p",
        "v w",
        "rand() AS p",
        "xs[0] AS p",
        "v AS p, i",
        "x'00' AS p",
    ],
)
def test_columns_that_only_spark_makes_are_refused(rows, sql):
    with pytest.raises(Refused):
        projected((sql,), rows.schema)


def test_beside_a_null_of_a_type_nothing_is_evaluated():
    rows = pa.table({"v": pa.array([1, 2], pa.int64())})
    projection = projected(("v / 0 + CAST(NULL AS double) AS d", "v DIV 0 = CAST(NULL AS bigint) AS b"), rows.schema)
    assert projection.of(rows).to_pydict() == {"d": [None, None], "b": [None, None]}


def test_quotients_and_decimals_are_the_nearest_doubles():
    cents = range(5_000)
    rows = pa.table({"i": pa.array(cents, pa.int32()), "m": [Decimal(number).scaleb(-2) for number in cents]})
    projection = projected(("i / 10 AS tenth", "i / 0.7D AS more", "CAST(m AS double) AS d"), rows.schema).of(rows)
    assert projection["tenth"].to_pylist() == [number / 10 for number in cents]
    assert projection["more"].to_pylist() == [number / 0.7 for number in cents]
    assert projection["d"].to_pylist() == [float(f"{number}e-2") for number in cents]
    assert compiled("m = 0.57D", rows.schema).kept(rows)["i"].to_pylist() == [57]


@pytest.mark.parametrize("part", sampled(range(PARTS)))
def test_what_fails_over_a_row_in_spark_fails_here(frame, rows, part):
    results = {expression: ours(rows, expression) for expression in listed(FAILING)}
    assert set(results.values()) == {"Fails"}, results
    asked = list(results)[part::PARTS]
    assert [
        expression for expression in asked if isinstance(kept_by_spark(frame, [expression])[expression], list)
    ] == []


def test_what_spark_may_understand_otherwise_is_refused_and_named(rows):
    taken = [expression for expression in listed(REFUSED) if ours(rows, expression) != "Refused"]
    assert taken == []
    with pytest.raises(Refused, match=r"round\(f\) is not understood"):
        compiled("v > 1 AND round(f) = 1", rows.schema)
    two = pa.schema([("k", pa.int64()), ("K", pa.int64())])
    assert compiled("k > 1 AND K > 1", two).columns == ("k", "K")


@pytest.mark.parametrize("name", ["missing", "V", "`mixed name`", "`st.x`"])
def test_a_name_that_is_no_column_is_told_from_what_spark_may_mean_by_it(frame, rows, name):
    """Where it is said to be none, Spark says so too; where Spark knows it, it is not."""
    for condition in ("{} > 1", "v > 1 AND coalesce({}, 1) = 1", "cast({} AS bigint) IN (1, 2)", "length({}) = 1"):
        with pytest.raises(NoColumn):
            compiled(condition.format(name), rows.schema)
        with pytest.raises(PySparkException, match="UNRESOLVED_COLUMN"):
            frame.where(condition.format(name)).schema  # noqa: B018 - Spark Connect looks at it only here
    for condition in (
        "exists(xs, x -> x > 1)", "exists(xs, missing -> abs(missing) > 1)", "extract(YEAR FROM ts) > 2000",
        "trim(BOTH FROM s) = 'a'", "timestampadd(HOUR, 1, ts) > ts", "d < current_date", "current_user = 'a'",
    ):  # fmt: skip
        frame.where(condition).schema  # noqa: B018
        with pytest.raises(Refused) as refused:
            compiled(condition, rows.schema)
        assert not isinstance(refused.value, NoColumn), condition


class Chance:
    """Random conditions, most of which have the types that they need."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def number(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.3:
            return self.pick("v", "i", "y", "h", "f", "m", "n", "w", "g", "st.x", "`Mixed Name`", "0", "1", "-1", "2", "3", "127", "0.5", "-0.0", "1.50", "0.1", "2e0", "-1.5D", "0e0", "NULL", "7L", "2147483648", "-9223372036854775808", "9223372036854775807.5")  # fmt: skip
        a, b = self.number(depth - 1), self.number(depth - 1)
        small = f"({self.pick('y', 'i', 'v', 'h', 'st.x')} % {self.pick('3', '7', '100', '-5', 'y')})"
        exact = f"({self.pick('m', 'n', '0.5', '1.50', small)} {self.pick('+', '-', '*')} {self.pick('m', 'n', small, '3', '0.25')})"
        double = f"({self.pick('f', 'cast(g AS double)', '1e0')} {self.pick('+', '-', '*', '/', '%')} {self.pick('f', '2e0', '-3e0', '1.5', 'm', 'n', 'i', 'v')})"
        kind = self.pick("tinyint", "smallint", "int", "bigint", "double", "boolean", "string")
        return self.pick(f"({a} {self.pick('+', '-', '*', '/', '%', 'DIV')} {b})", f"({small} {self.pick('+', '-', '*', '/', 'DIV')} {b})", f"({small} {self.pick('+', '-', '*')} {small})", small, exact, double, f"coalesce({a}, {b})", f"-{small}", f"- {double}", f"abs({small})", f"abs({a})", f"try_cast({a} AS {kind})", f"cast({small} AS {kind})", f"try_cast({self.text()} AS int)", f"length({self.text()})", f"{self.pick('year', 'month', 'day', 'dayofmonth', 'hour', 'minute', 'second')}({self.pick('ts', 'local', 'd', 'far', 'ts')})", f"nvl({a}, {b})", f"{a} {self.pick('+', '-', '*')} {b}")  # fmt: skip

    def text(self) -> str:
        return self.pick("s", "t", "st.in.y", "'a'", "''", "'a_c'", "'é'", "'a '", '"it\'s"', "'3'", "(s || t)", "trim(s)", "lower(t)", "upper('aß')", "NULL", "coalesce(s, t)", "cast(v AS string)", "cast(b AS string)")  # fmt: skip

    def moment(self) -> str:
        return self.pick(
            "ts", "d", "far", "local", "'2024-01-01'", "DATE '2024-01-01'", "TIMESTAMP '2024-01-01 02:03:04.000005'", "cast(ts AS date)", "cast(far AS timestamp)", "NULL", "'0001-01-01'", "DATE'9999-12-31'", "cast(local AS date)", "date(ts)"
        )  # fmt: skip

    def simple(self) -> str:
        comparison = self.pick("=", "<>", "!=", "==", "<", "<=", ">", ">=", "<=>")
        patterns = ("a%", "_", "%b%", "a_c", "", "%", "a\\\\_c", "\\\\%", "é", "%\\\\\\\\%", "__", "%3%", "😀", "a%%b")
        no = self.pick("", "NOT ")
        items = ", ".join(self.number(0) for _ in range(self.random.randint(1, 12)))
        return self.pick(
            f"{self.number(2)} {comparison} {self.number(1)}",
            f"{self.number(1)} {comparison} {self.number(2)}",
            f"{self.text()} {comparison} {self.text()}",
            f"{self.moment()} {comparison} {self.moment()}",
            f"{self.number(1)} {no}IN ({items})",
            f"{self.text()} {no}IN ({self.text()}, 'a', {self.text()})",
            f"{self.moment()} {no}IN ({self.moment()}, {self.moment()})",
            f"{self.number(1)} {no}BETWEEN {self.number(0)} AND {self.number(1)}",
            f"{self.moment()} {no}BETWEEN {self.moment()} AND {self.moment()}",
            f"{self.text()} {no}LIKE '{self.pick(*patterns)}'",
            f"{self.text()} {no}LIKE '{self.pick('a|_c', '|%', '||%', '%|_%')}' ESCAPE '|'",
            f"{self.pick('contains', 'startswith', 'endswith')}({self.text()}, {self.pick(*map(repr, ('a', '', 'é', '%', 'b')))})",
            f"{self.number(1)} IS {no}{self.pick('NULL', 'DISTINCT FROM 1')}",
            f"{self.pick('xs', 'st', 'st.in', 's', 'far')} IS {no}NULL",
            f"isnan({self.pick('f', 'g', 'f / 2', 'm')})",
            self.pick("b", "c", "true", "b IS NOT TRUE", "c IS UNKNOWN", "b = c", "st.`dotted.name`", "NULL", "cast(i AS boolean)"),
        )  # fmt: skip

    def condition(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.3:
            return self.simple()
        a, b, c = self.condition(depth - 1), self.condition(depth - 1), self.simple()
        return self.pick(
            f"{a} AND {b}",
            f"{a} OR {b}",
            f"NOT {a}",
            f"NOT {a} AND {b} OR {c}",
            f"{a} AND {b} AND {c}",
            f"({a} OR {b})",
            f"NOT ({a} AND {b})",
            f"({a}) {self.pick('=', '<>', '<=>', '<', '>=')} ({b})",
            f"({a}) IS {self.pick('', 'NOT ')}{self.pick('TRUE', 'FALSE', 'NULL')}",
        )


@pytest.mark.parametrize(("seed", "count"), sampled([(25, 160), *((seed, 420) for seed in range(12))]))
def test_random_conditions_keep_what_spark_keeps_or_are_left_to_it(frame, rows, seed, count):
    chance = Chance(seed)
    results = {expression: ours(rows, expression) for expression in (chance.condition(2) for _ in range(count))}
    compare(frame, rows, results)
    evaluated = [kept for kept in results.values() if isinstance(kept, list)]
    assert len(evaluated) > len(results) / 2
    assert sum(0 < len(kept) < rows.num_rows for kept in evaluated) > len(evaluated) / 3, "they tell rows apart"


def test_what_is_nested_too_deep_is_refused_and_long_chains_are_not(rows):
    anded = compiled(" AND ".join(f"v <> {n}" for n in range(2000)), rows.schema)
    assert anded.mask(rows).tolist() == [v is not None and not 0 <= v < 2000 for v in rows["v"].to_pylist()]
    with pytest.raises(Refused, match="nested too deep"):
        compiled("NOT " * 2000 + "b", rows.schema)
    added = compiled(" + ".join(["0"] * 2000) + " = 0", rows.schema)
    with pytest.raises(Refused, match="nested too deep"):
        added.mask(rows)


def test_a_condition_is_asked_of_no_rows_and_of_no_columns(rows):
    nothing = rows.slice(0, 0)
    assert compiled("1 / 0 > 1", rows.schema).kept(nothing).num_rows == 0
    assert compiled("1 = 1", rows.schema).kept(rows)["v"].equals(rows["v"])
    assert compiled("v > 0", rows.schema).kept(nothing).equals(nothing)
    with pytest.raises(Fails):
        compiled("1 / 0 > 1", rows.schema).mask(rows)
