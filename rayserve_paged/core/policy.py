"""Decisions of a replica as pure functions over snapshots: dealing a step, admission, waiting,
victims.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.config import QueuePolicy

SHARED_BUDGET = 4
"""One in so many tokens of a step's budget is kept from the prefill that is served first."""


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


def shorten_chunks(
    num_tokens: npt.NDArray[np.int32],
    room: npt.NDArray[np.int32],
    may_shorten: npt.NDArray[np.bool_],
    num_places: int,
    block_size: int,
) -> npt.NDArray[np.int32] | None:
    """Shorten chunks until the blocks that they need are there; first served first.

    Nobody is left without a token, so that whoever is served first never waits for others.

    Args:
        num_tokens: int32 [n], tokens that each sequence was granted.
        room: int32 [n], tokens for which it has blocks.
        may_shorten: bool [n], whether its chunk may be shortened: it does not keep all blocks.
        num_places: Further blocks that can be granted, in each layer group.
        block_size: Slots per block.

    Returns:
        int32 [n], at least 1; None where not even that fits.
    """
    chunks = np.where(may_shorten, np.minimum(num_tokens, 1), num_tokens)
    places = -(-(chunks - room).clip(0) // block_size)
    left = num_places - int(places.sum())
    if left < 0:
        return None
    for row in np.flatnonzero(may_shorten & (num_tokens > 1)).tolist():
        most = int(room[row]) + (int(places[row]) + left) * block_size
        chunks[row] = min(int(num_tokens[row]), most)
        left += int(places[row]) - max(0, -(-int(chunks[row] - room[row]) // block_size))
    shortened: npt.NDArray[np.int32] = chunks
    return shortened


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


# --- who waits in which order ---------------------------------------------------------------

OrderKey = tuple[float, int, int]
"""What decides who starts first: the smallest. The last two are arrival and sibling."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingRequest:
    """What the waiting order looks at for one sequence without a row.

    Args:
        priority: Lower is served first.
        arrival: Order of arrival; one that was preempted keeps its own.
        sibling: Which of the request's samples.
        num_remaining_tokens: Tokens to be computed or sampled until its end, at most.
        num_cached_blocks: Leading blocks of it that the prefix cache holds.
        tenant_served: Tokens that its tenant was served, over the tenant's weight.
    """

    priority: int
    arrival: int
    sibling: int
    num_remaining_tokens: int
    num_cached_blocks: int
    tenant_served: float


def fcfs_key(waiting: WaitingRequest) -> OrderKey:
    """Order by arrival alone."""
    return 0.0, waiting.arrival, waiting.sibling


def priority_key(waiting: WaitingRequest) -> OrderKey:
    """Order by priority, then by arrival."""
    return waiting.priority, waiting.arrival, waiting.sibling


def weighted_fair_key(waiting: WaitingRequest) -> OrderKey:
    """Order by what the tenant was served per weight, the least first, then by arrival.

    Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), the virtual
    token counter; here a tenant is charged when a request starts, with all that it may take.
    """
    return waiting.tenant_served, waiting.arrival, waiting.sibling


def shortest_remaining_key(waiting: WaitingRequest) -> OrderKey:
    """Order by the tokens that are left to do, then by arrival."""
    return waiting.num_remaining_tokens, waiting.arrival, waiting.sibling


def longest_prefix_key(waiting: WaitingRequest) -> OrderKey:
    """Order by the cached prefix, the longest first, then by arrival."""
    return -waiting.num_cached_blocks, waiting.arrival, waiting.sibling


WAITING_KEYS: Final[Mapping[QueuePolicy, Callable[[WaitingRequest], OrderKey]]] = {
    "fcfs": fcfs_key,
    "priority": priority_key,
    "weighted-fair": weighted_fair_key,
    "shortest-remaining": shortest_remaining_key,
    "longest-prefix-first": longest_prefix_key,
}

OLDEST_EVERY: Final[Mapping[QueuePolicy, int | None]] = {
    "fcfs": None,
    "priority": None,
    "weighted-fair": 16,
    "shortest-remaining": 16,
    "longest-prefix-first": 16,
}
"""One in so many starts is that of the request which has waited longest, where the configuration
says nothing else: the first policy needs no bound, the second is asked for strictness."""


def is_turn_of_oldest(num_passed: int, oldest_every: int | None) -> bool:
    """Return whether the next to start is whoever arrived first, whatever the order says.

    Of any `oldest_every` starts in a row one is that of the oldest; so a request that finds p
    older ones waiting starts as one of the next `oldest_every * (p + 1)`, unless an older one is
    preempted meanwhile, each of which adds `oldest_every`.

    Args:
        num_passed: Starts since the last that was the oldest's.
        oldest_every: The bound; None for none.
    """
    return oldest_every is not None and num_passed + 1 >= oldest_every


# --- who gives way --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class BlockHolder:
    """What the choice of a victim looks at for one running sequence.

    Only blocks that nobody else holds count: the others stay, and are matched when it resumes.

    Args:
        priority: Lower is served first.
        num_open_blocks: Blocks that are not sealed, and so lost at once.
        num_open_tokens: Computed tokens in them.
        num_sealed_blocks: Blocks that stay cached until somebody needs them.
    """

    priority: int
    num_open_blocks: int
    num_open_tokens: int
    num_sealed_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """A victim's blocks are let go; what the cache has lost when it resumes is computed again.

    Args:
        num_tokens: How many tokens the shortage at hand makes it lose.
    """

    num_tokens: int


Way = Recompute
"""How a victim gives way: a union, to which other ways of keeping its KV may be added."""


@dataclasses.dataclass(frozen=True, slots=True)
class Victim:
    """Who gives way, and how.

    Args:
        index: Among the holders.
        way: What becomes of its KV.
    """

    index: int
    way: Way


def choose_victim(holders: Sequence[BlockHolder], num_short: int, block_size: int) -> Victim:
    """Choose who gives way: of the least urgent, who loses least for each block that it frees.

    A freed block that is sealed is lost only if the shortage takes it: unsealed blocks go first.
    So the cost is that of the tokens in unsealed blocks, and of as many sealed blocks as are
    still missing. Where two cost the same, the one served later gives way.

    Args:
        holders: First served first.
        num_short: Blocks that are missing, at least 1.
        block_size: Slots per block.

    Raises:
        ValueError: `holders` is empty.
    """
    least_urgent = max(holder.priority for holder in holders)

    def num_lost(holder: BlockHolder) -> int:
        num_taken = min(max(0, num_short - holder.num_open_blocks), holder.num_sealed_blocks)
        return holder.num_open_tokens + num_taken * block_size

    def cost(index: int) -> tuple[bool, float, int]:
        holder = holders[index]
        num_freed = holder.num_open_blocks + holder.num_sealed_blocks
        return num_freed == 0, num_lost(holder) / max(1, num_freed), -index

    index = min(
        (index for index, holder in enumerate(holders) if holder.priority == least_urgent),
        key=cost,
    )
    return Victim(index, Recompute(num_lost(holders[index])))
