"""Whole runs of a pipeline in this process, without Spark: rows land, runs begin and end, and tables are read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from weir.definition import Pipeline
from weir.execution.in_process import InMemoryExecutor
from weir.operations import plan
from weir.operations.plan import StatePlan
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings
from weir.settings.configuration import Settings

START = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


@dataclass
class Bed:
    """root: an empty directory. Each landed file is an epoch of its own."""

    root: Path
    landed: int = field(default=0, init=False)

    def settings(self, pipeline: Pipeline, **env: str) -> Settings:
        name = f"WEIR_PIPELINES__{pipeline.name.upper()}"
        params = {"landing": str(self.root / "landing"), "warehouse": str(self.root / "warehouse")}
        return settings.load(
            {
                "WEIR_STORAGE__ROOT": str(self.root / "storage"),
                "WEIR_LOCAL__WORK_DIR": str(self.root / "work"),
                "WEIR_RUN__POLL_SECONDS": "0.05",
                "WEIR_EPOCH__MAX_FILES": "1",
                "WEIR_SPARK__PARALLELISM": "2",
                "WEIR_CHECKPOINTS__NUM_RETAINED": "50",
                f"{name}__PARAMS": json.dumps(params),
                f"{name}__OBJECT": "x:pipeline",
                **env,
            }
        )

    def land(self, source: str, rows: pa.Table | list[dict]) -> None:
        directory = self.root / "landing" / source
        directory.mkdir(parents=True, exist_ok=True)
        self.landed += 1
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, directory / f".{self.landed}")
        (directory / f".{self.landed}").rename(directory / f"{self.landed:05}.parquet")

    def run(self, pipeline: Pipeline, *, drain: bool = False, **env: str) -> list:
        options = RunOptions(until_caught_up=True, drain=drain)
        return list(run(pipeline, self.settings(pipeline, **env), options, InMemoryExecutor()))

    def plan(self, pipeline: Pipeline) -> StatePlan:
        return plan.plan(pipeline, self.settings(pipeline), executor=InMemoryExecutor())

    def stops(self, pipeline: Pipeline) -> list[str]:
        """What a run would be refused for."""
        return [finding.what for finding in self.plan(pipeline).findings if finding.verdict.stops]

    def said(self, pipeline: Pipeline) -> str:
        """All that `weir plan` says."""
        return "\n".join(finding.what for finding in self.plan(pipeline).findings)

    def table(self, pipeline: Pipeline, name: str) -> pl.DataFrame:
        place = self.root / "storage" / pipeline.directory / "tables" / name
        return pl.read_delta(str(place)) if (place / "_delta_log").exists() else pl.DataFrame()
