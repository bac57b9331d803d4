"""A source behind a connector in whole runs: landed, watched by partition, replayed, set aside, lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from state_ops.errors import (
    ConfigurationError,
    DamageError,
    InputError,
    LostError,
    PipelineError,
    TransientError,
    WeirError,
)
from state_ops.moments import to_micros
from state_ops.records.pins import SAVEPOINT
from tests.recovery.harness import Site
from tests.tools import described
from tests.tools.sampling import sampled
from tests.weir.sources.partitions import NOON, Partitions, PartitionsSource, put, row
from weir import Pipeline, agg, aggregate, chain, delta, window
from weir.cli import running, status
from weir.cli.prometheus import samples
from weir.cli.watching.pipeline_look import PipelineLook
from weir.dagster import checks
from weir.dagster.metadata import Tally, of_epochs, of_run
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill, forks, plan
from weir.ownership import backlog, savepoints
from weir.ownership.ownership import claimed
from weir.ownership.pipeline_storage import open_storage, readers
from weir.restore import rewind, seek
from weir.run import fsck, maintenance, progress, sensor
from weir.run.run import RunOptions, run
from weir.sources import positions
from weir.sources.connector_reader import ConnectorReader
from weir.sources.reader import SourceReader
from weir.sources.slices import LeftOut

MINUTE = 60_000_000
READ = Partitions.read
SOURCE = PartitionsSource(name="clicks", event_time="at", idle_after=None)


def of(source: PartitionsSource, **options: Any) -> Pipeline:
    """Sums of all rows, and hourly windows behind the watermark."""
    sums = aggregate("sums", source, key="id", sink=delta.append("sums"), n=agg.count(), total=agg.sum("n"), **options)
    hours = window(
        "hours", source, key="id", on="at", every="1h", lateness="0s", sink=delta.append("hours"),
        late=delta.append("late"), n=agg.count(),
    )  # fmt: skip
    return Pipeline("clicks", (sums, hours), max_parallelism=4)


def site_of(root: Path, source: PartitionsSource = SOURCE, options: dict[str, str] | None = None, **more: Any) -> Site:
    site_there = Site(root, {"WEIR_SPARK__PARALLELISM": "2", **(options or {})}, of(source, **more), __name__)
    site_there.landing.mkdir(parents=True, exist_ok=True)
    return site_there


def epochs(site: Site, *, drain: bool = False) -> list[Any]:
    options = RunOptions(until_caught_up=True, drain=drain)
    return list(run(site.pipeline, site.settings, options, executor=InMemoryExecutor()))


def table(site: Site, name: str) -> pl.DataFrame:
    return pl.from_pandas(site.table(name))


def totals(site: Site) -> dict[str, tuple[int, int]]:
    newest = table(site, "sums").sort("epoch").unique("id", keep="last")
    return {id: (n, total) for id, n, total in newest.select("id", "n", "total").iter_rows()}


def landed(site: Site) -> list[Path]:
    return sorted((site.storage / "landed").rglob("*.parquet"))


def position(site: Site) -> dict[str, Any]:
    rows = site.registry("checkpoints").sort_values("id")
    return json.loads(rows["offsets"].iloc[-1])["clicks"]


def test_rows_of_a_connector_are_read_once_and_nothing_that_was_landed_stays(tmp_path):
    site = site_of(tmp_path, options={"WEIR_EPOCH__MAX_ROWS": "7"})
    for partition in "pqr":
        put(site.landing, partition, *(row(f"k{n % 3}", n, n) for n in range(20)))
    done = epochs(site)
    assert len(done) > 5, "limits cut the slices"
    put(site.landing, "s", row("k0", 100, 3))
    epochs(site)
    assert totals(site) == {"k0": (22, 3 * 63 + 100), "k1": (21, 3 * 70), "k2": (18, 3 * 57)}
    assert landed(site) == []
    assert position(site)["at"] == {"p": 20, "q": 20, "r": 20, "s": 1} and position(site)["rows"] == 61
    assert json.loads((site.landing / ".committed").read_text()) == position(site)["at"], "people's tools are told"


def test_an_epoch_that_fails_is_read_again_and_its_landed_rows_are_swept(tmp_path, monkeypatch):
    site = site_of(tmp_path, options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"})
    put(site.landing, "p", *(row("a", n, n) for n in range(5)))

    class Failing(InMemoryExecutor):
        def run(self, *_: Any) -> Any:
            raise TransientError("The cluster is away.")

    with monkeypatch.context() as dead, pytest.raises(TransientError):
        dead.setattr(SourceReader, "discard", lambda *_: None)
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=Failing()))
    assert len(landed(site)) == 1, "what a dead epoch has landed stays until somebody owns the pipeline"
    (orphan,) = fsck.examine(site.pipeline, site.settings).findings
    assert orphan.path.startswith("landed/clicks/") and "an epoch that has ended" in orphan.what
    epochs(site)
    assert totals(site) == {"a": (5, 10)} and landed(site) == []


def test_what_epochs_that_fell_have_landed_goes_while_the_run_goes_on(tmp_path):
    site = site_of(tmp_path, options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"})
    put(site.landing, "p", *(row("a", n, n) for n in range(5)))
    failures = [TransientError("The cluster is away."), TransientError("The cluster is away.")]

    class Failing(InMemoryExecutor):
        def run(self, *what: Any) -> Any:
            if failures:
                raise failures.pop()
            return super().run(*what)

    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=Failing()))
    assert totals(site) == {"a": (5, 10)} and landed(site) == []


def test_what_one_source_has_landed_goes_where_another_one_cannot_be_planned(tmp_path, monkeypatch):
    broken = replace(SOURCE, name="views", root="{landing}/views")
    stages = tuple(
        aggregate(name, source, key="id", sink=delta.append(name), n=agg.count())
        for name, source in (("sums", SOURCE), ("views", broken))
    )
    options = {"WEIR_SPARK__PARALLELISM": "2", "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"}
    site = Site(tmp_path, options, Pipeline("clicks", stages, max_parallelism=4), __name__)
    put(site.landing, "p", row("a", 1, 1))
    put(site.landing / "views", "q", row("a", 1, 1))

    def away(*_: Any) -> Any:
        raise TransientError("The server is away.")

    monkeypatch.setattr(Partitions, "read", lambda self, part: READ(self, part) if part.partition == "p" else away())
    with pytest.raises(TransientError):
        epochs(site)
    assert landed(site) == []


def test_threads_that_read_parts_share_one_connector(tmp_path, monkeypatch):
    site = site_of(tmp_path, options={"WEIR_CHECKPOINTS__NUM_RETAINED": "2"})
    opened: list[object] = []
    open_ = PartitionsSource.open

    def slowly(self: PartitionsSource, opening: Any) -> Any:
        opened.append(opening)
        time.sleep(0.05)
        return open_(self, opening)

    monkeypatch.setattr(PartitionsSource, "open", slowly)
    for name in "pqrs":
        put(site.landing, name, row("a", 1, 1))
    planned = readers(site.pipeline, site.settings)["clicks"].plan(None, site.settings.epoch, None)
    opened.clear()
    readers(site.pipeline, site.settings)["clicks"].plan_again(planned.to_dict(), None)
    assert len(opened) == 1


def test_the_watermark_is_the_least_of_the_partitions(tmp_path):
    site = site_of(tmp_path, options={"WEIR_EPOCH__MAX_ROWS": "4"})
    put(site.landing, "slow", *(row("a", n, n * 10) for n in range(24)))  # four hours, read four rows an epoch
    put(site.landing, "swift", *(row("a", n, 24 * 60 + n) for n in range(2)))  # a day ahead
    epochs(site, drain=True)
    assert table(site, "late").height == 0 if (site.storage / "tables/late").exists() else True
    hours = table(site, "hours").sort("window_start")
    assert hours["n"].to_list() == [6, 6, 6, 6, 2]


def test_a_partition_that_has_gone_quiet_holds_nothing_back_and_windows_close_without_a_row(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, idle_after="0s"))
    put(site.landing, "p", row("a", 1, 0))
    put(site.landing, "q", row("a", 1, 180))
    epochs(site)
    assert position(site)["newest"] == micros(180)
    assert table(site, "hours").height == 1

    holding = site_of(tmp_path / "holding")
    put(holding.landing, "p", row("a", 1, 0))
    put(holding.landing, "q", row("a", 1, 180))
    epochs(holding)
    assert position(holding)["newest"] == micros(0)
    assert table(holding, "hours").height == 0
    waking = replace(holding, pipeline=of(replace(SOURCE, idle_after="0s")))
    assert len(epochs(waking)) == 1, "one epoch without a row, since event time goes on"
    assert position(waking)["newest"] == micros(180) and table(waking, "hours").height == 1
    assert epochs(waking) == []


def test_no_partition_is_read_further_ahead_than_max_ahead(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, max_ahead="1h"), options={"WEIR_EPOCH__MAX_ROWS": "2"})
    put(site.landing, "p", *(row("a", n, 30 * n) for n in range(8)))
    put(site.landing, "q", *(row("a", n, 30 * n) for n in range(8)))
    ahead = []
    for done in _run(site):
        times = [newest for newest, _ in done.checkpoint.offsets["clicks"]["partitions"].values() if newest]
        ahead.append(max(times) - min(times))
    assert max(ahead) <= 120 * MINUTE, "an hour, and the hour that one plan reads"
    assert totals(site) == {"a": (16, 56)}


def test_sources_go_by_the_epochs_time_which_never_decreases(tmp_path, monkeypatch):
    site = site_of(tmp_path, replace(SOURCE, max_future="1h"), {"WEIR_CHECKPOINTS__NUM_RETAINED": "9"})

    class Ahead(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> Any:
            return datetime.now(zone) + timedelta(days=1)

    put(site.landing, "p", row("a", 1, 0))
    with monkeypatch.context() as clock:
        clock.setattr("weir.epoch.scheduler.datetime", Ahead)
        (first,) = epochs(site)
    late_clock = datetime.now(UTC) + timedelta(hours=12)
    put(site.landing, "p", {"id": "a", "n": 2, "at": late_clock.isoformat()})
    (second,) = epochs(site)  # the clock has gone back by a day
    assert first.checkpoint.epoch_now == second.checkpoint.epoch_now > late_clock
    assert second.checkpoint.slice["clicks"]["now"] == to_micros(second.checkpoint.epoch_now)
    assert position(site)["partitions"]["p"][1] == to_micros(second.checkpoint.epoch_now)
    assert totals(site) == {"a": (2, 3)}
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and not done.problems, done


def test_a_row_too_far_in_the_future_is_a_bad_row(tmp_path):
    far = 60 * 24 * 365 * 100
    site = site_of(tmp_path, replace(SOURCE, max_future="1d", on_bad="quarantine"))
    put(site.landing, "p", row("a", 1, 0), row("a", 2, far), row("a", 3, 1))
    epochs(site)
    assert totals(site) == {"a": (2, 4)} and position(site)["newest"] == micros(1)
    (bad,) = table(site, "sums_quarantine").to_dicts()
    assert bad["_weir_gate"] == "on_bad" and "too far ahead" in bad["_weir_reason"] and '"n": 2' in bad["_weir_raw"]

    strict = site_of(tmp_path / "strict", replace(SOURCE, max_future="1d"))
    put(strict.landing, "p", row("a", 2, far))
    with pytest.raises(InputError, match="too far ahead"):
        epochs(strict)
    assert landed(strict) == []


def test_bad_rows_go_to_the_quarantine_table_of_each_stage_or_fail_the_epoch(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, on_bad="quarantine"))
    put(site.landing, "p", row("a", 1, 0), "{no json", row("b", 2, 1))
    (report,) = epochs(site)
    assert progress.line(report.checkpoint, None).endswith("  quarantined 1 row"), "not in silence"
    assert totals(site) == {"a": (1, 1), "b": (1, 2)}
    for name in ("sums_quarantine", "hours_quarantine"):
        (bad,) = table(site, name).to_dicts()
        assert (bad["_weir_file"], bad["_weir_row"], bad["_weir_raw"]) == ("p-0-3", 1, "{no json")
        assert bad["id"] is None and "property name" in bad["_weir_reason"]
    assert json.loads(site.registry("checkpoints")["slice"].iloc[-1])["clicks"]["bad_rows"] == 1
    put(site.landing, "p", "{no json", row("b", 2, 1))
    (second,) = epochs(site)
    tally = Tally()
    for of_epoch in (report, second):
        tally.add(of_epoch)
    assert of_epochs(tally, {})["rows quarantined"] == of_run(tally)["rows quarantined"] == 2, "each once, not by stage"
    (last,) = epochs(site, drain=True)
    facts = status.status_of(site.pipeline, site.settings)
    assert facts["rows_quarantined"] == facts["last_checkpoint"]["totals"]["rows_quarantined"] == 2
    look = PipelineLook(60, retained=[last.checkpoint])
    assert ("weir_rows_quarantined_total", (), 2.0) in samples(look)

    failing = site_of(tmp_path / "failing")
    put(failing.landing, "p", row("a", 1, 0), "{no json")
    with pytest.raises(InputError, match=r"1 row of p-0-2 cannot be decoded, the first at 1: .*property name"):
        epochs(failing)


def test_checks_count_what_waits_in_the_sources_unit(tmp_path):
    site = site_of(tmp_path, SOURCE)
    put(site.landing, "p", row("a", 1, 0), row("b", 2, 1))
    for check in (checks.on_time(site.pipeline, site.settings), checks.input_is_there(site.pipeline, site.settings)):
        assert check.description and check.description.startswith("2 rows are waiting")
        assert check.metadata["rows waiting in clicks"].value == 2
    assert "nobody has watched for how long" in (checks.on_time(site.pipeline, site.settings).description or "")
    decision = sensor.decide(sensor.observe(site.pipeline, site.settings), sensor.SensorMemory(), 0)
    assert decision.reason == "2 rows new"


def test_what_is_lost_fails_or_is_skipped_and_recorded(tmp_path):
    site = site_of(tmp_path)
    put(site.landing, "p", *(row("a", n, n) for n in range(4)))
    (site.landing / "p.gone").write_text("2")
    with pytest.raises(LostError, match="2 rows of p are gone"):
        epochs(site)
    skipping = replace(site, pipeline=of(replace(SOURCE, on_lost="skip")))
    epochs(skipping)
    assert totals(skipping) == {"a": (2, 5)} and position(skipping)["lost"] == 1
    recorded = json.loads(skipping.registry("checkpoints")["slice"].iloc[-1])["clicks"]
    assert recorded["lost"] == [{"where": "p", "what": "2 rows are gone"}]


def test_a_drill_reads_the_recorded_parts_again(tmp_path):
    site = site_of(tmp_path, options={"WEIR_CHECKPOINTS__NUM_RETAINED": "2"})
    put(site.landing, "p", *(row("a", n, n) for n in range(4)))
    epochs(site)
    put(site.landing, "p", *(row("b", n, n) for n in range(4)))
    epochs(site)
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and not done.problems, done


def test_a_drill_finds_the_same_rows_too_far_in_the_future(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, max_future="1d", on_bad="quarantine"))
    for far in (1, 60 * 24 * 365 * 100):
        put(site.landing, "p", row("a", 1, 0), row("a", 2, far))
        epochs(site)
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and not done.problems, done


def test_a_row_that_a_gate_sets_aside_moves_no_partition_while_another_holds_event_time_back(tmp_path):
    site = site_of(tmp_path)
    put(site.landing, "p", row("a", 1, 0), row("a", 2, 60 * 24))
    put(site.landing, "q")
    reader = readers(site.pipeline, site.settings)["clicks"]
    planned = reader.plan(None, site.settings.epoch, None)
    assert planned.newest is None and planned.seen == {"p": micros(60 * 24)}
    left = reader.without(planned, [LeftOut("sums", "gate", planned.files[0].name, 1, "")])
    assert left.seen == {"p": micros(0)} and reader.advance(None, left)["partitions"]["p"][0] == micros(0)


def test_weir_plan_looks_at_the_columns_and_leaves_nothing(tmp_path):
    site = site_of(tmp_path)
    put(site.landing, "p", row("a", 1, 0))
    planned = plan.plan(site.pipeline, site.settings)
    assert planned is not None and landed(site) == []
    assert not list((tmp_path / "work").rglob("*.parquet"))


def test_what_makes_no_sense_in_a_source_is_refused_when_the_pipeline_is_defined():
    for wrong, what in (
        ({"on_bad": "skip"}, "on_bad='skip' is no policy"),
        ({"on_lost": "quarantine"}, "on_lost='quarantine' is no policy"),
        ({"evolve": "yes"}, "evolve='yes' is no policy"),
        ({"idle_after": "soon"}, "idle_after='soon' is no duration"),
        ({"max_future": "1d", "event_time": None}, "max_future goes by event time"),
    ):
        source = replace(SOURCE, **wrong)
        with pytest.raises(PipelineError, match=what):
            Pipeline("wrong", (aggregate("sums", source, key="id", n=agg.count()),))


def micros(minutes: float) -> int:
    return round((NOON + timedelta(minutes=minutes)).timestamp() * 1_000_000)


def _run(site: Site) -> Iterator[Any]:
    yield from run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor())


# -- archived


ARCHIVED = replace(SOURCE, archive=True)


def lose(site: Site, partition: str, upto: int) -> None:
    (site.landing / f"{partition}.gone").write_text(str(upto))


def retaining(root: Path, count: int, **more: Any) -> Site:
    options = {"WEIR_CHECKPOINTS__NUM_RETAINED": str(count), "WEIR_EPOCH__MAX_ROWS": "3"}
    return site_of(root, ARCHIVED, options, **more)


def test_a_rewind_reads_again_what_the_source_has_lost(tmp_path):
    site = retaining(tmp_path, 9)
    put(site.landing, "p", *(row(f"k{n % 2}", n, n) for n in range(12)))
    done = epochs(site)
    assert len(done) == 4
    before = totals(site)
    lose(site, "p", 12)
    maintenance.rewind(site.pipeline, site.settings, int(done[0].checkpoint.id))
    put(site.landing, "p", row("k0", 100, 12))
    assert totals(site) != before
    again = epochs(site)
    assert [done.checkpoint.slice["clicks"]["rows"] for done in again] == [3, 3, 3, 1]
    assert totals(site) == {"k0": (before["k0"][0] + 1, before["k0"][1] + 100), "k1": before["k1"]}
    assert fsck.examine(site.pipeline, site.settings).findings == ()


def test_without_an_archive_a_rewind_says_what_would_be_missing(tmp_path):
    site = site_of(tmp_path, SOURCE, {"WEIR_CHECKPOINTS__NUM_RETAINED": "9", "WEIR_EPOCH__MAX_ROWS": "3"})
    put(site.landing, "p", *(row("a", n, n) for n in range(6)))
    first, _ = epochs(site)
    lose(site, "p", 6)
    with pytest.raises(WeirError, match=r"clicks has lost what would be read again \(3 rows of p are gone\)"):
        maintenance.rewind(site.pipeline, site.settings, int(first.checkpoint.id))


def test_what_a_rewind_and_a_branch_read_again_is_counted_in_rows(tmp_path):
    site = site_of(tmp_path, SOURCE, {"WEIR_CHECKPOINTS__NUM_RETAINED": "9", "WEIR_EPOCH__MAX_ROWS": "3"})
    put(site.landing, "p", *(row("a", n, n) for n in range(7)))
    first = epochs(site)[0].checkpoint
    (source,) = rewind.plan(site.pipeline, site.settings, int(first.id)).sources
    assert (str(source), source.again.waiting) == ("4 rows are read again", 4)
    fork = forks.fork(site.pipeline, site.settings, "fix", int(first.id))
    assert (positions.in_words(fork.behind.values()), fork.to_dict()["files_behind"]) == ("4 rows", {"clicks": 4})
    lose(site, "p", 7)
    (source,) = rewind.plan(site.pipeline, site.settings, int(first.id)).sources
    assert str(source) == "0 rows are read again, 1 part is gone"


def test_archived_input_goes_with_the_oldest_checkpoint_that_could_need_it(tmp_path):
    site = retaining(tmp_path, 2)
    for n in range(5):
        put(site.landing, "p", row("a", n, n))
        epochs(site)
    kept = sorted(file.suffix for file in (site.storage / "landed").rglob("*") if file.is_file())
    assert kept == [".json"] * 3 + [".parquet"] * 3, "of epochs 3 to 5: what checkpoint 4 lists goes with it"
    assert fsck.examine(site.pipeline, site.settings).findings == ()


@pytest.mark.long
def test_what_a_rewind_has_yet_to_read_again_is_kept_however_few_checkpoints_are(tmp_path):
    site = retaining(tmp_path, 2)
    first: Any = None
    for n in range(8):
        put(site.landing, "p", row("a", 10**n, n))
        (done,) = epochs(site)
        if first is None:
            first = done.checkpoint
            with claimed(site.pipeline, site.settings, InMemoryExecutor()) as owner:
                savepoints.save(owner.context, first, "first", "")
    before = totals(site)
    maintenance.rewind(site.pipeline, site.settings, int(first.id))
    lose(site, "p", 8)
    with claimed(site.pipeline, site.settings, InMemoryExecutor()) as owner:
        savepoints.unname(owner.context, SAVEPOINT, "first")
    epochs(site)
    assert totals(site) == before
    for n in range(3):
        put(site.landing, "p", row("b", n, n))
        epochs(site)
    assert len(landed(site)) == 3, "what nobody reads again has gone"


def test_an_archived_source_without_new_rows_beside_another_one_is_read_on(tmp_path):
    quiet = replace(ARCHIVED, name="views", root="{landing}/views")
    sums, views = (
        aggregate(name, source, key="id", sink=delta.append(name), n=agg.count(), total=agg.sum("n"))
        for name, source in (("sums", ARCHIVED), ("views", quiet))
    )
    stages = Pipeline("clicks", (sums, views), max_parallelism=4)
    site = Site(tmp_path, {"WEIR_SPARK__PARALLELISM": "2"}, stages, __name__)
    put(site.landing, "p", row("a", 1, 1))
    put(site.landing / "views", "q", row("a", 1, 1))
    epochs(site)
    put(site.landing, "p", row("a", 2, 2))
    epochs(site)
    assert backlog.lag(site.pipeline, site.settings, head(site)) == {"clicks": 0, "views": 0}
    put(site.landing / "views", "q", row("a", 2, 2))
    epochs(site)
    assert sorted(table(site, "views")["n"]) == [1, 2]


def test_a_fork_reads_from_the_pipelines_archive(tmp_path):
    site = retaining(tmp_path, 9)
    put(site.landing, "p", *(row("a", n, n) for n in range(9)))
    done = epochs(site)
    lose(site, "p", 9)
    forks.fork(site.pipeline, site.settings, "again", int(done[0].checkpoint.id))
    branch = replace(site, pipeline=forks.branched(site.pipeline, site.settings, "again"))
    epochs(branch)
    assert totals(branch) == totals(site) == {"a": (9, 36)}
    put(site.landing, "p", row("a", 100, 9))
    assert epochs(branch) == [], "a branch reads no further than its pipeline"


@pytest.mark.parametrize(("at", "back_to", "rows"), sampled([(0, 1, 3), (0, 0, 0), (1, 0, 0)]))
def test_a_fork_takes_nothing_archived_beyond_a_pipeline_that_was_rewound(tmp_path, at, back_to, rows):
    site = retaining(tmp_path, 9)
    put(site.landing, "p", *(row("a", n, n) for n in range(9)))
    done = epochs(site)
    forks.fork(site.pipeline, site.settings, "again", int(done[at].checkpoint.id))
    maintenance.rewind(site.pipeline, site.settings, int(done[back_to].checkpoint.id))
    branch = replace(site, pipeline=forks.branched(site.pipeline, site.settings, "again"))
    begin = done[at].checkpoint.offsets["clicks"]
    read = readers(branch.pipeline, branch.settings)["clicks"]
    assert sum(file.rows for file in read.look(begin).fresh) == rows
    planned = read.plan(begin, branch.settings.epoch, None)  # as where another source has rows
    assert planned.rows == rows
    read.discard(planned)
    assert len(epochs(branch)) == rows // 3
    epochs(site)  # the pipeline reads on, and so may a branch that runs meanwhile
    assert sum(file.rows for file in read.look(begin).fresh) == 6 - 3 * at
    lose(site, "p", 9)
    epochs(branch)
    assert totals(branch) == totals(site) == {"a": (9, 36)}


def test_a_drill_reads_the_archive_and_not_the_source(tmp_path):
    site = retaining(tmp_path, 2)
    put(site.landing, "p", *(row("a", n, n) for n in range(6)))
    epochs(site)
    put(site.landing, "p", row("a", 6, 6))
    lose(site, "p", 7)  # what nobody has read yet, too
    before = site.objects()
    done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
    assert done.replay is not None and done.replay.rows == 3 and not done.problems, done
    assert [name for name in site.objects() if "landed" in name] == [name for name in before if "landed" in name]
    for file in landed(site):
        file.write_bytes(file.read_bytes()[:-1])
    (problem, *_) = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor()).problems
    assert "Archived input has changed" in problem


def test_archived_input_that_was_altered_is_damage(tmp_path):
    site = retaining(tmp_path, 9)
    put(site.landing, "p", *(row("a", n, n) for n in range(6)))
    first, _ = epochs(site)
    lose(site, "p", 6)
    maintenance.rewind(site.pipeline, site.settings, int(first.checkpoint.id))
    for file in (site.storage / "landed").rglob("*.json"):
        file.write_bytes(file.read_bytes().replace(b'"limited"', b'"limiteD"'))
    with pytest.raises(DamageError, match="Archived input has changed"):
        epochs(site)
    kinds = {finding.kind.value for finding in fsck.examine(site.pipeline, site.settings).findings}
    assert kinds == {"altered object"}


# -- where it begins, and goes on


def test_a_pipeline_begins_where_its_source_says_and_latest_does_not_move_on(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, start="latest"))
    put(site.landing, "p", *(row("a", n, n) for n in range(5)))
    (reader,) = readers(site.pipeline, site.settings).values()
    assert reader.look(None).fresh == ()
    put(site.landing, "p", row("a", 100, 5))
    assert len(reader.look(None).fresh) == 1, "what has come since it was first asked"

    placed = site_of(tmp_path / "placed", replace(SOURCE, start=(("p", 3),)))
    put(placed.landing, "p", *(row("a", n, n) for n in range(5)))
    epochs(placed)
    assert totals(placed) == {"a": (2, 7)}


def test_before_the_first_checkpoint_a_source_stands_where_it_began(tmp_path):
    """Not where its definition says now: the newest place is another one by then."""
    site = site_of(tmp_path, replace(SOURCE, start="latest"), {"WEIR_EPOCH__MAX_ROWS": "3"})
    put(site.landing, "p", *(row("a", n, n) for n in range(5)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Partitions, "begin", lambda *_: {"p": 2})
        epochs(site)
    assert totals(site) == {"a": (3, 9)}
    decided = rewind.plan(site.pipeline, site.settings, 0)
    assert [source.again.waiting for source in decided.sources] == [3] and decided.obstacles == ()
    maintenance.rewind(site.pipeline, site.settings, 0)
    put(site.landing, "p", row("a", 100, 5))
    epochs(site)
    assert totals(site) == {"a": (4, 109)}
    assert position(site)["began"] == {"p": 2} and position(site)["rows"] == 4


def test_where_nobody_knows_any_more_where_a_source_began_it_is_refused(tmp_path, monkeypatch):
    site = site_of(tmp_path)
    put(site.landing, "p", *(row("a", n, n) for n in range(5)))
    advance = ConnectorReader.advance
    earlier = lambda *asked: {k: v for k, v in advance(*asked).items() if k != "began"}  # noqa: E731
    monkeypatch.setattr(ConnectorReader, "advance", earlier)
    epochs(site)
    with pytest.raises(ConfigurationError, match=r"Nobody knows any more where .* clicks began to be read"):
        maintenance.rewind(site.pipeline, site.settings, 0)


def test_a_seek_is_a_checkpoint_of_its_own_that_a_rewind_takes_back(tmp_path):
    site = site_of(tmp_path, options={"WEIR_CHECKPOINTS__NUM_RETAINED": "9"})
    put(site.landing, "p", *(row("a", n, n) for n in range(4)))
    (done,) = epochs(site)
    planned = seek.plan(site.pipeline, site.settings, "clicks", {"p": 2})
    described.check_facts("seek", planned.to_dict())
    sought = maintenance.seek(site.pipeline, site.settings, "clicks", {"p": 2}, "once more")
    assert (sought.kind, sought.parent_id) == ("seek", done.checkpoint.id)
    assert sought.reason == "clicks is read from {'p': 2}: once more"
    epochs(site)
    assert totals(site) == {"a": (6, 6 + 5)}, "rows that are read twice count twice"
    assert fsck.examine(site.pipeline, site.settings).findings == ()

    maintenance.rewind(site.pipeline, site.settings, int(done.checkpoint.id))
    epochs(site)
    assert totals(site) == {"a": (4, 6)}
    maintenance.seek(site.pipeline, site.settings, "clicks", "latest")
    put(site.landing, "p", row("a", 10, 9))
    epochs(site)
    assert totals(site) == {"a": (5, 16)}


def test_what_cannot_be_sought_is_refused_by_name(tmp_path):
    site = site_of(tmp_path)
    with pytest.raises(ConfigurationError, match="has no checkpoint yet"):
        maintenance.seek(site.pipeline, site.settings, "clicks", "latest")
    with pytest.raises(ConfigurationError, match=r"has no source 'cliks'"):
        maintenance.seek(site.pipeline, site.settings, "cliks", "latest")


def test_a_history_is_read_to_its_end_and_then_what_is_live_from_where_it_stood(tmp_path):
    past = replace(SOURCE, name="past", root="{landing}/past")
    now = replace(SOURCE, name="now", root="{landing}/now", start="latest")
    site = site_of(tmp_path, chain(past, now, name="clicks", idle_after="0s"), {"WEIR_EPOCH__MAX_ROWS": "4"})  # type: ignore[arg-type]
    put(site.landing / "past", "p", *(row("a", n, n) for n in range(10)))
    put(site.landing / "now", "p", row("a", 1000, 0))  # before it begins: the history has that
    following = run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor())
    first = next(following)
    assert first.checkpoint.offsets["clicks"]["at"] == {"of": "history", "at": {"p": 4}, "live": {"p": 1}}
    put(site.landing / "now", "p", *(row("b", n, 20 + n) for n in range(3)))  # while the history is loaded
    list(following)
    assert totals(site) == {"a": (10, 45), "b": (3, 3)}
    put(site.landing / "now", "q", row("c", 7, 30))
    epochs(site)
    assert totals(site)["c"] == (1, 7) and position(site)["at"]["of"] == "live"
    put(site.landing / "past", "p", row("z", 1, 0))
    assert epochs(site) == [], "a history that goes on is over"


def test_a_source_that_is_added_to_a_running_pipeline_is_read_whole_beside_the_others(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, root="{landing}/one"))
    put(site.landing / "one", "p", *(row("a", n, n) for n in range(3)))
    epochs(site)
    more = replace(SOURCE, name="more", root="{landing}/two")
    put(site.landing / "two", "p", row("b", 5, 0))
    sums = aggregate("more_sums", more, key="id", sink=delta.append("more_sums"), n=agg.count())
    wider = replace(site, pipeline=replace(site.pipeline, stages=(*site.pipeline.stages, sums), added=("more",)))
    epochs(wider)
    assert wider.table("more_sums")["n"].tolist() == [1] and totals(wider) == {"a": (3, 3)}


# -- away


def test_a_run_says_at_its_beginning_why_a_source_cannot_be_asked(tmp_path, monkeypatch, capsys):
    """The run asks again, as long as the connector's patience lasts; meanwhile nothing else is printed."""
    site = site_of(tmp_path)

    def plan(*_: object, **__: object) -> None:
        raise TransientError("The server is away.")

    monkeypatch.setattr(Partitions, "plan", plan)
    options = RunOptions(until_caught_up=True)
    began = partial(running._say_begun, options)
    with pytest.raises(TransientError):
        list(run(site.pipeline, site.settings, options, executor=InMemoryExecutor(), began=began))
    assert "no checkpoint yet, what waits is not known: The server is away." in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("why", ["away", "no password"])
