"""Publishing into real Delta tables: exactly once, in the chain's order, or an error that says what happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.schema import PrimitiveType

from state_ops.errors import DamageError, PipelineError
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from weir.connectors.delta import append

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64())])
APP = "weir/p/main"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def storage(tmp_path):
    storage = Storage(str(tmp_path / "p"))
    append.ensure(storage, "out", SCHEMA)
    return storage


def staged(storage: Storage, checkpoint: int, keys: list[str], attempt: str = "a") -> StateFile:
    path = f"tables/out/data/g1-e{checkpoint}/0-{attempt}.parquet"
    data = pa.BufferOutputStream()
    pq.write_table(pa.table({"key": keys, "n": [1] * len(keys)}, schema=SCHEMA), data)
    storage.put_bytes(path, data.getvalue())
    size = storage.size(path)
    assert size is not None
    return StateFile("stage", 0, OUTPUT, "main", path, size, "", True, attempt, None, "out", len(keys))  # type: ignore[arg-type]


def longer() -> bytes:
    """What `staged` writes for one key, with more in its footer."""
    data = pa.BufferOutputStream()
    pq.write_table(pa.table({"key": ["a"], "n": [1]}, schema=SCHEMA.with_metadata({"more": "x" * 100})), data)
    return data.getvalue().to_pybytes()


def garbled(size: int) -> bytes:
    """A file that ends like Parquet, and its footer is none."""
    return b"x" * (size - 8) + (16).to_bytes(4, "little") + b"PAR1"


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(
        id=number, parent_id=None, kind="checkpoint", generation=1, commit_id=f"c{number}", triggered_at=NOW, completed_at=NOW,
        epoch_now=NOW, trigger="manual", reason="", offsets={}, slice={}, watermarks={}, operators={}, sinks={}, inputs={},
        ms={}, totals={}, files=1, bytes_total=0, bytes_new=0,
    )  # type: ignore[arg-type]  # fmt: skip


def keys(storage: Storage) -> list[str]:
    files = DeltaTable(storage.full("tables/out")).file_uris()
    return sorted(key for file in files for key in pq.read_table(file, use_threads=False)["key"].to_pylist())


def test_publishing_twice_is_publishing_once(storage):
    file = staged(storage, 1, ["a", "b"])
    first = append.publish(storage, APP, "out", checkpoint(1), None, [file])
    again = append.publish(storage, APP, "out", checkpoint(1), None, [file])
    assert keys(storage) == ["a", "b"]
    assert (first.delta_version, first.rows) == (again.delta_version, again.rows) == (1, 2)


def test_a_table_that_is_behind_the_chain_is_damage(storage):
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
    with pytest.raises(DamageError, match="last published checkpoint is 1, but the registry says 2"):
        append.publish(storage, APP, "out", checkpoint(3), 2, [staged(storage, 3, ["c"])])
    assert keys(storage) == ["a"]


def test_a_table_that_is_gone_is_damage(storage):
    file = staged(storage, 1, ["a"])
    storage.delete_tree("tables/out/_delta_log")
    with pytest.raises(DamageError, match="the table is gone"):
        append.publish(storage, APP, "out", checkpoint(1), None, [file])


def test_somebody_elses_commit_in_between_is_no_obstacle_and_no_duplicate(storage, monkeypatch):
    file = staged(storage, 1, ["a"])
    real, met = append.fenced_table.commit, []

    def overtaken(handle, *args, **kwargs):
        if not met:
            met.append(True)
            properties = CommitProperties(app_transactions=[Transaction(f"{APP}/out", 0)])
            write_deltalake(handle.table_uri, pa.table({"key": ["x"], "n": [0]}, schema=SCHEMA), mode="append", commit_properties=properties)  # fmt: skip
        real(handle, *args, **kwargs)

    monkeypatch.setattr(append.fenced_table, "commit", overtaken)
    with pytest.raises(DamageError, match="last published checkpoint is 0"):
        append.publish(storage, APP, "out", checkpoint(1), None, [file])
    assert keys(storage) == ["x"]


def test_the_version_that_made_the_rows_visible_is_recorded_whoever_else_commits(storage, monkeypatch):
    first = append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
    real = append.fenced_table.commit

    def around(handle, *args, **kwargs):
        foreign = pa.table({"key": ["x"], "n": [0]}, schema=SCHEMA)
        write_deltalake(handle.table_uri, foreign, mode="append")
        real(handle, *args, **kwargs)
        write_deltalake(handle.table_uri, foreign, mode="append")

    monkeypatch.setattr(append.fenced_table, "commit", around)
    two = append.publish(storage, APP, "out", checkpoint(2), 1, [staged(storage, 2, ["b"])])
    assert (first.delta_version, two.delta_version) == (1, 3)
    assert DeltaTable(storage.full("tables/out")).version() == 4
    assert append.publish(storage, APP, "out", checkpoint(2), 1, []).delta_version == 3


def test_delta_checkpoints_of_a_sink_come_as_often_as_its_property_says(storage):
    DeltaTable(storage.full("tables/out")).alter.set_table_properties({"delta.checkpointInterval": "5"})
    for id in range(1, 13):
        append.publish(storage, APP, "out", checkpoint(id), id - 1 or None, [staged(storage, id, [str(id)])])
    log = [file.path.rpartition("/")[2] for file in storage.list("tables/out/_delta_log")]
    versions = sorted(int(name[:20]) for name in log if name.endswith(".checkpoint.parquet"))
    assert len(versions) == 2 and versions[1] - versions[0] == 5
    assert sum(name.endswith(".json") for name in log) == 14, "a month of the log is the readers' to travel in"


# -- a table as this process has left it


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Tables that were opened through delta-rs."""
    seen, real = [], append.fenced_table.open_table

    def opening(storage, path, version=None):
        seen.append(path)
        return real(storage, path, version)

    monkeypatch.setattr(append.fenced_table, "open_table", opening)
    return seen


