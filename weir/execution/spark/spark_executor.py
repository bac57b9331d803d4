"""A stage as one Spark job: read, filter, shuffle by key group, keyed tasks in Python, acks back.

Slices that are small enough are read by the keyed tasks themselves (`direct`). Between hosts it may be two jobs, with
storage in place of the shuffle (`staged_blocks`).
"""

from __future__ import annotations

import functools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from posixpath import normpath
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import TransientError
from state_ops.logs import Logger
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import StagedFile, StateFile
from weir.definition import ROW, Input, Stage
from weir.execution import direct_read, exchange, staged_blocks
from weir.execution.executor import Channel, Deadline, InputRows, Landed, uri
from weir.execution.spark import spark_errors, spark_plan, spark_session
from weir.execution.spark.imports import load_great_expectations_meanwhile, load_pyspark
from weir.execution.spark.placement import Placement
from weir.execution.spark.spark_task import (
    as_rows,
    cut_blocks,
    landed_rows,
    read_blocks,
    reading_blocks,
    reading_rows,
    staging,
    with_blocks,
    with_rows,
)
from weir.operators.watermarks import MADE_TIME
from weir.settings.configuration import Settings
from weir.sources.slices import SourceFile, position
from weir.sources.source_directory import literal
from weir.task import run_task
from weir.task.run_task import KeyedTask

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, Row, SparkSession


log = Logger("weir.spark")

_ACK = "ack string, stage bigint, subtask bigint, task bigint"
# Properties of spark.conf that ask Spark to read files in another way.
_HOW_SPARK_READS = ("spark.sql.files.", "spark.sql.parquet.", "spark.sql.legacy.parquet.", "spark.hadoop.parquet.")
_FILE, _INDEX, _FIRST, _PARTITION = "__weir_file", "__weir_index", "__weir_first", "__weir_partition"
_Cut: TypeAlias = "tuple[DataFrame, Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]]"
"""What map tasks get, and what cuts it into blocks of the exchange."""
_SCHEME = "^[A-Za-z][A-Za-z0-9+.-]*:/+"


