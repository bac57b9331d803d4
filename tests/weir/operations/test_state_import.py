"""State from rows: a bootstrap equals having read the history, a repair changes what it names; what does not fit
changes nothing."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.errors import BusyError, DamageError, InputError, PipelineError, WeirError
from state_ops.keyed import ttl
from state_ops.keyed.imported_rows import fitting
from state_ops.moments import to_micros
from state_ops.records.checkpoint import EDIT
from state_ops.schema.state_schema import StateSchema
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery import test_unaligned as unaligned
from tests.recovery.conftest import weir as weir
from tests.recovery.harness import Site
from tests.recovery.small import Bank, until
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import (
    Epoch,
    KeyedState,
    MapOf,
    Pipeline,
    State,
    Timestamp,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    stage,
    state_writer,
    window,
)
from weir import state_reader as spark_reader
from weir.cli import state as state_command
from weir.epoch import scheduler
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.inspection.comparison.entries import paired_views
from weir.operations import state_edit
from weir.operations.state_import import import_rows
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import Settings


def totals(*numbers: int) -> dict[str, tuple[int, int]]:
    """What these files book, by key."""
    state: dict[str, tuple[int, int]] = {}
    for number in numbers:
        for key in [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]:
            rows, total = state.get(key, (0, 0))
            state[key] = (rows + 1, total + number)
    return state


def frame(state: dict[str, tuple[int, int]]) -> pl.DataFrame:
    rows = [(key, *row) for key, row in state.items()]
    return pl.DataFrame(rows, {"id": pl.String, "rows": pl.Int64, "total": pl.Int64}, orient="row")


def write(bank: Bank, rows, uid: str = "accounts", **options) -> state_writer.Edit:
    return state_writer.write(bank.site.pipeline, uid, rows, settings=bank.site.settings, **options)


def is_sound(weir: Callable, bank: Bank) -> None:
    checked = weir(bank.site, "fsck", "small", "--json")
    assert (checked.code, json.loads(checked.out)["findings"]) == (0, []), checked.out


@pytest.mark.parametrize("parallelism", ["1", "3"])
def test_a_bootstrap_equals_having_read_the_history(tmp_path, weir, parallelism):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM=parallelism)
    bank.land(4)  # of which only the columns are looked at

    done = write(bank, frame(totals(1, 2, 3)), savepoint="history")

    assert (done.head, done.checkpoint, sum(done.rows.values())) == (None, 1, len(totals(1, 2, 3)))
    assert bank.state() == totals(1, 2, 3)
    (row,) = bank.registry.checkpoints()
    assert (row.kind, row.offsets, row.parent_id) == (EDIT, {}, None)
    is_sound(weir, bank)
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_SPARK__PARALLELISM": "2"})
    assert [report.checkpoint.id for report in bank.epochs(5)] == [2, 3]
    assert bank.state() == totals(1, 2, 3, 4, 5)
    assert sorted(bank.site.table("booked")["amount"]) == [4] * 10 + [5] * 10, "what was imported is not published"
    is_sound(weir, bank)
    assert weir(bank.site, "rewind", "small", "--savepoint", "history", "--yes").code == 0
    assert bank.state() == totals(1, 2, 3)


@pytest.mark.parametrize("local", [True, False])
def test_a_repair_changes_its_key_and_nothing_else(tmp_path, weir, local):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="3", WEIR_CHECKPOINTS__NUM_RETAINED="3")
    bank.epochs(1, 2)
    before = bank.registry.head()
    if not local:
        shutil.rmtree(tmp_path / "work")

    done = write(bank, frame({"k1": (2, 1000)}).to_pandas(), reason="k1 was wrong")

    expected = totals(1, 2) | {"k1": (2, 1000)}
    assert (done.head, done.checkpoint) == (2, 3) and bank.state() == expected
    after = bank.registry.head()
    same = ("offsets", "watermarks", "sinks", "inputs", "epoch_now")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    assert "k1 was wrong" in after.reason and after.totals["epochs"] == before.totals["epochs"]
    listed = bank.registry.files(after)
    assert {file.subtask for file in listed if file.new} == set(done.rows) and any(not file.new for file in listed)
    is_sound(weir, bank)
    bank.epochs(3)
    assert bank.state() == {
        key: (row[0], row[1] + 994) if key == "k1" else row for key, row in totals(1, 2, 3).items()
    } | {"k1": (3, 1003)}
    is_sound(weir, bank)


def test_replace_leaves_no_other_key_and_no_rows_leave_none(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="3")
    bank.epochs(1)
    write(bank, frame({"new": (7, 70)}).to_arrow(), replace=True)
    assert bank.state() == {"new": (7, 70)}
    write(bank, frame({}), replace=True)
    assert bank.state() == {}
    is_sound(weir, bank)
    bank.epochs(2)
    assert bank.state() == totals(2)
    bank.site.assert_no_orphans()


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_changed(tmp_path):
    bank = Bank.at(tmp_path)
    bank.epochs(1)
    objects = bank.site.objects()
    bad = pa.table({"id": ["a", None, "b", "b"], "rows": ["1", "2", "3", "4"], "color": ["red"] * 4})
    with pytest.raises(InputError) as refused:
        write(bank, bad)
    message = str(refused.value)
    for part in (
        "there is a column 'color', which the state has not",
        "the column 'rows' is string, and the state has int64 there: row 0: {'id': 'a', 'rows': '1', 'color': 'red'}",
        "the column 'total' (int64) is missing",
        "1 row has no 'id', which is part of the key: row 1",
        "1 key has several rows: {'id': 'b'} in 2 rows",
        "stage accounts, checkpoint 1",
    ):
        assert part in message, message
    with pytest.raises(InputError, match="the column 'id' is int64, and the state has string there"):
        write(bank, pa.table({"id": [1], "rows": [1], "total": [1]}), dry_run=True)
    with pytest.raises(InputError, match="1 row has no 'total', which cannot be null: row 1"):
        write(bank, pa.table({"id": ["a", "b"], "rows": [1, 1], "total": [1, None]}), dry_run=True)
    assert {name for name in bank.site.objects() if name.startswith("state/")} == {
        name for name in objects if name.startswith("state/")
    }
    assert bank.ids() == [1] and bank.state() == totals(1)


def test_values_are_cast_where_each_fits():
    schema = StateSchema.build(
        [
            ("small", pa.int8(), False, 0),
            ("texts", pa.list_(pa.field("item", pa.string(), False)), False, []),
            ("at", pa.timestamp("us", tz="UTC"), True, None),
        ]
    )
    keys = pa.schema([("k", pa.int32())])
    rows = pa.table({"texts": [["a"], []], "k": [1, 2], "small": [1, 127], "at": pa.nulls(2)})
    fit = fitting(rows, keys, schema, "")
    assert fit.schema.types == [pa.int32(), *[field.type for field in schema.fields]]
    assert fit.to_pylist()[0] == {"k": 1, "small": 1, "texts": ["a"], "at": None}
    bad = pa.table({"k": [1, 2, 3], "small": [1, 2, 200], "texts": [["a"], [None], []], "at": pa.nulls(3)})
    with pytest.raises(InputError, match=r"'small' holds what int8 cannot: .*200.*: row 2: ") as refused:
        fitting(bad, keys, schema, "")
    assert "the column 'texts' has a null in texts.item, which cannot be null" in str(refused.value)
    far = pa.array([0, 1 << 60], pa.timestamp("us", tz="UTC"))
    with pytest.raises(InputError, match=r"row 2: the column 'at' is 38504-08-17.*, outside of the years 1 to 9999"):
        fitting(rows.set_column(3, "at", far), keys, schema, "")


def test_a_stage_that_does_not_fit_its_input_is_refused_with_what_is_wrong(tmp_path):
    bank = Bank.at(tmp_path)
    bank.land(1)
    other = Pipeline("small", (with_input(small.accounts, key=("nobody",)),), max_parallelism=8)
    with pytest.raises(PipelineError, match="looks like cannot be told: ") as refused:
        write(Bank(replace(bank.site, pipeline=other)), frame(totals(1)))
    assert not refused.value.what.endswith(".."), refused.value.what


@pytest.mark.parametrize("at", sampled(["commit", "edited", "upload"]))
def test_a_crash_before_the_commit_leaves_nothing(tmp_path, weir, monkeypatch, at):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="3")
    bank.epochs(1)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if at == "commit":
            patched.setattr(Registry, "commit", die)
        elif at == "edited":
            patched.setattr(state_edit, "edited", die)
        else:
            calls: list[int] = []
            upload = state_edit.snapshot.upload

            def second(*args, **kwargs):
                calls.append(1)
                if len(calls) == 1:
                    return upload(*args, **kwargs)
                patched.setattr(Storage, "delete_tree", die)  # nor does it tidy up
                raise KeyboardInterrupt

            patched.setattr(state_edit.snapshot, "upload", second)
        with pytest.raises(KeyboardInterrupt):
            write(bank, frame(totals(7)), replace=True)
    assert bank.ids() == [1] and bank.state() == totals(1)
    assert len({name for name in bank.site.objects() if "/g2-e2/" in name}) > 0, "it had begun"
    bank.epochs(2)
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()
    is_sound(weir, bank)


def test_a_damaged_base_is_found_before_anything_is_built_on_it(tmp_path):
    bank = Bank.at(tmp_path)
    bank.epochs(1)
    victim = next((bank.site.storage / "state").rglob("*.sst"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    for local in (tmp_path / "work").rglob("*.sst"):
        local.unlink()
    with pytest.raises(DamageError, match="cannot be restored"):
        write(bank, frame({"k1": (1, 1)}))
    assert bank.ids() == [1]


def test_while_a_coordinator_lives_nothing_is_imported(tmp_path):
    bank = Bank.at(tmp_path)
    bank.epochs(1)
    with bank.coordinator():
        storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
        until(lambda: lease.watch(storage))
        with pytest.raises(BusyError):
            write(bank, frame({"k1": (1, 1)}))
        requests.send(storage, requests.Request("stop"))
    assert bank.state() == totals(1)


def test_the_command_imports_what_scans_and_exports_wrote(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="9")
    bank.epochs(1, 2)
    at = ("state", "scan", "small", "accounts", "--at", "1")
    for form in ("parquet", "arrow"):
        assert weir(bank.site, *at, "--format", form, "--output", str(tmp_path / f"rows.{form}")).code == 0
    assert (
        weir(bank.site, "state", "export", "small", "accounts", "--at", "1", "--to", str(tmp_path / "table")).code == 0
    )
    for number, source in enumerate(("rows.parquet", "rows.arrow", "table"), 3):
        given = ("state", "import", "small", "accounts", "--from", str(tmp_path / source), "--replace")
        tried = weir(bank.site, *given, "--dry-run")
        assert tried.code == 0 and "Nothing was changed" in tried.out and bank.ids()[-1] == number - 1, tried.err
        done = weir(bank.site, *given, "--savepoint", f"edit-{number}", "--json")
        assert done.code == 0, done.err
        facts = json.loads(done.out)
        assert (facts["checkpoint"], facts["before"], facts["mode"], facts["rows"]) == (
            number,
            number - 1,
            "replace",
            10,
        )
        assert bank.state() == totals(1)
    rows = pa.ipc.open_file(tmp_path / "rows.arrow").read_all()
    with pa.ipc.new_stream(str(tmp_path / "stream"), rows.schema) as stream:  # as --output - writes it
        stream.write_table(rows)
    (tmp_path / "renamed").write_bytes((tmp_path / "rows.arrow").read_bytes())
    for source in ("stream", "renamed"):
        tried = weir(
            bank.site,
            "state",
            "import",
            "small",
            "accounts",
            "--from",
            str(tmp_path / source),
            "--replace",
            "--dry-run",
        )
        assert tried.code == 0 and "10 rows fit" in tried.out, tried.err
    taken = weir(bank.site, *given, "--savepoint", "edit-3")
    assert taken.code == 1 and "has a savepoint 'edit-3' already" in taken.err and bank.ids()[-1] == 5
    missing = weir(bank.site, "state", "import", "small", "accounts", "--from", str(tmp_path / "nowhere"))
    assert missing.code == 2 and "neither a file nor a Delta table" in missing.err
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert weir(bank.site, "state", "import", "small", "accounts", "--from", str(tmp_path / "torn.parquet")).code == 1


# -- other stages


class Rider(State):
    rides: int = 0
    last: Timestamp | None = None


class Spender(State):
    spent: MapOf[str, float]


LANDING = files("{landing}/*.parquet", event_time="at", name="landing")


def kept(uid: str, state: type[State] = Rider, **options):
    @stage(uid, source=LANDING, key="id", state=state, **options)
    def keep(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        """Count, where there is something to count in."""
        if uid != "maps":
            state.fold(rows, rides=agg.count())

    return keep


def fired(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    """Nothing is handed out."""


pipeline = Pipeline(
    "edited",
    (
        kept("forgetful", ttl="30d"),
        kept("timed", on_timer=fired),
        kept("maps", Spender),
        window("hourly", LANDING, key="id", every="1h", on="at", sink=delta.append("hours"), total=agg.sum("amount")),
        aggregate(
            "sums", LANDING, key="id", sink=delta.append("sums"), total=agg.sum("amount"), first=agg.min("amount")
        ),
        deduplicate("unique", LANDING, key="id", on="at", ttl="1d", sink=delta.append("uniques")),
    ),
    max_parallelism=8,
)


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path / "site", {"WEIR_SPARK__PARALLELISM": "2"}, pipeline, __name__)


def land(site: Site, number: int) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    at = pa.array([datetime(2024, 5, 1, number, tzinfo=UTC)] * 6, pa.timestamp("us", tz="UTC"))
    rows = pa.table({"id": [f"k{key}" for key in range(6)], "at": at, "amount": [number] * 6})
    pq.write_table(rows, site.landing / f"{number:02}.parquet")


def go(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def scanned(site: Site, uid: str, at: int | None = None) -> pa.Table:
    return pa.concat_tables(state_reader.scan(site.pipeline, site.settings, uid, at))


@pytest.mark.parametrize("uid", sampled(["forgetful", "sums", "unique"]))
def test_what_was_scanned_is_what_it_was_after_an_import(site, uid):
    land(site, 1)
    go(site)
    rows = scanned(site, uid)
    others = {
        declared.uid: scanned(site, declared.uid).to_pylist()
        for declared in pipeline.stages
        if declared.uid not in (uid, "maps")
    }
    import_rows(pipeline, site.settings, uid, rows.slice(0, 0), replaces=True)
    assert list(state_reader.scan(pipeline, site.settings, uid)) == []
    import_rows(pipeline, site.settings, uid, rows)
    assert scanned(site, uid).sort_by("id").equals(rows.sort_by("id"))
    assert {other_uid: scanned(site, other_uid).to_pylist() for other_uid in others} == others
    land(site, 2)
    go(site)
    if uid == "sums":
        assert {(row["total"], row["first"]) for row in scanned(site, uid).to_pylist()} == {(3, 1)}


def entries(site: Site, uid: str) -> int:
    """How many entries the newest checkpoint's state has, expired ones and indices too."""
    with state_reader.viewed(site.pipeline, site.settings, uid, None, "test") as view:
        return sum(1 for _ in paired_views(view, view, equal=True))


