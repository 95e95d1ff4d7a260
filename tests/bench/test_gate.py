"""Verdicts: what passes, what fails, what is not known yet, and what may not be compared."""

import msgspec
import pytest

from headstart.bench.gate import Demands, Verdict, document, judge
from headstart.errors import ConfigError

SLO = {"ttft": 30.0}
DEMANDS = Demands(slo=SLO, throughput_gain=0.0)


def runs(run, medians, *, seed=0, **changed):
    return [run(median, seed=seed + n, **changed) for n, median in enumerate(medians)]


def replaced(each, **changed):
    return msgspec.structs.replace(each, **changed)


def with_requests(each, **changed):
    requests = tuple(msgspec.structs.replace(r, **changed) for r in each.requests)
    return replaced(each, requests=requests)


@pytest.fixture
def baseline(run):
    return runs(run, [1.0, 1.02, 0.98, 1.01, 0.99])


@pytest.fixture
def candidate(run):
    return runs(run, [0.6, 0.61, 0.59, 0.6, 0.62])


# ------------------------------------------------------------------------------------- verdicts


def test_a_fall_that_is_sure_passes(baseline, candidate):
    found = judge(baseline, candidate, DEMANDS)
    assert found.verdict is Verdict.PASS
    assert found.ttft_p50.estimate == pytest.approx(0.604, abs=0.003)
    assert found.ttft_p50.upper95 < 0.63
    assert found.ttft_p50_resampled[0] < 0.604 < found.ttft_p50_resampled[1]
    assert (found.vetoes, found.num_pairs, found.pairs_needed) == ((), 5, 5)
    assert found.not_checked == ("TTFT p99: it needs 299 answers an arm",)


def test_a_fall_that_is_surely_too_small_fails(run, baseline):
    found = judge(baseline, runs(run, [0.8, 0.82, 0.79, 0.81, 0.8]), DEMANDS)
    assert found.verdict is Verdict.FAIL
    assert found.ttft_p50.lower95 > 0.75
    same = runs(run, [1.0, 0.99, 1.02, 0.98, 1.01], seed=9)
    assert judge(baseline, same, DEMANDS).verdict is Verdict.FAIL


def test_what_is_not_sure_yet_needs_more_pairs(run, baseline):
    found = judge(baseline, runs(run, [0.6, 0.8, 0.62, 0.83, 0.7]), DEMANDS)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.pairs_needed > 5


def test_an_unproven_tail_needs_more_than_pairs(run, baseline):
    wide = [run(0.5, seed=n, sigma=(0.5, 0.5, 0.5, 2.0, 0.5)[n]) for n in range(5)]
    found = judge(baseline, wide, DEMANDS)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert any("TTFT p90: not proved" in reason for reason in found.reasons)
    assert found.pairs_needed is None


def test_throughput_is_judged_by_its_lower_bound(baseline, candidate):
    demands = Demands(slo=SLO)
    for seconds, verdict in (([7.0] * 5, "PASS"), ([9.0] * 5, "FAIL"), ([7, 9, 7, 9, 8], None)):
        faster = [replaced(r, duration_s=float(s)) for r, s in zip(candidate, seconds, strict=True)]
        found = judge(baseline, faster, demands)
        assert found.verdict == (verdict or "INCONCLUSIVE"), found.reasons
    assert found.pairs_needed > 5


def test_throughput_at_a_load_that_nobody_would_have_is_no_proof(baseline, candidate):
    faster = [replaced(each, duration_s=7.0) for each in candidate]
    assert judge(baseline, faster, Demands(slo=SLO)).verdict is Verdict.PASS
    found = judge(baseline, faster, Demands())
    assert found.verdict is Verdict.INCONCLUSIVE
    assert any("--slo" in reason for reason in found.reasons)
    for pace in ({"rate": 2.0}, {"rate": None, "trace_time": 1.0}):
        open_loop = [[replaced(each, pace=pace) for each in arm] for arm in (baseline, faster)]
        found = judge(*open_loop, Demands(slo=SLO))
        assert found.verdict is Verdict.INCONCLUSIVE
        assert any("compare closed loops" in reason for reason in found.reasons)
    unknown = [[with_requests(each, latency_s=None) for each in arm] for arm in (baseline, faster)]
    found = judge(*unknown, Demands(slo={"latency": 1e-3}))
    assert any("only 0.0%" in veto for veto in found.vetoes), "what is unknown is not met"
    found = judge(baseline, faster, Demands(slo={"ttft": 1.5}))
    assert found.verdict is Verdict.FAIL
    assert any("baseline: only" in veto for veto in found.vetoes)


