"""The interface that vLLM calls, where no scheduler's loop is needed to see what it does."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from headstart.errors import ConfigError, UnsupportedModelError

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def engine(node, make_engine):
    return make_engine(node.path)


@pytest.fixture
def make_connector(engine):
    """Makes connectors that nobody has told of a worker yet."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from headstart.engines.vllm import HeadstartConnector

    made = []

    def make(role="SCHEDULER", *, config=None, kv_config=None):
        connector = HeadstartConnector(
            config or engine.config, KVConnectorRole[role], kv_config or engine.kv_config
        )
        made.append(connector)
        return connector

    yield make
    for connector in made:
        connector.shutdown()


def test_the_plug_in_registers_once():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from headstart.engines import vllm

    for _ in range(2):
        vllm.register()
    made = KVConnectorFactory.get_connector_class(
        SimpleNamespace(kv_connector="HeadstartConnector", kv_connector_module_path=None)
    )
    assert made is vllm.HeadstartConnector
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = vllm.Other


def test_a_lost_store_is_no_loss_and_the_policy_is_set(engine):
    assert not engine.connector.requires_kv_delivery
    assert not engine.scheduler.requires_kv_delivery
    assert engine.scheduler.recompute_kv_load_failures


def test_overlapping_steps_report_what_cannot_be_recomputed(node, make_engine):
    assert not make_engine(node.path, overlap=True).scheduler.recompute_kv_load_failures


def test_wrong_settings_and_models_end_the_start(engine, make_connector):
    config = copy.deepcopy(engine.config)
    config.kv_transfer_config.kv_connector_extra_config["nod"] = "x"
    with pytest.raises(ConfigError, match="did you mean 'node'"):
        make_connector(config=config)
    config = copy.deepcopy(engine.config)
    config.parallel_config.pipeline_parallel_size = 2
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(UnsupportedModelError, match="--pipeline-parallel-size 1"):
            make_connector(role, config=config)


def every_hook(connector):
    """Call each hook as vLLM might; what they answer."""
    request = SimpleNamespace(
        request_id="one",
        block_hashes=[],
        num_tokens=5,
        num_preemptions=0,
        resumable=False,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    output = SimpleNamespace(num_scheduled_tokens={})
    told = SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=set())
    connector.on_new_request(request)
    answers = [
        connector.get_num_new_matched_tokens(request, 0),
        connector.update_state_after_alloc(request, blocks, 0),
        connector.get_external_cache_hit_sources(request, 0),
    ]
    meta = connector.build_connector_meta(output)
    connector.bind_connector_metadata(meta)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer.0")
    connector.save_kv_layer("layer.0", None, None)
    connector.wait_for_save()
    answers += [
        connector.get_finished(set()),
        connector.get_block_ids_with_load_errors(),
        connector.build_connector_worker_meta(),
        connector.update_connector_output(told),
        connector.request_finished(request, [])[0],
    ]
    connector.get_kv_connector_stats()
    assert connector.reset_cache()
    return answers


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_without_its_half_every_hook_answers_a_miss(make_connector, role):
    connector = make_connector(role)
    assert connector.get_handshake_metadata() is None
    nothing = [(0, False), None, {}, (None, None), set(), None, None, False]
    assert every_hook(connector) == nothing
    connector.shutdown()
    connector.shutdown()


def test_each_half_ignores_the_others_hooks(engine):
    nothing = [(0, False), None, {}, (None, None), set(), None, None, False]
    assert every_hook(engine.connector) == nothing
    assert every_hook(engine.workers[0].connector) == nothing


def test_missing_workers_turn_it_off(make_connector):
    connector = make_connector()
    connector.set_xfer_handshake_metadata({})
    assert connector._scheduler is None
    assert every_hook(connector)[0] == (0, False)


def test_errors_are_counted_and_shown(engine):
    engine.side.request_finished = None
    engine.add("one", [1, 2, 3])
    engine.run()
    assert engine.reasons["one"] == "length"
    engine.connector.request_finished(SimpleNamespace(request_id="x"), [])
    stats = engine.connector.get_kv_connector_stats()
    assert stats.data["hook_errors"] == 1
    assert engine.connector.get_kv_connector_stats() is None


def test_stats_add_up_and_reach_prometheus(engine):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    connector = engine.connector
    one = connector.build_kv_connector_stats({"hits": 1, "tokens_memory": 96})
    other = connector.build_kv_connector_stats({"hits": 2, "tokens_file": 16, "made_up": 3})
    both = one.aggregate(other)
    assert both.reduce() == {"hits": 3, "tokens_memory": 96, "tokens_file": 16, "made_up": 3}
    assert connector.build_kv_connector_stats().is_empty()
    registry = CollectorRegistry()

    def of_registry(kind):
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=registry)

    metrics = connector.build_prom_metrics(
        engine.config,
        {kind: of_registry(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["tiny", "0"], 1: ["tiny", "1"]},
    )
    metrics.observe(both.data, 1)
    text = generate_latest(registry).decode()
    assert 'headstart:hits_total{engine="1",model_name="tiny"} 3.0' in text
    assert 'headstart:hits_total{engine="0",model_name="tiny"} 0.0' in text
    assert 'loaded_tokens_total{engine="1",model_name="tiny",tier="file"} 16.0' in text


def test_hits_are_named_by_vllms_sources(engine):
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    by_tier = {"memory": 32, "file": 16, "file2": 8}
    engine.side.sources = lambda request, num_external: by_tier
    found = engine.connector.get_external_cache_hit_sources(None, 56)
    assert found == {CacheHitSource.HOST: 32, CacheHitSource.DISK: 24}


def test_the_schedulers_log_counts_hits(node, make_engine):
    """vLLM asserts that the sources of a hit sum up to it."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    prompt = [1 + n % 50 for n in range(100)]
    first = make_engine(node.path)
    first.ask("fill", prompt)
    first.settle()
    node.settled()
    second = make_engine(node.path)
    second.ask("hit", prompt)
    hits = [stats.connector_prefix_cache_stats for stats in second.stats]
    assert sum(each.hits for each in hits) == 96
    assert sum(each.hits_by_source.get(CacheHitSource.HOST, 0) for each in hits) == 96
    sums = [stats.kv_connector_stats for stats in second.stats if stats.kv_connector_stats]
    assert sum(each.get("hits", 0) for each in sums) == 1
    second.settle()
