"""One line for each epoch of a run: for people, or as JSON with the figures of its checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from state_ops import logs
from tests.recovery.small import Bank
from tests.state_ops.test_logs import lines
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import ownership
from weir.run import progress
from weir.timings import shares

JSON = {logs.FORMAT: "json"}


@pytest.fixture
def bank(tmp_path: Path, monkeypatch) -> Bank:
    monkeypatch.setattr(ownership, "SparkExecutor", lambda *_, **__: InMemoryExecutor())
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="9")


def test_each_epoch_is_one_line_with_what_took_its_time_and_what_waits(bank, weir):
    bank.land(1, 2, 3)
    ran = weir(bank.site, "run", "small", "--until-caught-up")
    shown = [line for line in ran.out.splitlines() if line.startswith("epoch")]
    assert [line.split()[1] for line in shown] == ["1", "2", "3"]
    assert "lag: 2 waiting in landing" in shown[0] and "lag: 1 waiting in landing" in shown[1] and "lag" not in shown[2]
    assert all(" [" in line and len(line) <= 160 for line in shown)
    assert "epoch" not in ran.err.replace("epochs", "")


def test_with_json_lines_a_run_says_nothing_else_and_each_epoch_has_typed_fields(bank, weir):
    bank.land(1, 2, 3)
    ran = weir(bank.site, "run", "small", "--until-caught-up", **JSON)
    assert ran.out == "" and ran.code == 0
    logged = lines(ran.err)
    epochs = [fields for fields in logged if fields["event"] == "epoch"]
    assert [fields["epoch"] for fields in epochs] == [1, 2, 3]
    assert [fields["backlog"] for fields in epochs] == [{"landing": 2}, {"landing": 1}, {"landing": 0}]
    for fields, row in zip(epochs, bank.registry.checkpoints(), strict=True):
        assert (fields["logger"], fields["level"], fields["pipeline"]) == ("weir.run", "info", "small")
        assert (fields["rows_in"], fields["rows_out"], fields["rows_late"]) == (10, 10, 0)
        assert fields["stage_rows"] == {"accounts": {"in": 10, "out": 10}}
        assert (fields["state_bytes"], fields["state_new_bytes"]) == (row.bytes_total, row.bytes_new)
        assert (
            row.ms.items() <= fields["phase_ms"].items() and {"commit", "publish", "prune"} <= fields["phase_ms"].keys()
        )
        assert fields["stage_phase_ms"] == {"accounts": dict(row.operators["accounts"].ms)}
        assert fields["watermark_lag_seconds"] is None, "the source has no event time"
    begun, *_, ended, tables = logged
    assert begun["event"].startswith("small: generation 1, no checkpoint yet, 3 files waiting")
    assert (ended["outcome"], ended["epochs"], ended["rows_in"], ended["checkpoint"]) == ("caught up", 3, 30, 3)
    assert "booked" in tables["event"]


def test_what_ends_a_command_is_a_json_line_with_where_and_what_next(bank, weir):
    ended = weir(bank.site, "run", "nobody", **JSON)
    (error,) = lines(ended.err)
    assert ended.code == 2 and error["level"] == "error" and error["error"] == "ConfigurationError"
    assert error["next"] and "Traceback" in error["exception"] and "nobody" in error["event"]
    ended = weir(bank.site, "run", "--no-such-option", "small", **JSON)
    (error,) = lines(ended.err)
    assert ended.code == 2 and "--no-such-option" in error["event"] and "run --help`" in error["next"]


def test_what_a_stage_raises_is_a_json_line_with_its_trace(bank, weir, monkeypatch):
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("Grüße\nan alle")

    bank.land(1)
    monkeypatch.setattr(InMemoryExecutor, "run", fails)
    ended = weir(bank.site, "run", "small", "--until-caught-up", **JSON)
    error = lines(ended.err)[-1]
    assert ended.code == 1 and error["error"] == "ZeroDivisionError" and "Grüße\nan alle" in error["exception"]


def test_a_lag_is_of_the_oldest_watermark_and_none_after_a_drain(bank):
    (report,) = bank.epochs(1)
    at = datetime(2026, 5, 1, 12, tzinfo=UTC)
    micros = [int((at - timedelta(minutes=minutes)).timestamp() * 1e6) for minutes in (2, 65)]
    row = replace(report.checkpoint, completed_at=at, watermarks=dict(zip("ab", micros, strict=True)))
    assert progress.watermark_lag_seconds(row) == 65 * 60
    assert "lag: watermark 1 h 5 min old" in progress.line_of(replace(report, checkpoint=row, backlog=None), 0.5)
    drained = replace(row, watermarks={"a": 2**62})
    assert progress.watermark_lag_seconds(drained) == 0
    assert "lag" not in progress.line_of(replace(report, checkpoint=drained, backlog={"landing": 0}), 0.5)


def test_the_line_names_what_took_most_of_the_time(bank):
    (report,) = bank.epochs(1)
    ms = {"stage:accounts": 700.0, "upload:accounts": 200.0, "seal": 60.0, "commit": 40.0, "to_commit": 960.0}
    assert progress.line_of(replace(report, ms=ms), 0.5).endswith("  [accounts 0.70 s, uploads 0.20 s, seal 0.06 s]")


@pytest.mark.parametrize("name", ["s{}", "a_stage_whose_name_says_all_that_it_does_for_the_department_number_{}"])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_line_fits_whatever_names_and_numbers_are_on_it(bank, name, count):
    (report,) = bank.epochs(1)
    names = [name.format(number) for number in range(count)]
    (stats,) = report.checkpoint.operators.values()
    row = replace(
        report.checkpoint,
        id=1_234_567,
        operators={uid: replace(stats, rows_late=9_000 - number) for number, uid in enumerate(names)},
        slice={name: {**part, "rows": 123_456_789} for name, part in report.checkpoint.slice.items()},
        bytes_total=10**12,
        bytes_new=10**9,
        watermarks={names[0]: 1},
    )
    busy = replace(
        report,
        checkpoint=row,
        ms={f"stage:{uid}": 9_000.0 for uid in names[:4]} | {"upload:a": 1_000.0},
        backlog={uid: 1_000_000 + number for number, uid in enumerate(names)},
    )
    line = progress.line_of(busy, 12_345.678)
    assert len(line) <= 160
    assert "123,456,789 rows" in line and "KiB (+976,562 KiB)" in line and "12345.68 s" in line
    assert "late: " in line and (count < 40 or "40 stages" in line or "stages more" in line)
    quiet = progress.line_of(replace(busy, checkpoint=replace(row, operators={}, watermarks={}), backlog={}), None)
    assert len(quiet) <= 160 and quiet.rstrip("]").endswith(" s")


def test_what_an_epochs_time_went_to_holds_each_part_once():
    ms = {
        "stage:a": 5.0, "quarantine:a": 1.0, "stage:b": 7.0, "gate:a": 2.0, "gate:b": 1.0, "upload:a": 3.0, "seal": 4.0,
        "seal:gates": 3.0, "to_commit": 30.0, "commit": 6.0, "commits_before": 9.0, "publishing_before": 9.0, "publish": 8.0, "prune": 1.0,
    }  # fmt: skip
    assert shares(ms) == {
        "a": 6.0, "b": 7.0, "gates": 3.0, "uploads": 3.0, "seal": 4.0, "commit": 6.0, "publish": 8.0, "prune": 1.0
    }  # fmt: skip


def test_settings_may_ask_for_json_lines(bank, weir, tmp_path):
    bank.land(1)
    file = tmp_path / "json.yaml"
    file.write_text(json.dumps({"logging": {"format": "json"}}))
    ran = weir(bank.site, "run", "small", "--until-caught-up", WEIR_CONFIG=str(file))
    assert ran.out == "" and [fields["epoch"] for fields in lines(ran.err) if fields["event"] == "epoch"] == [1]
