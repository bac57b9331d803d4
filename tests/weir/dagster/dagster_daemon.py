"""A real daemon over the small pipeline, whose stages run without Spark, at the test's pace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml

from state_ops.coordination import lease
from state_ops.storage.storage import Storage
from tests.recovery.small import Bank
from tests.weir.dagster.served import HELD, HOLD
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import PROJECT

_PATIENCE = 400.0
_MODULE = "tests.weir.dagster.served"
# A daemon with a code server of its own makes a new one every minute, from the code as it is then; here more often.
_DAEMON = """
import sys
from dagster._daemon import controller
from dagster._daemon.cli import main
controller.RELOAD_WORKSPACE_INTERVAL = 15
main()
"""


@dataclass
class Served:
    """A daemon over the small pipeline. Its code server is its own, or else one that somebody else keeps up at
    `port`."""

    bank: Bank
    instance: dg.DagsterInstance
    port: int | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    spared: int | None = None

    @property
    def home(self) -> Path:
        return self.bank.site.root / "home"

    @property
    def workspace(self) -> Path:
        return self.bank.site.root / "workspace.yaml"

    @property
    def storage(self) -> Storage:
        return open_storage(self.bank.site.pipeline, self.bank.site.settings)[0]

    @property
    def lease(self) -> lease.Lease:
        holder = lease.read(self.storage)
        assert holder is not None, "nobody has run yet"
        return holder

    def start(self, *command: str) -> None:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
        with (self.home / "log").open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=PROJECT,
                    env={**mine, **self.bank.site.env, "DAGSTER_HOME": str(self.home)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def daemon(self) -> None:
        self.start("-c", _DAEMON, "run", "-w", str(self.workspace))

    def serve(self) -> None:
        """What a supervisor starts, and starts again: docs/how-to/dagster-by-itself.md."""
        self.start("-m", "dagster", "api", "grpc", "-m", _MODULE, "-h", "127.0.0.1", "-p", str(self.port))

    def submit(self, job: str) -> None:
        """Put a run into the queue, by a command that has a code server of its own, as the web server may have."""
        self.start("-m", "dagster", "job", "launch", "-w", str(self.workspace), "-j", job)
        self.spared = self.started[-1].pid

    def family(self) -> list[psutil.Process]:
        """Every process of this home, also what has lost its parent."""
        family = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("DAGSTER_HOME") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    family.append(process)
            except psutil.Error:
                continue
        return family

    def kill_code_servers(self) -> None:
        """SIGKILL to each that the daemon has: its newest, and an older one that lives for as long as a run of its
        own."""
        for process in self.family():
            with suppress(psutil.Error):
                if {"api", "grpc"} <= set(process.cmdline()) and process.ppid() != self.spared:
                    process.kill()

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} never came; runs: {self.runs()}\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-6000:]

    # -- what the test does to the pipeline

    def hold(self) -> None:
        (self.bank.site.root / HOLD).touch()

    def held(self) -> bool:
        """Whether an epoch has come to where it is held."""
        return (self.bank.site.root / HELD).exists()

    def let_go(self) -> None:
        (self.bank.site.root / HOLD).unlink()

    def head(self) -> int:
        head = self.bank.registry.head()
        return head.id if head is not None else 0

    # -- what Dagster knows

    def runs(self) -> dict[str, list[str]]:
        """By job, how its runs stand, oldest first."""
        statuses: dict[str, list[str]] = {}
        for run in reversed(self.instance.get_runs()):
            statuses.setdefault(run.job_name.removeprefix("small_"), []).append(run.status.value)
        return statuses

    def requeued(self, job: str) -> bool:
        """Whether its run has gone back into the queue because no code server could start it."""
        return any(
            len(self.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.PIPELINE_ENQUEUED).records)
            > 1
            for run in self.instance.get_runs(dg.RunsFilter(job_name=job))
        )


@pytest.fixture
def served(tmp_path, request) -> Iterator[Served]:
    """param: whether the code server is somebody else's to keep up."""
    options = {
        "WEIR_CHECKPOINTS__NUM_RETAINED": "20",
        "WEIR_DAGSTER__SENSOR_SECONDS": "5",
        "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "600",  # a barrier is a tick's, however long a server takes to come back
        "WEIR_DAGSTER__OBSERVE_SECONDS": "0",
        "WEIR_RUN__LINGER_SECONDS": "600",
    }
    bank = Bank.at(tmp_path / "site", **options)
    home = bank.site.root / "home"
    home.mkdir(parents=True)
    shutil.copyfile(PROJECT / "weir" / "local" / "dagster.yaml", home / "dagster.yaml")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own_module = {"python_module": {"module_name": _MODULE, "location_name": "weir"}}
    others = {"grpc_server": {"host": "127.0.0.1", "port": port, "location_name": "weir"}}
    (bank.site.root / "workspace.yaml").write_text(
        yaml.safe_dump({"load_from": [others if request.param else own_module]})
    )
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs()  # makes the databases: two processes that do so at once trip over each other
        instance.all_instigator_state()
        served = Served(bank, instance, port if request.param else None)
        try:
            if request.param:
                served.serve()
            served.daemon()
            yield served
        finally:
            while family := served.family():  # nobody else ends a run whose code server was killed
                for member in family:
                    with suppress(psutil.Error):
                        member.kill()
                for process in served.started:
                    process.wait(20)
