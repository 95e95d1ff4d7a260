"""What all tests share: no network, hypothesis profiles, and which tests can run here."""

from __future__ import annotations

import os

# Before anything imports transformers, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# A developer's own settings must not reach the tests.
for _name in [name for name in os.environ if name.startswith("HEADSTART_")]:
    del os.environ[_name]

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=30, deadline=None)
# CI must give the same answer for the same commit; `dev` and `soak` look further every time.
settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, print_blob=True, database=None
)
settings.register_profile(
    "soak", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_ENGINE_PACKAGES = ("torch", "transformers", "gguf", "accelerate")


def pytest_collection_modifyitems(items):
    """Skip, with the reason, what cannot run on this machine."""
    missing = [name for name in _ENGINE_PACKAGES if find_spec(name) is None]
    skip_engine = pytest.mark.skip(reason=f"not installed: {', '.join(missing)}")
    skip_root = pytest.mark.skip(reason="needs the superuser")
    for item in items:
        if missing and item.get_closest_marker("engine"):
            item.add_marker(skip_engine)
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(skip_root)