def test_a_table_that_is_as_it_was_left_is_not_opened_again(storage, opened):
    left: dict[str, append.PublishedTable] = {}
    publications = [
        append.publish(storage, APP, "out", checkpoint(id), id - 1 or None, [staged(storage, id, [str(id)])], left)
        for id in range(1, 5)
    ]
    assert opened == ["tables/out"]
    assert [publication.delta_version for publication in publications] == [1, 2, 3, 4]
    assert keys(storage) == ["1", "2", "3", "4"]
    assert append.publish(storage, APP, "out", checkpoint(3), 2, []).delta_version == 3, "its history says which it was"
    assert append.fits(left["out"], SCHEMA)
    assert opened == ["tables/out"] * 2
    write_deltalake(storage.full("tables/out"), pa.table({"key": ["5"], "n": [0]}, schema=SCHEMA), mode="append")
    assert keys(storage) == ["1", "2", "3", "4", "5"], "delta-rs goes on with entries that Weir has put"


def test_a_table_that_somebody_else_has_committed_to_is_opened_again(storage, opened):
    left: dict[str, append.PublishedTable] = {}
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])], left)
    write_deltalake(storage.full("tables/out"), pa.table({"key": ["x"], "n": [0]}, schema=SCHEMA), mode="append")
    assert append.publish(storage, APP, "out", checkpoint(2), 1, [staged(storage, 2, ["b"])], left).delta_version == 3
    assert opened == ["tables/out"] * 2
    assert append.publish(storage, APP, "out", checkpoint(3), 2, [staged(storage, 3, ["c"])], left).delta_version == 4
    assert opened == ["tables/out"] * 2
    assert keys(storage) == ["a", "b", "c", "x"]


def test_what_another_process_has_published_already_is_published_once(storage):
    left: dict[str, append.PublishedTable] = {}
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])], left)
    file = staged(storage, 2, ["b"])
    append.publish(storage, APP, "out", checkpoint(2), 1, [file])  # a successor, which took this one for dead
    assert append.publish(storage, APP, "out", checkpoint(2), 1, [file], left).delta_version == 2
    assert keys(storage) == ["a", "b"]


def test_a_table_that_was_made_anew_gets_no_entry_behind_a_gap(storage):
    left: dict[str, append.PublishedTable] = {}
    for id in (1, 2):
        append.publish(storage, APP, "out", checkpoint(id), id - 1 or None, [staged(storage, id, ["a"])], left)
    storage.delete_tree("tables/out/_delta_log")
    assert not append.fits(left["out"], SCHEMA)
    append.ensure(storage, "out", SCHEMA)
    with pytest.raises(DamageError, match="last published checkpoint is None, but the registry says 2"):
        append.publish(storage, APP, "out", checkpoint(3), 2, [staged(storage, 3, ["b"])], left)
    assert keys(storage) == []


