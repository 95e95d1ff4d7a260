"""The index: closed prefixes, one owner a slot, pins, order of eviction, several block sizes."""

import numpy as np
import pytest

from headstart.index import Index
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import make_policy
from headstart.slots import Slot
from headstart.units import PAGE_NBYTES, align_up

SLOTS_PER_SLAB = 4
SMALL, LARGE = PAGE_NBYTES, 2 * PAGE_NBYTES
SLAB = SLOTS_PER_SLAB * SMALL

LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(SMALL,), dtype="uint8")
NAMESPACE = Namespace(model="index", weights="none", layout=LAYOUT)


def make_index(num_slabs=4, policy="lru", logged=False):
    return Index(
        capacity_nbytes=num_slabs * SLAB,
        slab_nbytes=SLAB,
        policy=make_policy(policy),
        slot_nbytes=align_up,
        logged=logged,
    )


def chain(path):
    return keys_from_hashes(NAMESPACE, [content.encode() for content in path])


def store(index, path, *, start=0, block_nbytes=SMALL, namespace=1, pin=False):
    """Publish the blocks of `path` from `start` on; the rows."""
    run = chain(path).run(start, len(path))
    slots = index.reserve(block_nbytes, len(run))
    rows = index.publish(
        run.keys[: len(slots)],
        slots,
        parent=run.parent,
        namespace=namespace,
        block_nbytes=block_nbytes,
        pin=pin,
    )
    index.check_invariants()
    return rows


def pin(index, path, *, block_nbytes=SMALL, namespace=1):
    """Pin the held prefix of `path`."""
    return index.pin(chain(path).keys, namespace=namespace, block_nbytes=block_nbytes)


def held(index, path):
    """Which blocks of `path` are held, asked one by one."""
    return [index.lookup([key]) == 1 for key in chain(path)]


def num_reserved(index):
    return index.slots.num_used - index.rows.num_used


# ------------------------------------------------------------------------------------- look-up


@pytest.mark.parametrize("num_held", range(14))
def test_lookup_equals_a_linear_scan(num_held):
    index, path = make_index(), "abcdefghijklm"
    store(index, path[:num_held])
    assert index.lookup(chain(path).keys) == sum(held(index, path)) == num_held


def test_lookup_of_other_branches():
    index = make_index()
    store(index, "abcd")
    store(index, "abxy", start=2)
    assert [index.lookup(chain(p).keys) for p in ("abcd", "abxy", "abcx", "ab", "b", "")] == [
        4,
        4,
        3,
        2,
        0,
        0,
    ]


# ----------------------------------------------------------------------------- closed prefixes


def test_an_orphan_is_refused_and_its_slot_freed():
    index = make_index()
    assert store(index, "abcd", start=2) == [None, None]
    assert (len(index), index.slots.used_nbytes) == (0, 0)


def test_a_hole_in_a_batch_cuts_off_the_rest():
    index, run = make_index(), chain("abcd")
    slots = index.reserve(SMALL, 4)
    index.release([slots[1]])
    rows = index.publish(
        run.keys,
        [slots[0], None, slots[2], slots[3]],
        parent=None,
        namespace=1,
        block_nbytes=SMALL,
    )
    assert [row is not None for row in rows] == [True, False, False, False]
    assert held(index, "abcd") == [True, False, False, False]
    assert index.slots.num_used == 1
    index.check_invariants()


def test_a_held_block_keeps_its_row_and_the_new_slot_is_freed():
    index = make_index()
    rows = store(index, "ab")
    offsets = [index.rows.offset[row] for row in rows]
    assert store(index, "abc")[:2] == rows
    assert [index.rows.offset[row] for row in rows] == offsets
    assert index.slots.num_used == 3


def test_discarding_takes_descendants_and_only_them():
    index = make_index()
    store(index, "abcd")
    store(index, "abxy", start=2)
    store(index, "w")
    assert index.discard(chain("abc").keys[2:]) == 2
    assert held(index, "abxy") == [True] * 4
    assert index.discard(chain("a").keys) == 4
    assert held(index, "w") == [True]
    assert index.counters.num_discarded == 6
    index.check_invariants()


