"""Nothing of a checkpoint is used before it is proven: damage of each kind, in each object, is a typed error or leads
to an older one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.checkpoints import restore_log
from state_ops.checkpoints.registry import Registry
from state_ops.errors import DamageError, GateError, PipelineError
from state_ops.records.snapshot_files import STATE, StateFile
from tests.recovery.small import Bank, accounts, pipeline
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, ValueState, agg, expect, on_state, on_table
from weir.definition import Expected, Gate
from weir.execution.in_process import InMemoryExecutor
from weir.gates import data_docs
from weir.ownership.pipeline_storage import open_storage
from weir.restore import restore
from weir.run import maintenance
from weir.run.run import RunOptions, run

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "3", "WEIR_SPARK__PARALLELISM": "2"}
REWINDING = {"WEIR_RESTORE__ON_INVALID": "rewind"}


def _removed(path: Path, other: Path) -> None:
    path.unlink()


def _truncated(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _bit_flipped(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _swapped(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _linked_out(path: Path, other: Path) -> None:
    outside = path.parents[7] / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


DAMAGES = [_removed, _truncated, _bit_flipped, _swapped, _linked_out]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Bank:
    """Five epochs, of which three are retained."""
    bank = Bank.at(tmp_path_factory.mktemp("whole") / "site", **RETAINED)
    bank.epochs(1, 2, 3, 4, 5)
    return bank


def elsewhere(whole: Bank, root: Path, **options: str) -> Bank:
    """The pipeline on a host that has nothing of it."""
    bank = Bank(whole.site.copied_to(root))
    bank.site = replace(bank.site, options={**bank.site.options, **options})
    shutil.rmtree(root / "work")
    return bank


def newest(bank: Bank) -> list[StateFile]:
    head = bank.registry.head()
    return [file for file in bank.registry.files(head) if file.kind == STATE]


def only_newest(bank: Bank) -> list[StateFile]:
    """The objects that no older checkpoint names, so that damage in them leaves those whole."""
    head = bank.registry.head()
    older = [row for row in bank.registry.checkpoints() if row.id != head.id]
    named = {file.path for row in older for file in bank.registry.files(row)}
    return [file for file in newest(bank) if file.path not in named]


@pytest.mark.parametrize("damage", sampled(DAMAGES, 1))
def test_every_object_is_proven_before_it_is_used(whole, damage, tmp_path):
    for number, file in enumerate(newest(whole)):
        bank = elsewhere(whole, tmp_path / f"{number}" / "site")
        twin = next(other for other in newest(bank) if other.digest != file.digest)
        damage(bank.site.storage / file.path, bank.site.storage / twin.path)
        before = bank.site.objects()
        with pytest.raises(DamageError) as raised:
            bank.epochs(6)
        assert file.path in str(raised.value), raised.value
        assert raised.value.next
        after = bank.site.objects()
        assert {name for name in before if not name.startswith("registry/")} <= set(after), "nothing was deleted"
        assert not [name for name in after if name.startswith("tables/") and name not in before]
        assert bank.registry.head().id == 5


@pytest.mark.parametrize("damage", sampled(DAMAGES[:-1], 2))  # a link is somebody's doing: nothing goes on beside it
def test_the_policy_rewind_goes_on_from_the_newest_that_is_whole(whole, damage, tmp_path):
    bank = elsewhere(whole, tmp_path / "site", **REWINDING)
    file = only_newest(bank)[0]
    twin = next(other for other in newest(bank) if other.digest != file.digest)
    damage(bank.site.storage / file.path, bank.site.storage / twin.path)
    reports = bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)
    assert [report.checkpoint.id for report in reports] == [7, 8]
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    restores = [(row.checkpoint_id, row.purpose, row.valid) for row in restore_log.recorded(storage)]
    assert restores[-1] == (4, "rewind", True)
    rewound = next(row for row in bank.registry.checkpoints() if row.id == 6)
    assert rewound.kind == "rewind"
    assert rewound.reason.startswith("to checkpoint 4: checkpoint 5 is damaged")


def test_the_policy_rewind_passes_over_what_is_damaged_too_and_says_when_nothing_is_left(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site", **REWINDING)
    rows = {row.id: row for row in bank.registry.checkpoints()}
    for id in (5, 4):
        new_file = next(file for file in bank.registry.files(rows[id]) if file.kind == STATE and file.new)
        (bank.site.storage / new_file.path).unlink()
    last = Bank(bank.site.copied_to(tmp_path / "last"))
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4, 5)
    assert next(row for row in bank.registry.checkpoints() if row.kind == "rewind").parent_id == 3
    for file in last.registry.files(rows[3]):
        if file.kind == STATE:
            (last.site.storage / file.path).unlink(missing_ok=True)
    with pytest.raises(DamageError, match="No earlier checkpoint that is retained is whole"):
        last.epochs()


def _rewritten(bank: Bank, table: str, change: Callable[[list[dict]], list[dict]]) -> None:
    """Alter rows of a registry table behind Weir's back, in the data files that its log names."""
    where = bank.site.storage / "registry" / table
    for uri in DeltaTable(str(where)).file_uris():
        path = Path(uri.removeprefix("file://"))
        rows = pa.parquet.read_table(path, partitioning=None)
        changed = change(rows.to_pylist())
        pa.parquet.write_table(pa.Table.from_pylist(changed, schema=rows.schema), path)