def test_delta_checkpoints_of_a_sink_that_is_put_to_come_as_often(storage):
    DeltaTable(storage.full("tables/out")).alter.set_table_properties({"delta.checkpointInterval": "5"})
    left: dict[str, append.PublishedTable] = {}
    for id in range(1, 13):
        append.publish(storage, APP, "out", checkpoint(id), id - 1 or None, [staged(storage, id, [str(id)])], left)
    log = [file.path.rpartition("/")[2] for file in storage.list("tables/out/_delta_log")]
    assert sum(name.endswith(".checkpoint.parquet") for name in log) == 2
    assert keys(storage) == sorted(map(str, range(1, 13)))


def test_columns_that_somebody_has_added_since_are_seen(storage):
    left: dict[str, append.PublishedTable] = {}
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])], left)
    DeltaTable(storage.full("tables/out")).alter.add_columns([Field("more", PrimitiveType("long"))])
    assert not append.fits(left["out"], SCHEMA)
    with pytest.raises(PipelineError, match="more is gone"):
        append.ensure(storage, "out", SCHEMA)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": ["x"], "n": [0.5]}, "n was int64, is double"),
        ({"key": ["x"]}, "n is gone"),
    ],
)
def test_columns_that_somebody_changes_after_the_commit_are_asked_back(storage, columns, message):
    left: dict[str, append.PublishedTable] = {}
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])], left)
    file, table = staged(storage, 2, ["b"]), DeltaTable(storage.full("tables/out"))
    write_deltalake(table, pa.table(columns), mode="overwrite", schema_mode="overwrite")
    for snapshot in (left, None):
        with pytest.raises(PipelineError, match=message) as refused:
            append.publish(storage, APP, "out", checkpoint(2), 1, [file], snapshot)
        assert "Checkpoint 2 is committed" in str(refused.value) and "another name" not in str(refused.value)
    DeltaTable(storage.full("tables/out")).restore(1)
    append.publish(storage, APP, "out", checkpoint(2), 1, [file], left)
    assert keys(storage) == ["a", "b"]


@pytest.mark.parametrize(
    "columns",
    [
        pa.schema([*SCHEMA, ("KEY", pa.string())]),
        pa.schema([("KEY", pa.string()), ("n", pa.int64())]),
        pa.schema([*SCHEMA, ("part", pa.list_(pa.struct([("a", pa.int64()), ("A", pa.int64())])))]),
    ],
    ids=["beside", "instead", "nested"],
)
def test_columns_that_differ_in_case_alone_are_refused(storage, columns):
    """Whose entry would make a table that nobody can open any more."""
    for table in ("out", "new") if len(columns) == 3 else ("out",):
        with pytest.raises(PipelineError, match=r"the columns (key and KEY|part\.\w+\.a and part\.\w+\.A)"):
            append.ensure(storage, table, columns, evolves=True)
    assert not DeltaTable.is_deltatable(storage.full("tables/new"))


def test_a_column_that_somebody_adds_in_another_case_after_the_commit_is_asked_back(storage):
    columns = pa.schema([*SCHEMA, ("more", pa.int64())])
    file, data = staged(storage, 1, ["a"]), pa.BufferOutputStream()
    pq.write_table(pa.table({"key": ["a"], "n": [1], "more": [2]}, schema=columns), data)
    storage.put_bytes(file.path, data.getvalue())
    file = replace(file, bytes=storage.size(file.path) or 0)
    append.ensure(storage, "out", columns, evolves=True)
    table = DeltaTable(storage.full("tables/out"))
    table.alter.add_columns([Field("MORE", PrimitiveType("long"))])
    with pytest.raises(PipelineError, match=r"(?s)columns MORE and more.*Checkpoint 1 is committed"):
        append.publish(storage, APP, "out", checkpoint(1), None, [file], evolves=True)
    table.restore(0)
    append.publish(storage, APP, "out", checkpoint(1), None, [file], evolves=True)
    assert keys(storage) == ["a"] and DeltaTable(storage.full("tables/out")).schema().to_arrow().names[-1] == "more"


