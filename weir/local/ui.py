"""`make ui`: Dagster's web pages and its daemon, on the demo's pipeline or on a project's, until Ctrl-C. PORT chooses
the port.

    this process
      +- dagster api grpc       the code server of both; begun again when it dies
      +- dagster-daemon         sensors and schedules, unless another process runs them already
      +- dagster-webserver      the pages

It idles below a twentieth of a core. A daemon that has a code server of its own makes it anew every minute, and so do
the pages when it misses
them: that took a fifth. One that is asked over a socket is only asked again what there is; and sensors tick twice a
minute here, unless WEIR_DAGSTER__SENSOR_SECONDS says otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

from rich.console import Console

from state_ops import extras
from state_ops.errors import ConfigurationError, WeirError
from weir.local import dagster_home
from weir.settings.configuration import PROJECT, load

_HOST = "127.0.0.1"
_QUIET = ("--log-level", "warning")  # their level info would scroll the links away before they work
_LOOK_SECONDS = 1.0
_SENSOR_SECONDS = "30"  # a tick takes Dagster a fifth of a second of processor time, whatever it looks at

out = Console(highlight=False, emoji=False, soft_wrap=True)


def main() -> None:
    """Start Dagster's processes, and keep the code server alive until one of the others ends or somebody ends this
    one."""
    extras.check("dagster_webserver", "Dagster's web page")
    port = _free_port(os.environ.get("PORT", "3000"))
    dagster_home.prepare()
    environment = {"WEIR_DAGSTER__SENSOR_SECONDS": _SENSOR_SECONDS, **dagster_home.environment()}
    base = f"http://{_HOST}:{port}"
    out.print(f"Dagster on the configuration [bold]{environment['WEIR_ENV']}[/], in some 15 s: [bold]{base}[/]")
    out.print(f"  the pipelines as graphs     {base}/asset-groups")
    for name in list(load(environment).pipelines)[:1]:
        out.print(f"  epochs of {name:<18}{base}/assets/{name}/checkpoint?view=events")
        out.print(f"  what its sensor decides     {base}/locations/weir/sensors/{name}_checkpoint_sensor")
    out.print(f"  runs                        {base}/runs")
    alone = dagster_home.holder() is None
    if alone:
        out.print(
            "The sensor is on: files that land are read within half a minute. Ctrl-C ends Dagster and what it runs."
        )
        dagster_home.claim(os.getpid())
    else:
        out.print("Another process runs the daemon already: this is a window on it. Ctrl-C closes the window.")
    signal.signal(signal.SIGINT, _ended)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, _ended)
    sys.exit(serve(port, environment, daemon=alone))


def _ended(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def serve(port: int, environment: Mapping[str, str], *, daemon: bool) -> int:
    """Run Dagster's processes until one of them but the code server ends; returns its exit code. All of them are ended
    with this one."""
    socket_port = _unused_port()
    workspace = dagster_home.HOME / f"workspace-{os.getpid()}.yaml"
    where = {"host": _HOST, "port": socket_port, "location_name": "weir"}
    workspace.write_text(json.dumps({"load_from": [{"grpc_server": where}]}))  # YAML is a superset of it
    begun: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        program = dagster_home.program(command[0])
        begun.append(subprocess.Popen([program, *command[1:]], cwd=PROJECT, env=environment, start_new_session=True))
        return begun[-1]

    try:
        code = start(*code_server(socket_port))
        _wait_for(socket_port, lambda: code.poll() is None)
        served = [start("dagster-daemon", "run", *_QUIET, "-w", str(workspace))] if daemon else []
        served.append(start("dagster-webserver", *_QUIET, "-w", str(workspace), "-h", _HOST, "-p", str(port)))
        while all(process.poll() is None for process in served):
            if code.poll() is not None:
                out.print("The code server died; it is begun again.")
                code = start(*code_server(socket_port))
            time.sleep(_LOOK_SECONDS)
        return next(process.returncode for process in served if process.returncode is not None)
    finally:
        workspace.unlink(missing_ok=True)
        for process in reversed(begun):
            dagster_home.end(process)


def code_server(port: int) -> list[str]:
    """Return the command that serves our code to daemon and pages."""
    return [
        "dagster",
        "api",
        "grpc",
        "-m",
        dagster_home.module(),
        "-d",
        str(PROJECT),
        "-h",
        _HOST,
        "-p",
        str(port),
        *_QUIET,
    ]


def _wait_for(port: int, lives: Callable[[], bool]) -> None:
    """Until somebody answers at the port: pages that could not load the code when they began would stay empty."""
    while lives():
        with socket.socket() as probe:
            if probe.connect_ex((_HOST, port)) == 0:
                return
        time.sleep(0.2)


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _free_port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigurationError(f"PORT={text} is no port.", next="Choose one between 1024 and 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, int(text)))
        except OSError as error:
            raise ConfigurationError(
                f"The port {text} cannot be used: {error.strerror}.",
                next=f"Choose another: PORT={int(text) + 1} make ui",
            ) from error
    return int(text)


if __name__ == "__main__":
    try:
        main()
    except WeirError as error:
        sys.exit(str(error))
