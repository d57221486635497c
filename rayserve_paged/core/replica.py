"""State machine of one replica: a batcher, its blocks, and what its consumers are owed.

The shell feeds events and carries out commands. It runs one step at a time: after RunStep the
next plan is made when StepFinished comes in, whatever else arrives in between.
"""

from typing import assert_never

from rayserve_paged.core.accounting import Accounting, account
from rayserve_paged.core.batcher import Batcher, Progress
from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.config import BatchConfig, TimeoutConfig
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    PollTokens,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaReport,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
    TokenLogprobs,
)
from rayserve_paged.core.outbox import Outbox
from rayserve_paged.core.request import FinishReason, ModelLimits
from rayserve_paged.core.sequence import SequenceState

REPORT_INTERVAL_S = 0.05


class Replica:
    """One incarnation of one tensor-parallel group.

    Args:
        replica_id: Its name.
        incarnation: Its life.
        limits: What it can hold.
        scope: Identity of its KV, the root of every key.
        batch: Bounds on one step.
        timeouts: Leases of its consumers.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        incarnation: Incarnation,
        limits: ModelLimits,
        scope: BlockScope,
        batch: BatchConfig,
        timeouts: TimeoutConfig,
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.limits = limits
        self.scope = scope
        self.kv = KVManager(BlockPool(limits.num_blocks), limits.block_size)
        self.batcher = Batcher(self.kv, batch.max_num_seqs, batch.max_num_batched_tokens)
        self.fenced: str | None = None
        self._outbox = Outbox(
            replica_id, incarnation, timeouts.consumer_lease_s, timeouts.poll_timeout_s
        )
        self._sequences: dict[RequestId, SequenceState] = {}
        self._num_arrivals = 0
        self._num_reports = 0
        self._last_report = float("-inf")
        self._finished: list[tuple[RequestId, Attempt]] = []

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaCommand]:
        """Take in one event; return what is to be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        commands: list[ReplicaCommand] = []
        match event:
            case AssignRequest():
                self._assign(event, now)
            case CancelRequest(request_id, attempt):
                sequence = self._sequences.get(request_id)
                if sequence is not None and sequence.request.attempt == attempt:
                    self._end(sequence, FinishReason.CANCELLED, "cancelled by its consumer")
            case PollTokens():
                commands += self._outbox.poll(event, now)
            case StepFinished(result):
                if self.fenced is None:
                    for progress in self.batcher.commit(result):
                        self._advance(progress)
            case StepFailed(step_id, reason):
                self._fence(f"step {step_id} failed: {reason}")
            case FenceReplica(reason):
                self._fence(reason)
            case Tick():
                answers, expired = self._outbox.tick(now)
                commands += answers
                self._expire(expired)
            case _:
                assert_never(event)
        commands += self._outbox.flush(now)
        if self.fenced is None and self.batcher.in_flight is None:
            plan = self.batcher.plan_step()
            if plan is not None:
                commands.append(RunStep(plan))
        commands += self._report(now)
        return commands

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """Sequences that have not ended."""
        return tuple(self._sequences.values())

    def accounting(self) -> Accounting:
        """Return the ledger's figures as of now."""
        batcher = self.batcher
        held = [(s.table.block_ids, batcher.num_held_tokens(s)) for s in batcher.running]
        return account(held, self.kv.pool, self.limits.block_size)

    # --- events ---------------------------------------------------------------------------

    def _assign(self, event: AssignRequest, now: float) -> None:
        request = event.request
        self._outbox.meet(request.consumer_id, now)
        if self.fenced is not None:
            self._outbox.put(
                request.consumer_id,
                request.request_id,
                request.attempt,
                0,
                (),
                finish=FinishReason.ERROR,
                error=self.fenced,
            )
            return
        if request.request_id in self._sequences:
            return
        sequence = SequenceState(
            request,
            event.prompt_keys,
            self.scope.root(request.tenant_salt),
            self._num_arrivals,
            self.limits.eos_token_ids,
            self.limits.block_size,
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self.batcher.add(sequence)

    def _advance(self, progress: Progress) -> None:
        sequence, token_id, logprobs, finish, error = progress
        self._put(
            sequence,
            sequence.num_outputs - (token_id is not None),
            () if token_id is None else (token_id,),
            logprobs,
            finish,
            error,
        )

    def _end(self, sequence: SequenceState, finish: FinishReason, error: str) -> None:
        self.batcher.end(sequence, finish)
        self._put(sequence, sequence.num_outputs, (), None, finish, error)

    def _put(
        self,
        sequence: SequenceState,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
        error: str | None,
    ) -> None:
        request = sequence.request
        self._outbox.put(
            sequence.consumer_id,
            request.request_id,
            request.attempt,
            index,
            token_ids,
            logprobs,
            sequence.num_cached_tokens or 0,
            finish,
            error,
        )
        if finish is not None:
            del self._sequences[request.request_id]
            self._finished.append((request.request_id, request.attempt))

    def _expire(self, consumers: list[ConsumerId]) -> None:
        gone = set(consumers)
        for sequence in self.sequences:
            if sequence.consumer_id in gone:
                self._end(sequence, FinishReason.CANCELLED, "the consumer's lease ran out")

    def _fence(self, reason: str) -> None:
        if self.fenced is not None:
            return
        self.fenced = reason
        sequences = self.sequences
        self.batcher.abandon()
        for sequence in sequences:
            self._put(sequence, sequence.num_outputs, (), None, FinishReason.ERROR, reason)

    # --- what the controller learns -------------------------------------------------------

    def _report(self, now: float) -> list[ReplicaCommand]:
        """Report what changed: at most every REPORT_INTERVAL_S while busy, at once when idle."""
        idle = not self._sequences
        changed = bool(self._finished) or self.kv.index.has_changes
        last = self.fenced is not None and self._last_report != float("inf")
        due = now - self._last_report >= REPORT_INTERVAL_S
        if not (last or (changed and self.fenced is None and (idle or due))):
            return []
        published, evicted = self.kv.index.take_changes()
        report = ReplicaReport(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            sequence=self._num_reports,
            published=published,
            evicted=evicted,
            finished=tuple(self._finished),
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            num_free_blocks=self.kv.pool.num_free,
            num_cached_blocks=self.kv.pool.num_cached,
            fenced=self.fenced,
        )
        self._num_reports += 1
        self._finished = []
        self._last_report = float("inf") if last else now
        return [report]
