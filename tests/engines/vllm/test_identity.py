import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headstart.engines.vllm.identity import advice, make_namespace
from headstart.engines.vllm.shape import BlockShape, block_shape, layer_pages
from headstart.engines.vllm.supported import check_supported
from headstart.errors import ConfigError, UnsupportedModelError

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

MEMORY_NBYTES = 1 << 24


def make_folder(folder):
    """A random Llama of two layers, one KV head of 32: a page of a 128-token block is 16 KiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def engine_config(folder, **options):
    """vLLM's configuration for a model folder, on the CPU."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"skip_tokenizer_init": True, "max_model_len": 256, **options}
    return EngineArgs(model=str(folder), **options).create_engine_config()


def full_attention(block_size=128, **fields):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    fields = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16, **fields}
    return FullAttentionSpec(block_size=block_size, **fields)


def cache_config(config, *specs, layout="LBHNC"):
    """What vLLM makes of the layers' specifications, for a worker."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    specs = specs or (full_attention(config.cache_config.block_size),) * 2
    config = copy.deepcopy(config)
    config.cache_config.kv_cache_layout = layout
    layers = {f"layer.{index}": spec for index, spec in enumerate(specs)}
    (made,) = get_kv_cache_configs(config, [layers], [MEMORY_NBYTES])
    made.kv_cache_layout = layout
    made.hash_block_size = config.cache_config.block_size
    return made


def identify(folder, **options):
    config = engine_config(folder, **options)
    return make_namespace(config, cache_config(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared_config(folder):
    return engine_config(folder)


@pytest.fixture
def config(shared_config):
    """A configuration that a test may change."""
    return copy.deepcopy(shared_config)


# ------------------------------------------------------------------------------------- namespaces


def test_two_processes_agree(folder):
    """The script runs this module's own helpers in a process with other hash seeds."""
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('helpers', {__file__!r})\n"
        "helpers = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(helpers)\n"
        f"print('id', helpers.identify({str(folder)!r}).namespace.id.hex())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", script]
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert answer.returncode == 0, answer.stderr
    mine = identify(folder)
    assert mine.known
    assert f"id {mine.namespace.id.hex()}" in answer.stdout.splitlines()


def test_the_namespace_says_what_the_engine_is(folder):
    identity = identify(folder, prefix_caching_hash_algo="sha256_cbor")
    namespace = identity.namespace
    assert (identity.known, identity.reason, namespace.model) == (True, "", "tiny")
    assert namespace.layout.shape == (1, 2 * 16384)
    assert (namespace.layout.block_size, namespace.layout.axes) == (128, "rank byte")
    assert (namespace.hash_algorithm, namespace.hash_seed) == ("sha256_cbor", "vllm-none-hash")
    assert namespace.isa.startswith("cpu/")
    assert namespace.isa.endswith("/LBHNC")
    assert str(folder.parent) not in namespace.to_json()


def test_what_changes_kv_changes_the_namespace(folder):
    changes = [
        {},
        {"dtype": "float32"},
        {"block_size": 64},
        {"tensor_parallel_size": 2},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
        {"max_model_len": 512},  # some rotary embeddings depend on it
        {"kv_cache_dtype": "float16"},
        {"enforce_eager": True},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"attention_config": {"flex_attn_block_m": 32}},
        {"enable_lora": True},
    ]
    found = {identify(folder, **change).namespace.id for change in changes}
    assert len(found) == len(changes)


def test_what_does_not_change_kv_does_not(folder, tmp_path):
    expected = identify(folder).namespace.id
    copied = tmp_path / "tiny"
    copied.symlink_to(folder)
    assert identify(copied).namespace.id == expected
    for change in (
        {"max_num_seqs": 4},
        {"seed": 7},
        {"served_model_name": "other"},
        {"num_gpu_blocks_override": 16},
        {"generation_config": "vllm"},
        {"max_logprobs": 5},
    ):
        assert identify(folder, **change).namespace.id == expected


