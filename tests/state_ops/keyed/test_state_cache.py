"""The state cache against a model, its failures, and what stays warm in a process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from state_ops.backends.memory import MemoryBackend
from state_ops.errors import DamageError, PipelineError, StageError, TransientError, WeirError
from state_ops.ids import AttemptId
from state_ops.keyed.per_key.state_cache import CacheFigures, CacheSizes, StateCache, ValueStore
from tests.tools.sampling import rounds
from weir.task.worker_cache import Warm

KEYS = [bytes([letter]) for letter in b"abcdef"]


class Recorded(MemoryBackend):
    """What reaches the backend, step by step. failing: raised by the next writes."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[bytes] = []
        self.writes: list[dict[bytes, bytes | None]] = []
        self.failing: Exception | None = None

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.gets += keys
        return super().multi_get(keys)

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        if self.failing is not None:
            raise self.failing
        self.writes.append({**dict(puts), **dict.fromkeys(deletes)})
        super().write(puts, deletes)

    def content(self) -> dict[bytes, int]:
        return {key: int(value) for key, value in self.scan(b"", b"\xff")}


def a_cache(backend: MemoryBackend, l1: int, l2: int = 0, **options) -> StateCache[int]:
    return StateCache(_store(backend), CacheSizes(l1, l2), **options)


class Model:
    """The cache in the fewest words: two lists of keys, least recently used first, and a set of dirty ones."""

    def __init__(self, l1: int, l2: int) -> None:
        self.sizes = (l1, l2)
        self.truth: dict[bytes, int] = {}
        self.l1: OrderedDict[bytes, None] = OrderedDict()
        self.l2: OrderedDict[bytes, None] = OrderedDict()
        self.dirty: set[bytes] = set()
        self.figures = {"l1_hits": 0, "l2_hits": 0, "misses": 0, "evicted": 0, "flushed": 0}

    def get(self, key: bytes) -> tuple[list[bytes], list[bytes]]:
        """The keys that have to be got, and those that have to be written."""
        layer = "l1_hits" if key in self.l1 else "l2_hits" if key in self.l2 else "misses"
        self.figures[layer] += 1
        return [key] if layer == "misses" else [], self._use(key)

    def change(self, key: bytes, value: int | None) -> list[bytes]:
        self.truth.pop(key, None)
        if value is not None:
            self.truth[key] = value
        self.dirty.add(key)
        return self._use(key)

    def flush(self) -> list[bytes]:
        written = sorted(self.dirty)
        self.figures["flushed"] += len(written)
        self.dirty.clear()
        return written

    def _use(self, key: bytes) -> list[bytes]:
        self.l2.pop(key, None)
        self.l1[key] = None
        self.l1.move_to_end(key)
        written = []
        if len(self.l1) > self.sizes[0]:
            oldest, _ = self.l1.popitem(last=False)
            if oldest in self.dirty:
                self.dirty.remove(oldest)
                self.figures["evicted"] += 1
                written = [oldest]
            self.l2[oldest] = None
            if len(self.l2) > self.sizes[1]:
                self.l2.popitem(last=False)
        return written


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.sampled_from(KEYS[:4])),
        st.tuples(st.just("get"), st.sampled_from(KEYS[:4])),
        st.tuples(st.just("update"), st.sampled_from(KEYS[:4]), st.integers(0, 9)),
        st.tuples(st.just("delete"), st.sampled_from(KEYS[:4])),
        st.tuples(st.just("flush")),
        st.tuples(st.just("again")),
    ),
    min_size=8,
    max_size=60,
)