def test_discarding_a_namespace():
    index = make_index()
    store(index, "abc")
    store(index, "wx", namespace=2)
    assert index.discard_namespace(1) == 3
    assert held(index, "wx") == [True, True]
    assert index.discard_namespace(1) == 0
    index.check_invariants()


def test_a_long_chain_goes_at_once():
    index = make_index(num_slabs=64)
    path = [f"block{number}" for number in range(250)]
    store(index, path)
    assert index.discard(chain(path).keys[:1]) == 250
    assert (len(index), index.slots.used_nbytes) == (0, 0)
    index.check_invariants()


# ---------------------------------------------------------------------------------------- pins


def test_a_pinned_block_is_not_evicted():
    index = make_index(num_slabs=1)
    pinned = store(index, "ab", pin=True)
    assert len(index.reserve(SMALL, 4)) == 2, "only the two free slots"
    assert held(index, "ab") == [True, True]
    index.unpin(pinned)
    index.check_invariants()
    assert len(index.reserve(SMALL, 4)) == 2, "now both can go"
    index.check_invariants()


def test_when_all_is_pinned_there_are_fewer_slots():
    index = make_index(num_slabs=1)
    rows = store(index, "abcd", pin=True)
    assert index.reserve(SMALL, 3) == []
    index.unpin(rows[3:])
    assert len(index.reserve(SMALL, 3)) == 1
    assert held(index, "abcd") == [True, True, True, False]
    index.check_invariants()


def test_a_discarded_pinned_block_keeps_its_slot_until_it_is_unpinned():
    index = make_index(num_slabs=1)
    rows = store(index, "abcd")
    pinned = pin(index, "ab")
    offsets = {index.rows.offset[row] for row in pinned}
    assert index.discard(chain("a").keys) == 4
    assert held(index, "abcd") == [False] * 4
    assert index.slots.num_used == 2, "the unpinned ones are free at once"
    index.check_invariants()
    reserved = index.reserve(SMALL, 4)
    assert len(reserved) == 2
    assert offsets.isdisjoint(slot.offset for slot in reserved)
    index.unpin(pinned[:1])
    index.check_invariants()
    index.unpin(pinned[1:])
    index.check_invariants()
    assert index.slots.num_used == 2
    assert pinned == rows[:2]


def test_a_block_stored_again_while_its_old_self_is_doomed():
    index = make_index(num_slabs=2)
    store(index, "ab")
    old = pin(index, "ab")
    index.discard(chain("a").keys)
    new = store(index, "ab")
    assert set(new).isdisjoint(old)
    assert pin(index, "ab") == new
    index.unpin(old)
    index.check_invariants()
    assert held(index, "ab") == [True, True]
    index.unpin(new)
    assert index.slots.num_used == 2


def test_pins_count():
    index = make_index(num_slabs=1)
    store(index, "a")
    first, second = pin(index, "a"), pin(index, "ab")
    assert first == second
    index.discard(chain("a").keys)
    index.unpin(first)
    assert index.slots.num_used == 1
    index.unpin(second)
    assert index.slots.num_used == 0
    index.check_invariants()


def test_damage_drops_a_block_and_its_descendants():
    index = make_index()
    store(index, "abcd")
    store(index, "abxy", start=2)
    pinned = pin(index, "abcd")
    reader = pin(index, "abc")
    index.unpin(pinned, damaged=[pinned[2]])
    assert held(index, "abcd") == [True, True, False, False]
    assert held(index, "abxy") == [True] * 4
    assert index.counters.num_dropped == 2
    index.check_invariants()
    index.unpin(reader, damaged=[reader[2]])
    assert index.counters.num_dropped == 2, "found twice, dropped once"
    assert index.slots.num_used == 4
    index.check_invariants()


