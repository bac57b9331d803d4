"""A checkpoint that takes several transactions to publish, and markers that brokers have forgotten: each row comes
once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from state_ops.errors import DamageError, FencedError, TransientError, WeirError
from state_ops.fsck.findings import Kind
from tests.recovery import small
from tests.tools.kafka import KafkaTopics
from tests.tools.sampling import sampled
from tests.weir.connectors.test_kafka_sink import APP, forget_marker, ids, publisher
from weir import Pipeline
from weir.connectors.kafka import headers, reading, sink
from weir.connectors.kafka.client import Client
from weir.connectors.kafka.headers import Sent
from weir.connectors.kafka.marker import Marker, stored
from weir.definition.sink import Publisher, no_rows
from weir.restore import rewind
from weir.run import fsck, maintenance
from weir.settings.configuration import PROJECT
from weir.testing.sink_contract import GivenRows, given

CHILD = """
import os, signal, sys
from dataclasses import replace
from weir.connectors.kafka import sink
from weir.definition.sink import SinkOpening
from weir.testing.sink_contract import given

topic, servers, app, batches = sys.argv[1:]
sink._SENDS = 0
opened = sink.KafkaSink(name="out", topic=topic, servers=servers).open(SinkOpening(app, str, {}, lambda: None))
rows = replace(given(*range(12)), after=(int(batches), lambda: os.kill(os.getpid(), signal.SIGKILL)))
opened.publish(3, 5, rows)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def parts(monkeypatch) -> None:
    """Each row is a part of its own."""
    monkeypatch.setattr(sink, "_SENDS", 0)


class PowerCut(Exception):
    pass


@dataclass(frozen=True)
class Rows(GivenRows):
    """Rows, of which the last batches fail; at: when their epoch began."""

    at: datetime | None = None

    @property
    def since(self) -> datetime | None:  # type: ignore[override]
        return self.at


def cut(*numbers: int, after: int) -> GivenRows:
    """Rows whose reading fails after some batches of two."""

    def fail() -> None:
        raise PowerCut

    return replace(given(*numbers), after=(after, fail))


def marker(kafka: KafkaTopics, topic: str, group: str = APP) -> Marker | None:
    return stored(Client("test", kafka.servers, {}), topic, group)


def begun(kafka: KafkaTopics, topic: str, opened: Publisher) -> None:
    """Checkpoint 3 is there, and 4 of the 12 rows of checkpoint 5."""
    opened.publish(None, 3, given(100))
    with pytest.raises(PowerCut):
        opened.publish(3, 5, cut(*range(12), after=2))
    assert marker(kafka, topic) == Marker(3, 5, 4, 12)
    assert ids(kafka, topic) == [0, 1, 2, 3, 100]
    assert opened.marker() == 3, "no checkpoint that is not whole"


def test_what_failed_in_between_goes_on_behind_the_last_part(kafka):
    topic = kafka.create(2)
    with publisher(kafka, topic) as opened:
        begun(kafka, topic, opened)
    with publisher(kafka, topic) as opened:
        with pytest.raises(DamageError, match="4 of 12 rows of 5"):
            opened.publish(3, 5, given(*range(11)))
        assert opened.publish(3, 5, given(*range(12))).rows == 8
        assert opened.marker() == 5
        assert opened.publish(3, 5, given(*range(12))).rows == 0
        assert opened.publish(5, 6, given(12)).rows == 1
    assert ids(kafka, topic) == [*range(13), 100]


def test_a_checkpoint_that_is_sent_in_time_is_one_transaction(kafka, monkeypatch):
    monkeypatch.setattr(sink, "_SENDS", 0.25)
    topic = kafka.create()
    with publisher(kafka, topic) as opened:
        with pytest.raises(PowerCut):
            opened.publish(None, 3, cut(*range(12), after=5))
        assert marker(kafka, topic) is None
        opened.publish(None, 3, given(*range(12)))
    assert ids(kafka, topic) == [*range(12)]


