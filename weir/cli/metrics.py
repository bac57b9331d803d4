"""The command `weir metrics`: what Prometheus scrapes, over HTTP or once."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated

import typer

from state_ops.errors import ConfigurationError
from weir.cli.console import data_alone, err, waiting
from weir.cli.shell import completion
from weir.settings.configuration import load

_PORTS = 65535


def metrics(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names in the configuration; default: all.",
            metavar="[PIPELINE]...",
            autocompletion=completion.pipelines,
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="TCP port to listen on.", min=1, max=_PORTS)] = 9464,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no login.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once and end.")] = False,
) -> None:
    """Serve metrics of pipelines to Prometheus, read from their storage at each scrape.

    Needs no coordinator, no Dagster and no JVM. docs/how-to/monitoring.md says what there is, and what alerts mean.
    """
    # Prometheus' library is slow to load, and no other command needs it.
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    from weir.cli.prometheus import Exporter

    settings = load()
    unknown = sorted(set(pipelines or ()) - settings.pipelines.keys())
    if unknown:
        configured = ", ".join(sorted(settings.pipelines)) or "none"
        raise ConfigurationError(
            f"There is no pipeline {unknown[0]!r} in the configuration.", next=f"Configured pipelines: {configured}."
        )
    names = list(dict.fromkeys(pipelines or sorted(settings.pipelines)))
    served = CollectorRegistry()
    served.register(Exporter(names, settings))
    if once:
        with data_alone(), waiting("reading the storage of each pipeline"):
            text = generate_latest(served).decode()
        sys.stdout.write(text)
        return
    try:
        server, _ = start_http_server(port, host, served)
    except OSError as error:
        raise ConfigurationError(
            f"Metrics cannot be served on {host}:{port}: {error.strerror or error}",
            where="weir metrics",
            next=f"Choose another port or address: weir metrics --port {port % _PORTS + 1}",
        ) from error
    err.print(f"serving metrics of {', '.join(names) or 'no pipeline'} on http://{host}:{port}/metrics")
    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()
    server.shutdown()
