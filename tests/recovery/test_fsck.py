"""`weir fsck` on what real runs stored and real damage was done to: each kind found by its name, each repair exact."""

from __future__ import annotations

import io
import json
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.delta import fenced_table, log_entries
from state_ops.delta.fenced_table import FencedTable
from state_ops.fsck import check as checking
from state_ops.fsck.findings import MEANINGS, Kind, Report, Severity
from state_ops.fsck.repair import plan_repair
from state_ops.records.pins import SAVEPOINT
from state_ops.records.snapshot_files import OUTPUT
from state_ops.storage.storage import Storage
from tests.recovery.small import Apart, Bank, until
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from weir.connectors.delta import append
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.ownership import claimed
from weir.run import fsck as checks
from weir.run.run import RunOptions, open_storage, run


class Account(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


@stage("checked", source=files("{landing}/*.parquet", name="landing"), key="id", state=Account, order_by=["at"])
def checked(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Hands its rows on: a channel, since it has no table."""
    state.fold(rows, rows=agg.count())
    return rows


@stage("accounts", source=checked, key="id", state=Account, order_by=["at"], sink=delta.append("booked"))
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "at", "amount")


pipeline = Pipeline("small", (checked, accounts), max_parallelism=8)
LOST = "f" * 32  # an attempt that nobody knows


def bank_at(root: Path) -> Bank:
    bank = Bank.at(root, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    return Bank(replace(bank.site, pipeline=pipeline, module=__name__))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Bank:
    """Two generations, five files, one file an epoch; retained: the savepoint 2, and 4 and 5."""
    bank = bank_at(tmp_path_factory.mktemp("made") / "site")
    bank.epochs(1, 2, executor=Apart())
    with claimed(bank.site.pipeline, bank.site.settings) as owner:
        from weir.ownership.savepoints import save

        save(owner.context, owner.head, "before", "a test")
    bank.epochs(3, 4, 5, executor=Apart())
    assert bank.ids() == [2, 4, 5]
    return bank


@pytest.fixture
def bank(base, tmp_path) -> Bank:
    return Bank(base.site.copied_to(tmp_path / "site"))


def check(bank: Bank, **options) -> Report:
    return checks.examine(bank.site.pipeline, bank.site.settings, **options)


def kinds(report: Report) -> set[Kind]:
    return {finding.kind for finding in report.findings}


def live(bank: Bank) -> dict[str, bytes]:
    """Content of every file that a retained checkpoint or the newest version of the table names, by their logs
    alone."""
    storage = bank.site.storage
    rows, listed = bank.site.registry("checkpoints"), bank.site.registry("state_files")
    kept = set(rows["commit_id"])
    named = set(listed[listed["commit_id"].isin(kept)]["path"])
    for table in ("tables/booked", "registry/checkpoints", "registry/pins"):
        named |= {f"{table}/{path}" for path in _active(storage / table)}
    listings = storage / "registry/state_files"
    named |= {f"registry/state_files/{path}" for path in _active(listings) if any(id in path for id in kept)}
    return {name: (storage / name).read_bytes() for name in sorted(named) if (storage / name).exists()}


def _active(table: Path) -> list[str]:
    return [str(Path(uri).relative_to(table)) for uri in DeltaTable(str(table)).file_uris()]


def flip(path: Path) -> None:
    """One bit, in the middle."""
    _flip(path, path.stat().st_size // 3)


def flip_row(path: Path) -> None:
    """One bit, in the largest column: the headers of pages have no checksum, and a row has many small columns."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    largest = max(map(group.column, range(group.num_columns)), key=lambda column: column.total_compressed_size)
    size = largest.total_compressed_size
    _flip(path, (largest.dictionary_page_offset or largest.data_page_offset) + size - size // 3)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def last(directory: Path, pattern: str) -> Path:
    return sorted(directory.glob(pattern))[-1]


def first(directory: Path, pattern: str) -> Path:
    return sorted(directory.glob(pattern))[0]


def newest_state(bank: Bank) -> Path:
    """An object that the newest checkpoint alone names."""
    return last(bank.site.storage, "state/accounts/g*-e5/*/*.sst")


def staged(bank: Bank, epoch: int) -> Path:
    return first(bank.site.storage, f"tables/booked/data/g*-e{epoch}/*.parquet")


# -- nothing wrong


def test_nothing_is_found_where_nothing_is_wrong(bank, weir):
    before = bank.site.objects()
    ended = weir(bank.site, "fsck", "small", "--json")
    report = json.loads(ended.out)
    assert (ended.code, ended.err, report["findings"], report["damaged"]) == (0, "", [], False)
    assert report["checkpoints"] == [
        {"id": 2, "names": ["before"], "intact": True},
        {"id": 4, "names": [], "intact": True},
        {"id": 5, "names": [], "intact": True},
    ]
    assert report["bytes_read"] > 10_000
    assert "whole: 0 damaged, 0 left over, 0 foreign; 3 checkpoints" in weir(bank.site, "fsck", "small").out
    assert bank.site.objects() == before, "it reads only"


def test_a_pipeline_that_never_ran_is_whole(tmp_path, weir):
    bank = bank_at(tmp_path / "site")
    bank.land(1)
    ended = weir(bank.site, "fsck", "small", "--repair", "--yes")
    assert (ended.code, "nothing to do" in ended.out) == (0, True)


def test_a_table_that_was_compacted_and_vacuumed_is_whole(bank, weir):
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.optimize.compact()
    assert check(bank).findings == ()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert not staged_exists(bank, 5), "the vacuum took what the newest checkpoint had published"
    assert check(bank).findings == ()
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def staged_exists(bank: Bank, epoch: int) -> bool:
    return any(bank.site.storage.glob(f"tables/booked/data/g*-e{epoch}/*.parquet"))


# -- damage


@dataclass(frozen=True)
class Damage:
    """target: the file to harm; how: what is done to it; quick: whether --quick sees it; harms: checkpoints."""

    kind: Kind
    target: Callable[[Bank], Path]
    how: Callable[[Path], None]
    quick: bool = True
    harms: tuple[int, ...] = ()


def registry_row(bank: Bank) -> Path:
    return last(bank.site.storage, "registry/checkpoints/data/*.parquet")


def listing(bank: Bank) -> Path:
    return last(bank.site.storage, "registry/state_files/checkpoint_id=4/*.parquet")


def registry_log(bank: Bank) -> Path:
    return last(bank.site.storage, "registry/checkpoints/_delta_log/*.json")


def registry_table(bank: Bank) -> Path:
    return bank.site.storage / "registry/checkpoints"


def keep_one(table: Path) -> None:
    """As it was before anybody claimed it."""
    for entry in sorted((table / "_delta_log").iterdir())[1:]:
        entry.unlink()


def sink_log(bank: Bank) -> Path:
    return last(bank.site.storage, "tables/booked/_delta_log/*.json")


def channel(bank: Bank) -> Path:
    return first(bank.site.storage, "channels/checked/g*-e5/*.parquet")


DAMAGES = {
    "a bit of a state file": Damage(Kind.ALTERED_OBJECT, newest_state, flip, quick=False, harms=(5,)),
    "a state file cut short": Damage(Kind.ALTERED_OBJECT, newest_state, cut, harms=(5,)),
    "a state file gone": Damage(Kind.MISSING_OBJECT, newest_state, Path.unlink, harms=(5,)),
    "a channel gone": Damage(Kind.MISSING_OBJECT, channel, Path.unlink, harms=(5,)),
    "a bit of a channel": Damage(Kind.ALTERED_OBJECT, channel, flip, quick=False, harms=(5,)),
    "published rows gone": Damage(Kind.MISSING_ROWS, lambda bank: staged(bank, 5), Path.unlink, harms=(5,)),
    "old published rows gone": Damage(Kind.MISSING_ROWS, lambda bank: staged(bank, 1), Path.unlink),
    "a bit of published rows": Damage(Kind.ALTERED_ROWS, lambda bank: staged(bank, 5), flip, quick=False, harms=(5,)),
    "a bit of old published rows": Damage(Kind.ALTERED_ROWS, lambda bank: staged(bank, 1), flip, quick=False),
    "a checkpoint's row gone": Damage(Kind.MISSING_REGISTRY_FILE, registry_row, Path.unlink),
    "a checkpoint's row cut short": Damage(Kind.ALTERED_REGISTRY_FILE, registry_row, cut),
    "a bit of a checkpoint's row": Damage(Kind.ALTERED_REGISTRY_FILE, registry_row, flip_row),
    "a listing gone": Damage(Kind.MISSING_REGISTRY_FILE, listing, Path.unlink),
    "a bit of a listing": Damage(Kind.ALTERED_REGISTRY_FILE, listing, flip),
    "the registry's log torn": Damage(Kind.UNREADABLE_REGISTRY, registry_log, lambda path: path.write_bytes(b'{"add')),
    "the table's log torn": Damage(Kind.UNREADABLE_TABLE, sink_log, lambda path: path.write_bytes(b'{"add')),
    "the registry set back to an older generation": Damage(Kind.REGISTRY_SET_BACK, registry_table, keep_one),
    "the registry without its table of checkpoints": Damage(Kind.REGISTRY_SET_BACK, registry_table, shutil.rmtree),
    "the table set back": Damage(Kind.SINK_BEHIND, sink_log, Path.unlink),
    "the table dropped": Damage(Kind.MISSING_TABLE, lambda bank: sink_log(bank).parent.parent, shutil.rmtree),
}


@pytest.mark.parametrize("name", sampled(DAMAGES, 3))
def test_damage_is_found_by_its_name_and_ends_with_code_1(bank, weir, name):
    damage = DAMAGES[name]
    target = damage.target(bank)
    damage.how(target)
    ended = weir(bank.site, "fsck", "small", "--json")
    report = json.loads(ended.out)
    assert (ended.code, report["damaged"]) == (1, True)
    findings = [finding for finding in report["findings"] if finding["kind"] == damage.kind]
    assert findings and all(finding["severity"] == "damage" for finding in findings)
    path = target.relative_to(bank.site.storage).as_posix()
    assert any(path.startswith(finding["path"]) for finding in findings), findings
    harmed = tuple(checkpoint["id"] for checkpoint in report["checkpoints"] if not checkpoint["intact"])
    if damage.harms:
        assert harmed == damage.harms
    assert (damage.kind in kinds(check(bank, quick=True))) == damage.quick
    shown = weir(bank.site, "fsck", "small")
    assert shown.code == 1 and f"{damage.kind} (damage)" in shown.out
    assert findings[0]["path"] in shown.out


@pytest.mark.parametrize("name", sampled([name for name, damage in DAMAGES.items() if MEANINGS[damage.kind].blocks], 2))
def test_nothing_is_deleted_while_it_cannot_be_told_what_is_named(bank, weir, name):
    plant_orphans(bank)
    DAMAGES[name].how(DAMAGES[name].target(bank))
    before = bank.site.objects()
    ended = weir(bank.site, "fsck", "small", "--repair", "--yes")
    assert ended.code == 1 and "nothing is published or deleted" in ended.out
    assert bank.site.objects() == before
    facts = json.loads(weir(bank.site, "fsck", "small", "--repair", "--yes", "--json").out)
    assert facts["plan"]["refused"] and not (facts["plan"]["delete"] or facts["repaired"])
    assert bank.site.objects() == before


def test_a_registry_that_was_set_back_leaves_the_table_ahead(tmp_path, weir):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="9")
    bank.epochs(1, 2, 3)
    registry_log(bank).unlink()
    report = check(bank)
    assert report.damage[0].kind is Kind.SINK_AHEAD and [checkpoint.id for checkpoint in report.checkpoints] == [1, 2]
    before = bank.site.objects()
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 1
    assert bank.site.objects() == before


def test_damage_names_the_checkpoints_that_are_still_good(bank, weir):
    newest_state(bank).unlink()
    ended = weir(bank.site, "fsck", "small")
    assert "Not restorable: checkpoint 5. Intact: 2 (before), 4." in ended.out
    ended = weir(bank.site, "fsck", "small", "--repair", "--yes")
    assert (ended.code, "nothing to do" in ended.out, "no repair can undo" in ended.out) == (1, True, True)


def test_a_savepoint_whose_checkpoint_is_gone_is_named(bank):
    registry = bank.registry
    registry.drop_rows(registry.generation(), [row.id for row in registry.checkpoints() if row.id == 2])
    report = check(bank)
    lost = [finding for finding in report.findings if finding.kind is Kind.LOST_SAVEPOINT]
    assert [finding.checkpoints for finding in lost] == [(2,)] and "'before'" in lost[0].what


# -- leftovers


class Killed(BaseException):
    """The process is gone here: nothing after it runs."""


def killed_in(owner, name: str, when: Callable[..., bool] = lambda *_: True):
    """Plant what a process leaves that dies at the first call of `owner.name` for which `when` is so."""

    def plant(bank: Bank) -> None:
        real = getattr(owner, name)

        def dies(*arguments, **named):
            if when(*arguments):
                raise Killed
            return real(*arguments, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, dies)
            patched.setattr("weir.epoch.failover.discard", lambda *_: None)
            with pytest.raises(Killed):
                bank.epochs(6)

    return plant


def copy(source: Callable[[Bank], Path], target: str) -> Callable[[Bank], None]:
    def plant(bank: Bank) -> None:
        path = bank.site.storage / target
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source(bank), path)

    return plant


def plant_dead_hold(bank: Bank) -> None:
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    with ReaderHold(storage, registry, registry.checkpoints()[0], "a test") as hold:
        path = bank.site.storage / hold._path
        holder = json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(holder | {"born": "another life"}))


