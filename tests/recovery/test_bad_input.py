"""Bad input and bad code are reported so that a person can act, and change nothing; repaired, the pipeline goes on
exactly."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from state_ops.errors import GateError, InputError, PipelineError, StageError
from tests.recovery import sensors
from tests.recovery.harness import Site
from tests.recovery.small import Bank, pipeline
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from tests.weir.dagster.without_spark import in_this_process
from weir import expect, files
from weir.cli.status import status_of
from weir.ownership import hold_causes
from weir.ownership.pipeline_storage import readers
from weir.run.run import RunOptions, run
from weir.run.sensor import SensorMemory, decide, observe
from weir.settings.configuration import PROJECT, EpochSettings
from weir.sources.files import FilesReader
from weir.sources.slices import EpochPlan
from weir.sources.source_directory import LandingDirectory

_READ = 3  # days in the base, all in one epoch


@pytest.fixture(scope="module")
def base(tmp_path_factory, spark, days) -> Site:
    site = Site(tmp_path_factory.mktemp("bad-input") / "base")
    site.land(days[:_READ])
    site.run()
    return site


@pytest.fixture
def flights(base, tmp_path) -> Site:
    """Three days read, nothing waits."""
    return base.copied_to(tmp_path / "site")


def _standing(site: Site) -> dict:
    """All that a failed epoch must leave as it was."""
    tables = {sink.name: len(site.table(sink.name)) for sink in site.pipeline.sinks}
    return {"head": site.head(), "rows": tables, "checkpoints": site.registry("checkpoints").to_json()}


# -- files


def _garbage(file: Path) -> None:
    file.write_bytes(b"this is no parquet file " * 100)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _bit_flipped(file: Path) -> None:
    pq.write_table(pq.read_table(file), file, compression="none", write_page_checksum=True)
    column = pq.read_metadata(file).row_group(0).column(5)
    assert column.path_in_schema == "dep_delay"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1 << 4
    file.write_bytes(data)


def _smashed_page(file: Path) -> None:
    column = pq.read_metadata(file).row_group(0).column(5)
    data = bytearray(file.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(data)


def _column_missing(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["arr_delay"]), file)


def _wrong_type(file: Path) -> None:
    rows = pq.read_table(file)
    at = rows.column_names.index("flight")
    pq.write_table(rows.set_column(at, "flight", rows.column("flight").cast(pa.string())), file)


def _impossible(file: Path) -> None:
    rows = pq.read_table(file)
    at = rows.column_names.index("dep_delay")
    delays = pc.if_else(pc.equal(rows["dep_delay"], pc.max(rows["dep_delay"])), 90_000.0, rows["dep_delay"])
    pq.write_table(rows.set_column(at, "dep_delay", delays), file)


@pytest.mark.parametrize(
    ("spoil", "messages"),
    sampled(
        [
            (_garbage, ["FILE", "is not a readable Parquet file", "Repair it, or move it out of"]),
            (_empty, ["FILE", "is empty", "Repair it, or move it out of"]),
            (_truncated, ["FILE", "is not a readable Parquet file", "Repair it, or move it out of"]),
            (_smashed_page, ["FILE", "is not a readable Parquet file", "Repair it, or move it out of"]),
            (_bit_flipped, ["FILE", "is not a readable Parquet file", "Repair it, or move it out of"]),
            (_column_missing, ["FILE", "has no column 'arr_delay'", "Repair it, or move it out of"]),
            (_wrong_type, ["FILE", "'flight'", "is string; earlier files have int64", "Repair it, or move it out of"]),
            (
                _impossible,
                ["aircraft_rotation", "ExpectColumnValuesToBeBetween", "dep_delay", "90000.0", "Repair the input"],
            ),
        ],
        lambda case: case[0] in (_garbage, _column_missing, _impossible),
    ),
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_bad_file_is_named_and_changes_nothing(flights, days, weir, spoil, messages):
    before, bad = _standing(flights), days[_READ]
    shutil.copyfile(bad, flights.landing / bad.name)
    spoil(flights.landing / bad.name)

    ended = weir(flights, "run", "flights", "--until-caught-up")

    assert ended.code == 1
    for words in messages:
        assert (bad.name if words == "FILE" else words) in ended.err, ended.err
    assert _standing(flights) == before
    flights.assert_no_orphans()

    shutil.copyfile(bad, flights.landing / bad.name)
    assert weir(flights, "run", "flights", "--until-caught-up").code == 0
    flights.assert_exact_so_far(_READ + 1)
    flights.assert_no_orphans()


def test_without_the_bad_file_the_pipeline_goes_on(flights, days, weir):
    bad = flights.landing / days[_READ].name
    _garbage(bad)
    assert weir(flights, "run", "flights", "--until-caught-up").code == 1

    bad.unlink()

    assert weir(flights, "run", "flights", "--until-caught-up", "--drain").code == 0
    flights.assert_exact(_READ)
    flights.assert_no_orphans()


def _changed(file: Path) -> None:
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize(
    ("happens", "messages"),
    sampled(
        [
            (
                _changed,
                ["FILE", "A file changed while an epoch was reading it", "deliver corrections under a new name"],
            ),
            (Path.unlink, ["FILE", "A file vanished while an epoch was reading it", "Put it back"]),
        ]
    ),
    ids=["changes", "vanishes"],
)
def test_a_file_that_changes_while_it_is_read_declines_the_epoch(flights, days, weir, monkeypatch, happens, messages):
    before, file = _standing(flights), flights.landing / days[_READ].name
    flights.land([days[_READ]])
    verify = FilesReader.verify

    def verify_too_late(self: FilesReader, planned) -> None:
        happens(file)
        verify(self, planned)

    with monkeypatch.context() as patched:
        patched.setattr(FilesReader, "verify", verify_too_late)
        ended = weir(flights, "run", "flights", "--until-caught-up")

    assert ended.code == 1
    for words in messages:
        assert (file.name if words == "FILE" else words) in ended.err, ended.err
    assert _standing(flights) == before
    flights.assert_no_orphans()

    file.unlink(missing_ok=True)
    flights.land([days[_READ]])
    flights.run()
    flights.assert_exact_so_far(_READ + 1)


# -- rows and code


@pytest.fixture
def readings(tmp_path, spark) -> Site:
    """Two good readings read, nothing waits."""
    site = Site(tmp_path / "site", {}, sensors.pipeline, "tests.recovery.sensors")
    site.landing.mkdir(parents=True)
    _deliver(site, "1", [("a", "20 C"), ("b", "21500 mC")])
    site.run()
    return site


def _deliver(site: Site, name: str, rows: list[tuple[str | None, str]]) -> None:
    columns = {"sensor": pa.array([row[0] for row in rows], pa.string()), "reading": [row[1] for row in rows]}
    pq.write_table(pa.table(columns), site.landing / f"{name}.parquet")


def _assert_readings(site: Site, wanted: list[tuple[str, float]]) -> None:
    assert sorted(site.table("readings").itertuples(index=False, name=None)) == sorted(wanted)
    counts = pd.Series([sensor for sensor, _ in wanted]).value_counts()
    assert dict(site.state("sensors").itertuples(index=False, name=None)) == counts.to_dict()
    site.assert_no_orphans()


def test_an_error_in_a_stage_shows_the_authors_own_traceback(readings, weir):
    before = _standing(readings)
    _deliver(readings, "2", [("a", "22 C"), ("b", "295 K")])

    ended = weir(readings, "run", "sensors", "--until-caught-up")

    assert ended.code == 1
    assert "The function of the stage sensors raised KeyError: 'K'" in ended.err
    assert "first keys of the batch: [{'sensor': " in ended.err and "subtask" in ended.err
    assert "Correct the function; the epoch was declined" in ended.err
    trace = ended.err[: ended.err.index("error:")]
    assert "tests/recovery/sensors.py" in trace and "return float(number) * FACTORS[unit]" in trace
    assert str(PROJECT / "weir") not in trace and "pyspark" not in trace, "only what the author wrote"
    assert _standing(readings) == before
    readings.assert_no_orphans()

    _deliver(readings, "2", [("a", "22 C"), ("b", "21 C")])
    readings.run()
    _assert_readings(readings, [("a", 20.0), ("b", 21.5), ("a", 22.0), ("b", 21.0)])


def test_a_row_without_a_key_names_the_key_and_the_stage(readings, weir):
    before = _standing(readings)
    _deliver(readings, "2", [("a", "22 C"), (None, "21 C")])

    ended = weir(readings, "run", "sensors", "--until-caught-up")

    assert ended.code == 1
    assert "1 row of a batch has no 'sensor', which is a key of sensors" in ended.err
    assert 'where="sensor IS NOT NULL"' in ended.err and 'null_keys="drop"' in ended.err
    assert _standing(readings) == before
    readings.assert_no_orphans()

    (readings.landing / "2.parquet").unlink()
    _deliver(readings, "3", [("a", "22 C")])
    readings.run()
    _assert_readings(readings, [("a", 20.0), ("b", 21.5), ("a", 22.0)])


@pytest.mark.parametrize(
    ("env", "messages"),
    [
        ({"WEIR_EPOCH__MAX_FLIES": "7"}, ["epoch.max_flies", "did you mean 'max_files'", "WEIR_EPOCH__MAX_FLIES"]),
        (
            {"WEIR_PIPELINES__SENSORS__OBJECT": "tests.recovery.sensor:pipeline"},
            ["tests.recovery.sensor", "module:attribute"],
        ),
        ({"WEIR_PIPELINES__SENSORS__PARAMS": "{landed: x}"}, ["{landing}", "pipelines.sensors.params"]),
    ],
    ids=["key", "module", "placeholder"],
)
def test_a_typo_in_the_configuration_starts_nothing(readings, weir, env, messages):
    before = readings.objects()

    ended = weir(readings, "run", "sensors", "--until-caught-up", **env)

    assert ended.code == 2
    for words in messages:
        assert words in ended.err, ended.err
    assert readings.objects() == before, "not even a generation was claimed"


def test_a_pipeline_that_is_not_configured_names_those_that_are(readings, weir):
    ended = weir(readings, "run", "flihgts")
    assert ended.code == 2
    assert "flihgts" in ended.err and "flights, sensors" in ended.err


# -- a directory that is not there


def test_a_landing_directory_that_does_not_exist_is_said_everywhere(tmp_path, weir, monkeypatch):
    in_this_process(monkeypatch)
    bank = Bank.at(tmp_path / "site")
    gone = f"{bank.site.landing} does not exist"
    shown = weir(bank.site, "status", "small").out
    assert gone in shown and "0 files" not in shown
    assert json.loads(weir(bank.site, "status", "small", "--json").out)["missing"] == {
        "landing": str(bank.site.landing)
    }
    run = weir(bank.site, "run", "small", "--until-caught-up")
    assert run.code == 0 and gone in run.out and gone in run.err and "0 files" not in run.err
    assert str(bank.site.landing) in weir(bank.site, "plan", "small").out
    decision = decide(observe(bank.site.pipeline, bank.site.settings), SensorMemory(), 0)
    assert gone in decision.reason and "no file is waiting" not in decision.reason

    bank.site.landing.mkdir()
    assert "0 files in" in weir(bank.site, "status", "small").out
    assert json.loads(weir(bank.site, "status", "small", "--json").out)["missing"] == {}
    assert "0 files waiting" in weir(bank.site, "run", "small", "--until-caught-up").err
    assert "no file is waiting" in decide(observe(bank.site.pipeline, bank.site.settings), SensorMemory(), 0).reason
    bank.epochs(1)
    bank.site.landing.rename(tmp_path / "unmounted")
    assert gone in weir(bank.site, "status", "small").out, "also when it was there once"


# -- files that a source sets aside


def _no_parquet(file: Path) -> Path:
    file.write_bytes(b"no parquet")
    return file


def _other_type(file: Path) -> Path:
    rows = pq.read_table(file)
    pq.write_table(rows.set_column(2, "amount", rows["amount"].cast(pa.string())), file)
    return file


def _lacking(file: Path) -> Path:
    pq.write_table(pq.read_table(file).drop_columns(["amount"]), file)
    return file


def _with_a_colon(file: Path) -> Path:
    return file.rename(file.with_name("00003T10:30.parquet"))


def _page_smashed(file: Path) -> Path:
    """Its footer is whole: only whoever reads its rows finds out."""
    _smashed_page_of(file, 2)
    return file


def _smashed_page_of(file: Path, number: int) -> None:
    column = pq.read_metadata(file).row_group(0).column(number)
    data = bytearray(file.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(data)


BAD = [_no_parquet, _other_type, _lacking, _with_a_colon, _page_smashed]


def small_site(tmp_path: Path, on_bad: str, files_at_once: str = "1") -> Bank:
    (first,) = pipeline.stages
    source = replace(first.inputs[0].origin, on_bad=on_bad)
    bank = Bank.at(tmp_path / "site", WEIR_EPOCH__MAX_FILES=files_at_once)
    return Bank(replace(bank.site, pipeline=replace(pipeline, stages=(with_input(first, source),))))


@pytest.mark.parametrize("files_at_once", sampled(["10", "1"]))
@pytest.mark.parametrize("spoil", BAD)
def test_a_bad_file_is_set_aside_where_its_source_wants_that(tmp_path, spoil, files_at_once):
    bank = small_site(tmp_path, "quarantine", files_at_once)
    bank.epochs(1, 2)
    bank.land(3, 4)
    bad = spoil(bank.site.landing / "00003.parquet")
    reports = bank.epochs(5)
    bank.assert_exact(1, 2, 4, 5)
    (aside,) = [aside for report in reports for aside in report.checkpoint.slice["landing"].get("set_aside", ())]
    assert aside["name"] == bad.name and aside["reason"]
    shown = status_of(bank.site.pipeline, bank.site.settings)
    assert shown["set_aside"]["landing"] == {"files": 1, "last": aside}
    assert shown["lag"] == {"landing": 0} and shown["held"] is None
    # Repaired, it comes under a name of its own; as it is, it is not tried again.
    assert bank.epochs() == []
    bank.land(6)
    bank.epochs()
    bank.assert_exact(1, 2, 4, 5, 6)
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("spoil", BAD)
def test_a_bad_file_holds_the_pipeline_where_its_source_does_not_say_otherwise(tmp_path, spoil):
    bank = small_site(tmp_path, "fail")
    bank.epochs(1)
    bank.land(3)
    bad = spoil(bank.site.landing / "00003.parquet")
    with pytest.raises(InputError, match=bad.name):
        bank.epochs()
    assert decide(observe(bank.site.pipeline, bank.site.settings), SensorMemory(), 0).reason.startswith(
        f"held: InputError, {bad}"
    )
    bad.unlink()
    bank.epochs(4)
    bank.assert_exact(1, 4)


def _without_key(bank: Bank) -> Bank:
    """A row that no key group has."""
    rows = pa.table({"id": ["k0", None], "at": [0, 1], "amount": [2, 2]})
    pq.write_table(rows, bank.site.landing / "00002.parquet")
    return bank


def _that_the_where_refuses(bank: Bank) -> Bank:
    """The expression has text in it that reads like the path of the input file."""
    bank.land(2)
    return of(bank, where="id <> '/landing/00002.parquet' AND CAST(id AS INT) > 0")


def _that_the_function_refuses(bank: Bank) -> Bank:
    def refusing(rows: pd.DataFrame, state, epoch) -> pd.DataFrame:
        if len(rows):
            raise ValueError("such an amount cannot be booked")
        return rows[["id", "at", "amount"]]

    bank.land(2)
    return of(bank, function=refusing)


def _that_a_gate_refuses(bank: Bank) -> Bank:
    bank.land(2)
    return of(bank, gates=(expect("ExpectColumnValuesToBeBetween", column="amount", max_value=1),))


def of(bank: Bank, **changes) -> Bank:
    (first,) = bank.site.pipeline.stages
    changed = replace(bank.site.pipeline, stages=(altered(first, **changes),))
    return Bank(replace(bank.site, pipeline=changed))


@pytest.mark.parametrize(
    ("arrives", "error"),
    [
        (_without_key, InputError),
        (_that_the_where_refuses, InputError),
        (_that_the_function_refuses, StageError),
        (_that_a_gate_refuses, GateError),
    ],
)
def test_no_file_is_set_aside_for_what_is_wrong_with_a_row(tmp_path, arrives, error):
    """Whoever finds that has read the file; it is the slice's only one."""
    bank = small_site(tmp_path, "quarantine")
    bank.epochs(1)
    with pytest.raises(error):
        arrives(bank).epochs()
    assert not status_of(bank.site.pipeline, bank.site.settings)["set_aside"]
    bank.land(2)
    bank.epochs()
    bank.assert_exact(1, 2)


