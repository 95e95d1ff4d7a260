"""Group of the tier contract: what happens to blocks that their medium damaged."""

from __future__ import annotations

import pytest

from headstart.testing.bounds import bounded_tests
from headstart.testing.checks import bounded_stats, check_books, check_closed, held
from headstart.testing.harness import Damage, Ending, kit_namespace
from headstart.testing.rig import TierRig
from headstart.types import Outcome

DONE = Outcome.DONE
GONE = {Outcome.DROPPED, Outcome.MISS}

every_damage = pytest.mark.parametrize("damage", list(Damage), ids=lambda kind: kind.name.lower())


def inflict(rig: TierRig, damage: Damage) -> None:
    """Store "abcd", "abxy" and "w", and damage the block at the end of "abc"."""
    if damage not in rig.harness.damages:
        pytest.skip(f"declared by the harness: cannot do {damage.name}")
    other = rig.open_namespace(kit_namespace("other"))
    rig.store(rig.chain("abcd"), rig.chain("abxy"), rig.chain("w"), rig.chain("o", other))
    donor = rig.chain("o", other) if damage is Damage.OTHER_NAMESPACE else rig.chain("w")
    rig.harness.damage(rig.tier, rig.chain("abc").keys[2], damage, donor.keys[0])


def expect_others(rig: TierRig, damage: Damage) -> None:
    """The blocks beside the damaged one and its descendant are unharmed."""
    if damage is not Damage.TRUNCATE:
        rig.expect(rig.chain("abxy"), rig.chain("w"))
        assert bounded_stats(rig).num_blocks == 6


@bounded_tests
class DamageTests:
    """A damaged block is a miss, counted, forgotten with its descendants; the rest is unharmed."""

    @every_damage
    def test_a_damaged_block_is_dropped(self, rig: TierRig, damage: Damage) -> None:
        inflict(rig, damage)
        outcomes = rig.read(rig.chain("abcd"))
        assert outcomes[2] in GONE, f"a damaged block came out {outcomes[2]}"
        if damage is not Damage.TRUNCATE:
            assert outcomes[:2] == [DONE, DONE]
        assert bounded_stats(rig).num_dropped >= 1
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        check_closed(rig)
        expect_others(rig, damage)

    @every_damage
    def test_a_damaged_block_read_alone_is_dropped(self, rig: TierRig, damage: Damage) -> None:
        inflict(rig, damage)
        assert rig.read(rig.chain("abc").run(2, 3))[0] in GONE
        assert bounded_stats(rig).num_dropped >= 1
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        expect_others(rig, damage)

    @every_damage
    def test_damage_after_a_read_began(self, rig: TierRig, damage: Damage) -> None:
        rig.store(rig.chain("abc"))
        opened = rig.begin_read(rig.chain("abc"))
        inflict(rig, damage)
        opened.end()
        rig.read(rig.chain("abcd"))
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        expect_others(rig, damage)

    @every_damage
    def test_two_readers_meet_one_damage(self, rig: TierRig, damage: Damage) -> None:
        inflict(rig, damage)
        reads = [rig.begin_read(rig.chain("abcd")) for _ in range(2)]
        for opened in reads:
            for index in range(len(opened.batch)):
                opened.batch.run(index)
        for opened in reads:
            assert opened.finish()[2] in GONE
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        expect_others(rig, damage)
        check_books(rig)

    @every_damage
    def test_a_dropped_block_is_stored_again(self, rig: TierRig, damage: Damage) -> None:
        inflict(rig, damage)
        rig.read(rig.chain("abcd"))
        rig.store(rig.chain("abcd"), rig.chain("w"), version=1)
        rig.expect(rig.chain("abcd"), rig.chain("w"))

    @every_damage
    def test_verify_finds_damage(self, rig: TierRig, damage: Damage) -> None:
        inflict(rig, damage)
        report = rig.tier.verify()
        assert not report.good
        assert report.num_damaged + report.num_failed >= 1
        assert bounded_stats(rig).num_dropped >= 1
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        expect_others(rig, damage)
        assert rig.tier.verify().good

    @every_damage
    def test_damage_before_reopening(self, rig: TierRig, damage: Damage) -> None:
        if not rig.harness.durable:
            pytest.skip("declared by the harness: not durable")
        inflict(rig, damage)
        rig.reopen(Ending.CLOSE)
        assert rig.read(rig.chain("abcd"))[2] in GONE
        assert held(rig, rig.chain("abcd"))[2:] == [False, False]
        check_closed(rig)
        expect_others(rig, damage)

    def test_verify_of_sound_blocks(self, rig: TierRig) -> None:
        assert rig.tier.verify().good
        rig.store(rig.chain("abcd"), rig.chain("w"))
        calls: list[tuple[int, int]] = []
        report = rig.tier.verify(lambda done, total: calls.append((done, total)))
        assert report.good
        assert (report.num_blocks, report.num_damaged, report.num_failed) == (5, 0, 0)
        assert report.seconds >= 0
        assert calls == sorted(calls)
        if rig.harness.damages:  # a medium that cannot be damaged need not be read
            assert report.read_nbytes >= 5 * rig.namespace.layout.block_nbytes
            assert calls[-1] == (5, 5)
        rig.expect(rig.chain("abcd"), rig.chain("w"))
