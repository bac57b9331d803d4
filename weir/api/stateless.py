"""Operators without a key: nothing is remembered from row to row."""

from __future__ import annotations

from collections.abc import Sequence

from state_ops.errors import PipelineError
from weir.api.arguments import columns_of, gates_of, inputs_of, only_input, sides_of
from weir.definition import Gate, Readable, Stage
from weir.definition.sink import Sink
from weir.operators.stateless import Unchanged


def select(
    uid: str,
    source: Readable,
    *columns: str,
    where: str | None = None,
    sink: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Make other columns of rows, in Spark's SQL. Nothing is remembered.

    Weir evaluates a part of SQL by itself (docs/reference/where.md), without the JVM. Spark evaluates the rest. Both
    give the same rows.

    Args:
        *columns: Each a column, an expression with AS and a name, or "*". None: all columns as they are.
        where: As in `stage`, of the columns before. Rows that it drops are counted.
        sink: The table that gets the rows, which come in no order.
        gate: As in `stage`.

    Raises:
        PipelineError: A column is no text.

    Example:
        >>> from weir import files, select, testing
        >>> cheap = select("cheap", files("{landing}/*.parquet"), "id", "price * 2 AS twice", where="price < 50")
        >>> testing.run(cheap).epoch([{"id": 1, "price": 20}, {"id": 2, "price": 80}]).to_dicts()
        [{'id': 1, 'twice': 40}]
    """
    what = ", ".join(columns_of(uid, columns)) or "*"
    return Stage(
        uid=uid,
        inputs=only_input(uid, source, (), where, columns),
        operator=Unchanged(),
        sink=sink,
        gates=gates_of(gate),
        description=f"SELECT {what}" + (f" WHERE {where}" if where else ""),
    )


def union(
    uid: str,
    *inputs: Readable,
    sink: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Return the rows of several inputs, columns by name. Nothing is remembered.

    All inputs have the same columns and types; `side(...)` with a select or a transform makes them so. The watermark is
    that of the slowest input.

    Args:
        *inputs: Sources, stages, or `side(...)` of one.
        sink: The table that gets the rows, which come in no order.
        gate: As in `stage`.

    Raises:
        PipelineError: There are fewer than two inputs, or one of them says a `time`.

    Example:
        >>> from weir import Pipeline, delta, files, side, testing, union
        >>> shop = files("{landing}/shop/*.parquet", name="shop")
        >>> web = files("{landing}/web/*.parquet", name="web")
        >>> orders = union("orders", shop, side(web, select=["number AS id"]), sink=delta.append("orders"))
        >>> run = testing.run_pipeline(Pipeline("both", (orders,)))
        >>> tables = run.epoch({"shop": [{"id": 1}], "web": [{"number": 2}]})
        >>> tables["orders"].sort("id").to_dicts()
        [{'id': 1}, {'id': 2}]
    """
    of = sides_of(*inputs)
    if len(of) < 2:
        raise PipelineError(f"{uid} unites fewer than two inputs.", where=f"union {uid}", next="Name two or more.")
    timed = next((given for given in of if given.time is not None), None)
    if timed is not None:
        raise PipelineError(
            f"{uid} hands on rows as they are, and looks at no time={timed.time!r}.",
            where=f"union {uid}",
            next="Leave it out: the sources' event times say the watermark.",
        )
    return Stage(
        uid=uid,
        operator=Unchanged(),
        inputs=inputs_of(uid, of, [()] * len(of)),
        sink=sink,
        gates=gates_of(gate),
        description=f"The rows of {len(of)} inputs.",
    )
