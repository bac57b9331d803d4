"""What a failed Spark job is said to have failed of: the innermost cause, as Spark 4.2 and S3A word it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from urllib.parse import quote

import grpc
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.errors.exceptions import connect as connect_errors

from state_ops import errors
from state_ops.errors import (
    ConfigurationError,
    DamageError,
    DiskFullError,
    InputError,
    PipelineError,
    RunEndedError,
    StateSizeError,
    TransientError,
    VanishedError,
    WeirError,
)
from state_ops.ids import AttemptId
from state_ops.records.snapshot_files import StagedFile, StateFile
from state_ops.storage.storage import CancelledError, Storage
from weir import agg, aggregate, delta, files
from weir.execution.executor import Channel, InputRows, Landed
from weir.execution.spark import spark_errors, spark_plan, spark_session
from weir.settings import configuration as settings
from weir.sources.files import FilesReader
from weir.sources.slices import SourceFile

STAGE = aggregate("counted", files("{landing}/*.parquet"), key="key", rows=agg.count(), sink=delta.append("counted"))
READING = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 in stage 1.0 (TID 4) (10.0.0.7 executor 1): org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file s3://bucket/landing/1.parquet.  SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(QueryExecutionErrors.scala:857)
Caused by: {cause}
\tat org.apache.hadoop.fs.s3a.S3AUtils.translateException(S3AUtils.java:356)
"""
OPENING = "re-open s3a://bucket/landing/1.parquet at 4: "


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        (
            (
                "java.nio.file.AccessDeniedException: s3a://bucket/landing/1.parquet:"
                " org.apache.hadoop.fs.s3a.auth.NoAuthWithAWSException:"
                f" {OPENING}software.amazon.awssdk.core.exception.SdkClientException: Unable to load credentials from"
                " system settings."
            ),
            ConfigurationError,
            "no credentials",
        ),
        (
            (
                "java.nio.file.AccessDeniedException: s3a://bucket/landing/1.parquet:"
                f" {OPENING}software.amazon.awssdk.services.s3.model.S3Exception: (Service: S3, Status Code: 403,"
                " Request ID: null):AccessDenied"
            ),
            ConfigurationError,
            "refuses",
        ),
        (
            (
                "org.apache.hadoop.fs.s3a.AWSServiceThrottledException:"
                f" {OPENING}software.amazon.awssdk.services.s3.model.S3Exception: (Service: S3, Status Code: 503,"
                " Request ID: null):SlowDown"
            ),
            TransientError,
            "Status Code: 503",
        ),
        (
            (
                f"java.net.SocketTimeoutException: {OPENING}software.amazon.awssdk.core.exception.SdkClientException:"
                " Read timed out"
            ),
            TransientError,
            "Read timed out",
        ),
        (
            (
                f"org.apache.hadoop.net.ConnectTimeoutException: {OPENING}Unable to execute HTTP request: Connect to"
                " 127.0.0.1:9000 failed"
            ),
            TransientError,
            "Unable to execute HTTP request",
        ),
        (
            "java.io.FileNotFoundException: No such file or directory: s3a://bucket/landing/1.parquet",
            VanishedError,
            "is gone",
        ),
        (
            "org.apache.parquet.io.ParquetDecodingException: could not verify page integrity, CRC checksum failed",
            InputError,
            "cannot read the input",
        ),
        (
            (
                "java.lang.RuntimeException: s3a://bucket/landing/1.parquet is not a Parquet file. Expected magic"
                " number at tail"
            ),
            InputError,
            "cannot read the input",
        ),
    ],
)
def test_a_file_is_blamed_only_where_it_is_to_blame(cause, kind, message):
    error = spark_errors.of_job(STAGE, RuntimeError(READING.format(cause=cause)))
    assert type(error) is kind
    assert message in error.what
    assert error.where is not None and "landing/1.parquet" in error.where
    assert error.next is not None and ("Repair the file" in error.next) == ("cannot read the input" in message)


