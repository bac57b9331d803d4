"""Every call that leaves memory gets a number, in one child process, and one of them is disturbed.

Weir itself has no hooks for this: functions and methods are wrapped by attribute, after they were imported. They are
discovered, not listed: every public method of Storage and of the backend, every public function of `delta_log` (each
Delta commit of the registry and of the sinks goes through it), the Delta handle's own reads, and the local steps of a
snapshot.

    point = (label, n): the n-th call with this label. label = layer.operation, and the path with its uuids blotted out

Transfers run one at a time here, so that one run is like the other; the heartbeat's thread is not counted.
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import inspect
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.delta import fenced_table, log_entries
from state_ops.errors import TransientError
from state_ops.storage import transfers
from state_ops.storage.storage import Storage

TORN = ("put_file", "put_bytes", "commit", "append")  # operations of which half can be done

COMMITS = ("delta_log.commit", "delta_log.append")

_NEVER_LEAVES_MEMORY = {"Storage": {"below", "full"}, "delta_log": {"active_files"}}
_READS = {"get_file", "read_bytes", "parquet_footer", "size", "list", "list_dirs", "exists", "open_table", "update_incremental",
          "history", "multi_get", "scan"}  # fmt: skip
_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PROCESS = re.compile(r"/\.\d+-")  # in the names of directories that a restore works in


@dataclass(frozen=True, slots=True)
class Point:
    """The n-th call with a label, from 1."""

    label: str
    n: int

    @property
    def operation(self) -> str:
        return self.label.split(" ")[0]

    @property
    def reads(self) -> bool:
        return self.operation.split(".")[1] in _READS

    @property
    def is_delta(self) -> bool:
        return self.operation.startswith(("delta_log.", "DeltaTable."))

    def __str__(self) -> str:
        return f"{self.label} #{self.n}"


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens at which point. at: the point, or the number of the call in this process, from 1.

    marker, release: the files by which a call that hangs says so, and by which it is let go.
    """

    fault: str
    at: Point | int
    marker: Path | None = None
    release: Path | None = None


