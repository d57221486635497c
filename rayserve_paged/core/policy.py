"""Decisions as pure functions over snapshots: placement and admission."""

import dataclasses
from collections.abc import Sequence

from rayserve_paged.core.ids import ReplicaId


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
