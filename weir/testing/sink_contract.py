"""The contract of every sink, as tests: `SinkContract`, for the sinks of this project and of third parties.

    class TestShelf(SinkContract):
        @pytest.fixture
        def system(self, tmp_path):
            return ShelfSystem(tmp_path)

`system` is a `SinkSystem`: the definition under test, and how the suite looks into the system behind it. Each publish
is by a publisher of its own, as after a restart, where a test does not say otherwise. A sink that says of itself that
it is not `exactly_once` is only asked to take every row at least once. A sink that `has_versions` gets its rows as the
engine gives them to it, as files in the storage of the system's `opening`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from state_ops.errors import ConfigurationError, DamageError, FencedError, PipelineError, TransientError, WeirError
from weir.definition.sink import (
    Judging,
    Published,
    Publisher,
    Rows,
    Sink,
    SinkOpening,
    TakingBack,
    no_rows,
)
from weir.testing.expected import able, is_clear, raises, without_secrets
from weir.testing.handed_rows import handed, handed_back

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("at", pa.timestamp("us", "UTC"))])
Row = tuple[int, str]


class SinkSystem:
    """The sink under test and the system that it writes to.

    Attributes:
        keyed: The sink keeps one row for each `id`, the last one.
        refuses_types: The sink says before a commit which types it does not take.
        secrets: What must stand in no message.

    Example:
        >>> from weir import postgres
        >>> from weir.testing import SinkSystem
        >>> class Shop(SinkSystem):
        ...     sink = postgres.sink("orders", key="id")
        ...     keyed = True
        ...     secrets = ("hunter2",)
        >>> Shop().opening.app_id
        'contract/main/out'
    """

    keyed = False
    refuses_types = True
    secrets: tuple[str, ...] = ()

    @property
    def sink(self) -> Sink:
        """The definition, for rows of `SCHEMA`; its key, if it has one, is `id`."""
        raise NotImplementedError

    @property
    def opening(self) -> SinkOpening:
        """The opening with which the suite opens the sink."""
        return SinkOpening("contract/main/out", str, {}, lambda: None)

    def contents(self) -> Iterable[Row]:
        """Return the columns id and text of all rows that a reader sees, in any order; nothing where nothing was
        prepared."""
        raise NotImplementedError

    def refused_rows(self) -> pa.Table:
        """Two rows of `SCHEMA`: a good one, and one whose value the sink refuses."""
        raise NotImplementedError

    def break_marker(self) -> None:
        """Remove the sink's marker, and nothing else."""
        raise NotImplementedError

    def unreachable(self) -> SinkOpening:
        """Return an opening that leads to a place where nobody answers."""
        raise NotImplementedError

    def refused(self) -> SinkOpening:
        """Return an opening with a wrong password."""
        raise NotImplementedError


@dataclass(frozen=True)
class GivenRows:
    """Rows of a test, in batches of two.

    Attributes:
        after: Called when that many batches have been handed out.
    """

    rows: Sequence[Row]
    after: tuple[int, Callable[[], None]] | None = None

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def since(self) -> None:
        return None

    def batches(self) -> Iterator[pa.RecordBatch]:
        for number, start in enumerate(range(0, len(self.rows), 2)):
            if self.after is not None and self.after[0] == number:
                self.after[1]()
            ids, texts = zip(*self.rows[start : start + 2], strict=True)
            yield pa.record_batch(
                [pa.array(ids, pa.int64()), pa.array(texts), pa.nulls(len(ids), SCHEMA.field(2).type)], schema=SCHEMA
            )


def given(*ids: int, text: str = "a") -> GivenRows:
    """Return rows with these ids."""
    return GivenRows([(id, f"{text}{id}") for id in ids])


class PowerCut(Exception):
    """Raised to end a publish before it is done."""


def cut_power() -> None:
    """Raise PowerCut."""
    raise PowerCut


