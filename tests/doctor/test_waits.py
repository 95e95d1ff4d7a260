"""Stages that an engine counts in two places, and means beside medians."""

from __future__ import annotations

import pytest

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import Document, load
from headstart.doctor.split import queued_s, split_of, whole


def told(text, *more):
    documents = [Document(path="x.toml", text=text)] if text else []
    documents += [Document(path=f"{n}.prom", text=each) for n, each in enumerate(more)]
    return Known(load(documents).facts)


def stages(known):
    split = split_of(known, known.situations[-1])
    return {stage.name: round(stage.seconds, 6) for stage in split.stages}


def rules(known):
    return [finding.rule for finding in diagnose(known).findings]


def mean(name, count, value, labels='engine="0"'):
    return f"{name}_sum{{{labels}}} {count * value}\n{name}_count{{{labels}}} {count}\n"


def vllm(count, *, ttft, queue, prefill):
    return (
        mean("vllm:time_to_first_token_seconds", count, ttft)
        + mean("vllm:request_queue_time_seconds", count, queue)
        + mean("vllm:request_prefill_time_seconds", count, prefill)
    )


HEADSTART = """headstart:hits_total{{engine="0"}} {hits}
headstart:wait_seconds_total{{engine="0"}} {waited}
headstart:load_copy_seconds_total{{engine="0"}} {copied}
headstart:load_bytes_total{{engine="0"}} {nbytes}
"""
OBSERVED = """engine = "{engine}"
connector = "{connector}"
hit_rate = 0.9
ttft_mean = 10
queue = 6
load = 5
prefill = 4
"""


def test_waits_of_headstart_are_of_the_queue_and_over_all_requests():
    page = vllm(100, ttft=3.0, queue=2.4, prefill=0.5)
    page += HEADSTART.format(hits=20, waited=180.0, copied=4.0, nbytes=8e9)
    known = told("", page)
    assert known.top.numbers("queue", "queue_load") == (2.4, 1.8)
    # A fifth of the requests load for 9.2 s: 1.84 s of the mean first token.
    assert known.top.number("load") == pytest.approx(1.84)
    assert known.top.number("load_nbytes") == pytest.approx(8e7)
    assert stages(known) == {"queue": 0.6, "load": 1.84, "prefill": 0.5, "rest": 0.06}


def test_copies_before_a_forward_are_in_the_prefill():
    page = vllm(10, ttft=2.0, queue=0.5, prefill=1.5)
    page += HEADSTART.format(hits=10, waited=4.0, copied=6.0, nbytes=1e9)
    assert stages(told("", page)) == {"queue": 0.1, "load": 1.0, "prefill": 0.9, "rest": 0.0}


def test_lookups_that_vllm_put_off_are_waits_of_the_queue():
    page = vllm(50, ttft=4.0, queue=3.6, prefill=0.4)
    page += mean("vllm:kv_offload_lookup_async_delay_seconds", 25, 6.4)
    known = told("", page)
    assert known.top.number("queue_load") == pytest.approx(3.2)
    assert stages(known) == {"queue": 0.4, "load": 3.2, "prefill": 0.4, "rest": 0.0}
    assert "queue_dominates" not in rules(known)
    # None were put off: nothing is known of the loads.
    known = told("", page.replace("160.0", "0.0"))
    assert (known.top.number("queue_load"), stages(known)["queue"]) == (None, 3.6)


@pytest.mark.parametrize(
    ("waiting", "deferred", "awaited"), [(20, 18, 5.4), (20, 0, None), (3, 3, None)]
)
def test_what_those_who_wait_wait_for(waiting, deferred, awaited):
    page = vllm(200, ttft=7.0, queue=6.0, prefill=0.9)
    page += f'vllm:num_requests_running{{engine="0"}} 4\nvllm:num_requests_waiting {waiting}\n'
    page += f'vllm:num_requests_waiting_by_reason{{reason="deferred"}} {deferred}\n'
    known = told("", page)
    assert known.top.number("queue_load") == (awaited and pytest.approx(awaited))
    assert ("queue_dominates" in rules(known)) == (awaited is None)


