"""A crash after the commit and a deploy before the publish, with a real broker and a real database: rows come as their
checkpoint says, once, or the sink has to be put back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import PipelineError, WeirError
from tests.recovery import small
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from weir import Pipeline, api, delta
from weir.connectors.kafka.sink import KafkaSink
from weir.definition.sink import Sink
from weir.ownership import publish


def using(bank: Bank, sink: Sink | None) -> Bank:
    stage = replace(small.accounts, sink=sink)
    return Bank(replace(bank.site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))


def cut(bank: Bank, monkeypatch, before_publish: bool, *numbers: int) -> None:
    """Epochs whose process ends after their commit: before they are published, or before that is recorded."""

    def crash(*_: object) -> None:
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        if before_publish:
            patched.setattr(publish, "_publish", crash)
        else:
            patched.setattr(Registry, "record_publications", crash)
        with pytest.raises(WeirError):
            bank.epochs(*numbers)


@pytest.fixture
def bank(tmp_path, postgres, monkeypatch) -> Bank:
    monkeypatch.setenv("WEIR_TEST_PASSWORD", postgres.options["password"])
    options = {**postgres.options, "password": {"env": "WEIR_TEST_PASSWORD"}}
    postgres.rows("DROP TABLE IF EXISTS booked, other, weir_markers")
    connections = json.dumps({"rows": {"options": options}})
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="8", WEIR_CONNECTIONS=connections)


def of_postgres(table: str = "booked", key: tuple[str, ...] = ("id",)) -> Sink:
    return api.postgres.sink(table, key=key, connection="rows", name="out")


@pytest.mark.parametrize("before_publish", [True, False], ids=["not published", "not recorded"])
@pytest.mark.parametrize(
    ("now", "said"),
    sampled(
        [
            (lambda: of_postgres(key=()), "has key"),
            (lambda: of_postgres("other"), "has table 'booked'"),
            (lambda: delta.append("out"), "now: a table"),
            (lambda: None, "now: no sink"),
            (lambda: KafkaSink(name="out", topic="t", servers="127.0.0.1:1"), "is postgres there; now: kafka"),
        ],
        2,
    ),
)
def test_rows_for_postgres_wait_for_the_sink_of_their_checkpoint(
    bank, postgres, monkeypatch, now, said, before_publish
):
    before = using(bank, of_postgres())
    before.epochs(1)
    cut(before, monkeypatch, before_publish, 2)
    with pytest.raises(PipelineError, match=said) as refused:
        using(bank, now()).epochs(3)
    assert "Put the sink out back" in (refused.value.next or "")
    before.epochs(3)
    rows = {f"k{key}": 3 for key in range(8)} | {
        f"only-{number}-{key}": number for number in (1, 2, 3) for key in (0, 1)
    }
    assert dict(postgres.rows("SELECT id, amount FROM booked")) == rows
    assert postgres.rows("SELECT to_regclass('other')") == [(None,)]


@pytest.mark.parametrize("before_publish", [True, False], ids=["not published", "not recorded"])
@pytest.mark.parametrize(
    ("now", "said"),
    sampled(
        [
            (lambda sink: replace(sink, key=("id",)), "has key"),
            (lambda sink: replace(sink, topic=f"{sink.topic}-other"), "has topic"),
            (lambda _: delta.append("out"), "now: a table"),
            (lambda _: of_postgres(), "is kafka there; now: postgres"),
        ],
        2,
    ),
)
def test_rows_for_kafka_wait_for_the_sink_of_their_checkpoint(bank, kafka, monkeypatch, now, said, before_publish):
    sink = KafkaSink(name="out", topic=kafka.create(2), servers=kafka.servers)
    before = using(bank, sink)
    before.epochs(1)
    cut(before, monkeypatch, before_publish, 2)
    with pytest.raises(PipelineError, match=said):
        using(bank, now(sink)).epochs(3)
    before.epochs(3)
    values = [json.loads(message.value()) for message in kafka.committed(sink.topic)]
    assert sorted(value["amount"] for value in values) == [1] * 10 + [2] * 10 + [3] * 10
    assert f"{sink.topic}-other" not in kafka.admin.list_topics(timeout=30).topics


def test_what_says_nothing_of_how_rows_come_may_change(bank, kafka, monkeypatch):
    """Other addresses of the same brokers, more time for a transaction."""
    sink = KafkaSink(name="out", topic=kafka.create(), servers=kafka.servers)
    before = using(bank, sink)
    before.epochs(1)
    cut(before, monkeypatch, True, 2)
    using(bank, replace(sink, servers=f"{kafka.servers},127.0.0.1:1", transaction_timeout=200)).epochs(3)
    assert len(kafka.committed(sink.topic)) == 30


def test_a_part_of_a_checkpoint_that_is_in_a_topic_waits_for_its_sink(bank, kafka, monkeypatch):
    monkeypatch.setattr("weir.connectors.kafka.sink._SENDS", 0)
    sink = KafkaSink(name="out", topic=kafka.create(), servers=kafka.servers)
    before = using(bank, sink)
    before.epochs(1)
    send = publish.StagedRows.batches

    def cut_off(self):
        for batch in send(self):
            yield batch.slice(0, 4)
            raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(publish.StagedRows, "batches", cut_off)
        with pytest.raises(WeirError):
            before.epochs(2)
    parts = len(kafka.committed(sink.topic)) - 10
    assert 0 < parts < 10
    with pytest.raises(PipelineError, match="has schema None"):
        schema = json.dumps({"type": "record", "name": "r", "fields": []})
        using(bank, replace(sink, values="avro", schema=schema)).epochs(3)
    before.epochs(3)
    values = [json.loads(message.value()) for message in kafka.committed(sink.topic)]
    assert sorted(value["amount"] for value in values) == [1] * 10 + [2] * 10 + [3] * 10