# ---------------------------------------------------------------------------------- guard rails

VETOES = {
    "failed": (lambda r: replaced(r, requests=(FAILED, *r.requests[1:])), "1 requests failed"),
    "tpot": (lambda r: with_requests(r, latency_s=99.0), "later tokens are slower"),
    "lengths": (lambda r: with_requests(r, output_tokens=12), "answers of 440 and 480 tokens"),
    "answers": (lambda r: with_requests(r, output="else"), "200 of 200 answers differ"),
    "hit rate": (lambda r: replaced(r, simulated_hit_rate=0.3), "the load as sent allows 30.0%"),
    "lag": (lambda r: with_requests(r, intended_s=0.0, sent_s=0.05), "the client sent late, by 50"),
    "cold": (
        lambda r: replaced(r, loaded_nbytes=101),
        "devices gave 100 bytes, fewer than the 101",
    ),
}
FAILED = None


@pytest.mark.parametrize("name", VETOES)
def test_a_guard_rail_vetoes(baseline, candidate, name):
    global FAILED
    FAILED = msgspec.structs.replace(candidate[0].requests[0], error="HTTP 429", ttft_s=None)
    change, message = VETOES[name]
    changed = [change(each) for each in candidate]
    if name == "failed":
        changed[1:] = candidate[1:]
    found = judge(baseline, changed, DEMANDS)
    assert found.verdict is Verdict.FAIL
    assert any(message in veto for veto in found.vetoes), found.vetoes


def test_the_tail_may_not_rise(run):
    before = runs(run, [1.0] * 5, count=80)
    same = runs(run, [0.6] * 5, count=80)
    assert judge(before, same, DEMANDS).verdict is Verdict.PASS
    wide = runs(run, [0.6] * 5, count=80, sigma=1.5)
    found = judge(before, wide, DEMANDS)
    assert found.verdict is Verdict.FAIL
    assert any("the slowest first tokens" in veto for veto in found.vetoes)
    mixed = [same[0], same[1], same[2], wide[3], same[4]]
    found = judge(before, mixed, DEMANDS)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert any("not proved to be no slower" in reason for reason in found.reasons)


def test_what_is_not_told_is_not_checked_and_no_veto(baseline, candidate):
    unknown = {
        "has_prefix_cache": None,
        "prompts": None,
        "pace": None,
        "simulated_hit_rate": None,
        "read_nbytes": None,
        "loaded_nbytes": None,
    }
    nothing = {"output": None, "latency_s": None, "cached_tokens": None, "sent_s": None}
    bare = [
        [with_requests(replaced(each, **unknown), **nothing) for each in arm]
        for arm in (baseline, candidate)
    ]
    found = judge(*bare, Demands(throughput_gain=0.0))
    assert (found.verdict, found.vetoes) == (Verdict.PASS, ())
    assert len(found.not_checked) == 10


def test_answers_that_only_one_arm_tells_are_not_compared(baseline, candidate):
    half = [
        replaced(each, requests=each.requests[:20] + with_requests(each, output=None).requests[20:])
        for each in candidate
    ]
    found = judge(baseline, half, DEMANDS)
    assert "whether both arms answer alike: only 100 of 200 answers are told by both" in (
        found.not_checked
    )


def test_a_hit_rate_of_blocks_as_long_as_prompts_is_not_checked(baseline, candidate):
    warm = [with_requests(replaced(each, block_size=200), cached_tokens=99) for each in candidate]
    found = judge(baseline, warm, DEMANDS)
    assert "hit rate against the simulated one" in found.not_checked


@pytest.mark.parametrize("drop", [0.0, 0.25, 0.5])
def test_a_ratio_that_is_the_bound_itself_is_not_decided_by_more_pairs(run, drop):
    before = runs(run, [1.0] * 5)
    after = runs(run, [1.0 - drop] * 5, seed=10)
    found = judge(before, after, Demands(slo=SLO, throughput_gain=0.0, ttft_drop=drop))
    assert (found.verdict, found.pairs_needed) == (Verdict.INCONCLUSIVE, None)


# -------------------------------------------------------------------------- what is not compared


