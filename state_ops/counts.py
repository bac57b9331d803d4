"""Numbers of things, as messages say them."""

from __future__ import annotations


def counted(number: int, what: str, one: str = "", several: str = "") -> str:
    """Return a number with its noun, and perhaps its verb: "1 file", "1,200 files are".

    Args:
        what: The noun for one, whose plural ends with -s, -es or -ies.
        one: The verb for one, with `several` for any other number.
    """
    if number != 1:
        if what.endswith("y") and what[-2] not in "aeiou":
            what = f"{what[:-1]}ies"
        else:
            what += "es" if what.endswith(("nch", "sh", "x", "ss")) else "s"
    return f"{number:,} {what} {one if number == 1 else several}".rstrip()


def agrees(number: int, one: str, several: str) -> str:
    """Return the verb that goes with a number: "is" or "are"."""
    return one if number == 1 else several
