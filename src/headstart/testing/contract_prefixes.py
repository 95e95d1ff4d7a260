"""Group of the tier contract: closed prefixes, eviction, capacity, discarding, namespaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstart.errors import ConfigError, HeadstartError
from headstart.testing.bounds import bounded_tests
from headstart.testing.checks import bounded_stats, check_closed, check_write, held
from headstart.testing.harness import ODD_BLOCK_NBYTES, kit_namespace
from headstart.testing.rig import TierRig
from headstart.types import MAX_BLOCK_NBYTES, NamespaceId, Outcome

DONE, FULL, ORPHAN = Outcome.DONE, Outcome.FULL, Outcome.ORPHAN


@bounded_tests
class PrefixTests:
    """A block is held only while its parent is; capacity is a hard limit."""

    def test_an_orphan_is_refused(self, rig: TierRig) -> None:
        chain = rig.chain("abcde")
        assert rig.write(chain.run(2, 4)) == [ORPHAN, ORPHAN]
        rig.store(chain.run(0, 2))
        assert rig.write(chain.run(3, 5)) == [ORPHAN, ORPHAN]
        assert held(rig, chain) == [True, True, False, False, False]
        rig.store(chain.run(2, 3), chain.run(3, 5))
        rig.expect(chain)

    def test_a_parent_in_an_unfinished_write_does_not_count(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        opened = rig.begin_write(chain.run(0, 2))
        rig.write(chain.run(2, 4))
        check_closed(rig)
        opened.finish()
        check_closed(rig)

    def test_a_parent_discarded_during_a_write(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.store(chain.run(0, 2))
        opened = rig.begin_write(chain.run(2, 4))
        rig.discard(chain.keys[:1])
        assert DONE not in opened.end()
        assert held(rig, chain) == [False] * 4

    def test_a_held_block_discarded_during_a_write(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.store(chain.run(0, 2))
        opened = rig.begin_write(chain)
        rig.discard(chain.keys[1:2])
        outcomes = opened.end()  # block 1 was held when the write began: DONE or not, both are true
        check_closed(rig)
        assert held(rig, chain)[2:] == [outcome is DONE for outcome in outcomes[2:]]
        rig.read(chain)

    def test_a_parent_under_pressure_during_a_write(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.store(chain.run(0, 2))
        opened = rig.begin_write(chain.run(2, 4))
        for root in rig.roots(2 * rig.capacity):
            rig.write(root)
        opened.end()
        check_closed(rig)
        rig.read(chain)

    def test_prefixes_stay_closed_under_eviction(self, rig: TierRig) -> None:
        for number in range(3 * rig.capacity):
            # Of varying length, so that victims are not replaced family by family.
            twig = [f"twig{number}.{index}" for index in range(1 + number % 3)]
            rig.store(rig.chain(["trunk", f"limb{number % 4}", *twig]))
            check_closed(rig)
        assert bounded_stats(rig).num_evicted > 0

    def test_eviction_takes_leaves_first(self, rig: TierRig) -> None:
        chain = rig.chain([f"block{index}" for index in range(rig.capacity)])
        rig.store(chain)
        rig.store(*rig.roots(rig.capacity // 4))
        num_left = rig.tier.lookup(chain.keys)
        assert num_left >= rig.capacity // 2, f"{num_left} of {len(chain)} blocks survived"
        rig.expect(chain.run(0, num_left))
        check_closed(rig)

    def test_eviction_spares_what_is_newest(self, rig: TierRig) -> None:
        roots = rig.roots(2 * rig.capacity)
        for root in roots:
            rig.store(root)
            rig.expect(root)
        rig.expect(*roots[-rig.capacity // 2 :])

    def test_what_is_touched_is_not_evicted(self, rig: TierRig) -> None:
        old, *roots = rig.roots(2 * rig.capacity)
        rig.store(old)
        for root in roots:
            rig.tier.touch(old.keys)
            rig.store(root)
        rig.expect(old)

    def test_touching_changes_nothing_else(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.tier.touch(())
        rig.tier.touch(chain.keys)
        rig.store(chain.run(0, 2))
        before = bounded_stats(rig)
        rig.tier.touch(chain.keys)
        assert bounded_stats(rig) == before
        assert held(rig, chain) == [True, True, False, False]

    def test_all_of_the_capacity_is_usable(self, rig: TierRig) -> None:
        chain = rig.chain([f"block{index}" for index in range(rig.capacity)])
        rig.store(chain)
        rig.expect(chain)
        assert bounded_stats(rig).num_evicted == 0

    def test_capacity_is_a_hard_limit(self, rig: TierRig) -> None:
        roots = rig.roots(3 * rig.capacity)
        for root in roots:
            opened = rig.begin_write(root)
            bounded_stats(rig)
            opened.end()
            bounded_stats(rig)
        num_held = sum(held(rig, root)[0] for root in roots)
        assert 0 < num_held <= rig.capacity, f"{num_held} blocks held, {rig.capacity} allowed"

    def test_open_writes_count_against_the_capacity(self, rig: TierRig) -> None:
        roots = rig.roots(2 * rig.capacity)
        opened = [rig.begin_write(root) for root in roots]
        for batch in opened:
            batch.end()
            bounded_stats(rig)
        assert sum(held(rig, root)[0] for root in roots) <= rig.capacity
        check_closed(rig)

    def test_a_chain_longer_than_the_capacity(self, rig: TierRig) -> None:
        chain = rig.chain([f"block{index}" for index in range(rig.capacity + 5)])
        outcomes = rig.write(chain)
        check_write(rig, chain, outcomes)
        assert DONE in outcomes
        assert set(outcomes) <= {DONE, FULL, ORPHAN}
        assert outcomes[outcomes.count(DONE)] is FULL

    def test_what_is_being_read_is_not_evicted(self, rig: TierRig) -> None:
        roots = rig.roots(rig.capacity)
        rig.store(*roots)
        reads = [rig.begin_read(root) for root in roots]
        assert rig.write(rig.chain("x")) == [FULL], "stored, though every block was being read"
        bounded_stats(rig)
        assert [read.end() for read in reads] == [[DONE]] * len(reads)
        rig.store(rig.chain("x"))

    def test_discard_takes_descendants_along(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcd"), rig.chain("abxy"), rig.chain("w"))
        assert rig.discard(rig.chain("ab").keys[1:]) == 5
        assert held(rig, rig.chain("abcd")) == [True, False, False, False]
        assert held(rig, rig.chain("abxy")) == [True, False, False, False]
        rig.expect(rig.chain("a"), rig.chain("w"))
        assert bounded_stats(rig).num_blocks == 2
        rig.store(rig.chain("abcd"))

    def test_discard_spares_siblings(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcd"), rig.chain("abxy"))
        assert rig.discard(rig.chain("abc").keys[2:]) == 2
        rig.expect(rig.chain("abxy"))
        assert held(rig, rig.chain("abcd")) == [True, True, False, False]

    def test_discard_counts_each_block_once(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        rig.store(chain)
        assert rig.discard([*chain.keys, *rig.chain("xyz").keys, *chain.keys]) == 3
        assert rig.discard(chain.keys) == 0
        assert bounded_stats(rig).num_blocks == 0

    def test_discard_during_a_read(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.store(chain)
        opened = rig.begin_read(chain)
        rig.tier.discard(chain.keys[1:2])
        rig.store(*rig.roots(rig.capacity // 2))
        opened.end()
        assert held(rig, chain) == [True, False, False, False]
        assert rig.read(chain)[1:] == [Outcome.MISS] * 3
        rig.store(*rig.roots(rig.capacity, "more"))
        bounded_stats(rig)

    def test_a_key_rewritten_during_a_read(self, rig: TierRig) -> None:
        chain = rig.chain("ab")
        rig.store(chain)
        opened = rig.begin_read(chain)
        rig.tier.discard(chain.keys)
        rig.write(chain, version=1)
        opened.end()
        rig.read(chain)

    def test_usage_is_told_by_namespace(self, rig: TierRig) -> None:
        other = rig.open_namespace(kit_namespace("other"))
        chain = rig.chain("abc")
        rig.store(chain, rig.chain("ab", other))
        usage = rig.tier.usage()
        assert usage[rig.namespace.id] == 3 * chain.block_nbytes
        assert usage[other.id] == 2 * chain.block_nbytes
        rig.discard(chain.keys)
        assert rig.tier.usage()[rig.namespace.id] == 0

    def test_discard_namespace(self, rig: TierRig) -> None:
        other = rig.open_namespace(kit_namespace("other"))
        rig.store(rig.chain("abc"), rig.chain("ab", other))
        rig.ledger.discard_namespace(rig.namespace.id)
        assert rig.tier.discard_namespace(rig.namespace.id) == 3
        assert held(rig, rig.chain("abc")) == [False] * 3
        rig.expect(rig.chain("ab", other))
        assert rig.tier.discard_namespace(rig.namespace.id) == 0
        rig.store(rig.chain("abc"))
        rig.expect(rig.chain("abc"))

    def test_namespaces_never_hit_each_other(self, rig: TierRig) -> None:
        other = rig.open_namespace(kit_namespace("other"))
        rig.store(rig.chain("abc"))
        assert rig.read(rig.chain("abc", other)) == [Outcome.MISS] * 3
        rig.store(rig.chain("abx", other))
        rig.expect(rig.chain("abc"), rig.chain("abx", other))

    def test_a_key_of_another_namespace_never_hits(self, rig: TierRig) -> None:
        other = rig.open_namespace(kit_namespace("other"))
        chain = rig.chain("ab")
        forged = replace(chain, namespace=other.id)
        rig.store(chain)
        assert DONE not in rig.read(forged)
        rig.write(forged)
        rig.read(forged)
        rig.read(chain)

    def test_open_namespace_is_idempotent(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"))
        rig.tier.open_namespace(rig.namespace)
        rig.expect(rig.chain("ab"))

    def test_an_unknown_namespace_is_refused(self, rig: TierRig) -> None:
        unknown = replace(rig.chain("ab"), namespace=NamespaceId(b"?" * 32))
        with pytest.raises(HeadstartError):
            rig.begin_read(unknown)
        with pytest.raises(HeadstartError):
            rig.begin_write(unknown)

    def test_a_block_larger_than_the_tier_is_refused(self, rig: TierRig) -> None:
        too_large = bounded_stats(rig).capacity_nbytes + 1
        if too_large > MAX_BLOCK_NBYTES:
            pytest.skip("no block is larger than this tier")
        with pytest.raises(ConfigError):
            rig.tier.open_namespace(kit_namespace("large", too_large))
        rig.store(rig.chain("ab"))

    def test_a_second_block_size_gets_room(self, rig: TierRig) -> None:
        rig.store(*rig.roots(rig.capacity))
        chain = rig.chain("ab", rig.open_namespace(kit_namespace("odd", ODD_BLOCK_NBYTES)))
        rig.store(chain)
        rig.expect(chain)
        rig.store(*rig.roots(2, "more"))
        bounded_stats(rig)
