"""GPUs, links, drives and networks: presets with their sources, and hardware files in TOML. Pure.

Bytes go drives -> network -> host memory, as fast as the slower of both lets them; then they are
copied over the link to the GPU. Hits in host memory are only copied.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from headstart.errors import ConfigError
from headstart.units import parse_nbytes

_T = TypeVar("_T")

BLOCK_S = 4e-5
"""CPU seconds of a read block besides its bytes: benchmarks/results/storage.json has 0.48 s a GB in
blocks of 128 KiB and 0.20 s in blocks of 4 MiB, so 38 us for each."""
_PRICES = ("gpu_hour", "storage_month", "storage_gib_month", "memory_gib_month")
_MAX_COUNT = 1_000_000
_MIN_RATE = 1e6
_MIN_FLOPS = 1e9
_MAX_LATENCY_S = 10.0
"""What is beyond these was meant in another unit."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every preset has."""

    source: str = "the hardware file"


class Gpu(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. `flops`: dense peak a second by dtype (bf16, fp8, fp4)."""

    name: str
    flops: dict[Literal["bf16", "fp8", "fp4"], float]
    link: str = "pcie5-x16"
    mfu: float = 0.5
    """Share of the peak that a prefill reaches."""

    def units(self, dtype: str) -> Literal["bf16", "fp8", "fp4"]:
        """What weights of a dtype are multiplied with: without units of their own, as bf16."""
        if dtype == "fp8" and "fp8" in self.flops:
            return "fp8"
        return "fp4" if dtype == "fp4" and "fp4" in self.flops else "bf16"

    def peak(self, dtype: str) -> float:
        """FLOPS for weights of a dtype."""
        return self.flops[self.units(dtype)]


class Link(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between host memory and one GPU."""

    bytes_per_s: float
    efficiency: float = 1.0


class Drive(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 1e-4


class Network(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One port of the fabric to an array."""

    bytes_per_s: float
    efficiency: float = 1.0
    latency_s: float = 2e-5


class _Raid(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    efficiency: float


class _Mfu(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Presets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of presets.toml."""

    gpus: dict[str, Gpu]
    links: dict[str, Link]
    drives: dict[str, Drive]
    networks: dict[str, Network]
    raid0: _Raid
    mfu: _Mfu


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be bought. A part is the name of a preset or a table of its own figures."""

    gpu: str | Gpu = "h100"
    num_gpus: int = 1
    """Of one engine."""
    num_engines: int = 1
    """That share the drives and the network."""
    link: str | Link = ""
    drive: str | Drive = "nvme-gen4"
    num_drives: int = 1
    raid0_efficiency: float | None = None
    """None: that of the preset."""
    network: str | Network = ""
    """Empty: the drives are in the machine."""
    num_ports: int = 1
    read_bytes_per_s: float | None = None
    """Measured, of drives and network together; None: computed."""
    write_bytes_per_s: float | None = None
    staging: str = ""
    """Memory for KV on its way; empty: not known."""
    mfu: float | None = None
    """None: the GPU's own."""
    block_s: float | None = None
    """Of each block that is read, besides its bytes; None: `BLOCK_S`."""
    gpu_hour: float | None = None
    """Price; None: not known."""
    storage_month: float | None = None
    """Of all of the storage, whatever its size."""
    storage_gib_month: float | None = None
    """Of a GiB of it, where sizes are compared."""
    memory_gib_month: float | None = None


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the way from the drives to the GPUs."""

    name: str
    bytes_per_s: float
    formula: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware with its presets looked up."""

    gpu: Gpu
    mfu: float
    num_gpus: int
    num_engines: int
    stages: tuple[Stage, ...]
    """To host memory, of all engines together."""
    link: Stage
    """From there to all GPUs of one engine."""
    latency_s: float
    write_bytes_per_s: float
    write_formula: str
    staging_nbytes: int
    block_s: float
    gpu_hour: float
    storage_month: float
    storage_gib_month: float
    memory_gib_month: float
    sources: tuple[str, ...]

    @property
    def slowest(self) -> Stage:
        """The stage that all others wait for."""
        return min(self.stages, key=lambda stage: stage.bytes_per_s)

    @property
    def read_bytes_per_s(self) -> float:
        """At which reads of all engines come together."""
        return self.slowest.bytes_per_s


def with_split(machine: Machine, split: float) -> Machine:
    """The machine for KV of which each GPU of an engine loads one part in `split`.

    Latent KV is needed in full by every rank: more links do not bring it sooner.
    """
    share = split / machine.num_gpus
    link = msgspec.structs.replace(
        machine.link,
        bytes_per_s=machine.link.bytes_per_s * share,
        formula=machine.link.formula + (f" x {share:g}, the part of each" if share != 1.0 else ""),
    )
    return msgspec.structs.replace(machine, link=link)


@cache
def presets() -> Presets:
    """Those that come with Headstart."""
    text = files("headstart.sizing").joinpath("presets.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Presets)


def read_hardware(path: Path) -> Hardware:
    """Hardware of a TOML file. Raises ConfigError, which names the key in the way."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return msgspec.convert(found, Hardware)
    except OSError as error:
        raise ConfigError(f"hardware file {path}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError) as error:
        allowed = ", ".join(Hardware.__struct_fields__)
        raise ConfigError(f"hardware file {path}: {error}; allowed keys: {allowed}") from error


def look_up(hardware: Hardware) -> Machine:
    """The machine that hardware describes. Raises ConfigError for what cannot be."""
    known = presets()
    gpu = _chosen("gpu", hardware.gpu, known.gpus)
    link = _chosen("link", hardware.link or gpu.link, known.links)
    for name in ("num_gpus", "num_engines", "num_drives", "num_ports"):
        if not 1 <= getattr(hardware, name) <= _MAX_COUNT:
            raise ConfigError(
                f"{name} is {getattr(hardware, name)}; it must be at least 1, at most {_MAX_COUNT}"
            )
    if hardware.num_ports > 1 and not hardware.network:
        raise ConfigError(f"num_ports is {hardware.num_ports}, and there is no network; name one")
    for name in _PRICES:
        if getattr(hardware, name) is not None:
            _check(name, getattr(hardware, name), what_else=", or leave it out")
    block_s = BLOCK_S if hardware.block_s is None else hardware.block_s
    _check_latency("block_s", block_s)
    _check_flops(gpu)
    mfu = gpu.mfu if hardware.mfu is None else hardware.mfu
    _check_share("mfu", mfu)
    storage, latency_s, write, write_formula, sources = _storage(hardware, known)
    _check_rate("link bytes_per_s", link.bytes_per_s)
    _check_share("link efficiency", link.efficiency)
    links = Stage(
        name="links to the GPUs",
        bytes_per_s=link.bytes_per_s * link.efficiency * hardware.num_gpus,
        formula=f"{link.bytes_per_s:.4g} B/s x {link.efficiency:g} x {hardware.num_gpus} GPUs",
    )
    return Machine(
        gpu=gpu,
        mfu=mfu,
        num_gpus=hardware.num_gpus,
        num_engines=hardware.num_engines,
        stages=tuple(storage),
        link=links,
        latency_s=latency_s,
        write_bytes_per_s=write,
        write_formula=write_formula,
        staging_nbytes=_staging_nbytes(hardware.staging),
        block_s=block_s,
        gpu_hour=hardware.gpu_hour or 0.0,
        storage_month=hardware.storage_month or 0.0,
        storage_gib_month=hardware.storage_gib_month or 0.0,
        memory_gib_month=hardware.memory_gib_month or 0.0,
        sources=(f"{gpu.name}: {gpu.source}", f"link: {link.source}", *sources),
    )


def _storage(
    hardware: Hardware, known: Presets
) -> tuple[list[Stage], float, float, str, list[str]]:
    """Stages up to host memory, latency, write rate with its formula, sources."""
    drive = _chosen("drive", hardware.drive, known.drives)
    count = hardware.num_drives
    raid = 1.0
    if count > 1:
        given = hardware.raid0_efficiency
        raid = known.raid0.efficiency if given is None else given
    _check_share("raid0_efficiency", raid)
    _check_rate("drive read_bytes_per_s", drive.read_bytes_per_s)
    _check_rate("drive write_bytes_per_s", drive.write_bytes_per_s)
    _check_latency("drive latency_s", drive.latency_s)
    sources = [f"drive: {drive.source}"]
    if count > 1 and hardware.raid0_efficiency is None:
        sources.append(f"RAID0: {known.raid0.source}")
    raid_text = f" x {raid:g} of RAID0" if count > 1 else ""
    drives = Stage(
        name="drives",
        bytes_per_s=drive.read_bytes_per_s * count * raid,
        formula=f"{drive.read_bytes_per_s:.4g} B/s x {count}{raid_text}",
    )
    stages, latency_s = [drives], drive.latency_s
    write = drive.write_bytes_per_s * count * raid
    write_formula = f"{drive.write_bytes_per_s:.4g} B/s x {count}{raid_text}"
    if hardware.network:
        network = _chosen("network", hardware.network, known.networks)
        _check_rate("network bytes_per_s", network.bytes_per_s)
        _check_share("network efficiency", network.efficiency)
        _check_latency("network latency_s", network.latency_s)
        _check("network bytes_per_s", network.bytes_per_s)
        _check_share("network efficiency", network.efficiency)
        rate = network.bytes_per_s * network.efficiency * hardware.num_ports
        formula = f"{network.bytes_per_s:.4g} B/s x {network.efficiency:g} x {hardware.num_ports}"
        stages.append(Stage(name="network", bytes_per_s=rate, formula=formula))
        latency_s += network.latency_s
        write_formula = f"min({write_formula}, {formula})"
        write = min(write, rate)
        sources.append(f"network: {network.source}")
    if hardware.read_bytes_per_s is not None:
        _check_rate("read_bytes_per_s", hardware.read_bytes_per_s)
        measured = Stage(
            name="storage, as given", bytes_per_s=hardware.read_bytes_per_s, formula="given"
        )
        stages = [measured]
    if hardware.write_bytes_per_s is not None:
        _check_rate("write_bytes_per_s", hardware.write_bytes_per_s)
        write, write_formula = hardware.write_bytes_per_s, "given"
    return stages, latency_s, write, write_formula, sources


def _chosen(what: str, given: str | _T, known: Mapping[str, _T]) -> _T:
    if not isinstance(given, str):
        return given
    if given not in known:
        raise ConfigError(
            f"{what} {given!r} is no preset; there are {', '.join(known)}, or give its figures in "
            "a hardware file (--hardware)"
        )
    return known[given]


def _staging_nbytes(text: str) -> int:
    if not text:
        return 0
    try:
        nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise ConfigError(f"staging: {error}") from error
    if not nbytes:
        raise ConfigError(f"staging is {text!r}; supply a size such as 512GiB, or leave it out")
    return nbytes


def _check(what: str, value: float, *, what_else: str = "") -> None:
    if not isfinite(value) or value <= 0:
        raise ConfigError(f"{what} is {value:g}; supply a finite number above 0{what_else}")


def _check_rate(what: str, value: float) -> None:
    _check(what, value)
    if value < _MIN_RATE:
        raise ConfigError(f"{what} is {value:g}, in bytes a second; 7 GB/s, say, are 7e9")


def _check_latency(what: str, value: float) -> None:
    if not 0.0 <= value <= _MAX_LATENCY_S:
        raise ConfigError(f"{what} is {value:g}; supply seconds, such as 80e-6 for 80 us")


def _check_flops(gpu: Gpu) -> None:
    if "bf16" not in gpu.flops:
        raise ConfigError(f"gpu {gpu.name}: flops must have bf16; supply its dense peak")
    for name, rate in gpu.flops.items():
        what = f"gpu {gpu.name}: flops of {name}"
        _check(what, rate)
        if rate < _MIN_FLOPS:
            raise ConfigError(f"{what} is {rate:g} a second; 989 TFLOPS, say, are 989e12")


def _check_share(what: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{what} is {value:g}; supply a share above 0, up to 1")
