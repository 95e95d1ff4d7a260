"""Namespaces, layouts and chained keys; the golden vectors freeze every formula."""

import json
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.keys import (
    MAX_BLOCK_NBYTES,
    BlockLayout,
    Namespace,
    block_keys,
    keys_from_hashes,
)
from headstart.types import KEY_NBYTES, BlockKey, KeyChain

GOLDEN = json.loads((Path(__file__).parent / "data" / "keys.json").read_text(encoding="utf-8"))

LAYOUT = BlockLayout(
    block_size=4, axes="layer kv head token dim", shape=(2, 2, 3, 4, 8), dtype="bfloat16"
)
NAMESPACE = Namespace(model="m", weights="w", layout=LAYOUT)
OTHER_VALUES = {
    "model": "m2",
    "weights": "w2",
    "layout": replace(LAYOUT, dtype="float16"),
    "isa": "amx",
    "group": 1,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "7",
    "tensor_parallel": "2/0",
    "tenant": "a",
    "epoch": "1",
    "key_format": 2,
}
OTHER_LAYOUTS = {
    "block_size": replace(LAYOUT, block_size=8),
    "axes": replace(LAYOUT, axes="layer kv token head dim"),
    "shape": replace(LAYOUT, shape=(2, 2, 4, 3, 8)),
    "dtype": replace(LAYOUT, dtype="float16"),
}

tokens = st.lists(st.integers(0, 3), max_size=18)


# ------------------------------------------------------------------------------ golden vectors


@pytest.mark.parametrize("vector", GOLDEN["namespaces"], ids=lambda vector: vector["what"])
def test_golden_namespace(vector):
    namespace = Namespace.from_json(vector["json"])
    assert namespace.to_json() == vector["json"], "the canonical form changed"
    assert namespace.id.hex() == vector["id"], "the digest changed"


@pytest.mark.parametrize("vector", GOLDEN["block_keys"], ids=lambda vector: vector["what"])
def test_golden_block_keys(vector):
    chain = block_keys(Namespace.from_json(vector["namespace"]), vector["tokens"])
    assert [key.hex() for key in chain] == vector["keys"]


@pytest.mark.parametrize("vector", GOLDEN["keys_from_hashes"], ids=lambda vector: vector["what"])
def test_golden_keys_from_hashes(vector):
    hashes = [bytes.fromhex(content) for content in vector["hashes"]]
    chain = keys_from_hashes(Namespace.from_json(vector["namespace"]), hashes)
    assert [key.hex() for key in chain] == vector["keys"]


def test_the_formula_is_the_documented_one():
    seed = blake2b(
        NAMESPACE.to_json().encode(), digest_size=KEY_NBYTES, person=b"headstart/space"
    ).digest()
    content = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 2**32 - 1))
    first = blake2b(seed + content, digest_size=KEY_NBYTES, person=b"headstart/block").digest()
    second = blake2b(first + content, digest_size=KEY_NBYTES, person=b"headstart/block").digest()
    assert NAMESPACE.id == seed
    assert list(block_keys(NAMESPACE, [1, 2, 3, 2**32 - 1] * 2)) == [first, second]
    assert list(keys_from_hashes(NAMESPACE, [content, content])) == [first, second]


# -------------------------------------------------------------------------------------- chains


