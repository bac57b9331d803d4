"""Rows of a source that a gate has set aside: which ones, and what is kept of them.

    job -> a quarantining gate fails -> the positions of the rows that failed it -> the epoch is declined, which is no
    failure
        -> the same slice once more, which records them and leaves them out -> job -> gates -> ... -> commit

A row's position travels with it, as the column `_weir_row`: the file's number in the slice, then the row's number in
the file. What is
decided lives in the slice of the replay and nowhere else: a run that is killed meanwhile forgets it, and the next one
decides it again. The rows that the replay leaves out are appended to the stage's quarantine table with the very
checkpoint that leaves them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.parquet import staged_writer
from state_ops.arrow.unfit_values import storable
from state_ops.counts import counted
from state_ops.errors import InputError
from state_ops.ids import CheckpointId, epoch_dir
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import OUTPUT, StagedFile, StateFile
from state_ops.storage.storage import Storage
from state_ops.value_text import literal
from weir.definition import POSITIONS, ROW, Gate, Input, Source, Stage
from weir.execution.executor import staged_table
from weir.gates.evaluation import GateVerdict, columns_of, refusal
from weir.sources.reader import SourceReader, picked
from weir.sources.slices import LeftOut, Slice, SourceFile

ROUNDS = 3  # how often a slice is replayed with fewer rows
MOST_ROWS = 10_000  # of a slice: each of them stands in the checkpoint's row
_REASON = 200  # characters
_ON_BAD = "on_bad"  # what has set rows aside that are bad by themselves

_TOLD = (("_weir_stage", pa.string()), ("_weir_gate", pa.string()), ("_weir_epoch", pa.int64()),
         ("_weir_file", pa.string()), (ROW, pa.int64()), ("_weir_reason", pa.string()))  # fmt: skip
_RAW = (("_weir_raw", pa.string()),)


def table_schema(input: Input, source: pa.Schema) -> pa.Schema:
    """Return the columns of a quarantine table: those of the source's files, and why each row is there; where rows may
    be bad, also what stands there instead of a row."""
    more = [pa.field(name, kind) for name, kind in (*_TOLD, *(_RAW if _keeps_raw(input) else ()))]
    return pa.schema([*source, *more])


def _keeps_raw(input: Input) -> bool:
    """Return whether its table has what stands in place of a row that could not be decoded."""
    return input.takes_bad_rows and isinstance(input.origin, Source) and input.origin.decodes


def decided(
    stage: Stage,
    planned: Slice,
    rounds: int,
    verdicts: Sequence[GateVerdict],
    looked_at: pa.Table,
    positions: np.ndarray,
) -> tuple[LeftOut, ...]:
    """Return the rows that the slice is to be replayed without; none if no quarantining gate failed.

    Args:
        rounds: How often it was replayed for rows of this stage already.
        looked_at: The rows that the gates saw.
        positions: Of each the one in the slice, -1 where the stage says none.

    Raises:
        GateError: Where a bound is reached: the gate then holds.
    """
    failed = [(gate, verdict) for gate, verdict in _paired(stage, verdicts) if verdict.quarantines]
    if not failed:
        return ()
    left_out: dict[int, LeftOut] = {}
    for gate, verdict in failed:
        at = np.asarray(verdict.unexpected_rows, dtype=np.int64)
        if not len(at) or (positions[at] < 0).any():
            raise refusal(
                stage.uid, verdicts, f"{verdict}; of some of them no row of the source is known to be the cause"
            )
        reasons = dict(zip(positions[at].tolist(), _reasons(gate, looked_at, at), strict=True))
        for place, reason in sorted(reasons.items()):
            file, row = planned.place(place)
            left_out.setdefault(place, LeftOut(stage.uid, verdict.gate, file, row, reason))
        count = sum(row_out.stage == stage.uid and row_out.gate == verdict.gate for row_out in planned.left_out) + len(
            reasons
        )
        if count > gate.share * planned.rows:
            raise refusal(
                stage.uid,
                verdicts,
                f"{verdict}; {count} of the {counted(planned.rows, 'row')} of the slice would be set "
                f"aside, at most {gate.share:g} of them may be (quarantine_at_most= of the gate)",
            )
    if len(planned.left_out) + len(left_out) > MOST_ROWS:
        raise refusal(
            stage.uid, verdicts, f"more than {MOST_ROWS} rows of one slice would be set aside: {failed[0][1]}"
        )
    if rounds >= ROUNDS:
        raise refusal(stage.uid, verdicts, f"{failed[0][1]}, after rows were set aside {rounds} times")
    return tuple(left_out[place] for place in sorted(left_out))


def _paired(stage: Stage, verdicts: Sequence[GateVerdict]) -> Iterator[tuple[Gate, GateVerdict]]:
    by_title = {(gate.title, gate.on_failure): gate for gate in stage.gates}
    for verdict in verdicts:
        yield by_title[verdict.gate, verdict.on_failure], verdict


def _reasons(gate: Gate, rows: pa.Table, at: np.ndarray) -> list[str]:
    """Return for each of some rows the values that the gate has looked at."""
    shown = rows.select([name for name in columns_of([gate]) or () if name in rows.column_names]).take(pa.array(at))
    return [
        ", ".join(f"{name} = {literal(value)}" for name, value in row.items())[:_REASON]
        for row in frames.python_rows(shown)
    ] or [""] * len(at)


def positions_of(storage: Storage, acks: Sequence[Ack]) -> np.ndarray:
    """Return int64[n], the position in the slice of each row that a stage has handed out; -1: it has none.

    Rows are in the order of `read_by_next`.
    """
    files = [file for ack in acks for file in ack.staged(POSITIONS)]
    parts = [staged_table(storage, file).column(ROW) for file in files]
    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.int64())
    numbers: np.ndarray = column.fill_null(-1).to_numpy()
    return numbers


# -- what is kept


def rows_of(
    reader: SourceReader, planned: Slice, stage: Stage, input: Input, epoch: CheckpointId
) -> Iterator[pa.Table]:
    """Yield what has been set aside of a slice, as the quarantine table of a stage's input has it: by gates, file by
    file, and what could not be decoded."""
    assert planned.schema is not None
    uid, schema = stage.uid, table_schema(input, planned.schema)
    if _keeps_raw(input) and planned.bad_rows:
        bad, titles = planned.bad_rows, {file.name: reader.title(file) for file in planned.files}
        facts: dict[str, list[Any]] = {
            "_weir_stage": [uid] * len(bad), "_weir_gate": [_ON_BAD] * len(bad),
            "_weir_epoch": [int(epoch)] * len(bad),
            "_weir_file": [titles.get(row.file, row.file) for row in bad], ROW: [row.row for row in bad],
            "_weir_reason": [row.reason for row in bad], "_weir_raw": [row.raw for row in bad],
        }  # fmt: skip
        yield pa.table(
            [pa.array(facts[f.name], f.type) if f.name in facts else pa.nulls(len(bad), f.type) for f in schema],
            schema=schema,
        )
    by_file: dict[str, list[LeftOut]] = {}
    for row in planned.left_out:
        if row.stage == uid:
            by_file.setdefault(row.file, []).append(row)
    if input.takes_bad_rows and not _keeps_raw(input):  # the files themselves have such rows
        for of in planned.bad_rows:
            by_file.setdefault(of.file, []).append(LeftOut(uid, _ON_BAD, of.file, of.row, of.reason))
    for file in planned.files:
        left_out = sorted({row.row: row for row in by_file.get(file.name, ())}.values(), key=lambda row: row.row)
        if left_out:
            rows = storable(picked(reader, file, planned.schema, np.array([row.row for row in left_out], np.int64)))
            columns = [
                [row.stage for row in left_out], [row.gate for row in left_out], [int(epoch)] * len(left_out),
                _places(reader, file, left_out), [row.row for row in left_out], [row.reason for row in left_out],
            ]  # fmt: skip
            for (name, kind), values in zip(_TOLD, columns, strict=True):
                rows = rows.append_column(name, pa.array(values, kind))
            if _keeps_raw(input):
                rows = rows.append_column("_weir_raw", pa.nulls(len(left_out), pa.string()))
            yield rows


def _places(reader: SourceReader, file: SourceFile, rows: Sequence[LeftOut]) -> list[str]:
    """Return the places of rows as people look them up; where none are known, the file's title."""
    places, title = reader.places(file), reader.title(file)
    return [(places[row.row] if places else None) or title for row in rows]


