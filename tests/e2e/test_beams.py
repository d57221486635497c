"""Beam search through LLM: against transformers, against lists of tokens, and beside others."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_oracle import beam_search
from fingerprint_llm import NUM_BLOCKS, greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import CapacityError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.model.fingerprint import FingerprintOracle
from rayserve_paged.model.spec import FingerprintConfig
from rayserve_paged.outputs import StreamChunk

PROMPTS = [[(7 * i + 3 * k) % 100 for k in range(3 + 4 * i)] for i in range(4)]
EOS = 5


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., Path]) -> Path:
    return make_llama()


@pytest.fixture(scope="module")
def llama(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), shell="inprocess", block_size=4, num_blocks=256) as llm:
        yield llm
        assert num_unused_blocks(llm) == 256


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:  # noqa: ANN401
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")


def expected(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:  # noqa: ANN401
    """Return what transformers generates, without the padding behind an end id."""
    sequences = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        # Which does not count the end id, as `min_tokens` does.
        min_new_tokens=params.min_tokens - 1 if params.min_tokens else None,
        eos_token_id=[EOS, *params.stop_token_ids],
        pad_token_id=100,
    )
    outputs = []
    for row in sequences[:, len(prompt) :].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in (EOS, *params.stop_token_ids)]
        outputs.append(row[: next((i for i in ends if i >= params.min_tokens), len(row))])
    return outputs


SOME = [(2, False, 1.0), (4, True, 1.0), (3, "never", 1.0), (4, False, 0.0), (4, False, -1.0)]
ALL = list(itertools.product((2, 3, 4, 6), (False, True, "never"), (1.0, 0.0, 2.0, -1.0)))


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty"),
    [*SOME, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each not in SOME)],
)
def test_outputs_are_those_of_transformers(
    llama: LLM,
    reference: Any,  # noqa: ANN401
    width: int,
    early_stopping: Any,  # noqa: ANN401
    length_penalty: float,
) -> None:
    params = SamplingParams(
        n=width,
        beam_width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=12,
    )
    outputs = llama.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        found = [list(sample.token_ids) for sample in output.samples]
        assert found == expected(reference, prompt, params)


def test_end_ids_and_min_tokens_are_those_of_transformers(llama: LLM, reference: Any) -> None:  # noqa: ANN401
    ends = tuple(range(6, 40))
    num_ended = 0
    for min_tokens in (0, 4):
        params = SamplingParams(
            n=4, beam_width=4, max_tokens=10, min_tokens=min_tokens, stop_token_ids=ends
        )
        for prompt, output in zip(PROMPTS, llama.generate(PROMPTS, params), strict=True):
            found = [list(sample.token_ids) for sample in output.samples]
            assert found == expected(reference, prompt, params)
            assert min(map(len, found)) >= min_tokens
            num_ended += sum(s.finish_reason is FinishReason.STOP for s in output.samples)
    assert num_ended > 8


def test_the_sum_of_log_probabilities_is_that_of_the_model(llama: LLM, reference: Any) -> None:  # noqa: ANN401
    params = SamplingParams(n=3, beam_width=3, max_tokens=9, logprobs=0)
    (output,) = llama.generate(PROMPTS[1], params)
    for sample in output.samples:
        ids = torch.tensor([[*PROMPTS[1], *sample.token_ids]])
        with torch.no_grad():
            logprobs = reference(ids).logits[0].double().log_softmax(-1)
        start = len(PROMPTS[1])
        each = [float(logprobs[start + i - 1, token]) for i, token in enumerate(sample.token_ids)]
        assert sample.logprobs is not None
        assert [p.logprob for p in sample.logprobs] == pytest.approx(each, abs=1e-4)
        assert sample.cumulative_logprob == math.fsum(p.logprob for p in sample.logprobs)
    sums = [sample.cumulative_logprob or 0.0 for sample in output.samples]
    assert sums == sorted(sums, reverse=True), "of equal length, the most likely is the best"


# --- the fingerprint model --------------------------------------------------------------------


def fingerprint_logprobs(token_ids: Sequence[int]) -> list[float]:
    state = FingerprintOracle(FingerprintConfig())
    for token_id in token_ids:
        state.append(token_id)
    return state.logits().double().log_softmax(-1).tolist()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [64, 26])
def test_beams_beside_forks_and_others_find_what_they_find_alone(
    pipeline_depth: int, num_blocks: int
) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6, 7, 8], [200], [1, 2, 3]]
    searches = [
        SamplingParams(n=width, beam_width=width, max_tokens=8, length_penalty=penalty)
        for width, penalty in ((4, 1.0), (2, 0.0), (3, 2.0))
    ]
    others = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(n=3, seed=1)]
    with LLM(
        "fingerprint",
        shell="inprocess",
        block_size=4,
        num_blocks=num_blocks,
        pipeline_depth=pipeline_depth,
        max_decode_steps=4,
    ) as llm:
        outputs = llm.generate(prompts, [*searches, *others])
        (alone,) = llm.generate(prompts[4], others[1])
        assert num_unused_blocks(llm) == num_blocks
    for prompt, params, output in zip(prompts, searches, outputs, strict=False):
        found, _num_steps = beam_search(fingerprint_logprobs, prompt, params, ())
        assert [s.token_ids for s in output.samples] == [one.token_ids for one in found]
        assert [s.cumulative_logprob for s in output.samples] == pytest.approx(
            [one.cumulative for one in found]
        )
    assert outputs[3].token_ids == greedy(prompts[3], 12)
    assert [s.token_ids for s in outputs[4].samples] == [s.token_ids for s in alone.samples]


def test_a_stream_of_beams_comes_as_one_chunk_for_each_output(llm: LLM) -> None:
    async def read() -> list[StreamChunk]:
        params = SamplingParams(n=2, beam_width=3, max_tokens=5)
        return [chunk async for chunk in llm.stream([1, 2, 3], params)]

    chunks = asyncio.run(read())
    assert [(chunk.sibling, len(chunk.token_ids)) for chunk in chunks] == [(0, 5), (1, 5)]
    output = chunks[-1].output
    assert output is not None
    assert [sample.token_ids for sample in output.samples] == [c.token_ids for c in chunks]
    assert [sample.tpot_s for sample in output.samples] == [None, None]
    assert output.logprobs is None
    assert output.cumulative_logprob is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beams_draw_nothing_whatever_the_temperature_says(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(beam_width=3, temperature=temperature, seed=seed, max_tokens=6)
        for seed in (1, 2)
    ]
    one, other = llm.generate([[1, 2, 3]] * 2, params)
    assert one.token_ids == other.token_ids
    assert {p.temperature for p in params} == {0.0}


def test_a_search_that_can_never_fit_is_refused_with_the_numbers(llm: LLM) -> None:
    params = SamplingParams(beam_width=8, max_tokens=200)
    with pytest.raises(CapacityError) as refused:
        llm.generate([1, 2, 3, 4, 5], params)
    # One full block of prompt, and 50 more for each beam.
    assert refused.value.num_blocks_needed == 1 + 8 * 50
    assert refused.value.num_blocks == NUM_BLOCKS


@pytest.mark.slow
def test_the_best_of_four_beams_is_at_least_as_likely_as_the_greedy_answer() -> None:
    prompts = ["The capital of France is", "Two plus two is", "Once upon a time"]
    common = {"max_tokens": 24, "ignore_eos": True}
    with LLM("smollm2", shell="inprocess", num_blocks=128) as llm:
        first = llm.generate(prompts, SamplingParams(temperature=0.0, logprobs=0, **common))
        best = llm.generate(prompts, SamplingParams(n=4, beam_width=4, **common))
        assert num_unused_blocks(llm) == 128
    for one, other in zip(first, best, strict=True):
        assert one.cumulative_logprob is not None
        assert other.cumulative_logprob is not None
        assert other.cumulative_logprob >= one.cumulative_logprob - 1e-4
        assert len({sample.token_ids for sample in other.samples}) == 4
    assert any(one.token_ids != other.token_ids for one, other in zip(first, best, strict=True))
