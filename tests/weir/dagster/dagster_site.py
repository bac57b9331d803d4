"""A real webserver and a real daemon of one test, and a headless Chromium at their pages, driven by playwright."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dagster import DagsterInstance

from infra import flights_input
from pipelines import flights
from tests.tools.servers import needs
from weir.local import dagster_home
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import PROJECT, Settings, load

_PATIENCE = 400.0  # JVMs and Great Expectations start within it, on two busy processors
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

    def load_location(self) -> None:
        """Wait until the web server has loaded our code, and ask it again where that failed, as a person at Reload
        would.

        It does not try again by itself, and its pages show an empty graph until then; on a loaded machine that has
        happened. AssertionError with what Dagster says, after the third failure.
        """
        asked = """{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError {
            __typename ... on PythonError { message } } } } } }"""
        failures: list[str] = []

        def loaded() -> bool:
            for entry in self.ask(asked)["workspaceOrError"]["locationEntries"]:
                outcome = entry["locationOrLoadError"]
                if entry["loadStatus"] == "LOADED" and outcome and outcome["__typename"] == "RepositoryLocation":
                    return True
                if entry["loadStatus"] == "LOADED" and outcome:
                    failures.append(outcome.get("message", outcome["__typename"]))
                    assert len(failures) < 3, f"the web server cannot load our code: {failures}\n{self.log()}"
                    warnings.warn(f"The web server had to load our code again: {failures[-1]}", stacklevel=1)
                    self.ask('mutation { reloadRepositoryLocation(repositoryLocationName: "weir") { __typename } }')
            return False

        self.until(loaded, "our code in the web server")

    def runs(self) -> list[dict]:
        """Dagster's runs, newest first, as its web server tells them."""
        asked = "{ runsOrError { ... on Runs { results { runId jobName status runConfigYaml tags { key value } } } } }"
        return self.ask(asked)["runsOrError"]["results"]

    def says(self, words: str) -> bool:
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
def options() -> dict[str, str]:
    """Further settings of the site."""
    return {}


@pytest.fixture
def site(tmp_path, options) -> Iterator[Site]:
    environment = {
        "WEIR_ENV": "dev",
        "WEIR_STORAGE__ROOT": str(tmp_path / "storage"),
        "WEIR_LOCAL__WORK_DIR": str(tmp_path / "work"),
        "WEIR_PIPELINES__FLIGHTS__PARAMS": json.dumps({"landing": str(tmp_path / "landing")}),
        "WEIR_EPOCH__MAX_FILES": "3",
        "WEIR_RUN__LINGER_SECONDS": "5",
        "WEIR_DAGSTER__SENSOR_SECONDS": "5",
        "WEIR_DAGSTER__OBSERVE_SECONDS": "0",
        **options,
    }
    with at_work(tmp_path, environment, PROJECT / "workspace.yaml") as site:
        yield site


@contextmanager
def at_work(root: Path, environment: dict[str, str], workspace: Path) -> Iterator[Site]:
    """A daemon and a web server with a home of their own below `root`, as long as the test goes on."""
    needs("chromium", "chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    site = Site(root, port, {**mine, "DAGSTER_HOME": str(root / "home"), **environment})
    site.landing.mkdir(exist_ok=True)
    (root / "home").mkdir()
    shutil.copyfile(PROJECT / "weir" / "local" / "dagster.yaml", root / "home" / "dagster.yaml")
    with DagsterInstance.from_config(str(root / "home")):
        pass  # makes Dagster's databases: daemon and web server at once may leave two versions in one, which nothing opens again
    site.start("dagster-daemon", "run", "-w", str(workspace))
    site.start("dagster-webserver", "-w", str(workspace), "-h", "127.0.0.1", "-p", str(port))
    try:
        yield site
    finally:
        for process in site.processes:
            dagster_home.end(process)


@pytest.fixture
def page(site):
    """A browser's page, once the web server answers."""
    from playwright.sync_api import sync_playwright

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", site.port)) == 0

    site.until(answers, "the web server")
    site.load_location()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(needs("chromium", "chromium")), args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_page(viewport=_SHOT, base_url=f"http://127.0.0.1:{site.port}")
        opened.set_default_timeout(90_000)
        yield opened
        browser.close()


def pictures(page) -> Callable[[str], None]:
    """What keeps a picture of the page under a name, in the directory that PAGES_SHOTS names; without that, nothing."""
    directory = os.environ.get("PAGES_SHOTS")

    def shot(name: str) -> None:
        if directory:
            page.wait_for_timeout(1500)
            page.screenshot(path=str(Path(directory) / f"{name}.png"))

    return shot


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
