"""Keys of a terminal, one at a time, while a page is shown: no Enter is waited for, and nothing that is typed is shown."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from types import TracebackType

UP, DOWN, ENTER, BACK = "up", "down", "enter", "back"

_NAMES = {
    b"\x1b[A": UP,
    b"\x1bOA": UP,
    b"\x1b[B": DOWN,
    b"\x1bOB": DOWN,
    b"\x1b[C": ENTER,
    b"\x1bOC": ENTER,
    b"\x1b[D": BACK,
    b"\x1bOD": BACK,
    b"\x1b": BACK,
    b"\x7f": BACK,
    b"\r": ENTER,
    b"\n": ENTER,
    b"k": UP,
    b"j": DOWN,
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[@-~]|.", re.DOTALL)
_REST_OF_A_KEY_SECONDS = 0.1  # over a slow line the bytes of an arrow come one by one


class Keys:
    """The keys of stdin, in a `with` block at whose end the terminal is as it was."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, seconds: float) -> list[str]:
        """Return the keys that are pressed within so many seconds, by name or as they are. It waits no longer than for
        the first.

        Raises:
            EOFError: The terminal is gone.
        """
        if not self._readable(seconds):
            return []
        data = os.read(self._fd, 1024)
        if not data:
            raise EOFError
        while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and self._readable(_REST_OF_A_KEY_SECONDS):
            data += os.read(self._fd, 1024)
        return _split(data)

    def _readable(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._fd], [], [], seconds)
        return bool(readable)


def _split(data: bytes) -> list[str]:
    return [_NAMES.get(key) or key.decode("latin-1") for key in _KEY.findall(data)]
