"""An epoch that is played again does what it did, and whatever is otherwise is named; nothing is written meanwhile."""

from __future__ import annotations

import hashlib
import io
import json
import pdb
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import ConfigurationError, DamageError, InputError, PipelineError, StageError, WeirError
from state_ops.records.snapshot_files import snapshots_of
from state_ops.storage.read_only import ReadOnlyStorage
from tests.recovery import shop as shops
from tests.recovery import small, test_upserts
from tests.recovery.queue_source import Queue, QueueSource
from tests.recovery.shop import Shop
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from weir import (
    Epoch,
    KeyState,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    debugging,
    delta,
    files,
    join,
    lookup,
    select,
    stage,
)
from weir.execution.spark.spark_executor import SparkExecutor
from weir.operations import forks
from weir.ownership.pipeline_storage import open_storage
from weir.replay.explain import explain
from weir.replay.stage_replay import stacked

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "20", "WEIR_SPARK__PARALLELISM": "2"}
WRONG: list[str] = []
SUMS = (("main", pa.schema([("id", pa.string()), ("total", pa.int64())])),)


def booked(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Counts and sums, but of planted keys the sum is wrong."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    planted = rows.filter(pl.col("id").is_in(WRONG)).with_columns(amount=pl.col("amount") * 100)
    state.fold(planted, total=agg.sum("amount"))
    return rows.select("id", "at", "amount")


def each(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> list[dict]:
    """A row for each key."""
    account = state.get()
    account.rows += rows.height
    account.total += int(rows["amount"].sum())
    state.update(account)
    return [{"id": key, "total": account.total}]


def sevens(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Books another amount than it counts."""
    return small.accounts(rows, state, epoch).with_columns(amount=pl.lit(7, pl.Int64))


def fails(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Looks for a column that is not there."""
    wanted = "nowhere"
    return rows.select(wanted) if rows.height else rows


planting = Pipeline("small", (altered(small.accounts, function=booked),), max_parallelism=8)
right = files("{landing}/right/*.parquet", name="right")


@stage("plain", source=files("{landing}/left/*.parquet", name="left"), key="id", state=small.Account)
def plain(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Hands all columns on."""
    return rows


both = join("both", plain, right, on="id", ttl="1d", sink=delta.append("both"))
named_alike = Pipeline("small", (plain, both), max_parallelism=8)
per_key = Pipeline(
    "small", (altered(small.accounts, function=each, per_key=True, declared=SUMS, sink=delta.append("sums")),),
    max_parallelism=8,
)  # fmt: skip


def bank_of(root: Path, pipeline: Pipeline, *numbers: int) -> Bank:
    bank = Bank(replace(Bank.at(root, **RETAINED).site, pipeline=pipeline))
    bank.epochs(*numbers)
    return bank


def debug(of, epoch: int, **asked) -> debugging.Played:
    return debugging.debug(of.site.pipeline, epoch, settings=of.site.settings, **asked)


def digests(root: Path) -> dict[str, str]:
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in root.rglob("*")
        if file.is_file()
    }


@pytest.fixture
def small_bank(tmp_path) -> Bank:
    return bank_of(tmp_path, small.pipeline, 1, 2, 3)


@pytest.mark.parametrize(
    ("uid", "epoch"), sampled([(uid, epoch) for epoch in (7, 8, 1, 6, 5) for uid in ("riders", "hourly", "trips", "unique")], 4)
)  # fmt: skip
def test_an_epoch_that_is_played_again_makes_what_it_made(rides_run, uid, epoch):
    seen = debug(rides_run, epoch, stage=uid)
    assert seen.is_same and seen.code_changed is False
    assert seen.rows.height == 40 and set(seen.rows["_file"]) == {f"{epoch:03}.parquet"}
    assert set(seen.published) >= {"main"}


def test_rows_of_a_key_say_their_file_and_their_number_in_it(rides_run):
    seen = debug(rides_run, 8, stage="riders", key="r0")
    file = rides_run.site.landing / "008.parquet"
    expected = duckdb.sql(
        f"SELECT ride, file_row_number FROM read_parquet('{file}', file_row_number=true) WHERE rider = 'r0'"
    ).fetchall()
    assert sorted(seen.rows.select("ride", "_row").rows()) == sorted(expected)
    riders = "SELECT count(*), sum(fare)::BIGINT FROM rides WHERE rider = 'r0'"
    for state, upto in ((seen.before, 7), (seen.after, 8), (seen.recorded, 8)):
        assert state.select("rides", "paid").rows() == rides_run.replay(riders, upto)
    assert sorted(seen.out["ride"]) == sorted(seen.rows["ride"])
    assert len(seen.subtasks) == 1


def test_nothing_below_the_root_of_the_pipeline_is_changed(small_bank):
    before = digests(small_bank.site.root)
    assert debug(small_bank, 3).is_same and debug(small_bank, 1, key="k3").is_same
    assert digests(small_bank.site.root) == before
    assert not list((small_bank.site.root / "work" / "debug").iterdir())


def test_storage_of_a_replay_refuses_to_be_written(small_bank):
    storage, _ = open_storage(small_bank.site.pipeline, small_bank.site.settings)
    read_only = ReadOnlyStorage.of(storage)
    assert read_only.read_bytes(next(iter(storage.list("state"))).path)
    for write in (
        partial(read_only.put_bytes, "a", b""),
        partial(read_only.delete, "a"),
        partial(read_only.create, "a", b""),
    ):
        with pytest.raises(PipelineError, match="would have been written"):
            write()


def test_a_planted_wrong_key_is_found(tmp_path, monkeypatch):
    bank = bank_of(tmp_path, planting, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(f"{__name__}.WRONG", ["k3"])
        bank.epochs(3)
    bank.epochs(4)
    seen = debug(bank, 3)
    (difference,) = seen.differences
    assert difference.of == "state" and seen.code_changed
    assert seen.verdict.endswith("does not play again to what it made: the state of 1 key differs, id=k3.")
    assert [(row["id"], row["total"]) for row in difference.recorded] == [("k3", 306)]
    assert [(row["id"], row["total"]) for row in difference.replayed] == [("k3", 6)]
    assert seen.before.to_dicts() == [{"id": "k3", "rows": 2, "total": 3}]
    assert debug(bank, 3, key="k2").is_same and not debug(bank, 3, key="k3").is_same
    assert debug(bank, 4).is_same, "it goes on from what was wrong"


def test_a_planted_wrong_row_is_found(small_bank):
    other = altered(small.accounts, function=sevens)
    bank = Bank(replace(small_bank.site, pipeline=Pipeline("small", (other,), max_parallelism=8)))
    seen = debug(bank, 3, key="k3")
    (difference,) = seen.differences
    assert (difference.of, difference.recorded, difference.replayed) == (
        "main", ({"id": "k3", "at": 3, "amount": 3},), ({"id": "k3", "at": 3, "amount": 7},),
    )  # fmt: skip
    assert seen.verdict.endswith("of the rows of main, 1 then and 1 now are otherwise.")


def test_only_state_of_the_subtask_that_is_played_is_fetched(small_bank):
    _, registry = open_storage(small_bank.site.pipeline, small_bank.site.settings)
    rows = {row.id: row for row in registry.checkpoints()}
    (subtask,) = (seen := debug(small_bank, 3, key="k3")).subtasks
    then, now = (snapshots_of(registry.files(rows[at]), "accounts")[subtask].files for at in (2, 3))
    base = {file.path: file.bytes for file in then}
    new = {file.path: file.bytes for file in now if file.path not in base or not file.name.endswith(".sst")}
    assert seen.fetched == sum(base.values()) + sum(new.values())


def test_state_is_read_ahead_where_all_of_it_is_looked_at(small_bank, monkeypatch):
    read = []
    monkeypatch.setattr("os.posix_fadvise", lambda fd, *_: read.append(Path(f"/proc/self/fd/{fd}").resolve().name))
    assert debug(small_bank, 3, key="k3").is_same and not read
    assert debug(small_bank, 3).is_same and any(name.endswith(".sst") for name in read)


@pytest.mark.long
@pytest.mark.parametrize("how", sampled(shops.HOWS))
def test_a_chain_is_played_from_its_sources(tmp_path, how):
    shop = Shop.at(tmp_path, shops.pipeline_of(how))
    for day in (1, 2):
        shop.run(day)
    for uid in ("unique", "paid", "sums"):
        assert debug(shop, 2, stage=uid).is_same
    orders, payments = (
        pl.read_parquet(shop.site.landing / source / "00002.parquet") for source in ("orders", "payments")
    )
    key = next(iter(set(orders["id"]) & set(payments["order"])))
    seen = debug(shop, 2, stage="paid", key=key)
    assert seen.inputs["unique"].height == orders.filter(id=key).height
    assert sorted(seen.inputs["payments"]["price"]) == sorted(payments.filter(order=key)["price"])
    assert set(seen.inputs["payments"]["_file"]) == {"00002.parquet"}
    assert len(debug(shop, 2, stage="sums", key=key).subtasks) == 1


@pytest.mark.long
def test_an_epoch_with_another_number_of_subtasks_than_the_one_before_is_played_again(tmp_path):
    bank = bank_of(tmp_path, small.pipeline, 1, 2)
    for epoch, subtasks in ((3, 4), (4, 1)):
        bank.site.options["WEIR_SPARK__PARALLELISM"] = str(subtasks)
        bank.epochs(epoch)
        seen = debug(bank, epoch)
        assert (seen.is_same, seen.subtasks) == (True, tuple(range(subtasks)))
        seen = debug(bank, epoch, key="k3")
        assert (seen.before["total"].item(), seen.after["total"].item()) == (sum(range(epoch)), sum(range(epoch + 1)))


def test_rows_for_an_upsert_are_compared_as_they_were_staged(tmp_path):
    bank = bank_of(tmp_path, test_upserts.pipeline, 1, 2, 3)
    seen = debug(bank, 3, key="k3")
    assert seen.is_same and seen.published["main"].to_dicts() == seen.out.to_dicts()
    assert seen.out["_change_type"].to_list() == ["delete"]


def test_a_branch_is_played_by_its_name(small_bank):
    forks.fork(small_bank.site.pipeline, small_bank.site.settings, "fix", 2)
    branch = Bank(replace(small_bank.site, pipeline=forks.branched(small.pipeline, small_bank.site.settings, "fix")))
    branch.epochs()
    newest = branch.ids()[-1]
    seen = debug(branch, newest, key="k3")
    assert seen.pipeline == "small@fix" and seen.is_same and seen.rows["_file"].to_list() == ["00003.parquet"]


def test_a_source_that_cannot_be_read_again_says_what_is_left_to_do(small_bank):
    (small_bank.site.landing / "00003.parquet").unlink()
    with pytest.raises(InputError, match="cannot be played again") as refused:
        debug(small_bank, 3)
    assert "weir state get" in str(refused.value) and "archive=True" in str(refused.value)
    assert debug(small_bank, 2).is_same


@pytest.mark.parametrize("archive", [False, True])
def test_a_source_that_gives_each_row_once_is_played_from_its_archive(tmp_path, archive):
    source = QueueSource(name="in", archive=archive)
    counted = aggregate("counted", source, key="id", n=agg.count(), sink=delta.append("counts"))
    bank = Bank(
        replace(
            Bank.at(tmp_path, **RETAINED).site,
            pipeline=Pipeline("small", (counted,), max_parallelism=8, delivery="at_least_once"),
        )
    )
    bank.site.landing.mkdir()
    queue = Queue(str(bank.site.landing / "queue.db"))
    for number in (1, 2):
        queue.put([("a", number), ("b", number + 10)])
        bank.epochs()
    if archive:
        assert debug(bank, 2, key="a").is_same and debug(bank, 2, key="a").before["n"].to_list() == [1]
        return
    with pytest.raises(InputError, match="gives each row once"):
        debug(bank, 2, key="a")


@pytest.mark.parametrize("at", sampled([2, 3]))  # where the epoch was begun, and what it made
def test_damage_in_state_that_is_read_where_it_lies_names_the_object(small_bank, at):
    storage, registry = open_storage(small_bank.site.pipeline, small_bank.site.settings)
    (row,) = [row for row in registry.checkpoints() if row.id == at]
    new = [file for file in registry.files(row) if file.new and file.subtask == 0 and file.name.endswith(".sst")]
    damaged = new[0].path
    there = storage.on_disk(damaged)
    assert there is not None
    data = bytearray(there.read_bytes())
    data[10] ^= 1
    there.write_bytes(data)
    with pytest.raises(DamageError, match="altered") as raised:
        debug(small_bank, 3)
    assert raised.value.where == storage.full(damaged)
    assert "weir fsck" in str(raised.value) and "local" not in str(raised.value)


def test_what_cannot_be_played_again_says_why_and_what_can(tmp_path):
    bank = bank_of(tmp_path, small.pipeline, 1, 2, 3)
    keeps_two = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "2"})
    Bank(keeps_two).epochs(4)
    with pytest.raises(WeirError, match="checkpoint 2, which it was begun on, is not retained") as refused:
        debug(bank, 3)
    assert "These epochs can be: 4." in str(refused.value)
    with pytest.raises(WeirError, match="no checkpoint 9"):
        debug(bank, 9)
    with pytest.raises(ConfigurationError, match="key and a subtask"):
        debug(bank, 4, key="k1", subtask=0)
    with pytest.raises(ConfigurationError, match="no subtask 2"):
        debug(bank, 4, subtask=2)
    with pytest.raises(PipelineError, match="no stage 'other'"):
        debug(bank, 4, stage="other")


def renamed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Hands out under the key's name what is none."""
    return small.accounts(rows, state, epoch).with_columns(id=pl.col("amount"))


def in_words(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Hands out amounts as texts."""
    return small.accounts(rows, state, epoch).with_columns(pl.col("amount").cast(pl.String))


def test_rows_that_have_another_type_under_the_keys_name_are_shown_whole(tmp_path):
    bank = bank_of(tmp_path, Pipeline("small", (altered(small.accounts, function=renamed),), max_parallelism=8), 1, 2)
    seen = debug(bank, 2, key="k3")
    assert seen.is_same and seen.rows["id"].to_list() == ["k3"] and seen.out.height > 1
    assert any("in other types" in note for note in seen.notes)


def test_rows_that_are_of_another_type_now_differ(small_bank):
    other = Pipeline("small", (altered(small.accounts, function=in_words),), max_parallelism=8)
    seen = debug(Bank(replace(small_bank.site, pipeline=other)), 3, key="k3")
    (difference,) = seen.differences
    assert ([row["amount"] for row in difference.recorded], [row["amount"] for row in difference.replayed]) == (
        [3],
        ["3"],
    )


def test_a_lookup_that_is_new_since_gets_the_newest_version(small_bank):
    (small_bank.site.landing / "names").mkdir()
    pq.write_table(pa.table({"id": ["k3"], "name": ["three"]}), small_bank.site.landing / "names" / "1.parquet")
    named = lookup("named", small.SOURCE, table="{landing}/names/1.parquet", on="id")
    other = Pipeline("small", (named, with_input(small.accounts, named)), max_parallelism=8)
    seen = debug(Bank(replace(small_bank.site, pipeline=other)), 3, stage="accounts", key="k3")
    assert seen.is_same and seen.rows["name"].to_list() == ["three"]


def test_columns_may_have_the_names_of_those_that_say_where_a_row_came_from(tmp_path):
    bank = Bank(replace(Bank.at(tmp_path, **RETAINED).site, pipeline=named_alike))
    for folder in ("left", "right"):
        (bank.site.landing / folder).mkdir(parents=True)
        rows = pa.table({"id": ["a"], "_file": [folder], "_row": [7], "_input": ["none"]})
        pq.write_table(rows, bank.site.landing / folder / "1.parquet")
    bank.epochs()
    seen = debug(bank, 1, stage="plain", key="a")
    assert seen.is_same and seen.rows.to_dicts() == [
        {"id": "a", "_file": "left", "_row": 7, "_input": "none", "_input_": "left", "_file_": "1.parquet", "_row_": 0}
    ]
    seen = debug(bank, 1, stage="both", key="a")
    assert seen.is_same and seen.inputs["right"].select("_file", "_file_", "_row_").rows() == [
        ("right", "1.parquet", 0)
    ]
    assert seen.inputs["plain"]["_input_"].to_list() == ["plain"]
    traced = debugging.explain(bank.site.pipeline, "both", "id = 'a'", settings=bank.site.settings).trace
    assert [before.stage for before in traced.before] == ["plain"]


def told(commands: str) -> tuple[partial, io.StringIO]:
    written = io.StringIO()
    return partial(pdb.Pdb, stdin=io.StringIO(commands), stdout=written, nosigint=True, readrc=False), written


@pytest.mark.parametrize("pipeline", [small.pipeline, per_key])
def test_a_debugger_stops_where_the_function_gets_the_key(tmp_path, pipeline):
    bank = bank_of(tmp_path, pipeline, 1, 2)
    debugger, written = told("p rows.height, epoch.id, state\nc\n")
    assert debug(bank, 2, key="k3", stop=debugger).is_same
    rows = 1 if pipeline is per_key else debug(bank, 2, subtask=debug(bank, 2, key="k3").subtasks[0]).rows.height
    assert re.search(rf"\({rows}, 2, <.*State", written.getvalue())
    assert written.getvalue().count("(Pdb)") == 2, "once, for no other key and not where columns are learned"


def test_inputs_whose_columns_have_nothing_in_common_stand_below_each_other_as_texts():
    rows = stacked([pl.DataFrame({"a": [[1, None]], "b": [1]}), pl.DataFrame({"a": [7], "b": [2]})])
    assert rows.rows() == [("[1, null]", 1), ("7", 2)]


def test_who_quits_the_debugger_ends_the_command(small_bank):
    debugger, _ = told("q\n")
    with pytest.raises(KeyboardInterrupt):
        debug(small_bank, 2, key="k3", stop=debugger)
    assert not list((small_bank.site.root / "work" / "debug").iterdir())


def test_a_debugger_stops_where_the_function_raises(small_bank):
    other = Pipeline("small", (altered(small.accounts, function=fails, sink=None),), max_parallelism=8)
    debugger, written = told("c\np wanted\nq\n")
    with pytest.raises(StageError, match="nowhere"):
        debug(Bank(replace(small_bank.site, pipeline=other)), 3, key="k3", stop=debugger)
    assert "'nowhere'" in written.getvalue()


def test_the_command_says_what_was_and_ends_with_1_where_it_differs(small_bank, weir):
    shown = weir(small_bank.site, "debug", "small", "--epoch", "3", "--key", "k3")
    first, *others = shown.out.splitlines()
    same = "plays again to the same state and rows of main."
    assert shown.code == 0 and first == f"Epoch 3 of small, stage accounts, key id=k3, {same}"
    assert "00003.parquet" in "\n".join(others)
    facts = json.loads(weir(small_bank.site, "debug", "small", "--epoch", "3", "--key", "k3", "--json").out)
    assert facts["after"] == [{"id": "k3", "rows": 3, "total": 6}] and facts["differences"] == []
    other = replace(small_bank.site, module="tests.weir.replay.planted")
    shown = weir(other, "debug", "small", "--epoch", "3", "--subtask", "0")
    assert shown.code == 1 and "changed since" in shown.out
    assert re.match("Epoch 3 of small, stage accounts, subtask 0, does not play again .* keys differs, id=", shown.out)


class Due(State):
    """Of one key."""

    rows: int = 0


def reminded(minutes: int):
    def remind(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        state.timers.set(rows.select("id").unique(), after=f"{minutes}m")
        return rows.select("id", "at", "amount")

    return remind


def nothing(due: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Nothing is handed out."""
    return due.clear().select("id", at=pl.lit(0, pl.Int64), amount=pl.lit(0, pl.Int64))


@pytest.mark.parametrize("asked", [{}, {"key": "k3"}])
def test_a_timer_that_no_row_of_state_shows_is_a_difference_too(tmp_path, asked):
    timed = altered(small.accounts, state=Due, on_timer=nothing)
    stages = [altered(timed, function=reminded(minutes)) for minutes in (30, 40)]
    then, now = (Pipeline("small", (stage,), max_parallelism=8) for stage in stages)
    bank = bank_of(tmp_path, then, 1)
    assert debug(bank, 1, **asked).is_same
    seen = debug(Bank(replace(bank.site, pipeline=now)), 1, **asked)
    (difference,) = seen.differences
    assert difference.of == "state" and {"id": "k3", "_differs": "a timer"} in difference.replayed


def passes(frame):
    """A transform that Python cannot evaluate."""
    return frame.where("amount >= 0")


def by_first_letter(frame):
    """A transform that changes the key."""
    return frame.selectExpr("regexp_extract(id, '^(.)', 1) AS id", "total")


@pytest.mark.usefixtures("spark")
def test_rows_of_all_subtasks_before_a_transform_that_changes_the_key_are_played(tmp_path):
    sums = aggregate("sums", small.SOURCE, key="id", total=agg.sum("amount"))
    letters = aggregate(
        "letters", sums, key="id", transform=by_first_letter, n=agg.count(), sink=delta.append("letters")
    )
    pipeline = Pipeline("small", (sums, letters), max_parallelism=8)
    bank = Bank(replace(Bank.at(tmp_path, **RETAINED).site, pipeline=pipeline))
    bank.epochs(1, executor=SparkExecutor(bank.site.settings, "tests"))
    seen = debug(bank, 1, stage="letters", key="k", spark=True)
    assert seen.is_same and seen.after["n"].to_list() == [8]
    explained = explain(bank.site.pipeline, bank.site.settings, "letters", "id = 'k'", spark=True)
    unclear = "rows of sums: letters has a transform, which may make id of other columns"
    assert (explained.trace.before, explained.trace.unknown) == ((), (unclear,))
    assert "8 input rows with the key came in epoch 1: these are all" in [said.what for said in explained.statements]


def test_columns_that_sql_makes_are_made_again_row_by_row(tmp_path):
    """Of a select that says what changes mean, and of an aggregate that makes the key of the stage before another."""
    sums = aggregate("sums", small.SOURCE, key="id", total=agg.sum("amount"), changes=True)
    newest = "_change_type IN ('insert', 'update_postimage')"
    latest = select("latest", sums, "id", "total", where=newest, sink=delta.append("latest"))
    letters = aggregate(
        "letters", sums, select=["regexp_extract(id, '^(.)', 1) AS id", "total"], where=newest, key="id",
        n=agg.count(), highest=agg.max("total"), sink=delta.append("letters"),
    )  # fmt: skip
    beside = aggregate(
        "beside", sums, select=["*", "regexp_extract(id, '^(.)', 1) AS letter"], key="letter", n=agg.count(),
        sink=delta.append("beside"),
    )  # fmt: skip
    bank = bank_of(tmp_path, Pipeline("small", (sums, latest, letters, beside), max_parallelism=8), 1, 2)
    seen = debug(bank, 2, stage="latest")
    assert seen.is_same and seen.rows.height == 10
    seen = debug(bank, 2, stage="letters", key="k")
    assert seen.is_same and seen.after["n"].to_list() == [16]
    seen = debug(bank, 2, stage="beside", key="k")
    assert seen.is_same and seen.after["n"].to_list() == [8]


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_what_spark_alone_evaluates_is_played_with_spark(tmp_path):
    stage = with_input(small.accounts, transform=passes)
    bank = Bank(replace(Bank.at(tmp_path, **RETAINED).site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))
    bank.epochs(1, 2, executor=SparkExecutor(bank.site.settings, "tests"))
    with pytest.raises(
        PipelineError, match="Spark has to evaluate the rows of accounts: it has a transform"
    ) as refused:
        debug(bank, 2)
    assert "--spark" in str(refused.value)
    seen = debug(bank, 2, key="k3", spark=True)
    assert seen.is_same and seen.rows.select("amount", "_file").rows() == [(2, "00002.parquet")]
