"""How long a request waits, and what is said of it afterwards, without vLLM's scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from headstart.costs import EngineCosts
from headstart.engines.vllm.options import Options
from headstart.engines.vllm.shape import BlockShape
from headstart.node.protocol import Planned

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SHAPE = BlockShape(block_size=16, shard_nbytes=1024, shard_stride=1024, world_size=1)
COSTS = EngineCosts(
    step_s=0.0,
    token_s=1e-3,
    pair_s=0.0,
    uncertainty=0.0,
    max_step_tokens=1024,
    copy_bytes_per_s=1e12,
)
POLL_S = 0.01


class Rig:
    """A judge over an engine that takes a millisecond a token, and requests."""

    def __init__(self, **options):
        from headstart.engines.vllm import judge, pace, record, step

        self.pace, self._record = pace.Pace(COSTS), record.Record
        self.options = Options(**{"stall": 100.0, **options})
        self.judge = judge.Judge(self.pace, self.options, SHAPE)
        self.told = step.WorkerMeta
        self.records = {}

    def add(self, name, num_tokens=160, *, computed=0, promise=None):
        request = SimpleNamespace(
            request_id=name,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=computed,
            block_hashes=[],
            skip_reading_prefix_cache=False,
        )
        record = self._record(request, b"", SHAPE, promise=promise, found=promise)
        record.told = {"prompt_tokens": num_tokens}
        record.arrived = len(self.records) + 1
        self.records[name] = record
        return record

    def wait(self, record, ready=lambda now: 0, *, num_local=0, seconds=30.0, busy=lambda now: 0.0):
        """Poll until it stops; when, and whether it did."""
        record.promoted_at = 1.0
        for number in range(int(seconds / POLL_S)):
            now = 1.0 + number * POLL_S
            record.see((ready(now - 1.0), 0), now, busy(now - 1.0))
            asked = {"num_local": num_local, "ready": ready(now - 1.0), "now": now}
            if not self.judge.waits(record, self.records.values(), **asked):
                return now - 1.0
        return seconds

    def step(self, now, seconds, work, told=()):
        """Compute so many new tokens of each; the verdicts."""
        output = SimpleNamespace(num_scheduled_tokens=work)
        number = self.judge.begin(output, self.records, now)
        for name in work:
            if name in self.records:
                self.records[name].request.num_computed_tokens += work[name]
        return self.judge.end(self.told(number=number, **dict(told)), now + seconds)


@pytest.fixture
def make():
    return Rig


@pytest.fixture
def rig(make):
    return make()


def promise(num_blocks=10, *, load_s=0.1, hedge_s=0.02, planned=True, load_all_s=None):
    plan = Planned(num_blocks, "load", load_s, load_all_s or load_s, 0.001, hedge_s)
    by_tier = {"memory": 0, "file": 10}
    return SimpleNamespace(
        plan=plan if planned else None, num_held=10, by_tier=by_tier, is_late=False
    )


# ------------------------------------------------------------------------------------------- asking


def test_shadow_is_a_share_of_the_requests(make):
    for options, least, most in (
        ({}, 1000, 1000),
        ({"load": "never"}, 0, 0),
        ({"shadow": 1.0}, 0, 0),
        ({"shadow": 0.3}, 630, 770),
    ):
        judge, count, shadows = make(**options).judge, 0, 0
        for _ in range(1000):
            record = SimpleNamespace(request=SimpleNamespace(skip_reading_prefix_cache=False))
            judge.admit(record)
            count, shadows = count + record.may_load, shadows + record.is_shadow
        assert least <= count <= most, options
        assert shadows == (1000 - count if "shadow" in options else 0)


def test_a_look_up_may_take_a_hundredth_of_the_time_to_compute(make, rig):
    assert rig.judge.lookup_s(rig.add("one", 1000)) == pytest.approx(0.01)
    assert rig.judge.lookup_s(rig.add("short", 16)) == 0.002
    assert make(lookup_budget="50ms").judge.lookup_s(rig.records["one"]) == 0.05
    assert make(load="always").judge.lookup_s(rig.records["one"]) is None


def test_blocks_that_are_copied_longer_than_computed_are_worth_nothing(rig, make):
    record = rig.add("one", promise=promise())
    assert rig.judge.is_worth_it(record, num_local=0, ready=3)
    assert not rig.judge.is_worth_it(record, num_local=48, ready=3)
    from headstart.engines.vllm.judge import as_message

    rig.pace.begin_with(as_message(replace(COSTS, copy_bytes_per_s=1024 / 0.017)))
    assert not rig.judge.is_worth_it(record, num_local=0, ready=3)
    record.promise = promise(planned=False)
    assert rig.judge.is_worth_it(record, num_local=0, ready=3)


def test_a_shadow_request_says_how_well_its_time_was_predicted(make):
    rig = make(shadow=1.0)
    record = rig.add("one")
    rig.judge.admit(record)
    (verdict,) = rig.step(1.0, 0.2, {"one": 160})
    assert (verdict.reason, verdict.found_tokens, verdict.loaded_tokens) == ("shadow", 0, 0)
    assert verdict.predicted_prefill_s == pytest.approx(0.16, rel=0.01)
    assert verdict.actual_prefill_s == pytest.approx(0.2)
    assert verdict.regret_s == 0.0


def test_a_look_up_that_took_too_long_is_no_miss_in_the_log(rig):
    record = rig.add("one")
    record.found = SimpleNamespace(plan=None, num_held=0, by_tier={}, is_late=True)
    (verdict,) = rig.step(1.0, 0.2, {"one": 160})
    assert (verdict.reason, verdict.found_tokens) == ("late look-up", 0)


def test_half_of_what_others_need_is_told_to_the_node(make, rig):
    record = rig.add("one")
    for n in range(4):
        rig.add(f"other {n}", 200, computed=50 * n)
    asked = rig.judge.ask(record, rig.records.values())
    assert (asked.num_tokens, asked.block_size) == (160, 16)
    assert asked.busy_s == pytest.approx(0.5 * 1e-3 * (200 + 150 + 100 + 50))
    assert (asked.costs.token_s, asked.costs.max_step_tokens) == (1e-3, 1024)
    for load in ("always", "never"):
        assert make(load=load).judge.ask(record, rig.records.values()) is None


# ------------------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize("stuck", [0, 1, 5, 9])
def test_a_read_that_stops_is_waited_for_within_patience(rig, stuck):
    """Patience is the hedge and what the blocks that are ready save."""
    record = rig.add("one", promise=promise(load_s=0.1, hedge_s=0.03))
    stopped_s = rig.wait(record, lambda now: min(stuck, int(now / 0.01)))
    assert stopped_s <= 0.03 + 0.016 * stuck + POLL_S
    assert stopped_s >= 0.03


def test_a_read_that_goes_as_planned_is_waited_for(rig):
    record = rig.add("one", promise=promise(load_s=0.1, hedge_s=0.03))
    assert rig.wait(record, lambda now: min(10, int(now / 0.0099))) == pytest.approx(0.1, abs=0.02)


def test_a_read_that_is_not_worth_its_rest_is_left(rig):
    """A block every half second, each of which is computed in 16 ms."""
    record = rig.add("one", promise=promise(load_s=0.05, hedge_s=100.0))
    assert rig.wait(record, lambda now: 1 + int(now / 0.5)) <= 0.3


def test_without_a_plan_a_read_may_take_long_but_not_stand_still(make):
    for options, moves_s, stops_s in (({}, None, 0.5), ({"max_wait": 2.0}, 0.3, 2.0)):
        rig = make(load="always", stall=0.5, **options)
        record = rig.add("one", promise=promise(planned=False))
        waited_s = rig.wait(record, lambda now, s=moves_s: 0 if s is None else int(now / s))
        assert waited_s == pytest.approx(stops_s, abs=2 * POLL_S)


def test_nothing_planned_lasts_longer_than_is_allowed(make):
    rig = make(max_wait=0.2)
    record = rig.add("one", 1600, promise=promise(100, load_s=1.0, hedge_s=5.0))
    assert rig.wait(record, lambda now: int(10 * now)) == pytest.approx(0.2, abs=2 * POLL_S)


def test_what_the_engine_has_itself_is_not_waited_for(rig):
    record = rig.add("one", promise=promise(load_s=0.1, hedge_s=0.03))
    assert rig.wait(record, num_local=159) == 0.0
    assert rig.wait(rig.add("two", promise=record.promise), num_local=80) <= 0.02 + POLL_S


def test_time_in_which_others_are_computed_costs_nothing(rig):
    for busy_s in (0.0, 0.1):
        record = rig.add(f"{busy_s}", promise=promise(load_s=0.12, hedge_s=0.02))
        stopped_s = rig.wait(record, busy=lambda now, busy_s=busy_s: min(now, busy_s))
        assert stopped_s == pytest.approx(busy_s + 0.02, abs=2 * POLL_S)


def test_a_request_lets_no_work_pass_that_costs_more_than_it_gains(rig):
    record = rig.add("one", promise=promise(load_s=0.05, hedge_s=0.03))
    rig.add("behind", 1000)
    assert rig.wait(record, lambda now: int(now / 0.005)) == 0.0


def test_only_those_count_that_would_overtake(rig):
    rig.add("before", 1000)
    record = rig.add("one", promise=promise(load_s=0.05, hedge_s=0.03))
    rig.add("waits as well", 1000, promise=promise())
    rig.add("computed", 1000, computed=999)
    assert rig.wait(record, lambda now: int(now / 0.005)) >= 0.04


def test_those_that_overtake_are_charged(rig):
    record = rig.add("one", promise=promise(load_s=0.1, hedge_s=0.03))
    rig.add("behind", 10)
    others = rig.records.values()
    record.promoted_at = 1.0
    record.see((0, 0), 1.0, 0.0)
    assert rig.judge.waits(record, others, num_local=0, ready=0, now=1.0)
    assert record.exposed_s == pytest.approx(0.01)


def test_those_that_overtake_cost_all_that_they_compute(rig):
    """Once it runs, a long prompt goes first, step by step."""
    for size, is_worth_it in ((900, True), (3000, False)):
        record = rig.add(f"before {size}", 1600, promise=promise(100, load_s=0.5, hedge_s=9.0))
        behind = rig.add(f"behind {size}", size)
        record.promoted_at = 1.0
        record.see((0, 0), 1.0, 0.0)
        asked = {"num_local": 0, "ready": 0, "now": 1.0}
        assert rig.judge.waits(record, rig.records.values(), **asked) is is_worth_it
        if is_worth_it:
            assert record.exposed_s == pytest.approx(0.9)
        for each in (record, behind):
            each.request.num_computed_tokens = 1


def poll(rig, record):
    record.promoted_at = record.promoted_at or 1.0
    record.see((0, 0), 1.0, 0.0)
    return rig.judge.waits(record, rig.records.values(), num_local=0, ready=0, now=1.0)


def test_whoever_gives_up_is_heard_by_those_before_it_first(rig):
    """Else it would overtake them while they wait, with all that it computes."""
    first = rig.add("first", promise=promise(load_s=0.1, hedge_s=0.03))
    second = rig.add("second", promise=promise(load_s=5.0, hedge_s=0.03))
    assert poll(rig, first), "nobody is in its way"
    assert poll(rig, second), "put off"
    assert not poll(rig, first), "it is computed before the second one is"
    assert not poll(rig, second), "only once"


def test_nobody_is_put_off_for_nothing(rig):
    """With nobody before it, or while the engine computes: the next poll may be long from now."""
    assert not poll(rig, rig.add("alone", promise=promise(load_s=5.0, hedge_s=0.03)))
    rig.add("runs", computed=5)
    assert not poll(rig, rig.add("second", promise=promise(load_s=5.0, hedge_s=0.03)))


def test_a_promise_anew_is_a_say_anew(rig):
    """A preempted request asks again: what it had decided about the first promise is over."""
    rig.add("first", promise=promise(load_s=0.1, hedge_s=0.03))
    second = rig.add("second", promise=promise(load_s=5.0, hedge_s=0.03))
    assert poll(rig, second), "put off"
    assert not poll(rig, second)
    anew = promise(load_s=5.0, hedge_s=0.03)
    anew.num_kept, anew.ticket = 10, 1
    second.promised(anew)
    assert poll(rig, second), "put off again"


# ---------------------------------------------------------------------------------- what came of it


def test_a_miss_is_computed_and_said_to_be_one(rig):
    miss = SimpleNamespace(plan=None, num_held=0, by_tier={"memory": 0}, is_late=False)
    rig.add("one", promise=miss)
    (decided,) = rig.step(1.0, 0.16, {"one": 160})
    assert (decided.request_id, decided.prompt_tokens, decided.reason) == ("one", 160, "miss")
    assert (decided.found_tokens, decided.loaded_tokens, decided.is_late) == (0, 0, False)
    assert decided.actual_load_s == 0.0
    assert decided.actual_prefill_s == pytest.approx(0.16)
    assert decided.regret_s == pytest.approx(0.0, abs=0.01)
    assert decided.saved_s == pytest.approx(0.0, abs=0.01)


def test_a_hit_saves_what_it_did_not_compute(rig):
    record = rig.add("one", computed=144, promise=promise(9, load_s=0.02))
    record.told["loaded_tokens"], record.waited_s = 144, 0.02
    (decided,) = rig.step(1.0, 0.016, {"one": 16})
    assert (decided.loaded_tokens, decided.found_tokens) == (144, 160)
    assert decided.found_by_tier == {"memory": 0, "file": 160}
    assert decided.saved_s == pytest.approx(0.16 - 0.02 - 0.016, abs=0.005)
    assert decided.regret_s == pytest.approx(0.016, abs=0.005)  # all of it was to be had


def test_a_request_that_should_have_loaded_regrets_it(rig):
    rig.add("one", promise=promise(0, load_s=0.0, load_all_s=0.01))
    (decided,) = rig.step(1.0, 0.16, {"one": 160})
    assert decided.loaded_tokens == 0
    assert decided.regret_s == pytest.approx(0.16 - 0.01, abs=0.01)


def test_the_verdict_comes_once_with_the_first_token(rig):
    """Also where the prompt takes several steps, and where it is computed again later."""
    record = rig.add("one", promise=promise(0))
    assert rig.step(1.0, 0.1, {"one": 100}) == []
    (decided,) = rig.step(1.5, 0.06, {"one": 60})
    assert decided.actual_prefill_s == pytest.approx(0.56)
    record.request.num_computed_tokens = 0
    assert rig.step(2.0, 0.1, {"one": 160}) == []


def test_requests_beside_one_that_is_not_followed_are_judged(rig):
    rig.add("one", promise=promise(0))
    (decided,) = rig.step(1.0, 0.2, {"one": 160, "nobody": 40})
    assert decided.actual_prefill_s == pytest.approx(0.2)
    assert rig.pace.num_steps == 0


def test_outputs_that_are_lost_keep_no_request(rig):
    for n in range(100):
        rig.add(f"{n}", promise=promise(0))
        output = SimpleNamespace(num_scheduled_tokens={f"{n}": 160 if n % 3 else 10})
        rig.judge.begin(output, rig.records, float(n))
    assert len(rig.judge._finishing) <= 16
