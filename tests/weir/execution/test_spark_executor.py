"""Stages as Spark jobs: every subtask acks with the rows of its own key groups and no others, and an epoch costs no
more than it must."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import functions as F

from state_ops.backends.base import BackendOptions
from state_ops.errors import ConfigurationError, TransientError, VanishedError, WeirError
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import CHANNEL, StateFile
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Pipeline, State, ValueState, agg, aggregate, delta, files
from weir import stage as function_stage
from weir.definition import Progress
from weir.execution import direct_read, exchange, staged_blocks
from weir.execution.executor import Channel, InputRows, Landed
from weir.execution.spark import spark_plan, spark_session
from weir.execution.spark.spark_executor import SparkExecutor, _read_source, _translated
from weir.operators.shapes import shapes
from weir.settings import configuration as settings
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader
from weir.task.run_task import KeyedTask

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])
MAX_PARALLELISM = 16
SHUFFLED = {"where": "pmod(key, 1) = 0"}  # which Spark evaluates, so that subtasks do not read the slice themselves


def _counted(**options: Any) -> Any:
    return aggregate(
        "counted", files("{landing}/*.parquet"), key="key", rows=agg.count(), sink=delta.append("counted"), **options
    )


class Seen(State):
    rows: int = 0


def _sleeps(rows: pl.DataFrame, state: ValueState, epoch: Any) -> pl.DataFrame:
    if len(rows):
        time.sleep(120)
    return rows


def _owners(keys: list[int], parallelism: int = 2) -> list[int]:
    return subtask_of(key_groups([pa.array(keys)], MAX_PARALLELISM), parallelism, MAX_PARALLELISM).tolist()


def _keys_of(subtask: int, parallelism: int = 2) -> list[int]:
    return [key for key, owner in enumerate(_owners(list(range(100)), parallelism)) if owner == subtask]


class Job:
    """One stage on the tests' Spark, epoch after epoch without a coordinator."""

    def __init__(self, root: Path) -> None:
        self.storage = Storage(str(root / "storage"))
        self.work = root / "work"
        self.executor = SparkExecutor(settings.load({}), "weir-tests")

    def run(
        self, keys: list[int] | None, parallelism: int = 2, stage: Any = None, seconds: float = 600, **options: Any
    ) -> list[Ack]:
        """keys: None for an epoch without data. seconds: How long it may take."""
        counted = stage or _counted(**options)
        task = KeyedTask(
            stage=counted,
            shapes=shapes(counted, SCHEMA),
            epoch=CheckpointId(1),
            generation=Generation(1),
            now=datetime(2024, 5, 1, tzinfo=UTC),
            progress=Progress(None, None, False),
            parallelism=parallelism,
            max_parallelism=MAX_PARALLELISM,
            storage=self.storage,
            work_dir=self.work,
            bases={},
            tables={},
            channels=frozenset({"main"}),
            options=BackendOptions(memory_mb=16),
            stages=("counted",),
        )
        rows = None if keys is None else self._staged(keys)
        deadline = time.monotonic() + seconds
        return sorted(
            self.executor.run(task, rows and InputRows.of(rows), SCHEMA, lambda: deadline), key=lambda ack: ack.subtask
        )

    def _staged(self, keys: list[int]) -> Channel:
        path = Path(self.storage.full("channels/before/rows.parquet").removeprefix("file://"))
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table([keys, range(len(keys))], schema=SCHEMA), path)
        file = StateFile("before", 0, CHANNEL, "main", "channels/before/rows.parquet", 1, "", True, AttemptId("a"))
        return Channel(SCHEMA, self.storage, (file,))


@pytest.fixture
def job(tmp_path, spark):
    return Job(tmp_path)


@pytest.fixture
def site(tmp_path, spark):
    def make_site(keys: list[int], **options: Any) -> Site:
        site = Site(tmp_path / "site", {}, Pipeline("counts", (_counted(**options),), max_parallelism=16), __name__)
        site.landing.mkdir(parents=True)
        pq.write_table(pa.table([keys, range(len(keys))], schema=SCHEMA), site.landing / "1.parquet")
        return site

    return make_site


@pytest.mark.parametrize(
    "order", [{}, {"order_by": ["n"]}, SHUFFLED], ids=["as they come", "sorted", "through Spark's shuffle"]
)
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_every_subtask_acks_the_rows_of_its_own_key_groups(job, parallelism, order):
    keys = list(range(50)) * 2
    owners = _owners(keys, parallelism)
    for acks in (job.run(keys, parallelism, **order), job.run([0, 0], parallelism, **order)):
        assert [(ack.subtask, ack.error) for ack in acks] == [(subtask, None) for subtask in range(parallelism)]
        assert [ack.rows_in for ack in acks] == [owners.count(subtask) for subtask in range(parallelism)]
        owners = _owners([0, 0], parallelism)


