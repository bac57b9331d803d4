"""One reading of the registry: what is retained, what it names, and whether its tables fit each other.

Reading needs no right. What a living coordinator changes meanwhile is sorted out by the caller, who looks twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError, TableNotFoundError

from state_ops.checkpoints.reader_holds import HeldCommits, HoldWatcher
from state_ops.checkpoints.registry import OrphanListing, Registry
from state_ops.counts import counted
from state_ops.delta.fenced_table import open_table
from state_ops.delta.log_entries import active_files
from state_ops.errors import DamageError, PrunedError, WeirError, first_line
from state_ops.fsck.findings import Finding, Kind
from state_ops.ids import CheckpointId, Generation
from state_ops.records.checkpoint import REWRITTEN, TAKES_BACK, Checkpoint
from state_ops.records.pins import Pin
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import CHANNEL, INPUT, OUTPUT, STATE, StateFile
from state_ops.storage.branches import is_inherited, own_of_parent, parent_uri
from state_ops.storage.storage import Storage, check_path

TABLES = ("registry/checkpoints", "registry/state_files", "registry/publications", "registry/pins")
UNREADABLE = (WeirError, OSError, DeltaError, pa.ArrowException, ValueError, KeyError, TypeError)
"""The errors that reading a damaged table raises."""

T = TypeVar("T")


@dataclass(slots=True)
class Named:
    """An object that the registry names: what was recorded of it, and by which retained checkpoints."""

    kind: str
    bytes: int
    digest: str
    sink: str | None
    checkpoints: list[CheckpointId]


@dataclass(slots=True)
class Survey:
    """One reading of the registry: the objects that it names, and the process that may change it meanwhile.

    Attributes:
        fence: Generations below it can commit nothing any more.
        alive: A coordinator works meanwhile.
        named: The objects that retained checkpoints name, by path.
        held: Paths that only a running restore's listing names.
    """

    generation: Generation
    fence: Generation
    alive: bool
    checkpoints: list[Checkpoint] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    named: dict[str, Named] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """True if everything that the registry names is known, so that a file that it does not name can be told."""
        return not any(finding.blocks for finding in self.findings)


def survey(storage: Storage, app_id: str, alive: bool, owned: bool = False) -> Survey:
    """Read the registry whole, each listing once and none kept.

    Args:
        alive: Whether a coordinator lives, other than the caller.
        owned: The caller owns the newest generation. In both cases that generation may still commit; else none may
            without a new claim.
    """
    registry = Registry(storage, app_id)
    seen = Survey(Generation(0), Generation(0), alive)
    generation = _read(storage, seen, registry.generation)
    if generation is None:
        return seen
    seen.generation = generation
    seen.findings += _read(storage, seen, lambda: _set_back(storage, app_id)) or []
    seen.fence = generation if alive or owned else Generation(generation + 1)
    seen.checkpoints = _read(storage, seen, registry.checkpoints) or []
    if not seen.readable:
        return seen
    for row in seen.checkpoints:
        # A registry of its own for each listing: it would keep them all.
        listing = _listing(storage, seen, Registry(storage, app_id), row)
        if listing is not None:
            seen.findings += _listing_problems(row, listing, parent_uri(storage.uri) is not None)
            _name(seen, row, listing)
    seen.publications = _read(storage, seen, registry.publications) or []
    seen.pins = _read(storage, seen, registry.pins) or []
    seen.findings += chain_problems(seen.checkpoints, generation)
    seen.findings += _pin_problems(seen)
    _orphan_listings(storage, seen, _read(storage, seen, registry.orphan_listings) or [])
    return seen


def _read(storage: Storage, seen: Survey, call: Callable[[], T]) -> T | None:
    try:
        return call()
    except UNREADABLE as error:
        seen.findings += _culprits(storage) or [
            Finding.of(Kind.UNREADABLE_REGISTRY, f"The registry cannot be read: {_brief(error)}", "registry")
        ]
        return None


def _set_back(storage: Storage, app_id: str) -> list[Finding]:
    """Return the tables that were set back.

    Tables are claimed in their order, so none can be of an older generation than one after it. They are read in
    reverse.
    """
    claims: list[tuple[str, int]] = []
    for path in reversed(TABLES):
        try:
            claims.append((path, open_table(storage, path).transaction_version(app_id) or 0))
        except TableNotFoundError:
            claims.append((path, 0))
    newest, problems = claims[0], []
    for path, generation in claims[1:]:
        if generation < newest[1]:
            what = f"It is of generation {generation}, and {newest[0]} of {newest[1]}, which is claimed after it."
            problems.append(Finding.of(Kind.REGISTRY_SET_BACK, what, path))
        newest = max(newest, (path, generation), key=lambda claim: claim[1])
    return problems


def _listing(storage: Storage, seen: Survey, registry: Registry, row: Checkpoint) -> tuple[StateFile, ...] | None:
    try:
        return registry.files(row)
    except PrunedError:
        return None
    except DamageError as error:
        named = [
            culprit for culprit in _culprits(storage) if culprit.path and f"checkpoint_id={row.id}/" in culprit.path
        ]
        seen.findings += named or [Finding.of(Kind.DAMAGED_LISTING, error.what, _listing_dir(row), (row.id,))]
        return None
    except UNREADABLE:
        return _read(storage, seen, lambda: registry.files(row))


def _culprits(storage: Storage) -> list[Finding]:
    """Read the files of the registry one by one and return the damaged ones as findings."""
    problems = []
    for path in TABLES:
        try:
            handle = open_table(storage, path)
        except TableNotFoundError:
            continue
        except UNREADABLE as error:
            where = torn_entry(storage, path) or path
            problems.append(
                Finding.of(Kind.UNREADABLE_REGISTRY, f"The table's log cannot be read: {_brief(error)}", where)
            )
            continue
        for file in active_files(handle):
            where = f"{path}/{file.path}"
            data = storage.read_bytes(where)
            if data is None:
                problems.append(
                    Finding.of(Kind.MISSING_REGISTRY_FILE, "The table's log names it, and it is gone.", where)
                )
            elif len(data) != file.bytes:
                problems.append(
                    Finding.of(Kind.ALTERED_REGISTRY_FILE, f"It has {len(data)} bytes instead of {file.bytes}.", where)
                )
            elif (problem := unreadable_parquet(data)) is not None:
                problems.append(Finding.of(Kind.ALTERED_REGISTRY_FILE, f"It cannot be read: {problem}", where))
    return problems


def torn_entry(storage: Storage, table: str) -> str | None:
    """Return the oldest entry of a table's log that is no JSON, if that is what is wrong with it."""
    entries = [file.path for file in storage.list(f"{table}/_delta_log") if file.path.endswith(".json")]
    for path in sorted(entries):
        try:
            for line in (storage.read_bytes(path) or b"{}").splitlines():
                json.loads(line)
        except ValueError:
            return path
    return None


