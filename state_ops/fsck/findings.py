"""The findings of fsck: each kind with its severity and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from state_ops.facts import Facts, Named, fact
from state_ops.ids import CheckpointId, Generation


class Severity(StrEnum):
    """damage: something that Weir wrote is missing, altered or inconsistent. leftover: nothing needs it, or the next
    run finishes it. foreign: Weir did not write it."""

    DAMAGE = "damage"
    LEFTOVER = "leftover"
    FOREIGN = "foreign"


class Repair(StrEnum):
    """The action that `--repair` takes on a finding."""

    PUBLISH = "publish"
    DROP = "drop the rows"
    DELETE = "delete the file"


class Kind(StrEnum):
    """The names of findings, as people and programs see them."""

    UNREADABLE_REGISTRY = "unreadable registry"
    REGISTRY_SET_BACK = "registry set back"
    MISSING_REGISTRY_FILE = "missing registry file"
    ALTERED_REGISTRY_FILE = "altered registry file"
    DAMAGED_LISTING = "damaged listing"
    COUNT_DRIFT = "count drift"
    BROKEN_CHAIN = "broken chain"
    LOST_SAVEPOINT = "lost savepoint"
    MISSING_OBJECT = "missing object"
    ALTERED_OBJECT = "altered object"
    MISSING_ROWS = "missing rows"
    ALTERED_ROWS = "altered rows"
    UNREADABLE_TABLE = "unreadable table"
    MISSING_TABLE = "missing table"
    SINK_BEHIND = "sink behind"
    SINK_SET_BACK = "sink set back"
    SINK_AHEAD = "sink ahead"
    UNREACHABLE_SINK = "unreachable sink"
    UNPUBLISHED_ROWS = "unpublished rows"
    UNRECORDED_PUBLICATION = "unrecorded publication"
    ORPHAN_LISTING = "listing without checkpoint"
    STRAY_PUBLICATION = "publication without checkpoint"
    ORPHAN_OBJECT = "orphan object"
    ORPHAN_ROWS = "orphan rows"
    UNNAMED_REGISTRY_FILE = "unnamed registry file"
    PROBE = "probe"
    HALF_WRITTEN = "half-written file"
    DEAD_HOLD = "dead hold"
    FOREIGN_FILE = "foreign file"
    DELIVERED_AGAIN = "file delivered again"


@dataclass(frozen=True, slots=True)
class _Meaning:
    """blocks: what is named can no longer be told from what is not, or what was published from what was not: nothing is
    deleted."""

    severity: Severity
    next: str
    repair: Repair | None = None
    blocks: bool = False


_BACKUP = "Bring it back from a backup or from the bucket's versions."
_NO_BACKUP = "Without one: docs/playbooks/corrupt-checkpoint.md."
_TABLES = "docs/playbooks/sink-altered.md"
_NEXT_RUN = "`--repair` removes it; so does the next run."

MEANINGS: dict[Kind, _Meaning] = {
    Kind.UNREADABLE_REGISTRY: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is deleted meanwhile.", blocks=True),
    Kind.REGISTRY_SET_BACK: _Meaning(
        Severity.DAMAGE, "Put all of registry/ back to one moment. Nothing is deleted meanwhile.", blocks=True
    ),
    Kind.MISSING_REGISTRY_FILE: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is deleted meanwhile.", blocks=True),
    Kind.ALTERED_REGISTRY_FILE: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is deleted meanwhile.", blocks=True),
    Kind.DAMAGED_LISTING: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is deleted meanwhile.", blocks=True),
    Kind.COUNT_DRIFT: _Meaning(
        Severity.DAMAGE, "Find out who writes to the registry. Nothing is deleted meanwhile.", blocks=True
    ),
    Kind.BROKEN_CHAIN: _Meaning(
        Severity.DAMAGE, "Find out who writes to the registry. Nothing is deleted meanwhile.", blocks=True
    ),
    Kind.LOST_SAVEPOINT: _Meaning(
        Severity.DAMAGE, "Drop it, which frees its name: weir savepoint PIPELINE --drop NAME"
    ),
    Kind.MISSING_OBJECT: _Meaning(Severity.DAMAGE, f"{_BACKUP} {_NO_BACKUP}"),
    Kind.ALTERED_OBJECT: _Meaning(Severity.DAMAGE, f"{_BACKUP} {_NO_BACKUP}"),
    Kind.MISSING_ROWS: _Meaning(Severity.DAMAGE, f"{_BACKUP} The table cannot be read until then: {_TABLES}"),
    Kind.ALTERED_ROWS: _Meaning(Severity.DAMAGE, f"{_BACKUP} Readers of the table fail or see wrong rows until then."),
    Kind.UNREADABLE_TABLE: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is deleted meanwhile.", blocks=True),
    Kind.MISSING_TABLE: _Meaning(Severity.DAMAGE, f"{_BACKUP} Nothing is published meanwhile: {_TABLES}", blocks=True),
    Kind.SINK_BEHIND: _Meaning(
        Severity.DAMAGE, f"Put the table back to where it was. Was it restored or dropped? {_TABLES}", blocks=True
    ),
    Kind.SINK_SET_BACK: _Meaning(
        Severity.DAMAGE, f"Restore it to the version that has them, or rewind the pipeline: {_TABLES}", blocks=True
    ),
    Kind.SINK_AHEAD: _Meaning(
        Severity.DAMAGE,
        "Put the registry back to where it was: replaying would double rows. If this is what `weir cancel --delete` "
        "left: "
        "go on under another pipeline name.",
        blocks=True,
    ),
    Kind.UNREACHABLE_SINK: _Meaning(
        Severity.FOREIGN, "Whether it has what the registry says is not known: look at its server, then check again."
    ),
    Kind.UNPUBLISHED_ROWS: _Meaning(
        Severity.LEFTOVER,
        "`--repair` publishes them; so does the next run. Does the sink refuse them: docs/playbooks/rows-refused.md",
        Repair.PUBLISH,
    ),
    Kind.UNRECORDED_PUBLICATION: _Meaning(
        Severity.LEFTOVER, "`--repair` records it; so does the next run.", Repair.PUBLISH
    ),
    Kind.ORPHAN_LISTING: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DROP),
    Kind.STRAY_PUBLICATION: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DROP),
    Kind.ORPHAN_OBJECT: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DELETE),
    Kind.ORPHAN_ROWS: _Meaning(Severity.LEFTOVER, "`--repair` removes it.", Repair.DELETE),
    Kind.UNNAMED_REGISTRY_FILE: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DELETE),
    Kind.PROBE: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DELETE),
    Kind.HALF_WRITTEN: _Meaning(Severity.LEFTOVER, "`--repair` removes it.", Repair.DELETE),
    Kind.DEAD_HOLD: _Meaning(Severity.LEFTOVER, _NEXT_RUN, Repair.DELETE),
    Kind.FOREIGN_FILE: _Meaning(Severity.FOREIGN, "Weir never deletes it: move it away, or leave it."),
    Kind.DELIVERED_AGAIN: _Meaning(
        Severity.FOREIGN,
        "It is not read again. Deliver what is new in it under another name, or replay the range of event time that "
        "it has: "
        "docs/how-to/backfills.md.",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding(Facts):
    """One thing that is wrong or superfluous.

    Attributes:
        path: Relative to the pipeline's storage.
        checkpoints: The retained ones that it harms, or the one it speaks of.
        bytes: Of the file.
        repair: What `--repair` does about it; None: nothing.
    """

    kind: Kind
    what: str
    path: str | None = None
    checkpoints: tuple[CheckpointId, ...] = ()
    bytes: int = 0
    repair: Repair | None = None

    @property
    @fact
    def severity(self) -> Severity:
        return MEANINGS[self.kind].severity

    @property
    @fact
    def next(self) -> str:
        """The step that a person takes now."""
        if self.repair is None and MEANINGS[self.kind].repair is not None:
            return "Leave it: another process may be writing it. If none is, delete it by hand."
        return MEANINGS[self.kind].next

    @property
    def blocks(self) -> bool:
        """True if nothing may be deleted or published while this finding stands."""
        return MEANINGS[self.kind].blocks

    @classmethod
    def of(
        cls,
        kind: Kind,
        what: str,
        path: str | None = None,
        checkpoints: tuple[CheckpointId, ...] = (),
        bytes: int = 0,
        *,
        leave: bool = False,
    ) -> Finding:
        """Return a finding with the repair of its kind.

        Args:
            leave: Nothing is repaired, because somebody else may be at work there.
        """
        return cls(kind, what, path, checkpoints, bytes, None if leave else MEANINGS[kind].repair)


@dataclass(frozen=True, slots=True)
class Retained(Facts):
    """One retained checkpoint and whether everything that a restore of it reads is there.

    Attributes:
        names: Of its savepoints and branches.
    """

    id: CheckpointId
    names: tuple[str, ...]
    intact: bool


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """The result of one check.

    Attributes:
        files, bytes: Of everything listed.
        read: Bytes whose digests or checksums were computed.
    """

    storage: str
    generation: Generation
    alive: Annotated[bool, Named("coordinator_alive")]
    quick: bool
    checkpoints: tuple[Retained, ...]
    findings: tuple[Finding, ...]
    files: int
    bytes: int
    read: Annotated[int, Named("bytes_read")]

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.DAMAGE)

    @property
    @fact
    def damaged(self) -> bool:
        """True if anything is damaged."""
        return bool(self.damage)
