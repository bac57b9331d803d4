"""A pipeline's keyed state as a Spark DataFrame, at any checkpoint or savepoint that is retained.

    from weir import state_reader
    state_reader.dataframe(spark, "flights", "aircraft_rotation", savepoint="before-upgrade").groupBy("hub").count()

Without Spark: `weir state`, or `weir.inspection.state_reader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from state_ops.errors import ConfigurationError
from weir.definition import Pipeline
from weir.execution.spark import spark_plan
from weir.inspection.export import storable
from weir.inspection.state_reader import viewed
from weir.inspection.view import View
from weir.loading import named
from weir.settings.configuration import Settings, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def dataframe(
    spark: SparkSession,
    pipeline: str | Pipeline,
    stage: str,
    at: int | None = None,
    savepoint: str | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """Return the rows of a stage's state as a Spark DataFrame, one partition for each subtask.

    The columns are the key, then fields, lists and maps; for open windows also their bounds. Each task fetches its
    subtask's files, checks their digests and opens them, whenever an action needs it. So name a savepoint if the rows
    are to be read for longer than retention keeps the checkpoint.

    Args:
        spark: The session.
        pipeline: The pipeline, or its name in the configuration.
        stage: The stage's uid.
        at: A checkpoint's id; by default the newest.
        savepoint: Instead of `at`: the name of a savepoint.
        settings: The configuration; by default that of WEIR_ENV.

    Raises:
        WeirError: There is no such checkpoint or state.
        ConfigurationError: Spark has no type for a column, or both `at` and `savepoint` are said.

    Example:
        The pipeline `shop` keeps the sum of each customer's orders; `spark` is a session.

        >>> from weir import state_reader
        >>> totals = state_reader.dataframe(spark, "shop", "totals", at=2)
        >>> sorted(tuple(row) for row in totals.collect())
        [('ann', 25), ('bob', 7)]
    """
    if at is not None and savepoint is not None:
        raise ConfigurationError("`at` and `savepoint` each name a checkpoint.", next="Say one of them.")
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    with viewed(pipeline, settings, stage, at if savepoint is None else savepoint, "a Spark DataFrame is made") as view:
        schema = storable(view)
    columns = spark_plan.spark_schema(schema, f"the state of {stage}")
    subtasks = spark.range(0, view.parallelism, 1, view.parallelism)
    return subtasks.mapInArrow(lambda numbers: _rows(view, schema, numbers), columns)


def _rows(view: View, schema: pa.Schema, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for table in view.tables(batch.column(0).to_pylist()):
            yield from table.cast(schema).to_batches()
