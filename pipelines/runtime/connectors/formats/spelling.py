"""Column names that differ from the expected ones by capitals alone."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from state_ops.errors import InputError


def check_spelling(wanted: Collection[str], there: Collection[str], file: str, where: str) -> None:
    """Refuse a file that has an expected column in other capitals, which would count as absent.

    Args:
        wanted: The names of the columns that are read.
        there: The names of the file's columns.
        file: What to call the file.
        where: Its place as people know it.

    Raises:
        InputError: A column that is read is not in the file, and one with the same letters is.
    """
    others = {name.casefold(): name for name in there if name not in wanted}
    for name in wanted:
        if name not in there and (other := others.get(name.casefold())) is not None:
            raise InputError(
                f"{file} has a column {other!r}, which differs from {name!r} by capitals alone.",
                where=where,
                next=f"Call it {name!r} in the file, or move the file away; nothing of this epoch was applied.",
            )


def there_of(wanted: pa.Schema, there: Collection[str], where: str) -> pa.Schema:
    """Return the columns of a schema that a file has; all of them if it has none, which is to be refused.

    Raises:
        InputError: As `check_spelling`.
    """
    check_spelling(wanted.names, there, "The input file", where)
    found = [field for field in wanted if field.name in there]
    return pa.schema(found) if found else wanted
