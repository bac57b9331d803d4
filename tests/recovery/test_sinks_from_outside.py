"""Sinks that an installed package brings, each in one module and found by its entry point, work everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable

from tests.recovery import small
from tests.recovery.small import Bank
from tests.recovery.test_sinks import expected, findings
from tests.tools.distributions import describe
from weir import Pipeline, Sink, sink
from weir.dagster import metadata, specs
from weir.operations import forks, plan, promotion
from weir.ownership.pipeline_storage import open_storage
from weir.restore import rewind
from weir.run import maintenance

MODULE = '''
import json
from dataclasses import dataclass
from pathlib import Path

from weir import DamageError, Published, Sink
from weir.connectors.delta.publishers import AppendPublisher
from weir.definition.delta_sink import DeltaSink


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookSink(Sink):
    """A file of JSON that is replaced as a whole."""

    path: str

    @property
    def stays(self):
        return None

    def open(self, opening):
        return Notebook(Path(opening.resolve(self.path)))


class Notebook:
    def __init__(self, path):
        self._path = path

    def _read(self):
        return json.loads(self._path.read_text()) if self._path.exists() else {"marker": None, "rows": []}

    def check(self, schema): ...

    def prepare(self, schema): ...

    def close(self): ...

    def marker(self):
        return self._read()["marker"]

    def publish(self, previous, checkpoint, rows):
        return self._moved(previous, checkpoint, checkpoint, rows)

    def take_back(self, previous, checkpoint, to, rows):
        return self._moved(previous, checkpoint, to or 0, rows)

    def _moved(self, previous, checkpoint, to, rows):
        now = self._read()
        if now["marker"] is not None and now["marker"] >= checkpoint:
            return Published(0)
        if now["marker"] != previous:
            raise DamageError(f"The marker is {now['marker']} instead of {previous}.")
        new = [[row["id"], row["amount"], checkpoint] for batch in rows.batches() for row in batch.to_pylist()]
        kept = [row for row in now["rows"] if row[2] <= to]
        self._path.with_suffix(".new").write_text(json.dumps({"marker": checkpoint, "rows": kept + new}))
        self._path.with_suffix(".new").replace(self._path)
        return Published(len(new))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedSink(DeltaSink):
    """A table of which a file tells who has published what."""

    path: str

    def open(self, opening):
        audited = Audited.of(self, opening)
        audited.path = Path(opening.resolve(self.path))
        return audited


class Audited(AppendPublisher):
    def publish(self, previous, checkpoint, rows):
        with self.path.open("a") as file:
            file.write(f"{checkpoint}\\n")
        return super().publish(previous, checkpoint, rows)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as an installer would leave it."""
    site = tmp_path / "site-packages"
    describe(
        site,
        "weir-outside",
        "weir.sinks",
        {"notebook": "weir_outside:NotebookSink", "audited": "weir_outside:AuditedSink"},
    )
    (site / "weir_outside.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "weir_outside", raising=False)


@pytest.fixture(params=["notebook", "audited"])
def made(request: pytest.FixtureRequest, installed: None, tmp_path: Path) -> Sink:
    return sink(request.param, name="booked", path=str(tmp_path / "book"))


@pytest.fixture
def bank(made: Sink, tmp_path: Path) -> Bank:
    plain = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="8")
    booked = replace(small.accounts, sink=made)
    return Bank(replace(plain.site, pipeline=Pipeline("small", (booked,), max_parallelism=8)))


@pytest.fixture
def rows(made: Sink, bank: Bank, tmp_path: Path) -> Callable[[], list[tuple[str, int]]]:
    """The rows that are in the sink."""

    def of_notebook() -> list[tuple[str, int]]:
        return sorted((id, amount) for id, amount, _ in json.loads((tmp_path / "book").read_text())["rows"])

    def of_table() -> list[tuple[str, int]]:
        table = DeltaTable(str(bank.site.storage / "tables" / "booked")).to_pyarrow_table(columns=["id", "amount"])
        return sorted((row["id"], row["amount"]) for row in table.to_pylist())

    return of_table if made.capabilities.has_versions else of_notebook


def test_rows_come_once_and_go_with_a_rewind(bank, rows):
    code, settings = bank.site.pipeline, bank.site.settings
    assert not plan.plan(code, settings).stops
    bank.epochs(1, 2, 3)
    assert rows() == expected(1, 2, 3)
    assert not plan.plan(code, settings).stops
    assert rewind.plan(code, settings, 1).obstacles == ()
    maintenance.rewind(code, settings, 1)
    assert rows() == expected(1)
    bank.epochs(4)
    assert rows() == expected(1, 2, 3, 4)
    assert findings(bank) == []


def test_a_branch_writes_elsewhere_and_its_promotion_brings_its_rows(bank, rows, tmp_path):
    bank.epochs(1, 2)
    code, settings = bank.site.pipeline, bank.site.settings
    forks.fork(code, settings, "fix", 1)
    branch = Bank(replace(bank.site, pipeline=forks.branched(code, settings, "fix")))
    branch.epochs()
    assert rows() == expected(1, 2)
    assert len(branch.site.pipeline.tables) == 1
    assert promotion.plan(code, settings, "fix").obstacles == ()
    promotion.promote(code, settings, "fix", executor=small.InMemoryExecutor())
    assert rows() == expected(1, 2)
    bank.epochs(3)
    assert rows() == expected(1, 2, 3)
    assert findings(bank) == []


def test_its_own_publisher_publishes_what_its_checkpoint_has_recorded(bank, made, tmp_path):
    bank.epochs(1, 2)
    (head, *_) = sorted(bank.registry.checkpoints(), key=lambda row: -row.id)
    if made.capabilities.has_versions:
        assert (tmp_path / "book").read_text().split() == ["1", "2"]
        assert head.sinks["booked"].how == {"v": 1, "as": "append"}
    else:
        assert head.sinks["booked"].how == {"v": 1, "as": "notebook", "facts": {"path": str(tmp_path / "book")}}


def test_dagster_shows_it(bank, made):
    bank.epochs(1)
    code, settings = bank.site.pipeline, bank.site.settings
    storage, registry = open_storage(code, settings)
    (spec,) = specs.tables(code, settings, storage)
    shown, version = metadata.of_sink_now(code, registry.head(), code.stages[0], code.sinks[0], storage)
    assert version is not None
    if made.capabilities.has_versions:
        assert spec.kinds == {"delta", "table"} and isinstance(spec.metadata["table"], dg.PathMetadataValue)
        assert shown["dagster/row_count"] == 10
    else:
        assert spec.kinds == {"notebook"} and spec.metadata["kind"] == "notebook"
