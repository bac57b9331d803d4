"""Spark's `transformWithStateInPandas`: the author's Python function on the state of one key, called with the key's
rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor

from benchmarks.state.engine import BAND, Result, Task, serve
from benchmarks.state.spark_native import describe, follow, session, source

_COLUMNS = "n long, total double, top double"
_TEXT = ", payload string"
_DAY_MS = 86_400_000


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


class Collected(Totals):
    """And each row appends to a list, changes an entry of a map and sets a timer, due after the run."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle
        self.values = handle.getListState("values", "value double")
        self.bands = handle.getMapState("bands", "band long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frames = list(rows)
        for frame in frames:
            for value in frame["value"].tolist():
                self.values.appendValue((value,))
                band = (int(value) // BAND,)
                before = self.bands.getValue(band)[0] if self.bands.containsKey(band) else 0
                self.bands.updateValue(band, (before + 1,))
                self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + _DAY_MS)
        yield from super().handleInputRows(key, iter(frames), timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002
        yield from ()


def run(task: Task, result: Result) -> None:
    spark = session(task)
    result.ready = time.time()
    collected = task.options.get("collected", False)
    schema = f"key long, {_COLUMNS}" + (_TEXT if task.payload else "")
    changed = (
        source(spark, task, task.inputs[0])
        .groupBy("key")
        .transformWithStateInPandas(
            Collected(task.payload) if collected else Totals(task.payload),
            schema,
            "Update",
            "ProcessingTime" if collected else "None",
        )
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
