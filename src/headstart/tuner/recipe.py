"""A setting as what is written down for it: a settings file, and flags of engines.

vLLM takes `--block-size` in multiples of 16, SGLang `--page-size`, TensorRT-LLM `tokens_per_block`
of its `kv_cache_config`, a power of two (their own documentation, 2026). Traces may have longer
blocks than engines are run with: their blocks are then cut into equal ones, which hit no less.
"""

from __future__ import annotations

import json

from headstart.tuner.case import Site, Timed
from headstart.tuner.latency import Loads
from headstart.units import PAGE_NBYTES, align_up

ENGINE_BLOCK_SIZES = (256, 128, 64, 32, 16)
ROOT = "/nvme/headstart"
_SLAB_PART, _SLAB_LEAST, _SLAB_MOST = 16, 1 << 20, 1 << 30
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def engine_block_size(block_size: int) -> int:
    """The largest that engines are run with, of which blocks of this size are made; else 16."""
    fitting = [size for size in ENGINE_BLOCK_SIZES if block_size % size == 0]
    return fitting[0] if fitting else ENGINE_BLOCK_SIZES[-1]


def max_blocks(site: Site, timed: Timed) -> dict[str, int]:
    """Blocks of the engine's size that each place holds."""
    setting = timed.setting
    block_nbytes = site.block_nbytes(engine_block_size(setting.block_size))
    places = {
        "engine": site.engine_kv_nbytes,
        "memory": setting.memory_nbytes,
        "file": setting.file_nbytes,
    }
    return {name: nbytes // block_nbytes for name, nbytes in places.items() if nbytes}


def settings_toml(site: Site, timed: Timed) -> str:
    """A settings file for Headstart: docs/configuration.md."""
    setting = timed.setting
    block_nbytes = site.block_nbytes(engine_block_size(setting.block_size))
    lines = ["[memory]", *_tier(setting.memory_nbytes, setting.policy, block_nbytes)]
    if setting.file_nbytes:
        lines += ["", "[[tiers]]", 'kind = "file"', f'root = "{ROOT}"  # a directory on the drives']
        lines += _tier(setting.file_nbytes, setting.policy, block_nbytes)
    return "\n".join(lines) + "\n"


def _tier(nbytes: int, policy: str, block_nbytes: int) -> list[str]:
    capacity = align_up(nbytes, PAGE_NBYTES)
    lines = [f'capacity = "{_size(capacity)}"', f'policy = "{policy}"']
    slab_nbytes = min(max(capacity // _SLAB_PART, _SLAB_LEAST), _SLAB_MOST)
    if block_nbytes > slab_nbytes:  # a block must fit into one
        lines.append(f'slab_nbytes = "{_size(align_up(block_nbytes, 1 << 20))}"')
    return lines


def _size(nbytes: int) -> str:
    for name, factor in _UNITS:
        if nbytes % factor == 0:
            return f"{nbytes // factor}{name}"
    return f"{nbytes}B"


def engine_flags(site: Site, timed: Timed) -> dict[str, str]:
    """What each engine is started with, by its name."""
    setting = timed.setting
    size = engine_block_size(setting.block_size)
    own = max_blocks(site, timed).get("engine", 0)
    transfer: dict[str, object] = {"kv_connector": "HeadstartConnector", "kv_role": "kv_both"}
    if setting.loads is not Loads.PLANNED:
        transfer["kv_connector_extra_config"] = {"load": str(setting.loads)}
    vllm = [f"--block-size {size}", *[f"--num-gpu-blocks-override {own}"] * bool(own)]
    vllm += ["--prefix-caching-hash-algo sha256_cbor"]
    vllm += [f"--kv-transfer-config '{json.dumps(transfer, separators=(',', ':'))}'"]
    sglang = [f"--page-size {size}", *[f"--max-total-tokens {own * size}"] * bool(own)]
    cache = {"tokens_per_block": size, **({"max_tokens": own * size} if own else {})}
    return {
        "vllm": " ".join(vllm),
        "sglang": " ".join(sglang),
        "tensorrt-llm": f"kv_cache_config: {json.dumps(cache)}",
    }
