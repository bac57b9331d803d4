"""A deploy between a commit and its publish: rows come as their checkpoint says, or the sink has to be put back."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.errors import PipelineError, WeirError
from state_ops.fsck.findings import Kind
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.records.sink_link import SinkLink
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank, InMemoryExecutor
from weir import Pipeline, delta
from weir.operations import forks, plan, promotion
from weir.ownership import publish
from weir.run import fsck, maintenance

APPEND = delta.append("booked")
UPSERT = delta.upsert("booked", "id", order_by=["at"])
WHERE = delta.replace("booked", where="amount > 1")
EVOLVING = delta.append("booked", evolve="add")


def using(bank: Bank, *sinks) -> Bank:
    stages = [replace(small.accounts, uid=f"accounts{number or ''}", sink=sink) for number, sink in enumerate(sinks)]
    return Bank(replace(bank.site, pipeline=Pipeline("small", tuple(stages), max_parallelism=8)))


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="8")


def cut(bank: Bank, monkeypatch, *numbers: int) -> None:
    """Epochs that are committed and whose process ends before they are published."""
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError):
            bank.epochs(*numbers)


def counts(bank: Bank) -> dict[int, int]:
    return dict(bank.site.table("booked")["amount"].value_counts().sort_index())


@pytest.mark.parametrize(
    ("then", "now", "rows"),
    [
        (APPEND, WHERE, {1: 10, 2: 10}),
        (APPEND, UPSERT, {1: 10, 2: 10}),
        (APPEND, None, {1: 10, 2: 10}),
        (UPSERT, APPEND, {1: 2, 2: 10}),
        (UPSERT, delta.upsert("booked", ["id", "at"]), {1: 2, 2: 10}),
        (UPSERT, None, {1: 2, 2: 10}),
        (WHERE, APPEND, {1: 10, 2: 10}),
        (EVOLVING, APPEND, {1: 10, 2: 10}),
    ],
)
def test_rows_of_a_table_come_as_their_checkpoint_says(bank, monkeypatch, then, now, rows):
    (using(bank, then) if then is not WHERE else using(bank, APPEND)).epochs(1)
    cut(using(bank, then), monkeypatch, 2)
    deployed = using(bank, now)
    with maintenance.owning(deployed.site.pipeline, deployed.site.settings, publishes=True):
        pass
    assert counts(bank) == rows


def test_a_checkpoint_of_an_earlier_release_goes_by_the_code(bank, monkeypatch):
    using(bank, APPEND).epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr("weir.epoch.steps.recorded", lambda _, link, *__: link)
        cut(using(bank, APPEND), patched, 2)
    assert bank.registry.head().sinks["booked"].how is None
    deployed = using(bank, APPEND)
    with maintenance.owning(deployed.site.pipeline, deployed.site.settings, publishes=True):
        pass
    assert counts(bank) == {1: 10, 2: 10}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (lambda path: LedgerSink(name="ledger", path=f"{path}2"), "has path"),
        (lambda path: LedgerSink(name="ledger", path=path, takes_back=True), "has takes_back False"),
        (lambda _: delta.append("ledger"), "now: a table"),
        (lambda _: None, "now: no sink"),
        (lambda path: LedgerSink(name="renamed", path=path), "now: no sink"),
    ],
    ids=["place", "definition", "a table", "removed", "renamed"],
)
def test_another_system_has_to_be_put_back(bank, monkeypatch, tmp_path, now, said):
    path = str(tmp_path / "ledger.db")
    before = using(bank, LedgerSink(name="ledger", path=path))
    before.epochs(1)
    cut(before, monkeypatch, 2)
    with pytest.raises(PipelineError, match=said) as refused:
        using(bank, now(path)).epochs()
    assert "Put the sink ledger back" in refused.value.next
    before.epochs()
    assert sorted({amount for _, amount in ledger.rows_of(path)}) == [1, 2]


def test_a_table_that_lies_elsewhere_by_now_has_to_be_put_back(bank, monkeypatch, tmp_path):
    before = using(bank, delta.append(str(tmp_path / "w/booked")))
    before.epochs(1)
    cut(before, monkeypatch, 2)
    name = before.site.pipeline.sinks[0].name
    with pytest.raises(PipelineError, match=f"for the sink {name}, which lies at"):
        using(bank, replace(before.site.pipeline.sinks[0], at=str(tmp_path / "x/booked"))).epochs()
    before.epochs()


def test_a_promotion_brings_rows_as_the_branch_has_handed_them_out(bank):
    using(bank, APPEND).epochs(1, 2)
    pipeline, settings = using(bank, APPEND).site.pipeline, bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix"))).epochs()
    deployed = using(bank, WHERE).site.pipeline
    promotion.promote(deployed, settings, "fix", executor=InMemoryExecutor())
    assert counts(bank) == {1: 10, 2: 10}


def test_a_branch_that_changed_the_kind_of_its_sink_is_not_promoted(bank):
    using(bank, APPEND).epochs(1)
    pipeline, settings = using(bank, APPEND).site.pipeline, bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    using(bank, APPEND).epochs(2)
    Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix"))).epochs()
    using(bank, APPEND).epochs(3)
    deployed = using(bank, UPSERT).site.pipeline
    Bank(replace(bank.site, pipeline=forks.branched(deployed, settings, "fix"))).epochs()
    with pytest.raises(WeirError, match="for two kinds of sink"):
        promotion.plan(deployed, settings, "fix")


# -- two sinks at one place


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../booked", "file://{}", "link"])
def test_two_tables_at_one_place_are_refused_by_name(bank, tmp_path, spelling):
    place = tmp_path / "w" / "booked"
    place.mkdir(parents=True)
    (tmp_path / "w" / "linked").symlink_to(place)
    other = str(tmp_path / "w" / "linked") if spelling == "link" else spelling.format(place)
    sinks = (delta.append(str(place)), replace(delta.append("other"), at=other))
    two = using(bank, *sinks)
    with pytest.raises(PipelineError, match="lie at one place") as refused:
        two.epochs(1)
    assert all(sink.name in refused.value.what for sink in sinks)
    assert two.ids() == []
    assert plan.plan(two.site.pipeline, two.site.settings, executor=InMemoryExecutor()).stops


def test_a_table_within_another_is_refused(bank, tmp_path):
    two = using(bank, delta.append(str(tmp_path / "w")), delta.append(str(tmp_path / "w/inside")))
    with pytest.raises(PipelineError, match="lie in each other"):
        two.epochs(1)


# -- a process that was taken for dead


def test_a_repair_leaves_what_a_process_taken_for_dead_may_still_deliver(bank):
    bank = Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, delivery="at_least_once")))
    bank.epochs(1)
    head = bank.registry.head()
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as zombie:
        zombie.heartbeat.begin(CheckpointId(2), early=True)
    ours, theirs = epoch_dir(Generation(1), head.id), epoch_dir(zombie.context.generation, CheckpointId(2))
    staged = [file for file in bank.registry.files(head) if file.in_table]
    late = [replace(file, path=file.path.replace(ours, theirs)) for file in staged]
    for file, copy in zip(staged, late, strict=True):
        (bank.site.storage / copy.path).parent.mkdir(exist_ok=True)
        (bank.site.storage / copy.path).write_bytes((bank.site.storage / file.path).read_bytes())
    zombie.context.sinks.keep({copy.path: pq.read_metadata(bank.site.storage / copy.path) for copy in late})
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as successor:
        fsck.repair(successor.context)
    zombie.context.registry.prove = lambda _: None  # it had, before it was suspended
    link = SinkLink(CheckpointId(2), head.id)
    publish.deliver(zombie.context, replace(head, id=CheckpointId(2), sinks={"booked": link}), late)
    assert len(bank.site.table("booked")) == 2 * sum(file.rows for file in staged)
    bank.epochs(2)
    assert [kind for kind in _findings(bank) if kind is Kind.MISSING_ROWS] == []


def _findings(bank: Bank) -> list[Kind]:
    return [finding.kind for finding in fsck.examine(bank.site.pipeline, bank.site.settings).findings]


@pytest.mark.parametrize("change", ["delete", "update"])
def test_an_upsert_goes_on_behind_what_others_have_rewritten(bank, change):
    """delta-rs writes views of texts, which Arrow does not filter."""
    upserting = using(bank, UPSERT)
    upserting.epochs(1)
    table = DeltaTable(str(bank.site.storage / "tables/booked"))
    if change == "delete":
        table.delete("at = 9")
    else:
        table.update(predicate="at = 9", new_values={"amount": "5"})
    upserting.epochs(2)
    assert counts(bank) == ({1: 1, 2: 10} if change == "delete" else {1: 1, 2: 10, 5: 1})
