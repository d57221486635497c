"""Makes a failing run of chaos small: fewer faults, then fewer requests, that still fail."""

import dataclasses
from collections.abc import Callable, Sequence

from rayserve_paged.experiments.chaos_case import ChaosCase


def shrink(case: ChaosCase, fails: Callable[[ChaosCase], bool]) -> ChaosCase:
    """Return a part of a failing case that fails, and would not without any one thing in it.

    Args:
        case: Fails.
        fails: Whether a part of it does.
    """
    faults = range(len(case.plan.faults))
    kept = _least(list(faults), lambda some: fails(_with_faults(case, some)))
    case = _with_faults(case, kept)
    numbers = [one.number for one in case.requests]
    kept = _least(numbers, lambda some: fails(with_requests(case, some)))
    return with_requests(case, kept)


def with_requests(case: ChaosCase, numbers: Sequence[int]) -> ChaosCase:
    """Return a case with some of its requests alone, given by their numbers."""
    kept = set(numbers)
    return dataclasses.replace(
        case, requests=tuple(one for one in case.requests if one.number in kept)
    )


def _with_faults(case: ChaosCase, places: Sequence[int]) -> ChaosCase:
    left_out = set(range(len(case.plan.faults))).difference(places)
    return dataclasses.replace(case, plan=case.plan.without(left_out))


def _least(items: list[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Leave out runs of items, long ones first, as long as the rest fails."""
    size = len(items)
    while size:
        begin = 0
        while begin < len(items):
            rest = items[:begin] + items[begin + size :]
            if fails(rest):
                items = rest
            else:
                begin += size
        size //= 2
    return items
