"""The kit catches tiers whose books are wrong: prefixes, eviction, capacity, counts, lifetime."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from headstart.errors import HeadstartError
from headstart.testing import DictHarness, DictTier, Status, conform
from headstart.testing.dict_tier import Books, Entry, block_checksum
from headstart.types import VerifyReport

# Damage


class KeepsDamagedBlocks(DictTier):
    """Answers DROPPED, and will answer it again."""

    class books_type(Books):
        def forget(self, keys, count):
            return 0 if count == "num_dropped" else super().forget(keys, count)


def forget_alone(books, keys, count):
    """Remove blocks, and leave their descendants without a parent."""
    doomed = [key for key in dict.fromkeys(keys) if key in books.entries]
    for key in doomed:
        books.release(books.entries.pop(key).nbytes)
    books.counts[count] += len(doomed)
    return len(doomed)


class KeepsDescendantsOfDamagedBlocks(DictTier):
    """Drops the damaged block alone."""

    class books_type(Books):
        def forget(self, keys, count):
            if count == "num_dropped":
                return forget_alone(self, keys, count)
            return super().forget(keys, count)


class DoesNotCountDrops(DictTier):
    """Forgets damaged blocks in silence."""

    class books_type(Books):
        def forget(self, keys, count):
            num_forgotten = super().forget(keys, count)
            self.counts["num_dropped"] = 0
            return num_forgotten


class DropsTooMuch(DictTier):
    """One damaged block empties the tier."""

    class books_type(Books):
        def forget(self, keys, count):
            keys = list(keys)
            all_keys = list(self.entries) if count == "num_dropped" and keys else keys
            return super().forget(all_keys, count)


class VerifiesNothing(DictTier):
    """Reports that all is well."""

    def verify(self, progress=None):
        num_blocks = len(self.books.entries)
        return VerifyReport(
            tier="x", num_blocks=num_blocks, num_damaged=0, num_failed=0, read_nbytes=0, seconds=0
        )


# Prefixes and discarding


class ChecksTheParentOnlyAtFirst(DictTier):
    """Publishes a block whose parent went away while it was being written."""

    class books_type(Books):
        def publish(self, chain, index, data):
            key, parent = chain.keys[index], chain.run(index, index + 1).parent
            if parent is None or parent in self.entries:
                return super().publish(chain, index, data)
            checksum = block_checksum(chain.namespace, key, data)
            self.entries[key] = Entry(
                namespace=chain.namespace, parent=parent, data=data, checksum=checksum, used=0
            )
            return True


class DiscardsOneBlockOnly(DictTier):
    """Leaves the descendants of a discarded block."""

    def discard(self, keys):
        self._check_open()
        return forget_alone(self.books, keys, "num_discarded")


class RaisesOnAnUnknownDiscard(DictTier):
    """A discard of what is not held is an error."""

    def discard(self, keys):
        if any(key not in self.books.entries for key in keys):
            raise HeadstartError("no such block")
        return super().discard(keys)


class CountsDiscardedTwice(DictTier):
    """Counts the keys it was given."""

    def discard(self, keys):
        super().discard(keys)
        return len(keys)


class DiscardsEveryNamespace(DictTier):
    """`discard_namespace` empties the tier."""

    def discard_namespace(self, namespace):
        return self.books.forget(list(self.books.entries), "num_discarded")


class RemembersDiscardedBlocks(DictTier):
    """What was discarded comes back when the medium is opened again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.graveyard = {}

    def discard(self, keys):
        before = dict(self.books.entries)
        num_discarded = super().discard(keys)
        self.graveyard |= {k: e for k, e in before.items() if k not in self.books.entries}
        return num_discarded

    def close(self):
        self.books.entries.update(self.graveyard)
        super().close()


# Eviction and capacity


class HoldsFourTimesAsMuch(DictTier):
    """Takes its capacity for a hint, and says so in its statistics."""

    def __init__(self, *, capacity_nbytes, medium=None):
        super().__init__(capacity_nbytes=4 * capacity_nbytes, medium=medium)


