"""What is counted is what the server sees, request by request."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from state_ops.storage.filesystem_store import FileSystemStore
from state_ops.storage.instrumented_store import NAMES, InstrumentedStore, RequestCounts
from state_ops.storage.storage import Storage
from state_ops.storage.store import PART
from tests.storage.conftest import Bucket
from tests.storage.proxy import Proxy, Request, refused


def _kind(request: Request) -> str:
    if request.listing:
        return "list"
    if request.method == "POST":  # an upload in parts begins and ends by one, a batch of deletions is one
        return "delete" if "delete" in request.path.partition("?")[2] else "put"
    if request.method == "PUT" and "if-none-match" in request.headers:
        return "create"
    return request.method.lower()


def _asked(storage: Storage) -> dict[str, int]:
    counts = storage.request_counts.counts()
    return {name.removeprefix("requests_"): n for name, n in counts.items() if n and not name.startswith("bytes_")}


def test_s3_sees_as_many_requests_of_each_kind_as_are_counted(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, quick_retries: None
):
    storage = bucket.storage(proxy.port)
    local = tmp_path / "local"
    local.write_bytes(b"x" * (2 * PART + 1))
    failed: list[Request] = []

    def once(request: Request):
        if request.method == "PUT" and request.at("throttled") and not failed:
            failed.append(request)
            return refused(503, "SlowDown")
        return None

    proxy.behave = once
    storage.put_file(local, "state/large")  # in three parts, between a start and an end
    storage.put_bytes("state/throttled", b"12345")
    assert storage.create("registry/1", b"123") and not storage.create("registry/1", b"123")
    storage.get_file("state/large", tmp_path / "back")
    assert storage.read_bytes("nothing") is None and storage.size("registry/1") == 3
    assert len(list(storage.list("state"))) == 2
    assert storage.list_dirs("") == ["registry", "state"]
    storage.delete_files(["state/throttled", "registry/1"])
    storage.delete("state/gone")
    storage.delete_tree("state")

    assert failed
    assert _asked(storage) == Counter(map(_kind, proxy.requests))
    counts = storage.request_counts.counts()
    assert counts["bytes_up"] == (2 * PART + 1) + 2 * 5 + 2 * 3, "what was sent twice counts twice"
    assert counts["bytes_down"] == 2 * PART + 1


@pytest.mark.parametrize(("files", "pages", "batches"), [(0, 1, 0), (1000, 1, 1), (1001, 2, 2)])
def test_pages_and_batches_of_an_object_store(tmp_path: Path, files: int, pages: int, batches: int):
    """On files that are said to be far away: S3's server here takes ten seconds for so many objects."""
    store, request_counts = FileSystemStore(pafs.LocalFileSystem(), str(tmp_path / "root")), RequestCounts()
    store.remote = True
    (tmp_path / "root" / "many").mkdir(parents=True)
    for number in range(files):
        (tmp_path / "root" / "many" / str(number)).touch()
    counted = InstrumentedStore(store, request_counts)
    listed = list(counted.list("many"))
    assert len(listed) == files
    counted.delete_files([file.path for file in listed])
    counts = request_counts.counts()
    assert (counts["requests_list"], counts["requests_delete"]) == (pages, batches)


def test_a_disk_is_counted_call_by_call(tmp_path: Path):
    storage = Storage(str(tmp_path / "root"))
    for name in ("a", "b", "c"):
        storage.put_bytes(f"some/{name}", b"12")
    storage.put_bytes("some/large", b"x" * (PART + 1))
    assert storage.read_bytes("some/a") == b"12" and storage.digest("some/b")
    storage.delete_files(["some/a", "some/b"])
    assert storage.delete_tree("some") == 2
    assert _asked(storage) == {"put": 4, "get": 2, "list": 1, "delete": 4}
    assert storage.request_counts.counts()["bytes_up"] == 6 + PART + 1
    assert storage.request_counts.counts()["bytes_down"] == 4


def test_nothing_is_lost_between_threads_and_what_is_taken_is_gone():
    request_counts = RequestCounts()
    taken: list[dict[str, int]] = []

    def work() -> None:
        for number in range(2000):
            request_counts.requested("get")
            request_counts.add({"bytes_up": 2, "of a newer release": 1})
            if number % 500 == 0:
                taken.append(request_counts.take())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [*taken, request_counts.take()]
    assert all(tuple(count) == NAMES for count in counts)
    assert sum(count["requests_get"] for count in counts) == 8000
    assert sum(count["bytes_up"] for count in counts) == 16000
    assert request_counts.counts() == dict.fromkeys(NAMES, 0)
