"""Errors of Spark jobs, as errors that tell the operator what to do.

Spark wraps what went wrong in several layers: the job, the task, the reader, the store's client. What counts is the
innermost one. A store that is throttled and an executor without credentials both come as "cannot read the file", which
is then whole and needs no repair.
"""

from __future__ import annotations

import re
from posixpath import normpath
from urllib.parse import unquote

from state_ops import errors
from state_ops.errors import (
    ConfigurationError,
    DiskFullError,
    InputError,
    RunEndedError,
    TransientError,
    VanishedError,
    WeirError,
)
from state_ops.redaction import redacted
from weir.definition import Stage
from weir.execution.executor import Channel, InputRows, Landed, unreadable, uri
from weir.execution.spark import spark_plan
from weir.execution.spark.imports import load_pyspark
from weir.execution.spark.spark_task import error_told

CLUSTERS = "docs/how-to/clusters.md"
_UNREADABLE = ("FAILED_READ_FILE", "PATH_NOT_FOUND", "ParquetDecodingException", "not a Parquet file")
_FILE_READ = re.compile(r"Encountered error while reading file (?P<uri>[^\n]+?)\.(?:\s|$)", re.MULTILINE)
_PATH = re.compile(
    r"Path does not exist: (?P<sought>[^\n]+?)\.(?:\s|$)|(?<![^\s'\"()])(?P<word>[^\s'\"()]+\.parquet)", re.MULTILINE
)
_SCHEME = re.compile(r"^(?:file:(?://)?|s3a?://)")
_IN_A_WORKER = re.compile(
    r"^(?:configs|state_ops)\.errors\.(?P<kind>\w+): (?P<what>.*?)"
    r"(?:\n  where: (?P<where>.*?))?(?:\n  next:  (?P<next>.*?))?$(?!\n  (?:where|next):)",
    re.MULTILINE,
)
_NO_CREDENTIALS = re.compile(
    r"NoAuthWithAWSException|NoAwsCredentialsException|CredentialInitializationException"
    r"|Unable to load credentials|No AWS Credentials provided"
)
_REFUSED = re.compile(
    r"AccessDenied|Status Code: 40[13]\b|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|Permission denied"
)
_GONE = re.compile(r"FILE_NOT_EXIST|PATH_NOT_FOUND|FileNotFoundException|NoSuchKey|Status Code: 404\b")
_AWAY = re.compile(
    r"SlowDown|Status Code: (?:429|5\d\d)\b|AWSStatus500Exception|AWSServiceThrottledException|AWSServiceIOException"
    r"|AWSClientIOException|\b\w*Timeout\w*|Read timed out|timed out|ConnectException|Connection"
    r" re(?:set|fused)|NoHttpResponse"
    r"|UnknownHostException|NoRouteToHost|Unable to execute HTTP request|Premature end of|ConnectionClosed"
)
_FULL = re.compile(r"\w(?:Exception|Error): [^\n]*?(?P<full>No space left on device|Disk quota exceeded)")
_EXECUTOR = re.compile(r"\(TID \d+\) \((?P<host>\S+) executor (?P<id>\S+?)\)")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]*)"')
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'|\[PACKAGE_NOT_INSTALLED\] (\S+)")
# How the texts of such errors begin. What follows may quote anything: a path, or what a store has answered the server.
_SERVER_GONE = re.compile(
    r"\s*(?:<\w+ of RPC that terminated with:\s+status = StatusCode\.UNAVAILABLE\b"
    r"|(?:\([\w.]+\) )?\[INVALID_HANDLE\.(?:SESSION|OPERATION))"
)


def is_connect(error: BaseException) -> bool:
    """Return whether Spark Connect's client, or the library below it, raised this."""
    return type(error).__module__.startswith(("grpc", "pyspark.errors.exceptions.connect"))


def of_connect(error: BaseException, where: str) -> WeirError | None:
    """Return a Spark Connect server that is gone, or has lost the session; None: it is there."""
    if not is_connect(error) or not _server_is_gone(error):
        return None
    return RunEndedError(
        f"The Spark Connect server does not answer, or has lost this session: {reason(error)}",
        where=where,
        next=(
            "See whether it runs and what its own log says last; then run again, which opens a session of its own."
            " The epoch was declined, and nothing of it was applied."
        ),
    )


