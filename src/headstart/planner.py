"""Load or recompute: how much of a held prefix is worth loading, and how long to wait for it. Pure.

With `T(n)` the time to compute a prompt after its first n blocks, the plan is

    n* = argmin over n of [ load(n) + T(n) ]

Loading costs the same for every block of a tier, while what a block saves grows along the prompt
(later tokens attend to more), so `load(n) + T(n)` is concave within a tier and its minimum lies at
the end of a tier's part: only those are compared.

**The bound.** Whatever is predicted, a device may do anything afterwards. So waiting ends by what
has come, not by what was planned: a request with r ready blocks may have waited at most

    patience(r) = hedge + saved(r)          saved(r) = T(local) - T(r) - copy(r)

seconds since it could first have been computed, `local` being what the engine has itself. When it
stops it computes the rest, so its first token comes at

    waited + copy(r) + T(r)  <=  patience(r) + copy(r) + T(r)  =  T(local) + hedge

for every behaviour of the tiers, plus the time between two polls, as far as `T` is right. What is
saved is counted at the low end of the engine's uncertainty. The hedge is what the plan itself needs
to be followed, more by a tenth or by twice the tier's uncertainty, and up to `SLACK` of the time to
recompute. It is never more than a share of that time: `MIN_SHARE` where a model is a guess, up to
`MAX_SHARE` where both are sure. A plan of which a tier needs more than its share is not made.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.costs import EngineCosts, ReadCosts

SLACK = 0.04
MIN_SHARE = 0.1
MAX_SHARE = 0.5
_MARGIN = 1.1
_GUESS = 0.5
"""Uncertainty of a model that nothing was measured for."""
_NUM_CHECKED = 16
_MIN_GAIN_S = 0.0005


class Reason(enum.StrEnum):
    """Why so much is loaded."""

    MISS = "miss"
    """No tier holds anything."""
    LOAD = "load"
    """All that is held."""
    PART = "part"
    """What the faster tiers hold: the rest is computed sooner than it is read."""
    SLOW = "slow"
    """Nothing: all of it is computed sooner than it is read."""
    RISKY = "risky"
    """Nothing: the gain is there, but waiting for it would break the bound on the way."""
    BREAKER = "breaker"
    """Less than is held, since a tier does not do what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one tier adds to the prefix that faster tiers hold."""

    tier: str
    num_blocks: int
    """Blocks at the start of the prompt that it and the faster ones hold."""
    costs: ReadCosts | None
    """None: in memory, nothing is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked for."""

    num_tokens: int
    block_size: int
    block_nbytes: int
    num_local: int = 0
    """Tokens that the engine has itself."""

    def tokens(self, num_blocks: int) -> int:
        """Tokens that need not be computed if so many blocks are loaded: never the last one."""
        return min(max(num_blocks * self.block_size, self.num_local), self.num_tokens - 1)

    def recompute_s(self, engine: EngineCosts) -> float:
        """Seconds to the first token with nothing loaded."""
        return engine.prefill_s(self.num_local, self.num_tokens)

    def prefill_s(self, engine: EngineCosts, num_blocks: int) -> float:
        """Seconds to the first token when so many blocks are in memory."""
        tokens = self.tokens(num_blocks)
        first = self.num_local // self.block_size
        copied = (num_blocks - first) * self.block_nbytes if tokens > self.num_local else 0
        return engine.copy_s(copied) + engine.prefill_s(tokens, self.num_tokens)

    def saved_s(self, engine: EngineCosts, num_blocks: int) -> float:
        """Seconds that so many blocks in memory save, at the low end."""
        saved = self.recompute_s(engine) - self.prefill_s(engine, num_blocks)
        return saved * (1.0 - min(1.0, engine.uncertainty)) if saved > 0.0 else saved

    def patience_s(self, engine: EngineCosts, num_blocks: int, hedge_s: float) -> float:
        """How long a request with so many ready blocks may have waited: see the module."""
        return hedge_s + max(0.0, self.saved_s(engine, num_blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to load. Seconds count from the moment at which the request could be computed."""

    reason: Reason
    num_blocks: int
    load_s: float
    """Until all of them are in memory."""
    load_all_s: float
    """Until all that is held would be."""
    prefill_s: float
    """From then to the first token."""
    recompute_s: float
    hedge_s: float
    """What the request may lose by waiting, whatever happens."""


