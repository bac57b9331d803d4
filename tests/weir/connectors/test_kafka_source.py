"""The Kafka source when something goes wrong: each committed message once, what is lost is named."""

from __future__ import annotations

import io
import json
import re
import struct
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions

from state_ops.errors import ConfigurationError, InputError, LostError, PipelineError, TransientError
from tests.tools.kafka import KafkaTopics
from weir import kafka as api
from weir.connectors.kafka.sink import KafkaSink
from weir.connectors.kafka.source import KafkaSource
from weir.definition.source import Limits, Opening, Planned, Rejected
from weir.settings.configuration import EpochSettings
from weir.sources.connector_reader import ConnectorReader
from weir.sources.landed_files import LandedFiles

ALL = Limits(1000, 1 << 40, 1 << 50)
SCHEMA = pa.schema([("id", pa.int64())])


def source(kafka: KafkaTopics, *topics: str, **more: Any) -> KafkaSource:
    return KafkaSource(**{"name": "clicks", "topics": topics, "servers": kafka.servers, "schema": SCHEMA} | more)


def opened(definition: KafkaSource, **options: str) -> Any:
    options = {name.replace("_", "."): value for name, value in options.items()}
    return closing(definition.open(Opening("flights", str, options)))


def read(connector: Any, planned: Planned) -> tuple[list[dict], list[Rejected]]:
    batches = [batch for part in planned.parts for batch in connector.read(part)]
    rows = [row for batch in batches for row in batch.rows.to_pylist()]
    return rows, [rejected for batch in batches for rejected in batch.rejected]


def ids(connector: Any, planned: Planned) -> list[int]:
    return sorted(row["id"] for row in read(connector, planned)[0])


def values(*numbers: int) -> list[bytes]:
    return [b'{"id": %d}' % number for number in numbers]


def test_aborted_messages_are_left_out_and_an_open_transaction_is_not_waited_for(kafka):
    topic = kafka.create()
    done, aborted, hanging = (kafka.transactional(f"{topic}-{name}") for name in ("done", "aborted", "hanging"))
    for producer in (done, aborted, hanging):
        producer.begin_transaction()
    kafka.send(topic, values(1, 2), producer=done)
    kafka.send(topic, values(90, 91), producer=aborted)
    kafka.send(topic, values(3))
    done.commit_transaction(30)
    aborted.abort_transaction(30)
    with opened(source(kafka, topic)) as connector:
        position = connector.begin("earliest")
        # Brokers answer a commit before they have written its marks.
        kafka.until(lambda: sum(part.rows or 0 for part in connector.plan(position, ALL).parts) == 7)
        planned = connector.plan(position, ALL)
        assert ids(connector, planned) == [1, 2, 3]
        (part,) = planned.parts
        assert part.rows == 7, "offsets: five messages and the marks of two transactions"
        assert planned.ends == {f"{topic}-0": True}

        kafka.send(topic, values(4), producer=hanging)
        kafka.send(topic, values(5))
        stuck = connector.plan(planned.position, ALL)
        assert stuck.parts == () and not stuck.limited
        assert stuck.ends == {f"{topic}-0": False}, "messages stand behind the open transaction, so it is not idle"
        assert connector.lag(stuck.position).rows == 2
        hanging.commit_transaction(30)
        kafka.until(lambda: bool(connector.plan(stuck.position, ALL).parts))
        assert ids(connector, connector.plan(stuck.position, ALL)) == [4, 5]


def test_a_range_of_aborted_messages_alone_has_no_rows(kafka):
    topic = kafka.create()
    producer = kafka.transactional(topic)
    producer.begin_transaction()
    kafka.send(topic, values(*range(100)), producer=producer)
    producer.abort_transaction(30)
    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin("earliest"), Limits(10, 30, 1 << 50))
        assert [part.rows for part in planned.parts] == [30] and planned.limited
        (batch,) = connector.read(planned.parts[0])
        assert batch.rows.num_rows == 0 and batch.rows.schema.names == ["id"]


