"""Expectations of a restored checkpoint (`Pipeline(on_restore=...)`): of a sample of its state, and of the newest rows
of tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
from deltalake.exceptions import TableNotFoundError

from state_ops.arrow import frames
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import active_files
from state_ops.errors import DamageError, GateError, plainly
from state_ops.ids import parse_epoch_dir
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import file_path, table_path, with_partition
from weir.connectors.formats.stored_rows import stored_rows
from weir.definition import Expected, Pipeline
from weir.gates import evaluation
from weir.gates.evaluation import GateVerdict
from weir.inspection import state_reader
from weir.settings.configuration import Settings

log = Logger("weir.restore")

SAMPLE_ROWS = 10_000
NOT_HELD = "It does not hold what is expected of it"
_LARGEST_BYTES = 256 << 20


def evaluate(pipeline: Pipeline, settings: Settings, storage: Storage, checkpoint: Checkpoint, *, newest: bool) -> int:
    """Evaluate them; returns how many.

    Args:
        newest: Nothing was published after this checkpoint, so that tables are looked at too.

    Raises:
        DamageError: One of state fails.
        GateError: One of a table does.
        PipelineError: One cannot be evaluated.
    """
    failed: dict[str, list[str]] = {"state": [], "table": []}
    for of, name, verdicts in judged(pipeline, settings, storage, checkpoint, newest=newest):
        failed[of] += [f"{of} {name}: {verdict}" for verdict in verdicts if verdict.holds]
        for verdict in verdicts:
            if not (verdict.passed or verdict.holds):
                log.warning("an expectation failed, and only warns", of=of, name=name, verdict=verdict.in_counts)
    what = f"{NOT_HELD}: {'; '.join(failed['state'] + failed['table'])}."
    if failed["state"]:
        raise DamageError(what)
    if failed["table"]:  # going back to an earlier checkpoint would only make the same rows again
        raise GateError(what, next="Nothing was used. Look at the rows; repair the table, or correct on_restore.")
    return len(_asked(pipeline, newest=newest))


def _asked(pipeline: Pipeline, *, newest: bool) -> list[Expected]:
    left_out = not_asked(pipeline)
    return [
        expected
        for expected in pipeline.on_restore
        if expected.of == "state" or (newest and expected.name not in left_out)
    ]


def not_asked(pipeline: Pipeline) -> list[str]:
    """Return the tables of which nothing can be expected: a branch's with keys, which have what became of keys and not
    their rows."""
    if pipeline.branch is None:
        return []
    names = dict.fromkeys(expected.name for expected in pipeline.on_restore if expected.of == "table")
    keyed = {sink.name for sink in pipeline.sinks if sink.capabilities.newest_of}
    return [name for name in names if name in keyed]


def judged(
    pipeline: Pipeline, settings: Settings, storage: Storage, checkpoint: Checkpoint, *, newest: bool
) -> Iterator[tuple[Literal["state", "table"], str, list[GateVerdict]]]:
    """Yield what they say, by stage or table. Where there are no rows yet, nothing is asked. Arguments and errors as of
    `evaluate`."""
    asked = _asked(pipeline, newest=newest)
    for of, name in dict.fromkeys((expected.of, expected.name) for expected in asked):
        rows = sample(_state(pipeline, settings, checkpoint, name) if of == "state" else newest_rows(storage, name))
        if rows is not None:
            gates = [expected.gate for expected in asked if (expected.of, expected.name) == (of, name)]
            yield of, name, evaluation.evaluated(f"{of} {name}", name, gates, rows)


def sample(tables: Iterator[pa.Table]) -> pa.Table | None:
    """Return the first of some rows, at most `SAMPLE_ROWS`; None where there are none."""
    parts: list[pa.Table] = []
    for table in tables:
        parts.append(table.slice(0, SAMPLE_ROWS - sum(part.num_rows for part in parts)))
        if sum(part.num_rows for part in parts) >= SAMPLE_ROWS:
            break
    return pa.concat_tables(parts) if parts else None


def _state(pipeline: Pipeline, settings: Settings, checkpoint: Checkpoint, uid: str) -> Iterator[pa.Table]:
    if stats_of(checkpoint, uid).has_state:
        yield from state_reader.scan(pipeline, settings, uid, int(checkpoint.id))


def newest_rows(storage: Storage, name: str) -> Iterator[pa.Table]:
    """Yield a table's rows, file by file, those of the newest epoch first; files that are too large for a look are left
    out."""
    try:
        handle = fenced_table.open_table(storage, table_path(name))
    except TableNotFoundError:
        return
    schema = frames.canonical_schema(pa.schema(handle.schema().to_arrow()))
    files = [file for file in active_files(handle) if file.bytes <= _LARGEST_BYTES]
    for file in sorted(files, key=lambda file: _epoch(file.path), reverse=True):
        data = storage.read_bytes(file_path(name, file))
        if data is None:
            continue
        try:
            with stored_rows(pa.BufferReader(data)) as stored:
                rows = with_partition(stored.read(), file)
        except (pa.ArrowException, OSError) as error:  # going back to an earlier checkpoint would not mend it
            raise GateError(
                f"A file of the table {name} cannot be read, so that nothing can be expected of its rows:"
                f" {plainly(error)}",
                where=storage.full(file_path(name, file)),
                next="`weir fsck` says what else is damaged: bring the file back from a backup.",
            ) from error
        yield frames.aligned(rows, schema)


def _epoch(path: str) -> tuple[int, int]:
    """Return generation and epoch of a file in a table; None for files of others."""
    return parse_epoch_dir("/".join(path.split("/")[1:2])) or (0, 0)
