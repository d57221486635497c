"""The ranks of replicas as processes of this machine, which run steps at once and time them.

Each process has its share of the cores, as the ranks of a deployment have, and there is no Ray.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.profiling.step_plans import StepShape, make_plan

_END_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
    """How often a step is repeated.

    Args:
        least: Times at least, and
        seconds: for so long, but
        most: times at most.
    """

    least: int = 3
    seconds: float = 0.3
    most: int = 30


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What the first rank of a replica is told to run, until it is told something else."""

    shape: StepShape
    rounds: Rounds


@dataclasses.dataclass(frozen=True, slots=True)
class _Seat:
    """Which rank a process is, and where the ranks of its replica meet."""

    config: DeploymentConfig
    replica: int
    rank: int
    num_threads: int
    num_ranks_here: int


class ReplicaProcesses:
    """Replicas that are loaded and wait for steps to run; a context manager.

    Args:
        config: Of the deployment: model, cache, batch and width, and how many replicas.

    Raises:
        PagedError: What kept a rank from starting.
        DeploymentError: A process ended.
    """

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        width, num_replicas = config.parallel.tensor_parallel_size, config.parallel.num_replicas
        num_ranks = width * num_replicas
        self.num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._firsts: list[Connection] = []
        self._ends: list[Connection] = []
        began_s = time.monotonic()
        try:
            for replica in range(num_replicas):
                port = 0
                for rank in range(width):
                    here, there = context.Pipe()
                    seat = _Seat(config, replica, rank, self.num_threads, num_ranks)
                    process = context.Process(
                        target=_run_rank, args=(seat, port, there), daemon=True
                    )
                    process.start()
                    there.close()
                    self._processes.append(process)
                    self._ends.append(here)
                    if rank == 0:
                        self._firsts.append(here)
                        if width > 1:
                            port = self._receive(here)
            limits = [self._receive(end) for end in self._ends]
        except BaseException:
            self.close()
            raise
        self.load_s = time.monotonic() - began_s
        self.limits: ModelLimits = limits[0]

    def time_steps(self, shape: StepShape, num_active: int, rounds: Rounds) -> list[float]:
        """Run a step again and again on several replicas at once.

        Args:
            shape: The step.
            num_active: Replicas that run it; the others rest.
            rounds: How often each runs it.

        Returns:
            Seconds of each round, of all these replicas; all of them ran in all of these.
        """
        active = self._firsts[:num_active]
        for end in active:
            end.send(_Task(shape, rounds))
        for end in active:
            self._receive(end)  # It has run the step once.
        for end in active:
            end.send("go")
        seconds = [one for end in active for one in self._receive(end)]
        for end in active:
            end.send("rest")
        for end in active:
            self._receive(end)
        return seconds

    def _receive(self, end: Connection) -> Any:  # noqa: ANN401
        try:
            answer = end.recv()
        except (EOFError, OSError) as error:
            reason = "a rank's process ended while it was measured"
            raise DeploymentError(self._config.name, reason) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End all processes. Idempotent."""
        for end in self._firsts:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _run_rank(seat: _Seat, port: int, end: Connection) -> None:
    """Serve as one rank until the parent says that it is over, or is gone."""
    try:
        _serve(seat, port, end)
    except (EOFError, OSError):
        pass  # The parent is gone.
    except Exception as error:  # The process's outermost frame: the parent raises it.
        with contextlib.suppress(OSError):
            end.send(error)


def _serve(seat: _Seat, port: int, end: Connection) -> None:
    import torch

    from rayserve_cluster.executor import RankZeroExecutor, follow
    from rayserve_cluster.rank import start_rank
    from rayserve_cluster.tp_group import LOOPBACK, TpGroup, join_store, serve_store

    torch.set_num_threads(seat.num_threads)
    config = seat.config
    width = config.parallel.tensor_parallel_size
    patience_s = config.timeouts.start_timeout_s
    store = None
    if width > 1 and seat.rank == 0:
        store = serve_store(timeout_s=patience_s)
        end.send(store.port)
    elif width > 1:
        store = join_store(LOOPBACK, port, timeout_s=patience_s)
    on_gpu = torch.cuda.device_count() >= seat.num_ranks_here
    device = torch.device("cuda", seat.replica * width + seat.rank) if on_gpu else None
    # Nobody sends heartbeats between measurements.
    group = TpGroup(seat.rank, width, timeout_s=patience_s, device=device)
    started = start_rank(
        config,
        group,
        store,
        f"profile.{seat.replica}",
        num_ranks_here=1 if on_gpu else seat.num_ranks_here,
    )
    end.send(started.limits)
    if seat.rank:
        follow(started.group, started.runner)
        return
    executor = RankZeroExecutor(started.group, started.runner)
    while (task := end.recv()) is not None:
        _time_task(task, executor, started.limits, end)
    executor.shutdown()


def _time_task(task: _Task, executor: Any, limits: ModelLimits, end: Connection) -> None:  # noqa: ANN401
    plan = make_plan(task.shape, limits)
    executor.execute(plan, _never)
    # From the second time on, as in a batch that goes on.
    plan = dataclasses.replace(plan, starts=())
    executor.execute(plan, _never)
    end.send("ready")
    end.recv()
    rounds, seconds = task.rounds, list[float]()
    ends_s = time.perf_counter() + rounds.seconds
    while len(seconds) < rounds.least or (
        len(seconds) < rounds.most and time.perf_counter() < ends_s
    ):
        begin = time.perf_counter()
        executor.execute(plan, _never)
        seconds.append(time.perf_counter() - begin)
    end.send(seconds)
    # The others may not be done: they are timed beside this one.
    while not end.poll():
        executor.execute(plan, _never)
    end.recv()
    end.send("rests")


def _never() -> bool:
    return False