def _one_row_less(rows: list[dict]) -> list[dict]:
    return rows[1:]


def _another_digest(rows: list[dict]) -> list[dict]:
    return [{**rows[0], "digest": "0" * 64}, *rows[1:]]


def _another_object(rows: list[dict]) -> list[dict]:
    paths = [row["path"] for row in rows if row["kind"] == "state"]
    return [{**row, "path": paths[-1]} if row["path"] == paths[0] else row for row in rows]


def _out_of_the_root(rows: list[dict]) -> list[dict]:
    return [{**row, "path": f"../{row['path']}"} for row in rows]


def _another_subtask(rows: list[dict]) -> list[dict]:
    return [{**row, "subtask": 1 - row["subtask"]} for row in rows]


def _fewer_bytes(rows: list[dict]) -> list[dict]:
    return [{**row, "bytes": row["bytes"] - 1} for row in rows]


@pytest.mark.parametrize(
    "change",
    [_one_row_less, _another_digest, _another_object, _out_of_the_root, _another_subtask, _fewer_bytes],
)
def test_altered_rows_of_the_registry_are_found_before_anything_is_used(whole, change, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    _rewritten(bank, "state_files", change)
    tables = bank.site.table("booked")
    with pytest.raises(DamageError):
        bank.epochs(6)
    assert len(bank.site.table("booked")) == len(tables)


@pytest.fixture(scope="module")
def named(whole, tmp_path_factory) -> Bank:
    """The same with a savepoint of its newest checkpoint."""
    bank = Bank(whole.site.copied_to(tmp_path_factory.mktemp("named") / "site"))
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "kept", "test", 60)
    return bank


def _altered(column: str, change: Callable[[Any], Any]) -> Callable[[list[dict]], list[dict]]:
    return lambda rows: [{**row, column: change(row[column])} for row in rows]


