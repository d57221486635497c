"""Blocks copied in Triton: the bytes of the torch path, of which nothing else changes."""

import os
import typing

import pytest
import torch

from rayserve_kernels import block_copy
from rayserve_kernels.gpu.block_copy import copy_blocks, gather_blocks, scatter_blocks
from rayserve_kernels.layout import KVLayout, KVPool, Order

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ORDERS: tuple[Order, ...] = typing.get_args(Order)
NUM_BLOCKS = 7
# Runs of several tiles and of a part of one; 16, 8, 4, 2 and 1 bytes at a time.
LAYOUTS = {
    "several tiles": {"num_kv_heads": 4, "block_size": 16, "head_dim": 48, "dtype": torch.float32},
    "scales": {"num_kv_heads": 3, "block_size": 7, "head_dim": 16, "dtype": torch.int8},
    "8 bytes": {"num_kv_heads": 1, "block_size": 3, "head_dim": 4, "dtype": torch.bfloat16},
    "4 bytes": {"num_kv_heads": 1, "block_size": 3, "head_dim": 1, "dtype": torch.float32},
    "2 bytes": {"num_kv_heads": 3, "block_size": 5, "head_dim": 1, "dtype": torch.bfloat16},
    "1 byte": {"num_kv_heads": 1, "block_size": 5, "head_dim": 3, "dtype": torch.int8},
}
CASES = [
    (order, name)
    for name in LAYOUTS
    for order in ORDERS
    # Keys in parts of 16 bytes need heads of as many.
    if order != "vectorised" or name in ("several tiles", "scales")
]


def filled_pool(order: Order, name: str = "several tiles") -> KVPool:
    fields: dict[str, typing.Any] = LAYOUTS[name]
    layout = KVLayout(num_layers=2, order=order, scaled=name == "scales", **fields)
    generator = torch.Generator().manual_seed(3)
    size = (NUM_BLOCKS * layout.block_bytes,)
    payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return KVPool(layout, payload.to(DEVICE))


@pytest.mark.parametrize(("order", "name"), CASES)
def test_blocks_are_copied_as_the_torch_path_copies_them(order: Order, name: str) -> None:
    pool = filled_pool(order, name)
    expected = KVPool(pool.layout, pool.payload.clone())
    block_copy.copy_blocks(expected, [1, 1, 6], [4, 0, 3])
    copy_blocks(pool, [1, 1, 6], [4, 0, 3])
    assert torch.equal(pool.payload, expected.payload)


@pytest.mark.parametrize(("order", "name"), CASES[:8])
def test_gathered_blocks_are_the_pools_own_and_come_back_elsewhere(order: Order, name: str) -> None:
    pool = filled_pool(order, name)
    staging = torch.full(
        (3, pool.layout.block_bytes), 77, dtype=torch.uint8, device=pool.payload.device
    )
    before = pool.payload.clone()
    gather_blocks(pool, [5, 0, 5], staging)
    assert torch.equal(staging, pool.blocks[[5, 0, 5]].flatten(1))
    assert torch.equal(pool.payload, before)
    other = KVPool(pool.layout, torch.zeros_like(pool.payload))
    scatter_blocks(other, [2, 6, 0], staging)
    assert torch.equal(other.blocks[[2, 6, 0]], pool.blocks[[5, 0, 5]])
    assert not other.blocks[[1, 3, 4, 5]].any()


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_that_is_source_and_target_is_read_first(order: Order) -> None:
    pool = filled_pool(order)
    before = pool.blocks.clone()
    copy_blocks(pool, [0, 1, 2, 2], [1, 2, 0, 5])
    assert torch.equal(pool.blocks[[1, 2, 0, 5]], before[[0, 1, 2, 2]])
    assert torch.equal(pool.blocks[[3, 4, 6]], before[[3, 4, 6]])


def test_a_buffer_that_starts_anywhere_is_filled_all_the_same() -> None:
    pool = filled_pool("hnd")
    shape = (1, pool.layout.block_bytes)
    memory = torch.zeros(pool.layout.block_bytes + 5, dtype=torch.uint8, device=DEVICE)
    gather_blocks(pool, [3], memory[1:-4].view(shape))
    assert torch.equal(memory[1:-4], pool.blocks[3].flatten())
    assert not memory[[0, -1, -2, -3, -4]].any()


def test_blocks_beyond_two_to_the_31_words_are_copied() -> None:
    # Only the pages that are written take memory.
    layout = KVLayout(1, 1, 1024, 256, torch.float32)
    pool = layout.allocate(2**31 // (layout.block_bytes // 4) + 2, DEVICE)
    last = pool.num_blocks - 1
    pool.blocks[0, :8192] = torch.arange(8192, device=DEVICE) % 251
    copy_blocks(pool, [0], [last])
    assert torch.equal(pool.blocks[last], pool.blocks[0])


def test_no_blocks_change_nothing_and_what_makes_no_sense_is_refused() -> None:
    pool = filled_pool("block_major")
    before = pool.payload.clone()
    copy_blocks(pool, [], [])
    with pytest.raises(ValueError, match="written twice"):
        copy_blocks(pool, [0, 1], [2, 2])
    staging = torch.zeros(2, pool.layout.block_bytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="block 7: the pool has blocks 0 to 6"):
        gather_blocks(pool, [0, 7], staging)
    with pytest.raises(ValueError, match=r"block_ids=\[3, 3\]: a block is written twice"):
        scatter_blocks(pool, [3, 3], staging)
    with pytest.raises(ValueError, match=r"staging is torch\.uint8 .* expected torch\.uint8 \(1,"):
        gather_blocks(pool, [0], staging)
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        gather_blocks(pool, [0, 1], staging.T.contiguous().T)
    assert torch.equal(pool.payload, before)
