"""A worker's half of the connector: copies between its KV cache and the node's arena.

All it is told comes with the step's metadata. A copy before the forward pass, one after it; larger
loads a piece a step. Whatever goes wrong is reported once: blocks that could not be loaded to the
engine, which computes them, and tickets to the scheduler's half.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

import torch

from headstart.engines.vllm.copier import Copier
from headstart.engines.vllm.stats import Sums
from headstart.engines.vllm.step import Copy, StepMeta, WorkerMeta
from headstart.node.client import ArenaMapping

_log = logging.getLogger(__name__)


class WorkerSide:
    """See the module. For the worker's thread."""

    def __init__(
        self,
        mapping: ArenaMapping,
        copier: Copier,
        *,
        shard_start: int,
        block_nbytes: int,
        step_nbytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`shard_start`: where in a block's slot this rank's bytes begin."""
        self.sums = Sums()
        self._mapping, self._copier, self._clock = mapping, copier, clock
        self._shard_start = shard_start
        self._blocks_per_step = max(1, step_nbytes // block_nbytes)
        self._arena_boot = b""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pending: deque[tuple[Copy, bytes]] = deque()
        """Loads between steps, with the run of the node that they are of."""
        self._received: set[str] = set()
        self._lost: set[int] = set()
        self._told = WorkerMeta()
        self._is_tainted = False
        """Whether this step computed on blocks that could not be loaded."""

    def load(self, meta: StepMeta) -> None:
        """Copy what this step's forward pass reads, and a piece of what comes later."""
        self._is_tainted = bool(meta.lost_blocks)
        self._lost.update(meta.lost_blocks)
        started = self._clock()
        for load in meta.loads:
            if not self._copy(load, meta.boot, self._copier.load):
                self._lost.update(block for block, _ in load.blocks)
                self._is_tainted = True
            self._told.done[load.ticket] += 1
        self._pending.extend((load, meta.boot) for load in meta.async_loads)
        self._load_a_piece()
        if meta.loads or meta.async_loads:
            self.sums.add(load_copy_seconds=self._clock() - started)
        if not meta.loads and meta.boot:
            self._arena_of(meta.boot)  # a new run of the node: be ready before it is needed

    def store(self, meta: StepMeta) -> None:
        """Copy what this step's forward pass completed."""
        if not meta.stores:
            return
        started = self._clock()
        for store in meta.stores:
            if self._is_tainted or not self._copy(store, meta.boot, self._copier.store):
                self._told.failed.add(store.ticket)
            self._told.done[store.ticket] += 1
        self.sums.add(store_copy_seconds=self._clock() - started)

    def give_up(self, meta: StepMeta) -> None:
        """Report every load of a step as lost: some may not have been copied."""
        self._is_tainted = True
        self._lost.update(meta.lost_blocks)
        for load in meta.loads:
            self._lost.update(block for block, _ in load.blocks)
            self._told.failed.add(load.ticket)
            self._told.done[load.ticket] = 1
        started = {load.ticket for load, _ in self._pending}
        for load in meta.async_loads:
            if load.ticket not in started and load.request_id not in self._received:
                self._lost.update(block for block, _ in load.blocks)
                self._told.failed.add(load.ticket)
                self._told.done[load.ticket] = 1
                self._received.add(load.request_id)

    def take_received(self) -> set[str]:
        """Requests whose load between steps is over, each told once."""
        taken, self._received = self._received, set()
        return taken

    def take_lost_blocks(self) -> set[int]:
        """Engine blocks that could not be loaded, each told once."""
        taken, self._lost = self._lost, set()
        return taken

    def take_meta(self) -> WorkerMeta | None:
        """What the scheduler's half must know."""
        taken, self._told = self._told, WorkerMeta(done=Counter())
        return taken if taken.done or taken.failed else None

    def close(self) -> None:
        """Give the arena up."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()

    def _load_a_piece(self) -> None:
        """Go on with loads between steps, as far as one step may take."""
        left = self._blocks_per_step
        while self._pending and left > 0:
            load, boot = self._pending.popleft()
            piece, rest = load.blocks[:left], load.blocks[left:]
            left -= len(piece)
            good = self._copy(
                Copy(ticket=load.ticket, request_id=load.request_id, blocks=piece),
                boot,
                self._copier.load,
            )
            if not good:
                self._lost.update(block for block, _ in load.blocks)
                rest = ()
            if rest:
                later = Copy(ticket=load.ticket, request_id=load.request_id, blocks=rest)
                self._pending.appendleft((later, boot))
            else:
                self._told.done[load.ticket] += 1
                self._received.add(load.request_id)

    def _copy(
        self,
        copy: Copy,
        boot: bytes,
        do: Callable[[list[tuple[int, int]], torch.Tensor], None],
    ) -> bool:
        arena = self._arena_of(boot)
        if arena is None:
            _log.warning("the node's memory is not mapped: %d blocks", len(copy.blocks))
            self._told.failed.add(copy.ticket)
            return False
        try:
            do([(block, offset + self._shard_start) for block, offset in copy.blocks], arena)
        except (RuntimeError, IndexError, ValueError):
            _log.exception("a copy of %d blocks failed", len(copy.blocks))
            self._told.failed.add(copy.ticket)
            return False
        return True

    def _arena_of(self, boot: bytes) -> torch.Tensor | None:
        """The arena of a run of the node, None when it is not there any more."""
        if boot and boot == self._arena_boot:
            return self._arena
        if boot != self._mapping.boot:
            self._arena_boot, self._arena = b"", torch.empty(0, dtype=torch.uint8)
            if not self._mapping.follow(boot):
                return None
        self._arena = torch.frombuffer(self._mapping.memory, dtype=torch.uint8)
        self._arena_boot = boot
        return self._arena
