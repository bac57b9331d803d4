"""Facts and a table: `lookup` joins each row with a table that changes slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from state_ops.errors import PipelineError
from weir.api.arguments import gates_of, names_of, only_input, pairs_of
from weir.connectors.lookups.lookup_table import FAIL, NEWEST
from weir.definition import Gate, Readable, Stage
from weir.definition.sink import Sink
from weir.operators.joins import INNER, LEFT
from weir.operators.lookups import Lookup


def lookup(  # as long as what is said of its arguments
    uid: str,
    facts: Readable,
    *,
    table: str,
    on: str | Sequence[str] | Mapping[str, str],
    how: str = LEFT,
    columns: str | Sequence[str] | None = None,
    suffix: str = "_table",
    on_lost: str = FAIL,
    broadcast: bool = True,
    select: str | Sequence[str] = (),
    where: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    sink: Sink | None = None,
    gate: Gate | Sequence[Gate] = (),
) -> Stage:
    """Join each row with the rows of a table that have its key.

    All rows of an epoch are joined with one version of the table, which the checkpoint records: the version that is the
    newest when the epoch is planned. Rows that wait in an unaligned checkpoint keep the version of their epoch. No row
    is joined again when the table changes.

    A row with several rows in the table comes out with each of them, as in SQL. It has its own columns, then those of
    the table.

    Args:
        table: A Delta table's directory or URI, or one of a file that ends with .parquet; with {placeholders} from the
            configuration.
        on: The key columns; {"row's": "table's"} where their names differ.
        how: "left": a row without any in the table comes with nulls; "inner": it does not come.
        columns: The table's columns that come out; by default all that the table has when it is first looked at, and
            no later ones.
        suffix: The ending of those of the table's columns whose names rows have too.
        on_lost: What to do if rows wait for a version that has been vacuumed: "fail", or "newest", which joins them
            with the newest version and records it.
        broadcast: Rows stay where they are read, and each worker process has the whole table in memory. False: rows are
            exchanged by key, and a subtask has the part of its key groups. All other arguments: as in `stage`.

    Raises:
        PipelineError: Arguments do not go together, or `table` is no place of a table.

    Example:
        >>> from weir import files, lookup, testing
        >>> flights = files("{landing}/*.parquet")
        >>> named = lookup("named", flights, table="{warehouse}/airports", on={"dest": "iata"}, columns="city")
        >>> run = testing.run(named, table=[{"iata": "BOS", "city": "Boston"}])
        >>> run.epoch([{"flight": 1, "dest": "BOS"}, {"flight": 2, "dest": "LAX"}]).to_dicts()
        [{'flight': 1, 'dest': 'BOS', 'city': 'Boston'}, {'flight': 2, 'dest': 'LAX', 'city': None}]
    """
    place = f"lookup {uid}"
    pairs = pairs_of(on)
    if how not in (LEFT, INNER):
        raise PipelineError(
            f"how={how!r} is no way to look up rows.", where=place, next=f"Say {LEFT!r} or {INNER!r}; or `join`."
        )
    if on_lost not in (FAIL, NEWEST):
        raise PipelineError(
            f"on_lost={on_lost!r} is nothing to do about a version.", where=place, next=f"Say {FAIL!r} or {NEWEST!r}."
        )
    if not isinstance(table, str) or not table:
        raise PipelineError(
            f"table={table!r} is no place of a table.",
            where=place,
            next='Say its directory, its URI or a Parquet file, e.g. table="{warehouse}/airports". A stage or a source'
            " is joined by `join`.",
        )
    if not pairs:
        raise PipelineError(f"{uid} has no key.", where=place, next='Say on="column" or on={"row\'s": "table\'s"}.')
    if len({theirs for _, theirs in pairs}) < len(pairs):
        raise PipelineError(f"{uid} names a key column of the table twice.", where=place, next="Name each once.")
    keys = tuple(name for name, _ in pairs)
    return Stage(
        uid=uid,
        inputs=only_input(uid, facts, () if broadcast else keys, where, select, transform),
        operator=Lookup(table, pairs, how, None if columns is None else names_of(columns), suffix, on_lost),
        sink=sink,
        gates=gates_of(gate),
        description=f"Looked up in {table} by {', '.join(keys)}.",
    )
