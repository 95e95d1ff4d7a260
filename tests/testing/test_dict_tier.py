"""The kit's own example tier passes the whole kit, bare and wrapped."""

from __future__ import annotations

import pytest

from headstart.testing import (
    CountingTier,
    Damage,
    DictHarness,
    DictTier,
    Ending,
    FaultyTier,
    TierContract,
    TierHarness,
    tier_state_machine,
)
from headstart.tiers.base import Tier
from headstart.types import BlockKey


class TestDictTier(TierContract):
    tier_class = DictTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return DictHarness()


class WrappedHarness(DictHarness):
    """`DictTier`s inside both wrappers, which must not show."""

    def make(self) -> Tier:
        return FaultyTier(CountingTier(super().make()))

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        return FaultyTier(CountingTier(super().reopen(tier, ending)))

    def damage(self, tier: Tier, key: BlockKey, damage: Damage, donor: BlockKey) -> None:
        assert isinstance(tier, FaultyTier)
        super().damage(tier.inner, key, damage, donor)


class CountedHarness(DictHarness):
    """The dictionary, counted."""

    def make(self) -> Tier:
        return CountingTier(super().make())

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        return CountingTier(super().reopen(tier, ending))


class TestCountingTier(TierContract):
    tier_class = CountingTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return CountedHarness()


class TestFaultyTier(TierContract):
    tier_class = FaultyTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return WrappedHarness()


TestDictTierStates = tier_state_machine(DictHarness, max_examples=40).TestCase
