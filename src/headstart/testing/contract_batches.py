"""Group of the tier contract: what a batch of reads or writes answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headstart.errors import HeadstartError
from headstart.testing.bounds import bounded_tests, run_bounded
from headstart.testing.checks import bounded_stats, check_write, held
from headstart.testing.harness import ODD_BLOCK_NBYTES, kit_namespace
from headstart.testing.rig import OpenBatch, TierRig
from headstart.tiers.base import Sampled
from headstart.types import KEY_NBYTES, BlockKey, KeyChain, Outcome

DONE, MISS = Outcome.DONE, Outcome.MISS


def _similar_chains(rig: TierRig) -> list[KeyChain]:
    """A chain of one block, and chains whose key differs from its in one byte only."""
    chain = rig.chain("a")
    similar = [chain]
    for position in range(KEY_NBYTES):
        key = bytearray(chain.keys[0])
        key[position] ^= 0xFF
        similar.append(replace(chain, keys=(BlockKey(bytes(key)),)))
    return similar


def _check_ready(opened: OpenBatch, indices: list[int]) -> None:
    """Run these indices; `ready_blocks()` never falls and never claims an unfinished block."""
    ready = opened.batch.ready_blocks()
    for index in indices:
        opened.batch.run(index)
        now = opened.batch.ready_blocks()
        assert ready <= now <= len(opened.chain), "ready_blocks() went back, or too far"
        ready = now
        if opened.version is None:
            for block in range(ready):
                opened.check_target(block)
    outcomes = opened.finish()
    assert outcomes[:ready] == [DONE] * ready, f"{ready} blocks were ready, came out {outcomes}"
    assert outcomes[ready:][:1] != [DONE], f"only {ready} blocks were ready, came out {outcomes}"


@bounded_tests
class BatchTests:
    """Round trips, order, misses, partial batches, and who owns which memory."""

    def test_round_trip(self, rig: TierRig) -> None:
        chain = rig.chain("abcde")
        assert rig.write(chain) == [DONE] * 5
        assert rig.read(chain) == [DONE] * 5
        assert rig.tier.lookup(chain.keys) == 5

    def test_round_trip_of_a_run_inside_a_chain(self, rig: TierRig) -> None:
        chain = rig.chain("abcde")
        rig.store(chain.run(0, 2), chain.run(2, 5))
        assert rig.read(chain.run(1, 4)) == [DONE] * 3
        assert rig.tier.lookup(chain.keys[3:]) == 2

    def test_a_sample_can_be_read(self, rig: TierRig) -> None:
        if not isinstance(rig.tier, Sampled):
            return
        assert rig.tier.sample() is None, "a sample of an empty tier"
        rig.store(rig.chain("abc"), rig.chain("x"))
        sample = rig.tier.sample()
        if sample is not None:
            assert len(sample) == 1
            assert sample.keys[0] in (*rig.chain("abc").keys, *rig.chain("x").keys)
            assert rig.read(sample) == [DONE]

    def test_a_miss_is_a_miss(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        assert rig.tier.lookup(chain.keys) == 0
        assert rig.read(chain) == [MISS] * 3
        rig.store(rig.chain("x"))
        assert rig.read(chain) == [MISS] * 3

    def test_a_longer_chain_hits_its_held_prefix(self, rig: TierRig) -> None:
        rig.store(rig.chain("abc"))
        for path, num_held in [("abcde", 3), ("abxyz", 2), ("abc", 3), ("ab", 2), ("xbc", 0)]:
            chain = rig.chain(path)
            assert rig.tier.lookup(chain.keys) == num_held
            assert rig.read(chain) == [DONE] * num_held + [MISS] * (len(path) - num_held)

    def test_a_chain_is_extended(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"), rig.chain("abcd"), rig.chain("abcx"))
        assert bounded_stats(rig).num_stored == 5, "a block already held was stored again"
        rig.expect(rig.chain("abcd"), rig.chain("abcx"))

    def test_empty_batch(self, rig: TierRig) -> None:
        rig.store(rig.chain("a"))
        for chain in (rig.chain(""), rig.chain("a").run(1, 1)):
            for opened in (rig.begin_read(chain), rig.begin_write(chain)):
                assert len(opened.batch) == 0
                assert opened.batch.ready_blocks() == 0
                assert opened.finish() == []
        assert rig.tier.lookup([]) == 0
        assert rig.tier.discard([]) == 0

    def test_duplicates_in_a_read_batch(self, rig: TierRig) -> None:
        rig.store(rig.chain("ab"))
        first, second = rig.chain("ab").keys
        chain = replace(rig.chain("ab"), keys=(first, second, second, first))
        outcomes = rig.read(chain)
        assert outcomes[:2] == [DONE, DONE]

    def test_duplicates_in_a_write_batch(self, rig: TierRig) -> None:
        first, second = rig.chain("ab").keys
        outcomes = rig.write(replace(rig.chain("ab"), keys=(first, first, second, second)))
        assert outcomes[0] is DONE
        rig.expect(rig.chain("a"))
        rig.read(rig.chain("ab"))
        rig.store(*rig.roots(rig.capacity))

    def test_the_source_is_copied(self, rig: TierRig) -> None:
        opened = rig.begin_write(rig.chain("abc"))
        assert opened.end() == [DONE] * 3
        for source in opened.memory:
            source[:] = bytes(len(source))
        rig.expect(rig.chain("abc"))

    def test_a_source_is_not_modified(self, rig: TierRig) -> None:
        opened = rig.begin_write(rig.chain("abc"))
        before = [bytes(source) for source in opened.memory]
        opened.end()
        rig.expect(rig.chain("abc"))
        assert [bytes(source) for source in opened.memory] == before

    def test_a_target_is_the_callers_alone(self, rig: TierRig) -> None:
        rig.store(rig.chain("abc"))
        opened = rig.begin_read(rig.chain("abc"))
        opened.end()
        for target in opened.memory:
            target[:] = bytes(len(target))
        rig.expect(rig.chain("abc"))

    def test_memory_beside_a_target_is_untouched(self, rig: TierRig) -> None:
        space = rig.open_namespace(kit_namespace("odd", ODD_BLOCK_NBYTES))
        for chain in (rig.chain("ab"), rig.chain("ab", space)):
            rig.store(chain)
            memory = rig.harness.buffers(2 * len(chain) + 1, chain.block_nbytes)
            for guard in memory[::2]:
                guard[:] = b"\x11" * len(guard)
            batch = rig.tier.begin_read(chain, memory[1::2])
            opened = OpenBatch(rig.ledger, batch, chain, memory[1::2])
            assert opened.end() == [DONE] * 2
            assert all(bytes(guard) == b"\x11" * len(guard) for guard in memory[::2])

    def test_blocks_of_an_odd_size(self, rig: TierRig) -> None:
        space = rig.open_namespace(kit_namespace("odd", ODD_BLOCK_NBYTES))
        chain = rig.chain("abcd", space)
        rig.store(chain)
        rig.expect(chain, chain.run(1, 3))

    def test_writing_again_changes_nothing(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        rig.store(chain)
        before = bounded_stats(rig)
        rig.store(chain, chain, rig.chain("ab"))
        after = bounded_stats(rig)
        assert (after.num_blocks, after.used_nbytes) == (before.num_blocks, before.used_nbytes)
        rig.expect(chain)

    def test_a_second_version_leaves_a_valid_block(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        rig.store(chain)
        opened = rig.begin_write(chain, version=1)
        rig.expect(chain)
        for index in range(len(opened.batch)):
            opened.batch.run(index)
            rig.expect(chain)
        assert opened.finish() == [DONE] * 3
        rig.expect(chain)
        assert bounded_stats(rig).num_dropped == 0

    def test_indices_in_reverse_order(self, rig: TierRig) -> None:
        opened = rig.begin_write(rig.chain("abcdef"))
        assert opened.end(reversed(range(len(opened.batch)))) == [DONE] * 6
        opened = rig.begin_read(rig.chain("abcdef"))
        assert opened.end(reversed(range(len(opened.batch)))) == [DONE] * 6

    def test_indices_from_several_threads(self, rig: TierRig) -> None:
        chain = rig.chain("abcdefgh")
        for begin in (rig.begin_write, rig.begin_read, rig.begin_read):
            opened = begin(chain)
            run, num_indices = opened.batch.run, len(opened.batch)
            run_bounded([partial(run, index) for index in range(num_indices)])
            assert opened.finish() == [DONE] * 8

    def test_an_index_not_run_is_a_miss_of_a_read(self, rig: TierRig) -> None:
        chain = rig.chain("abcdef")
        rig.store(chain)
        for start, step in [(0, 2), (1, 2), (0, 7), (3, 1), (6, 1)]:
            opened = rig.begin_read(chain)
            indices = range(len(opened.batch))[start::step]
            outcomes = opened.end(indices)
            assert set(outcomes) <= {DONE, MISS}, f"not run is a miss, got {outcomes}"
            if len(indices) < len(opened.batch):  # one index may move several blocks
                assert MISS in outcomes, "a block that was not read came out DONE"
        rig.expect(chain)

    def test_an_index_not_run_is_not_stored(self, rig: TierRig) -> None:
        for number, (start, step) in enumerate([(0, 2), (1, 2), (0, 5), (1, 1), (4, 1)]):
            chain = rig.chain([f"{number}{content}" for content in "abcd"])
            opened = rig.begin_write(chain)
            assert len(opened.batch) > 0
            indices = range(len(opened.batch))[start::step]
            outcomes = opened.end(indices)
            wanted = {DONE, MISS, Outcome.ORPHAN}
            assert set(outcomes) <= wanted, f"not run is a miss, got {outcomes}"
            check_write(rig, chain, outcomes)
            if len(indices) < len(opened.batch):  # one index may move several blocks
                assert not all(held(rig, chain)), "a block that was not written is held"

    def test_an_unfinished_write_is_not_held(self, rig: TierRig) -> None:
        chain = rig.chain("abc")
        opened = rig.begin_write(chain)
        assert DONE not in rig.read(chain), "held before its bytes were written"
        check_write(rig, chain, opened.finish())
        rig.store(chain)
        rig.expect(chain)

    def test_abandoned_writes_leak_no_room(self, rig: TierRig) -> None:
        for number in range(3 * rig.capacity):
            chain = rig.chain([f"{number}a", f"{number}b"])
            opened = rig.begin_write(chain)
            check_write(rig, chain, opened.end(range(min(number % 2, len(opened.batch)))))
        roots = rig.roots(rig.capacity)
        rig.store(*roots)
        rig.expect(*roots)

    def test_abandoned_reads_leak_no_pins(self, rig: TierRig) -> None:
        chain = rig.chain("abcd")
        rig.store(chain)
        for number in range(3 * rig.capacity):
            opened = rig.begin_read(chain)
            opened.end(range(min(number % 5, len(opened.batch))))
        rig.store(*rig.roots(rig.capacity))
        assert held(rig, chain) == [False] * 4, "what nobody reads any more cannot be evicted"

    def test_refused_writes_leak_no_room(self, rig: TierRig) -> None:
        orphan = rig.chain("abcd").run(2, 4)
        too_long = rig.chain([f"long{index}" for index in range(2 * rig.capacity)])
        for _ in range(3 * rig.capacity):
            rig.write(orphan)
        for _ in range(3):
            rig.write(too_long)
        roots = rig.roots(rig.capacity)
        rig.store(*roots)
        rig.expect(*roots)

    def test_ready_blocks_of_a_read(self, rig: TierRig) -> None:
        rig.store(rig.chain("abcdef"))
        for path in ("abcdef", "abcxyz"):
            for order in (1, -1):
                opened = rig.begin_read(rig.chain(path))
                _check_ready(opened, list(range(len(opened.batch)))[::order])

    def test_ready_blocks_of_a_write(self, rig: TierRig) -> None:
        rig.store(rig.chain("a"))
        opened = rig.begin_write(rig.chain("abcd"))
        _check_ready(opened, list(range(len(opened.batch))))
        opened = rig.begin_write(rig.chain("awxyz"))
        _check_ready(opened, list(range(len(opened.batch)))[::-1])
        for path in ("mn", "opq"):
            opened = rig.begin_write(rig.chain(path))
            _check_ready(opened, list(range(len(opened.batch)))[: len(path) - 2])

    def test_bytes_in_flight_are_told(self, rig: TierRig) -> None:
        for begin in (rig.begin_write, rig.begin_read):
            opened = begin(rig.chain("abc"))
            assert opened.batch.item_nbytes > 0
            opened.end()

    def test_similar_keys_are_different_keys(self, rig: TierRig) -> None:
        chain, *similar = _similar_chains(rig)
        rig.store(chain)
        for other in similar:
            assert rig.read(other) != [DONE]
        rig.expect(chain)
        for other in similar[:: KEY_NBYTES // 4]:
            rig.write(other)
        for other in (chain, *similar):
            rig.read(other)

    def test_a_chain_of_another_block_size_never_hits(self, rig: TierRig) -> None:
        chain = rig.chain("ab")
        rig.store(chain)
        try:
            outcomes = rig.read(replace(chain, block_nbytes=chain.block_nbytes // 2))
        except HeadstartError:
            return
        assert DONE not in outcomes, "a part of a block came out as a block"
