"""The logical to physical map of one sequence, and the arithmetic of tokens in blocks.

    position   0 .. P-1 | P .. 2P-1 | ... | tail
    block        ids[0] |    ids[1] | ... | ids[-1]

The table only grows at its end: kernels and the other ranks hold copies of it and are told of
appended blocks alone. Where a layer group has a window, blocks behind it are trimmed:

    place      0 .. s-1 | s .. s+t-1 | s+t ........ n-1
               sinks    | trimmed    | held
    ids        0 .. s-1 |            | s ....... n-1-t

A table has the same places in every layer group, and each group trims for itself.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.ids import BlockId


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def num_tokens_in_last_block(num_tokens: int, block_size: int) -> int:
    """Return how many tokens the last block holds: `block_size` at an exact multiple."""
    return (num_tokens - 1) % block_size + 1 if num_tokens else 0


class GroupBlocks:
    """Blocks of one sequence in one layer group, head first.

    Args:
        block_size: Slots per block.
        window: What the group's layers attend to.
        block_ids: Held blocks.
        num_trimmed: Blocks that are missing behind the sinks.
    """

    __slots__ = ("block_ids", "block_size", "num_sink_blocks", "num_trimmed", "window")

    def __init__(
        self,
        block_size: int,
        window: AttentionWindow,
        block_ids: list[BlockId],
        num_trimmed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.block_ids = block_ids
        self.num_sink_blocks = window.num_sink_blocks(block_size)
        self.num_trimmed = num_trimmed

    @property
    def num_places(self) -> int:
        """Blocks of the sequence, trimmed ones included."""
        return len(self.block_ids) + self.num_trimmed

    def index(self, place: int) -> int:
        """Return where in `block_ids` a place of the sequence is.

        Raises:
            IndexError: The place was trimmed.
        """
        if place < self.num_sink_blocks:
            return place
        if place < self.num_sink_blocks + self.num_trimmed:
            raise IndexError(f"block {place} of the sequence was trimmed")
        return place - self.num_trimmed

    def places(self) -> list[BlockId | None]:
        """Return the block at each place; None where it was trimmed."""
        sinks, rest = self.block_ids[: self.num_sink_blocks], self.block_ids[self.num_sink_blocks :]
        return [*sinks, *[None] * self.num_trimmed, *rest]

    def held_places(self) -> list[int]:
        """Return the place of each held block in the sequence."""
        first = self.num_sink_blocks if self.num_trimmed else 0
        return [*range(first), *range(first + self.num_trimmed, self.num_places)]

    def trim(self, num_computed: int) -> list[BlockId]:
        """Take out the blocks that no token to come reads, and return them."""
        unread = self.window.num_unread_blocks(num_computed, self.block_size)
        first, num_more = self.num_sink_blocks, unread - self.num_trimmed
        if num_more <= 0:
            return []
        trimmed = self.block_ids[first : first + num_more]
        del self.block_ids[first : first + num_more]
        self.num_trimmed = unread
        return trimmed

    def num_growing(self, num_more: int) -> int:
        """Return by how many held blocks this many further places can raise what is held now."""
        most = self.window.most_blocks(self.block_size)
        return num_more if most is None else max(0, min(num_more, most - len(self.block_ids)))

    def num_live(self, num_tokens: int) -> int:
        """Return how many of a sequence's tokens are live here: all whose block is held."""
        return num_tokens - self.num_trimmed * self.block_size


