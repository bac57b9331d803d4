"""`stage`: a stage of an author's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from state_ops.durations import micros
from state_ops.errors import PipelineError
from weir.api.arguments import gates_of, names_of, only_input
from weir.definition import MAIN, Gate, Readable, Stage
from weir.definition.sink import Sink
from weir.operators.functions import Function

if TYPE_CHECKING:
    import pyarrow as pa

    from state_ops.keyed.ttl import Ttl
    from state_ops.schema.state_class import State


def stage(  # as long as what is said of its arguments
    uid: str,
    *,
    source: Readable,
    key: str | Sequence[str] | None,
    state: type[State] | None = None,
    order_by: str | Sequence[str] = (),
    where: str | None = None,
    select: str | Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    null_keys: str = "fail",
    per_key: bool = False,
    output: Mapping[str, Any] | None = None,
    sink: Sink | None = None,
    outputs: Mapping[str, Sink | None] | None = None,
    gate: Gate | Sequence[Gate] = (),
    on_timer: Callable[..., Any] | None = None,
    ttl: str | timedelta | None = None,
    ttl_on: str = "write",
    accepts_changes: bool = False,
) -> Callable[[Callable[..., Any]], Stage]:
    """Make a stage of a function of the author.

    The function is `(rows, state, epoch) -> rows`, or with `key=None` `(rows, epoch) -> rows`. It is called with
    bounded batches, possibly several an epoch; a key may span batches. It must be deterministic: the same rows, state
    and epoch give the same rows and state. The annotation of its first parameter says which frame it gets
    (pl.DataFrame, pd.DataFrame, pa.Table); it may return any of them.

    Args:
        uid: The stable name by which the stage's state is found.
        source: A source, another stage, or one of its outputs, `other.output("alerts")`.
        key: Column or columns. None: the stage is stateless. Its rows are not exchanged and come in no order, and it
            takes no arguments about keys, state and time.
        state: The class of a key's state: one typed row, and its lists and maps.
        order_by: Rows reach the function sorted by key, then by these columns, across batches. Without it the order is
            undefined, and the function must not depend on it.
        where: A condition in Spark SQL. The rows that it drops are counted.
        select: The columns that all other arguments are about, in Spark SQL: ["id", "price * 2 AS twice"]. They are
            made of the rows that `where` keeps, and cost less than a `select` stage in front.
        transform: Instead of `select`: a stateless, deterministic function on a Spark DataFrame.
        null_keys: Rows with a null in the key: "fail", or "drop", which counts them.
        per_key: The function is `(key, rows, state, epoch) -> rows | None` instead. It is called once for each key of a
            batch, with that key's rows (a frame, or list[dict], by the second parameter's annotation) and that key's
            state, a `KeyState`. `on_timer` is then `(key, fired, state, epoch)`. Convenient, and much slower than
            columns.
        output: The columns that per-key functions return, with types as in a State class, {"user": str}, or Arrow's. It
            is required for a function that returns a list of dicts. With several outputs, by output:
            {"main": {...}, "alerts": {...}}.
        sink: The table that gets the rows that the function returns.
        outputs: Further outputs of the function by name, each with its sink, or None: {"alerts":
            delta.append("alerts"), "audit": None}. The function then returns, or yields, a frame or a dict of frames
            by output, in which "main" is the main one. Other stages read `this.output("alerts")`.
        gate: Expectations on the output, the state or the figures of each epoch (`expect`).
        on_timer: A function `(fired, state, epoch) -> rows` that is called at the barrier when timers are due that the
            stage set with `state.timers`. `fired` has the key columns, `at` (timestamp, UTC) and `domain` ("event" or
            "processing"). It has a key at most once: a key's timers come one a call, in order of time. The function
            returns rows like the stage's own.
        ttl: How long ("30d") state is kept after it was touched, by `epoch.now`. After that it is never seen again.
        ttl_on: "write": only a write touches state. "read_and_write": a read touches it too.
        accepts_changes: The function looks at the column `_change_type`, which says which rows take others back. False:
            rows with this column are refused.

    Returns:
        A decorator, which makes a `Stage` of the function.

    Raises:
        PipelineError: Arguments do not go together, or an argument is missing.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, KeyedState, State, agg, files, stage, testing
        >>> class Total(State):
        ...     spent: int = 0
        >>> @stage("totals", source=files("{landing}/*.parquet"), key="customer", state=Total)
        ... def totals(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        ...     return state.fold(rows, spent=agg.sum("price"))
        >>> run = testing.run(totals, state={"ann": Total(spent=100)})
        >>> run.epoch([{"customer": "ann", "price": 20}, {"customer": "ann", "price": 5}]).to_dicts()
        [{'customer': 'ann', 'spent': 125}]
        >>> run.state["ann"]
        Total(spent=125)
    """

    from state_ops.arrow import frames
    from weir.operators.functions.per_key import check_parameters, slicer_of

    lifetime = _ttl(uid, ttl, ttl_on)
    if key is not None and (not key or state is None):
        raise PipelineError(
            f"The stage {uid} has no {'state' if key else 'key'}.",
            where=f"stage {uid}",
            next='Say key="column" (or several) and state=; or key=None without state for a stage that remembers'
            " nothing.",
        )
    if output is not None and not per_key:
        raise PipelineError(
            f"{uid} declares output=, but its function works on whole batches: what it returns for an empty frame "
            f"tells.",
            where=f"stage {uid}",
            next="Leave it out, or say per_key=True.",
        )
    beside = tuple((outputs or {}).items())
    declared = _declared(uid, output, [name for name, _ in beside])
    if on_timer is not None and per_key:
        check_parameters(on_timer, "fired")
    elif on_timer is not None:
        frames.converter(on_timer)

    def decorated(function: Callable[..., Any]) -> Stage:
        if per_key:
            slicer_of(function)
        else:
            frames.converter(function)
        return Stage(
            uid=uid,
            inputs=only_input(uid, source, names_of(key or ()), where, select, transform),
            operator=Function(function, state, on_timer, lifetime, per_key, declared, accepts_changes),
            order_by=names_of(order_by),
            null_keys=null_keys,
            sink=sink,
            outputs=beside,
            gates=gates_of(gate),
            description=(function.__doc__ or "").strip(),
        )

    return decorated


def _declared(uid: str, output: Mapping[str, Any] | None, beside: Sequence[str]) -> tuple[tuple[str, pa.Schema], ...]:
    """Return by output the columns that a stage declares.

    Args:
        beside: The names of its outputs beside the main one.
    """
    if output is None:
        return ()
    by_output = {name: columns for name, columns in output.items() if isinstance(columns, Mapping)}
    if not by_output and not beside:
        return ((MAIN, _columns_of(uid, output)),)
    missing = [name for name in beside if name not in by_output]
    unknown = [name for name in output if name not in (MAIN, *beside)]
    if missing or unknown or len(by_output) < len(output):
        raise PipelineError(
            f"{uid} has several outputs, and output= does not say the columns of "
            f"{', '.join(missing) or 'each of them and of nothing else'}.",
            where=f"stage {uid}",
            next='Say them by output: output={"main": {"column": int}, '
            + ", ".join(f'"{name}": {{...}}' for name in beside)
            + "}.",
        )
    return tuple((name, _columns_of(uid, columns)) for name, columns in by_output.items())


def _columns_of(uid: str, columns: Mapping[str, Any]) -> pa.Schema:
    """Columns with Arrow types, from such or from annotations."""
    import pyarrow as pa

    from state_ops.schema.annotations import meaning_of

    fields = []
    for name, kind in columns.items():
        try:
            fields.append((name, kind if isinstance(kind, pa.DataType) else meaning_of(kind).type))
        except ValueError as error:
            raise PipelineError(
                f"output= says of the column {name!r} what is no type: {error}.",
                where=f"stage {uid}",
                next=f"Say e.g. {{{name!r}: int}}, or one of Arrow's types.",
            ) from error
    return pa.schema(fields)


def _ttl(uid: str, ttl: str | timedelta | None, ttl_on: str) -> Ttl | None:
    from state_ops.keyed.ttl import READ_AND_WRITE, WRITE, Ttl

    where = f"stage {uid}"
    if ttl_on not in (WRITE, READ_AND_WRITE):
        raise PipelineError(
            f"ttl_on={ttl_on!r} is no policy.", where=where, next=f'Say "{WRITE}" or "{READ_AND_WRITE}".'
        )
    if ttl is None:
        return None
    length = micros(ttl, where, "ttl")
    if length <= 0:
        raise PipelineError(
            f"ttl={ttl!r} would keep nothing.", where=where, next="Say how long, e.g. 30d, or leave it out."
        )
    return Ttl(length, on_read=ttl_on == READ_AND_WRITE)
