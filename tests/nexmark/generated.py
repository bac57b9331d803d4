"""Inputs of tests that are generated, with the truths of queries over them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.nexmark import truth
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.generate import Options, generate
from benchmarks.nexmark.run import available


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
