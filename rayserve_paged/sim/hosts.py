"""What hosts the state machines of a simulated cluster: each on its node, messages in and out.

The hosts do what the step loop, the consumer's loop and the controller's actor do on a real
cluster. They decide nothing: what happens is up to the state machines of the core.
"""

from collections.abc import Callable
from typing import assert_never

from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    ControllerEvent,
    FoundReplica,
    Placed,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StartReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
)
from rayserve_paged.core.event_log import CONTROLLER, Record
from rayserve_paged.core.ids import ConsumerId
from rayserve_paged.core.open_request import Source
from rayserve_paged.core.replay import recorded
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    ControllerMessage,
    FenceReplica,
    PinAnswered,
    PollTokens,
    RegisterReplica,
    ReplicaEvent,
    ReplicaReport,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
)
from rayserve_paged.core.step_messages import StepResult
from rayserve_paged.sim.consumer_host import ConsumerHost
from rayserve_paged.sim.cost_model import CostModel
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.executor import Ranks, SimulatedExecutor, Unfinished
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.machine import Machine
from rayserve_paged.sim.network import Network, NodeId, message_bytes
from rayserve_paged.sim.report import Totals
from rayserve_paged.sim.step_ratios import StepRatios


def machine_name(source: Source) -> str:
    """Return the name of a life in an event log: that of its replica, and which one it is where it
    is not the first. One that is cut off goes on beside the next.
    """
    replica_id, incarnation = source
    return f"{replica_id}.{incarnation}" if incarnation else replica_id


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
        before: The life before it; None for the first.
        ranks: As `SimulatedExecutor`.
        unfinished: As `SimulatedExecutor`.
        ratios: As `SimulatedExecutor`.
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
        before: "ReplicaHost | None",
        ranks: Ranks | None = None,
        unfinished: Unfinished | None = None,
        ratios: StepRatios | None = None,
    ) -> None:
        self.node = node
        self.index = index
        self.replica = replica
        self.source: Source = (replica.replica_id, replica.incarnation)
        limits = replica.limits
        self.executor = SimulatedExecutor(
            engine,
            cost,
            limits.max_num_seqs,
            limits.vocab_size,
            self._finish,
            gaps,
            machine,
            ranks,
            unfinished,
            ratios,
        )
        self.controller: ControllerHost | None = None
        self.consumers: dict[str, ConsumerHost] = {}
        # Why it has ended; None while it lives.
        self.stopped: str | None = None
        self.has_changed = False
        self._engine = engine
        self._network = network
        self._take_event = recorded(machine_name(self.source), replica.handle, record)
        self._tick_at: float | None = None
        # Polls that are pending.
        self._polls: dict[ConsumerId, int] = {}
        self._is_silent = False
        self._before = before

    @property
    def can_be_found(self) -> bool:
        """Whether its processes are there, as far as can be seen from elsewhere."""
        return self.stopped is None or self._is_silent

    @property
    def totals(self) -> Totals:
        """What it and the lives before it did; one that is cut off still does more."""
        executor, batcher = self.executor, self.replica.batcher
        before = Totals() if self._before is None else self._before.totals
        return Totals(
            before.num_plans + executor.num_plans,
            before.num_steps + executor.num_steps,
            before.busy_s + executor.busy_s,
            before.num_queried_tokens + batcher.num_queried_tokens,
            before.num_hit_tokens + batcher.num_hit_tokens,
            before.num_preemptions + batcher.num_preemptions,
            before.num_computed_tokens + executor.num_computed_tokens,
        )

    def take(self, event: ReplicaEvent) -> None:
        """Take in a message that has come."""
        if isinstance(event, PollTokens):
            self._polls[event.consumer_id] = event.poll_id
        if self.stopped is not None:
            self._break_connections()
            return
        if isinstance(event, ControllerMessage):
            self.executor.interrupt()
        self._handle(event)

    def register(self) -> None:
        """Tell the controller that the replica is ready."""
        replica = self.replica
        self._tell(RegisterReplica(*self.source, replica.limits, replica.scope))

    def stop(self, reason: str, *, silent: bool = False) -> None:
        """End the ranks, and with them the replica.

        Args:
            reason: For whoever polls it.
            silent: Its processes hang, or are cut off: no connection breaks.
        """
        if self.stopped is None:
            self.executor.end_steps()
            self.stopped = reason
            self._is_silent = silent
        elif not silent:
            self._is_silent = False
        self.has_changed = True
        self.executor.stop()
        self._break_connections()

    def break_group(self, reason: str) -> None:
        """End the ranks behind the first one, which finds its step failing, or its next heartbeat.

        Args:
            reason: What the first rank sees.
        """
        self.executor.end_steps()
        step_id = self.executor.running_step
        self.executor.stop()
        self._handle(FenceReplica(reason) if step_id is None else StepFailed(step_id, reason))

    def _break_connections(self) -> None:
        """Let the polls that are pending fail."""
        if self._is_silent:
            return
        assert self.stopped is not None
        polls, self._polls = self._polls, {}
        for consumer_id in polls:
            lost = ReplicaLost(*self.source, self.stopped, (consumer_id,))
            consumer = self.consumers[consumer_id]
            self._network.send(self.node, consumer.node, message_bytes(lost), consumer.take, lost)

    def _tell(self, message: ReplicaReport | RegisterReplica) -> None:
        controller = self.controller
        assert controller is not None, "hosts are wired before they run"
        size = message_bytes(message)
        self._network.send(self.node, controller.node, size, controller.take, message)

    def _finish(self, result: StepResult) -> None:
        self._handle(StepFinished(result))

    def _handle(self, event: ReplicaEvent) -> None:
        now = self._engine.now
        for command in self._take_event(event, now):
            match command:
                case RunStep(plan):
                    self.executor.run(plan)
                case AnswerPoll(consumer_id, poll_id, delivery):
                    if self._polls.get(consumer_id) == poll_id:
                        del self._polls[consumer_id]
                    consumer = self.consumers[consumer_id]
                    size = message_bytes(command)
                    answer = self, poll_id, delivery
                    self._network.send(
                        self.node, consumer.node, size, consumer.take_delivery, *answer
                    )
                case PinAnswered():
                    pass  # Nothing pins here.
                case ReplicaReport() | RegisterReplica():
                    self._tell(command)
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
        if self._tick_at != planned_for or self.stopped is not None:
            return  # An earlier one was planned since.
        self._tick_at = None
        due = self.replica.next_tick
        if due is not None and due <= self._engine.now:
            self._handle(Tick())
        else:
            self._plan_tick()


