"""State at every retained checkpoint, against a replay of the input in SQL; what is chosen, held, shared and
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.checkpoints import reader_holds
from state_ops.errors import ConfigurationError, DamageError, PipelineError, WeirError
from state_ops.keyed import value_state
from state_ops.records.snapshot_files import snapshots_of
from state_ops.snapshots import snapshot
from tests.recovery.harness import Site
from tests.recovery.small import Bank
from tests.tools.reading import without
from tests.tools.sampling import sampled
from tests.weir import rides
from tests.weir.rides import Rides
from weir import Epoch, KeyedState, ListOf, MapOf, Pipeline, State, ValueState, agg, files, renamed_from, stage
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.inspection.view import parsed, view_of
from weir.run.run import RunOptions, run

_RIDERS = """SELECT rider, count(*), sum(fare)::BIGINT, list({city: city, fare: fare} ORDER BY "at", ride)
             FROM rides GROUP BY rider"""
_SPENT = """SELECT rider, list({spent_key: city, spent: spent} ORDER BY city)
            FROM (SELECT rider, city, sum(fare)::BIGINT AS spent FROM rides GROUP BY ALL) GROUP BY rider"""


def rows(of: Rides, uid: str, at: int | str | None = None) -> list[dict]:
    tables = list(state_reader.scan(of.site.pipeline, of.site.settings, uid, at))
    return [row for table in tables for row in table.to_pylist()]


@pytest.mark.parametrize("at", sampled([1, 4, 5, 6, 7, 8], lambda at: at in (1, 5, 8)))
def test_state_at_each_checkpoint_is_what_sql_says_of_the_input_so_far(rides_run, at):
    riders = rows(rides_run, "riders", at)
    assert sorted((row["rider"], row["rides"], row["paid"], row["stops"]) for row in riders) == sorted(
        rides_run.replay(_RIDERS, at)
    )
    assert sorted((row["rider"], row["spent"]) for row in riders) == sorted(rides_run.replay(_SPENT, at))
    riders_of_key = state_reader.get(rides_run.site.pipeline, rides_run.site.settings, "riders", ["r0"], at)
    assert riders_of_key == [row for row in riders if row["rider"] == "r0"]
    checkpoint, counts = state_reader.count(rides_run.site.pipeline, rides_run.site.settings, "riders", at)
    assert (checkpoint, list(counts), sum(counts.values())) == (at, [0, 1], len(riders))
    assert {row["ride"] for row in rows(rides_run, "unique", at)} == {
        row[0] for row in rides_run.replay("SELECT ride FROM rides", at)
    }


@pytest.mark.parametrize("at", [4, 8])
def test_open_windows_and_sessions_have_their_bounds(rides_run, at):
    mark = rides_run.registry.checkpoints()[[1, 4, 5, 6, 7, 8].index(at)].watermarks["hourly"]
    expected = rides_run.replay(
        f"""SELECT city, rider, time_bucket(INTERVAL 1 HOUR, "at") AS start, count(*), avg(fare) FROM rides
            GROUP BY city, rider, start HAVING epoch_us(start + INTERVAL 1 HOUR) > {mark}""",
        at,
    )
    hours = rows(rides_run, "hourly", at)
    assert sorted((row["city"], row["rider"], row["window_start"], row["n"], row["mean"]) for row in hours) == sorted(
        expected
    )
    newest = max(hours, key=lambda row: row["window_start"])
    of_key = state_reader.get(
        rides_run.site.pipeline, rides_run.site.settings, "hourly", [newest["city"], newest["rider"]], at
    )
    assert newest in of_key
    opened = rows(rides_run, "trips", at)
    assert opened and all(row["window_start"] < row["window_end"] for row in opened)


@pytest.mark.parametrize("uid", ["riders", "hourly", "trips", "unique"])
def test_the_columns_are_known_before_the_rows(rides_run, uid):
    with state_reader.viewed(rides_run.site.pipeline, rides_run.site.settings, uid, None, "test") as view:
        tables = list(view.tables())
    assert tables and all(table.schema.equals(view.schema) for table in tables)
    assert set(view.identity) < set(view.schema.names)


def test_a_savepoint_names_its_checkpoint(rides_run):
    assert rows(rides_run, "riders", "first-day") == rows(rides_run, "riders", 1)


@pytest.mark.parametrize("at", [3, 9, "last-day"])
def test_what_is_not_retained_is_answered_with_what_is(rides_run, at):
    with pytest.raises(WeirError) as refused:
        rows(rides_run, "riders", at)
    assert refused.value.exit_code == 1
    assert "1, 4, 5, 6, 7, 8" in str(refused.value) and "first-day (1)" in str(refused.value)


def test_a_stage_that_nobody_knows_is_refused(rides_run):
    with pytest.raises(PipelineError, match="riders, hourly, trips, unique"):
        rows(rides_run, "nobody")
    with pytest.raises(ConfigurationError, match="city, rider"):
        state_reader.get(rides_run.site.pipeline, rides_run.site.settings, "hourly", ["Oslo"])


def test_before_the_first_checkpoint_there_is_nothing(tmp_path):
    empty = Rides(tmp_path / "site")
    with pytest.raises(WeirError, match="no state yet"):
        rows(empty, "riders")


@pytest.mark.parametrize("uid", ["riders", "hourly", "trips", "unique"])
def test_stages_that_are_gone_from_the_code_are_read_by_what_was_recorded(rides_run, uid):
    other = next(stage for stage in rides.pipeline.stages if stage.uid != uid)
    without = replace(rides.pipeline, stages=(other,))
    settings = rides_run.site.settings
    settings = settings.model_copy(update={"spark": settings.spark.model_copy(update={"parallelism": 1})})
    tables = list(state_reader.scan(without, settings, uid, 6))
    assert [row for table in tables for row in table.to_pylist()] == rows(rides_run, uid, 6)


def test_rows_come_subtask_by_subtask_as_they_are_asked_for(rides_run, monkeypatch):
    fetched = []
    real = snapshot.fetch
    monkeypatch.setattr(snapshot, "fetch", lambda *args: (fetched.append(args[1].subtask), real(*args)))
    scan = state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, "unique")
    first = next(scan)
    assert fetched == [0] and first.num_rows < 8 * 40 / 2
    assert len(list(scan)) > 1 and fetched == [0, 1]


def test_a_key_group_may_be_larger_than_a_table(rides_run, monkeypatch):
    expected = rows(rides_run, "unique")
    monkeypatch.setattr(value_state, "_SCANNED", 7)
    scan = state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, "unique")
    tables = list(scan)
    assert max(table.num_rows for table in tables) == 7
    assert [row for table in tables for row in table.to_pylist()] == expected
    scan = state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, "unique")
    assert next(scan).num_rows == 7
    scan.close()  # in the middle of a group


def everything(of: Rides | Bank) -> dict[str, tuple[int, int]]:
    """All files below the pipeline's root, those of the coordinator too."""
    files = (file for file in of.site.storage.rglob("*") if file.is_file())
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def test_nothing_is_written_but_the_hold_which_is_gone_afterwards(rides_run):
    before = everything(rides_run)
    scan = state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, "riders")
    next(scan)
    (hold,) = everything(rides_run).keys() - before.keys()
    assert reader_holds.HOLDS in hold and json.loads(Path(hold).read_text())["purpose"] == "weir state scan"
    scan.close()
    state_reader.count(rides_run.site.pipeline, rides_run.site.settings, "trips")
    list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "riders", ["r0"]))
    assert everything(rides_run) == before