def _server_is_gone(error: BaseException) -> bool:
    """Return whether a call found no server, or one that does not know the session."""
    status = getattr(error, "getGrpcStatusCode", None) or getattr(error, "code", None)  # of Spark's error, and gRPC's
    if status is not None and status() is not None and status().name == "UNAVAILABLE":
        return True
    return _SERVER_GONE.match(str(error)) is not None


def of_job(stage: Stage, error: Exception, master: str = "", rows: InputRows | None = None) -> WeirError:
    """Return the error that a stage's job failed with.

    Args:
        error: What Spark raised, or the bridge to it.
        master: Spark's, as configured.
        rows: What the job reads. An error that is about one of its input files has that in its `files`.
    """
    load_pyspark()
    from pyspark.errors import AnalysisException

    where, text, why = f"stage {stage.uid}", _with_causes(error), reason(error)
    explained = of_connect(error, f"{where}, spark.master = {master}") or error_told(str(error))
    explained = (
        explained
        or spark_plan.data_error(stage, error)
        or _of_worker(stage, text)
        or _of_local_disk(stage, text)
        or _of_storage(stage, text, why, rows)
    )
    if explained is None and isinstance(error, AnalysisException):
        return spark_plan.unresolved(stage, stage.inputs, error)
    return explained or TransientError(
        f"The Spark job of {stage.uid} failed: {why}",
        where=where,
        next="The epoch was declined. Spark's log has the whole trace: <local.work_dir>/spark.log on a local master.",
    )


