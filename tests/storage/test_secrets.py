"""A planted canary: secrets that were given by reference appear nowhere but in the memory of those who need them."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import structlog
from deltalake import DeltaTable

from state_ops.checkpoints import restore_log
from state_ops.checkpoints.registry import Registry
from state_ops.delta import fenced_table
from state_ops.errors import ConfigurationError, TransientError, WeirError, plainly
from state_ops.fsck.check import check
from state_ops.ids import CheckpointId
from state_ops.records.restores import Restored
from state_ops.storage import s3
from state_ops.storage.paths import RESTORES
from state_ops.storage.storage import Storage
from tests.storage import counting
from tests.storage.conftest import KEY, SECRET, Bucket
from tests.tools.sampling import sampled
from weir.cli import main
from weir.definition import FileSource
from weir.execution.in_process import InMemoryExecutor
from weir.execution.spark import environment, spark_session
from weir.inspection.sql import answered
from weir.ownership.pipeline_storage import storage_errors
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT, S3Settings
from weir.sources.files import FilesReader

CANARY_KEY, CANARY_SECRET, CANARY_TOKEN = (
    "CANARYKEYID0123456789",
    "canary/secret+0123456789abcdef",
    "canary-token-0123456789",
)
CANARIES = [CANARY_KEY, CANARY_SECRET, CANARY_TOKEN]
TOKEN = "WEIR_TEST_TOKEN"
Misbehaving = Callable[[str], int]


@pytest.fixture
def planted(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv(KEY, CANARY_KEY)
    monkeypatch.setenv(SECRET, CANARY_SECRET)
    monkeypatch.setenv(TOKEN, CANARY_TOKEN)
    return bucket


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """Every log line of this process, from debug up."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    root, level = logging.getLogger(), logging.getLogger().level
    before = structlog.get_config()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.INFO)  # the tests' own client, with keys of its own
    logging.getLogger("urllib3").setLevel(logging.INFO)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(lines),
    )
    yield lines
    structlog.configure(**before)
    root.setLevel(level)
    root.removeHandler(handler)


def assert_silent(*texts: object) -> None:
    for text in texts:
        data = text if isinstance(text, bytes) else str(text).encode()
        assert data
        for canary in CANARIES:
            assert canary.encode() not in data
            assert canary.encode().hex(" ").encode() not in data


def assert_chain_silent(error: BaseException | None) -> None:
    while error is not None:
        assert_silent(repr(error), str(error) + ".")
        error = error.__cause__ or error.__context__


def everything_in(bucket: Bucket) -> Iterator[bytes]:
    for name in bucket.objects():
        yield name.encode() + bucket.content(name) + b"."


def with_token(**other: str) -> dict[str, str]:
    return {"WEIR_STORAGE__S3__SESSION_TOKEN__ENV": TOKEN, **other}


