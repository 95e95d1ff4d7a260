"""What is tried, what nothing beats, the knee, and the settings that are written for it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from headstart.bench.slo import parse_slo
from headstart.config import load_settings
from headstart.errors import ConfigError
from headstart.sizing.configfile import read_model
from headstart.sizing.hardware import Hardware, look_up
from headstart.tuner.case import Case, Setting, Site, Timed, make_site
from headstart.tuner.held import InclusiveTiers
from headstart.tuner.latency import Latency, Level, Loads
from headstart.tuner.recipe import engine_block_size, engine_flags, max_blocks, settings_toml
from headstart.tuner.recorded import record
from headstart.tuner.search import Space, default_space, front, gain, recommended, search
from headstart.tuner.simulate import simulate
from headstart.tuner.timed import Times, notes, overview, point_rows, reasons, timed_document
from headstart.tuner.tune import tune
from tuner_cases import SIZE, chats, recorded

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 512
TOKEN = 131072
"""Of Llama-3.1-8B, in bytes."""
PRICES = {"memory_gib_month": 3.0, "storage_gib_month": 0.15, "gpu_hour": 3.6}


def site(hardware=None, **options):
    machine = look_up(hardware or Hardware(**PRICES))
    return make_site(read_model("llama-3.1-8b"), machine, **options)


@pytest.fixture
def trace(tmp_path):
    """Chats of blocks as long as in Mooncake's traces, five a second."""
    rows = chats(7)
    for row in rows:
        row["input_length"] *= BLOCK // SIZE
        row["timestamp"] *= 20
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return record(path, trace_block_size=BLOCK)


def timed(memory=0, file=0, p50=1.0, p99=2.0, most=1.0, cost=None, **setting):
    latency = Latency(
        p50_s=p50,
        p90_s=p99,
        p99_s=p99,
        mean_s=p50,
        window_s=1.0,
        slo_share=None,
        goodput_per_s=None,
        most_per_s=most,
        bound_by="engines",
        offered=0.5,
        compute_s=1.0,
        saved_s=1.0,
        shares={"memory": 0.5, "computed": 0.5},
    )
    return Timed(
        setting=Setting(memory_nbytes=memory, file_nbytes=file, block_size=16, **setting),
        latency=latency,
        block_hit=0.5,
        token_hit=0.5,
        slower_share=0.0,
        write_bytes_per_s=0.0,
        weight=20 * memory + file if cost is None else cost,
        cost_month=cost,
    )


# --------------------------------------------------------------------------------- what tiers hold


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_each_tier_holds_what_it_would_alone(tmp_path, policy):
    one = recorded(tmp_path, chats(3))
    hold = InclusiveTiers()
    capacities = [0, 1, 5, 12, 40, 400]
    for size in (one, one.coarser(2)):
        for capacity, held in zip(capacities, hold(size, policy, capacities), strict=True):
            assert held.tolist() == simulate(size, policy, capacity).tolist()


def test_other_tiers_can_be_put_in(trace):
    class Nothing:
        def __call__(self, recorded, policy, capacities):
            return [np.zeros(len(recorded), np.int64) for _ in capacities]

    setting = Setting(memory_nbytes=GIB, file_nbytes=4 * GIB, block_size=BLOCK)
    none, some = Case(trace, site(), Nothing()), Case(trace, site())
    assert none.time(setting).latency.shares["computed"] == 1.0
    assert none.time(setting).latency.p50_s == none.time(none.without).latency.p50_s
    assert some.time(setting).latency.p50_s < none.time(setting).latency.p50_s


# -------------------------------------------------------------------------------------- one setting


