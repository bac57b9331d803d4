"""The rights that a publish to Postgres needs, asked before a commit: afterwards its rows have to go into the table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from state_ops.errors import ConfigurationError
from weir.connectors.postgres.connection import Connection, literal, takes_no_writes

_ASKED = """
SELECT current_user::text AS role, current_setting('transaction_read_only') = 'on' AS read_only,
  has_database_privilege(current_database(), 'TEMPORARY') AS temporary, current_database()::text AS database,
  ARRAY(SELECT DISTINCT target || ' ' || needed FROM (VALUES {needs}) AS needs (target, needed, name)
    WHERE to_regclass(target) IS NOT NULL AND NOT CASE WHEN name = ''
      THEN has_table_privilege(to_regclass(target)::oid, needed)
      ELSE has_column_privilege(to_regclass(target)::oid, name, needed) END ORDER BY 1) AS lacking"""


def check(
    connection: Connection,
    where: str,
    table: str,
    markers: str,
    columns: Collection[str],
    key: Sequence[str],
    changes: bool,
) -> None:
    """Check that the role may do what a publish does. No lock is taken, and a table that is not there needs no right.

    Args:
        where: Of the sink, for errors.
        table: The sink's table, as SQL has it.
        markers: The table of its marker, as SQL has it.
        columns: Of the rows; all are columns of the table.
        key: Those by which rows replace each other.
        changes: Whether rows delete others.

    Raises:
        ConfigurationError: A right is missing.
        TransientError: The server takes no writes at the moment.
    """
    needs = [*_of_rows(table, columns, key, changes)]
    needs += [(markers, "SELECT", "checkpoint"), (markers, "UPDATE", "checkpoint")]
    values = ", ".join(f"({', '.join(map(literal, need))})" for need in needs)
    (answer,) = connection.rows(_ASKED.format(needs=values))
    if answer["read_only"]:
        raise takes_no_writes("its transactions are read-only", where)
    grants = [f"TEMPORARY ON DATABASE {answer['database']}"] if not answer["temporary"] else []
    for target in (table, markers):
        rights = [one.removeprefix(f"{target} ") for one in answer["lacking"] if one.startswith(f"{target} ")]
        grants += [f"{', '.join(rights)} ON {target}"] if rights else []
    if grants:
        raise ConfigurationError(
            f"The Postgres server refuses: permission denied, the role {answer['role']} lacks {'; '.join(grants)}.",
            where=where,
            next=" ".join(f"GRANT {grant} TO {answer['role']};" for grant in grants),
        )


def _of_rows(table: str, columns: Collection[str], key: Sequence[str], changes: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the table, a right and a column that rows need it on; no column: the right is the table's."""
    for name in columns:
        yield table, "INSERT", name
        if key:
            yield table, "SELECT", name
            if name not in key:
                yield table, "UPDATE", name
    if changes:
        yield table, "DELETE", ""
