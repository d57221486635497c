"""The shell on Ray: a `Deployment` whose controller and ranks are actors of a cluster."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rayserve_cluster.controller_actor import ControllerActor, ControllerStatus
from rayserve_cluster.health import death_cause
from rayserve_cluster.launch import connect, disconnect, remove_deployment
from rayserve_cluster.placement import CONTROLLER_NAME, namespace_of, rank_name
from rayserve_cluster.worker import RankStats, unwrapped
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.cluster_view import ClusterView
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import Placed, Rejected, ReplicaLost, SubmitRequest
from rayserve_paged.core.errors import (
    ControllerAwayError,
    DeploymentError,
    InvalidInputError,
    ReplicaLostError,
)
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.owner_report import OwnerReport
from rayserve_paged.core.replica_messages import PinAnswered, PinPrefix, PollTokens, UnpinPrefix
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.stream_messages import Delivery

_RENEWALS_PER_LEASE: Final = 5
_END_TIMEOUT_S: Final = 5.0
_MAX_CALLS: Final = 10_000
_FIND_ATTEMPTS: Final = 20

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ShellStats:
    """Figures of a running deployment.

    Args:
        timings: Seconds that the parts of starting took: `ray_init_s`, then `controller_s`, then
            `ranks_ready_s`, of which the slowest rank took `model_load_s` to load its shard.
        ranks: Figures of each rank's process.
    """

    timings: dict[str, float]
    ranks: tuple[RankStats, ...]


class RayShell:
    """A deployment on a Ray cluster.

    A deployment of the same name and configuration that exists already is joined. As long as it
    is used here its lease is renewed. The one that has created it ends it in `shutdown`, unless
    `keep_alive` is set; others leave it to its other owners, or to its lease.

    Args:
        config: What to run.
        address: A Ray cluster to join; None to start one on this machine, which ends with
            this process.
        is_shared: One of several equal owners, whoever of them creates it: it ends when the last
            of them has left.

    Raises:
        DeploymentError: There is no cluster, no room, or another deployment of this name.
        PagedError: What a rank raised while it started, such as a model that is not accepted.
    """

    def __init__(
        self, config: DeploymentConfig, address: str | None = None, *, is_shared: bool = False
    ) -> None:
        self._config = config
        self._is_shared = is_shared
        self._owner = uuid.uuid4().hex
        self._ranks: dict[tuple[ReplicaId, Incarnation], Any] = {}
        self._created = False
        self._shut_down = threading.Event()
        begin = time.monotonic()
        self._connection = connect(config.name, address)
        try:
            if config.keep_alive and self._connection.started_cluster:
                accepted = "false where the cluster is local: it ends with this process"
                raise InvalidInputError("keep_alive", True, accepted)
            connected_at = time.monotonic()
            self._controller, self._created = self._find_or_create_controller()
            controller_at = time.monotonic()
            self._renewer = threading.Thread(target=self._renew_lease, daemon=True)
            self._renewer.start()
            self._limits = self._start()
        except BaseException:
            self._shut_down.set()
            self._remove()
            raise
        ready_at = time.monotonic()
        self._timings = {
            "ray_init_s": connected_at - begin,
            "controller_s": controller_at - connected_at,
            "ranks_ready_s": ready_at - controller_at,
        }

    def _find_or_create_controller(self) -> tuple[Any, bool]:
        actor_class: Any = ray.remote(ControllerActor)
        options = actor_class.options(
            name=CONTROLLER_NAME,
            namespace=namespace_of(self._config.name),
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_MAX_CALLS,
            max_restarts=-1,
        )
        cause = ""
        for _ in range(_FIND_ATTEMPTS):
            try:
                controller = options.remote(self._config, self._owner)
                config, owner = ray.get(controller.describe.remote())
            except RayActorError as error:
                cause = death_cause(error)
                time.sleep(0.25)  # An ending controller of this name; the next one is ours.
                continue
            if config != self._config:
                reason = (
                    "runs already, with another configuration: take it down first "
                    f"(rayserve-paged down --name {self._config.name}), or choose another name"
                )
                raise DeploymentError(self._config.name, reason)
            return controller, owner == self._owner
        raise DeploymentError(self._config.name, f"its controller does not start ({cause})")

    def _start(self) -> ModelLimits:
        while True:
            try:
                limits: ModelLimits = ray.get(self._controller.start.remote())
                return limits
            except RayTaskError as error:
                raise unwrapped(error, self._config.name) from None
            except ActorUnavailableError:
                logger.warning("the controller of %s is started anew", self._config.name)
            except RayError as error:
                reason = f"its controller ended while it started ({death_cause(error)})"
                raise DeploymentError(self._config.name, reason) from error

    def _renew_lease(self) -> None:
        period_s = self._config.timeouts.deployment_lease_s / _RENEWALS_PER_LEASE
        while not self._shut_down.wait(period_s):
            if not ray.is_initialized():
                return  # Somebody disconnected this process; a submission says so.
            try:
                ray.get(self._controller.renew_lease.remote(self._owner), timeout=period_s)
            except (GetTimeoutError, ActorUnavailableError):
                continue
            except RayError as error:
                logger.warning("the controller of %s is gone: %s", self._config.name, error)
                return

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against."""
        return self._limits

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        """Hand in a request. Idempotent by (request_id, attempt).

        Raises:
            ControllerAwayError: The controller is being started anew; submit it again.
            DeploymentError: The controller is gone for good, or this process was disconnected.
        """
        if not ray.is_initialized():
            raise DeploymentError(self._config.name, "this process has left its Ray cluster")
        answer: Placed | Rejected = await self._ask(self._controller.submit.remote(message))
        return answer

    async def cancel(
        self,
        request_id: RequestId,
        attempt: Attempt,
        sibling: int | None = None,
        placed_at: tuple[ReplicaId, Incarnation] | None = None,
    ) -> None:
        """As `Deployment.cancel`."""
        await self._ask(self._controller.withdraw.remote(request_id, attempt, sibling, placed_at))

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        """Wait for news of lost replicas that still owed this consumer something."""
        news: tuple[ReplicaLost, ...]
        news = await self._ask(self._controller.watch.remote(consumer_id))
        return news

    async def replicas(self) -> Mapping[ReplicaId, Incarnation]:
        """As `Deployment.replicas`."""
        return (await self.status()).replicas

    async def report_owner(self, report: OwnerReport) -> None:
        """As `Deployment.report_owner`."""
        await self._ask(self._controller.report_owner.remote(report))

    async def owner_reports(self) -> tuple[OwnerReport, ...]:
        """As `Deployment.owner_reports`."""
        reports: tuple[OwnerReport, ...]
        reports = await self._ask(self._controller.owner_reports.remote())
        return reports

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """Take the ledger of every replica, each at a step's end, ordered by replica id."""
        ledgers: tuple[tuple[ReplicaId, Accounting], ...]
        ledgers = await self._ask(self._controller.accounting.remote())
        return ledgers

    async def cluster_view(self, cell: tuple[ReplicaId, int] | None = None) -> ClusterView:
        """As `Deployment.cluster_view`."""
        view: ClusterView = await self._ask(self._controller.cluster_view.remote(cell))
        return view

    async def reset_cache(self) -> None:
        """As `Deployment.reset_cache`."""
        await self._ask(self._controller.reset_cache.remote())

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """As `Deployment.pin_prefix`."""
        answers: tuple[tuple[ReplicaId, PinAnswered], ...]
        answers = await self._ask(self._controller.pin_prefix.remote(event))
        return answers

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """As `Deployment.unpin_prefix`."""
        await self._ask(self._controller.unpin_prefix.remote(event))

    async def stats(self) -> ShellStats:
        """Return where the time of starting went, and the figures of each rank's process."""
        ranks = await self._ask(self._controller.stats.remote())
        loads = [rank.timings["load_s"] for rank in ranks if "load_s" in rank.timings]
        return ShellStats(self._timings | {"model_load_s": max(loads, default=0.0)}, ranks)

    async def status(self) -> ControllerStatus:
        """Return who the controller is now, and which replicas live."""
        status: ControllerStatus = await self._ask(self._controller.status.remote())
        return status

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except RayTaskError as error:
            raise unwrapped(error, self._config.name) from None
        except ActorUnavailableError as error:
            reason = "its controller does not answer now, and is started anew where it has ended"
            raise ControllerAwayError(self._config.name, reason) from error
        except RayError as error:
            reason = f"its controller is gone ({death_cause(error)})"
            raise DeploymentError(self._config.name, reason) from error

    async def poll(
        self, replica_id: ReplicaId, incarnation: Incarnation, message: PollTokens
    ) -> Delivery:
        """Wait for new tokens of the consumer's requests on one replica.

        Raises:
            ReplicaLostError: This incarnation is gone.
        """
        timeouts = self._config.timeouts
        # The controller notices what is silent; this one is for a controller that is gone too.
        limit_s = timeouts.poll_timeout_s + max(
            timeouts.collective_timeout_s, 2.0 * timeouts.deployment_lease_s
        )
        try:
            rank_zero = self._rank_zero(replica_id, incarnation)
            async with asyncio.timeout(limit_s):
                delivery: Delivery = await rank_zero.poll.remote(message)
            return await self._explained(delivery)
        except TimeoutError:
            reason = f"its first rank has not answered a poll for {limit_s:g} s"
        except RayTaskError as error:
            raise unwrapped(error, self._config.name) from None
        except (RayError, ValueError) as error:
            known = await self._why_lost(replica_id, incarnation)
            reason = known or f"rank 0: its process is gone ({death_cause(error)})"
        self._ranks.pop((replica_id, incarnation), None)
        raise ReplicaLostError(replica_id, incarnation, reason)

    async def _explained(self, delivery: Delivery) -> Delivery:
        """Name the rank that broke the group, where rank 0 only saw a connection break."""
        if delivery.fenced is None:
            return delivery
        reason = await self._why_lost(delivery.replica_id, delivery.incarnation)
        if reason is None or reason == delivery.fenced:
            return delivery
        return dataclasses.replace(delivery, fenced=f"{reason} ({delivery.fenced})")

    def _rank_zero(self, replica_id: ReplicaId, incarnation: Incarnation) -> Any:
        key = (replica_id, incarnation)
        if key not in self._ranks:
            name = rank_name(replica_id, incarnation, 0)
            self._ranks[key] = ray.get_actor(name, namespace=namespace_of(self._config.name))
        return self._ranks[key]

    async def _why_lost(self, replica_id: ReplicaId, incarnation: Incarnation) -> str | None:
        try:
            reason: str | None = await self._controller.why_lost.remote(replica_id, incarnation)
        except RayError:
            return None
        return reason

    def shutdown(self) -> None:
        """End the deployment, unless it is kept alive, shared or another's; leave the cluster.

        Idempotent; blocks until nothing of it is left.
        """
        if self._shut_down.is_set():
            return
        self._shut_down.set()
        self._renewer.join()
        with contextlib.suppress(RayError, GetTimeoutError):
            if self._may_end():
                ray.get(self._controller.end.remote("shut down"), timeout=_END_TIMEOUT_S)
            elif ray.is_initialized():
                ray.get(self._controller.leave.remote(self._owner), timeout=_END_TIMEOUT_S)
        self._remove()

    def _may_end(self) -> bool:
        # Once disconnected, the lease does it.
        is_own = self._created and not self._is_shared and not self._config.keep_alive
        return is_own and ray.is_initialized()

    def _remove(self) -> None:
        try:
            if self._may_end():
                remove_deployment(self._config.name)
        finally:
            disconnect(self._connection)
