"""Who of the running sequences gives way: to those before it, or to one that is more urgent."""

from collections.abc import Sequence

from rayserve_paged.core.admission import Admission, Candidate
from rayserve_paged.core.policy import BlockHolder, Recompute, choose_victim
from rayserve_paged.core.running_batch import RunningBatch
from rayserve_paged.core.sequence import SequenceState

NUM_CANDIDATES = 8
"""Victims are sought among so many of those served last: a bound on the search, and on how far
somebody served early can fall behind."""


def who_gives_way(batch: RunningBatch, num_short: int) -> SequenceState:
    """Return who gives way where blocks are short. The first served never does while others run.

    So it goes on until it ends, then the next one is first: whatever is preempted, all end.

    Args:
        batch: At least one sequence runs.
        num_short: Blocks that are missing.
    """
    first = batch.order[0]
    candidates = batch.order[1:]
    if first.beam is not None:
        # Beams give way together.
        candidates = [sequence for sequence in candidates if sequence.beam is not first.beam]
    candidates = candidates[-NUM_CANDIDATES:]
    return _victim(batch, candidates, num_short) if candidates else first


def is_urgent(batch: RunningBatch, waiting: SequenceState) -> bool:
    """Return whether somebody runs that is less urgent than one that waits."""
    return bool(batch.order) and batch.order[-1].priority > waiting.priority


def who_makes_way(
    batch: RunningBatch, admission: Admission, urgent: Candidate
) -> list[SequenceState]:
    """Return the running sequences without which a waiting one has room; none where nobody's
    leaving would do.

    These are less urgent than it; equally urgent ones never give way to a newcomer. The beams of a
    search give way together.
    """
    lower = [each for each in batch.order if each.priority > urgent.sequence.priority]
    victims: list[SequenceState] = []
    while lower:
        gone = _victim(batch, lower[-NUM_CANDIDATES:], 1).together
        lower = [sequence for sequence in lower if sequence not in gone]
        victims += [sequence for sequence in gone if sequence.row is not None]
        if admission.fits_without(urgent, victims):
            return victims
    return []


def _victim(
    batch: RunningBatch, candidates: Sequence[SequenceState], num_short: int
) -> SequenceState:
    holders = [_holder(batch, sequence) for sequence in candidates]
    victim = choose_victim(holders, num_short, batch.block_size)
    match victim.way:
        case Recompute():
            return candidates[victim.index]


def _holder(batch: RunningBatch, sequence: SequenceState) -> BlockHolder:
    pool = batch.kv.pool
    num_open = num_sealed = 0
    # What is shared leads a table.
    for block_id in reversed(sequence.table.block_ids):
        if pool.count(block_id) > 1:
            break
        if pool.is_sealed(block_id):
            num_sealed += 1
        else:
            num_open += 1
    assert sequence.row is not None
    num_computed = int(batch.computed[sequence.row])
    num_open_places = num_open // batch.kv.num_layer_groups
    first_open = sequence.table.num_slots - num_open_places * batch.block_size
    return BlockHolder(
        priority=sequence.priority,
        num_open_blocks=num_open,
        num_open_tokens=max(0, num_computed - first_open),
        num_sealed_blocks=num_sealed,
    )
