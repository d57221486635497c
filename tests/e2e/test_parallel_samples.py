"""Parallel samples of the fingerprint model: each is what it would be alone and without a cache.

The oracle draws with the sampler, whose draws have tests of their own.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fingerprint_llm import NUM_BLOCKS, num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import InvalidInputError, RequestFailedError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.model.fingerprint import FingerprintOracle
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig
from rayserve_paged.model.token_counts import TokenCounts
from rayserve_paged.outputs import RequestOutput, StreamChunk

FOUR = SamplingParams(n=4, max_tokens=12, temperature=1.3, seed=42)
# Ten blocks of 4 slots; the last is not full.
PROMPT = "thirty-nine characters, of which 3 over"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One sample, as the oracle draws it."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float


def drawn(prompt: str, params: SamplingParams, sibling: int = 0) -> Drawn:
    sequence = FingerprintOracle(FingerprintConfig())
    known = list(prompt.encode())
    for token_id in known:
        sequence.append(token_id)
    assert params.max_tokens is not None
    logprobs = []
    for position in range(params.max_tokens):
        counts = None
        if params.has_penalties:
            counts = TokenCounts(np.array(known, np.int32), len(prompt))
        row = SamplingRow(params, position, sibling=sibling, counts=counts)
        logits = sequence.logits()
        token_ids, _logprobs, errors = Sampler().sample(logits[None], [row])
        assert not errors
        known.append(int(token_ids[0]))
        logprobs.append(float(torch.log_softmax(logits.double(), 0)[known[-1]]))
        sequence.append(known[-1])
    return Drawn(tuple(known[len(prompt) :]), math.fsum(logprobs))


def all_drawn(prompt: str, params: SamplingParams) -> list[tuple[int, ...]]:
    return [drawn(prompt, params, sibling).token_ids for sibling in range(params.num_siblings)]


def of(output: RequestOutput) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in output.samples]


# --- parallel samples -----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["x", "four", PROMPT, PROMPT + "!"])
def test_siblings_differ_and_are_each_what_they_would_be_alone(llm: LLM, prompt: str) -> None:
    expected = all_drawn(prompt, FOUR)
    assert len(set(expected)) == 4
    # One after the other, so that the second finds its prompt cached.
    for _ in range(2):
        (output,) = llm.generate(prompt, FOUR)
        assert of(output) == expected
        assert [sample.sibling for sample in output.samples] == [0, 1, 2, 3]
        assert {sample.finish_reason for sample in output.samples} == {FinishReason.LENGTH}
        assert output.error is None


@pytest.mark.parametrize(
    "fields",
    [
        {"pipeline_depth": 2},
        {"max_decode_steps": 8},
        {"tensor_parallel_size": 2, "pipeline_depth": 2},
        {"max_num_seqs": 4, "max_num_batched_tokens": 8},
        # Less than a third of what all of them need at once.
        {"num_blocks": 20},
        {"num_blocks": 20, "pipeline_depth": 2},
    ],
)
def test_siblings_are_the_same_however_they_are_run(fields: dict[str, Any]) -> None:
    kinds = [
        FOUR,
        dataclasses.replace(FOUR, temperature=0.0, n=2),
        dataclasses.replace(FOUR, frequency_penalty=1.0, repetition_penalty=1.2),
        dataclasses.replace(FOUR, n=3, min_p=0.1, logprobs=1),
        dataclasses.replace(FOUR, n=1),
    ]
    prompts = [PROMPT, PROMPT, "another", PROMPT + " and more", "one alone"]
    fields = {"num_blocks": NUM_BLOCKS, **fields}
    with LLM("fingerprint", shell="inprocess", block_size=4, **fields) as llm:
        outputs = llm.generate(prompts, kinds)
        expected = [all_drawn(p, params) for p, params in zip(prompts, kinds, strict=True)]
        assert [of(output) for output in outputs] == expected
        assert num_unused_blocks(llm) == fields["num_blocks"]


def test_the_flat_fields_are_those_of_the_first_sample(llm: LLM) -> None:
    (output,) = llm.generate("flat", dataclasses.replace(FOUR, logprobs=1))
    first = output.samples[0]
    assert (output.token_ids, output.text) == (first.token_ids, first.text)
    assert (output.finish_reason, output.tpot_s) == (first.finish_reason, first.tpot_s)
    assert (output.logprobs, output.cumulative_logprob) == (
        first.logprobs,
        first.cumulative_logprob,
    )


def test_siblings_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=100, seed=1)
    prompt = PROMPT + "!"
    assert len(prompt) == 40

    async def most_saved() -> int:
        most = 0
        async with contextlib.aclosing(llm.stream(prompt, params)) as chunks:
            async for chunk in chunks:
                if chunk.output is None:
                    most = max(most, llm.accounting().prefix_sharing_saved_slots)
                if most:
                    break
        return most

    assert asyncio.run(most_saved()) == 3 * 40


def test_a_stop_string_ends_one_sibling_and_not_the_others(llm: LLM) -> None:
    params = dataclasses.replace(FOUR, allowed_token_ids=range(65, 91), max_tokens=30)
    (whole,) = llm.generate("stop", params)
    texts = [sample.text for sample in whole.samples]
    stop = next(
        texts[1][start : start + 3]
        for start in range(5, 27)
        if not any(texts[1][start : start + 3] in text for text in texts if text != texts[1])
    )
    (output,) = llm.generate("stop", dataclasses.replace(params, stop=stop))
    at = texts[1].index(stop)
    assert [s.text for s in output.samples] == [texts[0], texts[1][:at], texts[2], texts[3]]
    reasons = [sample.finish_reason for sample in output.samples]
    assert reasons == ["length", "stop", "length", "length"]
    assert len(output.samples[1].token_ids) == at + 3


def test_a_stop_id_ends_one_sibling_and_not_the_others(llm: LLM) -> None:
    expected = all_drawn("stop id", FOUR)
    stop_id = next(i for i in expected[2] if sum(i in ids for ids in expected) == 1)
    (output,) = llm.generate("stop id", dataclasses.replace(FOUR, stop_token_ids=[stop_id]))
    cut = expected[2][: expected[2].index(stop_id) + 1]
    assert of(output) == [expected[0], expected[1], cut, expected[3]]
    reasons = [sample.finish_reason for sample in output.samples]
    assert reasons == ["length", "length", "stop", "length"]


# --- streams of several samples -------------------------------------------------------------


async def collect(llm: LLM, prompt: str, params: SamplingParams) -> list[StreamChunk]:
    return [chunk async for chunk in llm.stream(prompt, params)]


def test_the_chunks_of_each_sibling_are_its_sample(llm: LLM) -> None:
    chunks = asyncio.run(collect(llm, PROMPT, FOUR))
    output = chunks[-1].output
    assert output is not None
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert of(output) == all_drawn(PROMPT, FOUR)
    for sample in output.samples:
        mine = [chunk for chunk in chunks if chunk.sibling == sample.sibling]
        assert sum((chunk.token_ids for chunk in mine), ()) == sample.token_ids
        assert "".join(chunk.text for chunk in mine) == sample.text
        reasons = [chunk.finish_reason for chunk in mine]
        assert reasons == [None] * (len(mine) - 1) + [FinishReason.LENGTH]


def test_cancelling_a_request_ends_all_of_its_samples(llm: LLM) -> None:
    endless = dataclasses.replace(FOUR, max_tokens=100)

    async def read() -> RequestOutput | None:
        output = None
        async for chunk in llm.stream("cancel us", endless, request_id="ours"):
            llm.cancel("ours")
            output = chunk.output
        return output

    output = asyncio.run(read())
    assert output is not None
    assert output.error is None
    for ids, sample in zip(all_drawn("cancel us", endless), output.samples, strict=True):
        assert sample.finish_reason is FinishReason.CANCELLED
        assert sample.error is None
        assert sample.token_ids == ids[: len(sample.token_ids)]
        assert len(sample.token_ids) < 100


def test_a_sample_that_fails_is_told_after_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sampler.sample

    def raise_for_one(
        self: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[Any, Any, Any]:
        if any(row.sibling == 1 and row.output_position == 3 for row in rows):
            raise ValueError("poisoned row")
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", raise_for_one)
    expected = all_drawn_but(PROMPT, FOUR, 1)
    (output,) = llm.generate(PROMPT, FOUR, raise_on_error=False)
    reason = "sampling raised ValueError: poisoned row"
    assert output.error == reason
    assert [s.error for s in output.samples] == [None, reason, None, None]
    assert len(output.samples[1].token_ids) == 3
    assert [s.token_ids for s in output.samples if s.error is None] == expected
    with pytest.raises(RequestFailedError, match="poisoned row"):
        llm.generate(PROMPT, FOUR)

    with pytest.raises(RequestFailedError, match="poisoned row"):
        asyncio.run(collect(llm, PROMPT, FOUR))
    # A sample that failed is never the best.
    best = dataclasses.replace(FOUR, n=3, best_of=4)
    (output,) = llm.generate(PROMPT, best, raise_on_error=False)
    assert {s.sibling for s in output.samples} == {0, 2, 3}
    assert output.error == reason


def all_drawn_but(prompt: str, params: SamplingParams, missing: int) -> list[tuple[int, ...]]:
    siblings = (s for s in range(params.num_siblings) if s != missing)
    return [drawn(prompt, params, sibling).token_ids for sibling in siblings]


# --- the best of several --------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_best_are_those_with_the_highest_cumulative_logprob(
    llm: LLM, logprobs: int | None
) -> None:
    params = dataclasses.replace(FOUR, n=2, best_of=5, logprobs=logprobs)
    (output,) = llm.generate(PROMPT, params)
    every = [drawn(PROMPT, params, sibling) for sibling in range(5)]
    best = sorted(range(5), key=lambda sibling: -every[sibling].cumulative_logprob)[:2]
    assert best != [0, 1]
    assert [sample.sibling for sample in output.samples] == best
    assert of(output) == [every[sibling].token_ids for sibling in best]
    for sibling, sample in zip(best, output.samples, strict=True):
        expected = every[sibling].cumulative_logprob
        assert sample.cumulative_logprob == pytest.approx(expected, abs=1e-4)
        # Asked for by the ranking alone, they are not shown.
        assert (sample.logprobs is None) == (logprobs is None)


def test_the_best_of_just_as_many_are_all_in_the_order_of_their_draws(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, dataclasses.replace(FOUR, best_of=4))
    assert of(output) == all_drawn(PROMPT, FOUR)
    assert output.cumulative_logprob is None


def test_the_best_of_several_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="best_of=3 is not accepted: expected n=1 for a st"):
        llm.stream("x", SamplingParams(best_of=3))
    params = SamplingParams(n=3, best_of=3, max_tokens=2)
    assert {chunk.sibling for chunk in asyncio.run(collect(llm, "x", params))} == {0, 1, 2}


@pytest.mark.parametrize(
    ("n", "best_of", "accepted"),
    [
        (2, 1, "an integer from n=2 to 128"),
        (1, 129, "an integer from n=1 to 128"),
        (1, 2.0, "an integer from n=1"),
    ],
)
def test_best_of_is_at_least_n_and_bounded(n: int, best_of: object, accepted: str) -> None:
    with pytest.raises(InvalidInputError, match=accepted):
        SamplingParams(n=n, best_of=best_of)  # type: ignore[arg-type]


def test_more_samples_than_run_at_once_are_refused_with_the_numbers(llm: LLM) -> None:
    assert llm.limits.max_num_seqs == 64
    with pytest.raises(InvalidInputError, match="n=65 is not accepted: expected at most 64"):
        llm.generate("x", SamplingParams(n=65))
    with pytest.raises(InvalidInputError, match="best_of=65 is not accepted: expected at most 64"):
        llm.generate("x", SamplingParams(n=2, best_of=65))
