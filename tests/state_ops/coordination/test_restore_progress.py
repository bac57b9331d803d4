"""What says that state is being fetched, as others read it."""

from __future__ import annotations

import pytest

from state_ops.coordination import restore_progress
from state_ops.storage.storage import Storage


@pytest.mark.parametrize(
    "raw", [b"null", b"[1]", b"{}", b'{"purpose": 3}', b'{"purpose": "x", "bytes": null}', bytes(9)]
)
def test_what_is_no_note_of_a_fetch_is_left_out(tmp_path, raw):
    storage = Storage(str(tmp_path))
    storage.put_bytes(f"{restore_progress.DIRECTORY}/one.json", raw)
    storage.put_bytes(f"{restore_progress.DIRECTORY}/two.json", b'{"purpose": "a run", "bytes": 5, "of a newer": 1}')
    assert [(fetch.purpose, fetch.bytes) for fetch in restore_progress.read(storage)] == [("a run", 5)]
