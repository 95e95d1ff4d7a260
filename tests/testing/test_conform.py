"""`conform`, declared skips, and the state machine against broken tiers."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headstart.testing import (
    DictHarness,
    DictTier,
    Status,
    TierContract,
    conform,
    contract_tests,
    tier_state_machine,
)
from headstart.testing.dict_tier import Books, DictWrite


class Unchecked(DictTier):
    class books_type(Books):
        def is_sound(self, key, entry):
            return True


class PublishesUnwritten(DictTier):
    class write_type(DictWrite):
        def finish(self):
            blank = bytes(self.chain.block_nbytes)
            self.data = [blank if data is None else data for data in self.data]
            return super().finish()


class EvictsRoots(DictTier):
    class books_type(Books):
        def victim(self):
            return next((key for key, entry in self.entries.items() if not entry.pins), None)

        def forget(self, keys, count):
            if count != "num_evicted":
                return super().forget(keys, count)
            for key in keys:
                self.release(self.entries.pop(key).nbytes)
                self.counts[count] += 1
            return len(keys)


class LosesRoom(DictTier):
    class write_type(DictWrite):
        def finish(self):
            self.reserved = {index for index in self.reserved if self.data[index] is not None}
            return super().finish()


class Hangs(DictTier):
    def flush(self):
        time.sleep(3600)


def test_conform_finds_nothing_in_a_sound_tier():
    findings = conform(DictHarness)
    assert {each.status for each in findings} == {Status.PASSED}, findings
    assert {each.test.partition("[")[0] for each in findings} == set(contract_tests())
    assert len(contract_tests()) >= 70


def test_conform_stops_at_the_first_failure():
    findings = conform(partial(DictHarness, Unchecked), first_failure=True)
    assert [each.status for each in findings].count(Status.FAILED) == 1
    assert findings[-1].status is Status.FAILED


class SkippingHarness(DictHarness):
    skips = {"test_round_trip": "this medium has no round trips"}  # noqa: RUF012


class BoundlesslySkippingHarness(DictHarness):
    skips = dict.fromkeys(contract_tests(), "rather not, thank you")
    skips.pop("test_the_harness_is_honest")


def test_a_declared_skip_is_visible():
    findings = conform(SkippingHarness, only=["test_round_trip", "test_the_harness_is_honest"])
    status = {each.test: each.status for each in findings}
    assert status == {
        "test_round_trip": Status.SKIPPED,
        "test_the_harness_is_honest": Status.PASSED,
    }
    assert "no round trips" in findings[0].detail


def test_a_tier_cannot_pass_by_skipping():
    findings = conform(BoundlesslySkippingHarness)
    assert [each.test for each in findings if each.status is Status.FAILED] == [
        "test_the_harness_is_honest"
    ]


class VolatileHarness(DictHarness):
    durable = False
    damages = frozenset()


def test_a_volatile_tier_skips_what_needs_a_medium():
    findings = conform(VolatileHarness)
    assert {each.status for each in findings} == {Status.PASSED, Status.SKIPPED}
    skipped = {each.detail for each in findings if each.status is Status.SKIPPED}
    assert all(detail.startswith("declared by the harness") for detail in skipped)


def test_a_contract_needs_a_harness():
    assert "harness" in vars(TierContract)


@pytest.mark.parametrize("mutant", [Unchecked, PublishesUnwritten, EvictsRoots, LosesRoom])
def test_the_state_machine_catches(mutant):
    machine = tier_state_machine(partial(DictHarness, mutant))
    quick = settings(
        machine.TestCase.settings,
        max_examples=100,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        print_blob=False,
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=quick)


def test_a_tier_that_hangs_fails(monkeypatch):
    monkeypatch.setattr("headstart.testing.bounds.TEST_TIMEOUT_S", 0.2)
    findings = conform(partial(DictHarness, Hangs), only=["test_flush_changes_nothing"])
    assert [each.status for each in findings] == [Status.FAILED]
    assert "TimeoutError" in findings[0].detail
