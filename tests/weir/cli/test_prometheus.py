"""Metrics of real pipelines, as Prometheus gets them: over HTTP, in its text format, from storage alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from state_ops.coordination import lease, requests, suspension
from state_ops.errors import ConfigurationError, DamageError, GateError, TransientError, WeirError
from state_ops.extras import version
from state_ops.fsck.findings import Kind
from state_ops.storage.storage import Storage
from tests.recovery.small import Bank, successor, until
from tests.tools.sampling import sampled
from tests.weir.gates.test_gates import between, gated
from tests.weir.operators.functions.test_per_key_runs import COLUMNS, _dicts, a_pipeline, landed
from weir.cli import metrics
from weir.cli.operations import command_of
from weir.cli.prometheus import Exporter, samples
from weir.cli.watching.pipeline_look import PipelineLook, Watched
from weir.epoch import steps
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill
from weir.operations.declared import declared
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, open_storage, run
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT, Settings
from weir.sources.files import FilesReader

Scraped = dict[tuple[str, ...], float]


def parsed(text: str) -> Scraped:
    """Values by metric and the values of its labels, in the order of the labels' names."""
    samples_by_name = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for _, value in sorted(sample.labels.items())]
            assert (sample.name, *labels) not in samples_by_name, "Prometheus would drop one of them"
            samples_by_name[(sample.name, *labels)] = sample.value
    return samples_by_name


@contextmanager
def served(exporter: Exporter) -> Iterator[str]:
    registry = CollectorRegistry()
    registry.register(exporter)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def got(url: str) -> Scraped:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return parsed(answer.read().decode())


def scraped(bank: Bank) -> Scraped:
    with served(Exporter(["small"], bank.site.settings)) as url:
        return got(url)


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")


