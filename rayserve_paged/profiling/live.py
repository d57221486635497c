"""Serves a short workload on Ray, and tells how its steps compare to the tables of a profile."""

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.experiments.open_loop import serve_open_loop
from rayserve_paged.experiments.stream_times import StreamTimes
from rayserve_paged.profiling.served_run import (
    FloatArray,
    ServedRun,
    predict_steps,
    read_served_run,
)
from rayserve_paged.sim.profile import MessageTimes, ServedSteps
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.requests import SimRequest

if TYPE_CHECKING:
    from rayserve_cluster.ray_shell import RayShell

_LEAST_S = 1e-6
_NUM_WARM_UP = 4
_NUM_RATIOS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a live run adds to a profile.

    Args:
        messages: How long they were under way.
        served: How steps compare to the tables.
        start_s: From the start of the replicas to their registration.
        num_steps: Steps of the run.
        mean_error: Mean of |predicted - measured| over measured, with `served` applied.
        p90_error: Its 90th percentile.
    """

    messages: MessageTimes
    served: ServedSteps
    start_s: float
    num_steps: int
    mean_error: float
    p90_error: float


def serve_on_ray(
    config: DeploymentConfig, requests: Sequence[SimRequest], folder: Path
) -> tuple[StreamTimes, float]:
    """Start a deployment, serve a workload with its event logs in a folder, end it.

    Returns:
        The times of the requests, and the seconds until the ranks were ready.
    """
    from rayserve_cluster.ray_shell import RayShell

    shell = RayShell(config.model_copy(update={"event_log_dir": str(folder.resolve())}))
    try:
        return asyncio.run(_serve(shell, requests))
    finally:
        shell.shutdown()


async def _serve(shell: "RayShell", requests: Sequence[SimRequest]) -> tuple[StreamTimes, float]:
    # The first steps of a process, and its first call to each other one, are slower.
    for request in requests[:_NUM_WARM_UP]:
        await serve_open_loop(shell, [dataclasses.replace(request, arrival_s=0.0)])
    await shell.reset_cache()
    times = await serve_open_loop(shell, requests)
    return times, (await shell.stats()).timings["ranks_ready_s"]


def measure_live(
    config: DeploymentConfig, requests: Sequence[SimRequest], cost: ProfiledCost
) -> LiveFigures:
    """Serve a workload on Ray and compare it with a cost model that knows nothing of live runs.

    Raises:
        PagedError: The deployment cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        times, start_s = serve_on_ray(config, requests, Path(folder))
        run = read_served_run(Path(folder))
    steps = [step for step in run.steps if step.begin_s >= _first_arrival(times)]
    measured = np.array([step.seconds for step in steps])
    predicted = predict_steps(steps, cost)
    served = fit_served(predicted, measured)
    fitted = served.scale * predicted + served.extra_s
    served = served.model_copy(update={"ratios": even_ratios(measured / fitted)})
    errors = np.abs(fitted - measured) / measured
    return LiveFigures(
        message_times(times, run),
        served,
        start_s,
        len(steps),
        float(errors.mean()),
        float(np.percentile(errors, 90)),
    )


def _first_arrival(times: StreamTimes) -> float:
    return min(request.arrival_s for request in times.requests.values())


def fit_served(predicted_s: FloatArray, measured_s: FloatArray) -> ServedSteps:
    """Fit measured = scale * predicted + extra by least squares, which keeps the mean.

    What steps take beyond the tables is never below 0: where the line says so, it goes through 0.
    """
    ones = np.ones_like(predicted_s)
    solution = np.linalg.lstsq(np.stack([predicted_s, ones], axis=1), measured_s, rcond=None)[0]
    scale, extra_s = (float(value) for value in solution)
    if extra_s < 0.0 or scale <= 0.0:
        scale, extra_s = float(measured_s.sum() / predicted_s.sum()), 0.0
    return ServedSteps(scale=scale, extra_s=extra_s)


def even_ratios(ratios: FloatArray) -> list[float]:
    """Return few ratios that are spread as many are, and are 1 on average."""
    spread = np.quantile(ratios, (np.arange(_NUM_RATIOS) + 0.5) / _NUM_RATIOS)
    evened: list[float] = (spread / spread.mean()).tolist()
    return evened


def message_times(times: StreamTimes, run: ServedRun) -> MessageTimes:
    """Return how long messages took, on average.

    The way to a replica is known of requests that found it idle: others wait for a step's end. It
    counts as long as the way to the controller where there is none.
    """
    submit, assign, deliver = [], [], []
    for request_id, request in times.requests.items():
        submitted_s = run.submitted_s.get(request_id)
        if submitted_s is None:
            continue
        submit.append(submitted_s - request.arrival_s)
        assigned_s, was_idle = run.assigned_s.get(request_id, (0.0, False))
        if was_idle:
            assign.append(assigned_s - submitted_s)
        for index, came_s in enumerate(request.token_s):
            deliver.append(came_s - run.answered_s[request_id, index])
    submit_s, deliver_s = (max(_LEAST_S, float(np.mean(some))) for some in (submit, deliver))
    assign_s = max(_LEAST_S, float(np.mean(assign))) if assign else submit_s
    return MessageTimes(submit_s=submit_s, assign_s=assign_s, deliver_s=deliver_s)
