"""A sink that is no table has each row once, whatever happens; a rewind moves its marker, and says that rows stay."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from state_ops.errors import DamageError, PipelineError, TransientError, WeirError
from state_ops.fsck.findings import Kind
from state_ops.records.snapshot_files import OUTPUT
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank
from tests.tools.stages import altered
from weir import Pipeline
from weir.definition.sink import no_rows
from weir.operations import forks, promotion
from weir.ownership import publish
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import publish_missing, unpublished
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
APP = "weir/small/main/ledger"


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "ledger.db")


@pytest.fixture
def bank(tmp_path, path) -> Bank:
    """The small pipeline, whose rows go to a ledger."""
    plain = Bank.at(tmp_path / "site", **RETAINED)
    booked = replace(small.accounts, sink=LedgerSink(name="ledger", path=path))
    return Bank(replace(plain.site, pipeline=Pipeline("small", (booked,), max_parallelism=8)))


def expected(*numbers: int) -> list[tuple[str, int]]:
    keys = {
        number: [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)] for number in numbers
    }
    return sorted((key, number) for number in numbers for key in keys[number])


def marker(path: str, app: str = APP) -> int | None:
    return ledger.Ledger(path, app).marker()


def findings(bank: Bank) -> list[Kind]:
    return [finding.kind for finding in fsck.examine(bank.site.pipeline, bank.site.settings).findings]


def test_each_epochs_rows_are_handed_over_once(bank, path):
    reports = bank.epochs(1, 2, 3)
    assert ledger.rows_of(path) == expected(1, 2, 3)
    assert marker(path) == 3
    (published,) = reports[-1].publications
    assert (published.sink, published.rows, published.delta_version) == ("ledger", 10, None)
    how = {"v": 1, "as": "ledger", "facts": {"path": path, "takes_back": False}}
    assert bank.registry.head().to_dict()["sinks"] == {"ledger": {"id": 3, "before": 2, "kind": "ledger", "how": how}}
    assert findings(bank) == []


def test_staged_rows_stay_as_long_as_their_checkpoint(bank):
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    bank.epochs(1, 2, 3)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    named = {file.path for file in registry.files(registry.head()) if file.kind == OUTPUT}
    assert named and {file.path for file in storage.list("outputs")} == named


def test_what_a_crash_left_unpublished_is_published_before_anything_else(bank, path, monkeypatch):
    bank.epochs(1)

    def down(self, previous, checkpoint, rows):
        raise TransientError("The ledger is away.", next="Wait.")

    with monkeypatch.context() as patched:
        patched.setattr(ledger.Ledger, "publish", down)
        with pytest.raises(WeirError, match="away"):
            bank.epochs(2)
    assert [row.id for row in unpublished(bank.registry)] == [2]
    assert findings(bank) == [Kind.UNPUBLISHED_ROWS]
    bank.epochs(3)
    assert ledger.rows_of(path) == expected(1, 2, 3)


def test_a_crash_between_publishing_and_recording_doubles_nothing(bank, path, monkeypatch):
    def crash(self, generation, publications):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr("state_ops.checkpoints.registry.Registry.record_publications", crash)
        with pytest.raises(WeirError):
            bank.epochs(1)
    assert ledger.rows_of(path) == expected(1)
    assert findings(bank) == [Kind.UNRECORDED_PUBLICATION]
    bank.epochs(2)
    assert ledger.rows_of(path) == expected(1, 2)
    assert findings(bank) == []


def test_a_marker_that_is_not_where_the_registry_says_stops_a_run(bank, path):
    bank.epochs(1, 2)
    with ledger.transaction(path) as connection:
        connection.execute("UPDATE markers SET id = 1")
    with pytest.raises(DamageError, match="its last published checkpoint is 1, but the registry's newest is 2"):
        bank.epochs(3)
    assert findings(bank) == [Kind.SINK_BEHIND]
    with ledger.transaction(path) as connection:
        connection.execute("DELETE FROM markers")
    with pytest.raises(DamageError, match="is None"):
        bank.epochs(3)
    with ledger.transaction(path) as connection:
        connection.execute("INSERT INTO markers VALUES (?, 9)", (APP,))
    assert findings(bank) == [Kind.SINK_AHEAD]


def test_a_sink_that_is_away_is_said_by_fsck_and_blocks_nothing(bank, monkeypatch):
    bank.epochs(1)

    def away(self):
        raise TransientError("The ledger is away.")

    monkeypatch.setattr(ledger.Ledger, "marker", away)
    report = fsck.examine(bank.site.pipeline, bank.site.settings)
    assert [finding.kind for finding in report.findings] == [Kind.UNREACHABLE_SINK]
    assert not report.damage


def test_a_sink_that_is_another_kind_of_thing_now_is_refused(bank):
    bank.epochs(1)
    table = replace(small.accounts, sink=small.delta.append("ledger"))
    other = Bank(replace(bank.site, pipeline=Pipeline("small", (table,), max_parallelism=8)))
    with pytest.raises(DamageError, match="it is a table now, and checkpoint 1 knows it as ledger"):
        other.epochs(2)


def test_rows_that_the_sink_does_not_take_are_refused_before_the_first(bank):
    refused = Pipeline("small", (altered(bank.site.pipeline.stages[0], function=_refused),), max_parallelism=8)
    with pytest.raises(PipelineError, match="refused"):
        Bank(replace(bank.site, pipeline=refused)).epochs(1)


def _nothing(rows: pl.DataFrame, state, epoch) -> None:
    """Its state is all that is wanted."""


def _refused(rows: pl.DataFrame, state, epoch):
    return rows.select("id", refused="amount")


# -- rewind


@pytest.mark.parametrize("is_table", [True, False], ids=["table", "another system"])
def test_a_stage_that_hands_out_nothing_has_no_use_for_a_sink(bank, is_table):
    counted = altered(small.accounts if is_table else bank.site.pipeline.stages[0], function=_nothing)
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (counted,), max_parallelism=8)))
    with pytest.raises(PipelineError, match=r"The rows for the sink \w+ have no columns"):
        bank.epochs(1)
    assert bank.ids() == []


def test_the_dry_run_says_that_rows_stay_and_the_rewind_has_to_be_accepted(bank, path):
    bank.epochs(1, 2, 3)
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, 1)
    assert decided.obstacles == (
        "rows of checkpoints after 1 stay in the sink ledger: what ledger has been given cannot be taken back",
    )
    assert decided.to_dict()["sinks"]["ledger"]["published"] == 3
    with pytest.raises(WeirError, match="stay in the sink ledger"):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert marker(path) == 3
    rewound = maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=decided.obstacles)
    assert marker(path) == rewound.id == 4
    assert rewound.sinks["ledger"].to_json() == {"id": 4, "before": 3, "kind": "ledger"}
    bank.epochs(4)
    assert ledger.rows_of(path) == sorted(expected(1, 2, 3, 4) + expected(2, 3))
    assert findings(bank) == []


def test_a_rewind_to_where_the_sink_is_has_no_obstacle(bank, path):
    bank.epochs(1)
    silent = Pipeline("small", (altered(bank.site.pipeline.stages[0], function=_silent),), max_parallelism=8)
    Bank(replace(bank.site, pipeline=silent)).epochs(2)
    assert marker(path) == 1, "an epoch without rows is no link of the chain"
    assert rewind.plan(bank.site.pipeline, bank.site.settings, 1).obstacles == ()


def _silent(rows: pl.DataFrame, state, epoch):
    return rows.select("id", "at", "amount").clear()


def test_a_zombie_publishes_nothing_after_a_rewind(bank, path):
    bank.epochs(1, 2, 3)
    rows = {row.id: row for row in bank.registry.checkpoints()}
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=_obstacles(bank))
    with ledger.transaction(path) as connection:
        connection.execute("DELETE FROM booked")
    with pytest.raises(WeirError):
        publish_missing(zombie, [rows[2], rows[3]])  # what it records is fenced
    assert ledger.rows_of(path) == []


def test_a_zombie_may_publish_while_a_rewind_is_decided_and_not_published(bank, path, monkeypatch):
    """The marker is behind or at any checkpoint of the abandoned chain: the rewind moves it from there."""
    bank.epochs(1, 2, 3)

    def crash(context, row):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.derived_checkpoint.publish_missing", crash)
        with pytest.raises(WeirError, match="cut off"):
            maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=_obstacles(bank))
    with ledger.transaction(path) as connection:  # as if 3 had not been published yet, and a zombie is at it
        connection.execute("UPDATE markers SET id = 2")
    bank.epochs(4)
    assert marker(path) == bank.registry.head().id


def test_a_zombie_that_is_faster_than_the_rewind_is_passed(bank, path, monkeypatch):
    bank.epochs(1, 2)
    slow = ledger.Ledger.publish

    def overtaken(self, previous, checkpoint, rows):
        if checkpoint == 3 and previous == 1:
            with ledger.transaction(path) as connection:
                connection.execute("UPDATE markers SET id = 2")
        return slow(self, previous, checkpoint, rows)

    with ledger.transaction(path) as connection:
        connection.execute("UPDATE markers SET id = 1")
    monkeypatch.setattr(ledger.Ledger, "publish", overtaken)
    booked = ledger.Ledger(path, APP)
    moved = publish._move_marker(booked, lambda m: booked.publish(m, 3, no_rows()), 2, frozenset({1, 2}))
    assert (moved.rows, marker(path)) == (0, 3)


def test_a_marker_that_no_checkpoint_of_the_chain_has_is_damage_for_a_rewind_too(bank, path):
    bank.epochs(1, 2)
    with ledger.transaction(path) as connection:
        connection.execute("DELETE FROM markers")
    with pytest.raises(DamageError):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=_obstacles(bank))
    assert bank.registry.head().id == 2


def _obstacles(bank: Bank) -> tuple[str, ...]:
    return rewind.plan(bank.site.pipeline, bank.site.settings, 1).obstacles


# -- branches


def test_on_a_branch_the_sink_is_a_table_and_a_promotion_has_to_be_accepted(bank, path):
    bank.epochs(1, 2)
    settings, code = bank.site.settings, bank.site.pipeline
    forks.fork(code, settings, "fix", 1)
    branch = Bank(replace(bank.site, pipeline=forks.branched(code, settings, "fix")))
    branch.epochs()
    assert ledger.rows_of(path) == expected(1, 2)
    storage, _ = open_storage(branch.site.pipeline, settings)
    assert storage.list_dirs("tables") == ["ledger"]
    decided = promotion.plan(code, settings, "fix")
    assert decided.obstacles == (
        "the sink ledger (ledger) keeps what it was given since the fork and does not get the branch's rows",
    )
    executor = small.InMemoryExecutor()
    with pytest.raises(WeirError, match="keeps what it was given"):
        promotion.promote(code, settings, "fix", executor=executor)
    promoted = promotion.promote(code, settings, "fix", executor=executor, accepted=decided.obstacles)
    assert promoted.sinks["ledger"].to_json() == {"id": int(promoted.id), "before": 2, "kind": "ledger"}
    assert marker(path) == promoted.id
    assert ledger.rows_of(path) == expected(1, 2)
    bank.epochs(3)
    assert ledger.rows_of(path) == expected(1, 2, 3)
    assert findings(bank) == []


def test_connections_are_given_back(bank, monkeypatch):
    opened = []
    make = LedgerSink.open
    monkeypatch.setattr(LedgerSink, "open", lambda self, opening: opened.append(make(self, opening)) or opened[-1])
    bank.epochs(1)
    assert len(opened) == 1 and not opened[0].open
