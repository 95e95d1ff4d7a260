"""Promotions: the budget, reads that are shared, cut short or given up, slow and failing media."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node.board import Phase
from headstart.node.promotions import Promotions
from headstart.testing import Fault

SOON = 20.0
BLOCK = 64 << 10
SLOT = 4096 + BLOCK
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


def contents(path):
    return [key * (BLOCK // len(key)) for key in chain(path)]


class Told:
    """What a promotion tells."""

    def __init__(self):
        self.phase, self.ready = Phase.WAITING, 0
        self.all = []

    def __call__(self, phase, ready):
        self.phase, self.ready = phase, ready
        self.all.append((phase, ready))

    @property
    def is_done(self):
        return self.phase is Phase.DONE


class Started:
    """A promotion of `path` and what it tells."""

    def __init__(self, world, path):
        self.told = Told()
        self._promotions = world.promotions
        self.promotion = world.promotions.start(chain(path), self.told)

    def cut(self):
        lease = self._promotions.cut(self.promotion, SOON)
        return None if lease is None else lease.ready_blocks

    def end(self):
        self._promotions.end(self.promotion)

    @property
    def ready(self):
        """Blocks of the lease when it is over."""
        assert self.promotion._over.wait(SOON)
        lease = self.promotion.lease
        return None if lease is None else lease.ready_blocks


@pytest.fixture
def start(world):
    """Starts promotions; all are ended after the test."""
    all_started = []

    def make(path):
        all_started.append(Started(world, path))
        return all_started[-1]

    yield make
    world.slow.schedule = lambda number: Fault()
    world.slow.resume()
    for started in all_started:
        started.end()


def lowered(world, *paths):
    """Store paths so that only the file tier holds them."""
    for path in paths:
        world.put(path)
    world.forget_memory()


# --------------------------------------------------------------------------------------- the budget


def test_what_memory_holds_is_ready_at_once(world, start):
    world.put("abcd")
    started = start("abcd")
    assert started.promotion.is_over
    assert started.ready == 4
    assert started.told.all == [(Phase.DONE, 4)]
    assert world.promotions.pinned_nbytes == 4 * BLOCK
    assert world.counted.num_begun == 1, "the write"


def test_waiting_prompts_pin_half_the_arena_and_start_in_order(world, start):
    """64 blocks of arena: four prompts of 12 want 48, two of them fit."""
    paths = [[f"{letter}{n}" for n in range(12)] for letter in "abcd"]
    lowered(world, *paths)
    first, second, third, fourth = map(start, paths)
    small = start(paths[0][:2])
    assert (first.ready, second.ready) == (12, 12)
    assert world.promotions.pinned_nbytes == 24 * BLOCK
    assert world.promotions.num_waiting == 3
    assert not small.promotion.is_over, "though it would fit: the order is that of arrival"
    assert third.told.all == []
    second.end()
    assert third.ready == 12
    assert world.promotions.num_waiting == 2
    third.end()
    assert (fourth.ready, small.ready) == (12, 2)
    assert world.promotions.num_waiting == 0
    assert world.promotions.pinned_nbytes == 26 * BLOCK


def test_storing_goes_on_while_the_budget_is_used_up(world, start):
    paths = [[f"{letter}{n}" for n in range(16)] for letter in "abc"]
    lowered(world, *paths)
    started = [start(path) for path in paths]
    assert [s.ready for s in started[:2]] == [16, 16]
    world.wrap()
    for s, path in zip(started[:2], paths, strict=False):
        assert [bytes(view) for view in s.promotion.lease.views] == contents(path)


def test_a_prompt_longer_than_half_the_arena_is_cut_to_what_fits(world, start):
    world.put(range(30))
    world.put(range(50), start=30)
    world.forget_memory()
    started = start(range(50))
    assert started.ready == 32
    waiting = start(range(40))
    assert world.promotions.num_waiting == 1
    started.end()
    assert waiting.ready == 32


def test_one_that_waits_may_be_ended_or_cut(world, start):
    lowered(world, range(32), "abcd", "xy")
    start(range(32))
    ended, cut, last = start("abcd"), start("abcd"), start("xy")
    ended.end()
    ended.end()
    assert ended.told.all == [(Phase.DONE, 0)]
    assert cut.cut() is None, "at once: it has no room to pin anything"
    assert world.promotions.num_waiting == 2
    cut.end()
    assert world.promotions.num_waiting == 1
    assert world.promotions.pinned_nbytes == 32 * BLOCK
    assert not last.promotion.is_over


def test_the_first_in_line_ends_and_the_next_one_fits(world, start):
    lowered(world, range(24), [f"a{n}" for n in range(16)], "xyz")
    start(range(24))
    large, small = start([f"a{n}" for n in range(16)]), start("xyz")
    assert world.promotions.num_waiting == 2
    large.end()
    assert small.ready == 3


# ------------------------------------------------------------------------------------- shared reads


def test_promotions_of_the_same_blocks_read_them_once(world, start):
    lowered(world, "abcdefgh")
    begun = world.counted.num_begun
    world.slow.stall()
    started = [start("abcdefgh"[:length]) for length in (8, 8, 5, 3)]
    world.slow.resume()
    assert [s.ready for s in started] == [8, 8, 5, 3]
    assert world.counted.num_begun == begun + 1
    assert world.file.stats().num_hits == 8
    for s in started:
        assert s.promotion.lease.offsets == started[0].promotion.lease.offsets[: s.ready]


def test_of_a_shared_prefix_only_the_rest_is_read_again(world, start):
    lowered(world, "abcdxyz")
    world.put("abcd")
    world.put("abcdmn", start=4)
    world.forget_memory()
    world.slow.stall()
    first, second = start("abcdxyz"), start("abcdmn")
    world.slow.resume()
    assert (first.ready, second.ready) == (7, 6)
    assert world.file.stats().num_hits == 7 + 2
    shared = [ready for phase, ready in second.told.all if phase is Phase.READING]
    assert max(shared, default=0) <= 6


def test_a_joined_one_is_told_no_more_than_it_shares(world, start, soon, monkeypatch):
    lowered(world, "abxyz")
    world.put("ab")
    world.put("abmno", start=2)
    world.forget_memory()
    flows = threading.Event()
    load = world.store.load

    def slow_load(asked, *, go_on, **options):
        go_on(5, world.file.name)  # all of them, of the one that reads
        flows.wait(SOON)
        return load(asked, go_on=go_on, **options)

    world.slow.stall()
    first = start("abxyz")
    soon(lambda: first.told.all)
    monkeypatch.setattr(world.store, "load", slow_load)
    second = start("abmno")
    world.slow.resume()
    assert first.ready == 5
    flows.set()
    assert second.ready == 5
    told = [ready for phase, ready in second.told.all if phase is Phase.READING]
    assert told[0] <= 2


def test_the_reader_of_others_ends_and_they_read_themselves(world, start, soon):
    lowered(world, "abcdefgh")
    world.slow.stall()
    reader = start("abcdefgh")
    soon(lambda: world.slow.num_stalled)
    others = [start("abcdefgh"), start("abcd")]
    reader.end()
    others[1].end()
    world.slow.resume()
    assert others[0].ready == 8
    assert others[1].ready is None
    assert others[1].told.all[-1] == (Phase.DONE, 0)


def test_many_at_once_of_many_prompts(make_world):
    world = make_world(memory_blocks=128)
    paths = [[f"root {n % 5}", *(f"{n} {m}" for m in range(n % 4))] for n in range(40)]
    for path in paths:
        world.put(path)
    world.forget_memory()
    barrier = threading.Barrier(8)
    failures = []

    def run(number):
        barrier.wait()
        for turn in range(15):
            path = paths[(number * 7 + turn * 3) % len(paths)]
            started = Started(world, path)
            if turn % 3 == 0:
                started.cut()
            elif turn % 3 == 1:
                ready = started.ready
                lease = started.promotion.lease
                if ready and [bytes(v) for v in lease.views] != contents(path)[:ready]:
                    failures.append((path, ready))
            started.end()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not world.promotions._readers


# ------------------------------------------------------------------------------ cut short, given up


class Stalling:
    """The file tier's volume: reads of what was stored after the first `num_ready` blocks wait."""

    def __init__(self, world, num_ready):
        self.inner, self.num_ready = world.file.volume, num_ready
        self.capacity_nbytes, self.direct = self.inner.capacity_nbytes, self.inner.direct
        self.close, self.write = self.inner.close, self.inner.write
        self.flows = threading.Event()

    def read(self, offset, buffers):
        if offset // SLOT >= self.num_ready:
            self.flows.wait(SOON)
        return self.inner.read(offset, buffers)


