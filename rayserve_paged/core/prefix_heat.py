"""How often prompts have parted from what is cached: which prefixes are shared by many."""

from collections.abc import Sequence
from typing import Final

from rayserve_paged.core.ids import BlockKey

MAX_PARTINGS: Final = 65_536


class PrefixHeat:
    """Counts the prompts that went on in a way of their own behind a cached block.

    A session's own history is gone on from once by each turn, and from its end; behind a system
    prompt every session parts from the others.

    Args:
        max_partings: Keys that are remembered; those that were counted longest ago are forgotten.
    """

    def __init__(self, max_partings: int = MAX_PARTINGS) -> None:
        self._max_partings = max_partings
        self._counts: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, key: BlockKey) -> None:
        """Count a prompt of which nothing behind this block was cached anywhere."""
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._max_partings:
            recent = list(self._counts.items())[self._max_partings // 10 :]
            self._counts = dict(recent)

    def up_to(self, keys: Sequence[BlockKey], depths: Sequence[int]) -> list[int]:
        """Return for each depth how many prompts have parted there or, at another of them, deeper.

        Args:
            keys: Of a prompt's blocks.
            depths: Numbers of leading blocks, ascending, from 1.
        """
        heats: list[int] = []
        heat = 0
        for depth in reversed(depths):
            heat = max(heat, self._counts.get(keys[depth - 1], 0))
            heats.append(heat)
        return heats[::-1]
