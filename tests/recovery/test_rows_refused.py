"""A sink that refuses what is committed: it is said, a rewind takes it back without publishing it, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from deltalake import DeltaTable

from state_ops.coordination import publishing_refused
from state_ops.errors import DamageError, PipelineError, TransientError, WeirError
from state_ops.fsck.findings import Kind
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.recovery.refusing_ledger import banks, refuse
from tests.recovery.small import Bank
from tests.tools.stages import altered
from weir import Pipeline
from weir.cli import status
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, plan, promotion
from weir.ownership import derived_checkpoint, publish
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import publish_missing, unpublished
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}


def both(path: str, **options) -> Pipeline:
    """A table and a ledger that get the same rows."""
    booked = replace(small.accounts, sink=LedgerSink(name="ledger", path=path, **options))
    table = replace(small.accounts, uid="again", sink=small.delta.append("booked"))
    return Pipeline("small", (booked, table), max_parallelism=8)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "ledger.db")


@pytest.fixture(params=[False, True], ids=["rows stay", "rows are taken back"])
def bank(request, tmp_path, path) -> Bank:
    return banks(tmp_path / "site", both(path, takes_back=request.param))


@pytest.fixture
def refusing(monkeypatch):
    """The ledger refuses rows of more than 1."""

    def has_more(rows):
        return any(value > 1 for batch in rows.batches() for value in batch.column("amount").to_pylist())

    return refuse(monkeypatch, has_more, "positive")


def amounts(bank: Bank) -> list[int]:
    return sorted(set(bank.site.table("booked")["amount"]))


def booked(path: str) -> list[int]:
    return sorted({amount for _, amount in ledger.rows_of(path)})


def corrected(rows: pl.DataFrame, state, epoch) -> pl.DataFrame:
    return rows.select("id", "at", "amount").filter(pl.col("amount") <= 1)


def with_the_correction(bank: Bank) -> Bank:
    stages = tuple(altered(stage, function=corrected) for stage in bank.site.pipeline.stages)
    return Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, stages=stages)))


def back(bank: Bank, to: int):
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, to)
    assert decided.obstacles == ()
    return maintenance.rewind(bank.site.pipeline, bank.site.settings, to)


def findings(bank: Bank) -> list[Kind]:
    return [finding.kind for finding in fsck.examine(bank.site.pipeline, bank.site.settings).findings]


def test_a_rewind_takes_it_back_and_the_corrected_stage_goes_on(bank, path, refusing):
    bank.epochs(1)
    with pytest.raises(PipelineError, match="violates") as refused:
        bank.epochs(2)
    assert "weir rewind small --to 1" in refused.value.next and "no row is lost" in refused.value.next
    with pytest.raises(PipelineError, match="violates"):
        bank.epochs(3)
    assert amounts(bank) == [1, 2], "the other sink has its rows"
    assert [row.id for row in unpublished(bank.registry)] == [2]
    rewound = back(bank, 1)
    assert rewound.sinks["ledger"].lacks == [2] and rewound.sinks["booked"].lacks == []
    assert unpublished(bank.registry) == []
    assert amounts(bank) == [1]
    with_the_correction(bank).epochs()
    assert amounts(bank) == [1] and booked(path) == [1]
    assert findings(bank) == []


def test_a_plan_says_what_is_committed_and_not_published_and_why(bank, path, refusing):
    def said() -> list[tuple[str, str, str]]:
        findings = plan.plan(bank.site.pipeline, bank.site.settings, executor=InMemoryExecutor()).findings
        return [(found.kind, found.name, found.what) for found in findings if found.aspect == "rows"]

    bank.epochs(1)
    assert said() == []
    with pytest.raises(PipelineError, match="violates") as refused:
        bank.epochs(2)
    ((kind, name, what),) = said()
    assert (kind, name) == ("sink", "ledger")
    assert what.startswith("checkpoint 2 is committed and not published: ") and "violates" in what
    assert what.endswith(refused.value.what)
    publishing_refused.clear(open_storage(bank.site.pipeline, bank.site.settings)[0])
    assert said() == [("sink", "ledger", "checkpoint 2 is committed and not published")]
    back(bank, 1)
    assert said() == []


@pytest.mark.parametrize("kind", [TransientError, DamageError])
def test_a_sink_that_cannot_be_asked_after_the_commit_is_said_to_lack_it(bank, path, monkeypatch, kind):
    """No way back is advised: the rows are not at fault."""
    bank.epochs(1)
    with monkeypatch.context() as patched:

        def fails(*_):
            raise kind("It takes no writes.", next="Wait.")

        patched.setattr(ledger.Ledger, "publish", fails)
        for land in ((2,), (3,)):
            with pytest.raises(kind, match="takes no writes") as said:
                bank.epochs(*land)
            assert said.value.next == (
                "Wait. Checkpoint 2 is committed and not published in ledger: nothing is lost, and the next run tries "
                "again."
            )
    bank.epochs()
    assert booked(path) == [1, 2, 3]


def test_what_is_published_and_not_recorded_is_taken_back_as_such(bank, path, monkeypatch):
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(
            "state_ops.checkpoints.registry.Registry.record_publications",
            lambda *_: (_ for _ in ()).throw(OSError("cut off")),
        )
        with pytest.raises(WeirError):
            bank.epochs(2)
    stays = bank.site.pipeline.sink("ledger").stays
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, 1)
    assert decided.never == {}
    assert bool(decided.obstacles) == (stays is not None), "the ledger has the rows"
    rewound = maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=decided.obstacles)
    assert rewound.sinks["ledger"].lacks == []
    assert amounts(bank) == [1]


@pytest.mark.parametrize("published", ["booked", "ledger"])
def test_a_crash_before_the_rewind_is_published_and_a_zombie_change_nothing(
    bank, path, refusing, monkeypatch, published
):
    """A process that has not heard of the rewind publishes what is abandoned, before recovery completes it."""
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    row = bank.registry.head()
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    with monkeypatch.context() as patched:
        patched.setattr(derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError, match="cut off"):
            maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert [row.id for row in unpublished(bank.registry)] == [3], "the abandoned one is not waited for"
    assert findings(bank) == [Kind.UNPUBLISHED_ROWS] * 2
    refusing()
    staged = [file for file in zombie.registry.files(row) if file.sink == published]
    publish._publish(zombie, row, published, staged)
    with_the_correction(bank).epochs()
    assert amounts(bank) == [1]
    rows_stay = bank.site.pipeline.sink("ledger").stays is not None
    assert booked(path) == ([1, 2] if published == "ledger" and rows_stay else [1])
    publish._publish(zombie, row, published, staged)
    assert amounts(bank) == [1]
    assert findings(bank) == []


def test_a_table_that_somebody_constrains_after_the_commit(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError):
            bank.epochs(2)
    table = DeltaTable(str(bank.site.storage / "tables/booked"))
    table.alter.add_constraint({"small": "amount < 2"})
    with pytest.raises(PipelineError, match="it has the constraint small"):
        bank.epochs()
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, 1)
    assert decided.never == {"booked": (2,)}
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=decided.obstacles)
    DeltaTable(str(bank.site.storage / "tables/booked")).alter.drop_constraint("small")
    bank.epochs()
    bank.assert_exact(1, 2)


def test_what_a_zombie_publishes_after_a_rewind_was_decided_goes_with_it(tmp_path, monkeypatch):
    """The table lacked the rows when the rewind was decided, and has them when it is carried out."""
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError):
            bank.epochs(2)
        zombie, row = _zombie_of(bank), bank.registry.head()
        patched.setattr(derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError, match="cut off"):
            maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    publish._publish(zombie, row, "booked", [file for file in zombie.registry.files(row) if file.sink == "booked"])
    assert amounts(bank) == [1, 2]
    with maintenance.owning(bank.site.pipeline, bank.site.settings):
        assert amounts(bank) == [1]
    bank.epochs()
    bank.assert_exact(1, 2)


def test_nobody_goes_back_to_what_a_sink_never_got_without_hearing_of_it(bank, refusing):
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    back(bank, 1)
    (obstacle,) = rewind.plan(bank.site.pipeline, bank.site.settings, 2).obstacles[-1:]
    assert "rows of checkpoint 2 never came into the sink ledger" in obstacle
    with pytest.raises(WeirError, match="never came into the sink ledger"):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, 2)


def test_rows_that_stay_are_published_before_a_rewind(bank, path, refusing):
    """Of two checkpoints that a sink lacks, the older one stays: it must come, or nothing is taken back."""
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    pipeline, settings = bank.site.pipeline, bank.site.settings
    with maintenance.owning(pipeline, settings, epochs=False) as owner:  # another checkpoint behind it
        head = owner.context.registry.head()
        derived_checkpoint.commit(
            owner.context, head, owner.begin(head), derived_checkpoint.unchanged(owner.context, head), kind="edit",
            what="by hand", head=head, parent=head.id,
        )  # fmt: skip
    with pytest.raises(PipelineError, match="violates"):
        maintenance.rewind(pipeline, settings, 2)
    assert bank.registry.head().id == 3
    refusing()
    maintenance.rewind(pipeline, settings, 2)
    assert booked(path) == [1, 2] and amounts(bank) == [1, 2]


def test_commands_that_publish_nothing_go_on_and_a_promotion_does_not(bank, path, refusing):
    bank.epochs(1)
    forks.fork(bank.site.pipeline, bank.site.settings, "fix", 1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    pipeline, settings = bank.site.pipeline, bank.site.settings
    maintenance.savepoint(pipeline, settings, "here", "", 5)
    assert findings(bank) == [Kind.UNPUBLISHED_ROWS]
    with maintenance.owning(pipeline, settings, epochs=False) as owner:
        (bank.site.storage / "state/junk/g1-e1").mkdir(parents=True)
        done = fsck.repair(owner.context)
    assert [finding.kind for finding in done.publish] == [Kind.UNPUBLISHED_ROWS]
    assert findings(bank) == [Kind.UNPUBLISHED_ROWS], "it is still said"
    with pytest.raises(PipelineError, match="violates"):
        accepted = promotion.plan(pipeline, settings, "fix").obstacles
        promotion.promote(pipeline, settings, "fix", executor=small.InMemoryExecutor(), accepted=accepted)
    back(bank, 1)
    with_the_correction(bank).epochs()
    assert booked(path) == [1]


def test_the_checkpoint_to_go_back_to_stays(bank, refusing):
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "here", "", 5)
    assert bank.ids() == [1, 2]
    back(bank, 1)


def test_the_status_says_what_is_not_published_and_why(bank, refusing):
    bank.epochs(1)
    facts = status.status_of(bank.site.pipeline, bank.site.settings)
    assert [sink["unpublished"] for sink in (*facts["tables"], *facts["sinks"])] == [None, None]
    with pytest.raises(PipelineError):
        bank.epochs(2)
    facts = status.status_of(bank.site.pipeline, bank.site.settings)
    (table,), (sink,) = facts["tables"], facts["sinks"]
    assert (table["last_published"], table["unpublished"]) == (2, None)
    assert (sink["last_published"], sink["unpublished"]["checkpoints"]) == (1, [2])
    assert sink["unpublished"]["why"] == "A row violates the constraint positive."
    (line,) = [text for name, text in status._lines("small", facts) if name == "unpublished"]
    assert (
        line == "ledger lacks committed rows since checkpoint 2, 1 checkpoint: A row violates the constraint positive."
    )
    back(bank, 1)
    assert all(
        sink["unpublished"] is None for sink in status.status_of(bank.site.pipeline, bank.site.settings)["sinks"]
    )


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_deploy_of_another_delivery_takes_it_back_as_well(bank, path, refusing, delivery):
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    changed = Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, delivery=delivery)))
    decided = rewind.plan(changed.site.pipeline, changed.site.settings, 1)
    maintenance.rewind(changed.site.pipeline, changed.site.settings, 1, accepted=decided.obstacles)
    with_the_correction(changed).epochs()
    assert amounts(bank) == [1] and booked(path) == [1]


def test_a_marker_that_was_set_back_is_damage_for_a_rewind_too(bank, path, refusing):
    bank.epochs(1)
    with pytest.raises(PipelineError):
        bank.epochs(2)
    with ledger.transaction(path) as connection:
        connection.execute("UPDATE markers SET id = 7")
    pipeline, settings = bank.site.pipeline, bank.site.settings
    decided = rewind.plan(pipeline, settings, 1)
    with pytest.raises(DamageError, match="its last published checkpoint is 7"):
        maintenance.rewind(pipeline, settings, 1, accepted=decided.obstacles)
    assert bank.registry.head().id == 2


def test_at_least_once_what_was_delivered_stays_the_sinks_own(tmp_path, path, monkeypatch):
    """Rows come before their commit, so nothing that is committed waits; a rewind moves the markers as ever."""
    plain = Bank.at(tmp_path / "site", **RETAINED)
    bank = Bank(replace(plain.site, pipeline=replace(both(path, takes_back=True), delivery="at_least_once")))
    bank.epochs(1, 2)
    assert unpublished(bank.registry) == []
    back(bank, 1)
    bank.epochs()
    assert amounts(bank) == [1, 2] and booked(path) == [1, 2]
    with pytest.raises(WeirError):
        publish_missing(_zombie_of(bank), bank.registry.checkpoints())


def _zombie_of(bank: Bank):
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        context = owner.context
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False):
        pass
    return context
