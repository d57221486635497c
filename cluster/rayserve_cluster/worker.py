"""The actor of one rank: it owns one device, its block pool, its kernels and its shard.

Methods only enqueue: loading and steps run in threads of their own, so that a poll can hang for
as long as there is nothing to say, and a ping is answered whatever the others do.
"""

import asyncio
import collections
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from rayserve_cluster.health import Loss
from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.errors import DeploymentError, PagedError, ReplicaLostError
from rayserve_paged.core.holdings import BlockView, block_view
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.replica_messages import (
    ControllerMessage,
    PinAnswered,
    PinPrefix,
    PollTokens,
    RegisterReplica,
    ReplicaReport,
    UnpinPrefix,
)
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.event_files import open_replica_log
from rayserve_paged.process_times import resident_bytes

if TYPE_CHECKING:  # These take seconds to import: a thread does it, while the actor answers.
    from torch.distributed import TCPStore

    from rayserve_cluster.rank import Rank
    from rayserve_cluster.step_loop import ReplicaHost
    from rayserve_cluster.tp_group import TpGroup
    from rayserve_paged.core.accounting import Accounting

CONCURRENCY: Final = {"io": 10_000, "health": 16}
"""Each group has an event loop in a thread of its own; a pending poll takes a place in `io`."""

_REMOVAL_TIMEOUT_S: Final = 5.0
_REPORT_RETRY_S: Final = 0.5

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RankSpec:
    """Which rank of which replica an actor is.

    Args:
        config: Of the deployment.
        replica_id: The replica.
        incarnation: Its life.
        rank: Place in the replica, from 0.
        has_gpu: Ray gave it a GPU, the only one that it sees.
        term: Of the controller that starts it.
    """

    config: DeploymentConfig
    replica_id: ReplicaId
    incarnation: Incarnation
    rank: int
    has_gpu: bool
    term: Term


@dataclasses.dataclass(frozen=True, slots=True)
class RankReady:
    """What a started rank tells the controller."""

    limits: ModelLimits
    scope: BlockScope
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankStats:
    """Figures of one rank's process.

    Args:
        replica_id: Its replica.
        rank: Its rank.
        pid: Its process.
        node_id: Its Ray node.
        rss_bytes: Resident memory now.
        num_threads: Of tensor operations.
        calls: Actor calls received so far, by method.
        num_reports: Actor calls made so far, all of them reports to the controller.
        timings: Seconds that the parts of starting took.
    """

    replica_id: ReplicaId
    rank: int
    pid: int
    node_id: str
    rss_bytes: int
    num_threads: int
    calls: dict[str, int]
    num_reports: int
    timings: dict[str, float]


