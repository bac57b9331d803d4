"""Compares what commands print with `--json` with the schemas of `weir schema`, wherever a test runs such a command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema

from state_ops.value_text import as_json
from weir.cli.schemas import schema

BY_LINE = ("state scan", "state sql")
"""Commands that print a document for each row, on a line of its own."""


@cache
def _validator(command: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema.of_command(command))


def command_of(arguments: Sequence[str]) -> str:
    """The name by which `weir schema` describes what a command line prints."""
    words = " ".join(arguments[: 2 if arguments[0] == "state" else 1])
    return schema.HISTORY if words == "state get" and "--history" in arguments else words


def check(arguments: Sequence[str], out: str) -> None:
    """Fail where a command that was given `--json` has printed something else than its schema says."""
    if "--json" not in arguments or not out.strip() or not {"-o", "--output"}.isdisjoint(arguments):
        return
    command = command_of(arguments)
    for document in out.splitlines() if command in BY_LINE else [out]:
        _validator(command).validate(json.loads(document))


def check_facts(command: str, facts: Any) -> None:
    """The same of what a command would print, where no command runs."""
    _validator(command).validate(json.loads(as_json(facts)))
