"""The step loop: events in, steps out, and what its consumers hear when something breaks."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest
from deliveries import unfold

from rayserve_cluster.step_loop import ReplicaHost
from rayserve_cluster.tp_group import GroupBrokenError
from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.config import BatchConfig, TimeoutConfig
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.errors import LedgerError, PinLimitError, ReplicaLostError
from rayserve_paged.core.event_log import (
    LogEntry,
    LoggedCommands,
    LoggedStart,
    ReplicaStart,
    read_lines,
    to_line,
)
from rayserve_paged.core.ids import (
    Attempt,
    ConsumerId,
    Incarnation,
    PinId,
    ReplicaId,
    RequestId,
    Term,
)
from rayserve_paged.core.replay import new_replica, replay
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    PinPrefix,
    PollTokens,
    RegisterReplica,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaReport,
    RunStep,
    StepFinished,
    UnpinPrefix,
)
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.core.stream_messages import Delivery, StreamItem
from rayserve_paged.core.token_ids import TokenIds

_LONG_S = 60.0
CONSUMER = ConsumerId("reader")
LIMITS = ModelLimits(1000, 64, 32, 4, (), 8)
SCOPE = BlockScope(b"model", "fp32", "fp32", "default", "from 0", 4)


class CountingExecutor:
    """Answers each row with how many tokens it has; `on_execute` may interfere first."""

    def __init__(self, on_execute: Callable[[StepPlan], None] | None = None) -> None:
        self.on_execute = on_execute
        self.plans: list[StepPlan] = []
        self.threads: set[str] = set()
        self.num_heartbeats = 0
        self.heartbeat = self._count_heartbeat
        self.aborted = threading.Event()
        self.abort_reasons: list[str] = []
        self.num_shutdowns = 0

    def execute(self, plan: StepPlan, interrupted: Callable[[], bool]) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.plans.append(plan)
        self.interrupted = interrupted
        if self.on_execute is not None:
            self.on_execute(plan)
        lengths = (plan.num_computed + plan.num_tokens)[plan.sample_indices]
        return StepResult(plan.step_id, lengths.astype(np.int32)[None], {}, {})

    def _count_heartbeat(self) -> None:
        self.num_heartbeats += 1

    def abort(self, reason: str) -> None:
        self.abort_reasons.append(reason)
        self.aborted.set()

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class Stage:
    """A replica in its step loop, and its reports."""

    def __init__(self, executor: CountingExecutor, replica: Replica | None = None) -> None:
        self.executor = executor
        self.reports: list[ReplicaReport | RegisterReplica | LoseReplica] = []
        self.log: list[LogEntry] = []
        self.host = ReplicaHost(
            new_replica(START) if replica is None else replica,
            executor,
            self.reports.append,
            heartbeat_s=0.02,
            record=self.log.append,
        )
        self._ack = 0
        self._poll_id = 0

    def poll(self) -> Delivery:
        self._poll_id += 1
        delivery = self.host.poll(PollTokens(CONSUMER, self._poll_id, self._ack)).result(_LONG_S)
        self._ack = delivery.sequence
        return delivery

    def read_to_end(self, *request_ids: str) -> dict[str, tuple[list[int], StreamItem]]:
        """Poll until these requests have ended: their tokens and last items."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        last: dict[str, StreamItem] = {}
        while len(last) < len(request_ids):
            for item in unfold(self.poll()):
                request_id = item.name.request_id
                assert item.index == len(tokens[request_id])
                tokens[request_id] += item.token_ids
                if item.finish is not None:
                    last[request_id] = item
        return {request_id: (tokens[request_id], last[request_id]) for request_id in request_ids}

    def read_to_fence(self) -> tuple[list[int], str]:
        """Poll until the replica says that it has ended: all tokens before, and why."""
        tokens: list[int] = []
        while True:
            delivery = self.poll()
            tokens += [token for item in unfold(delivery) for token in item.token_ids]
            if delivery.fenced is not None:
                return tokens, delivery.fenced


def wait_for(event: threading.Event) -> None:
    assert event.wait(_LONG_S)


START = ReplicaStart(
    replica_id=ReplicaId("r0"),
    incarnation=Incarnation(2),
    limits=LIMITS,
    scope=SCOPE,
    batch=BatchConfig(max_num_seqs=4, max_num_batched_tokens=8),
    timeouts=TimeoutConfig(consumer_lease_s=_LONG_S, poll_timeout_s=0.05),
)


