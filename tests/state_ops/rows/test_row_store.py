"""Rows by columns of keys, against a dict: whatever is pending, resident or stored, and whatever happens in between."""

from __future__ import annotations

import os
import random
import tempfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.backends.base import SortedRun
from state_ops.backends.memory import MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.keyed.keyed_state import VALUE_STATE, scan_values
from state_ops.rows import row_store as rows_module
from state_ops.rows.hash_table import CollisionError, HashedTable
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import GROUP, RowStore
from state_ops.schema.key_codec import decode_keys
from state_ops.schema.key_groups import key_groups, xxhash64
from state_ops.schema.state_schema import StateSchema

SCHEMA = StateSchema.build([("n", pa.int64(), False, 7), ("word", pa.string(), True, None)])
KEYS = pa.schema([("user", pa.string()), ("day", pa.int32())])
GROUPS = 16
ROOMY = 1 << 20


def frame_of(keys: list[tuple[str, int]]) -> pl.DataFrame:
    columns = [pa.array([key[i] for key in keys], field.type) for i, field in enumerate(KEYS)]
    groups = key_groups(columns, GROUPS).astype(np.int32) if keys else np.zeros(0, np.int32)
    return pl.DataFrame([pl.Series(GROUP, groups), *map(pl.Series, KEYS.names, map(pl.from_arrow, columns))])


def fields_of(values: list[tuple[int, str | None]]) -> pl.DataFrame:
    return pl.DataFrame(values, schema={"n": pl.Int64, "word": pl.String}, orient="row")


def opened(backend, residence: Residence | None = None) -> RowStore:
    return RowStore(backend, SCHEMA, KEYS, VALUE_STATE, residence)


def put(rows: RowStore, entries: dict[tuple[str, int], tuple[int, str | None] | None], *, asked: bool = False) -> None:
    """asked: after a get of the very frame of keys, as operators do it."""
    frame = frame_of(list(entries))
    if asked:
        rows.get(frame)
    values = [value or (0, None) for value in entries.values()]
    present = np.array([value is not None for value in entries.values()])
    rows.put(frame, fields_of(values), present)


def got(rows: RowStore, keys: list[tuple[str, int]]) -> list[tuple[int, str | None] | None]:
    stored, present = rows.get(frame_of(keys))
    assert all(row == (7, None) for row, here in zip(stored.rows(), present, strict=True) if not here)
    return [row if here else None for row, here in zip(stored.rows(), present, strict=True)]


def stored(backend) -> dict[tuple[str, int], tuple[int, str | None]]:
    tables = scan_values(backend, SCHEMA, KEYS, range(GROUPS))
    return {row[:2]: row[2:] for table in tables for row in pl.from_arrow(table).rows()}  # type: ignore[union-attr]


def taken_rows(taken: tuple[pl.DataFrame, pl.DataFrame]) -> list[tuple]:
    return [(row[1:3], row[3:]) for part in taken for row in part.rows()]


keys = st.tuples(st.sampled_from(["", "a", "ab", "b\0", "żółw", "x" * 40]), st.integers(-2, 2))
values = st.none() | st.tuples(st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=3))
steps = st.lists(
    st.tuples(st.sampled_from(["put", "get and put"]), st.dictionaries(keys, values, max_size=8))
    | st.tuples(st.just("get"), st.lists(keys, unique=True, max_size=8))
    | st.tuples(st.just("take"), st.integers(-(2**63), 2**63 - 1))
    | st.tuples(st.sampled_from(["flush", "barrier", "lose"]), st.none()),
    max_size=25,
)


