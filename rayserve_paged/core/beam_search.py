"""One step of beam search as pure functions: candidates in; next beams and hypotheses out.

    candidates of all live beams, best first
    0 ........ width ........
    ends here: a finished hypothesis | an end this far down is dropped
    goes on: one of the next beams, until there are `width` of them

The rules are those of `generate(num_beams=...)` in Hugging Face transformers: a hypothesis counts
its end id as a token, its score is its cumulative log-probability over that count to the power of
`length_penalty`, and the search keeps the `width` hypotheses of the highest scores. Where
transformers leaves the order of equals to a sort that promises none, it is fixed here: of equal
candidates the one of the better beam comes first, then the lower token id, and of equal
hypotheses the one that was found first.

Source: Graves, "Sequence transduction with recurrent neural networks", 2012, for the search;
Wu et al., "Google's neural machine translation system", 2016, for scores by length.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]
"""When a search with `width` hypotheses ends: True at once; False when no beam, at its length of
now, scores better than the worst of them; "never" when none could at any length."""

Candidates = Sequence[tuple[int, float]]
"""Token ids and their log-probabilities behind one beam, the most likely first."""


@dataclasses.dataclass(frozen=True, slots=True)
class BeamRules:
    """What a search goes by.

    Args:
        width: Beams and hypotheses that are kept, at least 1.
        length_penalty: Above 0 longer hypotheses score better, below 0 shorter ones.
        early_stopping: When a search with `width` hypotheses ends.
        end_ids: Tokens that end a hypothesis.
        min_tokens: An end id among fewer tokens ends nothing.
        max_tokens: The last one ends any hypothesis.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    end_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    def score(self, cumulative: float, num_tokens: int) -> float:
        """Return the score of a hypothesis.

        Args:
            cumulative: Sum of the log-probabilities of its tokens.
            num_tokens: How many they are, the end id among them.
        """
        return cumulative / math.pow(num_tokens, self.length_penalty)


class Child(NamedTuple):
    """A beam one token on.

    Args:
        parent: Rank of the beam that it continues.
        token_id: With this token.
        logprob: Of the token.
        cumulative: Sum of the log-probabilities of all its tokens.
    """

    parent: int
    token_id: int
    logprob: float
    cumulative: float


class Selection(NamedTuple):
    """What becomes of the beams.

    Args:
        live: The next beams, best first; at most `width`.
        ended: Children that ended by an end id or by length, best first.
    """

    live: list[Child]
    ended: list[Child]


def select(
    rules: BeamRules, cumulative: Sequence[float], candidates: Sequence[Candidates], num_tokens: int
) -> Selection:
    """Choose the next beams.

    Args:
        rules: Of the search.
        cumulative: Of each beam, best first.
        candidates: Of each beam at least the `num_candidates` most likely ones that may follow.
        num_tokens: Output tokens that the children have.
    """
    children = [
        Child(parent, token_id, logprob, before + logprob)
        for parent, (before, top) in enumerate(zip(cumulative, candidates, strict=True))
        for token_id, logprob in top
    ]
    children.sort(key=lambda child: (-child.cumulative, child.parent, child.token_id))
    is_last = num_tokens >= rules.max_tokens
    can_end = num_tokens >= rules.min_tokens
    selection = Selection([], [])
    for rank, child in enumerate(children):
        if is_last or (can_end and child.token_id in rules.end_ids):
            if rank < rules.width:
                selection.ended.append(child)
        elif len(selection.live) < rules.width:
            selection.live.append(child)
        if rank + 1 >= rules.width and (is_last or len(selection.live) == rules.width):
            break
    return selection


def num_candidates(width: int, num_end_ids: int) -> int:
    """Return how many candidates of one beam `select` may have to look at.

    Of one beam no more than `width` children are taken, and no more of its candidates are passed
    over than there are ends.
    """
    return width + num_end_ids


class Hypothesis(NamedTuple):
    """A finished output.

    Args:
        score: By which hypotheses are ranked.
        token_ids: Output tokens, the end id among them.
        logprobs: Of each of them.
        ended: By an end id; else by length.
    """

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool

    @property
    def cumulative(self) -> float:
        """Sum of the log-probabilities."""
        return math.fsum(self.logprobs)


def insert(found: list[Hypothesis], hypothesis: Hypothesis, width: int) -> None:
    """Add a hypothesis to those found, best first, of which the best `width` are kept."""
    bisect.insort_right(found, hypothesis, key=lambda other: -other.score)
    del found[width:]


def is_over(
    rules: BeamRules, best_cumulative: float | None, num_tokens: int, found: Sequence[Hypothesis]
) -> bool:
    """Decide whether a search has ended.

    Args:
        rules: Of the search.
        best_cumulative: Of the best live beam, None where none is left.
        num_tokens: Output tokens of the live beams.
        found: Hypotheses, best first.
    """
    if best_cumulative is None:
        return True
    if len(found) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    to_the_end = rules.early_stopping == "never" and rules.length_penalty > 0
    hoped_for = rules.score(best_cumulative, rules.max_tokens if to_the_end else num_tokens)
    return hoped_for <= found[-1].score
