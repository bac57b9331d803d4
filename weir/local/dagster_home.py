"""Dagster on this machine, for `make ui` and `make demo`: its home below `.weir/`, and processes that end for
certain."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from state_ops import extras
from state_ops.errors import ConfigurationError, TransientError
from weir.settings.configuration import PROJECT

if TYPE_CHECKING:
    from dagster import DagsterInstance

HOME = PROJECT / ".weir" / "dagster"
WORKSPACE = PROJECT / "workspace.yaml"

_HOLDER = "weir.pid"
_GRACE_SECONDS = 20
_CONNECT_SECONDS = 10


INSTANCES = {"sqlite": "dagster.yaml", "postgres": "dagster-postgres.yaml"}


def prepare() -> Path:
    """Make the home with the configuration that WEIR_DAGSTER_INSTANCE chooses, `dagster.yaml` unless it says postgres.

    Raises:
        ConfigurationError: For another choice, and for Postgres without its library or the variables that its file
            names.
        TransientError: Where Postgres does not answer.
    """
    chosen = os.environ.get("WEIR_DAGSTER_INSTANCE") or "sqlite"
    if chosen not in INSTANCES:
        raise ConfigurationError(
            f"WEIR_DAGSTER_INSTANCE={chosen} is no storage of Dagster's that is prepared here.",
            next=f"Choose one of: {', '.join(INSTANCES)}.",
        )
    ours, theirs = Path(__file__).with_name(INSTANCES[chosen]), HOME / "dagster.yaml"
    if chosen == "postgres":
        _check_postgres(ours)
    HOME.mkdir(parents=True, exist_ok=True)
    if not theirs.exists() or theirs.read_bytes() != ours.read_bytes():
        shutil.copyfile(ours, theirs)
    return HOME


def _check_postgres(configuration: Path) -> None:
    """Dagster itself would say it with a trace, and once for each of its processes."""
    extras.check("dagster_postgres", "Dagster's storage on Postgres", "WEIR_DAGSTER_INSTANCE=postgres")
    named = re.findall(r"env: (\w+)", configuration.read_text())
    lacking = [name for name in named if not os.environ.get(name)]
    if lacking:
        raise ConfigurationError(
            f"These variables say where Postgres is, and are not set: {', '.join(lacking)}.",
            where=str(configuration),
            next="Set them; docs/how-to/dagster-postgres.md says what each one is.",
        )

    _reach_postgres()


def _reach_postgres() -> None:
    import psycopg2

    host, port, user, password, name = (
        os.environ[f"DAGSTER_POSTGRES_{part}"] for part in ("HOST", "PORT", "USER", "PASSWORD", "DB")
    )
    try:
        connection = psycopg2.connect(
            host=host, port=port, user=user, password=password, dbname=name, connect_timeout=_CONNECT_SECONDS
        )
    except psycopg2.Error as error:
        raise _unreachable(error) from None
    connection.close()


@contextmanager
def instance() -> Iterator[DagsterInstance]:
    """Open Dagster's instance.

    TransientError is raised if its database does not answer, now or within the `with` block.
    """
    from dagster import DagsterInstance
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with DagsterInstance.from_config(str(HOME)) as opened:
            yield opened
    except Exception as error:
        if isinstance(error, SQLAlchemyError) or type(error).__name__ == "DagsterPostgresException":
            raise _unreachable(error.__cause__ or error) from error
        raise


def _unreachable(error: BaseException) -> TransientError:
    place = [os.environ.get(f"DAGSTER_POSTGRES_{part}") for part in ("HOST", "PORT", "DB")]
    on_postgres = os.environ.get("WEIR_DAGSTER_INSTANCE") == "postgres"
    return TransientError(
        f"Dagster's database cannot be used: {next(iter(str(error).splitlines()), type(error).__name__)}",
        where="Postgres at {}:{}, database {}".format(*place) if on_postgres else str(HOME),
        next=(
            f"{'Start Postgres, then this again' if on_postgres else 'Put it back, or begin with an empty one'}."
            " Pipelines do not need it: `weir status` and `weir run` go on without Dagster."
            " docs/playbooks/dagster-lost.md"
        ),
    )


def environment() -> dict[str, str]:
    """Return the environment for Dagster's processes. The default configuration is the demo's."""
    return {"WEIR_ENV": "demo", **os.environ, "DAGSTER_HOME": str(HOME)}


def module() -> str:
    """Return the module that the workspace loads: `assets.definitions`, or a project's own around it."""
    location = yaml.safe_load(WORKSPACE.read_text("utf-8"))["load_from"][0]["python_module"]
    return str(location["module_name"])


def program(name: str) -> str:
    """Return the path of one of Dagster's commands, of this very Python."""
    return str(Path(sys.executable).with_name(name))


def claim(pid: int) -> None:
    """Note which process runs this home's daemon: two of them would do everything twice."""
    (HOME / _HOLDER).write_text(json.dumps({"pid": pid, "started": psutil.Process(pid).create_time()}))


def holder() -> int | None:
    """Return the living process that runs this home's daemon, if there is one."""
    try:
        noted = json.loads((HOME / _HOLDER).read_text())
        process = psutil.Process(noted["pid"])
        alive = process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - noted["started"]) < 1.0
        return process.pid if alive else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def end_lost_runs(instance: DagsterInstance, living: str | None) -> int:
    """Mark runs as failed that a killed Dagster left as running; only for a home without a daemon.

    Args:
        living: A run that is not lost.
    """
    from dagster import DagsterRunStatus, RunsFilter

    begun = [
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    ]
    lost = [run for run in instance.get_runs(RunsFilter(statuses=begun)) if run.run_id != living]
    for run in lost:
        instance.report_run_failed(run, "Its process is gone: Dagster was ended while it ran.")
    return len(lost)


@contextmanager
def started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with its output in `log`, and end it with all that it has started when the block is left."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            arguments,
            cwd=PROJECT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, in order
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started, and its descendants: asked first, killed if they do not follow."""
    relatives: dict[int, psutil.Process] = {}

    def family() -> list[psutil.Process]:
        for parent in [psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else []:
            relatives.update({child.pid: child for child in [parent, *parent.children(recursive=True)]})
        for relative in list(relatives.values()):
            try:
                relatives.update({child.pid: child for child in relative.children(recursive=True)})
            except psutil.Error:
                continue
        return [relative for relative in relatives.values() if relative.is_running()]  # false for a pid that was reused

    for signal_by in (psutil.Process.terminate, psutil.Process.kill):
        members = family()
        for member in members:
            try:
                signal_by(member)
            except psutil.Error:
                continue
        psutil.wait_procs(members, timeout=_GRACE_SECONDS)
        process.poll()
