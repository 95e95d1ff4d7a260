"""Single rules at the places where one mechanism ends and another begins."""

from __future__ import annotations

import pytest

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import Document, load


def said(text):
    known = Known(load([Document(path="x.toml", text=text)]).facts)
    return diagnose(known)


def rules(text):
    return [finding.rule for finding in said(text).findings]


TAIL = """hit_rate = 0.9
ttft_p50 = "0.2 s"
ttft_p99 = "6 s"
load = "0.1 s"
load_p99 = "{} s"
"""


def test_a_tail_of_late_loads():
    (finding,) = said(TAIL.format(5.5)).findings
    assert (finding.cause, finding.rule) == ("bandwidth_contention", "tail")
    assert finding.confidence == 0.5  # other things than a shared medium make such a tail


@pytest.mark.parametrize(
    "text",
    [
        TAIL.format(0.9),  # under ten times the median
        TAIL.format(1.5),  # late, but not what the first tokens of the tail wait for
        TAIL.format(5.5).replace("0.9", "0.4"),  # most tokens are computed anyway
        TAIL.format(5.5) + '[[arms]]\nname = "cold"\ncache = "cold"\nttft_mean = "5 s"\n'
        '[[arms]]\nname = "hit"\ncache = "warm"\n',  # a miss takes as long
    ],
)
def test_a_tail_of_something_else(text):
    assert "tail" not in rules(text)


def test_a_pool_that_holds_not_one_piece():
    text = 'pool = "1 GiB"\nfetch = "{} GiB"\nnum_rejects = 40\n'
    (finding,) = said(text.format(1.8)).findings
    assert (finding.cause, finding.rule) == ("no_room", "starved_pool")
    assert "not one piece" in finding.evidence[0].text
    assert "40 loads were refused" in finding.evidence[0].text
    assert rules(text.format(0.4)) == []


POOLS = """[[arms]]
name = "a"
cache = "on"
pool_tokens = 20000
step = "10 ms"
concurrency = {}

[[arms]]
name = "b"
cache = "on"
pool_tokens = 400000
step = "{} ms"
concurrency = 4
"""


def test_steps_that_grow_with_the_pool():
    (finding,) = said(POOLS.format(4, 70)).findings
    assert (finding.cause, finding.rule) == ("serialization", "pool_copies")
    assert finding.share == pytest.approx(1 - 10 / 70)
    assert rules(POOLS.format(4, 11)) == []
    assert rules(POOLS.format(1, 70)) == []  # not the same load


UNUSED = """num_requests = 2000
prompt_tokens = 9000

[[arms]]
name = "alone"
cache = "off"
ttft_p50 = "0.3 s"
{}
[[arms]]
name = "with a tier"
cache = "on"
ttft_p50 = "0.5 s"
hit_rate = 0.7
local_hit_rate = 0.7
load_tokens = 10
"""


def test_a_tier_that_is_not_needed_is_a_finding_where_both_runs_hit_alike():
    assert said(UNUSED.format("hit_rate = 0.7\n")).verdict == "slow_tier"
    # Else the reference may have computed all: then the figures are of something else.
    assert said(UNUSED.format("")).verdict == "measurement"
    assert said(UNUSED.format("hit_rate = 0.1\n")).verdict == "measurement"


SMALL = "pool_tokens = 400000\nhost_pool_tokens = 200000\nhit_rate = 0.1\nttft_p50 = 1\n"


def test_a_host_pool_explains_what_it_would_hold():
    assert said(SMALL).verdict == "configuration"
    # However it is set, far more is in use than both hold.
    diagnosis = said(SMALL + "reuse_distance = 1200000\n")
    assert [each.cause for each in diagnosis.findings] == ["eviction_thrash", "configuration"]
    assert diagnosis.findings[1].share == pytest.approx(200 / 1200)
    # The device holds all of it: a host pool is not what is missing.
    assert rules(SMALL + "sessions = 30\nsession_tokens = 10000\n") == []


LOADED = """prompt_tokens = 10000
kv_bytes_per_token = "100 kB"
prefill_rate = 10000
hit_rate = 0.8
ttft_p50 = "{} s"
[[tiers]]
name = "t"
bandwidth = "0.5 GB/s"
"""


def test_a_load_longer_than_its_first_token_is_of_something_else():
    assert said(LOADED.format(1.8)).verdict == "slow_tier"  # 0.8 GB take 1.6 s
    assert rules(LOADED.format(0.6)) == []  # they cannot: that is the rate of one rank


def test_a_run_that_gains_is_not_slowed_by_its_load():
    text = """prompt_tokens = 10000
prefill_rate = 20000
[[arms]]
name = "without"
cache = "off"
ttft_p50 = "2 s"

[[arms]]
name = "with"
cache = "warm"
hit_rate = 0.9
load = "0.7 s"
ttft_p50 = "{} s"
"""
    assert rules(text.format(0.8)) == []  # whatever the rate that was told
    assert said(text.format(2.0)).verdict == "slow_tier"


def test_what_the_device_holds_is_not_loaded():
    text = LOADED.format(1.8)
    (split,) = said(text).splits
    assert split.stages[0].seconds == pytest.approx(1.6)
    (split,) = said("local_hit_rate = 0.6\n" + text).splits
    assert split.stages[0].seconds == pytest.approx(0.4)


def test_a_run_without_the_cache_does_not_load():
    text = """load = "2 s"
[[arms]]
name = "without"
cache = "off"
ttft_p50 = "0.5 s"

[[arms]]
name = "with"
cache = "on"
hit_rate = 0.9
ttft_p50 = "2.5 s"
"""
    assert [each.arm for each in said(text).splits] == ["with"]
    assert "stage_sum" not in rules(text)


FAILED = """num_requests = 400
[[tiers]]
name = "pool"
num_failed_reads = {}
"""


def test_loads_that_fail_of_requests():
    (finding,) = said(FAILED.format(70)).findings
    assert (finding.cause, finding.rule) == ("correctness", "failed_reads")
    assert rules(FAILED.format(9)) == []
    assert rules(FAILED.format(70) + "num_found = 90000\n") == []  # of blocks it is next to nothing
    assert rules(FAILED.format(70).replace("num_requests = 400", "")) == []


def test_a_limit_that_is_reached_is_what_requests_wait_for():
    text = "kv_usage = 0.2\nrunning = {}\nwaiting = 40\n"
    assert said(text.format(16)).findings[0].confidence == pytest.approx(0.7)
    (finding,) = said(text.format(16) + "max_num_seqs = 16\n").findings
    assert (finding.rule, finding.confidence) == ("admission", 0.85)
    # Far from its limit: they may as well wait to be computed.
    (finding,) = said(text.format(16) + "max_num_seqs = 256\n").findings
    assert finding.confidence == 0.5