def request(name: str, num_prompt: int = 3, max_tokens: int = 5) -> ControllerMessage:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = tuple(range(num_prompt))
    submitted = Request(
        request_id=RequestId(name),
        consumer_id=CONSUMER,
        attempt=Attempt(0),
        prompt_token_ids=TokenIds.of(prompt),
        params=params,
    )
    return ControllerMessage(Term(0), AssignRequest(submitted, ()))


Start = Callable[..., Stage]


@pytest.fixture
def start() -> Iterator[Start]:
    stages: list[Stage] = []

    def start_stage(
        executor: CountingExecutor | None = None, replica: Replica | None = None
    ) -> Stage:
        stages.append(Stage(CountingExecutor() if executor is None else executor, replica))
        stages[-1].host.start()
        return stages[-1]

    yield start_stage
    for stage in stages:
        stage.host.stop("the test is over")


def test_requests_are_served_to_their_end_on_one_thread(start: Start) -> None:
    stage = start()
    stage.host.post(request("a"))
    stage.host.post(request("b", num_prompt=10, max_tokens=3))
    ended = stage.read_to_end("a", "b")
    assert ended["a"][0] == [3, 4, 5, 6, 7]
    assert ended["b"][0] == [10, 11, 12]
    assert {item.finish for _, item in ended.values()} == {FinishReason.LENGTH}
    assert stage.executor.threads == {"step-r0"}


def test_a_poll_cuts_no_plan_short_and_a_request_does(start: Start) -> None:
    posted = threading.Event()
    seen: list[bool] = []

    def look(plan: StepPlan) -> None:
        wait_for(posted)
        if plan.step_id == 1:
            for put in (
                lambda: None,
                lambda: stage.host.poll(PollTokens(ConsumerId("other"), 1, 0)),
                lambda: stage.host.post(request("b")),
            ):
                put()
                seen.append(stage.executor.interrupted())

    stage = start(CountingExecutor(look))
    stage.host.post(request("a"))
    posted.set()
    stage.read_to_end("a", "b")
    assert seen == [False, False, True]


def test_a_poll_with_nothing_to_say_is_answered_empty_after_its_timeout(start: Start) -> None:
    assert start().poll().items == ()


def test_a_newer_poll_of_a_consumer_answers_the_older_one(start: Start) -> None:
    stage = start()
    first = stage.host.poll(PollTokens(CONSUMER, 1, 0))
    second = stage.host.poll(PollTokens(CONSUMER, 2, 0))
    assert first.result(_LONG_S).items == second.result(_LONG_S).items == ()


def test_a_poll_id_used_twice_cancels_the_older_poll_and_harms_nobody(start: Start) -> None:
    gate = threading.Event()
    stage = start(CountingExecutor(lambda plan: wait_for(gate)))
    stage.host.post(request("a"))
    first = stage.host.poll(PollTokens(CONSUMER, 1, 0))
    second = stage.host.poll(PollTokens(CONSUMER, 1, 0))
    gate.set()
    with pytest.raises(CancelledError):
        first.result(_LONG_S)
    second.result(_LONG_S)
    tokens = stage.read_to_end("a")["a"][0]
    assert tokens == [3, 4, 5, 6, 7]


def test_what_a_cancelled_poll_would_have_carried_comes_with_the_next(start: Start) -> None:
    gate = threading.Event()
    stage = start(CountingExecutor(lambda plan: wait_for(gate)))
    stage.host.post(request("a"))
    assert stage.host.poll(PollTokens(CONSUMER, 1000, 0)).cancel()
    gate.set()
    assert stage.read_to_end("a")["a"][0] == [3, 4, 5, 6, 7]


def test_events_are_taken_in_between_steps(start: Start) -> None:
    inside, gate = threading.Event(), threading.Event()

    def wait_in_step_1(plan: StepPlan) -> None:
        if plan.step_id == 1:
            inside.set()
            wait_for(gate)

    stage = start(CountingExecutor(wait_in_step_1))
    stage.host.post(request("a", max_tokens=50))
    wait_for(inside)
    stage.host.post(ControllerMessage(Term(0), CancelRequest(RequestId("a"), Attempt(0))))
    gate.set()
    _, last = stage.read_to_end("a")["a"]
    assert last.finish is FinishReason.CANCELLED
    assert len(stage.executor.plans) == 2


