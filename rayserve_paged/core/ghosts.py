"""What is remembered of chains of blocks that were evicted: how often they had been used."""

from array import array
from collections.abc import Callable
from typing import Final

from rayserve_paged.core.ids import BlockId

_PART: Final = 2**32 - 1


class Ghosts:
    """Evicted runs by the fingerprint of the first block that is gone; the last to come stays.

    Args:
        num_ghosts: Places.
        fingerprint_of: As in ValueEviction.
    """

    def __init__(self, num_ghosts: int, fingerprint_of: Callable[[BlockId], int]) -> None:
        self._num_ghosts = num_ghosts
        self._fingerprint_of = fingerprint_of
        # By place: the place is one part of a fingerprint, and this is another.
        self._parts = array("I", [0]) * num_ghosts
        self._stamps = array("q", [0]) * num_ghosts
        self._sizes = array("i", [0]) * num_ghosts
        self._levels = bytearray(num_ghosts)

    def put(self, head: BlockId, level: int, num_blocks: int, stamp: int) -> None:
        """Remember a run by its first block, with its uses, its length and its stamp."""
        part, place = divmod(self._fingerprint_of(head), self._num_ghosts)
        self._parts[place] = part & _PART
        self._levels[place] = level
        self._sizes[place] = num_blocks
        self._stamps[place] = stamp

    def take(self, head: BlockId) -> tuple[int, int, int] | None:
        """Return level, blocks and stamp of a run, and forget it."""
        part, place = divmod(self._fingerprint_of(head), self._num_ghosts)
        num_blocks = self._sizes[place]
        if not num_blocks or self._parts[place] != part & _PART:
            return None
        self._sizes[place] = 0
        return self._levels[place], num_blocks, self._stamps[place]
