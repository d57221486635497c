"""Every token equals that of a naive reference: one row at a time, in plain Python floats."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.philox import uniform_draws
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.token_counts import TokenCounts

SLACK = 1e-12
"""Sums are rounded one way here and another way there: this close to a border both are right."""

EOS = (0, 2)


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = EOS,
) -> list[float]:
    """What tokens are chosen from."""
    values = [float(value) for value in logits]
    for token_id, bias in params.biases:
        values[token_id] += bias
    for token_id, value in enumerate(values):
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * output.count(token_id)
        value -= params.presence_penalty * (token_id in output)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            value = -math.inf
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        if position + 1 < params.min_tokens and token_id in ends:
            value = -math.inf
        values[token_id] = value
    return values


def acceptable(
    values: Sequence[float], params: SamplingParams, position: int, sibling: int = 0
) -> set[int]:
    """Tokens that may be chosen from edited logits: one, but for `SLACK`; none if none may be."""
    peak = max(values)
    if peak == -math.inf:
        return set()
    if params.temperature == 0:
        return {list(values).index(peak)}
    scaled = [(value - peak) / params.temperature for value in values]
    order = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    weights = {token_id: math.exp(scaled[token_id]) for token_id in order}
    draw = float(
        uniform_draws(*(np.array([n], np.uint64) for n in _key(params, position, sibling)))[0]
    )
    found = set()
    for floor, share, shift in itertools.product((-SLACK, SLACK), repeat=3):
        least = min(1.0, params.min_p * (1 + floor))
        kept = [i for i in order if weights[i] > 0 and weights[i] >= least]
        if params.top_k > 0:
            kept = kept[: params.top_k]
        if params.top_p < 1:
            kept = _nucleus(kept, weights, params.top_p + share)
        found.add(_drawn(sorted(kept), weights, draw + shift))
    return found


def _key(params: SamplingParams, position: int, sibling: int) -> tuple[int, int, int]:
    assert params.seed is not None
    return params.seed, sibling, position


def _nucleus(kept: list[int], weights: dict[int, float], share: float) -> list[int]:
    total = math.fsum(weights[i] for i in kept)
    reached = 0.0
    for count, token_id in enumerate(kept, start=1):
        reached += weights[token_id]
        if reached >= share * total:
            return kept[:count]
    return kept


def _drawn(kept: list[int], weights: dict[int, float], draw: float) -> int:
    target = draw * math.fsum(weights[i] for i in kept)
    reached = 0.0
    for token_id in kept:
        reached += weights[token_id]
        if reached > target:
            return token_id
    return kept[-1]


class Case:
    """One row: its logits and history, and which tokens are right."""

    def __init__(
        self,
        logits: Sequence[float],
        params: SamplingParams,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        sibling: int = 0,
    ) -> None:
        self.logits = torch.tensor(logits, dtype=torch.float32)
        known = np.array([*prompt, *output], np.int32)
        counts = TokenCounts(known, len(prompt)) if params.has_penalties else None
        self.row = SamplingRow(params, len(output), EOS, sibling, counts)
        values = edited_logits(self.logits.tolist(), params, len(output), prompt, output)
        self.acceptable = acceptable(values, params, len(output), sibling)


def check(cases: Sequence[Case]) -> int:
    """Sample all cases in one batch; return how many had but one right token."""
    logits = torch.stack([case.logits for case in cases])
    token_ids, _, errors = Sampler().sample(logits, [case.row for case in cases])
    for index, case in enumerate(cases):
        if case.acceptable:
            assert index not in errors
            assert int(token_ids[index]) in case.acceptable
        else:
            assert "allow no token" in errors[index]
    return sum(len(case.acceptable) == 1 for case in cases)


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Each parameter is off, at an edge, or anything."""
    ids = st.integers(0, vocab_size - 1)
    penalty = st.sampled_from([0.0, -2.0, 2.0, 0.5]) | st.floats(-2, 2)
    fields: dict[str, Any] = {
        "max_tokens": None,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "temperature": draw(st.sampled_from([0.0, 1.0, 1e-300, 100.0]) | st.floats(0.05, 5)),
        "top_p": draw(st.sampled_from([1.0, 0.5, 0.25, 1e-9]) | st.floats(0.01, 1)),
        "top_k": draw(st.sampled_from([0, -1, 1, vocab_size, 9999999]) | st.integers(1, 24)),
        "min_p": draw(st.sampled_from([0.0, 1.0, 0.5, 5e-324]) | st.floats(0, 1)),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5, 0.01, 100.0]) | st.floats(0.5, 2)),
        "presence_penalty": draw(penalty),
        "frequency_penalty": draw(penalty),
        "logit_bias": draw(st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
        "allowed_token_ids": draw(st.none() | st.lists(ids, min_size=1, max_size=12)),
        "min_tokens": draw(st.integers(0, 5)),
        "stop_token_ids": draw(st.lists(ids, max_size=2)),
        "ignore_eos": draw(st.booleans()),
    }
    return SamplingParams(**fields)


@st.composite
def batches(draw: st.DrawFn) -> list[Case]:
    vocab_size = draw(st.integers(3, 20))
    ids = st.integers(0, vocab_size - 1)
    # Halves, for ties and for shares that lie on borders.
    value = st.integers(-16, 16).map(lambda n: n / 2) | st.floats(-50, 50, width=32)
    value |= st.just(-math.inf)
    logits = st.lists(value, min_size=vocab_size, max_size=vocab_size)
    return [
        Case(
            draw(logits.filter(lambda row: max(row) > -math.inf)),
            draw(sampling_params(vocab_size)),
            draw(st.lists(ids, min_size=1, max_size=8)),
            draw(st.lists(ids, max_size=8)),
            draw(st.integers(0, 127)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


@given(batches())
@settings(max_examples=150, deadline=None)
def test_every_combination_of_parameters_gives_the_reference_token(cases: list[Case]) -> None:
    check(cases)


EDITS: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.5, "logit_bias": {5: 3.0, 2999: -50.0}},
    {"allowed_token_ids": range(0, 3000, 3)},
)

FILTERS = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p} | edits
    for top_k, top_p, min_p, edits in itertools.product(
        (0, 40, 1500), (1.0, 0.3, 0.95), (0.0, 0.02), EDITS
    )
]


@pytest.mark.parametrize("shape", ["flat", "spread", "ties", "constant", "outliers"])
def test_large_vocabularies_give_the_reference_token(shape: str) -> None:
    rng = np.random.default_rng(7)
    cases = []
    for index, params in enumerate(FILTERS):
        logits = rng.standard_normal(3000)
        if shape == "spread":
            logits *= 6
        elif shape == "ties":
            logits = np.round(logits * 2) / 2
        elif shape == "constant":
            logits[:] = 1.25
        elif shape == "outliers":
            logits[:60] = -(10.0 ** np.arange(-22, 38))
        temperature = (0.6, 1.0, 3.0)[index % 3]
        known = rng.integers(0, 3000, 40).tolist()
        fields: dict[str, Any] = {"seed": index, "temperature": temperature, **params}
        cases.append(Case(logits.tolist(), SamplingParams(**fields), known[:20], known[20:]))
    assert check(cases) > 0.7 * len(cases)
