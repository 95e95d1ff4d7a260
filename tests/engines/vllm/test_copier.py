"""Copies of blocks between a KV cache of any layout and the arena."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import UnsupportedModelError

torch = pytest.importorskip("torch")

from headstart.engines.vllm.copier import TorchCopier, touch  # noqa: E402

LAYERS, BLOCKS, HEADS, SIZE, WIDTH = 3, 7, 2, 4, 8
PAGE = HEADS * SIZE * WIDTH * 2


def make_caches(
    layout="LBHNC", *, layers=LAYERS, blocks=BLOCKS, padding=0, ratio=1, dtype=torch.bfloat16
):
    """Views of one buffer of random bytes, as vLLM makes them; all bytes of each (layer, block)."""
    head = SIZE * WIDTH * dtype.itemsize  # bytes
    page = ratio * HEADS * head + padding
    if layout == "LBHNC":
        layer_stride, block_stride = blocks * page, page
    else:  # BLHNC
        layer_stride, block_stride = page, layers * page
    buffer = torch.randint(0, 256, (layers * blocks * page,), dtype=torch.uint8)
    caches = {}
    for layer in range(layers):
        # A block of `ratio` kernel blocks, which lie side by side.
        stride = block_stride if ratio == 1 else HEADS * head
        shape = (blocks * ratio, HEADS, SIZE, WIDTH)
        steps = [step // dtype.itemsize for step in (stride, head)]
        caches[f"layer {layer}"] = torch.as_strided(
            buffer.view(dtype),
            shape,
            (*steps, WIDTH, 1),
            layer * layer_stride // dtype.itemsize,
        )

    def page_of(layer, block):
        start = layer * layer_stride + block * block_stride
        return buffer[start : start + page]

    pages = [(name, page) for name in caches]
    return SimpleNamespace(caches=caches, pages=pages, page_of=page_of, buffer=buffer, page=page)


def make_copier(made, blocks=BLOCKS):
    return TorchCopier(made.caches, made.pages, blocks)


def block_bytes(made, block):
    return torch.cat([made.page_of(layer, block) for layer in range(len(made.caches))])


@given(
    layout=st.sampled_from(["LBHNC", "BLHNC"]),
    layers=st.integers(1, 4),
    padding=st.sampled_from([0, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    chosen=st.lists(st.integers(0, BLOCKS - 1), unique=True),
    shift=st.sampled_from([0, 64, 4096]),
)
def test_blocks_come_back_and_nothing_else_changes(layout, layers, padding, dtype, chosen, shift):
    made = make_caches(layout, layers=layers, padding=padding, dtype=dtype)
    copier = make_copier(made)
    nbytes = copier.shard_nbytes
    assert nbytes == layers * made.page
    arena = torch.randint(0, 256, (shift + (len(chosen) + 1) * nbytes,), dtype=torch.uint8)
    before, cache_before = arena.clone(), made.buffer.clone()
    places = [(block, shift + place * nbytes) for place, block in enumerate(chosen)]
    copier.store(places, arena)
    assert torch.equal(made.buffer, cache_before)
    for block, offset in places:
        before[offset : offset + nbytes] = block_bytes(made, block)
    assert torch.equal(arena, before)
    made.buffer.random_(0, 256)
    expected = {block: block_bytes(made, block) for block in range(BLOCKS)}
    copier.load(places, arena)
    assert torch.equal(arena, before)
    for block, offset in places:
        expected[block] = arena[offset : offset + nbytes]
    for block in range(BLOCKS):
        assert torch.equal(block_bytes(made, block), expected[block])


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_evenly_spaced_layers_are_one_copy(layout):
    assert make_copier(make_caches(layout))._even is not None


def test_layers_in_memories_of_their_own_or_of_other_sizes():
    wide, narrow = make_caches(layers=2), make_caches(layers=1, ratio=2)
    narrow.caches = {"narrow": narrow.caches["layer 0"]}
    caches = wide.caches | narrow.caches
    copier = TorchCopier(caches, [*wide.pages, ("narrow", narrow.page)], BLOCKS)
    assert copier._even is None
    assert copier.shard_nbytes == 4 * PAGE
    arena = torch.zeros(4 * PAGE, dtype=torch.uint8)
    copier.store([(5, 0)], arena)
    assert torch.equal(arena[: 2 * PAGE], block_bytes(wide, 5))
    assert torch.equal(arena[2 * PAGE :], narrow.page_of(0, 5))
    narrow.buffer.zero_()
    wide.buffer.zero_()
    copier.load([(2, 0)], arena)
    assert torch.equal(arena[: 2 * PAGE], block_bytes(wide, 2))
    assert torch.equal(arena[2 * PAGE :], narrow.page_of(0, 2))
    assert not narrow.page_of(0, 5).any()


def test_the_order_is_that_of_the_layers_not_of_the_memory():
    made = make_caches()
    made.pages = made.pages[::-1]
    copier, arena = make_copier(made), torch.zeros(LAYERS * PAGE, dtype=torch.uint8)
    copier.store([(1, 0)], arena)
    expected = [made.page_of(layer, 1) for layer in reversed(range(LAYERS))]
    assert torch.equal(arena, torch.cat(expected))


@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_finer_than_blocks(ratio):
    made = make_caches(ratio=ratio)
    copier, arena = make_copier(made), torch.zeros(LAYERS * ratio * PAGE, dtype=torch.uint8)
    assert copier.shard_nbytes == LAYERS * ratio * PAGE
    copier.store([(3, 0)], arena)
    assert torch.equal(arena, block_bytes(made, 3))
    copier.load([(4, 0)], arena)
    assert torch.equal(arena, block_bytes(made, 4))


def refused(cache, page_nbytes=PAGE, blocks=BLOCKS):
    with pytest.raises(UnsupportedModelError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        TorchCopier({"layer": cache}, [("layer", page_nbytes)], blocks)


def test_blocks_that_are_not_in_one_piece_are_refused():
    logical = (BLOCKS, HEADS, SIZE, WIDTH)
    whole = torch.zeros(HEADS, BLOCKS, SIZE, WIDTH, dtype=torch.bfloat16)
    refused(whole.transpose(0, 1))  # LHBNC
    layers = torch.zeros(BLOCKS, HEADS, LAYERS, SIZE, WIDTH, dtype=torch.bfloat16)
    refused(layers[:, :, 1])  # BHLNC
    refused(torch.zeros(2, *logical, dtype=torch.bfloat16)[:, 0].expand(2, HEADS, SIZE, WIDTH))
    refused(torch.zeros(logical, dtype=torch.bfloat16)[:, :, :, ::2])
    refused(torch.zeros(logical, dtype=torch.bfloat16), page_nbytes=PAGE - 2)
    refused(torch.zeros(logical, dtype=torch.bfloat16), page_nbytes=PAGE + 2)
    refused(torch.zeros(logical, dtype=torch.bfloat16), blocks=2)  # 7 kernel blocks for 2 blocks
    # Kernel blocks with gaps between them.
    refused(torch.zeros(2 * BLOCKS, HEADS, SIZE, 2 * WIDTH)[..., :WIDTH], 4 * PAGE)


def test_interleaved_heads_are_in_one_piece():
    """LBNHC: the order inside a page is the kernel's affair."""
    made = torch.randint(0, 99, (BLOCKS, SIZE, HEADS, WIDTH)).to(torch.bfloat16)
    copier = TorchCopier({"layer": made.transpose(1, 2)}, [("layer", PAGE)], BLOCKS)
    arena = torch.zeros(PAGE, dtype=torch.uint8)
    copier.store([(6, 0)], arena)
    assert torch.equal(arena, made[6].flatten().view(torch.uint8))


@pytest.mark.parametrize("even", [True, False])
def test_a_copy_outside_the_memory_raises(even):
    made = make_caches()
    if not even:
        made.pages = [made.pages[0], made.pages[2], made.pages[1]]
    copier = make_copier(made)
    assert (copier._even is not None) == even
    arena = torch.zeros(LAYERS * PAGE, dtype=torch.uint8)
    for block, offset in [(0, 64), (0, LAYERS * PAGE), (BLOCKS, 0)]:
        for do in (copier.load, copier.store):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                do([(block, offset)], arena)


def test_touching_changes_no_byte():
    made = make_caches(blocks=300)
    before = made.buffer.clone()
    touch(made.caches)
    touch({"tiny": torch.zeros(3), **made.caches})
    assert torch.equal(made.buffer, before)
