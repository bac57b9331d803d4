"""A stage with several outputs in whole runs: with rows that wait, other numbers of subtasks, kills and changed code, the
tables are what plain Python makes of the same files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import GateError, PipelineError, WeirError
from state_ops.records.checkpoint import Checkpoint
from tests.recovery.harness import Site
from tests.recovery.small import Apart
from tests.recovery.unordered import MINUTE, SOURCE, epochs, first_epoch, land_rows, site_of
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import (
    Epoch,
    Pipeline,
    Stage,
    State,
    ValueState,
    agg,
    aggregate,
    delta,
    expect,
    select,
    stage,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.operations import branch_diff, forks, plan, promotion
from weir.run import fsck, maintenance, run
from weir.run.run import RunOptions
from weir.settings.configuration import PROJECT

RARE = 97


class Seen(State):
    """Of one key."""

    rows: int = 0
    v: int = -1


def divide(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
    """Every row with its number in its key, and some of them once more in other outputs."""
    before = state.get(rows)["rows"].fill_null(0)
    within = rows.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over("k")).to_series()
    state.fold(rows, rows=agg.count())
    numbered = rows.with_columns(nth=before + within)
    return {
        "main": numbered,
        "odd": rows.filter(pl.col("v") % 2 == 1),
        "rare": rows.filter(pl.col("v") == RARE).select("k", "at"),
        "newest": numbered.select("k", "nth"),
        "parts": rows.with_columns(part=(pl.col("v") % 3).cast(pl.String)),
    }


OUTPUTS = {
    "odd": delta.append("odd"),
    "rare": None,
    "newest": delta.upsert("newest", key="k"),
    "parts": delta.replace("parts", by="part"),
}


def divided(function: Any = divide, outputs: Any = OUTPUTS, **more: Any) -> Stage:
    declare = stage(
        "split",
        source=SOURCE,
        key="k",
        order_by=["at", "v"],
        state=Seen,
        sink=delta.append("numbered"),
        outputs=outputs,
        **more,
    )
    return declare(function)


split = divided()


@stage("followed", source=split.output("odd"), key="k", order_by=["at", "v"], state=Seen, sink=delta.append("followed"))
def followed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each odd row with the odd one before."""
    return rows.select("k", "at", "v", before=state.lag(rows, v="v")["v"])


def counted(uid: str, source: Any, **more: Any) -> Stage:
    return aggregate(uid, source, key="k", rows=agg.count(), sink=delta.append(uid), **more)


@stage("sorted_out", source=split, key=None, outputs={"high": delta.append("high"), "low": None})
def sorted_out(rows: pl.DataFrame, epoch: Epoch) -> dict[str, pl.DataFrame]:
    """Without a key, and without a main output."""
    return {"high": rows.filter(pl.col("v") >= 6), "low": rows.filter(pl.col("v") < 6)}


again = select("again", split.output("odd"), "k", "at", "v", sink=delta.append("again"))
low = select("low", sorted_out.output("low"), "*", sink=delta.append("low"))
odds = counted("odds", split.output("odd"), where="v > 2")
rare = counted("rare", split.output("rare"))
every = counted("every", split)
tumbling = window("tumbling", split, key="k", on="at", every="10m", late=delta.append("late"), rows=agg.count())
missed = counted("missed", tumbling.output("late"))
pipeline = Pipeline(
    "split", (split, followed, again, sorted_out, low, odds, rare, every, tumbling, missed), max_parallelism=4
)


def site_at(root: Path, alignment: float | None = None, pipeline: Pipeline = pipeline, **options: str) -> Site:
    return site_of(root, alignment, pipeline, "tests.recovery.test_outputs", **options)


def land(site: Site, seed: int, *numbers: int) -> None:
    """Rare rows are in the fourth file alone."""
    land_rows(site, numbers, lambda number: np.random.default_rng((seed, number)), 9, {3: [RARE, RARE]})


# -- what plain Python makes of the files, one an epoch


