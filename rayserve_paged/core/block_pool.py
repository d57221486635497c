"""The physical blocks of one tier: which are free, held or cached, and how often each is held.

Every block is in exactly one state, and `num_free + num_held + num_cached == num_blocks` always:

    FREE    nobody holds it, its content means nothing
    HELD    at least one holder lists it; the count says how many
    CACHED  nobody holds it, its content is sealed and can be matched; the next to be evicted

                 allocate                release (not sealed)
        FREE ----------------> HELD ----------------------------> FREE
                                | ^
           release (sealed)     v |  share
                               CACHED --- allocate (evicts the oldest) ---> HELD
"""

import enum
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId, LayerGroupId

FIRST_LAYER_GROUP = LayerGroupId(0)


class BlockState(enum.Enum):
    """Where a block stands in the ledger."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"


class Allocation(NamedTuple):
    """Blocks that `allocate` granted.

    Args:
        block_ids: Each HELD once, by the caller.
        evicted: Those of them that were CACHED and whose content is lost by this.
    """

    block_ids: list[BlockId]
    evicted: list[BlockId]


class BlockPool:
    """The blocks of one layer group in one tier.

    Args:
        num_blocks: Capacity; ids run from 0.
        layer_group: The layers whose KV these blocks hold.
        free_order: Order in which free blocks are first handed out; ascending where None.

    Raises:
        ValueError: `free_order` is not a permutation of the ids.
    """

    def __init__(
        self,
        num_blocks: int,
        layer_group: LayerGroupId = FIRST_LAYER_GROUP,
        free_order: Sequence[int] | None = None,
    ) -> None:
        order = list(range(num_blocks)) if free_order is None else list(free_order)
        if sorted(order) != list(range(num_blocks)):
            raise ValueError(f"free_order={order} is not a permutation of 0..{num_blocks - 1}")
        self.num_blocks = num_blocks
        self.layer_group = layer_group
        # A stack: the last is handed out next, so that warm blocks are reused first.
        self._free: list[BlockId] = [BlockId(b) for b in reversed(order)]
        self._counts = array("i", bytes(4 * num_blocks))
        self._sealed = bytearray(num_blocks)
        # Least recently released first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """FREE blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """CACHED blocks."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can grant: FREE and CACHED."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """HELD blocks, each counted once however many hold it."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def free_ids(self) -> tuple[BlockId, ...]:
        """FREE blocks, the next to be handed out last."""
        return tuple(self._free)

    @property
    def cached_ids(self) -> tuple[BlockId, ...]:
        """CACHED blocks, the next to be evicted first."""
        return tuple(self._cached)

    def count(self, block_id: BlockId) -> int:
        """Return how many holders list the block."""
        return self._counts[block_id]

    def is_sealed(self, block_id: BlockId) -> bool:
        """Return whether the block is kept as CACHED when its last holder lets go."""
        return bool(self._sealed[block_id])

    def state(self, block_id: BlockId) -> BlockState:
        """Return the state of one block."""
        if self._counts[block_id]:
            return BlockState.HELD
        return BlockState.CACHED if block_id in self._cached else BlockState.FREE

    def num_cached_of(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of these would stop being available if they were shared."""
        counts = self._counts
        return sum(not counts[block_id] for block_id in block_ids)

    def allocate(self, num_blocks: int) -> Allocation | None:
        """Hand out blocks: FREE ones first, then CACHED ones, the longest unused first.

        Returns:
            The blocks, or None (and nothing changed) where fewer are available.
        """
        if num_blocks > self.num_available:
            return None
        evicted = []
        from_free = min(num_blocks, len(self._free))
        block_ids = self._free[len(self._free) - from_free :]
        block_ids.reverse()
        del self._free[len(self._free) - from_free :]
        for _ in range(num_blocks - from_free):
            block_id, _none = self._cached.popitem(last=False)
            self._sealed[block_id] = False
            evicted.append(block_id)
        block_ids += evicted
        for block_id in block_ids:
            self._counts[block_id] = 1
        return Allocation(block_ids, evicted)

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one holder to each block; a CACHED one becomes HELD.

        Raises:
            LedgerError: A block is FREE, so its content means nothing.
        """
        for block_id in block_ids:
            if not self._counts[block_id]:
                if block_id not in self._cached:
                    raise LedgerError(f"block {block_id} is FREE and cannot be shared", block_id)
                del self._cached[block_id]
            self._counts[block_id] += 1

    def seal(self, block_id: BlockId) -> None:
        """Keep this HELD block as CACHED once its last holder lets go.

        Raises:
            LedgerError: The block is not HELD.
        """
        if not self._counts[block_id]:
            raise LedgerError(f"block {block_id} is not HELD and cannot be sealed", block_id)
        self._sealed[block_id] = True

    def unseal(self, block_id: BlockId) -> None:
        """Forget that the block's content can be matched; a CACHED one becomes FREE."""
        self._sealed[block_id] = False
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Take one holder from each block, the last in the sequence first.

        A sequence's blocks are given head first; so its tail is the first to be evicted, and a
        cached chain is never cut at its head.

        Raises:
            LedgerError: A block is not HELD. The blocks after it have been released.
        """
        for block_id in reversed(block_ids):
            count = self._counts[block_id]
            if count == 0:
                raise LedgerError(f"block {block_id} is released and nobody holds it", block_id)
            self._counts[block_id] = count - 1
            if count == 1:
                if self._sealed[block_id]:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)
