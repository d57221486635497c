"""Cached prefixes that are kept by name: their blocks are HELD until they are unpinned.

    pool   | what requests may need            | what pins may hold |
           0 ................. num_usable_blocks ......... num_blocks

A request is admitted where it fits into the first part, so that it can always run, alone if need
be, whatever is pinned.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.ids import BlockId, BlockKey, PinId
from rayserve_paged.core.kv_manager import KVManager


class Pins:
    """The pins of one replica.

    Args:
        kv: The blocks.
        max_blocks: Blocks that all pins together may hold, each counted once.
    """

    def __init__(self, kv: KVManager, max_blocks: int) -> None:
        self._kv = kv
        self._max_blocks = max_blocks
        self._tables: dict[PinId, BlockTable] = {}
        self._num_pins: Counter[BlockId] = Counter()

    @property
    def tables(self) -> Mapping[PinId, BlockTable]:
        """What each pin holds."""
        return self._tables

    @property
    def blocks(self) -> Iterator[Sequence[BlockId]]:
        """Blocks of each pin."""
        return (table.block_ids for table in self._tables.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, each counted once."""
        return len(self._num_pins)

    def pin(
        self,
        pin_id: PinId,
        keys: Sequence[BlockKey],
        num_tokens: int,
        windows: Sequence[AttentionWindow] = ONE_FULL_GROUP,
    ) -> int:
        """Hold the blocks of a prefix that are computed now.

        Args:
            pin_id: A pin of this name that holds blocks already stays as it is.
            keys: Key chain of the prefix's full blocks.
            num_tokens: Tokens of the prefix.
            windows: What each layer group attends to for prompts that begin with it.

        Returns:
            Tokens of the longest leading part that is found, and kept: a prompt that goes on from
            there need not compute them. 0 where nothing is, and then there is no pin.

        Raises:
            PinLimitError: They are too many; none is held.
        """
        if pin_id not in self._tables:
            places = self._match(keys, num_tokens, windows)
            found = [block_id for block_id in places if block_id is not None]
            num_new = sum(block_id not in self._num_pins for block_id in found)
            if not found:
                return 0
            if self.num_blocks + num_new > self._max_blocks:
                raise PinLimitError(pin_id, num_new, self.num_blocks, self._max_blocks)
            # Who pins asks for nothing yet: the blocks are worth what their requests make of them.
            self._tables[pin_id] = self._kv.open(places, windows=windows, resumes=True)
            self._num_pins.update(found)
        table = self._tables[pin_id]
        return table.num_places * table.block_size

    def _match(
        self, keys: Sequence[BlockKey], num_tokens: int, windows: Sequence[AttentionWindow]
    ) -> list[BlockId | None]:
        """Find what longer prompts read of the prefix, and what it reads as a prompt itself.

        A prompt computes its last token. Where that takes up the last block, a window before it
        begins one block earlier than the window of what comes after the prefix.
        """
        longer = self._kv.match(keys, num_tokens + 1, windows)
        itself = self._kv.match(keys, num_tokens, windows)
        return [
            other if block_id is None else block_id
            for block_id, other in zip_longest(longer, itself)
        ]

    def unpin(self, pin_id: PinId) -> None:
        """Let go of a pin's blocks; an unknown name is ignored."""
        table = self._tables.pop(pin_id, None)
        if table is None:
            return
        self._num_pins -= Counter(table.block_ids)
        self._kv.close(table)

    def clear(self) -> None:
        """Let go of all."""
        for pin_id in list(self._tables):
            self.unpin(pin_id)
