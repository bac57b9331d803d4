"""A branch's rows for sinks that are no tables, judged before a promotion is committed.

On a branch every sink is a table, which takes more than another system does. After the promotion's commit rows that
the system refuses could go nowhere, and all later ones would wait behind them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.delta.log_entries import DataFile
from state_ops.errors import PipelineError
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import file_path
from weir.definition.sink import Sink
from weir.ownership.context import RunContext
from weir.task.refusals import OutputTarget, refusals

_BATCH_ROWS = 65_536


def judge(context: RunContext, source: Storage, branch: str, sink: Sink, files: list[DataFile]) -> None:
    """Check that a sink takes the columns and the values of a branch's rows.

    Args:
        source: The branch's storage.
        branch: Its title, for errors.
        files: Of its table that stands for the sink.

    Raises:
        PipelineError: It does not. Nothing is changed.
    """
    targets: dict[pa.Schema, OutputTarget] = {}
    for file in files:
        path = file_path(sink.name, file)
        before = 0
        with source.fetched(path, context.settings.work_dir) as local, pq.ParquetFile(local) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS, use_threads=False):
                rows = frames.canonical(pa.Table.from_batches([batch]))
                if rows.schema not in targets:
                    context.sinks.check(sink, rows.schema)
                    targets[rows.schema] = OutputTarget(sink.name, "", rules=context.sinks.rules(sink, rows.schema))
                for refusal in refusals(targets[rows.schema], rows):
                    raise PipelineError(
                        f"{branch} cannot be promoted: {refusal.what}",
                        where=f"sink {sink.name}; {source.full(path)}, row {before + refusal.rows[0] + 1}",
                        next=f"Nothing was changed. Correct the code that makes the row, and fork anew: weir fork "
                        f"{context.pipeline.name} --drop {branch.rpartition('@')[2]}, then the same fork again. Or let "
                        "the sink take the row.",
                    )
                before += rows.num_rows


def prepare(context: RunContext, sink: Sink, schema: pa.Schema | None) -> None:
    """Create what a sink lacks for a branch's rows. Only right before the promotion's commit."""
    if schema is not None and len(schema):
        context.sinks.prepare(sink, frames.canonical_schema(schema))