def truth(site: Site) -> dict[str, list[tuple]]:
    tables: dict[str, list[tuple]] = defaultdict(list)
    number, last, parts, counts = defaultdict(int), {}, {}, defaultdict(lambda: defaultdict(int))
    watermark = None
    for file in sorted(site.landing.glob("*.parquet")):
        table = pq.read_table(file)
        at = table["at"].cast(pa.int64()).to_pylist()
        rows = sorted(zip(table["k"].to_pylist(), at, table["v"].to_pylist(), strict=True), key=lambda row: row[1:])
        of_epoch: dict[str, list[tuple]] = defaultdict(list)
        for k, moment, v in rows:
            number[k] += 1
            tables["numbered"].append((k, moment, v, number[k]))
            tables["high" if v >= 6 else "low"].append((k, moment, v, number[k]))
            counts["every"][k] += 1
            of_epoch[str(v % 3)].append((k, moment, v, str(v % 3)))
            if v % 2:
                tables["odd"].append((k, moment, v))
                tables["again"].append((k, moment, v))
                tables["followed"].append((k, moment, v, last.get(k, -1)))
                last[k] = v
                counts["odds"][k] += v > 2
            if v == RARE:
                counts["rare"][k] += 1
            closes = (moment // (10 * MINUTE) + 1) * 10 * MINUTE
            if watermark is not None and closes <= watermark:
                tables["late"].append((k, moment, v, number[k]))
                counts["missed"][k] += 1
        parts |= of_epoch
        watermark = max(at) if watermark is None else max(watermark, *at)
    tables["newest"] = list(number.items())
    tables["parts"] = [row for rows in parts.values() for row in rows]
    tables |= {uid: [item for item in by_key.items() if item[1]] for uid, by_key in counts.items()}
    return {name: sorted(rows, key=str) for name, rows in tables.items()}


COLUMNS = {
    "numbered": ["k", "at", "v", "nth"],
    "odd": ["k", "at", "v"],
    "again": ["k", "at", "v"],
    "high": ["k", "at", "v", "nth"],
    "low": ["k", "at", "v", "nth"],
    "followed": ["k", "at", "v", "before"],
    "newest": ["k", "nth"],
    "parts": ["k", "at", "v", "part"],
    "late": ["k", "at", "v", "nth"],
}


def tables(site: Site) -> dict[str, list[tuple]]:
    """The tables that there are; of running counts each key's newest."""
    shown = {}
    for sink in site.pipeline.sinks:
        path = site.storage / "tables" / sink.name
        if sink.name == "tumbling" or not (path / "_delta_log").exists():
            continue
        rows = pl.read_delta(str(path))
        if sink.name not in COLUMNS:
            rows = rows.sort("epoch").unique("k", keep="last")
        rows = rows.select(COLUMNS.get(sink.name, ["k", "rows"])).with_columns(pl.col(pl.Datetime).dt.epoch("us"))
        shown[sink.name] = sorted(rows.rows(), key=str)
    return shown


def assert_exact(site: Site) -> None:
    expected, shown = truth(site), tables(site)
    for sink in site.pipeline.sinks:
        if sink.name != "tumbling":
            assert shown.get(sink.name, []) == expected.get(sink.name, []), sink.name
    site.assert_no_orphans()
    assert not fsck.examine(site.pipeline, site.settings).findings


def waiting(checkpoint: Checkpoint) -> set[tuple[str, str]]:
    """Whose rows wait in front of whom, and of which output."""
    return {
        (uid, entry.get("output", "main"))
        for uid, stats in checkpoint.operators.items()
        for entry in stats.waiting
        if entry["layers"]
    }


@pytest.mark.parametrize("seed", sampled(range(3)))
@pytest.mark.parametrize("alignment", sampled([0.0, None]))
def test_every_output_is_what_plain_python_makes_of_the_files(alignment, seed, tmp_path):
    site = site_at(tmp_path, alignment)
    land(site, seed, 0, 1, 2, 3, 4)
    history = epochs(site, drain=True)
    ahead = set().union(*map(waiting, history))
    assert ("followed", "odd") in ahead and ("missed", "late") in ahead if alignment is not None else not ahead
    assert_exact(site)
    assert truth(site)["late"] and truth(site)["rare"], "both are part of the comparison"
    recorded = [row.operators["split"].outputs for row in history]
    assert {name: sum(counts[name] for counts in recorded) for name in OUTPUTS} == {
        "odd": len(truth(site)["odd"]),
        "rare": sum(rows for _, rows in truth(site)["rare"]),
        "newest": len(truth(site)["numbered"]),
        "parts": len(truth(site)["numbered"]),
    }
    dropped = sum(row.operators["odds"].rows_dropped for row in history)
    if alignment is None:
        assert dropped == len(truth(site)["odd"]) - sum(rows for _, rows in truth(site)["odds"])


@pytest.mark.long
@pytest.mark.parametrize("alignment", sampled([None, 0.0]))
@pytest.mark.parametrize("executor", sampled([Apart, InMemoryExecutor]))
def test_other_numbers_of_subtasks_from_run_to_run(alignment, executor, tmp_path):
    site = site_at(tmp_path, alignment)
    for number, parallelism in enumerate((2, 4, 1, 3, 2)):
        land(site, 5, number)
        running = replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": str(parallelism)})
        first_epoch(running, executor(4))
    epochs(site, drain=True)
    assert_exact(site)


CHILD = """
import os, sys
from pathlib import Path
from tests.recovery import doors_child, test_outputs
doors_child.mortal(int(sys.argv[2]), doors_child.REQUESTS[sys.argv[3]])
test_outputs.epochs(test_outputs.site_at(Path(sys.argv[1]), 0.0))
os._exit(0)
"""


def killed(site: Site, at: int, of: str) -> bool:
    """Whether a run died at the n-th request; below 0: after it."""
    command = [sys.executable, "-c", CHILD, str(site.root), str(at), of]
    ended = subprocess.run(command, cwd=PROJECT, env={**os.environ, **site.env}, capture_output=True, timeout=200)
    assert ended.returncode in (0, -9), ended.stderr.decode()
    return ended.returncode == -9


@pytest.mark.parametrize(
    ("at", "of"), sampled([(-4, "commit"), (-5, "publication"), (9, "all"), (31, "all"), (77, "all")])
)
def test_a_run_that_is_killed_is_made_good_by_the_next(at, of, tmp_path):
    site = site_at(tmp_path, 0.0)
    land(site, 8, 0, 1, 2, 3, 4)
    assert killed(site, at, of)
    if of == "commit":  # the fourth epoch stands, which has the rare rows, and no sink has its rows
        assert site.head() == 4 and tables(site)["numbered"] != truth(site)["numbered"]
    epochs(site, drain=True)
    assert_exact(site)


@pytest.mark.long
def test_rows_of_an_output_that_no_epoch_had_before(tmp_path):
    site = site_at(tmp_path, pipeline=replace(pipeline, stages=(split, rare)))
    for number in range(2):
        land(site, 2, number)
        epochs(site)
    assert tables(site)["rare"] == []
    land(site, 2, 3)
    epochs(site)
    assert tables(site)["rare"]
    assert_exact(site)


def test_rows_that_a_dead_attempt_has_left_of_any_output_are_removed(tmp_path):
    site = site_at(tmp_path, pipeline=replace(pipeline, stages=(split,)))
    land(site, 2, 0)
    epochs(site)
    left = [site.storage / f"channels/split/g1-e9/{name}.parquet" for name in (f"0-{'a' * 32}/odd", f"1-{'b' * 32}")]
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"rows")
    findings = fsck.examine(site.pipeline, site.settings).findings
    assert {finding.kind.value for finding in findings} == {"orphan object"} and len(findings) == len(left)
    epochs(site, drain=True)
    assert not any(file.exists() for file in left)


