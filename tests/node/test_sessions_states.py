"""A state machine over sessions: whatever the order, a claimed ticket's slots are nobody else's."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.services import Services
from headstart.store import PrefixStore
from headstart.testing import Fault, FaultyTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer

SOON = 20.0
TTL = 60.0
BLOCK = 4096
MEMORY_BLOCKS, FILE_BLOCKS = 16, 48
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="states", weights="none", layout=LAYOUT)
PATHS = ("abcdef", "abcxyz", "abuvwklm", "qrst", "qrs1", "m", "0123456789ghij")


def chain(path):
    return keys_from_hashes(NAMESPACE, [content.encode() for content in path])


def content(key):
    return bytes(key) * (BLOCK // len(key))


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


@dataclass
class Ticket:
    """What an engine knows of a ticket."""

    run: object
    offsets: tuple = ()
    is_claimed: bool = False
    is_written: bool = False


@dataclass
class Engine:
    """A scheduler with its connections, and its workers' attachments."""

    number: int
    workers: tuple
    session: object = None
    connection: object = None
    next_ticket: int = 0
    leases: dict = field(default_factory=dict)
    reservations: dict = field(default_factory=dict)
    num_attached: list = field(default_factory=lambda: [0, 0])

    @property
    def token(self):
        return bytes([self.number]) * 16

    @property
    def claims(self):
        held = [*self.leases.items(), *self.reservations.items()]
        return tuple(number for number, ticket in held if ticket.is_claimed)

    @property
    def is_alive(self):
        return self.connection is not None or any(self.num_attached)

    def forget_unclaimed(self):
        for tickets in (self.leases, self.reservations):
            for number in [n for n, ticket in tickets.items() if not ticket.is_claimed]:
                del tickets[number]

    def forget_if_over(self):
        if not self.is_alive:
            self.leases.clear()
            self.reservations.clear()
            self.session = None


engines = st.integers(0, 1)
paths = st.builds(
    lambda path, length, new: path[:length] + new,
    st.sampled_from(PATHS),
    st.integers(1, 14),
    st.sampled_from(["", "", "A", "BC", "DEFGH"]),
)
picks = st.integers(0, 7)


