"""Every tier of the package has a test class of the contract: none is used that was not judged."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import headstart.tiers
from headstart.tiers.base import Tier

TESTS = Path(__file__).resolve().parent.parent

EXEMPT: dict[str, str] = {}
"""Tiers without a contract test: name to reason, with the number of the issue that ends it."""

MEMBERS = [name for name in vars(Tier) if not name.startswith("_")]


def tiers_in(module) -> Iterator[type]:
    """The public classes defined in a module that have every member of `Tier`."""
    for name, value in inspect.getmembers(module, inspect.isclass):
        defined_here = value.__module__ == module.__name__ and value is not Tier
        complete = all(hasattr(value, member) for member in MEMBERS)
        if defined_here and complete and not name.startswith("_"):
            yield value


def all_tiers() -> set[str]:
    """Names of all tiers in `headstart.tiers`."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(headstart.tiers.__path__, "headstart.tiers.")
    ]
    return {tier.__name__ for module in modules for tier in tiers_in(module)}


def judged_in(source: str) -> Iterator[str]:
    """The `tier_class` of every collected subclass of `TierContract` in a test module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or not node.name.startswith("Test"):
            continue
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        if "TierContract" not in bases:
            continue
        for statement in node.body:
            if (
                isinstance(statement, ast.Assign)
                and ast.unparse(statement.targets[0]) == "tier_class"
            ):
                yield ast.unparse(statement.value).rpartition(".")[2]


def judged_tiers() -> set[str]:
    """Names of all tiers that a test module of this project judges."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    return {name for source in sources if "TierContract" in source for name in judged_in(source)}


def test_every_tier_is_judged():
    tiers = all_tiers()
    assert {"MemoryTier", "FileTier"} <= tiers, f"not found among {sorted(tiers)}"
    missing = tiers - judged_tiers() - set(EXEMPT)
    assert not missing, f"no subclass of TierContract has tier_class = {' or '.join(missing)}"


def test_exemptions_are_needed_and_give_a_reason():
    assert set(EXEMPT) <= all_tiers() - judged_tiers()
    assert all("#" in reason for reason in EXEMPT.values())


def test_the_gate_sees_tiers_and_contracts():
    testing = importlib.import_module("headstart.testing.dict_tier")
    assert [tier.__name__ for tier in tiers_in(testing)] == ["DictTier"]
    assert {"DictTier", "FaultyTier"} <= judged_tiers()
    text = (
        "class TestX(TierContract):\n    tier_class = X\nclass Y(TierContract):\n    tier_class = Y"
    )
    assert list(judged_in(text)) == ["X"]
    assert list(judged_in("class TestX(Other):\n    tier_class = X")) == []