def _in_json(change: Callable[[Any], None]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return changed


ALTERED = {
    "checkpoints": {
        "an offset goes back": _altered("offsets", _in_json(lambda it: it["landing"].update(files=0, seen=[], last=None))),
        "bytes_total": _altered("bytes_total", lambda it: it - 1),
        "another parent": _altered("parent_id", lambda it: it - 1),
        "another commit": _altered("commit_id", lambda it: it[::-1]),
        "another generation": _altered("generation", lambda it: it + 1),
        "a sink is behind": _altered("sinks", _in_json(lambda it: it["booked"].update(id=it["booked"]["id"] - 1))),
        "no sinks": _altered("sinks", lambda _: "{}"),
        "another time": _altered("completed_at", lambda it: it + timedelta(microseconds=1)),
        "rows of two checkpoints swapped": lambda rows: [{**row, "id": {4: 5, 5: 4}.get(row["id"], row["id"])} for row in rows],
    },
    "publications": {
        "another sink": _altered("sink", lambda it: f"{it}s"),
        "another version": _altered("delta_version", lambda it: it + 1),
        "another checkpoint": _altered("checkpoint_id", lambda it: it + 1),
        "another duration": _altered("ms", lambda it: it * 1.5),
    },
    "pins": {
        "another checkpoint": _altered("checkpoint_id", lambda it: it - 1),
        "another commit": _altered("commit_id", lambda it: it[::-1]),
        "another name": _altered("name", lambda it: it.upper()),
    },
}  # fmt: skip


def _stops_every_run(bank: Bank, message: str) -> None:
    """The next run says what is damaged, and has used, published and deleted nothing by then."""
    before, booked = bank.site.objects(), len(bank.site.table("booked"))
    with pytest.raises(DamageError) as raised:
        bank.epochs(6)
    assert message in str(raised.value), raised.value
    assert raised.value.next
    after = bank.site.objects()
    assert set(before) <= set(after), "nothing was deleted"
    assert not [name for name in set(after) - set(before) if not name.startswith("registry/")]
    assert len(bank.site.table("booked")) == booked


READ = {
    "checkpoints": Registry.checkpoints,
    "publications": Registry.publications,
    "pins": Registry.pins,
}


@pytest.mark.parametrize("table", ALTERED)
def test_altered_rows_are_named(named, table, tmp_path):
    """Also where everything else fits: the Parquet file is whole, and the log says nothing of its content.

    What no digest can find: a row altered by somebody who makes its digest anew, or takes it away, as rows of older
    releases have none; and a row that is taken out by a commit of its own, or a log that is set back. A checkpoint that
    is gone so leaves its table ahead, which is noticed (below). A publication that is gone is published again, which is
    a no-op (below). A savepoint that is gone looks like one that was dropped: who may write to the storage may drop it.
    """
    bank = Bank(named.site.copied_to(tmp_path / "site"))
    data = bank.site.storage / "registry" / table / "data"
    whole = {path: path.read_bytes() for path in data.iterdir()}
    for what, change in ALTERED[table].items():
        _rewritten(bank, table, change)
        with pytest.raises(DamageError, match=rf"its digest is another one: {table}, ") as raised:
            READ[table](bank.registry)
        assert any(path.name in str(raised.value) for path in whole), what
        for path, content in whole.items():
            path.write_bytes(content)
    READ[table](bank.registry)


@pytest.mark.parametrize(
    ("table", "column", "value"), sampled([("checkpoints", "epoch_now", "completed_at"), ("publications", "rows", "rows + 1"), ("pins", "name", "'mine'")])
)  # fmt: skip
def test_rows_that_another_engine_updates_stop_a_run_and_are_a_finding(named, table, column, value, weir, tmp_path):
    """Files and log are as sound as any after that."""
    bank = elsewhere(named, tmp_path / "site")
    DeltaTable(str(bank.site.storage / "registry" / table)).update({column: value})
    message = f"not what was committed, its digest is another one: {table}, "
    _stops_every_run(bank, message)
    checked = weir(bank.site, "fsck", "small")
    assert checked.code == 1
    assert message in " ".join(checked.out.split())


def _bit_of_a_page_flipped(path: Path, other: Path) -> None:
    """One of the rows: in the footer there are some that mean nothing."""
    column = pa.parquet.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_removed, _bit_of_a_page_flipped])
@pytest.mark.parametrize("table", ALTERED)
def test_damaged_files_of_the_registry_stop_a_run_and_are_named(named, table, damage, tmp_path):
    bank = elsewhere(named, tmp_path / "site")
    first = sorted((bank.site.storage / "registry" / table / "data").glob("*.parquet"))[-1]
    other = next((bank.site.storage / "registry").glob("state_files/*/*.parquet"))
    damage(first, other)
    _stops_every_run(bank, first.name if damage is not _removed else f"registry/{table}")


