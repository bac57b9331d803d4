"""A wall clock that is set back and forth all the time, for one process: its Python code, not its native libraries."""

from __future__ import annotations

import datetime
import itertools
import sys
import time
from collections.abc import Iterable
from typing import Any

_OWN = ("weir", "state_ops", "pipelines")


def jump(offsets: Iterable[float]) -> None:
    """From now on every look at the wall clock is off by the next of these, in seconds, around and around."""
    around = itertools.cycle(list(offsets))
    real, real_ns, real_type = time.time, time.time_ns, datetime.datetime

    class _Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real_type)

    class Jumping(real_type, metaclass=_Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real_type.now(tz) + datetime.timedelta(seconds=next(around))

    time.time = lambda: real() + next(around)
    time.time_ns = lambda: real_ns() + int(next(around) * 1e9)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OWN and getattr(module, "datetime", None) is real_type:
            module.datetime = Jumping  # type: ignore[attr-defined]
