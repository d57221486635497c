"""How many tokens are live, how many slots they take, what is lost and what sharing saves.

allocated_slots = unique_live_tokens + internal_fragmentation_slots
sum of every sequence's live tokens = unique_live_tokens + prefix_sharing_saved_slots

A token of a sequence is live while the block of its slot is held, in each layer group for itself:
one that has fallen out of a window lives on until its whole block has, and its slot is not waste.
So a sequence wastes slots in its last block alone, at most block_size - 1 in each layer group.
What pins alone hold is no sequence's: it is HELD, and neither allocated nor live.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.stream_messages import StreamName


@dataclasses.dataclass(frozen=True, slots=True)
class Accounting:
    """The ledger of one pool in figures.

    Args:
        block_size: Slots per block.
        num_blocks: Blocks of the pool.
        num_free_blocks: FREE blocks.
        num_cached_blocks: CACHED blocks.
        num_held_blocks: HELD blocks.
        num_shared_blocks: Blocks of sequences with more than one holder.
        num_pinned_blocks: HELD blocks that a pin holds, whether or not a sequence does as well.
        unique_live_tokens: Slots that hold a token of a sequence, each counted once; a token has
            one in each layer group.
        allocated_slots: Slots of the blocks that sequences hold.
        internal_fragmentation_slots: Allocated slots that hold no token.
        sequence_fragmentation_slots: Those of each sequence, at most block_size - 1 in each layer
            group. Forks that share their last block may each count the same slots of it.
        prefix_sharing_saved_slots: Slots that sequences would hold more without sharing.
        block_map: One letter per block: "." free, "#" held, "=" shared, "p" pinned, "o" cached.
    """

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_shared_blocks: int
    num_pinned_blocks: int
    unique_live_tokens: int
    allocated_slots: int
    internal_fragmentation_slots: int
    sequence_fragmentation_slots: Mapping[StreamName, int]
    prefix_sharing_saved_slots: int
    block_map: str


def account(
    holders: Sequence[tuple[Sequence[BlockId], int]],
    pool: BlockPool,
    block_size: int,
    pins: Iterable[Iterable[BlockId]] = (),
    names: Sequence[StreamName] | None = None,
) -> Accounting:
    """Count the slots of a pool.

    Args:
        holders: For each sequence and layer group its blocks, head first, and how many tokens
            they hold.
        pool: The pool they belong to.
        block_size: Slots per block.
        pins: For each pin its blocks.
        names: For each of `holders` its sequence; None to leave out whose slots are waste.
    """
    live: dict[BlockId, int] = {}
    num_tokens_in_all = 0
    for block_ids, num_tokens in holders:
        num_tokens_in_all += num_tokens
        for index, block_id in enumerate(block_ids):
            filled = min(block_size, num_tokens - index * block_size)
            live[block_id] = max(live.get(block_id, 0), filled)
    waste: Counter[StreamName] = Counter()
    if names is not None:
        for name, (block_ids, num_tokens) in zip(names, holders, strict=True):
            waste[name] += len(block_ids) * block_size - num_tokens
    pinned = {block_id for block_ids in pins for block_id in block_ids}
    unique_live_tokens = sum(live.values())
    allocated_slots = len(live) * block_size
    return Accounting(
        block_size=block_size,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_held_blocks=pool.num_held,
        num_shared_blocks=sum(pool.count(block_id) > 1 for block_id in live),
        num_pinned_blocks=len(pinned),
        unique_live_tokens=unique_live_tokens,
        allocated_slots=allocated_slots,
        internal_fragmentation_slots=allocated_slots - unique_live_tokens,
        sequence_fragmentation_slots=waste,
        prefix_sharing_saved_slots=num_tokens_in_all - unique_live_tokens,
        block_map=block_map(pool, pinned),
    )


def block_map(pool: BlockPool, pinned: Collection[BlockId] = ()) -> str:
    """Return one letter per block: "." free, "#" held, "=" shared, "p" pinned, "o" cached."""
    letters = ["#"] * pool.num_blocks
    for block_id in range(pool.num_blocks):
        match pool.state(BlockId(block_id)):
            case BlockState.FREE:
                letters[block_id] = "."
            case BlockState.CACHED:
                letters[block_id] = "o"
            case BlockState.HELD:
                if block_id in pinned:
                    letters[block_id] = "p"
                elif pool.count(BlockId(block_id)) > 1:
                    letters[block_id] = "="
    return "".join(letters)
