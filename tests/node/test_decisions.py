"""The decision log: what it keeps, how it is paged, what it refuses, and its metrics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.client import command
from headstart.node.decisions import DECISION_SCHEMA, DecisionLog
from headstart.testing import Fault

SOON = 20.0
MIB = 1 << 20
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(64 << 10,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
RECORD = protocol.Decided(
    request_id="cmpl-1",
    prompt_tokens=4096,
    found_tokens=2048,
    found_by_tier={"memory": 1024, "file": 2048},
    loaded_tokens=2048,
    reason="load",
    predicted_load_s=0.25,
    predicted_prefill_s=0.5,
    deadline_s=0.75,
    actual_load_s=0.3,
    actual_prefill_s=0.6,
    saved_s=1.5,
    regret_s=0.125,
    is_late=False,
)
SECONDS = [field.name for field in msgspec.structs.fields(RECORD) if field.type is float]


def record(**changes):
    return msgspec.structs.replace(RECORD, **changes)


def filled(count, **options):
    log = DecisionLog(**options)
    for number in range(count):
        log.add(record(request_id=str(number)))
    return log


@dataclass
class Page:
    ids: list[str]
    last: int
    num_lost: int


def after(log, number):
    answer = log.after(number)
    return Page(
        [each["request_id"] for each in answer["decisions"]], answer["last"], answer["num_lost"]
    )


def served(client):
    """Wait until what was told before is done; whether the connection has gone on."""
    return client._ask(protocol.Claim(0), protocol.Claimed) is not None and not client.num_failures


# -------------------------------------------------------------------------------------------- pages


def test_a_record_has_the_documented_fields():
    log = DecisionLog()
    log.add(RECORD)
    (found,) = log.after(0)["decisions"]
    assert found == {"schema": DECISION_SCHEMA} | msgspec.structs.asdict(RECORD)
    assert DECISION_SCHEMA == "headstart.decision/1"


def test_an_empty_log_has_no_page():
    assert after(DecisionLog(), 0) == Page([], 0, 0)


def test_what_came_after_a_number_is_given_once_and_in_order():
    log = filled(5)
    assert after(log, 0) == Page(["0", "1", "2", "3", "4"], 5, 0)
    assert after(log, 3) == Page(["3", "4"], 5, 0)
    assert after(log, 5) == Page([], 5, 0)
    log.add(record(request_id="new"))
    assert after(log, 5) == Page(["new"], 6, 0)


def test_a_long_log_is_read_page_by_page():
    log = filled(2500)
    ids, last = [], 0
    while (page := after(log, last)).ids:
        assert len(page.ids) <= 1000
        ids += page.ids
        last = page.last
    assert ids == [str(number) for number in range(2500)]


def test_a_full_log_loses_the_oldest_and_says_how_many():
    log = filled(10, max_records=4)
    assert after(log, 0) == Page(["6", "7", "8", "9"], 10, 6)
    assert after(log, 5) == Page(["6", "7", "8", "9"], 10, 1)
    assert after(log, 7) == Page(["7", "8", "9"], 10, 0)
    assert sum(log.num_by_reason.values()) == 10, "sums are over all"
    assert log.saved_s == 15.0


def test_a_reader_who_is_ahead_of_a_new_log_misses_nothing():
    """Its number is of an earlier run of the node."""
    log = filled(3)
    assert after(log, 900) == Page(["0", "1", "2"], 3, 0)


@pytest.mark.parametrize("number", [-1, -(2**62), 2**62])
def test_a_number_that_no_record_has_is_answered(number):
    page = after(filled(3), number)
    assert page.num_lost == 0
    assert page.last <= 3


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_of_seconds_is_refused(name, value):
    log = DecisionLog()
    with pytest.raises(ConfigError, match="number"):
        log.add(record(**{name: value}))
    assert log.after(0)["decisions"] == []
    assert math.isfinite(log.saved_s)


def test_what_is_refused_is_told_and_the_connection_goes_on(world, client, caplog):
    assert client.connect()
    client.decided(record(saved_s=math.nan))
    client.decided(RECORD)
    assert served(client)
    assert "Decided was refused" in caplog.text
    assert len(world.services.decisions.after(0)["decisions"]) == 1


def test_sums_stay_numbers_whatever_engines_say():
    log = DecisionLog()
    for seconds in (1.7e308, 1.7e308, -1.7e308, -1.7e308, 2.0):
        try:
            log.add(record(saved_s=seconds, regret_s=abs(seconds)))
        except ConfigError:
            continue
    assert math.isfinite(log.saved_s)
    assert math.isfinite(log.regret_s)


def test_a_regret_below_zero_lowers_no_counter():
    log = filled(1)
    before = log.regret_s
    try:
        log.add(record(regret_s=-5.0))
    except ConfigError:
        return
    assert log.regret_s >= before


def test_giant_texts_are_kept_short():
    log = DecisionLog()
    tiers = {f"{n}{'t' * MIB}": n for n in range(3)}
    log.add(record(request_id="r" * MIB, reason="w" * MIB, found_by_tier=tiers))
    assert len(json.dumps(log.after(0))) < 10_000
    assert sum(map(len, log.num_by_reason)) < 1000


def test_many_tiers_and_many_reasons_are_kept_few():
    log = DecisionLog()
    for number in range(1000):
        log.add(record(reason=f"reason {number}", found_by_tier={f"t{n}": n for n in range(100)}))
    assert len(log.num_by_reason) <= 128
    assert all(len(each["found_by_tier"]) <= 16 for each in log.after(0)["decisions"])
    log.add(record(reason="reason 3"))
    assert log.num_by_reason["reason 3"] == 2


def test_an_engine_with_giant_texts_hides_the_log_from_nobody(world, client):
    assert client.connect()
    for _ in range(3):
        client.decided(record(request_id="r" * MIB, found_by_tier={"t" * (8 * MIB): 1}))
    assert served(client)
    answer = command(world.path, protocol.Decisions(), SOON)
    assert len(answer.fields["decisions"]) == 3


# ---------------------------------------------------------------------------------- what is counted


def metrics(world):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(world.services.metrics.text().decode())
        for sample in family.samples
    }


def test_metrics_sum_up_what_engines_tell(world, client):
    assert client.connect()
    client.decided(record(saved_s=2.0, regret_s=0.25, is_late=True))
    client.decided(record(saved_s=-0.5, regret_s=0.5, reason="slow"))
    client.decided(record(saved_s=1.0, regret_s=0.0, is_late=True))
    assert served(client)
    found = metrics(world)
    assert found["headstart_saved_seconds",] == 2.5
    assert found["headstart_regret_seconds_total",] == 0.75
    assert found["headstart_deadline_missed_total",] == 2
    assert found["headstart_decisions_total", "load"] == 2
    assert found["headstart_decisions_total", "slow"] == 1
    assert world.services.status()["decisions"] == {"load": 2, "slow": 1}


def test_metrics_show_the_breaker_of_each_tier(world):
    found = metrics(world)
    assert found["headstart_breaker_open", "file"] == 0
    assert found["headstart_breaker_opened_total", "file"] == 0
    assert found["headstart_device_bytes_per_second", "file"] > 0
    world.put(["a", "b"])
    world.forget_memory()
    world.slow.schedule = lambda number: Fault(fails=True)
    for _ in range(2):
        world.store.load(keys_from_hashes(NAMESPACE, [b"a", b"b"]), timeout_s=SOON).close()
    found = metrics(world)
    assert found["headstart_breaker_open", "file"] == 1
    assert found["headstart_breaker_opened_total", "file"] == 1
    device = world.services.status()["devices"]["file"]
    assert (device["breaker"], device["num_opened"]) == ("errors", 1)


def test_metrics_take_any_reason_as_a_label(world):
    world.services.decisions.add(record(reason='"}\n\\ \x00 é'))
    assert metrics(world)["headstart_decisions_total", '"}\n\\ \x00 é'] == 1


def test_the_log_is_paged_over_the_socket(world, client):
    assert client.connect()
    for number in range(3):
        client.decided(record(request_id=str(number)))
    assert served(client)
    answer = command(world.path, protocol.Decisions(1), SOON).fields
    assert [each["request_id"] for each in answer["decisions"]] == ["1", "2"]
    assert (answer["last"], answer["num_lost"]) == (3, 0)
