"""S3 as a process of its own, one for the whole session; a bucket for each test; a proxy that misbehaves."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import stamina

from state_ops.storage.storage import Storage
from tests.storage.proxy import Proxy
from weir.settings.configuration import PROJECT, S3Settings

KEY, SECRET = "WEIR_TEST_KEY", "WEIR_TEST_SECRET"


@dataclass(frozen=True, slots=True)
class Bucket:
    """An empty bucket, and what the server itself says of it, past Weir and past any proxy."""

    name: str
    port: int
    client: Any

    def settings(self, port: int | None = None, **other: Any) -> S3Settings:
        values = {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": "us-east-1",
            "allow_http": True,
            "access_key_id": {"env": KEY},
            "secret_access_key": {"env": SECRET},
            "request_timeout_seconds": 20,
        }
        return S3Settings.model_validate(values | other)

    def storage(self, port: int | None = None, *, prefix: str = "root/flights", **other: Any) -> Storage:
        return Storage(f"s3://{self.name}/{prefix}", self.settings(port, **other))

    def objects(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return sorted(stored["Key"] for page in pages for stored in page.get("Contents", ()))

    def content(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def half_done(self) -> list[str]:
        """Keys of uploads in parts that nobody finished or aborted."""
        return [upload["Key"] for upload in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())]


@contextmanager
def serving(script: str, *arguments: object) -> Iterator[int]:
    """A script of this directory as a process of its own, which prints its port and ends when its stdin does."""
    command = [sys.executable, "-m", f"tests.storage.{script}", *map(str, arguments)]
    server = subprocess.Popen(
        command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.communicate(timeout=30)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with serving("s3_server") as port:
        yield port


def s3_client(port: int) -> Any:
    """A client of a server of ours on this port, with keys that it does not look at."""
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(KEY, "test-key")
    monkeypatch.setenv(SECRET, "test-secret")
    client = s3_client(s3_port)
    name = f"weir-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return Bucket(name, s3_port, client)


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with Proxy(s3_port) as started:
        yield started


@pytest.fixture
def misbehaving(s3_port: int) -> Iterator[Callable[[str], int]]:
    """Starts a proxy as a process of its own, with one of `proxy.BEHAVIOURS`; returns its port."""
    with ExitStack() as started:
        yield lambda behaviour: started.enter_context(serving("proxy", s3_port, behaviour))


@pytest.fixture
def quick_retries() -> Iterator[None]:
    """As many tries as configured, without the pauses between them."""
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


@pytest.fixture(params=["local", "s3"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens the same storage each time it is called; on a local disk, and on S3."""
    if request.param == "local":
        return lambda: Storage(str(tmp_path / "flights"))
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.storage
