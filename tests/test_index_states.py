"""The index as a state machine: any calls in any order, against a model of what may be held."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.index import Index
from headstart.journal import newest, restorable
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import make_policy
from headstart.rows import RECORD
from headstart.units import PAGE_NBYTES, align_up

SLAB = 6 * PAGE_NBYTES
CAPACITY = 4 * SLAB
SIZES = {1: PAGE_NBYTES, 2: 3 * PAGE_NBYTES, 3: 2 * PAGE_NBYTES - 5}
"""Block size of each namespace number."""

PATHS = ("abcdefgh", "abcdwxyz", "abst", "klmn", "klop", "q", "r")


def namespace_of(number):
    layout = BlockLayout(block_size=1, axes="byte", shape=(SIZES[number],), dtype="uint8")
    return Namespace(model=f"model{number}", weights="none", layout=layout)


CHAINS = {
    (number, path): keys_from_hashes(namespace_of(number), [c.encode() for c in path])
    for number in SIZES
    for path in PATHS
}
PARENTS = {}
for _chain in CHAINS.values():
    PARENTS |= dict(zip(_chain.keys, (None, *_chain.keys), strict=False))

runs = st.tuples(
    st.sampled_from([1, 1, 2, 3]), st.sampled_from(PATHS), st.integers(0, 8), st.integers(0, 8)
).map(lambda drawn: (drawn[0], drawn[1], *sorted(drawn[2:])))


class IndexStates(RuleBasedStateMachine):
    """Reserves, publishes, pins, discards, damages and restarts; the log is replayed at each step.

    `self.pinned` are the pins taken, with the key and the offset that each row then had: both must
    stay until the pin is undone. `self.reserved` are slots that no one else may get.
    """

    policy = "lru"

    def __init__(self):
        super().__init__()
        self.index = self.make_index()
        self.log = []
        self.pinned = []
        self.reserved = []

    def make_index(self):
        return Index(
            capacity_nbytes=CAPACITY,
            slab_nbytes=SLAB,
            policy=make_policy(self.policy),
            slot_nbytes=align_up,
            logged=True,
        )

    def run_of(self, drawn):
        number, path, start, stop = drawn
        chain = CHAINS[number, path]
        return number, chain.run(min(start, len(chain)), min(stop, len(chain)))

    def held_keys(self):
        return {key for key in PARENTS if self.index.lookup([key]) == 1}

    def note_pins(self, rows, keys):
        if rows:
            places = [
                (key, self.index.rows.offset[row]) for row, key in zip(rows, keys, strict=False)
            ]
            self.pinned.append((rows, places))

    @rule(drawn=runs, pin=st.booleans(), lost=st.integers(0, 255))
    def store(self, drawn, pin, lost):
        """`lost` as a bit mask: blocks that were not written."""
        number, run = self.run_of(drawn)
        slots = self.index.reserve(SIZES[number], len(run))
        self.publish(number, run.run(0, len(slots)), slots, pin, lost & (lost >> 4))

    @precondition(lambda self: len(self.reserved) < 4)
    @rule(drawn=runs)
    def reserve(self, drawn):
        number, run = self.run_of(drawn)
        slots = self.index.reserve(SIZES[number], len(run))
        self.reserved.append((number, run.run(0, len(slots)), slots))

    @precondition(lambda self: self.reserved)
    @rule(which=st.integers(0, 3), pin=st.booleans(), lost=st.integers(0, 255))
    def publish_later(self, which, pin, lost):
        self.publish(*self.reserved.pop(which % len(self.reserved)), pin, lost & (lost >> 4))

    def publish(self, number, run, slots, pin, lost):
        kept = [None if lost >> n & 1 else slot for n, slot in enumerate(slots)]
        self.index.release([s for s, k in zip(slots, kept, strict=True) if k is None])
        before = self.held_keys()
        rows = self.index.publish(
            run.keys,
            kept,
            parent=run.parent,
            namespace=number,
            block_nbytes=SIZES[number],
            pin=pin,
        )
        above = run.parent is None or run.parent in before
        for key, slot, row in zip(run.keys, kept, rows, strict=True):
            above = key in before or (above and slot is not None)
            assert (row is not None) == above
        assert self.held_keys() == before | {
            key for key, row in zip(run.keys, rows, strict=True) if row is not None
        }
        if pin:
            self.note_pins([row for row in rows if row is not None], run.keys)

    @precondition(lambda self: self.reserved)
    @rule(which=st.integers(0, 3))
    def release(self, which):
        self.index.release(self.reserved.pop(which % len(self.reserved))[2])

    @precondition(lambda self: len(self.pinned) < 6)
    @rule(drawn=runs)
    def pin(self, drawn):
        number, run = self.run_of(drawn)
        num_held = self.index.lookup(run.keys)
        rows = self.index.pin(run.keys, namespace=number, block_nbytes=SIZES[number])
        assert len(rows) == num_held
        self.note_pins(rows, run.keys)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 5), damaged=st.integers(0, 255))
    def unpin(self, which, damaged):
        rows, places = self.pinned.pop(which % len(self.pinned))
        bad = [n for n in range(len(rows)) if (damaged & (damaged >> 4)) >> n & 1]
        live = {
            places[n][0]
            for n in bad
            if self.index.lookup([places[n][0]]) and self.offset_of(places[n][0]) == places[n][1]
        }
        self.index.unpin(rows, damaged=[rows[n] for n in bad])
        assert not live & self.held_keys()

    def offset_of(self, key):
        held = self.index.held()
        return int(held["offset"][held["key"] == np.void(key)][0])

    @rule(drawn=runs)
    def touch(self, drawn):
        before = self.held_keys()
        self.index.touch(self.run_of(drawn)[1].keys)
        assert self.held_keys() == before

    @rule(drawn=runs)
    def discard(self, drawn):
        _, run = self.run_of(drawn)
        before = self.held_keys()
        count = self.index.discard(run.keys)
        after = self.held_keys()
        assert after.isdisjoint(run.keys)
        assert after <= before
        assert count == len(before) - len(after)

    @rule(number=st.sampled_from(sorted(SIZES)))
    def discard_namespace(self, number):
        before = self.held_keys()
        count = self.index.discard_namespace(number)
        gone = {k for (n, _), chain in CHAINS.items() if n == number for k in chain} & before
        assert (self.held_keys(), count) == (before - gone, len(gone))

    @precondition(lambda self: not self.pinned and not self.reserved)
    @rule()
    def restart(self):
        records, before = self.index.held(), self.held_keys()
        self.index = self.make_index()
        self.index.restore(records)
        self.log = [records.tobytes()]
        assert self.held_keys() == before

    @invariant()
    def invariants_hold(self):
        self.index.check_invariants()

    @invariant()
    def prefixes_are_closed(self):
        held = self.held_keys()
        assert all(PARENTS[key] is None or PARENTS[key] in held for key in held)
        for chain in CHAINS.values():
            linear = next((n for n, key in enumerate(chain) if key not in held), len(chain))
            assert self.index.lookup(chain.keys) == linear

    @invariant()
    def pinned_slots_are_left_alone(self):
        rows = self.index.rows
        mine = {offset for _, _, slots in self.reserved for offset, _ in slots}
        for pinned, places in self.pinned:
            assert [rows.offset[row] for row in pinned] == [offset for _, offset in places]
            assert mine.isdisjoint(offset for _, offset in places)
        held = {bytes(r["key"]): int(r["offset"]) for r in self.index.held()}
        owners = {offset: key for key, offset in held.items()}
        assert mine.isdisjoint(owners), "a reserved slot is a block's"
        for _, places in self.pinned:
            for key, offset in places:
                assert owners.get(offset, key) == key, "a pinned slot is another block's"

    @invariant()
    def books_are_right(self):
        counters = self.index.counters
        assert self.index.slots.used_nbytes <= CAPACITY
        gone = counters.num_evicted + counters.num_discarded + counters.num_dropped
        restored = len(self.index) - counters.num_stored + gone
        assert restored >= 0

    @invariant()
    def the_log_replays_to_what_is_held(self):
        self.log.append(self.index.take_log())
        records = newest(np.frombuffer(b"".join(self.log), RECORD))
        kept = restorable(records, capacity_nbytes=CAPACITY, slab_nbytes=SLAB, slot_nbytes=align_up)
        assert len(kept) == len(records), "a sound log loses nothing"
        columns = ["row", "parent", "namespace", "block_nbytes", "offset", "generation", "key"]
        held = self.index.held()
        assert np.array_equal(np.sort(kept, order="row")[columns], held[columns])


class FifoStates(IndexStates):
    policy = "fifo"


class LfuDaStates(IndexStates):
    policy = "lfu-da"


class S3FifoStates(IndexStates):
    policy = "s3fifo"


class TtlStates(IndexStates):
    policy = "ttl"


class TlruStates(IndexStates):
    policy = "tlru=32"  # two blocks, of namespaces that nobody opened


class CostStates(IndexStates):
    policy = "cost=16"


few = settings(stateful_step_count=30)
fewer = settings(few, max_examples=15)
TestIndexLru = IndexStates.TestCase
TestIndexLru.settings = few
TestIndexFifo = FifoStates.TestCase
TestIndexFifo.settings = few
TestIndexLfuDa = LfuDaStates.TestCase
TestIndexLfuDa.settings = fewer
TestIndexS3Fifo = S3FifoStates.TestCase
TestIndexS3Fifo.settings = fewer
TestIndexTtl = TtlStates.TestCase
TestIndexTtl.settings = fewer
TestIndexTlru = TlruStates.TestCase
TestIndexTlru.settings = fewer
TestIndexCost = CostStates.TestCase
TestIndexCost.settings = fewer
