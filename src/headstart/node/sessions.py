"""Sessions: which engine holds which slots, and when a slot may be used again.

A *session* is one scheduler and the workers that copy for it. It holds tickets:

    lease        promoted --claim--> claimed --release--> gone
                    |  ^---unclaim----'
                    '--- expires (nobody claimed it) ----> gone
    reservation  claimed from the start --commit or abandon--> gone

A claimed ticket means that a worker may hold addresses of its slots. It ends only when the
scheduler says that all workers are done, or when the session is over: its scheduler and all of its
workers have closed their connections, which the kernel does when a process has given up its memory.
No time-out ends it: a frozen engine that thaws must find what it had.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headstart.costs import EngineCosts
from headstart.errors import ConfigError
from headstart.lease import Reservation
from headstart.node.board import Board, Phase, create_board
from headstart.node.devices import Devices
from headstart.node.promotions import Promotion, Promotions
from headstart.node.protocol import (
    NUM_WORDS,
    Abandon,
    Asked,
    Claimed,
    Commit,
    Planned,
    Promote,
    Promoted,
    Release,
    Reserve,
    Reserved,
    Unclaim,
)
from headstart.planner import MAX_SHARE, Held, Prompt, Reason, plan
from headstart.store import PrefixStore
from headstart.types import BlockKey, KeyChain, NamespaceId

_log = logging.getLogger(__name__)
MAX_TICKETS = 65536
_CUT_S = 0.1
_MAX_READ_S = 3600.0
_PATIENCE = 4.0
"""A read goes on for so many times what its plan allows: it is free while the engine is busy."""
_NOTHING = Claimed((), {}, 0.0)


@dataclass(slots=True, eq=False)
class _LeaseTicket:
    promotion: Promotion
    expires_at: float
    is_claimed: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One engine. Guarded by the lock of `Sessions`."""

    token: bytes
    workers: tuple[bytes, ...]
    board: Board
    connection: object
    """What speaks for the scheduler now; None while it is gone."""
    leases: dict[int, _LeaseTicket] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)


