"""Which replicas may take a request, and which one does: pure functions over arrays of loads."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.config import PlacementPolicy

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QueueLoads:
    """What queue limits look at.

    Args:
        num_seqs: int64 [n], sequences of the requests that each replica was given and that have
            not finished.
        max_num_seqs: int64 [n], sequences that each runs at once.
        num_pending_tokens: int64 [n], prompt and output tokens promised to those requests.
    """

    num_seqs: LongArray
    max_num_seqs: LongArray
    num_pending_tokens: LongArray

    @property
    def num_waiting(self) -> LongArray:
        """int64 [n], sequences that wait even if all rows are taken."""
        waiting: LongArray = (self.num_seqs - self.max_num_seqs).clip(0)
        return waiting

    def least_busy(self) -> int:
        """Return which has the fewest sequences waiting, then the fewest tokens pending."""
        return int(np.lexsort((self.num_pending_tokens, self.num_waiting))[0])


def has_room(
    loads: QueueLoads,
    num_seqs: int,
    num_tokens: int,
    max_num_waiting: int | None,
    max_pending_tokens: int | None,
) -> BoolArray:
    """Return which replicas may be given a further request. An idle one always may.

    Args:
        loads: Of the replicas.
        num_seqs: Sequences of the request.
        num_tokens: Its prompt and output tokens.
        max_num_waiting: Sequences that may wait; None for no limit.
        max_pending_tokens: Tokens that may be pending; None for no limit.

    Returns:
        bool [n].
    """
    room = np.ones(len(loads.num_seqs), np.bool_)
    if max_num_waiting is not None:
        room &= loads.num_seqs + num_seqs - loads.max_num_seqs <= max_num_waiting
    if max_pending_tokens is not None:
        room &= loads.num_pending_tokens + num_tokens <= max_pending_tokens
    room |= loads.num_seqs == 0
    return room


def estimate_retry_s(finish_times: Sequence[float]) -> float | None:
    """Estimate when the next request finishes: the mean time between those that finished last.

    Args:
        finish_times: In seconds, oldest first.

    Returns:
        Seconds from now; None with fewer than two.
    """
    if len(finish_times) < 2:
        return None
    return (finish_times[-1] - finish_times[0]) / (len(finish_times) - 1)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What placement looks at: the replicas that may take one request, at least one.

    Args:
        num_cached_tokens: int64 [n], leading tokens of its prompt that each holds.
        num_pending_tokens: int64 [n], prompt and output tokens promised to the requests that each
            was given and that have not finished.
        last_turn: int64 [n], when each was last given a request: placements are counted; -1 where
            it never was.
    """

    num_cached_tokens: LongArray
    num_pending_tokens: LongArray
    last_turn: LongArray


def round_robin(candidates: Candidates) -> int:
    """Choose whoever was chosen longest ago."""
    return int(np.argmin(candidates.last_turn))


def least_loaded(candidates: Candidates) -> int:
    """Choose the one with the fewest tokens promised; the first of equals."""
    return int(np.argmin(candidates.num_pending_tokens))


def prefix_aware(candidates: Candidates) -> int:
    """Choose the longest cached prefix, then the fewest tokens promised, then the first."""
    cached = candidates.num_cached_tokens
    longest = np.flatnonzero(cached == cached.max())
    return int(longest[np.argmin(candidates.num_pending_tokens[longest])])


PLACEMENTS: Final[Mapping[PlacementPolicy, Callable[[Candidates], int]]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
