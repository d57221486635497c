"""Which earlier tokens a token attends to: a sliding window, attention sinks, and their blocks.

    0 .. S-1 | S ........ q-W | q-W+1 ...... q
     sinks   | never read     |      window

A token at position q attends to itself, to the W - 1 positions before it and to the first S, the
sinks. Keys keep the positions at which they were computed: what falls out of the window leaves a
hole, and nothing moves up. A block in the hole is read by no later token, so it can go.

Sources: sliding windows as in Longformer (Beltagy et al., 2020, section 3.1); attention sinks as
in StreamingLLM (Xiao et al., ICLR 2024, section 3.2), which renumbers the positions of what it
keeps, and this does not.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from rayserve_paged.core.ids import BlockKey


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWindow:
    """What the layers of one group let a token attend to.

    Args:
        size: Positions in the window, the token's own among them; None for all.
        num_sink_tokens: First positions, which every token attends to.
    """

    size: int | None = None
    num_sink_tokens: int = 0

    def tighter(self, other: "AttentionWindow") -> "AttentionWindow":
        """Return whichever has the smaller window, with its own sinks; this one where equal."""
        if other.size is None or (self.size is not None and self.size <= other.size):
            return self
        return other

    def num_sink_blocks(self, block_size: int) -> int:
        """Return how many leading blocks are kept for the sinks."""
        return 0 if self.size is None else -(-self.num_sink_tokens // block_size)

    def num_unread_blocks(self, num_computed: int, block_size: int) -> int:
        """Return how many blocks after those of the sinks no token that is still to come reads.

        Args:
            num_computed: Tokens of the sequence; the next one stands at this position.
            block_size: Slots per block.
        """
        if self.size is None:
            return 0
        first_read = max(0, num_computed - self._reach) // block_size
        return max(0, first_read - self.num_sink_blocks(block_size))

    def num_computed_to_trim(self, num_trimmed: int, block_size: int) -> int | None:
        """Return the length at which more blocks than these are not read any more; None: never."""
        if self.size is None:
            return None
        return (self.num_sink_blocks(block_size) + num_trimmed + 1) * block_size + self._reach

    def most_blocks(self, block_size: int) -> int | None:
        """Return the blocks that a sequence of any length needs to compute one more token; None
        where that grows with its length.
        """
        if self.size is None:
            return None
        return self.num_sink_blocks(block_size) - (-self._reach // block_size) + 1

    @property
    def _reach(self) -> int:
        """How far back the next token looks. At least one back, so that the block before it is
        kept, and a prefix that nobody has computed is never taken for one that was.
        """
        assert self.size is not None
        return max(1, self.size - 1)


FULL_ATTENTION = AttentionWindow()
ONE_FULL_GROUP = (FULL_ATTENTION,)
"""The layer groups of a model whose layers all keep every token."""


def num_blocks_held(windows: Sequence[AttentionWindow], num_tokens: int, block_size: int) -> int:
    """Return how many blocks a sequence needs at once to grow to this length, step by step.

    Args:
        windows: One for each layer group.
        num_tokens: Its length.
        block_size: Slots per block.
    """
    num_places = -(-num_tokens // block_size)
    bounds = (window.most_blocks(block_size) for window in windows)
    return sum(num_places if most is None else min(num_places, most) for most in bounds)


def longest_held(
    windows: Sequence[AttentionWindow], num_blocks: int, block_size: int, at_most: int
) -> int:
    """Return the longest sequence, in tokens, that so many blocks let grow; at most `at_most`."""
    places = range(1, -(-at_most // block_size) + 1)
    fitting = bisect.bisect_right(
        places, num_blocks, key=lambda n: num_blocks_held(windows, n * block_size, block_size)
    )
    return min(at_most, fitting * block_size)


def group_key(key: BlockKey, layer_group: int) -> BlockKey:
    """Return the key of one layer group's block; the first group has the chain's own."""
    if layer_group == 0:
        return key
    # The chain's keys are digests: one that differs in a few bits alone names nothing else.
    return BlockKey(key[:-1] + bytes([key[-1] ^ layer_group]))


def longest_hit(
    present: Sequence[bool], window: AttentionWindow, block_size: int, at_most: int
) -> int:
    """Return the longest prefix, in blocks, whose sinks and last window are all there.

    Args:
        present: bool [>= at_most], whether each block of the sequence is cached.
        window: Of the layer group.
        block_size: Slots per block.
        at_most: Blocks that may be taken.
    """
    num_leading = 0
    while num_leading < at_most and present[num_leading]:
        num_leading += 1
    if window.size is None or num_leading < window.num_sink_blocks(block_size):
        return num_leading
    end = at_most
    index = at_most
    while end > num_leading:
        first = window.num_sink_blocks(block_size) + window.num_unread_blocks(
            end * block_size, block_size
        )
        # Blocks first .. end - 1 are read; index .. end - 1 are known to be there.
        while index > first and present[index - 1]:
            index -= 1
        if index <= first:
            return end
        # A shorter prefix that still reads the missing block is none either.
        end = index = index - 1
    return num_leading
