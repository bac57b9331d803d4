"""What Dagster shows about pipelines, stages and epochs, as its metadata values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from pipelines.runtime.definition import FileSource, Pipeline, Stage
from pipelines.runtime.sinks.delta import table_path
from pipelines.runtime.workshop import EpochReport, bottleneck
from state_ops import delta_log
from state_ops.checkpoint import from_micros
from state_ops.schema import StateSchema
from state_ops.storage import Storage


def of_source(source: FileSource, resolved: str) -> dict[str, Any]:
    """Known when the definitions load."""
    return {
        "files": dg.MetadataValue.path(resolved),
        "event time": source.event_time or "none: no watermark",
        "dagster/uri": resolved,
    }


def of_definition(pipeline: Pipeline, stage: Stage, storage: Storage) -> dict[str, Any]:
    """What a stage's code says by itself; nothing is read."""
    shown: dict[str, Any] = {"key": ", ".join(stage.key)}
    if stage.order_by:
        shown["order by"] = ", ".join(stage.order_by)
    if stage.where:
        shown["where"] = dg.MetadataValue.text(stage.where)
    if stage.state is not None:
        fields = StateSchema.of(stage.state).fields
        shown["state per key"] = dg.MetadataValue.table_schema(
            dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in fields])
        )
    if stage.gates:
        shown["gates"] = dg.MetadataValue.md("\n".join(f"- `{gate.title}`" for gate in stage.gates))
    if stage.sink is not None:
        path = storage.full(table_path(stage.sink.table))
        shown |= {"table": dg.MetadataValue.path(path), "dagster/uri": path}
        shown["dagster/table_name"] = f"{pipeline.name}.{stage.sink.table}"
    if stage.late is not None:
        shown["table of late rows"] = dg.MetadataValue.path(storage.full(table_path(stage.late.table)))
    return shown


def of_epoch(report: EpochReport, lag: Mapping[str, int]) -> dict[str, Any]:
    """One epoch, on the checkpoint asset. lag: files that wait, by source."""
    row = report.checkpoint
    phases = {**row.ms, **report.ms}
    shown: dict[str, Any] = {
        "checkpoint": int(row.id),
        "parent": int(row.parent_id) if row.parent_id else "none: the first",
        "trigger": row.trigger,
        "reason": row.reason,
        "rows read": _rows_read(report),
        "state bytes": row.bytes_total,
        "state bytes new": row.bytes_new,
        "files": row.files,
        "ms to commit": round(row.ms["to_commit"], 1),
        "bottleneck": bottleneck(row.ms) or "none",
        "ms by phase": _table(
            "phase", "ms", {name: round(ms, 1) for name, ms in phases.items() if name != "to_commit"}
        ),
        "generation": int(row.generation),
    }
    for name, count in lag.items():
        shown[f"files waiting in {name}"] = count
    for uid, micros in row.watermarks.items():
        shown[f"watermark of {uid}"] = dg.MetadataValue.timestamp(from_micros(micros))
    for item in report.publications:
        shown[f"Delta version of {item.sink}"] = item.delta_version
    if report.verdicts:
        shown["gates"] = dg.MetadataValue.md(
            "\n".join(
                f"- {'passed' if verdict.passed else '**failed**'}: `{verdict.gate}` on {verdict.rows:,} rows of {verdict.stage}"
                for verdict in report.verdicts
            )
        )
    return shown


def of_stage(report: EpochReport, uid: str) -> dict[str, Any]:
    """One epoch, on a stage's asset."""
    row, figures = report.checkpoint, report.checkpoint.operators[uid]
    shown: dict[str, Any] = {
        "checkpoint": int(row.id),
        "rows in": figures["rows_in"],
        "rows out": figures["rows_out"],
        "rows dropped": figures["rows_dropped"],
        "rows not applied yet": figures["rows_waiting"],
        "rows late": figures["rows_late"],
        "rows without key": figures["rows_null_key"],
        "state bytes": figures["bytes_total"],
        "state bytes new": figures["bytes_new"],
    }
    if uid in row.watermarks:
        shown["watermark"] = dg.MetadataValue.timestamp(from_micros(row.watermarks[uid]))
    return shown


def of_run(reports: Sequence[EpochReport]) -> dict[str, Any]:
    """A whole run, on the checkpoint asset."""
    if not reports:
        return {"outcome": "already caught up: no file was waiting, no epoch was needed"}
    first, last = reports[0].checkpoint, reports[-1].checkpoint
    return {
        "outcome": f"checkpoints {first.id} to {last.id}" if len(reports) > 1 else f"checkpoint {last.id}",
        "checkpoint": int(last.id),
        "epochs": len(reports),
        "rows read": sum(_rows_read(report) for report in reports),
        "state bytes": last.bytes_total,
        "state bytes new": sum(report.checkpoint.bytes_new for report in reports),
        "state bytes of full snapshots": sum(report.checkpoint.bytes_total for report in reports),
    }


def of_stage_run(reports: Sequence[EpochReport], stage: Stage, storage: Storage) -> dict[str, Any]:
    """A whole run, on a stage's asset; the columns are those that its table has now."""
    if not reports:
        return of_run(reports)
    figures = [report.checkpoint.operators[stage.uid] for report in reports]
    shown: dict[str, Any] = {"checkpoint": int(reports[-1].checkpoint.id), "epochs": len(reports)}
    for title, name in (("rows in", "rows_in"), ("rows out", "rows_out"), ("rows dropped", "rows_dropped")):
        shown[title] = sum(figure[name] for figure in figures)
    shown |= {"rows late": sum(figure["rows_late"] for figure in figures), "state bytes": figures[-1]["bytes_total"]}
    if stage.sink is not None and delta_log.exists(storage, table_path(stage.sink.table)):
        table = delta_log.open_table(storage, table_path(stage.sink.table))
        shown["Delta version"] = table.version()
        shown["dagster/column_schema"] = dg.TableSchema(
            [
                dg.TableColumn(
                    field.name,
                    str(getattr(field.type, "type", field.type)),
                    constraints=dg.TableColumnConstraints(nullable=field.nullable),
                )
                for field in table.schema().fields
            ]
        )
    return shown


def _rows_read(report: EpochReport) -> int:
    return sum(part["rows"] for part in report.checkpoint.slice.values())


def _table(key: str, value: str, rows: Mapping[str, float]) -> dg.MetadataValue:
    return dg.MetadataValue.table([dg.TableRecord({key: name, value: number}) for name, number in rows.items()])
