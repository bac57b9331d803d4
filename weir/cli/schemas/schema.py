"""`weir schema`: what `--json` prints, as a JSON schema."""

from __future__ import annotations

from typing import Annotated

import typer

from state_ops.errors import ConfigurationError
from weir.cli.console import out, print_json


def schema(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command, e.g. status; default: list them.", metavar="[COMMAND]")
    ] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json, for programs that read it."""
    from weir.cli.schemas import printed

    name = " ".join(command or ())
    if not name:
        for described in printed.BY_COMMAND:
            out.print(f'weir schema "{described}"' if " --" in described else f"weir schema {described}")
        return
    if name not in printed.BY_COMMAND:
        raise ConfigurationError(
            f"No schema describes what `weir {name}` prints.",
            next=f"There are those of {', '.join(printed.BY_COMMAND)}.",
        )
    print_json(printed.schema(name))
