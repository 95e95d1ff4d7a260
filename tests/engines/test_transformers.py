"""The Transformers engine: same tokens, fewer of them computed, whatever the store does."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache

from headstart.engines.compare import NEAR_TIE_GAP, compare_tokens
from headstart.engines.fingerprint import weights_fingerprint
from headstart.engines.transformers import CachedModel
from headstart.errors import ConfigError, UnsupportedModelError
from headstart.keys import block_keys
from headstart.types import Outcome

from .conftest import make_model, plain_generate, random_tokens

BLOCK = 16
pytestmark = pytest.mark.timeout(300)


def engine_for(model, store, **options):
    return CachedModel(model, None, store, **{"block_size": BLOCK, **options})


# 60 prompts, 20 to 6,000 tokens, most of them short enough to be quick.
LENGTHS = [20 + 7 * i for i in range(40)] + [320 + 61 * i for i in range(17)] + [2049, 4096, 6000]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_tokens_are_those_of_plain_generate(model, store, length):
    assert len(LENGTHS) == 60
    tokens = random_tokens(length, seed=length)
    expected = plain_generate(model, tokens, 12)
    engine = engine_for(model, store)
    cold = engine.generate(tokens, max_new_tokens=12)
    warm = engine.generate(tokens, max_new_tokens=12)
    assert list(cold.tokens) == expected
    assert list(warm.tokens) == expected
    assert cold.hit_tokens == 0
    assert warm.hit_tokens == min(length // BLOCK * BLOCK, length - 1)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_logits_after_a_hit_are_close_to_those_without(model, store, block_size):
    tokens = random_tokens(700)
    engine = engine_for(model, store, block_size=block_size)
    control = engine_for(model, None).generate(tokens, max_new_tokens=8)
    engine.generate(tokens, max_new_tokens=8)
    warm = engine.generate(tokens, max_new_tokens=8)
    assert warm.hit_tokens == 700 // block_size * block_size
    assert warm.top2_gaps == pytest.approx(control.top2_gaps, abs=1e-3)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_prompts_at_the_edges_of_a_block(model, store, length):
    tokens = random_tokens(length, seed=9)
    engine = engine_for(model, store)
    expected = plain_generate(model, tokens, 5)
    for _ in range(2):
        answer = engine.generate(tokens, max_new_tokens=5)
        assert list(answer.tokens) == expected
    full = length // BLOCK * BLOCK
    # The last token of the prompt is always computed, and never more than that is given up.
    assert answer.hit_tokens == min(full, length - 1)
    assert sum(answer.tokens_from.values()) == answer.hit_tokens
    assert answer.computed_tokens == length - answer.hit_tokens >= 1


def test_an_empty_prompt_is_refused(model, store):
    with pytest.raises(ConfigError, match="empty"):
        engine_for(model, store).generate([], max_new_tokens=1)


def test_a_prompt_longer_than_the_context_is_refused_and_nothing_is_lost(store):
    model = make_model(max_position_embeddings=64)
    engine = engine_for(model, store)
    tokens = random_tokens(60)
    first = engine.generate(tokens, max_new_tokens=4)
    with pytest.raises(ConfigError, match="context of 64 tokens"):
        engine.generate(tokens, max_new_tokens=5)
    again = engine.generate(tokens, max_new_tokens=4)
    assert again.tokens == first.tokens
    assert again.hit_tokens == 48


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_at_least_one_token_must_be_wanted(model, store, max_new_tokens):
    with pytest.raises(ConfigError, match="max_new_tokens"):
        engine_for(model, store).generate([1, 2], max_new_tokens=max_new_tokens)


def test_a_text_prompt_needs_a_tokenizer(model, store):
    with pytest.raises(ConfigError, match="tokenizer"):
        engine_for(model, store).generate("hello", max_new_tokens=1)


def test_generated_blocks_are_found_by_the_next_turn(model, store):
    engine = engine_for(model, store)
    tokens = random_tokens(40)
    answer = engine.generate(tokens, max_new_tokens=50)
    assert len(answer.tokens) == 50
    # The last token was never run through the model: 89 tokens have KV, 5 full blocks of 16.
    assert answer.stored_blocks == 89 // BLOCK
    turn = [*tokens, *answer.tokens, *random_tokens(10, seed=1)]
    following = engine.generate(turn, max_new_tokens=6)
    assert following.hit_tokens == 80
    assert list(following.tokens) == plain_generate(model, turn, 6)


def test_only_blocks_that_are_not_held_are_stored(model, store):
    engine = engine_for(model, store)
    tokens = random_tokens(10 * BLOCK)
    assert engine.generate(tokens, max_new_tokens=1).stored_blocks == 10
    assert engine.generate(tokens, max_new_tokens=1).stored_blocks == 0
    longer = tokens + random_tokens(2 * BLOCK, seed=3)
    assert engine.generate(longer, max_new_tokens=1).stored_blocks == 2


def test_tokens_are_given_out_as_they_come(model, store):
    seen = []
    answer = engine_for(model, store).generate(
        random_tokens(30), max_new_tokens=7, on_token=seen.append
    )
    assert tuple(seen) == answer.tokens


def test_generation_stops_after_the_end_token(model, store):
    tokens = random_tokens(50)
    expected = plain_generate(model, tokens, 8)
    stopping = make_model(eos_token_id=expected[3])
    answer = engine_for(stopping, store).generate(tokens, max_new_tokens=8)
    assert list(answer.tokens) == plain_generate(stopping, tokens, 8)
    assert answer.tokens[-1] == expected[3]
    assert len(answer.tokens) <= 4


def test_the_file_tier_serves_a_new_store(model, make_store):
    tokens = random_tokens(500)
    with make_store() as first:
        cold = engine_for(model, first).generate(tokens, max_new_tokens=6)
        assert first.flush(timeout_s=30)
    with make_store() as second:
        warm = engine_for(model, second).generate(tokens, max_new_tokens=6)
    assert warm.tokens == cold.tokens
    assert warm.tokens_from == {"file": 496}
    assert warm.loaded_nbytes == 31 * engine_block_nbytes(model)


def engine_block_nbytes(model):
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return BLOCK * per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_and_loaded_bytes_are_the_models_own_kv(make_store, dtype):
    model = make_model(dtype=dtype)
    tokens = random_tokens(5 * BLOCK)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), cache=cache)
    store = make_store()
    engine = engine_for(model, store, prefill_tokens=len(tokens))
    engine.generate(tokens, max_new_tokens=1)
    store.flush(timeout_s=30)
    store.close()
    with make_store() as reopened:
        reopened.open_namespace(engine.namespace)
        with reopened.load(block_keys(engine.namespace, tokens)) as lease:
            assert lease.by_tier["file"] == lease.ready_blocks == 5
            loaded = [bytes(view) for view in lease.views]
    for block, data in enumerate(loaded):
        token = slice(block * BLOCK, (block + 1) * BLOCK)
        kv = [torch.stack([x.keys[0, :, token], x.values[0, :, token]]) for x in cache.layers]
        expected = torch.stack(kv).contiguous().view(torch.uint8).numpy().tobytes()
        assert data == expected


# ------------------------------------------------------------------ what must never be a hit


def hit_of(model, store, tokens, **options):
    return engine_for(model, store, **options).generate(tokens, max_new_tokens=1).hit_tokens


@pytest.fixture
def filled(model, store):
    """A store that holds a prompt of the model, and the prompt."""
    tokens = random_tokens(6 * BLOCK)
    engine_for(model, store).generate(tokens, max_new_tokens=1)
    assert hit_of(model, store, tokens) == 6 * BLOCK - 1
    return store, tokens


def test_other_weights_never_hit(filled):
    store, tokens = filled
    assert hit_of(make_model(seed=1), store, tokens) == 0


def test_another_dtype_never_hits(filled):
    store, tokens = filled
    assert hit_of(make_model(dtype=torch.bfloat16), store, tokens) == 0


@pytest.mark.parametrize("options", [{"block_size": 32}, {"tenant": "other"}])
def test_another_layout_or_tenant_never_hits(model, filled, options):
    store, tokens = filled
    assert hit_of(model, store, tokens, **options) == 0


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
)
def test_another_configuration_never_hits(filled, changes):
    store, tokens = filled
    assert hit_of(make_model(**changes), store, tokens) == 0


def test_another_attention_implementation_never_hits(filled):
    store, tokens = filled
    model = make_model()
    model.set_attn_implementation("eager")
    assert hit_of(model, store, tokens) == 0


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()


def _edit_one_element(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


def _bypass_the_version_counter(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.001)


def _replace(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)


def _load_state(model):
    model.load_state_dict(make_model(seed=4).state_dict())


@pytest.mark.parametrize(
    "change", [_train, _edit_one_element, _bypass_the_version_counter, _replace, _load_state]
)
def test_weights_changed_in_place_never_hit(store, change):
    model = make_model()
    tokens = random_tokens(6 * BLOCK)
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=1)
    change(model)
    answer = engine.generate(tokens, max_new_tokens=4)
    assert answer.hit_tokens == 0
    assert list(answer.tokens) == plain_generate(model, tokens, 4)
    assert engine.generate(tokens, max_new_tokens=1).hit_tokens == 6 * BLOCK - 1


def test_every_tensor_is_in_the_fingerprint():
    before = weights_fingerprint(make_model())
    names = [name for name, _ in make_model().named_parameters()]
    names += [name for name, _ in make_model().named_buffers()]
    for name in names:
        model = make_model()
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        tensor.data.mul_(1.01)
        assert weights_fingerprint(model) != before, name


def test_the_fingerprint_is_the_same_in_another_process():
    code = (
        "from tests_engine import make_model\n"
        "from headstart.engines.fingerprint import weights_fingerprint\n"
        "print(weights_fingerprint(make_model()))"
    )
    loader = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tests_engine', {__file__!r}.replace("
        "'test_transformers', 'conftest'))\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tests_engine'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", loader + code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == weights_fingerprint(make_model())


# ------------------------------------------------------------------ a store that misbehaves


class StingyStore:
    """A store that promises everything and gives `num_ready` blocks and `num_slots` slots."""

    def __init__(self, inner, *, num_ready=0, num_slots=0):
        self._inner, self._num_ready, self._num_slots = inner, num_ready, num_slots
        self.leases_closed = 0

    def open_namespace(self, namespace):
        self._inner.open_namespace(namespace)

    def lookup(self, chain):
        return self._inner.lookup(chain)

    @contextmanager
    def load(self, chain, *, timeout_s=None):
        with self._inner.load(chain.run(0, min(self._num_ready, len(chain)))) as lease:
            yield lease
        self.leases_closed += 1

    @contextmanager
    def reserve(self, chain):
        with self._inner.reserve(chain.run(0, min(self._num_slots, len(chain)))) as reservation:
            reservation_of = reservation.commit
            reservation.commit = (
                None
                if not hasattr(reservation, "__dict__")
                else lambda: [
                    *reservation_of(),
                    *[Outcome.FULL] * max(0, len(chain) - self._num_slots),
                ]
            )
            yield reservation


@pytest.mark.parametrize("num_ready", [0, 1, 3])
def test_a_short_lease_only_means_more_compute(model, filled, num_ready):
    inner, tokens = filled
    store = StingyStore(inner, num_ready=num_ready)
    answer = engine_for(model, store).generate(tokens, max_new_tokens=5)
    assert answer.hit_tokens == num_ready * BLOCK
    assert list(answer.tokens) == plain_generate(model, tokens, 5)
    assert store.leases_closed == 1


@pytest.mark.parametrize("num_slots", [0, 2])
def test_a_full_store_changes_nothing(model, store, num_slots):
    tokens = random_tokens(8 * BLOCK)
    stingy = StingyStore(store, num_ready=100, num_slots=num_slots)
    engine = engine_for(model, stingy)
    answer = engine.generate(tokens, max_new_tokens=5)
    assert answer.stored_blocks == num_slots
    assert list(answer.tokens) == plain_generate(model, tokens, 5)


def test_a_memory_smaller_than_the_prompt(model, make_store):
    store = make_store(memory="1MiB", file=None)
    engine = engine_for(model, store)
    tokens = random_tokens(3000)
    expected = plain_generate(model, tokens, 3)
    for _ in range(2):
        answer = engine.generate(tokens, max_new_tokens=3)
        assert list(answer.tokens) == expected
    assert 0 < answer.hit_tokens < 2900


def test_a_block_larger_than_memory_is_refused_at_once(model, make_store):
    store = make_store(memory="64KiB", file=None)
    with pytest.raises(ConfigError, match="does not fit"):
        engine_for(model, store, block_size=128)


def test_a_lease_is_closed_before_anything_is_computed(model, filled):
    store, tokens = filled
    engine = engine_for(model, store)
    pinned = []

    def look(_token):
        pinned.append(store.discard(block_keys(engine.namespace, tokens)))

    engine.generate(tokens, max_new_tokens=1, on_token=look)
    assert pinned[0] == 6


# ------------------------------------------------------------------ models that are refused


def _tiny(config_class, model_class, **fields):
    return model_class(config_class(**fields)).eval()


def _mistral(**changes):
    return _tiny(
        MistralConfig,
        MistralForCausalLM,
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **changes,
    )


def _t5():
    return _tiny(
        T5Config,
        T5ForConditionalGeneration,
        vocab_size=100,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
    )


def _quantised():
    model = make_model()
    model.generation_config.cache_implementation = "quantized"
    return model


def _dynamic_rope():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return make_model(rope_parameters=parameters)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _mistral(sliding_window=16), "Sliding"),
        (
            lambda: make_model(
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                sliding_window=8,
            ),
            "Sliding",
        ),
        (_t5, "encoder"),
        (_quantised, "quantized"),
        (_dynamic_rope, "dynamic"),
    ],
    ids=["sliding", "hybrid", "encoder-decoder", "quantised", "dynamic-rope"],
)
def test_a_model_that_cannot_be_cached_is_refused(store, make, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        engine_for(make(), store)
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_is_refused(store):
    from transformers import MambaConfig, MambaForCausalLM

    model = _tiny(
        MambaConfig, MambaForCausalLM, vocab_size=100, hidden_size=16, num_hidden_layers=1
    )
    with pytest.raises(UnsupportedModelError):
        engine_for(model, store)


def test_a_model_in_training_mode_is_refused(store):
    with pytest.raises(ConfigError, match="eval"):
        engine_for(make_model().train(), store)


@pytest.mark.parametrize(
    "make", [lambda: _mistral(sliding_window=None), None], ids=["mistral", "gpt2"]
)
def test_other_plain_models_work(store, make):
    model = (
        make()
        if make
        else _tiny(
            GPT2Config,
            GPT2LMHeadModel,
            vocab_size=100,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=512,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    tokens = [token % 99 + 1 for token in random_tokens(150)]
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=6)
    warm = engine.generate(tokens, max_new_tokens=6)
    assert warm.hit_tokens == 144
    assert list(warm.tokens) == plain_generate(model, tokens, 6)


# ------------------------------------------------------------------ half precision


@pytest.mark.parametrize("length", [100, 333, 900])
def test_bfloat16_is_equal_up_to_the_first_near_tie(store, length):
    """Beside it, a control without a cache whose prefill is split elsewhere: it may flip as well."""
    model = make_model(dtype=torch.bfloat16)
    tokens = random_tokens(length, seed=length)
    reference = engine_for(model, None).generate(tokens, max_new_tokens=16)
    control = engine_for(model, None, prefill_tokens=77).generate(tokens, max_new_tokens=16)
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=16)
    warm = engine.generate(tokens, max_new_tokens=16)
    assert warm.hit_tokens > 0
    for answer in (warm, control):
        comparison = compare_tokens(
            reference.tokens,
            answer.tokens,
            top2_gaps=reference.top2_gaps,
            tie_gap=NEAR_TIE_GAP,
        )
        assert comparison.identical
