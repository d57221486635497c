"""The pure part of beam search: which children go on, which have ended, when it is over."""

import math

import pytest

from rayserve_paged.core.beam_search import (
    BeamRules,
    Child,
    EarlyStopping,
    Hypothesis,
    insert,
    is_over,
    num_candidates,
    select,
)


def rules(
    width: int = 2,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    min_tokens: int = 0,
    max_tokens: int = 10,
) -> BeamRules:
    return BeamRules(width, length_penalty, early_stopping, frozenset({0}), min_tokens, max_tokens)


def hypothesis(score: float, token_id: int = 7) -> Hypothesis:
    return Hypothesis(score, (token_id,), (score,), ended=True)


def test_children_are_ranked_over_all_beams() -> None:
    first = [(4, -0.5), (5, -2.0), (6, -3.0)]
    second = [(4, -0.25), (5, -0.75), (6, -4.0)]
    selection = select(rules(), [-1.0, -1.5], [first, second], 3)
    assert selection.live == [Child(0, 4, -0.5, -1.5), Child(1, 4, -0.25, -1.75)]
    assert selection.ended == []


def test_all_children_may_be_of_one_beam() -> None:
    first = [(4, -0.5), (5, -0.75), (6, -3.0)]
    selection = select(rules(), [-1.0, -9.0], [first, [(4, -0.125), (5, -1.0), (6, -2.0)]], 3)
    assert [(child.parent, child.token_id) for child in selection.live] == [(0, 4), (0, 5)]


def test_equal_children_are_ordered_by_beam_then_by_token() -> None:
    top = [(3, -1.0), (5, -1.0), (6, -1.0)]
    selection = select(rules(width=3), [-2.0, -2.0], [top, [(2, -1.0), (4, -1.0)]], 3)
    assert [(c.parent, c.token_id) for c in selection.live] == [(0, 3), (0, 5), (0, 6)]


def test_an_end_among_the_best_is_a_hypothesis_and_does_not_take_a_beam() -> None:
    top = [(4, -0.5), (0, -1.0), (5, -2.0), (6, -3.0)]
    selection = select(rules(), [0.0], [top], 1)
    assert selection.ended == [Child(0, 0, -1.0, -1.0)]
    assert [child.token_id for child in selection.live] == [4, 5]


def test_an_end_further_down_is_dropped() -> None:
    top = [(4, -0.5), (5, -1.0), (0, -2.0), (6, -3.0)]
    selection = select(rules(), [0.0], [top], 1)
    assert selection.ended == []
    assert [child.token_id for child in selection.live] == [4, 5]


def test_before_min_tokens_no_id_ends_anything() -> None:
    selection = select(rules(min_tokens=3), [0.0], [[(0, -0.5), (4, -1.0)]], 2)
    assert [child.token_id for child in selection.live] == [0, 4]
    selection = select(rules(min_tokens=3), [0.0], [[(0, -0.5), (4, -1.0)]], 3)
    assert [child.token_id for child in selection.ended] == [0]


def test_at_the_last_token_the_best_children_end_and_none_goes_on() -> None:
    top = [(4, -0.5), (0, -1.0), (5, -2.0), (6, -3.0)]
    selection = select(rules(max_tokens=4), [0.0], [top], 4)
    assert [child.token_id for child in selection.ended] == [4, 0]
    assert selection.live == []


@pytest.mark.parametrize("width", range(1, 7))
def test_further_candidates_of_a_beam_change_nothing(width: int) -> None:
    ends = frozenset({0, 3})
    search = BeamRules(width, 1.0, False, ends, 0, 10)
    cumulative = [-0.5 * rank for rank in range(width)]
    every = [
        sorted(
            ((token, -((token * 7 + rank * 5) % 23) / 4) for token in range(20)),
            key=lambda candidate: (-candidate[1], candidate[0]),
        )
        for rank in range(width)
    ]
    few = [top[: num_candidates(width, len(ends))] for top in every]
    assert select(search, cumulative, few, 2) == select(search, cumulative, every, 2)


def test_the_best_hypotheses_are_kept_and_of_equals_the_older_ones() -> None:
    found: list[Hypothesis] = []
    for score, token_id in ((-2.0, 1), (-1.0, 2), (-1.0, 3), (-3.0, 4), (-0.5, 5)):
        insert(found, hypothesis(score, token_id), 3)
    assert [one.token_ids for one in found] == [(5,), (2,), (3,)]


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0.0, -6.0), (1.0, -1.5), (2.0, -0.375), (-1.0, -24.0)]
)
def test_a_score_is_the_sum_over_a_power_of_the_length(length_penalty: float, score: float) -> None:
    assert rules(length_penalty=length_penalty).score(-6.0, 4) == score


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "over"),
    [
        # The worst hypothesis scores -1; 4 of 10 tokens are there.
        (True, 1.0, -0.1, True),
        (False, 1.0, -3.9, False),
        (False, 1.0, -4.0, True),
        (False, 0.0, -0.9, False),
        (False, 0.0, -1.0, True),
        ("never", 1.0, -9.9, False),
        ("never", 1.0, -10.0, True),
        ("never", 0.0, -0.9, False),
        ("never", 0.0, -1.0, True),
        # A longer one can only score worse.
        ("never", -1.0, -0.26, True),
        ("never", -1.0, -0.24, False),
    ],
)
def test_a_search_with_all_its_hypotheses_ends_when_none_can_be_better(
    early_stopping: EarlyStopping, length_penalty: float, best: float, over: bool
) -> None:
    search = rules(length_penalty=length_penalty, early_stopping=early_stopping)
    found = [hypothesis(-0.5), hypothesis(-1.0)]
    assert is_over(search, best, 4, found) is over
    assert not is_over(search, best, 4, found[:1])
    assert is_over(search, None, 4, [])


def test_a_hypothesis_adds_up_its_log_probabilities() -> None:
    one = Hypothesis(-1.0, (1, 2, 3), (-0.1, -0.2, -0.3), ended=False)
    assert one.cumulative == math.fsum((-0.1, -0.2, -0.3))
