"""A standalone Spark cluster on this machine whose workers are as far from the project as other hosts would be.

Each worker runs in a mount namespace of its own, in a root that has this machine's programs, a Python with the packages
of requirements.lock at another path, and the storage root. The project and all other files of a run are not there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import psutil
import pyspark

from tests.tools.servers import free_port, missing
from weir.execution.spark.java import java_home
from weir.settings.configuration import PROJECT, load

PYTHON = "/weir-python/bin/python"  # on the workers, and only there
_SPARK = Path(pyspark.__file__).parent
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_PATIENCE = 120.0
_TOOLS = ("unshare", "mount", "chroot")
_PROGRAMS = {"bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr"}  # what no worker can do without


@dataclass
class Cluster:
    """url: of the master. workers: their processes, each with the executors that it has started."""

    url: str
    page: int
    home: Path
    shared: Path
    env: Mapping[str, str]
    stack: ExitStack
    workers: list[psutil.Process] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        """WEIR_ variables of a run on this cluster."""
        conf = {
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": _QUICK,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        return {"WEIR_SPARK__MASTER": self.url, "WEIR_SPARK__PYTHON": PYTHON, "WEIR_SPARK__CONF": json.dumps(conf)}

    def executors_have_ended(self) -> bool:
        """Whether nothing that a worker has started runs any more; a worker leaves its dead unburied."""
        try:
            started = [child for worker in self.workers for child in worker.children(recursive=True)]
            return all(child.status() == psutil.STATUS_ZOMBIE for child in started)
        except psutil.NoSuchProcess:  # one ends at this moment
            return False

    def add_worker(self) -> psutil.Process:
        """Start a worker of one core, whose host has an address of its own."""
        number = len(self.workers)
        command, env, log = _worker(
            self.home / f"worker-{number}", self.shared, self.url, self.env, f"127.0.0.{number + 2}"
        )
        self.workers.append(self.stack.enter_context(_running(command, env, log)))
        return self.workers[-1]

    def worker_of(self, pid: int) -> psutil.Process:
        """The worker that has started a process."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        return next(worker for worker in self.workers if worker.pid in ancestors)


@contextmanager
def cluster(home: Path, shared: Path, workers: int) -> Iterator[Cluster]:
    """A master and its workers. home: for their own files. shared: the one directory of a run that workers see too.

    Skips the test, or fails it, where this user cannot make mount namespaces.
    """
    _require_namespaces()
    home.mkdir(parents=True)
    shared.mkdir(parents=True)
    port, page = free_port(), free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "PYSPARK_", "PYTHON"))}
    env |= {
        "JAVA_HOME": str(java_home(load({}).cache_dir)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": _QUICK,
    }
    command = [str(_SPARK / "bin/spark-class"), "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--webui-port", str(page)]
    with ExitStack() as stack:
        stack.enter_context(_running(command, env | {"SPARK_HOME": str(_SPARK)}, home / "master.log"))
        begun = Cluster(f"spark://127.0.0.1:{port}", page, home, shared, env, stack)
        for _ in range(workers):
            begun.add_worker()
        _wait_for(page, workers, home)
        yield begun


def _worker(
    home: Path, shared: Path, url: str, env: Mapping[str, str], host: str
) -> tuple[list[str], dict[str, str], Path]:
    """The command of a worker, its environment and its log."""
    root, java = home / "root", home / "java"
    root.mkdir(parents=True)
    if Path(env["JAVA_HOME"]).is_relative_to(PROJECT):  # a script that starts the packaged Java, by its path
        (java / "bin").mkdir(parents=True)
        script = (Path(env["JAVA_HOME"]) / "bin" / "java").read_text().replace(sys.prefix, "/weir-python")
        (java / "bin" / "java").write_text(script)
        (java / "bin" / "java").chmod(0o755)
    else:
        java = Path(env["JAVA_HOME"])
    inside = Path("/weir-python") / _SPARK.relative_to(sys.prefix)
    worker = [str(inside / "bin/spark-class"), "org.apache.spark.deploy.worker.Worker", "--host", host]
    worker += ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", "/tmp/spark", url]
    script = "\n".join(["set -e", *_mounts(root, shared, java), f"exec chroot {root} {shlex.join(worker)}"])
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    env = {**env, "SPARK_HOME": str(inside), "JAVA_HOME": "/weir-java", "SPARK_LOCAL_IP": host}
    return command, env, home / "worker.log"


def _mounts(root: Path, shared: Path, java: Path) -> Iterator[str]:
    """Shell lines that make a worker's root: this machine's directories but those in which the project and temporary
    files lie."""
    hidden = {PROJECT.parts[1], shared.resolve().parts[1], "tmp"} - _PROGRAMS
    yield f"mount -t tmpfs none {root}"
    for entry in sorted(Path("/").iterdir()):
        place = root / entry.name
        if entry.is_symlink():
            yield f"ln -s {entry.readlink()} {place}"
        elif entry.is_dir() and entry.name not in hidden:
            yield f"mkdir {place} && mount --rbind {entry} {place}"
    if PROJECT.parts[1] in _PROGRAMS:
        yield f"mount -t tmpfs none {root}{PROJECT.parent}"
    if shared.resolve().is_relative_to("/dev/shm"):
        yield f"mount -t tmpfs none {root}/dev/shm"
    yield f"mkdir -p {root}/tmp/spark"
    for source, target in (
        (sys.prefix, "/weir-python"),
        (java, "/weir-java"),
        (shared.resolve(), shared.resolve()),
        *((path, path) for path in {sys.base_prefix} if Path(path).parts[1] in hidden),
    ):
        yield f"mkdir -p {root}{target} && mount --rbind {source} {root}{target}"


def _require_namespaces() -> None:
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            missing(f"there is no {tool} here: apt install util-linux coreutils")
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        missing(
            f"this user cannot make mount namespaces, in which workers do not see the project: {tried.stderr.strip()}"
        )


@contextmanager
def _running(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[psutil.Process]:
    """A process that is killed at the end, with all that it has started."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        kill_family(process.pid)
        process.wait()


def kill_family(pid: int) -> None:
    """SIGKILL to a process and all that it has started, as if the host were gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for member in family:
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                act(member)


def _wait_for(page: int, workers: int, home: Path) -> None:
    """Until the master's page says that so many workers are alive."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
                if answer.read().count(b"ALIVE") > workers:  # the master says so of itself too
                    return
        except OSError:
            pass
        logs = [log.read_text(errors="replace")[-2000:] for log in home.rglob("*.log")]
        assert time.monotonic() < until, "the cluster did not start:\n" + "\n".join(logs)
        time.sleep(0.1)
