"""What commands share: their two consoles, their common arguments, JSON."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pipelines.runtime.inspection.value_text import as_json
from state_ops.checkpoints.registry import SAVEPOINT, Registry
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


def moment(text: str, registry: Registry) -> int | str:
    """A checkpoint as people name it: by its number, or by a savepoint's name.

    Raises ConfigurationError for a number that is a savepoint's name too, as earlier releases allowed.
    """
    if not text.isdecimal():
        return text
    pin = registry.pinned(SAVEPOINT, text)
    if pin is not None:
        raise ConfigurationError(
            f"{text} is the number of a checkpoint and the name of a savepoint, which is checkpoint {pin.checkpoint_id}.",
            next="Use --savepoint where there is such an option, or drop the savepoint and take it again under another name.",
        )
    return int(text)


def print_json(value: Any) -> None:
    sys.stdout.write(as_json(value, indent=2) + "\n")


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def short(path: str) -> str:
    """A local path as it is from here, where that is shorter."""
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)


def no_directory(*directories: str) -> str:
    """That there is nothing to read, in words that nobody takes for an empty directory."""
    return f"nothing: {' and '.join(map(short, directories))} does not exist"
