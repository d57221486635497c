"""Continuous batching of one replica: which tokens are computed in the next step.

There is no prefill phase and no decode phase: computed tokens chase known tokens under a token
budget. A sequence that is one token behind decodes; one that is further behind is prefilled, in
chunks where the budget ends. Planning and committing a step work on arrays (`running_batch`) and
touch a Python object only where a sequence needs a block, starts, ends or is forked.

Up to `pipeline_depth` steps are in flight: the next is planned on what the one before it will
have done. A sequence that ends meanwhile leaves a ghost in the step already planned: its result
is dropped, and its blocks stay held until that step has finished.
"""

import numpy as np

from rayserve_paged.core import preemption
from rayserve_paged.core.admission import Admission, Candidate
from rayserve_paged.core.beam_commit import end_beams, preempt_beams, reserve_rows
from rayserve_paged.core.ids import BlockId, Row
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.prefix_match import Prefix
from rayserve_paged.core.prefix_wait import PrefixWaits
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.running_batch import RunningBatch
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.core.step_commit import Committed, Progress, StepCommit
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.core.step_planner import Scheduled, StepPlanner, add_copies
from rayserve_paged.core.waiting_queue import WaitingQueue


class Batcher:
    """Waiting and running sequences of one replica.

    Args:
        kv: Their blocks.
        max_num_seqs: Rows.
        max_num_batched_tokens: Tokens computed in one step at most.
        pipeline_depth: Steps in flight at most.
        max_prefix_wait_steps: Steps that a sequence waits for blocks that another one computes.
        queue: Those that wait; by priority where None.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pipeline_depth: int = 1,
        max_prefix_wait_steps: int = 0,
        queue: WaitingQueue | None = None,
    ) -> None:
        self.kv = kv
        self.queue = WaitingQueue(kv) if queue is None else queue
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pipeline_depth = pipeline_depth
        self.num_preemptions = 0
        # Over the batcher's life: prompt tokens looked up in the prefix cache, once per request
        # that starts; those found; and tokens found by sequences that resume.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_resumed_tokens = 0
        self._batch = RunningBatch(kv, max_num_seqs, max_prefix_wait_steps)
        self._planner = StepPlanner(
            self._batch, max_num_batched_tokens, pipelined=pipeline_depth > 1
        )
        self._admission = Admission(self._batch, self.queue)

    # --- what others ask ------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that are scheduled."""
        return len(self._batch.order)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self.queue) + len(self.prefix_waits.parked)

    @property
    def num_open_slots(self) -> int:
        """Slots that sequences hold and no token is in or on its way to; forks that share their
        last block each count the same ones of it.
        """
        batch = self._batch
        rows = batch.rows
        if batch.retiring:
            retiring = [sequence.row for sequence, _discard in batch.retiring]
            rows = np.concatenate([rows, np.array(retiring, np.int32)])
        num_open = int(batch.slots[rows].sum()) - int(batch.end[rows].sum())
        return num_open * self.kv.num_layer_groups

    @property
    def num_reserved_rows(self) -> int:
        """Rows kept free for siblings that are not born yet, and for beams."""
        return self._batch.num_reserved_rows

    @property
    def can_plan(self) -> bool:
        """Whether another step may be put in flight."""
        return len(self._batch.flights) < self.pipeline_depth

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Plans that are being executed, oldest first."""
        return tuple(flight.plan for flight in self._batch.flights)

    @property
    def running(self) -> tuple[SequenceState, ...]:
        """Sequences that are scheduled, first served first."""
        for sequence in self._batch.order:
            self._batch.sync(sequence)
        return tuple(self._batch.order)

    @property
    def retiring(self) -> tuple[SequenceState, ...]:
        """Sequences that have ended and whose blocks a step in flight still writes."""
        return tuple(sequence for sequence, _discard in self._batch.retiring)

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        """Waiting sequences, first served first; those behind the queue wait for a prefix."""
        return (*self.queue.in_order, *self.prefix_waits.parked)

    @property
    def prefix_waits(self) -> PrefixWaits:
        """Which waiting sequences wait for blocks that a running one computes."""
        return self._batch.prefix_waits

    @property
    def copy_sources(self) -> list[list[BlockId]]:
        """Blocks that each step in flight holds for its copies."""
        return [flight.held for flight in self._batch.flights]

    def num_computed(self, sequence: SequenceState) -> int:
        """Return how many tokens of a sequence with a row have their KV in its blocks."""
        assert sequence.row is not None
        return int(self._batch.computed[sequence.row])

    def is_scoring(self, sequence: SequenceState) -> bool:
        """Return whether prompt tokens of a sequence with a row are to be scored by later plans."""
        return sequence.row in self._batch.scoring

    def num_held_tokens(self, sequence: SequenceState) -> int:
        """Return the tokens that the blocks of a sequence with a row hold or are being given."""
        assert sequence.row is not None
        return int(self._batch.end[sequence.row])

    # --- changes --------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence that has no row."""
        assert sequence.phase is Phase.WAITING
        self.queue.add(sequence)

    def end(self, sequence: SequenceState, finish: FinishReason, error: str | None = None) -> None:
        """Take a sequence out before its own end, and all beams of its search with it. Blocks that
        a step in flight writes stay held until that step has finished.
        """
        if sequence.beam is not None:
            if all(beam.phase is Phase.WAITING for beam in sequence.together):
                self.prefix_waits.remove(sequence.beam.first)
                self.queue.remove(sequence.beam.first)
            end_beams(self._batch, sequence.beam, finish, error)
            self.queue.settle(sequence.beam.first)
            return
        sequence.finish = finish
        if sequence.phase is Phase.WAITING:
            sequence.phase = Phase.ENDED
            self.prefix_waits.remove(sequence)
            self.queue.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self._batch.retire(sequence)
        self.queue.settle(sequence)

    def withdraw(self, leader: SequenceState, sibling: int) -> None:
        """Let one sample of a sequence that is yet to be forked never be born.

        Where it is the leader's own, the leader goes on until the others are.
        """
        leader.withdrawn |= {sibling}
        self.queue.forgive(leader)

    def preempt(self, sequence: SequenceState) -> None:
        """Take a running sequence's blocks away; it resumes by recomputing what the cache lost.

        Beams give way together: a lone one could stand still.

        Raises:
            AssertionError: A step in flight writes its blocks.
        """
        self.num_preemptions += 1
        if sequence.beam is not None:
            preempt_beams(self._batch, sequence.beam)
            self.add(sequence.beam.first)
            return
        self._batch.preempt(sequence)
        self.add(sequence)

    def reset_cache(self) -> None:
        """Match nothing any more that sequences have computed, or will on the blocks they have."""
        self.kv.reset()
        for sequence in self._batch.order:
            self.prefix_waits.leave(sequence)

    def plan_step(self, max_steps: int = 1) -> StepPlan | None:
        """Decide the next step.

        Args:
            max_steps: Decode up to so many steps at once, where nothing can come in between.

        Returns:
            The plan; None where there is nothing to compute, or not before a step in flight has
            finished.

        Raises:
            AssertionError: Too many steps are in flight.
        """
        assert self.can_plan, "too many steps in flight"
        if not self.num_waiting and max_steps == 1:
            plan = self._planner.plan_steady()
            if plan is not None:
                return plan
        for sequence in self.prefix_waits.take_due(self._planner.next_step):
            self.queue.add(sequence)
        if not self._make_way():
            return None
        num_preemptions = self.num_preemptions
        while True:
            scheduled = self._planner.schedule(self._can_admit_first)
            if not isinstance(scheduled, SequenceState):
                break
            # Whoever is served last gives way, and the budget is dealt anew without it, so that
            # a victim is never part of the step.
            in_flight = any(
                s.row is not None and self._batch.is_in_flight(s) for s in scheduled.together
            )
            if in_flight or self._may_release():
                return None
            self.preempt(scheduled)
        copied = self._planner.copy_tails(scheduled[0])
        appended = self._planner.grow(scheduled[0], scheduled[1])
        if self.queue and self.num_preemptions == num_preemptions:
            # A step that had to preempt has no blocks for newcomers.
            scheduled, copies = self._admit(scheduled)
            copied = add_copies(copied, copies)
        if not len(scheduled[0]):
            return None
        if self.num_waiting or self.pipeline_depth > 1:
            max_steps = 1
        return self._planner.plan(scheduled, appended, copied, max_steps)

    def commit(self, result: StepResult) -> Committed:
        """Take in the result of the oldest plan in flight."""
        assert self._batch.flights, "no step is in flight"
        flight = self._batch.flights.popleft()
        assert flight.plan.step_id == result.step_id, "not the oldest step in flight"
        committed = StepCommit(self._batch, flight, result).run()
        for news in committed.news:
            if isinstance(news, Progress) and news.finish is not None:
                self.queue.settle(news.sequence)
        for search in committed.beams:
            if search.finish is not None:
                self.queue.settle(search.first)
        return committed

    def abandon(self) -> None:
        """Give up the steps in flight, of which nothing more is heard; all sequences have ended.

        Raises:
            AssertionError: A sequence has not.
        """
        assert not self.num_running + self.num_waiting, "sequences have not ended"
        while self._batch.flights:
            self.kv.pool.release_each(self._batch.flights.popleft().held)
        self._batch.free_retired()

    # --- starting -------------------------------------------------------------------------

    def _admit(self, scheduled: Scheduled) -> tuple[Scheduled, list[tuple[BlockId, BlockId, int]]]:
        """Start waiting sequences in order, until one does not fit; nobody overtakes it.

        Returns:
            What is computed, and which slots are copied: source, target, how many.
        """
        rows, num_tokens, samples = scheduled
        budget = self.max_num_batched_tokens - int(num_tokens.sum())
        promised = self._admission.num_blocks_promised()
        started: list[tuple[int, int, bool]] = []
        copies: list[tuple[BlockId, BlockId, int]] = []
        while budget > 0:
            others_run = bool(len(rows) or started or self._batch.flights)
            candidate = self._admission.next_candidate(
                self._planner.next_step, promised, others_run=others_run
            )
            if candidate is None or candidate.prefix is None:
                break
            sequence, prefix = candidate.sequence, candidate.prefix
            pending = sequence.num_known - self.kv.num_tokens_of(prefix)
            chunk = min(pending, budget)
            if sequence.table.has_window:
                chunk = min(chunk, self._admission.num_tokens_to_spare(sequence, prefix, promised))
            row = self._start(sequence, prefix, chunk)
            if prefix.partial is not None:
                targets = sequence.table.at(sequence.num_sealed)
                for source, target in zip(prefix.partial.block_ids, targets, strict=True):
                    copies.append((source, target, prefix.partial.num_tokens))
            started.append((row, chunk, chunk == pending))
            budget -= chunk
            promised += sequence.table.num_growing(sequence.num_known)
            if sequence.beam is not None:
                promised += sequence.beam.num_blocks_to_enter
        if not started:
            return scheduled, copies
        new_rows, chunks, sampling = zip(*started, strict=True)
        scheduled = (
            np.concatenate([rows, np.array(new_rows, np.int32)]),
            np.concatenate([num_tokens, np.array(chunks, np.int32)]),
            np.concatenate([samples, np.array(sampling, np.bool_)]),
        )
        return scheduled, copies

    def _can_admit_first(self) -> bool:
        candidate = self._first_to_start()
        return candidate is not None and candidate.prefix is not None

    def _first_to_start(self) -> Candidate | None:
        promised = self._admission.num_blocks_promised()
        return self._admission.next_candidate(self._planner.next_step, promised, others_run=True)

    def _may_release(self) -> bool:
        """Return whether the steps in flight may let go of blocks behind a window."""
        return bool(self._batch.flights and self._batch.num_windowed)

    def _make_way(self) -> bool:
        """Preempt for the first that waits whoever is less urgent and in its way.

        Returns:
            Whether a step can be planned; False where a step in flight writes a victim's blocks.
        """
        batch, first = self._batch, self.queue.first()
        if first is None or not preemption.is_urgent(batch, first):
            return True
        urgent = self._first_to_start()
        if urgent is None or urgent.prefix is not None:
            return True
        # Another one than before where that stepped aside for a prefix.
        if not preemption.is_urgent(batch, urgent.sequence):
            return True
        victims = preemption.who_makes_way(batch, self._admission, urgent)
        if any(map(batch.is_in_flight, victims)):
            return False
        for victim in victims:
            if victim.phase is Phase.RUNNING:  # Not gone with another beam of its search.
                self.preempt(victim)
        return True

    def _start(self, sequence: SequenceState, prefix: Prefix, chunk: int) -> Row:
        """Move the first waiting sequence to a row, on its cached prefix and room for a chunk."""
        self.queue.start(sequence)
        num_computed = self.kv.num_tokens_of(prefix)
        resumes = sequence.num_cached_tokens is not None
        sequence.table = self.kv.open(
            prefix.places,
            prefix.partial,
            sequence.windows,
            resumes=resumes or sequence.num_delivered > 0,
            retention=sequence.retention,
        )
        block_ids = self.kv.grow(sequence.table, num_computed + chunk)
        assert block_ids is not None, "admission counted them"
        sequence.num_sealed = len(prefix.places) // self.kv.num_layer_groups
        if not resumes:
            sequence.num_cached_tokens = min(num_computed, sequence.num_prompt)
        if resumes or sequence.num_delivered:
            self.num_resumed_tokens += num_computed
        else:
            self.num_queried_tokens += sequence.num_prompt
            self.num_hit_tokens += num_computed
        row = self._batch.enter(sequence, num_computed)
        if sequence.beam is not None:
            reserve_rows(self._batch, sequence.beam)
        return row
