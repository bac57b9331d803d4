"""Coordinators in processes of their own, and what the driver does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.coordinator import Order
from weir.settings.configuration import PROJECT

_PATIENCE = 120.0


class Violation(AssertionError):
    """A guarantee does not hold."""


@dataclass
class Child:
    """One coordinator. epochs: what it said of each that it completed; ends: how its runs ended."""

    process: subprocess.Popen
    events: Path
    complained: Path
    host: str = ""
    ready: bool = False
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def go(self, order: Order) -> None:
        wait_for(lambda: self.listen().ready, "a child to be ready", self)
        self.host = order.host
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        self.process.stdin.flush()

    def listen(self) -> Child:
        """Take in what it has said meanwhile; a last line that is not whole yet waits."""
        with self.events.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            event = json.loads(line)
            if "ready" in event:
                self.ready = True
            elif "end" in event:
                self.ends.append(event["end"])
            else:
                self.epochs.append(event)
        return self

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all of it, and its end. One that has ended already stays as it is."""
        if not self.ended:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.listen()

    def complaint(self) -> str:
        return f"{self.ends}\n{self.complained.read_text()[-3000:]}"


def start(directory: Path, name: str) -> Child:
    """A child that gets ready and then waits for its order."""
    directory.mkdir(parents=True, exist_ok=True)
    output, complained = directory / f"{name}.jsonl", directory / f"{name}.err"
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    with output.open("wb") as out, complained.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.coordinator"],
            cwd=PROJECT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return Child(process, output, complained)


@contextmanager
def started(directory: Path) -> Iterator[Callable[[], Child]]:
    """Starts children, `start()`; whatever is left of them at the end is killed."""
    children: list[Child] = []

    def another() -> Child:
        children.append(start(directory, f"{len(children):04d}"))
        return children[-1]

    try:
        yield another
    finally:
        for child in children:
            child.kill()


def wait_for(condition: Callable[[], object], what: str, *children: Child, patience: float = _PATIENCE) -> None:
    """Violation, with what the children said, unless the condition comes true in time."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise Violation(f"Waited {patience:g} s for {what}.\n" + "\n".join(child.complaint() for child in children))
        time.sleep(0.01)
