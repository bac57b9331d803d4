"""Spark's `transformWithStateInPandas`: the author's Python function on the state of one key, called with the key's
rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor

from benchmarks.state.engine import Result, Task, serve
from benchmarks.state.spark_native import describe, follow, session, source

_COLUMNS = "n long, total double, top double"
_TEXT = ", payload string"


class Totals(StatefulProcessor):
    """payload: keep the key's greatest text as well."""

    def __init__(self, payload: bool) -> None:
        self._payload = payload

    def init(self, handle: Any) -> None:
        self.totals = handle.getValueState("totals", _COLUMNS + (_TEXT if self._payload else ""))

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002
        n, total, top, *text = self.totals.get() if self.totals.exists() else (0, 0.0, float("-inf"))
        for frame in rows:
            n, total, top = n + len(frame), total + float(frame["value"].sum()), max(top, float(frame["value"].max()))
            text = [max(*text, *frame["payload"])] if self._payload else []
        self.totals.update((n, total, top, *text))
        changed = {"key": [key[0]], "n": [n], "total": [total], "top": [top]}
        yield pd.DataFrame({**changed, "payload": text} if self._payload else changed)

    def close(self) -> None:
        pass


def run(task: Task, result: Result) -> None:
    spark = session(task)
    result.ready = time.time()
    schema = f"key long, {_COLUMNS}" + (_TEXT if task.payload else "")
    changed = (
        source(spark, task, task.inputs[0])
        .groupBy("key")
        .transformWithStateInPandas(Totals(task.payload), schema, "Update", "None")
    )
    query = (
        changed.writeStream.outputMode("update")
        .option("checkpointLocation", f"{task.durable}/checkpoint")
        .foreachBatch(lambda batch, _: batch.write.mode("append").parquet(f"{task.durable}/output"))
        .trigger(availableNow=True)
        .start()
    )
    follow(query, result, 0)
    describe(task, result, spark)
    result.output = [f"{task.durable}/output/*.parquet"]


if __name__ == "__main__":
    serve(run)
