import math

import numpy as np
import pytest
import torch

from rayserve_paged.model.prompt_scorer import PromptScorer


def test_scores_are_the_log_softmax_whatever_the_slices() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (7, 50)).astype(np.float32))
    targets = [3, 0, 49, 7, 7, 12, 1]
    scorer = PromptScorer(targets, [0, 1, 2, 3, 0, 20, 5], 50)
    for part in logits.split([1, 4, 2]):
        scorer.take(part)
    expected = torch.log_softmax(logits.double(), -1)
    for row, score in enumerate(scorer.scores):
        assert score.logprob == pytest.approx(float(expected[row, targets[row]]), abs=1e-12)
        count = [0, 1, 2, 3, 0, 20, 5][row]
        top = torch.topk(expected[row], count)
        assert [token_id for token_id, _ in score.top] == top.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=1e-12)


def test_a_token_that_cannot_be_has_minus_infinity_and_broken_logits_give_nan() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2] = -math.inf
    logits[1, 1] = math.nan
    logits[2, 1] = math.inf
    scorer = PromptScorer([2, 0, 0], [4, 4, 4], 4)
    scorer.take(logits)
    impossible, broken, infinite = scorer.scores
    assert impossible.logprob == -math.inf
    assert [token_id for token_id, _ in impossible.top] == [0, 1, 3]
    for score in (broken, infinite):
        assert math.isnan(score.logprob)
        assert score.top == ()


def test_logits_that_are_missing_are_an_error() -> None:
    scorer = PromptScorer([1, 2], [0, 0], 4)
    scorer.take(torch.zeros(1, 4))
    with pytest.raises(AssertionError, match="logits for every scored row"):
        _ = scorer.scores
