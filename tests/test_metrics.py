"""The metric table: names and units as Prometheus wants them, values as the store counts them."""

from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headstart.lease import Lease
from headstart.metrics import _TIER_COUNTERS, _TIER_GAUGES, Metrics
from headstart.store import StoreStats
from headstart.types import TierStats

NUMBERS = {
    field.name: number
    for number, field in enumerate(fields(TierStats), 1)
    if field.name not in ("name", "damage")
}
STATS = StoreStats(
    tiers={
        "memory": TierStats(name="memory", **NUMBERS),
        "file": TierStats(
            name="file",
            damage={"checksum": 21, "stale": 22},
            **{name: 100 * value for name, value in NUMBERS.items()},
        ),
    },
    num_loads=31,
    num_late=32,
    num_writes_skipped=33,
    queued_nbytes=34,
)


@pytest.fixture
def metrics():
    return Metrics(
        lambda: STATS,
        lambda: {"memory": {"ab": 7}, "file": {"ab": 9, 'odd"\\\n': 11}},
        lambda: {"engines": 2, "pinned_bytes": 5},
    )


def families(metrics):
    return {
        family.name: family for family in text_string_to_metric_families(metrics.text().decode())
    }


def value(metrics, name, **labels):
    (found,) = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    ]
    return found


def test_every_number_of_every_tier_is_there(metrics):
    for name, _, field in _TIER_COUNTERS:
        assert value(metrics, f"{name}_total", tier="memory") == NUMBERS[field]
        assert value(metrics, f"{name}_total", tier="file") == 100 * NUMBERS[field]
    for name, _, field in _TIER_GAUGES:
        assert value(metrics, name, tier="file") == 100 * NUMBERS[field]
    told = {field for _, _, field in (*_TIER_COUNTERS, *_TIER_GAUGES)}
    assert told == set(NUMBERS), "what a tier counts is told"


def test_damage_is_told_by_its_cause(metrics):
    assert value(metrics, "headstart_tier_damage_total", tier="file", cause="checksum") == 21
    assert value(metrics, "headstart_tier_damage_total", tier="file", cause="stale") == 22


def test_the_store_and_the_sessions(metrics):
    assert value(metrics, "headstart_loads_total") == 31
    assert value(metrics, "headstart_loads_late_total") == 32
    assert value(metrics, "headstart_writes_skipped_total") == 33
    assert value(metrics, "headstart_write_queue_bytes") == 34
    assert value(metrics, "headstart_engines") == 2
    assert value(metrics, "headstart_pinned_bytes") == 5


def test_bytes_by_namespace_whatever_their_name(metrics):
    assert value(metrics, "headstart_namespace_bytes", tier="memory", namespace="ab") == 7
    assert value(metrics, "headstart_namespace_bytes", tier="file", namespace='odd"\\\n') == 11


def test_names_follow_the_conventions(metrics):
    metrics.lookup(0.1)
    for family in families(metrics).values():
        assert family.name.startswith("headstart_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_lookups_are_counted_by_their_time(metrics):
    for seconds in (1e-5, 3e-4, 0.3, 9.0):
        metrics.lookup(seconds)
    assert value(metrics, "headstart_lookup_seconds_count") == 4
    assert value(metrics, "headstart_lookup_seconds_sum") == pytest.approx(9.30031)
    assert value(metrics, "headstart_lookup_seconds_bucket", le="0.0005") == 2


def lease(seconds, **by_tier):
    made = Lease(memory=None, chain=None, rows=[], offsets=[], by_tier=by_tier)
    made.seconds = seconds
    return made


def test_a_load_counts_for_the_slowest_tier_that_served_it(metrics):
    metrics.load(lease(0.004, memory=3, file=0))
    metrics.load(lease(0.04, memory=3, file=2))
    metrics.load(lease(0.4, memory=0, file=2))
    metrics.load(lease(4.0, memory=0, file=0))
    assert value(metrics, "headstart_load_seconds_count", tier="memory") == 1
    assert value(metrics, "headstart_load_seconds_count", tier="file") == 2
    assert value(metrics, "headstart_load_seconds_sum", tier="file") == pytest.approx(0.44)


def test_nothing_is_read_until_it_is_asked_for():
    def unexpected():
        raise AssertionError("read too early")

    Metrics(unexpected, unexpected, unexpected)


def test_two_nodes_in_one_process_do_not_mix(metrics):
    other = Metrics(lambda: STATS, dict, dict)
    metrics.lookup(1.0)
    assert value(other, "headstart_lookup_seconds_count") == 0
