"""Bad rows of sources that land their rows: errors and quarantine tables name what people know, and no landed part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import InputError
from tests.recovery.harness import Site
from tests.tools.kafka import KafkaTopics
from tests.tools.postgres_server import Postgres
from weir import Pipeline, delta, kafka, postgres, select
from weir.definition import Source
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

FAR = 2_932_897  # days since 1970: 10000-01-01
ROWS = 4


def of_delta(request: pytest.FixtureRequest, root: Path, changes: bool = False) -> tuple[Callable[..., Source], str]:
    """The second row cannot be handed on, the third has no key."""
    table = str(root / "orders")
    days = pa.array([0, FAR, 0, 0], pa.int32()).cast(pa.date32())
    rows = pa.table({"id": pa.array([1, 2, None, 4]), "day": days, "of": ["x"] * ROWS})
    write_deltalake(table, rows, partition_by=["of"])
    (file,) = DeltaTable(table).file_uris()
    named = f"{table}, version 0, {Path(file).relative_to(table)}"

    def source(on_bad: str) -> Source:
        return delta.table(table, name="orders", changes=changes, on_bad=on_bad)

    return source, named


def of_changes(request: pytest.FixtureRequest, root: Path) -> tuple[Callable[..., Source], str]:
    return of_delta(request, root, changes=True)


def of_postgres(request: pytest.FixtureRequest, root: Path) -> tuple[Callable[..., Source], str]:
    server: Postgres = request.getfixturevalue("postgres")
    server.rows("DROP TABLE IF EXISTS placed")
    server.rows("CREATE TABLE placed (id int8, day date, seq int8)")
    server.rows("INSERT INTO placed VALUES (1, '1970-01-01', 10), (2, 'infinity', 20), (NULL, '1970-01-01', 30), "
                "(4, '1970-01-01', 40)")  # fmt: skip

    def source(on_bad: str) -> Source:
        return postgres("SELECT * FROM placed", cursor="seq", may_miss=True, name="orders", on_bad=on_bad,
                        connection="db")  # fmt: skip

    return source, "seq from 10 to 40"


def of_kafka(request: pytest.FixtureRequest, root: Path) -> tuple[Callable[..., Source], str]:
    topics: KafkaTopics = request.getfixturevalue("kafka")
    topic = topics.create()
    days = ["1970-01-01", "no day", "1970-01-01", "1970-01-01"]
    ids = [1, 2, None, 4]
    topics.send(topic, [json.dumps({"id": id, "day": day}).encode() for id, day in zip(ids, days, strict=True)])

    def source(on_bad: str) -> Source:
        schema = {"id": pa.int64(), "day": pa.date32()}
        return kafka(topic, servers=topics.servers, schema=schema, name="orders", on_bad=on_bad)

    return source, topic


SYSTEMS = {"delta": of_delta, "changes": of_changes, "postgres": of_postgres, "kafka": of_kafka}
PLACES = {"postgres": ("seq = 20", "seq = 30"), "kafka": ("the first at 1:", "partition 0, offset 2")}


def of(root: Path, source: Source, request: pytest.FixtureRequest) -> Site:
    where = "_change_type = 'insert'" if getattr(source, "changes", False) else None
    stage = select("s", source, "id", "day", where=where, sink=delta.upsert("t", key="id", order_by="day"))
    options = {"WEIR_SPARK__PARALLELISM": "2"}
    if source.connection is not None:
        options["WEIR_CONNECTIONS__DB__OPTIONS"] = json.dumps(request.getfixturevalue("postgres").options)
    return Site(root, options, Pipeline("p", (stage,), max_parallelism=8), __name__)


def epochs(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_errors_and_quarantine_tables_name_what_people_know(request, tmp_path, system):
    source, named = SYSTEMS[system](request, tmp_path)
    undecoded, refused = PLACES.get(system, ("the first at 2:", "row 3"))
    with pytest.raises(InputError) as failed:
        epochs(of(tmp_path / "fail", source("fail"), request))
    assert named in str(failed.value) and undecoded in str(failed.value)
    site = of(tmp_path / "aside", source("quarantine"), request)
    epochs(site)
    assert sorted(row["id"] for row in site.table("t").to_dict("records")) == [1, 4]
    aside = site.table("s_quarantine").to_dict("records")
    (bad,), (keyless,) = (
        [row for row in aside if (row["_weir_raw"] is not None) == is_bad] for is_bad in (True, False)
    )
    assert named in bad["_weir_file"] and bad["_weir_row"] == (1 if system == "kafka" else 2)
    assert keyless["_weir_file"].endswith(refused), "that of the row at the source, by which people find it"
