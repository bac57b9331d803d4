"""Which values of a key a table of Postgres takes for equal: its unique index says so, and not the type alone.

    CREATE UNIQUE INDEX ON t (name COLLATE ignoring_case)     Ada and ADA are one row
    name text COLLATE ignoring_case, UNIQUE (name COLLATE "C")    Ada and ADA are two rows

An index compares by the operators of its operator class and by its own collation. Rows are sorted, told apart and
deleted by the same ones, so that `ON CONFLICT` never meets two rows that it takes for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weir.connectors.postgres.connection import Connection, quoted

_COLUMNS = """
SELECT i.indexrelid::int8 AS index, a.attname::text AS name,
  (SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname) FROM pg_amop m
    JOIN pg_operator o ON o.oid = m.amopopr JOIN pg_namespace n ON n.oid = o.oprnamespace
    WHERE m.amopfamily = c.opcfamily AND m.amoplefttype = c.opcintype AND m.amoprighttype = c.opcintype
      AND m.amopstrategy = 1) AS less,
  (SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname) FROM pg_amop m
    JOIN pg_operator o ON o.oid = m.amopopr JOIN pg_namespace n ON n.oid = o.oprnamespace
    WHERE m.amopfamily = c.opcfamily AND m.amoplefttype = c.opcintype AND m.amoprighttype = c.opcintype
      AND m.amopstrategy = 3) AS equals,
  CASE WHEN t.typtype <> 'p' THEN format('::%I.%I', tn.nspname, t.typname) ELSE '' END AS type,
  CASE WHEN l.oid IS NOT NULL THEN format(' COLLATE %I.%I', s.nspname, l.collname) ELSE '' END AS collation,
  coalesce(l.collisdeterministic, true) AS deterministic,
  EXISTS (SELECT 1 FROM pg_amproc p WHERE p.amprocfamily = c.opcfamily AND p.amproclefttype = c.opcintype
    AND p.amprocrighttype = c.opcintype AND p.amprocnum = 4) AS image
FROM pg_index i
CROSS JOIN LATERAL generate_subscripts(i.indkey, 1) AS k (at)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.at]
JOIN pg_opclass c ON c.oid = i.indclass[k.at]
JOIN pg_type t ON t.oid = c.opcintype
JOIN pg_namespace tn ON tn.oid = t.typnamespace
LEFT JOIN pg_collation l ON l.oid = i.indcollation[k.at]
LEFT JOIN pg_namespace s ON s.oid = l.collnamespace
WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnatts = i.indnkeyatts
ORDER BY i.indexrelid, k.at"""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of a unique index, as the index compares it.

    Attributes:
        name: The column's.
        type: A cast to the type that the operators compare, as SQL; empty where they compare the column's own.
        less: The index's operator that orders, as SQL.
        equals: The index's operator that tells what is equal, as SQL.
        collation: COLLATE and the index's collation, as SQL; empty where the type has none.
        deterministic: False: the collation takes texts for equal that differ.
        spelled: Equal values can differ in their bytes, as 1.0 and 1.00 do.
    """

    name: str
    type: str
    less: str
    equals: str
    collation: str
    deterministic: bool
    spelled: bool

    @property
    def equality(self) -> tuple[str, str]:
        """Return what decides whether two values are equal; a deterministic collation has no say."""
        return self.type + self.equals, "" if self.deterministic else self.collation

    def of(self, row: str) -> str:
        """Return a row's value of the column as the index compares it, without the collation."""
        return f"{row}.{quoted(self.name)}{self.type}"


UniqueKey = tuple[KeyColumn, ...]


def unique_keys(connection: Connection, table: str, names: Sequence[str]) -> list[UniqueKey]:
    """Return how each unique index on exactly these columns compares them, in the order of the names."""
    indexes: dict[int, dict[str, KeyColumn]] = {}
    for row in connection.rows(_COLUMNS, table):
        spelled = not (row["image"] and row["deterministic"])
        operators = row["type"], row["less"], row["equals"]
        column = KeyColumn(row["name"], *operators, row["collation"], row["deterministic"], spelled)
        indexes.setdefault(row["index"], {})[column.name] = column
    return [tuple(columns[name] for name in names) for columns in indexes.values() if columns.keys() == set(names)]


def widest(keys: Sequence[UniqueKey]) -> UniqueKey | None:
    """Return the key that takes for equal whatever one of the others does; None if no single one does."""
    return next((key for key in keys if all(_covers(key, other) for other in keys)), None)


def _covers(key: UniqueKey, other: UniqueKey) -> bool:
    return all(
        one.equality == another.equality or (another.deterministic and one.equality[0] == another.equality[0])
        for one, another in zip(key, other, strict=True)
    )


def newest(rows: str, key: UniqueKey, number: str) -> str:
    """Return a query for the last row of each key.

    Args:
        rows: A query in brackets, whose key columns have the table's types.
        number: The column by which rows are ordered.
    """
    columns = [f"{column.of('typed')}{column.collation}" for column in key]
    order = ", ".join(f"{value} USING {column.less}" for value, column in zip(columns, key, strict=True))
    return f"SELECT DISTINCT ON ({', '.join(columns)}) * FROM {rows} AS typed ORDER BY {order}, {number} DESC"


def matches(key: UniqueKey, stored: str, staged: str) -> str:
    """Return the condition that a row of the table and a staged one have one key."""
    pairs = (f"{column.of(stored)} {column.equals} ({column.of(staged)}{column.collation})" for column in key)
    return " AND ".join(pairs)
