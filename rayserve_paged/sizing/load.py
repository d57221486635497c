"""The requests that a deployment is sized by: alike, or of a trace, at any rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.synthetic import Lengths, PoissonArrivals, SyntheticWorkload, generate
from rayserve_paged.sim.workload_file import TraceChanges, open_workload


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival. The same ones come at every rate, only closer together.

    Args:
        requests: At least two.
        rate_per_s: At which they come by themselves.
    """

    requests: tuple[SimRequest, ...]
    rate_per_s: float

    @property
    def mean_prompt_tokens(self) -> float:
        """Of a request."""
        return sum(r.num_prompt_tokens for r in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        """Of a request."""
        return sum(r.num_output_tokens for r in self.requests) / len(self.requests)

    @property
    def mean_tokens(self) -> int:
        """Of a request at its end, rounded up."""
        return math.ceil(self.mean_prompt_tokens + self.mean_output_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(r.num_prompt_tokens + r.num_output_tokens for r in self.requests)

    def evenly(self, at_most: int, gap_s: float) -> Load:
        """Return the first requests, one after each such pause."""
        first = self.requests[:at_most]
        spaced = (dataclasses.replace(r, arrival_s=n * gap_s) for n, r in enumerate(first))
        return Load(tuple(spaced), 1 / gap_s)

    def at(self, rate_per_s: float) -> Iterator[SimRequest]:
        """Yield the requests as they come at another rate."""
        factor = self.rate_per_s / rate_per_s
        first_s = self.requests[0].arrival_s
        for request in self.requests:
            arrival_s = (request.arrival_s - first_s) * factor
            yield dataclasses.replace(request, arrival_s=arrival_s)


def alike(num_requests: int, num_prompt: int, num_output: int, seed: int) -> Load:
    """Return requests of equal lengths that share nothing, arriving independently (Poisson).

    Args:
        num_requests: How many.
        num_prompt: Tokens of each prompt.
        num_output: Tokens of each answer.
        seed: Of their arrivals and tokens.

    Raises:
        InvalidInputError: A number that is too small.
    """
    for flag, number, least in (
        ("--requests", num_requests, 2),
        ("--prompt-tokens", num_prompt, 1),
        ("--output-tokens", num_output, 1),
    ):
        if number < least:
            raise InvalidInputError(flag, number, f"at least {least}")
    workload = SyntheticWorkload(
        num_requests=num_requests,
        arrivals=PoissonArrivals(rate_per_s=1.0),
        prompt_tokens=Lengths(median=num_prompt, high=max(num_prompt, 2**20)),
        output_tokens=Lengths(median=num_output, high=max(num_output, 2**20)),
        max_session_tokens=num_prompt + num_output,
    )
    return _load("--requests", tuple(generate(workload, seed)))


def of_trace(path: Path, num_requests: int | None, block_size: int, seed: int) -> Load:
    """Return the first requests of a trace, or of the YAML of a synthetic workload.

    Args:
        path: As `open_workload`.
        num_requests: How many; None for all.
        block_size: Slots per block of the cluster.
        seed: Of tokens, and of what a synthetic workload draws.

    Raises:
        InvalidInputError: As `open_workload`, or there are not two that come at different times.
    """
    changes = TraceChanges(limit=num_requests)
    workload = open_workload(path, block_size, seed, changes)
    return _load("--trace", tuple(workload.requests))


def _load(source: str, requests: tuple[SimRequest, ...]) -> Load:
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if not span_s > 0:
        accepted = "at least two requests that come at different times"
        raise InvalidInputError(source, len(requests), accepted)
    return Load(requests, (len(requests) - 1) / span_s)
