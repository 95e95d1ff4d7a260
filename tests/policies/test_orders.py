"""Each policy against a plain model of it, and by hand in a forest."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.blocks import HeldBlocks
from headstart.costs import EngineCosts
from headstart.index import Index
from headstart.policies import make_policy
from headstart.policies.base import CLOCK_BITS
from headstart.units import PAGE_NBYTES

SIZE = 4
single = st.lists(st.integers(0, 11), max_size=120)
capacities = st.integers(1, 6)


class Tier:
    """An index of so many blocks; a prompt is a sequence of names, each prefix a block."""

    def __init__(self, policy, capacity, now=0.0):
        self.now = now
        self.index = Index(
            capacity_nbytes=capacity * PAGE_NBYTES,
            slab_nbytes=PAGE_NBYTES,
            policy=make_policy(policy, clock=lambda: self.now),
            slot_nbytes=lambda nbytes: nbytes,
        )
        self.index.block_tokens[0] = SIZE

    def keys(self, prompt):
        """One for each prefix."""
        return [f"{prompt[: n + 1]}".encode().ljust(32) for n in range(len(prompt))]

    def ask(self, prompt):
        """Use and store; the number of blocks that were hits."""
        keys = self.keys(prompt)
        pinned = self.index.pin(keys, namespace=0, block_nbytes=PAGE_NBYTES)
        rest = keys[len(pinned) :]
        slots = self.index.reserve(PAGE_NBYTES, len(rest))
        parent = keys[len(pinned) - 1] if pinned else None
        self.index.publish(
            rest[: len(slots)], slots, parent=parent, namespace=0, block_nbytes=PAGE_NBYTES
        )
        self.index.unpin(pinned)
        self.index.check_invariants()
        return len(pinned)

    def held(self, *prompts):
        """How many blocks of each are held, without using them."""
        return [self.index.lookup(self.keys(prompt)) for prompt in prompts]


def lfu_da(asked, capacity):
    """Arlitt et al. 1999, written down as it is told."""
    age, held, found = 0, {}, []
    for now, name in enumerate(asked):
        found.append(int(name in held))
        if name not in held and len(held) == capacity:
            victim = min(held, key=lambda each: (held[each][0], held[each][2]))
            age = held.pop(victim)[0]
        uses = held[name][1] + 1 if name in held else 1
        held[name] = (age + uses, uses, now)
    return found


def s3fifo(asked, capacity):
    """Yang et al. 2023, for blocks without parents."""
    small, main, hits, found = OrderedDict(), OrderedDict(), {}, []
    gone, num_gone = {}, 0

    def evict():
        nonlocal num_gone
        while True:
            num_held = len(small) + len(main)
            if small and (10 * len(small) >= num_held or not main):
                name, _ = small.popitem(last=False)
                if hits[name] > 1:
                    hits[name], main[name] = 0, None
                    continue
                num_gone += 1
                gone[name] = num_gone
                return
            name, _ = main.popitem(last=False)
            if not hits[name]:
                return
            hits[name] -= 1
            main[name] = None

    for name in asked:
        found.append(int(name in small or name in main))
        if found[-1]:
            hits[name] = min(3, hits[name] + 1)
            continue
        if len(small) + len(main) == capacity:
            evict()
        hits[name] = 0
        came_back = num_gone - gone.pop(name, -(10**9)) < len(small) + len(main) + 1
        (main if came_back else small)[name] = None
    return found


def ttl(asked, capacity, ttl_s):
    """`lru` of uses that are not too old; each request is a second after the last."""
    held, found = OrderedDict(), []
    for now, name in enumerate(asked):
        found.append(int(name in held and now - held[name] <= ttl_s))
        if name not in held and len(held) == capacity:
            held.popitem(last=False)
        elif name in held and not found[-1] and len(held) == capacity:
            held.popitem(last=False)  # room is made before it is seen that it is still there
        held[name] = now
        held.move_to_end(name)
    return found


@settings(max_examples=60, deadline=None)
@given(single, capacities)
def test_flat_models(asked, capacity):
    tiers = [Tier("lfu-da", capacity), Tier("s3fifo", capacity), Tier("ttl=4s", capacity)]
    for tier, expected in zip(
        tiers,
        (lfu_da(asked, capacity), s3fifo(asked, capacity), ttl(asked, capacity, 4.0)),
        strict=True,
    ):
        found = []
        for name in asked:
            found.append(tier.ask([name]))
            tier.now += 1.0
        assert found == expected


def test_lfu_da_forgets_what_was_popular():
    tier = Tier("lfu-da", 3)
    for _ in range(5):
        tier.ask("a")
    for name in "bcdefghijklm":
        tier.ask(name)
        tier.ask(name)
    assert tier.held("a") == [0], "five uses of long ago are no more than two of now"


def test_lfu_da_ages_by_the_coldest_only():
    policy = make_policy("lfu-da")
    high = policy.on_insert(row=1, clock=1)
    for clock in range(2, 9):
        high = policy.on_hit(row=1, priority=high, clock=clock)
    policy.on_remove(row=1, priority=high, evicted=False)
    assert policy.on_insert(row=2, clock=9) >> CLOCK_BITS == 1, "discarded: nothing has aged"
    policy.on_remove(row=3, priority=high, evicted=True)
    assert policy.on_insert(row=4, clock=10) >> CLOCK_BITS == 9


def test_s3fifo_is_not_swept_by_what_is_asked_once():
    tier = Tier("s3fifo", 20)
    for _ in range(3):
        tier.ask("abcd")
    for name in range(100):
        tier.ask([name])
    assert tier.held("abcd") == [4]
    lru = Tier("lru", 20)
    for prompt in ["abcd", "abcd", "abcd", *([name] for name in range(100))]:
        lru.ask(prompt)
    assert lru.held("abcd") == [0]


def test_s3fifo_takes_ancestors_along():
    tier = Tier("s3fifo", 8)
    for _ in range(3):
        tier.ask("abcd")
    for name in "wxyz":
        tier.ask(name)
    tier.ask("q")  # "abcd" surfaces, was hit twice, and moves
    index = tier.index
    rows = index.pin(tier.keys("abcd"), namespace=0, block_nbytes=PAGE_NBYTES, is_use=False)
    assert [index._policy.section(row) for row in rows] == [1, 1, 1, 1]
    index.unpin(rows)
    assert tier.held("w", "x", "q") == [0, 1, 1]


def test_s3fifo_a_dead_conversation_goes():
    """What was hit, and never again, must not stay for good."""
    tier = Tier("s3fifo", 12)
    for _ in range(3):
        tier.ask("abcdef")
    for number in range(40):
        for _ in range(4):
            tier.ask([number, "x", "y"])
    assert tier.held("abcdef") == [0]


def test_s3fifo_remembers_as_many_as_it_holds():
    tier = Tier("s3fifo", 4)
    for name in range(1200):
        tier.ask([name])
    assert len(tier.index._policy._gone) <= 4 + 1 + 1024
    for name, section in ((1195, 1), (1180, 0)):  # evicted just now, and long ago
        assert tier.ask([name]) == 0
        (row,) = tier.index.pin(tier.keys([name]), namespace=0, block_nbytes=PAGE_NBYTES)
        assert tier.index._policy.section(row) == section
        tier.index.unpin([row])


def test_s3fifo_a_dead_prompt_has_its_chances_once():
    """Not each of its blocks three of its own, one after the other."""
    tier = Tier("s3fifo", 8)
    for _ in range(4):
        tier.ask("abcdef")
    asked = 0
    while tier.held("abcdef") != [0]:
        for _ in range(3):
            tier.ask([asked])
        asked += 1
    assert asked <= 24


def test_ttl_is_lru_but_for_what_is_gone():
    tier = Tier("ttl=10s", 4)
    tier.ask("ab")
    tier.now = 9.0
    tier.ask("xy")
    assert tier.held("ab", "xy") == [2, 2]
    tier.now = 11.0
    assert tier.held("ab", "xy") == [0, 2]
    assert len(tier.index) == 4, "its bytes are there until there is need of the room"
    tier.index.touch(tier.keys("ab"))
    assert tier.held("ab") == [0], "what is gone is not used"
    assert tier.index.pin(tier.keys("ab"), namespace=0, block_nbytes=PAGE_NBYTES) == []
    tier.ask("q")
    assert tier.held("a", "xy", "q") == [0, 2, 1]
    assert tier.index.counters.num_evicted == 1


def test_ttl_what_is_stored_again_is_back():
    tier = Tier("ttl=10s", 8)
    tier.ask("ab")
    tier.now = 11.0
    assert tier.ask("abc") == 0
    assert tier.held("abc") == [3]
    assert tier.index.counters.num_stored == 3, "two of them were there"
    tier.now = 20.0
    assert tier.ask("abc") == 3


def test_ttl_a_restart_is_a_use():
    tier = Tier("ttl=10s", 4)
    tier.ask("ab")
    again = Tier("ttl=10s", 4, now=5.0)
    again.index.restore(tier.index.held())
    again.now = 14.0
    assert again.held("ab") == [2]
    again.now = 16.0
    assert again.held("ab") == [0]


def test_tlru_takes_ends_first():
    tier = Tier("tlru=8", 12)  # two blocks of four tokens
    tier.ask("abcde")
    tier.ask("vwxyz")
    tier.ask("12")
    assert tier.held("abcde", "vwxyz", "12") == [5, 5, 2]
    tier.ask("3")
    assert tier.held("abcde", "vwxyz") == [4, 5]
    tier.ask("4")
    assert tier.held("abcde", "vwxyz") == [3, 5], "two are lost"
    tier.ask("5")
    assert tier.held("abcde", "vwxyz") == [3, 4], "now of the other, though it is younger"
    tier.ask("6")
    tier.ask("7")
    assert tier.held("abcde", "vwxyz", "12") == [3, 3, 1], "and of the short one"
    lru = Tier("lru", 12)
    for prompt in ("abcde", "vwxyz", "12", "3", "4", "5", "6", "7"):
        lru.ask(prompt)
    assert lru.held("abcde", "vwxyz", "12") == [0, 5, 2]


def test_tlru_is_lru_among_beginnings():
    tier = Tier("tlru=4", 8)
    tier.ask("abcd")
    tier.ask("wxyz")
    pinned = tier.index.pin(
        tier.keys("abcd")[:3], namespace=0, block_nbytes=PAGE_NBYTES, is_use=False
    )
    tier.index.unpin(pinned)
    slots = tier.index.reserve(PAGE_NBYTES, 2)
    assert tier.held("abcd", "wxyz") == [3, 3], "an end of each"
    slots += tier.index.reserve(PAGE_NBYTES, 4)
    assert tier.held("abcd", "wxyz") == [0, 2], "then the older one"
    tier.index.release(slots)


def test_tlru_a_longer_prompt_counts_for_a_shared_beginning():
    tier = Tier("tlru=4", 6)
    tier.ask("abcd")
    tier.ask("abx")
    slots = tier.index.reserve(PAGE_NBYTES, 3)
    assert tier.held("abcd", "abx") == [3, 2], "one free place, then an end of each"
    slots += tier.index.reserve(PAGE_NBYTES, 1)
    assert tier.held("abcd") == [2], "none is left whose loss is short, so the oldest"
    tier.index.release(slots)


def test_cost_keeps_what_is_deep():
    tier = Tier("cost=4", 12)
    tier.ask("abcdefgh")
    for name in "wxyz":
        tier.ask(name)
    tier.ask("1")
    assert tier.held("abcdefgh", "w", "x") == [8, 0, 1], "older, but dearer"
    assert Tier("cost", 12).ask("") == 0
    lru = Tier("lru", 12)
    for prompt in ("abcdefgh", "w", "x", "y", "z", "1"):
        lru.ask(prompt)
    assert lru.held("abcdefgh", "w") == [7, 1]


def test_cost_what_is_dear_ages_too():
    tier = Tier("cost=4", 12)
    tier.ask("abcdefgh")
    for number in range(200):
        tier.ask([number])
    assert tier.held("abcdefgh") == [0]


@pytest.mark.parametrize("even", [1, 64, 32768])
def test_cost_is_what_the_prefill_model_says(even):
    policy = make_policy(f"cost={even}")
    tier = Tier("lru", 8)
    tier.ask("abcdefg")
    rows = tier.index.pin(tier.keys("abcdefg"), namespace=0, block_nbytes=PAGE_NBYTES)
    policy.watch(HeldBlocks(tier.index.rows, tier.index._table, {0: 16}))
    costs = EngineCosts(
        step_s=0.0,
        token_s=1.0,
        pair_s=1.0 / even,
        uncertainty=0.0,
        max_step_tokens=1 << 20,
        copy_bytes_per_s=1.0,
    )
    for number in reversed(range(len(rows))):  # depths are found from any block
        saved = costs.prefill_s(16 * number, 16 * (number + 1)) / 16
        key = policy.on_insert(row=rows[number], clock=1) >> CLOCK_BITS
        assert key == pytest.approx(16 * saved, abs=0.5001)
