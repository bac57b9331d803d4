"""A pull request is tried on production's newest epochs: it says exactly what differs, and nothing of production changes."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions

from state_ops import extras
from state_ops.errors import ConfigurationError, PrunedError, TransientError, WeirError
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.filesystem_store import FileSystemStore
from tests.recovery import shop as shops
from tests.recovery import small, test_upserts
from tests.recovery.conftest import days as days
from tests.recovery.harness import Site
from tests.recovery.queue_source import Queue, QueueSource
from tests.recovery.shop import Shop
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from tests.weir.replay import planted, talking
from tests.weir.rides import SOURCE, Rides
from weir import (
    Epoch,
    KeyedState,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    delta,
    expect,
    files,
    foreach,
    on_table,
    select,
    stage,
    union,
    window,
)
from weir import kafka as kafka_api
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks
from weir.operations.pull_request import comment, replaying, review, taking
from weir.operations.pull_request.replaying import Failed
from weir.operations.pull_request.review import Review
from weir.restore import rewind
from weir.run import maintenance
from weir.sources.files import FilesReader

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "4", "WEIR_SPARK__PARALLELISM": "2"}
KEYED = {"key": "id", "order_by": ["at"]}


def bank_of(root: Path, pipeline: Pipeline = small.pipeline, *numbers: int, **options: str) -> Bank:
    bank = Bank(replace(Bank.at(root, **{**RETAINED, **options}).site, pipeline=pipeline))
    bank.epochs(*numbers)
    return bank


def tried(of, pipeline: Pipeline | None = None, **asked) -> Review:
    """Of a site's production, the review of other code."""
    settings = of.site.settings
    scratch = of.site.root.parent / f"{of.site.root.name}-scratch"
    options = {"epochs": 3, "sample": 1000, "scratch": scratch, "executor": InMemoryExecutor(), **asked}
    return review.review(pipeline or of.site.pipeline, settings, **options)


def with_function(function, **changed) -> Pipeline:
    return Pipeline("small", (altered(small.accounts, function=function, **changed),), max_parallelism=8)


def everything(root: Path) -> dict[str, tuple]:
    """Of each file and directory its content, and its times and rights."""
    facts = {}
    for path in [root, *root.rglob("*")]:
        stat = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        facts[str(path)] = (digest, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_mode)
    return facts


@pytest.fixture
def read_only(monkeypatch):
    """Lets nobody write below some directories, by rights and by what every write goes through."""
    closed: list[str] = []

    def refusing(name: str):
        real = getattr(FileSystemStore, name)

        def call(self, *asked, **options):
            assert not any(f"{self.root}/".startswith(f"{root}/") for root in closed), f"{name} in {self.root}"
            return real(self, *asked, **options)

        return call

    for name in ("write", "create", "delete", "delete_files", "delete_all"):
        monkeypatch.setattr(FileSystemStore, name, refusing(name))

    def close(root: Path) -> None:
        closed.append(str(root))
        for path in [root, *root.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)

    yield close
    for root in closed:
        for path in [Path(root), *Path(root).rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)


def test_the_same_code_differs_in_nothing_and_nothing_of_production_is_touched(rides_run, tmp_path, read_only):
    root = rides_run.site.root
    read_only(root / "storage")
    before = everything(root)
    same = tried(rides_run, scratch=tmp_path)
    assert same.found == () and same.failed is None and same.notes == ()
    assert [int(epoch.recorded.id) for epoch in same.played] == [6, 7, 8]
    assert [epoch.recorded.id for epoch in same.played] == [epoch.now.id for epoch in same.played]
    assert {table.table: table.rows for table in same.tables if table.rows[0]}.keys() >= {"rides", "hourly", "unique"}
    assert all(table.rows[0] == table.rows[1] for table in same.tables)
    assert {state.stage for state in same.states} == {"riders", "hourly", "trips", "unique"}
    assert comment.markdown(same).startswith("**weir ci rides: nothing differs**\n")
    assert everything(root) == before
    assert not any(tmp_path.iterdir())


def test_a_planted_change_of_state_gives_exactly_the_keys_that_differ(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4, 5)
    differs = tried(bank, planted.pipeline, epochs=2)
    assert differs.found == ("state",)
    (state,) = differs.states
    sums = duckdb.sql(
        f"""SELECT id, sum(amount)::BIGINT,
                   (sum(amount) + sum(amount) FILTER (filename > '{bank.site.landing}/00004'))::BIGINT
            FROM read_parquet('{bank.site.landing}/*.parquet', filename = true)
            GROUP BY id HAVING count(*) FILTER (filename > '{bank.site.landing}/00004') > 0"""
    ).fetchall()
    shown = [(row["key"]["id"], row["old"]["total"], row["new"]["total"]) for row in state.sample]
    assert sorted(shown) == sorted(sums) and state.counts == {"added": 0, "removed": 0, "changed": len(sums)}
    assert differs.keys_differing == len(sums) and all(row["fields"] == ["total"] for row in state.sample)
    (table,) = differs.tables
    assert table.same and table.rows == (20, 20)


