"""The gather copies the blocks of one sequence, not the pool."""

import typing

import pytest
import torch

from rayserve_kernels.cpu import gather_sequence
from rayserve_kernels.layout import KVLayout, Order

ORDERS: tuple[Order, ...] = typing.get_args(Order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_gather_takes_no_memory_beyond_its_result(order: Order) -> None:
    layout = KVLayout(4, 3, 16, 64, torch.float32, order)
    pool = layout.allocate(500)
    block_ids = torch.tensor([400, 3, 77], dtype=torch.int32)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        keys, _ = gather_sequence(pool, 2, block_ids, 40)
    events = profile.events()
    assert events is not None
    largest = max(event.cpu_memory_usage for event in events)
    assert largest == 3 * 3 * 16 * 64 * 4
    assert keys.shape == (3, 40, 64)


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_id_outside_the_pool_is_an_error_and_no_wrong_block(order: Order) -> None:
    pool = KVLayout(1, 2, 4, 8, torch.float32, order).allocate(3)
    for block_id in (-1, 3):
        with pytest.raises(IndexError):
            gather_sequence(pool, 0, torch.tensor([1, block_id]), 8)