class Wrapped:
    """All calls of this process, counted; `journal` gets one line each, so that it outlives a SIGKILL."""

    def __init__(self, root: Path, disturbance: Disturbance | None = None, journal: Path | None = None) -> None:
        self._root, self._disturbance = str(root), disturbance
        self._counts: Counter[str] = Counter()
        self._calls, self._full, self.hit = 0, False, False
        self._lock = threading.RLock()
        self._journal = journal.open("a", buffering=1) if journal else None

    # -- counting

    def call(self, label: str, original: Callable[[], Any], torn: Callable[[bool], Any] | None = None) -> Any:
        """Count one call and make it, as the disturbance wants. torn: does half of it; its argument: then die."""
        if threading.current_thread().name.startswith("weir-"):  # heartbeats
            return original()
        with self._lock:
            self._calls += 1
            self._counts[label] += 1
            point = Point(label, self._counts[label])
            if self._journal:
                self._journal.write(f"{json.dumps([point.label, point.n, os.getpid()])}\n")
            mine = self._is(point)
        if self._full and not point.reads:
            raise _error("ENOSPC", point)
        if not mine:
            return original()
        assert self._disturbance is not None
        if not self._first(self._disturbance):
            return original()
        self.hit = True
        return self._disturbed(self._disturbance, point, original, torn)

    def _is(self, point: Point) -> bool:
        if self._disturbance is None or self.hit:
            return False
        at = self._disturbance.at
        return at == self._calls if isinstance(at, int) else at == point

    def _disturbed(
        self, disturbance: Disturbance, point: Point, original: Callable[[], Any], torn: Callable[[bool], Any] | None
    ) -> Any:
        fault = disturbance.fault
        if fault.startswith("torn") and torn is not None:
            torn(fault == "torn, killed")
            raise _error("EIO", point)
        if fault in ("kill before", "torn, killed"):
            _die()
        if fault in ("hang", "zombie before"):
            self._hang(disturbance)
        if fault == "full":
            self._full = True
            raise _error("ENOSPC", point)
        if fault in ("EIO", "ENOSPC", "DeltaError", "torn, EIO"):
            raise _error(fault, point)
        try:
            result = original()
        except Exception:  # such as of a table that is not there, which is an answer too
            if fault == "kill after":
                _die()
            raise
        if fault == "kill after":
            _die()
        if fault == "zombie after":
            self._hang(disturbance)
        if fault in ("lie", "lie of a conflict"):
            raise _error(fault, point)
        return result

    def _first(self, disturbance: Disturbance) -> bool:
        """Whether no other process has got there, where several share a marker."""
        if disturbance.marker is None:
            return True
        try:
            reached(disturbance.marker).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def _hang(disturbance: Disturbance) -> None:
        assert disturbance.marker is not None and disturbance.release is not None
        disturbance.marker.touch()
        parent = os.getppid()
        while not disturbance.release.exists():
            if os.getppid() != parent:  # whoever watched it is gone, and nobody will end it
                _die()
            time.sleep(0.002)

    # -- wrapping

    def install(self) -> None:
        """Wrap everything in this process, for good: it is a child that ends after its run."""
        for name, method in _public(Storage, "Storage"):
            setattr(Storage, name, self._storage_method(name, method))
        for name, function in _public(fenced_table, "delta_log"):
            self._rebind(function, self._delta_function(name, function))
        self._rebind(log_entries.append, self._delta_function("append", log_entries.append))
        for name in ("update_incremental", "history", "create_checkpoint"):
            setattr(DeltaTable, name, self._handle_method(name, getattr(DeltaTable, name)))
        for name, method in _public(RocksDBBackend, "RocksDBBackend"):
            setattr(RocksDBBackend, name, self._backend_method(name, method))
        RocksDBBackend.__init__ = self._backend_method("open", RocksDBBackend.__init__)  # type: ignore[method-assign]
        for module, names in ((os, ("link", "rename", "replace")), (shutil, ("copyfile", "rmtree"))):
            for name in names:
                setattr(module, name, self._local(name, getattr(module, name)))
        for name in ("rename", "write_text", "unlink"):
            setattr(Path, name, self._local(name, getattr(Path, name)))

    def _storage_method(self, name: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(storage: Storage, *args: Any, **kwargs: Any) -> Any:
            path = next((value for value in args if isinstance(value, str)), kwargs.get("path", ""))
            label = f"Storage.{name} {self._named(path)}".rstrip()

            def original() -> Any:
                result = method(storage, *args, **kwargs)
                return iter(list(result)) if isinstance(result, types.GeneratorType) else result

            def torn(die: bool) -> None:
                with _torn_streams(storage, die):
                    method(storage, *args, **kwargs)

            return self.call(label, original, torn if name in TORN else None)

        return wrapped

    def _delta_function(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            path = (
                first.table_uri
                if isinstance(first, DeltaTable | log_entries.TableVersion)
                else f"{getattr(first, 'uri', '')}/{args[1]}"
                if len(args) > 1
                else ""
            )

            def torn(die: bool) -> None:
                # As the store does it on a disk: the entry is written beside its name, then linked there.
                version = first.version() + 1  # type: ignore[union-attr]
                log = Path(first.table_uri.removeprefix("file://")) / "_delta_log"  # type: ignore[union-attr]
                beside = (
                    f"{version:020d}.json#1" if name == "commit" else f".tmp-{uuid.uuid4().hex}-{version:020d}.json"
                )
                (log / beside).write_bytes(b'{"commitInfo":{"timestamp":17')
                if die:
                    _die()

            label = f"delta_log.{name} {self._named(path)}".rstrip()
            return self.call(label, lambda: function(*args, **kwargs), torn if name in TORN else None)

        return wrapped

    def _handle_method(self, name: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(handle: DeltaTable, *args: Any, **kwargs: Any) -> Any:
            label = f"DeltaTable.{name} {self._named(handle.table_uri)}"
            return self.call(label, lambda: method(handle, *args, **kwargs))

        return wrapped

    def _backend_method(self, name: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(backend: RocksDBBackend, *args: Any, **kwargs: Any) -> Any:
            path = args[0] if name == "open" else backend.path

            def original() -> Any:
                result = method(backend, *args, **kwargs)
                return iter(list(result)) if isinstance(result, types.GeneratorType) else result

            return self.call(f"backend.{name} {self._named(str(path))}", original)

        return wrapped

    def _local(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = str(args[0])
            if not path.startswith(self._root) or "/storage/" in path:
                return function(*args, **kwargs)
            ignores = bool(kwargs.get("ignore_errors"))
            try:
                return self.call(f"local.{name} {self._named(path)}", lambda: function(*args, **kwargs))
            except OSError:
                if not ignores:
                    raise
                return None

        return wrapped

    def _named(self, path: str) -> str:
        path = path.removeprefix("file://")
        path = path.removeprefix(self._root).strip("/")
        path = re.sub(r"^(storage|work)/[^/]+/?", lambda match: "" if match[1] == "storage" else "work/", path)
        return _UUID.sub("*", _PROCESS.sub("/.pid-", path))

    @staticmethod
    def _rebind(original: Callable, wrapped: Callable) -> None:
        """Put the wrapped function wherever a module has imported the original by name."""
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(("state_ops", "weir")):
                for name, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, name, wrapped)


def reached(marker: Path) -> Path:
    """The file that is there from the moment on in which a call is disturbed."""
    return marker.with_name(f"{marker.name}.reached")


def one_by_one() -> None:
    """Transfers follow each other in the order in which they were asked for, and so does what threads of a pool do."""
    begun = transfers._begun
    transfers._begun = lambda steps, at_once, **options: begun(steps, 1, **options)  # noqa: ARG005  the signature is Weir's
    init = concurrent.futures.ThreadPoolExecutor.__init__

    def alone(
        pool: concurrent.futures.ThreadPoolExecutor, max_workers: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        init(pool, 1, *args, **kwargs)

    concurrent.futures.ThreadPoolExecutor.__init__ = alone  # type: ignore[method-assign, assignment]


def _public(owner: Any, title: str) -> list[tuple[str, Callable]]:
    return [
        (name, value)
        for name, value in vars(owner).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and name not in _NEVER_LEAVES_MEMORY.get(title, ())
        and value.__module__ == getattr(owner, "__module__", getattr(owner, "__name__", None))
    ]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _error(fault: str, point: Point) -> Exception:
    if fault == "lie of a conflict" and point.operation in COMMITS:
        return CommitFailedError("injected: the commit met another one")
    if point.operation.startswith("backend."):  # what the backend makes of whatever RocksDB raises
        return TransientError(f"RocksDB failed: injected {fault} at {point}")
    if fault == "DeltaError" and point.is_delta:
        return DeltaError(f"injected: Generic error at {point}")
    number = errno.ENOSPC if fault == "ENOSPC" else errno.EIO
    return OSError(number, f"injected {fault}: {os.strerror(number)}", str(point))


class _TornStream:
    """Takes half of what it is given first, then the disk fails, or the process dies."""

    def __init__(self, stream: Any, die: bool) -> None:
        self._stream, self._die = stream, die

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self._stream.write(view[: len(view) // 2])
        self._stream.flush()
        if self._die:
            _die()
        raise OSError(errno.EIO, f"injected torn write: {os.strerror(errno.EIO)}")

    def __enter__(self) -> _TornStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


class _TornFileSystem:
    def __init__(self, fs: Any, die: bool) -> None:
        self._fs, self._die = fs, die

    def open_output_stream(self, *args: Any, **kwargs: Any) -> _TornStream:
        return _TornStream(self._fs.open_output_stream(*args, **kwargs), self._die)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


@contextmanager
def _torn_streams(storage: Storage, die: bool) -> Iterator[None]:
    store: Any = storage.store
    store = store._store  # behind what counts its requests
    fs = store._fs
    store._fs = _TornFileSystem(fs, die)
    try:
        yield
    finally:
        store._fs = fs


def read_journal(journal: Path) -> list[Point]:
    """The calls of one run, in their order."""
    return [Point(label, n) for label, n, _ in map(json.loads, journal.read_text().splitlines())]
