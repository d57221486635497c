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
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.config import BatchConfig, TimeoutConfig
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.holdings import Holder, HolderKind, Holdings
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId, Term
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.outbox import Outbox
from rayserve_paged.core.pins import Pins
from rayserve_paged.core.replica_messages import (
    AskInventory,
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    PinAnswered,
    PinPrefix,
    PollTokens,
    RegisterReplica,
    ReplicaCommand,
    ReplicaEvent,
    ResetCache,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
    UnpinPrefix,
)
from rayserve_paged.core.replica_reports import ReportLog
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.sequence import Phase, SequenceState, begin
from rayserve_paged.core.step_commit import Committed, Progress
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import StreamItem, StreamName
from rayserve_paged.core.waiting_queue import WaitingQueue

_FIRST_TERM = Term(0)
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
        term: Of the controller that started it.
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
        term: Term = _FIRST_TERM,
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
        self._term = term
        self._reports = ReportLog(replica_id, incarnation, self.batcher)

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaCommand]:
        """Take in one event; return what is to be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        commands: list[ReplicaCommand] = []
        was_fenced = self.fenced is not None
        self.kv.retention.advance(now)
        match event:
            # First what comes with each step.
            case StepFinished(result):
                if self.fenced is None:
                    self._advance(self.batcher.commit(result))
            case PollTokens():
                self._drop(event.unwanted)
                commands += self._outbox.poll(event, now)
            case ControllerMessage():
                commands += self._obey(event, now)
            case AssignRequest():
                self._assign(event, now)
            case CancelRequest():
                self._cancel(event)
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
        max_steps = self._max_steps
        if self._deadlines:
            self._end_late(now)
            # A deadline may come in between any two steps.
            max_steps = 1
        commands += self._outbox.flush(now)
        while self.fenced is None and self.batcher.can_plan:
            plan = self.batcher.plan_step(max_steps)
            if plan is None:
                break
            commands.append(RunStep(plan))
        if self.fenced is None:
            report = self._reports.take_due(now, is_idle=not self._sequences)
            if report is not None:
                commands.append(report)
        elif not was_fenced:
            commands.append(self._reports.last_report(self.fenced))
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
        request_id = self._deadlines.first()
        due = (
            self._outbox.next_tick,
            self._reports.next_due if self.fenced is None else None,
            None if request_id is None else self._deadlines.key(request_id)[0],
        )
        return min((at for at in due if at is not None), default=None)

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

    def holdings(self) -> Holdings:
        """Copy who holds which block as of now."""
        batcher = self.batcher
        tables: list[tuple[HolderKind, str, int | None, BlockTable]] = [
            (HolderKind.SEQUENCE, str(s.request.request_id), s.sibling, s.table)
            for s in (*batcher.running, *batcher.retiring)
        ]
        tables += [(HolderKind.PIN, str(p), None, table) for p, table in self.pins.tables.items()]
        holders = [
            Holder(kind, name, sibling, tuple(tuple(group.block_ids) for group in table.groups))
            for kind, name, sibling, table in tables
        ]
        holders += [
            Holder(HolderKind.STEP, str(number), None, (tuple(sources),))
            for number, sources in enumerate(batcher.copy_sources)
            if sources
        ]
        counts, kept = self.kv.pool.snapshot()
        return Holdings(counts, kept, tuple(holders), len(batcher.running), batcher.num_waiting)

    # --- events ---------------------------------------------------------------------------

    def _obey(self, message: ControllerMessage, now: float) -> list[ReplicaCommand]:
        """Do what the controller says, unless another one has come after it."""
        if message.term < self._term:
            return []
        commands: list[ReplicaCommand] = []
        if message.term > self._term:
            self._term = message.term
            if not isinstance(message.event, AskInventory):
                commands += self._list_all(None)
        match message.event:
            case AssignRequest():
                self._assign(message.event, now)
            case CancelRequest():
                self._cancel(message.event)
            case FenceReplica(reason):
                self._fence(reason)
            case AskInventory():
                commands += self._list_all(message.event)
            case _:
                assert_never(message.event)
        return commands

    def _list_all(self, ask: AskInventory | None) -> list[ReplicaCommand]:
        """Tell the controller all that there is; of a fenced incarnation there is its end alone."""
        if self.fenced is not None:
            return [self._reports.last_report(self.fenced)]
        requests = [next(iter(s.values())).request for s in self._sequences.values()]
        inventory = self._reports.inventory(requests, self.limits, ask)
        return [
            RegisterReplica(self.replica_id, self.incarnation, self.limits, self.scope, inventory)
        ]

    def _assign(self, event: AssignRequest, now: float) -> None:
        request = event.request
        self._outbox.meet(request.consumer_id, now)
        if self.fenced is not None:
            return  # Whoever polls learns it.
        for sequence in self._siblings(request.request_id):
            if sequence.request.attempt >= request.attempt:
                return
            # Its consumer has given the older attempt up.
            self._end(sequence, FinishReason.CANCELLED, _CANCELLED)
        self._reports.begin(request)
        going_on = {}
        root = self.scope.root(request.scope)
        for sequence in begin(request, event.prompt_keys, root, self._num_arrivals, self.limits):
            finish = sequence.ended_before
            if finish is None:
                going_on[sequence.sibling] = sequence
                continue
            # All but the notice of its end was delivered.
            item = StreamItem(sequence.name, sequence.num_outputs, (), (), 0, finish, None)
            self._outbox.put(request.consumer_id, item)
        self._num_arrivals += 1
        if not going_on:
            self._reports.finish(request)
            return
        self._sequences[request.request_id] = going_on
        if request.deadline_s is not None:
            self._deadlines.put(request.request_id, (now + request.deadline_s,))
        for sequence in going_on.values():
            self.batcher.add(sequence)

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
                self._reports.prefill(search.first.request)
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
            self._reports.prefill(sequence.request)
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

    def _forget(self, request: Request) -> None:
        """Forget a request of which nothing runs any more."""
        del self._sequences[request.request_id]
        self._deadlines.remove(request.request_id)
        self._reports.finish(request)

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

    def _drop(self, attempts: tuple[tuple[RequestId, Attempt], ...]) -> None:
        """End attempts that their consumer has accepted elsewhere, or has given up."""
        for request_id, attempt in attempts:
            self._cancel(CancelRequest(request_id, attempt))

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
        if not consumers:
            return
        gone = set(consumers)
        for sequence in self.sequences:
            if sequence.consumer_id in gone:
                self._end(sequence, FinishReason.CANCELLED, "the consumer's lease ran out")

    def _fence(self, reason: str) -> None:
        if self.fenced is not None:
            return
        self.fenced = reason
        # Their consumers go on elsewhere; what is there of their streams is still delivered.
        for sequence in self.sequences:
            if sequence.phase is not Phase.ENDED:  # With another beam of its search.
                self.batcher.end(sequence, FinishReason.ERROR, reason)
        self.batcher.abandon()
        self._sequences.clear()
        self._deadlines = KeyedHeap()
        self._outbox.fence(reason)
        self.pins.clear()

    def _pin(self, event: PinPrefix) -> PinAnswered:
        if self.fenced is not None:
            return PinAnswered(event.pin_id, 0, None)
        limits, token_ids = self.limits, event.token_ids
        root = self.scope.root(event.scope)
        keys = extend_chain(root, token_ids, limits.block_size, event.attachments)
        windows = event.scope.windows(limits.layer_groups)
        try:
            num_tokens = self.pins.pin(event.pin_id, keys, len(token_ids), windows)
        except PinLimitError as error:
            return PinAnswered(event.pin_id, 0, error)
        return PinAnswered(event.pin_id, num_tokens, None)