def test_one_changed_weight_changes_the_namespace(folder, tmp_path):
    path = make_folder(tmp_path / "tiny") / "model.safetensors"
    status = path.stat()
    before = identify(path.parent).namespace
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = identify(path.parent).namespace
    assert before.weights != after.weights


def test_ranks_tenants_epochs_and_adapters_have_blocks_of_their_own(config):
    from vllm.config import KVTransferConfig

    caches = cache_config(config)
    found = {
        make_namespace(config, caches, **given).namespace.id
        for given in ({}, {"epoch": "a"}, {"epoch": "b"}, {"lora": "a"})
    }
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    found.add(make_namespace(config, caches).namespace.id)
    config.kv_transfer_config = KVTransferConfig(kv_connector_extra_config={"tenant": "a"})
    namespace = make_namespace(config, caches).namespace
    assert namespace.tenant == "a"
    assert namespace.layout.shape == (2, 2 * 16384)
    assert len({*found, namespace.id}) == 6


def test_the_seed_is_the_one_that_vllm_will_choose(config, monkeypatch):
    """The connector is constructed before vLLM initialises its hashes."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.setenv("PYTHONHASHSEED", "31415")
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    namespace = make_namespace(config, cache_config(config)).namespace
    # As vLLM's `init_none_hash` does.
    later = kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name("sha256_cbor"))
    assert namespace.hash_seed == later == "31415"


def test_the_seed_of_a_weak_hash_is_not_written_down(config, monkeypatch):
    config.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
    caches = cache_config(config)
    monkeypatch.setenv("PYTHONHASHSEED", "31415")
    first, second = (make_namespace(config, caches).namespace for _ in range(2))
    assert first == second
    assert "31415" not in first.to_json()
    monkeypatch.delenv("PYTHONHASHSEED")
    first, second = (make_namespace(config, caches).namespace for _ in range(2))
    assert first.id != second.id


def test_a_name_on_the_hub_is_looked_up_locally(folder, config, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    caches = cache_config(config)

    config.load_config.download_dir = str(tmp_path)
    config.model_config.model = "org/tiny"
    by_name = make_namespace(config, caches)
    config.model_config.model = str(snapshot)
    by_path = make_namespace(config, caches)
    assert by_name.namespace.model == "org/tiny"
    assert by_name.known
    assert by_name == by_path

    config.model_config.model, config.model_config.revision = "org/tiny", "no-such-branch"
    assert not make_namespace(config, caches).known


def set_model(config, **fields):
    for name, value in fields.items():
        setattr(config.model_config, name, value)


UNKNOWN = {
    "--load-format dummy": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "--load-format of_a_plugin": lambda c: setattr(c.load_config, "load_format", "of_a_plugin"),
    "no weight files": lambda c: set_model(c, model="org/never-downloaded"),
    "come from 's3://": lambda c: set_model(c, model_weights="s3://bucket/model"),
    "--weight-transfer-config": lambda c: setattr(c, "weight_transfer_config", object()),
    "text_model_id": lambda c: setattr(c.model_config.hf_config, "text_model_id", "org/text"),
    "--code-revision": lambda c: (
        set_model(c, trust_remote_code=True),
        setattr(c.model_config.hf_config, "auto_map", {"AutoModel": "org/code--modeling.Tiny"}),
    ),
    "no canonical form": lambda c: setattr(c.model_config, "model_impl", object()),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_an_unknown_source_shares_nothing(config, reason):
    UNKNOWN[reason](config)
    caches = cache_config(config)
    first, second = make_namespace(config, caches), make_namespace(config, caches)
    assert reason in first.reason
    assert not first.known
    assert first.namespace.id != second.namespace.id


@pytest.mark.parametrize(
    ("algorithm", "word"),
    [("xxhash", "restart"), ("xxhash_cbor", "restart"), ("sha256", "pickles"), ("sha256_cbor", "")],
)
def test_advice_names_the_flag(config, algorithm, word):
    config.cache_config.prefix_caching_hash_algo = algorithm
    sentences = advice(config)
    assert len(sentences) == bool(word)
    for sentence in sentences:
        assert word in sentence
        assert "--prefix-caching-hash-algo sha256_cbor" in sentence


# ----------------------------------------------------------------------------------------- shapes


def test_pages_are_those_of_the_specification(config):
    caches = cache_config(config)
    page = caches.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert layer_pages(caches) == (("layer.0", page), ("layer.1", page))
    assert block_shape(config, caches) == BlockShape(
        block_size=128, shard_nbytes=2 * page, shard_stride=2 * page, world_size=1
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_scheduler_and_workers_agree_where_layers_differ(config, layout):
    """vLLM's scheduler keeps the specification of the first layer only."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    caches = cache_config(
        config,
        full_attention(),
        full_attention(num_kv_heads=2),
        full_attention(),
        layout=layout,
    )
    pages = (("layer.0", 16384), ("layer.1", 32768), ("layer.2", 16384))
    scheduler = generate_scheduler_kv_cache_config([caches])
    assert layer_pages(caches) == layer_pages(scheduler) == pages
    assert make_namespace(config, caches) == make_namespace(config, scheduler)
    check_supported(config, caches)
    check_supported(config, scheduler)


