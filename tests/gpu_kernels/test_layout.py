"""Where each element of a block lies, in every order."""

import math
import pickle
import typing

import pytest
import torch

from rayserve_kernels.layout import KVLayout, KVPool, Order

ORDERS: tuple[Order, ...] = typing.get_args(Order)
LAYERS, HEADS, SLOTS, DIM, BLOCKS = 3, 2, 4, 8, 5


def layout_of(order: Order, dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout(LAYERS, HEADS, SLOTS, DIM, dtype, order)


def offset_in(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Element offset of an index in a contiguous array."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return sum(stride * i for stride, i in zip(strides, index, strict=True))


def expected_offset(
    layout: KVLayout, layer: int, plane: int, block: int, head: int, slot: int, dim: int
) -> int:
    """Element offset of one element in a pool of BLOCKS blocks, from the layout's definition."""
    x = layout.vector_size
    if layout.order == "block_major":
        shape = (BLOCKS, LAYERS, 2, HEADS, SLOTS, DIM)
        return offset_in(shape, (block, layer, plane, head, slot, dim))
    if layout.order == "nhd":
        shape = (LAYERS, 2, BLOCKS, SLOTS, HEADS, DIM)
        return offset_in(shape, (layer, plane, block, slot, head, dim))
    if layout.order == "hnd" or plane == 1:
        shape = (LAYERS, 2, BLOCKS, HEADS, SLOTS, DIM)
        return offset_in(shape, (layer, plane, block, head, slot, dim))
    shape = (LAYERS, 2, BLOCKS, HEADS, DIM // x, SLOTS, x)
    return offset_in(shape, (layer, plane, block, head, dim // x, slot, dim % x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_every_element_lies_where_the_layout_says(order: Order, dtype: torch.dtype) -> None:
    layout = layout_of(order, dtype)
    pool = layout.allocate(BLOCKS)
    flat = pool.payload.view(dtype)
    for layer, block, head, slot, dim in ((0, 0, 0, 0, 0), (2, 4, 1, 3, 7), (1, 3, 0, 2, 5)):
        vector = layout.vector_size
        split = (dim // vector, dim % vector) if order == "vectorised" else (dim,)
        key = pool.key_view(layer)[(block, head, slot, *split)]
        value = pool.value_view(layer)[block, head, slot, dim]
        for plane, element in ((0, key), (1, value)):
            offset = expected_offset(layout, layer, plane, block, head, slot, dim)
            assert element.data_ptr() == flat.data_ptr() + offset * dtype.itemsize


@pytest.mark.parametrize("order", ORDERS)
def test_the_views_of_a_pool_cover_its_payload_exactly_once(order: Order) -> None:
    pool = layout_of(order).allocate(BLOCKS)
    pool.payload.view(torch.float32).zero_()
    for layer in range(LAYERS):
        pool.key_view(layer).add_(1)
        pool.value_view(layer).add_(1)
    assert pool.payload.view(torch.float32).eq(1).all()
    pool.blocks.view(torch.float32).add_(1)
    assert pool.payload.view(torch.float32).eq(2).all()


@pytest.mark.parametrize("order", ORDERS)
def test_views_have_the_logical_order_of_dimensions(order: Order) -> None:
    pool = layout_of(order).allocate(BLOCKS)
    split = (2, 4) if order == "vectorised" else (DIM,)
    assert pool.key_view(0).shape == (BLOCKS, HEADS, SLOTS, *split)
    assert pool.value_view(0).shape == (BLOCKS, HEADS, SLOTS, DIM)
    assert pool.blocks.shape[0] == BLOCKS
    assert pool.num_slots == 20


def test_a_block_of_a_block_major_pool_is_one_run_of_bytes() -> None:
    layout = layout_of("block_major", torch.bfloat16)
    assert layout.block_bytes == 3 * 2 * 2 * 4 * 8 * 2
    pool = layout.allocate(BLOCKS)
    for layer in range(LAYERS):
        pool.key_view(layer)[2] = layer
        pool.value_view(layer)[2] = layer + 10
    run = pool.block_bytes_view(2)
    assert run.dtype == torch.uint8
    assert run.shape == (layout.block_bytes,)
    content = run.view(torch.bfloat16).view(LAYERS, 2, -1)
    assert content.float().amax(-1).tolist() == [[0, 10], [1, 11], [2, 12]]
    assert torch.equal(content.amax(-1), content.amin(-1))
    run.zero_()
    assert pool.payload.eq(0).all()


def test_a_block_in_planes_is_no_run_of_bytes() -> None:
    with pytest.raises(ValueError, match="only block_major"):
        layout_of("hnd").allocate(BLOCKS).block_bytes_view(0)


@pytest.mark.parametrize("block_id", [-1, BLOCKS])
def test_a_block_that_does_not_exist_has_no_bytes(block_id: int) -> None:
    with pytest.raises(ValueError, match=f"block_id={block_id}: the pool has 5 blocks"):
        layout_of("block_major").allocate(BLOCKS).block_bytes_view(block_id)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    pool = layout_of("block_major").allocate(BLOCKS)
    for view in (pool.key_view, pool.value_view):
        with pytest.raises(ValueError, match=f"layer={layer}: the pool has 3 layers"):
            view(layer)


@pytest.mark.parametrize("order", ORDERS)
def test_a_new_pool_is_all_zeros_and_aligned(order: Order) -> None:
    pool = layout_of(order).allocate(BLOCKS)
    assert pool.payload.eq(0).all()
    assert pool.payload.data_ptr() % 64 == 0


@pytest.mark.parametrize("order", ["block_major", "nhd", "hnd"])
def test_integer_payloads_of_one_element_per_slot_fit(order: Order) -> None:
    pool = KVLayout(2, 3, 4, 1, torch.int64, order).allocate(6)
    pool.key_view(1)[5, 2, 3, 0] = 2**62 + 1
    assert int(pool.keys.max()) == 2**62 + 1
    assert pool.layout.block_bytes == 2 * 2 * 3 * 4 * 8


def test_descriptors_are_equal_exactly_for_equal_layouts() -> None:
    base = layout_of("block_major")
    others = [
        KVLayout(4, HEADS, SLOTS, DIM, torch.float32),
        KVLayout(LAYERS, 3, SLOTS, DIM, torch.float32),
        KVLayout(LAYERS, HEADS, 8, DIM, torch.float32),
        KVLayout(LAYERS, HEADS, SLOTS, 16, torch.float32),
        layout_of("block_major", torch.bfloat16),
        layout_of("nhd"),
    ]
    descriptors = {layout.describe() for layout in (base, *others)}
    assert len(descriptors) == 7
    assert pickle.loads(pickle.dumps(base)).describe() == base.describe()
    assert base.describe() == (
        "block_major:layers=3,kv_heads=2,block_size=4,head_dim=8,dtype=float32"
    )


def test_sizes_below_one_are_refused_with_the_field_and_the_value() -> None:
    with pytest.raises(ValueError, match="block_size=0: expected at least 1"):
        KVLayout(1, 1, 0, 8, torch.float32)
    with pytest.raises(ValueError, match="num_blocks=0: expected at least 1"):
        layout_of("block_major").allocate(0)


def test_a_head_dim_that_vectors_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim=12: .* multiple of 8"):
        KVLayout(1, 1, 4, 12, torch.bfloat16, "vectorised")


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order='dhn'"):
        KVLayout(1, 1, 4, 8, torch.float32, typing.cast(Order, "dhn"))


def test_a_payload_that_is_no_whole_number_of_blocks_is_refused() -> None:
    layout = layout_of("block_major")
    with pytest.raises(ValueError, match="expected a multiple of block_bytes=1536"):
        KVPool(layout, torch.zeros(1537, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        KVPool(layout, torch.zeros(1536, dtype=torch.int8))
