"""A Delta table as a source of whole pipelines: the table of another pipeline, which is rewound; changes; columns that
come; branches."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import InputError, PipelineError
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.weir.sources.partitions import PartitionsSource, put, row
from weir import (
    Epoch,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    chain,
    delta,
    files,
    kafka,
    postgres,
    select,
    stage,
)
from weir.definition import Stage
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, plan
from weir.restore import rewind
from weir.run import maintenance
from weir.run.run import RunOptions, run

OPTIONS = {"WEIR_SPARK__PARALLELISM": "2", "WEIR_CHECKPOINTS__NUM_RETAINED": "9"}


class Nothing(State):
    """Of one key."""

    rows: int = 0


def first(root: Path, sink: Any = None) -> Site:
    clicks = PartitionsSource(name="clicks", event_time="at", idle_after=None)
    sums = aggregate("sums", clicks, key="id", sink=sink or delta.append("sums"), n=agg.count(), total=agg.sum("n"))
    return Site(root, OPTIONS, Pipeline("upstream", (sums,), max_parallelism=4), __name__)


def second(root: Path, table: Path, **more: Any) -> Site:
    rows = delta.table(str(table), name="rows", **more)
    stage = aggregate("seen", rows, key="id", sink=delta.append("seen"), n=agg.count())
    return Site(root, OPTIONS, Pipeline("downstream", (stage,), max_parallelism=4), __name__)


def epochs(site: Site) -> list[Any]:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))


def seen(site: Site) -> dict[Any, int]:
    newest = pl.from_pandas(site.table("seen")).sort("epoch").unique("id", keep="last")
    return dict(newest.select("id", "n").iter_rows())


def test_tables_whose_places_are_params_are_called_by_the_params_names(tmp_path: Path):
    up, (orders, out) = tmp_path / "orders.delta", ("{orders}", "{out}")
    write_deltalake(str(up), pa.table({"id": ["a", "a", "b"]}))
    stage = aggregate("seen", delta.table(orders), key="id", sink=delta.append(out), n=agg.count())
    params = json.dumps({"orders": str(up), "out": str(tmp_path / "out.delta")})
    site = Site(tmp_path, {}, Pipeline("places", (stage,), max_parallelism=4), __name__)
    site = replace(site, options={**OPTIONS, "WEIR_PIPELINES__PLACES__PARAMS": params})
    (report,) = epochs(site)
    assert list(report.checkpoint.offsets) == ["orders"] and list(report.checkpoint.sinks) == ["out"]
    rows = DeltaTable(str(tmp_path / "out.delta")).to_pyarrow_table()
    assert dict(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True)) == {"a": 2, "b": 1}
    topic = kafka("{topic}", servers="localhost:1", schema={"id": pa.string()})
    assert (topic.name, topic.topics) == ("topic", ("{topic}",))
    assert kafka.sink("{prefix}-sums", servers="localhost:1").name == "prefix_sums"
    assert postgres.sink("{schema}.sums", key="id").name == "schema_sums"
    assert delta.table("{lake}/orders-{region}").name == "orders-region"


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["history", "live"])
def test_files_are_refused_in_a_chain_where_it_is_defined(order):
    with pytest.raises(PipelineError, match=r"files of \{landing\}/"):
        chain(*[files("{landing}/*.parquet"), delta.table("{orders}")][order])


def test_sinks_are_called_by_their_places_in_letters_that_become_parts_of_paths():
    by_name = {
        "shop_revenue_2": kafka.sink("shop.revenue-2", servers="localhost:1"),
        "shop_revenue": postgres.sink("Shop.Revenue"),
        "my_legs_delta": delta.append("s3://bucket/My-Legs.delta"),
        "sums_": delta.append("{lake}/sums_"),
    }
    for name, sink in by_name.items():
        stage = aggregate("seen", delta.table("{orders}"), key="id", sink=sink, n=agg.count())
        assert [sink.name for sink in Pipeline("places", (stage,)).sinks] == [name]


def test_the_table_of_another_pipeline_and_its_rewind(tmp_path: Path):
    up = first(tmp_path / "up")
    up.landing.mkdir(parents=True)
    put(up.landing, "p", row("a", 1, 1), row("b", 1, 1))
    (epoch,) = epochs(up)
    down = second(tmp_path / "down", up.storage / "tables/sums")
    (read,) = epochs(down)
    assert seen(down) == {"a": 1, "b": 1}
    put(up.landing, "p", row("a", 2, 2))
    epochs(up)
    epochs(down)
    assert seen(down) == {"a": 2, "b": 1} and epochs(down) == []

    maintenance.rewind(up.pipeline, up.settings, int(epoch.checkpoint.id))
    epochs(up)
    with pytest.raises(InputError, match=r"was not only added to") as held:
        epochs(down)
    version = DeltaTable(up.storage / "tables/sums").version()
    assert "weir seek downstream rows" in held.value.next and f"version {version - 1}" in held.value.where
    assert seen(down) == {"a": 2, "b": 1}, "nothing was applied"

    maintenance.rewind(down.pipeline, down.settings, int(read.checkpoint.id))
    maintenance.seek(down.pipeline, down.settings, "rows", {"version": version})
    epochs(down)
    assert seen(down) == {"a": 2, "b": 1}, "as upstream, which has read the row once more"

    (source,) = rewind.plan(down.pipeline, down.settings, int(read.checkpoint.id)).sources
    assert "removed or restored rows" in source.gone[0], "a rewind says that it would meet the same"


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize(
    "sink", [delta.upsert("sums", "id"), delta.replace("sums", where="n >= 0")], ids=lambda s: type(s).__name__
)
def test_a_table_whose_rows_another_pipeline_replaces_says_what_to_read_instead(tmp_path: Path, sink, changes: bool):
    up = first(tmp_path / "up", sink)
    up.landing.mkdir(parents=True)
    put(up.landing, "p", row("a", 1, 1), row("b", 1, 1))
    epochs(up)
    down = second(tmp_path / "down", up.storage / "tables/sums", changes=changes)
    epochs(down)
    assert seen(down) == {"a": 1, "b": 1}
    put(up.landing, "p", row("a", 2, 2))
    epochs(up)
    with pytest.raises(InputError, match="replaced rows of the table") as held:
        epochs(down)
    assert "delta.append" in held.value.next and "changes=True" not in held.value.next


def test_changes_keep_a_copy_of_a_table(tmp_path: Path):
    table = tmp_path / "users"
    rows = pa.table({"id": pa.array(range(20), pa.int64()), "name": [f"n{id}" for id in range(20)]})
    write_deltalake(table, rows, configuration={"delta.enableChangeDataFeed": "true"})

    changes = delta.table(str(table), changes=True)

    @stage("copy", source=changes, key="id", state=Nothing, sink=delta.upsert("copy", key="id"), accepts_changes=True)
    def copy(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.filter(pl.col("_change_type") != "update_preimage").drop("_commit_timestamp")

    site = Site(tmp_path / "site", OPTIONS, Pipeline("copies", (copy,), max_parallelism=4), __name__)

    def is_copied() -> None:
        epochs(site)
        there = pl.from_pandas(site.table("copy")).select("id", "name").sort("id")
        assert there.equals(pl.from_arrow(DeltaTable(table).to_pyarrow_table()).sort("id"))

    is_copied()
    DeltaTable(table).update({"name": "'x' || name"}, predicate="id % 3 = 0")
    is_copied()
    DeltaTable(table).delete("id % 5 = 1")
    DeltaTable(table).optimize.compact()
    is_copied()
    merge = DeltaTable(table).merge(rows.slice(3, 9), "s.id = t.id", source_alias="s", target_alias="t")
    merge.when_matched_delete("t.id = 4").when_matched_update_all().when_not_matched_insert_all().execute()
    write_deltalake(table, pa.table({"id": [77], "name": ["late"]}), mode="append")
    is_copied()


def test_an_aggregate_that_comes_later_reads_a_tables_changes_by_a_source_of_its_own(tmp_path: Path):
    table = tmp_path / "users"
    rows = pa.table({"id": pa.array(range(20), pa.int64()), "city": ["a", "b"] * 10})
    write_deltalake(table, rows, configuration={"delta.enableChangeDataFeed": "true"})

    def counted(uid: str, name: str) -> Stage:
        users = delta.table(str(table), name=name, changes=True)
        return aggregate(uid, users, key="city", n=agg.count(), sink=delta.append(uid))

    first = counted("first", "users")
    site = Site(tmp_path / "site", OPTIONS, Pipeline("copies", (first,), max_parallelism=4), __name__)
    epochs(site)
    DeltaTable(table).delete("id < 4")
    late = replace(site, pipeline=replace(site.pipeline, stages=(first, counted("late", "users"))))
    assert plan.plan(late.pipeline, late.settings).stops
    with pytest.raises(PipelineError, match="the changes of the source users from the middle"):
        epochs(late)
    anew = replace(site, pipeline=replace(site.pipeline, stages=(first, counted("late", "users_anew"))))
    epochs(anew)
    for name in ("first", "late"):
        newest = pl.from_pandas(anew.table(name)).sort("epoch").unique("city", keep="last").sort("city")
        assert newest.select("city", "n").rows() == [("a", 8), ("b", 8)]


def test_columns_that_a_table_gains_are_read_where_that_is_said(tmp_path: Path):
    table = tmp_path / "t"
    write_deltalake(table, pa.table({"id": ["a"]}))
    fixed, grown = second(tmp_path / "fix", table), second(tmp_path / "add", table, evolve="add")
    for site in (fixed, grown):
        epochs(site)
    write_deltalake(table, pa.table({"id": ["b"], "more": [1]}), mode="append", schema_mode="merge")
    looks = [str(plan.plan(site.pipeline, site.settings)) for site in (fixed, grown)]
    assert [look.count("nobody reads") + look.count("not read") for look in looks] == [1, 0], looks
    for site in (fixed, grown):
        assert epochs(site) and seen(site) == {"a": 1, "b": 1}


def test_a_branch_reads_what_its_pipeline_has_read(tmp_path: Path):
    table = tmp_path / "t"
    for id in "abc":
        write_deltalake(table, pa.table({"id": [id]}), mode="append")
    site = second(tmp_path / "site", table, start={"version": 0})
    site = replace(site, options=OPTIONS | {"WEIR_EPOCH__MAX_FILES": "1"})
    done = epochs(site)
    assert len(done) == 3
    write_deltalake(table, pa.table({"id": ["d"]}), mode="append")
    forks.fork(site.pipeline, site.settings, "again", int(done[0].checkpoint.id))
    branch = replace(site, pipeline=forks.branched(site.pipeline, site.settings, "again"))
    epochs(branch)
    assert seen(branch) == {"b": 1, "c": 1} and epochs(branch) == []


def test_a_position_goes_on_where_no_row_comes_before_the_log_forgets_it(tmp_path: Path):
    table = tmp_path / "t"
    write_deltalake(table, pa.table({"id": ["a"]}))
    site = second(tmp_path / "site", table)
    assert len(epochs(site)) == 1 and epochs(site) == []
    handle = DeltaTable(table)
    for version in range(25):
        handle.alter.set_table_properties({"delta.logRetentionDuration": f"interval {version + 1} days"})
        if version == 9:
            assert epochs(site) == [], "not for each of them"
    (recorded,) = epochs(site)
    assert seen(site) == {"a": 1} and epochs(site) == [], recorded
    write_deltalake(table, pa.table({"id": ["a"]}), mode="append")
    handle = DeltaTable(table)
    handle.create_checkpoint()
    for entry in sorted((table / "_delta_log").glob("*.json"))[:-1]:
        entry.unlink()
    epochs(site)
    assert seen(site) == {"a": 2}


@pytest.mark.parametrize("seed", sampled(range(12)))
def test_whatever_becomes_of_a_table_its_aggregates_and_copies_are_those_of_what_it_has(tmp_path: Path, seed: int):
    """Rows change their keys, values and partitions, an epoch a file of changes, with several versions between runs."""
    draw, table = random.Random(seed), tmp_path / "users"
    columns = pa.schema([("id", pa.int64()), ("city", pa.string()), ("score", pa.int64())])

    def some(number: int) -> pa.Table:
        ids = draw.sample(range(40), number)
        cities = [draw.choice("abcde") for _ in ids]
        return pa.table([ids, cities, [draw.randrange(9) for _ in ids]], schema=columns)

    def changed() -> None:
        match draw.choice("uumdia"):
            case "u":
                DeltaTable(table).update(
                    {"city": f"'{draw.choice('abcde')}'", "score": "score + 1"},
                    predicate=f"id % 4 = {draw.randrange(4)}",
                )
            case "m":
                merge = DeltaTable(table).merge(some(15), "s.id = t.id", source_alias="s", target_alias="t")
                merge.when_matched_update_all().when_not_matched_insert_all().execute()
            case "d":
                DeltaTable(table).delete(f"id % 5 = {draw.randrange(5)}")
            case "i":
                merge = DeltaTable(table).merge(some(9), "s.id = t.id", source_alias="s", target_alias="t")
                merge.when_not_matched_insert_all().when_matched_delete("t.score > 4").execute()
            case "a":
                DeltaTable(table).optimize.compact()

    feed = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(table, some(20), partition_by=["city"], configuration=feed)
    users = delta.table(str(table), name="users", changes=True)
    by_city = aggregate(
        "by_city",
        users,
        key="city",
        n=agg.count(),
        score=agg.sum("score"),
        changes=True,
        sink=delta.upsert("by_city", "city"),
    )
    by_n = aggregate(
        "by_n",
        by_city,
        key="n",
        cities=agg.count(),
        mean=agg.mean("score"),
        changes=True,
        sink=delta.upsert("by_n", "n"),
    )
    high = select(
        "high",
        users,
        "id",
        "city",
        "score",
        "_change_type",
        "_commit_version",
        where="score > 3",
        sink=delta.upsert("high", "id", order_by="_commit_version"),
    )
    log = select("log", by_city, where="n > 1", sink=delta.append("log"))
    pipeline = Pipeline("copies", (by_city, by_n, high, log), max_parallelism=4)
    site = Site(
        tmp_path / "site", {**OPTIONS, "WEIR_EPOCH__MAX_FILES": draw.choice(["1", "2", "100"])}, pipeline, __name__
    )

    for _ in range(4):
        epochs(site)
        with duckdb.connect() as connection:
            connection.register("users", DeltaTable(table).to_pyarrow_table())
            cities = "SELECT city, count(*) AS n, sum(score)::BIGINT AS score FROM users GROUP BY city"
            expected = {
                "by_city": connection.execute(cities).fetchall(),
                "by_n": connection.execute(
                    f"SELECT n, count(*), avg(score)::DOUBLE FROM ({cities}) GROUP BY n"
                ).fetchall(),
                "high": connection.execute("SELECT id, city, score FROM users WHERE score > 3").fetchall(),
            }
        for name, rows in expected.items():
            kept = pl.from_pandas(site.table(name)).drop("epoch", "_commit_version", strict=False)
            assert sorted(kept.rows()) == sorted(rows), name
        logged = Counter[tuple]()
        for city, n, score, _, kind in pl.from_pandas(site.table("log")).rows():
            logged[city, n, score] += -1 if kind in ("delete", "update_preimage") else 1
        assert sorted(logged.elements()) == sorted(row for row in expected["by_city"] if row[1] > 1)
        for _ in range(draw.randint(1, 3)):
            changed()