def test_marks_and_aborted_messages_alone_are_no_rows_that_wait(kafka, tmp_path):
    topic = kafka.create()
    landed = LandedFiles(str(tmp_path), "s", None, tmp_path)
    reader = ConnectorReader(source(kafka, topic), lambda: Opening("p", str, {}), landed)
    producer = kafka.transactional(topic)
    for _ in range(2):
        producer.begin_transaction()
        kafka.send(topic, values(1), producer=producer)
        producer.abort_transaction(30)
    kafka.until(lambda: reader.check(None).waiting == 4)
    assert reader.look(None).waiting == 0, "for a sensor nothing has come"
    planned = reader.plan(None, EpochSettings(), None)
    position = reader.advance(None, planned)
    assert planned.rows == 0 and reader.check(position).waiting == 0
    producer.begin_transaction()
    producer.commit_transaction(30)
    producer.begin_transaction()
    kafka.send(topic, values(2), producer=producer)
    producer.abort_transaction(30)
    kafka.until(lambda: reader.check(position).waiting == 2)
    assert reader.look(position).waiting == 0
    hours_ago = {name: [newest, since - 2 * 3_600_000_000] for name, (newest, since) in position["partitions"].items()}
    assert reader.look({**position, "partitions": hours_ago}).waiting == 2, "it is recorded before the marks expire"
    kafka.send(topic, values(3))
    kafka.until(lambda: reader.look(position).waiting > 0)
    reader.close()


def test_expired_messages_are_named_or_left_out(kafka):
    topic = kafka.create()
    kafka.send(topic, values(*range(10)))
    with opened(source(kafka, topic)) as connector:
        position = connector.begin("earliest")
        planned = connector.plan(position, Limits(10, 3, 1 << 50))
        assert ids(connector, planned) == [0, 1, 2]
        connector.verify(planned.parts)
        kafka.expire(topic, 5)
        with pytest.raises(LostError, match=r"offsets 0 to 4 .* are gone"):
            connector.verify(planned.parts)
        with pytest.raises(LostError, match="has the messages no more"):
            read(connector, planned)
        with pytest.raises(LostError, match=r"offsets 3 to 4 .* are gone") as caught:
            connector.plan(planned.position, ALL)
        assert f"{topic}-0" in str(caught.value)
    with opened(source(kafka, topic, on_lost="skip")) as connector:
        after = connector.plan(planned.position, ALL)
        assert [(lost.where, "3 to 4" in lost.what) for lost in after.lost] == [(f"{topic}-0", True)]
        assert ids(connector, after) == [5, 6, 7, 8, 9]
        assert connector.plan(after.position, ALL).lost == ()
    with opened(source(kafka, topic, archive=True)) as connector:
        connector.verify(planned.parts)


def test_new_partitions_and_new_topics_of_the_pattern_appear(kafka):
    from confluent_kafka.admin import NewPartitions

    first = kafka.create()
    kafka.send(first, values(1))
    with opened(source(kafka, topics=(), pattern=f"{re.escape(first)}(-more)?")) as connector:
        position = connector.begin("latest")
        kafka.admin.create_partitions([NewPartitions(first, 2)])[first].result(30)
        kafka.until(lambda: f"{first}-1" in connector.plan(position, ALL).ends)
        kafka.send(first, values(2), 1)
        kafka.create(1, f"{first}-more")
        kafka.create(1, f"{first}-other")
        kafka.send(f"{first}-more", values(3))
        kafka.send(f"{first}-other", values(9))
        planned = connector.plan(position, ALL)
        assert ids(connector, planned) == [2, 3], "what is new is read from its beginning"
        assert planned.ends == dict.fromkeys([f"{first}-0", f"{first}-1", f"{first}-more-0"], True)
        # A branch goes no further than the pipeline, and reads no partition that it does not know.
        assert connector.plan(position, ALL, upto=position).parts == ()


