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
from dataclasses import replace

import torch

from headstart.engines.vllm.copier import Copier
from headstart.engines.vllm.stats import Sums
from headstart.engines.vllm.step import Copy, StepMeta, WorkerMeta
from headstart.node.mapping import ArenaMapping

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
        num_batches: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`shard_start`: where in a block's slot this rank's bytes begin.

        `num_batches`: steps that are under way at once, so that those behind a step in which a load
        failed compute on the same lost blocks.
        """
        self.sums = Sums()
        self._mapping, self._copier, self._clock = mapping, copier, clock
        self._shard_start = shard_start
        self._block_nbytes = block_nbytes
        self._blocks_per_step = max(1, step_nbytes // block_nbytes)
        self._arena_boot = b""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pending: deque[tuple[Copy, torch.Tensor]] = deque()
        """What is left of loads between steps, and the arena they are from: it stays mapped, and as
        it is, when its node ends meanwhile."""
        self._received: set[str] = set()
        self._lost: set[int] = set()
        self._told = WorkerMeta()
        self._num_batches = num_batches
        self._num_tainted = 0
        """Steps, from this one on, that compute on blocks that could not be loaded."""

    def load(self, meta: StepMeta) -> None:
        """Copy what this step's forward pass reads, and a piece of what comes later."""
        self._begin(meta)
        started = self._clock()
        for load in meta.loads:
            if not self._load(load, self._arena_of(load.boot)):
                self._lost.update(block for block, _ in load.blocks)
                self._num_tainted = self._num_batches
            self._told.done[load.ticket] += 1
        self._pending.extend((load, self._arena_of(load.boot)) for load in meta.async_loads)
        self._load_a_piece()
        if meta.loads or meta.async_loads or self._told.loaded_nbytes:
            self._told.load_copy_s = self._clock() - started
            self.sums.add(load_copy_seconds=self._told.load_copy_s)
        if not meta.loads and meta.boot:
            self._arena_of(meta.boot)  # a new run of the node: be ready before it is needed

    def store(self, meta: StepMeta) -> None:
        """Copy what this step's forward pass completed."""
        if not meta.stores:
            return
        started = self._clock()
        for store in meta.stores:
            arena = self._arena_of(store.boot)
            if self._num_tainted or not self._copy(store, arena, self._copier.store):
                self._told.failed.add(store.ticket)
            self._told.done[store.ticket] += 1
        self._told.store_copy_s = self._clock() - started
        self.sums.add(store_copy_seconds=self._told.store_copy_s)

    def give_up(self, meta: StepMeta) -> None:
        """Report every load of a step, and what is left of others, as lost: all may be."""
        self._num_tainted = self._num_batches
        self._lost.update(meta.lost_blocks)
        self._received.update(meta.lost_requests)
        pending, self._pending = [load for load, _ in self._pending], deque()
        for load in (*meta.loads, *meta.async_loads, *pending):
            self._lost.update(block for block, _ in load.blocks)
            self._told.failed.add(load.ticket)
            self._told.done[load.ticket] = 1
        self._received.update(load.request_id for load in (*meta.async_loads, *pending))

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
        return taken if taken.number or taken.done or taken.failed else None

    def close(self) -> None:
        """Give the arena up."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()

    def _begin(self, meta: StepMeta) -> None:
        """A step begins; whatever it lost before it got here is lost."""
        self._told.number = meta.number
        self._num_tainted = self._num_batches if meta.lost_blocks else max(0, self._num_tainted - 1)
        self._lost.update(meta.lost_blocks)
        self._received.update(meta.lost_requests)

    def _load_a_piece(self) -> None:
        """Go on with loads between steps, as far as one step may take."""
        left = self._blocks_per_step
        while self._pending and left > 0:
            load, arena = self._pending[0]
            piece, rest = load.blocks[:left], load.blocks[left:]
            left -= len(piece)
            if not self._load(replace(load, blocks=piece), arena):
                self._lost.update(block for block, _ in load.blocks)
                rest = ()
            if rest:
                self._pending[0] = replace(load, blocks=rest), arena
            else:
                self._pending.popleft()
                self._told.done[load.ticket] += 1
                self._received.add(load.request_id)

    def _load(self, load: Copy, arena: torch.Tensor) -> bool:
        if not self._copy(load, arena, self._copier.load):
            return False
        self._told.loaded_nbytes += len(load.blocks) * self._block_nbytes
        return True

    def _copy(
        self,
        copy: Copy,
        arena: torch.Tensor,
        do: Callable[[list[tuple[int, int]], torch.Tensor], None],
    ) -> bool:
        if not len(arena):
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

    def _arena_of(self, boot: bytes) -> torch.Tensor:
        """The arena of a run of the node, empty when it is not there any more."""
        if boot == self._arena_boot:
            return self._arena
        if not boot:
            return torch.empty(0, dtype=torch.uint8)
        if boot != self._mapping.boot:
            self._arena_boot, self._arena = b"", torch.empty(0, dtype=torch.uint8)
            if not self._mapping.follow(boot):
                return self._arena
        self._arena = torch.frombuffer(self._mapping.memory, dtype=torch.uint8)
        self._arena_boot = boot
        return self._arena
