"""`weir state`: a pipeline's keyed state at any retained checkpoint or savepoint. Reads only, and starts no JVM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import pyarrow as pa
import typer
from rich.markup import escape
from rich.table import Table

from pipelines.cli.console import Json, Name, err, moment, out, print_json, waiting
from pipelines.cli.rendering import history_facts, history_table, show, show_difference, summary
from pipelines.loading import find
from pipelines.runtime.inspection import state_reader
from pipelines.runtime.inspection.diff import compared
from pipelines.runtime.inspection.export import STDOUT, Format, check_output, limited, to_delta, write
from pipelines.runtime.inspection.sql import answered
from pipelines.runtime.inspection.state_reader import At
from pipelines.runtime.ownership.pipeline_storage import open_storage
from state_ops.arrow import frames
from state_ops.errors import ConfigurationError

app = typer.Typer(
    help="Look into a pipeline's keyed state, at any checkpoint that is retained. Without Spark, beside whatever runs.",
    no_args_is_help=True,
)

Stage = Annotated[str, typer.Argument(help="The stage's uid.", metavar="STAGE")]
Key = Annotated[list[str], typer.Option("--key", help="The key; once for each key column, in order.")]
Checkpoint = Annotated[int | None, typer.Option("--at", metavar="N", help="At this checkpoint; by default the newest.")]
Savepoint = Annotated[str | None, typer.Option(metavar="NAME", help="At the checkpoint of this savepoint.")]
Shape = Annotated[Format, typer.Option("--format", help="table is for people; json is one object a line.")]
Output = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write there; - is stdout. The file appears when it is whole.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]

_SHOWN_ROWS, _SAMPLE = 50, 10


@app.command("get")
def state_get(
    pipeline: Name,
    stage: Stage,
    key: Key,
    at: Checkpoint = None,
    savepoint: Savepoint = None,
    history: Annotated[
        bool, typer.Option("--history", help="When it changed: each retained checkpoint that has it otherwise.")
    ] = False,
    json: Json = False,
) -> None:
    """The state of one key; with --history, when and by what it came to be so."""
    found, settings = find(pipeline)
    if history:
        changes = list(state_reader.history(found, settings, stage, key, _at(at, savepoint)))
        if json:
            print_json([history_facts(change) for change in changes])
        elif changes:
            out.print(history_table(changes))
        if not changes:
            _nothing(stage, key)
        return
    rows = state_reader.get(found, settings, stage, key, _at(at, savepoint))
    if json:
        windows = any(one.uid == stage and one.window is not None for one in found.stages) or len(rows) > 1
        print_json(rows if windows else rows[0] if rows else None)
    for row in () if json else rows:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in row.items():
            table.add_row(escape(name), escape(str(value)))
        out.print(table)
    if not rows:
        _nothing(stage, key)


def _nothing(stage: str, key: list[str]) -> None:
    err.print(f"{escape(stage)} has no state for the key {escape(' / '.join(key))}.")
    raise typer.Exit(1)


@app.command("scan")
def state_scan(
    pipeline: Name,
    stage: Stage,
    at: Checkpoint = None,
    savepoint: Savepoint = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="At most so many rows.")] = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """All rows of a stage's state, in a stream: state may be larger than memory. --json is --format json."""
    found, settings = find(pipeline)
    form = Format.JSON if json else format
    check_output(form, output, force)
    with state_reader.viewed(found, settings, stage, _at(at, savepoint), "weir state scan") as view:
        _hand_out(
            view.schema, limited(view.tables(), limit), form, output, force, _SHOWN_ROWS if limit is None else None
        )


@app.command("count")
def state_count(
    pipeline: Name, stage: Stage, at: Checkpoint = None, savepoint: Savepoint = None, json: Json = False
) -> None:
    """How many keys (of windows: open windows) a stage's state has, by subtask and in all."""
    found, settings = find(pipeline)
    with waiting("counting"):
        checkpoint, counts = state_reader.count(found, settings, stage, _at(at, savepoint))
    if json:
        print_json({"checkpoint": checkpoint, "stage": stage, "total": sum(counts.values()), "subtasks": counts})
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("subtask", justify="right")
    table.add_column("entries", justify="right")
    for subtask, number in counts.items():
        table.add_row(str(subtask), f"{number:,}")
    table.add_row("all", f"{sum(counts.values()):,}")
    out.print(table)