class ControllerHost:
    """The controller on a node of its own.

    Args:
        engine: The clock.
        network: Carries its messages.
        node: Where it is.
        controller: The state machine.
        start_life: Begins to start a life of a replica.
        stop_life: Ends one, or keeps it from starting.
        record: Takes its event log.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        node: NodeId,
        controller: Controller,
        start_life: Callable[[Source], None],
        stop_life: Callable[[Source, str], None],
        record: Record | None,
    ) -> None:
        self.node = node
        self.controller = controller
        self.replicas: dict[Source, ReplicaHost] = {}
        self.consumers: dict[str, ConsumerHost] = {}
        self.is_dead = False
        self._engine = engine
        self._network = network
        self._start_life = start_life
        self._stop_life = stop_life
        self._record = record
        self._take_event = recorded(CONTROLLER, controller.handle, record)
        self._tick_at: float | None = None

    def die(self) -> None:
        """Lose all that the controller knows; messages to it are lost until it is replaced."""
        self.is_dead = True

    def replace(self, controller: Controller) -> None:
        """Go on with a controller of a later term, and tell it which replicas can be found."""
        self.is_dead = False
        self.controller = controller
        self._take_event = recorded(CONTROLLER, controller.handle, self._record)
        for source, host in self.replicas.items():
            if host.can_be_found:
                self.take(FoundReplica(*source))
        self.take(Tick())

    def take(self, event: ControllerEvent) -> None:
        """Take in a message that has come."""
        if self.is_dead:
            return
        commands = self._take_event(event, self._engine.now)
        for command in commands:
            match command:
                case SendToReplica(replica_id, incarnation, sent):
                    host = self.replicas.get((replica_id, incarnation))
                    if host is not None:
                        size = message_bytes(sent)
                        self._network.send(self.node, host.node, size, host.take, sent)
                case Placed() | Rejected():
                    assert isinstance(event, SubmitRequest), "an answer to a submission"
                    self._tell(event.request.consumer_id, command)
                case ReplicaLost(consumers=consumers):
                    for consumer_id in consumers:
                        self._tell(consumer_id, command)
                case StopReplica(replica_id, incarnation, reason):
                    self._stop_life((replica_id, incarnation), reason)
                case StartReplica(replica_id, incarnation):
                    self._start_life((replica_id, incarnation))
                case TakeDown(reason):
                    for source in self.replicas:
                        self._stop_life(source, reason)
                case _:
                    assert_never(command)
        self._plan_tick()

    def _plan_tick(self) -> None:
        """See to it that the controller is ticked when that has something to do."""
        due = self.controller.next_tick
        if due is None or (self._tick_at is not None and self._tick_at <= due):
            return
        due = max(due, self._engine.now)
        self._tick_at = due
        self._engine.at(due, self._tick, due)

    def _tick(self, planned_for: float) -> None:
        if self._tick_at != planned_for:
            return  # An earlier one was planned since.
        self._tick_at = None
        if self.is_dead:
            return
        due = self.controller.next_tick
        if due is not None and due <= self._engine.now:
            self.take(Tick())
        else:
            self._plan_tick()

    def _tell(self, consumer_id: str, message: Placed | Rejected | ReplicaLost) -> None:
        consumer = self.consumers[consumer_id]
        size = message_bytes(message)
        self._network.send(self.node, consumer.node, size, consumer.take, message)
