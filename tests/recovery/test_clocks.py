"""A wall clock that jumps by a year at every look: who lives, what is deleted and what time an epoch has must not
care."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_ops.coordination import lease
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.soak.accounts import pipeline
from tests.soak.checks import Verifier
from tests.soak.children import started, wait_for
from tests.soak.coordinator import Order
from tests.soak.feed import Feed
from tests.soak.replay import Replay
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

_SEED = 23
_YEAR = 365 * 86_400.0
_JUMPS = [0.0, _YEAR, -_YEAR, 3.0, -3600.0, 40 * 86_400.0, -1.0]
_FILES = 24


def _order(root: Path, site: Site, host: str, until_files: int | None = None) -> Order:
    env = {
        **site.env,
        "WEIR_LOCAL__WORK_DIR": str(root / f"work-{host}"),
        "WEIR_LEASE__HEARTBEAT_SECONDS": "2",  # a busy machine may hold up a thread for three seconds
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__NUM_RETAINED": "2",
    }
    return Order(env, host, until_files=until_files, jumps=_JUMPS)


@pytest.mark.long
def test_clocks_that_jump_make_no_second_coordinator_and_delete_nothing_live(tmp_path):
    site = Site(tmp_path, pipeline=pipeline, module="tests.soak.accounts")
    storage, feed, verifier = Storage(str(site.storage)), Feed(_SEED, site.landing), Verifier(site, Replay(_SEED))
    feed.land(_FILES // 2)
    with started(tmp_path / "children") as start:
        owner, rival = start(), start()
        owner.go(_order(tmp_path, site, "here"))
        wait_for(lambda: owner.listen().epochs or owner.ended, "a first epoch", owner)
        rival.go(_order(tmp_path, site, "there", until_files=_FILES))

        wait_for(lambda: len(rival.listen().ends) >= 2 or owner.ended, "the rival to look twice", owner, rival)
        wait_for(lambda: len(owner.listen().epochs) >= _FILES // 2 or owner.ended, "the owner's epochs", owner)
        assert not owner.listen().ends, f"it was taken over while it lived:\n{owner.complaint()}"
        assert {end["kind"] for end in rival.listen().ends} == {"BusyError"} and not rival.epochs, rival.complaint()

        owner.freeze()
        wait_for(
            lambda: (held := lease.read(storage)) is not None and held.pid == rival.process.pid,
            "the rival to own it",
            rival,
        )
        feed.land(_FILES - feed.landed)
        owner.wake()
        wait_for(lambda: owner.listen().ended, "the zombie to end", owner)
        assert [end["kind"] for end in owner.ends] == ["FencedError"], owner.complaint()
        wait_for(lambda: rival.listen().ended, "the rival to read everything", rival)
        assert rival.ends[-1]["kind"] == "done", rival.complaint()
    epochs = sorted(owner.epochs + rival.epochs, key=lambda epoch: epoch["epoch"])
    for epoch in epochs:
        verifier.heard(epoch)
    times = [epoch["epoch_now"] for epoch in epochs]
    assert times == sorted(times) and times[-1] - times[0] < 3 * _YEAR
    verifier.check()
    list(run(pipeline, site.settings, RunOptions(until_caught_up=True, drain=True), InMemoryExecutor()))
    verifier.check()
    site.assert_no_orphans()
