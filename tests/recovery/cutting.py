"""A process that is gone in the middle of its changes to storage, without ending one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from state_ops.storage.storage import Storage


@contextmanager
def changes_fail_from(monkeypatch, stop_at: int) -> Iterator[None]:
    """Every change to storage from one on fails, as when the process were gone. stop_at: how many succeed."""
    calls = 0
    with monkeypatch.context() as patched:
        for name in ("put_bytes", "put_file", "create", "delete", "delete_files", "delete_tree"):
            original = getattr(Storage, name)

            def counted(self, *args, _original=original, **kwargs):
                nonlocal calls
                if calls >= stop_at:
                    raise OSError("this process is gone")
                calls += 1
                return _original(self, *args, **kwargs)

            patched.setattr(Storage, name, counted)
        yield