def test_an_ack_says_what_its_subtask_has_requested_of_storage(job):
    for keys in ([0, 1, 2], [3, 4, 5]):  # the second time in the same processes
        for ack in job.run(keys):
            new = [file for file in ack.files if file.new]
            assert new and ack.request_counts is not None
            assert ack.request_counts["requests_put"] == len(new)
            assert ack.request_counts["bytes_up"] == sum(file.bytes for file in new)
    assert job.storage.request_counts.counts()["requests_put"] == 0, "it was another process"


def test_every_subtask_acks_an_epoch_without_data_and_its_worker_lives_on(job):
    def workers() -> set[tuple[int, float]]:
        workers = set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # one that has just ended
                if "worker_daemon" in " ".join(process.cmdline()):
                    workers.add((process.pid, process.create_time()))
        return workers

    job.run(None)
    before = workers()
    for _ in range(3):
        assert [(ack.subtask, ack.rows_in, ack.error) for ack in job.run(None)] == [(0, 0, None), (1, 0, None)]
    assert len(before) > 1 and workers() == before


def test_jobs_with_and_without_a_shuffle_run_in_the_same_workers(spark):
    """Else each kind would keep state of its own in memory. They import the PySpark that is unpacked: from Spark's
    archive each would compile it."""

    def of_rows(_):
        import pyspark

        yield os.getppid(), pyspark.__file__

    def of_batches(batches):
        for _ in batches:
            pass
        (seen,) = of_rows(())
        yield pa.RecordBatch.from_pydict({"daemon": [seen[0]], "package": [seen[1]]})

    seen = {*spark.sparkContext.parallelize([], 2).mapPartitions(of_rows).collect()}
    seen |= {
        tuple(row) for row in spark.range(0, 2, 1, 2).mapInArrow(of_batches, "daemon long, package string").collect()
    }
    (one,) = seen
    assert one[1] == pyspark.__file__


@pytest.mark.parametrize("options", [{}, SHUFFLED], ids=["without a shuffle", "with one"])
def test_a_job_past_its_deadline_is_ended_and_the_next_one_has_its_place(job, options):
    source, sink = files("{landing}/*.parquet"), delta.append("counted")
    slow = function_stage("counted", source=source, key="key", state=Seen, sink=sink, **options)
    began = time.monotonic()
    with pytest.raises(TransientError):
        job.run([0, 1, 2], stage=slow(_sleeps), seconds=2.0)
    assert time.monotonic() - began < 60
    assert [ack.error for ack in job.run([0, 1, 2], **options)] == [None, None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"where": "n > 1 AND text LIKE 'a%'"},
        {"select": ["key", "n % 3 AS rest", "date_format(at, 'yyyy-MM-dd') AS day", "upper(text) AS text", "cost"]},
    ],
    ids=["none", "where", "select"],
)
def test_columns_that_python_can_tell_are_those_of_spark_and_start_none(spark, monkeypatch, options):
    types = [*SCHEMA, pa.field("text", pa.string()), pa.field("at", pa.timestamp("us", tz="UTC"))]
    schema = pa.schema([*types, ("cost", pa.decimal128(9, 2)), ("bag", pa.map_(pa.string(), pa.list_(pa.int32())))])
    stage, loaded = _counted(**options), settings.load({})
    with monkeypatch.context() as patched:
        patched.setattr(direct_read, "spark_alone", lambda *_: "it is asked on purpose")
        told = SparkExecutor(loaded, "weir-tests").columns(stage, stage.inputs[0], schema, "here")
    monkeypatch.setattr(spark_session, "session", None)
    assert SparkExecutor(loaded, "weir-tests").columns(stage, stage.inputs[0], schema, "here").equals(told)


@pytest.mark.parametrize("way", ["blocks", "staged", "rows"])
@pytest.mark.parametrize(
    "where",
    ["pmod(1, 1) = 1", "pmod(key, 1) = 1", "1 = 0"],
    ids=["as Spark sees in the plan", "as it finds in the rows", "as subtasks find by themselves"],
)
def test_every_subtask_acks_when_no_row_is_taken(site, monkeypatch, where, way):
    monkeypatch.setattr(exchange, "is_narrow", lambda *_: way != "rows")
    monkeypatch.setattr(SparkExecutor, "_is_staged", lambda *_: way == "staged")
    counts = site([1, 2, 3], where=where)

    (report,) = counts.run()

    assert report.checkpoint.operators["counted"].rows_dropped == 3
    assert counts.table("counted").empty


@pytest.mark.parametrize(
    ("hop", "exchange", "hosts", "keyed", "pays", "expected"),
    [
        ("auto", "auto", 2, True, True, True),
        ("auto", "auto", 2, True, False, False),
        ("on", "blocks", 2, True, False, True),
        ("on", "rows", 2, True, True, False),
        ("on", "auto", 1, True, True, False),
        ("on", "auto", None, True, True, False),
        ("on", "auto", 2, False, True, False),
        ("off", "auto", 2, True, True, False),
    ],
)
def test_blocks_go_through_storage_between_hosts_where_that_pays(
    tmp_path, monkeypatch, hop, exchange, hosts, keyed, pays, expected
):
    """hosts: None on a master that tells of none."""
    executor = SparkExecutor(settings.load({"WEIR_SPARK__SECOND_HOP": hop, "WEIR_SPARK__EXCHANGE": exchange}), "hop")
    executor.placement = None if hosts is None else SimpleNamespace(hosts=hosts)  # type: ignore[assignment]
    monkeypatch.setattr(staged_blocks, "pays", lambda *_: pays)
    stage = SimpleNamespace(key=("key",) if keyed else ())
    rows = Channel(SCHEMA, Storage(str(tmp_path)), ())
    assert executor._is_staged(SimpleNamespace(stage=stage), rows) is expected  # type: ignore[arg-type]