def test_a_topic_that_was_made_anew_is_noticed(kafka):
    topic = kafka.create()
    kafka.send(topic, values(1, 2))
    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        kafka.make_anew(topic)
        kafka.send(topic, values(3, 4, 5))
        for call in (
            lambda: connector.plan(planned.position, ALL),
            lambda: read(connector, planned),
            lambda: connector.verify(planned.parts),
        ):
            with pytest.raises(LostError, match="made anew"):
                call()
    with opened(source(kafka, topic, on_lost="skip")) as connector:
        again = connector.plan(planned.position, ALL)
        assert [lost.where for lost in again.lost] == [topic]
        assert ids(connector, again) == [3, 4, 5]
        assert connector.plan(again.position, ALL).lost == ()


def test_a_topic_that_is_gone_is_named(kafka):
    topic, kept = kafka.create(), kafka.create()
    kafka.send(topic, values(1))
    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        kafka.delete(topic)
        for call in (lambda: connector.plan(planned.position, ALL), lambda: read(connector, planned)):
            with pytest.raises(InputError, match=topic):
                call()
    pattern = f"{re.escape(topic)}|{re.escape(kept)}"
    with opened(source(kafka, topics=(), pattern=pattern)) as connector, pytest.raises(LostError, match="is gone"):
        connector.plan(planned.position, ALL)
    with opened(source(kafka, topics=(), pattern=pattern, on_lost="skip")) as connector:
        after = connector.plan(planned.position, ALL)
        assert [lost.where for lost in after.lost] == [topic] and set(after.position["topics"]) == {kept}


def test_a_log_that_has_become_shorter_is_named(kafka):
    topic = kafka.create()
    kafka.send(topic, values(1, 2))
    with opened(source(kafka, topic)) as connector:
        position = connector.begin("latest")
        position["topics"][topic]["offsets"]["0"] = 7
        with pytest.raises(LostError, match="ends at offset 2, and was read up to 7"):
            connector.plan(position, ALL)


def test_partitions_are_read_evenly(kafka):
    topic = kafka.create(4)
    for partition, count in enumerate((100, 3, 50, 0)):
        kafka.send(topic, values(*range(count)), partition)
    with opened(source(kafka, topic)) as connector:
        position = connector.begin("earliest")
        planned = connector.plan(position, Limits(10, 33, 1 << 50))
        assert {part.partition[-1]: part.rows for part in planned.parts} == {"0": 15, "1": 3, "2": 15}
        assert planned.ends == {f"{topic}-0": False, f"{topic}-1": True, f"{topic}-2": False, f"{topic}-3": True}
        held = connector.plan(position, ALL, hold={f"{topic}-0"})
        assert {part.partition[-1]: part.rows for part in held.parts} == {"1": 3, "2": 50} and not held.limited
        assert held.ends[f"{topic}-0"] is False
        turns = []
        while planned.parts:
            planned = connector.plan(position, Limits(1, 20, 1 << 50))
            position = planned.position
            turns += [part.partition[-1] for part in planned.parts]
        assert turns == ["0", "1", "2", "0", "2", "0", "2", "0", "0"], "each in its turn"


@pytest.mark.long
def test_the_broker_goes_in_the_middle_of_a_read(kafka):
    topic = kafka.create()
    kafka.send(topic, values(*range(30_000)))
    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        batches = connector.read(planned.parts[0])
        rows = next(batches).rows.num_rows
        kafka.broker.kill()
        kafka.broker.start()
        assert rows + sum(batch.rows.num_rows for batch in batches) == 30_000
        connector.verify(planned.parts)
        kafka.send(topic, values(1))
        after = connector.plan(planned.position, ALL)
        assert ids(connector, after) == [1]
        connector.committed(after.position)


@pytest.mark.long  # the broker has to start once more
def test_a_broker_that_does_not_answer_is_waited_for_no_longer_than_is_said(kafka):
    topic = kafka.create()
    kafka.send(topic, values(1))
    with opened(source(kafka, topic), socket_timeout_ms="500") as connector:
        begin = connector.begin("earliest")
        kafka.broker.stop()
        try:
            with pytest.raises(TransientError, match="broker"):
                connector.plan(begin, ALL)
        finally:
            kafka.broker.start()


