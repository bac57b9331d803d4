"""Which tests run in the same process: those of a file, and all files whose tests ask for the same server.

A server starts once in each process that needs it. Two JVMs for all tests on Spark, one for `tests/weir` and one for
the others, cost less than one in each of four processes, and leave neither process with more to do than the rest. They
begin first, since nothing fills the other processes while the last of them is busy. Of `make test-long`, whose tests
take seconds to minutes each, every test that needs no server goes to whichever process is free.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
_SERVERS = ("kafka", "spark", "postgres")  # of a file that asks for several, the first counts
_NAMES = "|".join(_SERVERS)
_ASKS = re.compile(rf"def \w+\([^)]*\b({_NAMES})\b|usefixtures\(\"({_NAMES})\"\)|getfixturevalue\(\"({_NAMES})\"\)")


@cache
def server_of(file: str) -> str | None:
    """What all files that ask for one server have in common."""
    path = ROOT / file
    text = path.read_text() if path.is_file() else ""  # a suite that lies elsewhere may take this conftest.py
    asked = {name for names in _ASKS.findall(text) for name in names}
    server = next((server for server in _SERVERS if server in asked), None)
    return f"{server} of runtime" if server == "spark" and file.startswith("tests/weir/") else server


def servers_first(items: list[pytest.Item]) -> None:
    """Put tests that share a server in front of the others."""
    items.sort(key=lambda item: server_of(_file_of(item.nodeid)) is None)


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


class ServerScheduling(LoadFileScheduling):
    """`--dist loadfile`, where files that need the same server count as one file, and each long test as a file."""

    def _split_scope(self, nodeid: Any) -> str:
        alone = nodeid if self.config.getvalue("markexpr") == "long" else _file_of(nodeid)
        return server_of(_file_of(nodeid)) or alone