def test_a_process_is_killed_between_parts_again_and_again(kafka):
    topic = kafka.create(2)
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(100))
    for batches in (1, 3):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, topic, kafka.servers, APP, str(batches)], cwd=PROJECT, timeout=60
        )
        assert child.returncode == -signal.SIGKILL
        assert marker(kafka, topic) == Marker(3, 5, 2 * batches, 12)
        assert ids(kafka, topic) == [*range(2 * batches), 100]
    with publisher(kafka, topic) as opened:
        assert opened.publish(3, 5, given(*range(12))).rows == 6
    assert ids(kafka, topic) == [*range(12), 100]


def test_a_zombie_comes_between_two_parts(kafka):
    """It brings in what is missing, or a part of it; the owner is locked out, proves itself and goes on behind that."""
    topic, proofs = kafka.create(2), []
    with publisher(kafka, topic, prove=lambda: proofs.append("owner")) as owner, publisher(kafka, topic) as zombie:
        owner.publish(None, 3, given(100))

        def overtake() -> None:
            if len(proofs) == 1:
                with pytest.raises(PowerCut):
                    zombie.publish(3, 5, cut(*range(12), after=4))

        assert owner.publish(3, 5, replace(given(*range(12)), after=(2, overtake))).rows == 4
        assert proofs == ["owner", "owner"]
        assert owner.publish(5, 6, given(12)).rows == 1
    assert ids(kafka, topic) == [*range(13), 100]


def test_after_a_rewind_nobody_sends_the_other_parts(kafka):
    topic, is_owner = kafka.create(2), True

    def prove() -> None:
        if not is_owner:
            raise FencedError("another process has taken over")

    with publisher(kafka, topic, prove=prove) as zombie, publisher(kafka, topic) as owner:
        zombie.publish(None, 3, given(100))

        def take_over() -> None:
            nonlocal is_owner
            if is_owner:
                is_owner = False
                owner.publish(3, 7, no_rows())  # the rewind's checkpoint

        with pytest.raises(FencedError):
            zombie.publish(3, 5, replace(given(*range(12)), after=(2, take_over)))
        assert owner.publish(3, 5, given(*range(12))).rows == 0
        assert marker(kafka, topic) == Marker(7)
        assert owner.publish(7, 8, given(8)).rows == 1
    assert ids(kafka, topic) == [0, 1, 2, 3, 8, 100]


# -- brokers have forgotten the marker


def test_the_marker_is_lost_between_two_parts(kafka):
    topic = kafka.create(3)
    with publisher(kafka, topic) as opened:
        begun(kafka, topic, opened)
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.publish(None, 3, given(100)).rows == 0
        with pytest.raises(DamageError, match="4 of 12 rows"):
            opened.publish(5, 6, given(9))
        assert opened.publish(3, 5, given(*range(12))).rows == 8
    assert ids(kafka, topic) == [*range(12), 100]
    assert marker(kafka, topic) == Marker(5)


@pytest.mark.long
def test_the_marker_is_lost_and_a_partition_has_lost_messages(kafka):
    """Nobody knows whether more rows had been there."""
    topic = kafka.create(2)
    with publisher(kafka, topic) as opened:
        begun(kafka, topic, opened)
    forget_marker(kafka)
    kafka.send(topic, [b"of others"] * 3, 0)
    kafka.send(topic, [b"of others"] * 3, 1)
    (empty,) = {0, 1} - {m.partition() for m in kafka.committed(topic) if m.headers() and ids_of(m) == (5, 3)}
    kafka.expire(topic, kafka.end(topic, empty), empty)
    with (
        publisher(kafka, topic) as opened,
        pytest.raises(DamageError, match=r"4 of the 12 rows of checkpoint 5, or had"),
    ):
        opened.publish(3, 5, given(*range(12)))
    # As the playbook says it.
    place = TopicPartition(topic, 0, 3, metadata='{"checkpoint": 5, "rows": 4, "of": 12}')
    kafka.admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(APP, [place])])[APP].result(30)
    with publisher(kafka, topic) as opened:
        assert opened.publish(3, 5, given(*range(12))).rows == 8


def ids_of(message) -> tuple[int, int]:
    sent = headers._parsed(message.headers()[0][1], APP)
    assert sent is not None
    return sent.checkpoint, sent.row


