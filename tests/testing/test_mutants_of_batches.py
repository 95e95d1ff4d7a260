"""The kit catches tiers whose batches are wrong: their bytes, outcomes, order, progress."""

from __future__ import annotations

import time
from functools import partial

import pytest

from headstart.testing import DictHarness, DictTier, Status, conform
from headstart.testing.dict_tier import Books, DictRead, DictWrite, block_checksum
from headstart.types import Outcome


class Unchecked(Books):
    def is_sound(self, key, entry):
        return True


class AliasesTheSource(DictTier):
    """Keeps a view of the caller's memory instead of a copy."""

    books_type = Unchecked

    class write_type(DictWrite):
        def run(self, index):
            self.data[index] = self.sources[index][: self.chain.block_nbytes]


class KeepsTheTarget(DictTier):
    """Serves later reads from the memory that was lent to it."""

    books_type = Unchecked

    class read_type(DictRead):
        def run(self, index):
            super().run(index)
            if self.outcomes[index] is Outcome.DONE:
                self.entries[index].data = self.targets[index][: self.chain.block_nbytes]


class ScribblesOnTheSource(DictTier):
    """Stamps its header into the caller's memory."""

    class write_type(DictWrite):
        def run(self, index):
            super().run(index)
            self.sources[index][-8:] = b"HEADER.."


class OverrunsTheTarget(DictTier):
    """Reads everything into one target and the memory behind it."""

    class read_type(DictRead):
        def run(self, index):
            super().run(index)
            memory = memoryview(self.targets[index].obj)
            start = len(memory) - len(self.targets[index])
            memory[start:] = bytes(len(self.targets[index]))


class SwapsTargets(DictTier):
    """Fills the targets in the wrong order."""

    def begin_read(self, chain, targets):
        return super().begin_read(chain, targets[::-1])


class HasNoChecksum(DictTier):
    """Believes its medium."""

    books_type = Unchecked


class ChecksumLeavesOutTheKey(DictTier):
    """A sound block of another key, copied over, is taken for this one."""

    class books_type(Books):
        def is_sound(self, key, entry):
            return any(
                entry.checksum == block_checksum(other.namespace, known, entry.data)
                for known, other in list(self.entries.items())
            )


class CallsAMissDone(DictTier):
    """Optimistic outcomes."""

    class read_type(DictRead):
        def finish(self):
            super().finish()
            return [Outcome.DONE] * len(self.chain)


class ReversesOutcomes(DictTier):
    """Outcomes in another order than the chain."""

    class read_type(DictRead):
        def finish(self):
            return super().finish()[::-1]


class MergesDuplicates(DictTier):
    """One outcome a key instead of one a block."""

    class read_type(DictRead):
        def finish(self):
            return list(dict(zip(self.chain, super().finish(), strict=True)).values())


class ComparesPartOfTheKey(DictTier):
    """Finds a block by the first half of its key, and trusts it."""

    class books_type(Unchecked):
        def find(self, namespace, key):
            similar = [known for known in self.entries if known[:16] == key[:16]]
            return super().find(namespace, similar[0]) if similar else None


class IgnoresTheNamespace(DictTier):
    """Finds a block by its key alone."""

    class books_type(Books):
        def find(self, namespace, key):
            return self.entries.get(key)


class ReadsAPartOfABlock(DictTier):
    """Serves the start of a block to who asks for a smaller one."""

    class read_type(DictRead):
        def run(self, index):
            if self.entries[index] is not None:
                target = self.targets[index]
                target[:] = self.entries[index].data[: len(target)].ljust(len(target))
                self.outcomes[index] = Outcome.DONE


class WritesInPlace(DictTier):
    """Overwrites a held block while others read it, with nothing to tell them."""

    books_type = Unchecked

    class write_type(DictWrite):
        def run(self, index):
            super().run(index)
            data, entry = self.data[index], self.books.entries.get(self.chain.keys[index])
            if entry is not None:
                middle = len(data) // 2
                entry.data = data[:middle] + entry.data[middle:]
                time.sleep(0.0005)
                entry.data = data


class WritesInPlaceBehindAChecksum(DictTier):
    """As before, but readers notice: to them a sound block is damaged for a while."""

    class write_type(DictWrite):
        def run(self, index):
            super().run(index)
            data, key = self.data[index], self.chain.keys[index]
            entry = self.books.entries.get(key)
            if entry is not None:
                entry.data = data
                time.sleep(0.0005)
                entry.checksum = block_checksum(entry.namespace, key, data)


class DamagesOnRewrite(DictTier):
    """A second write replaces the bytes, but not the checksum."""

    class write_type(DictWrite):
        def run(self, index):
            super().run(index)
            if self.chain.keys[index] in self.books.entries:
                self.books.entries[self.chain.keys[index]].data = self.data[index]


class PublishesTooEarly(DictTier):
    """A block counts as held before its bytes have landed."""

    class write_type(DictWrite):
        def __init__(self, books, chain, sources):
            super().__init__(books, chain, sources)
            for index in sorted(self.reserved):
                if books.publish(chain, index, bytes(sources[index][: chain.block_nbytes])):
                    self.reserved.discard(index)


