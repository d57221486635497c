"""A real model gives exactly the tokens of a reference implementation, however it is spread.

`golden.json` names its source. SmolLM2 has 9 query and 3 KV heads, so at two ranks they hold 6 and
3 of the query heads.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.outputs import RequestOutput

GOLDEN: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("golden.json").read_text(encoding="utf-8")
)["cases"]
NUM_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Spread:
    """One way to run the model."""

    shell: str
    tp: int
    replicas: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.shell}-tp{self.tp}-x{self.replicas}-blocks-of-{self.block_size}"

    def start(self, num_blocks: int | None = None) -> LLM:
        return LLM(
            "smollm2",
            shell=self.shell,
            tensor_parallel_size=self.tp,
            num_replicas=self.replicas,
            block_size=self.block_size,
            num_blocks=num_blocks or 8192 // self.block_size,
        )


ALL = [
    Spread(shell, tp, replicas, block_size)
    for shell, tp, replicas, block_size in itertools.product(
        ("inprocess", "ray"), (1, 2, 3), (1, 2), (8, 16, 32)
    )
]
# Any two values of any two of the four occur together.
PAIRWISE = [
    Spread("inprocess", 1, 1, 8),
    Spread("ray", 1, 2, 16),
    Spread("inprocess", 1, 2, 32),
    Spread("ray", 2, 1, 8),
    Spread("inprocess", 2, 2, 16),
    Spread("ray", 2, 1, 32),
    Spread("ray", 3, 2, 8),
    Spread("inprocess", 3, 1, 16),
    Spread("ray", 3, 2, 32),
]


def answer(llm: LLM, cases: list[dict[str, Any]], num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate([case["prompt"] for case in cases], params)


def expect_golden(
    outputs: list[RequestOutput], cases: list[dict[str, Any]], num_tokens: int
) -> None:
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.prompt_token_ids) == case["prompt_ids"], case["name"]
        assert list(output.token_ids) == case["output_ids"][:num_tokens], case["name"]


def check(spread: Spread, num_tokens: int) -> None:
    """Golden tokens twice: computed, and then some on whatever prefix the first run left."""
    with spread.start() as llm:
        expect_golden(answer(llm, GOLDEN, num_tokens), GOLDEN, num_tokens)
        again = answer(llm, GOLDEN, 8)
        expect_golden(again, GOLDEN, 8)
        ledgers = llm.accounting().replicas
        assert len(ledgers) == spread.replicas
        assert {ledger.num_held_blocks for ledger in ledgers.values()} == {0}
    if spread.replicas == 1:
        for output in again:
            num_full_blocks = (len(output.prompt_token_ids) - 1) // spread.block_size
            assert output.num_cached_tokens == num_full_blocks * spread.block_size


def test_a_sample_in_this_process_gives_the_golden_tokens() -> None:
    names = ("short_fact", "code_python", "chinese", "digits_ws", "family_a")
    cases = [case for case in GOLDEN if case["name"] in names]
    with Spread("inprocess", 1, 1, 16).start() as llm:
        expect_golden(answer(llm, cases, 24), cases, 24)


def test_the_pairs_are_all_there() -> None:
    fields = [field.name for field in dataclasses.fields(Spread)]
    for one, other in itertools.combinations(fields, 2):

        def pair(spread: Spread, one: str = one, other: str = other) -> tuple[Any, Any]:
            return getattr(spread, one), getattr(spread, other)

        assert {pair(spread) for spread in PAIRWISE} == {pair(spread) for spread in ALL}
    assert len(ALL) == 36


@pytest.mark.slow
@pytest.mark.parametrize("spread", PAIRWISE, ids=str)
def test_golden_tokens_pairwise(spread: Spread) -> None:
    check(spread, num_tokens=24)


@pytest.mark.slow
def test_golden_tokens_in_a_pool_so_small_that_requests_preempt_each_other() -> None:
    # The longest prompt takes 63 blocks with its output, all of them together 213.
    with Spread("inprocess", 1, 1, 16).start(num_blocks=66) as llm:
        expect_golden(answer(llm, GOLDEN, NUM_TOKENS), GOLDEN, NUM_TOKENS)
        (ledger,) = llm.accounting().replicas.values()
        assert ledger.num_free_blocks + ledger.num_cached_blocks == 66


@pytest.mark.prove
@pytest.mark.parametrize("spread", ALL, ids=str)
def test_golden_tokens_in_every_configuration(spread: Spread) -> None:
    check(spread, NUM_TOKENS)
