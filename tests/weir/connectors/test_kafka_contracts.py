"""Kafka keeps to the contracts of sources and sinks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tests.tools.kafka import KafkaTopics
from tests.tools.sampling import long_tests
from weir.connectors.kafka.sink import KafkaSink
from weir.connectors.kafka.source import KafkaSource
from weir.definition.sink import SinkOpening
from weir.definition.source import Opening
from weir.testing import SinkContract, SinkSystem, SourceContract, SourceSystem

PASSWORD = "not-the-one-it-wants"
WRONG = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "weir",
    "sasl.password": PASSWORD,
}
_BROKER = "{broker}"


class KafkaSourceSystem(SourceSystem):
    secrets = (PASSWORD,)

    def __init__(self, kafka: KafkaTopics) -> None:
        self._kafka, self._topic, self._appended = kafka, kafka.create(3), 0

    @property
    def source(self) -> KafkaSource:
        return KafkaSource(
            name="rows",
            topics=(self._topic,),
            servers=_BROKER,
            schema=pa.schema([("id", pa.int64())]),
            timestamp="sent",
            event_time="sent",
            on_bad="quarantine",
        )

    @property
    def opening(self) -> Opening:
        return self._opening(self._kafka.servers)

    def append(self, count: int) -> None:
        for partition in range(3):
            numbers = range(self._appended, self._appended + count)
            values = [b'{"id": %d}' % number for number in numbers if number % 3 == partition]
            self._kafka.send(self._topic, values, partition)
        self._appended += count

    def append_bad(self) -> None:
        self._kafka.send(self._topic, [b'{"id": "no number"}'])

    def lose(self) -> set[int]:
        self._kafka.expire(self._topic, 2, 1)
        return {1, 4}

    def alter(self) -> None:
        self._kafka.make_anew(self._topic, 3)

    def unreachable(self) -> Opening:
        return self._opening("127.0.0.1:1", **{"socket.timeout.ms": "1500"})

    def refused(self) -> Opening:
        return self._opening(self._kafka.broker.sasl_servers, **WRONG)

    @staticmethod
    def _opening(servers: str, **options: str) -> Opening:
        return Opening("contract", _Resolver(servers), options)


class KafkaSinkSystem(SinkSystem):
    secrets = (PASSWORD,)

    def __init__(self, kafka: KafkaTopics) -> None:
        self._kafka, self._topic = kafka, kafka.create(2)

    @property
    def sink(self) -> KafkaSink:
        return KafkaSink(name="out", topic=self._topic, servers=_BROKER, key=("id",))

    @property
    def opening(self) -> SinkOpening:
        return self._opening(self._kafka.servers)

    def contents(self) -> Iterator[tuple[int, str]]:
        for message in self._kafka.committed(self._topic):
            row = json.loads(message.value())
            assert message.key() == str(row["id"]).encode()
            yield row["id"], row["text"]

    def unreachable(self) -> SinkOpening:
        return self._opening("127.0.0.1:1", **{"socket.timeout.ms": "1500"})

    def refused(self) -> SinkOpening:
        return self._opening(self._kafka.broker.sasl_servers, **WRONG)

    @staticmethod
    def _opening(servers: str, **options: str) -> SinkOpening:
        return SinkOpening("contract/main/out", _Resolver(servers), options, lambda: None)


class _Resolver:
    """Puts the broker's address where a definition has `{broker}`; another process can have it too."""

    def __init__(self, servers: str) -> None:
        self._servers = servers

    def __call__(self, text: str) -> str:
        return text.replace(_BROKER, self._servers)


@long_tests(
    "test_a_part_is_the_same_in_another_process",
    "test_a_branch_reads_no_further_than_its_pipeline",
    "test_a_position_stays_small",
    "test_batches_have_the_same_columns",
)
class TestKafkaSource(SourceContract):
    @pytest.fixture
    def system(self, kafka: KafkaTopics) -> KafkaSourceSystem:
        return KafkaSourceSystem(kafka)


@long_tests(
    "test_another_previous_is_damage",
    "test_no_rows_move_the_marker",
    "test_many_rows",
    "test_publishers_side_by_side_publish_once",
    "test_a_zombie_in_the_middle_publishes_nothing_after_a_rewind",
)
class TestKafkaSink(SinkContract):
    @pytest.fixture
    def system(self, kafka: KafkaTopics) -> KafkaSinkSystem:
        return KafkaSinkSystem(kafka)