@app.command("sql")
def state_sql(
    pipeline: Name,
    query: Annotated[str, typer.Argument(help="One SELECT, in DuckDB's SQL.", metavar="QUERY")],
    at: Checkpoint = None,
    savepoint: Savepoint = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Ask state, registry and tables in SQL, which can change nothing. --json is --format json.

    Each stage is a table of its uid, as of the chosen checkpoint; UID_history has it at every retained checkpoint, UID_changes what
    changed in which. Beside them: checkpoints, publications, pins, state_files, and the tables that the pipeline writes.
    """
    found, settings = find(pipeline)
    form = Format.JSON if json else format
    check_output(form, output, force)
    with ExitStack() as stack:
        with waiting("reading state"):
            schema, tables = stack.enter_context(answered(found, settings, query, _at(at, savepoint)))
        _hand_out(schema, tables, form, output, force, _SHOWN_ROWS)


@app.command("diff")
def state_diff(
    pipeline: Name,
    stage: Stage,
    first: Annotated[str, typer.Argument(help="A checkpoint's id or a savepoint's name.", metavar="A")],
    second: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="At most so many differences.")] = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Annotated[bool, typer.Option("--json", help="Counts and a sample as one JSON document.")] = False,
) -> None:
    """What changed in a stage's state from A to B: counts and a sample; with --format json, parquet or arrow every difference."""
    found, settings = find(pipeline)
    check_output(format, output, force)
    _, registry = open_storage(found, settings)
    old, new = moment(first, registry), moment(second, registry)
    with ExitStack() as stack:
        with waiting("comparing"):
            difference = stack.enter_context(compared(found, settings, stage, old, new))
        if json or format is Format.TABLE:
            with difference.rows(_SAMPLE if limit is None else limit) as (_, tables):
                sample = [row for table in tables for row in frames.python_rows(table)]
            if json:
                print_json(summary(difference) | {"sample": sample})
            else:
                show_difference(difference, sample)
            return
        with difference.rows(limit) as (schema, tables):
            _hand_out(schema, tables, format, output, force, None)


@app.command("export")
def state_export(
    pipeline: Name,
    stage: Stage,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory or URI of a Delta table.")],
    at: Checkpoint = None,
    savepoint: Savepoint = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the rows of a table that is there.")] = False,
    json: Json = False,
) -> None:
    """A stage's state as a Delta table, whose commit names the checkpoint. For one file: `weir state scan --format parquet`."""
    found, settings = find(pipeline)
    with (
        waiting("exporting"),
        state_reader.viewed(found, settings, stage, _at(at, savepoint), "weir state export") as view,
    ):
        uri, version = to_delta(view, settings, to, force)
    if json:
        print_json({"table": uri, "version": version, "stage": stage, "checkpoint": view.checkpoint})
    else:
        out.print(f"{escape(stage)} at checkpoint {view.checkpoint} is version {version} of {escape(uri)}.")


# -- arguments


def _at(at: int | None, savepoint: str | None) -> At:
    if at is not None and savepoint is not None:
        raise ConfigurationError("--at and --savepoint each name a checkpoint.", next="Say one of them.")
    return at if savepoint is None else savepoint


# -- output


def _hand_out(
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    format: Format,
    output: str | None,
    force: bool,
    shown: int | None,
) -> None:
    """Print or write rows. shown: at most so many to people; None: all."""
    with _piped():
        if format is Format.TABLE:
            show(schema, tables, shown)
            return
        written = write(schema, tables, format, output, force)
    if output not in (None, STDOUT):
        out.print(f"{written:,} rows are in {escape(str(output))}.")


@contextmanager
def _piped() -> Iterator[None]:
    """A reader that has seen enough, as `head` has, is no error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails when it flushes at the end
        raise typer.Exit(0) from None
