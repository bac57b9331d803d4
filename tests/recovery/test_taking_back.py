"""A sink from which rows can be taken back follows rewinds and promotions, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest

from state_ops.arrow.unfit_values import UnfitValue
from state_ops.errors import PipelineError, WeirError
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank
from tests.recovery.test_sinks import expected, findings, marker
from tests.tools.stages import altered
from weir import Pipeline
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, promotion
from weir.restore import rewind
from weir.run import fsck, maintenance


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "ledger.db")


@pytest.fixture
def bank(tmp_path, path) -> Bank:
    """The small pipeline, whose rows go to a ledger from which they can be taken back."""
    plain = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="9")
    booked = replace(small.accounts, sink=LedgerSink(name="ledger", path=path, takes_back=True))
    return Bank(replace(plain.site, pipeline=Pipeline("small", (booked,), max_parallelism=8)))


class Plain:
    """A publisher that cannot take back."""

    def __init__(self, ledger: ledger.Ledger) -> None:
        for name in ("check", "prepare", "marker", "publish", "close"):
            setattr(self, name, getattr(ledger, name))


def crash(context, row):
    raise OSError("cut off")


def test_a_rewind_takes_rows_back_and_their_files_are_read_again(bank, path):
    bank.epochs(1, 2, 3)
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, 1)
    assert decided.obstacles == ()
    assert decided.to_dict()["sinks"]["ledger"] == {"kind": "ledger", "published": 3, "then": 1, "stays": None}
    done = maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert (ledger.rows_of(path), marker(path)) == (expected(1), done.id)
    assert findings(bank) == []
    bank.epochs(4)
    assert ledger.rows_of(path) == expected(1, 2, 3, 4)
    assert findings(bank) == []


def test_a_rewind_that_was_cut_off_before_it_took_rows_back_is_finished(bank, path, monkeypatch):
    """A zombie that publishes an abandoned checkpoint meanwhile has its rows taken back with the others."""
    bank.epochs(1, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.derived_checkpoint.publish_missing", crash)
        with pytest.raises(WeirError, match="cut off"):
            maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert ledger.rows_of(path) == expected(1, 2, 3)
    with ledger.transaction(path) as connection:  # as if 3 had not been published yet: the marker is at 2
        connection.execute("UPDATE markers SET id = 2")
        connection.execute("DELETE FROM booked WHERE checkpoint = 3")
    bank.epochs(4)
    assert ledger.rows_of(path) == expected(1, 2, 3, 4)
    assert findings(bank) == []


def test_a_taking_back_that_fails_is_done_by_the_next_run_alone_with_the_code_that_can(bank, path, monkeypatch):
    bank.epochs(1, 2)

    make = LedgerSink.open

    def away(*_: object):
        raise WeirError("The ledger is away.")

    with monkeypatch.context() as patched:
        patched.setattr(ledger.Ledger, "take_back", away)
        with pytest.raises(WeirError, match="is away"):
            maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    with monkeypatch.context() as patched:
        patched.setattr(LedgerSink, "open", lambda *given: Plain(make(*given)))
        with pytest.raises(PipelineError, match="takes rows back from the sink ledger, which its code cannot"):
            bank.epochs()
    assert ledger.rows_of(path) == expected(1, 2)
    bank.epochs()
    assert ledger.rows_of(path) == expected(1, 2)
    assert marker(path) == bank.registry.head().id == 4


def test_rows_that_were_taken_back_do_not_come_again_and_that_has_to_be_accepted(bank, path):
    bank.epochs(1, 2, 3, 4)
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 2)  # 5
    bank.epochs(5)  # 6 to 8
    plan = rewind.plan(bank.site.pipeline, bank.site.settings, 3)
    assert plan.obstacles == ("checkpoint 5 has taken rows back from the sink ledger that do not come again",)
    for to in (1, 2, 5, 6):
        assert rewind.plan(bank.site.pipeline, bank.site.settings, to).obstacles == ()
    done = maintenance.rewind(bank.site.pipeline, bank.site.settings, 3, accepted=plan.obstacles)
    assert done.sinks["ledger"].taken == [[2, 5], [3, 9]]
    assert ledger.rows_of(path) == expected(1, 2)
    done = maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert done.sinks["ledger"].taken == [[1, 10]]
    bank.epochs()
    assert ledger.rows_of(path) == expected(1, 2, 3, 4, 5)
    assert findings(bank) == []


@pytest.mark.long
def test_many_rewinds_record_a_bounded_number_of_ranges(bank, path, monkeypatch):
    monkeypatch.setattr(rewind, "_MOST_TAKEN", 3)
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"})
    bank.epochs(1, 2)
    for _ in range(6):
        head = bank.registry.head().id
        maintenance.rewind(bank.site.pipeline, bank.site.settings, bank.registry.checkpoints()[-2].id)
        bank.epochs()
        assert bank.registry.head().id > head
    taken = bank.registry.head().sinks["ledger"].taken
    assert len(taken) == 3
    assert ledger.rows_of(path) == expected(1, 2)


def test_a_promotion_takes_rows_back_and_brings_the_branchs(bank, path, monkeypatch):
    bank.epochs(1, 2, 3)
    settings, code = bank.site.settings, bank.site.pipeline
    forks.fork(code, settings, "fix", 1)
    changed = replace(code, stages=(altered(code.stages[0], function=_doubled),))
    branch = Bank(replace(bank.site, pipeline=forks.branched(changed, settings, "fix")))
    branch.epochs()
    assert ledger.rows_of(path) == expected(1, 2, 3)
    decided = promotion.plan(changed, settings, "fix")
    assert decided.obstacles == ()
    assert decided.to_dict()["sinks"]["ledger"] == {"kind": "ledger", "keeps": False, "lacks": False, "rows_added": 20}
    with monkeypatch.context() as patched:
        patched.setattr("weir.operations.promotion.publish_missing", crash)
        with pytest.raises(WeirError, match="cut off"):
            promotion.promote(changed, settings, "fix", executor=small.InMemoryExecutor())
    assert ledger.rows_of(path) == expected(1, 2, 3)
    promoted = Bank(replace(bank.site, pipeline=changed))
    doubled = [(key, 2 * amount) for key, amount in expected(2, 3)]
    promoted.epochs()
    assert ledger.rows_of(path) == sorted(expected(1) + doubled)
    promoted.epochs(4)
    assert ledger.rows_of(path) == sorted(expected(1) + doubled + [(key, 8) for key, _ in expected(4)])
    assert [finding.kind for finding in fsck.examine(changed, settings).findings] == []
    maintenance.rewind(changed, settings, 1)
    assert ledger.rows_of(path) == expected(1)


def _doubled(rows: pl.DataFrame, state, epoch):
    return small.accounts.function(rows, state, epoch).with_columns(amount=2 * pl.col("amount"))


class Rules:
    """No row has an amount above 2."""

    def refused(self, rows: pa.Table) -> Iterator[UnfitValue]:
        for row, amount in enumerate(rows.column("amount").to_pylist()):
            if amount > 2:
                yield UnfitValue(row, "amount", f"is {amount}, and the ledger takes no more than 2")


@pytest.mark.parametrize("what", ["values", "columns"])
def test_a_promotion_is_refused_before_its_commit_if_the_sink_does_not_take_the_branchs_rows(
    bank, path, monkeypatch, what
):
    """The branch's table took them."""
    bank.epochs(1, 2, 3)
    pipeline, settings = bank.site.pipeline, bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix"))).epochs()
    before = bank.ids()
    with monkeypatch.context() as patched:
        if what == "values":
            patched.setattr(ledger.Ledger, "rules", lambda *_: Rules(), raising=False)
        else:

            def refuses(_: object, schema: pa.Schema) -> None:
                raise PipelineError(f"no column {schema.names[-1]}")

            patched.setattr(ledger.Ledger, "check", refuses)
        with pytest.raises(PipelineError, match="is 3, and the ledger" if what == "values" else "no column") as refused:
            promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    if what == "values":
        assert "row 1" in refused.value.where and "Nothing was changed" in refused.value.next
    assert bank.ids() == before and ledger.rows_of(path) == expected(1, 2, 3)
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    assert ledger.rows_of(path) == expected(1, 2, 3)
    assert findings(bank) == []
