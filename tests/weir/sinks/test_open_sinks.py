"""How long a sink that is away is waited for, and what a table that is created says of its columns."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from state_ops.errors import PipelineError, TransientError
from tests.recovery import ledger, small
from tests.recovery.ledger import LedgerSink
from tests.tools.sampling import sampled
from weir import Pipeline, delta, kafka, postgres
from weir.definition.sink import Sink, SinkOpening
from weir.definition.source import LOOKING, RUNNING
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck
from weir.settings import configuration as settings
from weir.sinks import open_sinks
from weir.sinks.open_sinks import Sinks


@pytest.fixture
def silent() -> Iterator[str]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize("kind", sampled(["kafka", "postgres"]))
def test_who_only_looks_waits_a_few_seconds_for_a_server_that_does_not_answer(kind, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(open_sinks, "LOOKING", 2)
    sink: Sink = (
        kafka.sink("topic", servers=f"127.0.0.1:{silent}")
        if kind == "kafka"
        else postgres.sink("rows", key="id", connection="db")
    )
    options = {"host": "127.0.0.1", "port": silent, "dbname": "rows"}
    environment = {"WEIR_CONNECTIONS": json.dumps({"db": {"options": options}}), "WEIR_STORAGE__ROOT": str(tmp_path)}
    pipeline = Pipeline("small", (replace(small.accounts, sink=sink),), max_parallelism=8)
    configured = settings.load(environment)
    storage, _ = open_storage(pipeline, configured)
    started = time.monotonic()
    with Sinks(pipeline, configured, storage) as sinks, pytest.raises(TransientError):
        sinks.publisher(sink.name).marker()
    assert time.monotonic() - started < 8


def test_the_owner_waits_longer(tmp_path, monkeypatch):
    opened: list[float] = []
    make = LedgerSink.open

    def noted(sink: LedgerSink, given: SinkOpening) -> ledger.Ledger:
        opened.append(given.patience)
        return make(sink, given)

    monkeypatch.setattr(LedgerSink, "open", noted)
    bank = small.Bank.at(tmp_path / "site")
    sink = LedgerSink(name="ledger", path=str(tmp_path / "ledger.db"))
    bank.site = replace(bank.site, pipeline=Pipeline("small", (replace(small.accounts, sink=sink),), max_parallelism=8))
    bank.epochs(1)
    fsck.examine(bank.site.pipeline, bank.site.settings)
    assert opened == [RUNNING, LOOKING]


@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_a_table_that_is_created_has_what_its_author_says_of_columns_as_comments(tmp_path, kind):
    describe = {"amount": "In cents."}
    sinks = {
        "append": delta.append("booked", describe=describe),
        "upsert": delta.upsert("booked", "id", describe=describe),
    }
    bank = described(tmp_path, sinks[kind])
    bank.epochs(1, 2)
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    assert {field.name: field.metadata for field in table.schema().fields} == {
        "id": {},
        "at": {},
        "amount": {"comment": "In cents."},
    }


def test_a_column_that_is_described_and_not_there_is_refused_before_the_first_row(tmp_path):
    bank = described(tmp_path, delta.append("booked", describe={"amuont": "In cents."}))
    with pytest.raises(PipelineError, match="says what amuont is, which its rows have not") as refused:
        bank.epochs(1)
    assert refused.value.next == "Its columns are: id, at, amount."
    assert bank.ids() == []


def test_a_description_that_is_no_text_is_refused():
    with pytest.raises(PipelineError, match="no mapping of columns to texts"):
        delta.append("booked", describe={"amount": 3})


def test_what_is_said_for_people_makes_no_other_sink():
    assert delta.append("booked", describe={"amount": "In cents."}) == delta.append("booked")


def described(root: Path, sink: Sink) -> small.Bank:
    bank = small.Bank.at(root / "site")
    bank.site = replace(bank.site, pipeline=Pipeline("small", (replace(small.accounts, sink=sink),), max_parallelism=8))
    return bank
