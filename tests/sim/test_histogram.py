"""The logarithmic histogram: percentiles to half a percent, the mean exact."""

import numpy as np
import pytest

from rayserve_paged.sim.histogram import LogHistogram


def test_percentiles_are_those_of_the_values_to_half_a_percent() -> None:
    values = np.random.default_rng(1).lognormal(-5.0, 2.0, 20_000)
    histogram = LogHistogram()
    histogram.add(values[:9000])
    histogram.add(values[9000:])
    assert histogram.count == 20_000
    assert histogram.mean == pytest.approx(values.mean(), rel=1e-12)
    for percent in (1, 50, 90, 99, 100):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.005)


def test_values_count_as_often_as_told_and_none_gives_none() -> None:
    histogram = LogHistogram()
    assert (histogram.mean, histogram.percentile(50)) == (None, None)
    histogram.add(np.zeros(0))
    histogram.add(np.array([0.5, 2.0]), 3)
    histogram.add(np.array([2.0]))
    middles, counts = histogram.nonzero()
    assert counts.tolist() == [3, 4]
    assert middles.tolist() == pytest.approx([0.5, 2.0], rel=0.005)
    assert histogram.mean == 9.5 / 7


def test_values_out_of_range_count_as_the_nearest_in_it() -> None:
    histogram = LogHistogram()
    histogram.add(np.array([0.0, 1e30]))
    _middles, counts = histogram.nonzero()
    assert counts.tolist() == [1, 1]
