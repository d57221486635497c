"""How many tokens are live, how many slots they take, what is lost and what sharing saves.

allocated_slots = unique_live_tokens + internal_fragmentation_slots
sum of every sequence's live tokens = unique_live_tokens + prefix_sharing_saved_slots

A token of a sequence is live while the block of its slot is held, in each layer group for itself:
one that has fallen out of a window lives on until its whole block has, and its slot is not waste.
So a sequence wastes slots in its last block alone, at most block_size - 1 in each layer group.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.ids import BlockId


@dataclasses.dataclass(frozen=True, slots=True)
class Accounting:
    """The ledger of one pool in figures.

    Args:
        block_size: Slots per block.
        num_blocks: Blocks of the pool.
        num_free_blocks: FREE blocks.
        num_cached_blocks: CACHED blocks.
        num_held_blocks: HELD blocks.
        num_shared_blocks: HELD blocks with more than one holder.
        unique_live_tokens: Slots that hold a token of a sequence, each counted once; a token has
            one in each layer group.
        allocated_slots: Slots of the held blocks.
        internal_fragmentation_slots: Allocated slots that hold no token.
        prefix_sharing_saved_slots: Slots that sequences would hold more without sharing.
        block_map: One letter per block: "." free, "#" held, "=" shared, "o" cached.
    """

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_shared_blocks: int
    unique_live_tokens: int
    allocated_slots: int
    internal_fragmentation_slots: int
    prefix_sharing_saved_slots: int
    block_map: str


def account(
    holders: Iterable[tuple[Sequence[BlockId], int]], pool: BlockPool, block_size: int
) -> Accounting:
    """Count the slots of a pool.

    Args:
        holders: For each sequence and layer group its blocks, head first, and how many tokens
            they hold.
        pool: The pool they belong to.
        block_size: Slots per block.
    """
    live: dict[BlockId, int] = {}
    num_tokens_in_all = 0
    for block_ids, num_tokens in holders:
        num_tokens_in_all += num_tokens
        for index, block_id in enumerate(block_ids):
            filled = min(block_size, num_tokens - index * block_size)
            live[block_id] = max(live.get(block_id, 0), filled)
    unique_live_tokens = sum(live.values())
    allocated_slots = len(live) * block_size
    return Accounting(
        block_size=block_size,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_held_blocks=pool.num_held,
        num_shared_blocks=sum(pool.count(block_id) > 1 for block_id in live),
        unique_live_tokens=unique_live_tokens,
        allocated_slots=allocated_slots,
        internal_fragmentation_slots=allocated_slots - unique_live_tokens,
        prefix_sharing_saved_slots=num_tokens_in_all - unique_live_tokens,
        block_map=block_map(pool),
    )


def block_map(pool: BlockPool) -> str:
    """Return one letter per block: "." free, "#" held, "=" shared, "o" cached."""
    letters = ["#"] * pool.num_blocks
    for block_id in range(pool.num_blocks):
        match pool.state(BlockId(block_id)):
            case BlockState.FREE:
                letters[block_id] = "."
            case BlockState.CACHED:
                letters[block_id] = "o"
            case BlockState.HELD:
                if pool.count(BlockId(block_id)) > 1:
                    letters[block_id] = "="
    return "".join(letters)
