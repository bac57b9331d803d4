"""`weir state` as people and programs use it: what it prints, what it writes, and that files are whole or not there."""

from __future__ import annotations

import io
import json
import os
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.errors import ConfigurationError, DamageError
from tests.recovery.harness import Site
from tests.weir.inspection.test_state_reader import everything, rows
from weir import Epoch, Pipeline, State, ValueState, files, stage
from weir.cli import state
from weir.cli.console import print_json
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import export, state_reader
from weir.inspection.export import Format, gathered, json_line, limited, to_delta, write
from weir.run.run import RunOptions, run


def table_rows(of, uid="riders", at=None):
    return sorted(rows(of, uid, at), key=str)


@pytest.mark.parametrize("format", ["json", "parquet", "arrow"])
def test_a_scan_in_each_format_is_the_state(rides_run, weir, tmp_path, format):
    file = tmp_path / f"state.{format}"
    before = everything(rides_run)
    done = weir(
        rides_run.site, "state", "scan", "rides", "riders", "--at", "5", "--format", format, "--output", str(file)
    )
    assert (done.code, done.err, done.out) == (0, "", f"14 rows are in {file}.\n")
    if format == "json":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        rows = (pq.read_table(file) if format == "parquet" else pa.ipc.open_file(file).read_all()).to_pylist()
    assert sorted(rows, key=str) == table_rows(rides_run, at=5)
    assert everything(rides_run) == before
    again = weir(rides_run.site, "state", "scan", "rides", "riders", "--format", format, "--output", str(file))
    assert again.code == 2 and "--force" in again.err
    forced = weir(
        rides_run.site, "state", "scan", "rides", "riders", "--format", format, "--output", str(file), "--force"
    )
    assert forced.code == 0 and [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_command_reads_one_key_now_and_then(rides_run, weir):
    then = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "r0", "--savepoint", "first-day", "--json")
    assert json.loads(then.out) == rows_of(rides_run, "r0", 1)[0]
    shown = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "r0")
    assert shown.code == 0 and "rides" in shown.out and str(rows_of(rides_run, "r0", 8)[0]["paid"]) in shown.out
    windows = weir(rides_run.site, "state", "get", "rides", "trips", "--key", "nobody", "--json")
    assert (windows.code, json.loads(windows.out)) == (1, [])
    nobody = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "nobody", "--json")
    assert (nobody.code, json.loads(nobody.out)) == (1, None) and "has no state for the key nobody" in nobody.err
    gone = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "r0", "--at", "2")
    assert gone.code == 1 and "Retained checkpoints: 1, 4, 5, 6, 7, 8. Savepoints: first-day (1)." in gone.err
    both = weir(
        rides_run.site, "state", "get", "rides", "riders", "--key", "r0", "--at", "2", "--savepoint", "first-day"
    )
    assert both.code == 2 and "Give one of them" in both.err
    names = ["--checkpoint", "--at"]
    counts = [weir(rides_run.site, "state", "count", "rides", "riders", name, "5", "--json").out for name in names]
    assert counts[0] == counts[1] and json.loads(counts[0])["checkpoint"] == 5


def rows_of(of, rider: str, at: int) -> list[dict]:
    return state_reader.get(of.site.pipeline, of.site.settings, "riders", [rider], at)


def test_a_history_is_a_line_a_change(rides_run, weir):
    shown = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "r1-2", "--history")
    lines = shown.out.splitlines()
    begin = lines[0].index("checkpoint")
    assert lines[0].split()[0] == "value" and all(line.startswith("rider=r1-2, ") for line in lines[1:])
    assert [line[begin:].split()[0] for line in lines] == ["checkpoint", "1", "4", "5", "7"]
    assert "landing: 40 rows of 001.parquet" in lines[1] and "a-dagster-run"[:9] in lines[1]
    assert "changed somewhere in 2..4; those between are pruned" in lines[2]
    changes = json.loads(
        weir(rides_run.site, "state", "get", "rides", "riders", "--key", "r1-2", "--history", "--json").out
    )
    assert [(change["checkpoint"], change["parent"], change["changed_in"]) for change in changes] == [
        (1, None, [1, 1]),
        (4, 3, [2, 4]),
        (5, 4, [5, 5]),
        (7, 6, [7, 7]),
    ]
    assert changes[-1]["value"] == rows_of(rides_run, "r1-2", 7) and changes[-1]["run_id"] == "a-dagster-run"
    assert changes[-1]["slice"]["landing"]["files"][0]["name"] == "007.parquet"
    assert changes[-1]["offsets"]["landing"]["last"] == "007.parquet"
    none = weir(rides_run.site, "state", "get", "rides", "riders", "--key", "nobody", "--history", "--json")
    assert (none.code, json.loads(none.out)) == (1, [])


