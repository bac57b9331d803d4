"""Files that lack columns or call them otherwise, of a source that takes new columns."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fastavro
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import InputError
from tests.recovery.harness import Site
from weir import Pipeline, delta, files, select
from weir.connectors.formats.decoding import decode
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

FORMATS = ["parquet", "csv", "json", "avro"]
DECLARED = pa.schema({"a": pa.string(), "b": pa.string(), "n": pa.int64()})


def write(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        case ".csv":
            path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
        case ".json":
            path.write_text(json.dumps(row) + "\n")
        case ".avro":
            types = {name: "long" if isinstance(value, int) else "string" for name, value in row.items()}
            fields = [{"name": name, "type": type} for name, type in types.items()]
            data = io.BytesIO()
            fastavro.writer(data, fastavro.parse_schema({"type": "record", "name": "R", "fields": fields}), [row])
            path.write_bytes(data.getvalue())


def read(root: Path, form: str, given: dict[str, dict], evolve: str = "add", **options) -> list[dict]:
    """The rows that a pipeline makes of files, an epoch each."""
    given_format = {} if form == "parquet" else {"format": form}
    source = files(f"{{landing}}/**/*.{form}", evolve=evolve, **given_format, **options)
    pipeline = Pipeline("evolving", (select("rows", source, "*", sink=delta.append("rows", evolve="add")),))
    site = Site(root, {"WEIR_EPOCH__MAX_FILES": "1"}, pipeline, "x")
    for name, row in given.items():
        write(site.landing / f"{name}.{form}", row)
    for _ in run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()):
        pass
    return pl.read_delta(str(site.storage / "tables" / "rows")).sort("a").to_dicts()


@pytest.mark.parametrize("form", ["csv", "json", "avro"])
def test_a_declared_column_that_a_file_lacks_is_null(tmp_path, form):
    given = {"1": {"a": "1"}, "2": {"n": 7, "a": "2", "b": "q", "more": "x"}, "3": {"a": "3", "n": 8}}
    rows = read(tmp_path, form, given, schema=DECLARED)
    assert rows == [{"a": "1", "b": None, "n": None}, {"a": "2", "b": "q", "n": 7}, {"a": "3", "b": None, "n": 8}]


@pytest.mark.parametrize("form", ["csv", "json", "avro"])
def test_a_declared_column_may_be_lacking_in_directories_that_say_columns(tmp_path, form):
    given = {"day=2026-01-01/1": {"a": "1"}, "day=2026-01-02/2": {"a": "2", "b": "q", "n": 7}}
    rows = read(tmp_path, form, given, schema=DECLARED, partitions={"day": "string"})
    assert rows == [
        {"a": "1", "b": None, "n": None, "day": "2026-01-01"},
        {"a": "2", "b": "q", "n": 7, "day": "2026-01-02"},
    ]


@pytest.mark.parametrize("form", ["csv", "avro"])
def test_a_file_with_none_of_the_declared_columns_is_refused(tmp_path, form):
    with pytest.raises(InputError, match="'a'"):
        read(tmp_path, form, {"1": {"x": "1"}}, schema=DECLARED)


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_that_comes_back_in_other_capitals_is_refused_by_both_names(tmp_path, form):
    with pytest.raises(InputError) as refused:
        read(tmp_path, form, {"1": {"a": "1", "Id": 1}, "2": {"a": "2", "ID": 20}})
    assert all(part in str(refused.value) for part in (f"2.{form}", "'Id'", "'ID'"))


@pytest.mark.parametrize("evolve", ["add", "fix"])
@pytest.mark.parametrize("form", ["csv", "json", "avro"])
def test_a_declared_column_in_other_capitals_is_refused_by_both_names(tmp_path, form, evolve):
    """Also where new columns are not taken."""
    with pytest.raises(InputError) as refused:
        read(tmp_path, form, {"1": {"a": "1", "B": "x", "n": 1}}, schema=DECLARED, evolve=evolve)
    assert all(part in str(refused.value) for part in (f"1.{form}", "'b'", "'B'"))


def test_a_field_of_json_in_other_capitals_makes_its_line_a_bad_row(tmp_path):
    """Of objects in objects and in lists too; a text that is such a name is none."""
    item = pa.struct({"xY": pa.int64()})
    schema = pa.schema({"a": pa.string(), "Id": pa.int64(), "s": pa.struct({"Ö": pa.int64()}), "l": pa.list_(item)})
    lines = [
        '{"a": "1", "Id": 1, "s": {"Ö": 1}, "l": [{"xY": 1}]}',
        '{"a": "2", "ID": 20}',
        '{"a": "ID"}',
        '{"a": "4", "s": {"ö": 1}}',
        '{"a": "5", "l": [{"XY": 1}]}',
        '{"a": "6", "Id": null, "ID": 7}',
    ]
    text = "\n".join(lines).encode()
    batches = list(decode("json", {}, io.BytesIO(text), schema, "x.json", len(text) + 1))
    assert [value for batch in batches for value in batch.rows.column("a").to_pylist()] == ["1", "ID", "6"]
    assert [(row.number, row.reason) for batch in batches for row in batch.rejected] == [
        (2, "the field 'ID' differs from 'Id' by capitals alone"),
        (4, "the field 's.ö' differs from 's.Ö' by capitals alone"),
        (5, "the field 'l[].XY' differs from 'l[].xY' by capitals alone"),
    ]
