"""Bias, penalties, allowed and withheld ids: what they do to one row, and to no other."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.logit_processors import process_logits
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import LogitEdits, SamplingRow
from rayserve_paged.model.token_counts import TokenCounts

PROMPT = (1, 2, 2)


def row(output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **fields: Any) -> SamplingRow:  # noqa: ANN401
    params = SamplingParams(**{"temperature": 0.0, "seed": 4} | fields)
    counts = TokenCounts(np.array([*PROMPT, *output], np.int32), len(PROMPT))
    return SamplingRow(params, len(output), eos, counts=counts)


def edited(logits: list[float], row: SamplingRow) -> list[float]:
    values = np.array([logits])
    process_logits(values, [row])
    return values[0].tolist()


LOGITS = [1.0, 2.0, -3.0, 4.0, -5.0]


def test_without_parameters_the_logits_stay_as_they_are() -> None:
    assert edited(LOGITS, row((3, 3))) == LOGITS
    assert not row((3, 3)).is_edited


def test_a_bias_is_added_to_its_token_alone() -> None:
    assert edited(LOGITS, row(logit_bias={4: 100, 0: -0.5})) == [0.5, 2.0, -3.0, 4.0, 95.0]


def test_the_repetition_penalty_makes_tokens_of_prompt_and_output_less_likely() -> None:
    # 1 and 2 are in the prompt, 4 and 1 in the output; how often does not matter.
    found = edited(LOGITS, row((4, 1, 4), repetition_penalty=2.0))
    assert found == [1.0, 1.0, -6.0, 4.0, -10.0]
    assert edited(LOGITS, row((), repetition_penalty=0.5)) == [1.0, 4.0, -1.5, 4.0, -5.0]


def test_presence_is_of_the_output_alone_and_once() -> None:
    assert edited(LOGITS, row((4, 1, 4), presence_penalty=0.5)) == [1.0, 1.5, -3.0, 4.0, -5.5]
    assert edited(LOGITS, row((), presence_penalty=0.5)) == LOGITS


def test_frequency_is_of_the_output_alone_and_each_time() -> None:
    assert edited(LOGITS, row((4, 1, 4), frequency_penalty=0.5)) == [1.0, 1.5, -3.0, 4.0, -6.0]
    assert edited(LOGITS, row((4, 1, 4), frequency_penalty=-2)) == [1.0, 4.0, -3.0, 4.0, -1.0]


def test_the_bias_comes_before_the_penalties_and_repetition_before_the_others() -> None:
    params: dict[str, Any] = {"repetition_penalty": 2.0, "frequency_penalty": 0.25}
    found = edited(LOGITS, row((4, 4), logit_bias={4: 13.0}, presence_penalty=1.0, **params))
    assert found[4] == (-5.0 + 13.0) / 2.0 - 2 * 0.25 - 1.0


def test_what_is_not_allowed_is_never_chosen_whatever_its_bias() -> None:
    only = row(allowed_token_ids=[4, 2, 2], logit_bias={3: 100})
    assert edited(LOGITS, only) == [-math.inf, -math.inf, -3.0, -math.inf, -5.0]
    drawn = [
        SamplingRow(SamplingParams(seed=1, temperature=50, allowed_token_ids=[4, 2]), position)
        for position in range(200)
    ]
    token_ids, _, _ = Sampler().sample(torch.tensor([LOGITS]).expand(200, -1), drawn)
    assert set(token_ids.tolist()) == {2, 4}


def test_ids_that_end_the_output_are_withheld_even_where_they_are_biased_or_allowed() -> None:
    fields = {"min_tokens": 3, "stop_token_ids": [3], "allowed_token_ids": [0, 1, 3]}
    held = row((0,), (1,), logit_bias={3: 100, 1: 100}, **fields)
    assert edited(LOGITS, held) == [1.0, *[-math.inf] * 4]
    assert edited(LOGITS, row((0, 0), (1,), **fields)) == [1.0, 2.0, -math.inf, 4.0, -math.inf]


def test_greedy_choice_sees_all_edits() -> None:
    logits = torch.tensor([LOGITS])
    choices = [
        (row(), 3),
        (row(logit_bias={2: 8}), 2),
        (row(allowed_token_ids=[0, 4]), 0),
        (row((3,), presence_penalty=2, logit_bias={3: -0.5}), 1),
        (row((3, 3), frequency_penalty=1.5), 1),
        (row((3,), repetition_penalty=2.5), 3),
        (row((3,), repetition_penalty=4.5), 0),
    ]
    token_ids, _, errors = Sampler().sample(
        logits.expand(len(choices), -1), [chooser for chooser, _ in choices]
    )
    assert not errors
    assert token_ids.tolist() == [expected for _, expected in choices]


def test_logprobs_are_the_models_and_name_no_impossible_token() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf, 4.0]])
    asked = row(logit_bias={0: 9}, allowed_token_ids=[0], logprobs=20)
    token_ids, logprobs, _ = Sampler().sample(logits, [asked])
    reference = torch.log_softmax(logits.double(), dim=-1)[0]
    assert token_ids.tolist() == [0]
    assert logprobs[0].logprob == pytest.approx(float(reference[0]))
    assert [token_id for token_id, _ in logprobs[0].top] == [3, 1, 0]


def test_the_logits_given_are_not_modified() -> None:
    logits = torch.tensor([LOGITS])
    fields = {"logit_bias": {0: 1}, "allowed_token_ids": [0, 1], "repetition_penalty": 2}
    Sampler().sample(logits, [row(**fields)])
    Sampler().sample(logits, [row(temperature=1.0, top_p=0.5, logprobs=3, **fields)])
    assert logits.tolist() == [LOGITS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_edited_fail_alone(temperature: float) -> None:
    logits = torch.tensor([LOGITS] * 7)
    logits[5, 2] = math.nan
    heat: dict[str, Any] = {"temperature": temperature, "seed": 1}
    rows = [
        row(**heat),
        row(logit_bias={5: 1}, **heat),
        row(allowed_token_ids=[7], **heat),
        SamplingRow(SamplingParams(presence_penalty=1, **heat), 0),
        SamplingRow(SamplingParams(presence_penalty=1, **heat), 1, counts=row().counts),
        row(allowed_token_ids=[0], **heat),
        row(allowed_token_ids=[3], min_tokens=2, stop_token_ids=[3], **heat),
    ]
    token_ids, _, errors = Sampler().sample(logits, rows)
    assert errors == {
        1: "id 5 is outside the vocabulary of 5",
        2: "id 7 is outside the vocabulary of 5",
        3: "penalties need the tokens so far",
        4: "penalties know 0 output tokens at output position 1",
        5: "the logits hold NaN or infinity, or allow no token",
        6: "the logits hold NaN or infinity, or allow no token",
    }
    assert token_ids[0] == Sampler().sample(logits[:1], rows[:1])[0][0]


def test_edits_made_before_are_those_that_are_made_from_the_parameters() -> None:
    params = SamplingParams(logit_bias={4: 1.0}, allowed_token_ids=[4, 1], min_tokens=2)
    made = LogitEdits.of(params, (3,))
    assert SamplingRow(params, 0, (3,), edits=made).logit_edits is made
    again = SamplingRow(params, 0, (3,)).logit_edits
    assert (again.bias_ids.tolist(), again.biases.tolist()) == ([4], [1.0])
    assert again.allowed_ids is not None
    assert (again.allowed_ids.tolist(), again.end_ids.tolist()) == ([1, 4], [3])
    assert again.max_id == 4


def test_edited_rows_are_bitwise_equal_in_any_batch() -> None:
    rng = np.random.default_rng(3)
    vocab_size, num_rows = 5003, 28
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 3)
    choices: list[dict[str, Any]] = [
        {"temperature": 0.8, "repetition_penalty": 1.3},
        {"temperature": 1.7, "top_p": 0.9, "presence_penalty": 1.0},
        {"temperature": 1.0, "top_k": 700, "frequency_penalty": -0.7},
        {"temperature": 2.5, "min_p": 0.01, "allowed_token_ids": range(0, 5003, 3)},
        {"temperature": 0.0, "logit_bias": {7: 9.0}, "presence_penalty": 2.0},
        {"temperature": 1.0},
        {"temperature": 0.0},
    ]
    rows = []
    for index in range(num_rows):
        known = rng.integers(0, vocab_size, 300).astype(np.int32)
        params = SamplingParams(seed=index, logprobs=5, **choices[index % len(choices)])
        rows.append(SamplingRow(params, 200, (1,), index, TokenCounts(known, 100)))
    token_ids, logprobs, errors = Sampler().sample(logits, rows)
    assert not errors
    for order in (list(range(num_rows))[::-1], [5], [3, 11], list(range(0, num_rows, 3))):
        ids, found, _ = Sampler().sample(logits[order], [rows[index] for index in order])
        assert ids.tolist() == [token_ids[index] for index in order]
        assert [found[place] for place in range(len(order))] == [logprobs[i] for i in order]
