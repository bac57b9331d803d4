"""A pipeline's check, and its repair by the owner of its generation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, results
from state_ops.errors import DamageError, FencedError, plainly
from state_ops.fsck.check import Reading, check
from state_ops.fsck.findings import Finding, Kind, Report, Severity
from state_ops.fsck.repair import RepairPlan, agreed, carry_out, plan_repair
from state_ops.fsck.sinks import Marker
from state_ops.fsck.survey import UNREADABLE
from state_ops.logs import Logger
from state_ops.records.publications import before_first
from state_ops.storage.storage import Storage
from weir.definition import Pipeline
from weir.ownership.context import RunContext
from weir.ownership.pipeline_storage import open_storage, reaching, readers
from weir.ownership.publish import lacking_by_sink, publish_missing
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks
from weir.sinks.recorded_sink import places_before

log = Logger("weir.fsck")

_OF_CONTENTS = (Kind.ALTERED_OBJECT, Kind.ALTERED_ROWS)


def examine(pipeline: Pipeline, settings: Settings, *, quick: bool = False, reading: Reading = iter) -> Report:
    """Look at everything that the pipeline has stored, and whether its input is what was read; reads only.

    A coordinator may live and work meanwhile.
    """
    storage, registry = open_storage(pipeline, settings)
    with Sinks(pipeline, settings, storage) as sinks:
        alive, markers = lease.watch(storage), _markers(pipeline, registry, sinks)
        there = _reaching_removed(pipeline, settings, registry, storage)
        report = _checked(pipeline, there, markers, alive=alive, quick=quick, reading=reading)
    return replace(report, findings=(*report.findings, *_delivered_again(pipeline, settings, registry)))


def examine_and_note(pipeline: Pipeline, settings: Settings, *, quick: bool = False, reading: Reading = iter) -> Report:
    """Examine a pipeline as `examine` does, and leave a note of the result that `weir metrics` shows."""
    clock = time.monotonic()
    report = examine(pipeline, settings, quick=quick, reading=reading)
    note(pipeline, settings, report, time.monotonic() - clock)
    return report


def note(pipeline: Pipeline, settings: Settings, report: Report, seconds: float) -> None:
    """Leave the result of a check where `weir metrics` looks for it, unless nothing has ever run there.

    Args:
        seconds: How long the check took.
    """
    if not report.generation:
        return
    checked = results.Checked(
        at=datetime.now(UTC),
        seconds=round(seconds, 3),
        quick=report.quick,
        damaged=len(report.damage),
        findings=dict(Counter(finding.kind.value for finding in report.findings)),
        leftover_bytes=sum(finding.bytes for finding in report.findings if finding.severity is Severity.LEFTOVER),
        checkpoints=len(report.checkpoints),
        intact=sum(checkpoint.intact for checkpoint in report.checkpoints),
    )
    storage, _ = open_storage(pipeline, settings)
    results.note(storage, results.FSCK_QUICK if report.quick else results.FSCK, checked)


def _checked(pipeline: Pipeline, storage: Storage, markers: Mapping[str, Marker], **how: Any) -> Report:
    tables = [sink.name for sink in pipeline.tables]
    early, behind = pipeline.early, pipeline.at_most_once
    return check(storage, pipeline.app_id, tables, markers=markers, early=early, behind=behind, **how)


def _reaching_removed(pipeline: Pipeline, settings: Settings, registry: Registry, storage: Storage) -> Storage:
    """Return a storage that also reaches the tables elsewhere whose sinks the code has no more."""
    try:
        head = registry.head()
    except UNREADABLE:  # the check says what is wrong with it
        return storage
    before = places_before(pipeline, head)
    tables = {sink.name for sink in pipeline.tables}
    removed = {name: at for name, at in before.items() if name not in tables}
    return reaching(pipeline, settings, removed, storage.request_counts) if removed else storage


def _markers(pipeline: Pipeline, registry: Registry, sinks: Sinks) -> dict[str, Marker]:
    """Return, by name, the function that asks a sink for its marker, for sinks that have one and are no tables."""

    def marker_of(name: str) -> Marker:
        def marker() -> int | None:
            head = registry.head()
            link = head.sinks.get(name) if head is not None else None
            if link is None:
                return sinks.marker(name, head, None)
            lacking = lacking_by_sink(registry).get(name)
            there = before_first(registry.checkpoints(), name, lacking) if lacking else link.id
            try:
                return sinks.marker(name, head, there)
            except DamageError:  # it has forgotten the marker, and nothing is there from which it could be made again
                return None

        return marker

    asked = [sink for sink in pipeline.sinks if sink not in pipeline.tables and sink.exactly_once]
    return {sink.name: marker_of(sink.name) for sink in asked}


def _delivered_again(pipeline: Pipeline, settings: Settings, registry: Registry) -> Iterator[Finding]:
    with suppress(Exception):  # a registry or a source that cannot be looked at is told of elsewhere
        head = registry.head()
        for name, reader in readers(pipeline, settings).items():
            for file in reader.look((head.offsets if head else {}).get(name)).again:
                what = f"the source {name} has read {reader.uri(file)}, which was delivered again afterwards"
                yield Finding.of(Kind.DELIVERED_AGAIN, what)


def repair(context: RunContext, shown: RepairPlan | None = None) -> RepairPlan:
    """Look again as the owner, publish what is committed, drop what belongs to no checkpoint, delete what nothing
    names; returns what was done. A sink that refuses rows keeps nobody from the rest.

    For the owner between two epochs: nothing of its own may be in flight.

    Args:
        shown: The plan that a person agreed to, beyond which nothing is done; None: all that is to be repaired.
    """
    markers = _markers(context.pipeline, context.registry, context.sinks)
    storage = _reaching_removed(context.pipeline, context.settings, context.registry, context.storage)
    fresh = _checked(context.pipeline, storage, markers, alive=False, owned=True, quick=True)
    plan = agreed(plan_repair(fresh), shown)
    if plan.refused is not None:
        log.warning("nothing was repaired", reason=plan.refused)
        return plan
    if plan.publish:
        ids = {id for finding in plan.publish for id in finding.checkpoints}
        try:
            publish_missing(context, [row for row in context.registry.checkpoints() if row.id in ids])
        except FencedError:
            raise
        except Exception as error:  # the next look finds them again, and says why
            log.warning("a sink does not take what is committed", error=plainly(error))
    carry_out(storage, context.registry, context.generation, plan)
    return plan


def left(before: Report, after: Report, storage: Storage) -> Report:
    """Return the findings that remain after a repair.

    A repair replaces no file, so a file that was altered still is, unless it went with its checkpoint.

    Args:
        after: A quick check; what was altered in content is known from `before`.
    """
    named = {(finding.kind, finding.path) for finding in after.findings}
    still = [
        finding
        for finding in before.findings
        if finding.kind in _OF_CONTENTS
        and (finding.kind, finding.path) not in named
        and finding.path is not None
        and storage.size(finding.path) is not None
    ]
    harmed = {id for finding in still for id in finding.checkpoints}
    checkpoints = tuple(
        replace(checkpoint, intact=checkpoint.intact and checkpoint.id not in harmed)
        for checkpoint in after.checkpoints
    )
    return replace(
        after, findings=(*still, *after.findings), checkpoints=checkpoints, quick=before.quick, read=before.read
    )