@pytest.fixture
def half_way(world, monkeypatch):
    """Lets the file tier read the first blocks that were stored, one by one, and no more."""
    made = []

    def make(num_ready):
        monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
        made.append(Stalling(world, num_ready))
        world.file.volume = made[-1]
        return made[-1].flows

    yield make
    for stalling in made:
        stalling.flows.set()


def test_cut_while_it_reads_it_has_what_is_ready(world, start, soon, half_way):
    lowered(world, "abcdefgh")
    flows = half_way(3)
    started = start("abcdefgh")
    soon(lambda: started.told.ready == 3)
    assert started.told.phase is Phase.READING
    assert started.cut() == 3
    assert started.told.all[-1] == (Phase.DONE, 3)
    lease = started.promotion.lease
    assert lease.late
    assert [bytes(view) for view in lease.views] == contents("abc")
    assert started.cut() == 3, "cut again it is the same"
    flows.set()
    assert [bytes(view) for view in lease.views] == contents("abc")


def test_a_joined_one_that_is_cut_has_what_memory_holds(world, start, soon, half_way):
    lowered(world, "abcdef")
    assert start("ab").ready == 2
    flows = half_way(0)
    reader = start("abcdef")
    soon(lambda: reader.told.all)
    joined = start("abcdef")
    assert joined.cut() == 2
    assert joined.told.all[-1] == (Phase.DONE, 2)
    flows.set()
    assert reader.ready == 6
    assert joined.ready == 2, "it was loaded once"


