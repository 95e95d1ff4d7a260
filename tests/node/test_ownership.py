"""Who owns a slot, and until when: engines that freeze, die in parts, come back or lie."""

from __future__ import annotations

import secrets
import threading

import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.board import Phase
from headstart.types import Outcome

SOON = 20.0
TTL = 60.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


def content(key):
    return key * (BLOCK // len(key))


def contents(path):
    return [content(key) for key in chain(path)]


def ended(promise):
    while not promise.poll()[0]:
        pass
    return promise


def done(client):
    """Wait until what was told before is done."""
    assert client._ask(protocol.Claim(0), protocol.Claimed) is not None


def expire(world):
    """Let the time of every unclaimed lease pass, several times over; how many that ends."""
    world.now += 5 * TTL
    return world.sessions.sweep()


def can_be_evicted(world, path):
    world.wrap()
    return world.memory.lookup(chain(path).keys) == 0


# ------------------------------------------------------------------------------ one engine, no harm


def test_a_lease_from_promotion_to_release(world, client):
    world.put("abcd")
    promise = ended(client.promote(chain("abcdef")))
    assert (promise.num_held, promise.poll()) == (4, (True, 4))
    claimed = promise.claim()
    assert [world.block(offset) for offset in claimed.offsets] == contents("abcd")
    assert claimed.by_tier == {"memory": 4}
    assert world.counts(engines=1, sessions=1, leases=1, leases_claimed=1)
    promise.release()
    promise.release()
    assert ended(client.promote(chain("ab"))).num_held == 2
    assert world.counts(engines=1, sessions=1, leases=1)


def test_a_lease_of_blocks_that_only_the_file_tier_holds(world, client):
    world.put("abcd")
    world.forget_memory()
    promise = ended(client.promote(chain("abcd")))
    claimed = promise.claim()
    assert [world.block(offset) for offset in claimed.offsets] == contents("abcd")
    assert claimed.by_tier == {"memory": 0, "file": 4}
    assert claimed.read_s > 0


def test_a_reservation_is_stored_by_its_commit(world, client):
    world.put("ab")
    ticket, reserved = client.reserve(chain("abcd"))
    assert (reserved.num_held, len(reserved.offsets)) == (2, 2)
    for offset, data in zip(reserved.offsets, contents("abcd")[2:], strict=True):
        world.memory.view(offset, BLOCK)[:] = data
    assert world.memory.lookup(chain("abcd").keys) == 2
    client.commit(ticket)
    promise = ended(client.promote(chain("abcd")))
    assert [world.block(offset) for offset in promise.claim().offsets] == contents("abcd")


def test_a_run_whose_parent_nobody_holds_is_an_orphan(client):
    _, reserved = client.reserve(chain("abcd").run(2, 4))
    assert reserved == protocol.Reserved(0, (), is_orphan=True)


def test_what_is_held_needs_no_slots(world, client):
    world.put("abc")
    _, reserved = client.reserve(chain("abc"))
    assert reserved == protocol.Reserved(3, ())
    assert world.counts(engines=1, sessions=1)


def test_with_memory_full_a_reservation_has_fewer_slots_and_then_none(world, client):
    ticket, reserved = client.reserve(chain(range(100)))
    assert len(reserved.offsets) == 64
    for _ in range(3):
        _, none = client.reserve(chain("abc"))
        assert none == protocol.Reserved(0, ())
    assert world.counts(engines=1, sessions=1, reservations=1), "nobody could end an empty one"
    client.abandon(ticket)
    _, reserved = client.reserve(chain("abc"))
    assert len(reserved.offsets) == 3


def test_a_full_memory_pins_no_parent(world, client):
    world.put("ab")
    promise = ended(client.promote(chain("ab")))
    ticket, reserved = client.reserve(chain(range(100)))
    assert len(reserved.offsets) == 62
    for _ in range(3):
        assert client.reserve(chain("abc"))[1] == protocol.Reserved(2, ())
    promise.release()
    client.abandon(ticket)
    done(client)
    assert can_be_evicted(world, "ab")


# -------------------------------------------------------------------------------------- expiry


def test_a_lease_that_nobody_claims_expires_and_its_blocks_can_go(world, client):
    world.put("abcd")
    promise = ended(client.promote(chain("abcd")))
    world.wrap()
    assert world.memory.lookup(chain("abcd").keys) == 4
    world.now = TTL - 1
    assert world.sessions.sweep() == 0
    world.now = TTL
    assert world.sessions.sweep() == 1
    assert can_be_evicted(world, "abcd")
    claimed = promise.claim()
    assert claimed.offsets == ()


def test_a_claimed_lease_does_not_expire_until_it_is_unclaimed(world, client):
    world.put("abcd")
    promise = ended(client.promote(chain("abcd")))
    offsets = promise.claim().offsets
    assert expire(world) == 0
    world.wrap()
    assert [world.block(offset) for offset in offsets] == contents("abcd")
    promise.unclaim()
    assert promise.claim().offsets == offsets, "it may be claimed again"
    promise.unclaim()
    done(client)
    assert expire(world) == 1
    assert can_be_evicted(world, "abcd")


def test_a_lease_does_not_expire_while_it_is_read(world, client):
    """A read may take longer than a lease lives; whoever waits for it gets all of it."""
    world.put("abcd")
    world.forget_memory()
    world.slow.stall()
    promise = client.promote(chain("abcd"))
    assert promise.poll() == (False, 0)
    assert expire(world) == 0
    world.slow.resume()
    assert ended(promise).poll() == (True, 4)
    world.now += TTL - 1
    assert world.sessions.sweep() == 0, "from now on, not from when it was asked for"
    world.now += 1
    assert world.sessions.sweep() == 1
    assert promise.claim().offsets == ()


def test_a_word_is_not_written_for_an_earlier_promotion(world, client, monkeypatch):
    """The thread that reads for it comes back when its word is another's."""
    world.put("abcd")
    world.put("xy")
    world.forget_memory()
    load, flows, is_loaded = world.store.load, threading.Event(), threading.Event()

    def slow_load(asked, **options):
        lease = load(asked, **options)
        if asked == chain("abcd"):
            is_loaded.set()
            flows.wait(SOON)
        return lease

    monkeypatch.setattr(world.store, "load", slow_load)
    earlier = client.promote(chain("abcd"))
    assert is_loaded.wait(SOON)
    earlier.release()
    later = client.promote(chain("xy"))
    assert later._word == earlier._word
    assert ended(later).poll() == (True, 2)
    flows.set()
    world.promotions.close()  # waits for the thread
    assert client._board.read(later._word, later.ticket) == (Phase.DONE, 2)


# ------------------------------------------------------------------------- engines as processes


def test_a_frozen_engine_finds_what_it_had(world, engines):
    """Every process of it stands still for several times the leases' time."""
    frozen, other = engines(), engines(num_workers=1)
    world.put(range(8))
    ticket, offsets = frozen.promote(range(8))
    reserved = frozen.scheduler.ask("reserve", names=["new"])
    assert frozen.workers[0].ask(
        "write", offset=reserved["offsets"][0], key=chain(["new"]).keys[0].hex(), nbytes=BLOCK
    )
    for process in frozen.processes:
        process.freeze()
    for number in range(12):
        names = [f"{number} {n}" for n in range(16)]
        asked = other.scheduler.ask("reserve", names=names)
        assert asked["offsets"]
        assert not set(asked["offsets"]) & {*offsets, *reserved["offsets"]}
        for offset, key in zip(asked["offsets"], chain(names), strict=False):
            assert other.workers[0].ask("write", offset=offset, key=key.hex(), nbytes=BLOCK)
        assert other.scheduler.ask("commit", ticket=asked["ticket"])
        expire(world)
    for process in frozen.processes:
        process.thaw()
    for worker in frozen.workers:
        read = [worker.ask("read", offset=offset, nbytes=BLOCK) for offset in offsets]
        assert [bytes.fromhex(data) for data in read] == contents(range(8))
    assert frozen.scheduler.ask("commit", ticket=reserved["ticket"])
    assert frozen.scheduler.ask("release", ticket=ticket)
    ticket, offsets = frozen.promote(["new"])
    data = frozen.workers[1].ask("read", offset=offsets[0], nbytes=BLOCK)
    assert bytes.fromhex(data) == contents(["new"])[0]


def test_when_only_the_scheduler_dies_claimed_slots_stay_with_the_workers(world, engines, soon):
    engine = engines()
    world.put("abcd")
    world.put("xy")
    _, offsets = engine.promote("abcd")
    assert engine.scheduler.ask("promote", names=["x", "y"])["ready"] == 2
    assert engine.scheduler.ask("reserve", names=["new"])["offsets"]
    assert world.counts(
        engines=1, sessions=1, workers=2, leases=2, leases_claimed=1, reservations=1
    )
    engine.scheduler.kill()
    left = {"sessions": 1, "leases": 1, "leases_claimed": 1, "reservations": 1}
    soon(lambda: world.counts(workers=2, **left))
    expire(world)
    world.wrap()
    assert [world.block(offset) for offset in offsets] == contents("abcd")
    engine.workers[0].kill()
    soon(lambda: world.counts(workers=1, **left))
    assert world.memory.lookup(chain("abcd").keys) == 4
    engine.workers[1].kill()
    soon(world.counts)
    world.settled()


def test_when_all_die_at_once_everything_is_free(world, engines):
    engine = engines()
    world.put("abcd")
    engine.promote("abcd")
    engine.scheduler.ask("reserve", names=["new"])
    engine.kill()
    world.settled()
    assert can_be_evicted(world, "abcd")


def test_when_the_workers_die_the_scheduler_gives_back(world, engines, soon):
    engine = engines()
    world.put("abcd")
    ticket, _ = engine.promote("abcd")
    for worker in engine.workers:
        worker.kill()
    soon(lambda: world.counts(engines=1, sessions=1, leases=1, leases_claimed=1))
    asked = engine.scheduler.ask("promote", names=["a"])
    assert engine.scheduler.ask("claim", ticket=asked["ticket"]) == [], "nobody could copy"
    assert engine.scheduler.ask("release", ticket=ticket)
    assert engine.scheduler.ask("release", ticket=asked["ticket"])
    soon(lambda: world.counts(engines=1, sessions=1))


def test_a_reservation_that_is_never_committed_comes_back(world, engines):
    engine = engines()
    assert len(engine.scheduler.ask("reserve", names=list("abcdef"))["offsets"]) == 6
    assert len(world.memory.index._reserved) == 6
    engine.kill()
    world.settled()
    assert world.memory.index.slots.num_used == 0


def test_coming_back_keeps_exactly_what_is_claimed(world, engines, soon):
    engine = engines()
    for path in ("abcd", "xy", "mn"):
        world.put(path)
    kept, offsets = engine.promote("abcd")
    assert engine.scheduler.ask("promote", names=["x", "y"])["ready"] == 2
    reserved = engine.scheduler.ask("reserve", names=["new"])
    given_back, _ = engine.promote("mn")
    assert engine.scheduler.ask("unclaim", ticket=given_back)
    assert engine.scheduler.ask("drop")
    soon(
        lambda: world.counts(
            engines=1, sessions=1, workers=2, leases=1, leases_claimed=1, reservations=1
        )
    )
    world.wrap()
    expire(world)
    assert [world.block(offset) for offset in offsets] == contents("abcd")
    for worker in engine.workers:
        worker.ask(
            "write", offset=reserved["offsets"][0], key=chain(["new"]).keys[0].hex(), nbytes=BLOCK
        )
    assert engine.scheduler.ask("commit", ticket=reserved["ticket"])
    assert engine.scheduler.ask("release", ticket=kept)
    assert engine.promote(["new"])[1]


# -------------------------------------------------------------------------- messages that are wrong


@pytest.mark.parametrize("message", [protocol.Commit, protocol.Release, protocol.Unclaim])
def test_tickets_of_others_are_left_alone(world, client, clients, message):
    world.put("abcd")
    other = clients(world.path)
    mine, theirs = (ended(c.promote(chain("abcd"))) for c in (client, other))
    assert mine.ticket == theirs.ticket, "numbers are a session's own"
    offsets = mine.claim().offsets
    theirs.claim()
    first, _ = client.reserve(chain(["mine"]))
    second, _ = other.reserve(chain(["theirs"]))
    assert first == second
    for number in (0, 10**6, -1, 2**63 - 1, theirs.ticket, second):
        other._tell(message(number))
        other._tell(message(number))
    done(other)
    done(client)
    expire(world)
    assert mine.claim().offsets == offsets
    counts = world.sessions.counts()
    assert counts["leases_claimed"] >= 1
    assert counts["reservations"] == (1 if message is protocol.Commit else 2)


def test_a_claim_of_nothing_is_gone(world, client, clients):
    world.put("ab")
    theirs = ended(clients(world.path).promote(chain("ab")))
    client.connect()
    for number in (0, theirs.ticket, -5, 2**63):
        reply = client._ask(protocol.Claim(number), protocol.Claimed)
        assert reply.offsets == ()


def test_a_ticket_is_used_once(world, client):
    world.put("ab")
    promise = ended(client.promote(chain("ab")))
    again = protocol.Promote(
        promise.ticket, 7, NAMESPACE.id, BLOCK, protocol.join_keys(chain("ab").keys)
    )
    assert client._ask(again, protocol.Promoted).num_ready == 0
    ticket, _ = client.reserve(chain("xy"))
    again = protocol.Reserve(
        ticket, NAMESPACE.id, BLOCK, protocol.join_keys(chain("mn").keys), None
    )
    assert client._ask(again, protocol.Reserved).offsets == ()
    assert len(promise.claim().offsets) == 2
    client.commit(ticket)
    client.commit(ticket)
    client.abandon(ticket)
    assert client.reserve(chain("xy"))[1].num_held == 2


def test_nothing_is_given_while_a_worker_has_not_mapped_the_arena(world, clients, mappings):
    world.put("ab")
    token = secrets.token_bytes(16)
    client = clients(world.serve(), [token])
    promise = ended(client.promote(chain("ab")))
    assert promise.num_held == 2
    claimed = promise.claim()
    assert (claimed.offsets, claimed.attached) == ((), False)
    assert client.reserve(chain("xy"))[1].offsets == ()
    mapping = mappings(world.path)
    again = clients(world.path, [mapping.token])
    promise = ended(again.promote(chain("ab")))
    offsets = promise.claim().offsets
    read = [bytes(mapping.memory[offset : offset + BLOCK]) for offset in offsets]
    assert read == contents("ab")


def test_slots_of_a_commit_nobody_wrote_is_the_engines_affair_but_orphans_are_refused(
    world, client
):
    world.put("ab")
    ticket, reserved = client.reserve(chain("abcd"))
    assert len(reserved.offsets) == 2
    world.store.discard(chain("a"))
    client.commit(ticket)
    assert client.promote(chain("abcd")).num_held == 0
    assert world.store.store(chain("ab"), contents("ab")) == [Outcome.DONE] * 2
