"""Real days of flights, and a pipeline to land them in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from infra import flights_input
from tests.recovery.harness import Site
from tests.tools import described
from weir.cli import main, running


@pytest.fixture(scope="session")
def days(tmp_path_factory) -> list[Path]:
    return flights_input.prepare(tmp_path_factory.mktemp("flights") / "days")


@pytest.fixture
def site(tmp_path) -> Callable[..., Site]:
    """Makes a site: `site(max_files=7, parallelism=2)`. heartbeat: seconds."""

    def make_site(*, max_files: int, parallelism: int = 2, heartbeat: float = 5) -> Site:
        options = {
            "WEIR_EPOCH__MAX_FILES": str(max_files),
            "WEIR_SPARK__PARALLELISM": str(parallelism),
            "WEIR_LEASE__HEARTBEAT_SECONDS": str(heartbeat),
        }
        return Site(tmp_path / "site", options)

    return make_site


class Ended(NamedTuple):
    """How a command ended. err: what it wrote to stderr; out: to stdout."""

    code: int
    err: str
    out: str


@pytest.fixture
def weir(monkeypatch, capsys) -> Callable[..., Ended]:
    """The weir command in this process, with a site's configuration: `weir(site, "run", "flights")`."""

    def called(of: Site, *arguments: str, **env: str) -> Ended:
        with monkeypatch.context() as patched:
            for name, value in {**of.env, **env}.items():
                patched.setenv(name, value)
            patched.setattr(sys, "argv", ["weir", *arguments])
            patched.setattr(running, "_interrupt_on_term", lambda: None)  # the tests' own process keeps its signals
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main.main()
        structlog.reset_defaults()  # its logs went to a stderr that is gone now
        written = capsys.readouterr()
        described.check(arguments, written.out)
        return Ended(int(ended.value.code or 0), written.err, written.out)

    return called
