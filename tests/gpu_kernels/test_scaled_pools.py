"""Pools of codes with scales: where the scales lie, and that they go wherever their block goes."""

import typing

import pytest
import torch

from rayserve_kernels.block_copy import copy_blocks, copy_slots
from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.cpu import gather_sequence
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool, Order
from rayserve_kernels.quantisation import dequantise, quantise
from rayserve_kernels.reference import read_slots

ORDERS: tuple[Order, ...] = typing.get_args(Order)
# The last one's codes and scales are no multiples of 16 bytes.
SIZES = [(3, 2, 4, 16), (2, 3, 8, 80), (1, 3, 3, 5)]


def layout_of(
    order: Order, coding: torch.dtype = torch.int8, sizes: tuple[int, int, int, int] = SIZES[0]
) -> KVLayout:
    return KVLayout(*sizes, coding, order, scaled=True)


def scales_of(pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
    assert pool.key_scales is not None
    assert pool.value_scales is not None
    return pool.key_scales, pool.value_scales


def filled_pool(order: Order, coding: torch.dtype) -> KVPool:
    pool = layout_of(order, coding).allocate(6)
    generator = torch.Generator().manual_seed(1)
    for layer in range(3):
        keys, values = torch.randn(2, 24, 2, 16, generator=generator)
        write_kv(pool, layer, keys, values, torch.arange(24))
    return pool


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        (order, sizes)
        for order in ORDERS
        for sizes in SIZES
        if order != "vectorised" or sizes[3] > 5
    ],
)
def test_every_scale_has_its_own_aligned_place_in_the_bytes_of_its_block(
    order: Order, sizes: tuple[int, int, int, int]
) -> None:
    layers, heads, slots, dim = sizes
    layout = layout_of(order, sizes=sizes)
    pool = layout.allocate(5)
    key_scales, value_scales = scales_of(pool)
    assert key_scales.shape == value_scales.shape == (layers, 5, heads, slots)
    assert key_scales.dtype == torch.float32
    pool.keys.fill_(1)
    pool.values.fill_(2)
    key_scales.fill_(0.25)
    value_scales.fill_(4.0)
    num_scales = layers * heads * slots
    wanted = b"\1" * num_scales * dim + b"\2" * num_scales * dim
    scale_bytes = torch.tensor([0.25, 4.0]).view(torch.uint8).view(2, 4).tolist()
    wanted += bytes(scale_bytes[0]) * num_scales + bytes(scale_bytes[1]) * num_scales
    assert len(wanted) <= layout.block_bytes < len(wanted) + layers * 2 * 32
    assert layout.block_bytes % 16 == 0
    for block in range(5):
        run = pool.blocks[block].flatten()
        assert run.numel() == layout.block_bytes
        padding = layout.block_bytes - len(wanted)
        assert sorted(run.tolist()) == sorted([*wanted, *bytes(padding)])
        pool.blocks[block] = 0
        for view in (pool.keys, pool.values, key_scales, value_scales):
            assert view[:, : block + 1].eq(0).all()
            assert view[:, block + 1 :].ne(0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_scale_views_are_those_of_their_layer(order: Order) -> None:
    pool = filled_pool(order, torch.int8)
    for layer in range(3):
        for view, scales in zip(
            (pool.key_scale_view(layer), pool.value_scale_view(layer)), scales_of(pool), strict=True
        ):
            assert view is not None
            assert view.data_ptr() == scales[layer].data_ptr()
            assert view.stride() == scales[layer].stride()
    with pytest.raises(ValueError, match="layer=3: the pool has 3 layers"):
        pool.key_scale_view(3)


def test_pools_of_floats_and_of_integers_without_scales_have_none() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        layout = KVLayout(1, 2, 4, 16, dtype)
        pool = layout.allocate(2)
        assert pool.key_scale_view(0) is None
        assert pool.value_scale_view(0) is None
        assert layout.block_bytes == 2 * 2 * 4 * 16 * dtype.itemsize


def test_a_scaled_block_of_a_block_major_pool_is_one_run_of_codes_and_scales() -> None:
    layout = layout_of("block_major")
    assert layout.block_bytes == 3 * 2 * 2 * 4 * (16 + 4)
    pool = filled_pool("block_major", torch.int8)
    moved = layout.allocate(2)
    moved.block_bytes_view(1).copy_(pool.block_bytes_view(3))
    for layer in range(3):
        for mine, theirs in zip(
            gather_sequence(moved, layer, torch.tensor([1]), 4),
            gather_sequence(pool, layer, torch.tensor([3]), 4),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def test_the_descriptor_names_the_coding() -> None:
    plain = KVLayout(3, 2, 4, 16, torch.int8)
    int8, fp8 = layout_of("block_major"), layout_of("block_major", torch.float8_e4m3fn)
    assert int8.describe() == (
        "block_major:layers=3,kv_heads=2,block_size=4,head_dim=16,dtype=int8-per-slot"
    )
    assert int8.coding == "int8-per-slot"
    assert fp8.coding == "float8_e4m3fn-per-slot"
    assert len({layout.describe() for layout in (plain, int8, fp8)}) == 3


def test_codings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: scaled pools hold one of"):
        KVLayout(1, 1, 4, 16, torch.float32, scaled=True)
    with pytest.raises(ValueError, match=r"dtype=torch\.float8_e4m3fn: .* needs scaled=True"):
        KVLayout(1, 1, 4, 16, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"head_dim=24: .* torch\.int8 needs a multiple of 16"):
        KVLayout(1, 1, 4, 24, torch.int8, "vectorised", scaled=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_vectors_are_coded_into_their_slots_and_nowhere_else(
    order: Order, coding: torch.dtype, dtype: torch.dtype
) -> None:
    pool = layout_of(order, coding).allocate(12)
    for part in scales_of(pool):
        part.fill_(-1)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(48, generator=generator)[:20]
    fused = torch.randn(20, 4, 16, generator=generator).to(dtype)
    keys, values = fused[:, :2], fused[:, 2:]
    write_kv(pool, 1, keys, values, slots)
    for vectors, view, scale_view in (
        (keys, pool.key_view(1), pool.key_scale_view(1)),
        (values, pool.value_view(1), pool.value_scale_view(1)),
    ):
        assert scale_view is not None
        codes, scales = quantise(vectors, coding)
        for token, (block_id, offset) in enumerate((int(s) // 4, int(s) % 4) for s in slots):
            stored = view[block_id, :, offset].flatten(1)
            assert torch.equal(stored.view(torch.uint8), codes[token].view(torch.uint8))
            assert torch.equal(scale_view[block_id, :, offset], scales[token])
    assert sum(int(part.ge(0).sum()) for part in scales_of(pool)) == 2 * 20 * 2
    untouched = [view[layer] for view in (pool.keys, pool.values) for layer in (0, 2)]
    assert all(view.eq(0).all() for view in untouched)


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_chunks_of_any_size_write_the_bytes_that_one_step_writes(
    order: Order, coding: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 40, 2, 16, generator=generator)
    # Vectors of very different sizes beside each other in a block.
    keys *= torch.logspace(-3, 3, 40)[:, None, None]
    slots = torch.randperm(48, generator=generator)[:40]
    payloads = []
    for chunk in (40, 7, 1):
        pool = layout_of(order, coding).allocate(12)
        for part in zip(keys.split(chunk), values.split(chunk), slots.split(chunk), strict=True):
            write_kv(pool, 2, *part)
        payloads.append(pool.payload)
    assert torch.equal(payloads[0], payloads[1])
    assert torch.equal(payloads[0], payloads[2])


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_read_is_codes_times_scales(order: Order, coding: torch.dtype) -> None:
    pool = layout_of(order, coding).allocate(4)
    keys, values = torch.randn(2, 10, 2, 16, generator=torch.Generator().manual_seed(4))
    write_kv(pool, 0, keys, values, torch.tensor([12, 13, 14, 15, 0, 1, 2, 3, 8, 9]))
    gathered = gather_sequence(pool, 0, torch.tensor([3, 0, 2]), 10)
    slots = read_slots(pool, 0, [3, 0, 2], range(10))
    for vectors, got, read in zip((keys, values), gathered, slots, strict=True):
        wanted = dequantise(*quantise(vectors, coding)).transpose(0, 1)
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)
        assert torch.equal(read, wanted)


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_copied_blocks_and_slots_take_their_scales_along(order: Order, coding: torch.dtype) -> None:
    pool = filled_pool(order, coding)
    views = [pool.keys, pool.values, *scales_of(pool)]
    before = [view.clone() for view in views]
    copy_blocks(pool, [1, 4], [4, 0])
    copy_slots(pool, 2, 5, 3)
    for view, old in zip(views, before, strict=True):
        wanted = old.clone()
        wanted[:, 4], wanted[:, 0] = old[:, 1], old[:, 4]
        wanted[:, 5, :, :3] = old[:, 2, :, :3]
        assert torch.equal(view.float(), wanted.float())
