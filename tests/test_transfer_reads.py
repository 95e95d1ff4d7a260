"""What a transfer tells of its reads: bytes by the device, time by the clock, and stalls."""

import math
import mmap
import threading
import time

import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.testing import Fault, FaultyTier
from headstart.tiers import FileTier, FileTierOptions
from headstart.tiers.base import read as read_now
from headstart.tiers.base import write as write_now
from headstart.transfer import Transfer
from headstart.types import Outcome

SOON = 20.0
ITEM = 100


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


class Steps:
    """A batch whose indices run one by one, each when it is let; each takes a second of `clock`."""

    item_nbytes = 1 << 20

    def __init__(self, length, clock, outcome=Outcome.DONE, *, is_free=False):
        self.length, self.clock, self.outcome = length, clock, outcome
        self.runs = []
        self._may_run, self._ran = threading.Semaphore(0), threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        for _ in range(length if is_free else 0):
            self._may_run.release()

    def __len__(self):
        return self.length

    def run(self, index):
        self._entered.release()
        assert self._may_run.acquire(timeout=SOON)
        self.clock.now += 1.0
        self.runs.append(index)

    def entered(self):
        assert self._entered.acquire(timeout=SOON)

    def step(self, count=1):
        for _ in range(count):
            self._may_run.release()

    def ready_blocks(self):
        return len(self.runs)

    def finish(self):
        if self.outcome is None:
            raise KeyError("a bug")
        run = sorted(self.runs)
        return [self.outcome if n in run else Outcome.MISS for n in range(self.length)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told():
    return []


@pytest.fixture
def transfer(clock, told):
    """One thread, so that one read is run after the other."""
    made = Transfer("test", num_threads=1, clock=clock)
    made.on_read = told.append
    yield made
    assert made.close(SOON)


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


# ----------------------------------------------------------------------------------- bytes and time


def test_a_read_tells_its_bytes_and_its_time(transfer, clock, told):
    ticket = transfer.read(Steps(4, clock, is_free=True), nbytes=4 * ITEM)
    assert ticket.wait(SOON)
    (sample,) = told
    assert (sample.nbytes, sample.seconds, sample.is_good) == (4 * ITEM, 4.0, True)


def test_a_read_tells_before_anybody_hears_that_it_is_over(transfer, clock, told):
    seen = []
    ticket = transfer.read(
        Steps(1, clock, is_free=True), lambda outcomes: seen.append(len(told)), nbytes=ITEM
    )
    assert ticket.wait(SOON)
    assert seen == [1]


def test_what_ran_before_a_read_counts_for_it_from_its_acceptance_on(transfer, clock, told):
    first, second = Steps(3, clock), Steps(2, clock, is_free=True)
    one = transfer.read(first, nbytes=3 * ITEM)
    first.step()
    wait_for(lambda: transfer._moved_nbytes == ITEM)
    other = transfer.read(second, nbytes=2 * ITEM)
    first.step(2)
    assert one.wait(SOON)
    assert other.wait(SOON)
    assert [(s.nbytes, s.seconds) for s in told] == [(3 * ITEM, 3.0), (4 * ITEM, 4.0)]


def test_reads_beside_each_other_count_each_others_bytes(clock, told):
    transfer = Transfer("test", num_threads=2, clock=clock)
    transfer.on_read = told.append
    try:
        first, second = Steps(1, clock), Steps(1, clock)
        one = transfer.read(first, nbytes=ITEM)
        first.entered()
        other = transfer.read(second, nbytes=5 * ITEM)
        second.entered()
        first.step()
        assert one.wait(SOON)
        second.step()
        assert other.wait(SOON)
    finally:
        assert transfer.close(SOON)
    assert [s.nbytes for s in told] == [ITEM, 6 * ITEM]


def test_a_cancelled_read_tells_what_came_not_what_was_planned(transfer, clock, told):
    batch = Steps(8, clock)
    ticket = transfer.read(batch, nbytes=8 * ITEM)
    batch.step(2)
    wait_for(lambda: transfer._moved_nbytes == 2 * ITEM)
    ticket.cancel()
    batch.step(8)
    assert ticket.wait(SOON)
    (sample,) = told
    assert sample.nbytes == 3 * ITEM, "the one that ran went on"
    assert sample.seconds == 3.0
    assert sample.is_good
    assert transfer.reading_nbytes == 0


def test_one_that_is_cancelled_in_the_queue_moves_nothing_itself(transfer, clock, told):
    first, second = Steps(2, clock), Steps(5, clock)
    one = transfer.read(first, nbytes=2 * ITEM)
    other = transfer.read(second, nbytes=5 * ITEM)
    other.cancel()
    first.step(2)
    assert one.wait(SOON)
    assert other.wait(SOON)
    assert second.runs == []
    assert [s.nbytes for s in told] == [0, 2 * ITEM]


def test_the_more_urgent_read_goes_first_also_before_one_that_runs(transfer, clock, told):
    order = []
    batches = {name: Steps(3, clock) for name in ("long", "late", "soon", "same")}
    deadlines = {"long": 90.0, "late": 80.0, "soon": 70.0, "same": 70.0}
    tickets = []
    for name, batch in batches.items():
        tickets.append(
            transfer.read(
                batch,
                lambda outcomes, name=name: order.append(name),
                nbytes=3 * ITEM,
                deadline=deadlines[name],
            )
        )
        if name == "long":
            batch.entered()
    assert [transfer.ahead_nbytes(at) for at in (60.0, 70.0, 80.0, 90.0)] == [
        0,
        6 * ITEM,
        9 * ITEM,
        12 * ITEM,
    ]
    for batch in batches.values():
        batch.step(3)
    assert all(ticket.wait(SOON) for ticket in tickets)
    assert order == ["soon", "same", "late", "long"]
    assert all(sorted(batch.runs) == [0, 1, 2] for batch in batches.values())
    assert transfer.ahead_nbytes(90.0) == transfer.reading_nbytes == 0


def test_a_cancelled_read_ends_at_once_whatever_is_more_urgent(transfer, clock):
    first, given_up, urgent = Steps(1, clock), Steps(5, clock), Steps(5, clock)
    one = transfer.read(first, nbytes=ITEM, deadline=1.0)
    first.entered()
    other = transfer.read(given_up, nbytes=5 * ITEM, deadline=90.0)
    last = transfer.read(urgent, nbytes=5 * ITEM, deadline=2.0)
    other.cancel()
    assert transfer.ahead_nbytes(100.0) == 6 * ITEM, "nobody will read them"
    first.step()
    assert other.wait(SOON)
    assert not last.wait(0.0)
    assert given_up.runs == []
    urgent.step(5)
    assert one.wait(SOON)
    assert last.wait(SOON)


def test_a_read_may_become_more_urgent_and_never_less(transfer, clock):
    order = []
    batches = [Steps(1, clock) for _ in range(3)]
    tickets = [
        transfer.read(
            batch,
            lambda outcomes, n=n: order.append(n),
            nbytes=ITEM,
            deadline=10.0 * n,
        )
        for n, batch in enumerate(batches)
    ]
    tickets[2].hurry(5.0)
    tickets[1].hurry(50.0)
    for batch in batches:
        batch.step()
    assert all(ticket.wait(SOON) for ticket in tickets)
    assert order == [0, 2, 1]
    tickets[2].hurry(1.0)
    tickets[2].cancel()


def test_bytes_that_came_are_no_longer_ahead(transfer, clock):
    batch = Steps(4, clock)
    ticket = transfer.read(batch, nbytes=4 * ITEM)
    batch.step(3)
    wait_for(lambda: transfer.ahead_nbytes(math.inf) == ITEM)
    assert transfer.ahead_nbytes(1e9) == 0
    batch.step()
    assert ticket.wait(SOON)


def test_bytes_that_are_read_count_until_their_read_is_over(transfer, clock):
    first, second = Steps(2, clock), Steps(1, clock)
    one = transfer.read(first, nbytes=2 * ITEM)
    other = transfer.read(second, nbytes=ITEM)
    assert transfer.reading_nbytes == 3 * ITEM
    first.step(2)
    assert one.wait(SOON)
    assert transfer.reading_nbytes == ITEM
    second.step()
    assert other.wait(SOON)
    assert transfer.reading_nbytes == 0


# --------------------------------------------------------------------------- good, bad and no reads


def outcome_of(transfer, clock, outcome):
    ticket = transfer.read(Steps(2, clock, outcome, is_free=True), nbytes=2 * ITEM)
    assert ticket.wait(SOON)


@pytest.mark.parametrize(
    ("outcome", "is_good"),
    [
        (Outcome.DONE, True),
        (Outcome.MISS, True),
        (Outcome.DROPPED, True),
        (Outcome.FAILED, False),
        (None, False),
    ],
)
def test_only_what_the_medium_fails_is_bad(transfer, clock, told, outcome, is_good):
    outcome_of(transfer, clock, outcome)
    assert [sample.is_good for sample in told] == [is_good]
    assert transfer.reading_nbytes == 0


def test_a_read_of_no_declared_bytes_tells_nothing_and_is_waited_for(transfer, clock, told):
    batch = Steps(1, clock)
    ticket = transfer.read(batch)
    clock.now += 9.0
    assert transfer.unmoved_s() == 9.0
    batch.step()
    assert ticket.wait(SOON)
    assert told == []


def test_an_empty_read_and_a_refused_one_tell_nothing(clock, told):
    transfer = Transfer("test", num_threads=1, clock=clock)
    transfer.on_read = told.append
    assert transfer.read(Steps(0, clock), nbytes=0).wait(SOON)
    assert transfer.close(SOON)
    assert transfer.read(Steps(2, clock), nbytes=2 * ITEM).wait(SOON)
    assert told == []
    assert (transfer.reading_nbytes, transfer.unmoved_s()) == (0, 0.0)


def test_a_write_tells_nothing(transfer, clock, told):
    batch = Steps(2, clock)
    assert transfer.write(lambda: batch, nbytes=2 * ITEM)
    batch.entered()
    clock.now += 9.0
    assert transfer.unmoved_s() == 0.0
    batch.step(2)
    assert transfer.drain(SOON)
    assert (told, transfer._moved_nbytes) == ([], 0)


def test_one_who_learns_and_fails_harms_no_read(transfer, clock):
    def broken(sample):
        raise ZeroDivisionError("a bug")

    transfer.on_read = broken
    outcomes = []
    ticket = transfer.read(Steps(2, clock, is_free=True), outcomes.append, nbytes=2 * ITEM)
    assert ticket.wait(SOON)
    assert outcomes == [[Outcome.DONE] * 2], "whoever waits for the blocks gets them"


# ------------------------------------------------------------------------------------------- stalls


def test_nothing_stands_still_where_nothing_is_read(transfer, clock):
    assert transfer.unmoved_s() == 0.0
    clock.now += 1000.0
    batch = Steps(1, clock)
    ticket = transfer.read(batch, nbytes=ITEM)
    assert transfer.unmoved_s() == 0.0, "the idle time before is no stall"
    batch.step()
    assert ticket.wait(SOON)
    clock.now += 1000.0
    assert transfer.unmoved_s() == 0.0


def test_a_stall_lasts_from_what_moved_last(transfer, clock):
    batch, behind = Steps(3, clock), Steps(1, clock, is_free=True)
    tickets = [transfer.read(batch, nbytes=3 * ITEM), transfer.read(behind, nbytes=ITEM)]
    clock.now += 4.0
    assert transfer.unmoved_s() == 4.0
    batch.step()
    wait_for(lambda: transfer._moved_nbytes == ITEM)
    assert transfer.unmoved_s() == 0.0
    clock.now += 2.0
    assert transfer.unmoved_s() == 2.0
    batch.step(2)
    assert all(ticket.wait(SOON) for ticket in tickets)


def test_a_real_tier_that_stalls_is_seen_and_its_sample_is_true(tmp_path, transfer, clock, told):
    block = 64 << 10
    layout = BlockLayout(block_size=16, axes="byte", shape=(block,), dtype="uint8")
    namespace = Namespace(model="reads", weights="none", layout=layout)
    options = FileTierOptions(root=tmp_path / "file", capacity_nbytes=8 << 20, durable=False)
    tier = FaultyTier(FileTier(options), lambda number: Fault())
    tier.open_namespace(namespace)
    chain = keys_from_hashes(namespace, [b"a", b"b", b"c"])
    targets = [memoryview(mmap.mmap(-1, block)) for _ in chain]
    assert write_now(tier, chain, targets) == [Outcome.DONE] * 3
    assert read_now(tier, chain, targets) == [Outcome.DONE] * 3
    tier.stall()
    ticket = transfer.read(tier.begin_read(chain, targets), nbytes=3 * block)
    wait_for(lambda: tier.num_stalled)
    clock.now += 6.0
    assert transfer.unmoved_s() == 6.0
    tier.resume()
    assert ticket.wait(SOON)
    assert [(s.nbytes, s.seconds, s.is_good) for s in told] == [(3 * block, 6.0, True)]
    tier.close()
