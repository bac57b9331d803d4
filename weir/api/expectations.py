"""`expect`: gates on rows, state and figures of each epoch, and `on_state` and `on_table`, on what is restored."""

from __future__ import annotations

from typing import Any

from weir.definition import Expected, Gate


def expect(
    expectation: str,
    *,
    on_failure: str = "hold",
    of: str = "rows",
    quarantine_at_most: float | None = None,
    **arguments: Any,
) -> Gate:
    """Return a gate: an expectation of Great Expectations, evaluated in each epoch before the commit.

    See docs/how-to/gates.md.

    Args:
        expectation: The name of the expectation's class.
        on_failure: What happens if the expectation fails. "hold" declines the epoch and ends the run: state, offsets
            and tables stay as they were. "warn" lets the epoch go on: the failed verdict is in its report, its
            checkpoint's row and the log. "quarantine" replays the epoch without the source's rows that fail, and
            appends these to the table <stage>_quarantine. It is for expectations on each row, in a stage that reads a
            source.
        of: The rows that are checked. "rows": those that the stage hands out in the epoch. "state": at most 10,000 rows
            of the stage's state as it would be committed, columns as in `weir state scan`. "figures": one row with the
            stage's figures of the epoch: rows_in, rows_out, rows_late, bytes_total and so on.
        quarantine_at_most: The share of the source's rows that may be set aside, 0 to 1; 0.1 by default.
        **arguments: The expectation's own arguments.

    Example:
        >>> from weir import delta, expect, files, select
        >>> known = expect("ExpectColumnValuesToNotBeNull", column="dest", on_failure="warn")
        >>> flights = select("flights", files("{landing}/*.parquet"), sink=delta.append("flights"), gate=known)
        >>> [gate.title for gate in flights.gates]
        ['ExpectColumnValuesToNotBeNull(column="dest")']
    """
    return Gate(expectation, tuple(sorted(arguments.items())), on_failure, of, quarantine_at_most)


def on_state(stage: str, gate: Gate) -> Expected:
    """Expect a gate to hold for a sample of a stage's state before a restore: for `Pipeline(on_restore=...)`.

    Args:
        stage: The stage's uid.
        gate: The gate, on columns as `weir state scan` shows them.

    Example:
        >>> from weir import expect, on_state
        >>> expected = on_state("totals", expect("ExpectColumnValuesToBeBetween", column="flights", min_value=0))
        >>> expected.of, expected.name
        ('state', 'totals')
    """
    return Expected("state", stage, gate)


def on_table(table: str, gate: Gate) -> Expected:
    """Expect a gate to hold for the newest rows of a table before a restore: for `Pipeline(on_restore=...)`.

    Args:
        table: The sink's name.
        gate: The gate, on the table's columns.

    Example:
        >>> from weir import Pipeline, delta, expect, files, on_table, select
        >>> flights = select("flights", files("{landing}/*.parquet"), sink=delta.append("flights"))
        >>> known = on_table("flights", expect("ExpectColumnValuesToNotBeNull", column="dest"))
        >>> Pipeline("flights", (flights,), on_restore=(known,)).on_restore[0].name
        'flights'
    """
    return Expected("table", table, gate)
