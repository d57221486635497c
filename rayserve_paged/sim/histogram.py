"""A histogram of positive numbers on a logarithmic scale, of bounded size."""

import math

import numpy as np
import numpy.typing as npt

_LOWEST = 1e-7
_RATIO = 1.005
_NUM_BINS = 6144  # Up to about 2e6.


class LogHistogram:
    """Counts by bins whose edges are half a percent apart; the sum is exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, np.int64)
        self.count = 0
        self.total = 0.0

    def add(self, values: npt.NDArray[np.float64], times: int = 1) -> None:
        """Count values, each so many times; those out of range count as the nearest in it."""
        if not len(values):
            return
        bins = np.log(np.maximum(values, _LOWEST) / _LOWEST) * (1 / math.log(_RATIO))
        np.add.at(self._counts, np.minimum(bins.astype(np.int64), _NUM_BINS - 1), times)
        self.count += times * len(values)
        self.total += times * float(values.sum())

    @property
    def mean(self) -> float | None:
        """Of all values; None where there is none."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the value below which so many percent are, to half a percent of itself."""
        if not self.count:
            return None
        rank = max(1, math.ceil(self.count * percent / 100))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(_middles(np.array([index]))[0])

    def nonzero(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the middles of the bins that hold any, and how many they hold."""
        bins = np.flatnonzero(self._counts)
        return _middles(bins), self._counts[bins]


def _middles(bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    middles: npt.NDArray[np.float64] = _LOWEST * np.power(_RATIO, bins + 0.5)
    return middles