@given(tokens, tokens)
def test_equal_prefixes_and_only_they_have_equal_keys(left, right):
    size = LAYOUT.block_size
    keys_left, keys_right = block_keys(NAMESPACE, left).keys, block_keys(NAMESPACE, right).keys
    assert len(keys_left) == len(left) // size
    for index, (one, other) in enumerate(zip(keys_left, keys_right, strict=False)):
        stop = (index + 1) * size
        assert (one == other) == (left[:stop] == right[:stop])
    assert len(set(keys_left + keys_right)) == len(
        {tuple(t[: (i + 1) * size]) for t in (left, right) for i in range(len(t) // size)}
    )


def test_a_key_depends_on_every_token_before_it():
    prompt = list(range(100, 112))
    keys = block_keys(NAMESPACE, prompt).keys
    for position in range(len(prompt)):
        changed = [token + (place == position) for place, token in enumerate(prompt)]
        same = [a == b for a, b in zip(keys, block_keys(NAMESPACE, changed), strict=True)]
        first = position // LAYOUT.block_size
        assert same == [index < first for index in range(3)]


@pytest.mark.parametrize("num_tokens", range(10))
def test_only_full_blocks_have_keys(num_tokens):
    chain = block_keys(NAMESPACE, range(num_tokens))
    assert len(chain) == num_tokens // 4
    assert chain.parent is None
    assert (chain.namespace, chain.block_nbytes) == (NAMESPACE.id, LAYOUT.block_nbytes)
    assert all(len(key) == KEY_NBYTES for key in chain)


def test_tokens_may_come_in_any_sequence():
    prompt = [5, 0, 2**32 - 1, 7, 1, 2, 3, 4]
    keys = block_keys(NAMESPACE, prompt)
    assert block_keys(NAMESPACE, tuple(prompt)) == keys
    assert block_keys(NAMESPACE, np.array(prompt, np.uint32)) == keys
    assert block_keys(NAMESPACE, np.array(prompt, np.int64)) == keys


@pytest.mark.parametrize("bad", [-1, 2**32, 2**63, 2**70])
def test_a_token_id_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=r"token ids must be .* in \[0, 2\*\*32\)"):
        block_keys(NAMESPACE, [1, 2, bad, 4])


def test_a_hash_of_an_engine_is_chained_too():
    chain = keys_from_hashes(NAMESPACE, [b"a", b"b", b"a"])
    assert len(set(chain)) == 3
    assert chain.keys[:2] == keys_from_hashes(NAMESPACE, [b"a", b"b"]).keys
    assert keys_from_hashes(NAMESPACE, [b"x", b"b"]).keys[1] != chain.keys[1]
    assert len(keys_from_hashes(NAMESPACE, [])) == 0


def test_a_run_continues_its_parent():
    chain = block_keys(NAMESPACE, range(16))
    assert chain.run(0, 4) == chain
    assert chain.run(0, 2).parent is None
    middle = chain.run(1, 3)
    assert (middle.parent, middle.keys) == (chain.keys[0], chain.keys[1:3])
    assert middle.run(1, 2) == chain.run(2, 3)
    assert middle.run(0, 1).parent == chain.keys[0]
    assert len(chain.run(4, 4)) == 0
    for start, stop in [(-1, 2), (3, 2), (0, 5), (5, 5)]:
        with pytest.raises(ValueError, match="outside"):
            chain.run(start, stop)


def test_a_chain_is_frozen():
    chain = KeyChain(namespace=NAMESPACE.id, block_nbytes=1, keys=(BlockKey(b"k" * 32),))
    with pytest.raises(AttributeError):
        chain.block_nbytes = 2


# ---------------------------------------------------------------------------------- namespaces


def test_every_field_of_a_namespace_is_tried():
    assert set(OTHER_VALUES) == {field.name for field in fields(Namespace)}
    assert set(OTHER_LAYOUTS) == {field.name for field in fields(BlockLayout)}


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_every_field_of_a_namespace_changes_its_keys(name):
    other = replace(NAMESPACE, **{name: OTHER_VALUES[name]})
    assert other.id != NAMESPACE.id
    assert set(block_keys(other, range(8))).isdisjoint(block_keys(NAMESPACE, range(8)))


@pytest.mark.parametrize("name", sorted(OTHER_LAYOUTS))
def test_every_field_of_a_layout_changes_the_namespace(name):
    assert replace(NAMESPACE, layout=OTHER_LAYOUTS[name]).id != NAMESPACE.id


def test_fields_do_not_run_into_each_other():
    ids = {
        replace(NAMESPACE, model=model, weights=weights, tenant=tenant).id
        for model, weights, tenant in [
            ("ab", "c", ""),
            ("a", "bc", ""),
            ("a", "b", "c"),
            ('a","tenant":"', "b", ""),
        ]
    }
    assert len(ids) == 4


@given(
    st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8), st.integers(0, 9), st.text()
)
def test_json_round_trip(model, weights, group, tenant):
    namespace = Namespace(model=model, weights=weights, layout=LAYOUT, group=group, tenant=tenant)
    text = namespace.to_json()
    assert text.isascii()
    assert Namespace.from_json(text) == namespace
    assert Namespace.from_json(json.dumps(json.loads(text), indent=2)).id == namespace.id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"x"',
        "{}",
        '{"layout": null}',
        '{"layout": {"shape": 3}}',
        NAMESPACE.to_json().replace('"model"', '"modell"'),
        NAMESPACE.to_json().replace("bfloat16", "bfloat17"),
        NAMESPACE.to_json().replace('"weights":"w"', '"weights":""'),
    ],
    ids=range(12),
)
def test_what_is_no_namespace_is_refused(text):
    with pytest.raises(ConfigError):
        Namespace.from_json(text)


@pytest.mark.parametrize("name", ["model", "weights"])
def test_an_empty_name_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}' is empty"):
        replace(NAMESPACE, **{name: ""})


# ------------------------------------------------------------------------------------- layouts


def test_sizes_of_a_layout():
    assert LAYOUT.block_nbytes == 2 * 2 * 3 * 4 * 8 * 2
    assert LAYOUT.padded_nbytes == 4096
    page = BlockLayout(block_size=1, axes="byte", shape=(4096,), dtype="uint8")
    assert page.padded_nbytes == 4096
    assert replace(page, shape=(4097,)).padded_nbytes == 8192


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("uint8", 1),
    ],
)
def test_bytes_of_a_number(dtype, nbytes):
    assert replace(LAYOUT, dtype=dtype).block_nbytes == 384 * nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be >= 1"),
        ({"block_size": -3}, "block_size=-3 must be >= 1"),
        ({"dtype": "float64"}, "'float64' is unknown; allowed: float32, "),
        ({"shape": ()}, "positive dimensions"),
        ({"shape": (2, 2, 3, 0, 8)}, "positive dimensions"),
        ({"shape": (2, -2, 3, -4, 8)}, "positive dimensions"),
        ({"axes": "layer kv"}, "must name the 5 dimensions"),
        ({"shape": (2, 2, 3, 4, MAX_BLOCK_NBYTES)}, "over the limit .* use a smaller block_size"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_wrong_layout_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(LAYOUT, **changes)


def test_the_largest_block():
    largest = BlockLayout(block_size=1, axes="byte", shape=(MAX_BLOCK_NBYTES,), dtype="uint8")
    assert largest.block_nbytes == MAX_BLOCK_NBYTES


@pytest.mark.parametrize("bad", [[1.9, 2.0], ["1", "2"], [[1, 2]], 7], ids=str)
def test_tokens_are_a_flat_sequence_of_whole_numbers(bad):
    with pytest.raises(ValueError, match="flat sequence of whole numbers"):
        block_keys(NAMESPACE, bad)
