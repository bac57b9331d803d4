"""A pipeline of its own for each test, run here or in a child that is killed, and checked against the replay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import psutil
import pyarrow as pa

from pipelines import flights
from tests.replay import flights as replay
from weir.definition import Pipeline
from weir.epoch.model import EpochReport
from weir.inspection import state_reader
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT, Settings

_INJECTED = Path(__file__).parent / "injected"
_PATIENCE = 400.0  # for a JVM and Great Expectations to start beside other tests, on a machine that may be slow


@dataclass(frozen=True)
class Site:
    """One pipeline's storage, work directory and landing directory below `root`.

    options: further WEIR_ variables. module: where `pipeline` is.
    """

    root: Path
    options: dict[str, str] = field(default_factory=dict)
    pipeline: Pipeline = flights.pipeline
    module: str = "pipelines.flights"

    @property
    def env(self) -> dict[str, str]:
        pipeline = f"WEIR_PIPELINES__{self.pipeline.name.upper()}"
        return {
            "WEIR_STORAGE__ROOT": str(self.root / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(self.root / "work"),
            f"{pipeline}__PARAMS": json.dumps({"landing": str(self.landing)}),
            f"{pipeline}__OBJECT": f"{self.module}:pipeline",
            "WEIR_RUN__POLL_SECONDS": "0.05",
            **self.options,
        }

    @property
    def settings(self) -> Settings:
        return settings.load(self.env)

    @property
    def landing(self) -> Path:
        return self.root / "landing"

    @property
    def storage(self) -> Path:
        return self.root / "storage" / self.pipeline.directory

    def land(self, days: list[Path]) -> None:
        self.landing.mkdir(parents=True, exist_ok=True)
        for day in days:
            os.link(day, self.landing / day.name)

    def copied_to(self, root: Path) -> Site:
        """The same site at another place; what Weir stores names no absolute path."""
        shutil.copytree(self.root, root)
        return replace(self, root=root)

    def run(self, *, drain: bool = False) -> list[EpochReport]:
        """`weir run ... --until-caught-up [--drain]`, in this process with its Spark."""
        return list(run(self.pipeline, self.settings, RunOptions(until_caught_up=True, drain=drain)))

    # -- what is there, by files alone

    def table(self, name: str) -> pd.DataFrame:
        return replay.read_delta(self.storage / "tables" / name)

    def registry(self, name: str) -> pd.DataFrame:
        return replay.read_delta(self.storage / "registry" / name)

    def head(self) -> int | None:
        rows = self.registry("checkpoints")
        return int(rows["id"].max()) if len(rows) else None

    def objects(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of every file in storage but the lease and other requests to the coordinator."""
        objects = {}
        for file in self.storage.rglob("*"):
            name = file.relative_to(self.storage).as_posix()
            if file.is_file() and not name.startswith("coordinator/"):
                objects[name] = (file.stat().st_size, file.stat().st_mtime_ns)
        return objects

    # -- checks

    def assert_exact(self, days: int) -> None:
        """After a drain: the tables and the state are, row by row, what a replay of the raw input says."""
        expected = replay.expected(days)
        self.assert_exact_so_far(days)
        replay.assert_same(self.table("airport_hourly"), expected.hours, replay.HOUR_KEY, "airport_hourly")
        assert self.state("airport_hourly").empty, "a drained pipeline has no open windows"

    def assert_exact_so_far(self, days: int) -> None:
        """The same without a drain, for what does not wait for windows to close."""
        expected = replay.expected(days)
        replay.assert_same(self.table("aircraft_legs"), expected.legs, replay.LEG_KEY, "aircraft_legs")
        replay.assert_same(self.state("aircraft_rotation"), expected.aircraft, replay.AIRCRAFT_KEY, "the state")
        assert self.table("airport_hourly_late").empty

    def state(self, stage: str) -> pd.DataFrame:
        tables = list(state_reader.scan(self.pipeline, self.settings, stage))
        return pa.concat_tables(tables).to_pandas(use_threads=False) if tables else pd.DataFrame()

    def left_of_exchange(self) -> list[str]:
        """Blocks of rows that lie in storage."""
        return [name for name in self.objects() if name.startswith("exchange/")]

    def assert_no_orphans(self) -> None:
        """Every object is named by a retained checkpoint, or is in its table's log; and what is named is there."""
        checkpoints = self.registry("checkpoints")
        listed = self.registry("state_files")
        named = listed[listed["commit_id"].isin(checkpoints["commit_id"])]
        assert len(listed) == len(named), "a listing belongs to no checkpoint"
        assert len(named) == checkpoints["files"].sum()
        kept = named[named["kind"].isin(["state", "channel"])]
        stored = {name: size for name, (size, _) in self.objects().items() if name.startswith(("state/", "channels/"))}
        assert not self.left_of_exchange(), "blocks of the exchange"
        wanted = dict(zip(kept["path"], kept["bytes"], strict=True))
        assert stored.keys() - wanted.keys() == set(), "objects that no retained checkpoint names"
        assert wanted.items() - stored.items() == set(), "objects that are gone or have another size"
        for sink in self.pipeline.sinks:
            name, table = sink.name, self.storage / "tables" / sink.name
            staged = {file for file in table.rglob("*") if file.is_file() and "_delta_log" not in file.parts}
            removed = {table / path for path in replay.removed(table)}  # by a rewind; Delta's vacuum deletes them
            assert staged - removed == replay.data_files(table), f"data files that are not in the log of {name}"


# -- children


@dataclass
class Child:
    """`weir run PIPELINE --until-caught-up` in a process of its own, which halts at one point of one epoch."""

    process: subprocess.Popen
    marker: Path
    release: Path
    output: Path

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.marker.exists():
            assert self.process.poll() is None, f"it ended before it got there:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"it never got there:\n{self.output.read_text()}"
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        """The coordinator, its JVM, and the Python daemon and workers of that; the coordinator first."""
        coordinator = psutil.Process(self.process.pid)
        return [coordinator, *coordinator.children(recursive=True)]

    def suspend(self) -> None:
        """SIGSTOP to the whole family, as if its host had stalled."""
        for process in self.family():
            process.suspend()

    def resume(self) -> None:
        """Let the family go on, past the point where it was held."""
        self.release.touch()
        for process in self.family():
            process.resume()

    def kill(self) -> None:
        """SIGKILL to the whole family, which leaves none of them the time to tidy up after another's death."""
        family = self.family()
        names = [process.name() for process in family]
        assert "java" in names and sum("python" in name for name in names) >= 3, names
        for process in family:
            process.suspend()
        for process in family:
            process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive


@contextmanager
def child(site: Site, point: str, epoch: int) -> Iterator[Child]:
    """Start a coordinator that will halt at `point`; whatever is left of it at the end is killed."""
    marker, release, output = (site.root / name for name in ("held", "release", "child.log"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    env |= site.env
    env |= {"HOLD_AT": point, "HOLD_EPOCH": str(epoch), "HOLD_MARKER": str(marker), "HOLD_RELEASE": str(release)}
    env["PYTHONPATH"] = os.pathsep.join([str(_INJECTED), *filter(None, [env.get("PYTHONPATH")])])
    # It works for a minute at most: the better compiler would cost more than it gives.
    env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    # The module, not the script `weir`: that would run the installed code, wherever these tests are.
    command = [sys.executable, "-m", "weir.cli.main", "run", site.pipeline.name, "--until-caught-up"]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    held = Child(process, marker, release, output)
    try:
        yield held
    finally:
        if process.poll() is None:
            for member in reversed(held.family()):
                member.kill()
            process.wait()
