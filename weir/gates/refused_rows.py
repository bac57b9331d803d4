"""Rows that a stage's task has refused, led back to the rows of sources that they come from.

    job -> a task refuses rows -> which rows of the slice are the cause -> the epoch is declined, which is no failure
        -> the same slice once more, which leaves them out

That is how a gate quarantines, and what is left out is recorded in the same way (`quarantine`). A stage says where its
rows come from if such a gate has it do so. Else the slice is looked through, once and only then: for values that no
stage takes, and by the SQL of a stage that hands out a row for each row. Of all others nobody knows the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa

from state_ops.arrow.unfit_values import unfit
from state_ops.errors import InputError, RefusedError, from_report, to_report
from state_ops.logs import Logger
from state_ops.records.acks import Ack
from weir import where
from weir.definition import QUARANTINE, ROW, Input, Source, Stage
from weir.execution import direct_read
from weir.execution.executor import Landed
from weir.gates.quarantine import MOST_ROWS, ROUNDS
from weir.sources.reader import SourceReader
from weir.sources.slices import EpochPlan, LeftOut
from weir.task.refusals import OutputTarget, refusals

log = Logger("weir.epoch")

_BATCH_ROWS = 65_536
_GATE = "on_bad"  # what a quarantine table says has set such rows aside

Found = dict[tuple[str, int], str]
"""By source and position in its slice, why a row is refused."""


@dataclass(frozen=True, slots=True)
class Read:
    """The rows that a stage has read.

    Attributes:
        plan: The epoch's.
        parts: Rows of sources, each with the stage's input that they are of.
        readers: By source.
        positioned: The positions behind the rows are committed, so that no epoch reads them again.
    """

    plan: EpochPlan
    parts: Sequence[tuple[Input, Landed]]
    readers: Mapping[str, SourceReader]
    positioned: bool


def judged(
    stage: Stage, acks: Sequence[Ack], read: Read, target: OutputTarget | None
) -> tuple[tuple[Ack, ...], EpochPlan | None]:
    """Return a stage's acks, with errors that name file and row of what a task has refused; and the plan to take
    instead, where the sources set rows aside: then without those of tasks that have declined.

    Args:
        target: Where the stage's main output goes, if it has a sink.
    """
    refused = [error for ack in acks if isinstance(error := _error(ack), RefusedError)]
    if not refused:
        return tuple(acks), None
    policies = {input.name: input.origin.on_bad for input in stage.inputs if isinstance(input.origin, Source)}
    sets_aside = QUARANTINE in policies.values()
    try:
        found = _found(stage, refused, read, target, MOST_ROWS + 1 if sets_aside else 1)
    except InputError as error:  # of a file that cannot be read, which says more
        return _with_error(acks, error), None
    if kept := {row: why for row, why in found.items() if policies[row[0]] != QUARANTINE}:
        found, sets_aside = kept, False
    why_not = _why_it_stays(stage, read, found) if sets_aside else None
    if sets_aside and why_not is None:
        log.warning("rows are set aside that cannot be stored", stage=stage.uid, rows=len(found))
        return tuple(ack for ack in acks if ack.error is None), _without(stage, read, found)
    return _with_error(acks, _placed(refused[0], read, found, why_not)), None


def _error(ack: Ack) -> Exception | None:
    return from_report(ack.error) if ack.error is not None else None


def _with_error(acks: Sequence[Ack], error: InputError) -> tuple[Ack, ...]:
    report = to_report(error)
    return tuple(replace(ack, error=report) if isinstance(_error(ack), RefusedError) else ack for ack in acks)


def _placed(error: RefusedError, read: Read, found: Found, why_not: str | None) -> RefusedError:
    """Return an error with the file and the row of the first of its rows, as far as it is known."""
    what, where, files = error.what, error.where, error.files
    if found:
        (source, at) = min(found)
        planned = read.plan.slices[source]
        name, row = planned.place(at)
        file = next(there for there in planned.files if there.name == name)
        reader = read.readers[source]
        places = reader.places(file)
        known = places[row] if places else None
        where = f"{where}; source {source}, {known or f'{reader.title(file)}, row {row}'}"
        if why_not is None:  # of a file that is blamed alone, a source may set the whole aside
            files = reader.blamed(file)
    if why_not is not None:
        what = f'{what} on_bad="{QUARANTINE}" cannot set it aside: {why_not}.'
    placed = RefusedError(what, where=where, next=error.next)
    placed.files = files
    return placed


def _why_it_stays(stage: Stage, read: Read, found: Found) -> str | None:
    """Why rows cannot be left out, as a clause; None if they can."""
    if not found:
        return "no row of a source is known to be its cause"
    if read.positioned:
        return "the positions behind the epoch's rows are committed"
    if read.plan.rounds.get(stage.uid, 0) >= ROUNDS:
        return f"rows were set aside {ROUNDS} times already"
    left_out = sum(len(planned.left_out) for planned in read.plan.slices.values())
    return f"there are more than {MOST_ROWS} such rows" if left_out + len(found) > MOST_ROWS else None


def _without(stage: Stage, read: Read, found: Found) -> EpochPlan:
    """Return the epoch's plan without the rows that were found."""
    slices = {}
    for name in dict.fromkeys(name for name, _ in found):
        planned = read.plan.slices[name]
        rows = sorted((at, why) for (of, at), why in found.items() if of == name)
        more = [LeftOut(stage.uid, _GATE, *planned.place(at), why) for at, why in rows]
        slices[name] = read.readers[name].without(planned, more)
    return read.plan.without(stage.uid, slices)