def test_values_that_cannot_be_decoded_are_told_by_offset(kafka):
    topic = kafka.create()
    bad = {
        1: (b"", "empty"),
        2: (b"no json", "JSON"),
        3: (b'{"id": 1}{"id": 2}', "JSON"),
        5: (b"[1]", "object"),
        6: (b'{"id": "x"}', "'id'"),
        7: (b'{"id": 1', "JSON"),
        8: (b', "id": 2}', "JSON"),
        9: (b"\xff\xfe", "UTF-8"),
        10: (None, "tombstone"),
        12: (b'{"id": 7, "of": "a\nb"}', "JSON"),
    }
    good = {0: values(0)[0], 4: b'{\n  "id":\r\n 4,\n "more": [{}]\n}', 11: b'{"more": 1}', 13: values(13)[0]}
    for offset in range(14):
        kafka.send(topic, [bad[offset][0] if offset in bad else good[offset]])
    definition = source(kafka, topic, offset="at", on_bad="quarantine")
    with opened(definition) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        rows, rejected = read(connector, planned)
    assert [(bad_row["at"], bad_row["id"]) for bad_row in rows] == [(0, 0), (4, 4), (11, None), (13, 13)]
    assert [bad_row.number for bad_row in rejected] == sorted(bad)
    for bad_row in rejected:
        value, why = bad[bad_row.number]
        assert why in bad_row.reason and "\n" not in bad_row.reason, bad_row
        assert bad_row.raw == (None if value is None else value.decode(errors="replace"))


def test_tombstones_by_policy(kafka):
    topic = kafka.create()
    kafka.send(topic, [values(1)[0], None, values(2)[0]], key=b"k")
    got = {}
    for policy in ("skip", "keep"):
        with opened(source(kafka, topic, tombstones=policy, key="key")) as connector:
            got[policy] = read(connector, connector.plan(connector.begin("earliest"), ALL))
    first, two = {"id": 1, "key": "k"}, {"id": 2, "key": "k"}
    assert got == {"skip": ([first, two], []), "keep": ([first, {"id": None, "key": "k"}, two], [])}


def test_what_a_message_has_beside_its_value(kafka):
    topic = kafka.create(2)
    kafka.send(topic, [b"\x00\xff"], 1, key="é", headers=[("a", b"1"), ("a", None)], timestamp=1_700_000_000_123)
    kafka.send(topic, [b""], 1, key=b"\xff")
    names = {what: f"_{what}" for what in ("key", "headers", "timestamp", "partition", "offset", "topic")}
    with opened(source(kafka, topic, values="bytes", schema=None, on_bad="quarantine", **names)) as connector:
        rows, rejected = read(connector, connector.plan(connector.begin("earliest"), ALL))
    assert rows == [
        {
            "value": b"\x00\xff",
            "_key": "é",
            "_headers": [{"name": "a", "value": b"1"}, {"name": "a", "value": None}],
            "_timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
            "_partition": 1,
            "_offset": 0,
            "_topic": topic,
        }
    ]
    assert [(bad.number, bad.reason) for bad in rejected] == [(1, "its key is no UTF-8")]
    with opened(source(kafka, topic, values="bytes", schema=None, key="_key", keys="bytes")) as connector:
        rows, _ = read(connector, connector.plan(connector.begin("earliest"), ALL))
    assert [row["_key"] for row in rows] == ["é".encode(), b"\xff"]


OLD = {"type": "record", "name": "Click", "fields": [{"name": "id", "type": "long"}]}
NEW = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
        {"name": "who", "type": {"type": "string", "logicalType": "uuid"}, "default": "nobody"},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
    ],
}


def avro(schema: dict, row: dict, number: int | None = None) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return (b"" if number is None else struct.pack(">bI", 0, number)) + stream.getvalue()


