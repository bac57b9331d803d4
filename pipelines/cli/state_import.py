"""`weir state import`: rows of a file or a Delta table become state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from deltalake.exceptions import DeltaError
from rich.markup import escape

from configs.settings import Settings
from pipelines.cli.console import Json, Name, out, print_json, waiting
from pipelines.loading import find
from pipelines.runtime.operations.state_import import import_rows
from state_ops.delta.fenced_table import Table, is_table
from state_ops.errors import ConfigurationError, InputError, first_line
from state_ops.storage.storage import Storage


def state_import(
    pipeline: Name,
    stage: Annotated[str, typer.Argument(help="The stage's uid.", metavar="STAGE")],
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
    reason: Annotated[str, typer.Option(help="Why, for who reads the list of checkpoints.")] = "",
    json: Json = False,
) -> None:
    """Make a checkpoint in which a stage has these rows, as `weir state scan` gives them; the next run goes on from it.

    Positions, watermarks, tables and all other stages stay as they are. No coordinator may be running. Every row is validated first.
    """
    found, settings = find(pipeline)
    with waiting("importing"):
        rows = read(source, settings)
        done = import_rows(
            found, settings, stage, rows, replaces=replaces, savepoint=savepoint, dry_run=dry_run, reason=reason
        )
    if json:
        print_json(done.to_dict())
        return
    number = f"{sum(done.rows.values()):,} rows"
    if done.checkpoint is None:
        out.print(f"{number} fit the state of {escape(stage)}. Nothing was changed.")
        return
    how = "are all of the state" if replaces else "are merged into the state"
    out.print(
        f"{number} {how} of {escape(stage)} in checkpoint {done.checkpoint}. `weir run {pipeline}` goes on from there."
    )


def read(source: str, settings: Settings) -> pa.Table:
    """The rows of a Parquet or Arrow file, or of a Delta table. Raises ConfigurationError where there is neither, InputError for one that
    cannot be read."""
    path = Path(source)
    try:
        if path.is_file():
            if path.suffix in (".arrow", ".arrows", ".ipc"):
                return pa.ipc.open_file(path).read_all()
            return pq.read_table(path, use_threads=False, page_checksum_verification=True)
        place = Storage(source, settings.storage.s3)
        if is_table(place.uri, place.delta_options):
            return Table(place.uri, storage_options=place.delta_options).to_pyarrow_table()
    except (pa.ArrowException, DeltaError) as error:
        raise InputError(
            f"{source} cannot be read: {first_line(error)}",
            where=source,
            next="Write it anew, as Parquet or Arrow.",
        ) from error
    raise ConfigurationError(
        f"There is neither a file nor a Delta table at {source}.",
        where="--from",
        next="`weir state scan --format parquet -o FILE` and `weir state export` write what can be imported.",
    )
