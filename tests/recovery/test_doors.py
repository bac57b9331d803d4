"""Each source with some sink, killed again and again at its requests: exactly once is once, at least once is at least
once and somewhere more, and state is exact in both; at most once is at most once and somewhere less. What there should
be is told by the input alone, without Weir."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from state_ops.fsck.findings import Severity
from tests.recovery import ledger
from tests.recovery.doors_child import Order, carried_out, pipeline_of
from tests.recovery.queue_source import Queue
from tests.replay.flights import read_delta
from tests.tools.sampling import sampled
from tests.weir.sources.partitions import put, row
from weir.connectors.generator import GeneratorSource
from weir.definition.source import Limits, Opening
from weir.inspection import state_reader
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck
from weir.settings import configuration as settings

ROWS, KEYS = 600, 7
KILLS, FEW = 4, 2  # `make test` kills fewer times
ON_SPARK = [  # each source and each sink, of which the tests play the first: files of each kind, a connector, each sink
    ("parquet", "append"),
    ("csv", "upsert"),
    ("json", "partitioned"),
    ("partitions", "ledger"),
    ("avro", "ledger"),
    ("generator", "append"),
    ("archived", "upsert"),
]


@dataclass
class Door:
    """One pipeline in a directory."""

    root: Path
    source: str
    sink: str
    delivery: str
    place: dict[str, str]
    connections: dict[str, Any]
    spark: bool = False
    epoch_rows: int = 50

    @property
    def landing(self) -> Path:
        return self.root / "landing"

    def run(self, dies_at: int, requests: str = "all") -> bool:
        """Whether it came to its end. requests: which of them count, as `doors_child` names them."""
        file, said = self.root / "config.json", self.root / "said"
        file.write_text(json.dumps({**self.config(), "env": self.env()}))
        code = carried_out(Order(str(file), str(said), dict(os.environ), dies_at, requests))
        assert code in (0, -signal.SIGKILL), said.read_text()[-8000:]
        return code == 0

    def config(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "sink": self.sink,
            "delivery": self.delivery,
            "place": self.place,
            "spark": self.spark,
        }

    def env(self) -> dict[str, str]:
        params = {"landing": str(self.landing)}
        return {
            "WEIR_STORAGE__ROOT": str(self.root / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(self.root / "work"),
            "WEIR_PIPELINES__DOORS__OBJECT": "tests.recovery.doors_child:pipeline",
            "WEIR_PIPELINES__DOORS__PARAMS": json.dumps(params),
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_EPOCH__MAX_ROWS": str(self.epoch_rows),
            "WEIR_EPOCH__MAX_FILES": str(self.epoch_rows // 20),
            "WEIR_RUN__POLL_SECONDS": "0.05",
            "WEIR_CONNECTIONS": json.dumps(self.connections),
        }

    def given(self) -> Counter[tuple[str, int]]:
        """What the sink has: key and number, as often as it has them."""
        if self.sink in ("ledger", "foreach"):
            return Counter(ledger.rows_of(self.place["ledger"]))
        rows = read_delta(self.root / "storage" / "doors" / "tables" / "out")
        return Counter(zip(rows["id"].astype(str), rows["amount"].astype(int), strict=True))

    def numbers(self) -> dict[str, list[int]]:
        """By key, the running numbers of its rows, which the stage's state tells."""
        rows = pl.from_pandas(read_delta(self.root / "storage" / "doors" / "tables" / "out"))
        return {str(id): sorted(nth) for id, nth in rows.group_by("id").agg("nth").iter_rows()}


def expected(door: Door) -> Counter[tuple[str, int]]:
    """Write the input, and say what is in it."""
    keys = np.random.default_rng(5).integers(0, KEYS, ROWS)
    rows = [(int(key), seq) for seq, key in enumerate(keys)]
    door.landing.mkdir(parents=True)
    if door.source == "queue":
        Queue(str(door.landing / "queue.db")).put([(str(key), seq) for key, seq in rows])
        return Counter((str(key), seq) for key, seq in rows)
    cut = [rows[at : at + 20] for at in range(0, ROWS, 20)]
    if door.source == "generator":
        source = GeneratorSource(name="in", end=ROWS, keys=KEYS, seed=3)
        connector = source.open(Opening("doors", str, {}))
        (part,) = connector.plan(connector.begin("earliest"), Limits(9, 1 << 40, 1 << 40)).parts
        table = pa.concat_tables(batch.rows for batch in connector.read(part))
        return Counter(zip(map(str, table["key"].to_pylist()), table["seq"].to_pylist(), strict=True))
    for number, some in enumerate(cut):
        frame = pl.DataFrame(some, schema={"id": pl.Int64, "seq": pl.Int64}, orient="row")
        file = door.landing / f"{number:03}.{door.source}"
        match door.source:
            case "parquet":
                pq.write_table(frame.to_arrow(), file)
            case "csv":
                frame.write_csv(file)
            case "json":
                frame.write_ndjson(file)
            case "avro":
                frame.write_avro(file)
            case "delta" | "changes":
                write_deltalake(door.landing, frame.to_arrow(), mode="append")
            case _:
                for key, seq in some:
                    put(door.landing, f"p{seq % 3}", row(str(key), seq, seq))
    return Counter((str(key), seq) for key, seq in rows)


def killed(door: Door, seed: int, kills: int = KILLS) -> int:
    """Kill it some times, then let it come to its end; how often it died."""
    chance, deaths = random.Random(seed), 0
    for _ in range(kills):
        if door.run(chance.randint(1, 60)):
            break
        deaths += 1
    assert door.run(0)
    return deaths