def test_the_ledger_is_taken_between_steps_and_adds_up(start: Start) -> None:
    stage = start()
    stage.host.post(request("a", num_prompt=9, max_tokens=1))
    stage.read_to_end("a")
    ledger = stage.host.accounting().result(_LONG_S)
    assert (ledger.num_free_blocks, ledger.num_cached_blocks, ledger.num_held_blocks) == (30, 2, 0)


def test_the_cache_is_reset_between_steps_and_not_by_a_host_that_has_stopped(start: Start) -> None:
    stage = start()
    stage.host.post(request("a", num_prompt=9, max_tokens=1))
    stage.read_to_end("a")
    stage.host.reset_cache().result(_LONG_S)
    ledger = stage.host.accounting().result(_LONG_S)
    assert (ledger.num_free_blocks, ledger.num_cached_blocks) == (32, 0)
    stage.host.stop("over")
    with pytest.raises(ReplicaLostError, match="over"):
        stage.host.reset_cache().result(_LONG_S)


def test_a_pin_is_answered_between_steps_and_not_by_a_host_that_has_stopped(start: Start) -> None:
    stage = start()
    assigned = request("a", num_prompt=9, max_tokens=1)
    stage.host.post(assigned)
    stage.read_to_end("a")
    event = PinPrefix(PinId("p"), TokenIds.of(range(9)))
    answer = stage.host.pin_prefix(event).result(_LONG_S)
    # This replica lets nothing be pinned.
    assert (answer.num_tokens, str(answer.refused)) == (0, str(PinLimitError("p", 2, 0, 0)))
    stage.host.post(UnpinPrefix(PinId("p")))
    assert stage.host.accounting().result(_LONG_S).num_pinned_blocks == 0
    stage.host.stop("over")
    with pytest.raises(ReplicaLostError, match="over"):
        stage.host.pin_prefix(event).result(_LONG_S)


def test_an_idle_loop_sends_heartbeats(start: Start) -> None:
    stage = start()
    while stage.executor.num_heartbeats < 3:
        assert stage.poll().items == ()


BROKEN = "step 0 failed: the tensor-parallel group broke at rank 1: its peer is gone"


def broken(_plan: StepPlan) -> None:
    raise GroupBrokenError(1, "its peer is gone")


def test_a_broken_group_fences_the_replica_and_polls_go_on(start: Start) -> None:
    stage = start(CountingExecutor(broken))
    stage.host.post(request("a"))
    assert stage.read_to_fence() == ([], BROKEN)
    # Fenced: no step runs any more, and who comes late hears the same.
    stage.host.post(request("b"))
    assert stage.read_to_fence() == ([], BROKEN)
    assert len(stage.executor.plans) == 1
    (report,) = stage.reports
    assert isinstance(report, ReplicaReport)
    assert report.fenced == BROKEN
    assert stage.executor.abort_reasons == [BROKEN]


def test_a_heartbeat_that_finds_the_group_broken_fences_the_replica(start: Start) -> None:
    def fail() -> None:
        raise GroupBrokenError(0, "its peer is gone")

    executor = CountingExecutor()
    executor.heartbeat = fail
    stage = start(executor)
    wait_for(executor.aborted)
    stage.host.post(request("a"))
    reason = "the tensor-parallel group broke at rank 0: its peer is gone"
    assert stage.read_to_fence() == ([], reason)
    assert executor.plans == []


def test_an_unexpected_error_fences_the_replica_and_never_hangs_a_consumer(start: Start) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise MemoryError("no room")

    stage = start(CountingExecutor(fail))
    stage.host.post(request("a"))
    assert stage.read_to_fence() == ([3, 4], "MemoryError: no room")
    wait_for(stage.executor.aborted)  # After the polls were answered.
    assert stage.executor.abort_reasons == ["MemoryError: no room"]