class BlockTable:
    """Blocks of one sequence in all layer groups.

    Args:
        block_size: Slots per block.
        places: Blocks to begin with, such as a matched prefix: for each place, head first, one of
            each layer group; None where it was trimmed.
        windows: What each layer group attends to.
        epoch: Resets of the cache before it began: what is computed over the blocks of an older
            epoch is of that epoch.
    """

    __slots__ = ("block_size", "epoch", "groups")

    def __init__(
        self,
        block_size: int,
        places: Iterable[BlockId | None] = (),
        windows: Sequence[AttentionWindow] = ONE_FULL_GROUP,
        epoch: int = 0,
    ) -> None:
        self.block_size = block_size
        self.epoch = epoch
        listed = list(places)
        groups = []
        for index, window in enumerate(windows):
            own = listed[index :: len(windows)]
            # Without a window nothing was trimmed, so there is nothing to look for.
            held = cast("list[BlockId]", own)
            if window.size is not None:
                held = [block_id for block_id in own if block_id is not None]
            groups.append(GroupBlocks(block_size, window, held, len(own) - len(held)))
        self.groups = tuple(groups)

    @property
    def block_ids(self) -> list[BlockId]:
        """Blocks that are held: those of the first layer group, head first, then the next's."""
        if len(self.groups) == 1:
            return self.groups[0].block_ids
        return [block_id for group in self.groups for block_id in group.block_ids]

    @property
    def num_places(self) -> int:
        """Blocks of the sequence in one layer group, trimmed ones included."""
        return self.groups[0].num_places

    @property
    def num_slots(self) -> int:
        """Tokens that fit without another block."""
        return self.num_places * self.block_size

    @property
    def has_window(self) -> bool:
        """Whether blocks are trimmed as the sequence grows."""
        return any(group.window.size is not None for group in self.groups)

    def chains(self) -> list[list[BlockId]]:
        """Return the held blocks in runs of such as follow each other, head first."""
        chains = []
        for group in self.groups:
            if group.num_trimmed and group.num_sink_blocks:
                chains.append(group.block_ids[: group.num_sink_blocks])
                chains.append(group.block_ids[group.num_sink_blocks :])
            else:
                chains.append(group.block_ids)
        return chains

    def places(self) -> list[BlockId | None]:
        """Return the table as its constructor takes it."""
        first = self.groups[0]
        if len(self.groups) == 1:
            return first.places()
        columns = zip(*(group.places() for group in self.groups), strict=True)
        return [block_id for place in columns for block_id in place]

    def at(self, place: int) -> list[BlockId]:
        """Return the blocks at one place, one of each layer group.

        Raises:
            IndexError: It was trimmed, or there is no block yet.
        """
        first = self.groups[0]
        if len(self.groups) == 1 and not first.num_trimmed:
            return [first.block_ids[place]]
        return [group.block_ids[group.index(place)] for group in self.groups]

    def run(self, first: int, end: int) -> list[BlockId]:
        """Return the blocks from one place up to another of the first layer group.

        Raises:
            IndexError: The first was trimmed.
        """
        group = self.groups[0]
        start = group.index(first)
        return group.block_ids[start : start + end - first]

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks must be appended before this many tokens fit."""
        first = self.groups[0]
        num_places = len(first.block_ids) + first.num_trimmed
        return max(0, -(-num_tokens // self.block_size) - num_places) * len(self.groups)

    def num_growing(self, num_tokens: int) -> int:
        """Return by how much the number of held blocks rises while the sequence grows to this
        length, step by step and trimmed between the steps.
        """
        num_more = max(0, num_blocks_for(num_tokens, self.block_size) - self.num_places)
        return sum(group.num_growing(num_more) for group in self.groups)

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks at the end: for each further place one of each layer group."""
        if len(self.groups) == 1:
            self.groups[0].block_ids.extend(block_ids)
            return
        for index, group in enumerate(self.groups):
            group.block_ids.extend(block_ids[index :: len(self.groups)])

    def trim(self, num_computed: int) -> list[list[BlockId]]:
        """Take out the blocks that no token to come reads, and return them, group by group.

        Args:
            num_computed: Tokens whose KV finished steps have written.
        """
        return [group.trim(num_computed) for group in self.groups]

    def next_trim(self) -> int | None:
        """Return the number of computed tokens at which `trim` has more to take; None: never."""
        lengths = [
            length
            for group in self.groups
            if (length := group.window.num_computed_to_trim(group.num_trimmed, self.block_size))
            is not None
        ]
        return min(lengths, default=None)

    def copy(self) -> "BlockTable":
        """Return another table of the same blocks."""
        windows = [group.window for group in self.groups]
        return BlockTable(self.block_size, self.places(), windows, self.epoch)

    def clear(self) -> None:
        """Forget all blocks."""
        for group in self.groups:
            group.block_ids = []
            group.num_trimmed = 0

    def slot(self, position: int, layer_group: int = 0) -> int:
        """Return the physical slot of a token: block id x block size + offset.

        Raises:
            IndexError: No block holds this position yet, or not any more.
        """
        group = self.groups[layer_group]
        block_id = group.block_ids[group.index(position // self.block_size)]
        return block_id * self.block_size + position % self.block_size
