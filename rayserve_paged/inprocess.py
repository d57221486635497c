"""The shell without Ray: a whole deployment in one process, its ranks in threads.

The same state machines, shards and collectives as on a cluster: at a width of n, n ranks hold n
different shards, and exchange tensors and plans over gloo. For tests, notebooks, and machines that
have torch and no Ray.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final, assert_never

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.cluster_view import ClusterView, ReplicaView
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import (
    ControllerEvent,
    EndDeployment,
    LoseReplica,
    Placed,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StartReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import ReplicaLostError
from rayserve_paged.core.event_log import CONTROLLER, ControllerStart, LoggedStart
from rayserve_paged.core.holdings import Holdings, block_view
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.owner_report import OwnerReport, OwnerReports
from rayserve_paged.core.recent_events import RecentEvents
from rayserve_paged.core.replay import new_controller, recorded
from rayserve_paged.core.replica_messages import (
    PinAnswered,
    PinPrefix,
    PollTokens,
    RegisterReplica,
    Tick,
    UnpinPrefix,
)
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.event_files import EventFile, open_controller_log
from rayserve_paged.inprocess_gang import Gang

_FIRST_LIFE: Final = Incarnation(0)
_TICK_S: Final = 0.1


class InProcessShell:
    """A deployment in this process; a `deployment.Deployment`.

    Args:
        config: Of the deployment. There is no lease: the deployment ends with its process.

    Raises:
        InvalidInputError: The model, its width, the cache or the folder of logs is not accepted.
        DeploymentError: The ranks were not ready in time.
    """

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        # Guards the controller and what follows.
        self._lock = threading.Lock()
        start = ControllerStart(
            deployment_lease_s=None,
            batch=config.batch,
            placement=config.placement,
            recovery=config.recovery,
            start_timeout_s=config.timeouts.start_timeout_s,
        )
        self._controller = new_controller(start)
        self._log: EventFile | None = None
        if config.event_log_dir is not None:
            self._log = open_controller_log(config.event_log_dir)
            self._log(LoggedStart(CONTROLLER, start))
        self._take_event = recorded(CONTROLLER, self._controller.handle, self._log)
        self._events = RecentEvents()
        self._watchers: dict[ConsumerId, set[Future[None]]] = {}
        self._news: dict[ConsumerId, list[ReplicaLost]] = {}
        self._reports = OwnerReports(config.timeouts.consumer_lease_s)
        self._threads: list[threading.Thread] = []
        # The latest life of each replica.
        self._gangs: dict[ReplicaId, Gang] = {}
        self._is_down = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="controller-ticks", daemon=True)
        for index in range(config.parallel.num_replicas):
            replica_id = ReplicaId(f"r{index}")
            gang = Gang(config, replica_id, _FIRST_LIFE, index, self.handle)
            self._gangs[replica_id] = gang
        try:
            self._start()
        except BaseException:
            self._is_down.set()
            self._stop_all("the deployment could not start")
            raise
        limits = self._controller.limits
        assert limits is not None
        self._limits = limits

    def _start(self) -> None:
        for gang in self._gangs.values():
            gang.start()
        deadline = time.monotonic() + self._config.timeouts.start_timeout_s
        for replica_id, gang in self._gangs.items():
            rank = gang.wait(deadline)
            self.handle(RegisterReplica(replica_id, _FIRST_LIFE, rank.limits, rank.scope))
        self._ticker.start()

    @property
    def limits(self) -> ModelLimits:
        """As `Deployment.limits`."""
        return self._limits

    # --- Deployment -------------------------------------------------------------------------

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        """As `Deployment.submit`."""
        answer = self.handle(message)
        assert answer is not None, "a controller answers every submission"
        return answer

    async def poll(
        self, replica_id: ReplicaId, incarnation: Incarnation, message: PollTokens
    ) -> Delivery:
        """As `Deployment.poll`."""
        gang = self._gangs.get(replica_id)
        if gang is None or incarnation != gang.incarnation or not gang.has_started:
            raise ReplicaLostError(replica_id, incarnation, "there is no such incarnation")
        return await asyncio.wrap_future(gang.host.poll(message))

    async def cancel(
        self,
        request_id: RequestId,
        attempt: Attempt,
        sibling: int | None = None,
        placed_at: tuple[ReplicaId, Incarnation] | None = None,
    ) -> None:
        """As `Deployment.cancel`."""
        self.handle(WithdrawRequest(request_id, attempt, sibling, placed_at))

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        """As `Deployment.watch`."""
        waiting: Future[None] = Future()
        with self._lock:
            if consumer_id in self._news:
                return tuple(self._news.pop(consumer_id))
            self._watchers.setdefault(consumer_id, set()).add(waiting)
        try:
            await asyncio.wait(
                {asyncio.wrap_future(waiting)}, timeout=self._config.timeouts.poll_timeout_s
            )
        finally:
            with self._lock:
                others = self._watchers.get(consumer_id, set())
                others.discard(waiting)
                if not others:
                    self._watchers.pop(consumer_id, None)
        with self._lock:
            return tuple(self._news.pop(consumer_id, ()))

    async def replicas(self) -> Mapping[ReplicaId, Incarnation]:
        """As `Deployment.replicas`."""
        with self._lock:
            return dict(self._controller.replicas)

    async def report_owner(self, report: OwnerReport) -> None:
        """As `Deployment.report_owner`."""
        with self._lock:
            self._reports.put(report, time.monotonic())

    async def owner_reports(self) -> tuple[OwnerReport, ...]:
        """As `Deployment.owner_reports`."""
        with self._lock:
            return self._reports.latest(time.monotonic())

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """As `Deployment.accounting`; lost replicas have no ledger."""
        asked = {
            replica_id: asyncio.wrap_future(gang.host.accounting())
            for replica_id, gang in self._serving().items()
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        ledgers = []
        for replica_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Accounting):
                ledgers.append((replica_id, answer))
            elif not isinstance(answer, ReplicaLostError):
                raise answer
        return tuple(ledgers)

    async def cluster_view(self, cell: tuple[ReplicaId, int] | None = None) -> ClusterView:
        """As `Deployment.cluster_view`; lost replicas have no map."""
        gangs, number = self._serving(), None
        if cell is not None:
            wanted, number = cell
            gangs = {name: gang for name, gang in gangs.items() if name == wanted}
        asked = [asyncio.wrap_future(gang.host.holdings()) for gang in gangs.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        replicas = []
        for (replica_id, gang), answer in zip(gangs.items(), answers, strict=True):
            if isinstance(answer, Holdings):
                view = await asyncio.to_thread(block_view, answer, number)
                replicas.append(ReplicaView(replica_id, gang.incarnation, view))
            elif not isinstance(answer, ReplicaLostError):
                raise answer
        with self._lock:
            events = self._events.latest(time.monotonic())
        return ClusterView(self._controller.term, tuple(replicas), events)

    async def reset_cache(self) -> None:
        """As `Deployment.reset_cache`; lost replicas have no cache."""
        asked = [asyncio.wrap_future(gang.host.reset_cache()) for gang in self._serving().values()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLostError):
                raise answer

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """As `Deployment.pin_prefix`."""
        asked = {
            replica_id: asyncio.wrap_future(gang.host.pin_prefix(event))
            for replica_id, gang in self._serving().items()
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        pinned = []
        for replica_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, PinAnswered):
                pinned.append((replica_id, answer))
            elif not isinstance(answer, ReplicaLostError):
                raise answer
        return tuple(pinned)

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """As `Deployment.unpin_prefix`."""
        for gang in self._serving().values():
            gang.host.post(event)

    def shutdown(self) -> None:
        """As `Deployment.shutdown`."""
        self._is_down.set()
        self.handle(EndDeployment("it was shut down"))
        self._stop_all("the deployment was shut down")

    def kill_replica(self, replica_id: ReplicaId, reason: str) -> None:
        """End the live life of a replica, for trials; it is started again as any that is lost."""
        self.handle(LoseReplica(replica_id, self._gangs[replica_id].incarnation, reason))

    def _serving(self) -> dict[ReplicaId, Gang]:
        """Replicas whose step loop has started."""
        with self._lock:
            return {name: gang for name, gang in self._gangs.items() if gang.has_started}

    # --- the controller ---------------------------------------------------------------------

    def handle(self, event: ControllerEvent) -> Placed | Rejected | None:
        """Give the controller an event and carry out its commands; from any thread.

        Returns:
            The answer, where the event is a submission.
        """
        answer: Placed | Rejected | None = None
        with self._lock:
            now = time.monotonic()
            commands = self._take_event(event, now)
            self._events.see(event, commands, now)
            for command in commands:
                match command:
                    case SendToReplica(replica_id, incarnation, message):
                        gang = self._gang(replica_id, incarnation)
                        if gang is not None and gang.has_started:
                            gang.host.post(message)
                    case Placed() | Rejected():
                        answer = command
                    case ReplicaLost():
                        self._tell(command)
                    case StopReplica() | StartReplica() if self._is_down.is_set():
                        pass  # All are stopped by who took it down; at exit no thread starts.
                    case StopReplica(replica_id, incarnation, reason):
                        if (gang := self._gang(replica_id, incarnation)) is not None:
                            # From a thread that is none of its own, since it waits for them.
                            self._spawn(gang.stop, reason)
                    case StartReplica(replica_id, incarnation):
                        self._spawn(self._start_again, replica_id, incarnation)
                    case TakeDown():
                        pass  # Every replica has its StopReplica, and the rest is garbage.
                    case _:
                        assert_never(command)
        return answer

    def _tell(self, news: ReplicaLost) -> None:
        for consumer_id in news.consumers:
            self._news.setdefault(consumer_id, []).append(news)
            for waiting in self._watchers.pop(consumer_id, ()):
                if waiting.set_running_or_notify_cancel():
                    waiting.set_result(None)

    def _gang(self, replica_id: ReplicaId, incarnation: Incarnation) -> Gang | None:
        gang = self._gangs.get(replica_id)
        return gang if gang is not None and gang.incarnation == incarnation else None

    def _tick(self) -> None:
        while not self._is_down.wait(_TICK_S):
            with self._lock:
                due = self._controller.next_tick
            if due is not None and due <= time.monotonic():
                self.handle(Tick())

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        """Run something on a thread of its own; with the lock held."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _start_again(self, replica_id: ReplicaId, incarnation: Incarnation) -> None:
        before = self._gangs[replica_id]
        before.stop("another life of it is started")
        gang = Gang(self._config, replica_id, incarnation, before.index, self.handle)
        with self._lock:
            if self._is_down.is_set():
                return
            self._gangs[replica_id] = gang
        gang.start()
        try:
            rank = gang.wait(time.monotonic() + self._config.timeouts.start_timeout_s)
        except Exception as error:  # A thread's outermost level: it becomes an event.
            reason = f"it could not be started ({type(error).__name__}: {error})"
            self.handle(LoseReplica(replica_id, incarnation, reason))
        else:
            self.handle(RegisterReplica(replica_id, incarnation, rank.limits, rank.scope))

    def _stop_all(self, reason: str) -> None:
        if self._ticker.ident is not None:
            self._ticker.join()
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        for gang in self._gangs.values():
            gang.stop(reason)
        if self._log is not None:
            self._log.close()
