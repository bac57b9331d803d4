"""A real webserver and a real daemon, with a person at the pages: a headless Chromium, driven by playwright.

Nobody calls Weir here: sensors start runs, the test lands files, kills a coordinator, clicks. What comes of it is compared with pandas.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from configs.settings import PROJECT, Settings, load
from infra import dagster_home, flights_input
from pipelines import flights
from pipelines.runtime.tenure import open_storage
from state_ops import lease
from tests.replay import flights as replay
from tests.servers import needs

_PATIENCE = 240.0  # a JVM and Great Expectations start within it, on two busy processors
_SHOT = {"width": 1440, "height": 900}


@dataclass
class Site:
    """Dagster at work on flights, below one temporary directory."""

    root: Path
    port: int
    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def landing(self) -> Path:
        return self.root / "landing"

    @property
    def settings(self) -> Settings:
        return load(self.environment)

    @property
    def storage(self):
        return open_storage(flights.pipeline, self.settings)[0]

    @property
    def registry(self):
        return open_storage(flights.pipeline, self.settings)[1]

    def start(self, *command: str) -> None:
        with (self.root / f"{command[0]}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [dagster_home.program(command[0]), *command[1:]],
                    cwd=PROJECT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.root.glob("*.log")))

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} never came\n{self.log()}"
            time.sleep(0.3)

    def land(self, days: Path, count: int) -> None:
        flights_input.land(days, self.landing, count=count)

    def read_all(self) -> bool:
        """Whether every file that has landed is in a checkpoint."""
        head = self.registry.head()
        return head is not None and head.offsets["landing"]["files"] == len(list(self.landing.glob("*.parquet")))

    def runs(self) -> list[dict]:
        """Dagster's runs, newest first, as its web server tells them."""
        asked = "{ runsOrError { ... on Runs { results { runId jobName status tags { key value } } } } }"
        return self.ask(asked)["runsOrError"]["results"]

    def said(self, words: str) -> bool:
        """Whether one of the last ticks of the checkpoint sensor says so."""
        asked = """query ($name: String!) { sensorOrError(sensorSelector: {repositoryName: "__repository__",
            repositoryLocationName: "weir", sensorName: $name}) { ... on Sensor { sensorState { ticks(limit: 5) { skipReason } } } } }"""
        state = self.ask(asked, name="flights_checkpoint_sensor")["sensorOrError"]["sensorState"]
        return any(words in (tick["skipReason"] or "") for tick in state["ticks"])

    def ask(self, query: str, **variables) -> dict:
        import urllib.request

        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["data"]


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    needs("chromium", "chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WEIR_")},
        "DAGSTER_HOME": str(tmp_path / "home"),
        "WEIR_ENV": "dev",
        "WEIR_STORAGE__ROOT": str(tmp_path / "storage"),
        "WEIR_LOCAL__WORK_DIR": str(tmp_path / "work"),
        "WEIR_PIPELINES__FLIGHTS__PARAMS": json.dumps({"landing": str(tmp_path / "landing")}),
        "WEIR_EPOCH__MAX_FILES": "3",
        "WEIR_RUN__LINGER_SECONDS": "5",
        "WEIR_DAGSTER__SENSOR_SECONDS": "5",
        "WEIR_DAGSTER__OBSERVE_SECONDS": "0",
    }
    made = Site(tmp_path, port, environment)
    made.landing.mkdir()
    (tmp_path / "home").mkdir()
    shutil.copyfile(PROJECT / "infra" / "dagster.yaml", tmp_path / "home" / "dagster.yaml")
    workspace = str(PROJECT / "workspace.yaml")
    made.start("dagster-daemon", "run", "-w", workspace)
    made.start("dagster-webserver", "-w", workspace, "-h", "127.0.0.1", "-p", str(port))
    try:
        yield made
    finally:
        for process in made.processes:
            dagster_home.end(process)


@pytest.fixture
def page(site):
    """A browser's page, once the web server answers."""
    from playwright.sync_api import sync_playwright

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", site.port)) == 0

    site.until(answers, "the web server")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(needs("chromium", "chromium")), args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_page(viewport=_SHOT, base_url=f"http://127.0.0.1:{site.port}")
        opened.set_default_timeout(90_000)
        yield opened
        browser.close()


