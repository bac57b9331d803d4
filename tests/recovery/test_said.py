"""What the commands say to who runs a pipeline from a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from state_ops.coordination import lease, processes
from state_ops.errors import ConfigurationError
from state_ops.records.checkpoint import Checkpoint
from tests.recovery.small import Bank, accounts
from tests.state_ops.checkpoints.test_registry import a_checkpoint
from weir import Pipeline, agg, delta, window
from weir.cli import main
from weir.execution.in_process import InMemoryExecutor
from weir.execution.spark import spark_session
from weir.execution.spark.spark_executor import SparkExecutor
from weir.ownership import ownership
from weir.run import progress
from weir.run.run import open_storage
from weir.sources.files import FilesReader


@pytest.fixture
def bank(tmp_path, monkeypatch) -> Bank:
    """Its runs from the command start no JVM."""
    monkeypatch.setattr(ownership, "SparkExecutor", lambda *_, **__: InMemoryExecutor())
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
    lines = ran.err.splitlines()
    assert lines[0] == "small: generation 1, no checkpoint yet, 2 files waiting"
    assert all("rows/s" in line for line in ran.out.splitlines() if line.startswith("epoch"))
    tables = bank.site.storage.relative_to(tmp_path) / "tables"
    assert ran.out.splitlines()[-2:] == ["Caught up at checkpoint 2: 2 epochs, 20 rows.", f"Tables in {tables}: booked"]
    assert [row.trigger for row in bank.registry.checkpoints()][-1] == "catch_up"

    bank.land(3)
    assert "small: generation 2, from checkpoint 2, 1 file waiting\n" in weir(bank.site, "run", "small", "--drain").err
    again = weir(bank.site, "run", "small", "--until-caught-up")
    assert "0 files waiting" in again.err and "Spark" not in again.err
    assert "Nothing to do: small is at checkpoint" in again.out


def test_a_run_after_a_crash_says_so(bank, weir):
    bank.epochs(1, 2)
    pid = died(bank)
    bank.land(3)
    output = weir(bank.site, "run", "small", "--until-caught-up").err
    assert f"the run before (process {pid} on " in output
    assert ") died, goes on from checkpoint 2, 1 file waiting" in output


def test_a_source_that_cannot_be_listed_is_the_runs_to_report(bank, weir, monkeypatch):
    bank.land(1)

    def fails(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(FilesReader, "look", fails)
        ended = weir(bank.site, "run", "small", "--until-caught-up")
    assert ended.err.startswith("small: generation 1, no checkpoint yet, what waits is not known: the disk is gone\n")
    assert ended.code == 1 and "the disk is gone" in ended.err


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
    left = replace(lease.read(storage), stopped=False, pid=os.getpid(), born=processes.born(os.getpid()))
    storage.put_bytes(lease.LEASE, json.dumps({name: getattr(left, name) for name in left.__slots__}).encode())
    shown = weir(bank.site, "status", "small").out
    assert "bottleneck" in shown and "(of the last run)" not in shown


def of_tables(number: int) -> Pipeline:
    """So many windows over the small pipeline's rows, each with a table, of one size, and without any lateness."""
    source = replace(accounts.inputs[0].origin, event_time="at")
    stages = [
        window(
            f"w{nth}",
            source,
            key="id",
            on="at",
            every="1h",
            sink=delta.append(f"t{nth}"),
            late=delta.append(f"l{nth}"),
            n=agg.count(),
        )
        for nth in range(number)
    ]
    return Pipeline("small", tuple(stages), max_parallelism=8)


pipeline = of_tables(2)


def hour(bank: Bank, name: str, at: int, **more: list) -> None:
    bank.site.landing.mkdir(parents=True, exist_ok=True)
    moments = pa.array([datetime(2024, 5, 1, at, tzinfo=UTC)] * 3, pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"id": ["a", "b", "c"], "at": moments, **more}), bank.site.landing / f"{name}.parquet")


@pytest.fixture
def windowed(bank) -> Bank:
    return Bank(replace(bank.site, pipeline=pipeline, module=__name__))


