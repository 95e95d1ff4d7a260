"""Where settings come from, one TOML file and `HEADSTART_*` variables; and the composition root.

A variable names a setting by its path with double underscores, `HEADSTART_MEMORY__CAPACITY=2GiB`,
`HEADSTART_TIERS__0__ROOT=/nvme`, and wins over the file. `HEADSTART_CONFIG` names the file and
`HEADSTART_CACHE_DIR` the folder for converted models. Anything else that starts with `HEADSTART_`
is refused, like an unknown key in the file, with the nearest valid name.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headstart.arena import available_nbytes
from headstart.errors import ConfigError
from headstart.inflight import measure_inflight_nbytes
from headstart.settings import (
    FaultSettings,
    FileTierSettings,
    MemorySettings,
    NodeSettings,
    Settings,
    read_toml,
)
from headstart.store import PrefixStore
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.tiers.base import Tier
from headstart.tiers.faults import FaultyTier, Phase, by_time
from headstart.transfer import DEFAULT_INFLIGHT_NBYTES, Transfer
from headstart.units import PAGE_NBYTES

_log = logging.getLogger(__name__)
_PREFIX = "HEADSTART_"
_OTHER_VARIABLES = ("HEADSTART_CONFIG", "HEADSTART_CACHE_DIR")
_CALIBRATION_NBYTES = 64 << 20


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from a file and the environment, which wins.

    Without `path`, the file that `HEADSTART_CONFIG` names, or none. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    if path is None and "HEADSTART_CONFIG" in environ:
        path = Path(environ["HEADSTART_CONFIG"])
    tree = {} if path is None else read_toml(path)
    used = []
    ours = [name for name in environ if name.startswith(_PREFIX)]
    # Shorter parts first, so that tier 10 comes after tier 2.
    for variable in sorted(ours, key=lambda name: [(len(p), p) for p in name.split("__")]):
        if variable not in _OTHER_VARIABLES:
            _set(tree, variable, environ[variable])
            used.append(variable)
    source = " + ".join(([str(path)] if path else []) + used) or "settings"
    return Settings.from_mapping(tree, source=source)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for converted models: `HEADSTART_CACHE_DIR`, or the XDG cache folder's."""
    environ = os.environ if environ is None else environ
    if "HEADSTART_CACHE_DIR" in environ:
        return Path(environ["HEADSTART_CACHE_DIR"])
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/tmp")) / ".cache"
    return Path(base) / "headstart"


def node_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of a node: those of `load_settings`, or where nothing is set, ones to start with.

    Those keep blocks in an eighth of the available memory, at most 4 GiB, and on the disk of the
    user's cache folder, in a quarter of its free space, at most 16 GiB. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    ours = [name for name in environ if name.startswith(_PREFIX)]
    if path is not None or set(ours) - {"HEADSTART_CACHE_DIR"}:
        return load_settings(path, environ)
    root = cache_dir(environ) / "blocks"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{root.parent}: {error.strerror}; set HEADSTART_CACHE_DIR") from error
    free = shutil.disk_usage(root.parent).free + sum(
        file.stat().st_blocks * 512 for file in (root / "slabs").glob("*.slab")
    )
    memory, disk = available_nbytes() // 8, free // 4
    return Settings(
        memory=MemorySettings(capacity=_power_of_two(min(memory, 4 << 30))),
        tiers=(
            FileTierSettings(kind="file", root=root, capacity=_power_of_two(min(disk, 16 << 30))),
        ),
    )


