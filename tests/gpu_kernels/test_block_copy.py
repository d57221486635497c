"""Blocks and first slots are copied, all layers, and nothing else changes."""

import typing

import pytest
import torch

from rayserve_kernels.block_copy import copy_blocks, copy_slots
from rayserve_kernels.layout import KVLayout, KVPool, Order

ORDERS: tuple[Order, ...] = typing.get_args(Order)


def filled_pool(order: Order) -> KVPool:
    pool = KVLayout(2, 3, 4, 8, torch.float32, order).allocate(6)
    pool.payload.view(torch.float32).copy_(torch.arange(pool.payload.numel() // 4))
    return pool


@pytest.mark.parametrize("order", ORDERS)
def test_whole_blocks_are_copied_with_all_layers(order: Order) -> None:
    pool = filled_pool(order)
    keys, values = pool.keys.clone(), pool.values.clone()
    copy_blocks(pool, [1, 1], [4, 0])
    for target, source in ((4, 1), (0, 1), (1, 1), (2, 2), (3, 3), (5, 5)):
        assert torch.equal(pool.keys[:, target], keys[:, source])
        assert torch.equal(pool.values[:, target], values[:, source])


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_that_is_source_and_target_is_read_first(order: Order) -> None:
    pool = filled_pool(order)
    keys = pool.keys.clone()
    copy_blocks(pool, [0, 1, 2], [1, 2, 0])
    assert torch.equal(pool.keys[:, [1, 2, 0]], keys[:, [0, 1, 2]])


@pytest.mark.parametrize("num_slots", [1, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_only_the_common_slots_are_copied(order: Order, num_slots: int) -> None:
    pool = filled_pool(order)
    keys, values = pool.keys.clone(), pool.values.clone()
    copy_slots(pool, 2, 5, num_slots)
    for view, before in ((pool.keys, keys), (pool.values, values)):
        assert torch.equal(view[:, 5, :, :num_slots], before[:, 2, :, :num_slots])
        assert torch.equal(view[:, 5, :, num_slots:], before[:, 5, :, num_slots:])
        assert torch.equal(view[:, :5], before[:, :5])


def test_copying_no_blocks_changes_nothing() -> None:
    pool = filled_pool("block_major")
    before = pool.payload.clone()
    copy_blocks(pool, [], [])
    assert torch.equal(pool.payload, before)


def test_copies_that_make_no_sense_are_refused_with_their_numbers() -> None:
    pool = filled_pool("block_major")
    with pytest.raises(ValueError, match="2 sources and 1 targets"):
        copy_blocks(pool, [0, 1], [2])
    with pytest.raises(ValueError, match="written twice"):
        copy_blocks(pool, [0, 1], [2, 2])
    with pytest.raises(ValueError, match="block 6: the pool has blocks 0 to 5"):
        copy_blocks(pool, [0], [6])
    with pytest.raises(ValueError, match="block -1: the pool has blocks 0 to 5"):
        copy_slots(pool, -1, 2, 1)
    with pytest.raises(ValueError, match="both block 2"):
        copy_slots(pool, 2, 2, 1)
    for num_slots in (0, 5):
        with pytest.raises(ValueError, match=f"num_slots={num_slots}: expected 1 to 4"):
            copy_slots(pool, 0, 1, num_slots)
