"""What the doctor says: causes, findings, fixes, and the seam of rules.

A rule is one file in `rules/`. It names its cause, what it needs to be told, and a function that
yields a `Sign` for each place where its mechanism shows. What is done with signs (confidence,
ranking, verdict) is `headstart.doctor.diagnose`'s business.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headstart.doctor.facts import Evidence, Known


class Cause(enum.StrEnum):
    """Why the first token is slow, or what else there is to say."""

    BANDWIDTH_CONTENTION = "bandwidth_contention"
    NO_ROOM = "no_room"
    LOOKUP_CPU = "lookup_cpu"
    LOCK_CONTENTION = "lock_contention"
    SEMANTIC_CACHE = "semantic_cache"
    SLOW_TIER = "slow_tier"
    BLOCK_SIZE = "block_size"
    EVICTION_THRASH = "eviction_thrash"
    SERIALIZATION = "serialization"
    IO_PARALLELISM = "io_parallelism"
    COLD_START = "cold_start"
    CORRECTNESS = "correctness"
    CONFIGURATION = "configuration"
    MEASUREMENT = "measurement"
    ROUTING = "routing"
    NO_FAULT = "no_fault"
    CANNOT_SAY = "cannot_say"


class Strength(enum.Enum):
    """How much a sign proves, when its figures are far from the threshold. The value: confidence.

    They are degrees of belief, ordered by how many other causes would leave the same sign.
    """

    SEEN = 0.95
    """The mechanism itself was measured: the time it takes, the failure it makes."""
    COMPUTED = 0.85
    """It follows from measured figures by arithmetic."""
    COMPARED = 0.7
    """Two arms differ as it makes them differ; something else may too."""
    HINTED = 0.5
    """It is one of several that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What to change. An empty engine: on any."""

    text: str
    engine: str = ""
    since: str = ""
    """First version that has what is named here; empty: every version."""
    before: str = ""
    """First version that no longer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rule saw."""

    strength: Strength
    margin: float
    """How many times over its threshold the deciding figure is: at least 1."""
    evidence: tuple[Evidence, ...]
    explained_s: float | None = None
    """Seconds of the first token that would go with the cause."""
    share: float | None = None
    """Where seconds are not known: the share of what the cache should save, or of the time."""
    fixes: tuple[Fix, ...] = ()
    """Those with figures of this case; the rule's own come after them."""
    is_symptom: bool = False
    """It says where the time goes, and other rules say why: they rank before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """See the module. Pure."""

    name: str
    cause: Cause
    needs: tuple[tuple[str, ...], ...]
    """Sets of keys, such as "arms.queue" or "tiers.bandwidth": one set has to be told in full."""
    find: Callable[[Known], Iterator[Sign]]
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that holds."""

    cause: Cause
    rule: str
    confidence: float
    explained_s: float | None
    evidence: tuple[Evidence, ...]
    fixes: tuple[str, ...]
    margin: float
    is_symptom: bool = False
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the time to the first token."""

    name: str
    seconds: float
    is_measured: bool
    """Otherwise computed from sizes and rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where one arm's time to the first token goes; the last stage is the rest."""

    arm: str
    ttft_s: float
    stages: tuple[Stage, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that is said."""

    verdict: Cause
    findings: tuple[Finding, ...]
    """First what explains most."""
    healthy: tuple[Evidence, ...]
    """Why nothing is at fault, or what is as it should be."""
    missing: tuple[str, ...]
    """What would raise the confidence: a key, and what it tells."""
    splits: tuple[Split, ...]
    notes: tuple[str, ...]
    """What could not be used or judged, and why."""
