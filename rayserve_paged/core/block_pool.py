"""The physical blocks of one tier: which are free, held or cached, and how often each is held.

Every block is in exactly one state, and `num_free + num_held + num_cached == num_blocks` always:

    FREE    nobody holds it, its content means nothing
    HELD    at least one holder lists it; the count says how many
    CACHED  nobody holds it, its content is sealed or frozen and can be matched

                 allocate                release (not sealed)
        FREE ----------------> HELD ----------------------------> FREE
                                | ^
           release (sealed,     v |  share
                    frozen)    CACHED --- allocate (evicts the oldest) ---> HELD

*Frozen* is a partly filled block whose leading slots can be copied. It is worth less than a block
at most, so that all frozen ones are evicted before any sealed one.
"""

import enum
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId, LayerGroupId

_SEALED = 1
_FROZEN = 2

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
        # What becomes of a block that nobody holds any more: FREE at 0, else CACHED.
        self._kept = bytearray(num_blocks)
        # Least recently released first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._frozen: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """FREE blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """CACHED blocks."""
        return len(self._frozen) + len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can grant: FREE and CACHED."""
        return len(self._free) + len(self._frozen) + len(self._cached)

    @property
    def num_held(self) -> int:
        """HELD blocks, each counted once however many hold it."""
        return self.num_blocks - self.num_available

    @property
    def free_ids(self) -> tuple[BlockId, ...]:
        """FREE blocks, the next to be handed out last."""
        return tuple(self._free)

    @property
    def cached_ids(self) -> tuple[BlockId, ...]:
        """CACHED blocks, the next to be evicted first."""
        return (*self._frozen, *self._cached)

    def count(self, block_id: BlockId) -> int:
        """Return how many holders list the block."""
        return self._counts[block_id]

    def is_sealed(self, block_id: BlockId) -> bool:
        """Return whether the block is full, and kept as CACHED when its last holder lets go."""
        return self._kept[block_id] == _SEALED

    def is_frozen(self, block_id: BlockId) -> bool:
        """Return whether the block is not full, and kept as CACHED all the same."""
        return self._kept[block_id] == _FROZEN

    def state(self, block_id: BlockId) -> BlockState:
        """Return the state of one block."""
        if self._counts[block_id]:
            return BlockState.HELD
        return BlockState.CACHED if self._kept[block_id] else BlockState.FREE

    def num_cached_of(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of these would stop being available if they were shared."""
        counts = self._counts
        return sum(not counts[block_id] for block_id in block_ids)

    def allocate(self, num_blocks: int) -> Allocation | None:
        """Hand out blocks: FREE ones first, then CACHED ones, the frozen before the sealed, and the
        longest unused first.

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
            block_id, _none = (self._frozen or self._cached).popitem(last=False)
            self._kept[block_id] = 0
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
                if not self._kept[block_id]:
                    raise LedgerError(f"block {block_id} is FREE and cannot be shared", block_id)
                del self._list_of(block_id)[block_id]
            self._counts[block_id] += 1

    def seal(self, block_id: BlockId) -> None:
        """Keep this HELD block as CACHED once its last holder lets go.

        Raises:
            LedgerError: The block is not HELD.
        """
        if not self._counts[block_id]:
            raise LedgerError(f"block {block_id} is not HELD and cannot be sealed", block_id)
        self._kept[block_id] = _SEALED

    def freeze(self, block_id: BlockId) -> None:
        """Keep this HELD block, which is not full, as CACHED once its last holder lets go.

        Raises:
            LedgerError: The block is not HELD.
        """
        if not self._counts[block_id]:
            raise LedgerError(f"block {block_id} is not HELD and cannot be frozen", block_id)
        self._kept[block_id] = _FROZEN

    def unseal(self, block_id: BlockId) -> None:
        """Forget that the block's content can be matched; a CACHED one becomes FREE."""
        if self._kept[block_id] and not self._counts[block_id]:
            del self._list_of(block_id)[block_id]
            self._free.append(block_id)
        self._kept[block_id] = 0

    def _list_of(self, block_id: BlockId) -> OrderedDict[BlockId, None]:
        """Return the CACHED blocks among which a kept one is when nobody holds it."""
        return self._frozen if self._kept[block_id] == _FROZEN else self._cached

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
                if self._kept[block_id]:
                    self._list_of(block_id)[block_id] = None
                else:
                    self._free.append(block_id)
