"""The Kafka sink while transactions expire, brokers restart and topics are made anew under it: each row comes once."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import stamina

from state_ops.errors import ConfigurationError, DamageError, PipelineError, TransientError
from tests.tools.kafka import KafkaTopics
from tests.tools.sampling import sampled
from tests.weir.connectors.test_kafka_refused import publisher as refusing
from tests.weir.connectors.test_kafka_refused import refused
from tests.weir.connectors.test_kafka_sink import APP, ids, publisher
from tests.weir.connectors.test_postgres_values import Batch
from weir.connectors.kafka import sink, values
from weir.connectors.kafka.marker import Marker
from weir.connectors.kafka.sink import KafkaPublisher, KafkaSink
from weir.connectors.kafka.transactions import Transactions
from weir.connectors.kafka.values import TopicSettings
from weir.definition.sink import SinkOpening
from weir.testing.sink_contract import given


@contextmanager
def hasty(kafka: KafkaTopics, topic: str) -> Iterator[KafkaPublisher]:
    """Brokers abort its transactions after a second."""
    definition = KafkaSink(name="out", topic=topic, servers=kafka.servers, transaction_timeout=1)
    opened = KafkaPublisher(definition, SinkOpening(APP, str, {}, lambda: None))
    try:
        yield opened
    finally:
        opened.close()


def before_step(monkeypatch, step: str, act: Callable[[], None]) -> None:
    """Do something before each call of a step of the transaction."""
    marker, call = Transactions._send_marker, Transactions._call

    def with_marker(self: Transactions, marked: Marker) -> None:
        if step == "marker":
            act()
        marker(self, marked)

    def called(self: Transactions, doing: Callable[[], object]) -> None:
        if step in doing.__code__.co_names:
            act()
        call(self, doing)

    monkeypatch.setattr(Transactions, "_send_marker", with_marker)
    monkeypatch.setattr(Transactions, "_call", called)


@pytest.mark.parametrize("step", ["marker", "commit_transaction"])
def test_a_transaction_that_brokers_have_aborted_is_made_again(kafka, monkeypatch, step: str):
    """As after a process was suspended between its messages and its commit."""
    topic, expired = kafka.create(), []

    def expire() -> None:
        if not expired:
            expired.append(kafka.until(lambda: not kafka.is_open(topic)))

    before_step(monkeypatch, step, expire)
    with hasty(kafka, topic) as opened:
        assert opened.publish(None, 1, given(1, 2, 3)).rows == 3
        expired.clear()
        assert opened.publish(1, 2, given(4)).rows == 1
    assert expired and ids(kafka, topic) == [1, 2, 3, 4]


def test_transactions_that_expire_each_time_need_more_time(kafka, monkeypatch):
    topic = kafka.create()
    before_step(monkeypatch, "marker", lambda: kafka.until(lambda: not kafka.is_open(topic)))
    with hasty(kafka, topic) as opened, pytest.raises(ConfigurationError, match="took longer than the 1 s") as late:
        opened.publish(None, 1, given(1))
    assert "transaction_timeout" in (late.value.next or "")
    assert ids(kafka, topic) == []


def made_anew(kafka: KafkaTopics, topic: str, done: list[str]) -> Callable[[], None]:
    def act() -> None:
        if not done:
            done.append(topic)
            kafka.make_anew(topic)

    return act


def test_a_topic_that_is_made_anew_under_a_publisher_is_noticed(kafka):
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        opened.publish(None, 1, given(1))
        kafka.make_anew(topic)
        with pytest.raises(DamageError, match="neither the marker nor any message"):
            opened.publish(1, 2, given(2))
    assert ids(kafka, topic) == []


@pytest.mark.parametrize("after", sampled([3, 0, 5]))
def test_a_topic_that_is_made_anew_in_the_middle_of_a_publish_gets_all_of_it(kafka, after: int):
    topic, done = kafka.create(), list[str]()
    with publisher(kafka, topic) as opened:
        opened.publish(None, 1, replace(given(*range(10)), after=(min(after, 4), made_anew(kafka, topic, done))))
    assert done and ids(kafka, topic) == [*range(10)]


def test_a_topic_that_is_deleted_under_a_publisher_is_named(kafka):
    topic = kafka.create()
    with publisher(kafka, topic, socket_timeout_ms="3000") as opened:
        opened.publish(None, 1, given(1))
        kafka.delete(topic)
        with pytest.raises(DamageError, match="is gone"):
            opened.publish(1, 2, given(2))


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("step", ["begin_transaction", "marker", "commit_transaction"])
def test_the_broker_restarts_before_a_step_of_a_transaction(kafka, monkeypatch, how: str, step: str):
    topic, restarts = kafka.create(), list[str]()

    def restart() -> None:
        if restarts == ["now"]:
            restarts.append(how)
            getattr(kafka.broker, how)()
            kafka.broker.start()

    before_step(monkeypatch, step, restart)
    with publisher(kafka, topic, socket_timeout_ms="4000") as opened:
        opened.publish(None, 1, given(1))
        assert ids(kafka, topic) == [1]
        restarts.append("now")
        for attempt in stamina.retry_context(TransientError, attempts=10, wait_initial=0.1):
            with attempt:
                opened.publish(1, 2, given(2, 3))
        assert opened.marker() == 2
    assert len(restarts) == 2 and ids(kafka, topic) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_part_of_a_checkpoint_is_known_after_a_restart_of_the_broker(kafka, monkeypatch, how: str):
    monkeypatch.setattr(sink, "_SENDS", 0)
    topic = kafka.create(2)

    def cut() -> None:
        raise ZeroDivisionError

    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(100))
        with pytest.raises(ZeroDivisionError):
            opened.publish(3, 5, replace(given(*range(12)), after=(2, cut)))
    assert ids(kafka, topic) == [0, 1, 2, 3, 100]
    getattr(kafka.broker, how)()
    kafka.broker.start()
    with publisher(kafka, topic) as opened:
        assert (opened.marker(), opened.begun()) == (3, 5)  # type: ignore[attr-defined]
        assert opened.publish(3, 5, given(*range(12))).rows == 8
        assert (opened.marker(), opened.begun()) == (5, None)  # type: ignore[attr-defined]
    assert ids(kafka, topic) == [*range(12), 100]


# -- sizes


@pytest.mark.parametrize("options", sampled([{}, {"compression_type": "lz4"}, {"batch_size": "900000"}]))
def test_small_messages_come_into_a_topic_that_takes_small_batches(kafka, options: dict[str, str]):
    topic = kafka.create(max_message_bytes="2000")
    with publisher(kafka, topic, **options) as opened:
        opened.publish(None, 1, given(*range(500)))
    kafka.until(lambda: ids(kafka, topic) == [*range(500)])


def test_of_many_messages_the_first_that_failed_says_why(kafka, monkeypatch):
    """Its user may not read the topic's settings, so the broker is the first to say what it takes."""
    monkeypatch.setattr(values, "settings_of", lambda *_: TopicSettings())
    topic, larger = kafka.create(max_message_bytes="1000"), "larger than the topic takes"
    with publisher(kafka, topic) as opened, pytest.raises(PipelineError, match=larger):
        opened.publish(None, 1, given(*range(5_000)))


