"""The controller of a deployment as a named, detached actor: the shell around core's Controller."""

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
from rayserve_cluster.launch import remove_deployment
from rayserve_cluster.placement import alive_nodes, rank_resources, spread
from rayserve_cluster.worker import RankStats
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    EndDeployment,
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
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
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

logger = logging.getLogger(__name__)


class ControllerActor:
    """Starts the gangs, places requests, notices deaths, ends what no owner covers."""

    def __init__(self, config: DeploymentConfig, owner: str) -> None:
        """Remember what to start; `start` does it.

        Args:
            config: Of the deployment.
            owner: Names the process that created it.
        """
        self._config = config
        self._owner = owner
        lease_s = None if config.keep_alive else config.timeouts.deployment_lease_s
        start = ControllerStart(
            deployment_lease_s=lease_s, batch=config.batch, placement=config.placement
        )
        self._core = new_controller(start)
        record: Record | None = None
        if config.event_log_dir is not None:
            record = open_controller_log(config.event_log_dir)
            record(LoggedStart(CONTROLLER, start))
        self._take_event = recorded(CONTROLLER, self._core.handle, record)
        self._gangs: dict[tuple[ReplicaId, Incarnation], Gang] = {}
        self._lost: dict[tuple[ReplicaId, Incarnation], str] = {}
        self._news: dict[ConsumerId, list[ReplicaLost]] = {}
        self._told = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[ModelLimits] | None = None
        self._failed = False
        self._spawn(self._tick())

    async def describe(self) -> tuple[DeploymentConfig, str]:
        """Return the configuration, and who created the deployment."""
        return self._config, self._owner

    async def start(self) -> ModelLimits:
        """Start all replicas and wait until they serve; further calls wait for the same.

        Returns:
            What requests are checked against.

        Raises:
            PagedError: A replica cannot start; the deployment ends itself.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> ModelLimits:
        config = self._config
        # A controller before this one may have died and left its ranks.
        await asyncio.to_thread(remove_deployment, config.name, keep_controller=True)
        resources = rank_resources(ray.cluster_resources())
        for index in range(config.parallel.num_replicas):
            key = (ReplicaId(f"r{index}"), Incarnation(0))
            self._gangs[key] = Gang(config, *key, resources)
        nodes = spread(
            len(self._gangs), [resources] * config.parallel.tensor_parallel_size, alive_nodes()
        )
        starts = [
            asyncio.create_task(self._start_gang(gang, node))
            for gang, node in zip(self._gangs.values(), nodes, strict=True)
        ]
        try:
            await asyncio.gather(*starts)
        except Exception as error:  # Whatever it was: nothing may be left behind.
            for start in starts:
                start.cancel()
            self._handle(EndDeployment(f"it could not start: {error}"))
            raise
        limits = self._core.limits
        if limits is None:
            raise DeploymentError(config.name, "all its replicas were lost while it started")
        return limits

    async def _start_gang(self, gang: Gang, node_id: str | None) -> None:
        controller = ray.get_runtime_context().current_actor
        self._handle(await gang.start(node_id, controller))
        self._spawn(self._watch(gang))

    async def _watch(self, gang: Gang) -> None:
        reason = await gang.lost(self._config.timeouts.rank_liveness_s)
        self._handle(LoseReplica(gang.replica_id, gang.incarnation, reason))

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
        return tuple(self._news.pop(consumer_id, ()))

    async def why_lost(self, replica_id: ReplicaId, incarnation: Incarnation) -> str | None:
        """Say which rank of an incarnation is lost, and why, as far as can be known at once.

        Returns:
            None where all its ranks are well.
        """
        key = (replica_id, incarnation)
        if key not in self._lost and key in self._gangs:
            return await self._gangs[key].cause()
        return self._lost.get(key)

    # --- replicas and owners --------------------------------------------------------------

    async def report(self, message: ReplicaReport | RegisterReplica | LoseReplica) -> None:
        """Take in what a replica says of itself."""
        if isinstance(message, ReplicaReport) and message.fenced is not None:
            # Rank 0 saw a connection break: who broke it is what its consumers want to know.
            cause = await self._gangs[message.replica_id, message.incarnation].cause()
            message = dataclasses.replace(message, fenced=cause or message.fenced)
        self._handle(message)

    async def renew_lease(self) -> None:
        """The owner is alive."""
        self._handle(RenewLease())

    async def end(self, reason: str) -> None:
        """Take everything down, this actor last; answered once the ranks are gone."""
        self._handle(EndDeployment(reason))
        await self._stop_gangs(reason)

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """Take the ledger of every replica, each at the end of a step, ordered by replica id."""
        live = sorted(self._core.replicas.items())
        ledgers = await asyncio.gather(*(self._gangs[key].accounting() for key in live))
        return tuple(
            (key[0], ledger)
            for key, ledger in zip(live, ledgers, strict=True)
            if ledger is not None
        )

    async def reset_cache(self) -> None:
        """Forget the prefix caches of all replicas; returns when each has done it."""
        live = self._core.replicas.items()
        await asyncio.gather(*(self._gangs[key].reset_cache() for key in live))

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """Keep the cached blocks of a prefix on every replica, ordered by replica id."""
        live = sorted(self._core.replicas.items())
        answers = await asyncio.gather(*(self._gangs[key].pin_prefix(event) for key in live))
        return tuple(
            (key[0], answer)
            for key, answer in zip(live, answers, strict=True)
            if answer is not None
        )

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """Let go of a pin on every replica."""
        live = self._core.replicas.items()
        await asyncio.gather(*(self._gangs[key].unpin_prefix(event) for key in live))

    async def stats(self) -> tuple[RankStats, ...]:
        """Return the figures of all ranks that answer."""
        live = sorted(self._core.replicas.items())
        stats = await asyncio.gather(*(self._gangs[key].stats() for key in live))
        return tuple(rank for ranks in stats for rank in ranks)

    # --- the shell ------------------------------------------------------------------------

    def _handle(self, event: ControllerEvent) -> list[ControllerCommand]:
        commands = self._take_event(event, time.monotonic())
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: ControllerCommand) -> None:
        match command:
            case SendToReplica(replica_id, incarnation, event):
                self._gangs[replica_id, incarnation].post(event)
            case Placed() | Rejected():
                pass  # The submission's own answer.
            case ReplicaLost():
                logger.warning("%s is lost: %s", command.replica_id, command.reason)
                self._lost[command.replica_id, command.incarnation] = command.reason
                for consumer_id in command.consumers:
                    self._news.setdefault(consumer_id, []).append(command)
                self._spawn(self._tell())
            case StopReplica(replica_id, incarnation, reason):
                self._spawn(self._gangs[replica_id, incarnation].stop(reason))
            case StartReplica():
                raise AssertionError("no recovery is configured, and no replica started again")
            case TakeDown(reason):
                self._spawn(self._take_down(reason))
            case _:
                assert_never(command)

    async def _tell(self) -> None:
        async with self._told:
            self._told.notify_all()

    async def _tick(self) -> None:
        period_s = min(_TICK_S, self._config.timeouts.deployment_lease_s / 4.0)
        while True:
            self._handle(Tick())
            await asyncio.sleep(period_s)

    async def _stop_gangs(self, reason: str) -> None:
        await asyncio.gather(*(gang.stop(reason) for gang in self._gangs.values()))

    async def _take_down(self, reason: str) -> None:
        logger.warning("deployment %s ends: %s", self._config.name, reason)
        if self._starting is not None:
            self._starting.cancel()
        await self._stop_gangs(reason)
        await asyncio.to_thread(remove_deployment, self._config.name, keep_controller=True)
        await asyncio.sleep(_LAST_WORDS_S)
        ray.kill(ray.get_runtime_context().current_actor)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("deployment %s", self._config.name, exc_info=error)
        if self._failed:
            os._exit(1)  # Nothing works any more: the ranks' own leases end them.
        self._failed = True
        self._spawn(self._take_down(f"its controller failed: {type(error).__name__}: {error}"))