class HidesWhatItHolds(HoldsFourTimesAsMuch):
    """Four times as much, with statistics that look right."""

    def stats(self):
        stats = super().stats()
        limit = self.books.capacity_nbytes // 4
        return replace(
            stats,
            capacity_nbytes=limit,
            used_nbytes=min(stats.used_nbytes, limit),
            num_blocks=min(stats.num_blocks, limit // 8192),
        )


class ReservesNothing(DictTier):
    """Blocks being written take their room only when they are published, if there is any or not."""

    class books_type(Books):
        def reserve(self, nbytes):
            found = super().reserve(nbytes)
            self.used_nbytes -= nbytes if found else 0
            return found

        def publish(self, chain, index, data):
            published = super().publish(chain, index, data)
            self.used_nbytes += 8192
            return published


class HoldsLessThanItSays(DictTier):
    """Half of the capacity stays empty."""

    class books_type(Books):
        def reserve(self, nbytes):
            self.capacity_nbytes //= 2
            found = super().reserve(nbytes)
            self.capacity_nbytes *= 2
            return found


class EvictsRootsFirst(DictTier):
    """Evicts the oldest block, which takes its whole tree along."""

    class books_type(Books):
        def victim(self):
            free = [key for key, entry in self.entries.items() if not entry.pins]
            return min(free, key=lambda key: self.entries[key].used, default=None)


class EvictsParentsAlone(EvictsRootsFirst):
    """Evicts the oldest block, and leaves its children."""

    class books_type(EvictsRootsFirst.books_type):
        def forget(self, keys, count):
            if count == "num_evicted":
                return forget_alone(self, keys, count)
            return super().forget(keys, count)


class EvictsTheNewest(DictTier):
    """Evicts the leaf that was used last."""

    class books_type(Books):
        def victim(self):
            parents = {entry.parent for entry in self.entries.values()}
            free = [k for k, entry in self.entries.items() if k not in parents and not entry.pins]
            return max(free, key=lambda key: self.entries[key].used, default=None)


class IgnoresTouches(DictTier):
    """A block that a faster tier serves grows old here."""

    def touch(self, keys):
        self._check_open()


class CountsTouchesAsHits(DictTier):
    """A touch is no read."""

    def touch(self, keys):
        super().touch(keys)
        self.books.counts["num_hits"] += 1


class DoesNotPin(DictTier):
    """Evicts what is being read."""

    class books_type(Books):
        def pin(self, entries, pins):
            pass


class StoresTwice(DictTier):
    """Two writers of a key take the room of two blocks, and count as two."""

    class books_type(Books):
        def publish(self, chain, index, data):
            return super().publish(chain, index, data) or chain.keys[index] in self.entries


class HasNoLock(DictTier):
    """Not thread-safe; a pause in the middle makes that show."""

    class books_type(Books):
        def __init__(self, capacity_nbytes, entries):
            super().__init__(capacity_nbytes, entries)
            self.lock = nullcontext()

        def release(self, nbytes):
            used_nbytes = self.used_nbytes
            time.sleep(0.002)
            self.used_nbytes = used_nbytes - nbytes


# Lifetime, look-up, statistics


class LooksUpAllOrNothing(DictTier):
    """A part of a prefix does not count."""

    def lookup(self, keys):
        num_held = super().lookup(keys)
        return num_held if num_held == len(keys) else 0


class LooksUpWhatItOnceHeld(DictTier):
    """The index never forgets."""

    discarded = frozenset()

    def discard(self, keys):
        self.discarded |= set(self.books.entries)
        return super().discard(keys)

    def lookup(self, keys):
        known = self.discarded | set(self.books.entries)
        missing = (index for index, key in enumerate(keys) if key not in known)
        return next(missing, len(keys))


class CountsLookupsAsHits(DictTier):
    """A statistic that flatters."""

    def lookup(self, keys):
        num_held = super().lookup(keys)
        self.books.counts["num_hits"] += num_held
        return num_held

    def begin_read(self, chain, targets):
        self.lookup(chain.keys)
        return super().begin_read(chain, targets)


class AcceptsAnyNamespace(DictTier):
    """Does not ask whether a namespace was opened."""

    def _check_open(self, namespace=None):
        super()._check_open(None)


class AcceptsHugeBlocks(DictTier):
    """Finds out later that a block does not fit."""

    def open_namespace(self, namespace):
        self._namespaces.add(namespace.id)


class CloseDoesNothing(DictTier):
    """Goes on after it was closed."""

    def close(self):
        pass


class ClosesOnce(DictTier):
    """Raises when it is closed again."""

    def close(self):
        self._check_open()
        super().close()


class ForgetsOnClose(DictTier):
    """Empties its durable medium."""

    def close(self):
        self.books.entries.clear()
        super().close()


class DoesNotFlush(DictTier):
    """Only `close()` makes blocks durable."""

    def __init__(self, *, capacity_nbytes, medium=None):
        sound = {key: entry for key, entry in (medium or {}).items() if entry.used < 0}
        super().__init__(capacity_nbytes=capacity_nbytes, medium=sound)

    def close(self):
        for entry in self.books.entries.values():
            entry.used = -1
        super().close()


MUTANTS = {
    KeepsDamagedBlocks: ["test_a_damaged_block_is_dropped", "test_verify_finds_damage"],
    KeepsDescendantsOfDamagedBlocks: ["test_a_damaged_block_is_dropped"],
    DoesNotCountDrops: ["test_a_damaged_block_is_dropped", "test_verify_finds_damage"],
    DropsTooMuch: ["test_a_damaged_block_is_dropped"],
    VerifiesNothing: ["test_verify_finds_damage", "test_verify_of_sound_blocks"],
    ChecksTheParentOnlyAtFirst: ["test_a_parent_discarded_during_a_write"],
    DiscardsOneBlockOnly: ["test_discard_takes_descendants_along"],
    RaisesOnAnUnknownDiscard: ["test_discard_counts_each_block_once"],
    CountsDiscardedTwice: ["test_discard_counts_each_block_once"],
    DiscardsEveryNamespace: ["test_discard_namespace"],
    RemembersDiscardedBlocks: ["test_discarded_blocks_stay_away"],
    HoldsFourTimesAsMuch: ["test_capacity_is_a_hard_limit"],
    HidesWhatItHolds: ["test_capacity_is_a_hard_limit"],
    ReservesNothing: ["test_open_writes_count_against_the_capacity"],
    HoldsLessThanItSays: ["test_all_of_the_capacity_is_usable"],
    EvictsRootsFirst: ["test_eviction_takes_leaves_first"],
    EvictsParentsAlone: ["test_prefixes_stay_closed_under_eviction"],
    EvictsTheNewest: ["test_eviction_spares_what_is_newest"],
    IgnoresTouches: ["test_what_is_touched_is_not_evicted"],
    CountsTouchesAsHits: ["test_touching_changes_nothing_else"],
    DoesNotPin: ["test_what_is_being_read_is_not_evicted"],
    StoresTwice: ["test_two_open_writes_of_one_key"],
    HasNoLock: ["test_no_room_is_lost_between_threads"],
    LooksUpAllOrNothing: ["test_a_longer_chain_hits_its_held_prefix"],
    LooksUpWhatItOnceHeld: ["test_discard_takes_descendants_along"],
    CountsLookupsAsHits: ["test_stats_count_reads_and_writes"],
    AcceptsAnyNamespace: ["test_an_unknown_namespace_is_refused"],
    AcceptsHugeBlocks: ["test_a_block_larger_than_the_tier_is_refused"],
    CloseDoesNothing: ["test_a_closed_tier_raises"],
    ClosesOnce: ["test_close_is_idempotent"],
    ForgetsOnClose: ["test_blocks_outlive_close"],
    DoesNotFlush: ["test_flushed_blocks_outlive_a_kill"],
}
"""Every broken tier, and tests that must each fail for it."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_kit_catches(mutant):
    findings = conform(partial(DictHarness, mutant), only=MUTANTS[mutant])
    failed = {each.test.partition("[")[0] for each in findings if each.status is Status.FAILED}
    print(f"{mutant.__name__}: caught by {', '.join(sorted(failed))}")
    assert failed == set(MUTANTS[mutant])
