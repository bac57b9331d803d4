"""A pipeline's keyed state from a DataFrame: bootstrap it from history, or repair values.

    from weir import state_writer
    state_writer.write("flights", "aircraft_rotation", repaired)  # these keys are put, others stay
    state_writer.write("flights", "aircraft_rotation", history, replace=True)  # these rows and no others

On the command line: `weir state import`. docs/how-to/edit-state.md.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError
from weir.definition import Pipeline
from weir.loading import named
from weir.operations.state_import import Edit, import_rows
from weir.settings.configuration import Settings, load

__all__ = ["Edit", "write"]


def write(
    pipeline: str | Pipeline,
    stage: str,
    rows: Any,
    *,
    replace: bool = False,
    savepoint: str | None = None,
    dry_run: bool = False,
    reason: str = "",
    settings: Settings | None = None,
) -> Edit:
    """Put rows into a stage's state, as a checkpoint of its own, which the next run continues.

    Args:
        pipeline: The pipeline, or its name in the configuration.
        stage: The stage's uid.
        rows: A pyarrow, Polars, pandas or Spark DataFrame, which is collected. It has the key columns, then fields, as
            `state_reader.dataframe` does.
        replace: The stage's state becomes exactly these rows. False: these keys are put, others stay.
        savepoint: The name of a savepoint for the checkpoint; None: it gets no name.
        dry_run: Only validate the rows.
        reason: A note that `weir checkpoints` shows.
        settings: The configuration; by default that of WEIR_ENV.

    Returns:
        The change: the number of rows by subtask, and the checkpoint.

    Raises:
        InputError: Rows are wrong. The message has all mistakes, and nothing is changed.
        BusyError: A coordinator is alive.
        PipelineError: The stage's state cannot be made from rows.

    Example:
        The pipeline `shop` keeps the sum of each customer's orders.

        >>> import polars as pl
        >>> from weir import state_writer
        >>> repaired = pl.DataFrame({"customer": ["ann"], "spent": [30]})
        >>> edit = state_writer.write("shop", "totals", repaired, dry_run=True)
        >>> edit.rows, edit.checkpoint
        ({0: 1}, None)
    """
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    table = _table(rows)
    return import_rows(
        pipeline, settings, stage, table, replaces=replace, savepoint=savepoint, dry_run=dry_run, reason=reason
    )


def _table(rows: Any) -> pa.Table:
    """Return the rows in their own types: a state may have types that are not canonical."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pl.DataFrame):
        return frames.exported(rows)
    if frames.is_pandas(rows):
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "toArrow"):  # Spark
        return rows.toArrow()
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    raise InputError(
        f"A DataFrame was expected, not {type(rows).__name__}.",
        next="Give a pyarrow, Polars, pandas or Spark DataFrame.",
    )