class SparkExecutor:
    """Runs stages on the process's one Spark session, which is started by the first of them.

    Attributes:
        ready_at: When that session was there; None as long as nothing has asked for it.
        placement: Where subtasks have run; None where all of them run on one host, or Spark does not tell.
    """

    def __init__(self, settings: Settings, app: str) -> None:
        self._settings, self._app = settings, app
        self._session: SparkSession | None = None
        self._context: SparkContext | None = None  # of a local master, where jobs without a shuffle are RDDs
        self._starting = threading.Lock()
        self._judged_by_spark: set[str] = set()  # stages whose where has met a row that Spark alone can judge
        self._cancels = 0
        self._subtasks: dict[int, RDD[int]] = {}  # by parallelism, a partition for each of them
        self._tag = f"weir-{uuid.uuid4().hex}"  # of the jobs of RDDs
        self.ready_at: datetime | None = None
        self.placement: Placement | None = None

    @property
    def session(self) -> SparkSession:
        with self._starting:  # two stages may be the first to ask
            if self._session is None:
                began = time.monotonic()
                load_pyspark()
                from pyspark.sql.utils import is_remote

                log.info("Spark starts (5 to 30 s)")
                self._session = spark_session.session(self._settings, app=self._app)
                if self._settings.spark.master.startswith("local"):
                    self._context = None if is_remote() else self._session.sparkContext
                elif not self._settings.spark.master.startswith("sc://"):
                    self.placement = Placement(self._session)
                self.ready_at = datetime.now(UTC)
                log.info(f"Spark has started in {time.monotonic() - began:.1f} s")
            session = self._session
        if self._context is not None or self.placement is not None:
            # Else Spark plans by its defaults in a thread that has made no frame from rows: capitals do not count.
            jvm: Any = session._jvm
            jvm.SparkSession.setActiveSession(session._jsparkSession)
        return session

    def columns(self, stage: Stage, input: Input, schema: pa.Schema, where: str) -> pa.Schema:
        if input.transform is None and direct_read.spark_alone(input, schema, self._settings.spark.conf) is None:
            return spark_plan.as_spark_has(direct_read.seen(input, schema.empty_table()).schema, where)
        session = self.session
        with _translated(stage, self._settings.spark.master):
            empty = session.createDataFrame([], spark_plan.spark_schema(schema, where))
            seen = spark_plan.prepared(stage, input, empty)
            columns, name = spark_plan.schema_of(seen, stage), input.event_time
            makes_time = input.transform is not None and name is not None and not spark_plan.same(empty, seen, name)
            return columns.with_metadata({MADE_TIME: b""}) if makes_time else columns

    def seen(self, stage: Stage, input: Input, rows: Landed | Channel) -> pa.Table:
        """Return the rows of an input as the stage's function sees them, brought into this process."""
        with _translated(stage, self._settings.spark.master, InputRows.of(rows)):
            frame, columns = self._seen(stage, input, rows)
            return frames.canonical(frame.toArrow()).cast(columns)

    def run(
        self,
        task: KeyedTask,
        rows: InputRows | None,
        columns: pa.Schema,  # noqa: ARG002 - Spark finds them itself
        deadline: Deadline,
    ) -> list[Ack]:
        session = self.session
        with _translated(task.stage, self._settings.spark.master, rows):
            return self._run(session, task, rows, deadline)

    def _run(self, session: SparkSession, task: KeyedTask, rows: InputRows | None, deadline: Deadline) -> list[Ack]:
        if task.stage.gates:  # also where they look at something else, later
            load_great_expectations_meanwhile()
        if rows is not None:
            inputs = task.stage.inputs
            parts = ((side, direct_read.narrowed(task.stage, inputs[side], part)) for side, part in rows.parts)
            rows = replace(rows, parts=tuple(parts))
        done = threading.Event()
        threading.Thread(target=self._cancel_late, args=(session, deadline, done), daemon=True).start()
        try:
            acks = [] if rows is None else self._job(task, rows)
            if rows is not None and acks is None:
                log.info(
                    "Spark evaluates the where of a stage from now on: it alone can judge a row", stage=task.stage.uid
                )
                self._judged_by_spark.add(task.stage.uid)
                acks = self._job(task, rows)
            # Spark sees by itself that some plans give no row (where="1 = 0") and runs no task then. Every task that
            # runs gives an ack or fails the job, so this is no lost one; and every subtask has to ack.
            if not task.stage.key:
                return _with_idle(task, acks or [])
            return acks or self._collected(task, self._reading(task, None)) or []
        finally:
            done.set()

    def _way(self, stage: Stage, input: Input, rows: Landed | Channel, parallelism: int, asked: str) -> str:
        """Return the way of rows to their subtasks. asked: the setting, or BLOCKS where these go through storage."""
        configured = self._settings.spark
        by_python = not any(name.startswith(_HOW_SPARK_READS) for name in configured.conf)
        if not rows.as_seen and by_python:
            alone = direct_read.spark_alone(input, rows.schema, configured.conf)
            by_python = alone is None and stage.uid not in self._judged_by_spark
        return exchange.chosen(
            stage, input, rows, parallelism, configured.direct_read_mb << 20, asked, by_python=by_python
        )

    def _is_staged(self, task: KeyedTask, rows: InputRows) -> bool:
        """Return whether blocks of these rows go through storage, unless subtasks read the rows by themselves."""
        configured = self._settings.spark
        if not task.stage.key or self.placement is None or configured.second_hop == staged_blocks.OFF:
            return False
        hosts = 0 if configured.exchange == exchange.ROWS else self.placement.hosts
        return hosts > 1 and (configured.second_hop == staged_blocks.ON or staged_blocks.pays(task, rows, hosts))

    def _job(self, task: KeyedTask, rows: InputRows) -> list[Ack] | None:
        """Bring rows to their subtasks, each input in the way that suits it; the acks, or None as `_collected` has it.

        Blocks of all inputs go through one exchange, or the rows of all.
        """
        stage, staged = task.stage, self._is_staged(task, rows)
        # What makes wide rows dear as blocks is Spark's shuffle of them.
        asked = exchange.BLOCKS if staged else self._settings.spark.exchange if stage.key else exchange.ROWS
        ways = [self._way(stage, stage.inputs[side], part, task.parallelism, asked) for side, part in rows.parts]
        if set(ways) == {exchange.DIRECT}:
            return self._collected(task, self._reading(task, rows))
        frames: dict[int, DataFrame] = {}
        cuts: list[_Cut] = []
        columns = [pa.schema([])] * len(stage.inputs)
        for (side, part), way in zip(rows.parts, ways, strict=True):
            input, layout = stage.inputs[side], (task.parallelism, task.max_parallelism, side)
            if asked != exchange.ROWS and way in (exchange.DIRECT, exchange.FILES):
                columns[side] = direct_read.seen_columns(input, part)
                cuts.append(self._cut_files(input, part, layout))
                continue
            frames[side], columns[side] = self._seen(stage, input, part)
            cuts.append((frames[side], functools.partial(cut_blocks, input, layout)))
        by_rows = asked == exchange.ROWS
        if asked == exchange.AUTO and len(rows.parts) == len(frames) == 1:
            ((side, part),) = rows.parts
            by_rows = not exchange.is_narrow(stage, part, columns[side])
        if by_rows:
            wide = [spark_plan.widened(stage, side, frame, rows.schema) for side, frame in frames.items()]
            return self._collected(task, self._with_rows(task, _union(wide)))
        return self._with_blocks(task, cuts, columns, rows.schema, exchange.CUT if frames else exchange.FILES, staged)

    def _seen(self, stage: Stage, input: Input, rows: Landed | Channel) -> tuple[DataFrame, pa.Schema]:
        """Return the rows of an input as the stage's function sees them, and their columns."""
        frame = self._read(rows)
        if not rows.as_seen:
            frame = spark_plan.prepared(stage, input, frame)
        columns = direct_read.looked_at(stage, spark_plan.schema_of(frame, stage))
        return frame.select(*[spark_plan.quoted(name) for name in columns.names]), columns

    def _cut_files(self, input: Input, rows: Landed | Channel, layout: tuple[int, int, int]) -> _Cut:
        """Map tasks that read files by themselves. layout: as `spark_task.read_blocks` has it."""
        pieces = exchange.pieces(rows, layout[0])
        tasks = self.session.range(0, len(pieces), 1, len(pieces))
        return tasks, functools.partial(read_blocks, input, rows, pieces, layout)

    def _with_rows(self, task: KeyedTask, frame: DataFrame) -> DataFrame:
        if task.stage.key:
            keyed = spark_plan.exchanged(task.stage, frame, task.parallelism, task.max_parallelism)
        else:
            keyed = frame.coalesce(task.parallelism)
        return spark_plan.mapped(keyed, lambda batches: with_rows(task, batches), _ACK)

    def _with_blocks(
        self,
        task: KeyedTask,
        cuts: Sequence[_Cut],
        columns: Sequence[pa.Schema],
        whole: pa.Schema,
        way: str,
        staged: bool,
    ) -> list[Ack] | None:
        """Return the acks of blocks of rows, which go through storage or Spark's shuffle.

        Args:
            columns: As `spark_task.with_blocks` has them, as whole.
        """
        if staged:
            return self._through_storage(task, cuts, columns, whole, way + exchange.STAGED)
        blocks = _union([spark_plan.mapped(frame, cut, exchange.SCHEMA) for frame, cut in cuts])
        batch_rows = self._settings.spark.batch_rows
        routed = spark_plan.routed(blocks, task.parallelism)
        acks = routed.mapInArrow(lambda batches: with_blocks(task, columns, whole, batch_rows, way, batches), _ACK)
        return self._collected(task, acks)

    def _through_storage(
        self, task: KeyedTask, cuts: Sequence[_Cut], columns: Sequence[pa.Schema], whole: pa.Schema, way: str
    ) -> list[Ack] | None:
        """Return the acks of two jobs. The tasks of the second one start where the state of their subtasks is."""
        storage, batch_rows = task.storage, self._settings.spark.batch_rows
        place, began = staged_blocks.directory(task.stage, task.generation, task.epoch), time.monotonic()
        cancels = self._cancels
        frames = [
            spark_plan.mapped(frame, functools.partial(staging, storage, place, cut), staged_blocks.SCHEMA)
            for frame, cut in cuts
        ]
        try:
            extents = staged_blocks.collected(storage, (row.staged for row in _union(frames).collect()))
            if extents is None:
                return None
            if self._cancels != cancels:  # an interrupt between two jobs ends none
                raise TransientError("The job was cancelled.", where=f"stage {task.stage.uid}")
            if task.seconds is not None:
                task = replace(task, seconds=max(0.0, task.seconds - (time.monotonic() - began)))
            reading = functools.partial(reading_blocks, task, extents, columns, whole, batch_rows, way)
            return self._collected(task, self._start(task).mapInArrow(reading, _ACK))
        finally:
            staged_blocks.remove(storage, place)

    def _reading(self, task: KeyedTask, rows: InputRows | None) -> DataFrame | RDD[Row]:
        """Return the acks of a job without a shuffle: a task for each subtask, which reads by itself what there is.

        On a local master it is an RDD: planning a DataFrame takes longer than many a task, and there is nothing to
        plan.
        """
        reading = functools.partial(reading_rows, task, rows, self._settings.spark.batch_rows)
        if self._context is None:
            return self._start(task).mapInArrow(reading, _ACK)
        if task.parallelism not in self._subtasks:  # Spark writes a file for each
            self._subtasks[task.parallelism] = self._context.parallelize([], task.parallelism)
        return self._subtasks[task.parallelism].mapPartitions(lambda numbers: as_rows(reading(iter(numbers))))

    def _start(self, task: KeyedTask) -> DataFrame:
        """Return a partition for each subtask, where its state is if that is known."""
        if self.placement is not None:
            return self.placement.start(task.stage.uid, task.parallelism)
        return self.session.range(0, task.parallelism, 1, task.parallelism)

    def _collected(self, task: KeyedTask, acks: DataFrame | RDD[Row]) -> list[Ack] | None:
        """Run a job; None where a row was met that Spark alone can judge."""
        with self._tagged():
            rows = acks.collect()
        if self.placement is not None and rows:
            self.placement.ran(task.stage.uid, rows[0].stage, [(row.subtask, row.task) for row in rows])
        return None if any(row.ack is None for row in rows) else [Ack.from_json(row.ack) for row in rows]

    def _read(self, rows: Landed | Channel) -> DataFrame:
        if isinstance(rows, Landed):
            spark = self._settings.spark
            by_spark = any(name.startswith(_HOW_SPARK_READS) for name in spark.conf)
            return _read_source(self.session, rows, spark.batch_rows, spark.parallelism, by_spark=by_spark)
        return _read(self.session, rows.schema, [_path(rows, file) for file in rows.files])

    def cancel(self) -> None:
        self._cancels += 1
        if self._session is not None:
            self._interrupt(self._session)

    def _cancel_late(self, session: SparkSession, deadline: Deadline, done: threading.Event) -> None:
        # All jobs: a tag set by one thread is not known in another. Again and again: an interrupt that comes before the
        # job has started is not remembered.
        while not done.wait(max(0.2, deadline() - time.monotonic())):
            if time.monotonic() >= deadline():
                self._interrupt(session)

    def _interrupt(self, session: SparkSession) -> None:
        try:
            session.interruptAll()
        finally:
            if self._context is not None:
                self._context.cancelJobsWithTag(self._tag)

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        """Let jobs of RDDs that this thread runs meanwhile be ended: a session does not know them."""
        if self._context is None:
            yield
            return
        self._context.addJobTag(self._tag)
        try:
            yield
        finally:
            with suppress(Exception):  # a JVM that is gone: the job itself says so
                self._context.removeJobTag(self._tag)


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    """Return the rows of frames that have the same columns."""
    return functools.reduce(lambda first, second: first.union(second), frames)