class PublishesUnwrittenBlocks(DictTier):
    """Takes a batch that was run in part for whole."""

    class write_type(DictWrite):
        def finish(self):
            blank = bytes(self.chain.block_nbytes)
            self.data = [blank if data is None else data for data in self.data]
            return super().finish()


class CountsInsteadOfIndexing(DictTier):
    """Takes the n-th run for that of block n."""

    class write_type(DictWrite):
        def run(self, index):
            num_run = len(self.data) - self.data.count(None)
            self.data[num_run] = bytes(self.sources[index][: self.chain.block_nbytes])


class CountsReadyBlocksAnywhere(DictTier):
    """`ready_blocks()` counts blocks, wherever they are in the chain."""

    class read_type(DictRead):
        def ready_blocks(self):
            return self.outcomes.count(Outcome.DONE)


class PromisesReadyBlocks(DictTier):
    """`ready_blocks()` counts what is going to be written."""

    class write_type(DictWrite):
        def ready_blocks(self):
            return len(self)


class LeaksTheRoomOfUnfinishedBlocks(DictTier):
    """The room of a block that was not written is lost."""

    class write_type(DictWrite):
        def finish(self):
            self.reserved = {index for index in self.reserved if self.data[index] is not None}
            return super().finish()


class ForgetsToUnpin(DictTier):
    """What was read once is never evicted."""

    class read_type(DictRead):
        def finish(self):
            self.books.pin(self.entries, 1)
            return super().finish()


class StoresOrphans(DictTier):
    """Stores blocks that nothing can reach."""

    class write_type(DictWrite):
        def __init__(self, books, chain, sources):
            first = chain.keys[0] if len(chain) else None
            held = first in books.entries or chain.parent in books.entries
            rooted = (
                chain
                if held or not len(chain)
                else type(chain)(
                    namespace=chain.namespace, block_nbytes=chain.block_nbytes, keys=chain.keys
                )
            )
            super().__init__(books, rooted, sources)


class CallsOrphansMisses(DictTier):
    """Refuses a block without saying why."""

    class write_type(DictWrite):
        def finish(self):
            orphan = Outcome.ORPHAN
            return [Outcome.MISS if each is orphan else each for each in super().finish()]


MUTANTS = {
    AliasesTheSource: ["test_the_source_is_copied"],
    KeepsTheTarget: ["test_a_target_is_the_callers_alone"],
    ScribblesOnTheSource: ["test_a_source_is_not_modified"],
    OverrunsTheTarget: ["test_memory_beside_a_target_is_untouched"],
    SwapsTargets: ["test_round_trip", "test_indices_in_reverse_order"],
    HasNoChecksum: ["test_a_damaged_block_is_dropped", "test_damage_before_reopening"],
    ChecksumLeavesOutTheKey: ["test_a_damaged_block_is_dropped", "test_verify_finds_damage"],
    CallsAMissDone: ["test_a_miss_is_a_miss", "test_an_index_not_run_is_a_miss_of_a_read"],
    ReversesOutcomes: ["test_a_longer_chain_hits_its_held_prefix"],
    MergesDuplicates: ["test_duplicates_in_a_read_batch"],
    ComparesPartOfTheKey: ["test_similar_keys_are_different_keys"],
    IgnoresTheNamespace: ["test_a_key_of_another_namespace_never_hits"],
    ReadsAPartOfABlock: ["test_a_chain_of_another_block_size_never_hits"],
    WritesInPlace: ["test_readable_while_rewritten"],
    WritesInPlaceBehindAChecksum: ["test_readable_while_rewritten"],
    DamagesOnRewrite: ["test_a_second_version_leaves_a_valid_block"],
    PublishesTooEarly: ["test_an_unfinished_write_is_not_held"],
    PublishesUnwrittenBlocks: ["test_an_index_not_run_is_not_stored"],
    CountsInsteadOfIndexing: ["test_indices_in_reverse_order"],
    CountsReadyBlocksAnywhere: ["test_ready_blocks_of_a_read"],
    PromisesReadyBlocks: ["test_ready_blocks_of_a_write"],
    LeaksTheRoomOfUnfinishedBlocks: ["test_abandoned_writes_leak_no_room"],
    ForgetsToUnpin: ["test_abandoned_reads_leak_no_pins"],
    StoresOrphans: ["test_an_orphan_is_refused"],
    CallsOrphansMisses: ["test_an_orphan_is_refused"],
}
"""Every broken tier, and tests that must each fail for it."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_kit_catches(mutant):
    findings = conform(partial(DictHarness, mutant), only=MUTANTS[mutant])
    failed = {each.test.partition("[")[0] for each in findings if each.status is Status.FAILED}
    print(f"{mutant.__name__}: caught by {', '.join(sorted(failed))}")
    assert failed == set(MUTANTS[mutant])
