"""What commands share: their two consoles, their common arguments, JSON."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="The pipeline's name in the configuration.", metavar="PIPELINE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def waiting(what: str) -> AbstractContextManager[Any]:
    """Shows on a terminal that something is waited for."""
    return err.status(what)


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