def test_counts_are_by_subtask(rides_run, weir):
    counts = json.loads(
        weir(rides_run.site, "state", "count", "rides", "unique", "--savepoint", "first-day", "--json").out
    )
    assert (counts["checkpoint"], counts["total"]) == (1, 40) and sum(counts["subtasks"].values()) == 40
    assert "320" in weir(rides_run.site, "state", "count", "rides", "unique").out


def test_people_see_some_rows_and_how_to_get_all(rides_run, weir):
    some = weir(rides_run.site, "state", "scan", "rides", "unique")
    assert len(some.out.splitlines()) == 51 and "--format json" in some.err and "--limit N" in some.err
    asked = weir(rides_run.site, "state", "sql", "rides", "SELECT unnest(range(60)) AS n")
    assert len(asked.out.splitlines()) == 51 and "--format json" in asked.err
    assert "--limit" not in asked.err, "the command has no such option"
    few = weir(rides_run.site, "state", "scan", "rides", "unique", "--limit", "3")
    assert len(few.out.splitlines()) == 4 and few.err == ""
    lines = weir(rides_run.site, "state", "scan", "rides", "unique", "--json", "--limit", "7").out.splitlines()
    assert len(lines) == 7 and set(json.loads(lines[0])) == {"ride", "first_seen", "expires"}


@pytest.mark.long
def test_sql_and_diff_from_the_command(rides_run, weir, tmp_path):
    asked = weir(rides_run.site, "state", "sql", "rides", "SELECT count(*) AS n FROM riders", "--json")
    assert (asked.code, json.loads(asked.out)) == (0, {"n": 14})
    assert "n" in weir(rides_run.site, "state", "sql", "rides", "SELECT count(*) AS n FROM riders").out
    refused = weir(rides_run.site, "state", "sql", "rides", "SELECT nothing FROM riders")
    assert refused.code == 2 and "Columns of state.riders" in refused.err
    differ = json.loads(weir(rides_run.site, "state", "diff", "rides", "riders", "first-day", "5", "--json").out)
    assert (differ["from"], differ["to"], differ["removed"]) == (1, 5, 0) and len(differ["sample"]) == 10
    shown = weir(rides_run.site, "state", "diff", "rides", "riders", "first-day", "5")
    assert f"{differ['added']} added, 0 removed, {differ['changed']} changed" in shown.out
    file = tmp_path / "diff.parquet"
    done = weir(
        rides_run.site, "state", "diff", "rides", "riders", "1", "5", "--format", "parquet", "--output", str(file)
    )
    assert done.code == 0 and pq.read_table(file).num_rows == differ["added"] + differ["changed"]
    unknown = weir(rides_run.site, "state", "diff", "rides", "riders", "1", "someday")
    assert unknown.code == 1 and "no savepoint 'someday'" in unknown.err


# -- writing


class FailingError(Exception):
    """In the middle."""


def failing():
    yield pa.table({"a": [1]})
    raise FailingError


@pytest.mark.parametrize("format", [Format.JSON, Format.PARQUET, Format.ARROW])
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_file_that_fails_in_the_middle_leaves_what_was_there(tmp_path, format, there):
    file = tmp_path / "out"
    if there:
        file.write_text("precious")
    for error in (FailingError, KeyboardInterrupt):

        def tables(error=error):
            yield pa.table({"a": [1]})
            raise error

        with pytest.raises(error):
            write(pa.schema([("a", pa.int64())]), tables(), format, str(file), force=there)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
    assert not there or file.read_text() == "precious"


def test_what_cannot_be_written_is_said_before_anything_is_read(tmp_path):
    months = pa.schema([("m", pa.month_day_nano_interval())])
    for schema, format, output in (
        (months, Format.PARQUET, str(tmp_path / "out")),
        (months, Format.PARQUET, None),
        (months, Format.ARROW, None),
        (months, Format.JSON, str(tmp_path)),
        (months, Format.JSON, str(tmp_path / "no" / "out")),
    ):
        with pytest.raises(ConfigurationError):
            write(schema, failing(), format, output)
    assert list(tmp_path.iterdir()) == []


