"""The log of a run in Dagster has a line for each epoch."""

from __future__ import annotations

from state_ops import logs
from tests.state_ops.test_logs import lines
from tests.weir.dagster.without_spark import House


def logged(house: House, run_id: str) -> list[str]:
    return [entry.user_message for entry in house.instance.all_logs(run_id) if entry.user_message.startswith("epoch ")]


def test_each_epoch_is_a_line_in_the_runs_log(house):
    house.bank.land(4, 5)
    run = house.execute("small_job")
    first, second = logged(house, run.run_id)
    assert first.split()[:2] == ["epoch", "4"] and "lag: 1 waiting in landing" in first
    assert second.split()[:2] == ["epoch", "5"] and " [" in second and "lag" not in second


def test_with_json_lines_each_is_one_of_its_run_on_stderr_too(house, monkeypatch, capfd):
    monkeypatch.setenv(logs.FORMAT, "json")
    monkeypatch.setattr(logs, "_adopted", [])  # what this process adopts is over with the test
    house.bank.land(4)
    run = house.execute("small_job")
    written = [text for text in capfd.readouterr().err.splitlines() if text.startswith("{")]
    (epoch,) = [fields for fields in lines("\n".join(written)) if fields["event"] == "epoch"]
    assert (epoch["epoch"], epoch["run_id"], epoch["rows_in"]) == (4, run.run_id, 10)
    assert len(logged(house, run.run_id)) == 1