class SessionStates(RuleBasedStateMachine):
    """Two engines with two workers each, against the sessions of a small node.

    The model is what the engines know: a claimed ticket's bytes stay as they were, and no slot is
    in two claimed tickets unless both are of the same block.
    """

    def __init__(self):
        super().__init__()
        self.threads_before = threading.active_count()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(prefix="headstart-", dir=memory)
        self.memory = MemoryTier(
            capacity_nbytes=MEMORY_BLOCKS * BLOCK, slab_nbytes=4 * BLOCK, huge_pages=False
        )
        self.file = FileTier(
            FileTierOptions(
                root=Path(self.folder.name) / "file",
                capacity_nbytes=FILE_BLOCKS * 2 * BLOCK,
                slab_nbytes=8 * BLOCK,
                durable=False,
            )
        )
        self.slow = FaultyTier(self.file)
        transfer = Transfer("test", num_threads=2, max_queued_nbytes=8 * BLOCK)
        self.store = PrefixStore(self.memory, [(self.slow, transfer)])
        self.store.open_namespace(NAMESPACE)
        self.now = 0.0
        self.services = Services(self.store, lease_ttl_s=TTL, tick_s=None, clock=lambda: self.now)
        self.sessions = self.services.sessions
        self.promotions = self.services._promotions

    @initialize()
    def start(self):
        self.engines = [
            Engine(number, tuple(bytes([number, rank]) * 8 for rank in range(2)))
            for number in range(2)
        ]
        for engine in self.engines:
            self._open(engine)
            for rank in range(2):
                self._attach(engine, rank)
        for path in PATHS:
            self.store_path(path)
            assert self.store.flush(SOON)

    # -- who is there

    def _open(self, engine):
        engine.connection = object()
        engine.session, fd = self.sessions.open(
            engine.token, engine.workers, engine.claims, engine.connection
        )
        os.close(fd)
        engine.forget_unclaimed()

    def _attach(self, engine, rank):
        self.sessions.attach(engine.workers[rank])
        engine.num_attached[rank] += 1

    @rule(number=engines, is_late=st.booleans())
    def reopen(self, number, is_late):
        """The scheduler comes back; the node sees the end of the old connection first, or later."""
        engine = self.engines[number]
        old, session = engine.connection, engine.session
        if old is not None and not is_late:
            self.sessions.leave(session, old)
            engine.connection = None
            engine.forget_if_over()
        self._open(engine)
        if old is not None and is_late:
            self.sessions.leave(session, old)

    @rule(number=engines)
    def leave(self, number):
        engine = self.engines[number]
        if engine.connection is not None:
            connection, engine.connection = engine.connection, None
            self.sessions.leave(engine.session, connection)
            engine.forget_unclaimed()
            engine.forget_if_over()

    @rule(number=engines, rank=st.integers(0, 1))
    def attach(self, number, rank):
        if not self.engines[number].num_attached[rank]:
            self._attach(self.engines[number], rank)

    @rule(number=engines, rank=st.integers(0, 1))
    def attach_again(self, number, rank):
        """A worker follows: for a moment it has two connections."""
        if self.engines[number].num_attached[rank]:
            self._attach(self.engines[number], rank)
            self.sessions.detach(self.engines[number].workers[rank])
            self.engines[number].num_attached[rank] -= 1

    @rule(number=engines, rank=st.integers(0, 1))
    def detach(self, number, rank):
        engine = self.engines[number]
        if engine.num_attached[rank]:
            self.sessions.detach(engine.workers[rank])
            engine.num_attached[rank] -= 1
            engine.forget_if_over()

    # -- leases

    @rule(number=engines, path=paths, waits=st.booleans())
    def promote_and_claim(self, number, path, waits):
        engine = self.engines[number]
        for rank in range(2):
            self.attach(number, rank)
        self.promote(number, path)
        if waits and engine.next_ticket in engine.leases:
            promotion = engine.session.leases[engine.next_ticket].promotion
            wait_for(lambda: promotion.is_over or promotion in self.promotions._waiting)
        self.claim(number, len(engine.leases) - 1)

    @rule(number=engines, path=paths)
    def promote(self, number, path):
        engine = self.engines[number]
        if engine.connection is None:
            return
        run = chain(path)
        engine.next_ticket += 1
        asked = protocol.Promote(engine.next_ticket, 5, b"", BLOCK, b"")
        promoted = self.sessions.promote(engine.session, engine.connection, asked, run)
        if promoted.pending or promoted.num_ready:
            engine.leases[engine.next_ticket] = Ticket(run)

    @rule(number=engines, pick=picks)
    def claim(self, number, pick):
        engine = self.engines[number]
        if engine.connection is None or not engine.leases:
            return
        ticket = list(engine.leases)[pick % len(engine.leases)]
        claimed = self.sessions.claim(engine.session, engine.connection, ticket)
        held = engine.leases[ticket]
        if claimed.offsets:
            assert all(engine.num_attached)
            assert not held.is_claimed or held.offsets == claimed.offsets
            held.is_claimed, held.offsets = True, claimed.offsets
        else:
            assert not held.is_claimed or not all(engine.num_attached)
            if claimed.attached:
                del engine.leases[ticket]

    @rule(number=engines, pick=picks)
    def unclaim(self, number, pick):
        self._tell(number, pick, "leases", protocol.Unclaim, ends=False)

    @rule(number=engines, pick=picks)
    def release(self, number, pick):
        self._tell(number, pick, "leases", protocol.Release, ends=True)

    # -- reservations

    @rule(number=engines, path=paths, writes=st.booleans())
    def reserve(self, number, path, writes):
        engine = self.engines[number]
        if engine.connection is None:
            return
        run = chain(path)
        engine.next_ticket += 1
        asked = protocol.Reserve(engine.next_ticket, b"", BLOCK, b"", None)
        reserved = self.sessions.reserve(engine.session, engine.connection, asked, run)
        if reserved.offsets:
            assert all(engine.num_attached)
            new = run.run(reserved.num_held, reserved.num_held + len(reserved.offsets))
            ticket = Ticket(new, reserved.offsets, is_claimed=True)
            engine.reservations[engine.next_ticket] = ticket
            if writes:
                self._write(ticket)

    def _write(self, ticket):
        for offset, key in zip(ticket.offsets, ticket.run, strict=True):
            self.memory.view(offset, BLOCK)[:] = content(key)
        ticket.is_written = True

    @rule(number=engines, pick=picks)
    def commit(self, number, pick):
        for ticket in self.engines[number].reservations.values():
            self._write(ticket)
        self._tell(number, pick, "reservations", protocol.Commit, ends=True)

    @rule(number=engines, pick=picks)
    def abandon(self, number, pick):
        self._tell(number, pick, "reservations", protocol.Abandon, ends=True)

    def _tell(self, number, pick, kind, message, *, ends):
        """Tell it twice, and of a ticket that is not there."""
        engine = self.engines[number]
        tickets = getattr(engine, kind)
        if engine.session is None or not tickets:
            return
        ticket = list(tickets)[pick % len(tickets)]
        for told in (ticket, ticket, ticket + 1000):
            self.sessions.tell(engine.session, message(told))
        if ends:
            del tickets[ticket]
        else:
            tickets[ticket].is_claimed, tickets[ticket].offsets = False, ()

    # -- the rest of the world: time, the medium, the operator, an engine without sessions

    @rule(path=paths)
    def store_path(self, path):
        run = chain(path)
        self.store.store(run, [content(key) for key in run])

    @rule(seconds=st.sampled_from([TTL - 1, TTL, 10 * TTL]))
    def sweep(self, seconds):
        self.now += seconds
        num_claimed = self.sessions.counts()["leases_claimed"]
        self.sessions.sweep()
        assert self.sessions.counts()["leases_claimed"] == num_claimed

    @rule(path=paths)
    def forget(self, path):
        """Memory forgets some; the file tier keeps what it has."""
        self.memory.discard(chain(path).keys[-1:])

    @rule(is_all=st.sampled_from([False, False, False, True]))
    def clear(self, is_all):
        """Memory alone, or everything; then there is something again."""
        if is_all:
            self.services.clear("")
            self.store_path(PATHS[0])
        else:
            assert self.store.flush(SOON)
            self.memory.discard_namespace(NAMESPACE.id)

    @rule(is_slow=st.booleans(), every=st.sampled_from([0, 0, 3]))
    def medium(self, is_slow, every):
        delay = 0.002 if is_slow else 0.0
        self.slow.schedule = lambda number: Fault(
            latency_s=delay, fails=every > 0 and number % every == 0
        )

    # -- what must hold after each step

    @invariant()
    def slots_of_claimed_tickets_are_theirs(self):
        owners = {}
        for engine in self.engines:
            for ticket in [*engine.leases.values(), *engine.reservations.values()]:
                if not ticket.is_claimed:
                    continue
                is_reservation = ticket in engine.reservations.values()
                for offset, key in zip(ticket.offsets, ticket.run, strict=False):
                    if not is_reservation or ticket.is_written:
                        assert bytes(self.memory.view(offset, BLOCK)) == content(key)
                    before = owners.setdefault(offset, (is_reservation, key))
                    assert before == (is_reservation, key), "a slot has two owners"
                    assert not is_reservation or before[1] is key

    @invariant()
    def books_are_right(self):
        self.memory.check_invariants()
        counts = self.sessions.counts()
        alive = [engine for engine in self.engines if engine.session is not None]
        assert counts["sessions"] == len(alive)
        assert counts["engines"] == sum(e.connection is not None for e in self.engines)
        assert counts["reservations"] == sum(len(e.reservations) for e in self.engines)
        claimed = sum(t.is_claimed for e in self.engines for t in e.leases.values())
        assert counts["leases_claimed"] == claimed
        assert counts["leases"] <= sum(len(e.leases) for e in self.engines)
        assert 0 <= self.promotions.pinned_nbytes <= self.memory.arena.nbytes // 2
        live = [
            lease.promotion
            for session in self.sessions._sessions.values()
            for lease in session.leases.values()
        ]
        wait_for(lambda: self.promotions.pinned_nbytes == self._num_pinned(live))

    def _num_pinned(self, promotions):
        """Bytes of those that do not wait, some of which may end waiting meanwhile."""
        waiting = list(self.promotions._waiting)
        return sum(promotion.nbytes for promotion in promotions if promotion not in waiting)

    def teardown(self):
        self.slow.schedule = lambda number: Fault()
        for engine in self.engines:
            if engine.connection is not None:
                self.sessions.leave(engine.session, engine.connection)
            for rank in range(2):
                for _ in range(engine.num_attached[rank]):
                    self.sessions.detach(engine.workers[rank])
        assert not any(self.sessions.counts().values())
        wait_for(lambda: not self.promotions.pinned_nbytes)
        assert self.store.flush(SOON)
        for tier in (self.memory, self.file):
            wait_for(lambda tier=tier: not tier.index._reserved)
            wait_for(lambda tier=tier: not tier.index.rows.column("pins").any())
            tier.check_invariants()
        wait_for(lambda: not self.promotions._readers)
        assert not self.promotions.num_waiting
        self.services.close()
        self.store.close()
        self.folder.cleanup()
        wait_for(lambda: threading.active_count() <= self.threads_before)


TestSessions = SessionStates.TestCase
TestSessions.settings = settings(
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