def _of_worker(stage: Stage, text: str) -> WeirError | None:
    """Return the error that came before a subtask began: of its Python, or of what that raised by itself."""
    where = f"a worker of the stage {stage.uid}"
    raised = _IN_A_WORKER.search(text)
    if raised is not None:
        kind = getattr(errors, raised["kind"], TransientError)
        return kind(raised["what"], where=f"{raised['where'] or stage.uid}, in {where}", next=raised["next"])
    if (program := _NO_PYTHON.search(text)) is not None:
        return ConfigurationError(
            f"The workers have no Python at {program[1]!r}.",
            where=f"spark.python, for {where}",
            next=(
                f"Set spark.python to the path that it has on the workers: {CLUSTERS}. Nothing of this epoch was"
                " applied."
            ),
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return ConfigurationError(
            f"The workers run another Python than this process: {_line_with(text, 'PYTHON_VERSION_MISMATCH')}",
            where=f"spark.python, for {where}",
            next=f"Set spark.python to one of the same minor version: {CLUSTERS}. Nothing of this epoch was applied.",
        )
    if (missing := _NO_PACKAGE.search(text)) is not None:
        return ConfigurationError(
            f"The workers' Python cannot import {missing[1] or missing[2]}.",
            where=f"spark.python, for {where}",
            next=(
                "Install requirements.lock there. A package of your own has to lie in the project's folder, or on this"
                f" process's path: {CLUSTERS}. Nothing of this epoch was applied."
            ),
        )
    return None


def _of_local_disk(stage: Stage, text: str) -> DiskFullError | None:
    """Return a disk that was full where Spark keeps what it shuffles, sorts and spills."""
    if (full := _FULL.search(text)) is None:
        return None
    executor = _EXECUTOR.search(text)
    host = f"; {executor['host']}, executor {executor['id']}" if executor is not None else ""
    return DiskFullError(
        f"Spark's temporary files do not fit on a disk: {full['full']}.",
        where=f"stage {stage.uid}{host}; spark.local.dir, or SPARK_LOCAL_DIRS, there; /tmp where neither is set",
        next=(
            f"Make room there ({errors.DISK_FULL}), or name a directory on a larger disk by spark.local.dir in"
            " spark.conf; smaller epochs (epoch.max_bytes) shuffle less. The epoch was declined, and nothing of it was"
            " applied."
        ),
    )


def _of_storage(stage: Stage, text: str, why: str, rows: InputRows | None) -> WeirError | None:
    """Return the error of Spark's reading of files: of the store, of the right to read it, or of a file."""
    read, named = _FILE_READ.search(text), _PATH.search(text)
    written = read["uri"] if read is not None else named["sought"] or named["word"] if named is not None else None
    if written is None:
        return _of_reading(stage, text, why, None)
    place = unquote(written) if read is not None else written  # `uri` stands in the text as URIs do
    for spelling in (written, place):
        text = _without_path(text, _SCHEME.sub("", spelling))
    error = _of_reading(stage, text, why, place)
    for _, part in rows.parts if rows is not None else ():
        if isinstance(error, InputError) and isinstance(part, Landed):
            reader = part.reader
            files = [file for file in part.files if _same_place(reader.directory_of(file).uri(file), place)]
            error.files = reader.blamed(files[0]) if files else error.files
        if type(error) is InputError and isinstance(part, Channel):
            staged = [file for file in part.files if _same_place(uri(part.storage, file), place)]
            if staged:
                return unreadable(part.storage, staged[0], why)
    return error


def _without_path(text: str, path: str) -> str:
    """Return a text without what a file and its directory are called, which says nothing of causes."""
    for name in (path, path.rpartition("/")[0]):
        if "/" in name:
            text = text.replace(name, "")
    return text


def _same_place(uri: str, other: str) -> bool:
    """Return whether two URIs, none of them escaped, name one file.

    Hadoop writes them in its own way: s3a for s3, and no double slashes.
    """
    first, another = (normpath(_SCHEME.sub("", place)) for place in (uri, other))
    return first == another


def _of_reading(stage: Stage, text: str, why: str, place: str | None) -> WeirError | None:
    """Return the error of a text from which the path of the file was taken.

    `place` is that path, if the text had one.
    """
    where = place or f"stage {stage.uid}"
    applied = "nothing of this epoch was applied"
    if _NO_CREDENTIALS.search(text):
        return ConfigurationError(
            f"Spark has no credentials where it reads for {stage.uid}: {_marks(text, _NO_CREDENTIALS)}",
            where=where,
            next=(
                "Set the AWS_ variables in the environment of each executor; Weir ships no secrets:"
                f" docs/how-to/object-storage.md. The file is not to blame, and {applied}."
            ),
        )
    about_a_file = place is not None and any(mark in text for mark in _UNREADABLE)
    if not about_a_file and "s3a" not in text:
        return None
    if _REFUSED.search(text):
        return ConfigurationError(
            f"The store refuses what Spark reads for {stage.uid}: {_marks(text, _REFUSED)}",
            where=where,
            next=f"Allow those who run the executors to read it, or correct their credentials; {applied}.",
        )
    if _GONE.search(text):
        return VanishedError(
            f"A file of {stage.uid} is gone, or is not where the executors look: {why}",
            where=where,
            next=(
                f"Put it back, or run again, which plans without it; on a cluster every host has to see it; {applied}."
            ),
        )
    if _AWAY.search(text):
        return TransientError(
            f"The store did not answer in time, or not at all, while Spark read for {stage.uid}: {_marks(text, _AWAY)}",
            where=where,
            next=(
                f"The epoch was declined and is replayed; {applied}. If it happens again, look at the store:"
                " docs/playbooks/storage-down.md"
            ),
        )
    if not about_a_file:
        return None
    return InputError(
        f"Spark cannot read the input of {stage.uid}: {why}",
        where=where,
        next=f"Repair the file, or move it out of the landing directory; {applied}.",
    )


def _with_causes(error: Exception) -> str:
    """Return an error's text, and Java's trace with all causes.

    PySpark keeps the trace beside its message, under one of two names.
    """
    trace = getattr(error, "_stackTrace", None) or getattr(error, "_stacktrace", None)
    return redacted("\n".join(filter(None, [str(error), trace])))


def reason(error: BaseException) -> str:
    """Return the first line that says what is wrong."""
    lines = [line.strip().removeprefix(": ") for line in redacted(str(error)).splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith("An error occurred while calling")]
    return messages[0][:500] if messages else type(error).__name__


def _marks(text: str, marks: re.Pattern[str]) -> str:
    """Return the marks that are in a text: status, code and kind. The rest may be what the store has answered, which is
    not repeated."""
    return ", ".join(list(dict.fromkeys(match[0] for match in marks.finditer(text)))[:4])


def _line_with(text: str, mark: str) -> str:
    return next((line.strip()[:300] for line in text.splitlines() if mark in line), "")
