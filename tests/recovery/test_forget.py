"""A key that is forgotten is in no file of the state any more, in no retained checkpoint and no savepoint; all others
stay what they were, byte by byte; and wherever it is cut off, either everything is old or everything is new."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.backends import composite
from state_ops.backends.base import BEYOND
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import gate_hold, lease, publishing_refused, requests
from state_ops.delta.fenced_table import FencedTable
from state_ops.errors import BusyError, DamageError, GateError, PrunedError, TransientError, WeirError
from state_ops.ids import CheckpointId
from state_ops.keyed.forget import ForgottenKey
from state_ops.records.checkpoint import EDIT, REWRITTEN, Checkpoint, stats_of
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery import test_unaligned as unaligned
from tests.recovery.conftest import weir as weir
from tests.recovery.harness import Site
from tests.recovery.small import Bank, until
from tests.tools.sampling import sampled
from weir import (
    Epoch,
    KeyedState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    Timestamp,
    agg,
    aggregate,
    deduplicate,
    delta,
    expect,
    files,
    on_table,
    stage,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.inspection.snapshot_files import opened
from weir.operations import forks, state_delete
from weir.ownership import savepoints
from weir.ownership.local_paths import local_directory
from weir.restore.recovery import owning
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, open_storage, run

SECRET = "qZ8vXw2mLk9Tb4Yh7Rj1Nc6"  # incompressible, so that it stands in compressed blocks as it is
BACKENDS = ("rocksdb", "filesystem", "memory")


def land(bank: Bank, *numbers: int, ids: tuple[str, ...] = (SECRET,)) -> None:
    """Files that book their number for the secret key, too."""
    bank.site.landing.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        keys = [*ids, *[f"k{key}" for key in range(8)]]
        rows = pa.table({"id": keys, "at": list(range(len(keys))), "amount": [number] * len(keys)})
        pq.write_table(rows, bank.site.landing / f"{number:05}.parquet")


def go(bank: Bank, *numbers: int, ids: tuple[str, ...] = (SECRET,)) -> None:
    land(bank, *numbers, ids=ids)
    list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def forget(bank: Bank, uid: str = "accounts", key: str = SECRET) -> state_delete.Deletion:
    site = bank.site
    return state_delete.delete(site.pipeline, site.settings, uid, [key], executor=InMemoryExecutor())


def raw(root: Path, key: str = SECRET) -> list[str]:
    """The files below a directory that have a key's bytes: state as it is on disk, Parquet as what it decodes to."""
    files = []
    for file in root.rglob("*"):
        if not file.is_file():
            continue
        data = file.read_bytes()
        if file.suffix == ".parquet":
            data = json.dumps(pq.read_table(file).to_pylist(), default=str).encode()
        if key.encode() in data or key.encode().hex().encode() in data:
            files.append(str(file.relative_to(root)))
    return files


def has_key(bank: Bank) -> list[str]:
    """The files of state, of the registry and of local disks that have the key's bytes."""
    places = (bank.site.storage / "state", bank.site.storage / "registry", bank.site.root / "work")
    return [f"{place.name}/{name}" for place in places for name in raw(place)]


def entries(site: Site, uid: str = "accounts") -> dict[int, dict[bytes, bytes]]:
    """By checkpoint, all entries of a stage's state."""
    _, registry = open_storage(site.pipeline, site.settings)
    states: dict[int, dict[bytes, bytes]] = {}
    for row in registry.checkpoints():
        states[row.id] = {}
        with state_reader.viewed(site.pipeline, site.settings, uid, int(row.id), "test") as view:
            for taken in view.snapshots.values():
                with opened(view.storage, view.options, taken, view.backend) as backend:
                    states[row.id] |= dict(backend.scan(b"", BEYOND))
    return states


def without(states: dict[int, dict[bytes, bytes]], key: str = SECRET) -> dict[int, dict[bytes, bytes]]:
    name = key.encode()
    return {id: {at: value for at, value in state.items() if name not in at} for id, state in states.items()}


