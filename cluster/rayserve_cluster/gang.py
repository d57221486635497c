"""One incarnation of a replica on the cluster: its placement group and its rank actors."""

import asyncio
import collections
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayserve_cluster.health import Ping, find_cause, watch_rank
from rayserve_cluster.placement import (
    alive_nodes,
    create_group,
    group_name,
    namespace_of,
    rank_name,
    remove_group,
    wait_for_group,
)
from rayserve_cluster.worker import CONCURRENCY, RankReady, RankSpec, RankStats, Worker, unwrapped
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.holdings import BlockView
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.replica_messages import (
    ControllerMessage,
    PinAnswered,
    PinPrefix,
    RegisterReplica,
    UnpinPrefix,
)

_STOP_GRACE_S: Final = 0.5
"""What a rank 0 gets to tell its consumers why they lose their requests."""
_CAUSE_PATIENCE_S: Final = 0.5


class Gang:
    """The ranks of one incarnation: they start together, and end together."""

    def __init__(
        self,
        config: DeploymentConfig,
        replica_id: ReplicaId,
        incarnation: Incarnation,
        resources: dict[str, float],
        term: Term,
    ) -> None:
        """Describe a gang; `start` creates it.

        Args:
            config: Of the deployment.
            replica_id: The replica.
            incarnation: Its life.
            resources: What each rank asks for.
            term: Of the controller.
        """
        self.replica_id = replica_id
        self.incarnation = incarnation
        self._config = config
        self._term = term
        self._resources = [resources] * config.parallel.tensor_parallel_size
        self._group: PlacementGroup | None = None
        self._workers: list[Any] = []
        self._pids: dict[int, int] = {}
        self._outbox: collections.deque[ControllerMessage]
        self._outbox = collections.deque()
        self._posting: asyncio.Task[None] | None = None
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, node_id: str | None, controller: Any) -> RegisterReplica:
        """Create the ranks, and wait until they serve.

        Args:
            node_id: Node to prefer.
            controller: Handle that the ranks report to.

        Raises:
            PagedError: A rank could not start.
            DeploymentError: There is no room, or it took too long.
        """
        timeout_s = self._config.timeouts.start_timeout_s
        name = group_name(self._config.name, self.replica_id, self.incarnation)
        group = self._group = create_group(name, self._resources, node_id)
        node_id = await wait_for_group(self._config.name, group, self._resources, timeout_s)
        # Not before: an actor that waits for its group's room would outlive the group.
        self._workers = [self._create_rank(group, rank, controller) for rank in range(self.size)]
        # The ranks are pinged from the start: silence would make them end themselves.
        lost = asyncio.create_task(self.lost(timeout_s))
        started = asyncio.create_task(self._start_ranks(node_id))
        try:
            await asyncio.wait({lost, started}, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if started.done():
                return started.result()
            reason = lost.result() if lost.done() else f"not ready within {timeout_s:g} s"
            raise DeploymentError(self._config.name, f"{self.replica_id} cannot start: {reason}")
        finally:
            await _cancel(lost, started)

    def adopt(self, group: PlacementGroup | None, workers: Sequence[Any]) -> None:
        """Take over ranks that were created elsewhere; not with `start`."""
        self._group = group
        self._workers = list(workers)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._resources)

    def _create_rank(self, group: PlacementGroup, rank: int, controller: Any) -> Any:
        resources = self._resources[rank]
        remote: Any = ray.remote  # Its annotations do not know concurrency groups.
        actor_class = remote(concurrency_groups=CONCURRENCY)(Worker)
        options = actor_class.options(
            name=rank_name(self.replica_id, self.incarnation, rank),
            namespace=namespace_of(self._config.name),
            lifetime="detached",
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank
            ),
        )
        spec = RankSpec(
            config=self._config,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            rank=rank,
            has_gpu="GPU" in resources,
            term=self._term,
        )
        return options.remote(spec, controller)

    async def _start_ranks(self, node_id: str) -> RegisterReplica:
        nodes = alive_nodes()
        num_cores = nodes.get(node_id, {}).get("CPU", 1.0)
        num_ranks_here = self._num_ranks_here(len(nodes))
        try:
            port = await self._workers[0].serve_store.remote() if self.size > 1 else None
            ready: list[RankReady] = await asyncio.gather(
                *(worker.start.remote(port, num_ranks_here, num_cores) for worker in self._workers)
            )
        except RayTaskError as error:
            raise unwrapped(error, self._config.name) from None
        except RayActorError:
            # The watch on the ranks knows which one it was.
            await asyncio.Event().wait()
            raise
        self._pids = {rank: answer.pid for rank, answer in enumerate(ready)}
        return RegisterReplica(self.replica_id, self.incarnation, ready[0].limits, ready[0].scope)

    def _num_ranks_here(self, num_nodes: int) -> int:
        # As the replicas are spread; at worst, a few threads more than cores.
        return -(-self._config.parallel.num_replicas // max(1, num_nodes)) * self.size

    async def lost(self, liveness_s: float) -> str:
        """Ping all ranks until one of them is lost, or rank 0 refuses an event.

        Returns:
            Which one, and why.
        """
        watches = [asyncio.create_task(watch_rank(ping, liveness_s)) for ping in self._pings()]
        try:
            ends: list[asyncio.Future[Any]] = [*watches, self._refused]
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        finally:
            await _cancel(*(watch for watch in watches if not watch.done()))
        if self._refused.done():
            return self._refused.result()
        rank, loss = next(
            (rank, watch.result())
            for rank, watch in enumerate(watches)
            if watch.done() and not watch.cancelled()
        )
        cause = await self.cause() if loss.is_symptom else None
        return cause or self._blame(rank, loss.reason)

    async def cause(self) -> str | None:
        """Return which rank broke the group, and how; None where all of them answer."""
        found = await find_cause(self._pings(), _CAUSE_PATIENCE_S)
        return None if found is None else self._blame(found[0], found[1].reason)

    def _pings(self) -> list[Ping]:
        return [worker.ping.remote for worker in self._workers]

    def _blame(self, rank: int, reason: str) -> str:
        pid = f" (pid {self._pids[rank]})" if rank in self._pids else ""
        return f"rank {rank}{pid}: {reason}"

    def post(self, event: ControllerMessage) -> None:
        """Send an event to rank 0. Events arrive in order; a dead rank 0, and one that is not
        there yet, swallow them.
        """
        if not self._workers:
            return
        self._outbox.append(event)
        if self._posting is None or self._posting.done():
            self._posting = asyncio.create_task(self._post_all())

    async def _post_all(self) -> None:
        # One call in flight at a time keeps the order; what comes meanwhile shares the next one.
        while self._outbox:
            events = tuple(self._outbox)
            self._outbox.clear()
            try:
                await self._workers[0].post.remote(events)
            except RayActorError:
                return  # The watch on the ranks tells the controller.
            except Exception as error:  # Outermost: a lost event leaves its consumer waiting.
                if not self._refused.done():
                    reason = f"rank 0: it did not take an event ({type(error).__name__}: {error})"
                    self._refused.set_result(reason)
                return

    async def accounting(self) -> Accounting | None:
        """Take the ledger at the end of a step; None where the gang is lost."""
        try:
            ledger: Accounting = await self._workers[0].accounting.remote()
        except RayError:
            return None
        return ledger

    async def block_view(self, cell: int | None = None) -> BlockView | None:
        """Take the map of its blocks at the end of a step; None where the gang is lost."""
        try:
            view: BlockView = await self._workers[0].block_view.remote(cell)
        except RayError:
            return None
        return view

    async def reset_cache(self) -> None:
        """Forget the prefix cache; a gang that is lost has none."""
        with contextlib.suppress(RayError):
            await self._workers[0].reset_cache.remote()

    async def pin_prefix(self, event: PinPrefix) -> PinAnswered | None:
        """Keep the cached blocks of a prefix; None where the gang is lost."""
        try:
            answer: PinAnswered = await self._workers[0].pin_prefix.remote(event)
        except RayError:
            return None
        return answer

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """Let go of a pin; a gang that is lost has none."""
        with contextlib.suppress(RayError):
            await self._workers[0].unpin_prefix.remote(event)

    async def stats(self) -> list[RankStats]:
        """Return the figures of the ranks that answer."""
        answers = await asyncio.gather(
            *(worker.stats.remote() for worker in self._workers), return_exceptions=True
        )
        return [answer for answer in answers if isinstance(answer, RankStats)]

    async def stop(self, reason: str) -> None:
        """End all ranks and give their room back, stopped and hung processes included.

        Idempotent; every call waits for the end.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(reason))
        await asyncio.shield(self._stopping)

    async def _stop(self, reason: str) -> None:
        if self._workers:
            told = asyncio.ensure_future(_settled(self._workers[0].stop.remote(reason)))
            await asyncio.wait({told}, timeout=_STOP_GRACE_S)
        if self._group is not None:
            remove_group(self._group)
        if self._posting is not None:
            await _cancel(self._posting)


async def _settled(answer: Any) -> None:
    with contextlib.suppress(RayError):
        await answer


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
