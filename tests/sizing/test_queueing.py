"""The simulation, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstart.costs import EngineCosts
from headstart.errors import ConfigError
from headstart.sizing.queueing import Work, follow, simulate


def costs(**changes):
    """A token computed takes 1 s, a byte copied nothing."""
    fields = {
        "step_s": 0.0,
        "token_s": 1.0,
        "pair_s": 0.0,
        "uncertainty": 0.0,
        "max_step_tokens": 1000,
        "copy_bytes_per_s": 1e30,
    }
    return EngineCosts(**{**fields, **changes})


def followed(works, *, clients=1, engines=1, tpot_s=0.0, **engine):
    return follow(
        works,
        costs=costs(**engine),
        clients=clients,
        engines=engines,
        tpot_s=tpot_s,
        bytes_per_s=1000.0,
    )


def simulated(works, *, clients=1, engines=1, tpot_s=0.0, **engine):
    return simulate(
        works,
        costs=costs(**engine),
        clients=clients,
        engines=engines,
        tpot_s=tpot_s,
        bytes_per_s=1000.0,
    )


def ttfts(outcomes):
    return [pytest.approx(each.ttft_s) for each in outcomes]


def hit(**changes):
    """All but one token held: 1,000 bytes to read, 1 s."""
    return Work(**{"tokens": 2, "held_tokens": 1, "read_nbytes": 1000, **changes})


# --------------------------------------------------------------------------------------------- TTFT


def test_one_alone_takes_latency_reading_copying_computing():
    work = hit(fixed_s=0.5, copy_nbytes=30)
    (found,) = followed([work], copy_bytes_per_s=10.0, step_s=0.25)
    assert found.ttft_s == pytest.approx(0.5 + 1.0 + 3.0 + 0.25 + 1.0)
    assert found.tpot_s == 0.0


def test_reads_at_once_share_the_device_and_end_together():
    found = followed([hit()] * 8, clients=8, token_s=0.0)
    assert ttfts(found) == [8.0] * 8


def test_a_short_read_beside_a_long_one_ends_first():
    found = followed([hit(), hit(read_nbytes=5000)], clients=2, token_s=0.0)
    # Both get half until the short one is done, then the long one all: 4,000 bytes are left.
    assert ttfts(found) == [2.0, 6.0]


def test_a_read_that_begins_later_finds_the_device_shared():
    late = hit(fixed_s=0.5)
    assert ttfts(followed([hit(), late], clients=2, token_s=0.0)) == [1.5, 2.0]


def test_prompts_that_fit_a_step_come_together_and_others_in_turn():
    prompts = [Work(tokens=400)] * 4
    # A step of 1,000 tokens takes two prompts whole, half of the third, which ends in the next.
    assert ttfts(followed(prompts, clients=4)) == [1000.0, 1000.0, 1600.0, 1600.0]
    assert ttfts(followed(prompts, clients=4, max_step_tokens=400)) == [
        400.0,
        800.0,
        1200.0,
        1600.0,
    ]


def test_a_step_costs_its_overhead_once():
    found = followed([Work(tokens=10)] * 3, clients=3, step_s=5.0)
    assert ttfts(found) == [35.0] * 3


def test_attention_costs_the_same_in_one_step_and_in_many():
    work = [Work(tokens=100)]
    one = followed(work, pair_s=0.01)
    many = followed(work, pair_s=0.01, max_step_tokens=7)
    assert one[0].ttft_s == pytest.approx(100 + 0.01 * 100**2 / 2)
    assert many[0].ttft_s == pytest.approx(one[0].ttft_s)


def test_engines_share_the_device_but_not_their_gpus():
    found = followed([hit()] * 3, engines=3, token_s=2.0)
    assert ttfts(found) == [3.0 + 2.0] * 3


def test_hits_in_memory_do_not_wait_for_reads():
    memory = hit(read_nbytes=0, copy_nbytes=10)
    found = followed([hit(read_nbytes=50_000), memory], clients=2, copy_bytes_per_s=10.0)
    assert ttfts(found) == [51.0, 2.0]


# --------------------------------------------------------------------------------------------- TPOT


def test_an_answer_that_runs_alone_is_not_delayed():
    found = followed([hit(output_tokens=11)] * 3, tpot_s=0.5)
    assert [each.tpot_s for each in found] == pytest.approx([0.5] * 3)
    assert [each.asked_s for each in found] == pytest.approx([0.0, 7.0, 14.0])


def apart(work, **engine):
    """What comes of two clients that ask for it in turn, the second a while after the first."""
    late = replace(work, fixed_s=1.0)
    return followed([work, late, *[work] * 20], clients=2, tpot_s=0.5, **engine)[2:-2]


def test_answers_are_delayed_by_the_prefills_of_others():
    """Once in every answer falls a prefill of the other's, of 6 s, which gives it a token."""
    found = apart(Work(tokens=6, output_tokens=11))
    assert [each.tpot_s for each in found] == pytest.approx([0.5 + 6 / 10] * len(found))
    # A prefill beside an answer is longer by the token that it gives.
    assert ttfts(found) == [6.5] * len(found)