def test_avro_with_the_numbers_of_a_registry(kafka):
    topic, at = kafka.create(), datetime(2026, 1, 2, tzinfo=UTC)
    who = "7f1c2f9e-0d3b-4c59-9f0a-2f6b1b9c0b11"
    plain = json.loads(json.dumps(NEW).replace('"uuid"', '"text"'))
    new = {"id": 2, "at": at, "who": who, "tags": ["a"]}
    kafka.send(
        topic,
        [
            avro(OLD, {"id": 1}, 7),
            avro(plain, new, 8),
            avro(OLD, {"id": 3}, 9),
            b"\0\0",
            avro(OLD, {"id": 1}, 7) + b"x",
        ],
    )
    more = {"values": "avro", "schema": json.dumps(NEW), "registry": True, "on_bad": "quarantine"}
    written = ((7, json.dumps(OLD)), (8, json.dumps(NEW)))
    with opened(source(kafka, topic, written=written, **more)) as connector:
        rows, rejected = read(connector, connector.plan(connector.begin("earliest"), ALL))
    assert rows == [{"id": 1, "at": None, "who": "nobody", "tags": []}, new]
    assert [bad.number for bad in rejected] == [2, 3, 4]
    assert "schema 9" in rejected[0].reason and "left over" in rejected[2].reason


def test_avro_without_a_registry(kafka):
    topic = kafka.create()
    kafka.send(topic, [avro(OLD, {"id": 0}), avro(OLD, {"id": 5}), b"\xff"])
    with opened(source(kafka, topic, values="avro", schema=json.dumps(OLD), on_bad="quarantine")) as connector:
        rows, rejected = read(connector, connector.plan(connector.begin("earliest"), ALL))
    assert [row["id"] for row in rows] == [0, 5] and [bad.number for bad in rejected] == [2]


def test_it_begins_at_a_time(kafka):
    topic = kafka.create(2)
    for number in range(10):
        kafka.send(topic, values(number), number % 2, timestamp=1_700_000_000_000 + number * 1000)
    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin(datetime.fromtimestamp(1_700_000_006.5, UTC)), ALL)
        assert ids(connector, planned) == [7, 8, 9]
        assert connector.lag(connector.begin("earliest")).newest == 1_700_000_009_000_000


def test_offsets_are_committed_for_people_and_never_read(kafka):
    topic = kafka.create()
    kafka.send(topic, values(1, 2, 3))
    group = "weir.flights.clicks"

    def committed() -> int:
        asked = ConsumerGroupTopicPartitions(group)
        places = kafka.admin.list_consumer_group_offsets([asked])[group].result(30).topic_partitions
        return next((place.offset for place in places if place.topic == topic), -1)

    with opened(source(kafka, topic)) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        connector.committed(planned.position)  # and is closed at once, as at the end of a run
    assert committed() == 3
    with opened(source(kafka, topic)) as connector:
        assert ids(connector, connector.plan(connector.begin("earliest"), ALL)) == [1, 2, 3]


def test_a_compacted_topic_needs_an_archive(kafka):
    topic = kafka.create(cleanup_policy="compact")
    with opened(source(kafka, topic)) as connector, pytest.raises(PipelineError, match="archive=True"):
        connector.plan(connector.begin("earliest"), ALL)
    with opened(source(kafka, topic, archive=True)) as connector:
        assert connector.plan(connector.begin("earliest"), ALL).parts == ()


def test_a_password_that_is_right_is_taken_and_one_that_is_wrong_is_not_shown(kafka):
    topic = kafka.create()
    kafka.send(topic, values(1))
    definition = replace(source(kafka, topic), servers=kafka.broker.sasl_servers)
    options = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "weir"}
    with opened(definition, **options, sasl_password="weir-secret") as connector:
        assert ids(connector, connector.plan(connector.begin("earliest"), ALL)) == [1]
    for password in ("Authentication", "x-not-this-one"):
        with opened(definition, **options, sasl_password=password) as connector:
            with pytest.raises(ConfigurationError, match="refuse") as caught:
                connector.begin("earliest")
            assert password not in str(caught.value)
    with (
        opened(definition, no_such_option="1") as connector,
        pytest.raises(ConfigurationError, match=r"no\.such\.option"),
    ):
        connector.begin("earliest")


