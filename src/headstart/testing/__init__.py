"""The public conformance kit: what every tier must pass, and tools to test what is built on tiers.

Needs the extra `testing` (pytest, hypothesis). To check a tier of your own, write a harness, which
makes tiers and knows how to damage a block on their medium behind their back (all of it is in
`TierHarness`; `DictHarness` is a complete example), and two lines of tests:

    class MyHarness:
        durable = True                      # blocks outlive the tier object
        capacity_blocks = 16                # blocks of BLOCK_NBYTES when full
        damages = frozenset({Damage.FLIP_PAYLOAD, Damage.ZERO})
        skips = {}                          # test name -> reason; at most MAX_SKIPS
        buffers = staticmethod(aligned_buffers)

        def __init__(self, root): ...
        def make(self): return MyTier(self.root, capacity_nbytes=...)
        def reopen(self, tier, ending): ... # CLOSE: tier.close(); KILL: open a copy of the medium
        def damage(self, tier, key, damage, donor): ...
        def close(self): ...

    class TestMyTier(TierContract):
        tier_class = MyTier

        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

    TestMyTierStates = tier_state_machine(lambda: MyHarness(tempfile.mkdtemp())).TestCase

A test that a harness cannot pass is skipped only when the harness declares it, with a reason that
`pytest -rs` shows. Every test is bounded in time: a tier that hangs fails. `conform` runs the
same tests without pytest's runner. `FaultyTier` and `CountingTier` wrap any tier.
"""

from __future__ import annotations

import pytest

# The groups below assert outside of test modules; this keeps pytest's explanations of failures.
pytest.register_assert_rewrite(
    *(
        f"headstart.testing.{module}"
        for module in (
            "checks",
            "contract_batches",
            "contract_damage",
            "contract_lifetime",
            "contract_prefixes",
            "contract_threads",
            "rig",
            "stateful",
        )
    )
)

from headstart.testing.contract import (  # noqa: E402
    CONTRACT_VERSION,
    Finding,
    Status,
    TierContract,
    conform,
    contract_tests,
)
from headstart.testing.dict_harness import DictHarness  # noqa: E402
from headstart.testing.dict_tier import DictTier  # noqa: E402
from headstart.testing.harness import (  # noqa: E402
    BLOCK_NBYTES,
    MAX_SKIPS,
    Damage,
    Ending,
    TierHarness,
    aligned_buffers,
    kit_namespace,
)
from headstart.testing.rig import TierRig  # noqa: E402
from headstart.testing.stateful import tier_state_machine  # noqa: E402
from headstart.tiers.faults import CountingTier, Fault, FaultyTier  # noqa: E402

__all__ = [
    "BLOCK_NBYTES",
    "CONTRACT_VERSION",
    "MAX_SKIPS",
    "CountingTier",
    "Damage",
    "DictHarness",
    "DictTier",
    "Ending",
    "Fault",
    "FaultyTier",
    "Finding",
    "Status",
    "TierContract",
    "TierHarness",
    "TierRig",
    "aligned_buffers",
    "conform",
    "contract_tests",
    "kit_namespace",
    "tier_state_machine",
]
