"""A controller with real replicas on toy ranks: carries every message at once, and records it."""

from collections.abc import Sequence

from replica_driver import Reader, ReplicaDriver, Stream, make_scope

from rayserve_paged.core.config import BatchConfig, RecoveryConfig
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    LoseReplica,
    Placed,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StartReplica,
    StopReplica,
    TakeDown,
)
from rayserve_paged.core.event_log import (
    CONTROLLER,
    ControllerStart,
    LogEntry,
    LoggedCommands,
    LoggedEvent,
    LoggedStart,
)
from rayserve_paged.core.ids import ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replay import new_controller
from rayserve_paged.core.replica_messages import (
    RegisterReplica,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaReport,
    StepFinished,
    Tick,
)
from rayserve_paged.core.request import ModelLimits, Request


class ClusterDriver:
    """All machines of a deployment, at one time that is set by hand.

    Args:
        all_limits: Of each replica; they are named r0, r1, ...
        deployment_lease_s: Of the controller.
        recovery: Of the controller, which starts lost replicas again; None for never.
    """

    def __init__(
        self,
        all_limits: Sequence[ModelLimits],
        deployment_lease_s: float | None = None,
        recovery: RecoveryConfig | None = None,
    ) -> None:
        self.now = 0.0
        start = ControllerStart(
            deployment_lease_s=deployment_lease_s, batch=BatchConfig(), recovery=recovery
        )
        self.controller = new_controller(start)
        self.drivers: dict[ReplicaId, ReplicaDriver] = {}
        self.readers: dict[ConsumerId, Reader] = {}
        self.log: list[LogEntry] = [LoggedStart(CONTROLLER, start)]
        self.commands: list[ControllerCommand | ReplicaCommand] = []
        self.rejected: dict[RequestId, Exception] = {}
        self.placed: dict[RequestId, ReplicaId] = {}
        self.owners: dict[RequestId, Reader] = {}
        self.is_down = False
        self.all_limits = {ReplicaId(f"r{i}"): limits for i, limits in enumerate(all_limits)}
        for replica_id in self.all_limits:
            self.start_replica(replica_id, 0)

    # --- messages -------------------------------------------------------------------------

    def tell_controller(self, event: ControllerEvent) -> None:
        self.log.append(LoggedEvent(CONTROLLER, self.now, event))
        commands = self.controller.handle(event, self.now)
        self.log.append(LoggedCommands(CONTROLLER, tuple(commands)))
        self.commands += commands
        for command in commands:
            match command:
                case SendToReplica(replica_id, incarnation, sent):
                    driver = self.drivers.get(replica_id)
                    if driver is not None and driver.incarnation == incarnation:
                        self.tell_replica(replica_id, sent)
                case Placed(request_id, _attempt, replica_id):
                    self.placed[request_id] = replica_id
                    reader = self.owners[request_id]
                    reader.accept(reader.consumer.placed(command, self.now))
                case Rejected(request_id, _attempt, error, retry_after_s):
                    if retry_after_s is None:
                        self.rejected[request_id] = error
                    reader = self.owners[request_id]
                    reader.accept(reader.consumer.rejected(command, self.now))
                case ReplicaLost(consumers=consumers):
                    for consumer_id in consumers:
                        reader = self.reader(consumer_id)
                        reader.accept(reader.consumer.lose([command], self.now))
                case StopReplica(replica_id, incarnation, reason):
                    driver = self.drivers.get(replica_id)
                    if driver is not None and driver.incarnation == incarnation:
                        del self.drivers[replica_id]
                    # Whoever still has something to read there learns it from a poll that raises.
                    lost = ReplicaLost(replica_id, incarnation, reason, ())
                    for reader in self.readers.values():
                        reader.accept(reader.consumer.lose([lost], self.now))
                case StartReplica(replica_id, incarnation):
                    self.start_replica(replica_id, incarnation)
                case TakeDown():
                    self.is_down = True

    def tell_replica(self, replica_id: ReplicaId, event: ReplicaEvent) -> None:
        self.log.append(LoggedEvent(replica_id, self.now, event))
        driver = self.drivers[replica_id]
        driver.now = self.now
        commands = driver.send(event)
        self.log.append(LoggedCommands(replica_id, tuple(commands)))
        self.commands += commands
        for command in commands:
            if isinstance(command, ReplicaReport | RegisterReplica):
                self.tell_controller(command)

    # --- what happens ---------------------------------------------------------------------

    def reader(self, consumer_id: str = "c0") -> Reader:
        return self.readers.setdefault(ConsumerId(consumer_id), Reader(consumer_id))

    def start_replica(self, replica_id: ReplicaId, incarnation: int) -> None:
        limits = self.all_limits[replica_id]
        driver = ReplicaDriver(limits, incarnation=incarnation, replica_id=replica_id)
        driver.readers = self.readers
        self.drivers[replica_id] = driver
        self.log.append(LoggedStart(replica_id, driver.start))
        scope = make_scope(limits.block_size)
        self.tell_controller(RegisterReplica(replica_id, Incarnation(incarnation), limits, scope))

    def lose_replica(self, replica_id: ReplicaId) -> None:
        incarnation = self.drivers[replica_id].incarnation
        self.tell_controller(LoseReplica(replica_id, incarnation, "a rank is silent"))
        self.settle()

    def settle(self) -> None:
        """Carry what the consumers have to say."""
        for reader in list(self.readers.values()):
            due = reader.consumer.next_tick
            while due is not None and due <= self.now:
                messages, updates = reader.consumer.tick(self.now)
                reader.accept(updates)
                for message in messages:
                    self.tell_controller(message)
                due = reader.consumer.next_tick

    def submit(self, request: Request) -> Stream:
        """Open a request at its reader and submit it; a refusal is kept in `rejected`."""
        reader = self.owners[request.request_id] = self.reader(request.consumer_id)
        self.rejected.pop(request.request_id, None)
        stream = reader.open(request, self.now)
        self.settle()
        return stream

    def withdraw(self, request: Request) -> None:
        reader = self.reader(request.consumer_id)
        reader.accept(reader.consumer.cancel(request.request_id, None, self.now))
        self.settle()

    def poll(self, replica_id: ReplicaId, consumer_id: str = "c0") -> None:
        driver = self.drivers[replica_id]
        poll = self.reader(consumer_id).consumer.poll(replica_id, driver.incarnation, self.now)
        self.tell_replica(replica_id, poll)
        driver.read_answers()
        self.settle()

    def step(self, replica_id: ReplicaId) -> bool:
        """Finish the step in flight of a replica; False where there is none."""
        driver = self.drivers.get(replica_id)
        if driver is None or driver.plan is None:
            return False
        self.tell_replica(replica_id, StepFinished(driver.execute()))
        driver.read_answers()
        self.settle()
        return True

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell_controller(Tick())
        for replica_id in list(self.drivers):
            self.tell_replica(replica_id, Tick())
        self.settle()

    def run(self) -> None:
        """Step and poll until every replica is idle and has reported."""
        for _ in range(5000):
            if not sum(self.step(replica_id) for replica_id in self.all_limits):
                break
        for _ in range(2):  # The second poll acknowledges what the first one brought.
            for replica_id in list(self.drivers):
                for consumer_id in list(self.readers):
                    self.poll(replica_id, consumer_id)
            self.tick(1.0)
        assert not any(driver.replica.sequences for driver in self.drivers.values())
