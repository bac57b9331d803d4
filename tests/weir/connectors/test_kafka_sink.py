"""The Kafka sink when something goes wrong: consumers of committed messages see each row once."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
import stamina
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from state_ops.errors import DamageError, FencedError, PipelineError, TransientError
from tests.tools.kafka import KafkaTopics
from tests.tools.kafka_proxy import KafkaProxy
from tests.tools.sampling import sampled
from weir.connectors.kafka.encoding import encoder
from weir.connectors.kafka.marker import Marker
from weir.connectors.kafka.sink import KafkaSink
from weir.connectors.kafka.transactions import Transactions
from weir.definition.sink import Publisher, SinkOpening, no_rows
from weir.testing.sink_contract import SCHEMA, given

APP = "weir/flights/main/out"


@contextmanager
def publisher(
    kafka: KafkaTopics,
    topic: str,
    *,
    servers: str | None = None,
    prove: Callable[[], None] = lambda: None,
    **options: str,
) -> Iterator[Publisher]:
    definition = KafkaSink(name="out", topic=topic, servers=servers or kafka.servers, partitions=2)
    options = {name.replace("_", "."): value for name, value in options.items()}
    opened = definition.open(SinkOpening(APP, str, options, prove))
    try:
        yield opened
    finally:
        opened.close()


def ids(kafka: KafkaTopics, topic: str) -> list[int]:
    return sorted(json.loads(message.value())["id"] for message in kafka.committed(topic))


def forget_marker(kafka: KafkaTopics) -> None:
    kafka.forget_group(APP)


def test_the_answer_to_a_commit_is_lost_once(kafka):
    topic = kafka.create()
    with KafkaProxy(kafka.broker) as proxy, publisher(kafka, topic, servers=proxy.servers) as opened:
        proxy.lost_answers = 1
        assert opened.publish(None, 1, given(1, 2)).rows == 2
        assert proxy.lost == 1
        assert opened.publish(1, 2, given(3)).rows == 1
        assert opened.marker() == 2
    assert ids(kafka, topic) == [1, 2, 3]


@pytest.mark.parametrize("which", sampled(["lost_answers", "lost_requests"]))
def test_the_outcome_of_a_commit_stays_unknown(kafka, monkeypatch, which):
    """The client gives up; the marker tells whether the transaction was committed."""
    topic = kafka.create()
    with (
        KafkaProxy(kafka.broker) as proxy,
        publisher(kafka, topic, servers=proxy.servers, socket_timeout_ms="1500") as opened,
    ):
        opened.publish(None, 1, given(1))
        setattr(proxy, which, 1_000)
        began = opened._begun  # type: ignore[attr-defined]

        def begun(previous: int | None) -> Any:
            if opened._transactions is None:  # type: ignore[attr-defined]
                setattr(proxy, which, 0)  # the network is mended before the next producer comes
            return began(previous)

        monkeypatch.setattr(opened, "_begun", begun)
        assert opened.publish(1, 2, given(2, 3)).rows in (0, 2)
        assert proxy.lost >= 1
        assert opened.marker() == 2
    assert ids(kafka, topic) == [1, 2, 3]


def test_a_zombie_that_comes_late_locks_the_owner_out_and_publishes_nothing(kafka):
    topic, proofs = kafka.create(), []
    with publisher(kafka, topic, prove=lambda: proofs.append("owner")) as owner, publisher(kafka, topic) as zombie:
        owner.publish(None, 1, given(1))
        assert zombie.publish(None, 1, given(1)).rows == 0
        assert owner.publish(1, 2, given(2)).rows == 1
        assert proofs == ["owner", "owner"], "it proves again that it is the owner, and begins anew"
        assert zombie.publish(None, 1, given(1)).rows == 0
        assert owner.publish(2, 3, given(3)).rows == 1
    assert ids(kafka, topic) == [1, 2, 3]


def test_a_zombie_that_was_locked_out_learns_that_it_is_one(kafka):
    topic, is_owner = kafka.create(), True

    def prove() -> None:
        if not is_owner:
            raise FencedError("another process has taken over")

    with publisher(kafka, topic, prove=prove) as zombie, publisher(kafka, topic) as owner:
        zombie.publish(None, 1, given(1))
        is_owner = False
        owner.publish(1, 2, given(2))
        owner.publish(2, 3, no_rows())
        with pytest.raises(FencedError):
            zombie.publish(1, 4, given(9))
        assert owner.publish(3, 4, given(4)).rows == 1, "nobody was locked out"
    assert ids(kafka, topic) == [1, 2, 4]


@pytest.mark.long
def test_the_marker_was_forgotten_and_is_made_again_from_messages(kafka):
    topic = kafka.create(2)
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(1, 2, 3))
        opened.publish(3, 4, no_rows())
    kafka.send(topic, [b'{"id": 100}'] * 3)
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.marker() is None
        assert opened.publish(4, 5, given(4)).rows == 1
        assert opened.marker() == 5
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.publish(4, 5, given(4)).rows == 0, "its messages say that it was published"
        assert opened.marker() == 5, "and the marker is there again"
    assert ids(kafka, topic) == [1, 2, 3, 4, 100, 100, 100]


@pytest.mark.long
def test_a_header_is_found_behind_many_messages_of_others(kafka, monkeypatch):
    monkeypatch.setattr("weir.connectors.kafka.headers._LOOK_BACK", 3)
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(1))
    open_transaction = kafka.transactional("somebody-else")
    kafka.send(topic, [b'{"id": 100}'] * 20, headers={"weir-checkpoint": b"9 other/main/out"})
    open_transaction.begin_transaction()
    kafka.send(topic, [b'{"id": 101}'], producer=open_transaction)
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.publish(3, 4, no_rows()).rows == 0
        assert opened.marker() == 4
    open_transaction.abort_transaction(30)


def test_a_topic_that_was_made_anew_is_damage(kafka):
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(1))
    kafka.delete(topic)
    with publisher(kafka, topic) as opened, pytest.raises(DamageError, match="is gone"):
        opened.publish(3, 4, given(2))
    kafka.create(1, topic)
    with (
        publisher(kafka, topic) as opened,
        pytest.raises(DamageError, match="neither the marker nor any message") as caught,
    ):
        opened.publish(3, 4, given(2))
    assert topic in str(caught.value) and "kafka.md" in str(caught.value)
    # As the playbook says it.
    place = ConsumerGroupTopicPartitions(APP, [TopicPartition(topic, 0, 3)])
    kafka.admin.alter_consumer_group_offsets([place])[APP].result(30)
    with publisher(kafka, topic) as opened:
        assert opened.publish(3, 4, given(2)).rows == 1
    assert ids(kafka, topic) == [2]


def test_each_start_writes_the_marker_again(kafka, monkeypatch):
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        opened.publish(None, 1, given(1))

    with publisher(kafka, topic) as opened:
        commits, run = [], Transactions.run
        monkeypatch.setattr(Transactions, "run", lambda *given: commits.append(run(*given)) or commits[-1])
        for _ in range(3):
            assert opened.publish(None, 1, given(1)).rows == 0
        assert commits == [(Marker(1), 0)], "once is enough"
        assert opened.marker() == 1


def test_a_transaction_that_a_killed_process_left_open(kafka):
    topic = kafka.create()
    killed = kafka.transactional(APP)
    killed.begin_transaction()
    kafka.send(topic, [b'{"id": 9}'], producer=killed)
    with publisher(kafka, topic) as opened:
        assert opened.publish(None, 1, given(1)).rows == 1
    assert ids(kafka, topic) == [1]


@pytest.mark.parametrize("how", sampled(["kill", "stop"]))
def test_the_broker_goes_in_the_middle_of_a_publish(kafka, how):
    topic = kafka.create()
    restarts = []

    def restart() -> None:
        if not restarts:
            restarts.append(how)
            getattr(kafka.broker, how)()
            kafka.broker.start()

    with publisher(kafka, topic, socket_timeout_ms="4000") as opened:
        opened.publish(None, 1, given(1))
        # A broker that is killed sooner may take a committed transaction for one of a deleted topic when it starts.
        assert ids(kafka, topic) == [1]
        rows = replace(given(2, 3, 4, 5), after=(1, restart))
        for attempt in stamina.retry_context(TransientError, attempts=10, wait_initial=0.1):
            with attempt:  # as the engine does; the last one may find that an earlier one was committed
                opened.publish(1, 2, rows)
        assert opened.publish(2, 3, given(6)).rows == 1
        assert opened.marker() == 3
    assert restarts and ids(kafka, topic) == [1, 2, 3, 4, 5, 6]


def test_a_message_that_is_too_large_is_refused_and_the_topic_goes_on(kafka):
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        with pytest.raises(PipelineError, match="larger than the topic takes"):
            opened.publish(None, 1, given(1, text="x" * 2_000_000))
        assert opened.publish(None, 1, given(1)).rows == 1
    assert ids(kafka, topic) == [1]


def test_the_topic_is_created_before_the_first_commit_and_not_by_looking(kafka):
    topic = f"{kafka.create()}-new"
    definition = KafkaSink(
        name="out", topic=topic, servers=kafka.servers, partitions=3, topic_options=(("retention.ms", "-1"),)
    )
    opened = definition.open(SinkOpening(APP, str, {}, lambda: None))
    opened.check(SCHEMA)
    assert opened.marker() is None
    assert topic not in kafka.admin.list_topics(timeout=30).topics
    opened.prepare(SCHEMA)
    opened.prepare(SCHEMA)
    assert len(kafka.admin.list_topics(timeout=30).topics[topic].partitions) == 3
    opened.close()


TABLE = pa.record_batch(
    {
        "id": pa.array([1, None], pa.int64()),
        "text": ['a"\n', None],
        "at": pa.array([datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
        "day": pa.array([date(2026, 1, 2), None]),
        "price": pa.array([Decimal("1.50"), None]),
        "raw": pa.array([b"\xff\x00", None], pa.binary()),
        "ratio": pa.array([0.1, float("nan")]),
        "tags": pa.array([["a"], []], pa.list_(pa.string())),
        "of": pa.array([{"b": True}, None], pa.struct([("b", pa.bool_())])),
    }
)


def test_values_as_json():
    encode = encoder("json", None, None, ())
    first, second = (json.loads(value) for _, value in encode(TABLE))
    assert first == {
        "id": 1,
        "text": 'a"\n',
        "at": "2026-01-02T03:04:05.000006+00:00",
        "day": "2026-01-02",
        "price": "1.50",
        "raw": base64.b64encode(b"\xff\x00").decode(),
        "ratio": 0.1,
        "tags": ["a"],
        "of": {"b": True},
    }
    assert {name for name, value in second.items() if value is not None} == {"tags"}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (("text",), [b'a"\n', None]),
        (("id",), [b"1", None]),
        (("day",), [b"2026-01-02", None]),
        (("raw",), [b"\xff\x00", None]),
        (("id", "day"), [b'{"id":1,"day":"2026-01-02"}', b'{"id":null,"day":null}']),
        ((), [None, None]),
    ],
)
def test_keys(key, expected):
    assert [got for got, _ in encoder("json", None, None, key)(TABLE)] == expected


AVRO = json.dumps(
    {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "id", "type": ["null", "long"]},
            {"name": "text", "type": ["null", "string"]},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        ],
    }
)


def test_values_as_avro():
    rows = TABLE.select(["id", "text", "at"])
    for schema_id, header in ((None, b""), (7, b"\0\0\0\0\7")):
        values = [value for _, value in encoder("avro", AVRO, schema_id, ())(rows)]
        assert all(value.startswith(header) for value in values)
        parsed = fastavro.parse_schema(json.loads(AVRO))
        got = [fastavro.schemaless_reader(io.BytesIO(value[len(header) :]), parsed, None) for value in values]
        assert got == rows.to_pylist()


@pytest.mark.parametrize(
    ("definition", "columns", "named"),
    [
        ({}, {"m": pa.map_(pa.string(), pa.int64())}, "'m'"),
        ({}, {"d": pa.duration("us")}, "'d'"),
        ({}, {"s": pa.struct([("b", pa.binary())])}, "'s'"),
        ({"key": ("k",)}, {"id": pa.int64()}, "'k'"),
        ({"key": ("l",)}, {"l": pa.list_(pa.int64())}, "'l'"),
        ({"values": "avro", "schema": AVRO}, {"id": pa.int64(), "text": pa.string()}, "'at'"),
        ({"values": "avro", "schema": AVRO}, {**{f.name: f.type for f in SCHEMA}, "more": pa.int64()}, "'more'"),
        ({"values": "avro", "schema": AVRO}, {**{f.name: f.type for f in SCHEMA}, "text": pa.int64()}, "'text'"),
    ],
)
def test_columns_that_a_message_cannot_hold_are_named(definition, columns, named):
    opened = KafkaSink(name="out", topic="t", servers="127.0.0.1:1", **definition).open(
        SinkOpening(APP, str, {}, lambda: None)
    )
    with pytest.raises(PipelineError, match=named):
        opened.check(pa.schema(list(columns.items())))


@pytest.mark.parametrize(
    "arguments",
    [
        {"values": "xml"},
        {"values": "avro"},
        {"schema": AVRO},
        {"schema_id": 1},
        {"partitions": 0},
        {"transaction_timeout": 0},
    ],
)
def test_what_does_not_fit_a_sink_is_refused(arguments):
    with pytest.raises(PipelineError, match=next(iter(arguments))):
        KafkaSink(name="out", topic="topic", servers="127.0.0.1:1", **arguments)
