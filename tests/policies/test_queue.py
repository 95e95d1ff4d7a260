"""The queue of leaves against a model that sorts."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.policies import LeafQueue

rows = st.integers(0, 30)


def as_columns(candidates):
    """Priorities and rows, as the index has them."""
    return np.array(list(candidates.values()), np.uint64), np.array(list(candidates), np.int64)


class QueueStates(RuleBasedStateMachine):
    """The model is a priority for each candidate; they only rise, as the queue is promised."""

    def __init__(self):
        super().__init__()
        self.candidates = {}
        self.queue = LeafQueue(self.candidates.get)
        self.clock = 0

    def tick(self):
        self.clock += 1
        return self.clock

    @rule(row=rows)
    def becomes_candidate(self, row):
        if row not in self.candidates:
            self.candidates[row] = self.tick()
        self.queue.offer(row, self.candidates[row])

    @rule(row=rows)
    def is_hit(self, row):
        if row in self.candidates:
            self.candidates[row] = self.tick()

    @rule(row=rows)
    def is_no_candidate_any_more(self, row):
        self.candidates.pop(row, None)

    @rule(row=rows)
    def comes_back_with_a_stale_entry(self, row):
        """A row that was given to another block while its old entry lies in the heap."""
        self.candidates[row] = self.tick()
        self.queue.offer(row, self.candidates[row])

    @precondition(lambda self: self.candidates)
    @rule()
    def evict(self):
        priority, row = self.queue.coldest()
        assert self.candidates[row] == priority
        del self.candidates[row]

    @rule()
    def load(self):
        """A new queue of the same candidates, as after a restart."""
        self.queue = LeafQueue(self.candidates.get)
        self.queue.load(*as_columns(self.candidates))

    @invariant()
    def coldest_is_the_lowest(self):
        wanted = min(((p, row) for row, p in self.candidates.items()), default=None)
        assert self.queue.coldest() == wanted
        assert self.queue.coldest() == wanted, "asking changes nothing"

    @invariant()
    def every_candidate_is_queued_once(self):
        assert all(row in self.queue for row in self.candidates)
        assert len(self.queue) <= 31


TestQueue = QueueStates.TestCase


class FallingStates(QueueStates):
    """Rows that go for a reason and come back with any priority, once they were forgotten."""

    def __init__(self):
        super().__init__()
        self.num_forgotten = 0

    @rule(row=rows, share=st.floats(0, 1))
    def comes_back_with_any_priority(self, row, share):
        self.candidates.pop(row, None)
        self.num_forgotten += row in self.queue
        self.queue.forget(row)
        assert row not in self.queue
        self.candidates[row] = int(share * self.tick())
        self.queue.offer(row, self.candidates[row])

    @rule(row=rows)
    def goes_for_good(self, row):
        self.candidates.pop(row, None)
        self.num_forgotten += row in self.queue
        self.queue.forget(row)

    @invariant()
    def every_candidate_is_queued_once(self):
        assert all(row in self.queue for row in self.candidates)
        assert len(self.queue) <= 31 + self.num_forgotten


TestFallingQueue = FallingStates.TestCase


def test_what_was_forgotten_is_cleared_away():
    candidates = {}
    queue = LeafQueue(candidates.get)
    for number in range(10_000):
        row = number % 100
        candidates[row] = 10**9 - number  # never surfaces while there is a lower one
        queue.offer(row, candidates[row])
        if number < 9_900:
            del candidates[row]
            queue.forget(row)
        assert len(queue) <= 2 * 1024 + 200
    order = []
    while (coldest := queue.coldest()) is not None:
        order.append(coldest)
        del candidates[coldest[1]]
    assert order == [(10**9 - number, number % 100) for number in range(9_999, 9_899, -1)]


def test_an_empty_queue():
    queue = LeafQueue({}.get)
    assert queue.coldest() is None
    assert len(queue) == 0
    assert 5 not in queue
    queue.load(*as_columns({}))
    assert queue.coldest() is None
    assert 0 not in queue


def test_equal_priorities_leave_by_row():
    candidates = dict.fromkeys([3, 1, 2], 7)
    queue = LeafQueue(candidates.get)
    for row in candidates:
        queue.offer(row, 7)
    order = []
    while (coldest := queue.coldest()) is not None:
        order.append(coldest[1])
        del candidates[coldest[1]]
    assert order == [1, 2, 3]


@pytest.mark.parametrize("highest", [5, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1])
def test_priorities_may_be_large(highest):
    candidates = {5000: highest, 7: highest - 1, 300: highest - 2}
    offered, loaded = LeafQueue(candidates.get), LeafQueue(candidates.get)
    for row, priority in candidates.items():
        offered.offer(row, priority)
    loaded.load(*as_columns(candidates))
    for queue in (offered, loaded):
        assert queue.coldest() == (highest - 2, 300)
        assert [row in queue for row in (5000, 7, 300, 4999)] == [True, True, True, False]
    for row in (300, 7, 5000):
        assert offered.coldest() == loaded.coldest() == (candidates.pop(row), row)
