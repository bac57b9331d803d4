"""What Dagster keeps of epochs, and the table and the picture made of it."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from tests.recovery import test_said as windows
from tests.recovery.small import Bank
from tests.weir.dagster.without_spark import CHECKPOINT, RETAINED, House, in_this_process
from weir.dagster import history


@pytest.fixture
def windowed(tmp_path, monkeypatch, instance) -> House:
    """Two windows over one source, of which the second file's rows are late in both."""
    in_this_process(monkeypatch)
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank = Bank(replace(bank.site, pipeline=windows.pipeline, module=windows.__name__))
    windows.hour(bank, "1", 12)
    windows.hour(bank, "2", 3)
    return House(bank, instance)


def test_late_rows_are_shown_by_stage_and_never_added_up_over_stages(windowed):
    assert windowed.execute("small_job").success
    points = history.points(windowed.instance, CHECKPOINT)
    assert [(point.rows, point.late) for point in points] == [(3, {"w0": 0, "w1": 0}), (3, {"w0": 3, "w1": 3})]
    newest = history.as_table(points).value.splitlines()[2]
    assert "| 3 | 3 in w0, 3 in w1 |" in newest
    assert "data:image/png" in history.as_plot(points).value
    (record, *_) = windowed.instance.fetch_observations(CHECKPOINT, limit=1).records
    late = {name: value.value for name, value in record.asset_observation.metadata.items() if "late" in name}
    assert late == {"rows late in w0": 3, "rows late in w1": 3}


def test_an_observation_of_an_earlier_release_has_no_late_rows_by_stage(instance):
    old = {"checkpoint": 1, "rows read": 3, "rows late": 6, "ms to commit": 5.0}
    instance.report_runless_asset_event(dg.AssetObservation(CHECKPOINT, metadata=old))
    (point,) = history.points(instance, CHECKPOINT)
    assert (point.rows, point.late) == (3, {})
    assert "data:image/png" in history.as_plot([point]).value
