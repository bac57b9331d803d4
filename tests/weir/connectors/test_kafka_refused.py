"""What the Kafka sink refuses before the commit: what a broker, its client or the encoding would refuse after it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from state_ops.errors import PipelineError
from tests.tools.kafka import KafkaTopics
from tests.weir.connectors.test_postgres_values import Batch
from weir.connectors.kafka.encoding import encoder
from weir.connectors.kafka.sink import KafkaSink
from weir.connectors.kafka.values import MessageRules
from weir.definition.sink import Publisher, SinkOpening

AVRO = {
    "string": ("string", pa.string(), ["a", ""], [None]),
    "nullable": (["null", "string"], pa.string(), [None, "a"], []),
    "enum": ({"type": "enum", "name": "e", "symbols": ["a"]}, pa.string(), ["a"], ["b", None]),
    "fixed": ({"type": "fixed", "name": "f", "size": 2}, pa.binary(), [b"ab"], [b"abc", b""]),
    "list": ({"type": "array", "items": "string"}, pa.list_(pa.string()), [[], ["a"]], [[None], None]),
    "struct": ({"type": "record", "name": "n", "fields": [{"name": "x", "type": "long"}]},
               pa.struct([("x", pa.int64())]), [{"x": 1}], [{"x": None}]),
    "decimal": ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, pa.decimal128(4, 2),
                [Decimal("12.34")], [None]),
    "date": ({"type": "int", "logicalType": "date"}, pa.date32(), [date.min, date.max], [None]),
    "time": ({"type": "long", "logicalType": "timestamp-micros"}, pa.timestamp("us", "UTC"),
             [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)], [None]),
}  # fmt: skip


@contextmanager
def publisher(kafka: KafkaTopics, topic: str, options: dict[str, str] | None = None, **more) -> Iterator[Publisher]:
    definition = KafkaSink(name="out", topic=topic, servers=kafka.servers, **more)
    opened = definition.open(SinkOpening("weir/p/main/out", str, options or {}, lambda: None))
    try:
        yield opened
    finally:
        opened.close()


def refused(opened: Publisher, rows: pa.Table) -> list[tuple[int, str]]:
    opened.check(rows.schema)
    rules = pickle.loads(pickle.dumps(opened.rules(rows.schema)))
    return [(value.row, value.column) for value in rules.refused(rows)]


@pytest.mark.parametrize("kind", AVRO)
def test_what_an_avro_schema_does_not_take_is_refused_by_row_and_column(kind):
    of_field, type, good, bad = AVRO[kind]
    schema = json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}, {"name": "v", "type": of_field}]}
    )
    rules = MessageRules((), "avro", schema, None, False, 900_000)
    values = [value for pair in zip(good, [*bad, *good], strict=False) for value in pair] + good
    rows = pa.table({"id": range(len(values)), "v": pa.array(values, type)})
    expected = [(row, "v") for row, value in enumerate(values) if value in bad and value not in good]
    assert [(value.row, value.column) for value in rules.refused(rows)] == expected
    left = rows.filter(pa.array([(row, "v") not in expected for row in range(len(values))]))
    assert len(list(encoder("avro", schema, None, ())(left.combine_chunks().to_batches()[0]))) == left.num_rows


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_takes_no_message_without_a_key(kafka, policy):
    topic = kafka.create(cleanup_policy=policy)
    rows = pa.table({"id": [1, 2, 3], "k": ["a", None, ""]})
    with publisher(kafka, topic) as opened, pytest.raises(PipelineError, match="is compacted"):
        opened.check(rows.schema)
    with publisher(kafka, topic, key=("k",)) as opened:
        assert refused(opened, rows) == [(1, "k")]
        opened.publish(None, 1, Batch(rows.filter(pa.array([True, False, True]))))
    with publisher(kafka, topic, key=("k", "id")) as opened:
        assert refused(opened, rows) == []
    with publisher(kafka, kafka.create(), key=("k",)) as opened:
        assert refused(opened, rows) == []


def test_a_topic_that_is_not_there_is_judged_by_what_it_will_be(kafka):
    rows = pa.table({"id": [1]})
    compacted = publisher(kafka, "not-there", topic_options=(("cleanup.policy", "compact"),))
    with compacted as opened, pytest.raises(PipelineError, match="is compacted"):
        opened.check(rows.schema)
    with publisher(kafka, "not-there") as opened:
        assert refused(opened, rows) == []


@pytest.mark.parametrize("values", ["json", "avro"])
@pytest.mark.parametrize(("topics", "clients"), [(2_000, None), (None, 3_000), (None, None)])
def test_a_message_is_too_large_before_the_commit_and_not_after_it(kafka, values, topics, clients):
    topic = kafka.create(**({"max_message_bytes": str(topics)} if topics else {}))
    options = {"message.max.bytes": str(clients)} if clients else {}
    schema = json.dumps({"type": "record", "name": "r", "fields": [{"name": "v", "type": "string"}]})
    more = {"values": values, "schema": schema if values == "avro" else None}
    limit = min(topics or 1_000_000, clients or 1_000_000)
    rows = pa.table({"v": ["x", "y" * limit, "é" * (limit // 2), "z" * (limit - 600)]})
    with publisher(kafka, topic, options, **more) as opened:
        assert refused(opened, rows) == [(1, "v"), (2, "v")]
        opened.publish(None, 1, Batch(rows.take(pa.array([0, 3]))))
        with pytest.raises(PipelineError, match="larger"):
            opened.publish(1, 2, Batch(rows.slice(1, 1)))


@pytest.mark.parametrize("part", [pa.bool_(), pa.struct([("a_name_longer_than_its_value", pa.int8())])], ids=str)
def test_a_list_of_small_parts_that_makes_too_large_a_message_is_refused(part):
    item = False if pa.types.is_boolean(part) else {"a_name_longer_than_its_value": 1}
    rows = pa.table({"id": [1, 2], "parts": pa.array([[item], [item] * 200_000], pa.list_(part))})
    (refused,) = MessageRules((), "json", None, None, False, 900_000).refused(rows)
    assert (refused.row, refused.column) == (1, "parts")


def test_json_takes_all_values_at_their_limits():
    rows = pa.table({
        "d": pa.array([date.min, date.max, None]),
        "t": pa.array([datetime.min, datetime.max, None], pa.timestamp("us")),
        "z": pa.array([datetime.min, datetime.max, None], pa.timestamp("us", "UTC")),
        "f": [float("nan"), float("-inf"), None],
        "b": [b"\xff\0", b"", None],
        "n": pa.array([Decimal("9" * 38), Decimal("-" + "9" * 38), None], pa.decimal128(38, 0)),
        "i": pa.array([2**63 - 1, -(2**63), None]),
        "u": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "s": ["\0\u2028", "\ud7ff\U0010ffff", None],
        "l": pa.array([[date.min], [date.max, None], None]),
        "o": pa.array([{"x": date.max}, {"x": None}, None]),
    })  # fmt: skip
    rules = MessageRules((), "json", None, None, False, 900_000)
    assert not list(rules.refused(rows))
    for key in rows.column_names[:-2]:
        messages = list(encoder("json", None, None, (key,))(rows.combine_chunks().to_batches()[0]))
        assert [len(json.loads(value)) for _, value in messages] == [11, 11, 11]
