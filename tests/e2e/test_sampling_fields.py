"""What the sampling fields do to the tokens of the fingerprint model.

The oracle computes each sequence alone and without a cache, with the logits edited by hand.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.model.fingerprint import FingerprintOracle, oracle
from rayserve_paged.model.spec import FingerprintConfig

FEW = tuple(range(65, 69))


def greedy_by_hand(
    prompt: str,
    num_tokens: int,
    edit: Callable[[torch.Tensor, Sequence[int], Sequence[int]], None],
) -> tuple[int, ...]:
    """Greedy output where `edit` changes the logits, knowing the prompt and the output so far."""
    sequence = FingerprintOracle(FingerprintConfig())
    prompt_ids = list(prompt.encode())
    for token_id in prompt_ids:
        sequence.append(token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        logits = sequence.logits().double()
        edit(logits, prompt_ids, output)
        output.append(int(logits.argmax()))
        sequence.append(output[-1])
    return tuple(output)


def only_few(logits: torch.Tensor) -> None:
    few = logits[list(FEW)].clone()
    logits[:] = -math.inf
    logits[list(FEW)] = few


def bias(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
    logits[7] += 5.0
    logits[9] += 4.5
    logits[391] -= 100.0


def allow(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
    only_few(logits)


def repeat(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
    for token_id in {*prompt, *output}:
        logits[token_id] /= 4.0
    only_few(logits)


def present(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
    for token_id in set(output):
        logits[token_id] -= 2.0
    only_few(logits)


def frequent(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
    for token_id, count in Counter(output).items():
        logits[token_id] -= 1.5 * count
    only_few(logits)


@pytest.mark.parametrize(
    ("fields", "edit"),
    [
        ({"logit_bias": {7: 5.0, 9: 4.5, 391: -100.0}}, bias),
        ({"allowed_token_ids": FEW}, allow),
        ({"allowed_token_ids": FEW, "repetition_penalty": 4.0}, repeat),
        ({"allowed_token_ids": FEW, "presence_penalty": 2.0}, present),
        ({"allowed_token_ids": FEW, "frequency_penalty": 1.5}, frequent),
    ],
)
def test_a_greedy_choice_is_made_from_the_edited_logits(
    llm: LLM, fields: dict[str, Any], edit: Callable[..., None]
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, **fields)
    # Of the few, the prompt holds A and C.
    expected = greedy_by_hand("fA ACe", 24, edit)
    unlike = greedy_by_hand("fA ACe", 24, allow if edit not in (allow, bias) else lambda *_: None)
    assert expected != unlike
    # One after the other, so that the second finds its prompt cached.
    for _ in range(2):
        assert llm.generate("fA ACe", params)[0].token_ids == expected


def test_only_the_most_likely_token_is_as_likely_as_itself(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=50.0, min_p=1.0)
    (output,) = llm.generate("min_p", params)
    assert output.token_ids == tuple(oracle(b"min_p", 16))


def test_min_p_keeps_tokens_that_are_likely_enough(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=2.0, min_p=0.5, seed=3)
    (output,) = llm.generate("min_p", params)
    sequence = FingerprintOracle(FingerprintConfig())
    for token_id in b"min_p":
        sequence.append(token_id)
    for token_id in output.token_ids:
        logits = sequence.logits()
        assert float(logits.max() - logits[token_id]) <= 2.0 * math.log(2.0) + 1e-6
        sequence.append(token_id)
    assert output.token_ids != tuple(oracle(b"min_p", 40))


def test_neighbours_with_other_fields_change_nothing(llm: LLM) -> None:
    every = [
        SamplingParams(max_tokens=10, seed=1),
        SamplingParams(max_tokens=10, seed=1, min_p=0.2, temperature=3.0),
        SamplingParams(max_tokens=10, seed=1, repetition_penalty=1.3, logit_bias={5: 9.0}),
        SamplingParams(max_tokens=10, seed=1, allowed_token_ids=FEW, frequency_penalty=-1.0),
        SamplingParams(max_tokens=10, temperature=0.0, logit_bias={5: 4.0}, logprobs=2),
        SamplingParams(max_tokens=10, temperature=0.0),
    ]
    alone = [llm.generate("the same prompt", params)[0].samples[0] for params in every]
    outputs = llm.generate(["the same prompt"] * len(every), every)
    assert [output.token_ids for output in outputs] == [sample.token_ids for sample in alone]
    assert [output.logprobs for output in outputs] == [sample.logprobs for sample in alone]
    assert len({output.token_ids for output in outputs}) == len(every)
