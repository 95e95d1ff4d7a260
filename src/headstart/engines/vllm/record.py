"""One request, as the scheduler's half of the connector follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headstart.engines.vllm.shape import BlockShape
from headstart.keys import next_keys
from headstart.node.promise import Promise
from headstart.node.protocol import Claimed
from headstart.types import BlockKey, KeyChain, NamespaceId


@dataclass(slots=True, eq=False)
class Record:
    """Its keys, its promise of held blocks, how far it is stored, and what to tell about it."""

    request: Any
    """vLLM's request."""
    namespace: NamespaceId
    shape: BlockShape
    keys: list[BlockKey] = field(default_factory=list)
    promise: Promise | None = None
    claimed: Claimed | None = None
    boot: bytes = b""
    """The run of the node that gave the claim."""
    is_async: bool = False
    """Whether the claim was answered as a load between steps."""
    num_local: int = 0
    """Tokens that the engine's own cache had when the claim was made."""
    is_shipped: bool = False
    """Whether workers have, or will have, the claim's addresses."""
    num_preemptions: int = 0
    arrived: int = 0
    """Requests before it have smaller numbers."""
    found: Promise | None = None
    """What the node said when it came, also after the promise itself is gone."""
    promoted_at: float = 0.0
    polled_at: float = 0.0
    """The first time since it was promoted; 0: never."""
    seen_at: float = 0.0
    seen_busy_s: float = 0.0
    exposed_s: float = 0.0
    """How much later than at once it is computed, since it waited."""
    moved_at: float = 0.0
    progress: tuple[int, int] = (0, 0)
    may_load: bool = True
    is_shadow: bool = False
    """Whether it loads nothing only to check what is predicted."""
    waited_s: float = 0.0
    """Until it was first claimed: later it waits for room in the engine."""
    has_claimed: bool = False
    is_leaving: bool = False
    """Whether it waits no longer, and those before it have still to say what they do."""
    is_judged: bool = False
    scheduled_at: float = 0.0
    """When the first step that computes it was; 0: none yet."""
    next_store: int = 0
    """Blocks before this one are stored, or on their way."""
    num_storing: int = 0
    """Stores that workers have not acknowledged."""
    retry_store_at: float = 0.0
    num_restarts: int = 0
    """How often the tiers lost what its blocks continue."""
    told: dict[str, Any] = field(default_factory=dict)
    """What becomes the request's `kv_transfer_params`."""

    def extend(self) -> None:
        """Make the keys of blocks that have got a hash since."""
        hashes = self.request.block_hashes
        known = len(self.keys)
        if len(hashes) > known:
            above = self.keys[-1] if known else self.namespace
            self.keys += next_keys(above, hashes[known:])

    def chain(self, start: int, stop: int) -> KeyChain:
        """Blocks `[start, stop)`."""
        return KeyChain(
            namespace=self.namespace,
            block_nbytes=self.shape.block_nbytes,
            keys=tuple(self.keys[start:stop]),
            parent=self.keys[start - 1] if start else None,
        )

    def tokens(self, num_blocks: int) -> int:
        """Tokens that so many blocks are worth: the last one of a request is always computed."""
        return min(num_blocks * self.shape.block_size, int(self.request.num_tokens) - 1)

    def see(self, progress: tuple[int, int], now: float, busy_s: float) -> None:
        """A poll found its promotion so far; the engine has been busy for so long in all.

        While the engine computed for others, this request could not have been computed either.
        """
        if not self.polled_at:
            self.polled_at = self.moved_at = self.seen_at = now
            self.seen_busy_s = busy_s
        if progress != self.progress:
            self.progress, self.moved_at = progress, now
        self.exposed_s += max(0.0, now - self.seen_at - (busy_s - self.seen_busy_s))
        self.seen_at, self.seen_busy_s = now, busy_s

    def promised(self, promise: Promise) -> None:
        """The node has answered."""
        if promise.is_late:
            self.told["outcome"] = "late look-up"
            return
        self.is_leaving = False
        self.next_store = promise.num_kept
        self.told["held_tokens"] = promise.num_held * self.shape.block_size
        if promise.plan is not None and promise.num_held:
            self.told["reason"] = promise.plan.reason
        if promise.ticket is not None:
            self.promise = promise
        elif promise.num_held and promise.plan is not None:
            self.told["outcome"] = "declined"

    def claim(self, claimed: Claimed, boot: bytes) -> None:
        """The node's run `boot` keeps what is ready until workers have copied it."""
        self.claimed, self.boot, self.has_claimed = claimed, boot, True
        self.told["waited_s"] = round(self.waited_s, 6)

    def unclaim(self) -> None:
        """No admission followed the claim."""
        self.claimed = None
        if self.promise is not None:
            self.promise.unclaim()

    def end(self, outcome: str) -> None:
        """Nothing more comes of its promise."""
        self.told["outcome"] = outcome
        self.drop()

    def drop(self) -> None:
        """Give the promise back."""
        if self.promise is not None:
            self.promise.release()
        self.promise = self.claimed = None

    def tell_load(self, first: int, last: int, num_external: int) -> None:
        """Note that blocks `[first, last)` are loaded, and from which tiers, as they are read."""
        assert self.claimed is not None
        by_tier: dict[str, int] = {}
        start = 0
        for tier, count in self.claimed.by_tier.items():
            blocks = max(0, min(last, start + count) - max(first, start))
            if blocks:
                by_tier[tier] = blocks * self.shape.block_size
            start += count
        surplus = sum(by_tier.values()) - num_external  # the last token is computed
        if by_tier:
            by_tier[next(reversed(by_tier))] -= surplus
        self.told |= {
            "outcome": "hit",
            "local_tokens": self.num_local,
            "loaded_tokens": num_external,
            "loaded_tokens_by_tier": by_tier,
            "read_s": round(self.claimed.read_s, 6),
        }
