"""`weir ci`: a pull request's code, tried on production's state and newest epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Annotated

import typer
from rich.markup import escape

from state_ops.errors import (
    ConfigurationError,
    MissingError,
    PipelineError,
    PrunedError,
    StageError,
    TransientError,
    WeirError,
)
from weir.cli.console import Json, Name, data_alone, err, hushed, print_json, prints, waiting
from weir.cli.shell import completion
from weir.execution.in_process import InMemoryExecutor
from weir.loading import named
from weir.operations.pull_request import comment, review
from weir.operations.pull_request.review import DEFAULT_FAILURES, KINDS, MAIN, Review
from weir.settings.configuration import load

_NOTHING = "nothing"
_Samples = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help=(
            "The number of differing rows and keys to show of each table and stage. 0: no value of a row is shown or"
            " logged, nor anything that the code prints."
        ),
    ),
]


@prints(Review)
def ci(
    pipeline: Name,
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="BRANCH",
            help="The epochs to replay: those of main, the pipeline itself, or of a branch.",
            autocompletion=completion.branches,
        ),
    ] = MAIN,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="The number of epochs to replay, the newest ones.")
    ] = 2,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comment to this file; by default it is printed.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A directory for everything that is written meanwhile; by default below local.work_dir."
        ),
    ] = None,
    samples: _Samples = 10,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help=f"Findings that end the command with exit code 1, with commas between: {', '.join(KINDS)}; or nothing.",
        ),
    ] = ",".join(DEFAULT_FAILURES),
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without Spark, which stages with a transform need.")
    ] = False,
    json: Json = False,
) -> None:
    """Try a pull request's code on production: replay its newest epochs from the state before them, and write as one Markdown comment what differs.

    Of production everything is read and nothing written, not even a hold: credentials that may only read are enough. Exit code 1 if
    something of --fail-on is found: by default a refused plan, code that fails, or a gate that would hold; 2: wrong usage or configuration.
    """
    fails = _kinds(fail_on)
    if output is not None:
        _clear(output)
    try:
        with data_alone() if samples > 0 else _without_values(pipeline):  # the comment is printed too
            tried = _tried(pipeline, origin, epochs, scratch, samples, in_process)
    except SystemExit as left:  # with whose code it would end, 0 perhaps
        raise StageError(
            f"The code of {pipeline} has left Python, by sys.exit({repr(left.code) if samples else '...'}): nothing was"
            " compared.",
            next="Let it raise an exception instead.",
        ) from None
    if output is not None:
        output.write_text(comment.markdown(tried, samples), encoding="utf-8")
        err.print(escape(f"{comment.verdict(tried)}. The comment: {output}"))
    if json:
        print_json(tried if samples > 0 else tried.without_values())
    elif output is None:
        typer.echo(comment.markdown(tried, samples), nl=False)
    if tried.fails(fails):
        raise typer.Exit(1)


@contextmanager
def _without_values(pipeline: str) -> Iterator[None]:
    """Let no value of production's rows reach the log, whoever writes it or raises an error with one."""
    try:
        with hushed():
            yield
    except (ConfigurationError, MissingError, PrunedError, TransientError):  # which are about no row
        raise
    except Exception as error:
        places = [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-1:]]
        raise WeirError(
            f"{type(error).__name__}; what it says is left out, since it may have values of rows (--samples 0).",
            where=f"pipeline {pipeline}, {''.join(places)}",
            next="Run it without --samples 0 where only those read the log who may read production.",
        ) from None


def _clear(output: Path) -> None:
    """Remove what `--output` names, so that nobody takes an old file for the comment. Raises ConfigurationError for
    what can be no file."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--output {output} is no file in a directory that is there.",
            next="Make the directory, or name another file.",
        )
    output.unlink(missing_ok=True)


def _kinds(text: str) -> set[str]:
    """Return the kinds of differences that `--fail-on` names. Raises ConfigurationError for another word."""
    kinds = {kind.strip() for kind in text.split(",")} - {""}
    if not kinds:  # as of a variable that is not set: it must not let everything pass
        raise ConfigurationError(
            "--fail-on says nothing.", next=f"Say some of {', '.join(KINDS)}; or the word {_NOTHING}."
        )
    if unknown := sorted(kinds - {*KINDS, _NOTHING}):
        raise ConfigurationError(
            f"--fail-on does not know {', '.join(unknown)}.", next=f"Say some of {', '.join(KINDS)}; or {_NOTHING}."
        )
    return kinds


def _tried(name: str, origin: str, epochs: int, scratch: Path | None, samples: int, in_process: bool) -> Review:
    settings = load()
    try:
        definition = named(name, settings)
    except (PipelineError, ConfigurationError) as error:
        if name not in settings.pipelines:
            raise
        return review.not_imported(name, origin, error)
    settings = settings.of(definition.name)
    with waiting("trying the code on production's newest epochs"):
        return review.review(
            definition,
            settings,
            origin=origin,
            epochs=epochs,
            scratch=scratch,
            sample=samples,
            executor=InMemoryExecutor() if in_process else None,
        )