def test_a_row_of_another_namespace_or_size_is_not_pinned():
    """Keys cover both, so this happens only to a forged chain; then it is a miss."""
    index = make_index()
    store(index, "ab")
    store(index, "abwx", start=2, namespace=2)
    assert len(pin(index, "abwx")) == 2
    assert pin(index, "ab", namespace=2) == []
    assert pin(index, "ab", block_nbytes=LARGE) == []


def test_publish_can_pin_what_it_returns():
    index = make_index(num_slabs=1)
    store(index, "a")
    rows = store(index, "ab", pin=True)
    assert [index.rows.pins[row] for row in rows] == [1, 1]
    assert len(index.reserve(SMALL, 4)) == 2
    index.unpin(rows)
    index.check_invariants()


# ---------------------------------------------------------------------------- order of eviction


def evicted_in_turn(index, path):
    """Which block of `path` goes with each further slot."""
    order = []
    for _ in path:
        before = held(index, path)
        index.reserve(SMALL, 1)
        gone = [c for c, was, is_ in zip(path, before, held(index, path), strict=True) if was > is_]
        order += gone
        index.check_invariants()
    return "".join(order)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_chain_goes_leaf_first(policy):
    index = make_index(num_slabs=1, policy=policy)
    store(index, "abcd")
    assert evicted_in_turn(index, "abcd") == "dcba"


def roots(index, names):
    for name in names:
        store(index, name)


def in_turn(index, names, num_slots):
    order = []
    for _ in range(num_slots):
        before = {name for name in names if index.lookup(chain(name).keys)}
        index.reserve(SMALL, 1)
        order += sorted(before - {name for name in names if index.lookup(chain(name).keys)})
        index.check_invariants()
    return "".join(order)


def test_lru_evicts_the_leaf_that_was_used_longest_ago():
    index = make_index(num_slabs=1)
    roots(index, "abcd")
    index.touch(chain("a").keys)
    index.touch(chain("c").keys)
    assert in_turn(index, "abcd", 4) == "bdac"


def test_fifo_evicts_the_leaf_that_was_stored_first():
    index = make_index(num_slabs=1, policy="fifo")
    roots(index, "abcd")
    index.touch(chain("a").keys)
    index.touch(chain("c").keys)
    assert in_turn(index, "abcd", 4) == "abcd"


def test_fifo_evicts_the_leaf_with_the_oldest_insertion_not_the_oldest_block():
    index = make_index(num_slabs=1, policy="fifo")
    store(index, "a")
    store(index, "w")
    store(index, "ab", start=1)
    store(index, "wx", start=1)
    index.reserve(SMALL, 1)
    assert held(index, "ab") == [True, False], "b is the older leaf; a and w are older, but inner"
    index.reserve(SMALL, 1)
    assert held(index, "ab") == [False, False], "a is a leaf now, and the oldest"
    assert held(index, "wx") == [True, True]
    index.check_invariants()


def test_lru_a_hit_on_a_prefix_is_a_use_of_all_of_it():
    index = make_index(num_slabs=1)
    store(index, "ab")
    store(index, "wx")
    index.touch(chain("ab").keys)
    index.reserve(SMALL, 2)
    assert held(index, "ab") == [True, True]
    assert held(index, "wx") == [False, False]


def test_eviction_is_counted():
    index = make_index(num_slabs=1)
    roots(index, "abcdef")
    assert index.counters.num_evicted == 2
    assert index.counters.num_stored == 6
    assert len(index) == 4


# ----------------------------------------------------------------------------- several sizes


def test_a_second_size_gets_the_coldest_slab_of_a_full_tier():
    index = make_index(num_slabs=3)
    names = [f"r{number}" for number in range(12)]
    for name in names:
        store(index, [name])
    for name in names[:4]:  # the oldest slab is the hottest
        index.touch(chain([name]).keys)
    store(index, ["big"], block_nbytes=LARGE)
    assert held(index, ["big"]) == [True]
    left = [name for name in names if held(index, [name]) == [True]]
    assert left == names[:4] + names[8:], "the coldest slab was emptied, no other block went"
    assert index.counters.num_evicted == 4