def plant_orphans(bank: Bank) -> None:
    copy(newest_state, f"state/accounts/g1-e2/0-{LOST}/000077.sst")(bank)
    copy(channel, f"channels/checked/g1-e2/1-{LOST}.parquet")(bank)


LEFTOVERS: dict[str, tuple[Kind, Callable[[Bank], None]]] = {
    "objects of a dead generation": (Kind.ORPHAN_OBJECT, plant_orphans),
    "rows of a speculative attempt that lost": (
        Kind.ORPHAN_ROWS,
        copy(lambda bank: staged(bank, 2), f"tables/booked/data/g1-e2/0-{LOST}.parquet"),
    ),
    "rows that a zombie staged": (
        Kind.ORPHAN_ROWS,
        copy(lambda bank: staged(bank, 2), f"tables/booked/data/g1-e9/0-{LOST}.parquet"),
    ),
    "a half-written state file": (
        Kind.HALF_WRITTEN,
        copy(newest_state, f"state/accounts/g1-e2/0-{LOST}/.tmp-{LOST}-000077.sst"),
    ),
    "half-written rows": (
        Kind.HALF_WRITTEN,
        copy(newest_state, f"tables/booked/data/g1-e2/.tmp-{LOST}-0-{LOST}.parquet"),
    ),
    "a half-written listing": (
        Kind.HALF_WRITTEN,
        copy(newest_state, f"registry/state_files/checkpoint_id=6/.tmp-{LOST}-x.parquet"),
    ),
    "a half-written lease": (Kind.HALF_WRITTEN, copy(newest_state, f"coordinator/.tmp-{LOST}-lease.json")),
    "a half-written commit": (
        Kind.HALF_WRITTEN,
        copy(registry_log, "registry/checkpoints/_delta_log/00000000000000000099.json#1"),
    ),
    "a probe": (Kind.PROBE, copy(registry_log, f"registry/.probe-g2-{LOST}/_delta_log/00000000000000000000.json")),
    "a row that was written and not committed": (
        Kind.UNNAMED_REGISTRY_FILE,
        copy(registry_row, f"registry/checkpoints/data/00000000000000000006-{LOST}.parquet"),
    ),
    "a restore that died": (Kind.DEAD_HOLD, plant_dead_hold),
    "killed before the commit's row": (
        Kind.ORPHAN_LISTING,
        killed_in(
            FencedTable, "commit", lambda table, _, *rows: table.path == "registry/checkpoints" and any(rows[:1])
        ),
    ),
    "killed before the publication": (Kind.UNPUBLISHED_ROWS, killed_in(append, "publish")),
    "killed before the record of the publication": (
        Kind.UNRECORDED_PUBLICATION,
        killed_in(Registry, "record_publications"),
    ),
    "killed while pruning, rows gone": (
        Kind.ORPHAN_LISTING,
        killed_in(Registry, "drop_listings", lambda _, __, orphan_listings, *___: bool(orphan_listings)),
    ),
    "killed while pruning, listings gone": (
        Kind.ORPHAN_OBJECT,
        killed_in(Storage, "delete_files", lambda _, paths: any(path.startswith("state/") for path in paths)),
    ),
}