def test_status_and_sensors_say_that_a_source_cannot_be_looked_at_and_show_the_rest(tmp_path, monkeypatch, why):
    site = site_of(tmp_path)
    put(site.landing, "p", row("a", 1, 0))
    epochs(site)
    if why == "away":

        def plan(*_: object, **__: object) -> None:
            raise TransientError("The server is away.")

        monkeypatch.setattr(Partitions, "plan", plan)
        there, reason = site, "The server is away."
    else:
        there = replace(site, pipeline=of(replace(SOURCE, connection="clicks_db")))
        there.options["WEIR_CONNECTIONS__CLICKS_DB"] = "{options: {password: {env: NOT_THERE_AT_ALL}}}"
        reason = "The environment variable NOT_THERE_AT_ALL is not set in this process."
    facts = status.status_of(there.pipeline, there.settings)
    assert facts["unreachable"] == {"clicks": reason} and facts["last_checkpoint"]["id"] == 1
    assert f"not known in partitions clicks: {reason}" in dict(status._lines("clicks", facts))["waiting"]
    assert sensor.observe(there.pipeline, there.settings).unreachable == (reason,)
    assert backlog.observed(there.pipeline, there.settings, head(there)) == {"clicks": {"not known": reason}}
    look = PipelineLook(
        60, retained=[head(there)], arrived=backlog.arrivals(there.pipeline, there.settings, head(there))
    )
    exported = [sample for sample in samples(look) if sample[0].startswith(("weir_source", "weir_checkpoint_id"))]
    assert exported == [("weir_source_up", ("clicks",), 0.0), ("weir_checkpoint_id", (), 1.0)]


def head(site: Site) -> Any:
    newest = open_storage(site.pipeline, site.settings)[1].head()
    assert newest is not None
    return newest
