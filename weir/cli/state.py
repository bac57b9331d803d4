"""`weir state`: a pipeline's keyed state at any retained checkpoint or savepoint. Starts no JVM, and only `import` and `delete` change anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from deltalake.exceptions import DeltaError
from rich.markup import escape

from state_ops.arrow import frames
from state_ops.counts import agrees, counted
from state_ops.delta import fenced_table
from state_ops.errors import ConfigurationError, InputError, first_line
from state_ops.facts import FLAT, Facts, Row, fact
from state_ops.storage.storage import Storage
from weir.cli.console import (
    AtCheckpoint,
    AtSavepoint,
    Json,
    Name,
    Yes,
    answer,
    err,
    handing_out,
    is_for_programs,
    out,
    print_json,
    print_table,
    prints,
    proceeds,
    waiting,
)
from weir.cli.rendering import history_facts, show, show_difference, show_history
from weir.cli.shell import completion
from weir.inspection import state_reader
from weir.inspection.comparison.states import StateDifference, compared
from weir.inspection.export import STDOUT, Format, check_output, limited, to_delta, write
from weir.inspection.sql import answered
from weir.inspection.state_reader import moment, one_of
from weir.loading import find
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from weir.operations.state_delete import Deletion

app = typer.Typer(
    name="state",
    add_completion=False,
    help="Look into a pipeline's keyed state, at any checkpoint that is retained. Without Spark, beside whatever runs.",
    no_args_is_help=True,
)

Stage = Annotated[str, typer.Argument(help="The stage's uid.", metavar="STAGE", autocompletion=completion.stages)]
Key = Annotated[list[str], typer.Option("--key", help="The key; once for each key column, in order.")]
Shape = Annotated[
    Format,
    typer.Option("--format", callback=is_for_programs, help="table is for people; json is one object a line."),
]
Output = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write there; - is stdout. The file appears when it is whole.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]

_SHOWN_ROWS, _SAMPLE = 50, 10


@dataclass(frozen=True, slots=True)
class Count(Facts):
    """The entries of a stage's state.

    Attributes:
        subtasks: How many each subtask has.
    """

    checkpoint: int
    stage: str
    subtasks: dict[int, int]

    @property
    @fact
    def total(self) -> int:
        """The entries of all subtasks."""
        return sum(self.subtasks.values())


@dataclass(frozen=True, slots=True)
class StateChanges(Facts):
    """The difference of a stage's state in two checkpoints.

    Attributes:
        sample: Some of the rows that differ.
    """

    difference: Annotated[StateDifference, FLAT]
    sample: list[Row]


@dataclass(frozen=True, slots=True)
class Exported(Facts):
    """A stage's state in a Delta table.

    Attributes:
        table: Its address.
        version: Of the table.
    """

    table: str
    version: int
    stage: str
    checkpoint: int


@app.command("get")
@prints(list[Row] | Row | None)
def state_get(
    pipeline: Name,
    stage: Stage,
    key: Key,
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show each retained checkpoint in which the key changed.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the state of one key; with --history, also when and by what it changed."""
    definition, settings = find(pipeline)
    if history:
        with waiting("reading the key in every checkpoint"):
            changes = list(state_reader.history(definition, settings, stage, key, one_of(checkpoint, savepoint)))
        if json:
            print_json([history_facts(change) for change in changes])
        elif changes:
            show_history(changes)
        if not changes:
            _nothing(stage, key)
        return
    with waiting("fetching the key's snapshot"):
        rows = state_reader.get(definition, settings, stage, key, one_of(checkpoint, savepoint))
    if json:
        windows = any(declared.uid == stage and declared.closes for declared in definition.stages) or len(rows) > 1
        print_json(rows if windows else rows[0] if rows else None)
    for row in () if json else rows:
        print_table((escape(name), escape(str(value))) for name, value in row.items())
    if not rows:
        _nothing(stage, key)


