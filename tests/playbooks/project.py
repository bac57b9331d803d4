"""A project directory as the README's user has it, its pipeline without a JVM, and what may happen to it between two
commands.

project/configs, project/pipelines/*.py    copies, which pages and tests change; the rest is linked
project/.weir/{storage,work,landing}       as configs/dev.yaml has it
bin/weir                                   the installed command, but of this tree, its stages run in its own process
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipelines import flights
from tests.playbooks.bucket import KEY, SECRET, Bucket, bucket
from tests.recovery.harness import Site
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT

_PATIENCE = 300.0
_QUICK = {
    "epoch": {"max_files": 1},
    "run": {"poll_seconds": 0.05, "linger_seconds": 0},
    "lease": {"heartbeat_seconds": 1},
    "checkpoints": {"interval_seconds": 1},
}
_FORKED = """#!/bin/sh
exec {python} -I -S {forked} ask {door} {command} "$@"
"""
_COMMAND = """#!{python}
from weir.ownership import ownership
from weir.cli.main import process
from weir.execution.in_process import InMemoryExecutor

ownership.SparkExecutor = lambda *_, **__: InMemoryExecutor()
process()
"""


class Landing(Site):
    """Where configs/dev.yaml has the flights land."""

    @property
    def landing(self) -> Path:
        return self.root / "landing" / "flights"


@dataclass
class Project:
    """root: of project and bin. door: of `forked`. days: one file a day, of which the first `landed` have arrived.
    shown: by the last command or action. retired: fields of states that a page's new version has added, and that the
    version of the tests does without."""

    root: Path
    days: list[Path]
    door: Path
    landed: int = 0
    kept: int = 0
    shown: str = ""
    retired: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    coordinator: subprocess.Popen | None = None
    memory: dict[str, str | None] = field(default_factory=dict)
    bucket: Bucket | None = None
    wrong: list[Path] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)

    options: dict[str, str] = field(default_factory=lambda: {"WEIR_EPOCH__MAX_FILES": "1"})

    # -- the directory

    @property
    def folder(self) -> Path:
        return self.root / "project"

    @property
    def config(self) -> Path:
        return self.folder / "configs" / "dev.yaml"

    @property
    def site(self) -> Landing:
        """What is in storage, for who compares it. The root is a local one."""
        return Landing(self.folder / ".weir", self.options, flights.pipeline)

    def make(self) -> Project:
        folder = self.folder
        shutil.copytree(PROJECT / "configs", folder / "configs", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "pipelines").mkdir()
        for module in (PROJECT / "pipelines").glob("*.py"):
            shutil.copy2(module, folder / "pipelines")
        for name in ("weir", "state_ops", "assets", "infra", "workspace.yaml"):
            (folder / name).symlink_to(PROJECT / name)
        (folder / "pyproject.toml").write_text('[tool.weir]\npackage = "pipelines"\n')
        gate = next(line for line in (PROJECT / "pipelines" / "flights.py").read_text().splitlines() if "gate=" in line)
        self.edit("pipelines/flights.py", gate + "\n", "")  # Great Expectations takes 4 s to load, in each command
        self.configure(_QUICK)
        self.make_command(folder)
        return self

    def make_command(self, folder: Path) -> None:
        """`weir` for the project in that folder: in a fork of `door`, and as a process of its own."""
        command, forked = self.root / "weir", self.root / "bin" / "weir"
        forked.parent.mkdir()
        command.write_text(_COMMAND.format(python=sys.executable))
        forked.write_text(
            _FORKED.format(
                python=sys.executable, forked=Path(__file__).with_name("forked.py"), door=self.door, command=command
            )
        )
        for script in (command, forked):
            script.chmod(0o755)
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("WEIR_", "DAGSTER_"))}
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        path = [str(self.root / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.env = inherited | {"PATH": os.pathsep.join(path), "PYTHONPATH": str(folder)}

    def configure(self, more: Mapping[str, Any]) -> None:
        """Merge settings into the configuration file."""

        def merged(base: Any, other: Any) -> Any:
            if not (isinstance(base, dict) and isinstance(other, Mapping)):
                return other
            return base | {key: merged(base.get(key), value) for key, value in other.items()}

        settings = merged(yaml.safe_load(self.config.read_text()), more)
        self.config.write_text(yaml.safe_dump(settings, sort_keys=False))

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))

    # -- commands

    def bash(self, commands: str, timeout: float = _PATIENCE) -> tuple[int, str]:
        """Run them as a person would paste them; the exit code of the first that fails, and what they wrote."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        self.shown = done.stdout
        return done.returncode, done.stdout

    def weir(self, *arguments: str, code: int = 0) -> str:
        """A command that the page does not name, because it only sets the scene."""
        ended, shown = self.bash(" ".join(["weir", *arguments]))
        assert ended == code, f"weir {' '.join(arguments)} ended with {ended}:\n{shown}"
        return shown

    # -- what happens meanwhile

    def land(self, count: int = 1) -> None:
        self.site.land(self.days[self.landed : self.landed + count])
        self.landed += count

    def deliver(self, table: pa.Table, name: str) -> None:
        """A file arrives whole, over one of its name that may be there."""
        self.site.landing.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, self.site.landing / f".{name}")
        (self.site.landing / f".{name}").rename(self.site.landing / name)

    def status(self) -> dict[str, Any]:
        return json.loads(self.weir("status", "flights", "--json"))

    @property
    def log(self) -> Path:
        return self.root / "coordinator.log"

    def start(self, arguments: str = "run flights", prefix: str = "") -> None:
        """A coordinator in a process of its own, its output in a log."""
        assert self.coordinator is None or self.coordinator.poll() is not None
        with self.log.open("wb") as sink:
            self.coordinator = subprocess.Popen(
                ["bash", "-c", f"{prefix} exec {self.root / 'weir'} {arguments}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def until(self, condition: Callable[[], object], what: str, log: Path | None = None) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"it never came: {what}\n{(log or self.log).read_text()}"
            time.sleep(0.05)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until_read(self) -> None:
        """Until the coordinator has completed an epoch for every file that has landed."""

        def read() -> bool:
            assert self.coordinator is not None
            assert self.coordinator.poll() is None, f"it ended:\n{self.output()}"
            return self.files_read() >= self.landed

        self.until(read, "all files read")

    def files_read(self) -> int:
        if self.bucket is not None:
            return self.landed - sum(self.status()["lag"].values())
        begun = (self.site.storage / "registry" / "checkpoints" / "_delta_log" / f"{0:020}.json").exists()
        rows = self.site.registry("checkpoints") if begun else ()
        if not len(rows):
            return 0
        newest = rows.loc[rows["id"].idxmax()]
        return int(json.loads(newest["offsets"])["landing"]["files"])

    def signal(self, number: int) -> None:
        assert self.coordinator is not None
        assert self.coordinator.poll() is None, f"it ended:\n{self.output()}"
        os.killpg(self.coordinator.pid, number)
        if number == signal.SIGKILL:
            self.coordinator.wait()

    def ended(self) -> int:
        """How the coordinator ended."""
        assert self.coordinator is not None
        return self.coordinator.wait(_PATIENCE)

    def close(self) -> None:
        """Whatever is left of the coordinator is killed."""
        if self.coordinator is not None and self.coordinator.poll() is None:
            for process in [psutil.Process(self.coordinator.pid), *psutil.Process(self.coordinator.pid).children(True)]:
                process.kill()
            self.coordinator.wait()
        self.ending.close()

    def into_a_bucket(self) -> None:
        """From now on the storage root is on S3."""
        self.bucket = self.ending.enter_context(bucket())
        self.env |= {KEY: "test", SECRET: "test"}
        self.configure({"storage": self.bucket.settings})

    # -- Dagster

    def tick(self, sensor: str) -> str:
        """What one tick of a sensor says, on real storage: why it skipped, or why it asked for a run."""
        import dagster as dg

        from weir.dagster.factory import weir_definitions
        from weir.dagster.names import REASON

        defs = weir_definitions([flights.pipeline], self.site.settings)
        (sensor_def,) = [each for each in defs.sensors if each.name == f"flights_{sensor}"]
        with dg.DagsterInstance.ephemeral() as instance:
            context = dg.build_sensor_context(instance=instance, cursor=self.memory.get(sensor), definitions=defs)
            outcome = sensor_def.evaluate_tick(context)
        self.memory[sensor] = outcome.cursor
        asked = [f"{request.job_name}: {request.tags[REASON]}" for request in outcome.run_requests or ()]
        return "\n".join(asked) if asked else str(outcome.skip_message)

    # -- the end

    def assert_exact(self) -> None:
        """Close every window; then state and tables are what a replay of the raw input says."""
        if self.bucket is not None:  # as it is there, wherever it is
            self.bucket.copy_to(self.folder / ".weir" / "storage")
        asked = RunOptions(until_caught_up=True, drain=True)
        list(run(replace(self.site.pipeline, retired=self.retired), self.site.settings, asked, InMemoryExecutor()))
        self.site.assert_exact(self.landed)
