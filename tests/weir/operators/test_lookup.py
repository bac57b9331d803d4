"""Lookups: rows are joined with the version of a table that their epoch was planned with, whatever became of it since."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import ConfigurationError, InputError, LostError, PipelineError, WeirError
from state_ops.keyed.keyed_state import GROUP
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, expect, files, lookup, stage, testing
from weir.connectors.lookups import key_index, lookup_table
from weir.connectors.lookups.lookup_table import LookupTable, Pinned
from weir.definition import ROW
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill, forks
from weir.operations.plan import plan
from weir.operators.functions.function import trial_of
from weir.operators.shapes import shapes
from weir.run.run import RunOptions, run

FACTS = files("{landing}/facts/*.parquet", name="facts")
NAMES = "{landing}/names"


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("passed", source=FACTS, key="k", state=Seen)
def passed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row as it came."""
    state.fold(rows, rows=agg.count())
    return rows


def named(source=FACTS, **more):
    more = {"table": NAMES, "on": {"k": "key"}, **more}
    return lookup("named", source, sink=delta.append("named"), **more)


pipeline = Pipeline("lookups", (named(),))
behind_a_stage = Pipeline("lookups", (passed, named(passed)))


def site_of(root: Path, pipeline: Pipeline = pipeline, **options: str) -> Site:
    site = Site(root, {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__PARALLELISM": "2", **options}, pipeline, __name__)
    (site.landing / "facts").mkdir(parents=True)
    return site


def land(site: Site, number: int, keys: list[int]) -> None:
    rows = pa.table({"k": pa.array(keys, pa.int64()), "n": pa.array(range(len(keys)), pa.int64())})
    pq.write_table(rows, site.landing / "facts" / f"{number}.parquet")


def put(site: Site, rows: dict[int, str], name: str = "names") -> None:
    """The table's next version."""
    table = pa.table({"key": pa.array(rows, pa.int64()), "name": list(rows.values())})
    write_deltalake(str(site.landing / name), table, mode="overwrite")


def ran(site: Site, batch_rows: int = 65_536) -> list:
    executor = InMemoryExecutor(batch_rows)
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))


def joined(site: Site, table: str = "named") -> list[tuple]:
    return sorted(pl.read_delta(str(site.storage / "tables" / table)).select("k", "n", "name").rows(), key=str)


# -- what is joined


@pytest.mark.parametrize("seed", range(6))
def test_a_lookup_is_duckdbs_join_whatever_the_slices_are_and_although_the_table_changes(seed):
    chance = random.Random(seed)
    how, keys = chance.choice(["left", "inner"]), chance.choice([3, 40])
    texts = [f"key {number}" for number in range(keys)]
    on, broadcast = {"k": "key", "of": "of"}, chance.choice([True, False])
    stage = lookup("named", FACTS, table="nowhere", on=on, how=how, broadcast=broadcast)
    run = testing.run(
        stage, parallelism=chance.randint(1, 4), batch_rows=chance.choice([1, 7, 1000]), max_parallelism=16
    )
    rows, truth = [], []
    with duckdb.connect() as db:
        for _ in range(4):
            count = chance.choice([1, 5, 60])
            prices = pl.DataFrame(
                {
                    "key": [chance.choice([*texts, None]) for _ in range(count)],
                    "of": [chance.choice([1, 2, None]) for _ in range(count)],
                    "name": [chance.choice(["a", "b", None]) for _ in range(count)],
                    "k": range(count),
                },
                schema={"key": pl.String, "of": pl.Int32, "name": pl.String, "k": pl.Int64},
            )
            facts = pl.DataFrame(
                {
                    "k": [chance.choice([*texts, None]) for _ in range(50)],
                    "of": [chance.choice([1, 2, 3]) for _ in range(50)],
                },
                schema={"k": pl.String, "of": pl.Int64},
            )
            rows += run.epoch(facts, table=prices).rows()
            truth += db.sql(
                f"SELECT f.k, f.of, p.name, p.k FROM facts f {how} JOIN prices p ON f.k = p.key AND f.of = p.of"
            ).fetchall()
    assert sorted(rows, key=str) == sorted(truth, key=str)


@pytest.mark.parametrize("table", [NAMES, "/nowhere"])
def test_a_test_without_the_tables_rows_is_told_to_give_them(table):
    for play in (
        lambda: testing.run(named(table=table)).epoch([{"k": 1}]),
        lambda: testing.run_pipeline(Pipeline("lookups", (named(table=table),)), [[{"k": 1}]]),
        lambda: testing.assert_slicing_does_not_matter(named(table=table), [{"k": 1}]),
    ):
        with pytest.raises(WeirError) as refused:
            play()
        assert "table=[...]" in refused.value.next and "tables=" in refused.value.next


