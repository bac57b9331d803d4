"""A Delta table as a source: the contract in both modes, writers of all kinds, and what an upstream may do to it."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, write_deltalake

from state_ops.errors import ConfigurationError, InputError, LostError, PipelineError
from state_ops.storage.storage import Storage
from tests.tools.sampling import long_tests, sampled
from weir import delta
from weir.connectors.delta_table import table_log
from weir.connectors.delta_table.source import DeltaTableSource
from weir.definition.source import Limits, Opening
from weir.testing import SourceContract, SourceSystem
from weir.testing.source_contract import LARGE, read

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
KEEP = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromTheFirst(DeltaTableSource):
    """Whose earliest place is the first version, so that all is read commit by commit."""

    def open(self, opening: Opening) -> Any:
        return beginning(DeltaTableSource.open(self, opening), lambda begin: begin({"version": 0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class FromASnapshot(DeltaTableSource):
    """Whose earliest place is the version that was there when it was asked first, as a checkpoint remembers it."""

    def open(self, opening: Opening) -> Any:
        note = Path(f"{self.path}.begins")

        def remembered(begin: Any) -> Any:
            if not note.exists():
                note.write_text(json.dumps(begin("earliest")))
            return json.loads(note.read_text())

        return beginning(DeltaTableSource.open(self, opening), remembered)


def beginning(connector: Any, earliest: Callable[[Any], Any]) -> Any:
    begin = connector.begin
    connector.begin = lambda start: earliest(begin) if start == "earliest" else begin(start)
    return connector


class DeltaSystem(SourceSystem):
    """A table to which rows are appended, two files a commit.

    kind: of the source. changes: it reads the change data feed. loses: rows are lost with their file ("vacuum") or with
    their entry of the log ("log").
    """

    cuts = False

    def __init__(self, root: Path, kind: Any = DeltaTableSource, changes: bool = False, loses: str = "vacuum") -> None:
        self.table, self._kind, self._changes, self._loses, self._count = root / "orders", kind, changes, loses, 0
        self.append(0)

    @property
    def source(self) -> DeltaTableSource:
        return self._kind(name="orders", path=str(self.table), event_time="at", changes=self._changes)

    def append(self, count: int) -> None:
        first, self._count = self._count, self._count + count
        for begins in range(first, first + count, 4) or [first]:
            numbers = range(begins, min(begins + 4, first + count))
            rows = {"id": list(numbers), "p": [n % 2 for n in numbers], "at": [NOON + timedelta(n) for n in numbers]}
            self.write(pa.table(rows, schema=self.schema()))

    def schema(self) -> pa.Schema:
        return pa.schema([("id", pa.int64()), ("p", pa.int32()), ("at", pa.timestamp("us", "UTC"))])

    def write(self, rows: pa.Table, **more: Any) -> None:
        write_deltalake(
            self.table, rows, mode="append", partition_by=["p"],
            configuration={"delta.enableChangeDataFeed": "true"}, post_commithook_properties=KEEP, **more,
        )  # fmt: skip

    def lose(self) -> set[int]:
        entries = sorted((self.table / "_delta_log").glob("*.json"))
        if self._loses == "log":
            DeltaTable(self.table).create_checkpoint()
            gone = self.rows(*range(1, len(entries) - 1))
            for entry in entries[:-1]:
                entry.unlink()
            return gone
        add = next(action["add"] for action in actions(self.table, 1) if "add" in action)
        gone = set(pq.read_table(self.table / add["path"])["id"].to_pylist())
        (self.table / add["path"]).unlink()
        return gone

    def rows(self, *versions: int) -> set[int]:
        adds = [
            action["add"]["path"] for version in versions for action in actions(self.table, version) if "add" in action
        ]
        return {id for path in adds for id in pq.ParquetFile(self.table / path).read()["id"].to_pylist()}

    def alter(self) -> None:
        path = next(action["add"]["path"] for action in actions(self.table, 1) if "add" in action)
        pq.write_table(pa.table({"id": list(range(100))}), self.table / path)


def actions(table: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (table / f"_delta_log/{version:020}.json").read_text().splitlines()]


KINDS = [
    (FromASnapshot, False, "vacuum"),
    (FromTheFirst, False, "log"),
    (FromTheFirst, True, "vacuum"),
]


@pytest.fixture(params=KINDS, ids=["snapshot", "commits", "changes"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> DeltaSystem:
    return DeltaSystem(tmp_path, *request.param)


@long_tests("test_a_part_is_the_same_in_another_process")
class TestDeltaTable(SourceContract):
    pass


def source(table: Path, **more: Any) -> DeltaTableSource:
    return replace(delta.table(str(table)), **more)


class Reader:
    """A source that is read on, every call by one connector."""

    def __init__(self, of: DeltaTableSource, start: Any = "earliest") -> None:
        self.connector = of.open(Opening("p", str, {}))
        self.position = self.connector.begin(start)
        self.lost: list[str] = []

    def rows(self, limits: Limits = LARGE) -> list[dict[str, Any]]:
        """What comes next, to the end."""
        rows = []
        while True:
            planned = self.connector.plan(self.position, limits)
            rows += [row for part in planned.parts for row in read(self.connector, part)[0]]
            self.connector.verify(planned.parts)
            self.position = planned.position
            self.lost += [lost.what for lost in planned.lost]
            if not planned.limited:
                return rows

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())


def append(table: Path, *ids: int, **more: Any) -> None:
    write_deltalake(table, pa.table({"id": pa.array(ids, pa.int64())}), mode="append", **more)


TYPED = pa.table(
    {
        "id": [1, 2, 3],
        "s": ["a/b c=1%20", "", None],
        "d": pa.array([date(2020, 1, 31), None, date(1969, 1, 1)]),
        "ts": pa.array([datetime(2020, 1, 1, 12, 0, 0, 123456), datetime(1900, 1, 1), None], pa.timestamp("us", "UTC")),
        "n": pa.array([datetime(2020, 1, 1, 12, 0, 0, 5), datetime(2020, 1, 1), None], pa.timestamp("us")),
        "dec": pa.array([Decimal("1.50"), Decimal("-2.00"), None], pa.decimal128(10, 2)),
        "b": [True, False, None],
        "f": [1.5, 2e30, None],
        "i": pa.array([1, -2, None], pa.int8()),
    }
)


@pytest.mark.parametrize("start", ["earliest", {"version": 0}], ids=["snapshot", "commits"])
def test_columns_of_partitions_have_the_tables_types(tmp_path: Path, start: Any):
    partitions = [name for name in TYPED.column_names if name != "id"]
    write_deltalake(tmp_path / "t", TYPED, partition_by=partitions)
    rows = sorted(Reader(source(tmp_path / "t"), start).rows(), key=lambda row: row["id"])
    expected = TYPED.to_pylist()
    expected[1]["s"] = None  # an empty text is null there
    assert rows == expected
    connector = source(tmp_path / "t").open(Opening("p", str, {}))
    (part, *_) = connector.plan(connector.begin(start), LARGE).parts
    assert next(connector.read(part)).rows.schema.equals(TYPED.schema)


def test_columns_that_a_table_gains_are_null_in_older_files(tmp_path: Path):
    table = tmp_path / "t"
    nested = pa.struct([("x", pa.int32())])
    write_deltalake(table, pa.table({"id": [1], "of": pa.array([{"x": 1}], nested)}))
    grown = pa.struct([("x", pa.int32()), ("y", pa.string())])
    later = pa.table({"id": [2], "of": pa.array([{"x": 2, "y": "b"}], grown), "more": [2.5]})
    write_deltalake(table, later, mode="append", schema_mode="merge")
    assert sorted(Reader(source(table)).rows(), key=lambda row: row["id"]) == [
        {"id": 1, "of": {"x": 1, "y": None}, "more": None},
        {"id": 2, "of": {"x": 2, "y": "b"}, "more": 2.5},
    ]
    assert Reader(source(table), {"version": 0}).rows() == [
        {"id": 1, "of": {"x": 1}},
        {"id": 2, "of": {"x": 2, "y": "b"}, "more": 2.5},
    ], "each version has its own columns"


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize(
    "hint", [b"", b"damaged", b'{"version":', b"{}", b"\xff", b'{"version":99,"size":1}', b"[]", None]
)
def test_a_damaged_last_checkpoint_is_read_past(tmp_path: Path, hint: bytes | None, cleaned: bool):
    table = tmp_path / "t"
    for number in range(3):
        append(table, number)
    DeltaTable(table).create_checkpoint()
    log = table / "_delta_log"
    for number in range(2) if cleaned else ():
        (log / f"{number:020}.json").unlink()
    last = log / "_last_checkpoint"
    last.unlink() if hint is None else last.write_bytes(hint)
    assert Reader(source(table)).ids() == [0, 1, 2]


def test_commits_that_change_no_row_are_passed_and_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = tmp_path / "t"
    append(table, 1)
    append(table, 2)
    reader = Reader(source(table), "latest")
    handle = DeltaTable(table)
    handle.optimize.compact()
    handle.alter.set_table_properties({"delta.logRetentionDuration": "interval 3 days"})
    for version in range(5):
        handle.create_write_transaction(
            [], "append", handle.schema(), commit_properties=CommitProperties(custom_metadata={"n": str(version)})
        )
    at = reader.position
    assert reader.rows() == [] and reader.position["version"] == DeltaTable(table).version() + 1
    reads: list[str] = []
    there = Storage.read_bytes
    monkeypatch.setattr(Storage, "read_bytes", lambda self, path: reads.append(path) or there(self, path))
    assert reader.connector.plan(at, LARGE).parts == () and len(reads) == 2, (
        "the last entry, and whether there is a next"
    )
    within = {**at, "version": at["version"] + 2}
    assert reader.connector.plan(at, LARGE, within).position == within, "a branch passes no more than its pipeline"
    append(table, 3)
    reader.position = at
    assert reader.ids() == [3]


def deleted(table: Path) -> None:
    DeltaTable(table).delete("id = 2")


def updated(table: Path) -> None:
    DeltaTable(table).update({"id": "id + 100"}, predicate="id = 2")


def overwritten(table: Path) -> None:
    write_deltalake(table, pa.table({"id": [7]}), mode="overwrite")


def restored(table: Path) -> None:
    DeltaTable(table).restore(0)


def merged(table: Path) -> None:
    merge = DeltaTable(table).merge(pa.table({"id": [2, 50]}), "s.id = t.id", source_alias="s", target_alias="t")
    merge.when_matched_update({"id": "s.id + 100"}).when_not_matched_insert_all().execute()


@pytest.mark.parametrize(
    ("change", "operation"),
    [(deleted, "DELETE"), (updated, "UPDATE"), (overwritten, "WRITE"), (restored, "RESTORE"), (merged, "MERGE")],
)
def test_what_is_no_append_is_named_and_can_be_passed(tmp_path: Path, change: Callable[[Path], None], operation: str):
    table = tmp_path / "t"
    append(table, 1, 2)
    append(table, 3)
    reader = Reader(source(table))
    append(table, 4)
    change(table)
    append(table, 5)
    planned = reader.connector.plan(reader.position, LARGE)
    assert len(planned.parts) == 3 and planned.limited and planned.ends == {"table": False}, "what came before is read"
    for _ in range(2):
        with pytest.raises(InputError, match=f"{operation} removed or restored rows") as refused:
            reader.connector.plan(planned.position, LARGE)
    assert not isinstance(refused.value, LostError)
    assert refused.value.where == f"source t, {table}, version 3" and '{"version": 4}' in refused.value.next
    assert reader.connector.lag(planned.position).is_estimate
    assert Reader(source(table), {"version": 4}).ids() == [5]


def test_a_restore_that_only_brings_rows_back_is_named_too(tmp_path: Path):
    table = tmp_path / "t"
    append(table, 1, 2)
    append(table, 3)
    DeltaTable(table).delete("id = 3")
    reader = Reader(source(table), "latest")
    DeltaTable(table).restore(1)
    with pytest.raises(InputError, match="RESTORE removed or restored rows"):
        reader.rows()


def test_another_table_in_its_place_is_named(tmp_path: Path):
    table = tmp_path / "t"
    for id in range(4):
        append(table, id)
    reader, restarted = Reader(source(table)), Reader(source(table))
    assert reader.ids() == [0, 1, 2, 3]
    parts = restarted.connector.plan(restarted.position, LARGE).parts
    copy = shutil.copytree(table, tmp_path / "copy")
    shutil.rmtree(table)
    with pytest.raises(InputError, match="no Delta table"):
        reader.rows()
    for length in (2, 7):  # shorter and longer than what was read
        shutil.rmtree(table, ignore_errors=True)
        for id in range(length):
            append(table, id)
        for of in (reader, restarted, Reader(source(table))):
            of.position = reader.position
            with pytest.raises(InputError, match="dropped and made anew") as refused:
                of.rows()
            assert "weir seek" in refused.value.next
        with pytest.raises(InputError):
            list(source(table).open(Opening("p", str, {})).read(parts[0]))
    assert reader.connector.begin("earliest")["version"] == 6, "it can be sought"
    shutil.rmtree(table)
    shutil.copytree(copy, table)
    for version in (2, 3):
        (table / f"_delta_log/{version:020}.json").unlink()
    with pytest.raises(InputError, match="newest one is 1: the table was brought back from a copy"):
        reader.rows()


@pytest.mark.parametrize("length", [6, 8, 11], ids=["fewer", "as many", "more"])
def test_versions_that_were_looked_ahead_at_are_forgotten_with_the_table_that_had_them(tmp_path: Path, length: int):
    """It is brought back from a copy of exactly the version that was followed, and grows otherwise."""
    table = tmp_path / "t"
    for id in range(5):
        append(table, id, post_commithook_properties=KEEP)
    copy = shutil.copytree(table, tmp_path / "copy")
    for id in range(5, 8):
        append(table, id, post_commithook_properties=KEEP)
    reader = Reader(source(table, on_lost="skip"), {"version": 0})
    reader.position = reader.connector.plan(reader.position, replace(LARGE, parts=4)).position
    shutil.rmtree(table)
    shutil.copytree(copy, table)
    for id in range(105, 100 + length):
        append(table, id, post_commithook_properties=KEEP)
    assert reader.ids() == [4, *range(105, 100 + length)] and not reader.lost


@pytest.mark.parametrize("is_old", [False, True], ids=["a position of now", "one of an earlier release"])
def test_a_table_that_was_brought_back_and_grew_past_what_was_read_is_named(tmp_path: Path, is_old: bool):
    """By who has followed it and by who starts anew; a position that says no digest goes on, as it did."""
    table = tmp_path / "t"
    for id in range(3):
        append(table, id)
    copy = shutil.copytree(table, tmp_path / "copy")
    reader = Reader(source(table), {"version": 0})
    for id in range(3, 5):
        append(table, id)
    assert reader.ids() == [0, 1, 2, 3, 4]
    assert reader.connector.plan(reader.position, LARGE).position == reader.position, "where nothing comes it stays"
    within = Reader(source(table))  # in the middle of a version's files
    within.position = within.connector.plan(within.position, replace(LARGE, parts=1)).position
    assert within.position["index"] == 1 and within.position["digest"]
    if is_old:
        reader.position, within.position = (
            {name: value for name, value in of.position.items() if name != "digest"} for of in (reader, within)
        )
    whole = shutil.copytree(table, tmp_path / "whole")
    shutil.rmtree(table)
    shutil.copytree(copy, table)
    for id in range(103, 107):
        append(table, id)
    behind_all = reader.position
    for position in (behind_all, within.position):
        for of in (reader, Reader(source(table))):
            of.position = position
            if is_old:
                of.connector.plan(position, LARGE)
                continue
            with pytest.raises(InputError, match="Version 4 is not the one that has been read") as refused:
                of.connector.plan(position, LARGE)
            assert "weir seek" in refused.value.next
    sought = Reader(source(table), {"version": 3})
    assert sought.ids() == [103, 104, 105, 106]
    shutil.rmtree(table)
    shutil.copytree(whole, table)
    append(table, 5)
    again = Reader(source(table))
    again.position = behind_all
    assert again.ids() == [5], "the newer one is there again"


def test_large_entries_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = tmp_path / "t"
    for id in range(12):
        append(table, id, post_commithook_properties=KEEP)
    size = min(len(entry.read_bytes()) for entry in (table / "_delta_log").glob("*.json"))
    looked, read_bytes = list[str](), Storage.read_bytes
    monkeypatch.setattr(Storage, "read_bytes", lambda of, path: looked.append(path) or read_bytes(of, path))
    for kept, most in ((64 * size, 12), (size - 1, 3)):  # with the one that was read last
        monkeypatch.setattr(table_log, "_KEPT_BYTES", kept)
        reader = Reader(source(table), {"version": 1})
        looked.clear()
        reader.connector.plan(reader.position, replace(LARGE, parts=1))
        assert len(set(looked)) == most


def test_an_entry_with_many_files_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = tmp_path / "t"
    for id in range(3):
        append(table, id, post_commithook_properties=KEEP)
    reader, parsed = Reader(source(table), {"version": 1}), list[int]()
    commit = table_log._commit
    monkeypatch.setattr(table_log, "_commit", lambda version, entry: parsed.append(version) or commit(version, entry))
    (table / f"_delta_log/{1:020}.json").write_text(
        "\n".join(json.dumps(action) for action in actions(table, 1) for _ in range(9 if "add" in action else 1))
    )
    for _ in range(9):
        reader.position = reader.connector.plan(reader.position, replace(LARGE, parts=1)).position
    assert reader.position["version"] == 2 and parsed.count(1) == 1


def test_a_table_that_is_replaced_at_a_version_is_named(tmp_path: Path):
    table = tmp_path / "t"
    append(table, 1)
    reader = Reader(source(table))
    reader.rows()
    DeltaTable.create(table, pa.schema([("id", pa.int64())]), mode="overwrite")
    append(table, 2)
    for of in (reader, Reader(source(table))):
        of.position = reader.position
        with pytest.raises(InputError, match=r"replaced by another one|dropped and made anew|removed or restored"):
            of.rows()


def changed(row: dict[str, Any]) -> tuple[Any, ...]:
    moment = row["_commit_timestamp"].replace(tzinfo=None)
    return row["_commit_version"], row["_change_type"], row["id"], str(row["p"]), moment


def test_changes_are_those_of_the_change_data_feed(tmp_path: Path):
    table = tmp_path / "t"
    rows = pa.table({"id": pa.array(range(12), pa.int64()), "p": pa.array([n % 3 for n in range(12)], pa.int32())})
    feed = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(table, rows, partition_by=["p"], configuration=feed)
    for number, change in enumerate((deleted, updated, merged)):
        change(table)
        write_deltalake(table, rows.slice(number, 1), mode="append")
    DeltaTable(table).optimize.compact()
    DeltaTable(table).delete("p = 1")
    write_deltalake(table, rows.slice(3, 4), mode="overwrite")
    expected = pa.table(DeltaTable(table).load_cdf(0).read_all()).to_pylist()
    reader = Reader(source(table, changes=True), {"version": 0})
    got = reader.rows()
    assert sorted(map(changed, got)) == sorted(map(changed, expected)) and len(got) > 30
    assert got == Reader(source(table, changes=True), {"version": 0}).rows(Limits(1, 1, 1)), "in one order"
    by_version = [row["_change_type"] for row in got if row["_commit_version"] == DeltaTable(table).version()]
    assert by_version == sorted(by_version), "what is gone goes before what is new"
    snapshot = Reader(source(table, changes=True)).rows()
    assert {row["_change_type"] for row in snapshot} == {"insert"}
    assert sorted(row["id"] for row in snapshot) == [3, 4, 5, 6]


def moved(table: Path) -> list[list[str]]:
    """A table in which a row moves to a partition of which another row has already made a file of changes; returns what
    each file of changes has, in the order of the log."""
    rows = pa.table({"id": pa.array(range(4), pa.int64()), "p": pa.array([0, 1, 2, 3], pa.int32())})
    write_deltalake(table, rows, partition_by=["p"], configuration={"delta.enableChangeDataFeed": "true"})
    new = pa.table({"id": pa.array(range(4), pa.int64()), "p": pa.array([3, 3, 3, 0], pa.int32())})
    merge = DeltaTable(table).merge(new, "s.id = t.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().execute()
    entry = (table / "_delta_log" / f"{1:020}.json").read_text().splitlines()
    files = [json.loads(line)["cdc"]["path"] for line in entry if "cdc" in line[:6]]
    return [pq.ParquetFile(table / file).read()["_change_type"].to_pylist() for file in files]


def test_what_a_version_takes_back_comes_before_what_is_new(tmp_path: Path):
    table = tmp_path / "t"
    files = moved(table)
    assert ["update_preimage"] in files[1:] and any("update_postimage" in kinds for kinds in files[:-1]), "mixed"
    reader = Reader(source(table, changes=True), {"version": 0, "snapshot": True})
    got = reader.rows(Limits(1, 1, 1))[4:]
    assert [row["_change_type"] for row in got] == ["update_preimage"] * 4 + ["update_postimage"] * 4
    assert sorted(row["id"] for row in got) == sorted([*range(4)] * 2)


def test_a_position_of_an_earlier_release_among_files_of_changes_is_read_on_as_it_was(tmp_path: Path):
    table = tmp_path / "t"
    files = moved(table)
    metadata = DeltaTable(table).metadata().id
    for index in range(1, len(files)):
        reader = Reader(source(table, changes=True), {"table": metadata, "version": 1, "index": index})
        rows = [row["_change_type"] for row in reader.rows()]
        assert rows == [kind for kinds in files[index:] for kind in kinds]
    halves = Reader(source(table, changes=True), {"table": metadata, "version": 1, "index": len(files), "halves": True})
    assert {row["_change_type"] for row in halves.rows()} == {"update_postimage"}


def test_changes_that_nobody_noted_are_named(tmp_path: Path):
    table = tmp_path / "t"
    append(table, 1, 2)
    reader = Reader(source(table, changes=True), {"version": 0})
    assert [row["id"] for row in reader.rows()] == [1, 2]
    deleted(table)
    with pytest.raises(InputError, match="DELETE changed rows, and the table did not note which") as refused:
        reader.rows()
    assert "delta.enableChangeDataFeed" in refused.value.next and "version 1" in refused.value.where
    DeltaTable(table).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    append(table, 3, 4)
    DeltaTable(table).delete("id = 4")
    reader = Reader(source(table, changes=True), {"version": 2})
    assert [(row["_change_type"], row["id"]) for row in reader.rows()] == [("insert", 3), ("insert", 4), ("delete", 4)]


def test_rows_of_a_table_with_such_columns_itself_are_refused(tmp_path: Path):
    write_deltalake(tmp_path / "t", pa.table({"_change_type": ["insert"]}))
    with pytest.raises(InputError, match="has a column _change_type itself"):
        Reader(source(tmp_path / "t", changes=True))
    assert Reader(source(tmp_path / "t")).rows() == [{"_change_type": "insert"}]


def test_versions_that_are_cleaned_away_are_named_or_left_out(tmp_path: Path):
    table = tmp_path / "t"
    for id in range(6):
        append(table, id)
    position = Reader(source(table), {"version": 1}).position
    snapshot = {**position, "version": 2, "snapshot": True}
    DeltaTable(table).create_checkpoint()
    append(table, 6)
    for version in range(5):
        (table / f"_delta_log/{version:020}.json").unlink()
    for at in (position, snapshot):
        reader = Reader(source(table))
        reader.position = at
        with pytest.raises(LostError, match=r"Versions \d to 4 cannot be read any more") as lost:
            reader.rows()
        assert 'on_lost="skip"' in lost.value.next
        reader = Reader(source(table, on_lost="skip"))
        reader.position = at
        assert reader.connector.lag(at).is_estimate
        assert reader.ids() == [5, 6] and len(reader.lost) == 1
    with pytest.raises(LostError, match="begins with version 5"):
        Reader(source(table), datetime(2020, 1, 1))


def test_versions_that_go_under_somebody_who_has_looked_ahead_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(table_log, "_KEPT_BYTES", 0)  # entries that were read are soon read again
    table = tmp_path / "t"
    for id in range(40):
        append(table, id, post_commithook_properties=KEEP)
    reader = Reader(source(table), {"version": 1})
    assert len(reader.connector.plan(reader.position, LARGE).parts) == 39
    DeltaTable(table).create_checkpoint()
    for version in range(39):
        (table / f"_delta_log/{version:020}.json").unlink()
    with pytest.raises(LostError, match="Versions 1 to 38 cannot be read any more"):
        reader.rows()


def test_it_begins_with_the_first_version_at_a_time(tmp_path: Path):
    table = tmp_path / "t"
    for id in range(5):
        append(table, id)
    times = [actions(table, version)[0]["commitInfo"]["timestamp"] for version in range(5)]
    start = datetime.fromtimestamp(times[3] / 1000, UTC)
    first = times.index(times[3])
    assert Reader(source(table), start).ids() == list(range(first, 5))
    assert Reader(source(table), start.replace(tzinfo=None)).ids() == list(range(first, 5))


@pytest.mark.parametrize(
    "start", [{"version": -1}, {"version": "1"}, {"index": 0}, {"version": 0, "table": "x"}, "noon"]
)
def test_places_that_are_none_are_refused(tmp_path: Path, start: Any):
    append(tmp_path / "t", 1)
    with pytest.raises(
        PipelineError if start == "noon" else ConfigurationError,
        match="no place to begin" if start == "noon" else "no position",
    ):
        Reader(source(tmp_path / "t"), start)


def test_what_is_no_table_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "file.parquet")
    for name in ("nothing", "empty", "file.parquet"):
        with pytest.raises(InputError, match="There is no Delta table") as refused:
            Reader(source(tmp_path / name))
        assert str(tmp_path / name) in refused.value.where
    for path in ("/", "orders", "s3://bucket", "s3://bucket/"):
        with pytest.raises(ConfigurationError, match="below a directory"):
            Reader(delta.table(path, name="t"))
    append(tmp_path / "t", 1)
    with pytest.raises(InputError, match="event time at is no timestamp of the table"):
        Reader(source(tmp_path / "t", event_time="at"))
    with pytest.raises(InputError, match="event time id is no timestamp of the table"):
        Reader(source(tmp_path / "t", event_time="id"))
    Reader(source(tmp_path / "t", event_time="_commit_timestamp", changes=True))


def edited(table: Path, version: int, edit: Callable[[dict[str, Any]], None]) -> None:
    lines = actions(table, version)
    for line in lines:
        edit(line)
    (table / f"_delta_log/{version:020}.json").write_text("\n".join(map(json.dumps, lines)))


def feature(line: dict[str, Any]) -> None:
    if "protocol" in line:
        line["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["variantType"],
                            "writerFeatures": ["variantType"]}  # fmt: skip


def mapped(line: dict[str, Any]) -> None:
    if "protocol" in line:
        line["protocol"] |= {"minReaderVersion": 2, "minWriterVersion": 5}
    if "metaData" in line:
        line["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"


def cloned(line: dict[str, Any]) -> None:
    if "add" in line:
        line["add"]["path"] = "file:///elsewhere/part.parquet"


def escaping(line: dict[str, Any]) -> None:
    if "add" in line:
        line["add"]["path"] = "../other/part.parquet"


def damaged(line: dict[str, Any]) -> None:
    line.pop("add", None)
    line["add"] = {"path": 3}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (feature, "variantType"),
        (mapped, "columns are mapped"),
        (cloned, "lies elsewhere"),
        (escaping, "lies elsewhere"),
        (damaged, "damaged"),
    ],
)
def test_what_it_cannot_read_is_refused_by_name(tmp_path: Path, edit: Callable[..., None], reason: str):
    table = tmp_path / "t"
    append(table, 1)
    reader = Reader(source(table))
    assert reader.ids() == [1]
    append(table, 2)
    if edit in (feature, mapped):  # as of a table that is altered while it is read
        lines = [action for action in actions(table, 0) if "protocol" in action or "metaData" in action]
        lines += actions(table, 1)
        (table / f"_delta_log/{1:020}.json").write_text("\n".join(map(json.dumps, lines)))
    edited(table, 1, edit)
    with pytest.raises(InputError, match=reason):
        reader.rows()


def test_files_of_other_makers(tmp_path: Path):
    """No statistics, no commitInfo, files without a row, and a file that is none."""
    table = tmp_path / "t"
    append(table, 1)
    append(table, 2)
    edited(table, 1, lambda line: line.get("add", {}).pop("stats", None))
    (table / f"_delta_log/{1:020}.json").write_text(
        "\n".join(json.dumps(action) for action in actions(table, 1) if "commitInfo" not in action) + "\n"
    )
    reader = Reader(source(table, changes=True), {"version": 0})
    assert reader.connector.lag(reader.position).is_estimate and reader.connector.lag(reader.position).newest
    assert [row["_commit_timestamp"].year > 2000 for row in reader.rows()] == [True, True]
    path = next(action["add"]["path"] for action in actions(table, 1) if "add" in action)
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), table / path)
    edited(table, 1, lambda line: "add" in line and line["add"].update(size=(table / path).stat().st_size))
    assert [batch.rows.num_rows for batch in batches(source(table), 1)] == [0]
    (table / path).write_bytes(b"x" * 100)
    edited(table, 1, lambda line: "add" in line and line["add"].update(size=100))
    with pytest.raises(InputError, match="cannot be read"):
        batches(source(table), 1)


def batches(of: DeltaTableSource, version: int) -> list[Any]:
    connector = of.open(Opening("p", str, {}))
    (part,) = connector.plan(connector.begin({"version": version}), LARGE).parts
    return list(connector.read(part))


def test_days_that_an_old_spark_has_counted_by_the_julian_calendar(tmp_path: Path):
    table = tmp_path / "t"
    days = pa.table({"day": pa.array([date(1500, 1, 10), date(2020, 1, 1), None])})
    write_deltalake(table, days)
    path = next(action["add"]["path"] for action in actions(table, 0) if "add" in action)
    with pq.ParquetWriter(table / path, days.schema, store_schema=False) as writer:
        writer.write_table(days)
        writer.add_key_value_metadata({"org.apache.spark.version": "2.4.8"})
    edited(table, 0, lambda line: "add" in line and line["add"].update(size=(table / path).stat().st_size))
    assert [row["day"] for row in Reader(source(table)).rows()] == [date(1500, 1, 1), date(2020, 1, 1), None]


class History:
    """What may become of a table of numbers, by chance."""

    def __init__(self, table: Path, seed: int) -> None:
        self.table, self.chance, self._next = table, random.Random(seed), 0
        feed = {"delta.enableChangeDataFeed": "true"}
        write_deltalake(table, self.rows(5), partition_by=["p"], configuration=feed)

    def rows(self, count: int) -> pa.Table:
        ids = range(self._next, self._next + count)
        self._next += count
        return pa.table({"id": pa.array(ids, pa.int64()), "p": pa.array([id % 3 for id in ids], pa.int32())})

    def step(self) -> None:
        table, n = DeltaTable(self.table), self.chance.randint(2, 5)
        match self.chance.choice("aaaadumwpocr"):
            case "a":
                write_deltalake(self.table, self.rows(n), mode="append")
            case "d":
                table.delete(f"id % {n} = 0")
            case "u":
                table.update({"id": "id + 1000"}, predicate=f"id % {n} = 1")
            case "m":
                merge = table.merge(self.rows(n), f"s.id % {n} = t.id % 7", source_alias="s", target_alias="t")
                merge.when_not_matched_insert_all().execute()
            case "w":
                write_deltalake(self.table, self.rows(n), mode="overwrite")
            case "p":
                write_deltalake(
                    self.table,
                    pa.table({"id": [self._next], "p": pa.array([1], pa.int32())}),
                    mode="overwrite",
                    predicate="p = 1",
                )
            case "o":
                table.optimize.compact()
            case "c":
                table.create_checkpoint()
            case "r" if table.version() > 0:
                table.restore(self.chance.randint(max(0, table.version() - 3), table.version() - 1))


@pytest.mark.parametrize("seed", sampled(range(40), keep=4))
def test_changes_bring_a_copy_from_any_version_to_the_newest(tmp_path: Path, seed: int):
    history = History(tmp_path / "t", seed)
    for _ in range(history.chance.randint(0, 4)):
        history.step()
    reader = Reader(source(history.table, changes=True))
    copy: Counter[tuple[int, int]] = Counter()
    limits = Limits(history.chance.choice([1, 3, 100]), 1 << 30, 1 << 40)
    for _ in range(6):
        for row in reader.rows(limits):
            key, sign = (row["id"], row["p"]), -1 if row["_change_type"] in ("delete", "update_preimage") else 1
            copy[key] += sign
            assert copy[key] >= 0, "nothing goes that has not come"
        there = DeltaTable(history.table).to_pyarrow_table()
        assert +copy == Counter(zip(there["id"].to_pylist(), there["p"].to_pylist(), strict=True))
        for _ in range(history.chance.randint(1, 3)):
            history.step()
        if history.chance.random() < 0.3:
            reader.connector = source(history.table, changes=True).open(Opening("p", str, {}))


@pytest.mark.parametrize("changes", [False, True])
def test_files_that_were_vacuumed_are_named_or_left_out(tmp_path: Path, changes: bool):
    table = tmp_path / "t"
    for ids in ((1, 2), (3,), (4,)):
        append(table, *ids, configuration={"delta.enableChangeDataFeed": "true"})
    DeltaTable(table).optimize.compact()
    DeltaTable(table).delete("id = 2")
    append(table, 5)
    start = {"version": 0}
    DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(LostError, match="was vacuumed") as lost:
        Reader(source(table, changes=changes), start).rows()
    assert "version 0" in lost.value.where
    reader = Reader(source(table, changes=changes, on_lost="skip"), start)
    if not changes:
        with pytest.raises(InputError, match="not only added to: DELETE"):
            reader.rows()
        assert len(reader.lost) == 3, "what is lost is said first"
        return
    rows = [(row["_change_type"], row["id"]) for row in reader.rows()]
    assert rows[-1] == ("insert", 5) and set(rows[:-1]) <= {("delete", 2)}
    assert len(reader.lost) == 3 + (len(rows) == 1)
