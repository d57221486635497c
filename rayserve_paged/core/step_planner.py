"""Plans a step of the running sequences: who computes what, which blocks that takes.

A batch in which all decode and nothing changes is in a *steady state*: its next plan is the last
one, one position on.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from rayserve_paged.core import policy, preemption
from rayserve_paged.core.attention_window import FULL_ATTENTION
from rayserve_paged.core.ids import BlockId, Row, StepId
from rayserve_paged.core.running_batch import Flight, RunningBatch, SteadyState
from rayserve_paged.core.scored_tokens import plan_scores
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_messages import BoolArray, IntArray, RowStart, StepPlan

_NO_INTS = np.zeros(0, np.int32)
_NO_COPIES = np.zeros((0, 3), np.int32)

Scheduled = tuple[IntArray, IntArray, BoolArray]
"""Rows, how many tokens each computes, and whether its last one samples."""


Copied = tuple[IntArray, list[BlockId]]
"""int32 [num_copies, 3] as in StepPlan, and the sources, each held once more for it."""


def add_copies(copied: Copied, more: list[tuple[BlockId, BlockId, int]]) -> Copied:
    """Return copies with further ones, whose sources are held already."""
    if not more:
        return copied
    copies = np.concatenate([copied[0], np.array(more, np.int32)])
    return copies, [*copied[1], *(source for source, _target, _num_slots in more)]


class StepPlanner:
    """Makes the plans of a running batch.

    Args:
        batch: The sequences.
        max_num_batched_tokens: Tokens computed in one step at most.
        pipelined: Whether steps are planned while others are in flight.
    """

    def __init__(
        self, batch: RunningBatch, max_num_batched_tokens: int, *, pipelined: bool
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self._batch = batch
        self._pipelined = pipelined
        # Of the plan that is made next.
        self.next_step = StepId(0)
        self._steady: SteadyState | None = None

    # --- who computes ---------------------------------------------------------------------

    def schedule(self, newcomers: Callable[[], bool]) -> Scheduled | SequenceState:
        """Deal the token budget to the running sequences.

        Args:
            newcomers: Whether to leave some of it for sequences that wait; asked where a prefill
                could take all.

        Returns:
            What is computed; or, where blocks are short, the sequence that is to give way.
        """
        batch = self._batch
        rows, num_tokens, samples = self._deal_budget(newcomers)
        short = batch.end[rows] + num_tokens - batch.slots[rows]
        num_missing = self._num_copies(rows) if batch.num_forked else 0
        if len(rows) and np.maximum.reduce(short) > 0:
            num_places = int((-(-short[short > 0] // batch.block_size)).sum())
            num_missing += num_places * batch.kv.num_layer_groups
        num_short = num_missing - batch.kv.pool.num_available
        if num_short > 0:
            fitted = self._shorten(rows, num_tokens, samples) if batch.num_windowed else None
            return preemption.who_gives_way(batch, num_short) if fitted is None else fitted
        return rows, num_tokens, samples

    def _shorten(
        self, rows: IntArray, num_tokens: IntArray, samples: BoolArray
    ) -> Scheduled | None:
        """Shorten prefills with a window, which give blocks back as they go, until all fit."""
        batch = self._batch
        num_blocks = batch.kv.pool.num_available
        if batch.num_forked:
            num_blocks -= self._num_copies(rows)
        fitted = policy.shorten_chunks(
            num_tokens,
            batch.slots[rows] - batch.end[rows],
            batch.windowed[rows],
            num_blocks // batch.kv.num_layer_groups,
            batch.block_size,
        )
        return None if fitted is None else (rows, fitted, samples & (fitted == num_tokens))

    def _deal_budget(self, newcomers: Callable[[], bool]) -> Scheduled:
        batch = self._batch
        rows = batch.rows
        if batch.flights or batch.num_beams:
            # The last token of all needs no KV.
            known = np.minimum(batch.known[rows] + batch.ahead[rows], batch.max_known[rows] - 1)
            pending = known - batch.end[rows]
            pending[batch.held_back[rows]] = 0
            rows, pending = rows[pending > 0], pending[pending > 0]
        else:
            pending = batch.known[rows] - batch.end[rows]
        num_pending = int(np.add.reduce(pending))
        shared = num_pending > len(rows) and newcomers()
        if num_pending <= self.max_num_batched_tokens and not shared:
            return rows, pending, np.ones(len(rows), np.bool_)
        dealt = policy.deal_budget(pending, self.max_num_batched_tokens, newcomers=shared)
        chosen = dealt > 0
        return rows[chosen], dealt[chosen], (dealt == pending)[chosen]

    # --- the plan -------------------------------------------------------------------------

    def plan(
        self,
        scheduled: Scheduled,
        appended: tuple[IntArray, IntArray],
        copied: Copied,
        max_steps: int,
    ) -> StepPlan:
        """Put a step in flight.

        Args:
            scheduled: At least one row; all have the blocks that they need.
            appended: What `grow` returned.
            copied: What `copy_tails` returned.
            max_steps: Steps that the plan may run.
        """
        batch = self._batch
        rows, num_tokens, samples = scheduled
        computed = batch.end[rows]
        token_ids, late = self._tokens_to_compute(rows, computed, num_tokens)
        indices, siblings, forks = self._samples(rows, samples)
        starts = self._announce(rows)
        scored, scoring = plan_scores(batch, rows, computed, num_tokens)
        num_steps, steady = 1, None
        if not starts and not forks:
            num_steps, steady = self._go_on(rows, num_tokens, indices, siblings, max_steps)
        plan = StepPlan(
            step_id=self.next_step,
            starts=starts,
            append_rows=appended[0],
            append_blocks=appended[1],
            copies=copied[0],
            rows=rows,
            num_computed=computed,
            num_tokens=num_tokens,
            token_ids=token_ids,
            late=late,
            sample_indices=indices,
            sample_siblings=siblings,
            num_steps=num_steps,
            scored=scored,
        )
        batch.end[rows] = computed + (num_tokens + (num_steps - 1))
        flight = Flight(plan, rows[indices], copied[1], forks, scoring=scoring)
        self._take_off(flight)
        self._steady = steady
        return plan

    def plan_steady(self) -> StepPlan | None:
        """Put the next step of the steady state in flight; None where it has ended."""
        batch, steady = self._batch, self._steady
        if steady is None or steady.version != batch.version or not steady.num_plans:
            return None
        rows = steady.rows
        plan = StepPlan(
            step_id=self.next_step,
            starts=(),
            append_rows=_NO_INTS,
            append_blocks=_NO_INTS,
            copies=_NO_COPIES,
            rows=rows,
            num_computed=steady.computed,
            num_tokens=steady.ones,
            # A slice gives no copy, and the array changes with the next step.
            token_ids=batch.last_token[steady.places].copy(),
            late=_NO_INTS,
            sample_indices=steady.sample_indices,
            sample_siblings=steady.siblings,
            num_steps=1,
        )
        outputs = steady.outputs
        steady.computed = steady.computed + 1
        steady.outputs = outputs + 1
        steady.num_plans -= 1
        batch.end[steady.places] = steady.computed
        self._take_off(Flight(plan, rows, [], [], steady=steady, outputs=outputs))
        return plan

    def _take_off(self, flight: Flight) -> None:
        batch, plan = self._batch, flight.plan
        batch.last_step[plan.rows] = plan.step_id
        if self._pipelined:
            flight.num_ahead = plan.num_steps
            batch.ahead[flight.sampled] += plan.num_steps
        batch.flights.append(flight)
        self.next_step = StepId(self.next_step + 1)

    def _go_on(
        self,
        rows: IntArray,
        num_tokens: IntArray,
        indices: IntArray,
        siblings: IntArray,
        max_steps: int,
    ) -> tuple[int, SteadyState | None]:
        """Return how many steps a plan of these rows runs, and what is steady after it, if any."""
        batch = self._batch
        if self._pipelined or len(rows) < len(batch.order) or len(indices) < len(rows):
            return 1, None
        # Both several times as fast as `max` and `all` for a few rows.
        if np.maximum.reduce(num_tokens) > 1 or np.count_nonzero(batch.plain[rows]) < len(rows):
            return 1, None
        # Further steps for which all have blocks, and until the first may reach its length.
        num_fitting = int(np.minimum.reduce(batch.slots[rows] - batch.end[rows])) - 1
        num_left = int(np.minimum.reduce(batch.max_known[rows] - batch.known[rows])) - 1
        if max_steps > 1:
            return 1 + min(max_steps - 1, num_fitting, num_left), None
        # The step in which one ends is not like those before.
        num_plans = min(num_fitting, num_left - 1)
        if num_plans <= 0:
            return 1, None
        return 1, self._settle(rows, indices, siblings, num_plans)

    def _settle(
        self, rows: IntArray, indices: IntArray, siblings: IntArray, num_plans: int
    ) -> SteadyState:
        """Return the steady state that begins after a plan of these rows, for so many plans."""
        batch = self._batch
        return SteadyState(
            version=batch.version,
            rows=rows,
            places=_as_index(rows),
            ones=np.ones_like(rows),
            sample_indices=indices,
            siblings=siblings,
            computed=batch.end[rows] + 1,
            outputs=batch.known[rows] + 1 - batch.num_prompt[rows],
            readers=batch.readers.of(rows),
            num_plans=num_plans,
        )

    def _announce(self, rows: IntArray) -> tuple[RowStart, ...]:
        """Tell the ranks of scheduled rows whose sequence or table they do not know."""
        batch = self._batch
        if not batch.unannounced:
            return ()
        starts = []
        for row in rows.tolist():
            if row not in batch.unannounced:
                continue
            batch.unannounced.remove(row)
            sequence = batch.sequence(row)
            starts.append(
                RowStart(
                    row=Row(row),
                    num_computed=int(batch.end[row]),
                    block_ids=self._placed_ids(sequence),
                    params=sequence.request.params,
                    num_prompt_tokens=sequence.num_prompt,
                    sibling=sequence.sibling,
                    history=self._history(sequence),
                    adapter=sequence.request.scope.adapter,
                    attachments=sequence.request.attachments,
                    window=sequence.request.scope.window or FULL_ATTENTION,
                )
            )
        return tuple(starts)

    def _placed_ids(self, sequence: SequenceState) -> IntArray:
        table = sequence.table
        if not table.has_window:
            return np.array(table.places(), np.int32)
        # Block 0 stands where one was trimmed: no mask lets it be read.
        return np.array([block_id or 0 for block_id in table.places()], np.int32)

    def _history(self, sequence: SequenceState) -> IntArray | None:
        if not sequence.request.params.needs_history:
            return None
        self._batch.sync(sequence)
        return np.array(sequence.tokens, np.int32)

    def _tokens_to_compute(
        self, rows: IntArray, computed: IntArray, num_tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the token ids of a step, row after row, and which of them are late."""
        batch = self._batch
        token_ids = batch.last_token[rows]
        known = batch.known[rows]
        late = (known == computed).nonzero()[0].astype(np.int32) if batch.flights else _NO_INTS
        behind = (known > computed + 1).nonzero()[0]
        if not len(behind):
            return token_ids, late
        ends = num_tokens.cumsum(dtype=np.int32)
        flat = np.empty(int(ends[-1]), np.int32)
        flat[ends - 1] = token_ids
        for i in behind.tolist():
            sequence = batch.sequence(int(rows[i]))
            batch.sync(sequence)
            start, end, count = int(computed[i]), int(ends[i]), int(num_tokens[i])
            flat[end - count : end] = sequence.tokens[start : start + count]
        return flat, ends[late] - 1

    def _samples(self, rows: IntArray, samples: BoolArray) -> tuple[IntArray, IntArray, list[int]]:
        """Return which row each sample is of, for which sibling, and where forks begin."""
        batch = self._batch
        indices = samples.nonzero()[0].astype(np.int32)
        sampled = rows[indices]
        siblings = batch.sibling[sampled]
        if batch.num_beams:
            # Which beams go on, and with which tokens, is decided for all at once.
            batch.held_back[sampled[batch.is_beam[sampled]]] = True
        if not batch.num_reserved_rows:
            return indices, siblings, []
        unborn = batch.num_unborn[sampled]
        batch.held_back[sampled[unborn > 0]] = True
        counts = unborn + 1
        firsts = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) - np.repeat(firsts - siblings, counts)
        indices, siblings = np.repeat(indices, counts), places.astype(np.int32)
        forks = firsts[unborn > 0]
        never_born = [
            first + sibling
            for first, row in zip(forks.tolist(), sampled[unborn > 0].tolist(), strict=True)
            for sibling in batch.sequence(row).withdrawn
            if sibling  # The first is there already, and computes the prompt.
        ]
        if never_born:
            indices, siblings = np.delete(indices, never_born), np.delete(siblings, never_born)
            forks = forks - np.searchsorted(np.sort(never_born), forks)
        return indices, siblings, forks.tolist()

    # --- blocks ---------------------------------------------------------------------------

    def grow(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Append the blocks that scheduled rows lack; they are known to be available.

        Returns:
            int32 [num_appends] rows and blocks, for ranks that know the row's table already.
        """
        batch = self._batch
        ends = batch.end[rows] + num_tokens
        short = (ends > batch.slots[rows]).nonzero()[0]
        if not len(short):
            return _NO_INTS, _NO_INTS
        growing = rows[short].tolist()
        tables = [batch.sequence(row).table for row in growing]
        appended = batch.kv.grow_all(tables, ends[short].tolist())
        assert appended is not None, "counted before"
        batch.slots[rows[short]] = -(-ends[short] // batch.block_size) * batch.block_size
        append_rows: list[int] = []
        append_blocks: list[int] = []
        for row, block_ids in zip(growing, appended, strict=True):
            if row not in batch.unannounced:
                append_rows += [row] * len(block_ids)
                append_blocks += block_ids
        return np.array(append_rows, np.int32), np.array(append_blocks, np.int32)

    def copy_tails(self, rows: IntArray) -> Copied:
        """Give forked rows that write now a tail block of their own: copy-on-write.

        Returns:
            The copies, and their sources, each held once more until the step has finished.
        """
        batch = self._batch
        if not batch.num_forked:
            return _NO_COPIES, []
        copies: list[tuple[int, int, int]] = []
        held: list[BlockId] = []
        # Backwards, so that it is the first sibling that keeps the block.
        for row in reversed(rows[batch.forked[rows]].tolist()):
            batch.unfork(row)
            place, num_slots = divmod(int(batch.end[row]), batch.block_size)
            for group, tail in enumerate(self._partial_tails(row)):
                if batch.kv.pool.count(tail) - held.count(tail) == 1:
                    continue
                replaced = batch.kv.replace(batch.sequence(row).table, place, group)
                assert replaced is not None, "counted before"
                held.append(replaced[0])
                copies.append((*replaced, num_slots))
                batch.unannounced.add(row)
        return np.array(copies, np.int32).reshape(-1, 3), held

    def _num_copies(self, rows: IntArray) -> int:
        """Return how many blocks the scheduled rows need to write apart from their siblings."""
        batch = self._batch
        writers = Counter(
            block_id
            for row in rows[batch.forked[rows]].tolist()
            for block_id in self._partial_tails(row)
        )
        # The last one to write alone may write in place.
        return sum(
            min(count, batch.kv.pool.count(block_id) - 1) for block_id, count in writers.items()
        )

    def _partial_tails(self, row: int) -> list[BlockId]:
        """Return the partly filled blocks that a row writes next, one of each layer group."""
        place, num_slots = divmod(int(self._batch.end[row]), self._batch.block_size)
        return self._batch.sequence(row).table.at(place) if num_slots else []


def _as_index(rows: IntArray) -> IntArray | slice:
    """Return what selects the same rows: a slice where each follows on the one before."""
    first = int(rows[0])
    if (rows == np.arange(first, first + len(rows), dtype=np.int32)).all():
        return slice(first, first + len(rows))
    return rows