CODECS = ["zstd", "gzip", "snappy", "lz4"]


@pytest.mark.parametrize("stored", sampled(["producer", "gzip", "uncompressed"], 2))
@pytest.mark.parametrize("codec", sampled(CODECS))
def test_a_message_is_judged_as_it_is_compressed(kafka, codec: str, stored: str):
    topic = kafka.create(max_message_bytes="5000", compression_type=stored)
    noise = random.Random(1).randbytes(20_000).hex()
    texts = ["x", "y" * 50_000, noise[:20_000], noise[:6_000], noise[:3_000]]
    rows = pa.table({"id": range(len(texts)), "v": texts})
    with refusing(kafka, topic, {"compression.type": codec}) as opened:
        bad = dict(refused(opened, rows))
        assert set(bad) >= {2} and 0 not in bad and 4 not in bad and set(bad.values()) == {"v"}
        assert (1 in bad) is (stored == "uncompressed")
        good = [row for row in range(len(texts)) if row not in bad]
        opened.publish(None, 1, Batch(rows.take(pa.array(good))))
    kafka.until(lambda: ids(kafka, topic) == good)


def test_a_topic_that_is_created_is_judged_by_how_it_will_compress(kafka):
    rows = pa.table({"id": [1], "v": ["y" * 50_000]})
    for stored, bad in (("uncompressed", [(0, "v")]), ("producer", [])):
        options = (("max.message.bytes", "5000"), ("compression.type", stored))
        with refusing(kafka, f"none-{stored}", {"compression.type": "gzip"}, topic_options=options) as opened:
            assert refused(opened, rows) == bad


# -- what is left of a producer


def clients() -> int:
    """How many clients of the library this process has: each has a thread of this name."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return Counter(names)["rdk:main"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it looks at the names of threads")
@pytest.mark.parametrize("how", sampled(["done", "rows fail", "too large", "expired", "fenced", "nobody answers"], 5))
def test_no_producer_outlives_its_publisher(kafka, monkeypatch, how: str):
    """Not even one that the garbage collector would find: it ends at the end of the publish or of the publisher."""
    topic = kafka.create()
    gc.collect()
    before = clients()
    gc.disable()
    try:
        opened = KafkaPublisher(
            KafkaSink(name="out", topic=topic, servers=kafka.servers, transaction_timeout=1 if how == "expired" else 9),
            SinkOpening(APP, str, {"socket.timeout.ms": "1000"}, lambda: None),
        )
        opened.publish(None, 1, given(1))
        error = _fails(kafka, monkeypatch, topic, opened, how)
        opened.close()
        assert (error is None) is (how in ("done", "fenced"))
        assert clients() == before, "while the error and all that it refers to are there"
    finally:
        gc.enable()
        if how == "nobody answers":
            kafka.broker.start()


def _fails(kafka: KafkaTopics, monkeypatch, topic: str, opened: KafkaPublisher, how: str) -> Exception | None:
    rows = given(2, 3, 4)

    def fail() -> None:
        raise ZeroDivisionError

    if how == "rows fail":
        rows = replace(rows, after=(1, fail))
    elif how == "too large":
        rows = given(2, text="x" * 2_000_000)
    elif how == "nobody answers":
        rows = replace(rows, after=(1, kafka.broker.kill))
    elif how == "expired":
        before_step(monkeypatch, "marker", lambda: kafka.until(lambda: not kafka.is_open(topic)))
    elif how == "fenced":
        kafka.transactional(APP)
    try:
        opened.publish(1, 2, rows)
    except Exception as error:
        return error
    return None
