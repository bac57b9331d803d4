"""On which hosts subtasks have run, so that the next ones go where their state is.

A job without a shuffle starts its tasks from an RDD whose partitions prefer hosts, which DataFrames cannot say. Spark
waits for a preferred host as long as `spark.locality.wait` says and then takes another one, where the state comes from
storage: nothing depends on a preference. The reducers of a shuffle know none, so blocks may go through storage instead
(`execution/staged_blocks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from state_ops.logs import Logger
from weir.execution.spark.imports import load_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = Logger("weir.spark")

_KEPT = 8  # frames of other stages and layouts
_ALL = 1_000_000  # tasks of a job


def fair(hosts: Sequence[str], alive: Collection[str]) -> tuple[str, ...]:
    """Return the hosts that subtasks prefer, of those on which they ran.

    A host that is gone is preferred by nobody, and none by more than its share of them: where one has joined, the
    others give up some.
    """
    share = -(-len(hosts) // max(1, len(alive)))
    wanted: Counter[str] = Counter()
    preferred = []
    for host in hosts:
        wanted[host] += 1
        preferred.append(host if host in alive and wanted[host] <= share else "")
    return tuple(preferred)


class Placement:
    """The hosts of subtasks on a classic master, whose executors may be on several.

    Attributes:
        moved: Subtasks that ran on another host than the time before.
        stayed: Those that ran on the same one.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session: Any = session
        self._hosts: dict[tuple[str, int], str] = {}
        self._starts: dict[tuple[str, ...], DataFrame] = {}
        self.moved = self.stayed = 0

    @property
    def hosts(self) -> int:
        """The number of hosts with executors."""
        return len(self._alive())

    def start(self, uid: str, parallelism: int) -> DataFrame:
        """Return a frame with a partition for each subtask of a stage, which prefers the host of its state."""
        hosts = fair([self._hosts.get((uid, subtask), "") for subtask in range(parallelism)], self._alive())
        if not any(hosts):
            anywhere: DataFrame = self._session.range(0, parallelism, 1, parallelism)
            return anywhere
        if hosts not in self._starts:
            self._starts = {**dict(list(self._starts.items())[-_KEPT:]), hosts: self._preferring(hosts)}
        return self._starts[hosts]

    def ran(self, uid: str, stage: int, subtasks: Iterable[tuple[int, int]]) -> None:
        """Note where the tasks of a job ran.

        Args:
            uid: The stage's.
            stage: Spark's number of the job's last stage.
            subtasks: The number of each subtask, and that of its task.
        """
        from py4j.protocol import Py4JError

        context = self._session.sparkContext
        store = context._jsc.sc().statusStore()
        subtask_of = {task: subtask for subtask, task in subtasks}
        try:
            tasks = store.taskList(stage, store.lastStageAttempt(stage).attemptId(), _ALL)
            for task in context._jvm.scala.jdk.javaapi.CollectionConverters.asJava(tasks):
                if (subtask := subtask_of.get(task.taskId())) is None:  # it lost to another attempt
                    continue
                host = task.host()
                before = self._hosts.get((uid, subtask), host)
                self.moved, self.stayed = self.moved + (host != before), self.stayed + (host == before)
                self._hosts[uid, subtask] = host
        except Py4JError as error:  # Spark has not heard of it yet, or not any more
            log.debug("it cannot be told where subtasks ran", error=str(error)[:200])

    def _alive(self) -> set[str]:
        """Return the hosts that have executors."""
        context = self._session.sparkContext
        executors = context._jsc.sc().statusStore().executorList(True)
        as_java = context._jvm.scala.jdk.javaapi.CollectionConverters.asJava
        return {each.hostPort().rpartition(":")[0] for each in as_java(executors) if each.id() != "driver"}

    def _preferring(self, hosts: Sequence[str]) -> DataFrame:
        load_pyspark()
        from pyspark.sql import DataFrame

        context = self._session.sparkContext
        jvm, gateway = context._jvm, context._gateway
        sequence = jvm.scala.jdk.javaapi.CollectionConverters.asScala
        parts = jvm.java.util.ArrayList()
        for subtask, host in enumerate(hosts):
            values = gateway.new_array(jvm.java.lang.Object, 1)
            values[0] = str(subtask)
            preferred = jvm.java.util.ArrayList()
            if host:
                preferred.add(host)
            parts.add(jvm.scala.Tuple2(jvm.org.apache.spark.sql.RowFactory.create(values), sequence(preferred).toSeq()))
        tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("org.apache.spark.sql.Row"))
        rows = context._jsc.sc().makeRDD(sequence(parts).toSeq(), tag).toJavaRDD()
        schema = jvm.org.apache.spark.sql.types.StructType.fromDDL("subtask string")
        return DataFrame(self._session._jsparkSession.createDataFrame(rows, schema), self._session)