def plan(prompt: Prompt, held: Sequence[Held], engine: EngineCosts, *, busy_s: float = 0.0) -> Plan:
    """How much to load of what tiers hold, in order of speed.

    `busy_s`: how long the engine computes for others first, in which reading is free.
    """
    recompute_s = prompt.recompute_s(engine)
    slack_s = SLACK * recompute_s * _certainty(engine.uncertainty)
    most_s = hedge_s = slack_s
    chosen, chosen_s, chosen_load_s = 0, recompute_s, 0.0
    load_s, needed_s, start = 0.0, 0.0, 0
    is_risky, is_within = False, True
    for part in held:
        if part.num_blocks <= start:
            continue
        if part.costs is not None:
            sure = _trust(part.costs.uncertainty) * _certainty(engine.uncertainty)
            share_s = recompute_s * (MIN_SHARE + (MAX_SHARE - MIN_SHARE) * sure)
            exposure_s = _exposure_s(prompt, part, engine, start, load_s - busy_s)
            # By its own share: that of a faster tier, of which more is known, is not for this one.
            is_within = is_within and _MARGIN * exposure_s <= share_s
            margin = max(_MARGIN, 1.0 + 2.0 * part.costs.uncertainty)
            most_s, needed_s = max(most_s, share_s), max(needed_s, margin * exposure_s)
            load_s += part.costs.read_s((part.num_blocks - start) * prompt.block_nbytes)
        start = part.num_blocks
        total_s = max(0.0, load_s - busy_s) + recompute_s - prompt.saved_s(engine, start)
        if total_s > chosen_s - _MIN_GAIN_S:
            continue
        if not is_within:
            is_risky = True
            continue
        chosen, chosen_s, chosen_load_s = start, total_s, load_s
        hedge_s = min(most_s, needed_s + slack_s)
    return Plan(
        reason=_reason(chosen, start, is_risky=is_risky),
        num_blocks=chosen,
        load_s=chosen_load_s,
        load_all_s=load_s,
        prefill_s=prompt.prefill_s(engine, chosen),
        recompute_s=recompute_s,
        hedge_s=hedge_s,
    )


def _reason(chosen: int, num_held: int, *, is_risky: bool) -> Reason:
    if not num_held:
        return Reason.MISS
    if chosen == num_held:
        return Reason.LOAD
    if chosen:
        return Reason.PART
    return Reason.RISKY if is_risky else Reason.SLOW


def _certainty(uncertainty: float) -> float:
    return max(0.0, 1.0 - uncertainty)


def _trust(uncertainty: float) -> float:
    """How far a tier's model is to be followed: not at all where it is a guess."""
    return max(0.0, 1.0 - (uncertainty / _GUESS) ** 2)


def _exposure_s(
    prompt: Prompt, part: Held, engine: EngineCosts, start: int, since_s: float
) -> float:
    """The most that a request will have waited beyond what is ready by then saves, as planned."""
    costs = part.costs
    assert costs is not None
    count = part.num_blocks - start
    # A device works on several blocks at once: the first is complete when all of those are.
    lag = min(count, max(1, costs.lag_nbytes // prompt.block_nbytes))
    stride = max(1, count // _NUM_CHECKED)
    return max(
        since_s
        + costs.read_s(min(count, ready + max(stride, lag)) * prompt.block_nbytes)
        - max(0.0, prompt.saved_s(engine, start + ready))
        for ready in range(0, count, stride)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A request that waits for blocks."""

    ready: int
    """Blocks in memory so far."""
    planned: int
    waited_s: float
    """Since it could first have been computed."""
    left_s: float
    """Predicted until all planned blocks are in memory."""
    hedge_s: float
    """The plan's."""
    step_s: float = 0.0
    """Of the step that runs meanwhile, if the engine has others to compute for: the request joins
    no step before that one is over."""


def may_wait(prompt: Prompt, engine: EngineCosts, wait: Wait) -> bool:
    """Whether a request waits on, rather than take what is ready and compute the rest."""
    if wait.ready >= wait.planned:
        return False
    if wait.waited_s + wait.step_s > prompt.patience_s(engine, wait.ready, wait.hedge_s):
        return False
    gained_s = prompt.saved_s(engine, wait.planned) - prompt.saved_s(engine, wait.ready)
    return max(wait.left_s, wait.step_s) < gained_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a promotion is."""

    planned: int
    """Blocks that it brings."""
    at_start: int
    """Of these, blocks that were in memory from the start."""
    ready: int
    load_s: float
    """The plan's, until all are in memory."""
    elapsed_s: float
    """Since it was started."""
    moved_s: float
    """From its start until the last ready block came."""

    @property
    def left_s(self) -> float:
        """Predicted until all is there.

        A block takes what the plan says, and the more of them came the rather what those took. One
        that is overdue will be so for as long again.
        """
        wanted = max(1, self.planned - self.at_start)
        came = min(wanted, max(0, self.ready - self.at_start))
        block_s = self.load_s / wanted
        if came:
            block_s += (self.moved_s / came - block_s) * came / wanted
        return abs((self.planned - self.ready) * block_s - (self.elapsed_s - self.moved_s))


def regret_s(
    *, actual_load_s: float, actual_prefill_s: float, recompute_s: float, best_load_s: float | None
) -> float:
    """Seconds by which the best choice in hindsight would have been faster than what was done.

    `recompute_s` without any load, `best_load_s` with all that was held (None: nothing was): both
    by the model, at the speed at which the engine then computed.
    """
    others = [recompute_s] if best_load_s is None else [recompute_s, best_load_s]
    return max(0.0, actual_load_s + actual_prefill_s - min(others))