class SinkContract:
    """The tests. What a system cannot do raises NotImplementedError and is skipped.

    Example:
        >>> from weir import foreach
        >>> from weir.testing import SinkContract, SinkSystem
        >>> class Sent(SinkSystem):
        ...     def __init__(self):
        ...         self.rows = []
        ...     def take(self, rows, checkpoint):
        ...         self.rows += zip(rows["id"].to_pylist(), rows["text"].to_pylist())
        ...     @property
        ...     def sink(self):
        ...         return foreach(self.take, name="sent")
        ...     def contents(self):
        ...         return self.rows
        >>> class TestSent(SinkContract):
        ...     pass  # in a file of tests it has a fixture `system`
        >>> TestSent().test_a_sink_that_may_repeat_takes_every_row(Sent())
    """

    def test_rows_and_marker_come_together(self, system: SinkSystem) -> None:
        with publisher(system) as first:
            assert first.marker() is None
        published = publish(system, None, 1, given(1, 2, 3))
        assert published.rows == 3
        expect(system, given(1, 2, 3), marker=1)
        publish(system, 1, 5, given(4, 5))
        expect(system, given(1, 2, 3, 4, 5), marker=5)

    def test_one_publisher_goes_on(self, system: SinkSystem) -> None:
        with publisher(system) as opened:
            for checkpoint in range(1, 5):
                opened.check(SCHEMA)
                opened.prepare(SCHEMA)
                previous = checkpoint - 1 or None
                opened.publish(previous, checkpoint, _handed(system, previous, checkpoint, given(checkpoint)))
                assert opened.marker() == (checkpoint if system.sink.exactly_once else None)
        expect(system, given(1, 2, 3, 4), marker=4)

    def test_publishing_again_changes_nothing(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 3, given(1, 2))
        for previous, checkpoint in ((None, 3), (None, 2), (1, 2), (2, 3)):
            brought_none(system, publish(system, previous, checkpoint, given(8, 9)))
            expect(system, given(1, 2), marker=3)

    def test_another_previous_is_damage(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 3, given(1))
        for previous in (None, 2, 4):
            with raises(DamageError) as caught:
                publish(system, previous, 5, given(9))
            is_clear(caught.error, system.secrets)
            expect(system, given(1), marker=3)
        publish(system, 3, 5, given(2))
        expect(system, given(1, 2), marker=5)

    def test_an_absent_marker_is_the_beginning_alone(self, system: SinkSystem) -> None:
        exactly_once(system)
        with raises(DamageError):
            publish(system, 2, 3, given(9))
        expect(system, given(), marker=None)
        publish(system, None, 3, given(1))
        able(system.break_marker)
        with raises(DamageError) as caught:
            publish(system, 3, 4, given(9))
        is_clear(caught.error, system.secrets)
        expect(system, given(1), marker=None)

    def test_no_rows_move_the_marker(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 1, no_rows())
        expect(system, given(), marker=1)
        publish(system, 1, 2, given(1))
        assert publish(system, 2, 3, no_rows()).rows == 0
        expect(system, given(1), marker=3)

    def test_each_pipeline_has_its_marker(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 7, given(1))
        with publisher(system, replace(system.opening, app_id="contract/fix/out")) as other:
            assert other.marker() is None

    def test_what_fails_half_way_has_done_nothing(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 1, given(1))
        rows = given(2, 3, 4, 5, 6)
        for batches in range(3):
            try:
                publish(system, 1, 2, replace(rows, after=(batches, cut_power)))
            except PowerCut:
                expect(system, given(1), marker=1)
            else:
                raise AssertionError("an error of the rows must not be swallowed")
        publish(system, 1, 2, rows)
        expect(system, given(1, 2, 3, 4, 5, 6), marker=2)

    def test_a_sink_that_may_repeat_takes_every_row(self, system: SinkSystem) -> None:
        publish(system, None, 1, given(1, 2))
        if not system.sink.exactly_once:
            publish(system, None, 1, given(1, 2))
            publish(system, 1, 2, no_rows())
        assert set(system.contents()) == set(given(1, 2).rows)

    def test_publishers_side_by_side_publish_once(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 1, given(1))

        def try_to_publish(_: int) -> Published | WeirError:
            for _attempt in range(20):
                try:
                    return publish(system, 1, 2, given(2, 3, 4))
                except TransientError as error:
                    last = error
            return last

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(try_to_publish, range(4)))
        if not system.sink.capabilities.has_versions:
            assert sum(outcome.rows for outcome in outcomes if isinstance(outcome, Published)) == 3, outcomes
        expect(system, given(1, 2, 3, 4), marker=2)

    def test_a_zombie_publishes_what_the_owner_would(self, system: SinkSystem) -> None:
        """It was taken over before it had published; whoever comes second finds the marker."""
        exactly_once(system)
        publish(system, None, 1, given(1))
        with publisher(system) as zombie:
            assert zombie.marker() == 1
            publish(system, 1, 2, given(2))
            assert _unless_fenced(system, lambda: zombie.publish(1, 2, _handed(system, 1, 2, given(2)))) in (None, 0)
        publish(system, 2, 3, given(3))
        expect(system, given(1, 2, 3), marker=3)

    def test_after_a_rewind_a_zombie_publishes_nothing(self, system: SinkSystem) -> None:
        exactly_once(system)
        publish(system, None, 3, given(1))
        with publisher(system) as zombie:
            zombie.prepare(SCHEMA)
            publish(system, 3, 7, no_rows())  # the rewind's checkpoint
            assert _unless_fenced(system, lambda: zombie.publish(3, 4, _handed(system, 3, 4, given(4)))) in (None, 0)
            expect(system, given(1), marker=7)
            publish(system, 7, 8, given(8))
            assert _unless_fenced(system, lambda: zombie.publish(4, 5, _handed(system, 4, 5, given(5)))) in (None, 0)
        expect(system, given(1, 8), marker=8)

    def test_a_zombie_in_the_middle_publishes_nothing_after_a_rewind(self, system: SinkSystem) -> None:
        """The rewind comes while a zombie's rows are under way. Either it waits for them, or they are nothing."""
        exactly_once(system)
        publish(system, None, 3, given(1))
        with ThreadPoolExecutor(1) as pool:
            rewinds = []

            def rewind() -> None:
                rewinds.append(pool.submit(_rewind, system))

            _unless_fenced(system, lambda: publish(system, 3, 4, replace(given(4, 5, 6), after=(1, rewind))))
            rewinds[0].result()
        ids = {id for id, _ in system.contents()}
        assert ids in ({1}, {1, 4, 5, 6}), "a checkpoint's rows are all there, or none"
        with publisher(system) as opened:
            assert opened.marker() == 7

    def test_taking_back_removes_what_came_after(self, system: SinkSystem) -> None:
        takes_back(system)
        for previous, checkpoint in ((None, 1), (1, 3), (3, 4), (4, 6)):
            publish(system, previous, checkpoint, given(checkpoint))
        for previous in (None, 4, 5):
            with raises(DamageError):
                take_back(system, previous, 7, 3)
            expect(system, given(1, 3, 4, 6), marker=6)
        take_back(system, 6, 7, 3)
        expect(system, given(1, 3), marker=7)
        publish(system, 7, 8, given(8))
        for checkpoint in (7, 8):
            take_back(system, 6, checkpoint, 3)
            expect(system, given(1, 3, 8), marker=8)
        take_back(system, 8, 9, None)
        expect(system, given(), marker=9)

    def test_rows_of_a_branch_come_with_the_taking_back(self, system: SinkSystem) -> None:
        takes_back(system)
        publish(system, None, 1, given(1))
        publish(system, 1, 2, given(2, 3))
        brought = take_back(system, 2, 5, 1, given(4, 5, 6))
        assert system.sink.capabilities.has_versions or brought.rows == 3
        expect(system, given(1, 4, 5, 6), marker=5)
        brought_none(system, take_back(system, 2, 5, 1, given(4, 5, 6)))
        take_back(system, 5, 8, 1)
        expect(system, given(1), marker=8)

    def test_taking_back_that_fails_half_way_has_done_nothing(self, system: SinkSystem) -> None:
        takes_back(system)
        publish(system, None, 1, given(1))
        publish(system, 1, 2, given(2, 3))
        try:
            take_back(system, 2, 5, 1, replace(given(4, 5, 6), after=(1, cut_power)))
        except PowerCut:
            pass
        else:
            raise AssertionError("an error of the rows must not be swallowed")
        expect(system, given(1, 2, 3), marker=2)

    def test_after_rows_were_taken_back_a_zombie_publishes_nothing(self, system: SinkSystem) -> None:
        """Before the rewind it may: then its rows are taken back as well."""
        takes_back(system)
        publish(system, None, 1, given(1))
        with publisher(system) as zombie:
            zombie.prepare(SCHEMA)
            assert _unless_fenced(system, lambda: zombie.publish(1, 2, _handed(system, 1, 2, given(2)))) in (None, 1)
            with publisher(system) as opened:
                assert opened.marker() == 2
            take_back(system, 2, 4, 1)
            assert _unless_fenced(system, lambda: zombie.publish(2, 3, _handed(system, 2, 3, given(3)))) in (None, 0)
            assert _unless_fenced(system, lambda: zombie.publish(1, 2, _handed(system, 1, 2, given(2)))) in (None, 0)
        expect(system, given(1), marker=4)

    def test_the_last_row_of_a_key_stays(self, system: SinkSystem) -> None:
        rows = GivenRows([(1, "first"), (2, "a"), (1, "second"), (1, "third"), (2, "b"), (3, "c")])
        publish(system, None, 1, rows)
        if not system.keyed:
            assert sorted(system.contents()) == sorted(rows.rows)
            return
        assert sorted(system.contents()) == [(1, "third"), (2, "b"), (3, "c")]
        publish(system, 1, 2, GivenRows([(2, "later"), (4, "d")]))
        assert sorted(system.contents()) == [(1, "third"), (2, "later"), (3, "c"), (4, "d")]

    def test_many_rows(self, system: SinkSystem) -> None:
        publish(system, None, 1, given(*range(501)))
        assert sorted(system.contents()) == sorted(given(*range(501)).rows)

    def test_values_are_judged_before_the_commit(self, system: SinkSystem) -> None:
        """The rules travel to tasks, take good rows, and name the bad one, which `publish` would refuse."""
        with publisher(system) as opened:
            if not isinstance(opened, Judging):
                return
            opened.check(SCHEMA)
            rules = pickle.loads(pickle.dumps(opened.rules(SCHEMA)))
        for batch in given(1, 2, 3).batches():
            assert not list(rules.refused(pa.Table.from_batches([batch])))
        refused = list(rules.refused(able(system.refused_rows)))
        assert {value.row for value in refused} == {1}
        assert all(value.column in SCHEMA.names and value.problem for value in refused)

    def test_rows_of_other_types_are_refused_before_they_come(self, system: SinkSystem) -> None:
        publish(system, None, 1, given(1))
        other = SCHEMA.set(1, pa.field("text", pa.list_(pa.map_(pa.string(), pa.date32()))))
        with publisher(system) as opened:
            opened.check(SCHEMA)
            if system.refuses_types:
                with raises(PipelineError, ConfigurationError) as caught:
                    opened.check(other)
                is_clear(caught.error, system.secrets)
                assert "text" in str(caught.error), "the column is named"

    def test_definitions_are_values(self, system: SinkSystem) -> None:
        sink = system.sink
        assert pickle.loads(pickle.dumps(sink)) == sink == replace(sink)
        assert hash(sink) == hash(replace(sink)) and sink != replace(sink, name="another")
        assert sink.kind
        without_secrets(system.secrets, repr(sink))

    def test_a_server_that_is_away_is_named(self, system: SinkSystem) -> None:
        opening = able(system.unreachable)
        with raises(ConfigurationError, TransientError) as caught:
            publish(system, None, 1, given(1), opening)
        is_clear(caught.error, system.secrets)

    def test_a_refused_password_is_not_shown(self, system: SinkSystem) -> None:
        opening = able(system.refused)
        with raises(ConfigurationError) as caught:
            publish(system, None, 1, given(1), opening)
        is_clear(caught.error, (*system.secrets, *opening.options.get("password", "").split()))


