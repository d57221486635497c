"""Which cached block goes next: the least likely to be asked for soon.

The value of a chain of cached blocks is the rate at which requests are expected to come back to it:

    value = sqrt(uses + 1) / (age + scale)

`uses` counts the requests that found the chain, or would have: ghosts of evicted chains remember
it. In conversations the chance that there is another turn grows about like this root. `age` counts
the blocks that came in since the chain did; times until the next use have heavy tails, and that of
the Lomax distribution makes the rate proportional to 1 / (age + scale). `scale` is the lower
quartile of the ages at which the last few chains were used for the first time, evicted or not: it
is there because users read before they answer, so that the newest chains are not the ones that are
needed next. Where chains come back at once it is small, and recency counts for more.

What comes in together and was used equally often is one *run*, an entry of an LRU list; there is
one list for each number of uses, so that the run of the least value is the oldest of its list:

    chain        b0 b1 b2 | b3 b4 b5 b6 | b7
    run              3    |      1      |  0       uses
    evicted         <--          <--      <--      from its end on, in part or as a whole

Where every token attends to all before it, neither uses nor recency grow along a chain, from its
head to its tail. So a block is never evicted before a cached block that follows it.

Under a window it may be. Blocks come in one after the other as they fall behind it, so that the
head is the oldest and goes first. A prompt that goes on from there needs the sinks and its last
window, and nothing of what lies between. These come in at the end, the sinks last:

    chain        s0 | b1 b2 b3 b4 | b5 b6 b7        sinks, behind the window, the window
    evicted       8 |  1  2  3  4 |  7  6  5        where all were used equally often

Blocks may have a *priority*. All of a lower one go before any of a higher one; each has lists of
its own, and within them value decides. Of what comes in together no block has a lower priority
than one that follows it.

Sources: ghosts as in ARC (Megiddo and Modha, FAST 2003); uses over age as in hyperbolic caching
(Blankstein et al., USENIX ATC 2017).
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Final, cast

from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ghosts import Ghosts
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.run_lists import NONE, NUM_LEVELS, RunLists

NUM_AGES: Final = 32
"""First uses that the scale is estimated from."""

_COST_OF_AGE: Final = tuple(1 / sqrt(uses + 1) for uses in range(NUM_LEVELS))


class ValueEviction(RunLists):
    """The CACHED blocks of a pool in the order in which they will be evicted.

    Every operation takes constant time for each block that it names and for each of their runs. A
    block takes 26 bytes, its share in the ghosts included, and a run 29 for as long as it lives.

    Args:
        num_blocks: Blocks of the pool; ids run from 0.
        fingerprint_of: A number below 2**64 that stands for the content of a block and of all that
            precedes it, evenly distributed. Asked about a block that comes in or is evicted, while
            its content can still be matched. None: evicted chains are not remembered.
    """

    def __init__(self, num_blocks: int, fingerprint_of: Callable[[BlockId], int] | None) -> None:
        super().__init__(num_blocks)
        self._ghosts = None
        if fingerprint_of is not None:
            self._ghosts = Ghosts(max(1, num_blocks), fingerprint_of)
        self._first_ages: deque[int] = deque(maxlen=NUM_AGES)
        self._scale = 0
        # By block. The uses of a block that is not sealed are 0.
        self._uses = bytearray(num_blocks)

    def __iter__(self) -> Iterator[BlockId]:
        """Return the CACHED blocks, the next to be evicted first."""
        for lists in self._lists.values():
            runs = [
                (-self._cost(run), level, run)
                for level in range(NUM_LEVELS)
                for run in self._runs(lists + level)
            ]
            # Stable: the older of two equal runs stays first.
            runs.sort(key=lambda entry: entry[:2])
            for _cost, _level, run in runs:
                yield from cast(Iterator[BlockId], self._blocks(run))

    def used(self, block_ids: Sequence[BlockId]) -> None:
        """Count one use of each block, for a request that found them.

        To be told before the blocks are `taken`, and once for each request: not again when it
        resumes after preemption.

        Args:
            block_ids: Sealed blocks, HELD or CACHED, from the head of a chain on.
        """
        uses = self._uses
        if block_ids and uses[block_ids[-1]] == NUM_LEVELS - 1:
            return  # And so it is with all that precede it.
        seen = NONE
        for block_id in block_ids:
            count = uses[block_id]
            if not count:
                run = self._run_of[block_id]
                if run not in (NONE, seen):
                    self._note_first_use(self._clock - self._stamp[run])
                    seen = run
            if count < NUM_LEVELS - 1:
                uses[block_id] = count + 1

    def taken(self, block_ids: Sequence[BlockId]) -> None:
        """Take out blocks that become HELD again.

        Args:
            block_ids: CACHED blocks in the order of their chain, as a rule from its head on: where
                what precedes them in their run stays behind, that costs its length.

        Raises:
            LedgerError: A block is not CACHED. The blocks before it have been taken.
        """
        run_of, before = self._run_of, self._before
        start, num_blocks = 0, len(block_ids)
        while start < num_blocks:
            block_id = block_ids[start]
            run = run_of[block_id]
            if run == NONE:
                raise LedgerError(f"block {block_id} is not CACHED and cannot be taken", block_id)
            if before[block_id] != NONE and run_of[before[block_id]] == run:
                self._cut(run, block_id)
            end = start + 1
            run_of[block_id] = NONE
            while end < num_blocks:
                previous, block_id = block_id, block_ids[end]
                if run_of[block_id] != run or before[block_id] != previous:
                    break
                run_of[block_id] = NONE
                end += 1
            self._num_cached -= end - start
            self._size[run] -= end - start
            if not self._size[run]:
                self._end(run)
            start = end

    def released(self, block_ids: Sequence[BlockId], before: Sequence[BlockId] = ()) -> None:
        """Take in blocks that nobody holds any more.

        Args:
            block_ids: Sealed blocks that follow each other in a chain, head first.
            before: The blocks before the first in the chain, head first, which are HELD. A chain
                comes in from its tail to its head, or as a whole.
        """
        if not block_ids:
            return
        num_blocks = len(block_ids)
        self._clock += num_blocks
        self._num_cached += num_blocks
        self._victim = None
        uses, last = self._uses, block_ids[-1]
        if not uses[last] and self._ghosts is not None:
            self._recall(self._ghosts, block_ids, before)
        # Uses fall along a chain. Where they do not, since a head was evicted while its tail was
        # HELD and has come back, a tail counts for no more than what precedes it.
        most = uses[block_ids[0]]
        if most and before:
            most = min(most, min(map(uses.__getitem__, before)))
        start = 0
        while start < num_blocks:
            level = uses[block_ids[start]]
            end = num_blocks
            if uses[last] != level:
                # This is the first block with fewer.
                end = bisect.bisect_right(
                    block_ids, -level, lo=start, key=lambda block_id: -uses[block_id]
                )
            most = min(most, level)
            self._add_runs(block_ids if end - start == num_blocks else block_ids[start:end], most)
            start = end

    def put_back(self, block_id: BlockId) -> None:
        """Take in a block that was taken alone, for a short while; its chain's head is HELD."""
        self._clock += 1
        self._num_cached += 1
        self._victim = None
        self._add_runs([block_id], self._uses[block_id])

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Give up the blocks of the least value.

        Raises:
            LedgerError: Fewer blocks are CACHED.
        """
        if num_blocks > self._num_cached:
            message = f"{num_blocks} blocks to evict, and {self._num_cached} are CACHED"
            raise LedgerError(message, num_blocks, self._num_cached)
        self._num_cached -= num_blocks
        run_of, before, uses = self._run_of, self._before, self._uses
        evicted: list[int] = []
        while num_blocks:
            run = self._victim
            if run is None:
                run = self._victim = self._find_victim()
            block_id, size = self._tail[run], self._size[run]
            num_evicted = min(num_blocks, size)
            for _ in range(num_evicted):
                evicted.append(block_id)
                run_of[block_id] = NONE
                uses[block_id] = 0
                block_id = before[block_id]
            self._num_gone[run] += num_evicted
            if num_evicted == size:
                if self._ghosts is not None:
                    # A chain that comes back begins with the last block to go.
                    self._ghosts.put(
                        BlockId(evicted[-1]),
                        self._level[run],
                        self._num_gone[run],
                        self._stamp[run],
                    )
                self._end(run)
            else:
                self._tail[run] = block_id
                self._size[run] = size - num_evicted
            num_blocks -= num_evicted
        if self._priority_of:
            for each in evicted:
                self._priority_of.pop(BlockId(each), None)
        return cast(list[BlockId], evicted)

    def forget(self, block_id: BlockId) -> None:
        """Drop a block whose content can no longer be matched, CACHED or HELD."""
        if self._run_of[block_id] != NONE:
            self.taken([block_id])
        self._uses[block_id] = 0
        self._priority_of.pop(block_id, None)

    def _recall(
        self, ghosts: Ghosts, block_ids: Sequence[BlockId], before: Sequence[BlockId]
    ) -> None:
        """Give blocks that are new here the uses of an evicted chain which they bring back."""
        uses = self._uses
        start = 0
        if uses[block_ids[0]]:
            start = bisect.bisect_left(block_ids, True, key=lambda block_id: not uses[block_id])
        while start < len(block_ids):
            ghost = ghosts.take(block_ids[start])
            if ghost is None:
                return
            level, num_gone, stamp = ghost
            if not level:
                self._note_first_use(self._clock - stamp)
            level = min(level + 1, NUM_LEVELS - 1)
            if start or before:
                level = min(level, uses[block_ids[start - 1] if start else before[-1]])
            for block_id in block_ids[start : start + num_gone]:
                uses[block_id] = level
            start += num_gone

    def _note_first_use(self, age: int) -> None:
        self._first_ages.append(age)
        self._scale = sorted(self._first_ages)[len(self._first_ages) // 4]
        self._victim = None

    def _find_victim(self) -> int:
        """Return the run of the least value."""
        newer, stamp = self._newer, self._stamp
        now = self._clock + self._scale
        victim, most = NONE, -1.0
        for lists in self._lists.values():
            for head, cost_of_age in enumerate(_COST_OF_AGE, lists):
                run = newer[head]
                if run != head:
                    cost = (now - stamp[run]) * cost_of_age
                    # The first of equal ones: of those the one with the fewest uses may follow
                    # the others in a chain.
                    if cost > most:
                        victim, most = run, cost
            if victim != NONE:
                break
        return victim

    def _cost(self, run: int) -> float:
        """Return the inverse of a run's value."""
        age = self._clock - self._stamp[run]
        return (age + self._scale) * _COST_OF_AGE[self._level[run]]
