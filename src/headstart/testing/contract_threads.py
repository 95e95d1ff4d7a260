"""Group of the tier contract: many threads, and readers beside writers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from headstart.testing.bounds import bounded_tests, run_bounded
from headstart.testing.checks import (
    bounded_stats,
    check_books,
    check_closed,
    check_invariants,
    check_write,
)
from headstart.testing.rig import TierRig
from headstart.types import KeyChain, Outcome

DONE = Outcome.DONE
HEALTHY = {DONE, Outcome.MISS, Outcome.FULL, Outcome.ORPHAN}
"""What may come of a batch on an undamaged medium, whatever other threads do."""


def read_often(rig: TierRig, chains: list[KeyChain], num_reads: int, seed: int) -> None:
    """Read random chains. A DROPPED here means that the reader saw a block half written."""
    choose = random.Random(seed)
    for _ in range(num_reads):
        outcomes = rig.read(choose.choice(chains))
        assert set(outcomes) <= HEALTHY, f"on a sound medium: {outcomes}"


def write_often(rig: TierRig, chains: list[KeyChain], num_writes: int, seed: int) -> None:
    """Write random versions of random chains, in whole or in part."""
    choose = random.Random(seed)
    for _ in range(num_writes):
        opened = rig.begin_write(choose.choice(chains), version=choose.randrange(4))
        indices = range(len(opened.batch))
        if choose.random() < 0.2:
            indices = indices[: choose.randint(0, len(indices))]
        outcomes = opened.end(choose.sample(indices, len(indices)))
        assert set(outcomes) <= HEALTHY, f"on a sound medium: {outcomes}"


def meddle_often(rig: TierRig, chains: list[KeyChain], num_calls: int, seed: int) -> None:
    """Everything else a tier is asked, in random order."""
    choose = random.Random(seed)
    for _ in range(num_calls):
        keys = choose.choice(chains).keys
        calls: list[Callable[[], object]] = [
            partial(rig.tier.lookup, keys),
            partial(rig.tier.touch, keys),
            partial(rig.tier.discard, keys[-1:]),
            partial(rig.tier.open_namespace, rig.namespace),
            partial(bounded_stats, rig),
            rig.tier.flush,
        ]
        choose.choice(calls)()


def verify_often(rig: TierRig, num_calls: int) -> None:
    """Verify a tier that never had a damaged block."""
    for _ in range(num_calls):
        assert rig.tier.verify().num_damaged == 0, "verify() saw a block half written"


@bounded_tests
class ThreadTests:
    """All methods from any thread; readers never see a wrong byte while writers churn."""

    def test_one_key_written_by_several_threads(self, rig: TierRig) -> None:
        for number in range(8):
            chain = rig.chain([f"{number}{content}" for content in "abc"])
            run_bounded([partial(rig.write, chain, version) for version in range(4)])
            rig.expect(chain)
        check_books(rig)
        assert bounded_stats(rig).num_dropped == 0

    def test_two_open_writes_of_one_key(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        first, second = rig.begin_write(chain, version=0), rig.begin_write(chain, version=1)
        for index in range(max(len(first.batch), len(second.batch))):
            for opened in (first, second):
                if index < len(opened.batch):
                    opened.batch.run(index)
        check_write(rig, chain, second.finish())
        assert first.finish() == [DONE] * 3
        rig.expect(chain)
        assert bounded_stats(rig).num_blocks == 3
        check_books(rig)
        rig.store(*rig.roots(rig.capacity))

    def test_an_abandoned_write_beside_a_finished_one(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        abandoned, written = rig.begin_write(chain), rig.begin_write(chain, version=1)
        abandoned.finish()
        check_write(rig, chain, written.end())
        rig.store(chain)
        check_books(rig)

    def test_readable_while_rewritten(self, rig: TierRig) -> None:
        chain = rig.chain("ab")
        rig.store(chain)
        for version in range(4):
            rig.store(chain, version=version)
        work = [partial(write_often, rig, [chain], 60, 1)]
        work += [partial(read_often, rig, [chain], 120, seed) for seed in (2, 3)]
        run_bounded(work)
        rig.expect(chain)
        assert bounded_stats(rig).num_dropped == 0, "a reader saw a block half written"

    def test_readable_while_evicted(self, rig: TierRig) -> None:
        chains = rig.roots(2 * rig.capacity)
        chains += [rig.chain(f"t{limb}{leaf}") for limb in "ab" for leaf in "cdef"]
        work = [partial(write_often, rig, chains, 100, seed) for seed in (1, 2)]
        work += [partial(read_often, rig, chains, 150, seed) for seed in (3, 4)]
        run_bounded(work)
        assert bounded_stats(rig).num_dropped == 0, "a reader saw a block half written"
        check_closed(rig)
        check_books(rig)

    def test_everything_at_once(self, rig: TierRig) -> None:
        chains = [rig.chain(f"t{limb}{leaf}") for limb in "abc" for leaf in "defgh"]
        work = [partial(read_often, rig, chains, 100, 1)]
        work += [partial(write_often, rig, chains, 80, seed) for seed in (2, 3)]
        work += [partial(meddle_often, rig, chains, 150, 4)]
        work += [partial(verify_often, rig, 5)]
        run_bounded(work)
        check_invariants(rig)
        check_books(rig)
        assert bounded_stats(rig).num_dropped == 0, "a reader saw a block half written"

    def test_no_room_is_lost_between_threads(self, rig: TierRig) -> None:
        chains = rig.roots(3 * rig.capacity)
        run_bounded([partial(write_often, rig, chains, 80, seed) for seed in range(4)])
        fresh = rig.roots(rig.capacity, "fresh")
        rig.store(*fresh)
        rig.expect(*fresh)
        check_books(rig)
        rig.tier.discard_namespace(rig.namespace.id)
        assert bounded_stats(rig).used_nbytes == 0, "room is in use, but no block is held"
