"""Traces of epochs, as a collector gets them: over HTTP, in OTLP's protobuf."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export import SpanExportResult
from structlog.testing import capture_logs

from state_ops.errors import ConfigurationError, TransientError
from tests.recovery.small import Bank
from weir.execution.in_process import InMemoryExecutor
from weir.run import telemetry
from weir.run.run import RunOptions, run
from weir.timings import EpochTimes, StepTime, SubtaskTime


@dataclass
class Collector:
    """Takes spans over HTTP.

    Attributes:
        refuses: It answers with an error instead.
    """

    url: str
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    refuses: bool = False

    def of(self, epoch: int) -> list[Span]:
        """The spans of one epoch's trace, the root first."""
        (root,) = [span for span in self.spans if not span.parent_span_id and attributes(span)["weir.epoch"] == epoch]
        rest = [span for span in self.spans if span.trace_id == root.trace_id and span is not root]
        return [root, *sorted(rest, key=lambda span: span.start_time_unix_nano)]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            takes = self.path == "/v1/traces" and not collector.refuses
            if takes:
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    collector.resources.append(
                        {item.key: item.value.string_value for item in resource.resource.attributes}
                    )
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200 if takes else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as there:
        yield there


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def traced(tmp_path: Path, endpoint: str, **options: str) -> Bank:
    return Bank.at(tmp_path / "site", WEIR_TELEMETRY__TRACES="true", WEIR_TELEMETRY__OTLP_ENDPOINT=endpoint, **options)


def ms_of(spans: Sequence[Span], phase: str, stage: str | None = None) -> float:
    (span,) = [
        span
        for span in spans
        if attributes(span).get("weir.phase") == phase and attributes(span).get("weir.stage") == stage
    ]
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6


def nested(spans: Sequence[Span]) -> None:
    """Every span lies within its parent, and belongs to one tree."""
    by_id = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent.name, span.name)
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)


def test_each_epoch_is_a_trace_whose_spans_take_as_long_as_was_recorded(tmp_path, collector):
    bank = traced(tmp_path, collector.url)
    before = time.time_ns()
    reports = bank.epochs(1, 2, run_id="a-run-of-dagster")
    after = time.time_ns()
    assert {resource["service.name"] for resource in collector.resources} == {"weir"}
    assert len({span.trace_id for span in collector.spans}) == 2
    for report in reports:
        row, spans = report.checkpoint, collector.of(int(report.checkpoint.id))
        root = spans[0]
        about = attributes(root)
        assert root.name == "epoch" and root.status.code == Status.STATUS_CODE_UNSET
        assert about["weir.pipeline"] == "small" and about["dagster.run_id"] == "a-run-of-dagster"
        assert (about["weir.rows_in"], about["weir.rows_out"], about["weir.checkpoint"]) == (10, 10, row.id)
        assert about["weir.state_bytes"] == row.bytes_total
        nested(spans)
        assert before <= root.start_time_unix_nano and root.end_time_unix_nano <= after
        for phase in ("seal", "commit", "publish", "prune"):
            assert ms_of(spans, phase) == pytest.approx(report.ms[phase], abs=1e-3), phase
        for phase in ("stage", "upload"):
            assert ms_of(spans, phase, "accounts") == pytest.approx(report.ms[f"{phase}:accounts"], abs=1e-3), phase
        commit = next(span for span in spans if attributes(span).get("weir.phase") == "commit")
        to_commit = (commit.start_time_unix_nano - root.start_time_unix_nano) / 1e6
        assert 0 < to_commit <= row.ms["to_commit"] + 1, "it lies where it was"
        stage = next(span for span in spans if span.name == "stage accounts")
        subtasks = [span for span in spans if span.parent_span_id == stage.span_id]
        assert {attributes(span)["weir.subtask"] for span in subtasks} == {0, 1}
        assert sum(attributes(span)["weir.rows_in"] for span in subtasks) == 10
        slowest = {
            phase: max(
                (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                for span in spans
                if span.name == phase and span.parent_span_id in {subtask.span_id for subtask in subtasks}
            )
            for phase in ("open", "process", "sync")
        }
        recorded = row.operators["accounts"].ms
        assert slowest == pytest.approx({phase: recorded[phase] for phase in slowest}, abs=1e-3)


def test_an_epoch_that_fails_is_a_trace_with_its_error_redacted(tmp_path, collector):
    class Failing(InMemoryExecutor):
        def run(self, *_: Any, **__: Any) -> Any:
            raise TransientError("The store answers nothing.") from OSError("https://user:geheimnis99@store/x")

    bank = traced(tmp_path, collector.url)
    bank.land(1)
    with pytest.raises(TransientError):
        list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), Failing()))
    spans = collector.of(1)
    nested(spans)
    for span in (spans[0], next(span for span in spans if attributes(span).get("weir.phase") == "stage")):
        assert span.status.code == Status.STATUS_CODE_ERROR and "answers nothing" in span.status.message
        (event,) = span.events
        about = {item.key: item.value.string_value for item in event.attributes}
        assert event.name == "exception" and about["exception.type"] == "TransientError"
        assert "geheimnis99" not in str(span) and "Traceback" in about["exception.stacktrace"]
    assert "weir.checkpoint" not in attributes(spans[0])


