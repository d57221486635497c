"""Log-probabilities of prompts, from the Python API down to ranks of several widths."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from fingerprint_llm import num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.model.fingerprint import FingerprintOracle, oracle
from rayserve_paged.model.sampler import token_logprobs
from rayserve_paged.model.spec import FingerprintConfig
from rayserve_paged.model.token_filters import Scratch

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3)
PROMPT = [(37 * place + 11) % 1000 for place in range(33)]
SHARING = [*PROMPT[:32], 999]


def expected_scores(prompt: Sequence[int], count: int) -> tuple[TokenLogprobs | None, ...]:
    """The scores of a prompt on the fingerprint model, computed from its tokens alone."""
    config = FingerprintConfig()
    state, scratch = FingerprintOracle(config), Scratch(config.vocab_size)
    scores: list[TokenLogprobs | None] = [None]
    for token_id, following in itertools.pairwise(prompt):
        state.append(token_id)
        logits = state.logits().numpy().astype(np.float64)
        scores.append(token_logprobs(logits, following, count, scratch))
    return tuple(scores)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_b59_scores_are_exact_through_chunks_hits_and_ranks(width: int) -> None:
    with LLM(
        "fingerprint",
        shell="inprocess",
        tensor_parallel_size=width,
        block_size=16,
        num_blocks=64,
        max_num_batched_tokens=10,
        pipeline_depth=2,
    ) as llm:
        for prompt in (PROMPT, PROMPT, SHARING):
            (output,) = llm.generate(prompt, PARAMS)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == 33
            assert output.prompt_logprobs[0] is None
            assert output.prompt_logprobs == expected_scores(prompt, 3)
            assert output.token_ids == tuple(oracle(prompt, 4))
            assert output.num_cached_tokens == 0
        # What they computed serves others, of which it costs nothing.
        (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0))
        assert (plain.num_cached_tokens, plain.prompt_logprobs) == (32, None)
        assert num_unused_blocks(llm) == 64


def test_requests_of_all_kinds_are_scored_in_one_batch_under_preemption() -> None:
    with LLM(
        "fingerprint",
        shell="inprocess",
        block_size=4,
        num_blocks=14,
        max_num_batched_tokens=12,
        max_num_seqs=8,
    ) as llm:
        sizes = [33, 1, 2, 20, 9, 33, 17, 30]
        counts = [0, 5, 1, None, 20, 2, 3, None]
        prompts = [[7 * i + place for place in range(size)] for i, size in enumerate(sizes)]
        params = [
            SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=count)
            for count in counts
        ]
        outputs = llm.generate(prompts, params)
        for prompt, count, output in zip(prompts, counts, outputs, strict=True):
            expected = None if count is None else expected_scores(prompt, count)
            assert output.prompt_logprobs == expected
            assert output.token_ids == tuple(oracle(prompt, 12))


def test_samples_share_the_scores_of_their_prompt() -> None:
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=64) as llm:
        params = SamplingParams(n=2, best_of=4, max_tokens=3, seed=5, prompt_logprobs=2)
        (output,) = llm.generate(PROMPT, params)
        assert output.prompt_logprobs == expected_scores(PROMPT, 2)
        assert len(output.samples) == 2


@pytest.mark.parametrize("value", [-1, 21, True])
def test_the_number_of_prompt_logprobs_is_bounded(value: int) -> None:
    with pytest.raises(InvalidInputError, match=f"prompt_logprobs={value} .* from 0 to 20"):
        SamplingParams(prompt_logprobs=value)