def _with_idle(task: KeyedTask, acks: list[Ack]) -> list[Ack]:
    """Return the acks of a stage without a key, with those of subtasks for which Spark had no partition: they do
    nothing."""
    missing = set(range(task.parallelism)) - {ack.subtask for ack in acks}
    return acks + [run_task.run(task, subtask, iter(())) for subtask in sorted(missing)]


def _path(rows: Channel, file: StagedFile | StateFile) -> str:
    """Return a staged file's place as Spark reads it, which takes a path for a pattern unless its special characters
    are escaped."""
    place = uri(rows.storage, file)
    return f"file://{literal(place)}" if isinstance(file, StagedFile) else literal(place)


@contextmanager
def _translated(stage: Stage, master: str, rows: InputRows | None = None) -> Iterator[None]:
    """Raise Spark's errors as errors that tell the operator what to do, while a stage is prepared, planned or run.

    A JVM that is gone is left as it is. rows: the rows that the stage reads.
    """
    load_pyspark()
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:  # without Connect, a job's own failure comes untranslated
        raise spark_errors.of_job(stage, error, master, rows) from error
    except Exception as error:
        if spark_errors.is_connect(error):
            raise spark_errors.of_job(stage, error, master, rows) from error
        raise


def _read_source(
    session: SparkSession, rows: Landed, batch_rows: int, tasks: int = 8, *, by_spark: bool = False
) -> DataFrame:
    """Return the rows of a slice, read by Python in tasks of their own, as subtasks read them that need no Spark.

    Args:
        tasks: How many of them there are at most.
        by_spark: Spark reads what it can. It also does where files can be opened from the JVM alone.
    """
    by_spark = by_spark or not rows.reader.open_in_workers(rows.files[:1])
    numbers = [number for number, file in enumerate(rows.files) if file.by_arrow or not by_spark]
    parts = [_read_by_arrow(session, rows, numbers, batch_rows, tasks)] if numbers else []
    others = tuple(file for file in rows.files if by_spark and not file.by_arrow)
    if others:
        parts.append(_read_by_spark(session, rows, others))
    return functools.reduce(lambda first, second: first.unionByName(second), parts)


