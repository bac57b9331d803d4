"""`weir` in a fork of a process that has loaded the libraries already: a command of a page takes a third of the time.

    python forked.py serve SOCKET MODULES... loads what Weir imports of others, nothing of Weir's, and forks for each command
    python forked.py ask SOCKET WORDS...    what `bin/weir` of a project becomes: has it run here and now, ends as it ends

Weir's own modules are imported after the fork, from the project that the command runs in. A coordinator that a test
kills is never one of these: it is a process of its own from the start.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys

_LIBRARIES = (
    "deltalake", "duckdb", "numpy", "obstore.store", "pandas", "polars", "prometheus_client", "psutil", "pyarrow.compute", "pyarrow.dataset",
    "pyarrow.fs", "pyarrow.parquet", "pydantic", "rich.console", "rich.progress", "rich.table", "rocksdict", "stamina", "structlog", "typer", "xxhash",
    "yaml",
)  # fmt: skip


def serve(where: str, *more: str) -> None:
    """Until it is killed. more: other modules that are loaded."""
    for name in (*_LIBRARIES, *more):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever has a command's end to tell is not waited for
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(where)
        door.listen()
        print("ready", flush=True)
        while True:
            guest, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _handle(guest)
            guest.close()


def _handle(guest: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fds = array.array("i")
    message, passed, _, _ = guest.recvmsg(1 << 20, socket.CMSG_SPACE(3 * fds.itemsize))
    for _, _, data in passed:
        fds.frombytes(data)
    order = json.loads(message)
    child = os.fork()
    if child == 0:
        guest.close()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        _run(order)
    for fd in fds:  # else who reads the output would wait for this process too
        os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(null, target)
    _kill_with(guest, child)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        guest.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _kill_with(guest: socket.socket, child: int) -> None:
    """Wait until the command ends. If the process that asked for it is killed, it is killed too."""
    waiting = select.poll()
    ended = os.pidfd_open(child)
    waiting.register(ended, select.POLLIN)
    waiting.register(guest, select.POLLIN)
    if guest.fileno() in dict(waiting.poll()):
        os.kill(child, signal.SIGKILL)
    os.close(ended)


def _run(order: dict) -> None:
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = ["weir", *order["words"]]
    sys.path.insert(0, order["env"]["PYTHONPATH"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open(order["command"]) as file:  # noqa: PTH123  nothing more is loaded than has to be
        exec(compile(file.read(), order["command"], "exec"), {"__name__": "__main__"})
    os._exit(0)


def ask(where: str, command: str, words: list[str]) -> int:
    order = {"env": dict(os.environ), "cwd": os.getcwd(), "command": command, "words": words}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(where)
        fds = array.array("i", [0, 1, 2])
        there.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        return int(there.recv(64) or b"1")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3], sys.argv[4:]))