@pytest.mark.long
def test_the_first_checkpoint_was_published_and_nobody_knows(kafka):
    """The process died before the registry knew, and brokers have forgotten the marker since."""
    topic = kafka.create(2)
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(*range(4)))
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.publish(None, 3, given(*range(4))).rows == 0
        assert opened.marker() == 3
    forget_marker(kafka)
    with publisher(kafka, topic) as opened, pytest.raises(DamageError, match="says that none was published last"):
        opened.publish(None, 4, given(9))
    # As the playbook says it, for who begins anew.
    place = ConsumerGroupTopicPartitions(APP, [TopicPartition(topic, 0, 0)])
    kafka.admin.alter_consumer_group_offsets([place])[APP].result(30)
    with publisher(kafka, topic) as opened:
        assert opened.marker() is None
        assert opened.publish(None, 4, given(9)).rows == 1
    assert ids(kafka, topic) == [0, 1, 2, 3, 9]


@pytest.mark.long
def test_rows_may_be_hidden_by_somebody_elses_open_transaction(kafka):
    topic = kafka.create()
    other = kafka.transactional("somebody-who-waits")
    other.begin_transaction()
    kafka.send(topic, [b"of others"], producer=other)
    with publisher(kafka, topic) as opened:
        opened.publish(None, 3, given(1))
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        with pytest.raises(TransientError, match="Rows of checkpoint 3 lie behind an open transaction"):
            opened.publish(None, 3, given(1))
        other.abort_transaction(30)
        assert opened.publish(None, 3, given(1)).rows == 0
    assert ids(kafka, topic) == [1]


def test_a_first_publish_reads_no_messages_that_are_older_than_its_epoch(kafka, monkeypatch):
    topic, read = kafka.create(), []
    old = int((time.time() - 3 * 86400) * 1000)
    kafka.send(topic, [b"of others"] * 5, timestamp=old)
    messages = reading.messages

    def counted(*arguments, **more) -> Iterator[list]:
        for bunch in messages(*arguments, **more):
            read.extend(bunch)
            yield bunch

    monkeypatch.setattr(reading, "messages", counted)
    now = datetime.now(UTC)
    with publisher(kafka, topic) as opened:
        opened.publish(None, 1, Rows([(1, "a")], at=now))
    assert read == []
    forget_marker(kafka)
    with publisher(kafka, topic) as opened:
        assert opened.publish(None, 1, Rows([(1, "a")], at=now + timedelta(hours=12))).rows == 0, "clocks may differ"
    assert len(read) == 1


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (f"7 {APP}", Sent(7, 0, 1)),
        (f"7 {APP} 4/9", Sent(7, 4, 9)),
        (f"7 {APP} 8/9", Sent(7, 8, 9)),
        ("7 weir/flights/fix/out 8/9", None),
        (f"7 {APP} x/9", None),
        ("", None),
    ],
)
def test_headers_of_every_release_are_read(header, sent):
    assert headers._parsed(header.encode(), APP) == sent
    if sent is not None and "/9" in header:
        assert headers.of(7, APP, 9)(sent.row) == [(headers.HEADER, header.encode())]


# -- a pipeline


@pytest.fixture
def bank(kafka, tmp_path) -> small.Bank:
    """The small pipeline, whose rows go to a topic."""
    bank = small.Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="8")
    out = sink.KafkaSink(name="out", topic=kafka.create(2), servers=kafka.servers)
    stages = (replace(bank.site.pipeline.stages[0], sink=out),)
    return small.Bank(replace(bank.site, pipeline=Pipeline("small", stages, max_parallelism=8)))


def forget(kafka: KafkaTopics, bank: small.Bank) -> None:
    kafka.forget_group(f"weir/{bank.site.pipeline.name}/main/out")


def sent(kafka: KafkaTopics, bank: small.Bank) -> int:
    return len(kafka.committed(bank.site.pipeline.stages[0].sink.topic))  # type: ignore[union-attr]


def test_a_run_publishes_nothing_twice_after_the_marker_and_the_registrys_record_were_lost(kafka, bank, monkeypatch):
    def crash(self, generation, publications):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr("state_ops.checkpoints.registry.Registry.record_publications", crash)
        with pytest.raises(WeirError):
            bank.epochs(1)
    assert sent(kafka, bank) == 10
    forget(kafka, bank)
    bank.epochs(2)
    assert sent(kafka, bank) == 20


