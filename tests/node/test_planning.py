"""Planning: what is promoted of a prompt, by the costs of its engine and of the tiers.

Reads take what the tier is told to let them take, by a clock that nobody else moves.
"""

from __future__ import annotations

import msgspec
import pytest

from device_rig import Clock
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.testing import Fault
from node_process import wait_for

SOON = 20.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
COSTS = protocol.Costs(0.0, 1e-2, 0.0, 0.0, 8192, 1e12)
ASKED = protocol.Asked(130, 16, COSTS)
"""1.3 s to compute; each block saves 0.16 s."""
PATH = "abcdefgh"


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


class Tier:
    """The file tier of a world: a block of it takes what `block_s` says."""

    def __init__(self, world, monkeypatch):
        monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
        self.world, self.clock = world, Clock()
        self.device = world.services.devices.by_tier["file"]
        ((_, self.transfer),) = world.store.lower
        self.device._clock = self.transfer._clock = self.clock
        self.transfer.inflight_nbytes = self.transfer.wanted_nbytes = BLOCK
        world.slow._sleep = self.clock.skip
        self.block_s = 0.001
        world.slow.schedule = lambda number: Fault(latency_s=self.block_s)

    def teach(self, path=PATH):
        """Some requests read all of a path."""
        for _ in range(4):
            self.world.forget_memory()
            self.world.store.load(chain(path), timeout_s=SOON).close()

    def probe(self, after_s=11.0):
        """Let time pass and look after the device; how many probes that made."""
        self.clock.skip(after_s)
        before = self.device.state().num_probes
        self.device.tick()
        wait_for(lambda: self.world.slow.num_stalled or not self.device._is_probing)
        return self.device.state().num_probes - before


@pytest.fixture
def tier(world, monkeypatch):
    return Tier(world, monkeypatch)


@pytest.fixture
def ask(client, soon):
    """Asks for a path; the promise, when it is over. All are released after the test."""
    promises = []

    def make(path=PATH, asked=ASKED, *, ends=True):
        promise = client.promote(chain(path), asked)
        assert promise is not None
        promises.append(promise)
        if ends:
            soon(lambda: promise.poll()[0])
        return promise

    yield make
    for promise in promises:
        promise.release()


def loaded(world, path):
    """Held by the file tier alone."""
    world.put(path)
    world.forget_memory()


# ----------------------------------------------------------------------------------- what is chosen


def test_all_that_a_fast_tier_holds_is_loaded(world, tier, ask):
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    promise = ask(PATH + "xy")
    assert (promise.plan.reason, promise.plan.num_blocks) == ("load", 8)
    assert (promise.num_held, promise.num_kept, promise.poll()) == (8, 8, (True, 8))
    assert 0.007 < promise.plan.load_s == promise.plan.load_all_s < 0.02
    assert promise.plan.prefill_s == pytest.approx(0.02, rel=0.1)
    assert 0 < promise.plan.hedge_s < 0.65
    assert promise.claim().by_tier == {"memory": 0, "file": 8}


def test_nothing_is_loaded_from_a_tier_that_is_slower_than_computing(world, tier, ask):
    tier.block_s = 0.5
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    begun = world.counted.num_begun
    promise = ask()
    assert (promise.plan.reason, promise.plan.num_blocks, promise.ticket) == ("slow", 0, None)
    assert promise.plan.load_all_s > 3.0
    assert (promise.num_held, promise.num_kept, promise.by_tier["file"]) == (8, 0, 8)
    assert world.counted.num_begun == begun
    assert world.counts(engines=1, sessions=1)
    assert world.promotions.pinned_nbytes == 0


def test_of_a_slow_tier_only_what_memory_holds_is_loaded(world, tier, ask):
    tier.block_s = 0.5
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    world.store.load(chain("abc"), timeout_s=SOON).close()
    promise = ask()
    assert (promise.plan.reason, promise.plan.num_blocks, promise.plan.load_s) == ("part", 3, 0.0)
    assert (promise.num_held, promise.num_kept, promise.poll()) == (8, 3, (True, 3))
    assert promise.claim().by_tier == {"memory": 3}


def test_what_nobody_holds_is_a_miss(tier, ask):
    promise = ask("xyz")
    assert (promise.plan.reason, promise.plan.num_blocks) == ("miss", 0)
    assert (promise.ticket, promise.num_held, promise.poll()) == (None, 0, (True, 0))