@pytest.mark.parametrize("modulus", [1 << 62, 3], ids=["hashes", "collisions"])
@given(
    steps=steps,
    most_bytes=st.sampled_from([0, 150, ROOMY]),
    pending_bytes=st.sampled_from([0, ROOMY]),
    at_once=st.sampled_from([2, ROOMY]),
)
@settings(max_examples=60)
def test_whatever_is_pending_resident_or_stored_a_dict_says_the_same(
    modulus, steps, most_bytes, pending_bytes, at_once
):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr(rows_module, "xxhash64", lambda columns: xxhash64(columns) % np.uint64(modulus))
        patch.setattr(rows_module, "_PENDING_BYTES", pending_bytes)
        patch.setattr(rows_module, "_WRITE_BYTES", 50 * at_once)
        patch.setattr(rows_module, "_GET_KEYS", at_once)
        backend, model, epoch = MemoryBackend(), {}, 0

        def next_epoch(source: Path | None) -> RowStore:
            target = Path(scratch, str(epoch))
            target.mkdir()
            return opened(backend, Residence(source, target, most_bytes, range(GROUPS), fresh=epoch == 0))

        rows = next_epoch(None)
        for what, given_ in steps:
            if what in ("put", "get and put"):
                put(rows, given_, asked=what != "put")
                model.update(given_)
            elif what == "get":
                assert got(rows, given_) == [model.get(key) for key in given_]
            elif what == "take":
                if (taken := rows.take(pl.col("n") <= given_)) is not None:
                    over = {key: value for key, value in model.items() if value is not None and value[0] <= given_}
                    assert sorted(taken_rows(taken)) == sorted(over.items())
                    model.update(dict.fromkeys(over))
            elif what == "flush":
                rows.flush()
                assert stored(backend) == {key: value for key, value in model.items() if value is not None}
            else:  # the next epoch, on this host or on another one
                rows.barrier()
                assert stored(backend) == {key: value for key, value in model.items() if value is not None}
                source = Path(scratch, str(epoch)) if what == "barrier" else None
                epoch += 1
                rows = next_epoch(source)
        assert got(rows, sorted(model)) == [model[key] for key in sorted(model)]


def test_what_is_taken_of_resident_rows_is_forgotten_and_comes_once(tmp_path):
    backend = MemoryBackend()
    rows = opened(backend, Residence(None, tmp_path, ROOMY, range(GROUPS), fresh=True))
    assert rows.all_resident(0)
    put(rows, {("a", 1): (1, "old"), ("b", 2): (2, "stays"), ("c", 3): (3, "old")})
    rows.barrier()
    put(rows, {("a", 1): (9, "new"), ("c", 3): (3, "new"), ("d", 4): (1, "new")})
    taken = rows.take(pl.col("n") <= 3 - 1)
    assert taken is not None
    assert [sorted(part["word"]) for part in taken] == [["new"], ["stays"]]  # of this epoch, and of before
    taken = rows.take(pl.col("n") <= 3)
    assert taken is not None and taken_rows(taken) == [(("c", 3), (3, "new"))]
    rows.barrier()
    assert stored(backend) == {("a", 1): (9, "new")}
    assert opened(backend).take(pl.col("n") <= 3) is None
    backend.close()


