"""Traces of epochs, sent by OpenTelemetry to a collector that takes OTLP over HTTP (`telemetry.traces`).

A trace is made of what was recorded anyway, once its epoch has ended, so nothing of an epoch waits for it:

    epoch                          from the trigger until it was pruned, or fell
      stage aircraft_rotation      each step, as long as its phase was recorded to take
        subtask 0
          open, process, sync      one after the other, from the beginning of the stage's job on

Sending is a thread's affair, with a bounded queue. A collector that is away is warned of once, and harms nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from state_ops.errors import ConfigurationError, plainly
from state_ops.extras import needed_for, version
from state_ops.logs import Logger
from state_ops.redaction import redacted
from weir.definition import Pipeline
from weir.settings.configuration import Settings, TelemetrySettings
from weir.timings import EpochTimes, StepTime, SubtaskTime

log = Logger("weir.telemetry")

Traced = Callable[[EpochTimes], None]

_SEND_SECONDS, _GOODBYE_SECONDS = 10.0, 5.0
_PATH = "/v1/traces"
_QUEUE = 8192  # spans; more are dropped
_SUBTASKS = 64  # of a stage, the slowest ones
_PHASES = {
    "stage": ("stage", "quarantine"),
    "deliveries": ("deliver",),
    "gates of rows": ("gate",),
    "uploads": ("upload",),
    "seal": ("seal",),
    "commits": ("commit",),
    "publishing": ("publish",),
    "pruning": ("prune",),
}  # by step, what is recorded of it
_UPLOAD = "upload"
_sends = threading.local()  # `lines`: what is logged while this thread sends Weir's spans


@contextmanager
def tracing(pipeline: Pipeline, settings: Settings, run_id: str | None) -> Iterator[Traced | None]:
    """Yield the function to call with each epoch that has ended, or None if traces are off.

    If they are off, OpenTelemetry is not imported.

    Args:
        run_id: Of the run in Dagster.

    Raises:
        ConfigurationError: The extra is not installed, or OpenTelemetry refuses its variables.
    """
    if not settings.telemetry.traces:
        yield None
        return
    sender = Sender(pipeline, settings.telemetry, run_id)
    try:
        yield sender.send
    finally:
        sender.close()


class Sender:
    """Makes spans of epochs and sends them."""

    def __init__(self, pipeline: Pipeline, settings: TelemetrySettings, run_id: str | None) -> None:
        with needed_for("Sending traces", where="telemetry.traces"):
            from opentelemetry.exporter.otlp.proto.http import trace_exporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

        endpoint = None if settings.otlp_endpoint is None else _of_traces(settings.otlp_endpoint)
        logging.getLogger(trace_exporter.__name__).addFilter(_is_of_others)
        logging.getLogger("opentelemetry.util.re").addFilter(_without_values)
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable says it
            resource = resource.merge(Resource({"service.name": "weir", "service.version": version()}))
        # One of its own, which no other library of this process sends spans by.
        try:
            exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS)
            self._exporter = _WarningOnce(exporter, endpoint)
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            processor = BatchSpanProcessor(self._exporter, max_queue_size=_QUEUE)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigurationError(
                f"OpenTelemetry refuses its variables: {redacted(str(error))}.",
                where="the environment, OTEL_...",
                next="Correct the variable, or set telemetry.traces to false.",
            ) from error
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weir")
        self._facts = {"weir.pipeline": pipeline.name}
        if pipeline.branch is not None:
            self._facts["weir.branch"] = pipeline.branch.name
        if run_id is not None:
            self._facts["dagster.run_id"] = run_id
        self._has_failed = False

    def send(self, times: EpochTimes) -> None:
        """Make an epoch's spans and queue them. Whatever goes wrong is only logged, once."""
        try:
            _EpochTrace(self._tracer, times).make(self._facts)
        except Exception as error:
            if not self._has_failed:
                log.warning("an epoch could not be traced", epoch=times.id, error=plainly(error))
            self._has_failed = True

    def close(self) -> None:
        """Send what is queued, for some seconds at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="weir-traces", daemon=True)
        ending.start()
        ending.join(_GOODBYE_SECONDS)
        if ending.is_alive():  # the exporter tries again for longer than a run that ends waits for it
            self._exporter.is_away()


def _of_traces(endpoint: str) -> str:
    """Return the URL at which a collector takes traces.

    The setting may name that URL itself, as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT does.
    """
    return f"{endpoint.rstrip('/').removesuffix(_PATH)}{_PATH}"


class _WarningOnce:
    """An exporter whose collector may be away: that is said once, and once when it is back."""

    def __init__(self, exporter: Any, endpoint: str | None) -> None:
        self._exporter, self._is_away = exporter, False
        variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        of_variables = next(filter(None, map(os.environ.get, variables)), "http://localhost:4318")
        self._endpoint = endpoint or of_variables

    def export(self, spans: Sequence[Any]) -> Any:
        with _unheard() as lines:
            result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self.is_away(*lines[:1])
        elif self._is_away:
            log.info("traces reach the collector again", endpoint=redacted(self._endpoint))
            self._is_away = False
        return result

    def is_away(self, reason: str = "it has not answered yet") -> None:
        """Say so, unless that was said."""
        if not self._is_away:
            event = "traces do not reach the collector; epochs go on without"
            log.warning(event, endpoint=redacted(self._endpoint), reason=reason)
        self._is_away = True

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self) -> None:
        with _unheard():
            self._exporter.shutdown()


@contextmanager
def _unheard() -> Iterator[list[str]]:
    """While this thread sends Weir's spans: OpenTelemetry warns of each try, by one logger for all of a process. Yields
    what it says, redacted."""
    lines: list[str] = []
    _sends.lines = lines
    try:
        yield lines
    finally:
        _sends.lines = None


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a log line is about another sender's spans."""
    lines = getattr(_sends, "lines", None)
    if lines is not None:
        lines.append(redacted(record.getMessage()))
    return lines is None


