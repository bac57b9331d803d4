"""Dagster's metadata values for pipelines, stages, tables and epochs."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pyarrow as pa
from deltalake import DeltaTable

from state_ops.arrow.frames import schema_from_json
from state_ops.counts import counted
from state_ops.delta import fenced_table
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros
from state_ops.records.checkpoint import Checkpoint
from state_ops.schema.state_schema import StateSchema
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import table_path
from weir.dagster.names import input_key, lookup_key, stage_key, table_key
from weir.definition import MAIN, Input, Pipeline, Source, Stage
from weir.definition.column_lineage import made_of
from weir.definition.sink import Sink
from weir.epoch.model import EpochReport
from weir.sources.positions import Arrivals
from weir.timings import bottleneck

# -- when the definitions load; nothing is read


def of_source(source: Source, resolved: str) -> dict[str, Any]:
    """Return the metadata of a source's definition."""
    return {
        **({"files": dg.MetadataValue.path(resolved)} if source.capabilities.files else {}),
        "event time": source.event_time or "none: no watermark",
        "dagster/uri": resolved,
    }


def of_definition(stage: Stage, storage: Storage) -> dict[str, Any]:
    """Return the metadata of a stage's code."""
    shown: dict[str, Any] = {"key": ", ".join(stage.key) or "none: it is stateless"}
    if stage.order_by:
        shown["order by"] = ", ".join(stage.order_by)
    wheres = [input.where for input in stage.inputs if input.where]
    if wheres:
        shown["where"] = dg.MetadataValue.text("; ".join(wheres))
    columns = [", ".join(input.columns) for input in stage.inputs if input.columns]
    if columns:
        shown["columns"] = dg.MetadataValue.text("; ".join(columns))
    if stage.state is not None:
        fields = StateSchema.of(stage.state).fields
        shown["state per key"] = dg.MetadataValue.table_schema(
            dg.TableSchema(
                [dg.TableColumn(field.name, str(field.type), description=field.description or None) for field in fields]
            )
        )
    if stage.operator.beside is not None:
        shown["looked up in"] = stage.operator.beside.place
    if stage.gates:
        shown["gates"] = dg.MetadataValue.md("\n".join(f"- `{gate.title}`" for gate in stage.gates))
    if stage.has_state:
        shown["state"] = dg.MetadataValue.path(storage.full(f"state/{stage.uid}"))
    return shown


def of_sink(pipeline: Pipeline, sink: Sink, storage: Storage) -> dict[str, Any]:
    """Return the path of a table, or the kind of another sink."""
    if not pipeline.capabilities(sink).has_versions:
        return {"kind": sink.kind, **({} if sink.connection is None else {"connection": sink.connection})}
    path = storage.full(table_path(sink.name))
    return {
        "table": dg.MetadataValue.path(path),
        "dagster/uri": path,
        "dagster/table_name": f"{pipeline.name}.{sink.name}",
    }


# -- as epochs complete


@dataclass
class Tally:
    """Epochs that are shown together: those of one observation, or of a whole run.

    It keeps sums and the newest report, and not all reports, because their positions would add up over a long run.
    """

    epochs: int = 0
    first: CheckpointId | None = None
    newest: EpochReport | None = None
    rows_read: int = 0
    rows_quarantined: int = 0
    bytes_new: int = 0
    bytes_full: int = 0
    slowest_ms: float = 0.0
    stages: dict[str, Counter[str]] = field(default_factory=dict)
    outputs: dict[str, Counter[str]] = field(default_factory=dict)
    caches: dict[str, Counter[str]] = field(default_factory=dict)
    tables: Counter[str] = field(default_factory=Counter)
    publish_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    versions: dict[str, int] = field(default_factory=dict)

    def add(self, report: EpochReport) -> None:
        row = report.checkpoint
        self.epochs, self.newest = self.epochs + 1, report
        self.first = row.id if self.first is None else self.first
        self.rows_read += row.rows_read
        self.rows_quarantined += row.rows_quarantined
        self.bytes_new += row.bytes_new
        self.bytes_full += row.bytes_total
        self.slowest_ms = max(self.slowest_ms, row.ms["to_commit"])
        for uid, stats in row.operators.items():
            self.stages.setdefault(uid, Counter()).update({name: getattr(stats, name) for name in _SUMMED.values()})
            self.outputs.setdefault(uid, Counter()).update(stats.outputs)
            if stats.cache:
                self.caches.setdefault(uid, Counter()).update(stats.cache)
        self.tables.update({item.sink: item.rows for item in report.publications})
        for item in report.publications:
            self.publish_ms[item.sink] = max(self.publish_ms[item.sink], item.ms)
            if item.delta_version is not None:
                self.versions[item.sink] = item.delta_version


