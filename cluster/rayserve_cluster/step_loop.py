"""Hosts a replica's state machine: one thread owns its `handle()` and the executor."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, assert_never

from rayserve_cluster.executor import Executor
from rayserve_cluster.tp_group import GroupBrokenError
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.errors import ReplicaLostError
from rayserve_paged.core.event_log import Record
from rayserve_paged.core.holdings import Holdings
from rayserve_paged.core.ids import ConsumerId
from rayserve_paged.core.replay import recorded
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    ControllerMessage,
    FenceReplica,
    PinAnswered,
    PinPrefix,
    PollTokens,
    RegisterReplica,
    ReplicaEvent,
    ReplicaReport,
    ResetCache,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
    UnpinPrefix,
)
from rayserve_paged.core.step_messages import StepPlan
from rayserve_paged.core.stream_messages import Delivery

_T = TypeVar("_T")

_TICK_S = 0.1
_STOP_GRACE_S = 0.5
"""How long `stop` lets the step under way end by itself before it breaks the group."""

logger = logging.getLogger(__name__)

_Poll = tuple[PollTokens, Future[Delivery]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Reset:
    """The cache is to be reset, and whoever asked told that it was."""

    done: Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    """A prefix is to be pinned, and whoever asked told what became of it."""

    event: PinPrefix
    answer: Future[PinAnswered]


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    """Somebody wants to know something of the replica at the end of a step."""

    ask: Callable[[Replica], Any]
    answer: Future[Any]


_Inbound = ControllerMessage | UnpinPrefix | _Poll | _Reset | _Pin | _Question | None
"""What other threads put in: events, polls, resets, pins, questions; None to stop."""


class ReplicaHost:
    """A replica's step loop.

    Events queue while a step runs and are taken in between steps. A replica that is fenced goes
    on answering polls, so that its consumers hear why, and runs no step. Whatever unexpected is
    raised on the step thread fences the replica.

    Args:
        replica: The state machine; nobody else touches it from now on.
        executor: Runs its plans; likewise.
        on_report: Takes the replica's reports and inventories, and LoseReplica should the state
            machine itself have failed. Called on the step thread, so it only passes them on.
        heartbeat_s: Longest silence towards the other ranks.
        record: Called with each event before the replica handles it, and with the commands after.
    """

    def __init__(
        self,
        replica: Replica,
        executor: Executor,
        on_report: Callable[[ReplicaReport | RegisterReplica | LoseReplica], object],
        *,
        heartbeat_s: float,
        record: Record | None = None,
    ) -> None:
        self._replica = replica
        self._take_event = recorded(replica.replica_id, replica.handle, record)
        self._executor = executor
        self._on_report = on_report
        self._heartbeat_s = heartbeat_s
        self._inbox: queue.SimpleQueue[_Inbound] = queue.SimpleQueue()
        # Set where something came in that a plan of several steps is to be cut short for.
        self._interrupt = threading.Event()
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._stop_reason: str | None = None
        # When the step thread last went round, on the clock of time.monotonic.
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, name=f"step-{replica.replica_id}", daemon=True
        )
        # The step thread's own:
        self._polls: dict[tuple[ConsumerId, int], Future[Delivery]] = {}
        self._pinning: Future[PinAnswered] | None = None
        self._questions: list[_Question] = []
        self._plans: deque[StepPlan] = deque()
        self._next_tick = 0.0
        self._next_heartbeat = 0.0
        self._release_group = True

    # --- from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the step thread, unless the host was stopped before."""
        with self._lock:
            if self._stop_reason is None:
                self._thread.start()

    def post(self, event: ControllerMessage | UnpinPrefix) -> None:
        """Hand in an event; a host that has stopped drops it."""
        if isinstance(event, ControllerMessage) and isinstance(event.event, FenceReplica):
            # The step under way may wait for a rank that never answers.
            self._executor.abort(event.event.reason)
        self._put(event)

    def poll(self, message: PollTokens) -> Future[Delivery]:
        """Ask for a consumer's new tokens.

        Returns:
            The delivery, once there is one; raises ReplicaLostError where the host has stopped.
        """
        future: Future[Delivery] = Future()
        return self._asked((message, future), future)

    def accounting(self) -> Future[Accounting]:
        """Ask for the ledger at the end of a step; raises as `poll`."""
        future: Future[Accounting] = Future()
        return self._asked(_Question(Replica.accounting, future), future)

    def holdings(self) -> Future[Holdings]:
        """Ask who holds which block at the end of a step; raises as `poll`."""
        future: Future[Holdings] = Future()
        return self._asked(_Question(Replica.holdings, future), future)

    def reset_cache(self) -> Future[None]:
        """Forget the prefix cache; done at once or after the step under way. Raises as `poll`."""
        future: Future[None] = Future()
        return self._asked(_Reset(future), future)

    def pin_prefix(self, event: PinPrefix) -> Future[PinAnswered]:
        """Keep the cached blocks of a prefix; answered between steps. Raises as `poll`."""
        future: Future[PinAnswered] = Future()
        return self._asked(_Pin(event, future), future)

    @property
    def stalled_s(self) -> float:
        """Seconds since the step thread last took something in or finished a step.

        It goes round many times a second where there is nothing to do.
        """
        return time.monotonic() - self._moved_at if self._thread.is_alive() else 0.0

    def stop(self, reason: str) -> None:
        """Fence the replica, release the other ranks and end the step thread. Idempotent.

        Consumers whose poll is pending get their errors; blocks until the thread has ended.
        """
        with self._lock:
            if self._stop_reason is None:
                self._stop_reason = reason
                self._inbox.put(None)
                self._interrupt.set()
            has_started = self._thread.ident is not None
        if not has_started:
            self._end(reason)
            return
        self._thread.join(_STOP_GRACE_S)
        if self._thread.is_alive():
            self._executor.abort(reason)
            self._thread.join()

    def _asked(self, item: _Inbound, answer: Future[_T]) -> Future[_T]:
        """Hand in what is to be answered; the answer is the loss where the host has stopped."""
        if not self._put(item):
            answer.set_exception(self._lost_error())
        return answer

    def _put(self, item: _Inbound) -> bool:
        with self._lock:
            if self._lost is not None:
                return False
            self._inbox.put(item)
            match item:
                case (PollTokens(), _):
                    # A consumer polls again as soon as it is answered, and gets no token sooner
                    # by it than when the plan has run.
                    pass
                case _:
                    self._interrupt.set()
            return True

    def _lost_error(self) -> ReplicaLostError:
        reason = self._lost or "stopped"
        return ReplicaLostError(self._replica.replica_id, self._replica.incarnation, reason)

    # --- on the step thread -------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the step loop ended"
        try:
            while (stop_reason := self._serve_guarded()) is None:
                pass
            reason = stop_reason
        except Exception as error:  # The outermost loop: the controller hears of it from here.
            reason = f"{type(error).__name__}: {error}"
            replica = self._replica
            self._on_report(LoseReplica(replica.replica_id, replica.incarnation, reason))
        finally:
            self._end(reason)

    def _serve_guarded(self) -> str | None:
        """Serve until told to stop and return why; None where an error fenced the replica.

        Raises:
            Exception: An error that comes back although the replica is fenced, or of the fencing.
        """
        try:
            return self._serve()
        except Exception as error:  # An outermost loop too, which turns it into an event.
            logger.exception("the step loop of %s failed", self._replica.replica_id)
            if self._replica.fenced is not None:
                raise
            self._handle(FenceReplica(f"{type(error).__name__}: {error}"))
            return None

    def _serve(self) -> str:
        """Take in events and run steps until told to stop; return why."""
        while True:
            self._moved_at = time.monotonic()
            outcome: StepFinished | StepFailed | None = None
            if not self._plans:
                going_on = self._wait()
            else:
                outcome = self._run_step()
                # What came meanwhile goes first, so that the next plan knows of it.
                going_on = self._take_in()
            if not going_on:
                assert self._stop_reason is not None
                # The other ranks are let go in order, by _end.
                self._release_group = False
                self._handle(FenceReplica(self._stop_reason))
                return self._stop_reason
            now = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + _TICK_S
                self._handle(Tick())
            if outcome is not None:
                self._next_heartbeat = now + self._heartbeat_s
                self._handle(outcome)
            elif now >= self._next_heartbeat:
                self._next_heartbeat = now + self._heartbeat_s
                self._heartbeat()
            for question in self._questions:
                _answer(question.answer, question.ask(self._replica))
            self._questions = []

    def _wait(self) -> bool:
        """Wait until there is something to take in or to do; returns as `_take_in`."""
        wait_s = min(self._next_tick, self._next_heartbeat) - time.monotonic()
        try:
            item = self._inbox.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return True
        return self._dispatch(item) and self._take_in()

    def _take_in(self) -> bool:
        """Take in all that is queued; False where the host was told to stop."""
        # Before, not after: what comes in from here on may be left for the next time.
        self._interrupt.clear()
        while not self._inbox.empty():
            if not self._dispatch(self._inbox.get()):
                return False
        return True

    def _dispatch(self, item: _Inbound) -> bool:
        match item:
            case None:
                return False
            case _Question():
                self._questions.append(item)
            case _Reset(done):
                self._handle(ResetCache())
                _answer(done, None)
            case _Pin(event, answer):
                self._pinning = answer
                self._handle(event)
            case (message, future):
                key = (message.consumer_id, message.poll_id)
                if key in self._polls:
                    self._polls[key].cancel()
                self._polls[key] = future
                self._handle(message)
            case _:
                self._handle(item)
        return True

    def _handle(self, event: ReplicaEvent) -> None:
        for command in self._take_event(event, time.monotonic()):
            match command:
                case RunStep(plan):
                    self._plans.append(plan)
                case AnswerPoll(consumer_id, poll_id, delivery):
                    waiting = self._polls.pop((consumer_id, poll_id), None)
                    if waiting is not None:
                        _answer(waiting, delivery)
                case PinAnswered():
                    assert self._pinning is not None, "only pins are answered"
                    _answer(self._pinning, command)
                case ReplicaReport() | RegisterReplica():
                    self._on_report(command)
                case _:
                    assert_never(command)
        if self._replica.fenced is not None:
            self._plans.clear()
            if self._release_group:
                # No step will run any more: the other ranks must not wait for one.
                self._release_group = False
                self._executor.abort(self._replica.fenced)

    def _run_step(self) -> StepFinished | StepFailed:
        plan = self._plans.popleft()
        try:
            result = self._executor.execute(plan, self._interrupt.is_set)
            return StepFinished(result)
        except GroupBrokenError as error:
            return StepFailed(plan.step_id, str(error))

    def _heartbeat(self) -> None:
        if self._replica.fenced is not None:
            return
        try:
            self._executor.heartbeat()
        except GroupBrokenError as error:
            self._handle(FenceReplica(str(error)))

    def _end(self, reason: str) -> None:
        """Fail what still waits, and give the group back."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
        waiting: list[Future[Any]] = [*self._polls.values()]
        waiting += [question.answer for question in self._questions]
        while not self._inbox.empty():
            match self._inbox.get():
                case _Reset(done):
                    waiting.append(done)
                case _Pin(_event, answer):
                    waiting.append(answer)
                case _Question(_ask, answer):
                    waiting.append(answer)
                case (PollTokens(), future):
                    waiting.append(future)
                case _:
                    pass
        for future in waiting:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(self._lost_error())
        self._executor.shutdown()


def _answer(future: Future[_T], value: _T) -> None:
    # False where whoever asked has given up.
    if future.set_running_or_notify_cancel():
        future.set_result(value)
