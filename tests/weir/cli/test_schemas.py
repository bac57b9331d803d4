"""What `--json` prints is what its schema says, and every command that has the option has a schema."""

from __future__ import annotations

import json
import os
import re
import sys

import jsonschema
import pytest

from tests.recovery.small import Bank
from tests.tools import described
from weir.cli import main
from weir.cli.schemas.schema import HISTORY, printed
from weir.settings.configuration import PROJECT

COMMANDS = {
    "status": "status small",
    "checkpoints": "checkpoints small",
    "savepoint": "savepoint small --name {number}",
    "savepoints": "savepoints small",
    "restore": "restore small",
    "rewind": "rewind small --to 1 --dry-run",
    "fork": "fork small --name {number}",
    "forks": "forks small",
    "diff": "diff small branch",
    "promote": "promote small branch --dry-run",
    "plan": "plan small",
    "ci": "ci small --in-process",
    "top": "top small",
    "report": "report small --html {directory}/incident.html",
    "debug": "debug small --epoch 2 --key k1",
    "explain": "explain small booked --row id='k1'",
    "prune": "prune small --dry-run",
    "fsck": "fsck small --quick",
    "state get": "state get small accounts --key k1",
    "state get --history": "state get small accounts --key k1 --history",
    "state scan": "state scan small accounts",
    "state count": "state count small accounts",
    "state sql": "state sql small SELECT(1)",
    "state diff": "state diff small accounts 1 2",
    "state export": "state export small accounts --to {directory}/{number}",
    "state import": "state import small accounts --from {directory}/rows.parquet --dry-run",
    "state delete": "state delete small accounts --key k1 --dry-run",
}
ELSEWHERE = {
    "seek": "tests/weir/sources/test_connector_reader.py",
    "backfill": "tests/recovery/test_backfill.py",
    "drill": "tests/recovery/test_drill.py",
}
"""Where a test runs the command, or makes what it prints, because that takes more than this pipeline."""


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> Bank:
    bank = Bank.at(tmp_path_factory.mktemp("schemas"), WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    return bank


@pytest.fixture
def weir(bank, monkeypatch, capsys):
    """Runs a command in this process, and returns what it prints."""
    for name, value in bank.site.env.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["weir", *words])
        assert main._guarded(main.app, debug=False) == 0
        return capsys.readouterr().out

    return run


def test_every_command_with_json_has_a_schema():
    with_json = {
        name for name, command in main.commands().items() if any("--json" in option.opts for option in command.params)
    }
    assert with_json | {HISTORY} == printed().keys()


def test_each_schema_is_compared_with_what_is_printed():
    assert COMMANDS.keys() | ELSEWHERE.keys() == printed().keys()
    for command, file in ELSEWHERE.items():
        text = (PROJECT / file).read_text()
        assert re.search(rf'"{command}",.*"--json"|check_facts\("{command}"', text), f"{file} does not run {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_is_what_the_schema_says(weir, bank, tmp_path, command):
    if command in ("diff", "promote") and "branch" not in weir("forks", "small"):
        weir("fork", "small", "--name", "branch")
    if command == "state import":
        weir("state", "scan", "small", "accounts", "--format", "parquet", "--output", str(tmp_path / "rows.parquet"))
    number = "n" + os.urandom(3).hex()
    line = [word.format(number=number, directory=tmp_path) for word in COMMANDS[command].split()]
    shown = weir(*line, "--json")
    assert shown
    described.check([*line, "--json"], shown)
    schema = json.loads(weir("schema", command))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"] == f"weir {command} --json"


def test_an_unknown_key_or_one_that_is_lacking_is_noticed(weir):
    shown = json.loads(weir("savepoint", "small", "--name", "noticed", "--json"))
    for wrong in ({**shown, "more": 1}, {**shown, "checkpoint": "2"}, {"name": "noticed"}):
        with pytest.raises(jsonschema.ValidationError):
            described.check_facts("savepoint", wrong)


def test_the_commands_that_have_one_are_listed_as_they_are_typed(weir):
    lines = weir("schema").splitlines()
    assert "weir schema status" in lines and 'weir schema "state get --history"' in lines
    assert len(lines) == len(printed())
