"""What becomes known of each request of a planned engine, and engines that load nothing."""

from __future__ import annotations

import pytest

from headstart.costs import EngineCosts
from headstart.testing import Fault
from vllm_cases import ASYNC, SYNC, tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _no_hook_fails(monkeypatch):
    from headstart.engines.vllm.connector import HeadstartConnector

    errors = []
    monkeypatch.setattr(HeadstartConnector, "_failed_in", lambda *args: errors.append(args[1:]))
    yield
    assert errors == []


def believe_slow(monkeypatch):
    """Let engines believe that they take 4 ms a token."""
    from headstart.engines.vllm import connector

    costs = EngineCosts(
        step_s=0.001,
        token_s=0.004,
        pair_s=0.0,
        uncertainty=0.05,
        max_step_tokens=1024,
        copy_bytes_per_s=1e9,
    )
    monkeypatch.setattr(connector, "prior_costs", lambda config: costs)


def decisions(node, engine):
    """All that is known of requests, by name."""
    engine.settle()
    engine.side._client.flush()
    node.settled()
    found = {}
    for each in node.services.decisions.after(0)["decisions"]:
        found.setdefault(each["request_id"], []).append(each)
    return found


def sane(made):
    """Whether the numbers of a decision can be true."""
    seconds = ("predicted_load_s", "predicted_prefill_s", "deadline_s", "actual_load_s", "regret_s")
    assert all(0.0 <= made[name] < 60.0 for name in seconds), made
    assert 0.0 < made["actual_prefill_s"] < 60.0
    assert 0 <= made["loaded_tokens"] < made["prompt_tokens"]
    assert made["loaded_tokens"] <= made["found_tokens"]
    reasons = {"miss", "load", "part", "slow", "risky", "breaker"}
    assert made["reason"] in reasons
    assert made["found_tokens"] or made["reason"] == "miss"
    return True


# ---------------------------------------------------------------------------------- loading nothing

NOTHING = [{"load": "never"}, {"shadow": 1.0}, {"load": "always", "shadow": 1.0}]


@pytest.mark.parametrize("extra", NOTHING)
def test_nothing_is_loaded_but_all_is_stored(node, filled, fresh, extra):
    engine, prompt = fresh(extra=extra), filled + tokens(40, seed=1)
    told = engine.ask("new", prompt, 2)
    assert "loaded_tokens" not in told
    assert told["stored_blocks"] == 2
    known = decisions(node, engine).get("new", [])
    assert [made["reason"] for made in known] == (["shadow"] if "shadow" in extra else [])
    assert fresh().ask("other", prompt)["loaded_tokens"] == 128


def crowd(engine):
    """Requests of which some are preempted; their number."""
    prompts = [tokens(40) + tokens(10 + 13 * n, seed=n) for n in range(5)]
    requests = [engine.add(f"{n}", prompt, 50) for n, prompt in enumerate(prompts)]
    engine.settle()
    return sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("extra", NOTHING)
def test_nothing_is_loaded_for_preempted_requests_either(node, fresh, extra):
    crowd(fresh(blocks=128))
    node.settled()
    engine = fresh(blocks=14, extra=extra, max_num_batched_tokens=48)
    assert crowd(engine)
    loaded = [told for told in engine.told.values() if "loaded_tokens" in told]
    assert loaded == []


# ------------------------------------------------------------------------------------ the decisions


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_leaves_one_decision(node, filled, fresh, overlap, extra, monkeypatch):
    """Hits, misses and late ones; what is aborted leaves one or none."""
    believe_slow(monkeypatch)
    node.settled()
    node.restart()
    node.slow.schedule = lambda n: Fault(latency_s=0.05 * (n % 3))
    engine = fresh(
        extra={"load": "planned", "lookup_budget": 0.2, **extra},
        overlap=overlap,
        max_num_batched_tokens=64,
    )
    for n in range(12):
        engine.add(f"{n}", filled[: 16 * (n % 6) + 1] + tokens(20, seed=n), 1 + n % 3)
        engine.steps(n % 3)
        if n % 4 == 3:
            engine.abort(f"{n}", late=n == 3)
    found = decisions(node, engine)
    aborted = {name for name, reason in engine.reasons.items() if reason != "length"}
    kept = {f"{n}" for n in range(12)} - aborted - {f"{n}" for n in (3, 7, 11)}
    assert kept <= found.keys()
    assert all(len(made) == 1 and sane(made[0]) for made in found.values())


def test_a_preempted_request_leaves_one_decision(node, fresh, monkeypatch):
    believe_slow(monkeypatch)
    extra = {"load": "planned", "lookup_budget": 0.2}
    for blocks in (128, 14):
        engine = fresh(blocks=blocks, extra=extra, max_num_batched_tokens=48)
        assert crowd(engine) or blocks == 128
        found = decisions(node, engine)
        node.services.decisions.__init__()
        counts = {name: len(made) for name, made in found.items()}
        assert counts == dict.fromkeys("01234", 1)
        assert all(sane(made) for (made,) in found.values())
