"""Upserting into real Delta tables: what DuckDB makes of the same changes, exactly once, whatever others do meanwhile."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.delta import log_entries
from state_ops.errors import PipelineError
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from tests.tools.sampling import sampled
from tests.weir.connectors.delta.test_append import APP, checkpoint
from weir import delta as sinks
from weir.connectors import staged_rows
from weir.connectors.delta import append, restore_version, statistics, upsert
from weir.connectors.delta import changes as netting
from weir.connectors.delta.changes import ROW, spill

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64())])
CHANGED = pa.schema([*SCHEMA, ("_change_type", pa.string())])
SINK = sinks.upsert("out", "key")


@pytest.fixture
def storage(tmp_path) -> Storage:
    opened = Storage(str(tmp_path / "p"))
    append.ensure(opened, "out", SCHEMA)
    return opened


def staged(storage: Storage, number: int, rows: list[tuple], schema: pa.Schema = SCHEMA, subtask: int = 0) -> StateFile:
    path = f"outputs/out/g1-e{number}/{subtask}-a.parquet"
    data = pa.BufferOutputStream()
    columns = list(zip(*rows, strict=True)) or [[] for _ in schema]
    pq.write_table(pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema), data)  # fmt: skip
    local = Path(storage.uri).parent / "staged"
    local.write_bytes(data.getvalue())
    size, digest = storage.put_file(local, path)
    return StateFile("stage", subtask, OUTPUT, "main", path, size, digest, True, "a", None, "out", len(rows))  # type: ignore[arg-type]


def publish(storage: Storage, number: int, previous: int | None, *files: StateFile, sink=SINK, row=None):
    scratch = Path(storage.uri).parent / "scratch"
    return upsert.publish(storage, APP, sink, row or checkpoint(number), previous, files, scratch)


def rows(storage: Storage) -> list[tuple]:
    return sorted(tuple(row.values()) for row in DeltaTable(storage.full("tables/out")).to_pyarrow_table().to_pylist())


def test_the_newest_row_of_a_key_stays_and_a_deleted_key_goes(storage):
    publish(storage, 1, None, staged(storage, 1, [("a", 1), ("b", 1), ("a", 2)]))
    assert rows(storage) == [("a", 2), ("b", 1)]
    changes = [
        ("a", 2, "update_preimage"),
        ("a", 3, "update_postimage"),
        ("b", 1, "delete"),
        ("absent", 0, "delete"),
        ("c", 1, "insert"),
        ("c", 2, "insert"),
        ("d", 1, "insert"),
        ("d", 1, "delete"),
    ]
    published = publish(storage, 2, 1, staged(storage, 2, changes, CHANGED))
    assert rows(storage) == [("a", 3), ("c", 2)]
    assert published.rows == 5


def test_an_epoch_that_changes_nothing_moves_the_transaction_version(storage):
    publish(storage, 1, None, staged(storage, 1, [("a", 1)]))
    files = DeltaTable(storage.full("tables/out")).file_uris()
    publish(storage, 2, 1, staged(storage, 2, [("absent", 0, "delete")], CHANGED))
    publish(storage, 3, 2)
    handle = DeltaTable(storage.full("tables/out"))
    assert (handle.transaction_version(f"{APP}/out"), handle.file_uris()) == (3, files)


def test_only_files_with_a_changed_key_are_written_anew(storage):
    publish(storage, 1, None, staged(storage, 1, [("a", 1), ("b", 1)]))
    publish(storage, 2, 1, staged(storage, 2, [("x", 1), ("y", 1)]))
    first, second = sorted(DeltaTable(storage.full("tables/out")).file_uris(), key=lambda uri: "g1-e2" in uri)
    publish(storage, 3, 2, staged(storage, 3, [("y", 2)]))
    now = DeltaTable(storage.full("tables/out")).file_uris()
    assert first in now and second not in now and len(now) == 2
    assert rows(storage) == [("a", 1), ("b", 1), ("x", 1), ("y", 2)]


def test_many_small_files_are_written_together(storage, monkeypatch):
    monkeypatch.setattr(upsert, "_MANY", 4)
    for number in range(1, 12):
        publish(storage, number, number - 1 or None, staged(storage, number, [(f"k{number}", number)]))
    assert len(DeltaTable(storage.full("tables/out")).file_uris()) <= 4
    assert rows(storage) == sorted((f"k{number}", number) for number in range(1, 12))


def test_a_foreign_optimize_in_between_is_respected(storage, monkeypatch):
    for number in (1, 2, 3):
        publish(storage, number, number - 1 or None, staged(storage, number, [(f"k{number}", 1), ("both", number)]))
    merged, optimized = upsert._merged, []

    def overtaken(*asked):
        change = merged(*asked)
        if not optimized:
            optimized.append(DeltaTable(storage.full("tables/out")).optimize.compact())
        return change

    monkeypatch.setattr(upsert, "_merged", overtaken)
    publish(storage, 4, 3, staged(storage, 4, [("k2", 9), ("both", 9)]))
    assert optimized[0]["numFilesRemoved"] >= 2
    assert rows(storage) == [("both", 9), ("k1", 1), ("k2", 9), ("k3", 1)]
    stored = {file.path for file in storage.list("tables/out/data/g1-e4")}
    assert len(stored) == 1, "what the first try wrote is removed"


def test_rows_of_others_that_come_in_between_are_replaced(storage, monkeypatch):
    """Also where there was none of the keys before, so that the commit removes nothing."""
    merged, written = upsert._merged, []

    def overtaken(*asked):
        change = merged(*asked)
        if not written:
            written.append("a")
            theirs = pa.table({"key": ["a", "b"], "n": [7, 7]}, schema=SCHEMA)
            write_deltalake(storage.full("tables/out"), theirs, mode="append")
        return change

    monkeypatch.setattr(upsert, "_merged", overtaken)
    publish(storage, 1, None, staged(storage, 1, [("a", 1)]))
    assert rows(storage) == [("a", 1), ("b", 7)]


def test_a_restored_version_gives_the_rows_of_then(storage):
    publish(storage, 1, None, staged(storage, 1, [("a", 1), ("b", 1)]))
    publish(storage, 2, 1, staged(storage, 2, [("a", 2), ("c", 2)]))
    publish(storage, 3, 2, staged(storage, 3, [("b", 1, "delete")], CHANGED))
    at = DeltaTable(storage.full("tables/out")).version()
    rewind = replace(checkpoint(4), sinks={"out": SinkLink(4, 3).updated(to=1, at=at)})
    restore_version.rewind(storage, APP, "out", rewind, rewind.sinks["out"].before)
    assert rows(storage) == [("a", 1), ("b", 1)]
    publish(storage, 3, 2, staged(storage, 3, [("a", 9)]))
    assert rows(storage) == [("a", 1), ("b", 1)], "a zombie"
    publish(storage, 5, 4, staged(storage, 5, [("a", 5)]))
    assert rows(storage) == [("a", 5), ("b", 1)]


def promotion(storage: Storage, number: int, before: int, to: int | None) -> Checkpoint:
    at = DeltaTable(storage.full("tables/out")).version()
    sinks = {"out": SinkLink(number, before).updated(to=to, at=at, branch="b" * 32)}
    return replace(checkpoint(number), kind="promotion", sinks=sinks)


@pytest.mark.parametrize("to", [1, None])
def test_a_promotion_makes_a_branchs_changes_to_the_table_of_then(storage, to):
    publish(storage, 1, None, staged(storage, 1, [("a", 1), ("b", 1)]))
    publish(storage, 2, 1, staged(storage, 2, [("a", 2), ("z", 2)]))
    brought = [
        staged(storage, 3, [("a", 30, "update_postimage"), ("c", 30, "insert")], CHANGED, subtask=1),
        staged(storage, 3, [("c", 40, "delete"), ("d", 40, "insert")], CHANGED, subtask=2),
    ]
    row = promotion(storage, 3, 2, to)
    publish(storage, 3, 2, *brought, row=row)
    assert rows(storage) == sorted([("a", 30), ("d", 40)] + [("b", 1)] * (to is not None))
    publish(storage, 3, 2, *brought, row=row)
    publish(storage, 4, 3, staged(storage, 4, [("d", 1)]))
    assert ("d", 1) in rows(storage)


def test_a_table_of_others_with_doubles_gets_one_row_of_a_key_that_changes(storage):
    write_deltalake(
        storage.full("tables/out"), pa.table({"key": ["a", "a"], "n": [1, 2]}, schema=SCHEMA), mode="append"
    )
    write_deltalake(
        storage.full("tables/out"), pa.table({"key": ["a", "b"], "n": [3, 3]}, schema=SCHEMA), mode="append"
    )
    publish(storage, 1, None, staged(storage, 1, [("a", 9)]))
    assert rows(storage) == [("a", 9), ("b", 3)]


def test_order_by_tells_the_newest_of_several_files(storage):
    by = sinks.upsert("out", "key", order_by="n")
    files = [staged(storage, 1, [("a", 3), ("b", 1)], subtask=0), staged(storage, 1, [("a", 2), ("b", 5)], subtask=1)]
    publish(storage, 1, None, *files, sink=by)
    assert rows(storage) == [("a", 3), ("b", 5)]


@pytest.mark.parametrize("property", ["delta.enableChangeDataFeed", "delta.appendOnly"])
def test_a_table_whose_readers_expect_more_is_refused(storage, property):
    DeltaTable(storage.full("tables/out")).alter.set_table_properties({property: "true"})
    with pytest.raises(PipelineError, match=property):
        publish(storage, 1, None, staged(storage, 1, [("a", 1)]))
    with pytest.raises(PipelineError, match=property):
        append.check_table(storage, "out", SCHEMA, keyed=True)


@pytest.mark.parametrize("seed", sampled(range(3)))
def test_it_is_what_duckdb_makes_of_the_same_changes(storage, seed, monkeypatch):
    """Random inserts, updates and deletes of two key columns, epoch by epoch, in ranges and batches of a few rows."""
    monkeypatch.setattr(upsert, "_MANY", 5)
    monkeypatch.setattr(upsert, "_BATCH", 3)
    monkeypatch.setattr(upsert, "_KEY_ROWS", 4)
    monkeypatch.setattr(upsert, "_NEW_ROWS", 7)
    monkeypatch.setattr(netting, "_RANGE_ROWS", 4)
    draw, schema = random.Random(seed), pa.schema([("k", pa.int64()), ("key", pa.string()), *CHANGED][:2] + list(CHANGED)[1:])  # fmt: skip
    wide = Storage(str(Path(storage.uri).parent / "wide"))
    append.ensure(wide, "out", pa.schema(list(schema)[:-1]))
    sink, replay = sinks.upsert("out", ["k", "key"]), duckdb.connect()
    replay.execute("CREATE TABLE replay (k BIGINT, key VARCHAR, n BIGINT, PRIMARY KEY (k, key))")
    for number in range(1, 13):
        changes = [
            (draw.randrange(30), f"s{draw.randrange(3)}", draw.randrange(999), draw.choice(["insert", "update_preimage", "update_postimage", "delete"]))
            for _ in range(draw.randrange(0, 25))
        ]  # fmt: skip
        for at, (k, key, n, change) in enumerate(changes):
            same_key, of, before = changes[at - 1][:2] == (k, key), changes[at - 1][3], changes[at - 1][2]
            if at and same_key and (of, change) == ("update_postimage", "update_preimage") and before != n:
                continue  # the older image of the change whose new one came first
            if change in ("delete", "update_preimage"):
                replay.execute("DELETE FROM replay WHERE k = ? AND key = ?", [k, key])
            else:
                replay.execute("INSERT OR REPLACE INTO replay VALUES (?, ?, ?)", [k, key, n])
        publish(wide, number, number - 1 or None, staged(wide, number, changes, schema), sink=sink)
        assert rows(wide) == replay.execute("SELECT * FROM replay ORDER BY ALL").fetchall()


def test_the_definition_is_refused_where_nothing_tells_the_newest_row():
    from tests.recovery import small

    with pytest.raises(PipelineError, match="does not contain that of accounts"):
        replace(small.accounts, sink=sinks.upsert("out", "at"))
    replace(small.accounts, sink=sinks.upsert("out", "at", order_by="amount"))
    replace(small.accounts, sink=sinks.upsert("out", ["id", "at"]))


VERSIONED = pa.schema([*CHANGED, ("_commit_version", pa.int64())])
ORDERED = pa.schema([*SCHEMA, ("v", pa.string()), ("_change_type", pa.string())])
OLD, NEW = "update_preimage", "update_postimage"


def netted(tmp_path, sink, schema: pa.Schema, *epochs: list[list[tuple]]) -> dict[str, int | None]:
    """Of epochs, each of which has batches of rows: the number of the row that each key gets."""
    batches = [
        [pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in batch], schema) for batch in epoch]
        for epoch in epochs
    ]  # fmt: skip
    return dict(pl.concat(spill(sink, schema, [iter(epoch) for epoch in batches], tmp_path / "rows").ranges()).rows())


@pytest.mark.parametrize("ranges", [2, 1_000_000])
@pytest.mark.parametrize("cut", range(5))
def test_images_that_follow_each_other_are_one_change_wherever_a_batch_ends(tmp_path, cut, ranges, monkeypatch):
    """Even where the new one is the older one by `order_by`."""
    monkeypatch.setattr(netting, "_RANGE_ROWS", ranges)
    changes = [("f", 1, "", "insert"), ("x", 9, "a", OLD), ("x", 5, "b", NEW), ("y", 5, "b", NEW), ("y", 9, "a", OLD)]
    sink = sinks.upsert("out", "key", order_by="n")
    assert netted(tmp_path, sink, ORDERED, [changes[:cut], changes[cut:]]) == {"f": 0, "x": 2, "y": 3}
    assert netted(tmp_path, sink, ORDERED, [changes[:2]], [changes[2:]]) == {"f": 0, "x": 2, "y": 3}
    assert netted(tmp_path, SINK, ORDERED, [changes[:cut], changes[cut:]]) == {"f": 0, "x": 2, "y": 3}


@pytest.mark.parametrize("by", [None, "n"])
def test_an_old_image_behind_a_row_takes_it_back_if_it_is_the_same_row(tmp_path, by, monkeypatch):
    monkeypatch.setattr(netting, "_PAIRS", 1)
    changes = [
        ("w", 5, "a", OLD),  # w becomes x, and x becomes y
        ("x", 5, "a", NEW),
        ("x", 5, "a", OLD),
        ("y", 5, "a", NEW),
        ("p", 5, "old", OLD),  # p and q swap
        ("q", 5, "old", NEW),
        ("q", 5, "other", OLD),
        ("p", 5, "other", NEW),
        ("z", 5, None, NEW),  # nulls are equal
        ("z", 5, None, OLD),
        ("n", 5, None, NEW),
        ("n", 5, "a", OLD),
    ]
    sink = sinks.upsert("out", "key", **({"order_by": by} if by else {}))
    expected = {"w": None, "x": None, "y": 3, "p": 7, "q": 5, "z": None, "n": 10}
    assert netted(tmp_path, sink, ORDERED, [changes]) == expected


def test_of_rows_with_one_value_of_order_by_an_old_image_is_the_oldest(tmp_path):
    changes = [
        ("x", 5, "b", NEW),
        ("y", 5, "a", "insert"),
        ("x", 5, "a", OLD),
        ("y", 5, "a", OLD),  # it takes back the row that came
        ("x", 5, "a", "delete"),
        ("x", 5, "c", "insert"),
        ("z", 5, "a", "insert"),
        ("f", 5, "a", "insert"),
        ("z", 6, "a", OLD),
    ]
    sink = sinks.upsert("out", "key", order_by="n")
    assert netted(tmp_path, sink, ORDERED, [changes]) == {"x": 5, "y": None, "z": None, "f": 7}


@pytest.mark.parametrize("ranges", [1, 1_000_000])
def test_images_stand_apart_if_another_key_is_between_them(tmp_path, ranges, monkeypatch):
    """However few keys are netted at a time, rows follow each other as they came."""
    monkeypatch.setattr(netting, "_RANGE_ROWS", ranges)
    changes = [("x", 9, "a", OLD), ("y", 1, "", "insert"), ("x", 5, "b", NEW)]
    sink = sinks.upsert("out", "key", order_by="n")
    assert netted(tmp_path, sink, ORDERED, [changes]) == {"x": None, "y": 1}


@pytest.mark.parametrize(
    ("type", "one", "other"),
    [
        (pa.list_(pa.int64()), [1, None], [1, 2]),
        (pa.struct([("a", pa.int64()), ("b", pa.string())]), {"a": 1, "b": None}, {"a": 1, "b": ""}),
        (pa.map_(pa.string(), pa.int64()), [("a", 1)], [("a", 2)]),
        (pa.float64(), float("nan"), 0.0),
        (pa.decimal128(38, 2), Decimal("1.10"), Decimal("1.11")),
        (pa.binary(), b"\0", b""),
        (pa.timestamp("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC), None),
        (pa.list_(pa.struct([("a", pa.list_(pa.float64()))])), [{"a": [1.0]}], [{"a": []}]),
    ],
    ids=str,
)
def test_rows_of_all_types_are_compared(tmp_path, type, one, other):
    schema = pa.schema([("key", pa.string()), ("v", type), ("_change_type", pa.string())])
    assert netted(tmp_path, SINK, schema, [[("x", one, NEW), ("x", one, OLD)]]) == {"x": None}
    assert netted(tmp_path, SINK, schema, [[("x", one, NEW), ("x", other, OLD)]]) == {"x": 0}


def test_when_a_row_changed_is_no_difference(tmp_path):
    """The old image has the epoch of its own change."""
    schema = pa.schema([*ORDERED, ("epoch", pa.int64())])
    changes = [("x", 5, "a", NEW, 3), ("x", 5, "a", OLD, 4), ("y", 5, "a", NEW, 4)]
    assert netted(tmp_path, SINK, schema, [changes]) == {"x": None, "y": 2}


def test_an_old_image_takes_its_row_away_unless_the_key_has_a_new_one(storage):
    publish(storage, 1, None, staged(storage, 1, [(key, 1) for key in "abcdef"]))
    changes = [
        ("a", 1, "update_preimage"),  # moves to another key
        ("z", 2, "update_postimage"),
        ("b", 1, "update_preimage"),  # its new image was left out
        ("c", 1, "update_preimage"),
        ("c", 3, "update_postimage"),
        ("d", 1, "update_preimage"),  # two rows change keys: first both go, and then both come
        ("e", 1, "update_preimage"),
        ("e", 4, "update_postimage"),
        ("d", 4, "update_postimage"),
    ]
    publish(storage, 2, 1, staged(storage, 2, changes, CHANGED))
    assert rows(storage) == [("c", 3), ("d", 4), ("e", 4), ("f", 1), ("z", 2)]


def test_rows_from_before_there_were_changes_are_rows(tmp_path):
    batches = [
        pa.RecordBatch.from_pylist([{"key": "a", "n": 1}], SCHEMA),
        pa.RecordBatch.from_pylist([{"key": "b", "n": 1, "_change_type": "delete", "_commit_version": 1}], VERSIONED),
    ]
    for sink in (SINK, sinks.upsert("out", "key", order_by="n")):
        changes = spill(sink, VERSIONED, [iter(batches)], tmp_path / "rows")
        assert pl.concat(changes.ranges()).rows() == [("a", 0), ("b", None)]


@pytest.mark.parametrize("seed", sampled(range(40), lambda seed: seed in (1, 8)))
@pytest.mark.parametrize("by", ["_commit_version", "epoch", "n"])
def test_changes_that_a_condition_splits_keep_a_copy_of_what_it_holds_of(tmp_path, by, seed, monkeypatch):
    """Rows that change keys and values, in any order within a version: a column says which, or the rows' own order."""
    monkeypatch.setattr(netting, "_RANGE_ROWS", 5)
    draw, there, versions = random.Random(seed), dict[int, tuple[str, int]](), iter(range(1, 100))
    schema = pa.schema([*CHANGED, *([] if by == "n" else [(by, pa.int64())])])
    storage = Storage(str(tmp_path / "p"))
    append.ensure(storage, "out", schema.remove(2))

    def changed(number: int) -> list[tuple]:
        """What becomes of rows in one version; a row's value is the number of its last one."""
        went = {id: there.pop(id) for id in draw.sample(sorted(there), min(len(there), draw.randint(0, 4)))}
        free = sorted({f"k{n}" for n in range(8)} - {key for key, _ in there.values()})
        draw.shuffle(free)
        stay = {id: (free.pop(), number) for id in went if draw.random() < 0.8}
        there.update(stay)
        changes = [(*row, "update_preimage" if id in stay else "delete") for id, row in went.items()]
        changes += [(*row, "update_postimage") for row in stay.values()]
        if free:
            there[number * 10] = (free.pop(), number)
            changes.append((*there[number * 10], "insert"))
        draw.shuffle(changes)
        return [row if by == "n" else (*row, number) for row in changes]

    def holds(row: tuple) -> bool:
        return int(row[0][1:]) % 4 > 0 and row[1] % 3 > 0

    for epoch in range(1, 7):
        given = [changed(next(versions)) for _ in range(1 if by == "epoch" else draw.randint(1, 3))]
        split = [row for changes in given for row in changes if holds(row)]
        parts = [staged(storage, epoch, split, schema)] if split else []
        sink = SINK if by == "_commit_version" else sinks.upsert("out", "key", order_by=by)
        publish(storage, epoch, epoch - 1 or None, *parts, sink=sink)
        assert [row[:2] for row in rows(storage)] == sorted(filter(holds, there.values()))


