"""Weir's rows: real runs of a pipeline, with upload to a storage directory, registry commit, publication and
retention."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.state.engine import Result, Task, serve
from benchmarks.state.weir_pipelines import PIPELINES
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings.configuration import Settings


def run(task: Task, result: Result) -> None:
    pipeline = PIPELINES[_form(task)]
    done, triggered = 0, []
    for directory in task.inputs:
        settings = Settings.model_validate(
            {
                "storage": {"root": f"{task.durable}/storage"},
                "local": {"work_dir": f"{task.local}/work", "cache_dir": f"{task.local}/cache"},
                "checkpoints": {"timeout_seconds": 3600},
                "epoch": {"max_files": task.files, "max_rows": 10_000_000},
                "pipelines": {"bench": {"object": "benchmarks.state:none", "params": {"landing": directory}}},
                **task.options.get("settings", {}),
            }
        )
        for report in runtime.run(pipeline, settings, RunOptions(until_caught_up=True)):
            done += sum(slice["rows"] for slice in report.checkpoint.slice.values())
            result.progress.append((time.time(), done))
            uid = pipeline.stages[0].uid
            inside = {f"task:{phase}": ms for phase, ms in report.checkpoint.operators[uid].ms.items()}
            result.phases.append({**report.ms, **inside})
            triggered.append(report.checkpoint.triggered_at.timestamp())
            result.figures = {
                "triggered": triggered,
                "state_bytes": report.checkpoint.bytes_total,
                "state_files": report.checkpoint.files,
            }
    table = Path(task.durable, "storage", "bench", "tables", pipeline.stages[0].sinks[0].name)
    result.output = [f"{table}/data/**/*.parquet"]
    result.settings = {"spark": settings.spark.model_dump(), "state": settings.state.model_dump()}
    result.versions = {name: version(name) for name in ("pyspark", "rocksdict", "polars", "pyarrow", "deltalake")}
    result.versions["python"] = platform.python_version()


def _form(task: Task) -> str:
    if task.operator != "aggregate":
        return task.operator
    return task.options["form"] + ("-payload" if task.payload else "")


if __name__ == "__main__":
    serve(run)
