"""What `--json` prints is what its schema says, for every command that has one."""

from __future__ import annotations

import json
import os
import sys

import jsonschema
import pytest

from pipelines.cli import main
from pipelines.cli.schemas import printed
from tests.recovery.small import Bank

COMMANDS = {
    "status": "status small",
    "checkpoints": "checkpoints small",
    "savepoint": "savepoint small --name {number}",
    "savepoints": "savepoints small",
    "fork": "fork small --name {number}",
    "forks": "forks small",
    "plan": "plan small",
    "ci": "ci small --in-process",
    "fsck": "fsck small",
    "prune": "prune small --dry-run",
    "state count": "state count small accounts",
    "top": "top small",
    "report": "report small --html {folder}/incident.html",
}


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

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["weir", *line.split()])
        assert main._guarded(main.app, debug=False) == 0
        return capsys.readouterr().out

    return run


def test_each_schema_is_compared_with_what_is_printed():
    assert COMMANDS.keys() == printed.BY_COMMAND.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_is_what_the_schema_says(weir, command, tmp_path):
    weir(f"savepoint small --name kept-{os.urandom(3).hex()}")
    schema = json.loads(weir(f"schema {command}"))
    values = {"number": command[:4] + os.urandom(3).hex(), "folder": tmp_path}
    shown = json.loads(weir(f"{COMMANDS[command].format(**values)} --json"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert shown
    jsonschema.validate(shown, schema)


def test_an_unknown_key_or_one_that_is_lacking_is_noticed(weir):
    schema, shown = json.loads(weir("schema savepoint")), json.loads(weir("savepoint small --name noticed --json"))
    for wrong in ({**shown, "more": 1}, {**shown, "checkpoint": "2"}, {"name": "noticed"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_commands_that_have_one_are_listed(weir):
    assert weir("schema").split("\n")[:-1] == [f"weir schema {command}" for command in printed.BY_COMMAND]
