"""Commands made from operations that are declared (`weir.operations.operation`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter as Argued
from inspect import Signature
from typing import Annotated, Any

import typer
from rich.markup import escape

from weir.cli.console import Force, Json, Name, Yes, err, out, print_json, print_table, prints, proceeds, waiting
from weir.cli.running import follow
from weir.cli.shell import completion
from weir.loading import find
from weir.operations.operation import COMMAND, Argument, Here, Labelled, Operation, Parameter, Plan, Rows, Words, does

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]


def command_of(operation: Operation) -> Callable[..., None]:
    """Return the function that typer makes the command of, with the operation's options and those that all have."""
    shared = [
        ("dry_run", DryRun, operation.plans),
        ("force", Force, operation.accepts),
        ("yes", Yes, operation.asks),
        ("json", Json, operation.result is not None),
    ]
    arguments = [_argued("pipeline", Name, Argued.empty)]
    arguments += [_argued(of.name, _typed(of), of.default) for of in operation.options if of.is_of(COMMAND)]
    arguments += [_argued(name, kind, False) for name, kind, has in shared if has]

    def command(**given: Any) -> None:
        _run(operation, **given)

    command.__name__, command.__doc__ = operation.name, operation.about
    command.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    command.__annotations__ = {argument.name: argument.annotation for argument in arguments}
    return prints(operation.result)(command) if operation.result is not None else command


def _argued(name: str, annotation: Any, default: Any) -> Argued:
    return Argued(name, Argued.KEYWORD_ONLY, annotation=annotation, default=default)


def _typed(of: Parameter) -> Any:
    """Return the type of an option with what typer has to know of it."""
    option = of.option
    complete = getattr(completion, option.complete) if option.complete is not None else None
    annotated: Any = Annotated
    if isinstance(option, Argument):
        return annotated[of.type, typer.Argument(help=option.about, metavar=option.metavar, autocompletion=complete)]
    flags = option.flags or (f"--{of.name.replace('_', '-')}",)
    shown = typer.Option(
        *flags, help=option.about, metavar=option.metavar, autocompletion=complete, hidden=option.hidden
    )
    return annotated[of.type, shown]


def _run(
    operation: Operation,
    *,
    pipeline: str,
    dry_run: bool = False,
    force: bool = False,
    yes: bool = False,
    json: bool = False,
    **options: Any,
) -> None:
    definition, settings = find(pipeline)
    run = partial(follow, definition, settings)
    here = Here(definition, settings, COMMAND, f"weir {operation.name}", waiting, dry_run, run)
    steps = operation.steps(here, **options)
    step = next(steps)
    if isinstance(step, Plan):
        plan, accepted = step, step.obstacles if force else ()
        if not proceeds(
            lambda: _say(plan.words),
            plan.result,
            dry_run=dry_run,
            json=json,
            check=lambda: plan.check(accepted),
            ask=plan.ask,
            yes=yes,
        ):
            return
        step = steps.send(accepted)
    for done in does(step, steps):
        if not json:
            _say(done.words)
            _say(done.notes, err)
        result = done.result
    if json:
        print_json(result)


def _say(words: Words, console: Any = out) -> None:
    for word in words:
        match word:
            case Rows(rows, titles, right):
                print_table((tuple(map(escape, row)) for row in rows), titles, right)
            case Labelled(label, text):
                console.print(f"[yellow]{label}[/]  {escape(text)}")
            case str():
                console.print(escape(word))
