"""`weir prune`. Dagster's job for retention and fsck prunes, too (`weir.dagster.jobs`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.counts import agrees, counted
from state_ops.facts import Facts, fact
from state_ops.records.fates import Fate, ObjectFate
from weir.operations.operation import Done, Here, Plan, Rows, Steps, operation
from weir.run import maintenance

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Pruned(Facts):
    """The checkpoints and objects that pruning deletes, or would delete.

    Attributes:
        checkpoints: The fate of each checkpoint, with the reasons.
        objects: The fate of each object.
    """

    dry_run: bool
    checkpoints: list[Fate]
    objects: list[ObjectFate]

    @property
    @fact
    def bytes_freed(self) -> int:
        """The bytes of the objects that go."""
        return sum(fate.bytes for fate in self.objects if not fate.stays)


@operation(Pruned, plans=True)
def prune(here: Here) -> Steps:
    """Drop the checkpoints that nothing keeps, and the objects that only they name. Every epoch does this by itself.

    Also removes the files that dead attempts left. If a coordinator runs, it is asked to.
    """
    with here.waiting("asking what each checkpoint and object is kept for"):
        result = Pruned(here.dry_run, *maintenance.explain(here.pipeline, here.settings))
    yield Plan(result, [*_words(result)])
    with here.waiting("pruning"):
        by_coordinator = maintenance.asked(
            here.pipeline,
            here.settings,
            Request(requests.UPKEEP, reason=here.by),
            lambda _: None,  # taking ownership prunes and removes leftovers before anything else
            here.settings.checkpoints.timeout_seconds,
        )
    yield Done(result, ["Done by the running coordinator." if by_coordinator else "Done."])


def _words(result: Pruned) -> Iterator[str | Rows]:
    yield Rows(
        [
            (
                str(fate.id),
                "stays" if fate.stays else "goes",
                f"{fate.bytes:,}",
                f"{fate.frees:,}",
                "; ".join(fate.reasons) or "beyond the retained number, and nothing needs it",
            )
            for fate in result.checkpoints
        ],
        ("checkpoint", "", "bytes", "frees", "why"),
        right=("checkpoint", "bytes", "frees"),
    )
    goes = [fate for fate in result.objects if not fate.stays]
    stays = [fate for fate in result.objects if fate.stays]
    shared = [fate for fate in stays if len(fate.named_by) > 1]
    yield (
        f"\n{counted(len(stays), 'object', 'stays', 'stay')} ({sum(fate.bytes for fate in stays):,} "
        f"bytes; {len(shared):,} {agrees(len(shared), 'is', 'are')} named by"
        f" several checkpoints), {len(goes):,} {agrees(len(goes), 'goes', 'go')} ({result.bytes_freed:,} bytes)."
    )
    for title, fates in (("goes", goes), ("stays", stays)):
        for fate in fates[:_SHOWN]:
            named = ", ".join(str(id) for id in fate.named_by)
            because = f"named by {named}" if named else "no checkpoint that stays names it"
            yield f"  {title:<5}  {fate.bytes:>12,}  {fate.path}  ({because})"
        if len(fates) > _SHOWN:
            yield f"  {title:<5}  ... and {len(fates) - _SHOWN:,} more; --json has all"
