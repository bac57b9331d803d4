"""Listing a local directory while others remove what is in it, and a bucket in which objects stand for directories."""

from __future__ import annotations

import threading

from state_ops.storage.storage import Storage
from weir.sources.source_directory import LandingDirectory


def test_a_directory_that_comes_and_goes_can_be_listed_at_any_moment(tmp_path):
    storage = Storage(str(tmp_path / "storage"))
    storage.put_bytes("coordinator/lease.json", b"{}")
    done = threading.Event()

    def comes_and_goes() -> None:
        while not done.is_set():
            storage.put_bytes("coordinator/requests/one.json", b"{}")
            storage.delete("coordinator/requests/one.json")

    other = threading.Thread(target=comes_and_goes)
    other.start()
    try:
        for _ in range(2000):
            assert {file.path for file in storage.list("coordinator/requests")} <= {"coordinator/requests/one.json"}
    finally:
        done.set()
        other.join()


def test_objects_that_stand_for_directories_are_no_files(bucket):
    for key, body in (
        ("in/", b""), ("in/day=1", b""), ("in/day=1/1.json", b"{}"), ("in/day=2/", b""), ("in/day=3", b""),
        ("in/x.json", b""), ("in/x.json/2.json", b"{}"), ("in/empty.json", b""),
    ):  # fmt: skip
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=body)
    found = LandingDirectory(f"s3://{bucket.name}/in/**", "source s", bucket.settings()).files()
    assert sorted(file.name for file in found) == ["day=1/1.json", "empty.json", "x.json/2.json"]
