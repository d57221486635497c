"""Copy blocks inside a pool: whole ones, or the first slots of one."""

from collections.abc import Sequence

import torch

from rayserve_kernels.layout import KVPool

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_blocks(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks, all layers, keys, values and scales; `sources[i]` to `targets[i]`.

    Every source is read before any target is written, so a block may be both.

    Args:
        pool: Written in place.
        sources: Blocks to read; repeats are allowed.
        targets: Blocks to overwrite, as many, each once.

    Raises:
        ValueError: The counts differ, a target repeats, or a block does not exist.
    """
    check_copies(pool, sources, targets)
    source_ids = torch.tensor(sources, dtype=torch.int64, device=pool.device)
    target_ids = torch.tensor(targets, dtype=torch.int64, device=pool.device)
    # Torch moves elements one by one where the rest of a block is strided.
    words = next(d for d in _WORDS if pool.layout.run_bytes % d.itemsize == 0)
    blocks = pool.blocks.view(words)
    blocks.index_copy_(0, target_ids, blocks.index_select(0, source_ids))


def copy_slots(pool: KVPool, source: int, target: int, num_slots: int) -> None:
    """Copy the first slots of a block to the same slots of another.

    All layers, keys, values and scales. This is what a sequence does that diverges from a cached
    one inside a block.

    Args:
        pool: Written in place.
        source: Block to read.
        target: Block to write; its slots from `num_slots` on keep what they hold.
        num_slots: Slots to copy, from 1 to block_size.

    Raises:
        ValueError: A block does not exist, both are the same, or `num_slots` is out of range.
    """
    check_blocks(pool, (source, target))
    if source == target:
        raise ValueError(f"source and target are both block {source}")
    if not 1 <= num_slots <= pool.layout.block_size:
        raise ValueError(f"num_slots={num_slots}: expected 1 to {pool.layout.block_size}")
    for view in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
        if view is not None:
            view[:, target, :, :num_slots] = view[:, source, :, :num_slots]


def check_copies(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Check what `copy_blocks` expects, whatever copies.

    Raises:
        ValueError: As there.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets: expected as many")
    if len(set(targets)) != len(targets):
        raise ValueError(f"targets={list(targets)}: a block is written twice")
    check_blocks(pool, (*sources, *targets))


def check_blocks(pool: KVPool, block_ids: Sequence[int]) -> None:
    """Raise ValueError for a block that the pool does not have."""
    for block_id in block_ids:
        if not 0 <= block_id < pool.num_blocks:
            raise ValueError(f"block {block_id}: the pool has blocks 0 to {pool.num_blocks - 1}")
