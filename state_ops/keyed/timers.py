"""Timers: moments at which a key wants to be called again, by event time or by processing time.

    group | EVENT_TIMERS or PROCESSING_TIMERS               | at (int64 us) | key  ->  held
    group | EVENT_TIMERS_OF_KEY or PROCESSING_TIMERS_OF_KEY | key | at (int64 us)  ->  nothing

The first gives what is due as one range of a key group, in order of time; the second what a key has. A timer is its key
and its time, so that setting the same one again changes nothing. held: minus the id of the epoch in whose barrier it
does not fire (int64, big endian), or 0; see `TimerState.firing`. Earlier releases wrote the id itself, and pipelines of
theirs have ids twice: those that were started from a savepoint counted from 1 again, and a promotion could have a lower
one than its branch. So a positive number holds nothing
any more: the barrier in which it did is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.durations import micros
from state_ops.errors import StageError
from state_ops.keyed.handle import BatchHandle
from state_ops.keyed.key_batch import KeyBatch
from state_ops.rows.entry_buffer import Entries
from state_ops.schema.descriptors import (
    EVENT_TIMERS,
    EVENT_TIMERS_OF_KEY,
    GROUP,
    PROCESSING_TIMERS,
    PROCESSING_TIMERS_OF_KEY,
)
from state_ops.schema.key_codec import decode_keys, encode_int64, group_prefix

AT, DOMAIN = "at", "domain"
EVENT, PROCESSING = "event", "processing"
MOMENT = pa.timestamp("us", tz="UTC")

_KINDS = {EVENT: (EVENT_TIMERS, EVENT_TIMERS_OF_KEY), PROCESSING: (PROCESSING_TIMERS, PROCESSING_TIMERS_OF_KEY)}
_MAX = (1 << 63) - 1


class TimerState(BatchHandle):
    """The timers of each key: `state.timers`.

    Args:
        now: Processing time of the epoch, in microseconds.
        epoch: Its id.
    """

    def __init__(
        self,
        backend: Backend,
        keys: pa.Schema,
        where: str,
        now: int,
        epoch: int,
        allowed: bool,
        event_time: bool = True,
    ) -> None:
        self._backend, self._keys, self._where, self._now, self._epoch = backend, keys, where, now, epoch
        self.allowed, self._event_time = allowed, event_time
        self._timers = Entries(backend)
        self._firing: tuple[str, np.ndarray, int] | None = None
        self.disturbed = False

    # -- the runtime's half

    def begin(self, batch: KeyBatch) -> None:
        self._batch, self._firing = batch, None

    def firing(self, domain: str, at: np.ndarray, clock: int) -> None:
        """Begin a batch of keys whose timers fire, one timer a key, at these moments.

        What is set now fires in the same barrier if it is due and later than the timer that set it: in order, and not
        for ever. Any other timer of this domain that is set now is held until the next epoch. `disturbed` then says
        whether timers that are due have changed.

        Args:
            clock: What makes others due.
        """
        self._firing, self.disturbed = (domain, at, clock), False

    def changes(self) -> list[Entries]:
        """Return the changes of the batch that are not written yet."""
        return [self._timers]

    # -- the author's half

    def set(self, frame: Any, *, at: str | None = None, after: str | timedelta | None = None) -> None:
        """Have `on_timer` called for each row's key, at a moment of event time or after a while of processing time.

        Several moments for one key are several timers; the same one twice is one.

        Args:
            at: A column of timestamps; the timer fires at the first barrier whose watermark has reached it; a row
                without one sets none.
            after: E.g. "15m" from `epoch.now`; it fires at the first barrier whose `epoch.now` has reached that.
        """
        given, codes = self._given(frame, "state.timers.set")
        if (at is None) == (after is None):
            raise StageError(
                "state.timers.set needs a moment.",
                where=self._where,
                next='Say either at="column" (event time) or after="15m" (processing time).',
            )
        if at is not None and not self._event_time:
            raise StageError(
                f"state.timers.set: nothing would ever fire at={at!r}, since the stage's source has no event time.",
                where=self._where,
                next='Name the column at the source: files(..., event_time="..."), or say after="15m" (processing '
                "time).",
            )
        if at is not None:
            self._set(EVENT, *self._moments(given, codes, at, "state.timers.set"))
        else:
            assert after is not None
            moment = self._now + micros(after, f"{self._where}, state.timers.set", "after")
            self._set(PROCESSING, codes, np.full(len(codes), moment, np.int64))

    def clear(self, frame: Any, *, at: str | None = None) -> None:
        """Take back all timers of each row's key, or with `at`, a column, the event-time one at that moment."""
        given, codes = self._given(frame, "state.timers.clear")
        if at is not None:
            self._forget(EVENT, *self._moments(given, codes, at, "state.timers.clear"))
            return
        codes = np.unique(codes)
        for domain, (_, of_key) in _KINDS.items():
            stored = [key for key, _ in self._timers.below(self.batch.encoded(of_key, codes))]
            columns = decode_keys(stored, [*self._keys.types, pa.int64()])[1]
            owners: pl.DataFrame = pl.from_arrow(pa.table(columns[:-1], names=self._keys.names))  # type: ignore[assignment]
            self._forget(domain, self.batch.codes(owners, "state.timers.clear"), columns[-1].to_numpy())

    # -- how

    def _given(self, frame: Any, method: str) -> tuple[pl.DataFrame, np.ndarray]:
        if not self.allowed:
            raise StageError(
                f"{method}: nothing is called when a timer fires.",
                where=self._where,
                next="Give the stage a function for it: @stage(..., on_timer=function).",
            )
        given = frames.polars(frame)
        return given, self.batch.codes(given, method)

    def _moments(
        self, frame: pl.DataFrame, codes: np.ndarray, column: str, method: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the key codes of the rows that have a moment, and these moments in microseconds."""
        if column not in frame.columns:
            raise StageError(
                f"{method}: at={column!r}, but the frame has no column {column!r}.",
                where=self._where,
                next=f"Its columns are: {', '.join(frame.columns)}.",
            )
        moments = frame[column]
        if not isinstance(moments.dtype, pl.Datetime):
            raise StageError(
                f"{method}: the column {column!r} is {moments.dtype}, not a timestamp.",
                where=self._where,
                next="Cast it to a timestamp first.",
            )
        return codes[moments.is_not_null().to_numpy()], moments.drop_nulls().dt.epoch("us").to_numpy()

    def _set(self, domain: str, codes: np.ndarray, at: np.ndarray) -> None:
        timers, of_key = _timer_keys(self.batch, domain, codes, at)
        held = np.zeros(len(codes), np.int64)
        if self._firing is not None and (self._firing[0] == domain or domain == EVENT):
            fires, firing, clock = self._firing
            # Event time has had its turn when processing time fires, also where the epoch's barrier comes once more.
            due = (at <= clock) & (at > firing[codes]) & (fires == domain)
            self.disturbed |= bool(due.any())
            # One that is set already stays what it is: a drain fires what was set before, and nothing that was held.
            now = -self._epoch
            before = [now if value is None else _held_by(value) for value in self._timers.get(timers)]
            held = np.where(due, 0, np.array(before, np.int64))
        self._timers.put(timers, held.astype(">i8").view("V8").tolist())
        self._timers.put(of_key, [b""] * len(of_key))

    def _forget(self, domain: str, codes: np.ndarray, at: np.ndarray) -> None:
        timers, of_key = _timer_keys(self.batch, domain, codes, at)
        self.disturbed |= bool(timers)
        self._timers.delete(timers)
        self._timers.delete(of_key)


class DueTimers:
    """The timers of one domain that are due, in pieces: what the barrier fires.

    Args:
        upto: The clock, in microseconds; None: all there are.
        most: Timers in one piece.
    """

    def __init__(
        self, backend: Backend, keys: pa.Schema, domain: str, groups: range, upto: int | None, epoch: int, most: int
    ) -> None:
        self._backend, self._keys, self._domain, self._groups = backend, keys, domain, groups
        self._upto, self._epoch, self._most = upto, epoch, most
        self._at = 0  # before this position in `groups` nothing is due any more

    def piece(self) -> pl.DataFrame:
        """Return the next timers: key columns, key group and `at` (microseconds), of each key in order of time; empty:
        no more.

        Only what has not been fired since is in it, so ask again for what is due after an author's function set timers.
        """
        timers_due: list[tuple[bytes, bytes]] = []
        for position in range(self._at, len(self._groups)):
            start, end = self._range(self._groups[position])
            entries = (entry for entry in self._backend.scan(start, end) if not self._held(entry[1]))
            timers_due += islice(entries, self._most - len(timers_due))
            if len(timers_due) == self._most:
                break
            if not timers_due:
                self._at = position + 1
        groups, columns = decode_keys([key for key, _ in timers_due], [pa.int64(), *self._keys.types])
        table = pa.table(
            [*columns[1:], pa.array(groups.astype(np.int32)), columns[0]], names=[*self._keys.names, GROUP, AT]
        )
        timers: pl.DataFrame = pl.from_arrow(table)  # type: ignore[assignment]
        return timers.sort([AT, *self._keys.names])

    def _range(self, group: int) -> tuple[bytes, bytes]:
        by_time = _KINDS[self._domain][0]
        start = group_prefix(group, by_time)
        if self._upto is None or self._upto == _MAX:
            return start, group_prefix(group, by_time + 1)
        return start, start + encode_int64(self._upto + 1)

    def _held(self, value: bytes) -> bool:
        return _held_by(value) == -self._epoch

    def fired(self, timers: pl.DataFrame) -> None:
        """Forget timers, which are fired now."""
        batch = KeyBatch(timers, self._keys, "")
        by_time, of_key = _timer_keys(batch, self._domain, batch.codes(timers, ""), timers[AT].to_numpy())
        self._backend.write([], [*by_time, *of_key])


def _timer_keys(batch: KeyBatch, domain: str, codes: np.ndarray, at: np.ndarray) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of timers, ordered by their time and by their key. at: microseconds since 1970 UTC."""
    by_time, of_key = _KINDS[domain]
    moments = pa.array(at, pa.int64())
    return batch.encoded(by_time, codes, [moments]), batch.encoded(of_key, codes, [], [moments])


def _held_by(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def waves(timers: pl.DataFrame, keys: list[str]) -> Iterator[pl.DataFrame]:
    """Timers as frames that have a key at most once: first each key's first timer, then each key's second, and so
    on."""
    number = timers.select(pl.int_range(pl.len()).over(keys)).to_series() if len(timers) else None
    if number is None:
        return
    for wave in range(int(number.max()) + 1):  # type: ignore[arg-type]
        yield timers.filter(number == wave)


def are_set(backend: Backend, groups: range) -> bool:
    """Return whether any timer is set in some key groups."""
    return any(
        True
        for group in groups
        for _ in backend.scan(group_prefix(group, EVENT_TIMERS), group_prefix(group, PROCESSING_TIMERS + 1))
    )


def scan_timers(backend: Backend, keys: pa.Schema, groups: range) -> Iterator[pa.Table]:
    """Yield the timers that are set in some key groups: key columns, `at` and `domain` ("event" or "processing")."""
    for group in groups:
        for domain, (by_time, _) in _KINDS.items():
            stored = [key for key, _ in backend.scan(group_prefix(group, by_time), group_prefix(group, by_time + 1))]
            if stored:
                _, columns = decode_keys(stored, [pa.int64(), *keys.types])
                names = pa.array([domain] * len(stored))
                yield pa.table([*columns[1:], columns[0].cast(MOMENT), names], names=[*keys.names, AT, DOMAIN])
