"""How much longer or shorter than predicted each step takes, for no reason that a model sees."""

from collections.abc import Sequence

import numpy as np

from rayserve_paged.sim.cost_model import FloatArray
from rayserve_paged.sim.token_streams import tokens_at


class StepRatios:
    """Ratios of a replica's steps, by their numbers: a step has the same one again, however steps
    are gathered into plans.

    Args:
        ratios: Measured ones, each as likely as the other; one of them is drawn for each step.
        stream: Which draws, as `stream_number` makes it.
    """

    def __init__(self, ratios: Sequence[float], stream: int) -> None:
        self._ratios = np.array(ratios, np.float64)
        self._stream = np.array([stream], np.uint64)

    def of(self, first: int, num_steps: int) -> FloatArray:
        """Return the ratios of steps from number `first` on, float64 [num_steps]."""
        numbers = np.arange(first, first + num_steps)
        drawn: FloatArray = self._ratios[tokens_at(self._stream, numbers, len(self._ratios))]
        return drawn
