"""Links: what carries bytes from one place to another, with latency, bandwidth and a queue."""

import dataclasses

from rayserve_paged.core.errors import InvalidInputError


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSpec:
    """How fast a link is.

    Args:
        latency_s: From the first byte sent to the first byte received.
        bytes_per_s: Bandwidth in one direction; infinity where size does not matter.

    Raises:
        InvalidInputError: A latency below 0 or a bandwidth that is not above 0.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Check both."""
        if not self.latency_s >= 0:
            raise InvalidInputError("latency_s", self.latency_s, "a number of seconds from 0")
        if not self.bytes_per_s > 0:
            raise InvalidInputError("bytes_per_s", self.bytes_per_s, "a number above 0")

    def transfer_s(self, size_bytes: float) -> float:
        """Return how long a transfer takes that finds the link idle, to its last byte."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Link:
    """One direction of a link: transfers go one after the other, first come first served.

    Args:
        spec: How fast it is.
    """

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.num_bytes = 0
        self.free_at = 0.0

    def take(self, now: float, size_bytes: int) -> float:
        """Queue a transfer; return when its first byte leaves, in seconds."""
        start = max(now, self.free_at)
        self.free_at = start + size_bytes / self.spec.bytes_per_s
        self.num_bytes += size_bytes
        return start