def _without_values(record: logging.LogRecord) -> bool:
    """OpenTelemetry repeats OTEL_EXPORTER_OTLP_HEADERS where it does not understand it, and secrets are in there."""
    record.args = tuple("***" for _ in record.args or ())
    return True


class _EpochTrace:
    """The spans of one epoch."""

    def __init__(self, tracer: Any, times: EpochTimes) -> None:
        from opentelemetry import trace

        self._api, self._tracer, self._times = trace, tracer, times
        self._end = 0

    def make(self, facts: dict[str, str]) -> None:
        """Make them, children first as far as their ends decide where the epoch's is."""
        times = self._times
        begun = min([self._moment(times.begun), *(self._moment(step.begun) for step in times.steps)])
        about = {**facts, "weir.epoch": times.id, **{f"weir.{name}": value for name, value in times.facts.items()}}
        root = self._tracer.start_span("epoch", context=self._below(None), start_time=begun, attributes=about)
        self._end = self._moment(times.ended)
        for step in times.steps:
            self._of_step(root, step)
        if times.error is not None:
            self._fails(root, times.error, self._end)
        root.end(end_time=self._end)

    def _of_step(self, root: Any, step: StepTime) -> None:
        begun, ended = self._moment(step.begun), self._moment(step.ended)
        recorded = [
            (phase, round(self._times.ms[name] * 1e6))
            for phase in _PHASES.get(step.step, ())
            if (name := f"{phase}:{step.stage}" if step.stage else phase) in self._times.ms
        ]
        if step.error is not None or not recorded:
            span = self._span(root, step.step, step.stage, begun, ended)
            if step.error is not None:
                self._fails(span, step.error, ended)
            span.end(end_time=ended)
            return
        for phase, took in recorded:
            # What a subtask has uploaded by itself was over before the coordinator's step.
            begun = min(begun, ended - took)
            span = self._span(root, phase, step.stage, begun, begun + took)
            if phase == "stage":
                self._of_subtasks(span, step, begun, lambda name: name != _UPLOAD)
            elif phase == _UPLOAD:
                self._of_subtasks(span, step, begun, lambda name: name == _UPLOAD)
            span.end(end_time=begun + took)
            begun += took

    def _of_subtasks(self, parent: Any, step: StepTime, begun: int, is_part: Callable[[str], bool]) -> None:
        parts = [
            (subtask, [(name, round(ms * 1e6)) for name, ms in subtask.ms.items() if is_part(name)])
            for subtask in self._times.subtasks
            if subtask.stage == step.stage
        ]
        parts = sorted((part for part in parts if part[1]), key=lambda part: -sum(took for _, took in part[1]))
        if len(parts) > _SUBTASKS:
            parent.set_attribute("weir.subtasks_left_out", len(parts) - _SUBTASKS)
        for subtask, phases in parts[:_SUBTASKS]:
            self._of_subtask(parent, subtask, begun, phases)

    def _of_subtask(self, parent: Any, subtask: SubtaskTime, begun: int, phases: Sequence[tuple[str, int]]) -> None:
        about = {
            "weir.stage": subtask.stage,
            "weir.subtask": subtask.subtask,
            "weir.rows_in": subtask.rows_in,
            "weir.rows_out": subtask.rows_out,
        }
        name, below = f"subtask {subtask.subtask}", self._below(parent)
        span = self._tracer.start_span(name, context=below, start_time=begun, attributes=about)
        at, below = begun, self._below(span)
        for phase, took in phases:
            self._tracer.start_span(phase, context=below, start_time=at).end(end_time=at + took)
            at += took
        span.end(end_time=at)

    def _span(self, parent: Any, name: str, stage: str | None, begun: int, ended: int) -> Any:
        self._end = max(self._end, ended)
        about = {"weir.phase": name, **({"weir.stage": stage} if stage else {})}
        title = f"{name} {stage}" if stage else name
        return self._tracer.start_span(title, context=self._below(parent), start_time=begun, attributes=about)

    def _fails(self, span: Any, error: BaseException, at: int) -> None:
        """Record an error, redacted, since it may repeat what a server has answered."""
        trace = redacted("".join(traceback.format_exception(error))).rstrip()
        about = {"exception.type": type(error).__name__, "exception.message": redacted(str(error))}
        span.add_event("exception", {**about, "exception.stacktrace": trace}, timestamp=at)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, plainly(error)))

    def _below(self, parent: Any) -> Any:
        from opentelemetry.context import Context

        return Context() if parent is None else self._api.set_span_in_context(parent, Context())

    def _moment(self, clock: float) -> int:
        """Return a moment of the coordinator's clock in nanoseconds since 1970."""
        now, since = self._times.now
        return since - round((now - clock) * 1e9)