def is_sound(weir: Callable, bank: Bank) -> None:
    checked = weir(bank.site, "fsck", bank.site.pipeline.name, "--json")
    assert (checked.code, json.loads(checked.out)["findings"]) == (0, []), checked.out


@pytest.mark.parametrize("backend", sampled(BACKENDS))
def test_a_key_is_in_no_file_of_any_retained_checkpoint_and_all_others_are_as_they_were(tmp_path, weir, backend):
    bank = Bank.at(
        tmp_path,
        WEIR_SPARK__PARALLELISM="2",
        WEIR_CHECKPOINTS__NUM_RETAINED="3",
        WEIR_STATE__BACKEND=backend,
    )
    go(bank, 1, 2)
    assert weir(bank.site, "savepoint", "small", "--name", "two").code == 0
    go(bank, 3, 4, 5, 6)
    assert bank.ids() == [2, 4, 5, 6]
    before = entries(bank.site)
    assert len(has_key(bank)) > 4, "the test sees keys in files"

    done = weir(bank.site, "state", "delete", "small", "accounts", "--key", SECRET, "--yes", "--json")

    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [(row["checkpoint"], row["savepoints"], row["entries"]) for row in report["checkpoints"]] == [
        (2, ["two"], 1),
        (4, [], 1),
        (5, [], 1),
        (6, [], 1),
    ]
    assert (report["before"], report["checkpoint"]) == (6, 7)
    assert has_key(bank) == []
    after = entries(bank.site)
    assert after.keys() == {2, 5, 6, 7} and after[7] == after[6]
    assert {id: after[id] for id in (2, 5, 6)} == {id: without(before)[id] for id in (2, 5, 6)}
    head = bank.registry.head()
    assert head.kind == EDIT and SECRET not in head.reason and REWRITTEN not in head.totals
    is_sound(weir, bank)
    bank.site.assert_no_orphans()
    go(bank, 7, 8, ids=("other",))
    assert SECRET not in bank.state() and bank.state()["k1"] == (8, 36)
    is_sound(weir, bank)
    bank.site.assert_no_orphans()
    assert weir(bank.site, "restore", "small", "--savepoint", "two", "--storage").code == 0
    assert weir(bank.site, "rewind", "small", "--to", "two", "--yes").code == 0
    assert bank.state() == {f"k{key}": (2, 3) for key in range(8)}
    is_sound(weir, bank)
    assert has_key(bank) == []


def test_samples_of_all_gates_go_and_the_note_of_a_hold_too(tmp_path):
    """Another stage whose key is called otherwise has the same value; its gate has refused a row of it."""
    asked = expect("ExpectColumnValuesToBeInSet", column="amount", value_set=[0], on_failure="warn")
    holds = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=2)

    first = replace(small.accounts, gates=(holds,))
    second = aggregate("second", first, key="at", n=agg.count(), top=agg.max("amount"))
    gated = replace(second, gates=(replace(asked, arguments=(("column", "top"), ("value_set", [0]))),))
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="3")
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (first, gated), max_parallelism=8)))
    bank.epochs(1, 2)
    with pytest.raises(GateError):
        bank.epochs(3)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    assert gate_hold.is_there(storage)
    publishing_refused.note(storage, {"booked": (CheckpointId(2), ValueError("k1 is there already"))})
    assert any(verdict["keys"] for row in bank.registry.checkpoints() for verdict in row.operators["second"].gates)
    done = state_delete.delete(bank.site.pipeline, bank.site.settings, "accounts", ["k1"])
    assert not gate_hold.is_there(storage) and not publishing_refused.read(storage)
    for row in bank.registry.checkpoints():
        assert all(not verdict["sample"] and not verdict["keys"] for verdict in row.operators["second"].gates)
    remains = {(place.kind, place.name) for place in done.remains}
    assert {("state", "second"), ("dagster events", "small"), ("logs", "small")} <= remains


