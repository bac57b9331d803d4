"""The first row of each key, for as long as a key is remembered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError
from state_ops.rows.expiring_rows import ExpiringRows
from state_ops.rows.resident_table import Residence
from weir import deduplicate, delta, files, testing
from weir.operators.deduplication import running as deduplication
from weir.operators.shapes import shapes

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EVENTS = files("x/*.parquet", event_time="at")


def at(minutes: float, key: str = "a", **other: object) -> dict:
    return {"k": key, "at": NOON + timedelta(minutes=minutes), **other}


def test_one_row_of_each_key_comes_out_with_all_its_columns():
    run = testing.run(deduplicate("unique", EVENTS, key="k"), parallelism=2, batch_rows=2)
    rows = pa.table({"k": ["a", "b", "a", "a"], "m": pa.array([[("x", 1)]] * 4, pa.map_(pa.string(), pa.int64()))})
    assert sorted(run.epoch(rows)["k"]) == ["a", "b"]
    assert run.epoch(rows).is_empty()
    assert sum(ack.rows_in - ack.rows_out for ack in run.acks) == 4
    assert run.epoch(rows.slice(0, 1)).schema.keys() == {"k", "m"}
    assert run.state["a"].expires is None


def nothing_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residence, "load", lambda *_: None)
    monkeypatch.setattr(ExpiringRows, "_worth_a_scan", lambda *_: False)


def test_forgetting_is_bounded_and_what_has_expired_is_not_consulted(monkeypatch):
    nothing_is_resident(monkeypatch)
    monkeypatch.setattr(deduplication, "_SWEPT", 128)  # one of each group and epoch
    run = testing.run(deduplicate("unique", EVENTS, key="k", on="at", ttl="1h"))
    keys = [str(number) for number in range(1000)]
    run.epoch([at(0, key) for key in keys])
    run.epoch([at(60, "x")])
    left = len(run.state)
    assert 1001 - 128 <= left < 1001
    assert len(run.epoch([at(60, key) for key in keys])) == 1000
    for _ in range(20):
        run.epoch([])
    assert len(run.state) == 1001  # the new entries, whose old ones do not take them along
    run.epoch([at(200, "y")])
    for _ in range(20):
        run.epoch([])
    assert list(run.state) == ["y"]


@pytest.mark.parametrize("resident", [True, False])
def test_state_does_not_grow_as_long_as_keys_come_no_faster_than_they_expire(monkeypatch, resident):
    if not resident:
        nothing_is_resident(monkeypatch)
    monkeypatch.setattr(deduplication, "_SWEPT", 128)
    run = testing.run(deduplicate("unique", EVENTS, key="k", on="at", ttl="1h"))
    for hour in range(5):
        assert len(run.epoch([at(60 * hour, f"{hour} {number}") for number in range(1000)])) == 1000
    assert len(run.state) < 1100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "at"}, "but not when"),
        ({"ttl": "7 days"}, "ttl='7 days' is no duration"),
        ({"ttl": "0d"}, "no time at all"),
        ({"ttl": "7d", "late": delta.append("late")}, "but no event time"),
    ],
)
def test_rules_that_make_no_sense_are_refused_when_they_are_defined(arguments, message):
    with pytest.raises(PipelineError, match=message) as raised:
        deduplicate("unique", EVENTS, key="k", **arguments)
    assert raised.value.where == "deduplicate unique"


def test_input_that_does_not_fit_is_refused():
    with pytest.raises(PipelineError, match="its source has no event time"):
        deduplicate("unique", files("x/*.parquet"), key="k", on="at", ttl="1h")
    unique = deduplicate("unique", EVENTS, key="k", on="at", ttl="1h")
    with pytest.raises(PipelineError, match="'at' is string, not a timestamp"):
        shapes(unique, pa.schema([("k", pa.string()), ("at", pa.string())]))
    with pytest.raises(PipelineError, match="'t' is time64"):
        shapes(deduplicate("unique", EVENTS, key="k"), pa.schema([("k", pa.string()), ("t", pa.time64("us"))]))
    with pytest.raises(PipelineError, match="'expires' is a key column of unique"):
        shapes(deduplicate("unique", EVENTS, key="expires"), pa.schema([("expires", pa.string())]))
    run = testing.run(unique)
    run.epoch([at(0)])
    with pytest.raises(InputError, match="1 row has no event time"):
        run.epoch([{"k": "b", "at": None}])