@pytest.mark.parametrize("directory", ["TimeoutStuff", "NoSuchKey", "AccessDenied", "connection timed out", "s3a"])
@pytest.mark.parametrize("written", ["/x/{}/1.parquet", "/x/{}/more of it/1.parquet", "/x/{}/%20.parquet"])
def test_what_a_path_is_called_is_no_cause(directory, written):
    path = written.format(directory)
    named = f"[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file://{quote(path)}.  SQLSTATE: KD001"
    cause = (
        f"Caused by: java.lang.RuntimeException: file:{path} is not a Parquet file. See file:{path.rpartition('/')[0]}"
    )
    error = spark_errors.of_job(STAGE, RuntimeError(f"{named}\n{cause}"))
    assert type(error) is InputError
    assert error.where == f"file://{path}"


@pytest.mark.parametrize(
    ("directory", "message", "blamed"),
    [
        ("/my data", "file:///my%20data/1%20\u00fc+%2520.parquet", True),
        ("/my data", "file:/my%20data/1%20%C3%BC+%2520.parquet", True),
        ("/my data/../it//", "file:///it/1%20\u00fc+%2520.parquet", True),
        ("s3://bucket/landing", "s3a://bucket/landing/1%20\u00fc+%2520.parquet", True),
        ("/my data", "file:///my%20data/channels/1%20\u00fc+%2520.parquet", False),
        ("/my data", "file:///my%20data/1%20\u00fc+%20.parquet", False),
        ("s3://bucket/landing", "s3a://another/landing/1%20\u00fc+%2520.parquet", False),
    ],
)
def test_an_input_file_is_blamed_where_spark_names_its_very_place(directory, message, blamed):
    file = SourceFile("1 \u00fc+%20.parquet", 11, 12)
    rows = Landed(pa.schema([]), FilesReader(files("{landing}/*", name="landing"), f"{directory}/*"), (file,))
    text = READING.format(cause="java.lang.RuntimeException: it is not a Parquet file").replace(
        "s3://bucket/landing/1.parquet", message
    )
    error = spark_errors.of_job(STAGE, RuntimeError(text), rows=InputRows.of(rows))
    assert type(error) is InputError
    assert error.files == ({"landing": {file.name: (11, 12)}} if blamed else {})


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (
            StagedFile(
                "channel", "000000.parquet", "/work/it s/000000.parquet", "channels/1/000000.parquet", 9, None, 1
            ),
            TransientError,
        ),
        (
            StateFile(
                "counted", 0, "channel", "000000.parquet", "channels/1/000000.parquet", 9, "00", True, AttemptId("x")
            ),
            DamageError,
        ),
    ],
    ids=["on a local disk", "in storage"],
)
def test_rows_between_stages_that_spark_cannot_read_are_no_bad_input(tmp_path, file, kind):
    rows = Channel(pa.schema([]), Storage(str(tmp_path / "it s")), (file,))
    message = READING.format(cause="java.lang.RuntimeException: it is not a Parquet file").replace(
        "s3://bucket/landing/1.parquet", f"file://{quote(rows.where)}"
    )
    error = spark_errors.of_job(STAGE, RuntimeError(message), rows=InputRows.of(rows))
    assert type(error) is kind
    assert error.where == rows.where and "landing" not in str(error.next)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'java.io.IOException: Cannot run program "/home/me/.venv/bin/python": error=2, No such file or directory',
            "no Python at '/home/me/.venv/bin/python'",
        ),
        (
            (
                "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has"
                " different version: 3.12 than that in driver: 3.11"
            ),
            "another Python",
        ),
        (
            (
                'Traceback (most recent call last):\n  File "serializers.py", line 459, in'
                " loads\nModuleNotFoundError: No module named 'xxhash'\n"
            ),
            "cannot import xxhash",
        ),
        (
            (
                "Traceback (most recent call last):\nstate_ops.errors.ConfigurationError: The environment variable KEY is"
                " not set in this process.\n  where: storage.s3.access_key_id\n  next:  Set it where this runs.\n\tat"
                " org.apache.spark.api.python.BasePythonRunner"
            ),
            "The environment variable KEY is not set",
        ),
    ],
)
def test_workers_that_cannot_begin_are_a_matter_of_configuration(text, message):
    error = spark_errors.of_job(STAGE, RuntimeError(f"Job aborted due to stage failure: {text}"))
    assert type(error) is ConfigurationError, "no replay helps"
    assert message in error.what and "\n" not in error.what
    assert "a worker of the stage counted" in str(error.where) and error.next