def test_samples_go_from_checkpoints_in_which_the_stage_has_no_state_too(tmp_path):
    """It came with a later deploy."""
    asked = expect("ExpectColumnValuesToBeInSet", column="top", value_set=[0], on_failure="warn")
    sums = aggregate("second", small.SOURCE, key="id", top=agg.max("amount"))
    gated = replace(sums, gates=(asked,))
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="3")
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (gated,), max_parallelism=8)))
    bank.epochs(1)
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (small.accounts, gated), max_parallelism=8)))
    bank.epochs(2)
    first, *_ = bank.registry.checkpoints()
    assert not stats_of(first, "accounts").has_state and any(verdict["keys"] for verdict in gates_of(first))
    state_delete.delete(bank.site.pipeline, bank.site.settings, "accounts", ["k1"])
    rows = bank.registry.checkpoints()
    assert [row.id for row in rows] == [1, 2, 3]
    assert all(not verdict["sample"] and not verdict["keys"] for row in rows for verdict in gates_of(row))
    assert fsck.examine(bank.site.pipeline, bank.site.settings).findings == ()
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    bank.epochs()
    assert bank.state()["k0"] == (1, 2)


def gates_of(row: Checkpoint) -> Sequence[dict[str, Any]]:
    return row.operators["second"].gates


def test_a_dry_run_says_what_has_the_key_and_what_remains_and_changes_nothing(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    go(bank, 1, 2)
    before = bank.site.objects()
    tried = weir(bank.site, "state", "delete", "small", "accounts", "--key", SECRET, "--dry-run", "--json")
    report = json.loads(tried.out)
    assert tried.code == 0 and report["checkpoint"] is None
    assert [row["entries"] for row in report["checkpoints"]] == [1, 1]
    assert {(place["kind"], place["name"]) for place in report["remains"]} == {
        ("sink", "booked"),
        ("input", "landing"),
        ("logs", "small"),
        ("local disks", "of other hosts"),
    }
    shown = weir(bank.site, "state", "delete", "small", "accounts", "--key", SECRET, "--dry-run")
    assert shown.code == 0 and "remains  sink booked" in shown.out
    expected = on_table("booked", expect("ExpectColumnToExist", column="at"))
    judged = replace(bank.site.pipeline, on_restore=(expected,))
    planned = state_delete.plan(judged, bank.site.settings, "accounts", [SECRET])
    assert "gate results" in {place.kind for place in planned.remains}, "weir report asks what is expected of a restore"
    asked = weir(bank.site, "state", "delete", "small", "accounts", "--key", SECRET)
    assert asked.code == 2 and "--yes" in asked.err
    assert bank.site.objects() == before and SECRET in bank.state()
    strange = weir(bank.site, "state", "delete", "small", "accounts", "--key", "a", "--key", "b", "--yes")
    assert strange.code == 2 and "The key of accounts has 1 column" in strange.err
    assert weir(bank.site, "state", "delete", "small", "nowhere", "--key", "a", "--yes").code == 2


def test_a_key_that_was_deleted_or_never_there_leaves_no_trace_either(tmp_path, weir):
    """RocksDB keeps what was deleted, and the deletion itself, until it merges files."""
    bank = Bank.at(tmp_path)
    go(bank, 1)
    site = bank.site
    with state_reader.viewed(site.pipeline, site.settings, "accounts", None, "test") as view:
        rows = pa.concat_tables(view.tables())
    pq.write_table(rows.filter(pa.compute.not_equal(rows["id"], SECRET)), tmp_path / "rows.parquet")
    imported = weir(site, "state", "import", "small", "accounts", "--from", str(tmp_path / "rows.parquet"), "--replace")
    assert imported.code == 0, imported.err
    go(bank, 2)
    done = forget(bank)
    assert SECRET not in bank.state() and has_key(bank) == []
    assert forget(bank).holdings[-1].entries == 0 and done.holdings[-1].entries == 1
    assert forget(bank, key="never-there").holdings[-1].entries == 0
    is_sound(weir, bank)


@pytest.mark.long
def test_a_subtask_that_had_the_key_before_the_parallelism_changed_has_no_trace_of_it(tmp_path, weir, monkeypatch):
    monkeypatch.setattr(composite, "SMALL_BYTES", 0)
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="1", WEIR_CHECKPOINTS__NUM_RETAINED="9")
    go(bank, 1, 2)
    for parallelism in ("4", "3"):
        bank.site = replace(bank.site, options={**bank.site.options, "WEIR_SPARK__PARALLELISM": parallelism})
        go(bank, int(parallelism) + 10)
    before = entries(bank.site)
    assert len({name.split("/")[3].split("-")[0] for name in has_key(bank) if name.startswith("state/")}) >= 1
    forget(bank)
    assert has_key(bank) == []
    assert {id: state for id, state in entries(bank.site).items() if id in before} == without(before)
    is_sound(weir, bank)
    go(bank, 20, ids=())
    bank.site.assert_no_orphans()