@pytest.mark.timeout(900)
def test_a_day_at_the_pages(site, page, days):
    shots = os.environ.get("PAGES_SHOTS")

    def shot(name: str) -> None:
        if shots:
            page.wait_for_timeout(1500)
            page.screenshot(path=str(Path(shots) / f"{name}.png"))

    # The graph is there, and the sensor is on without anybody having turned it on.
    site.land(days, 6)
    names = ("landing", "aircraft_rotation", "airport_hourly", "aircraft_legs", "checkpoint", "restore_drill")
    shows(page, "/locations/weir/asset-groups/flights/lineage", *names)
    site.until(site.read_all, "the first checkpoints")

    # Epochs appear on the checkpoint's page as they complete.
    shows(page, "/assets/flights/checkpoint?view=events", "ms to commit", "Observed in run")
    shot("epochs")

    # The tick says what it did and why.
    shows(page, "/locations/weir/sensors/flights_checkpoint_sensor", "flights_restore_job", "requested")
    shot("sensor")

    # A coordinator is killed in the middle of its work. Nobody does anything.
    site.until(lambda: not lease.alive(lease.read(site.storage)), "the end of the first run")
    site.land(days, 24)
    before = site.registry.head().id
    site.until(lambda: site.registry.head().id > before and lease.alive(lease.read(site.storage)), "the second run")
    killed = lease.read(site.storage)
    os.kill(killed.pid, signal.SIGKILL)
    assert not site.read_all(), "it was to be killed in the middle"
    site.until(site.read_all, "what the restore resumed")
    site.until(lambda: lease.read(site.storage).stopped, "its end")
    by_job = {run["jobName"]: run for run in reversed(site.runs())}
    assert next(run for run in site.runs() if run["runId"] == killed.run_id)["status"] == "FAILURE"
    restored = by_job["flights_restore_job"]
    tags = {tag["key"]: tag["value"] for tag in restored["tags"]}
    assert tags["weir/generation"] == str(killed.generation)
    assert [run["jobName"] for run in site.runs()].count("flights_restore_job") == 1
    site.until(lambda: site.runs()[0]["status"] == "SUCCESS", "the end of the restore")

    # Its checks are green.
    shows(page, "/assets/flights/restore_drill?view=checks&checkDetail=restorable", "a run went on from it")
    shows(page, "/assets/flights/checkpoint?view=checks", "last_run", "Passed")
    shot("checks")
    shows(page, "/assets/flights/checkpoint?view=events", "Materialized in run")
    shot("history")

    # A person launches a job.
    page.goto("/locations/weir/jobs/flights_retention_and_fsck/playground")
    page.get_by_role("button", name="Launch Run").click()
    site.until(
        lambda: any(
            run["jobName"] == "flights_retention_and_fsck" and run["status"] == "SUCCESS" for run in site.runs()
        ),
        "the job that was launched",
    )

    # A day with an impossible delay lands: the gate holds, the check is red, the sensor waits for a person.
    exact = site.registry.head().id
    bad = days / "flights-2013-12-31.parquet"
    table = pq.read_table(bad)
    column = table.column_names.index("dep_delay")
    delays = table.column("dep_delay").to_pylist()
    delays[next(i for i, value in enumerate(delays) if value is not None)] = 99_999.0
    pq.write_table(table.set_column(column, table.schema.field(column), [delays]), site.landing / ".bad")
    (site.landing / ".bad").rename(site.landing / "flights-2013-12-31.parquet")
    site.until(
        lambda: any(run["status"] == "FAILURE" and run["runId"] != killed.run_id for run in site.runs()), "the hold"
    )
    shows(page, "/assets/flights/aircraft_rotation?view=checks", "column_values_to_be_between_dep_delay", "Failed")
    shot("gate")
    assert site.registry.head().id == exact
    site.until(lambda: site.said("held: A quality gate"), "the tick that waits")

    # The person takes the file away, and clicks Materialize.
    (site.landing / "flights-2013-12-31.parquet").unlink()
    site.land(days, 60)
    page.goto("/assets/flights/checkpoint")
    page.get_by_role("button", name="Materialize", exact=False).first.click()
    page.get_by_role("button", name="Confirm").click()  # its stages and tables come along
    site.until(lambda: lease.alive(lease.read(site.storage)) and site.registry.head().id > exact, "its first epoch")

    # In the middle of it, the person cancels the run: lease and pool are free, and sensors begin nothing.
    page.goto(f"/runs/{lease.read(site.storage).run_id}")
    page.get_by_role("button", name="Terminate").first.click()
    page.wait_for_timeout(1000)
    shot("terminate")
    page.get_by_role("dialog").get_by_role("button", name="Terminate", exact=False).last.click()
    site.until(lambda: lease.read(site.storage).stopped, "the end of what was cancelled")
    assert not site.read_all(), "it was to be cancelled in the middle"
    site.until(lambda: site.said("cancelled by a person"), "the tick that leaves it alone")
    assert site.runs()[0]["status"] == "CANCELED"

    # `weir resume`, and it goes on by itself to the exact end.
    subprocess.run([dagster_home.program("weir"), "resume", "flights"], env=site.environment, cwd=PROJECT, check=True)
    site.until(site.read_all, "the rest")
    site.until(lambda: lease.read(site.storage).stopped, "the end of the rest")
    replayed(site)


def shows(page, path: str, *words: str) -> None:
    """Go to a page and wait until it shows all of these; it is loaded again meanwhile, as a person would."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        page.goto(path)
        for _ in range(20):
            page.wait_for_timeout(500)
            shown = page.inner_text("body")  # what is hidden is not in it
            if all(word in shown for word in words):
                return
        assert time.monotonic() < deadline, f"{path} never showed {words}, but:\n{shown}"


def replayed(site: Site) -> None:
    """The rows that were handed out are those of an independent replay of the days that have landed."""
    wanted = replay.expected(len(list(site.landing.glob("*.parquet")))).legs
    actual = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")
    replay.assert_same(actual, wanted, replay.LEG_KEY, "aircraft_legs")
