"""Which waiting sequence starts next, on which cached prefix, and whether there is room for it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayserve_paged.core import policy
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, StepId
from rayserve_paged.core.prefix_match import Prefix
from rayserve_paged.core.running_batch import RunningBatch
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.waiting_queue import WaitingQueue


class Candidate(NamedTuple):
    """The waiting sequence whose turn it is.

    Args:
        sequence: It waits.
        matched: Its cached blocks, as `KVManager.match` returns them.
        prefix: What it starts on; None where there is no room for it.
    """

    sequence: SequenceState
    matched: list[BlockId | None]
    prefix: Prefix | None


class _Room(NamedTuple):
    """What preempting some sequences would leave.

    Args:
        rows: Theirs, those kept for their unborn siblings and for beams included.
        block_ids: Blocks that nobody else holds.
    """

    rows: int
    block_ids: frozenset[BlockId]


_NO_ROOM = _Room(0, frozenset())


class Admission:
    """Looks at who waits, and at what those who run leave.

    Args:
        batch: Those who run.
        queue: Those who wait.
    """

    def __init__(self, batch: RunningBatch, queue: WaitingQueue) -> None:
        self._batch = batch
        self._kv = batch.kv
        self._queue = queue

    def next_candidate(
        self, step_id: StepId, promised: int, *, others_run: bool
    ) -> Candidate | None:
        """Return whose turn it is; None if nobody waits. Whoever waits for a prefix steps aside.

        Args:
            step_id: Of the next step.
            promised: Blocks that running sequences need for tokens they already know.
            others_run: Whether there is something else to compute meanwhile.
        """
        while (sequence := self._queue.first()) is not None:
            matched = self._kv.match(sequence.keys, sequence.num_matchable, sequence.windows)
            num_matched = len(matched) // self._kv.num_layer_groups
            waits = self._batch.prefix_waits
            if not waits.park(sequence, num_matched, step_id, others_run=others_run):
                prefix = self._prefix_that_fits(sequence, matched, promised)
                return Candidate(sequence, matched, prefix)
            self._queue.remove(sequence)
        return None

    def fits_without(self, candidate: Candidate, leaving: Sequence[SequenceState]) -> bool:
        """Return whether there is room for a waiting sequence once others are preempted.

        Args:
            candidate: That waits.
            leaving: Sequences with a row; all of a search's, or none.
        """
        room = _room_of(self._kv.pool, leaving)
        promised = self.num_blocks_promised(leaving)
        return self._fits(candidate.sequence, candidate.matched, promised, room=room)

    def num_blocks_promised(self, without: Sequence[SequenceState] = ()) -> int:
        """Return the blocks that running sequences need for tokens they already know."""
        batch, block_size = self._batch, self._kv.block_size
        rows = batch.rows
        if without:
            rows = rows[~np.isin(rows, np.array([sequence.row for sequence in without], np.int32))]
        num_promised = 0
        if batch.num_windowed:
            windowed = batch.windowed[rows]
            for row in rows[windowed].tolist():
                num_promised += batch.sequence(row).table.num_growing(int(batch.known[row]))
            rows = rows[~windowed]
        places = -(-batch.known[rows] // block_size) - batch.slots[rows] // block_size
        num_promised += int(places.clip(0).sum()) * self._kv.num_layer_groups
        if batch.num_beams:
            searches = {sequence.beam for sequence in batch.order}
            searches -= {sequence.beam for sequence in without}
            num_promised += sum(search.num_blocks_to_enter for search in searches if search)
        return num_promised

    def num_tokens_to_spare(self, sequence: SequenceState, prefix: Prefix, promised: int) -> int:
        """Return how many tokens a waiting sequence may compute at once; at least 1 if it fits."""
        pool, num_copied = self._kv.pool, 0
        held = [block_id for block_id in prefix.places if block_id is not None]
        if prefix.partial is not None:
            held += prefix.partial.block_ids
            num_copied = prefix.partial.num_tokens
        num_blocks = pool.num_available - pool.num_cached_of(held) - promised
        num_blocks -= self._headroom(sequence)
        return num_blocks // self._kv.num_layer_groups * self._kv.block_size - num_copied

    def _prefix_that_fits(
        self, sequence: SequenceState, matched: list[BlockId | None], promised: int
    ) -> Prefix | None:
        """Return what a waiting sequence starts on; None where it cannot."""
        if self._kv.partials is not None:
            num_places = len(matched) // self._kv.num_layer_groups
            content = sequence.content(num_places, sequence.num_matchable - 1)
            partial = self._kv.match_partly(content)
            # Its sources are more blocks to be held, until the step has finished.
            if partial is not None and self._fits(
                sequence, matched, promised, sources=partial.block_ids
            ):
                return Prefix(matched, partial)
        return Prefix(matched, None) if self._fits(sequence, matched, promised) else None

    def _headroom(self, sequence: SequenceState, num_leaving: int = 0) -> int:
        """Return the blocks to be left for others where a waiting sequence starts.

        Args:
            sequence: That waits.
            num_leaving: Rows of those that are to be preempted for it.
        """
        # Siblings that are to be born write a block each as well; alone, a group always starts.
        others = len(self._batch.order) + self._batch.num_reserved_rows - num_leaving
        num_running = others + sequence.num_rows_beside if others else 0
        return num_running * self._kv.num_layer_groups

    def _fits(
        self,
        sequence: SequenceState,
        matched: list[BlockId | None],
        promised: int,
        sources: Sequence[BlockId] = (),
        room: _Room = _NO_ROOM,
    ) -> bool:
        """Return whether a waiting sequence can start on its cached blocks.

        Args:
            sequence: That waits.
            matched: Cached blocks that it would share.
            promised: Blocks that those who stay need for tokens they already know.
            sources: Blocks that it would copy from.
            room: What others would leave that are to be preempted for it.
        """
        batch = self._batch
        if batch.num_open_rows + room.rows < sequence.num_rows_beside + 1:
            return False
        known = sequence.num_known
        table = BlockTable(self._kv.block_size, matched, sequence.windows)
        held = self._kv.pool.num_cached_of([*table.block_ids, *sources])
        held += len(room.block_ids.intersection(table.block_ids))
        if sequence.beam is not None:
            held += sequence.beam.num_blocks_to_enter
        return policy.can_admit(
            num_blocks_needed=table.num_growing(known) + held,
            num_blocks_available=self._kv.pool.num_available + len(room.block_ids),
            num_blocks_promised=promised,
            num_running=self._headroom(sequence, room.rows),
        )


def _room_of(pool: BlockPool, sequences: Sequence[SequenceState]) -> _Room:
    held = Counter(block_id for sequence in sequences for block_id in sequence.table.block_ids)
    freed = frozenset(block_id for block_id, count in held.items() if pool.count(block_id) == count)
    num_rows = sum(1 + sequence.num_unborn for sequence in sequences)
    searches = {sequence.beam for sequence in sequences if sequence.beam is not None}
    return _Room(num_rows + sum(search.num_reserved_rows for search in searches), freed)
