"""Metrics of pipelines for Prometheus, read from their storage at each scrape.

The exporter reads the registry, the lease and the landing directories. It asks no coordinator, so it also works while Dagster is down
and while no coordinator lives. Reading needs no right and no JVM. `FAMILIES` says what each metric means.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from state_ops.coordination.results import Checked, RecordedDrill
from state_ops.errors import TransientError, plainly
from state_ops.extras import version
from state_ops.fsck.findings import MEANINGS, Kind
from state_ops.logs import Logger
from state_ops.records.checkpoint import ROWS_LOST, ROWS_QUARANTINED, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.pins import SAVEPOINT
from state_ops.storage.instrumented_store import DOWN, KINDS, UP
from weir.cli.watching.pipeline_look import Looks, Outcome, PipelineLook, Watched
from weir.settings.configuration import Settings

log = Logger("weir.metrics")

PATIENCE = 8.0  # seconds for one scrape: Prometheus gives up after 10 by default

Sample = tuple[str, tuple[str, ...], float]  # a metric, the values of its labels after the pipeline's, its value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: Ends in `_total` if the metric is a counter.
        labels: All labels but `pipeline`, which every metric has but `BUILD`.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


BUILD = Family(
    "weir_build_info", "Always 1. The label is the version of Weir that exports; of no pipeline.", ("version",)
)
FAMILIES = (
    Family("weir_up", "1 if the pipeline's storage could be read at this scrape, 0 if not; the exporter's log says why."),
    Family("weir_scrape_seconds", "How long reading the pipeline's storage took."),
    Family("weir_coordinator_alive", "1 if a coordinator lives; absent while only more scrapes can tell (another host)."),
    Family("weir_coordinator_generation", "The generation that owns the pipeline: one more for each coordinator."),
    Family(
        "weir_held",
        "1 while a gate, bad input or damage holds the pipeline: its cause stands, and no later epoch is complete; else 0.",
    ),
    Family("weir_suspended", "1 while a person has ended the pipeline, so that sensors begin nothing; else 0."),
    Family("weir_checkpoint_id", "The newest completed checkpoint; absent before the first."),
    Family("weir_checkpoint_completed_timestamp_seconds", "When the newest checkpoint was completed."),
    Family("weir_checkpoint_interval_seconds", "checkpoints.interval_seconds of the configuration."),
    Family("weir_retained_checkpoints", "Completed checkpoints that are retained."),
    Family("weir_savepoints", "Savepoints: checkpoints with a name."),
    Family("weir_unpublished_checkpoints", "Completed checkpoints whose rows some table lacks."),
    Family("weir_epochs_total", "Epochs in the chain of the newest checkpoint. A rewind takes it back."),
    Family("weir_rows_read_total", "Rows read from sources, by the same chain."),
    Family("weir_rows_lost_total", "Rows read and lost with an epoch that failed, by the same chain: at most once."),
    Family("weir_rows_quarantined_total", "Rows of sources set aside by gates or as undecodable, by the same chain."),
    Family("weir_state_uploaded_bytes_total", "Bytes of state uploaded, by the same chain."),
    Family("weir_state_uploaded_files_total", "Files of state uploaded, by the same chain."),
    Family("weir_state_bytes", "State in the newest checkpoint.", ("stage",)),
    Family("weir_state_files", "Files of state in the newest checkpoint.", ("stage",)),
    Family("weir_stage_rows", "Rows of the newest epoch; kind waiting: not applied yet, of all epochs.", ("stage", "kind")),
    Family("weir_epoch_phase_seconds", "The newest epoch's phases: stage, gate and upload by stage; to_commit: from the "
           "trigger to the commit; commits_before: committing the epoch before; publishing_before, pruning_before: publishing and pruning of epochs before; seal: looking at it as a whole.", ("phase", "stage")),
    Family("weir_stage_phase_seconds", "The same within a stage's subtasks, the slowest one's.", ("stage", "phase")),
    Family("weir_watermark_timestamp_seconds", "Event-time progress: windows up to here are closed.", ("stage",)),
    Family("weir_source_up", "1 if the source could be looked at at this scrape, 0 if not; the exporter's log says why.", ("source",)),
    Family("weir_source_files_waiting", "Files, or parts of a connector, that arrived and are in no checkpoint.", ("source",)),
    Family("weir_source_bytes_waiting", "Bytes of those files.", ("source",)),
    Family("weir_sink_checkpoint_id", "The newest checkpoint that has rows for the table.", ("table",)),
    Family("weir_sink_published_checkpoint_id", "The newest retained checkpoint whose rows the table has.", ("table",)),
    Family("weir_sink_published_timestamp_seconds", "When those rows became visible.", ("table",)),
    Family("weir_storage_requests_total", "Requests of coordinators, and of subtasks in acks, up to the newest checkpoint, failed "
           "ones too; create: put if absent. Not those of delta-rs and Spark.", ("kind",)),
    Family("weir_storage_transferred_bytes_total", "Bytes of those requests.", ("direction",)),
    Family("weir_cache_hits_total", "State cache: reads that a layer answered.", ("stage", "layer")),
    Family("weir_cache_misses_total", "State cache: reads that the backend answered.", ("stage",)),
    Family("weir_cache_writes_total", "State cache: entries written; evicted: before the barrier, flushed: at it.", ("stage", "kind")),
    Family("weir_restore_last_valid", "1 if the last restore found its checkpoint whole, 0 if not."),
    Family("weir_restore_last_timestamp_seconds", "When the last restore ended."),
    Family("weir_restore_last_checkpoint_id", "Which checkpoint the last restore looked at."),
    Family("weir_restore_last_seconds", "How long the last restore took: fetch, all of it; check, summed over subtasks.", ("phase",)),
    Family("weir_fsck_scheduled", "1 if the configuration has checks of all storage run by themselves: dagster.upkeep_cron; else 0."),
    Family("weir_fsck_last_damaged", "Things missing, altered or inconsistent, by the last check (weir fsck); depth full: contents "
           "were read, quick: sizes alone, and only while it is newer.", ("depth",)),
    Family("weir_fsck_last_findings", "All that it has found, by kind.", ("depth", "severity", "kind")),
    Family("weir_fsck_last_leftover_bytes", "Bytes of files that nothing needs, by the same check.", ("depth",)),
    Family("weir_fsck_last_timestamp_seconds", "When that check ended.", ("depth",)),
    Family("weir_fsck_last_seconds", "How long that check took.", ("depth",)),
    Family("weir_drill_scheduled", "1 if the configuration has drills run by themselves: dagster.drill_cron; else 0."),
    Family("weir_drill_last_valid", "1 if nothing was wrong with what the last drill restored and replayed, 0 if something was."),
    Family("weir_drill_last_replayed", "1 if it played the checkpoint's epoch again, 0 if that could not be done."),
    Family("weir_drill_last_in_time", "1 if it met the objectives of the configuration (restore.recovery_*), 0 if not."),
    Family("weir_drill_last_checkpoint_id", "Which checkpoint it restored."),
    Family("weir_drill_last_timestamp_seconds", "When it ended."),
    Family("weir_drill_last_seconds", "What it measured: restore; replay: of one epoch; recovery: both, absent if the pipeline does "
           "not come back; whole: of the drill itself.", ("phase",)),
    Family("weir_drill_last_loss_window_seconds", "How long the oldest input that no checkpoint held had waited then."),
)  # fmt: skip

_ROWS = ("in", "out", "late", "dropped", "null_key", "quarantined", "waiting", "duplicate")
_OF_A_STAGE = ("stage", "gate", "quarantine", "deliver", "upload")  # phases whose name goes on with the stage's uid
_TOTALS = {
    "weir_epochs_total": "epochs",
    "weir_rows_read_total": "rows_read",
    "weir_rows_lost_total": ROWS_LOST,
    "weir_rows_quarantined_total": ROWS_QUARANTINED,
    "weir_state_uploaded_bytes_total": "bytes_new",
    "weir_state_uploaded_files_total": "files_new",
}


class Exporter(Collector):
    """The collector that Prometheus scrapes: all pipelines, read in parallel.

    A pipeline that cannot be read in time does not hold up the others.
    """

    def __init__(self, names: Sequence[str], settings: Settings, patience: float = PATIENCE) -> None:
        self._watched = [Watched(name, settings) for name in names]
        self._patience, self._looks = patience, Looks()
        self._reasons: dict[tuple[str, str], str] = {}
        self._one_at_a_time = threading.Lock()
        self._collected: tuple[float, list[tuple[str, str, tuple[str, ...], float]]] = (float("-inf"), [])

    def describe(self) -> Iterable[Metric]:
        """Return no families, so that nothing is read when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = {family.name: _family(family) for family in FAMILIES}
        asked = time.monotonic()
        with self._one_at_a_time:
            if self._collected[0] < asked:  # else by a scrape that this one has waited for: twice is too long for both
                collected = list(self._samples())
                self._collected = (time.monotonic(), collected)
            for pipeline, name, labels, value in self._collected[1]:
                families[name].add_metric([pipeline, *labels], value)
        build = GaugeMetricFamily(BUILD.name, BUILD.help, labels=BUILD.labels)
        build.add_metric([version()], 1)
        yield build
        yield from families.values()

    def _samples(self) -> Iterator[tuple[str, str, tuple[str, ...], float]]:
        for watched in self._watched:
            self._looks.begin(watched)  # a read that has not returned yet is not repeated
        self._looks.wait(self._patience)
        for watched in self._watched:
            try:
                look, took = _read(self._looks.ended(watched.name), self._patience)
                values = list(samples(look))
            except Exception as error:
                self._say("a pipeline {} be read", plainly(error), pipeline=watched.name)
                yield watched.name, "weir_up", (), 0
                continue
            self._say("a pipeline {} be read", None, pipeline=watched.name)
            for source, arrivals in look.arrived.items():
                self._say("a source {} be looked at", arrivals.problem, pipeline=watched.name, source=source)
            yield watched.name, "weir_up", (), 1
            yield watched.name, "weir_scrape_seconds", (), took
            for name, labels, value in values:
                yield watched.name, name, labels, value

    def _say(self, event: str, reason: str | None, *, pipeline: str, source: str = "") -> None:
        """Log why something cannot be read, or that it can again: once, and not at each scrape."""
        about = {"pipeline": pipeline, **({"source": source} if source else {})}
        before = self._reasons.pop((pipeline, source), None)
        if reason is not None:
            self._reasons[pipeline, source] = reason
            if reason != before:
                log.warning(event.format("cannot"), **about, reason=reason)
        elif before is not None:
            log.info(f"{event.format('can')} again", **about)


