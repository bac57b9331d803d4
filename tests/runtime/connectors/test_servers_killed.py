"""Pipelines between real servers, killed again and again: each row is there once."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tests.recovery.test_doors import KEYS, ROWS, Door, expected, killed


def rows() -> list[tuple[int, int]]:
    return [(int(key), seq) for seq, key in enumerate(np.random.default_rng(5).integers(0, KEYS, ROWS))]


def test_from_kafka_to_kafka_each_row_is_committed_once(kafka, tmp_path):
    topic, out = kafka.create(partitions=3), kafka.create(partitions=2)
    for partition in range(3):
        values = [json.dumps({"id": key, "seq": seq}).encode() for key, seq in rows() if seq % 3 == partition]
        kafka.send(topic, values, partition)
    place = {"topic": topic, "out": out, "servers": kafka.servers}
    door = Door(tmp_path, "kafka", "kafka", "exactly_once", place, {})
    door.landing.mkdir()
    assert killed(door, seed=2) > 0
    given = Counter((value["id"], value["amount"]) for value in (json.loads(m.value()) for m in kafka.committed(out)))
    assert given == Counter((str(key), seq) for key, seq in rows())


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
