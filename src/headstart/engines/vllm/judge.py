"""What a request is told to wait for, how long, and what came of it.

The node plans when the request arrives (`headstart.planner`). Here, at each poll, the request may
go on waiting only within its patience, of which the time counts that it alone costs: steps that
compute for requests that run anyway are no loss to it, what those behind it have computed first is.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from headstart.costs import EngineCosts
from headstart.engines.vllm.options import Options
from headstart.engines.vllm.pace import Pace
from headstart.engines.vllm.record import Record
from headstart.engines.vllm.shape import BlockShape
from headstart.engines.vllm.step import WorkerMeta
from headstart.node import protocol
from headstart.planner import Progress, Prompt, Wait, may_wait, regret_s

_BUSY_SHARE = 0.5
"""Of what the engine has to compute for others: they may have hits, too, or be aborted."""
_LOOKUP_SHARE = 0.01
"""Of the time to compute a prompt: a miss costs all of it."""
_MAX_OTHERS = 64
"""More are not looked at: polls are on the thread that schedules."""
_MAX_STEPS = 8
"""Steps that may be under way at once."""
_MIN_PREFILL_S = 0.005
_SPEEDS = (0.5, 2.0)


class Judge:
    """See the module. For the scheduler's thread."""

    def __init__(self, pace: Pace, options: Options, shape: BlockShape) -> None:
        self._pace, self._options, self._shape = pace, options, shape
        self._random = random.Random(0)
        self._finishing: dict[int, list[Record]] = {}
        """By step: those whose first token comes with its output."""

    def admit(self, record: Record) -> None:
        """Decide whether a request that has just come may load anything at all."""
        shadow = self._options.shadow
        record.is_shadow = bool(shadow) and self._random.random() < shadow
        record.may_load = self._options.load != "never" and not (
            record.is_shadow or record.request.skip_reading_prefix_cache
        )

    def ask(self, record: Record, others: Iterable[Record]) -> protocol.Asked | None:
        """What the node needs to know to plan for a request; None: all of it is loaded.

        Only what is left of others' prompts is time in which reading is free: a request could join
        each step of those that decode.
        """
        if self._options.load != "planned":
            return None
        costs = self._pace.costs
        busy_s = sum(
            costs.prefill_s(int(other.request.num_computed_tokens), int(other.request.num_tokens))
            for other in islice(others, _MAX_OTHERS)
            if other is not record and _is_prefilling(other)
        )
        return protocol.Asked(
            num_tokens=int(record.request.num_tokens),
            block_size=self._shape.block_size,
            costs=as_message(costs),
            busy_s=_BUSY_SHARE * busy_s,
        )

    def lookup_s(self, record: Record) -> float | None:
        """How long the look-up of a request may take; None: as long as any question."""
        if self._options.load != "planned":
            return None
        recompute_s = self._prompt(record, 0).recompute_s(self._pace.costs)
        return max(self._options.lookup_budget, _LOOKUP_SHARE * recompute_s)

    def waits(
        self, record: Record, others: Collection[Record], *, num_local: int, ready: int, now: float
    ) -> bool:
        """Whether a request whose promotion goes on waits for it, once more."""
        if self._goes_on(record, others, num_local=num_local, ready=ready, now=now):
            record.is_leaving = False
            return True
        return self._is_put_off(record, others, ready)

    def _goes_on(
        self, record: Record, others: Collection[Record], *, num_local: int, ready: int, now: float
    ) -> bool:
        """Whether its own patience lasts; if so, it is charged for who overtakes it."""
        assert record.promise is not None
        plan = record.promise.plan
        waited_s, unmoved_s = now - record.polled_at, now - record.moved_at
        if waited_s >= self._options.max_wait:
            return False
        if plan is None:
            return unmoved_s < self._options.stall
        if unmoved_s >= max(self._options.stall, plan.load_s):
            return False
        prompt, costs = self._prompt(record, num_local), self._pace.costs
        whole_s = self._prompt(record, 0).recompute_s(costs)
        step_s = self._step_s(record, others)
        at_start = min(record.promise.by_tier.get("memory", 0), plan.num_blocks)
        progress = Progress(
            planned=plan.num_blocks,
            at_start=at_start,
            ready=ready,
            load_s=plan.load_s,
            elapsed_s=now - record.promoted_at,
            moved_s=record.moved_at - record.promoted_at if ready > at_start else 0.0,
        )
        wait = Wait(
            ready=ready,
            planned=plan.num_blocks,
            waited_s=record.exposed_s,
            left_s=progress.left_s,
            hedge_s=plan.hedge_s * prompt.recompute_s(costs) / max(whole_s, 1e-9),
            step_s=step_s,
        )
        if not may_wait(prompt, costs, wait):
            return False
        record.exposed_s += step_s
        return True

    def is_worth_it(self, record: Record, *, num_local: int, ready: int) -> bool:
        """Whether blocks that are ready save anything: copying them may take longer."""
        if record.promise is None or record.promise.plan is None:
            return True
        return self._prompt(record, num_local).saved_s(self._pace.costs, ready) > 0.0

    def begin(self, output: Any, records: Mapping[str, Record], now: float) -> int:
        """A step is scheduled; its number."""
        work: dict[str, tuple[int, int]] = {}
        finishing = []
        is_known, is_prefill = True, False
        for request_id, new in output.num_scheduled_tokens.items():
            record = records.get(request_id)
            if record is None:  # one that is not followed: nothing is learnt from this step
                is_known = False
                continue
            record.scheduled_at = record.scheduled_at or now
            cached = int(record.request.num_computed_tokens)
            work[request_id] = cached, new
            is_prefill = is_prefill or _is_prefilling(record)
            if cached < record.request.num_prompt_tokens <= cached + new:
                finishing.append(record)
        number = self._pace.begin(work if is_known else {}, now, is_prefill=is_prefill)
        if finishing:
            self._finishing[number] = finishing
        for old in [old for old in self._finishing if old <= number - _MAX_STEPS]:
            del self._finishing[old]
        return number

    def end(self, told: WorkerMeta, now: float) -> list[protocol.Decided]:
        """The output of a step is there: learn from it; what came of whom."""
        costs = self._pace.costs  # as they were when it was predicted
        self._pace.end(told, now)
        verdicts = []
        for record in self._finishing.pop(told.number, ()):
            if record.is_judged or _is_prefilling(record):
                continue  # preempted since its first token, or its load failed: it goes on
            record.is_judged = True
            verdicts.append(self._verdict(record, costs, now))
        return [verdict for verdict in verdicts if verdict is not None]

    def _verdict(self, record: Record, costs: EngineCosts, now: float) -> protocol.Decided | None:
        """What was decided for a request whose first token is there, and what came of it."""
        found = record.found
        if found is None and not record.is_shadow:
            return None
        loaded = int(record.told.get("loaded_tokens", 0))
        prompt = self._prompt(record, record.num_local)
        waited_s, prefill_s = record.waited_s, now - record.scheduled_at
        blocks = (record.num_local + loaded + self._shape.block_size - 1) // self._shape.block_size
        predicted_s = prompt.prefill_s(costs, blocks if loaded else 0)
        speed = prefill_s / predicted_s if predicted_s > _MIN_PREFILL_S else 1.0
        speed = min(max(speed, _SPEEDS[0]), _SPEEDS[1])
        recompute_s = speed * prompt.recompute_s(costs)
        plan, num_held, by_tier = None, 0, {}
        if found is not None:
            plan, num_held, by_tier = found.plan, found.num_held, found.by_tier
        best_load_s = None
        is_late = bool(record.told.get("late"))
        if plan is not None and num_held and not is_late:  # else nobody knows what it takes
            best_load_s = plan.load_all_s + speed * prompt.prefill_s(costs, num_held)
        size = self._shape.block_size
        reason = "shadow" if record.is_shadow else "always" if num_held else "miss"
        if found is not None and found.is_late:
            reason = "late look-up"
        return protocol.Decided(
            request_id=str(record.request.request_id),
            prompt_tokens=int(record.told["prompt_tokens"]),
            found_tokens=num_held * size,
            found_by_tier={tier: count * size for tier, count in by_tier.items()},
            loaded_tokens=loaded,
            reason=reason if plan is None else plan.reason,
            predicted_load_s=0.0 if plan is None else plan.load_s,
            predicted_prefill_s=predicted_s if plan is None else plan.prefill_s,
            deadline_s=0.0 if plan is None else plan.hedge_s,
            actual_load_s=waited_s,
            actual_prefill_s=prefill_s,
            saved_s=recompute_s - waited_s - prefill_s,
            regret_s=regret_s(
                actual_load_s=waited_s,
                actual_prefill_s=prefill_s,
                recompute_s=recompute_s,
                best_load_s=best_load_s,
            ),
            is_late=is_late,
        )

    def _prompt(self, record: Record, num_local: int) -> Prompt:
        return Prompt(
            num_tokens=int(record.request.num_tokens),
            block_size=self._shape.block_size,
            block_nbytes=self._shape.block_nbytes,
            num_local=num_local,
        )

    def _is_put_off(self, record: Record, others: Collection[Record], ready: int) -> bool:
        """Whether one that would be computed now is asked once more, after those before it.

        They wait, and would be overtaken: they may rather be computed themselves. Only where the
        engine has nothing else to do, so that the next poll comes at once.
        """
        assert record.promise is not None
        plan = record.promise.plan
        if record.is_leaving or plan is None or ready >= plan.num_blocks:
            return False
        known = [other for other in islice(others, _MAX_OTHERS) if other is not record]
        record.is_leaving = not any(other.request.num_computed_tokens for other in known) and any(
            other.arrived < record.arrived and other.promise is not None and other.claimed is None
            for other in known
        )
        return record.is_leaving

    def _step_s(self, record: Record, others: Iterable[Record]) -> float:
        """What is computed first if this request waits: for those behind it that do not.

        All of it, for those who come into the next step: once they run, they go before it.
        """
        most = left = self._pace.costs.max_step_tokens
        rest_s = 0.0
        for other in islice(others, _MAX_OTHERS):
            waits = other.promise is not None and not other.is_leaving
            is_behind = other is not record and other.arrived > record.arrived
            if waits or not is_behind or other.request.num_computed_tokens:
                continue
            size = int(other.request.num_tokens)
            new = min(left, size)
            left -= new
            if new < size:
                rest_s = self._pace.costs.prefill_s(new, size)
                break
        return self._pace.step_s(most - left) + rest_s if left < most else 0.0


def _is_prefilling(record: Record) -> bool:
    return bool(record.request.num_computed_tokens < record.request.num_prompt_tokens)


def as_message(costs: EngineCosts) -> protocol.Costs:
    """Costs as the node is told them."""
    return protocol.Costs(
        costs.step_s,
        costs.token_s,
        costs.pair_s,
        costs.uncertainty,
        costs.max_step_tokens,
        costs.copy_bytes_per_s,
    )