@pytest.mark.parametrize("name", sampled(LEFTOVERS))
def test_a_leftover_is_found_removed_and_the_next_run_is_exact(bank, weir, name):
    kind, plant = LEFTOVERS[name]
    plant(bank)
    done = [1, 2, 3, 4, 5]
    report = check(bank)
    assert kind in kinds(report) and not report.damage, report.findings
    assert {finding.severity for finding in report.findings} == {Severity.LEFTOVER}
    assert weir(bank.site, "fsck", "small").code == 0, "leftovers are no damage"
    before = live(bank)

    ended = weir(bank.site, "fsck", "small", "--repair", "--yes")
    assert ended.code == 0, ended
    assert ended.out.index("plan") < ended.out.index("Repaired.")
    after = live(bank)
    assert after.items() >= before.items(), "whatever was named is as it was"
    assert check(bank).findings == ()
    bank.epochs(6)
    bank.assert_exact(*done, 6)
    bank.site.assert_no_orphans()
    # A killed epoch may have read the very file that `epochs` delivers again.
    assert kinds(check(bank)) <= {Kind.DELIVERED_AGAIN}


@pytest.mark.long
def test_an_unpublished_checkpoint_is_published_by_the_repair_itself(bank, weir):
    LEFTOVERS["killed before the publication"][1](bank)
    assert len(bank.site.table("booked")) == 50
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    assert len(bank.site.table("booked")) == 60
    assert bank.ids() == [2, 4, 5, 6], "a repair does not prune: that was not in its plan"


