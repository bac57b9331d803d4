"""SQL over state, history, registry and tables; and what changed between two checkpoints, against a replay."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from state_ops.errors import ConfigurationError, DamageError
from state_ops.snapshots import snapshot
from tests.recovery.small import Bank
from tests.weir.inspection.test_state_reader import _counted, _epoch, _evolving, everything
from tests.weir.rides import Rides
from weir import State
from weir.epoch import scheduler
from weir.inspection import database, state_reader
from weir.inspection.comparison.states import compared
from weir.inspection.sql import answered


class Narrow(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "x"
    home: Annotated[dict, pa.struct([("city", pa.string())])]


class Wide(State):
    rows: int = 0
    home: Annotated[dict, pa.struct([("city", pa.string()), ("street", pa.string())])]
    more: float | None = None


def ask(of: Rides, query: str, at: int | str | None = None) -> list[tuple]:
    with answered(of.site.pipeline, of.site.settings, query, at) as (_, tables):
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def test_one_query_says_which_epoch_offsets_version_and_run_changed_a_key(rides_run):
    answer = ask(
        rides_run,
        """SELECT changed.checkpoint_id, changed.rides, epoch.offsets->'landing'->>'last', epoch.slice->'landing'->>'rows',
                  published.delta_version, epoch.run_id
           FROM riders_changes changed JOIN checkpoints epoch ON epoch.id = changed.checkpoint_id
           LEFT JOIN publications published ON published.checkpoint_id = epoch.id AND published.sink = 'rides'
           WHERE changed.rider = 'r1-2' ORDER BY 1""",
    )
    versions = {
        publication.checkpoint_id: publication.delta_version
        for publication in rides_run.registry.publications()
        if publication.sink == "rides"
    }
    expected = []
    for id in (1, 4, 5, 7):  # the odd files have rides of his; of those before 4 not each checkpoint is retained
        ((rides,),) = rides_run.replay("SELECT count(*) FROM rides WHERE rider = 'r1-2'", id)
        expected.append((id, rides, f"{id:03}.parquet", "40", versions[id], "a-dagster-run"))
    assert answer == expected


def test_history_has_every_retained_checkpoint_and_none_after_the_chosen_one(rides_run):
    query = "SELECT checkpoint_id, sum(rides)::BIGINT FROM riders_history GROUP BY ALL ORDER BY ALL"
    assert ask(rides_run, query) == [(id, 40 * id) for id in (1, 4, 5, 6, 7, 8)]
    assert ask(rides_run, query, 5) == [(1, 40), (4, 160), (5, 200)]


def test_changes_are_found_again_after_a_key_was_gone(rides_run):
    """Sessions come and go; what is in every checkpoint unchanged is named once."""
    answer = ask(rides_run, "SELECT checkpoint_id, rider, window_start FROM trips_changes ORDER BY ALL")
    history = ask(
        rides_run, "SELECT checkpoint_id, rider, window_start, window_end, total FROM trips_history ORDER BY ALL"
    )
    before: dict[int, int | None] = dict(zip((4, 5, 6, 7, 8), (1, 4, 5, 6, 7), strict=True)) | {1: None}
    there = set(history)
    assert answer == sorted(row[:3] for row in history if (before[row[0]], *row[1:]) not in there)


def test_a_key_that_comes_back_with_the_same_value_has_changed(tmp_path, monkeypatch):
    site = _evolving(tmp_path, _counted(Narrow, "rows", ttl="1h"))
    for number, ids in enumerate((["a", "b"], ["b"], ["a", "b"]), start=1):
        at = datetime.now(UTC) + timedelta(hours=2 * number, minutes=-number)
        monkeypatch.setattr(scheduler, "datetime", SimpleNamespace(now=lambda _, at=at: at))
        _epoch(site, number, *ids)
    with answered(site.pipeline, site.settings, "SELECT checkpoint_id, id FROM seen_changes ORDER BY ALL") as (
        _,
        tables,
    ):
        assert [tuple(row.values()) for table in tables for row in table.to_pylist()] == [(1, "a"), (1, "b"), (3, "a")]
    changes = state_reader.history(site.pipeline, site.settings, "seen", ["a"])
    assert [(change.checkpoint.id, len(change.rows)) for change in changes] == [(1, 1), (2, 0), (3, 1)]


def test_stage_and_table_of_one_name_are_told_apart_by_schema(rides_run):
    open_now = sum(
        table.num_rows for table in state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, "hourly")
    )
    assert (
        ask(rides_run, "SELECT count(*) FROM hourly")
        == ask(rides_run, "SELECT count(*) FROM state.hourly")
        == [(open_now,)]
    )
    assert ask(rides_run, "SELECT count(*) FROM tables.hourly") == [(len(rides_run.site.table("hourly")),)]
    assert ask(rides_run, "SELECT sum(fare) FROM rides") == rides_run.replay("SELECT sum(fare) FROM rides", 8)


@pytest.mark.parametrize(
    ("named", "told"), [("hourly", True), ("state.hourly", False), ("tables.hourly", False), ("riders", False)]
)
def test_a_name_of_state_that_a_table_has_too_is_told(rides_run, named, told):
    with capture_logs() as logs:
        ask(rides_run, f"SELECT count(*) FROM {named}")
    said = [line["event"] for line in logs if "tables." in line["event"]]
    assert said == (['hourly is the stage\'s state here; the table is tables."hourly"'] if told else [])


def test_a_savepoint_is_joined_with_the_newest(rides_run):
    assert ask(rides_run, "SELECT name, checkpoint_id FROM pins") == [("first-day", 1)]
    ((was,),) = ask(rides_run, "SELECT sum(paid)::BIGINT FROM riders", "first-day")
    assert [(was,)] == rides_run.replay("SELECT sum(fare)::BIGINT FROM rides", 1)
    listed = {row.id: row.files for row in rides_run.registry.checkpoints()}
    assert dict(ask(rides_run, "SELECT checkpoint_id, count(*) FROM state_files GROUP BY 1")) == listed


def test_lists_and_maps_are_lists_of_structs(rides_run):
    answer = ask(rides_run, "SELECT sum(stop.fare)::BIGINT FROM (SELECT unnest(stops) AS stop FROM riders)")
    assert answer == rides_run.replay("SELECT sum(fare)::BIGINT FROM rides", 8)


def test_only_what_is_named_is_read(rides_run, monkeypatch):
    read = []
    real = snapshot.fetch
    monkeypatch.setattr(snapshot, "fetch", lambda *args: (read.append(args[1].files[0].operator), real(*args)))
    ask(rides_run, "WITH mine AS (SELECT * FROM TRIPS) SELECT count(*) FROM mine, mine again")
    assert set(read) == {"trips"} and len(read) == 2, "once for each subtask, although it is scanned twice"
    ask(rides_run, "SELECT count(*) FROM checkpoints")
    assert len(read) == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("DROP TABLE riders", "no query"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELEC 1", "SELEC"),
        ("", "0 statements"),
        ("COPY riders TO '/tmp/out.csv'", "no query"),
        ("INSTALL httpfs", "no query"),
        ("SELECT * FROM read_parquet('/etc/hosts')", "disabled"),
        ("SELECT * FROM read_text('/etc/hosts')", "disabled"),
        ("SELECT * FROM made", "made does not exist"),
        ("SELECT * FROM nobody", "State: riders, hourly, trips, unique"),
        ("SELECT nothing FROM riders", "Columns of state.riders: rider, rides, paid, stops, spent"),
        ("SELECT city::INT FROM rides", "Could not convert"),
    ],
)
def test_what_is_no_reading_query_is_refused_and_says_what_there_is(rides_run, query, message):
    before = everything(rides_run)
    with pytest.raises(ConfigurationError) as refused:
        ask(rides_run, query)
    assert message in str(refused.value) and refused.value.exit_code == 2
    assert everything(rides_run) == before


def test_damage_comes_out_as_damage(tmp_path):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    for file in (bank.site.storage / "state").rglob("*.sst"):
        file.write_bytes(b"")
    with (
        pytest.raises(DamageError, match="sha256"),
        answered(bank.site.pipeline, bank.site.settings, "SELECT * FROM accounts"),
    ):
        pass


def test_every_type_that_state_can_have_can_be_asked_for():
    columns = {
        "u": pa.array([2**64 - 1, None], pa.uint64()),
        "half": pa.array([0.5, None], pa.float16()),
        "long": pa.array([1, None], pa.decimal128(38, 3)).cast(pa.decimal256(50, 3)),
        "nanos": pa.array([1, None], pa.timestamp("ns", tz="Europe/Oslo")),
        "took": pa.array([1, None], pa.duration("us")),
        "months": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
        "two": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
        "map": pa.array([[("a", 0.5)], None], pa.map_(pa.string(), pa.float16())),
        "struct": pa.array([{"x": [0.5]}, None], pa.struct([("x", pa.large_list(pa.float16()))])),
    }
    table = pa.table(columns)
    with database.database() as connection:
        database.load(connection, "t", [table, table], table.schema)
        with database.asked(connection, "SELECT u, half, long, \"map\"['a'], struct.x[1] FROM t LIMIT 1") as (
            _,
            rows,
        ):
            assert [tuple(row.values()) for table in rows for row in table.to_pylist()] == [
                (2**64 - 1, 0.5, "1.000", 0.5, 0.5)
            ]
        with database.asked(connection, "SELECT * FROM t") as (_, rows):
            assert sum(table.num_rows for table in rows) == 4


def test_tables_are_taken_in_as_they_come():
    """So what is loaded need never be in memory as a whole."""
    alive = []

    def tables():
        for number in range(50):
            alive.append(number)
            yield pa.table({"n": [number] * 10})

    with database.streamed(tables(), pa.schema([("n", pa.int64())])) as reader:
        assert alive == []
        reader.read_next_batch()
        assert alive == [0]


# -- what changed


def test_the_difference_of_two_checkpoints_is_that_of_their_replays(rides_run):
    totals = "SELECT rider, count(*), sum(fare)::BIGINT FROM rides GROUP BY rider"
    was, now = ({row[0]: row[1:] for row in rides_run.replay(totals, id)} for id in (1, 5))
    with compared(rides_run.site.pipeline, rides_run.site.settings, "riders", "first-day", 5) as difference:
        with difference.rows() as (_, tables):
            rows = [row for table in tables for row in table.to_pylist()]
        assert (difference.first, difference.second, difference.gone, difference.new, difference.retyped) == (
            1,
            5,
            (),
            (),
            {},
        )
        assert difference.counts == {"removed": 0, "added": 0, "changed": 0} | Counter(row["change"] for row in rows)
    assert [row["key"]["rider"] for row in rows] == sorted(
        rider for rider in now.keys() | was.keys() if was.get(rider) != now.get(rider)
    )
    for row in rows:
        rider = row["key"]["rider"]
        for side, of in (("old", was), ("new", now)):
            assert (row[side] and (row[side]["rides"], row[side]["paid"])) == of.get(rider)
        assert row["change"] == ("changed" if rider in was else "added")
        assert row["fields"] == (["rides", "paid", "stops", "spent"] if rider in was else None)


@pytest.mark.parametrize("uid", ["hourly", "trips"])
def test_windows_are_told_apart_by_their_bounds(rides_run, uid):
    def at(id: int) -> dict[tuple, dict]:
        tables = list(state_reader.scan(rides_run.site.pipeline, rides_run.site.settings, uid, id))
        rows = [row for table in tables for row in table.to_pylist()]
        bounds = ["window_start", "window_end"] if uid == "hourly" else ["window_start"]
        return {
            tuple(row[name] for name in [*(["city"] if uid == "hourly" else []), "rider", *bounds]): row for row in rows
        }

    was, now = at(5), at(8)
    with compared(rides_run.site.pipeline, rides_run.site.settings, uid, 5, 8) as difference:
        assert difference.counts == {
            "added": len(now.keys() - was.keys()),
            "removed": len(was.keys() - now.keys()),
            "changed": sum(was[key] != now[key] for key in was.keys() & now.keys()),
        }
        assert difference.counts["removed"] > 0


def test_subtasks_that_have_the_same_objects_are_not_read(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2", WEIR_SPARK__PARALLELISM="4")
    bank.epochs(1)
    pq.write_table(pa.table({"id": ["k1"], "at": [1], "amount": [5]}), bank.site.landing / "00002.parquet")
    bank.epochs()
    read = []
    real = snapshot.fetch
    monkeypatch.setattr(snapshot, "fetch", lambda *args: (read.append(args[1].subtask), real(*args)))
    with (
        compared(bank.site.pipeline, bank.site.settings, "accounts", 1, 2) as difference,
        difference.rows() as (_, tables),
    ):
        assert [row for table in tables for row in table.to_pylist()] == [
            {
                "change": "changed",
                "key": {"id": "k1"},
                "old": {"rows": 1, "total": 1},
                "new": {"rows": 2, "total": 6},
                "fields": ["rows", "total"],
            }
        ]
    assert len(read) == 2 and len(set(read)) == 1


def test_states_of_other_schemas_are_compared_by_what_both_have(tmp_path):
    old = _evolving(tmp_path, _counted(Narrow, "rows"))
    _epoch(old, 1)
    new = _evolving(tmp_path, _counted(Wide, "rows"))
    _epoch(new, 2, "b", "c")
    with compared(new.pipeline, new.settings, "seen", 1, 2) as difference:
        assert (difference.gone, difference.new, list(difference.retyped)) == (("note",), ("more",), ["rows", "home"])
        assert difference.retyped["rows"] == ("int32", "int64")
        with difference.rows() as (_, tables):
            rows = {row["key"]["id"]: row for table in tables for row in table.to_pylist()}
    assert {id: row["change"] for id, row in rows.items()} == {"a": "changed", "b": "changed", "c": "added"}
    assert rows["a"]["fields"] == ["home"], "it has a part more"
    assert rows["b"]["fields"] == ["rows", "home"]
    assert (rows["b"]["old"]["note"], rows["b"]["new"]["more"]) == ("x", None)
