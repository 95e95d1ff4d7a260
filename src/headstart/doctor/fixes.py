"""Which fixes apply to the engine and version that was told. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headstart.doctor.facts import Known
from headstart.doctor.findings import Fix

_NAMES = {
    "vllm": "vLLM", "sglang": "SGLang", "lmcache": "LMCache", "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp", "mooncake": "Mooncake", "tgi": "TGI",
}  # fmt: skip
_SHORT = {"trt-llm": "tensorrt-llm", "trtllm": "tensorrt-llm", "llamacpp": "llama.cpp"}


def choose(known: Known, fixes: Sequence[Fix]) -> tuple[str, ...]:
    """What to change, the fixes for this engine and its cache layer first.

    Where the engine is not known, those of every engine are given, each with its name.
    """
    told = {
        _SHORT.get(name, name): known.top.text(f"{key}_version")
        for key, name in (("engine", known.engine), ("connector", known.connector))
        if name
    }
    own: list[str] = []
    general: list[str] = []
    for fix in fixes:
        if not fix.engine:
            general.append(fix.text)
        elif fix.engine in told:
            if _applies(fix, told[fix.engine]):
                own.append(f"{_NAMES.get(fix.engine, fix.engine)}: {fix.text}{_versions(fix)}")
        elif not known.engine:
            own.append(f"{_NAMES.get(fix.engine, fix.engine)}: {fix.text}{_versions(fix)}")
    return tuple(dict.fromkeys((*own, *general)))


def _applies(fix: Fix, version: str) -> bool:
    number = _number(version)
    if not number:
        return True
    return not (fix.since and number < _number(fix.since)) and not (
        fix.before and number >= _number(fix.before)
    )


def _versions(fix: Fix) -> str:
    since = f"from {fix.since}" if fix.since else ""
    before = f"before {fix.before}" if fix.before else ""
    return f" ({' and '.join(filter(None, (since, before)))})" if since or before else ""


def _number(version: str) -> tuple[int, ...]:
    """`"0.27.1rc0"` as (0, 27, 1); empty if it does not begin with a number."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()
