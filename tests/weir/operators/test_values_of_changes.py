"""Aggregates that go by values, over changes: what is left of the values when rows are taken back."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from state_ops.backends.base import BEYOND, Backend
from state_ops.backends.composite import Joined, clip
from state_ops.backends.memory import MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import InputError, PipelineError
from state_ops.records.operator_stats import OperatorStats
from state_ops.rows import key_aggregation, row_store
from state_ops.schema.key_groups import group_range
from state_ops.snapshots.rescale import first_key
from tests.tools.sampling import sampled
from tests.weir.driven import MAX_PARALLELISM, Driven
from weir import Pipeline, Stage, agg, aggregate, delta, files, testing
from weir.operators.aggregation import running as aggregation
from weir.operators.compatibility import fit, meaning, stored_collections, stored_keys
from weir.operators.shapes import shapes
from weir.testing.instances import read

OTHERS = files("x/*.parquet", event_time="ts")
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("i", pa.int16()),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("d", pa.decimal128(9, 2)),
        ("s", pa.string()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("b", pa.bool_()),
        ("_change_type", pa.string()),
    ]
)
COLUMNS = SCHEMA.names[1:-1]
LEAST = "coalesce(min({0}) FILTER (NOT isnan({0})), min({0}))"  # to DuckDB NaN is a number above all others
GREATEST = "coalesce(max({0}) FILTER (NOT isnan({0})), max({0}))"
WANTED = {
    "n": (agg.count(), "count(*)"),
    "total": (agg.sum("i"), "coalesce(sum(i), 0)::BIGINT"),
    "i_n": (agg.count_distinct("i"), "count(DISTINCT i)"),
    "i_lo": (agg.min("i"), "min(i)"),
    "i_hi": (agg.max("i"), "max(i)"),
    "f_lo": (agg.min("f"), LEAST.format("f")),
    "f_hi": (agg.max("f"), GREATEST.format("f")),
    "f_n": (agg.count_distinct("f"), "count(DISTINCT f + 0.0)"),
    "g_hi": (agg.max("g"), GREATEST.format("g")),
    "d_lo": (agg.min("d"), "min(d)"),
    "d_hi": (agg.max("d"), "max(d)"),
    "s_lo": (agg.min("s"), "min(s)"),
    "s_hi": (agg.max("s"), "max(s)"),
    "ts_hi": (agg.max("ts"), "max(ts)"),
    "day_lo": (agg.min("day"), "min(day)"),
    "b_lo": (agg.min("b"), "min(b)"),
    "b_n": (agg.count_distinct("b"), "count(DISTINCT b)"),
    "some_hi": (agg.max("i", where="b"), "max(i) FILTER (b)"),
    "some_n": (agg.count_distinct("s", where="i > 0"), "count(DISTINCT s) FILTER (i > 0)"),
    "k_hi": (agg.max("k"), "max(k)"),
}
MAPS = {"i_n": ("i", None), "f_lo": ("f", None), "some_hi": ("i", "b")}  # by the first of their aggregates


def totals(changes: bool = True, **wanted: Any) -> Stage:
    return aggregate("totals", OTHERS, key="k", **wanted, changes=changes)


def drawn(chance: random.Random) -> dict[str, Any]:
    """A row; values come again often."""
    few = chance.randrange(2, 7)
    number = chance.choice([0.0, 1.5, -2.25, math.nan, math.inf, -math.inf, chance.randrange(few) / 4])
    row = {
        "k": chance.choice(["hot", "hot", "hot", "b", ""]),
        "i": chance.randrange(-few, few),
        "f": number,
        "g": chance.choice([number, 3.5]),
        "d": Decimal(chance.randrange(-few, few)) / 4,
        "s": chance.choice(["", "a", "a\0", "a\0b", "é", "zz", "日本", "\U0001f600"]),
        "ts": datetime(1960, 5, 1, tzinfo=UTC) + timedelta(days=chance.randrange(few) * 4000),
        "day": date(1965, 1, 1) + timedelta(days=1000 * chance.randrange(few)),
        "b": chance.random() < 0.5,
    }
    return row | {name: None for name in COLUMNS if chance.random() < 0.15}


def revised(there: list[dict], chance: random.Random) -> list[dict]:
    """The changes of an epoch, in any order; what is there is what they leave."""
    given: list[dict] = []
    for row in chance.sample(there, chance.randrange(len(there) + 1) if chance.random() < 0.8 else len(there)):
        there.remove(row)
        # What takes a row back may have the other zero.
        zero = {name: -row[name] for name in ("f", "g") if row[name] == 0 and chance.random() < 0.5}
        if chance.random() < 0.5:
            given.append(row | zero | {"_change_type": "delete"})
        else:
            newer = row | {name: drawn(chance)[name] for name in chance.sample(["k", *COLUMNS], 3)}
            there.append(newer)
            given += [row | zero | {"_change_type": "update_preimage"}, newer | {"_change_type": "update_postimage"}]
    for _ in range(chance.randrange(12)):
        row = drawn(chance)
        given.append(row | {"_change_type": "insert"})
        if chance.random() < 0.3:
            given.append(row | {"_change_type": "delete"})
        else:
            there.append(row)
    chance.shuffle(given)
    return given


def alike(rows: list[tuple]) -> list[tuple]:
    """Rows in which NaN is NaN and zero has no sign."""
    return [
        tuple("NaN" if value != value else value + 0.0 if isinstance(value, float) else value for value in row)
        for row in rows
    ]


def expected(there: list[dict], names: list[str]) -> list[tuple]:
    table = pa.Table.from_pylist(there, pa.schema(list(SCHEMA)[:-1]))
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("there", table)
        columns = ", ".join(WANTED[name][1] for name in names)
        return alike(connection.sql(f"SELECT k, {columns} FROM there GROUP BY k").fetchall())


def replayed(content: Counter[tuple], rows: pl.DataFrame) -> None:
    for row in rows.drop("epoch").iter_rows():
        change, values = row[-1], alike([row[:-1]])[0]
        if change in ("insert", "update_postimage"):
            content[values] += 1
        else:
            assert content[values] > 0, f"{values} is taken back, and was not there"
            content[values] -= 1


def counted(there: list[dict], column: str, which: str | None = None) -> dict[tuple, int]:
    rows = (row for row in there if row[column] is not None and (which is None or row[which]))
    return Counter((row["k"], alike([(row[column],)])[0]) for row in rows)


def cramped(few: bool) -> ExitStack:
    """With `few`, next to nothing is kept in memory."""
    stack = ExitStack()
    if few:
        stack.enter_context(mock.patch.object(key_aggregation, "_WAITING_BYTES", 1))
        stack.enter_context(mock.patch.object(aggregation, "_PARTIAL_ROWS", 2))
        stack.enter_context(mock.patch.object(aggregation, "_OUT_ROWS", 2))
        stack.enter_context(mock.patch.object(row_store, "_PENDING_BYTES", 1))
    return stack


def rescaled(before: Driven, parallelism: int) -> Driven:
    """The same state in other subtasks: copies of the old ones side by side, clipped."""
    backends = []
    for subtask in range(parallelism):
        groups = group_range(subtask, parallelism, MAX_PARALLELISM)
        parts: list[tuple[bytes, Backend]] = []
        for number, backend in enumerate(before.backends):
            begin, end = (first_key(group) for group in (before.groups(number).start, before.groups(number).stop))
            if begin < first_key(groups.stop) and first_key(groups.start) < end:
                parts.append((max(begin, first_key(groups.start)), MemoryBackend(dict(backend.scan(b"", BEYOND)))))
        backends.append(Joined(parts))
        clip(backends[-1], first_key(groups.start), first_key(groups.stop))
    driven = Driven(before.stage, before.schema, parallelism, backends)
    driven.id = before.id
    return driven


def values_of(driven: Driven) -> dict[str, dict[tuple, int]]:
    """The maps, by name: how often each key has each value."""
    maps: dict[str, dict[tuple, int]] = {}
    for subtask, backend in enumerate(driven.backends):
        for key, state in read(backend, driven.shapes, driven.groups(subtask), Instance, None).items():
            for declared in driven.shapes.collections:
                for value, number in getattr(state, declared.name).items():
                    maps.setdefault(declared.name.removesuffix("__values"), {})[key, alike([(value,)])[0]] = number
    return maps


class Instance:
    """A key's state."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= {f"{name}__values": {} for name in WANTED} | fields


