"""Carries out a beam search on a running batch: beams enter, fork each other's blocks, and end.

When the next beams are chosen, the first child of a beam stays in its row. Beams without a child
give back their blocks; further children take rows and fork the table of their parent: all full
blocks are shared, and so is the tail, until one of those that share it writes (copy-on-write).
"""

from array import array

import numpy as np

from rayserve_paged.core.beam_group import Beam, BeamGroup, Entry
from rayserve_paged.core.beam_search import Child
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.running_batch import RunningBatch
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.core.step_messages import IntArray, TokenLogprobs


def take_in_candidates(
    batch: RunningBatch, rows: IntArray, logprobs: dict[int, TokenLogprobs]
) -> list[BeamGroup]:
    """Take in what a step proposes for beams, and choose the next ones where all have proposals.

    Args:
        batch: The batch; no later step has these rows.
        rows: int32 [num_samples], the row of each sample of the step.
        logprobs: By sample; of beams the candidates.

    Returns:
        The searches whose beams have changed, or that are over.
    """
    touched: dict[BeamGroup, None] = {}
    for index in np.flatnonzero(batch.alive[rows] & batch.is_beam[rows]).tolist():
        sequence = batch.sequence(int(rows[index]))
        assert sequence.beam is not None
        batch.sync(sequence)
        sequence.beam.propose(sequence, logprobs[index].top)
        touched[sequence.beam] = None
    changed = []
    for group in touched:
        if group.is_level:
            _choose(batch, group)
            changed.append(group)
        elif group.is_entering:
            _enter_others(batch, group)
    return changed


def end_beams(
    batch: RunningBatch,
    group: BeamGroup,
    finish: FinishReason,
    error: str | None = None,
    *,
    discard: bool = False,
) -> None:
    """End a search with all of its beams.

    Args:
        batch: The batch.
        group: The search.
        finish: Why.
        error: The reason, where it has no outputs.
        discard: The blocks of the beams are not to be matched.
    """
    group.finish, group.error = finish, error
    _reserve(batch, group, 0)
    for sequence in group.sequences:
        sequence.finish = finish
        if sequence.row is None:
            sequence.phase = Phase.ENDED
        else:
            batch.retire(sequence, discard=discard)


def preempt_beams(batch: RunningBatch, group: BeamGroup) -> None:
    """Take the blocks and rows of all beams away.

    Raises:
        AssertionError: A step in flight writes blocks of theirs.
    """
    _reserve(batch, group, 0)
    for sequence in group.sequences:
        if sequence.row is not None:
            batch.preempt(sequence)
    group.leave()


def reserve_rows(batch: RunningBatch, group: BeamGroup) -> None:
    """Keep rows free for the beams that have none, and for those that the search may yet have."""
    num_rows = sum(sequence.row is not None for sequence in group.sequences)
    _reserve(batch, group, group.rules.width - num_rows)


def _reserve(batch: RunningBatch, group: BeamGroup, num_rows: int) -> None:
    batch.num_reserved_rows += num_rows - group.num_reserved_rows
    group.num_reserved_rows = num_rows


def _enter_others(batch: RunningBatch, group: BeamGroup) -> None:
    """Give rows to the beams that need wait no longer."""
    group.entries = [entry for entry in group.entries if not _enter(batch, group, entry)]
    reserve_rows(batch, group)


def _enter(batch: RunningBatch, group: BeamGroup, entry: Entry) -> bool:
    """Give a beam a row: the blocks of another one serve it as far as their tokens are the same,
    and the prefix cache may know more.

    Returns:
        Whether it was done; False where the other one has not computed those blocks yet.
    """
    sequence, source = entry.beam.sequence, entry.source
    places = batch.kv.match(sequence.keys, sequence.num_known, sequence.windows)
    num_places = group.num_blocks_shared(entry) * len(sequence.windows)
    # Behind a window the other one has let go of what they have in common.
    if len(places) < num_places and not sequence.table.has_window:
        if source.candidates is None:
            return False
        places = source.sequence.table.places()[:num_places]
    sequence.table = batch.kv.open(
        places, None, sequence.windows, resumes=True, retention=sequence.retention
    )
    sequence.num_sealed = len(places) // len(sequence.windows)
    sequence.priority = group.first.priority
    batch.enter(sequence, sequence.num_sealed * batch.block_size)
    return True


def _choose(batch: RunningBatch, group: BeamGroup) -> None:
    """Put the next beams in the place of those that have their candidates."""
    live = group.select()
    if group.finish is not None:
        end_beams(batch, group, group.finish)
        return
    parents = group.beams
    first_child: dict[int, Child] = {}
    for child in live:
        first_child.setdefault(child.parent, child)
    for rank, beam in enumerate(parents):
        if rank not in first_child:
            batch.retire(beam.sequence)
    taken = {parents[rank].sequence.sibling for rank in first_child}
    numbers = (number for number in range(group.rules.width) if number not in taken)
    group.beams = [
        Beam(
            parent.sequence
            if first_child[child.parent] is child
            else _fork(batch, parent.sequence, next(numbers)),
            child.cumulative,
            parent.logprobs + array("d", (child.logprob,)),
        )
        for child in live
        for parent in (parents[child.parent],)
    ]
    rows = np.array([sequence.row for sequence in group.sequences], np.int32)
    batch.append(rows, np.array([child.token_id for child in live], np.int32))
    batch.held_back[rows] = False
    reserve_rows(batch, group)


def _fork(batch: RunningBatch, parent: SequenceState, sibling: int) -> SequenceState:
    """Return another beam that knows what its parent knows, in a row of its own."""
    row = parent.row
    assert row is not None
    child = parent.fork(sibling, batch.kv.fork(parent.table), parent.num_known)
    batch.mark_forked(row)
    batch.mark_forked(batch.enter(child, int(batch.computed[row])))
    return child