@pytest.mark.long
def test_a_scan_goes_on_while_its_checkpoint_is_pruned(tmp_path):
    small = Rides(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="1")
    small.epochs(2)
    expected = rows(small, "riders")
    scan = state_reader.scan(small.site.pipeline, small.site.settings, "riders", 2)
    first_rows = next(scan).to_pylist()
    small.epochs(2)
    assert [row.id for row in small.registry.checkpoints()] == [2, 4], "held"
    assert first_rows + [row for table in scan for row in table.to_pylist()] == expected
    small.epochs(1)
    assert [row.id for row in small.registry.checkpoints()] == [5]
    with pytest.raises(WeirError, match="no checkpoint 2"):
        rows(small, "riders", 2)


@pytest.mark.parametrize("how", ["missing", "flipped", "truncated"])
def test_damage_is_said_and_no_value_is_given(tmp_path, how):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    newest, older = (list(bank.registry.files(row)) for row in reversed(bank.registry.checkpoints()))
    shared = {file.path for file in older}
    for file in newest:
        path = bank.site.storage / file.path
        if file.kind != "state" or file.path in shared:
            continue
        if how == "missing":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data if how == "flipped" else data[:-1])
    read: list[Callable[[], object]] = [
        lambda: state_reader.get(bank.site.pipeline, bank.site.settings, "accounts", ["k1"]),
        lambda: list(state_reader.scan(bank.site.pipeline, bank.site.settings, "accounts")),
        lambda: list(state_reader.history(bank.site.pipeline, bank.site.settings, "accounts", ["k1"])),
    ]
    for reading in read:
        with pytest.raises(DamageError, match="missing" if how == "missing" else "sha256"):
            reading()
    assert state_reader.get(bank.site.pipeline, bank.site.settings, "accounts", ["k1"], 1) == [
        {"id": "k1", "rows": 1, "total": 1}
    ]