def fewer_and_more(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Leaves k1 out, changes k2, hands k3 out twice."""
    booked = small.accounts(rows, state, epoch)
    changed = booked.with_columns(amount=pl.when(pl.col("id") == "k2").then(pl.col("amount") * 10).otherwise("amount"))
    return pl.concat([changed.filter(pl.col("id") != "k1"), changed.filter(pl.col("id") == "k3")])


def test_a_planted_change_of_rows_gives_exactly_the_rows_that_differ(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4, 5)
    differs = tried(bank, with_function(fewer_and_more))
    assert differs.found == ("rows",)
    (table,) = differs.tables
    ours = pl.read_parquet(sorted(bank.site.landing.glob("*.parquet"))[-3:])
    theirs = pl.concat(
        [
            ours.filter(~pl.col("id").is_in(["k1", "k2"])),
            ours.filter(pl.col("id") == "k2").with_columns(pl.col("amount") * 10),
            ours.filter(pl.col("id") == "k3"),
        ]
    )
    first, second = (Counter(frame.select("id", "at", "amount").rows()) for frame in (ours, theirs))
    shown = {
        kinds: Counter((row["id"], row["at"], row["amount"]) for row in table.sample if row["change"] in kinds)
        for kinds in (("removed", "was"), ("added", "is"))
    }
    assert shown == {("removed", "was"): first - second, ("added", "is"): second - first}
    assert table.counts == {"added": 3, "removed": 3, "changed": 3} and table.rows == (30, 30)


def test_a_table_with_keys_is_compared_by_what_becomes_of_each_key(tmp_path):
    bank = bank_of(tmp_path / "site", test_upserts.pipeline, 1, 2, 3)
    assert tried(bank).found == ()

    def keeps_k1(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        """k1 stays, whatever its total is; what only file 3 has is 99."""
        handed_out = test_upserts.totals(rows, state, epoch)
        stays, is_new = pl.col("id") == "k1", pl.col("id").str.starts_with("only-3")
        return handed_out.with_columns(
            total=pl.when(is_new).then(99).otherwise("total"),
            _change_type=pl.when(stays).then(pl.lit("update_postimage")).otherwise("_change_type"),
        )

    other = Pipeline("small", (altered(test_upserts.keyed, function=keeps_k1),), max_parallelism=8)
    differs = tried(bank, other, epochs=2)
    (table,) = differs.tables
    turns = {
        turn: [(row["id"], row["total"]) for row in table.sample if row["change"] == turn] for turn in ("was", "is")
    }
    assert turns == {
        "was": [("k1", None), ("only-3-0", 3), ("only-3-1", 3)], "is": [("k1", 6), ("only-3-0", 99), ("only-3-1", 99)],
    }  # fmt: skip
    assert table.rows == (12, 12) and table.counts == {"added": 0, "removed": 0, "changed": 3}


@pytest.mark.long
def test_joins_of_several_inputs_are_replayed(tmp_path):
    shop = Shop.at(tmp_path / "site", shops.pipeline_of("left"))
    for day in (1, 2, 3):
        shop.run(day)
    same = tried(shop, epochs=2)
    assert same.found == () and {table.table for table in same.tables} >= {"paid", "sums"}
    assert sum(table.rows[0] for table in same.tables) > 0


def test_a_stage_without_state_is_compared_by_its_rows(tmp_path):
    source = files("{landing}/*.parquet", name="landing")
    plain = select("picked", source, "id", "amount + 1 AS more", sink=delta.append("picked"))
    other = select("picked", source, "id", "amount + 2 AS more", sink=delta.append("picked"))
    bank = bank_of(tmp_path / "site", Pipeline("small", (plain,), max_parallelism=8), 1, 2, 3)
    assert tried(bank).found == ()
    differs = tried(bank, Pipeline("small", (other,), max_parallelism=8), epochs=1)
    (table,) = differs.tables
    assert (differs.found, table.rows, table.counts["added"], table.counts["removed"]) == (("rows",), (10, 10), 10, 10)


def test_epochs_of_the_very_beginning_are_replayed_from_nothing(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    same = tried(bank, epochs=5)
    assert same.found == () and same.chosen.base is None and len(same.played) == 2
    assert "2 epochs instead of the 5 that were asked for: there were no more." in same.notes


def test_only_epochs_before_a_rewind_or_after_it_are_replayed(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    with maintenance.owning(small.pipeline, bank.site.settings, epochs=False) as owner:
        rows = {row.id: row for row in bank.registry.checkpoints()}
        plan = rewind.planned(
            small.pipeline,
            bank.site.settings,
            owner.context.sinks,
            owner.context.storage,
            owner.context.registry,
            rows[3],
            rows[2],
        )
        rewind.carry_out(owner, plan)
    before = tried(bank)
    assert before.found == () and [int(epoch.recorded.id) for epoch in before.played] == [1, 2]
    assert "Checkpoint 4 is no epoch but a rewind" in before.notes[0]
    bank.epochs()
    after = tried(bank)
    assert after.found == () and [int(epoch.recorded.id) for epoch in after.played] == [5]
    assert int(after.chosen.base.id) == 4


def test_what_is_to_be_said_of_the_choice_is_said_once(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    maintenance.rewind(small.pipeline, bank.site.settings, 2)
    (bank.site.landing / "00001.parquet").unlink()
    later = tried(bank)
    assert [int(epoch.recorded.id) for epoch in later.played] == [2]
    assert sum("no epoch but a rewind" in note for note in later.notes) == 1


def test_a_branch_of_production_is_what_it_is_compared_with(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    forks.fork(small.pipeline, bank.site.settings, "fix", 2)
    branch = Bank(replace(bank.site, pipeline=forks.branched(planted.pipeline, bank.site.settings, "fix")))
    branch.epochs()
    assert tried(bank, planted.pipeline, origin="fix", epochs=1).found == ()
    assert tried(bank, origin="fix", epochs=1).found == ("state",)
    with pytest.raises(WeirError, match="no branch 'other'"):
        tried(bank, origin="other")
    with pytest.raises(ConfigurationError, match="is a branch"):
        tried(bank, branch.site.pipeline)


@pytest.mark.parametrize("subtasks", sampled(["3", "1"]))
def test_another_parallelism_differs_in_nothing(tmp_path, subtasks):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    bank.site.options["WEIR_SPARK__PARALLELISM"] = subtasks
    same = tried(bank, epochs=2)
    assert same.found == () and f"with {subtasks} subtask" in comment.markdown(same)


class More(State):
    """An account that has one field more."""

    rows: int = 0
    total: int = 0
    largest: int | None = None


class Other(State):
    """An account whose total is a text."""

    rows: int = 0
    total: str = ""


def with_largest(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Knows the largest amount too."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"), largest=agg.max("amount"))
    return rows.select("id", "at", "amount")


def test_a_state_that_gets_a_field_migrates_and_says_so(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    more = tried(bank, with_function(with_largest, state=More))
    assert more.found == () and more.states[0].why == "only the branch has largest"
    text = comment.markdown(more)
    assert "only the branch has largest" in text and "migrates" in text


def test_a_refused_plan_is_the_comment_and_nothing_is_replayed(tmp_path, weir):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    refused = tried(bank, with_function(small.accounts.function, state=Other))
    assert refused.found == ("plan",) and not refused.played
    text = comment.markdown(refused)
    assert text.startswith("**weir ci small: a run would be refused**")
    assert "`weir plan small` ends with exit code 1" in text and "No epoch was replayed" in text


def failing(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Fails where a row is of the third file."""
    if rows.height and rows["amount"].max() == 3:
        raise ValueError("no threes: password=hunter2hunter2")
    return small.accounts(rows, state, epoch)


def test_an_authors_error_is_shown_without_secrets_and_epochs_before_it_are_compared(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4)
    ended = tried(bank, with_function(failing), epochs=3)
    assert ended.found == ("code",) and [int(epoch.recorded.id) for epoch in ended.played] == [2]
    assert ended.failed.epoch == 3 and not ended.states and ended.tables[0].rows == (10, 10)
    text = comment.markdown(ended)
    assert text.startswith("**weir ci small: the code fails in epoch 3**")
    assert "no threes" in text and "raise ValueError" in text and "hunter2" not in text


@pytest.mark.long
def test_a_gate_that_would_hold_is_said_and_later_epochs_are_compared(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4)
    strict = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=2)
    gated = Pipeline("small", (replace(small.accounts, gates=(strict,)),), max_parallelism=8)
    held = tried(bank, gated)
    assert held.found == ("gates",) and held.fails({"gates"}) and not held.fails({"rows", "state"})
    (outcome,) = held.gates
    assert (outcome.failed, outcome.asked, outcome.before, outcome.holds) == ((3, 4), 3, None, True)
    text = comment.markdown(held)
    assert "1 gate would hold it" in text and "would hold epochs 3, 4" in text and "10 of 10 rows" in text
    assert "10 of 10 rows" not in comment.markdown(held, sample=0)


