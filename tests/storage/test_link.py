"""The link of `make bench-async`: what the benchmark says of slow storage holds only if nothing gets past it."""

from __future__ import annotations

import http.client
import os

import pytest

from benchmarks.asynchronous import store
from benchmarks.asynchronous.store import Limits, opened
from state_ops.storage.storage import Storage
from weir.settings.configuration import S3Settings

_SIZE = 300_000


@pytest.fixture
def no_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the server is moto's, which the tests have anyway."""
    monkeypatch.setattr("benchmarks.asynchronous.store.shutil.which", lambda _: None)
    for name in store.KEY, store.SECRET:
        monkeypatch.setenv(name, "")  # which opening sets, and the end of the test takes back


def test_every_byte_and_request_of_storage_goes_over_the_link(no_go, tmp_path):
    content = os.urandom(_SIZE)
    with opened(Limits(50, 1), tmp_path, tmp_path / "data") as slow:
        settings = slow.settings()
        storage = Storage(f"{settings['root']}/bench", S3Settings.model_validate(settings["s3"]))
        storage.put_bytes("state/a", content)
        storage.put_bytes("registry/b", b"")
        assert storage.read_bytes("state/a") == content
        assert sorted(file.path for file in storage.list()) == ["registry/b", "state/a"]
        slow.fetch("weir", tmp_path / "past")  # not over the link

    counters = slow.counters
    assert counters["server"] == "moto"
    assert counters["requests"] == {"PUT state": 1, "PUT registry": 1, "GET state": 1, "list": 1}
    assert counters["bytes_up"] > _SIZE and counters["bytes_down"] > _SIZE
    assert counters["busy"] == pytest.approx((counters["bytes_up"] + counters["bytes_down"]) / 50e6)


def test_bodies_in_chunks_pass_whole_one_after_the_other(no_go, tmp_path):
    with opened(Limits(), tmp_path, tmp_path / "data") as slow:
        port = int(slow.endpoint.rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for number in range(2):  # one connection, so the end of the first body has been found
            parts = iter([b"x" * 70_000, b"y" * 5])
            connection.request("PUT", f"/{slow.bucket}/chunked/{number}", parts, encode_chunked=True,
                               headers={"Transfer-Encoding": "chunked"})  # fmt: skip
            assert connection.getresponse().read() == b""
        body = slow.client.get_object(Bucket=slow.bucket, Key="chunked/1")["Body"].read()
    assert body == b"x" * 70_000 + b"y" * 5
    assert slow.counters["busy"] == 0.0 and sum(slow.counters["requests"].values()) == 2
