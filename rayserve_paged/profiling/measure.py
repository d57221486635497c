"""Measures a whole profile: steps on the ranks, the core, and a short live run."""

import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.experiments import control_bench
from rayserve_paged.profiling.grid import (
    HeldOut,
    choose_grid,
    held_out_errors,
    held_out_shapes,
    tables_of,
    time_shapes,
)
from rayserve_paged.profiling.live import LiveFigures, measure_live
from rayserve_paged.profiling.ranks import ReplicaProcesses, Rounds
from rayserve_paged.profiling.workload import LOAD, MAX_CONTEXT, suitable_workload
from rayserve_paged.sim.profile import ControlTimes, Profile
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.synthetic import generate

_CONTROL_SEQUENCES: Final = (1, 16, 64)
_NUM_CONTROL_STEPS: Final = 100
_LIVE_SEED: Final = 0x70726F66  # Draws another workload than a user's seed does.

Progress = Callable[[str], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured of steps.

    Args:
        max_context: Tokens in the cache of a sequence, at most; beyond, lines go on.
        num_passes: Times that every step of the grid is gone through.
        rounds: Of each step in each pass.
    """

    max_context: int = MAX_CONTEXT
    num_passes: int = 3
    rounds: Rounds = dataclasses.field(default_factory=Rounds)


def measure_steps(
    config: DeploymentConfig, effort: Effort, progress: Progress
) -> tuple[Profile, HeldOut]:
    """Measure the steps of a model on this machine, and what the core takes.

    Args:
        config: Model, cache, batch and width, and how many replicas run steps at once.
        effort: How much.
        progress: Told what is being done.

    Returns:
        A profile without what only a live run tells, and its errors at steps that are not in it.

    Raises:
        PagedError: The model cannot be loaded, or a rank ended.
    """
    progress("loading")
    levels = sorted({1, config.parallel.num_replicas})
    # A row more than a batch has: for a chunk beside as many that decode, and a second point.
    batch = config.batch.model_copy(update={"max_num_seqs": config.batch.max_num_seqs + 1})
    with ReplicaProcesses(config.model_copy(update={"batch": batch})) as processes:
        grid = choose_grid(config.batch, processes.limits, effort.max_context)
        held_out = held_out_shapes(grid)
        shapes = [*grid.shapes(), *held_out]
        seconds = time_shapes(processes, shapes, levels, effort.num_passes, effort.rounds, progress)
        num_threads, load_s = processes.num_threads, processes.load_s
    path = Path(config.model.model)
    profile = Profile(
        model=path.name if path.exists() else config.model.model,
        dtype=config.model.dtype,
        device=_device(config),
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        num_threads=num_threads,
        tables=tables_of(grid, seconds, levels),
        start_s=load_s,
    )
    left_out = {job: seconds[job] for job in seconds if job[1] in set(held_out)}
    errors = held_out_errors(ProfiledCost(profile), left_out)
    progress("the core")
    return profile.model_copy(update={"control": _control_times()}), errors


def add_live(
    profile: Profile, config: DeploymentConfig, num_requests: int, progress: Progress
) -> tuple[Profile, LiveFigures]:
    """Serve a short workload on Ray, and add to a profile what it tells.

    Args:
        profile: Measured here.
        config: As it was measured.
        num_requests: Of the workload.
        progress: Told what is being done.

    Raises:
        PagedError: The deployment cannot be started.
    """
    progress(f"{num_requests} requests live")
    cost = ProfiledCost(profile.model_copy(update={"served": None}))
    workload = suitable_workload(cost, num_requests, config.parallel.num_replicas, LOAD)
    live = measure_live(config, list(generate(workload, _LIVE_SEED)), cost)
    updates = {"messages": live.messages, "served": live.served, "start_s": live.start_s}
    return profile.model_copy(update=updates), live


def _control_times() -> ControlTimes:
    return ControlTimes(
        num_sequences=list(_CONTROL_SEQUENCES),
        seconds=[control_bench.step_us(n, _NUM_CONTROL_STEPS) / 1e6 for n in _CONTROL_SEQUENCES],
    )


def _device(config: DeploymentConfig) -> str:
    import torch

    if torch.cuda.device_count() >= config.parallel.tensor_parallel_size:
        return str(torch.cuda.get_device_name(0))
    return f"{platform.machine()} CPU"
