"""Models of a few kilobytes, as config.json describes them."""

from __future__ import annotations

from importlib.util import find_spec

# What this module imports on its first lines.
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["test_kv_tensors.py"]
