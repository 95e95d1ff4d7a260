"""A tier under test, with the memory and chains that the kit's tests need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import pytest

from headstart.keys import Namespace, keys_from_hashes
from headstart.testing.bounds import run_bounded
from headstart.testing.harness import Ending, TierHarness, kit_namespace
from headstart.testing.ledger import Ledger, check_block, payload
from headstart.tiers.base import Batch
from headstart.types import BlockKey, KeyChain, Outcome

_TARGET_FILL = b"\xa5"
_TAIL_FILL = b"\x5a"


class OpenBatch:
    """A begun batch, which checks what it returns. `version` is None for a read."""

    def __init__(
        self,
        ledger: Ledger,
        batch: Batch,
        chain: KeyChain,
        memory: list[memoryview],
        version: int | None = None,
    ) -> None:
        self.batch, self.chain, self.memory, self.version = batch, chain, memory, version
        self._ledger = ledger
        self._allowed_at_begin = ledger.allowed(chain)

    def end(self, indices: Iterable[int] | None = None) -> list[Outcome]:
        """Run these indices (all, in order, by default) and finish."""
        for index in range(len(self.batch)) if indices is None else indices:
            self.batch.run(index)
        return self.finish()

    def finish(self) -> list[Outcome]:
        """Finish; fails when a block that was read is DONE and not what was written."""
        outcomes = self.batch.finish()
        assert len(outcomes) == len(self.chain), "finish() owes one outcome a block"
        if self.version is not None:
            self._ledger.remember(self.chain, self.version)
            return outcomes
        for index, outcome in enumerate(outcomes):
            if outcome is Outcome.DONE:
                self.check_target(index)
        return outcomes

    def check_target(self, index: int) -> None:
        """Target `index` holds what could be held when the read began, or can be now."""
        versions = self._allowed_at_begin[index] | self._ledger.allowed(self.chain)[index]
        check_block(self.chain, index, self.memory[index], versions)


class TierRig:
    """A tier made by a harness, whose every answer is checked against what was written.

    The rig's `ledger` remembers every version of every block. Each read through the rig fails the
    test when an outcome is DONE and the bytes are not such a version, whatever else the test is
    about. Safe from several threads, except `discard*`, `reopen` and `close`.
    """

    def __init__(self, harness: TierHarness) -> None:
        self.harness = harness
        self.capacity = harness.capacity_blocks
        self.ledger = Ledger()
        self.tier = harness.make()
        self.namespace = kit_namespace()
        self.namespaces: list[Namespace] = []
        self.num_blocks_at_open = 0
        self.open_namespace(self.namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run_bounded([self.close])

    def close(self) -> None:
        """Close the tier and release its medium."""
        self.tier.close()
        self.harness.close()

    def open_namespace(self, namespace: Namespace) -> Namespace:
        """Make `namespace` known to the tier, now and after each `reopen`."""
        self.tier.open_namespace(namespace)
        self.namespaces.append(namespace)
        return namespace

    def reopen(self, ending: Ending) -> None:
        """End the tier and open its medium again. Skips the test when the tier is not durable."""
        if not self.harness.durable:
            pytest.skip("declared by the harness: not durable")
        self.tier = self.harness.reopen(self.tier, ending)
        for namespace in self.namespaces:
            self.tier.open_namespace(namespace)
        self.num_blocks_at_open = self.tier.stats().num_blocks
        if ending is Ending.KILL:
            self.ledger.restore()

    def chain(self, path: Sequence[str], namespace: Namespace | None = None) -> KeyChain:
        """The chain whose block i has the content `path[i]`: "abc" and "abd" share two blocks."""
        contents = [content.encode() for content in path]
        return keys_from_hashes(namespace or self.namespace, contents)

    def roots(self, num_chains: int, name: str = "root") -> list[KeyChain]:
        """Chains of one block each."""
        return [self.chain([f"{name}{index}"]) for index in range(num_chains)]

    def begin_read(self, chain: KeyChain) -> OpenBatch:
        """Begin a read of `chain` into memory filled with what is no block's content."""
        memory = self.harness.buffers(len(chain), chain.block_nbytes)
        for target in memory:
            target[:] = _TARGET_FILL * len(target)
        return OpenBatch(self.ledger, self.tier.begin_read(chain, memory), chain, memory)

    def begin_write(self, chain: KeyChain, version: int = 0) -> OpenBatch:
        """Begin a write of `version` of the blocks of `chain`, with rubbish past `block_nbytes`."""
        memory = self.harness.buffers(len(chain), chain.block_nbytes)
        for key, source in zip(chain, memory, strict=True):
            content = payload(chain.namespace, key, version, chain.block_nbytes)
            source[:] = content.ljust(len(source), _TAIL_FILL)
        self.ledger.remember(chain, version)
        batch = self.tier.begin_write(chain, memory)
        return OpenBatch(self.ledger, batch, chain, memory, version)

    def read(self, chain: KeyChain) -> list[Outcome]:
        """Read `chain`."""
        return self.begin_read(chain).end()

    def write(self, chain: KeyChain, version: int = 0) -> list[Outcome]:
        """Write `version` of the blocks of `chain`."""
        return self.begin_write(chain, version).end()

    def store(self, *chains: KeyChain, version: int = 0) -> None:
        """Write chains that must all be stored."""
        for chain in chains:
            outcomes = self.write(chain, version)
            assert set(outcomes) <= {Outcome.DONE}, f"wanted all stored, got {outcomes}"

    def expect(self, *chains: KeyChain) -> None:
        """Read chains that must all be held."""
        for chain in chains:
            outcomes = self.read(chain)
            assert set(outcomes) <= {Outcome.DONE}, f"wanted all held, got {outcomes}"

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """Discard; from now on a read of these blocks or their descendants must not be DONE."""
        self.ledger.discard(keys)
        return self.tier.discard(keys)