def test_no_file_is_set_aside_for_one_of_the_same_name_in_another_directory(tmp_path):
    """As one of those in which a stage leaves rows for the next."""
    bank = small_site(tmp_path, "quarantine")
    bank.land(1)
    sources = readers(bank.site.pipeline, bank.site.settings)
    cut = EpochPlan(datetime.now(UTC), "", {"landing": sources["landing"].plan(None, EpochSettings(), None)})
    staged = f"file://{bank.site.root}/channels/later/g1-e3/00001.parquet"
    error = InputError("Spark cannot read the input of later.", where=staged)
    assert hold_causes.without_bad_input(sources, cut, error, {}, bank.site.pipeline.stages) is None


@pytest.mark.parametrize(
    "name", sampled(["00002 \u00fc+%20[1].parquet", "00002.parquet"]), ids=["escaped in URIs", "plain"]
)
@pytest.mark.parametrize("direct", ["0", "32"], ids=["by Spark", "by its workers"])
@pytest.mark.usefixtures("spark")
def test_a_file_of_which_spark_finds_that_it_is_bad_is_set_aside(tmp_path, direct, name):
    site = small_site(tmp_path, "quarantine", "10").site
    bank = Bank(replace(site, options={**site.options, "WEIR_SPARK__DIRECT_READ_MB": direct}))
    bank.land(1, 2, 3)
    bad = _page_smashed((bank.site.landing / "00002.parquet").rename(bank.site.landing / name))
    (report,) = list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True)))
    (aside,) = report.checkpoint.slice["landing"]["set_aside"]
    assert aside["name"] == bad.name
    bank.assert_exact(1, 3)