@pytest.mark.parametrize("trials", sampled([2, 4]))
def test_slicing_does_not_matter(trials):
    facts = [{"k": number % 7, "n": number} for number in range(60)]
    names = [{"key": number % 5, "name": f"name {number}"} for number in range(9)]
    testing.assert_slicing_does_not_matter(named(), facts, tables={"named": names}, trials=trials)
    testing.assert_slicing_does_not_matter(named(broadcast=False), facts, tables={"named": names}, trials=trials)
    testing.assert_slicing_does_not_matter(behind_a_stage, facts, tables={"named": names}, trials=trials)


def test_many_rows_of_one_key_come_in_the_order_of_the_facts_and_keys_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(key_index, "_PAIRS", 10)
    monkeypatch.setattr(key_index, "_hashes", lambda keys: pl.Series(keys.column(0).to_pylist()).to_numpy() % 3)
    columns = pa.schema([("key", pa.int64()), ("v", pa.int64())])
    table = pa.table({"key": [1, 4, 1, None, 7, 4] * 4, "v": range(24)}, schema=columns)
    index = key_index.KeyIndex.of([table], columns, ("key",), 1 << 20)
    keys = pa.table({"key": pa.array([4, None, 10, 1, 7, 4], pa.int64())})
    expected = {4: 8, 1: 8, 7: 4}
    for outer in (False, True):
        pairs = [
            pair
            for pairs in index.pairs(keys, outer=outer)
            for pair in zip(*map(pa.Array.to_pylist, pairs), strict=True)
        ]
        of = [pair[0] for pair in pairs]
        assert of == sorted(of), "in the order of the keys"
        for number, key in enumerate(keys.column(0).to_pylist()):
            rows = [row for at, row in pairs if at == number]
            if key in expected:
                assert len(rows) == expected[key] == len(set(rows))
                assert {index.rows.column("key")[row].as_py() for row in rows} == {key}
            else:
                assert rows == ([None] if outer else [])


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("table_keys", [[], [5], [2, 9, None, 4, 7], [2, 9, None, 4, 7, 9]])
def test_each_key_finds_its_rows_wherever_its_hash_lies_among_those_of_the_table(monkeypatch, table_keys, outer):
    monkeypatch.setattr(key_index, "_hashes", lambda keys: np.array(keys.column(0).fill_null(0).to_pylist(), np.uint64))
    columns = pa.schema([("key", pa.int64())])
    table = pa.table({"key": table_keys}, schema=columns)
    index = key_index.KeyIndex.of([table], columns, ("key",), 1 << 20)
    assert index.distinct == (len(table_keys) < 6)
    wanted = [0, 9, 1, None, 2, 10, 5, 7]
    pairs = index.pairs(pa.table({"key": wanted}, schema=columns), outer=outer)
    found = [pair for of, rows in pairs for pair in zip(of.to_pylist(), rows.to_pylist(), strict=True)]
    kept = [key for key in table_keys if key is not None]
    expected = []
    for number, key in enumerate(wanted):
        rows = [row for row, other in enumerate(kept) if key is not None and other == key]
        expected += [(number, row) for row in rows or ([None] if outer else [])]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("broadcast", [True, False])
def test_rows_that_a_gate_may_set_aside_are_told_by_where_they_come_from(broadcast, tmp_path):
    gate = expect("ExpectColumnValuesToNotBeNull", column="name", on_failure="quarantine")
    table = LookupTable(str(tmp_path / "names"), "lookup named", None)
    write_deltalake(table.uri, pa.table({"key": pa.array([1], pa.int64()), "name": ["one"], "n": ["a"]}))
    stage = named(gate=gate, broadcast=broadcast).pinned(Pinned(table, table.newest(), True, 1 << 20))
    rows = pa.table({"k": pa.array([2, 1]), "n": pa.array([5, 6]), ROW: pa.array([70, 71])})
    fixed = shapes(stage, rows.schema)
    assert fixed.tracked and ROW not in fixed.outputs["main"].names
    subtask = trial_of(stage, fixed.handed_out)
    operator = stage.operator.build(replace(subtask, groups=range(16), max_parallelism=16))
    ((_, out),) = operator.process(rows.append_column(GROUP, pa.array([0, 0], pa.int32())))
    assert out.to_pylist() == [
        {"k": 2, "n": 5, "name": None, "n_table": None, ROW: 70},
        {"k": 1, "n": 6, "name": "one", "n_table": "a", ROW: 71},
    ]