def test_copies_delay_answers_as_prefills_do():
    copied = hit(read_nbytes=0, copy_nbytes=60, output_tokens=11)
    found = apart(copied, token_s=0.0, copy_bytes_per_s=10.0)
    assert [each.tpot_s for each in found] == pytest.approx([0.5 + 6 / 10] * len(found))


def test_reads_delay_no_answers():
    found = apart(hit(output_tokens=11), token_s=0.0)
    assert [each.tpot_s for each in found] == pytest.approx([0.5] * len(found))


def test_a_prefill_of_many_steps_gives_as_many_tokens():
    """One of the 3 tokens of a step is the answer's: 3 steps of 2 s and 0.5 s."""
    found = apart(Work(tokens=6, output_tokens=11), max_step_tokens=3)
    assert [each.tpot_s for each in found] == pytest.approx([0.5 + 6 / 10] * len(found))
    assert ttfts(found) == [7.5] * len(found)


@pytest.mark.parametrize("clients", [1, 3, 16])
def test_clients_are_always_under_way_and_no_engine_works_more_than_all_the_time(clients):
    works = [Work(tokens=2, output_tokens=5), Work(tokens=6, output_tokens=9)] * 200
    found = followed(works, clients=clients, tpot_s=0.2)
    span = max(each.answered_s for each in found)
    under_way_s = sum(each.answered_s - each.asked_s for each in found)
    assert clients * 0.95 <= under_way_s / span <= clients
    assert sum(work.tokens for work in works) <= span


def test_more_clients_cost_ttft_and_tpot():
    works = [Work(tokens=2, output_tokens=50)]
    few, many = (simulated(works, clients=n, tpot_s=0.2) for n in (2, 12))
    assert many.tpot_p50_s > 1.2 * few.tpot_p50_s
    assert many.p99_s > 1.2 * few.p99_s
    assert many.requests_per_s > few.requests_per_s
    assert simulated(works, clients=12, tpot_s=0.2) == many


# --------------------------------------------------------------------------------------------- rest


def test_long_prompts_make_the_tail():
    mixed = simulated([hit(share=0.9), hit(share=0.1, read_nbytes=50_000)], token_s=0.0)
    assert (mixed.p50_s, mixed.p99_s) == (pytest.approx(1.0), pytest.approx(50.0))


def test_the_first_wave_is_the_cold_start():
    times = simulated([Work(tokens=2, output_tokens=101)], clients=4, tpot_s=0.1)
    assert times.burst_worst_s == pytest.approx(8.0)
    assert times.p50_s < times.burst_worst_s


def test_answers_that_take_no_time():
    """However late it is: a moment later cannot be told from now, and that must not matter."""
    long = [Work(tokens=100_000, output_tokens=7)] * 20
    found = followed(long, token_s=100.0)
    assert found[-1].answered_s == pytest.approx(20 * 1e7)
    assert max(each.tpot_s for each in found) < 1e-3


def test_as_many_steps_as_can_be_simulated():
    with pytest.raises(ConfigError, match=r"10000020 steps of 3 tokens: .* larger steps"):
        simulated([Work(tokens=1_000_000)], max_step_tokens=3)


@pytest.mark.parametrize(("clients", "engines"), [(0, 1), (1001, 2)])
def test_as_many_clients_as_can_be_simulated(clients, engines):
    with pytest.raises(ConfigError, match="between 1 and 2000 can be simulated"):
        simulated([hit()], clients=clients, engines=engines)