def test_a_scrape_says_what_the_registry_says(bank: Bank):
    bank.epochs(1, 2, 3)
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "kept", "test", 60)
    bank.land(4, 5)
    values, head = scraped(bank), bank.registry.head()
    assert head is not None
    expected = {
        ("weir_up", "small"): 1,
        ("weir_coordinator_alive", "small"): 0,
        ("weir_coordinator_generation", "small"): bank.registry.generation(),
        ("weir_checkpoint_id", "small"): 3,
        ("weir_checkpoint_completed_timestamp_seconds", "small"): head.completed_at.timestamp(),
        ("weir_checkpoint_interval_seconds", "small"): 60,
        ("weir_retained_checkpoints", "small"): 2,
        ("weir_savepoints", "small"): 1,
        ("weir_unpublished_checkpoints", "small"): 0,
        ("weir_epochs_total", "small"): 3,
        ("weir_rows_read_total", "small"): 30,
        ("weir_rows_lost_total", "small"): 0,
        ("weir_rows_quarantined_total", "small"): 0,
        ("weir_state_uploaded_bytes_total", "small"): head.totals["bytes_new"],
        ("weir_state_bytes", "small", "accounts"): head.bytes_total,
        ("weir_stage_rows", "in", "small", "accounts"): 10,
        ("weir_stage_rows", "out", "small", "accounts"): 10,
        ("weir_stage_rows", "late", "small", "accounts"): 0,
        ("weir_epoch_phase_seconds", "to_commit", "small", ""): head.ms["to_commit"] / 1000,
        ("weir_epoch_phase_seconds", "stage", "small", "accounts"): head.ms["stage:accounts"] / 1000,
        ("weir_source_up", "small", "landing"): 1,
        ("weir_source_files_waiting", "small", "landing"): 2,
        ("weir_source_bytes_waiting", "small", "landing"): sum(
            (bank.site.landing / name).stat().st_size for name in ("00004.parquet", "00005.parquet")
        ),
        ("weir_sink_checkpoint_id", "small", "booked"): 3,
        ("weir_sink_published_checkpoint_id", "small", "booked"): 3,
        ("weir_storage_requests_total", "put", "small"): head.totals["requests_put"],
        ("weir_storage_transferred_bytes_total", "up", "small"): head.totals["bytes_up"],
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["weir_scrape_seconds", "small"] < 1
    assert not [key for key in values if key[0].startswith("weir_restore")], "there was none"


def test_before_the_first_checkpoint_and_before_the_first_run(bank: Bank):
    bank.land(1)
    values = scraped(bank)
    assert values["weir_up", "small"] == 1 and values["weir_source_files_waiting", "small", "landing"] == 1
    assert values["weir_coordinator_generation", "small"] == 0 and values["weir_coordinator_alive", "small"] == 0
    assert ("weir_checkpoint_id", "small") not in values


@pytest.mark.parametrize("last", sampled([4, 29]))  # before the 29th the registry's logs are cleaned up
def test_the_next_scrape_sees_what_came_since(bank: Bank, last: int):
    bank.epochs(1)
    with served(Exporter(["small"], bank.site.settings)) as url:
        assert got(url)["weir_checkpoint_id", "small"] == 1
        bank.epochs(*range(2, last + 1))
        values = got(url)
    assert values["weir_checkpoint_id", "small"] == last and values["weir_epochs_total", "small"] == last


def test_a_coordinator_that_lives_and_one_that_has_ended(bank: Bank):
    with served(Exporter(["small"], bank.site.settings)) as url:
        with bank.coordinator():
            until(lambda: got(url)["weir_coordinator_alive", "small"] == 1)
            requests.send(open_storage(bank.site.pipeline, bank.site.settings)[0], requests.Request("stop"))
        assert got(url)["weir_coordinator_alive", "small"] == 0


def test_that_a_person_has_stopped_the_pipeline(bank: Bank):
    bank.epochs(1)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    with served(Exporter(["small"], bank.site.settings)) as url:
        assert got(url)["weir_suspended", "small"] == 0
        suspension.write(storage, suspension.Suspension("stopped", "weir stop"))
        assert got(url)["weir_suspended", "small"] == 1


def test_on_another_host_only_the_counter_tells(bank: Bank):
    bank.epochs(1)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    held = lease.read(storage)
    assert held is not None

    def beat(counter: int) -> None:
        away = replace(held, host="elsewhere", stopped=False, counter=counter, heartbeat_seconds=5.0)
        storage.put_bytes(lease.LEASE, json.dumps({name: getattr(away, name) for name in away.__slots__}).encode())

    watched, alive = Watched("small", bank.site.settings), []
    for counter, at in [(1, 0.0), (1, 14.0), (2, 15.0), (2, 29.0), (2, 30.0), (3, 31.0), (3, 46.0)]:
        beat(counter)
        alive.append(watched.look(lambda at=at: at).alive)
    assert alive == [None, None, True, True, False, True, False]
    assert "weir_coordinator_alive" not in {name for name, _, _ in samples(replace(watched.look(), alive=None))}


def test_checkpoints_that_a_table_lacks(bank: Bank, monkeypatch):
    bank.epochs(1)

    def refused(*_: object) -> None:
        raise OSError("the table cannot be reached")

    with monkeypatch.context() as broken:
        broken.setattr(steps, "publish_missing", refused)
        with pytest.raises(WeirError, match="cannot be reached"):
            bank.epochs(2)
    values = scraped(bank)
    assert values["weir_unpublished_checkpoints", "small"] == 1
    assert values["weir_sink_checkpoint_id", "small", "booked"] == 2
    assert values["weir_sink_published_checkpoint_id", "small", "booked"] == 1


def test_a_gate_that_holds_the_pipeline_until_a_later_epoch_is_well(tmp_path: Path):
    bank = gated(tmp_path, between("amount", 0, 1), between("rows_in", 10, 10, of="figures"))
    with pytest.raises(GateError):
        bank.epochs(1, 2)
    values = scraped(bank)
    assert values["weir_held", "small"] == 1 and values["weir_checkpoint_id", "small"] == 1
    assert values["weir_epoch_phase_seconds", "seal_gates", "small", ""] > 0
    assert ("weir_epoch_phase_seconds", "gate", "small", "accounts") in values
    (bank.site.landing / "00002.parquet").unlink()
    bank.land(1)  # its name was read already
    (bank.site.landing / "00001.parquet").rename(bank.site.landing / "00003.parquet")
    bank.epochs()
    assert scraped(bank)["weir_held", "small"] == 0


def test_restores_that_were_well_and_one_that_was_not(bank: Bank, monkeypatch):
    for name, value in bank.site.env.items():
        monkeypatch.setenv(name, value)
    bank.epochs(1, 2)
    restore = command_of(declared("restore"))
    restore(pipeline="small")
    values = scraped(bank)
    assert values["weir_restore_last_valid", "small"] == 1
    assert values["weir_restore_last_checkpoint_id", "small"] == 2
    assert 0 < values["weir_restore_last_seconds", "fetch", "small"] < 60
    assert abs(values["weir_restore_last_timestamp_seconds", "small"] - time.time()) < 600
    head = bank.registry.head()
    assert head is not None
    (bank.site.storage / bank.registry.files(head)[0].path).unlink()
    with pytest.raises(DamageError):
        restore(pipeline="small")
    assert scraped(bank)["weir_restore_last_valid", "small"] == 0


@pytest.mark.long
def test_what_the_last_checks_have_found_and_how_long_ago(bank: Bank, monkeypatch):
    bank.epochs(1, 2)
    assert not [key for key in scraped(bank) if key[0].startswith(("weir_fsck_last", "weir_drill_last"))]
    foreign = bank.site.storage / "of-somebody-else"
    foreign.write_text("x")
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    values = scraped(bank)
    assert values["weir_fsck_last_damaged", "full", "small"] == 0 and values["weir_fsck_scheduled", "small"] == 1
    assert values["weir_fsck_last_findings", "full", "foreign file", "small", "foreign"] == 1
    assert values["weir_fsck_last_leftover_bytes", "full", "small"] == 0
    assert 0 < values["weir_fsck_last_seconds", "full", "small"] < 60
    assert abs(values["weir_fsck_last_timestamp_seconds", "full", "small"] - time.time()) < 600

    head = bank.registry.head()
    assert head is not None
    gone = bank.site.storage / bank.registry.files(head)[0].path
    kept = gone.read_bytes()
    gone.unlink()
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings, quick=True)
    values = scraped(bank)
    assert (
        values["weir_fsck_last_damaged", "quick", "small"] == 1
        and values["weir_fsck_last_damaged", "full", "small"] == 0
    )
    assert values["weir_fsck_last_findings", "quick", "missing object", "small", "damage"] == 1
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    gone.write_bytes(kept)
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings, quick=True)
    assert scraped(bank)["weir_fsck_last_damaged", "full", "small"] == 1, "sizes alone take back nothing"
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    values = scraped(bank)
    assert values["weir_fsck_last_damaged", "full", "small"] == 0
    assert ("weir_fsck_last_damaged", "quick", "small") not in values, "it is older"
    kinds = {finding.kind for finding in fsck.examine(bank.site.pipeline, bank.site.settings).findings}
    assert kinds == {Kind.FOREIGN_FILE}, "notes are no foreign files"