class BrittleReplica(Replica):
    """Its ledger breaks when a step has finished, and every event after that."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(
            replica.replica_id,
            replica.incarnation,
            LIMITS,
            SCOPE,
            BatchConfig(),
            TimeoutConfig(),
        )
        self.is_broken = False

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaCommand]:
        self.is_broken |= isinstance(event, StepFinished)
        if self.is_broken:
            raise LedgerError("a block is lost")
        return super().handle(event, now)


def test_a_state_machine_that_cannot_be_fenced_is_reported_lost(start: Start) -> None:
    stage = start(replica=BrittleReplica(new_replica(START)))
    pending = stage.host.poll(PollTokens(CONSUMER, 1, 0))
    stage.host.post(request("a"))
    with pytest.raises(ReplicaLostError, match="LedgerError: a block is lost"):
        pending.result(_LONG_S)
    with pytest.raises(ReplicaLostError, match="LedgerError: a block is lost"):
        stage.host.accounting().result(_LONG_S)
    with pytest.raises(ReplicaLostError, match="LedgerError: a block is lost"):
        stage.host.holdings().result(_LONG_S)
    stage.host.stop("the step thread has ended by itself")
    assert stage.reports == [
        LoseReplica(ReplicaId("r0"), Incarnation(2), "LedgerError: a block is lost")
    ]
    assert stage.executor.num_shutdowns == 1


def test_stop_while_idle_lets_the_other_ranks_go_in_order(start: Start) -> None:
    stage = start()
    stage.poll()
    stage.host.stop("enough")
    stage.host.stop("again")
    assert (stage.executor.num_shutdowns, stage.executor.abort_reasons) == (1, [])
    with pytest.raises(ReplicaLostError, match=r"replica r0 \(incarnation 2\) is lost: enough"):
        stage.poll()


def hanging_executor() -> tuple[CountingExecutor, threading.Event]:
    """An executor whose steps end when they are aborted, and what is set inside a step."""
    executor, inside = CountingExecutor(), threading.Event()

    def hang(_plan: StepPlan) -> None:
        inside.set()
        wait_for(executor.aborted)
        raise GroupBrokenError(0, executor.abort_reasons[0])

    executor.on_execute = hang
    return executor, inside


def test_stop_breaks_a_step_that_does_not_end_and_fails_what_waits(start: Start) -> None:
    executor, inside = hanging_executor()
    stage = start(executor)
    pending = stage.host.poll(PollTokens(CONSUMER, 1, 0))
    stage.host.post(request("a"))
    wait_for(inside)
    stage.host.stop("enough")
    delivery = pending.result(_LONG_S)
    # The stop is taken in before the step's outcome.
    assert (delivery.items, delivery.fenced) == ((), "enough")
    assert stage.executor.num_shutdowns == 1


def test_a_fence_from_outside_breaks_a_step_that_does_not_end(start: Start) -> None:
    executor, inside = hanging_executor()
    stage = start(executor)
    stage.host.post(request("a"))
    wait_for(inside)
    stage.host.post(ControllerMessage(Term(0), FenceReplica("rank 1 is silent")))
    _tokens, reason = stage.read_to_fence()
    assert reason.endswith("rank 1 is silent")


def test_a_host_that_never_started_can_be_stopped() -> None:
    stage = Stage(CountingExecutor())
    waiting = (stage.host.accounting(), stage.host.holdings())
    stage.host.stop("not needed")
    for future in waiting:
        with pytest.raises(ReplicaLostError, match="not needed"):
            future.result(_LONG_S)
    assert stage.executor.num_shutdowns == 1


def test_a_host_that_was_stopped_does_not_start() -> None:
    stage = Stage(CountingExecutor())
    stage.host.stop("not needed")
    stage.host.start()
    stage.host.stop("not needed")
    assert stage.executor.num_shutdowns == 1


def test_the_recorded_events_replay_to_the_same_plans(start: Start) -> None:
    stage = start()
    for index in range(6):
        stage.host.post(request(f"q{index}", num_prompt=3 + index))
    stage.read_to_end(*(f"q{index}" for index in range(6)))
    stage.host.stop("enough")
    lines = [to_line(entry) for entry in [LoggedStart("r0", START), *stage.log]]
    entries = list(read_lines(lines))
    assert replay(entries).difference is None
    answered = [entry.commands for entry in entries if isinstance(entry, LoggedCommands)]
    plans = [c.plan for commands in answered for c in commands if isinstance(c, RunStep)]
    assert len(plans) == len(stage.executor.plans) > 6
    for mine, theirs in zip(plans, stage.executor.plans, strict=True):
        assert mine.step_id == theirs.step_id
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