@pytest.mark.parametrize("more", [{}, {"more": [0]}])
def test_columns_in_another_order_or_beside_others_take_the_rows_of_what_is_committed(storage, more):
    altered = pa.table({"n": [0], "key": ["x"], **more})
    write_deltalake(storage.full("tables/out"), altered, mode="overwrite", schema_mode="overwrite")
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
    assert keys(storage) == ["a", "x"]


def test_a_committed_file_that_is_gone_is_damage_and_nothing_is_published(storage):
    file = staged(storage, 1, ["a"])
    storage.delete(file.path)
    with pytest.raises(DamageError, match="cannot be read"):
        append.publish(storage, APP, "out", checkpoint(1), None, [file])
    assert DeltaTable(storage.full("tables/out")).version() == 0


def test_a_table_whose_protocol_asks_for_more_is_left_to_delta_rs(storage, opened):
    DeltaTable(storage.full("tables/out")).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    left: dict[str, append.PublishedTable] = {}
    for id in (1, 2):
        append.publish(storage, APP, "out", checkpoint(id), id - 1 or None, [staged(storage, id, ["a"])], left)
    assert left == {} and opened == ["tables/out"] * 2


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda storage, file: storage.delete(file.path), "is gone"),
        (lambda storage, file: storage.put_bytes(file.path, b"PAR1"), "4 bytes instead of"),
        (lambda storage, file: storage.put_bytes(file.path, b""), "0 bytes instead of"),
        (lambda storage, file: storage.put_bytes(file.path, b"x" * file.bytes), "not readable Parquet"),
        (lambda storage, file: storage.put_bytes(file.path, garbled(file.bytes)), "not readable Parquet"),
        (lambda storage, file: storage.put_bytes(file.path, garbled(file.bytes - 1)), "bytes instead of"),
        (lambda storage, file: storage.put_bytes(file.path, longer()), "bytes instead of"),
    ],
)
def test_staged_files_are_checked_before_a_commit_names_them(storage, harm, message):
    file = staged(storage, 1, ["a"])
    append.check(storage, [file], {("stage", "main"): SCHEMA})
    harm(storage, file)
    with pytest.raises(DamageError, match=message):
        append.check(storage, [file], {("stage", "main"): SCHEMA})


def test_staged_rows_and_columns_are_checked_too(storage):
    file = staged(storage, 1, ["a"])
    with pytest.raises(DamageError, match="1 row instead of 2"):
        append.check(storage, [replace(file, rows=2)], {("stage", "main"): SCHEMA})
    with pytest.raises(DamageError, match="has the columns"):
        append.check(storage, [file], {("stage", "main"): SCHEMA.append(pa.field("more", pa.int64()))})


def test_other_columns_than_the_tables_are_refused(storage):
    with pytest.raises(PipelineError, match=r"more is new; n was int64, is double"):
        append.ensure(storage, "out", pa.schema([("key", pa.string()), ("n", pa.float64()), ("more", pa.int64())]))
    append.ensure(storage, "out", SCHEMA)


def test_a_table_that_forgets_transactions_is_refused(storage):
    DeltaTable(storage.full("tables/out")).alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 1 days"}
    )
    with pytest.raises(PipelineError, match="forgets transaction versions"):
        append.ensure(storage, "out", SCHEMA)


def altered(
    storage: Storage,
    *fields: dict,
    writer: int = 2,
    features: Sequence[str] = (),
    partitions: Sequence[str] = (),
    properties: dict | None = None,
) -> None:
    """A table that others have made: its first entry."""
    protocol: dict = {"minReaderVersion": 1, "minWriterVersion": writer}
    if features:
        read = [name for name in features if name in ("columnMapping", "deletionVectors", "timestampNtz")]
        protocol = {"minReaderVersion": 3 if read else 1, "minWriterVersion": 7, "writerFeatures": list(features)}
        protocol |= {"readerFeatures": read} if read else {}
    metadata = {
        "id": "made", "format": {"provider": "parquet", "options": {}}, "partitionColumns": list(partitions), "createdTime": 0,
        "schemaString": json.dumps({"type": "struct", "fields": [*fields]}), "configuration": properties or {},
    }  # fmt: skip
    entry = "\n".join(json.dumps(action) for action in ({"protocol": protocol}, {"metaData": metadata}))
    storage.delete_tree("tables/out")
    storage.put_bytes(f"tables/out/_delta_log/{0:020d}.json", entry.encode())


