"""Which replicas may take a request, and which one does: pure functions over arrays of loads."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.config import PlacementPolicy

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
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
        num_saved_tokens: float64 [n], what the leading tokens of its prompt are worth that each
            holds: see `worth_of_blocks`.
        num_queued_tokens: int64 [n], prompt tokens that each has yet to compute, as far as the
            controller knows: those of requests that it was given and of which no report says that
            their prompts are computed.
        num_seqs: int64 [n], sequences of the requests that each was given and that have not
            finished.
        num_pending_tokens: int64 [n], prompt and output tokens promised to those requests.
        num_recent_tokens: float64 [n], prompt tokens that each was given to compute of late.
        last_turn: int64 [n], when each was last given a request: placements are counted; -1 where
            it never was.
    """

    num_saved_tokens: FloatArray
    num_queued_tokens: LongArray
    num_seqs: LongArray
    num_pending_tokens: LongArray
    num_recent_tokens: FloatArray
    last_turn: LongArray

    def only(self, indices: npt.NDArray[np.intp]) -> "Candidates":
        """Return some of them.

        Args:
            indices: Which, ascending.
        """
        return Candidates(
            self.num_saved_tokens[indices],
            self.num_queued_tokens[indices],
            self.num_seqs[indices],
            self.num_pending_tokens[indices],
            self.num_recent_tokens[indices],
            self.last_turn[indices],
        )


def round_robin(candidates: Candidates) -> int:
    """Choose whoever was chosen longest ago."""
    return int(candidates.last_turn.argmin())


def least_loaded(candidates: Candidates) -> int:
    """Choose the one with the fewest tokens promised; of equals whoever was chosen longest ago."""
    return _least(candidates.num_pending_tokens, candidates.last_turn)


SAVED_WEIGHT: Final = 4
"""How many tokens may be queued before a request, for each token that need not be computed again.
A token that is saved makes way for all that come later, and not for this request alone."""
SEQUENCE_TOKENS: Final = 64
"""How many queued tokens a sequence counts for: each takes a slot in every step, and blocks."""
RECENT_SHARE: Final = 0.2
"""What the work of late counts for, so that replicas that are all idle take turns."""


def prefix_aware(candidates: Candidates) -> int:
    """Choose by what is queued there, less what need not be computed there.

    All in prompt tokens: those queued before the request, the sequences that it would share steps
    with, what the replica holds of its prompt, and what it was given of late. Of equals whoever
    was chosen longest ago.
    """
    cost: FloatArray = RECENT_SHARE * candidates.num_recent_tokens
    cost += candidates.num_queued_tokens
    cost += SEQUENCE_TOKENS * candidates.num_seqs
    cost -= SAVED_WEIGHT * candidates.num_saved_tokens
    return _least(cost, candidates.last_turn)


def worth_of_blocks(depths: Sequence[int], heats: Sequence[int]) -> list[float]:
    """Return what leading blocks of a prompt are worth to a placement, in blocks.

    A prefix that n prompts have parted from before will be wanted by as many again. Where it is
    computed once more, that is shared among them: so its blocks count for 1 / (n + 1) only, and a
    prefix that all share spreads over the replicas, while a session stays where its history is.

    Args:
        depths: Numbers of leading blocks, ascending, from 1.
        heats: For each, how many prompts have parted from it there or deeper.
    """
    worth, below, total = [], 0, 0.0
    for depth, heat in zip(depths, heats, strict=True):
        total += (depth - below) / (heat + 1)
        below = depth
        worth.append(total)
    return worth


def _least(cost: LongArray | FloatArray, last_turn: LongArray) -> int:
    least = (cost == np.minimum.reduce(cost)).nonzero()[0]
    return int(least[last_turn[least].argmin()])


PLACEMENTS: Final[Mapping[PlacementPolicy, Callable[[Candidates], int]]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
