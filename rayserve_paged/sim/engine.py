"""Runs a simulation: a virtual clock, and a heap of what happens when.

Events at the same time happen in the order in which they were scheduled, so that a run depends on
nothing but what it was given.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """The clock of one simulation, and the actions that wait for their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._next_id = 0

    @property
    def num_scheduled(self) -> int:
        """Actions that wait for their time."""
        return len(self._heap)

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        """Call `action(*args)` at a time, in seconds.

        Raises:
            ValueError: The time is over, or is not a number.
        """
        # Written so that NaN fails: it would break the order of the heap.
        if not time >= self.now:
            raise ValueError(f"time={time} is before now={self.now}")
        heapq.heappush(self._heap, (time, self._next_id, action, args))
        self._next_id += 1

    def run(self, until: float) -> None:
        """Let time pass up to and including `until`, in seconds."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self._step()
        self.now = max(self.now, until)

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        """Let time pass event by event while there is any and `goes_on()` holds."""
        while self._heap and goes_on():
            self._step()

    def _step(self) -> None:
        self.now, _id, action, args = heapq.heappop(self._heap)
        self.num_events += 1
        action(*args)
