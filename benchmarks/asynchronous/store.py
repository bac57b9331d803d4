"""An S3 server behind a link, each a process of its own, with a bucket of its own.

    engine -> link (its limits, or none) -> server

Everything that touches storage goes through the link: obstore, delta-rs, S3A and pyarrow get one endpoint, the link's.

The server is Versity's S3 gateway over a directory (1 ms of processor time a small request), built once from its Go
module where there is a Go; without one it is the tests' server, moto, which takes five times as much from the engine's
cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import stamina

from benchmarks.state.measure import free_ports

SCRATCH = Path(tempfile.gettempdir()) / "weir-bench-async"
_PROJECT = Path(__file__).resolve().parents[2]
KEY, SECRET = "WEIR_BENCH_S3_KEY", "WEIR_BENCH_S3_SECRET"
_GATEWAY = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
_BUILD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the link: megabytes (10^6 bytes) per second, milliseconds per request; 0: none. alternate: seconds after which
    limits come and go; 0: they stay."""

    megabytes: float = 0.0
    delay_ms: float = 0.0
    alternate: float = 0.0

    @property
    def title(self) -> str:
        limits = f"{self.megabytes:g} MB/s, {self.delay_ms:g} ms" if self.megabytes or self.delay_ms else "no limit"
        return f"{limits} for {self.alternate:g} s of every {2 * self.alternate:g}" if self.alternate else limits


@dataclass
class Store:
    """A bucket, empty at first. counters: of the link, and the processor time of server and link; there when it has
    closed."""

    bucket: str
    endpoint: str
    client: Any
    counters: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The `storage` section that reaches it through the link."""
        return {
            "root": f"s3://{self.bucket}/weir",
            "s3": {
                "endpoint": self.endpoint,
                "region": "us-east-1",
                "allow_http": True,
                "access_key_id": {"env": KEY},
                "secret_access_key": {"env": SECRET},
            },
        }

    def fetch(self, prefix: str, target: Path) -> None:
        """Download a table's Parquet files, below a prefix, past the link."""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for stored in page.get("Contents", ()):
                if stored["Key"].endswith(".parquet") and "/_delta_log/" not in stored["Key"]:
                    file = target / stored["Key"].replace("/", "_")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    self.client.download_file(self.bucket, stored["Key"], str(file))


@contextmanager
def opened(limits: Limits, scratch: Path, data: Path) -> Iterator[Store]:
    """scratch: where the gateway is built; data: where it keeps objects."""
    import boto3

    os.environ[KEY], os.environ[SECRET] = "bench-key", "bench-secret"  # names and values are this benchmark's alone
    binary = gateway(scratch)
    with (
        _process("tests.storage.s3_server") if binary is None else _serving(binary, data) as server,
        _process(
            "benchmarks.asynchronous.link",
            "127.0.0.1",
            server.port,
            limits.megabytes,
            limits.delay_ms,
            limits.alternate,
        ) as link,
    ):
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            region_name="us-east-1",
            aws_access_key_id=os.environ[KEY],
            aws_secret_access_key=os.environ[SECRET],
        )
        store = Store(f"weir-bench-{uuid.uuid4().hex[:12]}", f"http://127.0.0.1:{link.port}", client)
        _create_bucket(client, store.bucket)
        yield store
        cpu = {"link_cpu": link.cpu(), "server_cpu": server.cpu(), "server": "moto" if binary is None else "versitygw"}
        store.counters = {**json.loads(link.end()), **cpu}


@stamina.retry(on=Exception, attempts=50, wait_initial=0.1, wait_max=0.5)
def _create_bucket(client: Any, bucket: str) -> None:
    """A bucket, as soon as the server listens."""
    client.create_bucket(Bucket=bucket)


def gateway(scratch: Path) -> Path | None:
    """The gateway's program, built on first use; None where there is no Go. Raises RuntimeError with Go's words."""
    home = scratch / "peers" / "versitygw"
    binary, go = home / "versitygw", shutil.which("go")
    if not binary.exists():
        if go is None:
            return None
        print(f"building {_GATEWAY}: a few minutes, once", flush=True)
        variables = {**os.environ, "GOBIN": str(home), "GOPATH": str(home / "go"), "GOFLAGS": "-modcacherw"}
        built = subprocess.run(
            [go, "install", _GATEWAY], env=variables, capture_output=True, text=True, timeout=_BUILD_SECONDS
        )
        if built.returncode:
            raise RuntimeError(built.stderr.strip()[-1000:])
        shutil.rmtree(home / "go", ignore_errors=True)
    return binary


@contextmanager
def _serving(binary: Path, data: Path) -> Iterator[_Process]:
    (data / "objects").mkdir(parents=True)
    (data / "sidecar").mkdir()
    [port] = free_ports(1)
    keys = ["--access", os.environ[KEY], "--secret", os.environ[SECRET]]
    where = ["posix", "--sidecar", str(data / "sidecar"), str(data / "objects")]
    running = subprocess.Popen(
        [str(binary), *keys, "--port", f"127.0.0.1:{port}", "--quiet", *where],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield _Process(running, port)
    finally:
        running.kill()
        running.wait()


class _Process:
    """A server on a port."""

    def __init__(self, running: subprocess.Popen[str], port: int) -> None:
        self._running, self.port = running, port

    def cpu(self) -> float:
        """Seconds."""
        times = psutil.Process(self._running.pid).cpu_times()
        return times.user + times.system

    def end(self) -> str:
        """Close its stdin; returns what it says last."""
        return self._running.communicate(timeout=30)[0] if self._running.returncode is None else ""


@contextmanager
def _process(module: str, *arguments: object) -> Iterator[_Process]:
    """A module of this project that prints its port and ends when its stdin does."""
    running = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=_PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout is not None
        process = _Process(running, int(running.stdout.readline()))
        yield process
        process.end()
    finally:
        running.kill()
        running.wait()
