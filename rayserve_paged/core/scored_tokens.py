"""Which prompt tokens a step scores, where their log-probabilities were asked for.

The logits of a token score the token after it. A position that was taken from the prefix cache has
no logits, so a sequence that wants scores reads from the cache only what it has scored before (as
when it resumes after preemption); the blocks that it computes are published like any others.

    prompt         t0          t1          t2          t3
    its logits     score t1    score t2    score t3    are what the first output is chosen from
"""

from collections.abc import Sequence

import numpy as np

from rayserve_paged.core.running_batch import RunningBatch, Scoring
from rayserve_paged.core.step_messages import IntArray, ScoredTokens, TokenLogprobs


def plan_scores(
    batch: RunningBatch, rows: IntArray, computed: IntArray, num_tokens: IntArray
) -> tuple[ScoredTokens | None, list[Scoring]]:
    """Choose what a step scores: each position that it computes and that was not scored before.

    Args:
        batch: The running sequences; rows whose last score is on its way leave `batch.scoring`.
        rows: int32 [num_scheduled].
        computed: int32 [num_scheduled], tokens of each row in the cache before the step.
        num_tokens: int32 [num_scheduled], tokens of each row to compute.

    Returns:
        For the ranks, None where nothing is scored; and for the commit of the step.
    """
    if not batch.scoring:
        return None, []
    indices: list[int] = []
    targets: list[int] = []
    scoring: list[Scoring] = []
    fields = np.column_stack((rows, computed, num_tokens, np.cumsum(num_tokens)))
    for row, start, count, end in fields.tolist():
        if row not in batch.scoring:
            continue
        sequence = batch.sequence(row)
        assert sequence.scores is not None, "a row that scores belongs to who asked for it"
        # A step in flight has computed, and scored, what lies before `start`.
        first = max(start, sequence.scores.num_done)
        last = min(start + count, sequence.scores.num_wanted)
        if last == sequence.scores.num_wanted:
            batch.scoring.remove(row)
        if first < last:
            shift = end - count - start
            indices += range(first + shift, last + shift)
            targets += sequence.tokens[first + 1 : last + 1]
            scoring.append((sequence, last - first))
    if not scoring:
        return None, []
    return ScoredTokens(np.array(indices, np.int32), np.array(targets, np.int32)), scoring


def take_in_scores(scoring: Sequence[Scoring], scores: Sequence[TokenLogprobs]) -> None:
    """Hand the scores of a finished step to the sequences that they are of."""
    start = 0
    for sequence, num_tokens in scoring:
        assert sequence.scores is not None
        sequence.scores.add(scores[start : start + num_tokens])
        start += num_tokens
    assert start == len(scores), f"a step scored {len(scores)} tokens, and {start} were asked for"
