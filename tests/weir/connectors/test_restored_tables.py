"""A Delta table that Weir reads and somebody restores: its rows are exact, or an error names the version, whatever is
appended and vacuumed afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import InputError, LostError
from tests.weir.connectors.test_delta_source import Reader, source
from weir.connectors.lookups.lookup_table import LookupTable, Version
from weir.definition.source import Limits

ONE_FILE = Limits(1, 1 << 30, 1 << 40)


def grown(table: Path, *ids: int, feed: bool = True) -> None:
    new = {"delta.enableChangeDataFeed": "true"} if feed and not table.exists() else None
    for id in ids:
        write_deltalake(table, pa.table({"id": [id, id + 100]}), mode="append", configuration=new)


def vacuum(table: Path) -> None:
    DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def ids(table: Path) -> Counter[int]:
    return Counter(DeltaTable(table).to_pyarrow_table()["id"].to_pylist())


def net(rows: list[dict[str, object]]) -> Counter[object]:
    count: Counter[object] = Counter()
    for row in rows:
        count[row["id"]] += -1 if row["_change_type"] in ("delete", "update_preimage") else 1
    return +count


@pytest.mark.parametrize("to", [0, 1, 2], ids=lambda to: f"to {to}")
@pytest.mark.parametrize("read", [0, 2, 4], ids=lambda read: f"{read} files read")
@pytest.mark.parametrize("feed", [False, True], ids=["no feed", "feed"])
def test_changes_of_a_restore_bring_a_copy_to_the_newest_version(tmp_path: Path, to: int, read: int, feed: bool):
    """The restore is to before, at or behind the last version that was read."""
    table = tmp_path / "t"
    grown(table, 1, 2, 3, 4, feed=feed)
    reader = Reader(source(table, changes=True), {"version": 0})
    rows = []
    for _ in range(read):
        planned = reader.connector.plan(reader.position, ONE_FILE)
        rows += [row for part in planned.parts for row in rows_of(reader, part)]
        reader.position = planned.position
    DeltaTable(table).restore(to)
    grown(table, 5)
    rows += reader.rows()
    assert net(rows) == ids(table)
    DeltaTable(table).restore(3)
    grown(table, 6)
    vacuum(table)
    # Without a feed nobody has noted which rows a restore has exchanged; with one, what is gone is told by its files.
    with pytest.raises(InputError, match="vacuumed" if feed else "RESTORE changed rows") as refused:
        reader.rows()
    assert isinstance(refused.value, LostError) == feed


def rows_of(reader: Reader, part) -> list[dict[str, object]]:
    return [row for batch in reader.connector.read(part) for row in batch.rows.to_pylist()]


@pytest.mark.parametrize("read", [0, 2, 4], ids=lambda read: f"{read} files read")
@pytest.mark.parametrize("vacuumed", [False, True], ids=["", "vacuumed"])
def test_appends_stop_at_a_restore_and_go_on_behind_it(tmp_path: Path, read: int, vacuumed: bool):
    table = tmp_path / "t"
    grown(table, 1, 2, 3, 4)
    reader = Reader(source(table), {"version": 0})
    for _ in range(read):
        reader.position = reader.connector.plan(reader.position, ONE_FILE).position
    DeltaTable(table).restore(1)
    grown(table, 5)
    if vacuumed:
        vacuum(table)
    for _ in range(2):
        try:
            planned = reader.connector.plan(reader.position, Limits(100, 1 << 30, 1 << 40))
        except InputError as error:
            assert "RESTORE removed or restored rows" in error.what and '{"version": 5}' in error.next
            break
        assert all(part.place["version"] < 4 for part in planned.parts), "what came before it is read first"
        if vacuumed and read < 4:
            with pytest.raises(LostError, match="vacuumed"):
                reader.connector.verify(planned.parts)
        reader.position = planned.position
    else:
        pytest.fail("the restore was passed in silence")
    assert Reader(source(table), {"version": 5}).ids() == [5, 105]


def test_a_looked_up_table_is_joined_as_of_its_version_before_and_after_a_restore(tmp_path: Path):
    table = tmp_path / "t"
    grown(table, 1, 2, 3)
    looked_up = LookupTable(str(table), "stage s", None)
    before = looked_up.newest()
    DeltaTable(table).restore(0)
    after = looked_up.newest()
    assert (before.number, after.number) == (2, 3)
    assert found(looked_up, before) == [1, 2, 3, 101, 102, 103] and found(looked_up, after) == [1, 101]
    grown(table, 4)
    newest = looked_up.newest()
    assert found(looked_up, newest) == [1, 4, 101, 104]
    again = Version.from_json(before.to_json())
    assert looked_up.missing(again) is None
    vacuum(table)
    assert looked_up.missing(again) == "2 of its 3 files are gone, by a vacuum"
    with pytest.raises(LostError, match="vacuumed"):
        found(looked_up, again)
    assert found(looked_up, newest) == [1, 4, 101, 104] and found(looked_up, after) == [1, 101]


def found(table: LookupTable, version: Version) -> list[int]:
    return sorted(id for rows in table.rows(version, version.columns) for id in rows["id"].to_pylist())
