"""`weir promote` and the promote job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from weir.operations import backfill, promotion
from weir.operations.operation import Branch, Done, Here, Labelled, Plan, Reason, Rows, Steps, operation
from weir.operations.promotion import PromotionPlan


@operation(
    PromotionPlan,
    job="Makes a branch's state and rows the pipeline's. Only shows what would change unless dry_run is false.",
    plans=True,
    asks=True,
    accepts=True,
)
def promote(here: Here, branch: Branch, reason: Reason = "") -> Steps:
    """Make a branch's state and rows the pipeline's.

    They replace what the pipeline made of the same input since the fork. The branch catches up first. Then a running
    coordinator is stopped at its barrier. It is not started again, because the next run has to have the branch's code.
    `weir rewind` to the checkpoint before takes the promotion back.
    """
    pipeline, settings = here.pipeline, here.settings
    with here.waiting("comparing the tables' rows"):
        plan = promotion.with_rows(backfill.plan(pipeline, settings, branch), pipeline, settings)
    sources = [
        ("source", name, f"{arrived} to be read by the branch first" if arrived.waiting else "caught up")
        for name, arrived in plan.behind.items()
    ]
    tables = [("table", table.table, table.in_words) for table in plan.tables]
    sinks = [
        ("sink", sink.name, f"rows since the fork go, {sink.brings.comes_in_words}")
        for sink in plan.elsewhere
        if sink.brings is not None
    ]
    accepted = yield Plan(
        plan,
        [
            f"{here.name} is at checkpoint {plan.head.id}; {here.name}@{plan.branch}, forked from {plan.base.id}, is at"
            f" {plan.tip.id}.",
            Rows([*sources, *tables, *sinks]),
            *(Labelled("obstacle", obstacle) for obstacle in plan.obstacles),
        ],
        "promote",
        plan.obstacles,
        partial(promotion.check, plan, here.name),
    )
    with here.waiting("catching up, then promoting"):
        does = backfill.approve if backfill.range_of(branch) is not None else promotion.promote
        done = does(pipeline, settings, branch, accepted=accepted, reason=reason)
    yield Done(
        replace(plan, checkpoint=done.id),
        [
            f"{here.name} is at checkpoint {done.id}, {done.reason}. `weir run {here.name}` goes on from there; to take"
            f" it back: weir rewind {here.name} --to {plan.head.id}"
        ],
    )
