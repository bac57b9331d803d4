"""Savepoints, pruning and the end of a pipeline, through the command, with a coordinator alive and without."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest

from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.errors import DamageError, PipelineError, TransientError, WeirError
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.records.pins import Pin
from tests.recovery import small
from tests.recovery.small import Bank, until
from weir.epoch import transitions
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.ownership import Ownership
from weir.restore import start_from
from weir.run import maintenance
from weir.run import run as run_module
from weir.run.run import RunOptions, open_storage, run
from weir.run.stopping import ask_to_stop


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site")


def states(bank: Bank) -> set[str]:
    return {name for name in bank.site.objects() if name.startswith("state/")}


def alive(bank: Bank) -> bool:
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    return bool(lease.alive(lease.read(storage)))


@pytest.mark.long
def test_a_savepoint_of_a_pipeline_at_rest_is_its_newest_checkpoint(bank, weir):
    bank.epochs(1, 2)
    taken = weir(bank.site, "savepoint", "small", "--name", "before-upgrade", "--reason", "new code")
    assert taken.code == 0
    assert taken.out == (
        "No coordinator of small is running, so the newest checkpoint gets the name.\n"
        "Savepoint before-upgrade is checkpoint 2. It stays until it is dropped.\n"
    )
    assert taken.err.startswith("note  the table booked keeps its log for 30 days"), "that is all"
    assert taken.err.count("\n") == 1
    bank.epochs(3, 4, 5)
    assert bank.ids() == [2, 5]
    listed = json.loads(weir(bank.site, "savepoints", "small", "--json").out)
    assert [(row["name"], row["checkpoint"], row["reason"]) for row in listed] == [("before-upgrade", 2, "new code")]
    shown = json.loads(weir(bank.site, "checkpoints", "small", "--json").out)
    assert [(row["id"], row["named"]) for row in shown] == [(2, ["before-upgrade"]), (5, [])]
    bank.assert_exact(1, 2, 3, 4, 5)
    bank.site.assert_no_orphans()


def test_a_running_coordinator_takes_the_savepoint_at_its_next_barrier(bank, weir):
    bank.land(1)
    with bank.coordinator() as reports:
        until(lambda: bank.ids() == [1])
        assert weir(bank.site, "savepoint", "small", "--name", "live").code == 0
        assert bank.ids() == [2], "an epoch of its own, although no file waited"
        assert weir(bank.site, "stop", "small").code == 0
    assert [report.checkpoint.trigger for report in reports] == ["manual", "savepoint"]
    assert "'live'" in reports[-1].checkpoint.reason
    assert [pin.checkpoint_id for pin in bank.registry.pins()] == [2]
    bank.assert_exact(1)


def test_a_stop_can_leave_a_savepoint(bank, weir):
    bank.land(1)
    with bank.coordinator():
        until(lambda: bank.ids() == [1])
        assert weir(bank.site, "stop", "small", "--savepoint", "last").code == 0
    assert [(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()] == [("last", 1)]
    ended = weir(bank.site, "stop", "small", "--savepoint", "again")
    assert ended.code == 0, "nobody runs: of the newest checkpoint"
    assert "Savepoint again is checkpoint 1." in ended.out
    assert [(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()] == [("last", 1), ("again", 1)]


def test_names_are_taken_once_and_bad_ones_refused(bank, weir):
    assert "has no checkpoint" in weir(bank.site, "savepoint", "small", "--name", "early").err
    bank.epochs(1)
    assert weir(bank.site, "savepoint", "small", "--name", "one").code == 0
    again = weir(bank.site, "savepoint", "small", "--name", "one")
    assert again.code == 1 and "already" in again.err and "--drop one" in again.err
    assert weir(bank.site, "savepoint", "small", "--name", "../up").code == 2
    assert weir(bank.site, "savepoint", "small").code == 2
    missing = weir(bank.site, "savepoint", "small", "--drop", "two")
    assert missing.code == 1 and "Its savepoints: one" in missing.err


@pytest.mark.parametrize("running", [False, True], ids=["at-rest", "running"])
def test_a_dropped_savepoint_frees_what_only_it_kept(bank, weir, running):
    bank.epochs(1)
    assert weir(bank.site, "savepoint", "small", "--name", "old").code == 0
    bank.epochs(2, 3)
    assert bank.ids() == [1, 3]
    before = states(bank)
    if running:
        with bank.coordinator():
            until(lambda: alive(bank))
            assert weir(bank.site, "savepoint", "small", "--drop", "old").code == 0
            assert bank.ids() == [3]
            assert weir(bank.site, "stop", "small").code == 0
    else:
        assert weir(bank.site, "savepoint", "small", "--drop", "old").code == 0
        assert bank.ids() == [3]
    assert states(bank) < before, "objects went, none came"
    assert bank.registry.pins() == []
    bank.assert_exact(1, 2, 3)
    bank.site.assert_no_orphans()


def test_case_5_a_newer_savepoint_leaves_the_older_untouched(bank, weir):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "older")
    older = {file.path for row in bank.registry.checkpoints() for file in bank.registry.files(row)}
    bank.epochs(2)
    weir(bank.site, "savepoint", "small", "--name", "newer")
    bank.epochs(3)
    assert [(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()] == [("older", 1), ("newer", 2)]
    assert bank.ids() == [1, 2, 3]
    assert older <= bank.site.objects().keys()


def test_case_6_the_newest_checkpoint_and_all_savepoints_survive(bank, weir):
    for number, name in ((1, "a"), (2, "b"), (3, "c")):
        bank.epochs(number)
        weir(bank.site, "savepoint", "small", "--name", name)
    bank.epochs(4, 5)
    assert bank.ids() == [1, 2, 3, 5], "one checkpoint without a name is retained besides the three savepoints"
    bank.site.assert_no_orphans()


def test_case_4_a_pipeline_starts_from_a_savepoint_of_another_which_stays(bank, weir, tmp_path):
    bank.epochs(1, 2)
    weir(bank.site, "savepoint", "small", "--name", "pending_upload")
    bank.epochs(3)
    saved = bank.site.objects()
    other = Bank(replace(bank.site, pipeline=small.successor))
    origin = f"{bank.site.storage}:pending_upload"
    reports = other.epochs(4, start_from=origin)
    assert [report.checkpoint.id for report in reports] == [4, 5], "what the savepoint, 2, had not read; the start is 3"
    other.epochs(5, 6)
    expected = {f"k{key}": (6, 1 + 2 + 3 + 4 + 5 + 6) for key in range(8)}
    expected |= {f"only-{number}-{key}": (1, number) for number in range(1, 7) for key in range(2)}
    assert other.state() == expected
    assert sorted(set(other.site.table("booked")["amount"])) == [3, 4, 5, 6], "its tables are its own, and start empty"
    assert bank.site.objects() == saved, "nothing of the old pipeline was touched, and no hold is left"
    other.site.assert_no_orphans()
    assert other.epochs(start_from=origin) == [], "given again, the command goes on from there"
    with pytest.raises(PipelineError, match="already"):
        other.epochs(start_from=f"{bank.site.storage}:another")


@pytest.mark.long
def test_a_start_that_was_cut_off_is_not_taken_for_one_that_was_made(bank, weir, monkeypatch):
    bank.epochs(1, 2)
    weir(bank.site, "savepoint", "small", "--name", "pending_upload")
    other, origin = Bank(replace(bank.site, pipeline=small.successor)), f"{bank.site.storage}:pending_upload"
    with monkeypatch.context() as broken:
        broken.setattr(start_from, "copied", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other.epochs(start_from=origin)
    other.epochs(3)
    assert other.ids() != []
    for _ in range(2):
        with pytest.raises(PipelineError, match="so it cannot start from elsewhere"):
            other.epochs(4, start_from=origin)
    assert "only-4-0" not in other.state(), "nothing was run on other state than was asked for"
    other.epochs()
    fresh = Bank(replace(bank.site, pipeline=replace(small.successor, name="fresh")))
    with monkeypatch.context() as broken:
        broken.setattr(start_from, "copied", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fresh.epochs(start_from=origin)
    fresh.epochs(start_from=origin)
    assert fresh.state() == other.state(), "asked for again, it is made"
    assert fresh.epochs(start_from=origin) == []


def _note_of_an_earlier_release(bank: Bank, origin: str) -> None:
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    storage.put_bytes(start_from.ORIGIN, json.dumps({"origin": origin}).encode())


_NOBODY_KNOWS = "nobody can tell any more whether the pipeline was started from there"


@pytest.mark.long
def test_an_earlier_release_s_note_of_a_start_that_nothing_confirms_any_more_is_said(bank, weir, capsys):
    """It may have been cut off before its checkpoint, and the chain's first row is pruned: neither silence nor a
    refusal would be right."""
    bank.epochs(1, 2)
    weir(bank.site, "savepoint", "small", "--name", "pending_upload")
    other, origin = Bank(replace(bank.site, pipeline=small.successor)), f"{bank.site.storage}:pending_upload"
    other.epochs(3)
    _note_of_an_earlier_release(other, origin)
    other.epochs(4)
    assert 1 not in other.ids(), "it began from nowhere"
    other.epochs(5, start_from=origin)
    assert _NOBODY_KNOWS in capsys.readouterr().out
    assert other.state()["k0"] == (5, 15), "it went on from where it was"
    with pytest.raises(PipelineError, match="so it cannot start from elsewhere"):
        other.epochs(start_from=f"{bank.site.storage}:another")


@pytest.mark.long
def test_an_earlier_release_s_start_is_known_by_its_epochs_when_its_first_row_is_pruned(
    bank, weir, monkeypatch, capsys
):
    bank.epochs(1, 2, 3)
    weir(bank.site, "savepoint", "small", "--name", "pending_upload")
    other, origin = Bank(replace(bank.site, pipeline=small.successor)), f"{bank.site.storage}:pending_upload"
    begin = Ownership.begin
    with monkeypatch.context() as before:
        before.setattr(Ownership, "begin", lambda self, *_: begin(self))  # it counted from 1
        other.epochs(4, start_from=origin)
    _note_of_an_earlier_release(other, origin)
    other.epochs(5)
    assert 1 not in other.ids()
    assert other.epochs(start_from=origin) == []
    assert _NOBODY_KNOWS not in capsys.readouterr().out


def test_a_start_from_nowhere_says_what_there_is(bank, weir):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "one")
    other = Bank(replace(bank.site, pipeline=small.successor))
    with pytest.raises(WeirError, match="Its savepoints: one"):
        other.epochs(start_from=f"{bank.site.storage}:two")
    with pytest.raises(WeirError, match="names no savepoint"):
        other.epochs(start_from="small")
    with pytest.raises(WeirError, match="no pipeline 'nobody'"):
        other.epochs(start_from="nobody:one")


def test_a_damaged_savepoint_starts_nothing(bank, weir):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "one")
    sst = next(bank.site.storage.glob("state/accounts/*/*/*.sst"))
    content = bytearray(sst.read_bytes())
    content[len(content) // 2] ^= 1
    sst.write_bytes(content)
    other = Bank(replace(bank.site, pipeline=small.successor))
    with pytest.raises(DamageError, match="altered or truncated"):
        other.epochs(start_from=f"{bank.site.storage}:one")
    assert other.ids() == []


# -- pruning


@pytest.mark.long
def test_prune_explains_every_checkpoint_and_object_and_changes_nothing(bank, weir):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "kept")
    more = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"}))
    more.epochs(2, 3, 4)
    before = bank.site.objects()
    facts = json.loads(weir(bank.site, "prune", "small", "--dry-run", "--json").out)
    assert {fate["id"]: (fate["stays"], fate["reasons"]) for fate in facts["checkpoints"]} == {
        1: (True, ["savepoint 'kept'"]),
        2: (False, []),
        3: (False, []),
        4: (True, ["the newest checkpoint"]),
    }
    stored = {name for name in before if name.startswith("state/")}
    assert {fate["path"] for fate in facts["objects"]} == stored
    goes = {fate["path"]: fate["bytes"] for fate in facts["objects"] if not fate["stays"]}
    assert goes and facts["bytes_freed"] == sum(goes.values()) == sum(fate["frees"] for fate in facts["checkpoints"])
    assert bank.site.objects() == before
    shown = weir(bank.site, "prune", "small", "--dry-run").out
    assert "savepoint 'kept'" in shown and "nothing needs it" in shown and "no checkpoint that stays names it" in shown

    assert weir(bank.site, "prune", "small").code == 0
    assert bank.ids() == [1, 4]
    after = bank.site.objects()
    assert {name for name in before if name.startswith("state/")} - after.keys() == goes.keys()
    bank.site.assert_no_orphans()
    bank.assert_exact(1, 2, 3, 4)


def test_prune_asks_the_running_coordinator(bank, weir):
    more = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"}))
    more.epochs(1, 2, 3)
    with bank.coordinator():
        until(lambda: alive(bank))
        asked = weir(bank.site, "prune", "small")
        assert (asked.code, "by the running coordinator" in asked.out) == (0, True)
        assert weir(bank.site, "stop", "small").code == 0
    assert bank.ids() == [3]


# -- the end


@pytest.mark.parametrize("running", [False, True], ids=["at-rest", "running"])
def test_a_cancelled_pipeline_retains_its_checkpoints_by_default(bank, weir, running):
    bank.epochs(1, 2)
    if running:
        with bank.coordinator():
            until(lambda: alive(bank))
            assert weir(bank.site, "cancel", "small").code == 0
    else:
        assert weir(bank.site, "cancel", "small").code == 0
    assert bank.ids() == [2]
    bank.epochs(3)
    bank.assert_exact(1, 2, 3)


@pytest.mark.parametrize("running", [False, True], ids=["at-rest", "running"])
def test_a_cancelled_pipeline_leaves_only_its_savepoints_if_told_so(bank, weir, running):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "kept")
    bank.epochs(2, 3)
    deleting = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__ON_CANCEL": "delete"})
    if running:
        with Bank(deleting).coordinator():
            until(lambda: alive(bank))
            assert weir(deleting, "cancel", "small").code == 0
    else:
        assert weir(deleting, "cancel", "small").code == 0
    assert bank.ids() == [1]
    bank.site.assert_no_orphans()
    assert len(bank.site.table("booked")) == 30, "tables stay"
    with pytest.raises(DamageError, match="its last published checkpoint is 3"):
        bank.epochs()  # going on from checkpoint 1 would book files 2 and 3 twice
    assert len(bank.site.table("booked")) == 30


@pytest.mark.parametrize("saved", [False, True], ids=["no savepoint", "one of what was abandoned"])
def test_a_deletion_leaves_neither_a_rewind_nor_what_it_abandoned(tmp_path, weir, saved):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1, 2, 3)
    if saved:
        weir(bank.site, "savepoint", "small", "--name", "kept")
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert bank.ids() == [1, 2, 3, 4]
    assert weir(bank.site, "cancel", "small", "--delete").code == 0
    assert bank.ids() == ([3] if saved else [])
    assert bool(states(bank)) == saved
    bank.site.assert_no_orphans()
    with pytest.raises(DamageError, match="its last published checkpoint is 4"):
        bank.epochs()


@pytest.fixture
def barrier(bank, monkeypatch):
    """A coordinator that comes to its next barrier when this many requests wait: `with barrier(2): ...`."""

    @contextmanager
    def coordinator(waited_for: int):
        bank.land(1)
        pending_requests, held = requests.pending, [True]

        def pending(storage):
            waiting = pending_requests(storage)
            held[0] = held[0] and len(waiting) < waited_for
            return [] if held[0] else waiting

        with bank.coordinator():
            until(lambda: bank.ids() == [1])
            monkeypatch.setattr(requests, "pending", pending)
            yield

    return coordinator


def test_of_two_stops_at_one_barrier_both_are_done(bank, barrier):
    """Somebody stops the pipeline while somebody else ends it for good, and a third wants a savepoint of its end."""
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)

    def ask(request: Request) -> bool:
        return ask_to_stop(bank.site.pipeline, bank.site.settings, request)

    with barrier(4), ThreadPoolExecutor(3) as pool:
        requests.send(storage, Request("stop"))
        done = pool.map(
            ask, [Request("stop", savepoint="last"), Request("stop", delete=True), Request("stop", savepoint="other")]
        )
        assert list(done) == [True, True, True]
    assert {(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()} == {("last", 1), ("other", 1)}
    assert bank.ids() == [1], "what has a name stays"


def test_a_stop_beside_a_drain_has_ended_the_run_too(bank, barrier):
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    with barrier(2):
        requests.send(storage, Request("stop", drain=True))
        assert ask_to_stop(bank.site.pipeline, bank.site.settings, Request("stop"))
    holder = lease.read(storage)
    assert holder is not None and holder.outcome == "drained"


def test_a_stop_that_came_after_the_last_barrier_is_not_taken_for_done(bank, monkeypatch):
    """Its coordinator is ending already, as another stop asked: who asks to delete must do it alone then."""
    bank.land(1)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    asking = []
    stopped = run_module._stopped

    def ending(*args):
        late = Request("stop", delete=True)
        asking.append(pool.submit(ask_to_stop, bank.site.pipeline, bank.site.settings, late))
        until(lambda: len(requests.pending(storage)) == 2)
        stopped(*args)

    monkeypatch.setattr(run_module, "_stopped", ending)
    with ThreadPoolExecutor(1) as pool:
        with bank.coordinator():
            until(lambda: bank.ids() == [1])
            requests.send(storage, Request("stop"))
        assert asking[0].result(30) is False
    assert requests.pending(storage) == [], "and it is withdrawn"


def test_a_deletion_that_failed_in_the_middle_does_not_say_that_nothing_is_lost(bank, weir, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    bank.land(1)
    with pytest.raises(TransientError, match="the disk is gone"), bank.coordinator():
        until(lambda: bank.ids() == [1])
        monkeypatch.setattr(Registry, "drop_listings", broken)
        cancelled = weir(bank.site, "cancel", "small", "--delete")
    assert bank.ids() == []
    assert cancelled.code != 0 and "failed before it had deleted all" in cancelled.err
    assert "Nothing is lost" not in cancelled.err


def test_a_savepoint_that_could_not_be_dropped_is_not_said_to_be(bank, weir, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "kept")
    with pytest.raises(TransientError, match="the disk is gone"), bank.coordinator():
        until(lambda: alive(bank))
        monkeypatch.setattr(Registry, "unpin", broken)
        dropped = weir(bank.site, "savepoint", "small", "--drop", "kept")
        assert dropped.code != 0, "it is told by the coordinator, or learns that this has ended"
    assert [pin.name for pin in bank.registry.pins()] == ["kept"]


def test_what_a_newer_release_writes_for_the_coordinator_stops_no_run(bank, monkeypatch):
    """Facts with a field more are read without it; a request with an option more is dropped, not half done."""
    bank.epochs(1)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)

    def newer(path: str, raw: dict) -> None:
        storage.put_bytes(path, json.dumps({**raw, "since_2030": 1}).encode())

    head = registry.head()
    assert head is not None
    with ReaderHold(storage, registry, head, "a restore") as hold:
        newer(hold._path, asdict(hold._held))
        newer(lease.LEASE, asdict(lease.read(storage)))
        name = "coordinator/requests/1.json"
        newer(name, asdict(Request("savepoint", savepoint="with-an-option", name=name)))
        requests.send(storage, Request("barrier", trigger="a trigger of 2030"))
        bank.epochs(2)
        assert bank.ids() == [1, 2], "the hold counts"
    assert (requests.pending(storage), bank.registry.pins()) == ([], [])
    bank.assert_exact(1, 2)


@pytest.mark.long
def test_a_cancelled_pipeline_can_still_be_pruned_and_cancelled_and_its_tables_stay(bank, weir):
    bank.epochs(1)
    weir(bank.site, "savepoint", "small", "--name", "kept")
    bank.epochs(2, 3)
    assert weir(bank.site, "cancel", "small", "--delete").code == 0
    rubbish = bank.site.storage / "state/accounts/g1-e9/0-0123456789abcdef0123456789abcdef/000001.sst"
    rubbish.parent.mkdir(parents=True)
    rubbish.write_bytes(b"left by a deletion that was cut off")
    staging = bank.site.storage / bank.site.pipeline.staging(bank.site.pipeline.sinks[0])
    ahead = staging / epoch_dir(Generation(1), CheckpointId(9)) / next(staging.glob("*/*.parquet")).name
    ahead.parent.mkdir()
    ahead.write_bytes(next(staging.glob("*/*.parquet")).read_bytes())
    assert weir(bank.site, "prune", "small").code == 0
    assert not rubbish.exists()
    assert ahead.exists(), "the registry knows less than the table: what it does not know may be to be published"
    assert weir(bank.site, "savepoint", "small", "--drop", "kept").code == 0
    assert weir(bank.site, "cancel", "small", "--delete").code == 0
    assert bank.ids() == [] and not states(bank)
    assert len(bank.site.table("booked")) == 30, "rows that were published are nobody's leftovers"


def test_a_savepoint_whose_asker_lost_patience_is_not_taken(bank, monkeypatch):
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    bank.land(1)
    commit, completed = transitions.commit, []

    def slow(*arguments):
        done = commit(*arguments)
        for request in requests.pending(storage):
            requests.take(storage, request)  # meanwhile the command has told that nothing was named
        completed.append(done)
        return done

    monkeypatch.setattr(transitions, "commit", slow)
    with bank.coordinator():
        until(lambda: len(completed) == 1)
        requests.send(storage, requests.Request("savepoint", trigger="savepoint", savepoint="late"))
        until(lambda: len(completed) == 2)
        requests.send(storage, requests.Request("stop"))
    assert bank.ids() == [2]
    assert bank.registry.pins() == []


def test_after_everything_was_deleted_ids_are_not_used_again(bank, weir):
    bank.epochs(1, 2)
    assert weir(bank.site, "cancel", "small", "--delete").code == 0
    assert bank.ids() == []
    assert not list(bank.site.storage.glob("state/**/*.sst"))
    fresh = Bank(replace(bank.site, pipeline=small.successor))
    assert [report.checkpoint.id for report in fresh.epochs()] == [1, 2]
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    holder = lease.read(storage)
    assert holder is not None and holder.last_id == 2


# -- what keeps a checkpoint besides its age


def test_what_a_sink_lacks_is_not_pruned(bank, monkeypatch):
    from weir.epoch import steps
    from weir.ownership import prune

    def lost(*_: object) -> None:
        raise OSError("the store was away")

    with monkeypatch.context() as patched:
        patched.setattr(steps, "publish_missing", lost)
        with pytest.raises(WeirError):
            bank.epochs(1)
    registry = bank.registry
    assert list(prune.needed(registry, {}).items()) == [(1, ["a sink lacks its rows"])]
    bank.epochs(2)
    bank.assert_exact(1, 2)
    asked = RunOptions(until_caught_up=True)
    assert list(run(bank.site.pipeline, bank.site.settings, asked, InMemoryExecutor())) == []


def test_a_number_names_a_checkpoint_and_no_savepoint(bank, weir):
    bank.site.options["WEIR_CHECKPOINTS__NUM_RETAINED"] = "9"
    bank.epochs(1, 2)
    refused = weir(bank.site, "savepoint", "small", "--name", "4")
    assert refused.code == 2
    assert "a number names a checkpoint" in refused.err
    registry = bank.registry
    head = registry.head()
    registry.pin(registry.take_over(), Pin("savepoint", "4", head.id, head.commit_id, head.completed_at, "as before"))
    bank.epochs(3, 4, 5)
    refused = weir(bank.site, "rewind", "small", "--to", "4", "--yes")
    assert refused.code == 2
    assert "the name of a savepoint, which is checkpoint 2" in refused.err
    assert weir(bank.site, "fork", "small", "--name", "x", "--from", "4").code == 2
    assert bank.ids() == [1, 2, 3, 4, 5]
    assert weir(bank.site, "rewind", "small", "--savepoint", "4", "--yes").code == 0
    assert bank.registry.head().parent_id == 2
