"""Windows and sinks through LLM, on the fingerprint model."""

import asyncio
from collections.abc import Iterator

import pytest
from fingerprint_llm import num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.model.fingerprint import oracle

NUM_BLOCKS = 12
PARAMS = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.fixture(scope="module")
def small_llm() -> Iterator[LLM]:
    """48 slots, fewer than any of the outputs below has."""
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=NUM_BLOCKS) as llm:
        yield llm
        assert num_unused_blocks(llm) == NUM_BLOCKS


def test_outputs_longer_than_the_pool_run_behind_windows(small_llm: LLM) -> None:
    prompts = [[1, 2, 3], list(range(70)), [9] * 5]
    windows, sinks = [10, 8, 1], [0, 3, 5]
    outputs = small_llm.generate(prompts, PARAMS, windows=windows, num_sink_tokens=sinks)
    for output, prompt, window, num_sinks in zip(outputs, prompts, windows, sinks, strict=True):
        expected = oracle(prompt, 100, window=AttentionWindow(window, num_sinks))
        assert list(output.token_ids) == expected


def test_one_window_serves_all_prompts_and_none_is_full_attention(small_llm: LLM) -> None:
    few = SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [[5, 6, 7], [8, 9]]
    for windows, window in ((6, AttentionWindow(6, 2)), (None, AttentionWindow())):
        outputs = small_llm.generate(
            prompts, few, windows=windows, num_sink_tokens=window.num_sink_tokens
        )
        for output, prompt in zip(outputs, prompts, strict=True):
            assert list(output.token_ids) == oracle(prompt, 20, window=window)
    (output,) = small_llm.generate(
        [5, 6, 7], few, scopes=RequestScope(window=AttentionWindow(6, 2))
    )
    assert list(output.token_ids) == oracle([5, 6, 7], 20, window=AttentionWindow(6, 2))


def test_a_stream_takes_a_window(small_llm: LLM) -> None:
    async def read() -> list[int]:
        chunks = small_llm.stream([4, 2], PARAMS, window=7, num_sink_tokens=1)
        return [token async for chunk in chunks for token in chunk.token_ids]

    assert asyncio.run(read()) == oracle([4, 2], 100, window=AttentionWindow(7, 1))


def test_a_windowed_prompt_finds_what_one_of_the_same_window_left(small_llm: LLM) -> None:
    prompt = list(range(100, 121))
    few = SamplingParams(max_tokens=2, temperature=0.0)
    cached = [
        small_llm.generate(prompt, few, windows=window)[0].num_cached_tokens
        for window in (9, 9, 10, None)
    ]
    assert cached == [0, 20, 0, 0]


def test_what_is_no_window_is_refused_before_anything_is_submitted(small_llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="window=0 is not accepted"):
        small_llm.generate([1], PARAMS, windows=0)
    with pytest.raises(InvalidInputError, match=r"windows=.*one int or None, or a list of 2"):
        small_llm.generate([[1], [2]], PARAMS, windows=[4])
    with pytest.raises(InvalidInputError, match="windows='4' is not accepted"):
        small_llm.generate([1], PARAMS, windows="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInputError, match="num_sink_tokens=3 is not accepted"):
        small_llm.validate([1], PARAMS, num_sink_tokens=3)
    with pytest.raises(InvalidInputError, match="None where the scope has a window"):
        small_llm.validate([1], PARAMS, scope=RequestScope(window=AttentionWindow(4)), window=3)
    with pytest.raises(CapacityError):
        small_llm.generate([1], PARAMS, windows=46)
    small_llm.validate([1], PARAMS, window=45)