@pytest.mark.parametrize(
    ("engine", "connector", "expected"),
    [
        # Together they are 5 s more than the whole, which are the load's.
        ("vllm", "headstart", (1, 5, 4)),
        ("vllm", "mooncake", (1, 5, 4)),
        # A load in the forward pass is no longer than that takes.
        ("vllm", "lmcache", (5, 5, 0)),
        ("own", "own", (6, 5, 4)),
    ],
)
def test_where_a_load_is_counted(engine, connector, expected):
    known = told(OBSERVED.format(engine=engine, connector=connector))
    found = stages(known)
    assert (found["queue"], found["load"], found["prefill"]) == expected


def test_a_load_that_fits_beside_the_queue_is_no_part_of_it():
    text = OBSERVED.format(engine="vllm", connector="headstart").replace("queue = 6", "queue = 1")
    assert stages(told(text)) == {"queue": 1.0, "load": 5.0, "prefill": 4.0, "rest": 0.0}


def test_lookups_are_of_the_queue_too():
    text = OBSERVED.format(engine="vllm", connector="headstart").replace("load = 5", "lookup = 2")
    known = told(text.replace("prefill = 4", "prefill = 3.5"))
    assert stages(known) == {"queue": 4.5, "look-up": 2.0, "prefill": 3.5, "rest": 0.0}


def test_what_is_told_of_the_queue_counts_for_any_engine():
    text = OBSERVED.format(engine="own", connector="own") + "queue_load = 4.5\n"
    known = told(text)
    assert queued_s(known, known.top) == 1.5
    assert "queue_dominates" not in rules(known)


def test_a_load_computed_for_others_is_no_part_of_the_queue():
    text = OBSERVED.format(engine="vllm", connector="headstart")
    text = text.replace("load = 5", 'load_nbytes = "90 GB"')
    known = told(text + '[[tiers]]\nname = "of all ranks"\nbandwidth = "1 GB/s"\n')
    assert queued_s(known, known.top) == 6.0


IMPOSSIBLE = 'engine = "vllm"\nconnector = "headstart"\nttft_mean = 1\n{}\nprefill = 2.5\n'


def test_a_sum_that_cannot_be_is_found_whatever_is_counted_twice():
    assert "stage_sum" in rules(told(IMPOSSIBLE.format("queue = 0.4\nload = 0.4")))
    assert "stage_sum" in rules(told(IMPOSSIBLE.format("queue = 0.4\nqueue_load = 0.4")))
    possible = IMPOSSIBLE.format("queue = 1.6\nload = 1.5").replace("2.5", "0.4")
    assert "stage_sum" not in rules(told(possible))


MEDIAN = '[[arms]]\nname = "with"\ncache = "on"\nttft_p50 = {}\n'
OFF = '[[arms]]\nname = "without"\ncache = "off"\nttft_{} = {}\n'
PAGE = vllm(100, ttft=4.0, queue=3.0, prefill=0.9)


def test_means_are_held_against_the_mean():
    known = told(MEDIAN.format(1.0), PAGE)
    arm = known.situations[0]
    assert (whole(arm).key, whole(arm).seconds) == ("ttft_mean", 4.0)
    assert stages(known)["rest"] == pytest.approx(0.1)
    (finding,) = diagnose(known).findings
    assert finding.rule == "queue_dominates"
    assert "3 s of 4 s" in finding.evidence[0].text


def test_stages_beside_a_median_are_medians():
    known = told('ttft_p50 = 1\nttft_mean = 4\nqueue = "0.1 s"\nprefill = "0.8 s"\n')
    assert whole(known.top).key == "ttft_p50"
    known = told('ttft_mean = 4\nqueue = "0.1 s"\nprefill = "3.8 s"\n')
    assert whole(known.top).key == "ttft_mean"
    assert whole(told("queue = 1\n").top) is None


def test_where_only_a_median_is_known_means_may_be_longer():
    without_mean = PAGE.replace("vllm:time_to_first", "vllm:another_first")
    known = told(MEDIAN.format(1.4), without_mean)
    assert whole(known.situations[0]).slack > 1.0
    assert rules(known) == ["queue_dominates"]  # 3 s: over half of three times 1.4 s
    assert rules(told(MEDIAN.format(2.5), without_mean)) == []
    assert "stage_sum" in rules(told(MEDIAN.format(0.4), without_mean))


def test_arms_are_compared_by_what_both_tell():
    arm = '[[arms]]\nname = "with"\ncache = "on"\nhit_rate = 0.9\nttft_p50 = 2\nttft_mean = 3\n'
    said = diagnose(told(OFF.format("mean", 9) + arm))
    assert "3 s instead of 9 s" in said.healthy[0].text
    said = diagnose(told(OFF.format("p50", 9) + arm))
    assert "2 s instead of 9 s" in said.healthy[0].text


