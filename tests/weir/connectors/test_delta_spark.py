"""Tables that Spark has written, with what Spark's writers do beyond delta-rs', and its change data feed beside ours."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from state_ops.errors import InputError
from tests.weir.connectors.test_delta_source import Reader, changed, source
from weir.connectors.delta_table import data_file
from weir.connectors.lookups.lookup_table import LookupTable

pytestmark = pytest.mark.long
FEED = "'delta.enableChangeDataFeed'='true'"


class Tables:
    """Tables below a directory, made by SQL in which {t} is the table."""

    def __init__(self, spark: Any, root: Path) -> None:
        self.spark, self.root = spark, root

    def make(self, name: str, columns: str, *statements: str, properties: str = "", partition: str = "") -> Path:
        also = f"TBLPROPERTIES ({properties})" if properties else ""
        self.run(name, f"CREATE TABLE {{t}} ({columns}) USING delta {partition} {also}", *statements)
        return self.root / name

    def run(self, name: str, *statements: str) -> None:
        for statement in statements:
            self.spark.sql(statement.replace("{t}", f"delta.`{self.root / name}`"))


@pytest.fixture
def tables(spark: Any, tmp_path: Path) -> Tables:
    spark.conf.set("spark.databricks.delta.properties.defaults.checkpointInterval", "3")
    return Tables(spark, tmp_path)


def test_changes_are_those_of_sparks_feed(tables: Tables):
    merge = "MERGE INTO {t} t USING (SELECT id, 'm' s, CAST(id % 2 AS INT) p FROM range(8, 14)) u ON t.id = u.id"
    table = tables.make(
        "feed", "id BIGINT, s STRING, p INT",
        "INSERT INTO {t} SELECT id, 'x', CAST(id % 2 AS INT) FROM range(10)",
        "UPDATE {t} SET s = 'u' WHERE id = 3",
        f"{merge} WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
        "OPTIMIZE {t}",
        "DELETE FROM {t} WHERE p = 0",
        "ALTER TABLE {t} ADD COLUMN more DOUBLE",
        "INSERT INTO {t} VALUES (50, 'later', 1, 0.5)",
        "INSERT OVERWRITE {t} VALUES (77, 'o', 1, 1.5)",
        "RESTORE TABLE {t} TO VERSION AS OF 7",
        properties=FEED, partition="PARTITIONED BY (p)",
    )  # fmt: skip
    feed = tables.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    expected = [row.asDict() for row in feed.load(str(table)).collect()]
    got = Reader(source(table, changes=True), {"version": 0}).rows()
    assert sorted(changed(row)[:4] for row in got) == sorted(changed(row)[:4] for row in expected)
    assert len(got) > 40
    times = {row["_commit_version"]: row["_commit_timestamp"] for row in expected}
    for row in got:  # Spark goes by the file's time, which comes a moment later
        assert abs(row["_commit_timestamp"].timestamp() - times[row["_commit_version"]].timestamp()) < 5


def test_values_of_partitions(tables: Tables):
    columns = "id BIGINT, s STRING, d DATE, ts TIMESTAMP, n TIMESTAMP_NTZ, dec DECIMAL(10, 2), b BOOLEAN, f DOUBLE"
    table = tables.make(
        "parts", columns,
        "INSERT INTO {t} VALUES (1, 'a/b c%20=ü', DATE'2020-01-01', TIMESTAMP'2020-01-01 12:00:00.123456', "
        "TIMESTAMP_NTZ'2020-01-01 12:00:00.5', 1.5, true, 1e300), (2, '', null, null, null, null, null, null)",
        partition="PARTITIONED BY (s, d, ts, n, dec, b, f)",
    )  # fmt: skip
    for start in ("earliest", {"version": 0}):
        first, second = sorted(Reader(source(table), start).rows(), key=lambda row: row["id"])
        assert first.pop("ts").replace(tzinfo=None) == datetime(2020, 1, 1, 12, 0, 0, 123456)
        assert first == {
            "id": 1, "s": "a/b c%20=ü", "d": date(2020, 1, 1), "n": datetime(2020, 1, 1, 12, 0, 0, 500000),
            "dec": Decimal("1.50"), "b": True, "f": 1e300,
        }  # fmt: skip
        assert [value for value in second.values() if value is not None] == [2]


def test_widened_types_checkpoints_of_all_kinds_and_times_in_commits(tables: Tables):
    table = tables.make(
        "wide", "id INT, f FLOAT",
        "INSERT INTO {t} VALUES (1, 1.5)",
        "ALTER TABLE {t} CHANGE COLUMN id TYPE BIGINT",
        *(f"INSERT INTO {{t}} VALUES ({5_000_000_000 + n}, {n}.5)" for n in range(5)),
        properties="'delta.enableTypeWidening'='true', 'delta.checkpointPolicy'='v2', "
        "'delta.enableInCommitTimestamps'='true'",
    )  # fmt: skip
    everything = [1, *(5_000_000_000 + n for n in range(5))]
    assert Reader(source(table)).ids() == everything == Reader(source(table), {"version": 0}).ids()
    logs = table / "_delta_log"
    assert list(logs.glob("0*.checkpoint.*-*")), "they have names of their own"
    first = min(int(path.name[:20]) for path in logs.glob("0*.checkpoint.*"))
    for version in range(first):
        (logs / f"{version:020}.json").unlink()
    reader = Reader(source(table, on_lost="skip"))
    reader.position = {"table": reader.position["table"], "version": 0, "index": 0}
    assert reader.ids() == everything[first - 2 :] and len(reader.lost) == 1


def test_rows_that_deletion_vectors_leave_out_are_not_looked_up(tables: Tables, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_file, "_ROWS", 7)
    table = tables.make(
        "vectors", "id BIGINT, p STRING",
        "INSERT INTO {t} SELECT id, concat('a b', id % 2) FROM range(0, 100, 1, 1)",
        "DELETE FROM {t} WHERE id % 10 = 3",
        "DELETE FROM {t} WHERE id = 98",
        "INSERT INTO {t} VALUES (1000, null)",
        properties="'delta.enableDeletionVectors'='true'", partition="PARTITIONED BY (p)",
    )  # fmt: skip
    looked_up = LookupTable(str(table), "lookup named", None)
    newest = looked_up.newest()
    rows = [row["id"] for part in looked_up.rows(newest, newest.columns) for row in part.to_pylist()]
    assert sorted(rows) == [*(id for id in range(100) if id % 10 != 3 and id != 98), 1000]
    first = replace(newest, number=1, digest=None)
    assert sum(part.num_rows for part in looked_up.rows(first, newest.columns)) == 100


def test_deletion_vectors_and_mapped_columns_are_refused(tables: Tables):
    table = tables.make(
        "vectors", "id BIGINT",
        "INSERT INTO {t} SELECT id FROM range(0, 100, 1, 1)",
        "DELETE FROM {t} WHERE id % 10 = 3",
        "INSERT INTO {t} VALUES (1000)",
        properties=f"'delta.enableDeletionVectors'='true', {FEED}",
    )  # fmt: skip
    for start, changes in (("earliest", False), ("earliest", True), ({"version": 2}, True)):
        with pytest.raises(InputError, match="deletion vectors"):
            Reader(source(table, changes=changes), start).rows()
    with pytest.raises(InputError, match="not only added to: DELETE"):
        Reader(source(table), {"version": 2}).rows()
    assert Reader(source(table), {"version": 3}).ids() == [1000]
    tables.run("vectors", "REORG TABLE {t} APPLY (PURGE)")
    assert len(Reader(source(table)).ids()) == 91
    table = tables.make("mapped", "id BIGINT", properties="'delta.columnMapping.mode'='name'")
    with pytest.raises(InputError, match="columns are mapped"):
        Reader(source(table))
