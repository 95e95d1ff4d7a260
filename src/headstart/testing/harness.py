"""What the conformance kit needs to know about a tier: `TierHarness`, `Damage`, `Ending`."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from headstart.keys import BlockLayout, Namespace
from headstart.tiers.base import Tier
from headstart.types import BlockKey
from headstart.units import align_up

BLOCK_NBYTES = 8192
"""Block size of the kit: two pages."""

ODD_BLOCK_NBYTES = 5000
"""A second block size that is no multiple of a page, a sector or a word of 16 bytes."""

MIN_CAPACITY_BLOCKS = 8
MAX_SKIPS = 4
"""A harness that must skip more than this describes something that is not a tier."""


class Damage(Enum):
    """One way in which a medium betrays a block. The values name what is done to its bytes."""

    FLIP_PAYLOAD = "one bit of the payload flipped"
    FLIP_HEADER = "one bit of the header flipped"
    ZERO = "header and payload zeroed"
    TRUNCATE = "the medium cut off inside the block"
    """The only kind that may harm other blocks of the medium too."""
    OTHER_KEY = "the whole block, header included, of another key copied over it"
    OTHER_NAMESPACE = "the whole block, header included, of another namespace copied over it"


class Ending(Enum):
    """How a tier ends before its medium is opened again."""

    CLOSE = "close() was called"
    KILL = "the process was killed: nothing was called"


class TierHarness(Protocol):
    """Makes tiers for the kit, and knows their medium well enough to harm it.

    One harness serves one test. All its methods are called from the test's own thread.
    """

    @property
    def durable(self) -> bool:
        """Blocks outlive the tier object: `reopen` works."""

    @property
    def capacity_blocks(self) -> int:
        """How many blocks of `BLOCK_NBYTES` the tier holds when it is full of them; no more fit.

        At least `MIN_CAPACITY_BLOCKS`; 16 is a good choice, because tests fill the tier thrice.
        """

    @property
    def damages(self) -> frozenset[Damage]:
        """The kinds of damage that `damage` can do and the tier must find."""

    @property
    def skips(self) -> Mapping[str, str]:
        """Tests this tier cannot pass: name to reason (`pytest -rs`); at most `MAX_SKIPS`."""

    def make(self) -> Tier:
        """A new, empty tier. Called once."""

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        """End `tier` in this way and open its medium again. Only called when `durable`.

        For KILL call no method of `tier` that could tidy up. Where it owns a lock, open a copy of
        the medium instead, as it is at this moment.
        """

    def damage(self, tier: Tier, key: BlockKey, damage: Damage, donor: BlockKey) -> None:
        """Damage the held block `key` on the medium, behind the tier's back.

        Only called with kinds in `damages`. `donor` is another held block of the same size, for
        the kinds that copy one. Must use no method that the tier itself reads or writes with.
        """

    def buffers(self, num_blocks: int, block_nbytes: int) -> list[memoryview]:
        """Writable memory for blocks, each page aligned and `align_up(block_nbytes)` long.

        `aligned_buffers` does this; a tier that needs registered memory supplies its own.
        """

    def close(self) -> None:
        """Release the medium. The tier was closed before."""


def aligned_buffers(num_blocks: int, block_nbytes: int) -> list[memoryview]:
    """Anonymous memory for `num_blocks` blocks, adjacent, each starting at a page boundary."""
    stride = align_up(block_nbytes)
    if num_blocks == 0:
        return []
    memory = memoryview(mmap.mmap(-1, num_blocks * stride))
    return [memory[start : start + stride] for start in range(0, num_blocks * stride, stride)]


def kit_namespace(model: str = "kit", block_nbytes: int = BLOCK_NBYTES) -> Namespace:
    """A namespace of the kit, of opaque blocks of this size."""
    layout = BlockLayout(block_size=16, axes="byte", shape=(block_nbytes,), dtype="uint8")
    return Namespace(model=model, weights="none", layout=layout)