def _nothing(stage: str, key: list[str]) -> None:
    err.print(f"{escape(stage)} has no state for the key {escape(' / '.join(key))}.")
    raise typer.Exit(1)


@app.command("scan")
@prints(Row)
def state_scan(
    pipeline: Name,
    stage: Stage,
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Print at most so many rows.")] = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Print all rows of a stage's state, in a stream: state may be larger than memory. --json is --format json."""
    definition, settings = find(pipeline)
    form = Format.JSON if json else format
    check_output(form, output, force)
    with state_reader.viewed(definition, settings, stage, one_of(checkpoint, savepoint), "weir state scan") as view:
        shown = _SHOWN_ROWS if limit is None else None
        _hand_out(view.schema, limited(view.tables(), limit), form, output, force, shown, ", --limit N so many")


@app.command("count")
@prints(Count)
def state_count(
    pipeline: Name, stage: Stage, checkpoint: AtCheckpoint = None, savepoint: AtSavepoint = None, json: Json = False
) -> None:
    """Count the keys (of windows: the open windows) in a stage's state, by subtask and in all."""
    definition, settings = find(pipeline)
    with waiting("counting"):
        counted_at, counts = state_reader.count(definition, settings, stage, one_of(checkpoint, savepoint))
    total = sum(counts.values())
    if json:
        print_json(Count(counted_at, stage, counts))
        return
    titles = ("subtask", "entries")
    print_table(((str(of), f"{number:,}") for of, number in (*counts.items(), ("all", total))), titles, right=titles)


@app.command("sql")
@prints(Row)
def state_sql(
    pipeline: Name,
    query: Annotated[str, typer.Argument(help="One SELECT, in DuckDB's SQL.", metavar="QUERY")],
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Ask state, registry and tables in SQL, which can change nothing. --json is --format json.

    Each stage is a table of its uid, as of the chosen checkpoint; UID_history has it at every retained checkpoint, UID_changes what
    changed in which. Beside them: checkpoints, publications, pins, state_files, and the tables that the pipeline writes.
    """
    definition, settings = find(pipeline)
    form = Format.JSON if json else format
    check_output(form, output, force)
    with ExitStack() as stack:
        with waiting("reading state"):
            schema, tables = stack.enter_context(answered(definition, settings, query, one_of(checkpoint, savepoint)))
        _hand_out(schema, tables, form, output, force, _SHOWN_ROWS)


@app.command("diff")
@prints(StateChanges)
def state_diff(
    pipeline: Name,
    stage: Stage,
    first: Annotated[
        str,
        typer.Argument(help="A checkpoint's id or a savepoint's name.", metavar="A", autocompletion=completion.moments),
    ],
    second: Annotated[str, typer.Argument(help="Another one.", metavar="B", autocompletion=completion.moments)],
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show at most so many differences.")] = None,
    format: Shape = Format.TABLE,
    output: Output = None,
    force: Force = False,
    json: Annotated[
        bool, typer.Option("--json", callback=is_for_programs, help="Counts and a sample as one JSON document.")
    ] = False,
) -> None:
    """Compare a stage's state at A and at B: counts and a sample; with --format json, parquet or arrow every
    difference."""
    definition, settings = find(pipeline)
    check_output(format, output, force)
    _, registry = open_storage(definition, settings)
    old, new = moment(first, registry), moment(second, registry)
    with ExitStack() as stack:
        with waiting("comparing"):
            difference = stack.enter_context(compared(definition, settings, stage, old, new))
        if json or format is Format.TABLE:
            with difference.rows(_SAMPLE if limit is None else limit) as (_, tables):
                sample = [row for table in tables for row in frames.python_rows(table)]
            if json:
                print_json(StateChanges(difference, sample))
            else:
                show_difference(difference, sample)
            return
        with difference.rows(limit) as (schema, tables):
            _hand_out(schema, tables, format, output, force, None)


@app.command("export")
@prints(Exported)
def state_export(
    pipeline: Name,
    stage: Stage,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory or URI of a Delta table.")],
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the rows of a table that is there.")] = False,
    json: Json = False,
) -> None:
    """Export a stage's state as a Delta table, whose commit names the checkpoint. For one file: `weir state scan --format parquet`."""
    definition, settings = find(pipeline)
    with (
        waiting("exporting"),
        state_reader.viewed(definition, settings, stage, one_of(checkpoint, savepoint), "weir state export") as view,
    ):
        uri, version = to_delta(view, settings, to, force)
    answer(
        json,
        Exported(uri, version, stage, view.checkpoint),
        f"{escape(stage)} at checkpoint {view.checkpoint} is version {version} of {escape(uri)}.",
    )


# -- output


def _hand_out(
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    format: Format,
    output: str | None,
    force: bool,
    shown: int | None,
    also: str = "",
) -> None:
    """Print or write rows.

    Args:
        shown: How many rows to print at most in the format for people; None prints all.
        also: What else of the command has more rows than are printed.
    """
    to_stdout = format is not Format.TABLE and output in (None, STDOUT)
    tables = _while_read(tables, to_stdout)
    with handing_out(), _piped():
        if format is Format.TABLE:
            show(schema, tables, shown, also)
            return
        written = write(schema, tables, format, output, force)
        if output not in (None, STDOUT):
            out.print(f"{counted(written, 'row', 'is', 'are')} in {escape(str(output))}.")


def _while_read(tables: Iterable[pa.Table], to_stdout: bool) -> Iterator[pa.Table]:
    """Hand rows on, and say on stderr how many there were, unless they appear themselves."""
    rows = 0
    with ExitStack() as stack:
        say = stack.enter_context(waiting("reading rows"))
        for table in tables:
            if to_stdout:
                stack.close()
            rows += table.num_rows
            say(f"reading rows, {rows:,} so far")
            yield table


@contextmanager
def _piped() -> Iterator[None]:
    """End quietly when the reader of a pipe closes it early, as `head` does."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails when it flushes at the end
        raise typer.Exit(0) from None


@app.command("import")
@prints("weir.operations.state_import:Edit")
def state_import(
    pipeline: Name,
    stage: Stage,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="FILE_OR_DELTA", help="A Parquet or Arrow file, or the directory or URI of a Delta table."
        ),
    ],
    savepoint: Annotated[str | None, typer.Option(metavar="NAME", help="Name the checkpoint that this makes.")] = None,
    replaces: Annotated[
        bool,
        typer.Option("--replace/--merge", help="The state is exactly these rows; or these keys are put, others stay."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate the rows.")] = False,
    reason: Annotated[str, typer.Option(help="A note that `weir checkpoints` shows.")] = "",
    json: Json = False,
) -> None:
    """Make a checkpoint in which a stage has these rows, as `weir state scan` gives them; the next run goes on from it.

    Positions, watermarks, tables and all other stages stay as they are. No coordinator may be running. Every row is validated first.
    """
    from weir.operations.state_import import import_rows

    definition, settings = find(pipeline)
    with waiting("importing"):
        rows = _rows(source, settings)
        done = import_rows(
            definition, settings, stage, rows, replaces=replaces, savepoint=savepoint, dry_run=dry_run, reason=reason
        )
    number = sum(done.rows.values())
    rows, are = counted(number, "row"), agrees(number, "is", "are")
    how = f"{are} all of the state" if replaces else f"{are} merged into the state"
    answer(
        json,
        done,
        (
            f"{rows} {agrees(number, 'fits', 'fit')} the state of {escape(stage)}. Nothing was changed."
            if done.checkpoint is None
            else (
                f"{rows} {how} of {escape(stage)} in checkpoint {done.checkpoint}. `weir run {pipeline}` goes on from"
                " there."
            )
        ),
    )


@app.command("delete")
@prints("weir.operations.state_delete:Deletion")
def state_delete(
    pipeline: Name,
    stage: Stage,
    key: Key,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what has the key, and where it would remain.")
    ] = False,
    reason: Annotated[str, typer.Option(help="A note that `weir checkpoints` shows. Do not name the key.")] = "",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Forget one key: gone from a stage's state, in the newest checkpoint, all retained ones and savepoints. There is no way back.

    State files that may have it are written anew without it, and the old ones deleted. Tables, archived input, branches and whatever else may have the key still are named. No coordinator may be running.
    """
    from weir.operations import state_delete as deleting

    definition, settings = find(pipeline)
    with waiting("looking for the key"):
        planned = deleting.plan(definition, settings, stage, key)
    if not proceeds(
        lambda: _show_deletion(planned),
        planned,
        dry_run=dry_run,
        json=json,
        ask=f"forget this key of {stage}",
        yes=yes,
    ):
        return
    with waiting("rewriting state"):
        done = deleting.delete(definition, settings, stage, key, reason=reason)
    rewritten = sum(1 for holding in done.holdings if holding.stays is None)
    answer(
        json,
        done,
        f"The key is forgotten in {escape(stage)}: {counted(rewritten, 'checkpoint')} rewritten, checkpoint"
        f" {done.checkpoint} is without it. {done.bytes_written:,} bytes were written. `weir run {pipeline}` goes on"
        " from there.",
        *(
            f"It may remain in: {escape(place.kind)} {escape(place.name)} ({escape(place.why)})."
            for place in done.remains
        ),
    )


def _show_deletion(planned: Deletion) -> None:
    titles = ("checkpoint", "savepoint", "entries", "bytes to rewrite", "")
    print_table(
        (
            (
                str(holding.checkpoint),
                escape(", ".join(holding.savepoints)),
                f"{holding.entries:,}",
                f"{holding.bytes:,}" if holding.stays is None else "0",
                "" if holding.stays is None else f"stays: the branch {escape(holding.stays)} reads it",
            )
            for holding in planned.holdings
        ),
        titles,
        right=("checkpoint", "entries", "bytes to rewrite"),
    )
    if not any(holding.entries for holding in planned.holdings):
        out.print("No checkpoint has state of this key. Files may have what was deleted from them, and are rewritten.")
    for place in planned.remains:
        out.print(f"[yellow]remains[/]  {escape(place.kind)} {escape(place.name)}: {escape(place.why)}")


def _rows_of_file(path: Path) -> pa.Table:
    """Return the rows of a Parquet file, an Arrow file or a stream of Arrow, whatever the file is called."""
    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"PAR1"):
            return pq.read_table(path, use_threads=False, page_checksum_verification=True)
        reader = pa.ipc.open_file(file) if magic == b"ARROW1" else pa.ipc.open_stream(file)
        rows = reader.read_all()
        rows.validate(full=True)  # offsets of a damaged file may point anywhere in memory
        return rows


def _rows(source: str, settings: Settings) -> pa.Table:
    """Return the rows of a Parquet or Arrow file, or of a Delta table.

    Raises:
        ConfigurationError: There is neither a file nor a table at this place.
        InputError: The file or table cannot be read.
    """
    path = Path(source)
    try:
        if path.is_file():
            return _rows_of_file(path)
        place = Storage(source, settings.storage.s3)
        if fenced_table.is_table(place.uri, place.delta_options):
            return fenced_table.Table(place.uri, storage_options=place.delta_options).to_pyarrow_table()
    except (pa.ArrowException, DeltaError) as error:
        raise InputError(
            f"{source} cannot be read: {first_line(error)}",
            where=source,
            next="Write it anew, as Parquet or Arrow.",
        ) from error
    raise ConfigurationError(
        f"There is neither a file nor a Delta table at {source}.",
        where="--from",
        next="`weir state scan --format parquet --output FILE` and `weir state export` write what can be imported.",
    )
