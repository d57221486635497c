"""The shell without Ray: a whole deployment in one process, its ranks in threads.

The same state machines, shards and collectives as on a cluster: at a width of n, n ranks hold n
different shards, and exchange tensors and plans over gloo. For tests, notebooks, and machines that
have torch and no Ray.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import assert_never

import torch
from torch.distributed import HashStore

from rayserve_cluster.executor import follow
from rayserve_cluster.rank import Rank, host_replica, start_rank
from rayserve_cluster.step_loop import ReplicaHost
from rayserve_cluster.tp_group import GroupBrokenError, TpGroup
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import (
    ControllerEvent,
    EndDeployment,
    LoseReplica,
    Placed,
    RegisterReplica,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import DeploymentError, ReplicaLostError
from rayserve_paged.core.event_log import CONTROLLER, ControllerStart, LoggedStart
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replay import new_controller, recorded
from rayserve_paged.core.replica_messages import (
    PinAnswered,
    PinPrefix,
    PollTokens,
    ReplicaReport,
    UnpinPrefix,
)
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.event_files import EventFile, open_controller_log, open_replica_log

_INCARNATION = Incarnation(0)
"""Of every replica here: a lost one is not started again."""


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
            deployment_lease_s=None, batch=config.batch, placement=config.placement
        )
        self._controller = new_controller(start)
        self._log: EventFile | None = None
        if config.event_log_dir is not None:
            self._log = open_controller_log(config.event_log_dir)
            self._log(LoggedStart(CONTROLLER, start))
        self._take_event = recorded(CONTROLLER, self._controller.handle, self._log)
        self._watchers: dict[ConsumerId, set[Future[None]]] = {}
        self._news: dict[ConsumerId, list[ReplicaLost]] = {}
        self._stops: list[threading.Thread] = []
        self._gangs: dict[ReplicaId, _Gang] = {}
        for index in range(config.parallel.num_replicas):
            replica_id = ReplicaId(f"r{index}")
            self._gangs[replica_id] = _Gang(config, replica_id, index, self.handle)
        try:
            self._start()
        except BaseException:
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
            self.handle(RegisterReplica(replica_id, _INCARNATION, rank.limits, rank.scope))

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
        if gang is None or incarnation != _INCARNATION:
            raise ReplicaLostError(replica_id, incarnation, "there is no such incarnation")
        return await asyncio.wrap_future(gang.host.poll(message))

    async def cancel(
        self, request_id: RequestId, attempt: Attempt, sibling: int | None = None
    ) -> None:
        """As `Deployment.cancel`."""
        self.handle(WithdrawRequest(request_id, attempt, sibling))

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

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """As `Deployment.accounting`; lost replicas have no ledger."""
        asked = {
            replica_id: asyncio.wrap_future(gang.host.accounting())
            for replica_id, gang in self._gangs.items()
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        ledgers = []
        for replica_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Accounting):
                ledgers.append((replica_id, answer))
            elif not isinstance(answer, ReplicaLostError):
                raise answer
        return tuple(ledgers)

    async def reset_cache(self) -> None:
        """As `Deployment.reset_cache`; lost replicas have no cache."""
        asked = [asyncio.wrap_future(gang.host.reset_cache()) for gang in self._gangs.values()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLostError):
                raise answer

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """As `Deployment.pin_prefix`."""
        asked = {
            replica_id: asyncio.wrap_future(gang.host.pin_prefix(event))
            for replica_id, gang in self._gangs.items()
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
        for gang in self._gangs.values():
            gang.host.post(event)

    def shutdown(self) -> None:
        """As `Deployment.shutdown`."""
        self.handle(EndDeployment("it was shut down"))
        self._stop_all("the deployment was shut down")

    # --- the controller ---------------------------------------------------------------------

    def handle(self, event: ControllerEvent) -> Placed | Rejected | None:
        """Give the controller an event and carry out its commands; from any thread.

        Returns:
            The answer, where the event is a submission.
        """
        answer: Placed | Rejected | None = None
        with self._lock:
            for command in self._take_event(event, time.monotonic()):
                match command:
                    case SendToReplica(replica_id, _, message):
                        self._gangs[replica_id].host.post(message)
                    case Placed() | Rejected():
                        answer = command
                    case ReplicaLost():
                        self._tell(command)
                    case StopReplica(replica_id, _, reason):
                        self._stop_later(self._gangs[replica_id], reason)
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

    def _stop_later(self, gang: _Gang, reason: str) -> None:
        """Stop a replica from a thread that is none of its own, since it waits for them."""
        thread = threading.Thread(target=gang.stop, args=(reason,), daemon=True)
        self._stops.append(thread)
        thread.start()

    def _stop_all(self, reason: str) -> None:
        with self._lock:
            stops, self._stops = self._stops, []
        for thread in stops:
            thread.join()
        for gang in self._gangs.values():
            gang.stop(reason)
        if self._log is not None:
            self._log.close()


class _Gang:
    """The ranks of one replica: rank 0 in the step loop's thread, each other in one of its own.

    Args:
        config: Of the deployment.
        replica_id: The replica.
        index: Its place among the replicas.
        on_event: Takes what the controller is to hear.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        replica_id: ReplicaId,
        index: int,
        on_event: Callable[[ReplicaReport | LoseReplica], object],
    ) -> None:
        self._config = config
        self._replica_id = replica_id
        self._on_event = on_event
        self._log: EventFile | None = None
        self._host: ReplicaHost | None = None
        self._stopping = False
        width = config.parallel.tensor_parallel_size
        self._num_ranks_in_all = config.parallel.num_replicas * width
        # One GPU for each rank of the deployment, or none for any.
        self._on_gpus = torch.cuda.device_count() >= self._num_ranks_in_all
        self._store = HashStore() if width > 1 else None
        self._groups = [
            TpGroup(
                rank,
                width,
                timeout_s=config.timeouts.collective_timeout_s,
                device=torch.device("cuda", index * width + rank) if self._on_gpus else None,
            )
            for rank in range(width)
        ]
        self._ready: list[Future[Rank]] = [Future() for _ in self._groups]
        self._threads = [
            threading.Thread(
                target=self._run_rank, args=(rank,), name=f"{replica_id}-rank-{rank}", daemon=True
            )
            for rank in range(width)
        ]

    @property
    def host(self) -> ReplicaHost:
        """The step loop of rank 0, once it has started."""
        assert self._host is not None
        return self._host

    def start(self) -> None:
        """Begin to load the ranks, each in its thread."""
        for thread in self._threads:
            thread.start()

    def wait(self, deadline: float) -> Rank:
        """Wait until all ranks are ready; return rank 0, whose step loop has started.

        Args:
            deadline: On the monotonic clock.

        Raises:
            PagedError: What kept a rank from starting.
            DeploymentError: It is late.
        """
        left_s = max(0.0, deadline - time.monotonic())
        done, late = concurrent.futures.wait(self._ready, left_s, "FIRST_EXCEPTION")
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            # A group broke because its other rank failed, which is what the user wants to know.
            raise min(failures, key=lambda error: isinstance(error, GroupBrokenError))
        if late:
            reason = f"{self._replica_id} is not ready after {left_s:.0f} s"
            raise DeploymentError(self._config.name, reason)
        return self._ready[0].result()

    def stop(self, reason: str) -> None:
        """End all ranks and wait for them. Idempotent; not on a thread of this replica."""
        self._stopping = True
        if self._host is not None:
            self._host.stop(reason)
        for group in self._groups:
            group.abort(reason)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self._host is not None:
            self._host.stop(reason)  # It may have started meanwhile.
        for group in self._groups:
            group.close()
        if self._log is not None:
            self._log.close()

    def _run_rank(self, rank: int) -> None:
        # Threads that have not computed yet, the step loop's too, take the setting from here.
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // self._num_ranks_in_all))
        try:
            started = start_rank(
                self._config,
                self._groups[rank],
                self._store,
                self._replica_id,
                num_ranks_here=1 if self._on_gpus else self._num_ranks_in_all,
            )
            if rank == 0:
                if (folder := self._config.event_log_dir) is not None:
                    self._log = open_replica_log(folder, self._replica_id, _INCARNATION)
                # At once, since its heartbeats keep the followers waiting.
                self._host = host_replica(
                    self._config,
                    started,
                    self._replica_id,
                    _INCARNATION,
                    self._on_event,
                    self._log,
                )
                self._host.start()
        except Exception as error:  # The thread's end: whoever waits for the rank raises it.
            self._ready[rank].set_exception(error)
            return
        self._ready[rank].set_result(started)
        if rank > 0:
            self._follow(rank, started)

    def _follow(self, rank: int, started: Rank) -> None:
        try:
            follow(started.group, started.runner)
        except Exception as error:  # A follower's outermost loop: it becomes an event.
            if not self._stopping:
                reason = f"rank {rank}: {type(error).__name__}: {error}"
                self._on_event(LoseReplica(self._replica_id, _INCARNATION, reason))
