"""At least once: rows are delivered before the commit, and come twice where it fails; state does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import polars as pl
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import FencedError, PipelineError, WeirError
from state_ops.fsck.findings import Severity
from state_ops.records.snapshot_files import OUTPUT
from state_ops.snapshots import stage_upload
from state_ops.storage.storage import Storage
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Apart, Bank, until
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, ValueState, delta, expect
from weir.definition import Input, Stage
from weir.execution.in_process import InMemoryExecutor
from weir.operators.functions import Function
from weir.ownership.leftovers import remove
from weir.ownership.publish import deliver
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
KINDS = ["table", "ledger"]


class Unsure(LedgerSink):
    """It has no transactions."""

    @property
    def exactly_once(self) -> bool:
        return False


@pytest.fixture(params=sampled(KINDS))
def bank(tmp_path, request) -> Bank:
    plain = Bank.at(tmp_path / "site", **RETAINED)
    path = str(tmp_path / "ledger.db")
    sink = delta.append("booked") if request.param == "table" else LedgerSink(name="booked", path=path)
    stages = (replace(small.accounts, sink=sink),)
    return Bank(replace(plain.site, pipeline=Pipeline("small", stages, max_parallelism=8, delivery="at_least_once")))


def amounts(bank: Bank) -> dict[int, int]:
    """How often each file's rows were delivered."""
    sink = bank.site.pipeline.sinks[0]
    if isinstance(sink, LedgerSink):
        given = [amount for _, amount in ledger.rows_of(sink.path)]
    else:
        given = list(bank.site.table("booked")["amount"])
    counts = Counter(given)
    assert all(count % 10 == 0 for count in counts.values())
    return {amount: count // 10 for amount, count in sorted(counts.items())}


def damage(bank: Bank) -> list[str]:
    findings = fsck.examine(bank.site.pipeline, bank.site.settings).findings
    return [str(finding.kind) for finding in findings if finding.severity is Severity.DAMAGE]


def cut_off(*asked, **options):
    raise OSError("cut off")


@pytest.mark.parametrize("bank", KINDS, indirect=True)
def test_without_failures_each_row_comes_once_and_before_the_commit(bank, monkeypatch):
    bank.epochs(1)
    seen = []
    commit = Registry.commit

    def watched(self, checkpoint, files, **options):
        seen.append(amounts(bank))
        return commit(self, checkpoint, files, **options)

    monkeypatch.setattr(Registry, "commit", watched)
    bank.epochs(2)
    assert seen == [{1: 1, 2: 1}] == [amounts(bank)]
    assert [len(report.publications) for report in bank.epochs(3)] == [1]
    assert {row.checkpoint_id for row in bank.registry.publications()} == {1, 2, 3}
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


def test_rows_can_be_seen_before_state_is_uploaded(bank, monkeypatch):
    seen = []
    upload = stage_upload.upload

    def watched(storage, acks, *arguments, **options):
        seen.append(amounts(bank))
        moved = upload(storage, acks, *arguments, **options)
        assert {file.path for ack in moved for file in ack.files if file.kind == OUTPUT} <= puts
        return moved

    puts: set[str] = set()
    put = Storage.put_file

    def put_once(self, local, path, **options):
        assert path not in puts, "what was delivered is not uploaded again"
        puts.add(path)
        return put(self, local, path, **options)

    monkeypatch.setattr(stage_upload, "upload", watched)
    monkeypatch.setattr(Storage, "put_file", put_once)
    bank.epochs(1)
    bank.epochs(2)
    assert seen == [{1: 1}, {1: 1, 2: 1}]


@pytest.mark.parametrize("executor", sampled([InMemoryExecutor, Apart]))
def test_rows_of_a_stage_can_be_seen_before_the_next_one_ends(tmp_path, executor):
    plain = Bank.at(tmp_path / "site", **RETAINED)
    log = plain.site.storage / "tables" / "booked" / "_delta_log"

    def after(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        for number in rows["amount"].unique():
            until(lambda number=number: list(log.glob("*.json")) and number in amounts(bank))
        if epoch.id == 3 and rows.height:
            raise ValueError("it fails after the first stage's rows of 3 are there")
        return rows

    second = Stage(
        uid="second",
        inputs=(Input(small.accounts, key=("id",)),),
        operator=Function(after, small.Account),
        sink=delta.append("again"),
    )
    pipeline = Pipeline("small", (small.accounts, second), max_parallelism=8, delivery="at_least_once")
    bank = Bank(replace(plain.site, pipeline=pipeline))
    bank.epochs(1, executor=executor())
    bank.epochs(2, executor=executor())
    assert amounts(bank) == {1: 1, 2: 1}
    with pytest.raises(WeirError, match="it fails"):
        bank.epochs(3, executor=executor())
    assert amounts(bank) == {1: 1, 2: 1, 3: 1} and bank.ids() == [1, 2]
    bank.epochs(4, executor=executor())
    assert amounts(bank) == {1: 1, 2: 1, 3: 2, 4: 1}
    assert Counter(int(amount) for amount in bank.site.table("again")["amount"]) == {1: 10, 2: 10, 3: 10, 4: 10}
    assert bank.state()["k0"] == (4, 10)
    assert damage(bank) == []


@pytest.mark.parametrize("bank", KINDS, indirect=True)
def test_rows_whose_commit_fails_come_twice_and_state_once(bank, monkeypatch):
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert amounts(bank) == {1: 1, 2: 1}
    assert damage(bank) == []
    bank.epochs(3)
    assert amounts(bank) == {1: 1, 2: 2, 3: 1}
    assert bank.state()["k0"] == (3, 6)
    bank.epochs(4)
    assert amounts(bank) == {1: 1, 2: 2, 3: 1, 4: 1}, "files of the epoch that failed are in the table, and stay"
    assert damage(bank) == []


def test_a_crash_after_the_commit_doubles_nothing(bank, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "record_publications", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(1)
    bank.epochs(2)
    assert amounts(bank) == {1: 1, 2: 1}


def test_a_sink_that_is_away_fails_the_epoch_before_its_commit(bank, monkeypatch):
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.publish._publish", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert bank.ids() == [1]
    bank.epochs(3)
    assert amounts(bank) == {1: 1, 2: 1, 3: 1}


def test_a_rewind_passes_what_has_failed(bank, monkeypatch):
    bank.epochs(1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(3)
    obstacles = rewind.plan(bank.site.pipeline, bank.site.settings, 1).obstacles
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=obstacles)
    kept = isinstance(bank.site.pipeline.sinks[0], LedgerSink)
    assert amounts(bank) == ({1: 1, 2: 1, 3: 1} if kept else {1: 1})
    bank.epochs(4)
    assert amounts(bank) == ({1: 1, 2: 2, 3: 2, 4: 1} if kept else {1: 1, 2: 1, 3: 1, 4: 1})
    assert damage(bank) == []


@pytest.mark.parametrize("bank", KINDS, indirect=True)
def test_a_zombie_delivers_nothing_once_it_is_fenced(bank):
    bank.epochs(1, 2)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    bank.epochs(3)
    head = bank.registry.head()
    with pytest.raises(FencedError):
        deliver(zombie, replace(head, id=head.id + 1), bank.registry.files(head))
    assert amounts(bank) == {1: 1, 2: 1, 3: 1}


def test_an_attempt_that_lost_leaves_what_a_table_may_have(bank):
    bank.epochs(1)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        file = next(file for file in bank.registry.files(bank.registry.head()) if file.kind == OUTPUT)
        remove(owner.context, [file])
    assert (bank.site.storage / file.path).exists() == file.in_table


def test_a_sink_that_is_behind_is_damage_still(bank):
    bank.epochs(1, 2)
    sink = bank.site.pipeline.sinks[0]
    if not isinstance(sink, LedgerSink):
        return
    with ledger.transaction(sink.path) as connection:
        connection.execute("UPDATE markers SET id = 1")
    with pytest.raises(WeirError, match="its last published checkpoint is 1"):
        bank.epochs(3)


# -- definitions


def test_exactly_once_is_refused_with_the_reason(tmp_path):
    unsure = replace(small.accounts, sink=Unsure(name="hook", path=str(tmp_path / "x")))
    with pytest.raises(PipelineError, match=r"the sink hook \(unsure\) has no transactions"):
        Pipeline("small", (unsure,))
    Pipeline("small", (unsure,), delivery="at_least_once")


def test_gates_that_decline_epochs_are_refused_with_at_least_once():
    for failing in ("hold", "quarantine"):
        gate = expect("ExpectColumnValuesToNotBeNull", column="id", on_failure=failing)
        with pytest.raises(PipelineError, match="may decline an epoch"):
            Pipeline("small", (replace(small.accounts, gates=(gate,)),), delivery="at_least_once")
    warned = expect("ExpectColumnValuesToNotBeNull", column="id", on_failure="warn")
    Pipeline("small", (replace(small.accounts, gates=(warned,)),), delivery="at_least_once")


def test_other_deliveries_are_refused():
    with pytest.raises(PipelineError, match="'now_and_then' is nothing that small can promise"):
        Pipeline("small", (small.accounts,), delivery="now_and_then")
