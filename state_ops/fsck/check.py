"""The whole check: one look, the digests, and a second look that every finding has to survive.

A coordinator may live and work meanwhile. What belongs to its generation is never reported; what it prunes between two
reads looks like damage once, and not twice, because a checkpoint's row goes before its objects and never comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from state_ops.fsck import objects, sinks
from state_ops.fsck.findings import Finding, Kind, Report, Retained, Severity
from state_ops.fsck.objects import ExpectedFile
from state_ops.fsck.sinks import Marker
from state_ops.fsck.survey import Survey, survey, unreadable_parquet
from state_ops.ids import CheckpointId
from state_ops.records.pins import BRANCH
from state_ops.records.snapshot_files import is_reference
from state_ops.storage.branches import branch_of, is_inherited, pinned
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together

Reading = Callable[[Sequence[ExpectedFile]], Iterable[ExpectedFile]]
"""Hands on what is to be read, one by one; a caller who shows progress wraps it."""

_ORDER = list(Kind)
_OF_OBJECTS = {Kind.MISSING_OBJECT, Kind.ALTERED_OBJECT, Kind.MISSING_ROWS, Kind.ALTERED_ROWS}


@dataclass(frozen=True, slots=True)
class StorageLook:
    """One look at everything but contents.

    Attributes:
        wanted: What has to be there, by path.
        whole: Of that, what is there in its size.
    """

    survey: Survey
    wanted: Mapping[str, ExpectedFile]
    whole: tuple[ExpectedFile, ...]
    findings: tuple[Finding, ...]
    files: int
    bytes: int


def check(
    storage: Storage,
    app_id: str,
    tables: Iterable[str],
    *,
    alive: bool,
    owned: bool = False,
    quick: bool = False,
    reading: Reading = iter,
    markers: Mapping[str, Marker] | None = None,
    early: bool = False,
    behind: bool = False,
) -> Report:
    """Look at everything that one pipeline has stored. Reads only.

    Args:
        app_id: Of the pipeline's registry.
        tables: Names of its sinks that are tables.
        markers: Of others, how they are asked.
        alive: Whether a coordinator of it lives, other than the caller.
        owned: The caller owns the newest generation.
        early: Sinks get rows before their commit, so they may be ahead.
        behind: They may lack rows for ever.
        quick: Compare sizes only.

    Raises:
        OSError: Storage does not answer: half a listing proves nothing.
    """
    names = frozenset(tables)
    last = first = look(storage, app_id, names, alive, owned, markers or {}, early, behind)
    read, altered = 0, []
    for expected in () if quick else reading(first.whole):
        read += expected.bytes
        if (problem := content_problem(storage, expected)) is not None:
            altered.append(problem)
    findings: list[Finding] = []
    if first.findings or altered:
        second = look(storage, app_id, names, alive, owned, markers or {}, early, behind)
        seen_before = {_key(finding) for finding in first.findings}
        findings = [finding for finding in second.findings if _key(finding) in seen_before]
        for problem in altered:
            wanted = second.wanted.get(problem.path or "")
            if wanted is not None and (still := content_problem(storage, wanted)) is not None:
                findings.append(still)
        last = second
    ordered = sorted(
        set(findings), key=lambda finding: (_ORDER.index(finding.kind), finding.path or "", finding.checkpoints)
    )
    return Report(
        storage=storage.uri,
        generation=last.survey.generation,
        alive=alive,
        quick=quick,
        checkpoints=_retained(last.survey, ordered),
        findings=tuple(ordered),
        files=last.files,
        bytes=last.bytes,
        read=read,
    )


def look(
    storage: Storage,
    app_id: str,
    names: frozenset[str],
    alive: bool,
    owned: bool,
    markers: Mapping[str, Marker],
    ahead: bool,
    behind: bool,
) -> StorageLook:
    """Look once at the sinks' versions, the registry, the sinks and the listing, in this order.

    Each may only be newer than the one before.
    """
    early = sinks.versions(storage, app_id)
    early |= {name: sinks.ask(name, marker).version for name, marker in markers.items()}
    seen = survey(storage, app_id, alive, owned)
    recorded = {name for row in seen.checkpoints for name, link in row.sinks.items() if link.kind is None}
    sink_names = names | (recorded - markers.keys())
    tables = {name: sinks.look(storage, app_id, name) for name in sorted(sink_names)}
    # Branches have registries of their own, by which they are looked at by themselves.
    branches = {pinned(pin.name, pin.reason).id for pin in seen.pins if pin.kind == BRANCH}
    stored = {file.path: file.bytes for file in storage.list(unfinished=True) if branch_of(file.path) not in branches}
    findings = list(seen.findings)
    if seen.readable:
        elsewhere = {name: sinks.ask(name, marker) for name, marker in sorted(markers.items())}
        for name, table in (*tables.items(), *elsewhere.items()):
            findings += sinks.chain_problems(storage, seen, table, None if ahead else early.get(name), behind=behind)
    # Rows may be left of a sink that no checkpoint has got to know, or that is another system by now.
    staged = objects.tables_with_staged_rows(stored)
    tables |= {name: sinks.look(storage, app_id, name) for name in sorted(staged - tables.keys())}
    wanted = objects.expectations(seen, tables)
    compared = list(objects.compare(wanted, {**stored, **_inherited(storage, wanted)}))
    findings += compared
    findings += objects.superfluous(storage, seen, tables, stored, app_id)
    findings += objects.unnamed_registry_files(storage, seen, stored)
    wrong = {finding.path for finding in compared}
    whole = tuple(expected for path, expected in wanted.items() if path not in wrong)
    return StorageLook(seen, wanted, whole, tuple(findings), len(stored), sum(stored.values()))


def _inherited(storage: Storage, wanted: Iterable[str]) -> dict[str, int]:
    """Sizes of what a branch names of the pipeline that it was forked from, and is there, by path."""
    paths = [path for path in wanted if is_inherited(path)]
    sizes = together(lambda path, _: storage.size(path), paths, at_once=storage.transfers)
    return {path: size for path, size in zip(paths, sizes, strict=True) if size is not None}


def content_problem(storage: Storage, expected: ExpectedFile) -> Finding | None:
    """Read one file whole; what is wrong with it, or None."""
    if expected.digest is not None:
        seen = storage.digest(expected.path)
        if seen == expected.digest:
            return _lost(storage, expected) if is_reference(expected.path) else None
        if seen is not None:
            what = f"Its sha256 is not the recorded one; needed by {expected.whose}."
            return Finding.of(expected.altered, what, expected.path, expected.checkpoints, expected.bytes)
    elif (data := storage.read_bytes(expected.path)) is not None:
        problem = unreadable_parquet(data)
        if problem is None:
            return None
        what = f"It cannot be read ({problem}); needed by {expected.whose}."
        return Finding.of(expected.altered, what, expected.path, expected.checkpoints, len(data))
    return Finding.of(expected.missing, f"It is gone; needed by {expected.whose}.", expected.path, expected.checkpoints)


def _lost(storage: Storage, expected: ExpectedFile) -> Finding | None:
    """Ask the state backend for the snapshot that a file stands for."""
    reference = storage.read_bytes(expected.path)
    if storage.keeper is None or reference is None:
        return None
    problem = storage.keeper.problem(reference.decode())
    if problem is None:
        return None
    what = f"The state backend keeps its snapshot no more, or not whole ({problem}); needed by {expected.whose}."
    return Finding.of(expected.missing, what, expected.path, expected.checkpoints)


def _key(finding: Finding) -> tuple[Kind, str | None, tuple[CheckpointId, ...]]:
    """Return the parts that make a finding the same in two looks.

    The checkpoints that name an object may change in between.
    """
    return finding.kind, finding.path, () if finding.kind in _OF_OBJECTS else finding.checkpoints


def _retained(seen: Survey, findings: Iterable[Finding]) -> tuple[Retained, ...]:
    damage = [finding for finding in findings if finding.severity is Severity.DAMAGE]
    harmed = {id for finding in damage for id in finding.checkpoints}
    names: dict[str, list[str]] = {}
    for pin in seen.pins:
        names.setdefault(pin.commit_id, []).append(pin.name)
    return tuple(
        Retained(row.id, tuple(names.get(row.commit_id, ())), row.id not in harmed) for row in seen.checkpoints
    )
