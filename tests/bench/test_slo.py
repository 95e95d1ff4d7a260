"""Service levels: what is parsed, what is refused, which requests meet them."""

import pytest

from headstart.bench.run import Request
from headstart.bench.slo import PRESETS, Slo, parse_slo
from headstart.errors import ConfigError


def request(**changed):
    known = {"session": "0", "prompt_tokens": 9, "output_tokens": 11, "ttft_s": 1.0}
    return Request(**{**known, "latency_s": 2.0, **changed})


def test_what_is_written_is_what_is_asked():
    slo = parse_slo("ttft=2s,tpot=100ms,latency=0.5min")
    assert dict(slo.limits) == {"ttft": 2.0, "tpot": 0.1, "latency": 30.0}
    assert (slo.presets, slo.note) == ((), "")
    assert str(slo) == "ttft <= 2 s, tpot <= 100 ms, latency <= 30 s"
    assert dict(parse_slo(None).limits) == dict(parse_slo("").limits) == {}


def test_a_preset_has_the_published_limits_and_says_what_it_is_not():
    # The table of inference_rules.adoc, in ms.
    published = {
        "llama2-70b": ((2000, 200), (450, 40)),
        "llama3.1-8b": ((2000, 100), (500, 30)),
        "llama3.1-405b": ((6000, 175), (4500, 80)),
        "mixtral-8x7b": ((2000, 200), None),
        "deepseek-r1": ((2000, 80), (1500, 15)),
        "gpt-oss-120b": ((3000, 80), (2000, 20)),
    }
    names = {}
    for model, scenarios in published.items():
        for scenario, limits in zip(("server", "interactive"), scenarios, strict=True):
            if limits:
                names[f"mlperf-{model}-{scenario}"] = limits
    assert PRESETS.keys() == names.keys()
    for name, (ttft_ms, tpot_ms) in names.items():
        slo = parse_slo(f"{name},latency=30s")
        assert slo.limits["ttft"] == pytest.approx(ttft_ms / 1000)
        assert slo.limits["tpot"] == pytest.approx(tpot_ms / 1000)
        assert slo.limits["latency"] == 30.0
        assert slo.presets == (name,)
        assert name in str(slo)
        assert "not MLPerf" in slo.note
        assert "forbids" in slo.note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tfft=2s", r"'tfft=2s' is unknown; write one of ttft, tpot, latency"),
        ("ttft", "is unknown"),
        ("ttft=", "is unknown"),
        ("ttft=2s,", "'' is unknown"),
        ("ttft=fast", "is not a quantity"),
        ("ttft=2s,ttft=3s", "ttft has two limits"),
        ("mlperf-llama2-70b-server,tpot=1s", "tpot has two limits"),
        ("mlperf-gpt2", "presets: mlperf-llama2-70b-server"),
    ],
)
def test_what_is_no_service_level_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


@pytest.mark.parametrize(
    ("limits", "changed", "is_met"),
    [
        ({"ttft": 1.0}, {}, True),
        ({"ttft": 0.99}, {}, False),
        ({"tpot": 0.1}, {}, True),
        ({"tpot": 0.09}, {}, False),
        ({"tpot": 0.09}, {"output_tokens": 1}, True),  # there are no later tokens
        ({"tpot": 0.09}, {"latency_s": None}, False),  # nobody knows
        ({"latency": 2.0}, {}, True),
        ({"latency": 2.0}, {"latency_s": None}, False),
        ({"ttft": 1.0, "latency": 1.9}, {}, False),
        ({"ttft": 9.0}, {"error": "HTTP 500"}, False),
        ({}, {"ttft_s": None}, False),
    ],
)
def test_a_request_meets_all_of_it_or_misses(limits, changed, is_met):
    assert Slo(limits=limits).is_met(request(**changed)) is is_met