def door_at(root: Path, source: str, sink: str, delivery: str = "exactly_once") -> Door:
    return Door(root, source, sink, delivery, {"rows": str(ROWS), "ledger": str(root / "ledger.db")}, {})


@pytest.mark.parametrize(
    ("source", "sink", "kills"),
    sampled(
        [
            ("archived", "partitioned", FEW),
            ("csv", "upsert", KILLS),
            ("json", "append", KILLS),
            ("avro", "ledger", KILLS),
            ("parquet", "partitioned", KILLS),
            ("partitions", "ledger", KILLS),
            ("archived", "upsert", KILLS),
            ("generator", "upsert", KILLS),
            ("delta", "partitioned", KILLS),
            ("changes", "ledger", KILLS),
        ],
    ),
)
def test_each_row_comes_once_whatever_dies(tmp_path, source, sink, kills):
    door = door_at(tmp_path, source, sink)
    wanted = expected(door)
    assert killed(door, seed=len(source) * 31 + len(sink), kills=kills) > 0
    assert_exactly_once(door, wanted)


def assert_exactly_once(door: Door, wanted: Counter[tuple[str, int]]) -> None:
    assert door.given() == wanted
    if door.sink != "ledger":
        by_key = Counter(id for id, _ in wanted)
        assert door.numbers() == {id: list(range(1, count + 1)) for id, count in by_key.items()}, "state is exact"
    assert not list((door.root / "storage" / "doors" / "landed").rglob("*.parquet")) or door.source == "archived"


@pytest.mark.long
@pytest.mark.parametrize(("source", "sink"), ON_SPARK[:4])
def test_each_row_comes_once_on_spark_too(tmp_path, source, sink):
    door = replace(door_at(tmp_path, source, sink), spark=True, epoch_rows=200)
    wanted = expected(door)
    assert not door.run(random.Random(source).randint(8, 30)), "it was killed"
    assert door.run(0)
    assert_exactly_once(door, wanted)


@pytest.mark.long
def test_at_least_once_and_at_most_once_hold_on_spark_too(tmp_path):
    more = replace(door_at(tmp_path / "more", "csv", "append", "at_least_once"), spark=True, epoch_rows=200)
    wanted = expected(more)
    assert not more.run(-1, "delivery") and more.run(0)
    assert more.given().keys() == wanted.keys() and wanted < more.given()
    less = replace(door_at(tmp_path / "less", "csv", "append", "at_most_once"), spark=True, epoch_rows=200)
    assert expected(less) == wanted
    assert not less.run(-1, "positions") and less.run(0)
    assert less.given() < wanted and less.given().total() == ROWS - 200


@pytest.mark.long  # `test_delivery` has the same guarantee without processes
@pytest.mark.parametrize(("source", "sink"), [("csv", "append"), ("partitions", "ledger"), ("generator", "append")])
def test_at_least_once_is_at_least_once_and_somewhere_more(tmp_path, source, sink):
    door = door_at(tmp_path, source, sink, "at_least_once")
    wanted = expected(door)
    for at in (1, 3):  # before a commit, whose rows have been delivered
        assert not door.run(at, "commit")
    assert not door.run(2, "delivery"), "before the state of those rows is uploaded"
    killed(door, seed=7)
    given = door.given()
    assert given.keys() == wanted.keys() and given.total() > wanted.total()
    if sink == "append":
        for id, numbers in door.numbers().items():
            assert set(numbers) == set(range(1, sum(key == id for key, _ in wanted) + 1)), "state is exact"


@pytest.mark.parametrize(
    ("source", "sink", "kills"),
    sampled(
        [
            ("queue", "foreach", FEW),
            ("csv", "append", KILLS),
            ("parquet", "upsert", KILLS),
            ("partitions", "ledger", KILLS),
            ("archived", "partitioned", KILLS),
            ("generator", "foreach", KILLS),
            ("queue", "ledger", KILLS),
        ],
    ),
)
def test_at_most_once_is_at_most_once_and_somewhere_less(tmp_path, source, sink, kills):
    door = door_at(tmp_path, source, sink, "at_most_once")
    wanted = expected(door)
    assert not door.run(2, "positions"), "after positions were committed, whose rows nobody has applied"
    assert not door.run(2, "publication"), "before the sink gets what is recorded as published"
    killed(door, seed=len(source) * 17 + len(sink), kills=kills)
    given = door.given()
    assert given <= wanted and set(given.values()) == {1} and given.total() < wanted.total()

    loaded, pipeline = settings.load(door.env()), pipeline_of(door.config())
    head = open_storage(pipeline, loaded)[1].head()
    applied = {row["key" if source == "generator" else "id"]: row["rows"]
               for table in state_reader.scan(pipeline, loaded, "all") for row in table.to_pylist()}  # fmt: skip
    assert sum(applied.values()) == head.totals["rows_read"], "state is what was applied"
    seen = head.totals["rows_read"] + head.totals["rows_lost"]
    assert seen == ROWS or (seen < ROWS and source == "queue"), (
        "what a queue has given is lost before its positions too"
    )
    assert head.totals["rows_lost"] >= 50
    assert all(Counter(id for id, _ in given)[str(id)] <= rows for id, rows in applied.items())
    if sink in ("append", "partitioned", "upsert"):
        for id, numbers in door.numbers().items():
            assert len(set(numbers)) == len(numbers) and set(numbers) <= set(range(1, applied[_typed(source, id)] + 1))
    damage = [finding for finding in fsck.examine(pipeline, loaded).findings if finding.severity is Severity.DAMAGE]
    assert not damage


def _typed(source: str, id: str) -> str | int:
    return id if source in ("queue", "partitions", "archived") else int(id)
