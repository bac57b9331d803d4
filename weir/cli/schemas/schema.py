"""`weir schema`: what `--json` prints, as a JSON schema."""

from __future__ import annotations

import pkgutil
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

import typer

from state_ops.errors import ConfigurationError
from weir.cli import main
from weir.cli.console import out, print_json
from weir.cli.rendering import HistoryChange
from weir.cli.schemas.json_schema import json_schema

HISTORY = "state get --history"


@cache
def printed() -> dict[str, Any]:
    """Return the types of what commands print with `--json`, by command. Keys are added by later releases, and none goes
    or changes its meaning without a line in the changelog."""
    marked = {name: getattr(command.callback, "prints", ()) for name, command in main.commands().items()}
    return {name: reduce(or_, map(_imported, kinds)) for name, kinds in marked.items() if kinds} | {
        HISTORY: list[HistoryChange]
    }


def _imported(kind: Any) -> Any:
    return pkgutil.resolve_name(kind) if isinstance(kind, str) else kind


def schema(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command, e.g. status; default: list them.", metavar="[COMMAND]")
    ] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json, for programs that read it."""
    name = " ".join(command or ())
    if not name:
        for described in printed():
            out.print(f'weir schema "{described}"' if " --" in described else f"weir schema {described}")
        return
    if name not in printed():
        raise ConfigurationError(
            f"No schema describes what `weir {name}` prints.", next=f"There are those of {', '.join(printed())}."
        )
    print_json(of_command(name))


def of_command(name: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with `--json`."""
    return json_schema(printed()[name], f"weir {name} --json")
