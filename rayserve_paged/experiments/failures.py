"""Turns what an experiment says about failures into the fault plan of one run."""

import random
from collections.abc import Iterator

from rayserve_paged.experiments.config import FailuresConfig
from rayserve_paged.sim.faults import ClusterFault, FaultPlan, KillController, KillReplica


def fault_plan(failures: FailuresConfig, num_replicas: int, seed: int, until_s: float) -> FaultPlan:
    """Return the faults that are given, and deaths drawn from the seed.

    Each place has draws of its own, so that the deaths of one do not depend on how many others
    there are.

    Args:
        failures: What goes wrong.
        num_replicas: Of the cluster.
        seed: Of the run.
        until_s: After which nothing dies at random.
    """
    drawn: list[ClusterFault] = []
    if failures.replica_life_s is not None:
        for name in (f"r{index}" for index in range(num_replicas)):
            moments = _moments(f"{seed}/{name}", failures.replica_life_s, until_s)
            drawn += [KillReplica(at_s=at_s, replica=name) for at_s in moments]
    if failures.controller_life_s is not None:
        moments = _moments(f"{seed}/controller", failures.controller_life_s, until_s)
        down_s = failures.controller_down_s
        drawn += [KillController(at_s=at_s, down_s=down_s) for at_s in moments]
    return FaultPlan(faults=(*failures.plan, *drawn))


def _moments(seed: str, mean_s: float, until_s: float) -> Iterator[float]:
    draw = random.Random(seed)
    now = draw.expovariate(1 / mean_s)
    while now < until_s:
        yield now
        now += draw.expovariate(1 / mean_s)
