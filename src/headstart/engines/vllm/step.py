"""What scheduler and workers tell each other in one step of the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Blocks to copy between the engine's KV cache and the arena."""

    ticket: int
    request_id: str
    boot: bytes
    """The run of the node whose arena the offsets are in."""
    blocks: tuple[tuple[int, int], ...]
    """(engine's block id, offset in the arena) of each."""


@dataclass(slots=True, kw_only=True)
class StepMeta(KVConnectorMetadata):
    """From the scheduler to every worker, each step."""

    number: int = 0
    """Which step this is."""
    boot: bytes = b""
    """The run of the node that the scheduler talks to: workers map its arena in time."""
    loads: list[Copy] = field(default_factory=list)
    """To be copied before this step's forward pass."""
    async_loads: list[Copy] = field(default_factory=list)
    """To be copied between steps."""
    stores: list[Copy] = field(default_factory=list)
    """To be copied after this step's forward pass."""
    lost_blocks: list[int] = field(default_factory=list)
    """Engine blocks that were promised and cannot be loaded."""
    lost_requests: list[str] = field(default_factory=list)
    """Requests that wait for a load between steps that will not come."""


@dataclass(slots=True, kw_only=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, with the output of each step."""

    number: int = 0
    """Of the step."""
    load_copy_s: float = 0.0
    """Spent on copies to the engine, by the worker that took longest."""
    store_copy_s: float = 0.0
    """Spent on copies from the engine, likewise."""
    loaded_nbytes: int = 0
    """Copied to the engine by all workers."""
    done: Counter[int] = field(default_factory=Counter)
    """Ticket -> number of workers that hold none of its addresses any more."""
    failed: set[int] = field(default_factory=set)
    """Tickets that some worker could not copy."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """What two workers tell, together."""
        assert isinstance(other, WorkerMeta)
        return WorkerMeta(
            number=max(self.number, other.number),
            load_copy_s=max(self.load_copy_s, other.load_copy_s),
            store_copy_s=max(self.store_copy_s, other.store_copy_s),
            loaded_nbytes=self.loaded_nbytes + other.loaded_nbytes,
            done=self.done + other.done,
            failed=self.failed | other.failed,
        )


@dataclass(slots=True, kw_only=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once: who it is to the node."""

    token: bytes