@pytest.mark.parametrize(
    "cause",
    [
        "java.io.IOException: No space left on device\n\tat java.base/sun.nio.ch.FileDispatcherImpl.write0(Native Method)",
        "java.io.FileNotFoundException: /spark/blockmgr-1/0d/temp_shuffle_2 (No space left on device)",
        "java.nio.file.FileSystemException: /spark/blockmgr-1/0d: Disk quota exceeded",
    ],
)
def test_a_full_disk_of_sparks_is_told_with_its_host_and_blames_no_file(cause):
    lost = "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task 0.0 in"
    error = spark_errors.of_job(STAGE, RuntimeError(f"{lost} stage 1.0 (TID 4) (10.0.0.7 executor 1): {cause}"))
    assert type(error) is DiskFullError, "VanishedError would have the source looked at"
    assert "stage counted; 10.0.0.7, executor 1; spark.local.dir" in str(error.where)
    assert "docs/playbooks/disk-full.md" in str(error.next) and "epoch.max_bytes" in str(error.next)


def test_all_else_is_tried_again():
    lost = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times: ExecutorLostFailure (executor 0 exited)"
    )
    error = spark_errors.of_job(STAGE, RuntimeError(lost))
    assert type(error) is TransientError and "ExecutorLostFailure" in error.what


def test_packages_that_spark_connect_lacks_are_named_and_nothing_is_tried_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_status", None)
    for name in [name for name in sys.modules if name.startswith("pyspark.sql.connect")]:
        monkeypatch.delitem(sys.modules, name)  # whatever another test has imported of them
    with pytest.raises(ImportError) as missing:
        spark_session.reach("sc://127.0.0.1:1")
    error = spark_session.not_started(settings.load({"WEIR_SPARK__MASTER": "sc://127.0.0.1:1"}), missing.value)
    assert type(error) is ConfigurationError
    assert (
        "grpcio-status" in error.what
        and "pyspark[connect]" in str(error.next)
        and "sc://127.0.0.1:1" in str(error.where)
    )


def test_a_spark_connect_server_that_is_not_there_is_said_at_once():
    error = spark_session.not_started(
        settings.load({"WEIR_SPARK__MASTER": "sc://127.0.0.1:1"}), ConnectionRefusedError(111, "Connection refused")
    )
    assert type(error) is TransientError
    assert (
        "Connection refused" in error.what and "sc://127.0.0.1:1" in str(error.where) and "spark.log" not in str(error)
    )


class _Grpc(Exception):
    """As the client's library raises it."""


_Grpc.__module__ = "grpc._channel"


@pytest.mark.parametrize(
    "message",
    [
        "<_MultiThreadedRendezvous of RPC that terminated with: status = StatusCode.UNAVAILABLE>",
        "[INVALID_HANDLE.SESSION_CHANGED]",
    ],
)
def test_a_spark_connect_server_that_died_ends_the_run_and_is_named(message):
    error = spark_errors.of_job(STAGE, _Grpc(message), "sc://host:15002")
    assert type(error) is RunEndedError
    assert (
        "Spark Connect server" in error.what
        and "sc://host:15002" in str(error.where)
        and "run again" in str(error.next)
    )


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(CancelledError, TransientError), (StateSizeError, StateSizeError), (PipelineError, PipelineError)],
)
def test_an_error_comes_back_from_a_worker_as_the_nearest_kind_that_is_known(raised: type[WeirError], kind):
    assert getattr(errors, errors.known_as(raised("it failed"))) is kind


