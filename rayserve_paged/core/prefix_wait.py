"""Blocks that running sequences are computing now, and sequences that wait for them.

A sequence that prefills computes the blocks of its key chain one after the other, and is found
here by the key of the first that is not sealed yet. A newcomer that needs just that block next
would compute it a second time, beside the first. It is parked instead, until the blocks that the
two have in common are sealed, or the other stops running, or it has waited for long enough.

One entry for each prefilling sequence, which moves on when a block is sealed: a sequence that
decodes has none and costs nothing.
"""

import bisect
from collections.abc import Collection, Iterator

from rayserve_paged.core import policy
from rayserve_paged.core.ids import BlockKey, StepId
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.sequence import SequenceState


class PrefixWaits:
    """Who computes which block next, and who waits for whom.

    Args:
        max_wait_steps: Steps that a sequence waits at most; 0 for no waiting at all.
    """

    def __init__(self, max_wait_steps: int) -> None:
        self.max_wait_steps = max_wait_steps
        # Several only where one of them had waited for too long.
        self._computing: dict[BlockKey, list[SequenceState]] = {}
        self._next_key: dict[SequenceState, BlockKey] = {}
        # For each computing sequence that is waited for: who waits for how many sealed blocks.
        self._waiters: dict[SequenceState, dict[SequenceState, int]] = {}
        # For whom each waits; None where its wait is over.
        self._parked: dict[SequenceState, SequenceState | None] = {}
        self._due: list[SequenceState] = []
        # Those who wait, by the step from which on each has waited for long enough.
        self._deadlines: KeyedHeap[SequenceState] = KeyedHeap()

    # --- who computes ---------------------------------------------------------------------

    def enter(self, sequence: SequenceState) -> None:
        """Note a sequence that has got a row, and ends its own wait."""
        sequence.waits_since = None
        if self.max_wait_steps:
            self._note(sequence)

    def advance(self, sequence: SequenceState) -> None:
        """Note that a running sequence has sealed blocks."""
        key = self._next_key.pop(sequence, None)
        if key is None:
            return
        self._drop(key, sequence)
        self._note(sequence)
        for waiter, target in list(self._waiters.get(sequence, {}).items()):
            if target <= sequence.num_sealed:
                self._end_wait(waiter)

    def leave(self, sequence: SequenceState) -> None:
        """Note that a sequence does not run any more; who waited for it goes on at once."""
        key = self._next_key.pop(sequence, None)
        if key is not None:
            self._drop(key, sequence)
            for waiter in list(self._waiters.get(sequence, ())):
                self._end_wait(waiter)

    def _note(self, sequence: SequenceState) -> None:
        if sequence.num_sealed < len(sequence.keys):
            key = sequence.keys[sequence.num_sealed]
            self._next_key[sequence] = key
            self._computing.setdefault(key, []).append(sequence)

    def _drop(self, key: BlockKey, sequence: SequenceState) -> None:
        computing = self._computing[key]
        computing.remove(sequence)
        if not computing:
            del self._computing[key]

    # --- who waits ------------------------------------------------------------------------

    def park(
        self, sequence: SequenceState, num_matched: int, step_id: StepId, *, others_run: bool
    ) -> bool:
        """Let a waiting sequence wait for blocks that are being computed, where that pays.

        Args:
            sequence: Waiting, the next to be started.
            num_matched: Leading blocks of it that are in the cache.
            step_id: Of the next step.
            others_run: Whether there is something else to compute meanwhile.

        Returns:
            Whether it waits here; it comes back from `take_due`.
        """
        keys, block_size = sequence.keys, sequence.table.block_size
        num_usable = min(len(keys), (sequence.num_matchable - 1) // block_size)
        if num_matched >= num_usable:
            return False
        computing = self._computing.get(keys[num_matched])
        if computing is None:
            return False
        first = computing[0]
        num_common = _num_common(first.keys, keys[:num_usable], num_matched)
        since = step_id if sequence.waits_since is None else sequence.waits_since
        snapshot = policy.PrefixWait(
            num_blocks_gained=num_common - num_matched,
            num_steps_waited=step_id - since,
            max_steps=self.max_wait_steps,
            others_run=others_run,
        )
        if not policy.should_wait_for_prefix(snapshot):
            return False
        sequence.waits_since = since
        self._parked[sequence] = first
        self._waiters.setdefault(first, {})[sequence] = num_common
        self._deadlines.put(sequence, (since + self.max_wait_steps,))
        return True

    def take_due(self, step_id: StepId) -> list[SequenceState]:
        """Return parked sequences whose wait is over; they are parked no more.

        Args:
            step_id: Of the next step.
        """
        deadlines = self._deadlines
        while (waiter := deadlines.first()) is not None:
            if deadlines.key(waiter) > (step_id,):
                break
            self._end_wait(waiter)
        due, self._due = [each for each in self._due if each in self._parked], []
        for sequence in due:
            del self._parked[sequence]
        return due

    def remove(self, sequence: SequenceState) -> None:
        """Let a sequence wait no more, which ends."""
        if self._parked.get(sequence) is not None:
            self._end_wait(sequence)
        self._parked.pop(sequence, None)

    def _end_wait(self, waiter: SequenceState) -> None:
        """Let a sequence that waits for another come back from `take_due`."""
        computing = self._parked[waiter]
        assert computing is not None, "its wait is over"
        self._parked[waiter] = None
        self._deadlines.remove(waiter)
        del self._waiters[computing][waiter]
        if not self._waiters[computing]:
            del self._waiters[computing]
        self._due.append(waiter)

    # --- what others ask ------------------------------------------------------------------

    @property
    def parked(self) -> Collection[SequenceState]:
        """Sequences that wait here."""
        return self._parked.keys()

    def waits(self) -> Iterator[tuple[int, SequenceState, SequenceState]]:
        """Return every wait that is not over: (sealed blocks to wait for, of whom, who waits)."""
        for computing, waiters in self._waiters.items():
            for waiter, target in waiters.items():
                yield target, computing, waiter

    @property
    def num_waited_for(self) -> int:
        """Running sequences that others wait for."""
        return len(self._waiters)

    def computing(self) -> Iterator[tuple[BlockKey, SequenceState]]:
        """Return every running sequence that computes known blocks, with the next one's key."""
        for key, sequences in self._computing.items():
            for sequence in sequences:
                yield key, sequence


def _num_common(a: list[BlockKey], b: list[BlockKey], num_equal: int) -> int:
    """Return how many leading keys two chains share, of which the first `num_equal` are known to.

    A key stands for all that comes before it, so that equal keys are never behind unequal ones.
    """
    return bisect.bisect_left(
        range(min(len(a), len(b))), True, lo=num_equal, key=lambda index: a[index] != b[index]
    )
