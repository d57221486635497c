"""Retention through LLM, on the fingerprint model."""

import asyncio

import pytest

from rayserve_paged import LLM, RetentionRange, SamplingParams
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.fingerprint import oracle

PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
KEEP = (RetentionRange(priority=90),)


def prompt(first: int) -> list[int]:
    return list(range(first, first + 17))


@pytest.mark.parametrize("shell", ["list", "stream"])
def test_a_kept_prompt_outlives_those_that_come_after_it(shell: str) -> None:
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=10) as llm:
        if shell == "list":
            llm.generate([prompt(0), prompt(20)], PARAMS, retention=[KEEP, ()])
        else:

            async def read() -> None:
                async for _chunk in llm.stream(prompt(0), PARAMS, retention=KEEP):
                    pass

            asyncio.run(read())
        for first in (40, 60, 80):
            llm.generate(prompt(first), PARAMS)
        outputs = llm.generate(prompt(0), PARAMS) + llm.generate(prompt(40), PARAMS)
        assert [output.num_cached_tokens for output in outputs] == [16, 0]
        assert list(outputs[0].token_ids) == oracle(prompt(0), 1)


def test_one_tuple_serves_all_prompts_and_bad_ranges_are_named() -> None:
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=16) as llm:
        llm.generate([prompt(0), prompt(20)], PARAMS, retention=KEEP)
        for first in (40, 60, 80):
            llm.generate(prompt(first), PARAMS)
        outputs = llm.generate([prompt(0), prompt(20)], PARAMS)
        assert [output.num_cached_tokens for output in outputs] == [16, 16]
        with pytest.raises(InvalidInputError, match=r"retention=.* one tuple, or a list of 2"):
            llm.generate([prompt(0), prompt(20)], PARAMS, retention=[KEEP])
        with pytest.raises(InvalidInputError, match=r"retention\[0\].end=18") as refused:
            llm.generate([[1], prompt(0)], PARAMS, retention=[(), (RetentionRange(0, 18),)])
        assert refused.value.__notes__ == ["in prompts[1]"]
        with pytest.raises(InvalidInputError, match=r"retention\[0\].priority=101"):
            llm.validate(prompt(0), retention=(RetentionRange(priority=101),))
