"""Pipelines between real servers, killed again and again: each row is there once, or at most once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.recovery.harness import Site
from tests.recovery.test_doors import FEW, KEYS, KILLS, ROWS, Door, expected, killed
from tests.tools.sampling import sampled
from weir import api
from weir.execution.in_process import InMemoryExecutor
from weir.run import maintenance
from weir.run.run import RunOptions, run


def rows() -> list[tuple[int, int]]:
    return [(int(key), seq) for seq, key in enumerate(np.random.default_rng(5).integers(0, KEYS, ROWS))]


def from_kafka_to_kafka(kafka, root: Path, delivery: str) -> tuple[Door, Callable[[], Counter[tuple[str, int]]]]:
    topic, out = kafka.create(partitions=3), kafka.create(partitions=2)
    for partition in range(3):
        values = [json.dumps({"id": key, "seq": seq}).encode() for key, seq in rows() if seq % 3 == partition]
        kafka.send(topic, values, partition)
    place = {"topic": topic, "out": out, "servers": kafka.servers}
    door = Door(root, "kafka", "kafka", delivery, place, {})
    door.landing.mkdir()

    def given() -> Counter[tuple[str, int]]:
        values = [json.loads(message.value()) for message in kafka.committed(out)]
        return Counter((value["id"], value["amount"]) for value in values)

    return door, given


@pytest.mark.parametrize("kills", sampled([FEW, KILLS]))
def test_from_kafka_to_kafka_each_row_is_committed_once(kafka, tmp_path, kills):
    door, given = from_kafka_to_kafka(kafka, tmp_path, "exactly_once")
    assert killed(door, seed=2, kills=kills) > 0
    assert given() == Counter((str(key), seq) for key, seq in rows())


@pytest.mark.long
def test_from_kafka_to_kafka_each_row_is_committed_at_most_once_and_some_are_lost(kafka, tmp_path):
    door, given = from_kafka_to_kafka(kafka, tmp_path, "at_most_once")
    assert not door.run(-1, "publication"), "the topic has neither a message nor a marker"
    assert not door.run(2, "positions") and not door.run(2, "publication")
    killed(door, seed=4)
    wanted = Counter((str(key), seq) for key, seq in rows())
    assert given() <= wanted and set(given().values()) == {1} and given().total() < wanted.total()


@pytest.mark.long
def test_from_files_to_postgres_each_row_is_there_once(postgres, tmp_path, monkeypatch):
    monkeypatch.setenv("WEIR_TEST_PASSWORD", postgres.options["password"])
    postgres.query("DROP TABLE IF EXISTS killed", "rows")
    options = {name: value for name, value in postgres.options.items() if name != "password"}
    connection = {"rows": {"options": {**options, "password": {"env": "WEIR_TEST_PASSWORD"}}}}
    door = Door(tmp_path, "csv", "postgres", "exactly_once", {"table": "killed"}, connection)
    wanted = expected(door)
    assert killed(door, seed=3) > 0
    assert Counter(map(tuple, postgres.query("SELECT id, amount FROM killed", "rows"))) == wanted


def test_rows_of_a_query_come_once_and_a_rewind_reads_them_from_the_archive(postgres, tmp_path, monkeypatch):
    monkeypatch.setenv("WEIR_TEST_PASSWORD", postgres.options["password"])
    postgres.query("DROP TABLE IF EXISTS orders", "rows")
    postgres.query("CREATE TABLE orders (id int8, amount int8, tx xid8 DEFAULT pg_current_xact_id())", "rows")
    options = {name: value for name, value in postgres.options.items() if name != "password"}
    source = api.postgres("SELECT * FROM orders", cursor="tx", connection="rows")
    sums = api.aggregate("sums", source, key="id", sink=api.delta.append("sums"), total=api.agg.sum("amount"))
    env = {
        "WEIR_CONNECTIONS": json.dumps({"rows": {"options": {**options, "password": {"env": "WEIR_TEST_PASSWORD"}}}}),
        "WEIR_CHECKPOINTS__NUM_RETAINED": "9",
    }
    site = Site(tmp_path, env, api.Pipeline("orders", (sums,), max_parallelism=4), __name__)

    def totals() -> dict[int, int]:
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))
        newest = site.table("sums").sort_values("epoch").groupby("id")["total"].last()
        return {int(id): int(total) for id, total in newest.items()}

    for day in range(3):
        postgres.query(f"INSERT INTO orders (id, amount) SELECT i % 3, {day} FROM generate_series(0, 8) AS i", "rows")
        assert totals() == {id: 3 * sum(range(day + 1)) for id in range(3)}
    postgres.query("DELETE FROM orders", "rows")
    maintenance.rewind(site.pipeline, site.settings, 1)
    assert totals() == {0: 9, 1: 9, 2: 9}