def test_runs_that_do_not_belong_together_are_refused(run, baseline, candidate):
    other = [run(0.6, count=41, seed=n) for n in range(5)]
    longer = [with_requests(each, prompt_tokens=7) for each in candidate]
    asked = [replaced(each, prompts="others") for each in candidate]
    vllm = [replaced(each, tool="vllm") for each in candidate]
    slower = [replaced(each, pace={"rate": None, "concurrency": 2.0}) for each in candidate]
    steady = [replaced(each, phase="steady") for each in candidate]
    again = [replaced(candidate[0], arm=f"{n}", round=n) for n in range(5)]
    same = [replaced(each, salt="a") for each in candidate]
    for wrong, message in (
        (candidate[:4], "5 runs of the baseline and 4"),
        (other, "sent 40 and 41 requests"),
        (longer, "different lengths"),
        (asked, "asked different prompts"),
        (slower, "sent at different paces"),
        ([candidate[0], *candidate[:4]], "a run is there twice"),
        (vllm, r"several tools \(headstart, vllm\)"),
        (steady, r"different phases \(\(none\), steady\)"),
        (again, "a run is there twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            judge(baseline, wrong, DEMANDS)
    with pytest.raises(ConfigError, match="two pairs have the same salt"):
        judge([replaced(each, salt="a") for each in baseline], same, DEMANDS)
    with pytest.raises(ConfigError, match="two pairs have the same salt"):
        judge(baseline, same, DEMANDS)
    salted = [replaced(each, salt=f"{n}") for n, each in enumerate(baseline)]
    others = [replaced(each, salt=f"other {n}") for n, each in enumerate(candidate)]
    with pytest.raises(ConfigError, match="different salts"):
        judge(salted, others, DEMANDS)
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        judge(baseline[:1], candidate[:1], DEMANDS)


def test_a_straw_man_is_refused_unless_it_is_meant(baseline, candidate):
    straw = [replaced(each, has_prefix_cache=False) for each in baseline]
    with pytest.raises(ConfigError, match="straw man"):
        judge(straw, candidate, DEMANDS)
    meant = Demands(slo=SLO, throughput_gain=0.0, allow_no_reuse=True)
    assert judge(straw, candidate, meant).verdict is Verdict.PASS


def test_the_document_says_all_of_it(baseline, candidate):
    told = document(judge(baseline, candidate, DEMANDS), DEMANDS)
    assert (told["schema"], told["verdict"], told["pairs"]) == ("headstart.gate/1", "PASS", 5)
    assert set(told["ttft_p50_ratio"]) >= {"estimate", "upper95"}
    assert set(told["throughput_ratio"]) == {"estimate", "lower95", "upper95"}
    assert (told["vetoes"], told["pairs_needed"]) == ([], 5)


# ---------------------------------------------------------------------------- what would deceive


def test_clocks_that_do_not_agree_are_a_veto(baseline, candidate):
    def ahead(run, seconds):
        changed = (
            msgspec.structs.replace(r, intended_s=r.sent_s + seconds, ttft_s=r.ttft_s / 10)
            for r in run.requests
        )
        return replaced(run, requests=tuple(changed))

    found = judge(baseline, [ahead(each, 5.0) for each in candidate], DEMANDS)
    assert found.verdict is Verdict.FAIL
    assert any("its clocks do not agree" in veto for veto in found.vetoes)
    found = judge(baseline, [ahead(each, 0.0) for each in candidate], DEMANDS)
    assert not any("clocks" in veto for veto in found.vetoes)


def test_times_of_some_requests_do_not_tell_the_send_lag(baseline, candidate):
    assert "client send lag" not in judge(baseline, candidate, DEMANDS).not_checked
    partly = [
        replaced(
            each,
            requests=(*each.requests[:-1], msgspec.structs.replace(each.requests[-1], sent_s=None)),
        )
        for each in candidate
    ]
    assert "client send lag" in judge(baseline, partly, DEMANDS).not_checked


def test_a_run_with_other_names_is_the_same_run(baseline, candidate):
    copies = [with_requests(candidate[0], session=f"{n}") for n in range(5)]
    with pytest.raises(ConfigError, match="a run is there twice"):
        judge(baseline, copies, DEMANDS)


def test_rounds_in_another_order_are_refused(baseline, candidate):
    before = [replaced(each, round=n) for n, each in enumerate(baseline)]
    after = [replaced(each, round=n) for n, each in enumerate(candidate)]
    assert judge(before, after, DEMANDS).verdict is Verdict.PASS
    with pytest.raises(ConfigError, match="rounds 0 and 4"):
        judge(before, after[::-1], DEMANDS)