@rounds(3)
@settings(max_examples=100)
@given(l1=st.integers(1, 3), l2=st.integers(0, 2), steps=_STEPS)
def test_it_gets_and_puts_exactly_what_the_model_says_and_its_content_is_that_of_a_dict(round_, l1, l2, steps) -> None:
    backend, model = Recorded(), Model(l1, l2)
    cache = a_cache(backend, l1, l2)
    for step in steps:
        backend.gets, backend.writes = [], []
        expected_gets, expected_writes = [], []
        match step:
            case ("get", key):
                expected_gets, expected_writes = model.get(key)
                assert cache.get(key) == model.truth.get(key)
            case ("update", key, value):
                expected_writes = model.change(key, value)
                cache.update(key, value)
            case ("delete", key):
                expected_writes = model.change(key, None)
                cache.delete(key)
            case ("flush",):
                expected_writes = model.flush()
                cache.flush()
                assert backend.content() == model.truth
                assert len(backend.writes) == bool(expected_writes)
            case ("again",):  # another cache begins with what this one holds, as in the next epoch
                expected_writes = model.flush()
                assert cache.barrier() == CacheFigures(**model.figures)
                model.figures = dict.fromkeys(model.figures, 0)
                cache = a_cache(backend, l1, l2, warm=cache.contents())
        assert backend.gets == expected_gets
        assert sorted(key for write in backend.writes for key in write) == expected_writes
        for write in backend.writes:
            assert write == {key: _bytes(model.truth.get(key)) for key in write}
    model.flush()
    assert cache.barrier() == CacheFigures(**model.figures)
    assert backend.content() == model.truth


@rounds(2)
@settings(max_examples=100)
@given(
    l1=st.integers(1, 4),
    l2=st.integers(0, 4),
    batches=st.lists(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 4)), max_size=12), max_size=12),
)
def test_a_batch_of_keys_costs_one_multi_get_and_one_write_at_most_and_has_the_content_of_a_dict(
    round_, l1, l2, batches
) -> None:
    backend, truth = Recorded(), {}
    cache = a_cache(backend, l1, l2)
    for batch in batches:
        changes = dict(batch)
        gets, writes = len(backend.gets), len(backend.writes)
        assert cache.get_many(list(changes)) == [truth.get(key) for key in changes]
        assert set(backend.gets[gets:]) <= set(changes)
        assert len(backend.writes) - writes <= 1
        writes = len(backend.writes)
        cache.update_many({key: value or None for key, value in changes.items()})
        assert len(backend.writes) - writes <= 1
        truth = {key: value for key, value in {**truth, **changes}.items() if value}
    cache.flush()
    assert backend.content() == truth


def test_a_read_is_a_use() -> None:
    backend = Recorded()
    cache = a_cache(backend, 2)
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        cache.get(key)
    assert backend.gets == [b"a", b"b", b"c", b"b"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (TransientError("no space"), TransientError),
        (DamageError("a block"), DamageError),
        (OSError("no space"), TransientError),
        (ValueError("what"), StageError),
    ],
)
def test_a_flush_that_fails_is_fatal_with_a_typed_error(raised: Exception, expected: type[WeirError]) -> None:
    backend = Recorded()
    cache = a_cache(backend, 2)
    cache.update(b"a", 1)
    backend.failing = raised
    with pytest.raises(expected):
        cache.barrier()
    backend.failing = None
    with pytest.raises(expected):  # even if the next one would work: the attempt is lost
        cache.barrier()
    with pytest.raises(RuntimeError):
        cache.contents()
    assert backend.writes == []


def test_an_eviction_that_fails_is_remembered_until_the_barrier() -> None:
    backend = Recorded()
    cache = a_cache(backend, 1)
    cache.update(b"a", 1)
    backend.failing = OSError("no space")
    with pytest.raises(TransientError, match="no space"):  # which an author's function may swallow
        cache.update(b"b", 2)
    backend.failing = None
    with pytest.raises(TransientError, match="no space"):
        cache.get(b"c")
    with pytest.raises(TransientError, match="no space"):
        cache.flush()


def test_a_read_that_fails_is_remembered_until_the_barrier() -> None:
    backend = Recorded()
    backend.write([(b"a", b"not a number")])
    cache = a_cache(backend, 1)
    with pytest.raises(StageError, match="not a number"):
        cache.get(b"a")
    with pytest.raises(StageError, match="not a number"):
        cache.flush()


def test_contents_are_not_handed_out_while_they_differ_from_the_store() -> None:
    cache = a_cache(Recorded(), 2)
    cache.update(b"a", 1)
    with pytest.raises(RuntimeError):
        cache.contents()


def test_a_smaller_cache_takes_over_the_newest_entries() -> None:
    backend = Recorded()
    cache = a_cache(backend, 3, 2)
    for key in KEYS[:5]:
        cache.update(key, 1)
    cache.barrier()
    smaller = a_cache(backend, 1, 1, warm=cache.contents())
    backend.gets = []
    for key in (KEYS[4], KEYS[3], KEYS[0]):
        smaller.get(key)
    assert backend.gets == [KEYS[0]]
    assert smaller.barrier() == CacheFigures(l1_hits=1, l2_hits=1, misses=1)


