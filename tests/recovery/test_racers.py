"""Several coordinators that all want one pipeline: one generation wins at a time, and whoever lost changes nothing."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from deltalake.exceptions import DeltaError

from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.delta import fenced_table
from state_ops.errors import DamageError, FencedError, InputError, RunEndedError
from state_ops.ids import Generation
from state_ops.storage.paths import HOLDS
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.recovery.small import Apart, Bank
from tests.soak.accounts import pipeline
from tests.soak.checks import TABLES, Verifier, log_in_order
from tests.soak.children import Child, started, wait_for
from tests.soak.coordinator import Order
from tests.soak.feed import Feed
from tests.soak.replay import Replay
from tests.tools.sampling import sampled
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.ownership import claimed, remove_leftovers
from weir.restore.recovery import owning
from weir.run import maintenance
from weir.run.run import RunOptions, open_storage, run

_SEED = 11
_APP = "weir/raced/main"
_RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "1000"}  # all of them, so that the whole chain can be looked at


def a_site(root: Path, **options: str) -> Site:
    return Site(root, options, pipeline=pipeline, module="tests.soak.accounts")


# -- the claim


@pytest.mark.parametrize(("takers", "rounds"), sampled([(5, 6), (2, 12)]))
def test_of_takers_at_the_same_moment_each_generation_has_one(tmp_path, takers, rounds):
    storage = Storage(str(tmp_path / "raced"))
    Registry(storage, _APP).take_over()
    won: list[int] = []
    for _ in range(rounds):
        barrier = Barrier(takers)

        def taken(_: int, barrier: Barrier = barrier) -> Generation | None:
            registry = Registry(storage, _APP)
            registry.generation()
            barrier.wait()
            try:
                return registry.take_over()
            except FencedError:
                return None

        with ThreadPoolExecutor(takers) as pool:
            winners = [generation for generation in pool.map(taken, range(takers)) if generation is not None]
        assert winners, "somebody wins"
        won += winners
        assert Registry(storage, _APP).generation() == max(winners)
    assert sorted(won) == sorted(set(won)), "two coordinators with one generation"


@pytest.mark.parametrize("rival_claims", [True, False], ids=["after a rival's claim", "under the same generation"])
def test_a_taker_whose_probe_is_taken_for_a_dead_one_s_says_that_it_lost(tmp_path, monkeypatch, rival_claims):
    storage = Storage(str(tmp_path / "raced"))
    rival = Registry(storage, _APP)
    generation = rival.take_over()
    commit, probes = fenced_table.commit, []

    def interrupted(handle, app_id, version, *others, **more):
        if app_id == "probe" and not probes:
            probes.append(handle)
            rival.remove_unnamed(rival.take_over() if rival_claims else generation)
        return commit(handle, app_id, version, *others, **more)

    monkeypatch.setattr(fenced_table, "commit", interrupted)
    if rival_claims:
        with pytest.raises(FencedError, match="at the same moment"):
            Registry(storage, _APP).take_over()
    else:
        assert Registry(storage, _APP).take_over() == generation + 1
    assert probes


def test_two_that_delete_one_directory_both_succeed(tmp_path):
    storage = Storage(str(tmp_path))
    for _ in range(20):
        for number in range(40):
            storage.put_bytes(f"tree/{number % 4}/{number}", b"")
        barrier = Barrier(2)

        def deleted(_: int, barrier: Barrier = barrier) -> None:
            barrier.wait()
            storage.delete_tree("tree")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(deleted, range(2)))
        assert not (tmp_path / "tree").exists()


# -- five processes


@pytest.mark.long
def test_case_16_five_processes_that_race_for_a_pipeline_read_every_file_once(tmp_path):
    files, racers = 25, 5
    site = a_site(tmp_path)
    feed = Feed(_SEED, site.landing)
    feed.land(files)
    chance = random.Random(_SEED)
    with started(tmp_path / "children") as start:
        children = [start() for _ in range(racers)]
        wait_for(lambda: all(child.listen().ready for child in children), "all racers to be ready", *children)
        for number, child in enumerate(children):
            child.go(Order(_env(site, tmp_path, number), f"host-{number}", until_files=files))
        frozen: set[int] = set()
        while not all(child.listen().ended for child in children):
            _freeze_the_owner(site, children, chance, frozen)
        for child in children:
            child.kill()
            kinds = [end["kind"] for end in child.ends]
            assert set(kinds) <= {"BusyError", "FencedError", "done"} and kinds[-1:] == ["done"], child.complaint()
        epochs = [epoch for child in children for epoch in child.epochs]
    fenced = sum(end["kind"] == "FencedError" for child in children for end in child.ends)
    assert len(frozen) >= 3 and fenced >= 3, "nobody was taken over"

    assert len({epoch["epoch"] for epoch in epochs}) == len(epochs), "two completed one epoch"
    verifier = Verifier(site, Replay(_SEED))
    for epoch in epochs:
        verifier.heard(epoch)
    verifier.check()
    *_, last = _run(replace(site, options=_RETAINED), drain=True)
    assert last.checkpoint.offsets["landing"]["files"] == files
    verifier.check()
    _assert_one_chain(site)
    site.assert_no_orphans()


def _env(site: Site, root: Path, number: int) -> dict[str, str]:
    return {
        **site.env,
        "WEIR_LOCAL__WORK_DIR": str(root / f"work-{number}"),
        "WEIR_LEASE__HEARTBEAT_SECONDS": "0.1",
        "WEIR_EPOCH__MAX_FILES": "1",
        **_RETAINED,
        "WEIR_RUN__POLL_SECONDS": "0.01",
    }


def _freeze_the_owner(site: Site, children: list[Child], chance: random.Random, frozen: set[int]) -> None:
    """Whoever holds the lease stands still for longer than the others wait; each at most once."""
    storage = Storage(str(site.storage))
    held = lease.read(storage)
    owner = next((child for child in children if held and child.process.pid == held.pid), None)
    if held is None or held.stopped or owner is None or owner.process.pid in frozen:
        time.sleep(0.01)
        return
    before = len(owner.epochs)
    wait_for(
        lambda: owner.ended or len(owner.listen().epochs) > before or owner.ends,
        "the owner to complete an epoch",
        owner,
        patience=20,
    )
    time.sleep(chance.uniform(0, 0.15))
    if owner.ended:
        return
    owner.freeze()
    frozen.add(owner.process.pid)
    others = [child for child in children if child is not owner]

    def replaced() -> bool:
        now = lease.read(storage)
        return (now is not None and now.pid != owner.process.pid) or all(child.listen().ended for child in others)

    try:
        wait_for(replaced, "another one to take over", *others, patience=20)
    finally:
        owner.wake()


def _assert_one_chain(site: Site) -> None:
    """By the registry, in which every checkpoint is retained, and by the tables' logs."""
    registry = open_storage(pipeline, site.settings)[1]
    rows = site.registry("checkpoints").sort_values("id")
    assert rows["id"].is_unique and rows["generation"].is_monotonic_increasing
    assert rows["parent_id"].tolist()[1:] == rows["id"].tolist()[:-1], "the chain has a gap or a fork"
    for table in TABLES:
        published = log_in_order(site.storage / "tables" / table, f"{pipeline.app_id}/{table}")
        named = sorted(row.checkpoint_id for row in registry.publications() if row.sink == table)
        assert published == named, table