def test_the_first_file_ever_may_be_bad_and_so_may_all(tmp_path):
    bank = small_site(tmp_path, "quarantine", "10")
    bank.land(1, 2)
    for number in (1, 2):
        _no_parquet(bank.site.landing / f"{number:05}.parquet")
    bank.epochs()
    assert status_of(bank.site.pipeline, bank.site.settings)["set_aside"]["landing"]["files"] == 2
    bank.epochs(3)
    bank.assert_exact(3)


def test_a_file_that_vanishes_is_not_set_aside(tmp_path, monkeypatch):
    """It may come back, and would then never be read."""
    bank = small_site(tmp_path, "quarantine")
    bank.epochs(1)
    bank.land(2)
    kept = LandingDirectory.check_name
    hidden = tmp_path / "hidden"

    def hide(self, file):
        (bank.site.landing / file.name).rename(hidden)
        kept(self, file)

    with monkeypatch.context() as patched:
        patched.setattr(LandingDirectory, "check_name", hide)
        with pytest.raises(InputError, match="vanished"):
            bank.epochs()
    hidden.rename(bank.site.landing / "00002.parquet")
    bank.epochs()
    bank.assert_exact(1, 2)


def test_an_unknown_policy_for_bad_files_is_refused_where_it_is_written():
    with pytest.raises(PipelineError, match="on_bad='skip'"):
        files("{landing}/*.parquet", on_bad="skip")
