"""State as a Spark DataFrame: the same rows, a partition a subtask."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

from pipelines import state_reader
from pipelines.api import State
from state_ops.errors import ConfigurationError, WeirError
from tests.runtime.inspection.test_state_reader import _counted, _epoch, _evolving, everything, rows


@pytest.mark.parametrize("uid", ["riders", "hourly"])
def test_a_dataframe_has_the_rows_of_the_checkpoint(made, spark, uid):
    before = everything(made)
    frame = state_reader.dataframe(spark, made.site.pipeline, uid, at=5, settings=made.site.settings)
    assert frame.rdd.getNumPartitions() == 2
    found = [row.asDict(recursive=True) for row in frame.collect()]
    if uid == "hourly":  # Python gets Spark's timestamps as naive ones, in the machine's zone
        for row in found:
            row |= {name: row[name].astimezone(UTC) for name in ("window_start", "window_end")}
    assert sorted(map(_plain, found)) == sorted(map(_plain, rows(made, uid, 5)))
    assert everything(made) == before


def _plain(row: dict) -> str:
    return str({name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()})


def test_spark_aggregates_a_savepoint(made, spark, monkeypatch):
    for name, value in made.site.env.items():
        monkeypatch.setenv(name, value)
    frame = state_reader.dataframe(spark, "rides", "riders", savepoint="first-day")
    ((paid,),) = made.replay("SELECT sum(fare) FROM rides", 1)
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
