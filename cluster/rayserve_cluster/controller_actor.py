"""The controller of a deployment as a named, detached actor: the shell around core's Controller.

Where its process dies, Ray starts it anew: as the next *term*, which finds the replicas of those
before by their names, and rebuilds its books from their inventories. Streams go on meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any, Final, assert_never

import ray

from rayserve_cluster.gang import Gang
from rayserve_cluster.gangs import Gangs, Life
from rayserve_cluster.launch import remove_deployment
from rayserve_cluster.placement import num_restarts, replica_ids
from rayserve_cluster.worker import RankStats
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.cluster_view import ClusterView, ReplicaView
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    EndDeployment,
    FoundReplica,
    LeaveDeployment,
    LoseReplica,
    Placed,
    Rejected,
    RenewLease,
    ReplicaLost,
    SendToReplica,
    StartReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.event_log import CONTROLLER, ControllerStart, LoggedStart, Record
from rayserve_paged.core.ids import (
    Attempt,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
    Term,
)
from rayserve_paged.core.owner_report import OwnerReport, OwnerReports
from rayserve_paged.core.recent_events import RecentEvents
from rayserve_paged.core.replay import new_controller, recorded
from rayserve_paged.core.replica_messages import (
    PinAnswered,
    PinPrefix,
    RegisterReplica,
    ReplicaReport,
    Tick,
    UnpinPrefix,
)
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.event_files import open_controller_log

_TICK_S: Final = 0.25
_LAST_WORDS_S: Final = 0.5
"""What is left to the answers on their way when the controller ends itself."""
_LOOK_S: Final = 0.05

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What a controller says of itself.

    Args:
        pid: Its process.
        term: Which life of the controller it is.
        replicas: Live replicas and their incarnations.
        num_requests: Requests in its books.
    """

    pid: int
    term: Term
    replicas: dict[ReplicaId, Incarnation]
    num_requests: int