def test_columns_are_those_that_are_named_or_were_there_first(tmp_path):
    site = site_of(tmp_path)
    put(site, {1: "one"})
    land(site, 1, [1, 2])
    ran(site)
    more = pa.table({"key": pa.array([1], pa.int64()), "name": ["uno"], "more": [True]})
    write_deltalake(str(site.landing / "names"), more, mode="overwrite", schema_mode="overwrite")
    land(site, 2, [1])
    ran(site)
    rows = pl.read_delta(str(site.storage / "tables" / "named"))
    assert rows.columns == ["k", "n", "name"], "a later column is not handed out"
    assert joined(site) == [(1, 0, "one"), (1, 0, "uno"), (2, 1, None)]
    fewer = DeltaTable(str(site.landing / "names"))
    shutil.rmtree(site.landing / "names")
    write_deltalake(fewer.table_uri, more.select(["key"]))
    land(site, 3, [1])
    with pytest.raises(InputError, match="has no column 'name', which it had before"):
        ran(site)
    shutil.rmtree(site.landing / "names")
    put(site, {1: "eins"})
    ran(site)
    assert (1, 0, "eins") in joined(site), "once the table is mended it goes on"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"on": {"k": "name"}}, "'k' of named is int64, and 'name' of the table is string"),
        ({"on": {"no": "key"}}, "has no column 'no'"),
        ({"on": {"k": "no"}}, "has no column 'no'"),
        ({"columns": ["no"]}, "has no column 'no'"),
        ({"columns": ["n"], "suffix": ""}, "would hand out 'n' twice"),
    ],
)
def test_what_does_not_fit_is_said_by_name_before_the_first_row(changes, says, tmp_path):
    site = site_of(tmp_path, Pipeline("lookups", (named(**changes),)))
    table = pa.table({"key": pa.array([1], pa.int64()), "name": ["one"], "n": pa.array([1], pa.int64())})
    write_deltalake(str(site.landing / "names"), table)
    land(site, 1, [1])
    findings = [finding.what for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    assert len(findings) == 1
    assert says in findings[0]
    with pytest.raises(PipelineError, match=says):
        ran(site)
    assert site.head() is None


def test_definitions_that_make_no_sense_are_refused():
    for changes in ({"how": "full"}, {"on_lost": "skip"}, {"table": passed}, {"on": {"k": "key", "n": "key"}}):
        with pytest.raises(PipelineError):
            named(**changes)
    with pytest.raises(PipelineError, match="has no key"):
        named(on=[])
    for broadcast in (True, False):  # another version would take another row back
        with pytest.raises(PipelineError, match="whose rows are changes"):
            named(delta.table("orders", changes=True), broadcast=broadcast)


def test_a_table_that_is_not_there_is_said_and_waited_for(tmp_path):
    site = site_of(tmp_path)
    land(site, 1, [1])
    with pytest.raises(InputError, match="There is no Delta table"):
        ran(site)
    put(site, {1: "one"})
    ran(site)
    assert joined(site) == [(1, 0, "one")]


# -- which version


def test_each_epoch_joins_the_newest_version_and_records_it(tmp_path):
    site = site_of(tmp_path)
    for number in range(3):
        put(site, {1: f"version {number}"})
        land(site, number, [1])
        (report,) = ran(site)
        assert report.checkpoint.operators["named"].lookup["version"] == number
    assert joined(site) == [(1, 0, f"version {number}") for number in range(3)]


def test_the_newest_version_is_asked_for_each_time(tmp_path):
    table = LookupTable(str(tmp_path / "names"), "lookup named", None)
    for number in range(3):
        rows = pa.table({"key": pa.array([number], pa.int64())})
        write_deltalake(table.uri, rows, mode="overwrite")
        assert table.newest().number == number
        assert table.newest() is table.newest(), "nothing was written since"
    shutil.rmtree(table.uri)
    write_deltalake(table.uri, rows)
    assert table.newest().number == 0, "another table may be in its place"


def test_rows_of_a_file_that_are_deleted_are_left_out_wherever_they_are():
    parts = [pa.table({"key": [1, 2, 3]}), pa.table({"key": [4, 5]}), pa.table({"key": [6, 7]})]
    kept = pa.array([True, False, True, False, True, False])
    rows = list(lookup_table.without_deleted(iter(parts), kept))
    assert [row["key"] for part in rows for row in part.to_pylist()] == [1, 3, 5, 7], "what is not said counts"


UNALIGNED = {"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"}
KILLED = """
import os, sys
from pathlib import Path
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from tests.weir.operators.test_lookup import UNALIGNED, behind_a_stage, site_at
site = site_at(Path(sys.argv[1]))
for report in run(behind_a_stage, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4)):
    os._exit(0)
"""


def site_at(root: Path) -> Site:
    options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__PARALLELISM": "2", **UNALIGNED}
    return Site(root, options, behind_a_stage, __name__)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Site:
    """A site whose run was killed behind its first checkpoint, in which rows wait for the lookup; the table has
    changed since."""
    site = site_at(tmp_path_factory.mktemp("lookups") / "killed")
    (site.landing / "facts").mkdir(parents=True)
    put(site, {key: f"old {key}" for key in range(20)})
    land(site, 1, list(range(20)))
    subprocess.run([sys.executable, "-c", KILLED, str(site.root)], check=True, cwd=Path(__file__).parents[3])
    put(site, {key: f"new {key}" for key in range(20)})
    land(site, 2, list(range(20)))
    return site


@pytest.fixture
def waiting(killed, tmp_path) -> Site:
    return killed.copied_to(tmp_path / "site")


def test_rows_that_wait_keep_the_version_of_their_epoch_although_the_run_was_killed_and_the_table_changed(waiting):
    site = waiting
    reports = ran(site, 4)
    assert sum(report.checkpoint.operators["named"].rows_waiting > 0 for report in reports) > 1
    old = [(key, key, f"old {key}") for key in range(20)]
    assert joined(site) == sorted([*old, *((key, key, f"new {key}") for key in range(20))], key=str)
    others = [report.checkpoint.operators["named"].lookup for report in reports]
    assert {raw["version"] for raw in others} == {1}
    assert {raw["joined"]["version"] for raw in others if "joined" in raw} == {0}


def test_the_version_goes_with_rows_past_the_stages_between(tmp_path):
    between = stage("between", source=passed, key="n", state=Seen)(passed.function)
    site = site_of(tmp_path, Pipeline("lookups", (passed, between, named(between))), **UNALIGNED)
    put(site, {key: f"old {key}" for key in range(40)})
    land(site, 1, list(range(40)))
    rows = 0
    for report in run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4)):
        rows += report.checkpoint.operators["between"].rows_waiting
        put(site, {key: f"new {key}" for key in range(40)})
    assert rows > 40, "they waited before the stage between too"
    assert joined(site) == sorted(((key, key, f"old {key}") for key in range(40)), key=str)


