"""Changes to a trace: its load, its size."""

import dataclasses
import random

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.workload import Workload


def scale_time(workload: Workload, factor: float) -> Workload:
    """Multiply the times of arrival: 0.5 doubles the load.

    Raises:
        InvalidInputError: A factor that is not above 0, or not finite.
    """
    if not 0 < factor < float("inf"):
        raise InvalidInputError("time_scale", factor, "a number above 0")
    if factor == 1:
        return workload
    requests = tuple(
        dataclasses.replace(request, arrival_ms=request.arrival_ms * factor)
        for request in workload.requests
    )
    return dataclasses.replace(workload, requests=requests)


def take_first(workload: Workload, num_requests: int) -> Workload:
    """Keep the first requests.

    Raises:
        InvalidInputError: A number below 1.
    """
    if num_requests < 1:
        raise InvalidInputError("limit", num_requests, "at least 1 request")
    return dataclasses.replace(workload, requests=workload.requests[:num_requests])


def sample(workload: Workload, share: float, seed: int = 0) -> Workload:
    """Keep each request with this probability, which thins the load; at least one is kept.

    Raises:
        InvalidInputError: A share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InvalidInputError("sample", share, "a share above 0 and at most 1")
    draw = random.Random(seed)
    kept = tuple(request for request in workload.requests if draw.random() < share)
    return dataclasses.replace(workload, requests=kept or workload.requests[:1])


def repeat(workload: Workload, times: int, gap_ms: float | None = None) -> Workload:
    """Append a trace to itself; each repetition has contents of its own.

    Args:
        workload: The trace.
        times: Repetitions in all, at least 1.
        gap_ms: From the last arrival of one to the first of the next; None for the mean time
            from arrival to arrival.

    Raises:
        InvalidInputError: A number below 1, more than 1 of a recorded run, whose prompts are what
            they are, or a gap below 0.
    """
    if times < 1:
        raise InvalidInputError("repeat", times, "at least 1")
    if times > 1 and workload.requests[0].token_ids is not None:
        raise InvalidInputError("repeat", times, "1 with a recorded run, whose prompts are known")
    first, last = workload.requests[0].arrival_ms, workload.requests[-1].arrival_ms
    if gap_ms is None:
        gap_ms = (last - first) / max(1, len(workload.requests) - 1)
    if not gap_ms >= 0:
        raise InvalidInputError("gap_ms", gap_ms, "a number from 0")
    ids = (hash_id for request in workload.requests for hash_id in request.hash_ids or ())
    num_ids = max(ids, default=-1) + 1
    requests = tuple(
        dataclasses.replace(
            request,
            arrival_ms=request.arrival_ms + number * (last - first + gap_ms),
            hash_ids=request.hash_ids
            and tuple(hash_id + number * num_ids for hash_id in request.hash_ids),
        )
        for number in range(times)
        for request in workload.requests
    )
    return dataclasses.replace(workload, requests=requests)
