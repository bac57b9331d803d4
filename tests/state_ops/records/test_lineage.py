from __future__ import annotations

from state_ops.ids import CheckpointId, Generation
from state_ops.records.checkpoint import is_abandoned, spans_with
from tests.state_ops.checkpoints.test_registry import a_checkpoint


def a_chain(*completed: tuple[int, int]):
    """The head after these (generation, id)."""
    head = None
    for generation, id in completed:
        spans = spans_with(head, Generation(generation), CheckpointId(id))
        head = a_checkpoint(id, head.id if head else None, generation=generation, lineage=spans)
    return head


def test_ids_of_one_generation_without_a_gap_are_one_span():
    head = a_chain((1, 1), (1, 2), (1, 4), (3, 5), (3, 6))
    assert head.lineage == [[0, 0, 0], [1, 1, 2], [1, 4, 4], [3, 5, 6]]


def test_what_the_lineage_does_not_name_is_abandoned():
    head = a_chain((1, 1), (1, 2), (1, 4), (3, 5), (3, 6))
    ids = [(generation, epoch) for generation in (1, 2, 3) for epoch in range(1, 8)]
    assert [id for id in ids if not is_abandoned(head, *id)] == [(1, 1), (1, 2), (1, 4), (3, 5), (3, 6)]


def test_what_was_begun_before_the_first_checkpoint_is_abandoned():
    head = a_chain((5, 6), (5, 7))
    assert is_abandoned(head, Generation(4), CheckpointId(5)), "of a zombie that woke when the first had been committed"


def test_what_lies_before_the_lineage_is_not_known():
    head = a_chain(*[(id, id) for id in range(1, 301)])
    assert len(head.lineage) == 100
    assert not is_abandoned(head, Generation(7), CheckpointId(200)), "forgotten"
    assert is_abandoned(head, Generation(7), CheckpointId(201))


def test_without_a_checkpoint_everything_and_without_a_lineage_what_is_above_the_head_is_abandoned():
    assert is_abandoned(None, Generation(1), CheckpointId(1))
    head = a_checkpoint(5, 4)
    assert [is_abandoned(head, Generation(1), CheckpointId(epoch)) for epoch in (4, 5, 6)] == [False, False, True]