@pytest.mark.parametrize("on_lost", ["fail", "newest"])
def test_rows_that_wait_for_a_version_that_was_vacuumed_obey_on_lost(on_lost, waiting):
    site = waiting
    before = len(joined(site))
    DeltaTable(str(site.landing / "names")).vacuum(0, dry_run=False, enforce_retention_duration=False)
    site = replace(site, pipeline=Pipeline("lookups", (passed, named(passed, on_lost=on_lost))))
    findings = [
        finding for finding in plan(site.pipeline, site.settings).findings if "rows wait to be joined" in finding.what
    ]
    assert [finding.verdict.stops for finding in findings] == [on_lost == "fail"]
    if on_lost == "fail":
        with pytest.raises(LostError, match=r"wait to be joined with version 0, which is gone: 1 of its 1 file"):
            ran(site, 4)
        assert before <= len(joined(site)) < 20, "no more than was committed"
        return
    ran(site, 4)
    rows = joined(site)
    assert sorted(key for key, *_ in rows) == sorted([*range(20)] * 2), "each once"
    assert before <= sum(name.startswith("old") for *_, name in rows) < 20


def test_rows_that_wait_keep_their_version_on_a_branch_too(waiting):
    site = waiting
    forks.fork(site.pipeline, site.settings, "fix")
    branch = replace(site, pipeline=forks.branched(site.pipeline, site.settings, "fix"))
    ran(branch, 4)
    assert {name for *_, name in joined(branch)} <= {f"old {key}" for key in range(20)}
    assert len(joined(branch)) > 0


def test_another_table_in_its_place_is_not_taken_for_the_version(waiting):
    site = waiting
    shutil.rmtree(site.landing / "names")
    put(site, {1: "another"})
    with pytest.raises(LostError, match="is in its place"):
        ran(site, 4)


def test_another_version_of_the_same_number_is_not_taken_for_it(waiting):
    entry = waiting.landing / "names" / "_delta_log" / f"{0:020}.json"
    entry.write_text(entry.read_text() + '{"commitInfo":{"operation":"WRITE again"}}\n')
    with pytest.raises(LostError, match="brought back from a copy"):
        ran(waiting, 4)


