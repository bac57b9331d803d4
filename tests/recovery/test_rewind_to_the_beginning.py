"""Back to before the first checkpoint: nothing of the pipeline has happened, and the next run reads all anew."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from state_ops.errors import ConfigurationError, PipelineError, WeirError
from state_ops.records.checkpoint import REWIND
from tests.recovery import ledger, small
from tests.recovery.cutting import changes_fail_from
from tests.recovery.ledger import LedgerSink
from tests.recovery.refusing_ledger import banks, refuse
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from weir import Pipeline
from weir.operations import forks, promotion
from weir.ownership import derived_checkpoint, publish
from weir.ownership.publish import publish_missing, unpublished
from weir.restore import rewind
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}


def both(path: str, **options) -> Pipeline:
    """A table and a ledger that get the same rows."""
    booked = replace(small.accounts, uid="again", sink=LedgerSink(name="ledger", path=path, **options))
    return Pipeline("small", (small.accounts, booked), max_parallelism=8)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "ledger.db")


@pytest.fixture(params=[False, True], ids=["rows stay", "rows are taken back"])
def bank(request, tmp_path, path) -> Bank:
    return banks(tmp_path / "site", both(path, takes_back=request.param))


@pytest.fixture
def refusing(monkeypatch):
    """The ledger refuses every row."""
    return refuse(monkeypatch, lambda rows: bool(rows.count), "never")


def back(bank: Bank, to: int = 0, **options):
    return maintenance.rewind(bank.site.pipeline, bank.site.settings, to, **options)


def booked(path: str) -> list[int]:
    return sorted({amount for _, amount in ledger.rows_of(path)})


def whole(bank: Bank) -> bool:
    return not fsck.examine(bank.site.pipeline, bank.site.settings).findings


def test_a_first_checkpoint_that_a_sink_refuses_is_taken_back(bank, path, refusing):
    with pytest.raises(PipelineError, match="violates") as refused:
        bank.epochs(1)
    assert "weir rewind small --to 0" in refused.value.next
    with pytest.raises(PipelineError, match="violates"):
        bank.epochs(2)
    assert rewind.plan(bank.site.pipeline, bank.site.settings, 0).obstacles == ()
    rewound = back(bank)
    assert (rewound.id, rewound.parent_id, rewound.kind) == (2, None, REWIND)
    assert rewound.reason == "to before the first checkpoint"
    assert rewound.sinks["ledger"].lacks == [1] and rewound.sinks["booked"].lacks == []
    assert unpublished(bank.registry) == [] and whole(bank)
    assert len(bank.site.table("booked")) == 0 and booked(path) == [] and bank.ids() == [1, 2]
    refusing()
    reports = bank.epochs()
    assert [(report.checkpoint.id, report.checkpoint.parent_id) for report in reports] == [(3, 2), (4, 3)]
    bank.assert_exact(1, 2)
    assert booked(path) == [1, 2] and whole(bank)


def test_it_is_as_if_nothing_had_ever_happened(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2, 3)
    back(bank)
    assert len(bank.site.table("booked")) == 0
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    back(bank, 2)  # what was abandoned can be gone back to, while it is retained
    bank.assert_exact(1, 2)
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4)
    assert whole(bank)


def test_pruned_checkpoints_do_not_matter(tmp_path):
    bank = Bank.at(tmp_path)
    bank.epochs(1, 2, 3)
    assert bank.ids() == [3]
    back(bank)
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_input_that_is_gone_is_an_obstacle(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2)
    (bank.site.landing / "00001.parquet").unlink()
    with pytest.raises(WeirError, match=r"to before the first checkpoint without loss: .*00001\.parquet"):
        back(bank)
    back(bank, accepted=rewind.plan(bank.site.pipeline, bank.site.settings, 0).obstacles)
    bank.epochs()
    bank.assert_exact(2)


def test_rows_that_stay_in_a_sink_are_an_obstacle(bank, path):
    bank.epochs(1)
    stays = bank.site.pipeline.sink("ledger").stays
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, 0)
    assert bool(decided.obstacles) == (stays is not None)
    back(bank, accepted=decided.obstacles)
    bank.epochs()
    bank.assert_exact(1)
    assert len(ledger.rows_of(path)) == (20 if stays else 10)


def test_a_zombie_that_publishes_the_first_checkpoint_finds_it_taken_back(bank, path, refusing):
    with pytest.raises(PipelineError):
        bank.epochs(1)
    row = bank.registry.head()
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    back(bank)
    refusing()
    with pytest.raises(WeirError):
        publish_missing(zombie, [row])
    assert len(bank.site.table("booked")) == 0 and booked(path) == []
    bank.epochs()
    bank.assert_exact(1)
    assert booked(path) == [1]


@pytest.mark.parametrize("published", ["booked", "ledger"])
def test_a_zombie_publishes_between_the_rewinds_commit_and_its_publication(
    bank, path, refusing, monkeypatch, published
):
    with pytest.raises(PipelineError):
        bank.epochs(1)
    row = bank.registry.head()
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    with monkeypatch.context() as patched:
        patched.setattr(derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError, match="cut off"):
            back(bank)
    refusing()
    publish._publish(zombie, row, published, [file for file in zombie.registry.files(row) if file.sink == published])
    bank.epochs()
    bank.assert_exact(1)
    stays = published == "ledger" and bank.site.pipeline.sink("ledger").stays is not None
    assert len(ledger.rows_of(path)) == (20 if stays else 10)
    assert whole(bank)


@pytest.mark.parametrize("step", sampled([5, 2]))
def test_one_that_is_cut_off_anywhere_is_finished_by_the_next_run_or_was_none(tmp_path, monkeypatch, step):
    first = Bank.at(tmp_path / "first", **RETAINED)
    first.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError):
            first.epochs(2)
    outcomes = set()
    for stop_at in range(0, 200, step):
        bank = Bank(first.site.copied_to(tmp_path / f"{stop_at}"))
        with changes_fail_from(monkeypatch, stop_at):
            try:
                back(bank)
            except (WeirError, OSError):
                pass
            else:
                break
        (bank.site.storage / "coordinator" / "lease.json").unlink(missing_ok=True)  # nobody lives
        head = bank.registry.head()
        outcomes.add(head.kind)
        if head.kind != REWIND:
            assert head.id == 2
            back(bank)
        bank.epochs()
        bank.assert_exact(1, 2)
        assert whole(bank)
    assert stop_at > 10
    assert outcomes == {"checkpoint", REWIND}, "some end before the intent, some after it"


def test_a_branch_and_a_pipeline_from_a_savepoint_have_nothing_before_their_first_checkpoint(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2)
    pipeline, settings = bank.site.pipeline, bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    with pytest.raises(ConfigurationError, match="nothing before the first checkpoint of small@fix"):
        maintenance.rewind(forks.branched(pipeline, settings, "fix"), settings, 0)
    back(bank)
    bank.epochs()
    with pytest.raises(WeirError, match="forked from checkpoint 1, which checkpoint 3 has abandoned"):
        promotion.plan(pipeline, settings, "fix")
    bank.assert_exact(1, 2)
    successor = replace(small.successor, stages=pipeline.stages)
    maintenance.savepoint(pipeline, settings, "here", "", 5)
    options = RunOptions(until_caught_up=True, start_from=f"{bank.site.storage}:here")
    settings = replace(bank.site, pipeline=successor).settings
    list(run(successor, settings, options, small.InMemoryExecutor()))
    with pytest.raises(ConfigurationError, match="begun from another one's savepoint"):
        maintenance.rewind(successor, settings, 0)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_other_deliveries_begin_anew_too(tmp_path, delivery):
    plain = Bank.at(tmp_path, **RETAINED)
    bank = Bank(replace(plain.site, pipeline=replace(small.pipeline, delivery=delivery)))
    bank.epochs(1, 2)
    back(bank)
    bank.epochs()
    bank.assert_exact(1, 2)


def test_the_command_says_where_it_goes(tmp_path, weir):
    bank = Bank.at(tmp_path, **RETAINED)
    empty = weir(bank.site, "rewind", "small", "--to", "0")
    assert empty.code == 1 and "has no checkpoint" in empty.err
    bank.epochs(1, 2)
    facts = json.loads(weir(bank.site, "rewind", "small", "--to", "0", "--dry-run", "--json").out)
    assert (facts["to"], facts["to_completed_at"], facts["abandoned"]) == (0, None, [1, 2])
    assert facts["tables"]["booked"]["rows_removed"] == 20
    shown = weir(bank.site, "rewind", "small", "--to", "0", "--dry-run").out
    assert "From checkpoint 2 back to before the first one. Undone: everything; of it 1, 2 are still" in shown
    done = weir(bank.site, "rewind", "small", "--to", "0", "--yes")
    assert done.code == 0 and "is at checkpoint 3, back to before the first checkpoint" in done.out
    assert weir(bank.site, "status", "small").code == 0 and weir(bank.site, "fsck", "small").code == 0
    bank.epochs()
    bank.assert_exact(1, 2)
