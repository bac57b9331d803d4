"""What the commands say to who runs a pipeline from a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import click
import pytest
import typer

from pipelines.runtime import cli, tenure
from pipelines.runtime.in_memory import InMemoryExecutor
from pipelines.runtime.run import open_storage
from pipelines.runtime.sources.files import FilesReader
from state_ops import lease
from tests.recovery.small import Bank


@pytest.fixture
def bank(tmp_path, monkeypatch) -> Bank:
    """Its runs from the command start no JVM."""
    monkeypatch.setattr(tenure, "SparkExecutor", lambda *_, **__: InMemoryExecutor())
    return Bank.at(tmp_path / "site")


def died(bank: Bank) -> int:
    """Make it look as if the last coordinator had been killed; returns its process."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    left = replace(lease.read(storage), stopped=False, outcome=None, pid=process.pid)
    storage.put_bytes(lease.LEASE, json.dumps({name: getattr(left, name) for name in left.__slots__}).encode())
    return process.pid


def test_a_run_says_at_once_from_where_it_goes_on_and_at_the_end_what_it_did(bank, weir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bank.land(1, 2)
    ran = weir(bank.site, "run", "small", "--until-caught-up")
    said = ran.said.splitlines()
    assert said[0] == "small: generation 1, no checkpoint yet, 2 files waiting; Spark starts (some 30 s)"
    assert [line for line in said if "from an epoch's trigger to its commit" in line] == said[1:2], "said once"
    tables = bank.site.storage.relative_to(tmp_path) / "tables" / "booked"
    assert ran.out.splitlines()[-1] == f"Caught up at checkpoint 2: 2 epochs, 20 rows. Tables: {tables}."
    assert [row.trigger for row in bank.registry.checkpoints()][-1] == "catch_up"

    bank.land(3)
    assert (
        "small: generation 2, from checkpoint 2, 1 file waiting; Spark"
        in weir(bank.site, "run", "small", "--drain").said
    )
    again = weir(bank.site, "run", "small", "--until-caught-up")
    assert "0 files waiting" in again.said and "Spark" not in again.said
    assert "Nothing to do: small is at checkpoint" in again.out


def test_a_run_after_a_crash_says_so(bank, weir):
    bank.epochs(1, 2)
    pid = died(bank)
    bank.land(3)
    said = weir(bank.site, "run", "small", "--until-caught-up").said
    assert f"the run before (process {pid} on " in said
    assert ") died, goes on from checkpoint 2, 1 file waiting" in said


def test_a_source_that_cannot_be_listed_is_the_runs_to_report(bank, weir, monkeypatch):
    bank.land(1)

    def fails(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(FilesReader, "backlog", fails)
        ended = weir(bank.site, "run", "small", "--until-caught-up")
    assert ended.said.startswith("small: generation 1, no checkpoint yet\n")
    assert ended.code == 1 and "the disk is gone" in ended.said


def test_a_run_that_ends_early_does_not_say_that_it_has_caught_up(bank, weir):
    bank.land(1, 2, 3)
    ran = weir(bank.site, "run", "small", "--max-seconds", "0")
    assert "Caught up" not in ran.out
    assert "Drained at checkpoint" in weir(bank.site, "run", "small", "--drain").out


def test_status_names_the_directory_and_whose_the_bottleneck_was(bank, weir):
    bank.epochs(1)
    bank.land(2)
    shown = weir(bank.site, "status", "small").out
    assert f"1 file in {bank.site.landing}" in " ".join(shown.split())
    assert "(of the last run)" in shown
    facts = json.loads(weir(bank.site, "status", "small", "--json").out)
    assert facts["sources"] == {"landing": str(bank.site.landing)}
    assert facts["lag"] == {"landing": 1}
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    left = replace(lease.read(storage), stopped=False, pid=os.getpid(), born=lease.born(os.getpid()))
    storage.put_bytes(lease.LEASE, json.dumps({name: getattr(left, name) for name in left.__slots__}).encode())
    shown = weir(bank.site, "status", "small").out
    assert "bottleneck" in shown and "(of the last run)" not in shown


def _options(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield path, parameter
    for name, one in getattr(command, "commands", {}).items():
        yield from _options(one, f"{path} {name}")


def test_no_option_has_a_half_that_says_no_and_adds_nothing():
    """At 80 columns it takes the room of the help's words."""
    halves = [
        (path, half)
        for path, option in _options(typer.main.get_command(cli.app), "weir")
        for half in option.secondary_opts
        if half.startswith("--no-")
    ]
    assert halves == []