def test_netting_of_no_rows_is_no_change(tmp_path):
    changes = spill(SINK, CHANGED, [iter(())], tmp_path / "rows")
    assert (changes.count, list(changes.ranges())) == (0, [])


KEYS = {
    pa.string(): lambda n: f"k{n:03}",
    pa.int32(): lambda n: n - 50,
    pa.bool_(): lambda n: n % 2 == 0,
    pa.binary(): lambda n: bytes([n, 0]),
    pa.decimal128(20, 2): lambda n: Decimal(n) / 100,
    pa.date32(): lambda n: date(2024, 1, 1) + timedelta(n),
    pa.timestamp("us", "UTC"): lambda n: datetime(2024, 1, 1, tzinfo=UTC) + timedelta(minutes=n),
    pa.timestamp("us"): lambda n: datetime(2024, 1, 1) + timedelta(minutes=n),
}


@pytest.mark.parametrize("type", KEYS, ids=str)
def test_keys_are_netted_range_by_range(tmp_path, monkeypatch, type):
    """As Python does it, of two epochs, in ranges of some twenty rows."""
    monkeypatch.setattr(netting, "_RANGE_ROWS", 20)
    draw, schema = random.Random(1), pa.schema([("key", type), ("n", pa.int64()), ("_change_type", pa.string())])
    rows = [(KEYS[type](draw.randrange(99)), n, draw.choice(["insert", "delete"])) for n in range(300)]
    batches = [pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows[at : at + 50]], schema) for at in range(0, 300, 50)]  # fmt: skip
    changes = spill(SINK, schema, [iter(batches[:3]), iter(batches[3:])], tmp_path / "rows")
    ranges = list(changes.ranges())
    assert len(ranges) > 10 or type == pa.bool_()
    netted = [row for frame in ranges for row in frame.rows()]
    newest = {key: None if change == "delete" else n for key, n, change in rows}
    assert netted == sorted(newest.items())
    comes = changes.rows(pl.concat(ranges)[ROW].drop_nulls().to_numpy())
    assert comes.column_names == ["key", "n"]
    assert comes["n"].to_pylist() == [n for _, n in netted if n is not None]


