"""Inputs of tests that are generated, with the truths of queries over them."""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.nexmark import truth
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.generate import Options, generate
from benchmarks.nexmark.run import available
from pipelines.runtime.definition import Source
from pipelines.runtime.execution import direct_read
from tests.nexmark.house import AUCTION, BID, PERSON

_SCHEMAS = {"person": PERSON, "auction": AUCTION, "bid": BID}


def needs_spark(query: str) -> bool:
    """Whether tasks cannot read a query's input by themselves."""
    pipeline = importlib.import_module(f"benchmarks.nexmark.queries.{query}").pipeline
    lanes = [lane for stage in pipeline.stages for lane in stage.lanes]
    return any(lane.transform is not None for lane in lanes) or any(
        isinstance(lane.input, Source) and direct_read.spark_alone(lane, _SCHEMAS[lane.input.name]) for lane in lanes
    )


class House:
    """An input, and the truths of queries over it."""

    def __init__(self, root: Path, events: Options) -> None:
        self.root, self.input = root, root / "input"
        generate(events, self.input)
        truth.write(self.input, root / "truths", available())

    def assert_equal(self, query: str, out: Path) -> None:
        result = compare(self.root / "truths" / f"{query}.parquet", out / f"{query}.parquet")
        assert result.equal, (query, str(result), result.examples)
        assert result.rows > 0, f"{query} hands out nothing of this input, so nothing was compared"