def hands_on(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every column, also that by which a row is set aside."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows


def test_rows_that_a_gate_sets_aside_are_decided_anew(tmp_path):
    strict = expect("ExpectColumnValuesToBeBetween", column="at", max_value=8, on_failure="quarantine")
    gated = with_function(hands_on, gates=(strict,))
    bank = bank_of(tmp_path / "site", gated, 1, 2, 3)
    assert tried(bank).found == ()
    without = tried(bank, with_function(hands_on))
    assert without.found == ("rows", "state")
    tables = {table.table: (table.rows, table.counts) for table in without.tables}
    assert tables["booked"][0] == (27, 30) and tables["accounts_quarantine"][0] == (3, 0)
    assert "0 rows were set aside; in production 3" in comment.markdown(without)


def test_what_is_expected_of_a_restore_is_asked_and_without_samples_no_value_is_shown(tmp_path, weir):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    bank.site.options["WEIR_PIPELINES__SMALL__ON_RESTORE"] = json.dumps(
        [{"state": "accounts", "expect": "ExpectColumnMaxToBeBetween", "column": "total", "max_value": 2}]
    )
    from weir.loading import load_pipeline

    held = tried(bank, load_pipeline("small", bank.site.settings))
    assert held.found == ("gates",) and "would refuse a restore" in comment.markdown(held)
    (outcome,) = json.loads(weir(bank.site, "ci", "small", "--in-process", "--json").out)["gates"]
    assert "found " in outcome["example"]
    (outcome,) = json.loads(weir(bank.site, "ci", "small", "--in-process", "--json", "--samples", "0").out)["gates"]
    assert outcome["failed"] and outcome["example"] == ""


@pytest.mark.parametrize(
    ("says", "form"),
    sampled(
        [("pipeline", "console"), ("raising", "json"), ("leaving", "console"),
         ("pipeline", "json"), ("raising", "console"), ("leaving", "json")],
        3,
    ),
)  # fmt: skip
def test_without_samples_no_value_reaches_the_log_whoever_says_it(tmp_path, says, form):
    """What a function prints, logs, warns of or raises, what another process prints for it, and what gates log."""
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    env = {
        **os.environ,
        **bank.site.env,
        "WEIR_PIPELINES__SMALL__OBJECT": f"tests.weir.replay.talking:{says}",
        "WEIR_LOGGING__FORMAT": form,
    }
    command = [
        sys.executable,
        "-c",
        "from weir.cli.main import process; process()",
        "ci",
        "small",
        "--in-process",
        "--epochs",
        "1",
        "--debug",
    ]
    said = []
    for samples in ("0", "3"):
        ended = subprocess.run([*command, "--samples", samples], env=env, capture_output=True, text=True, timeout=120)
        said.append(ended.stdout + ended.stderr)
    assert talking.SECRET not in said[0], said[0]
    assert talking.SECRET in said[1]
    if says == "pipeline":
        assert "nothing differs" in said[0]
    elif says == "raising":
        assert "The function of the stage accounts raised ValueError." in said[0]
        assert f'File "{talking.__file__}", line ' in said[0], "where it was raised"
    else:
        assert "has left Python" in said[0]


def test_more_rows_than_may_be_set_aside_are_a_gate_that_would_hold_and_no_fault_of_the_code(tmp_path):
    strict = expect("ExpectColumnValuesToBeBetween", column="at", max_value=5, on_failure="quarantine")
    bank = bank_of(tmp_path / "site", with_function(hands_on), 1, 2)
    held = tried(bank, with_function(hands_on, gates=(strict,)), epochs=1)
    assert held.found == ("gates",) and held.fails({"gates"}) and not held.fails({"code"})
    text = comment.markdown(held)
    assert text.startswith("**weir ci small: a gate would hold epoch 2**") and "max_value=5" in text
    assert "e.g." in text and "e.g." not in comment.markdown(held, sample=0)
    errors = [each.to_dict()["failed"]["error"] for each in (held, held.without_values())]
    assert "e.g." in errors[0] and "e.g." not in errors[1]


def ones(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Books one, whatever the amount is."""
    return small.accounts(rows, state, epoch).with_columns(amount=pl.lit(1, pl.Int64))


def test_what_so_few_rows_do_not_hold_in_production_either_is_no_fault_of_the_code(tmp_path):
    many = on_table("booked", expect("ExpectTableRowCountToBeBetween", min_value=25))
    bank = bank_of(tmp_path / "site", replace(small.pipeline, on_restore=(many,)), 1, 2, 3)
    same = tried(bank, epochs=1)
    assert same.found == () and [outcome.before for outcome in same.gates] == [1]
    assert "fails where these epochs have so few rows, as in production" in comment.markdown(same)
    threes = on_table("booked", expect("ExpectColumnValuesToBeBetween", column="amount", min_value=3))
    other = tried(bank, replace(with_function(ones), on_restore=(threes,)), epochs=1)
    assert other.found == ("gates", "rows") and [outcome.before for outcome in other.gates] == [0]


def test_what_is_expected_of_a_table_with_keys_is_not_asked_of_its_changes(tmp_path):
    unique = on_table("totals", expect("ExpectColumnValuesToBeUnique", column="id"))
    strict = replace(test_upserts.pipeline, on_restore=(unique,))
    bank = bank_of(tmp_path / "site", strict, 1, 2, 3)
    same = tried(bank)
    assert same.found == () and any("of the table totals after a restore was not asked" in note for note in same.notes)


@pytest.mark.parametrize("asked", ["look", "preview", "plan_again"])
def test_what_is_away_for_a_while_is_no_fault_of_the_code(tmp_path, monkeypatch, weir, asked):
    """The plan asks a source what waits there and which columns that has; the replay reads it again."""
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)

    def away(*asked, **options):
        raise TransientError("The landing directory does not answer.")

    monkeypatch.setattr(FilesReader, asked, away)
    with pytest.raises(TransientError, match="does not answer"):
        tried(bank)
    shown = weir(bank.site, "ci", "small", "--in-process")
    assert shown.code == 1 and "does not answer" in shown.err and "refused" not in shown.out + shown.err


def test_another_machine_than_productions_may_take_its_time_for_an_epoch(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1)
    assert replaying.settings_for(bank.site.settings, tmp_path, 1).checkpoints.timeout_seconds >= 86_400


def test_spark_runs_on_this_machine_whatever_cluster_production_has(tmp_path, monkeypatch):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    masters = []

    class Here(InMemoryExecutor):
        def __init__(self, settings, app: str) -> None:  # noqa: ARG002  the signature is Spark's
            super().__init__()
            masters.append(settings.spark.master)

    monkeypatch.setattr(review, "SparkExecutor", Here)
    for master in ("spark://production:7077", "local[3]"):
        bank.site.options["WEIR_SPARK__MASTER"] = master
        assert tried(bank, executor=None).found == ()
    assert masters == ["local[*]", "local[3]"]


def test_without_duckdb_nothing_is_replayed(tmp_path, monkeypatch):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    monkeypatch.setattr(extras, "is_installed", lambda library: library != "duckdb")
    played = []
    with pytest.raises(ConfigurationError, match="weir ci needs duckdb"):
        tried(bank, on_epoch=played.append)
    assert not played


def test_a_source_that_is_new_beside_others_of_a_stage_has_columns_and_no_rows(tmp_path):
    landing, new = small.SOURCE, files("{landing}/new/*.parquet", name="new")
    before = aggregate("sums", landing, key="id", total=agg.sum("amount"), sink=delta.append("sums"))
    bank = bank_of(tmp_path / "site", Pipeline("small", (before,), max_parallelism=8), 1, 2, 3)
    (bank.site.landing / "new").mkdir()
    shutil.copy(bank.site.landing / "00003.parquet", bank.site.landing / "new")
    both = union("both", landing, new)
    after = aggregate("sums", both, key="id", total=agg.sum("amount"), sink=delta.append("sums"))
    same = tried(bank, Pipeline("small", (both, after), max_parallelism=8, added=("new",)), epochs=2)
    assert (same.found, same.failed) == ((), None) and len(same.played) == 2
    assert "The source new is new, so the epochs have read nothing of it." in same.notes


def test_another_watermark_is_said_though_nothing_else_differs(tmp_path):
    def of(lateness: str) -> Pipeline:
        day = window(
            "days", SOURCE, key="city", on="at", every="1d", lateness=lateness, n=agg.count(), sink=delta.append("days")
        )
        return Pipeline("rides", (day,), max_parallelism=8)

    rides = Rides(tmp_path / "site", of("10m"))
    rides.epochs(2)
    assert tried(rides, epochs=1).notes == ()
    other = tried(rides, of("1h"), epochs=1)
    assert other.found == ()
    (note,) = other.notes
    assert "the watermark of days is 2026-05-01" in note and "in production 2026-05-01" in note


def test_epochs_whose_input_is_gone_are_left_out(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4)
    (bank.site.landing / "00003.parquet").unlink()
    left = tried(bank)
    assert left.found == () and [int(epoch.recorded.id) for epoch in left.played] == [4]
    assert any("Epoch 3 cannot be replayed" in note and "00003.parquet is gone" in note for note in left.notes)
    (bank.site.landing / "00004.parquet").unlink()
    nothing = tried(bank)
    assert nothing.found == ("input",) and not nothing.played
    assert "cannot be read again" in comment.verdict(nothing)


@pytest.mark.parametrize("archive", [True, False])
def test_a_source_that_gives_each_row_once_is_replayed_from_its_archive(tmp_path, monkeypatch, archive):
    source = QueueSource(name="in", archive=archive)
    counting = aggregate("counted", source, key="id", n=agg.count(), sink=delta.append("counts"))
    pipeline = Pipeline("small", (counting,), max_parallelism=8, delivery="at_least_once")
    bank = Bank(replace(Bank.at(tmp_path / "site", **RETAINED).site, pipeline=pipeline))
    bank.site.landing.mkdir(parents=True)
    queue = Queue(str(bank.site.landing / "queue.db"))
    for number in (1, 2, 3):
        queue.put([("a", number), ("b", number + 10)])
        bank.epochs()
    moved: list[object] = []
    monkeypatch.setattr(Queue, "committed", lambda _, position: moved.append(position))
    assert tried(bank, epochs=2).found == (() if archive else ("input",))
    assert not moved, "its system has come further since"


def test_a_sink_outside_of_storage_is_compared_and_not_asked(tmp_path):
    given: list[int] = []
    outside = foreach(lambda _, checkpoint: given.append(checkpoint), name="outside")
    stages = (replace(small.accounts, sink=outside),)
    bank = bank_of(tmp_path / "site", Pipeline("small", stages, max_parallelism=8, delivery="at_least_once"), 1, 2, 3)
    sevens = altered(small.accounts, function=fewer_and_more, sink=outside)
    differs = tried(bank, Pipeline("small", (sevens,), max_parallelism=8, delivery="at_least_once"), epochs=1)
    assert given == [1, 2, 3] and differs.tables[0].table == "outside"
    assert differs.tables[0].counts == {"added": 1, "removed": 1, "changed": 1}
    assert "it was not asked whether it takes the rows" in comment.markdown(differs)


def test_what_is_pruned_while_it_is_read_is_taken_anew(tmp_path, monkeypatch):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    real, numbers = taking.together, iter((4, 5))

    def overtaken(*asked, **options):
        for number in numbers:  # production goes on
            bank.epochs(number)
        return real(*asked, **options)

    monkeypatch.setattr(taking, "together", overtaken)
    same = tried(bank, epochs=1)
    assert same.found == () and [int(epoch.recorded.id) for epoch in same.played] == [5]


@pytest.mark.long
def test_production_that_always_prunes_faster_is_said_so(tmp_path, monkeypatch):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    real, numbers = taking.together, iter(range(3, 100))

    def overtaken(*asked, **options):
        for _ in range(3):
            bank.epochs(next(numbers))
        return real(*asked, **options)

    monkeypatch.setattr(taking, "together", overtaken)
    with pytest.raises(PrunedError, match="nothing holds what may only be read") as pruned:
        tried(bank, epochs=1)
    assert "--epochs" in str(pruned.value)


def test_a_pipeline_without_a_checkpoint_says_what_to_look_at(tmp_path):
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank.land(1)
    with pytest.raises(WeirError, match="no checkpoint yet") as nothing:
        tried(bank)
    assert "storage.root" in str(nothing.value)


def test_the_command_writes_the_comment_and_ends_as_it_was_asked(tmp_path, weir):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3)
    other = replace(bank.site, module="tests.weir.replay.planted")
    target = tmp_path / "comment.md"
    shown = weir(other, "ci", "small", "--from", "main", "--epochs", "2", "--in-process", "--output", str(target))
    assert shown.code == 0 and shown.out == "" and "keys of state differ" in shown.err
    assert target.read_text().startswith("**weir ci small: 12 keys of state differ**")
    shown = weir(other, "ci", "small", "--epochs", "2", "--in-process", "--fail-on", "rows,state", "--json")
    facts = json.loads(shown.out)
    assert shown.code == 1 and facts["found"] == ["state"] and facts["state"]["accounts"]["changed"] == 12
    assert weir(bank.site, "ci", "small", "--in-process", "--fail-on", "any").code == 2
    assert weir(bank.site, "ci", "unknown").code == 2
    broken = replace(bank.site, module="tests.weir.replay.nowhere")
    shown = weir(broken, "ci", "small", "--in-process")
    assert shown.code == 1 and shown.out.startswith("**weir ci small: the code fails**")
    assert weir(broken, "ci", "small", "--in-process", "--fail-on", "nothing").code == 0


def test_a_directory_of_production_is_no_scratch(tmp_path):
    site = small.Bank.at(tmp_path / "site", **RETAINED).site
    for place in (site.root / "storage" / "small" / "tmp", site.root / "storage", site.landing / "ci"):
        with pytest.raises(ConfigurationError, match="that is production's"):
            review.review(small.pipeline, site.settings, scratch=place)
        assert not place.exists()
    table = delta.table(str(tmp_path / "lake"), name="lake")
    reading = Pipeline("small", (with_input(small.accounts, table),), max_parallelism=8)
    with pytest.raises(ConfigurationError, match="that is production's"):
        review.review(reading, site.settings, scratch=tmp_path / "lake" / "ci")
    with pytest.raises(ConfigurationError, match="no directory of this machine"):
        review.review(small.pipeline, site.settings, scratch=Path("s3://bucket/ci"))


def test_a_command_that_would_let_everything_pass_is_refused(tmp_path, weir, monkeypatch):
    site = small.Bank.at(tmp_path / "site", **RETAINED).site
    assert weir(site, "ci", "small", "--fail-on", "").code == 2, "as of a variable that is not set"
    for nowhere in (tmp_path / "nowhere" / "comment.md", tmp_path):
        assert weir(site, "ci", "small", "--output", str(nowhere)).code == 2
    monkeypatch.setattr(review, "review", lambda *_, **__: sys.exit(0))  # as code of a pipeline may
    shown = weir(site, "ci", "small", "--in-process")
    assert shown.code == 1 and "sys.exit(0)" in shown.err


class Due(State):
    """Of one key."""

    rows: int = 0


def rings(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Never within these epochs."""
    return fired.select("id", at=pl.lit(0, pl.Int64))


def with_timer(hours: int) -> Pipeline:
    @stage(
        "accounts",
        source=files("{landing}/*.parquet", name="landing"),
        key="id",
        state=Due,
        sink=delta.append("booked"),
        on_timer=rings,
    )
    def waits(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        state.timers.set(rows, after=timedelta(hours=hours))
        return rows.select("id", "at")

    return Pipeline("small", (waits,), max_parallelism=8)


def test_timers_at_another_moment_differ(tmp_path):
    bank = bank_of(tmp_path / "site", with_timer(1), 1, 2)
    assert tried(bank, epochs=1).found == ()
    differs = tried(bank, with_timer(2), epochs=1)
    assert differs.found == ("state",) and differs.states[0].counts["changed"] == 0
    assert differs.states[0].timers.startswith("only production has ") and "timers by" in differs.states[0].timers
    text = comment.markdown(differs)
    assert text.startswith("**weir ci small: other timers**") and differs.states[0].timers in text


def nine(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Rows of which each gate of at most two fails, while state has fewer."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", rows=pl.lit(9, pl.Int64))


@pytest.mark.long
def test_a_gate_of_rows_is_not_taken_for_the_same_one_of_state(tmp_path):
    gates = [
        expect("ExpectColumnValuesToBeBetween", column="rows", max_value=5, on_failure="warn", of=of)
        for of in ("rows", "state")
    ]
    bank = bank_of(tmp_path / "site", with_function(nine, gates=tuple(gates)), 1, 2)
    before = {len(outcome.failed): outcome.before for outcome in tried(bank, epochs=1).gates}
    assert before == {1: 1, 0: 0}


# -- the comment


def review_with(*notes: str) -> Review:
    return Review("small", "main", None, notes=notes)


def test_what_github_looks_for_in_what_people_see_is_not_there():
    text = comment.markdown(review_with("cc @somebody, me@evil.test, www.evil.test, #12, GH-12, $x$ and mailto:x@y.z"))
    seen = html.unescape(re.sub(r"\\([^\w\s])", r"\1", text.replace("<span>$</span>", "")))
    assert not re.search(r"@\w|\bwww\.|#\d|GH-\d|\$|mailto:", seen), seen
    assert "somebody" in seen and "evil.test" in seen


def test_a_comment_that_is_cut_ends_with_a_whole_paragraph():
    failed = Failed(2, review.CODE, "`" * 5 + "x" * 50_000, "y" * 70_000)
    text = comment.markdown(replace(review_with("n" * 70_000), failed=failed))
    assert "does not fit into a comment" in text and "the code fails in epoch 2" in text and len(text) < 20_000
    assert sum(re.fullmatch("`{6,}", line) is not None for line in text.splitlines()) == 2


# -- of a whole review


def wide(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Rows whose texts would be markup."""
    texts = ["| a |\n# b", "@somebody <img src=x>", "http://evil.test `c` [d](e)", "secret_access_key=abcdefgh12345678"]
    return small.accounts(rows, state, epoch).with_columns(
        text=pl.Series((texts * rows.height)[: rows.height], dtype=pl.String)
    )


def test_values_of_rows_are_no_markup(tmp_path):
    plain = with_function(wide)
    bank = bank_of(tmp_path / "site", plain, 1, 2)

    def shouts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        """The same rows, louder."""
        return wide(rows, state, epoch).with_columns(pl.col("text") + "!")

    text = comment.markdown(tried(bank, with_function(shouts)))
    lines = [line for line in text.splitlines() if "somebody" in line or "evil" in line or "\\# b" in line]
    assert lines and all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert "@" not in text and "<img" not in text and "://" not in text and "abcdefgh12345678" not in text
    assert "\\| a \\| \\# b" in text
    assert "somebody" not in comment.markdown(tried(bank, with_function(shouts)), sample=0)


@pytest.mark.long
def test_a_comment_is_never_longer_than_github_takes(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2)
    differs = tried(bank, planted.pipeline)
    (state,) = differs.states
    row = {**state.sample[0], "key": {"id": "k" * 100}}
    many = replace(differs, states=(replace(state, counts={**state.counts, "changed": 5000}, sample=[row] * 2000),))
    text = comment.markdown(many, sample=2000)
    assert 20_000 < len(text) <= comment.LIMIT and "more keys." in text
    unsure = replace(differs, states=(), not_compared=("Rows of booked are not compared: 1 file is gone.",))
    assert "nothing differs of what could be compared; 1 table could not" in comment.verdict(unsure)
    assert "1 file is gone" in comment.markdown(unsure)
    noisy = replace(differs, notes=("n" * 1000,) * 100)
    text = comment.markdown(noisy)
    assert len(text) <= comment.LIMIT and "does not fit into a comment" in text


@pytest.mark.long
def test_kafkas_messages_are_read_again_as_long_as_they_are_there_and_its_group_stays_where_it_is(tmp_path, kafka):
    topic = kafka.create()
    source = kafka_api(
        topic,
        name="in",
        servers=kafka.servers,
        schema=pa.schema([("id", pa.string())]),
        group=f"{topic}-production",
        on_lost="skip",
    )
    counting = aggregate("counted", source, key="id", n=agg.count(), sink=delta.append("counts"))
    pipeline = Pipeline("small", (counting,), max_parallelism=8)
    bank = Bank(replace(Bank.at(tmp_path / "site", **RETAINED).site, pipeline=pipeline))
    for number in (1, 2, 3):
        kafka.send(topic, [b'{"id": "%d"}' % key for key in range(number + 1)])
        bank.epochs()

    def group() -> list[int]:
        asked = [ConsumerGroupTopicPartitions(f"{topic}-production")]
        (future,) = kafka.admin.list_consumer_group_offsets(asked).values()
        return [place.offset for place in future.result(30).topic_partitions]

    kafka.until(lambda: group() == [9])
    same = tried(bank, epochs=2)
    assert same.found == () and [int(epoch.recorded.id) for epoch in same.played] == [2, 3]
    kafka.expire(topic, 4)  # two of the first epoch, two of the three of the second
    later = tried(bank, epochs=2)
    assert later.found == () and [int(epoch.recorded.id) for epoch in later.played] == [3]
    assert any("Epoch 2 cannot be replayed" in note for note in later.notes)
    assert group() == [9]


# -- which epochs


class Retained:
    """A registry of which only the checkpoints are looked at."""

    def __init__(self, *rows: Checkpoint) -> None:
        self._rows = list(rows)

    def checkpoints(self) -> list[Checkpoint]:
        return self._rows


def unaligned(row: Checkpoint) -> Checkpoint:
    waiting = [{"epoch": 1, "layers": [[]]}]
    return replace(row, operators={uid: stats.updated(waiting=waiting) for uid, stats in row.operators.items()})


def test_unaligned_epochs_are_neither_the_end_nor_what_is_gone_on_from(tmp_path):
    bank = bank_of(tmp_path / "site", small.pipeline, 1, 2, 3, 4)
    rows = bank.registry.checkpoints()

    def chosen(*of: Checkpoint, most: int = 3, **changes) -> tuple[int | None, list[int], tuple[str, ...]]:
        got = taking.choose(replace(small.pipeline, **changes), Retained(*of), "here", most)
        return got.base and int(got.base.id), [int(row.id) for row in got.epochs], got.notes

    assert chosen(*rows) == (1, [2, 3, 4], ())
    base, ids, notes = chosen(*rows[:3], unaligned(rows[3]), most=2)
    assert (base, ids) == (1, [2, 3]) and "Checkpoint 4 is unaligned" in notes[0]
    base, ids, _ = chosen(unaligned(rows[0]), *rows[1:])
    assert (base, ids) == (2, [3, 4])
    assert chosen(*rows[:1], *rows[2:])[:2] == (3, [4]), "2 is not retained, on which 3 was begun"
    assert chosen(*rows[3:])[1] == []
    base, ids, notes = chosen(*rows[1:], most=5)
    assert (base, ids) == (2, [3, 4]) and "2 epochs instead of the 5" in notes[0] and "num_retained" in notes[0]
    base, ids, notes = chosen(*rows, delivery="at_most_once")
    assert ids == [] and "delivers at most once" in notes[0]


# -- on Spark


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_flights_on_spark(tmp_path, days, weir):
    site = Site(
        tmp_path / "site",
        {
            "WEIR_EPOCH__MAX_FILES": "3",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_CHECKPOINTS__NUM_RETAINED": "3",
            "WEIR_PIPELINES__FLIGHTS__ON_RESTORE": json.dumps(
                [{"state": "aircraft_rotation", "expect": "ExpectColumnValuesToNotBeNull", "column": "legs"}]
            ),
        },
    )
    site.land(days[:12])
    site.run()
    before = everything(site.root / "storage")
    shown = weir(site, "ci", "flights", "--from", "main", "--epochs", "2")
    assert shown.code == 0 and shown.out.startswith("**weir ci flights: nothing differs**"), shown.out
    assert "aircraft\\_legs" in shown.out and "ExpectColumnValuesToNotBeNull" in shown.out
    assert everything(site.root / "storage") == before