def test_where_nothing_is_asked_all_that_is_held_is_loaded(world, tier, ask):
    tier.block_s = 0.5
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    promise = ask(asked=None)
    assert promise.plan is None
    assert (promise.num_held, promise.num_kept, promise.poll()) == (8, 8, (True, 8))


def test_while_the_engine_computes_for_others_a_slow_read_is_free(world, tier, ask):
    tier.block_s = 0.5
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    promise = ask(asked=msgspec.structs.replace(ASKED, busy_s=60.0))
    assert (promise.plan.reason, promise.poll()) == ("load", (True, 8))


def test_bytes_that_wait_for_the_device_make_a_tier_slow(world, tier, ask):
    tier.block_s = 0.01
    loaded(world, PATH)
    loaded(world, [f"long {n}" for n in range(24)])
    tier.teach()
    world.forget_memory()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tier.transfer, "ahead_nbytes", lambda deadline: 400 * BLOCK)
        busy = ask()
    assert busy.plan.num_blocks == 0
    assert ask().plan.num_blocks == 8


def test_a_prompt_longer_than_may_be_pinned_is_no_reason_to_probe(world, tier, ask):
    path = list(range(50))
    world.put(path[:25])
    world.put(path, start=25)
    world.forget_memory()
    tier.teach(path[:8])
    world.forget_memory()
    promise = ask(path, protocol.Asked(802, 16, COSTS))
    assert (promise.plan.reason, promise.plan.num_blocks) == ("load", 32)
    assert tier.probe() == 0, "no slowness of the device kept anything from being loaded"


# ----------------------------------------------------------------------------- slow, and fast again


def test_a_tier_that_became_slow_is_declined_probed_and_used_again(world, tier, ask):
    asked = protocol.Asked(130, 16, msgspec.structs.replace(COSTS, token_s=1e-3))
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    assert ask(asked=asked).plan.reason == "load"
    world.forget_memory()
    tier.block_s = 0.009
    ask(asked=asked).release()
    world.forget_memory()
    declined = ask(asked=asked)
    assert declined.plan.reason in ("slow", "risky")
    assert (declined.plan.num_blocks, declined.num_held) == (0, 8)
    tier.block_s = 0.001
    begun = world.counted.num_begun
    num_probes = 0
    while ask(asked=asked).plan.num_blocks == 0:
        num_probes += tier.probe()
        assert num_probes < 20
    assert num_probes
    at_once = tier.transfer.num_at_once(BLOCK)
    assert begun < world.counted.num_begun <= begun + at_once * num_probes + 1
    assert ask(asked=asked).poll() == (True, 8)
    assert not tier.device.is_open, "a breaker is for more than this"


# -------------------------------------------------------------------------------------- the breaker


def test_a_stall_cuts_what_waits_and_only_probes_bring_the_tier_back(world, tier, ask, soon):
    loaded(world, PATH)
    tier.teach()
    world.forget_memory()
    world.store.load(chain("ab"), timeout_s=SOON).close()
    base = world.slow._num_ios

    def stall_later(number):
        if number >= base + 3:
            world.slow.stall()
        return Fault(latency_s=0.001)

    world.slow.schedule = stall_later
    promise = ask(ends=False)
    assert promise.plan.reason == "load"
    soon(lambda: world.slow.num_stalled and promise.poll()[1] > 3)
    assert not promise.poll()[0]
    tier.probe(after_s=0.1)
    assert not promise.poll()[0], "it has only begun"
    tier.probe(after_s=30.0)
    soon(lambda: promise.poll()[0])
    ready = promise.poll()[1]
    assert 4 <= ready <= 5
    assert promise.claim().by_tier == {"memory": 2, "file": ready - 2}

    later = ask()
    assert (later.plan.reason, later.plan.num_blocks) == ("breaker", 2)
    assert later.poll() == (True, 2)
    assert ask("ab").plan.reason == "load", "memory holds all of it"
    assert ask("xyz").plan.reason == "miss"

    world.slow.schedule = lambda number: Fault(latency_s=0.001)
    world.slow.resume()
    soon(lambda: not tier.transfer._unfinished)
    begun = world.counted.num_begun
    while tier.device.is_open:
        assert ask().plan.reason == "breaker"
        assert tier.probe() == 1
        soon(lambda: not tier.device._is_probing)
    assert world.counted.num_begun == begun + tier.device.state().num_probes
    promise.release()
    later.release()
    world.forget_memory()
    back = ask()
    assert (back.plan.reason, back.poll()) == ("load", (True, 8))