class ControllerActor:
    """Starts the gangs, places requests, notices deaths, starts what died again, and ends what no
    owner covers.
    """

    def __init__(self, config: DeploymentConfig, owner: str) -> None:
        """Remember what to start; `start` does it.

        Args:
            config: Of the deployment.
            owner: Names the process that created it.
        """
        self._config = config
        self._owner = owner
        term = Term(num_restarts())
        start = ControllerStart(
            deployment_lease_s=None if config.keep_alive else config.timeouts.deployment_lease_s,
            batch=config.batch,
            placement=config.placement,
            recovery=config.recovery,
            start_timeout_s=config.timeouts.start_timeout_s,
            term=term,
            expected=tuple(replica_ids(config)) if term else (),
            farewell_s=config.timeouts.farewell_s,
        )
        self._core = new_controller(start)
        record: Record | None = None
        if config.event_log_dir is not None:
            record = open_controller_log(config.event_log_dir)
            record(LoggedStart(CONTROLLER, start))
        self._take_event = recorded(CONTROLLER, self._core.handle, record)
        self._gangs = Gangs(config, term, self._handle, self._spawn)
        # The last life of each replica that was lost, and why.
        self._lost: dict[ReplicaId, tuple[Incarnation, str]] = {}
        # What consumers have not asked for yet, since when.
        self._news: dict[ConsumerId, tuple[float, list[ReplicaLost]]] = {}
        self._events = RecentEvents()
        self._events.add(time.monotonic(), "controller term", f"term {term} of the controller")
        self._reports = OwnerReports(config.timeouts.consumer_lease_s)
        self._told = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[ModelLimits] | None = None
        self._failed = False
        if term:
            logger.warning("the controller of %s was started anew: term %d", config.name, term)
            for life in self._gangs.adopt():
                self._handle(FoundReplica(*life))
        self._spawn(self._tick())

    async def describe(self) -> tuple[DeploymentConfig, str]:
        """Return the configuration, and who created the deployment."""
        return self._config, self._owner

    async def start(self) -> ModelLimits:
        """Start all replicas and wait until they serve; further calls wait for the same.

        Of a controller that was started anew, wait until a replica serves again.

        Returns:
            What requests are checked against.

        Raises:
            PagedError: A replica cannot start; the deployment ends itself.
            DeploymentError: Of one that was started anew: no replica has come back in time.
        """
        if self._core.term:
            return await self._await_replica()
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> ModelLimits:
        try:
            # A deployment before this one may have lost its controller, and left its ranks.
            await asyncio.to_thread(remove_deployment, self._config.name, keep_controller=True)
            await self._gangs.start_all()
            return await self._await_replica()
        except Exception as error:  # Whatever it was: nothing may be left behind.
            self._handle(EndDeployment(f"it could not start: {error}"))
            raise

    async def _await_replica(self) -> ModelLimits:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._config.timeouts.start_timeout_s
        while (limits := self._core.limits) is None or self._core.is_rebuilding:
            if clock() > deadline or not self._core.is_hopeful:
                reason = f"it has no replica: {self._core.why_none}"
                raise DeploymentError(self._config.name, reason)
            await asyncio.sleep(_LOOK_S)
        return limits

    # --- consumers ------------------------------------------------------------------------

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        """Place a request, or say why not; answered at once."""
        for command in self._handle(message):
            if isinstance(command, Placed | Rejected):
                return command
        raise AssertionError("a submission has an answer")

    async def withdraw(
        self,
        request_id: RequestId,
        attempt: Attempt,
        sibling: int | None = None,
        placed_at: tuple[ReplicaId, Incarnation] | None = None,
    ) -> None:
        """Cancel a request, or one of its samples, wherever it is; unknown ones are ignored."""
        self._handle(WithdrawRequest(request_id, attempt, sibling, placed_at))

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        """Wait for news of lost replicas that owed this consumer something."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.timeouts.poll_timeout_s), self._told:
                await self._told.wait_for(lambda: consumer_id in self._news)
        _since, news = self._news.pop(consumer_id, (0.0, []))
        return tuple(news)

    async def why_lost(self, replica_id: ReplicaId, incarnation: Incarnation) -> str | None:
        """Say which rank of an incarnation is lost, and why, as far as can be known at once.

        Returns:
            None where all its ranks are well.
        """
        lost_incarnation, reason = self._lost.get(replica_id, (None, None))
        if lost_incarnation == incarnation:
            return reason
        return await self._cause((replica_id, incarnation))

    async def _cause(self, life: Life) -> str | None:
        gang = self._gangs.get(life)
        return None if gang is None else await gang.cause()

    # --- replicas and owners --------------------------------------------------------------

    async def report(self, message: ReplicaReport | RegisterReplica | LoseReplica) -> None:
        """Take in what a replica says of itself."""
        if isinstance(message, ReplicaReport) and message.fenced is not None:
            # Rank 0 saw a connection break: who broke it is what its consumers want to know.
            cause = await self._cause((message.replica_id, message.incarnation))
            message = dataclasses.replace(message, fenced=cause or message.fenced)
        self._handle(message)

    async def report_owner(self, report: OwnerReport) -> None:
        """Keep what an owner says of its requests."""
        self._reports.put(report, time.monotonic())

    async def owner_reports(self) -> tuple[OwnerReport, ...]:
        """Return the last report of each owner."""
        return self._reports.latest(time.monotonic())

    async def renew_lease(self, owner: str) -> None:
        """An owner is alive."""
        self._handle(RenewLease(owner))

    async def leave(self, owner: str) -> None:
        """An owner goes; once the last one has, the deployment waits a little and ends."""
        self._handle(LeaveDeployment(owner))

    async def end(self, reason: str) -> None:
        """Take everything down, this actor last; answered once the ranks are gone."""
        self._handle(EndDeployment(reason))
        await self._gangs.stop_all(reason)

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """Take the ledger of every replica, each at the end of a step, ordered by replica id."""
        gangs = self._live()
        ledgers = await asyncio.gather(*(gang.accounting() for gang in gangs))
        return tuple(
            (gang.replica_id, ledger)
            for gang, ledger in zip(gangs, ledgers, strict=True)
            if ledger is not None
        )

    async def cluster_view(self, cell: tuple[ReplicaId, int] | None = None) -> ClusterView:
        """Return the maps of all replicas and the latest events; of one replica where a cell of
        its map is wanted with its holders.
        """
        gangs = self._live()
        number = None
        if cell is not None:
            wanted, number = cell
            gangs = [gang for gang in gangs if gang.replica_id == wanted]
        views = await asyncio.gather(*(gang.block_view(number) for gang in gangs))
        replicas = tuple(
            ReplicaView(gang.replica_id, gang.incarnation, view)
            for gang, view in zip(gangs, views, strict=True)
            if view is not None
        )
        return ClusterView(self._core.term, replicas, self._events.latest(time.monotonic()))

    async def reset_cache(self) -> None:
        """Forget the prefix caches of all replicas; returns when each has done it."""
        await asyncio.gather(*(gang.reset_cache() for gang in self._live()))

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """Keep the cached blocks of a prefix on every replica, ordered by replica id."""
        gangs = self._live()
        answers = await asyncio.gather(*(gang.pin_prefix(event) for gang in gangs))
        return tuple(
            (gang.replica_id, answer)
            for gang, answer in zip(gangs, answers, strict=True)
            if answer is not None
        )

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """Let go of a pin on every replica."""
        await asyncio.gather(*(gang.unpin_prefix(event) for gang in self._live()))

    async def stats(self) -> tuple[RankStats, ...]:
        """Return the figures of all ranks that answer."""
        stats = await asyncio.gather(*(gang.stats() for gang in self._live()))
        return tuple(rank for ranks in stats for rank in ranks)

    async def status(self) -> ControllerStatus:
        """Return who the controller is, and which replicas live."""
        core = self._core
        return ControllerStatus(os.getpid(), core.term, dict(core.replicas), len(core.fleet.booked))

    def _live(self) -> list[Gang]:
        return self._gangs.of(self._core.replicas.items())

    # --- the shell ------------------------------------------------------------------------

    def _handle(self, event: ControllerEvent) -> list[ControllerCommand]:
        now = time.monotonic()
        commands = self._take_event(event, now)
        self._events.see(event, commands, now)
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: ControllerCommand) -> None:
        match command:
            case SendToReplica(replica_id, incarnation, event):
                gang = self._gangs.get((replica_id, incarnation))
                if gang is not None:  # Else it has ended, and has nobody to hear it.
                    gang.post(event)
            case Placed() | Rejected():
                pass  # The submission's own answer.
            case ReplicaLost():
                self._note_loss(command)
            case StopReplica(replica_id, incarnation, reason):
                self._spawn(self._gangs.stop((replica_id, incarnation), reason))
            case StartReplica(replica_id, incarnation):
                logger.warning("%s is started again, as %d", replica_id, incarnation)
                self._gangs.start((replica_id, incarnation))
            case TakeDown(reason):
                self._spawn(self._take_down(reason))
            case _:
                assert_never(command)

    def _note_loss(self, loss: ReplicaLost) -> None:
        logger.warning("%s is lost: %s", loss.replica_id, loss.reason)
        self._lost[loss.replica_id] = (loss.incarnation, loss.reason)
        for consumer_id in loss.consumers:
            self._news.setdefault(consumer_id, (time.monotonic(), []))[1].append(loss)
        self._spawn(self._tell())

    async def _tell(self) -> None:
        async with self._told:
            self._told.notify_all()

    async def _tick(self) -> None:
        timeouts = self._config.timeouts
        period_s = min(_TICK_S, timeouts.deployment_lease_s / 4.0)
        while True:
            self._handle(Tick())
            # By then the replicas hold a consumer that does not poll for gone as well.
            old = time.monotonic() - timeouts.consumer_lease_s - timeouts.poll_timeout_s
            for consumer_id in [name for name, (since, _) in self._news.items() if since < old]:
                del self._news[consumer_id]
            await asyncio.sleep(period_s)

    async def _take_down(self, reason: str) -> None:
        logger.warning("deployment %s ends: %s", self._config.name, reason)
        if self._starting is not None:
            self._starting.cancel()
        await self._gangs.stop_all(reason)
        await asyncio.to_thread(remove_deployment, self._config.name, keep_controller=True)
        await asyncio.sleep(_LAST_WORDS_S)
        ray.kill(ray.get_runtime_context().current_actor)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the controller of %s failed", self._config.name, exc_info=error)
        has_started = self._core.term or (self._starting is not None and self._starting.done())
        if has_started or self._failed:
            # Ray starts it anew; what replicas there are go on.
            os._exit(1)
        self._failed = True
        self._spawn(self._take_down(f"its controller failed: {type(error).__name__}: {error}"))
