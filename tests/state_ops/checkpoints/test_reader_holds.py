from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldWatcher, ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import processes
from state_ops.errors import FencedError, PrunedError, WeirError
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.pins import BRANCH, SAVEPOINT, Pin
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.paths import HOLDS
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP
from tests.state_ops.checkpoints.test_retention import Keeper, files, named

LONG = 3600.0


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


@pytest.fixture
def keeper(storage) -> Keeper:
    """Two checkpoints, of which the next prune drops the first; objects 1 and 2 are the first's, of which the second
    shares 2."""
    keeper = Keeper(storage, keep=2)
    first = files("cp1", "1", "2")
    keeper.commit(1, None, first)
    keeper.commit(2, 1, files("cp2", "3", old=named(first, "2")))
    keeper.keep = 1
    return keeper


def first(keeper: Keeper) -> Checkpoint:
    return keeper.registry.checkpoints()[0]


def hold(keeper: Keeper, checkpoint: Checkpoint) -> ReaderHold:
    """As another process would: with a registry of its own."""
    return ReaderHold(keeper.storage, Registry(keeper.storage, APP), checkpoint, "a restore", LONG)


def pin(checkpoint: Checkpoint, name: str = "before", kind: str = SAVEPOINT) -> Pin:
    return Pin(kind, name, checkpoint.id, checkpoint.commit_id, datetime(2024, 5, 1, tzinfo=UTC), "a test")


# -- restores that run


def test_a_hold_comes_before_the_row_is_looked_at(keeper):
    """Pruning drops rows and then looks for holds; were the order here the other way round, both could miss each
    other."""
    seen = []
    held = first(keeper)
    registry = Registry(keeper.storage, APP)
    real = registry.holds

    def holds(checkpoint: Checkpoint) -> bool:
        seen.extend(file.path for file in keeper.storage.list(HOLDS))
        return real(checkpoint)

    registry.holds = holds  # type: ignore[method-assign]
    with ReaderHold(keeper.storage, registry, held, "a restore", LONG):
        assert len(seen) == 1


def test_what_a_restore_reads_stays_until_it_is_done(keeper):
    with hold(keeper, first(keeper)) as held:
        assert [row.id for row in keeper.registry.checkpoints()] == [1, 2]
        decided = retention.plan(
            keeper.registry.checkpoints(), keeper.listings(), 1
        )  # it was planned before the hold came
        assert retention.apply(keeper.registry, keeper.storage, keeper.generation, decided, keeper.watcher) == ()
        assert [row.id for row in keeper.registry.checkpoints()] == [2]
        assert keeper.objects() == {"1", "2", "3"}, "the row is gone; all that the restore reads is there"
        keeper.prune()
        assert keeper.objects() == {"1", "2", "3"}
        with pytest.raises(PrunedError):
            held.check()
    assert {file.name for file in deleted(keeper)} == {"1"}
    assert keeper.objects() == {"2", "3"}
    assert keeper.registry.orphan_listings() == []


def test_a_restore_that_comes_right_before_the_row_goes_is_seen(keeper, monkeypatch):
    """It has written its hold and seen the row: pruning looks for holds only after it has dropped the row."""
    held = hold(keeper, first(keeper))
    real = Registry.drop_rows

    def drop_rows(*arguments):
        held.__enter__()
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "drop_rows", drop_rows)
        keeper.prune()
    assert keeper.objects() == {"1", "2", "3"}
    held.__exit__()


def deleted(keeper: Keeper) -> tuple[StateFile, ...]:
    nothing = retention.RetentionPlan((), ())
    return retention.apply(keeper.registry, keeper.storage, keeper.generation, nothing, keeper.watcher)


def test_a_restore_that_comes_after_the_row_went_holds_nothing(keeper):
    gone = first(keeper)
    keeper.registry.drop_rows(keeper.generation, [CheckpointId(1)])
    with pytest.raises(PrunedError, match="Checkpoint 1 was pruned"):
        hold(keeper, gone).__enter__()
    assert not list(keeper.storage.list(HOLDS))
    assert {file.name for file in deleted(keeper)} == {"1"}


