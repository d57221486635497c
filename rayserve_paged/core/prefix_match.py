"""What of a sequence is cached: whole blocks to share, and leading slots of blocks to copy.

Several layer groups are matched as one: a place counts where all groups have what they read of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rayserve_paged.core.attention_window import AttentionWindow, group_key, longest_hit
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.partial_index import BlockContent, PartialIndex
from rayserve_paged.core.prefix_index import PrefixIndex


class PartialPrefix(NamedTuple):
    """Leading slots of cached blocks, to be copied into the next block of a sequence.

    Args:
        block_ids: One of each layer group; they are not to be written.
        num_tokens: Slots that serve, in each of them.
    """

    block_ids: tuple[BlockId, ...]
    num_tokens: int


class Prefix(NamedTuple):
    """What a sequence starts on.

    Args:
        places: Cached blocks that it shares, as `KVManager.match` returns them.
        partial: Slots behind them that it copies.
    """

    places: list[BlockId | None]
    partial: PartialPrefix | None


def match_blocks(
    index: PrefixIndex,
    keys: Sequence[BlockKey],
    windows: Sequence[AttentionWindow],
    block_size: int,
) -> list[BlockId | None]:
    """Return cached blocks that hold a prefix of a sequence, as `KVManager.match` does.

    Args:
        index: Of all layer groups.
        keys: Of the blocks that may be taken.
        windows: What each layer group attends to.
        block_size: Slots per block.
    """
    if len(windows) == 1 and windows[0].size is None:
        return [*index.match(keys)]
    found = [
        [index.block_of(group_key(key, group)) for key in keys] for group in range(len(windows))
    ]
    present = [[block_id is not None for block_id in blocks] for blocks in found]
    num_places, before = len(keys), -1
    while num_places != before:
        # The longest that one group has may be too long for another, or have a hole there.
        before = num_places
        for group, window in enumerate(windows):
            num_places = longest_hit(present[group], window, block_size, num_places)
    for blocks, window in zip(found, windows, strict=True):
        first = window.num_sink_blocks(block_size)
        unread = window.num_unread_blocks(num_places * block_size, block_size)
        blocks[first : first + unread] = [None] * unread
    return [blocks[place] for place in range(num_places) for blocks in found]


def match_slots(
    partials: PartialIndex, content: BlockContent, num_layer_groups: int
) -> PartialPrefix | None:
    """Return the blocks of which most leading slots serve a sequence.

    Args:
        partials: Of all layer groups.
        content: What the sequence needs behind its matched blocks, its last token excluded.
        num_layer_groups: Layer groups.

    Returns:
        As many slots as the blocks of all layer groups have; None where one group has none.
    """
    found = []
    for group in range(num_layer_groups):
        match = partials.find(content_of_group(content, group))
        if match is None:
            return None
        found.append(match)
    num_tokens = min(match.num_tokens for match in found)
    return PartialPrefix(tuple(match.block_id for match in found), num_tokens)


def content_of_group(content: BlockContent, layer_group: int) -> BlockContent:
    """Return what a block of one layer group holds where the first group's holds this."""
    return BlockContent(group_key(content.parent, layer_group), content.token_ids)
