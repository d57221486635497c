"""How near the simulation comes to a live deployment: a workload live, twice, and simulated."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import LoggedStart, ReplicaStart
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.replay import replay
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.experiments.stream_times import StreamTimes, UserFigures, user_figures
from rayserve_paged.profiling.live import serve_on_ray
from rayserve_paged.sim.build import network_of, ranks_per_machine, step_ratios_of
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.profile import Profile
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.requests import SimRequest

COMPARED: Final = (
    "ttft_mean_s",
    "ttft_p90_s",
    "itl_mean_s",
    "itl_p90_s",
    "output_tokens_per_s",
)
_AIM: Final = 0.10
_BOUND: Final = 0.20


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, live and simulated.

    Args:
        name: Of the figure.
        live: Of each live run.
        simulated: Of the simulation.
    """

    name: str
    live: tuple[float, float]
    simulated: float

    @property
    def error(self) -> float:
        """How far the simulation is from the mean of the live runs, as a share of it."""
        mean = sum(self.live) / 2
        return abs(self.simulated - mean) / mean

    @property
    def live_difference(self) -> float:
        """How far the live runs are from each other, as a share of their mean."""
        return abs(self.live[0] - self.live[1]) / (sum(self.live) / 2)

    @property
    def is_within_aim(self) -> bool:
        """Whether the error is under 10%, or within twice the difference and not above 20%."""
        return self.error < _AIM or self.error <= min(2 * self.live_difference, _BOUND)


@dataclasses.dataclass(frozen=True, slots=True)
class Fidelity:
    """What came of a comparison.

    Args:
        comparisons: One for each of `COMPARED`.
        live: All figures of the live runs.
        simulated: All figures of the simulation.
        replays_identically: Whether the event logs of the live runs do, in the core.
    """

    comparisons: tuple[Comparison, ...]
    live: tuple[UserFigures, UserFigures]
    simulated: UserFigures
    replays_identically: bool


def simulate_workload(
    config: DeploymentConfig, limits: ModelLimits, profile: Profile, requests: Sequence[SimRequest]
) -> StreamTimes:
    """Serve a workload in simulation on the deployment that a profile was measured for.

    Args:
        config: Of the deployment.
        limits: Of each replica.
        profile: Of the model on the machine that all replicas are on.
        requests: The workload.

    Raises:
        InvalidInputError: The profile is of another width.
    """
    width = config.parallel.tensor_parallel_size
    spec = ClusterSpec(
        num_replicas=config.parallel.num_replicas,
        limits=limits,
        cost=ProfiledCost(profile),
        batch=config.batch,
        tensor_parallel_size=width,
        ranks_per_node=ranks_per_machine(profile, width),
        timeouts=config.timeouts,
        network=network_of(profile),
        placement=config.placement,
        step_ratios=step_ratios_of(profile),
    )
    times = StreamTimes()
    for number, request in enumerate(requests):
        times.arrive(RequestId(f"q{number}"), request.arrival_s)
    Cluster(spec, watch=times.watch).run(requests)
    return times


def compare_runs(
    config: DeploymentConfig, profile: Profile, requests: Sequence[SimRequest], folder: Path
) -> Fidelity:
    """Serve a workload live on Ray, twice, and in simulation.

    Args:
        config: Of the deployment.
        profile: Of the model here.
        requests: The workload.
        folder: Where the event logs of the live runs go, into `live-1` and `live-2`.

    Raises:
        InvalidInputError: There are logs of another run.
        PagedError: A deployment cannot be started.
    """
    folders = [folder / "live-1", folder / "live-2"]
    for one in folders:
        if one.exists():
            raise InvalidInputError("--out", str(folder), f"a folder without {one.name}")
    served = [serve_on_ray(config, requests, one)[0] for one in folders]
    logs = [path for one in folders for path in log_files(one)]
    simulated = simulate_workload(config, _limits(logs), profile, requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    first, second = (user_figures(times, num_prompt_tokens) for times in served)
    predicted = user_figures(simulated, num_prompt_tokens)
    comparisons = tuple(
        Comparison(name, (getattr(first, name), getattr(second, name)), getattr(predicted, name))
        for name in COMPARED
    )
    identical = all(replay(read_log(path)).difference is None for path in logs)
    return Fidelity(comparisons, (first, second), predicted, identical)


def _limits(logs: Sequence[Path]) -> ModelLimits:
    """Return what a replica of a recorded run could hold."""
    for path in logs:
        for entry in read_log(path):
            if isinstance(entry, LoggedStart) and isinstance(entry.start, ReplicaStart):
                return entry.start.limits
    raise AssertionError("a run has replicas")