def test_epochs_with_other_columns_are_one_table(tmp_path):
    both = pa.schema([*SCHEMA, ("new", pa.int64())])
    old = pa.RecordBatch.from_pylist([{"key": "a", "n": 1}, {"key": "b", "n": 1}], SCHEMA)
    new = pa.RecordBatch.from_pylist([{"new": 2, "n": 2, "key": "b"}], pa.schema(list(both)[::-1]))
    changes = spill(SINK, both, [iter([old]), iter([new])], tmp_path / "rows")
    (keys,) = changes.ranges()
    assert [tuple(row.values()) for row in changes.rows(keys[ROW].to_numpy()).to_pylist()] == [
        ("a", 1, None),
        ("b", 2, 2),
    ]


def test_an_epochs_rows_are_never_all_in_memory(storage, monkeypatch):
    """40 MB of texts, which are new at first and replaced then."""
    monkeypatch.setattr(upsert, "_BATCH", 500)
    monkeypatch.setattr(staged_rows, "_BATCH_ROWS", 500)
    wide, scratch = pa.schema([("key", pa.int64()), ("n", pa.string())]), Path(storage.uri).parent / "scratch"
    other = Storage(str(Path(storage.uri).parent / "wide"))
    append.ensure(other, "out", wide)
    for number in (1, 2):
        local, path = Path(storage.uri).parent / "staged", f"outputs/out/g1-e{number}/0-a.parquet"
        with pq.ParquetWriter(local, wide, use_dictionary=False) as writer:
            for start in range(0, 10_000, 500):
                texts = [f"{number}-{at}-" * 400 for at in range(start, start + 500)]
                writer.write_table(pa.table([range(start, start + 500), texts], schema=wide))
        size, digest = other.put_file(local, path)
        file = StateFile("stage", 0, OUTPUT, "main", path, size, digest, True, "a", None, "out", 10_000)  # type: ignore[arg-type]
        del texts
        usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        try:
            upsert.publish(other, APP, SINK, checkpoint(number), number - 1 or None, [file], scratch)
        finally:
            pa.set_memory_pool(usual)
        assert pool.max_memory() < 20e6
    assert {text[:2] for _, text in rows(other)} == {"2-"} and len(rows(other)) == 10_000