@pytest.mark.parametrize(
    "words",
    ["A" * 200_000, "Timeout" * 30_000, "a:/" * 70_000, "[A] " * 50_000, " " * 200_000, "SQLSTATE: [A" * 20_000],
)
def test_a_long_text_without_an_end_is_told_in_no_time(words):
    started = time.thread_time()
    spark_errors.of_job(STAGE, Exception(READING.replace("{cause}", f"s3a://bucket: {words}")))
    assert time.thread_time() - started < 5  # some 0.1 s; what is quadratic takes minutes


def _analysed(condition: str, message: str) -> AnalysisException:
    """As Spark Connect's client raises what the server's analyser has refused."""
    return connect_errors.AnalysisException(
        message=f"[{condition}] {message}",
        errorClass=condition,
        reason="org.apache.spark.sql.AnalysisException",
        grpc_status_code=grpc.StatusCode.INTERNAL,
    )


@pytest.mark.parametrize("directory", ["Socket closed", "StatusCode.UNAVAILABLE", "[INVALID_HANDLE.SESSION_CHANGED]"])
def test_a_path_does_not_make_a_spark_connect_server_look_dead(directory):
    error = _analysed("PATH_NOT_FOUND", f"Path does not exist: file:/x/{directory}/1.parquet. SQLSTATE: 42K03")
    error_of_job = spark_errors.of_job(STAGE, error, "sc://host:15002")
    assert type(error_of_job) is VanishedError and f"/x/{directory}/1.parquet" in str(error_of_job.where)


def test_a_stores_broken_connection_does_not_make_a_spark_connect_server_look_dead():
    reset = "org.apache.hadoop.fs.s3a.AWSClientIOException: Connection reset by peer"
    error = connect_errors.SparkConnectGrpcException(READING.format(cause=reset))
    assert type(spark_errors.of_job(STAGE, error, "sc://host:15002")) is TransientError


@pytest.mark.parametrize(
    "error",
    [
        connect_errors.SparkConnectGrpcException("", grpc_status_code=grpc.StatusCode.UNAVAILABLE),
        connect_errors.SparkConnectGrpcException(
            "[INVALID_HANDLE.SESSION_NOT_FOUND] The handle is invalid.", reason="org.apache.spark.SparkSQLException"
        ),
    ],
)
def test_a_spark_connect_server_is_taken_for_dead_by_what_its_client_records(error):
    assert type(spark_errors.of_job(STAGE, error, "sc://host:15002")) is RunEndedError


def test_a_plan_that_the_analyser_refuses_while_the_job_runs_is_not_tried_again():
    refused = _analysed("UNRESOLVED_COLUMN.WITH_SUGGESTION", "A column `kee` cannot be resolved. SQLSTATE: 42703")
    error = spark_errors.of_job(STAGE, refused, "sc://host:15002")
    assert type(error) is PipelineError and "`kee`" in error.what
    assert "stage counted" in str(error.where) and "transform=" in str(error.next)


def test_a_file_that_is_missed_only_when_the_plan_is_analysed_is_no_mistake_of_the_authors():
    class LateFrame:
        @property
        def schema(self):
            raise _analysed("PATH_NOT_FOUND", "Path does not exist: file:/x/1.parquet. SQLSTATE: 42K03")

    stage, input = STAGE, replace(STAGE.inputs[0])
    with pytest.raises(AnalysisException) as missed:
        spark_plan.prepared(stage, input, LateFrame())
    error = spark_errors.of_job(stage, missed.value, "sc://host:15002")
    assert type(error) is VanishedError and error.where == "file:/x/1.parquet"
