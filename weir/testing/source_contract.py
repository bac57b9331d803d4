"""The contract of every source, as tests: `SourceContract`, for the sources of this project and of third parties.

    class TestCounter(SourceContract):
        @pytest.fixture
        def system(self, tmp_path):
            return CounterSystem(tmp_path)

`system` is a `SourceSystem`: the definition under test, and what the suite does to the system behind it. Each test
opens connectors anew, and hands positions and parts from one to the next as JSON, as a restarted process would. Of a
source that is not `replayable` no row is read twice.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from state_ops.errors import ConfigurationError, InputError, LostError, PipelineError, TransientError, WeirError
from weir.definition.source import (
    EARLIEST,
    LATEST,
    SKIP,
    Connector,
    Limits,
    Lost,
    Opening,
    Part,
    Planned,
    Position,
    Rejected,
    Source,
)
from weir.testing.expected import able, is_clear, raises, without_secrets

LARGE = Limits(parts=1000, rows=1 << 40, bytes=1 << 50)
CUTS = (
    LARGE,
    Limits(parts=1, rows=1 << 40, bytes=1 << 50),
    Limits(parts=3, rows=4, bytes=1 << 50),
    Limits(parts=1000, rows=1, bytes=1 << 50),
    Limits(parts=1000, rows=1 << 40, bytes=1),
)
_ROUNDS = 1000
_READ = """
import pickle, sys
source, opening, part = pickle.load(sys.stdin.buffer)
batches = list(source.open(opening).read(part))
rows = [row for batch in batches for row in batch.rows.to_pylist()]
pickle.dump((rows, [rejected for batch in batches for rejected in batch.rejected]), sys.stdout.buffer)
"""


class SourceSystem:
    """The source under test and the system that it reads. The system's rows are numbered from 0 as they are appended.

    Attributes:
        number: The integer column of the source in which a row's number is.
        position_bytes: How long a position may become as JSON.
        starts_at_times: The source can begin at a time. Else it must refuse to.
        cuts: A part has as few rows as the limits say. Else one that cannot be cut may have more.
        secrets: What must stand in no message.

    Example:
        >>> from weir import generator
        >>> from weir.testing import SourceSystem
        >>> class Counter(SourceSystem):
        ...     number = "seq"
        ...     rows = 0
        ...     def append(self, count):
        ...         self.rows += count
        ...     @property
        ...     def source(self):
        ...         return generator(end=self.rows)
        >>> counter = Counter()
        >>> counter.append(9)
        >>> counter.source.end
        9
    """

    number = "id"
    position_bytes = 2048
    starts_at_times = True
    cuts = True
    secrets: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """The definition, which says on_lost="fail" and on_bad="quarantine"."""
        raise NotImplementedError

    @property
    def opening(self) -> Opening:
        """The opening with which the suite opens the source."""
        return Opening("contract", str, {})

    def append(self, count: int) -> None:
        """Add so many rows, numbered on."""
        raise NotImplementedError

    def append_bad(self) -> None:
        """Add one row that cannot be decoded; it takes no number."""
        raise NotImplementedError

    def lose(self) -> set[int]:
        """Delete some rows, the oldest among them, so that they cannot be read any more; returns their numbers."""
        raise NotImplementedError

    def alter(self) -> None:
        """Change rows that are there."""
        raise NotImplementedError

    def unreachable(self) -> Opening:
        """Return an opening that leads to a place where nobody answers."""
        raise NotImplementedError

    def refused(self) -> Opening:
        """Return an opening with a wrong password."""
        raise NotImplementedError


class SourceContract:
    """The tests. What a system cannot do (`lose`, `alter`, ...) raises NotImplementedError and is skipped.

    Example:
        >>> from weir import generator
        >>> from weir.testing import SourceContract, SourceSystem
        >>> class Counter(SourceSystem):
        ...     number = "seq"
        ...     rows = 0
        ...     def append(self, count):
        ...         self.rows += count
        ...     @property
        ...     def source(self):
        ...         return generator(end=self.rows)
        >>> class TestCounter(SourceContract):
        ...     pass  # in a file of tests it has a fixture `system`
        >>> TestCounter().test_limits_are_kept(Counter())
    """

    def test_all_rows_come_once_however_limits_cut(self, system: SourceSystem) -> None:
        system.append(9)
        rows_by_name: dict[str, list[int]] = {}
        for limits in CUTS if system.source.replayable else CUTS[2:3]:
            run = _Run(system, limits)
            run.until_end()
            assert sorted(run.numbers) == list(range(9)), f"with {limits}"
            names = [part.name for part in run.parts]
            assert len(set(names)) == len(names), f"with {limits} two parts have one name"
            for part, numbers in zip(run.parts, run.numbers_of_parts, strict=True):
                assert rows_by_name.setdefault(part.name, numbers) == numbers, (
                    f"{part.name} names other rows than before"
                )

    def test_limits_are_kept(self, system: SourceSystem) -> None:
        system.append(9)
        for limits in CUTS:
            position = begin(system)
            planned = plan(system, position, limits)
            while planned.parts:
                assert len(planned.parts) <= limits.parts
                if system.cuts:
                    assert sum(part.rows or 0 for part in planned.parts) <= limits.rows
                if len(planned.parts) > 1:
                    assert sum(part.rows or 0 for part in planned.parts) <= limits.rows
                    assert sum(part.bytes or 0 for part in planned.parts) <= limits.bytes
                position, limited = planned.position, planned.limited
                planned = plan(system, position, limits)
                assert bool(planned.parts) == limited, "limited says whether there is more"

    def test_parts_say_no_less_than_they_have(self, system: SourceSystem) -> None:
        system.append(15)
        run = _Run(system, CUTS[2])
        run.until_end()
        for part, numbers in zip(run.parts, run.numbers_of_parts, strict=True):
            assert part.rows is None or part.rows >= len(numbers)

    def test_a_part_is_the_same_each_time(self, system: SourceSystem) -> None:
        replayable(system)
        system.append(15)
        parts = plan(system, begin(system), LARGE).parts
        assert parts
        with opened(system) as connector:
            first = [read(connector, part) for part in parts]
            for part, rows in zip(parts, first, strict=True):
                assert read(connector, part) == rows, "read again"
            with ThreadPoolExecutor(8) as pool:
                in_threads = list(pool.map(lambda part: read(connector, part), parts * 4))
            assert in_threads == first * 4, "read in threads"
        system.append(5)
        with opened(system) as connector:
            assert [read(connector, part) for part in reversed(parts)] == first[::-1], (
                "read by another connector, later"
            )

    def test_a_part_is_the_same_in_another_process(self, system: SourceSystem) -> None:
        replayable(system)
        system.append(10)
        (part, *_) = plan(system, begin(system), LARGE).parts
        with opened(system) as connector:
            rows = read(connector, part)
        given = pickle.dumps((system.source, system.opening, part))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.run(
            [sys.executable, "-c", _READ], input=given, stdout=subprocess.PIPE, check=True, env=environment
        )
        assert pickle.loads(child.stdout) == rows

    def test_planning_again_gives_the_same_parts(self, system: SourceSystem) -> None:
        system.append(20)
        position = begin(system)
        assert plan(system, position, CUTS[2]) == plan(system, position, CUTS[2])

    def test_batches_have_the_same_columns(self, system: SourceSystem) -> None:
        system.append(15)
        source = system.source
        with opened(system) as connector:
            schemas = {
                _described(batch.rows.schema)
                for part in plan(system, begin(system), CUTS[2]).parts
                for batch in connector.read(part)
            }
        assert len(schemas) == 1
        if source.event_time is not None:
            assert any(name == source.event_time and "timestamp" in kind for name, kind in schemas.pop())

    def test_at_the_end_nothing_comes(self, system: SourceSystem) -> None:
        system.append(10)
        run = _Run(system, CUTS[2])
        run.until_end()
        planned = plan(system, run.position, LARGE)
        assert planned.parts == () and not planned.limited and planned.lost == ()
        assert planned.ends and all(planned.ends.values()), "the end of every partition is reached"
        assert {part.partition for part in run.parts} <= set(planned.ends), "every partition is named"

    def test_what_comes_later_is_read_alone(self, system: SourceSystem) -> None:
        run = _Run(system, LARGE)
        run.until_end()
        assert run.numbers == []
        for count in (1, 10, 3):
            before = len(run.numbers)
            system.append(count)
            run.until_end()
            assert sorted(run.numbers[before:]) == list(range(before, before + count))

    def test_a_branch_reads_no_further_than_its_pipeline(self, system: SourceSystem) -> None:
        replayable(system)
        system.append(12)
        pipeline = _Run(system, CUTS[2])
        pipeline.step()
        middle, seen = pipeline.position, sorted(pipeline.numbers)
        pipeline.until_end()
        system.append(3)
        for bound, expected in ((middle, seen), (pipeline.position, sorted(pipeline.numbers))):
            for limits in (LARGE, CUTS[2], CUTS[3]):
                branch = _Run(system, limits, upto=bound)
                branch.until_end()
                assert sorted(branch.numbers) == expected
                assert plan(system, bound, limits, bound).parts == ()

    def test_it_begins_where_it_is_told(self, system: SourceSystem) -> None:
        system.append(10)
        latest = begin(system, LATEST)
        assert plan(system, latest, LARGE).parts == (), "latest: what is there now is not read"
        assert begin(system, latest) == latest, "a position is where it says"
        system.append(3)
        run = _Run(system, LARGE, latest)
        run.until_end()
        assert sorted(run.numbers) == [10, 11, 12]
        with raises(WeirError):
            begin(system, "at the beginning")

    def test_a_position_that_is_none_is_refused(self, system: SourceSystem) -> None:
        system.append(10)
        with opened(system) as connector:
            position = connector.plan(connector.begin(EARLIEST), CUTS[2]).position
        wrong: list[Position] = [{}, {"no such thing": [1]}]
        wrong += [{**position, name: [["nonsense"]]} for name in position]
        for given in wrong:
            with opened(system) as connector, raises(WeirError) as caught:
                connector.begin(given)
            is_clear(caught.error, system.secrets)

    def test_a_partition_that_is_held_is_not_read(self, system: SourceSystem) -> None:
        system.append(10)
        position = begin(system)
        every = plan(system, position, LARGE).ends
        with opened(system) as connector:
            planned = connector.plan(position, LARGE, None, frozenset(every))
        assert planned.parts == ()
        run = _Run(system, LARGE, planned.position)
        run.until_end()
        assert sorted(run.numbers) == list(range(10)), "it is read later"

    def test_it_begins_at_a_time(self, system: SourceSystem) -> None:
        system.append(10)
        long_ago, much_later = datetime(1971, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
        if not system.starts_at_times:
            with raises(PipelineError):
                begin(system, long_ago)
            return
        run = _Run(system, LARGE, begin(system, long_ago))
        run.until_end()
        assert sorted(run.numbers) == list(range(10))
        assert plan(system, begin(system, much_later), LARGE).parts == ()

    def test_lag_is_right(self, system: SourceSystem) -> None:
        system.append(20)
        run = _Run(system, CUTS[2])
        while True:
            with opened(system) as connector:
                lag = connector.lag(run.position)
            waiting = 20 - len(run.numbers)
            if lag.rows is not None and not lag.is_estimate:
                assert lag.rows == waiting
            if not waiting:
                assert not lag.rows and not lag.bytes, "nothing waits"
                break
            assert lag.rows is None or lag.rows > 0, "something waits"
            run.step()

    def test_a_position_stays_small(self, system: SourceSystem) -> None:
        run = _Run(system, CUTS[2])
        for _ in range(5):
            system.append(9)
            run.until_end()
        assert len(json.dumps(run.position)) <= system.position_bytes

    def test_definitions_are_values(self, system: SourceSystem) -> None:
        source = system.source
        assert pickle.loads(pickle.dumps(source)) == source == replace(source)
        assert hash(source) == hash(replace(source)) and source != replace(source, name="another")
        assert source.kind

    def test_parts_are_named_for_people(self, system: SourceSystem) -> None:
        system.append(3)
        for part in plan(system, begin(system), LARGE).parts:
            with opened(system) as connector:
                where = connector.where(part)
            assert where and "\n" not in where
            without_secrets(system.secrets, where, json.dumps(asdict(part)))

    def test_parts_that_are_as_they_were_pass(self, system: SourceSystem) -> None:
        system.append(10)
        planned = plan(system, begin(system), CUTS[2])
        system.append(1)
        with opened(system) as connector:
            if system.source.replayable:
                connector.verify(planned.parts)
                connector.verify(())
            connector.committed(planned.position)
            connector.committed(planned.position)
            connector.close()

    def test_altered_rows_are_noticed(self, system: SourceSystem) -> None:
        system.append(10)
        parts = plan(system, begin(system), LARGE).parts
        with opened(system) as connector:
            for part in parts:
                read(connector, part)
            able(system.alter)
            with raises(InputError) as caught:
                connector.verify(parts)
        is_clear(caught.error, system.secrets)

    def test_lost_data_are_named(self, system: SourceSystem) -> None:
        replayable(system)
        system.append(20)
        position = begin(system)
        parts = plan(system, position, LARGE).parts
        able(system.lose)
        with opened(system) as connector, raises(LostError) as caught:
            for part in parts:
                read(connector, part)
        is_clear(caught.error, system.secrets)
        with raises(LostError) as caught:
            for part in plan(system, position, LARGE).parts:
                read_alone(system, part)
        is_clear(caught.error, system.secrets)

    def test_lost_data_are_left_out_where_that_is_said(self, system: SourceSystem) -> None:
        system.append(20)
        source = replace(system.source, on_lost=SKIP)
        position = begin(system)
        gone = able(system.lose)
        run = _Run(system, CUTS[2], position, source=source)
        run.until_end()
        assert sorted(run.numbers) == sorted(set(range(20)) - gone)
        assert run.lost and all(lost.where and lost.what for lost in run.lost)
        without_secrets(system.secrets, *(f"{lost.where} {lost.what}" for lost in run.lost))
        system.append(2)
        before = len(run.lost)
        run.until_end()
        assert len(run.lost) == before, "it is said once"
        assert sorted(run.numbers)[-2:] == [20, 21]

    def test_bad_rows_are_rejected_with_a_reason(self, system: SourceSystem) -> None:
        system.append(3)
        able(system.append_bad)
        system.append(2)
        run = _Run(system, LARGE)
        run.until_end()
        assert sorted(run.numbers) == list(range(5))
        (rejected,) = run.rejected
        assert rejected.reason and "\n" not in rejected.reason
        replayable(system)
        again = _Run(system, CUTS[2])
        again.until_end()
        assert again.rejected == run.rejected and sorted(again.numbers) == sorted(run.numbers)

    def test_a_server_that_is_away_is_named(self, system: SourceSystem) -> None:
        system.append(3)
        position = begin(system)
        opening = able(system.unreachable)
        with raises(ConfigurationError, TransientError) as caught, opened(system, opening=opening) as connector:
            connector.plan(position, LARGE)
        is_clear(caught.error, system.secrets)
        with raises(ConfigurationError, TransientError, passes=True), opened(system, opening=opening) as connector:
            connector.committed(position)

    def test_a_refused_password_is_not_shown(self, system: SourceSystem) -> None:
        system.append(3)
        position = begin(system)
        opening = able(system.refused)
        with raises(ConfigurationError) as caught, opened(system, opening=opening) as connector:
            connector.plan(position, LARGE)
        is_clear(caught.error, system.secrets)


class _Run:
    """A pipeline that reads a source to its end, every call by a connector of its own."""

    def __init__(
        self,
        system: SourceSystem,
        limits: Limits,
        position: Position | None = None,
        upto: Position | None = None,
        source: Source | None = None,
    ) -> None:
        self._system, self._limits, self._upto, self._source = system, limits, upto, source
        self.position = begin(system) if position is None else position
        self.parts: list[Part] = []
        self.numbers_of_parts: list[list[int]] = []
        self.rejected: list[Rejected] = []
        self.lost: list[Lost] = []

    @property
    def numbers(self) -> list[int]:
        return [number for numbers in self.numbers_of_parts for number in numbers]

    def step(self) -> bool:
        """Plan and read once; returns whether there was anything."""
        planned = plan(self._system, self.position, self._limits, self._upto, self._source)
        for part in planned.parts:
            with opened(self._system, self._source) as connector:
                rows, rejected = read(connector, part)
            self.parts.append(part)
            self.numbers_of_parts.append([row[self._system.number] for row in rows])
            self.rejected += rejected
        self.lost += planned.lost
        moved = bool(planned.parts or planned.lost)
        assert not moved or planned.position != self.position, "parts without progress"
        self.position = planned.position
        return moved

    def until_end(self) -> None:
        for _ in range(_ROUNDS):
            if not self.step():
                return
        raise AssertionError(f"there were parts after {_ROUNDS} plans")


@contextmanager
def opened(system: SourceSystem, source: Source | None = None, opening: Opening | None = None) -> Iterator[Connector]:
    """Return a new connector."""
    connector = (source or system.source).open(opening or system.opening)
    try:
        yield connector
    finally:
        connector.close()


def begin(system: SourceSystem, start: str | datetime | Position = EARLIEST) -> Position:
    """Return the result of `Connector.begin` of a new connector, as JSON keeps it."""
    with opened(system) as connector:
        position: Position = _kept(connector.begin(start))
        return position


def plan(
    system: SourceSystem,
    position: Position,
    limits: Limits,
    upto: Position | None = None,
    source: Source | None = None,
) -> Planned:
    """Return the result of `Connector.plan` of a new connector, as JSON keeps it."""
    with opened(system, source) as connector:
        planned = connector.plan(position, limits, upto)
    for part in planned.parts:
        assert part.name and "/" not in part.name, f"a part's name is a file's name, but {part.name!r} is none"
    parts = tuple(Part(**_kept(asdict(part))) for part in planned.parts)
    assert parts == planned.parts, "a part is the same after JSON"
    return replace(planned, parts=parts, position=_kept(planned.position))


def read(connector: Connector, part: Part) -> tuple[list[dict[str, Any]], list[Rejected]]:
    """Return all of a part: its rows, and those that cannot be decoded."""
    rows: list[dict[str, Any]] = []
    rejected: list[Rejected] = []
    for batch in connector.read(part):
        assert isinstance(batch.rows, pa.Table)
        rows += batch.rows.to_pylist()
        rejected += batch.rejected
    return rows, rejected


def read_alone(system: SourceSystem, part: Part) -> tuple[list[dict[str, Any]], list[Rejected]]:
    """Read a part with a new connector."""
    with opened(system) as connector:
        return read(connector, part)


def replayable(system: SourceSystem) -> None:
    """Skip the test, or the rest of it, where the source gives each row once."""
    if not system.source.replayable:
        import pytest

        pytest.skip("the source gives each row once")


def _kept(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def _described(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, str(field.type)) for field in schema)
