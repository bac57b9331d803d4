"""What `weir top` and the report say is wrong, from what a look has read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from state_ops.coordination.lease import FAILED, LEASE, Heartbeat, Lease, failure
from state_ops.coordination.results import Checked, RecordedDrill
from state_ops.coordination.suspension import Suspension
from state_ops.errors import ConfigurationError, DamageError, GateError, StageError, TransientError, WeirError
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.restores import Restored
from state_ops.records.snapshot_files import STATE, StateFile
from tests.recovery.harness import Site
from tests.recovery.small import Bank
from tests.weir.gates.test_gates import between, gated
from tests.weir.run.test_source_alignment import land, pipeline_of
from weir.cli.watching import figures, problems, timeline
from weir.cli.watching.figures import EpochFigures
from weir.cli.watching.monitor import seen
from weir.cli.watching.pipeline_look import Opened, PipelineLook, Watched
from weir.cli.watching.problems import LOOK, NOTE, WRONG
from weir.epoch import steps
from weir.execution.in_process import InMemoryExecutor
from weir.operations.forks import drop, fork
from weir.ownership.pipeline_storage import open_storage, readers
from weir.run.fsck import examine_and_note
from weir.run.run import RunOptions, run
from weir.sources.positions import Arrivals
from weir.sources.slices import SourceFile

NOW = datetime(2026, 5, 1, 3, 0, tzinfo=UTC)
HOLDER = Lease(Generation(3), 7, CheckpointId(12), "etl-3", 4711, "b", 5.0, "run-1", stopped=True, outcome="ended")
WAITS = {"landing": Arrivals((SourceFile("a.parquet", 10, 1, 5),))}
EPOCH = EpochFigures(
    12, 11, "checkpoint", "interval", "", 3, "run-1", NOW - timedelta(seconds=20), NOW - timedelta(seconds=10),
    100, 100, 0, None, 2.0, {"stages": 10.0}, "accounts", {}, {"accounts": 1000}, 1000, 10, 3,
)  # fmt: skip


def at(age: timedelta, **changes) -> EpochFigures:
    return replace(EPOCH, completed_at=NOW - age, triggered_at=NOW - age - timedelta(seconds=2), **changes)


def wrong(look: PipelineLook, *epochs: EpochFigures) -> list[tuple[str, str]]:
    listed = problems.problems("small", replace(look, at=NOW), list(epochs) or [EPOCH])
    return [(problem.severity, problem.what) for problem in listed]


def test_nothing_is_wrong_with_a_pipeline_that_runs_and_one_that_has_nothing_to_do():
    assert wrong(PipelineLook(60.0, HOLDER, alive=True, generation=3)) == []
    assert wrong(PipelineLook(60.0, HOLDER, alive=False, generation=3)) == []


def test_a_coordinator_that_ended_without_a_word_one_that_failed_and_nobody():
    dead = PipelineLook(60.0, replace(HOLDER, stopped=False, outcome=None), alive=False)
    assert wrong(dead) == [(WRONG, "its coordinator died: process 4711 on etl-3, generation 3")]
    raised = failure(FAILED, HOLDER, StageError("accounts raised ValueError: no", next="Correct it."))
    ((severity, what),) = wrong(PipelineLook(60.0, replace(HOLDER, outcome=FAILED, failures=[raised]), alive=False))
    assert severity == WRONG and "StageError: accounts raised ValueError: no next: Correct it." in what
    idle = PipelineLook(60.0, HOLDER, alive=False, arrived=WAITS)
    assert wrong(idle) == [(LOOK, "nobody runs it, and 1 file waits")]
    by_hand = replace(idle, suspended=Suspension("stopped", "lunch", when="2026-05-01T02:00:00+00:00"))
    assert [severity for severity, _ in wrong(by_hand)] == [NOTE], "somebody knows that nobody runs it"
    assert wrong(replace(dead, alive=None)) == [], "on another host nobody can tell yet"


def test_a_coordinator_that_lives_and_makes_no_epoch_though_input_waits():
    look, old = PipelineLook(60.0, HOLDER, alive=True, arrived=WAITS), at(timedelta(minutes=20))
    assert wrong(look, old) == [(WRONG, "no epoch for 20 min, though 1 file waits and a coordinator lives")]
    assert wrong(replace(look, arrived={}), old) == [], "there is nothing to read"
    assert wrong(replace(look, interval=3600.0), old) == [], "its interval is longer than that"
    assert wrong(look, at(timedelta(minutes=1))) == []


def test_a_coordinator_whose_heart_stands_still_hangs_though_its_process_exists(tmp_path):
    bank = Bank.at(tmp_path / "site")
    bank.land(1)
    watched, texts = Watched("small", bank.site.settings, closely=True), []
    with Heartbeat(watched.open().storage, Generation(1), CheckpointId(0), 60.0, None):
        for seconds in (0.0, 179.0, 180.0):
            look = watched.look(lambda at=seconds: at)
            texts.append([problem.what for problem in problems.problems("small", look, [])])
    assert texts[:2] == [[], []]
    assert texts[2][0].startswith(f"its heart has not beaten for 3 min, though process {os.getpid()} on ")


def test_epochs_that_take_longer_than_their_interval_and_coordinators_that_follow_each_other():
    look = PipelineLook(1.0, HOLDER, alive=True)
    slow = [at(timedelta(seconds=seconds), id=seconds) for seconds in (30, 20, 10)]
    ((severity, what),) = wrong(look, *slow)
    assert severity == LOOK and "2.0 s) than the interval of 1 s; most of the time goes to accounts" in what
    flapping = [at(timedelta(minutes=8 - number), generation=number) for number in range(8)]
    assert any("coordinators in 30 min" in what for _, what in wrong(PipelineLook(60.0, HOLDER, alive=True), *flapping))


def test_state_that_has_doubled_in_a_day():
    grown = [at(timedelta(hours=20), bytes_total=800_000_000), at(timedelta(minutes=1), bytes_total=2_000_000_000)]
    ((severity, what),) = wrong(PipelineLook(60.0, HOLDER, alive=True), *grown)
    assert severity == LOOK and what.startswith("the state has grown from 800 MB to 2.0 GB since 2026-04-30")


@pytest.mark.parametrize(
    ("error", "page"),
    [
        (TransientError("no connection"), "docs/playbooks/storage-down.md"),
        (DamageError("a file is missing"), "docs/playbooks/corrupt-checkpoint.md"),
        (ConfigurationError("there is no such setting", next="Correct it."), None),
        (OSError(28, "No space left on device"), "docs/playbooks/disk-full.md"),
    ],
)
def test_why_a_pipeline_cannot_be_read_names_its_page(error, page):
    problem = problems.unreadable(error)
    assert problem.severity == WRONG and problem.page == page
    assert page is None or (Path(__file__).parents[4] / page).is_file()


def test_each_page_that_is_named_is_there():
    text = Path(problems.__file__).read_text()
    pages = {part for part in text.replace('"', " ").split() if part.startswith("docs/")}
    assert len(pages) >= 9 and all((Path(__file__).parents[4] / page).is_file() for page in pages)


# -- of real pipelines


def looked(bank: Bank) -> tuple[PipelineLook, list[EpochFigures]]:
    look = Watched("small", bank.site.settings, closely=True).look()
    return look, [figures.of_epoch(row, bank.site.pipeline) for row in look.retained]


@pytest.mark.long
def test_a_gate_that_holds_is_the_first_that_is_said(tmp_path):
    bank = gated(tmp_path, between("amount", 0, 1))
    with pytest.raises(GateError):
        bank.epochs(1, 2)
    first, *_ = problems.problems("small", *looked(bank))
    assert first.severity == WRONG and "A quality gate of the stage accounts failed" in first.what
    assert first.page == "docs/how-to/gates.md" and first.next.startswith("The epoch was declined")


def test_rows_that_a_table_lacks_and_a_run_that_failed_over_them(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1)

    def refused(*_: object) -> None:
        raise OSError("the table cannot be reached")

    with monkeypatch.context() as broken:
        broken.setattr(steps, "publish_missing", refused)
        with pytest.raises(WeirError, match="cannot be reached"):
            bank.epochs(2)
    look, epochs = looked(bank)
    problems_named = [problem.what for problem in problems.problems("small", look, epochs)]
    assert any("committed rows are missing in booked" in what for what in problems_named)
    assert any("the last run failed" in what and "the table cannot be reached" in what for what in problems_named)
    (sink,) = figures.of_sinks(look, bank.site.pipeline)
    assert (sink.newest, sink.behind) == (2, 1)
    bank.epochs()
    assert problems.problems("small", *looked(bank)) == []


def test_a_source_that_waits_for_a_slower_one_is_named(tmp_path):
    options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "5"}
    site = Site(tmp_path, options, pipeline_of(), "tests.weir.run.test_source_alignment")
    for name, numbers in (("fast", range(5)), ("slow", range(1))):
        (site.landing / name).mkdir(parents=True)
        for number in numbers:
            land(site, name, number)
    reports = run(site.pipeline, site.settings, RunOptions(interval=0.1, max_seconds=60.0), InMemoryExecutor())
    for report in reports:
        if str(report.checkpoint.offsets["fast"].get("last")).startswith("003"):  # three days before the slower one
            break
    reports.close()
    watched = Watched("pace", site.settings, closely=True)
    opened = open_storage(site.pipeline, site.settings)
    watched.opened = Opened(site.pipeline, *opened, readers(site.pipeline, site.settings))
    look = watched.look()
    assert look.ahead == {"fast"} and look.arrived["fast"].waiting > 0
    notes = [problem.what for problem in problems.problems("pace", look, []) if problem.severity == NOTE]
    assert any("source fast is its max_ahead before slower ones" in what for what in notes)


@pytest.mark.parametrize("bad", ["x", None, {}, {"how": "failed", "when": 5, "message": 7}, "naive", "undated"])
def test_what_is_no_failure_in_a_lease_is_left_out_and_not_passed_on(tmp_path, bad):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.land(1)
    good = failure(FAILED, HOLDER, StageError("no"))
    bad = {"naive": {**good, "when": "2026-01-01T00:00:00"}, "undated": {**good, "when": "then"}}.get(str(bad), bad)
    opened = Watched("small", bank.site.settings).open().storage
    kept = [good, bad, good, bad]
    opened.put_bytes(LEASE, json.dumps(asdict(replace(HOLDER, outcome=FAILED, failures=kept))).encode())
    row = seen(Watched("small", bank.site.settings, closely=True))
    assert row.look is not None and row.look.holder is not None and row.look.holder.failures == [good, good]
    assert row.state == "FAILED" and "StageError: no" in row.problems[0].what
    assert [event.kind for event in timeline.events(row.look, [], [])] == ["run failed"] * 2
    with Heartbeat(opened, Generation(4), CheckpointId(0), 60.0, None):
        assert json.loads(opened.read_bytes(LEASE) or b"")["failures"] == [good, good]


# -- what checks and drills have noted


CHECKED = Checked(NOW, 2.0, False, 0, {}, 0, 5, 5, "etl-3")
DRILLED = RecordedDrill(NOW, 60.0, 12, True, True, True, 1.0, 2.0, 3.0, 4.0, "etl-3")


def test_what_checks_and_drills_have_found_is_a_problem_and_stands_in_the_timeline():
    look = PipelineLook(60.0, HOLDER, alive=True, generation=3, checked=[CHECKED], drilled=DRILLED)
    assert wrong(look) == []
    kinds = [(event.kind, event.at, event.severity) for event in timeline.events(look, [], [])]
    assert kinds == [("checked", NOW, NOTE), ("drilled", NOW, NOTE)]
    quick = replace(CHECKED, quick=True, at=NOW + timedelta(hours=1))
    damaged = replace(CHECKED, damaged=2, intact=4)
    for checked in ([damaged], [damaged, quick], [CHECKED, replace(damaged, quick=True)]):
        ((severity, what),) = wrong(replace(look, checked=checked))
        assert severity == WRONG and "found 2 damaged things; 4 of 5 checkpoints can be restored" in what
        assert ("quick" in what) == (checked[-1].damaged > 0 and checked[-1].quick)
        events = timeline.events(replace(look, checked=checked), [], [])
        assert [event.severity for event in events if event.kind == "checked"].count(WRONG) == 1
    failed = replace(look, drilled=replace(DRILLED, comes_back=False, recovery_seconds=None))
    ((severity, what),) = wrong(failed)
    assert severity == WRONG and "checkpoint 12 would not come back as it was" in what
    restored = Restored(CheckpointId(12), "c", "drill", False, "it is gone", 1, 1, restored_at=NOW)
    assert len(wrong(replace(failed, restored=restored))) == 1, "said once"
    ((severity, what),) = wrong(replace(look, drilled=replace(DRILLED, in_time=False)))
    assert severity == LOOK and "it comes back after 3.0 s, and misses its objectives" in what


def test_a_check_that_found_damage_is_seen_until_one_finds_none(tmp_path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1, 2)
    (file, *_) = sorted(path for path in (bank.site.storage / "state").rglob("*") if path.is_file())
    content = file.read_bytes()
    watched, clock, texts = Watched("small", bank.site.settings, closely=True), [0.0], []
    for text, seconds in ((b"", 0.0), (content, 10.0), (content, 40.0)):
        file.write_bytes(text)
        examine_and_note(bank.site.pipeline, bank.site.settings)
        clock[0] = seconds
        look = watched.look(lambda: clock[0])
        texts.append(" ".join(problem.what for problem in problems.problems("small", look, [])))
    assert "the last check of contents (" in texts[0] and "damaged" in texts[1], "notes rest for half a minute"
    assert texts[2] == ""


def test_a_branch_that_was_dropped_since_is_not_idle(tmp_path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1)
    fork(bank.site.pipeline, bank.site.settings, "try")
    watched = Watched("small@try", bank.site.settings, closely=True)
    assert watched.look().head is not None
    drop(bank.site.pipeline, bank.site.settings, "try")
    with pytest.raises(WeirError, match="has no branch 'try'"):
        watched.look()
    fork(bank.site.pipeline, bank.site.settings, "try")
    assert watched.look().head is not None


def test_the_figures_of_epochs_are_what_the_registry_says(tmp_path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1, 2)
    bank.epochs(3)
    look, epochs = looked(bank)
    assert [(epoch.id, epoch.rows_in, epoch.rows_out) for epoch in epochs] == [(1, 10, 10), (2, 10, 10), (3, 10, 10)]
    head = bank.registry.head()
    assert head is not None and epochs[-1].state == {"accounts": head.bytes_total}
    assert epochs[-1].seconds == head.ms["to_commit"] / 1000
    assert epochs[-1].phases["stages"] == pytest.approx(head.ms["stage:accounts"], abs=0.01)
    assert 0 <= (epochs[-1].waited_seconds or -1) < 600
    assert figures.restarts(epochs, look) == 1
    assert (figures.rows_per_second(epochs) or 0) > 0


def test_the_pace_is_that_of_the_newest_coordinator():
    of_before = [at(timedelta(hours=2), generation=2, rows_in=10**9)]
    now = [at(timedelta(seconds=30 - 10 * number), rows_in=500) for number in range(3)]
    assert figures.rows_per_second([*of_before, *now]) == pytest.approx(50)
    assert figures.rows_per_second([]) is None
    assert figures.growth_per_hour([at(timedelta(hours=2), bytes_total=0), at(timedelta(0), bytes_total=500)]) == 250


def test_the_subtask_with_most_state_is_named(tmp_path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    bank.epochs(1)
    head = bank.registry.head()
    assert head is not None
    stats = replace(head.operators["accounts"], parallelism=4)
    head = replace(head, operators={"accounts": stats})

    def file(subtask: int, bytes: int) -> StateFile:
        return StateFile("accounts", subtask, STATE, "f", "p", bytes, "d", True, AttemptId("a"))

    (stage,) = figures.of_stages(head, [file(0, 100), file(1, 100), file(2, 700), file(3, 100)])
    assert (stage.largest, stage.skew) == (2, 2.8)
    (stage,) = figures.of_stages(head)
    assert stage.skew is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9.5, "9.5"), (950, "950"), (9_999, "9999"), (12_345, "12.3k"), (999_960, "1.0M"), (4.56e9, "4.6G")],
)
def test_counts_are_short(number, text):
    assert figures.short_number(number) == text


@pytest.mark.parametrize(
    ("bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1_234, "1.2 kB"), (999_999, "1.0 MB"), (-34_000_000, "-34.0 MB"), (123e9, "123 GB")],
)
def test_sizes_are_short(bytes, text):
    assert figures.size(bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.84, "0.8 s"), (90, "90 s"), (150, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_short(seconds, text):
    assert figures.ago(seconds) == text
