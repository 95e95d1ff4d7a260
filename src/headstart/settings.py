"""The tree of settings: what can be set, the defaults, and what is said about a wrong value.

    [memory]
    capacity = "1GiB"

    [[tiers]]
    kind = "file"
    root = "/nvme/headstart"
    capacity = "100GiB"

Where the values come from is `headstart.config`'s business.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headstart.errors import ConfigError
from headstart.policies import POLICIES, make_policy
from headstart.units import PAGE_NBYTES, parse_nbytes, parse_seconds

Nbytes = Annotated[int, BeforeValidator(parse_nbytes), Field(ge=PAGE_NBYTES)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Delay = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]


def _policy(text: Any) -> Any:
    """The text, once it has made a policy. Raises ConfigError."""
    make_policy(text)
    return text


Policy = Annotated[str, BeforeValidator(_policy)]
_POLICIES = f"What is evicted first: {', '.join(POLICIES)}; some with a number, as ttl=10min."


class Strict(BaseModel):
    """Unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MemorySettings(Strict):
    """The memory tier: one arena, allocated in full at start."""

    capacity: Nbytes = Field(default=1 << 30, description="Memory for blocks, allocated at start.")
    policy: Policy = Field(default="lru", description=_POLICIES)
    huge_pages: Literal["auto", "off"] = Field(
        default="auto", description="Huge pages where the kernel gives them: cheaper direct reads."
    )
    slab_nbytes: Nbytes | None = Field(
        default=None,
        description="Unit in which memory is given to block sizes; a block must fit it.",
    )


class FaultSettings(Strict):
    """A time in which a tier's device is slow or ill on purpose: for tests."""

    after: Delay = Field(default=0.0, description="When it begins, since the start.")
    lasts: Seconds | None = Field(default=None, description="For how long; by default for good.")
    latency: Delay = Field(default=0.0, description="Added to every read and write.")
    bytes_per_s: Nbytes | None = Field(default=None, description="Bandwidth of the device.")
    error_rate: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Share of the reads and writes that fail."
    )
    stalls: bool = Field(default=False, description="Nothing moves before it is over.")


class FileTierSettings(Strict):
    """A tier on a local disk, or on a raw block device."""

    kind: Literal["file"]
    root: Path = Field(
        description="Directory, created when its parent exists; one owner at a time."
    )
    capacity: Nbytes = Field(
        description="Disk space, preallocated at the first start; a hard limit."
    )
    policy: Policy = Field(default="lru", description=_POLICIES)
    durable: bool = Field(
        default=True, description="False allows a root that does not outlive the machine."
    )
    device: Path | None = Field(
        default=None, description="Block device for the payload instead of files."
    )
    direct: Literal["auto", "off"] = Field(
        default="auto", description="Direct I/O where possible, or never."
    )
    slab_nbytes: Nbytes | None = Field(
        default=None,
        description="Unit in which space is given to block sizes; a change empties the tier.",
    )
    inflight_nbytes: Nbytes | None = Field(
        default=None,
        description="Bytes in flight on the device; measured at the first start when not set.",
    )
    threads: int = Field(
        default=24, ge=1, le=256, description="Threads that read and write blocks."
    )
    namespace_ttl: Seconds = Field(
        default=30 * 86400.0,
        description="Blocks of models not used for so long are given up at start.",
    )
    faults: tuple[FaultSettings, ...] = Field(
        default=(), description="What its device suffers, for tests: needs allow_faults."
    )


class NodeSettings(Strict):
    """The process that holds the tiers for the engines of a machine."""

    socket: Path | None = Field(
        default=None, description="Control socket; by default one in the user's runtime folder."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of /metrics on 127.0.0.1; by default 9465, or a free one if it is taken.",
    )
    idle_exit: Seconds | None = Field(
        default=None, description="End when no engine was connected for so long; by default never."
    )
    lease_ttl: Seconds = Field(
        default=60.0, description="How long blocks stay pinned for a request that waits."
    )


class Settings(Strict):
    """Everything that can be set. `Settings()` is a memory tier of 1 GiB and nothing below it."""

    memory: MemorySettings = Field(default_factory=MemorySettings)
    tiers: tuple[FileTierSettings, ...] = Field(
        default=(), description="Lower tiers, fastest first."
    )
    node: NodeSettings = Field(default_factory=NodeSettings)
    allow_faults: bool = Field(
        default=False, description="Whether tiers may be made slow and ill on purpose."
    )

    @model_validator(mode="after")
    def _no_fault_unasked(self) -> Settings:
        if not self.allow_faults and any(tier.faults for tier in self.tiers):
            raise ValueError(
                "tiers.faults makes a tier slow and ill on purpose: remove it, or set "
                "allow_faults = true if this is a test"
            )
        return self

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, source: str = "settings") -> Settings:
        """Settings of a parsed file. Raises ConfigError that names every wrong path in it."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            lines = explain(error, _model_at)
            raise ConfigError(f"{source}: " + "\n".join(lines)) from error

    @classmethod
    def from_toml(cls, path: Path) -> Settings:
        """Settings of a TOML file alone. Raises ConfigError."""
        return cls.from_mapping(read_toml(path), source=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tree in a settings file, unchecked. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error


def explain(error: ValidationError, model_at: Callable[[list[str]], type[BaseModel]]) -> list[str]:
    """A line for each wrong value: where, what, and the nearest valid name.

    `model_at(path)` is the model in which the last name of a path stands.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"]]
        where = ".".join(path)
        if not path:  # of the whole
            lines.append(item["msg"].removeprefix("Value error, "))
        elif item["type"] == "extra_forbidden":
            fields = model_at(path).model_fields
            near = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.0)
            allowed = ", ".join(fields)
            lines.append(f"{where} is unknown; did you mean {near[0]!r}? allowed: {allowed}")
        elif item["type"] == "missing":
            lines.append(f"{where} is missing")
        else:
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return lines


def _model_at(path: list[str]) -> type[BaseModel]:
    tables: dict[str, type[BaseModel]] = {"memory": MemorySettings, "node": NodeSettings}
    if "faults" in path[:-1]:
        return FaultSettings
    return Settings if len(path) == 1 else tables.get(path[0], FileTierSettings)