@pytest.mark.parametrize("replaces", sampled([True, False]))
@pytest.mark.parametrize("on", ["at", None])
def test_an_imported_key_of_a_deduplication_ends_when_it_says_and_not_before(tmp_path, monkeypatch, on, replaces):
    """Keys are swept by an index of their ends, which goes with their rows; so does the one of a row that is
    replaced."""
    once = deduplicate("unique", LANDING, key="id", on=on, ttl="1h", sink=delta.append("uniques"))
    edited_pipeline = Pipeline("edited", (once,), max_parallelism=8)
    site = Site(tmp_path / "site", {"WEIR_SPARK__PARALLELISM": "2"}, edited_pipeline, __name__)

    def at(hour: float, *keys: str) -> list[str]:
        """An epoch at an hour of both clocks; the keys that it takes for new."""
        moment = datetime(2024, 5, 1, tzinfo=UTC) + timedelta(hours=hour)
        monkeypatch.setattr(scheduler, "datetime", SimpleNamespace(now=lambda _: moment))
        before = sorted(site.table("uniques")["id"]) if hour else []
        site.landing.mkdir(parents=True, exist_ok=True)
        times = pa.array([moment] * len(keys), pa.timestamp("us", tz="UTC"))
        pq.write_table(pa.table({"id": keys, "at": times}), site.landing / f"{hour * 60:06.0f}.parquet")
        go(site)
        return sorted((Counter(site.table("uniques")["id"]) - Counter(before)).elements())

    assert at(0, "long", "short") == ["long", "short"]
    rows = scanned(site, "unique").filter(pc.equal(pc.field("id"), "long")).to_pylist()
    rows += [{**rows[0], "id": "other"}, {**rows[0], "id": "endless", "expires": None}]
    rows[0]["expires"] += timedelta(hours=4)
    import_rows(
        edited_pipeline,
        site.settings,
        "unique",
        pa.Table.from_pylist(rows),
        replaces=replaces,
        executor=InMemoryExecutor(),
    )
    assert at(0.5, "long", "short", "other", "endless") == (["short"] if replaces else [])
    assert at(2, "x") == ["x"]
    assert at(2.1, "long", "short", "other", "endless") == ["other", "short"], "what has ended, and nothing else"
    assert at(6, "y") == ["y"]
    assert at(6.1, "long", "endless") == ["long"]
    assert at(9, "z") == ["z"]
    assert entries(site, "unique") == 3, "endless, and z with its end: all others are swept away"