def test_a_mean_that_is_above_a_median_is_no_slower_hit():
    tier = '[[tiers]]\nname = "disk"\n'
    arm = '[[arms]]\nname = "with"\ncache = "on"\nhit_rate = 0.9\nttft_mean = {}\n'
    off = OFF.format("p50", 2)
    assert "hit_slower" not in rules(told(off + arm.format(2.8) + tier))
    assert "hit_slower" in rules(told(off + arm.format(3.5) + tier))
    assert "hit_slower" in rules(told(OFF.format("mean", 2) + arm.format(2.8) + tier))


SWEEP = """[[arms]]
name = "1"
cache = "on"
concurrency = 1
ttft_p50 = "0.2 s"

[[arms]]
name = "8"
cache = "on"
concurrency = 8
ttft_p50 = "0.8 s"

[[arms]]
name = "32"
cache = "on"
concurrency = 32
ttft_{} = "5 s"
"""
TWO = """[[arms]]
name = "by hash"
cache = "on"
routing = "hash"
ttft_{} = 5

[[arms]]
name = "in turn"
cache = "on"
routing = "in turn"
ttft_p50 = 2
"""
NO_HITS = """[[arms]]
name = "without"
cache = "off"
ttft_p50 = 2

[[arms]]
name = "with"
cache = "on"
hit_rate = 0
ttft_{} = 3
"""


@pytest.mark.parametrize(
    ("text", "rule"),
    [(SWEEP, "service_bound"), (TWO, "routing_costs"), (NO_HITS, "cost_without_hits")],
)
def test_a_mean_says_nothing_beside_medians(text, rule):
    assert rule in rules(told(text.format("p50")))
    assert rule not in rules(told(text.format("mean")))


def test_a_load_in_the_queue_is_what_makes_a_hit_slower():
    text = OFF.format("p50", 4) + MEDIAN.format(10.0) + "hit_rate = 0.9\nqueue = 9\n{}\n"
    head = 'engine = "vllm"\nconnector = "mooncake"\n'
    assert "hit_slower" in rules(told(head + text.format("load = 8.8\nprefill = 0.9")))
    assert "hit_slower" not in rules(told(head + text.format("prefill = 0.9")))


def test_what_waits_for_loads_does_not_wait_for_room():
    text = """engine = "vllm"
ttft_p50 = 10
queue = 9
{}
prefill = 0.8
num_requests = 100
num_preemptions = 20
"""
    (finding, _) = diagnose(told(text.format(""))).findings
    assert (finding.rule, finding.explained_s) == ("preemption", 9.0)
    assert "preemption" not in rules(told(text.format("queue_load = 8.5")))


SPREAD = 'ttft_p50 = "0.5 s"\nttft_mean = "4 s"\n{}'


def test_a_tenth_of_the_requests_is_more_than_a_few():
    assert rules(told(SPREAD.format(""))) == ["mean_hides"]
    assert rules(told(SPREAD.format('ttft_p90 = "4.1 s"'))) == ["mean_hides"]
    assert rules(told(SPREAD.format('ttft_p90 = "12 s"'))) == []


def test_loads_of_some_requests_are_part_of_the_mean_of_all():
    page = vllm(200, ttft=1.0, queue=0.1, prefill=0.9)
    ranks = "".join(
        mean("lmcache:time_to_retrieve", 50, 0.6, f'worker_id="{rank}"') for rank in range(4)
    )
    # Each of four ranks loads for a quarter of the requests.
    assert told("", page + ranks).top.number("load") == pytest.approx(0.15)
    assert told("", ranks).top.number("load") == pytest.approx(0.6)


BUSY = "vllm:num_requests_running {}\nvllm:num_requests_waiting {}\nvllm:kv_cache_usage_perc {}\n"


@pytest.mark.parametrize(
    ("pages", "usage"),
    [
        (((0, 0, 0.0), (0, 0, 0.0)), None),
        (((0, 0, 0.9), (4, 0, 0.3)), 0.3),
        (((6, 2, 0.7), (0, 0, 0.0)), 0.7),
        (((0, 3, 0.6),), 0.6),
    ],
)
def test_the_kv_cache_counts_while_something_runs_or_waits(pages, usage):
    assert told("", *(BUSY.format(*page) for page in pages)).top.number("kv_usage") == usage