@pytest.mark.long
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_rewinds_and_branches_take_every_output_along(delivery, tmp_path):
    """With rows of outputs that wait when the branch begins, and are applied there and here."""
    site = site_at(tmp_path, 0.0, replace(pipeline, delivery=delivery), WEIR_CHECKPOINTS__NUM_RETAINED="30")
    land(site, 0, 0, 1, 2)
    at = next(row.id for row in epochs(site) if ("followed", "odd") in waiting(row))
    maintenance.rewind(site.pipeline, site.settings, at)
    base = next(row.id for row in epochs(site) if ("followed", "odd") in waiting(row))
    forks.fork(site.pipeline, site.settings, "fix", int(base))
    branch = replace(site, pipeline=forks.branched(site.pipeline, site.settings, "fix"))
    epochs(branch)
    assert branch_diff.diff(site.pipeline, site.settings, "fix").same
    promotion.promote(site.pipeline, site.settings, "fix", executor=InMemoryExecutor(4))
    land(site, 0, 3, 4)
    epochs(site, drain=True)
    expected, shown = truth(site), tables(site)
    assert shown == {name: expected[name] for name in shown}
    assert not fsck.examine(site.pipeline, site.settings).damage


# -- other code between two runs


def said(site: Site, aspect: str = "outputs") -> list[str]:
    findings = plan.plan(site.pipeline, site.settings).findings
    assert not [finding for finding in findings if finding.verdict.stops]
    return [finding.what for finding in findings if finding.aspect == aspect]


