"""Finds the highest rate of requests at which an objective is met, by simulated runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.summary import summarize
from rayserve_paged.sizing.load import Load
from rayserve_paged.sizing.slo import Slo

_PERCENT: Final = 99
_TOLERANCE: Final = 1.05
"""The rate found is within this factor of one at which the objective was not met."""
_NUM_ALONE: Final = 100
_ALONE_GAP_S: Final = 600.0
"""Longer than any request stays that is alone."""
_AT_ONCE_PER_S: Final = 1e6
_MAX_REPLICAS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One simulated run.

    Args:
        num_replicas: Of the deployment.
        num_requests: That came.
        rate_per_s: At which they came.
        num_failed: Refused, or not served to their end.
        ttft_p99_s: From arrival to the first token; None where none came.
        itl_p99_s: From token to token; None where no stream had two.
        requests_per_s: Served, from the first arrival to the last end.
        output_tokens_per_s: Likewise.
        hit_rate: Share of the prompt tokens that were cached.
        num_preemptions: Sequences that lost their blocks for a time.
        is_met: Whether all were served within the objective.
        wall_s: What it took to simulate.
    """

    num_replicas: int
    num_requests: int
    rate_per_s: float
    num_failed: int
    ttft_p99_s: float | None
    itl_p99_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    num_preemptions: int
    is_met: bool
    wall_s: float


class Prober:
    """Runs simulations of one deployment, and remembers them.

    Args:
        spec: Of the cluster; its number of replicas is that of each run.
        slo: What counts as met.
        on_run: Called with each run as it ends.
    """

    def __init__(
        self, spec: ClusterSpec, slo: Slo, on_run: Callable[[Run], object] | None = None
    ) -> None:
        self._spec = spec
        self._slo = slo
        self._on_run = on_run
        self.runs: list[Run] = []

    def run(self, load: Load, rate_per_s: float, num_replicas: int) -> Run:
        """Simulate a load at a rate."""
        began_s = time.perf_counter()
        spec = dataclasses.replace(self._spec, num_replicas=num_replicas)
        report = Cluster(spec).run(load.at(rate_per_s))
        ttft_s = report.requests.ttft_s
        ttft_s = ttft_s[~np.isnan(ttft_s)]
        ttft_p99_s = float(np.percentile(ttft_s, _PERCENT)) if len(ttft_s) else None
        itl_p99_s = report.token_gaps_s.percentile(_PERCENT)
        figures = summarize(report)
        num_failed, served_per_s = figures["num_failed"], figures["requests_per_s"]
        assert isinstance(num_failed, int)
        assert isinstance(served_per_s, float)
        run = Run(
            num_replicas=num_replicas,
            num_requests=len(load.requests),
            rate_per_s=rate_per_s,
            num_failed=num_failed,
            ttft_p99_s=ttft_p99_s,
            itl_p99_s=itl_p99_s,
            requests_per_s=served_per_s,
            output_tokens_per_s=report.output_tokens_per_s,
            hit_rate=report.token_hit_rate,
            num_preemptions=int(report.replicas.num_preemptions.sum()),
            is_met=not num_failed and self._slo.is_met_by(ttft_p99_s, itl_p99_s),
            wall_s=time.perf_counter() - began_s,
        )
        self.runs.append(run)
        if self._on_run is not None:
            self._on_run(run)
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class HighestRate:
    """How much a deployment takes.

    Args:
        alone: A run in which each request had the deployment to itself.
        at_once: A run in which all requests came at once: what it serves at most.
        best: The run at the highest rate that met the objective.
    """

    alone: Run
    at_once: Run
    best: Run


def find_highest_rate(prober: Prober, load: Load, slo: Slo) -> HighestRate:
    """Find the highest rate of one replica, to within 5%; at most what it can serve at all.

    Raises:
        InvalidInputError: The objective is not met even by requests that are alone.
    """
    alone = prober.run(load.evenly(_NUM_ALONE, _ALONE_GAP_S), 1 / _ALONE_GAP_S, 1)
    if not alone.is_met:
        raise _impossible(alone, slo)
    at_once = prober.run(load, _AT_ONCE_PER_S, 1)
    # No run is so long that requests which come faster than they are served would always be late.
    run = prober.run(load, at_once.requests_per_s, 1)
    met, unmet = (run, None) if run.is_met else (alone, run)
    while unmet is not None and unmet.rate_per_s > _TOLERANCE * met.rate_per_s:
        # It is about where it began unless the objective is tight.
        half = unmet.rate_per_s / 2
        run = prober.run(load, max(half, math.sqrt(met.rate_per_s * unmet.rate_per_s)), 1)
        met, unmet = (run, unmet) if run.is_met else (met, run)
    return HighestRate(alone, at_once, met)


def find_replicas(
    prober: Prober, make_load: Callable[[int], Load], rate_per_s: float, of_one: float
) -> Run:
    """Return the run with the fewest replicas that meet the objective at a rate.

    Args:
        prober: Runs the simulations.
        make_load: Returns a load for so many replicas.
        rate_per_s: Of all requests.
        of_one: The highest rate of one replica.

    Raises:
        InvalidInputError: More replicas do not help.
    """
    first = math.ceil(rate_per_s / of_one)
    if first > _MAX_REPLICAS:
        accepted = f"at most {_MAX_REPLICAS * of_one:,.4g}: {_MAX_REPLICAS} replicas"
        raise InvalidInputError("--rate", rate_per_s, accepted)
    run = prober.run(make_load(first), rate_per_s, first)
    if run.is_met:
        for fewer in range(first - 1, 0, -1):
            tried = prober.run(make_load(fewer), rate_per_s, fewer)
            if not tried.is_met:
                break
            run = tried
        return run
    for more in itertools.count(first + 1):
        # What one replica takes, two take each, but for how evenly requests are dealt.
        if more > 2 * first + 2:
            accepted = f"less: {more - 1} replicas did not meet the objective"
            raise InvalidInputError("--rate", rate_per_s, accepted)
        run = prober.run(make_load(more), rate_per_s, more)
        if run.is_met:
            return run
    raise AssertionError("the count has no end")


def find_rate_of_all(prober: Prober, load: Load, num_replicas: int, of_one: float) -> Run:
    """Return the run of several replicas at the highest rate that met the objective.

    It starts at that many times the rate of one, and goes down from there, to that of one at least.
    """
    rate = num_replicas * of_one
    while not (run := prober.run(load, rate, num_replicas)).is_met and rate > of_one:
        rate /= _TOLERANCE
    return run


def _impossible(alone: Run, slo: Slo) -> InvalidInputError:
    if alone.num_failed:
        accepted = f"requests that can be served: {alone.num_failed} of them failed"
        return InvalidInputError("--slo", str(slo), accepted)
    reached = [
        f"{name} of {seconds:.3g} s or more"
        for name, seconds in (("ttft", alone.ttft_p99_s), ("itl", alone.itl_p99_s))
        if seconds is not None
    ]
    accepted = f"{' and '.join(reached)}, which requests have that are served alone"
    return InvalidInputError("--slo", str(slo), accepted)