def test_a_hot_slab_stays_when_the_own_blocks_are_colder():
    index = make_index(num_slabs=2)
    store(index, ["big1"], block_nbytes=LARGE)
    store(index, ["big2"], block_nbytes=LARGE)
    roots(index, "abcd")
    for number in range(3, 9):
        for name in "abcd":
            index.touch(chain(name).keys)
        store(index, [f"big{number}"], block_nbytes=LARGE)
    assert [held(index, name) for name in "abcd"] == [[True]] * 4
    assert index.slots.slabs_of(LARGE) == [0]


def test_a_size_that_fell_out_of_use_gives_its_room_away():
    index = make_index(num_slabs=3)
    for number in range(6):
        store(index, [f"big{number}"], block_nbytes=LARGE)
    for number in range(40):
        store(index, [f"small{number}"])
    assert index.slots.slabs_of(LARGE) == []
    left = [number for number in range(40) if held(index, [f"small{number}"]) == [True]]
    assert left == [*range(28, 40)]


def test_a_slab_with_a_pinned_block_is_not_emptied():
    index = make_index(num_slabs=2)
    roots(index, "abcdefgh")
    pinned = pin(index, "a")
    store(index, ["big"], block_nbytes=LARGE)
    assert held(index, ["big"]) == [True]
    assert [name for name in "abcdefgh" if held(index, name) == [True]] == [*"abcd"]
    more = pin(index, ["big"], block_nbytes=LARGE)
    store(index, ["big2"], block_nbytes=LARGE)
    assert index.reserve(LARGE, 1) != []
    index.unpin([*pinned, *more])
    index.check_invariants()


def test_a_slab_with_a_slot_in_use_is_not_emptied():
    """One that a writer has reserved, and one that a reader holds of a block that was discarded."""
    index = make_index(num_slabs=3)
    roots(index, "abc")
    (reserved,) = index.reserve(SMALL, 1)
    roots(index, "defghijk")
    doomed = pin(index, "d")
    index.discard(chain("d").keys)
    store(index, ["big"], block_nbytes=LARGE)
    assert [name for name in "abcefghijk" if held(index, name) == [True]] == [*"abcefg"]
    index.unpin(doomed)
    index.release([reserved])
    index.check_invariants()


def test_room_for_a_block_of_its_own_size_costs_one_block():
    index = make_index(num_slabs=3)
    roots(index, "abcdefgh")
    store(index, ["big1"], block_nbytes=LARGE)
    store(index, ["big2"], block_nbytes=LARGE)
    store(index, "i")
    assert index.counters.num_evicted == 1
    assert held(index, "a") == [False]


def test_a_chain_under_its_pinned_leaf_is_not_torn_down_for_its_own_size():
    index = make_index(num_slabs=2)
    store(index, ["big"], block_nbytes=LARGE)
    index.discard(chain(["big"]).keys)
    path = "abcdefgh"
    store(index, path)
    pinned = pin(index, path)
    index.unpin(pinned[:-1])
    assert index.reserve(SMALL, 1) == []
    assert held(index, path) == [True] * 8
    index.unpin(pinned[-1:])
    index.check_invariants()


def test_no_slab_to_reassign_is_no_room():
    index = make_index(num_slabs=1)
    store(index, "a", pin=True)
    assert index.reserve(LARGE, 1) == []
    slots = index.reserve(SMALL, 3)
    assert len(slots) == 3
    index.release(slots)
    index.check_invariants()


def test_emptying_a_slab_takes_descendants_in_other_slabs_along():
    index = make_index(num_slabs=3)
    store(index, [f"t{number}" for number in range(9)])
    index.touch(chain(["t0"]).keys)
    store(index, ["big"], block_nbytes=LARGE)
    assert held(index, ["big"]) == [True]
    path = [f"t{number}" for number in range(9)]
    assert index.lookup(chain(path).keys) == sum(held(index, path)), "no hole in the prefix"


# -------------------------------------------------------------------------- reserve and release


