"""Group of the tier contract: opening again, closing, statistics, the harness's own honesty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headstart.errors import ClosedError
from headstart.testing.bounds import bounded_tests
from headstart.testing.checks import bounded_stats, check_books, check_closed, held
from headstart.testing.harness import MAX_SKIPS, MIN_CAPACITY_BLOCKS, Ending
from headstart.testing.rig import TierRig
from headstart.tiers.base import Tier
from headstart.types import Outcome

DONE = Outcome.DONE


def _calls(rig: TierRig) -> dict[str, Callable[[], object]]:
    """Every method of a tier but `close`, ready to be called."""
    tier, chain = rig.tier, rig.chain("ab")
    memory = rig.harness.buffers(len(chain), chain.block_nbytes)
    return {
        "open_namespace": lambda: tier.open_namespace(rig.namespace),
        "lookup": lambda: tier.lookup(chain.keys),
        "touch": lambda: tier.touch(chain.keys),
        "begin_read": lambda: tier.begin_read(chain, memory),
        "begin_write": lambda: tier.begin_write(chain, memory),
        "discard": lambda: tier.discard(chain.keys),
        "discard_namespace": lambda: tier.discard_namespace(rig.namespace.id),
        "stats": tier.stats,
        "verify": tier.verify,
        "flush": tier.flush,
    }


@bounded_tests
class LifetimeTests:
    """A tier from opening to closing, and what it counts on the way."""

    def test_it_is_a_tier_with_a_name(self, rig: TierRig) -> None:
        assert isinstance(rig.tier, Tier)
        assert rig.tier.name
        assert bounded_stats(rig).name == rig.tier.name

    def test_a_closed_tier_raises(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"))
        calls = _calls(rig)
        rig.tier.close()
        for name, call in calls.items():
            try:
                call()
            except ClosedError:
                continue
            raise AssertionError(f"{name}() of a closed tier did not raise ClosedError")

    def test_close_is_idempotent(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"))
        rig.tier.close()
        rig.tier.close()

    def test_flush_changes_nothing(self, rig: TierRig) -> None:
        rig.tier.flush()
        rig.store(rig.chain("ab"))
        rig.tier.flush()
        rig.tier.flush()
        rig.expect(rig.chain("ab"))

    def test_blocks_outlive_close(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcd"), rig.chain("abxy"))
        before = bounded_stats(rig)
        rig.reopen(Ending.CLOSE)
        rig.expect(rig.chain("abcd"), rig.chain("abxy"))
        after = bounded_stats(rig)
        assert (after.num_blocks, after.used_nbytes) == (before.num_blocks, before.used_nbytes)
        assert rig.tier.verify().good

    def test_flushed_blocks_outlive_a_kill(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcd"), rig.chain("abxy"))
        rig.tier.flush()
        rig.reopen(Ending.KILL)
        rig.expect(rig.chain("abcd"), rig.chain("abxy"))

    def test_a_kill_without_flush_may_forget_but_not_lie(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"))
        rig.tier.flush()
        rig.store(rig.chain("abcd"), rig.chain("wxyz"))
        unfinished = rig.begin_write(rig.chain("abst"))
        for index in range(len(unfinished.batch)):
            unfinished.batch.run(index)
        rig.reopen(Ending.KILL)
        rig.expect(rig.chain("ab"))
        for path in ("abcd", "wxyz", "abst"):
            rig.read(rig.chain(path))
        check_closed(rig)
        rig.store(*rig.roots(rig.capacity))

    def test_a_full_tier_reopened_goes_on_evicting(self, rig: TierRig) -> None:
        for ending in (Ending.CLOSE, Ending.KILL):
            for number in range(rig.capacity):
                rig.store(rig.chain(["trunk", f"{ending.name}{number}"]))
            rig.tier.flush()
            rig.reopen(ending)
            check_closed(rig)
            assert bounded_stats(rig).num_blocks > rig.capacity // 2
        rig.store(*rig.roots(2 * rig.capacity))
        check_closed(rig)
        bounded_stats(rig)

    def test_discarded_blocks_stay_away(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcd"), rig.chain("wx"))
        rig.discard(rig.chain("ab").keys[1:])
        rig.reopen(Ending.CLOSE)
        assert held(rig, rig.chain("abcd")) == [True, False, False, False]
        rig.ledger.discard_namespace(rig.namespace.id)
        assert rig.tier.discard_namespace(rig.namespace.id) == 3
        rig.reopen(Ending.CLOSE)
        assert held(rig, rig.chain("wx")) == [False, False]
        assert bounded_stats(rig).num_blocks == 0

    def test_stats_count_reads_and_writes(self, rig: TierRig) -> None:
        block_nbytes = rig.namespace.layout.block_nbytes
        rig.store(rig.chain("abcd"))
        rig.expect(rig.chain("abcd"), rig.chain("ab"))
        rig.read(rig.chain("abxyz"))
        stats = bounded_stats(rig)
        assert (stats.num_blocks, stats.num_stored) == (4, 4)
        assert (stats.num_hits, stats.num_misses) == (8, 3)
        assert stats.read_nbytes >= 8 * block_nbytes
        assert stats.written_nbytes >= 4 * block_nbytes
        assert stats.used_nbytes >= 4 * block_nbytes
        assert (stats.num_dropped, stats.num_refused, stats.num_failed) == (0, 0, 0)

    def test_stats_count_what_goes(self, rig: TierRig) -> None:
        rig.store(*rig.roots(rig.capacity + 3))
        check_books(rig)
        assert bounded_stats(rig).num_evicted >= 3
        evicted = bounded_stats(rig).num_evicted
        rig.discard(rig.roots(rig.capacity + 3)[-1].keys)
        assert bounded_stats(rig).num_discarded == 1
        rig.write(rig.chain("xyz").run(1, 3))
        assert bounded_stats(rig).num_refused == 2
        assert bounded_stats(rig).num_evicted == evicted
        check_books(rig)
        assert rig.tier.discard_namespace(rig.namespace.id) == bounded_stats(rig).num_discarded - 1
        assert (bounded_stats(rig).num_blocks, bounded_stats(rig).used_nbytes) == (0, 0)
        check_books(rig)

    def test_the_harness_is_honest(self, rig: TierRig) -> None:
        harness = rig.harness
        tests = {name for name in dir(type(self)) if name.startswith("test_")}
        assert harness.capacity_blocks >= MIN_CAPACITY_BLOCKS
        assert set(harness.skips) <= tests, f"no such tests: {set(harness.skips) - tests}"
        assert len(harness.skips) <= MAX_SKIPS, f"more than {MAX_SKIPS} tests are skipped"
        assert all(len(reason) > 8 for reason in harness.skips.values()), "a skip needs a reason"
        assert "test_the_harness_is_honest" not in harness.skips
        if harness.durable:
            assert harness.damages, "a medium that keeps blocks also damages them"

    def test_the_buffers_are_aligned(self, rig: TierRig) -> None:
        for block_nbytes, padded_nbytes in ((1, 4096), (4096, 4096), (5000, 8192)):
            for memory in rig.harness.buffers(3, block_nbytes):
                address = np.frombuffer(memory, np.uint8).ctypes.data
                assert (len(memory), address % 4096) == (padded_nbytes, 0)