def _read(outcome: Outcome | None, patience: float) -> tuple[PipelineLook, float]:
    """Return what a look has read, and the seconds that it took. Raises what the look ended with, or that it does not
    answer."""
    if outcome is None:
        raise TransientError(f"storage has not answered for {patience:g} s")
    if outcome.look is None:
        raise outcome.error or TransientError("nothing was read")
    return outcome.look, outcome.seconds


def _family(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    labels = ["pipeline", *family.labels]
    if family.is_counter:
        return CounterMetricFamily(family.name.removesuffix("_total"), family.help, labels=labels)
    return GaugeMetricFamily(family.name, family.help, labels=labels)


def samples(look: PipelineLook) -> Iterator[Sample]:
    """Return the samples of one scrape. `FAMILIES` says what they mean."""
    if look.alive is not None:
        yield "weir_coordinator_alive", (), float(look.alive)
    yield "weir_coordinator_generation", (), float(look.generation)
    yield "weir_held", (), float(look.hold is not None)
    yield "weir_suspended", (), float(look.suspended is not None)
    yield "weir_checkpoint_interval_seconds", (), look.interval
    yield "weir_retained_checkpoints", (), float(len(look.retained))
    yield "weir_savepoints", (), float(sum(pin.kind == SAVEPOINT for pin in look.pins))
    yield "weir_unpublished_checkpoints", (), float(len({id for id, _ in look.unpublished}))
    for source, arrivals in look.arrived.items():
        yield "weir_source_up", (source,), float(arrivals.problem is None)
        if arrivals.problem is not None:
            continue
        yield "weir_source_files_waiting", (source,), float(len(arrivals.fresh))
        yield "weir_source_bytes_waiting", (source,), float(sum(file.size for file in arrivals.fresh))
    if look.retained:
        yield from _of_head(look.retained[-1])
    newest = {row.sink: row for row in sorted(look.publications, key=lambda row: row.checkpoint_id)}
    for table, row in newest.items():
        yield "weir_sink_published_checkpoint_id", (table,), float(row.checkpoint_id)
        yield "weir_sink_published_timestamp_seconds", (table,), _seconds(row.published_at)
    if look.restored is not None:
        yield "weir_restore_last_valid", (), float(look.restored.valid)
        yield "weir_restore_last_timestamp_seconds", (), _seconds(look.restored.restored_at)
        yield "weir_restore_last_checkpoint_id", (), float(look.restored.checkpoint_id)
        yield "weir_restore_last_seconds", ("fetch",), look.restored.fetch_ms / 1000
        yield "weir_restore_last_seconds", ("check",), look.restored.check_ms / 1000
    yield "weir_fsck_scheduled", (), float(look.fsck_scheduled)
    for checked in look.checked:
        yield from _of_check(checked)
    yield "weir_drill_scheduled", (), float(look.drill_scheduled)
    if look.drilled is not None:
        yield from _of_drill(look.drilled)


def _of_check(checked: Checked) -> Iterator[Sample]:
    depth = "quick" if checked.quick else "full"
    yield "weir_fsck_last_damaged", (depth,), float(checked.damaged)
    yield "weir_fsck_last_leftover_bytes", (depth,), float(checked.leftover_bytes)
    yield "weir_fsck_last_timestamp_seconds", (depth,), _seconds(checked.at)
    yield "weir_fsck_last_seconds", (depth,), checked.seconds
    for kind, count in checked.findings.items():
        severity = MEANINGS[Kind(kind)].severity.value if kind in set(Kind) else "unknown"  # of another release
        yield "weir_fsck_last_findings", (depth, severity, kind), float(count)


def _of_drill(drilled: RecordedDrill) -> Iterator[Sample]:
    yield "weir_drill_last_valid", (), float(drilled.comes_back)
    yield "weir_drill_last_replayed", (), float(drilled.replayed)
    yield "weir_drill_last_in_time", (), float(drilled.in_time)
    yield "weir_drill_last_checkpoint_id", (), float(drilled.checkpoint)
    yield "weir_drill_last_timestamp_seconds", (), _seconds(drilled.at)
    yield "weir_drill_last_loss_window_seconds", (), drilled.loss_seconds
    phases = {
        "restore": drilled.restore_seconds,
        "replay": drilled.replay_seconds,
        "recovery": drilled.recovery_seconds,
        "whole": drilled.seconds,
    }
    for phase, seconds in phases.items():
        if seconds is not None:
            yield "weir_drill_last_seconds", (phase,), seconds


def _of_head(head: Checkpoint) -> Iterator[Sample]:
    yield "weir_checkpoint_id", (), float(head.id)
    yield "weir_checkpoint_completed_timestamp_seconds", (), _seconds(head.completed_at)
    for name, recorded in _TOTALS.items():
        yield name, (), float(head.totals.get(recorded, 0))
    for kind in KINDS:  # checkpoints of releases that did not count requests have none
        yield "weir_storage_requests_total", (kind,), float(head.totals.get(f"requests_{kind}", 0))
    for direction, recorded in (("up", UP), ("down", DOWN)):
        yield "weir_storage_transferred_bytes_total", (direction,), float(head.totals.get(recorded, 0))
    for phase, ms in head.ms.items():
        kind, _, uid = phase.partition(":")
        of = (kind, uid) if kind in _OF_A_STAGE else (phase.replace(":", "_"), "")
        yield "weir_epoch_phase_seconds", of, ms / 1000
    for uid, micros in head.watermarks.items():
        yield "weir_watermark_timestamp_seconds", (uid,), micros / 1e6
    for sink, link in head.sinks.items():
        yield "weir_sink_checkpoint_id", (sink,), float(link.id)
    for uid, stats in head.operators.items():
        yield from _of_stage(uid, stats)


def _of_stage(uid: str, stats: OperatorStats) -> Iterator[Sample]:
    yield "weir_state_bytes", (uid,), float(stats.bytes_total)
    yield "weir_state_files", (uid,), float(stats.files_total)
    for kind in _ROWS:
        yield "weir_stage_rows", (uid, kind), float(getattr(stats, f"rows_{kind}"))
    for phase, ms in stats.ms.items():
        yield "weir_stage_phase_seconds", (uid, phase), ms / 1000
    if cache := stats.cache_totals:
        yield "weir_cache_hits_total", (uid, "l1"), float(cache["l1_hits"])
        yield "weir_cache_hits_total", (uid, "l2"), float(cache["l2_hits"])
        yield "weir_cache_misses_total", (uid,), float(cache["misses"])
        yield "weir_cache_writes_total", (uid, "evicted"), float(cache["evicted"])
        yield "weir_cache_writes_total", (uid, "flushed"), float(cache["flushed"])


def _seconds(moment: datetime) -> float:
    return moment.timestamp()