@pytest.mark.parametrize(
    "arguments",
    [
        {"topics": (), "pattern": None}, {"pattern": "a"}, {"topics": (), "pattern": "("}, {"values": "xml"},
        {"schema": None}, {"values": "avro"}, {"registry": True}, {"written": ((1, "x"),)}, {"keys": "json"},
        {"tombstones": "fail"}, {"key": "id"}, {"event_time": "at"},
        {"values": "avro", "schema": "{"}, {"values": "avro", "schema": '"long"'},
        {"values": "avro", "schema": json.dumps(OLD | {"fields": [{"name": "u", "type": ["long", "string"]}]})},
    ],
)  # fmt: skip
def test_what_does_not_fit_a_source_is_refused(arguments):
    with pytest.raises(PipelineError):
        KafkaSource(**{"name": "clicks", "topics": ("t",), "servers": "s", "schema": SCHEMA} | arguments)


def test_what_authors_write():
    source = api("clicks", servers="s", schema={"id": pa.int64()}, idle_after="1m", written=None)
    assert source == KafkaSource(name="clicks", topics=("clicks",), servers="s", schema=SCHEMA, idle_after="1m")
    assert api(re.compile("a.*"), servers="s", schema=SCHEMA).pattern == "a.*"
    assert api(["a", "b"], servers="s", schema=SCHEMA, name="x").topics == ("a", "b")
    sink = api.sink("out", servers="s", key="id", topic_options={"retention.ms": -1}, transaction_timeout="1m")
    assert sink == KafkaSink(
        name="out",
        topic="out",
        servers="s",
        key=("id",),
        topic_options=(("retention.ms", "-1"),),
        transaction_timeout=60,
    )


def test_a_position_that_the_cluster_does_not_have_is_refused(kafka):
    topic = kafka.create(2)
    kafka.send(topic, values(1, 2, 3))
    with opened(source(kafka, topic)) as connector:
        position = connector.begin("earliest")
        of = position["topics"][topic]
        for wrong, what in (
            ({"nowhere": of}, "nowhere"),
            ({topic: {**of, "id": "another"}}, topic),
            ({topic: {**of, "offsets": {"0": 0, "7": 0}}}, f"{topic}-7"),
            ({topic: {**of, "offsets": {"0": 4}}}, f"{topic}-0, which ends at 3"),
            ({topic: {**of, "offsets": {"0": "1"}}}, "no position of the source"),
            ({topic: {**of, "offsets": {"zero": 1}}}, "no position of the source"),
            ({topic: {"offsets": {}}}, "no position of the source"),
            ([topic], "no position of the source"),
        ):
            with pytest.raises(ConfigurationError, match=re.escape(what)):
                connector.begin({"topics": wrong})
        with pytest.raises(ConfigurationError, match="no position of the source"):
            connector.plan({"of": "live", "at": position}, ALL)  # once a chain: nothing is read twice
        started = connector.begin({"topics": {topic: {**of, "offsets": {"0": 1, "1": 0}}}})
        assert ids(connector, connector.plan(started, ALL)) == [2, 3]


def test_each_row_says_topic_partition_and_offset_behind_gaps_too(kafka):
    topic = kafka.create()
    kafka.send(topic, values(0, 1))
    with opened(source(kafka, topic, tombstones="skip")) as connector:
        planned = connector.plan(connector.begin("earliest"), ALL)
        place = f"topic {topic}, partition 0, offset"
        assert connector.places(planned.parts[0], 2) == [f"{place} 0", f"{place} 1"]
        producer = kafka.transactional(topic)
        producer.begin_transaction()
        kafka.send(topic, values(3), producer=producer)
        producer.commit_transaction(30)
        kafka.until(lambda: kafka.end(topic) == 4)  # the broker writes the mark after it has answered
        kafka.send(topic, [None, *values(5)])
        kafka.until(lambda: sum(part.rows or 0 for part in connector.plan(planned.position, ALL).parts) == 4)
        (part,) = connector.plan(planned.position, ALL).parts
        assert connector.places(part, 2) == [f"{place} 2", f"{place} 5"], "between them a mark and a tombstone"
        assert connector.places(part, 3) == [f"topic {topic}, partition 0"] * 3, "which of them became rows is unknown"
