"""What an engine's half of Headstart counts: sums that only grow, taken away each step."""

from __future__ import annotations

TIER_TOKENS = "tokens_"
"""Start of the names that count loaded tokens by tier."""

COUNTERS = {
    "lookups": "Prompts looked up at the node.",
    "lookups_late": "Look-ups that took longer than their budget: misses.",
    "hits": "Requests that loaded tokens.",
    "load_bytes": "Bytes of the blocks loaded.",
    "loads_late": "Requests that stopped waiting and took what was ready.",
    "loads_failed": "Loads that a worker could not copy; their tokens were recomputed.",
    "wait_seconds": "Time that requests with a hit waited for reads; vLLM counts it as queue time.",
    "read_seconds": "Time that the node read for requests with a hit, part of it before any wait.",
    "load_copy_seconds": "Time that workers copied before a forward; vLLM counts it as prefill.",
    "store_copy_seconds": "Time that workers copied after a forward.",
    "store_blocks": "Blocks given to the node.",
    "store_bytes": "Their bytes.",
    "store_blocks_refused": "Blocks for which the node's memory had no room.",
    "stores_failed": "Stores that a worker could not copy.",
    "hook_errors": "Errors in the connector, each logged; what they touched was recomputed.",
}


class Sums:
    """Named sums. For one thread."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, **numbers: float) -> None:
        """Add to sums by name."""
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0) + number

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        taken, self._sums = self._sums, {}
        return taken