def test_a_run_leaves_no_secret_anywhere(planted: Bucket, heard: io.StringIO, tmp_path: Path, misbehaving: Misbehaving):
    counting.land(planted, 1, 2)
    work = tmp_path / "work"
    configured = counting.configured(planted, work, **with_token())
    reports = list(run(counting.pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert counting.counted(planted) == counting.rows_of(1) + counting.rows_of(2)

    storage = Storage(configured.storage_uri("counting"), configured.storage.s3)
    assert storage.delta_options is not None and CANARY_SECRET in storage.delta_options.values(), "it is in use"
    reader = FilesReader(FileSource("landing"), f"s3://{planted.name}/landing/*.parquet", configured.storage.s3)
    assert_silent(repr(storage), pickle.dumps(storage), repr(vars(storage)), repr(reader), repr(reports))
    assert_silent(pickle.dumps(reader))
    assert_silent(repr(configured), configured.model_dump(), configured.model_dump_json(), pickle.dumps(configured))
    assert_silent(repr(s3.credentials(configured.storage.s3)), spark_session._properties(configured))
    assert_silent(*everything_in(planted), heard.getvalue() + ".")
    assert_silent(*(file.read_bytes() + b"." for file in work.rglob("*") if file.is_file()))

    # Servers that refuse, another that hangs, a bucket that is not there, a port where nobody listens.
    counting.land(planted, 3)
    strange: list[dict] = [
        {"port": misbehaving("refuses everything")},
        {"port": misbehaving("repeats what was signed")},
        {"port": misbehaving("repeats what was signed, to who writes")},
        {"port": misbehaving("repeats what was signed, to who reads rows")},
        {"port": misbehaving("hangs")},
        {"port": 1},
        {"WEIR_STORAGE__ROOT": "s3://no-such-bucket-of-ours/root"},
    ]
    behind = counting.configured(planted, work, strange[3]["port"], **with_token())
    with (
        pytest.raises(WeirError, match="SignatureDoesNotMatch") as query,
        answered(counting.pipeline, behind, "SELECT * FROM tables.counted") as (_, rows),
    ):
        list(rows)
    assert_chain_silent(query.value)
    for options in strange:
        short = {"WEIR_STORAGE__S3__REQUEST_TIMEOUT_SECONDS": "0.3", "WEIR_STORAGE__S3__MAX_ATTEMPTS": "2"}
        port, other = options.pop("port", None), with_token(**short, **options)
        with pytest.raises(Exception) as failure:
            list(
                run(
                    counting.pipeline,
                    counting.configured(planted, work, port, **other),
                    RunOptions(until_caught_up=True),
                    InMemoryExecutor(),
                )
            )
        assert_chain_silent(failure.value)
    assert_silent(heard.getvalue() + ".")


@dataclass(frozen=True, slots=True)
class Refused:
    """One storage with tables in it, through servers that repeat what was signed: always, to who writes, to who reads
    rows."""

    always: Storage
    writes: Storage
    rows: Storage


@pytest.fixture
def refused(planted: Bucket, misbehaving: Misbehaving) -> Refused:
    storage = planted.storage(session_token={"env": TOKEN})
    Registry(storage, "counting/main").take_over()
    restore_log.record(storage, _restored())
    ways = (
        "repeats what was signed",
        "repeats what was signed, to who writes",
        "repeats what was signed, to who reads rows",
    )
    others = [planted.storage(misbehaving(way), session_token={"env": TOKEN}, max_attempts=1) for way in ways]
    return Refused(*others)


def _restored() -> Restored:
    return Restored(CheckpointId(1), "c" * 32, "drill", True, None, 0, 0)


def _appended(storage: Storage) -> None:
    handle = fenced_table.open_table(storage, RESTORES)
    fenced_table.commit(handle, "somebody", 1)


# Each way in which a library of Rust's copies a server's answer into its errors, and where in storage that is.
DELTA: dict[str, tuple[Callable[[Refused], object], str]] = {
    "looks for a table": (lambda to: fenced_table.exists(to.always, RESTORES), "registry%2Frestores"),
    "opens a table": (lambda to: fenced_table.open_table(to.always, RESTORES), RESTORES),
    "makes a table": (lambda to: fenced_table.ensure_table(to.writes, "new", restore_log.SCHEMA), "new/_delta_log"),
    "commits": (lambda to: _appended(to.writes), f"{RESTORES}/_delta_log"),
    "takes over": (lambda to: Registry(to.writes, "counting/main").take_over(), "registry"),
    "asks for the generation": (lambda to: Registry(to.always, "counting/main").generation(), "registry/checkpoints"),
    "writes a checkpoint of the log": (
        lambda to: fenced_table.open_table(to.writes, RESTORES).create_checkpoint(),
        f"{RESTORES}/_delta_log",
    ),
    "reads rows": (lambda to: fenced_table.open_table(to.rows, RESTORES).to_pyarrow_table(), RESTORES),
}


@pytest.mark.parametrize("way", sampled(DELTA))
def test_what_delta_rs_says_of_a_refusal_names_status_code_and_path_and_no_secret(refused: Refused, way: str):
    act, path = DELTA[way]
    with pytest.raises(Exception) as failure:
        act(refused)
    assert_chain_silent(failure.value)
    message = plainly(failure.value)
    assert "403" in message and "SignatureDoesNotMatch" in message and path in message
    assert "x-amz-" not in message and "AWS4-HMAC" not in message


def test_a_refusal_is_told_and_logged_and_found_without_what_was_signed(
    refused: Refused, heard: io.StringIO, capsys: pytest.CaptureFixture[str]
):
    with (
        pytest.raises(TransientError, match="403 Forbidden") as away,
        storage_errors(counting.pipeline, settings.load({}), refused.always),
    ):
        Registry(refused.always, "counting/main").head()
    assert_chain_silent(away.value)
    restore_log.record(refused.writes, _restored())
    assert "a restore could not be recorded" in heard.getvalue() and "SignatureDoesNotMatch" in heard.getvalue()
    report = check(refused.rows, "counting/main", [], alive=False)
    assert_silent(heard.getvalue(), json.dumps(report.to_dict()))

    def raw() -> None:
        DeltaTable(refused.always.full(RESTORES), storage_options=refused.always.delta_options)

    for debug in (False, True):
        assert main._guarded(lambda **_: raw(), debug) == 1
        printed = capsys.readouterr().err
        assert "SignatureDoesNotMatch" in printed and ("Traceback" in printed) is debug
        assert_silent(printed)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("way", "asked", "direct"),
    [("rows", "rows", 0), ("files", "blocks", 0), ("direct", "auto", 32)],
    ids=["Spark reads", "map tasks read", "subtasks read"],
)
def test_a_run_on_spark_reads_a_bucket_and_shows_no_secret(
    planted: Bucket, tmp_path: Path, way: str, asked: str, direct: int
):
    """`weir run` in a process of its own, with Spark's event log and its own log at INFO."""
    counting.land(planted, 1, 2)
    events, work = tmp_path / "events", tmp_path / "work"
    events.mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }
    given = counting.environment(
        planted,
        **with_token(
            WEIR_LOCAL__WORK_DIR=str(work),
            WEIR_SPARK__CONF=json.dumps(conf),
            WEIR_SPARK__PARALLELISM="1",
            WEIR_SPARK__EXCHANGE=asked,
            WEIR_SPARK__DIRECT_READ_MB=str(direct),
        ),
    )
    command = [sys.executable, "-m", "weir.cli.main", "--debug", "run", "counting", "--until-caught-up"]
    child = subprocess.Popen(
        command, cwd=PROJECT, env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for process in psutil.Process(child.pid).children(recursive=True):
                try:
                    seen.add("\0".join(process.cmdline()))
                except psutil.Error:
                    continue

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    printed, _ = child.communicate(timeout=540)
    over.set()
    watching.join()
    assert child.returncode == 0, printed.decode()

    assert counting.counted(planted) == counting.rows_of(1) + counting.rows_of(2)
    head = Registry(planted.storage(prefix="root/counting"), "counting/main").head()
    assert head is not None and head.operators["counts"].exchange == way
    assert any("org.apache.spark.deploy.SparkSubmit" in line and "fs.s3a.endpoint" in line for line in seen)
    assert_silent(*(line + "." for line in seen), printed + b".")
    logs = [file.read_bytes() for file in (*events.rglob("events_*"), work / "spark.log")]
    assert len(logs) == 2 and b"fs.s3a.endpoint" in logs[0] and len(logs[1]) > 10_000, (
        "they can be read, and say something"
    )
    assert_silent(*logs)
    assert_silent(*everything_in(planted))


# -- what refuses a secret


LITERALS = [
    f"storage: {{s3: {{access_key_id: {CANARY_KEY}, secret_access_key: {{env: X}}}}}}",
    f"storage: {{s3: {{access_key_id: {{env: X}}, secret_access_key: '{CANARY_SECRET}'}}}}",
    f"storage: {{s3: {{access_key_id: {{env: X}}, secret_access_key: {{env: '{CANARY_SECRET}'}}}}}}",
    f"storage: {{s3: {{access_key_id: {{env: X}}, secret_access_key: {{value: '{CANARY_SECRET}'}}}}}}",
    f"storage: {{s3: {{secret_access_key: ['{CANARY_SECRET}']}}}}",
    f"storage: {{s3: {{secret: '{CANARY_SECRET}'}}}}",
    f"storage: {{s3: '{CANARY_SECRET}'}}",
    f"storage: '{CANARY_SECRET}'",
    f"storage: {{s3: {{endpoint: 'https://{CANARY_KEY}:{CANARY_TOKEN}@host'}}}}",
    f"storage: {{root: 's3://{CANARY_KEY}:{CANARY_TOKEN}@bucket/x'}}",
    f"storage: {{root: 's3://bucket/x?secret_key={CANARY_TOKEN}'}}",
    "storage: {s3: {access_key_id: {env: AKIAIOSFODNN7EXAMPLE}, secret_access_key: {env: X}}}",
]


@pytest.mark.parametrize("text", LITERALS)
def test_a_literal_secret_is_refused_and_not_repeated(tmp_path: Path, text: str):
    file = tmp_path / "test.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        settings.load({"WEIR_CONFIG": str(file)})
    assert "storage" in str(refused.value)
    assert_chain_silent(refused.value)
    assert "AKIAIOSFODNN7EXAMPLE" not in str(refused.value)


def test_a_literal_secret_in_a_variable_is_refused_and_not_repeated():
    with pytest.raises(ConfigurationError) as refused:
        settings.load({"WEIR_STORAGE__S3__SECRET_ACCESS_KEY": CANARY_SECRET})
    assert "must be a reference to an environment variable" in str(refused.value)
    assert "WEIR_STORAGE__S3__SECRET_ACCESS_KEY" in str(refused.value)
    assert_silent(refused.value)


def test_a_variable_that_holds_a_secret_is_no_setting():
    loaded = settings.load(
        {
            "WEIR_STORAGE__S3__ACCESS_KEY_ID__ENV": "WEIR_KEY",
            "WEIR_STORAGE__S3__SECRET_ACCESS_KEY": "{env: WEIR_SECRET}",
            "WEIR_KEY": CANARY_KEY,
            "WEIR_SECRET": CANARY_SECRET,
        }
    )
    assert loaded.storage.s3.access_key_id is not None and loaded.storage.s3.access_key_id.env == "WEIR_KEY"
    assert_silent(repr(loaded))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"access_key_id": {"env": "X"}}, "access_key_id and secret_access_key go together"),
        ({"session_token": {"env": "X"}}, "session_token needs"),
        ({"endpoint": "http://127.0.0.1:9000"}, "allow_http: true"),
    ],
)
def test_halves_are_refused(block: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        settings.load({"WEIR_STORAGE__S3": json.dumps(block)})


def test_a_missing_variable_is_named(planted: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigurationError, match=f"{SECRET} is not set") as missing:
        planted.storage()
    assert missing.value.where == "storage.s3.secret_access_key"
    assert_silent(missing.value)


def test_a_token_of_another_key_is_not_sent_along(planted: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY_TOKEN)
    with pytest.raises(ConfigurationError, match="AWS_SESSION_TOKEN is set") as mixed:
        planted.storage()
    assert_silent(mixed.value)


def test_without_references_the_libraries_look_themselves(planted: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CANARY_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY_SECRET)
    block = planted.settings(access_key_id=None, secret_access_key=None)
    assert s3.credentials(block) is None and s3.jvm_environment(block) == {}
    assert not {"aws_access_key_id", "aws_secret_access_key"} & set(s3.delta_options(block))
    assert "spark.hadoop.fs.s3a.aws.credentials.provider" not in s3.hadoop_properties(block)
    storage = Storage(f"s3://{planted.name}/root", block)
    storage.put_bytes("a", b"x")
    assert planted.objects() == ["root/a"]


def test_spark_gets_secrets_by_environment_and_refuses_them_as_properties(planted: Bucket):
    block = planted.settings(session_token={"env": TOKEN})
    assert s3.jvm_environment(block) == {
        "AWS_ACCESS_KEY_ID": CANARY_KEY,
        "AWS_SECRET_ACCESS_KEY": CANARY_SECRET,
        "AWS_SESSION_TOKEN": CANARY_TOKEN,
    }
    before = dict(os.environ)
    with environment.environment(s3.jvm_environment(block)):
        assert os.environ["AWS_SECRET_ACCESS_KEY"] == CANARY_SECRET
    assert dict(os.environ) == before
    for key in (
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.session.token",
    ):
        given = settings.Settings.model_validate({"spark": {"conf": {key: CANARY_SECRET}}})
        with pytest.raises(ConfigurationError, match="is a secret") as refused:
            spark_session._properties(given)
        assert_silent(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.hadoop.fs.azure.account.key.acct.dfs.core.windows.net", CANARY_SECRET),
        ("spark.hadoop.fs.azure.sas.c.acct.blob.core.windows.net", CANARY_SECRET),
        ("spark.hadoop.fs.gs.auth.service.account.private.key", CANARY_SECRET),
        ("spark.hadoop.dfs.adls.oauth2.credential", CANARY_SECRET),
        ("spark.acme.api-key", CANARY_SECRET),
        ("spark.kubernetes.authenticate.submission.oauthToken", CANARY_SECRET),
        ("spark.driver.extraJavaOptions", f"-Djavax.net.ssl.keyStorePassword={CANARY_SECRET}"),
    ],
)
def test_no_secret_gets_onto_the_command_line_of_spark(key, value):
    with pytest.raises(ConfigurationError, match="a secret") as refused:
        spark_session._check_no_secret({key: value})
    assert_silent(refused.value)
    spark_session._check_no_secret({"spark.sql.shuffle.partitions": "8", "spark.executor.memory": "2g"})


def test_spark_gets_the_jars_only_where_something_is_on_s3():
    def reads(**env: str) -> bool:
        return spark_session.reads_s3(settings.load({"WEIR_ENV": "demo", **env}))

    assert not reads()
    assert reads(WEIR_STORAGE__ROOT="s3://bucket/weir")
    assert reads(WEIR_PIPELINES__FLIGHTS__PARAMS="{landing: s3a://bucket/landing}")
    assert reads(WEIR_STORAGE__S3__REGION="eu-central-1")
    assert S3Settings() == settings.load({"WEIR_ENV": "demo"}).storage.s3
