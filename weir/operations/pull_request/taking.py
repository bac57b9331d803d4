"""Which epochs of production can be replayed, and a copy of all that this takes: production is only read.

    checkpoint   39      40      41      42      43     retained: 40 to 43
                         base    epochs  ...     end    three epochs, replayed from 40

Nothing holds a checkpoint that is read here, since a hold would have to be written. So everything that is needed of
production later is copied first: state of the base and of the end, and the rows that the epochs handed out. What is
pruned in the meantime is found out by its digest or its absence, and then newer epochs are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated

from state_ops.checkpoints.registry import Registry
from state_ops.counts import agrees, counted
from state_ops.errors import DamageError, MissingError, PrunedError, WeirError
from state_ops.facts import HIDDEN, Facts
from state_ops.records.checkpoint import EPOCH, Checkpoint
from state_ops.records.snapshot_files import OUTPUT, STATE, StateFile
from state_ops.storage.read_only import ReadOnlyStorage
from state_ops.storage.storage import Storage, check_path
from state_ops.storage.transfers import together
from weir.definition import Pipeline
from weir.definition.pipeline import AT_MOST_ONCE
from weir.inspection.state_reader import chain
from weir.ownership.derived_checkpoint import lasting
from weir.replay.replayer import not_playable, waits


@dataclass(frozen=True, slots=True)
class Chosen(Facts):
    """Epochs that follow one another.

    Attributes:
        newest: Production's newest checkpoint.
        base: The checkpoint on which the first of the epochs was begun; None: it was the first of all.
        epochs: Their checkpoints, oldest first; none: no epoch can be replayed.
        notes: What is to be said about the choice, in sentences.
    """

    newest: Checkpoint
    base: Checkpoint | None
    epochs: Annotated[tuple[Checkpoint, ...], HIDDEN]
    notes: Annotated[tuple[str, ...], HIDDEN]


@dataclass(frozen=True, slots=True)
class Taken:
    """Epochs of production with a copy of what is needed of them.

    Attributes:
        copy: Where the files lie, by the paths that they have in production.
        base_files: What goes on from the base: its state, and rows that wait.
        listings: By the id of an epoch, all files that its checkpoint lists.
        gone: Paths of rows that are not there any more, because somebody has optimised and vacuumed a table.
        bytes: How many bytes were copied.
    """

    chosen: Chosen
    copy: Storage
    base_files: tuple[StateFile, ...]
    listings: Mapping[int, tuple[StateFile, ...]]
    gone: frozenset[str]
    bytes: int

    def handed_out(self, sink: str, epochs: Iterable[Checkpoint]) -> list[list[StateFile]]:
        """Return by epoch the files of the rows that it has handed out for a sink."""
        return [rows_for(sink, self.listings[int(epoch.id)]) for epoch in epochs]


def rows_for(sink: str, listing: Iterable[StateFile]) -> list[StateFile]:
    """Return those of an epoch's files that have its rows for a sink."""
    return [file for file in listing if file.kind == OUTPUT and file.new and file.sink == sink]


def choose(pipeline: Pipeline, registry: Registry, where: str, most: int, upto: int | None = None) -> Chosen:
    """Choose the newest epochs that can be replayed one after the other.

    Args:
        where: The place of production's storage, for messages.
        most: How many at most.
        upto: Only epochs after this one, which has turned out not to be replayable.

    Raises:
        WeirError: The pipeline has no checkpoint yet.
    """
    completed = registry.checkpoints()
    if not completed:
        raise WeirError(
            f"{pipeline.title} has no checkpoint yet, so there is nothing that a pull request could be tried on.",
            where=where,
            next=f"Run it first: weir run {pipeline.title}. Is this the storage of production? "
            "WEIR_ENV and storage.root say which is read.",
        )
    newest = completed[-1]
    if pipeline.delivery == AT_MOST_ONCE and pipeline.branch is None:
        why = f"{pipeline.title} delivers at most once: what an epoch was begun on is let go with its end."
        return Chosen(newest, None, (), (why,))
    line = chain(registry, newest)
    notes = []
    end = len(line)
    while end and (line[end - 1].kind != EPOCH or waits(line[end - 1])):
        end -= 1
    if end < len(line):
        last = line[end]
        what = "is unaligned, so that rows of it wait" if last.kind == EPOCH else f"is no epoch but a {last.kind}"
        notes.append(f"Checkpoint {last.id} {what}: only epochs before it are compared.")
    begin = end
    while begin and end - begin < most and line[begin - 1].id > (upto or 0) and _continues(line, begin - 1):
        begin -= 1
    while begin < end and begin and waits(line[begin - 1]):
        begin += 1
    epochs = tuple(line[begin:end])
    if len(epochs) < most and upto is None:
        notes.append(_fewer(len(epochs), most, line, begin))
    return Chosen(newest, line[begin - 1] if begin and epochs else None, epochs, tuple(notes))


