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
from rayserve_paged.profiling.workload import MAX_CONTEXT, suitable_workload
from rayserve_paged.sim.profile import ControlTimes, Profile
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.synthetic import generate

_CONTROL_SEQUENCES: Final = (1, 16, 64)
_NUM_CONTROL_STEPS: Final = 100
_LIVE_LOAD: Final = 0.6
_LIVE_SEED: Final = 0x70726F66  # Draws another workload than a user's seed does.

Progress = Callable[[str], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Args:
        max_context: Tokens in the cache of a sequence, at most; beyond, lines go on.
        num_passes: Times that every step of the grid is gone through.
        rounds: Of each step in each pass.
        num_live_requests: Of the live run; 0 for none, as where there is no Ray.
    """

    max_context: int = MAX_CONTEXT
    num_passes: int = 3
    rounds: Rounds = dataclasses.field(default_factory=Rounds)
    num_live_requests: int = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and how far it can be trusted.

    Args:
        profile: What was measured.
        held_out: Errors of its tables at steps that are not in them.
        live: The live run; None where there was none.
    """

    profile: Profile
    held_out: HeldOut
    live: LiveFigures | None


def measure_profile(config: DeploymentConfig, effort: Effort, progress: Progress) -> Measured:
    """Measure a model on this machine, with as many replicas at once as the configuration has.

    Args:
        config: Model, cache, batch, width, replicas.
        effort: How much.
        progress: Told what is being done.

    Raises:
        PagedError: The model cannot be loaded, or a rank ended.
    """
    progress("loading")
    num_replicas = config.parallel.num_replicas
    levels = sorted({1, num_replicas})
    # A row more than a batch has: for a chunk beside as many that decode, and a second point.
    batch = config.batch.model_copy(update={"max_num_seqs": config.batch.max_num_seqs + 1})
    with ReplicaProcesses(config.model_copy(update={"batch": batch})) as processes:
        limits = processes.limits
        grid = choose_grid(config.batch, limits, effort.max_context)
        held_out = held_out_shapes(grid)
        seconds = time_shapes(
            processes,
            [*grid.shapes(), *held_out],
            levels,
            effort.num_passes,
            effort.rounds,
            progress,
        )
        num_threads, load_s = processes.num_threads, processes.load_s
    bare = Profile(
        model=config.model.model
        if not Path(config.model.model).exists()
        else Path(config.model.model).name,
        dtype=config.model.dtype,
        device=_device(config),
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        num_threads=num_threads,
        tables=tables_of(grid, seconds, levels),
        start_s=load_s,
    )
    left_out = {job: seconds[job] for job in seconds if job[1] in set(held_out)}
    errors = held_out_errors(ProfiledCost(bare), left_out)
    progress("the core")
    profile = bare.model_copy(update={"control": _control_times()})
    if not effort.num_live_requests:
        return Measured(profile, errors, None)
    progress("a live run")
    cost = ProfiledCost(profile)
    workload = suitable_workload(cost, effort.num_live_requests, num_replicas, _LIVE_LOAD)
    live = measure_live(config, list(generate(workload, _LIVE_SEED)), cost)
    updates = {"messages": live.messages, "served": live.served, "start_s": live.start_s}
    return Measured(profile.model_copy(update=updates), errors, live)


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
