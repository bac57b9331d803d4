"""How many there are of a thing, as messages say it."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """A number with its noun: "1 file", "1,200 files".

    Args:
        what: The noun for one, whose plural ends with -s, -es or -ies.
    """
    if number == 1:
        return f"1 {what}"
    if what.endswith(("ch", "sh", "x", "s")):
        return f"{number:,} {what}es"
    return f"{number:,} {what[:-1]}ies" if what.endswith("y") and what[-2] not in "aeiou" else f"{number:,} {what}s"


def agrees(number: int, one: str, several: str) -> str:
    """The verb that goes with a number: "is" or "are"."""
    return one if number == 1 else several
