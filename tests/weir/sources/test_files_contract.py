"""Files are read by the engine itself, and keep what every source keeps, as far as one without a connector can."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weir import Batch, Lag, Opening, Part, Planned, Rejected, Source, SourceCapabilities, files
from weir.settings.sections import EpochSettings
from weir.sources.files import FilesReader
from weir.sources.landed_files import LandedFiles
from weir.sources.positions import has_read
from weir.sources.slices import Slice, SourceFile
from weir.testing import SourceContract, SourceSystem

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
IN_A_FILE = 3  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSource(Source):
    """Files as the engine's reader sees them, asked as a connector is."""

    root: str
    format: str

    @property
    def capabilities(self) -> SourceCapabilities:
        schema = None if self.format == "parquet" else SCHEMA
        return SourceCapabilities(files=files(f"{self.root}/in/*", format=self.format, schema=schema))

    def open(self, opening: Opening) -> Listed:  # noqa: ARG002
        return Listed(self)


class Listed:
    def __init__(self, source: ListedSource) -> None:
        self._source = source

    def _reader(self, upto: dict | None = None) -> FilesReader:
        root = Path(self._source.root)
        landed = LandedFiles(f"{root}/storage", self._source.name, None, root / "work")
        only = None if upto is None else partial(has_read, upto["read"])
        return FilesReader(self._source, f"{root}/in/*", only=only, landed=landed)

    def begin(self, start: str) -> dict:  # noqa: ARG002 - every start is the earliest
        return {"read": None}

    def plan(self, position, limits, upto=None, hold=()) -> Planned:  # noqa: ARG002 - its only partition is never held
        reader, read = self._reader(upto), position["read"]
        most = EpochSettings(max_files=limits.parts, max_rows=limits.rows, max_bytes=limits.bytes)
        planned = reader.plan(read, most, None)
        after = reader.advance(read, planned) if planned.files else read
        return Planned(tuple(map(_part, planned.files)), {"read": after}, planned.limited, {"": not planned.limited})

    def read(self, part: Part) -> Iterator[Batch]:
        reader = self._reader()
        planned = reader.plan_again({"files": [part.place]}, None)
        bad = tuple(Rejected(row.row, row.reason, row.raw) for row in planned.bad_rows)
        for file in planned.files:
            rows = [table for _, table in reader.batches(file, planned.schema, 2)]
            yield Batch(pa.concat_tables([planned.schema.empty_table(), *rows]), bad)

    def verify(self, parts) -> None:
        self._reader().verify(Slice(tuple(map(_file, parts)), False, None, None))

    def lag(self, position) -> Lag:
        return self._reader().lag(position["read"])

    def where(self, part: Part) -> str:
        return self._reader().uri(_file(part))

    def committed(self, position) -> None: ...

    def close(self) -> None: ...


def _part(file: SourceFile) -> Part:
    place = {name: value for name, value in asdict(file).items() if name in ("name", "size", "mtime_ns", "rows")}
    return Part(file.name, "", place, file.rows, file.size)


def _file(part: Part) -> SourceFile:
    return SourceFile(**part.place)


class Directory(SourceSystem):
    starts_at_times = False
    cuts = False
    position_bytes = 8192

    def __init__(self, root: Path, format: str) -> None:
        self._root, self._format, self._rows, self._files = root, format, 0, 0
        (root / "in").mkdir(parents=True)

    @property
    def source(self) -> ListedSource:
        return ListedSource(name="listed", root=str(self._root), format=self._format, on_bad="quarantine")

    def append(self, count: int) -> None:
        numbers = range(self._rows, self._rows + count)
        for at in range(0, count, IN_A_FILE):
            self._write([(number, f"t{number}") for number in numbers[at : at + IN_A_FILE]])
        self._rows += count

    def append_bad(self) -> None:
        if self._format == "parquet":
            raise NotImplementedError
        self._write([("no number", "bad")])

    def alter(self) -> None:
        self._files = 0
        self._write([(7, "altered")])

    def _write(self, rows: list[tuple]) -> None:
        hidden = self._root / "in" / f".{self._files:05}"
        if self._format == "parquet":
            pq.write_table(pa.table(list(zip(*rows, strict=True)), schema=SCHEMA), hidden)
        else:
            with hidden.open("w", newline="") as file:
                csv.writer(file).writerows([SCHEMA.names, *rows])
        hidden.rename(self._root / "in" / f"{self._files:05}")
        self._files += 1


@pytest.mark.parametrize("format", ["parquet", "csv"])
class TestFiles(SourceContract):
    # A directory has one beginning and one partition, and nobody seeks in it.
    test_it_begins_where_it_is_told = None
    test_it_begins_at_a_time = None
    test_a_position_that_is_none_is_refused = None
    test_a_partition_that_is_held_is_not_read = None

    @pytest.fixture
    def system(self, tmp_path: Path, format: str) -> Directory:
        return Directory(tmp_path / format, format)