_SUMMED = {
    "rows in": "rows_in",
    "rows out": "rows_out",
    "rows dropped": "rows_dropped",
    "rows late": "rows_late",
    "rows duplicate": "rows_duplicate",
    "rows without key": "rows_null_key",
    "rows quarantined": "rows_quarantined",
    "state bytes new": "bytes_new",
}


# Late rows are counted by stage, since one row may be late in several. Dagster can plot each stage's key.
LATE_IN = "rows late in "


def waiting(arrived: Mapping[str, Arrivals]) -> dict[str, int]:
    """Return how much input waits, by source and in its unit; sources that cannot be read are left out."""
    return {f"{of.unit}s waiting in {name}": of.waiting for name, of in arrived.items() if of.problem is None}


def of_epochs(tally: Tally, arrived: Mapping[str, Arrivals]) -> dict[str, Any]:
    """Return an observation of the checkpoint: one epoch, or a few that came fast. Figures that do not add up are the
    newest epoch's.

    Args:
        arrived: By source, what waits.
    """
    report = tally.newest
    assert report is not None, "there is nothing to observe"
    row = report.checkpoint
    phases = {**row.ms, **report.ms}
    shown: dict[str, Any] = {
        "checkpoint": int(row.id),
        "parent": int(row.parent_id) if row.parent_id else "none: the first",
        "epochs": tally.epochs,
        "trigger": row.trigger,
        "reason": row.reason,
        "rows read": tally.rows_read,
        "rows quarantined": tally.rows_quarantined,
        "state bytes": row.bytes_total,
        "state bytes new": tally.bytes_new,
        "state bytes of full snapshots": tally.bytes_full,
        "files": row.files,
        "ms to commit": round(tally.slowest_ms, 1),
        "bottleneck": bottleneck(row.ms) or "none",
        "ms by phase": _table(
            ("phase", "ms"), [(name, round(ms, 1)) for name, ms in phases.items() if name != "to_commit"]
        ),
        "stages": _stages(tally, row),
        "generation": int(row.generation),
    }
    for uid, stats in row.operators.items():
        rows_late = tally.stages[uid]["rows_late"]
        if rows_late or stats.lateness is not None or stats.forgets is not None:
            shown[LATE_IN + uid] = rows_late
    shown |= waiting(arrived)
    for uid, micros in row.watermarks.items():
        shown[f"watermark of {uid}"] = dg.MetadataValue.timestamp(from_micros(micros))
    for item in report.publications:
        if item.delta_version is not None:
            shown[f"Delta version of {item.sink}"] = item.delta_version
    if report.verdicts:
        shown["gates"] = dg.MetadataValue.md(
            "\n".join(
                f"- {'passed' if verdict.passed else '**failed**'}: `{verdict.gate}` on "
                f"{counted(verdict.rows, 'row')} of"
                f" {verdict.stage}"
                for verdict in report.verdicts
            )
        )
    return shown


def _stages(tally: Tally, row: Checkpoint) -> dg.MetadataValue:
    titles = ("rows in", "rows out", "rows late", "state bytes new")
    lines: list[list[str | int]] = [
        [uid, *[sums[_SUMMED[title]] for title in titles], row.operators[uid].bytes_total]
        for uid, sums in tally.stages.items()
        if uid in row.operators
    ]
    return _table(("stage", *titles, "state bytes"), lines)


