"""Which priority each block of a pool has, and until when."""

import math
from collections.abc import Iterable, Sequence

from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.retention import DEFAULT_PRIORITY, RetentionPlan, Steps, highest


class BlockRetention:
    """What requests have asked for the sealed blocks of a pool.

    A block has the highest priority that anyone asks for who computed or shared it, and whoever
    asks for nothing asks for the default one. Nothing is kept of blocks that have it.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Seconds, as of the last `advance`.
        self.now = -math.inf
        self._steps: dict[BlockId, Steps] = {}
        self._low: set[BlockId] = set()
        # Blocks by when their priority changes next.
        self._due: KeyedHeap[BlockId] = KeyedHeap()

    def __len__(self) -> int:
        """Return for how many blocks something else than the default is asked."""
        return len(self._steps)

    @property
    def num_entries(self) -> int:
        """Entries kept for durations: at most twice the blocks that have one, and a few."""
        return self._due.num_entries

    def items(self) -> Iterable[tuple[BlockId, Steps]]:
        """Return what is asked for each block, in seconds on the clock of `advance`."""
        return self._steps.items()

    def advance(self, now: float) -> None:
        """Let the durations run out that are over.

        Args:
            now: Seconds on a clock that never goes back.
        """
        self.now = now
        due, changed = self._due, []
        while (block_id := due.first()) is not None and due.key(block_id)[0] <= now:
            left = tuple(step for step in self._steps[block_id] if step[0] > now)
            self._note(block_id, left)
            changed.append(block_id)
        if changed:
            # Together, so that a chain is in order before and after.
            self._pool.prioritize({block_id: self._priority(block_id) for block_id in changed})

    def seal(self, block_id: BlockId, place: int, plan: RetentionPlan) -> None:
        """Note a block that a request has just filled, and that nobody else has asked for.

        What is below the default is known from here on, so that whoever shares the block can ask
        for more. What is above it is taken in at the release, from which durations count.
        """
        steps = plan.at(place)
        if steps and steps[0][1] < DEFAULT_PRIORITY:
            self._set(block_id, ((math.inf, steps[0][1]),))

    def use(self, block_ids: Sequence[BlockId]) -> None:
        """Note that somebody shares HELD blocks who asks for nothing."""
        if not self._low or self._low.isdisjoint(block_ids):
            return
        for block_id in self._low.intersection(block_ids):
            self._set(block_id, highest(self._steps[block_id], ()))

    def release(self, table: BlockTable, plan: RetentionPlan) -> None:
        """Take in what a request asks for the blocks of a table that it is about to let go of."""
        for group in table.groups:
            self.claim(group.places(), 0, plan)

    def claim(self, places: Sequence[BlockId | None], first: int, plan: RetentionPlan) -> None:
        """Take in what a request asks for HELD blocks that it is about to let go of.

        Args:
            places: One block of its chain after the other; None where there is none.
            first: Place of the first of them in the chain.
            plan: Of the request.
        """
        asked: Steps | None = None
        timed: Steps = ()
        for index in range(len(places) - 1, -1, -1):
            block_id = places[index]
            if block_id is None or not self._pool.is_sealed(block_id):
                continue
            own = plan.at(first + index)
            both = own if asked is None else highest(own, asked)
            if both != asked:
                asked = both
                timed = tuple((self.now + seconds, priority) for seconds, priority in both)
            self._set(block_id, highest(self._steps.get(block_id, ()), timed))

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Drop blocks whose content is lost."""
        for block_id in block_ids:
            if block_id in self._steps:
                self._note(block_id, ())

    def _set(self, block_id: BlockId, steps: Steps) -> None:
        """Change what is asked for a HELD block."""
        if steps != self._steps.get(block_id, ()):
            self._note(block_id, steps)
            self._pool.prioritize({block_id: self._priority(block_id)})

    def _note(self, block_id: BlockId, steps: Steps) -> None:
        if steps:
            self._steps[block_id] = steps
        else:
            self._steps.pop(block_id, None)
        if steps and steps[0][1] < DEFAULT_PRIORITY:
            self._low.add(block_id)
        else:
            self._low.discard(block_id)
        if steps and steps[0][0] < math.inf:
            self._due.put(block_id, (steps[0][0],))
        else:
            self._due.remove(block_id)

    def _priority(self, block_id: BlockId) -> int:
        steps = self._steps.get(block_id)
        return steps[0][1] if steps else DEFAULT_PRIORITY