def test_late_rows_are_counted_by_stage_and_not_added_up_over_stages(windowed, weir):
    hour(windowed, "1", 12)
    hour(windowed, "2", 3)
    ran = weir(windowed.site, "run", "small", "--until-caught-up")
    assert "  late: 3 in w0, 3 in w1  [" in ran.out.splitlines()[1]
    assert ran.out.splitlines()[2] == "Caught up at checkpoint 2: 2 epochs, 6 rows; late: 3 in w0, 3 in w1."
    assert ran.out.splitlines()[3].endswith("tables: l0, l1"), "names once, and their directory once"
    assert len(ran.out.splitlines()) == 4


def test_an_extra_column_of_a_file_is_left_out_with_a_word_and_that_once(windowed, weir):
    hour(windowed, "1", 12)
    weir(windowed.site, "run", "small", "--until-caught-up")
    for number in (2, 3, 4):
        hour(windowed, str(number), 12, weight=[1.5] * 3)
    word = "columns that the first files did not have"
    planned = weir(windowed.site, "plan", "small")
    assert f"files that wait have {word}, and that are not read: weight" in " ".join(planned.out.split())
    (finding,) = [
        each
        for each in json.loads(weir(windowed.site, "plan", "small", "--json").out)["findings"]
        if word in each["what"]
    ]
    assert (finding["kind"], finding["name"], finding["verdict"]) == ("source", "landing", "compatible")
    ran = weir(windowed.site, "run", "small", "--until-caught-up")
    assert ran.code == 0 and (ran.err + ran.out).count(f"{word} are not read: weight") == 1


def test_spark_s_start_is_said_when_it_starts_and_not_before_what_needs_none(tmp_path, weir, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    bank.land(2)

    def session(*_, **__):
        raise ConfigurationError("there is no Java here")

    monkeypatch.setattr(spark_session, "session", session)
    refused = weir(replace(bank.site, pipeline=pipeline, module=__name__), "run", "small", "--until-caught-up")
    assert refused.code == 2 and "has no more" in refused.err
    assert "Spark" not in refused.err + refused.out
    asked = weir(bank.site, "run", "small", "--until-caught-up")
    assert (asked.err + asked.out).count("Spark starts (5 to 30 s)") == 1 and "there is no Java here" in asked.err


def test_the_seconds_of_epochs_that_overlap_add_up_and_hold_no_start_of_spark():
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)

    def epoch(triggered: float, committed: float) -> Checkpoint:
        row = a_checkpoint(1, None, [])
        return replace(
            row, triggered_at=noon + timedelta(seconds=triggered), ms={"to_commit": (committed - triggered) * 1000}
        )

    executor = SparkExecutor(None, "a test")
    executor.ready_at = noon + timedelta(seconds=20)
    pace = progress.Pace(executor)
    assert [pace.seconds(row) for row in (epoch(0, 22), epoch(1, 23), epoch(22, 25), epoch(60, 62))] == [2, 1, 2, 2]


@pytest.mark.long
def test_a_note_that_holds_for_many_tables_is_given_once(bank, weir, monkeypatch):
    many = replace(bank.site, pipeline=of_tables(10), module=f"{__name__}")
    monkeypatch.setattr(f"{__name__}.pipeline", many.pipeline)
    hour(Bank(many), "1", 12)
    hour(Bank(many), "2", 15)
    weir(many, "run", "small", "--until-caught-up")
    ended = weir(many, "savepoint", "small", "--name", "kept")
    assert ended.code == 0 and ended.err.count("logRetentionDuration") == 1
    assert "20 tables keep their logs for 30 days" in ended.err and "t0, l0, t1, l1" in ended.err


def test_rewind_has_one_way_to_name_a_checkpoint():
    (asked,) = [
        option
        for path, option in _options(typer.main.get_command(main.app), "weir")
        if path == "weir rewind" and "--to" in option.opts
    ]
    assert "savepoint" in asked.help
    shown = [
        option
        for path, option in _options(typer.main.get_command(main.app), "weir")
        if path == "weir rewind" and not option.hidden
    ]
    assert "--savepoint" not in [name for option in shown for name in option.opts]


def _options(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for parameter in command.params:
        if parameter.param_type_name == "option":  # of whichever click typer brings
            yield path, parameter
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _options(subcommand, f"{path} {name}")


def test_no_option_has_a_half_that_says_no_and_adds_nothing():
    """At 80 columns it takes the room of the help's words."""
    halves = [
        (path, half)
        for path, option in _options(typer.main.get_command(main.app), "weir")
        for half in option.secondary_opts
        if half.startswith("--no-")
    ]
    assert halves == []