def test_what_is_imported_lives_as_long_as_what_a_run_wrote_then(site):
    land(site, 1)
    go(site)
    import_rows(pipeline, site.settings, "forgetful", pa.table({"id": ["x"], "rides": [9], "last": pa.nulls(1)}))
    now = open_storage(pipeline, site.settings)[1].head().epoch_now
    (stage_, *_) = pipeline.stages
    stamps = pl.Series([to_micros(now)])
    assert not ttl.Expiry(stage_.lifetime, to_micros(now) + stage_.lifetime.micros).alive(stamps).any()
    assert {row["id"] for row in scanned(site, "forgetful").to_pylist()} == {"x", *[f"k{key}" for key in range(6)]}


def test_state_that_is_more_than_rows_is_refused(site):
    rows = pa.table({"id": ["x"], "rides": [9], "last": pa.nulls(1)})
    with pytest.raises(PipelineError, match="nothing has arrived for it yet"):
        import_rows(pipeline, site.settings, "forgetful", rows)
    land(site, 1)
    for uid, why in (("hourly", "it has windows"), ("maps", "map spent"), ("timed", "it has timers")):
        with pytest.raises(PipelineError, match=why):
            import_rows(pipeline, site.settings, uid, rows, dry_run=True)
    go(site)
    with pytest.raises(PipelineError, match="it has timers"):
        import_rows(pipeline, site.settings, "timed", rows, replaces=True)
    import_rows(pipeline, site.settings, "timed", rows)
    assert {"id": "x", "rides": 9, "last": None} in scanned(site, "timed").to_pylist()
    with pytest.raises(WeirError, match="has no stage 'nobody'"):
        import_rows(pipeline, site.settings, "nobody", rows)


