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
    if (found := respelled(wanted, there)) is not None:
        name, other = found
        raise InputError(
            f"{file} has a column {other!r}, which differs from {name!r} by capitals alone.",
            where=where,
            next=f"Call it {name!r} in the file, or move the file away; nothing of this epoch was applied.",
        )


def respelled(wanted: Collection[str], there: Collection[str]) -> tuple[str, str] | None:
    """Return the first wanted name that is not there, and the same letters in other capitals that are; None: there is
    none."""
    absent = [name for name in wanted if name not in there]
    if not absent:
        return None
    others = {name.casefold(): name for name in there if name not in wanted}
    return next(((name, others[name.casefold()]) for name in absent if name.casefold() in others), None)


def there_of(wanted: pa.Schema, there: Collection[str], where: str, *, partial: bool) -> pa.Schema:
    """Return the columns of a schema that a file has; all of them if it may lack none, or has none, which is to be
    refused.

    Args:
        partial: A file may lack columns.

    Raises:
        InputError: As `check_spelling`.
    """
    check_spelling(wanted.names, there, "The input file", where)
    found = [field for field in wanted if field.name in there] if partial else []
    return pa.schema(found) if found else wanted
