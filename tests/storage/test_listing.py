"""Listing a local directory while others remove what is in it."""

from __future__ import annotations

import threading

from state_ops.storage.storage import Storage


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