def test_versions_whose_log_was_cleaned_are_gone(waiting):
    site = waiting
    table = DeltaTable(str(site.landing / "names"))
    table.create_checkpoint()
    (site.landing / "names" / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(LostError, match="which is gone: The log has versions 1 to 1 alone"):
        ran(site, 4)


def test_a_drill_joins_what_production_joined_and_says_if_that_is_gone(tmp_path):
    names = named()
    tally = aggregate("tally", names, key="name", null_keys="drop", n=agg.count())
    site = site_of(tmp_path, Pipeline("lookups", (names, tally)))
    for number in range(2):
        put(site, {1: f"version {number}"})
        land(site, number, [1])
        ran(site)
    put(site, {1: "since"})
    done = drill.drill(site.pipeline, site.settings, InMemoryExecutor())
    assert (done.problems, done.not_replayed) == ((), None)
    DeltaTable(str(site.landing / "names")).vacuum(0, dry_run=False, enforce_retention_duration=False)
    done = drill.drill(site.pipeline, site.settings, InMemoryExecutor())
    assert "version 1 of the table of named is gone" in done.not_replayed


# -- Parquet, memory, definitions


def test_a_parquet_file_is_a_table_whose_only_version_is_its_newest(tmp_path):
    site = site_of(tmp_path, Pipeline("lookups", (named(table="{landing}/names.parquet"),)))
    for number in range(2):
        rows = pa.table({"key": pa.array([1, 2], pa.int64()), "name": [f"{number} one", f"{number} two"]})
        pq.write_table(rows, site.landing / "names.parquet")
        land(site, number, [2, 3])
        (report,) = ran(site)
        assert report.checkpoint.operators["named"].lookup.keys() == {"stamp", "columns"}
    assert joined(site) == sorted([(2, 0, "0 two"), (3, 1, None), (2, 0, "1 two"), (3, 1, None)], key=str)
    (site.landing / "names.parquet").unlink()
    land(site, 2, [2])
    with pytest.raises(InputError, match="There is no such file"):
        ran(site)


def test_a_part_that_does_not_fit_into_memory_is_said_and_more_subtasks_help(tmp_path):
    site = site_of(tmp_path, Pipeline("lookups", (named(broadcast=False),)), WEIR_STATE__LOOKUP_MB="1")
    put(site, dict.fromkeys(range(30_000), "x" * 40))
    land(site, 1, [1, 29_999, 40_000])
    with pytest.raises(ConfigurationError, match="of the table that belongs to a subtask takes 1 MiB or more"):
        ran(replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": "1"}))
    with pytest.raises(ConfigurationError, match="The table takes 1 MiB or more") as error:
        ran(replace(site, pipeline=pipeline))
    assert "broadcast=False" in error.value.next
    ran(replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": "8"}))
    assert [name and len(name) for *_, name in joined(site)] == [40, 40, None]


@pytest.mark.parametrize("broadcast", [True, False])
def test_the_table_is_read_once_for_a_version(broadcast, tmp_path, monkeypatch):
    reads, of, times = [], key_index.KeyIndex.of, 1 if broadcast else 2
    monkeypatch.setattr(key_index.KeyIndex, "of", lambda *given: reads.append(1) or of(*given))
    site = site_of(tmp_path, Pipeline("lookups", (named(broadcast=broadcast),)))
    put(site, {1: "one"})
    for number in range(4):
        land(site, number, list(range(50)))
    ran(site)
    assert len(reads) == times, "once for a process, or for each subtask"
    put(site, {1: "uno"})
    land(site, 5, list(range(50)))
    ran(site)
    assert len(reads) == 2 * times


def test_all_of_it_may_change_and_the_plan_says_so(tmp_path):
    site = site_of(tmp_path)
    put(site, {1: "one"})
    land(site, 1, [1, 2])
    ran(site)
    put(site, {1: "eins"}, "namen")
    changed = Pipeline("lookups", (named(table="{landing}/namen", how="inner"),))
    site = replace(site, pipeline=changed, options={**site.options, "WEIR_SPARK__PARALLELISM": "3"})
    planned = plan(site.pipeline, site.settings)
    assert not planned.stops
    sentence = "it looked up (left) in {landing}/names by k = key, and looks up (inner) in {landing}/namen by k = key"
    assert any(sentence in finding.what for finding in planned.findings)
    land(site, 2, [1, 2])
    ran(site)
    assert joined(site) == [(1, 0, "eins"), (1, 0, "one"), (2, 1, None)]
    for number, broadcast in enumerate((False, True), 3):
        site = replace(site, pipeline=Pipeline("lookups", (named(table="{landing}/namen", broadcast=broadcast),)))
        assert not plan(site.pipeline, site.settings).stops
        land(site, number, [1])
        ran(site)
    assert joined(site).count((1, 0, "eins")) == 3