@contextmanager
def publisher(system: SinkSystem, opening: SinkOpening | None = None) -> Iterator[Publisher]:
    """Return a new publisher."""
    opened = system.sink.open(opening or system.opening)
    try:
        yield opened
    finally:
        opened.close()


def publish(
    system: SinkSystem, previous: int | None, checkpoint: int, rows: Rows, opening: SinkOpening | None = None
) -> Published:
    """Publish with a publisher of its own, as the engine does."""
    with publisher(system, opening) as opened:
        schema = rows.schema
        if schema is None and system.sink.capabilities.has_versions:
            schema = SCHEMA  # a table is there from the first epoch on, whether it has rows or not
        if schema is not None:
            opened.check(schema)
            opened.prepare(schema)
        return opened.publish(
            previous, checkpoint, handed(system.sink, opening or system.opening, previous, checkpoint, rows)
        )


def take_back(
    system: SinkSystem, previous: int | None, checkpoint: int, to: int | None, rows: Rows | None = None
) -> Published:
    """Take back with a publisher of its own, as a rewind does, or a promotion with rows."""
    with publisher(system) as opened:
        assert isinstance(opened, TakingBack), "its `stays` is None, so its publisher has take_back"
        given_rows = rows if rows is not None else no_rows()
        brought = handed_back(system.sink, system.opening, previous, checkpoint, to, given_rows)
        return opened.take_back(previous, checkpoint, to, brought)