def _found(stage: Stage, refused: Sequence[RefusedError], read: Read, target: OutputTarget | None, most: int) -> Found:
    """Return at most so many rows that are refused: as tasks say, else as their files do. Raises InputError."""
    if all(error.positions for error in refused):
        assert not stage.is_of_several, "no other stage is told where its rows come from"
        name = stage.inputs[0].name
        return {(name, at): why for error in refused for at, why in error.positions.items()}
    return dict(islice(_looked_for(stage, read, target), most))


def _looked_for(stage: Stage, read: Read, target: OutputTarget | None) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield the rows of sources that the stage cannot take, and those of which it makes rows that are refused."""
    for input, rows in read.parts:
        for table in _numbered(stage, input, rows):
            positions = table.column(ROW)
            bad: dict[int, str] = {}
            for value in unfit(table.drop_columns([ROW])):
                bad.setdefault(value.row, f"Its column {value.column!r} {value.problem}.")
            for row, why in sorted(bad.items()):
                yield (input.name, positions[row].as_py()), why
            good = table.filter(pa.array([row not in bad for row in range(table.num_rows)])) if bad else table
            for position, why in _made(stage, input, target, good):
                yield (input.name, position), why


def _numbered(stage: Stage, input: Input, rows: Landed) -> Iterator[pa.Table]:
    """Yield the columns that a stage looks at of an input, of all rows, with their positions."""
    columns = pa.schema([field for field in rows.schema if field.name != ROW])
    narrowed = direct_read.narrowed(stage, input, replace(rows, schema=columns))
    assert isinstance(narrowed, Landed), "they were"
    tracked = replace(narrowed, schema=pa.schema([*narrowed.schema, (ROW, pa.int64())]))
    for number in range(len(tracked.files)):
        yield from direct_read.file_tables(tracked, number, _BATCH_ROWS)


def _made(stage: Stage, input: Input, target: OutputTarget | None, rows: pa.Table) -> Iterator[tuple[int, str]]:
    """Yield the positions of rows of which a stage makes rows that are refused, if it makes one of each, by SQL that is
    evaluated here."""
    if not stage.operator.hands_on or input.transform is not None:
        return
    columns = input.columns
    if columns and not any(column.strip() in ("*", ROW) for column in columns):
        columns = (*columns, ROW)
    try:
        made = direct_read.seen(replace(input, columns=columns), rows)
    except (where.Refused, where.Fails):
        return
    positions = made.column(ROW)
    for refusal in refusals(target, made.drop_columns([ROW])):
        for row in refusal.rows:
            yield positions[row].as_py(), refusal.what