def test_bytes_are_blocks_and_prices(trace):
    case = Case(trace, site())
    setting = Setting(memory_nbytes=GIB, file_nbytes=2 * GIB, block_size=BLOCK)
    found = case.time(setting)
    assert found.cost_month == pytest.approx(3.0 + 0.3)
    assert found.weight == found.cost_month
    held = simulate(trace, "lru", 2 * GIB // (BLOCK * TOKEN))
    first = len(trace) // 2
    assert found.block_hit == held[first:].sum() / trace.lengths[first:].sum()
    saved = found.latency.saved_s / found.latency.window_s * 30 * 86400
    assert found.cost_per_gpu_s == pytest.approx(found.cost_month / saved)
    assert found.saved_month == pytest.approx(saved * 3.6 / 3600)
    written = found.latency.shares["computed"] * trace.input_tokens[first:].sum() * TOKEN
    assert found.write_bytes_per_s == pytest.approx(written / found.latency.window_s)
    total = Hardware(memory_gib_month=3.0, storage_month=7.0)
    assert Case(trace, site(total)).time(setting).cost_month == pytest.approx(3.0 + 7.0)
    unknown = Case(trace, site(Hardware(memory_gib_month=3.0))).time(setting)
    assert (unknown.cost_month, unknown.weight) == (None, 20 * GIB + 2 * GIB)


def test_a_block_costs_time_besides_its_bytes():
    plain = site(Hardware(block_s=0.0, read_bytes_per_s=1e9)).serving(
        16, Loads.PLANNED, num_tiers=2
    )
    slow = site(Hardware(block_s=1e-3, read_bytes_per_s=1e9)).serving(
        16, Loads.PLANNED, num_tiers=2
    )
    assert plain.block_nbytes == 16 * TOKEN
    assert plain.media[1].reads.bytes_per_s == pytest.approx(1e9)
    assert slow.media[1].reads.read_s(slow.block_nbytes * 10) - plain.media[1].reads.read_s(
        plain.block_nbytes * 10
    ) == pytest.approx(10e-3)


def test_latent_kv_is_copied_whole_to_every_gpu():
    machine = look_up(Hardware(num_gpus=8, num_engines=2, num_drives=4, network="100gbe"))
    for name, links in (("llama-3.1-8b", 8), ("deepseek-v3", 1)):
        one = make_site(read_model(name), machine)
        assert one.costs.copy_bytes_per_s == pytest.approx(links * 63e9 * 0.87)
        reads = one.serving(256, Loads.PLANNED, num_tiers=2).media[1].reads
        assert reads.bytes_per_s == pytest.approx(12.5e9 * 0.82, rel=0.05)
        assert reads.fixed_s == machine.latency_s


def test_the_engines_own_cache_is_the_baseline(trace):
    own = Case(trace, site(engine_kv_nbytes=100 * GIB))
    setting = Setting(memory_nbytes=200 * GIB, file_nbytes=0, block_size=BLOCK)
    without, cached = own.time(own.without), own.time(setting)
    assert without.latency.shares["engine"] == cached.latency.shares["engine"] > 0.4
    assert cached.latency.shares["memory"] == 0.0
    assert cached.latency.saved_s == 0.0
    assert cached.slower_share == 0.0


def test_what_cannot_be_tried_is_refused(trace):
    case = Case(trace, site())
    good = Setting(memory_nbytes=GIB, file_nbytes=0, block_size=BLOCK)
    for changes, message in (
        ({"block_size": 16}, "a multiple of that can"),
        ({"block_size": 700}, "a multiple of that can"),
        ({"memory_nbytes": MIB}, "does not hold one block of 512 tokens, 64 MiB"),
        ({"file_nbytes": MIB}, "file tier of 1 MiB does not hold one block"),
        ({"memory_nbytes": 0, "file_nbytes": GIB}, "needs memory above it"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.time(replace(good, **changes))
    with pytest.raises(ConfigError, match="KV dtype 'int3' is unknown; allowed: float32"):
        site(kv_dtype="int3")


# ------------------------------------------------------------------------------------------ search


def test_capacities_first_then_the_rest_at_the_knee(trace):
    case = Case(trace, site())
    tuned = tune(trace)
    space = default_space(case, tuned)
    assert 0 in space.file
    assert space.block_sizes == (512, 1024, 2048)
    assert space.policies == ("lru", "fifo")
    told = []
    tried = list(search(case, space, advance=lambda *step: told.append(step)))
    settings = [each.setting for each in tried]
    assert settings[0] == case.without
    assert len(set(settings)) == len(settings)
    assert {each.block_size for each in settings} == {512, 1024, 2048}
    assert {each.policy for each in settings} == {"lru", "fifo"}
    assert {each.loads for each in settings} == set(Loads)
    done = [step for _, step, _ in told]
    assert done == sorted(done)
    assert done[-1] < told[-1][2]
    again = search(Case(trace, site()), space, advance=lambda *step: None)
    assert [each.latency for each in again] == [each.latency for each in tried]
    every = replace(space, all_combinations=True)
    num = sum(1 for _ in search(case, every, advance=lambda *step: None))
    assert num == 1 + len(space.capacities(512)) * 3 * 2 * 2


def test_sizes_are_taken_as_given(trace):
    case = Case(trace, site())
    space = default_space(
        case,
        tune(trace),
        memory=[GIB + 1],
        file=[0, GIB, 10**10],
        block_sizes=[1024],
        policies=["optimal"],
    )
    found = [(each.memory_nbytes, each.file_nbytes) for each in space.capacities(512)]
    assert found == [(GIB + 1, 0), (GIB + 1, 10**10)], "a file tier below the memory adds nothing"
    assert space.policies == ("optimal", "lru", "fifo")
    with pytest.raises(ConfigError, match="a multiple of that can"):
        default_space(case, tune(trace), block_sizes=[64])


def test_blocks_go_up_to_256_tokens_or_four_times_the_traces(tmp_path):
    one = recorded(tmp_path, chats(1), block_size=16)
    assert default_space(Case(one, site()), tune(one)).block_sizes == (16, 32, 64, 128, 256)


def test_a_load_without_reuse_is_told_to_have_no_cache(tmp_path):
    rows = [
        {"timestamp": 50 * n, "input_length": 8, "output_length": 1, "hash_ids": [2 * n, 2 * n + 1]}
        for n in range(20)
    ]
    one = recorded(tmp_path, rows)
    case = Case(one, site())
    tried = tuple(search(case, default_space(case, tune(one)), advance=lambda *step: None))
    times = Times(case=case, tried=tried, time_gain=0.1)
    assert (len(tried), times.best) == (1, None)
    found = timed_document(times)["recommended"]
    assert (found["settings"], found["memory_nbytes"], found["capacity_tokens"]) == (None, 0, None)
    assert ("recommended", "no cache for this load on this machine") in overview(times)


def test_nothing_on_the_front_is_beaten():
    good = [
        timed(),
        timed(memory=10, p50=0.5),
        timed(memory=10, file=100, p50=0.4),
        timed(memory=20, p50=0.3),
        timed(memory=10, p50=0.55, most=2.0, loads=Loads.ALWAYS),
        timed(memory=40, p50=0.6, p99=0.5),
    ]
    bad = [
        timed(memory=10, file=200, p50=0.45),
        timed(memory=30, p50=0.30001),
        timed(memory=10, p50=0.5, policy="fifo"),
        timed(memory=5, p50=0.1, policy="optimal"),
    ]
    found = front([*bad, *good])
    assert {id(each) for each in found} == {id(each) for each in good}
    assert [each.weight for each in found] == sorted(each.weight for each in good)


def at(cost, times, **changes):
    """Of a price, and with all times so long."""
    one = timed(memory=cost, p50=times, p99=2 * times, most=1 / times, cost=float(cost))
    return replace(one, **changes)


def test_better_is_all_of_p50_p99_and_rate():
    assert gain(at(1, 1.0), at(1, 0.9)) == pytest.approx(0.1)
    assert gain(timed(), timed(p50=0.729)) == pytest.approx(0.1)
    assert gain(timed(), timed(p50=0.5, p99=4.0)) == pytest.approx(0.0)
    assert gain(timed(), timed(most=8.0)) == pytest.approx(0.5)


def test_the_knee_is_where_doubling_the_price_stops_to_pay():
    def cost(*points, **options):
        found = recommended([at(*point) for point in points], **options)
        return None if found is None else found.cost_month

    assert cost((0, 1.0), (1, 0.5), (2, 0.4), (4, 0.39)) == 2
    assert cost((0, 1.0), (1, 0.5), (2, 0.49), (4, 0.4)) == 4, "a late step counts"
    assert cost((0, 1.0), (1, 0.5), (16, 0.4)) == 1, "four doublings, each of 5 %"
    assert cost((0, 1.0), (1, 0.5), (16, 0.3)) == 16, "each of 12 %"
    assert cost((0, 900.0), (1, 5.0), (2, 0.5)) == 2, "a queue that grows is no measure"
    assert cost((0, 1.0), (1, 0.95)) is None
    assert cost((0, 1.0), (1, 0.95), time_gain=0.04) == 1
    assert cost((0, 1.0)) is None
    later = [at(0, 1.0), timed(memory=1, p50=0.2, p99=2.1, cost=1.0)]
    assert recommended(later) is None, "p99 must not become later"


def test_of_one_price_the_planner_is_taken_unless_another_is_better():
    tried = [at(0, 1.0), at(1, 0.5)]
    other = replace(tried[1].setting, loads=Loads.ALWAYS)
    assert recommended([*tried, at(1, 0.499, setting=other)]) is tried[1]
    better = at(1, 0.49, setting=other)
    assert recommended([*tried, better]) is better


def test_of_settings_that_save_what_they_cost_one_is_recommended():
    none, small = at(0, 1.0, saved_month=0.0), at(10, 0.5, saved_month=15.0)
    large = at(100, 0.1, saved_month=50.0)
    assert (small.pays, large.pays) == (True, False)
    assert recommended([none, small, large]) is small
    assert recommended([none, large]) is large, "nothing pays, so that is no reason"
    assert recommended([none, small, replace(large, saved_month=None)]).cost_month == 100.0


def test_a_service_level_is_met_as_cheaply_as_can_be():
    def level(cost, share, times=1.0):
        one = at(cost, times, saved_month=0.0)
        return replace(one, latency=replace(one.latency, slo_share=share))

    tried = [level(0, 0.5), level(1, 0.98, 0.9), level(2, 0.99, 0.8), level(4, 1.0, 0.1)]
    assert recommended(tried) is tried[2]
    assert recommended(tried[:2]) is tried[1], "what comes next to it"
    met = Times(case=None, tried=(level(0, 0.995), level(1, 1.0, 0.5)), time_gain=0.1)
    assert met.best is None
    assert reasons(met) == ["99% of the requests meet the service level without a cache"]


# ------------------------------------------------------------------------- settings, reasons, notes


def written(tmp_path, one, text):
    path = tmp_path / "headstart.toml"
    path.write_text(text)
    assert tomllib.loads(text)
    return load_settings(path, {})


def test_the_settings_are_valid_and_say_the_same(tmp_path):
    one = site()
    both = timed(memory=3 * GIB // 2, file=100 * GIB, policy="fifo")
    found = written(tmp_path, one, settings_toml(one, both))
    assert (found.memory.capacity, found.memory.policy) == (3 * GIB // 2, "fifo")
    assert [(each.capacity, each.policy) for each in found.tiers] == [(100 * GIB, "fifo")]
    assert found.memory.slab_nbytes is None
    odd = written(tmp_path, one, settings_toml(one, timed(memory=10**9 + 1)))
    assert (odd.memory.capacity, odd.tiers) == (-(-(10**9 + 1) // 4096) * 4096, ())
    large = replace(both, setting=replace(both.setting, block_size=256))
    small = replace(large, setting=replace(large.setting, memory_nbytes=256 * MIB))
    found = written(tmp_path, one, settings_toml(one, small))
    assert found.memory.slab_nbytes == 32 * MIB >= one.block_nbytes(256)


def test_a_store_opens_with_them(tmp_path):
    from headstart.config import open_store

    tiny = make_site(read_model("smollm2-135m"), look_up(Hardware()))
    text = settings_toml(tiny, timed(memory=4 * MIB, file=16 * MIB))
    text = text.replace("/nvme/headstart", f"{tmp_path}/blocks")
    with open_store(written(tmp_path, tiny, text)) as store:
        assert set(store.usage()) == {"memory", "file"}


def test_flags_of_engines():
    one = site(engine_kv_nbytes=GIB)
    flags = engine_flags(one, timed(memory=GIB, loads=Loads.ALWAYS))
    assert "--block-size 16 --num-gpu-blocks-override 512" in flags["vllm"]
    transfer = flags["vllm"].split("--kv-transfer-config ")[1].strip("'")
    assert json.loads(transfer) == {
        "kv_connector": "HeadstartConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load": "always"},
    }
    assert flags["sglang"] == "--page-size 16 --max-total-tokens 8192"
    assert flags["tensorrt-llm"].endswith('{"tokens_per_block": 16, "max_tokens": 8192}')
    assert "extra_config" not in engine_flags(site(), timed(memory=GIB))["vllm"]
    assert max_blocks(one, timed(memory=GIB, file=2 * GIB)) == {
        "engine": 512,
        "memory": 512,
        "file": 1024,
    }


def test_engines_have_blocks_of_16_to_256_tokens():
    sizes = (4, 16, 48, 64, 96, 256, 512, 768)
    assert [engine_block_size(size) for size in sizes] == [16, 16, 16, 64, 32, 256, 256, 256]


def test_reasons_and_notes_say_what_matters(trace):
    one = site(Hardware(), level=Level(slo=parse_slo("ttft=80ms")))
    case = Case(trace, one)
    space = Space(
        memory=(GIB, 2 * GIB), file=(0, 4 * GIB), block_sizes=(512, 1024), policies=("lru", "fifo")
    )
    times = Times(
        case=case,
        tried=tuple(search(case, space, advance=lambda *step: None)),
        time_gain=0.1,
        is_interrupted=True,
    )
    assert times.best is not None
    why, said = " | ".join(reasons(times)), " | ".join(notes(times))
    for text in ("TTFT p50", "without a cache", "p50 by blocks there: 512", "p50 by policies"):
        assert text in why
    for text in ("interrupted: only", "no prices were given: a byte of memory counts as 20"):
        assert text in said
    assert "engines are run with blocks of at most 256" in said
    titles, rows = point_rows(times, times.front)
    assert "in SLO" in titles
    assert sum(row[-1] == "recommended" for row in rows) == 1
    document = timed_document(times)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["recommended"]["token_hit_last_half"] > 0.4


def test_an_overload_is_said_and_how_many_engines_it_takes(trace):
    crowd = replace(trace, at_s=trace.at_s / 50)
    for hardware, text in ((Hardware(), "num_engines of the hardware file has to be "),):
        case = Case(crowd, site(hardware))
        times = Times(case=case, tried=(case.time(case.without),), time_gain=0.1)
        said = next(note for note in notes(times) if note.startswith("overloaded"))
        assert text in said
    engines = int(said.split(text)[1].split()[0])
    more = Case(crowd, site(Hardware(num_engines=engines)))
    assert more.time(more.without).latency.offered < 1.0 <= times.without.latency.offered


def test_drives_that_cannot_write_it_all_are_said(trace):
    case = Case(trace, site(Hardware(write_bytes_per_s=1e6)))
    setting = Setting(memory_nbytes=GIB, file_nbytes=64 * GIB, block_size=BLOCK)
    tried = (case.time(case.without), case.time(setting))
    said = notes(Times(case=case, tried=tried, time_gain=0.1))
    assert any("the drives would have to write" in note for note in said)


def test_a_site_knows_a_models_limits(tmp_path):
    model = read_model("llama-3.1-8b")
    one = Site(
        model=replace(model, max_tokens=1000),
        machine=look_up(Hardware()),
        costs=site().costs,
    )
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}] * 2
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = Case(record(path, trace_block_size=BLOCK), one)
    assert case.num_too_long == 2
    times = Times(case=case, tried=(case.time(case.without),), time_gain=0.1)
    assert any("2 prompts are longer than the 1,000 tokens" in note for note in notes(times))
