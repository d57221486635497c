"""Changes to a trace: load, size, repetition."""

import math

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.transforms import repeat, sample, scale_time, take_first
from rayserve_paged.sim.workload import TraceRequest, Workload

TRACE = Workload(
    tuple(TraceRequest(100.0 * i + 50.0, 600, 5, (0, i + 1)) for i in range(1000)), 512, 3
)


def test_half_the_time_is_twice_the_load() -> None:
    scaled = scale_time(TRACE, 0.5)
    assert [r.arrival_ms for r in scaled.requests[:3]] == [25.0, 75.0, 125.0]
    assert [r.hash_ids for r in scaled.requests] == [r.hash_ids for r in TRACE.requests]
    assert (scaled.trace_block_size, scaled.num_skipped) == (512, 3)
    assert scale_time(TRACE, 1.0) == TRACE


def test_the_first_requests_are_kept_in_order() -> None:
    assert take_first(TRACE, 2).requests == TRACE.requests[:2]
    assert take_first(TRACE, 5000) == TRACE


def test_a_sample_keeps_each_request_with_its_probability_and_the_order() -> None:
    kept = sample(TRACE, 0.3, seed=4).requests
    # Five standard deviations of a binomial.
    assert abs(len(kept) - 300) < 5 * math.sqrt(1000 * 0.3 * 0.7)
    assert list(kept) == sorted(kept, key=lambda request: request.arrival_ms)
    assert set(kept) < set(TRACE.requests)
    assert sample(TRACE, 0.3, seed=4).requests == kept
    assert sample(TRACE, 0.3, seed=5).requests != kept
    assert sample(TRACE, 1.0) == TRACE
    assert len(sample(take_first(TRACE, 1), 1e-9).requests) == 1


def test_a_repetition_follows_at_the_mean_gap_with_contents_of_its_own() -> None:
    trace = take_first(TRACE, 3)
    twice = repeat(trace, 2).requests
    assert [r.arrival_ms for r in twice] == [50.0, 150.0, 250.0, 350.0, 450.0, 550.0]
    assert [r.hash_ids for r in twice[3:]] == [(4, 5), (4, 6), (4, 7)]
    assert repeat(trace, 2, gap_ms=0.0).requests[3].arrival_ms == 250.0
    assert repeat(trace, 1) == trace
    without_ids = Workload((TraceRequest(0.0, 5, 1), TraceRequest(9.0, 5, 1)), None)
    assert [r.hash_ids for r in repeat(without_ids, 2).requests] == [None] * 4
    assert [r.arrival_ms for r in repeat(without_ids, 2).requests] == [0.0, 9.0, 18.0, 27.0]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(InvalidInputError, match="time_scale"):
        scale_time(TRACE, factor)


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="limit"):
        take_first(TRACE, 0)
    with pytest.raises(InvalidInputError, match="sample"):
        sample(TRACE, 0.0)
    with pytest.raises(InvalidInputError, match="repeat"):
        repeat(TRACE, 0)
    with pytest.raises(InvalidInputError, match="gap_ms"):
        repeat(TRACE, 2, gap_ms=-1.0)
