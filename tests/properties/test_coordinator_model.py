"""Whatever happens in whatever order: the coordinator against a model that keeps its own books.

The model has a store of objects, the rows of completed checkpoints, and counters that go up and down with them, as
Flink keeps them; the coordinator derives everything. What the coordinator and retention say may be deleted is deleted
at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from state_ops.checkpoints import retention
from state_ops.checkpoints.coordinator import Coordinator, Policy
from state_ops.checkpoints.pending_checkpoint import Aborted, AckOutcome, FailureReason, PendingCheckpoint, Refusal
from state_ops.checkpoints.shared_state import reference_counts
from state_ops.ids import AttemptId, CheckpointId, Generation, epoch_dir
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import CHANNEL, OUTPUT, STATE, StateFile
from state_ops.records.triggers import Trigger
from tests.state_ops.checkpoints.test_registry import a_checkpoint

GENERATION = Generation(2)
EXPECTED = {"left": 2, "right": 1}
SUBTASKS = [(operator, subtask) for operator, count in EXPECTED.items() for subtask in range(count)]
NOBODY = [("left", 2), ("left", -1), ("gone", 0)]
ENDS_BY_ITSELF = [FailureReason.JOB, FailureReason.GATE, FailureReason.MISSING_ACKS, FailureReason.DECLINED]
REPORT = {"kind": "TransientError", "what": "no", "where": None, "next": None}


@dataclass
class Book:
    """One epoch as the model sees it. usable: what its tasks were told they may re-reference."""

    parent: int | None
    begun_at: float
    usable: list[StateFile]
    winners: dict[tuple[str, int], Ack] = field(default_factory=dict)
    declined: bool = False
    committing: bool = False

    @property
    def complete(self) -> bool:
        return not self.declined and set(self.winners) == set(SUBTASKS)


class Model(RuleBasedStateMachine):
    @initialize(
        max_concurrent=st.integers(1, 3),
        tolerable=st.integers(0, 3),
        keep=st.integers(1, 3),
        timeout=st.sampled_from([5.0, 50.0, 1000.0]),
        min_pause=st.sampled_from([0.0, 3.0]),
    )
    def start(self, max_concurrent: int, tolerable: int, keep: int, timeout: float, min_pause: float) -> None:
        """After a take-over from a coordinator that had begun epoch 4 and completed epoch 3."""
        self.policy = Policy(None, min_pause, timeout, max_concurrent, tolerable, keep)
        self.clock, self.elapsed = 1000.0, 0.0
        inherited = [
            _file("left", 0, "of-3", 3, STATE, generation=1),
            _file("left", 0, "of-3", 3, OUTPUT, generation=1),
        ]
        self.rows: dict[int, Checkpoint] = {3: a_checkpoint(3, None, inherited)}
        self.listings = {CheckpointId(3): tuple(inherited)}
        self.store = {file.path for file in inherited}
        self.published = {file.path for file in inherited if file.kind == OUTPUT}
        self.counters = Counter(file.path for file in inherited)
        self.pending: dict[int, Book] = {}
        self.completed: list[int] = [3]
        self.aborted: set[int] = set()
        self.sent: list[Ack] = []
        self.last_id, self.failures, self.since = 4, 0, 0.0
        self.attempts = 0
        rows = list(self.rows.values())
        self.coordinator = Coordinator(self.policy, GENERATION, rows, self.listings, CheckpointId(4), self.clock)

    # -- what happens

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 60.0, -1.0, -10_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds
        self.elapsed += max(0.0, seconds)
        self.expire()

    @rule(trigger=st.sampled_from(Trigger), catching_up=st.booleans())
    def trigger(self, trigger: Trigger, catching_up: bool) -> None:
        at_once = catching_up or trigger in (Trigger.DRAIN, Trigger.SAVEPOINT)
        pause = 0.0 if at_once else self.policy.min_pause
        if self.failures:
            pause = max(self.policy.min_pause, min(30.0, 2.0 ** (self.failures - 1)))
        may = (
            self.failures <= self.policy.tolerable_failures
            and len(self.pending) < self.policy.max_concurrent
            and not any(book.declined for book in self.pending.values())
            and self.elapsed - self.since >= pause
        )
        begun = self.coordinator.trigger(self.clock, trigger, EXPECTED, catching_up=catching_up)
        if not may:
            assert isinstance(begun, Refusal)
            return
        assert isinstance(begun, PendingCheckpoint)
        assert begun.id == self.last_id + 1
        parent = max(self.pending, default=self.completed[-1])
        assert begun.parent_id == parent
        assert begun.base is self.rows[self.completed[-1]]
        usable = [file for file in self.listings[begun.base.id] if file.kind == STATE]
        self.pending[begun.id] = Book(parent, self.elapsed, usable)
        self.last_id, self.since = begun.id, self.elapsed

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), reused=st.booleans(), kinds=st.sets(st.sampled_from([STATE, OUTPUT, CHANNEL])))
    def ack(self, data: st.DataObject, reused: bool, kinds: set[str]) -> None:
        """A subtask's first ack, or the one of a losing attempt."""
        epoch = data.draw(st.sampled_from(sorted(self.pending)))
        book = self.pending[epoch]
        open_ones = [key for key in SUBTASKS if key not in book.winners]
        key = data.draw(st.sampled_from(open_ones * 3 + SUBTASKS))
        ack = self._upload(key, epoch, kinds, book.usable if reused else [])
        self._deliver(ack, AckOutcome.DUPLICATE if key in book.winners else AckOutcome.ACCEPTED)

    @rule(reused=st.booleans(), commits=st.booleans())
    def the_oldest_gets_its_acks(self, reused: bool, commits: bool) -> None:
        """So that epochs complete often enough, with and without what they inherited."""
        oldest = min(self.pending, default=None)
        if oldest is None or self.pending[oldest].declined:
            return
        for key in SUBTASKS:
            if key not in self.pending[oldest].winners:
                ack = self._upload(key, oldest, {STATE, OUTPUT}, self.pending[oldest].usable if reused else [])
                self._deliver(ack, AckOutcome.ACCEPTED)
        self.begin_commit()
        if commits:
            self.the_registry_answers(1)

    @rule()
    def as_many_as_may_are_begun(self) -> None:
        self.coordinator.failures = self.failures = 0  # else the machine would stand still after the first fatal one
        for _ in range(self.policy.max_concurrent):
            self.trigger(Trigger.MANUAL, True)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_ack_comes_again(self, data: st.DataObject) -> None:
        """Delivered twice, or late, whatever became of its epoch meanwhile."""
        ack = data.draw(st.sampled_from(self.sent))
        book = self.pending.get(ack.epoch)
        if book is None:
            self._deliver(ack, AckOutcome.LATE)
        else:
            self._deliver(ack, AckOutcome.DUPLICATE)

    @rule(data=st.data(), of=st.sampled_from(["unknown", "foreign", "fenced"]))
    def an_ack_that_does_not_belong(self, data: st.DataObject, of: str) -> None:
        epoch = data.draw(st.integers(5, self.last_id)) if self.last_id > 4 else None
        if of == "unknown" and self.pending:
            ack = self._upload(data.draw(st.sampled_from(NOBODY)), data.draw(st.sampled_from(sorted(self.pending))))
            self._deliver(ack, AckOutcome.UNKNOWN)
            assert not {file.path for file in ack.files} & self.store
        elif of == "foreign":
            ack = self._upload(SUBTASKS[0], data.draw(st.sampled_from([1, 3, 4, self.last_id + 1, self.last_id + 9])))
            self._deliver(ack, AckOutcome.FOREIGN, untouched=True)
        elif of == "fenced" and epoch is not None:
            other = data.draw(st.sampled_from([1, 3]))
            self._deliver(self._upload(SUBTASKS[0], epoch, generation=other), AckOutcome.FENCED, untouched=True)

    @precondition(lambda self: self.last_id > 4)
    @rule(data=st.data())
    def a_straggler(self, data: st.DataObject) -> None:
        """An attempt of an epoch that is over acks for the first time."""
        over = [id for id in range(5, self.last_id + 1) if id not in self.pending]
        if over:
            epoch = data.draw(st.sampled_from(over))
            ack = self._upload(data.draw(st.sampled_from(SUBTASKS)), epoch, {STATE, OUTPUT})
            self._deliver(ack, AckOutcome.LATE)
            left = {
                file.path for file in ack.files if file.kind != OUTPUT or epoch in self.aborted or epoch in self.rows
            }
            assert not left & self.store, "a straggler's objects stayed"

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def an_ack_names_what_is_not_confirmed(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.pending)))
        theirs = [file for book in self.pending.values() for ack in book.winners.values() for file in ack.files]
        dropped = [
            file
            for ack in self.sent
            if ack.epoch not in self.pending
            for file in ack.files
            if file.path not in self.store
        ]
        own_files = [file for file in theirs if file.new]
        key = data.draw(st.sampled_from(SUBTASKS))
        book = self.pending[epoch]
        if (own_files or dropped) and not book.committing:
            wrong = replace(data.draw(st.sampled_from(own_files + dropped)), new=False)
            ack = self._upload(key, epoch, {STATE}, [wrong])
            self._deliver(ack, AckOutcome.DECLINED)
            book.declined = True

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.pending)))
        book = self.pending[epoch]
        ack = replace(self._upload(data.draw(st.sampled_from(SUBTASKS)), epoch), error=REPORT)
        self._deliver(ack, AckOutcome.DUPLICATE if book.committing else AckOutcome.DECLINED)
        book.declined = book.declined or not book.committing

    @rule()
    def expire(self) -> None:
        fallen = self.coordinator.expire(self.clock)
        over = [
            id
            for id, book in self.pending.items()
            if not book.committing and self.elapsed - book.begun_at >= self.policy.timeout
        ]
        self._fall(fallen, min(over, default=None), FailureReason.TIMEOUT)

    @precondition(lambda self: any(not book.committing for book in self.pending.values()))
    @rule(data=st.data(), reason=st.sampled_from(ENDS_BY_ITSELF))
    def abort(self, data: st.DataObject, reason: FailureReason) -> None:
        epoch = data.draw(st.sampled_from([id for id, book in self.pending.items() if not book.committing]))
        self._fall(self.coordinator.abort(self.clock, CheckpointId(epoch), reason), epoch, reason)
        assert self.coordinator.abort(self.clock, CheckpointId(epoch), reason) == ()

    @rule()
    def planning_fails(self) -> None:
        self.coordinator.failed(self.clock)
        self.failures, self.since = self.failures + 1, self.elapsed

    @rule()
    def begin_commit(self) -> None:
        oldest = min(self.pending, default=None)
        begun = self.coordinator.begin_commit()
        if oldest is None or not self.pending[oldest].complete:
            assert begun is None
        else:
            assert begun is not None and begun.id == oldest
            self.pending[oldest].committing = True

    @precondition(lambda self: any(book.committing for book in self.pending.values()))
    @rule(lands=st.integers(0, 3))
    def the_registry_answers(self, lands: int) -> None:
        id = min(self.pending)
        book = self.pending[id]
        if not lands:
            self._fall(
                self.coordinator.abort(self.clock, CheckpointId(id), FailureReason.COMMIT), id, FailureReason.COMMIT
            )
            return
        files = tuple(file for key in sorted(book.winners) for file in book.winners[key].files)
        row = a_checkpoint(id, book.parent, files, GENERATION)
        self.coordinator.completed(self.clock, row)
        del self.pending[id]
        assert book.parent == self.completed[-1], "a gap in the chain"
        self.rows[id], self.listings[row.id] = row, files
        self.completed.append(id)
        self.counters.update({file.path for file in files})
        self.published |= {file.path for file in files if file.kind == OUTPUT}
        self.failures, self.since = 0, self.elapsed

    @rule()
    def prune(self) -> None:
        rows = list(self.rows.values())
        decided = retention.plan(rows, self.listings, self.policy.num_retained, needed=self.coordinator.needed())
        assert len(rows) - len(decided.drop) >= min(len(rows), self.policy.num_retained)
        gone = set()
        for id in decided.drop:
            for path in {file.path for file in self.listings.pop(id)}:
                self.counters[path] -= 1
                if not self.counters[path] and path not in self.published:
                    gone.add(path)
            del self.rows[id]
        assert {file.path for file in decided.delete} == gone
        self.coordinator.pruned(decided.drop)
        self.store -= gone

    # -- how the model does it

    def _upload(
        self,
        key: tuple[str, int],
        epoch: int,
        kinds: set[str] | None = None,
        reused: list[StateFile] | None = None,
        generation: int = GENERATION,
    ) -> Ack:
        """What an attempt that was not there before has done when it acks."""
        self.attempts += 1
        name = f"attempt{self.attempts}"
        own_files = [_file(*key, name, epoch, kind, generation) for kind in sorted(kinds or {STATE})]
        self.store |= {file.path for file in own_files}
        old = [replace(file, new=False) for file in reused or []]
        ids = AttemptId(name), CheckpointId(epoch), Generation(generation)
        return Ack(key[0], key[1], *ids, files=(*own_files, *old))

    def _deliver(self, ack: Ack, outcome: AckOutcome, untouched: bool = False) -> None:
        received = self.coordinator.receive(ack)
        assert received.outcome is outcome
        assert (received.error is not None) is (outcome is AckOutcome.DECLINED)
        assert not (untouched and received.discard)
        if outcome is AckOutcome.ACCEPTED:
            assert not received.discard
            self.pending[ack.epoch].winners[ack.operator, ack.subtask] = ack
        if outcome in (AckOutcome.ACCEPTED, AckOutcome.DUPLICATE) and ack.error is None:
            self.sent.append(ack)
        self._discard(received.discard, {ack.attempt})

    def _discard(self, files: tuple[StateFile, ...], attempts: set[AttemptId]) -> None:
        assert {file.attempt for file in files} <= attempts, "another attempt's object"
        self.store -= {file.path for file in files}

    def _fall(self, fallen: tuple[Aborted, ...], first: int | None, reason: FailureReason) -> None:
        expected = [] if first is None else [id for id in sorted(self.pending) if id >= first]
        assert [pending.pending.id for pending in fallen] == expected
        for pending in fallen:
            assert pending.reason is (reason if pending.pending.id == first else FailureReason.PREDECESSOR)
            book = self.pending.pop(pending.pending.id)
            own_files = {file.path for ack in book.winners.values() for file in ack.files if file.new}
            assert {file.path for file in pending.discard} == own_files
            self._discard(pending.discard, {ack.attempt for ack in book.winners.values()})
            self.aborted.add(pending.pending.id)
        if fallen:
            self.failures, self.since = self.failures + 1, self.elapsed

    # -- what always holds

    @invariant()
    def ids_grow_and_none_completes_twice(self) -> None:
        assert self.completed == sorted(set(self.completed))
        begun = [*self.completed, *(pending.id for pending in self.coordinator.pending)]
        assert begun == sorted(set(begun))

    @invariant()
    def the_chain_has_no_gap(self) -> None:
        for id in self.rows:
            before = self.completed[: self.completed.index(id)]
            assert self.rows[id].parent_id == (before[-1] if before else None)
        chain = [self.completed[-1], *self.pending]
        assert [pending.parent_id for pending in self.coordinator.pending] == chain[:-1]
        assert self.coordinator.head is self.rows[self.completed[-1]]

    @invariant()
    def everything_that_is_named_exists(self) -> None:
        confirmed = {file.path for files in self.listings.values() for file in files}
        accepted = {file.path for book in self.pending.values() for ack in book.winners.values() for file in ack.files}
        assert confirmed | accepted | self.published <= self.store

    @invariant()
    def nothing_refers_to_what_is_not_confirmed(self) -> None:
        confirmed = {file.path for files in self.listings.values() for file in files}
        for pending in self.coordinator.pending:
            assert {file.path for file in pending.files() if not file.new} <= confirmed

    @invariant()
    def counts_equal_a_recount(self) -> None:
        assert reference_counts(self.listings.values()) == +self.counters

    @invariant()
    def no_more_are_pending_than_may_be(self) -> None:
        assert [pending.id for pending in self.coordinator.pending] == sorted(self.pending)
        assert len(self.pending) <= self.policy.max_concurrent
        assert self.coordinator.failures == self.failures
        assert self.coordinator.failed_for_good == (self.failures > self.policy.tolerable_failures)


def _file(operator: str, subtask: int, attempt: str, epoch: int, kind: str, generation: int = GENERATION) -> StateFile:
    place = f"{epoch_dir(Generation(generation), CheckpointId(epoch))}/{subtask}-{attempt}"
    path = {
        STATE: f"state/{operator}/{place}/000008.sst",
        CHANNEL: f"channels/{operator}/{place}.parquet",
        OUTPUT: f"tables/out/data/{place}.parquet",
    }[kind]
    values: dict[str, Any] = {"sink": "out" if kind == OUTPUT else None}
    return StateFile(operator, subtask, kind, "x", path, 1, f"of {path}", True, AttemptId(attempt), **values)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=50, suppress_health_check=list(HealthCheck))