def test_a_publication_that_is_gone_is_published_again_to_no_effect(named, tmp_path):
    bank = elsewhere(named, tmp_path / "site")
    DeltaTable(str(bank.site.storage / "registry" / "publications")).delete("checkpoint_id = 5")
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def test_rows_of_a_release_without_digests_are_gone_on_from(named, tmp_path):
    bank = elsewhere(named, tmp_path / "site")
    for table in ALTERED:
        _rewritten(bank, table, _altered("digest", lambda _: None))
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def test_a_row_that_is_gone_leaves_a_table_that_is_ahead(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    table = DeltaTable(str(bank.site.storage / "registry" / "checkpoints"))
    table.delete("id = 5")
    with pytest.raises(DamageError, match="A sink table is not where the registry says"):
        bank.epochs(6)


def test_a_restore_leaves_on_this_host_what_the_next_run_needs(whole, tmp_path, monkeypatch):
    bank = elsewhere(whole, tmp_path / "site")
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    head = registry.head()
    first = restore.plan_restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    assert (first.local, first.bytes) == (0, head.bytes_total)
    done = restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    assert (done.valid, done.bytes_fetched, done.bytes_local) == (True, head.bytes_total, 0)
    assert (
        restore.plan_restore(bank.site.pipeline, bank.site.settings, storage, registry, head).local == head.bytes_total
    )
    assert list(bank.site.storage.glob("coordinator/holds/*")) == []

    for file in newest(bank):
        if file.name.endswith(".sst"):
            (bank.site.storage / file.path).write_bytes(bytes(file.bytes))  # as large, and never read
    again = restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    assert (again.bytes_fetched, again.bytes_local) == (0, head.bytes_total)
    bank.epochs(6)
    assert sorted(set(bank.site.table("booked")["amount"])) == [1, 2, 3, 4, 5, 6]


def test_a_local_file_that_rots_is_fetched_again(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site", WEIR_LOCAL__OBJECTS_MB="0")
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    head = registry.head()
    restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    rotten = next((tmp_path / "site" / "work").rglob("snapshot/*.sst"))
    _bit_flipped(rotten, rotten)
    done = restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    assert 0 < done.bytes_fetched < head.bytes_total, "one of the two subtasks"
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def test_an_object_that_rots_among_those_of_the_host_is_fetched_again(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    head = registry.head()
    restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head)
    objects = bank.site.settings.work_dir / "objects"
    for kept in objects.iterdir():
        if kept.is_file():
            content = kept.read_bytes()
            kept.unlink()
            kept.write_bytes(content[:-1] + b"?")
    for home in (tmp_path / "site" / "work").glob("small-*"):
        shutil.rmtree(home)
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def test_the_objects_of_a_host_keep_to_their_bound(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    files = [file for file in newest(bank) if file.name.endswith(".sst")]
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    most = sum(file.bytes for file in files) - 1
    cache = restore.snapshot.ObjectCache(tmp_path / "objects", most)
    (tmp_path / "out").mkdir()
    for file in files:
        cache.fetch(storage, file, tmp_path / "out" / file.digest, Event())
    kept = [path for path in (tmp_path / "objects").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= most
    assert len(kept) == len(files) - 1
    assert not cache.holds(files[0]), "the one that was not used for longest"


def test_the_command_proves_and_records(whole, weir, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    planned = json.loads(weir(bank.site, "restore", "small", "--dry-run", "--json").out)
    assert planned["bytes_to_fetch"] == planned["bytes_total"] > 0
    assert planned["restored"] is None
    assert not (bank.site.storage / "registry" / "restores").exists()
    done = weir(bank.site, "restore", "small", "--checkpoint", "4")
    assert done.code == 0
    assert "Checkpoint 4 is valid" in done.out
    assert "weir rewind small --to 4" in done.out
    lost = only_newest(bank)[0].path  # what checkpoint 4 names as well is on this host now
    (bank.site.storage / lost).unlink()
    failed = weir(bank.site, "restore", "small", "--json")
    assert failed.code == 1
    assert lost in failed.err
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    assert [(row.checkpoint_id, row.valid) for row in restore_log.recorded(storage)] == [(4, True), (5, False)]
    assert weir(bank.site, "restore", "small", "--savepoint", "none").code == 1


@pytest.mark.parametrize("here", sampled(["objects", "snapshots", "nothing"]))
def test_what_lies_in_storage_is_proven_though_this_host_has_copies(whole, weir, tmp_path, here):
    bank = elsewhere(whole, tmp_path / "site")
    assert weir(bank.site, "restore", "small").code == 0, "now this host has all of it"
    if here != "snapshots":
        for home in bank.site.settings.work_dir.glob("small-*"):
            shutil.rmtree(home)
    if here == "nothing":
        shutil.rmtree(bank.site.settings.work_dir / "objects")
    for file in newest(bank):
        path = bank.site.storage / file.path
        content = path.read_bytes()
        _bit_flipped(path, path)
        proven = weir(bank.site, "restore", "small", "--storage")
        assert proven.code == 1 and file.path in proven.err, "it is damaged in storage, wherever copies are"
        path.write_bytes(content)
    done = json.loads(weir(bank.site, "restore", "small", "--storage", "--json").out)["restored"]
    assert (done["valid"], done["bytes_unread"]) == (True, 0)


def test_a_restore_from_copies_says_what_it_did_not_read(whole, weir, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    first = weir(bank.site, "restore", "small", "--json")
    assert json.loads(first.out)["restored"]["bytes_unread"] == 0, "all of it was fetched"
    assert "not read" not in weir(elsewhere(whole, tmp_path / "b" / "site").site, "restore", "small").out
    total = bank.registry.head().bytes_total
    assert json.loads(weir(bank.site, "restore", "small", "--json").out)["restored"]["bytes_unread"] == total
    output = weir(bank.site, "restore", "small").out
    assert f"{total:,} bytes were not read in storage" in output and "weir restore small --storage" in output
    assert "not read" not in weir(bank.site, "restore", "small", "--storage").out


def test_a_restore_beside_an_unknown_table_is_recorded_nowhere_and_said(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    write_deltalake(str(bank.site.storage / "registry" / "restores"), pa.table({"other": [1]}))
    assert restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, registry.head()).valid
    assert isinstance(registry, Registry)


def expecting(bank: Bank, *expected: Expected) -> Bank:
    return Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, on_restore=expected)))


def between(column: str, low: int, high: int) -> Gate:
    return expect("ExpectColumnValuesToBeBetween", column=column, min_value=low, max_value=high)


@pytest.mark.long
def test_what_is_expected_of_state_and_tables_is_looked_at_before_a_restore_is_used(whole, tmp_path):
    holds = on_state("accounts", between("total", 0, 15)), on_table("booked", between("amount", 1, 5))
    bank = expecting(elsewhere(whole, tmp_path / "holds" / "site"), *holds)
    bank.epochs(6)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    assert [(row.checkpoint_id, row.valid, row.expectations) for row in restore_log.recorded(storage)] == [(5, True, 2)]
    bank.epochs(7)
    assert len(restore_log.recorded(storage)) == 1, "nothing was restored: it was here"

    fails = {
        on_state("accounts", between("total", 0, 14)): DamageError,
        on_table("booked", between("amount", 1, 4)): GateError,
    }
    for number, (expectation, error) in enumerate(fails.items()):
        bank = expecting(elsewhere(whole, tmp_path / f"{number}" / "site", **REWINDING), holds[0], expectation)
        if error is DamageError:
            bank.site.options.pop("WEIR_RESTORE__ON_INVALID")
        with pytest.raises(error, match=f"expected of it: {expectation.of} {expectation.name}: .* rows, e.g. "):
            bank.epochs(6)
        assert bank.registry.head().id == 5, "rows of a table would only be made again"

    with pytest.raises(PipelineError, match="on_restore expects something of the table 'accounts'"):
        expecting(bank, on_table("accounts", between("total", 0, 1)))


@pytest.mark.long
def test_state_that_does_not_hold_what_is_expected_sends_the_policy_rewind_further_back(whole, tmp_path):
    limited = on_state("accounts", between("total", 0, 5))
    bank = expecting(elsewhere(whole, tmp_path / "site", **REWINDING), limited)
    with pytest.raises(DamageError, match="No earlier checkpoint"):
        bank.epochs(6)
    bank = expecting(
        elsewhere(whole, tmp_path / "again" / "site", **REWINDING), on_state("accounts", between("total", 0, 10))
    )
    next(iter(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor())))
    rewound = next(row for row in bank.registry.checkpoints() if row.kind == "rewind")
    assert rewound.parent_id == 4, "whose totals reach 10"


def test_a_digest_is_no_path(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = restore.snapshot.ObjectCache(tmp_path / "objects", 1 << 20)
    strange = replace(newest(bank)[0], digest="../victim", bytes=victim.stat().st_size)
    for ask in (cache.holds, lambda file: cache.fetch(storage, file, tmp_path / "out", Event())):
        with pytest.raises(DamageError, match="as the digest of a file"):
            ask(strange)
    cache.drop(["../victim"])
    assert victim.read_text() == "precious"


def test_what_killed_restores_left_on_a_host_is_removed_where_nobody_can_go_on_with_it(whole, tmp_path):
    bank = elsewhere(whole, tmp_path / "site")
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    plan = restore.plan_restore(bank.site.pipeline, bank.site.settings, storage, registry, registry.head())
    objects = bank.site.settings.work_dir / "objects"
    left = [plan.parts[0].home / ".999999999-abc" / "kept", objects / f"{'0' * 64}.part"]
    left[0].mkdir(parents=True)
    objects.mkdir(parents=True)
    left[1].write_bytes(b"half")
    restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, registry.head())
    assert not left[0].parent.exists()
    assert left[1].exists(), "whoever needs that object goes on with it"
    cache = restore.snapshot.ObjectCache(objects, 1)
    file, *_ = [file for file in newest(bank) if file.name.endswith(".sst")]
    (objects / file.digest).unlink()
    cache.fetch(storage, file, tmp_path / "out", Event())
    assert not left[1].exists(), "but it takes no room for ever"


@pytest.mark.long
@pytest.mark.parametrize("are_homes_there", [True, False])
def test_damage_in_a_file_that_this_process_has_read_before_is_not_linked_again(whole, tmp_path, are_homes_there):
    """Neither by a subtask from its local snapshot, nor from this host's objects by the restore before the first
    epoch."""
    failures = "3" if are_homes_there else "0"
    options = {"WEIR_STATE__RESIDENT_MB": "0", "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": failures}
    bank = elsewhere(whole, tmp_path / "site", **options)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, registry.head())
    for table in (tmp_path / "site" / "work").rglob("snapshot/*.sst"):
        stat, content = table.stat(), bytearray(table.read_bytes())
        content[-1] ^= 1  # of the footer, which no cache of RocksDB has
        with table.open("r+b") as file:
            file.write(content)
        os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as when a disk rots
    if not are_homes_there:
        for home in (tmp_path / "site" / "work").glob("small-*"):
            shutil.rmtree(home)
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def _other_order(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("amount", "at", "id")


reordered = altered(accounts, function=_other_order)


@pytest.mark.long
def test_after_a_deploy_with_the_columns_in_another_order_and_a_compaction_a_new_host_recovers(tmp_path):
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank.epochs(1, 2)
    DeltaTable(str(bank.site.storage / "tables" / "booked")).optimize.compact()  # writes text as another Arrow type
    deployed = replace(pipeline, stages=(reordered,), on_restore=(on_table("booked", between("amount", 1, 4)),))
    bank = Bank(replace(bank.site, pipeline=deployed))
    bank.epochs(3)
    shutil.rmtree(bank.site.settings.work_dir)
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    (row,) = restore_log.recorded(storage)
    assert (row.valid, row.expectations) == (True, 1)
    assert restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, registry.head()).valid
    report = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert [(verdict.passed, verdict.rows) for verdict in report.verdicts] == [(True, 40)]


def test_a_table_that_cannot_be_read_is_said_and_no_reason_to_go_back(whole, tmp_path):
    bank = expecting(elsewhere(whole, tmp_path / "site", **REWINDING), on_table("booked", between("amount", 1, 5)))
    newest, *_ = sorted((bank.site.storage / "tables" / "booked" / "data").rglob("*.parquet"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.raises(GateError, match="A file of the table booked cannot be read") as refused:
        bank.epochs(6)
    assert newest.name in refused.value.where and bank.registry.head().id == 5
