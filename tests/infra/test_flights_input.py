from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from infra import flights_input
from infra.flights_input import SCHEMA, land, prepare
from state_ops.errors import ConfigurationError
from tests.tools.sampling import sampled


@pytest.fixture(scope="module")
def days_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flights") / "days"
    started = time.perf_counter()
    prepare(directory)
    assert time.perf_counter() - started < 20  # it takes two seconds or so; a demo must not wait for its data
    return directory


@pytest.fixture(scope="module")
def year(days_dir: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in prepare(days_dir))


def states(directory: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_every_flight_is_in_one_of_365_daily_files(days_dir, year):
    names = [path.name for path in prepare(days_dir)]
    assert len(names) == 365
    assert (names[0], names[-1]) == ("flights-2013-01-01.parquet", "flights-2013-12-31.parquet")
    assert names == sorted(names)
    assert year.num_rows == 336_776


def test_cancelled_unknown_and_diverted_flights_are_kept_as_nulls(year):
    assert year["dep_time"].null_count == 8_255
    assert year["tailnum"].null_count == 2_512
    diverted = pc.and_(pc.is_valid(year["dep_time"]), pc.is_null(year["arr_delay"]))
    assert pc.sum(diverted).as_py() == 1_175


def test_nulls_are_nulls_and_never_nan_or_an_empty_text(year):
    for field in year.schema:
        if pa.types.is_floating(field.type):
            assert not pc.any(pc.is_nan(year[field.name])).as_py(), field.name
        if pa.types.is_string(field.type):
            assert not pc.any(pc.is_in(year[field.name], pa.array(["", "NA", "nan"]))).as_py(), field.name
    complete = [name for name in year.schema.names if year[name].null_count == 0]
    assert set(SCHEMA.names) - set(complete) == {
        "dep_time",
        "dep_delay",
        "arr_time",
        "arr_delay",
        "air_time",
        "tailnum",
    }


@pytest.mark.parametrize("step", sampled([13, 1]))
def test_each_file_holds_its_own_day_in_order_with_the_one_schema(days_dir, step):
    for path in prepare(days_dir)[::step]:
        flights = pq.read_table(path)
        assert flights.schema.equals(SCHEMA), path.name
        days = {
            f"flights-{y}-{m:02}-{d:02}"
            for y, m, d in zip(*(set(flights[c].to_pylist()) for c in ("year", "month", "day")), strict=True)
        }
        assert days == {path.stem}
        keys = list(zip(*(flights[name].to_pylist() for name in ("scheduled", "carrier", "flight")), strict=True))
        assert keys == sorted(keys), path.name


def test_scheduled_is_the_scheduled_departure_in_utc(days_dir):
    first = pq.read_table(days_dir / "flights-2013-01-01.parquet").slice(0, 1).to_pylist()[0]
    assert (first["sched_dep_time"], first["carrier"], first["flight"], first["tailnum"]) == (515, "UA", 1545, "N14228")
    assert first["scheduled"] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)  # New York's winter: UTC-5


def test_preparing_again_touches_nothing(days_dir, monkeypatch):
    monkeypatch.setattr(flights_input, "_read_flights", lambda: pytest.fail("read again"))
    before = states(days_dir)
    prepare(days_dir)
    assert states(days_dir) == before


def test_killed_half_way_it_is_made_again_to_the_same_bytes(days_dir, tmp_path, monkeypatch):
    write, written = pq.write_table, []

    def killed_at_the_tenth(table, where):
        if len(written) == 10:
            raise KeyboardInterrupt
        written.append(where)
        write(table, where)

    monkeypatch.setattr(flights_input.pq, "write_table", killed_at_the_tenth)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    monkeypatch.undo()
    assert len(prepare(tmp_path)) == 365
    for path in prepare(tmp_path):
        assert path.read_bytes() == (days_dir / path.name).read_bytes()


def test_days_land_in_order_and_each_once(days_dir, tmp_path):
    landing = tmp_path / "landing"
    assert [path.name for path in land(days_dir, landing, count=2)] == [
        "flights-2013-01-01.parquet",
        "flights-2013-01-02.parquet",
    ]
    assert [path.name for path in land(days_dir, landing, count=1)] == ["flights-2013-01-03.parquet"]
    assert land(days_dir, landing, count=0) == []
    assert [path.name for path in land(days_dir, landing, upto="2013-01-05")] == [
        "flights-2013-01-04.parquet",
        "flights-2013-01-05.parquet",
    ]
    assert land(days_dir, landing, upto="2013-01-05") == []
    assert len(land(days_dir, landing)) == 360
    assert [path.name for path in sorted(landing.iterdir())] == [path.name for path in prepare(days_dir)]


def test_a_day_that_fails_to_copy_is_not_seen_in_landing(days_dir, tmp_path, monkeypatch):
    def full_disk(_, target):
        target.write_bytes(b"PAR1")
        raise OSError("no space left")

    monkeypatch.setattr(flights_input.shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="no space left"):
        land(days_dir, tmp_path, count=1)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    monkeypatch.undo()
    [landed] = land(days_dir, tmp_path, count=1)
    assert landed.read_bytes() == (days_dir / landed.name).read_bytes()


def test_an_upto_that_is_no_date_is_refused(days_dir, tmp_path):
    with pytest.raises(ConfigurationError, match="'January' is not a date"):
        land(days_dir, tmp_path, upto="January")


def test_the_command_line_prepares_and_lands(days_dir, tmp_path):
    command = [
        sys.executable,
        "-m",
        "infra.flights_input",
        "--days-dir",
        days_dir,
        "--landing",
        tmp_path,
        "--count",
        "3",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "3 days landed, flights-2013-01-01 to flights-2013-01-03\n"
    refused = subprocess.run([*command, "--upto", "soon"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "write it like 2013-01-31" in refused.stderr
