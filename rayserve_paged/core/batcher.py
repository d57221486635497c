"""Continuous batching of one replica: which tokens are computed in the next step.

There is no prefill phase and no decode phase: computed tokens chase known tokens under a token
budget. A sequence that is one token behind decodes; one that is further behind is prefilled, in
chunks where the budget ends. The state of running sequences lives in arrays by row, the rows
being shared with every rank, so that planning a decode step touches a Python object only where a
sequence needs a block, starts or ends.
"""

import bisect
import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayserve_paged.core import policy
from rayserve_paged.core.block_table import num_blocks_for
from rayserve_paged.core.ids import BlockId, Row, StepId
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.messages import RowStart, StepPlan, StepResult, TokenLogprobs
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sequence import Phase, SequenceState

Ints = npt.NDArray[np.int32]


class Progress(NamedTuple):
    """What a finished step did for one sequence that sampled, or that failed.

    Args:
        sequence: Whose.
        token_id: The new token; None where it failed.
        logprobs: Of the new token, where asked for.
        finish: Set where this was the last token.
        error: Set where finish is ERROR.
    """

    sequence: SequenceState
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    error: str | None


class Batcher:
    """Waiting and running sequences of one replica.

    Args:
        kv: Their blocks.
        max_num_seqs: Rows.
        max_num_batched_tokens: Tokens computed in one step at most.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._next_step = StepId(0)
        self._waiting: list[tuple[tuple[int, int], SequenceState]] = []
        self._num_waiting = 0
        # Running sequences, first served first, and their rows in the same order.
        self._running: list[SequenceState] = []
        self._rows = np.zeros(0, np.int32)
        self._rows_changed = False
        self._free_rows = [Row(row) for row in reversed(range(max_num_seqs))]
        # By row: known and computed tokens, slots in the table, the last known token.
        self._known = np.zeros(max_num_seqs, np.int32)
        self._computed = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros(max_num_seqs, np.int32)
        self._last_token = np.zeros(max_num_seqs, np.int32)
        self._by_row: list[SequenceState | None] = [None] * max_num_seqs
        self._in_flight: StepPlan | None = None

    # --- what others ask ------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without one."""
        return self._num_waiting

    @property
    def in_flight(self) -> StepPlan | None:
        """The plan that is being executed."""
        return self._in_flight

    @property
    def running(self) -> tuple[SequenceState, ...]:
        """Running sequences, first served first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        """Waiting sequences, first served first."""
        live = (entry for entry in self._waiting if entry[1].phase is Phase.WAITING)
        return tuple(sequence for _key, sequence in sorted(live, key=lambda entry: entry[0]))

    def num_computed(self, sequence: SequenceState) -> int:
        """Return how many of a running sequence's tokens have their KV in its blocks."""
        assert sequence.row is not None
        return int(self._computed[sequence.row])

    def num_held_tokens(self, sequence: SequenceState) -> int:
        """Return the tokens that a running sequence's blocks hold or are being given."""
        computed = self.num_computed(sequence)
        if self._in_flight is not None:
            scheduled = np.flatnonzero(self._in_flight.rows == sequence.row)
            computed += int(self._in_flight.num_tokens[scheduled].sum())
        return computed

    # --- changes --------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence that has no row."""
        assert sequence.phase is Phase.WAITING
        heapq.heappush(self._waiting, (sequence.order_key(), sequence))
        self._num_waiting += 1

    def end(self, sequence: SequenceState, finish: FinishReason) -> None:
        """Take a sequence out before its own end. Blocks that the step in flight writes stay
        held until that step has finished.
        """
        sequence.finish = finish
        if sequence.phase is Phase.WAITING:
            # Its heap entry is dropped when it comes up.
            sequence.phase = Phase.ENDED
            self._num_waiting -= 1
        elif sequence.phase is Phase.RUNNING and not self._is_in_flight(sequence):
            self._retire(sequence)

    def plan_step(self) -> StepPlan | None:
        """Decide the next step; None where there is nothing to compute.

        Raises:
            AssertionError: A step is in flight.
        """
        assert self._in_flight is None, "one step at a time"
        num_preemptions = self.num_preemptions
        rows, num_tokens = self._schedule_running()
        append_rows, append_blocks = self._grow(rows, num_tokens)
        starts: list[RowStart] = []
        if self.num_preemptions == num_preemptions:
            # A step that had to preempt has no blocks for newcomers.
            budget = self.max_num_batched_tokens - int(num_tokens.sum())
            starts, started_tokens = self._admit(budget)
            started = np.array([start.row for start in starts], np.int32)
            rows = np.concatenate([rows, started])
            num_tokens = np.concatenate([num_tokens, np.array(started_tokens, np.int32)])
        if not len(rows):
            return None
        computed = self._computed[rows]
        plan = StepPlan(
            step_id=self._next_step,
            starts=tuple(starts),
            append_rows=np.array(append_rows, np.int32),
            append_blocks=np.array(append_blocks, np.int32),
            rows=rows,
            num_computed=computed,
            num_tokens=num_tokens,
            samples=computed + num_tokens == self._known[rows],
            token_ids=self._tokens_to_compute(rows, computed, num_tokens),
        )
        self._next_step = StepId(self._next_step + 1)
        self._in_flight = plan
        return plan

    def commit(self, result: StepResult) -> list[Progress]:
        """Take in a finished step: seal what filled, append what was sampled, end what ended.

        Returns:
            One entry for each sequence that sampled or failed and was not ended meanwhile.
        """
        plan = self._in_flight
        assert plan is not None, "no step is in flight"
        assert plan.step_id == result.step_id, "not the step in flight"
        self._in_flight = None
        self._computed[plan.rows] += plan.num_tokens
        sampled = np.cumsum(plan.samples) - 1
        progress = []
        for row, samples, index in zip(
            plan.rows.tolist(), plan.samples.tolist(), sampled.tolist(), strict=True
        ):
            sequence = self._by_row[row]
            assert sequence is not None
            failed = samples and index in result.errors
            if sequence.finish is not None:
                self._retire(sequence, discard=failed)
                continue
            if failed:
                sequence.finish = FinishReason.ERROR
                self._retire(sequence, discard=True)
                error = result.errors[index]
                progress.append(Progress(sequence, None, None, FinishReason.ERROR, error))
                continue
            self._seal(sequence)
            if samples:
                token_id = int(result.token_ids[index])
                sequence.tokens.append(token_id)
                self._known[row] += 1
                self._last_token[row] = token_id
                sequence.finish = sequence.finish_reason(token_id)
                logprobs = result.logprobs.get(index)
                progress.append(Progress(sequence, token_id, logprobs, sequence.finish, None))
                if sequence.finish is not None:
                    self._retire(sequence)
        return progress

    def preempt(self, sequence: SequenceState) -> None:
        """Take a running sequence's blocks away; it resumes by recomputing what the cache lost.

        Raises:
            AssertionError: A step is in flight.
        """
        assert self._in_flight is None, "its blocks are being written"
        self._leave_row(sequence)
        self.kv.close(sequence.table)
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def abandon(self) -> None:
        """Give up the step in flight and every sequence; the executor is gone."""
        self._in_flight = None
        for sequence in self.running:
            self._retire(sequence, discard=True)
        for sequence in self.waiting:
            self.end(sequence, FinishReason.ERROR)

    # --- planning -------------------------------------------------------------------------

    def _schedule_running(self) -> tuple[Ints, Ints]:
        """Return the running rows to compute and their token counts, preempting for blocks.

        Whoever is served last gives way, and the budget is dealt anew without it, so that a
        victim is never part of the step.
        """
        while True:
            rows, num_tokens = self._deal_budget()
            short = self._computed[rows] + num_tokens - self._slots[rows]
            num_missing = -(-short[short > 0] // self.kv.block_size)
            if int(num_missing.sum()) <= self.kv.pool.num_available:
                return rows, num_tokens
            self.preempt(self._running[-1])

    def _deal_budget(self) -> tuple[Ints, Ints]:
        """Deal the token budget: sequences one token behind first, so no prefill stalls them."""
        if self._rows_changed:
            self._rows = np.array([sequence.row for sequence in self._running], np.int32)
            self._rows_changed = False
        rows = self._rows
        pending = self._known[rows] - self._computed[rows]
        if int(pending.sum()) > self.max_num_batched_tokens:
            order = np.argsort(pending > 1, kind="stable")
            asked = pending[order]
            before = np.cumsum(asked) - asked
            dealt = np.zeros_like(pending)
            dealt[order] = np.clip(self.max_num_batched_tokens - before, 0, asked)
            rows, pending = rows[dealt > 0], dealt[dealt > 0]
        return rows, pending

    def _grow(self, rows: Ints, num_tokens: Ints) -> tuple[list[int], list[int]]:
        """Append the blocks that scheduled rows lack; they are known to be available."""
        append_rows: list[int] = []
        append_blocks: list[int] = []
        ends = self._computed[rows] + num_tokens
        for i in np.flatnonzero(ends > self._slots[rows]).tolist():
            row = int(rows[i])
            sequence = self._by_row[row]
            assert sequence is not None
            block_ids = self.kv.grow(sequence.table, int(ends[i]))
            assert block_ids is not None, "counted before"
            self._slots[row] = sequence.table.num_slots
            append_rows += [row] * len(block_ids)
            append_blocks += block_ids
        return append_rows, append_blocks

    def _admit(self, budget: int) -> tuple[list[RowStart], list[int]]:
        """Start waiting sequences in order, until one does not fit; nobody overtakes it."""
        starts: list[RowStart] = []
        num_tokens: list[int] = []
        running = np.array([sequence.row for sequence in self._running], np.int32)
        behind = -(-self._known[running] // self.kv.block_size) * self.kv.block_size
        promised = int((behind - self._slots[running]).clip(0).sum()) // self.kv.block_size
        while self._free_rows and budget > 0:
            sequence = self._first_waiting()
            if sequence is None:
                break
            known = sequence.num_known
            matched = self.kv.match(sequence.keys, known)
            needed = num_blocks_for(known, self.kv.block_size) - len(matched)
            if not policy.can_admit(
                num_blocks_needed=needed + self.kv.pool.num_cached_of(matched),
                num_blocks_available=self.kv.pool.num_available,
                num_blocks_promised=promised,
                num_running=len(self._running),
            ):
                break
            chunk = min(known - len(matched) * self.kv.block_size, budget)
            starts.append(self._start(sequence, matched, chunk))
            num_tokens.append(chunk)
            budget -= chunk
            promised += num_blocks_for(known, self.kv.block_size) - len(sequence.table.block_ids)
        return starts, num_tokens

    def _first_waiting(self) -> SequenceState | None:
        while self._waiting and self._waiting[0][1].phase is Phase.ENDED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _start(self, sequence: SequenceState, matched: list[BlockId], chunk: int) -> RowStart:
        """Move the first waiting sequence to a row, on its matched blocks and room for a chunk."""
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        num_computed = len(matched) * self.kv.block_size
        sequence.table = self.kv.open(matched)
        block_ids = self.kv.grow(sequence.table, num_computed + chunk)
        assert block_ids is not None, "admission counted them"
        row = self._free_rows.pop()
        sequence.phase = Phase.RUNNING
        sequence.row = row
        sequence.num_sealed = len(matched)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_computed
        self._by_row[row] = sequence
        self._known[row] = sequence.num_known
        self._computed[row] = num_computed
        self._slots[row] = sequence.table.num_slots
        self._last_token[row] = sequence.tokens[-1]
        bisect.insort(self._running, sequence, key=SequenceState.order_key)
        self._rows_changed = True
        return RowStart(
            row=row,
            num_computed=num_computed,
            block_ids=np.array(sequence.table.block_ids, np.int32),
            params=sequence.request.params,
            num_prompt_tokens=sequence.num_prompt,
        )

    def _tokens_to_compute(self, rows: Ints, computed: Ints, num_tokens: Ints) -> Ints:
        """Return the token ids of a step, row after row."""
        token_ids = np.empty(int(num_tokens.sum()), np.int32)
        ends = np.cumsum(num_tokens)
        decoding = computed + 1 == self._known[rows]
        token_ids[ends[decoding] - 1] = self._last_token[rows[decoding]]
        for i in np.flatnonzero(~decoding).tolist():
            sequence = self._by_row[int(rows[i])]
            assert sequence is not None
            start, end, count = int(computed[i]), int(ends[i]), int(num_tokens[i])
            token_ids[end - count : end] = sequence.tokens[start : start + count]
        return token_ids

    # --- leaving a row --------------------------------------------------------------------

    def _retire(self, sequence: SequenceState, *, discard: bool = False) -> None:
        self._leave_row(sequence)
        sequence.phase = Phase.ENDED
        if discard:
            self.kv.discard(sequence.table)
        else:
            self.kv.close(sequence.table)

    def _leave_row(self, sequence: SequenceState) -> None:
        row = sequence.row
        assert row is not None
        self._running.remove(sequence)
        self._rows_changed = True
        self._by_row[row] = None
        self._free_rows.append(row)
        sequence.row = None

    def _seal(self, sequence: SequenceState) -> None:
        """Publish the blocks that the finished step has filled."""
        row = sequence.row
        assert row is not None
        num_full = int(self._computed[row]) // self.kv.block_size
        for block_index in range(sequence.num_sealed, num_full):
            self.kv.seal(sequence.table.block_ids[block_index], sequence.key(block_index))
        sequence.num_sealed = num_full

    def _is_in_flight(self, sequence: SequenceState) -> bool:
        return self._in_flight is not None and bool((self._in_flight.rows == sequence.row).any())
