"""Lines of a usual form are read at once, and say what reading them field by field says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.doctor.facts import Known
from headstart.doctor.readers import base, load, log_sglang, log_vllm
from log_samples import PIECES, SGLANG, v1

LONG_WAY = {
    log_vllm: ("_COMMON",),
    log_sglang: ("_COMMON_DECODE", "_COMMON_PREFILL", "_COMMON_TIMES"),
}


def both_ways(text):
    document = base.Document(path="x.log", text=text)
    short = load([document])
    with pytest.MonkeyPatch.context() as patch:
        for module, patterns in LONG_WAY.items():
            for pattern in patterns:
                patch.setattr(module, pattern, re.compile(b"(?!)"))
        return short, load([document])


@given(pieces=st.lists(PIECES, max_size=12), between=st.sampled_from(["\n", "", "\r\n", "\r"]))
def test_lines_read_at_once_say_what_their_fields_say(pieces, between):
    short, long = both_ways("LMCache INFO\n" + between.join(pieces))
    assert short == long


@pytest.mark.parametrize(
    "line",
    [
        v1(3, 9, 50.0, 12.0, more=", Deferred: 2 reqs, Preemptions: 3"),
        v1(3, 9, 50.0, 12.0) + ", MM cache hit rate: 3.0%, External prefix cache hit rate: 70.0%",
        SGLANG["2026"][1].replace("full token usage: 0.93", "full token usage: 0.9, swa usage: 1"),
        SGLANG["2025"][1].replace("#queue-req: 69", "#retracted-req: 3, #queue-req: 69"),
        "ReqTimeStats(rid=a, input_len=9, cached_input_len=1, output_len=2, attempts=1): "
        "queue_duration=1.5ms, queue_duration=2.5ms",
        "ReqTimeStats(rid=a, input_len=9, cached_input_len=1, output_len=2): queue_duration=1ms, "
        "cached_input_len=7",
    ],
)
def test_unusual_lines_are_read_by_their_fields(line):
    short, long = both_ways(line + "\n" + v1(1, 0, 3.0, 5.0))
    assert short == long
    assert short.facts


def test_a_record_that_is_read_at_once_ends_where_the_next_begins():
    one = v1(3, 9, 50.0, 12.0)
    short, long = both_ways(one[: one.index(", Prefix")] + v1(4, 9, 60.0, 14.0, engine=1))
    assert short == long
    known = Known(short.facts)
    assert [each.number("hit_rate") for each in known.workers] == [None, 0.14]


def test_colours_in_the_middle_of_a_record():
    for colour in ("\x1b[32m", "\\u001b[32m", "\\x1b[0m"):
        line = v1(3, 9, 50.0, 12.0).replace("Waiting: ", f"Waiting:{colour} ")
        known = Known(load([base.Document(path="x.log", text=line)]).facts)
        assert known.top.number("waiting") == 9
