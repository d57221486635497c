"""What the controller can take as an actor on Ray: as `placement_bench`, with every message real.

The controller is the deployment's own. One process stands in for the first ranks of all replicas:
it is sent the assignments, answers the pings, and reports. This process submits.
"""

import asyncio
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import psutil
import ray

from rayserve_cluster.controller_actor import ControllerActor
from rayserve_cluster.launch import connect, disconnect
from rayserve_paged.core.config import DeploymentConfig, ModelConfig, ParallelConfig
from rayserve_paged.core.controller_messages import Placed, SubmitRequest
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.ids import Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import AssignRequest, ControllerMessage
from rayserve_paged.experiments.placement_bench import (
    NUM_OPEN_EACH,
    NUM_REQUESTS,
    MadeUpReplica,
    requests,
)

_NUM_SUBMITTING: Final = 64
_MAX_CALLS: Final = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class _Tally:
    """What the replicas have done so far.

    Args:
        num_assigned: Requests that have arrived.
        num_reports: Reports that the controller has taken in.
        num_keys: That were published or evicted in these.
    """

    num_assigned: int
    num_reports: int
    num_keys: int


class _Replicas:
    """Stands in for the first ranks of all replicas; an actor.

    Args:
        num_replicas: How many.
    """

    def __init__(self, num_replicas: int) -> None:
        made_up = [MadeUpReplica(index) for index in range(num_replicas)]
        self._replicas = {replica.replica_id: replica for replica in made_up}
        self._open: defaultdict[ReplicaId, deque[AssignRequest]] = defaultdict(deque)
        self._controller: Any = None
        self._num_assigned = self._num_reports = self._num_keys = 0

    async def register(self, controller: Any) -> None:
        """Register all at a controller."""
        self._controller = controller
        for replica in self._replicas.values():
            await controller.report.remote(replica.registration)

    async def post(self, replica_id: ReplicaId, events: tuple[ControllerMessage, ...]) -> None:
        """Take in what the controller sends to a replica."""
        waiting = self._open[replica_id]
        for event in events:
            if not isinstance(event.event, AssignRequest):
                continue
            self._num_assigned += 1
            waiting.append(event.event)
            if len(waiting) > NUM_OPEN_EACH:
                report = self._replicas[replica_id].finish(waiting.popleft())
                await self._controller.report.remote(report)
                self._num_reports += 1
                self._num_keys += len(report.published) + len(report.evicted)

    async def ping(self) -> None:
        """All is well."""

    async def tally(self) -> _Tally:
        """Return what was done so far."""
        return _Tally(self._num_assigned, self._num_reports, self._num_keys)


class _Seat:
    """A replica's place among the replicas of one actor, as the handle of its first rank."""

    def __init__(self, replica_id: ReplicaId, replicas: Any) -> None:
        self._replica_id = replica_id
        self._replicas = replicas
        self.ping = replicas.ping

    @property
    def post(self) -> "_Seat":
        """The method that `remote` calls."""
        return self

    def remote(self, events: tuple[ControllerMessage, ...]) -> Any:
        """Send events to the replica."""
        return self._replicas.post.remote(self._replica_id, events)


class _Controller(ControllerActor):
    """The deployment's controller, whose gangs are seats."""

    async def seat(self, replica_ids: tuple[ReplicaId, ...], replicas: Any) -> int:
        """Give each replica a seat; return this process's id."""
        for replica_id in replica_ids:
            seat = _Seat(replica_id, replicas)
            self._gangs.take_over((replica_id, Incarnation(0)), None, [seat])
        return (await self.status()).pid


def rates(num_replicas: int, num_requests: int = NUM_REQUESTS) -> dict[str, float]:
    """Return what the controller's actor takes in, beside the processes that ask it.

    Each replica has 8 requests open and 2,000 keys at most, and is pinged as a deployment's ranks
    are. The first requests, which fill the replicas, are not counted. Placements, assignments and
    reports go on side by side, as many submissions at a time as a busy front end has.

    Args:
        num_replicas: Live replicas of one rank each.
        num_requests: That are counted.

    Returns:
        Per second of the clock: `placements_per_s`, `reports_per_s` and `directory_updates_per_s`
        (keys that came or went); `controller_us`, processor time of the controller's process for
        a placement, its assignment, and the report that it has ended.

    Raises:
        DeploymentError: Ray cannot be started, or a request was refused.
    """
    config = DeploymentConfig(
        name="bench-placement",
        keep_alive=True,
        model=ModelConfig(model="fingerprint"),
        parallel=ParallelConfig(num_replicas=num_replicas),
    )
    connection = connect(config.name, "local")
    try:
        return asyncio.run(_measure(config, num_requests))
    finally:
        disconnect(connection)


async def _measure(config: DeploymentConfig, num_requests: int) -> dict[str, float]:
    num_replicas = config.parallel.num_replicas
    remote: Any = ray.remote
    replicas = remote(num_cpus=0, max_concurrency=_MAX_CALLS)(_Replicas).remote(num_replicas)
    options = remote(num_cpus=0, max_concurrency=_MAX_CALLS)(_Controller)
    controller = options.remote(config, "bench")
    names = tuple(ReplicaId(f"r{index}") for index in range(num_replicas))
    process = psutil.Process(await controller.seat.remote(names, replicas))
    await replicas.register.remote(controller)
    made_up = requests(num_replicas * NUM_OPEN_EACH + num_requests)
    await _submit_all(config, controller, islice(made_up, num_replicas * NUM_OPEN_EACH))
    before, cpu_s = await replicas.tally.remote(), sum(process.cpu_times()[:2])
    begin = time.perf_counter()
    await _submit_all(config, controller, made_up)
    took_s = time.perf_counter() - begin
    after, cpu_s = await replicas.tally.remote(), sum(process.cpu_times()[:2]) - cpu_s
    return {
        "placements_per_s": num_requests / took_s,
        "reports_per_s": (after.num_reports - before.num_reports) / took_s,
        "directory_updates_per_s": (after.num_keys - before.num_keys) / took_s,
        "controller_us": cpu_s / num_requests * 1e6,
    }


async def _submit_all(config: DeploymentConfig, controller: Any, made_up: Iterator[Any]) -> None:
    """Submit requests, so many at a time, until the last one is placed."""

    async def submit() -> None:
        for request in made_up:
            answer = await controller.submit.remote(SubmitRequest(request))
            if not isinstance(answer, Placed):
                raise DeploymentError(config.name, f"a request was refused: {answer.error}")

    await asyncio.gather(*(submit() for _ in range(_NUM_SUBMITTING)))
