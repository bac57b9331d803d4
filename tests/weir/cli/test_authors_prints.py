"""What authors' code prints goes to stderr where a command hands out data, which a program reads from stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recovery.conftest import weir as weir
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from weir.cli.console import out

PRINTS = """
import sys

import polars as pl

from tests.recovery import small
from tests.tools.stages import altered
from weir import Epoch, KeyedState, Pipeline

print("imported", 1)


def prints(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    print("called")
    sys.stdout.buffer.write(b"called in bytes\\n")
    sys.stdout.flush()
    return small.accounts.function(rows, state, epoch)


pipeline = Pipeline("small", (altered(small.accounts, function=prints),), max_parallelism=8)
"""
CALLS = ["debug small --epoch 2 --json", "ci small --in-process --json", "ci small --in-process"]
IMPORTS = [
    "status small --json",
    "state scan small accounts --json",
    "state scan small accounts --format json",
    "state diff small accounts 1 2 --json",
    "top small --json",
    "metrics small --once",
]


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bank:
    (tmp_path / "weir_that_prints.py").write_text(PRINTS)
    monkeypatch.syspath_prepend(tmp_path)
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="3")
    bank.epochs(1, 2)
    monkeypatch.delitem(sys.modules, "weir_that_prints", raising=False)
    return Bank(replace(bank.site, module="weir_that_prints"))


@pytest.mark.parametrize("command", [*sampled(CALLS), *sampled(IMPORTS)])
def test_stdout_is_for_data_alone(bank: Bank, weir: Callable, command: str) -> None:
    shown = weir(bank.site, *command.split())
    assert "imported" not in shown.out and "called" not in shown.out
    assert "imported 1\n" in shown.err
    assert ("called\ncalled in bytes\n" in shown.err) is (command in CALLS)
    if command.endswith("--json") and "scan" not in command:
        json.loads(shown.out)
    else:
        assert shown.out


def test_other_commands_and_the_next_one_print_where_they_did(bank: Bank, weir: Callable) -> None:
    before = sys.stdout
    assert weir(bank.site, "status", "small", "--json", "--nonsense").code == 2
    assert weir(bank.site, "status", "small", "--json").code == 0
    assert sys.stdout is before
    del sys.modules["weir_that_prints"]
    assert "imported 1\n" in weir(bank.site, "status", "small").out
    assert out.file is before
