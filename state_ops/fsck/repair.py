"""The work of `--repair`: a plan, made purely from a report, and its execution by the generation's owner.

The plan is what a person agreed to. The owner looks again, and deletes only what the plan names and this new look finds
superfluous as well: rows first, then objects. Whatever a retained checkpoint, a running restore or a table names is not
in either, and while it cannot be told in full what is named, both are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from state_ops.checkpoints.registry import Registry
from state_ops.counts import agrees, counted
from state_ops.errors import FencedError
from state_ops.facts import HIDDEN, Facts, fact
from state_ops.fsck.findings import Finding, Kind, Repair, Report
from state_ops.ids import Generation
from state_ops.storage.storage import Storage

_BATCH = 200  # deletions between two looks at who owns the generation


@dataclass(frozen=True, slots=True)
class RepairPlan(Facts):
    """The repairs that would be made.

    Attributes:
        refused: The reason why nothing would be repaired.
        beyond: Damage that no repair undoes.
    """

    publish: tuple[Finding, ...] = ()
    drop: tuple[Finding, ...] = ()
    delete: tuple[Finding, ...] = ()
    refused: str | None = None
    beyond: Annotated[tuple[Finding, ...], HIDDEN] = ()

    @property
    def empty(self) -> bool:
        return not (self.publish or self.drop or self.delete)

    @property
    @fact
    def bytes(self) -> int:
        """The number of bytes that the deletions free."""
        return sum(finding.bytes for finding in self.delete)


def plan_repair(report: Report) -> RepairPlan:
    """Decide what repairing would do about a report's findings."""
    blocking = [finding for finding in report.findings if finding.blocks]
    if blocking:
        first = blocking[0]
        where = f" ({first.path})" if first.path else ""
        return RepairPlan(
            refused=f"{first.kind}{where}: {first.what} While this is so, nothing is published or deleted.",
            beyond=report.damage,
        )

    def chosen(repair: Repair) -> tuple[Finding, ...]:
        return tuple(finding for finding in report.findings if finding.repair is repair)

    return RepairPlan(chosen(Repair.PUBLISH), chosen(Repair.DROP), chosen(Repair.DELETE), None, report.damage)


def agreed(fresh: RepairPlan, shown: RepairPlan | None) -> RepairPlan:
    """Return the part of a fresh plan that was in the plan that was shown; all of it if `shown` is None."""
    if shown is None or fresh.refused is not None:
        return fresh

    def both(now: Iterable[Finding], then: Iterable[Finding]) -> tuple[Finding, ...]:
        shown_before = {(finding.kind, finding.path, finding.checkpoints) for finding in then}
        return tuple(finding for finding in now if (finding.kind, finding.path, finding.checkpoints) in shown_before)

    return RepairPlan(
        both(fresh.publish, shown.publish),
        both(fresh.drop, shown.drop),
        both(fresh.delete, shown.delete),
        None,
        fresh.beyond,
    )


def carry_out(storage: Storage, registry: Registry, generation: Generation, plan: RepairPlan) -> int:
    """Drop rows, then delete files, as the owner of `generation`; returns how many files were deleted.

    Publishing is not done here.

    Args:
        plan: Made of a report of the owner under this very generation, since when nobody else can have committed.

    Raises:
        FencedError: A newer coordinator took over. The rest is left as it is.
    """
    listings = {finding.path for finding in plan.drop if finding.kind is Kind.ORPHAN_LISTING}
    if plan.drop:
        orphan_listings = [
            orphan for orphan in registry.orphan_listings() if f"registry/state_files/{orphan.path}" in listings
        ]
        storage.delete_files(registry.drop_listings(generation, orphan_listings))
    deleted = 0
    for number, finding in enumerate(plan.delete):
        if number % _BATCH == 0 and registry.generation() != generation:
            raise FencedError(
                f"A newer coordinator took over; {counted(len(plan.delete) - number, 'file')} of the "
                f"plan {agrees(len(plan.delete) - number, 'was', 'were')} left.",
                where=storage.uri,
                next="Nothing to do: what is left is found again by the next check.",
            )
        assert finding.path is not None
        deleted += storage.delete(finding.path)
    return deleted