def test_a_command_that_saw_nobody_takes_nothing_from_a_coordinator_that_started_meanwhile(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    watch = lease.watch
    with ExitStack() as running:
        coordinators = []

        def seen(storage: Storage) -> bool:
            alive = watch(storage)
            monkeypatch.setattr(lease, "watch", watch)
            started = claimed(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
            coordinators.append(running.enter_context(started).context)
            return alive

        monkeypatch.setattr(lease, "watch", seen)
        with pytest.raises(FencedError), owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()):
            pass
        (living,) = coordinators
        assert living.registry.generation() == living.generation, "it owns the pipeline still"


def test_a_taker_that_lost_leaves_the_stop_that_is_meant_for_the_winner(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    storage, rival = open_storage(bank.site.pipeline, bank.site.settings)

    def seen(_: Storage) -> bool:
        rival.take_over()
        requests.send(storage, Request(requests.STOP))
        return False

    monkeypatch.setattr(lease, "watch", seen)
    with pytest.raises(FencedError), claimed(bank.site.pipeline, bank.site.settings, InMemoryExecutor()):
        pass
    assert [request.kind for request in requests.pending(storage)] == [requests.STOP]


def test_a_claim_that_landed_and_reported_an_error_is_ours(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    commit, failed = fenced_table.commit, []

    def landed(handle, *args, **options):
        commit(handle, *args, **options)
        if "state_files" in handle.table_uri and not failed:
            failed.append(True)
            raise DeltaError("the connection was closed before the answer was complete")

    monkeypatch.setattr(fenced_table, "commit", landed)
    bank.epochs(2)
    assert failed
    bank.assert_exact(1, 2)


def test_a_coordinator_that_could_renew_its_claim_only_in_part_does_not_say_that_another_runs(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    claim = fenced_table.FencedTable.claim

    def lost(*_: object) -> None:
        raise OSError("storage is away")

    def claimed_in_part(self, generation=None, *, after=None):
        return claim(self, generation, after=after) if generation is None else lost()

    def committed(*_: object) -> None:
        monkeypatch.setattr(fenced_table.FencedTable, "claim", claimed_in_part)
        lost()

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", committed)
        with pytest.raises(RunEndedError, match="Nobody can tell whether checkpoint 2 was committed"):
            bank.epochs(2)
        monkeypatch.setattr(fenced_table.FencedTable, "claim", claim)
    assert bank.registry.generation() == 3, "its own second claim"
    bank.epochs()
    bank.assert_exact(1, 2)


# -- what a zombie must leave alone


def test_a_zombie_that_cleans_up_leaves_what_its_successor_is_about_to_commit(tmp_path, monkeypatch):
    """It woke between its claim and its clean-up: the successor's row is written as a file, and not named yet."""
    site = a_site(tmp_path)
    Feed(_SEED, site.landing).land(3)
    _, zombie = open_storage(pipeline, site.settings)
    generation = zombie.take_over()
    commit, woken = Registry.commit, []

    def interrupted(self: Registry, checkpoint, files):
        def written(table, handle_generation, adds=(), removes=(), check=None):
            if adds and not woken:
                woken.append(True)
                with pytest.raises(FencedError):
                    zombie.remove_unnamed(generation)
            return committed(table, handle_generation, adds, removes, check)

        with monkeypatch.context() as patched:
            kind = type(self._checkpoints)
            committed = kind.commit
            patched.setattr(kind, "commit", written)
            commit(self, checkpoint, files)

    monkeypatch.setattr(Registry, "commit", interrupted)
    _run(site, drain=True)
    assert woken
    Verifier(site, Replay(_SEED)).check()
    site.assert_no_orphans()


class Sleepy(Apart):
    """Falls asleep before it runs a stage, once, while another coordinator reads everything. successor: what that one
    completed."""

    def __init__(self, site: Site, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._elsewhere = replace(site, options={**site.options, "WEIR_LOCAL__WORK_DIR": str(site.root / "elsewhere")})
        self._stage, self._monkeypatch = stage, monkeypatch
        self.successor: list[int] = []

    def run(self, task, rows, columns, deadline):
        if task.stage.uid == self._stage and not self.successor:
            with self._monkeypatch.context() as patched:
                patched.setattr(lease, "watch", lambda _: False)
                self.successor = [report.checkpoint.id for report in _run(self._elsewhere)]
        return super().run(task, rows, columns, deadline)


def _run(site: Site, executor: InMemoryExecutor | None = None, *, drain: bool = False):
    return list(
        run(pipeline, site.settings, RunOptions(until_caught_up=True, drain=drain), executor or InMemoryExecutor())
    )


@pytest.mark.long
def test_what_a_zombie_staged_below_the_head_is_removed_by_the_next_take_over(tmp_path, monkeypatch):
    """It wakes before it reads its epoch: the successor has completed later ones by then, and its clean-up is over."""
    site = a_site(tmp_path, WEIR_EPOCH__MAX_FILES="1", WEIR_CHECKPOINTS__NUM_RETAINED="9")
    feed = Feed(_SEED, site.landing)
    feed.land(4)
    _run(site)
    feed.land(4)
    zombie = Sleepy(site, "accounts", monkeypatch)
    with pytest.raises(FencedError):
        _run(site, zombie)
    assert len(zombie.successor) == 4
    staged = {path.name for path in site.storage.glob("tables/*/data/*")}
    assert any(name.startswith("g2-e") for name in staged), "the zombie staged rows, and deleted nothing"

    _run(site, drain=True)
    Verifier(site, Replay(_SEED)).check()
    site.assert_no_orphans()


def test_a_zombie_whose_staged_rows_its_successor_removed_says_that_it_is_fenced(tmp_path, monkeypatch):
    """It wakes between its two stages: the second one cannot read what the first one staged."""
    site = a_site(tmp_path)
    Feed(_SEED, site.landing).land(4)
    zombie = Sleepy(site, "turnover", monkeypatch)
    discarded: list[int] = []
    monkeypatch.setattr("weir.epoch.failover.discard", lambda _, __, id: discarded.append(id))
    with pytest.raises(FencedError) as fenced:
        _run(site, zombie)
    assert not discarded, "a fenced coordinator deletes nothing"
    assert zombie.successor and isinstance(fenced.value.__cause__, InputError)
    _run(site, drain=True)
    Verifier(site, Replay(_SEED)).check()
    site.assert_no_orphans()


def test_whatever_a_zombie_stumbles_over_it_says_that_it_is_fenced(tmp_path):
    site = a_site(tmp_path)
    _, rival = open_storage(pipeline, site.settings)
    with pytest.raises(DamageError), claimed(pipeline, site.settings, InMemoryExecutor()):
        raise DamageError("This is damage: nobody took over.")
    with (
        pytest.raises(FencedError, match="belongs to generation 3"),
        claimed(pipeline, site.settings, InMemoryExecutor()),
    ):
        rival.take_over()
        raise DamageError("A file is gone, which the successor pruned.")


def test_a_zombie_that_cleans_up_leaves_the_tables_of_a_pipeline_that_was_cancelled(tmp_path, monkeypatch):
    """It wakes with a request to clean up, after all checkpoints were deleted: published rows look like rows of no
    epoch."""
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1, 2)
    with (
        pytest.raises(FencedError, match="belongs to generation 3"),
        owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()) as zombie,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(lease, "watch", lambda _: False)
            with owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()) as successor:
                maintenance.end(successor.context)
        maintenance.carry_out(zombie.context, requests.send(zombie.context.storage, Request(requests.UPKEEP)))
    assert bank.ids() == []
    assert len(bank.site.table("booked")) == 20, "what was published is readable still"


def test_a_zombie_that_cleans_up_leaves_what_a_restore_reads(tmp_path, monkeypatch):
    """It had looked for running restores before one began; its successor pruned the checkpoint's row, and keeps the
    objects."""
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1, 2)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    held = registry.head()
    assert held is not None
    listing = registry.files(held)
    hold = ReaderHold(storage, registry, held, "a restore")
    orphan_listings, drop_rows = Registry.orphan_listings, Registry.drop_rows

    def asleep(self: Registry):
        listings = orphan_listings(self)
        monkeypatch.setattr(Registry, "orphan_listings", orphan_listings)

        def after_a_restore_began(self: Registry, generation, ids):
            if held.id in ids and not any(file.path.startswith(HOLDS) for file in storage.list(HOLDS)):
                hold.__enter__()
            return drop_rows(self, generation, ids)

        with monkeypatch.context() as patched:
            patched.setattr(lease, "watch", lambda _: False)
            patched.setattr(Registry, "drop_rows", after_a_restore_began)
            bank.epochs(3, 4)
        return listings

    with (
        pytest.raises(FencedError, match="belongs to generation 3"),
        owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()) as zombie,
    ):
        monkeypatch.setattr(Registry, "orphan_listings", asleep)
        remove_leftovers(zombie.context)
    assert bank.ids() == [4], "the successor dropped the row"
    assert all(storage.size(file.path) == file.bytes for file in listing), "and kept what the restore reads"
    hold.__exit__()
