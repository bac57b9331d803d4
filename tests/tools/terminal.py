"""A program on a terminal of its own: what stands on its screen, and keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence

_HOME = "\x1b[H"  # where each picture of a page begins
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """One program, from its start to its end.

    Args:
        command: The program's path, and its arguments.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], columns: int = 80, lines: int = 24) -> None:
        self.written = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            os.execvpe(command[0], list(command), {**environment, "TERM": "xterm-256color"})

    @property
    def screen(self) -> list[str]:
        """The lines of the last whole picture, without colours."""
        pictures = self.written.split(_HOME)
        last = pictures[-2] if len(pictures) > 2 else pictures[-1]
        return [line.rstrip() for line in _ESCAPE.sub("", last).replace("\r", "").split("\n")]

    def until(self, condition: Callable[[str], object], seconds: float = 60) -> str:
        """The screen as soon as it is as it should be."""
        end = time.monotonic() + seconds
        while not condition("\n".join(self.screen)):
            assert time.monotonic() < end, "\n".join(self.screen)
            self._read(end - time.monotonic())
        return "\n".join(self.screen)

    def press(self, *parts: str) -> None:
        """Press a key, whose bytes may come one after the other."""
        for part in parts:
            os.write(self._fd, part.encode())
            time.sleep(0.02 if len(parts) > 1 else 0)

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def ended(self, seconds: float = 30) -> int:
        """The exit code, once it has ended by itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._read(0)
                os.close(self._fd)
                self._pid = 0
                return os.waitstatus_to_exitcode(status)
            self._read(0.05)
        raise AssertionError("it does not end:\n" + "\n".join(self.screen))

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._fd)

    def _read(self, seconds: float) -> None:
        readable, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if readable:
            try:
                self.written += os.read(self._fd, 65_536).decode(errors="replace")
            except OSError:  # its end of the terminal is closed
                time.sleep(min(0.05, max(0.0, seconds)))