class Counting(MemoryBackend):
    """Says which keys were asked of it, and in which order they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []
        self.wrote: list[list[bytes]] = []

    def multi_get(self, keys):
        self.asked += keys
        return super().multi_get(keys)

    def write(self, puts, deletes=()):
        self.last = puts
        self.wrote.append([key for key, _ in puts])
        super().write(puts, deletes)


def test_many_rows_become_entries_some_at_a_time(monkeypatch):
    monkeypatch.setattr(rows_module, "_PENDING_BYTES", 0)
    monkeypatch.setattr(rows_module, "_WRITE_BYTES", 500)
    monkeypatch.setattr(rows_module, "_GET_KEYS", 30)
    read: list[int] = []

    class Watched(Counting):
        def multi_get(self, keys):
            read.append(len(keys))
            return super().multi_get(keys)

    backend = Watched()
    wanted = {(f"user {n}", n): None if n % 5 == 0 else (n, "word") for n in range(100)}
    put(opened(backend), wanted)
    wrote = [key for some in backend.wrote for key in some]
    assert wrote == sorted(wrote) and len(wrote) == 80
    assert len(backend.wrote) > 4 and max(map(len, backend.wrote)) < 30
    assert got(opened(backend), list(wanted)) == list(wanted.values())
    assert sum(read) == 100 and max(read) == 30


def test_a_key_is_written_once_an_epoch_and_in_key_order(tmp_path):
    backend = Counting()
    rows = opened(backend)
    wanted = [(user, day) for user in ("zoe", "abe", "max") for day in (3, -1)]
    for n in range(3):
        put(rows, dict.fromkeys(wanted, (n, "w")))
    assert backend.wrote == []
    rows.barrier()
    assert len(backend.wrote) == 1
    assert backend.wrote[0] == sorted(backend.wrote[0])
    assert len(backend.wrote[0]) == len(wanted)
    assert set(stored(backend).values()) == {(2, "w")}


def resident(tmp_path: Path, number: int = 40) -> tuple[Counting, Path]:
    """A backend with so many rows, and the directory with the table that the epoch before left."""
    backend, target = Counting(), tmp_path / "left"
    target.mkdir()
    rows = opened(backend, Residence(None, target, ROOMY, range(GROUPS), fresh=True))
    put(rows, {(f"u{i}", i): (i, None) for i in range(number)})
    rows.barrier()
    backend.asked.clear()
    return backend, target


def test_a_resident_table_answers_without_the_backend(tmp_path):
    backend, left = resident(tmp_path)
    rows = opened(backend, Residence(left, tmp_path, ROOMY, range(GROUPS)))
    assert got(rows, [("u3", 3), ("u3", 4), ("u39", 39)]) == [(3, None), None, (39, None)]
    assert backend.asked == []


def test_what_was_found_out_about_some_keys_is_not_taken_for_others(tmp_path):
    backend, left = resident(tmp_path)
    rows = opened(backend, Residence(left, tmp_path, ROOMY, range(GROUPS)))
    assert got(rows, [("u3", 3)]) == [(3, None)]
    put(rows, {("u4", 4): (9, None)})
    rows.flush()
    assert got(rows, [("u3", 3), ("u4", 4)]) == [(3, None), (9, None)]
    assert rows._resident is not None  # a wrong place would have been noticed, and cost the table
    assert stored(backend)["u4", 4] == (9, None)


def test_a_batch_of_many_of_the_keys_reads_them_all_and_keeps_them(tmp_path):
    backend, _ = resident(tmp_path)
    target = tmp_path / "next"
    target.mkdir()
    rows = opened(backend, Residence(None, target, ROOMY, range(GROUPS)))
    few = [(f"u{i}", i) for i in range(9)]
    assert got(rows, few) == [(i, None) for i in range(9)]
    assert len(backend.asked) == len(few)
    put(rows, {("u1", 1): (0, "pending"), ("u2", 2): None, ("new", 0): (5, None)})
    many = [(f"u{i}", i) for i in range(12)]
    assert got(rows, many) == [(0, None), (0, "pending"), None, *((i, None) for i in range(3, 12))]
    assert len(backend.asked) == len(few), "the rest was scanned"
    put(rows, {(f"u{i}", i): (i, "changed") for i in range(20, 24)})
    rows.barrier()
    again = opened(backend, Residence(target, tmp_path, ROOMY, range(GROUPS)))
    assert got(again, [("u39", 39), ("u2", 2), ("new", 0), ("u1", 1)]) == [(39, None), None, (5, None), (0, "pending")]
    assert len(backend.asked) == len(few)


def test_what_does_not_fit_is_not_kept_after_a_scan_either(tmp_path):
    backend, _ = resident(tmp_path)
    rows = opened(backend, Residence(None, tmp_path, 200, range(GROUPS)))
    many = [(f"u{i}", i) for i in range(30)]
    assert got(rows, many) == [(i, None) for i in range(30)]
    assert backend.asked
    assert rows._resident is None


@pytest.mark.parametrize("damage", ["flip", "cut", "note", "gone", "other schema"])
def test_a_resident_table_that_is_not_what_was_left_is_not_used(tmp_path, damage):
    backend, left = resident(tmp_path)
    table, note = left / f"resident-{VALUE_STATE}.arrow", left / f"resident-{VALUE_STATE}.json"
    content = bytearray(table.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        table.write_bytes(content)
    elif damage == "cut":
        os.truncate(table, len(content) // 2)
    elif damage == "note":
        note.write_text("{")
    elif damage == "gone":
        table.unlink()
    changed = StateSchema.build([("n", pa.int64(), False, 8), ("word", pa.string(), True, None)])
    schema = SCHEMA if damage != "other schema" else changed
    rows = RowStore(backend, schema, KEYS, VALUE_STATE, Residence(left, tmp_path, ROOMY, range(GROUPS)))
    rows.get(frame_of([]))
    assert rows._resident is None
    if schema is SCHEMA:
        assert got(rows, [("u3", 3), ("u3", 4)]) == [(3, None), None]
        assert len(backend.asked) == 2


def test_a_table_whose_columns_are_read_back_as_others_is_not_used(tmp_path):
    backend, left = resident(tmp_path)
    rows = opened(backend, Residence(left, tmp_path, ROOMY, range(GROUPS)))
    residence, names = Residence(left, tmp_path, ROOMY, range(GROUPS)), (GROUP, *KEYS.names)
    assert residence.load(str(VALUE_STATE), rows._shape, rows._empty, names) is not None
    other = rows._empty.with_columns(pl.col("n").cast(pl.Int32))
    assert residence.load(str(VALUE_STATE), rows._shape, other, names) is None


def test_a_disk_that_is_full_keeps_nothing_of_a_table(tmp_path):
    (tmp_path / f"resident-{VALUE_STATE}.arrow").symlink_to("/dev/full")
    rows = opened(MemoryBackend(), Residence(None, tmp_path, ROOMY, range(GROUPS), fresh=True))
    put(rows, {("u", 1): (1, None)})
    rows.barrier()
    assert not list(tmp_path.iterdir())


def test_a_large_table_of_which_little_changes_is_not_kept(tmp_path):
    backend, left = resident(tmp_path, 400)
    for touched, kept in ((24, False), (25, True)):
        target = tmp_path / str(touched)
        target.mkdir()
        rows = opened(backend, Residence(left, target, ROOMY, range(GROUPS)))
        put(rows, {(f"u{i}", i): (i, "changed") for i in range(touched)})
        rows.barrier()
        assert bool(list(target.iterdir())) is kept


def test_a_table_above_its_budget_is_given_up(tmp_path):
    backend = Counting()
    rows = opened(backend, Residence(None, tmp_path, 500, range(GROUPS), fresh=True))
    put(rows, {("u", 1): (1, None)})
    rows.flush()
    assert rows._resident is not None
    put(rows, {(f"u{i}", i): (i, "x" * 50) for i in range(40)})
    rows.barrier()
    assert rows._resident is None
    assert not list(tmp_path.iterdir())
    assert got(rows, [("u7", 7), ("u", 1)]) == [(7, "x" * 50), (1, None)]


def test_rows_survive_in_rocksdb(tmp_path):
    backend = RocksDBBackend(tmp_path / "db", 16)
    rows = opened(backend)
    put(rows, {("a", 1): (1, "one"), ("b", 2): (2, None)})
    put(rows, {("a", 1): None})
    rows.barrier()
    assert stored(backend) == {("b", 2): (2, None)}
    assert got(opened(backend), [("a", 1), ("b", 2)]) == [None, (2, None)]
    backend.close()


def test_keys_come_in_key_order_as_far_as_their_first_bytes_tell(tmp_path):
    words = ["", "a", "a\0", "ab", "abcdefgh", "abcdefghi", "abcdefgz", "b", "żółw"]
    backend = Counting()
    rows = opened(backend)
    put(rows, {(word, day): (1, None) for word in words for day in (2, -2)})
    rows.barrier()
    _, columns = decode_keys(backend.wrote[0], KEYS.types)
    assert backend.wrote[0] == sorted(backend.wrote[0], key=lambda key: key[:19])
    assert columns[0].to_pylist()


def test_two_keys_with_one_hash_cannot_live_in_a_table():
    first, two = pl.DataFrame({"k": [1, 2]}), pl.DataFrame({"k": [3]})
    with pytest.raises(CollisionError):
        HashedTable.of(np.array([5, 5], np.uint64), first, ["k"])
    table = HashedTable.of(np.array([5, 6], np.uint64), first, ["k"])
    with pytest.raises(CollisionError):
        table.find(np.array([6], np.uint64), two)
    with pytest.raises(CollisionError):
        table.merged(HashedTable.of(np.array([5], np.uint64), two, ["k"]))


def test_the_last_write_of_an_epoch_is_a_run_whose_keys_ascend_however_alike_they_begin(tmp_path):
    backend = Counting()
    rows = opened(backend)
    put(rows, {("the same twenty bytes" + end, day): (1, None) for end in ("c", "a\0", "b", "a") for day in (2, 1)})
    rows.barrier()
    assert isinstance(backend.last, SortedRun)
    assert backend.wrote == [sorted(backend.last.ascending)]
    assert len(set(backend.last.ascending)) == 8


def test_numbers_are_written_in_the_order_of_their_encoded_keys():
    keys = pa.schema([("paid", pa.bool_()), ("amount", pa.decimal128(25, 2)), ("day", pa.int32())])
    pick = random.Random(1)
    distinct = {(pick.random() < 0.5, pick.randrange(-3, 3) * 10**20, pick.randrange(-9, 9)) for _ in range(200)}
    paid, amount, day = zip(*distinct, strict=True)
    columns = [pa.array(paid), pa.array([Decimal(text) for text in amount], keys.types[1]), pa.array(day, pa.int32())]
    frame = pl.DataFrame([pl.Series(GROUP, key_groups(columns, GROUPS)), *map(pl.from_arrow, columns)])
    frame.columns = [GROUP, *keys.names]
    backend = Counting()
    rows = RowStore(backend, SCHEMA, keys, VALUE_STATE)
    rows.put(frame, fields_of([(1, None)] * len(frame)), np.ones(len(frame), bool))
    rows.barrier()
    assert backend.wrote == [sorted(backend.wrote[0])]
    assert len(set(backend.wrote[0])) == len(distinct)
