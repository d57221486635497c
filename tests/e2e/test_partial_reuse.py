"""Reuse of leading slots through `LLM`, on the model whose output shows any wrong block."""

import pytest
from fingerprint_llm import greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams

NUM_BLOCKS = 64


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_second_turn_takes_all_that_the_first_has_computed(
    tensor_parallel_size: int, pipeline_depth: int
) -> None:
    llm = LLM(
        "fingerprint",
        shell="inprocess",
        tensor_parallel_size=tensor_parallel_size,
        block_size=4,
        num_blocks=NUM_BLOCKS,
        pipeline_depth=pipeline_depth,
        partial_reuse=True,
    )
    params = SamplingParams(max_tokens=9, temperature=0.0)
    with llm:
        prompt, num_cached = [3, 1, 4, 1, 5, 9], 0
        for turn in range(3):
            (output,) = llm.generate([prompt], params)
            assert output.token_ids == greedy(prompt, 9)
            assert output.num_cached_tokens == num_cached
            # The last output has no KV yet.
            num_cached = len(prompt) + 9 - 1
            prompt = [*prompt, *output.token_ids, 70 + turn, 80]
        diverging = [3, 1, 4, 1, 5, 8, 8]
        (output,) = llm.generate([diverging], params)
        assert (output.num_cached_tokens, output.token_ids) == (5, greedy(diverging, 9))
        assert num_unused_blocks(llm) == NUM_BLOCKS


def test_of_prompts_that_come_together_one_is_computed() -> None:
    prompt = list(range(41))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=NUM_BLOCKS) as llm:
        outputs = llm.generate([[99], prompt, prompt, prompt], params)[1:]
    assert {output.token_ids for output in outputs} == {greedy(prompt, 2)}
    # Whether they came while the first was being computed or after it.
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 40, 40]