def test_arrow_on_stdout_is_a_stream(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(export.sys, "stdout", SimpleNamespace(buffer=written, flush=lambda: None))
    table = pa.table({"a": [1, 2]})
    assert write(table.schema, [table, table], Format.ARROW, "-") == 4
    assert pa.ipc.open_stream(written.getvalue()).read_all()["a"].to_pylist() == [1, 2, 1, 2]


def test_json_has_what_json_has_no_type_for():
    row = {"b": b"\x01\xff", "d": Decimal("1.50"), "n": float("nan"), "l": [{"i": float("inf")}], "m": [("k", 1)]}
    assert json.loads(json_line(row)) == {"b": "01ff", "d": "1.50", "n": "nan", "l": [{"i": "inf"}], "m": [["k", 1]]}


def test_rows_are_gathered_and_limited_without_reading_on():
    taken = []

    def tables():
        for number in range(9):
            taken.append(number)
            yield pa.table({"a": [number] * 4})

    assert [table.num_rows for table in limited(tables(), 6)] == [4, 2] and taken == [0, 1]
    assert list(limited(tables(), 0)) == []
    assert [table.num_rows for table in gathered(tables(), 10)] == [12, 12, 12]
    assert next(iter(gathered(tables(), 10))).num_rows == 12


# -- Delta


def test_an_export_is_a_table_whose_commit_names_the_checkpoint(rides_run, weir, tmp_path):
    to = str(tmp_path / "table")
    done = weir(rides_run.site, "state", "export", "rides", "riders", "--to", to, "--at", "5", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"table": to, "version": 0, "stage": "riders", "checkpoint": 5})
    rows = pl.from_arrow(DeltaTable(to).to_pyarrow_table()).to_dicts()  # type: ignore[union-attr]
    assert sorted(rows, key=str) == table_rows(rides_run, at=5)
    (commit,) = DeltaTable(to).history()
    assert (commit["weir.checkpoint"], commit["weir.stage"]) == ("5", "riders")
    again = weir(rides_run.site, "state", "export", "rides", "hourly", "--to", to)
    assert again.code == 2 and "--force" in again.err
    forced = weir(rides_run.site, "state", "export", "rides", "hourly", "--to", to, "--force")
    assert forced.code == 0 and "version 1" in forced.out
    assert len(DeltaTable(to).to_pyarrow_table()) == len(table_rows(rides_run, "hourly"))
    for inside in (rides_run.site.storage / "copy", rides_run.site.storage.parent):
        refused = weir(rides_run.site, "state", "export", "rides", "riders", "--to", str(inside))
        assert refused.code == 2 and "own storage" in refused.err
    refused = weir(rides_run.site, "state", "export", "rides", "riders", "--to", f"{to}[1]")
    assert refused.code == 2 and "brackets" in refused.err


def test_an_export_that_fails_leaves_nothing_and_says_why(rides_run, tmp_path, monkeypatch):
    def damaged(*_):
        yield pa.table({"rider": ["a"]})
        raise DamageError("An object is not what it was.")

    with state_reader.viewed(rides_run.site.pipeline, rides_run.site.settings, "riders", None, "test") as view:
        monkeypatch.setattr(type(view), "tables", damaged)
        with pytest.raises(DamageError):
            to_delta(view, rides_run.site.settings, str(tmp_path / "table"))
    assert list(Path(tmp_path).iterdir()) == []


def test_json_that_commands_print_has_no_numbers_that_json_has_not(tmp_path, monkeypatch, capsys):
    """Every parser takes it; the state has a value that is no number, one that is too large, and one that there is
    not."""

    class Last(State):
        last: float | None = None

    @stage("lasts", source=files("{landing}/*.parquet", name="landing"), key="k", state=Last)
    def lasts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        state.put(rows.group_by("k").agg(last=pl.col("v").last()))

    numbers = Pipeline("numbers", (lasts,), max_parallelism=4)
    site = Site(tmp_path, {}, numbers, "nowhere")
    site.landing.mkdir()
    rows = pa.table({"k": ["a", "b", "c"], "v": [float("nan"), float("-inf"), None]})
    pq.write_table(rows, site.landing / "1.parquet")
    list(run(numbers, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    monkeypatch.setattr(state, "find", lambda _name: (numbers, site.settings))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    outputs = {}
    for key in ("a", "b", "c"):
        state.state_get("numbers", "lasts", [key], None, None, False, True)
        outputs[key] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [
        str(value).count(word) for value, word in zip(outputs.values(), ("'nan'", "'-inf'", "None"), strict=True)
    ] == [
        1,
        1,
        1,
    ]
    as_texts = {"x": [1.5, (float("inf"), np.float64("nan"))], float("nan"): Decimal("NaN")}
    print_json(as_texts)
    assert json.loads(capsys.readouterr().out, parse_constant=refuse) == {"x": [1.5, ["inf", "nan"]], "nan": "NaN"}
