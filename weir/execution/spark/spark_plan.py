"""The stateless part of a stage in Spark: filter, transform, key group, shuffle. It must be deterministic.

A shuffle task may run twice (a lost executor, speculation). If its rows or their order across partitions depend on
chance or on the clock, the second run can lose or double rows, so such expressions are refused by name. What is looked
at is the plan as Spark has analysed it: there a column named `now`, a text that reads "rand()" and the function differ.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError, StageError, WeirError, first_line
from state_ops.keyed.keyed_state import GROUP
from weir.definition import Input, Stage
from weir.execution.spark.imports import load_pyspark
from weir.operators import sides

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_CLOCK = (
    frozenset(  # Spark holds these for deterministic: they have one value for a whole query, but not for its replay
        {"CurrentBatchTimestamp", "CurrentDate", "CurrentTime", "CurrentTimestamp", "LocalTimestamp", "Now"}
    )
)
_MOMENT = "now|today|tomorrow|yesterday"
_SPECIAL_LITERAL = re.compile(rf"\b(date|timestamp|timestamp_ltz|timestamp_ntz)\s*'\s*({_MOMENT})\b", re.IGNORECASE)
_IN_PLAN = re.compile(
    r"(?<![\w`.])(current_batch_timestamp|current_date|current_time|current_timestamp|input_file_block_length"
    r"|input_file_block_start|input_file_name|localtimestamp|monotonically_increasing_id|now|rand|randn|random|randstr"
    r"|reflect|shuffle|spark_partition_id|uniform|uuid)\(",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_.]*)\](.*?)SQLSTATE: (\w{5})", re.DOTALL)
_ADVICE = re.compile(r'If necessary set "spark\.sql\.ansi\.enabled" to "false"[^.]*\.')
# SQLSTATE classes: 22 data exception, 23 constraint violated, P0 raise_error and assert_true; 42K0B a datetime pattern.
_DATA_STATES = ("22", "23", "P0", "42K0B")

_checked: WeakValueDictionary[int, Input] = WeakValueDictionary()


def prepared(stage: Stage, input: Input, rows: DataFrame) -> DataFrame:
    """Return the rows of one of a stage's inputs after its transform, where and columns.

    What the plan says is checked once for each input, since it is the same in every epoch.

    Raises:
        PipelineError: Spark cannot make sense of them or they depend on chance or the clock.
        StageError: The transform raises.
    """
    load_pyspark()
    from pyspark.errors import AnalysisException, ParseException

    checked = _checked.get(id(input)) is input
    try:
        if input.transform is not None:
            rows = _transformed(stage, input.transform, rows)
        if input.where is not None:
            rows = rows.where(input.where)
        if input.columns:
            rows = rows.selectExpr(*input.columns)
        if not checked:
            rows.schema  # noqa: B018 - Spark Connect analyses a plan only when its schema is asked for
    except (AnalysisException, ParseException) as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise  # about a file, not the author's code: Spark Connect looks for files only here, or later
        raise unresolved(stage, [input], error) from error
    if not checked:
        if input.transform is not None or input.where is not None or input.columns:
            _refuse_chance(stage, input, rows)
        _checked[id(input)] = input
    return rows


def same(given: DataFrame, made: DataFrame, name: str) -> bool:
    """Return whether a column is the very one of the rows that a plan begins with, as far as Spark tells.

    Connect does not tell.
    """

    def ids(rows: DataFrame) -> list[int]:
        plan = rows._jdf.queryExecution().analyzed()
        return [column.exprId().id() for column in _items(plan.output()) if column.name() == name]

    return hasattr(given, "_jdf") and ids(given) == ids(made)


def unresolved(stage: Stage, inputs: Sequence[Input], error: Exception) -> PipelineError:
    """Return the error that Spark's analyser refuses the plan of some of a stage's inputs, as it would each time.

    Args:
        error: An AnalysisException.
    """
    written = ", ".join(filter(None, (input.sql_written for input in inputs)))
    return PipelineError(
        f"Spark cannot resolve the stateless part of {stage.uid}: {first_line(error)}",
        where=f"stage {stage.uid}, {written or 'transform='}",
        next=f"Correct {'its SQL' if any(input.columns for input in inputs) else 'the names in where= or transform='}.",
    )


def _transformed(stage: Stage, transform: Callable[[Any], Any], rows: DataFrame) -> DataFrame:
    load_pyspark()
    from py4j.protocol import Py4JNetworkError
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    try:
        result = transform(rows)
    except (AnalysisException, WeirError, OSError, EOFError, Py4JNetworkError):
        raise  # not the author's: the storage, or a JVM that is gone
    except Exception as error:
        trace = sys.exc_info()[2]
        shown = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        raise StageError(
            f"The transform of the stage {stage.uid} raised {type(error).__name__}: {error}",
            where=f"stage {stage.uid}",
            next="Correct the transform; nothing of this epoch was applied.",
            traceback="".join(traceback.format_exception(type(error), error, shown)),
        ) from error
    if not isinstance(result, DataFrame):
        raise StageError(
            f"The transform of the stage {stage.uid} returned {type(result).__name__}, not a Spark DataFrame.",
            where=f"stage {stage.uid}",
            next="Return the rows that it was given, changed with DataFrame operations.",
        )
    return result


def schema_of(rows: DataFrame, stage: Stage | None = None) -> pa.Schema:
    """Return the Arrow schema in which keyed tasks see these rows, types canonical.

    Args:
        stage: Whose rows they are, for the message.

    Raises:
        PipelineError: For a column whose type Arrow does not have.
    """
    load_pyspark()
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

    unknown = (PySparkTypeError, ValueError)  # ValueError for `array()`: items of no type that are never null
    try:
        schema = to_arrow_schema(rows.schema, timezone="UTC")
    except unknown as error:
        for field in rows.schema:
            try:
                to_arrow_type(field.dataType, timezone="UTC")
            except unknown:
                raise _unsupported(
                    field.name, field.dataType.simpleString(), f"stage {stage.uid}" if stage else None, "transform="
                ) from error
        raise
    return frames.canonical_schema(schema)


def spark_schema(schema: pa.Schema, where: str) -> StructType:
    """Return a schema as Spark has it.

    Args:
        where: Whose it is.

    Raises:
        PipelineError: For a column whose type Spark does not have.
    """
    load_pyspark()
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

    for field in schema:
        try:
            if pa.types.is_decimal256(field.type):
                raise PySparkTypeError(f"{field.type} has more than 38 digits")
            from_arrow_type(field.type)
        except PySparkTypeError as error:
            raise _unsupported(field.name, str(field.type), where, "what writes the files") from error
    return from_arrow_schema(schema)


def as_spark_has(schema: pa.Schema, where: str) -> pa.Schema:
    """Return the columns as they come back from Spark, found without a session. Raises as `spark_schema`."""
    load_pyspark()
    from pyspark.sql.pandas.types import to_arrow_schema

    return frames.canonical_schema(to_arrow_schema(spark_schema(schema, where), timezone="UTC"))


def _unsupported(column: str, kind: str, where: str | None, remedy: str) -> PipelineError:
    return PipelineError(
        f"The input column {column!r} is {kind}, a type that cannot pass between Spark and Python.",
        where=where,
        next=f"Cast or drop it in {remedy}: numbers, texts, timestamps, and lists, maps and structs of them can pass.",
    )


def exchanged(stage: Stage, rows: DataFrame, parallelism: int, max_parallelism: int) -> DataFrame:
    """Return every row, with its key group, in the partition whose number is that of the subtask that owns the group.

    A partition without rows is one too, so each of the `parallelism` subtasks gets a task.
    """
    load_pyspark()
    from pyspark.sql import functions as F

    hashed = f"xxhash64({', '.join(quoted(name) for name in stage.key)})"
    keyed = rows.selectExpr(f"cast(pmod({hashed}, {max_parallelism}) as int) as {GROUP}", "*")
    subtask = F.expr(f"cast({GROUP} * {parallelism} div {max_parallelism} as int)")
    keyed = keyed.repartitionById(parallelism, subtask)
    if stage.order_by:
        keyed = keyed.sortWithinPartitions(*[quoted(name) for name in (*stage.key, *stage.order_by)])
    return keyed


def widened(stage: Stage, side: int, rows: DataFrame, columns: pa.Schema) -> DataFrame:
    """Return the rows of one of a stage's inputs in the columns that all inputs share (`operators.sides`)."""
    if not stage.is_of_several:
        return rows
    load_pyspark()
    from pyspark.sql import functions as F

    types = spark_schema(columns, f"stage {stage.uid}")
    names = sides.names_in_table(stage, side)
    given = {names(name): F.col(quoted(name)) for name in rows.columns}
    given[sides.SIDE] = F.lit(side)
    return rows.select(
        *[given.get(field.name, F.lit(None)).cast(types[field.name].dataType).alias(field.name) for field in columns]
    )