def test_an_ended_one_is_freed_when_its_read_returns(world, start, soon):
    lowered(world, "abcdefgh", range(32))
    world.slow.stall()
    started = start("abcdefgh")
    soon(lambda: world.slow.num_stalled)
    waiting = start(range(32))
    started.end()
    started.end()
    soon(lambda: world.promotions.pinned_nbytes == 32 * BLOCK, "room for the next")
    assert world.memory.index._reserved, "a slot with a read in flight stays the read's"
    world.slow.resume()
    assert waiting.ready == 32
    assert started.promotion.lease is None
    assert started.told.all[-1] == (Phase.DONE, 0)


def test_ended_twice_gives_back_once(world, start):
    world.put("abcd")
    first, second = start("abcd"), start("ab")
    first.end()
    first.end()
    assert world.promotions.pinned_nbytes == 2 * BLOCK
    assert second.promotion.lease.ready_blocks == 2
    second.end()
    second.end()
    assert world.promotions.pinned_nbytes == 0


def test_a_read_that_takes_too_long_gives_what_is_ready(world, soon, half_way):
    lowered(world, "abcdefgh")
    promotions = Promotions(world.store, max_pinned_nbytes=32 * BLOCK, timeout_s=1.0, num_threads=1)
    half_way(2)
    told = Told()
    promotion = promotions.start(chain("abcdefgh"), told)
    soon(lambda: promotion.is_over)
    promotions.end(promotion)
    promotions.close()
    assert (told.phase, told.ready) == (Phase.DONE, 2)


def test_closing_does_not_wait_for_what_is_read(world, start, soon):
    lowered(world, "abcd", "xy", range(32))
    world.slow.stall()
    reading, joined, waiting = start("abcd"), start("abcd"), start(range(32))
    soon(lambda: world.slow.num_stalled)
    started = time.monotonic()
    world.promotions.close()
    assert time.monotonic() - started < SOON, "less than the device stands still"
    assert not any(thread.is_alive() for thread in world.promotions._threads)
    assert (reading.ready, joined.ready) == (0, None)
    assert not waiting.promotion.is_over
    after = start("xy")
    assert after.promotion is not None
    world.slow.resume()
    for started in (reading, joined, waiting, after):
        started.end()


# ------------------------------------------------------------------------------- slow and bad media


def fail(timeout_s):
    raise OSError(errno.EIO, "the device is gone")


def test_more_promotions_than_threads_on_a_slow_medium(world, start):
    paths = [[f"{n}"] for n in range(30)]
    lowered(world, *paths)
    world.slow.schedule = lambda number: Fault(latency_s=0.002)
    assert [s.ready for s in [start(path) for path in paths]] == [1] * 30