@pytest.mark.parametrize("is_there", [False, True])
def test_a_collector_that_is_away_or_refuses_harms_nothing_and_is_warned_of_once(
    tmp_path, collector, monkeypatch, is_there
):
    monkeypatch.setattr(telemetry, "_SEND_SECONDS", 2.0)
    collector.refuses = True
    bank = traced(tmp_path, collector.url if is_there else "http://127.0.0.1:9")
    began = time.monotonic()
    with capture_logs() as logged:
        assert len(bank.epochs(1, 2)) == 2
        bank.assert_exact(1, 2)
    assert time.monotonic() - began < 20
    warned = [entry for entry in logged if "traces do not reach" in entry["event"]]
    assert len(warned) == 1 and warned[0]["endpoint"].startswith("http://127.0.0.1:")
    assert ("400" if is_there else "Connection refused") in warned[0]["reason"]


def test_a_run_that_ends_before_its_exporter_has_given_up_says_that_the_collector_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "_SEND_SECONDS", 2.0)
    monkeypatch.setattr(telemetry, "_GOODBYE_SECONDS", 0.2)
    bank = traced(tmp_path, "http://127.0.0.1:9")
    with capture_logs() as logged, telemetry.tracing(bank.site.pipeline, bank.site.settings, None) as send:
        send(EpochTimes(7, {}, 100.0, 101.0, (101.0, time.time_ns()), (), (), {}))
    assert ["traces do not reach" in entry["event"] for entry in logged] == [True]


