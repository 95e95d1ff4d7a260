"""A hypothesis state machine for tiers: whatever the order of calls, forget but never lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.testing.bounds import bounded
from headstart.testing.checks import bounded_stats, check_books, check_invariants, held
from headstart.testing.harness import Damage, Ending, TierHarness, kit_namespace
from headstart.testing.rig import OpenBatch, TierRig
from headstart.types import BlockKey, KeyChain, Outcome

MAX_OPEN = 3
_PATHS = ("abcdef", "abcxyz", "abuvw", "qrst", "qrs1", "m")
"""Prompts: two trees of prefixes and a lone block."""

chains = st.tuples(
    st.integers(0, 1), st.sampled_from(_PATHS), st.sampled_from((0, 0, 0, 1, 2, 3)), st.just(6)
) | st.tuples(st.integers(0, 1), st.sampled_from(_PATHS), st.just(0), st.integers(0, 5))
"""Namespace, path, start, stop; to be cut to the path's length."""

versions = st.integers(0, 2)
subsets = st.integers(0, 63)
"""Which indices of a batch to run, as a bit mask."""


class TierStates(RuleBasedStateMachine):
    """Reads, writes, discards, damages, fills and reopens one tier, in any order.

    The model is the rig's: every version ever written under a key and not discarded since may be
    read back, nothing else. Open batches live across steps.
    """

    @staticmethod
    def make_harness() -> TierHarness:
        """A new harness, once an example; `tier_state_machine` supplies it."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.rig = TierRig(self.make_harness())
        self.spaces = [self.rig.namespace, self.rig.open_namespace(kit_namespace("other"))]
        self.opened: list[OpenBatch] = []
        self.num_fills = 0
        self.damaged: set[BlockKey] = set()
        """Blocks that may be held and damaged; while there are any, lookups promise nothing."""

    def chain(self, drawn: tuple[int, str, int, int]) -> KeyChain:
        """The drawn run of a chain."""
        space, path, start, stop = drawn
        chain = self.rig.chain(path, self.spaces[space])
        return chain.run(min(start, len(chain)), min(stop, len(chain)))

    def indices(self, opened: OpenBatch, subset: int) -> list[int]:
        """The indices of a batch that a bit mask names."""
        return [index for index in range(len(opened.batch)) if subset >> (index % 6) & 1]

    def read_alone(self, key: BlockKey) -> None:
        """Read one block; in one of the namespaces it is held."""
        for space in self.spaces:
            chain = replace(self.rig.chain("a", space), keys=(key,), parent=None)
            self.rig.read(chain)

    @rule(drawn=chains, version=versions)
    @bounded
    def write(self, drawn: tuple[int, str, int, int], version: int) -> None:
        chain = self.chain(drawn)
        outcomes = self.rig.write(chain, version)
        if not self.damaged:
            done = [outcome is Outcome.DONE for outcome in outcomes]
            assert held(self.rig, chain) == done, f"outcomes {outcomes}"
            self.rig.expect(chain.run(0, done.index(False) if False in done else len(done)))

    @rule(drawn=chains, version=versions, subset=subsets)
    @bounded
    def write_in_part(self, drawn: tuple[int, str, int, int], version: int, subset: int) -> None:
        opened = self.rig.begin_write(self.chain(drawn), version)
        opened.end(reversed(self.indices(opened, subset)))

    @rule(drawn=chains)
    @bounded
    def read(self, drawn: tuple[int, str, int, int]) -> None:
        chain = self.chain(drawn)
        num_held = self.rig.tier.lookup(chain.keys)
        outcomes = self.rig.read(chain)
        if not self.damaged:
            wanted = [Outcome.DONE] * num_held + [Outcome.MISS] * (len(chain) - num_held)
            assert outcomes == wanted, f"lookup() said {num_held}, read gave {outcomes}"

    @precondition(lambda self: len(self.opened) < MAX_OPEN)
    @rule(drawn=chains, version=st.none() | versions)
    @bounded
    def begin(self, drawn: tuple[int, str, int, int], version: int | None) -> None:
        chain = self.chain(drawn)
        read = version is None
        self.opened.append(
            self.rig.begin_read(chain) if read else self.rig.begin_write(chain, version or 0)
        )

    @precondition(lambda self: self.opened)
    @rule(which=st.integers(0, MAX_OPEN - 1), subset=subsets | st.just(63))
    @bounded
    def end(self, which: int, subset: int) -> None:
        opened = self.opened.pop(which % len(self.opened))
        opened.end(self.indices(opened, subset))

    @rule(drawn=chains)
    @bounded
    def discard(self, drawn: tuple[int, str, int, int]) -> None:
        chain = self.chain(drawn)
        num_blocks = bounded_stats(self.rig).num_blocks
        num_discarded = self.rig.discard(chain.keys)
        assert not any(held(self.rig, chain)), "discarded, but held"
        assert bounded_stats(self.rig).num_blocks == num_blocks - num_discarded

    @rule(drawn=chains)
    @bounded
    def touch(self, drawn: tuple[int, str, int, int]) -> None:
        self.rig.tier.touch(self.chain(drawn).keys)

    @rule(space=st.integers(0, 1))
    @bounded
    def discard_namespace(self, space: int) -> None:
        namespace = self.spaces[space].id
        self.rig.ledger.discard_namespace(namespace)
        self.rig.tier.discard_namespace(namespace)
        for path in _PATHS:
            assert not any(held(self.rig, self.rig.chain(path, self.spaces[space])))

    @rule(
        kind=st.sampled_from(Damage),
        victim=st.integers(0, 63),
        donor=st.integers(0, 63),
        read_at_once=st.booleans(),
    )
    @bounded
    def damage(self, kind: Damage, victim: int, donor: int, read_at_once: bool) -> None:
        unharmed = (key for key in self.rig.ledger.parents if key not in self.damaged)
        keys = [key for key in unharmed if self.rig.tier.lookup([key])]
        if kind in self.rig.harness.damages and len(keys) > 1:
            key = keys.pop(victim % len(keys))
            donor_key = keys[donor % len(keys)]
            self.rig.harness.damage(self.rig.tier, key, kind, donor_key)
            self.damaged.add(key)
            if read_at_once:
                self.read_alone(key)

    @rule()
    @bounded
    def verify(self) -> None:
        self.rig.tier.verify()
        report = self.rig.tier.verify()
        assert report.good, "verify() left damaged blocks behind"
        assert report.num_blocks == bounded_stats(self.rig).num_blocks
        self.damaged.clear()

    @rule(num_blocks=st.integers(1, 20))
    @bounded
    def fill(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self.num_fills += 1
            outcomes = self.rig.write(self.rig.chain([f"fill{self.num_fills}"]))
            assert self.opened or outcomes == [Outcome.DONE], "no room, though nothing is open"

    @precondition(lambda self: self.rig.harness.durable)
    @rule(ending=st.sampled_from(Ending), flushed=st.booleans())
    @bounded
    def reopen(self, ending: Ending, flushed: bool) -> None:
        if ending is Ending.CLOSE:
            while self.opened:
                self.end(0, 63)
        self.opened.clear()
        if flushed:
            self.rig.tier.flush()
        num_blocks = bounded_stats(self.rig).num_blocks
        self.rig.reopen(ending)
        if (flushed or ending is Ending.CLOSE) and not self.damaged:
            assert bounded_stats(self.rig).num_blocks == num_blocks, (
                "blocks were lost, or came back"
            )

    @invariant()
    @bounded
    def books_are_right(self) -> None:
        check_invariants(self.rig)
        check_books(self.rig)
        stats = self.rig.tier.stats()
        if stats.num_blocks == 0 and not self.opened:
            assert stats.used_nbytes == 0, "room is in use, but no block is held or being written"

    def teardown(self) -> None:
        while self.opened:
            self.end(0, 63)
        self.rig.close()


def tier_state_machine(
    make_harness: Callable[[], TierHarness], *, max_examples: int = 25, num_steps: int = 30
) -> type[TierStates]:
    """A state machine for the tiers of a harness; its `TestCase` is what a test module exports.

    `make_harness` is called once an example.
    """
    namespace: dict[str, Any] = {"make_harness": staticmethod(make_harness)}
    machine: type[TierStates] = type("TierStates", (TierStates,), namespace)
    machine.TestCase.settings = settings(
        max_examples=max_examples,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return machine
