"""Processes of `make demo` and `make ui`: none is left behind, and no home has two daemons."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from state_ops.errors import ConfigurationError, TransientError
from weir.local import dagster_home, ui
from weir.settings.configuration import PROJECT

# A parent that ignores being asked to end, and its child in a session of its own.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
import time
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(dagster_home, "HOME", tmp_path / "dagster")
    return dagster_home.prepare()


def test_the_home_follows_the_repositorys_configuration(home):
    ours = (PROJECT / "weir" / "local" / "dagster.yaml").read_bytes()
    assert (home / "dagster.yaml").read_bytes() == ours
    (home / "dagster.yaml").write_text("telemetry: {enabled: true}")
    assert (dagster_home.prepare() / "dagster.yaml").read_bytes() == ours


def test_a_home_is_held_by_a_living_process_and_by_no_other():
    assert dagster_home.holder() is None
    dagster_home.claim(os.getpid())
    assert dagster_home.holder() == os.getpid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        dagster_home.claim(other.pid)
        assert dagster_home.holder() == other.pid
        other.kill()
    assert dagster_home.holder() is None


def test_what_was_started_ends_with_its_descendants_also_when_it_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(dagster_home, "_GRACE_SECONDS", 2)
    log = tmp_path / "log"
    with dagster_home.started([sys.executable, "-c", STUBBORN], log) as process:
        leader = psutil.Process(process.pid)
        family = [leader]
        while len(family) < 2:
            family = [leader, *leader.children()]
    # What has ended stays until its parent has seen it, which is init where its own parent was killed.
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_a_port_in_use_is_refused_with_the_command_that_helps():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as raised:
            ui._free_port(str(port))
    assert f"PORT={port + 1} make ui" in str(raised.value)
    with pytest.raises(ConfigurationError):
        ui._free_port("http")


@pytest.mark.long
def test_the_pages_have_a_code_server_that_is_begun_again_and_nothing_is_left_behind(tmp_path, monkeypatch):
    """With small programs in place of Dagster's: the first code server dies at once."""
    programs = tmp_path / "bin"
    programs.mkdir()
    begun = tmp_path / "begun"
    serves = f"""#!{sys.executable}
import socket, sys, time
from pathlib import Path
with open({str(begun)!r}, "a") as file:
    file.write(Path(sys.argv[0]).name + "\\n")
if Path(sys.argv[0]).name == "dagster":
    listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])))
    if Path({str(begun)!r}).read_text().count("dagster\\n") == 1:
        listening.accept()
        sys.exit(1)
if Path(sys.argv[0]).name == "dagster-webserver":
    while Path({str(begun)!r}).read_text().count("dagster\\n") < 2:
        time.sleep(0.05)
    sys.exit(7)
time.sleep(600)
"""
    for name in ("dagster", "dagster-daemon", "dagster-webserver"):
        (programs / name).write_text(serves)
        (programs / name).chmod(0o755)
    monkeypatch.setattr(dagster_home, "program", lambda name: str(programs / name))
    monkeypatch.setattr(dagster_home, "HOME", tmp_path)
    monkeypatch.setattr(ui, "_LOOK_SECONDS", 0.05)
    assert ui.serve(3000, dict(os.environ), daemon=True) == 7
    assert sorted(begun.read_text().split()) == ["dagster", "dagster", "dagster-daemon", "dagster-webserver"]
    assert not list(tmp_path.glob("workspace-*"))
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(programs) in command]


def test_dagster_understands_what_the_pages_are_started_with():
    from dagster._cli.api import grpc_command

    program, group, command, *arguments = ui.code_server(4000)
    assert (program, group, command) == ("dagster", "api", grpc_command.name)
    assert grpc_command.make_context(command, arguments).params["module_name"] == "assets.definitions"


def test_postgres_that_is_down_is_said_without_a_trace():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"HOST": "127.0.0.1", "PORT": port, "USER": "weir", "PASSWORD": "s3cret", "DB": "dagster"}
    named = {f"DAGSTER_POSTGRES_{name}": text for name, text in place.items()}
    shown = subprocess.run(
        [sys.executable, "-m", "weir.local.ui"],
        cwd=PROJECT,
        env={**os.environ, **named, "WEIR_DAGSTER_INSTANCE": "postgres", "PORT": port},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = shown.stdout + shown.stderr
    assert shown.returncode == 1 and "Traceback" not in output and "s3cret" not in output, output
    assert "Dagster's database cannot be used: " in output and "refused" in output
    assert f"where: Postgres at 127.0.0.1:{port}, database dagster" in output
    assert "Start Postgres" in output and "docs/playbooks/dagster-lost.md" in output


def test_a_database_that_fails_while_it_is_used_is_said_as_that(home):
    with dagster_home.instance():
        pass  # makes it
    for database in home.rglob("*.db"):
        database.write_bytes(b"rubbish" * 1000)
    with (
        pytest.raises(TransientError, match="Dagster's database cannot be used: ") as raised,
        dagster_home.instance() as opened,
    ):
        opened.get_runs()
    assert "not a database" in str(raised.value) and str(home) in str(raised.value)
