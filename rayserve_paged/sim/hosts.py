"""What hosts the state machines of a simulated cluster: each on its node, messages in and out.

The hosts do what the step loop, the consumer's loop and the controller's actor do on a real
cluster. They decide nothing: what happens is up to the state machines of the core.
"""

from collections.abc import Callable
from typing import assert_never

from rayserve_paged.core.consumer import Consumer, StreamUpdate
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    ControllerEvent,
    Placed,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.event_log import CONTROLLER, Record
from rayserve_paged.core.ids import Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replay import recorded
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    AssignRequest,
    CancelRequest,
    FenceReplica,
    PinAnswered,
    PollTokens,
    ReplicaEvent,
    ReplicaReport,
    RunStep,
    StepFinished,
    Tick,
)
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.step_messages import StepResult
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.sim.cost_model import CostModel
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.executor import SimulatedExecutor
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.machine import Machine
from rayserve_paged.sim.network import Network, NodeId, message_bytes
from rayserve_paged.sim.report import OpenRequest, RequestLog

Watch = Callable[[StreamUpdate, float], None]
Source = tuple[ReplicaId, Incarnation]


class ReplicaHost:
    """A replica on the node of its first rank. `has_changed` is set by whatever happens to it.

    Args:
        engine: The clock.
        network: Carries its messages.
        node: Where it is.
        index: Its place among the replicas.
        replica: The state machine.
        cost: Of its steps.
        gaps: Takes the time from token to token.
        machine: As `SimulatedExecutor`.
        record: Takes its event log.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        node: NodeId,
        index: int,
        replica: Replica,
        cost: CostModel,
        gaps: LogHistogram,
        machine: Machine | None,
        record: Record | None,
    ) -> None:
        self.node = node
        self.index = index
        self.replica = replica
        self.source: Source = (replica.replica_id, replica.incarnation)
        limits = replica.limits
        self.executor = SimulatedExecutor(
            engine, cost, limits.max_num_seqs, limits.vocab_size, self._finish, gaps, machine
        )
        self.controller: ControllerHost | None = None
        self.consumers: dict[str, ConsumerHost] = {}
        self.is_stopped = False
        self.has_changed = False
        self._engine = engine
        self._network = network
        self._take_event = recorded(replica.replica_id, replica.handle, record)
        self._tick_at: float | None = None

    def take(self, event: ReplicaEvent) -> None:
        """Take in a message that has come."""
        if self.is_stopped:
            return
        if isinstance(event, AssignRequest | CancelRequest | FenceReplica):
            self.executor.interrupt()
        self._handle(event)

    def stop(self) -> None:
        """End the ranks, and with them the replica."""
        self.is_stopped = True
        self.executor.stop()

    def _finish(self, result: StepResult) -> None:
        self._handle(StepFinished(result))

    def _handle(self, event: ReplicaEvent) -> None:
        now = self._engine.now
        for command in self._take_event(event, now):
            match command:
                case RunStep(plan):
                    self.executor.run(plan)
                case AnswerPoll(consumer_id, _poll_id, delivery):
                    consumer = self.consumers[consumer_id]
                    size = message_bytes(command)
                    self._network.send(
                        self.node, consumer.node, size, consumer.take_delivery, self, delivery
                    )
                case PinAnswered():
                    pass  # Nothing pins here.
                case ReplicaReport():
                    controller = self.controller
                    assert controller is not None, "hosts are wired before they run"
                    size = message_bytes(command)
                    self._network.send(self.node, controller.node, size, controller.take, command)
                case _:
                    assert_never(command)
        self.has_changed = True
        self._plan_tick()

    def _plan_tick(self) -> None:
        """See to it that the replica is ticked when that has something to do, and only then."""
        due = self.replica.next_tick
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self._engine.at(due, self._tick, due)

    def _tick(self, planned_for: float) -> None:
        if self._tick_at != planned_for or self.is_stopped:
            return  # An earlier one was planned since.
        self._tick_at = None
        due = self.replica.next_tick
        if due is not None and due <= self._engine.now:
            self._handle(Tick())
        else:
            self._plan_tick()


class ConsumerHost:
    """A consumer, such as an ingress process: submits requests and polls who serves them.

    Args:
        engine: The clock.
        network: Carries its messages.
        node: Where it is.
        consumer: The state machine.
        controller: Whom it submits to.
        replicas: Whom it polls.
        log: Takes requests that have ended.
        watch: Called with each update of a stream as it is accepted, and the time.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        node: NodeId,
        consumer: Consumer,
        controller: "ControllerHost",
        replicas: dict[Source, ReplicaHost],
        log: RequestLog,
        watch: Watch | None,
    ) -> None:
        self.node = node
        self.consumer = consumer
        self._engine = engine
        self._network = network
        self._controller = controller
        self._replicas = replicas
        self._log = log
        self._watch = watch
        self._open: dict[RequestId, OpenRequest] = {}
        # Whom a poll is under way to or pending at.
        self._polled: set[Source] = set()

    def submit(self, request: Request, number: int) -> None:
        """Open a request and submit it."""
        num_prompt_tokens = len(request.prompt_token_ids)
        self._open[request.request_id] = OpenRequest(number, self._engine.now, num_prompt_tokens)
        self.consumer.open(request)
        message = SubmitRequest(request)
        controller = self._controller
        self._network.send(
            self.node, controller.node, message_bytes(message), controller.take, message
        )

    def cancel(self, request_id: RequestId) -> None:
        """Ask for the end of a request; its stream then ends as cancelled."""
        attempt = self.consumer.attempt(request_id)
        if attempt is not None:
            message = WithdrawRequest(request_id, attempt)
            controller = self._controller
            self._network.send(
                self.node, controller.node, message_bytes(message), controller.take, message
            )

    def take(self, message: Placed | Rejected | ReplicaLost) -> None:
        """Take in what the controller has to say."""
        match message:
            case Placed(request_id, _attempt, replica_id, incarnation):
                opened = self._open.get(request_id)
                if opened is not None:
                    opened.replica = self._replicas[replica_id, incarnation].index
                self._hand_out(self.consumer.placed(message))
                self._listen((replica_id, incarnation))
            case Rejected(request_id, _attempt, error):
                self.consumer.abandon(request_id)
                self._end(request_id, FinishReason.ERROR, str(error))
            case ReplicaLost(replica_id, incarnation):
                self._polled.discard((replica_id, incarnation))
                self._hand_out(self.consumer.lose([message]))
            case _:
                assert_never(message)

    def take_delivery(self, sender: ReplicaHost, delivery: Delivery) -> None:
        """Take in the answer to a poll, and poll again where more is to come."""
        self._polled.discard(sender.source)
        self._hand_out(self.consumer.deliver(delivery))
        self._listen(sender.source)

    def _listen(self, source: Source) -> None:
        """Keep one poll at a replica that serves an open request."""
        if source in self._polled or source not in self.consumer.serving():
            return
        self._polled.add(source)
        host = self._replicas[source]
        message: PollTokens = self.consumer.poll(*source)
        self._network.send(self.node, host.node, message_bytes(message), host.take, message)

    def _hand_out(self, updates: list[StreamUpdate]) -> None:
        now = self._engine.now
        for update in updates:
            if self._watch is not None:
                self._watch(update, now)
            opened = self._open[update.request_id]
            if update.token_ids:
                if opened.first_token_s is None:
                    opened.first_token_s = now
                opened.num_output_tokens += len(update.token_ids)
            opened.num_cached_tokens = update.num_cached_tokens
            if update.finish is not None:
                self._end(update.request_id, update.finish, update.error)

    def _end(self, request_id: RequestId, finish: FinishReason, error: str | None) -> None:
        opened = self._open.pop(request_id)
        if error is not None:
            self._log.errors[opened.number] = error
        self._log.add(opened, self._engine.now, finish)