def test_layers_that_share_kv_are_not_counted_twice(config):
    caches = cache_config(config)
    before = layer_pages(caches)
    caches.kv_cache_groups[0].layer_names.append("sharing.0")
    assert layer_pages(caches) == before


def test_shards_of_several_ranks_begin_on_memory_pages(config):
    config.parallel_config.world_size = 3
    caches = cache_config(config, full_attention(head_size=33))
    shape = block_shape(config, caches)
    assert (shape.shard_nbytes, shape.shard_stride) == (128 * 33 * 4, 20480)
    assert shape.block_nbytes == 3 * 20480


@pytest.mark.parametrize("change", [{"shard_nbytes": 0}, {"world_size": 0}, {"shard_stride": 1}])
def test_impossible_shapes_are_refused(change):
    fields = {"block_size": 16, "shard_nbytes": 8, "shard_stride": 8, "world_size": 1}
    with pytest.raises(ConfigError):
        BlockShape(**{**fields, **change})


# --------------------------------------------------------------------------------------- refusals


def test_plain_models_are_supported(config):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    check_supported(config, cache_config(config))
    # Sliding windows where the hybrid manager is off.
    check_supported(config, cache_config(config, full_attention(sliding_window=64)))
    mla = MLAAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=96, dtype=full_attention().dtype
    )
    check_supported(config, cache_config(config, mla, mla))


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa"])
def test_drafting_without_kv_is_supported(config, method):
    caches = cache_config(config)
    config.speculative_config = SimpleNamespace(method=method)
    check_supported(config, caches)


REFUSED_CONFIGS = {
    "--pipeline-parallel-size 1": ("parallel_config", "pipeline_parallel_size", 2),
    "--decode-context-parallel-size 1": ("parallel_config", "decode_context_parallel_size", 2),
    "--prefill-context-parallel-size 1": ("parallel_config", "prefill_context_parallel_size", 2),
    "external launcher": ("parallel_config", "world_size", 4),
    "--enable-prefix-caching": ("cache_config", "enable_prefix_caching", False),
    "use_non_causal": ("attention_config", "use_non_causal", True),
    "hisparse_config": ("attention_config", "hisparse_config", object()),
    "diffusion": (None, "diffusion_config", object()),
    "'eagle'": (None, "speculative_config", SimpleNamespace(method="eagle")),
    "'mtp'": (None, "speculative_config", SimpleNamespace(method="mtp")),
    "'draft_model'": (None, "speculative_config", SimpleNamespace(method="draft_model")),
}


def refusal(config, caches):
    """The one sentence of a refusal."""
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config, caches)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith("Headstart cannot cache this engine's KV: ")
    return sentence