def test_released_slots_are_free_again():
    index = make_index(num_slabs=1)
    slots = index.reserve(SMALL, 4)
    assert len(slots) == 4
    assert index.reserve(SMALL, 1) == []
    index.release(slots[:2])
    index.check_invariants()
    assert len(index.reserve(SMALL, 3)) == 2
    assert num_reserved(index) == 4


def test_generations_only_rise():
    index = make_index()
    slots = index.reserve(SMALL, 3)
    index.release(slots)
    later = index.reserve(SMALL, 3)
    generations = [slot.generation for slot in [*slots, *later]]
    assert generations == sorted(set(generations))


def test_two_writers_of_one_prefix():
    """The slower writer finds its parent published by the faster one, in a younger slot."""
    index, run = make_index(), chain("ab")
    slow, fast = index.reserve(SMALL, 2), index.reserve(SMALL, 1)
    meta = {"parent": None, "namespace": 1, "block_nbytes": SMALL}
    index.publish(run.keys[:1], fast, **meta)
    rows = index.publish(run.keys, slow, **meta)
    assert rows[0] is not None
    index.check_invariants()
    assert held(index, "ab") == [True, rows[1] is not None]
    assert num_reserved(index) == 0


def test_memory_per_block():
    index = make_index(num_slabs=2600)
    path = [f"b{number}" for number in range(10_000)]
    slots = index.reserve(SMALL, len(path))
    keys = keys_from_hashes(NAMESPACE, [content.encode() for content in path]).keys
    index.publish(keys, slots, parent=None, namespace=1, block_nbytes=SMALL)
    assert index.nbytes / 10_000 <= 200


# ------------------------------------------------------------------------------------- restart


def restarted(index, num_slabs=4, policy="lru"):
    again = make_index(num_slabs=num_slabs, policy=policy)
    again.restore(index.held())
    again.check_invariants()
    return again


def test_restore_brings_back_every_block_its_place_and_its_order():
    index = make_index(num_slabs=1)
    roots(index, "abcd")
    index.touch(chain("a").keys)
    again = restarted(index, num_slabs=1)
    assert np.array_equal(np.sort(again.held()), np.sort(index.held()))
    assert in_turn(again, "abcd", 4) == "bcda"


def test_restore_of_nothing():
    again = restarted(make_index())
    assert len(again) == 0
    assert store(again, "ab") != [None, None]


def test_a_generation_is_never_given_twice():
    """Not even after a restart with nothing left to tell which were given."""
    given = set()
    for _ in range(50):
        index = make_index()
        given |= {slot.generation for slot in index.reserve(SMALL, 4)}
    assert len(given) == 200


def test_a_forged_key_neither_finds_nor_replaces_anothers_block():
    index = make_index()
    store(index, "a")
    (slot,) = index.reserve(SMALL, 1)
    keys = chain("a").keys
    assert index.publish(keys, [slot], parent=None, namespace=99, block_nbytes=SMALL) == [None]
    assert index.pin(keys, namespace=99, block_nbytes=SMALL) == []
    index.check_invariants()


def test_a_block_that_fits_no_slab_gets_no_slot():
    assert make_index().reserve(1 << 28, 1) == []


def test_blocks_of_two_sizes_are_restored():
    index = make_index()
    store(index, "abc")
    store(index, "wx", block_nbytes=LARGE)
    again = restarted(index)
    assert again.slots.used_nbytes == index.slots.used_nbytes
    assert held(again, "abc") == [True] * 3
    assert held(again, "wx") == [True] * 2


def test_priorities_of_any_policy_survive_a_restart():
    """A policy may use all of [0, 2**63)."""
    index = make_index(num_slabs=1)
    rows = store(index, "a") + store(index, "b")
    index.rows.priority[rows[0]] = 2**62
    index.rows.priority[rows[1]] = 5
    again = restarted(index, num_slabs=1)
    assert in_turn(again, "ab", 4) == "ba"


def test_a_slot_is_an_offset_and_a_generation():
    slot = make_index().reserve(SMALL, 1)[0]
    assert slot == Slot(offset=0, generation=slot.generation)
