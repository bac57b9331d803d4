"""The place of a branch, and the names in its registry for objects of the pipeline that it was forked from.

branches/<uuid>/...   below the pipeline's root: registry, objects, tables and coordinator of the branch's own
parent/<path>         in a branch's listings: an object of that pipeline. It is read, and never written or deleted
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BRANCHES = "branches"
PARENT = "parent/"
_BRANCH = re.compile(rf"(.+)/{BRANCHES}/[0-9a-f]{{32}}")


@dataclass(frozen=True, slots=True)
class Branch:
    """A fork of a pipeline.

    Attributes:
        name: As people call it.
        id: Its directory's, a uuid in hex.
    """

    name: str
    id: str


def pinned(name: str, reason: str) -> Branch:
    """Return the branch of a pin of that kind, whose reason begins with the directory's name."""
    return Branch(name, reason.partition(" ")[0])


def parent_uri(uri: str) -> str | None:
    """Return the root of the storage that a branch's storage lies in; None: it is no branch's."""
    match = _BRANCH.fullmatch(uri)
    return match[1] if match else None


def is_inherited(path: str) -> bool:
    """Return whether a path in a listing names an object that the branch only reads."""
    return path.startswith(PARENT)


def inherited(path: str) -> str:
    """Return the name in a branch for an object of the pipeline that the branch was forked from."""
    return f"{PARENT}{path}"


def own_of_parent(path: str) -> str:
    """Return the path by which the pipeline itself names an object."""
    return path.removeprefix(PARENT)


def branch_of(path: str) -> str | None:
    """Return the branch in whose directory a path of a pipeline's storage lies; None if in none."""
    top, _, rest = path.partition("/")
    return rest.partition("/")[0] if top == BRANCHES else None