def _rerouted(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    for name in ("exchanged", "routed"):
        real = getattr(spark_plan, name)
        monkeypatch.setattr(spark_plan, name, lambda *given, real=real: change(real(*given)))


@pytest.mark.parametrize("is_narrow", sampled([False, True]), ids=["rows", "blocks"])
@pytest.mark.parametrize(
    "change",
    sampled(
        [
            lambda keyed: keyed.coalesce(1),
            lambda keyed: keyed.repartitionById(2, F.expr("1 - spark_partition_id()")),
            lambda keyed: keyed.repartitionById(3, F.expr("spark_partition_id() + 1")),
        ]
    ),
    ids=["partitions joined", "partitions swapped", "a partition too many"],
)
def test_rows_that_spark_has_routed_elsewhere_are_refused_before_any_is_applied(site, monkeypatch, change, is_narrow):
    monkeypatch.setattr(exchange, "is_narrow", lambda *_: is_narrow)
    counts = site(list(range(20)), **SHUFFLED)
    with monkeypatch.context() as patched:
        _rerouted(patched, change)
        with pytest.raises(ConfigurationError, match=r"Spark gave the partition \d|There is no subtask 2") as raised:
            counts.run()
    assert raised.value.next

    (report,) = counts.run()

    assert report.checkpoint.operators["counted"].rows_out == 20
    counts.assert_no_orphans()


def test_a_subtask_that_got_no_task_is_missed(site, monkeypatch):
    counts = site(_keys_of(0), **SHUFFLED)
    with monkeypatch.context() as patched:
        _rerouted(patched, lambda keyed: keyed.coalesce(1))
        with pytest.raises(TransientError, match=r"The subtasks \[1\] of counted did not ack"):
            counts.run()
    (report,) = counts.run()
    assert report.checkpoint.operators["counted"].rows_out == len(_keys_of(0))


def test_a_worker_does_not_collect_its_modules_after_every_task(job, spark):
    def frozen(batches):
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"objects": [gc.get_freeze_count()]})

    job.run(list(range(50)))
    counts = [row.objects for row in spark.range(0, 2, 1, 2).mapInArrow(frozen, "objects long").collect()]
    assert min(counts) > 10_000


def test_a_worker_without_credentials_says_which_variable_it_lacks_and_blames_no_file(job, monkeypatch):
    for name in ("WEIR_LATE_KEY", "WEIR_LATE_SECRET"):
        monkeypatch.setenv(name, "set here, after the workers' environment was made")
    references = {"access_key_id": {"env": "WEIR_LATE_KEY"}, "secret_access_key": {"env": "WEIR_LATE_SECRET"}}
    s3 = settings.S3Settings.model_validate(references)
    job.storage = Storage("s3://weir-nowhere/root", s3)
    with pytest.raises(ConfigurationError, match="WEIR_LATE_KEY is not set in this process") as raised:
        job.run(None)
    assert "a worker of the stage counted" in str(raised.value.where)
    assert "executor's environment" in str(raised.value.next)


def _landed(root: Path) -> Landed:
    reader = FilesReader(files("{landing}/*.parquet", name="landing"), f"{root}/*.parquet")
    planned = reader.plan(None, EpochSettings(), None)
    return Landed(planned.schema, reader, planned.files)


def test_a_file_that_is_gone_when_spark_looks_for_it_has_vanished(tmp_path, spark):
    file = tmp_path / "1 %20.parquet"
    pq.write_table(pa.table({"key": [1]}), file)
    rows = _landed(tmp_path)
    file.unlink()
    with pytest.raises(VanishedError) as gone, _translated(_counted(), "local", InputRows.of(rows)):
        _read_source(spark, rows, 7, by_spark=True)
    assert gone.value.where == f"file:{file}"
    assert list(gone.value.files["landing"]) == [file.name]


def test_no_file_has_vanished_for_what_else_spark_finds_in_a_plan(tmp_path, spark):
    pq.write_table(pa.table({"key": [1], "KEY": [1]}), tmp_path / "1.parquet")
    rows = _landed(tmp_path)
    spark.conf.set("spark.sql.caseSensitive", "false")
    try:
        with (
            pytest.raises(WeirError, match="COLUMN_ALREADY_EXISTS") as raised,
            _translated(_counted(), "local", InputRows.of(rows)),
        ):
            _read_source(spark, rows, 7, by_spark=True)
    finally:
        spark.conf.set("spark.sql.caseSensitive", "true")
    assert not isinstance(raised.value, VanishedError)