def test_one_behind_all_threads_that_is_cut_does_not_wait_for_them(world, start, soon):
    lowered(world, "ab", *([f"{n}"] for n in range(16)))
    assert start("a").ready == 1
    world.slow.stall()
    busy = [start([f"{n}"]) for n in range(16)]
    soon(lambda: all(s.told.all for s in busy))
    last = start("ab")
    assert last.cut() == 1
    world.slow.resume()
    assert [s.ready for s in busy] == [1] * 16


def test_behind_all_threads_the_most_urgent_is_next(world, start, soon):
    lowered(world, "a", "b", *([f"{n}"] for n in range(16)))
    world.slow.stall()
    assert not world.promotions.is_busy
    busy = [start([f"{n}"]) for n in range(16)]
    soon(lambda: world.promotions.is_busy)
    late, urgent = (
        world.promotions.start(chain(path), Told(), deadline=deadline)
        for path, deadline in (("a", 90.0), ("b", 10.0))
    )
    assert world.promotions._jobs.queue[0][2] is urgent
    world.slow.resume()
    assert [s.ready for s in busy] == [1] * 16
    for promotion in (late, urgent):
        assert promotion._over.wait(SOON)
        world.promotions.end(promotion)


def test_whoever_joins_in_a_hurry_hurries_the_one_that_reads(world, soon):
    lowered(world, "ab")
    ((_, transfer),) = world.store.lower
    world.slow.stall()
    both = [world.promotions.start(chain("ab"), Told(), deadline=90.0)]
    soon(lambda: [ticket.deadline for ticket in transfer._unfinished] == [90.0])
    both.append(world.promotions.start(chain("ab"), Told(), deadline=10.0))
    soon(lambda: [ticket.deadline for ticket in transfer._unfinished] == [10.0])
    world.slow.resume()
    for promotion in both:
        assert promotion._over.wait(SOON)
        world.promotions.end(promotion)


@pytest.mark.parametrize("num_ready", [0, 2, 7])
def test_a_failing_medium_makes_a_lease_shorter(world, start, half_way, num_ready):
    lowered(world, "abcdefgh")
    half_way(num_ready).wait = fail
    started = start("abcdefgh")
    assert started.ready == num_ready
    assert started.told.is_done
    assert started.told.ready == started.ready


def test_those_who_joined_a_failed_read_try_themselves(world, start):
    lowered(world, "abcd")
    base = world.slow._num_ios
    world.slow.schedule = lambda number: Fault(fails=number - base < 4)
    world.slow.stall()
    first, second = start("abcd"), start("abcd")
    world.slow.resume()
    assert first.ready < 4
    assert second.ready in (0, 1, 2, 3, 4)
    assert second.told.is_done


def test_a_bug_of_the_store_is_a_miss(world, start, monkeypatch, caplog):
    lowered(world, "abcd")

    def broken(*args, **kwargs):
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "load", broken)
        started = start("abcd")
        assert started.ready is None
        assert started.told.all[-1] == (Phase.DONE, 0)
    assert "a promotion failed" in caplog.text
    started.end()
    assert world.promotions.pinned_nbytes == 0
    assert start("abcd").ready == 4


def test_blocks_that_went_meanwhile_are_a_shorter_lease(world, start, monkeypatch):
    """Between the look-up and the load; the thread that asks must not read."""
    lowered(world, "abcdef")
    lookup = world.store.lookup

    def stale(asked):
        found = lookup(asked)
        found.by_tier["memory"] = len(asked)
        return found

    world.slow.stall()
    monkeypatch.setattr(world.store, "lookup", stale)
    asked_at = time.monotonic()
    started = start("abcdef")
    assert time.monotonic() - asked_at < SOON, "less than the device stands still"
    assert started.promotion.is_over
    assert started.ready == 0
    world.slow.resume()


def test_nothing_of_a_block_larger_than_half_the_arena(world):
    huge = Namespace(
        model="huge",
        weights="none",
        layout=BlockLayout(block_size=1, axes="byte", shape=(40 * BLOCK,), dtype="uint8"),
    )
    told = Told()
    run = keys_from_hashes(huge, [b"a"])
    world.memory.namespaces.add(huge.id)
    promotion = world.promotions.start(run, told)
    assert promotion.is_over
    assert promotion.lease.ready_blocks == 0
    world.promotions.end(promotion)
