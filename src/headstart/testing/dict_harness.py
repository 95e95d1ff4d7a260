"""The harness of `DictTier`: an example of how to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from headstart.testing.dict_tier import DictTier, Entry
from headstart.testing.harness import BLOCK_NBYTES, Damage, Ending, aligned_buffers
from headstart.tiers.base import Tier
from headstart.types import BlockKey


class DictHarness:
    """Makes `DictTier`s and edits their entries, which are their medium."""

    durable = True
    capacity_blocks = 16
    damages = frozenset(Damage)
    skips: Mapping[str, str] = MappingProxyType({})
    buffers = staticmethod(aligned_buffers)

    def __init__(self, tier_class: Callable[..., DictTier] = DictTier) -> None:
        self._tier_class = tier_class

    def make(self) -> Tier:
        return self._open({})

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        if ending is Ending.CLOSE:
            tier.close()
        entries = (
            self._tier.books.entries
        )  # copied, because a killed tier may still have open batches
        return self._open({key: replace(entry, pins=0) for key, entry in entries.items()})

    def damage(self, tier: Tier, key: BlockKey, damage: Damage, donor: BlockKey) -> None:
        entries = self._tier.books.entries
        entry, other = entries[key], entries[donor]
        match damage:
            case Damage.FLIP_PAYLOAD:
                entry.data = bytes([entry.data[0] ^ 1]) + entry.data[1:]
            case Damage.FLIP_HEADER:
                entry.checksum = bytes([entry.checksum[0] ^ 1]) + entry.checksum[1:]
            case Damage.ZERO:
                entry.data, entry.checksum = bytes(len(entry.data)), bytes(len(entry.checksum))
            case Damage.TRUNCATE:
                entry.data = entry.data[:-1]
            case Damage.OTHER_KEY | Damage.OTHER_NAMESPACE:
                entry.data, entry.checksum = other.data, other.checksum

    def _open(self, medium: dict[BlockKey, Entry]) -> Tier:
        capacity_nbytes = self.capacity_blocks * BLOCK_NBYTES
        self._tier = self._tier_class(capacity_nbytes=capacity_nbytes, medium=medium)
        return self._tier

    def close(self) -> None:
        pass
