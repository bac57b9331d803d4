"""Branches that publish at once: nothing is lost, nothing comes twice, and what is refused says why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Barrier, Event

import polars as pl
import pytest

from state_ops.errors import BusyError, FencedError, WeirError
from tests.recovery import small
from tests.recovery.test_forks import Branched, at, ran
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, agg, delta
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, promotion
from weir.ownership import publish
from weir.run import fsck, maintenance


def code(tag: str) -> Pipeline:
    """The pipeline, whose rows say which code has made them."""

    def tagged(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "at", "amount", tag=pl.lit(tag))

    stage = altered(small.accounts, function=tagged, sink=delta.append("booked"))
    return Pipeline("small", (stage,), max_parallelism=8)


@pytest.fixture
def bank(tmp_path) -> Branched:
    """Three files that production has read, and two branches from before the last two."""
    bank = at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="8")
    bank = Branched(replace(bank.site, pipeline=code("main")))
    bank.epochs(1, 2, 3)
    bank.fork("a", 1)
    bank.fork("b", 1)
    return bank


def test_branches_that_run_are_rewound_and_dropped_beside_each_other_and_production_stay_exact(bank):
    of_a, of_b = bank.branch("a", code("a")), bank.branch("b", code("b"))
    ran(of_a)
    bank.land(4, 5)
    start = Barrier(4)

    def tried(step) -> None:
        start.wait(30)
        with suppress(BusyError, FencedError):  # somebody else was faster
            step()

    steps = [
        lambda: bank.epochs(),
        lambda: maintenance.rewind(of_a.site.pipeline, bank.site.settings, 2),
        lambda: ran(of_b),
        lambda: ran(of_a),
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tried, steps))
    for one in (bank, of_a, of_b):
        ran(one)
        assert one.state() == bank.state()
    bank.assert_exact(1, 2, 3, 4, 5)
    booked = of_a.site.table("booked")
    assert sorted(booked["amount"]) == sorted([2, 3, 4, 5] * 10)


def test_a_branch_that_is_dropped_while_it_publishes_takes_nothing_with_it(bank, monkeypatch):
    of_a = bank.branch("a", code("a"))
    of_b = bank.branch("b", code("b"))
    ran(of_b)
    real, dropped = publish._publish, []

    def dropped_meanwhile(context, *others):
        if not dropped:
            dropped.append(context.registry.head().id)
            with pytest.raises(BusyError, match="small@a"):
                forks.drop(bank.site.pipeline, bank.site.settings, "a")
            while not dropped_now():
                pass
        return real(context, *others)

    def dropped_now() -> bool:
        for left in bank.site.root.rglob("lease.json"):  # it is taken for dead
            left.unlink(missing_ok=True)
        try:
            forks.drop(bank.site.pipeline, bank.site.settings, "a")
        except BusyError:  # its heart has beaten meanwhile
            return False
        return True

    monkeypatch.setattr(publish, "_publish", dropped_meanwhile)
    with pytest.raises(WeirError):
        ran(of_a)
    assert dropped
    ran(of_b)
    assert of_b.state() == bank.state()
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    ran(of_b)
    assert of_b.state() == bank.state()
    assert [fork.branch.name for fork in forks.forks(bank.site.pipeline, bank.site.settings)] == ["b"]
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).damage


def test_of_two_promotions_at_once_one_wins_and_the_other_says_what_it_would_take_back(bank, monkeypatch):
    decided, real = Event(), promotion._carry_out

    def planned(*others):
        try:
            return promotion.plan(*others)
        finally:
            decided.set()

    def promoted(name: str, planner=promotion.plan):
        options = {"executor": InMemoryExecutor(), "reason": f"for {name}", "planner": planner}
        return promotion.promote(code(name), bank.site.settings, name, **options)

    with ThreadPoolExecutor(1) as pool:
        second = []

        def beside_another(*others):
            if not second:
                second.append(pool.submit(promoted, "b", planned))
                assert decided.wait(30), "the other has found nothing in its way, for this one has not committed yet"
            return real(*others)

        monkeypatch.setattr(promotion, "_carry_out", beside_another)
        won = promoted("a")
        with pytest.raises(WeirError, match=rf"checkpoint {won.id} has taken over a branch \(of small@a: for a\)"):
            second[0].result(60)
    assert bank.registry.head().id == won.id
    tags = bank.site.table("booked")["tag"]
    assert sorted(tags) == ["a"] * 20 + ["main"] * 10
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