def of_source_read(row: Checkpoint, name: str, observed: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation of a source: how far it is read, and the columns of its files.

    Args:
        observed: What `backlog.observed` says of it.
    """
    shown: dict[str, Any] = {"checkpoint": int(row.id), **observed}
    if row.inputs.get(name):
        shown["dagster/column_schema"] = _schema_of(schema_from_json(row.inputs[name]), {})
    return shown


def of_stage(tally: Tally, uid: str) -> dict[str, Any]:
    """Return an observation of a stage."""
    assert tally.newest is not None, "there is nothing to observe"
    row = tally.newest.checkpoint
    newest = row.operators[uid]
    shown: dict[str, Any] = {"checkpoint": int(row.id), "epochs": tally.epochs}
    shown |= {title: tally.stages[uid][name] for title, name in _SUMMED.items()}
    shown |= {f"rows out as {name}": tally.outputs[uid][name] for name in newest.outputs}
    shown |= {"rows not applied yet": newest.rows_waiting, "state bytes": newest.bytes_total}
    if newest.entries is not None:
        shown["state entries (estimate)"] = newest.entries
    if newest.ms:
        slowest = [(name, round(ms, 1)) for name, ms in newest.ms.items()]
        shown["ms of the slowest subtask"] = _table(("phase", "ms"), slowest)
    if uid in tally.caches:
        shown["state cache"] = _table(("figure", "count"), list(tally.caches[uid].items()))
    if newest.lookup is not None:
        shown["version of the table"] = newest.lookup.get("version", newest.lookup.get("stamp"))
    if uid in row.watermarks:
        shown["watermark"] = dg.MetadataValue.timestamp(from_micros(row.watermarks[uid]))
    return shown


# -- at the end of a run

NOTHING_TO_DO = {"outcome": "already caught up: no file was waiting, no epoch was needed"}


def of_run(tally: Tally) -> dict[str, Any]:
    """Return a whole run, on the checkpoint's asset."""
    if tally.newest is None:
        return dict(NOTHING_TO_DO)
    last = tally.newest.checkpoint
    return {
        "outcome": f"checkpoints {tally.first} to {last.id}" if tally.epochs > 1 else f"checkpoint {last.id}",
        "checkpoint": int(last.id),
        "epochs": tally.epochs,
        "rows read": tally.rows_read,
        "rows quarantined": tally.rows_quarantined,
        "state bytes": last.bytes_total,
        "state bytes new": tally.bytes_new,
        "state bytes of full snapshots": tally.bytes_full,
    }


def of_stage_run(pipeline: Pipeline, tally: Tally, stage: Stage, storage: Storage) -> dict[str, Any]:
    """Return a whole run, on a stage's asset. The columns are those that its table has now, or those that it hands
    on."""
    if tally.newest is None:
        return dict(NOTHING_TO_DO)
    return of_stage(tally, stage.uid) | _columns(pipeline, stage, tally.newest, storage)


def of_sink_now(
    pipeline: Pipeline,
    head: Checkpoint | None,
    stage: Stage,
    sink: Sink,
    storage: Storage,
    delta_version: int | None = None,
    columns: Mapping[str, Mapping[str, pa.Schema]] | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Return the metadata of a sink at a checkpoint, and the version of its data.

    Args:
        delta_version: The version of its table; None: the newest. A later epoch may have written to it by now.
        columns: As in `EpochReport`; None: tables alone tell those of stages before.

    Returns:
        The metadata, and the version of the data: the same for the same rows. Of a table that is the digest of its
        files' names, so that a rewind gives back the version of before; of other sinks it is the newest checkpoint
        with rows for them. None: it has none yet.
    """
    if not pipeline.capabilities(sink).has_versions:
        published = head.published(sink.name) if head is not None else None
        return {}, None if published is None else f"checkpoint {published}"
    handle = _open(storage, sink.name)
    if handle is None:
        return {"outcome": "not made yet: nothing was handed out"}, None
    if delta_version is not None and delta_version < handle.version():
        handle.load_as_version(delta_version)
    files = pa.table(handle.get_add_actions(flatten=True))
    rows, names = _row_count(files), [column.name for column in handle.schema().fields]
    shown: dict[str, Any] = {
        "Delta version": handle.version(),
        "size (MiB)": round(sum(files.column("size_bytes").to_pylist()) / (1 << 20), 3),
        **({} if rows is None else {"dagster/row_count": rows}),
        "dagster/column_schema": _schema(handle, _descriptions(stage, sink)),
    }
    if head is not None:
        shown["dagster/column_lineage"] = dg.TableColumnLineage(
            _origins(stage, sink, names, _Before(pipeline, head, storage, columns or {}))
        )
    return shown, hashlib.sha256("\n".join(sorted(files.column("path").to_pylist())).encode()).hexdigest()[:16]


def of_sink_run(tally: Tally, stage: Stage, sink: Sink, seconds: float) -> dict[str, Any]:
    """Return the rows that epochs have added to a sink, and how far behind the sink is.

    A name has its unit in it, since Dagster plots each name by itself.

    Args:
        seconds: How long the epochs took together.
    """
    if tally.newest is None:
        return dict(NOTHING_TO_DO)
    row, rows = tally.newest.checkpoint, tally.tables[sink.name]
    shown: dict[str, Any] = {
        "checkpoint": int(row.id),
        "epochs": tally.epochs,
        "rows added": rows,
        "rows/s": round(rows / seconds, 1) if seconds > 0 else 0.0,
        "epoch to commit (ms)": round(tally.slowest_ms, 1),
    }
    if tally.publish_ms[sink.name]:
        shown["publish (ms)"] = round(tally.publish_ms[sink.name], 1)
    if stage.uid in row.watermarks:
        watermark = from_micros(row.watermarks[stage.uid])
        shown["watermark"] = dg.MetadataValue.timestamp(watermark)
        shown["lag of event time (s)"] = round((row.completed_at - watermark).total_seconds(), 1)
    return shown


@dataclass(frozen=True, slots=True)
class _Before:
    """Finds the columns of the inputs that stages read: an epoch that has ended tells them, or the tables do.

    Attributes:
        handed_out: As `EpochReport.columns`.
    """

    pipeline: Pipeline
    head: Checkpoint
    storage: Storage
    handed_out: Mapping[str, Mapping[str, pa.Schema]]

    def columns(self, input: Input) -> list[str]:
        """Return the columns of a stage's input; none where nothing tells them."""
        if isinstance(input.origin, Source):
            recorded = self.head.inputs.get(input.name)
            return list(schema_from_json(recorded).names) if recorded else []
        told = self.handed_out.get(input.name, {}).get(input.output)
        if told is not None:
            return list(told.names)
        handle = _open_sink(self.pipeline, input.origin, self.storage, input.output)
        return [column.name for column in handle.schema().fields] if handle is not None else []


def _origins(stage: Stage, sink: Sink, names: Sequence[str], before: _Before) -> dict[str, list[dg.TableColumnDep]]:
    """Return by column of a table the columns that it is made from.

    A column of the main output comes from the stage's own column. A column of another output comes from the stage's
    inputs, as the stage has none for it. A column of rows that are set aside comes from the column of the same name.

    names: The table's columns.
    """
    pipeline = before.pipeline
    if sink == stage.sink:
        return {name: [dg.TableColumnDep(stage_key(pipeline, stage.uid), name)] for name in names}
    output = next(output for output, of in stage.sinks_by_output if of == sink)
    aside = next((input for of, input, _ in stage.tables_aside if of == output), None)
    read = stage.inputs if aside is None else (aside,)
    inputs = [*map(before.columns, read)]
    if aside is not None:
        origins = {name: [(0, name)] for name in names if name in inputs[0]}
    else:
        origins = lineage(stage, names, inputs, output)
    assets = [_read_from(pipeline, input) for input in read]
    return {name: [dg.TableColumnDep(assets[side], column) for side, column in of] for name, of in origins.items()}


def _columns(pipeline: Pipeline, stage: Stage, report: EpochReport, storage: Storage) -> dict[str, Any]:
    handle, told = _open_sink(pipeline, stage, storage), report.columns.get(stage.uid, {}).get(MAIN)
    if handle is None and told is None:
        return {}
    texts = _descriptions(stage, stage.sink)
    schema = _schema(handle, texts) if handle is not None else _schema_of(told, texts)
    names = [column.name for column in schema.columns]
    before = _Before(pipeline, report.checkpoint, storage, report.columns)
    upstream = [_read_from(pipeline, input) for input in stage.inputs]
    if stage.operator.beside is not None:
        upstream.append(lookup_key(pipeline, stage.operator.beside))
    deps = {
        name: [dg.TableColumnDep(upstream[side], column) for side, column in columns]
        for name, columns in lineage(stage, names, [*map(before.columns, stage.inputs)]).items()
    }
    return {"dagster/column_schema": schema, "dagster/column_lineage": dg.TableColumnLineage(deps)}


def _descriptions(stage: Stage, sink: Sink | None) -> dict[str, str]:
    """Return by column of a table its description: the author's, or how a window or an aggregate makes the column."""
    texts = stage.operator.texts() if sink == stage.sink else {}
    return texts | (dict(sink.capabilities.descriptions) if sink is not None else {})


def lineage(
    stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str = MAIN
) -> dict[str, list[tuple[int, str]]]:
    """Return by output column the numbers of the inputs and their columns from which it is made.

    Operators declare it. For a function, an output column is taken for the input column of the same name, and other
    columns are left out.

    Args:
        inputs: The columns of each input.
        output: The name of the output with the columns.
    """
    made = {side: made_of(read.columns, inputs[side]) for side, read in enumerate(stage.inputs) if read.columns}
    seen = [list(made.get(side, given)) for side, given in enumerate(inputs)]
    of_input: dict[str, list[tuple[int, str]]] = {}
    for name, read in stage.operator.lineage(stage, columns, seen, output).items():
        origins = ((side, made[side].get(column, []) if side in made else [column]) for side, column in read)
        of_input[name] = list(dict.fromkeys((side, column) for side, of in origins for column in of))
    return {name: read for name, read in of_input.items() if name in columns and read}


def _read_from(pipeline: Pipeline, input: Input) -> dg.AssetKey:
    """Return the asset whose columns a stage reads: a source, a stage, or the table of one of its outputs."""
    if isinstance(input.origin, Stage) and input.output != MAIN:
        sink = input.origin.sink_of(input.output)
        if sink is not None:
            return table_key(pipeline, sink.name)
    return input_key(pipeline, input.origin)


def _open_sink(pipeline: Pipeline, stage: Stage, storage: Storage, output: str = MAIN) -> DeltaTable | None:
    """Return the table that gets what a stage hands out; None: it has none yet, or another sink."""
    sink = stage.sink_of(output)
    return _open(storage, sink.name) if sink is not None and pipeline.capabilities(sink).has_versions else None


def _open(storage: Storage, table: str) -> DeltaTable | None:
    path = table_path(table)
    return fenced_table.open_table(storage, path) if fenced_table.exists(storage, path) else None


def _schema(handle: DeltaTable, texts: Mapping[str, str]) -> dg.TableSchema:
    """Return the columns of a table.

    Args:
        texts: By column, what it is; of others the table's own comments say it.
    """
    return dg.TableSchema(
        [
            dg.TableColumn(
                column.name,
                str(getattr(column.type, "type", column.type)),
                description=texts.get(column.name) or column.metadata.get("comment"),
                constraints=dg.TableColumnConstraints(nullable=column.nullable),
            )
            for column in handle.schema().fields
        ]
    )


def _schema_of(columns: pa.Schema, texts: Mapping[str, str]) -> dg.TableSchema:
    """Return the columns that a stage hands on to others alone."""
    return dg.TableSchema(
        [dg.TableColumn(column.name, str(column.type), description=texts.get(column.name)) for column in columns]
    )


def _row_count(files: pa.Table) -> int | None:
    counts = files.column("num_records").to_pylist() if "num_records" in files.column_names else [None]
    return None if None in counts else sum(counts)  # another writer may have left the number out


def _table(titles: Sequence[str], rows: Sequence[Sequence[str | float]]) -> dg.MetadataValue:
    """Return a table as Markdown. Dagster's own table would take some 250 bytes for a column and 50 for a cell, twice
    in every event."""
    head = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
    lines = [f"| {' | '.join(f'{cell:,}' if not isinstance(cell, str) else cell for cell in row)} |" for row in rows]
    return dg.MetadataValue.md("\n".join([*head, *lines]))
