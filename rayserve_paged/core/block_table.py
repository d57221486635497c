"""The logical to physical map of one sequence, and the arithmetic of tokens in blocks.

    position   0 .. P-1 | P .. 2P-1 | ... | tail
    block        ids[0] |    ids[1] | ... | ids[-1]

The table only grows at its end: kernels and the other ranks hold copies of it and are told of
appended blocks alone.
"""

from collections.abc import Iterable

from rayserve_paged.core.ids import BlockId


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def num_tokens_in_last_block(num_tokens: int, block_size: int) -> int:
    """Return how many tokens the last block holds: `block_size` at an exact multiple."""
    return (num_tokens - 1) % block_size + 1 if num_tokens else 0


class BlockTable:
    """Blocks of one sequence in one layer group, head first.

    Args:
        block_size: Slots per block.
        block_ids: Blocks to begin with, such as a matched prefix.
    """

    __slots__ = ("block_ids", "block_size")

    def __init__(self, block_size: int, block_ids: Iterable[BlockId] = ()) -> None:
        self.block_size = block_size
        self.block_ids: list[BlockId] = list(block_ids)

    @property
    def num_slots(self) -> int:
        """Tokens that fit without another block."""
        return len(self.block_ids) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks must be appended before this many tokens fit."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - len(self.block_ids))

    def append(self, block_ids: Iterable[BlockId]) -> None:
        """Add blocks at the end."""
        self.block_ids.extend(block_ids)

    def slot(self, position: int) -> int:
        """Return the physical slot of a token: block id x block size + offset.

        Raises:
            IndexError: No block holds this position yet.
        """
        return self.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
