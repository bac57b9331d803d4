"""The soak in half a minute: `make soak` runs the same for thousands of epochs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat

import pytest

from tests.recovery.harness import Site
from tests.soak import accounts
from tests.soak.bounds import growing, swelling
from tests.soak.checks import Sample, Verifier
from tests.soak.driver import Life, soak
from tests.soak.feed import Feed
from tests.soak.replay import Replay
from tests.tools.sampling import sampled
from weir.connectors.delta import append
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

_PLAN = (
    Life("kill", 6, num_retained=3),
    Life("early", 0),
    Life("zombie", 5),
    Life("stop", 3),
    Life("kill", 4, num_retained=1, batch_rows=7, mode="full"),
    Life("kill", 6, num_retained=2, max_files=1),
    Life("drain", 4, max_files=3),
    Life("kill", 5),
)


@pytest.mark.parametrize(("lives", "epochs", "more"), sampled([(3, 10, 0), (8, 60, 1)]))
def test_killed_frozen_and_stopped_coordinators_lose_and_double_nothing(tmp_path, lives, epochs, more):
    plan = _PLAN[:lives]
    outcome = soak(tmp_path, 7, epochs, chain(plan, repeat(Life("kill", 12))), print, least=lives + more)
    assert outcome.epochs >= epochs
    assert outcome.ends["kill"] + outcome.ends["early"] >= sum(life.end in ("kill", "early") for life in plan)
    assert outcome.ends["zombies fenced"] == 1
    assert outcome.rows > 15 * epochs and outcome.states >= outcome.checks / 2


@pytest.mark.long
def test_they_lose_and_double_nothing_where_checkpoints_do_not_wait_for_the_second_stage(tmp_path):
    plan = (
        replace(life, unaligned=life.end != "stop", batch_rows=7, max_concurrent=1 + number % 3)
        for number, life in enumerate(_PLAN)
    )
    plan = chain(plan, repeat(Life("kill", 12, batch_rows=7, unaligned=True)))
    outcome = soak(tmp_path, 11, 40, plan, print, unaligned=True, least=len(_PLAN))
    assert outcome.waited >= 10
    assert outcome.ends["zombies fenced"] == 1
    assert outcome.rows > 500 and outcome.states >= outcome.checks / 2 and outcome.windows >= 1


class CutOffError(BaseException):
    """What nobody catches, as if the process were gone."""


@pytest.mark.long
def test_a_table_that_is_ahead_of_the_ledger_when_a_coordinator_is_killed_is_no_violation(tmp_path, monkeypatch):
    """Tables are published beside each other."""
    site = Site(tmp_path, {"WEIR_EPOCH__MAX_FILES": "1"}, accounts.pipeline, "tests.soak.accounts")
    feed, verifier = Feed(3, site.landing), Verifier(site, Replay(3))
    publish, cut = append.publish, False

    def cut_off(storage, app_id, table, *rest, **options):
        if cut and table == "ledger":
            raise CutOffError
        return publish(storage, app_id, table, *rest, **options)

    def check_after(files: int) -> bool:
        """Whether late rows wait to be judged."""
        feed.land(files)
        with suppress(CutOffError):  # only if `cut`, and then an epoch without rows publishes nothing
            list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
        verifier.check()
        return bool(verifier._rows["turnover_late"])

    monkeypatch.setattr(append, "publish", cut_off)
    assert not check_after(30)
    ahead = 0
    for _ in range(4):
        cut = True
        ahead += check_after(1)
        cut = False
        assert not check_after(1)
    assert ahead, "late rows were published before the ledger's"


def test_what_grows_is_noticed():
    steady = Sample(0, 1_000_000, 100, 500_000, 200, 100_000, 80, 60, 200_000, 90, 0)
    assert growing([replace(steady, epoch=epoch) for epoch in range(400)]) == []
    leaking = [replace(steady, epoch=epoch, registry_log=60 + epoch, channel_objects=epoch) for epoch in range(400)]
    assert [problem.split()[0] for problem in growing(leaking)] == ["channel_objects", "registry_log"]


@pytest.mark.parametrize(("per_epoch", "noticed"), [(0, False), (50_000, False), (300_000, True)])
def test_memory_that_leaks_is_noticed(per_epoch, noticed):
    rss = [400 << 20] * 500
    assert bool(swelling([size + per_epoch * epoch for epoch, size in enumerate(rss)])) is noticed