def _continues(line: Sequence[Checkpoint], at: int) -> bool:
    """Return whether a checkpoint is an epoch's, and the checkpoint before it is retained, if it has one."""
    row, before = line[at], line[at - 1] if at else None
    return not_playable(row, before if before is not None and before.id == row.parent_id else None) is None


def _fewer(count: int, most: int, line: Sequence[Checkpoint], begin: int) -> str:
    asked = f"{counted(count, 'epoch')} instead of the {most} that were asked for"
    if begin and line[begin - 1].kind != EPOCH:
        return f"{asked}: checkpoint {line[begin - 1].id} is no epoch but a {line[begin - 1].kind}."
    if begin == 0 and line and line[0].parent_id is None:
        return f"{asked}: there were no more."
    return (
        f"{asked}: what older ones were begun on is not retained. `checkpoints.num_retained` of production says how "
        "many checkpoints stay, and it takes one more than epochs."
    )


def take(registry: Registry, storage: ReadOnlyStorage, chosen: Chosen, directory: Path) -> Taken:
    """Copy what it takes to replay epochs and to compare them.

    Args:
        storage: Production's.
        directory: An empty one, for the copy.

    Raises:
        PrunedError: A checkpoint was pruned meanwhile.
        DamageError: A file of a retained checkpoint is missing or altered.
    """
    base, epochs = chosen.base, chosen.epochs
    try:
        base_files = tuple(lasting(registry.files(base), base.operators)) if base is not None else ()
        listings = {int(row.id): registry.files(row) for row in epochs}
        state = [file for file in listings[int(epochs[-1].id)] if file.kind == STATE]
        rows = [file for listing in listings.values() for file in listing if file.kind == OUTPUT and file.new]
        files = list({file.path: file for file in (*base_files, *state, *rows)}.values())
        brought = _Copying(storage, directory)
        gone = frozenset(path for path in together(brought, files, at_once=storage.transfers) if path is not None)
    except DamageError as error:
        _raise_if_pruned(registry, storage, (*([base] if base is not None else []), *epochs), error)
        raise
    if gone:  # of a table that somebody optimises; or pruned, as rows of other sinks are
        _raise_if_pruned(registry, storage, epochs, None)
    return Taken(
        chosen, Storage(str(directory)), base_files, listings, gone,
        sum(file.bytes for file in files if file.path not in gone),
    )  # fmt: skip


def _raise_if_pruned(
    registry: Registry, storage: ReadOnlyStorage, rows: Iterable[Checkpoint], cause: Exception | None
) -> None:
    held = {row.commit_id for row in registry.checkpoints()}
    for row in rows:
        if row.commit_id not in held:
            raise PrunedError(
                f"Checkpoint {row.id} was pruned while it was being read: production went on meanwhile, and nothing "
                "holds what may only be read.",
                where=storage.uri,
                next="Ask again, for fewer epochs (--epochs); or let production retain more "
                "(checkpoints.num_retained), or keep a savepoint.",
            ) from cause


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies files of production to the same paths below a directory."""

    storage: ReadOnlyStorage
    directory: Path

    def __call__(self, file: StateFile, cancelled: Event) -> str | None:
        """Copy one; returns the path of rows that are not there."""
        local = self.directory / check_path(file.path)
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.storage.get_file(file.path, local, digest=file.digest, cancelled=cancelled)
        except MissingError:
            local.unlink(missing_ok=True)
            if file.kind != OUTPUT:
                raise
            return file.path
        return None


def in_words(chosen: Chosen) -> str:
    """Return in words which epochs are replayed."""
    first, last = chosen.epochs[0].id, chosen.epochs[-1].id
    ids = f"Epoch {first}" if first == last else f"Epochs {first} to {last}"
    rows = counted(sum(row.rows_read for row in chosen.epochs), "row")
    base = "from nothing" if chosen.base is None else f"from checkpoint {chosen.base.id}"
    verb = agrees(len(chosen.epochs), "was", "were")
    return f"{ids} of production ({rows} read) {verb} replayed {base}"