def test_variables_that_opentelemetry_refuses_are_an_error_of_the_configuration(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    with pytest.raises(ConfigurationError, match="max_export_batch_size"):
        traced(tmp_path, collector.url).epochs(1)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=air,service.name=billing"}, "billing"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=billing", "OTEL_SERVICE_NAME": "flights"}, "flights"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=air"}, "weir"),
    ],
)
def test_the_name_of_the_service_is_what_the_standard_variables_say(tmp_path, collector, monkeypatch, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    traced(tmp_path, collector.url).epochs(1)
    assert {resource["service.name"] for resource in collector.resources} == {name}


def test_what_others_of_the_process_send_by_opentelemetry_is_warned_of_as_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(telemetry, "_SEND_SECONDS", 0.5)
    nowhere = "http://127.0.0.1:9"
    bank = traced(tmp_path, nowhere)
    with telemetry.tracing(bank.site.pipeline, bank.site.settings, None) as send:
        send(EpochTimes(7, {}, 100.0, 101.0, (101.0, time.time_ns()), (), (), {}))
    assert caplog.records == []
    assert OTLPSpanExporter(f"{nowhere}/v1/traces", timeout=0.5).export([]) is SpanExportResult.FAILURE
    assert {record.name for record in caplog.records} == {"opentelemetry.exporter.otlp.proto.http.trace_exporter"}


def test_headers_that_opentelemetry_does_not_understand_are_not_repeated(tmp_path, collector, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Collector-Entry: geheimnis99")
    bank = traced(tmp_path, collector.url)
    telemetry.Sender(bank.site.pipeline, bank.site.settings.telemetry, None).close()
    assert "Header format invalid" in caplog.text and "geheimnis99" not in caplog.text


def test_a_collector_is_spoken_of_when_it_goes_and_when_it_is_back(tmp_path, collector):
    bank = traced(tmp_path, collector.url)
    times = EpochTimes(7, {}, 100.0, 101.0, (101.0, time.time_ns()), (), (), {})
    sender = telemetry.Sender(bank.site.pipeline, bank.site.settings.telemetry, None)
    with capture_logs() as logged:
        for refuses in (True, True, False, False):
            collector.refuses = refuses
            sender.send(times)
            sender._provider.force_flush()
    sender.close()
    events = [entry["event"].partition(";")[0] for entry in logged]
    assert events == ["traces do not reach the collector", "traces reach the collector again"]


@pytest.mark.parametrize("path", ["/", "/v1/traces", "/v1/traces/"])
def test_the_endpoint_may_name_where_a_collector_takes_traces(tmp_path, collector, path):
    traced(tmp_path, collector.url + path).epochs(1)
    assert len(collector.of(1)) > 1


def test_a_tracer_that_fails_ends_no_epoch(tmp_path, collector, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no spans today")

    monkeypatch.setattr(telemetry._EpochTrace, "make", fails)
    with capture_logs() as logged:
        assert len(traced(tmp_path, collector.url).epochs(1, 2)) == 2
    assert [entry["epoch"] for entry in logged if "could not be traced" in entry["event"]] == [1]


def test_a_stage_of_many_subtasks_shows_the_slowest(tmp_path, collector):
    bank = traced(tmp_path, collector.url)
    slow = tuple(SubtaskTime("accounts", number, 1, 1, {"process": float(number)}) for number in range(200))
    step = StepTime("stage", "accounts", 100.0, 100.5)
    times = EpochTimes(7, {}, 100.0, 101.0, (101.0, time.time_ns()), (step,), slow, {"stage:accounts": 400.0})
    with telemetry.tracing(bank.site.pipeline, bank.site.settings, None) as send:
        assert send is not None
        send(times)
        send(replace(times, id=8, subtasks=()))
    spans = collector.of(7)
    stage = next(span for span in spans if span.name == "stage accounts")
    shown = [attributes(span)["weir.subtask"] for span in spans if span.parent_span_id == stage.span_id]
    assert sorted(shown) == list(range(136, 200)) and attributes(stage)["weir.subtasks_left_out"] == 136
    assert len(collector.of(8)) == 2
    nested(spans)


def test_what_a_subtask_uploaded_by_itself_lies_before_the_coordinators_step(tmp_path, collector):
    bank = traced(tmp_path, collector.url)
    subtask = SubtaskTime("accounts", 0, 1, 1, {"process": 10.0, "upload": 300.0})
    steps = (StepTime("stage", "accounts", 100.0, 100.5), StepTime("uploads", "accounts", 100.5, 100.501))
    ms = {"stage:accounts": 400.0, "upload:accounts": 300.0}
    with telemetry.tracing(bank.site.pipeline, bank.site.settings, None) as send:
        send(EpochTimes(7, {}, 100.0, 101.0, (101.0, time.time_ns()), steps, (subtask,), ms))
    spans = collector.of(7)
    nested(spans)
    assert ms_of(spans, "upload", "accounts") == pytest.approx(300.0)
