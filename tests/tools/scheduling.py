"""Which tests run in the same process: those of a file, and all files whose tests ask for the same server.

A server starts once in each process that needs it. Two JVMs for all tests on Spark, one for `tests/runtime` and one for
the others, cost less than one in each of four processes, and leave neither process with more to do than the rest.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
_SERVERS = ("kafka", "spark")  # fixtures that start a JVM; of a file that asks for both, the first counts
_NAMES = "|".join(_SERVERS)
_ASKS = re.compile(rf"def \w+\([^)]*\b({_NAMES})\b|usefixtures\(\"({_NAMES})\"\)|getfixturevalue\(\"({_NAMES})\"\)")


@cache
def scope_of(file: str) -> str:
    """The file itself, or what all files that ask for one server have in common."""
    asked = {name for names in _ASKS.findall((ROOT / file).read_text()) for name in names}
    server = next((server for server in _SERVERS if server in asked), file)
    return f"{server} of runtime" if server == "spark" and file.startswith("tests/runtime/") else server


class ServerScheduling(LoadFileScheduling):
    """`--dist loadfile`, where files that need the same server count as one file."""

    def _split_scope(self, nodeid: Any) -> str:
        return scope_of(nodeid.split("::", 1)[0])