def brought_none(system: SinkSystem, published: Published) -> None:
    """Assert that a publish was told to have changed nothing. A sink with versions tells what its checkpoint has
    brought, whoever did that."""
    assert system.sink.capabilities.has_versions or published.rows == 0


def _handed(system: SinkSystem, previous: int | None, checkpoint: int, rows: Rows) -> Rows:
    return handed(system.sink, system.opening, previous, checkpoint, rows)


def takes_back(system: SinkSystem) -> None:
    """Skip the test where rows stay."""
    if system.sink.stays is not None:
        import pytest

        pytest.skip(system.sink.stays)


def expect(system: SinkSystem, rows: GivenRows, marker: int | None) -> None:
    """Assert what readers and the registry see."""
    assert sorted(system.contents()) == sorted(rows.rows)
    if system.sink.exactly_once:
        with publisher(system) as opened:
            assert opened.marker() == marker


def exactly_once(system: SinkSystem) -> None:
    """Skip the test where the sink promises less."""
    if not system.sink.exactly_once:
        import pytest

        pytest.skip("the sink may take rows twice")


def _rewind(system: SinkSystem) -> None:
    """Publish as after a rewind: a publish of an abandoned checkpoint counts as the last one."""
    for previous in (3, 4, 3, 4):
        try:
            publish(system, previous, 7, no_rows())
            return
        except DamageError:
            continue
    raise AssertionError("the marker is neither where it was nor where the abandoned checkpoint has brought it")


def _unless_fenced(system: SinkSystem, action: Callable[[], Published]) -> int | None:
    """Return the number of published rows. None: the publisher was told that it is a zombie, or the sink has versions
    and tells what its checkpoint has brought, whoever did that."""
    try:
        rows = action().rows
    except (FencedError, TransientError):
        return None
    return None if system.sink.capabilities.has_versions else rows