def test_rows_that_the_tables_log_still_mentions_are_no_orphans(bank):
    """A compaction removed them from the table's newest version: an older version can still be read with them."""
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.optimize.compact()
    assert staged_exists(bank, 1) and not any("data/" in uri for uri in table.file_uris())
    assert check(bank).findings == ()
    table.create_checkpoint()
    for entry in sorted((bank.site.storage / "tables/booked/_delta_log").glob("*.json")):
        entry.unlink()  # cleaned up: only the checkpoint is left, and it remembers
    assert check(bank).findings == ()


def test_foreign_files_are_reported_and_never_deleted(bank, weir):
    foreign = [
        "notes.txt",
        "backup/state/accounts/000008.sst",
        "state/readme.md",
        "state/accounts/g1-e2/000077.sst",
        f"state/accounts/g1-e2/0-{LOST}/nested/000077.sst",
        "channels/checked/g1-e2/rows.parquet",
        "tables/elsewhere/part-0.parquet",
        "tables/booked/part-0.parquet",
        "tables/booked/data/g1-e2/mine.parquet",
        "registry/notes.txt",
        "registry/checkpoints/mine.parquet",
        "coordinator/notes.json",
    ]
    for name in foreign:
        copy(newest_state, name)(bank)
    before = bank.site.objects()
    report = check(bank)
    assert {finding.path for finding in report.findings} == set(foreign)
    assert kinds(report) == {Kind.FOREIGN_FILE}
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    assert bank.site.objects() == before