def unreadable_parquet(data: bytes) -> str | None:
    """Return the reason why a Parquet file cannot be read, page checksums included; None if it can."""
    try:
        pq.read_table(pa.BufferReader(data), use_threads=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        return _brief(error)
    return None


# -- what does not fit


_TOP = {STATE: ("state/",), CHANNEL: ("channels/",), OUTPUT: ("tables/", "outputs/"), INPUT: ("landed/",)}


def _listing_problems(row: Checkpoint, listing: tuple[StateFile, ...], branch: bool) -> Iterator[Finding]:
    """Yield the faults of a listing by itself.

    branch: The listing is a branch's, which may name its pipeline's state and rows that wait.
    """
    for file in listing:
        inherited = branch and is_inherited(file.path) and file.kind != OUTPUT
        try:
            check_path(file.path)
            path = own_of_parent(file.path) if inherited else file.path
            fits = path.startswith(_TOP.get(file.kind, ())) and not (inherited and file.new)
        except DamageError:
            fits = False
        if not fits:
            what = f"Checkpoint {row.id} names {file.path!r} as {file.kind}, where Weir never writes such a file."
            yield Finding.of(Kind.DAMAGED_LISTING, what, _listing_dir(row), (row.id,))
    state = [file for file in listing if file.kind == STATE]
    yield from _drift(row, "bytes_total", row.bytes_total, sum(file.bytes for file in state))
    yield from _drift(row, "bytes_new", row.bytes_new, sum(file.bytes for file in state if file.new))
    for uid, stats in row.operators.items():
        of_stage = [file for file in state if file.operator == uid]
        new = [file for file in of_stage if file.new]
        recount = {"files_total": len(of_stage), "bytes_total": sum(file.bytes for file in of_stage)}
        if (
            row.kind == "checkpoint"
        ):  # the first checkpoint of a pipeline that started from another's has that one's figures
            recount |= {"files_new": len(new), "bytes_new": sum(file.bytes for file in new)}
        for name, count in recount.items():
            yield from _drift(row, f"operators.{uid}.{name}", stats.to_json().get(name, count), count)
    listed = {file.sink for file in listing if file.kind == OUTPUT}
    claimed = {sink for sink, link in row.sinks.items() if link.id == row.id}
    for sink in sorted(claimed ^ listed, key=str) if row.kind not in TAKES_BACK else ():  # which takes rows back
        has, lacks = ("row", "listing") if sink in claimed else ("listing", "row")
        what = f"The {has} of checkpoint {row.id} has output for {sink}, its {lacks} has none."
        yield Finding.of(Kind.COUNT_DRIFT, what, _listing_dir(row), (row.id,))


def _drift(row: Checkpoint, figure: str, recorded: int, counted: int) -> Iterator[Finding]:
    if recorded != counted:
        what = f"Checkpoint {row.id} records {figure} = {recorded:,}, its listing adds up to {counted:,}."
        yield Finding.of(Kind.COUNT_DRIFT, what, _listing_dir(row), (row.id,))


def chain_problems(rows: list[Checkpoint], generation: Generation) -> Iterator[Finding]:
    """Yield the contradictions between the rows and the way in which checkpoints come to be.

    When a checkpoint commits, its parent is the newest row. Rows are dropped and never come back, so a row that is here
    now and older was here then: no parent may be older than the row before, but that of a rewind.

    Args:
        rows: Retained, by id.
    """
    before: Checkpoint | None = None
    for row in rows:
        if row.parent_id is not None and row.parent_id >= row.id:
            yield _broken(row, f"Checkpoint {row.id} says that it continues {row.parent_id}, which is not older.")
        if row.generation > generation:
            yield _broken(row, f"Checkpoint {row.id} is of generation {row.generation}; the newest is {generation}.")
        if before is not None:
            if row.id == before.id:
                yield _broken(row, f"There are two checkpoints {row.id}.")
            elif (row.parent_id or 0) < before.id and row.kind not in TAKES_BACK:
                yield _broken(
                    row, f"Checkpoint {row.id} continues {row.parent_id}, although {before.id} was there before it."
                )
            if row.generation < before.generation:
                yield _broken(row, f"Checkpoint {row.id} is of an older generation than {before.id}.")
            if row.parent_id == before.id:
                yield from _totals(before, row)
        before = row


def _totals(parent: Checkpoint, row: Checkpoint) -> Iterator[Finding]:
    was, now = parent.totals.get("bytes_new"), row.totals.get("bytes_new")
    rewritten = REWRITTEN in {**parent.totals, **row.totals}
    if was is None or now is None or rewritten:
        return
    if row.kind == "checkpoint" and now != was + row.bytes_new:
        what = (
            f"Checkpoint {row.id} records a total of {now:,} new bytes; {parent.id} and its own make "
            f"{was + row.bytes_new:,}."
        )
        yield Finding.of(Kind.COUNT_DRIFT, what, "registry/checkpoints", (row.id,))


def _broken(row: Checkpoint, what: str) -> Finding:
    return Finding.of(Kind.BROKEN_CHAIN, what, "registry/checkpoints", (row.id,))


def _pin_problems(seen: Survey) -> Iterator[Finding]:
    kept = {row.commit_id for row in seen.checkpoints}
    for pin in seen.pins:
        if pin.commit_id not in kept:
            what = f"The {pin.kind} {pin.name!r} names checkpoint {pin.checkpoint_id}, which is not there."
            yield Finding.of(Kind.LOST_SAVEPOINT, what, f"registry/pins#{pin.kind}/{pin.name}", (pin.checkpoint_id,))


# -- what is named


def _name(seen: Survey, row: Checkpoint, listing: tuple[StateFile, ...]) -> None:
    for file in listing:
        named = seen.named.get(file.path)
        if named is None:
            seen.named[file.path] = Named(file.kind, file.bytes, file.digest, file.sink, [row.id])
            continue
        if (named.bytes, named.digest) != (file.bytes, file.digest):
            what = (
                f"Checkpoints {named.checkpoints[-1]} and {row.id} name the same object with different sizes or "
                "digests."
            )
            seen.findings.append(Finding.of(Kind.DAMAGED_LISTING, what, file.path, (*named.checkpoints, row.id)))
        if row.id != named.checkpoints[-1]:
            named.checkpoints.append(row.id)


def _orphan_listings(storage: Storage, seen: Survey, orphan_listings: list[OrphanListing]) -> None:
    """Return listings and publications without a row.

    A living coordinator may be about to commit them, or to prune them.
    """
    watcher = HoldWatcher()
    holds = _read(storage, seen, lambda: watcher.live(storage)) or {}
    held = HeldCommits(holds)
    for orphan in orphan_listings:
        if orphan.commit_id in held or seen.alive:
            seen.held.update(file.path for file in orphan.files)
        else:
            what = (
                f"It lists {counted(len(orphan.files), 'file')} of checkpoint {orphan.checkpoint_id}, which has no row."
            )
            path = f"registry/state_files/{orphan.path}"
            seen.findings.append(Finding.of(Kind.ORPHAN_LISTING, what, path, (orphan.checkpoint_id,)))
    if seen.alive:
        return
    kept = {row.id for row in seen.checkpoints} | {hold.checkpoint_id for hold in holds.values()}
    for publication in seen.publications:
        if publication.checkpoint_id not in kept:
            what = f"Checkpoint {publication.checkpoint_id} was published in {publication.sink}; it has no row."
            path = f"registry/publications#{publication.checkpoint_id}/{publication.sink}"
            seen.findings.append(Finding.of(Kind.STRAY_PUBLICATION, what, path, (publication.checkpoint_id,)))
    live = set(holds)
    for path in watcher.dead(storage) if seen.readable else ():
        if path not in live:
            seen.findings.append(Finding.of(Kind.DEAD_HOLD, "The restore that wrote it is gone.", path))


def _listing_dir(row: Checkpoint) -> str:
    return f"registry/state_files/checkpoint_id={row.id}"


def _brief(error: BaseException) -> str:
    """Return an error without the native stack that delta-rs appends."""
    return error.what.partition("\n")[0] if isinstance(error, WeirError) else first_line(error)
