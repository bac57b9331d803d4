"""Files of CSV and JSON in whole runs: landed as Parquet, bad rows by line, read again as they were."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError
from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, chain, delta, files, kafka
from weir.code_changes.structure import structure
from weir.definition import FileSource, Verdict
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill, plan
from weir.run import fsck
from weir.run.run import RunOptions, run

SCHEMA = {"id": pa.string(), "n": pa.int64(), "at": pa.timestamp("us", "UTC")}


def of(source: FileSource) -> Pipeline:
    sums = aggregate("sums", source, key="id", sink=delta.append("sums"), n=agg.count(), total=agg.sum("n"))
    return Pipeline("decoded", (sums,), max_parallelism=4)


def site_of(root: Path, source: FileSource, **options: str) -> Site:
    site_there = Site(root, {"WEIR_SPARK__PARALLELISM": "2", **options}, of(source), __name__)
    site_there.landing.mkdir(parents=True)
    return site_there


def epochs(site: Site) -> list[Any]:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))


def totals(site: Site) -> dict[str, tuple[int, int]]:
    newest = pl.from_pandas(site.table("sums")).sort("epoch").unique("id", keep="last")
    return {id: (n, total) for id, n, total in newest.select("id", "n", "total").iter_rows()}


def landed(site: Site) -> list[Path]:
    return sorted((site.storage / "landed").rglob("*.parquet"))


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "inferred"])
def test_csv_is_read_in_slices_and_nothing_that_was_landed_stays(tmp_path, declared):
    source = files("{landing}/*.csv*", format="csv", event_time="at", schema=SCHEMA if declared else None)
    site = site_of(tmp_path, source, WEIR_EPOCH__MAX_ROWS="5")
    for number in range(4):
        lines = [f"k{n % 2},{n},2026-05-01T12:0{number}:00Z" for n in range(4)]
        text = "id,n,at\n" + "\n".join(lines) + "\n"
        (site.landing / f"{number}.csv").write_text(text)
    (site.landing / "4.csv.gz").write_bytes(gzip.compress(b"id,n,at\nk0,100,2026-05-01T13:00:00Z\n"))
    done = epochs(site)
    assert len(done) == 4, "a file that has no room waits, decoded, for the next slice"
    assert totals(site) == {"k0": (9, 108), "k1": (8, 16)} and landed(site) == []
    assert done[-1].checkpoint.offsets["files"]["newest"] == 1777640400_000000
    assert fsck.examine(site.pipeline, site.settings).findings == ()


@pytest.mark.parametrize("options", [{}, {"evolve": "add"}, {"schema": {"id": pa.string(), "n": pa.int64()}}], ids=str)
@pytest.mark.parametrize("format", ["csv", "json", "avro"])
def test_a_file_without_rows_is_one_as_others(tmp_path, format, options):
    site = site_of(tmp_path, files("{landing}/*", format=format, **options))
    record = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "string"}, {"name": "n", "type": "long"}],
    }
    empty = {"csv": [b"", b"\n\n", b"id,n"], "json": [b"", b"\n \r\n\n"], "avro": [avro(record, [])]}[format]
    full = {"csv": b"id,n\na,1\n", "json": b'{"id": "a", "n": 1}\n', "avro": avro(record, [{"id": "a", "n": 1}])}[
        format
    ]
    is_told = "schema" in options or format == "avro"
    for number, data in enumerate([*(empty if is_told else ()), full, *empty, full]):
        (site.landing / f"{number}.{format}").write_bytes(data)
        epochs(site)
    assert totals(site) == {"a": (2, 2)} and landed(site) == []


def avro(schema: Any, rows: list[Any]) -> bytes:
    fastavro.writer(file := io.BytesIO(), fastavro.parse_schema(schema), rows)
    return file.getvalue()


def test_bad_lines_are_set_aside_with_file_line_and_reason(tmp_path):
    source = files("{landing}/*.json", format="json", schema=SCHEMA, event_time="at", on_bad="quarantine")
    site = site_of(tmp_path, source)
    good = json.dumps({"id": "a", "n": 1, "at": "2026-05-01T12:00:00Z"})
    (site.landing / "1.json").write_text(f"{good}\nno json\n{good}\n" + '{"id": "a", "n": "many"}\n')
    epochs(site)
    assert totals(site) == {"a": (2, 2)}
    bad = pl.from_pandas(site.table("sums_quarantine")).sort("_weir_row").to_dicts()
    assert [(row["_weir_file"], row["_weir_row"], row["_weir_gate"]) for row in bad] == [
        ("1.json", 2, "on_bad"),
        ("1.json", 4, "on_bad"),
    ]
    assert bad[0]["_weir_raw"] == "no json" and all(row["_weir_reason"] for row in bad)

    strict = replace(site, root=tmp_path / "strict", pipeline=of(replace(source, on_bad="fail")))
    strict.landing.mkdir(parents=True)
    (strict.landing / "1.json").write_text(f"{good}\nno json\n")
    with pytest.raises(InputError, match=r"1 row of 1\.json cannot be decoded, the first at 2"):
        epochs(strict)
    assert landed(strict) == []
    (strict.landing / "1.json").write_text(f"{good}\n")
    epochs(strict)
    assert totals(strict) == {"a": (1, 1)}


CHANGED = {
    "another type": (
        {"n": pa.float64()},
        "The source 'files' declares 'n' as double; what it has read before has int64",
    ),
    "a column gone": ({"at": None}, "The source 'files' declares no column 'at' any more, which"),
}


@pytest.mark.parametrize("on_bad", ["fail", "quarantine"])
@pytest.mark.parametrize("name", CHANGED)
def test_declared_columns_that_do_not_fit_what_was_read_are_refused_before_anything_is_read(tmp_path, name, on_bad):
    """By a plan and a run alike, whether files wait or not; and no good file is set aside."""
    source = files("{landing}/*.csv", format="csv", schema=SCHEMA, on_bad=on_bad)
    site = site_of(tmp_path, source)
    (site.landing / "1.csv").write_text("id,n,at\na,1,2026-05-01T12:00:00Z\n")
    epochs(site)
    change, what = CHANGED[name]
    columns = {column: type for column, type in {**SCHEMA, **change}.items() if type is not None}
    changed = replace(site, pipeline=of(replace(source, schema=pa.schema(columns))))
    for waits in (False, True):
        if waits:
            (site.landing / "2.csv").write_text("id,n,at\na,2,2026-05-01T12:00:00Z\n")
        planned = plan.plan(changed.pipeline, changed.settings, executor=InMemoryExecutor())
        about = [(finding.aspect, finding.verdict) for finding in planned.findings if finding.kind == "source"]
        assert about == [("columns", Verdict.REFUSED)]
        with pytest.raises(PipelineError, match=what):
            epochs(changed)
    assert len(epochs(site)) == 1 and totals(site) == {"a": (2, 3)}


def test_declared_columns_may_widen_and_go_where_columns_may_come(tmp_path):
    source = files("{landing}/k=*/*.csv", format="csv", schema={**SCHEMA, "n": pa.int32()}, evolve="add")
    site = site_of(tmp_path, source)
    (site.landing / "k=1").mkdir()
    (site.landing / "k=1" / "1.csv").write_text("id,n,at\na,1,2026-05-01T12:00:00Z\n")
    epochs(site)
    changed = replace(
        site, pipeline=of(replace(source, schema=pa.schema({"id": pa.string(), "n": pa.int64(), "more": pa.bool_()})))
    )
    planned = plan.plan(changed.pipeline, changed.settings, executor=InMemoryExecutor())
    findings = [(finding.verdict, finding.what) for finding in planned.findings if finding.kind == "source"]
    assert findings == [(Verdict.COMPATIBLE, "'at' is declared no more: it is null from here on")]
    (site.landing / "k=1" / "2.csv").write_text("id,n,more\na,2,true\n")
    assert len(epochs(changed)) == 1 and totals(changed) == {"a": (2, 3)}


def test_columns_that_a_topic_or_a_chain_declares_are_compared_too(tmp_path):
    before = replace(files("{landing}/*.csv", format="csv", schema=SCHEMA), name="clicks")
    site = site_of(tmp_path, before)
    (site.landing / "1.csv").write_text("id,n,at\na,1,2026-05-01T12:00:00Z\n")
    head = replace(epochs(site)[-1].checkpoint, offsets={"clicks": {"kind": "kafka"}})
    columns = {"id": pa.string(), "n": pa.float64()}
    topic = kafka("clicks", servers="localhost:1", schema=columns, timestamp="at")
    for source in (topic, chain(kafka("old", servers="localhost:1", schema=SCHEMA), topic, name="clicks")):
        stopping = [finding for finding in structure(of(source), head) if finding.verdict.stops]
        assert [(finding.name, finding.aspect) for finding in stopping] == [("clicks", "columns")]
        assert stopping[0].what == "The source 'clicks' declares 'n' as double; what it has read before has int64."


def test_a_file_that_is_bad_itself_is_set_aside(tmp_path):
    site = site_of(tmp_path, files("{landing}/*.csv", format="csv", schema=SCHEMA, on_bad="quarantine"))
    (site.landing / "1.csv").write_text("nothing,of,it\n")
    (site.landing / "2.csv").write_text("id,n,at\na,2,2026-05-01T12:00:00Z\n")
    epochs(site)
    assert totals(site) == {"a": (1, 2)}


def test_a_drill_decodes_the_recorded_files_again(tmp_path):
    source = files("{landing}/*.csv", format="csv", schema=SCHEMA, event_time="at")
    site = site_of(tmp_path, source, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    for number in range(2):
        (site.landing / f"{number}.csv").write_text(f"id,n,at\na,{number},2026-05-01T12:00:00Z\n")
        epochs(site)
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and not done.problems, done


def test_a_drill_leaves_out_the_same_rows_too_far_in_the_future(tmp_path):
    source = files(
        "{landing}/*.csv", format="csv", schema=SCHEMA, event_time="at", max_future="1d", on_bad="quarantine"
    )
    site = site_of(tmp_path, source, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    for number in range(2):
        (site.landing / f"{number}.csv").write_text(
            f"id,n,at\na,{number},2026-05-01T12:00:00Z\na,x,2026-05-01T12:00:00Z\na,9,2126-05-01T12:00:00Z\n"
        )
        epochs(site)
    (aside,) = site.storage.glob("tables/*_quarantine")
    told = pl.read_delta(str(aside)).select("_weir_file", "_weir_row").sort(pl.all()).rows()
    assert told == [(f"{number}.csv", line) for number in range(2) for line in (3, 4)]
    assert totals(site) == {"a": (2, 1)}
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and not done.problems, done


def test_a_file_that_changes_while_it_is_read_declines_the_epoch(tmp_path):
    source = files("{landing}/*.csv", format="csv", schema=SCHEMA)
    site = site_of(tmp_path, source)
    (site.landing / "1.csv").write_text("id,n,at\na,1,2026-05-01T12:00:00Z\n")

    class Changing(InMemoryExecutor):
        def run(self, *arguments: Any) -> Any:
            acks = super().run(*arguments)
            (site.landing / "1.csv").write_text("id,n,at\na,2,2026-05-01T12:00:00Z\na,3,2026-05-01T12:00:00Z\n")
            return acks

    with pytest.raises(InputError, match="changed while an epoch was reading it"):
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=Changing()))
    epochs(site)
    assert totals(site) == {"a": (2, 5)} and landed(site) == []


def test_what_does_not_fit_the_format_is_refused_when_the_source_is_defined():
    for arguments, what in (
        ({"format": "xml"}, "There is no format 'xml'"),
        ({"format": "csv", "separator": ";"}, "no option 'separator'"),
        ({"delimiter": ";"}, "Parquet files say themselves"),
        ({"schema": SCHEMA}, "Parquet files say themselves"),
    ):
        with pytest.raises(PipelineError, match=what):
            files("{landing}/*", **arguments)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_columns_of_nested_directories_are_columns_like_others(tmp_path, format):
    """Two files of one name, in epochs of their own: the second is read by the columns of the first."""
    source = files(f"{{landing}}/id=*/*.{format}", format=format, event_time="at", partitions={"id": "string"})
    site = site_of(tmp_path, source, WEIR_EPOCH__MAX_FILES="1")
    rows = pl.DataFrame({"n": [1, 2], "at": ["2026-05-01T12:00:00Z", "2026-05-01T12:01:00Z"]})
    for id in ("07", "a b"):
        directory = site.landing / f"id={id}"
        directory.mkdir()
        if format == "csv":
            rows.write_csv(directory / "1.csv")
        else:
            rows.with_columns(pl.col("at").str.to_datetime(time_zone="UTC")).write_parquet(directory / "1.parquet")
    done = epochs(site)
    assert len(done) == 2
    assert totals(site) == {"07": (2, 3), "a b": (2, 3)} and landed(site) == []
    assert done[-1].checkpoint.offsets["files"]["seen"] == ["id=07/1." + format, "id=a b/1." + format]
    assert fsck.examine(site.pipeline, site.settings).findings == ()


def test_avro_is_read_with_the_columns_that_it_has(tmp_path):
    site = site_of(tmp_path, files("{landing}/*.avro", format="avro", event_time="at"))
    at = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": "id", "type": "string"}, {"name": "n", "type": ["null", "long"]}, {"name": "at", "type": at}]
    schema = fastavro.parse_schema({"type": "record", "name": "Row", "fields": fields})
    with (site.landing / "1.avro").open("wb") as file:
        rows = [{"id": "a", "n": n, "at": datetime(2026, 5, 1, 12, tzinfo=UTC)} for n in (1, None, 3)]
        fastavro.writer(file, schema, rows, codec="deflate")
    assert len(epochs(site)) == 1
    assert totals(site) == {"a": (3, 4)} and landed(site) == []


def test_files_beside_one_that_asks_for_too_much_and_one_of_another_kind_are_read(tmp_path):
    columns = SCHEMA | {"items": pa.list_(pa.list_(pa.int32()))}
    site = site_of(tmp_path, files("{landing}/*.avro", format="avro", schema=columns, on_bad="quarantine"))
    at = {"type": "long", "logicalType": "timestamp-micros"}
    lists = {"type": "array", "items": {"type": "array", "items": "int"}}
    many = [[]] * 10_000_000
    for name, kind, items in (
        ("1", lists, many),
        ("2", {"type": "map", "values": "int"}, {"a": 1}),
        ("3", lists, [[1]]),
    ):
        fields = [("id", "string"), ("n", "long"), ("at", at), ("items", ["null", kind])]
        schema = {"type": "record", "name": "Row", "fields": [{"name": of, "type": type} for of, type in fields]}
        row = {"id": "a", "n": int(name), "at": datetime(2026, 5, 1, 12, tzinfo=UTC), "items": items}
        with (site.landing / f"{name}.avro").open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(schema), [row, row | {"items": None}], codec="deflate")
    epochs(site)
    assert totals(site) == {"a": (3, 8)}
    bad = pl.from_pandas(site.table("sums_quarantine")).to_dicts()
    assert [(row["_weir_file"], row["_weir_row"]) for row in bad] == [("2.avro", 1)]
    assert "'items' is no list" in bad[0]["_weir_reason"]


def test_a_plan_says_what_other_format_the_pattern_names_before_a_file_waits(tmp_path):
    def said(source: FileSource, folder: str) -> list[str]:
        site = site_of(tmp_path / folder, source)
        found = plan.plan(site.pipeline, site.settings, executor=InMemoryExecutor()).findings
        return [f"{each.what} {each.next}" for each in found if (each.kind, each.aspect) == ("source", "files")]

    assert said(files("{landing}/*.jsonl.gz", event_time="at", schema=None), "other") == [
        '{landing}/*.jsonl.gz names files of JSON, and they are read as format="parquet" '
        'Say format="json" in files(...) if that is so.'
    ]
    assert said(files("{landing}/*.jsonl.gz", format="json", event_time="at", schema=SCHEMA), "same") == []
    assert said(files("{landing}/*", event_time="at"), "any") == []