def field(name: str, type: object, nullable: bool = True, **metadata: str) -> dict:
    return {"name": name, "type": type, "nullable": nullable, "metadata": metadata}


KEY, N = field("key", "string"), field("n", "long")


@pytest.mark.parametrize(
    ("fields", "options", "message", "cure"),
    [
        ([KEY, N], {"partitions": ["key"]}, "partitioned by key", "without partitions"),
        ([KEY, N], {"properties": {"delta.columnMapping.mode": "name"}, "writer": 5}, "columns are mapped", "without column mapping"),
        ([KEY, N], {"properties": {"delta.constraints.positive": "n > 0"}, "writer": 3}, "the constraint positive", "DROP CONSTRAINT positive"),
        ([field("key", "string", nullable=False), N], {}, "key is NOT NULL", "ALTER COLUMN key DROP NOT NULL"),
        ([KEY, field("n", "long", **{"delta.generationExpression": "1"})], {"writer": 4}, "n has delta.generationExpression", "anew"),
        ([KEY, N], {"features": ["inCommitTimestamp"]}, "feature inCommitTimestamp", "DROP FEATURE inCommitTimestamp"),
        ([KEY, N], {"features": ["deletionVectors", "appendOnly"]}, "feature deletionVectors", "DROP FEATURE deletionVectors"),
        ([KEY, N], {"writer": 6}, "feature identityColumns", "DROP FEATURE identityColumns"),
    ],
)  # fmt: skip
def test_a_table_that_asks_more_of_a_commit_than_files_is_refused(storage, fields, options, message, cure):
    altered(storage, *fields, **options)
    with pytest.raises(PipelineError, match=message) as refused:
        append.ensure(storage, "out", SCHEMA)
    assert cure in str(refused.value)
    assert "another name" in str(refused.value)
    # Altered since the epoch was committed: no rows that readers take for others.
    with pytest.raises(PipelineError, match=message) as refused:
        append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
    assert cure in str(refused.value) and "Checkpoint 1 is committed" in str(refused.value)
    assert "another name" not in str(refused.value)
    assert DeltaTable(storage.full("tables/out")).version() == 0


@pytest.mark.parametrize(
    ("type", "path"),
    [
        ({"type": "struct", "fields": [field("a", "long"), field("b", "long", nullable=False)]}, "n.b"),
        ({"type": "array", "elementType": "long", "containsNull": False}, "n.element"),
        ({"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": False}, "n.value"),
    ],
)
def test_columns_within_others_may_be_null_too(storage, type, path):
    altered(storage, KEY, field("n", type))
    with pytest.raises(PipelineError, match=f"{path} is NOT NULL"):
        append.ensure(storage, "out", SCHEMA)


def test_a_table_whose_features_ask_nothing_of_a_commit_is_written_to(storage):
    inert = [
        "appendOnly",
        "invariants",
        "checkConstraints",
        "generatedColumns",
        "changeDataFeed",
        "timestampNtz",
        "columnMapping",
    ]
    for options in ({"writer": 4}, {"writer": 5}, {"features": inert}):
        altered(storage, KEY, N, **options)
        append.ensure(storage, "out", SCHEMA)
        append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
        assert keys(storage) == ["a"]


def test_tables_that_weir_makes_ask_nothing_of_a_commit(storage):
    nested = pa.struct([("at", pa.timestamp("us", tz="UTC")), ("items", pa.list_(pa.int64()))])
    every = pa.schema([("parts", nested), ("by", pa.map_(pa.string(), pa.int64())), ("price", pa.decimal128(10, 2))])
    append.ensure(storage, "every", every)
    append.check_table(storage, "every", every)


def test_times_without_a_zone_are_a_feature_that_asks_nothing(storage):
    DeltaTable.create(storage.full("tables/local"), schema=pa.schema([("at", pa.timestamp("us"))]))
    append.check_table(storage, "local", pa.schema([("at", pa.timestamp("us", tz="UTC"))]))


def test_what_delta_rs_says_of_commits_that_all_fail_is_passed_on(storage, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise CommitFailedError("Unsupported table features required: [Strange]")

    monkeypatch.setattr(append.fenced_table, "commit", refuse)
    with pytest.raises(DamageError, match=r"Unsupported table features required: \[Strange\]"):
        append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
