"""What `weir status` shows of a pipeline: paths as they are, and how its last run ended."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from infra import flights_input
from state_ops.coordination import lease
from tests.recovery.harness import Site
from tests.tools.stages import altered, with_input
from weir.cli.main import app
from weir.execution.in_process import InMemoryExecutor
from weir.operations.plan import plan
from weir.ownership.pipeline_storage import open_storage
from weir.run.run import RunOptions, run


@pytest.fixture
def site(tmp_path, monkeypatch) -> Site:
    made = Site(tmp_path / "site")
    made.land(flights_input.prepare(tmp_path / "days")[:1])
    list(run(made.pipeline, made.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


def asked(*command: str) -> str:
    done = CliRunner().invoke(app, [*command])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_brackets_and_colons_of_paths_are_shown_as_they_are(tmp_path, monkeypatch):
    site = Site(tmp_path / "of [team] :x:")
    for name, value in site.env.items():
        monkeypatch.setenv(name, value)
    said = "".join(asked("status", "flights").split())
    assert "".join(str(site.storage / "tables").split()) in said


def test_a_run_that_ended_without_a_word_is_said_to_have_died(site):
    assert "died" not in asked("status", "flights")
    storage, _ = open_storage(site.pipeline, site.settings)
    left = lease.read(storage)
    assert left is not None
    killed = replace(left, stopped=False, outcome=None, born="before this machine started")
    storage.put_bytes(lease.LEASE, json.dumps(asdict(killed)).encode())
    assert "ended without a word" in asked("status", "flights")
    assert json.loads(asked("status", "flights", "--json"))["coordinator"]["died"]


def test_a_plan_names_the_stages_whose_code_is_another(site):
    assert plan(site.pipeline, site.settings, executor=InMemoryExecutor()).other_code == ()
    first, *rest = site.pipeline.stages
    changed = altered(first, function=lambda rows, state, epoch: rows)  # noqa: ARG005
    pipeline = replace(site.pipeline, stages=(changed, *(with_input(s, changed) for s in rest)))
    assert first.uid in plan(pipeline, site.settings, executor=InMemoryExecutor()).other_code
