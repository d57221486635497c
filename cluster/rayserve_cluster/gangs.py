"""The lives of all replicas on the cluster: here they are started, watched and ended.

Who lives and who is given up is the core's decision. What is seen of the processes becomes its
events, and what it asks for is carried out.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from rayserve_cluster.gang import Gang
from rayserve_cluster.launch import await_removal
from rayserve_cluster.placement import (
    actors_of,
    alive_nodes,
    groups_of,
    life_of,
    namespace_of,
    rank_name,
    rank_resources,
    remove_group,
    replica_ids,
    spread,
)
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.replica_messages import RegisterReplica

Life = tuple[ReplicaId, Incarnation]

_FIRST: Final = Incarnation(0)

logger = logging.getLogger(__name__)


class Gangs:
    """All gangs that have not been ended.

    Belongs to the event loop on which it is made.

    Args:
        config: Of the deployment.
        term: Of the controller.
        on_event: Told of gangs that have started, that could not be, and that are lost.
        spawn: Runs a coroutine as a task, whose errors are the controller's.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        term: Term,
        on_event: Callable[[RegisterReplica | LoseReplica], object],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._config = config
        self._term = term
        self._on_event = on_event
        self._spawn = spawn
        self._gangs: dict[Life, Gang] = {}
        # Each starts a gang and watches it, until it is lost or stopped.
        self._keepers: dict[Life, asyncio.Task[None]] = {}

    def get(self, life: Life) -> Gang | None:
        """Return a gang that has not been ended."""
        return self._gangs.get(life)

    def of(self, lives: Iterable[Life]) -> list[Gang]:
        """Return those of these lives that have not been ended, by replica id."""
        return [self._gangs[life] for life in sorted(lives) if life in self._gangs]

    # --- starting -------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Start the first life of every replica, and wait until all serve.

        Raises:
            PagedError: One of them cannot be started; others may still start, or serve.
        """
        config = self._config
        ranks = [self._resources()] * config.parallel.tensor_parallel_size
        names = replica_ids(config)
        nodes = spread(len(names), ranks, alive_nodes())
        starts: list[asyncio.Future[None]] = []
        for name, node in zip(names, nodes, strict=True):
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gang = self._new((name, _FIRST))
            self._keep(gang, self._start_first(gang, node, started))
            starts.append(started)
        try:
            await asyncio.gather(*starts)
        finally:
            for started in starts:
                started.cancel()

    async def _start_first(
        self, gang: Gang, node_id: str | None, started: "asyncio.Future[None]"
    ) -> None:
        try:
            registered = await gang.start(node_id, _this_actor())
        except Exception as error:  # Whoever waits for it raises it.
            if not started.done():
                started.set_exception(error)
            return
        self._on_event(registered)
        if not started.done():
            started.set_result(None)
        await self._watch(gang)

    def start(self, life: Life) -> None:
        """Begin to start a replica's next life, once nothing is left of those before."""
        gang = self._new(life)
        self._keep(gang, self._start_again(gang))

    async def _start_again(self, gang: Gang) -> None:
        life = (gang.replica_id, gang.incarnation)
        try:
            await self._end_others(life)
            registered = await gang.start(None, _this_actor())
        except Exception as error:  # Outermost: it becomes an event.
            reason = f"it could not be started ({type(error).__name__}: {error})"
            logger.warning("%s, as %d: %s", *life, reason)
            self._on_event(LoseReplica(*life, reason))
            return
        self._on_event(registered)
        await self._watch(gang)

    async def _end_others(self, life: Life) -> None:
        """End all other lives of a replica, and wait until their processes are gone.

        Raises:
            DeploymentError: Some are still there after 20 s.
        """
        replica_id = life[0]
        others = [other for other in self._gangs if other[0] == replica_id and other != life]
        await asyncio.gather(*(self.stop(other, "its next life is started") for other in others))
        deployment = self._config.name

        def left() -> list[str]:
            # Nothing of this life is there yet.
            return [name for name in actors_of(deployment) if name.startswith(f"{replica_id}.")]

        await asyncio.to_thread(await_removal, deployment, left)

    def _new(self, life: Life) -> Gang:
        self._gangs[life] = gang = Gang(self._config, *life, self._resources(), self._term)
        return gang

    def _keep(self, gang: Gang, coroutine: Coroutine[Any, Any, None]) -> None:
        self._keepers[gang.replica_id, gang.incarnation] = self._spawn(coroutine)

    def _resources(self) -> dict[str, float]:
        return rank_resources(ray.cluster_resources())

    # --- those of before ------------------------------------------------------------------

    def adopt(self) -> tuple[Life, ...]:
        """Take over what a controller before this one has left: the latest life of each replica,
        where all its ranks are there. The rest is removed.

        Returns:
            The lives that were taken over; some of them may still be starting.
        """
        config = self._config
        groups = {life_of(name): group for name, group in groups_of(config.name).items()}
        latest: dict[ReplicaId, Incarnation] = {}
        for replica_id, incarnation in groups:
            latest[replica_id] = max(latest.get(replica_id, incarnation), incarnation)
        for life, group in groups.items():
            workers = self._find_ranks(life) if latest[life[0]] == life[1] else None
            if workers is None:
                remove_group(group)
                continue
            self.take_over(life, group, workers)
        return tuple(sorted(self._gangs))

    def take_over(self, life: Life, group: PlacementGroup | None, workers: Sequence[Any]) -> None:
        """Watch a gang that was created elsewhere, and end it when it is stopped.

        Args:
            life: Whose.
            group: The room that it gives back; None for none.
            workers: Handles of its ranks.
        """
        gang = self._new(life)
        gang.adopt(group, workers)
        self._keep(gang, self._watch(gang))

    def _find_ranks(self, life: Life) -> Sequence[Any] | None:
        namespace = namespace_of(self._config.name)
        try:
            return [
                ray.get_actor(rank_name(*life, rank), namespace=namespace)
                for rank in range(self._config.parallel.tensor_parallel_size)
            ]
        except ValueError:
            return None

    # --- ending ---------------------------------------------------------------------------

    async def stop(self, life: Life, reason: str) -> None:
        """End a gang and give its room back; one that has ended is ignored.

        Idempotent; every call waits for the end.
        """
        gang = self._gangs.get(life)
        if gang is None:
            return
        keeper = self._keepers.pop(life, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        await gang.stop(reason)
        self._gangs.pop(life, None)

    async def stop_all(self, reason: str) -> None:
        """End all gangs."""
        await asyncio.gather(*(self.stop(life, reason) for life in list(self._gangs)))

    async def _watch(self, gang: Gang) -> None:
        reason = await gang.lost(self._config.timeouts.rank_liveness_s)
        self._on_event(LoseReplica(gang.replica_id, gang.incarnation, reason))


def _this_actor() -> Any:
    return ray.get_runtime_context().current_actor