@pytest.mark.long
def test_each_run_writes_the_marker_again_and_makes_it_where_it_is_gone(kafka, bank):
    bank.epochs(1)
    forget(kafka, bank)
    assert [f.kind for f in fsck.examine(bank.site.pipeline, bank.site.settings).findings] == []
    topic = bank.site.pipeline.stages[0].sink.topic  # type: ignore[union-attr]
    assert marker(kafka, topic, "weir/small/main/out") is None
    bank.epochs()
    assert marker(kafka, topic, "weir/small/main/out") == Marker(1), "a run without rows writes it, too"
    bank.epochs(2)
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=obstacles(bank))
    forget(kafka, bank)
    bank.epochs(3)
    assert sent(kafka, bank) == 40, "the rewind has file 2 read again"
    kafka.make_anew(topic, 2)
    assert [f.kind for f in fsck.examine(bank.site.pipeline, bank.site.settings).findings] == [Kind.SINK_BEHIND]
    with pytest.raises(DamageError, match="neither the marker nor any message"):
        bank.epochs(4)


@pytest.mark.parametrize(
    ("first", "delivery"),
    sampled([(1, "at_least_once"), (2, "at_most_once"), (1, "at_most_once"), (2, "at_least_once")]),
)
def test_a_part_of_an_epoch_that_failed_is_no_damage_where_rows_may_be_there_twice_or_be_lost(
    kafka, bank, monkeypatch, delivery, first
):
    """The delivery of an epoch was cut off between two parts, and brokers have forgotten the marker since."""
    pipeline = replace(bank.site.pipeline, delivery=delivery)
    bank = small.Bank(replace(bank.site, pipeline=pipeline))
    topic, send = pipeline.stages[0].sink.topic, sink.Transactions.run  # type: ignore[union-attr]
    for epoch in range(1, first):
        bank.epochs(epoch)
    before = sent(kafka, bank)

    def cut_off(self, *arguments):
        if sent(kafka, bank) > before:
            raise PowerCut
        return send(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sink.Transactions, "run", cut_off)
        with pytest.raises((PowerCut, WeirError)):
            bank.epochs(first)
    part = sent(kafka, bank) - before
    assert 0 < part < 10
    forget(kafka, bank)
    bank.epochs()
    forget(kafka, bank)
    bank.epochs(first + 1)
    whole = before + part + (20 if delivery == "at_least_once" else 10)
    assert sent(kafka, bank) == whole
    target = bank.ids()[0]
    maintenance.rewind(bank.site.pipeline, bank.site.settings, target, accepted=obstacles(bank, target))
    bank.epochs(first + 2)
    assert sent(kafka, bank) > whole
    newest = marker(kafka, topic, "weir/small/main/out")
    assert newest is not None and newest.checkpoint == bank.ids()[-1]


def test_a_topic_that_is_gone_is_damage_at_most_once_and_one_that_has_got_nothing_is_none(kafka, bank, monkeypatch):
    pipeline = replace(bank.site.pipeline, delivery="at_most_once")
    bank = small.Bank(replace(bank.site, pipeline=pipeline))
    topic = pipeline.stages[0].sink.topic  # type: ignore[union-attr]

    def cut_off(*_):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(sink.Transactions, "run", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(1)
    bank.epochs(2)
    assert sent(kafka, bank) == 10, "all of the first epoch's were lost"
    kafka.delete(topic)
    with pytest.raises(DamageError, match="is gone"):
        bank.epochs(3)


def test_a_topic_that_is_gone_gets_all_rows_again_by_a_rewind_to_the_beginning(kafka, bank):
    bank.epochs(1, 2)
    topic = bank.site.pipeline.stages[0].sink.topic  # type: ignore[union-attr]
    kafka.delete(topic)
    with pytest.raises(DamageError, match="is gone"):
        bank.epochs(3)
    (obstacle,) = obstacles(bank, 0)
    assert "none of its checkpoints by its marker, where 2 was published" in obstacle
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 0, accepted=[obstacle])
    bank.epochs()
    assert sent(kafka, bank) == 30


def obstacles(bank: small.Bank, to: int = 1) -> tuple[str, ...]:
    return rewind.plan(bank.site.pipeline, bank.site.settings, to).obstacles