@pytest.mark.parametrize(("l1", "l2"), [(0, 0), (0, 5), (-1, 0), (1, -1)])
def test_sizes_that_make_no_cache_are_refused(l1: int, l2: int) -> None:
    with pytest.raises(PipelineError, match=f"l1={l1} and l2={l2}"):
        a_cache(Recorded(), l1, l2)


def test_figures_add_up_and_are_logged() -> None:
    both = CacheFigures(3, 2, 1, 4, 5) + CacheFigures(1, 1, 1, 1, 1)
    assert both == CacheFigures(4, 3, 2, 5, 6)
    assert both.hit_rate == pytest.approx(7 / 9)
    assert CacheFigures().hit_rate == 0
    with capture_logs() as lines:
        both.log("rides", 17)
    (line,) = lines
    assert (line["operator"], line["checkpoint"]) == ("rides", 17)
    assert (line["l1_hits"], line["l2_hits"], line["misses"], line["evicted"], line["flushed"]) == (4, 3, 2, 5, 6)


def test_its_size_in_memory_grows_with_entries_and_values() -> None:
    cache = a_cache(Recorded(), 10)
    assert cache.size_bytes() == 0
    cache.update(b"a", 1)
    small = cache.size_bytes()
    cache.update(b"a", 10**400)
    large = cache.size_bytes()
    cache.update(b"b", 10**400)
    assert 0 < small < large < cache.size_bytes()


# What stays warm


def test_only_the_attempt_that_builds_on_the_very_snapshot_gets_it_and_only_once() -> None:
    warm, thing = Warm(), object()
    warm.keep("rides", 0, "cache", AttemptId("a"), thing, 10, 100)
    assert warm.claim("rides", 1, "cache", AttemptId("a")) is None
    assert warm.claim("other", 0, "cache", AttemptId("a")) is None
    assert warm.claim("rides", 0, "cache", AttemptId("a")) is thing
    assert warm.claim("rides", 0, "cache", AttemptId("a")) is None
    assert warm.bytes == 0


def test_a_thing_of_another_snapshot_is_dropped() -> None:
    warm = Warm()
    warm.keep("rides", 0, "cache", AttemptId("a"), "stale", 10, 100)
    assert warm.claim("rides", 0, "cache", AttemptId("b")) is None
    assert warm.claim("rides", 0, "cache", AttemptId("a")) is None
    assert warm.bytes == 0


def test_a_newer_thing_of_the_same_subtask_drops_the_older() -> None:
    warm = Warm()
    warm.keep("rides", 0, "cache", AttemptId("a"), "old", 10, 100)
    warm.keep("rides", 0, "cache", AttemptId("b"), "new", 20, 100)
    assert warm.bytes == 20
    assert warm.claim("rides", 0, "cache", AttemptId("a")) is None


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    warm = Warm()
    warm.keep("rides", 0, "cache", AttemptId("a"), "a", 60, 100)
    warm.keep("rides", 1, "cache", AttemptId("b"), "b", 40, 100)
    warm.keep("rides", 2, "cache", AttemptId("c"), "c", 30, 100)
    assert warm.bytes == 70
    assert warm.claim("rides", 0, "cache", AttemptId("a")) is None
    assert warm.claim("rides", 1, "cache", AttemptId("b")) == "b"
    warm.keep("rides", 2, "cache", AttemptId("d"), "huge", 101, 100)
    assert warm.bytes == 0
    assert warm.claim("rides", 2, "cache", AttemptId("c")) is None


def test_kinds_do_not_push_each_other_out() -> None:
    warm = Warm()
    warm.keep("rides", 0, "cache", AttemptId("a"), "entries", 60, 100)
    warm.keep("rides", 0, "state", AttemptId("a"), "state", 90, 100)
    assert warm.claim("rides", 0, "cache", AttemptId("a")) == "entries"
    assert warm.claim("rides", 0, "state", AttemptId("a")) == "state"


def _store(backend: MemoryBackend) -> ValueStore[int]:
    return ValueStore(
        backend, lambda values: [_bytes(value) for value in values], lambda rows: [int(value) for value in rows]
    )


def _bytes(value: int | None) -> bytes | None:
    return None if value is None else str(value).encode()
