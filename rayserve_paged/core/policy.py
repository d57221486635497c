"""Decisions as pure functions over snapshots: placement, dealing a step, admission, waiting."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.ids import ReplicaId

SHARED_BUDGET = 4
"""One in so many tokens of a step's budget is kept from the prefill that is served first."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What placement looks at for one replica and one request.

    Args:
        replica_id: The replica.
        num_cached_blocks: Leading blocks of the request's prompt that it holds.
        num_pending_tokens: Prompt and output tokens promised to requests placed there that have
            not finished.
    """

    replica_id: ReplicaId
    num_cached_blocks: int
    num_pending_tokens: int


def choose_replica(loads: Sequence[ReplicaLoad]) -> ReplicaId:
    """Place a request: the longest cached prefix, then the least load, then the lowest id.

    Raises:
        ValueError: `loads` is empty.
    """
    best = min(
        loads,
        key=lambda load: (-load.num_cached_blocks, load.num_pending_tokens, load.replica_id),
    )
    return best.replica_id


def deal_budget(
    pending: npt.NDArray[np.int32], budget: int, *, newcomers: bool
) -> npt.NDArray[np.int32]:
    """Deal a step's token budget to running sequences.

    Sequences one token behind come first, so that no prefill stalls them. Of the rest a quarter
    is kept from the first prefill: for newcomers where any wait, and else for the prefills with
    the least left to do. So a long prompt delays short ones by a bounded number of steps, and is
    itself never starved.

    Args:
        pending: int32 [n], at least 0, tokens that each could compute, first served first.
        budget: Tokens in all.
        newcomers: Whether sequences wait to be started.

    Returns:
        int32 [n], tokens granted to each.
    """
    dealt = np.minimum(pending, 1)
    decoding = pending <= 1
    num_decoding = int(dealt[decoding].sum())
    if num_decoding >= budget:
        dealt[~decoding] = 0
        granted: npt.NDArray[np.int32] = np.where(np.cumsum(dealt) <= budget, dealt, 0)
        return granted
    dealt[~decoding] = 0
    prefills = np.flatnonzero(~decoding)
    left = budget - num_decoding
    if not len(prefills):
        return dealt
    first, others = prefills[0], prefills[1:]
    kept = left // SHARED_BUDGET
    if not newcomers:
        kept = min(kept, int(pending[others].sum()))
    dealt[first] = min(int(pending[first]), left - kept)
    left -= int(dealt[first])
    if newcomers:
        left -= kept
    for row in others[np.argsort(pending[others], kind="stable")].tolist():
        if left <= 0:
            break
        dealt[row] = min(int(pending[row]), left)
        left -= int(dealt[row])
    return dealt


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixWait:
    """What decides whether a sequence waits for a prefix that another one is computing.

    Args:
        num_blocks_gained: Blocks that it need not compute itself if it waits.
        num_steps_waited: Steps that it has waited already.
        max_steps: Steps that it may wait.
        others_run: Whether there is something else to compute meanwhile.
    """

    num_blocks_gained: int
    num_steps_waited: int
    max_steps: int
    others_run: bool


def should_wait_for_prefix(wait: PrefixWait) -> bool:
    """Decide whether a sequence that could start waits for blocks that are being computed.

    It loses little by it: what it would compute itself, the other computes meanwhile, and what
    that has done is in the cache when the wait is over, whatever ended it.
    """
    return (
        wait.others_run and wait.num_blocks_gained >= 1 and wait.num_steps_waited < wait.max_steps
    )


def can_admit(
    *,
    num_blocks_needed: int,
    num_blocks_available: int,
    num_blocks_promised: int,
    num_running: int,
) -> bool:
    """Decide whether a waiting sequence may start.

    Its whole known history must fit beside what the running prefills were promised, so that two
    half-computed prompts cannot starve each other; and each running sequence keeps one block of
    headroom, so that a sequence is not admitted merely to be preempted at the next block's edge.

    Args:
        num_blocks_needed: Blocks of the known history that are not already held by others.
        num_blocks_available: FREE and CACHED blocks.
        num_blocks_promised: Blocks that running sequences need for tokens they already know.
        num_running: Running sequences.
    """
    return num_blocks_needed + num_blocks_promised + num_running <= num_blocks_available
