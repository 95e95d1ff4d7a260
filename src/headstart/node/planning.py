"""Messages of planning: what an engine tells of its costs, and what came of a plan.

The base of all messages is here, too; the others are in `protocol`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: fields in order, no names on the wire."""

    is_told: ClassVar[bool] = False
    """Whether the message has no reply."""


class Costs(Message, frozen=True):
    """What it costs an engine to compute and to copy: `headstart.costs.EngineCosts`."""

    step_s: float
    token_s: float
    pair_s: float
    uncertainty: float
    max_step_tokens: int
    copy_bytes_per_s: float


class Asked(Message, frozen=True):
    """Of whom a prompt is, so that the node can plan what is worth loading."""

    num_tokens: _Count
    block_size: _Count
    costs: Costs
    busy_s: float = 0.0
    """How long the engine computes for others first."""


class Planned(Message, frozen=True):
    """Of `headstart.planner.Plan`; seconds count from the moment of the answer."""

    num_blocks: int
    reason: str
    load_s: float
    load_all_s: float
    prefill_s: float
    hedge_s: float


class Learnt(Message, frozen=True, tag="learnt"):
    """What an engine has learnt of its costs: to be told to the next one of the namespace."""

    is_told = True
    namespace: bytes
    costs: Costs


class Decided(Message, frozen=True, tag="decided"):
    """What was decided for a request and what came of it: see `headstart.node.decisions`."""

    is_told = True
    request_id: str
    prompt_tokens: int
    found_tokens: int
    found_by_tier: dict[str, int]
    loaded_tokens: int
    reason: str
    predicted_load_s: float
    predicted_prefill_s: float
    deadline_s: float
    actual_load_s: float
    actual_prefill_s: float
    saved_s: float
    regret_s: float
    is_late: bool