def test_what_the_last_drill_has_measured_and_found(bank: Bank, monkeypatch):
    bank.epochs(1, 2, 3)
    done = drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
    values = scraped(bank)
    for name in ("valid", "in_time", "replayed"):
        assert values[f"weir_drill_last_{name}", "small"] == 1, name
    assert values["weir_drill_last_checkpoint_id", "small"] == 3 and values["weir_drill_scheduled", "small"] == 1
    assert abs(values["weir_drill_last_timestamp_seconds", "small"] - time.time()) < 600
    assert values["weir_drill_last_seconds", "restore", "small"] == done.restore_seconds
    assert values["weir_drill_last_seconds", "replay", "small"] == done.replay.seconds
    assert values["weir_drill_last_seconds", "recovery", "small"] == done.recovery_seconds
    assert values["weir_drill_last_seconds", "whole", "small"] >= done.recovery_seconds
    assert values["weir_drill_last_loss_window_seconds", "small"] == 0

    head = bank.registry.head()
    assert head is not None
    (bank.site.storage / bank.registry.files(head)[0].path).unlink()
    drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
    values = scraped(bank)
    assert values["weir_drill_last_valid", "small"] == values["weir_drill_last_in_time", "small"] == 0
    assert ("weir_drill_last_seconds", "recovery", "small") not in values


