"""`make ui`: Dagster's web pages and its daemon on the demo's pipeline, until Ctrl-C. PORT chooses the port."""

from __future__ import annotations

import os
import signal
import socket
import sys

from rich.console import Console

from infra import dagster_home
from state_ops.errors import ConfigurationError, WeirError

_HOST = "127.0.0.1"

out = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Become Dagster: nothing is left to supervise."""
    port = _free_port(os.environ.get("PORT", "3000"))
    dagster_home.prepare()
    environment = dagster_home.environment()
    base = f"http://{_HOST}:{port}"
    out.print(f"Dagster on the configuration [bold]{environment['WEIR_ENV']}[/], in some 15 s: [bold]{base}[/]")
    out.print(f"  the pipeline as a graph     {base}/asset-groups")
    out.print(f"  its epochs                  {base}/assets/flights/checkpoint?view=events")
    out.print(f"  what the sensor decides     {base}/locations/weir/sensors/flights_checkpoint_sensor")
    out.print(f"  runs                        {base}/runs")
    if dagster_home.holder() is not None:
        out.print("Another process runs the daemon already: this is a window on it. Ctrl-C closes the window.")
        command = ["dagster-webserver", *_where(port)]
    else:
        out.print("The sensor is on: files that land are read within seconds. Ctrl-C ends Dagster and what it runs.")
        dagster_home.claim(os.getpid())
        command = dagster_dev(port)
    # Dagster advertises its newer command line, which wants another layout of the project.
    environment.setdefault("PYTHONWARNINGS", "ignore:Function `dev_command` is superseded")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and Dagster would with them
    sys.stdout.flush()
    os.execve(dagster_home.program(command[0]), command, environment)


def dagster_dev(port: int) -> list[str]:
    """Web server and daemon. The daemon has a code server of its own, which it makes anew every minute: one that both share would stay dead."""
    # Its level info would scroll the links away before they work.
    return ["dagster", "dev", "--use-legacy-code-server-behavior", "--log-level", "warning", *_where(port)]


def _where(port: int) -> list[str]:
    return ["-w", str(dagster_home.WORKSPACE), "-h", _HOST, "-p", str(port)]


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