def test_an_object_that_a_held_stray_shares_stays_with_it(keeper):
    with hold(keeper, first(keeper)):
        decided = retention.plan(keeper.registry.checkpoints(), keeper.listings(), 1)
        retention.apply(keeper.registry, keeper.storage, keeper.generation, decided, keeper.watcher)
        keeper.commit(3, 2, files("cp3", "4"))
        assert keeper.prune().drop == (2,)
        assert keeper.objects() == {"1", "2", "4"}, "2 is named by the held checkpoint alone now"


def test_a_hold_of_a_process_that_is_gone_counts_no_more(keeper, storage):
    held = first(keeper)
    code = (
        "import os, sys; from state_ops.storage.storage import Storage; from state_ops.checkpoints.registry import"
        " Registry\nfrom state_ops.checkpoints.reader_holds import ReaderHold\nstorage = Storage(sys.argv[1]); registry"
        " = Registry(storage, sys.argv[2])\nReaderHold(storage, registry, registry.checkpoints()[0], 'a restore',"
        " 3600.0).__enter__()\nsys.stdout.write('held'); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, storage.uri, APP], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("held", -9), ended.stderr
    assert len(list(storage.list(HOLDS))) == 1
    keeper.prune()
    assert keeper.objects() == {"2", "3"}
    assert keeper.watcher.dead(storage) == [file.path for file in storage.list(HOLDS)]
    assert held.id == 1


def test_a_hold_on_another_host_counts_while_its_counter_moves(keeper, storage, monkeypatch):
    with hold(keeper, first(keeper)) as held:
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        watcher = HoldWatcher()
        assert len(watcher.live(storage, now=0.0)) == 1, "nobody knows yet, so it counts"
        assert len(watcher.live(storage, now=2.9 * LONG)) == 1
        held._write()
        assert len(watcher.live(storage, now=3.1 * LONG)) == 1, "it has moved"
        assert len(watcher.live(storage, now=6.0 * LONG)) == 1
        assert watcher.live(storage, now=6.2 * LONG) == {}
        assert len(watcher.dead(storage, now=6.2 * LONG)) == 1
        assert len(HoldWatcher().live(storage, now=6.2 * LONG)) == 1, "another observer has not watched for long enough"


def test_a_hold_in_another_container_is_no_dead_process_of_this_one(keeper, storage, monkeypatch):
    with monkeypatch.context() as contained:
        contained.setattr(processes, "pid_namespace", lambda: "this boot/another container")
        held = hold(keeper, first(keeper))
    with held:
        held._held = replace(held._held, pid=2**22 + 1)
        held._write()
        watcher = HoldWatcher()
        assert len(watcher.live(storage, now=0.0)) == len(watcher.live(storage, now=2.9 * LONG)) == 1
        assert watcher.live(storage, now=3.1 * LONG) == {}


def test_case_37_a_clock_that_runs_backwards_ends_no_hold(keeper, storage, monkeypatch):
    with hold(keeper, first(keeper)):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        watcher = HoldWatcher()
        assert len(watcher.live(storage, now=1e9)) == 1
        assert len(watcher.live(storage, now=5.0)) == 1
        assert len(watcher.live(storage, now=5.0 + 2.9 * LONG)) == 1
        assert watcher.live(storage, now=5.0 + 3.1 * LONG) == {}


def test_a_hold_that_was_taken_for_dead_is_not_put_back(keeper, storage):
    held = ReaderHold(storage, Registry(storage, APP), first(keeper), "a restore", 0.01)
    with held:
        (path,) = [file.path for file in storage.list(HOLDS)]
        storage.delete(path)
        held._thread.join(10)
        assert not held._thread.is_alive()
        assert storage.read_bytes(path) is None
        with pytest.raises(PrunedError):
            held.check()


def test_holds_say_whose_they_are(keeper, storage):
    with hold(keeper, first(keeper)):
        (raw,) = [json.loads(storage.read_bytes(file.path) or b"") for file in storage.list(HOLDS)]
    assert (raw["checkpoint_id"], raw["purpose"], raw["host"]) == (1, "a restore", socket.gethostname())
    assert processes.process_lives(raw["host"], raw["pid"], raw["born"], raw["pids"])
    assert not list(storage.list(HOLDS))


# -- names


def test_a_name_keeps_a_checkpoint_until_it_is_taken_away(keeper):
    saved = first(keeper)
    keeper.registry.pin(keeper.generation, pin(saved))
    keeper.registry.pin(keeper.generation, pin(saved, "experiment", BRANCH))
    assert keeper.prune().drop == ()
    assert keeper.registry.unpin(keeper.generation, SAVEPOINT, "before")
    assert keeper.prune().drop == (), "the branch still reads from it"
    assert not keeper.registry.unpin(keeper.generation, SAVEPOINT, "experiment"), "no savepoint of that name"
    assert keeper.registry.unpin(keeper.generation, BRANCH, "experiment")
    assert keeper.prune().drop == (1,)
    assert keeper.objects() == {"2", "3"}


def test_a_name_is_given_once_and_only_to_what_is_there(keeper):
    saved, head = keeper.registry.checkpoints()
    keeper.registry.pin(keeper.generation, pin(saved))
    keeper.registry.pin(keeper.generation, pin(saved))
    assert len(keeper.registry.pins()) == 1, "asked twice, given once"
    with pytest.raises(WeirError, match="a savepoint 'before' already, of checkpoint 1"):
        keeper.registry.pin(keeper.generation, pin(head))
    keeper.registry.unpin(keeper.generation, SAVEPOINT, "before")
    keeper.prune()
    with pytest.raises(PrunedError):
        keeper.registry.pin(keeper.generation, pin(saved))


def test_only_the_owner_names_and_unnames(keeper, storage):
    keeper.registry.pin(keeper.generation, pin(first(keeper)))
    Registry(storage, APP).take_over()
    with pytest.raises(FencedError):
        keeper.registry.pin(keeper.generation, pin(keeper.registry.checkpoints()[1], "late"))
    with pytest.raises(FencedError):
        keeper.registry.unpin(keeper.generation, SAVEPOINT, "before")
    assert [pin.name for pin in Registry(storage, APP).pins()] == ["before"]


# -- what the reasons say


def test_every_reason_is_said(keeper):
    rows = keeper.registry.checkpoints()
    keeper.registry.pin(keeper.generation, pin(rows[0]))
    why = retention.reasons(rows, 1, keeper.registry.pins(), {CheckpointId(1): ["a sink lacks its rows"]})
    assert why == {1: ("savepoint 'before'", "a sink lacks its rows"), 2: ("the newest checkpoint",)}
    assert retention.reasons(rows, 2) == {1: ("among the newest 2",), 2: ("the newest checkpoint",)}
    assert retention.reasons(rows, 0) == {1: (), 2: ()}


def test_a_savepoint_takes_no_place_among_the_retained(keeper):
    rows = keeper.registry.checkpoints()
    why = retention.reasons(rows, 1, [pin(rows[1])])
    assert why == {1: ("among the newest 1",), 2: ("savepoint 'before'", "the newest checkpoint")}


def test_the_explanation_agrees_with_the_plan(keeper):
    rows, listings = keeper.registry.checkpoints(), keeper.listings()
    fates, objects = retention.explain(rows, listings, 1)
    decided = retention.plan(rows, listings, 1)
    assert [fate.id for fate in fates if not fate.stays] == list(decided.drop)
    assert {fate.path for fate in objects if not fate.stays} == {file.path for file in decided.delete}
    assert [(fate.id, fate.bytes, fate.frees) for fate in fates] == [(1, 20, 10), (2, 20, 0)]
    assert {fate.path.rsplit("/", 1)[-1]: fate.named_by for fate in objects} == {"1": (), "2": (2,), "3": (2,)}


@pytest.mark.parametrize("content", [b"\0" * 120, b'{"checkpoint_id": 1, "comm', b""], ids=["zeros", "half", "nothing"])
def test_a_hold_that_cannot_be_read_keeps_everything_until_it_is_silent(keeper, content):
    """Whose it is cannot be told: it may be of a restore that goes on, whose next beat writes it anew."""
    path = f"{HOLDS}/{'d' * 32}.json"
    keeper.storage.put_bytes(path, content)
    watcher, gone = HoldWatcher(), first(keeper)
    assert list(watcher.live(keeper.storage, now=0)) == [path] and watcher.dead(keeper.storage, now=14) == []
    objects = keeper.objects()
    assert keeper.prune().drop == (gone.id,)
    assert keeper.objects() == objects
    assert [orphan.commit_id for orphan in keeper.registry.orphan_listings()] == [gone.commit_id]
    assert watcher.dead(keeper.storage, now=1e9) == [path]