# -- the plan, and who agrees to it


@pytest.mark.long
def test_without_consent_the_plan_is_shown_and_nothing_happens(bank, weir):
    plant_orphans(bank)
    before = bank.site.objects()
    ended = weir(bank.site, "fsck", "small", "--repair")
    assert ended.code == 2 and "--yes" in ended.err
    assert f"delete: state/accounts/g1-e2/0-{LOST}/000077.sst" in ended.out
    ended_with_json = weir(bank.site, "fsck", "small", "--repair", "--json")
    assert ended_with_json.code == 2 and len(json.loads(ended_with_json.out)["plan"]["delete"]) == 2
    assert bank.site.objects() == before


@pytest.mark.parametrize(("typed", "code", "left"), [("n", 1, 2), ("y", 0, 0)])
def test_a_person_at_the_terminal_is_asked(bank, weir, monkeypatch, typed, code, left):
    plant_orphans(bank)
    terminal = io.StringIO(f"{typed}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    ended = weir(bank.site, "fsck", "small", "--repair")
    assert (ended.code, "Nothing was changed." in ended.err) == (code, code == 1)
    assert len(check(bank).findings) == left


@pytest.mark.long
def test_what_appears_after_the_plan_was_shown_is_left(bank):
    plant_orphans(bank)
    shown = plan_repair(check(bank))
    copy(newest_state, f"state/accounts/g1-e3/0-{LOST}/000078.sst")(bank)
    with claimed(bank.site.pipeline, bank.site.settings) as owner:
        done = checks.repair(owner.context, shown)
    assert {finding.path for finding in done.delete} == {finding.path for finding in shown.delete}
    assert [finding.path for finding in check(bank).findings] == [f"state/accounts/g1-e3/0-{LOST}/000078.sst"]


def test_a_repair_does_not_cost_the_last_good_checkpoint(bank, weir):
    """The newest is damaged and unpublished. Pruning by the book would drop the older ones that are whole."""
    LEFTOVERS["killed before the publication"][1](bank)
    last(bank.site.storage, "state/accounts/g*-e6/*/*.sst").unlink()
    ended = weir(bank.site, "fsck", "small", "--repair", "--yes")
    assert ended.code == 1
    assert [(checkpoint.id, checkpoint.intact) for checkpoint in check(bank).checkpoints] == [
        (2, True),
        (4, True),
        (5, True),
        (6, False),
    ]
    assert len(bank.site.table("booked")) == 60, "its rows were whole, and are published"


def test_what_a_running_restore_reads_is_kept(bank, weir):
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    oldest = next(row for row in registry.checkpoints() if row.id == 4)
    with ReaderHold(storage, registry, oldest, "a restore") as hold:
        named = {file.path for file in registry.files(oldest) if file.kind != OUTPUT}
        # Pruning drops the row, sees the hold, leaves the rest.
        storage.delete_files(registry.drop_rows(registry.generation(), [oldest.id]))
        assert check(bank).findings == ()
        plant_orphans(bank)
        assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
        assert named <= bank.site.objects().keys()
        assert hold is not None
    report = check(bank)
    assert kinds(report) == {Kind.ORPHAN_LISTING, Kind.STRAY_PUBLICATION, Kind.ORPHAN_OBJECT}
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    assert check(bank).findings == ()


# -- whatever lies there, what is live stays


CHANCES = st.lists(
    st.tuples(
        st.sampled_from(["state", "channels", "tables", "registry", "coordinator", "foreign", "damage"]),
        st.integers(1, 4),
        st.integers(1, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(chances=CHANCES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.long
def test_no_mix_of_rubbish_makes_a_repair_touch_what_is_live(base, tmp_path, chances):
    bank = Bank(base.site.copied_to(tmp_path / uuid.uuid4().hex))
    harmed = False
    for number, (where, generation, epoch, half) in enumerate(chances):
        attempt = f"{number}-{uuid.uuid4().hex}"
        name = f"g{generation}-e{epoch}"
        tmp = ".tmp-" if half else ""
        match where:
            case "state":
                copy(newest_state, f"state/accounts/{name}/{attempt}/{tmp}000099.sst")(bank)
            case "channels":
                copy(newest_state, f"channels/checked/{name}/{tmp}{attempt}.parquet")(bank)
            case "tables":
                copy(newest_state, f"tables/booked/data/{name}/{tmp}{attempt}.parquet")(bank)
            case "registry":
                copy(newest_state, f"registry/pins/data/{tmp}{epoch:020d}-{uuid.uuid4().hex}.parquet")(bank)
            case "coordinator":
                copy(newest_state, f"coordinator/{tmp}{number}")(bank)
            case "foreign":
                copy(newest_state, f"{tmp}notes/{number}.txt")(bank)
            case "damage":
                harmed = True
                names = [name for name in live(bank) if name.startswith(("state/", "channels/", "tables/"))]
                (bank.site.storage / names[epoch % len(names)]).unlink()
    before = live(bank)
    names = set(before)
    with claimed(bank.site.pipeline, bank.site.settings) as owner:
        newest = owner.context.generation
        checks.repair(owner.context)
    after = live(bank)
    assert {name: after.get(name) for name in names} == before
    report = check(bank)
    assert bool(report.damage) == harmed
    left = [
        finding for finding in report.findings if finding.severity is Severity.LEFTOVER and finding.repair is not None
    ]
    assert newest == 4 and all("g4-e" in (finding.path or "") for finding in left), (
        "only what bears the repair's own generation"
    )
    shutil.rmtree(bank.site.root)


# -- beside a coordinator that lives


@pytest.mark.long
def test_nothing_is_wrong_at_any_moment_of_a_running_coordinator(bank, monkeypatch):
    """Between its epochs, and before every single write, commit, publication and deletion within them."""
    seen, one_at_a_time = 0, threading.Lock()  # epochs' steps run beside each other

    def look() -> None:
        nonlocal seen
        storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
        if not lease.watch(storage):
            return
        with one_at_a_time:
            report = check(bank, quick=True)
            seen += 1
            # What it is deleting at this very moment is not named any more: left over, as long as it is there.
            assert report.alive and kinds(report) <= {Kind.ORPHAN_OBJECT}, report.findings

    for owner, name in (
        (Storage, "put_file"),
        (Storage, "put_bytes"),
        (Storage, "delete_files"),
        (fenced_table, "commit"),
        (log_entries, "append"),
        (FencedTable, "commit"),
    ):
        real = getattr(owner, name)

        def wrapped(*arguments, _real=real, **named):
            if not any(str(part).startswith("coordinator/") for part in arguments):
                look()
            return _real(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)
    bank.land(6)
    for _ in run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()):
        assert check(bank).findings == ()
    assert seen > 25, seen
    monkeypatch.undo()
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def test_epochs_that_complete_in_the_middle_of_every_look_are_no_damage(bank, monkeypatch):
    """Right after the registry was read another epoch commits, publishes and prunes: rows, objects and tables have
    moved on."""
    upcoming = iter(range(6, 20))
    real = checking.survey

    def then_an_epoch(*arguments):
        seen = real(*arguments)
        bank.epochs(next(upcoming))
        return seen

    monkeypatch.setattr(checking, "survey", then_an_epoch)
    report = check(bank)
    assert next(upcoming) == 8, "there was something to find at first sight, so it looked twice"
    assert report.findings == ()
    assert [checkpoint.id for checkpoint in report.checkpoints] == [2, 5, 6]


def test_damage_is_found_beside_a_running_coordinator_too(bank, weir):
    with bank.coordinator():
        until_alive(bank)
        (bank.site.storage / "state/accounts").glob("g*-e5/*/*.sst").__next__().unlink()
        facts = json.loads(weir(bank.site, "fsck", "small", "--json").out)
        assert facts["coordinator_alive"] and [finding["kind"] for finding in facts["findings"]] == ["missing object"]
        weir(bank.site, "stop", "small")


def test_a_running_coordinator_is_asked_to_repair(bank, weir):
    with bank.coordinator():
        until_alive(bank)
        LEFTOVERS["rows of a speculative attempt that lost"][1](bank)
        plant_orphans(bank)
        generation = bank.registry.generation()
        assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
        assert bank.registry.generation() == generation, "it was not taken away from it"
        assert check(bank).findings == ()
        weir(bank.site, "stop", "small")
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)


def until_alive(bank: Bank) -> None:
    """Until a coordinator is through with what its predecessor left, and answers."""
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    until(lambda: lease.watch(storage))
    asked = requests.send(
        storage, requests.Request("barrier", trigger="sensor")
    )  # there is nothing to read: it is put away
    until(lambda: storage.read_bytes(asked.name) is None)
    assert registry.generation()


def test_a_savepoint_by_name_is_kept_by_every_repair(bank, weir):
    plant_orphans(bank)
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    assert [(pin.kind, pin.name) for pin in bank.registry.pins()] == [(SAVEPOINT, "before")]
    assert check(bank).checkpoints[0].names == ("before",)
