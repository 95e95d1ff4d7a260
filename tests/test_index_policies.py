"""The index under each policy: what a restart keeps, also under another one, and several sizes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headstart.index import Index
from headstart.journal import newest
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import POLICIES, make_policy
from headstart.policies.base import CLOCK_MASK
from headstart.rows import RECORD
from headstart.units import PAGE_NBYTES, align_up

SMALL, LARGE = PAGE_NBYTES, 2 * PAGE_NBYTES
SLAB = 4 * SMALL
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(SMALL,), dtype="uint8")
NAMESPACE = Namespace(model="index", weights="none", layout=LAYOUT)
NAMES = "abcdefgh"
BY_PRIORITY = ("lru", "fifo", "lfu-da", "ttl", "cost")
"""Policies whose order of eviction is that of the priorities alone."""


def make_index(policy, num_slabs=2):
    return Index(
        capacity_nbytes=num_slabs * SLAB,
        slab_nbytes=SLAB,
        policy=make_policy(policy),
        slot_nbytes=align_up,
        logged=True,
    )


def keys(path):
    return keys_from_hashes(NAMESPACE, [content.encode() for content in path]).keys


def ask(index, path, block_nbytes=SMALL):
    """Use what is held of a prompt and store the rest."""
    all_keys = keys(path)
    pinned = index.pin(all_keys, namespace=1, block_nbytes=block_nbytes)
    rest = all_keys[len(pinned) :]
    slots = index.reserve(block_nbytes, len(rest))
    index.publish(
        rest[: len(slots)],
        slots,
        parent=all_keys[len(pinned) - 1] if pinned else None,
        namespace=1,
        block_nbytes=block_nbytes,
    )
    index.unpin(pinned)
    index.check_invariants()


def busy(policy):
    """A full index whose blocks were used unevenly, after evictions."""
    index = make_index(policy)
    for path in ("x", "y", "z", *NAMES, "a", "a", "a", "c", "c", "f"):
        ask(index, path)
    assert [index.lookup(keys(name)) for name in NAMES] == [1] * 8
    return index


def in_turn(index):
    """The order in which roots are evicted from now on."""
    order = []
    for _ in NAMES:
        before = {name for name in NAMES if index.lookup(keys(name))}
        index.reserve(SMALL, 1)
        order += sorted(before - {name for name in NAMES if index.lookup(keys(name))})
        index.check_invariants()
    return "".join(order)


def restored(records, policy):
    index = make_index(policy)
    index.restore(records)
    index.check_invariants()
    return index


@pytest.mark.parametrize(("old", "new"), [*product(POLICIES, POLICIES)])
def test_any_policy_goes_on_from_any_other(old, new):
    """In its order, whatever its numbers meant; and what is new comes after."""
    index = busy(old)
    by_priority, records = index.rows.column("priority").copy(), index.held()
    again = restored(records, new)
    assert np.array_equal(np.argsort(by_priority), np.argsort(again.rows.column("priority")))
    assert max(again.rows.column("priority")) < again._clock < 1000
    if old in BY_PRIORITY:
        assert in_turn(again) == in_turn(index)
    again = restored(records, new)
    ask(again, "n")
    highest = max(again.rows.column("priority"))
    (row,) = again.pin(keys("n"), namespace=1, block_nbytes=SMALL, is_use=False)
    assert again.rows.priority[row] == highest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_holds_clocks(policy):
    """Whatever a policy's priorities are, so that those of several starts can be compared."""
    index = busy(policy)
    log = np.frombuffer(index.take_log(), RECORD)
    stored = log[log["block_nbytes"] > 0]
    assert stored["priority"].max() <= index._clock
    assert (np.diff(stored["priority"].astype(np.int64)) > 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_two_crashes_in_a_row(policy):
    """What a first start stored is older than what a second one did, for the third."""
    index = busy(policy)
    log = [index.take_log()]
    for path in ("m", "n", "o"):
        index = restored(newest(np.frombuffer(b"".join(log), RECORD)), policy)
        ask(index, path)
        log.append(index.take_log())
    final = newest(np.frombuffer(b"".join(log), RECORD))
    final = final[np.argsort(final["priority"], kind="stable")]
    youngest = [bytes(record["key"]) for record in final[-3:]]
    assert youngest == [key for path in "mno" for key in keys(path)]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_clocks_are_dumped_as_they_are(policy):
    index = busy(policy)
    dumped = index.held()
    assert dumped["priority"].tolist() == index.rows.column("priority")[dumped["row"]].tolist()


def test_what_comes_after_a_dump_of_ranks_is_younger_in_the_log():
    index = make_index("lfu-da", num_slabs=8)
    ask(index, [f"t{n}" for n in range(30)])  # more ranks than the clock has counted
    for n in range(8):
        index.touch(keys([f"t{each}" for each in range(30 - n)]))
    dumped = index.held()["priority"]
    index.take_log()
    assert len(np.unique(dumped)) > 1
    ask(index, "n")
    assert np.frombuffer(index.take_log(), RECORD)["priority"].min() > dumped.max()


@pytest.mark.parametrize("policy", ["lru", "lfu-da", "ttl", "tlru", "cost"])
def test_sizes_compete_by_clock(policy):
    """Else the keys of one policy would keep a second model out, or let it in too easily."""
    index = make_index(policy, num_slabs=3)
    names = [f"r{number}" for number in range(12)]
    for name in names:
        ask(index, [name])
    for name in names[:4]:
        index.touch(keys([name]))
    for _ in range(9):
        index.touch(keys([names[5]]))  # often, but not lately
    for name in names[:4] + names[8:]:
        index.touch(keys([name]))
    ask(index, ["big"], block_nbytes=LARGE)
    assert index.lookup(keys(["big"])) == 1
    left = [name for name in names if index.lookup(keys([name]))]
    assert left == names[:4] + names[8:], "the slab that was not used lately"


@pytest.mark.parametrize("policy", POLICIES)
def test_removals_of_all_kinds(policy):
    """Discarded, damaged, of an emptied slab: a policy's books stay right."""
    index = make_index(policy, num_slabs=3)
    for path in ("abcd", "abxy", "abcd", "mnop", "mn", "q"):
        ask(index, path)
    index.discard(keys("abx")[2:])
    pinned = index.pin(keys("mnop"), namespace=1, block_nbytes=SMALL)
    index.unpin(pinned, damaged=pinned[2:3])
    index.check_invariants()
    for number in range(6):
        ask(index, [f"big{number}"], block_nbytes=LARGE)
    for path in ("abcd", "mnop", "wxyz", "abxy"):
        ask(index, path)
    assert index.lookup(keys("abxy")) == 4
    index.discard_namespace(1)
    assert len(index) == 0
    ask(index, "abcd")
    assert index.lookup(keys("abcd")) == 4
    if policy == "s3fifo":
        sections = [index._policy.section(row) for row in range(index.rows.num_used)]
        assert index._policy._num_main == sum(sections)


def comes_back(index, path):
    """Discard the end of a prompt; "n" gets its row. Its old entry in the queue must not count."""
    (row,) = index.pin(keys(path)[-1:], namespace=1, block_nbytes=SMALL)
    index.unpin([row])
    index.discard(keys(path)[-1:])
    ask(index, "n")
    assert index.pin(keys("n"), namespace=1, block_nbytes=SMALL, is_use=False) == [row]
    index.unpin([row])


def test_a_row_that_comes_back_less_used():
    index = make_index("lfu-da")
    for path in "aaaaaaaa12345678":  # "a" surfaces for "8", with eight uses, and stays
        ask(index, path)
    comes_back(index, "a")
    for path in "23456782345678":
        ask(index, path)
    ask(index, "9")
    assert [index.lookup(keys(path)) for path in "n23456789"] == [0, *[1] * 8]


def test_a_row_that_comes_back_less_deep():
    index = make_index("cost=1")
    ask(index, "abcdefg")
    comes_back(index, "abcdefg")
    ask(index, "abcdef")
    index.reserve(SMALL, 2)
    assert [index.lookup(keys(path)) for path in ("n", "abcdef")] == [0, 6]


def test_priorities_leave_room_for_a_clock():
    assert CLOCK_MASK > 10**11, "eight years of a thousand operations a second"