WIDE = ["\U00020bb7", "\U0001f600", "A" * 36, "A" * 32 + 2 * "\U0010ffff", "A" * 32 + "\U00020bb7"]


@pytest.mark.parametrize("escaped", [False, True], ids=["now", "by an earlier release"])
def test_keys_beyond_the_basic_plane_are_known_again(storage, monkeypatch, escaped):
    """delta-rs takes U+20BB7 that an entry escapes by number for U+10BB7: the file seemed to have no such key."""
    if escaped:
        monkeypatch.setattr(log_entries, "as_json", json.dumps)
        monkeypatch.setattr(statistics, "as_json", json.dumps)
    for key in WIDE:
        publish(storage, 1, None, staged(storage, 1, [(key, 1)]))
        for number in (2, 3):
            publish(storage, number, number - 1, staged(storage, number, [(key, number)]))
        assert rows(storage) == [(key, 3)], ascii(key)
        shutil.rmtree(storage.full("tables/out"))
        append.ensure(storage, "out", SCHEMA)


def test_readers_find_texts_beyond_the_basic_plane(storage):
    publish(storage, 1, None, staged(storage, 1, [("\U00020bb7", 1)]))
    (action,) = pa.RecordBatchReader.from_stream(
        DeltaTable(storage.full("tables/out")).get_add_actions(flatten=True)
    ).read_all().to_pylist()  # fmt: skip
    assert (action["min.key"], action["max.key"]) == ("\U00020bb7", "\U00020bb7")
