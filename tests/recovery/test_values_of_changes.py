"""A minimum, a maximum and a number of distinct values over changes, from run to run: read as they were, moved to other
subtasks, and forgotten."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, delta, files
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import state_delete
from weir.run.run import RunOptions, run

CHANGES = pa.schema([("k", pa.string()), ("price", pa.float64()), ("_change_type", pa.string())])
best = aggregate(
    "best",
    files("{landing}/*.parquet", name="landing"),
    key="k",
    least=agg.min("price"),
    most=agg.max("price"),
    prices=agg.count_distinct("price"),
    changes=True,
    sink=delta.upsert("best", key="k"),
)
pipeline = Pipeline("extremes", (best,), max_parallelism=6)


def landed(site: Site, number: int, there: list[tuple[str, float]], chance: random.Random) -> dict[str, tuple]:
    """Land a file of changes; returns by key what is left of all so far: least, most and number of prices, and how many
    rows have each."""
    rows = [(*there.pop(chance.randrange(len(there))), "delete") for _ in range(len(there) // 2)]
    came = [(f"k{chance.randrange(9)}", chance.randrange(-6, 6) / 4) for _ in range(40)]
    there += came
    rows += [(*row, "insert") for row in came]
    chance.shuffle(rows)
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), CHANGES, strict=True)]
    site.landing.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, schema=CHANGES), site.landing / f"{number}.parquet")
    left: dict[str, list[float]] = {}
    for key, price in there:
        left.setdefault(key, []).append(price)
    return {
        key: (min(of), max(of), len(set(of)), {price: of.count(price) for price in sorted(set(of))})
        for key, of in left.items()
    }


def kept(site: Site, at: int | None = None) -> dict[str, tuple]:
    rows: list[dict[str, Any]] = []
    for table in state_reader.scan(pipeline, site.settings, "best", at):
        rows += table.to_pylist()
    return {
        row["k"]: (
            row["least"],
            row["most"],
            row["prices"],
            {entry["least__values_key"]: entry["least__values"] for entry in row["least__values"]},
        )
        for row in rows
    }


def test_values_are_read_as_they_were_and_move_with_their_key_group(tmp_path: Path) -> None:
    site, chance, there = Site(tmp_path, {}, pipeline, __name__), random.Random(4), list[tuple[str, float]]()
    states = {}
    for number, parallelism in enumerate((1, 3, 3, 2)):
        left = landed(site, number, there, chance)
        site = replace(
            site, options={"WEIR_SPARK__PARALLELISM": str(parallelism), "WEIR_CHECKPOINTS__NUM_RETAINED": "9"}
        )
        list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
        states[site.head()] = left
    assert {at: kept(site, at) for at in states} == states
    table = site.table("best")
    assert {row.k: (row.least, row.most, row.prices) for row in table.itertuples()} == {
        key: values[:3] for key, values in left.items()
    }
    shown = state_reader.get(pipeline, site.settings, "best", ["k1"])
    assert [(row["k"], row["prices"]) for row in shown] == [("k1", left["k1"][2])]
    state_delete.delete(pipeline, site.settings, "best", ["k1"], executor=InMemoryExecutor())
    assert kept(site) == {key: values for key, values in left.items() if key != "k1"}
