"""Coordinators that stall, are taken over, or do not know what became of their commit: no harm comes of it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pipelines.flights import pipeline
from state_ops.checkpoints import retention
from state_ops.checkpoints.registry import Registry
from state_ops.errors import BusyError, FencedError, TransientError
from tests.recovery.harness import child
from tests.tools.sampling import sampled
from weir.epoch import transitions
from weir.ownership import publish
from weir.ownership.context import RunContext
from weir.ownership.pipeline_storage import open_storage, readers

_DAYS = 6


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_case_17_a_stalled_coordinator_is_taken_over_and_fenced(site, days, weir, monkeypatch):
    flights_ = site(max_files=3, heartbeat=0.3)
    flights_.land(days[:_DAYS])
    with child(flights_, "before the row", 2) as stalled:
        stalled.wait_until_held()

        # It hangs, but its heart beats: nobody else may run, from its own host or from another.
        refused = weir(flights_, "run", "flights", "--until-caught-up")
        assert refused.code == 1
        assert f"process {stalled.process.pid}" in refused.err and "weir stop flights" in refused.err
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
            with pytest.raises(BusyError):
                flights_.run()

        # Now the whole host stands still. Its own host still sees the process; another sees no heartbeat and takes
        # over.
        stalled.suspend()
        with pytest.raises(BusyError):
            flights_.run()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
            resumed = flights_.run(drain=True)
        assert [report.checkpoint.id for report in resumed] == [3, 4], "epoch 2 was begun by the other one"

        # It wakes up in the middle of its commit.
        before = flights_.objects()
        stalled.resume()
        assert stalled.process.wait(timeout=60) == 1
        assert "newer coordinator" in stalled.output.read_text()
        assert flights_.objects() == before, "a fenced coordinator writes nothing and deletes nothing"

    flights_.assert_exact(_DAYS)
    flights_.assert_no_orphans()


@pytest.mark.usefixtures("spark")
def test_a_fenced_coordinator_can_neither_publish_nor_prune(site, days):
    flights_ = site(max_files=2)
    flights_.land(days[:_DAYS])
    flights_.run()
    storage, old = open_storage(pipeline, flights_.settings)
    generation = old.take_over()
    context = RunContext(
        pipeline, flights_.settings, storage, old, generation, None, readers(pipeline, flights_.settings)
    )
    completed = old.checkpoints()
    plan = retention.plan(completed, {row.id: old.files(row) for row in completed}, keep=1)
    assert plan.drop and plan.delete

    _, successor = open_storage(pipeline, flights_.settings)
    assert successor.take_over() == generation + 1
    before = flights_.objects()

    with pytest.raises(FencedError):
        retention.apply(old, storage, generation, plan, context.watcher)
    with pytest.raises(FencedError):
        publish.publish_missing(context, completed)

    kept = {name: digest for name, digest in flights_.objects().items() if name in before}
    assert kept == before, "nothing was deleted or altered"
    assert successor.checkpoints() == completed
    flights_.run(drain=True)
    flights_.assert_exact(_DAYS)
    flights_.assert_no_orphans()


@pytest.mark.usefixtures("spark")
def test_a_commit_with_an_unknown_outcome_does_not_take_the_pipeline_from_a_successor(site, days, monkeypatch):
    flights_ = site(max_files=_DAYS)
    flights_.land(days[:_DAYS])
    _, successor = open_storage(pipeline, flights_.settings)
    claimed = []

    def lost(self, checkpoint, files):
        claimed.append(successor.take_over())
        raise OSError("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", lost)
        with pytest.raises(FencedError):
            flights_.run()

    assert [successor.generation()] == claimed, "who lives still owns the pipeline"
    flights_.run(drain=True)
    flights_.assert_exact(_DAYS)
    flights_.assert_no_orphans()


@pytest.mark.parametrize("landed", sampled([True, False]), ids=["landed", "lost"])
@pytest.mark.usefixtures("spark")
def test_a_commit_that_reported_an_error_counts_if_it_landed(site, days, monkeypatch, landed):
    flights_ = replace(site(max_files=_DAYS), options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"})
    flights_.land(days[:_DAYS])
    commit, errors = Registry.commit, [OSError("the connection was lost")]

    def unsure(self, checkpoint, files):
        if landed or not errors:
            commit(self, checkpoint, files)
        if errors:
            raise errors.pop()

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", unsure)
        reports = flights_.run(drain=True)

    assert [report.checkpoint.id for report in reports] == ([1, 2] if landed else [2, 3])
    flights_.run()
    flights_.assert_exact(_DAYS)
    flights_.assert_no_orphans()


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_a_drain_that_fails_is_done_again_before_the_run_ends(site, days, monkeypatch):
    flights_ = replace(site(max_files=_DAYS), options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"})
    flights_.land(days[:_DAYS])
    run_stage, errors = transitions.run_stage, [TransientError("the cluster was away")]

    def flaky(context, flight, *work):
        if flight.plan.drain and errors:
            raise errors.pop()
        return run_stage(context, flight, *work)

    with monkeypatch.context() as patched:
        patched.setattr(transitions, "run_stage", flaky)
        flights_.run(drain=True)

    flights_.assert_exact(_DAYS)
