"""`TierContract`, the tests that every tier must pass; `conform`, the same outside pytest."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import product
from typing import Any, ClassVar

import pytest

from headstart.testing.bounds import run_bounded
from headstart.testing.checks import check_invariants
from headstart.testing.contract_batches import BatchTests
from headstart.testing.contract_damage import DamageTests
from headstart.testing.contract_lifetime import LifetimeTests
from headstart.testing.contract_prefixes import PrefixTests
from headstart.testing.contract_threads import ThreadTests
from headstart.testing.harness import TierHarness
from headstart.testing.rig import TierRig

CONTRACT_VERSION = 1
"""Raised whenever a tier that passed could fail."""


class TierContract(BatchTests, PrefixTests, DamageTests, LifetimeTests, ThreadTests):
    """Subclass it in a test module, name `tier_class`, and supply a `harness` fixture."""

    tier_class: ClassVar[type]
    """The tier under test; how a registry of tiers finds the test of each."""

    @pytest.fixture
    def harness(self) -> TierHarness:
        """The harness of one test. To be overridden."""
        raise NotImplementedError(f"{type(self).__name__} needs a `harness` fixture")

    @pytest.fixture
    def rig(self, harness: TierHarness, request: pytest.FixtureRequest) -> Iterator[TierRig]:
        """A new tier of the harness. Skips what the harness declares, with its reason."""
        _skip_if_declared(harness, request.function.__name__)
        with TierRig(harness) as rig:
            yield rig
            run_bounded([partial(check_invariants, rig)])


class Status(Enum):
    """What became of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one test of the contract."""

    test: str
    """Name, and in brackets the parameter."""
    status: Status
    detail: str = ""
    """Why it was skipped, or the traceback."""


def conform(
    make_harness: Callable[[], TierHarness],
    *,
    contract: type[TierContract] = TierContract,
    only: Collection[str] = (),
    first_failure: bool = False,
) -> list[Finding]:
    """Run the contract in this process, without pytest's runner.

    `make_harness` is called once a test. `only` names the tests to run (all when empty);
    `first_failure` stops there. Every test is bounded in time, so this returns.
    """
    findings: list[Finding] = []
    for name, function in contract_tests(contract).items():
        if only and name not in only:
            continue
        for parameters in _parameters(function):
            finding = _run(make_harness(), contract(), name, parameters)
            findings.append(finding)
            if first_failure and finding.status is Status.FAILED:
                return findings
    return findings


def contract_tests(contract: type[TierContract] = TierContract) -> dict[str, Callable[..., None]]:
    """The tests of a contract, in the order in which their groups are read."""
    tests: dict[str, Callable[..., None]] = {}
    for group in contract.__mro__:
        tests |= {name: getattr(contract, name) for name in vars(group) if name.startswith("test_")}
    return tests


def _run(
    harness: TierHarness, contract: TierContract, name: str, parameters: dict[str, Any]
) -> Finding:
    values = [getattr(value, "name", str(value)).lower() for value in parameters.values()]
    test = f"{name}[{'-'.join(values)}]" if values else name
    try:
        _skip_if_declared(harness, name)
        with TierRig(harness) as rig:
            getattr(contract, name)(rig, **parameters)
            run_bounded([partial(check_invariants, rig)])
    except pytest.skip.Exception as reason:
        return Finding(test=test, status=Status.SKIPPED, detail=str(reason))
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever a tier raises is the finding
        return Finding(test=test, status=Status.FAILED, detail=traceback.format_exc())
    return Finding(test=test, status=Status.PASSED)


def _parameters(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of each run that `pytest.mark.parametrize` asks for."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]
    for values in product(*(mark.args[1] for mark in marks)):
        yield dict(zip(names, values, strict=True))


def _skip_if_declared(harness: TierHarness, test: str) -> None:
    if test in harness.skips:
        pytest.skip(f"declared by the harness: {harness.skips[test]}")