def with_rows(
    storage: Storage,
    reader: SourceReader,
    planned: Slice,
    stage: Stage,
    input: Input,
    acks: Sequence[Ack],
    work_dir: Path,
    output: str,
    sink: str,
) -> list[Ack]:
    """Return the acks of a stage's subtasks, the first of them with the rows of a source that are set aside, staged
    like rows that are late.

    Args:
        input: The stage's input with the source.
        output: What they are called among the stage's outputs.
        sink: The name of their table.
    """
    first, *others = sorted(acks, key=lambda ack: ack.subtask)
    tables = list(rows_of(reader, planned, stage, input, first.epoch))
    if not tables:
        return list(acks)
    directory = Path(first.pending_upload.directory) if first.pending_upload is not None else work_dir
    directory.mkdir(parents=True, exist_ok=True)
    local = directory / f"{output}-{first.attempt}.parquet"
    with staged_writer(local, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    rows = sum(table.num_rows for table in tables)
    path = f"tables/{sink}/data/{epoch_dir(first.generation, first.epoch)}/{first.subtask}-{first.attempt}.parquet"
    return [_beside(storage, first, local, path, output, sink, rows), *others]


def _beside(storage: Storage, ack: Ack, local: Path, path: str, output: str, sink: str, rows: int) -> Ack:
    if ack.pending_upload is not None:
        staged = StagedFile(OUTPUT, output, str(local), path, local.stat().st_size, sink, rows)
        return replace(ack, pending_upload=replace(ack.pending_upload, staged=(*ack.pending_upload.staged, staged)))
    try:
        size, digest = storage.put_file(local, path)
    finally:
        local.unlink()
    fields = (OUTPUT, output, path, size, digest, True, ack.attempt, None, sink, rows)
    return replace(ack, files=(*ack.files, StateFile(ack.operator, ack.subtask, *fields)))


def refuse_row(stage: Stage, schema: pa.Schema) -> None:
    """Raise InputError if a source has a column of the name by which rows are told apart."""
    if ROW in schema.names:
        raise InputError(
            f"The source of {stage.uid} has a column {ROW!r}, the name by which Weir tells rows of a source apart.",
            where=f"stage {stage.uid}",
            next="Rename it in what writes the source; of a quarantine table, read a copy with other names.",
        )


def refuse_own_column(source: Source, schema: pa.Schema) -> None:
    """Raise InputError if files have columns of the names that a quarantine table gives to its own."""
    taken = sorted({name for name, _ in (*_TOLD, *_RAW)} & set(schema.names))
    if taken:
        raise InputError(
            f"The files of the source {source.name} have a column {taken[0]!r}, which a quarantine needs for itself.",
            where=f"source {source.name}",
            next="Rename it in what writes the files, or let the gate hold or warn.",
        )