# -- one key through time


def test_a_keys_history_has_each_change_and_says_where_pruning_left_a_gap(rides_run):
    changes = list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "riders", ["r0"]))
    assert [(change.checkpoint.id, change.since) for change in changes] == [
        (1, 1),
        (4, 2),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 8),
    ]
    for change in changes:
        ((count, paid),) = rides_run.replay(
            "SELECT count(*), sum(fare) FROM rides WHERE rider = 'r0'", change.checkpoint.id
        )
        assert (change.rows[0]["rides"], change.rows[0]["paid"]) == (count, paid)
        assert change.checkpoint.run_id == "a-dagster-run"
        assert (
            change.versions["rides"]
            == {
                publication.checkpoint_id: publication.delta_version
                for publication in rides_run.registry.publications()
                if publication.sink == "rides"
            }[change.checkpoint.id]
        )
    odd = list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "riders", ["r1-2"]))
    assert [(change.checkpoint.id, change.since) for change in odd] == [(1, 1), (4, 2), (5, 5), (7, 7)], (
        "files 6 and 8 lack it"
    )
    until = list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "riders", ["r1-2"], 6))
    assert [change.checkpoint.id for change in until] == [1, 4, 5]
    assert list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "riders", ["nobody"])) == []


@pytest.mark.parametrize(
    ("last", "leads"),
    [(9, [1, 2, 7, 9]), (7, [1, 2, 7]), (5, [1, 2, 4, 5]), (2, [1, 2])],
    ids=["after-a-rewind", "the-rewind", "abandoned", "before"],
)
def test_the_chain_leaves_out_what_a_rewind_abandoned(rides_run, last, leads):
    """7 is a rewind to 2; 3 and 6 are pruned, and so is 8."""
    parents = {1: None, 2: 1, 4: 3, 5: 4, 7: 2, 9: 8}
    row = rides_run.registry.checkpoints()[0]
    completed = [replace(row, id=id, parent_id=parent) for id, parent in parents.items()]
    registry = SimpleNamespace(checkpoints=lambda: completed)
    top = next(row for row in completed if row.id == last)
    assert [row.id for row in state_reader.chain(registry, top)] == leads


def test_what_is_gone_again_is_a_change(rides_run):
    """A rider's session closes when the next file has none of his rides."""
    changes = list(state_reader.history(rides_run.site.pipeline, rides_run.site.settings, "trips", ["r0-3"]))
    assert [] in [change.rows for change in changes]
    assert all(change.rows != other.rows for change, other in pairwise(changes))