def without(*names: str) -> Any:
    def function(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
        return {name: part for name, part in divide(rows, state, epoch).items() if name not in names}

    return divided(function, {name: sink for name, sink in OUTPUTS.items() if name not in names})


def test_outputs_come_and_go_between_runs_and_the_plan_says_so(tmp_path):
    before = without("odd", "rare")
    site = site_at(tmp_path, None, Pipeline("split", (before, with_input(every, before)), max_parallelism=4))
    land(site, 4, 0, 1)
    epochs(site)
    assert said(site) == []
    grown = replace(site, pipeline=Pipeline("split", (split, followed, every), max_parallelism=4))
    assert said(grown) == [
        "its output odd is new: it has rows from the next epoch on, and none of earlier ones",
        "its output rare is new: it has rows from the next epoch on, and none of earlier ones",
    ]
    land(site, 4, 2, 3)
    epochs(grown)
    of_later = {row[:2] for row in truth(site)["odd"]} - {row[:2] for row in truth_until(site, 2)["odd"]}
    assert of_later <= {row[:2] for row in tables(grown)["odd"]} <= {row[:2] for row in truth(site)["odd"]}
    assert tables(grown)["newest"] == truth(site)["newest"], "what was there goes on"

    def renamed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
        handed = divide(rows, state, epoch)
        return {"uneven" if name == "odd" else name: part for name, part in handed.items()}

    other = divided(renamed, {"uneven" if name == "odd" else name: sink for name, sink in OUTPUTS.items()})
    follows = with_input(followed, other.output("uneven"))
    turned = replace(site, pipeline=Pipeline("split", (other, follows, with_input(every, other)), max_parallelism=4))
    assert said(turned) == [
        "its output odd is gone: nothing is handed out as odd from the next epoch on; it looks renamed to uneven",
        "its output uneven is new: it has rows from the next epoch on, and none of earlier ones",
    ]
    rows = len(tables(turned)["followed"])
    land(site, 4, 4)
    epochs(turned)
    assert len(tables(turned)["followed"]) > rows, "state and table are found by the stage's and the sink's names"
    site.assert_no_orphans()


def truth_until(site: Site, files: int) -> dict[str, list[tuple]]:
    aside = replace(site, root=site.root / "first")
    aside.landing.mkdir(parents=True)
    for file in sorted(site.landing.glob("*.parquet"))[:files]:
        os.link(file, aside.landing / file.name)
    return truth(aside)


def test_rows_that_wait_are_never_taken_for_those_of_another_output(tmp_path):
    alike = {"odd": None, "even": None}

    def halves(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
        state.fold(rows, rows=agg.count())
        return {"odd": rows.filter(pl.col("v") % 2 == 1), "even": rows.filter(pl.col("v") % 2 == 0)}

    first = replace(divided(halves, alike), sink=None)
    reading = with_input(followed, first.output("odd"))
    site = site_at(tmp_path, 0.0, Pipeline("split", (first, reading), max_parallelism=4))
    land(site, 6, 0, 1, 2)
    assert ("followed", "odd") in waiting(first_epoch(site, InMemoryExecutor(1)))
    turned = replace(site, pipeline=replace(site.pipeline, stages=(first, with_input(reading, first.output("even")))))
    with pytest.raises(PipelineError, match="would be lost"):
        epochs(turned)
    findings = plan.plan(turned.pipeline, turned.settings).findings
    assert [finding.aspect for finding in findings if finding.verdict.stops] == ["input"]
    epochs(site, drain=True)
    assert tables(site)["followed"] == truth(site)["followed"]


# -- what people see of it


@pytest.mark.long
def test_dagster_shows_where_the_columns_of_each_output_come_from(tmp_path):
    from weir.dagster import metadata, specs  # Dagster takes a second to import

    site = site_at(tmp_path, pipeline=replace(pipeline, stages=(split, followed, odds, tumbling, missed)))
    land(site, 2, 3, 4)
    tally, (storage, _) = metadata.Tally(), run.open_storage(site.pipeline, site.settings)
    for report in run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4)):
        tally.add(report)

    def origins(uid: str, name: str = "") -> dict[str, list[tuple[str, str]]]:
        of = site.pipeline.stage(uid)
        if name:
            head, written = tally.newest.checkpoint, tally.versions.get(name)
            shown, _ = metadata.of_sink_now(site.pipeline, head, of, site.pipeline.sink(name), storage, written)
        else:
            shown = metadata.of_stage_run(site.pipeline, tally, of, storage)
        deps = shown["dagster/column_lineage"].deps_by_column
        return {column: [("/".join(dep.asset_key.path), dep.column_name) for dep in of] for column, of in deps.items()}

    assert origins("followed")["v"] == [("split/tables/odd", "v")]
    assert origins("odds") == {"k": [("split/tables/odd", "k")]}
    assert origins("split", "odd")["v"] == [("split/landing", "v")]
    assert "part" not in origins("split", "parts"), "the stage makes it of nothing that has its name"
    assert origins("split", "numbered")["nth"] == [("split/split_stage", "nth")]
    assert origins("tumbling", "late")["nth"] == [("split/split_stage", "nth")]
    counts = metadata.of_stage(tally, "split")
    assert counts["rows out as odd"] == len(truth(site)["odd"]) and counts["rows out as rare"] == 2
    descriptions = {spec.key.path[-1]: spec.description for spec in specs.tables(site.pipeline, site.settings, storage)}
    assert descriptions["odd"] == "What split hands out as odd, appended exactly once."
    assert descriptions["numbered"] == "What split hands out, appended exactly once."
    assert descriptions["late"].startswith("Rows that came too late for tumbling")
    deps = {
        spec.key.path[-1]: [dep.asset_key.path[-1] for dep in spec.deps] for spec in specs.stages(pipeline, storage)
    }
    assert deps["followed_stage"] == ["split_stage"] and deps["missed_stage"] == ["tumbling_stage"]


