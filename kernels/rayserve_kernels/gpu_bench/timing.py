"""Time what calls run on a GPU, in turn, so that what else happens strikes all alike."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping

import torch

Call = Callable[[int], object]
"""Queues the work of one layer."""

_NUM_WARM_UPS = 3
_READ_BYTES = 1 << 30
_FEWEST_READS = 2
_MOST_READS = 32


class EventTimer:
    """Times a call by events on the device's current stream.

    Before each sample a gibibyte is read several times over. That leaves nothing in caches of what
    the call is to read, and no lines that would have to be written back; and it keeps the device
    busy while the host queues the call, so that launches from Python are not what is measured. A
    sample that the device began before all of it was queued is taken again behind more reads.

    Args:
        device: A GPU.

    Attributes:
        num_late: Samples that even the most reads did not hide the host's time from.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
        self._num_reads = _FEWEST_READS
        self.num_late = 0

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the microseconds that a call takes on the device."""
        while True:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(self._num_reads):
                self._words.sum()
            start.record()
            call()
            end.record()
            is_late = start.query()
            end.synchronize()
            if not is_late or self._num_reads >= _MOST_READS:
                break
            self._num_reads *= 2
        self.num_late += is_late
        return float(start.elapsed_time(end)) * 1e3


@dataclasses.dataclass(frozen=True)
class Samples:
    """Microseconds of each contestant in the order of rounds, or in one line why there are none."""

    us: Mapping[str, list[float]]
    errors: Mapping[str, str]

    def median_us(self, name: str) -> float | None:
        """Median of a contestant, None if it has no samples."""
        return statistics.median(self.us[name]) if name in self.us else None


def take_turns(
    contestants: Mapping[str, Call],
    num_layers: int,
    num_rounds: int,
    time_us: Callable[[Callable[[], object]], float],
) -> Samples:
    """Time contestants round by round, each round on the next layer.

    One that raises while it warms up is left out.

    Args:
        contestants: By name.
        num_layers: Layers to go round.
        num_rounds: Samples of each, after the warm-ups.
        time_us: Times a call, such as an `EventTimer`.
    """
    errors: dict[str, str] = {}
    for name, call in contestants.items():
        try:
            for index in range(_NUM_WARM_UPS):
                call(index % num_layers)
        except Exception as error:
            errors[name] = one_line(error)
    running = {name: call for name, call in contestants.items() if name not in errors}
    samples: dict[str, list[float]] = {name: [] for name in running}
    for index in range(num_rounds):
        layer = index % num_layers
        for name, call in running.items():
            samples[name].append(time_us(functools.partial(call, layer)))
    return Samples(samples, errors)


def one_line(error: Exception) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