def _read_by_arrow(
    session: SparkSession, rows: Landed, numbers: Sequence[int], batch_rows: int, tasks: int
) -> DataFrame:
    """Return the rows of some files, by their numbers in the slice, as `direct` reads them."""
    of_these = exchange.pieces(replace(rows, files=tuple(rows.files[number] for number in numbers)), tasks)
    pieces = [[(numbers[file], share) for file, share in piece] for piece in of_these]
    return session.range(0, len(pieces), 1, len(pieces)).mapInArrow(
        lambda batches: landed_rows(rows, pieces, batch_rows, batches),
        spark_plan.spark_schema(rows.schema, rows.where),
    )


def _read_by_spark(session: SparkSession, rows: Landed, files: Sequence[SourceFile]) -> DataFrame:
    """Return the rows of some files. Columns that a file stores in nanoseconds, which Spark cannot read, are cut to
    microseconds."""
    load_pyspark()
    from pyspark.sql import functions as F

    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[SourceFile]] = {}
    for file in files:
        by_path = tuple(name for name, _ in file.partitions if name in rows.schema.names)
        alike.setdefault((file.nanos, by_path), []).append(file)
    partitions = sorted({name for _, by_path in alike for name in by_path})
    parts, numbered = [], rows.tracked or rows.left_out or partitions
    types = spark_plan.spark_schema(rows.schema, rows.where)
    for (nanos, by_path), group in sorted(alike.items()):
        columns = pa.schema([field for field in rows.schema if field.name not in (ROW, *by_path)])
        stored = pa.schema([field.with_type(pa.int64()) if field.name in nanos else field for field in columns])
        part = _read(session, stored, [rows.reader.directory_of(file).spark_path(file) for file in group])
        if numbered:
            # The path comes as it stands in a URI; a plus sign stands for itself there.
            path = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
            place = F.regexp_replace(path, _SCHEME, "/")
            part = part.select("*", place.alias(_FILE), F.col("_metadata.row_index").alias(_INDEX))
        for name in by_path:  # the directory says it, and not the file
            part = part.withColumn(name, F.lit(None).cast(types[name].dataType))
        for name in nanos:
            column = "`" + name.replace("`", "``") + "`"
            part = part.withColumn(name, F.expr(f"timestamp_micros(({column} - pmod({column}, 1000)) div 1000)"))
        parts.append(part)
    landed = functools.reduce(lambda first, second: first.unionByName(second), parts)
    return _numbered(session, rows, landed, partitions) if numbered else landed


