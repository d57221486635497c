"""Quantised KV through the whole system: hits, copies, preemption and ranks change no token."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fingerprint_llm import num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.config import KvDtype
from rayserve_paged.core.errors import InvalidInputError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * k * k + k) % 97 for k in range(17 + 8 * i)] for i in range(5)]
CODINGS: tuple[KvDtype, ...] = ("int8", "fp8")


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., Path]) -> str:
    return str(make_llama(head_dim=16))


@pytest.fixture(scope="module", params=CODINGS)
def kv_dtype(request: pytest.FixtureRequest) -> KvDtype:
    kv_dtype: KvDtype = request.param
    return kv_dtype


@pytest.fixture(scope="module")
def llama(directory: str, kv_dtype: KvDtype) -> Iterator[LLM]:
    with LLM(directory, kv_dtype=kv_dtype, shell="inprocess", block_size=4, num_blocks=256) as llm:
        yield llm
        assert num_unused_blocks(llm) == 256


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected(llama: LLM) -> list[tuple[int, ...]]:
    """Each prompt's answer, computed alone and without a hit."""
    outputs = [llama.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert outputs[0].num_cached_tokens == 0
    return [output.token_ids for output in outputs]


def test_a_prefix_hit_gives_the_tokens_that_it_gives_without(
    llama: LLM, expected: list[tuple[int, ...]]
) -> None:
    outputs = llama.generate(PROMPTS, GREEDY)
    assert all(output.num_cached_tokens >= 16 for output in outputs)
    assert [output.token_ids for output in outputs] == expected


def test_samples_that_fork_a_partly_filled_block_are_those_of_the_prompt_alone(
    llama: LLM, expected: list[tuple[int, ...]]
) -> None:
    # 17 tokens: the siblings share 4 blocks, and each copies the slot of the fifth.
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, top_k=1, ignore_eos=True)
    (output,) = llama.generate(PROMPTS[0], params)
    assert [sample.token_ids for sample in output.samples] == [expected[0]] * 3


def test_chunks_preemption_and_a_second_rank_change_no_token(
    directory: str, kv_dtype: KvDtype, expected: list[tuple[int, ...]]
) -> None:
    # The longest request needs 16 of the 24 blocks; the prompts of the first three take 21, and
    # with their outputs 30.
    with LLM(
        directory,
        kv_dtype=kv_dtype,
        shell="inprocess",
        tensor_parallel_size=2,
        block_size=4,
        num_blocks=24,
        max_num_batched_tokens=9,
        partial_reuse=True,
    ) as llm:
        assert tokens(llm) == expected
        assert num_unused_blocks(llm) == 24


def test_codes_are_no_floats(llama: LLM, directory: str) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(directory, shell="inprocess", block_size=4, num_blocks=64) as plain:
        (exact,) = plain.generate(PROMPTS[4], params)
    (coded,) = llama.generate(PROMPTS[4], params)
    assert exact.prompt_logprobs is not None
    assert coded.prompt_logprobs is not None
    assert exact.prompt_logprobs != coded.prompt_logprobs


def test_a_dtype_that_nobody_knows_and_one_for_integers_are_refused_at_once() -> None:
    with pytest.raises(InvalidInputError, match=r"model\.kv_dtype='int4' .* 'int8' or 'fp8'"):
        LLM("smollm2", kv_dtype="int4", shell="inprocess")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"model\.kv_dtype='fp8' .* fingerprint"):
        LLM("fingerprint", kv_dtype="fp8")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODINGS)
def test_ranks_on_ray_give_the_tokens_of_one_in_this_process(kv_dtype: KvDtype) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    answers = []
    for shell, width in (("inprocess", 1), ("ray", 2), ("ray", 3)):
        with LLM(
            "smollm2", kv_dtype=kv_dtype, shell=shell, tensor_parallel_size=width, num_blocks=64
        ) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1] == answers[2]