class ControllerHost:
    """The controller on a node of its own.

    Args:
        engine: The clock.
        network: Carries its messages.
        node: Where it is.
        controller: The state machine.
        record: Takes its event log.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        node: NodeId,
        controller: Controller,
        record: Record | None,
    ) -> None:
        self.node = node
        self.controller = controller
        self.replicas: dict[Source, ReplicaHost] = {}
        self.consumers: dict[str, ConsumerHost] = {}
        self._engine = engine
        self._network = network
        self._take_event = recorded(CONTROLLER, controller.handle, record)

    def take(self, event: ControllerEvent) -> None:
        """Take in a message that has come."""
        commands = self._take_event(event, self._engine.now)
        for command in commands:
            match command:
                case SendToReplica(replica_id, incarnation, sent):
                    host = self.replicas[replica_id, incarnation]
                    self._network.send(self.node, host.node, message_bytes(sent), host.take, sent)
                case Placed() | Rejected():
                    assert isinstance(event, SubmitRequest), "an answer to a submission"
                    self._tell(event.request.consumer_id, command)
                case ReplicaLost(consumers=consumers):
                    for consumer_id in consumers:
                        self._tell(consumer_id, command)
                case StopReplica(replica_id, incarnation):
                    self.replicas[replica_id, incarnation].stop()
                case TakeDown():
                    for host in self.replicas.values():
                        host.stop()
                case _:
                    assert_never(command)

    def _tell(self, consumer_id: str, message: Placed | Rejected | ReplicaLost) -> None:
        consumer = self.consumers[consumer_id]
        size = message_bytes(message)
        self._network.send(self.node, consumer.node, size, consumer.take, message)