def test_a_result_that_cannot_be_noted_is_given_all_the_same(bank: Bank, monkeypatch):
    bank.epochs(1)

    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(Storage, "put_bytes", refused)
        report = fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    assert not report.damage
    (warned,) = [entry for entry in logged if entry["event"] == "a result could not be noted"]
    assert warned["path"].endswith("coordinator/fsck.json") and "read-only" in warned["error"]


def test_nothing_is_noted_where_nothing_has_ever_run(bank: Bank):
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    assert not bank.site.storage.exists()


def test_the_state_cache(tmp_path: Path):
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), {"totals": {"l1": 100}})
    reports = list(run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor()))
    look = PipelineLook(60.0, None, False, 1, [reports[-1].checkpoint])
    values = {(name, *labels): value for name, labels, value in samples(look)}
    assert values["weir_cache_hits_total", "totals", "l1"] == 16 and values["weir_cache_misses_total", "totals"] == 8
    assert values["weir_cache_writes_total", "totals", "flushed"] == 24


# -- several pipelines, of which some cannot be read


@pytest.fixture
def both(bank: Bank) -> Settings:
    """The small pipeline and its successor, which have run, and one that nobody can import."""
    params = bank.site.env["WEIR_PIPELINES__SMALL__PARAMS"]
    loaded = settings.load({
        **bank.site.env,
        "WEIR_PIPELINES__SUCCESSOR__OBJECT": "tests.recovery.small:successor",
        "WEIR_PIPELINES__SUCCESSOR__PARAMS": params,
        "WEIR_PIPELINES__LOST__OBJECT": "no.such.module:pipeline",
    })  # fmt: skip
    bank.epochs(1, 2)
    list(run(successor, loaded, RunOptions(until_caught_up=True), InMemoryExecutor()))
    return loaded


@contextmanager
def _hanging(place: Path) -> Iterator[None]:
    """While this lasts, whoever reads the file waits."""
    held = place.read_bytes()
    place.unlink()
    os.mkfifo(place)
    try:
        yield
    finally:
        released = os.open(place, os.O_WRONLY)
        place.unlink()
        place.write_bytes(held)
        os.close(released)


def _assert_others_are_seen(values: Scraped) -> None:
    assert values["weir_up", "successor"] == 1 and values["weir_checkpoint_id", "successor"] == 2
    assert values["weir_up", "small"] == 0 and values["weir_up", "lost"] == 0
    assert {key[0] for key in values if "small" in key[1:] or "lost" in key[1:]} == {"weir_up"}


def test_a_damaged_registry_hides_no_other_pipeline_and_is_named_once(bank: Bank, both: Settings):
    (newest,) = list((bank.site.storage / "registry" / "checkpoints" / "data").glob("*-*.parquet"))[-1:]
    whole = newest.read_bytes()
    newest.write_bytes(whole[:100])
    with capture_logs() as logged, served(Exporter(["lost", "small", "successor"], both)) as url:
        _assert_others_are_seen(got(url))
        _assert_others_are_seen(got(url))
        newest.write_bytes(whole)
        assert got(url)["weir_up", "small"] == 1
    events = [(line["event"], line["pipeline"]) for line in logged if "pipeline" in line]
    assert events == [
        ("a pipeline cannot be read", "lost"),
        ("a pipeline cannot be read", "small"),
        ("a pipeline can be read again", "small"),
    ]


