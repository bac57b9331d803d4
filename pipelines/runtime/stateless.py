"""The stateless part of a stage in Spark: filter, transform, key group, shuffle. It must be deterministic.

A shuffle task may run twice (a lost executor, speculation). If its rows or their order across partitions depend on
chance or on the clock, the second run can lose or double rows, so such expressions are refused by name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa

from pipelines.runtime.definition import Stage
from pipelines.runtime.keyed_stage import SUBTASK
from state_ops import frames
from state_ops.errors import PipelineError
from state_ops.state import GROUP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CHANCE = re.compile(
    r"\b(rand|randn|random|uuid|shuffle|monotonically_increasing_id|spark_partition_id|input_file_name|now|localtimestamp"
    r"|current_timestamp|current_date|current_time|curdate|unix_timestamp)\s*\(\s*\d*\s*\)?",
    re.IGNORECASE,
)
_LITERAL = re.compile(r"'(?:[^']|'')*'")


def prepared(stage: Stage, rows: DataFrame) -> DataFrame:
    """`rows` after the stage's transform and where. Raises PipelineError when Spark cannot make sense of them."""
    from pyspark.errors import AnalysisException, ParseException

    where = f"stage {stage.uid}"
    try:
        if stage.transform is not None:
            rows = rows.transform(stage.transform)
            _refuse_chance(_plan(rows), where)
        if stage.where is not None:
            _refuse_chance(stage.where, where)
            rows = rows.where(stage.where)
        rows.schema  # noqa: B018 - Spark Connect analyses a plan only when its schema is asked for
    except (AnalysisException, ParseException) as error:
        raise PipelineError(
            f"Spark cannot resolve the stateless part of {stage.uid}: {str(error).splitlines()[0]}",
            where=f"{where}, where={stage.where!r}",
            next="Correct the names in where= or transform=.",
        ) from error
    return rows


def schema_of(rows: DataFrame) -> pa.Schema:
    """The Arrow schema in which keyed tasks see these rows, types canonical."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = to_arrow_schema(rows.schema, timezone="UTC")
    return pa.schema([(field.name, frames.canonical_type(field.type)) for field in schema])


def exchanged(
    stage: Stage, rows: DataFrame | None, schema: pa.Schema, spark: SparkSession, parallelism: int, max_parallelism: int
) -> DataFrame:
    """Send every row to the subtask that owns its key group, with one control row for each subtask.

    rows: None for an epoch without data. The control rows (no key group) make sure that every subtask runs and acks.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    controls = spark.range(0, parallelism, 1, 1).select(
        F.col("id").cast("int").alias(SUBTASK), F.lit(None).cast("int").alias(GROUP)
    )
    if rows is None:
        wanted = from_arrow_schema(schema)
        keyed = controls.select("*", *[F.lit(None).cast(field.dataType).alias(field.name) for field in wanted])
    else:
        group = F.expr(
            f"cast(pmod(xxhash64({', '.join(f'`{name}`' for name in stage.key)}), {max_parallelism}) as int)"
        )
        data = rows.select(group.alias(GROUP), "*")
        subtask = F.expr(f"cast({GROUP} * {parallelism} div {max_parallelism} as int)")
        data = data.select(subtask.alias(SUBTASK), "*")
        keyed = data.unionByName(controls, allowMissingColumns=True)
    keyed = keyed.repartitionById(parallelism, F.col(SUBTASK))
    if stage.order_by and rows is not None:
        keyed = keyed.sortWithinPartitions(*stage.key, *stage.order_by)
    return keyed


def _plan(rows: DataFrame) -> str:
    explain = getattr(rows, "_explain_string", None)
    if explain is not None:
        return explain(extended=True)
    return rows._jdf.queryExecution().toString()


def _refuse_chance(text: str, where: str) -> None:
    found = _CHANCE.search(_LITERAL.sub("''", text))
    if found:
        raise PipelineError(
            f"{found[1]}() gives another result when a task runs again, so rows could be lost or doubled.",
            where=where,
            next="Use columns of the input instead; the epoch's processing time is epoch.now in the stage's function.",
        )
