"""The physical blocks of one tier: which are free, held or cached, and how often each is held.

Every block is in exactly one state, and `num_free + num_held + num_cached == num_blocks` always:

    FREE    nobody holds it, its content means nothing
    HELD    at least one holder lists it; the count says how many
    CACHED  nobody holds it, its content is sealed or frozen and can be matched until it is evicted

                 allocate                release (not sealed)
        FREE ----------------> HELD ----------------------------> FREE
                                | ^
           release (sealed,     v |  share
                    frozen)    CACHED --- allocate (evicts by value) ---> HELD

*Frozen* is a partly filled block whose leading slots can be copied. It is worth less than a block
at most, so that all frozen ones are evicted before any sealed one, of whatever priority.
"""

import enum
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.eviction import ValueEviction
from rayserve_paged.core.ids import BlockId

_SEALED = 1
_FROZEN = 2


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
    """The blocks of one tier; each holds the layers of one layer group.

    Args:
        num_blocks: Capacity; ids run from 0.
        free_order: Order in which free blocks are first handed out; ascending where None.

    Raises:
        ValueError: `free_order` is not a permutation of the ids.
    """

    def __init__(
        self,
        num_blocks: int,
        free_order: Sequence[int] | None = None,
    ) -> None:
        order = list(range(num_blocks)) if free_order is None else list(free_order)
        if sorted(order) != list(range(num_blocks)):
            raise ValueError(f"free_order={order} is not a permutation of 0..{num_blocks - 1}")
        self.num_blocks = num_blocks
        # A stack: the last is handed out next, so that warm blocks are reused first.
        self._free = array("i", reversed(order))
        # A list, which Python reads and writes twice as fast as an array of integers.
        self._counts = [0] * num_blocks
        # What becomes of a block that nobody holds any more: FREE at 0, else CACHED.
        self._kept = bytearray(num_blocks)
        self._cached = ValueEviction(num_blocks, None)
        # Least recently released first.
        self._frozen: OrderedDict[BlockId, None] = OrderedDict()

    def remember_evicted(self, fingerprint_of: Callable[[BlockId], int]) -> None:
        """Value chains that come back after their eviction by the uses that they had.

        Args:
            fingerprint_of: As in ValueEviction.

        Raises:
            AssertionError: Blocks are CACHED.
        """
        assert not self.num_cached, "to be told before the first block is cached"
        self._cached = ValueEviction(self.num_blocks, fingerprint_of)

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
        return cast(tuple[BlockId, ...], tuple(self._free))

    @property
    def cached_ids(self) -> tuple[BlockId, ...]:
        """CACHED blocks, the next to be evicted first."""
        return (*self._frozen, *self._cached)

    def snapshot(self) -> tuple[list[int], bytes]:
        """Copy for each block how many hold it, and whether it is kept (not 0) once none does."""
        return self._counts.copy(), bytes(self._kept)

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
        """Hand out blocks: FREE ones first, then CACHED ones, the frozen before the sealed, the
        longest unused of those, and of these the ones of the lowest priority and least value first.

        Returns:
            The blocks, or None (and nothing changed) where fewer are available.
        """
        num_free = len(self._free)
        if num_blocks == 1 and num_free:
            # What a sequence asks for that decodes.
            block_id = BlockId(self._free.pop())
            self._counts[block_id] = 1
            return Allocation([block_id], [])
        if num_blocks > num_free and num_blocks > self.num_available:
            return None
        from_free = min(num_blocks, num_free)
        block_ids = cast(list[BlockId], self._free[num_free - from_free :].tolist())
        block_ids.reverse()
        del self._free[num_free - from_free :]
        evicted: list[BlockId] = []
        if num_blocks > from_free:
            evicted = self._evict(num_blocks - from_free)
            block_ids += evicted
        counts = self._counts
        for block_id in block_ids:
            counts[block_id] = 1
        return Allocation(block_ids, evicted)

    def _evict(self, num_blocks: int) -> list[BlockId]:
        num_frozen = min(num_blocks, len(self._frozen))
        evicted = [self._frozen.popitem(last=False)[0] for _ in range(num_frozen)]
        evicted += self._cached.evict(num_blocks - num_frozen)
        kept = self._kept
        for block_id in evicted:
            kept[block_id] = 0
        return evicted

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one holder to each block; a CACHED one becomes HELD.

        Args:
            block_ids: Different blocks, in the order of their chain.

        Raises:
            LedgerError: A block is FREE, so its content means nothing. No holder was added.
        """
        counts, kept = self._counts, self._kept
        block_ids = list(block_ids)
        cached = [block_id for block_id in block_ids if not counts[block_id]]
        for block_id in cached:
            if not kept[block_id]:
                raise LedgerError(f"block {block_id} is FREE and cannot be shared", block_id)
        if cached and self._frozen:
            for block_id in cached:
                self._frozen.pop(block_id, None)
            cached = [block_id for block_id in cached if kept[block_id] == _SEALED]
        if cached:
            self._cached.taken(cached)
        for block_id in block_ids:
            counts[block_id] += 1

    def used(self, block_ids: Sequence[BlockId]) -> None:
        """Note that a request has found these blocks, and is about to share them.

        Args:
            block_ids: Sealed, from the head of a chain on.
        """
        self._cached.used(block_ids)

    def prioritize(self, priorities: Mapping[BlockId, int]) -> None:
        """Evict sealed blocks of a lower priority before those of a higher one.

        Args:
            priorities: As in ValueEviction; those that the blocks have from now on.
        """
        self._cached.prioritize(priorities)

    def priority(self, block_id: BlockId) -> int:
        """Return the priority of a block."""
        return self._cached.priority(block_id)

    def seal(self, block_id: BlockId) -> bool:
        """Keep this HELD block as CACHED once its last holder lets go.

        Returns:
            Whether it was not kept before.

        Raises:
            LedgerError: The block is not HELD.
        """
        if not self._counts[block_id]:
            raise LedgerError(f"block {block_id} is not HELD and cannot be sealed", block_id)
        is_new = self._kept[block_id] != _SEALED
        self._kept[block_id] = _SEALED
        return is_new

    def seal_run(self, block_ids: Sequence[BlockId]) -> None:
        """Seal several HELD blocks, as `seal` does each.

        Raises:
            LedgerError: A block is not HELD; those before it are sealed.
        """
        counts, kept = self._counts, self._kept
        for block_id in block_ids:
            if not counts[block_id]:
                raise LedgerError(f"block {block_id} is not HELD and cannot be sealed", block_id)
            kept[block_id] = _SEALED

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
        if self._kept[block_id] == _FROZEN:
            self._frozen.pop(block_id, None)
        else:
            self._cached.forget(block_id)
        if self._kept[block_id] and not self._counts[block_id]:
            self._free.append(block_id)
        self._kept[block_id] = 0

    def unseal_all(self) -> None:
        """Forget that any block's content can be matched: CACHED ones become FREE."""
        self._free.extend(self._evict(self.num_cached))
        for index in range(self.num_blocks):
            if self._kept[index]:
                self.unseal(BlockId(index))

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Take one holder from each block of a chain, the last in the sequence first.

        Args:
            block_ids: Head first, so that what is let go of at once is evicted from its tail on
                and never cut at its head.

        Raises:
            LedgerError: A block is not HELD. The blocks after it have been released.
        """
        counts, kept = self._counts, self._kept
        let_go: list[BlockId] = []
        for block_id in reversed(block_ids):
            count = counts[block_id]
            if count > 1:
                counts[block_id] = count - 1
            elif count and kept[block_id] == _SEALED:
                counts[block_id] = 0
                let_go.append(block_id)
            elif count:
                self._let_go(block_id)
            else:
                self._cached.released(let_go[::-1])
                raise LedgerError(f"block {block_id} is released and nobody holds it", block_id)
        if let_go:
            let_go.reverse()
            self._cached.released(let_go, block_ids[: block_ids.index(let_go[0])])

    def release_each(self, block_ids: Iterable[BlockId]) -> None:
        """Take one holder from each of some blocks of any chains, whose heads are still HELD.

        Raises:
            LedgerError: A block is not HELD. The blocks before it have been released.
        """
        for block_id in block_ids:
            if self._let_go(block_id):
                self._cached.put_back(block_id)

    def _let_go(self, block_id: BlockId) -> bool:
        """Take one holder from a block; return whether it is to be CACHED as a sealed one."""
        count = self._counts[block_id]
        if count == 0:
            raise LedgerError(f"block {block_id} is released and nobody holds it", block_id)
        self._counts[block_id] = count - 1
        if count > 1:
            return False
        kept = self._kept[block_id]
        if kept == _SEALED:
            return True
        if kept:
            self._frozen[block_id] = None
        else:
            self._free.append(block_id)
        return False