@pytest.mark.parametrize("word", REFUSED_CONFIGS)
def test_configurations_are_refused_with_the_flag(config, word):
    caches = cache_config(config)
    part, name, value = REFUSED_CONFIGS[word]
    setattr(config if part is None else getattr(config, part), name, value)
    assert word in refusal(config, caches)


def test_encoder_decoders_are_refused(config):
    caches = cache_config(config)
    config.model_config.is_encoder_decoder = True
    assert "encoder-decoder" in refusal(config, caches)


def one_group(config, spec):
    """A cache of one group that vLLM itself would not make on this platform."""
    caches = cache_config(config)
    caches.kv_cache_groups[0].kv_cache_spec = spec
    return caches


def test_other_kinds_of_state_are_refused(config):
    import torch
    from vllm.v1 import kv_cache_interface as kv

    fields = {"block_size": 128, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    mamba = kv.MambaSpec(block_size=128, shapes=((4, 4),), dtypes=(torch.float32,))
    for word, spec in {
        "state-space": mamba,
        "encoder": kv.CrossAttentionSpec(**fields),
        "whole input": kv.EncoderOnlyAttentionSpec(**fields),
        "RSWASpec": kv.RSWASpec(**fields, rswa_window=64),
        "SinkFullAttentionSpec": kv.SinkFullAttentionSpec(**fields, sink_len=4),
        "HiddenStateCacheSpec": kv.HiddenStateCacheSpec(**fields),
        "HiSparseHotSpec": kv.HiSparseHotSpec(block_size=128, page_size=64, blocks_per_request=1),
        "--disable-sliding-window": kv.SlidingWindowSpec(**fields, sliding_window=64),
        "window": kv.ChunkedLocalAttentionSpec(**fields, attention_chunk_size=64),
        "bidirectional": full_attention(non_causal=True),
        "one state for 4 tokens": full_attention(tokens_per_state=4),
    }.items():
        assert word in refusal(config, one_group(config, spec))


def test_hybrid_models_are_refused_with_the_flag_that_helps(config):
    import torch
    from vllm.v1 import kv_cache_interface as kv

    window = kv.SlidingWindowSpec(
        block_size=128, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=64
    )
    hybrid = cache_config(config, full_attention(), window)
    assert len(hybrid.kv_cache_groups) == 2
    assert "--disable-hybrid-kv-cache-manager" in refusal(config, hybrid)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    check_supported(config, cache_config(config, full_attention(), window))
    # No flag helps here, so none is named.
    mamba = kv.MambaSpec(block_size=128, shapes=((4, 4),), dtypes=(torch.float32,))
    hybrid.kv_cache_groups[1] = replace(hybrid.kv_cache_groups[1], kv_cache_spec=mamba)
    assert "no flag changes that" in refusal(config, hybrid)


def test_groups_that_vllm_keeps_to_itself_are_refused(config):
    caches = cache_config(config)
    group = caches.kv_cache_groups[0]
    for change, word in (
        ({"is_eagle_group": True}, "--speculative-config"),
        ({"host_resident": True}, "connectors"),
        ({"enable_kv_transfer": False}, "connectors"),
    ):
        caches.kv_cache_groups = [replace(group, **change)]
        assert word in refusal(config, caches)
    caches.kv_cache_groups = []
    assert "no KV cache" in refusal(config, caches)


def test_blocks_that_cannot_be_copied_or_named_are_refused(config):
    for layout in ("LHBNC", "BHLNC", None):
        caches = cache_config(config)
        caches.kv_cache_layout = layout
        assert "VLLM_KV_CACHE_LAYOUT=LBHNC" in refusal(config, caches)
    caches = cache_config(config)
    caches.hash_block_size = 32
    assert "--prefix-match-unit" in refusal(config, caches)
    caches = cache_config(config)
    caches.kv_cache_tensors[0].layer_stride = caches.kv_cache_tensors[0].block_stride = 1 << 30
    assert "--block-size" in refusal(config, caches)


def test_the_import_is_cheap():
    script = (
        "import json, sys, headstart.engines.vllm.identity\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"vllm", "torch", "transformers"} & set(json.loads(answer.stdout))
