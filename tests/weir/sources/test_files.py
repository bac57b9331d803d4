"""What a file source plans, remembers, reports and refuses; without Spark."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from state_ops.errors import ConfigurationError, InputError, TransientError
from state_ops.moments import to_micros
from weir.definition import FileSource
from weir.settings.configuration import EpochSettings
from weir.sources import positions, source_directory
from weir.sources.files import FilesReader
from weir.sources.landed_files import LandedFiles
from weir.sources.parquet import parquet_files
from weir.sources.slices import Slice
from weir.sources.source_directory import LandingDirectory

LIMITS = EpochSettings()


@pytest.fixture
def landing(tmp_path) -> Path:
    landing = tmp_path / "landing"
    landing.mkdir()
    return landing


EMPTY_SLICE = Slice((), False, None, None)


def reader_of(landing: Path, **options) -> FilesReader:
    return FilesReader(FileSource("{landing}/*.parquet", **options), f"{landing}/*.parquet")


def put(landing: Path, name: str, *, ns: int, rows: int = 1, columns: dict | None = None) -> Path:
    """A file `name`.parquet whose time of change is `ns`."""
    file = landing / f"{name}.parquet"
    pq.write_table(pa.table(columns or {"n": list(range(rows))}), file)
    os.utime(file, ns=(ns, ns))
    return file


def read(reader: FilesReader, position: dict | None = None) -> dict:
    """Plan and read all that waits; the position as the registry gives it back."""
    planned = reader.plan(position, LIMITS, None)
    return json.loads(json.dumps(reader.advance(position, planned)))


def names(planned) -> list[str]:
    return [file.name.removesuffix(".parquet") for file in planned.files]


# -- below the floor


@pytest.fixture
def floored(landing, monkeypatch) -> dict:
    """The position after 10, 20, 30, 40 and 50, of which the last two are remembered; 30 is the newest below."""
    monkeypatch.setattr(positions, "_REMEMBERED", 2)
    for at in (10, 20, 30, 40, 50):
        put(landing, str(at), ns=at)
    position = read(reader_of(landing))
    assert (position["floor"], position["below"], position["below_newest_ns"]) == ("30.parquet", 3, 30)
    return position


def assert_late(landing: Path, position: dict, *messages: str) -> None:
    for look in (lambda reader: reader.plan(position, LIMITS, None), lambda reader: reader.check(position)):
        with pytest.raises(InputError, match="below_floor=") as refused:
            look(reader_of(landing))
        for words in messages:
            assert words in str(refused.value)


def assert_fine(landing: Path, position: dict | None) -> None:
    reader_of(landing).check(position)
    reader_of(landing).plan(position, LIMITS, None)


def test_nothing_below_the_floor_but_what_was_read_is_fine(landing, floored):
    assert_fine(landing, floored)


@pytest.mark.parametrize("cleaned", [0, 1, 2, 3])
def test_a_late_file_is_reported_however_many_old_files_were_cleaned_away(landing, floored, cleaned):
    for at in (10, 20, 30)[:cleaned]:
        (landing / f"{at}.parquet").unlink()
    put(landing, "25", ns=60)
    assert_late(landing, floored, "1 file ", "25.parquet", "'30.parquet'")


def test_a_file_that_changed_below_the_floor_is_reported(landing, floored):
    (landing / "10.parquet").unlink()
    put(landing, "20", ns=60)
    assert_late(landing, floored, "20.parquet", "changed after they were read")


@pytest.mark.parametrize("cleaned", [0, 1])
def test_a_late_file_with_an_old_time_is_reported_unless_more_files_were_cleaned_away(landing, floored, cleaned):
    for at in (10, 20)[:cleaned]:
        (landing / f"{at}.parquet").unlink()
    put(landing, "25", ns=15)
    assert_late(landing, floored, "too late to be told apart")


def test_cleaning_old_files_away_is_fine(landing, floored):
    (landing / "10.parquet").unlink()
    assert_fine(landing, floored)
    (landing / "20.parquet").unlink()
    (landing / "30.parquet").unlink()
    assert_fine(landing, floored)


def test_the_newest_time_below_grows_with_the_floor(landing, floored):
    put(landing, "60", ns=5)
    put(landing, "70", ns=6)
    position = read(reader_of(landing), floored)
    assert (position["floor"], position["below"], position["below_newest_ns"]) == ("50.parquet", 5, 50)
    put(landing, "80", ns=7)
    assert read(reader_of(landing), position)["below_newest_ns"] == 50, "60 is below now, and older"


def old_form(position: dict) -> dict:
    return {key: value for key, value in position.items() if key not in ("below_newest_ns", "seen_ns", "directory")}


def test_a_position_of_an_older_weir_is_read_and_keeps_its_count(landing, floored):
    before = old_form(floored)
    assert_fine(landing, before)
    late = put(landing, "25", ns=60)
    assert_late(landing, before, "too late to be told apart")
    late.unlink()

    put(landing, "60", ns=60)
    position = read(reader_of(landing), before)

    assert (position["floor"], position["below"], position["below_newest_ns"]) == ("40.parquet", 4, None)
    assert (position["seen"], position["seen_ns"]) == (["50.parquet", "60.parquet"], [None, 60])
    assert_fine(landing, position)
    put(landing, "25", ns=70)
    assert_late(landing, position, "too late to be told apart")


def test_looking_survives_a_late_file(landing, floored):
    put(landing, "25", ns=60)
    put(landing, "60", ns=60)
    assert [file.name for file in reader_of(landing).look(floored).fresh] == ["60.parquet"]


def test_a_late_file_that_is_accepted_is_warned_of_once_for_each_position(landing, floored):
    put(landing, "25", ns=60)
    reader = reader_of(landing, below_floor="warn")
    with capture_logs() as logs:
        for _ in range(3):
            reader.check(floored)
            reader.look(floored)
            reader.plan(floored, LIMITS, None)
    assert [line["event"] for line in logs] == ["files below the floor are not read"]
    assert "25.parquet" in logs[0]["detail"]

    put(landing, "60", ns=60)
    with capture_logs() as logs:
        position = read(reader, floored)
        reader.check(position)
        reader.check(position)
    assert len(logs) == 1


# -- event time by statistics


def hour(at: int) -> datetime:
    return datetime(2026, 1, 1, at, tzinfo=UTC)


def newest(landing: Path) -> int | None:
    return reader_of(landing, event_time="at").plan(None, LIMITS, None).newest


def test_a_field_of_the_same_name_inside_a_struct_is_not_the_event_time(landing):
    put(landing, "1", ns=1, columns={"meta": [{"at": hour(23)}], "at": [hour(1)]})
    assert newest(landing) == to_micros(hour(1))


def test_a_column_whose_name_is_also_a_path_into_a_struct_tells_its_own_time(landing):
    put(landing, "1", ns=1, columns={"meta": [{"at": hour(23)}], "meta.at": [hour(1)]})
    assert reader_of(landing, event_time="meta.at").plan(None, LIMITS, None).newest == to_micros(hour(1))


# -- limits


@pytest.mark.parametrize("limit", ["max_files", "max_bytes", "max_rows"])
def test_a_corrupt_file_beyond_a_limit_does_not_block_the_good_ones_before_it(landing, limit):
    good = put(landing, "1", ns=1, rows=10)
    bad = landing / "2.parquet"
    bad.write_bytes(b"no parquet" * 1000)
    limits = EpochSettings(**{limit: {"max_files": 1, "max_bytes": good.stat().st_size, "max_rows": 10}[limit]})
    reader = reader_of(landing)

    planned = reader.plan(None, limits, None)

    assert (names(planned), planned.limited) == (["1"], True)
    with pytest.raises(InputError, match=r"2\.parquet is not a readable Parquet file"):
        reader.plan(reader.advance(None, planned), limits, None)


def test_limits_cut_where_the_next_file_would_exceed_them(landing):
    size = max(put(landing, name, ns=1, rows=10).stat().st_size for name in "1234")
    reader = reader_of(landing)
    for limits, taken in [
        ({"max_files": 3}, 3),
        ({"max_rows": 20}, 2),
        ({"max_rows": 29}, 2),
        ({"max_rows": 1}, 1),
        ({"max_bytes": 3 * size}, 3),
        ({"max_bytes": 1}, 1),
    ]:
        planned = reader.plan(None, EpochSettings(**limits), None)
        assert (len(planned.files), planned.limited) == (taken, True), limits
    for limits in ({"max_files": 4}, {"max_rows": 40}, {"max_bytes": 4 * size}):
        planned = reader.plan(None, EpochSettings(**limits), None)
        assert (len(planned.files), planned.limited) == (4, False), limits


# -- files that cannot be read


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (lambda data: data[:0], "is empty"),
        (lambda data: data[:2], "is not a readable Parquet file"),
        (lambda data: data[:-100], "is not a readable Parquet file"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "is not a readable Parquet file"),
        # Arrow raises OSError for a footer that it cannot decode, as it does for storage that fails.
        (lambda data: data[:-60] + b"\xff" * 52 + data[-8:], "is not a readable Parquet file"),
    ],
    ids=["empty", "tiny", "truncated", "length", "footer"],
)
def test_what_is_not_parquet_is_bad_input(landing, spoil, messages):
    file = put(landing, "1", ns=1)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(InputError, match=messages) as refused:
        reader_of(landing).plan(None, LIMITS, None)
    assert str(file) in str(refused.value) and "Repair it" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "data", "looks_like", "step"),
    [
        ("1.json", b'{"a": 1}\n', "JSON", 'Say format="json"'),
        ("1.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0), "JSON", 'Say format="json"'),
        ("1.ndjson", b"", "JSON", 'Say format="json"'),
        ("1.csv", b"a,b\n1,2\n", "CSV", 'Say format="csv"'),
        ("1.CSV.zst", b"\x28\xb5\x2f\xfd" + b"\0" * 99, "CSV", 'Say format="csv"'),
        ("1.avro", b"Obj\x01" + b"\0" * 99, "Avro", 'Say format="avro"'),
        ("part-0", b'\n [{"a": 1}]', "JSON", 'Say format="json"'),
        ("1.parquet", b"\xef\xbb\xbf" + b'{"a": 1}\n' * 99, "JSON", 'Say format="json"'),
        ("1.parquet", gzip.compress(b"PAR1", mtime=0), "compressed data", "ending of their compression"),
        ("1.orc", b"ORC" + b"\0" * 99, "ORC", "Convert it to Parquet"),
        ("1.feather", b"ARROW1" + b"\0" * 99, "Arrow", "Convert it to Parquet"),
        ("1.xlsx", b"PK\x03\x04" + b"\0" * 99, "a ZIP archive", "Convert it to Parquet"),
    ],
)
def test_a_file_of_another_format_is_said_to_look_like_that(landing, name, data, looks_like, step):
    (landing / name).write_bytes(data)
    reader = FilesReader(FileSource("{landing}/*"), f"{landing}/*")
    with pytest.raises(InputError) as refused:
        reader.plan(None, LIMITS, None)
    error = refused.value
    assert error.what == f"The input file {name} cannot be read as Parquet: it looks like {looks_like}."
    assert (
        error.where == str(landing / name)
        and step in str(error.next)
        and error.files == reader.blamed(reader.look(None).fresh[0])
    )


def test_parquet_is_read_whatever_its_name_is(landing):
    put(landing, "1", ns=1).rename(landing / "1.csv")
    planned = FilesReader(FileSource("{landing}/*"), f"{landing}/*").plan(None, LIMITS, None)
    assert [file.rows for file in planned.files] == [1]


@pytest.mark.parametrize("format", ["csv", "json", "avro"])
def test_parquet_that_is_decoded_as_another_format_is_said_to_look_like_parquet(landing, tmp_path, format):
    put(landing, "1", ns=1)
    landed = LandedFiles(str(tmp_path / "landed"), "files", None, tmp_path)
    reader = FilesReader(FileSource("{landing}/*", format=format), f"{landing}/*", landed=landed)
    with pytest.raises(InputError, match=r"1\.parquet cannot be read as .* it looks like Parquet") as refused:
        reader.plan(None, LIMITS, None)
    assert 'Say format="parquet"' in str(refused.value.next)


def test_a_footer_longer_than_the_first_read_is_read_whole(landing, monkeypatch):
    put(landing, "1", ns=1, rows=7, columns={f"column_{at}": [at] * 7 for at in range(50)})
    for tail in (8, 100, parquet_files._TAIL):
        monkeypatch.setattr(parquet_files, "_TAIL", tail)
        planned = reader_of(landing).plan(None, LIMITS, None)
        assert planned.rows == 7 and len(planned.schema) == 50


def test_a_file_that_vanishes_before_its_footer_is_read_is_named(landing, monkeypatch):
    file, reader = put(landing, "1", ns=1), reader_of(landing)
    listed = list(reader.landing.files())
    file.unlink()
    monkeypatch.setattr(reader.landing, "files", lambda: iter(listed))
    with pytest.raises(InputError, match=r"1\.parquet vanished"):
        reader.plan(None, LIMITS, None)


class Failing(pafs.FileSystemHandler):
    """A local file system whose files cannot be opened."""

    def __init__(self, error: OSError) -> None:
        self.error, self.real = error, pafs.LocalFileSystem()

    def get_type_name(self) -> str:
        return "failing"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self.real.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self.real.get_file_info(selector)

    def open_input_file(self, path: str) -> pa.NativeFile:  # noqa: ARG002 - pyarrow calls it so
        raise self.error

    def _refuse(self, *arguments) -> None:
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = move = _refuse
    normalize_path = open_append_stream = open_input_stream = open_output_stream = _refuse


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), TimeoutError(110, "Timed out"), OSError("AWS Error SLOW_DOWN")]
)
def test_storage_that_fails_is_no_fault_of_the_file(landing, error):
    file, reader = put(landing, "1", ns=1), reader_of(landing)
    reader.landing.parquet._fs = pafs.PyFileSystem(Failing(error))
    with pytest.raises(TransientError) as failed:
        reader.plan(None, LIMITS, None)
    message = str(failed.value)
    assert str(file) in message and str(error.args[-1]) in message and "Look at the storage" in message


# -- the directory


def test_a_directory_that_is_gone_is_reported_but_one_may_look(landing):
    put(landing, "1", ns=1)
    position = read(reader_of(landing))
    shutil.rmtree(landing)
    reader = reader_of(landing)

    assert (reader.landing.exists(), reader.look(position).fresh) == (False, ())
    for look in (lambda: reader.check(position), lambda: reader.plan(position, LIMITS, None)):
        with pytest.raises(InputError, match="The landing directory is gone, of which 1 file was read"):
            look()

    landing.mkdir()
    reader.check(position)
    assert reader.landing.exists() and reader.plan(position, LIMITS, None).files == ()


@pytest.mark.parametrize("position", [None, "nothing read"])
def test_a_directory_that_is_yet_to_come_is_warned_of_once(landing, position):
    landing.rmdir()
    reader = reader_of(landing)
    position = reader.advance(None, EMPTY_SLICE) if position else None
    with capture_logs() as logs:
        for _ in range(3):
            reader.check(position)
            assert reader.look(position).fresh == ()
            assert reader.plan(position, LIMITS, None).files == ()
    assert [line["event"] for line in logs] == [f"landing directory does not exist yet: {landing}"]


def test_an_object_store_has_no_directories_to_miss(landing, monkeypatch):
    put(landing, "1", ns=1)
    reader = reader_of(landing)
    position = read(reader)
    shutil.rmtree(landing)
    here = reader.landing
    monkeypatch.setattr(source_directory, "_OBJECT_STORES", {here._fs.type_name})
    monkeypatch.setattr(here, "_path", here._path.removeprefix("/"))  # of which the first part is the bucket
    monkeypatch.chdir("/")
    reader.check(position)
    monkeypatch.setattr(here, "_path", "no-such-bucket/landing")
    monkeypatch.setattr(here, "_bucket_seen", False)
    with pytest.raises(InputError, match="landing directory is gone"):
        reader.check(position)


def test_another_directory_is_refused_because_the_same_names_would_count_as_read(landing, tmp_path):
    put(landing, "1", ns=1)
    position = read(reader_of(landing))
    other = tmp_path / "other"
    other.mkdir()

    for arrive in (lambda: None, lambda: put(other, "2", ns=2), lambda: put(other, "1", ns=2)):
        arrive()
        for look in ("check", "plan"):
            with pytest.raises(InputError) as refused:
                reader = reader_of(other)
                reader.check(position) if look == "check" else reader.plan(position, LIMITS, None)
            message = str(refused.value)
            assert str(landing) in message and str(other) in message
            assert "taken as read already" in message and "rename the source" in message

    assert [file.name for file in reader_of(other).look(position).fresh] == ["2.parquet"], "one may look"
    reader_of(other).check(old_form(position))


def test_a_directory_that_moved_as_a_whole_is_the_same(landing, tmp_path):
    put(landing, "1", ns=1)
    put(landing, "2", ns=2)
    position = read(reader_of(landing))
    (landing / "1.parquet").unlink()
    moved = landing.rename(tmp_path / "moved")
    put(moved, "3", ns=3)
    reader = reader_of(moved)
    with capture_logs() as logs:
        reader.check(position)
        reader.check(position)
        planned = reader.plan(position, LIMITS, None)
    assert [line["event"] for line in logs] == ["the landing directory has moved"]
    assert names(planned) == ["3"]
    assert reader.advance(position, planned)["directory"] == str(moved)


def test_a_directory_and_its_uri_are_one(landing):
    put(landing, "1", ns=1)
    position = read(reader_of(landing))
    uri = FilesReader(FileSource("x"), f"file://{landing}/*.parquet")
    uri.check(position)
    assert uri.advance(None, EMPTY_SLICE)["directory"] == str(landing)


@pytest.mark.parametrize("place", ["key:secret@bucket/landing", "bucket/landing?secret_key=secret"])
def test_a_secret_in_a_uri_is_refused_and_not_repeated(place):
    with pytest.raises(ConfigurationError, match="holds credentials or options") as refused:
        FilesReader(FileSource("x"), f"s3://{place}/*.parquet")
    assert "secret@" not in str(refused.value) and "=secret" not in str(refused.value)


# -- names


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("day.parquet", "day.parquet"),
        ("day[1].parquet", "day\\[1\\].parquet"),
        ("a{1,2}.parquet", "a\\{1,2\\}.parquet"),
        ("b*?.parquet", "b\\*\\?.parquet"),
        ("c\\d.parquet", "c\\\\d.parquet"),
        ("e f%20+#.parquet", "e f%20+#.parquet"),
    ],
)
def test_spark_gets_a_path_that_it_takes_literally_and_people_a_readable_one(landing, name, escaped):
    put(landing, name.removesuffix(".parquet"), ns=1)
    reader = reader_of(landing)
    (file,) = reader.plan(None, LIMITS, None).files
    assert reader.uri(file) == f"{landing}/{name}"
    assert reader.landing.spark_path(file) == f"{landing}/{escaped}"


def test_a_directory_with_braces_is_escaped_too(tmp_path):
    landing = tmp_path / "{landing}"
    landing.mkdir()
    put(landing, "1", ns=1)
    reader = reader_of(landing)
    assert reader.landing.spark_path(reader.look(None).fresh[0]) == f"{tmp_path}/\\{{landing\\}}/1.parquet"


def test_a_colon_which_spark_cannot_read_is_refused_by_name_when_its_turn_comes(landing):
    put(landing, "09h", ns=1)
    put(landing, "10:00", ns=1)
    reader = reader_of(landing)
    assert len(reader.look(None).fresh) == 2, "one may look"
    planned = reader.plan(None, EpochSettings(max_files=1), None)
    assert (names(planned), planned.limited) == (["09h"], True)
    with pytest.raises(InputError, match=r"10:00\.parquet has a colon in its name"):
        reader.plan(None, LIMITS, None)


# -- delivered again after it was read


NOTHING = {"n": pa.array([], pa.int64())}


def test_a_file_that_was_read_empty_and_is_delivered_full_is_named_and_not_read(landing):
    put(landing, "1", ns=10, columns=NOTHING)
    put(landing, "2", ns=20)
    reader = reader_of(landing)
    position = read(reader)
    assert reader.look(position).again == ()
    put(landing, "1", ns=30, rows=5)
    arrived = reader.check(position)
    assert ([file.name for file in arrived.again], arrived.fresh) == (["1.parquet"], ())
    for _ in range(2):
        with capture_logs() as logs:
            reader.say_again(arrived)
        assert [(entry["log_level"], entry["files"]) for entry in logs] == (
            [("warning", "1 file: 1.parquet")] if not _ else []
        )
    put(landing, "3", ns=40)
    assert names(reader.plan(position, LIMITS, None)) == ["3"]
    (again,) = reader.look(read(reader, position)).again
    assert again.name == "1.parquet", "it is named for as long as it lies there"


def test_a_file_of_another_size_is_another_file_whatever_its_time_says(landing):
    put(landing, "1", ns=10, columns=NOTHING)
    position = read(reader_of(landing))
    put(landing, "1", ns=10, rows=500)
    assert [file.name for file in reader_of(landing).look(position).again] == ["1.parquet"]
    older = {key: value for key, value in position.items() if key != "seen_bytes"}
    assert reader_of(landing).look(older).again == (), "an older Weir has not noted it"
    put(landing, "2", ns=20)
    assert read(reader_of(landing), older)["seen_bytes"][0] is None
    oldest = {key: value for key, value in older.items() if key not in ("seen_ns", "directory", "below_newest_ns")}
    put(landing, "1", ns=11, rows=1)
    assert reader_of(landing).look(oldest).again == ()


def test_a_file_below_the_floor_that_was_delivered_again_is_named_too(landing, floored):
    put(landing, "20", ns=90)
    assert [file.name for file in reader_of(landing, below_floor="warn").check(floored).again] == ["20.parquet"]


def test_looking_for_input_lists_the_directory_once(landing, floored, monkeypatch):
    listings = []
    real = LandingDirectory.files
    monkeypatch.setattr(LandingDirectory, "files", lambda landing: listings.append(1) or real(landing))
    put(landing, "60", ns=60)
    reader_of(landing).check(floored)
    assert len(listings) == 1