def node_socket(settings: Settings, environ: Mapping[str, str] | None = None) -> Path:
    """The control socket of a node with these settings.

    One a set of tiers, in a folder that only the user can enter: `$XDG_RUNTIME_DIR/headstart`, or
    `headstart-<uid>` in the folder for temporary files. Raises ConfigError when it is another's.
    """
    if settings.node.socket is not None:
        return settings.node.socket.absolute()
    environ = os.environ if environ is None else environ
    if environ.get("XDG_RUNTIME_DIR"):
        folder = Path(environ["XDG_RUNTIME_DIR"]) / "headstart"
    else:
        folder = Path(tempfile.gettempdir()) / f"headstart-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set node.socket") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a directory of this user that nobody else may enter; remove it, or "
            "set node.socket to a path elsewhere"
        )
    # Capacities follow the free space of the moment, so they do not name a node; roots do.
    roots = "\n".join(str(tier.root.absolute()) for tier in settings.tiers)
    return folder / f"node-{blake2b(roots.encode(), digest_size=8).hexdigest()}.sock"


def node_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a node that an engine starts: without what was meant for the engine.

    A preloaded allocator and OpenMP's bindings would tie the node to the engine's cores.
    """
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in environ.items()
        if name != "LD_PRELOAD" and not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
    }


def own_node_environment(
    settings: Settings, roots: Sequence[Path], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a node with these settings, but with its tiers in folders of its own.

    Nothing that is set in `environ` reaches it: its settings are those of a measurement.
    """
    own = {"HEADSTART_NODE__METRICS_PORT": "0"}
    own["HEADSTART_MEMORY__CAPACITY"] = f"{settings.memory.capacity}B"
    for number, (tier, root) in enumerate(zip(settings.tiers, roots, strict=True)):
        own[f"HEADSTART_TIERS__{number}__ROOT"] = str(root)
        own[f"HEADSTART_TIERS__{number}__CAPACITY"] = f"{tier.capacity}B"
    inherited = node_environment(environ).items()
    return {name: value for name, value in inherited if not name.startswith(_PREFIX)} | own


def engine_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a vLLM engine on the CPU that demo and benchmarks start.

    It computes on one core, so that with and without a connector it does so alike: vLLM gives a
    worker one core more when there is one. Nothing is downloaded, and its cache may be emptied.
    """
    environ = os.environ if environ is None else environ
    return {
        **environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_SERVER_DEV_MODE": "1",
    }


def server_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server that `headstart bench serve` starts: its cache may be emptied."""
    environ = os.environ if environ is None else environ
    return {"VLLM_SERVER_DEV_MODE": "1", **environ}


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes, PAGE_NBYTES).bit_length() - 1