@pytest.mark.long
def test_storage_that_does_not_answer_hides_no_other_pipeline(bank: Bank, both: Settings):
    exporter = Exporter(["lost", "small", "successor"], both, patience=2.0)
    with served(exporter) as url:
        with _hanging(bank.site.storage / lease.LEASE):
            began = time.monotonic()
            _assert_others_are_seen(got(url))
            assert time.monotonic() - began < 20
            asked = exporter._looks.going["small"]
            _assert_others_are_seen(got(url))
            assert exporter._looks.going["small"] is asked, "it is not asked once more beside the first time"
        until(lambda: got(url)["weir_up", "small"] == 1)


def test_two_scrapes_at_the_same_time_take_no_longer_than_one(bank: Bank, both: Settings):
    """Of two Prometheus, each gives up after ten seconds."""
    exporter = Exporter(["lost", "small", "successor"], both, patience=4.0)
    with served(exporter) as url, ThreadPoolExecutor(2) as threads, _hanging(bank.site.storage / lease.LEASE):
        began = time.monotonic()
        for values in threads.map(got, [url, url]):
            _assert_others_are_seen(values)
        assert time.monotonic() - began < 7


def test_a_source_that_does_not_answer_hides_nothing_else_and_is_named_once(bank: Bank, monkeypatch):
    bank.epochs(1)
    bank.land(2)

    def refused(*_: object) -> None:
        raise TransientError("The server is away.")

    with capture_logs() as logged, served(Exporter(["small"], bank.site.settings)) as url:
        with monkeypatch.context() as away:
            away.setattr(FilesReader, "look", refused)
            values = [got(url), got(url)][-1]
        again = got(url)
    assert values["weir_up", "small"] == values["weir_checkpoint_id", "small"] == 1
    assert values["weir_source_up", "small", "landing"] == 0
    assert ("weir_source_files_waiting", "small", "landing") not in values
    assert again["weir_source_up", "small", "landing"] == again["weir_source_files_waiting", "small", "landing"] == 1
    events = [(line["event"], line["source"], line.get("reason")) for line in logged if "source" in line]
    assert events == [
        ("a source cannot be looked at", "landing", "The server is away."),
        ("a source can be looked at again", "landing", None),
    ]


# -- the command


def _command(bank: Bank, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "weir.cli.main", "metrics", *arguments]


def _environment(bank: Bank) -> dict[str, str]:
    return {**os.environ, **bank.site.env, "PYTHONPATH": str(PROJECT)}


def test_the_command_serves_until_it_is_ended(bank: Bank):
    bank.epochs(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = _command(bank, "small", "--port", str(port))
    with subprocess.Popen(command, cwd=PROJECT, env=_environment(bank), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert f"http://127.0.0.1:{port}/metrics" in line
            values = got(f"http://127.0.0.1:{port}/metrics")
            taken = subprocess.run(
                command, cwd=PROJECT, env=_environment(bank), capture_output=True, text=True, timeout=120
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert values["weir_up", "small"] == 1 and values["weir_checkpoint_id", "small"] == 1
    assert taken.returncode == 2 and f"--port {port + 1}" in taken.stderr


def test_once_prints_all_pipelines_of_the_configuration_and_ends(bank: Bank):
    bank.epochs(1)
    done = subprocess.run(
        _command(bank, "--once"), cwd=PROJECT, env=_environment(bank), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    values = parsed(done.stdout)
    assert values["weir_up", "small"] == 1 and ("weir_up", "flights") in values


def test_a_name_that_is_not_configured_is_refused(bank: Bank, monkeypatch):
    for name, value in bank.site.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"'smal'.*\n.*small") as refused:
        metrics.metrics(["small", "smal"], once=True)
    assert refused.value.exit_code == 2


def test_the_exporter_says_its_version_once_and_of_no_pipeline():
    build = next(Exporter([], settings.load({})).collect())
    assert [(sample.name, sample.labels, sample.value) for sample in build.samples] == [
        ("weir_build_info", {"version": version()}, 1.0)
    ]
