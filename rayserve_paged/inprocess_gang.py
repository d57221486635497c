"""One life of a replica in this process: its ranks, each in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch.distributed import HashStore

from rayserve_cluster.executor import follow
from rayserve_cluster.rank import Rank, host_replica, start_rank
from rayserve_cluster.step_loop import ReplicaHost
from rayserve_cluster.tp_group import GroupBrokenError, TpGroup
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.ids import Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import RegisterReplica, ReplicaReport
from rayserve_paged.event_files import EventFile, open_replica_log


class Gang:
    """The ranks of one replica: rank 0 in the step loop's thread, each other in one of its own.

    Args:
        config: Of the deployment.
        replica_id: The replica.
        incarnation: Its life.
        index: Its place among the replicas.
        on_event: Takes what the controller is to hear.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        replica_id: ReplicaId,
        incarnation: Incarnation,
        index: int,
        on_event: Callable[[ReplicaReport | RegisterReplica | LoseReplica], object],
    ) -> None:
        self._config = config
        self._replica_id = replica_id
        self.incarnation = incarnation
        self.index = index
        self._on_event = on_event
        self._log: EventFile | None = None
        self._host: ReplicaHost | None = None
        self._stopping = False
        self._stop_lock = threading.Lock()
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

    @property
    def has_started(self) -> bool:
        """Whether the step loop of rank 0 has started, and perhaps ended since."""
        return self._host is not None

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
        with self._stop_lock:
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
                    self._log = open_replica_log(folder, self._replica_id, self.incarnation)
                # At once, since its heartbeats keep the followers waiting.
                self._host = host_replica(
                    self._config,
                    started,
                    self._replica_id,
                    self.incarnation,
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
                self._on_event(LoseReplica(self._replica_id, self.incarnation, reason))