class Sessions:
    """All sessions of a node. Thread-safe."""

    def __init__(
        self,
        store: PrefixStore,
        promotions: Promotions,
        devices: Devices,
        *,
        lease_ttl_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._promotions, self._devices = store, promotions, devices
        self._lease_ttl_s, self._clock = lease_ttl_s, clock
        self._sessions: dict[bytes, Session] = {}
        self._workers: dict[bytes, int] = {}  # token -> open connections
        self._lock = threading.RLock()

    # -- who is there

    def open(
        self, token: bytes, workers: tuple[bytes, ...], claims: tuple[int, ...], connection: object
    ) -> tuple[Session, int]:
        """A scheduler is (back) there; its session and the descriptor of its board, to be closed.

        Every ticket that is not in `claims` is given back: the scheduler knows what workers hold.
        """
        board, fd = create_board()
        with self._lock:
            session = self._sessions.get(token)
            if session is None:
                session = Session(token, workers, board, connection)
                self._sessions[token] = session
            else:
                session.workers, session.board, session.connection = workers, board, connection
                kept = set(claims)
                self._end_leases(session, [n for n in session.leases if n not in kept])
                self._abandon(session, [n for n in session.reservations if n not in kept])
        return session, fd

    def leave(self, session: Session, connection: object) -> None:
        """The scheduler's connection is closed: what no worker holds is given back."""
        with self._lock:
            if session.connection is not connection:
                return  # it came back on another one
            session.connection = None
            unclaimed = [n for n, lease in session.leases.items() if not lease.is_claimed]
            self._end_leases(session, unclaimed)
            self._end_if_over(session)

    def attach(self, worker: bytes) -> None:
        """A worker maps the arena."""
        with self._lock:
            self._workers[worker] = self._workers.get(worker, 0) + 1

    def detach(self, worker: bytes) -> None:
        """A worker's connection is closed: it maps nothing any more."""
        with self._lock:
            self._workers[worker] -= 1
            if not self._workers[worker]:
                del self._workers[worker]
            for session in list(self._sessions.values()):
                if worker in session.workers:
                    self._end_if_over(session)

    def is_attached(self, session: Session) -> bool:
        """Whether every worker of a session maps the arena."""
        with self._lock:
            return all(worker in self._workers for worker in session.workers)

    # -- leases; `connection` is the one that asks: an abandoned one is given nothing

    def promote(
        self, session: Session, connection: object, asked: Promote, chain: KeyChain
    ) -> Promoted:
        """Look up `chain` and start to promote what is held of it."""
        found = self._store.lookup(chain)
        num_held, by_tier = found.num_blocks, found.by_tier
        plan = None if asked.asked is None else self._plan(asked.asked, chain, by_tier)
        wanted = num_held if plan is None else plan.num_blocks
        full = len(session.leases) >= MAX_TICKETS or not 0 <= asked.word < NUM_WORDS
        if not wanted or full or asked.ticket in session.leases:
            return Promoted(num_held, 0, pending=False, by_tier=by_tier, plan=plan)
        board = session.board

        def tell(phase: Phase, ready_blocks: int) -> None:
            board.write(asked.word, asked.ticket, phase, ready_blocks)

        timeout_s, deadline = 0.0, math.inf
        if plan is not None:
            needed_s = plan.load_s + plan.hedge_s
            timeout_s = min(_MAX_READ_S, _PATIENCE * needed_s)
            deadline = self._clock() + _busy_s(asked.asked) + needed_s
        promotion = self._promotions.start(chain.run(0, wanted), tell, timeout_s, deadline)
        with self._lock:
            # In this order: it may end in between, and then its lease is there.
            is_over, lease = promotion.is_over, promotion.lease
            num_ready = lease.ready_blocks if is_over and lease is not None else 0
            is_asked = session.connection is connection and asked.ticket not in session.leases
            if is_asked and (num_ready or not is_over):
                session.leases[asked.ticket] = _LeaseTicket(promotion, self._expiry())
                return Promoted(num_held, num_ready, not is_over, by_tier, plan)
        self._promotions.end(promotion)  # nobody knows of it, so nobody would
        return Promoted(num_held, 0, pending=False, by_tier=by_tier, plan=plan)

    def _plan(self, asked: Asked, chain: KeyChain, by_tier: dict[str, int]) -> Planned:
        """How much is worth loading of what tiers hold, by their present costs."""
        prompt = Prompt(
            num_tokens=asked.num_tokens,
            block_size=asked.block_size,
            block_nbytes=chain.block_nbytes,
        )
        engine = EngineCosts(**msgspec.structs.asdict(asked.costs))
        most = self._promotions.max_blocks(chain.block_nbytes)
        waiting_nbytes = self._promotions.waiting_nbytes()
        busy_s = _busy_s(asked)
        # Its own will not be later, so what is read later than that does not go first; but the
        # threads that read take no heed of it while all of them do.
        latest_s = busy_s + prompt.recompute_s(engine) * (1.0 + MAX_SHARE)
        deadline = math.inf if self._promotions.is_busy else self._clock() + latest_s
        held: list[Held] = []
        is_broken = False
        for tier, count in by_tier.items():
            device = self._devices.by_tier.get(tier)
            costs = (
                None
                if device is None
                else device.costs(chain.block_nbytes, waiting_nbytes, deadline)
            )
            if device is not None and costs is None:
                is_broken = is_broken or count > by_tier["memory"]
                continue
            held.append(Held(tier=tier, num_blocks=min(count, most), costs=costs))
        made = plan(prompt, held, engine, busy_s=busy_s)
        if not math.isfinite(made.recompute_s + made.load_s + made.load_all_s):
            raise ConfigError(f"nothing can be planned by {engine}")
        num_held = min(max(by_tier.values()), most)
        for tier, count in by_tier.items():
            if made.num_blocks < min(count, most) and tier in self._devices.by_tier:
                self._devices.by_tier[tier].want()
        reason = Reason.BREAKER if is_broken and made.num_blocks < num_held else made.reason
        return Planned(
            made.num_blocks, reason, made.load_s, made.load_all_s, made.prefill_s, made.hedge_s
        )

    def claim(self, session: Session, connection: object, ticket: int) -> Claimed:
        """What is ready of a ticket, now claimed; a read that goes on is cut short."""
        with self._lock:
            held = session.leases.get(ticket)
            if held is None or session.connection is not connection:
                return _NOTHING
            if not self.is_attached(session):
                return Claimed((), {}, 0.0, attached=False)
            held.is_claimed = True
        lease = self._promotions.cut(held.promotion, _CUT_S)
        offsets = () if lease is None else tuple(lease.offsets)
        if lease is None or not offsets:
            self._end_leases(session, [ticket])
            return _NOTHING
        return Claimed(offsets, dict(lease.by_tier), lease.read_s)

    # -- reservations

    def reserve(
        self, session: Session, connection: object, asked: Reserve, chain: KeyChain
    ) -> Reserved:
        """Slots for the blocks of `chain` that are not held."""
        if not self.is_attached(session) or len(session.reservations) >= MAX_TICKETS:
            return Reserved(0, ())
        # What only lower tiers hold and the engine computed nevertheless is worth memory again.
        num_held = self._store.lookup(chain).by_tier["memory"]
        missing = chain.run(num_held, len(chain))
        if not len(missing):
            return Reserved(num_held, ())
        if missing.parent is not None and not self._store.lookup(_alone(missing)).num_blocks:
            return Reserved(num_held, (), is_orphan=True)
        with self._lock:
            if asked.ticket in session.reservations or session.connection is not connection:
                return Reserved(num_held, ())
            reservation = self._store.reserve(missing)
            offsets = tuple(reservation.offsets)
            if offsets:
                session.reservations[asked.ticket] = reservation
            else:
                reservation.abandon()  # nobody will: there is nothing to write
        return Reserved(num_held, offsets)

    # -- what is told of tickets; of those that are not the session's, nothing is done

    def tell(self, session: Session, told: Unclaim | Release | Commit | Abandon) -> None:
        """A ticket goes on as the message says."""
        match told:
            case Unclaim():
                with self._lock:
                    held = session.leases.get(told.ticket)
                    if held is not None:
                        held.is_claimed, held.expires_at = False, self._expiry()
            case Release():
                self._end_leases(session, [told.ticket])
            case Commit():
                with self._lock:
                    reservation = session.reservations.pop(told.ticket, None)
                if reservation is not None:
                    reservation.commit()
            case Abandon():
                self._abandon(session, [told.ticket])

    # -- the node

    def beat(self) -> None:
        """Show every engine that the node is alive."""
        with self._lock:
            for session in self._sessions.values():
                session.board.beat()

    def sweep(self) -> int:
        """Give back leases that nobody claimed in time; how many.

        Time counts from when all is there: whoever waits for a long read claims nothing before.
        """
        now = self._clock()
        count = 0
        with self._lock:
            for session in self._sessions.values():
                for lease in session.leases.values():
                    if not lease.promotion.is_over:
                        lease.expires_at = self._expiry()
                late = [
                    number
                    for number, lease in session.leases.items()
                    if not lease.is_claimed and lease.expires_at <= now
                ]
                self._end_leases(session, late)
                count += len(late)
        return count

    def counts(self) -> dict[str, int]:
        """Engines, workers, leases (all, claimed), reservations."""
        with self._lock:
            sessions = list(self._sessions.values())
            leases = [lease for session in sessions for lease in session.leases.values()]
            return {
                "engines": sum(session.connection is not None for session in sessions),
                "sessions": len(sessions),
                "workers": len(self._workers),
                "leases": len(leases),
                "leases_claimed": sum(lease.is_claimed for lease in leases),
                "reservations": sum(len(session.reservations) for session in sessions),
            }

    def _expiry(self) -> float:
        return self._clock() + self._lease_ttl_s

    def _end_leases(self, session: Session, tickets: list[int]) -> None:
        with self._lock:
            for ticket in tickets:
                held = session.leases.pop(ticket, None)
                if held is not None:
                    self._promotions.end(held.promotion)

    def _abandon(self, session: Session, tickets: list[int]) -> None:
        with self._lock:
            for ticket in tickets:
                reservation = session.reservations.pop(ticket, None)
                if reservation is not None:
                    reservation.abandon()

    def _end_if_over(self, session: Session) -> None:
        """End a session whose processes are all gone. Under the lock."""
        if session.connection is not None or any(w in self._workers for w in session.workers):
            return
        self._end_leases(session, list(session.leases))
        self._abandon(session, list(session.reservations))
        self._sessions.pop(session.token, None)


def _busy_s(asked: Asked | None) -> float:
    """How long the engine computes for others first."""
    return 0.0 if asked is None else max(0.0, asked.busy_s)


def make_chain(
    namespace: bytes, block_nbytes: int, keys: tuple[BlockKey, ...], parent: bytes | None = None
) -> KeyChain:
    """A chain from a message. Raises ValueError."""
    return KeyChain(
        namespace=NamespaceId(namespace),
        block_nbytes=block_nbytes,
        keys=keys,
        parent=None if parent is None else BlockKey(parent),
    )


def _alone(chain: KeyChain) -> KeyChain:
    """The parent of a chain, as a chain."""
    assert chain.parent is not None
    return KeyChain(
        namespace=chain.namespace, block_nbytes=chain.block_nbytes, keys=(chain.parent,)
    )
