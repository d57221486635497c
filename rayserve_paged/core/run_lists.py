"""The runs of CACHED blocks in lists: one for each priority and number of uses, oldest first.

A run is blocks of one chain that came in together, were used equally often and have one priority.
What is as old is of one chain, and in its list the tail is first.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.retention import DEFAULT_PRIORITY

NUM_LEVELS: Final = 8
"""Numbers of uses that are told apart; the last one stands for all from there on."""

NONE: Final = -1
"""Padding in the arrays: no run, no block."""


class _Part(NamedTuple):
    """Blocks of a run, head first, that are to go to another priority."""

    level: int
    stamp: int
    num_gone: int
    is_raised: bool
    block_ids: list[int]


class RunLists:
    """CACHED blocks by run and runs by list, for a policy that says which run is the next.

    Args:
        num_blocks: Blocks of the pool; ids run from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        # Blocks that have come in.
        self._clock = 0
        self._num_cached = 0
        # By block.
        self._run_of = array("i", [NONE]) * num_blocks
        self._before = array("i", [NONE]) * num_blocks
        # Of the blocks whose priority is not the default one.
        self._priority_of: dict[BlockId, int] = {}
        # Where the list heads of a priority begin, the lowest priority first.
        self._lists = {DEFAULT_PRIORITY: 0}
        # By run. Entries below NUM_LEVELS are list heads, as are those of the other priorities:
        # `newer` of one is the oldest run.
        lists = range(NUM_LEVELS)
        self._newer = array("i", lists)
        self._older = array("i", lists)
        self._level = bytearray(lists)
        self._stamp = array("q", [0]) * NUM_LEVELS
        self._size = array("i", [0]) * NUM_LEVELS
        self._tail = array("i", [NONE]) * NUM_LEVELS
        self._num_gone = array("i", [0]) * NUM_LEVELS
        self._unused_runs: list[int] = []
        # The next run to be evicted, as long as nothing has changed that.
        self._victim: int | None = None

    def __len__(self) -> int:
        """Return how many blocks are CACHED."""
        return self._num_cached

    def __contains__(self, block_id: BlockId) -> bool:
        """Return whether the block is CACHED."""
        return self._run_of[block_id] != NONE

    def priority(self, block_id: BlockId) -> int:
        """Return the priority of a block."""
        return self._priority_of.get(block_id, DEFAULT_PRIORITY)

    def prioritize(self, priorities: Mapping[BlockId, int]) -> None:
        """Give blocks other priorities. CACHED ones keep their age and uses; each of their runs
        costs its length, and for its new place the number of older runs of equal use there.

        Args:
            priorities: Of sealed blocks, HELD or CACHED. With them no block has a lower priority
                than one that follows it in a chain and is CACHED.
        """
        runs = {run for block_id in priorities if (run := self._run_of[block_id]) != NONE}
        parts = [
            part
            for run in sorted(runs, key=self._place)
            for part in self._take_out(run, priorities)
        ]
        for block_id, priority in priorities.items():
            if priority == DEFAULT_PRIORITY:
                self._priority_of.pop(block_id, None)
            else:
                self._priority_of[block_id] = priority
        # What is as old is of the same chain. Of that, what falls later precedes what is there,
        # and what rises later follows it.
        for part in parts:
            if not part.is_raised:
                self._insert(part)
        for part in reversed(parts):
            if part.is_raised:
                self._insert(part)
        self._victim = None

    def _runs(self, head: int) -> Iterator[int]:
        """Return the runs of a list, the oldest first."""
        run = self._newer[head]
        while run != head:
            yield run
            run = self._newer[run]

    def _blocks(self, run: int) -> Iterator[int]:
        """Return the blocks of a run, its tail first."""
        block_id = self._tail[run]
        for _ in range(self._size[run]):
            yield block_id
            block_id = self._before[block_id]

    def _add_runs(self, block_ids: Sequence[BlockId], level: int) -> None:
        """Add blocks, which follow each other, behind all others of their uses and priority."""
        if not self._priority_of:
            self._add_run(block_ids, level, self._older[level], self._clock)
            return
        groups = [(each, list(group)) for each, group in groupby(block_ids, key=self.priority)]
        for priority, group in reversed(groups):
            head = self._head(priority, level)
            self._add_run(group, level, self._older[head], self._clock)

    def _add_run(self, block_ids: Sequence[int], level: int, older: int, stamp: int) -> int:
        run = self._new_run(level, older)
        self._stamp[run] = stamp
        self._size[run] = len(block_ids)
        self._tail[run] = block_ids[-1]
        run_of, before = self._run_of, self._before
        previous = NONE
        for block_id in block_ids:
            run_of[block_id] = run
            before[block_id] = previous
            previous = block_id
        return run

    def _new_run(self, level: int, older: int) -> int:
        """Make an empty run and put it behind another one in the order of age."""
        if self._unused_runs:
            run = self._unused_runs.pop()
        else:
            run = len(self._size)
            self._add_entry(run, level)
        newer = self._newer[older]
        self._newer[older] = self._older[newer] = run
        self._older[run], self._newer[run] = older, newer
        self._level[run] = level
        self._num_gone[run] = 0
        return run

    def _cut(self, run: int, block_id: BlockId) -> None:
        """Make this block the head of its run; what precedes it becomes a run of its own."""
        # The head is as old as its tail and follows it in the order, so that the tail goes first.
        head = self._new_run(self._level[run], run)
        self._stamp[head] = self._stamp[run]
        tail = each = self._before[block_id]
        num_blocks = 0
        while each != NONE and self._run_of[each] == run:
            self._run_of[each] = head
            num_blocks += 1
            each = self._before[each]
        self._tail[head] = tail
        self._size[head] = num_blocks
        self._size[run] -= num_blocks

    def _end(self, run: int) -> None:
        """Take a run without blocks out of its list."""
        newer, older = self._newer[run], self._older[run]
        self._newer[older], self._older[newer] = newer, older
        self._unused_runs.append(run)
        if self._victim == run:
            self._victim = None

    def _head(self, priority: int, level: int) -> int:
        """Return the list head of a priority and number of uses."""
        if priority not in self._lists:
            first = self._lists[priority] = len(self._size)
            for head in range(first, first + NUM_LEVELS):
                self._add_entry(head, head - first)
            self._lists = dict(sorted(self._lists.items()))
        return self._lists[priority] + level

    def _place(self, run: int) -> tuple[int, int, int]:
        """Return what orders runs that came in together, tails first."""
        num_before, other = 0, self._older[run]
        # The order of a list; where it ends, its head has other stamps, or none.
        while self._size[other] and self._stamp[other] == self._stamp[run]:
            num_before += 1
            other = self._older[other]
        return self.priority(BlockId(self._tail[run])), self._level[run], num_before

    def _take_out(self, run: int, priorities: Mapping[BlockId, int]) -> list[_Part]:
        """Take blocks whose priority changes out of a run; return them, tails first."""
        level, stamp = self._level[run], self._stamp[run]
        old = self.priority(BlockId(self._tail[run]))
        kept: int | None = None
        parts: list[_Part] = []
        in_order = list(self._blocks(run))
        for new, group in groupby(in_order, lambda each: priorities.get(BlockId(each), old)):
            block_ids = list(group)
            if new != old:
                num_gone = 0
                if kept is None:
                    # Those that are gone followed this one.
                    num_gone, self._num_gone[run] = self._num_gone[run], 0
                parts.append(_Part(level, stamp, num_gone, new > old, block_ids[::-1]))
                continue
            kept = run if kept is None else self._new_run(level, kept)
            self._stamp[kept], self._size[kept] = stamp, len(block_ids)
            self._tail[kept] = block_ids[0]
            for block_id in block_ids:
                self._run_of[block_id] = kept
        if kept is None:
            self._end(run)
        return parts

    def _insert(self, part: _Part) -> None:
        """Add blocks by their stamp to the lists of the priority that they have now."""
        newer, stamp = self._newer, self._stamp
        head = self._head(self.priority(BlockId(part.block_ids[0])), part.level)
        limit = part.stamp if part.is_raised else part.stamp + 1
        run = newer[head]
        while run != head and stamp[run] < limit:
            run = newer[run]
        run = self._add_run(part.block_ids, part.level, self._older[run], part.stamp)
        self._num_gone[run] = part.num_gone

    def _add_entry(self, index: int, level: int) -> None:
        """Add a run, or the head of an empty list."""
        for column in (self._newer, self._older):
            column.append(index)
        for column in (self._size, self._num_gone):
            column.append(0)
        self._tail.append(NONE)
        self._stamp.append(0)
        self._level.append(level)