# -- who else is there


def test_a_branch_keeps_what_it_reads_and_that_is_said(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    go(bank, 1, 2)
    forks.fork(bank.site.pipeline, bank.site.settings, "fix", 1)
    forks.fork(bank.site.pipeline, bank.site.settings, "now", 2)
    done = forget(bank)
    assert [(holding.checkpoint, holding.stays) for holding in done.holdings] == [(1, "fix"), (2, "now")]
    assert {place.name for place in done.remains if place.kind == "branch"} == {"small@fix", "small@now"}
    assert SECRET not in bank.state(), "the newest checkpoint is without it, whatever branches read"
    is_sound(weir, bank)
    for number in (1, 2):
        assert state_reader.get(bank.site.pipeline, bank.site.settings, "accounts", [SECRET], number)
    for name in ("fix", "now"):
        assert weir(bank.site, "fork", "small", "--drop", name).code == 0
    forget(bank)
    assert has_key(bank) == []
    is_sound(weir, bank)
    bank.site.assert_no_orphans()


def test_what_a_restore_reads_stays_until_it_is_done(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    go(bank, 1, 2)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    with ReaderHold(storage, registry, registry.checkpoints()[0], "weir restore") as hold:
        done = forget(bank)
        assert [place.name for place in done.remains if place.kind == "reader"] == ["checkpoint 1"]
        assert has_key(bank) != []
        with pytest.raises(PrunedError):
            hold.check()
    assert weir(bank.site, "prune", "small").code == 0
    assert has_key(bank) == []
    is_sound(weir, bank)


def test_while_a_coordinator_lives_nothing_is_forgotten(tmp_path):
    bank = Bank.at(tmp_path)
    go(bank, 1)
    with bank.coordinator():
        storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
        until(lambda: lease.watch(storage))
        with pytest.raises(BusyError):
            forget(bank)
        requests.send(storage, requests.Request("stop"))
    assert SECRET in bank.state()


def test_damage_in_a_savepoint_is_found_before_anything_is_changed(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    go(bank, 1, 2)
    victim = next((bank.site.storage / "state").rglob("*.sst"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + b"?")
    with pytest.raises(DamageError):
        forget(bank)
    victim.write_bytes(whole)
    assert bank.ids() == [1, 2] and SECRET in bank.state()
    assert forget(bank).checkpoint > 2
    assert has_key(bank) == []


# -- cut off


class Cut(BaseException):
    """The process is gone."""


def steps(patched: pytest.MonkeyPatch, at: int, happen: Callable[[], None], *, after: bool) -> list[str]:
    """Let something happen before, or right after, the step of this number; returns the steps so far."""
    taken: list[str] = []
    armed: list[bool] = []  # once the pipeline is owned: claims and recoveries are cut off elsewhere
    states = state_delete._states
    patched.setattr(state_delete, "_states", lambda *args: armed.append(True) or states(*args))

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            if not armed:
                return method(self, *args, **kwargs)
            taken.append(f"{owner.__name__}.{name}")
            mine = len(taken) - 1 == at
            if mine and not after:
                happen()
            if len(taken) - 1 > at:
                happen()
            result = method(self, *args, **kwargs)
            if mine and after:
                happen()
            return result

        patched.setattr(owner, name, wrapped)

    for owner, name in (
        (FencedTable, "commit"),
        (FencedTable, "write_table"),
        (Storage, "put_file"),
        (Storage, "delete_files"),
        (Storage, "delete_tree"),
    ):
        counted(owner, name)
    return taken


def _cut() -> None:
    raise Cut


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Bank:
    """A pipeline with a savepoint and two retained checkpoints."""
    bank = Bank.at(tmp_path_factory.mktemp("made") / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    go(bank, 1)
    with owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()) as owner:
        savepoints.save(owner.context, owner.head, "one", "")
    go(bank, 2, 3)
    return bank


def copy_of(template: Bank, root: Path) -> Bank:
    """The same pipeline at another place, with its local files, which are named by where its storage is."""
    site = template.site.copied_to(root)
    here = [
        local_directory(of.settings, of.pipeline, open_storage(of.pipeline, of.settings)[0])
        for of in (template.site, site)
    ]
    (root / "work" / here[0].name).rename(here[1])
    return Bank(site)


STEPS = 29
AFTER = [(True, 19), (True, 20), (True, STEPS - 1)]  # after any other step, storage is as before the one that follows
SAMPLE = {(False, 5), (True, 19), (True, 20), (False, 27)}


@pytest.mark.parametrize(
    ("after", "number"),
    sampled([*((False, number) for number in range(STEPS)), *AFTER], lambda case: case in SAMPLE),
)
def test_cut_off_at_any_step_everything_is_old_or_everything_is_new(
    template, tmp_path, weir, monkeypatch, after, number
):
    before = entries(template.site)
    bank = copy_of(template, tmp_path / "site")
    with monkeypatch.context() as patched:
        taken = steps(patched, number, _cut, after=after)
        with suppress(Cut):
            forget(bank)
    assert len(taken) > number
    new = 4 in bank.ids()
    stored = entries(bank.site)
    assert {id: stored[id] for id in stored if id < 4} == {
        id: state for id, state in (without(before) if new else before).items() if id in stored
    }
    (pin,) = bank.registry.pins()
    assert (pin.name, pin.commit_id) == ("one", bank.registry.checkpoints()[0].commit_id)
    go(bank, 4, ids=())
    assert (SECRET in bank.state()) != new
    assert new == (has_key(bank) == []), "the next owner deletes what no row names"
    is_sound(weir, bank)
    bank.site.assert_no_orphans()
    if not new:
        forget(bank)
        assert has_key(bank) == []
        is_sound(weir, bank)
    assert state_reader.count(bank.site.pipeline, bank.site.settings, "accounts", "one")[1] == {0: 4, 1: 4}


def test_these_are_all_steps(template, tmp_path, monkeypatch):
    bank = copy_of(template, tmp_path / "site")
    with monkeypatch.context() as patched:
        taken = steps(patched, 1000, _cut, after=False)
        forget(bank)
    assert len(taken) == STEPS, " ".join(taken)


def test_a_commit_that_landed_and_was_reported_as_failed_counts(template, tmp_path, weir, monkeypatch):
    bank = copy_of(template, tmp_path / "site")
    commit = FencedTable.commit

    def lost(self, *args, **kwargs):
        commit(self, *args, **kwargs)
        if self.path == "registry/checkpoints":
            raise OSError("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(FencedTable, "commit", lost)
        with pytest.raises(TransientError, match="lost"):
            forget(bank)
    assert bank.ids() == [1, 2, 3, 4]
    go(bank, 4, ids=())
    assert SECRET not in bank.state() and has_key(bank) == []
    is_sound(weir, bank)
    bank.site.assert_no_orphans()


@pytest.mark.long
def test_who_was_fenced_meanwhile_rewrites_and_deletes_nothing(template, tmp_path, weir, monkeypatch):
    bank = copy_of(template, tmp_path / "site")
    before = entries(bank.site)

    def take_over(*_: object) -> None:
        open_storage(bank.site.pipeline, bank.site.settings)[1].take_over()

    commit = Registry.commit

    def late(self, *args, **kwargs):
        take_over()
        return commit(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", late)
        with pytest.raises(WeirError):
            forget(bank)
    assert entries(bank.site) == before
    go(bank, 4, ids=())
    assert SECRET in bank.state()
    is_sound(weir, bank)
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("step", sampled(["commit-2", "commit-1", "delete_files-1"]))
def test_killed_and_done_again(template, tmp_path, weir, step):
    bank = copy_of(template, tmp_path / "site")
    name, number = step.split("-")
    script = f"""
import os, signal
from state_ops.coordination import gate_hold, lease, requests
from state_ops.delta.fenced_table import FencedTable
from state_ops.storage.storage import Storage
from tests.recovery.small import pipeline
from weir.operations import state_delete
from weir.execution.in_process import InMemoryExecutor
from weir.settings import configuration as settings
owner = Storage if {name!r} == "delete_files" else FencedTable
method, left = getattr(owner, {name!r}), [{number}]
copied = state_delete._copied
def killed(self, *args, **kwargs):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(self, *args, **kwargs)
def armed(*args):
    result = copied(*args)
    setattr(owner, {name!r}, killed)
    return result
state_delete._copied = armed
state_delete.delete(pipeline, settings.load(), "accounts", [{SECRET!r}], executor=InMemoryExecutor())
"""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WEIR_")} | bank.site.env
    ended = subprocess.run([sys.executable, "-c", script], env=env, cwd=Path(__file__).parents[2], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    forget(bank)
    assert has_key(bank) == []
    is_sound(weir, bank)
    bank.site.assert_no_orphans()


# -- other kinds of state


class Rider(State):
    rides: int = 0
    recent: ListOf[int]
    spent: MapOf[str, float]
    last: Timestamp | None = None


LANDING = files("{landing}/*.parquet", event_time="at", name="landing")


def fired(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    """Nothing is handed out."""


@stage("riders", source=LANDING, key=["id", "number"], state=Rider, on_timer=fired)
def riders(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    """Everything that a key can have."""
    state.fold(rows, rides=agg.count())
    state.recent.append(rows.select("id", "number", recent=pl.col("amount")))
    state.spent.put(rows.select("id", "number", spent_key=pl.lit("all"), spent=pl.col("amount").cast(pl.Float64)))
    state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(days=30)), at="due")
    state.timers.set(rows, after="30d")


pipeline = Pipeline(
    "every",
    (
        riders,
        window(
            "hourly",
            LANDING,
            key="id",
            every="1h",
            on="at",
            sink=delta.append("hours"),
            total=agg.sum("amount"),
            amounts=agg.count_distinct("amount"),
        ),
        window(
            "sessions", LANDING, key="id", gap="1h", on="at", sink=delta.append("sessions"), total=agg.sum("amount")
        ),
        aggregate(
            "sums",
            LANDING,
            key="id",
            sink=delta.append("sums"),
            total=agg.sum("amount"),
            amounts=agg.count_distinct("amount"),
            ids=agg.count_distinct("at"),
        ),
        deduplicate("unique", LANDING, key="id", on="at", ttl="1d", sink=delta.append("uniques")),
    ),
    max_parallelism=8,
)


@pytest.mark.parametrize("uid", sampled(["riders", "hourly", "sessions", "sums", "unique"]))
def test_lists_maps_timers_windows_and_indices_go_with_the_key(tmp_path, weir, uid):
    site = Site(tmp_path / "site", {"WEIR_SPARK__PARALLELISM": "2"}, pipeline, __name__)
    site.landing.mkdir(parents=True)
    ids = [SECRET, f"{SECRET}2", SECRET[:-1], "k1", "k2"]
    at = pa.array([datetime(2024, 5, 1, 1, tzinfo=UTC)] * 5, pa.timestamp("us", tz="UTC"))
    rows = pa.table({"id": ids, "number": [7] * 5, "at": at, "amount": [1] * 5})
    pq.write_table(
        pa.concat_tables([rows, rows.slice(0, 1).set_column(1, "number", [[8]])]), site.landing / "1.parquet"
    )
    list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    before = {stage.uid: entries(site, stage.uid) for stage in pipeline.stages}
    key = [SECRET, "7"] if uid == "riders" else [SECRET]

    done = state_delete.delete(pipeline, site.settings, uid, key, executor=InMemoryExecutor())

    expected = {"riders": 1 + 2 + 1 + 4, "hourly": 2, "sessions": 2, "sums": 3, "unique": 2}[uid]
    (holding,) = done.holdings
    after = {stage.uid: entries(site, stage.uid) for stage in pipeline.stages}
    lost = before[uid][1].keys() - after[uid][2].keys()
    assert holding.entries == len(lost) == expected
    assert after[uid][2].items() <= before[uid][1].items()
    for entry in lost:
        assert f"{SECRET}\0\0".encode() in entry, "it is this key's, and none's that begins like it"
    others = {other: states for other, states in before.items() if other != uid}
    assert {other: after[other][2] for other in others} == {other: states[1] for other, states in others.items()}
    remains = {place.name: place.why for place in done.remains if place.kind == "state"}
    assert remains.keys() == set(others)
    assert all(why.endswith(f"weir state delete every {other} --key ...") for other, why in remains.items())
    assert weir(site, "fsck", "every").code == 0
    if uid == "riders":
        assert state_reader.get(pipeline, site.settings, uid, [SECRET, "8"]) and not state_reader.get(
            pipeline, site.settings, uid, [SECRET, "7"]
        )


@pytest.mark.long
def test_rows_that_wait_are_named_and_are_applied_by_the_next_run(tmp_path, weir):
    untouched, site = (unaligned.site_at(tmp_path / name, 0.0, unaligned.short) for name in ("untouched", "site"))
    for place in (untouched, site):
        unaligned.land(place, 3)
    unaligned.epochs(untouched)
    reports = run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4))
    for report in reports:
        if report.checkpoint.operators["timed"].files_total and unaligned.waiting(report.checkpoint):
            break
    reports.close()
    head = open_storage(site.pipeline, site.settings)[1].head()
    assert unaligned.waiting(head)

    done = state_delete.delete(site.pipeline, site.settings, "timed", ["k1"], executor=InMemoryExecutor(4))

    (place,) = [place for place in done.remains if place.kind == "waiting rows"]
    assert place.name == "timed" and str(head.id) in place.why
    assert not state_reader.get(site.pipeline, site.settings, "timed", ["k1"])
    after = open_storage(site.pipeline, site.settings)[1].head()
    assert unaligned.waiting(after) == unaligned.waiting(head)
    unaligned.epochs(site)
    expected, state = (place.state("timed").set_index("k").drop(index="k1").sort_index() for place in (untouched, site))
    assert state.equals(expected), "of all other keys every row was applied once"
    assert weir(site, "fsck", "unaligned").code == 0


def test_an_entry_of_a_kind_that_is_not_known_stops_it():
    key = ForgottenKey.of([pa.array(["a"])], 8)
    assert key.owns(key.range[0][:2] + b"\x01" + key.encoded)
    assert not key.owns(b"\xff\xff\x01" + key.encoded)
    with pytest.raises(DamageError, match="of the kind 99"):
        key.owns(key.range[0][:2] + b"\x63" + key.encoded)


def test_rows_that_are_staged_beside_a_table_are_named(tmp_path):
    stages = (
        aggregate("totals", LANDING, key="id", total=agg.sum("amount"), sink=delta.upsert("totals", key="id")),
        aggregate("sums", LANDING, key="id", total=agg.sum("amount"), sink=delta.append("sums")),
    )
    both = Pipeline("both", stages, max_parallelism=8)
    site = Site(tmp_path / "site", {}, both, __name__)
    site.landing.mkdir(parents=True)
    at = pa.array([datetime(2024, 5, 1, 1, tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"id": [SECRET], "number": [7], "at": at, "amount": [1]}), site.landing / "1.parquet")
    list(run(both, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))

    done = state_delete.delete(both, site.settings, "totals", [SECRET], executor=InMemoryExecutor())

    assert [place.name for place in done.remains if place.kind == "staged rows"] == ["totals"]
    staged = list((site.storage / "outputs" / "totals").rglob("*.parquet"))
    assert staged and any(SECRET in pq.read_table(path)["id"].to_pylist() for path in staged)