def test_a_stage_that_is_new_in_a_running_pipeline_is_bootstrapped(site):
    fewer = replace(site, pipeline=replace(pipeline, stages=pipeline.stages[1:]))
    land(site, 1)
    go(fewer)
    land(site, 2)
    import_rows(pipeline, site.settings, "forgetful", pa.table({"id": ["k1"], "rides": [1], "last": pa.nulls(1)}))
    go(site)
    assert {row["id"]: row["rides"] for row in scanned(site, "forgetful").to_pylist()} == {
        f"k{key}": 2 if key == 1 else 1 for key in range(6)
    }


def test_rows_that_wait_for_a_stage_wait_on_after_an_edit(tmp_path):
    edited, other = (unaligned.left_waiting(tmp_path / name) for name in ("edited", "other"))
    before = open_storage(edited.pipeline, edited.settings)[1].head()
    import_rows(edited.pipeline, edited.settings, "passed", scanned(edited, "passed"))
    after = open_storage(edited.pipeline, edited.settings)[1].head()
    assert unaligned.waiting(after) == unaligned.waiting(before) > 0
    edited.assert_no_orphans()
    for bank in (edited, other):
        unaligned.epochs(bank)
    assert unaligned.state_of(edited) == unaligned.state_of(other)
    edited.assert_no_orphans()


def test_a_spark_dataframe_goes_round(spark, tmp_path: Path):
    bank = Bank.at(tmp_path)
    bank.epochs(1, 2)
    was = spark_reader.dataframe(spark, bank.site.pipeline, "accounts", settings=bank.site.settings)
    write(bank, was.selectExpr("id", "rows", "total * 2 as total"))
    assert bank.state() == {key: (rows, 2 * total) for key, (rows, total) in totals(1, 2).items()}


@pytest.mark.parametrize("offset", [120, 3_000, 2_000_000_000, -5])
def test_an_arrow_file_with_damaged_offsets_is_refused(tmp_path, offset):
    """Arrow does not look at them by itself: the process died, or had bytes of its memory for a key."""
    file, names = tmp_path / "rows.arrow", ["first-key", "second-key", "third-key"]
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("id", pa.string())])) as writer:
        writer.write_table(pa.table({"id": names}))
    offsets = struct.pack("<4i", 0, 9, 19, 28)
    raw = file.read_bytes()
    assert raw.count(offsets) == 1
    file.write_bytes(raw.replace(offsets, struct.pack("<4i", 0, offset, 19, 28)))
    with pytest.raises(InputError, match="cannot be read"):
        state_command._rows(str(file), Settings())