def forbid_downloads() -> None:
    """Keep the model libraries of this process and its children from looking things up online."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def open_store(settings: Settings | None = None) -> PrefixStore:
    """Allocate, open and connect everything that `settings` (default: `load_settings()`) ask for.

    Raises ConfigError or TierUnavailableError, with nothing left open.
    """
    settings = load_settings() if settings is None else settings
    opened: list[FileTier] = []
    lower: list[tuple[Tier, Transfer]] = []
    try:
        for number, tier_settings in enumerate(settings.tiers, start=1):
            # Statistics are by name, so that of each tier is its own.
            name = "file" if number == 1 else f"file{number}"
            opened.append(FileTier(_file_options(tier_settings, name)))
        memory = MemoryTier(
            capacity_nbytes=settings.memory.capacity,
            policy=settings.memory.policy,
            slab_nbytes=settings.memory.slab_nbytes,
            huge_pages=settings.memory.huge_pages == "auto",
        )
        for tier, tier_settings in zip(opened, settings.tiers, strict=True):
            maybe_faulty = _with_faults(tier, tier_settings.faults)
            transfer = Transfer(
                tier.name,
                num_threads=tier_settings.threads,
                inflight_nbytes=tier_settings.inflight_nbytes
                or inflight_nbytes(tier, tier_settings.root / "device.json"),
                # Queued writes pin memory: never more than half of it.
                max_queued_nbytes=settings.memory.capacity // 2,
            )
            lower.append((maybe_faulty, transfer))
    except BaseException:
        for _, transfer in lower:
            transfer.close()
        for tier in opened:
            tier.close()
        raise
    return PrefixStore(memory, lower)


def _with_faults(tier: FileTier, faults: Sequence[FaultSettings]) -> Tier:
    """The tier, slow and ill as the settings say."""
    if not faults:
        return tier
    _log.warning("tier %s is made slow and ill on purpose: allow_faults is set", tier.name)
    phases = [
        Phase(
            start_s=fault.after,
            stop_s=math.inf if fault.lasts is None else fault.after + fault.lasts,
            latency_s=fault.latency,
            bytes_per_s=fault.bytes_per_s or math.inf,
            error_rate=fault.error_rate,
            stalls=fault.stalls,
        )
        for fault in faults
    ]
    return FaultyTier(tier, by_time(phases))


def _file_options(settings: FileTierSettings, name: str) -> FileTierOptions:
    return FileTierOptions(
        name=name,
        root=settings.root,
        capacity_nbytes=settings.capacity,
        policy=settings.policy,
        slab_nbytes=settings.slab_nbytes,
        durable=settings.durable,
        device=settings.device,
        direct=settings.direct == "auto",
        namespace_ttl_s=settings.namespace_ttl,
    )


def inflight_nbytes(tier: FileTier, path: Path) -> int:
    """The device's measured bytes in flight: from `path`, or measured now, while the tier is empty.

    Unwritten extents read as zeros without touching the device, so some are written first.
    """
    try:
        return int(json.loads(path.read_text())["inflight_nbytes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if len(tier.index):
        return DEFAULT_INFLIGHT_NBYTES
    memory = memoryview(mmap.mmap(-1, 32 << 20))
    try:
        piece, slab_nbytes = memory[: 1 << 20], tier.index.slots.slab_nbytes
        for offset in range(0, min(_CALIBRATION_NBYTES, tier.volume.capacity_nbytes), len(piece)):
            if offset % slab_nbytes + len(piece) <= slab_nbytes:  # a write must not leave its slab
                tier.volume.write(offset, [piece])
        nbytes = measure_inflight_nbytes(tier.volume, memory)
        path.write_text(json.dumps({"inflight_nbytes": nbytes}))
    except OSError as error:
        _log.warning("the device under %s could not be measured: %s", path.parent, error)
        return DEFAULT_INFLIGHT_NBYTES
    return nbytes


def _set(tree: dict[str, Any], variable: str, value: str) -> None:
    """Put a variable's value at its path in the tree."""
    path = variable.removeprefix(_PREFIX).lower().split("__")
    if not _known(path):
        near = difflib.get_close_matches(variable, _variables(tree), n=1, cutoff=0.0)
        raise ConfigError(f"environment variable {variable} is unknown; did you mean {near[0]}?")
    node: Any = tree
    for name in path[:-1]:
        if isinstance(node, list):
            if int(name) > len(node):
                raise ConfigError(f"{variable}: the settings have only {len(node)} tiers")
            if int(name) == len(node):
                node.append({"kind": "file"})
            node = node[int(name)]
        else:
            node = node.setdefault(name, [] if name == "tiers" else {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"{variable}: {name!r} is a value in the settings file, not a table")
    node[path[-1]] = value


def _known(path: list[str]) -> bool:
    match path:
        case ["memory", name]:
            return name in MemorySettings.model_fields
        case ["node", name]:
            return name in NodeSettings.model_fields
        case ["tiers", number, name]:
            return number.isdecimal() and name in FileTierSettings.model_fields
    return False


def _variables(tree: Mapping[str, Any]) -> list[str]:
    numbers = range(len(tree.get("tiers", ())) + 1)
    memory = [f"{_PREFIX}MEMORY__{name.upper()}" for name in MemorySettings.model_fields]
    tiers = [
        f"{_PREFIX}TIERS__{number}__{name.upper()}"
        for number in numbers
        for name in FileTierSettings.model_fields
    ]
    node = [f"{_PREFIX}NODE__{name.upper()}" for name in NodeSettings.model_fields]
    return [*_OTHER_VARIABLES, *memory, *node, *tiers]