def test_without_the_first_checkpoint_the_first_change_is_older(tmp_path):
    small = Rides(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    small.epochs(4)
    first, second = state_reader.history(small.site.pipeline, small.site.settings, "riders", ["r0"])
    assert (first.checkpoint.id, first.since, first.exact) == (3, None, False)
    assert (second.checkpoint.id, second.since, second.exact) == (4, 4, True)


def test_history_fetches_an_object_that_checkpoints_share_once(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5", WEIR_SPARK__PARALLELISM="1")
    bank.epochs(1, 2, 3, 4, 5)
    fetched: list[str] = []
    real = snapshot.fetch

    def counted(storage, base, target):
        fetched.extend(file.path for file in base.files if file.name.endswith(".sst"))
        real(storage, base, target)

    monkeypatch.setattr(snapshot, "fetch", counted)
    assert len(list(state_reader.history(bank.site.pipeline, bank.site.settings, "accounts", ["k1"]))) == 5
    assert fetched and len(fetched) == len(set(fetched))


# -- state classes that changed since


class Old(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "x"


class New(State):
    seen: Annotated[int, renamed_from("rows")] = 0
    total: float | None = None


def _counted(state: type[State], field: str, **options: str) -> Pipeline:
    @stage("seen", source=files("{landing}/*.parquet", name="landing"), key="id", state=state, **options)
    def seen(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        state.fold(rows, **{field: agg.count()})

    return Pipeline("evolving", (seen,), max_parallelism=4, retired=("seen.note",))


def _epoch(site: Site, number: int, *ids: str) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": ids or ["a", "b"]}), site.landing / f"{number}.parquet")
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def _evolving(root: Path, pipeline: Pipeline) -> Site:
    return Site(root, {"WEIR_CHECKPOINTS__NUM_RETAINED": "5"}, pipeline, __name__)


def test_an_old_checkpoint_is_shown_as_its_own_schema_says(tmp_path):
    old = _evolving(tmp_path, _counted(Old, "rows"))
    _epoch(old, 1)
    new = _evolving(tmp_path, _counted(New, "seen"))
    _epoch(new, 2)
    get = state_reader.get
    assert get(new.pipeline, new.settings, "seen", ["a"], 1) == [{"id": "a", "rows": 1, "note": "x"}]
    assert get(new.pipeline, new.settings, "seen", ["a"], 2) == [{"id": "a", "seen": 2, "total": None}]
    assert [change.rows[0] for change in state_reader.history(new.pipeline, new.settings, "seen", ["a"])] == [
        {"id": "a", "rows": 1, "note": "x"},
        {"id": "a", "seen": 2, "total": None},
    ]


class Sight(State):
    at: int = 0
    note: str = "x"


class Glimpse(State):
    at: int = 0


class Sights(State):
    all: ListOf[Sight]
    by_id: MapOf[str, Sight]


class Glimpses(State):
    all: ListOf[Glimpse]
    by_id: MapOf[str, Glimpse]


def _sighted(state: type[State], **more: str) -> Pipeline:
    @stage("seen", source=files("{landing}/*.parquet", name="landing"), key="id", state=state)
    def seen(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        items = rows.select("id", at=pl.lit(int(epoch.id)), **{name: pl.lit(text) for name, text in more.items()})
        state.all.append(items)
        state.by_id.put(items.with_columns(by_id_key=pl.lit("k")))
        return rows

    return Pipeline("evolving", (seen,), max_parallelism=4, retired=("seen.all.note", "seen.by_id.note"))


def test_parts_of_list_and_map_elements_that_are_retired_are_shown_where_the_checkpoint_still_has_them(tmp_path):
    old = _evolving(tmp_path, _sighted(Sights, note="y"))
    _epoch(old, 1)
    new = _evolving(tmp_path, _sighted(Glimpses))
    _epoch(new, 2)
    first, second = (state_reader.get(new.pipeline, new.settings, "seen", ["a"], at)[0] for at in (1, 2))
    assert first["all"] == [{"at": 1, "note": "y"}] and second["all"] == [{"at": 1}, {"at": 2}]
    assert "'note': 'y'" in str(first["by_id"]) and "note" not in str(second["by_id"])


def test_what_a_time_to_live_has_forgotten_is_judged_by_the_rule_of_then(tmp_path):
    """And by the checkpoint's own clock, whatever today's code says: it may have another rule, or none, or not know the
    stage."""
    site = _evolving(tmp_path, _counted(Old, "rows", ttl="1h"))
    _epoch(site, 1)
    storage, registry = state_reader.open_storage(site.pipeline, site.settings)
    row = registry.checkpoints()[0]
    snapshots = snapshots_of(registry.files(row), "seen")
    for defined in (site.pipeline, _counted(Old, "rows"), _counted(Old, "rows", ttl="90d"), rides.pipeline):
        for passed, left in ((timedelta(minutes=59), ["a", "b"]), (timedelta(hours=1), [])):
            unswept = replace(row, epoch_now=row.epoch_now + passed)
            view = view_of(defined, site.settings, storage, unswept, "seen", snapshots)
            assert sorted(id for table in view.tables() for id in table["id"].to_pylist()) == left


def test_a_record_without_the_rule_is_read_by_the_definition_or_not_at_all(tmp_path):
    """As releases before this one wrote it."""
    site = _evolving(tmp_path, _counted(Old, "rows", ttl="1h"))
    _epoch(site, 1)
    storage, registry = state_reader.open_storage(site.pipeline, site.settings)
    row = registry.checkpoints()[0]
    older = replace(row, operators={"seen": without(row.operators["seen"], "ttl")})
    assert view_of(site.pipeline, site.settings, storage, older, "seen", {}).expiry is not None
    with pytest.raises(WeirError, match="time to live is not recorded"):
        view_of(rides.pipeline, site.settings, storage, older, "seen", {})


def test_a_moment_as_a_key_is_written_with_its_zone():
    keys = pa.schema([("window_start", pa.timestamp("us", "UTC"))])
    ((moment,),) = (column.to_pylist() for column in parsed(keys, ["2026-05-01 12:00:00+00:00"], "ranks"))
    assert moment.isoformat() == "2026-05-01T12:00:00+00:00"
    with pytest.raises(ConfigurationError, match="is no timestamp") as refused:
        parsed(keys, ["2026-05-01 12:00:00"], "ranks")
    assert "2026-05-01 12:00:00Z" in refused.value.next
