"""Programs that some tests need and that no Python package brings: a server, a checker, a browser.

Without one a test is skipped with the reason, so that a laptop can run the others; where WEIR_REQUIRE_SERVERS=1, as
`.ci/run` sets it, it fails instead: a skip there would hide that nothing is tested.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

REQUIRED = "WEIR_REQUIRE_SERVERS"


def needs(program: str, package: str, places: Sequence[str] = ()) -> Path:
    """The program's path; else the test that asks is skipped, or fails where programs are required.

    package: of Debian, which brings it. places: directories that need not be on PATH, with wildcards; the last in order
    wins.
    """
    beside = sorted(str(path) for place in places for path in Path("/").glob(place.lstrip("/")))
    candidates = [shutil.which(program), *(shutil.which(program, path=place) for place in reversed(beside))]
    executable = next((Path(path) for path in candidates if path is not None), None)
    if executable is None:
        missing(f"there is no {program} here: apt install {package}")
    return executable


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where programs are required."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{reason} ({REQUIRED}=1: nothing is skipped)", pytrace=False)
    pytest.skip(reason)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
