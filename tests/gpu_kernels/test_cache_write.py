"""Keys and values land in their slots and nowhere else."""

import typing

import pytest
import torch

from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.cpu import gather_sequence
from rayserve_kernels.layout import KVLayout, Order

ORDERS: tuple[Order, ...] = typing.get_args(Order)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_land_in_their_slots_in_any_order(order: Order, block_size: int) -> None:
    layout = KVLayout(2, 3, block_size, 8, torch.float32, order)
    pool = layout.allocate(48 // block_size)
    pool.payload.view(torch.float32).fill_(-1)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:20]
    keys, values = torch.rand(20, 3, 8), torch.rand(20, 3, 8)
    write_kv(pool, 1, keys, values, slots)
    for token, slot in enumerate(slots.tolist()):
        block_id, offset = divmod(slot, block_size)
        assert torch.equal(pool.key_view(1)[block_id, :, offset].flatten(1), keys[token])
        assert torch.equal(pool.value_view(1)[block_id, :, offset], values[token])
    assert int((pool.payload.view(torch.float32) >= 0).sum()) == 2 * 20 * 3 * 8
    assert pool.key_view(0).eq(-1).all()
    assert pool.value_view(0).eq(-1).all()


def test_strided_keys_as_a_projection_leaves_them_are_written() -> None:
    pool = KVLayout(1, 2, 4, 8, torch.float32).allocate(3)
    fused = torch.rand(5, 4, 8)
    keys, values = fused[:, :2], fused[:, 2:].transpose(0, 1).contiguous().transpose(0, 1)
    write_kv(pool, 0, keys, values, torch.tensor([11, 2, 7, 0, 5]))
    assert torch.equal(pool.key_view(0)[2, :, 3], keys[0])
    assert torch.equal(pool.value_view(0)[1, :, 1], values[4])


@pytest.mark.parametrize("order", ["block_major", "nhd", "hnd"])
def test_integers_come_back_exactly_through_the_table(order: Order) -> None:
    pool = KVLayout(1, 2, 4, 1, torch.int64, order).allocate(5)
    keys = torch.arange(12).view(6, 2, 1) + 2**62
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    write_kv(pool, 0, keys, keys + 100, slots)
    got_keys, got_values = gather_sequence(pool, 0, torch.tensor([3, 1]), 6)
    assert torch.equal(got_keys, keys.transpose(0, 1))
    assert torch.equal(got_values, keys.transpose(0, 1) + 100)


def test_slots_beyond_2_to_the_31_elements_are_reached() -> None:
    # 4.3 GB of addresses, of which only the pages that are written are ever committed.
    layout = KVLayout(2, 4, 16, 128, torch.bfloat16)
    num_blocks = 2**31 * layout.dtype.itemsize // layout.block_bytes + 2
    pool = layout.allocate(num_blocks)
    last = num_blocks - 1
    view = pool.key_view(1)
    distance = view[last, 3, 15, 127].data_ptr() - pool.payload.data_ptr()
    element = ((((last * 2 + 1) * 2 + 0) * 4 + 3) * 16 + 15) * 128 + 127
    assert distance == element * 2
    assert element > 2**31
    keys = torch.rand(2, 4, 128).bfloat16()
    write_kv(pool, 1, keys, -keys, torch.tensor([last * 16 + 15, 15]))
    got_keys, got_values = gather_sequence(pool, 1, torch.tensor([last, 0]), 32)
    assert torch.equal(got_keys[:, [15, 31]], keys.transpose(0, 1))
    assert torch.equal(got_values[:, [15, 31]], -keys.transpose(0, 1))
    assert int(got_keys.count_nonzero()) == int(keys.count_nonzero())


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot: int) -> None:
    pool = KVLayout(1, 2, 4, 8, torch.float32).allocate(3)
    ones = torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match="the pool has slots 0 to 11"):
        write_kv(pool, 0, ones, ones, torch.tensor([3, slot]))
    assert pool.payload.eq(0).all()


def test_keys_that_do_not_fit_the_pool_are_refused_with_both_shapes() -> None:
    pool = KVLayout(1, 2, 4, 8, torch.float32).allocate(3)
    good, slots = torch.ones(2, 2, 8), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"keys is torch.float32 \(2, 3, 8\): .* \(2, 2, 8\)"):
        write_kv(pool, 0, torch.ones(2, 3, 8), good, slots)
    with pytest.raises(ValueError, match=r"values is torch\.int32 .* expected floats"):
        write_kv(pool, 0, good, good.int(), slots)
    integers = KVLayout(1, 2, 4, 8, torch.int8).allocate(3)
    with pytest.raises(ValueError, match=r"keys is torch\.float32 .* expected torch\.int8"):
        write_kv(integers, 0, good, good, slots)
    with pytest.raises(ValueError, match=r"slot_mapping is torch\.int32"):
        write_kv(pool, 0, good, good, slots.int())


def test_a_step_without_tokens_writes_nothing() -> None:
    pool = KVLayout(1, 2, 4, 8, torch.float32).allocate(3)
    nothing = torch.ones(0, 2, 8)
    write_kv(pool, 0, nothing, nothing, torch.empty(0, dtype=torch.int64))
    assert pool.payload.eq(0).all()
