"""What commands share: their two consoles, their common arguments, JSON."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer
from rich.console import Console

from state_ops.errors import ConfigurationError

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="The pipeline's name in the configuration.", metavar="PIPELINE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def waiting(what: str) -> AbstractContextManager[Any]:
    """Shows on a terminal that something is waited for."""
    return err.status(what)


def confirm(what: str, *, yes: bool, json: bool) -> None:
    """Ask on a terminal whether to go on; a no ends the command. what: a verb. yes, json: the command's options.

    Raises ConfigurationError where nobody can be asked and --yes is missing.
    """
    if yes:
        return
    if json or not sys.stdin.isatty():
        raise ConfigurationError("Nobody can be asked here.", next=f"Give --yes to {what} without a question.")
    if not typer.confirm(f"{what.capitalize()}?", err=True):
        err.print("Nothing was changed.")
        raise typer.Exit(1)


def moment(text: str) -> int | str:
    """A checkpoint as people name it: by its number, or by a savepoint's name."""
    return int(text) if text.isdecimal() else text


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=jsonable) + "\n")


def jsonable(value: Any) -> Any:
    """What JSON has no type for, as one that it has: bytes in hex, moments in ISO 8601, everything else as text."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