@pytest.mark.parametrize("seed", sampled(range(20), lambda seed: seed in (0, 3)))
def test_values_are_as_duckdb_says_of_the_rows_that_are_left(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    few, parallelism, pauses = bool(seed % 2), chance.choice([1, 3]), chance.random() < 0.5
    backends = [RocksDBBackend(fresh(tmp_path / str(number)), 16) for number in range(parallelism)]
    names = sorted(chance.sample(list(WANTED), 9), key=list(WANTED).index) if few else list(WANTED)
    driven = Driven(totals(**{name: WANTED[name][0] for name in names}), SCHEMA, parallelism, backends)
    there, content = list[dict](), Counter[tuple]()
    with cramped(few):
        for epoch in range(6):
            if epoch == 3:
                driven = rescaled(driven, 4 - parallelism)
            given = revised(there, chance) if epoch < 5 else [row | {"_change_type": "delete"} for row in there]
            there = there if epoch < 5 else []
            cuts = sorted(chance.randrange(len(given) + 1) for _ in range(2)) if pauses else []
            for part, (begin, end) in enumerate(pairwise([0, *cuts, len(given)])):
                rows = driven.epoch(
                    given[begin:end], pause=part < len(cuts), batch_rows=chance.choice([3, 20, 100]), directory=tmp_path
                )
                replayed(content, rows)
            assert sorted((+content).elements(), key=repr) == sorted(expected(there, names), key=repr)
            kept = values_of(driven)
            for name in MAPS.keys() & kept.keys():
                assert kept[name] == counted(there, *MAPS[name])
    assert not list(tmp_path.glob("spill*"))
    assert not any(entry for backend in driven.backends for entry in backend.scan(b"", BEYOND)), "nothing is left"
    for backend in backends:
        backend.close()


def fresh(directory: Path) -> Path:
    directory.mkdir()
    return directory


def changes_of(*given: tuple[str, int | None, str]) -> list[dict]:
    return [{"k": k, "i": i, "_change_type": kind} for k, i, kind in given]


def test_aggregates_of_one_column_and_condition_share_its_values():
    wanted = {"n": agg.count_distinct("i"), "lo": agg.min("i"), "hi": agg.max("i"), "some": agg.max("i", where="i < 9")}
    run = testing.run(totals(changes=False, **wanted), schema=SCHEMA)
    assert run.epoch(changes_of(("a", 1, "insert"), ("a", 9, "insert"), ("a", 9, "insert"))).rows() == [
        ("a", 2, 1, 9, 1, 1)
    ]
    assert (run.state["a"].n__values, run.state["a"].some__values) == ({1: 1, 9: 2}, {1: 1})
    assert not hasattr(run.state["a"], "lo__values") and not hasattr(run.state["a"], "hi__values")
    assert run.epoch(changes_of(("a", 9, "delete"), ("a", 1, "delete"))).rows() == [("a", 1, 9, 9, None, 2)]
    assert run.epoch(changes_of(("a", 9, "delete"))).rows() == [("a", 0, None, None, None, 3)]
    assert not run.state


def test_entries_have_the_bytes_that_they_once_were_given():
    driven = Driven(totals(i=agg.min("i"), f=agg.max("f")), SCHEMA)
    driven.epoch([{"k": "a", "i": -1, "f": -0.5, "_change_type": "insert"}])
    assert {key.hex(): value.hex() for key, value in driven.backends[0].scan(b"", BEYOND)} == {
        "000401610000": "01b1b8fd4b1d60559800ffff000000000000e0bf0100000000000000",
        "0004054922a786610000401fffffffffffff": "01f666565ff26ab8cb000100000000000000",
        "000405ed8a0f856100007fffffffffffffff": "014821e7e9a1eff432000100000000000000",
    }


@pytest.mark.parametrize("down", [False, True])
def test_the_next_value_is_found_among_those_of_its_key_alone(down):
    best = agg.max("i") if down else agg.min("i")
    run = testing.run(totals(changes=False, best=best), schema=SCHEMA, max_parallelism=1)
    run.epoch(changes_of(*((k, i, "insert") for k in "abc" for i in (1, 2, 3))))
    gone = [3, 2, 1] if down else [1, 2, 3]
    for number, (i, left) in enumerate(zip(gone, [*gone[1:], None], strict=True), 2):
        rows = run.epoch(changes_of(("b", i, "delete"), ("b", None, "insert"))).rows()
        assert rows == [("b", left, number)]


def test_nan_is_what_is_left_where_no_number_is():
    run = testing.run(totals(changes=False, lo=agg.min("f"), hi=agg.max("f"), g=agg.max("g")), schema=SCHEMA)
    rows = [{"k": "a", "f": f, "g": f, "_change_type": "insert"} for f in (math.nan, -0.0, math.inf)]
    gone = [row | {"_change_type": "delete"} for row in rows]
    assert alike(run.epoch(rows).rows()) == [("a", 0.0, math.inf, math.inf, 1)]
    assert alike(run.epoch([gone[2]]).rows()) == [("a", 0.0, 0.0, 0.0, 2)]
    assert alike(run.epoch([gone[1] | {"f": 0.0}]).rows()) == [("a", "NaN", "NaN", "NaN", 3)]
    assert alike(run.epoch([*gone[:1], rows[1]]).rows()) == [("a", 0.0, 0.0, 0.0, 4)]


@pytest.mark.parametrize("best", ["min", "max"])
def test_a_value_that_is_owed_is_none_that_follows(best):
    """A checkpoint amid an epoch may have what takes a row back, and not the row."""
    stage = totals(best=getattr(agg, best)("i"), n=agg.count_distinct("i"))
    first, second, third = (1, 3, 5) if best == "min" else (5, 3, 1)
    driven = Driven(stage, SCHEMA)
    driven.epoch(changes_of(("a", first, "insert"), ("a", third, "insert"), ("a", None, "insert")))
    part = driven.epoch(changes_of(("a", second, "delete"), ("a", first, "delete")), pause=True)
    assert part.rows()[-1][:3] == ("a", third, 1)
    whole = driven.epoch(changes_of(("a", second, "insert"), ("a", third, "delete")))
    assert whole.rows()[-1][:3] == ("a", None, 0)
    driven.epoch(changes_of(("a", first, "insert"), ("a", None, "delete"), ("a", None, "delete")), pause=True)
    assert driven.epoch(changes_of(("a", None, "insert"))).rows()[-1][:3] == ("a", first, 1)


def test_databases_side_by_side_are_read_from_the_end():
    entries = [(bytes([number]), b"v") for number in range(9)]
    joined = Joined([(entries[at][0], MemoryBackend(dict(entries[at : at + 3]))) for at in (0, 3, 6)])
    assert list(joined.scan_back(entries[1][0], entries[8][0])) == entries[7:0:-1]


def test_a_value_that_never_came_is_not_taken_back():
    run = testing.run(totals(n=agg.count_distinct("i", where="b")), schema=SCHEMA)

    def epoch(i: int, b: bool, kind: str) -> list[tuple]:
        return run.epoch([{"k": "a", "i": i, "b": b, "_change_type": kind}]).rows()

    assert epoch(1, True, "insert") == [("a", 1, 1, "insert")] and epoch(2, True, "insert")
    with pytest.raises(InputError, match="More rows with k='a' and i=3 are taken back than came") as refused:
        epoch(3, True, "delete")
    assert "epoch, _commit_version" in refused.value.next
    assert epoch(1, False, "delete") == []
    with pytest.raises(InputError, match="All rows with k='a' are taken back, but not with the values that they had"):
        epoch(2, False, "delete")
    assert run.state["a"].n__values == {1: 1, 2: 1}


def test_values_of_revised_results_do_not_depend_on_how_the_input_is_cut():
    chance = random.Random(3)
    counts = aggregate("counts", OTHERS, key="k", n=agg.count(), total=agg.sum("v"), changes=True)
    wanted = {"most": agg.max("total"), "least": agg.min("total"), "different": agg.count_distinct("total")}
    by_count = aggregate("by_count", counts, key="n", **wanted, changes=True, sink=delta.append("by_count"))
    rows = pl.DataFrame([{"k": f"k{chance.randrange(12)}", "v": chance.randrange(-9, 9)} for _ in range(80)])
    pipeline = Pipeline("p", (counts, by_count), max_parallelism=16)
    testing.assert_slicing_does_not_matter(pipeline, rows, trials=3)


def test_values_whose_order_cannot_be_kept_are_refused():
    for type in (pa.timestamp("ns"), pa.time64("us"), pa.large_binary()):
        with pytest.raises(PipelineError, match="lo = min\\('i'\\) keeps values") as refused:
            shapes(totals(lo=agg.min("i")), SCHEMA.set(1, pa.field("i", type)))
        assert "Cast the column" in refused.value.next
    assert shapes(totals(lo=agg.min("i")), SCHEMA.set(1, pa.field("i", pa.large_string())))
    with pytest.raises(PipelineError, match="'lo__values' is both a field and a map"):
        shapes(totals(lo=agg.min("i"), lo__values=agg.count()), SCHEMA)


def test_values_over_other_input_mean_something_else():
    stage = totals(lo=agg.min("i"), n=agg.count_distinct("s"))
    pipeline = Pipeline("p", (stage,))
    shaped = {taken: shapes(stage, SCHEMA if taken else SCHEMA.remove(len(SCHEMA) - 1)) for taken in (True, False)}
    for was in (True, False):
        fixed = shaped[was]
        recorded = OperatorStats(
            keys=stored_keys(fixed),
            window=meaning(stage),
            schema=fixed.state.to_json(),
            collections=stored_collections(fixed),
            max_parallelism=pipeline.max_parallelism,
        )
        assert not fit(stage, fixed, recorded, pipeline).findings
        kinds = ["rows none of which takes others back", "changes"]
        assert (
            f"its input was {kinds[was]}, is {kinds[not was]}"
            in fit(stage, shaped[not was], recorded, pipeline).problems
        )