def routed(blocks: DataFrame, parallelism: int) -> DataFrame:
    """Return every block, as `exchange.SCHEMA` has it, in the partition of its subtask, as `exchanged` does."""
    return blocks.repartitionById(parallelism, blocks.subtask)


def mapped(
    rows: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Apply `mapInArrow`, also to columns with a dot or a backquote in their names.

    PySpark looks such names up as they are.
    """
    names = rows.columns
    if not any("." in name or "`" in name for name in names):
        return rows.mapInArrow(function, schema)
    numbered = rows.toDF(*map(str, range(len(names))))
    return numbered.mapInArrow(lambda batches: function(batch.rename_columns(names) for batch in batches), schema)


def quoted(name: str) -> str:
    """Return a column's name as Spark SQL takes it whatever it contains: a bare `a.b` is the field b of a column a."""
    return f"`{name.replace('`', '``')}`"


def data_error(stage: Stage, error: Exception) -> WeirError | None:
    """Return the error of a failed Spark job that is about the rows or the author's code. A replay would fail as well.

    Args:
        error: From an action on the stage's rows.

    Returns:
        An InputError for a value that an expression cannot take (ANSI casts, division by zero, raise_error); a
        StageError for a Python UDF that raised; None for all else.
    """
    load_pyspark()
    from pyspark.errors import PythonException

    text = str(error)
    if isinstance(error, PythonException):
        return _from_udf(stage, text)
    match = _CONDITION.search(text, 0, text.rfind("SQLSTATE: ") + len("SQLSTATE: 22012"))
    if match is None or not match[3].startswith(_DATA_STATES):
        return None
    message = " ".join(_ADVICE.sub("", match[2]).split())
    parts = [stage.sql_written] if stage.sql_written else []
    parts += ["transform="] if any(input.transform for input in stage.inputs) else []
    return InputError(
        f"Spark cannot evaluate the stateless part of {stage.uid} for a row: [{match[1]}] {message}",
        where=", ".join([f"stage {stage.uid}", *parts]),
        next=(
            "Repair the input, or let the expression tolerate such values (try_cast, try_divide, ...); nothing of this"
            " epoch was applied."
        ),
    )


def _from_udf(stage: Stage, text: str) -> StageError | None:
    _, mark, trace = text.partition("Traceback (most recent call last):")
    has_transform = any(input.transform is not None for input in stage.inputs)
    if not has_transform or not mark or "spark_task.py" in trace or "read_command" in trace:
        return None  # not the author's code: a worker without Weir's packages, for one
    trace = (mark + trace).partition("\n\nJVM stacktrace:")[0].rstrip() + "\n"
    raised = [line for line in trace.rpartition(mark)[2].splitlines() if line and not line.startswith(" ")]
    return StageError(
        f"A function in the transform of the stage {stage.uid} raised {raised[0] if raised else 'an error'}",
        where=f"stage {stage.uid}",
        next="Correct the function, or the input; nothing of this epoch was applied.",
        traceback=trace,
    )


def _refuse_chance(stage: Stage, input: Input, rows: DataFrame) -> None:
    written = " ".join([*input.columns, input.where or ""])
    special = _SPECIAL_LITERAL.search(written)  # Spark puts in the moment's value while it parses
    java = getattr(rows, "_jdf", None)
    if special:
        chance: str | None = f"{special[1].lower()} '{special[2].lower()}'"
    elif java is not None:
        chance = next(_chance(java.queryExecution().analyzed()), None)
    else:
        chance = chance_in_text(rows._explain_string(extended=True))  # type: ignore[operator]
    if chance:
        raise PipelineError(
            f"{chance} gives another result when a task runs again, so rows could be lost or doubled.",
            where=f"stage {stage.uid}, {input.sql_written or 'transform='}",
            next="Use columns of the input instead; the epoch's processing time is epoch.now in the stage's function.",
        )


def _chance(plan: Any) -> Iterator[str]:
    """Yield the expressions of chance and clock in an analysed plan, a Java object; the innermost first, as they are to
    blame."""
    for below in (plan.children(), plan.subqueries()):
        for child in _items(below):
            yield from _chance(child)
    if _kind(plan) == "Sample":
        yield "sample()"
    for expression in _items(plan.expressions()):
        yield from _chance_within(expression)


def _chance_within(expression: Any) -> Iterator[str]:
    kind = _kind(expression)
    if kind in ("AttributeReference", "Literal"):
        return
    for child in _items(expression.children()):
        yield from _chance_within(child)
        if kind == "Cast" and _kind(child) == "Literal" and re.fullmatch(_MOMENT, child.toString(), re.IGNORECASE):
            to = expression.dataType().simpleString()
            if to.startswith(("date", "timestamp")):
                yield f"{to} '{child.toString()}'"
    if kind in _CLOCK or not expression.deterministic():
        yield f"{expression.name() if kind == 'PythonUDF' else expression.prettyName().lower()}()"


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(i) for i in range(sequence.size()))


def chance_in_text(plan: str) -> str | None:
    """Return the first expression of chance or clock in the text of a plan: all that Spark Connect shows of one.

    Texts stand in it without quotes, so one that reads like a call, 'rand()', is taken for it.
    """
    analysed = plan.partition("== Analyzed Logical Plan ==")[2].partition("== Optimized Logical Plan ==")[0]
    match = _IN_PLAN.search(analysed or plan)
    return f"{match[1].lower()}()" if match else None