class Worker:
    """One rank. Rank 0 hosts the state machine of the replica, the others follow its plans."""

    def __init__(self, spec: RankSpec, controller: Any) -> None:
        """Return at once; `start` does the work.

        Args:
            spec: Which rank this is.
            controller: Handle of the deployment's controller.
        """
        self._spec = spec
        self._controller = controller
        self._timings: dict[str, float] = {}
        self._calls: collections.Counter[str] = collections.Counter()
        self._num_reports = 0
        self._num_threads = 1
        self._store: TCPStore | None = None
        self._group: TpGroup | None = None
        self._host: ReplicaHost | None = None
        self._broken: Loss | None = None
        self._reports: asyncio.Queue[ReplicaReport | RegisterReplica | LoseReplica] = (
            asyncio.Queue()
        )
        self._sender: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()
        self._importer = threading.Thread(target=self._import, name="import", daemon=True)
        self._importer.start()
        threading.Thread(target=self._await_silence, name="lease", daemon=True).start()

    def _import(self) -> None:
        begin = time.monotonic()
        import rayserve_cluster.rank  # noqa: F401

        self._timings["import_s"] = time.monotonic() - begin

    @ray.method(concurrency_group="io")
    async def serve_store(self) -> int:
        """Rank 0: open the store where the ranks meet, and return its port on loopback."""
        self._calls["serve_store"] += 1

        def serve() -> int:
            # Two threads that import torch at once can each find it half made.
            self._importer.join()
            from rayserve_cluster.tp_group import serve_store

            self._store = serve_store(timeout_s=self._spec.config.timeouts.start_timeout_s)
            return self._store.port

        return await asyncio.to_thread(serve)

    @ray.method(concurrency_group="io")
    async def start(
        self, store_port: int | None, num_ranks_here: int, num_cores: float
    ) -> RankReady:
        """Load the shard, meet the other ranks, begin to serve.

        Args:
            store_port: Where rank 0 serves the store; None where there is one rank.
            num_ranks_here: Ranks that share this node.
            num_cores: Cores of the node.

        Raises:
            PagedError: The model cannot be loaded, or not at this width, or the ranks not meet.
        """
        self._calls["start"] += 1
        loop = asyncio.get_running_loop()
        self._sender = loop.create_task(self._send_reports())
        rank = await asyncio.to_thread(self._load, store_port, num_ranks_here, num_cores)
        if self._spec.rank == 0:
            from rayserve_cluster.rank import host_replica

            def on_report(report: ReplicaReport | RegisterReplica | LoseReplica) -> None:
                loop.call_soon_threadsafe(self._reports.put_nowait, report)

            config, name = self._spec.config, (self._spec.replica_id, self._spec.incarnation)
            folder = config.event_log_dir
            record = None if folder is None else open_replica_log(folder, *name)
            self._host = host_replica(config, rank, *name, on_report, record, self._spec.term)
            self._host.start()
        else:
            threading.Thread(target=self._follow, args=(rank,), name="step", daemon=True).start()
        return RankReady(rank.limits, rank.scope, os.getpid())

    def _load(self, store_port: int | None, num_ranks_here: int, num_cores: float) -> "Rank":
        begin = time.monotonic()
        self._importer.join()
        import torch

        from rayserve_cluster.rank import start_rank
        from rayserve_cluster.tp_group import LOOPBACK, TpGroup, join_store

        imported = time.monotonic()
        # Where two threads compute on a core, each parallel region waits for the slower one.
        self._num_threads = max(1, int(num_cores // num_ranks_here))
        torch.set_num_threads(self._num_threads)
        config = self._spec.config
        if self._store is None and store_port is not None:
            self._store = join_store(
                LOOPBACK, store_port, timeout_s=config.timeouts.start_timeout_s
            )
        self._group = TpGroup(
            self._spec.rank,
            config.parallel.tensor_parallel_size,
            timeout_s=config.timeouts.collective_timeout_s,
            device=torch.device("cuda", 0) if self._spec.has_gpu else None,
        )
        rank = start_rank(
            config,
            self._group,
            self._store,
            f"{self._spec.replica_id}.{self._spec.incarnation}",
            num_ranks_here=1 if self._spec.has_gpu else num_ranks_here,
        )
        self._timings["await_import_s"] = imported - begin
        self._timings["load_s"] = time.monotonic() - imported
        return rank

    def _follow(self, rank: "Rank") -> None:
        from rayserve_cluster.executor import follow
        from rayserve_cluster.tp_group import GroupBrokenError

        try:
            follow(rank.group, rank.runner)
        except GroupBrokenError as error:
            self._broken = Loss(str(error), is_symptom=True)
        except Exception as error:  # Outermost loop of a follower: the controller must hear of it.
            self._broken = Loss(f"{type(error).__name__}: {error}", is_symptom=False)

    async def _send_reports(self) -> None:
        # One call in flight at a time keeps the reports in order.
        while True:
            report = await self._reports.get()
            self._num_reports += 1
            while True:
                try:
                    await self._controller.report.remote(report)
                    break
                except RayTaskError as error:
                    # It was taken in, and is of no use to the controller.
                    logger.warning("a report of %s is lost: %s", self._spec.replica_id, error)
                    break
                except RayError:
                    # Where the controller is gone for good, its lease will end this rank.
                    await asyncio.sleep(_REPORT_RETRY_S)

    @ray.method(concurrency_group="io")
    async def post(self, events: Sequence[ControllerMessage]) -> None:
        """Rank 0: hand events to the replica, in order; dropped while it is still starting.

        Nothing is placed on it then, and a controller that asks what it has asks again.
        """
        self._calls["post"] += 1
        if self._host is None:
            return
        for event in events:
            self._host.post(event)

    @ray.method(concurrency_group="io")
    async def poll(self, message: PollTokens) -> Delivery:
        """Rank 0: wait for new tokens of a consumer's requests.

        Raises:
            ReplicaLostError: The replica has ended.
        """
        self._calls["poll"] += 1
        return await asyncio.wrap_future(self._serving().poll(message))

    @ray.method(concurrency_group="io")
    async def accounting(self) -> "Accounting":
        """Rank 0: take the ledger at the end of a step."""
        self._calls["accounting"] += 1
        return await asyncio.wrap_future(self._serving().accounting())

    @ray.method(concurrency_group="io")
    async def block_view(self, cell: int | None = None) -> BlockView:
        """Rank 0: take the map of its blocks at the end of a step, with the holders of a cell."""
        self._calls["block_view"] += 1
        holdings = await asyncio.wrap_future(self._serving().holdings())
        return await asyncio.to_thread(block_view, holdings, cell)

    @ray.method(concurrency_group="io")
    async def reset_cache(self) -> None:
        """Rank 0: forget the prefix cache; returns when it is done."""
        self._calls["reset_cache"] += 1
        await asyncio.wrap_future(self._serving().reset_cache())

    @ray.method(concurrency_group="io")
    async def pin_prefix(self, event: PinPrefix) -> PinAnswered:
        """Rank 0: keep the cached blocks of a prefix."""
        self._calls["pin_prefix"] += 1
        return await asyncio.wrap_future(self._serving().pin_prefix(event))

    @ray.method(concurrency_group="io")
    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """Rank 0: let go of a pin."""
        self._calls["unpin_prefix"] += 1
        self._serving().post(event)

    def _serving(self) -> "ReplicaHost":
        if self._host is None:
            raise ReplicaLostError(self._spec.replica_id, self._spec.incarnation, "not started")
        return self._host

    @ray.method(concurrency_group="io")
    async def stats(self) -> RankStats:
        """Return the figures of this process."""
        self._calls["stats"] += 1
        return RankStats(
            replica_id=self._spec.replica_id,
            rank=self._spec.rank,
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            rss_bytes=resident_bytes(),
            num_threads=self._num_threads,
            calls=dict(self._calls),
            num_reports=self._num_reports,
            timings=dict(self._timings),
        )

    @ray.method(concurrency_group="health")
    async def ping(self) -> Loss | None:
        """Answer the controller, whose silence would end this rank: None, or what is broken."""
        self._calls["ping"] += 1
        self._heard_at = time.monotonic()
        limit_s = self._spec.config.timeouts.step_timeout_s
        if self._broken is None and self._host is not None and self._host.stalled_s > limit_s:
            return Loss(f"its step loop has not moved for {limit_s:g} s", is_symptom=False)
        return self._broken

    @ray.method(concurrency_group="health")
    async def stop(self, reason: str) -> None:
        """End what runs: requests fail with the reason, the tensor group is aborted."""
        self._calls["stop"] += 1
        if self._host is not None:
            await asyncio.to_thread(self._host.stop, reason)
        elif self._group is not None:
            await asyncio.to_thread(self._group.abort, reason)

    def _await_silence(self) -> None:
        lease_s = self._spec.config.timeouts.deployment_lease_s
        while (left_s := self._heard_at + lease_s - time.monotonic()) > 0.0:
            time.sleep(left_s)
        # Whoever could give the resources back is gone, the controller and the driver both.
        remover = threading.Thread(target=_remove_own_group, daemon=True)
        remover.start()
        remover.join(_REMOVAL_TIMEOUT_S)
        os._exit(1)


def _remove_own_group() -> None:
    group = ray.util.get_current_placement_group()
    if group is not None:
        ray.util.remove_placement_group(group)


def unwrapped(error: RayTaskError, deployment: str) -> Exception:
    """Return the error that an actor raised, in place of Ray's wrapper around its traceback."""
    if isinstance(error.cause, PagedError):
        return error.cause
    return DeploymentError(deployment, f"{type(error.cause).__name__}: {error.cause}")
