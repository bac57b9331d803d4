"""What a checkpoint records of an operator and of a sink, read and copied by other releases."""

import json
from dataclasses import fields

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.records.checkpoint import stats_of
from state_ops.records.operator_stats import NOTHING, OperatorStats
from state_ops.records.sink_link import SinkLink
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint

EARLIER = {"schema": None, "max_parallelism": 8, "parallelism": 2, "keys": [["id", "string"]], "rows_in": 3}
LATER = {**OperatorStats(schema="{}").to_json(), "heat": {"max": 3}, "rows_in": 4}


SINKS = [
    {"id": 3, "before": None},
    {"id": 3, "before": 2, "kind": "ledger", "taken": [[1, 2]], "delivered": True},
    {"id": 5, "before": 3, "to": None, "at": 4, "branch": "b" * 32},
    {"id": 5, "before": 3, "column": "at", "start": 0, "end": 60_000_000, "branch": "b" * 32},
    {"before": 2, "id": 3, "heat": 1},
]


def test_a_record_is_written_as_it_was_read_in_its_order():
    for record in (EARLIER, LATER, {}):
        assert json.dumps(OperatorStats.from_json(record).to_json()) == json.dumps(record)


def test_a_copy_lacks_what_its_record_lacks_and_keeps_what_is_not_known_here():
    copy = OperatorStats.from_json(EARLIER).updated(rows_in=0, waiting=[])
    assert list(copy.to_json().items()) == [*{**EARLIER, "rows_in": 0}.items(), ("waiting", [])]
    assert OperatorStats.from_json(LATER).updated(rows_in=0).to_json() == {**LATER, "rows_in": 0}


def test_what_an_earlier_release_did_not_record_has_its_default_and_is_told_apart_from_null():
    stats = OperatorStats.from_json(EARLIER)
    assert (stats.backend, stats.rows_late, stats.waiting, stats.ttl) == ("rocksdb", 0, [], None)
    assert "ttl" not in stats.names and "ttl" in OperatorStats.from_json({"ttl": None}).names
    old = OperatorStats.from_json({"schema": "{}"})
    assert old.has_state and old.schema_history == [{"schema": "{}"}] and not stats.has_state


@pytest.mark.parametrize("record", SINKS)
def test_the_record_of_a_sink_is_written_as_it_was_read_in_its_order(record):
    assert json.dumps(SinkLink.from_json(record).to_json()) == json.dumps(record)
    copy = SinkLink.from_json(record).updated(before=9, taken=[])
    assert list(copy.to_json().items()) == list({**record, "before": 9, "taken": []}.items())


def test_a_new_record_of_a_sink_has_what_was_said_of_it_alone():
    assert SinkLink(2, 1).to_json() == {"id": 2, "before": 1} and not SinkLink(2, 1).takes_back
    assert SinkLink(2, 1).updated(to=None).takes_back


def test_this_release_records_every_field():
    assert set(OperatorStats().to_json()) == {field.name for field in fields(OperatorStats)} - {"names", "unknown"}


def test_a_checkpoint_says_nothing_of_an_operator_that_it_does_not_have(tmp_path):
    row, registry = (
        a_checkpoint(
            1, None, operators={"counts": OperatorStats.from_json(LATER)}, sinks={"out": SinkLink.from_json(SINKS[1])}
        ),
        Registry(Storage(str(tmp_path)), APP),
    )
    assert registry.take_over() == 1
    registry.commit(row, [])
    assert registry.head() == row and stats_of(registry.head(), "counts").unknown == {"heat": {"max": 3}}
    assert row.to_dict()["operators"] == {"counts": LATER}
    assert row.to_dict()["sinks"] == {"out": SINKS[1]}
    assert stats_of(row, "another") is stats_of(None, "counts") is NOTHING
