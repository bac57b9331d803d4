from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.arrow import frames
from state_ops.errors import ConfigurationError, PipelineError
from state_ops.schema.key_groups import (
    MAX_PARALLELISM,
    check_parallelism,
    group_range,
    key_groups,
    subtask_of,
    xxhash64,
)

parallelisms = st.integers(1, MAX_PARALLELISM).flatmap(
    lambda most: st.tuples(st.integers(1, min(most, 300)), st.just(most))
)


def _random_keys(rows: int) -> pa.Table:
    rng = random.Random(20)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)

    def column(type: pa.DataType, value) -> pa.Array:
        return pa.array([None if rng.random() < 0.1 else value() for _ in range(rows)], type)

    def integer(bits: int):
        edges = [0, -1, (1 << bits - 1) - 1, -(1 << bits - 1)]
        return lambda: rng.choice([*edges, rng.getrandbits(bits) - (1 << bits - 1)])

    def moment():
        return epoch + timedelta(microseconds=rng.randint(-(10**15), 4 * 10**15))

    def decimal(precision: int):
        # Of all magnitudes, since the bytes of a large decimal are as many as its value needs.
        return lambda: Decimal(f"{rng.choice([-1, 1]) * rng.randrange(10 ** rng.randint(0, precision))}e-2")

    def text():
        return "".join(rng.choices("abcNM09\0é漢😀", k=rng.choice([0, 1, 3, 4, 7, 8, 9, 31, 32, 33, 100, 700])))

    def canonical(array: pa.Array) -> pa.Array:
        return array.cast(frames.canonical_type(array.type))

    return pa.table(
        {
            "i8": column(pa.int8(), integer(8)),
            "i16": column(pa.int16(), integer(16)),
            "i32": column(pa.int32(), integer(32)),
            "i64": column(pa.int64(), integer(64)),
            "flag": column(pa.bool_(), lambda: rng.random() < 0.5),
            "text": column(pa.string(), text),
            "raw": column(pa.binary(), lambda: rng.randbytes(rng.randint(0, 80))),
            "day": column(pa.date32(), lambda: date(1970, 1, 1) + timedelta(days=rng.randint(-30000, 30000))),
            "at": column(pa.timestamp("us", tz="UTC"), moment),
            "local": column(pa.timestamp("us"), lambda: moment().replace(tzinfo=None)),
            "small": column(pa.decimal128(18, 2), decimal(18)),
            "large": column(pa.decimal128(38, 2), decimal(38)),
            # What Weir makes of types that Spark does not have, before either of them hashes it.
            "u8": canonical(column(pa.uint8(), lambda: rng.randrange(256))),
            "u32": canonical(column(pa.uint32(), lambda: rng.randrange(2**32))),
            "d64": canonical(column(pa.date64(), lambda: date(1970, 1, 1) + timedelta(days=rng.randint(-9999, 9999)))),
            "ms": canonical(column(pa.timestamp("ms"), lambda: moment().replace(tzinfo=None, microsecond=0))),
            "dec": canonical(column(pa.decimal64(18, 2), decimal(16))),
            "fixed": canonical(column(pa.binary(4), lambda: rng.randbytes(4))),
        }
    )


def test_key_groups_are_those_of_spark(spark):
    from pyspark.sql import functions as F

    table = _random_keys(3000)
    composites = [[name] for name in table.column_names] + [
        ["text", "i64"],
        ["i32", "text", "at"],
        ["large", "raw", "flag"],
        table.column_names,
    ]
    rng = random.Random(21)
    composites += [rng.sample(table.column_names, rng.randint(2, 5)) for _ in range(12)]
    frame = spark.createDataFrame(table)
    groups = frame.select(
        *(F.expr(f"pmod(xxhash64({', '.join(names)}), 128)").alias(str(i)) for i, names in enumerate(composites)),
        F.expr("pmod(xxhash64(text, i64), 1000)").alias("odd"),
    ).toArrow()
    for i, names in enumerate(composites):
        ours = key_groups([table[name] for name in names], 128)
        assert ours.tolist() == groups[str(i)].to_pylist(), names
    assert key_groups([table["text"], table["i64"]], 1000).tolist() == groups["odd"].to_pylist()


@given(st.lists(st.binary(max_size=100) | st.binary(min_size=500, max_size=530), min_size=1), st.integers(0, 3))
def test_bytes_hash_as_in_the_reference_implementation(values, skip):
    column = pa.array([b"x" * skip, *values]).slice(1)
    assert xxhash64([column]).tolist() == [xxhash.xxh64_intdigest(value, seed=42) for value in values]
    second = [xxhash.xxh64_intdigest(b, seed=xxhash.xxh64_intdigest(b, seed=42)) for b in values]
    assert xxhash64([column, column]).tolist() == second


def test_golden_groups():
    # The group is part of every stored key: a change loses all state.
    assert key_groups([pa.array(["N14228", "N24211", ""])], 128).tolist() == [13, 47, 4]
    assert key_groups([pa.array([0, 1, -1, 1 << 40])], 128).tolist() == [108, 50, 82, 29]
    assert key_groups([pa.array([0, 1, -1], pa.int32())], 128).tolist() == [115, 41, 69]


def test_groups_are_uint16_of_every_row():
    groups = key_groups([pa.chunked_array([["a"], [], ["b", None]], pa.string())], MAX_PARALLELISM)
    assert groups.dtype == np.uint16
    assert len(groups) == 3
    assert len(key_groups([pa.array([], pa.int64())], 128)) == 0


def test_floats_are_no_keys():
    with pytest.raises(PipelineError, match="cannot be a key"):
        key_groups([pa.array([1.0])], 128)


@given(parallelisms)
@settings(max_examples=100)
def test_each_group_has_one_owner_and_owners_are_even(case):
    parallelism, most = case
    ranges = [group_range(subtask, parallelism, most) for subtask in range(parallelism)]
    assert [group for owned in ranges for group in owned] == list(range(most))
    sizes = [len(owned) for owned in ranges]
    assert max(sizes) - min(sizes) <= 1
    owners = subtask_of(np.arange(most, dtype=np.uint16), parallelism, most)
    assert owners.tolist() == [subtask for subtask, owned in enumerate(ranges) for _ in owned]
    assert subtask_of(most - 1, parallelism, most) == parallelism - 1


@pytest.mark.parametrize(("parallelism", "most"), [(0, 128), (129, 128), (1, 0), (1, MAX_PARALLELISM + 1), (-1, 128)])
def test_parallelism_that_does_not_fit_is_refused(parallelism, most):
    with pytest.raises(ConfigurationError):
        check_parallelism(parallelism, most)
    with pytest.raises(ConfigurationError):
        group_range(0, parallelism, most)


def test_there_is_no_subtask_past_the_last():
    check_parallelism(1, 1)
    check_parallelism(MAX_PARALLELISM, MAX_PARALLELISM)
    with pytest.raises(ConfigurationError, match="no subtask 4"):
        group_range(4, 4, 128)
