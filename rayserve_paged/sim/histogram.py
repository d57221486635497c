"""A histogram of positive numbers on a logarithmic scale, of bounded size."""

import math

import numpy as np
import numpy.typing as npt

_LOWEST = 1e-7
_RATIO = 1.005
_NUM_BINS = 6144  # Up to about 2e6.
_NUM_BUFFERED = 512


class LogHistogram:
    """Counts by bins whose edges are half a percent apart; the sum is exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, np.int64)
        self._count = 0
        self._total = 0.0
        # Not counted yet: many small arrays cost less together.
        self._buffered: list[npt.NDArray[np.float64]] = []
        self._times: list[int] = []

    def add(self, values: npt.NDArray[np.float64], times: int = 1) -> None:
        """Count values, each so many times; those out of range count as the nearest in it.

        The array is not to be written to afterwards.
        """
        if len(values):
            self._buffered.append(values)
            self._times.append(times)
            if len(self._buffered) == _NUM_BUFFERED:
                self._flush()

    def _flush(self) -> None:
        if not self._buffered:
            return
        values = np.concatenate(self._buffered)
        times = np.repeat(self._times, [len(one) for one in self._buffered])
        self._buffered, self._times = [], []
        bins = np.log(np.maximum(values, _LOWEST) / _LOWEST) * (1 / math.log(_RATIO))
        np.add.at(self._counts, np.minimum(bins.astype(np.int64), _NUM_BINS - 1), times)
        self._count += int(times.sum())
        self._total += float((values * times).sum())

    @property
    def count(self) -> int:
        """How many values there are."""
        self._flush()
        return self._count

    @property
    def mean(self) -> float | None:
        """Of all values; None where there is none."""
        return self._total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the value below which so many percent are, to half a percent of itself."""
        if not self.count:
            return None
        rank = max(1, math.ceil(self.count * percent / 100))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(_middles(np.array([index]))[0])

    def nonzero(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the middles of the bins that hold any, and how many they hold."""
        self._flush()
        bins = np.flatnonzero(self._counts)
        return _middles(bins), self._counts[bins]


def _middles(bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    middles: npt.NDArray[np.float64] = _LOWEST * np.power(_RATIO, bins + 0.5)
    return middles
