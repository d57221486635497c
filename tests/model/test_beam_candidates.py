"""Which candidates the sampler lists for a beam."""

import math

import numpy as np
import pytest
import torch

from rayserve_paged.core.sampling_params import MAX_LOGPROBS, SamplingParams
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow

Candidates = tuple[tuple[int, float], ...]


def candidates(
    logits: list[float], params: SamplingParams, position: int = 0, eos: tuple[int, ...] = ()
) -> Candidates:
    row = SamplingRow(params, position, eos)
    _tokens, logprobs, errors = Sampler().sample(torch.tensor([logits]), [row])
    assert errors == {}
    assert logprobs[0].logprob == logprobs[0].top[0][1]
    return logprobs[0].top


def test_candidates_are_the_most_likely_tokens_and_one_more_for_each_end() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.25, 0.05)]
    params = SamplingParams(beam_width=2, stop_token_ids=(2,))
    found = candidates(logits, params)
    assert [token_id for token_id, _ in found] == [1, 3, 2]
    assert [logprob for _, logprob in found] == pytest.approx(
        [math.log(0.4), math.log(0.25), math.log(0.2)], abs=1e-6
    )
    assert len(candidates(logits, params, eos=(2, 4))) == 4
    assert len(candidates(logits, SamplingParams(beam_width=2), eos=(4,))) == 3


def test_of_equally_likely_tokens_the_lower_ids_are_listed() -> None:
    found = candidates([1.0, 3.0, 3.0, 1.0, 3.0, 1.0], SamplingParams(beam_width=4))
    assert [token_id for token_id, _ in found] == [1, 2, 4, 0]


def test_a_token_that_may_not_be_chosen_makes_no_other_more_likely() -> None:
    logits = [2.0, 1.0, 0.5, -1.0]
    every = dict(candidates(logits, SamplingParams(beam_width=4)))
    assert math.fsum(map(math.exp, every.values())) == pytest.approx(1.0)
    params = SamplingParams(beam_width=2, allowed_token_ids=(1, 3))
    assert candidates(logits, params) == ((1, every[1]), (3, every[3]))
    early = SamplingParams(beam_width=2, min_tokens=3)
    assert candidates(logits, early, 1, (0,)) == tuple((i, every[i]) for i in (1, 2, 3))
    assert candidates(logits, early, 2, (0,)) == tuple((i, every[i]) for i in (0, 1, 2))


def test_the_bound_on_logprobs_is_none_on_candidates() -> None:
    logits = np.random.default_rng(3).normal(size=300).tolist()
    found = candidates(logits, SamplingParams(beam_width=64))
    assert len(found) == 64 > MAX_LOGPROBS
    best = sorted(range(300), key=lambda token_id: -logits[token_id])[:64]
    assert [token_id for token_id, _ in found] == best


def test_a_beam_changes_no_other_row() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows = [
        SamplingRow(SamplingParams(temperature=1.0, seed=4), 3),
        SamplingRow(SamplingParams(beam_width=3), 3),
        SamplingRow(SamplingParams(temperature=0.0, logprobs=2), 3),
    ]
    tokens, logprobs, errors = Sampler().sample(logits, rows)
    for index in (0, 2):
        alone, its, _ = Sampler().sample(logits[index : index + 1], [rows[index]])
        assert tokens[index] == alone[0]
        assert logprobs.get(index) == its.get(0)
    assert [len(logprobs[index].top) for index in sorted(logprobs)] == [3, 2]
    assert errors == {}


def test_a_beam_whose_logits_are_broken_fails_alone() -> None:
    logits = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    rows = [SamplingRow(SamplingParams(beam_width=2), 0)] * 2
    _tokens, logprobs, errors = Sampler().sample(logits, rows)
    assert list(errors) == [0]
    assert list(logprobs) == [1]
