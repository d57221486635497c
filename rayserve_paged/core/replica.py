"""State machine of one replica: a batcher, its blocks, and what its consumers are owed.

The shell feeds events and carries out commands. It runs one step at a time: after RunStep the
next plan is made when StepFinished comes in, whatever else arrives in between.
"""

from typing import assert_never

from rayserve_paged.core.accounting import Accounting, account
from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.beam_streams import beam_items
from rayserve_paged.core.block_identity import BlockScope, extend_chain
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.config import BatchConfig, TimeoutConfig
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.outbox import Outbox
from rayserve_paged.core.pins import Pins
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    PinAnswered,
    PinPrefix,
    PollTokens,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaReport,
    ResetCache,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
    UnpinPrefix,
)
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.core.step_commit import Committed, Progress
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import StreamItem, StreamName
from rayserve_paged.core.waiting_queue import WaitingQueue

REPORT_INTERVAL_S = 0.05
_CANCELLED = "cancelled by its consumer"


class Replica:
    """One incarnation of one tensor-parallel group.

    Args:
        replica_id: Its name.
        incarnation: Its life.
        limits: What it can hold.
        scope: Identity of its KV, the root of every key.
        batch: Bounds on one step.
        timeouts: Leases of its consumers.
        partial_reuse: Whether leading slots of blocks are reused by copy.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        incarnation: Incarnation,
        limits: ModelLimits,
        scope: BlockScope,
        batch: BatchConfig,
        timeouts: TimeoutConfig,
        *,
        partial_reuse: bool = False,
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.limits = limits
        self.scope = scope
        self.kv = KVManager(
            BlockPool(limits.num_blocks),
            limits.block_size,
            partial_reuse=partial_reuse,
            num_layer_groups=len(limits.layer_groups),
        )
        self.pins = Pins(self.kv, limits.max_pinned_blocks)
        self.batcher = Batcher(
            self.kv,
            batch.max_num_seqs,
            batch.max_num_batched_tokens,
            batch.pipeline_depth,
            batch.max_prefix_wait_steps,
            WaitingQueue(self.kv, batch.policy, batch.oldest_every, batch.tenant_weights),
        )
        self._max_steps = batch.max_decode_steps
        self.fenced: str | None = None
        self._outbox = Outbox(
            replica_id, incarnation, timeouts.consumer_lease_s, timeouts.poll_timeout_s
        )
        # Live siblings of each request.
        self._sequences: dict[RequestId, dict[int, SequenceState]] = {}
        self._deadlines: KeyedHeap[RequestId] = KeyedHeap()
        self._num_arrivals = 0
        self._num_reports = 0
        self._last_report = float("-inf")
        # Requests without a token so far.
        self._prefilling: set[RequestId] = set()
        self._prefilled: list[tuple[RequestId, Attempt]] = []
        self._finished: list[tuple[RequestId, Attempt]] = []

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaCommand]:
        """Take in one event; return what is to be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        commands: list[ReplicaCommand] = []
        self.kv.retention.advance(now)
        match event:
            case AssignRequest():
                self._assign(event, now)
            case CancelRequest():
                self._cancel(event)
            case PollTokens():
                commands += self._outbox.poll(event, now)
            case StepFinished(result):
                if self.fenced is None:
                    self._advance(self.batcher.commit(result))
            case StepFailed(step_id, reason):
                self._fence(f"step {step_id} failed: {reason}")
            case FenceReplica(reason):
                self._fence(reason)
            case ResetCache():
                self.pins.clear()
                self.batcher.reset_cache()
            case PinPrefix():
                commands.append(self._pin(event))
            case UnpinPrefix(pin_id):
                self.pins.unpin(pin_id)
            case Tick():
                answers, expired = self._outbox.tick(now)
                commands += answers
                self._expire(expired)
            case _:
                assert_never(event)
        self._end_late(now)
        commands += self._outbox.flush(now)
        # A deadline may come in between any two steps.
        max_steps = 1 if self._deadlines else self._max_steps
        while self.fenced is None and self.batcher.can_plan:
            plan = self.batcher.plan_step(max_steps)
            if plan is None:
                break
            commands.append(RunStep(plan))
        commands += self._report(now)
        return commands

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """Sequences that have not ended."""
        return tuple(s for siblings in self._sequences.values() for s in siblings.values())

    @property
    def next_tick(self) -> float | None:
        """When a Tick will have something to do unless another event comes before, in seconds.

        A shell on a virtual clock ticks then; one on a real clock may as well tick regularly.
        """
        due = [] if self._outbox.next_tick is None else [self._outbox.next_tick]
        if self._has_news and self.fenced is None:
            due.append(self._last_report + REPORT_INTERVAL_S)
        if (request_id := self._deadlines.first()) is not None:
            due.append(self._deadlines.key(request_id)[0])
        return min(due, default=None)

    def _siblings(self, request_id: RequestId) -> tuple[SequenceState, ...]:
        return tuple(self._sequences.get(request_id, {}).values())

    def accounting(self) -> Accounting:
        """Return the ledger's figures as of now."""
        batcher = self.batcher
        holders = (*batcher.running, *batcher.retiring)
        held = [
            (group.block_ids, group.num_live(batcher.num_held_tokens(sequence)))
            for sequence in holders
            for group in sequence.table.groups
        ]
        names = [sequence.name for sequence in holders for _group in sequence.table.groups]
        return account(held, self.kv.pool, self.limits.block_size, self.pins.blocks, names)

    # --- events ---------------------------------------------------------------------------

    def _assign(self, event: AssignRequest, now: float) -> None:
        request = event.request
        self._outbox.meet(request.consumer_id, now)
        if self.fenced is not None:
            for sibling in range(request.params.num_siblings):
                self._put_end(request, sibling, FinishReason.ERROR, self.fenced)
            return
        if request.request_id in self._sequences:
            return
        wanted = self._begin(event)
        self._num_arrivals += 1
        for sequence in wanted:
            if (finish := sequence.ended_before) is not None:
                # All but the notice of its end was delivered.
                name, index = sequence.name, sequence.num_outputs
                self._outbox.put(
                    request.consumer_id, StreamItem(name, index, (), (), 0, finish, None)
                )
        going_on = {s.sibling: s for s in wanted if s.ended_before is None}
        if not going_on:
            self._finished.append((request.request_id, request.attempt))
            return
        self._sequences[request.request_id] = going_on
        self._prefilling.add(request.request_id)
        if request.deadline_s is not None:
            self._deadlines.put(request.request_id, (now + request.deadline_s,))
        for sequence in going_on.values():
            self.batcher.add(sequence)

    def _begin(self, event: AssignRequest) -> list[SequenceState]:
        """Return the sequences that a request begins with.

        Its samples share one until the prompt is computed; where some have outputs from attempts
        before, each goes on by itself, as after a preemption.
        """
        request = event.request
        num_siblings = request.params.num_siblings

        def begin(sibling: int, num_siblings: int, delivered: tuple[int, ...]) -> SequenceState:
            return SequenceState(
                request,
                event.prompt_keys,
                self.scope.root(request.scope),
                self._num_arrivals,
                self.limits.eos_token_ids,
                self.limits.block_size,
                num_siblings,
                self.limits.layer_groups,
                sibling,
                delivered,
            )

        if request.has_tokens:
            return [begin(one.sibling, 1, one.token_ids) for one in request.delivered]
        leader = begin(0, num_siblings, ())
        if request.delivered:
            ended = set(range(num_siblings)).difference(one.sibling for one in request.delivered)
            if leader.beam is not None:
                leader.beam.withdrawn |= ended
            else:
                leader.withdrawn = frozenset(ended)
        return [leader]

    def _advance(self, committed: Committed) -> None:
        for child in committed.born:
            siblings = self._sequences[child.request.request_id]
            siblings[child.sibling] = child
            leader = siblings.get(0)
            if leader is not None and leader.finish is FinishReason.CANCELLED:
                # It was withdrawn, and has done its part.
                del siblings[0]
        for search in committed.beams:
            if search.finish is not None:
                self._tell_beams(search)
            else:
                live = {sequence.sibling: sequence for sequence in search.sequences}
                self._sequences[search.first.request.request_id] = live
                self._note_prefilled(search.first.request)
        for news in committed.news:
            if isinstance(news, Progress):
                self._tell(news)
            else:
                self._outbox.put(*news)

    def _end(self, sequence: SequenceState, finish: FinishReason, error: str | None) -> None:
        """End a sequence from outside, and all beams of its search with it."""
        if sequence.phase is Phase.ENDED:
            return  # With another beam of its search.
        self.batcher.end(sequence, finish, error)
        if sequence.beam is not None:
            self._tell_beams(sequence.beam)
            return
        self._tell(Progress(sequence, sequence.num_outputs, None, None, finish, error))

    def _tell_beams(self, search: BeamGroup) -> None:
        """Give all streams of a search that has ended what they get."""
        request = search.first.request
        for item in beam_items(search):
            self._outbox.put(request.consumer_id, item)
        self._forget(request)

    def _tell(self, progress: Progress) -> None:
        sequence, index, token_id, logprobs, finish, error = progress
        if token_id is not None:
            self._note_prefilled(sequence.request)
        if sequence.sibling not in sequence.withdrawn:
            item = StreamItem(
                sequence.name,
                index,
                () if token_id is None else (token_id,),
                () if logprobs is None else (logprobs,),
                sequence.num_cached_tokens or 0,
                finish,
                error,
                self._prompt_logprobs(progress),
            )
            self._outbox.put(sequence.consumer_id, item)
        if finish is None:
            return
        request = sequence.request
        # Siblings that are not born yet end with the one that was to be forked.
        for sibling in range(1, sequence.num_unborn + 1):
            if sibling not in sequence.withdrawn:
                self._put_end(request, sibling, finish, error)
        siblings = self._sequences[request.request_id]
        del siblings[sequence.sibling]
        if not siblings:
            self._forget(request)

    def _note_prefilled(self, request: Request) -> None:
        if request.request_id in self._prefilling:
            self._prefilling.remove(request.request_id)
            self._prefilled.append((request.request_id, request.attempt))

    def _forget(self, request: Request) -> None:
        """Forget a request of which nothing runs any more."""
        del self._sequences[request.request_id]
        self._prefilling.discard(request.request_id)
        self._deadlines.remove(request.request_id)
        self._finished.append((request.request_id, request.attempt))

    def _prompt_logprobs(self, progress: Progress) -> tuple[TokenLogprobs, ...]:
        """What goes with the first token of the first sample that is told, and with no other."""
        scores = progress.sequence.scores
        if scores is None or progress.token_id is None:
            return ()
        return scores.take()

    def _put_end(
        self, request: Request, sibling: int, finish: FinishReason, error: str | None
    ) -> None:
        """Tell the end of a sample that has had no token."""
        name = StreamName(request.request_id, request.attempt, sibling)
        self._outbox.put(request.consumer_id, StreamItem(name, 0, (), (), 0, finish, error))

    def _cancel(self, event: CancelRequest) -> None:
        for sequence in self._siblings(event.request_id):
            if sequence.request.attempt != event.attempt:
                continue
            if sequence.beam is not None and event.sibling is not None:
                self._withdraw_output(sequence, sequence.beam, event.sibling)
                return
            if event.sibling is not None and sequence.num_unborn:
                self._withdraw(sequence, event.sibling)
            elif event.sibling in (None, sequence.sibling):
                self._end(sequence, FinishReason.CANCELLED, _CANCELLED)

    def _withdraw(self, leader: SequenceState, sibling: int) -> None:
        """Cancel one of the samples that are still one sequence; the last ends it."""
        if sibling in leader.withdrawn or not 0 <= sibling <= leader.num_unborn:
            return
        if len(leader.withdrawn) == leader.num_unborn:
            self._end(leader, FinishReason.CANCELLED, _CANCELLED)
            return
        self._put_end(leader.request, sibling, FinishReason.CANCELLED, _CANCELLED)
        self.batcher.withdraw(leader, sibling)

    def _withdraw_output(self, beam: SequenceState, search: BeamGroup, rank: int) -> None:
        """Cancel one of the outputs of a search, which the others need; the last ends it."""
        request = beam.request
        if rank in search.withdrawn or not 0 <= rank < request.params.n:
            return
        if len(search.withdrawn) == request.params.n - 1:
            self._end(beam, FinishReason.CANCELLED, _CANCELLED)
            return
        self._put_end(request, rank, FinishReason.CANCELLED, _CANCELLED)
        search.withdrawn.add(rank)

    def _end_late(self, now: float) -> None:
        """End the requests whose deadline has come."""
        late = self._deadlines
        while (request_id := late.first()) is not None and late.key(request_id)[0] <= now:
            for sequence in self._siblings(request_id):
                self._end(sequence, FinishReason.DEADLINE, None)

    def _expire(self, consumers: list[ConsumerId]) -> None:
        gone = set(consumers)
        for sequence in self.sequences:
            if sequence.consumer_id in gone:
                self._end(sequence, FinishReason.CANCELLED, "the consumer's lease ran out")

    def _fence(self, reason: str) -> None:
        if self.fenced is not None:
            return
        self.fenced = reason
        for sequence in self.sequences:
            self._end(sequence, FinishReason.ERROR, reason)
        self.batcher.abandon()
        self.pins.clear()

    def _pin(self, event: PinPrefix) -> PinAnswered:
        limits, token_ids = self.limits, event.token_ids
        root = self.scope.root(event.scope)
        keys = extend_chain(root, token_ids, limits.block_size, event.attachments)
        windows = event.scope.windows(limits.layer_groups)
        try:
            num_tokens = self.pins.pin(event.pin_id, keys, len(token_ids), windows)
        except PinLimitError as error:
            return PinAnswered(event.pin_id, 0, error)
        return PinAnswered(event.pin_id, num_tokens, None)

    # --- what the controller learns -------------------------------------------------------

    @property
    def _has_news(self) -> bool:
        return bool(self._finished or self._prefilled) or self.kv.index.has_changes

    def _report(self, now: float) -> list[ReplicaCommand]:
        """Report what changed: at most every REPORT_INTERVAL_S while busy, at once when idle."""
        idle = not self._sequences
        changed = self._has_news
        last = self.fenced is not None and self._last_report != float("inf")
        due = now >= self._last_report + REPORT_INTERVAL_S
        if not (last or (changed and self.fenced is None and (idle or due))):
            return []
        published, evicted = self.kv.index.take_changes()
        report = ReplicaReport(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            sequence=self._num_reports,
            published=published,
            evicted=evicted,
            prefilled=tuple(self._prefilled),
            finished=tuple(self._finished),
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            num_free_blocks=self.kv.pool.num_free,
            num_cached_blocks=self.kv.pool.num_cached,
            num_queried_tokens=self.batcher.num_queried_tokens,
            num_hit_tokens=self.batcher.num_hit_tokens,
            num_resumed_tokens=self.batcher.num_resumed_tokens,
            fenced=self.fenced,
        )
        self._num_reports += 1
        self._prefilled = []
        self._finished = []
        self._last_report = float("inf") if last else now
        return [report]
