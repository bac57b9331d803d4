"""State as a Spark DataFrame: the same rows, a partition a subtask."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

from state_ops.errors import ConfigurationError, WeirError
from tests.weir.inspection.test_state_reader import _counted, _epoch, _evolving, everything, rows
from weir import State, state_reader


@pytest.mark.parametrize("uid", ["riders", "hourly"])
def test_a_dataframe_has_the_rows_of_the_checkpoint(rides_run, spark, uid):
    before = everything(rides_run)
    frame = state_reader.dataframe(spark, rides_run.site.pipeline, uid, at=5, settings=rides_run.site.settings)
    assert frame.rdd.getNumPartitions() == 2
    collected = [row.asDict(recursive=True) for row in frame.collect()]
    if uid == "hourly":  # Python gets Spark's timestamps as naive ones, in the machine's zone
        for row in collected:
            row |= {name: row[name].astimezone(UTC) for name in ("window_start", "window_end")}
    assert sorted(map(_plain, collected)) == sorted(map(_plain, rows(rides_run, uid, 5)))
    assert everything(rides_run) == before


def _plain(row: dict) -> str:
    return str({name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()})


def test_spark_aggregates_a_savepoint(rides_run, spark, monkeypatch):
    for name, value in rides_run.site.env.items():
        monkeypatch.setenv(name, value)
    frame = state_reader.dataframe(spark, "rides", "riders", savepoint="first-day")
    ((paid,),) = rides_run.replay("SELECT sum(fare) FROM rides", 1)
    assert frame.selectExpr("sum(paid)", "sum(size(stops))").collect() == [(paid, 40)]
    with pytest.raises(WeirError, match="no savepoint 'second-day'"):
        state_reader.dataframe(spark, "rides", "riders", savepoint="second-day")
    with pytest.raises(ConfigurationError):
        state_reader.dataframe(spark, "rides", "riders", at=1, savepoint="first-day")


class Lasting(State):
    rows: int = 0
    took: timedelta | None = None


def test_a_column_that_spark_cannot_have_is_named(tmp_path, spark):
    site = _evolving(tmp_path, _counted(Lasting, "rows"))
    _epoch(site, 1)
    with pytest.raises(ConfigurationError, match="'took' of seen is duration"):
        state_reader.dataframe(spark, site.pipeline, "seen", settings=site.settings)
