"""The shell of one replica in the tests: a toy rank, readers, and a clock that is set by hand."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from rayserve_paged.core import invariants
from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_identity import Adapter, BlockScope, RequestScope, extend_chain
from rayserve_paged.core.config import BatchConfig, QueuePolicy, TimeoutConfig
from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import Placed
from rayserve_paged.core.directory import Directory
from rayserve_paged.core.event_log import ReplicaStart
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
)
from rayserve_paged.core.replay import new_replica
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    AssignRequest,
    CancelRequest,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaReport,
    RunStep,
    StepFinished,
    Tick,
)
from rayserve_paged.core.request import FinishReason, ModelLimits, Request, admit
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_messages import StepPlan, StepResult, TokenLogprobs
from rayserve_paged.core.stream_messages import StreamName, TokenRun
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.fingerprint_rank import FingerprintRank

R0 = ReplicaId("r0")
TIMEOUTS = TimeoutConfig(consumer_lease_s=10.0, poll_timeout_s=2.0)


def make_limits(
    num_blocks: int = 16,
    block_size: int = 4,
    vocab_size: int = 97,
    max_model_len: int = 4096,
    eos_token_ids: tuple[int, ...] = (),
    max_num_seqs: int = 64,
    layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP,
) -> ModelLimits:
    return ModelLimits(
        vocab_size,
        max_model_len,
        num_blocks,
        block_size,
        eos_token_ids,
        max_num_seqs,
        # The toy rank makes numbers of whatever it is given.
        adapters=None,
        takes_attachments=True,
        layer_groups=layer_groups,
    )


def make_scope(block_size: int = 4) -> BlockScope:
    return BlockScope(b"toy", "fp32", "fp32", "exact", "absolute", block_size)


def make_request(
    prompt: Sequence[int],
    max_tokens: int | None = 4,
    *,
    request_id: str = "q0",
    consumer_id: str = "c0",
    attempt: int = 0,
    priority: int = 0,
    scope: RequestScope | None = None,
    tenant_salt: str | None = None,
    adapter: Adapter | None = None,
    attachments: tuple[Attachment, ...] = (),
    window: int | None = None,
    num_sink_tokens: int = 0,
    retention: tuple[RetentionRange, ...] = (),
    tenant: str | None = None,
    quota: TenantQuota | None = None,
    **params: float | str | tuple[int, ...] | None,
) -> Request:
    fields = {"temperature": 0.0, "seed": 0} | params
    limited = (window, num_sink_tokens) != (None, 0)
    attention = AttentionWindow(window, num_sink_tokens) if limited else None
    return Request(
        request_id=RequestId(request_id),
        consumer_id=ConsumerId(consumer_id),
        attempt=Attempt(attempt),
        prompt_token_ids=TokenIds.of(prompt),
        params=SamplingParams(max_tokens=max_tokens, **fields),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        priority=priority,
        scope=RequestScope(tenant_salt, adapter, attention) if scope is None else scope,
        attachments=attachments,
        retention=retention,
        tenant=tenant,
        quota=quota,
    )


def make_report(
    replica_id: ReplicaId,
    *finished: Request,
    incarnation: int = 0,
    sequence: int = 0,
    published: Iterable[BlockKey] = (),
    evicted: Iterable[BlockKey] = (),
    prefilled: Iterable[Request] = (),
    fenced: str | None = None,
) -> ReplicaReport:
    """A report to the controller, of a replica whose figures nobody looks at."""
    return ReplicaReport(
        replica_id=replica_id,
        incarnation=Incarnation(incarnation),
        sequence=sequence,
        published=tuple(published),
        evicted=tuple(evicted),
        prefilled=tuple((request.request_id, request.attempt) for request in prefilled),
        finished=tuple((request.request_id, request.attempt) for request in finished),
        num_running=0,
        num_waiting=0,
        num_free_blocks=0,
        num_cached_blocks=0,
        num_queried_tokens=0,
        num_hit_tokens=0,
        num_resumed_tokens=0,
        fenced=fenced,
    )


def depths(directory: Directory, keys: Sequence[BlockKey], num_slots: int) -> list[int]:
    """How many leading keys each replica holds."""
    found = [0] * num_slots
    for depth, slots in directory.match(keys):
        for slot in slots.tolist():
            found[slot] = depth
    return found


def prompt_keys(request: Request, scope: BlockScope) -> tuple[BlockKey, ...]:
    root = scope.root(request.scope)
    tokens, attachments = request.prompt_token_ids, request.attachments
    return tuple(extend_chain(root, tokens, scope.block_size, attachments))


@dataclasses.dataclass
class Stream:
    """What a reader got of one request."""

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Reader:
    """A consumer, and the streams that it has read."""

    def __init__(self, consumer_id: str) -> None:
        self.consumer = Consumer(ConsumerId(consumer_id))
        self.streams: dict[RequestId, Stream] = {}
        # Of further samples of one request.
        self.siblings: dict[tuple[RequestId, int], Stream] = {}

    def open(self, request: Request, now: float = 0.0) -> Stream:
        self.consumer.open(request, now)
        stream = self.streams[request.request_id] = Stream()
        for sibling in range(1, request.params.num_siblings):
            self.siblings[request.request_id, sibling] = Stream()
        return stream

    def stream(self, request: Request, sibling: int) -> Stream:
        if sibling == 0:
            return self.streams[request.request_id]
        return self.siblings[request.request_id, sibling]

    def accept(self, updates: list[StreamUpdate]) -> None:
        for update in updates:
            stream = self.streams[update.request_id]
            if update.sibling:
                stream = self.siblings[update.request_id, update.sibling]
            assert stream.finish is None, "an update after the last one"
            stream.token_ids += update.token_ids
            stream.finish, stream.error = update.finish, update.error
            stream.num_cached_tokens = update.num_cached_tokens
            if update.prompt_logprobs:
                assert not stream.prompt_logprobs, "the prompt's log-probabilities came twice"
                stream.prompt_logprobs = update.prompt_logprobs


def check_told_once(answer: AnswerPoll) -> None:
    """A reader drops what it has; that must not hide an answer that says a thing twice."""
    told: list[tuple[StreamName, int]] = []
    for item in answer.delivery.items:
        if isinstance(item, TokenRun):
            for name, first in zip(item.names, item.indices.tolist(), strict=True):
                told += [(name, first + step) for step in range(len(item.token_ids))]
        else:
            told.append((item.name, item.index))
    assert len(set(told)) == len(told), f"an answer tells a token twice: {told}"


class ReplicaDriver:
    """Carries out what a replica asks for, and checks its invariants after each event.

    Args:
        limits: Of the replica and its rank.
        max_num_seqs: Rows.
        max_num_batched_tokens: Budget of a step.
        poison: Draws that raise, as FingerprintRank takes them.
        incarnation: Of the replica.
        replica_id: Of the replica.
        pipeline_depth: Steps in flight.
        max_decode_steps: Steps of one plan.
        max_prefix_wait_steps: Steps that a request waits for a prefix in flight.
        partial_reuse: Whether leading slots are copied.
        policy: Of the waiting queue.
        oldest_every: Its bound.
    """

    def __init__(
        self,
        limits: ModelLimits,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        poison: Iterable[tuple[int, ...]] = (),
        incarnation: int = 0,
        replica_id: ReplicaId = R0,
        pipeline_depth: int = 1,
        max_decode_steps: int = 1,
        max_prefix_wait_steps: int = 64,
        partial_reuse: bool = False,
        policy: QueuePolicy = "priority",
        oldest_every: int | None = None,
    ) -> None:
        limits = dataclasses.replace(limits, max_num_seqs=max_num_seqs)
        self.limits = limits
        self.scope = make_scope(limits.block_size)
        batch = BatchConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            max_decode_steps=max_decode_steps,
            max_prefix_wait_steps=max_prefix_wait_steps,
            policy=policy,
            oldest_every=oldest_every,
        )
        self.incarnation = Incarnation(incarnation)
        self.start = ReplicaStart(
            replica_id=replica_id,
            incarnation=self.incarnation,
            limits=limits,
            scope=self.scope,
            batch=batch,
            timeouts=TIMEOUTS,
            partial_reuse=partial_reuse,
        )
        self.replica = new_replica(self.start)
        self.rank = FingerprintRank(limits, poison)
        self.now = 0.0
        self.plans: deque[StepPlan] = deque()
        self.answers: list[AnswerPoll] = []
        # Those that were read last.
        self.last_answers: list[AnswerPoll] = []
        self.reports: list[ReplicaReport] = []
        self.readers: dict[ConsumerId, Reader] = {}

    @property
    def plan(self) -> StepPlan | None:
        """The step in flight that finishes last."""
        return self.plans[-1] if self.plans else None

    # --- events ---------------------------------------------------------------------------

    def send(self, event: ReplicaEvent) -> list[ReplicaCommand]:
        if isinstance(event, CancelRequest):
            # Whoever asked for it must know, or takes the end for a loss.
            for reader in self.readers.values():
                if reader.consumer.attempt(event.request_id) == event.attempt:
                    reader.consumer.cancel(event.request_id, event.sibling, self.now)
        commands = self.replica.handle(event, self.now)
        invariants.check(self.replica)
        for command in commands:
            match command:
                case RunStep(plan):
                    self.plans.append(plan)
                case AnswerPoll():
                    check_told_once(command)
                    self.answers.append(command)
                case ReplicaReport():
                    self.reports.append(command)
        return commands

    def reader(self, consumer_id: str = "c0") -> Reader:
        return self.readers.setdefault(ConsumerId(consumer_id), Reader(consumer_id))

    def submit(self, request: Request) -> Stream:
        """Open a request at its reader and assign it here."""
        reader = self.reader(request.consumer_id)
        stream = reader.open(request)
        admitted = admit(request, self.limits)
        max_tokens = admitted.params.max_tokens
        assert max_tokens is not None
        placed = Placed(
            request.request_id,
            request.attempt,
            self.replica.replica_id,
            self.incarnation,
            max_tokens,
        )
        assert reader.consumer.placed(placed, self.now) == []
        self.send(AssignRequest(admitted, prompt_keys(admitted, self.scope)))
        return stream

    def cancel(self, request: Request) -> None:
        self.send(CancelRequest(request.request_id, request.attempt))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    # --- steps ----------------------------------------------------------------------------

    def execute(self) -> StepResult:
        """Run the oldest step in flight on the rank, and do not report it yet."""
        return self.rank.run(self.plans.popleft())

    def finish(self, result: StepResult) -> None:
        """Report a step that was executed."""
        self.send(StepFinished(result))

    def step(self) -> bool:
        """Finish the oldest step in flight; False where there is none."""
        if not self.plans:
            return False
        self.finish(self.execute())
        return True

    def run(self, max_steps: int = 5000) -> int:
        """Step until the replica is idle, and read all streams; return the number of steps."""
        num_steps = 0
        while self.step():
            num_steps += 1
            assert num_steps < max_steps, "no progress"
        assert not self.replica.batcher.waiting, "idle while a request waits"
        for consumer_id in self.readers:
            self.poll(consumer_id)
        return num_steps

    def generate(self, *requests: Request) -> list[Stream]:
        """Submit requests together and run them to their ends."""
        streams = [self.submit(request) for request in requests]
        self.run()
        return streams

    # --- readers --------------------------------------------------------------------------

    def poll(self, consumer_id: str = "c0", *, lose_answers: bool = False) -> None:
        """Poll as a consumer; answers that are not lost are read by whom they are for."""
        consumer = self.reader(consumer_id).consumer
        self.send(consumer.poll(self.replica.replica_id, self.incarnation, self.now))
        self.read_answers(lose=lose_answers)

    def read_answers(self, *, lose: bool = False) -> None:
        answers, self.answers = self.answers, []
        self.last_answers = answers
        for answer in answers:
            if not lose:
                reader = self.reader(answer.consumer_id)
                reader.accept(reader.consumer.deliver(answer.delivery, self.now))

    # --- what tests look at ---------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """FREE and CACHED blocks."""
        return self.replica.kv.pool.num_available

    def keys(self, request: Request) -> tuple[BlockKey, ...]:
        """Keys of the full blocks of a request's prompt."""
        return prompt_keys(request, self.scope)

    def goes_on(self, request: Request) -> bool:
        """Whether a request goes on as its next attempt, since this replica gave it up."""
        consumer = self.reader(request.consumer_id).consumer
        return consumer.attempt(request.request_id) == request.attempt + 1

    def sequence(self, request: Request) -> SequenceState:
        (found,) = [s for s in self.replica.sequences if s.request.request_id == request.request_id]
        return found

    def sequence_of(self, request: Request, sibling: int) -> SequenceState:
        """Return one of the samples of a request, which is born."""
        (found,) = [
            s
            for s in self.replica.sequences
            if (s.request.request_id, s.sibling) == (request.request_id, sibling)
        ]
        return found