# -- gates


def test_rows_that_a_gate_sets_aside_are_in_no_output(tmp_path):
    gate = expect(
        "ExpectColumnValuesToNotBeInSet", column="v", value_set=[RARE], on_failure="quarantine", quarantine_at_most=1.0
    )
    gated = divided(gate=gate)
    site = site_at(
        tmp_path, None, Pipeline("split", (gated, with_input(followed, gated.output("odd"))), max_parallelism=4)
    )
    land(site, 3, 2, 3, 4)
    epochs(site)
    aside = replace(site, root=tmp_path / "aside")
    aside.landing.mkdir(parents=True)
    for file in site.landing.glob("*.parquet"):
        rows = pl.read_parquet(file)
        rows.filter(pl.col("v") != RARE).write_parquet(aside.landing / file.name)
    expected, shown = truth(aside), tables_but_quarantine(site)
    assert shown == {name: expected[name] for name in ("numbered", "odd", "newest", "parts", "followed")}
    assert len(pl.read_delta(str(site.storage / "tables" / "split_quarantine"))) == 2


def tables_but_quarantine(site: Site) -> dict[str, list[tuple]]:
    stages = tuple(replace(stage, gates=()) for stage in site.pipeline.stages[:1])
    return tables(replace(site, pipeline=Pipeline("split", (*stages, with_input(followed, stages[0].output("odd"))))))


def test_gates_look_at_the_main_output(tmp_path):
    odd = expect("ExpectColumnValuesToNotBeInSet", column="nth", value_set=[1])
    site = site_at(tmp_path, None, Pipeline("split", (divided(gate=odd),), max_parallelism=4))
    land(site, 3, 0)
    with pytest.raises(GateError):
        epochs(site)
    assert tables(site) == {}
    with pytest.raises(WeirError, match="part"):  # a column of another output alone
        epochs(
            replace(
                site,
                pipeline=Pipeline(
                    "split", (divided(gate=expect("ExpectColumnValuesToNotBeNull", column="part")),), max_parallelism=4
                ),
            )
        )