def _numbered(session: SparkSession, rows: Landed, landed: DataFrame, partitions: Sequence[str]) -> DataFrame:
    """Return the rows of a slice with the columns of their directories and their positions, if they are asked for,
    without those that are left out."""
    load_pyspark()
    from pyspark.sql import functions as F

    first_rows = [
        (
            _place(rows.reader.directory_of(file).uri(file)),
            position(number, 0),
            *(dict(file.partitions).get(name) for name in partitions),
        )
        for number, file in enumerate(rows.files)
    ]
    texts = "".join(f", {_PARTITION}{at} string" for at in range(len(partitions)))
    firsts = F.broadcast(session.createDataFrame(first_rows, f"{_FILE}_known string, {_FIRST} bigint{texts}"))
    frame = landed.join(firsts, F.col(_FILE) == F.col(f"{_FILE}_known"), "left")
    lost = F.raise_error(F.lit("a row of a slice comes from none of its files"))
    frame = frame.withColumn(ROW, F.coalesce(F.col(_FIRST), lost.cast("bigint")) + F.col(_INDEX))
    types = spark_plan.spark_schema(rows.schema, rows.where)
    for at, name in enumerate(partitions):
        text = F.col(f"{_PARTITION}{at}").cast(types[name].dataType)
        frame = frame.withColumn(name, F.coalesce(text, F.col("`" + name.replace("`", "``") + "`")))
    if rows.left_out:
        gone = session.createDataFrame([(place,) for place in rows.left_out], f"{_FIRST}_gone bigint")
        frame = frame.join(F.broadcast(gone), F.col(ROW) == F.col(f"{_FIRST}_gone"), "left_anti")
    return frame.select(*["`" + name.replace("`", "``") + "`" for name in rows.schema.names])


def _place(uri: str) -> str:
    """Return a file's place without its scheme, which Hadoop writes in its own way: s3a for s3, and no double
    slashes."""
    return normpath(re.sub(_SCHEME, "/", uri))


def _read(session: SparkSession, schema: pa.Schema, paths: Sequence[str]) -> DataFrame:
    return session.read.schema(spark_plan.spark_schema(schema, paths[0])).parquet(*paths)
